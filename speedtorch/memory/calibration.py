"""Measures once per machine the time to copy a row, for the choice of path in cost_model.py.

Each pair of machine and GPU model has one file of results. The file is read when torch first uses a
GPU, because before that the GPU is unknown and no path is chosen. If the file is missing, the first
HostTable of 1 GiB or more in managed, registered or shared memory measures the times. Until then
the library uses the times of an H200.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import platform
import re
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from speedtorch.files.system_calls import read_file
from speedtorch.memory import host_memory
from speedtorch.memory.cost_model import forced_path, use_costs
from speedtorch.ops.functions import _ops, pinned_gather, pinned_scatter
from speedtorch.torch_internals import call_with_first_gpu

__all__ = [
    "calibrate",
    "calibrate_once",
    "load_costs",
    "load_costs_with_first_gpu",
    "measure_link",
    "saved_link_gbps",
]

_log = logging.getLogger("speedtorch")

# Incremented when the meaning of the results changes. Part of the file's name, so that two versions
# of the library keep their own results.
VERSION = 1
# A table of this size justifies a calibration of a few seconds.
WORTH_BYTES = 1 << 30
MOST_TABLE_BYTES = 8 << 30
_MOST_FILE_BYTES = 1 << 16
_KINDS: tuple[host_memory.HostMemoryKind, ...] = ("managed", "registered")
_ROW_BYTES = (64, 512, 1536)  # kMeasuredRowBytes in csrc/move/cost_model.cpp
_BATCH = 131_072
_REPETITIONS = 5
# The parts of the list of costs, in the order of `Costs` in csrc/move/cost_model.cpp.
_ROW_NS = slice(None, -6)  # nanoseconds per row, [kind, direction, order, row length]
_DISTINCT, _ORDERED = slice(-6, -4), slice(-4, -2)  # planning: us per batch, ns per id
_LINK_GBPS = slice(-2, None)  # to the GPU, and back

_gpu = torch.cuda.get_device_name


def cache_file(gpu: str) -> Path | None:
    """The file of the results for this machine, GPU and VERSION; None without a home folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = base if os.path.isabs(base) else os.path.expanduser("~/.cache")
    if not os.path.isabs(folder):
        return None
    machine = re.sub(r"[^\w.-]+", "-", f"{platform.node() or 'machine'}-{gpu}")
    return Path(folder) / "speedtorch" / f"costs-{VERSION}-{machine}.json"


def calibrate(*, progress: bool = True) -> dict[str, Any]:
    """Measures the time to copy rows on this machine and saves it in the user's cache folder.

    Takes a few seconds, up to 8 GiB of host memory and 0.5 GiB on the current GPU. Ops then choose
    their paths by these results, in later processes too. If the file cannot be written, a warning
    is logged and only this process uses the results. Without results, ops use an H200's.

    Args:
        progress: Show a progress bar.

    Returns:
        A dict: "gpu" is the GPU's name, "torch" is torch's version, and "costs" is one list. The
        list has nanoseconds per row by kind of memory, direction, order and row length, then the
        costs of planning, then the link's GB/s to the GPU and back.

    Raises:
        RuntimeError: There is no GPU, CUDA failed, or the measured times are implausible.
        MemoryError: Less than 256 MiB of host memory are available.

    Example:
        >>> if torch.cuda.is_available():
        ...     figures = calibrate()
    """
    if not torch.cuda.is_available():
        raise RuntimeError("calibrate: torch finds no GPU, and only GPUs need calibration")
    # Entries that this machine cannot measure, such as unsupported managed memory, do not change.
    before = _ops.costs()
    costs = before.clone()
    try:
        for step in tqdm(list(_steps()), desc="calibrating", unit="step", disable=not progress):
            step(costs)
        measured = _checked(costs.tolist())
    except ValueError as error:
        raise RuntimeError(f"calibrate: {error}. Measure again on an idle GPU.") from error
    finally:
        _ops.set_costs(before)  # a step has changed the costs
    use_costs(measured, calibrated=True)
    figures = {"gpu": _gpu(), "torch": torch.__version__, "costs": measured}
    _store(figures)
    return figures


def calibrate_once(nbytes: int) -> None:
    """Calibrates before a machine's first large table is allocated; logs failures, never raises.

    Does nothing without a GPU, with SPEEDTORCH_CALIBRATE=0 or during the capture of a CUDA graph.
    """
    if nbytes < WORTH_BYTES or os.environ.get("SPEEDTORCH_CALIBRATE") == "0":
        return
    if not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
        return
    try:
        path = cache_file(_gpu())
        if path is None or path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process may have calibrated between exists() and flock().
            if not load_costs():
                calibrate(progress=False)
    except BlockingIOError:
        _log.info("another process is calibrating this machine")
    except (OSError, RuntimeError, MemoryError) as error:
        _log.warning("calibration failed (%s). Call speedtorch.calibrate() to try again.", error)


def _store(figures: dict[str, Any]) -> None:
    path = cache_file(figures["gpu"])
    try:
        if path is None:
            raise OSError("there is no home folder; set XDG_CACHE_HOME to another folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(figures) + "\n", encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        _log.warning(
            "calibrate: cannot write %s (%s). Only this process uses the results.", path, error
        )


def load_costs_with_first_gpu() -> None:
    """Runs load_costs when torch first uses a GPU, or at once if torch has already used one."""
    call_with_first_gpu(load_costs)


def load_costs() -> bool:
    """Applies the saved results of this machine's GPU; returns whether any exist, never raises."""
    if (costs := _saved_costs(_gpu())) is not None:
        use_costs(costs, calibrated=True)
    return costs is not None


def saved_link_gbps(gpu: str) -> tuple[float, float] | tuple[None, None]:
    """The measured GB/s to a GPU of this name and back, or None for both. Never raises."""
    costs = _saved_costs(gpu)
    if costs is None:
        return None, None
    into, back = costs[_LINK_GBPS]
    return into, back


def _saved_costs(gpu: str) -> list[float] | None:
    """The saved costs of a GPU, or None; an invalid file is logged and ignored."""
    if (path := cache_file(gpu)) is None:
        return None
    try:
        figures = json.loads(read_file(path, _MOST_FILE_BYTES))  # may contain anything
        if figures["gpu"] != gpu:
            raise ValueError(f"costs measured on {figures['gpu']!r:.80}, but this GPU is {gpu!r}")
        return _checked(figures["costs"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        _log.warning("%s is ignored (%s). Call speedtorch.calibrate() to replace it.", path, error)
        return None


def _checked(costs: Any) -> list[float]:
    """Checks the costs of a file or a measurement; raises ValueError for impossible values."""
    expected = len(_ops.costs())
    if not isinstance(costs, list) or len(costs) != expected:
        raise ValueError(f"costs must be a list of {expected} numbers")
    bounds = [(1e-3, 1e6)] * expected
    bounds[_DISTINCT] = bounds[_ORDERED] = [(0.0, 1e6)] * 2
    bounds[_LINK_GBPS] = [(1e-2, 1e5)] * 2
    for at, (cost, (low, high)) in enumerate(zip(costs, bounds, strict=True)):
        # A comparison with NaN is false.
        if type(cost) not in (int, float) or not low <= cost <= high:
            raise ValueError(f"cost {at} must be from {low:g} to {high:g}, got {cost!s:.40}")
    return costs


def _steps() -> Iterator[Callable[[Tensor], object]]:
    yield lambda costs: costs[_LINK_GBPS].copy_(costs.new_tensor(measure_link()))
    yield _ops.set_costs  # the link's speed decides how many SMs a kernel fills
    yield _measure_planning
    for kind in range(0 if _ops.managed_supported() else 1, len(_KINDS)):
        yield partial(_measure_moves, kind=kind)


def _microseconds(run: Callable[[Tensor], object], rows: int = 1, count: int = 1) -> float:
    """Median microseconds of one call on the GPU; each call receives different ids."""
    times: list[float] = []
    for ids in torch.randint(rows, (_REPETITIONS + 1, count), device="cuda"):
        start, stop = (torch.Event("cuda", enable_timing=True) for _ in range(2))
        start.record()
        run(ids)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(times[1:])


def measure_link() -> tuple[float, float]:
    """GB/s of copies between pinned memory and the current GPU: to the GPU, and back."""
    host = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    into = _microseconds(lambda _: device.copy_(host, non_blocking=True))
    back = _microseconds(lambda _: host.copy_(device, non_blocking=True))
    return host.numel() / into / 1e3, host.numel() / back / 1e3


def _measure_planning(costs: Tensor) -> None:
    """Measures planning at two batch sizes: a fixed time in us and a time per id in ns."""
    few, many = 8192, 1 << 20
    table = torch.zeros(many * 8, 1, dtype=torch.uint8, device="cuda")

    def time_of(path: str, count: int) -> float:
        """Microseconds to gather `count` rows over one path."""
        with forced_path(path):
            return _microseconds(partial(pinned_gather, table), table.shape[0], count)

    moving = {count: time_of("direct", count) for count in (few, many)}
    for part, path in ((_DISTINCT, "distinct"), (_ORDERED, "ordered")):
        cost = {count: max(time_of(path, count) - moving[count], 0.0) for count in (few, many)}
        per_id_us = max(cost[many] - cost[few], 0.0) / (many - few)
        fixed_us = max(cost[few] - few * per_id_us, 0.0)
        costs[part] = costs.new_tensor((fixed_us, per_id_us * 1e3))


def _measure_moves(costs: Tensor, kind: int) -> None:
    planning = [costs[part].tolist() for part in (_DISTINCT, _ORDERED)]
    planning_us = [fixed_us + _BATCH * per_id_ns / 1e3 for fixed_us, per_id_ns in planning]
    nbytes = max(min(MOST_TABLE_BYTES, host_memory.available_bytes() // 4), 256 << 20)
    whole = host_memory.empty(nbytes, dtype=torch.uint8, memory=_KINDS[kind])
    row_ns = costs[_ROW_NS].view(len(_KINDS), 2, 2, len(_ROW_BYTES))
    for length, row_bytes in enumerate(_ROW_BYTES):
        table = whole[: whole.numel() // row_bytes * row_bytes].view(-1, row_bytes)
        rows = torch.zeros(_BATCH, row_bytes, dtype=torch.uint8, device="cuda")
        gather = partial(pinned_gather, table, out=rows)
        scatter = partial(pinned_scatter, table, src=rows)
        for direction, work in enumerate[Callable[[Tensor], object]]((gather, scatter)):
            for order, path in enumerate(("distinct", "ordered")):
                with forced_path(path):
                    us = _microseconds(work, table.shape[0], _BATCH)
                # An error in the measured planning time may subtract at most half of the time.
                moving_us = max(us - planning_us[order], us / 2)
                row_ns[kind, direction, order, length] = moving_us * 1e3 / _BATCH

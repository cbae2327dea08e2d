"""Explains which path an op takes, why, and how fast that path should be; sets the costs.

The C++ library makes the choice (csrc/move/cost_model.h) from times that calibration.py measures.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from speedtorch.ops import functions
from speedtorch.ops.functions import _ops

__all__ = ["Explanation", "explain", "forced_path", "get_num_sms", "set_num_sms"]

# Values and meaning: Path in csrc/move/cost_model.h.
PATHS = ("direct", "distinct", "ordered", "staged", "cpu")
_MEANINGS = {
    "direct": "one launch, rows in the order of the ids",
    "distinct": "each unique row once, in the order of the ids (repeated ids found by hashing)",
    "ordered": "each unique row once, in address order (ids sorted)",
    "staged": "the CPU copies the rows through pinned staging, because a GPU cannot access pageable"
    " memory; speedtorch.pin_memory_(table) pins it",
    "cpu": "CPU threads copy the rows: no tensor is on a GPU",
    "one sweep": "one sweep over the table, in address order, evicts and loads rows",
    "consecutive": "consecutive rows in one launch",
    "torch": "torch's own copy: no kernel accesses memory over the link",
}
_REACHES = ("managed memory", "mapped memory", "memory of the GPU", "pageable memory")


@dataclass(frozen=True)
class Explanation:
    """The path, reason and predicted speed of an op call; prints as a few lines."""

    op: str
    path: str
    """direct, distinct, ordered, one sweep, consecutive, staged, torch or cpu."""
    why: str
    predicted_us: float | None = None
    """Time to plan and copy, for unique ids; None without a prediction."""
    predicted_gbps: float | None = None
    """Speed of the whole op; counts each row once."""
    measured_gbps: float | None = None
    """Speed of the copy without planning, according to the measured times."""
    link_gbps: float | None = None
    """Measured speed of the copy engine over the link in this direction."""
    share_of_link: float | None = None
    """`measured_gbps / link_gbps`."""
    calibrated: bool = False
    """Whether times and speeds were measured on this machine; False: on an H200."""
    alternatives_us: dict[str, float] = field(default_factory=dict)
    """Time of each possible path."""

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.path} ({_MEANINGS[self.path]})", f"  why: {self.why}"]
        if self.predicted_us is not None:
            origin = "calibrated here" if self.calibrated else "not calibrated here: of an H200"
            lines += [
                f"  predicted: {self.predicted_us:,.0f} us, {self.predicted_gbps:.1f} GB/s",
                f"  movement alone: {self.measured_gbps:.1f} GB/s ({origin}); link:"
                f" {self.link_gbps:.1f} GB/s; share of the link: {self.share_of_link:.2f}",
            ]
        return "\n".join(lines)


_TENSORS = {"table", "index", "src", "dst", "evict", "load"}  # arguments of these ops


def explain(op: str, *args: Any, **kwargs: Any) -> Explanation:
    """Returns which path an op would take, why, and how fast it should be, without running the op.

    Args:
        op: "pinned_gather", "pinned_scatter", "pinned_copy" or "optimizer_state_swap".
        *args: The positional arguments of the op.
        **kwargs: The keyword arguments of the op.

    Raises:
        ValueError: `op` is not one of these ops.
        TypeError: The arguments do not match the op's signature, or are no tensors.

    Example:
        >>> import torch
        >>> explain("pinned_gather", torch.zeros(4, 2), torch.tensor([1, 3])).path
        'cpu'
    """
    if op not in _EXPLAINERS:
        raise ValueError(f"explain: op must be one of {', '.join(_EXPLAINERS)}, got {op!r}")
    bound = inspect.signature(getattr(functions, op)).bind(*args, **kwargs)
    bound.apply_defaults()
    for name, given in bound.arguments.items():
        if name in _TENSORS and not isinstance(given, Tensor):
            raise TypeError(f"explain: {name} must be a tensor, got {type(given).__name__}")
    return _EXPLAINERS[op](op, **bound.arguments)


def _explain_move(
    op: str,
    table: Tensor,
    index: Tensor,
    plan: Any,
    out: Tensor | None = None,
    src: Tensor | None = None,
    accumulate: bool = False,
) -> Explanation:
    work = next(tensor for tensor in (out, src, index) if tensor is not None)
    if work.device.type == "cpu":
        return Explanation(op, "cpu", "the rows are copied within the CPU's memory")
    count, row_bytes = index.numel(), math.prod(table.shape[1:]) * table.itemsize
    found = _ops.explain_move(table, count, int(src is not None), accumulate)
    number, *times, moving, link, reach = found.tolist()
    path = PATHS[int(number)] if plan is None else "ordered"
    where = f"{count:,} rows of {row_bytes:,} B, {_REACHES[int(reach)]}"
    if path == "staged":
        return Explanation(op, path, where)
    known = dict(zip(PATHS, times, strict=False))
    possible = {name: us for name, us in known.items() if math.isfinite(us)}
    if plan is not None:
        why = f"{where}; the ids are planned already"
    elif reach == 2:
        why = f"{where}: no row is copied over the link"
    else:
        estimates = ", ".join(f"{name} {us:,.0f} us" for name, us in possible.items())
        why = f"{where}; estimates: {estimates}"
    explained = Explanation(op, path, why, calibrated=_calibrated, alternatives_us=possible)
    if reach >= 2 or known[path] <= 0:
        return explained
    return replace(
        explained,
        predicted_us=known[path],
        predicted_gbps=count * row_bytes / known[path] / 1e3,
        measured_gbps=moving,
        link_gbps=link,
        share_of_link=moving / link,
    )


def _explain_copy(op: str, dst: Tensor, src: Tensor) -> Explanation:
    if dst.device.type == src.device.type:
        return Explanation(op, "torch", "both sides are on one kind of device")
    host = dst if dst.device.type == "cpu" else src
    return _explain_whole(op, [host], host.shape[0], "consecutive", "torch")


def _explain_swap(
    op: str, host: list[Tensor], evict: Tensor, arriving: list[Tensor], load: Tensor, **options: Any
) -> Explanation:
    if arriving[0].device.type == "cpu":
        return Explanation(op, "cpu", "the rows are copied within the CPU's memory")
    return _explain_whole(op, host, evict.numel() + load.numel(), "one sweep", "staged")


def _explain_whole(
    op: str, fields: list[Tensor], rows: int, in_place: str, pageable: str
) -> Explanation:
    """Explains an op with one path for memory that a GPU can access and one for pageable memory."""
    reach = max(int(_ops.explain_move(field, rows, 0, False)[-1]) for field in fields)
    where = f"{rows:,} rows of {_REACHES[reach]}"
    if reach == 3:
        return Explanation(op, pageable, where)
    return Explanation(op, in_place, f"{where}: the GPU accesses them in place")


_EXPLAINERS: dict[str, Callable[..., Explanation]] = {
    "pinned_gather": _explain_move,
    "pinned_scatter": _explain_move,
    "pinned_copy": _explain_copy,
    "optimizer_state_swap": _explain_swap,
}

_calibrated = False


def use_costs(costs: Tensor | list[float], *, calibrated: bool) -> None:
    """Sets the library's costs, in the order of `Costs` in csrc/move/cost_model.cpp."""
    global _calibrated
    # On the CPU despite any default device, because this runs when torch first uses that device.
    _ops.set_costs(torch.as_tensor(costs, dtype=torch.float64, device="cpu"))
    _calibrated = calibrated


@contextmanager
def forced_path(path: str) -> Iterator[None]:
    """Forces gathers and scatters over the link to take one path, or raise ValueError.

    For tests and timings. The path is forced in all threads.
    """
    if path not in PATHS[:3]:
        raise ValueError(f"forced_path: path must be direct, distinct or ordered, got {path!r}")
    _ops.force_path(PATHS.index(path))
    try:
        yield
    finally:
        _ops.force_path(-1)


def get_num_sms() -> int:
    """The maximum number of multiprocessors (SMs) that a kernel over the link may fill.

    Without set_num_sms() the maximum is 16 for PCIe 5 x16 and slower links. If `calibrate` has
    measured a link that is faster by more than a quarter, the maximum grows in proportion. Above 16
    the SMs of the GPU limit it.

    Example:
        >>> get_num_sms()
        16
    """
    return int(_ops.num_sms())


def set_num_sms(count: int | None) -> None:
    """Limits the multiprocessors that a kernel over the link may fill, for all GPUs and threads.

    A lower limit leaves more of the GPU to other work. Results do not change. A kernel fills fewer
    multiprocessors if those saturate the link. Over PCIe 5 x16, swaps fill at most 8. On a GPU with
    bulk copies (Hopper, data-centre Blackwell), batches of more than 4,096 rows of 512 bytes and
    more, aligned in managed memory, fill at most 3. If `calibrate` has measured a link that is
    faster by more than a quarter, these numbers grow in proportion.

    Args:
        count: At least 1. None ends the limit of earlier calls; see get_num_sms().

    Raises:
        ValueError: `count` is less than 1 or more than 65,536.

    Example:
        >>> set_num_sms(8)
        >>> get_num_sms()
        8
        >>> set_num_sms(None)
    """
    _ops.set_num_sms(count)

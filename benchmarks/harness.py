"""Timing with fresh inputs, facts about the machine, and results as JSON.

A figure is the median of several repetitions with its lowest and highest; every repetition gets
inputs of its own, made before the clock starts, because translations of addresses that were used
before make a repetition look too good.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.sizes import DEVICE, SIZES

RESULTS = Path(__file__).parent / "results"
WARM_UPS = 3


@dataclass(frozen=True)
class Figure:
    """One measured way to do the work of a benchmark."""

    section: str
    name: str
    median_ms: float
    low_ms: float
    high_ms: float
    gigabytes_per_s: float
    share_of_bound: float | None = None
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass
class Report:
    """The figures of one benchmark, in one run on one machine."""

    stem: str
    title: str
    figures: list[Figure] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    def add(self, figure: Figure) -> Figure:
        """Stores a figure and prints it."""
        share = f"{figure.share_of_bound:6.2f} of the bound" if figure.share_of_bound else ""
        print(
            f"{self.stem}: {figure.section}: {figure.name:60} {figure.median_ms:9.4f} ms"
            f" ({figure.low_ms:.4f} to {figure.high_ms:.4f})"
            f" {figure.gigabytes_per_s:7.1f} GB/s {share}",
            flush=True,
        )
        self.figures.append(figure)
        return figure

    def save(self) -> Path:
        """Writes results/<stem>.json, to $OUT instead where that is set."""
        path = results_folder() / f"{self.stem}.json"
        path.write_text(json.dumps({"machine": machine(), **asdict(self)}, indent=1) + "\n")
        return path


def results_folder() -> Path:
    """Where results go: $OUT where that is set."""
    folder = Path(os.environ.get("OUT", RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def machine() -> dict[str, str]:
    """GPU, driver, versions, commit and date of this run."""
    gpu, driver = "none", "none"
    if DEVICE == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
        told = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        gpu, driver = (part.strip() for part in told.split(","))
    head = ["git", "rev-parse", "--short", "HEAD"]
    known = subprocess.run(head, capture_output=True, text=True).stdout.strip()
    return {
        "gpu": gpu,
        "driver": driver,
        "cpu": platform.machine(),
        "cpu_cores": str(os.cpu_count()),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "commit": os.environ.get("SPEEDTORCH_COMMIT") or known or "unknown",
        "date": datetime.date.today().isoformat(),
    }


def synchronize() -> None:
    """Waits for the GPU if there is one."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _stream_ms(run: Callable[[Any], object], given: Any) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run(given)
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop))


def _wall_ms(run: Callable[[Any], object], given: Any) -> float:
    begin = time.perf_counter()
    run(given)
    synchronize()
    return (time.perf_counter() - begin) * 1e3


def measure(
    section: str,
    name: str,
    run: Callable[[Any], object],
    inputs: Sequence[Any],
    *,
    nbytes: float,
    bound: Figure | None = None,
    on_host_clock: bool = False,
    **parameters: Any,
) -> Figure:
    """Times `run` once for each of the inputs, the first of which warm up.

    Args:
        section: which part of a benchmark this belongs to.
        name: what is measured.
        run: the work, queued on the current stream.
        inputs: one for each repetition and warm-up, none used twice.
        nbytes: bytes that cross the link.
        bound: the figure to compare with.
        on_host_clock: wall time from the call until the GPU is done, instead of events on the
            stream; for work that the host takes part in.
        **parameters: what plots and tables look for.
    """
    clock = _wall_ms if on_host_clock or DEVICE == "cpu" else _stream_ms
    times = []
    for given in inputs:
        synchronize()
        times.append(clock(run, given))
    times = times[WARM_UPS:]
    median = statistics.median(times)
    share = bound.median_ms / median if bound else None
    rate = nbytes / median / 1e6
    return Figure(section, name, median, min(times), max(times), rate, share, parameters)


def turns(repetitions: int | None = None) -> range:
    """Inputs of work that needs none."""
    wanted = SIZES.repetitions if repetitions is None else repetitions
    return range(min(wanted, SIZES.most_repetitions) + WARM_UPS)


def fresh_ids(rows: int, count: int, repetitions: int | None = None) -> list[torch.Tensor]:
    """Random ids on the GPU, a batch for each repetition and warm-up."""
    return [torch.randint(rows, (count,), device=DEVICE) for _ in turns(repetitions)]


def microseconds_synchronised(run: Callable[[], object]) -> list[float]:
    """Wall times of calls, each waited for."""
    times = []
    for _ in range(SIZES.calls + SIZES.calls // 5):
        times.append(_wall_ms(lambda _: run(), None) * 1e3)
    return times[SIZES.calls // 5 :]


def microseconds_issued(run: Callable[[], object]) -> float:
    """Time that a call keeps the CPU, of many that nothing waits for."""
    for _ in range(SIZES.calls // 5):
        run()
    synchronize()
    begin = time.perf_counter()
    for _ in range(SIZES.calls):
        run()
    spent = time.perf_counter() - begin
    synchronize()
    return spent / SIZES.calls * 1e6

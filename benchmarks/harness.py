"""Runs a benchmark: times each of its ways on fresh inputs, and stores the figures as JSON.

A benchmark is a module `bench_<stem>` with a TITLE and a function `measured`, which yields its
figures and, as pairs of name and value, facts beside them. A figure is the median of several
repetitions with their lowest, highest, 20th and 80th percentile; every repetition gets inputs of
its own, made before the clock starts, because translations of addresses that were used before make
a repetition look too good.
"""

from __future__ import annotations

import datetime
import gc
import importlib
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from benchmarks.processes import commit_of
from benchmarks.sizes import DEVICE, SIZES

RESULTS = Path(__file__).parent / "results"
WARM_UPS = SIZES.warm_ups
OTHER = os.environ.get("SPEEDTORCH_BENCH_OTHER")
"""Number of a socket to a process that runs the same benchmark: one of the two works at a time."""


@dataclass(frozen=True)
class Figure:
    """One measured way to do the work of a benchmark."""

    section: str
    name: str
    median_ms: float
    low_ms: float
    p20_ms: float
    p80_ms: float
    high_ms: float
    gigabytes_per_s: float
    share_of_bound: float | None
    parameters: dict[str, Any]

    def __str__(self) -> str:
        share = f"{self.share_of_bound:6.2f} of the bound" if self.share_of_bound else ""
        return (
            f"{self.section}: {self.name:60} {self.median_ms:9.4f} ms"
            f" ({self.low_ms:.4f} to {self.high_ms:.4f}) {self.gigabytes_per_s:7.1f} GB/s {share}"
        )


Measured: TypeAlias = Iterator[Figure | tuple[str, Any]]


def forget() -> None:
    """Gives cached memory back."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def figure_of(
    section: str,
    name: str,
    times_ms: Iterable[float],
    *,
    nbytes: float = 0,
    bound: Figure | None = None,
    **parameters: Any,
) -> Figure:
    """A figure of repetitions that moved `nbytes` over the link; plots look for the parameters."""
    times = list(times_ms)
    median = statistics.median(times)
    share = bound.median_ms / median if bound else None
    rate = nbytes / median / 1e6
    p20, p80 = map(float, np.percentile(times, (20, 80)))
    spread = (min(times), p20, p80, max(times))
    return Figure(section, name, median, *spread, rate, share, parameters)


def run(stem: str) -> None:
    """Measures, prints and stores all of one benchmark."""
    take_turn(begins=True)
    benchmark = importlib.import_module(f"benchmarks.bench_{stem}")
    figures: list[Figure] = []
    extra: dict[str, Any] = {}
    for told in benchmark.measured():
        if isinstance(told, Figure):
            figures.append(told)
            print(f"{stem}: {told}", flush=True)
        else:
            name, fact = told
            extra[name] = fact
            if not name.endswith("_spans"):  # hundreds of numbers
                print(f"{stem}: {name}: {fact}", flush=True)
    result = {
        "machine": machine(),
        "stem": stem,
        "title": benchmark.TITLE,
        "figures": [asdict(figure) for figure in figures],
        "extra": extra,
    }
    (results_folder() / f"{stem}.json").write_text(json.dumps(result, indent=1) + "\n")


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
    return {
        "gpu": gpu,
        "driver": driver,
        "cpu": platform.machine(),
        "cpu_cores": str(os.cpu_count()),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "commit": os.environ.get("SPEEDTORCH_COMMIT") or commit_of(),
        "date": datetime.date.today().isoformat(),
    }


def synchronize() -> None:
    """Waits for the GPU if there is one."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def take_turn(*, begins: bool = False) -> None:
    """Waits for the GPU, and for another process, if there is one, to have measured as much."""
    if not begins:  # nothing has used it yet
        synchronize()
    if OTHER is not None:
        with suppress(BrokenPipeError):  # it has ended, and is not waited for
            _ = begins or os.write(int(OTHER), b".")
        os.read(int(OTHER), 1)


class _HostEvent:
    """Does as an event of CUDA where there is no GPU."""

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: _HostEvent) -> float:
        return (later.seconds - self.seconds) * 1e3


def event() -> Any:
    """Is recorded on the stream, and tells the milliseconds to another."""
    return torch.cuda.Event(enable_timing=True) if DEVICE == "cuda" else _HostEvent()


def _stream_ms(run: Callable[[Any], object], given: Any) -> float:
    start, stop = event(), event()
    start.record()
    run(given)
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop))


def wall_ms(run: Callable[[Any], object], given: Any = None) -> float:
    """Milliseconds from a call until the GPU is done."""
    begin = time.perf_counter()
    run(given)
    synchronize()
    return (time.perf_counter() - begin) * 1e3


def timed(call: Callable[[], object]) -> float:
    """Milliseconds of a call, from and until the GPU has nothing to do."""
    synchronize()
    return wall_ms(lambda _: call())


def measure(
    section: str,
    name: str,
    run: Callable[[Any], object],
    inputs: Sequence[Any],
    *,
    on_host_clock: bool = False,
    **told: Any,
) -> Figure:
    """Times `run` once for each of the inputs, none used twice, the first of which warm up.

    Work that the host takes part in is timed on its clock, other work by events on the stream.
    """
    clock = wall_ms if on_host_clock else _stream_ms
    times = []
    for given in inputs:
        take_turn()
        times.append(clock(run, given))
    return figure_of(section, name, times[WARM_UPS:], **told)


def turns(repetitions: int = SIZES.repetitions) -> range:
    """Inputs of work that needs none."""
    return range(min(repetitions, SIZES.most_repetitions) + WARM_UPS)


def fresh_ids(rows: int, count: int, repetitions: int = SIZES.repetitions) -> list[torch.Tensor]:
    """Random ids on the GPU, a batch for each repetition and warm-up."""
    return [torch.randint(rows, (count,), device=DEVICE) for _ in turns(repetitions)]

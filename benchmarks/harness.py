"""Timing with fresh inputs, facts about the machine, and results as JSON.

A figure is the median of several repetitions with its lowest and highest; every repetition gets
inputs of its own, made before the clock starts, because translations of addresses that were used
before make a repetition look too good.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
REPETITIONS = 15
WARM_UPS = 3


@dataclass(frozen=True)
class Figure:
    """One measured way to do the work of a benchmark."""

    name: str
    median_ms: float
    low_ms: float
    high_ms: float
    gigabytes_per_s: float
    share_of_bound: float | None = None


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
            f"{figure.name:64} {figure.median_ms:9.3f} ms"
            f" ({figure.low_ms:.3f} to {figure.high_ms:.3f})"
            f" {figure.gigabytes_per_s:7.1f} GB/s {share}",
            flush=True,
        )
        self.figures.append(figure)
        return figure

    def save(self) -> Path:
        """Writes results/<stem>.json, to $OUT instead where that is set."""
        folder = Path(os.environ.get("OUT", RESULTS))
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.stem}.json"
        path.write_text(json.dumps({"machine": machine(), **asdict(self)}, indent=2) + "\n")
        return path


def machine() -> dict[str, str]:
    """GPU, driver, versions, commit and date of this run."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    gpu, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split(
        ","
    )
    head = ["git", "rev-parse", "--short", "HEAD"]
    known = subprocess.run(head, capture_output=True, text=True).stdout.strip()
    commit = os.environ.get("SPEEDTORCH_COMMIT") or known or "unknown"
    return {
        "gpu": gpu.strip(),
        "driver": driver.strip(),
        "cpu_cores": str(os.cpu_count()),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "commit": commit,
        "date": datetime.date.today().isoformat(),
    }


def measure(
    name: str,
    run: Callable[[Any], object],
    inputs: Sequence[Any],
    *,
    nbytes: int,
    bound: Figure | None = None,
    on_host_clock: bool = False,
) -> Figure:
    """Times `run` once for each of the inputs, after warm-ups on the first of them.

    Args:
        name: what is measured.
        run: the work, queued on the current stream.
        inputs: one for each repetition and warm-up, none used twice.
        nbytes: bytes that cross the link.
        bound: the figure to compare with.
        on_host_clock: wall time from the call until the GPU is done, instead of events on the
            stream; for work that the host takes part in.
    """
    times = []
    for input_ in inputs:
        torch.cuda.synchronize()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin = datetime.datetime.now()
        start.record()
        run(input_)
        stop.record()
        torch.cuda.synchronize()
        wall_ms = (datetime.datetime.now() - begin).total_seconds() * 1e3
        times.append(wall_ms if on_host_clock else start.elapsed_time(stop))
    times = times[WARM_UPS:]
    median = statistics.median(times)
    share = bound.median_ms / median if bound else None
    return Figure(name, median, min(times), max(times), nbytes / median / 1e6, share)


def fresh_ids(rows: int, count: int) -> list[torch.Tensor]:
    """Random ids on the GPU, a batch for each repetition and warm-up."""
    return [torch.randint(rows, (count,), device="cuda") for _ in range(REPETITIONS + WARM_UPS)]

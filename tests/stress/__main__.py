"""`python -m stress --hours 0.5` runs random programs, `--seed training-17` repeats one.

`--jobs 8` runs eight processes beside each other, and `--add FILE` adds the progress of a run that
was given another `--progress`.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import random
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

import paces
import torch

from stress.jobs import job_path, run_jobs
from stress.modes import MODES, FailedProgram, device
from stress.progress import Progress
from stress.running import Running

SAVED_EVERY = 60.0
"""Seconds between two writes of the progress file."""


def run_program(name: str, progress: Progress | None) -> bool:
    """Runs the program of a seed such as "training-17"; whether it found no difference."""
    kind, _, number = name.rpartition("-")
    began, fault = time.monotonic(), ""
    with tempfile.TemporaryDirectory() as folder:
        try:
            features = MODES[kind].run(int(number), Path(folder))
        except FailedProgram as error:
            features, fault = error.features, name
            print(
                f"{name} found a fault: {error}\n  make stress SEED={name} repeats it", flush=True
            )
    if progress is not None:
        progress.add(features, time.monotonic() - began, fault)
    return not fault


def run_for(seconds: float, progress: Progress, first: int) -> tuple[int, int]:
    """Runs programs of all kinds; how many there were, and how many found a fault.

    A program within which the run before has crashed or hung is the first.
    """
    begun = saved = time.monotonic()
    draw, count, failed = random.Random(first), 0, 0
    kinds, shares = list(MODES), [mode.share for mode in MODES.values()]
    running = Running(progress.path.with_suffix(".running"))
    if name := running.left:
        print(f"{name} did not end in the run before; make stress SEED={name} repeats it")
    try:
        with running:
            while (now := time.monotonic()) < begun + seconds:
                (kind,) = draw.choices(kinds, shares)
                name = name or f"{kind}-{first + count}"
                running.begin(name)
                failed += not run_program(name, progress)
                if device() == "cuda":
                    torch.cuda.synchronize()  # raises if a program has broken the GPU's context
                count, name = count + 1, ""
                if now > saved + SAVED_EVERY:
                    progress.save()
                    saved = now
    finally:  # also after Ctrl-C
        progress.save()
    return count, failed


def prepare() -> None:
    """Makes this process fit for many small programs."""
    torch.set_num_threads(1)
    paces.install()
    faulthandler.enable(sys.__stderr__)
    faulthandler.register(signal.SIGALRM, file=sys.__stderr__, chain=True)  # a program hangs
    warnings.simplefilter("ignore")
    gc.collect()
    gc.freeze()  # or each program would look at all that torch made


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="stress", description=__doc__)
    parser.add_argument("--hours", type=float, default=0.1, help="fractions are allowed")
    parser.add_argument("--seed", default="", help="of the program to repeat, such as training-17")
    parser.add_argument(
        "--progress", type=Path, default=Path(__file__).with_name("progress.json"), metavar="FILE"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that run beside each other")
    parser.add_argument("--job", type=int, default=0, help="the number of this process among them")
    parser.add_argument(
        "--add", type=Path, nargs="+", default=[], metavar="FILE", help="of progress, instead"
    )
    given = parser.parse_args(arguments)
    machine = "gpu" if device() == "cuda" else "cpu"
    if given.add:
        Progress(given.progress, machine).take(given.add)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # saves, and ends the other processes
    if given.jobs > 1 and not given.seed:
        progress = Progress(given.progress, machine)
        command = (sys.executable, "-m", "stress", "--hours", str(given.hours))
        code = run_jobs(given.jobs, progress, command)
        print(progress)
        return code
    prepare()
    if given.seed:
        return int(not run_program(given.seed, None))
    path = job_path(given.progress, given.job) if given.job else given.progress
    progress = Progress(path, machine)
    first = random.SystemRandom().randrange(1 << 40)
    count, failed = run_for(given.hours * 3600, progress, first)
    if not given.job:
        print(progress)
    print(f"{count:,} programs, {failed} of them found a fault")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

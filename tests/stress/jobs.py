"""Several stress runs at once, in processes whose progress adds up in one file."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from stress.progress import Progress
from stress.running import Running

__all__ = ["job_path", "run_jobs"]


def job_path(path: Path, job: int) -> Path:
    """The progress file of one of several processes, beside that of all."""
    return path.with_name(f"{path.stem}-{job}{path.suffix}")


def run_jobs(jobs: int, progress: Progress, command: Sequence[str]) -> int:
    """Runs a command in processes 1 to `jobs`, and adds their progress; the largest exit code.

    The command gets the options `--progress` and `--job`. An exception ends the processes, whose
    progress so far is added.
    """
    progress.path.parent.mkdir(parents=True, exist_ok=True)
    more = ("--progress", str(progress.path), "--job")
    made = [subprocess.Popen([*command, *more, str(job)]) for job in range(1, jobs + 1)]
    try:
        codes = [process.wait() for process in made]
    finally:
        for process in made:
            process.terminate()  # nothing happens to one that has ended
        for process in made:
            process.wait()
        progress.take(progress.path.parent.glob(f"{progress.path.stem}-*{progress.path.suffix}"))
    for job, code in enumerate(codes, 1):
        if code < 0:
            left = Running(job_path(progress.path, job).with_suffix(".running")).left
            again = f" within {left}; make stress SEED={left} repeats it" if left else ""
            print(f"signal {-code} ended process {job}{again}", flush=True)
    return max(abs(code) for code in codes)

"""What every demonstration asks of the machine and of the user: device, memory and Ctrl-C."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from speedtorch.demo.settings import CommonSettings
from speedtorch.ops.functions import _ops

__all__ = ["DIFFERENT", "STOPPED", "choose_device", "ended", "interrupt", "make_folder"]

# Exit statuses: after Ctrl-C, as shells have it, and of a comparison that found a difference.
STOPPED = 130
DIFFERENT = 1


def choose_device(settings: CommonSettings) -> torch.device:
    """The device asked for; "auto" is a GPU if torch has one and our library has its kernels.

    Raises ValueError if there is no such device, for memory that only a GPU reaches where there is
    none, and for a seed that not every generator takes.
    """
    name, seed = settings.device, settings.seed
    memory = getattr(settings, "memory", "auto")
    usable = torch.cuda.is_available() and _ops.built_with_cuda()
    if name == "cuda" and not usable:
        reason = "torch sees no GPU" if not torch.cuda.is_available() else "built without nvcc"
        raise ValueError(f"device cuda cannot be used: {reason}; use --device cpu")
    if memory in ("managed", "registered", "cuda") and not torch.cuda.is_available():
        raise ValueError(f"memory {memory} cannot be used: torch sees no GPU; use --memory plain")
    if not 0 <= seed < 1 << 32:
        raise ValueError(f"seed is {seed}; it must be 0 or more, and less than 2^32")
    return torch.device("cuda" if usable and name != "cpu" else "cpu")


def make_folder(path: Path) -> None:
    """Makes the folder of the results, before anything takes long."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"--out {path}: no folder can be made there ({error.strerror})") from error


@contextmanager
def interrupt() -> Iterator[Callable[[], bool]]:
    """Gives a function that says whether Ctrl-C was pressed; a second one ends the process."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set  # Only the main thread may handle signals, and only it gets Ctrl-C.
        return
    before = signal.getsignal(signal.SIGINT)

    def stop(number: int, frame: FrameType | None) -> None:
        asked.set()
        signal.signal(signal.SIGINT, before)
        print("\nstopping after this step; Ctrl-C again to leave at once", file=sys.stderr)

    signal.signal(signal.SIGINT, stop)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def ended(finished: bool) -> int:
    """The exit status of a training; one that was stopped says so."""
    if finished:
        return 0
    print("stopped    by Ctrl-C; what was learnt until then is saved")
    return STOPPED

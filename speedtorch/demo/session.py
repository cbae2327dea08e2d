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

__all__ = ["STOPPED", "check_memory", "check_seed", "choose_device", "interrupt", "make_folder"]

STOPPED = 130  # the exit status after Ctrl-C, as shells have it


def choose_device(name: str) -> torch.device:
    """The device asked for; "auto" is a GPU if torch has one and our library has its kernels.

    Args:
        name: "auto", "cpu" or "cuda".

    Raises:
        ValueError: there is no such device.
    """
    usable = torch.cuda.is_available() and torch.ops.speedtorch.built_with_cuda()
    if name == "cuda" and not usable:
        reason = "torch sees no GPU" if not torch.cuda.is_available() else "built without nvcc"
        raise ValueError(f"device cuda cannot be used: {reason}; use --device cpu")
    return torch.device("cuda" if usable and name != "cpu" else "cpu")


def check_memory(name: str) -> None:
    """Raises ValueError for a kind of memory that a GPU must reach, if there is none."""
    if name in ("managed", "registered", "cuda") and not torch.cuda.is_available():
        raise ValueError(f"memory {name} cannot be used: torch sees no GPU; use --memory plain")


def check_seed(seed: int) -> None:
    """Raises ValueError for a seed that not every generator takes."""
    if not 0 <= seed < 1 << 32:
        raise ValueError(f"seed is {seed}; it must be 0 or more, and less than 2^32")


def make_folder(path: Path) -> None:
    """Makes the folder of the results, before anything takes long.

    Raises:
        OSError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"--out {path}: no folder can be made there ({error.strerror})") from error


@contextmanager
def interrupt() -> Iterator[Callable[[], bool]]:
    """Turns the first Ctrl-C into a question's answer; a second one ends the process as usual.

    Yields:
        Says whether Ctrl-C was pressed.
    """
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

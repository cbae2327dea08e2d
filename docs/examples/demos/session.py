"""The device, output folder and Ctrl-C handling of all demonstrations."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from demos.settings import CommonSettings
from speedtorch.ops.functions import _ops

__all__ = ["DIFFERENT", "STOPPED", "choose_device", "interrupt", "make_folder"]

# Exit statuses: after Ctrl-C, as in shells, and after a comparison that found a difference.
STOPPED = 130
DIFFERENT = 1


def choose_device(settings: CommonSettings) -> torch.device:
    """The device of the settings; "auto" selects a GPU if torch sees one and kernels are built.

    Raises ValueError if the device is unavailable, if the kind of memory requires a GPU and torch
    sees none, or if the seed is out of range for one of the generators.
    """
    name, seed = settings.device, settings.seed
    memory = getattr(settings, "memory", "auto")
    usable = torch.cuda.is_available() and _ops.built_with_cuda()
    if name == "cuda" and not usable:
        reason = "torch sees no GPU" if not torch.cuda.is_available() else "built without nvcc"
        raise ValueError(f"device cuda cannot be used: {reason}. Use --device cpu.")
    if memory in ("managed", "registered", "cuda") and not torch.cuda.is_available():
        raise ValueError(f"memory {memory} cannot be used: torch sees no GPU. Use --memory plain.")
    if not 0 <= seed < 1 << 32:
        raise ValueError(f"seed must be from 0 to 2^32 - 1, got {seed}")
    return torch.device("cuda" if usable and name != "cpu" else "cpu")


def make_folder(path: Path) -> None:
    """Creates the folder for the results, before the training starts."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"--out {path}: cannot create the folder ({error.strerror})") from error


@contextmanager
def interrupt() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether Ctrl-C was pressed; a second Ctrl-C interrupts."""
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested.is_set  # only the main thread handles signals
        return
    before = signal.getsignal(signal.SIGINT)

    def stop(number: int, frame: FrameType | None) -> None:
        """Requests a stop and restores the handler for a second Ctrl-C."""
        requested.set()
        signal.signal(signal.SIGINT, before)
        # sys.stderr raises an error if the signal has interrupted a write to it.
        os.write(2, b"\nstopping after this step; press Ctrl-C again to stop at once\n")

    signal.signal(signal.SIGINT, stop)
    try:
        yield requested.is_set
    finally:
        signal.signal(signal.SIGINT, before)

"""Background saves: threads that write checkpoints from copies of the tensors."""

from __future__ import annotations

import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from multiprocessing.util import Finalize
from typing import Any, TypeVar

import torch
from torch import Tensor

from speedtorch.files.field_blocks import SelectedRows
from speedtorch.memory import host_memory

__all__ = ["begin", "copies", "fitting", "wait_for"]

_Result = TypeVar("_Result")
_Tensors = Mapping[Any, Tensor | SelectedRows]


class _Save:
    """A pending save, which one thread writes: the thread of begin(), or one that waits."""

    def __init__(self, done: Future[Any], place: str, run: Callable[[], None]) -> None:
        self.done, self.place, self._run = done, place, run
        self._taken: dict[str, tuple[int, object]] = {}

    def take(self) -> bool:
        """Claims the save for this thread; False if a thread has claimed it already."""
        mine = threading.get_ident(), object()
        return self._taken.setdefault("by", mine) is mine  # atomic, also against signal handlers

    def write(self) -> None:
        """Writes the save in this thread, unless a thread has claimed it."""
        if self.take():
            self._run()

    def wait(self) -> None:
        """Waits for the save; returns at once in a signal handler of the thread that writes it."""
        self.write()
        if self._taken["by"][0] != threading.get_ident():
            wait([self.done])


_pending: dict[Future[Any], _Save] = {}
"""The pending saves."""
os.register_at_fork(after_in_child=_pending.clear)  # a child process has no writing threads


def fitting(shards: Sequence[_Tensors], max_memory: int | None, sharing: int = 1) -> int:
    """How many of the last files fit into memory as copies.

    `max_memory` is in bytes. The default is half of the available host memory, divided by the
    number of processes that share it.
    """
    left = host_memory.available_bytes() // (2 * sharing) if max_memory is None else max_memory
    count = 0
    for shard in reversed(shards):
        left -= sum(rows.nbytes for rows in shard.values())
        if left < 0:
            break
        count += 1
    return count


def copies(shards: Sequence[_Tensors]) -> list[dict[Any, Tensor]]:
    """Copies all tensors to pageable host memory; raises MemoryError if they do not fit.

    Without this check, the system may end the process while the copies are filled.
    """
    needed = sum(rows.nbytes for shard in shards for rows in shard.values())
    if host_memory.is_checked() and needed > (available := host_memory.available_bytes()):
        raise MemoryError(
            f"async_save: the copies need {needed:,} bytes of host memory, but {available:,} are"
            " available. Pass a smaller max_memory. SPEEDTORCH_MEMORY_CHECK=0 skips this check."
        )

    def copied(given: Tensor | SelectedRows) -> Tensor:
        """Copies a tensor; gathers selected rows."""
        if isinstance(given, SelectedRows):
            return given.gather(given.ids)
        return torch.empty(given.shape, dtype=given.dtype, device="cpu").copy_(given)

    return [{key: copied(rows) for key, rows in shard.items()} for shard in shards]


def begin(folder: str, work: Callable[[], _Result], undo: ExitStack) -> Future[_Result]:
    """Runs the rest of a save in a thread, which ends before the interpreter exits.

    If the save fails, the thread warns at once and the future's result() raises the error. If no
    thread can be started, `undo` is closed and this call raises.
    """
    done: Future[_Result] = Future()
    # A multiprocessing process waits here at its end, before it runs its other finalizers.
    ending = Finalize(None, wait, ([done],), exitpriority=100)

    def run() -> None:
        """Runs `work` and passes its result or error to the future."""
        try:
            result = work()
        except BaseException as error:
            # The frames of the error would keep the saved tensors alive with the future.
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
            text = f"speedtorch.async_save: the background save to {folder} has failed: {error!r}"
            try:
                warnings.warn(text, RuntimeWarning, stacklevel=1)
            finally:  # also if warnings are errors
                _pending.pop(done, None)
                done.set_exception(error)
        else:
            _pending.pop(done, None)
            done.set_result(result)
        finally:
            ending.cancel()

    done.set_running_or_notify_cancel()
    save = _pending[done] = _Save(done, os.path.realpath(folder), run)
    thread = threading.Thread(target=save.write, name="speedtorch save")
    try:
        thread.start()
    except BaseException:
        if thread.ident is None and save.take():  # the system cannot start another thread
            _pending.pop(done, None)
            ending.cancel()
            undo.__exit__(*sys.exc_info())
        raise
    return done


def wait_for(folder: str) -> None:
    """Waits until no background save to a folder is pending; does not raise their errors.

    Writes saves that no thread has claimed: a signal handler may run before the save's thread.
    """
    place = os.path.realpath(folder)
    for save in list(_pending.values()):
        if save.place == place:
            save.wait()

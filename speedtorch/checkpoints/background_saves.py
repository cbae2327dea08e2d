"""Saves that go on in a thread of their own, from copies of what they save."""

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

from speedtorch.files.field_blocks import SomeRows
from speedtorch.memory import host_memory

__all__ = ["begin", "copies", "fitting", "wait_for"]

_Result = TypeVar("_Result")
_Tensors = Mapping[Any, Tensor | SomeRows]


class _Save:
    """A save that goes on, which one thread writes: that of begin(), or one that waits for it."""

    def __init__(self, done: Future[Any], place: str, run: Callable[[], None]) -> None:
        self.done, self.place, self._run = done, place, run
        self._taken: dict[str, tuple[int, object]] = {}

    def take(self) -> bool:
        """Lets this thread alone write it; False if a thread has taken it already."""
        mine = threading.get_ident(), object()
        return self._taken.setdefault("by", mine) is mine  # no signal comes between

    def write(self) -> None:
        """Writes it in this thread, unless a thread has taken it."""
        if self.take():
            self._run()

    def wait(self) -> None:
        """Waits for its end; not within a signal of the thread that writes it."""
        self.write()
        if self._taken["by"][0] != threading.get_ident():
            wait([self.done])


_pending: dict[Future[Any], _Save] = {}
"""Those that go on."""
os.register_at_fork(after_in_child=_pending.clear)  # whose threads are not there


def fitting(shards: Sequence[_Tensors], max_memory: int | None, sharing: int = 1) -> int:
    """How many files, from the last one on, are to be copied.

    By default half of the memory that is available is theirs, and of so many processes that share
    it.
    """
    left = host_memory.available_bytes() // (2 * sharing) if max_memory is None else max_memory
    count = 0
    for shard in reversed(shards):
        left -= sum(each.nbytes for each in shard.values())
        if left < 0:
            break
        count += 1
    return count


def copies(shards: Sequence[_Tensors]) -> list[dict[Any, Tensor]]:
    """All tensors as they are now, in plain host memory."""

    def copied(given: Tensor | SomeRows) -> Tensor:
        if isinstance(given, SomeRows):
            return given.at(given.ids)
        return torch.empty(given.shape, dtype=given.dtype, device="cpu").copy_(given)

    return [{key: copied(each) for key, each in shard.items()} for shard in shards]


def begin(folder: str, work: Callable[[], _Result], undo: ExitStack) -> Future[_Result]:
    """Runs the rest of a save; the interpreter does not end before.

    An error is warned of at once, and raised by the future's result(). Where no thread can be
    started, that is raised, and what has been made is undone.
    """
    done: Future[_Result] = Future()
    # The end of a process of multiprocessing waits here, before it runs its other finalizers.
    ending = Finalize(None, wait, ([done],), exitpriority=100)

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            # The future is not to keep what was saved, as the frames of its error would.
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
            text = f"speedtorch.async_save, in the background, to {folder}, has failed: {error!r}"
            try:
                warnings.warn(text, RuntimeWarning, stacklevel=1)
            finally:  # also where warnings are errors
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
        if thread.ident is None and save.take():  # there is no room for another
            _pending.pop(done, None)
            ending.cancel()
            undo.__exit__(*sys.exc_info())
        raise
    return done


def wait_for(folder: str) -> None:
    """Waits until no save to a folder goes on in the background; its error has been told.

    One that no thread has begun to write is written here: a signal may have come before its thread.
    """
    place = os.path.realpath(folder)
    for each in list(_pending.values()):
        if each.place == place:
            each.wait()

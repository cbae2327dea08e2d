"""HostCopy: a copy of a few numbers to the CPU, for which nothing waits until they are read."""

from __future__ import annotations

import threading
import time
from collections import defaultdict

import torch
from torch import Tensor

from speedtorch.ops.functions import numbers_to_host
from speedtorch.torch_internals import current_stream

__all__ = ["HostCopy"]

_SOON = 1e-3  # seconds

_Slot = tuple[Tensor, torch.cuda.Event]
"""Pinned memory and the event behind its last copy."""

# By device and length: a new slot takes longer than the copy. Copies may still write to slots of
# unread numbers.
_unused: defaultdict[tuple[torch.device, int], list[_Slot]] = defaultdict(list)
_unread: defaultdict[tuple[torch.device, int], list[_Slot]] = defaultdict(list)
_lost: list[_Slot] = []
"""Slots whose copy no event follows, because an exception came before it: never used again."""


class HostCopy:
    """A copy of `numbers` `[n]` to the CPU, queued on the current stream of their device."""

    _slot: _Slot | None = None
    _is_queued = False
    _read: list[int] | None = None

    def __init__(self, numbers: Tensor) -> None:
        if numbers.is_cpu:
            self._numbers = numbers
            return
        self._reading = threading.Lock()
        self._key = numbers.device, numbers.shape[0]
        memory, event = self._slot = _take_slot(numbers, self._key)
        numbers_to_host(numbers, memory)
        event.record(current_stream(numbers.device))
        self._is_queued = True

    def __del__(self) -> None:
        if self._slot is not None and self._read is None:
            (_unread[self._key] if self._is_queued else _lost).append(self._slot)

    def have_come(self, seconds: float) -> bool:
        """Waits for the copy at most so many seconds; whether it is complete."""
        begin = time.monotonic()
        while self._slot is not None and not self._slot[1].query():  # type: ignore[no-untyped-call]
            if (waited := time.monotonic() - begin) > seconds:
                return False
            if waited > _SOON:
                time.sleep(_SOON)
        return True

    def read(self) -> list[int]:
        """The numbers, once the copy is complete."""
        if self._slot is None:
            return self._numbers.tolist()
        with self._reading:  # or two threads could free the slot, which others use meanwhile
            if self._read is None:
                memory, event = self._slot
                event.synchronize()
                self._read = memory.tolist()
                _unused[self._key].append(self._slot)  # only what has been read is for others
            return self._read


def _take_slot(numbers: Tensor, key: tuple[torch.device, int]) -> _Slot:
    """A slot that no copy writes to."""
    try:
        return _unused[key].pop()
    except IndexError:
        pass
    unread = _unread[key]
    for _ in range(len(unread)):
        try:
            slot = unread.pop(0)  # before the look, during which another thread may come
        except IndexError:
            break
        is_free = False
        try:
            is_free = slot[1].query()  # type: ignore[no-untyped-call]
        finally:
            if not is_free:
                unread.append(slot)
        if is_free:
            return slot
    with torch.inference_mode(False):  # or it could be used there only
        memory = torch.empty_like(numbers, device="cpu", pin_memory=True)
    return memory, torch.cuda.Event()  # type: ignore[no-untyped-call]

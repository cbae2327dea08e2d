"""ChangedRows: which rows of a table were written since a moment.

Moments are numbers from 1 on. A row has that of the last time it was written: on the device where
its id was known, so that nothing waits, also within a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["ChangedRows"]


class _Noted(NamedTuple):
    """What one device knows."""

    moments: Tensor
    """`[rows + 1]`: the moment before each row was written last, 0 if it was not; the last one is
    of no row."""
    now: Tensor
    """The last moment, `[1]`, as work that is queued there has it."""


class ChangedRows:
    """Notes when rows are written.

    Args:
        rows: Of the table.
        version: Gives torch's version of the table's memory: another number after each write that
            torch has made or an op of ours.
    """

    def __init__(self, rows: int, version: Callable[[], int]) -> None:
        self._rows, self._version = rows, version
        self._seen = version()
        self._now = self._all_at = 0
        """The last moment, and that before all rows were written last, for all that is known."""
        self._noted: dict[torch.device, _Noted] = {}

    @property
    def now(self) -> int:
        """The last moment."""
        return self._now

    def follow(self, version: Callable[[], int]) -> None:
        """Goes on with other memory, to which the rows have moved; see ChangedRows."""
        self._look()
        self._version, self._seen = version, version()

    def begin(self) -> int:
        """A new moment; the caller has waited for what was to be written before it."""
        self._look()
        self._now += 1
        for device, noted in self._noted.items():
            noted.now.fill_(self._now)
            _wait(device)
        return self._now

    @contextmanager
    def writing(self, ids: Tensor, number: Tensor | None = None) -> Iterator[None]:
        """Notes rows that are written within.

        Args:
            ids: Of the rows, int64 `[n]`, all of which are there.
            number: How many of them, from the first on, `[1]` on their device; by default all.
        """
        noted = self._on(ids.device)
        with self.moving():
            yield
            # After what is waited for.
            if number is None:
                noted.moments.index_fill_(0, ids, self._now)
            else:
                count = ids.shape[0]
                is_one = torch.arange(count, device=ids.device) < number
                places = torch.where(is_one, ids, self._rows)
                noted.moments.scatter_(0, places, noted.now.expand(count))

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Notes nothing within: rows come and go as they were noted before.

        Where an exception ends it all rows count as written, as the next look finds.
        """
        self._look()
        yield
        self._seen = self._version()

    def since(self, moment: int) -> Tensor:
        """Ids of the rows that were written since a moment, ascending `[n]`, on the CPU.

        All of them if something else has written to the table. The caller has waited for the GPU.
        """
        self._look()
        if self._all_at >= moment:
            return torch.arange(self._rows, device="cpu")
        found = [torch.empty(0, dtype=torch.int64, device="cpu")]
        for device, noted in self._noted.items():
            _wait(device)
            (ids,) = torch.where(noted.moments[:-1] >= moment)
            found.append(ids.cpu())
        every: Tensor = torch.unique(torch.cat(found))
        return every

    def _look(self) -> None:
        """All rows count as written after a write in place, which names none."""
        if (version := self._version()) != self._seen:
            self._all_at, self._seen = self._now, version

    def _on(self, device: torch.device) -> _Noted:
        if (noted := self._noted.get(device)) is None:
            with torch.inference_mode(False):
                moments = torch.zeros(self._rows + 1, dtype=torch.int32, device=device)
                now = torch.full((1,), self._now, dtype=torch.int32, device=device)
            noted = self._noted[device] = _Noted(moments, now)
        return noted


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

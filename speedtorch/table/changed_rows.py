"""ChangedRows: which rows of a table were written since a moment.

Moments are numbers from 1 on. Each row stores the moment of its last write. The device with the
row's id stores the number, so recording waits for nothing and also works in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["ChangedRows"]


class _Noted(NamedTuple):
    """The record of changes on one device."""

    moments: Tensor
    """`[rows + 1]`: the current moment at each row's last write, or 0. The last element is a dummy
    for ids beyond `number`."""
    now: Tensor
    """The last moment, `[1]`, for work that is queued on the device, such as CUDA graphs."""


class ChangedRows:
    """Records the moment of each row's last write.

    Args:
        rows: Number of rows of the table.
        version: Returns the `_version` of the table's memory, which changes after each write by
            torch or by an op of this library.
    """

    def __init__(self, rows: int, version: Callable[[], int]) -> None:
        self._rows, self._version = rows, version
        self._seen = version()
        self._now = self._all_at = 0
        """The last moment, and the last moment at which a write named no rows (all count)."""
        self._noted: dict[torch.device, _Noted] = {}

    @property
    def now(self) -> int:
        """The last moment."""
        return self._now

    def follow(self, version: Callable[[], int]) -> None:
        """Continues with other memory after the rows were copied there. See ChangedRows."""
        self._look()
        self._version, self._seen = version, version()

    def begin(self) -> int:
        """Starts and returns a new moment. The caller has waited for all earlier writes."""
        self._look()
        self._now += 1
        for device, noted in self._noted.items():
            noted.now.fill_(self._now)
            _wait(device)
        return self._now

    @contextmanager
    def writing(self, ids: Tensor, number: Tensor | None = None) -> Iterator[None]:
        """A context that records rows as written.

        Args:
            ids: Ids of the rows, int64 `[n]`, all within the table.
            number: Only the first `number` ids count, `[1]` on their device. By default all.
        """
        noted = self._on(ids.device)
        with self.moving():
            yield
            # Queued after the block, and thus after the waits of the block's work.
            if number is None:
                noted.moments.index_fill_(0, ids, self._now)
            else:
                count = ids.shape[0]
                is_one = torch.arange(count, device=ids.device) < number
                places = torch.where(is_one, ids, self._rows)
                noted.moments.scatter_(0, places, noted.now.expand(count))

    @contextmanager
    def moving(self) -> Iterator[None]:
        """A context for copies of rows that change no values: records nothing.

        If the block raises, all rows count as written, because `_seen` keeps the old version.
        """
        self._look()
        yield
        self._seen = self._version()

    def since(self, moment: int) -> Tensor:
        """Returns ascending ids of rows written since a moment, int64 `[n]` on the CPU.

        After any other write to the table, returns all ids. The caller has waited for the GPU.
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
        """Counts all rows as written if the version shows a write in place, which names no rows."""
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

"""ChangedRows: which rows of a table were written since a version of the table.

Versions are numbers from 1 on. For each row, the version of its last write is recorded. The record
is on the device that has the ids of the write. Therefore the host does not wait to record a write,
and a CUDA graph can contain the recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["ChangedRows"]


class _DeviceRecord(NamedTuple):
    """The record of changes on one device."""

    versions: Tensor
    """`[rows + 1]`: the version of each row's last recorded write with ids on this device, or 0.
    The last element is a dummy for ids beyond `number`."""
    now: Tensor
    """The last version, `[1]`, for work that is queued on the device, such as CUDA graphs."""


class ChangedRows:
    """Records the version of each row's last write.

    Args:
        rows: Number of rows of the table.
        memory_version: Returns the `_version` of the table's memory. HostTable.changed() names the
            writes that do not change it.
    """

    def __init__(self, rows: int, memory_version: Callable[[], int]) -> None:
        self._rows, self._memory_version = rows, memory_version
        self._seen = memory_version()
        self._now = self._all_at = 0
        """The last version, and the version of the last write to unknown rows.

        Such a write counts as a write to all rows.
        """
        self._records: dict[torch.device, _DeviceRecord] = {}

    @property
    def now(self) -> int:
        """The last version."""
        return self._now

    def follow(self, memory_version: Callable[[], int]) -> None:
        """Continues after the rows were copied to other memory, with the version of that memory."""
        self._detect_writes()
        self._memory_version, self._seen = memory_version, memory_version()

    def begin(self) -> int:
        """Starts and returns a new version. The caller must have waited for earlier writes."""
        self._detect_writes()
        self._now += 1
        for device, record in self._records.items():
            record.now.fill_(self._now)
            _wait(device)
        return self._now

    @contextmanager
    def writing(self, ids: Tensor, number: Tensor | None = None) -> Iterator[None]:
        """A context that records rows as written.

        Args:
            ids: Ids of the rows, int64 `[n]`, all within the table.
            number: Only the first `number` ids count, `[1]` on their device. By default all.
        """
        record = self._record_on(ids.device)
        with self.moving():
            yield
            # Queued after the block, and thus after the waits of the block's work.
            if number is None:
                record.versions.index_fill_(0, ids, self._now)
            else:
                count = ids.shape[0]
                is_one = torch.arange(count, device=ids.device) < number
                places = torch.where(is_one, ids, self._rows)
                record.versions.scatter_(0, places, record.now.expand(count))

    @contextmanager
    def moving(self) -> Iterator[None]:
        """A context for copies of rows that change no values: records nothing.

        If the block changes the memory and raises, all rows count as written, because `_seen` keeps
        the old version.
        """
        self._detect_writes()
        yield
        self._seen = self._memory_version()

    def since(self, version: int) -> Tensor:
        """Returns ascending ids of rows written since a version, int64 `[n]` on the CPU.

        Returns all ids if a write since then was to unknown rows. The caller must first write newer
        copies of rows back.
        """
        self._detect_writes()
        if self._all_at >= version:
            return torch.arange(self._rows, device="cpu")
        found = [torch.empty(0, dtype=torch.int64, device="cpu")]
        for device, record in self._records.items():
            _wait(device)
            (ids,) = torch.where(record.versions[:-1] >= version)
            found.append(ids.cpu())
        every: Tensor = torch.unique(torch.cat(found))
        return every

    def _detect_writes(self) -> None:
        """Counts all rows as written if `_version` changed outside of writing() and moving()."""
        if (memory_version := self._memory_version()) != self._seen:
            self._all_at, self._seen = self._now, memory_version

    def _record_on(self, device: torch.device) -> _DeviceRecord:
        if (record := self._records.get(device)) is None:
            with torch.inference_mode(False):
                versions = torch.zeros(self._rows + 1, dtype=torch.int32, device=device)
                now = torch.full((1,), self._now, dtype=torch.int32, device=device)
            record = self._records[device] = _DeviceRecord(versions, now)
        return record


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

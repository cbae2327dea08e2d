"""ResidentRows: the most used records of a file table, in slots of host memory."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from speedtorch.ops.functions import (
    resident_close,
    resident_counts,
    resident_find,
    resident_open,
    resident_write,
)

__all__ = ["ResidentReport", "ResidentRows", "Slots"]


class ResidentReport(NamedTuple):
    """The resident rows of a file table, and file accesses since the table was made."""

    slots: int
    """The maximum number of resident rows."""
    rows: int
    """The number of resident rows."""
    nbytes: int
    """Host memory of the slots, in bytes."""
    hit_rate: float
    """The share of a step's rows that were resident, 0 to 1; NaN before the first step."""
    reads: int
    """Records read from the file."""
    writes: int
    """Records written to the file."""
    read_bytes: int
    written_bytes: int
    wait_seconds: float
    """Time for which steps waited for the file."""


class Slots(Protocol):
    """The memory of the slots: a HostTable with the same fields."""

    rows: int
    record_bytes: int

    def rows_of(self, field: str) -> Tensor:
        """All slots of a field."""

    @property
    def record(self) -> Tensor:
        """All slots."""

    def close(self) -> None:
        """Frees the memory."""


class ResidentRows:
    """The most used records of a file, in slots of host memory.

    A changed record is written to the file when its slot gets another row, and by write_back().
    The caller waits for the GPU before each call, and serializes calls. A forked child begins with
    empty slots, because its parent process writes the changed records.

    Args:
        slots: The memory of the slots.
        descriptor, path: The open file, whose record r begins at byte `r * record_bytes`.
    """

    def __init__(self, slots: Slots, descriptor: int, path: str) -> None:
        self._slots, self._path = slots, path
        records = slots.record.view(torch.uint8).view(slots.rows, slots.record_bytes)
        self._handle = resident_open(records, descriptor)
        self._closer = weakref.finalize(self, resident_close, self._handle)
        self._closer.atexit = False  # rows are written back at exit, too
        self._process = os.getpid()

    @property
    def count(self) -> int:
        """The number of slots."""
        return self._slots.rows

    def fields(self, names: Iterable[str]) -> list[Tensor]:
        """All slots of fields."""
        return [self._slots.rows_of(name) for name in names]

    def find(self, ids: Tensor, changing: int) -> Tensor:
        """Returns the slots of ids `[n]` on the CPU, after reading missing records.

        The caller changes the records of the first `changing` ids. At most `count` ids. Raises
        OSError if the file cannot be read or written; then all changed records are still resident.
        """
        self._drop_inherited()
        slots, failure = resident_find(self._handle, ids, changing)
        self._raise(failure, "reading or writing")
        return slots

    def write(self, ids: Tensor) -> None:
        """Writes the changed records among these ids `[n]` to the file. Raises as find()."""
        self._drop_inherited()
        self._raise(resident_write(self._handle, ids, False), "writing")

    def write_back(self) -> None:
        """Writes all changed records to the file and empties the slots. Raises as find().

        Does nothing after close().
        """
        if self._closer.alive:
            self._drop_inherited()
            self._raise(resident_write(self._handle, None, True), "writing")

    def report(self) -> ResidentReport:
        """Returns what ResidentReport documents."""
        rows, hits, misses, reads, writes, wait_ns = resident_counts(self._handle).tolist()
        record_bytes, asked = self._slots.record_bytes, hits + misses
        return ResidentReport(
            slots=self.count,
            rows=rows,
            nbytes=self.count * record_bytes,
            hit_rate=hits / asked if asked else float("nan"),
            reads=reads,
            writes=writes,
            read_bytes=reads * record_bytes,
            written_bytes=writes * record_bytes,
            wait_seconds=wait_ns / 1e9,
        )

    def close(self) -> None:
        """Frees the slots; changes since write_back() are lost."""
        self._closer()
        self._slots.close()

    def _drop_inherited(self) -> None:
        if self._process != os.getpid():
            resident_write(self._handle, torch.empty(0, dtype=torch.int64), True)
            self._process = os.getpid()

    def _raise(self, failure: Tensor, doing: str) -> None:
        number, row = failure.tolist()
        if number:
            text = f"{os.strerror(number)}: {doing} the record of row {row:,} failed"
            raise OSError(number, text, self._path)

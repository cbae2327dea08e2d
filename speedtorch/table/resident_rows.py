"""ResidentRows: the most used records of a file table, in slots of host memory."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from speedtorch.memory.byte_count import text_of
from speedtorch.ops.functions import (
    resident_begin_find,
    resident_close,
    resident_counts,
    resident_end_find,
    resident_open,
    resident_read_ahead,
    resident_release,
    resident_slots,
    resident_write,
)

__all__ = [
    "MAX_SLOTS",
    "Lease",
    "ResidentReport",
    "ResidentRows",
    "index_shape",
    "reading_only",
]

MAX_SLOTS = 2**31 - 2
_lease_numbers = count()
_WINDOW = 256  # exchanges of a hit rate
_only_reads: ContextVar[bool] = ContextVar("only reads", default=False)


class ResidentReport(NamedTuple):
    """The resident rows of a file table, and file accesses since the table was made."""

    slots: int
    """The maximum number of resident rows."""
    rows: int
    """The number of resident rows."""
    nbytes: int
    """Host memory of the slots, in bytes."""
    hit_rate: float
    """The resident fraction of the rows that steps loaded or wrote back. NaN before the first
    step."""
    reads: int
    """Records read from the file."""
    writes: int
    """Records written to the file."""
    read_bytes: int
    written_bytes: int
    wait_seconds: float
    """Time of all calls that read or wrote records. These calls wait for the file."""
    read_ahead: int
    """Records that prefetch() began to read before their step, into the page cache."""


class _Memory(Protocol):
    """The part of HostTable that this module uses."""

    rows: int
    record_bytes: int

    def rows_of(self, field: str) -> Tensor:
        """All rows of a field."""

    @property
    def record(self) -> Tensor:
        """All records."""

    def close(self) -> None:
        """Frees the memory."""


class Lease:
    """Keeps slots until release(), at the latest until this object is freed."""

    _handle = number = -1  # names no lease, if __init__ is interrupted

    def __init__(self, handle: int) -> None:
        self._handle, self.number = handle, next(_lease_numbers)

    def release(self) -> None:
        """Ends the lease; a second call does nothing."""
        resident_release(self._handle, self.number)

    def __del__(self) -> None:
        """Ends the lease after Ctrl-C on any line."""
        self.release()


class ResidentRows:
    """The most used records of a file, in slots of host memory.

    A changed record is written to the file when its slot gets another row, and by write() and
    write_back(). A module of the table serializes its own calls. Garbage collection or another
    thread may call write() and write_back() during a lease. A forked child begins with empty slots,
    because its parent process writes the changed records.

    Args:
        slots: The memory of the slots: a table with the same fields.
        index: The memory of the index: a table with `uint8` records; see index_shape().
        rows, descriptor, path: The number of records and the open file, whose record r begins at
            byte `r * record_bytes`.
    """

    def __init__(
        self, slots: _Memory, index: _Memory, rows: int, descriptor: int, path: str
    ) -> None:
        self._slots, self._index, self._path = slots, index, path
        self._exchanges, self._counts_before, self._has_warned = 0, (0, 0, 0), False
        records = slots.record.view(torch.uint8).view(slots.rows, slots.record_bytes)
        self._handle = resident_open(records, index.record, descriptor, rows)
        # In a garbage cycle this finalizer runs before the last step's rows are written back. The
        # rows of that step are then written to the mapped file.
        self._closer = weakref.finalize(self, _close, self._handle, path, os.getpid())

    @property
    def is_open(self) -> bool:
        """Whether records may be in slots; False after close() and at interpreter exit."""
        return self._closer.alive

    @property
    def count(self) -> int:
        """The number of slots."""
        return self._slots.rows

    def fields(self, names: Iterable[str]) -> list[Tensor]:
        """All slots of fields."""
        return [self._slots.rows_of(name) for name in names]

    @contextmanager
    def lease(self) -> Iterator[Lease]:
        """Context manager whose end releases the slots that find() keeps for the lease."""
        lease = Lease(self._handle)
        try:
            yield lease
        finally:
            lease.release()

    def find(self, ids: Tensor, changing: int, lease: Lease) -> Tensor:
        """Returns the slots of ids `[n]` on the CPU, at most `count` ids.

        The ids keep their slots until the end of the lease. Until then the caller may write the
        records of the first `changing` ids. Waits for earlier exchanges on GPUs. Raises OSError if
        the file cannot be read or written, or other leases keep too many slots. No change is lost
        then.
        """
        self._count_exchange()
        slots, failure = resident_slots(self._handle, ids, changing, lease.number)
        _raise(failure, "reading or writing", self._path)
        return slots

    def begin_find(self, ids: Tensor, changing: int, lease: Lease) -> Tensor:
        """Like find() for ids on a GPU, by a kernel; the slots are valid if end_find() is true."""
        return resident_begin_find(self._handle, ids, changing, lease.number)

    def end_find(self, lease: Lease) -> bool:
        """Whether begin_find() has found slots of all ids.

        Waits for its kernel, unless all rows of the file have slots.
        """
        if not resident_end_find(self._handle, lease.number):
            return False
        self._count_exchange()
        return True

    def read_ahead(self, ids: Tensor) -> None:
        """Begins to read the records of ids `[n]` on the CPU that a later find() needs."""
        if self.is_open:
            resident_read_ahead(self._handle, ids)

    def write(self, ids: Tensor) -> None:
        """Writes the changed records among these ids `[n]` to the file.

        Waits and raises like find().
        """
        if self.is_open:
            _raise(resident_write(self._handle, ids, False), "writing", self._path)

    def write_back(self) -> None:
        """Writes all changed records to the file. Waits and raises like find().

        Empties the slots, because the caller may change the file, except in reading_only(True).
        """
        if self.is_open:
            _write_back(self._handle, self._path, keep=_only_reads.get())

    def report(self) -> ResidentReport:
        """Returns what ResidentReport documents."""
        rows, hits, misses, reads, writes, wait_ns, ahead = resident_counts(self._handle).tolist()
        record_bytes, lookups = self._slots.record_bytes, hits + misses
        return ResidentReport(
            slots=self.count,
            rows=rows,
            nbytes=self.count * record_bytes,
            hit_rate=hits / lookups if lookups else float("nan"),
            reads=reads,
            writes=writes,
            read_bytes=reads * record_bytes,
            written_bytes=writes * record_bytes,
            wait_seconds=wait_ns / 1e9,
            read_ahead=ahead,
        )

    def _count_exchange(self) -> None:
        self._exchanges += 1
        if self._exchanges % _WINDOW == 0:
            self._warn_if_few()

    def _warn_if_few(self) -> None:
        """Warns once if all slots are in use, but most rows of the last exchanges had none."""
        rows, hits, misses, _, _, wait_ns, _ = resident_counts(self._handle).tolist()
        before, self._counts_before = self._counts_before, (hits, misses, wait_ns)
        hits, misses, wait_ns = (
            now - then for now, then in zip(self._counts_before, before, strict=True)
        )
        if rows == self.count and misses > hits and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self._path}: {misses / (hits + misses):.0%} of the rows of the last {_WINDOW}"
                f" exchanges were not among the {rows:,} resident rows"
                f" ({text_of(rows * self._slots.record_bytes)}), and reads and writes of the file"
                f" took {wait_ns / 1e9:.2f} s. Increase resident=, or pass the ids on the CPU to"
                " prefetch(), which reads ahead.",
                RuntimeWarning,
                stacklevel=2,
            )

    def close(self) -> None:
        """Frees the slots after write_back()."""
        self._closer()
        self._slots.close()
        self._index.close()


def index_shape(slots: int) -> tuple[int, int]:
    """Returns the shape of the index of so many slots, in bytes; see resident_open()."""
    return slots + 2, 32


@contextmanager
def reading_only(only_reads: bool) -> Iterator[None]:
    """A context in which write_back(), in this thread, keeps rows in their slots.

    The caller reads tables and does not write to them. With False, the caller may write.
    """
    token = _only_reads.set(only_reads)
    try:
        yield
    finally:
        _only_reads.reset(token)


def _write_back(handle: int, path: str, *, keep: bool = False) -> None:
    _raise(resident_write(handle, None, not keep), "writing", path)


def _close(handle: int, path: str, process: int) -> None:
    try:
        if os.getpid() == process:  # a forked child does not write rows of its parent
            _write_back(handle, path)
    finally:
        resident_close(handle)


def _raise(failure: Tensor, doing: str, path: str) -> None:
    number, row = failure.tolist()
    if number:
        text = f"{os.strerror(number)}: {doing} the record of row {row:,} failed"
        raise OSError(number, text, path)

"""HostTable: the rows of a huge table with their optimizer state, stored as records."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar, cast

import numpy.typing as npt
import torch
from torch import Tensor

from speedtorch.files import table_files
from speedtorch.files.npy_format import NPY_DTYPES
from speedtorch.memory import host_memory
from speedtorch.memory.byte_count import bytes_of, text_of
from speedtorch.memory.placement import (
    MappedPlacement,
    MemoryKind,
    NotMapped,
    Placement,
    SharedPlacement,
    make_placement,
)
from speedtorch.memory.shared_memory import SharedMemory
from speedtorch.ops.functions import pinned_gather, pinned_scatter
from speedtorch.ops.shapes import check_span, row_count
from speedtorch.table import row_blocks
from speedtorch.table.changed_rows import ChangedRows
from speedtorch.table.read_only_rows import ReadOnlyRows
from speedtorch.table.record_layout import Fields, Record, lay_out, weight_and_state
from speedtorch.table.resident_rows import (
    MAX_SLOTS,
    ResidentReport,
    ResidentRows,
    index_shape,
    reading_only,
)
from speedtorch.table.table_handle import TableHandle

__all__ = [
    "FieldRows",
    "HostTable",
    "RowHolder",
    "any_tracks_changes",
    "field_rows",
    "is_same_view",
]

_Method = TypeVar("_Method", bound=Callable[..., Any])
_Result = TypeVar("_Result")
_Self = TypeVar("_Self", bound="HostTable")  # typing.Self needs Python 3.11.
_Device = str | int | torch.device | None
_Path = str | os.PathLike[str]


_tables: weakref.WeakSet[HostTable] = weakref.WeakSet()

_NEEDS_FILE = "resident: requires memory='file', got memory={!r}"


class FieldRows(NamedTuple):
    """Consecutive rows of one field, starting at row `first`."""

    table: HostTable
    field: str
    first: int


def field_rows(tensor: Tensor) -> FieldRows | None:
    """Returns the rows that `tensor` views in the memory of any open table, or None."""
    for table in list(_tables):
        for name, first in table.places_of(tensor):
            return FieldRows(table, name, first)
    return None


def is_same_view(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors view the same memory with equal dtype, shape and strides."""
    same = one.data_ptr() == other.data_ptr() and one.dtype == other.dtype
    return same and (one.shape, one.stride()) == (other.shape, other.stride())


def any_tracks_changes() -> bool:
    """Returns whether any table tracks its changed rows."""
    return any(table.changes is not None for table in list(_tables))


class RowHolder(Protocol):
    """An object with newer copies of a table's rows, such as the parameter of a step."""

    @property
    def lock(self) -> AbstractContextManager[None]:
        """A lock that a thread enters while it uses the rows. Threads that train them wait."""

    def write_back(self) -> None:
        """Writes newer copies of rows to the table. The holder reads the rows again before use."""

    @property
    def is_captured(self) -> bool:
        """Whether a captured CUDA graph uses the rows. Replays of the graph run no Python code."""

    def refuse_if_captured(self, what: str) -> None:
        """Raises RuntimeError if a CUDA graph uses the rows. `what` names the refused call."""


def _serialized(method: _Method) -> _Method:
    """Makes a table method hold the lock of the table's RowHolder while it runs."""

    @wraps(method)
    def call_locked(self: HostTable, *args: Any, **kwargs: Any) -> Any:
        """Enters the lock of the current holder, if any, for the call."""
        holder = None if self.holder is None else self.holder()
        with nullcontext() if holder is None else holder.lock:
            return method(self, *args, **kwargs)

    return cast(_Method, call_locked)


class HostTable:
    """A table of records, one per row. A record stores the weight and optimizer state of its row.

    Each part of a record is a field. Fields with larger items precede others, and fields with
    items of one size keep the given order. In a record of 128 bytes or more, fields whose size is a
    multiple of 16 bytes precede all others. If there are such others, the record is padded to a
    multiple of 16 bytes. `table["weight"]` is a strided view of all weights `[rows, *dim]`.
    `table.record` views all fields `[rows, columns]`.

    `table["weight"]`, `table.record` and methods that read or write rows first write back rows that
    a training step keeps on the GPU. Before you read a view that you kept, call `flush()` to write
    rows back and wait for the GPU. In a forked child (a DataLoader worker), methods that use rows
    raise for memory="managed", and memory="registered" works. Several processes use one table with
    memory="shared" and `share()`, or each maps a saved table with `open(path, "mapped")`.

    `zeros_`, `uniform_`, `normal_`, `init_` and `fill_` initialize a field and return the table.
    All run in parallel, except `init_` with a function that needs the whole tensor. The bits of a
    parallel call do not depend on the number of threads, the kind of memory or the other fields.
    The seed determines random numbers, or without a seed `torch.manual_seed`. `progress` shows a
    bar of a parallel call on stderr: always (True), never (False), or on a terminal after two
    seconds (None).

    A field name that the table does not have raises KeyError.

    Args:
        rows: Number of rows.
        dim: Columns of the weight, or the shape of one of its rows.
        dtype: The dtype of the weight.
        state: Names of fields with the weight's shape and dtype, named like the optimizer's state,
            or a mapping of names to (shape, dtype).
        memory: "managed" or "registered": host memory that the GPU accesses in place. "plain":
            pageable host memory, which a GPU reaches by staged copies, or on Grace in place.
            "auto": the fastest of these kinds on this machine. "cuda": GPU memory. "file": a mapped
            file, for tables larger than the memory. A GPU reaches it by staged copies, except for
            `resident` rows. "shared": host memory that other processes open through `share()`. Each
            process with a GPU registers it.
        device: The GPU of memory="cuda".
        path: The new file of memory="file", without a header. If another program shortens the file,
            later calls raise. A call that reads the file at that moment ends the process.
        resident: Bytes, or a text such as "64GiB", of host memory for the most used rows of
            memory="file". The GPU accesses these rows in place. Steps read other rows from the
            file, and write changed rows when another row needs the memory. flush() and methods that
            read or write rows write all changed rows. Until then another process sees older rows in
            the file.

    Attributes:
        rows, memory: The arguments. If `memory` was "auto", the kind that was chosen.
        memory_reason: Why a file was loaded instead of mapped, or why a GPU cannot read "mapped" or
            "shared" memory in place. Otherwise "".
        memory_beside: The kind of memory for a second table with optimizer state that this table
            does not have.
        writable: Whether rows can be written. False for a mapped file.
        dim, dtype: Columns (or row shape) and dtype of the weight. Without a weight, None and the
            fields' common dtype, if any.
        device: The device of the table's tensors: the CPU, or a GPU with memory="cuda".
        fields: Name to (row shape, dtype).
        record_bytes, nbytes: Bytes from one record to the next, and of the whole table.

    Raises:
        TypeError, ValueError: An argument has the wrong type or a value that is not allowed.
        RuntimeError: The machine does not support the kind of memory, for example because there is
            no GPU. The GPU has too little memory (torch.OutOfMemoryError).
        MemoryError: The machine has too little memory. Nothing was allocated.
        OSError: The file exists already or cannot be created.

    Example:
        >>> table = HostTable(1000, 4, state=("exp_avg",), memory="plain").normal_(0, 1, seed=3)
        >>> table["exp_avg"].shape, table.record.shape
        (torch.Size([1000, 4]), torch.Size([1000, 8]))
        >>> torch.equal(table.gather(torch.tensor([7, 7]), "weight")[1], table["weight"][7])
        True
    """

    def __init__(
        self,
        rows: int,
        dim: int | Sequence[int],
        dtype: torch.dtype = torch.float32,
        state: Iterable[str] | Fields = (),
        memory: MemoryKind = "auto",
        *,
        device: _Device = None,
        path: _Path | None = None,
        resident: int | str | None = None,
    ) -> None:
        self._allocate(rows, weight_and_state(dim, dtype, state), memory, device, path, resident)

    @classmethod
    def from_fields(
        cls,
        rows: int,
        fields: Fields,
        memory: MemoryKind = "auto",
        *,
        device: _Device = None,
        path: _Path | None = None,
        resident: int | str | None = None,
    ) -> HostTable:
        """Makes a zeroed table with any fields, name to (row shape, dtype). "weight" is optional.

        The other arguments and exceptions are the same as for HostTable.

        Example:
            >>> HostTable.from_fields(3, {"sum": (2, torch.float32)}, memory="plain").record_bytes
            8
        """
        table = cls.__new__(cls)
        table._allocate(rows, fields, memory, device, path, resident)
        return table

    @classmethod
    def open(
        cls,
        source: _Path,
        memory: MemoryKind = "auto",
        *,
        device: _Device = None,
        path: _Path | None = None,
        field: str | None = None,
        resident: int | str | None = None,
    ) -> HostTable:
        """Makes a table with the fields and rows of a saved table.

        `source` is the path that save() was called with, or any file with rows: `*.npy`, or
        `*.safetensors` with the same number of rows in all tensors. The rows are read into new
        memory. To open one tensor of a larger file, such as a model's checkpoint, name the tensor
        in `field`. The table stores that tensor as "weight".

        With memory="mapped" the file is mapped read-only. All processes share its rows in the
        system's page cache. A GPU that can register the file reads the rows in place. Otherwise GPU
        ops copy rows through the CPU. If the file's fields are not aligned, or its file system does
        not support mapping, the file is read as with memory="auto". `memory` and `memory_reason`
        show the result. If the file is shortened, later calls raise ValueError. To update such a
        file, write a new file beside it and rename that.

        The other arguments are the same as for HostTable. memory="mapped" accepts none of these.

        Raises:
            ValueError: The file is broken, contains no table or has no such field, or an argument
                is not allowed. No memory was allocated.
            MemoryError, OSError: See HostTable. OSError also if the file cannot be read.

        Example:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     HostTable(2, 1, memory="plain").fill_(7).save(f"{folder}/t.safetensors")
            ...     HostTable.open(f"{folder}/t.safetensors", "plain")["weight"].tolist()
            [[7.0], [7.0]]
        """
        if memory == "mapped":
            if resident is not None:
                raise ValueError(_NEEDS_FILE.format(memory))
            return cls._mapped(source, device, path, field)
        with table_files.open_fields(source, field=field) as stored:
            fields = {name: (field.shape[1:], field.dtype) for name, field in stored.items()}
            rows = next(iter(stored.values())).shape[0]
            table = cls.from_fields(
                rows, fields, memory, device=device, path=path, resident=resident
            )
            try:
                table._read(stored, range(rows))
            except BaseException:
                table._open_placement().remove_file()
                table.close()
                raise
        return table

    @classmethod
    def _mapped(
        cls, source: _Path, device: _Device, path: _Path | None, field: str | None
    ) -> HostTable:
        if device is not None or path is not None:
            raise ValueError(
                "memory='mapped' accepts no device and no path, because the rows remain in the"
                " opened file. Omit both."
            )
        try:
            placement = MappedPlacement(source, field)
        except NotMapped as error:
            table = cls.open(source, field=field)
            table.memory_reason = f"loaded, not mapped: {error}"
            return table
        views = placement.fields
        table = cls.__new__(cls)
        table._describe(
            len(next(iter(views.values()))),
            lay_out({name: (rows.shape[1:], rows.dtype) for name, rows in views.items()}),
        )
        if len(views) > 1:  # The file stores one field after the other, so there are no records.
            table.record_bytes = sum(rows[:1].nbytes for rows in views.values())
            table.nbytes = sum(rows.nbytes for rows in views.values())
        (first, *rest) = views.values()
        record = None if rest else first.view(table.rows, -1) if first.numel() else first
        table._set_memory(placement, views, record)
        table.was_read = True
        return table

    @classmethod
    def from_handle(cls, handle: TableHandle) -> HostTable:
        """Opens the table that another process shared with share(). Both use the same memory.

        Nothing is copied or read. Each process with a GPU registers the rows for it. close()
        affects only this process. The memory is freed with the last table, view and handle of all
        processes.

        Raises:
            TypeError: `handle` is not a TableHandle.
            ValueError: The handle comes from another machine or container, or from before a restart
                of the machine. Or its speedtorch version lays out records differently.
            ProcessLookupError: The process that called share() has ended or has closed the table.
                A process that multiprocessing started with the handle does not need that process.
            PermissionError: Another user owns the table, or the system denies access to the process
                that called share().

        Example:
            >>> table = HostTable(2, 1, memory="shared")
            >>> HostTable.from_handle(table.share()).fill_(7)["weight"].tolist()
            [[7.0], [7.0]]
            >>> table["weight"].tolist()
            [[7.0], [7.0]]
        """
        if not isinstance(handle, TableHandle):
            raise TypeError(f"handle: expected the result of table.share(), got {handle!r}")
        layout = handle.layout()
        table = cls.__new__(cls)
        table._describe(handle.rows, layout)
        placement = SharedPlacement(SharedMemory(handle.memory.open(), handle.memory.count))
        table._set_memory(placement, *_laid_out(placement.data, handle.rows, layout))
        table.was_read = handle.was_read
        return table

    def _allocate(
        self,
        rows: int,
        fields: Fields,
        kind: MemoryKind,
        device: _Device,
        path: _Path | None,
        resident: int | str | None,
    ) -> None:
        layout = lay_out(fields)
        self._describe(rows, layout)
        slots = self._slots(resident, kind)
        placement = make_placement(self.nbytes, len(self.fields), kind, device, path)
        self._set_memory(placement, *_laid_out(placement.data, self.rows, layout))
        if slots is not None and placement.descriptor is not None:
            try:
                length, width = index_shape(slots.rows)
                index = HostTable.from_fields(length, {"index": (width, torch.uint8)})
                file = placement.descriptor, str(placement.path)
                self.resident = ResidentRows(slots, index, self.rows, *file)
            except BaseException:
                placement.remove_file()
                raise

    def _slots(self, resident: int | str | None, kind: MemoryKind) -> HostTable | None:
        """Allocates the memory of resident rows, if there is any."""
        if resident is None:
            return None
        if kind != "file":
            raise ValueError(_NEEDS_FILE.format(kind))
        nbytes = bytes_of("resident", resident)
        if self.record_bytes and nbytes < self.record_bytes:
            raise ValueError(
                f"resident: {text_of(nbytes)} are too few for one row of {self.record_bytes} bytes."
                " Pass the bytes of at least the rows of one batch."
            )
        if self.nbytes == 0:
            return None
        count = min(self.rows, nbytes // self.record_bytes, MAX_SLOTS)
        return HostTable.from_fields(count, self.fields)

    def _describe(self, rows: int, layout: Record) -> None:
        """Checks the layout and sets the attributes that follow from it, without allocating."""
        self.rows = row_count(rows, "rows")
        self.fields = layout.fields
        for name, (shape, dtype) in self.fields.items():
            check_span(f"field {name!r}", (self.rows, *shape), dtype)
        self.record_bytes = layout.record_bytes
        self.nbytes = self.rows * self.record_bytes
        self.dim: int | tuple[int, ...] | None = None
        self.dtype: torch.dtype | None = layout.dtype
        if "weight" in self.fields:
            shape, self.dtype = self.fields["weight"]
            self.dim = shape[0] if len(shape) == 1 else shape
        self._layout = layout

    def _set_memory(
        self, placement: Placement, fields: Mapping[str, Tensor], record: Tensor | None
    ) -> None:
        """Sets the memory of all fields, and of the records if the memory has any."""
        self._placement: Placement | None = placement
        self.memory, self.memory_reason = placement.memory, placement.reason
        self.memory_beside, self.writable = placement.memory_beside, placement.writable
        self.is_in_place = placement.is_in_place
        self._plain_views = dict(fields)
        self.device = next(iter(fields.values())).device
        self._views = {name: self._guarded(rows) for name, rows in fields.items()}
        self._record = None if record is None else self._guarded(record)
        self.changes: ChangedRows | None = None
        _tables.add(self)

    def _guarded(self, rows: Tensor) -> Tensor:
        """Returns the rows for callers. If rows cannot be written, writes to the result raise."""
        return rows if self.writable else ReadOnlyRows(rows, self._read_only())

    def _read_only(self) -> str:
        path = self._open_placement().path
        return (
            f"is a read-only mapping of {path}. HostTable.open() without memory='mapped' loads the"
            " file into writable memory."
        )

    def check_writable(self, what: str) -> None:
        """Raises ValueError if rows cannot be written, such as rows of a mapped file.

        Example:
            >>> HostTable(2, 1, memory="plain").check_writable("training")
        """
        if not self.writable:
            raise ValueError(f"{what}: the table {self._read_only()}")

    resident: ResidentRows | None = None
    """The most used rows in host memory, or None without `resident`."""

    def report(self) -> ResidentReport:
        """Returns the number of resident rows of a file table, their hit rate, and file accesses.

        Raises:
            ValueError: The table was made without `resident`, has no bytes, or is closed.

        Example:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = f"{folder}/rows"
            ...     table = HostTable(8, 2, memory="file", path=path, resident="32B")
            ...     table.report().slots
            4
        """
        self._open_placement()
        if self.resident is None:
            raise ValueError(
                "report: only a nonempty table with memory='file' and resident= has a report"
            )
        return self.resident.report()

    holder: weakref.ref[RowHolder] | None = None

    def set_holder(self, holder: weakref.ref[RowHolder] | None) -> None:
        """Sets the object that trains rows of the table, or None."""
        self.holder = holder

    # Methods that make rows current for a caller. Each does what the one before does, and more:
    # _open_placement() raises for a closed table. make_current() raises for unusable memory, and
    # writes newer copies of rows back. settle() waits for the GPU. flush() writes to the disk.

    def write_back(self, *, only_reads: bool = False) -> None:
        """Makes the table current: newer copies of rows are written back.

        `only_reads`: The caller writes no rows, so that resident rows remain in their slots.
        """
        with reading_only(only_reads):
            if self.holder is not None and (holder := self.holder()) is not None:
                holder.write_back()
            if self.resident is not None:
                self.resident.write_back()

    def _open_placement(self) -> Placement:
        if self._placement is None:
            raise ValueError(
                "this table is closed. Close a table after its last use, or make another table."
            )
        return self._placement

    def make_current(self, *, only_reads: bool = False) -> Placement:
        """Writes newer copies of rows back and returns the memory; see write_back().

        Raises:
            ValueError: The table was closed or its file was shortened.
            RuntimeError: The memory is managed, and this is a forked child.
        """
        placement = self._open_placement()
        placement.check()
        self.write_back(only_reads=only_reads)
        return placement

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._placement is None

    def __len__(self) -> int:
        return self.rows

    def __contains__(self, field: object) -> bool:
        return field in self.fields

    # Iteration is ambiguous: over rows or over fields.
    __iter__ = None

    def __getitem__(self, field: str) -> Tensor:
        """All rows of one field, `[rows, *shape]`: a strided view of the records."""
        self.make_current()
        return self.rows_of(field)[:]  # a new tensor, because the caller may change its metadata

    def rows_of(self, field: str) -> Tensor:
        """Returns all rows of a field from memory, without writing newer copies back first.

        If rows cannot be written, writes to the result raise.
        """
        return self._field_in(self._views, field)

    def rows_to_read(self, field: str) -> Tensor:
        """Same as rows_of, but a plain tensor, to which the caller must not write."""
        return self._field_in(self._plain_views, field)

    def places_of(self, tensor: Tensor) -> Iterator[tuple[str, int]]:
        """Yields each field whose rows `tensor` views, with the first such row. Reads no row."""
        for name, rows in list(self._plain_views.items()):
            distance = tensor.data_ptr() - rows.data_ptr()
            if is_same_view(rows, tensor):
                yield name, 0
            elif tensor.numel() and rows.numel() and tensor.dim():
                first, rest = divmod(distance, rows.stride(0) * rows.element_size())
                part = rows[first : first + len(tensor)] if first >= 0 and rest == 0 else rows[:0]
                if is_same_view(part, tensor):
                    yield name, first

    def _field_in(self, views: Mapping[str, Tensor], field: str) -> Tensor:
        self._open_placement().check()
        self._number_of(field)
        return views[field]

    def _number_of(self, field: str) -> int:
        """The index of a field; raises KeyError if the table has no such field."""
        for number, name in enumerate(self.fields):
            if name == field:
                return number
        raise KeyError(f"this table has no field {field!r}. Fields: {', '.join(self.fields)}.")

    def __repr__(self) -> str:
        fields = ", ".join(
            f"{name} {list(shape)} {str(dtype).removeprefix('torch.')}"
            for name, (shape, dtype) in self.fields.items()
        )
        kind = self.memory if self._placement else "closed"
        why = f" ({self.memory_reason})" if self._placement and self.memory_reason else ""
        return (
            f"{type(self).__name__}({self.rows:,} rows of {fields};"
            f" {self.nbytes:,} bytes, {kind}{why})"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a HostTable cannot be pickled or copied. Call save(path) and HostTable.open(path) for"
            " a copy. For other processes, map that file with HostTable.open(path, 'mapped'), send"
            " the result of share() of a table with memory='shared', or fork with"
            " memory='registered'."
        )

    @property
    def record(self) -> Tensor:
        """All fields of all rows, `[rows, columns]` of their common dtype, or else uint8.

        Raises:
            ValueError: The table is a mapped file with several fields, which has no records.
        """
        self.make_current()
        return self._records()[:]

    def _records(self) -> Tensor:
        if self._record is None:
            raise ValueError(
                f"this mapped table has no records, because it stores its fields"
                f" {', '.join(self.fields)} one after the other. Choose one field, or open the file"
                " without memory='mapped'."
            )
        return self._record

    @_serialized
    def gather(
        self,
        index: Tensor,
        field: str | None = None,
        *,
        out: Tensor | None = None,
        plan: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Reads rows of a field by id, or whole records if `field` is None. See ops.pinned_gather.

        The result is `[*index.shape, *shape]`, or `[*index.shape, columns]` for records. Without
        `out` the result is on the device of the ids. If an id on a GPU is out of range, the result
        is zeros and a later call raises IndexError, at the latest flush().

        Example:
            >>> HostTable(3, 2, memory="plain").gather(torch.tensor([[0], [2]])).shape
            torch.Size([2, 1, 2])
        """
        self.make_current(only_reads=True)
        if field is not None:
            rows = self.rows_to_read(field)
        else:
            rows = self._records()
            rows = rows.rows if isinstance(rows, ReadOnlyRows) else rows
        return pinned_gather(rows, index, out=out, plan=plan)

    @_serialized
    def scatter(
        self,
        index: Tensor,
        src: Tensor,
        field: str | None = None,
        *,
        accumulate: bool = False,
        plan: Sequence[Tensor] | None = None,
    ) -> None:
        """Writes rows of gather()'s shape. The last of equal ids wins. See ops.pinned_scatter.

        With `accumulate` rows are added instead, those of equal ids in the order of `index`. Whole
        records need one dtype then.

        Example:
            >>> table = HostTable(3, 1, memory="plain")
            >>> table.scatter(torch.tensor([2, 2]), torch.tensor([[1.0], [5.0]]))
            >>> table["weight"].tolist()
            [[0.0], [0.0], [5.0]]
        """
        self.check_writable("scatter")
        rows = self.record if field is None else self[field]
        if accumulate and field is None and len({dtype for _, dtype in self.fields.values()}) > 1:
            raise ValueError("scatter: fields of different dtypes cannot be added. Pass one field.")
        with self.recording_changes(index):
            pinned_scatter(rows, index, src, accumulate=accumulate, plan=plan)

    def recording_changes(self, index: Tensor) -> AbstractContextManager[None]:
        """A context that records the rows `index` as changed if track_changes() has been called.

        The record clamps ids out of range, because the write itself raises their error.
        """
        if self.changes is None or not self.rows or not _may_be_ids(index):
            return nullcontext()
        ids = index.reshape(-1).to(torch.int64)
        return self.changes.writing(ids.clamp(0, self.rows - 1))

    @property
    def can_track_changes(self) -> bool:
        """Whether rows can be written, and no other process shares their memory."""
        return self.writable and self.memory != "shared"

    @property
    def is_captured(self) -> bool:
        """Whether a captured CUDA graph uses the rows of the table's holder."""
        holder = None if self.holder is None else self.holder()
        return holder is not None and holder.is_captured

    @_serialized
    def track_changes(self) -> int:
        """Starts to record which rows are written, and returns a number for changed().

        Each call starts a new period. Earlier numbers remain valid. On each device with ids of
        written rows, the record uses 4 bytes for every row of the table.

        Raises:
            ValueError: The table cannot be written, or other processes share it: this process does
                not see their writes.
            RuntimeError: A CUDA graph of steps on the rows exists at the first call. Replays of
                that graph would record nothing.

        Example:
            >>> table = HostTable(5, 1, memory="plain")
            >>> since = table.track_changes()
            >>> table.scatter(torch.tensor([3, 1]), torch.ones(2, 1), "weight")
            >>> table.changed(since).tolist()
            [1, 3]
        """
        self.settle_to_read()
        if not self.can_track_changes:
            raise ValueError(
                f"track_changes: the rows must be writable, and only by this process, but"
                f" memory is {self.memory!r}. Use another kind of memory."
            )
        if self.changes is None:
            if self.holder is not None and (holder := self.holder()) is not None:
                holder.refuse_if_captured("tracking its changes")
            self.changes = ChangedRows(self.rows, self._versions())
        return self.changes.begin()

    def _versions(self) -> Callable[[], int]:
        """Returns a function that reads the `_version` which all views of the memory share."""
        field = weakref.ref(next(iter(self._plain_views.values())))
        return lambda: cast(Tensor, field())._version

    def take_changes(self, before: HostTable) -> None:
        """Takes over the change record of a table whose rows were copied into this one."""
        self.changes, before.changes = before.changes, None
        if self.changes is not None:
            self.changes.follow(self._versions())

    @_serialized
    def changed(self, since: int) -> Tensor:
        """Returns ascending ids of rows written since track_changes(), int64 `[n]` on the CPU.

        Trained rows count after the end of their step, even while newer copies are on the GPU. A
        row counts even if its new values equal the old values. After load(), an initialization or a
        write in place, such as `table["weight"][3] = 0`, all rows count. Writes that do not change
        a tensor's `_version` are not seen: through `numpy()`, `.data` or `data_ptr()`, or by
        torch's fused optimizers. Write such rows with scatter().

        Args:
            since: A number that track_changes() returned.

        Raises:
            ValueError: track_changes() of this table never returned this number.
        """
        self.settle_to_read()
        known = 0 if self.changes is None else self.changes.now
        if self.changes is None or not 1 <= since <= known:
            raise ValueError(
                f"changed: expected a number that this table's track_changes() has returned"
                f" ({f'1 to {known}' if known else 'none yet'}), got {since}. Call track_changes()"
                " before the changes to record."
            )
        return self.changes.since(since)

    def numpy(self, field: str = "weight") -> npt.NDArray[Any]:
        """Returns a field as a NumPy array `[rows, *shape]` of the same memory. Waits for the GPU.

        Raises:
            ValueError: The rows are on a GPU, or NumPy does not have the dtype.

        Example:
            >>> HostTable(2, 1, memory="plain").numpy().tolist()
            [[0.0], [0.0]]
        """
        if (rows := self[field]).is_cuda:
            raise ValueError(
                "numpy: the rows are on a GPU. Call gather() with ids on that GPU, and then cpu()"
                " and numpy() of the result."
            )
        if rows.dtype not in NPY_DTYPES.values():
            raise ValueError(
                f"numpy: NumPy has no {rows.dtype}. View {field!r} as integers of the same size."
            )
        self.settle()
        return rows.numpy()

    @_serialized
    def zeros_(self: _Self, field: str = "weight", *, progress: bool | None = None) -> _Self:
        """Sets all elements of a field to zero; see the class for `progress`.

        Example:
            >>> HostTable(2, 2).zeros_()["weight"].tolist()
            [[0.0, 0.0], [0.0, 0.0]]
        """
        # False can be cast to every dtype.
        return self.fill_(False, field, progress=progress)

    @_serialized
    def uniform_(
        self: _Self,
        low: float = 0.0,
        high: float = 1.0,
        *,
        field: str = "weight",
        seed: int | None = None,
        progress: bool | None = None,
    ) -> _Self:
        """Draws all elements of a field uniformly from `[low, high)`. See HostTable for the rest.

        8-bit floats are rounded from float32, and may equal `high`.

        Raises:
            ValueError: `low` exceeds `high`, or the field has integers.

        Example:
            >>> table = HostTable(100, 8).uniform_(-1, 1, seed=0)
            >>> bool(table["weight"].abs().max() <= 1)
            True
        """
        if not low <= high:
            raise ValueError(f"uniform_: low must not exceed high, got {low} and {high}")
        function = torch.nn.init.uniform_
        return self.init_(function, low, high, field=field, seed=seed, progress=progress)

    @_serialized
    def normal_(
        self: _Self,
        mean: float = 0.0,
        std: float = 1.0,
        *,
        field: str = "weight",
        seed: int | None = None,
        progress: bool | None = None,
    ) -> _Self:
        """Draws all elements of a field from a normal distribution. See HostTable for the rest.

        Raises:
            ValueError: `std` is negative, or the field has integers.

        Example:
            >>> table = HostTable(1000, 8).normal_(5, 0.1, seed=0)
            >>> round(float(table["weight"].mean()), 1)
            5.0
        """
        if not std >= 0:
            raise ValueError(f"normal_: std must be 0 or more, got {std}")
        function = torch.nn.init.normal_
        return self.init_(function, mean, std, field=field, seed=seed, progress=progress)

    @_serialized
    def init_(
        self: _Self,
        function: Callable[..., object],
        *args: Any,
        field: str = "weight",
        seed: int | None = None,
        rows: slice = slice(None),
        share: row_blocks.Share | None = None,
        progress: bool | None = None,
        **kwargs: Any,
    ) -> _Self:
        """Runs a function such as torch.nn.init's on `rows` of a field. See HostTable for the rest.

        `function(tensor, *args, **kwargs)` must change the tensor in place and do nothing else. For
        most functions, a call on a stand-in with the shape of the rows records the operations.
        Elementwise operations then run on parts of the rows. Functions that need the whole tensor
        (`orthogonal_`, `eye_`, `dirac_`, `sparse_`) are called again, on a copy of the rows. With
        `share` the rows get the values that they would have in a larger table.

        Raises:
            TypeError: `kwargs` contains a generator, or the seed is not an int.
            ValueError: The function draws random numbers for a field of integers, or the blocks of
                `share` do not match the rows.
            NotImplementedError: `share` was passed with a function that needs the whole tensor.

        Example:
            >>> table = HostTable(100, 8).init_(torch.nn.init.xavier_uniform_, seed=1)
            >>> bool(table["weight"].abs().max() <= (6 / 108) ** 0.5)
            True
        """
        self.check_writable("init_")
        drawn = self[field][rows]
        self.settle()
        row_blocks.draw_rows(drawn, function, args, kwargs, seed, progress, share)
        self.settle()
        return self

    @_serialized
    def fill_(
        self: _Self, value: Any, field: str = "weight", *, progress: bool | None = None
    ) -> _Self:
        """Copies a number, or one row of the field's shape, to all rows of a field.

        A tensor of the field's dtype is copied bitwise. See HostTable for `progress`.

        Raises:
            TypeError: `value` is neither a number nor a row of numbers that torch can store.
            ValueError: The row has another shape. Its dtype cannot be cast (complex to real,
                floating to integer). A number is beyond the range of the field's dtype.

        Example:
            >>> HostTable(2, 3).fill_([1, 2, 3])["weight"].tolist()
            [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]
        """
        self.check_writable("fill_")
        rows = self[field]
        self.settle()
        row_blocks.fill_rows(rows, field, value, progress)
        self.settle()
        return self

    def begin_state(self, field: str, row: Tensor) -> None:
        """Initializes an optimizer state in all rows with `row` `[*shape]` on the CPU.

        In shared memory only the first such call of all processes writes the rows, unless they
        were loaded before.

        Raises:
            RuntimeError: The shared state was initialized with another value before.
            KeyError: The table has no such field.

        Example:
            >>> table = HostTable(2, 1, state=("sum",), memory="shared")
            >>> table.begin_state("sum", torch.tensor([0.1]))
            >>> table["sum"].tolist() == [[torch.tensor(0.1).item()]] * 2
            True
        """
        value = row.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        placement, number = self._open_placement(), self._number_of(field)
        if not placement.begin(number, value, lambda: self.fill_(row, field)):
            raise RuntimeError(
                f"the state {field!r} of this shared table was initialized with another value"
                " before, possibly in another process. Make the same optimizer in all processes"
                " before attach(), or share a new table."
            )

    def mark_loaded(self, *fields: str) -> None:
        """Marks fields in shared memory as loaded, so that begin_state() does not replace them.

        Example:
            >>> HostTable(2, 1, memory="plain").mark_loaded("weight")
        """
        for number in map(self._number_of, fields):
            self._open_placement().mark_loaded(number)

    @_serialized
    def save(self, path: _Path, *, rows: slice = slice(None)) -> None:
        """Saves all fields. An earlier table at `path` is kept until the new files are on disk.

        The switch is atomic: load() and open() find either the old or the new table, even after
        the process was killed, and while other processes save. If a save of several .npy files is
        killed, its files may be in a hidden folder until the next save renames them. Until then a
        program that reads the files by name finds old files among them.

        With `rows` only these rows are saved, as a table with that number of rows.

        Args:
            path: `*.safetensors` for one file with all fields, or `*.npy` for one file per field:
                `table.weight.npy` and `table.exp_avg.npy` for `table.npy`. A table with only a
                weight is saved as `table.npy` itself.
            rows: The rows to save: a slice with a step of 1. Its ends may be negative, as in
                Python. Unlike in Python, both ends must lie within the table, and the second must
                not be before the first. `slice(n, n)` is legal and selects no row.

        Raises:
            TypeError: `rows` is not a slice of integers.
            ValueError: The path has another ending. The format cannot store a dtype or a field's
                name. The path is the table's own mapped file, a named pipe, a device, or a symbolic
                link among several .npy files. Other .npy files beside it would be loaded as fields.
                `rows` has another step or its ends are not allowed.
            PermissionError: The file is read-only.
            OSError: The disk is full, or another file operation failed.

        Example:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     HostTable(2, 1, memory="plain").save(f"{folder}/rows.npy")
            ...     os.listdir(folder)
            ['rows.npy']
        """
        self.settle_to_read()
        local = _range_of(rows, self.rows, "rows")
        fields = {name: self.rows_to_read(name)[local.start : local.stop] for name in self.fields}
        own = self._open_placement().path
        table_files.save_fields(path, fields, None if own is None else os.path.realpath(own))

    was_read = False

    def set_was_read(self, was_read: bool) -> None:
        """Records whether rows were read from a file, rather than initialized."""
        self.was_read = was_read

    @_serialized
    def load(self, path: _Path, *, rows: slice = slice(None), stored: slice = slice(None)) -> None:
        """Reads all fields from the files of save(), or from files of the same format.

        With `rows` and `stored` only part of the file is read, into part of the table. Other rows
        of the table do not change.

        Args:
            path: See save().
            rows: The rows of the table to write: a slice as for save().
            stored: The rows of the file to read: a slice of the same length.

        Raises:
            TypeError: `rows` or `stored` is not a slice of integers.
            ValueError: The file is broken. The names, shapes or dtypes of its fields differ from
                the table's. `rows` or `stored` is not a slice that save() accepts, or their lengths
                differ. No row has changed.
            OSError: A file cannot be opened, and no row has changed. Or a read failed, and the
                message states that the table has both old and new rows.

        Example:
            >>> import tempfile
            >>> table = HostTable(2, 1, memory="plain")
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     HostTable(2, 1, memory="plain").fill_(7).save(f"{folder}/rows.npy")
            ...     table.load(f"{folder}/rows.npy", rows=slice(1), stored=slice(1, 2))
            >>> table["weight"].tolist()
            [[7.0], [0.0]]
        """
        self.check_writable("load")
        self.settle()
        local = _range_of(rows, self.rows, "rows")
        with table_files.open_fields(path, self.fields) as found:
            if set(found) != set(self.fields):
                raise ValueError(
                    f"{os.fspath(path)}: the file has the fields {sorted(found)}, but the table has"
                    f" {sorted(self.fields)}. To read a file with other fields, use"
                    " HostTable.open(path) or speedtorch.Embedding.from_pretrained(path)."
                )
            count = next(iter(found.values())).shape[0]
            source = _range_of(stored, count, f"{os.fspath(path)}: stored")
            parts = {name: field.part(source) for name, field in found.items()}
            whole = (len(local), len(source)) == (self.rows, count)
            requested = (
                f" (rows {local.start}:{local.stop} of {self.rows:,} from rows"
                f" {source.start}:{source.stop} of {count:,} in the file)"
            )
            for name, (shape, dtype) in self.fields.items():
                if ((part := parts[name]).shape, part.dtype) != ((len(local), *shape), dtype):
                    raise ValueError(
                        f"{part.file.path}: {name!r} is {part.dtype} {list(part.shape)}, but the"
                        f" table needs {dtype} {[len(local), *shape]}{'' if whole else requested}"
                    )
            self._read(parts, local)

    def _read(self, stored: Mapping[str, table_files.StoredField], rows: range) -> None:
        self.mark_loaded(*stored)
        for name, field in stored.items():
            field.read_into(self.rows_of(name)[rows.start : rows.stop])
        self.settle()
        self.was_read = True

    # ---- several processes

    was_shared = False
    """Whether share() was called. Then no other table may replace this one."""

    def share(self) -> TableHandle:
        """Returns a handle for HostTable.from_handle in another process of this machine and user.

        The handle can be pickled: as an argument of a process that multiprocessing starts, in the
        dataset of a DataLoader, or with torch.distributed.broadcast_object_list. The memory exists
        as long as the handle, or any process, refers to it.

        If a module made the table, attach its optimizer before you call share(). The state is then
        added to the table. State that a shared table lacks is stored per process instead.

        Several processes may write at once if they write different rows. Otherwise write within
        writing(), which only one process at a time enters, and read with read_consistently().

        Raises:
            ValueError: The table was not made with memory="shared", or is closed.

        Example:
            >>> table = HostTable(1000, 4, memory="shared")
            >>> table.share().rows
            1000
        """
        memory = self._open_placement().shared.handle()
        self.was_shared = True
        return TableHandle.of(self._layout, self.rows, self.was_read, memory)

    @property
    def version(self) -> int:
        """Twice the number of finished writing() blocks, plus 1 while a block is unfinished.

        Raises:
            ValueError: The table was not made with memory="shared", or is closed.

        Example:
            >>> table = HostTable(2, 1, memory="shared")
            >>> with table.writing():
            ...     table.version
            1
            >>> table.version
            2
        """
        return self._open_placement().shared.version

    def writing(self) -> AbstractContextManager[None]:
        """A context to write rows for readers in other processes, one writer at a time.

        Rows may be written in any way: with scatter(), a view or an optimizer step. At the end the
        context writes a step's rows back and waits for the GPU. Readers in read_consistently() see
        all of these writes or none. These readers and other writers wait for the block, so keep it
        short. If the block raises, readers see the writes made before the exception.

        Raises:
            ValueError: The table was not made with memory="shared", or is closed.
            RuntimeError: This thread is already within writing().

        Example:
            >>> table = HostTable(2, 1, memory="shared")
            >>> with table.writing():
            ...     table.scatter(torch.tensor([0, 1]), torch.ones(2, 1))
        """
        return self._open_placement().shared.writing(self.settle)

    def read_consistently(self, read: Callable[[], _Result], *, timeout_s: float = 10.0) -> _Result:
        """Calls `read()` until no process was within writing() during the call; returns its result.

        This is a sequence lock: readers hold no lock during `read()` and do not delay the writer. A
        thread that is itself within writing() reads at once.

        Args:
            read: Reads rows, for example with gather() or a lookup without gradients, and returns
                copies. This method may call `read` many times.
            timeout_s: Seconds to wait for a call without a concurrent writer.

        Raises:
            ValueError: The table was not made with memory="shared", or is closed.
            TimeoutError: For `timeout_s` seconds, each call overlapped with a writer, or a process
                was within writing().
            RuntimeError: A process ended within writing(), or could not write its rows back at the
                end. Rows may be of two versions.

        Example:
            >>> table = HostTable(2, 1, memory="shared")
            >>> table.read_consistently(lambda: table.gather(torch.tensor([1]))).tolist()
            [[0.0]]
        """

        def read_and_settle() -> _Result:
            """Reads, and waits for copies of the GPU before the version is compared."""
            result = read()
            self.settle()
            return result

        return self._open_placement().shared.read_consistently(read_and_settle, timeout_s)

    def settle(self) -> None:
        """Writes a step's rows back to the table and waits for the GPU. CPU views are then current.

        Raises:
            IndexError: The GPU found an id out of range.
            RuntimeError: The memory is managed, and this is a forked child.

        Example:
            >>> HostTable(2, 1, memory="plain").settle()
        """
        self.make_current().settle()

    def settle_to_read(self) -> None:
        """Like settle(), for a caller that writes no rows: resident rows remain in their slots."""
        self.make_current(only_reads=True).settle()

    def flush(self) -> None:
        """Calls settle(), and with memory="file" writes all rows to the disk.

        Raises:
            IndexError: The GPU found an id out of range.
            OSError: The write to the disk failed.

        Example:
            >>> HostTable(2, 1, memory="plain").flush()
        """
        self.make_current().flush()

    def close(self) -> None:
        """Calls flush(), and frees the memory once no view of it is left.

        A captured CUDA graph of single ops on the rows does not keep the memory: do not replay the
        graph. The file of memory="file" remains. A second close() does nothing. Any other use of
        the rows raises ValueError, even by a module that trains them.

        Raises:
            IndexError, OSError: See flush(). The table is closed all the same, unless newer copies
                of rows could not be written back.
            ValueError: The file of memory="file" was shortened. The table is closed all the same.
            RuntimeError: A CUDA graph of whole steps on its rows still exists.

        Example:
            >>> with HostTable(2, 1, memory="plain") as table:
            ...     table.rows
            2
        """
        if self._placement is None:
            return
        if self.holder is not None and (holder := self.holder()) is not None:
            holder.refuse_if_captured("closing its table")
        self.write_back()
        placement, self._placement = self._placement, None
        try:
            self._views.clear()
            self._plain_views.clear()
            del self._record
            self.changes = None
            placement.flush()
        finally:
            placement.release()
            if self.resident is not None:
                self.resident.close()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _laid_out(data: Tensor, rows: int, layout: Record) -> tuple[dict[str, Tensor], Tensor]:
    """Returns views of a table's bytes: all rows of each field, and the records."""
    fields = {name: layout.rows_of(data, rows, name) for name in layout.fields}
    record = layout.records_of(data, rows)
    for view in (*fields.values(), record):
        host_memory.keep_pinned(view, data)
    return fields, record


def _may_be_ids(index: object) -> bool:
    """Returns whether an op accepts `index` as ids. Ops raise for any other value."""
    if not isinstance(index, Tensor) or index.is_meta or index.layout != torch.strided:
        return False
    return index.dtype in (torch.int32, torch.int64)


def _range_of(rows: slice, count: int, what: str) -> range:
    """Converts a slice of `count` rows to a range within them. Errors call the slice `what`."""
    if not isinstance(rows, slice):
        raise TypeError(f"{what}: expected a slice, got {rows!r}")
    if rows.step not in (None, 1):
        raise ValueError(f"{what}: expected a step of 1, got {rows}")
    begin, end, _ = rows.indices(count)
    ends = (place for place in (rows.start, rows.stop) if place is not None)
    if begin > end or not all(-count <= place <= count for place in ends):
        raise ValueError(
            f"{what}: {rows} is not a range of {count:,} rows. Both ends must be within the rows, "
            "and the end must not be before the start."
        )
    return range(begin, end)

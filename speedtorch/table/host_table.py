"""HostTable: all rows of a huge table, and what an optimizer remembers about them, as records."""

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
from speedtorch.memory.placement import (
    MappedPlacement,
    MemoryKind,
    NotMapped,
    Placement,
    SharedPlacement,
    made_placement,
)
from speedtorch.ops.functions import pinned_gather, pinned_scatter
from speedtorch.ops.shapes import check_span, row_shape
from speedtorch.table import row_blocks
from speedtorch.table.changed_rows import ChangedRows
from speedtorch.table.read_only_rows import ReadOnlyRows
from speedtorch.table.record_layout import Fields, Record, lay_out, weight_and_state
from speedtorch.table.table_handle import TableHandle

__all__ = [
    "FieldRows",
    "HostTable",
    "RowHolder",
    "any_notes_changes",
    "field_rows",
    "is_same",
]

_Method = TypeVar("_Method", bound=Callable[..., Any])
_Result = TypeVar("_Result")
_Self = TypeVar("_Self", bound="HostTable")  # typing.Self needs Python 3.11.
_Device = str | int | torch.device | None
_Path = str | os.PathLike[str]


_tables: weakref.WeakSet[HostTable] = weakref.WeakSet()


class FieldRows(NamedTuple):
    """Consecutive rows of a field, from `first` on."""

    table: HostTable
    field: str
    first: int


def field_rows(tensor: Tensor) -> FieldRows | None:
    """Which rows a tensor is in the memory of a table: all of a field, or some of them."""
    for table in list(_tables):
        for name, first in table.places_of(tensor):
            return FieldRows(table, name, first)
    return None


def is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same elements in the same memory."""
    same = one.data_ptr() == other.data_ptr() and one.dtype == other.dtype
    return same and (one.shape, one.stride()) == (other.shape, other.stride())


def any_notes_changes() -> bool:
    """Whether there is a table that notes which rows are written."""
    return any(table.changes is not None for table in list(_tables))


class RowHolder(Protocol):
    """What holds rows of a table elsewhere, as the parameter of a step for instance."""

    @property
    def turn(self) -> AbstractContextManager[None]:
        """Entered by a thread while it uses the rows: another thread that trains them waits."""

    def write_back(self) -> None:
        """Writes rows that are newer elsewhere to the table, and reads them again before use."""

    @property
    def is_captured(self) -> bool:
        """Whether a CUDA graph uses the rows, which does not see what is done."""

    def refuse_if_captured(self, what: str) -> None:
        """Raises RuntimeError if one does."""


def _in_turn(method: _Method) -> _Method:
    """Lets a method of a table wait until no other thread uses the rows that a module holds."""

    @wraps(method)
    def in_turn(self: HostTable, *args: Any, **kwargs: Any) -> Any:
        holder = None if self.holder is None else self.holder()
        with nullcontext() if holder is None else holder.turn:
            return method(self, *args, **kwargs)

    return cast(_Method, in_turn)


class HostTable:
    """A table of records, one per row, with a weight and any number of fields beside it.

    A record is one run of bytes: fields of one dtype lie side by side in the given order; with
    different dtypes larger items come first. `table["weight"]` is the weight of all rows,
    `[rows, *dim]`, a strided view of the records; `table.record` is everything, `[rows, columns]`.

    Rows that a module's step holds come home before any method, `table["weight"]` or `table.record`
    gives or takes rows. Code that keeps a view calls `flush()` before reading it, for that reason
    and as the GPU writes on its own time. In a forked child (a DataLoader worker) every method
    refuses managed memory; memory="registered" works. Other processes use one table in
    memory="shared" by its `share()`, or a saved one that each maps: `open(path, "mapped")`.

    `zeros_`, `uniform_`, `normal_`, `init_` and `fill_` give a field its first values, in parallel,
    and return the table. With a seed the bits are the same whatever the number of threads, the kind
    of memory and the other fields; without one `torch.manual_seed` decides. `progress` shows a bar
    on stderr: always, never, or (None) on a terminal when it takes longer than a moment.

    A field that is not there is a KeyError, wherever it is named.

    Args:
        rows: Number of rows.
        dim: Columns of the weight, or the shape of one of its rows.
        dtype: The weight's elements.
        state: Names of fields like the weight, as the optimizer names its state, or a mapping of
            names to (shape, dtype).
        memory: "managed" or "registered": host memory that the GPU reads in place; "plain": any
            host memory; "auto": the fastest that this machine has. "cuda": on the GPU. "file": a
            mapped file, for tables beyond the memory (a GPU reaches it by staged copies only).
            "shared": host memory that other processes can open by `share()`; each that has a GPU
            registers it.
        device: The GPU of memory="cuda".
        path: The new file of memory="file", without a header. A call after it was shortened raises;
            one at that moment ends the process.

    Attributes:
        rows, memory: As given, or the kind of memory that "auto" became.
        memory_reason: Why the memory is another than was asked for, or is not reached by a GPU in
            place; "" if neither is so.
        memory_beside: The kind of memory of what modules make beside the table.
        writable: Whether rows can be written; those of a mapped file cannot.
        dim, dtype: The weight's; without one None, and the dtype that all fields share, if any.
        device: Of its tensors: the CPU, or a GPU with memory="cuda".
        fields: Name to (row shape, dtype).
        record_bytes, nbytes: Bytes from one record to the next, and of all of them.

    Raises:
        TypeError, ValueError: Arguments of the wrong type or beyond what is allowed.
        MemoryError: The machine has too little memory; nothing was taken.
        OSError: The file exists already or cannot be made.

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
    ) -> None:
        self._take_memory(rows, weight_and_state(dim, dtype, state), memory, device, path)

    @classmethod
    def from_fields(
        cls,
        rows: int,
        fields: Fields,
        memory: MemoryKind = "auto",
        *,
        device: _Device = None,
        path: _Path | None = None,
    ) -> HostTable:
        """Makes a table of any fields, name to (row shape, dtype), all zeros; no weight is needed.

        All else, and what it raises, is as for HostTable.

        Example:
            >>> HostTable.from_fields(3, {"sum": (2, torch.float32)}, memory="plain").record_bytes
            8
        """
        table = cls.__new__(cls)
        table._take_memory(rows, fields, memory, device, path)
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
    ) -> HostTable:
        """Makes a table with the fields and the rows of a saved one.

        `source` is what save() was given, or a file of anyone's: `*.safetensors` whose tensors all
        have the same number of rows, or `*.npy`. It is read into memory of its own. Of a file with
        other tensors, such as a whole model's, `field` names the one that is the table's "weight".

        With memory="mapped" it is not read but mapped, read-only: the rows are those of the file,
        in the system's page cache, which all processes share. A GPU reads them in place where it
        can register the file; elsewhere its ops copy rows through the CPU. A file that cannot be
        mapped, for its fields are not aligned or its file system does not do it, is read as with
        memory="auto". `memory` and `memory_reason` say which it is, and why. A call after the file
        was shortened raises ValueError; write a new file beside it and rename that.

        All else is as for HostTable.

        Raises:
            ValueError: The file is broken or holds no table; found before memory is taken.
            MemoryError, OSError: As for HostTable, or the file cannot be read.

        Example:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     HostTable(2, 1, memory="plain").fill_(7).save(f"{folder}/t.safetensors")
            ...     HostTable.open(f"{folder}/t.safetensors", "plain")["weight"].tolist()
            [[7.0], [7.0]]
        """
        if memory == "mapped":
            return cls._mapped(source, device, path, field)
        with table_files.open_fields(source, field=field) as stored:
            fields = {name: (each.shape[1:], each.dtype) for name, each in stored.items()}
            rows = next(iter(stored.values())).shape[0]
            table = cls.from_fields(rows, fields, memory, device=device, path=path)
            try:
                table._read(stored, range(rows))
            except BaseException:
                table._placed().remove_file()
                table.close()
                raise
        return table

    @classmethod
    def _mapped(
        cls, source: _Path, device: _Device, path: _Path | None, field: str | None
    ) -> HostTable:
        if device is not None or path is not None:
            raise ValueError(
                "memory='mapped' takes neither device nor path: the rows stay in the file that is"
                " opened"
            )
        try:
            placement = MappedPlacement(source, field)
        except NotMapped as error:
            table = cls.open(source, field=field)
            table.memory_reason = f"loaded, not mapped: {error}"
            return table
        every = placement.fields
        table = cls.__new__(cls)
        table._describe(
            len(next(iter(every.values()))),
            lay_out({name: (each.shape[1:], each.dtype) for name, each in every.items()}),
        )
        if len(every) > 1:  # which lie one after the other, each with all of its rows
            table.record_bytes = sum(each[:1].nbytes for each in every.values())
            table.nbytes = sum(each.nbytes for each in every.values())
        (first, *others) = every.values()
        record = None if others else first.view(table.rows, -1) if first.numel() else first
        table._lie_in(placement, every, record)
        table.was_read = True
        return table

    @classmethod
    def from_handle(cls, handle: TableHandle) -> HostTable:
        """Opens the table that share() of another process gives, in this one: the same memory.

        Nothing is copied, and nothing read: each process has all rows at once, and registers them
        for its own GPU. Each closes the table for itself; the memory goes with the last.

        Raises:
            TypeError: It is no handle.
            ValueError: The handle is of another machine, container, version or from before the
                machine's last start.
            ProcessLookupError: The process that gave it has ended, or has closed the table. A
                process that multiprocessing has started with the handle does not need it.
            PermissionError: The table is another user's.

        Example:
            >>> table = HostTable(2, 1, memory="shared")
            >>> HostTable.from_handle(table.share()).fill_(7)["weight"].tolist()
            [[7.0], [7.0]]
            >>> table["weight"].tolist()
            [[7.0], [7.0]]
        """
        if not isinstance(handle, TableHandle):
            raise TypeError(f"handle: expected what table.share() gives, got {handle!r}")
        layout = handle.layout()
        table = cls.__new__(cls)
        table._describe(handle.rows, layout)
        placement = SharedPlacement.opened(handle.memory)
        table._lie_in(placement, *_laid_out(placement.data, handle.rows, layout))
        table.was_read = handle.was_read
        return table

    def _take_memory(
        self, rows: int, fields: Fields, kind: MemoryKind, device: _Device, path: _Path | None
    ) -> None:
        layout = lay_out(fields)
        self._describe(rows, layout)
        placement = made_placement(self.nbytes, len(self.fields), kind, device, path)
        self._lie_in(placement, *_laid_out(placement.data, self.rows, layout))

    def _describe(self, rows: int, layout: Record) -> None:
        """Checks what the table will be, and says it; no memory is taken."""
        if isinstance(rows, Sequence):
            raise TypeError(f"rows: expected an int, got {rows!r}")
        (self.rows,) = row_shape(rows, "rows")
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

    def _lie_in(
        self, placement: Placement, fields: Mapping[str, Tensor], record: Tensor | None
    ) -> None:
        """Takes memory with all rows of the fields, and of the records if there are any."""
        self._placement: Placement | None = placement
        self.memory, self.memory_reason = placement.memory, placement.reason
        self.memory_beside, self.writable = placement.memory_beside, placement.writable
        self.is_in_place = placement.is_in_place
        self._plain_views = dict(fields)
        self.device = next(iter(fields.values())).device
        self._views = {name: self._guarded(each) for name, each in fields.items()}
        self._record = None if record is None else self._guarded(record)
        self.changes: ChangedRows | None = None
        _tables.add(self)

    def _guarded(self, rows: Tensor) -> Tensor:
        """Rows as callers get them: those that cannot be written refuse it."""
        return rows if self.writable else ReadOnlyRows(rows, self._read_only())

    def _read_only(self) -> str:
        path = self._placed().path
        return (
            f"lies in a read-only mapping of {path}: HostTable.open({path!r}) reads it into memory"
            " that can be written"
        )

    def check_writable(self, what: str) -> None:
        """Raises ValueError if rows cannot be written, as those of a mapped file.

        Example:
            >>> HostTable(2, 1, memory="plain").check_writable("training")
        """
        if not self.writable:
            raise ValueError(f"{what}: the table {self._read_only()}")

    holder: weakref.ref[RowHolder] | None = None

    def be_held(self, holder: weakref.ref[RowHolder] | None) -> None:
        """Says what trains rows of the table."""
        self.holder = holder

    def write_back(self) -> None:
        """Brings rows home that a module trains: the table has all rows as they are now."""
        if self.holder is not None and (holder := self.holder()) is not None:
            holder.write_back()

    def _placed(self) -> Placement:
        if self._placement is None:
            raise ValueError(
                "this table is closed, and its memory is gone: close it after its last use, or make"
                " another"
            )
        return self._placement

    def check(self) -> None:
        """Raises what makes the table unusable: it was closed, or its file was cut.

        Rows that a module holds come home.

        Example:
            >>> HostTable(2, 1, memory="plain").check()
        """
        self._at_home()

    def _at_home(self) -> Placement:
        """Where all rows are, as they are now."""
        placement = self._placed()
        placement.check()
        self.write_back()
        return placement

    @property
    def closed(self) -> bool:
        """Whether close() has given the memory back."""
        return self._placement is None

    def __len__(self) -> int:
        return self.rows

    def __contains__(self, field: object) -> bool:
        return field in self.fields

    # Iterating would mean rows to some and fields to others.
    __iter__ = None

    def __getitem__(self, field: str) -> Tensor:
        """All rows of one field, `[rows, *shape]`: a strided view of the records."""
        self._at_home()
        return self.rows_of(field)[:]  # a tensor of the caller's, which may become another

    def rows_of(self, field: str) -> Tensor:
        """A field as it is in memory; rows held elsewhere stay there."""
        return self._found(self._views, field)

    def rows_to_read(self, field: str) -> Tensor:
        """As rows_of, for what reads alone: of rows that cannot be written nothing guards them."""
        return self._found(self._plain_views, field)

    def places_of(self, tensor: Tensor) -> Iterator[tuple[str, int]]:
        """The field of which a tensor is rows in the table's memory, and the first; reads none."""
        for name, each in list(self._plain_views.items()):
            distance = tensor.data_ptr() - each.data_ptr()
            if is_same(each, tensor):
                yield name, 0
            elif tensor.numel() and each.numel() and tensor.dim():
                first, rest = divmod(distance, each.stride(0) * each.element_size())
                part = each[first : first + len(tensor)] if first >= 0 == rest else each[:0]
                if is_same(part, tensor):
                    yield name, first

    def _found(self, views: Mapping[str, Tensor], field: str) -> Tensor:
        self._placed().check()
        if field not in self.fields:
            raise KeyError(f"no field {field!r} in this table; it has {', '.join(self.fields)}")
        return views[field]

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
            "a table is not pickled or copied: save() it, and HostTable.open(path, 'mapped') in the"
            " other process; or make it with memory='shared', and send its share(); or fork with"
            " memory='registered'"
        )

    @property
    def record(self) -> Tensor:
        """All fields of all rows, `[rows, columns]` of their common dtype, or else uint8.

        Raises:
            ValueError: The fields of a mapped file do not lie side by side.
        """
        self._at_home()
        if self._record is None:
            raise ValueError(
                f"a mapped file has no records: its fields {', '.join(self.fields)} lie one after"
                " the other; name one, or open it without memory='mapped'"
            )
        return self._record[:]

    @_in_turn
    def gather(
        self,
        index: Tensor,
        field: str | None = None,
        *,
        out: Tensor | None = None,
        plan: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Rows of a field, or (None) whole records, by their ids, as ops.pinned_gather.

        They are `[*index.shape, *shape]`, or `[*index.shape, columns]`. Without `out` they are
        where the ids are. Bad ids on a GPU are raised at a later call, at the latest by flush().

        Example:
            >>> HostTable(3, 2, memory="plain").gather(torch.tensor([[0], [2]])).shape
            torch.Size([2, 1, 2])
        """
        if field is None:
            rows = self.record
            rows = rows.rows if isinstance(rows, ReadOnlyRows) else rows
        else:
            self._at_home()
            rows = self.rows_to_read(field)
        return pinned_gather(rows, index, out=out, plan=plan)

    @_in_turn
    def scatter(
        self,
        index: Tensor,
        src: Tensor,
        field: str | None = None,
        *,
        accumulate: bool = False,
        plan: Sequence[Tensor] | None = None,
    ) -> None:
        """Writes rows as gather() gives them, as ops.pinned_scatter: the last of equal ids wins.

        With `accumulate` it adds instead, in the order of the ids, to records of one dtype.

        Example:
            >>> table = HostTable(3, 1, memory="plain")
            >>> table.scatter(torch.tensor([2, 2]), torch.tensor([[1.0], [5.0]]))
            >>> table["weight"].tolist()
            [[0.0], [0.0], [5.0]]
        """
        self.check_writable("scatter")
        rows = self.record if field is None else self[field]
        if accumulate and field is None and len({dtype for _, dtype in self.fields.values()}) > 1:
            raise ValueError("scatter: records of different dtypes cannot be added; name a field")
        with self.noting(index):
            pinned_scatter(rows, index, src, accumulate=accumulate, plan=plan)

    def noting(self, index: Tensor) -> AbstractContextManager[None]:
        """Notes rows that are written within, if track_changes() was called; ids may be bad."""
        if self.changes is None or not self.rows or not _may_be_ids(index):
            return nullcontext()
        ids = index.reshape(-1).to(torch.int64)
        return self.changes.writing(ids.clamp(0, self.rows - 1))

    @property
    def can_note_changes(self) -> bool:
        """Whether this process makes all writes, and there are any."""
        return self.writable and self.memory != "shared"

    @property
    def is_captured(self) -> bool:
        """Whether a CUDA graph uses rows that a module holds, as it did when it was captured."""
        holder = None if self.holder is None else self.holder()
        return holder is not None and holder.is_captured

    @_in_turn
    def track_changes(self) -> int:
        """Notes from now on which rows are written; gives the number that changed() takes.

        Each call begins anew, and the numbers of before stay valid. The device that trains rows
        keeps 4 bytes of each row of the table for it.

        Raises:
            ValueError: The table is shared with other processes, whose writes are not seen, or
                cannot be written.
            RuntimeError: A CUDA graph was captured before the first call, and would note nothing.

        Example:
            >>> table = HostTable(5, 1, memory="plain")
            >>> since = table.track_changes()
            >>> table.scatter(torch.tensor([3, 1]), torch.ones(2, 1), "weight")
            >>> table.changed(since).tolist()
            [1, 3]
        """
        self.settle()
        if not self.can_note_changes:
            raise ValueError(
                f"track_changes: memory is {self.memory!r}, of which this process does not see all"
                " writes, or that has none; use another kind"
            )
        if self.changes is None:
            if self.holder is not None and (holder := self.holder()) is not None:
                holder.refuse_if_captured("noting its changes")
            self.changes = ChangedRows(self.rows, self._versions())
        return self.changes.begin()

    def _versions(self) -> Callable[[], int]:
        """What gives torch's version of the memory, of which all fields are views."""
        field = weakref.ref(next(iter(self._plain_views.values())))
        return lambda: cast(Tensor, field())._version

    def take_changes(self, before: HostTable) -> None:
        """Notes on what was noted of a table whose rows are in this one from now on."""
        self.changes, before.changes = before.changes, None
        if self.changes is not None:
            self.changes.follow(self._versions())

    @_in_turn
    def changed(self, since: int) -> Tensor:
        """Ids of rows that were written since track_changes(), ascending, int64 `[n]`, on the CPU.

        Trained rows count once their step is over, wherever they are held; a row that was written
        with the values of before counts, too. Writes in place, as `table["weight"][3] = 0`, do not
        tell which rows they change: all rows count then. Writes that torch does not count in a
        tensor's `_version` (into what `numpy()` or `.data` gives, by `data_ptr()`, by its fused
        optimizers) are not seen: write such rows with scatter().

        Args:
            since: What track_changes() has returned.

        Raises:
            ValueError: track_changes() has not returned this number.
        """
        known = 0 if self.changes is None else self.changes.now
        if self.changes is None or not 1 <= since <= known:
            raise ValueError(
                f"changed: expected a number that this table's track_changes() has returned (1 to"
                f" {known}), got {since}; call it before the changes that are to be noted"
            )
        self.settle()
        return self.changes.since(since)

    def numpy(self, field: str = "weight") -> npt.NDArray[Any]:
        """A field as a NumPy array `[rows, *shape]` of the same memory, when the GPU is done.

        Raises:
            ValueError: The rows are on a GPU, or NumPy has no such dtype.

        Example:
            >>> HostTable(2, 1, memory="plain").numpy().tolist()
            [[0.0], [0.0]]
        """
        if (rows := self[field]).is_cuda:
            raise ValueError("numpy: the rows are on a GPU; gather() those that you need")
        if rows.dtype not in NPY_DTYPES.values():
            raise ValueError(
                f"numpy: NumPy has no {rows.dtype}; view {field!r} as integers of the same size"
            )
        self.settle()
        return rows.numpy()

    @_in_turn
    def zeros_(self: _Self, field: str = "weight", *, progress: bool | None = None) -> _Self:
        """Sets all elements of a field to zero; see the class for `progress`.

        Example:
            >>> HostTable(2, 2).zeros_()["weight"].tolist()
            [[0.0, 0.0], [0.0, 0.0]]
        """
        return self.fill_(False, field, progress=progress)

    @_in_turn
    def uniform_(
        self: _Self,
        low: float = 0.0,
        high: float = 1.0,
        *,
        field: str = "weight",
        seed: int | None = None,
        progress: bool | None = None,
    ) -> _Self:
        """Draws all elements of a field evenly from `[low, high)`; see the class for the rest.

        Raises:
            ValueError: `low` above `high`, or a field of integers.

        Example:
            >>> table = HostTable(100, 8).uniform_(-1, 1, seed=0)
            >>> bool(table["weight"].abs().max() <= 1)
            True
        """
        if not low <= high:
            raise ValueError(f"uniform_: low must not exceed high, got {low} and {high}")
        function = torch.nn.init.uniform_
        return self.init_(function, low, high, field=field, seed=seed, progress=progress)

    @_in_turn
    def normal_(
        self: _Self,
        mean: float = 0.0,
        std: float = 1.0,
        *,
        field: str = "weight",
        seed: int | None = None,
        progress: bool | None = None,
    ) -> _Self:
        """Draws all elements of a field from a normal distribution; see the class for the rest.

        Raises:
            ValueError: A negative `std`, or a field of integers.

        Example:
            >>> table = HostTable(1000, 8).normal_(5, 0.1, seed=0)
            >>> round(float(table["weight"].mean()), 1)
            5.0
        """
        if not std >= 0:
            raise ValueError(f"normal_: std must be 0 or more, got {std}")
        function = torch.nn.init.normal_
        return self.init_(function, mean, std, field=field, seed=seed, progress=progress)

    @_in_turn
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
        """Runs any function of torch.nn.init, or one like it, on a field, or on some of its rows.

        It is called as `function(tensor, *args, **kwargs)`, on a stand-in of the field's shape and
        on parts of it: it changes the tensor in place and does nothing else. Functions that need
        the whole tensor at once (`orthogonal_`, `eye_`, `dirac_`, `sparse_`) run on a copy of the
        field. With a `share` the rows get the values that they would have in a larger table. See
        the class for the rest.

        Raises:
            TypeError: `kwargs` holds a generator, or the seed is no int.
            ValueError: Random numbers for a field of integers, or a share that is none of the rows.
            NotImplementedError: A share, and a function that needs the whole tensor at once.

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

    @_in_turn
    def fill_(
        self: _Self, value: Any, field: str = "weight", *, progress: bool | None = None
    ) -> _Self:
        """Copies a number, or one row of the field's shape, to all rows of a field.

        A tensor of the field's dtype arrives bit for bit; see the class for `progress`.

        Raises:
            TypeError: Neither a number nor a row of them.
            ValueError: A row of another shape, of a dtype that loses its kind (complex to real,
                floating to integers), or with numbers beyond the field's dtype.

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
        """Gives all rows of an optimizer's state their first value, `row` `[*shape]` on the CPU.

        In shared memory the first process does, and the others find it done.

        Raises:
            RuntimeError: Another process has given them another value.

        Example:
            >>> table = HostTable(2, 1, state=("sum",), memory="shared")
            >>> table.begin_state("sum", torch.tensor([0.1]))
            >>> table["sum"].tolist() == [[torch.tensor(0.1).item()]] * 2
            True
        """
        value = row.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        number = list(self.fields).index(field)
        if not self._placed().begin(number, value, lambda: self.fill_(row, field)):
            raise RuntimeError(
                f"the state {field!r} of this shared table has begun otherwise than this optimizer"
                " begins it: make the optimizers of all processes alike before they are attached,"
                " or share a new table"
            )

    def note_given(self, *fields: str) -> None:
        """Says that fields are loaded: no process is to give them first values.

        Example:
            >>> HostTable(2, 1, memory="plain").note_given("weight")
        """
        numbers = {name: number for number, name in enumerate(self.fields)}
        for field in fields:
            self._placed().note_given(numbers[field])

    @_in_turn
    def save(self, path: _Path, *, rows: slice = slice(None)) -> None:
        """Saves all fields; what was there before stays until the new files are on the disk.

        They switch in one step: load() and open() find the old table or the new one, also after
        the process was killed, and while other processes save. Several .npy files that a save
        leaves in a hidden folder, as it was killed, get their names by the next save; until then a
        program that reads them by name finds old ones among them.

        With `rows` it saves some of them, as a table of so many rows would.

        Args:
            path: `*.safetensors` for one file with all fields, or `*.npy` for one file per field:
                `table.weight.npy`, `table.exp_avg.npy` for `table.npy`; a table with a weight only
                goes to `table.npy` itself.
            rows: Which rows, a slice with a step of 1. Its ends may count from the table's end, but
                unlike Python's they never lie beyond the table, nor the second before the first.
                `slice(n, n)` names no row, which is legal.

        Raises:
            TypeError: `rows` is no slice of integers.
            ValueError: Another ending, a dtype or a name that the format cannot hold, the table's
                own mapped file, a named pipe or a device, a symbolic link among several .npy files,
                or `rows` with another step or such ends.
            PermissionError: The file is read-only.
            OSError: The disk is full, or another file call failed.

        Example:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     HostTable(2, 1, memory="plain").save(f"{folder}/rows.npy")
            ...     os.listdir(folder)
            ['rows.npy']
        """
        self.settle()
        here = _range_of(rows, self.rows, "rows")
        fields = {name: self.rows_to_read(name)[here.start : here.stop] for name in self.fields}
        own = self._placed().path
        table_files.save_fields(path, fields, None if own is None else os.path.realpath(own))

    was_read = False

    def note_read(self, was_read: bool) -> None:
        """Says whether rows were read from a file: they are no initial values then."""
        self.was_read = was_read

    @_in_turn
    def load(self, path: _Path, *, rows: slice = slice(None), stored: slice = slice(None)) -> None:
        """Reads all fields from what save() wrote there, or from files like it.

        With `rows` and `stored` it reads some rows to some rows; the rest of the file is not read,
        and the rest of the table stays as it is.

        Args:
            path: As for save().
            rows: Which rows of the table to write, a slice as for save().
            stored: Which rows of the file to read, as many, a slice of the file's rows.

        Raises:
            TypeError: `rows` or `stored` is no slice of integers.
            ValueError: The file is broken, its fields' names, shapes or dtypes are not those of the
                table, `rows` or `stored` is refused as by save(), or one has more rows than the
                other; no row has changed.
            OSError: A file cannot be opened (no row has changed) or read (the message says so).

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
        here = _range_of(rows, self.rows, "rows")
        with table_files.open_fields(path, self.fields) as found:
            if set(found) != set(self.fields):
                raise ValueError(
                    f"{os.fspath(path)}: it holds the fields {sorted(found)}, the table "
                    f"{sorted(self.fields)}"
                )
            count = next(iter(found.values())).shape[0]
            there = _range_of(stored, count, f"{os.fspath(path)}: stored")
            parts = {name: each.part(there) for name, each in found.items()}
            whole = (len(here), len(there)) == (self.rows, count)
            asked = (
                f" (rows {here.start}:{here.stop} of {self.rows:,} from {there.start}:{there.stop} "
                f"of {count:,} stored)"
            )
            for name, (shape, dtype) in self.fields.items():
                if ((part := parts[name]).shape, part.dtype) != ((len(here), *shape), dtype):
                    raise ValueError(
                        f"{part.file.path}: {name!r} is {part.dtype} {list(part.shape)}, the table "
                        f"needs {dtype} {[len(here), *shape]}{'' if whole else asked}"
                    )
            self._read(parts, here)

    def _read(self, stored: Mapping[str, table_files.StoredField], rows: range) -> None:
        self.note_given(*stored)
        for name, each in stored.items():
            each.read_into(self.rows_of(name)[rows.start : rows.stop])
        self.settle()
        self.was_read = True

    # ---- several processes

    was_shared = False
    """Whether share() was called: another table cannot take this one's place."""

    def share(self) -> TableHandle:
        """What HostTable.from_handle opens in another process of this machine and user.

        It can be pickled: as an argument of a process that multiprocessing starts, in the data set
        of a DataLoader, or by torch.distributed.broadcast_object_list. While a handle is there, the
        memory stays, as it does while another process has the table.

        Of a table that a module has made, attach its optimizer first: it adds fields of state to a
        table that has not been shared. Those of one that has are kept by each process for itself.

        Several processes may write at once if each writes rows of its own. Otherwise one writes,
        within writing(), and the others read by read_consistently(); see there.

        Raises:
            ValueError: The table has not been made with memory="shared", or is closed.

        Example:
            >>> table = HostTable(1000, 4, memory="shared")
            >>> table.share().rows
            1000
        """
        memory = self._placed().shared.handle()
        self.was_shared = True
        return TableHandle.of(self._layout, self.rows, self.was_read, memory)

    @property
    def version(self) -> int:
        """How often rows were written within writing(), times two; odd while a process does.

        Raises:
            ValueError: The table has not been made with memory="shared", or is closed.

        Example:
            >>> table = HostTable(2, 1, memory="shared")
            >>> with table.writing():
            ...     table.version
            1
            >>> table.version
            2
        """
        return self._placed().shared.version

    def writing(self) -> AbstractContextManager[None]:
        """Within, this thread alone writes rows for readers in other processes; other writers wait.

        Any way of writing will do: scatter(), a view, the step of an optimizer. At the end rows
        that modules hold are written back, and the GPU's work is waited for. Readers who use
        read_consistently() see rows of before or of after, and wait meanwhile; so keep it short.
        An exception ends it as well: what was written before it, is.

        Raises:
            ValueError: The table has not been made with memory="shared", or is closed.
            RuntimeError: This thread writes already.

        Example:
            >>> table = HostTable(2, 1, memory="shared")
            >>> with table.writing():
            ...     table.scatter(torch.tensor([0, 1]), torch.ones(2, 1))
        """
        return self._placed().shared.writing(self.settle)

    def read_consistently(self, read: Callable[[], _Result], *, timeout_s: float = 10.0) -> _Result:
        """The result of `read()`, called again until no process wrote within writing() meanwhile.

        This is a sequence lock: readers take no lock and do not hold the writer up. The thread that
        is within writing() itself reads at once.

        Args:
            read: Reads rows, as by gather() or a module's lookup without gradients, and gives
                copies of them. It may be called often.
            timeout_s: How many seconds this waits for a moment without a writer.

        Raises:
            ValueError: The table has not been made with memory="shared", or is closed.
            TimeoutError: There was no such moment.
            RuntimeError: A process ended while it wrote; rows may be of both versions.

        Example:
            >>> table = HostTable(2, 1, memory="shared")
            >>> table.read_consistently(lambda: table.gather(torch.tensor([1]))).tolist()
            [[0.0]]
        """

        def settled() -> _Result:
            result = read()
            self.settle()
            return result

        return self._placed().shared.read_consistently(settled, timeout_s)

    def settle(self) -> None:
        """Brings rows home and waits for the GPU's work on them: CPU views are current then.

        Raises:
            IndexError: An id that the GPU found out of range.
            RuntimeError: Managed memory in a forked child.

        Example:
            >>> HostTable(2, 1, memory="plain").settle()
        """
        self._at_home().settle()

    def flush(self) -> None:
        """Settles, and with memory="file" brings all rows to the disk.

        Raises:
            IndexError: An id that the GPU found out of range.
            OSError: The disk did not take it.

        Example:
            >>> HostTable(2, 1, memory="plain").flush()
        """
        self._at_home().flush()

    def close(self) -> None:
        """Flushes and lets the memory go, once no view is left, also if a CUDA graph holds it.

        The file of memory="file" stays. Closing twice is fine; any other use is a ValueError, by a
        module that trains the rows as well.

        Raises:
            IndexError, OSError: As flush(); the table is closed all the same.
            RuntimeError: A CUDA graph of whole steps of its rows is still there.

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
            placement.flush()
        finally:
            placement.release()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _laid_out(data: Tensor, rows: int, layout: Record) -> tuple[dict[str, Tensor], Tensor]:
    """The fields of all rows in a table's bytes, and the records."""
    fields = {name: layout.rows_of(data, rows, name) for name in layout.fields}
    record = layout.records_of(data, rows)
    for each in (*fields.values(), record):
        host_memory.keep_pinned(each, data)
    return fields, record


def _may_be_ids(index: object) -> bool:
    """Whether an op looks at these; it refuses all else."""
    if not isinstance(index, Tensor) or index.is_meta or index.layout != torch.strided:
        return False
    return index.dtype in (torch.int32, torch.int64)


def _range_of(rows: slice, count: int, what: str) -> range:
    """The rows that a slice names of `count`, all of them there; errors call it `what`."""
    if not isinstance(rows, slice):
        raise TypeError(f"{what}: expected a slice, got {rows!r}")
    if rows.step not in (None, 1):
        raise ValueError(f"{what}: expected a step of 1, got {rows}")
    begin, end, _ = rows.indices(count)
    ends = (each for each in (rows.start, rows.stop) if each is not None)
    if begin > end or not all(-count <= each <= count for each in ends):
        raise ValueError(
            f"{what}: {rows} is no range of {count:,} rows: each end must lie within them, "
            "the second not before the first"
        )
    return range(begin, end)

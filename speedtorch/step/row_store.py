"""RowStore: reads and writes the host records of a table for the steps of one module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from speedtorch.ops.functions import (
    append_batch,
    count_batch,
    exchange_rows,
    join_batch,
    load_batch,
    load_rows,
    pinned_gather,
    pinned_scatter,
    wait_for_rows,
)
from speedtorch.step.joined_rows import JoinedRows
from speedtorch.table.host_table import HostTable
from speedtorch.table.lazy_table import LazyTable

__all__ = [
    "Block",
    "Counted",
    "Fields",
    "Rounder",
    "RowStore",
    "StoreInSlots",
    "exchange_arguments",
]

_NO_RECORDS = nullcontext()
Fields = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Name to (row shape, dtype) of the weight and of each optimizer state column of a step's rows."""


class Block(NamedTuple):
    """Memory with rows to write to a table, or for rows to load from a table."""

    rows: Sequence[Tensor]
    """One tensor `[n, ...]` for each field."""
    ids: Tensor
    """Ids of the rows to copy, ascending."""
    places: Tensor | None = None
    """Positions of these rows in `rows`; by default 0 to `len(ids) - 1`."""
    are_ready: bool = False
    """Whether the host has waited for the ids, so that work on any stream may read them."""

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the block."""
        return [*self.rows, self.ids] + ([] if self.places is None else [self.places])


class Counted(NamedTuple):
    """A Block of which only the first `number` ids are copied; `number` is `[1]` on the device."""

    rows: Sequence[Tensor]
    ids: Tensor
    places: Tensor
    number: Tensor
    are_none: bool = False
    """Whether the host knows that the number is 0."""


class Rounder(Protocol):
    """Rounds a step's rows to numbers that 16 bits store; see Rounding."""

    @property
    def stored(self) -> Mapping[str, torch.dtype]:
        """The dtypes of the fields that are stored in 16 bits."""

    def round(self, names: Iterable[str], ids: Tensor, rows: Sequence[Tensor]) -> None:
        """Rounds rows of all fields in place."""


class RowStore:
    """All rows of a table with their optimizer state, as a step exchanges them.

    A step names rows by id and fields by name: "weight" and the names of the state. The step's
    weights have `held_dtype`. A store may have rows in another dtype in host memory, and may cache
    frequent rows on the GPU. Every store guarantees:

    - `exchange` copies rows bitwise identically if stored and held dtype are equal. A row in both
      lists is copied from block to block; its stored copy may remain old until the row is written
      back. A call with the same rows can be repeated, after an interrupt or an error.
    - `read` and `write` see earlier writes of `exchange` on the current stream, and vice versa.
    - `write_back` writes cached rows to the table, whose copies are valid until the next exchange.
      `settle` waits until the CPU sees all writes.

    Args:
        table: The host table.
        held_dtype: The dtype of the weights of a step.
        rounding: Rounds rows after each step, if the table stores them in 16 bits.

    Attributes:
        rows, row_shape: The number of rows, and the shape of a row of the weight.
        held_dtype: The argument of this name.
        stored: The dtypes of the fields that are stored in 16 bits, by name.
        can_wait: Whether load_batch() accepts `evicts=False`.
        reads_ahead: Whether read_ahead() has an effect.
    """

    can_wait: ClassVar[bool] = True
    reads_ahead: ClassVar[bool] = False

    def __init__(
        self, table: LazyTable, held_dtype: torch.dtype, rounding: Rounder | None = None
    ) -> None:
        self.row_shape = table.row_shape
        self.held_dtype = held_dtype
        self._rounding = rounding
        self.stored: Mapping[str, torch.dtype] = {} if rounding is None else rounding.stored
        self._table = table
        self._reached: tuple[Iterable[str], int, list[Tensor]] | None = None
        """Names, table version and tensors of the last exchange, while they are valid."""
        self._host_tables: Sequence[HostTable] = ()
        """Host tables of these fields: a second table if the first had no space for the state."""

    @property
    def rows(self) -> int:
        """The number of rows of the table on this rank."""
        return self._table.rows

    @property
    def whole_rows(self) -> int:
        """The number of rows of the table on all ranks that share it."""
        return self._table.whole_rows

    def exchange(
        self, names: Iterable[str], outgoing: Block | None, incoming: Block | None
    ) -> None:
        """Writes rows to the table while it loads others, all fields of a row at once."""
        lists = exchange_arguments(outgoing, incoming)
        host_fields = self.fields(names)
        with self._writing(outgoing):
            exchange_rows(host_fields, *lists)

    def load(self, names: Iterable[str], outgoing: Block, ids: Tensor) -> list[Tensor]:
        """Loads the rows of ascending ids into new memory while the rows of `outgoing` are written.

        `outgoing` contains the first rows of a block, in the order of their ids. The new memory has
        the block's device, shapes and dtypes.
        """
        host_fields = self.fields(names)
        with self._writing(outgoing):
            return load_rows(host_fields, outgoing.rows, outgoing.ids, ids)

    def load_batch(
        self,
        names: Iterable[str],
        outgoing: Block,
        parts: Sequence[Tensor],
        rows: int,
        padding: int,
        *,
        evicts: bool = True,
    ) -> list[Tensor]:
        """Plans ids and loads their rows as `load` does; see ops.functions.load_batch.

        If `evicts` is false, the caller writes the rows of `outgoing` to the table later.
        """
        host_fields = self.fields(names)
        with self._writing(outgoing if evicts else None):
            lists = outgoing.rows, outgoing.ids
            return load_batch(host_fields, *lists, parts, rows, padding, evicts)

    def join_batch(
        self,
        names: Iterable[str],
        outgoing: Block | None,
        held: Block,
        parts: Sequence[Tensor],
        rows: int,
        padding: int,
    ) -> list[Tensor]:
        """Plans ids and loads rows that `held` lacks; see ops.functions.join_batch.

        The rows of `outgoing` are written only if there are new rows.
        """
        host_fields = self.fields(names)
        with self._writing(outgoing):
            lists = *_leaving(outgoing), held.rows, held.ids
            return join_batch(host_fields, *lists, parts, rows, padding)

    def append_batch(
        self,
        names: Iterable[str],
        outgoing: Block | None,
        joined: JoinedRows,
        parts: Sequence[Tensor],
        rows: int,
        padding: int,
    ) -> list[Tensor]:
        """Like join_batch() for rows in any order; see ops.functions.append_batch."""
        host_fields = self.fields(names)
        with self._writing(outgoing):
            lists = *_leaving(outgoing), joined.rows, joined.ids, joined.table, joined.size
            return append_batch(host_fields, *lists, parts, rows, padding)

    def exchange_counted(self, names: Iterable[str], outgoing: Counted, incoming: Counted) -> None:
        """Exchanges rows whose numbers are on the device.

        A row in both lists is also written to the table, because the loaded copy may be discarded.
        """
        lists = (outgoing.ids, outgoing.places, incoming.rows, incoming.ids, incoming.places)
        numbers = (outgoing.number, incoming.number)
        host_fields = self.fields(names)
        with self._writing(outgoing):
            exchange_rows(host_fields, outgoing.rows, *lists, 1, *numbers)

    def _writing(self, outgoing: Block | Counted | None = None) -> AbstractContextManager[None]:
        """Records the ids of rows that the block writes, in host tables that record changes.

        The caller calls fields() first, which sets the host tables.
        """
        records = [table.changes for table in self._host_tables if table.changes is not None]
        if not records:
            return _NO_RECORDS
        if outgoing is None or (isinstance(outgoing, Counted) and outgoing.are_none):
            return _all_of([changes.moving() for changes in records])
        number = getattr(outgoing, "number", None)
        return _all_of([changes.writing(outgoing.ids, number) for changes in records])

    def read_ahead(self, ids: Sequence[Tensor]) -> None:
        """Begins to read rows that a later step loads, if they are on a disk; ignores invalid ids.

        Ids on a GPU are ignored, because the host would wait for them.
        """

    def read(self, ids: Tensor, out: Tensor, name: str = "weight") -> None:
        """Reads rows of a field by id into `out`, `[*ids.shape, ...]`, on the CPU or a GPU."""
        field = self._table.table_of(name).rows_to_read(name)
        if field.dtype == out.dtype:
            pinned_gather(field, ids, out=out)
        else:
            stored = torch.empty_like(out, dtype=field.dtype)
            pinned_gather(field, ids, out=stored)
            out.copy_(stored)

    def write(self, ids: Tensor, rows: Tensor) -> None:
        """Writes weights `[*ids.shape, ...]` to the rows of the ids."""
        table = self._table.table_of("weight")
        field = table.rows_of("weight")
        with table.recording_changes(ids):
            pinned_scatter(field, ids, rows.to(field.dtype))

    def round(self, names: Iterable[str], ids: Tensor, rows: Sequence[Tensor]) -> None:
        """Rounds rows that a step has changed in place, to the dtypes of the table."""
        if self._rounding is not None:
            self._rounding.round(names, ids, rows)

    @property
    def is_common(self) -> bool:
        """Whether a forked child process shares the table's memory instead of a copy."""
        return self._table.is_common

    def write_back(self) -> None:
        """Writes cached rows to the table, so that the caller may then change the table."""

    def before_replay(self) -> None:
        """Called before the replay of a CUDA graph that contains exchanges."""

    def free_cache(self) -> None:
        """Frees the memory of a cache; the caller has written its rows to the table."""

    def settle(self, device: torch.device) -> None:
        """Waits until the CPU sees the device's writes; raises the errors that the device found.

        The caller may then close or change the table: the next exchange looks up its fields again.
        """
        wait_for_rows(device)
        self._reached = None

    def can_join(self, device: torch.device) -> bool:
        """Whether one op may exchange these rows together with rows of other tables.

        The device must access them in host memory, no other module may have claimed them, and the
        table must not record changes.
        """
        if self._table.memory is None or self._table.claim.was_replaced:
            return False
        if self._table.tracks_changes:
            return False
        return device.type == "cpu" or self._table.is_in_place

    def fields(self, names: Iterable[str]) -> list[Tensor]:
        """The current tensors of all rows of the fields, for an exchange."""
        reached, version = self._reached, self._table.version
        if reached is None or reached[0] is not names or reached[1] != version:
            found = [self._table.field(name) for name in names]
            tables = map(self._table.table_of, ("weight", *names))
            self._host_tables = [*dict.fromkeys(tables)]
            reached = (names, self._table.version, found)
            # A table whose holder has none of its rows sends no notice when it closes.
            if self._table.claim.is_registered:
                self._reached = reached
        return reached[2]


class StoreInSlots(RowStore):
    """A RowStore with slots for some rows, where each load is an exchange.

    load_batch() cannot postpone the write-back: most rows are copied to slots and not over the
    link.
    """

    can_wait = False

    def load(self, names: Iterable[str], outgoing: Block, ids: Tensor) -> list[Tensor]:
        """See RowStore.load."""
        rows = [field.new_empty((ids.shape[0], *field.shape[1:])) for field in outgoing.rows]
        self.exchange(names, outgoing, Block(rows, ids))
        return rows

    def load_batch(
        self,
        names: Iterable[str],
        outgoing: Block,
        parts: Sequence[Tensor],
        rows: int,
        padding: int,
        *,
        evicts: bool = True,
    ) -> list[Tensor]:
        """Like RowStore.load_batch; `evicts` must be true."""
        assert evicts
        made = count_batch(parts, outgoing.ids, rows, padding)
        return [*made[:7], *self.load(names, outgoing, made[6]), *made[7:]]

    def join_batch(
        self,
        names: Iterable[str],
        outgoing: Block | None,
        held: Block,
        parts: Sequence[Tensor],
        rows: int,
        padding: int,
    ) -> list[Tensor]:
        """See RowStore.join_batch."""
        made = join_batch([], *_leaving(None), held.rows, held.ids, parts, rows, padding)
        if len(made) > 9:
            more, places, *merged = made[10 : 12 + len(held.rows)]
            self.exchange(names, outgoing, Block(merged, more, places))
        return made

    def append_batch(
        self,
        names: Iterable[str],
        outgoing: Block | None,
        joined: JoinedRows,
        parts: Sequence[Tensor],
        rows: int,
        padding: int,
    ) -> list[Tensor]:
        """See RowStore.append_batch."""
        lists = *_leaving(None), joined.rows, joined.ids, joined.table, joined.size
        made = append_batch([], *lists, parts, rows, padding)
        if count := len(more := made[8]):
            new = [field[joined.size :][:count] for field in made[11:-1] or joined.rows]
            self.exchange(names, outgoing, Block(new, more))
        return made

    def can_join(self, device: torch.device) -> bool:
        """False, because one op supports the slots of only one table."""
        return False


@contextmanager
def _all_of(contexts: Sequence[AbstractContextManager[None]]) -> Iterator[None]:
    """Enters all contexts."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _leaving(outgoing: Block | None) -> tuple[Sequence[Tensor], Tensor | None, Tensor | None]:
    return ([], None, None) if outgoing is None else (outgoing.rows, outgoing.ids, outgoing.places)


def exchange_arguments(
    outgoing: Block | None, incoming: Block | None
) -> tuple[Sequence[Tensor], Tensor, Tensor | None, Sequence[Tensor], Tensor, Tensor | None]:
    """The arguments of exchange_rows for two blocks, of which one may be None."""
    if outgoing is None or incoming is None:
        block = outgoing or incoming
        assert block is not None
        nothing = Block([field[:0] for field in block.rows], block.ids[:0])
        outgoing, incoming = outgoing or nothing, incoming or nothing
    return (
        *(outgoing.rows, outgoing.ids, outgoing.places),
        *(incoming.rows, incoming.ids, incoming.places),
    )

"""RowStore: the one way by which a step reaches the rows of a table and the state kept of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from speedtorch.ops.functions import (
    exchange_rows,
    load_batch,
    load_rows,
    pinned_gather,
    pinned_scatter,
    wait_for_rows,
)
from speedtorch.table.host_table import HostTable
from speedtorch.table.lazy_table import LazyTable

__all__ = ["Block", "Counted", "Fields", "Rounder", "RowStore", "exchanged"]

_UNNOTED = nullcontext()
Fields = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Name to (row shape, dtype) of what a step holds of each row."""


class Block(NamedTuple):
    """Rows outside of a table, of which some leave for it or arrive."""

    rows: Sequence[Tensor]
    """For each field `[n, ...]`."""
    ids: Tensor
    """Of those that leave or arrive, ascending."""
    places: Tensor | None = None
    """Which of the rows they are; by default the first, in order."""

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [*self.rows, self.ids] + ([] if self.places is None else [self.places])


class Counted(NamedTuple):
    """As a Block, of which the first `number` ids leave or arrive: `[1]`, on the device."""

    rows: Sequence[Tensor]
    ids: Tensor
    places: Tensor
    number: Tensor
    are_none: bool = False
    """Whether the number is known to be 0."""


class Rounder(Protocol):
    """What rounds held rows to numbers that are stored in 16 bits; see Rounding."""

    @property
    def stored(self) -> Mapping[str, torch.dtype]:
        """The dtypes of the fields that are stored so."""

    def round(self, names: Iterable[str], ids: Tensor, rows: Sequence[Tensor]) -> None:
        """Rounds rows of all fields in place."""


class RowStore:
    """All rows of a table, and what an optimizer keeps of them, as a step exchanges them.

    A step knows rows by their ids and fields by their names: "weight", and those of the state. It
    holds them in `held_dtype` and that of each field of state; a store may have them in host memory
    in another dtype, or keep those that are often asked for on the GPU. What a step may rely on,
    wherever a store has its rows:

    - `exchange` writes the rows that leave and reads those that arrive, bit for bit where the
      stored dtype is the held one. A row in both lists goes from the one block to the other and may
      stay as it was here, until it leaves again. Called again with the same rows it gives the same,
      so that what was interrupted can be repeated; one that raises has changed nothing.
    - `read` and `write` see what `exchange` wrote before on the current stream, and it sees what
      they wrote.
    - `bring_home` writes what is kept elsewhere to the table, whose rows count from then on, and
      `settle` waits until the CPU sees all of it there.

    Args:
        table: The rows.
        held_dtype: Of the weights that a step holds.
        rounding: How held rows are rounded after each step, if the table stores them in 16 bits.

    Attributes:
        rows, row_shape: Of the weight.
        held_dtype: As given.
        can_wait: Whether load_batch() may leave rows to the caller.
    """

    can_wait: ClassVar[bool] = True

    def __init__(
        self, table: LazyTable, held_dtype: torch.dtype, rounding: Rounder | None = None
    ) -> None:
        self.row_shape = table.row_shape
        self.held_dtype = held_dtype
        self._rounding = rounding
        self._table = table
        self._reached: tuple[Iterable[str], int, list[Tensor]] | None = None
        """The fields that were exchanged last, until the table may have become another."""
        self._homes: Sequence[HostTable] = ()
        """Where they are: in the table, and beside it if that had no room for the state."""

    @property
    def rows(self) -> int:
        """As said of the class."""
        return self._table.rows

    @property
    def whole_rows(self) -> int:
        """Rows of the table on all ranks that share it."""
        return self._table.whole_rows

    def exchange(self, names: Iterable[str], leaving: Block | None, arriving: Block | None) -> None:
        """Rows leave for the table while others arrive from it, all fields of each at once."""
        lists = exchanged(leaving, arriving)
        homes = self.fields(names)
        with self._writing(leaving):
            exchange_rows(homes, *lists)

    def load(self, names: Iterable[str], leaving: Block, ids: Tensor) -> list[Tensor]:
        """Rows of these ids, ascending, arrive in new memory while others leave.

        `leaving` are the first rows of a block, in the order of their ids; the new memory is like
        the block's.
        """
        homes = self.fields(names)
        with self._writing(leaving):
            return load_rows(homes, leaving.rows, leaving.ids, ids)

    def load_batch(
        self,
        names: Iterable[str],
        leaving: Block,
        ids: Tensor,
        rows: int,
        padding: int,
        *,
        evicts: bool = True,
    ) -> list[Tensor]:
        """As load, of ids `[n]` that are planned first; returns the result of the op.

        If `evicts` is false, the caller writes the rows of `leaving` to the table later.
        """
        homes = self.fields(names)
        with self._writing(leaving if evicts else None):
            return load_batch(homes, leaving.rows, leaving.ids, ids, rows, padding, evicts)

    def exchange_counted(self, names: Iterable[str], leaving: Counted, arriving: Counted) -> None:
        """As `exchange`, of so many rows as the device says.

        A row in both lists is written to the table as well: what has arrived may be thrown away.
        """
        lists = (leaving.ids, leaving.places, arriving.rows, arriving.ids, arriving.places)
        numbers = (leaving.number, arriving.number)
        homes = self.fields(names)
        with self._writing(leaving):
            exchange_rows(homes, leaving.rows, *lists, 1, *numbers)

    def _writing(self, leaving: Block | Counted | None = None) -> AbstractContextManager[None]:
        """Notes rows that leave for the table within, if it was asked to note changes.

        Called after fields() has said where that is.
        """
        noted = [home.changes for home in self._homes if home.changes is not None]
        if not noted:
            return _UNNOTED
        if leaving is None or (isinstance(leaving, Counted) and leaving.are_none):
            return _all_of([each.moving() for each in noted])
        number = getattr(leaving, "number", None)
        return _all_of([each.writing(leaving.ids, number) for each in noted])

    def read(self, ids: Tensor, out: Tensor, name: str = "weight") -> None:
        """Rows of a field by their ids: `out` is `[*ids.shape, ...]`, on either device."""
        field = self._table.home_of(name).rows_to_read(name)
        if field.dtype == out.dtype:
            pinned_gather(field, ids, out=out)
        else:
            stored = torch.empty_like(out, dtype=field.dtype)
            pinned_gather(field, ids, out=stored)
            out.copy_(stored)

    def write(self, ids: Tensor, rows: Tensor) -> None:
        """Puts weights `[*ids.shape, ...]` in the place of those of the ids."""
        home = self._table.home_of("weight")
        field = home.rows_of("weight")
        with home.noting(ids):
            pinned_scatter(field, ids, rows.to(field.dtype))

    @property
    def stored(self) -> Mapping[str, torch.dtype]:
        """The dtypes of the fields that are stored in 16 bits."""
        return {} if self._rounding is None else self._rounding.stored

    def round(self, names: Iterable[str], ids: Tensor, rows: Sequence[Tensor]) -> None:
        """Rounds held rows that a step has changed as they will be stored, in place."""
        if self._rounding is not None:
            self._rounding.round(names, ids, rows)

    @property
    def is_common(self) -> bool:
        """Whether a child that is forked has the table's memory, and no copy of it."""
        return self._table.is_common

    def bring_home(self) -> None:
        """Writes rows that are kept elsewhere to the table, which may change after this."""

    def before_replay(self) -> None:
        """Called before a CUDA graph that holds exchanges is replayed."""

    def let_go(self) -> None:
        """Gives back what is kept elsewhere; all rows are home."""

    def settle(self, device: torch.device) -> None:
        """Waits until the CPU sees what a device has written; raises what it found wrong.

        The caller may close or change the table then: its fields are reached anew.
        """
        wait_for_rows(device)
        self._reached = None

    def can_join(self, device: torch.device) -> bool:
        """Whether one op may move these rows with those of other tables.

        The device reaches them in host memory, no other module was made to train them, and their
        changes are not noted.
        """
        if self._table.memory is None or self._table.claim.was_replaced:
            return False
        if self._table.notes_changes:
            return False
        return device.type == "cpu" or self._table.is_in_place

    def fields(self, names: Iterable[str]) -> list[Tensor]:
        """All rows of the fields, where they are now, for an exchange of several tables."""
        reached, version = self._reached, self._table.version
        if reached is None or reached[0] is not names or reached[1] != version:
            found = [self._table.field(name) for name in names]
            self._homes = list({self._table.home_of(name): None for name in ("weight", *names)})
            reached = (names, self._table.version, found)
            # A table whose holder has none of its rows does not tell when it closes.
            if self._table.claim.is_held_here:
                self._reached = reached
        return reached[2]


@contextmanager
def _all_of(contexts: Sequence[AbstractContextManager[None]]) -> Iterator[None]:
    """All of them as one."""
    with ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield


def exchanged(
    leaving: Block | None, arriving: Block | None
) -> tuple[Sequence[Tensor], Tensor, Tensor | None, Sequence[Tensor], Tensor, Tensor | None]:
    """Rows that leave and rows that arrive as exchange_rows takes them; one of them may be none."""
    if leaving is None or arriving is None:
        some = leaving or arriving
        assert some is not None
        nothing = Block([each[:0] for each in some.rows], some.ids[:0])
        leaving, arriving = leaving or nothing, arriving or nothing
    return (
        *(leaving.rows, leaving.ids, leaving.places),
        *(arriving.rows, arriving.ids, arriving.places),
    )

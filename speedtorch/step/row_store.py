"""RowStore: the one way by which a step reaches the rows of a table and the state kept of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from speedtorch.memory import host_memory
from speedtorch.memory.placement import check_kind
from speedtorch.ops.functions import (
    exchange_rows,
    pinned_copy,
    pinned_gather,
    pinned_scatter,
    wait_for_rows,
)
from speedtorch.ops.shapes import row_shape
from speedtorch.table.host_table import HostTable, RowHolder
from speedtorch.table.record_layout import lay_out
from speedtorch.table.row_blocks import Share, draw_rows
from speedtorch.table.shared_rows import SharedRows
from speedtorch.torch_internals import current_stream

__all__ = ["Block", "Counted", "Fields", "LazyInit", "Portion", "RowStore", "waiting_bytes"]

Fields = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
_BLOCK_BYTES = 64 << 20  # of a field that is converted on its way
_SAMPLE = 4  # rows of each draw that are drawn to compare it with others

# Tables that have yet to take their memory.
_waiting: weakref.WeakSet[RowStore] = weakref.WeakSet()


def waiting_bytes() -> int:
    """Bytes of host memory that portions of tables have yet to take."""
    return sum(each.needed_bytes(each.rows) for each in _waiting if each.is_portion)


class LazyInit(NamedTuple):
    """First values of all rows, which are drawn at first need."""

    functions: tuple[Callable[[Tensor], object], ...]
    """Called one after another as function(tensor), in place."""
    seed: int
    zero: int | None
    """Id of a row that is zero whatever they give."""
    rows: slice = slice(None)
    """The rows that are theirs, as of a table of its own."""
    share: Share | None = None
    """What these rows are of a larger table, whose values they get."""

    def __call__(self, table: HostTable) -> None:
        """Gives the rows of a table their values."""
        table.init_(self._function, seed=self.seed, rows=self.rows, share=self.share)
        if self.zero is not None:
            table["weight"][self.zero].zero_()

    def sample(self, rows: int, row_shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Its first rows, at most `_SAMPLE`, as drawn with the seed 0 in a table of `rows`."""
        first, end, _ = self.rows.indices(rows)
        drawn = torch.zeros((min(end - first, _SAMPLE), *row_shape), dtype=dtype)
        share = Share(end - first, [(range(len(drawn)), range(len(drawn)))])
        draw_rows(drawn, self._function, (), {}, 0, False, share)
        return drawn

    @property
    def _function(self) -> Callable[[Tensor], object]:
        function, *more = self.functions
        return partial(_one_after_another, self.functions) if more else function


def _one_after_another(functions: Sequence[Callable[[Tensor], object]], rows: Tensor) -> None:
    for each in functions:
        each(rows)


class Portion(NamedTuple):
    """Which rows of a larger table are in a store, block after block."""

    rows: int
    """Of the larger one."""
    blocks: Sequence[tuple[range, range]]
    """Where they are there, and here; both ascend."""
    agreed: Callable[[int], int]
    """The seed that all ranks with portions of the table take, of what each of them has."""

    @property
    def size(self) -> int:
        """Rows that are here."""
        return sum(len(here) for _, here in self.blocks)

    def place(self, row: int | None) -> int | None:
        """Where a row of the larger table is, if it is here."""
        for there, here in self.blocks:
            if row is not None and row in there:
                return here[row - there.start]
        return None

    def within(self, rows: slice) -> list[tuple[range, range]]:
        """Where rows are that are here of a range of the larger table: there from its begin on."""
        first, end, _ = rows.indices(self.rows)
        found = []
        for there, here in self.blocks:
            begin, stop = max(there.start, first), min(there.stop, end)
            if begin < stop:
                own = here[begin - there.start : stop - there.start]
                found.append((range(begin - first, stop - first), own))
        return found

    def of(self, draw: LazyInit) -> LazyInit:
        """What a draw of the larger table's rows gives those that are here."""
        first, end, _ = draw.rows.indices(self.rows)
        found = self.within(draw.rows)
        base = found[0][1].start if found else 0
        blocks = [(t, range(h.start - base, h.stop - base)) for t, h in found]
        rows = slice(base, found[-1][1].stop if found else base)
        seed, share = self.agreed(draw.seed), Share(end - first, blocks)
        return LazyInit(draw.functions, seed, self.place(draw.zero), rows, share)


class Block(NamedTuple):
    """Rows outside of a table, of which some leave for it or arrive."""

    rows: Sequence[Tensor]
    """For each field `[n, ...]`."""
    ids: Tensor
    """Of those that leave or arrive, ascending."""
    places: Tensor | None = None
    """Which of the rows they are; by default the first, in order."""


class Counted(NamedTuple):
    """As a Block, of which the first `number` ids leave or arrive: `[1]`, on the device."""

    rows: Sequence[Tensor]
    ids: Tensor
    places: Tensor
    number: Tensor


class RowStore:
    """All rows of a table, and what an optimizer keeps of them, in host memory.

    A step knows rows by their ids and fields by their names: "weight", and those of the state. What
    it may rely on, wherever a store has its rows:

    - `exchange` writes the rows that leave and reads those that arrive, bit for bit. A row in both
      lists goes from the one block to the other and may stay as it was here, until it leaves
      again. Called again with the same rows it gives the same, so that what was interrupted can be
      repeated; one that raises has changed nothing.
    - `read`, `write`, `load` and `fill` see what `exchange` wrote before on the current stream, and
      it sees what they wrote.
    - `settle` waits until `table` shows all of it.
    - Nothing is taken before the first need; what cannot fit is refused before that, in numbers.

    Args:
        name: what errors call it.
        table: the rows, or the number of rows and columns and the dtype of a table to be made.
        memory: the kind of memory of a table to be made.
        draws: first values of a table to be made.
        portion: what a table to be made has of a larger one.
    """

    def __init__(
        self,
        name: str,
        table: HostTable | tuple[int, int, torch.dtype],
        memory: str = "auto",
        draws: Sequence[LazyInit] = (),
        portion: Portion | None = None,
    ) -> None:
        self.name = name
        self._portion = portion
        self._draws = tuple(draws)
        self._beside: HostTable | None = None
        """State of a table that another owns, or that there was no room to make anew."""
        self._holder: weakref.ref[RowHolder] | None = None
        self._numbers: dict[Hashable, Tensor] = {}
        self._reached: tuple[Iterable[str], list[Tensor]] | None = None
        """The fields that were exchanged last, until the table may have become another."""
        self._full: Mapping[str, Tensor] = {}
        """All rows of the sharded table, by field, within with_all_rows()."""
        self._table: HostTable | None = None
        if isinstance(table, HostTable):
            self._table, self._owned = table, False
            self._memory = "auto" if table.memory == "file" else table.memory
            self.rows, (self.row_shape, self.dtype) = table.rows, table.fields["weight"]
            return
        rows, columns, self.dtype = table
        self._owned, self._memory = True, memory
        check_kind(memory)
        (self.rows,) = row_shape(rows, "rows")
        self.row_shape = row_shape(columns)
        self._refuse_if_short()
        _waiting.add(self)

    @property
    def table(self) -> HostTable:
        """The table, with its first values; it takes its memory now if it has none yet.

        Raises MemoryError if the machine has too little; nothing was taken.
        """
        table = self._in_memory()
        if self._draws:
            with torch.inference_mode(False):
                for draw in self._draws:
                    draw(table)
            self._draws = ()
        return table

    @property
    def is_drawn(self) -> bool:
        """Whether the rows have their first values."""
        return self._table is not None and not self._draws

    def draw(self, draw: LazyInit, *, anew: bool) -> None:
        """Gives all rows other values, at first need if they were never used.

        With `anew` values of before do not matter.
        """
        if self._portion is not None:
            draw = self._portion.of(draw)
        if self.is_drawn:
            draw(self.table)
            return
        every = slice(None)
        kept = [each for each in self._draws if not anew or draw.rows not in (every, each.rows)]
        if kept and kept[-1].zero is None and draw.zero is None and kept[-1].rows == draw.rows:
            before = kept.pop()
            draw = before._replace(functions=(*before.functions, *draw.functions))
        self._draws = (*kept, draw)

    def _in_memory(self, state: Fields | None = None) -> HostTable:
        """The table, perhaps without its first values; made now, if it is to be, with a state."""
        if self._table is None:
            _waiting.discard(self)
            try:
                weight: Fields = {"weight": (self.row_shape, self.dtype)}
                self._adopt(self._made({**weight, **(state or {})}))
            except BaseException:
                if self._table is None:
                    _waiting.add(self)
                raise
        assert self._table is not None
        return self._table

    def _made(self, fields: Fields) -> HostTable:
        before = self._table if self._memory == "cuda" else None
        device = None if before is None else before.device
        with torch.inference_mode(False):  # or nothing could ever be written to it
            return HostTable.from_fields(self.rows, fields, self._memory, device=device)

    def _adopt(self, table: HostTable) -> None:
        table.be_held(self._holder)
        self._table, self._reached = table, None

    def needed_bytes(self, rows: int) -> int:
        """Bytes of host memory that so many rows of the weight take."""
        if self._memory not in host_memory.HOST_KINDS:
            return 0
        return rows * lay_out({"weight": (self.row_shape, self.dtype)}).record_bytes

    def _refuse_if_short(self) -> None:
        """Raises MemoryError if this table and those that wait for their memory do not fit."""
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        needed, waiting = self.needed_bytes(self.rows), list(_waiting)
        if distributed or not needed or not host_memory.is_checked():
            return
        others = sum(each.needed_bytes(each.rows) for each in waiting)
        if needed + others > (available := host_memory.available_bytes()):
            raise MemoryError(
                f"{self.name}: a table of {self.rows:,} rows needs {needed:,} bytes of host memory,"
                f" and {len(waiting)} others that have yet to be used need {others:,}; available"
                f" are {available:,}: free memory, use fewer or narrower rows, or set"
                " SPEEDTORCH_MEMORY_CHECK=0 to try all the same"
            )

    @property
    def holder(self) -> RowHolder | None:
        """What holds rows of the table, whichever module that belongs to."""
        reference = self._holder if self._table is None else self._table.holder
        return None if reference is None else reference()

    def keep_holder(self, holder: RowHolder) -> None:
        """Says what holds rows of the table; what did before writes them back."""
        if self._table is not None:
            self._table.write_back()
        self._holder = weakref.ref(holder)
        if self._table is not None:
            self._table.be_held(self._holder)

    def drop_holder(self, holder: RowHolder) -> None:
        """Says that a holder holds rows no more."""
        if self.holder is holder:
            self._holder = None
            if self._table is not None:
                self._table.be_held(None)

    @property
    def was_replaced(self) -> bool:
        """Whether another holder has rows of the table than the one of this store."""
        return self._holder is not None and self.holder is not self._holder()

    def own(self) -> None:
        """Says that this alone uses the table, so that another may replace it."""
        self._owned = True

    def write_back_others(self) -> None:
        """Rows that another module trains are in the table, too, after this."""
        table = self._table
        if table is not None and table.holder is not self._holder:
            table.write_back()

    def field(self, name: str) -> Tensor:
        """All rows of a field `[rows, ...]`, where they are now."""
        return self._home_of(name).rows_of(name)

    def _home_of(self, name: str) -> HostTable:
        beside = self._beside
        if beside is not None and name in beside:
            return beside
        return self.table if name == "weight" else self._in_memory()

    def make_room(self, fields: Fields) -> bool:
        """Makes room for fields of every row's state, name to (row shape, dtype).

        Returns whether they have values already, because the table was read from a file with them.
        Raises MemoryError if there is no room; nothing has changed.
        """
        table = self._in_memory(fields)
        if all(table.fields.get(name) == field for name, field in fields.items()):
            return table.was_read
        made = None
        if self._owned:
            with suppress(MemoryError):  # there may be room for the state beside the old one
                made = self._made({"weight": table.fields["weight"], **fields})
        if made is None:
            self._beside, self._reached = self._made(fields), None
            return False
        if not self._draws:
            made.rows_of("weight").copy_(table.rows_of("weight"))
        made.note_read(table.was_read)
        self._adopt(made)
        table.be_held(None)
        table.close()
        return False

    @property
    def was_read(self) -> bool:
        """Whether the rows' state has values from a file."""
        return self._table is not None and self._table.was_read

    def note_read(self, was_read: bool) -> None:
        """Says whether the rows' state has values from a file."""
        if self._table is not None:
            self._table.note_read(was_read)

    def fill(self, name: str, row: Tensor) -> None:
        """Copies one row to all rows of a field."""
        self._home_of(name).fill_(row, name)

    def check_loadable(self, row: Tensor, value: Tensor) -> None:
        """Raises what load() of all rows would, of a field with such a row; changes nothing."""
        if self._portion is not None and isinstance(value, SharedRows):
            self._check_share(value, self._portion.within(slice(None)))
        else:
            row.new_empty((0, *row.shape)).copy_(value.detach()[:0])

    def load(self, name: str, value: Tensor, first: int = 0) -> None:
        """Copies rows `[n, ...]` of a field, `first` and those after it, from wherever they are.

        Takes no memory for another copy of them. They may be of any dtype that torch converts to
        the field's.
        """
        are_all = len(value) == self.all_rows
        home = self._in_memory() if name == "weight" and are_all else self._home_of(name)
        home.settle()
        if self._portion is not None:
            self._load_portion(home.rows_of(name), value, slice(first, first + len(value)))
            if name == "weight" and are_all:
                self._draws = ()
            return
        field, value = home.rows_of(name)[first : first + len(value)], value.detach()
        if value.is_cuda and not field.is_cuda:
            row_bytes = max(1, value[:1].numel() * value.element_size())
            rows = max(1, _BLOCK_BYTES // row_bytes)
            for begin in range(0, len(field), rows):
                block = value[begin : begin + rows].to(field.dtype).contiguous()
                pinned_copy(field[begin : begin + rows], block)
        else:
            field.copy_(value)
        home.settle()
        if name == "weight" and are_all:
            self._draws = ()  # which these values replace

    def _load_portion(self, field: Tensor, value: Tensor, rows: slice) -> None:
        assert self._portion is not None
        blocks = self._portion.within(rows)
        if not isinstance(value, SharedRows):
            value = value.detach()
            for there, here in blocks:
                field[here.start : here.stop].copy_(value[there.start : there.stop])
        else:
            self._check_share(value, blocks)
            if value.field.data_ptr() != field.data_ptr():
                for _, here in blocks:
                    field[here.start : here.stop].copy_(value.field[here.start : here.stop])

    def _check_share(self, value: SharedRows, blocks: list[tuple[range, range]]) -> None:
        if list(value.blocks) != blocks:
            raise ValueError(
                f"{self.name}: these are the rows of another share; torch.distributed.checkpoint"
                " loads the rows of any number of ranks into model.state_dict()"
            )

    @property
    def is_portion(self) -> bool:
        """Whether other rows of the table are elsewhere."""
        return self._portion is not None

    @property
    def all_rows(self) -> int:
        """Rows of the table, also of one that is not here as a whole."""
        return self.rows if self._portion is None else self._portion.rows

    def of_all(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Rows of a field, in the table's memory; SharedRows where some of them are not here."""
        field = self.field(name)
        if self._portion is None:
            return field[rows]
        first, end, _ = rows.indices(self._portion.rows)
        return SharedRows(end - first, field, self._portion.within(rows))

    @contextmanager
    def with_all_rows(self, full: Mapping[str, Tensor]) -> Iterator[None]:
        """Within the block saved() returns these: all rows of the sharded table, by field."""
        before, self._full = self._full, full
        try:
            yield
        finally:
            self._full = before

    def saved(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Rows of a field as other libraries save them: contiguous, in memory of their own.

        A field that is alone in its table is that already. Where there is no room for a copy, it is
        the strided view of the records, which torch.save takes.
        """
        if name in self._full:
            return _in_own_storage(self._full[name][rows])
        field = self.of_all(name, rows)
        if isinstance(field, SharedRows):
            return field
        if field.is_contiguous():
            return _in_own_storage(field)
        nbytes = field.numel() * field.element_size()
        if field.is_cuda or nbytes > host_memory.available_bytes() // 2:
            return field
        return field.contiguous()

    def copied(self) -> RowStore:
        """A store of its own with the same weights, or the same values to come."""
        (columns,) = self.row_shape
        size = (self.rows, columns, self.dtype)
        made = RowStore(self.name, size, self._memory, self._draws, self._portion)
        if self.is_drawn:
            made.load("weight", self.table["weight"])
        return made

    def samples(self) -> list[Tensor]:
        """Values of the first rows of each draw that rows still wait for; see LazyInit.sample."""
        return [each.sample(self.rows, self.row_shape, self.dtype) for each in self._draws]

    def refuse_if_used(self) -> None:
        """Raises RuntimeError if the rows have been used, or given as a table."""
        if self._table is not None or self._portion is not None:
            raise RuntimeError(
                f"{self.name}: its rows have been used, or were given; shard a module whose rows"
                " are yet to be made, once, and load them afterwards"
            )

    def shared_out(self, portion: Portion) -> RowStore:
        """A store of a portion of the rows, with the values that they would have had here.

        Raises RuntimeError if the rows have been used.
        """
        self.refuse_if_used()
        (columns,) = self.row_shape
        draws, size = map(portion.of, self._draws), (portion.size, columns, self.dtype)
        return RowStore(self.name, size, self._memory, tuple(draws), portion)

    def exchange(self, names: Iterable[str], leaving: Block | None, arriving: Block | None) -> None:
        """Rows leave for the table while others arrive from it, all fields of each at once."""
        if leaving is None or arriving is None:
            some = leaving or arriving
            assert some is not None
            nothing = Block([each[:0] for each in some.rows], some.ids[:0], some.ids[:0])
            leaving, arriving = leaving or nothing, arriving or nothing
        of_leaving, of_arriving = leaving.places, arriving.places
        if of_leaving is None:
            of_leaving = self.numbers(leaving.ids)
        if of_arriving is None:
            of_arriving = self.numbers(arriving.ids)
        lists = (leaving.ids, of_leaving)
        exchange_rows(
            self.reach(names), leaving.rows, *lists, arriving.rows, arriving.ids, of_arriving
        )

    def exchange_counted(self, names: Iterable[str], leaving: Counted, arriving: Counted) -> None:
        """As `exchange`, of so many rows as the device says.

        A row in both lists is written to the table as well: what has arrived may be thrown away.
        """
        lists = (leaving.ids, leaving.places, arriving.rows, arriving.ids, arriving.places)
        numbers = (leaving.number, arriving.number)
        exchange_rows(self.reach(names), leaving.rows, *lists, 1, *numbers)

    def is_mapped(self, device: torch.device) -> bool:
        """Whether work on a device reaches the rows in host memory, and needs no help."""
        memory = self._memory if self._table is None else self._table.memory
        is_there = self._table is None or not self._table.closed
        return is_there and (device.type == "cpu" or memory in ("auto", "managed", "registered"))

    def reach(self, names: Iterable[str]) -> list[Tensor]:
        """All rows of the fields, where they are now."""
        reached = self._reached
        if reached is None or reached[0] is not names:
            reached = (names, [self.field(name) for name in names])
            # A store whose holder has no rows of the table is not told when it closes.
            if self._holder is not None and self._in_memory().holder is self._holder:
                self._reached = reached
        return reached[1]

    def numbers(self, ids: Tensor) -> Tensor:
        """0 to n - 1 for n ids, of a tensor that is seldom made anew."""
        # Each stream has one of its own: no other stream waits until it is written.
        place = current_stream(ids.device) if ids.is_cuda else None
        count, numbers = ids.shape[0], self._numbers.get(place)
        if numbers is None or numbers.shape[0] < count:
            numbers = self._numbers[place] = torch.arange(2 * count, device=ids.device)
        return numbers[:count]

    def read(self, ids: Tensor, out: Tensor, name: str = "weight") -> None:
        """Rows of a field by their ids: `out` is `[*ids.shape, ...]`, on either device."""
        pinned_gather(self.field(name), ids, out=out)

    def write(self, ids: Tensor, rows: Tensor) -> None:
        """Puts weights `[*ids.shape, ...]` in the place of those of the ids."""
        pinned_scatter(self.field("weight"), ids, rows)

    def settle(self, device: torch.device) -> None:
        """Waits until the CPU sees what a device has written; raises what it found wrong.

        The caller may close or change the table then: its fields are reached anew.
        """
        wait_for_rows(device)
        self._reached = None


def _in_own_storage(values: Tensor) -> Tensor:
    """A contiguous tensor in the same memory, whose storage begins and ends with it.

    accelerate takes tensors of one storage for one tensor, and saves the first of them alone.
    """
    if values.untyped_storage().nbytes() == values.numel() * values.element_size():
        return values
    with torch.inference_mode(False), torch.cuda.device(values.get_device()):
        return from_dlpack(values.__dlpack__())

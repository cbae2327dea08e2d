"""LazyTable: a HostTable, or what is known of one that takes its memory at its first use."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from speedtorch.memory import host_memory
from speedtorch.memory.placement import MemoryKind, check_kind, takes_host_memory
from speedtorch.ops.shapes import row_shape
from speedtorch.table.claim import Claim
from speedtorch.table.host_table import HostTable
from speedtorch.table.lazy_init import LazyInit, Portion
from speedtorch.table.record_layout import Fields, lay_out

__all__ = ["LazyTable", "waiting_bytes"]

# Tables that have yet to take their memory.
_waiting: weakref.WeakSet[LazyTable] = weakref.WeakSet()


def waiting_bytes() -> int:
    """Bytes of host memory that portions of tables have yet to take."""
    return sum(each.needed_bytes(each.rows) for each in _waiting if each.portion is not None)


class LazyTable:
    """All rows of a table, or a portion of them, with fields of state that may be added.

    Nothing is taken before the first use; what cannot fit is refused before that, in numbers.

    Args:
        name: What errors call it.
        table: The rows, or the number of rows and columns and the dtype of a table to be made.
        memory: The kind of memory of a table to be made.
        draws: First values of a table to be made.
        portion: What a table to be made has of a larger one.

    Attributes:
        rows: That are here.
        whole_rows: Of the table, also of one that is not here as a whole.
        row_shape, stored_dtype: Of the weight, as the table has it.
        claim: What trains the rows.
    """

    def __init__(
        self,
        name: str,
        table: HostTable | tuple[int, int, torch.dtype],
        memory: MemoryKind = "auto",
        draws: Sequence[LazyInit] = (),
        portion: Portion | None = None,
    ) -> None:
        self.name = name
        self.portion = portion
        self._draws = tuple(draws)
        self._beside: HostTable | None = None
        """State of a table that another owns, or that there was no room to make anew."""
        self._table: HostTable | None = None
        if isinstance(table, HostTable):
            self._table, self._owned = table, False
            self._memory: MemoryKind = table.memory_beside
            self.rows, (self.row_shape, self.stored_dtype) = table.rows, table.fields["weight"]
        else:
            rows, columns, self.stored_dtype = table
            self._owned, self._memory = True, memory
            check_kind(memory)
            (self.rows,) = row_shape(rows, "rows")
            self.row_shape = row_shape(columns)
            self._refuse_if_short()
            _waiting.add(self)
        self.whole_rows = self.rows if portion is None else portion.rows
        self.claim = Claim(self._table)
        self.version = 0
        """Another number whenever fields have come to lie elsewhere."""

    # ---- the table

    @property
    def host_table(self) -> HostTable:
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
    def is_common(self) -> bool:
        """Whether a child that is forked has its memory, and no copy of it."""
        return self._table is not None and self._table.memory in ("shared", "file")

    def home_of(self, name: str, *, anew: bool = False) -> HostTable:
        """The table that has a field; with `anew` all values of the field are to be given next."""
        beside = self._beside
        if beside is not None and name in beside:
            return beside
        return self.host_table if name == "weight" and not anew else self._in_memory()

    def field(self, name: str) -> Tensor:
        """All rows of a field `[rows, ...]`, where they are now."""
        return self.home_of(name).rows_of(name)

    def field_to_read(self, name: str) -> Tensor:
        """As field(), for what reads alone."""
        return self.home_of(name).rows_to_read(name)

    @property
    def notes_changes(self) -> bool:
        """Whether it is noted which rows are written."""
        return any(each and each.changes for each in (self._table, self._beside))

    @property
    def memory(self) -> str | None:
        """The kind of memory, made or to be made; None once the table is closed."""
        if self._table is None:
            return self._memory
        return None if self._table.closed else self._table.memory

    @property
    def is_in_place(self) -> bool:
        """Whether a GPU reads the rows in place, or will, if it can here, once they are made."""
        if self._table is None:
            return takes_host_memory(self._memory) and self._memory != "plain"
        return not self._table.closed and self._table.is_in_place

    @property
    def writable(self) -> bool:
        """Whether rows can be written; those of a mapped file cannot."""
        return self._table is None or self._table.writable

    def check_writable(self, what: str) -> None:
        """Raises ValueError if rows cannot be written."""
        if self._table is not None:
            self._table.check_writable(what)

    def own(self) -> None:
        """Says that this alone uses the table, so that another may replace it."""
        self._owned = True

    def _in_memory(self, state: Fields | None = None) -> HostTable:
        """The table, perhaps without its first values; made now, if it is to be, with a state."""
        if self._table is None:
            _waiting.discard(self)
            try:
                weight: Fields = {"weight": (self.row_shape, self.stored_dtype)}
                self._adopt(self._made({**weight, **(state or {})}))
            except BaseException:
                if self._table is None:
                    _waiting.add(self)
                raise
        assert self._table is not None
        return self._table

    def _made(self, fields: Fields, rows: int | None = None) -> HostTable:
        before = self._table if self._memory == "cuda" else None
        device = None if before is None else before.device
        try:
            with torch.inference_mode(False):  # or nothing could ever be written to it
                count = self.rows if rows is None else rows
                return HostTable.from_fields(count, fields, self._memory, device=device)
        except MemoryError as error:
            raise MemoryError(f"{self.name}: {error}. {self._with_less(fields)}") from error

    def _with_less(self, fields: Fields) -> str:
        """How a table of these fields takes less memory."""
        ways = ["speedtorch.shard shares rows out to ranks", "HostTable(memory='file') is a file"]
        if self.stored_dtype.itemsize > 2:
            ways.insert(0, "stored=torch.bfloat16 halves rows")
        if fields.keys() - {"weight"}:
            ways.insert(0, "speedtorch.optim.RowWiseAdagrad keeps one number of state for each row")
        return f"With less memory: {'; '.join(ways)}"

    def _adopt(self, table: HostTable) -> None:
        self.claim.carry_to(table)
        self._table = table
        self.version += 1

    # ---- fields of state

    def make_room(self, fields: Fields) -> bool:
        """Makes room for fields of every row's state, name to (row shape, dtype).

        Returns whether they have values already, because the table was read from a file with them.
        Raises MemoryError if there is no room; nothing has changed.
        """
        table = self._in_memory(fields)
        if all(table.fields.get(name) == field for name, field in fields.items()):
            return table.was_read
        made = None
        if self._owned and not table.was_shared:
            with suppress(MemoryError):  # there may be room for the state beside the old one
                made = self._made({"weight": table.fields["weight"], **fields})
        if made is None:
            made = self._made(fields)
            self.claim.share_with(made)
            if table.changes is not None:
                made.track_changes()
            self._beside = made
            self.version += 1
            return False
        if not self._draws:
            table.settle()  # a GPU may still write rows back
            made.rows_of("weight").copy_(table.rows_of("weight"))
        made.note_read(table.was_read)
        made.take_changes(table)
        self._adopt(made)
        table.be_held(None)
        table.close()
        return False

    # ---- more rows

    def with_rows(self, first: int, count: int, state: Mapping[str, Tensor]) -> HostTable:
        """Makes a table with `count` more rows before row `first`; nothing changes here.

        The weights of the new rows are zeros, and each field of `state` has the row that is given.
        Raises NotImplementedError if another object may use the memory, MemoryError if there is no
        room for both tables.
        """
        before = self.host_table
        if not self._owned or before.memory in ("file", "shared"):
            raise NotImplementedError(
                f"{self.name}: resize() makes another table, and this one was given or is in a file"
                f" or in shared memory (memory={before.memory!r}): make a larger one, fill it by"
                " larger.load(path, rows=slice(n)) from what table.save(path) wrote, and build the"
                " module anew"
            )
        places = [home for home in (before, self._beside) if home is not None]
        homes = {name: home for home in places for name in home.fields}
        if before.was_read and (unused := homes.keys() - {"weight", *state}):
            raise RuntimeError(
                f"{self.name}: its table was read from a file with the state"
                f" {', '.join(sorted(unused))}, of which new rows begin as an optimizer says:"
                " attach() the optimizer before resize()"
            )
        made = self._made({n: home.fields[n] for n, home in homes.items()}, self.rows + count)
        for home in dict.fromkeys(homes.values()):
            home.settle()  # a GPU may still write rows back
        for name, home in homes.items():
            old, new = home.rows_of(name), made.rows_of(name)
            new[:first].copy_(old[:first])
            new[first + count :].copy_(old[first:])
            if name in state:
                new[first : first + count].copy_(state[name])
        made.note_read(before.was_read)
        return made

    def place(self) -> tuple[HostTable, HostTable | None]:
        """Where the rows and their state are, for move_to()."""
        return self.host_table, self._beside

    def move_to(self, table: HostTable, beside: HostTable | None = None) -> None:
        """Has the rows of another table from now on, perhaps more of them."""
        self.rows = self.whole_rows = table.rows
        self._beside = beside
        self._adopt(table)

    @property
    def was_read(self) -> bool:
        """Whether the rows' state has values from a file."""
        return self._table is not None and self._table.was_read

    def note_read(self, was_read: bool) -> None:
        """Says whether the rows' state has values from a file."""
        if self._table is not None:
            self._table.note_read(was_read)

    # ---- first values

    @property
    def is_drawn(self) -> bool:
        """Whether the rows have their first values."""
        return self._table is not None and not self._draws

    def draw(self, draw: LazyInit, *, anew: bool) -> None:
        """Gives all rows other values, at first need if they were never used.

        With `anew` values of before do not matter.
        """
        if self.portion is not None:
            draw = self.portion.of(draw)
        if self.is_drawn:
            draw(self.host_table)
            return
        every = slice(None)
        kept = [each for each in self._draws if not anew or draw.rows not in (every, each.rows)]
        if kept and kept[-1].zero is None and draw.zero is None and kept[-1].rows == draw.rows:
            before = kept.pop()
            draw = before._replace(functions=(*before.functions, *draw.functions))
        self._draws = (*kept, draw)

    def note_loaded(self) -> None:
        """Says that all weights were given: no draw is to replace them."""
        self._draws = ()

    def samples(self) -> list[Tensor]:
        """Values of the first rows of each draw that rows still wait for; see LazyInit.sample."""
        return [each.sample(self.rows, self.row_shape, self.stored_dtype) for each in self._draws]

    # ---- tables that are made of this one

    def needed_bytes(self, rows: int) -> int:
        """Bytes of host memory that so many rows of the weight take."""
        if not takes_host_memory(self._memory):
            return 0
        return rows * lay_out({"weight": (self.row_shape, self.stored_dtype)}).record_bytes

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
                f" SPEEDTORCH_MEMORY_CHECK=0 to try all the same. {self._with_less({})}"
            )

    def copied(self) -> LazyTable:
        """A table of its own with the same weights, or the same values to come."""
        (columns,) = self.row_shape
        size = (self.rows, columns, self.stored_dtype)
        made = LazyTable(self.name, size, self._memory, self._draws, self.portion)
        if self.is_drawn:
            made.home_of("weight", anew=True).rows_of("weight").copy_(self.host_table["weight"])
            made.note_loaded()
        return made

    def refuse_if_used(self) -> None:
        """Raises RuntimeError if the rows have been used, or given as a table."""
        if self._table is not None or self.portion is not None:
            raise RuntimeError(
                f"{self.name}: its rows have been used, or were given; shard a module whose rows"
                " are yet to be made, once, and load them afterwards"
            )

    def shared_out(self, portion: Portion) -> LazyTable:
        """A portion of the rows, with the values that they would have had here.

        Raises RuntimeError if the rows have been used.
        """
        self.refuse_if_used()
        (columns,) = self.row_shape
        draws, size = map(portion.of, self._draws), (portion.size, columns, self.stored_dtype)
        return LazyTable(self.name, size, self._memory, tuple(draws), portion)

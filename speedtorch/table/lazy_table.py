"""LazyTable: a HostTable, or what is known of one that takes its memory at its first use."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from torch import Tensor

from speedtorch.memory.placement import takes_host_memory
from speedtorch.table.claim import Claim
from speedtorch.table.host_table import HostTable
from speedtorch.table.lazy_init import LazyInit, Portion
from speedtorch.table.new_table import NewTable
from speedtorch.table.record_layout import Fields

__all__ = ["LazyTable"]


class LazyTable:
    """All rows of a table, or a portion of them, with fields of state that may be added.

    Nothing is taken before the first use; what cannot fit is refused before that, in numbers.

    Args:
        name: What errors call it.
        table: The rows, or a table to be made.

    Attributes:
        rows: That are here.
        whole_rows: Of the table, also of one that is not here as a whole.
        row_shape, stored_dtype: Of the weight, as the table has it.
        claim: What trains the rows.
        new: What is made of the rows, at first use or in the place of another table.
    """

    def __init__(self, name: str, table: HostTable | NewTable) -> None:
        self.name = name
        self._beside: HostTable | None = None
        """State of a table that another owns, or that there was no room to make anew."""
        self._table: HostTable | None = None
        self._owned = isinstance(table, NewTable)
        if isinstance(table, HostTable):
            weight, self._table = table.fields["weight"], table
            table = NewTable(name, table.rows, *weight, table.memory_beside)
        else:
            table.wait()
        self.new, self.rows, self.portion = table, table.rows, table.portion
        self.row_shape, self.stored_dtype = table.row_shape, table.dtype
        self.whole_rows = self.rows if self.portion is None else self.portion.rows
        self.claim = Claim(self._table)
        self.version = 0
        """Another number whenever fields have come to lie elsewhere."""

    @property
    def host_table(self) -> HostTable:
        """The table, with its first values; it takes its memory now if it has none yet.

        Raises MemoryError if the machine has too little; nothing was taken.
        """
        table = self._in_memory()
        self.new.draw(table)
        return table

    @property
    def is_common(self) -> bool:
        """Whether a child that is forked has its memory, and no copy of it."""
        return self._table is not None and self._table.memory in ("shared", "file")

    def home_of(self, name: str, *, anew: bool = False) -> HostTable:
        """The table that has a field; with `anew` all values of the field are to be given next."""
        if self._beside is not None and name in self._beside:
            return self._beside
        return self.host_table if name == "weight" and not anew else self._in_memory()

    def field(self, name: str) -> Tensor:
        """All rows of a field `[rows, ...]`, where they are now."""
        return self.home_of(name).rows_of(name)

    @property
    def notes_changes(self) -> bool:
        """Whether it is noted which rows are written."""
        return any(each and each.changes for each in (self._table, self._beside))

    @property
    def memory(self) -> str | None:
        """The kind of memory, made or to be made; None once the table is closed."""
        if self._table is None:
            return self.new.memory
        return None if self._table.closed else self._table.memory

    @property
    def is_in_place(self) -> bool:
        """Whether a GPU reads the rows in place, or will, if it can here, once they are made."""
        if self._table is None:
            return takes_host_memory(self.new.memory) and self.new.memory != "plain"
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
            self._adopt(self.new.make({**self.new.weight, **(state or {})}))
        assert self._table is not None
        return self._table

    def _adopt(self, table: HostTable) -> None:
        self.claim.carry_to(table)
        self._table = table
        self.version += 1

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
                made = self.new.make({**self.new.weight, **fields}, before=table)
        if made is None:
            made = self.new.make(fields, before=table)
            self.claim.share_with(made)
            if table.changes is not None:
                made.track_changes()
            self._beside = made
            self.version += 1
            return False
        if self.is_drawn:
            table.settle()  # a GPU may still write rows back
            made.rows_of("weight").copy_(table.rows_of("weight"))
        made.note_read(table.was_read)
        made.take_changes(table)
        self._adopt(made)
        table.be_held(None)
        table.close()
        return False

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
        places = [before] if self._beside is None else [before, self._beside]
        homes = {name: home for home in places for name in home.fields}
        if before.was_read and (unused := homes.keys() - {"weight", *state}):
            raise RuntimeError(
                f"{self.name}: its table was read from a file with the state"
                f" {', '.join(sorted(unused))}, of which new rows begin as an optimizer says:"
                " attach() the optimizer before resize()"
            )
        fields = {name: home.fields[name] for name, home in homes.items()}
        made = self.new.make(fields, count, before)
        for home in places:
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
        self.new = replace(self.new, rows=table.rows)
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

    @property
    def is_drawn(self) -> bool:
        """Whether the rows have their first values."""
        return self._table is not None and not self.new.draws

    def draw(self, draw: LazyInit, *, anew: bool) -> None:
        """Gives rows other values, at first need if they were never used; see NewTable.add."""
        draw = draw if self.portion is None else self.portion.of(draw)
        if self.is_drawn:
            draw(self.host_table)
        else:
            self.new.add(draw, anew=anew)

    def copied(self) -> LazyTable:
        """A table of its own with the same weights, or the same values to come."""
        made = LazyTable(self.name, replace(self.new))
        if self.is_drawn:
            made.home_of("weight", anew=True).rows_of("weight").copy_(self.host_table["weight"])
            made.new.note_drawn()
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
        draws = tuple(map(portion.of, self.new.draws))
        new = replace(self.new, rows=portion.size, draws=draws, portion=portion)
        return LazyTable(self.name, new)

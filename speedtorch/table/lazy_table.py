"""LazyTable: a HostTable that allocates its memory at first use."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from speedtorch.memory.placement import allocates_host_memory
from speedtorch.table.claim import Claim
from speedtorch.table.host_table import HostTable
from speedtorch.table.lazy_init import LazyInit, ShardSpec
from speedtorch.table.new_table import NewTable
from speedtorch.table.record_layout import Fields
from speedtorch.table.resident_rows import ResidentRows

__all__ = ["LazyTable"]


class LazyTable:
    """All rows of a table, or one rank's shard. Optimizer state can be added later.

    Memory is allocated at first use. See NewTable.wait for the check of free memory before that.

    Args:
        name: The name of the table in errors.
        table: An existing table, or the description of a new one.

    Attributes:
        rows: Number of local rows.
        whole_rows: Number of rows of the whole table, on all ranks.
        row_shape, stored_dtype: Row shape and dtype of the weight in the table.
        claim: Which object trains the rows.
        new: Describes the table to make at first use, or as a replacement.
    """

    def __init__(self, name: str, table: HostTable | NewTable) -> None:
        self.name = name
        self._beside: HostTable | None = None
        """Extra table with state, if the table is not owned, is shared, or a copy did not fit."""
        self._table: HostTable | None = None
        self._owned = isinstance(table, NewTable)
        if isinstance(table, HostTable):
            weight, self._table = table.fields["weight"], table
            table = NewTable(name, table.rows, *weight, table.memory_beside)
        else:
            table.wait()
        self.new, self.rows, self.shard_spec = table, table.rows, table.shard_spec
        self.row_shape, self.stored_dtype = table.row_shape, table.dtype
        self.whole_rows = self.rows if self.shard_spec is None else self.shard_spec.rows
        self.claim = Claim(self._table)
        self.version = 0
        """Increases whenever a field is moved to other memory or a field is added."""

    @property
    def host_table(self) -> HostTable:
        """The table with initialized rows. Allocates and initializes them at first use.

        Raises MemoryError if the machine has too little memory. Nothing was allocated.
        """
        table = self._in_memory()
        self.new.draw(table)
        return table

    @property
    def is_common(self) -> bool:
        """Whether a forked child's writes to the memory change this process's rows too."""
        return self._table is not None and self._table.memory in ("shared", "file")

    def table_of(self, name: str, *, anew: bool = False) -> HostTable:
        """Returns the table with a field. `anew`: the caller overwrites all its values next."""
        if self._beside is not None and name in self._beside:
            return self._beside
        return self.host_table if name == "weight" and not anew else self._in_memory()

    def field(self, name: str) -> Tensor:
        """Returns all local rows of a field `[rows, ...]`, in their current memory."""
        return self.table_of(name).rows_of(name)

    @property
    def resident(self) -> ResidentRows | None:
        """The most used rows of a file in host memory, or None without such rows."""
        return None if self._table is None else self._table.resident

    @property
    def tracks_changes(self) -> bool:
        """Whether changed rows are tracked."""
        return any(table and table.changes for table in (self._table, self._beside))

    @property
    def memory(self) -> str | None:
        """The kind of memory, also before it is allocated, or None for a closed table."""
        if self._table is None:
            return self.new.memory
        return None if self._table.closed else self._table.memory

    @property
    def is_in_place(self) -> bool:
        """Whether a GPU reads the rows in place. Before allocation: whether the kind allows it."""
        if self._table is None:
            return allocates_host_memory(self.new.memory) and self.new.memory != "plain"
        return not self._table.closed and self._table.is_in_place

    @property
    def writable(self) -> bool:
        """Whether rows can be written. False for a mapped file."""
        return self._table is None or self._table.writable

    def check_writable(self, what: str) -> None:
        """Raises ValueError if rows cannot be written."""
        if self._table is not None:
            self._table.check_writable(what)

    def own(self) -> None:
        """Declares this the only user of the table, so that another table may replace it."""
        self._owned = True

    def _in_memory(self, state: Fields | None = None) -> HostTable:
        """Returns the table, perhaps uninitialized. Allocates it first if needed, with `state`."""
        if self._table is None:
            self._adopt(self.new.make({**self.new.weight, **(state or {})}))
        assert self._table is not None
        return self._table

    def _adopt(self, table: HostTable) -> None:
        self.claim.move_to_table(table)
        self._table = table
        self.version += 1

    def add_state(self, fields: Fields) -> bool:
        """Allocates optimizer state for every row, name to (row shape, dtype).

        Returns whether the state has values already, read from a file with the table. Raises
        MemoryError if the machine has too little memory, and ValueError if a table that was passed
        or read has a field of that name with another shape or dtype. Then nothing has changed.
        """
        table = self._in_memory(fields)
        if not self._owned or table.was_read:
            _check_state(self.name, table, fields)
        missing: Fields = {n: f for n, f in fields.items() if table.fields.get(n) != f}
        if not missing:
            if self._beside is not None:  # with the state of an optimizer that was detached
                self._beside = None
                self.version += 1
            return table.was_read
        if table.was_read and len(missing) < len(fields):
            known = ", ".join(name for name in fields if name not in missing)
            warnings.warn(
                f"{self.name}: its table was read with the state {known}, but the optimizer also"
                f" has {', '.join(missing)}. All state begins anew.",
                stacklevel=2,
            )
            missing = fields
        made = None
        if self._owned and not table.was_shared:
            with suppress(MemoryError):  # The state alone, beside the old table, may still fit.
                made = self.new.make({**self.new.weight, **fields}, before=table)
        if made is None:
            made = self.new.make(missing, before=table)
            self.claim.register_beside(made)
            if table.changes is not None:
                made.track_changes()
            self._beside = made
            self.version += 1
            return False
        if self.is_drawn:
            table.settle()  # The GPU may still be writing rows back.
            made.rows_of("weight").copy_(table.rows_of("weight"))
        made.set_was_read(table.was_read)
        made.take_changes(table)
        self._adopt(made)
        table.set_holder(None)
        table.close()
        return False

    def with_rows(self, first: int, count: int, state: Mapping[str, Tensor]) -> HostTable:
        """Returns a copy of the table with `count` new rows before row `first`.

        New rows have zero weights, and the given row in each field of `state`. Raises MemoryError
        if both tables do not fit, NotImplementedError if another object may use the memory. Raises
        RuntimeError if `state` lacks a field that was read from a file.
        """
        before = self.host_table
        if not self._owned or before.memory in ("file", "shared"):
            raise NotImplementedError(
                f"{self.name}: resize() cannot replace a table that was passed to the module, or"
                f" is in a file or in shared memory (memory={before.memory!r}). Call"
                " table.save(path), make a larger table with the same fields, call"
                " larger.load(path, rows=slice(n)) for n saved rows, and make the module again with"
                " the larger table. Optimizer state outside the table starts anew."
            )
        tables = [before] if self._beside is None else [before, self._beside]
        table_by_field = {name: table for table in tables for name in table.fields}
        if before.was_read and (unused := table_by_field.keys() - {"weight", *state}):
            raise RuntimeError(
                f"{self.name}: the file of its table has the optimizer state"
                f" {', '.join(sorted(unused))}, whose values for new rows depend on the optimizer."
                " Before resize(), call attach() with an optimizer that has this state."
            )
        fields = {name: table.fields[name] for name, table in table_by_field.items()}
        made = self.new.make(fields, count, before)
        for table in tables:
            table.settle()  # The GPU may still be writing rows back.
        for name, table in table_by_field.items():
            old, new = table.rows_of(name), made.rows_of(name)
            new[:first].copy_(old[:first])
            new[first + count :].copy_(old[first:])
            if name in state:
                new[first : first + count].copy_(state[name])
        made.set_was_read(before.was_read)
        return made

    def place(self) -> tuple[HostTable, HostTable | None]:
        """Returns the table and the extra table with state, for move_to()."""
        return self.host_table, self._beside

    def move_to(self, table: HostTable, beside: HostTable | None = None) -> None:
        """Replaces the table by another, which may have a different number of rows."""
        self.rows = self.whole_rows = table.rows
        self.new = replace(self.new, rows=table.rows)
        self._beside = beside
        self._adopt(table)

    @property
    def was_read(self) -> bool:
        """Whether the rows were read from a file."""
        return self._table is not None and self._table.was_read

    def set_was_read(self, was_read: bool) -> None:
        """Records whether the rows were read from a file."""
        if self._table is not None:
            self._table.set_was_read(was_read)

    @property
    def is_drawn(self) -> bool:
        """Whether the rows are allocated and initialized."""
        return self._table is not None and not self.new.draws

    def draw(self, draw: LazyInit, *, anew: bool) -> None:
        """Initializes rows again, now or, if they are not initialized, later. See NewTable.add."""
        draw = draw if self.shard_spec is None else self.shard_spec.of(draw)
        if self.is_drawn:
            draw(self.host_table)
        else:
            self.new.add(draw, anew=anew)

    def copied(self) -> LazyTable:
        """Returns an independent table with the same weights or the same pending initialization."""
        made = LazyTable(self.name, replace(self.new))
        if self.is_drawn:
            made.table_of("weight", anew=True).rows_of("weight").copy_(self.host_table["weight"])
            made.new.mark_drawn()
        return made

    def check_unused(self) -> None:
        """Raises RuntimeError if the rows have a table already or are a shard of one."""
        if self._table is not None or self.shard_spec is not None:
            raise RuntimeError(
                f"{self.name}: its rows have been used, were passed to it, or are sharded already."
                " Shard a new module, once, and load its rows afterwards."
            )

    def sharded(self, shard_spec: ShardSpec) -> LazyTable:
        """Returns a shard of the rows, with the values that they would have in this table.

        Raises RuntimeError if the rows have been used.
        """
        self.check_unused()
        draws = tuple(map(shard_spec.of, self.new.draws))
        new = replace(self.new, rows=shard_spec.size, draws=draws, shard_spec=shard_spec)
        return LazyTable(self.name, new)


def _check_state(name: str, table: HostTable, fields: Fields) -> None:
    """Raises ValueError if the table has one of these fields with another shape or dtype."""
    for key, field in fields.items():
        if (own := table.fields.get(key, field)) != field:
            raise ValueError(
                f"{name}: the optimizer's state {key!r} has rows of {_kind_of(*field)}, but the"
                f" table has rows of {_kind_of(*own)}, which would not be trained. Create the table"
                f" with state={{{key!r}: ({_kind_of(*field)})}} or without {key!r}. Nothing was"
                " attached."
            )


def _kind_of(shape: int | Sequence[int], dtype: torch.dtype) -> str:
    return f"{shape if isinstance(shape, int) else list(shape)}, {dtype}"

"""NewTable: the size, kind of memory and initial values of a table before its allocation."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speedtorch.memory import host_memory
from speedtorch.memory.placement import MemoryKind, allocates_host_memory, check_kind
from speedtorch.ops.shapes import row_shape
from speedtorch.table.host_table import HostTable
from speedtorch.table.lazy_init import LazyInit, ShardSpec
from speedtorch.table.record_layout import Fields, lay_out

__all__ = ["NewTable", "waiting_bytes"]

_waiting: weakref.WeakSet[NewTable] = weakref.WeakSet()


def waiting_bytes() -> int:
    """Returns the bytes of host memory that the weights of waiting shards will allocate."""
    return sum(new.bytes_of(new.rows) for new in _waiting if new.shard_spec is not None)


@dataclass(eq=False)
class NewTable:
    """A table to be made, perhaps for one rank's shard. `name` identifies the table in errors."""

    name: str
    rows: int
    columns: int | Sequence[int]
    dtype: torch.dtype
    memory: MemoryKind = "auto"
    draws: tuple[LazyInit, ...] = ()
    shard_spec: ShardSpec | None = None

    def __post_init__(self) -> None:
        check_kind(self.memory)
        (self.rows,) = row_shape(self.rows, "rows")
        self.row_shape = row_shape(self.columns)
        self.weight: Fields = {"weight": (self.row_shape, self.dtype)}

    def bytes_of(self, rows: int) -> int:
        """Returns the bytes of host memory for `rows` rows of the weight."""
        return rows * lay_out(self.weight).record_bytes if allocates_host_memory(self.memory) else 0

    def wait(self) -> None:
        """Registers this table as waiting for its allocation.

        Raises MemoryError if the weights of all waiting tables need more than the available host
        memory. Nothing is checked with SPEEDTORCH_MEMORY_CHECK=0. The same applies to
        torch.distributed, where a rank may keep only a shard.
        """
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        needed, waiting = self.bytes_of(self.rows), list(_waiting)
        if needed and not distributed and host_memory.is_checked():
            reserved = sum(table.bytes_of(table.rows) for table in waiting)
            if needed + reserved > (available := host_memory.available_bytes()):
                raise MemoryError(
                    f"{self.name}: a table of {self.rows:,} rows needs {needed:,} bytes of host"
                    f" memory, {len(waiting)} other tables will need {reserved:,} at first use, and"
                    f" {available:,} are available. Free memory, use fewer or narrower rows, or set"
                    f" SPEEDTORCH_MEMORY_CHECK=0 to skip this check. {self._with_less({})}"
                )
        _waiting.add(self)

    def make(self, fields: Fields, more: int = 0, before: HostTable | None = None) -> HostTable:
        """Allocates a table with `more` extra rows. A CUDA table uses the device of `before`."""
        device = before.device if before is not None and self.memory == "cuda" else None
        try:
            with torch.inference_mode(False):  # An inference tensor rejects later writes.
                made = HostTable.from_fields(self.rows + more, fields, self.memory, device=device)
        except MemoryError as error:
            raise MemoryError(f"{self.name}: {error}. {self._with_less(fields)}") from error
        _waiting.discard(self)
        return made

    def _with_less(self, fields: Fields) -> str:
        """Suggests how to use less memory for a table of these fields."""
        ways = ["speedtorch.shard splits rows among ranks", "HostTable(memory='file') uses a file"]
        if self.dtype.itemsize > 2:
            ways.insert(0, "stored=torch.bfloat16 stores 2 bytes per number")
        if fields.keys() - {"weight"}:
            ways.insert(0, "speedtorch.optim.RowWiseAdagrad keeps one number of state per row")
        return f"To use less memory: {', '.join(ways)}."

    def add(self, draw: LazyInit, *, anew: bool) -> None:
        """Adds a draw. With `anew` it replaces earlier draws of the same rows."""
        every = slice(None)
        kept = [old for old in self.draws if not anew or draw.rows not in (every, old.rows)]
        if kept and kept[-1].zero is None and draw.zero is None and kept[-1].rows == draw.rows:
            before = kept.pop()
            draw = before._replace(functions=(*before.functions, *draw.functions))
        self.draws = (*kept, draw)

    def draw(self, table: HostTable) -> None:
        """Initializes the table with the pending draws, once."""
        if self.draws:
            with torch.inference_mode(False):
                for draw in self.draws:
                    draw(table)
            self.mark_drawn()

    def mark_drawn(self) -> None:
        """Drops all pending draws, because all weights have values."""
        self.draws = ()

    def samples(self) -> list[Tensor]:
        """Draws the first rows of each pending draw. See LazyInit.sample."""
        return [draw.sample(self.rows, self.row_shape, self.dtype) for draw in self.draws]

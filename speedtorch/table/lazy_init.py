"""LazyInit and ShardSpec: deferred initialization, and which rows of a larger table are local."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from speedtorch.table.host_table import HostTable
from speedtorch.table.row_blocks import Share, draw_rows

__all__ = ["LazyInit", "ShardSpec"]

_SAMPLE = 4  # rows to draw when draws are compared


class LazyInit(NamedTuple):
    """Initial values of rows, drawn at first use."""

    functions: tuple[Callable[[Tensor], object], ...]
    """Called one after another as function(tensor), in place."""
    seed: int
    zero: int | None
    """Number of a row that is set to zero after the draw, or None."""
    rows: slice = slice(None)
    """The rows to draw. Without `share`, they get the values of a table of only these rows."""
    share: Share | None = None
    """Places of these rows in a larger table, if they get the values of that table."""

    def __call__(self, table: HostTable) -> None:
        """Draws the values into a table."""
        table.init_(self._function, seed=self.seed, rows=self.rows, share=self.share)
        if self.zero is not None:
            table["weight"][self.zero].zero_()

    def sample(self, rows: int, row_shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Draws the first rows, at most `_SAMPLE`, with seed 0 for a table of `rows` rows."""
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
    for function in functions:
        function(rows)


class ShardSpec(NamedTuple):
    """Which rows of a larger table are in a local table, as a list of blocks."""

    rows: int
    """Rows of the larger table."""
    blocks: Sequence[tuple[range, range]]
    """Pairs of row ranges: in the larger table, and in the local table. Both ascend."""
    agreed: Callable[[int], int]
    """Maps this rank's seed to the seed that all ranks with a shard of the table use."""

    @property
    def size(self) -> int:
        """Number of local rows."""
        return sum(len(local) for _, local in self.blocks)

    def place(self, row: int | None) -> int | None:
        """Converts an id of the larger table to a local row number, or None if not local."""
        for whole, local in self.blocks:
            if row is not None and row in whole:
                return local[row - whole.start]
        return None

    def numbers(self, places: Tensor) -> Tensor:
        """Converts local row numbers to ids of the larger table. Other numbers are undefined."""
        begins = [local.start for _, local in self.blocks] or [0]
        shifts = [whole.start - local.start for whole, local in self.blocks] or [0]
        of_blocks = torch.tensor([begins, shifts], device=places.device)
        block = torch.searchsorted(of_blocks[0].contiguous(), places, right=True) - 1
        return places + of_blocks[1][block.clamp(min=0)]

    def within(self, rows: slice) -> list[tuple[range, range]]:
        """Returns the local rows of a slice as pairs of ranges: in the slice, and locally."""
        first, end, _ = rows.indices(self.rows)
        found = []
        for whole, local in self.blocks:
            begin, stop = max(whole.start, first), min(whole.stop, end)
            if begin < stop:
                own = local[begin - whole.start : stop - whole.start]
                found.append((range(begin - first, stop - first), own))
        return found

    def of(self, draw: LazyInit) -> LazyInit:
        """Converts a draw of the larger table's rows to a draw of the local rows."""
        first, end, _ = draw.rows.indices(self.rows)
        found = self.within(draw.rows)
        base = found[0][1].start if found else 0
        blocks = [(whole, range(own.start - base, own.stop - base)) for whole, own in found]
        rows = slice(base, found[-1][1].stop if found else base)
        seed, share = self.agreed(draw.seed), Share(end - first, blocks)
        return LazyInit(draw.functions, seed, self.place(draw.zero), rows, share)

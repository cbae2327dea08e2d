"""LazyInit and Portion: first values of rows, and which rows of a larger table are somewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from speedtorch.table.host_table import HostTable
from speedtorch.table.row_blocks import Share, draw_rows

__all__ = ["LazyInit", "Portion"]

_SAMPLE = 4  # rows of each draw that are drawn to compare it with others


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
    """Which rows of a larger table are in another, block after block."""

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

    def numbers(self, places: Tensor) -> Tensor:
        """Converts row numbers of this portion to ids of the larger table; others are undefined."""
        begins = [here.start for _, here in self.blocks] or [0]
        shifts = [there.start - here.start for there, here in self.blocks] or [0]
        of_blocks = torch.tensor([begins, shifts], device=places.device)
        block = torch.searchsorted(of_blocks[0].contiguous(), places, right=True) - 1
        return places + of_blocks[1][block.clamp(min=0)]

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

"""How many rows ranks ask for and hold in a step, expected over all draws of ids: none is drawn.

An id names each row with the chance that `sections.zipf_ids` gives it, p; n ids name the row at all
with the chance 1 - (1 - p)^n. The 65,536 most frequent rows count one by one, those beyond in
groups of neighbours, of 2,048 rows or a block, as if all of a group were as frequent.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.sections import spread
from speedtorch.parallel.block_cyclic import BlockCyclic
from speedtorch.table.row_blocks import rows_of_a_block

_SINGLE_ROWS = 1 << 16
_GROUP_ROWS = 2048


class Batches(NamedTuple):
    """The ids of a step on all ranks."""

    rows: int
    """Of the table."""
    columns: int
    ids: int
    """Of each rank."""
    exponent: float
    """Of Zipf's law; 0: all rows are as frequent."""
    ranks: int
    spread: bool
    """Whether frequent rows are all over the table, as hashed ids are, or its first ones."""


class ExpectedRows(NamedTuple):
    """Rows in a step, float64 `[ranks]`, by their owner."""

    asked: Tensor
    """Distinct ones that a rank asks each owner for, itself included."""
    held: Tensor
    """Those that an owner holds, which any rank asks for."""
    crossing: Tensor
    """Of those held, the ones that the step before did not hold: so many come from host memory, and
    as many go back."""


class _Groups(NamedTuple):
    """Rows in groups of neighbours, numbered from the most frequent one on."""

    first: Tensor
    """Number of a group's first one."""
    rows: Tensor
    """How many it has."""


@cache
def expected_rows(batches: Batches) -> ExpectedRows:
    """Rows by owner, as `shard` deals them out."""
    dealt = BlockCyclic.of(batches.rows, batches.ranks, rows_of_a_block((batches.columns,)))
    size = min(_GROUP_ROWS, dealt.block)
    rows = _groups(batches.rows, size).rows
    named = torch.log1p(-_chance(batches.rows, size, batches.exponent))
    of_one = -torch.expm1(batches.ids * named)
    of_all = -torch.expm1(batches.ids * batches.ranks * named)
    owners = _owners(dealt, size, batches.spread)

    def by_owner(chance: Tensor) -> Tensor:
        parts = (rows * chance).tensor_split([len(owners)])
        return torch.bincount(owners, parts[0], dealt.ranks) + parts[1].sum() * _shares(dealt)

    return ExpectedRows(by_owner(of_one), by_owner(of_all), by_owner(of_all * (1 - of_all)))


@cache
def _groups(rows: int, size: int) -> _Groups:
    single = min(rows, _SINGLE_ROWS)
    first = torch.cat([torch.arange(single), torch.arange(single, rows, size)])
    return _Groups(first, torch.cat([first[1:], torch.tensor([rows])]) - first)


@cache
def _chance(rows: int, size: int, exponent: float) -> Tensor:
    """That an id of zipf_ids names a given row of each group."""
    groups, power = _groups(rows, size), 1 - exponent

    def before(number: Tensor) -> Tensor:
        """The chance of all rows of smaller numbers."""
        chance: Tensor = ((number + 1).double().pow(power) - 1) / (float(rows) ** power - 1)
        return chance.clamp(max=1)

    in_group = before(groups.first + groups.rows) - before(groups.first)
    return in_group / groups.rows


@cache
def _owners(dealt: BlockCyclic, size: int, apart: bool) -> Tensor:
    """The owners of the groups, the first ones; the others are all over the table."""
    first = _groups(dealt.rows, size).first
    ids = spread(first[:_SINGLE_ROWS], dealt.rows) if apart else first
    owners: Tensor = dealt.numbers(ids) // dealt.stride
    return owners


@cache
def _shares(dealt: BlockCyclic) -> Tensor:
    """Each rank's share of all rows."""
    rows = [sum(len(own) for own, _ in dealt.blocks(rank)) for rank in range(dealt.ranks)]
    return torch.tensor(rows, dtype=torch.float64) / dealt.rows

"""Blocks of a fixed size: rows that a graph has sent for ahead are those of its next replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import speedtorch
from speedtorch.plan.fixed_size_batch import FixedSizeBatch
from speedtorch.step.fixed_blocks import FixedBlocks
from speedtorch.step.row_store import RowStore
from speedtorch.table.lazy_table import LazyTable

ROWS, WIDTH, CAPACITY, STEPS = 40, 3, 12, 60
FIELDS = {"weight": ((WIDTH,), torch.float32), "state": ((), torch.float64)}


class Blocks:
    """The blocks of a table, as a step of a graph uses them, one after another."""

    def __init__(self, device: str, padding: int | None = None) -> None:
        self.device, self.padding = torch.device(device), padding
        self.table = speedtorch.HostTable.from_fields(ROWS, FIELDS)
        self.table["weight"].copy_(torch.arange(ROWS * WIDTH).view(ROWS, WIDTH))
        self.blocks = FixedBlocks(
            "rows", RowStore(LazyTable("rows", self.table), torch.float32), CAPACITY, padding
        )
        self.blocks.make(self.device, FIELDS)

    def batch(self, ids: Tensor) -> FixedSizeBatch:
        return FixedSizeBatch([ids.to(self.device)], ROWS, self.device, self.padding, CAPACITY)

    def step(self, ids: Tensor, prefetched: Tensor | None) -> list[Tensor]:
        """A step whose rows may be prefetched, and that prefetches another; the rows it held."""
        batch = self.batch(ids)
        self.blocks.begin(batch, are_prefetched=False if prefetched is None else None)
        if prefetched is not None:
            self.blocks.send(self.batch(prefetched), for_replay=True)
        held = [each.clone() for each in self.blocks.rows]
        for each in self.blocks.rows:
            each += 1
        self.blocks.clear_unused()
        return held

    def home(self) -> list[Tensor]:
        self.blocks.write_back(keep=True)
        speedtorch.synchronize()
        return [self.table[name].clone() for name in FIELDS]


def some_ids(number: int) -> Tensor:
    random = torch.Generator().manual_seed(number)
    return torch.randint(ROWS, (1 + number % CAPACITY,), generator=random)


def between(number: int, which: Blocks) -> None:
    """What happens between replays: nothing, an eager step, a table that is written to."""
    if number % 7 == 3:
        which.step(some_ids(number + 1000), None)
    if number % 11 == 5:
        which.blocks.write_back(keep=False)
        speedtorch.synchronize()
        which.table["weight"].mul_(-1)
    if number % 13 == 6:
        which.home()
        which.table["weight"][: ROWS // 2] += 7
        which.blocks.read_again()


GUESSES: dict[str, Callable[[int], Tensor]] = {
    "right": lambda number: some_ids(number + 1),
    "wrong": lambda number: some_ids(number + 500),
    "right and wrong": lambda number: some_ids(number + 1 + 500 * (number % 3 == 0)),
    "the same rows again": lambda number: some_ids(number),
    "too many": lambda number: torch.arange(CAPACITY + 5),
    "those of the last again": lambda number: some_ids(max(0, number - 1)),
}


@pytest.mark.parametrize("padding", [None, 4])
@pytest.mark.parametrize("guess", GUESSES.values(), ids=GUESSES)
def test_prefetched_rows_change_no_number(
    device: str, guess: Callable[[int], Tensor], padding: int | None
) -> None:
    ours, plain = Blocks(device, padding), Blocks(device, padding)
    for number in range(STEPS):
        rows = some_ids(number), guess(number)
        held, expected = ours.step(*rows), plain.step(rows[0], None)
        assert all(torch.equal(*pair) for pair in zip(held, expected, strict=True))
        for each in (ours, plain):
            between(number, each)
    assert all(torch.equal(*pair) for pair in zip(ours.home(), plain.home(), strict=True))


def test_prefetched_rows_are_not_read_again(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Blocks(device)
    read: list[int] = []
    exchange = RowStore.exchange_counted

    def counted(self: RowStore, names: Any, outgoing: Any, incoming: Any) -> None:
        read.append(int(incoming.number))
        exchange(self, names, outgoing, incoming)

    monkeypatch.setattr(RowStore, "exchange_counted", counted)
    ours.step(some_ids(5), some_ids(6))
    for number in range(6, 12):
        read.clear()
        ours.step(some_ids(number), some_ids(number + 1))
        at_begin, ahead = read
        assert at_begin == 0 and ahead > 0
    read.clear()
    ours.step(some_ids(99), some_ids(100))
    assert read[0] > 0


def trained(*numbers: int) -> Tensor:
    """The weights after steps of these batches, each of which adds 1 to its rows."""
    weight = torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH)
    for number in numbers:
        weight[some_ids(number).unique()] += 1
    return weight


def test_a_fault_writes_held_rows_to_the_table_and_lets_none_move_until_they_go_on(
    device: str,
) -> None:
    ours, none, fault = Blocks(device), *torch.tensor([[0], [7]], device=device)
    ours.step(some_ids(5), None)
    ours.blocks.stop(none)
    held = ours.step(some_ids(6), None)[0]
    assert bool(held.any())
    ours.blocks.stop(fault)
    ours.blocks.stop(none)
    speedtorch.synchronize()
    stopped = ours.table["weight"].clone()
    assert torch.equal(stopped, trained(5, 6))
    ours.step(some_ids(7), None)
    assert torch.equal(ours.home()[0], stopped)
    ours.blocks.resume()
    ours.step(some_ids(8), None)
    assert torch.equal(ours.home()[0], trained(5, 6, 8))


@pytest.mark.parametrize("padding", [None, 4])
def test_blocks_of_other_fields_hold_the_same_rows_and_go_on_as_those_before(
    device: str, padding: int | None
) -> None:
    ours, plain = Blocks(device, padding), Blocks(device, padding)
    for each in (ours, plain):
        each.step(some_ids(5), None)
        each.home()
    count = len(set(some_ids(5).tolist()) - {padding})
    ours.blocks = ours.blocks.with_fields(FIELDS)
    ours.blocks.read_again()
    assert not ours.blocks.have(plain.blocks.rows)
    for mine, other in zip(ours.blocks.rows, plain.blocks.rows, strict=True):
        assert torch.equal(mine[:count], other[:count])  # the padding's is read anew
    for number in (6, 7, CAPACITY - 1):
        held = [each.step(some_ids(number), None) for each in (ours, plain)]
        assert all(torch.equal(*pair) for pair in zip(*held, strict=True))
    assert all(torch.equal(*pair) for pair in zip(ours.home(), plain.home(), strict=True))
    assert ours.blocks.capacity == CAPACITY

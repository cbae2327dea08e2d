"""Rows that leave beside the current stream are in the table for whoever reads it then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conftest import NEEDS_GPU
from optimizer_cases import CASES
from plain_training import PlainTraining, assert_same_numbers
from torch import Tensor

import speedtorch
from speedtorch.memory.side_stream import SideStream
from speedtorch.step.row_store import Block, RowStore

Reads = Callable[[speedtorch.Embedding], object]
IDS = torch.tensor([1, 2])


def looked_up(embedding: speedtorch.Embedding) -> object:
    with torch.no_grad():
        return embedding(IDS)


READS: dict[str, Reads] = {
    "a lookup that only reads": looked_up,
    "flush": lambda embedding: embedding.flush(),
    "the table's rows": lambda embedding: embedding.table["weight"],
    "state_dict": lambda embedding: embedding.state_dict(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_who_reads_waits_for_rows_on_their_way(
    monkeypatch: pytest.MonkeyPatch, read: Reads
) -> None:
    embedding = speedtorch.Embedding(5, 2)
    embedding(IDS).sum().backward()
    stream, joined = embedding.trained_rows.exchange.held.transfer_stream, []

    def join(stream: SideStream) -> None:
        joined.append(stream)
        stream.end = None

    monkeypatch.setattr(SideStream, "join", join)
    stream.end = object()  # type: ignore[assignment]
    read(embedding)
    assert joined == [stream]


class Crossings:
    """Which rows each exchange of a module writes to the table, and which it loads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[list[int], list[int]]] = []
        load_batch, exchange = RowStore.load_batch, RowStore.exchange
        join_batch = RowStore.join_batch

        def load(
            self: RowStore, names: Any, held: Block, parts: Any, *given: Any, evicts: bool = True
        ) -> list[Tensor]:
            crossings.seen.append((held.ids.tolist() if evicts else [], parts[0].unique().tolist()))
            return load_batch(self, names, held, parts, *given, evicts=evicts)

        def join(self: RowStore, names: Any, outgoing: Block | None, *given: Any) -> list[Tensor]:
            made = join_batch(self, names, outgoing, *given)
            if len(made) > 9:
                written = [] if outgoing is None else outgoing.ids.tolist()
                crossings.seen.append((written, made[10].tolist()))
            return made

        def move(
            self: RowStore, names: Any, outgoing: Block | None, incoming: Block | None
        ) -> None:
            both = ([] if each is None else each.ids.tolist() for each in (outgoing, incoming))
            crossings.seen.append((next(both), next(both)))
            exchange(self, names, outgoing, incoming)

        crossings = self
        monkeypatch.setattr(RowStore, "load_batch", load)
        monkeypatch.setattr(RowStore, "join_batch", join)
        monkeypatch.setattr(RowStore, "exchange", move)

    def taken(self) -> list[tuple[list[int], list[int]]]:
        seen, self.seen = self.seen, []
        return seen


class Pair:
    """Ours and plain training with Adam, with one step of two lookups behind them."""

    def __init__(self, device: str) -> None:
        rows = torch.randn(10, 2, generator=torch.Generator().manual_seed(0))
        self.ours = speedtorch.Embedding(10, 2, _weight=rows, device=device)
        self.adam = torch.optim.Adam(self.ours.parameters(), lr=0.25)
        speedtorch.attach(self.adam, self.ours)
        self.device = device
        self.plain = PlainTraining.begin(CASES["Adam"], [rows.to(device)])
        self.step([1, 2], [3, 4, 4])

    def look_up(self, *parts: list[int]) -> Tensor:
        self.parts = [torch.tensor(part, device=self.device) for part in parts]
        return torch.stack([self.ours(part).sum() for part in self.parts]).sum()

    def step(self, *parts: list[int]) -> None:
        self.finish(self.look_up(*parts))

    def finish(self, loss: Tensor) -> None:
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()
        (table,) = self.plain.tables
        table.forget()
        for part in self.parts:
            table.look_up(part)
            table.add_gradient(part, torch.ones(len(part), 2, device=self.device))
        self.plain.step()

    def assert_exact(self) -> None:
        self.ours.flush()
        fields = {name: self.ours.table[name] for name in self.ours.table.fields}
        count = self.adam.state_dict()["state"][0]["step"]
        assert_same_numbers([{**fields, "step": count}], self.plain.numbers())


def test_rows_leave_with_those_that_join_the_next_step(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, crossings = Pair(device), Crossings(monkeypatch)
    pair.step([1, 5], [4, 6], [5])
    assert crossings.taken() == [([], [1, 5]), ([1, 2, 3, 4], [4, 6])]
    pair.assert_exact()


def test_rows_leave_before_a_step_whose_rows_none_join(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, crossings = Pair(device), Crossings(monkeypatch)
    pair.step([1, 5])
    assert crossings.taken() == [([], [1, 5]), ([1, 2, 3, 4], [])]
    pair.step([2, 5], [7])  # none joined the step before: they leave at once
    assert crossings.taken() == [([1, 5], [2, 5]), ([], [7])]
    pair.assert_exact()


def test_rows_leave_before_a_lookup_that_begins_another_step(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, crossings = Pair(device), Crossings(monkeypatch)
    pair.look_up([1, 5])  # nobody keeps its graph
    pair.step([2, 6], [7])
    assert crossings.taken()[:2] == [([], [1, 5]), ([1, 2, 3, 4], [])]
    pair.assert_exact()


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_rows_leave_before_a_reader_of_the_table(
    read: Reads, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, crossings = Pair(device), Crossings(monkeypatch)
    loss = pair.look_up([1, 5])
    read(pair.ours)
    assert ([1, 2, 3, 4], []) in crossings.taken()
    pair.finish(loss)
    pair.assert_exact()


def test_ids_of_written_back_rows_are_recorded_for_the_side_stream(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, uses, used = Pair(device), SideStream.uses, []

    def note(stream: SideStream, tensors: Sequence[Tensor]) -> None:
        used.extend(tensors)
        uses(stream, tensors)

    monkeypatch.setattr(SideStream, "uses", note)
    ids = pair.ours.trained_rows.exchange.held.now.ids
    pair.step([1, 5])
    assert any(each is ids for each in used)


@NEEDS_GPU
def test_ids_of_written_back_rows_outlive_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, exchange = Pair("cuda"), RowStore.exchange

    def late(*arguments: Any) -> None:
        torch.cuda._sleep(50_000_000)
        exchange(*arguments)

    loss = pair.look_up([1, 5])
    monkeypatch.setattr(RowStore, "exchange", late)
    pair.ours.trained_rows.exchange.held.complete()  # the transfer is queued
    taken = [torch.full((4,), 7, device="cuda") for _ in range(64)]
    monkeypatch.undo()
    pair.finish(loss)
    pair.assert_exact()
    assert all(bool((each == 7).all()) for each in taken)


def test_rows_of_a_cache_leave_at_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(device)
    speedtorch.cache(pair.ours, "1KiB")
    pair.step([1, 5], [4, 6], [5])
    pair.step([2, 5], [7])
    pair.assert_exact()


@NEEDS_GPU
def test_the_last_rows_of_a_loop_are_read_as_they_left() -> None:
    embedding = speedtorch.Embedding(200_000, 64, device="cuda")
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    with torch.no_grad():
        embedding.weight.zero_()
    batches = [torch.arange(first, first + 60_000, device="cuda") for first in (0, 60_000, 120_000)]
    for ids in speedtorch.prefetch(batches, embedding, ids=lambda batch: batch):
        embedding(ids).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for ids in batches:
            assert bool((embedding(ids) == -1).all())

"""Rows that leave beside the current stream are in the table for whoever reads it then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import NEEDS_GPU

import speedtorch
from speedtorch.memory.side_stream import SideStream

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
    travel, joined = embedding.trained_rows.exchange._travel, []

    def join(stream: SideStream) -> None:
        joined.append(stream)
        stream.end = None

    monkeypatch.setattr(SideStream, "join", join)
    travel.end = object()  # type: ignore[assignment]
    read(embedding)
    assert joined == [travel]


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

"""The model of many ranks agrees with what one and two did, and its page with the model."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_processes import in_processes
from torch import Tensor

import speedtorch
from benchmarks import ranks_model
from benchmarks.expected_rows import Batches, expected_rows
from benchmarks.harness import RESULTS
from benchmarks.marked_text import between
from benchmarks.ranks_model import MEASURED, Model, call_ms, sent
from benchmarks.sections import spread, zipf_ids
from speedtorch.parallel.block_cyclic import BlockCyclic
from speedtorch.parallel.ranks import Ranks
from speedtorch.parallel.shard import shard
from speedtorch.table.row_blocks import rows_of_a_block

ZIPF = (0.0, 0.9, 1.05, 1.2)
STEP = Batches(rows=10_000_000, columns=128, ids=1 << 20, exponent=0.0, ranks=1, spread=True)
"""Of results/embedding.json."""


def of_zipf(exponent: float, **settings: Any) -> Batches:
    return STEP._replace(exponent=exponent, **settings)


def embedding() -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / "embedding.json").read_text())
    return result


@pytest.mark.parametrize("exponent", ZIPF)
def test_as_many_rows_are_expected_as_were_drawn(exponent: float) -> None:
    drawn, rows = embedding()["extra"][str(exponent)], expected_rows(of_zipf(exponent))
    assert float(rows.held) == pytest.approx(drawn["distinct"], rel=0.01)
    stay = float(rows.held - rows.crossing)
    assert stay == pytest.approx(drawn["of the step before"], rel=0.01)


@pytest.mark.parametrize("apart", [True, False], ids=["spread", "frequent ids small"])
def test_owners_have_as_many_rows_as_were_drawn(apart: bool) -> None:
    batches = Batches(1_000_000, 128, 2000, 1.2, 8, apart)
    sharding = BlockCyclic.of(batches.rows, batches.ranks, rows_of_a_block((128,)))
    torch.manual_seed(0)
    drawn = [zipf_ids(batches.rows, batches.ids, batches.exponent).cpu() for _ in range(8)]
    if not apart:
        place = spread(torch.arange(batches.rows), batches.rows).argsort()
        drawn = [place[ids] for ids in drawn]

    def by_owner(ids: Tensor) -> Tensor:
        return torch.bincount(
            sharding.numbers(ids.unique()) // sharding.stride, minlength=8
        ).double()

    requested = torch.stack([by_owner(ids) for ids in drawn]).mean(0)
    held = by_owner(torch.cat(drawn))
    assert (float(requested.max() / requested.mean()) > 1.5) == (not apart)
    rows = expected_rows(batches)
    for seen, expected, draws in ((requested, rows.asked, 8), (held, rows.held, 1)):
        assert bool(((seen - expected).abs() < 4 * (expected / draws).sqrt() + 1).all())


@pytest.mark.parametrize(("ranks", "most"), [(2, 1.05), (8, 1.1)])
@pytest.mark.parametrize("apart", [True, False], ids=["spread", "frequent ids small"])
@pytest.mark.parametrize("exponent", ZIPF)
def test_no_owner_has_many_more_rows(exponent: float, apart: bool, ranks: int, most: float) -> None:
    rows = expected_rows(of_zipf(exponent, ranks=ranks, spread=apart))
    for counts in rows:
        assert len(counts) == ranks
        assert float(counts.max() / counts.mean()) <= most


def sends_as_the_model_says(rows: int, columns: int, drawn: list[Tensor]) -> None:
    """A step on each rank, whose collectives are seen, as of ranks on machines of their own."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    module = speedtorch.Embedding(rows, columns)
    shard(module)
    seen: list[list[int]] = []
    all_to_all = dist.all_to_all_single

    def see(out: Tensor, tensor: Tensor, received: Any, parts: Any, **options: Any) -> Any:
        counts = parts or [len(tensor) // ranks] * ranks
        seen.append([count * tensor[:1].numel() * tensor.itemsize for count in counts])
        return all_to_all(out, tensor, received, parts, **options)

    alone = mock.patch.object(Ranks.of(), "_barrier", None)
    with alone, mock.patch.object(dist, "all_to_all_single", see):
        module(drawn[rank]).sum().backward()
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    sharding = BlockCyclic.of(rows, ranks, rows_of_a_block((columns,)))
    owners = [sharding.numbers(ids.unique()) // sharding.stride for ids in drawn]
    requested = torch.stack([torch.bincount(ids, minlength=ranks) for ids in owners])
    calls = sent(requested, 4 * columns)
    assert len(seen) == len(calls)
    for to_ranks, (name, expected) in zip(seen, calls.items(), strict=True):
        to_ranks[rank] = 0  # rows that the rank keeps cross no link
        assert to_ranks == expected[rank].tolist(), name


@pytest.mark.slow
def test_two_ranks_send_what_the_model_says() -> None:
    random = torch.Generator().manual_seed(0)
    drawn = [torch.randint(5000, (count,), generator=random) for count in (700, 900)]
    in_processes(2, sends_as_the_model_says, 5000, 6, drawn)


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_what_is_sent_is_received_and_none_to_oneself(ranks: int) -> None:
    model = Model(of_zipf(1.05, ranks=ranks))
    calls = model.sent()
    assert torch.equal(calls["gradients"].t(), calls["rows"])
    for sent_bytes in calls.values():
        assert sent_bytes.shape == (ranks, ranks)
        assert float(sent_bytes.sum(0).sum()) == pytest.approx(float(sent_bytes.sum(1).sum()))
        assert not sent_bytes.diagonal().any()
    requested = float(expected_rows(model.batches).asked.sum()) * (ranks - 1)
    assert float(calls["rows"].sum()) == pytest.approx(512 * requested)
    assert float(calls["ids"].sum()) == pytest.approx(8 * requested)


def test_one_rank_sends_nothing() -> None:
    times = Model(of_zipf(1.05)).times()
    assert set(times.calls.values()) == {0.0}


# Rows of 512 bytes and milliseconds of an all-to-all between two H200; ids took 0.04 to 0.07.
@pytest.mark.parametrize(("rows", "ms"), [(34_816, 0.12), (133_000, 0.22), (266_000, 0.34)])
def test_collectives_of_two_ranks_take_what_was_measured(rows: int, ms: float) -> None:
    half = torch.tensor([[0.0, rows / 2], [rows / 2, 0.0]])  # the other half stays
    assert call_ms(512 * half, 8) == pytest.approx(ms, rel=0.15)
    assert 0.04 <= call_ms(8 * half, 8) <= 0.075


@pytest.mark.parametrize("ranks_of_a_machine", [1, 2])
def test_two_ranks_exchange_as_fast_as_was_measured(ranks_of_a_machine: int) -> None:
    model = Model(of_zipf(0.0, ranks=2), ranks_of_a_machine=ranks_of_a_machine)
    moved = 2 * 1536 * float(expected_rows(model.batches).crossing.max())
    rate = moved / model.times().exchange / 1e6
    assert rate == pytest.approx({1: 81.0, 2: 64.6}[ranks_of_a_machine])


@pytest.mark.parametrize("exponent", ZIPF)
def test_one_rank_takes_what_one_gpu_does(exponent: float) -> None:
    times = Model(of_zipf(exponent)).times()
    measured = {
        figure["parameters"]["ahead"]: figure["median_ms"]
        for figure in embedding()["figures"]
        if figure["section"] == f"Zipf {exponent}"
        and figure["name"].startswith("speedtorch, Adam, fused")
    }
    assert times.step == pytest.approx(measured[False], rel=0.15)
    assert times.prefetched == pytest.approx(measured[True], rel=0.15)


@pytest.mark.parametrize("ids", [1 << 20, 1 << 19])
def test_two_ranks_take_about_as_long_as_the_model_says(ids: int) -> None:
    """Less where the two GPUs did not share their machine's memory, more where Python was slow."""
    times = Model(of_zipf(1.05, ids=ids, ranks=2)).times()
    measured = {
        figure["parameters"]["ahead"]: figure["median_ms"]
        for figure in json.loads((RESULTS / "ranks.json").read_text())["figures"]
        if figure["section"] == "large batches"
        and "kind" not in figure["parameters"]  # a peer's
        and (figure["parameters"]["ranks"], figure["parameters"]["ids"]) == (2, ids)
    }
    assert 0.7 <= measured[False] / times.step <= 1.15
    assert 0.7 <= measured[True] / times.prefetched <= 1.15


def test_more_ranks_of_a_machine_share_its_memory() -> None:
    """Until it is the limit, and not the link of each."""
    times = [Model(of_zipf(0.9, ranks=8), ranks_of_a_machine=size).times() for size in (1, 2, 4, 8)]
    assert all(a.exchange < b.exchange for a, b in itertools.pairwise(times))
    assert times[3].exchange / times[2].exchange == pytest.approx(2, rel=0.02)


@pytest.mark.slow
def test_the_page_has_the_models_tables() -> None:
    text = Path(ranks_model.PAGE).read_text()
    sent_part = between(text, ranks_model.SENT, ranks_model.END_SENT)
    assert sent_part == ranks_model.sent_table()
    times_part = between(text, ranks_model.TIMES, ranks_model.END_TIMES)
    assert times_part == ranks_model.times_table()


def test_the_page_has_the_models_figures() -> None:
    formulas = ranks_model.PAGE.read_text().partition("### How long it takes")[2].split("```")[1]
    missing = [name for name, value in MEASURED._asdict().items() if f"{value:g}" not in formulas]
    assert missing == []

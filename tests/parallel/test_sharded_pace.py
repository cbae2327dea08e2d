"""Loops of prefetch over rows that ranks share: they go at one pace."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import paces
import torch
import torch.distributed as dist
from rank_backends import BACKENDS, ON_RANKS
from rank_processes import own_device
from sharded_training import ROWS, local_ids, own_rows, raises, same
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.nn import prefetch_pace
from speedtorch.nn.prefetch_pace import AHEAD, AT_ONCE, MeasuredPace
from speedtorch.nn.row_module import RowModule
from speedtorch.parallel.ranks import Ranks

pytestmark = ON_RANKS


def shared() -> speedtorch.Embedding:
    torch.manual_seed(0)
    module = speedtorch.Embedding(ROWS, 3, device=own_device())
    speedtorch.shard(module)
    return module


def decided(module: RowModule, seconds: Callable[[bool], float]) -> list[bool]:
    """Which of a loop's steps were planned ahead, where they take so long on this rank."""
    now, seen = [0.0], []
    pace = MeasuredPace(module.lookups.agree_on_pace)
    with patch("time.perf_counter", lambda: now[0]):
        pace.begin()
        for _ in range(300):
            seen.append(pace.is_ahead)
            now[0] += seconds(pace.is_ahead)
            pace.note_step()
    return seen


def test_the_slowest_rank_decides() -> None:
    module, rank = shared(), dist.get_rank()
    seen = decided(module, lambda ahead: 1.4 if ahead and rank == 1 else 1.0)
    every: list[list[bool]] = [[]] * dist.get_world_size()
    dist.all_gather_object(every, seen)
    assert all(of_rank == seen for of_rank in every)
    assert seen[:36] == [True] * 12 + [False] * 12 + [True] * 12
    assert not any(seen[36:])
    is_odd = rank == 1
    message = r"ranks \[0.*\] are at a step of prefetch\(\) .*, ranks \[1\] are at a new lookup"
    raises(
        RuntimeError,
        message,
        lambda: module(local_ids(1)) if is_odd else module.lookups.agree_on_pace(1e9),
    )
    module(local_ids(1))


def test_ranks_that_cannot_exchange_times_plan_ahead() -> None:
    """On the CPU no rank does."""
    module = shared()
    assert prefetch_pace.pace_of([module]) is AT_ONCE
    with patch.object(module.trained_rows.exchange.held, "device", torch.device("cuda")):
        assert isinstance(prefetch_pace.pace_of([module]), MeasuredPace)
        with patch.object(Ranks.of(), "_barrier", None):
            assert prefetch_pace.pace_of([shared_like(module)]) is AHEAD


def shared_like(module: RowModule) -> RowModule:
    """Another module at the same lookups: none has a pace for it."""
    other = speedtorch.Embedding(2, 2)
    other.lookups, other.trained_rows = module.lookups, module.trained_rows
    return other


@BACKENDS
def test_an_evaluation_may_prefetch_within_a_training_that_does() -> None:
    """A loop within another hands its batches through; the numbers are those of plain loops."""
    given = [local_ids(k, 40 - k, 20) for k in range(6)]

    def trained(loop: Callable[[nn.Module], list[Tensor]]) -> list[Tensor]:
        module = shared()
        adam = optim.Adam(module.parameters(), lr=0.1)
        speedtorch.attach(adam, module)
        for ids in loop(module):
            adam.zero_grad()
            module(ids).square().sum().backward()
            adam.step()
            with torch.no_grad():
                seen = [module(ids).clone() for ids in loop(module)]
            assert len(seen) == len(given)
        return [*own_rows(module), *seen]

    expected = trained(lambda _: given)
    for pace in (None, AHEAD, AT_ONCE):
        paces.choose(pace)
        found = trained(lambda module: speedtorch.prefetch(given, module, ids=lambda ids: ids))
        assert same(found, expected)


def test_a_bad_id_of_one_rank_raises_on_all_at_its_turn() -> None:
    paces.choose(AT_ONCE)
    module, seen = shared(), 0
    given = [local_ids(1, 40), local_ids(2, ROWS if dist.get_rank() else 3), local_ids(4)]

    def loop() -> None:
        nonlocal seen
        for ids in speedtorch.prefetch(given, module, ids=lambda ids: ids):
            module(ids)
            seen += 1

    raises(IndexError, f"id {ROWS} at position 1|ranks .1. are out of range", loop)
    assert seen == 1
    module(local_ids(1))

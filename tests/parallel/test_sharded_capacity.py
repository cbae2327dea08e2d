"""Rows of a capacity that are sharded train as those of one process without a capacity.

What one rank cannot hold, no rank does. SPEEDTORCH_ROUNDS sets how many random programs run, 4 by
default, and SPEEDTORCH_FIRST the first.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import paces
import pytest
import torch
import torch.distributed as dist
from ordinary_run import programs
from rank_backends import BACKENDS, EVERY_WAY, NEEDS_GPU, ON_RANKS, RANKS, TWO_AND_THREE_RANKS
from rank_processes import own_device
from sharded_training import (
    CASES,
    FITS,
    FIXED,
    ROWS,
    WAYS,
    WAYS_OF,
    WIDTH,
    Case,
    check_collections,
    check_training,
    ids_of_rank,
    local_ids,
    module_of,
    raised_late,
    raises,
    share_of,
)
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.nn import prefetch_pace
from speedtorch.nn.prefetch_pace import AHEAD
from speedtorch.nn.row_module import RowModule
from speedtorch.parallel.block_cyclic import BlockCyclic
from speedtorch.parallel.fair_shares import FairShares
from speedtorch.parallel.requests import Requests
from speedtorch.parallel.shard import shard
from speedtorch.table.row_blocks import rows_of_a_block

pytestmark = ON_RANKS

ROUNDS = int(os.environ.get("SPEEDTORCH_ROUNDS", programs(4)))
FIRST = int(os.environ.get("SPEEDTORCH_FIRST", "0"))

TOO_MANY = "Embedding: a step has 5 unique rows, but capacity=4"
ANOTHERS = "Embedding: another rank could not load the rows of its step, and its error states the"
FULL = "Embedding: the lookups of all ranks in a step have more unique rows of one rank than its"
SHARE = "Embedding: a lookup on some rank has more unique rows of one rank than a fair share"
MORE = "a lookup has {} unique rows of rank 1, but at most {}{} are allowed.* of capacity={}"
NEW_ROWS = "all lookups of a step must be announced before the first of them.* has 1 new rows"
WIDE = replace(CASES["Adam"], rows=4000)
"""Rows of which a rank owns more than a capacity."""
SHARES = {2: 324, 3: 237}
"""Of a capacity of 400, by the number of ranks."""


class Training:
    """Rows of a capacity, of four by default, and their optimizer."""

    def __init__(self, case: Case = CASES["Adam"], capacity: int = 4) -> None:
        self.module = module_of(case, capacity)
        shard(nn.Sequential(self.module))
        self.optimizer = optim.Adam(self.module.parameters(), lr=0.25)
        speedtorch.attach(self.optimizer, self.module)
        self.before = self.rows()

    def rows(self) -> Tensor:
        """Those of this rank, as they are now."""
        self.module.flush()
        return self.module.table["weight"].clone()

    def learn(self, *parts: Tensor) -> Tensor:
        """A step; gives what the last lookup has brought."""
        for part in parts:
            found: Tensor = self.module(part)
            found.sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return found.detach()

    @classmethod
    def begun(cls, *given: Any) -> Training:
        """One that has made a step."""
        training = cls(*given)
        training.learn(local_ids(1, 2))
        training.before = training.rows()
        return training

    def check_raises(
        self,
        message: str,
        way: Callable[[RowModule, Tensor], object],
        ids: Tensor,
        kind: type[Exception] = RuntimeError,
    ) -> None:
        """A lookup raises and changes nothing."""
        raises(kind, message, lambda: way(self.module, ids))
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """No row has changed, and the step after is one."""
        assert torch.equal(self.rows(), self.before)
        self.check_step(3, 4)

    def check_step(self, *ids: int) -> None:
        """A step of these ids on all ranks changes their rows, and no others."""
        self.learn(local_ids(*ids))
        self.check_changed(*ids)

    def check_changed(self, *ids: int) -> None:
        """These rows have changed, and no others."""
        changed = torch.zeros(self.module.num_embeddings, dtype=torch.bool)
        changed[list(ids)] = True
        own = share_of(changed)
        assert torch.equal((self.rows() != self.before).any(1), own)


def owned(rank: int, *places: int, of: int = ROWS) -> Tensor:
    """Ids of rows of a rank, of a table of so many."""
    rows = ids_of_rank(rank, of)
    return local_ids(*(rows[place] for place in places))


def too_many() -> Tensor:
    """No rank asks for more than three rows; five distinct ones are the second rank's."""
    return owned(1, 0, 1, 2) if dist.get_rank() == 0 else owned(1, 2, 3, 4)


def of_rank(own: int, message: str, elsewhere: str = ANOTHERS) -> str:
    """The error text of rank `own`, and of the other ranks."""
    return message if dist.get_rank() == own else elsewhere


# Errors that are raised at once, as on the CPU.
AT_ONCE = pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.nightly)])


def announced(module: RowModule, ids: Tensor) -> None:
    module.announce(ids)
    module(ids)


def prefetched(module: RowModule, ids: Tensor) -> None:
    for _ in speedtorch.prefetch([ids], module, ids=lambda batch: batch):
        module(ids)


LOOKUPS: list[Callable[[RowModule, Tensor], object]] = [RowModule.__call__, announced, prefetched]


@EVERY_WAY
@TWO_AND_THREE_RANKS
def test_ranks_train_as_one_process_does(ranks: int, every_way: bool) -> None:
    check_training(ranks == 2, FIXED, WAYS if every_way else WAYS_OF[ranks])


@BACKENDS
def test_collections_train_as_in_one_process() -> None:
    check_collections(FITS["capacity"])


@AT_ONCE
def test_too_many_rows_of_one_rank_raise_on_all() -> None:
    for way in LOOKUPS:
        Training.begun().check_raises(of_rank(1, TOO_MANY), way, too_many())
    training = Training()
    ids = owned(1, 0, 1, 2, 3, 4) if dist.get_rank() == 0 else local_ids()
    more = of_rank(0, MORE.format(5, 4, "", 4), SHARE)
    raises(RuntimeError, more, lambda: training.module(ids))
    training.check_step(3, 4)


def of_second(count: int) -> Tensor:
    """So many rows of the second rank, which one rank alone asks for."""
    return owned(1, *range(count), of=WIDE.rows) if dist.get_rank() == 0 else local_ids()


@AT_ONCE
def test_more_than_a_share_raises_on_all_and_a_share_fits() -> None:
    share = SHARES[dist.get_world_size()]
    for more in (share + 1, 400, 900):  # what fits all ranks together fits no single one
        message = of_rank(0, MORE.format(more, share, "", 400), SHARE)
        for way in LOOKUPS:
            Training.begun(WIDE, 400).check_raises(message, way, of_second(more))
    check_a_share()


def check_a_share() -> None:
    """A lookup of one rank's rows alone, as many as are a share of the capacity, is trained."""
    share = SHARES[dist.get_world_size()]
    training = Training(WIDE, 400)
    ids, places = of_second(share), torch.arange(share)
    found = training.learn(ids)
    changed = (training.rows() != training.before).any(1)
    assert changed.sum() == (share if dist.get_rank() == 1 else 0)
    assert bool(changed[places].all()) == (dist.get_rank() == 1)
    rows = [training.before if dist.get_rank() == 1 else None]
    dist.broadcast_object_list(rows, 1)
    assert rows[0] is not None
    assert torch.equal(found.cpu(), rows[0][: len(found)])


@AT_ONCE
def test_the_row_of_padding_idx_takes_no_room() -> None:
    """Of its owner's capacity, nor of a share."""
    ids = owned(1, 0, 1, 2, 3, 4)
    case = replace(CASES["Adam"], settings={"padding_idx": int(ids[-1])})
    training, trained = Training(case, 4), ids[:-1].tolist()
    training.learn(ids if dist.get_rank() == 0 else local_ids())
    training.check_changed(*trained)
    more = owned(1, 0, 1, 2, 3, 4, 5) if dist.get_rank() == 0 else local_ids()
    message = MORE.format(6, 5, r" \(with the row of padding_idx\)", 4)
    raises(RuntimeError, of_rank(0, message, SHARE), lambda: training.module(more))


def most_of_an_owner(ids: Tensor, sharding: BlockCyclic) -> int:
    """The most distinct rows of one rank among ids."""
    numbers = sharding.numbers(ids).unique()
    return int(torch.bincount(numbers[numbers >= 0] // sharding.stride, minlength=1).max())


def random_batch(choose: random.Random, sharding: BlockCyclic, capacity: int) -> Tensor:
    """Ids of one rank: of all owners or of one, few of them or many, of no row now and then."""
    most = capacity if choose.random() < 0.5 else sharding.rows
    drawn = torch.Generator().manual_seed(choose.getrandbits(32))
    ids = torch.randperm(sharding.rows, generator=drawn)
    if choose.random() < 0.3:
        ids = ids[sharding.numbers(ids) // sharding.stride == choose.randrange(sharding.ranks)]
    ids = ids[: int(most * choose.random() ** 2)]
    ids = torch.cat([ids, ids[: choose.randrange(4)]])
    wrong = choose.random() < 0.06
    return torch.cat([ids, torch.full((1,), sharding.rows)]) if wrong else ids


@pytest.mark.parametrize(
    "ranks", [2, *(pytest.param(n, marks=pytest.mark.nightly) for n in (3, 4))]
)
def test_random_batches_are_trained_or_raise_on_all(ranks: int) -> None:
    trained = uneven = 0
    for seed in range(FIRST, FIRST + ROUNDS):
        choose = random.Random(seed)
        rows = choose.choice([5, ROWS, 700, 4000])
        padding = choose.choice([None, choose.randrange(rows)])
        capacity = min(choose.randint(1, choose.choice([10, 700, 2000])), rows)
        case = replace(CASES["Adam"], rows=rows, settings={"padding_idx": padding})
        sharding = BlockCyclic.of(rows, ranks, rows_of_a_block((WIDTH,)))
        share = FairShares(capacity, sharding, padded=padding is not None).rows
        with raised_late() if choose.random() < 0.5 else nullcontext():
            training, way = Training(case, capacity), choose.choice(LOOKUPS)
            for _ in range(6):
                batches = [random_batch(choose, sharding, capacity) for _ in range(ranks)]
                every = torch.cat(batches).unique()
                held = every if padding is None else every[every != padding]
                are_rows = bool((every < rows).all())
                fits = are_rows and most_of_an_owner(held, sharding) <= capacity
                shares_fit = all(most_of_an_owner(ids, sharding) <= share for ids in batches)
                ids = batches[dist.get_rank()].to(own_device())
                if fits and shares_fit:
                    way(training.module, ids)
                    training.learn(ids)
                    training.check_changed(*held.tolist())
                    training.before = training.rows()
                    trained += 1
                else:
                    with pytest.raises((IndexError, RuntimeError), match="^Embedding: "):
                        way(training.module, ids)
                        training.module(local_ids())  # which raises what is found late
                    assert torch.equal(training.rows(), training.before)
                    uneven += fits
    assert ROUNDS < 100 or (trained > ROUNDS and uneven > 0)


@RANKS
def test_ranks_send_blocks_of_a_fair_share(ranks: int) -> None:
    """In the collectives of a step ranks ask each other for a share of the capacity each."""
    sent, all_to_all = [], dist.all_to_all_single

    def see(out: Tensor, given: Tensor, *counts: list[int] | None, **options: Any) -> object:
        assert out.nbytes == given.nbytes
        sent.append(given.nbytes // ranks)
        return all_to_all(out, given, *counts, **options)

    row = 4 * WIDTH
    for capacity, share in ((400, SHARES[ranks]), (2000, {2: 1264, 3: 884}[ranks])):
        training = Training(WIDE, capacity)
        ids = torch.arange(dist.get_rank(), 200, 2, device=own_device())
        sent.clear()
        with patch.object(dist, "all_to_all_single", see):
            training.learn(ids)
        # Ids, and whether they are good; rows; gradients.
        assert sent == [8 * (share + 1), row * share, row * share]


@AT_ONCE
def test_a_bad_id_of_one_rank_raises_on_all() -> None:
    for way in LOOKUPS:
        ids = local_ids(1, ROWS) if dist.get_rank() == 1 else local_ids(1, 2)
        message = of_rank(1, "id 41 at position 1 is out of range", r"ids of ranks \[1\] are out")
        Training().check_raises(message, way, ids, IndexError)


@BACKENDS
def test_the_end_of_a_loop_gives_up_only_its_own_ids() -> None:
    pair, later = (local_ids(1), local_ids(2)), (local_ids(3), local_ids(4))
    for pace in (AHEAD, prefetch_pace.AT_ONCE):
        paces.choose(pace)
        training = Training()
        loop = iter(speedtorch.prefetch([pair] * 3, training.module, ids=list))
        training.learn(*next(loop))
        training.module.announce(*later)
        del loop
        training.learn(*later)
        training.check_changed(1, 2, 3, 4)


@BACKENDS
def test_the_end_of_a_loop_within_another_keeps_the_planned_requests() -> None:
    training = Training()
    pair = local_ids(1), local_ids(2)
    for parts in speedtorch.prefetch([pair] * 3, training.module, ids=list):
        with torch.no_grad():
            for ids in speedtorch.prefetch(pair, training.module, ids=lambda ids: ids):
                training.module(ids)
        with patch.object(Requests, "make", side_effect=AssertionError("another request")):
            training.learn(*parts)
    training.check_changed(1, 2)


@RANKS
def test_new_rows_in_a_step_of_one_rank_raise_on_all() -> None:
    """The step goes on."""
    training = Training()
    first, second = owned(0, 1, 2), owned(1, 1, 2)
    training.module.announce(first, second)
    training.module(first).sum().backward()
    message = of_rank(1, NEW_ROWS)
    raises(RuntimeError, message, lambda: training.module(owned(1, 2, 3)))
    training.module(second).sum().backward()
    training.module(first.clone()).sum().backward()  # rows that are held come in any lookup
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.check_changed(*torch.cat([first, second]).tolist())


@RANKS
@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "late"])
def test_a_later_announced_lookup_before_an_earlier_one_raises_on_all(is_late: bool) -> None:
    """The order of announce then trains."""
    with raised_late() if is_late else nullcontext():
        training = Training()
        first, second = owned(0, 1, 2), owned(1, 1, 2)
        training.module.announce(first, second)
        message = "must look ids up in the order of announce"
        raises(RuntimeError, message, lambda: training.module(second))
        training.learn(first, second)
        training.check_changed(*torch.cat([first, second]).tolist())


@RANKS
def test_ranks_begin_the_same_steps_of_dropped_lookups() -> None:
    """Even if a collective keeps the tensors of one rank."""
    kept, all_to_all = [], dist.all_to_all_single

    def keep(out: Tensor, sent: Tensor, *counts: list[int] | None, **options: Any) -> object:
        kept.extend([out, sent])
        return all_to_all(out, sent, *counts, **options)

    training = Training()
    parts = [owned(0, 1), owned(0, 2), owned(0, 3)]
    training.module.announce(*parts)
    training.module(parts.pop(0))
    with patch.object(dist, "all_to_all_single", keep if dist.get_rank() == 0 else all_to_all):
        for ids in parts:
            training.module(ids)  # without a backward
    assert bool(kept) == (dist.get_rank() == 0)
    training.check_unchanged()


@RANKS
@pytest.mark.parametrize("way", LOOKUPS)
def test_what_is_found_late_moves_no_row_and_raises_at_the_next_lookup(
    way: Callable[[RowModule, Tensor], object],
) -> None:
    """On all ranks."""
    rank, share = dist.get_rank(), SHARES[dist.get_world_size()]
    bad_ids = local_ids(1, ROWS) if rank == 1 else local_ids(1, 2)
    with raised_late():
        for training, ids, kind, message in (
            (Training.begun(), too_many(), RuntimeError, of_rank(1, TOO_MANY, FULL)),
            (
                Training.begun(WIDE, 400),
                of_second(share + 1),
                RuntimeError,
                of_rank(0, MORE.format(share + 1, share, "", 400), SHARE),
            ),
            (
                Training(),
                bad_ids,
                IndexError,
                of_rank(1, "id 41 at position 1 is out of range", "an id on some rank is out"),
            ),
        ):
            way(training.module, ids)
            training.check_raises(message, RowModule.__call__, local_ids(3), kind)


@RANKS
@pytest.mark.parametrize("raises_at", ["flush", "flush of one rank", "lookup", "evaluation"])
def test_what_is_found_late_in_a_step_raises_once(raises_at: str) -> None:
    """A step of the same rows after it is one."""
    late = f"{of_rank(1, TOO_MANY, FULL)}.* Until this error, lookups of the batch returned zeros"
    with raised_late():
        training = Training()
        assert not training.learn(too_many()).any()
        if raises_at == "flush" or (raises_at == "flush of one rank" and dist.get_rank() == 0):
            raises(RuntimeError, late, training.module.flush)
        if raises_at == "flush":
            assert torch.equal(training.rows(), training.before)
        else:
            with torch.set_grad_enabled(raises_at != "evaluation"):
                raises(RuntimeError, late, lambda: training.module(local_ids(3)))
        training.check_step(3, 4)  # all have raised it


@RANKS
def test_what_is_found_late_raises_at_a_flush_or_as_what_one_rank_did() -> None:
    share = SHARES[dist.get_world_size()]
    with raised_late():
        training = Training(WIDE, 400)
        assert not training.learn(of_second(share + 1)).any()
        raises(RuntimeError, SHARE, training.module.flush)
        training.check_unchanged()

        training, own = Training(), "expected .*int32 or int64.* got torch.float32"
        if dist.get_rank() == 1:
            raises(RuntimeError, own, lambda: training.module(torch.rand(2, device=own_device())))
        else:
            assert not training.module(local_ids(1, 2)).any()
        bad = of_rank(1, own, "an id on some rank is out")
        training.check_raises(bad, RowModule.__call__, local_ids(3), Exception)


@RANKS
def test_what_fits_trains_if_errors_are_raised_late() -> None:
    with raised_late():
        check_a_share()
        name = "Adam, two lookups, uneven"
        check_training(dist.get_world_size() == 2, {name: FIXED[name]})


@RANKS
def test_a_table_of_fewer_rows_than_ranks_is_trained() -> None:
    module = speedtorch.Embedding(1, WIDTH, capacity=4, device=own_device())
    shard(nn.Sequential(module))
    optimizer = optim.SGD(module.parameters(), lr=1.0)
    speedtorch.attach(optimizer, module)
    with torch.no_grad():
        before = module(local_ids(0))
    module(local_ids(0, 0) if dist.get_rank() else local_ids()).sum().backward()
    optimizer.step()
    with torch.no_grad():
        moved = 2 * (dist.get_world_size() - 1) / dist.get_world_size()
        assert torch.equal(module(local_ids(0)), before - moved)


@pytest.mark.parametrize("backend", [pytest.param("nccl", marks=NEEDS_GPU)])
def test_a_cuda_graph_refuses_the_lookup_by_name() -> None:
    training, ids = Training(), local_ids(1, 2)
    training.learn(ids)
    message = "Embedding: torch.cuda.graph cannot capture a lookup of rows that are sharded among"
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        raises(RuntimeError, message, lambda: training.module(ids))
    training.check_step(1, 2)

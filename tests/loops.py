"""Training loops and ways to train them, which must all give the same numbers.

A loop is a function of a Training. `WAYS` names the ways: with torch's own embedding of all rows,
and with ours as it is, prefetched, with a capacity, and both; `CACHED` has those with a cache. Each
loop is written once and does not depend on the way; what only ours has (a flush, an announcement)
does nothing with torch's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import paces
import torch
from embedding_reference import random_ids
from reference import assert_same_bytes
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

import speedtorch
from speedtorch.torch_internals import as_plain

__all__ = [
    "CACHED",
    "CAPACITY",
    "JOINING",
    "LOOPS",
    "ROWS",
    "TORCH",
    "WAYS",
    "WIDTH",
    "Training",
    "Way",
    "sgd_step",
]

ROWS, WIDTH = 30, 4
CAPACITY = 8
"""Rows of a step, of which the largest batches have so many ids."""


@dataclass(frozen=True)
class Way:
    """How a loop is trained."""

    ahead: bool = False  # prefetched
    turning: bool = False  # prefetch hands some batches through
    capacity: int | None = None
    by_torch: bool = False  # torch's own embedding
    cache: str | None = None


TORCH, PLAIN = Way(by_torch=True), Way()
WAYS = {
    "plain": PLAIN,
    "prefetch": Way(ahead=True),
    "prefetch-turning": Way(ahead=True, turning=True),
    "capacity": Way(capacity=CAPACITY),
    "capacity-prefetch": Way(ahead=True, capacity=CAPACITY),
    "capacity-prefetch-turning": Way(ahead=True, turning=True, capacity=CAPACITY),
}
CACHED = {
    "cache": Way(cache="1KiB"),
    "cache-prefetch": Way(cache="1KiB", ahead=True),
    "cache-capacity": Way(cache="1KiB", capacity=CAPACITY),
    "cache-capacity-prefetch": Way(cache="1KiB", capacity=CAPACITY, ahead=True),
}
"""Ways with a cache of fewer rows than the table has."""


def first_rows() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5))


class Training:
    """An embedding, a layer beside it, and an optimizer of both; with `bags` an EmbeddingBag."""

    def __init__(
        self,
        way: Way,
        make: Callable[..., optim.Optimizer] = optim.Adam,
        device: str = "cpu",
        overlap: float = 0.5,
        *,
        attach: bool = True,
        bags: bool = False,
        **settings: Any,
    ) -> None:
        self.way, self.device, self.overlap, self.bags = way, device, overlap, bags
        self.emb: Any
        if way.by_torch:
            self.emb = nn.Embedding(ROWS, WIDTH, _weight=first_rows(), **settings).to(device)
        else:
            given = {"_weight": first_rows(), "device": device, "capacity": way.capacity}
            given["cache"] = way.cache
            kind = speedtorch.EmbeddingBag if bags else speedtorch.Embedding
            self.emb = kind(ROWS, WIDTH, **given, **settings)
        self.scale = nn.Parameter(torch.ones(WIDTH, device=device))
        self.optimizer = make([self.emb.weight], lr=0.1)
        if make is not optim.SparseAdam:
            self.optimizer.add_param_group({"params": [self.scale]})
        self.is_attached = attach and make is not optim.SGD and not way.by_torch
        self.attach()
        self.seen: list[Tensor] = []  # by evaluations in between

    def attach(self) -> None:
        if self.is_attached:
            speedtorch.attach(self.optimizer, self.emb)

    def detach(self) -> None:
        if self.is_attached:
            speedtorch.detach(self.optimizer)

    def batches(self, count: int = 20) -> list[Tensor]:
        given = random_ids(ROWS, count, self.overlap, most=CAPACITY)
        return [self.shaped(ids).to(self.device) for ids in given]

    def shaped(self, ids: Tensor) -> Tensor:
        """The ids of a lookup; of bags they are one bag."""
        return ids[None] if self.bags and ids.dim() == 1 else ids

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Batches of two lookups, whose rows have room together."""
        half = CAPACITY // 2
        given = [random_ids(ROWS, 20, self.overlap, most=half, seed=seed) for seed in (2, 3)]
        return [(u.to(self.device), v.to(self.device)) for u, v in zip(*given, strict=True)]

    def loop(self, batches: Iterable[Any], ids: Callable[[Any], Any] = lambda batch: batch) -> Any:
        if not self.way.ahead:
            return iter(batches)
        if self.way.turning:
            paces.choose(paces.Turning())
        return iter(speedtorch.prefetch(batches, self.emb, ids=ids))

    def tell(self, *parts: Tensor) -> None:
        """Announces the lookups of a step, unless prefetch does."""
        if not (self.way.ahead or self.way.by_torch):
            self.emb.announce(*parts)

    def rows(self, ids: Tensor) -> Tensor:
        ids = self.shaped(ids)
        rows: Tensor = self.emb(ids.to(self.device) if self.way.by_torch else ids)
        return rows

    def loss(self, ids: Tensor, factor: float = 1.0) -> Tensor:
        return (self.rows(ids) * self.scale).square().sum() * factor / 16

    def learn(self, *parts: Tensor, apart: bool = False, step: bool = True) -> None:
        """Looks the parts up, goes back from all at once or from each apart, and steps."""
        if apart:
            for number, part in enumerate(parts):
                self.loss(part, number + 1).backward()
        else:
            torch.stack([self.loss(part, n + 1) for n, part in enumerate(parts)]).sum().backward()
        if step:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.seen.append(self.rows(torch.arange(ROWS)))

    def flush(self) -> None:
        if not self.way.by_torch:
            self.emb.flush()

    def fill(self, value: float) -> None:
        (self.emb.weight.data if self.way.by_torch else self.emb.table).fill_(value)

    def move(self) -> None:
        """Moves the held rows, as to(another device) does."""
        if not self.way.by_torch:
            with as_plain():
                self.emb.trained_rows.exchange.moving(lambda: None)

    def fields(self) -> dict[str, Tensor]:
        """All rows, and with ours what the optimizer keeps of them."""
        if self.way.by_torch:
            return {"weight": self.emb.weight.detach()}
        self.emb.flush()
        return {name: self.emb.table[name].clone() for name in self.emb.table.fields}

    def result(self) -> dict[str, Tensor]:
        return {"scale": self.scale.detach(), **self.fields()}


def sgd_step(module: nn.Module, loss: Tensor) -> None:
    """A step of SGD that takes half of the gradient from what has one."""
    loss.backward()
    optimizer = optim.SGD(module.parameters(), lr=0.5)
    optimizer.step()
    optimizer.zero_grad()


Loop = Callable[[Training], object]
LOOPS: dict[str, Loop] = {}
JOINING: dict[str, Loop] = {}
"""Loops whose steps bring rows after their first lookup, which a capacity refuses."""


def loop(train: Loop) -> Loop:
    LOOPS[train.__name__] = train
    return train


def joining(train: Loop) -> Loop:
    JOINING[train.__name__] = train
    return train


def assert_same_numbers(
    train: Loop,
    ways: tuple[Way, Way],
    *given: Any,
    kind: type[Training] = Training,
    **settings: Any,
) -> None:
    """Trains a loop in two ways, with the same numbers at the end and wherever they are read."""
    ours, theirs = (kind(way, *given, **settings) for way in ways)
    for each in (ours, theirs):
        train(each)
    actual, expected = ours.result(), theirs.result()
    for name, value in expected.items():
        assert_same_bytes(actual[name], value)
        assert bool(value.isfinite().all())
    for one, other in zip(ours.seen, theirs.seen, strict=True):
        assert_same_bytes(one, other)
    assert not torch.equal(expected["weight"].cpu(), first_rows())


@loop
def one_lookup_a_step(training: Training) -> None:
    for ids in training.loop(training.batches()):
        training.learn(ids)


@loop
def several_lookups_a_step(training: Training) -> None:
    for number, (u, v) in enumerate(training.loop(training.pairs())):
        training.tell(u, v)
        training.learn(u, v, u.clone(), v[:2].int(), apart=number % 2 == 1)


@loop
def lookups_of_other_tensors(training: Training) -> None:
    for number, ids in enumerate(training.loop(training.batches())):
        training.learn(ids.clone() if number % 3 else ids.cpu())


@joining
def lookups_that_were_not_told(training: Training) -> None:
    for number, ids in enumerate(training.loop(training.batches())):
        more = torch.tensor([number % ROWS, 7], device=training.device)
        training.tell(ids)
        training.learn(ids, more) if number % 4 == 1 else training.learn(ids)


@joining
def announced_within_a_step(training: Training) -> None:
    for u, v in training.loop(training.pairs(), ids=lambda pair: pair[0]):
        loss = training.loss(u)
        if not training.way.by_torch:
            training.emb.announce(v)
        (loss + training.loss(v)).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()


@joining
def gradients_that_accumulate_over_batches(training: Training) -> None:
    for number, ids in enumerate(training.loop(training.batches())):
        training.learn(ids, step=number % 3 == 2)


@loop
def batches_that_are_left_out(training: Training) -> None:
    for number, ids in enumerate(training.loop(training.batches())):
        if number % 3 != 1:
            training.learn(ids)


@loop
def lookups_that_are_given_up(training: Training) -> None:
    for number, ids in enumerate(training.loop(training.batches())):
        loss = training.loss(ids)
        if number % 3 != 1:
            loss.backward()
            training.optimizer.step()
        elif number % 2:
            loss.backward()
        del loss
        training.optimizer.zero_grad()


@loop
def other_rows_trained_in_between(training: Training) -> None:
    for number, ids in enumerate(training.loop(training.batches())):
        if number % 3 == 1:
            training.learn(torch.tensor([number % ROWS, 29], device=training.device))
        training.learn(ids)


@loop
def a_part_of_a_batch_trained_again(training: Training) -> None:
    for u, v in training.loop(training.pairs()):
        training.tell(u, v)
        training.learn(u, v)
        training.learn(v)


@loop
def rows_that_leave_and_come_back_at_once(training: Training) -> None:
    for ids in training.loop(training.batches(2) * 6):
        training.learn(ids)


@loop
def batches_of_no_ids(training: Training) -> None:
    empty = torch.empty(2, 0, dtype=torch.int64, device=training.device)
    batches = [part for ids in training.batches(6) for part in (ids, ids[:0], ids, empty)]
    for ids in training.loop(batches):
        training.learn(ids)


@loop
def no_ids_before_others(training: Training) -> None:
    for number, ids in enumerate(training.loop(training.batches())):
        losses = [training.loss(ids[:0]), training.loss(ids)]
        for loss in losses if number % 2 else [torch.stack(losses).sum()]:
            loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()


@loop
def zero_grad_before_the_lookup(training: Training) -> None:
    for number, ids in enumerate(training.loop(training.batches())):
        training.optimizer.zero_grad(set_to_none=number % 8 < 4)
        training.loss(ids).backward()
        training.optimizer.step()


@loop
def zero_grad_after_the_lookup(training: Training) -> None:
    for number, ids in enumerate(training.loop(training.batches())):
        loss = training.loss(ids)
        training.optimizer.zero_grad(set_to_none=number % 8 < 4)
        loss.backward()
        training.optimizer.step()


@loop
def losses_that_are_kept(training: Training) -> None:
    kept = []
    for ids in training.loop(training.batches()):
        kept.append(training.loss(ids))
        kept[-1].backward()
        training.optimizer.step()
        training.optimizer.zero_grad()


@loop
def a_penalty_on_looked_up_rows(training: Training) -> None:
    for ids in training.loop(training.batches()):
        rows = training.rows(ids)
        (rows.sum() + 0.1 * rows.square().sum()).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()


@loop
def a_step_again_after_a_flush(training: Training) -> None:
    for ids in training.loop(training.batches()):
        training.loss(ids).backward()
        training.optimizer.step()
        training.flush()
        training.optimizer.step()
        training.optimizer.zero_grad()


@loop
def a_flush_anywhere(training: Training) -> None:
    for number, ids in enumerate(training.loop(training.batches())):
        loss = training.loss(ids)
        calls = [loss.backward, training.optimizer.step, training.optimizer.zero_grad]
        calls.insert(number % 4, training.flush)
        for call in calls:
            call()


@loop
def evaluation_between_and_within_steps(training: Training) -> None:
    for ids in training.loop(training.batches(10)):
        loss = training.loss(ids)
        for call in (loss.backward, training.optimizer.step, training.optimizer.zero_grad):
            training.evaluate()
            call()


@loop
def saved_and_loaded(training: Training) -> None:
    saved: list[Any] = []
    for number, ids in enumerate(training.loop(training.batches())):
        training.learn(ids)
        if number == 5:
            saved = [each.state_dict() for each in (training.emb, training.optimizer)]
            saved = copy.deepcopy(saved)
        if number == 12:
            training.emb.load_state_dict(saved[0])
            training.optimizer.load_state_dict(saved[1])
        training.evaluate()


@loop
def left_and_begun_again(training: Training) -> None:
    for stop in (5, 9, 30):
        for number, ids in enumerate(training.loop(training.batches())):
            training.learn(ids)
            if number == stop:
                break
        training.evaluate()


@loop
def a_table_written_within_a_step(training: Training) -> None:
    for number, ids in enumerate(training.loop(training.batches())):
        training.loss(ids).backward()
        if number % 4 == 1:
            training.fill(0.5)
        training.optimizer.step()
        training.optimizer.zero_grad()


@loop
def all_of_these_by_turns(training: Training) -> None:
    other = torch.tensor([2, 5], device=training.device)
    for number, ids in enumerate(training.loop(training.batches(30))):
        if number % 7 == 3:
            training.learn(other)
        if number % 7 == 4:
            training.flush()
        if number % 7 != 5:
            training.learn(ids)
        if number % 7 == 6:
            training.fill(0.5)


@loop
def a_lookup_that_a_checkpoint_computes_again(training: Training) -> None:
    for u, v in training.loop(training.pairs()):
        training.tell(u, v)
        (checkpoint(training.loss, u, use_reentrant=False) + training.loss(v)).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()


@loop
def rows_that_are_held_are_moved(training: Training) -> None:
    for ids in training.loop(training.batches()):
        training.learn(ids)
        training.rows(ids)
        training.move()


@loop
def attached_and_detached_while_rows_are_held(training: Training) -> None:
    training.detach()
    for number, ids in enumerate(training.batches(5)):
        training.loss(ids).backward()
        if number > 0:
            training.detach()
        training.attach()
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.learn(ids)

"""Batches with bad ids anywhere in training: an IndexError, no row changed, the next one right."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from ordinary_run import soaked
from reference import assert_same_bytes
from torch import Tensor, nn, optim

import speedtorch

ROWS, WIDTH = 50, 4
BAD = [-1, ROWS, ROWS + 1, -ROWS, 2**31, 2**32, 2**32 + 5, -(2**32), 2**63 - 1, -(2**63)]
SETTINGS: dict[str, dict[str, object]] = {
    "plain": {},
    "cache": {"cache": "256B"},
    "capacity": {"capacity": ROWS},
}


class Training:
    """SGD that takes 1 from a row for each time that a batch names it, and what rows must be."""

    def __init__(self, device: str, seed: str, settings: dict[str, object]) -> None:
        self.chance, self.device = random.Random(device + seed), device
        weight = torch.randint(-99, 99, (ROWS, WIDTH), generator=torch.Generator().manual_seed(1))
        self.expected = weight.float()
        given = {"_weight": self.expected.clone(), "device": device, **settings}
        self.embedding = speedtorch.Embedding(ROWS, WIDTH, **given)  # type: ignore[arg-type]
        self.bag = speedtorch.EmbeddingBag(ROWS, WIDTH, mode="sum", **given)  # type: ignore[arg-type]
        self.modules = nn.ModuleList([self.embedding, self.bag])
        self.sgd = optim.SGD(self.modules.parameters(), lr=1.0)
        speedtorch.attach(self.sgd, self.modules)

    def good(self) -> Tensor:
        count = self.chance.randint(1, 30)
        return torch.tensor([self.chance.randrange(ROWS) for _ in range(count)])

    def bad(self) -> Tensor:
        """A good batch with bad ids at some places."""
        ids = self.good()
        for _ in range(self.chance.choice([1, 1, 2, len(ids)])):
            ids[self.chance.randrange(len(ids))] = self.chance.choice(BAD)
        return ids

    def step(self, ids: Tensor) -> None:
        self.sgd.zero_grad()
        (self.embedding(ids).sum() + self.bag(ids[None]).sum()).backward()
        self.sgd.step()
        self.expected.index_add_(0, ids.cpu(), -torch.ones(len(ids), WIDTH))

    def finish(self) -> None:
        """Raises what the GPU has found."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        for module in (self.embedding, self.bag):
            module.flush()
        speedtorch.synchronize()

    def check(self) -> None:
        """Compares each row of both tables."""
        self.finish()
        for module in (self.embedding, self.bag):
            assert_same_bytes(module.table["weight"].cpu(), self.expected)


def looked_up(training: Training, ids: Tensor) -> None:
    training.embedding(ids)
    training.finish()


def looked_up_in_a_bag(training: Training, ids: Tensor) -> None:
    training.bag(ids[None])
    training.finish()


def looked_up_behind_good_ones(training: Training, ids: Tensor) -> None:
    training.embedding(training.good().to(training.device))
    looked_up(training, ids)


def read(training: Training, ids: Tensor) -> None:
    with torch.no_grad():
        looked_up(training, ids)


def announced(training: Training, ids: Tensor) -> None:
    training.embedding.announce(ids)
    looked_up(training, ids)


def prefetched(training: Training, ids: Tensor) -> None:
    """Batches of a loop before the bad one are trained."""
    batches = [each.to(training.device) for each in (training.good(), training.good())]

    def named(ids: Tensor) -> dict[nn.Module, Tensor]:
        return {training.embedding: ids, training.bag: ids[None]}

    for batch in speedtorch.prefetch([*batches, ids], training.modules, ids=named):
        if batch is ids:
            looked_up(training, ids)
        else:
            training.step(batch)


@pytest.mark.soak
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("how", SETTINGS)
@pytest.mark.parametrize(
    "use", [looked_up, looked_up_in_a_bag, looked_up_behind_good_ones, read, announced, prefetched]
)
def test_bad_batches_change_no_row_and_the_next_batch_is_right(
    device: str, use: Callable[[Training, Tensor], None], how: str
) -> None:
    training = Training(device, f"{use.__name__} {how}", SETTINGS[how])
    for _ in range(soaked(5, 500)):
        ids = training.bad().to(device)
        with pytest.raises(IndexError, match=r"id -?\d+ at position \d+ .*out of range"):
            use(training, ids)
        training.sgd.zero_grad()
        training.check()
        training.step(training.good().to(device))
        training.check()

"""GloVe on Embeddings: plain torch's numbers, prefetched or not, and the demo as a user runs it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import NEEDS_GPU
from demo_commands import facts, run_demo
from topics import TOPIC_OF, topic_passages
from torch import nn

import speedtorch
from demos.batches import Outcome
from demos.cooccurrence import Cooccurrence, PairBatches, count_cooccurrence
from demos.corpus import Corpus
from demos.glove import GloVe
from demos.loop import train
from demos.settings import make_optimizer
from demos.word_vectors import nearest_neighbours

TABLES = ("target", "context", "target_bias", "context_bias")


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus.from_passages(topic_passages(), min_count=1)


@pytest.fixture(scope="module")
def pairs(corpus: Corpus) -> Cooccurrence:
    return count_cooccurrence(corpus, window=5)


class Trained(NamedTuple):
    model: GloVe
    outcome: Outcome
    optimizer: torch.optim.Optimizer  # It has the state of the rows that are held: it must live.


def trained(
    pairs: Cooccurrence,
    *,
    name: str = "Adagrad",
    plain: bool = False,
    ahead: bool = True,
    device: str = "cpu",
    dim: int = 12,
    lr: float = 0.05,
    batch: int = 200,
    epochs: int = 4,
) -> Trained:
    """A trained model; `plain` has torch's own embeddings with all rows instead of ours."""
    model = GloVe(70, dim, x_max=20, device=device)
    model.draw_rows(seed=5)
    if plain:
        for side in TABLES:
            rows = getattr(model, side).table["weight"].clone().to(device)
            sparse = name == "SparseAdam"
            setattr(model, side, nn.Embedding.from_pretrained(rows, freeze=False, sparse=sparse))
    optimizer = make_optimizer(name, lr, model.parameters())
    if not plain:
        speedtorch.attach(optimizer, model)
    batches = PairBatches(pairs, batch=batch, epochs=epochs, seed=1, device=device)
    return Trained(model, train(model, optimizer, batches, ahead=ahead), optimizer)


def all_rows(model: GloVe, side: str) -> torch.Tensor:
    embedding = getattr(model, side)
    if isinstance(embedding, nn.Embedding):
        return embedding.weight.detach().cpu()
    embedding.flush()
    weight: torch.Tensor = embedding.table["weight"]
    return weight.clone()


def test_the_loss_is_that_of_the_paper() -> None:
    model = GloVe(3, 2, x_max=10, alpha=0.5)
    model.draw_rows(seed=0)
    pairs = Cooccurrence(np.array([2, 0]), np.array([1, 0]), np.array([40, 2.5], np.float32))
    batch = next(iter(PairBatches(pairs, batch=2)))
    w, c, b, d = (all_rows(model, side).double() for side in TABLES)
    first = (w[2] @ c[1] + b[2] + d[1] - np.log(40)) ** 2
    second = 0.5 * (w[0] @ c[0] + b[0] + d[0] - np.log(2.5)) ** 2
    assert model(batch).item() == pytest.approx((first + second).item(), rel=1e-5)


def test_first_values_depend_on_the_seed_alone() -> None:
    one, same, other = (GloVe(9, 4) for _ in range(3))
    for model, seed in ((one, 1), (same, 1), (other, 2)):
        model.draw_rows(seed)
    for side in TABLES:
        rows = all_rows(one, side)
        assert torch.equal(rows, all_rows(same, side))
        assert not torch.equal(rows, all_rows(other, side)) and rows.abs().max() <= 0.125
    assert not torch.equal(all_rows(one, "target"), all_rows(one, "context"))


def test_every_epoch_has_each_pair_once_in_its_own_order(pairs: Cooccurrence) -> None:
    batches = PairBatches(pairs, batch=1000, epochs=2, seed=3)
    assert len(batches) == len(list(batches)) == 2 * -(-len(pairs) // 1000)
    found = [torch.stack([b.rows, b.columns]) for b in batches]
    again = [torch.stack([b.rows, b.columns]) for b in batches]
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    first, second = (torch.cat(found[i : i + len(found) // 2], 1) for i in (0, len(found) // 2))
    assert not torch.equal(first, second)
    for epoch in (first, second):
        assert sorted(epoch.T.tolist()) == np.stack([pairs.rows, pairs.columns], 1).tolist()
    assert [len(b) for b in PairBatches(pairs, batch=10**6, steps=3)] == [len(pairs)] * 3


@pytest.mark.examples
def test_training_lowers_the_loss_and_finds_the_topics(
    corpus: Corpus, pairs: Cooccurrence, device: str
) -> None:
    model, outcome, _optimizer = trained(pairs, device=device, epochs=40)
    assert outcome.finished and outcome.examples == 40 * len(pairs)
    assert outcome.losses[-1] < 0.3 * outcome.losses[0]
    own = [i for i, word in enumerate(corpus.words) if word in TOPIC_OF]
    near = nearest_neighbours(model.vectors, corpus.words, own, number=3)
    right = [TOPIC_OF.get(other) == TOPIC_OF[word] for word in near for other in near[word]]
    assert sum(right) / len(right) > 0.9


# torch's dense Adagrad and SGD leave rows without a gradient as they are; SparseAdam skips them.
@pytest.mark.parametrize("dim", [1, 7, 32])
@pytest.mark.parametrize("name", ["Adagrad", "SGD", "SparseAdam"])
def test_the_numbers_are_those_of_torchs_embeddings(
    pairs: Cooccurrence, name: str, dim: int
) -> None:
    lr = 0.001 if name == "SGD" else 0.05
    ours = trained(pairs, name=name, dim=dim, lr=lr)
    theirs = trained(pairs, name=name, dim=dim, lr=lr, plain=True, ahead=False)
    losses = ours.outcome.losses
    assert losses == theirs.outcome.losses and losses[-1] < losses[0]
    for side in TABLES:
        assert torch.equal(all_rows(ours.model, side), all_rows(theirs.model, side))


@NEEDS_GPU
def test_on_a_gpu_the_loss_is_that_of_torchs_embeddings(pairs: Cooccurrence) -> None:
    ours = trained(pairs, device="cuda").outcome
    theirs = trained(pairs, device="cuda", plain=True, ahead=False).outcome
    assert ours.losses == pytest.approx(theirs.losses, rel=0.01)


# ------------------------------------------------------------------------------------------------
# The command


@pytest.mark.parametrize(
    "name",
    [
        "SparseAdam",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("SGD", "Adamax", "RMSprop")),
    ],
)
def test_other_optimizers_can_be_chosen(tmp_path: Path, name: str) -> None:
    assert run_demo("glove", tmp_path, "--optimizer", name, "--lr", "0.01") == 0
    losses = facts(tmp_path)["training"]["losses"]
    assert losses[-1] < losses[0]

"""The skip-gram model on Embeddings: plain torch's numbers, and vectors that say something."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import NEEDS_GPU
from topics import TOPIC_OF, topic_passages
from torch import nn

import speedtorch
from demos import word2vec
from demos.batches import Outcome
from demos.corpus import Corpus
from demos.loop import train
from demos.pairs import Batch, HeldOut, PairStream
from demos.plain import RowOptimizer
from demos.settings import make_optimizer, optimizer_names
from demos.word2vec import SIDES, SkipGram, held_out_score
from demos.word_vectors import content_words, nearest_neighbours

REFUSED = ("Adafactor", "LBFGS", "Muon")


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus.from_passages(topic_passages(), min_count=1)


class Ours(NamedTuple):
    """A model with its rows in host memory."""

    model: SkipGram
    optimizer: torch.optim.Optimizer  # It has the state of the rows that are held: it must live.
    tables: dict[str, speedtorch.HostTable]


def ours(
    words: int,
    dim: int,
    name: str = "Adamax",
    lr: float | None = None,
    *,
    device: str = "cpu",
    memory: str = "auto",
    seed: int = 0,
) -> Ours:
    u, v = (speedtorch.Embedding(words, dim, device=device, memory=memory) for _ in SIDES)
    model = SkipGram(u, v)
    optimizer = make_optimizer(name, lr, model.parameters())
    speedtorch.attach(optimizer, model)
    model.draw_rows(seed)
    return Ours(model, optimizer, dict(zip(SIDES, (u.table, v.table), strict=True)))


def all_rows(model: SkipGram) -> list[torch.Tensor]:
    every = torch.arange(model.u_embeddings.num_embeddings)
    return [model.rows(side, every) for side in SIDES]


def trained_both_ways(
    corpus: Corpus, name: str, dim: int, device: str, memory: str, *, ahead: bool = True
) -> tuple[SkipGram, SkipGram, Outcome, Outcome]:
    stream = PairStream(corpus, batch=128, sample=0.05, steps=50)
    model, optimizer, _ = ours(len(corpus.words), dim, name, device=device, memory=memory, seed=1)
    first, sparse = all_rows(model), name == "SparseAdam"
    outcome = train(model, optimizer, stream, ahead=ahead)
    tables = (nn.Embedding.from_pretrained(f, freeze=False, sparse=sparse) for f in first)
    plain = SkipGram(*tables).to(device)
    rows = RowOptimizer(plain, partial(make_optimizer, name, None))
    return model, plain, outcome, train(plain, rows, stream, ahead=False)


@pytest.mark.slow
@pytest.mark.dealt("ahead", "dim")
@pytest.mark.parametrize("ahead", [True, False], ids=["prefetch", "no_prefetch"])
@pytest.mark.parametrize("dim", [7, 32])
@pytest.mark.parametrize("name", [n for n in optimizer_names() if n not in REFUSED])
def test_the_numbers_are_the_very_ones_of_plain_torch(
    corpus: Corpus, name: str, dim: int, ahead: bool
) -> None:
    model, plain, one, other = trained_both_ways(corpus, name, dim, "cpu", "plain", ahead=ahead)
    for rows, expected in zip(all_rows(model), all_rows(plain), strict=True):
        assert torch.equal(rows, expected)
    assert one.losses == other.losses and len(one.losses) == 2 and one.steps == 50


@pytest.mark.parametrize("name", ["SparseAdam", "SGD", "Adagrad"])
def test_the_plain_rule_is_that_of_torchs_own_optimizers(corpus: Corpus, name: str) -> None:
    """SparseAdam skips the other rows; dense SGD and Adagrad leave rows without gradient alone."""
    stream, sparse = PairStream(corpus, batch=128, sample=0.05, steps=50), name == "SparseAdam"
    make = partial(make_optimizer, name, None)
    first = all_rows(ours(len(corpus.words), 8).model)
    models, outcomes = [], []
    for kind in (RowOptimizer, lambda model, make: make(model.parameters())):
        tables = (nn.Embedding(*f.shape, _weight=f.clone(), sparse=sparse) for f in first)
        models.append(SkipGram(*tables))
        outcomes.append(train(models[-1], kind(models[-1], make), stream, ahead=False))
    for rows, expected in zip(*map(all_rows, models), strict=True):
        assert torch.equal(rows, expected)
    assert outcomes[0].losses == outcomes[1].losses


@NEEDS_GPU
@pytest.mark.parametrize("memory", ["managed", "registered", "plain", "cuda"])
@pytest.mark.parametrize("name", ["Adamax", "SparseAdam", "Adagrad", "SGD"])
def test_on_a_gpu_the_score_is_that_of_plain_torch(corpus: Corpus, name: str, memory: str) -> None:
    model, plain, one_run, other_run = trained_both_ways(corpus, name, 32, "cuda", memory)
    held = PairStream(corpus, batch=128, sample=0.05).held_out_pairs()
    one, other = held_out_score(model, held), held_out_score(plain, held)
    assert one is not None and other is not None
    assert one.auc == pytest.approx(other.auc, rel=0.01)
    assert one.log_likelihood == pytest.approx(other.log_likelihood, rel=0.01)
    assert one_run.losses[-1] == pytest.approx(other_run.losses[-1], rel=0.01)


def test_gradients_of_a_word_that_occurs_twice_add_up(device: str) -> None:
    twice = Batch(
        centre=torch.tensor([2, 2]),
        context=torch.tensor([0, 3]),
        negative=torch.tensor([[3], [3]]),
        progress=1.0,
    ).to(torch.device(device))
    model, optimizer, tables = ours(5, 3, "SGD", 1.0, device=device)
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.randn(5, 3, generator=generator, requires_grad=True) for _ in SIDES)
    for side, values in zip(SIDES, (u, v), strict=True):
        tables[side]["weight"].copy_(values.detach())
    model(twice).backward()
    optimizer.step()
    true = torch.nn.functional.logsigmoid(torch.stack([u[2] @ v[0], u[2] @ v[3]]))
    false = torch.nn.functional.logsigmoid(-torch.stack([u[2] @ v[3], u[2] @ v[3]]))
    (-true.sum() - false.sum()).backward()
    for rows, values in zip(all_rows(model), (u, v), strict=True):
        assert values.grad is not None
        expected = (values - values.grad).detach()
        assert torch.allclose(rows, expected, atol=1e-6)


@pytest.mark.examples
@pytest.mark.usefixtures("one_thread")
def test_training_finds_the_topics(corpus: Corpus, device: str) -> None:
    stream = PairStream(corpus, batch=128, sample=0, epochs=8)
    model, optimizer, _ = ours(len(corpus.words), 16, device=device)
    held = stream.held_out_pairs()
    before = held_out_score(model, held)
    outcome = train(model, optimizer, stream)
    after = held_out_score(model, held)
    assert before is not None and before.auc == 0.5
    assert after is not None and after.auc > 0.7 and len(held) == after.pairs
    assert outcome.losses[-1] < 0.9 * outcome.losses[0]
    own = [i for i, word in enumerate(corpus.words) if word in TOPIC_OF]
    near = nearest_neighbours(model.vectors, corpus.words, own, number=3)
    right = [TOPIC_OF.get(other) == TOPIC_OF[word] for word in near for other in near[word]]
    assert sum(right) / len(right) > 0.9


def test_what_is_counted_is_what_was_done(corpus: Corpus) -> None:
    stream = PairStream(corpus, batch=128)
    model, optimizer, tables = ours(len(corpus.words), 4, memory="plain")
    outcome = train(model, optimizer, stream, unit="words")
    batches = list(stream.epoch(0))
    assert outcome.steps == len(batches) and outcome.examples == sum(map(len, batches))
    assert outcome.words == stream.words and outcome.finished
    # A record is a weight and two states of 4 float32.
    assert sum(table.nbytes for table in tables.values()) == 2 * len(corpus.words) * 3 * 4 * 4


def test_first_values_depend_on_the_seed_alone() -> None:
    (u, v), same, other = (all_rows(ours(9, 4, seed=seed).model) for seed in (1, 1, 2))
    assert torch.equal(u, same[0]) and not torch.equal(u, other[0])
    assert 0 < u.abs().max() <= 0.125 and not v.count_nonzero()


def test_the_learning_rate_falls_in_a_straight_line(corpus: Corpus) -> None:
    model, optimizer, _ = ours(len(corpus.words), 4, "SGD", 0.5)
    rates: list[float] = []

    def stop() -> bool:
        rates.append(optimizer.param_groups[0]["lr"])
        return False

    train(model, optimizer, PairStream(corpus, batch=64, steps=4), last_rate=0.01, stop=stop)
    assert rates == [0.5, 0.375, 0.25, 0.125]


def test_the_score_is_the_share_of_pairs_in_right_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word2vec, "_SCORED_AT_ONCE", 7)
    random = np.random.default_rng(0)
    # Small whole numbers make ties.
    u, v = (torch.from_numpy(random.integers(-1, 2, (9, 2))).float() for _ in SIDES)
    centre, context, shuffled = (random.integers(0, 9, 50) for _ in range(3))
    model = SkipGram(*map(nn.Embedding.from_pretrained, (u, v)))
    score = held_out_score(model, HeldOut(centre, context, shuffled))
    true, false = (u[centre] * v[context]).sum(1), (u[centre] * v[shuffled]).sum(1)
    above = (true[:, None] > false).float() + 0.5 * (true[:, None] == false).float()
    logs = [torch.nn.functional.logsigmoid(x.double()).mean() for x in (true, -false)]
    assert score is not None
    assert score.auc == pytest.approx(above.mean().item())
    assert score.log_likelihood == pytest.approx(sum(logs).item())


def test_neighbours_are_the_words_of_largest_cosine() -> None:
    u = torch.tensor([[1.0, 0.0], [9.0, 1.0], [0.0, 2.0], [-3.0, 0.0], [0.5, 0.4]])
    words = ("a", "b", "c", "d", "e")
    assert nearest_neighbours(u.__getitem__, words, [0, 2], number=2) == {
        "a": ["b", "e"],
        "c": ["e", "b"],
    }
    assert nearest_neighbours(u.__getitem__, words, [3]) == {"d": ["c", "e", "b", "a"]}
    assert nearest_neighbours(u.__getitem__, words, []) == {}


def test_content_words_are_long_frequent_and_crowded() -> None:
    even = ["with them " + ("rain rain rain" if i % 8 == 0 else "dry day") for i in range(64)]
    corpus = Corpus.from_passages(even, min_count=1)
    assert [corpus.words[i] for i in content_words(corpus, 5)] == ["rain"]
    short = Corpus.from_passages(["a b c a b"], min_count=1)
    assert content_words(short, 5) == []

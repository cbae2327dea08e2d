"""The skip-gram model on host tables: plain torch's numbers, and vectors that say something."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from conftest import NEEDS_GPU
from topics import TOPIC_OF, topic_passages
from torch import Tensor

import speedtorch
from speedtorch.demo import evaluate
from speedtorch.demo.corpus import Corpus
from speedtorch.demo.evaluate import content_words, held_out_score, nearest_neighbours
from speedtorch.demo.pairs import Batch, HeldOut, PairStream
from speedtorch.demo.plain import PlainTables
from speedtorch.demo.settings import make_optimizer, optimizer_names
from speedtorch.demo.skipgram import SIDES, HostTables, SkipGram
from speedtorch.demo.training import Outcome, train

REFUSED = ("Adafactor", "LBFGS", "Muon")


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus.from_passages(topic_passages(), min_count=1)


def trained_both_ways(
    corpus: Corpus, name: str, dim: int, device: str, memory: str
) -> tuple[HostTables, PlainTables, Outcome, Outcome]:
    stream = PairStream(corpus, batch=128, sample=0.05)
    make = partial(make_optimizer, name, None)
    model = SkipGram(dim, sparse=name == "SparseAdam", device=device)
    optimizer = make(model.parameters())
    host = HostTables(model, optimizer, len(corpus.words), memory=memory, seed=1)
    every = torch.arange(len(corpus.words))
    first = {side: host.rows(side, every) for side in SIDES}
    ours = train(model, optimizer, host, stream, steps=50)
    model = SkipGram(dim, sparse=name == "SparseAdam", device=device)
    plain = PlainTables(model, make, first)
    return host, plain, ours, train(model, plain.optimizer, plain, stream, steps=50)


@pytest.mark.parametrize("dim", [7, 32])
@pytest.mark.parametrize("name", [n for n in optimizer_names() if n not in REFUSED])
def test_host_tables_give_the_very_numbers_of_plain_torch(
    corpus: Corpus, name: str, dim: int
) -> None:
    host, plain, ours, theirs = trained_both_ways(corpus, name, dim, "cpu", "plain")
    every = torch.arange(len(corpus.words))
    for side in SIDES:
        assert torch.equal(host.rows(side, every), plain.rows(side, every))
    assert ours.losses == theirs.losses and len(ours.losses) == 2 and ours.steps == 50


@NEEDS_GPU
@pytest.mark.parametrize("memory", ["managed", "registered", "plain", "cuda"])
@pytest.mark.parametrize("name", ["Adamax", "SparseAdam", "Adagrad", "SGD"])
def test_on_a_gpu_the_score_is_that_of_plain_torch(corpus: Corpus, name: str, memory: str) -> None:
    host, plain, ours, theirs = trained_both_ways(corpus, name, 32, "cuda", memory)
    held = PairStream(corpus, batch=128, sample=0.05).held_out_pairs()
    one, other = held_out_score(host, held), held_out_score(plain, held)
    assert one is not None and other is not None
    assert one.auc == pytest.approx(other.auc, rel=0.01)
    assert one.log_likelihood == pytest.approx(other.log_likelihood, rel=0.01)
    assert ours.losses[-1] == pytest.approx(theirs.losses[-1], rel=0.01)


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_mix_rows_are_refused_by_name(name: str) -> None:
    model = SkipGram(4)
    with pytest.raises(ValueError, match=name):
        HostTables(model, make_optimizer(name, None, model.parameters()), 10)


def test_gradients_of_a_word_that_occurs_twice_add_up(device: str) -> None:
    ids = {"u_ids": torch.tensor([2]), "v_ids": torch.tensor([0, 3])}
    twice = Batch(
        **ids,
        centre=torch.tensor([0, 0]),
        context=torch.tensor([0, 1]),
        negative=torch.tensor([[1], [1]]),
        progress=1.0,
    ).to(torch.device(device))
    model = SkipGram(3, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    tables = HostTables(model, optimizer, 5)
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.randn(5, 3, generator=generator, requires_grad=True) for _ in SIDES)
    for side, values in zip(SIDES, (u, v), strict=True):
        tables.tables[side]["weight"].copy_(values.detach())
    tables.fetch(twice)
    model(twice.centre, twice.context, twice.negative).backward()
    optimizer.step()
    tables.store(twice)
    true = torch.nn.functional.logsigmoid(torch.stack([u[2] @ v[0], u[2] @ v[3]]))
    false = torch.nn.functional.logsigmoid(-torch.stack([u[2] @ v[3], u[2] @ v[3]]))
    (-true.sum() - false.sum()).backward()
    speedtorch.synchronize()
    for side, values in zip(SIDES, (u, v), strict=True):
        assert values.grad is not None
        expected = (values - values.grad).detach()
        assert torch.allclose(tables.rows(side, torch.arange(5)), expected, atol=1e-6)


def test_training_finds_the_topics(corpus: Corpus, device: str) -> None:
    stream = PairStream(corpus, batch=128, sample=0)
    model = SkipGram(16, device=device)
    optimizer = make_optimizer("Adamax", None, model.parameters())
    tables = HostTables(model, optimizer, len(corpus.words))
    held = stream.held_out_pairs()
    before = held_out_score(tables, held)
    outcome = train(model, optimizer, tables, stream, epochs=8)
    after = held_out_score(tables, held)
    assert before is not None and before.auc == 0.5
    assert after is not None and after.auc > 0.7 and len(held) == after.pairs
    assert outcome.losses[-1] < 0.9 * outcome.losses[0]
    own = [i for i, word in enumerate(corpus.words) if word in TOPIC_OF]
    vectors = partial(tables.rows, SIDES[0])
    near = nearest_neighbours(vectors, corpus.words, own, number=3)
    right = [TOPIC_OF.get(other) == TOPIC_OF[word] for word in near for other in near[word]]
    assert sum(right) / len(right) > 0.9


def test_what_is_counted_is_what_was_done(corpus: Corpus) -> None:
    stream = PairStream(corpus, batch=128)
    model = SkipGram(4)
    optimizer = make_optimizer("Adamax", None, model.parameters())
    tables = HostTables(model, optimizer, len(corpus.words), memory="plain")
    outcome = train(model, optimizer, tables, stream, epochs=1)
    batches = list(stream.epoch(0))
    rows = sum(len(b.u_ids) + len(b.v_ids) for b in batches)
    assert outcome.steps == len(batches) and outcome.pairs == sum(map(len, batches))
    assert outcome.words == stream.words and outcome.finished
    # A record is a weight and two states of 4 float32; it comes and it goes.
    assert outcome.exchanged_bytes == rows * 3 * 4 * 4 * 2
    assert tables.nbytes == 2 * len(corpus.words) * 3 * 4 * 4


def test_the_learning_rate_falls_in_a_straight_line(corpus: Corpus) -> None:
    model = SkipGram(4)
    optimizer = make_optimizer("SGD", 0.5, model.parameters())
    tables = HostTables(model, optimizer, len(corpus.words))
    rates: list[float] = []

    def stop() -> bool:
        rates.append(optimizer.param_groups[0]["lr"])
        return False

    train(model, optimizer, tables, PairStream(corpus, batch=64), steps=4, stop=stop)
    assert rates == [0.5, 0.375, 0.25, 0.125]


def test_training_needs_a_limit(corpus: Corpus) -> None:
    model = SkipGram(4)
    optimizer = make_optimizer("SGD", None, model.parameters())
    tables = HostTables(model, optimizer, len(corpus.words))
    with pytest.raises(ValueError, match="train needs a limit: epochs or steps"):
        train(model, optimizer, tables, PairStream(corpus))


def test_a_loss_beyond_all_numbers_ends_training_with_advice(corpus: Corpus) -> None:
    model = SkipGram(4)
    optimizer = make_optimizer("SGD", 1e30, model.parameters())
    tables = HostTables(model, optimizer, len(corpus.words))
    with pytest.raises(ValueError, match=r"the loss is (nan|inf) .*a learning rate below 1e\+30"):
        train(model, optimizer, tables, PairStream(corpus, batch=64), epochs=1)


class FixedTables:
    """Tables of given rows."""

    def __init__(self, u: Tensor, v: Tensor) -> None:
        self.full = dict(zip(SIDES, (u, v), strict=True))

    def rows(self, side: str, ids: Tensor) -> Tensor:
        return self.full[side][ids]

    def fetch(self, batch: Batch) -> None:
        raise NotImplementedError

    def store(self, batch: Batch) -> None:
        raise NotImplementedError


def test_the_score_is_the_share_of_pairs_in_right_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "_BLOCK_ROWS", 7)
    random = np.random.default_rng(0)
    # Small whole numbers make ties.
    u, v = (torch.from_numpy(random.integers(-1, 2, (9, 2))).float() for _ in SIDES)
    centre, context, shuffled = (random.integers(0, 9, 50) for _ in range(3))
    score = held_out_score(FixedTables(u, v), HeldOut(centre, context, shuffled))
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

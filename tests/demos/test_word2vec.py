"""word2vec: gradients, vectors that say something, and the demo as a user runs it."""

from __future__ import annotations

import gzip
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from demo_commands import demo_file, facts, run_demo
from topics import TOPIC_OF, topic_passages
from torch import nn

import speedtorch
from demos import report, word2vec
from demos.corpus import Corpus
from demos.loop import train
from demos.pairs import Batch, HeldOut, PairStream
from demos.plain import RowOptimizer
from demos.settings import make_optimizer
from demos.word2vec import SIDES, SkipGram, held_out_score
from demos.word_vectors import content_words, nearest_neighbours


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


# ------------------------------------------------------------------------------------------------
# The command


def test_gensim_loads_the_text(tmp_path: Path) -> None:
    models = pytest.importorskip("gensim.models", reason="gensim is not installed")
    assert run_demo("word2vec", tmp_path) == 0
    loaded = models.KeyedVectors.load_word2vec_format(str(tmp_path / "vectors.txt"))
    assert np.array_equal(loaded.vectors, np.load(tmp_path / "vectors.npy"))


def test_without_held_out_text_there_is_no_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo("word2vec", tmp_path, "--held-out", "0", "--compare") == 0
    printed = capsys.readouterr().out
    assert "AUC" not in printed and "bitwise identical" in printed
    assert facts(tmp_path)["after"] is None


def test_a_gzip_corpus_gives_the_same_vectors_as_a_plain_one(tmp_path: Path) -> None:
    zipped = tmp_path / "topics.txt.gz"
    zipped.write_bytes(gzip.compress(demo_file("word2vec").read_bytes()))
    assert run_demo("word2vec", tmp_path / "plain") == 0
    assert run_demo("word2vec", tmp_path / "zipped", "--corpus", str(zipped)) == 0
    one, other = (tmp_path / name / "vectors.npy" for name in ("plain", "zipped"))
    assert one.read_bytes() == other.read_bytes()


def test_a_missing_gpu_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_demo("word2vec", tmp_path, device="cuda") == 2
    assert "device cuda cannot be used: torch sees no GPU" in capsys.readouterr().err


def test_peak_host_memory_is_unknown_where_nobody_counts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (report.peak_host_bytes() or 0) > 1_000_000
    monkeypatch.setitem(sys.modules, "resource", None)
    assert report.peak_host_bytes() is None

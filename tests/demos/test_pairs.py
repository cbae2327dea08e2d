"""Batches of skip-gram pairs: the right pairs, nothing held out, repeatable."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest
import torch

from demos import pairs as pairs_module
from demos.corpus import Corpus
from demos.pairs import Batch, PairStream


def random_corpus(words: int = 40, length: int = 2000, passages: int = 20) -> Corpus:
    random = np.random.default_rng(3)
    names = [f"w{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(words)]
    text = [names[int(i)] for i in (words * random.random(length) ** 2)]
    size = length // passages
    parts = [" ".join(text[i : i + size]) for i in range(0, length, size)]
    return Corpus.from_passages(parts, min_count=1)


def numbered_corpus(length: int) -> Corpus:
    """Every word once, so that a word's id is its place in the text."""
    letters = map("".join, itertools.product("abcdefghij", repeat=4))
    return Corpus.from_passages([" ".join(itertools.islice(letters, length))], min_count=1)


def pairs_of(batches: Iterable[Batch]) -> list[tuple[int, int]]:
    found = []
    for batch in batches:
        found += list(zip(batch.centre.tolist(), batch.context.tolist(), strict=True))
    return found


def same(one: Batch, other: Batch) -> bool:
    names = ("centre", "context", "negative")
    equal = all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)
    return equal and one.progress == other.progress


def test_an_epoch_holds_each_word_with_its_neighbours_in_the_passage() -> None:
    corpus = random_corpus()
    stream = PairStream(corpus, window=1, batch=100, sample=0, held_out=0)
    expected: Counter[tuple[int, int]] = Counter()
    for i in range(len(corpus) - 1):
        left, right = int(corpus.tokens[i]), int(corpus.tokens[i + 1])
        if corpus.passage[i] == corpus.passage[i + 1] and left != right:
            expected.update([(left, right), (right, left)])
    assert Counter(pairs_of(stream.epoch(0))) == expected


def test_no_pair_is_further_apart_than_the_window() -> None:
    stream = PairStream(numbered_corpus(500), window=4, batch=64, sample=0, held_out=0)
    distances = Counter(abs(one - other) for one, other in pairs_of(stream.epoch(0)))
    assert set(distances) == {1, 2, 3, 4}
    # A reach of 1 to 4 with equal chance: distance d is seen in (5 - d) of 4 cases.
    for distance, count in distances.items():
        assert count == pytest.approx(1000 * (5 - distance) / 4, rel=0.1)


def test_batches_have_the_requested_size_and_the_last_one_the_rest() -> None:
    batches = list(PairStream(random_corpus(), batch=64, negatives=3).epoch(0))
    sizes = [len(batch) for batch in batches]
    assert set(sizes[:-1]) == {64} and 0 < sizes[-1] <= 64
    assert [batch.negative.shape for batch in batches] == [(size, 3) for size in sizes]


def test_the_same_seed_yields_the_same_batches() -> None:
    one, other = (PairStream(random_corpus(), batch=64, seed=5, epochs=2) for _ in range(2))
    for left, right in zip(one, other, strict=True):
        assert same(left, right)


@pytest.mark.parametrize("what", ["seed", "epoch"])
def test_another_seed_or_epoch_yields_different_batches(what: str) -> None:
    stream = PairStream(random_corpus(), batch=64, seed=5)
    other = PairStream(random_corpus(), batch=64, seed=6) if what == "seed" else stream
    assert not same(next(stream.epoch(0)), next(other.epoch(1 if what == "epoch" else 0)))


def test_held_out_words_are_never_trained_on_and_pairs_do_not_reach_over_them() -> None:
    corpus = numbered_corpus(3000)
    stream = PairStream(corpus, window=5, sample=0, held_out=0.3, batch=512, epochs=4)
    trained = pairs_of(stream)
    held = stream.held_out_pairs()
    words_trained = {word for pair in trained for word in pair}
    words_held = {*held.centre.tolist(), *held.context.tolist()}
    assert words_held and not words_trained & words_held
    assert max(abs(a - b) for a, b in trained) == 5
    assert np.abs(held.centre - held.context).max() == 5
    assert stream.words + len(words_held) == len(corpus)


def test_false_pairs_are_the_true_contexts_in_another_order() -> None:
    held = PairStream(random_corpus(), held_out=0.5).held_out_pairs()
    assert len(held) > 100
    assert not np.array_equal(held.shuffled, held.context)
    assert np.array_equal(np.sort(held.shuffled), np.sort(held.context))


def test_held_out_pairs_are_limited_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs_module, "_HELD_OUT_LIMIT", 10)
    assert len(PairStream(random_corpus(), held_out=0.5).held_out_pairs()) == 10


def test_without_held_out_text_there_are_no_pairs_to_score() -> None:
    assert len(PairStream(random_corpus(), held_out=0).held_out_pairs()) == 0


def test_frequent_words_are_dropped_and_rare_ones_kept() -> None:
    corpus = random_corpus()
    stream = PairStream(corpus, window=1, sample=1e-2, held_out=0, epochs=20)
    seen = Counter(pair[0] for pair in pairs_of(stream))
    share = corpus.counts / corpus.counts.sum()
    keep = np.minimum(1, np.sqrt(1e-2 / share) + 1e-2 / share)
    kept = np.array([seen[i] for i in range(len(corpus.words))]) / (corpus.counts * 2 * 20)
    assert keep[0] < 0.6 and keep[-1] == 1.0
    assert kept[0] / kept[-10:].mean() == pytest.approx(keep[0], rel=0.15)


def test_negatives_follow_the_frequencies_to_the_power_of_three_quarters() -> None:
    corpus = random_corpus()
    stream = PairStream(corpus, negatives=20, batch=1000, epochs=3)
    drawn = torch.cat([b.negative.flatten() for b in stream])
    found = np.bincount(drawn.numpy(), minlength=len(corpus.words)) / len(drawn)
    expected = corpus.counts**0.75 / (corpus.counts**0.75).sum()
    assert np.abs(found - expected).max() < 0.004


def test_a_long_text_is_worked_through_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = numbered_corpus(2000)
    monkeypatch.setattr(pairs_module, "_BLOCK_TOKENS", 300)
    stream = PairStream(corpus, window=1, sample=0, held_out=0, batch=50)
    batches = list(stream.epoch(1))
    # Only the pairs over the six edges between blocks are lost.
    assert len(pairs_of(batches)) == 2 * (1999 - 6)
    progress = [batch.progress for batch in batches]
    assert progress == sorted(progress) and progress[-1] == 2.0 and progress[0] > 1.0


def test_batches_end_at_the_limit_of_steps_or_epochs() -> None:
    per_epoch = len(list(PairStream(random_corpus(), batch=64)))
    for steps in (3, per_epoch + 1):
        assert len(list(PairStream(random_corpus(), batch=64, steps=steps))) == steps
    assert list(PairStream(random_corpus(), batch=64, epochs=2))[-1].progress == 2.0


def test_a_batch_moves_to_a_device_as_it_is(device: str) -> None:
    batch = next(PairStream(random_corpus(), batch=64).epoch(0))
    moved = batch.to(torch.device(device))
    assert moved.negative.device.type == device and len(moved) == 64
    assert same(moved.to(torch.device("cpu")), batch)

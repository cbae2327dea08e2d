"""Counts of word pairs: those of a slow literal count, however the text is cut into blocks."""

from __future__ import annotations

import sys
from collections import defaultdict

import numpy as np
import pytest
from topics import topic_passages

from demos import cooccurrence
from demos.cooccurrence import Cooccurrence, count_cooccurrence
from demos.corpus import Corpus

TEXTS = {
    "one pair": ["a b"],
    "a word near itself": ["a a b a a"],
    "passages": ["a b c d", "d c", "b", "a b c d e f g a b c"],
    "a passage of one word first": ["a", "b c b"],
}


def counted_literally(corpus: Corpus, window: int) -> dict[tuple[int, int], float]:
    """Every ordered pair of places, one by one."""
    found: dict[tuple[int, int], float] = defaultdict(float)
    places = range(len(corpus))
    for one in places:
        for other in places:
            near = 1 <= abs(one - other) <= window
            if near and corpus.passage[one] == corpus.passage[other]:
                pair = (int(corpus.tokens[one]), int(corpus.tokens[other]))
                found[pair] += 1 / abs(one - other)
    return found


def as_dict(found: Cooccurrence) -> dict[tuple[int, int], float]:
    pairs = list(zip(found.rows.tolist(), found.columns.tolist(), strict=True))
    assert pairs == sorted(set(pairs))
    return dict(zip(pairs, found.counts.tolist(), strict=True))


def check(corpus: Corpus, window: int) -> None:
    found = count_cooccurrence(corpus, window=window)
    assert found.rows.dtype == found.columns.dtype == np.int64
    assert found.counts.dtype == np.float32 and len(found) == len(found.counts)
    assert as_dict(found) == pytest.approx(counted_literally(corpus, window), rel=1e-6)


@pytest.mark.parametrize("window", [1, 2, 3, 10, 10**12])
@pytest.mark.parametrize("name", TEXTS)
def test_counts_are_those_of_a_literal_count(name: str, window: int) -> None:
    check(Corpus.from_passages(TEXTS[name], min_count=1), window)


@pytest.mark.parametrize("pairs", [1, 7, 100, 2000])
def test_blocks_do_not_change_the_counts(monkeypatch: pytest.MonkeyPatch, pairs: int) -> None:
    corpus = Corpus.from_passages(topic_passages()[:20], min_count=1)
    whole = count_cooccurrence(corpus, window=4)
    monkeypatch.setattr(cooccurrence, "_BLOCK_PAIRS", pairs)
    check(corpus, 4)
    assert as_dict(count_cooccurrence(corpus, window=4)) == pytest.approx(as_dict(whole), rel=1e-6)


def test_dropped_words_take_no_place() -> None:
    corpus = Corpus.from_passages(["a x b a y b"], min_count=2)
    assert as_dict(count_cooccurrence(corpus, window=1)) == {(0, 1): 3.0, (1, 0): 3.0}


def test_counts_are_symmetric() -> None:
    corpus = Corpus.from_passages(topic_passages(), min_count=1)
    found = as_dict(count_cooccurrence(corpus, window=5))
    assert all(found[column, row] == count for (row, column), count in found.items())


def test_on_a_terminal_a_bar_goes_through_all_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = Corpus.from_passages(topic_passages(), min_count=1)
    count_cooccurrence(corpus, label="counting")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    count_cooccurrence(corpus, label="counting")
    assert "counting: 100%" in capsys.readouterr().err

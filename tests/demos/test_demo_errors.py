"""Every value and file that the demonstrations refuse, and its error."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from test_commands import REFUSED
from test_dlrm import LINE
from test_pairs import random_corpus
from test_ranking import ITEMS, SPLIT
from test_word2vec import ours

from demos.cooccurrence import Cooccurrence, PairBatches, count_cooccurrence
from demos.corpus import Corpus, builtin_passages, file_passages
from demos.criteo import read_clicks
from demos.glove import GloVe
from demos.loop import train
from demos.pairs import PairStream
from demos.ranking import BatchStream, Candidates
from demos.ratings import Ratings, generated_ratings, leave_one_out, read_ratings

TEXT = b"The red fox.\n" * 50
PAIRS = Cooccurrence(np.array([2, 0]), np.array([1, 0]), np.array([40, 2.5], np.float32))
NO_PAIRS = Cooccurrence(*(np.zeros(0, np.int64) for _ in range(2)), np.zeros(0, np.float32))
ALONE = Corpus.from_passages(["a", "b"], min_count=1)
LONELY = Corpus.from_passages(["red", "green", "red", "green"], min_count=1)
CORPUS = random_corpus()
FEW = Ratings.from_columns([0, 0, 1], [0, 1, 2], range(3))


def train_too_fast() -> None:
    model, optimizer, _ = ours(len(CORPUS.words), 4, "SGD", 1e30)
    train(model, optimizer, PairStream(CORPUS, batch=64))


def flipped(content: bytes) -> bytes:
    return content[:12] + bytes(8) + content[20:]


FILES = {
    "header.gz": gzip.compress(TEXT)[:20],
    "end.gz": gzip.compress(TEXT)[:-1],
    "flipped.gz": flipped(gzip.compress(TEXT)),
    "ratings.gz": gzip.compress(b"1\t2\t3\t4\n" * 100)[:-9],
    "clicks.gz": gzip.compress((LINE + "\n").encode() * 100)[:-9],
    "empty.txt": b"\n",
}
LIMITS = "users must be at least 1 and per_user from 10 to"
TWO_WORDS = r"must have 2 words that .* Choose a longer text"
CASES: list[tuple[Callable[[], object], str]] = [
    (lambda: GloVe(5, 2, x_max=0), "x_max must be above 0, got 0"),
    (lambda: GloVe(5, 2, alpha=-1), "alpha must be 0 or more, got -1"),
    (lambda: PairBatches(PAIRS, batch=0), "batch must be at least 1, got 0"),
    (lambda: PairBatches(PAIRS, epochs=0), "epochs must be at least 1, got 0"),
    (lambda: PairBatches(PAIRS, steps=0), "steps must be at least 1, got 0"),
    (lambda: PairBatches(PAIRS, seed=-1), "seed must be 0 or more, got -1"),
    (lambda: PairBatches(NO_PAIRS), "examples must be at least 1, got 0"),
    (lambda: PairStream(CORPUS, window=0), "window must be at least 1, got 0"),
    (lambda: PairStream(CORPUS, negatives=-1), "negatives must be at least 1, got -1"),
    (lambda: PairStream(CORPUS, batch=0), "batch must be at least 1, got 0"),
    (lambda: PairStream(CORPUS, sample=-0.5), "sample must be 0 or more, got -0.5"),
    (lambda: PairStream(CORPUS, held_out=1.0), "held_out must be at least 0 and .* 1, got 1.0"),
    (lambda: PairStream(CORPUS, seed=-1), "seed must be 0 or more, got -1"),
    (
        lambda: next(iter(PairStream(LONELY, sample=0, held_out=0, steps=1))),
        r"no pairs to train on \(4 words of 4 in training\)",
    ),
    (lambda: BatchStream(SPLIT, ITEMS, batch=0), "batch must be at least 1, got 0"),
    (lambda: BatchStream(SPLIT, ITEMS, negatives=0), "negatives must be at least 1, got 0"),
    (lambda: BatchStream(SPLIT, ITEMS, seed=-1), "seed must be 0 or more, got -1"),
    (
        lambda: Candidates.draw(FEW, leave_one_out(FEW)),
        "requires a user.* 1 users with 2.* and 3 items",
    ),
    (lambda: generated_ratings(users=0), LIMITS),
    (lambda: generated_ratings(items=50), LIMITS),
    (lambda: generated_ratings(per_user=9), LIMITS),
    (lambda: count_cooccurrence(ALONE, window=0), "window must be at least 1, got 0"),
    (lambda: count_cooccurrence(ALONE), "the text must contain two words in one passage"),
    (lambda: Corpus.from_passages(["a b"], min_count=0), "min_count must be at least 1, got 0"),
    (lambda: Corpus.from_passages([""], min_count=2), TWO_WORDS),
    (lambda: Corpus.from_passages(["a a a"], min_count=2), TWO_WORDS),
    (lambda: Corpus.from_passages(["a a b"], min_count=2), TWO_WORDS),
    (lambda: list(builtin_passages(Path())), r"no documentation in this Python .*--corpus"),
    (lambda: list(file_passages(Path("header.gz"))), r"header\.gz is a damaged gzip file"),
    (lambda: list(file_passages(Path("end.gz"))), r"end\.gz is a damaged gzip file"),
    (lambda: list(file_passages(Path("flipped.gz"))), r"flipped\.gz is a damaged gzip file"),
    (lambda: read_clicks(Path("clicks.gz")), r"clicks\.gz is a damaged gzip file"),
    (lambda: read_clicks(Path("empty.txt")), "the file has no lines"),
    (lambda: read_ratings(Path("ratings.gz")), r"ratings\.gz is a damaged gzip file"),
    (train_too_fast, r"finite, got (nan|inf) .*a learning rate below 1e\+30"),
    *((lambda name=name: ours(10, 4, name), name) for name in REFUSED),
]


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize(("call", "message"), CASES)
def test_what_does_not_fit_raises(call: Callable[[], object], message: str) -> None:
    for name, content in FILES.items():
        Path(name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.usefixtures("own_folder")
def test_a_missing_file_is_an_error() -> None:
    with pytest.raises(FileNotFoundError, match="none.txt"):
        list(file_passages(Path("none.txt")))

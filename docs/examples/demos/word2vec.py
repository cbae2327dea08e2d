"""`speedtorch demo word2vec`: settings, training, comparison with plain torch, report and files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from demos import report
from demos.comparison import compare_with_plain
from demos.corpus import Corpus
from demos.evaluate import (
    content_words,
    held_out_score,
    nearest_neighbours,
    row_blocks,
)
from demos.pairs import PairStream
from demos.plain import RowOptimizer
from demos.session import DIFFERENT, STOPPED, choose_device, ended, interrupt, make_folder
from demos.settings import StoredSettings, make_optimizer, option, optional_count
from demos.skipgram import SIDES, SkipGram, first_values, train
from speedtorch.nn.embedding import Embedding
from speedtorch.optim.attach import attach

__all__ = ["ABOUT", "DIFFERENT", "HELP", "STOPPED", "Settings", "run"]

HELP = "word vectors from real text, with the tables in host memory"
ABOUT = (
    "Skip-gram with negative sampling. Two speedtorch.Embedding modules keep word vectors and "
    "their optimizer state in host memory and prefetch the rows of the next batch during a step."
)
_NEIGHBOURS_OF = 8


@dataclass(frozen=True, kw_only=True)
class Settings(StoredSettings):
    """All settings of a run, each with an option of the command line."""

    corpus: Path | None = option(None, "text to train on, plain or gzip", type=Path, metavar="FILE")
    out: Path = option(Path("word2vec"), "folder for the results", metavar="FOLDER")
    optimizer: str = option("Adamax", "any of torch.optim", metavar="NAME")
    lr: float | None = option(None, "initial learning rate, which falls to a hundredth", type=float)
    dim: int = option(100, "numbers per word")
    epochs: int = option(6, "passes over the text")
    steps: int | None = optional_count("batches to train on, instead of --epochs")
    batch: int = option(4096, "pairs per batch")
    window: int = option(5, "maximum distance of a context word")
    negatives: int = option(5, "per pair")
    min_count: int = option(10, "drop rarer words")
    sample: float = option(1e-3, "drop words that are more frequent at random")
    held_out: float = option(0.05, "share of the text for the score only")
    compare: bool = option(
        False, "also train in plain torch and compare the results", action="store_true"
    )


def run(settings: Settings) -> int:
    """Trains, saves the vectors and prints a report.

    Returns the exit status: 0, DIFFERENT if the comparison found a difference, or STOPPED if Ctrl-C
    ended the training early. After Ctrl-C, the results so far are saved and reported.
    """
    if settings.compare:
        settings.check_comparable()
    prepared = _Run(settings)
    with interrupt() as stop:
        facts = prepared.train(stop)
        if status := ended(facts["training"]["finished"]):
            return status
        if not settings.compare:
            return 0
        if not prepared.compare(facts, stop):
            print("stopped    by Ctrl-C before the comparison was complete; the vectors are saved")
            return STOPPED
    return 0 if facts["plain_torch"]["same"] else DIFFERENT


class _Run:
    """A text, a model and its attached optimizer."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.device = choose_device(settings)
        self.corpus = Corpus.read(settings.corpus, min_count=settings.min_count)
        self.words = len(self.corpus.words)
        self.stream = PairStream(
            self.corpus,
            window=settings.window,
            negatives=settings.negatives,
            batch=settings.batch,
            sample=settings.sample,
            held_out=settings.held_out,
            seed=settings.seed,
        )
        self.make_optimizer = partial(make_optimizer, settings.optimizer, settings.lr)
        u, v = self.embeddings = [
            Embedding(
                self.words,
                settings.dim,
                device=self.device,
                memory=settings.memory,
                **settings.stored_as(),
            )
            for _ in SIDES
        ]
        self.model = SkipGram(u, v)
        self.optimizer = self.make_optimizer(self.model.parameters())
        attach(self.optimizer, self.model)
        first_values(u, v, seed=settings.seed)
        self.vectors = partial(self.model.rows, SIDES[0])
        all_ids = torch.arange(self.words)
        self.first: list[Tensor] = []
        if settings.compare:
            self.first = [self.model.rows(side, all_ids) for side in SIDES]
        self.how: dict[str, Any] = {"epochs": settings.epochs, "steps": settings.steps}
        make_folder(settings.out)
        print(f"text       {self.corpus}", flush=True)

    def train(self, stop: Callable[[], bool]) -> dict[str, Any]:
        """Trains with the tables in host memory; saves, prints and returns the results."""
        self.held = self.stream.held_out_pairs()
        before = held_out_score(self.model, self.held)
        report.reset_gpu_peak(self.device)
        how = {"stop": stop, "label": "training", **self.how}
        self.outcome = train(self.model, self.optimizer, self.stream, **how)
        self.score = held_out_score(self.model, self.held)
        chosen = content_words(self.corpus, _NEIGHBOURS_OF)
        facts = {
            **report.run_facts(self.settings, self.device, self.embeddings, self.outcome),
            "held_out_before": asdict(before) if before else None,
            "held_out": asdict(self.score) if self.score else None,
            "neighbours": nearest_neighbours(self.vectors, self.corpus.words, chosen),
        }
        lines = report.training_lines(facts, "words", "pairs", per=" per pair")
        lines += report.memory_lines(facts)
        if before and self.score:
            lines.append(
                f"held out   AUC {before.auc:.4f} before training, {self.score.auc:.4f} after it"
                f" (by chance 0.5), on {self.score.pairs:,} held-out pairs"
            )
        report.print_report(facts, self.save(facts), lines)
        return facts

    def save(self, facts: dict[str, Any]) -> list[Path]:
        """Writes the vectors and the report; see report.save_results."""
        return report.save_results(self.settings.out, self.vectors, self.corpus.words, facts)

    def compare(self, facts: dict[str, Any], stop: Callable[[], bool]) -> bool:
        """Trains in plain torch and adds the comparison to `facts`; False if stopped early."""
        sparse = self.settings.optimizer == "SparseAdam"  # SparseAdam requires sparse gradients
        report.reset_gpu_peak(self.device)
        size = (self.words, self.settings.dim)
        u, v = (nn.Embedding(*size, _weight=rows, sparse=sparse) for rows in self.first)
        plain = SkipGram(u, v).to(self.device)
        optimizer = RowOptimizer(plain, self.make_optimizer)
        how = {"ahead": False, "stop": stop, "label": "plain torch", **self.how}
        outcome = train(plain, optimizer, self.stream, **how)
        if not outcome.finished:
            return False
        score = held_out_score(plain, self.held)
        figures = {"loss": (self.outcome.losses[-1], outcome.losses[-1])}
        if self.score and score:
            figures["auc"] = (self.score.auc, score.auc)
            figures["log_likelihood"] = (self.score.log_likelihood, score.log_likelihood)
        rows = chain.from_iterable(self.rows_beside(plain, side) for side in SIDES)
        facts["plain_torch"] = compare_with_plain(self.device, rows, figures, outcome.seconds)
        self.save(facts)
        return True

    def rows_beside(self, plain: SkipGram, side: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of blocks of all vectors of a side: of this model, and of plain torch."""
        ours, theirs = (partial(model.rows, side) for model in (self.model, plain))
        return zip(row_blocks(ours, self.words), row_blocks(theirs, self.words), strict=True)

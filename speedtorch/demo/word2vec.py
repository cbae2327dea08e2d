"""word2vec on real text, with both tables and their optimizer state in host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from speedtorch.demo import report
from speedtorch.demo.corpus import Corpus
from speedtorch.demo.evaluate import (
    Score,
    content_words,
    held_out_score,
    nearest_neighbours,
    row_blocks,
)
from speedtorch.demo.pairs import PairStream
from speedtorch.demo.plain import RowOptimizer
from speedtorch.demo.session import STOPPED, choose_device, ended, interrupt, make_folder
from speedtorch.demo.settings import RunSettings, make_optimizer, option, optional_count
from speedtorch.demo.skipgram import SIDES, Outcome, SkipGram, first_values, train
from speedtorch.nn.embedding import Embedding
from speedtorch.optim.attach import attach

__all__ = ["ABOUT", "DIFFERENT", "HELP", "STOPPED", "Settings", "run"]

HELP = "word vectors from real text, with the tables in host memory"
ABOUT = (
    "Skip-gram with negative sampling. Word vectors and their optimizer state are kept in host "
    "memory by two speedtorch.Embedding; the rows of the next batch travel while the current one "
    "is trained."
)
DIFFERENT = 1  # an exit status
_NEIGHBOURS_OF = 8
# How far a figure may be from plain torch's on a GPU, where sums are formed in any order.
_GPU_TOLERANCE = 0.01


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """All choices of a run; the command line has one option for each."""

    corpus: Path | None = option(None, "text to train on, plain or gzip", type=Path, metavar="FILE")
    out: Path = option(Path("word2vec"), "folder for the results", metavar="FOLDER")
    optimizer: str = option("Adamax", "any of torch.optim", metavar="NAME")
    lr: float | None = option(
        None, "learning rate at the start; falls to a hundredth of it", type=float
    )
    dim: int = option(100, "numbers per word")
    epochs: int = option(6, "passes over the text")
    steps: int | None = optional_count("batches to train on, instead of --epochs")
    batch: int = option(4096, "pairs per batch")
    window: int = option(5, "the furthest distance of a context word")
    negatives: int = option(5, "per pair")
    min_count: int = option(10, "drop rarer words")
    sample: float = option(1e-3, "drop frequent words above")
    held_out: float = option(0.05, "share of the text that only the score sees")
    compare: bool = option(
        False, "train the same in plain torch afterwards, and compare", action="store_true"
    )


def run(settings: Settings) -> int:
    """Trains, saves the vectors and prints a report.

    Gives an exit status: 0; DIFFERENT if a comparison found a difference; STOPPED if Ctrl-C ended
    the training early, after which everything is saved and told as usual.
    """
    prepared = _Run(settings)
    with interrupt() as stop:
        facts = prepared.train(stop)
        if status := ended(facts["training"]["finished"]):
            return status
        if not settings.compare:
            return 0
        if not prepared.compare(facts, stop):
            print("stopped    by Ctrl-C before the comparison was done; the vectors are saved")
            return STOPPED
    return 0 if facts["plain_torch"]["same"] else DIFFERENT


class _Run:
    """A text, a model and its optimizer, ready to train."""

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
            Embedding(self.words, settings.dim, device=self.device, memory=settings.memory)
            for _ in SIDES
        ]
        self.model = SkipGram(u, v)
        self.optimizer = self.make_optimizer(self.model.parameters())
        attach(self.optimizer, self.model)
        first_values(u, v, seed=settings.seed)
        self.vectors = partial(self.model.rows, SIDES[0])
        every = torch.arange(self.words)
        self.first: list[Tensor] = []
        if settings.compare:
            self.first = [self.model.rows(side, every) for side in SIDES]
        self.how: dict[str, Any] = {"epochs": settings.epochs, "steps": settings.steps}
        make_folder(settings.out)
        print(f"text       {self.corpus}", flush=True)

    def train(self, stop: Callable[[], bool]) -> dict[str, Any]:
        """Trains with the tables in host memory; tells and saves the results, and returns them."""
        report.forget_gpu_peak(self.device)
        how = {"stop": stop, "label": "training", **self.how}
        self.outcome = train(self.model, self.optimizer, self.stream, **how)
        self.held = self.stream.held_out_pairs()
        self.score = held_out_score(self.model, self.held)
        chosen = content_words(self.corpus, _NEIGHBOURS_OF)
        facts = {
            **report.run_facts(self.settings, self.device, self.embeddings, self.outcome),
            "held_out": asdict(self.score) if self.score else None,
            "neighbours": nearest_neighbours(self.vectors, self.corpus.words, chosen),
        }
        lines = report.training_lines(facts, "words", "pairs", each=" per pair")
        lines += report.memory_lines(facts)
        if self.score:
            lines.append(
                f"held out   AUC {self.score.auc:.4f}, log-likelihood"
                f" {self.score.log_likelihood:.4f} on {self.score.pairs:,} pairs kept out of"
                " training"
            )
        report.print_report(facts, self.save(facts), lines)
        return facts

    def save(self, facts: dict[str, Any]) -> list[Path]:
        return report.save_results(self.settings.out, self.vectors, self.corpus.words, facts)

    def compare(self, facts: dict[str, Any], stop: Callable[[], bool]) -> bool:
        """Trains the same in plain torch and adds the comparison to `facts`; False if stopped."""
        sparse = self.settings.optimizer == "SparseAdam"  # It refuses dense gradients.
        report.forget_gpu_peak(self.device)
        size = (self.words, self.settings.dim)
        u, v = (nn.Embedding(*size, _weight=rows, sparse=sparse) for rows in self.first)
        plain = SkipGram(u, v).to(self.device)
        optimizer = RowOptimizer(plain, self.make_optimizer)
        how = {"ahead": False, "stop": stop, "label": "plain torch", **self.how}
        outcome = train(plain, optimizer, self.stream, **how)
        if not outcome.finished:
            return False
        ours = (self.model, self.outcome, self.score)
        theirs = (plain, outcome, held_out_score(plain, self.held))
        facts["plain_torch"] = _compared(self.device, self.words, ours, theirs)
        self.save(facts)
        return True


_Trained = tuple[SkipGram, Outcome, Score | None]


def _compared(
    device: torch.device,
    words: int,
    ours: _Trained,
    theirs: _Trained,
) -> dict[str, Any]:
    """Compares a run with the same one in plain torch, and prints what came out.

    `same`: on the CPU, whether all rows of both tables are equal bit for bit; on a GPU, whether
    scores and last loss are within 1 %. `farthest` is the largest difference of two numbers in the
    tables; the other figures are plain torch's.
    """
    identical, farthest = True, 0.0
    for side in SIDES:
        one_side, other_side = (partial(run[0].rows, side) for run in (ours, theirs))
        blocks = zip(row_blocks(one_side, words), row_blocks(other_side, words), strict=True)
        for one, other in blocks:
            identical &= torch.equal(one.view(torch.int32), other.view(torch.int32))
            farthest = max(farthest, (one - other).abs().max().item())
    figures = {"loss": (ours[1].losses[-1], theirs[1].losses[-1])}
    if ours[2] and theirs[2]:
        figures["auc"] = (ours[2].auc, theirs[2].auc)
        figures["log_likelihood"] = (ours[2].log_likelihood, theirs[2].log_likelihood)
    near = all(abs(one - other) <= _GPU_TOLERANCE * abs(other) for one, other in figures.values())
    same = identical if device.type == "cpu" else near
    told = ", ".join(
        f"{name.replace('_', '-')} {other:.4f}" for name, (_, other) in figures.items()
    )
    print(
        f"plain      torch on full-size tensors: {theirs[1].seconds:.1f} s, {told}"
        + (
            ""
            if device.type == "cpu"
            else f", peak {report.size_text(report.peak_gpu_bytes(device))} on the GPU"
        )
        + "\nagreement  "
        + ("bit for bit" if identical else f"numbers differ by {farthest:.2g} at most")
        + ("" if same else ": MORE THAN THEY SHOULD"),
        flush=True,
    )
    return {
        "same": same,
        "identical": identical,
        "farthest": farthest,
        "seconds": theirs[1].seconds,
        "peak_gpu_bytes": report.peak_gpu_bytes(device),
        **{name: other for name, (_, other) in figures.items()},
    }

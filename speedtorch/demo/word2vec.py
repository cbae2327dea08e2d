"""word2vec on real text, with both tables and their optimizer state in host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from speedtorch.demo.corpus import Corpus, builtin_passages, file_passages
from speedtorch.demo.evaluate import content_words, held_out_score, nearest_neighbours
from speedtorch.demo.pairs import PairStream
from speedtorch.demo.plain import RowOptimizer
from speedtorch.demo.report import (
    compare,
    print_report,
    run_facts,
    save_results,
)
from speedtorch.demo.session import (
    STOPPED,
    check_memory,
    check_seed,
    choose_device,
    interrupt,
    make_folder,
)
from speedtorch.demo.settings import Settings, add_arguments, make_optimizer
from speedtorch.demo.skipgram import SIDES, SkipGram, first_values
from speedtorch.demo.training import train
from speedtorch.nn.embedding import Embedding
from speedtorch.optim.attach import attach

__all__ = ["ABOUT", "DIFFERENT", "HELP", "STOPPED", "Settings", "add_arguments", "run"]

HELP = "word vectors from real text, with the tables in host memory"
ABOUT = (
    "Skip-gram with negative sampling. Word vectors and their optimizer state are kept in host "
    "memory by two speedtorch.Embedding; the rows of the next batch travel while the current one "
    "is trained."
)
DIFFERENT = 1  # an exit status
_NEIGHBOURS_OF = 8


def run(settings: Settings) -> int:
    """Trains, saves the vectors and prints a report.

    Args:
        settings: what to do.

    Returns:
        An exit status: 0; DIFFERENT if a comparison found a difference; STOPPED if Ctrl-C ended
        the training early, after which everything is saved and told as usual.

    Raises:
        ValueError, OSError, MemoryError: a setting, a file or the memory at hand does not fit.
    """
    prepared = _Run(settings)
    with interrupt() as stop:
        facts = prepared.train(stop)
        if not facts["training"]["finished"]:
            print("stopped    by Ctrl-C; what was learnt until then is saved")
            return STOPPED
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
        self.device = choose_device(settings.device)
        check_memory(settings.memory)
        check_seed(settings.seed)
        passages = file_passages(settings.corpus) if settings.corpus else builtin_passages()
        self.corpus = Corpus.from_passages(passages, min_count=settings.min_count)
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
        make_folder(settings.out)
        print(
            f"text       {self.corpus.characters:,} characters, {len(self.corpus):,} words, "
            f"{self.words:,} different",
            flush=True,
        )

    def train(self, stop: Callable[[], bool]) -> dict[str, Any]:
        """Trains with the tables in host memory; tells and saves the results, and returns them."""
        settings = self.settings
        self.forget_gpu_peak()
        self.outcome = train(
            self.model,
            self.optimizer,
            self.stream,
            epochs=settings.epochs,
            steps=settings.steps,
            stop=stop,
            label="training",
        )
        self.held = self.stream.held_out_pairs()
        self.score = held_out_score(self.model, self.held)
        chosen = content_words(self.corpus, _NEIGHBOURS_OF)
        facts = {
            **run_facts(settings, self.device, self.embeddings, self.outcome),
            "held_out": asdict(self.score) if self.score else None,
            "neighbours": nearest_neighbours(self.vectors, self.corpus.words, chosen),
        }
        paths = save_results(settings.out, self.vectors, self.corpus.words, facts)
        print_report(facts, paths)
        return facts

    def compare(self, facts: dict[str, Any], stop: Callable[[], bool]) -> bool:
        """Trains the same in plain torch and adds the comparison to `facts`; False if stopped."""
        settings = self.settings
        sparse = settings.optimizer == "SparseAdam"  # It refuses dense gradients.
        self.forget_gpu_peak()
        u, v = (
            nn.Embedding(self.words, settings.dim, _weight=rows, sparse=sparse)
            for rows in self.first
        )
        plain = SkipGram(u, v).to(self.device)
        outcome = train(
            plain,
            RowOptimizer(plain, self.make_optimizer),
            self.stream,
            epochs=settings.epochs,
            steps=settings.steps,
            ahead=False,
            stop=stop,
            label="plain torch",
        )
        if not outcome.finished:
            return False
        score = held_out_score(plain, self.held)
        facts["plain_torch"] = compare(
            self.device,
            self.words,
            (self.model, self.outcome, self.score),
            (plain, outcome, score),
        )
        save_results(settings.out, self.vectors, self.corpus.words, facts)
        return True

    def forget_gpu_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

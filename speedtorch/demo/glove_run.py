"""GloVe on real text as a user runs it: choices, training, report and files."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from speedtorch.demo.cooccurrence import count_cooccurrence
from speedtorch.demo.corpus import Corpus, builtin_passages, file_passages
from speedtorch.demo.evaluate import content_words, nearest_neighbours
from speedtorch.demo.glove import GloVe, train
from speedtorch.demo.glove_batches import PairBatches
from speedtorch.demo.report import memory_lines, run_facts, save_results
from speedtorch.demo.session import (
    STOPPED,
    check_memory,
    check_seed,
    choose_device,
    interrupt,
    make_folder,
)
from speedtorch.demo.settings import add_run_arguments, make_optimizer, positive
from speedtorch.optim.attach import attach

__all__ = ["ABOUT", "HELP", "Settings", "add_arguments", "run"]

HELP = "word vectors from counts of word pairs, with speedtorch.Embedding"
ABOUT = (
    "GloVe. Vectors, biases and their optimizer state are kept in host memory by four "
    "speedtorch.Embedding; the rows of the next batch travel while the current one is trained."
)
_NEIGHBOURS_OF = 8


@dataclass(frozen=True)
class Settings:
    """All choices of a run; the command line has one option for each.

    Attributes:
        corpus: a text file, plain or gzip; None for the text that Python carries.
        out: folder for the results.
        optimizer: name of a class of torch.optim.
        lr: learning rate.
        dim: numbers per vector.
        window: the furthest distance of a context word.
        min_count: rarer words are dropped.
        x_max: pairs that count less weigh less.
        alpha: how much less: `(count / x_max) ** alpha`.
        epochs: passes over the pairs.
        steps: batches to train on, instead of `epochs`.
        batch: pairs per batch.
        seed: everything random depends on it alone.
        device: "auto", "cpu" or "cuda".
        memory: kind of the tables' memory, as for HostTable.
    """

    corpus: Path | None = None
    out: Path = Path("glove")
    optimizer: str = "Adagrad"
    lr: float = 0.05
    dim: int = 100
    window: int = 10
    min_count: int = 10
    x_max: float = 100.0
    alpha: float = 0.75
    epochs: int = 15
    steps: int | None = None
    batch: int = 8192
    seed: int = 0
    device: str = "auto"
    memory: str = "auto"


def add_arguments(parser: ArgumentParser) -> None:
    """Gives a parser one option for each of the Settings."""
    d = Settings()
    add = parser.add_argument
    add("--corpus", type=Path, metavar="FILE", help="text to train on, plain or gzip")
    add("--optimizer", default=d.optimizer, metavar="NAME", help="any of torch.optim (%(default)s)")
    add("--lr", type=float, default=d.lr, help="learning rate (%(default)s)")
    add("--dim", type=positive, default=d.dim, help="numbers per vector (%(default)s)")
    add("--window", type=positive, default=d.window, help="reach of a window (%(default)s)")
    add("--min-count", type=positive, default=d.min_count, help="drop rarer words (%(default)s)")
    add("--x-max", type=float, default=d.x_max, help="counts below weigh less (%(default)s)")
    add("--alpha", type=float, default=d.alpha, help="exponent of that weight (%(default)s)")
    add("--epochs", type=positive, default=d.epochs, help="passes over the pairs (%(default)s)")
    add("--steps", type=positive, help="batches to train on, instead of --epochs")
    add("--batch", type=positive, default=d.batch, help="pairs per batch (%(default)s)")
    add_run_arguments(parser, out=d.out)


def run(settings: Settings) -> int:
    """Counts, trains, saves the vectors and prints a report.

    Args:
        settings: what to do.

    Returns:
        An exit status: 0; STOPPED if Ctrl-C ended the training early, after which everything is
        saved and told as usual.

    Raises:
        ValueError, OSError, MemoryError: a setting, a file or the memory at hand does not fit.
    """
    device = choose_device(settings.device)
    check_memory(settings.memory)
    check_seed(settings.seed)
    passages = file_passages(settings.corpus) if settings.corpus else builtin_passages()
    corpus = Corpus.from_passages(passages, min_count=settings.min_count)
    words = len(corpus.words)
    model = GloVe(
        words,
        settings.dim,
        x_max=settings.x_max,
        alpha=settings.alpha,
        device=device,
        memory=settings.memory,
    )
    optimizer = make_optimizer(settings.optimizer, settings.lr, model.parameters())
    attach(optimizer, model)
    make_folder(settings.out)
    print(
        f"text       {corpus.characters:,} characters, {len(corpus):,} words, {words:,} different",
        flush=True,
    )
    pairs = count_cooccurrence(corpus, window=settings.window, label="counting")
    batches = PairBatches(
        pairs,
        batch=settings.batch,
        epochs=settings.epochs,
        steps=settings.steps,
        seed=settings.seed,
        device=device,
    )
    model.reset_parameters(settings.seed)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with interrupt() as stop:
        outcome = train(model, optimizer, batches, stop=stop, label="training")
        facts = {
            **run_facts(settings, device, model.embeddings, outcome),
            "words": words,
            "pairs": len(pairs),
            "neighbours": nearest_neighbours(
                model.vectors, corpus.words, content_words(corpus, _NEIGHBOURS_OF)
            ),
        }
        paths = save_results(settings.out, model.vectors, corpus.words, facts)
        _print_report(facts, paths)
    if not outcome.finished:
        print("stopped    by Ctrl-C; what was learnt until then is saved")
        return STOPPED
    return 0


def _print_report(facts: Mapping[str, Any], paths: Sequence[Path]) -> None:
    training = facts["training"]
    speed = training["pairs"] / training["seconds"]
    lines = [
        f"pairs      {facts['pairs']:,} different ones within {facts['settings']['window']} words",
        f"time       {training['seconds']:.1f} s on {facts['device']}: {training['steps']:,} steps,"
        f" {speed:,.0f} pairs/s",
        f"loss       {training['losses'][0]:.4f} per pair at first, {training['losses'][-1]:.4f} at"
        " the end",
        *memory_lines(facts),
        "nearest",
    ]
    lines += [f"  {word:11}{', '.join(near)}" for word, near in facts["neighbours"].items()]
    lines.append(f"saved      {', '.join(map(str, paths))}")
    print("\n".join(lines), flush=True)

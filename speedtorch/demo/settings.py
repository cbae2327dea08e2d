"""The choices of a word2vec run, as a record and as command-line options."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = [
    "Settings",
    "add_arguments",
    "add_run_arguments",
    "make_optimizer",
    "optimizer_names",
    "positive",
]

# Rates at which the built-in text is learnt well; for the others torch's own default is taken.
_RATES = {
    "ASGD": 0.03,
    "Adagrad": 0.1,
    "Adam": 0.01,
    "AdamW": 0.01,
    "Adamax": 0.02,
    "NAdam": 0.01,
    "RAdam": 0.03,
    "SGD": 0.03,
    "SparseAdam": 0.01,
}


@dataclass(frozen=True)
class Settings:
    """All choices of a run; the command line has one option for each.

    Attributes:
        corpus: a text file, plain or gzip; None for the text that Python carries.
        out: folder for the results.
        optimizer: name of a class of torch.optim.
        lr: learning rate at the start; None for a good one of the optimizer.
        dim: numbers per word.
        epochs: passes over the text.
        steps: batches to train on, instead of `epochs`.
        batch: pairs per batch.
        window: the furthest distance of a context word.
        negatives: negatives per pair.
        min_count: rarer words are dropped.
        sample: threshold of the dropping of frequent words.
        held_out: share of the text that is kept out of training, for the score.
        seed: everything random depends on it alone.
        device: "auto", "cpu" or "cuda".
        memory: kind of the tables' memory, as for HostTable.
        compare: train the same in plain torch afterwards, and compare.
    """

    corpus: Path | None = None
    out: Path = Path("word2vec")
    optimizer: str = "Adamax"
    lr: float | None = None
    dim: int = 100
    epochs: int = 6
    steps: int | None = None
    batch: int = 4096
    window: int = 5
    negatives: int = 5
    min_count: int = 10
    sample: float = 1e-3
    held_out: float = 0.05
    seed: int = 0
    device: str = "auto"
    memory: str = "auto"
    compare: bool = False


def add_arguments(parser: ArgumentParser) -> None:
    """Gives a parser one option for each of the Settings."""
    d = Settings()
    add = parser.add_argument
    add("--corpus", type=Path, metavar="FILE", help="text to train on, plain or gzip")
    add("--optimizer", default=d.optimizer, metavar="NAME", help="any of torch.optim (Adamax)")
    add("--lr", type=float, help="learning rate at the start; falls to a hundredth of it")
    add("--dim", type=positive, default=d.dim, help="numbers per word (%(default)s)")
    add("--epochs", type=positive, default=d.epochs, help="passes over the text (%(default)s)")
    add("--steps", type=positive, help="batches to train on, instead of --epochs")
    add("--batch", type=positive, default=d.batch, help="pairs per batch (%(default)s)")
    add("--window", type=positive, default=d.window, help="reach of a window (%(default)s)")
    add("--negatives", type=positive, default=d.negatives, help="per pair (%(default)s)")
    add("--min-count", type=positive, default=d.min_count, help="drop rarer words (%(default)s)")
    add("--sample", type=float, default=d.sample, help="drop frequent words above (%(default)s)")
    add("--held-out", type=float, default=d.held_out, help="share of the text (%(default)s)")
    add_run_arguments(parser, out=d.out)
    add("--compare", action="store_true", help="train the same in plain torch, and compare")


def add_run_arguments(parser: ArgumentParser, *, out: Path) -> None:
    """Gives a parser the options of every demonstration: where, how, and by which chance.

    Args:
        parser: gets --out, --seed, --device and --memory.
        out: the default folder of the results.
    """
    add = parser.add_argument
    add("--out", type=Path, default=out, metavar="FOLDER", help="results (default: %(default)s)")
    add("--seed", type=int, default=0, help="of all that is random (%(default)s)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    kinds = ("auto", "managed", "registered", "plain", "cuda")
    add("--memory", choices=kinds, default="auto", help="where the tables are (%(default)s)")


def positive(text: str) -> int:
    """A whole number of 1 or more, or the parser's error."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)


def optimizer_names() -> list[str]:
    """Names of the optimizers in torch.optim."""
    base = torch.optim.Optimizer
    found = {name: getattr(torch.optim, name) for name in dir(torch.optim)}
    return [
        n for n, c in found.items() if isinstance(c, type) and issubclass(c, base) and c != base
    ]


def make_optimizer(
    name: str, lr: float | None, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """Makes an optimizer by name.

    Args:
        name: of a class in torch.optim.
        lr: learning rate, or None for a good one.
        parameters: what it is to train.

    Raises:
        ValueError: there is no such optimizer, or it refuses the rate.

    Example:
        >>> make_optimizer("Adamax", None, [nn.Parameter(torch.zeros(2))]).defaults["lr"]
        0.02
    """
    if name not in optimizer_names():
        raise ValueError(f"no optimizer {name!r} in torch.optim: {', '.join(optimizer_names())}")
    lr = _RATES.get(name) if lr is None else lr
    chosen: type[Any] = getattr(torch.optim, name)
    made: torch.optim.Optimizer = chosen(parameters) if lr is None else chosen(parameters, lr=lr)
    return made

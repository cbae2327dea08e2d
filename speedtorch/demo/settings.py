"""The choices of a demonstration: a record, and for each of its fields an option."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from speedtorch.memory.placement import MemoryKind
from speedtorch.step.rounding import RoundingMode

__all__ = [
    "CommonSettings",
    "RunSettings",
    "StoredSettings",
    "add_arguments",
    "check_least",
    "make_optimizer",
    "optimizer_names",
    "option",
    "optional_count",
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


def option(default: Any, about: str, **told: Any) -> Any:
    """A field of the settings, and what argparse is to know of its option.

    Its type is that of the default, and whole numbers are 1 or more, if nothing else is told.
    """
    if "action" not in told:
        told.setdefault("type", _positive if type(default) is int else type(default))
    shown = "" if default is None or default is False else " (%(default)s)"
    return field(default=default, metadata={"help": about + shown, **told})


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)


def optional_count(about: str) -> Any:
    """An option without a default, 1 or more."""
    return option(None, about, type=_positive)


_MEMORY = ("auto", "managed", "registered", "plain", "cuda")


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """What every demonstration is asked: where, and by which chance."""

    out: Path
    seed: int = option(0, "of all that is random", type=int)
    device: str = option("auto", "what trains", choices=("auto", "cpu", "cuda"))


@dataclass(frozen=True, kw_only=True)
class RunSettings(CommonSettings):
    """What a demonstration with tables is asked as well."""

    memory: MemoryKind = option("auto", "where the tables are", choices=_MEMORY)


@dataclass(frozen=True, kw_only=True)
class StoredSettings(RunSettings):
    """What a demonstration is asked as well whose rows may have 16 bits in the tables."""

    stored: str | None = option(
        None, "store the rows in 16 bits", type=str, choices=("bfloat16", "float16")
    )
    rounding: RoundingMode = option(
        "stochastic", "of rows in 16 bits", choices=get_args(RoundingMode)
    )

    def stored_as(self) -> dict[str, Any]:
        """The arguments of an Embedding or a collection."""
        dtype = None if self.stored is None else getattr(torch, self.stored)
        return {"stored": dtype, "rounding": self.rounding}

    def check_comparable(self) -> None:
        """Raises ValueError if plain torch cannot store rows so."""
        if self.stored is not None:
            raise ValueError("--compare: plain torch has no rows of 16 bits; leave --stored out")


def add_arguments(parser: ArgumentParser, settings: type[CommonSettings]) -> None:
    """Gives a parser one option for each of the settings, those of every demonstration last."""
    shared = {each.name for each in fields(RunSettings)}
    for each in sorted(fields(settings), key=lambda each: each.name in shared):
        name = f"--{each.name.replace('_', '-')}"
        parser.add_argument(name, default=each.default, **each.metadata)


def check_least(least: int, **values: float | None) -> None:
    """Raises ValueError for a number below the least, which is 0 or 1."""
    for name, value in values.items():
        if value is not None and value < least:
            rule = "at least 1" if least else "0 or more"
            raise ValueError(f"{name} is {value}; it must be {rule}")


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
    """An optimizer of torch.optim by name, with a good learning rate if none is given.

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

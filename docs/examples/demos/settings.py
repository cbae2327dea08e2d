"""The settings of the demonstrations: dataclasses with a command-line option for each field."""

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

# Learning rates suitable for the built-in text. Other optimizers use torch's default.
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


def option(default: Any, about: str, **arguments: Any) -> Any:
    """A field of the settings, with the arguments of argparse for its option.

    By default the option has the type of the default value, and integers must be at least 1. False
    is the default of a flag.
    """
    if default is False:
        arguments["action"] = "store_true"
    else:
        arguments.setdefault("type", _positive if type(default) is int else type(default))
    shown = "" if default is None or default is False else " (%(default)s)"
    return field(default=default, metadata={"help": about + shown, **arguments})


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return int(text)


def optional_count(about: str) -> Any:
    """An integer option of at least 1, None by default."""
    return option(None, about, type=_positive)


_MEMORY = ("auto", "managed", "registered", "plain", "cuda")


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """The settings of every demonstration."""

    out: Path
    seed: int = option(0, "seed of all random numbers", type=int)
    device: str = option("auto", "device that trains", choices=("auto", "cpu", "cuda"))


@dataclass(frozen=True, kw_only=True)
class RunSettings(CommonSettings):
    """The settings of demonstrations with tables."""

    memory: MemoryKind = option("auto", "kind of memory of the tables", choices=_MEMORY)

    def batching(self) -> dict[str, Any]:
        """The arguments of Batches."""
        names = ("batch", "epochs", "steps", "seed")
        return {name: value for name, value in vars(self).items() if name in names}


@dataclass(frozen=True, kw_only=True)
class StoredSettings(RunSettings):
    """The settings of demonstrations that support 16-bit rows and a comparison."""

    compare: bool = option(False, "also train in plain torch and compare the results")

    stored: str | None = option(
        None, "dtype of 16-bit rows in the tables", type=str, choices=("bfloat16", "float16")
    )
    rounding: RoundingMode = option(
        "stochastic", "rounding of 16-bit rows", choices=get_args(RoundingMode)
    )

    def stored_as(self) -> dict[str, Any]:
        """The arguments `stored` and `rounding` of an Embedding or a collection."""
        dtype = None if self.stored is None else getattr(torch, self.stored)
        return {"stored": dtype, "rounding": self.rounding}

    def __post_init__(self) -> None:
        if self.compare and self.stored is not None:  # plain torch has no such tables
            raise ValueError("--compare requires 32-bit rows. Omit --stored.")


def add_arguments(parser: ArgumentParser, settings: type[CommonSettings]) -> None:
    """Adds one option per setting to a parser; the common settings are the last ones."""
    common = {setting.name for setting in fields(RunSettings)}
    for setting in sorted(fields(settings), key=lambda setting: setting.name in common):
        name = f"--{setting.name.replace('_', '-')}"
        parser.add_argument(name, default=setting.default, **setting.metadata)


def check_least(least: int, **values: float | None) -> None:
    """Raises ValueError for values below `least`, which is 0 or 1."""
    for name, value in values.items():
        if value is not None and value < least:
            rule = "at least 1" if least else "0 or more"
            raise ValueError(f"{name} must be {rule}, got {value}")


def optimizer_names() -> list[str]:
    """The names of the optimizers in torch.optim."""
    base = torch.optim.Optimizer
    found = {name: getattr(torch.optim, name) for name in dir(torch.optim)}
    return [
        n for n, c in found.items() if isinstance(c, type) and issubclass(c, base) and c != base
    ]


def make_optimizer(
    name: str, lr: float | None, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """Creates an optimizer of torch.optim by name, by default with a suitable learning rate.

    Example:
        >>> make_optimizer("Adamax", None, [nn.Parameter(torch.zeros(2))]).defaults["lr"]
        0.02
    """
    if name not in optimizer_names():
        raise ValueError(f"optimizer must be one of {', '.join(optimizer_names())}, got {name!r}")
    lr = _RATES.get(name) if lr is None else lr
    chosen: type[Any] = getattr(torch.optim, name)
    made: torch.optim.Optimizer = chosen(parameters) if lr is None else chosen(parameters, lr=lr)
    return made

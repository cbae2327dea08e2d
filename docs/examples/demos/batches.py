"""Training batches in an order that the seed determines."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from demos.settings import check_least

__all__ = ["Batch", "Batches", "Ids", "Outcome", "ShuffledBatches"]

Ids = npt.NDArray[np.int64]
_Batch = TypeVar("_Batch", bound="Batch")


@dataclass
class Outcome:
    """The result of a training run."""

    steps: int = 0
    examples: int = 0
    words: int = 0
    """Number of words of the text so far, before frequent words are dropped; 0 without a text."""
    seconds: float = 0.0
    """Wall-clock time of the loop."""
    losses: list[float] = field(default_factory=list)
    """Mean loss per example of every 25 steps; the last entry may cover fewer steps."""
    finished: bool = False
    """False if the training was stopped early."""


@dataclass(frozen=True, eq=False)
class Batch(ABC):
    """The tensors of a batch."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of examples."""

    def to(self: _Batch, device: torch.device) -> _Batch:
        """Returns the batch on a device; the copy to a GPU is asynchronous."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        asynchronous = device.type == "cuda"
        moved = {name: t.to(device, non_blocking=asynchronous) for name, t in tensors.items()}
        return replace(self, **moved)


class Batches(ABC):
    """Batches, epoch after epoch; every iteration yields the same batches.

    The number of batches is `steps`, or without `steps` that of `epochs`.
    """

    def __init__(
        self, *, batch: int = 1024, epochs: int = 1, steps: int | None = None, seed: int = 0
    ) -> None:
        check_least(1, batch=batch, epochs=epochs, steps=steps)
        check_least(0, seed=seed)
        self.batch, self.epochs, self.steps, self.seed = batch, epochs, steps, seed

    def __iter__(self) -> Iterator[Any]:
        numbers = itertools.count() if self.steps else range(self.epochs)
        return itertools.islice(itertools.chain.from_iterable(map(self.epoch, numbers)), self.steps)

    @abstractmethod
    def epoch(self, number: int) -> Iterator[Any]:
        """Yields the batches of one epoch."""

    @abstractmethod
    def track(self, outcome: Outcome, batch: Any) -> float:
        """Returns the progress, from 0 to 1, after the step of a batch."""


class ShuffledBatches(Batches):
    """Batches of examples; each epoch has its own order. An epoch's last batch may be smaller."""

    _purpose: tuple[int, ...] = ()
    """The first numbers of the generators' seeds."""

    def __init__(self, examples: int, **how: Any) -> None:
        """`how` are arguments of Batches."""
        super().__init__(**how)
        check_least(1, examples=examples)
        self.examples = examples

    def __len__(self) -> int:
        """The number of batches of all epochs."""
        return self.steps or self.epochs * -(-self.examples // self.batch)

    def epoch(self, number: int) -> Iterator[Any]:
        """Yields the batches of one epoch."""
        random = np.random.default_rng([*self._purpose, self.seed, number])
        order = random.permutation(self.examples)
        for begin in range(0, self.examples, self.batch):
            yield self._make(order[begin : begin + self.batch], random)

    @abstractmethod
    def _make(self, pick: Ids, random: np.random.Generator) -> Any:
        """The batch of the examples at the positions `pick`."""

    def track(self, outcome: Outcome, batch: Any) -> float:
        """Returns the progress, from 0 to 1, after the step of a batch."""
        return outcome.steps / len(self)

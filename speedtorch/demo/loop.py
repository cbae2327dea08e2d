"""The loop of every demonstration: steps, their losses, and a progress bar."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from speedtorch.ops.functions import synchronize

__all__ = ["Outcome", "Steps", "run_steps", "take_step"]

# The loss is read, which waits for the GPU, and the bar moves once in so many steps.
_STEPS_PER_REPORT = 25

_Batch = TypeVar("_Batch")
_Taken = TypeVar("_Taken", contravariant=True)


@dataclass
class Outcome:
    """What a training run did.

    Attributes:
        steps: batches trained on.
        seconds: wall-clock time of the loop.
        losses: mean loss per example over each 25 steps; the last may cover fewer.
        finished: False if it was stopped early.
    """

    steps: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    finished: bool = False


class Steps(Protocol[_Taken]):
    """What one demonstration does with a batch, and how far it is."""

    def step(self, batch: _Taken) -> tuple[Tensor, int]:
        """Trains on it; the sum of its examples' losses, detached, and how many they are."""

    def done(self) -> float:
        """Where the progress bar stands."""

    def speed(self, seconds: float) -> str:
        """How fast it went, in words."""


class _Stepped(Protocol):
    def zero_grad(self) -> None: ...
    def step(self) -> object: ...


def take_step(optimizer: _Stepped, loss: Callable[[], Tensor]) -> Tensor:
    """One training step; returns the detached loss."""
    optimizer.zero_grad()
    value = loss()
    value.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return value.detach()


def run_steps(
    steps: Steps[_Batch],
    batches: Iterable[_Batch],
    outcome: Outcome,
    *,
    device: torch.device,
    rate: float,
    total: float,
    stop: Callable[[], bool],
    label: str | None,
    layout: str = "{l_bar}{bar}| {elapsed}<{remaining}{postfix}",
) -> None:
    """Trains on all batches, or until `stop` says so; a step is never left half done.

    Args:
        steps: what is done with each batch.
        batches: to train on.
        outcome: gets what was done.
        device: does the work.
        rate: learning rate at the start, for the error.
        total: where the bar ends.
        stop: asked after each step.
        label: shows a progress bar of this name, with loss and speed.
        layout: of the bar.

    Raises:
        ValueError: the loss grows beyond all numbers.
    """
    recent, recent_examples = torch.zeros((), device=device), 0
    begin = time.perf_counter()
    with tqdm(total=total, desc=label, disable=label is None, bar_format=layout) as bar:

        def report() -> None:
            nonlocal recent, recent_examples
            outcome.losses.append(recent.item() / recent_examples)
            if not math.isfinite(outcome.losses[-1]):
                raise ValueError(
                    f"the loss is {outcome.losses[-1]} after {outcome.steps} steps: choose a"
                    f" learning rate below {rate:g}"
                )
            recent, recent_examples = torch.zeros_like(recent), 0
            speed = steps.speed(time.perf_counter() - begin)
            bar.set_postfix_str(f"loss {outcome.losses[-1]:.4f}, {speed}", False)
            bar.update(steps.done() - bar.n)

        for batch in batches:
            loss, examples = steps.step(batch)
            recent += loss
            recent_examples += examples
            outcome.steps += 1
            if outcome.steps % _STEPS_PER_REPORT == 0:
                report()
            if stop():
                break
        else:
            outcome.finished = True
        if recent_examples:
            report()
    synchronize(device)
    outcome.seconds = time.perf_counter() - begin

"""GloVe (Pennington et al., 2014) on four Embeddings whose rows are in host memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from tqdm import tqdm

from speedtorch.demo.glove_batches import PairBatch, PairBatches
from speedtorch.embedding import Embedding
from speedtorch.ops import synchronize
from speedtorch.prefetch import prefetch

__all__ = ["GloVe", "Outcome", "train"]

# The loss is read, which waits for the GPU, and the bar moves once in so many steps.
_STEPS_PER_REPORT = 25


class GloVe(nn.Module):
    """Two vectors and two biases for each word: as the target of a pair, and as its context.

    The logarithm of a pair's count is approached by the dot product of the two vectors plus the two
    biases. All four tables are in host memory; the module holds the rows of one batch.

    Args:
        words: rows of each table, `V`.
        dim: numbers per vector, `D`.
        x_max: pairs that count less weigh less.
        alpha: how much less: `(count / x_max) ** alpha`.
        device: where the rows of a batch are trained.
        memory: kind of the tables' memory, as for HostTable.

    Raises:
        ValueError: a number is out of its range.
        MemoryError: too little memory for the tables.

    Example:
        >>> model = GloVe(1000, 8)
        >>> model.reset_parameters(seed=3)
        >>> model.vectors(torch.tensor([7, 999])).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        words: int,
        dim: int,
        *,
        x_max: float = 100.0,
        alpha: float = 0.75,
        device: torch.device | str = "cpu",
        memory: str = "auto",
    ) -> None:
        super().__init__()
        if not x_max > 0:
            raise ValueError(f"x_max is {x_max}; it must be above 0")
        if not alpha >= 0:
            raise ValueError(f"alpha is {alpha}; it must be 0 or more")
        self.x_max, self.alpha = x_max, alpha
        self.target = Embedding(words, dim, device=device, memory=memory)
        self.context = Embedding(words, dim, device=device, memory=memory)
        self.target_bias = Embedding(words, 1, device=device, memory=memory)
        self.context_bias = Embedding(words, 1, device=device, memory=memory)

    @property
    def embeddings(self) -> tuple[Embedding, ...]:
        """All four Embeddings."""
        return self.target, self.context, self.target_bias, self.context_bias

    def reset_parameters(self, seed: int) -> None:
        """Draws all vectors and biases anew, uniform within `1 / (2 D)`.

        Args:
            seed: the numbers depend on it alone.
        """
        bound = 0.5 / self.target.embedding_dim
        for place, embedding in enumerate(self.embeddings):
            number = len(self.embeddings) * seed + place
            embedding.init_(nn.init.uniform_, -bound, bound, seed=number)

    def ids(self, batch: PairBatch) -> dict[nn.Module, Tensor]:
        """The rows that a batch looks up in each Embedding, for speedtorch.prefetch."""
        return {
            self.target: batch.rows,
            self.context: batch.columns,
            self.target_bias: batch.rows,
            self.context_bias: batch.columns,
        }

    def forward(self, batch: PairBatch) -> Tensor:
        """Computes the loss, summed over the pairs.

        Returns:
            A scalar. It is a sum, so that the step of a row does not depend on the batch's size.
        """
        dot = (self.target(batch.rows) * self.context(batch.columns)).sum(1)
        bias = (self.target_bias(batch.rows) + self.context_bias(batch.columns)).squeeze(1)
        weight = (batch.counts / self.x_max).clamp(max=1) ** self.alpha
        loss: Tensor = (weight * (dot + bias - batch.counts.log()) ** 2).sum()
        return loss

    @torch.no_grad()
    def vectors(self, ids: Tensor) -> Tensor:
        """Words' vectors `[N, D]`, on the CPU: the sum of both tables' rows, as in the paper."""
        both: Tensor = self.target(ids) + self.context(ids)
        return both.cpu()


@dataclass
class Outcome:
    """What a training run did.

    Attributes:
        steps: batches trained on.
        pairs: pairs of words in them.
        seconds: wall-clock time of the loop.
        losses: mean loss per pair over each 25 steps; the last may cover fewer.
        finished: False if it was stopped early.
    """

    steps: int = 0
    pairs: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    finished: bool = False


def train(
    model: GloVe,
    optimizer: torch.optim.Optimizer,
    batches: PairBatches,
    *,
    ahead: bool = True,
    stop: Callable[[], bool] = lambda: False,
    label: str | None = None,
) -> Outcome:
    """Trains on all batches, or until `stop` says so; a step is never left half done.

    Args:
        model: on the device of the batches.
        optimizer: of the model's parameters, attached to it if it keeps state.
        batches: to train on.
        ahead: bring the next batch's rows during a step.
        stop: asked after each step.
        label: shows a progress bar of this name, with loss and pairs per second.

    Returns:
        What was done.

    Raises:
        ValueError: the loss grows beyond all numbers.
    """
    device = model.target.weight.device
    loader: Iterable[PairBatch] = prefetch(batches, model, ids=model.ids) if ahead else batches
    outcome = Outcome()
    recent, recent_pairs = torch.zeros((), device=device), 0
    layout = "{l_bar}{bar}| {n_fmt}/{total_fmt} steps, {elapsed}<{remaining}{postfix}"
    begin = time.perf_counter()
    with tqdm(total=len(batches), desc=label, disable=label is None, bar_format=layout) as bar:

        def report() -> None:
            nonlocal recent, recent_pairs
            outcome.losses.append(recent.item() / recent_pairs)
            if not math.isfinite(outcome.losses[-1]):
                raise ValueError(
                    f"the loss is {outcome.losses[-1]} after {outcome.steps} steps: choose a"
                    f" learning rate below {optimizer.param_groups[0]['lr']:g}"
                )
            recent, recent_pairs = torch.zeros_like(recent), 0
            speed = outcome.pairs / (time.perf_counter() - begin)
            bar.set_postfix_str(f"loss {outcome.losses[-1]:.4f}, {speed:,.0f} pairs/s", False)
            bar.update(outcome.steps - bar.n)

        for batch in loader:
            recent += _step(model, optimizer, batch)
            recent_pairs += len(batch)
            outcome.steps += 1
            outcome.pairs += len(batch)
            if outcome.steps % _STEPS_PER_REPORT == 0:
                report()
            if stop():
                break
        else:
            outcome.finished = True
        if recent_pairs:
            report()
    synchronize(device)
    outcome.seconds = time.perf_counter() - begin
    return outcome


def _step(model: GloVe, optimizer: torch.optim.Optimizer, batch: PairBatch) -> Tensor:
    """One training step; returns the detached loss."""
    optimizer.zero_grad(set_to_none=True)
    loss: Tensor = model(batch)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()

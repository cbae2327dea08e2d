"""GloVe (Pennington et al., 2014) on four Embeddings whose rows are in host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from speedtorch.demo import loop
from speedtorch.demo.glove_batches import PairBatch, PairBatches
from speedtorch.nn.embedding import Embedding
from speedtorch.nn.prefetch import prefetch

__all__ = ["GloVe", "Outcome", "train"]


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
class Outcome(loop.Outcome):
    """What a training run did.

    Attributes:
        pairs: pairs of words in its batches.
    """

    pairs: int = 0


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
    steps = _Steps(model, optimizer)
    loop.run_steps(
        steps,
        prefetch(batches, model, ids=model.ids) if ahead else batches,
        steps.outcome,
        device=model.target.weight.device,
        rate=optimizer.param_groups[0]["lr"],
        total=len(batches),
        stop=stop,
        label=label,
        layout="{l_bar}{bar}| {n_fmt}/{total_fmt} steps, {elapsed}<{remaining}{postfix}",
    )
    return steps.outcome


class _Steps:
    def __init__(self, model: GloVe, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self.outcome = Outcome()

    def step(self, batch: PairBatch) -> tuple[Tensor, int]:
        self.outcome.pairs += len(batch)
        return loop.take_step(self._optimizer, lambda: self._model(batch)), len(batch)

    def done(self) -> float:
        return self.outcome.steps

    def speed(self, seconds: float) -> str:
        return f"{self.outcome.pairs / seconds:,.0f} pairs/s"

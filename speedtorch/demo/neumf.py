"""NeuMF, the recommender of He et al. (2017), with its rows in host memory, and its training."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from speedtorch.demo.ranking import BatchStream, Candidates, RatingBatch, Score, score
from speedtorch.embedding import Embedding
from speedtorch.ops import synchronize
from speedtorch.prefetch import prefetch

__all__ = ["NeuMF", "Outcome", "held_out_score", "train"]

# As in the paper: the spread of the rows before training.
_SPREAD = 0.01
# The loss is read, which waits for the GPU, and the bar moves once in so many steps.
_STEPS_PER_REPORT = 25
_SCORED_AT_ONCE = 1024


class NeuMF(nn.Module):
    """Generalised matrix factorisation (GMF) and a multilayer perceptron (MLP), side by side.

    Both have rows of their own for users and items. GMF multiplies them, number by number; the MLP
    puts them one after the other through three layers, each half as wide; a last layer makes one
    number out of both results.

    Args:
        users: how many.
        items: how many.
        dim: numbers per row of GMF, and results of the MLP, whose rows have twice as many.
        memory: kind of the tables' memory, as for HostTable.
        device: what computes.
        seed: the layers' first values depend on it alone; for those of the rows see draw_rows.

    Example:
        >>> model = NeuMF(1000, 500, 8)
        >>> model(torch.tensor([4, 999]), torch.tensor([[1, 2, 3], [4, 5, 499]])).shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        users: int,
        items: int,
        dim: int,
        *,
        memory: str = "auto",
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.gmf_users = Embedding(users, dim, memory=memory)
            self.gmf_items = Embedding(items, dim, memory=memory)
            self.mlp_users = Embedding(users, 2 * dim, memory=memory)
            self.mlp_items = Embedding(items, 2 * dim, memory=memory)
            widths = (4 * dim, 2 * dim, dim, dim)
            self.layers = nn.ModuleList(
                nn.Linear(wide, narrow) for wide, narrow in itertools.pairwise(widths)
            )
            self.last = nn.Linear(2 * dim, 1)
        self.to(device)

    def embeddings(self) -> list[Embedding]:
        """The four modules whose rows are in host memory."""
        return [self.gmf_users, self.gmf_items, self.mlp_users, self.mlp_items]

    def draw_rows(self, seed: int) -> None:
        """Draws all rows anew, near 0."""
        for number, embedding in enumerate(self.embeddings()):
            embedding.init_(nn.init.normal_, 0, _SPREAD, seed=4 * seed + number)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """Rates items.

        Args:
            user: `[B]` ids, on either device.
            item: `[B, C]` ids, on either device.

        Returns:
            `[B, C]`, larger for an item that the user is more likely to take an interest in: the
            logit of the probability.
        """
        product = self.gmf_users(user).unsqueeze(1) * self.gmf_items(item)
        left = self.mlp_users(user).unsqueeze(1).expand(-1, item.shape[1], -1)
        value = torch.cat([left, self.mlp_items(item)], 2)
        for layer in self.layers:
            value = F.relu(layer(value))
        made: Tensor = self.last(torch.cat([product, value], 2)).squeeze(2)
        return made

    def ids(self, batch: RatingBatch) -> dict[nn.Module, Tensor]:
        """The ids that a batch looks up in each module, for prefetch."""
        return {
            self.gmf_users: batch.user,
            self.gmf_items: batch.item,
            self.mlp_users: batch.user,
            self.mlp_items: batch.item,
        }


@dataclass
class Outcome:
    """What a training run did.

    Attributes:
        steps: batches trained on.
        ratings: ratings in them, without negatives.
        seconds: wall-clock time of the loop.
        losses: mean over each 25 steps of the loss per rated or sampled item; the last may cover
            fewer.
        finished: False if it was stopped early.
    """

    steps: int = 0
    ratings: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    finished: bool = False


def train(
    model: NeuMF,
    optimizer: torch.optim.Optimizer,
    stream: BatchStream,
    *,
    epochs: int,
    stop: Callable[[], bool] = lambda: False,
    label: str | None = None,
    ahead: bool = True,
) -> Outcome:
    """Trains for some epochs, or until `stop` says so; a step is never left half done.

    Args:
        model: its device does the work.
        optimizer: of the model's parameters, and attached to it.
        stream: gives the batches.
        epochs: passes over the ratings.
        stop: asked after each step.
        label: shows a progress bar of this name, with loss and ratings per second.
        ahead: bring the rows of the next batch during a step; the numbers are the same without.

    Returns:
        What was done.

    Raises:
        ValueError: the loss grows beyond all numbers.
    """
    outcome = Outcome()
    recent, recent_ratings = torch.zeros((), device=model.last.weight.device), 0
    batches = stream.batches(epochs)
    layout = "{l_bar}{bar}| {elapsed}<{remaining}{postfix}"
    begin = time.perf_counter()
    with tqdm(
        total=epochs * len(stream), desc=label, disable=label is None, bar_format=layout
    ) as bar:

        def report() -> None:
            nonlocal recent, recent_ratings
            outcome.losses.append(recent.item() / recent_ratings)
            if not math.isfinite(outcome.losses[-1]):
                raise ValueError(
                    f"the loss is {outcome.losses[-1]} after {outcome.steps} steps: choose a "
                    f"learning rate below {optimizer.param_groups[0]['lr']:g}"
                )
            recent, recent_ratings = torch.zeros_like(recent), 0
            speed = outcome.ratings / (time.perf_counter() - begin)
            bar.set_postfix_str(f"loss {outcome.losses[-1]:.3f}, {speed:,.0f} ratings/s", False)
            bar.update(outcome.ratings - bar.n)

        for batch in prefetch(batches, model, ids=model.ids) if ahead else batches:
            recent += _step(model, optimizer, batch) * len(batch)
            recent_ratings += len(batch)
            outcome.steps += 1
            outcome.ratings += len(batch)
            if outcome.steps % _STEPS_PER_REPORT == 0:
                report()
            if stop():
                break
        else:
            outcome.finished = True
        if recent_ratings:
            report()
    synchronize(model.last.weight.device)
    outcome.seconds = time.perf_counter() - begin
    return outcome


def _step(model: NeuMF, optimizer: torch.optim.Optimizer, batch: RatingBatch) -> Tensor:
    """One training step; returns the detached loss, binary cross-entropy."""
    optimizer.zero_grad(set_to_none=True)
    logits = model(batch.user, batch.item)
    rated = torch.zeros_like(logits)
    rated[:, 0] = 1
    loss = F.binary_cross_entropy_with_logits(logits, rated)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()


def held_out_score(model: NeuMF, candidates: Candidates) -> Score:
    """Scores a model on items kept out of training.

    Args:
        model: in whatever state.
        candidates: held-out items and others.

    Returns:
        The score.
    """
    starts = range(0, len(candidates), _SCORED_AT_ONCE)
    parts = [slice(start, start + _SCORED_AT_ONCE) for start in starts]
    with torch.no_grad():
        values = [model(candidates.user[part], candidates.item[part]).cpu() for part in parts]
    return score(torch.cat(values))

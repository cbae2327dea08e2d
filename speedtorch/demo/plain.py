"""The same training in plain torch, to compare with: full-size embeddings, touched rows only.

Nothing here uses the rest of the package: per step, `index_select` of the looked-up rows of weight,
gradient and every state entry, the optimizer's step on them, `index_copy_` back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["RowOptimizer"]

_Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class RowOptimizer:
    """Any optimizer by SparseAdam's rule: looked-up rows are stepped, with one step count for all.

    The model has embeddings of torch's, each looked up in every step, and no other parameters.

    Example:
        >>> embedding = nn.Embedding.from_pretrained(torch.zeros(3, 1), freeze=False)
        >>> optimizer = RowOptimizer(embedding, torch.optim.Adam)
        >>> embedding(torch.tensor([2])).sum().backward()
        >>> optimizer.step()
        >>> embedding.weight.detach().flatten()
        tensor([ 0.0000,  0.0000, -0.0010])
    """

    def __init__(self, model: nn.Module, make_optimizer: _Make) -> None:
        embeddings = [each for each in model.modules() if isinstance(each, nn.Embedding)]
        self._tables = [_Table(embedding, make_optimizer) for embedding in embeddings]
        self._optimizer = make_optimizer([table.held for table in self._tables])

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The settings, as torch's optimizers have them."""
        return self._optimizer.param_groups

    def zero_grad(self) -> None:
        """Drops the gradients."""
        for table in self._tables:
            table.weight.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Steps the rows that were looked up since the last step."""
        touched = [table.take(self._optimizer.state.get(table.held, {})) for table in self._tables]
        self._optimizer.step()
        for table, ids in zip(self._tables, touched, strict=True):
            table.put(ids, self._optimizer.state[table.held])


class _Table:
    """An embedding, the optimizer's state of all of its rows, and the rows that are stepped."""

    def __init__(self, embedding: nn.Embedding, make_optimizer: _Make) -> None:
        self.weight = embedding.weight
        first = _first_state(make_optimizer, embedding)
        self._state = {name: row.repeat(len(self.weight), 1) for name, row in first.items()}
        self.held = nn.Parameter(torch.zeros_like(self.weight.data[:1]))
        self._asked: list[Tensor] = []
        embedding.register_forward_pre_hook(self._note)

    def _note(self, embedding: nn.Module, args: tuple[Tensor]) -> None:
        if torch.is_grad_enabled():
            self._asked.append(args[0].flatten())

    def take(self, remembered: dict[str, Any]) -> Tensor:
        """Copies the looked-up rows out; returns their ids."""
        ids: Tensor = torch.unique(torch.cat(self._asked))
        self._asked.clear()
        gradient = self.weight.grad
        assert gradient is not None
        if gradient.is_sparse:
            gradient = gradient.coalesce()  # index_select would add a row up in another order
        self.held.data = self.weight.index_select(0, ids)
        self.held.grad = gradient.index_select(0, ids)
        for name, rows in self._state.items():
            # Most optimizers make their state in the first step: it starts by itself then.
            if name in remembered:
                remembered[name] = rows.index_select(0, ids)
        return ids

    def put(self, ids: Tensor, remembered: dict[str, Any]) -> None:
        """Copies them back."""
        self.weight.index_copy_(0, ids, self.held)
        for name, rows in self._state.items():
            rows.index_copy_(0, ids, remembered[name])


def _first_state(make_optimizer: _Make, embedding: nn.Embedding) -> dict[str, Tensor]:
    """First value `[1, D]` of every state entry that goes by rows.

    Found by a step of zeros: with no gradient and no weight, every state that torch keeps by rows
    stays as it started.
    """
    zeros = torch.zeros_like(embedding.weight.data[:1])
    probe = nn.Parameter(zeros.clone())
    optimizer = make_optimizer([probe])
    probe.grad = zeros.to_sparse(1) if embedding.sparse else zeros
    optimizer.step()
    return {
        name: value
        for name, value in optimizer.state[probe].items()
        if isinstance(value, Tensor) and value.shape == zeros.shape
    }

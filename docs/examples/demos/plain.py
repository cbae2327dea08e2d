"""A reference optimizer in plain torch: full-size embeddings, but only looked-up rows are stepped.

This module uses nothing else of this package. Each step selects the looked-up rows of weight,
gradient and state with `index_select`, steps them, and writes them back with `index_copy_`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["RowOptimizer"]

_Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class RowOptimizer:
    """Any optimizer with SparseAdam's rule: steps the looked-up rows, with one common step count.

    The model has only torch.nn.Embedding parameters, and every step looks up each embedding.

    Example:
        >>> embedding = nn.Embedding.from_pretrained(torch.zeros(3, 1), freeze=False)
        >>> optimizer = RowOptimizer(embedding, torch.optim.Adam)
        >>> embedding(torch.tensor([2])).sum().backward()
        >>> optimizer.step()
        >>> embedding.weight.detach().flatten()
        tensor([ 0.0000,  0.0000, -0.0010])
    """

    def __init__(self, model: nn.Module, make_optimizer: _Make) -> None:
        embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
        self._tables = [_Table(embedding, make_optimizer) for embedding in embeddings]
        self._optimizer = make_optimizer([table.rows for table in self._tables])

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups."""
        return self._optimizer.param_groups

    def zero_grad(self) -> None:
        """Sets the gradients to None."""
        for table in self._tables:
            table.weight.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Steps the rows looked up since the last step."""
        state = self._optimizer.state
        looked_up = [table.load(state.get(table.rows, {})) for table in self._tables]
        self._optimizer.step()
        for table, ids in zip(self._tables, looked_up, strict=True):
            table.write_back(ids, state[table.rows])


class _Table:
    """An embedding, the optimizer state of all its rows, and a parameter with the step's rows."""

    def __init__(self, embedding: nn.Embedding, make_optimizer: _Make) -> None:
        self.weight = embedding.weight
        first = _first_state(make_optimizer, embedding)
        self._state = {name: row.repeat(len(self.weight), 1) for name, row in first.items()}
        self.rows = nn.Parameter(torch.zeros_like(self.weight.data[:1]))
        self._looked_up: list[Tensor] = []
        embedding.register_forward_pre_hook(self._note)

    def _note(self, embedding: nn.Module, args: tuple[Tensor]) -> None:
        if torch.is_grad_enabled():
            self._looked_up.append(args[0].flatten())

    def load(self, state: dict[str, Any]) -> Tensor:
        """Copies the looked-up rows and their state to the optimizer; returns the unique ids."""
        ids: Tensor = torch.unique(torch.cat(self._looked_up))
        self._looked_up.clear()
        gradient = self.weight.grad
        assert gradient is not None
        if gradient.is_sparse:
            gradient = gradient.coalesce()  # index_select would add in another order
        self.rows.data = self.weight.index_select(0, ids)
        self.rows.grad = gradient.index_select(0, ids)
        for name, rows in self._state.items():
            # Most optimizers create their state in the first step.
            if name in state:
                state[name] = rows.index_select(0, ids)
        return ids

    def write_back(self, ids: Tensor, state: dict[str, Any]) -> None:
        """Copies the stepped rows and their state back."""
        self.weight.index_copy_(0, ids, self.rows)
        for name, rows in self._state.items():
            rows.index_copy_(0, ids, state[name])


def _first_state(make_optimizer: _Make, embedding: nn.Embedding) -> dict[str, Tensor]:
    """The initial value `[1, D]` of each per-row state.

    A step with a zero weight and a zero gradient does not change torch's per-row state.
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

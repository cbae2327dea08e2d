"""The same training in plain torch, to compare with: full-size tensors, touched rows only.

Nothing here uses the rest of the package: per step, `index_select` of the batch's rows of weight
and of every state entry, the optimizer's step on them, `index_copy_` back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from speedtorch.demo.pairs import Batch

__all__ = ["PlainTables"]


class PlainTables:
    """Full-size tensors for the rows of embeddings and for their optimizer state.

    Args:
        model: has the embeddings that `first` names.
        make_optimizer: makes an optimizer of a list of parameters.
        first: first values `[V, D]` of each embedding's table; copied to the model's device.

    Attributes:
        optimizer: made of the model's parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        first: Mapping[str, Tensor],
    ) -> None:
        self.optimizer = make_optimizer(model.parameters())
        self._full: dict[str, tuple[nn.Parameter, Tensor, dict[str, Tensor]]] = {}
        for side, values in first.items():
            parameter: nn.Parameter = getattr(model, side).weight
            sparse: bool = getattr(model, side).sparse
            weight = values.to(parameter.device, copy=True)
            state = {
                name: row.repeat(len(weight), 1)
                for name, row in _first_state(make_optimizer, parameter, sparse=sparse).items()
            }
            self._full[side] = (parameter, weight, state)

    def fetch(self, batch: Batch) -> None:
        """Copies the batch's rows out of the full tensors."""
        for side, (parameter, weight, state) in self._full.items():
            ids = batch.ids(side)
            parameter.data = weight.index_select(0, ids)
            remembered: dict[str, Any] = self.optimizer.state.get(parameter, {})
            for name, rows in state.items():
                # Most optimizers make their state in the first step: it starts by itself then.
                if name in remembered:
                    remembered[name] = rows.index_select(0, ids)

    def store(self, batch: Batch) -> None:
        """Copies them back."""
        for side, (parameter, weight, state) in self._full.items():
            ids = batch.ids(side)
            weight.index_copy_(0, ids, parameter.data)
            for name, rows in state.items():
                rows.index_copy_(0, ids, self.optimizer.state[parameter][name])

    def rows(self, side: str, ids: Tensor) -> Tensor:
        """Rows `[N, D]` of one embedding, on the CPU, for `ids` `[N]` on the CPU."""
        weight = self._full[side][1]
        return weight.index_select(0, ids.to(weight.device)).cpu()


def _first_state(
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    parameter: nn.Parameter,
    *,
    sparse: bool,
) -> dict[str, Tensor]:
    """First value `[1, D]` of every state entry that goes by rows.

    Found by a step of zeros: with no gradient and no weight, every state that torch keeps by rows
    stays as it started.
    """
    zeros = torch.zeros_like(parameter.data[:1])
    probe = nn.Parameter(zeros.clone())
    optimizer = make_optimizer([probe])
    probe.grad = zeros.to_sparse(1) if sparse else zeros
    optimizer.step()
    return {
        name: value
        for name, value in optimizer.state[probe].items()
        if isinstance(value, Tensor) and value.shape == zeros.shape
    }

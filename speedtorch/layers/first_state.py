"""FirstState: the bytes of state that an optimizer's first step makes of a parameter."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedtorch.optim.optimizer_copy import OptimizerCopy
from speedtorch.torch_internals import as_plain

__all__ = ["FirstState"]


class FirstState:
    """Finds out how much memory state takes before there is any.

    A copy of the optimizer steps a parameter of the same shape and dtype on the meta device, which
    has no memory.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._known: dict[tuple[int, torch.Size, torch.dtype], int] = {}
        self._groups: dict[int, int] = {}
        """The numbers of the groups by the ids of their parameters."""

    def nbytes(self, parameter: Tensor) -> int:
        """Bytes of state on the parameter's device; 0 where the copy needs real elements to step.

        Such state counts once it has been made.
        """
        groups = self._optimizer.param_groups
        if len(self._groups) != sum(len(group["params"]) for group in groups):
            self._groups = {id(e): n for n, group in enumerate(groups) for e in group["params"]}
        if (number := self._groups.get(id(parameter))) is None:
            return 0
        kind = number, parameter.shape, parameter.dtype
        if kind not in self._known:
            self._known[kind] = _tried(self._optimizer, parameter)
        return self._known[kind]


def _tried(optimizer: Optimizer, parameter: Tensor) -> int:
    with as_plain():  # under auto() an operation on a parameter loads its unit
        like = torch.empty_like(parameter, device="meta", requires_grad=False)
    # Neither variant changes what is kept; fused kernels refuse the meta device.
    settings = {"fused": False, "foreach": False}
    try:
        with as_plain():
            copy = OptimizerCopy(optimizer, parameter, like, settings, construct=False)
        with torch.random.fork_rng(devices=()):  # the step may draw random numbers of the CPU
            copy.step(like, sparse=False)
    except MemoryError:
        raise
    except Exception:  # of any kind: the optimizer's code has met a tensor without elements
        return 0
    kept = [each for each in copy.state.values() if isinstance(each, Tensor)]
    return sum(each.nbytes for each in kept if each.is_meta)

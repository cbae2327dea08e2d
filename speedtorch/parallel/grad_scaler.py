"""GradScaler: supports rows that are sharded among ranks, and gradients in host memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedtorch.parallel.sharded_rows import ranks_of
from speedtorch.step.trained_rows import rows_of_optimizer
from speedtorch.torch_internals import HostGradScaler

__all__ = ["GradScaler"]


class GradScaler(HostGradScaler):
    """torch.amp.GradScaler for models with sharded rows, and with layers offloaded by a Swapper.

    **Sharded rows:** if one rank finds infinite or NaN gradients, all ranks skip the step. A rank
    has only its own rows' gradients: with torch's scaler, ranks would skip different steps and get
    different scales. unscale_(), or step() without it, all-reduces the result once for each process
    group that shares rows of the optimizer. All ranks must call these in the same order, also
    with an empty batch.

    **Offloaded layers:** gradients may be in host memory while the scale is on the GPU. This class
    waits for the copy of the scale to the host before gradients are divided. Torch's scaler does
    not wait.

    The arguments are the same as for torch.amp.GradScaler.

    Example:
        >>> import speedtorch
        >>> speedtorch.GradScaler("cpu", init_scale=8.0).get_scale()
        8.0
    """

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        held = rows_of_optimizer(optimizer)
        sharded = [(ranks, rows) for rows in held if (ranks := ranks_of(rows)) is not None]
        if not sharded:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        own: dict[int, Tensor] = {}
        for rows in held:
            with rows.lock:
                rows.own_gradient()
            own[id(rows.weight)] = rows.parameter
        groups = [
            {"params": [own.get(id(param), param) for param in group["params"]]}
            for group in optimizer.param_groups
        ]
        of_rows: Any = SimpleNamespace(param_groups=groups)
        found = super()._unscale_grads_(of_rows, inv_scale, found_inf, allow_fp16)
        largest = found_inf.clone()  # `found` is empty if no parameter has a gradient
        for inf in found.values():
            largest = torch.maximum(largest, inf.to(largest.device))
        # Sorted, because the order of parameters may differ among ranks, for example from a set.
        for ranks, rows in sorted(dict(sharded).items(), key=lambda item: item[0].name):
            largest = ranks.all_reduce_max_(largest.to(rows.exchange.held.device))
        return {largest.device: largest}

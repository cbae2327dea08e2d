"""GradScaler: also for rows that ranks share out, and for gradients in host memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedtorch.parallel.sharded_rows import ranks_of
from speedtorch.step.trained_rows import rows_held_by
from speedtorch.torch_internals import HostGradScaler

__all__ = ["GradScaler"]


class GradScaler(HostGradScaler):
    """As torch.amp.GradScaler, also for rows that are shared out, and for units of layers.

    **Rows:** no rank steps if one must not. Each rank has the gradients of its own rows, so that
    ranks would skip different steps, and their scales would part. Here they tell each other, once
    for each optimizer that holds such rows, in unscale_() or else in step(): all ranks call these
    in the same order, also with an empty batch.

    **Layers** that a Swapper moves: their gradients may be in host memory while the scale is on the
    GPU, and are not divided before the scale has come there. Torch's does not wait.

    The arguments are torch's.

    Example:
        >>> import speedtorch
        >>> speedtorch.GradScaler("cpu", init_scale=8.0).get_scale()
        8.0
    """

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        held = rows_held_by(optimizer)
        sharing = [(ranks, each) for each in held if (ranks := ranks_of(each)) is not None]
        if not sharing:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        own: dict[int, Tensor] = {}
        for rows in held:
            with rows.turn:
                rows.own_gradient()
            own[id(rows.weight)] = rows.parameter
        groups = [
            {"params": [own.get(id(each), each) for each in group["params"]]}
            for group in optimizer.param_groups
        ]
        of_rows: Any = SimpleNamespace(param_groups=groups)
        found = super()._unscale_grads_(of_rows, inv_scale, found_inf, allow_fp16)
        most = found_inf.clone()  # where no parameter has a gradient nothing was found
        for each in found.values():
            most = torch.maximum(most, each.to(most.device))
        # Whatever the order of the parameters, which may have been those of a set.
        for ranks, rows in sorted(dict(sharing).items(), key=lambda each: each[0].name):
            most = ranks.most_(most.to(rows.exchange.held.device))
        return {most.device: most}

"""clip_grad_norm_: the norm of a model whose rows are shared out among ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from speedtorch.parallel.ranks import Ranks
from speedtorch.parallel.sharded_rows import ranks_of
from speedtorch.step.trained_rows import rows_of_parameter
from speedtorch.torch_internals import sparse_values

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clips gradients, in place, by the norm of all of them: those of the rows of every rank, too.

    As torch.nn.utils.clip_grad_norm_, which it equals where no rows are shared out. All ranks call
    it; gradients of other parameters are taken to be the same on each, as DistributedDataParallel
    makes them.

    Args:
        parameters: Those whose gradients are clipped.
        max_norm: The most that their norm is after that.
        norm_type: Which norm; inf is that of the largest.
        error_if_nonfinite: Raise where the norm is none.

    Returns:
        The norm before.

    Raises:
        RuntimeError: The norm is infinite or NaN, and that is asked to be an error; nothing has
            changed.
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    whole: list[Tensor] = []
    own: dict[Ranks, list[Tensor]] = {}
    device = None
    for parameter in given:
        rows, gradient = rows_of_parameter(parameter), parameter.grad
        ranks = None if rows is None else ranks_of(rows)
        found = whole if ranks is None else own.setdefault(ranks, [])
        device = parameter.device if device is None else device
        if gradient is not None:
            if gradient.is_sparse:  # rows that several lookups name count once
                gradient = parameter.grad = gradient.coalesce()
                gradient = sparse_values(gradient)
            found.append(gradient)
    largest = norm_type == float("inf")

    def power_of(gradients: list[Tensor]) -> Tensor:
        norm = torch.nn.utils.get_total_norm(gradients, norm_type).to(device)
        return norm if largest else norm**norm_type

    total = power_of(whole)
    for ranks, gradients in own.items():
        part = power_of(gradients)
        total = torch.maximum(total, ranks.most(part)) if largest else total + ranks.summed(part)
    norm = total if largest else total ** (1.0 / norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"clip_grad_norm_: the norm of order {norm_type} of the gradients is {norm.item()}, so"
            " that they cannot be clipped; pass error_if_nonfinite=False to multiply them by it"
        )
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in (*whole, *(each for gradients in own.values() for each in gradients)):
        gradient.mul_(factor.to(gradient.device))
    return norm

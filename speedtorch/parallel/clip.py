"""clip_grad_norm_: the norm of a model whose rows are shared out among ranks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

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
    foreach: bool | None = None,
) -> Tensor:
    """Clips gradients, in place, by the norm of all of them: those of the rows of every rank, too.

    As `torch.nn.utils.clip_grad_norm_`, which it equals where no rows are shared out. All ranks
    call it; gradients of other parameters are taken to be the same on each, as
    DistributedDataParallel makes them, or shared out by fully_shard.

    Args:
        parameters: Those whose gradients are clipped.
        max_norm: The most that their norm is after that.
        norm_type: Which norm; inf is that of the largest.
        error_if_nonfinite: Raise where the norm is none.
        foreach: Use torch's functions of many tensors at once; None where they are faster.

    Returns:
        The norm before.

    Raises:
        RuntimeError: The norm is infinite or NaN, and that is asked to be an error; nothing has
            changed.

    Example:
        >>> import torch, speedtorch
        >>> layer = torch.nn.Linear(2, 2)
        >>> layer(torch.full((3, 2), 100.0)).sum().backward()
        >>> norm = clip_grad_norm_(layer.parameters(), max_norm=1.0)
        >>> after = torch.stack([each.grad.norm() for each in layer.parameters()]).norm()
        >>> bool(norm > 400), round(after.item(), 3)
        (True, 1.0)
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norm_type = float(norm_type)
    whole: list[Tensor] = []
    own: dict[Ranks, list[Tensor]] = {}
    places: dict[Ranks, tuple[torch.device, torch.dtype]] = {}
    """Where ranks send their parts from, in a dtype that all of them know without a gradient."""
    for parameter in given:
        rows = rows_of_parameter(parameter)
        ranks = None if rows is None else ranks_of(rows)
        found = whole if ranks is None else own.setdefault(ranks, [])
        if rows is None or ranks is None:
            gradient = parameter.grad
        else:
            with rows.turn:
                gradient = rows.own_gradient()
            if gradient is not None and gradient.is_sparse:  # a row that is named twice counts once
                gradient = rows.parameter.grad = gradient.coalesce()
                gradient = sparse_values(gradient)
        if gradient is not None and gradient.numel():  # torch finds no largest element of none
            found.append(gradient)
        if ranks is not None:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            _, before = places.get(ranks, (None, dtype))
            places[ranks] = parameter.device, torch.promote_types(dtype, before)
    if not own:
        settings = (max_norm, norm_type, error_if_nonfinite, foreach)
        return torch.nn.utils.clip_grad_norm_(given, *settings)
    largest, device = norm_type == float("inf"), given[0].device

    def power_of(gradients: list[Tensor]) -> Tensor:
        norm = torch.nn.utils.get_total_norm(gradients, norm_type, foreach=foreach)
        norm = (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).to(device)
        norm = norm.to(torch.promote_types(norm.dtype, torch.float32))  # which powers fit into
        return norm if largest else norm**norm_type

    parts = [power_of(gradients) for gradients in _apart(whole)]
    for ranks in sorted(own, key=lambda each: each.name):  # whatever the order of the parameters
        device_of_rows, dtype = places[ranks]
        part = power_of(own[ranks]).to(device_of_rows, dtype)
        parts.append((ranks.most_(part) if largest else ranks.summed_(part)).to(device))
    total = reduce(torch.maximum if largest else torch.add, parts)
    norm = total if largest else total ** (1.0 / norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"clip_grad_norm_: the norm of order {norm_type} of the gradients is {norm.item()}, so"
            " that they cannot be clipped; pass error_if_nonfinite=False to multiply them by it"
        )
    for parameters in _apart(given):
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach)
    return norm


def _apart(tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors of this rank, and those of fully_shard: torch computes with both, not at once."""
    shared = [each for each in tensors if hasattr(each, "full_tensor")]
    return [each for each in tensors if not hasattr(each, "full_tensor")], shared

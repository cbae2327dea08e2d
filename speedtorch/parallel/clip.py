"""clip_grad_norm_: clips gradients of a model whose rows are sharded among ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

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
    """Clips gradients in place by their total norm, which includes the rows of every rank.

    Without sharded rows this is `torch.nn.utils.clip_grad_norm_`. With sharded rows all ranks must
    call this function together. Gradients of other parameters must be the same on each rank, as
    with DistributedDataParallel, or be sharded by fully_shard.

    Args:
        parameters: The parameters whose gradients are clipped.
        max_norm: The maximum norm of the gradients.
        norm_type: The order of the norm; inf is the maximum norm. With sharded rows the order must
            be positive.
        error_if_nonfinite: Raise if the norm is infinite or NaN.
        foreach: Use torch's foreach functions; None: use them on devices that support them.

    Returns:
        The norm before clipping.

    Raises:
        ValueError: Rows are sharded, and `norm_type` is not positive.
        RuntimeError: The norm is infinite or NaN and `error_if_nonfinite` is set; nothing has
            changed.

    Example:
        >>> import torch, speedtorch
        >>> layer = torch.nn.Linear(2, 2)
        >>> layer(torch.full((3, 2), 100.0)).sum().backward()
        >>> norm = clip_grad_norm_(layer.parameters(), max_norm=1.0)
        >>> after = torch.stack([param.grad.norm() for param in layer.parameters()]).norm()
        >>> bool(norm > 400), round(after.item(), 3)
        (True, 1.0)
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norm_type = float(norm_type)
    whole: list[Tensor] = []
    own: dict[Ranks, list[Tensor]] = {}
    places: dict[Ranks, tuple[torch.device, torch.dtype]] = {}
    """The device and dtype of collectives, the same whether or not a rank has gradients."""
    for parameter in given:
        rows = rows_of_parameter(parameter)
        ranks = None if rows is None else ranks_of(rows)
        if ranks is not None and not norm_type > 0:  # rows without a gradient would count
            raise ValueError(
                "clip_grad_norm_: with sharded rows norm_type must be a positive number or inf, got"
                f" {norm_type}. No gradient has changed."
            )
        found = whole if ranks is None else own.setdefault(ranks, [])
        if rows is None or ranks is None:
            gradient = parameter.grad
        else:
            with rows.lock:
                gradient = rows.own_gradient()
            if gradient is not None and gradient.is_sparse:  # sums the entries of duplicate rows
                gradient = rows.parameter.grad = gradient.coalesce()
                gradient = sparse_values(gradient)
        if gradient is not None and gradient.numel():  # torch has no inf norm of an empty tensor
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
        """The norm to the power of its order, or the norm itself if the order is inf."""
        if not gradients:  # torch's norm would be copied from the CPU, which no capture can contain
            return torch.zeros((), device=device)
        norm = torch.nn.utils.get_total_norm(gradients, norm_type, foreach=foreach)
        norm = _full_tensor(norm, largest) if hasattr(norm, "full_tensor") else norm
        norm = norm.to(device, torch.promote_types(norm.dtype, torch.float32))  # float16 overflows
        return norm if largest else norm**norm_type

    parts = [power_of(gradients) for gradients in _apart(whole)]
    for ranks in sorted(own, key=lambda ranks: ranks.name):  # the order may differ among ranks
        device_of_rows, dtype = places[ranks]
        part = power_of(own[ranks]).to(device_of_rows, dtype)
        part = _maximum(part, ranks.all_reduce_max_) if largest else ranks.all_reduce_sum_(part)
        parts.append(part.to(device))
    total = reduce(torch.maximum if largest else torch.add, parts)
    norm = total if largest else total ** (1.0 / norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"clip_grad_norm_: the gradients' norm of order {norm_type} must be finite, got"
            f" {norm.item()}. No gradient has changed. Pass error_if_nonfinite=False to clip them"
            " anyway."
        )
    for parameters in _apart(given):
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach)
    return norm


def _full_tensor(norm: Any, is_maximum: bool) -> Any:
    """All-reduces the norm of DTensors."""

    def all_reduce(local: Tensor) -> Any:
        """All-reduces numbers as the placement of the norm requires."""
        return norm.from_local(local, norm.device_mesh, norm.placements).full_tensor()

    return _maximum(norm.to_local(), all_reduce) if is_maximum else norm.full_tensor()


def _maximum(norm: Tensor, all_reduce_max: Callable[[Tensor], Tensor]) -> Tensor:
    """The maximum norm of the ranks, or NaN if a norm is NaN; gloo and NCCL drop NaN."""
    reduced = all_reduce_max(torch.stack([norm, norm.isnan().to(norm.dtype)]))
    return reduced[0].masked_fill(reduced[1].bool(), float("nan"))


def _apart(tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Splits plain tensors from DTensors, because torch cannot mix both in one call."""
    shared = [tensor for tensor in tensors if hasattr(tensor, "full_tensor")]
    return [tensor for tensor in tensors if not hasattr(tensor, "full_tensor")], shared

"""What torch.compile, torch.export and autograd know of the ops: fake kernels and gradients.

Importing this registers them; functions.py has loaded the library that holds the ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from speedtorch.ops import functions  # noqa: F401

__all__: list[str] = []


def _plan_rows_fake(index: Tensor, rows: int) -> list[Tensor]:
    count = index.numel()
    lengths = (count, count, count, count + 1, 8)
    return [index.new_empty(length, dtype=torch.int64) for length in lengths]


def _refuse_meta_mix(*args: Any, **kwargs: object) -> None:
    """Fake kernel of ops that return nothing; a meta tensor has no rows for a real one."""
    parts = (part if isinstance(part, list | tuple) else (part,) for part in args)
    if len({each.is_meta for part in parts for each in part if isinstance(each, Tensor)}) > 1:
        raise ValueError("speedtorch: meta tensors cannot be mixed with real ones in one op")


def _pinned_gather_fake(table: Tensor, index: Tensor, plan: object = None) -> Tensor:
    _refuse_meta_mix(table, index)
    return index.new_empty((*index.shape, *table.shape[1:]), dtype=table.dtype)


def _sum_rows_fake(
    rows: Tensor, plan: list[Tensor], table_rows: int, begin: int, distinct: int
) -> Tensor:
    return rows.new_empty((distinct, *rows.shape[1:]))


def _compare_rows_fake(
    named: Tensor, named_status: Tensor, held: Tensor, held_status: Tensor, padding: int
) -> list[Tensor]:
    lengths = [named.numel()] * 4 + [held.numel()] * 2 + [3]
    return [named.new_empty(length) for length in lengths]


_FAKE_KERNELS: dict[str, Callable[..., Any]] = {
    "plan_rows": _plan_rows_fake,
    "pinned_gather": _pinned_gather_fake,
    "pinned_gather_detached": _pinned_gather_fake,
    "pinned_gather.out": _refuse_meta_mix,
    "pinned_gather.planned": _pinned_gather_fake,
    "pinned_gather.planned_out": _refuse_meta_mix,
    "sum_rows": _sum_rows_fake,
    "compare_rows": _compare_rows_fake,
    "pinned_copy": _refuse_meta_mix,
    "pinned_scatter": _refuse_meta_mix,
    "pinned_scatter.planned": _refuse_meta_mix,
    "optimizer_state_swap": _refuse_meta_mix,
    "optimizer_state_swap.planned": _refuse_meta_mix,
    "optimizer_state_swap.placed": _refuse_meta_mix,
}
for _name, _kernel in _FAKE_KERNELS.items():
    torch.library.register_fake(f"speedtorch::{_name}", _kernel)


def _remember_index(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    table, index, *plans = inputs
    ctx.save_for_backward(index)
    ctx.table_shape, ctx.table_device = table.shape, table.device
    ctx.without_gradient = [None, *([None] * len(plan) for plan in plans)]


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (index,) = ctx.saved_tensors
    rows = index.reshape(1, -1).to(device=ctx.table_device, dtype=torch.int64)
    values = grad.reshape(rows.shape[1], *ctx.table_shape[1:]).to(ctx.table_device)
    gradient = torch.sparse_coo_tensor(rows, values, ctx.table_shape, check_invariants=False)
    return gradient, *ctx.without_gradient


for _name in ("pinned_gather", "pinned_gather.planned"):
    torch.library.register_autograd(
        f"speedtorch::{_name}", _gather_backward, setup_context=_remember_index
    )

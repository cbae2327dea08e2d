"""The ops as functions: checks of ids and shapes, fake kernels and gradients."""

from speedtorch.ops.functions import (
    optimizer_state_swap,
    pinned_copy,
    pinned_gather,
    pinned_scatter,
    plan_rows,
    pool_rows,
    sum_rows,
    synchronize,
    table_ids,
)

__all__ = [
    "optimizer_state_swap",
    "pinned_copy",
    "pinned_gather",
    "pinned_scatter",
    "plan_rows",
    "pool_rows",
    "sum_rows",
    "synchronize",
    "table_ids",
]

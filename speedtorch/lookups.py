"""How lookups reach the rows that a step holds through autograd."""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from speedtorch.ops import pinned_gather, sum_rows
from speedtorch.planned_batch import PlannedBatch

__all__ = ["GradientSink", "RowsOfStep", "SummedLookup", "Token", "replace_rows"]


def replace_rows(parameter: Tensor, rows: Tensor) -> None:
    """Makes a parameter hold other rows, in another number perhaps.

    Args:
        parameter: `[any, ...]`; a gradient of another shape is dropped.
        rows: `[rows, ...]`, same dtype and device; not copied.
    """
    if parameter.grad is not None and parameter.grad.shape != rows.shape:
        parameter.grad = None
    if parameter.shape != rows.shape:
        # A graph that is still alive (a loss kept for logging) holds the node that accumulates the
        # gradient, and that node the old shape. Another dtype in between makes torch drop it.
        parameter.data = _of_another_dtype(parameter.dtype, parameter.device)
    parameter.data = rows
    # A backward through a graph of an earlier batch would compute with these rows: let it raise.
    torch.autograd.graph.increment_version(parameter)


@cache
def _of_another_dtype(dtype: torch.dtype, device: torch.device) -> Tensor:
    other = torch.float32 if dtype == torch.float64 else torch.float64
    return torch.empty(0, dtype=other, device=device)


class Token:
    """Lives as long as a graph may still bring a gradient of its lookup."""


class GradientSink(Protocol):
    """What gets the gradients of held rows.

    Attributes:
        lookups: a token for each lookup whose gradient may still come.
    """

    lookups: WeakSet[Token]

    def add_gradient(self, gradient: Tensor, held: Tensor, step: int) -> None:
        """Adds the gradient of the rows held in a step."""


class RowsOfStep(torch.autograd.Function):
    """The held rows as the operand of a lookup; their gradient goes to the sink.

    torch's own node for a parameter's gradient knows one shape for its lifetime. The rows of a step
    become more with each lookup, so their gradient takes this way round it.
    """

    @staticmethod
    def forward(
        ctx: Any, parameter: Tensor, rows: list[Tensor], held: Tensor, sink: GradientSink, step: int
    ) -> Tensor:
        """Returns the one of `rows` as computed from the parameter; see `Swapper.lookup`."""
        ctx.held, ctx.sink, ctx.step, ctx.token = held, sink, step, Token()
        sink.lookups.add(ctx.token)
        return rows[0]  # in a list, or autograd would take the result for a view of an input

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        """Hands the gradient on.

        Raises:
            NotImplementedError: the gradient is to be differentiated itself.
        """
        _check_once(gradient)
        ctx.token = None
        ctx.sink.add_gradient(gradient, ctx.held, ctx.step)
        return None, None, None, None, None


class SummedLookup(torch.autograd.Function):
    """Rows by their places, whose gradients are added up by the plan of their batch.

    What torch's embedding computes, in a third of the time on a GPU: the batch is sorted already.
    """

    @staticmethod
    def forward(
        ctx: Any,
        parameter: Tensor,
        rows: Tensor,
        batch: PlannedBatch,
        part: int,
        table_rows: int,
        sink: GradientSink,
        step: int,
    ) -> Tensor:
        """Returns the rows of a part of the batch, `[*ids, ...]`."""
        ctx.batch, ctx.part, ctx.table_rows = batch, part, table_rows
        ctx.sink, ctx.step, ctx.token = sink, step, Token()
        sink.lookups.add(ctx.token)
        return pinned_gather(rows, batch.local(part))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        """Adds the gradient up and hands it on.

        Raises:
            NotImplementedError: the gradient is to be differentiated itself.
        """
        _check_once(gradient)
        ctx.token = None
        batch: PlannedBatch = ctx.batch
        ids = gradient.numel() // max(1, gradient.shape[-1])
        summed = sum_rows(
            gradient.reshape(ids, gradient.shape[-1]).contiguous(),
            batch.plan,
            ctx.table_rows,
            begin=batch.begin(ctx.part),
            distinct=batch.distinct,
        )
        ctx.sink.add_gradient(summed, batch.ids, ctx.step)
        return (None,) * 7


def _check_once(gradient: Tensor) -> None:
    if torch.is_grad_enabled() and gradient.requires_grad:
        raise NotImplementedError(
            "gradients of gradients do not go through an Embedding's rows; use torch.nn"
        )

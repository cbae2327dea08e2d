"""Adagrad with one number of state for each row of a parameter.

A row's result does not depend on the other rows of the gradient, so that a batch of rows can be
stepped alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from speedtorch.torch_internals import (
    foreach_add,
    foreach_add_,
    foreach_addcdiv_,
    foreach_copy_,
    foreach_mul,
    foreach_neg,
    foreach_sqrt,
    sparse_indices,
    sparse_values,
)

__all__ = ["RowWiseAdagrad"]

# A sum of many small numbers in 16 bits stops growing after a few hundred of them.
_SUM_DTYPES = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}

# torch sums fewer rows than these in another order. On the CPU several threads share a single row
# of more than 32,768 elements. On a GPU a block of 512 threads shares 16 rows or fewer.
_FEWEST_ROWS, _FEWEST_ROWS_ON_GPU = 2, 16


class RowWiseAdagrad(Optimizer):
    """Adagrad with one number of state per row, the sum of its gradients' mean squares.

    The first dimension of a parameter counts its rows. A step updates a row `w` with the gradient
    `g`, both with D elements, and the row's number `sum`:

    - `g = g + weight_decay * w`, with `-g` instead of `g` for `maximize`;
    - `sum = sum + (g * g).mean()`;
    - `w = w - lr / (1 + (step - 1) * lr_decay) * g / (sqrt(sum) + eps)`.

    Without weight decay a row with a zero gradient does not change. With 128 float32 columns a row
    and its state use 516 bytes (528 in an attached table), and 1,024 with torch.optim.Adagrad. The
    state of a parameter `[N, ...]` is `sum`, `[N, 1]`, and the count `step`. For 16-bit parameters
    the sums are float32, and a step is computed in float32 and rounded once.

    FBGEMM's EXACT_ROWWISE_ADAGRAD with L2 weight decay and torchrec's RowWiseAdagrad have the same
    update rule; FBGEMM has no `lr_decay`. The rule is Adagrad (Duchi, Hazan and Singer, 2011) with
    one learning rate per row.

    Sparse gradients (torch.nn.Embedding with sparse=True) and their weight decay change only the
    rows that the gradient names. A speedtorch.Embedding needs speedtorch.attach().

    Args:
        params: parameters `[N, ...]` of float32, float64, bfloat16 or float16, named parameters, or
            dicts of parameter groups. A parameter of one dimension has one element per row.
        lr: learning rate, at least 0: a number or a tensor of one element.
        lr_decay: each step after the first adds this number to the divisor of the learning rate,
            which begins at 1; at least 0.
        weight_decay: L2 penalty, at least 0.
        initial_accumulator_value: the first `sum` of each row, at least 0.
        eps: is added to the square root of `sum`, at least 0. With 0 a stepped row whose `sum` is 0
            becomes NaN, as with torch.optim.Adagrad.
        foreach: whether torch's foreach functions step the parameters together; by default for
            parameters on a GPU. The results are the same. Temporary copies of all gradients of a
            group use memory.
        maximize: whether the objective is maximized.
        capturable: whether a CUDA graph can repeat the step. `step` is then on the parameter's
            device, and the host does not wait for the GPU. `lr` may be a tensor on that device.

    Raises:
        TypeError: an option or a parameter is of another type or dtype.
        ValueError: an option is negative or NaN, `lr` has several elements, or a parameter has no
            dimension. step() raises ValueError if a sparse gradient names elements, not rows.

    Example:
        >>> import speedtorch, torch
        >>> embedding = speedtorch.Embedding(1000, 4)
        >>> optimizer = speedtorch.optim.RowWiseAdagrad(embedding.parameters(), lr=0.1)
        >>> speedtorch.attach(optimizer, embedding)
        >>> embedding(torch.tensor([7, 7, 999])).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state_dict()["state"][0]["sum"][[6, 7, 999]]
        tensor([[0.], [4.], [1.]])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        *,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
            "foreach": foreach,
            "maximize": maximize,
            "capturable": capturable,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as torch does, and checks its options and parameters."""
        super().add_param_group(param_group)
        try:
            _check_options(self.param_groups[-1])
            for parameter in self.param_groups[-1]["params"]:
                _check_parameter(parameter)
        except BaseException:
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads as torch does, but keeps the float32 sums of 16-bit parameters unrounded."""
        loaded: dict[str, Any] = {}

        def restore_sums(optimizer: Optimizer) -> None:
            """Replaces the sums that torch has rounded to 16 bits."""
            numbers = _parameters(loaded["param_groups"])
            for number, parameter in zip(numbers, _parameters(optimizer.param_groups), strict=True):
                saved = loaded["state"].get(number, {}).get("sum")
                dtype = _SUM_DTYPES[parameter.dtype]
                if isinstance(saved, Tensor) and dtype != parameter.dtype:
                    # Copies, because steps write to the sums in place.
                    sums = saved.to(parameter.device, dtype, copy=True)
                    optimizer.state[parameter]["sum"] = sums

        # Runs after the user's pre-hooks, which may replace the state, and before the user's
        # post-hooks, which may read it.
        handles = (
            self.register_load_state_dict_pre_hook(lambda _, given: loaded.update(given)),
            self.register_load_state_dict_post_hook(restore_sums, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Steps every parameter that has a gradient.

        Args:
            closure: computes the loss and its gradients again, and returns the loss.

        Returns:
            The loss that the closure returns, or None without a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            together: dict[tuple[torch.device, torch.dtype, torch.dtype], list[_Rows]] = {}
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                state = self._state_of(parameter, group)
                sums, step = state["sum"], state["step"]
                step += 1
                rows = _Rows(parameter, gradient, sums, _rate(step, group))
                if parameter.numel() == 0:
                    continue
                foreach = parameter.is_cuda if group["foreach"] is None else group["foreach"]
                if gradient.is_sparse:
                    _step_named(rows, group)
                elif foreach:
                    kind = parameter.device, parameter.dtype, sums.dtype
                    together.setdefault(kind, []).append(rows)
                else:
                    _step_rows([rows], group)
            for alike in together.values():
                _step_rows(alike, group)
        return loss

    def _state_of(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Returns the state of a parameter; the first step creates it."""
        state: dict[str, Any] = self.state[parameter]
        if not state:
            device = parameter.device if group["capturable"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state["sum"] = torch.full(
                (len(parameter), 1),
                group["initial_accumulator_value"],
                dtype=_SUM_DTYPES[parameter.dtype],
                device=parameter.device,
            )
        return state


def _rate(step: Tensor, group: dict[str, Any]) -> float | Tensor:
    """The learning rate of a step. If capturable, the host does not wait for the GPU."""
    rate: float | Tensor = group["lr"]
    decay: float = group["lr_decay"]
    if not group["capturable"]:
        return float(rate) / (1 + (step.item() - 1) * decay) if decay else float(rate)
    if isinstance(rate, Tensor):
        rate = rate.reshape(())
    return rate / (1 + (step - 1) * decay) if decay else rate


class _Rows(NamedTuple):
    """The tensors that a step updates, with their gradient and learning rate."""

    parameter: Tensor
    """`[N, ...]`."""
    gradient: Tensor
    """`[N, ...]`."""
    sums: Tensor
    """`[N, 1]`, in the dtype of the computation."""
    rate: float | Tensor
    """The learning rate."""


def _step_rows(rows: list[_Rows], group: dict[str, Any]) -> None:
    """Steps the rows of dense gradients, of parameters of one device and dtype."""
    dtype = rows[0].sums.dtype
    sums = [part.sums for part in rows]
    weights = [part.parameter.to(dtype) for part in rows]
    gradients = [part.gradient.to(dtype) for part in rows]
    if group["maximize"]:
        gradients = foreach_neg(gradients)
    if group["weight_decay"]:
        gradients = foreach_add(gradients, weights, alpha=group["weight_decay"])
    squares = foreach_mul(gradients, gradients)
    foreach_add_(sums, [_mean_of_rows(square) for square in squares])
    divisors = foreach_sqrt([_beside(*pair) for pair in zip(sums, weights, strict=True)])
    foreach_add_(divisors, group["eps"])
    if isinstance(rows[0].rate, Tensor):
        gradients = foreach_mul(gradients, [-part.rate for part in rows])
        foreach_addcdiv_(weights, gradients, divisors)
    else:
        foreach_addcdiv_(weights, gradients, divisors, [-part.rate for part in rows])
    if weights[0] is not rows[0].parameter:
        foreach_copy_([part.parameter for part in rows], weights)


def _step_named(rows: _Rows, group: dict[str, Any]) -> None:
    """Steps the rows that a sparse gradient names."""
    parameter, gradient, sums, _ = rows
    if gradient.sparse_dim() != 1:
        raise ValueError(
            f"RowWiseAdagrad: a sparse gradient of shape {list(gradient.shape)} must name rows"
            f" (sparse_dim 1), got sparse_dim {gradient.sparse_dim()}"
        )
    gradient = gradient.coalesce()
    ids, values = sparse_indices(gradient)[0], sparse_values(gradient)
    if values.numel() == 0:
        return
    weights, of_rows = parameter.index_select(0, ids), sums.index_select(0, ids)
    _step_rows([_Rows(weights, values, of_rows, rows.rate)], group)
    parameter.index_copy_(0, ids, weights)
    sums.index_copy_(0, ids, of_rows)


def _mean_of_rows(values: Tensor) -> Tensor:
    """Row means `[N, 1]` of `[N, ...]`; the bits of each mean depend only on its row."""
    # torch sums strided memory in another order.
    values = values.contiguous().view(len(values), -1)
    least, count = _FEWEST_ROWS_ON_GPU if values.is_cuda else _FEWEST_ROWS, len(values)
    if count < least:
        values = values.repeat(-(-least // count), 1)
    return values.mean(1, keepdim=True)[:count]


def _beside(sums: Tensor, rows: Tensor) -> Tensor:
    """Reshapes `[N, 1]` to broadcast along `[N, ...]`."""
    return sums.view(len(rows), *[1] * (rows.dim() - 1))


def _parameters(groups: Sequence[dict[str, Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(group["params"] for group in groups))


def _check_options(group: dict[str, Any]) -> None:
    """Raises TypeError or ValueError for an option of a wrong type or value."""
    rate = group["lr"]
    if isinstance(rate, Tensor) and rate.numel() != 1:
        raise ValueError(
            "RowWiseAdagrad: lr must be a number or a tensor of one element, got a tensor of"
            f" {rate.numel()} elements"
        )
    for name in ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"):
        value = group[name]
        is_number = isinstance(value, Real) or (name == "lr" and isinstance(value, Tensor))
        if not is_number:
            raise TypeError(
                f"RowWiseAdagrad: {name} must be a number, got {value!r} ({type(value).__name__})"
            )
        if not value >= 0:  # NaN is not
            raise ValueError(f"RowWiseAdagrad: {name} must be at least 0, got {value}")
    for name, allowed in {
        "foreach": (None, True, False),
        "maximize": (True, False),
        "capturable": (True, False),
    }.items():
        if not any(group[name] is value for value in allowed):
            raise TypeError(
                f"RowWiseAdagrad: {name} must be one of {', '.join(map(str, allowed))}, got"
                f" {group[name]!r}"
            )


def _check_parameter(parameter: Tensor) -> None:
    if parameter.dtype not in _SUM_DTYPES:
        allowed = ", ".join(map(str, _SUM_DTYPES))
        raise TypeError(
            f"RowWiseAdagrad: the dtype of a parameter must be one of {allowed}, got"
            f" {parameter.dtype} of shape {list(parameter.shape)}"
        )
    if parameter.dim() == 0:
        raise ValueError(
            "RowWiseAdagrad: a parameter must have rows (one dimension or more), got one without"
            " dimensions"
        )

"""ParameterView: a module's parameter as a view of the rows that a step holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from speedtorch.step.row_store import Fields
from speedtorch.step.step import Rows, Step
from speedtorch.torch_internals import (
    TensorWeakRef,
    as_plain,
    of_another_dtype,
    sparse_values,
    version_of,
)

__all__ = ["OptimizerState", "ParameterView", "replace_rows"]


class OptimizerState(Protocol):
    """The state that an attached optimizer keeps of the held rows."""

    sparse: bool
    """Whether the optimizer takes sparse gradients only."""

    @property
    def loading(self) -> object | None:
        """What complete() may have to finish."""

    def rows(self) -> Rows:
        """The state of the held rows, field by field."""

    def hold(self, rows: Sequence[Tensor]) -> None:
        """Puts the state of other rows in its place."""

    def complete(self) -> None:
        """Finishes loading all rows' state where an exception has interrupted that."""


class Kept(NamedTuple):
    """What keeps the state of the held rows, and all their fields; another where they change."""

    state: OptimizerState | None
    fields: Fields


class ParameterView:
    """Gives the rows of a step to the parameter and the optimizer, and takes them back.

    `parameter` has their memory, on the device where they are held. Everything here follows from
    the step and can be set again; nothing is read back before all of it is set.
    """

    def __init__(self, name: str, parameter: torch.nn.Parameter) -> None:
        self._name = name
        self.parameter = parameter
        self._reference: Callable[[], torch.nn.Parameter | None] = lambda: None
        self.kept = Kept(None, {"weight": (tuple(parameter.shape[1:]), parameter.dtype)})
        self.rows: Rows | None = None
        """Those of the step that the parameter has."""
        self.version = self._pointer = 0
        """Of the parameter; one that was written to since mark() has another."""
        self._asked: tuple[Tensor, int, bool] | None = None
        """The gradient that a zero_grad() asked for, its version then, and whether it was zeros."""
        self._lent: tuple[Tensor, int] | None = None
        """The gradient that an optimizer's step() was given, and its version then."""
        self._divisor = 1
        """What the sum of gradients is divided by, once: before a step or a read of it."""
        self._is_sum = False
        """Whether the gradient, if there is one, has yet to be divided."""

    def keep_alive(self, parameter: torch.nn.Parameter | None) -> None:
        """Keeps the parameter alive, or with None no longer: the parameter keeps the rows alive."""
        if parameter is not None:
            vars(self)["parameter"] = parameter  # first: an interrupt leaves one of both classes
            self.__class__ = ParameterView
        else:
            self._reference = TensorWeakRef(self.parameter)
            self.__class__ = _WeakParameterView
            vars(self).pop("parameter", None)

    def keep(self, state: OptimizerState | None, fields: Fields) -> None:
        """Lets another object keep the state of the rows, or none."""
        self.kept = Kept(state, {"weight": self.kept.fields["weight"], **fields})

    def show(self, step: Step) -> None:
        """Makes the parameter and the optimizer see the rows of a step, if they do not."""
        if self.rows is step.rows:
            return
        parameter, state = self.parameter, self.kept.state
        parameter.grad = None
        replace_rows(parameter, step.rows[0])
        if state is not None:
            state.hold(step.rows[1:])
        parameter.grad = step.gradient
        self.mark()
        self.rows = step.rows

    def rows_of(self, step: Step) -> Rows:
        """The rows of the step, as the optimizer has them now.

        Raises RuntimeError if they were resized.
        """
        rows, state = [self.parameter.detach()], self.kept.state
        if state is not None:
            rows += state.rows()
        for number, (each, memory) in enumerate(zip(rows, step.rows, strict=True)):
            if each.shape != memory.shape:
                raise RuntimeError(
                    f"{self._name}: the held rows have the shape {list(each.shape)}, expected"
                    f" {list(memory.shape)}; an optimizer must not resize them"
                )
            rows[number] = each.contiguous()
        return rows

    def change(self, step: Step, change: Callable[[Rows], None]) -> None:
        """Lets the rows of the step be changed in place, as the optimizer has them."""
        rows, state = [self.parameter.detach()], self.kept.state
        rows += [] if state is None else state.rows()
        contiguous = self.rows_of(step)
        change(contiguous)
        for own, each in zip(rows, contiguous, strict=True):
            if own.data_ptr() != each.data_ptr():
                own.copy_(each)
        self.mark()

    def put_back(self, step: Step) -> None:
        """Makes them those of the step again after other memory was put in their place."""
        replace_rows(self.parameter, step.rows[0])
        if self.kept.state is not None:
            self.kept.state.hold(step.rows[1:])
        self.mark()

    def mark(self) -> None:
        """What is written to the parameter from now on is a change."""
        self.version, self._pointer = version_of(self.parameter), self.parameter.data_ptr()

    def was_written(self) -> bool:
        """Whether the parameter was written to since the mark, or given other memory."""
        parameter = self.parameter
        return version_of(parameter) != self.version or parameter.data_ptr() != self._pointer

    def note_zero_grad(self) -> None:
        """Called when a zero_grad() asks for the gradient, which it may fill with zeros then."""
        gradient = self.parameter.grad
        zeros = not self.has_gradient()
        self._asked = None if gradient is None else (gradient, version_of(gradient), zeros)

    def note_gradient(self) -> None:
        """Called when the parameter was given another gradient, but by no zero_grad()."""
        self._asked = None

    def summand(self, added: Tensor) -> Tensor:
        """What is to be added to the gradient for one that a lookup brings."""
        if self._divisor == 1:
            return added
        if not self._is_sum and not self.has_gradient():
            self._is_sum = True
        return added if self._is_sum else _divided(added, self._divisor)

    def divide(self) -> None:
        """Divides the gradient if it is a sum that has yet to be divided."""
        if not self._is_sum:
            return
        with as_plain():  # a read of the weight's gradient would divide it, too
            # Not zeros of zero_grad(), which stay the same tensor.
            if self.has_gradient() and (gradient := self.parameter.grad) is not None:
                self.parameter.grad = _divided(gradient, self._divisor)
                self._is_sum = False

    def divide_by(self, count: int) -> None:
        """Gives optimizers and readers gradients divided by this number, once each."""
        self._divisor = count

    def note_lent(self, gradient: Tensor | None) -> None:
        """Records the gradient before an optimizer's step(), which hides the parameter's hooks."""
        self._lent = None if gradient is None else (gradient, version_of(gradient))

    def note_left(self) -> None:
        """Detects zeros after a step() that raised: its parameter still hid zero_grad() from us."""
        lent, self._lent = self._lent, None
        gradient = self.parameter.grad
        if lent is None or gradient is not lent[0] or version_of(gradient) == lent[1]:
            return
        if not _any(gradient):
            self._asked = (gradient, version_of(gradient), True)

    def has_gradient(self) -> bool:
        """Whether there is a gradient that no zero_grad() has filled with zeros.

        Zeros that were written to since are read, for which a GPU is waited: clipping leaves zeros.
        """
        if (gradient := self.parameter.grad) is None:
            return False
        if self._asked is None or self._asked[0] is not gradient:
            return True
        _, version, zeros = self._asked
        writes = version_of(gradient) - version
        if writes > 1:
            return _any(gradient)
        return writes == 0 and not zeros


class _WeakParameterView(ParameterView):
    """ParameterView with a weak reference to the parameter, which owns this object.

    A subclass, because __getattr__ in ParameterView would slow each of its attribute accesses.
    """

    @property
    def parameter(self) -> torch.nn.Parameter:  # type: ignore[override]
        """RuntimeError if it is gone, and nothing can train."""
        if (parameter := self._reference()) is None:
            raise RuntimeError(f"{self._name}: its weight is gone, and its module before it")
        return parameter


def _divided(gradient: Tensor, divisor: int) -> Tensor:
    # A row that is named twice in a sparse gradient is summed first.
    return (gradient.coalesce() if gradient.is_sparse else gradient) / divisor


def _any(gradient: Tensor) -> bool:
    """Whether any element is not zero. Synchronizes with the GPU."""
    return bool((sparse_values(gradient) if gradient.is_sparse else gradient).any())


def replace_rows(parameter: Tensor, rows: Tensor) -> None:
    """Makes a parameter hold other rows, not copied, and in another number perhaps.

    A gradient of another shape is dropped.
    """
    if parameter.grad is not None and parameter.grad.shape != rows.shape:
        parameter.grad = None
    if parameter.shape != rows.shape:
        # A graph that is still alive (a loss kept for logging) holds the node that accumulates the
        # gradient, and that node the old shape. Another dtype in between makes torch drop it.
        parameter.data = of_another_dtype(parameter.dtype, parameter.device)
    parameter.data = rows
    # A backward through a graph of an earlier batch would compute with these rows: let it raise.
    torch.autograd.graph.increment_version(parameter)

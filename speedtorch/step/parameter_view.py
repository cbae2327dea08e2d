"""ParameterView: a module's parameter as a view of the rows that a step holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from speedtorch.step.row_store import Fields
from speedtorch.step.sparse_rows import SparseRows
from speedtorch.step.step import Rows, Step
from speedtorch.torch_internals import (
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

    def first_rows(self) -> Mapping[str, Tensor]:
        """What the state of a new row begins with, by field; all rows have what was assigned."""

    @property
    def loading(self) -> object | None:
        """What complete() may have to finish."""

    def rows(self) -> Rows:
        """The state of the held rows, field by field."""

    def hold(self, rows: Sequence[Tensor]) -> None:
        """Puts the state of other rows in its place."""

    def follow_table(self) -> None:
        """Gives the optimizer the state of all rows, of which there are others now."""

    def complete(self) -> None:
        """Finishes loading all rows' state where an exception has interrupted that."""


class Kept(NamedTuple):
    """What keeps the state of the held rows, and all their fields; another where they change."""

    state: OptimizerState | None
    fields: Fields


class ParameterView:
    """Gives the rows of a step to the parameter and the optimizer, and takes them back.

    `parameter` has their memory, on the device where they are held. Everything here follows from
    the step and can be set again; nothing is read back before all of it is set. `set_gradient` is a
    weak reference to what sets the gradient of the weight.
    """

    def __init__(
        self,
        name: str,
        parameter: torch.nn.Parameter,
        set_gradient: Callable[[], Callable[[Tensor | None], None] | None] = lambda: None,
    ) -> None:
        self._name = name
        self.parameter = parameter
        self.kept = Kept(None, {"weight": (tuple(parameter.shape[1:]), parameter.dtype)})
        self.rows: Rows | None = None
        """Those of the step that the parameter has."""
        self.version = self._pointer = 0
        """Of the parameter; one that was written to since mark() has another."""
        self.zeros: tuple[Tensor, int] | None = None
        """The gradient that a zero_grad() filled with zeros, and its version then."""
        self.shows_zeros = False
        """Whether the gradient of the weight is zeros where the rows have none, as in torch after
        such a zero_grad(), whatever was looked up since."""
        self.only_shows_zeros = False
        """Whether `zeros` were made to be read, and are no gradient of the rows."""
        self._shown: tuple[Tensor, Tensor, Tensor] | None = None
        """The gradient of the weight that was returned last, that of the rows then, and the memory
        that both have."""
        self._set_gradient = set_gradient
        self._divisor = 1
        """What the sum of gradients is divided by, once: before a step or a read of it."""
        self._is_sum = False
        """Whether the gradient, if there is one, has yet to be divided."""

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

    def note_zeros(self, gradient: Tensor | None) -> None:
        """Records that a zero_grad() has filled the gradient of the rows with zeros."""
        are_same = self.zeros is not None and gradient is self.zeros[0]
        self.only_shows_zeros = self.only_shows_zeros and are_same
        self.zeros = None if gradient is None else (gradient, version_of(gradient))
        self.shows_zeros = gradient is not None

    def make_zeros(self) -> Tensor | None:
        """The gradient to be read where the rows have none."""
        if not self.shows_zeros:
            return None
        gradient = self.parameter.grad = torch.zeros_like(self.parameter.detach())
        self.note_zeros(gradient)
        self.only_shows_zeros = True
        return gradient

    def note_none(self) -> None:
        """Records that the gradient of the weight was set to None."""
        self._shown, self.shows_zeros = None, False

    def drop_zeros(self) -> None:
        """Drops a gradient that a zero_grad() has filled with zeros."""
        if self.zeros is not None and not self.has_gradient():
            self.parameter.grad = self.zeros = None
            self.only_shows_zeros = False

    def note_gradient(self) -> None:
        """Records that the parameter was given another gradient."""
        self.zeros, self.shows_zeros, self.only_shows_zeros = None, False, False

    def note_shown(self, shown: Tensor, gradient: Tensor, values: Tensor) -> None:
        """Records the weight's gradient that has the memory of the rows' gradient, `values`."""
        self._shown = shown, gradient, values

    def shown_of(self, gradient: Tensor) -> Tensor | None:
        """The gradient of the weight that stands for that of the rows, if it was returned."""
        if self._shown is None or self._shown[1] is not gradient:
            return None
        return self._shown[0]

    def note_read(self) -> None:
        """Records that the gradient of the weight is returned, and may be written to."""
        if self.zeros is not None:
            self.zeros = self.zeros[0], -1

    def collect(self) -> None:
        """Takes over what was written to the gradient of the weight since it was returned."""
        if self._shown is None:
            return
        shown, gradient, values = self._shown
        if gradient is not self.parameter.grad:
            self._shown = None
            return
        if isinstance(shown, SparseRows):
            content = shown.content
            is_same = content.values is values and content.has_zeros
        else:
            is_same = sparse_values(shown).data_ptr() == values.data_ptr()
        if not is_same and (set_gradient := self._set_gradient()) is not None:
            self._shown = None
            set_gradient(shown)
            if shown.is_sparse and not sparse_values(shown).shape[0]:  # as zero_() leaves it
                self.note_zeros(self.parameter.grad)

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

    def has_gradient(self) -> bool:
        """Whether there is a gradient that no zero_grad() has filled with zeros.

        Zeros that were written to since are read, for which a GPU is waited: clipping leaves zeros.
        """
        if (gradient := self.parameter.grad) is None:
            return False
        if self.zeros is None or self.zeros[0] is not gradient:
            return True
        return version_of(gradient) != self.zeros[1] and _any(gradient)


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

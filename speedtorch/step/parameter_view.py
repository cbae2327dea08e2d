"""ParameterView: a module's parameter as a view of the step's rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from speedtorch.step.row_store import Fields
from speedtorch.step.sparse_rows import RowContent, SparseRows
from speedtorch.step.step import Rows, Step
from speedtorch.torch_internals import (
    as_plain,
    empty_of_other_dtype,
    increment_versions,
    sparse_values,
    version_of,
)

__all__ = ["OptimizerState", "ParameterView", "replace_rows"]


class OptimizerState(Protocol):
    """The state of an attached optimizer for the step's rows."""

    sparse: bool
    """Whether the optimizer accepts only sparse gradients."""

    def first_rows(self) -> Mapping[str, Tensor]:
        """A new row's initial state by field; first loads state that user code has assigned."""

    @property
    def loading(self) -> object | None:
        """The interrupted load that complete() must finish, or None."""

    def rows(self) -> Rows:
        """The state of the step's rows, one tensor for each field."""

    def hold(self, rows: Sequence[Tensor]) -> None:
        """Replaces the state with the state of other rows."""

    def follow_table(self) -> None:
        """Replaces the optimizer's tensors for all rows after the table was resized."""

    def complete(self) -> None:
        """Finishes a load of all rows' state that an exception has interrupted."""


class Attached(NamedTuple):
    """The attached optimizer state and all fields of the step's rows, as one immutable value."""

    state: OptimizerState | None
    fields: Fields


class ParameterView:
    """Sets the step's rows as memory of the parameter and the optimizer, and reads them back.

    `parameter` uses the memory of the step's rows on their device. After an exception, show() can
    set the rows, the state and the gradient again from the Step. `rows` is set last.
    `set_gradient` and `zeroed` are weak references to functions. The first sets the gradient of the
    weight. The second is called with a gradient of the rows that user code has filled with zeros.
    """

    def __init__(
        self,
        name: str,
        parameter: torch.nn.Parameter,
        set_gradient: Callable[[], Callable[[Tensor | None], None] | None] = lambda: None,
        zeroed: Callable[[], Callable[[Tensor], None] | None] = lambda: None,
    ) -> None:
        self._name = name
        self.parameter = parameter
        self.attached = Attached(None, {"weight": (tuple(parameter.shape[1:]), parameter.dtype)})
        self.rows: Rows | None = None
        """The step's rows whose memory the parameter uses."""
        self.version = self._pointer = 0
        """The parameter's version and address at mark(); a later write changes one of them."""
        self.zeros: tuple[Tensor, int] | None = None
        """The gradient that zero_grad() filled with zeros, and its version after that."""
        self.shows_zeros = False
        """Whether the weight's gradient is zeros if the rows have no gradient, as in torch after
        zero_grad(set_to_none=False), independent of later lookups."""
        self.only_shows_zeros = False
        """Whether `zeros` were made for a reader and are not a gradient of the rows."""
        self.shown: tuple[Tensor, Tensor | None, Tensor, int] | None = None
        """The weight's gradient that was returned last, the rows' gradient at that time, the
        values whose memory both share, and the version of the first."""
        self._set_gradient, self._zeroed = set_gradient, zeroed
        self.divisor = 1
        """Divisor of the gradient sum, applied once before a step or a read."""
        self.is_sum = False
        """Whether the gradient is a sum that is not divided yet."""

    def attach(self, state: OptimizerState | None, fields: Fields) -> None:
        """Attaches another optimizer state with its fields, or detaches it with None."""
        self.attached = Attached(state, {"weight": self.attached.fields["weight"], **fields})

    def show(self, step: Step) -> None:
        """Sets the step's rows as memory of the parameter and the optimizer state."""
        if self.rows is step.rows:
            return
        parameter, state = self.parameter, self.attached.state
        parameter.grad = None
        replace_rows(parameter, step.rows[0])
        if state is not None:
            state.hold(step.rows[1:])
        parameter.grad = step.gradient
        self.mark()
        self.rows = step.rows

    def rows_of(self, step: Step) -> Rows:
        """The step's rows with the optimizer's current values.

        Raises RuntimeError if the optimizer has resized them.
        """
        rows, state = [self.parameter.detach()], self.attached.state
        if state is not None:
            rows += state.rows()
        for number, (field, memory) in enumerate(zip(rows, step.rows, strict=True)):
            if field is not memory and field.shape != memory.shape:
                raise RuntimeError(
                    f"{self._name}: the step's rows have shape {list(field.shape)}, expected"
                    f" {list(memory.shape)}. An optimizer must not resize them."
                )
            rows[number] = field if field is memory else field.contiguous()
        return rows

    def change(self, step: Step, change: Callable[[Rows], None]) -> None:
        """Calls `change` to change the step's rows in place, in the optimizer's tensors."""
        rows, state = [self.parameter.detach()], self.attached.state
        rows += [] if state is None else state.rows()
        contiguous = self.rows_of(step)
        change(contiguous)
        for own, changed in zip(rows, contiguous, strict=True):
            if own.data_ptr() != changed.data_ptr():
                own.copy_(changed)
        self.mark()

    def put_back(self, step: Step) -> None:
        """Sets the step's rows again after the parameter was given other memory."""
        replace_rows(self.parameter, step.rows[0])
        if self.attached.state is not None:
            self.attached.state.hold(step.rows[1:])
        self.mark()

    def mark(self) -> None:
        """Records the parameter's version and address, so that was_written() sees later writes."""
        self.version, self._pointer = version_of(self.parameter), self.parameter.data_ptr()

    def was_written(self) -> bool:
        """Whether the parameter was written to, or given other memory, since mark()."""
        parameter = self.parameter
        return version_of(parameter) != self.version or parameter.data_ptr() != self._pointer

    def note_zeros(self, gradient: Tensor) -> None:
        """Records that zero_grad() has filled the rows' gradient with zeros."""
        are_same = self.zeros is not None and gradient is self.zeros[0]
        self.only_shows_zeros = self.only_shows_zeros and are_same
        self.zeros, self.shows_zeros = (gradient, version_of(gradient)), True

    @property
    def gradient_of_zeros(self) -> Tensor | None:
        """The rows' gradient if zero_grad() has filled it with zeros, else None."""
        if self.zeros is None or self.only_shows_zeros or self.has_gradient():
            return None
        return self.parameter.grad

    def make_zeros(self) -> Tensor | None:
        """Makes zeros for a reader of the gradient if `shows_zeros`, else returns None."""
        if not self.shows_zeros:
            return None
        gradient = self.parameter.grad = torch.zeros_like(self.parameter.detach())
        self.note_zeros(gradient)
        self.only_shows_zeros = True
        return gradient

    def note_none(self) -> None:
        """Records that the gradient of the weight was set to None."""
        self.shown, self.shows_zeros = None, False

    def drop_zeros(self) -> None:
        """Drops a gradient that zero_grad() has filled with zeros."""
        if self.zeros is not None and not self.has_gradient():
            self.parameter.grad = self.zeros = None
            self.only_shows_zeros = False

    def note_gradient(self) -> None:
        """Records that the parameter has another gradient."""
        self.zeros, self.shows_zeros, self.only_shows_zeros = None, False, False

    def note_shown(self, shown: Tensor, gradient: Tensor | None, values: Tensor) -> None:
        """Records a weight's gradient that shares the memory `values` of the rows' gradient."""
        version = 0 if isinstance(shown, SparseRows) else version_of(shown)
        self.shown = shown, gradient, values, version

    def shown_of(self, gradient: Tensor) -> Tensor | None:
        """The weight's gradient that was already returned for this rows' gradient, or None."""
        if self.shown is None or self.shown[1] is not gradient:
            return None
        return self.shown[0]

    def gradient_of(self, content: RowContent) -> Tensor | None:
        """The rows' gradient that was returned last, if `content` is its content, else None."""
        if self.shown is None or getattr(self.shown[0], "content", None) is not content:
            return None
        return self.shown[1]

    def set_was_read(self) -> None:
        """Records that the caller has the weight's gradient and may write to it."""
        if self.zeros is not None:
            self.zeros = self.zeros[0], -1

    def collect(self) -> None:
        """Copies writes to the returned gradient of the weight to the rows' gradient."""
        if self.shown is None:
            return
        shown, gradient, values, version = self.shown
        is_plain = not isinstance(shown, SparseRows)
        is_emptied = is_plain and version_of(shown) != version and not len(sparse_values(shown))
        if gradient is not None and is_emptied:
            gradient.zero_()  # zero_() of a sparse tensor writes to no shared memory
            if (zeroed := self._zeroed()) is not None:
                zeroed(gradient)
            return self.note_shown(shown, gradient, sparse_values(gradient))
        if gradient is not self.parameter.grad:
            self.shown = None
            return
        if isinstance(shown, SparseRows):
            content = shown.content
            is_same = content.values is values and content.has_zeros
        else:
            is_same = sparse_values(shown).data_ptr() == values.data_ptr()
        if not is_same and (set_gradient := self._set_gradient()) is not None:
            try:
                self.shown = None  # set_gradient() calls this method
                set_gradient(shown)
            except NotImplementedError:  # raised for these values at each call
                raise
            except BaseException:  # such as Ctrl-C: the next call sets the gradient
                self.note_shown(shown, self.parameter.grad, values)
                raise

    def summand(self, added: Tensor) -> Tensor:
        """Converts the gradient of a lookup to the summand for the parameter's gradient."""
        if self.divisor == 1:
            return added
        if not self.is_sum and not self.has_gradient():
            self.is_sum = True
        return added if self.is_sum else _divided(added, self.divisor)

    def divide(self) -> None:
        """Divides the gradient if it is a sum that is not divided yet."""
        if not self.is_sum:
            return
        with as_plain():  # a read of the weight's gradient would divide it, too
            # Zeros of zero_grad() must remain the same tensor.
            if self.has_gradient() and (gradient := self.parameter.grad) is not None:
                self.parameter.grad = _divided(gradient, self.divisor)
                self.is_sum = False

    def divide_by(self, count: int) -> None:
        """Sets the number by which each gradient sum is divided, once."""
        self.divisor = count

    def has_gradient(self) -> bool:
        """Whether there is a gradient other than zeros of zero_grad().

        If such zeros were written to later, such as in clipping, a read of them waits for the GPU.
        """
        if (gradient := self.parameter.grad) is None:
            return False
        if self.zeros is None or self.zeros[0] is not gradient:
            return True
        return version_of(gradient) != self.zeros[1] and _any(gradient)


def _divided(gradient: Tensor, divisor: int) -> Tensor:
    # A row that a sparse gradient contains twice is summed first.
    return (gradient.coalesce() if gradient.is_sparse else gradient) / divisor


def _any(gradient: Tensor) -> bool:
    """Whether any element is not zero. Synchronizes with the GPU."""
    return bool((sparse_values(gradient) if gradient.is_sparse else gradient).any())


def replace_rows(parameter: Tensor, rows: Tensor) -> None:
    """Sets `rows` as memory of a parameter without a copy; their number may differ.

    A gradient of another shape is dropped.
    """
    if parameter.grad is not None and parameter.grad.shape != rows.shape:
        parameter.grad = None
    if parameter.shape != rows.shape:
        # A live graph (a loss kept for logging) holds the node that accumulates the gradient, which
        # has the old shape. A temporary other dtype makes torch drop the node.
        parameter.data = empty_of_other_dtype(parameter.dtype, parameter.device)
    parameter.data = rows
    # A backward through a graph of an earlier batch would compute with these rows; now it raises.
    increment_versions((parameter,))

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


class Shown(NamedTuple):
    """The weight's gradient that user code has read or assigned, as one immutable value."""

    tensor: Tensor
    """The gradient of all rows: a SparseRows, a sparse tensor, or an assigned dense tensor."""
    gradient: Tensor | None
    """The rows' gradient with equal values; `tensor` shares its memory unless it is dense."""
    values: Tensor
    """The shared memory."""
    version: int
    """The version of a sparse tensor."""
    ids: Tensor | None
    """Ids of the rows of `gradient`, if `tensor` is an assigned dense tensor."""

    @property
    def dense(self) -> Tensor | None:
        """The memory of `tensor` if it has memory for all rows."""
        if isinstance(self.tensor, SparseRows):
            return self.tensor.content.dense
        return None if self.tensor.is_sparse else self.tensor

    def is_emptied(self) -> bool:
        """Whether user code has made all elements zero, in other memory than `gradient`'s."""
        if self.tensor.is_sparse:
            return version_of(self.tensor) != self.version and not len(sparse_values(self.tensor))
        dense = self.dense
        return dense is not None and not self.is_current() and not bool(dense.any())

    def is_current(self) -> bool:
        """Whether `tensor` still has the values of `gradient`."""
        if isinstance(self.tensor, SparseRows):
            content = self.tensor.content
            if content.values is not self.values:
                return False
            if content.dense is not None:
                return _are_rows_of(content.dense, content.ids, self.values)
            return content.has_zeros
        if self.ids is not None:
            return _are_rows_of(self.tensor, self.ids, self.values)
        return sparse_values(self.tensor).data_ptr() == self.values.data_ptr()


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
        self.shown: Shown | None = None
        """The weight's gradient, if user code has it and torch would keep the same tensor."""
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
        if (shown := self.shown) is not None and step.gradient is not shown.gradient:
            rows = shown.values if shown.dense is None and not len(shown.values) else shown.dense
            if step.gradient is None and rows is not None and not bool(rows.any()):
                self.shows_zeros = True  # zero_grad(set_to_none=False) cannot be seen in zeros
            self.follow(step.ids)
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
            if self.shown is not None:
                self.follow(self.parameter.new_empty(0))

    def note_gradient(self) -> None:
        """Records that the parameter has another gradient."""
        self.zeros, self.shows_zeros, self.only_shows_zeros = None, False, False

    def note_shown(
        self, tensor: Tensor, gradient: Tensor | None, values: Tensor, ids: Tensor | None = None
    ) -> None:
        """Records the weight's gradient; see Shown."""
        version = version_of(tensor) if tensor.is_sparse else 0
        self.shown = Shown(tensor, gradient, values, version, ids)

    def forget_shown(self) -> None:
        """Records that user code has no gradient of the weight that it could write to."""
        self.shown = None

    def follow(self, ids: Tensor | Callable[[], Tensor], *, is_sum: bool = False) -> None:
        """Makes the weight's gradient that user code has equal the parameter's new gradient.

        In torch a backward and zero_grad(set_to_none=False) change the same tensor. `ids` are those
        of the parameter's rows. `is_sum`: A backward has added to the gradient.
        """
        assert self.shown is not None
        tensor, gradient, dense = self.shown.tensor, self.parameter.grad, self.shown.dense
        is_dropped = gradient is None and not self.shows_zeros
        if is_dropped or tensor.is_sparse or (gradient is not None and gradient.is_sparse):
            self.shown = None
            return
        values = self.parameter.detach()[:0].clone() if gradient is None else gradient
        if gradient is None:
            ids = torch.empty(0, dtype=torch.int64, device=values.device)
        elif dense is not None and not isinstance(ids, Tensor):
            ids = ids()
        if isinstance(tensor, SparseRows):
            tensor.content.keep(ids, values)
            tensor.content.set_fill(0.0, ())
        known = ids if isinstance(ids, Tensor) else None
        if is_sum:
            increment_versions((tensor,))  # as in torch, graphs that have saved it are invalid
        if is_sum and dense is not None and known is not None:
            with torch.no_grad():
                dense.index_copy_(0, known, values[: len(known)])
        self.note_shown(tensor, gradient, values, known)

    def gradient_of(self, content: RowContent) -> Tensor | None:
        """The rows' gradient that was returned last, if `content` is its content, else None."""
        if self.shown is None or getattr(self.shown.tensor, "content", None) is not content:
            return None
        return self.shown.gradient

    def set_was_read(self) -> None:
        """Records that the caller has the weight's gradient and may write to it."""
        if self.zeros is not None:
            self.zeros = self.zeros[0], -1

    def collect(self) -> None:
        """Copies writes to the returned gradient of the weight to the rows' gradient."""
        if self.shown is None:
            return
        shown = self.shown
        tensor, gradient = shown.tensor, shown.gradient
        is_own = gradient is self.parameter.grad
        if gradient is not None and (is_own or tensor.is_sparse) and shown.is_emptied():
            gradient.zero_()  # zero_() of this tensor writes to no shared memory
            if (zeroed := self._zeroed()) is not None:
                zeroed(gradient)
            values = sparse_values(gradient) if gradient.is_sparse else gradient
            return self.note_shown(tensor, gradient, values, shown.ids)
        if not is_own:
            self.shown = None
            return
        if not shown.is_current() and (set_gradient := self._set_gradient()) is not None:
            try:
                self.shown = None  # set_gradient() calls this method
                set_gradient(tensor)
            except NotImplementedError:  # raised for these values at each call
                raise
            except BaseException:  # such as Ctrl-C: the next call sets the gradient
                self.shown = shown._replace(gradient=self.parameter.grad)
                raise

    def summand(self, added: Tensor) -> Tensor:
        """Converts the gradient of a lookup to the summand for the parameter's gradient."""
        if self.divisor == 1:
            return added
        if not self.is_sum and not self.has_gradient():
            self.is_sum = True
        return added if self.is_sum else _divided(added, self.divisor)

    def divide(self, ids: Tensor | Callable[[], Tensor]) -> None:
        """Divides the gradient of the rows `ids`; called if `is_sum`."""
        with as_plain():  # a read of the weight's gradient would divide it, too
            # Zeros of zero_grad() must remain the same tensor.
            if self.has_gradient() and (gradient := self.parameter.grad) is not None:
                self.parameter.grad = _divided(gradient, self.divisor)
                self.is_sum = False
                if self.shown is not None:
                    self.follow(ids)

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


def _are_rows_of(dense: Tensor, ids: Tensor, gradient: Tensor) -> bool:
    """Whether a tensor of all rows equals `gradient` in the rows `ids`, and is zero elsewhere."""
    dense, rows = dense.detach(), gradient.detach()[: len(ids)]
    own = dense.index_select(0, ids)
    are_equal = (own == rows) | ((own != own) & (rows != rows))
    return bool(are_equal.all()) and bool(dense.count_nonzero() == rows.count_nonzero())


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

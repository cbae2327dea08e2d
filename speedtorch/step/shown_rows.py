"""ShownRows: what torch's objects show of a step: parameter, gradient and optimizer's state."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from speedtorch.step.step import Step, without_padding

__all__ = ["HeldState", "ShownRows", "replace_rows"]


class HeldState(Protocol):
    """The state that an attached optimizer keeps of the held rows."""

    @property
    def names(self) -> tuple[str, ...]:
        """Fields of the state, in their order."""

    @property
    def sparse(self) -> bool:
        """Whether the optimizer takes sparse gradients only."""

    def rows(self) -> list[Tensor]:
        """The state of the held rows, field by field."""

    def hold(self, rows: Sequence[Tensor]) -> None:
        """Puts the state of other rows in its place."""


class ShownRows:
    """Shows the rows of a step to who trains them, and takes them back as they are then.

    Everything here follows from the step and can be set again; nothing is read back before all of
    it is set.

    Args:
        name: what errors call it.
        parameter: shows the held rows; its device is where they are held.
    """

    def __init__(self, name: str, parameter: torch.nn.Parameter) -> None:
        self.parameter = parameter
        self._name = name
        self._kept: tuple[HeldState | None, tuple[str, ...]] = (None, ("weight",))
        """What keeps the state of the rows, and the fields of held rows."""
        self._rows: list[Tensor] | None = None
        self._version = self._pointer = 0
        self._asked: tuple[Tensor, int, bool] | None = None
        """The gradient that a zero_grad() asked for, its version then, and whether it was zeros."""

    @property
    def state(self) -> HeldState | None:
        """What keeps the state of the held rows."""
        return self._kept[0]

    @state.setter
    def state(self, state: HeldState | None) -> None:
        self._kept = (state, ("weight",) if state is None else ("weight", *state.names))

    @property
    def names(self) -> tuple[str, ...]:
        """The fields of held rows; another object when they become others."""
        return self._kept[1]

    def shows(self, step: Step) -> bool:
        """Whether torch's objects show the rows of a step."""
        return self._rows is step.rows

    def show(self, step: Step) -> None:
        """Makes the parameter and the optimizer see the rows of a step."""
        parameter = self.parameter
        weight, *state = without_padding(step.rows, step.held)
        parameter.grad = None
        replace_rows(parameter, weight)
        if self.state is not None:
            self.state.hold(state)
        parameter.grad = step.gradient
        self.mark()
        self._rows = step.rows

    def forget(self) -> None:
        """Shows nothing; what a step holds is shown anew."""
        self._rows = None

    def rows_of(self, step: Step) -> list[Tensor]:
        """The rows of the step, field by field, as who trains them has them now.

        Raises:
            RuntimeError: who trains them has changed their number or thrown some away.
        """
        rows, state = [self.parameter.detach()], self.state
        if state is not None:
            rows += state.rows()
        for each, memory in zip(rows, step.rows, strict=True):
            expected = (step.held, *memory.shape[1:])
            if tuple(each.shape) != expected:
                raise RuntimeError(
                    f"{self._name}: the held rows have the shape {list(each.shape)}, expected"
                    f" {list(expected)}; who trains them must not resize them"
                )
        return [each.contiguous() for each in rows]

    def mark(self) -> None:
        """What is written to the parameter from now on is a change."""
        self._version, self._pointer = self.parameter._version, self.parameter.data_ptr()

    def was_written(self) -> bool:
        """Whether the parameter was written to since the mark, or given other memory."""
        return self.was_changed() or self.parameter.data_ptr() != self._pointer

    def was_changed(self) -> bool:
        """Whether the parameter was written to since the mark."""
        return self.parameter._version != self._version

    # --------------------------------------------------------------------------------------------
    # Gradient

    def note_zero_grad(self) -> None:
        """Called when a zero_grad() asks for the gradient, which it may fill with zeros then."""
        gradient = self.parameter.grad
        zeros = not self.has_gradient()
        self._asked = None if gradient is None else (gradient, gradient._version, zeros)

    def has_gradient(self) -> bool:
        """Whether there is a gradient that no zero_grad() has filled with zeros.

        Who has written to the zeros since is waited for on a GPU: clipping leaves them zeros.
        """
        gradient = self.parameter.grad
        if gradient is None:
            return False
        if self._asked is None or self._asked[0] is not gradient:
            return True
        _, version, zeros = self._asked
        writes = gradient._version - version
        if writes > 1:
            return bool((gradient._values() if gradient.is_sparse else gradient).any())
        return writes == 0 and not zeros

    def set_gradient(self, gradient: Tensor) -> None:
        """Gives the parameter a gradient that somebody has computed."""
        self.parameter.grad = gradient
        self.note_gradient()

    def note_gradient(self) -> None:
        """Called when somebody has given the parameter another gradient: no zero_grad() has."""
        self._asked = None


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

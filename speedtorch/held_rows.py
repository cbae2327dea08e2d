"""HeldRows: the rows of a table that a step holds, and what the optimizer keeps of them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from speedtorch.gradient_sums import GradientSums, among_more, of_rows
from speedtorch.lookups import Token, replace_rows
from speedtorch.ops import pinned_gather, pinned_scatter
from speedtorch.planned_batch import PlannedBatch

__all__ = ["HeldRows", "HeldState"]


class HeldState(Protocol):
    """The state that an attached optimizer keeps of the held rows."""

    def rows(self) -> list[Tensor]:
        """The state of the held rows, field by field."""

    def hold(self, rows: Sequence[Tensor]) -> None:
        """Puts the state of other rows in its place."""


class HeldRows:
    """The rows that are held, what is known of them, and their gradient; see Swapper."""

    def __init__(
        self, name: str, weight: Tensor, parameter: torch.nn.Parameter, padding: int | None
    ) -> None:
        self.name = name
        self.weight = weight
        self.table_rows = weight.shape[0]
        self.parameter = parameter
        self.padding = padding
        self.fields = [weight]
        """All rows of the weight and of each field of the state."""
        self.state: HeldState | None = None
        self.takes_sparse = False
        """Whether the attached optimizer takes sparse gradients only."""
        self.lookups: weakref.WeakSet[Token] = weakref.WeakSet()
        self.step = 0
        """Counts the exchanges: rows that a graph of an earlier one looked up have left."""
        self._sums = GradientSums()
        self._numbers = torch.empty(0, dtype=torch.int64)
        self._forget()

    def use(self, weight: Tensor, state: HeldState | None, state_fields: Sequence[Tensor]) -> None:
        """Moves rows of these fields from now on; holds none at first.

        Args:
            weight: all rows, `[rows, ...]`.
            state: holds the state of the held rows, or None if there is none.
            state_fields: all rows of the state, field by field.
        """
        self.weight, self.state = weight, state
        self.fields = [weight, *state_fields]
        self.table_rows = weight.shape[0]
        self._forget()

    def _forget(self) -> None:
        """Holds no rows; whatever was held is gone."""
        nothing = torch.empty(0, dtype=torch.int64, device=self.device)
        self._hold(self._empty(0), nothing, None)

    @property
    def device(self) -> torch.device:
        """Where rows are held."""
        return self.parameter.device

    def _empty(self, count: int) -> list[Tensor]:
        """Memory for rows of every field; behind those of the weight is place for the padding."""
        device, with_padding = self.device, count + int(self.padding is not None)
        made: list[Tensor] = []
        for field in self.fields:
            rows = count if made else with_padding
            made.append(torch.empty((rows, *field.shape[1:]), dtype=field.dtype, device=device))
        return made

    def _without_padding(self, rows: list[Tensor], count: int) -> list[Tensor]:
        """Memory that `_empty` made, but for the padding's place."""
        return rows if self.padding is None else [rows[0][:count], *rows[1:]]

    def _nothing(self) -> list[Tensor]:
        """No row of any field."""
        return self._without_padding(self._empty(0), 0)

    def _hold(
        self, rows: list[Tensor], held: Tensor, batch: PlannedBatch | None, newer: bool = False
    ) -> None:
        """Begins a step with these rows. `newer`: some of them are not in the table yet."""
        count = held.shape[0]
        self._rows, self._held, self._batch = rows[0], held, batch
        self._count = count
        if batch is not None:
            batch.after = None  # or each batch would keep the one before it
        self._known: list[PlannedBatch] = []
        self._dirty, self._over, self._announced = newer, False, False
        self._got_gradient, self._gradient_version = False, 0
        self._stepped: tuple[int, int] | None = None
        """Identity and version of the gradient that was stepped last."""
        self._sums.forget()
        self.lookups.clear()
        self.step += 1
        self._show(rows, count)
        self.parameter.grad = None

    def _show(self, rows: list[Tensor], count: int) -> None:
        """Makes the parameter and the optimizer see the rows."""
        weight, *state = self._without_padding(rows, count)
        replace_rows(self.parameter, weight)
        if self.state is not None:
            self.state.hold(state)
        self._version, self._pointer = self.parameter._version, self.parameter.data_ptr()

    def _held_rows(self) -> list[Tensor]:
        """The held rows of every field, as parameter and optimizer have them now."""
        rows = [self.parameter.detach()]
        if self.state is not None:
            rows += self.state.rows()
        for each, field in zip(rows, self.fields, strict=True):
            expected = (self._count, *field.shape[1:])
            if tuple(each.shape) != expected:
                raise RuntimeError(
                    f"{self.name}: the held rows have the shape {list(each.shape)}, expected"
                    f" {list(expected)}; who trains them must not resize them"
                )
        return [each.contiguous() for each in rows]

    def _was_written(self) -> bool:
        written = self.parameter._version != self._version
        return written or self.parameter.data_ptr() != self._pointer

    def _refuse_lost_write(self) -> None:
        """Raises if rows were given values where none are."""
        if self._count == 0 and not (self._over or self._got_gradient) and self._was_written():
            self._version, self._pointer = self.parameter._version, self.parameter.data_ptr()
            raise RuntimeError(
                f"{self.name}: its weight was written to when it held no row, which gives no row of"
                " the table a value: use init_(torch.nn.init.zeros_) or any other function of"
                " torch.nn.init, load_state_dict, or write to its table"
            )

    def ignore_lost_write(self) -> None:
        """Lets such a write be, because all rows get other values now."""
        if self._count == 0:
            self._version, self._pointer = self.parameter._version, self.parameter.data_ptr()

    def _is_dirty(self) -> bool:
        """Whether held rows may differ from those of the table."""
        return self._dirty or self._was_written()

    def _step_is_over(self) -> bool:
        """Whether the next lookup begins a step of its own."""
        if self._over or self._was_written():
            return True
        if self._announced or len(self.lookups) > 0:
            return False
        gradient = self.parameter.grad
        if gradient is None:
            return True
        # Somebody wrote to the gradient: zero_grad(set_to_none=False) without a step (a GradScaler
        # left it out), or a scale. Only the first lets the rows go.
        if gradient._version == self._gradient_version or gradient.is_sparse:
            return False
        return not bool(gradient.count_nonzero())

    def _order(self, count: int) -> Tensor:
        """0 to count - 1, of a tensor that is made once."""
        if self._numbers.shape[0] < count or self._numbers.device != self.device:
            self._numbers = torch.arange(2 * count, device=self.device)
        return self._numbers[:count]

    def _fetch_padding(self, rows: Tensor, at: int) -> None:
        if self.padding is not None:
            pinned_gather(self.weight, self._padding_id(), out=rows[at : at + 1])

    def _padding_id(self) -> Tensor:
        return torch.tensor([self.padding])

    def write_padding(self, rows: Tensor, at: int) -> None:
        """Puts the padding's row into the table."""
        if self.padding is not None:
            pinned_scatter(self.weight, self._padding_id(), rows[at : at + 1])

    # --------------------------------------------------------------------------------------------
    # Gradients and the optimizer's step

    def add_gradient(self, gradient: Tensor, held: Tensor, step: int) -> None:
        """Adds the gradient of rows that were held in a step to the parameter's.

        Args:
            gradient: of the rows `held`, in their order, and perhaps of the padding after them.
            held: ids of the rows that were held when they were looked up.
            step: when that was.

        Raises:
            RuntimeError: the rows of that step have left.
        """
        if step != self.step:
            raise RuntimeError(
                f"{self.name}: backward through a lookup of an earlier step, whose rows have gone"
                " back to the table: call backward before the lookup that follows the optimizer's"
                " step"
            )
        count = self._count
        if held is not self._held:
            added = among_more(gradient, torch.searchsorted(self._held, held), count)
        elif gradient.is_sparse:
            added = of_rows(gradient, gradient._indices(), count)
        else:
            added = gradient[:count]
        with torch.no_grad():
            summed = self._sums.add(self.parameter.grad, added, more_to_come=len(self.lookups) > 0)
        self.parameter.grad, self._gradient_version = summed, summed._version
        self._dirty = self._got_gradient = True

    def _move_gradient(self, gradient: Tensor | None, places: Tensor) -> None:
        """Makes a gradient of fewer rows that of all held ones; `places` is where its rows are."""
        if gradient is not None:
            moved = among_more(gradient, places, self._count)
            self.parameter.grad, self._gradient_version = moved, moved._version
            self._sums.forget()

    def before_optimizer(self) -> None:
        """Called before the optimizer's step: rows that no lookup named again do not move."""
        parameter = self.parameter
        gradient = parameter.grad
        if gradient is not None and self._over and not self._got_gradient:
            # zero_grad(set_to_none=False) leaves zeros, with which most optimizers move rows.
            again = self._stepped is not None and self._stepped == (id(gradient), gradient._version)
            values = gradient._values() if gradient.is_sparse else gradient
            if not again and not values.count_nonzero():
                parameter.grad = None
        if self.takes_sparse and parameter.grad is not None and not parameter.grad.is_sparse:
            parameter.grad = torch.sparse_coo_tensor(
                self._order(self._count)[None],
                parameter.grad,
                parameter.grad.shape,
                is_coalesced=True,
                check_invariants=False,
            )

    def after_optimizer(self) -> bool:
        """Called after the optimizer's step: the next lookup begins a step.

        Returns:
            Whether there was something to step.
        """
        gradient = self.parameter.grad
        stepped = gradient is not None or (self._count > 0 and self._was_written())
        if stepped:
            self._dirty = self._over = True
            self._got_gradient = False
            self._sums.forget()
            self._stepped = None if gradient is None else (id(gradient), gradient._version)
            # A backward through what used these rows would compute with other ones.
            torch.autograd.graph.increment_version(self._rows)
        return stepped

"""SteppedRows: what an optimizer's step does to the held rows."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from speedtorch.step.gradient_sums import sparse_of_all
from speedtorch.step.held_rows import HeldRows
from speedtorch.step.step import Copy, Rows

__all__ = ["OptimizerCall", "SteppedRows"]

_PATIENCE = 2.0  # seconds: a step of held rows takes milliseconds
_LOOK = 1e-3  # seconds between two looks at the step of another thread


class OptimizerCall(Protocol):
    """A call of an optimizer's step()."""

    done: bool
    """Whether all rows have been stepped."""
    paused: bool
    """Whether a closure of the user runs within it."""
    is_idle: bool
    """Whether every learning rate is 0, so that the step may change no row."""

    def runs_elsewhere(self) -> bool:
        """Whether another thread is within it, and not in a closure of the user."""

    def stop(self) -> None:
        """Gives the optimizer the weights again; can be repeated."""

    def leave(self) -> bool:
        """The next one in cleans up behind a call that an exception left; whether one did."""


class SteppedRows:
    """The held rows before, during and after the step of an optimizer.

    Attributes:
        call: The call of an optimizer's step that has yet to be settled, the number of the step
            that it was for, and whether the rows had a gradient.
    """

    def __init__(self, held: HeldRows) -> None:
        self._held = held
        self.call: tuple[OptimizerCall, int, bool] | None = None
        self._as_in_table: Rows | None = None
        """Copies of the held rows before a step of rate 0, while the table has the same rows."""

    def before(self, call: OptimizerCall) -> None:
        """Called before an optimizer steps the held rows, which are complete, within a turn."""
        held = self._held
        view, as_in_table = held.view, None
        if held.now.copy is Copy.STALE:
            is_idle = call.is_idle and not held.captures()
            held.show_anew()
            if is_idle:
                as_in_table = [each.clone() for each in view.rows_of(held.now)]
        self._as_in_table = as_in_table
        parameter = view.parameter
        gradient = parameter.grad
        if held.now.stepped or view.only_shows_zeros or held.now.unseen():
            # Zeros of zero_grad(set_to_none=False) would move rows that were not looked up since.
            view.drop_zeros()
            gradient = parameter.grad
        if gradient is not None:
            view.divide()
            gradient = parameter.grad
        state = view.kept.state
        if state is not None and state.sparse and gradient is not None:
            every = torch.arange(held.now.rows[0].shape[0], device=held.device)
            gradient = parameter.grad = sparse_of_all(gradient, every)
        self.call = (call, held.now.number, gradient is not None)

    def after(self) -> None:
        """Called after it, within a turn."""
        if self.settle():
            # A backward through what used these rows would compute with other ones.
            torch.autograd.graph.increment_version(self._held.now.rows[0])

    def settle(self) -> bool:
        """Takes note of what an optimizer, or other code, did to the held rows.

        Returns whether an optimizer has stepped them.
        """
        self.await_step()
        held, stepped, left = self._held, False, False
        now, view = held.now, held.view
        written = is_changed = view.was_written()
        if self.call is not None:
            call, number, had_gradient = self.call
            # A closure makes it within the step; after an exception zero_grad() may have taken it.
            has_gradient = had_gradient or view.parameter.grad is not None
            if call.done:
                call.stop()  # an interrupt may have come before it
                held.announced.give_up()
                stepped = number == now.number and (has_gradient or written)
                left = True
                if stepped:
                    is_changed = self._has_changed()
                    held.memory.after_step()
                    self._round()
                    copy = Copy.DIRTY if is_changed else Copy.STALE
                    held.take(now._replace(copy=copy, stepped=True))
            elif not call.paused:
                left = call.leave()
                written = is_changed = written or (has_gradient and number == now.number)
                if left and number == now.number:
                    held.memory.after_failed_step()
        if written and not stepped:
            self._round()
        if is_changed and held.now.copy is not Copy.DIRTY:
            held.take(held.now._replace(copy=Copy.DIRTY))
        if written:
            view.mark()
        if left:
            self.call = self._as_in_table = None
        return stepped

    def _round(self) -> None:
        """Rounds held rows as they are stored: rows that stay do not differ from those that leave.

        Rounded again, they stay as they are.
        """
        held = self._held
        store, now = held.store, held.now
        if store.stored:
            held.view.change(now, lambda rows: store.round(held.fields, now.ids, rows))

    def _has_changed(self) -> bool:
        """Whether the step changed rows; always true unless every learning rate was 0.

        torch.distributed.checkpoint creates optimizer state by a step of rate 0, and then loads
        into the table's memory. Writing unchanged held rows back would overwrite the loaded rows.
        """
        before = self._as_in_table
        return before is None or not all(
            torch.equal(old.view(torch.uint8), new.view(torch.uint8))
            for old, new in zip(before, self._held.view.rows_of(self._held.now), strict=True)
        )

    def await_step(self) -> None:
        """Waits for a step() in another thread; RuntimeError if that takes too long.

        The other thread may wait for this one, as in a hook of the optimizer that joins a thread.
        """
        if self.call is None:
            return
        call, deadline = self.call[0], time.monotonic() + _PATIENCE
        while call.runs_elsewhere():
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{self._held.name}: an optimizer's step() in another thread has been changing"
                    f" its rows for {_PATIENCE:g} seconds; use a module in one thread at a time, or"
                    " hold a lock of your own around step() and around this call"
                )
            time.sleep(_LOOK)

    def check_threads(self) -> None:
        """Raises RuntimeError where an optimizer's step must wait for another thread.

        That is within a step() of the same rows, or between a lookup and its backward: this step
        would change the rows of a lookup whose gradient has yet to come. Called within a turn.
        """
        self.await_step()
        held = self._held
        if (thread := held.backwards.other_thread(held.now.number)) is not None:
            raise RuntimeError(
                f"{held.name}: lookups of another thread ({thread}) still wait for their"
                " backward; step when all threads are through with it, or look up under"
                " torch.no_grad() what is not trained; nothing was stepped"
            )

"""SteppedRows: the step's rows before, during and after an optimizer's step()."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from speedtorch.step.gradient_sums import sparse_of_all
from speedtorch.step.held_rows import HeldRows
from speedtorch.step.step import Copy, Rows
from speedtorch.torch_internals import increment_versions

__all__ = ["OptimizerCall", "SteppedRows"]

_TIMEOUT = 2.0  # seconds; an optimizer's step takes milliseconds
_POLL = 1e-3  # seconds between two checks of the other thread's step


class OptimizerCall(Protocol):
    """A call of an optimizer's step()."""

    done: bool
    """Whether all rows have been stepped."""
    paused: bool
    """Whether the user's closure is running within the call."""

    @property
    def is_idle(self) -> bool:
        """Whether every learning rate is 0, so that the step may change no row."""

    def runs_elsewhere(self) -> bool:
        """Whether another thread runs the call, and not the user's closure."""

    def stop(self) -> None:
        """Puts the weights back into the optimizer; may be called repeatedly."""

    def clean_up(self) -> bool:
        """Cleans up after a call that an exception ended; returns whether there was one."""


class SteppedRows:
    """Tracks what an optimizer's step() does to the step's rows.

    Attributes:
        call: The optimizer's call that is not settled yet, the number of its Step, and whether the
            rows had a gradient.
    """

    def __init__(self, held: HeldRows) -> None:
        self._held = held
        self.call: tuple[OptimizerCall, int, bool] | None = None
        self._as_in_table: Rows | None = None
        """Copies of the rows before a step of learning rate 0, while the table has equal rows."""

    def before(self, call: OptimizerCall) -> None:
        """Called with `lock` held before an optimizer steps the rows, which are complete."""
        held = self._held
        view, as_in_table = held.view, None
        if held.now.copy is Copy.STALE:
            is_idle = call.is_idle and not held.captures()
            held.reload_rows()
            if is_idle:
                as_in_table = [rows.clone() for rows in view.rows_of(held.now)]
        self._as_in_table = as_in_table
        parameter = view.parameter
        gradient = parameter.grad
        now = held.now
        lacks_lookups = len(now.seen) != now.planned_parts and now.unseen()
        if now.stepped or view.only_shows_zeros or lacks_lookups:
            # Zeros of zero_grad(set_to_none=False) would change rows without a lookup since then.
            view.drop_zeros()
            gradient = parameter.grad
        if gradient is not None and view.is_sum:
            view.divide(held.memory.ids_of(now))
            gradient = parameter.grad
        state = view.attached.state
        if state is not None and state.sparse and gradient is not None:
            indices = torch.arange(held.now.rows[0].shape[0], device=held.device)
            gradient = parameter.grad = sparse_of_all(gradient, indices)
        self.call = (call, held.now.number, gradient is not None)

    def after(self) -> None:
        """Called after an optimizer's step. The caller holds `lock`."""
        if self.settle():
            # A backward through an earlier use of the rows would compute with changed rows.
            increment_versions((self._held.now.rows[0],))

    def settle(self) -> bool:
        """Records changes of the rows by an optimizer or other code.

        Returns whether an optimizer has stepped the rows.
        """
        if self.call is not None and not self.call[0].done:
            self.await_step()
        held, stepped, left = self._held, False, False
        now, view = held.now, held.view
        written = is_changed = view.was_written()
        if self.call is not None:
            call, number, had_gradient = self.call
            # A closure creates the gradient within the step; zero_grad() may remove it afterwards.
            has_gradient = had_gradient or view.parameter.grad is not None
            if call.done:
                call.stop()  # an interrupt may have skipped this call
                held.announced.give_up()
                stepped = number == now.number and (has_gradient or written)
                left = True
                if stepped:
                    is_changed = not self._as_in_table or self._differs_from(self._as_in_table)
                    held.memory.after_step()
                    if held.store.stored:
                        self._round()
                    copy = Copy.DIRTY if is_changed else Copy.STALE
                    held.take(now._replace(copy=copy, stepped=True))
            elif not call.paused:
                left = call.clean_up()
                written = is_changed = written or (has_gradient and number == now.number)
                if left and number == now.number:
                    held.memory.after_failed_step()
        if written and not stepped and held.store.stored:
            self._round()
        if is_changed and held.now.copy is not Copy.DIRTY:
            held.take(held.now._replace(copy=Copy.DIRTY))
        if written:
            view.mark()
        if left:
            self.call = self._as_in_table = None
        return stepped

    def _round(self) -> None:
        """Rounds the rows to the 16-bit dtypes of the table, so that they equal stored rows.

        Rounding a row twice does not change it.
        """
        held = self._held
        store, now = held.store, held.now
        held.view.change(now, lambda rows: store.round(held.fields, now.ids, rows))

    def _differs_from(self, before: Rows) -> bool:
        """Whether a step changed the rows from `before`; called if every learning rate was 0.

        torch.distributed.checkpoint creates optimizer state by a step with a learning rate of 0,
        and then loads into the table's memory. Writing unchanged rows back would overwrite the
        loaded rows.
        """
        return not all(
            torch.equal(old.view(torch.uint8), new.view(torch.uint8))
            for old, new in zip(before, self._held.view.rows_of(self._held.now), strict=True)
        )

    def await_step(self) -> None:
        """Waits for a step() in another thread; raises RuntimeError after 2 seconds.

        Without the limit, an optimizer hook that joins a thread could deadlock.
        """
        if self.call is None:
            return
        call, deadline = self.call[0], time.monotonic() + _TIMEOUT
        while call.runs_elsewhere():
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{self._held.name}: an optimizer's step() in another thread has been changing"
                    f" its rows for {_TIMEOUT:g} seconds. Use a module in one thread at a time, or"
                    " hold your own lock around step() and around this call."
                )
            time.sleep(_POLL)

    def check_threads(self) -> None:
        """Raises RuntimeError if an optimizer's step would conflict with another thread.

        The other thread runs step() on the same rows, or has a lookup without its backward. This
        step would change the lookup's rows before their gradient is complete. The caller holds
        `lock`.
        """
        if self.call is not None:
            self.await_step()
        held = self._held
        if (thread := held.backwards.other_thread(held.now.number)) is not None:
            raise RuntimeError(
                f"{held.name}: lookups of another thread ({thread}) still wait for their backward."
                " Call step() after the backward of all threads, and make lookups that are not"
                " trained under torch.no_grad(). No row was stepped."
            )

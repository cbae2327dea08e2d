"""PlannedSteps: batches known before their lookups, from announce() or a prefetch loop."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from speedtorch.memory.side_stream import SideStream
from speedtorch.step.announcements import Announced, check_all_looked_up
from speedtorch.step.held_rows import HeldRows
from speedtorch.step.row_lock import serialized
from speedtorch.step.step import Batch

__all__ = ["AgreeOnStep", "PlannedSteps"]


class AgreeOnStep(Protocol):
    """See Requests.before_step."""

    def __call__(self, compared: set[object], *, fails: bool) -> None:
        """Raises DisagreementError on all ranks unless all ranks are about to step."""


class Lookups(Protocol):
    """The methods of Exchange that PlannedSteps calls; Exchange describes each."""

    def drop_inherited(self) -> None:
        """Drops the state inherited from a parent process after a fork."""

    def before_rows(self, parts: Sequence[Tensor]) -> bool:
        """Completes the current step and returns whether these ids begin another step."""

    def was_over(self, parts: Sequence[Tensor]) -> bool:
        """Whether only lookups without effect keep open a step that lacks these rows."""

    def extend(self, parts: Sequence[Tensor], *, is_planned: bool = False) -> None:
        """Adds the rows of more ids to the step."""

    def return_to_before(self) -> None:
        """Ends a tentative step."""


class PlannedSteps:
    """Announced ids, and batches that a loop plans before their first lookups.

    Attributes:
        lock: The lock that a thread holds while it uses the rows.
        expected: The loop's batch that the next step may use.
        is_idle: Whether other tables began this table's last step, which then had no lookup here.
    """

    ahead: ClassVar[int] = 2
    """Batches that a loop plans ahead: one whose rows are copied, one whose counts are copied."""

    def __init__(self, held: HeldRows, lookups: Lookups) -> None:
        self._held, self._lookups = held, lookups
        self.lock = held.lock
        self.expected: Batch | None = None
        self.is_idle = False
        self._planning = SideStream("planning")
        self._loop: Callable[[], object] = lambda: None
        self._returned: Announced | None = None
        """The latest announcement at the time when the loop returned its batch."""
        self._checks_lookups = True
        self._agree: Callable[[], AgreeOnStep | None] | None = None

    # ---- announced ids

    @property
    def batches_over(self) -> int:
        """How often a batch of announced ids has ended, or may have been given up."""
        return self._held.announced.batches_over

    @serialized
    def plan_announced(self, parts: Sequence[Tensor]) -> Announced | None:
        """Plans ids for announce(); returns None if their rows join a step that has begun.

        After the end of a step this method does not wait, so that several tables can plan before
        the first one counts its rows. Invalid ids raise IndexError; if rows are on a GPU, a later
        lookup raises it. After an exception, this call has announced nothing.
        """
        try:
            return self._held.memory.together(self._announce, parts)
        except BaseException:
            self._held.announced.note_end()
            raise

    def _announce(self, parts: Sequence[Tensor]) -> Announced | None:
        """Implements plan_announced; the rows join a step in progress at once."""
        held, lookups = self._held, self._lookups
        memory = held.memory
        if lookups.before_rows(parts) or held.is_abandoned():
            return held.announced.planned(parts, memory.plan)
        held.read_again()
        if not memory.takes_more and lookups.was_over(parts):
            return held.announced.planned(parts, memory.plan)
        if any(held.now.find(part) is None for part in parts):
            lookups.extend(parts, is_planned=True)
        return None

    def announce(self, announced: Announced | None) -> None:
        """Makes the first lookup of announced ids load the rows of all; see Announcements."""
        if announced is not None:
            with self.lock:
                self._held.announced.add(announced)

    def announced_with(self, ids: Tensor) -> Announced | None:
        """Returns the announced batch if it contains all rows of a lookup, else None.

        The caller needs this before a lookup because fixed blocks accept no more rows later. The
        host waits for the count. An announcement that may have been abandoned is not returned.
        """
        held = self._held
        announced = held.announced.certain
        if announced is None or held.captures():
            return None
        requested = held.memory.planned([ids], announced.batch)
        return announced if requested.new_row_count == 0 < requested.held else None

    @serialized
    def give_up(self) -> None:
        """Discards announced ids, and lets the next lookup begin a new step.

        The current step continues if its rows have a gradient.
        """
        self._held.announced.give_up()
        self._held.note_abandoned()

    def disable_lookup_check(self) -> None:
        """Disables check_lookups() for ranks that exchange rows.

        A rank would compare only the ids that other ranks request from it. Some ranks would then
        raise, and others would not.
        """
        self._checks_lookups = False

    def agree_on_steps(self, agree: Callable[[], AgreeOnStep | None]) -> None:
        """Sets the weak reference to the call by which ranks agree before each step."""
        self._agree = agree

    @property
    def agree_on_step(self) -> AgreeOnStep | None:
        """The call by which ranks that share the rows agree before an optimizer's step, or None."""
        return None if self._agree is None else self._agree()

    def check_lookups(self) -> None:
        """Raises RuntimeError if an optimizer would change announced rows without a lookup.

        See check_all_looked_up(). Rows without a gradient do not change. The caller holds `lock`.
        """
        held = self._held
        now = held.now
        if now.stepped or now.before is not None or not self._checks_lookups:
            return
        if len(now.seen) == now.planned_parts:
            return
        held.view.collect()
        if (unseen := now.unseen()) and held.view.has_gradient():
            check_all_looked_up(held.name, now, unseen, held.padding)

    # ---- batches of a loop

    @serialized
    def plan_ahead(self, parts: Sequence[Tensor], after: Batch | None) -> Batch:
        """Plans a loop's batch from its ids, of any shape, and the batch before it."""
        self._planning.uses(parts)  # keeps their memory if the plan is discarded early
        with self._planning.after_current(self._held.device):
            batch = self._held.memory.plan(parts, after)
        batch.parts.planned_until(self._planning.end)
        return batch

    @serialized
    def start_loop(self, loop: object) -> bool:
        """Registers a loop, by weak reference; returns False if another loop has not ended."""
        self._lookups.drop_inherited()
        if self.has_other_loop(loop):
            return False
        self._loop = weakref.ref(loop)
        return True

    def has_other_loop(self, loop: object | None) -> bool:
        """Whether another loop has not ended."""
        if self._loop() not in (None, loop):
            gc.collect()  # the traceback of an exception that ended the loop may hold its frames
        return self._loop() not in (None, loop)

    def refuse_bad(self, parts: Sequence[Tensor]) -> None:
        """Raises IndexError if the step's rows and the ids are on the CPU and ids are invalid."""
        held = self._held
        for part in parts:
            if not held.on_gpu and part.is_cpu and part.numel():
                least, most = torch.aminmax(part)
                if least < 0 or most >= held.named_rows:
                    held.memory.planned(parts)  # raises an error that names the invalid ids

    def is_loop(self, loop: object) -> bool:
        """Whether start_loop() has registered this loop, which has not ended."""
        return self._loop() is loop

    def note_returned(self) -> None:
        """Called after the loop has announced the ids of the batch that it returns."""
        self._returned = self._held.announced.latest

    @serialized
    def end_loop(self, loop: object) -> None:
        """Ends a loop: discards its planned and announced ids, and writes prefetched rows back.

        Python may close the loop late. Ids that other code has announced since still wait.
        """
        held = self._held
        if not self.is_loop(loop) or held.is_inherited:
            return
        self._loop, self.expected = lambda: None, None
        if self._returned is not None:
            held.announced.give_up_batch(self._returned)
            self._returned = None
        self._end_tentative_step()
        held.complete(ahead=False)
        held.drop_prefetched()
        held.join(None)

    @serialized
    def expect(self, batch: Batch | None) -> None:
        """Sets the planned batch that the next step may use."""
        self.expected, held = batch, self._held
        if batch is None:
            held.announced.end_batch()
        elif held.now.before is not None or held.now.unseen():
            held.note_abandoned()  # some lookups of the batch before are missing
        self._end_tentative_step()

    def _end_tentative_step(self) -> None:
        """Ends a step that other tables have begun, if no lookup has used it."""
        if self._held.now.before is not None:
            self.is_idle = True
            self._lookups.return_to_before()

    def note_lookup(self) -> None:
        """Records that a lookup uses this table in the current step."""
        self.is_idle = False

    def take_expected(self) -> Batch | None:
        """Returns the expected batch to the step that begins, once: a second step gets None."""
        batch, self.expected = self.expected, None
        return batch

    def return_expected(self, batch: Batch | None) -> None:
        """Undoes take_expected(): a repeated lookup begins the step of the same batch."""
        self.expected = batch

    def forget(self) -> None:
        """Discards the loop and its batch that a fork inherited from the parent process."""
        self.expected, self._loop = None, lambda: None

"""PlannedSteps: ids that are known before their lookups, by announce() or from a loop."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from speedtorch.memory.side_stream import SideStream
from speedtorch.step.announcements import Announced, refuse_partial_step
from speedtorch.step.held_rows import HeldRows
from speedtorch.step.step import Batch
from speedtorch.step.turn import alone

__all__ = ["AgreeOnStep", "PlannedSteps"]


class AgreeOnStep(Protocol):
    """See Requests.before_step."""

    def __call__(self, met: set[object], *, fails: bool) -> None:
        """Raises DisagreementError on all ranks unless all are about to step."""


class Lookups(Protocol):
    """What holds the rows of lookups; Exchange says what each does."""

    def be_own(self) -> None:
        """Holds nothing of the process that has forked this one."""

    def before_rows(self, parts: Sequence[Tensor]) -> bool:
        """Completes the step of now; whether these ids begin another."""

    def was_over(self, parts: Sequence[Tensor]) -> bool:
        """Whether nothing but lookups without effect keep a step without such rows."""

    def extend(self, parts: Sequence[Tensor], *, is_planned: bool = False) -> None:
        """Holds the rows of more ids."""

    def return_to_before(self) -> None:
        """Ends a step that is tentative."""


class PlannedSteps:
    """What is known of steps before their first lookups.

    Attributes:
        turn: Held while a thread uses the rows.
        expected: The batch of a loop that the next step may take.
        is_idle: Whether the last step that began with those of other tables was none of this one.
    """

    ahead: ClassVar[int] = 2
    """Batches that a loop plans ahead: of one the rows travel, of the other the counts."""

    def __init__(self, held: HeldRows, lookups: Lookups) -> None:
        self._held, self._lookups = held, lookups
        self.turn = held.turn
        self.expected: Batch | None = None
        self.is_idle = False
        self._planning = SideStream("planning")
        self._loop: Callable[[], object] = lambda: None
        self._checks_lookups = True
        self._agree: Callable[[], AgreeOnStep | None] = lambda: None

    # ---- announced ids

    @property
    def batches_over(self) -> int:
        """How often a batch has ended, or may have been given up."""
        return self._held.announced.batches_over

    @alone
    def plan_announced(self, parts: Sequence[Tensor]) -> Announced | None:
        """Plans what announce() adds to it; None if the step that goes on holds all of the rows.

        Nothing waits: where a step is over, several tables can be announced to before the first of
        them counts its rows. Bad ids raise IndexError, on a GPU at the next lookup; what raises
        leaves nothing.
        """
        try:
            return self._held.memory.together(self._announce, parts)
        except BaseException:
            self._held.announced.note_end()
            raise

    def _announce(self, parts: Sequence[Tensor]) -> Announced | None:
        """As plan_announced; the rows join a step that goes on at once."""
        held, lookups = self._held, self._lookups
        memory = held.memory
        if lookups.before_rows(parts) or held.was_left():
            return held.announced.planned(parts, memory.plan)
        held.read_again()
        if not memory.takes_more and lookups.was_over(parts):
            return held.announced.planned(parts, memory.plan)
        if any(held.now.find(part) is None for part in parts):
            lookups.extend(parts, is_planned=True)
        return None

    def announce(self, announced: Announced | None) -> None:
        """Lets the first lookup of announced ids bring the rows of all; see Announcements."""
        if announced is not None:
            with self.turn:
                self._held.announced.add(announced)

    def announced_around(self, ids: Tensor) -> Announced | None:
        """What was announced, if it has all rows of a lookup: blocks take no more afterwards.

        The host waits for that. Not if what was announced may have been given up.
        """
        held = self._held
        announced = held.announced.certain
        if announced is None or held.captures():
            return None
        asked = held.memory.planned([ids], announced.batch)
        return announced if asked.brings == 0 < asked.held else None

    @alone
    def give_up(self) -> None:
        """Gives up what was announced, and lookups of the step unless they have a gradient."""
        self._held.announced.give_up()
        self._held.leave()

    def leave_lookups_unchecked(self) -> None:
        """Lets check_lookups() raise nothing: ranks that exchange rows would not agree on it.

        Each of them compares the ids that it is asked for, which may be none.
        """
        self._checks_lookups = False

    def agree_on_steps(self, agree: Callable[[], AgreeOnStep | None]) -> None:
        """Lets ranks that share the rows agree before each step, by what a weak reference gives."""
        self._agree = agree

    @property
    def agree_on_step(self) -> AgreeOnStep | None:
        """What ranks that share the rows do before an optimizer's step, if any do."""
        return self._agree()

    def check_lookups(self) -> None:
        """Raises RuntimeError if an optimizer would change rows that were announced in vain.

        See refuse_partial_step(). A step of no gradient changes no rows. Called within a turn.
        """
        held = self._held
        now = held.now
        if now.stepped or now.before is not None or not self._checks_lookups:
            return
        if (unseen := now.unseen()) and held.view.has_gradient():
            refuse_partial_step(held.name, now, unseen, held.padding)

    # ---- batches of a loop

    @alone
    def plan_ahead(self, parts: Sequence[Tensor], after: Batch | None) -> Batch:
        """Plans a batch of a loop: its ids, of any shape, and the batch before it."""
        with self._planning.after_current(self._held.device):
            batch = self._held.memory.plan(parts, after)
        batch.parts.planned_until(self._planning.end)
        return batch

    @alone
    def start_loop(self, loop: object) -> bool:
        """Lets a loop plan batches ahead while it lives, unless another has not ended."""
        self._lookups.be_own()
        if self.has_other_loop(loop):
            return False
        self._loop = weakref.ref(loop)
        return True

    def has_other_loop(self, loop: object | None) -> bool:
        """Whether another loop has not ended."""
        if self._loop() not in (None, loop):
            gc.collect()  # it may have ended by an exception, whose traceback has its frames
        return self._loop() not in (None, loop)

    def refuse_bad(self, parts: Sequence[Tensor]) -> None:
        """Raises IndexError if ids of the CPU are out of range, where rows are held there."""
        held = self._held
        for part in parts:
            if not held.on_gpu and part.is_cpu and part.numel():
                least, most = torch.aminmax(part)
                if least < 0 or most >= held.named_rows:
                    held.memory.planned(parts)  # which says which they are

    @alone
    def end_loop(self, loop: object) -> None:
        """Ends a loop: forgets what was planned; rows that have arrived for it go back."""
        held = self._held
        if self._loop() is not loop or held.is_inherited:
            return
        self._loop = lambda: None
        self.expect(None)
        held.complete(ahead=False)
        held.drop_prefetched()
        held.join(None)

    @alone
    def expect(self, batch: Batch | None) -> None:
        """Says which planned batch the next step may take."""
        self.expected, held = batch, self._held
        if batch is None:
            held.announced.end_batch()
        elif held.now.before is not None or held.now.unseen():
            held.leave()  # no step of the batch before, of which lookups are missing
        if held.now.before is not None:
            self.is_idle = True
            self._lookups.return_to_before()

    def note_lookup(self) -> None:
        """Called when rows are asked for: the table is not idle."""
        self.is_idle = False

    def take_expected(self) -> Batch | None:
        """The batch of a loop for a step that begins: two steps of a batch take its plan once."""
        batch, self.expected = self.expected, None
        return batch

    def forget(self) -> None:
        """Forgets the loop, and its batch, of the process that has forked this one."""
        self.expected, self._loop = None, lambda: None

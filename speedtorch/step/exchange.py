"""Exchange: the rows that a step holds leave for their table while those of the next arrive.

A step holds each row that is asked for once, as a parameter and as the optimizer's state of it. The
first rows that are asked for after the optimizer's step begin the next step: one exchange brings
the rows of the last one back to the table while others arrive, and rows of both stay.

A step is a value and is never changed. Another one becomes current by one assignment: what comes
before that can be thrown away, what comes after it can be repeated.
"""

from __future__ import annotations

import gc
import os
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from speedtorch.memory.side_stream import MemoryStream, SideStream
from speedtorch.plan.joint_batch import JointBatch
from speedtorch.plan.planned_batch import PlannedBatch
from speedtorch.step.announcements import Announced, Announcements, refuse_partial_step
from speedtorch.step.gradient_sums import sparse_of_all
from speedtorch.step.parameter_view import ParameterView
from speedtorch.step.pending_backward import PendingBackwards
from speedtorch.step.row_store import Fields, RowStore
from speedtorch.step.step import (
    Batch,
    Copy,
    KnownParts,
    LookupPlaces,
    PendingTransfer,
    Prefetched,
    Rows,
    Step,
    due,
)
from speedtorch.step.timeline import in_timeline
from speedtorch.step.turn import Turn, alone
from speedtorch.torch_internals import current_backward, forget_failed_backward, version_of

__all__ = ["Exchange", "OptimizerCall"]

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


class AgreeOnStep(Protocol):
    """See Requests.before_step."""

    def __call__(self, met: set[object], *, fails: bool) -> None:
        """Raises DisagreementError on all ranks unless all are about to step."""


class Joint(Protocol):
    """What exchanges the rows of several tables together."""

    def begin(self, batch: JointBatch, asker: Exchange) -> bool:
        """Begins a step of a batch in all tables; not if one of them has to go on by itself."""

    def complete(self, *, ahead: bool = True) -> None:
        """Finishes what belongs to what the tables hold now."""

    def drop_prefetched(self) -> None:
        """Rows that arrived for the next batch go back."""


class Exchange(ABC):
    """Steps of one table: which rows are held now, and how others take their place.

    Every method completes what an exception may have left half done, before anything else. `now` is
    the step that holds rows, on `device`; the arguments are those of TrainedRows. How the rows are
    kept is that of a subclass: in as much memory as each step needs (CountedExchange), or in blocks
    of a fixed size, whose numbers of rows stay on the device (FixedExchange).

    One thread at a time is within a method: each holds `turn`, or its caller does. An optimizer's
    step() does not, because the user's hooks run in it: other threads wait for it in complete().
    """

    ahead: ClassVar[int] = 2
    """Batches that a loop plans ahead: of one the rows travel, of the other the counts."""
    takes_more: ClassVar[bool]
    """Whether rows can join a step that has begun."""
    capacity: int | None = None
    """The most rows of a step, if they are in blocks of a fixed size."""

    def __init__(
        self, name: str, store: RowStore, view: ParameterView, padding: int | None
    ) -> None:
        self.name = name
        self.turn = Turn()
        self._store = store
        self._view = view
        self._padding = padding
        self._named_rows = store.rows + (padding == store.rows)
        """What ids may name: with a padding behind the last row that, too."""
        self._joint: Joint | None = None
        """With the tables of a loop whose rows are exchanged with those of this one."""
        self._is_idle = False
        """Whether the last step that began with those of other tables was none of this one."""
        self.backwards = PendingBackwards()
        """Of graphs that may still bring a gradient of the rows."""
        self._announced = Announcements()
        self._checks_lookups = True
        self._agree: Callable[[], AgreeOnStep | None] = lambda: None
        self.batches_over = 0
        """How often a batch has ended, or may have been given up."""
        self._is_left = False
        """Whether the lookups of now may have been given up, unless they have a gradient."""
        self._has_new_padding = False
        """Whether a lookup has written the padding's row to the table in this step."""
        self._call: tuple[OptimizerCall, int, bool] | None = None
        """The last call of an optimizer's step, and the number of the step that it was for."""
        self._as_in_table: Rows | None = None
        """Copies of the held rows before a step of rate 0, while the table has the same rows."""
        self._planning, self._travel = SideStream("planning"), SideStream("exchange")
        self._expected: Batch | None = None
        """The batch of a loop that the next step may take."""
        self._loop: Callable[[], object] = lambda: None
        self._process = os.getpid()
        """That has looked rows up last."""
        self._hold_nothing(0)

    # ---- what a subclass does with the memory of the rows

    @abstractmethod
    def _plan(self, parts: Sequence[Tensor], after: Batch | None = None) -> Batch:
        """A batch of these ids for a step."""

    @abstractmethod
    def _nothing(self) -> tuple[Tensor, Rows]:
        """No ids, and the memory of no rows, on `device`."""

    @abstractmethod
    def _begun(
        self, batch: Batch, seen: set[tuple[int, int]], *, is_told: bool, prefetches: bool
    ) -> Step:
        """The step of a batch after that of now.

        `is_told`: it was announced or planned by a loop. `prefetches`: as PendingTransfer says.
        """

    def _begun_alone(self, ids: Tensor) -> Step:
        """The step of one lookup's ids after that of now; bad ids change nothing."""
        batch = self._plan([ids])
        batch.count()
        return self._begun(batch, set(), is_told=False, prefetches=False)

    @abstractmethod
    def _extended(self, parts: Sequence[Tensor], *, is_planned: bool) -> Step:
        """The step of now with the rows of more ids beside; see _extend()."""

    @abstractmethod
    def _sent(self, pending: PendingTransfer, following: Batch | None) -> Prefetched | None:
        """Queues the transfer of rows that leave, and of those of the batch that follows."""

    @abstractmethod
    def _return(self, prefetched: Prefetched) -> None:
        """Writes rows to the table that may be nowhere else."""

    @abstractmethod
    def _loaded_again(self, step: Step) -> tuple[Tensor, Rows]:
        """The ids and the rows of a step, as the table has them, in all fields of now."""

    @abstractmethod
    def _written_back(self, *, changes: bool) -> Step:
        """The step of now, which is complete, when its rows are in the table; see write_back()."""

    @abstractmethod
    def _before_lookup(self) -> None:
        """Raises what earlier steps did wrong; RuntimeError if a CUDA graph cannot hold this."""

    def _after_step(self) -> None:  # noqa: B027
        """Called when an optimizer has stepped the held rows."""

    def _after_failed_step(self) -> None:  # noqa: B027
        """Called when an optimizer's step has left the held rows by an exception."""

    def _tensors(self) -> Iterator[Tensor]:
        """Memory of now that another stream than its own may come to use."""
        now = self.now
        yield from (now.ids, *now.rows, *now.places.values())
        if isinstance(now.transfer, Prefetched):
            yield from (*now.transfer.rows, *now.transfer.batch.tensors())
        elif now.transfer is not None and now.transfer.leaving is not None:
            yield from (*now.transfer.leaving.rows, now.transfer.leaving.ids)
        for batch in () if now.captured else now.batches:  # a graph keeps its own memory
            yield from batch.tensors()

    @property
    def store(self) -> RowStore:
        """Where rows come from and go to."""
        return self._store

    @alone
    def use(self, store: RowStore) -> None:
        """Exchanges rows with another store of the same table from now on."""
        self.refuse_if_captured("changing its cache")
        self.raise_faults()
        self.write_back()
        before, self._store = self._store, store
        before.let_go()

    @property
    def is_captured(self) -> bool:
        """Whether a CUDA graph uses the rows' memory."""
        return False

    def refuse_if_captured(self, what: str) -> None:  # noqa: B027
        """Raises RuntimeError if a CUDA graph that is still there uses the rows' memory."""

    def raise_faults(self) -> None:  # noqa: B027
        """Raises what was found wrong with the ids of earlier steps, if no rows but these wait."""

    @property
    def halted(self) -> Tensor | None:
        """Not 0 while rows wait on the device for an error to be raised: `[1]`, if they ever do."""
        return None

    # ---- the step of now

    @property
    def fields(self) -> Fields:
        """Of the rows that are exchanged, the weight first."""
        return self._view.kept.fields

    def _hold_nothing(self, number: int) -> None:
        self.device = self._view.parameter.device
        self._on_gpu = self.device.type == "cuda"  # asked for several times in each step
        self._memory_stream = MemoryStream(self.device)
        ids, rows = self._nothing()
        self.now = Step(number, ids, rows, {}, set(), KnownParts(), since=number, stepped=True)

    def step_ids(self) -> Tensor:
        """Ids of the step's rows; in blocks of a fixed size, this waits for the device."""
        ids = self.ids_of(self.now)
        return ids if isinstance(ids, Tensor) else ids()

    def ids_of(self, step: Step) -> Tensor | Callable[[], Tensor]:
        """Ids of a step's rows, or what returns them."""
        return step.ids

    def reopen(self) -> None:
        """Continues a step after the optimizer's: a new gradient was assigned to the rows."""
        if self.now.stepped:
            self.now = self.now._replace(stepped=False)

    def complete(self, *, ahead: bool = True, looks_up: bool = False) -> None:
        """Finishes what belongs to the step of now.

        With `ahead` rows of the batch after it are sent for as well, if it is planned. `looks_up`:
        as due() says.
        """
        view = self._view
        view.collect()
        if (state := view.kept.state) is not None and state.loading is not None:
            state.complete()
        if self._joint is not None:
            self._joint.complete(ahead=ahead)
        now = self.now
        if self._on_gpu:
            self._memory_stream.follow(self._tensors)
        pending = now.transfer and due(now.transfer, ahead=ahead, looks_up=looks_up)
        if view.rows is not now.rows or pending is not None:
            if torch.is_inference_mode_enabled():  # rows that are held next could not be trained
                with torch.inference_mode(False):
                    return self.complete(ahead=ahead, looks_up=looks_up)
            view.show(now)
            if pending is not None:
                self._send(pending, ahead)
        if self._call is not None or version_of(view.parameter) != view.version:
            self._settle()

    def _send(self, pending: PendingTransfer, ahead: bool) -> None:
        """Queues a transfer of now; without `ahead` only that of the rows that leave."""
        now = self.now
        following = now.batches[0].following() if ahead and pending.prefetches else None
        if following is not None:
            following.parts.join()
        transfer: PendingTransfer | Prefetched | None = self._sent(pending, following)
        if pending.prefetches and not ahead:
            transfer = PendingTransfer(None, prefetches=True)
        self.now = now._replace(transfer=transfer)

    def _drop_prefetched(self) -> None:
        """Rows that arrived for the next batch go back, as some are nowhere else."""
        if self._joint is not None:
            self._joint.drop_prefetched()
        if self._travel.end is not None:
            self._travel.join()
        if (transfer := self.now.transfer) is not None:
            if isinstance(transfer, Prefetched):
                self._return(transfer)
            self.now = self.now.without_prefetch()

    def _end_step(self) -> None:
        """Lets the next lookup begin another step."""
        if not self.now.stepped:
            self.now = self.now._replace(stepped=True)

    def _give_up_step(self) -> None:
        """Ends a step that has moved and changed no row of the table."""
        self._drop_prefetched()
        self._announced.forget()
        copy = Copy.STALE if self.now.copy is Copy.STALE else Copy.CLEAN
        self.now = self.now._replace(stepped=True, copy=copy)

    def show_anew(self) -> None:
        """Reads held rows again, all fields that there are now; the table has all of them."""
        gradient = self._view.parameter.grad
        ids, rows = self._loaded_again(self.now)
        self.now = self.now._replace(ids=ids, rows=rows, copy=Copy.CLEAN, gradient=gradient)
        self.complete()

    def _read_again(self) -> None:
        """Held rows are those of the table again, if they may have become others there."""
        if self.now.copy is Copy.STALE:
            self.show_anew()

    @alone
    def change(self) -> None:
        """Says that the held rows are about to be written to."""
        self.complete()
        self._read_again()
        if self.now.copy is not Copy.DIRTY:
            self.now = self.now._replace(copy=Copy.DIRTY)

    @alone
    def write_back(self, *, changes: bool = True) -> None:
        """Writes the rows that are newer here to the table; they stay held.

        With `changes` the caller may change the table: held rows are read again before they are
        used. A child that was forked writes none of the process before it; see is_inherited.
        """
        if self.is_inherited:
            return
        self.complete(ahead=False)
        self._drop_prefetched()
        self.now = self._written_back(changes=changes)
        if changes:
            self._store.bring_home()

    @alone
    def moving(self, move: Callable[[], object]) -> None:
        """Holds no row while the parameter is moved to another device."""
        self.refuse_if_captured("moving it")
        self.raise_faults()
        for step in (lambda: None, move):
            self.write_back()
            step()
            self._hold_nothing(self.now.number + 1)
            self.complete()

    @alone
    def end_for_resize(self) -> None:
        """Holds no row: all are in the table, which may get more of them.

        Raises RuntimeError if a step or a loop has yet to end; nothing has changed then.
        """
        self._be_own()
        self.refuse_if_captured("resizing its table")
        self.raise_faults()
        if self._has_other_loop(None):
            raise RuntimeError(
                f"{self.name}: its rows are prefetched by a loop, which must end first (close its"
                " generator, or let it run to its end)"
            )
        self.complete(ahead=False)
        has_gradient = self._view.parameter.grad is not None
        if not self.now.stepped and (has_gradient or not self.is_over()):
            raise RuntimeError(
                f"{self.name}: resize() within a step, whose lookups or gradients wait for"
                " optimizer.step(): call that first, or zero_grad() and drop the loss"
            )
        self.write_back()
        self.forget_announced()
        self.hold_none()
        self._store.let_go()

    def hold_none(self) -> None:
        """Holds no row, of a table that may have other ones now."""
        self._named_rows = self._store.rows + (self._padding == self._store.rows)
        self._hold_nothing(self.now.number + 1)
        self.complete()

    @property
    def is_inherited(self) -> bool:
        """Whether the held rows are those of a process that has forked this one, as is their table.

        That process trains on, and writes them itself.
        """
        return self.is_of_fork and self._store.is_common

    @property
    def is_of_fork(self) -> bool:
        """Whether this is a child that was forked, and has looked nothing up itself."""
        return self._process != os.getpid()

    def _be_own(self) -> None:
        """Holds nothing that a child has of the process that has forked it."""
        if self.is_inherited:
            self._store.let_go()
            self._announced.forget()
            self._expected, self._joint, self._loop = None, None, lambda: None
            self._hold_nothing(self.now.number + 1)
        self._process = os.getpid()

    # ---- lookups

    @in_timeline("speedtorch::lookup")
    def hold(self, ids: Tensor) -> LookupPlaces:
        """Holds the rows that ids name from now until the step after the optimizer's begins.

        Gives where the rows of the ids, of any shape on either device, are. What was announced is
        held as well. Bad ids raise IndexError, and what is held did not change.
        """
        if self._process != os.getpid():  # is_of_fork, without a call
            self._be_own()
        try:
            found = self._look_up(ids)
        except BaseException:
            self._end_batch()
            raise
        if self._is_left and ids.numel() > 0:  # no ids show no batch
            self._is_left = False
            if self._view.zeros is not None:
                self._view.drop_zeros()
        if found is None:  # not known again, or new, which shows nowhere
            found = self.now.part(len(self.now.batches) - 1, 0)
            found = found._replace(has_moved=self.now.moved > 0)
        return found

    def _look_up(self, ids: Tensor) -> LookupPlaces | None:
        """Holds the rows of a lookup; where they are, if they were looked up or planned before."""
        is_over = self._before_rows([ids])
        named = announced = None
        if self._announced.latest is not None:
            named = self._announced.of(ids, self.device, self._plan)
        if named is not None:
            announced = named[0]
        if not is_over and self._was_left():
            is_over = announced is not None or self._goes_on_without(ids)
        begun = None
        if not is_over:
            self._read_again()
            is_over = not self.takes_more and self._was_over([ids])
        if is_over:
            begun, announced = self._begin(ids, announced)
        if announced is not None:
            parts = announced.parts
            if begun is not announced.batch and any(self.now.find(each) is None for each in parts):
                self._extend(parts, is_planned=True)
            self._announced.forget()
        if is_over and begun is None:
            return None
        # Ids are compared once: on the CPU that takes as long as they are many.
        if named is not None and begun is named[0].batch:
            found: LookupPlaces | None = self.now.part(0, named[1])
        else:
            found = self.now.find(ids)
        if found is None:
            self._extend([ids])
        elif found.number in self.now.planned:
            self.now.seen.add((found.number, found.part))
        return found

    def _before_rows(self, parts: Sequence[Tensor]) -> bool:
        """Completes the step of now; whether it is over, so that these ids begin another."""
        self._is_idle = False
        self._before_lookup()
        self.complete(looks_up=True)
        is_over = self.now.stepped or self.is_over()
        if self.now.before is not None:
            # Rows that were brought for other ids than are asked for are those of no step.
            is_over = self._taken(self.now.batches[0], parts) is None
            self.now = self.now._replace(before=None)
            self._is_left = False  # a joint step has had no lookup of this table yet
        return is_over

    def _begin(
        self, ids: Tensor, announced: Announced | None
    ) -> tuple[Batch | None, Announced | None]:
        """Begins a step of a batch that was planned before, or of these ids alone.

        Gives the batch, and what was announced with these ids.
        """
        planned, self._expected = self._expected, None  # two steps of a batch take its plan once
        batch = None if planned is None else self._taken(planned, [ids])
        if self._joint is not None and self._begin_jointly(self._joint, batch):
            return batch, announced
        is_part = True
        if batch is None and announced is None and not self.takes_more:
            announced, is_part = self._announced_around(ids), False
        told = batch or (None if announced is None else announced.batch)
        if told is None:
            self.now = self._begun_alone(ids)
        else:
            seen = {(0, 0)} if is_part and len(told.parts) == 1 else set()
            told.count()  # bad ids change nothing
            self.now = self._begun(told, seen, is_told=True, prefetches=batch is not None)
        self.complete(looks_up=True)
        return told, announced

    def _extend(self, parts: Sequence[Tensor], *, is_planned: bool = False) -> None:
        """Holds the rows of more ids beside those that are held already.

        Where it `is_planned`, lookups of them are still to come.
        """
        self.now = self._extended(parts, is_planned=is_planned)
        self.complete()

    def join(self, joint: Joint) -> None:
        """Exchanges rows with those of other tables from now on."""
        self._joint = joint

    def take(self, step: Step) -> None:
        """Begins a step that has begun in all joined tables."""
        self._expected = None
        self.now = step
        self._view.show(step)

    def _begin_jointly(self, joint: Joint, batch: Batch | None) -> bool:
        """Whether a step of a batch has begun in all tables that it was planned with."""
        planned = batch.joint if isinstance(batch, PlannedBatch) else None
        return isinstance(planned, JointBatch) and joint.begin(planned, self)

    def _taken(self, batch: Batch, parts: Sequence[Tensor]) -> Batch | None:
        """The planned batch, if these are its ids, or parts of what it was planned with."""
        if batch.device != self.device:  # the rows were moved
            return None
        batch.parts.join()
        if self._memory_stream.has_changed:  # planned beside a stream that is no longer current
            self._memory_stream.record(batch.tensors())
        if isinstance(batch, PlannedBatch) and batch.joint is not None and not batch.joint.count():
            return None  # ids of some table are bad
        batch.count()
        if any(batch.parts.part_of(part) is None for part in parts):
            if not isinstance(batch, PlannedBatch):
                return None
            asked = self.planned(parts, batch.ids)
            asked.count()
            if asked.held != batch.held or asked.brings:
                return None  # a step holds the rows that its lookups name, and no others
        return batch

    def planned(self, parts: Sequence[Tensor], after: Batch | Tensor | None = None) -> PlannedBatch:
        """A batch of these ids whose rows can be counted; see PlannedBatch."""
        rows, device, padding = self._named_rows, self.device, self._padding
        return PlannedBatch(parts, rows, device, padding, after=after, name=self.name)

    def _captures(self) -> bool:
        return self._on_gpu and torch.cuda.is_current_stream_capturing()

    def is_over(self) -> bool:
        """Whether the next rows that are asked for begin a step of their own."""
        now = self.now
        if now.stepped or (now.captured and not self._captures()):
            return True
        if now.before is not None or self.expects_gradient():
            return False
        return not self._view.has_gradient()

    def _was_over(self, parts: Sequence[Tensor]) -> bool:
        """Whether a failed backward or empty lookups alone keep a step without such rows."""
        if self._captures():
            return False
        names_rows = any(batch.parts.count for batch in self.now.batches)
        if not names_rows and any(part.numel() for part in parts):
            return True
        if not self.expects_gradient():
            return False
        if all(self.now.find(part) is not None for part in parts):
            return False
        forget_failed_backward(self.device)  # or its lookups count until the next
        return self.is_over()

    def _was_left(self) -> bool:
        """Whether the lookups of the step may have been given up, though graphs of them are there.

        A backward through those, if one comes after all, brings the rows again: rejoin().
        """
        return self._is_left and not self._view.has_gradient()

    def _goes_on_without(self, ids: Tensor) -> bool:
        """Whether a lookup begins a step of its own, if that of now may have been given up.

        One of the batch that a loop gives now does. One that was announced with lookups of that
        step does not; nor, in blocks, to which rows do not come back, one of ids known there.
        """
        if self._captures() or current_backward() != -1:  # where a checkpoint computes it again
            return False
        if self._expected is not None and self._expected.parts.part_of(ids) is not None:
            return True
        batches = self.now.batches
        if any(batches[number].parts.is_part(part, ids) for number, part in self.now.unseen()):
            return self.takes_more and ids.numel() == 0
        return self.takes_more or self.now.find(ids) is None

    def note_padding(self) -> None:
        """Called when a lookup has written the padding's row to the table."""
        self._has_new_padding = True

    def _read_padding(self, rows: Rows) -> None:
        """Reads the padding's row again that arrived before a lookup wrote it to the table."""
        if self._has_new_padding:
            self._store.read(torch.tensor([self._padding]), rows[0][-1:])
            self._has_new_padding = False

    # ---- backwards

    def expects_gradient(self) -> bool:
        """Whether a gradient of rows that were looked up in this step may still come."""
        return self.backwards.are_expected(self.now.number)

    def holds(self, number: int) -> bool:
        """Whether rows that a step of this number has looked up are held, or can be again.

        They cannot if an optimizer has stepped rows since, nor in blocks.
        """
        now = self.now
        if number == now.number:
            return True
        return self.takes_more and not now.stepped and now.since <= number < now.number

    def rejoin(self, ids: Tensor) -> None:
        """Holds rows again that were looked up before, for a backward."""
        self.complete()
        self._read_again()
        self._extend([ids])

    def note_zero_grad(self, *, is_zero: bool = False) -> None:
        """Called when the gradient becomes None or, if it `is_zero`, zeros, as by a zero_grad()."""
        self._is_left = True
        self._end_batch()
        before = self.now.before
        if before is not None and before.gradient is not None and (before.stepped or not is_zero):
            self.now = self.now._replace(before=before._replace(gradient=None))

    def note_gradient_asked(self) -> None:
        """Called before code outside reads the gradient, or sets it."""
        if self.now.before is not None and self.now.before.gradient is not None:
            self._return_to_before()

    def _return_to_before(self) -> None:
        """Holds the rows again that were held before a step that is tentative."""
        self.write_back(changes=False)
        before = self.now.before
        if before is None:
            return
        ids, rows = self._loaded_again(before)
        number = self.now.number + 1
        self.now = before._replace(number=number, ids=ids, rows=rows, copy=Copy.CLEAN)
        self.complete()

    # ---- announced ids

    @alone
    def plan_announced(self, parts: Sequence[Tensor]) -> Announced | None:
        """Plans what announce() adds to it; None if the step that goes on holds all of the rows.

        Nothing waits: where a step is over, several tables can be announced to before the first of
        them counts its rows. Bad ids raise IndexError, on a GPU at the next lookup; what raises
        leaves nothing.
        """
        try:
            return self._announce(parts)
        except BaseException:
            self._end_batch()
            raise

    def _announce(self, parts: Sequence[Tensor]) -> Announced | None:
        """As plan_announced; the rows join a step that goes on at once."""
        if self._before_rows(parts) or self._was_left():
            return self._announced.planned(parts, self._plan)
        self._read_again()
        if not self.takes_more and self._was_over(parts):
            return self._announced.planned(parts, self._plan)
        if any(self.now.find(part) is None for part in parts):
            self._extend(parts, is_planned=True)
        return None

    def announce(self, announced: Announced | None) -> None:
        """Lets the first lookup of announced ids bring the rows of all; see Announcements."""
        if announced is not None:
            with self.turn:
                self._announced.add(announced)

    def _announced_around(self, ids: Tensor) -> Announced | None:
        """What was announced, if it has all rows of a lookup: blocks take no more afterwards.

        The host waits for that. Not if what was announced may have been given up.
        """
        announced = self._announced.certain
        if announced is None or self._captures():
            return None
        asked = self.planned([ids], announced.batch)
        return announced if asked.brings == 0 < asked.held else None

    @alone
    def give_up(self) -> None:
        """Gives up what was announced, and lookups of the step unless they have a gradient."""
        self.forget_announced()
        self._is_left = True

    def forget_announced(self) -> None:
        """Drops all announced ids that no lookup has used. Called within a turn."""
        self.batches_over += 1
        if self._announced.latest is not None:
            self._announced.forget()

    def _end_batch(self) -> None:
        """Called where a batch may have been given up."""
        self.batches_over += 1
        if self._announced.latest is not None:
            self._announced.end_batch()

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
        now = self.now
        if now.stepped or now.before is not None or not self._checks_lookups:
            return
        if (unseen := now.unseen()) and self._view.has_gradient():
            refuse_partial_step(self.name, now, unseen, self._padding)

    # ---- batches of a loop

    @alone
    def plan_ahead(self, parts: Sequence[Tensor], after: Batch | None) -> Batch:
        """Plans a batch of a loop: its ids, of any shape, and the batch before it."""
        with self._planning.after_current(self.device):
            batch = self._plan(parts, after)
        batch.parts.planned_until(self._planning.end)
        return batch

    @alone
    def start_loop(self, loop: object) -> bool:
        """Lets a loop plan batches ahead while it lives, unless another has not ended."""
        self._be_own()
        if self._has_other_loop(loop):
            return False
        self._loop = weakref.ref(loop)
        return True

    def _has_other_loop(self, loop: object | None) -> bool:
        """Whether another loop has not ended."""
        if self._loop() not in (None, loop):
            gc.collect()  # it may have ended by an exception, whose traceback has its frames
        return self._loop() not in (None, loop)

    def refuse_bad(self, parts: Sequence[Tensor]) -> None:
        """Raises IndexError if ids of the CPU are out of range, where rows are held there."""
        for part in parts:
            if not self._on_gpu and part.is_cpu and part.numel():
                least, most = torch.aminmax(part)
                if least < 0 or most >= self._named_rows:
                    self.planned(parts)  # which says which they are

    @alone
    def end_loop(self, loop: object) -> None:
        """Ends a loop: forgets what was planned; rows that have arrived for it go back."""
        if self._loop() is not loop or self.is_inherited:
            return
        self._loop = lambda: None
        self.expect(None)
        self.complete(ahead=False)
        self._drop_prefetched()
        self._joint = None

    @alone
    def expect(self, batch: Batch | None) -> None:
        """Says which planned batch the next step may take."""
        self._expected = batch
        if batch is None:
            self._announced.end_batch()
        elif self.now.before is not None or self.now.unseen():
            self._is_left = True  # no step of the batch before, of which lookups are missing
        if self.now.before is not None:
            self._is_idle = True
            self._return_to_before()

    # ---- an optimizer's step

    def before_optimizer(self, call: OptimizerCall) -> None:
        """Called before an optimizer steps the held rows, within a turn."""
        self.complete()
        self.note_gradient_asked()
        view, as_in_table = self._view, None
        if self.now.copy is Copy.STALE:
            is_idle = call.is_idle and not self._captures()
            self.show_anew()
            if is_idle:
                as_in_table = [each.clone() for each in view.rows_of(self.now)]
        self._as_in_table = as_in_table
        parameter = view.parameter
        gradient = parameter.grad
        if self.now.stepped or view.only_shows_zeros or self.now.unseen():
            # Zeros of zero_grad(set_to_none=False) would move rows that were not looked up since.
            view.drop_zeros()
            gradient = parameter.grad
        if gradient is not None:
            view.divide()
            gradient = parameter.grad
        state = view.kept.state
        if state is not None and state.sparse and gradient is not None:
            every = torch.arange(self.now.rows[0].shape[0], device=self.device)
            gradient = parameter.grad = sparse_of_all(gradient, every)
        self._call = (call, self.now.number, gradient is not None)

    def after_optimizer(self) -> None:
        """Called after it, within a turn."""
        if self._settle():
            # A backward through what used these rows would compute with other ones.
            torch.autograd.graph.increment_version(self.now.rows[0])

    def _settle(self) -> bool:
        """Takes note of what an optimizer, or other code, did to the held rows.

        Returns whether an optimizer has stepped them.
        """
        self.await_step()
        now, view, stepped, left = self.now, self._view, False, False
        written = is_changed = view.was_written()
        if self._call is not None:
            call, number, had_gradient = self._call
            # A closure makes it within the step; after an exception zero_grad() may have taken it.
            has_gradient = had_gradient or view.parameter.grad is not None
            if call.done:
                call.stop()  # an interrupt may have come before it
                self.forget_announced()
                stepped = number == now.number and (has_gradient or written)
                left = True
                if stepped:
                    is_changed = self._has_changed()
                    self._after_step()
                    self._round()
                    copy = Copy.DIRTY if is_changed else Copy.STALE
                    self.now = now._replace(copy=copy, stepped=True)
            elif not call.paused:
                left = call.leave()
                written = is_changed = written or (has_gradient and number == now.number)
                if left and number == now.number:
                    self._after_failed_step()
        if written and not stepped:
            self._round()
        if is_changed and self.now.copy is not Copy.DIRTY:
            self.now = self.now._replace(copy=Copy.DIRTY)
        if written:
            view.mark()
        if left:
            self._call = self._as_in_table = None
        return stepped

    def _round(self) -> None:
        """Rounds held rows as they are stored: rows that stay do not differ from those that leave.

        Rounded again, they stay as they are.
        """
        store, now = self._store, self.now
        if store.stored:
            self._view.change(now, lambda rows: store.round(self.fields, now.ids, rows))

    def _has_changed(self) -> bool:
        """Whether the step changed rows; always true unless every learning rate was 0.

        torch.distributed.checkpoint creates optimizer state by a step of rate 0, and then loads
        into the table's memory. Writing unchanged held rows back would overwrite the loaded rows.
        """
        before = self._as_in_table
        return before is None or not all(
            torch.equal(old.view(torch.uint8), new.view(torch.uint8))
            for old, new in zip(before, self._view.rows_of(self.now), strict=True)
        )

    def await_step(self) -> None:
        """Waits for a step() in another thread; RuntimeError if that takes too long.

        The other thread may wait for this one, as in a hook of the optimizer that joins a thread.
        """
        if self._call is None:
            return
        call, deadline = self._call[0], time.monotonic() + _PATIENCE
        while call.runs_elsewhere():
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{self.name}: an optimizer's step() in another thread has been changing its"
                    f" rows for {_PATIENCE:g} seconds; use a module in one thread at a time, or"
                    " hold a lock of your own around step() and around this call"
                )
            time.sleep(_LOOK)

    def check_threads(self) -> None:
        """Raises RuntimeError where an optimizer's step must wait for another thread.

        That is within a step() of the same rows, or between a lookup and its backward: this step
        would change the rows of a lookup whose gradient has yet to come. Called within a turn.
        """
        self.await_step()
        if (thread := self.backwards.other_thread(self.now.number)) is not None:
            raise RuntimeError(
                f"{self.name}: lookups of another thread ({thread}) still wait for their"
                " backward; step when all threads are through with it, or look up under"
                " torch.no_grad() what is not trained; nothing was stepped"
            )

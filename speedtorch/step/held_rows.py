"""HeldRows: the unique rows of the current step, on the device of the parameter.

A step holds each row of its lookups once: the weight in the parameter, and the optimizer state
beside it. Step is an immutable value, and one assignment makes another step the current one. Work
before the assignment can be discarded, and work after it can be repeated.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from speedtorch.memory.side_stream import MemoryStream, SideStream
from speedtorch.plan.joint_batch import JointBatch
from speedtorch.plan.planned_batch import PlannedBatch
from speedtorch.step.announcements import Announcements
from speedtorch.step.parameter_view import ParameterView
from speedtorch.step.pending_backward import PendingBackwards
from speedtorch.step.row_lock import RowLock, serialized
from speedtorch.step.row_store import Fields, RowStore
from speedtorch.step.step import (
    Batch,
    Copy,
    KnownParts,
    PendingTransfer,
    Prefetched,
    Rows,
    Step,
    due,
)
from speedtorch.torch_internals import version_of

__all__ = ["HeldRows", "Joint", "RowMemory"]

_Made = TypeVar("_Made")
_Arguments = ParamSpec("_Arguments")


class Joint(Protocol):
    """Exchanges the rows of several tables together."""

    def begin(self, batch: JointBatch, requester: HeldRows) -> bool:
        """Begins a step in all tables; returns False if one of them must begin it separately."""

    def complete(self, *, ahead: bool = True) -> None:
        """Finishes the work of the tables' current steps."""

    def drop_prefetched(self) -> None:
        """Writes prefetched rows back to the tables."""


class StepTracker(Protocol):
    """Tracks the changes of an optimizer to the step's rows; see SteppedRows."""

    @property
    def call(self) -> object | None:
        """The call of an optimizer's step that is not settled yet, or None."""

    def settle(self) -> bool:
        """Records the changes that an optimizer or other code made to the step's rows."""


class RowMemory(ABC):
    """The memory of a step's rows: allocated for each step, or blocks of a fixed size.

    A method that returns a Step does not make it the current one. The caller does, with
    HeldRows.take(), so that an interrupted method can be repeated.
    """

    takes_more: ClassVar[bool]
    """Whether rows can join a step that has begun."""
    capacity: int | None = None
    """The most rows of a step, or None without blocks of a fixed size."""

    def __init__(self, held: HeldRows) -> None:
        self.held = held

    @abstractmethod
    def plan(self, parts: Sequence[Tensor], after: Batch | None = None) -> Batch:
        """Plans a batch of these ids for a step."""

    @abstractmethod
    def nothing(self) -> tuple[Tensor, Rows]:
        """Empty ids and empty rows, on the device of the rows."""

    @abstractmethod
    def begun(
        self, batch: Batch, seen: set[tuple[int, int]], *, is_planned: bool, prefetches: bool
    ) -> Step:
        """Begins the step of a batch after the current step.

        `is_planned`: The batch was announced, or planned by a loop. `prefetches`: see
        PendingTransfer.
        """

    def begun_alone(self, ids: Tensor) -> Step:
        """Begins the step of one lookup's ids; ids out of range raise before any change."""
        batch = self.plan([ids])
        batch.count()
        return self.begun(batch, set(), is_planned=False, prefetches=False)

    @abstractmethod
    def extended(self, parts: Sequence[Tensor], *, is_planned: bool, ordered: bool) -> Step:
        """Adds the rows of more ids to the current step.

        `is_planned`: Later lookups will name these ids. `ordered`: Not as JoinedRows.
        """

    def ordered(self) -> Step:
        """Returns the current step with its JoinedRows in the order of ids."""
        raise NotImplementedError

    @abstractmethod
    def sent(self, pending: PendingTransfer, following: Batch | None) -> Prefetched | None:
        """Queues the write-back of old rows, and the load of the following batch's rows."""

    @abstractmethod
    def put_back(self, prefetched: Prefetched) -> None:
        """Writes prefetched rows, which may have no current copy elsewhere, to the table."""

    @abstractmethod
    def reloaded(self, step: Step) -> tuple[Tensor, Rows]:
        """Reads a step's ids and rows from the table, with all present fields."""

    @abstractmethod
    def written_back(self, *, changes: bool) -> Step:
        """Writes the current step's rows to the table; the step must be complete.

        `changes`: see HeldRows.write_back.
        """

    @abstractmethod
    def before_lookup(self) -> None:
        """Raises faults of earlier steps; RuntimeError if a CUDA graph cannot capture this."""

    def together(
        self,
        look_up: Callable[_Arguments, _Made],
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Made:
        """Calls a lookup or an announcement, which all ranks make together if they share rows."""
        return look_up(*args, **kwargs)

    def after_step(self) -> None:  # noqa: B027
        """Called after an optimizer has stepped the rows."""

    def after_failed_step(self) -> None:  # noqa: B027
        """Called after an exception in an optimizer's step of the rows."""

    def note_padding(self) -> None:  # noqa: B027
        """Called after a lookup has written the padding row to the table."""

    def use(self, store: RowStore) -> None:  # noqa: B027
        """Sets another store for later exchanges."""

    def tensors(self) -> Iterator[Tensor]:
        """Memory of the current step that other streams may use, for record_stream."""
        now = self.held.now
        yield from (now.ids, *now.rows, *now.places.values())
        if isinstance(now.transfer, Prefetched):
            yield from (*now.transfer.rows, *now.transfer.batch.tensors())
        elif now.transfer is not None and now.transfer.outgoing is not None:
            yield from (*now.transfer.outgoing.rows, now.transfer.outgoing.ids)
        for batch in () if now.captured else now.batches:  # the graph owns their memory
            yield from batch.tensors()

    def planned(self, parts: Sequence[Tensor], after: Batch | Tensor | None = None) -> PlannedBatch:
        """Plans a PlannedBatch of these ids, whose rows the host can count."""
        held = self.held
        rows, device, padding = held.named_rows, held.device, held.padding
        return PlannedBatch(parts, rows, device, padding, after=after, name=held.name)

    def step_ids(self) -> Tensor:
        """Ids of the step's rows; with blocks of a fixed size the host waits for the device."""
        ids = self.ids_of(self.held.now)
        return ids if isinstance(ids, Tensor) else ids()

    def ids_of(self, step: Step) -> Tensor | Callable[[], Tensor]:
        """Ids of a step's rows, or a function that returns them."""
        return step.ids

    @property
    def is_captured(self) -> bool:
        """Whether a CUDA graph uses the rows' memory."""
        return False

    def refuse_if_captured(self, what: str) -> None:  # noqa: B027
        """Raises RuntimeError if an existing CUDA graph uses the rows' memory."""

    def raise_faults(self) -> None:  # noqa: B027
        """Raises the faults of ids of earlier steps that the device has found."""

    @property
    def halted(self) -> Tensor | None:
        """`[1]`, not 0 while a fault stops all moves of rows; None if no fault can stop them."""
        return None


class HeldRows:
    """The rows of the current step, on the device, and their transfers to and from the table.

    Methods that use the rows first complete the work that an exception interrupted. One thread at a
    time runs a method: the method or its caller holds `lock`. An optimizer's step() does not hold
    `lock`, because user hooks run within the step; other threads wait for the step in complete().

    Args:
        name: The module's name in errors.
        store: The rows of the table.
        view: The parameter with the rows of the step.
        padding: Id of the row that is never trained, or None. The id after the last row names no
            row of the table.
        memory: Makes the memory of the rows.

    Attributes:
        now: The current step, with rows on `device`.
        named_rows: Ids must be below this number, which includes a padding id after the last row.
        backwards: The autograd graphs that may still add a gradient to the rows.
        announced: Announced ids that wait for a lookup.
        transfer_stream: The side stream of transfers, parallel to computation.
        joint: Exchanges these rows with the rows of a loop's other tables, or None.
        may_be_abandoned: Whether the step's lookups may be given up, unless they have a gradient.
        process: Id of the process that made the last lookup, or before that this object.
    """

    now: Step

    def __init__(
        self,
        name: str,
        store: RowStore,
        view: ParameterView,
        padding: int | None,
        memory: Callable[[HeldRows], RowMemory],
    ) -> None:
        self.name, self.store, self.view, self.padding = name, store, view, padding
        self.lock = RowLock()
        self.backwards = PendingBackwards()
        self.announced = Announcements()
        self.transfer_stream = SideStream("exchange")
        self.joint: Joint | None = None
        self.may_be_abandoned = False
        self.process = os.getpid()
        self.memory = memory(self)
        self.begin_empty(0)

    def set_tracker(self, tracker: StepTracker) -> None:
        """Sets the tracker of an optimizer's changes to the rows."""
        self._tracker = tracker

    @property
    def fields(self) -> Fields:
        """Names, shapes and dtypes of the exchanged fields, the weight first."""
        return self.view.attached.fields

    def begin_empty(self, number: int | None = None) -> None:
        """Begins a step without rows, with this number or by default the next number."""
        number = self.now.number + 1 if number is None else number
        self.named_rows = self.store.rows + (self.padding == self.store.rows)
        self.device = self.view.parameter.device
        self.on_gpu = self.device.type == "cuda"  # stored because each step reads it several times
        self.memory_stream = MemoryStream(self.device)
        ids, rows = self.memory.nothing()
        self.now = Step(number, ids, rows, {}, set(), KnownParts(), since=number, stepped=True)

    def take(self, step: Step) -> None:
        """Makes a step the current one."""
        self.now = step

    @serialized
    def use(self, store: RowStore) -> None:
        """Writes the rows back and sets another store of the same table."""
        self.memory.refuse_if_captured("changing its cache")
        self.memory.raise_faults()
        self.write_back()
        before, self.store = self.store, store
        self.memory.use(store)
        before.free_cache()

    def join(self, joint: Joint | None) -> None:
        """Sets the Joint that exchanges rows together with other tables, or None."""
        self.joint = joint

    # ---- the current step

    def complete(self, *, ahead: bool = True, looks_up: bool = False) -> None:
        """Finishes the work of the current step.

        `ahead`: Also prefetches the rows of the batch after it, if planned. `looks_up`: see due();
        JoinedRows remain.
        """
        view = self.view
        if view.shown is not None:
            view.collect()
        if (state := view.attached.state) is not None and state.loading is not None:
            state.complete()
        if self.joint is not None:
            self.joint.complete(ahead=ahead)
        now = self.now
        if self.on_gpu:
            self.memory_stream.follow(self.memory.tensors)
        pending = now.transfer and due(now.transfer, ahead=ahead, looks_up=looks_up)
        is_unordered = now.joined is not None and not looks_up
        if view.rows is not now.rows or pending is not None or is_unordered:
            if torch.is_inference_mode_enabled():  # inference tensors could not be trained later
                with torch.inference_mode(False):
                    return self.complete(ahead=ahead, looks_up=looks_up)
            if is_unordered:
                self.now = now = self.memory.ordered()
            view.show(now)
            if pending is not None:
                self._send(pending, ahead)
        if self._tracker.call is not None or version_of(view.parameter) != view.version:
            self._tracker.settle()

    def _send(self, pending: PendingTransfer, ahead: bool) -> None:
        """Queues a transfer of the current step; without `ahead` only the write-back."""
        now = self.now
        following = now.batches[0].following() if ahead and pending.prefetches else None
        if following is not None:
            following.parts.join()
        transfer: PendingTransfer | Prefetched | None = self.memory.sent(pending, following)
        if pending.prefetches and not ahead:
            transfer = PendingTransfer(None, prefetches=True)
        self.now = now._replace(transfer=transfer)

    def drop_prefetched(self) -> None:
        """Writes prefetched rows back to the table, because some have no current copy there."""
        if self.joint is not None:
            self.joint.drop_prefetched()
        if self.transfer_stream.end is not None:
            self.transfer_stream.join()
        if (transfer := self.now.transfer) is not None:
            if isinstance(transfer, Prefetched):
                self.memory.put_back(transfer)
            self.now = self.now.without_prefetch()

    def reopen(self) -> None:
        """Continues a step after optimizer.step(), because the rows were assigned a gradient."""
        if self.now.stepped:
            self.now = self.now._replace(stepped=False)

    def give_up_step(self) -> None:
        """Ends a step that has written no row to the table."""
        self.drop_prefetched()
        self.announced.forget()
        copy = Copy.STALE if self.now.copy is Copy.STALE else Copy.CLEAN
        self.now = self.now._replace(stepped=True, copy=copy)

    def reload_rows(self) -> None:
        """Reads all present fields of the step's rows again; the table must have current copies."""
        gradient = self.view.parameter.grad
        ids, rows = self.memory.reloaded(self.now)
        self.now = self.now._replace(ids=ids, rows=rows, copy=Copy.CLEAN, gradient=gradient)
        self.complete()

    def read_again(self) -> None:
        """Reads the step's rows again if the table may have newer copies."""
        if self.now.copy is Copy.STALE:
            self.reload_rows()

    @serialized
    def change(self) -> None:
        """Marks the step's rows as newer than the table, before the caller writes to them."""
        self.complete()
        self.read_again()
        if self.now.copy is not Copy.DIRTY:
            self.now = self.now._replace(copy=Copy.DIRTY)

    @serialized
    def write_back(self, *, changes: bool = True) -> None:
        """Writes the step's newer rows to the table; the rows remain on the device.

        `changes`: The caller may change the table, so the rows are read again before their next
        use. A forked child does not write rows of its parent process; see is_inherited.
        """
        if self.is_inherited:
            return
        self.complete(ahead=False)
        self.drop_prefetched()
        self.now = self.memory.written_back(changes=changes)
        if changes:
            self.store.write_back()

    # ---- the state of the step

    def captures(self) -> bool:
        """Whether a CUDA graph is being captured on the current stream."""
        return self.on_gpu and torch.cuda.is_current_stream_capturing()

    def is_over(self) -> bool:
        """Whether the next lookup begins a step."""
        now = self.now
        if now.stepped or (now.captured and not self.captures()):
            return True
        if now.before is not None or self.expects_gradient():
            return False
        return not self.view.has_gradient()

    def expects_gradient(self) -> bool:
        """Whether a backward may still add a gradient to the step's rows."""
        return self.backwards.are_expected(self.now.number)

    def note_abandoned(self) -> None:
        """Notes that the caller may have given up the current step's lookups."""
        self.may_be_abandoned = True

    def note_used(self) -> None:
        """Notes that the current step has a lookup that was not given up."""
        self.may_be_abandoned = False

    def is_abandoned(self) -> bool:
        """Whether the step's lookups may be given up, although their autograd graphs exist.

        If a backward through these graphs runs later, Exchange.rejoin() loads the rows again.
        """
        return self.may_be_abandoned and not self.view.has_gradient()

    # ---- processes

    @property
    def is_inherited(self) -> bool:
        """Whether the step's rows and their table belong to the parent process of a fork.

        The parent continues the training and writes its rows.
        """
        return self.is_of_fork and self.store.is_common

    @property
    def is_of_fork(self) -> bool:
        """Whether this is a forked child that has made no lookup."""
        return self.process != os.getpid()

    def drop_inherited(self) -> bool:
        """Empties the step in a forked child that has made no lookup and shares the table's memory.

        The parent process keeps its step and writes the rows. Returns whether a step was emptied.
        """
        if is_inherited := self.is_inherited:
            self.store.free_cache()
            self.announced.forget()
            self.joint = None
            self.begin_empty()
        self.process = os.getpid()
        return is_inherited

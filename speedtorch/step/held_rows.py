"""HeldRows: the rows of the current step, for the parameter, the optimizer and the table.

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
from speedtorch.step.turn import Turn, alone
from speedtorch.torch_internals import version_of

__all__ = ["HeldRows", "Joint", "RowMemory"]

_Made = TypeVar("_Made")
_Arguments = ParamSpec("_Arguments")


class Joint(Protocol):
    """What exchanges the rows of several tables together."""

    def begin(self, batch: JointBatch, asker: HeldRows) -> bool:
        """Begins a step of a batch in all tables; not if one of them has to go on by itself."""

    def complete(self, *, ahead: bool = True) -> None:
        """Finishes what belongs to what the tables hold now."""

    def drop_prefetched(self) -> None:
        """Writes prefetched rows back to the tables."""


class Stepping(Protocol):
    """What an optimizer does to the held rows; see SteppedRows."""

    @property
    def call(self) -> object | None:
        """The call of an optimizer's step that has yet to be settled, if there is one."""

    def settle(self) -> bool:
        """Takes note of what an optimizer, or other code, did to the held rows."""


class RowMemory(ABC):
    """The memory of a step's rows: as much as each step needs, or blocks of a fixed size.

    A method returns the step that is to become current, and changes nothing but memory.
    """

    takes_more: ClassVar[bool]
    """Whether rows can join a step that has begun."""
    capacity: int | None = None
    """The most rows of a step, if they are in blocks of a fixed size."""

    def __init__(self, held: HeldRows) -> None:
        self.held = held

    @abstractmethod
    def plan(self, parts: Sequence[Tensor], after: Batch | None = None) -> Batch:
        """A batch of these ids for a step."""

    @abstractmethod
    def nothing(self) -> tuple[Tensor, Rows]:
        """No ids, and the memory of no rows, on the device of the rows."""

    @abstractmethod
    def begun(
        self, batch: Batch, seen: set[tuple[int, int]], *, is_told: bool, prefetches: bool
    ) -> Step:
        """The step of a batch after that of now.

        `is_told`: it was announced or planned by a loop. `prefetches`: as PendingTransfer says.
        """

    def begun_alone(self, ids: Tensor) -> Step:
        """The step of one lookup's ids after that of now; bad ids change nothing."""
        batch = self.plan([ids])
        batch.count()
        return self.begun(batch, set(), is_told=False, prefetches=False)

    @abstractmethod
    def extended(self, parts: Sequence[Tensor], *, is_planned: bool) -> Step:
        """The step of now with the rows of more ids beside.

        Where it `is_planned`, lookups of them are still to come.
        """

    @abstractmethod
    def sent(self, pending: PendingTransfer, following: Batch | None) -> Prefetched | None:
        """Queues the transfer of rows that leave, and of those of the batch that follows."""

    @abstractmethod
    def put_back(self, prefetched: Prefetched) -> None:
        """Writes prefetched rows, which may have no current copy elsewhere, to the table."""

    @abstractmethod
    def loaded_again(self, step: Step) -> tuple[Tensor, Rows]:
        """The ids and the rows of a step, as the table has them, in all fields of now."""

    @abstractmethod
    def written_back(self, *, changes: bool) -> Step:
        """The step of now, which is complete, when its rows are in the table.

        `changes`: as HeldRows.write_back says.
        """

    @abstractmethod
    def before_lookup(self) -> None:
        """Raises what earlier steps did wrong; RuntimeError if a CUDA graph cannot hold this."""

    def together(
        self,
        look_up: Callable[_Arguments, _Made],
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Made:
        """What a lookup or an announcement gives, which all ranks make together if any do."""
        return look_up(*args, **kwargs)

    def after_step(self) -> None:  # noqa: B027
        """Called when an optimizer has stepped the held rows."""

    def after_failed_step(self) -> None:  # noqa: B027
        """Called when an optimizer's step has left the held rows by an exception."""

    def note_padding(self) -> None:  # noqa: B027
        """Called when a lookup has written the padding's row to the table."""

    def use(self, store: RowStore) -> None:  # noqa: B027
        """Exchanges rows with another store from now on."""

    def tensors(self) -> Iterator[Tensor]:
        """Memory of now that another stream than its own may come to use."""
        now = self.held.now
        yield from (now.ids, *now.rows, *now.places.values())
        if isinstance(now.transfer, Prefetched):
            yield from (*now.transfer.rows, *now.transfer.batch.tensors())
        elif now.transfer is not None and now.transfer.leaving is not None:
            yield from (*now.transfer.leaving.rows, now.transfer.leaving.ids)
        for batch in () if now.captured else now.batches:  # a graph keeps its own memory
            yield from batch.tensors()

    def planned(self, parts: Sequence[Tensor], after: Batch | Tensor | None = None) -> PlannedBatch:
        """A batch of these ids whose rows can be counted; see PlannedBatch."""
        held = self.held
        rows, device, padding = held.named_rows, held.device, held.padding
        return PlannedBatch(parts, rows, device, padding, after=after, name=held.name)

    def step_ids(self) -> Tensor:
        """Ids of the step's rows; in blocks of a fixed size, this waits for the device."""
        ids = self.ids_of(self.held.now)
        return ids if isinstance(ids, Tensor) else ids()

    def ids_of(self, step: Step) -> Tensor | Callable[[], Tensor]:
        """Ids of a step's rows, or what returns them."""
        return step.ids

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


class HeldRows:
    """The rows of the current step, on the device, and their transfers to and from the table.

    Each method first completes the work that an exception interrupted. One thread at a time runs a
    method: the method or its caller holds `turn`. An optimizer's step() does not hold it, because
    user hooks run within the step; other threads wait for the step in complete().

    Args:
        name: What errors call the module.
        store: The rows of the table.
        view: The parameter with the rows of the step.
        padding: Id of the row that is never trained, or None. That behind the last row is none.
        memory: Makes what has the rows' memory.

    Attributes:
        now: The step that holds rows, on `device`.
        named_rows: What ids may name: with a padding behind the last row that, too.
        backwards: Of graphs that may still bring a gradient of the rows.
        announced: Ids that were announced, of which no lookup has come yet.
        travel: The stream of transfers beside what the device computes.
        joint: With the tables of a loop whose rows are exchanged with those of this one.
        is_left: Whether the lookups of now may have been given up, unless they have a gradient.
        process: That has looked rows up last.
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
        self.turn = Turn()
        self.backwards = PendingBackwards()
        self.announced = Announcements()
        self.travel = SideStream("exchange")
        self.joint: Joint | None = None
        self.is_left = False
        self.process = os.getpid()
        self.memory = memory(self)
        self.hold_nothing(0)

    def settle_by(self, stepping: Stepping) -> None:
        """Lets `stepping` note what an optimizer does to the rows."""
        self._stepping = stepping

    @property
    def fields(self) -> Fields:
        """Of the rows that are exchanged, the weight first."""
        return self.view.kept.fields

    def hold_nothing(self, number: int | None = None) -> None:
        """Holds no row, in a step of this number; by default, of the next one."""
        number = self.now.number + 1 if number is None else number
        self.named_rows = self.store.rows + (self.padding == self.store.rows)
        self.device = self.view.parameter.device
        self.on_gpu = self.device.type == "cuda"  # asked for several times in each step
        self.memory_stream = MemoryStream(self.device)
        ids, rows = self.memory.nothing()
        self.now = Step(number, ids, rows, {}, set(), KnownParts(), since=number, stepped=True)

    def take(self, step: Step) -> None:
        """Makes a step the current one."""
        self.now = step

    @alone
    def use(self, store: RowStore) -> None:
        """Exchanges rows with another store of the same table from now on."""
        self.memory.refuse_if_captured("changing its cache")
        self.memory.raise_faults()
        self.write_back()
        before, self.store = self.store, store
        self.memory.use(store)
        before.let_go()

    def join(self, joint: Joint | None) -> None:
        """Exchanges rows with those of other tables from now on, or with None alone again."""
        self.joint = joint

    # ---- the step of now

    def complete(self, *, ahead: bool = True, looks_up: bool = False) -> None:
        """Finishes what belongs to the step of now.

        With `ahead` rows of the batch after it are sent for as well, if it is planned. `looks_up`:
        as due() says.
        """
        view = self.view
        view.collect()
        if (state := view.kept.state) is not None and state.loading is not None:
            state.complete()
        if self.joint is not None:
            self.joint.complete(ahead=ahead)
        now = self.now
        if self.on_gpu:
            self.memory_stream.follow(self.memory.tensors)
        pending = now.transfer and due(now.transfer, ahead=ahead, looks_up=looks_up)
        if view.rows is not now.rows or pending is not None:
            if torch.is_inference_mode_enabled():  # rows that are held next could not be trained
                with torch.inference_mode(False):
                    return self.complete(ahead=ahead, looks_up=looks_up)
            view.show(now)
            if pending is not None:
                self._send(pending, ahead)
        if self._stepping.call is not None or version_of(view.parameter) != view.version:
            self._stepping.settle()

    def _send(self, pending: PendingTransfer, ahead: bool) -> None:
        """Queues a transfer of now; without `ahead` only that of the rows that leave."""
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
        if self.travel.end is not None:
            self.travel.join()
        if (transfer := self.now.transfer) is not None:
            if isinstance(transfer, Prefetched):
                self.memory.put_back(transfer)
            self.now = self.now.without_prefetch()

    def reopen(self) -> None:
        """Continues a step after the optimizer's: a new gradient was assigned to the rows."""
        if self.now.stepped:
            self.now = self.now._replace(stepped=False)

    def give_up_step(self) -> None:
        """Ends a step that has moved and changed no row of the table."""
        self.drop_prefetched()
        self.announced.forget()
        copy = Copy.STALE if self.now.copy is Copy.STALE else Copy.CLEAN
        self.now = self.now._replace(stepped=True, copy=copy)

    def show_anew(self) -> None:
        """Reads held rows again, all fields that there are now; the table has all of them."""
        gradient = self.view.parameter.grad
        ids, rows = self.memory.loaded_again(self.now)
        self.now = self.now._replace(ids=ids, rows=rows, copy=Copy.CLEAN, gradient=gradient)
        self.complete()

    def read_again(self) -> None:
        """Reads held rows again if the table may have newer copies."""
        if self.now.copy is Copy.STALE:
            self.show_anew()

    @alone
    def change(self) -> None:
        """Marks held rows as newer than the table, before the caller writes to them."""
        self.complete()
        self.read_again()
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
        self.drop_prefetched()
        self.now = self.memory.written_back(changes=changes)
        if changes:
            self.store.bring_home()

    # ---- what it is in

    def captures(self) -> bool:
        """Whether a CUDA graph is captured on the current stream."""
        return self.on_gpu and torch.cuda.is_current_stream_capturing()

    def is_over(self) -> bool:
        """Whether the next rows that are asked for begin a step of their own."""
        now = self.now
        if now.stepped or (now.captured and not self.captures()):
            return True
        if now.before is not None or self.expects_gradient():
            return False
        return not self.view.has_gradient()

    def expects_gradient(self) -> bool:
        """Whether a gradient of rows that were looked up in this step may still come."""
        return self.backwards.are_expected(self.now.number)

    def leave(self) -> None:
        """Notes that the lookups of now may have been given up."""
        self.is_left = True

    def stay(self) -> None:
        """Notes that there is a lookup of now which was not given up."""
        self.is_left = False

    def was_left(self) -> bool:
        """Whether the lookups of the step may have been given up, though graphs of them are there.

        A backward through those, if one comes after all, brings the rows again: Exchange.rejoin().
        """
        return self.is_left and not self.view.has_gradient()

    # ---- processes

    @property
    def is_inherited(self) -> bool:
        """Whether the held rows are those of a process that has forked this one, as is their table.

        That process trains on, and writes them itself.
        """
        return self.is_of_fork and self.store.is_common

    @property
    def is_of_fork(self) -> bool:
        """Whether this is a child that was forked, and has looked nothing up itself."""
        return self.process != os.getpid()

    def be_own(self) -> bool:
        """Holds nothing that a child has of the process that has forked it; whether it did."""
        if is_inherited := self.is_inherited:
            self.store.let_go()
            self.announced.forget()
            self.joint = None
            self.hold_nothing()
        self.process = os.getpid()
        return is_inherited

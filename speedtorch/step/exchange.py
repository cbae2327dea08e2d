"""Exchange: writes back the rows of one step while the rows of the next step are loaded.

The first training lookup after `optimizer.step()` begins a step. One exchange writes the rows that
only the last step used to the table and loads the new rows. Rows of both steps remain on the
device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from speedtorch.plan.joint_batch import JointBatch
from speedtorch.plan.planned_batch import PlannedBatch
from speedtorch.step.announcements import Announced
from speedtorch.step.counted_memory import CountedMemory
from speedtorch.step.fixed_memory import FixedMemory
from speedtorch.step.held_rows import HeldRows
from speedtorch.step.parameter_view import ParameterView
from speedtorch.step.planned_steps import PlannedSteps
from speedtorch.step.row_lock import serialized
from speedtorch.step.row_store import RowStore
from speedtorch.step.step import Batch, Copy, LookupPlaces
from speedtorch.step.stepped_rows import OptimizerCall, SteppedRows
from speedtorch.step.timeline import in_timeline
from speedtorch.torch_internals import current_backward, free_failed_backward

__all__ = ["Exchange"]


class Exchange:
    """Runs the lookups of one table: begins steps, and loads rows for the current step.

    One thread at a time runs a method; see HeldRows. TrainedRows documents the arguments.

    Attributes:
        held: The rows of the current step.
        memory: The memory of these rows: CountedMemory, or FixedMemory if there is a `capacity`.
        steps: The batches that are planned or announced before their lookups.
        stepping: Tracks the changes that an optimizer makes to the rows.
    """

    def __init__(
        self,
        name: str,
        store: RowStore,
        view: ParameterView,
        padding: int | None,
        capacity: int | None,
    ) -> None:
        memory = CountedMemory if capacity is None else partial(FixedMemory, capacity=capacity)
        self.held = held = HeldRows(name, store, view, padding, memory)
        self.name, self.lock, self.memory = name, held.lock, held.memory
        self.stepping, self.steps = SteppedRows(held), PlannedSteps(held, self)
        held.set_tracker(self.stepping)

    @serialized
    def moving(self, move: Callable[[], object]) -> None:
        """Writes all rows back and begins an empty step, before and after `move` runs.

        `move` moves the parameter to another device.
        """
        self.memory.refuse_if_captured("moving it")
        self.memory.raise_faults()
        for step in (lambda: None, move):
            self.held.write_back()
            step()
            self.begin_empty()

    @serialized
    def end_for_resize(self) -> None:
        """Writes all rows back and begins an empty step, so that the table can be resized.

        Raises RuntimeError, before it changes anything, if a step or a prefetching loop is open.
        """
        self.drop_inherited()
        held = self.held
        self.memory.refuse_if_captured("resizing its table")
        self.memory.raise_faults()
        if self.steps.has_other_loop(None):
            raise RuntimeError(
                f"{self.name}: resize() was called within a prefetch() loop over this table. Finish"
                " the loop, or close its iterator, and then call resize()."
            )
        held.complete(ahead=False)
        has_gradient = held.view.parameter.grad is not None
        if not held.now.stepped and (has_gradient or not held.is_over()):
            raise RuntimeError(
                f"{self.name}: resize() was called between a lookup and optimizer.step(). Call"
                " optimizer.step() first, or call zero_grad() and delete the loss."
            )
        held.write_back()
        held.announced.give_up()
        self.begin_empty()
        held.store.free_cache()

    def begin_empty(self) -> None:
        """Starts a step without rows, of a table whose size may have changed."""
        self.held.begin_empty()
        self.held.complete()

    def end(self) -> None:
        """Breaks the references between the parts, so that all are freed at once."""
        vars(self.held).clear()
        vars(self).clear()

    def drop_inherited(self) -> None:
        """Drops rows that belong to the parent of a forked child; see HeldRows.drop_inherited."""
        if self.held.drop_inherited():
            self.steps.forget()

    # ---- lookups

    @in_timeline("speedtorch::lookup")
    def hold(self, ids: Tensor, *, ordered: bool = True) -> LookupPlaces:
        """Loads the rows of `ids` and returns their positions among the step's rows.

        The ids have any shape and are on the CPU or the GPU. Rows announced with them are loaded
        too. The rows remain until the next step begins. Ids out of range raise IndexError, and
        the step keeps its rows; with a capacity on a GPU, a later call raises the error. Unless
        `ordered`, the positions may refer to JoinedRows.
        """
        held = self.held
        if held.process != os.getpid():  # is_of_fork, inlined for speed
            self.drop_inherited()
        try:
            if self.memory.takes_more:
                found = self._look_up(ids, ordered)
            else:  # all ranks may have to look up together
                found = self.memory.together(self._look_up, ids, ordered)
        except BaseException:
            held.announced.note_end()
            raise
        if held.may_be_abandoned and ids.numel() > 0:  # an empty lookup may be of any batch
            held.note_used()
            if held.view.zeros is not None:
                held.view.drop_zeros()
        if found is None:  # the lookup is the step's last batch
            found = held.now.part(len(held.now.batches) - 1, 0)
            if held.now.moved > 0:
                found = found._replace(has_moved=True)
        return found

    def _look_up(self, ids: Tensor, ordered: bool) -> LookupPlaces | None:
        """Loads the rows of a lookup; returns their places if the ids were planned or seen."""
        held, memory = self.held, self.memory
        if ordered and held.now.joined is not None:
            held.complete()
        is_over = self.before_rows([ids])
        named = announced = None
        if held.announced.latest is not None:
            named = held.announced.of(ids, held.device, memory.plan)
        if named is not None:
            announced = named[0]
        if not is_over and held.is_abandoned():
            is_over = announced is not None or self._begins_new_step(ids)
        begun = None
        if not is_over:
            held.read_again()
            is_over = not memory.takes_more and self.was_over([ids])
        if is_over:
            begun, announced = self._begin(ids, announced)
        if announced is not None:
            parts = announced.parts
            if begun is not announced.batch and any(held.now.find(ids) is None for ids in parts):
                self.extend(parts, is_planned=True, ordered=ordered)
            held.announced.forget()
        if is_over and begun is None:
            return None
        # named holds the part number: on the CPU another comparison of the ids takes O(n) time.
        if named is not None and begun is named[0].batch:
            found: LookupPlaces | None = held.now.part(0, named[1])
        else:
            found = held.now.find(ids)
        if found is None:
            self.extend([ids], ordered=ordered)
        elif held.now.planned:
            held.now.note_lookup(found, ids)
        return found

    def before_rows(self, parts: Sequence[Tensor]) -> bool:
        """Completes the current step; returns whether these ids must begin another step."""
        held = self.held
        if self.steps.is_idle:
            self.steps.note_lookup()
        self.memory.before_lookup()
        held.complete(looks_up=True)
        if held.now.stepped and held.view.zeros is not None and held.view.has_gradient():
            held.reopen()  # user code has written to the zeros of zero_grad()
        is_over = held.now.stepped or held.is_over()
        if held.now.before is not None:
            # A joint exchange began a tentative step, which is over if its batch lacks these ids.
            is_over = self._taken(held.now.batches[0], parts) is None
            held.take(held.now._replace(before=None))
            held.note_used()  # this is the joint step's first lookup of this table
        return is_over

    def _begin(
        self, ids: Tensor, announced: Announced | None
    ) -> tuple[Batch | None, Announced | None]:
        """Begins a step of a planned or announced batch, or else of only these ids.

        Returns the planned or announced batch, and the Announced that contains these ids.
        """
        held, memory = self.held, self.memory
        if held.now.joined is not None:
            held.complete(ahead=False)  # joined rows may be newer than in the table
        batch = None
        if self.steps.expected is not None and (planned := self.steps.take_expected()) is not None:
            batch = self._taken(planned, [ids])
        joint = batch.joint if isinstance(batch, PlannedBatch) else None
        if isinstance(joint, JointBatch) and held.joint and held.joint.begin(joint, held):
            return batch, announced
        is_part = True
        if batch is None and announced is None and not memory.takes_more:
            announced, is_part = self.steps.announced_with(ids), False
        expected = batch or (None if announced is None else announced.batch)
        seen = {(0, 0)} if is_part and expected and expected.parts.number == 1 else set()
        if expected is not None:
            expected.count()  # bad ids raise here, before anything changes
        try:
            held.take(
                memory.begun_alone(ids)
                if expected is None
                else memory.begun(expected, seen, is_planned=True, prefetches=batch is not None)
            )
            held.complete(looks_up=True)
        except BaseException:
            self.steps.return_expected(batch)
            raise
        return expected, announced

    def extend(
        self, parts: Sequence[Tensor], *, is_planned: bool = False, ordered: bool = True
    ) -> None:
        """Adds the rows of more ids to the current step.

        `is_planned`: Later lookups will name these ids. `ordered`: see hold().
        """
        if ordered and self.held.now.joined is not None:
            self.held.complete()
        self.held.take(self.memory.extended(parts, is_planned=is_planned, ordered=ordered))
        self.held.complete(looks_up=self.held.now.joined is not None)

    def _taken(self, batch: Batch, parts: Sequence[Tensor]) -> Batch | None:
        """Returns the batch if `parts` are parts of it or name exactly its rows, else None."""
        held = self.held
        if batch.device != held.device:  # the rows were moved
            return None
        batch.parts.join()
        if held.memory_stream.has_changed:  # planned while another stream was current
            held.memory_stream.record(batch.tensors())
        if isinstance(batch, PlannedBatch) and batch.joint is not None and not batch.joint.count():
            return None  # some table's ids are out of range
        batch.count()
        if any(batch.parts.part_of(part) is None for part in parts):
            if not isinstance(batch, PlannedBatch):
                return None
            requested = self.memory.planned(parts, batch.ids)
            requested.count()
            if requested.held != batch.held or requested.new_row_count:
                return None  # a step has exactly the rows that its lookups name
        return batch

    def was_over(self, parts: Sequence[Tensor]) -> bool:
        """Whether the step lacks these rows, and has only empty lookups or a failed backward."""
        held = self.held
        if held.captures():
            return False
        names_rows = any(batch.parts.count for batch in held.now.batches)
        if not names_rows and any(part.numel() for part in parts):
            return True
        if not held.expects_gradient():
            return False
        if all(held.now.find(part) is not None for part in parts):
            return False
        free_failed_backward(held.device)  # its lookups would count until the next backward
        return held.is_over()

    def _begins_new_step(self, ids: Tensor) -> bool:
        """Whether a lookup begins a new step, if the current step may have been given up.

        If a backward of the old step runs later, rejoin() loads its rows again. Fixed-size blocks
        cannot load them again, so a lookup of ids that the step has begins no step there.
        """
        # Within a backward, activation checkpointing repeats a lookup of the current step.
        if self.held.captures() or current_backward() != -1:
            return False
        expected = self.steps.expected
        if expected is not None and expected.parts.part_of(ids) is not None:
            return True
        return self.memory.takes_more or self.held.now.find(ids) is None

    # ---- backwards and an optimizer's step

    def can_reach(self, number: int) -> bool:
        """Whether the rows of step `number` are on the device, or rejoin() can load them again.

        rejoin() cannot load them after a later optimizer step, or with fixed-size blocks.
        """
        now = self.held.now
        if number == now.number:
            return True
        return self.memory.takes_more and not now.stepped and now.since <= number < now.number

    def rejoin(self, ids: Tensor) -> None:
        """Loads rows of an earlier lookup for its backward, or rows of an assigned gradient."""
        self.held.complete()
        if not self.held.now.batches:  # a step without lookups has no padding row
            self.held.take(self.memory.begun_alone(ids))
            return self.held.complete()
        self.held.read_again()
        self.extend([ids])

    def note_zero_grad(self, *, is_zero: bool = False) -> None:
        """Called when zero_grad() or other code makes the gradient None or, if `is_zero`, zeros."""
        held = self.held
        held.note_abandoned()
        held.announced.note_end()
        before = held.now.before
        if before is not None and before.gradient is not None and (before.stepped or not is_zero):
            held.take(held.now._replace(before=before._replace(gradient=None)))

    def note_gradient_access(self) -> None:
        """Called before user code reads or sets the gradient."""
        before = self.held.now.before
        if before is not None and before.gradient is not None:
            self.return_to_before()

    def return_to_before(self) -> None:
        """Undoes a tentative step: writes its rows back and loads the rows of the step before."""
        held = self.held
        held.write_back(changes=False)
        before = held.now.before
        if before is None:
            return
        ids, rows = self.memory.reloaded(before)
        number = held.now.number + 1
        held.take(before._replace(number=number, ids=ids, rows=rows, copy=Copy.CLEAN))
        held.complete()

    def before_optimizer(self, call: OptimizerCall) -> None:
        """Called with `lock` held, before an optimizer steps the rows."""
        self.held.complete()
        if self.held.now.before is not None:
            self.note_gradient_access()
        self.stepping.before(call)

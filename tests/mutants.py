"""Faults that the random programs must find: each changes one place of the package's source."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import speedtorch

__all__ = ["MUTANTS", "PACKAGE", "Mutant", "mutated_copy"]

PACKAGE = Path(speedtorch.__file__).parent
_TESTS = Path(__file__).parent


@dataclass(frozen=True)
class Mutant:
    """A change of one place."""

    name: str  # what is wrong then
    file: str  # relative to the package's folder
    old: str  # text that occurs once there, without comments, which may be rewritten
    new: str
    found_by: str | None = None  # the test that finds it if the random programs cannot

    def changed(self, package: Path) -> str:
        """The file's source with the change; LookupError if this list is out of date."""
        path = package / self.file
        source = path.read_text() if path.is_file() else ""
        found = source.count(self.old)
        if found != 1:
            raise LookupError(
                f"mutant {self.name!r}: expected its text once in {self.file}, found it {found}"
                f" times; tests/mutants.py must follow the source:\n{self.old}"
            )
        changed = source.replace(self.old, self.new)
        compile(changed, str(path), "exec")
        return changed


MUTANTS = [
    # ---- rounding.py: rows of 16 bits
    Mutant(
        "rows are rounded to nearest before they are rounded at random",
        "step/rounding.py",
        "        round_rows(list(rows), self._whole(ids), self._key, bits, self._is_random)\n",
        "        round_rows(list(rows), self._whole(ids), self._key.clone(), bits, False)\n"
        "        round_rows(list(rows), self._whole(ids), self._key, bits, self._is_random)\n",
        found_by="tests/nn/test_stored.py",
    ),
    Mutant(
        "ranks round by the numbers that rows have there",
        "step/rounding.py",
        "        return ids + shifts[block.clamp(min=0)]\n",
        "        return ids\n",
        found_by="tests/parallel/test_sharded_stored.py",
    ),
    # ---- exchange.py: rows that leave, stay and arrive
    Mutant(
        "rows that join a step make the others clean",
        "step/counted_memory.py",
        "            moved=len(now.batches),\n",
        "            moved=len(now.batches),\n            copy=Copy.CLEAN,\n",
    ),
    Mutant(
        "a flush forgets that the step is over",
        "step/counted_memory.py",
        "_replace(copy=Copy.STALE if changes else Copy.CLEAN)",
        "_replace(copy=Copy.STALE if changes else Copy.CLEAN, stepped=False)",
    ),
    Mutant(
        "a flush leaves the table stale in silence",
        "step/counted_memory.py",
        "now._replace(copy=Copy.STALE if changes else Copy.CLEAN)",
        "now._replace(copy=Copy.CLEAN)",
    ),
    Mutant(
        "rows that became others in the table are not read again",
        "step/held_rows.py",
        "        if self.now.copy is Copy.STALE:\n            self.reload_rows()\n",
        "",
    ),
    Mutant(
        "rows that are read again lose their gradient",
        "step/held_rows.py",
        "copy=Copy.CLEAN, gradient=gradient)",
        "copy=Copy.CLEAN, gradient=None)",
    ),
    Mutant(
        "rows that stay in the next step count as the table's",
        "step/counted_memory.py",
        "            return Copy.DIRTY, Block(",
        "            return Copy.CLEAN, Block(",
    ),
    Mutant(
        "rows that an interrupted step wrote to count as the table's",
        "step/stepped_rows.py",
        "        if is_changed and held.now.copy is not Copy.DIRTY:\n"
        "            held.take(held.now._replace(copy=Copy.DIRTY))\n",
        "",
        "tests/step/test_embedding_interrupts.py"
        "::test_an_interrupt_within_torchs_step_leaves_what_it_leaves_of_plain_rows",
    ),
    Mutant(
        "rows that an optimizer stepped are not over",
        "step/stepped_rows.py",
        "now._replace(copy=copy, stepped=True)",
        "now._replace(copy=copy)",
    ),
    Mutant(
        "a step with no gradient is over all the same",
        "step/stepped_rows.py",
        "stepped = number == now.number and (has_gradient or written)",
        "stepped = number == now.number",
        "tests/step/test_embedding_steps.py"
        "::test_a_lookup_without_a_gradient_outlives_the_step_of_another_table",
    ),
    Mutant(
        "state of the rows that others join is lost",
        "step/counted_memory.py",
        "own = Block(held.view.rows_of(now), now.ids)",
        "own = Block([each * (k < 1) for k, each in enumerate(now.rows)], now.ids)",
    ),
    Mutant(
        "a gradient is lost while rows join",
        "step/counted_memory.py",
        "gradient = among_more(gradient, before, len(rows[0]))",
        "gradient = None",
    ),
    Mutant(
        "state of rows that many lookups append is lost",
        "step/counted_memory.py",
        "carry_rows(rows, places, joined.rows, order.add_(joined.first))",
        "carry_rows(rows[:1], places, joined.rows[:1], order.add_(joined.first))",
        "tests/step/test_many_lookups.py::test_rows_are_those_of_one_announcement",
    ),
    Mutant(
        "appended rows are dropped if another step begins before a backward",
        "step/exchange.py",
        "            held.complete(ahead=False)",
        "            pass",
        "tests/step/test_many_lookups.py::test_what_a_loop_does_between_lookups_changes_no_result",
    ),
    # ---- exchange.py: batches that are planned ahead
    Mutant(
        "rows that arrived ahead count as the table's",
        "step/counted_memory.py",
        "transfer, outgoing, copy = held.now.transfer, None, Copy.DIRTY",
        "transfer, outgoing, copy = held.now.transfer, None, Copy.CLEAN",
    ),
    Mutant(
        "rows that arrived ahead are dropped, not written",
        "step/counted_memory.py",
        "        self.held.store.exchange(self.held.fields, new, None)\n",
        "",
        "tests/nn/test_prefetch.py"
        "::test_rows_that_went_from_one_step_to_a_batch_ahead_are_not_lost",
    ),
    Mutant(
        "a flush leaves what arrived ahead",
        "step/held_rows.py",
        "        self.drop_prefetched()\n        self.now = self.memory.written_back(",
        "        self.now = self.memory.written_back(",
    ),
    Mutant(
        "rows that stay beside those that arrived ahead are taken from other places",
        "step/counted_memory.py",
        "carry_rows(rows, places, old, taken_from)",
        "carry_rows(rows, places, old, taken_from.flip(0))",
    ),
    Mutant(
        "state of rows that stay beside those that arrived ahead is lost",
        "step/counted_memory.py",
        "carry_rows(rows, places, old, taken_from)",
        "carry_rows(rows[:1], places, old[:1], taken_from)",
    ),
    Mutant(
        "rows that are owed to the table are not written",
        "step/counted_memory.py",
        "held.store.exchange(held.fields, outgoing, incoming)",
        "held.store.exchange(held.fields, None, incoming)",
    ),
    Mutant(
        "rows that wait for rows to join are not written",
        "step/counted_memory.py",
        "partial(held.store.join_batch, held.fields, outgoing, own)",
        "partial(held.store.join_batch, held.fields, None, own)",
        "tests/step/test_rows_on_their_way.py::test_rows_leave_with_those_that_join_the_next_step",
    ),
    Mutant(
        "rows that are owed are written from the first places",
        "step/counted_memory.py",
        "Block(old, *batch.outgoing, are_ready=True)",
        "Block(old, batch.outgoing[0], are_ready=True)",
    ),
    Mutant(
        "a planned batch is taken for lookups of other ids",
        "step/exchange.py",
        "            if requested.held != batch.held or requested.new_row_count:\n",
        "            if False:\n",
    ),
    Mutant(
        "ids of rows that are written back may be overwritten before",
        "step/counted_memory.py",
        "uses(outgoing.tensors)",
        "uses(outgoing.rows)",
        found_by="tests/step/test_stream_order.py",
    ),
    Mutant(
        "a lookup writes the padding row beside a transfer",
        "step/trained_rows.py",
        "                    self.exchange.held.transfer_stream.join()\n",
        "",
        found_by="tests/step/test_stream_order.py",
    ),
    Mutant(
        "ids of a plan that is discarded may be overwritten before it is made",
        "step/planned_steps.py",
        "        self._planning.uses(parts)",
        "        pass",
        found_by="tests/step/test_stream_order.py",
    ),
    Mutant(
        "ids of a plan of several tables that is discarded may be overwritten before it is made",
        "step/joint_exchange.py",
        "            self._planning.uses(ids)",
        "            pass",
        found_by="tests/step/test_stream_order.py",
    ),
    Mutant(
        "a step reads rows before they are loaded",
        "memory/side_stream.py",
        "            current_stream(self.end.device).wait_event(self.end)\n",
        "",
        found_by="tests/step/test_stream_order.py",
    ),
    # ---- exchange.py: announcements and gradients
    Mutant(
        "announced rows do not join a planned batch",
        "step/exchange.py",
        "self.extend(parts, is_planned=True, ordered=ordered)",
        "pass",
    ),
    Mutant(
        "announced rows do not begin the step",
        "step/exchange.py",
        "expected = batch or (None if announced is None else announced.batch)",
        "expected = batch",
        "tests/nn/test_loops.py::test_rows_and_state_are_those_of_the_plain_loop",
    ),
    Mutant(
        "zeros of zero_grad move rows",
        "step/stepped_rows.py",
        "            view.drop_zeros()\n            gradient = parameter.grad\n",
        "            gradient = parameter.grad\n",
    ),
    Mutant(
        "an earlier step's gradient is taken for this one's",
        "step/whole_weight.py",
        "        if not self.exchange.can_reach(number):\n",
        "        if False:\n",
        "tests/nn/test_embedding.py::test_backward_through_rows_that_have_left_is_an_error",
    ),
    # ---- exchange.py: shown rows; whole_weight.py and trained_rows.py
    Mutant(
        "a zero_grad is not noticed",
        "step/whole_weight.py",
        "                view.note_none()\n                self.exchange.note_zero_grad()\n",
        "                view.note_none()\n",
    ),
    Mutant(
        "a gradient that follows a zero_grad counts as its zeros",
        "step/whole_weight.py",
        "            self.parameter.grad = summed\n            view.note_gradient()\n",
        "            self.parameter.grad = summed\n",
        "tests/step/test_embedding_steps.py"
        "::test_a_gradient_of_zeros_that_follows_a_zero_grad_is_stepped",
    ),
    Mutant(
        "rows in other memory are no change",
        "step/parameter_view.py",
        "return version_of(parameter) != self.version or parameter.data_ptr() != self._pointer",
        "return version_of(parameter) != self.version",
        "tests/step/test_embedding_steps.py"
        "::test_rows_that_an_optimizer_puts_in_other_memory_are_changed_without_a_gradient_too",
    ),
    Mutant(
        "state that is attached in a step takes rows from before it",
        "step/trained_rows.py",
        "        self.exchange.held.write_back()\n        has_values",
        "        has_values",
        "tests/step/test_embedding_steps.py::test_rows_of_a_step_outlive_an_attach",
    ),
    # ---- trained_rows.py: max_norm
    Mutant(
        "shortened rows of the step are not written",
        "step/trained_rows.py",
        "                self.exchange.held.change()\n",
        "",
    ),
    Mutant(
        "the padding's row is shortened for the step only",
        "step/trained_rows.py",
        "                    self._store.write(torch.tensor([self._padding]), rows[-1:])\n",
        "                    pass\n",
    ),
    Mutant(
        "evaluation shortens rows of the table, not those of the step",
        "step/trained_rows.py",
        "            self.exchange.held.write_back()\n            self._store.write(",
        "            self._store.write(",
    ),
    Mutant(
        "rows that evaluation shortens are not written",
        "step/trained_rows.py",
        "            self._store.write(borrowed, rows)\n",
        "",
    ),
    Mutant(
        "a read does not see the step",
        "step/whole_weight.py",
        "        self.exchange.held.write_back(changes=False)\n",
        "",
    ),
    Mutant(
        "announcements of an earlier step are those of this one",
        "step/stepped_rows.py",
        "                held.announced.give_up()\n                stepped = ",
        "                stepped = ",
    ),
    # ---- gradient_sums.py and plan/planned_batch.py
    Mutant(
        "gradients are added up in another order than torch's",
        "step/gradient_sums.py",
        "(gradient.clone(), added.clone()) if expects_more else None",
        "None",
        "tests/step/test_embedding_steps.py::test_gradients_of_several_lookups_add_up_as_in_torch",
    ),
    Mutant(
        "a sparse gradient names only the rows that got one",
        "step/gradient_sums.py",
        "    if gradient.is_sparse:\n        summed = gradient.coalesce()\n",
        "    if gradient.is_sparse:\n        return gradient\n",
    ),
    Mutant(
        "the padding has no place behind rows that joined",
        "plan/planned_batch.py",
        "            places = torch.where(unique == self._padding, len(ids), places)\n",
        "            pass\n",
    ),
    Mutant(
        "a flush writes rows of other places",
        "step/counted_memory.py",
        "Block(held.view.rows_of(now), now.ids), None)",
        "Block([each.flip(0) for each in now.rows], now.ids), None)",
    ),
    # ---- exchange.py and fixed_blocks.py: blocks of one size
    Mutant(
        "rows beyond the count stay what an optimizer made of them",
        "step/block_memory.py",
        "            self.held.view.put_back(self.held.now)\n        self._blocks.clear_unused()\n",
        "            self.held.view.put_back(self.held.now)\n",
        "tests/nn/test_capacity.py::test_rows_beyond_the_count_are_zeros_before_and_after_a_step",
    ),
    Mutant(
        "rows of a capacity that are stale leave for the table",
        "step/fixed_memory.py",
        "            if not captured:",
        "            if False:",
    ),
    Mutant(
        "rows that were put aside stay there",
        "step/fixed_blocks.py",
        "Counted(self._outgoing_rows, self._outgoing_ids, self._every, self._outgoing_count)",
        "Counted(self._outgoing_rows, self._outgoing_ids, self._every, self._none)",
    ),
    Mutant(
        "rows of a capacity are not read again",
        "step/block_memory.py",
        "        blocks.read_again()\n",
        "",
    ),
    Mutant(
        "a fault is not forgotten once it is told",
        "step/fixed_blocks.py",
        "        self._halt.zero_()\n        self._fault.zero_()\n",
        "        self._fault.zero_()\n",
        "tests/nn/test_capacity.py::test_training_goes_on_after_the_error",
    ),
    Mutant(
        "a plan of a batch ahead is taken for a fault",
        "step/fixed_blocks.py",
        "following.compared(self.ids, self._status, halt, unreported)",
        "following.compared(self.ids, self._status, self._halt, self._fault)",
        "tests/nn/test_capacity.py::test_batches_around_a_prefetched_one_that_does_not_fit_are_trained",
    ),
    Mutant(
        "rows that were announced and not looked up are stepped in silence",
        "step/planned_steps.py",
        "        if now.stepped or now.before is not None or not self._checks_lookups:\n",
        "        if True:\n",
        "tests/step/test_announcements.py::test_a_step_that_leaves_an_announced_tensor_out_raises",
    ),
    Mutant(
        "a failed backward refuses the lookups after it",
        "step/exchange.py",
        "        free_failed_backward(held.device)",
        "        pass",
        "tests/nn/test_capacity.py::test_a_backward_that_fails_refuses_no_lookup_after_it",
    ),
    # ---- step_hooks.py and prefetch.py
    Mutant(
        "a closure sees the weight as the optimizer does",
        "optim/step_hooks.py",
        "            self.paused = True\n            self._restore()\n",
        "            self.paused = True\n",
        "tests/step/test_embedding_steps.py::test_a_closure_sees_the_weight_as_the_table",
    ),
    Mutant(
        "an interrupt between two tables steps one of them",
        "optim/step_hooks.py",
        "        self.done = True\n        stepped = [",
        "        stepped = [",
    ),
    Mutant(
        "a loop does not end for the rows",
        "nn/prefetch.py",
        "                end.callback(_end_loop, module, loop)\n",
        "",
        "tests/nn/test_prefetch.py::test_a_loop_that_is_left_keeps_no_rows_that_arrived_ahead",
    ),
]


def mutated_copy(folder: Path, mutant: Mutant | None) -> Path:
    """A copy of package and tests, changed by the mutant, that pytest runs in."""
    skipped = shutil.ignore_patterns("__pycache__", ".hypothesis", "data")
    shutil.copytree(PACKAGE, folder / "speedtorch", ignore=skipped)
    shutil.copytree(_TESTS, folder / "tests", ignore=skipped)
    shutil.copy(_TESTS.parent / "pyproject.toml", folder)
    if mutant is not None:
        (folder / "speedtorch" / mutant.file).write_text(mutant.changed(PACKAGE))
    return folder

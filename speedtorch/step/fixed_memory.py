"""FixedMemory: steps in blocks of a fixed size, whose numbers of rows stay on the device.

The host waits for nothing, so that a CUDA graph can hold a whole step. What is wrong with a batch
is found on the device: no row moves then, and the next lookup raises it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from speedtorch.plan.fixed_size_batch import FixedSizeBatch, raises_at_once
from speedtorch.step.block_memory import BlockMemory
from speedtorch.step.fixed_blocks import REFUSED, of_ranks
from speedtorch.step.step import Batch, Copy, PendingTransfer, Prefetched, Step
from speedtorch.step.turn import alone

__all__ = ["FaultAllReduce", "FixedMemory"]

_Made = TypeVar("_Made")
_Arguments = ParamSpec("_Arguments")


class FaultAllReduce(Protocol):
    """What ranks that make every lookup together have found wrong."""

    def agree(self, fault: Tensor) -> Tensor | int:
        """The largest of the faults of all ranks, 0: none. `[1]` on a GPU, which does not wait."""

    def check(self) -> None:
        """Raises RuntimeError if ranks were at different exchanges since the last lookup."""


class FixedMemory(BlockMemory):
    """Rows of at most `capacity` a step, none of which join one that has begun."""

    takes_more = False
    _next_ids: Sequence[Tensor] | None = None
    """Those of the step after the one that a CUDA graph is captured of."""
    _ranks: FaultAllReduce | None = None
    _is_agreed = False
    """Whether the ranks have been asked at this lookup."""

    def plan(self, parts: Sequence[Tensor], after: Batch | None = None) -> FixedSizeBatch:
        """As RowMemory.plan."""
        assert after is None or isinstance(after, FixedSizeBatch)
        held = self.held
        rows, device, padding = held.named_rows, held.device, held.padding
        return FixedSizeBatch(
            parts, rows, device, padding, self.capacity, after=after, name=held.name
        )

    def before_lookup(self) -> None:
        """As RowMemory.before_lookup."""
        held = self.held
        now, blocks = held.now, self._blocks
        if not held.captures():
            if self._ranks is None:
                self.raise_faults()
            return
        if now.captured:
            return
        is_settled = now.stepped and now.transfer is None and not blocks.left_some
        is_settled = is_settled and not (now.copy is Copy.STALE and blocks.hold_some)
        if not is_settled or not blocks.are_for(held.device, held.fields):
            raise RuntimeError(
                f"{held.name}: a CUDA graph begins with a step of its own: train a step or two"
                " as the graph will, then end prefetch(), and call zero_grad() and flush()"
            )

    def begun(
        self, batch: Batch, seen: set[tuple[int, int]], *, is_told: bool, prefetches: bool
    ) -> Step:
        """As RowMemory.begun."""
        assert isinstance(batch, FixedSizeBatch)
        held = self.held
        blocks, now = self._blocks, held.now
        if self._ranks is not None:
            fault = self._ask_ranks(self._ranks, batch.fault())
            if isinstance(fault, int):
                self._raise_with_ranks(fault)
            else:
                batch.spoil(fault)
        come: bool | None = isinstance(now.transfer, Prefetched) and now.transfer.batch is batch
        if not come:
            held.drop_prefetched()
        elif held.travel.end is not None:
            held.travel.join()
        captured = held.captures()
        if captured and self._next_ids is not None:
            come = None
        if captured:
            blocks.graphs.watch(blocks.ids)
        if not blocks.are_for(held.device, held.fields):
            blocks.make(held.device, held.fields)
        elif now.copy is Copy.STALE:
            if not captured:  # where none is held; a replay would lose those that it holds
                blocks.hold_none()  # the table has them, and perhaps newer ones
        elif now.batches and self._take():
            held.view.put_back(now)  # or they would be taken again, if this is interrupted
        blocks.begin(batch, come=come)
        leaving = None if come is False else blocks.put_aside
        return now.after(
            batch,
            blocks.ids,
            list(blocks.rows),
            seen,
            is_told=is_told,
            copy=Copy.DIRTY,
            leaving=leaving,
            prefetches=prefetches,
            captured=captured,
        )

    def extended(self, parts: Sequence[Tensor], *, is_planned: bool) -> Step:
        """Finds rows among those that are held already: no others fit."""
        held = self.held
        remedy = (
            f"{held.name}: with capacity all lookups of a step are announced before the first of"
            " them, by announce(), prefetch() or in one lookup; this one"
        )
        if held.captures():
            raise RuntimeError(f"{remedy} was not, and a CUDA graph cannot look what it names")
        batch = self.planned(parts, held.now.batches[0])
        if more := batch.brings:
            raise RuntimeError(f"{remedy} brings {more} new rows; nothing has changed")
        return held.now.with_batch(batch, is_planned=is_planned)

    def sent(self, pending: PendingTransfer, following: Batch | None) -> Prefetched | None:
        """As RowMemory.sent."""
        assert following is None or isinstance(following, FixedSizeBatch)
        held = self.held
        with held.travel.after_current(held.device):
            if held.now.captured and self._next_ids is not None:
                self._blocks.send(self.plan(self._next_ids), foreseen=True)
            else:
                self._blocks.send(following)
        return None if following is None else Prefetched(following, [])

    def put_back(self, prefetched: Prefetched) -> None:
        """Nothing: what has arrived has not taken the place of what the table has."""

    def written_back(self, *, changes: bool) -> Step:
        """As RowMemory.written_back."""
        held = self.held
        now, blocks = held.now, self._blocks
        if not now.batches:
            return now
        # With a gradient that is left an optimizer steps them once more; a CUDA graph does not know
        # that the table has changed, and reads what it holds by itself.
        captured, is_stale = blocks.graphs.are_alive, now.copy is Copy.STALE
        view = held.view
        has_gradient = view.has_gradient() if now.stepped else view.parameter.grad is not None
        stay = not held.is_over() or (not captured and has_gradient)
        if not is_stale:
            self._take()
            blocks.go_home(stay=stay)
        if captured and not stay:
            if is_stale:
                blocks.hold_none()
            return now._replace(rows=[*now.rows], copy=Copy.CLEAN)
        # Without them the optimizer's state of now may be another's, or gone.
        return now._replace(copy=Copy.STALE if is_stale or changes else Copy.CLEAN)

    # ---- what is wrong with a batch, which the device finds

    @alone
    def raise_faults(self) -> None:
        """As RowMemory.raise_faults; IndexError or RuntimeError, and the step is given up."""
        try:
            self._blocks.check()
        except (IndexError, RuntimeError):
            self.held.give_up_step()
            raise
        if self._ranks is not None:
            self._ranks.check()

    @alone
    def resume(self) -> None:
        """Lets rows move again after stop(), in a new step."""
        self._blocks.go_on()
        self.held.give_up_step()

    # ---- ranks, which make every lookup together

    def agree_with(self, ranks: FaultAllReduce) -> None:
        """Lets steps begin if they can on all ranks.

        Every call of together() is one of all ranks then, which asks once whether
        something is wrong. What is found late is not raised at lookups: the ranks would not agree.
        """
        self._ranks = ranks

    def together(
        self,
        look_up: Callable[_Arguments, _Made],
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Made:
        """Holds or plans rows; what one rank cannot hold, none does."""
        if (ranks := self._ranks) is None:
            return look_up(*args, **kwargs)
        held, device = self.held, self.held.device
        self._is_agreed, before = False, held.now
        try:
            found = look_up(*args, **kwargs)
        except Exception:
            if not self._is_agreed:
                self._ask_ranks(ranks, torch.full((1,), REFUSED, device=device))
            raise
        if not self._is_agreed:
            fault = self._ask_ranks(ranks, torch.zeros(1, dtype=torch.int64, device=device))
            # Rows that a step finds among its own are counted at once, on a GPU, too.
            found_more = len(held.now.batches) > len(before.batches)
            if raises_at_once(device) or (found_more and held.now.number == before.number):
                self._raise_with_ranks(fault)
        return found

    def _ask_ranks(self, ranks: FaultAllReduce, fault: Tensor) -> Tensor | int:
        self._is_agreed = True
        return ranks.agree(fault)

    def _raise_with_ranks(self, fault: Tensor | int) -> None:
        """Raises what some rank has found wrong."""
        if why := int(fault):
            self.held.announced.give_up()
            raise of_ranks(self.held.name, why, "nothing has changed")

    # ---- CUDA graphs

    @alone
    def stand_still(self) -> None:
        """Lets no row move until move_again(): lookups give zeros, and nothing is trained."""
        held = self.held
        held.write_back()
        self.raise_faults()
        if not self._blocks.are_for(held.device, held.fields):
            self._blocks.make(held.device, held.fields)
        self._blocks.is_halted.fill_(1)

    @alone
    def move_again(self) -> None:
        """Ends stand_still()."""
        held = self.held
        held.drop_prefetched()
        held.announced.forget()
        self._blocks.go_on()
        held.take(held.now._replace(stepped=True))  # the next lookup begins another

    @contextmanager
    def foreseeing(self, parts: Sequence[Tensor] | None) -> Iterator[None]:
        """A CUDA graph that is captured within sends for the rows of the ids of the next step.

        They are what these tensors hold at each replay; without any it sends for none.
        """
        self._next_ids = parts
        try:
            yield
        finally:
            self._next_ids = None
            try:
                self.held.travel.join()
            finally:
                self.held.travel.forget()  # its last work is the graph's

    @alone
    def before_replay(self) -> None:
        """Called before a CUDA graph of a whole step of the rows is replayed."""
        held = self.held
        self.raise_faults()
        held.complete(ahead=False)
        held.drop_prefetched()
        held.read_again()
        held.store.before_replay()
        held.take(held.now._replace(stepped=True))  # the next lookup begins another

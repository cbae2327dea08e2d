"""FixedExchange: steps in blocks of a fixed size, whose numbers of rows stay on the device.

The host waits for nothing, so that a CUDA graph can hold a whole step. What is wrong with a batch
is found on the device: no row moves then, and the next lookup raises it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from speedtorch.plan.fixed_size_batch import FixedSizeBatch, raises_at_once
from speedtorch.step.announcements import Announced
from speedtorch.step.block_exchange import BlockExchange
from speedtorch.step.fixed_blocks import REFUSED, of_ranks
from speedtorch.step.step import Batch, Copy, LookupPlaces, PendingTransfer, Prefetched, Step
from speedtorch.step.turn import alone

__all__ = ["FaultAllReduce", "FixedExchange"]

_Made = TypeVar("_Made")


class FaultAllReduce(Protocol):
    """What ranks that make every lookup together have found wrong."""

    def agree(self, fault: Tensor) -> Tensor | int:
        """The largest of the faults of all ranks, 0: none. `[1]` on a GPU, which does not wait."""

    def check(self) -> None:
        """Raises RuntimeError if ranks were at different exchanges since the last lookup."""


class FixedExchange(BlockExchange):
    """Rows of at most `capacity` a step, none of which join one that has begun."""

    takes_more = False
    _next_ids: Sequence[Tensor] | None = None
    """Those of the step after the one that a CUDA graph is captured of."""
    _ranks: FaultAllReduce | None = None
    _is_agreed = False
    """Whether the ranks have been asked at this lookup."""

    def _plan(self, parts: Sequence[Tensor], after: Batch | None = None) -> FixedSizeBatch:
        assert after is None or isinstance(after, FixedSizeBatch)
        rows, device, padding = self._named_rows, self.device, self._padding
        return FixedSizeBatch(
            parts, rows, device, padding, self.capacity, after=after, name=self.name
        )

    def _before_lookup(self) -> None:
        now, blocks = self.now, self._blocks
        if not self._captures():
            if self._ranks is None:
                self.raise_faults()
            return
        if now.captured:
            return
        is_settled = now.stepped and now.transfer is None and not blocks.left_some
        is_settled = is_settled and not (now.copy is Copy.STALE and blocks.hold_some)
        if not is_settled or not blocks.are_for(self.device, self.fields):
            raise RuntimeError(
                f"{self.name}: a CUDA graph begins with a step of its own: train a step or two"
                " as the graph will, then end prefetch(), and call zero_grad() and flush()"
            )

    def _begun(
        self, batch: Batch, seen: set[tuple[int, int]], *, is_told: bool, prefetches: bool
    ) -> Step:
        assert isinstance(batch, FixedSizeBatch)
        blocks, now = self._blocks, self.now
        if self._ranks is not None:
            fault = self._ask_ranks(self._ranks, batch.fault())
            if isinstance(fault, int):
                self._raise_with_ranks(fault)
            else:
                batch.spoil(fault)
        come: bool | None = isinstance(now.transfer, Prefetched) and now.transfer.batch is batch
        if not come:
            self._drop_prefetched()
        elif self._travel.end is not None:
            self._travel.join()
        captured = self._captures()
        if captured and self._next_ids is not None:
            come = None
        if captured:
            blocks.graphs.watch(blocks.ids)
        if not blocks.are_for(self.device, self.fields):
            blocks.make(self.device, self.fields)
        elif now.copy is Copy.STALE:
            if not captured:  # where none is held; a replay would lose those that it holds
                blocks.hold_none()  # the table has them, and perhaps newer ones
        elif now.batches and self._take():
            self._view.put_back(now)  # or they would be taken again, if this is interrupted
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

    def _extended(self, parts: Sequence[Tensor], *, is_planned: bool) -> Step:
        """Finds rows among those that are held already: no others fit."""
        remedy = (
            f"{self.name}: with capacity all lookups of a step are announced before the first of"
            " them, by announce(), prefetch() or in one lookup; this one"
        )
        if self._captures():
            raise RuntimeError(f"{remedy} was not, and a CUDA graph cannot look what it names")
        batch = self.planned(parts, self.now.batches[0])
        if more := batch.brings:
            raise RuntimeError(f"{remedy} brings {more} new rows; nothing has changed")
        return self.now.with_batch(batch, is_planned=is_planned)

    def _sent(self, pending: PendingTransfer, following: Batch | None) -> Prefetched | None:
        assert following is None or isinstance(following, FixedSizeBatch)
        with self._travel.after_current(self.device):
            if self.now.captured and self._next_ids is not None:
                self._blocks.send(self._plan(self._next_ids), foreseen=True)
            else:
                self._blocks.send(following)
        return None if following is None else Prefetched(following, [])

    def _return(self, prefetched: Prefetched) -> None:
        """Nothing: what has arrived has not taken the place of what the table has."""

    def _written_back(self, *, changes: bool) -> Step:
        now, blocks = self.now, self._blocks
        if not now.batches:
            return now
        # With a gradient that is left an optimizer steps them once more; a CUDA graph does not know
        # that the table has changed, and reads what it holds by itself.
        captured, is_stale = blocks.graphs.are_alive, now.copy is Copy.STALE
        view = self._view
        has_gradient = view.has_gradient() if now.stepped else view.parameter.grad is not None
        stay = not self.is_over() or (not captured and has_gradient)
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
        """As Exchange.raise_faults; IndexError or RuntimeError, and the step is given up."""
        try:
            self._blocks.check()
        except (IndexError, RuntimeError):
            self._give_up_step()
            raise
        if self._ranks is not None:
            self._ranks.check()

    @alone
    def resume(self) -> None:
        """Lets rows move again after stop(), in a new step."""
        self._blocks.go_on()
        self._give_up_step()

    # ---- ranks, which make every lookup together

    def agree_with(self, ranks: FaultAllReduce) -> None:
        """Lets steps begin if they can on all ranks.

        Every call of hold() and plan_announced() is one of all ranks then, which asks once whether
        something is wrong. What is found late is not raised at lookups: the ranks would not agree.
        """
        self._ranks = ranks

    def _look_up(self, ids: Tensor) -> LookupPlaces | None:
        hold = partial(super()._look_up, ids)
        return hold() if self._ranks is None else self._with_ranks(self._ranks, hold)

    def _announce(self, parts: Sequence[Tensor]) -> Announced | None:
        plan = partial(super()._announce, parts)
        return plan() if self._ranks is None else self._with_ranks(self._ranks, plan)

    def _with_ranks(self, ranks: FaultAllReduce, hold: Callable[[], _Made]) -> _Made:
        """Holds or plans rows; what one rank cannot hold, none does."""
        self._is_agreed, before = False, self.now
        try:
            found = hold()
        except Exception:
            if not self._is_agreed:
                self._ask_ranks(ranks, torch.full((1,), REFUSED, device=self.device))
            raise
        if not self._is_agreed:
            fault = self._ask_ranks(ranks, torch.zeros(1, dtype=torch.int64, device=self.device))
            # Rows that a step finds among its own are counted at once, on a GPU, too.
            found_more = len(self.now.batches) > len(before.batches)
            if raises_at_once(self.device) or (found_more and self.now.number == before.number):
                self._raise_with_ranks(fault)
        return found

    def _ask_ranks(self, ranks: FaultAllReduce, fault: Tensor) -> Tensor | int:
        self._is_agreed = True
        return ranks.agree(fault)

    def _raise_with_ranks(self, fault: Tensor | int) -> None:
        """Raises what some rank has found wrong."""
        if why := int(fault):
            self.forget_announced()
            raise of_ranks(self.name, why, "nothing has changed")

    # ---- CUDA graphs

    @alone
    def stand_still(self) -> None:
        """Lets no row move until move_again(): lookups give zeros, and nothing is trained."""
        self.write_back()
        self.raise_faults()
        if not self._blocks.are_for(self.device, self.fields):
            self._blocks.make(self.device, self.fields)
        self._blocks.is_halted.fill_(1)

    @alone
    def move_again(self) -> None:
        """Ends stand_still()."""
        self._drop_prefetched()
        self._announced.forget()
        self._blocks.go_on()
        self._end_step()

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
                self._travel.join()
            finally:
                self._travel.forget()  # its last work is the graph's

    @alone
    def before_replay(self) -> None:
        """Called before a CUDA graph of a whole step of the rows is replayed."""
        self.raise_faults()
        self.complete(ahead=False)
        self._drop_prefetched()
        self._read_again()
        self._store.before_replay()
        self._end_step()

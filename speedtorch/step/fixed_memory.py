"""FixedMemory: steps in blocks of a fixed size; the number of rows remains on the device.

The host does not wait for the device, so a CUDA graph can capture a whole step. The device finds
the faults of a batch: it then changes no row, and a later call raises the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from speedtorch.plan.fixed_size_batch import FixedSizeBatch, raises_at_once
from speedtorch.step.block_memory import BlockMemory
from speedtorch.step.fixed_blocks import REFUSED, rank_error
from speedtorch.step.row_lock import serialized
from speedtorch.step.step import Batch, Copy, PendingTransfer, Prefetched, Step

__all__ = ["FaultAllReduce", "FixedMemory", "Replays"]

_Made = TypeVar("_Made")
_Arguments = ParamSpec("_Arguments")


class FaultAllReduce(Protocol):
    """Combines the faults of ranks that make every lookup together."""

    def agree(self, fault: Tensor) -> Tensor | int:
        """The largest fault of all ranks, 0 for none. On a GPU a `[1]` tensor, without a wait."""

    def check(self) -> None:
        """Raises RuntimeError if ranks made different calls since the last lookup."""


class Replays:
    """The rows of one table in the replays of a CUDA graph."""

    def __init__(self, memory: FixedMemory) -> None:
        self._memory = memory

    def before(self) -> None:
        """Called before a replay."""
        self._memory.before_replay()

    def agree(self, compared: set[object]) -> None:
        """Called next, as the last call that may raise.

        Ranks that share the rows compare their replays; `compared` records ranks that have done so.
        """

    def after(self) -> None:
        """Called after a replay was launched."""


class FixedMemory(BlockMemory):
    """Memory for at most `capacity` rows a step; no row can join a step that has begun."""

    takes_more = False
    _next_ids: Sequence[Tensor] | None = None
    """Ids of the step after the step that a CUDA graph captures."""
    _ranks: FaultAllReduce | None = None
    _is_agreed = False
    """Whether this lookup has already combined its fault with the other ranks'."""

    def plan(self, parts: Sequence[Tensor], after: Batch | None = None) -> FixedSizeBatch:
        """See RowMemory.plan."""
        assert after is None or isinstance(after, FixedSizeBatch)
        held = self.held
        rows, device, padding = held.named_rows, held.device, held.padding
        return FixedSizeBatch(
            parts, rows, device, padding, self.capacity, after=after, name=held.name
        )

    def before_lookup(self) -> None:
        """See RowMemory.before_lookup."""
        held = self.held
        now, blocks = held.now, self._blocks
        if not held.captures():
            if self._ranks is None:
                self.raise_faults()
            return
        if now.captured:
            return
        is_settled = now.stepped and now.transfer is None and not blocks.has_outgoing
        is_settled = is_settled and not (now.copy is Copy.STALE and blocks.may_have_rows)
        if not is_settled or not blocks.are_for(held.device, held.fields):
            raise RuntimeError(
                f"{held.name}: the capture of a CUDA graph must begin a new step. Train one or two"
                " steps as the graph will, then end prefetch(), and call zero_grad() and flush()."
            )

    def begun(
        self, batch: Batch, seen: set[tuple[int, int]], *, is_planned: bool, prefetches: bool
    ) -> Step:
        """See RowMemory.begun."""
        assert isinstance(batch, FixedSizeBatch)
        held = self.held
        blocks, now = self._blocks, held.now
        captured = held.captures()
        if batch.is_captured != captured:
            held.announced.forget()
            raise RuntimeError(
                f"{held.name}: ids were announced or planned outside of the capture of a CUDA graph"
                " and looked up inside, or the reverse. A replay would not plan its ids. Announce"
                " ids where they are looked up. Nothing has changed."
            )
        if self._ranks is not None:
            fault = self._combine_faults(self._ranks, batch.fault())
            if isinstance(fault, int):
                self._raise_with_ranks(fault)
            else:
                batch.mark_bad(fault)
        is_ahead: bool | None = isinstance(now.transfer, Prefetched) and now.transfer.batch is batch
        if not is_ahead:
            held.drop_prefetched()
        elif held.transfer_stream.end is not None:
            held.transfer_stream.join()
        if captured and self._next_ids is not None:
            is_ahead = None
        if captured:
            blocks.graphs.watch(blocks.ids)
        if not blocks.are_for(held.device, held.fields):
            blocks.make(held.device, held.fields)
        elif now.copy is Copy.STALE:
            # The table has these rows, perhaps newer. In a capture the blocks are empty already,
            # and each replay would repeat clear() and drop its rows.
            if not captured:
                blocks.clear()
        elif now.batches and self._take():
            held.view.put_back(now)  # else an interrupt below would repeat the copy
        blocks.begin(batch, are_prefetched=is_ahead)
        outgoing = None if is_ahead is False else blocks.outgoing
        return now.after(
            batch,
            blocks.ids,
            list(blocks.rows),
            seen,
            is_planned=is_planned,
            copy=Copy.DIRTY,
            outgoing=outgoing,
            prefetches=prefetches,
            captured=captured,
        )

    def extended(self, parts: Sequence[Tensor], *, is_planned: bool, ordered: bool) -> Step:
        """Finds rows among the step's rows; raises RuntimeError if there are others."""
        held = self.held
        remedy = (
            f"{held.name}: with capacity= all lookups of a step must be announced before the first"
            " of them, or be one lookup. Call announce(), also for the batch of a prefetch() loop"
            " that has ended. This call"
        )
        if held.captures():
            raise RuntimeError(f"{remedy} was later, and a CUDA graph cannot check its ids.")
        batch = self.planned(parts, held.now.batches[0])
        if more := batch.new_row_count:
            raise RuntimeError(
                f"{remedy} has {more} new rows. Nothing has changed. If the earlier lookups belong"
                " to a step that you gave up, call zero_grad()."
            )
        return held.now.with_batch(batch, is_planned=is_planned)

    def sent(self, pending: PendingTransfer, following: Batch | None) -> Prefetched | None:
        """See RowMemory.sent."""
        assert following is None or isinstance(following, FixedSizeBatch)
        held = self.held
        with held.transfer_stream.after_current(held.device):
            if held.now.captured and self._next_ids is not None:
                self._blocks.send(self.plan(self._next_ids), for_replay=True)
            else:
                self._blocks.send(following)
        return None if following is None else Prefetched(following, [])

    def put_back(self, prefetched: Prefetched) -> None:
        """Does nothing: the table still has the current copies of prefetched rows."""

    def written_back(self, *, changes: bool) -> Step:
        """See RowMemory.written_back."""
        held = self.held
        now, blocks = held.now, self._blocks
        if not now.batches:
            return now
        # If a gradient is left, an optimizer can step the rows once more. A CUDA graph cannot see
        # that the table has changed, so live graphs need empty blocks and load their rows again.
        captured, is_stale = blocks.graphs.are_alive, now.copy is Copy.STALE
        view = held.view
        has_gradient = view.has_gradient() if now.stepped else view.parameter.grad is not None
        keep = not held.is_over() or (not captured and has_gradient)
        if not is_stale:
            self._take()
            blocks.write_back(keep=keep)
        if captured and not keep and is_stale:
            blocks.clear()
        if not keep and view.shown is not None and not view.has_gradient():
            view.follow(self.ids_of(now))  # zeros of zero_grad() remain the gradient
        if captured and not keep:
            return now._replace(rows=[*now.rows], copy=Copy.CLEAN)
        return now._replace(copy=Copy.STALE if is_stale or changes else Copy.CLEAN)

    # ---- faults of a batch, found on the device

    @serialized
    def raise_faults(self) -> None:
        """Like RowMemory.raise_faults; gives up the step and raises IndexError or RuntimeError."""
        try:
            self._blocks.check()
        except (IndexError, RuntimeError):
            self.held.give_up_step()
            raise
        if self._ranks is not None:
            self._ranks.check()

    @serialized
    def resume(self) -> None:
        """Ends stop(): rows move again, and the next lookup begins a step."""
        self._blocks.resume()
        self.held.give_up_step()

    # ---- ranks that make every lookup together

    def agree_with(self, ranks: FaultAllReduce) -> None:
        """Makes a step begin on all ranks or on none.

        All ranks then make every together() call, which combines their fault codes once. A lookup
        does not raise the fault of an earlier step that the GPU has found on this rank only: the
        other ranks would wait in their next collective. FaultConsensus raises it on all ranks.
        """
        self._ranks = ranks

    def together(
        self,
        look_up: Callable[_Arguments, _Made],
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Made:
        """Calls `look_up`, which loads or plans rows; if one rank fails, no rank loads rows."""
        if (ranks := self._ranks) is None:
            return look_up(*args, **kwargs)
        held, device = self.held, self.held.device
        self._is_agreed, before = False, held.now
        try:
            found = look_up(*args, **kwargs)
        except Exception:
            if not self._is_agreed:
                self._combine_faults(ranks, torch.full((1,), REFUSED, device=device))
            raise
        if not self._is_agreed:
            fault = self._combine_faults(ranks, torch.zeros(1, dtype=torch.int64, device=device))
            # extended() counts rows on the host, on a GPU too, so its faults raise at once.
            found_more = len(held.now.batches) > len(before.batches)
            if raises_at_once(device) or (found_more and held.now.number == before.number):
                self._raise_with_ranks(fault)
        return found

    def _combine_faults(self, ranks: FaultAllReduce, fault: Tensor) -> Tensor | int:
        self._is_agreed = True
        return ranks.agree(fault)

    def _raise_with_ranks(self, fault: Tensor | int) -> None:
        """Raises the error for the fault of any rank, if there is one."""
        if why := int(fault):
            self.held.announced.give_up()
            raise rank_error(self.held.name, why, "Nothing has changed.")

    # ---- CUDA graphs

    @contextmanager
    def paused(self) -> Iterator[None]:
        """In this context lookups return zeros (except padding) and train no row."""
        held = self.held
        with self.lock:
            held.write_back()
            held.store.settle(held.device)  # all ranks see a fault, or none does
            self.raise_faults()
            if not self._blocks.are_for(held.device, held.fields):
                self._blocks.make(held.device, held.fields)
        try:
            self._blocks.is_halted.fill_(1)
            yield
        finally:
            with self.lock:
                held.drop_prefetched()
                held.announced.forget()
                self._blocks.resume()
                held.take(held.now._replace(stepped=True))  # the next lookup begins a step

    @contextmanager
    def prefetching_for_replay(self, parts: Sequence[Tensor] | None) -> Iterator[None]:
        """A CUDA graph captured in this context prefetches the rows of the next step.

        Each replay reads the ids from the tensors in `parts`. With None, replays prefetch no rows.
        """
        self._next_ids = parts
        try:
            yield
        finally:
            self._next_ids = None
            try:
                self.held.transfer_stream.join()
            finally:
                self.held.transfer_stream.forget()  # its last event belongs to the graph

    @serialized
    def before_replay(self) -> None:
        """Called before the replay of a CUDA graph that contains a whole step of the rows."""
        held = self.held
        if self._ranks is None:
            self.raise_faults()
        held.complete(ahead=False)
        held.drop_prefetched()
        held.read_again()
        held.store.before_replay()
        held.announced.give_up()  # as an optimizer's step does
        held.take(held.now._replace(stepped=True))  # the next lookup begins a step

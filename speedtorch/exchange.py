"""Exchange: held rows leave for the table while others arrive, also beside the GPU's other work."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from speedtorch.held_rows import HeldRows
from speedtorch.ops import optimizer_state_swap, synchronize
from speedtorch.planned_batch import PlannedBatch
from speedtorch.side_stream import SideStream

__all__ = ["Exchange"]


class Exchange(HeldRows):
    """Held rows and the table; rows of planned batches travel ahead of their step. See Swapper."""

    def __init__(
        self, name: str, weight: Tensor, parameter: torch.nn.Parameter, padding: int | None
    ) -> None:
        """See Swapper."""
        super().__init__(name, weight, parameter, padding)
        self.queue: deque[PlannedBatch] = deque()
        """Batches to come, planned ahead."""
        self._queued = False
        self._coming: tuple[PlannedBatch, list[Tensor]] | None = None
        """The next batch, and memory where its rows have arrived or are about to."""
        self._planning, self._exchange = SideStream("planning"), SideStream("exchange")

    def _swap(
        self,
        leaving: list[Tensor],
        evict: Tensor,
        arriving: list[Tensor],
        load: Tensor,
        evict_places: Tensor | None = None,
        load_places: Tensor | None = None,
    ) -> None:
        """One exchange; without places rows are in the order of their ids."""
        optimizer_state_swap(
            self.fields,
            leaving,
            evict,
            arriving,
            load,
            evict_places=self._order(evict.shape[0]) if evict_places is None else evict_places,
            load_places=self._order(load.shape[0]) if load_places is None else load_places,
        )

    def flush(self, *, wait: bool = True) -> None:
        """Brings the table up to date; rows stay held.

        Args:
            wait: until the CPU sees it, too.
        """
        self._refuse_lost_write()
        self._drop_coming()  # who asks for it may write to the table
        if self._is_dirty():
            nothing = self._held[:0]
            rows = self._held_rows()
            self._swap(rows, self._held, self._nothing(), nothing)
            self._over |= self._was_written()
            self._dirty = False
            self._version, self._pointer = self.parameter._version, self.parameter.data_ptr()
        if wait:
            synchronize(self.device)

    # --------------------------------------------------------------------------------------------
    # Ahead of the steps

    def plan_ahead(self, parts: Sequence[Tensor]) -> PlannedBatch:
        """Plans the batch after those that are planned already.

        Args:
            parts: its ids, of any shape, on either device.

        Returns:
            What a lookup of these ids will find in the queue.
        """
        before = self.queue[-1] if self.queue else self._batch
        with self._planning.after_current(self.device):
            batch = PlannedBatch(parts, self.table_rows, self.device, self.padding, after=before)
        self.queue.append(batch)
        return batch

    def skip(self, batch: PlannedBatch) -> None:
        """Forgets a planned batch that no step has looked up, and those before it."""
        if batch in self.queue:
            while self.queue.popleft() is not batch:
                pass

    def start_queue(self) -> None:
        """Begins a loop that plans ahead.

        Raises:
            RuntimeError: another one has not ended.
        """
        if self._queued:
            raise RuntimeError(
                f"{self.name}: its rows are prefetched by another loop, which must end first (close"
                " its generator, or let it run to its end)"
            )
        self._queued = True

    def end_queue(self) -> None:
        """Ends it: forgets what was planned; rows that have arrived for it go back."""
        self._queued = False
        self.queue.clear()
        self._drop_coming()

    def _take_planned(self, parts: Sequence[Tensor]) -> PlannedBatch | None:
        """The next planned batch, if these are its ids, or parts of what it was planned with."""
        if not self.queue:
            return None
        batch = self.queue[0]
        self._planning.join()
        batch.count()
        if any(batch.part_of(part) is None for part in parts):
            rows, device = self.table_rows, self.device
            asked = PlannedBatch(parts, rows, device, self.padding, after=batch.ids)
            if asked.held != batch.held or len(asked.arriving[0]):
                return None  # a step holds the rows that its lookups name, and no others
        return self.queue.popleft()

    def _advance(self, batch: PlannedBatch, rows: list[Tensor]) -> None:
        """Rows that have arrived are held now, with those that stay; the others leave meanwhile."""
        old = self._held_rows()
        self._exchange.join()
        places, taken_from = batch.staying
        for new, each in zip(rows, old, strict=True):
            new.index_copy_(0, places, each.index_select(0, taken_from))
        self._fetch_padding(rows[0], batch.held)
        (evict, evict_places), before = batch.leaving, self._held
        try:
            self._coming = None
            self._hold(rows, batch.ids, batch, newer=True)
            self._send(old, evict, evict_places)
        except BaseException:
            # Rows that leave are nowhere but in `old` until they are in the table.
            self._exchange.join()
            self._coming = None
            self._swap(old, before, self._nothing(), before[:0])
            self._forget()
            raise

    def _send(self, old: list[Tensor], evict: Tensor, places: Tensor) -> None:
        """Rows of the last step leave, those of the next batch arrive, beside what comes now.

        Args:
            old: the rows that were held before those of now.
            evict: ids of those that leave.
            places: where they are in `old`.
        """
        following = self.queue[0] if self.queue and self.queue[0].after is self._batch else None
        load, load_places = evict[:0], places[:0]
        if following is not None:
            self._planning.join()
            try:
                load, load_places = following.arriving
            except IndexError:
                following = None  # the lookup of its bad ids says so
        if following is None and evict.shape[0] == 0:
            return
        self._exchange.uses(old)
        with self._exchange.after_current(self.device):
            count = 0 if following is None else following.held
            rows = self._empty(count)
            arriving = self._without_padding(rows, count)
            self._swap(old, evict, arriving, load, places, load_places)
        if following is not None:
            self._coming = (following, rows)

    def _write_coming(self) -> None:
        """Rows that have arrived for the next batch are in the table, too, after this."""
        if self._coming is not None:
            # A row that left while it arrived is nowhere else.
            batch, rows = self._coming
            ids, places = batch.arriving
            held = self._without_padding(rows, batch.held)
            self._swap(held, ids, self._nothing(), ids[:0], places)

    def _drop_coming(self) -> None:
        self._exchange.join()
        self._write_coming()
        self._coming = None

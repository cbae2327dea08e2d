"""Swapper: exchanges the rows that a step holds, with their optimizer state, for those of the next.

A step holds each row that its lookups name once, as a parameter and as the optimizer's state of it.
The first lookup after the optimizer's step begins the next step: one optimizer_state_swap brings
the rows of the last one back to the table while those of the next arrive, and rows of both stay.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from speedtorch.held_rows import HeldRows, SummedLookup, Token, replace_rows
from speedtorch.ops import optimizer_state_swap, pinned_gather, pinned_scatter, synchronize
from speedtorch.planned_batch import PlannedBatch
from speedtorch.side_stream import SideStream

__all__ = ["RowState", "Swapper"]


class RowState(Protocol):
    """The state that an attached optimizer keeps of the held rows."""

    def rows(self) -> list[Tensor]:
        """The state of the held rows, field by field."""

    def hold(self, rows: Sequence[Tensor]) -> None:
        """Puts the state of other rows in its place."""


class Swapper:
    """Holds rows of a table as a parameter, step by step.

    Args:
        name: what errors call it.
        weight: all rows, `[rows, ...]`.
        parameter: holds the rows of a step; its device is where they are held.
        padding: id of a row that is never trained, or None.
    """

    def __init__(
        self, name: str, weight: Tensor, parameter: torch.nn.Parameter, padding: int | None
    ) -> None:
        self.name = name
        self.weight = weight
        self.table_rows = weight.shape[0]
        self.parameter = parameter
        self.padding = padding
        self.state_fields: list[Tensor] = []
        self.state: RowState | None = None
        self.takes_sparse = False
        """Whether the attached optimizer takes sparse gradients only."""
        self.lookups: weakref.WeakSet[Token] = weakref.WeakSet()
        self.step = 0
        """Counts the exchanges: rows that a graph of an earlier one looked up have left."""
        self.queue: deque[PlannedBatch] = deque()
        """Batches to come, planned ahead."""
        self._queued = False
        self._coming: tuple[PlannedBatch, list[Tensor]] | None = None
        """The next batch, and memory where its rows have arrived or are about to."""
        self._planning, self._exchange = SideStream("planning"), SideStream("exchange")
        self._numbers = torch.empty(0, dtype=torch.int64)
        self._forget()

    def use(self, weight: Tensor, state: RowState | None, state_fields: Sequence[Tensor]) -> None:
        """Moves rows of these fields from now on; holds none at first.

        Args:
            weight: all rows, `[rows, ...]`.
            state: holds the state of the held rows, or None if there is none.
            state_fields: all rows of the state, field by field.
        """
        self.weight, self.state, self.state_fields = weight, state, list(state_fields)
        self.table_rows = weight.shape[0]
        self._forget()

    def _forget(self) -> None:
        """Holds no rows; whatever was held is gone."""
        nothing = torch.empty(0, dtype=torch.int64, device=self.device)
        self._hold(self._empty(0), nothing, None)

    # --------------------------------------------------------------------------------------------
    # What is held now

    @property
    def device(self) -> torch.device:
        """Where rows are held."""
        return self.parameter.device

    @property
    def fields(self) -> list[Tensor]:
        """All rows of the weight and of each field of the state."""
        return [self.weight, *self.state_fields]

    def _empty(self, count: int) -> list[Tensor]:
        """Memory for rows of every field; behind those of the weight is place for the padding."""
        extra = [int(self.padding is not None), *(0 for _ in self.state_fields)]
        return [
            torch.empty((count + more, *field.shape[1:]), dtype=field.dtype, device=self.device)
            for field, more in zip(self.fields, extra, strict=True)
        ]

    def _nothing(self) -> list[Tensor]:
        """No row of any field."""
        return [each[:0] for each in self._empty(0)]

    def _hold(
        self, rows: list[Tensor], held: Tensor, batch: PlannedBatch | None, newer: bool = False
    ) -> None:
        """Begins a step with these rows. `newer`: some of them are not in the table yet."""
        count = held.shape[0]
        self._rows, self._held, self._batch = rows[0], held, batch
        self._count = count
        if batch is not None:
            batch.after = None  # or each batch would keep the one before it
        self._known: list[PlannedBatch] = []
        self._dirty, self._over, self._announced = newer, False, False
        self._got_gradient, self._gradient_version = False, 0
        self.lookups.clear()
        self.step += 1
        self._show(rows, count)
        self.parameter.grad = None

    def _show(self, rows: list[Tensor], count: int) -> None:
        """Makes the parameter and the optimizer see the rows."""
        replace_rows(self.parameter, rows[0][:count])
        if self.state is not None:
            self.state.hold([each[:count] for each in rows[1:]])
        self._version, self._pointer = self.parameter._version, self.parameter.data_ptr()

    def _held_rows(self) -> list[Tensor]:
        """The held rows of every field, as parameter and optimizer have them now."""
        rows = [self.parameter.detach()]
        if self.state is not None:
            rows += self.state.rows()
        for each, field in zip(rows, self.fields, strict=True):
            expected = (self._count, *field.shape[1:])
            if tuple(each.shape) != expected:
                raise RuntimeError(
                    f"{self.name}: the held rows have the shape {list(each.shape)}, expected"
                    f" {list(expected)}; who trains them must not resize them"
                )
        return [each.contiguous() for each in rows]

    def _was_written(self) -> bool:
        written = self.parameter._version != self._version
        return written or self.parameter.data_ptr() != self._pointer

    def _is_dirty(self) -> bool:
        """Whether held rows may differ from those of the table."""
        return self._dirty or self._was_written()

    def _step_is_over(self) -> bool:
        """Whether the next lookup begins a step of its own."""
        if self._over or self._was_written():
            return True
        if self._announced or len(self.lookups) > 0:
            return False
        gradient = self.parameter.grad
        if gradient is None:
            return True
        # Somebody wrote to the gradient: zero_grad(set_to_none=False) without a step (a GradScaler
        # left it out), or a scale. Only the first lets the rows go.
        if gradient._version == self._gradient_version or gradient.is_sparse:
            return False
        return not bool(gradient.count_nonzero())

    # --------------------------------------------------------------------------------------------
    # Lookups

    def lookup(
        self, ids: Tensor, max_norm: float | None = None, norm_type: float = 2.0
    ) -> tuple[Tensor, Tensor]:
        """The rows that ids name, held from now until the optimizer's next step is done.

        Args:
            ids: of any shape, on either device.
            max_norm: rows with a larger norm are shortened, as torch.embedding_renorm_ does.
            norm_type: the p of that norm.

        Returns:
            Positions of the shape of ids, and the held rows `[n, ...]`, or `[n + 1, ...]` with the
            padding's as the last, both on the device; gradients of the rows go to the parameter.

        Raises:
            IndexError: an id is out of range; what is held did not change.
        """
        batch, part = self.announce([ids])[0]
        local = batch.local(part)
        self._announced = False
        count = self._count
        rows = self.parameter.detach() if self.padding is None else self._rows[: count + 1]
        if max_norm is not None:
            torch.embedding_renorm_(rows, local, max_norm, norm_type)
            self.write_padding(rows, count)
            self._dirty, self._version = True, self.parameter._version
        return local, HeldRows.apply(self.parameter, rows, self._held, self, self.step)  # type: ignore[no-untyped-call]

    def look_up(self, ids: Tensor) -> Tensor:
        """The rows that ids name, `[*ids.shape, ...]`, held as those of `lookup` are.

        Args:
            ids: of any shape, on either device.

        Returns:
            The rows; their gradients go to the parameter.

        Raises:
            IndexError: an id is out of range; what is held did not change.
        """
        batch, part = self.announce([ids])[0]
        self._announced = False
        rows, table_rows = self.parameter.detach(), self.table_rows
        looked_up: Tensor = SummedLookup.apply(  # type: ignore[no-untyped-call]
            self.parameter, rows, batch, part, table_rows, self, self.step
        )
        return looked_up

    def announce(self, parts: Sequence[Tensor]) -> list[tuple[PlannedBatch, int]]:
        """Holds the rows of all of these ids; lookups of the same tensors load nothing then.

        Args:
            parts: ids of any shape, on either device.

        Returns:
            For each part the batch that has it, and which of that batch's parts it is.

        Raises:
            IndexError: an id is out of range; what is held did not change.
        """
        self._refuse_capture()
        if self._step_is_over():
            self._begin_step(parts)
        found = [self._find(part) for part in parts]
        if any(each is None for each in found):
            batch = self._extend(parts)
            found = [(batch, part) for part in range(len(parts))]
        self._announced = True
        return [each for each in found if each is not None]

    def _find(self, ids: Tensor) -> tuple[PlannedBatch, int] | None:
        for batch in self._known:
            part = batch.part_of(ids)
            if part is not None:
                return batch, part
        return None

    def _begin_step(self, parts: Sequence[Tensor]) -> None:
        planned = self._take_planned(parts)
        if planned is None:
            batch = PlannedBatch(parts, self.table_rows, self.device, self.padding)
            batch.count()  # bad ids change nothing
            self._drop_coming()
            self._replace(batch)
        elif self._coming is not None and self._coming[0] is planned:
            batch = planned
            self._advance(*self._coming)
        else:
            batch = planned
            self._drop_coming()
            self._replace(batch)
            nothing = batch.ids[:0]
            self._send(self._nothing(), nothing, nothing)
        self._known = [batch]

    def _replace(self, batch: PlannedBatch) -> None:
        """The rows of the last step leave while those of the batch arrive."""
        ids, count = batch.ids, batch.held
        rows = self._empty(count)
        dirty = self._is_dirty()
        leaving = self._held_rows() if dirty else self._nothing()
        evict = self._held if dirty else ids[:0]
        self._exchange.join()
        self._swap(leaving, evict, [each[:count] for each in rows], ids)
        self._fetch_padding(rows[0], count)
        # Rows that stay have not been in the table in between.
        self._hold(rows, ids, batch, newer=dirty)

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

    def _order(self, count: int) -> Tensor:
        """0 to count - 1, of a tensor that is made once."""
        if self._numbers.shape[0] < count or self._numbers.device != self.device:
            self._numbers = torch.arange(2 * count, device=self.device)
        return self._numbers[:count]

    def _fetch_padding(self, rows: Tensor, at: int) -> None:
        if self.padding is not None:
            pinned_gather(self.weight, self._padding_id(), out=rows[at : at + 1])

    def _padding_id(self) -> Tensor:
        return torch.tensor([self.padding])

    def _extend(self, parts: Sequence[Tensor]) -> PlannedBatch:
        """Holds more rows beside those that are held already."""
        batch = PlannedBatch(parts, self.table_rows, self.device, self.padding, after=self._held)
        load, _ = batch.arriving
        if len(load):
            self._drop_coming()
            old, gradient, dirty = self._held_rows(), self.parameter.grad, self._is_dirty()
            before = self._held
            ids, _ = torch.sort(torch.cat([before, load]))
            count = len(ids)
            rows = self._empty(count)
            moved = torch.searchsorted(ids, before)
            for new, each in zip(rows, old, strict=True):
                new.index_copy_(0, moved, each)
            arriving = [each[:count] for each in rows]
            places = torch.searchsorted(ids, load)
            self._swap(self._nothing(), load[:0], arriving, load, None, places)
            self._fetch_padding(rows[0], count)
            self._rows, self._held, self._batch, self._count = rows[0], ids, None, count
            self._show(rows, count)
            self._dirty = dirty
            for known in self._known:
                known.place_among(ids)
            if gradient is not None:
                self.parameter.grad = _among_more(gradient, moved, count)
                self._gradient_version = self.parameter.grad._version
        batch.place_among(self._held)
        self._known.append(batch)
        return batch

    # --------------------------------------------------------------------------------------------
    # Rows without a step

    def read(self, ids: Tensor) -> Tensor:
        """Rows as they are now, `[*ids.shape, ...]`, outside of any step."""
        self.flush(wait=False)
        out = torch.empty(
            (*ids.shape, *self.weight.shape[1:]), dtype=self.weight.dtype, device=self.device
        )
        pinned_gather(self.weight, ids.detach(), out=out)
        return out

    def borrow(self, ids: Tensor) -> tuple[PlannedBatch, Tensor, Tensor]:
        """As lookup, but of rows that no step holds: the batch, positions, and the rows."""
        self.flush(wait=False)
        batch = PlannedBatch([ids], self.table_rows, self.device, self.padding)
        count = batch.held
        rows = self._empty(count)[0]
        pinned_gather(self.weight, batch.ids, out=rows[:count])
        self._fetch_padding(rows, count)
        return batch, batch.local(0), rows

    def write_back(self, batch: PlannedBatch, rows: Tensor) -> None:
        """Puts borrowed rows into the table."""
        pinned_scatter(self.weight, batch.ids, rows[: batch.held])
        self.write_padding(rows, batch.held)

    def write_padding(self, rows: Tensor, at: int) -> None:
        """Puts the padding's row into the table."""
        if self.padding is not None:
            pinned_scatter(self.weight, self._padding_id(), rows[at : at + 1])

    def flush(self, *, wait: bool = True) -> None:
        """Brings the table up to date; rows stay held.

        Args:
            wait: until the CPU sees it, too.
        """
        self._exchange.join()
        if self._coming is not None:
            self._write_coming()
        if self._is_dirty():
            nothing = self._held[:0]
            rows = self._held_rows()
            self._swap(rows, self._held, self._nothing(), nothing)
            self._over |= self._was_written()
            self._dirty = False
            self._version, self._pointer = self.parameter._version, self.parameter.data_ptr()
        if wait:
            synchronize(self.device)

    def drop_state(self) -> None:
        """Brings the table up to date and forgets the state; rows stay held."""
        self.flush()
        self._drop_coming()
        self.state, self.state_fields, self.takes_sparse = None, [], False

    def let_go(self) -> None:
        """Brings the table up to date and holds no rows any more."""
        self.flush()
        self._coming = None
        self._forget()

    # --------------------------------------------------------------------------------------------
    # Gradients and the optimizer's step

    def add_gradient(self, gradient: Tensor, held: Tensor, step: int) -> None:
        """Adds the gradient of rows that were held in a step to the parameter's.

        Args:
            gradient: of the rows `held`, in their order, and perhaps of the padding after them.
            held: ids of the rows that were held when they were looked up.
            step: when that was.

        Raises:
            RuntimeError: the rows of that step have left.
        """
        if step != self.step:
            raise RuntimeError(
                f"{self.name}: backward through a lookup of an earlier step, whose rows have gone"
                " back to the table: call backward before the lookup that follows the optimizer's"
                " step"
            )
        parameter, count = self.parameter, self._count
        if held is not self._held:
            added = _among_more(gradient, torch.searchsorted(self._held, held), count)
        elif gradient.is_sparse:
            added = _of_rows(gradient, gradient._indices(), count)
        else:
            added = gradient[:count]
        with torch.no_grad():
            if parameter.grad is None:
                parameter.grad = added
            elif parameter.grad.is_sparse or added.is_sparse:
                parameter.grad = parameter.grad + added
            else:
                parameter.grad += added
        self._dirty = self._got_gradient = True
        assert parameter.grad is not None
        self._gradient_version = parameter.grad._version

    def before_optimizer(self) -> None:
        """Called before the optimizer's step: rows that no lookup named again do not move."""
        parameter = self.parameter
        if self._over and not self._got_gradient:
            parameter.grad = None
        if self.takes_sparse and parameter.grad is not None and not parameter.grad.is_sparse:
            parameter.grad = torch.sparse_coo_tensor(
                self._order(self._count)[None],
                parameter.grad,
                parameter.grad.shape,
                is_coalesced=True,
                check_invariants=False,
            )

    def after_optimizer(self) -> None:
        """Called after the optimizer's step: the next lookup begins a step."""
        if self.parameter.grad is not None:
            self._dirty = self._over = True
            self._got_gradient = False

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
        leaving = batch.leaving
        self._coming = None
        self._hold(rows, batch.ids, batch, newer=True)
        self._send(old, *leaving)

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
            load, load_places = following.arriving
        self._exchange.uses(old)
        with self._exchange.after_current(self.device):
            count = 0 if following is None else following.held
            rows = self._empty(count)
            arriving = [each[:count] for each in rows]
            self._swap(old, evict, arriving, load, places, load_places)
        if following is not None:
            self._coming = (following, rows)

    def _write_coming(self) -> None:
        """Rows that have arrived for the next batch are in the table, too, after this."""
        if self._coming is not None:
            # A row that left while it arrived is nowhere else.
            batch, rows = self._coming
            ids, places = batch.arriving
            held = [each[: batch.held] for each in rows]
            self._swap(held, ids, self._nothing(), ids[:0], places)

    def _drop_coming(self) -> None:
        self._exchange.join()
        self._write_coming()
        self._coming = None

    def _refuse_capture(self) -> None:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self.name}: a CUDA graph cannot hold a lookup, because the number of rows"
                " changes from step to step; capture what comes after it"
            )


def _of_rows(gradient: Tensor, indices: Tensor, rows: int) -> Tensor:
    """A sparse gradient as one of this number of rows."""
    return torch.sparse_coo_tensor(
        indices,
        gradient._values(),
        (rows, *gradient.shape[1:]),
        is_coalesced=gradient.is_coalesced(),
        check_invariants=False,
    )


def _among_more(gradient: Tensor, places: Tensor, rows: int) -> Tensor:
    """A gradient as one of more rows, which got none; `places` is where its rows are now."""
    if gradient.is_sparse:
        return _of_rows(gradient, places[gradient._indices()], rows)
    more = gradient.new_zeros((rows, *gradient.shape[1:]))
    return more.index_copy_(0, places, gradient[: len(places)])

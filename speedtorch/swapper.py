"""Swapper: exchanges the rows that a step holds, with their optimizer state, for those of the next.

A step holds each row that its lookups name once, as a parameter and as the optimizer's state of it.
The first lookup after the optimizer's step begins the next step: one optimizer_state_swap brings
the rows of the last one back to the table while those of the next arrive, and rows of both stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from speedtorch.exchange import Exchange
from speedtorch.lookups import RowsOfStep, SummedLookup
from speedtorch.ops import pinned_gather, pinned_scatter
from speedtorch.planned_batch import PlannedBatch

__all__ = ["Swapper"]


class Swapper(Exchange):
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
        """See the class."""
        super().__init__(name, weight, parameter, padding)
        self._told: list[Tensor] = []
        """Ids that were announced for the step to come."""
        self._plan: PlannedBatch | None = None
        """Their plan."""

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
        batch, part = self._require([ids])[0]
        local = batch.local(part)
        self._announced = False
        if batch.has_moved and _recomputes():
            raise RuntimeError(
                f"{self.name}: a checkpoint computes a lookup again after other rows have joined"
                " the step; announce() all ids of the step before its first lookup"
            )
        count = self._count
        # These count their own changes: rows that join the step are no change of these.
        rows = self._rows.detach()
        if max_norm is not None:
            torch.embedding_renorm_(rows, local, max_norm, norm_type)
            self.write_padding(rows, count)
            self._dirty, self._version = True, self.parameter._version
        return local, RowsOfStep.apply(self.parameter, [rows], self._held, self, self.step)  # type: ignore[no-untyped-call]

    def look_up(self, ids: Tensor) -> Tensor:
        """The rows that ids name, `[*ids.shape, ...]`, held as those of `lookup` are.

        Args:
            ids: of any shape, on either device.

        Returns:
            The rows; their gradients go to the parameter.

        Raises:
            IndexError: an id is out of range; what is held did not change.
        """
        batch, part = self._require([ids])[0]
        self._announced = False
        rows, table_rows = self.parameter.detach(), self.table_rows
        looked_up: Tensor = SummedLookup.apply(  # type: ignore[no-untyped-call]
            self.parameter, rows, batch, part, table_rows, self, self.step
        )
        return looked_up

    def announce(self, parts: Sequence[Tensor]) -> None:
        """Lets the next lookup bring the rows of all of these ids; those after it load nothing.

        Nothing waits: where a step is over, the ids are planned, so that several tables can be
        announced to before the first of them counts its rows.

        Args:
            parts: ids of any shape, on either device.

        Raises:
            IndexError: rows are held on the CPU and an id is out of range; on a GPU the next lookup
                says so.
        """
        self._refuse_capture()
        if self.queue or not self._step_is_over():
            self._require(parts)
            self._announced = True
            return
        parts = [*self._told, *parts]
        self._plan = PlannedBatch(parts, self.table_rows, self.device, self.padding)
        self._told = parts

    def _require(self, parts: Sequence[Tensor]) -> list[tuple[PlannedBatch, int]]:
        """For each part the batch that holds its rows from now on, and which part of it it is."""
        self._refuse_capture()
        if self._step_is_over():
            self._begin_step(parts)
        found = [self._find(part) for part in parts]
        if any(each is None for each in found):
            batch = self._extend(parts)
            found = [(batch, part) for part in range(len(parts))]
        return [each for each in found if each is not None]

    def _find(self, ids: Tensor) -> tuple[PlannedBatch, int] | None:
        for batch in self._known:
            part = batch.part_of(ids)
            if part is not None:
                return batch, part
        return None

    def _begin_step(self, parts: Sequence[Tensor]) -> None:
        self._refuse_lost_write()
        planned = self._take_planned(parts)
        (told, self._told), (plan, self._plan) = (self._told, []), (self._plan, None)
        if planned is None:
            batch = plan or PlannedBatch(told or parts, self.table_rows, self.device, self.padding)
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
        if planned is not None and told:
            self._extend(told)

    def _replace(self, batch: PlannedBatch) -> None:
        """The rows of the last step leave while those of the batch arrive."""
        ids, count = batch.ids, batch.held
        rows = self._empty(count)
        dirty = self._is_dirty()
        leaving = self._held_rows() if dirty else self._nothing()
        evict = self._held if dirty else ids[:0]
        self._exchange.join()
        self._swap(leaving, evict, self._without_padding(rows, count), ids)
        self._fetch_padding(rows[0], count)
        # Rows that stay have not been in the table in between.
        self._hold(rows, ids, batch, newer=dirty)

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
            arriving = self._without_padding(rows, count)
            places = torch.searchsorted(ids, load)
            self._swap(self._nothing(), load[:0], arriving, load, None, places)
            self._fetch_padding(rows[0], count)
            self._rows, self._held, self._batch, self._count = rows[0], ids, None, count
            self._show(rows, count)
            self._dirty = dirty
            for known in self._known:
                known.place_among(ids)
                known.has_moved = True
            self._move_gradient(gradient, moved)
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
        """Puts borrowed rows into the table, and in the place of those that are held."""
        pinned_scatter(self.weight, batch.ids, rows[: batch.held])
        self.write_padding(rows, batch.held)
        if self._count > 0:
            places = torch.searchsorted(self._held, batch.ids).clamp_(max=self._count - 1)
            (held,) = torch.where(self._held[places] == batch.ids)
            self._rows.index_copy_(0, places[held], rows[held])

    def drop_state(self) -> None:
        """Brings the table up to date and forgets the state; rows stay held."""
        self.flush()
        self._drop_coming()
        self.state, self.fields, self.takes_sparse = None, [self.weight], False

    def let_go(self) -> None:
        """Brings the table up to date and holds no rows any more."""
        self.flush()
        self._plan = None  # it is on the device of now
        self._forget()

    @contextmanager
    def keeping_gradient(self) -> Iterator[None]:
        """Rows may become others within; those that have a gradient come again, and keep it."""
        held, gradient, pending = self._held, self.parameter.grad, self._got_gradient
        try:
            yield
        finally:
            if pending and gradient is not None:
                batch = PlannedBatch([held], self.table_rows, self.device, self.padding)
                self._replace(batch)
                self._known = [batch]
                self.parameter.grad, self._gradient_version = gradient, gradient._version
                self._got_gradient = True

    def _refuse_capture(self) -> None:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self.name}: a CUDA graph cannot hold a lookup, because the number of rows"
                " changes from step to step; capture what comes after it"
            )


def _recomputes() -> bool:
    """Whether a checkpoint looks for what it did not keep, within a backward."""
    if torch._C._current_graph_task_id() == -1:
        return False
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None

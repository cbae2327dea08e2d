"""BlockExchange: an Exchange that keeps the rows of its steps in FixedBlocks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from speedtorch.ops.functions import raises_later
from speedtorch.step.exchange import Exchange
from speedtorch.step.fixed_blocks import FixedBlocks
from speedtorch.step.parameter_view import ParameterView
from speedtorch.step.row_store import RowStore
from speedtorch.step.step import Copy, Rows, Step

__all__ = ["BlockExchange"]


class BlockExchange(Exchange):
    """Steps of at most `capacity` rows, in memory that all steps and CUDA graphs share.

    Args:
        name, store, view, padding: As for Exchange.
        most: The capacity, for a table of as many rows. That of a smaller one is all its rows.
    """

    capacity: int

    def __init__(
        self, name: str, store: RowStore, view: ParameterView, padding: int | None, most: int
    ) -> None:
        self._most = most
        self.capacity = min(most, store.whole_rows)
        self._blocks = FixedBlocks(name, store, self.capacity, padding)
        super().__init__(name, store, view, padding)
        raises_later(weakref.WeakMethod(self.raise_faults))

    @property
    def _store(self) -> RowStore:
        return self._blocks.store

    @_store.setter
    def _store(self, store: RowStore) -> None:
        self._blocks.use(store)

    def hold_none(self) -> None:
        """As Exchange.hold_none."""
        self.capacity = min(self._most, self._store.whole_rows)
        super().hold_none()

    def _nothing(self) -> tuple[Tensor, Rows]:
        self._blocks.forget(self.capacity)
        return torch.empty(0, dtype=torch.int64, device=self.device), self._no_rows()

    def ids_of(self, step: Step) -> Tensor | Callable[[], Tensor]:
        """As Exchange.ids_of: nothing waits before they are asked for."""
        return partial(self._blocks.ids_held, self._blocks.begun) if step.batches else step.ids

    def _no_rows(self) -> Rows:
        fields = self.fields.values()
        return [
            torch.empty((0, *shape), dtype=dtype, device=self.device) for shape, dtype in fields
        ]

    def _loaded_again(self, step: Step) -> tuple[Tensor, Rows]:
        if not step.batches:
            return step.ids, self._no_rows()
        blocks = self._blocks
        if not blocks.are_for(self.device, self.fields):
            blocks = blocks.with_fields(self.fields)
        blocks.read_again()
        self._blocks = blocks
        return blocks.ids, list(blocks.rows)

    def _tensors(self) -> Iterator[Tensor]:
        yield from super()._tensors()
        yield from self._blocks.tensors()

    def _take(self, *, stepped: bool = False) -> bool:
        """Takes the held rows to their blocks; whether they were elsewhere."""
        blocks, view, now = self._blocks, self._view, self.now
        # Where an exception has left the blocks of other fields, the table has all rows; and rows
        # that a step is not known to have changed are where a CUDA graph changes them.
        if not (blocks.are_for(self.device, self.fields) and blocks.have(now.rows)):
            return False
        taken = (stepped or now.copy is Copy.DIRTY) and blocks.take(view.rows_of(now))
        if taken:
            blocks.clear_others()  # whatever an optimizer that failed has left there
        return taken

    def _after_step(self) -> None:
        if self._take(stepped=True):
            self._view.put_back(self.now)
        self._blocks.clear_others()

    def _after_failed_step(self) -> None:
        self._blocks.clear_others()

    @property
    def halted(self) -> Tensor | None:
        """As Exchange.halted."""
        return self._blocks.is_halted if self.now.batches else None

    def stop(self, fault: Tensor) -> None:
        """Where `fault`, `[1]` on the device, is not 0: rows go to the table, and none is stepped.

        Until resume(), which the caller calls after it has raised why. Called within a turn.
        """
        if self.now.batches:
            self._blocks.stop(fault)

    @property
    def is_captured(self) -> bool:
        """As Exchange.is_captured."""
        return self._blocks.graphs.are_alive

    def refuse_if_captured(self, what: str) -> None:
        """As Exchange.refuse_if_captured."""
        if self._blocks.graphs.remain(self.device):
            raise RuntimeError(
                f"{self.name}: {what} is refused while a captured CUDA graph uses its rows: let the"
                " graph go first (del graph)"
            )

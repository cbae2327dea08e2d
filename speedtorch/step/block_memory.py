"""BlockMemory: a RowMemory that stores the rows of its steps in FixedBlocks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from speedtorch.ops.functions import raises_later
from speedtorch.step.fixed_blocks import FixedBlocks
from speedtorch.step.held_rows import HeldRows, RowMemory
from speedtorch.step.row_store import RowStore
from speedtorch.step.step import Copy, Rows, Step

__all__ = ["BlockMemory"]


class BlockMemory(RowMemory):
    """Memory for at most `capacity` rows a step, shared by all steps and CUDA graphs.

    Args:
        held: The rows of the current step.
        capacity: The most rows of a step. A table with fewer rows has fewer rows in its blocks.
    """

    capacity: int

    def __init__(self, held: HeldRows, capacity: int) -> None:
        super().__init__(held)
        self.lock, self._most = held.lock, capacity
        self.capacity = self._rows_of_blocks()
        self._blocks = FixedBlocks(held.name, held.store, self.capacity, held.padding)
        raises_later(weakref.WeakMethod(self.raise_faults))

    def use(self, store: RowStore) -> None:
        """See RowMemory.use."""
        self._blocks.use(store)

    def nothing(self) -> tuple[Tensor, Rows]:
        """Like RowMemory.nothing; limits the capacity to the table's present number of rows."""
        self.capacity = self._rows_of_blocks()
        self._blocks.forget(self.capacity)
        return torch.empty(0, dtype=torch.int64, device=self.held.device), self._no_rows()

    def _rows_of_blocks(self) -> int:
        """The smaller of the capacity and the table's rows, at least 1.

        A lookup of an invalid id in a table without rows reads row 0 of the block.
        """
        return min(self._most, max(1, self.held.store.whole_rows))

    def ids_of(self, step: Step) -> Tensor | Callable[[], Tensor]:
        """Like RowMemory.ids_of; the host waits only when the returned function is called."""
        return partial(self._blocks.ids_held, self._blocks.changes) if step.batches else step.ids

    def _no_rows(self) -> Rows:
        held = self.held
        fields = held.fields.values()
        return [
            torch.empty((0, *shape), dtype=dtype, device=held.device) for shape, dtype in fields
        ]

    def reloaded(self, step: Step) -> tuple[Tensor, Rows]:
        """See RowMemory.reloaded."""
        held = self.held
        if not step.batches:
            return step.ids, self._no_rows()
        blocks = self._blocks
        if not blocks.are_for(held.device, held.fields):
            blocks = blocks.with_fields(held.fields)
        blocks.read_again()
        self._blocks = blocks
        return blocks.ids, list(blocks.rows)

    def tensors(self) -> Iterator[Tensor]:
        """See RowMemory.tensors."""
        yield from super().tensors()
        yield from self._blocks.tensors()

    def _take(self, *, stepped: bool = False) -> bool:
        """Copies changed rows to the blocks; returns whether any of them were in other memory."""
        held = self.held
        blocks, view, now = self._blocks, held.view, held.now
        # Blocks of other fields remain after an exception; then the table has all rows. Clean rows
        # are not copied: only a CUDA graph may have changed them, in the blocks themselves.
        if not (blocks.are_for(held.device, held.fields) and blocks.have(now.rows)):
            return False
        taken = (stepped or now.copy is Copy.DIRTY) and blocks.take(view.rows_of(now))
        if taken:
            blocks.clear_unused()  # an optimizer that failed may have written there
        return taken

    def after_step(self) -> None:
        """See RowMemory.after_step."""
        if self._take(stepped=True):
            self.held.view.put_back(self.held.now)
        self._blocks.clear_unused()

    def after_failed_step(self) -> None:
        """See RowMemory.after_failed_step."""
        self._blocks.clear_unused()

    @property
    def halted(self) -> Tensor | None:
        """See RowMemory.halted."""
        return self._blocks.is_halted if self.held.now.batches else None

    def stop(self, fault: Tensor) -> None:
        """If `fault`, `[1]` on the device, is not 0: writes the rows back and drops later changes.

        No row is loaded until resume(), which the caller calls after it has raised the error. The
        caller holds `lock`.
        """
        if self.held.now.batches:
            self._blocks.stop(fault)

    @property
    def is_captured(self) -> bool:
        """See RowMemory.is_captured."""
        return self._blocks.graphs.are_alive

    def refuse_if_captured(self, what: str) -> None:
        """See RowMemory.refuse_if_captured."""
        if self._blocks.graphs.remain(self.held.device):
            raise RuntimeError(
                f"{self.held.name}: {what} is not possible while a captured CUDA graph uses its"
                " rows. First delete the graph, or the result of graphed() that contains it."
            )

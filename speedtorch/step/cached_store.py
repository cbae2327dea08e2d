"""CachedStore: rows of a table of which those that are loaded most often are on the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from speedtorch.memory.byte_count import text_of
from speedtorch.ops.functions import count_batch, exchange_cached
from speedtorch.step.hot_rows import BYTES_OF_SLOT, CacheReport, HotRows
from speedtorch.step.row_store import Block, Counted, Rounder, RowStore, exchanged
from speedtorch.table.lazy_table import LazyTable

__all__ = ["CachedStore"]


class CachedStore(RowStore):
    """As RowStore, with a cache of so many bytes on the device.

    Rows leave for it at once: most of them do not cross the link.

    Args:
        name: What errors call it.
        table, held_dtype, rounding: As for RowStore.
        nbytes: Of the cache's rows and their ids.
        members: Ids of the rows that have the slots, as for HotRows.
    """

    can_wait = False

    def __init__(
        self,
        name: str,
        table: LazyTable,
        held_dtype: torch.dtype,
        nbytes: int,
        members: Tensor | None = None,
        rounding: Rounder | None = None,
    ) -> None:
        super().__init__(table, held_dtype, rounding)
        self.nbytes, self.members = nbytes, members
        self._name = name
        self._hot: HotRows | None = None
        self._made_for: tuple[tuple[str, ...], int, torch.device] | None = None

    def exchange(self, names: Iterable[str], leaving: Block | None, arriving: Block | None) -> None:
        """As RowStore.exchange; before it rows may take slots of others."""
        lists = exchanged(leaving, arriving)
        hot = self._ready(names, lists[1].device, leaves=lists[1].shape[0] > 0)
        homes = self.fields(names)
        with self._writing(leaving):
            exchange_cached(homes, hot.fields, hot.map, *lists)

    def load(self, names: Iterable[str], leaving: Block, ids: Tensor) -> list[Tensor]:
        """As RowStore.load."""
        rows = [each.new_empty((ids.shape[0], *each.shape[1:])) for each in leaving.rows]
        self.exchange(names, leaving, Block(rows, ids))
        return rows

    def load_batch(
        self,
        names: Iterable[str],
        leaving: Block,
        ids: Tensor,
        rows: int,
        padding: int,
        *,
        evicts: bool = True,
    ) -> list[Tensor]:
        """As RowStore.load_batch, which must evict."""
        assert evicts
        made = count_batch(ids, leaving.ids, rows, padding)
        return [*made[:7], *self.load(names, leaving, made[6]), *made[7:]]

    def exchange_counted(self, names: Iterable[str], leaving: Counted, arriving: Counted) -> None:
        """As RowStore.exchange_counted; before it rows may take slots of others."""
        hot = self._ready(names, leaving.ids.device, leaves=not leaving.are_none)
        lists = (leaving.ids, leaving.places, arriving.rows, arriving.ids, arriving.places)
        numbers = (leaving.number, arriving.number)
        homes = self.fields(names)
        with self._writing(leaving):
            exchange_cached(homes, hot.fields, hot.map, leaving.rows, *lists, *numbers)

    def before_replay(self) -> None:
        """Rows may take slots of others before a CUDA graph with exchanges is replayed."""
        if (hot := self._hot) is not None:
            homes = self.fields(hot.names)
            with self._writing():
                hot.before_exchange(homes)

    def bring_home(self) -> None:
        """The table has every row after this, and may change; what it has then takes the slots."""
        if (hot := self._hot) is not None and not hot.are_away:  # the table may be closed then
            homes = self.fields(hot.names)
            with self._writing():
                hot.bring_home(homes)

    def read(self, ids: Tensor, out: Tensor, name: str = "weight") -> None:
        """As RowStore.read."""
        super().read(ids, out, name)
        if (hot := self._hot) is not None and name in hot.names:
            hot.read(ids, out, name)

    def write(self, ids: Tensor, rows: Tensor) -> None:
        """As RowStore.write; the rows of all slots go home first."""
        self.bring_home()
        super().write(ids, rows)

    def can_join(self, device: torch.device) -> bool:
        """No: a row may be in its table or in a slot, and one op knows the slots of one table."""
        return False

    def report(self) -> CacheReport:
        """What the cache holds and saves; ValueError before the first step."""
        if self._hot is None:
            raise ValueError(f"{self._name}: no step has loaded rows yet; train one first")
        return self._hot.report()

    def let_go(self) -> None:
        """Gives the memory back; rows must be home."""
        if self._hot is not None and self._hot.device.type == "cuda":
            torch.cuda.synchronize(self._hot.device)  # other streams may read it
        self._hot = self._made_for = None

    def _ready(self, names: Iterable[str], device: torch.device, *, leaves: bool) -> HotRows:
        """The cache for these fields on a device, whose rows are where they are to be.

        Where no row leaves nothing was trained since the table was given out, which may yet change:
        torch.distributed.checkpoint makes a step of rate 0 before it loads into a table's memory.
        """
        made_for = (tuple(names), self._table.version, device)
        captures = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if self._hot is None or self._made_for != made_for:
            if captures:
                raise RuntimeError(
                    f"{self._name}: a CUDA graph cannot make the cache of its rows: train a step or"
                    " two as the graph will before it is captured"
                )
            if self._made_for is not None and made_for[1] == self._made_for[1]:
                self.bring_home()
            self.let_go()
            self._hot, self._made_for = self._made(made_for[0], device), made_for
        hot = self._hot
        if leaves and not captures:
            homes = self.fields(names)
            with self._writing():
                hot.before_exchange(homes)
        return hot

    def _made(self, names: tuple[str, ...], device: torch.device) -> HotRows:
        fields = dict(zip(names, self.fields(names), strict=True))
        if device.type == "cuda" and not self._table.is_in_place:
            raise ValueError(
                f"{self._name}: a cache needs host memory that the GPU reads in place, and this"
                f" table's is {self._table.memory!r}: use memory='managed' or 'registered', or no"
                " cache"
            )
        row_bytes = sum(each[:1].numel() * each.element_size() for each in fields.values())
        slots = min(self.rows, self.nbytes // (row_bytes + BYTES_OF_SLOT))
        if slots < 1:
            raise ValueError(
                f"{self._name}: a cache of {text_of(self.nbytes)} holds no row of {row_bytes}"
                f" bytes; give {row_bytes + BYTES_OF_SLOT} bytes or more"
            )
        members = None if self.members is None else self.members[:slots]
        return HotRows(self.rows, fields, slots, device, members)

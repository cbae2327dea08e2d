"""CachedStore: the rows of a table, with a cache of the most used rows on the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from speedtorch.memory.byte_count import text_of
from speedtorch.ops.functions import exchange_cached
from speedtorch.step.hot_rows import BYTES_OF_SLOT, CacheReport, HotRows
from speedtorch.step.row_store import Block, Counted, Rounder, StoreInSlots, exchange_arguments
from speedtorch.table.lazy_table import LazyTable

__all__ = ["CachedStore"]


class CachedStore(StoreInSlots):
    """A RowStore with a cache of `nbytes` on the device.

    Args:
        name: The module's name in errors.
        table, held_dtype, rounding: See RowStore.
        nbytes: Bytes of the cache's rows and their ids.
        members: Ids of the only rows that have slots; see HotRows.
    """

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

    def exchange(
        self, names: Iterable[str], outgoing: Block | None, incoming: Block | None
    ) -> None:
        """Like RowStore.exchange, after an update of the cached rows if one is due."""
        lists = exchange_arguments(outgoing, incoming)
        hot = self._ready(names, lists[1].device, evicts=lists[1].shape[0] > 0)
        host_fields = self.fields(names)
        with self._writing(outgoing):
            exchange_cached(host_fields, hot.fields, hot.map, *lists)

    def exchange_counted(self, names: Iterable[str], outgoing: Counted, incoming: Counted) -> None:
        """Like RowStore.exchange_counted, after an update of the cached rows if one is due."""
        hot = self._ready(names, outgoing.ids.device, evicts=not outgoing.are_none)
        lists = (outgoing.ids, outgoing.places, incoming.rows, incoming.ids, incoming.places)
        numbers = (outgoing.number, incoming.number)
        host_fields = self.fields(names)
        with self._writing(outgoing):
            exchange_cached(host_fields, hot.fields, hot.map, outgoing.rows, *lists, *numbers)

    def before_replay(self) -> None:
        """Loads cached rows again after a write-back, and updates them if due, before a replay."""
        if (hot := self._hot) is not None:
            host_fields = self.fields(hot.names)
            with self._writing():
                hot.before_exchange(host_fields)

    def write_back(self) -> None:
        """Writes cached rows to the table, which the caller may then change.

        The next exchange that writes rows back loads them again. Does nothing if the rows were
        written back before; the table may be closed then.
        """
        if (hot := self._hot) is not None and not hot.needs_reload:
            host_fields = self.fields(hot.names)
            with self._writing():
                hot.write_back(host_fields)

    def read(self, ids: Tensor, out: Tensor, name: str = "weight") -> None:
        """See RowStore.read."""
        super().read(ids, out, name)
        if (hot := self._hot) is not None and name in hot.names:
            hot.read(ids, out, name)

    def write(self, ids: Tensor, rows: Tensor) -> None:
        """Like RowStore.write; first writes all cached rows to the table."""
        self.write_back()
        super().write(ids, rows)

    def report(self) -> CacheReport:
        """The contents and hit rates of the cache; raises ValueError before the first step."""
        if self._hot is None:
            raise ValueError(f"{self._name}: no step has loaded rows yet. Train a step first.")
        return self._hot.report()

    def free_cache(self) -> None:
        """Frees the cache. The caller has written its rows to the table, or discards them."""
        if self._hot is not None and self._hot.device.type == "cuda":
            torch.cuda.synchronize(self._hot.device)  # other streams may read it
        self._hot = self._made_for = None

    def _ready(self, names: Iterable[str], device: torch.device, *, evicts: bool) -> HotRows:
        """The cache for these fields on a device, after an update of its rows if `evicts`.

        `evicts`: whether the exchange writes rows back. An exchange that only loads rows does not
        update the cache, because other code may be about to write to the table's memory.
        torch.distributed.checkpoint steps with a learning rate of 0 and then loads into the memory.
        """
        made_for = (tuple(names), self._table.version, device)
        captures = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if self._hot is None or self._made_for != made_for:
            if captures:
                raise RuntimeError(
                    f"{self._name}: the capture of a CUDA graph cannot allocate the cache of its"
                    " rows. Train one or two steps as the graph will before the capture."
                )
            if self._made_for is not None and made_for[1] == self._made_for[1]:
                self.write_back()
            self.free_cache()
            self._hot, self._made_for = self._made(made_for[0], device), made_for
        hot = self._hot
        if evicts and not captures:
            host_fields = self.fields(names)
            with self._writing():
                hot.before_exchange(host_fields)
        return hot

    def _made(self, names: tuple[str, ...], device: torch.device) -> HotRows:
        fields = dict(zip(names, self.fields(names), strict=True))
        if device.type == "cuda" and not self._table.is_in_place:
            raise ValueError(
                f"{self._name}: a cache needs host memory that the GPU reads in place, but this"
                f" table has memory={self._table.memory!r}. Use memory='managed' or 'registered',"
                " or no cache."
            )
        row_bytes = sum(field[:1].numel() * field.element_size() for field in fields.values())
        slots = min(self.rows, self.nbytes // (row_bytes + BYTES_OF_SLOT))
        if slots < 1:
            raise ValueError(
                f"{self._name}: a cache of {text_of(self.nbytes)} is too small for a row of"
                f" {row_bytes} bytes. Pass at least {row_bytes + BYTES_OF_SLOT} bytes."
            )
        members = None if self.members is None else self.members[:slots]
        return HotRows(self.rows, fields, slots, device, members)

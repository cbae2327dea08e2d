"""ResidentStore: the rows of a file table, of which the most used are in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from speedtorch.memory.side_stream import SideStream
from speedtorch.ops.functions import exchange_rows
from speedtorch.step.row_store import Block, Counted, Rounder, RowStore, StoreInSlots
from speedtorch.table.lazy_table import LazyTable
from speedtorch.table.resident_rows import ResidentRows
from speedtorch.torch_internals import current_stream

__all__ = ["ResidentStore", "store_of"]


class ResidentStore(StoreInSlots):
    """A RowStore that exchanges rows with the slots of ResidentRows instead of the mapped file.

    If all ids on a GPU have slots, a kernel finds these. The host waits for this kernel, unless all
    rows of the file are resident. If an id has no slot, the host waits for earlier exchanges and
    reads records from the file.
    Fields that another table has, such as state that the file lacks, are exchanged with that table.
    """

    reads_ahead = True

    def __init__(
        self,
        table: LazyTable,
        resident: ResidentRows,
        held_dtype: torch.dtype,
        rounding: Rounder | None = None,
    ) -> None:
        super().__init__(table, held_dtype, rounding)
        self._resident = resident
        self._ids_stream = SideStream("ids")
        self._in_slots: _InSlots | None = None
        """The fields of the last exchange."""

    def exchange(
        self, names: Iterable[str], outgoing: Block | None, incoming: Block | None
    ) -> None:
        """Like RowStore.exchange; reads missing rows from the file first."""
        _refuse_capture(outgoing or incoming)
        if not self._resident.is_open:
            super().exchange(names, outgoing, incoming)  # raises if the table is closed
            return
        host_fields, count = self.fields(names), self._resident.count
        with self._writing(outgoing):
            if (
                sum(0 if block is None else len(block.ids) for block in (outgoing, incoming))
                <= count
            ):
                self._exchange(names, host_fields, outgoing, incoming)
                return
            for part in _parts_of(outgoing, count):
                self._exchange(names, host_fields, part, None)
            for part in _parts_of(incoming, count):
                self._exchange(names, host_fields, None, part)

    def exchange_counted(self, names: Iterable[str], outgoing: Counted, incoming: Counted) -> None:
        """Like RowStore.exchange_counted; the host waits for the numbers of rows."""
        _refuse_capture(outgoing)
        self.exchange(names, _counted_block(outgoing), None)
        self.exchange(names, None, _counted_block(incoming))

    def read_ahead(self, ids: Sequence[Tensor]) -> None:
        """See RowStore.read_ahead."""
        if own := [part.detach().reshape(-1).to(torch.int64) for part in ids if part.is_cpu]:
            self._resident.read_ahead(own[0] if len(own) == 1 else torch.cat(own))

    def read(self, ids: Tensor, out: Tensor, name: str = "weight") -> None:
        """Like RowStore.read, after changed records among `ids` are written to the file."""
        self._table.field(name)  # raises if the table is closed
        self._resident.write(ids.reshape(-1).to("cpu", torch.int64))
        super().read(ids, out, name)

    def write(self, ids: Tensor, rows: Tensor) -> None:
        """Like RowStore.write; first writes all resident rows to the file."""
        self._table.field("weight")  # raises if the table is closed
        self._resident.write_back()
        super().write(ids, rows)

    def settle(self, device: torch.device) -> None:
        """See RowStore.settle."""
        self._in_slots = None
        super().settle(device)

    def write_back(self) -> None:
        """Writes resident rows to the file; see ResidentRows.write_back."""
        self._resident.write_back()

    def _exchange(
        self,
        names: Iterable[str],
        host_fields: Sequence[Tensor],
        outgoing: Block | None,
        incoming: Block | None,
    ) -> None:
        """Exchanges rows, at most as many as there are slots."""
        one = outgoing or incoming
        assert one is not None
        out = outgoing or Block([field[:0] for field in one.rows], one.ids[:0])
        into = incoming or Block([field[:0] for field in one.rows], one.ids[:0])
        self._resident.fields(["weight"])  # raises in a forked child that cannot access the memory
        device, number, begun = one.ids.device, len(out.ids), None
        are_ready = all(block.are_ready for block in (outgoing, incoming) if block is not None)
        with self._resident.lease() as lease:
            # Ids that are not ready are written by work on the current stream.
            with self._ids_stream.after(device) if are_ready else nullcontext():
                ids = torch.cat([out.ids, into.ids])
                if ids.is_cuda:
                    begun = self._resident.begin_find(ids, number, lease)
            if begun is not None and are_ready:
                self._ids_stream.join()
                begun.record_stream(current_stream(device))
            in_slots = self._fields_in_slots(names, host_fields)
            if begun is not None and self._resident.end_find(lease):
                slots = begun
            else:
                slots = self._resident.find(ids.cpu(), number, lease).to(device)
            exchange_rows(
                in_slots.fields,
                [out.rows[k] for k in in_slots.indices],
                *(out.ids, out.places),
                [into.rows[k] for k in in_slots.indices],
                *(into.ids, into.places, 1, None, None, slots[:number], slots[number:]),
            )
            if others := in_slots.others:
                exchange_rows(
                    [host_fields[k] for k in others],
                    [out.rows[k] for k in others],
                    *(out.ids, out.places),
                    [into.rows[k] for k in others],
                    *(into.ids, into.places),
                )

    def _fields_in_slots(self, names: Iterable[str], host_fields: Sequence[Tensor]) -> _InSlots:
        """Returns which of the fields are in slots."""
        if self._in_slots is None or self._in_slots.host_fields is not host_fields:
            table = self._table.table_of("weight")
            of_file = [self._table.table_of(name) is table for name in names]
            self._in_slots = _InSlots(
                host_fields,
                self._resident.fields(name for k, name in enumerate(names) if of_file[k]),
                [k for k, is_of_file in enumerate(of_file) if is_of_file],
                [k for k, is_of_file in enumerate(of_file) if not is_of_file],
            )
        return self._in_slots


class _InSlots(NamedTuple):
    """Which fields of an exchange are in slots."""

    host_fields: Sequence[Tensor]
    """The fields of the host tables."""
    fields: Sequence[Tensor]
    """All slots of each field of the file."""
    indices: Sequence[int]
    """Positions of these fields in `host_fields`."""
    others: Sequence[int]
    """Positions of the fields of another table."""


def store_of(
    table: LazyTable, held_dtype: torch.dtype, rounding: Rounder | None = None
) -> RowStore:
    """The store of a table without a cache on the device."""
    resident = table.resident
    if resident is None:
        return RowStore(table, held_dtype, rounding)
    return ResidentStore(table, resident, held_dtype, rounding)


def _parts_of(block: Block | None, most: int) -> Iterator[Block]:
    """Splits a block into parts with at most `most` ids."""
    if block is None:
        return
    for begin in range(0, len(block.ids), most):
        ids = block.ids[begin : begin + most]
        if block.places is None:
            yield Block([rows[begin : begin + len(ids)] for rows in block.rows], ids)
        else:
            yield Block(block.rows, ids, block.places[begin : begin + len(ids)])


def _refuse_capture(block: Block | Counted | None) -> None:
    """Raises RuntimeError while a CUDA graph is captured on the block's GPU."""
    if block is not None and block.ids.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph cannot capture an exchange with a file table that has resident=, because"
            " replays cannot read the file. Use a table in host memory."
        )


def _counted_block(counted: Counted) -> Block:
    number = 0 if counted.are_none else int(counted.number)
    return Block(counted.rows, counted.ids[:number], counted.places[:number])

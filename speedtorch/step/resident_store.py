"""ResidentStore: the rows of a file table, of which the most used are in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from speedtorch.memory.side_stream import SideStream
from speedtorch.ops.functions import exchange_rows, wait_for_rows
from speedtorch.step.row_store import Block, Counted, Rounder, RowStore, StoreInSlots
from speedtorch.table.lazy_table import LazyTable
from speedtorch.table.resident_rows import ResidentRows
from speedtorch.torch_internals import current_stream

__all__ = ["ResidentStore", "store_of"]


class ResidentStore(StoreInSlots):
    """A RowStore that exchanges rows with the slots of ResidentRows instead of the mapped file.

    The host finds the slots, and therefore waits for ids on a GPU. If records must be read from the
    file, the host also waits for earlier exchanges.
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
        wait_for_rows(None)  # another module of the table may train its rows on a GPU
        self._resident.write(ids.reshape(-1).to("cpu", torch.int64))
        super().read(ids, out, name)

    def write(self, ids: Tensor, rows: Tensor) -> None:
        """Like RowStore.write; first writes all resident rows to the file."""
        self._table.field("weight")  # raises if the table is closed
        self._resident.write_back()
        super().write(ids, rows)

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
        device, number = one.ids.device, len(out.ids)
        are_ready = all(block.are_ready for block in (outgoing, incoming) if block is not None)
        wait = current_stream(device).synchronize if are_ready and one.ids.is_cuda else None
        with self._ids_stream.after(device) if wait else nullcontext():
            # Without `wait` this also waits for earlier exchanges on the current stream.
            ids = torch.cat([out.ids, into.ids]).cpu()
        table = self._table.table_of("weight")
        of_file = [self._table.table_of(name) is table for name in names]
        in_host_memory = [k for k, is_of_file in enumerate(of_file) if not is_of_file]
        with self._resident.slots(ids, number, wait) as found:
            slots, order = self._on_device(found, device)
            chosen = [(k, name) for k, name in enumerate(names) if of_file[k]]
            exchange_rows(
                self._resident.fields(name for _, name in chosen),
                [out.rows[k] for k, _ in chosen],
                *_by_slot(out, slots[:number], order[:number]),
                [into.rows[k] for k, _ in chosen],
                *_by_slot(into, slots[number:], order[number:]),
            )
            if in_host_memory:
                exchange_rows(
                    [host_fields[k] for k in in_host_memory],
                    [out.rows[k] for k in in_host_memory],
                    *(out.ids, out.places),
                    [into.rows[k] for k in in_host_memory],
                    *(into.ids, into.places),
                )

    def _on_device(self, tensors: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
        """Copies tensors from the CPU; the host does not wait for the current stream of a GPU."""
        if device.type == "cpu":
            return tensors
        with self._ids_stream.after(device):
            copies = [tensor.to(device) for tensor in tensors]
        self._ids_stream.join()
        for copy in copies:
            copy.record_stream(current_stream(device))
        return copies


def store_of(
    table: LazyTable, held_dtype: torch.dtype, rounding: Rounder | None = None
) -> RowStore:
    """The store of a table without a cache on the device."""
    resident = table.resident
    if resident is None:
        return RowStore(table, held_dtype, rounding)
    return ResidentStore(table, resident, held_dtype, rounding)


def _by_slot(block: Block, slots: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Returns slots, and the places of their rows in a block."""
    return slots, order if block.places is None else block.places[order]


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

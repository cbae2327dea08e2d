"""TableHandle: a table in shared memory, as one process tells another of it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from speedtorch.memory.shared_memory import SharedMemoryHandle
from speedtorch.table.record_layout import Record, lay_out

__all__ = ["TableHandle"]


class TableHandle(NamedTuple):
    """Opens a table of another process; HostTable.share() gives it, and from_handle() takes it."""

    rows: int
    fields: dict[str, tuple[tuple[int, ...], torch.dtype]]
    """Name to (row shape, dtype)."""
    offsets: dict[str, int]
    """The byte of a record at which each field begins."""
    record_bytes: int
    was_read: bool
    """Whether rows were read from a file."""
    memory: SharedMemoryHandle

    @classmethod
    def of(
        cls, layout: Record, rows: int, was_read: bool, memory: SharedMemoryHandle
    ) -> TableHandle:
        """That of a table of so many records in this memory."""
        return cls(rows, layout.fields, layout.offsets, layout.record_bytes, was_read, memory)

    def layout(self) -> Record:
        """Where the fields lie within a record.

        Raises:
            ValueError: This version of the library would place them elsewhere.
        """
        layout = lay_out(self.fields)
        if (layout.offsets, layout.record_bytes) != (self.offsets, self.record_bytes):
            raise ValueError(
                f"handle: records have {self.record_bytes} bytes with fields at {self.offsets}, and"
                f" here {layout.record_bytes} with {layout.offsets}: use one version of speedtorch"
                " in all processes"
            )
        return layout

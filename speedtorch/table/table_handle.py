"""TableHandle: a picklable reference to a table in shared memory, for other processes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from speedtorch.memory.shared_memory import SharedMemoryHandle
from speedtorch.table.record_layout import Record, lay_out

__all__ = ["TableHandle"]


class TableHandle(NamedTuple):
    """Identifies a table of another process: HostTable.share() makes it, from_handle() opens it."""

    rows: int
    fields: dict[str, tuple[tuple[int, ...], torch.dtype]]
    """Name to (row shape, dtype)."""
    offsets: dict[str, int]
    """Field name to its first byte in a record."""
    record_bytes: int
    was_read: bool
    """Whether rows were read from a file."""
    memory: SharedMemoryHandle

    @classmethod
    def of(
        cls, layout: Record, rows: int, was_read: bool, memory: SharedMemoryHandle
    ) -> TableHandle:
        """Makes the handle of a table with `rows` records in `memory`."""
        return cls(rows, layout.fields, layout.offsets, layout.record_bytes, was_read, memory)

    def layout(self) -> Record:
        """Returns the layout of the fields in a record.

        Raises:
            ValueError: This version of the library lays out the fields differently.
        """
        layout = lay_out(self.fields)
        if (layout.offsets, layout.record_bytes) != (self.offsets, self.record_bytes):
            raise ValueError(
                f"handle: records have {self.record_bytes} bytes with fields at {self.offsets}, but"
                f" this process needs {layout.record_bytes} bytes with fields at {layout.offsets}."
                " Use one version of speedtorch in all processes."
            )
        return layout

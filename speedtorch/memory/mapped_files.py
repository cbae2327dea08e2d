"""MappedPlacement: fields of a saved table where they are in its files, to be read."""

from __future__ import annotations

import errno
import mmap
import os
import warnings

import torch
from torch import Tensor

from speedtorch.files.table_files import open_fields
from speedtorch.memory import host_memory
from speedtorch.memory.placement import Placement, check_size
from speedtorch.ops.functions import wait_for_rows

__all__ = ["MappedPlacement", "NotMapped"]

# What systems say of files that they cannot map, as some FUSE file systems.
_NOT_SUPPORTED = (errno.ENODEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


class NotMapped(Exception):
    """Why the fields of a file cannot be used where they are; its text says it."""


class MappedPlacement(Placement):
    """Files of a saved table, mapped read-only: one page cache serves all processes.

    Where there is a GPU the files are registered for it, read-only and in place, which reads them
    whole. What does not work there is the `reason`.
    `fields` are in the files' memory: writing to them ends the process.

    Args:
        source: What HostTable.save was given, or a file like it.
        field: The one that is used, as "weight"; None: all of them.

    Raises:
        NotMapped: The file system cannot map them, or a field is not aligned.
        ValueError: As for open_fields.
    """

    memory = "mapped"
    writable = False

    def __init__(self, source: str | os.PathLike[str], field: str | None = None) -> None:
        self.path = os.path.abspath(source)
        mapped: dict[str, mmap.mmap] = {}
        try:
            with open_fields(source, mapped=mapped, field=field) as stored:
                for name, each in stored.items():
                    if each.nbytes and each.offset % each.dtype.itemsize:
                        raise NotMapped(
                            f"field {name!r} begins at byte {each.offset:,} of {each.path}, which"
                            f" is no multiple of the {each.dtype.itemsize} bytes of {each.dtype};"
                            " save() the table once, and open that file"
                        )
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
            raise NotMapped(f"the file system does not map it: {error.strerror}") from error
        # Others were opened before another save replaced them.
        self._files = {path: mapped[path] for path in {each.path for each in stored.values()}}
        with warnings.catch_warnings():
            # Tables give such tensors out as ReadOnlyRows alone.
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            whole = {
                path: torch.frombuffer(file, dtype=torch.uint8)
                for path, file in self._files.items()
            }
        reasons = [host_memory.pin_if_possible(each) for each in whole.values()]
        self.reason = next(filter(None, reasons), "")
        kinds = {host_memory.memory_kind(each) for each in whole.values()}
        self.is_in_place = kinds == {"registered"}
        self.fields: dict[str, Tensor] = {}
        for name, each in stored.items():
            data = whole[each.path][each.offset : each.offset + each.nbytes]
            rows = data.view(each.dtype).view(each.shape)
            self.fields[name] = host_memory.keep_pinned(rows, whole[each.path])

    def check(self) -> None:
        """Raises ValueError if a file was cut: reading its bytes would end the process."""
        for path, file in self._files.items():
            check_size(path, file.size(), len(file))

    def flush(self) -> None:
        """Waits for the GPU alone: there is nothing to lose, and a file that was cut is closed."""
        wait_for_rows(None)

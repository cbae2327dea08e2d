"""Rows that ranks share out, written by all of them: one file for each table, with all rows.

The first rank makes the file, each writes its rows to their places in it, and each looks up the
digests of a part of it. So the file is that of one process, and is loaded as such.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from speedtorch.files.chunk_digests import chunk_count, digests_of
from speedtorch.files.new_files import replace_files
from speedtorch.files.safetensors_format import safetensors_header
from speedtorch.files.system_calls import about, calls, open_to_read
from speedtorch.files.table_files import blocks_of_bytes
from speedtorch.parallel.ranks import Ranks
from speedtorch.table.shared_rows import SharedRows

__all__ = ["agreed", "check_same", "make_file", "own_digests", "write_own"]

_Value = TypeVar("_Value")


def agreed(stage: Callable[[], _Value]) -> list[_Value]:
    """What each rank gives, by rank; every rank calls it.

    Raises what this rank's call raises, and RuntimeError if another's does.
    """
    given: Any = None
    error: Exception | None = None
    try:
        given = stage()
    except Exception as raised:
        error = raised
    every = Ranks.of().every((given, None if error is None else f"{error!r}"))
    if error is not None:
        raise error
    for rank, (_, text) in enumerate(every):
        if text is not None:
            raise RuntimeError(f"save: rank {rank} raises {text}")
    return [value for value, _ in every]


def check_same(shared: Mapping[str, SharedRows]) -> None:
    """Raises ValueError on all ranks unless all have the same tables."""
    mine = [(key, tuple(each.shape), str(each.dtype)) for key, each in shared.items()]
    for rank, theirs in enumerate(agreed(lambda: mine)):
        if theirs != mine:
            raise ValueError(
                f"save: rank {rank} saves the rows of {[key for key, *_ in theirs]}, and rank"
                f" {Ranks.of().rank} those of {[key for key, *_ in mine]}, or of other shapes"
            )


def make_file(path: str, key: str, rows: SharedRows) -> tuple[int, int]:
    """Makes a file for all rows, with its header; gives the bytes of that, and of all."""
    header = safetensors_header({key: (tuple(rows.shape), rows.dtype)})
    nbytes = len(header) + rows.numel() * rows.dtype.itemsize
    with replace_files([path]) as (file,):
        file.reserve(nbytes)
        file.write(header)
    return len(header), nbytes


def write_own(path: str, header: int, rows: SharedRows) -> None:
    """Writes this rank's rows to their places in the file, and brings them to the disk."""
    row_bytes = math.prod(rows.shape[1:]) * rows.dtype.itemsize
    descriptor = calls.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        with about(path):
            for there, here in rows.blocks:
                os.lseek(descriptor, header + there.start * row_bytes, os.SEEK_SET)
                for block, buffer in blocks_of_bytes(rows.field[here.start : here.stop]):
                    buffer.copy_(block)
                    _write_all(descriptor, buffer.view(-1).numpy().data)
            calls.fsync(descriptor)
    finally:
        calls.close(descriptor)


def _write_all(descriptor: int, data: memoryview) -> None:
    while len(data):
        data = data[calls.write(descriptor, data) :]


def own_digests(path: str, nbytes: int) -> list[int]:
    """The digests of this rank's part of a file's chunks."""
    ranks, count = Ranks.of(), chunk_count(nbytes)
    first, end = (at * count // ranks.size for at in (ranks.rank, ranks.rank + 1))
    with open_to_read(path) as (read, _):
        return list(digests_of(read, nbytes, range(first, end)).values())

"""Processes that save one table of several .npy files, beside others that open it."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from killed_saves import FIELDS, Table


def main(folder: Path) -> None:
    """Two processes save 150 times each; two open the table until they end, and print how often."""
    torch.set_num_threads(1)
    table = Table(folder, anew=False)
    table.save(0)
    writers = [forked(lambda first=first: _save(table, first)) for first in (1, 1001)]
    readers = [forked(lambda names=names: _open(table, names)) for names in (None, FIELDS)]
    ended = [os.waitpid(child, 0)[1] for child in writers]
    (folder.parent / "end").write_bytes(b"")
    ended += [os.waitpid(child, 0)[1] for child in readers]
    assert ended == [0] * 4, ended
    assert len(os.listdir(folder)) == len(FIELDS), os.listdir(folder)


def forked(work: Callable[[], object]) -> int:
    """A child that does the work, prints what it raises, and ends with 0 or 1."""
    if child := os.fork():
        return child
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def _save(table: Table, first: int) -> None:
    for step in range(first, first + 150):
        table.save(step)


def _open(table: Table, names: tuple[str, ...] | None) -> None:
    seen = []
    while not (table.folder.parent / "end").exists():
        seen.append(table.opened(names))
    print(len(seen), len(set(seen)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Processes that share a table with a test: what each runs."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from rank_processes import warm_context
from torch import Tensor

import speedtorch
from speedtorch import HostTable
from speedtorch.table.table_handle import TableHandle

WAITS = 120.0  # seconds, for a process that imports torch on a busy machine


@contextmanager
def spawned(run: Callable[..., None], *arguments: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    """A new process that runs `run(connection, *arguments)`, and the other end."""
    context = warm_context()
    here, there = context.Pipe()
    process = context.Process(target=run, args=(there, *arguments), daemon=True)
    process.start()
    there.close()
    try:
        yield process, here
    finally:
        process.kill()
        process.join()
        here.close()


def received(connection: Connection) -> Any:
    """What the other process says next."""
    assert connection.poll(WAITS), "the other process says nothing"
    return connection.recv()


def smaps(file: HostTable | Path, *keys: str) -> dict[str, int]:
    """Bytes that this process's mappings of a file have, by key of /proc/self/smaps."""
    if isinstance(file, HostTable):
        status = os.fstat(file._open_placement().shared._descriptor.fileno())
    else:
        status = file.stat()
    return smaps_of(status.st_ino, *keys)


def smaps_of(inode: int, *keys: str) -> dict[str, int]:
    """As smaps, of a file by its number."""
    found, within = dict.fromkeys(keys, 0), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            within = int(line.split()[4]) == inode
        elif within and (key := line.split(":")[0]) in found:
            found[key] += int(line.split()[1]) << 10
    return found


def random_work(table: HostTable, part: int, parts: int, operations: int, device: str) -> Tensor:
    """Random reads and writes of the rows of one part; what they must hold in the end."""
    generator = torch.Generator().manual_seed(part)
    own = torch.arange(part, table.rows, parts)
    expected = table["weight"][own].clone()
    for number in range(operations):
        count = int(torch.randint(1, 9, (), generator=generator))
        at = torch.randperm(len(own), generator=generator)[:count]
        ids = own[at].to(device)
        rows = torch.full((count, expected.shape[1]), float(parts * number + part))
        rows += torch.arange(count)[:, None] / 16
        kind = int(torch.randint(4, (), generator=generator))
        if kind < 2:
            table.scatter(ids, rows.to(device), "weight")
            expected[at] = rows
        elif kind == 2:
            table.scatter(ids, torch.ones_like(rows).to(device), "weight", accumulate=True)
            expected[at] += 1
        else:
            assert torch.equal(table.gather(ids, "weight").cpu(), expected[at])
    table.settle()
    return expected


def works_at_random(
    connection: Connection, handle: TableHandle, operations: int, device: str
) -> None:
    """The rows of odd ids."""
    table = HostTable.from_handle(handle)
    connection.send("open")
    connection.send(random_work(table, 1, 2, operations, device).numpy())


def train(table: HostTable, part: int, device: str) -> None:
    """Trains the rows of one part of two by Adam, whose state lies beside them."""
    embedding = speedtorch.Embedding.from_pretrained(table, freeze=False, device=device)
    optimizer = torch.optim.Adam(embedding.parameters(), lr=0.1)
    speedtorch.attach(optimizer, embedding)
    generator = torch.Generator().manual_seed(part)
    for _ in range(20):
        ids = 2 * torch.randint(table.rows // 2, (30,), generator=generator) + part
        optimizer.zero_grad()
        embedding(ids.to(device)).square().sum().backward()
        optimizer.step()
    table.settle()


def trains(connection: Connection, handle: TableHandle, device: str) -> None:
    """The rows of odd ids."""
    train(HostTable.from_handle(handle), 1, device)
    connection.send("done")


def writes_versions(connection: Connection, handle: TableHandle, device: str) -> None:
    """All rows are one number, then the next, until the process is ended."""
    table = HostTable.from_handle(handle)
    ids = torch.arange(table.rows, device=device)
    connection.send("open")
    for number in range(1 << 20):
        with table.writing():
            for half in ids.chunk(2):
                rows = torch.full((len(half), 4), float(number), device=device)
                table.scatter(half, rows, "weight")
        time.sleep(1e-4 if device == "cpu" else 1e-2)  # a read on a shared GPU takes longer


def ends_while_it_writes(connection: Connection, handle: TableHandle) -> None:
    """Begins to write, and waits until it is ended."""
    table = HostTable.from_handle(handle)
    with table.writing():
        table["weight"][0] = 1
        connection.send("writing")
        connection.recv()


def owns(connection: Connection) -> None:
    """Makes a table, sends its handle, and keeps it until the process is ended."""
    table = HostTable(100, 4, memory="shared").fill_(3)
    connection.send(table.share())
    connection.recv()


def counts_bytes(connection: Connection, handle: TableHandle) -> None:
    """Reads all rows, and tells what this process has of their memory when asked."""
    table = HostTable.from_handle(handle)
    float(table["weight"].sum())
    connection.send("read")
    connection.recv()
    connection.send((smaps(table, "Pss", "Rss"), speedtorch.memory_stats()))
    connection.recv()


def maps(connection: Connection, path: str) -> None:
    """Maps a file and reads all rows, until it is ended."""
    table = HostTable.open(path, "mapped")
    connection.send(float(table["weight"].sum()))
    connection.recv()


class Rows(torch.utils.data.Dataset[Tensor]):
    """Rows of a shared table, which each worker opens for itself."""

    def __init__(self, handle: TableHandle) -> None:
        self._handle, self._table, self._opened = handle, None, 0

    def __len__(self) -> int:
        return self._handle.rows

    def __getitem__(self, row: int) -> Tensor:
        if self._opened != os.getpid():
            self._table, self._opened = HostTable.from_handle(self._handle), os.getpid()
        assert self._table is not None
        return self._table.gather(torch.tensor(row), "weight")

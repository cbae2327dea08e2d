"""Writers and readers of one shared table, and the check of what they have seen.

Each process writes its history as lines of JSON: a writer the version after each block and the rows
that it wrote, a reader the version and the rows that it read. Once all have ended,
`check_histories` computes the rows of each version in NumPy: no read may have other rows, no
version may be missing, and the last one is that of the table.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from saves_beside_loads import forked
from table_processes import random_work
from torch import Tensor, optim

import speedtorch
from speedtorch import HostTable
from stress.mirror import Array, differing

__all__ = ["History", "check_histories", "run_shared_table"]

READS = 40
"""Most reads of a reader."""
Line = dict[str, Any]


class History:
    """The lines of one process, appended one by one."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = (folder / f"{name}.history").open("a")

    def add(self, kind: str, version: int, ids: Tensor, rows: Tensor) -> None:
        line = {"kind": kind, "version": version, "ids": ids.tolist(), "rows": rows.tolist()}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def lines_of(path: Path) -> Iterator[Line]:
    for text in path.read_text().splitlines():
        yield json.loads(text)


def check_histories(folder: Path, first: Array, last: Array) -> None:
    """Raises AssertionError for a torn, lost or unknown row.

    Args:
        folder: Has the histories.
        first: The rows of version 0.
        last: The rows of the table after the last block.
    """
    paths = sorted(folder.glob("*.history"))
    writes = [line for path in paths for line in lines_of(path) if line["kind"] != "read"]
    versions, rows = {0: first}, first
    for number, line in enumerate(sorted(writes, key=lambda line: line["version"]), 1):
        assert line["version"] == 2 * number, f"version {2 * number} is missing or there twice"
        rows = rows.copy()
        given = np.array(line["rows"], np.float32).reshape(-1, rows.shape[1])
        if line["kind"] == "train":
            np.add.at(rows, line["ids"], -given / 4)
        else:
            rows[line["ids"]] = given
        versions[line["version"]] = rows
    for path in paths:
        before = 0
        for line in lines_of(path):
            assert line["version"] >= before, (
                f"{path.stem}: version {line['version']} after {before}"
            )
            before = line["version"]
            if line["kind"] == "read":
                assert before in versions, f"{path.stem}: version {before} was never written"
                found = np.array(line["rows"], np.float32).reshape(-1, rows.shape[1])
                wrong = differing(found, versions[before][line["ids"]])
                ids = [line["ids"][index] for index in wrong]
                assert not ids, f"{path.stem}: rows {ids} are not those of version {before}"
    wrong = differing(last, rows)
    assert not len(wrong), f"the table: rows {wrong.tolist()} are not those of the last version"


class SharedTable:
    """A program of writers and readers, drawn from its seed."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed, self.folder, draw = seed, folder, random.Random(seed)
        self.rows, self.width = draw.choice([4, 30, 200]), draw.choice([1, 4, 32])
        self.blocks = draw.randint(3, 25)
        self.writers, self.readers = draw.choice([1, 1, 2]), draw.choice([1, 2])
        self.killed_at = draw.randrange(self.blocks) if self.writers == 1 else None
        if draw.random() < 0.5:
            self.killed_at = None
        self.features = {"shared table", "readers"} | ({"kills"} if self.killed_at else set())
        self.table = HostTable(self.rows, self.width, memory="shared").fill_(0)
        self.apart = HostTable(40, self.width, memory="shared").fill_(0)

    def run(self) -> None:
        children = [self.started(self.write, number) for number in range(self.writers)]
        readers = [self.started(self.read, number) for number in range(self.readers)]
        beside = [self.started(self.write_own_rows, number) for number in range(2)]
        ended = [os.waitpid(child, 0)[1] for child in children]
        expected = 0 if self.killed_at is None else signal.SIGKILL
        assert ended == [expected] * self.writers, f"writers ended with {ended}"
        if self.killed_at is not None:  # all rows are written again after a block that was cut
            self.block("write", History(self.folder, "after"), torch.arange(self.rows), self.seed)
        (self.folder / "end").touch()
        ended = [os.waitpid(child, 0)[1] for child in (*readers, *beside)]
        assert not any(ended), f"readers and writers of own rows ended with {ended}"
        first = np.zeros((self.rows, self.width), np.float32)
        check_histories(self.folder, first, self.table["weight"].numpy().copy())
        for part in range(2):
            own = np.load(self.folder / f"own-{part}.npy")
            found = self.apart["weight"][part::2].numpy().copy()
            assert not len(differing(found, own)), f"rows of writer {part} were lost"

    def started(self, work: Callable[[int], None], number: int) -> int:
        return forked(lambda: work(number))

    def block(
        self, kind: str, history: History, ids: Tensor, seed: int, *, is_killed: bool = False
    ) -> None:
        """Writes or trains rows within one block; a killed one ends in its middle."""
        draw = torch.Generator().manual_seed(seed)
        given = torch.randint(-8, 9, (len(ids), self.width), generator=draw).float()
        with self.table.writing():
            half = len(ids) // 2
            if kind == "train":
                emb = speedtorch.Embedding.from_pretrained(self.table, freeze=False)
                (emb(ids) * given).sum().backward()
                optim.SGD(emb.parameters(), lr=0.25).step()
                emb.zero_grad()
            else:
                self.table.scatter(ids[:half], given[:half], "weight")
                if is_killed:
                    os.kill(os.getpid(), signal.SIGKILL)
                self.table["weight"][ids[half:]] = given[half:]
            version = self.table.version + 1
        history.add(kind, version, ids, given)

    def write(self, number: int) -> None:
        history, draw = History(self.folder, f"writer-{number}"), random.Random(self.seed + number)
        for block in range(self.blocks):
            ids = torch.tensor(draw.sample(range(self.rows), draw.randint(1, min(20, self.rows))))
            is_killed = block == self.killed_at
            kind = "write" if is_killed else draw.choice(["write", "write", "train"])
            self.block(kind, history, ids, draw.getrandbits(40), is_killed=is_killed)

    def read(self, number: int) -> None:
        history, draw = History(self.folder, f"reader-{number}"), random.Random(-self.seed - number)
        table = HostTable.from_handle(self.table.share())
        emb = speedtorch.Embedding.from_pretrained(table)
        for count in range(READS):
            is_last = (self.folder / "end").exists() or count == READS - 1
            ids = torch.randint(self.rows, (draw.randint(1, 30),))
            how = draw.choice(["gather", "view", "lookup"])

            def read() -> tuple[int, Tensor]:
                if how == "gather":  # noqa: B023
                    return table.version, table.gather(ids, "weight")  # noqa: B023
                if how == "view":  # noqa: B023
                    return table.version, table["weight"][ids].clone()  # noqa: B023
                return table.version, emb(ids).clone()  # noqa: B023

            try:
                version, rows = table.read_consistently(read)
            except RuntimeError as error:
                if self.killed_at is None or "a writer ended within" not in str(error):
                    raise
                continue
            history.add("read", version, ids, rows)
            if is_last:
                break

    def write_own_rows(self, part: int) -> None:
        """Writes rows that no other process writes, without a lock."""
        table = HostTable.from_handle(self.apart.share())
        np.save(self.folder / f"own-{part}.npy", random_work(table, part, 2, 60, "cpu").numpy())


def run_shared_table(seed: int, folder: Path) -> set[str]:
    program = SharedTable(seed, folder)
    program.run()
    return program.features

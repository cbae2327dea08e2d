"""Tables in files on a disk: cold reads, resident rows, and a checkpoint, beside the disk's rates.

The bounds are measured in the same run, all without the page cache: random reads of pages by 128
threads, the same with a write per read, and a copy of the file.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, optim

import speedtorch
from benchmarks.harness import Figure, Measured, figure_of, forget, take_turn, timed
from benchmarks.sections import zipf_ids
from benchmarks.sizes import DEVICE, SIZES
from benchmarks.training import loop_of

COLUMNS, SHARE = 128, 0.2
ROWS, IDS, STEPS = SIZES.file_rows, SIZES.file_ids, SIZES.file_steps
TITLE = (
    f"{ROWS:,} x {COLUMNS} float32 with Adam's state in a file, steps of {IDS // 2:,} Zipf ids with"
    " prefetch, and cold reads"
)
_PAGE, _BLOCK, _THREADS, _MADV_PAGEOUT = 4096, 4 << 20, 128, 21


def unmap_pages(table: speedtorch.HostTable) -> None:
    """Ends the use of pages by the table's mapping, so that leave_cache() can drop them."""
    rows = table["weight"]
    first = rows.data_ptr() // _PAGE * _PAGE
    size = ctypes.c_size_t(table.nbytes // _PAGE * _PAGE)
    if ctypes.CDLL(None, use_errno=True).madvise(ctypes.c_void_p(first), size, _MADV_PAGEOUT):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def leave_cache(path: Path) -> None:
    """Makes the page cache forget a file, after its bytes are on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A file's descriptor, with O_DIRECT where the file system has that."""
    flags = os.O_RDWR | os.O_CREAT
    try:
        descriptor = os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def pages_per_s(path: Path, folder: Path) -> tuple[float, float]:
    """Random pages that threads read each second, and those that they read and write back."""
    library = folder / "disk_rates.so"
    source = Path(__file__).with_name("disk_rates.cpp")
    command = ["c++", "-O2", "-std=c++20", "-shared", "-fPIC", "-pthread", source, "-o", library]
    subprocess.run(command, check=True)
    measure = ctypes.CDLL(str(library)).pages_per_s
    measure.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_double]
    measure.restype = ctypes.c_double
    pages = path.stat().st_size // _PAGE
    with opened(path) as descriptor:
        reads, mixed = (
            measure(descriptor, pages, _THREADS, writes, SIZES.file_seconds) for writes in (0, 1)
        )
    assert min(reads, mixed) > 0
    return reads, mixed


def direct_copy(source: Path, target: Path) -> None:
    """Copies a file in blocks, without the page cache."""
    block = mmap.mmap(-1, _BLOCK)
    with opened(source) as reader, opened(target) as writer:
        for _ in range(source.stat().st_size // _BLOCK):
            os.readv(reader, [block])
            os.write(writer, block)
        os.fsync(writer)
    target.unlink()


class Trained:
    """A table and the optimizer that trains it."""

    def __init__(self, rows: int, path: Path | None = None, share: float = 1.0) -> None:
        self.path, self.rows = path, rows
        settings: dict[str, Any] = {"state": ["exp_avg", "exp_avg_sq"]}
        if path is not None:
            resident = int(share * rows) * 3 * COLUMNS * 4
            settings |= {"memory": "file", "path": path, "resident": resident}
        self.table = speedtorch.HostTable(rows, COLUMNS, **settings)
        self.module = speedtorch.Embedding.from_pretrained(self.table, freeze=False, device=DEVICE)
        self.optimizer = optim.Adam(self.module.parameters(), fused=True)
        speedtorch.attach(self.optimizer, self.module)
        gradient = torch.randn(IDS // 2, COLUMNS, device=DEVICE)
        self.loop = loop_of(
            self.optimizer,
            lambda batch: self.module(batch).backward(gradient),
            loader=lambda batches: speedtorch.prefetch(batches, self.module, ids=lambda ids: ids),
        )

    def steps_ms(self, batches: list[Tensor]) -> float:
        """Milliseconds of a step in a loop over prefetch()."""
        take_turn()
        return timed(lambda: [None for _ in self.loop(batches)]) / len(batches)


def batches(rows: int, steps: int = STEPS) -> list[Tensor]:
    """Ids on the CPU, which prefetch() reads ahead."""
    return [zipf_ids(rows, IDS // 2).cpu() for _ in range(steps)]


def all_resident(folder: Path) -> Iterator[Figure]:
    """A file table that fits into its slots, and the same table in host memory, in turns."""
    rows = ROWS // 4
    ways = {"host memory": Trained(rows), "a file, all rows resident": Trained(rows, folder / "a")}
    for way in ways.values():
        way.table.zeros_()
        for ids in torch.arange(rows).split(IDS):  # reads the records
            way.module(ids)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(SIZES.file_loops + 1):
        for name, way in ways.items():
            spent = way.steps_ms(batches(rows))
            if number:
                times[name].append(spent)
    for name, each in times.items():
        yield figure_of("all rows resident", name, each, way=name)


def few_resident(way: Trained, mixed_per_s: float, memory_ms: float) -> Measured:
    """Steps in the steady state of a file table with slots for a share of its rows."""
    assert way.path is not None
    for _ in range(SIZES.file_loops):
        way.steps_ms(batches(ROWS))
    before, times = way.table.report(), []
    for _ in range(SIZES.file_loops):
        leave_cache(way.path)
        times.append(way.steps_ms(batches(ROWS)))
    after = way.table.report()
    reads = (after.reads - before.reads) / (SIZES.file_loops * STEPS)
    bound_ms = max(reads / mixed_per_s * 1e3, memory_ms)
    section = f"{SHARE:.0%} of the rows resident"
    bound = figure_of(section, "the misses at the disk's mixed rate", [bound_ms])
    yield bound
    yield figure_of(section, "a step", times, bound=bound, kind="ours")
    yield "reads of a step", round(reads)
    yield "hit rate", round(after.hit_rate, 3)


def cold_reads(way: Trained, reads_per_s: float) -> Iterator[Figure]:
    """Lookups of random rows that are neither resident nor in the page cache."""
    bound = figure_of("cold reads", "random pages", [IDS / reads_per_s * 1e3])
    yield bound
    times = []
    for _ in range(SIZES.file_loops + 1):
        way.table.flush()
        assert way.path is not None
        leave_cache(way.path)
        times.append(timed(partial(way.module, torch.randint(way.rows, (IDS,)))))
    yield figure_of("cold reads", f"{IDS:,} random rows", times[1:], bound=bound, kind="ours")


def checkpoint(way: Trained, folder: Path) -> Iterator[Figure]:
    """A save of a file table, and an O_DIRECT copy of its file."""
    assert way.path is not None
    nbytes = way.table.nbytes
    way.table.flush()
    runs, copies, saves = folder / "runs", [], []
    for _ in range(SIZES.saves):
        leave_cache(way.path)
        copies.append(timed(partial(direct_copy, way.path, folder / "copy")))
        leave_cache(way.path)
        saves.append(timed(lambda: speedtorch.save(runs, keep=1, model=way.module)))
    bound = figure_of("checkpoint", "an O_DIRECT copy of the file", copies, nbytes=nbytes)
    yield bound
    told = {"nbytes": nbytes, "kind": "ours"}
    yield figure_of("checkpoint", "speedtorch.save", saves, bound=bound, **told)


def measured() -> Measured:
    """The disk is that of the folder for temporary files."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        resident = list(all_resident(folder))
        yield from resident
        forget()
        (folder / "a").unlink()
        way = Trained(ROWS, folder / "b", SHARE)
        way.table.fill_(0.5)
        leave_cache(folder / "b")
        unmap_pages(way.table)
        rates = pages_per_s(folder / "b", folder)
        yield "random pages a second: reads; reads and writes", [round(rate) for rate in rates]
        yield from cold_reads(way, rates[0])
        yield from few_resident(way, rates[1], resident[0].median_ms)
        yield from checkpoint(way, folder)
    forget()

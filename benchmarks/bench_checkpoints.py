"""A table with its state to the disk and back, whole and by what has changed; noting the latter."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim

import speedtorch
from benchmarks.bench_hot_rows import STEPS, ids_of
from benchmarks.harness import Figure, Measured, figure_of, forget, take_turn, timed
from benchmarks.sections import zipf_ids
from benchmarks.sizes import DEVICE, SIZES
from benchmarks.training import prefetched

COLUMNS = 128
SHARE = 0.01
"""Of the rows that have changed."""
TITLE = (
    f"{SIZES.saved_rows:,} x {COLUMNS} float32 with Adam's state to the disk and back, and steps of"
    f" {SIZES.large_batch:,} ids of a table that notes what they write"
)
_BLOCK = 4 << 20
_TIMES = SIZES.saves


def trained(rows: int) -> tuple[speedtorch.Embedding, optim.Optimizer]:
    """An embedding whose table has its state, after a step."""
    module = speedtorch.Embedding(rows, COLUMNS, device=DEVICE)
    module.init_(nn.init.normal_)
    optimizer = optim.Adam(module.parameters(), lr=1e-3, fused=True)
    speedtorch.attach(optimizer, module)
    module(torch.arange(8, device=DEVICE)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return module, optimizer


def plain_write(path: Path, data: memoryview) -> None:
    """As dd with fsync."""
    with path.open("wb", buffering=0) as file:
        for at in range(0, len(data), _BLOCK):
            file.write(data[at : at + _BLOCK])
        os.fsync(file.fileno())


def plain_read(path: Path) -> None:
    """As dd to nowhere."""
    buffer = memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def leave_cache(folder: Path) -> None:
    """Lets the page cache forget files that are on the disk."""
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def saves(folder: Path) -> Measured:
    """Whole, by what has changed, and as torch does it; then the way back, from the disk."""
    module, optimizer = trained(SIZES.saved_rows)
    parts: dict[str, Any] = {"model": module, "optimizer": optimizer}
    table = module.table
    nbytes = table.nbytes
    told = {"nbytes": nbytes}
    data = memoryview(table.record.view(-1).view(torch.uint8).numpy())
    path = folder / "plain"
    writes = [timed(lambda: plain_write(path, data)) for _ in range(_TIMES)]
    yield (bound := figure_of("save", "write and fsync, blocks of 4 MiB", writes, **told))
    leave_cache(folder)
    reads = [(leave_cache(folder), timed(lambda: plain_read(path)))[1] for _ in range(_TIMES)]
    yield (back := figure_of("load", "read, blocks of 4 MiB", reads, **told))
    path.unlink()
    runs = folder / "runs"
    times = [timed(lambda: speedtorch.save(runs, keep=1, **parts)) for _ in range(_TIMES)]
    yield figure_of("save", "speedtorch.save", times, bound=bound, kind="whole", **told)
    times = [
        (leave_cache(runs), timed(lambda: speedtorch.load(runs, **parts)))[1] for _ in range(_TIMES)
    ]
    yield figure_of(
        "load", "speedtorch.load, all bytes verified", times, bound=back, kind="whole", **told
    )
    table.track_changes()
    last = speedtorch.save(runs, keep=1, **parts).generation
    changed = int(SHARE * SIZES.saved_rows)
    times = []
    for _ in range(_TIMES):
        ids = torch.randperm(SIZES.saved_rows)[:changed]
        table.scatter(ids, torch.randn(changed, COLUMNS), "weight")
        begin = time.perf_counter()
        last = speedtorch.save(runs, keep=1, base=last, **parts).generation
        times.append((time.perf_counter() - begin) * 1e3)
    name = f"speedtorch.save(base=), {SHARE:.0%} of the rows"
    yield figure_of("save", name, times, kind="delta", nbytes=nbytes * SHARE)
    times = [timed(lambda: speedtorch.load(runs, since=last - 1, **parts)) for _ in range(_TIMES)]
    yield figure_of(
        "load", f"speedtorch.load(since=), {SHARE:.0%} of the rows", times, kind="delta"
    )
    shutil.rmtree(runs)

    def by_torch() -> None:
        with (folder / "torch").open("wb") as file:
            torch.save([each.state_dict() for each in parts.values()], file)
            file.flush()
            os.fsync(file.fileno())

    times = [timed(by_torch) for _ in range(_TIMES)]
    yield figure_of("save", "torch.save of the state dicts, fsync", times, bound=bound, **told)


def loop(
    module: speedtorch.Embedding,
    optimizer: optim.Optimizer,
    batches: Sequence[Tensor],
    gradient: Tensor,
) -> None:
    """A few steps."""
    for ids in prefetched(module)(batches):
        optimizer.zero_grad()
        module(ids).backward(gradient)
        optimizer.step()


def steps() -> Iterator[Figure]:
    """Steps of a table that notes what they write, and of one that does not, in turns."""
    gradient = torch.randn(SIZES.large_batch, COLUMNS, device=DEVICE)
    pairs = {notes: trained(SIZES.rows) for notes in (False, True)}
    pairs[True][0].table.track_changes()
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(SIZES.noted_loops):
        batches: list[Tensor] = ids_of(1.05, STEPS)
        for notes in (False, True) if number % 2 else (True, False):
            module, optimizer = pairs[notes]
            take_turn()
            spent = timed(partial(loop, module, optimizer, batches, gradient))
            if number:
                times[notes].append(spent / STEPS)
    yield figure_of("a step, Zipf 1.05, Adam", "changes are not noted", times[False], kind="plain")
    yield figure_of("a step, Zipf 1.05, Adam", "changes are noted", times[True], kind="noted")


def beside_a_save(folder: Path) -> Measured:
    """Steps while a save in the background goes on, the call included, and without one."""
    module, optimizer = trained(SIZES.saved_rows)
    gradient = torch.randn(SIZES.large_batch, COLUMNS, device=DEVICE)

    def steps_ms() -> float:
        batches = [zipf_ids(SIZES.saved_rows, SIZES.large_batch) for _ in range(STEPS)]
        return timed(partial(loop, module, optimizer, batches, gradient))

    without = [steps_ms() / STEPS for _ in range(4 + SIZES.noted_loops)][4:]
    waits, means, steps = [], [], 0
    for _ in range(_TIMES):
        begin, steps = time.perf_counter(), 0
        spent = 0.0  # but for making ids
        saving = speedtorch.async_save(folder, keep=1, model=module, optimizer=optimizer)
        called = (time.perf_counter() - begin) * 1e3
        while not saving.done() or not steps:
            spent += steps_ms()
            steps += STEPS
        waits.append((saving.result().waited or 0.0) * 1e3)
        means.append((called + spent) / steps)
    section = "beside a save"
    yield figure_of(section, "the call of async_save", waits, nbytes=module.table.nbytes)
    yield figure_of(section, "a step without a save", without, kind="without")
    yield figure_of(
        section, "a step, mean while it goes on, the call included", means, kind="beside"
    )
    yield "steps beside a save", steps


def measured() -> Measured:
    """The disk is that of the folder for temporary files."""
    with tempfile.TemporaryDirectory() as folder:
        yield from saves(Path(folder))
        forget()
        yield from beside_a_save(Path(folder) / "beside")
    forget()
    yield from steps()

"""The sections that gather and scatter have in common: what moves, from which tables."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import torch
from torch import Tensor

import speedtorch
from benchmarks.directions import Direction
from benchmarks.harness import (
    Figure,
    Report,
    fresh_ids,
    microseconds_issued,
    microseconds_synchronised,
    turns,
)
from benchmarks.peers import has_cupy
from benchmarks.sizes import DEVICE, SIZES
from benchmarks.tables import host_table, rows_in

LARGE = f"{SIZES.managed_bytes >> 30} GiB"
ROWS = f"{SIZES.rows:,} rows"


def rows_of_512_bytes(way: Direction, report: Report) -> None:
    """The seed's own work, beside its peers; a table beyond every translation's reach too."""
    section = "128 float32"
    bound = report.add(way.bound(section, SIZES.batch, 512))
    for name, kind, rows in (
        (f"managed memory, {ROWS}", "managed", SIZES.rows),
        (f"managed memory, {LARGE}", "managed", rows_in("managed", 512)),
        (f"registered memory, {ROWS}", "registered", SIZES.rows),
    ):
        table = host_table(kind, rows, 128)
        report.add(way.move(section, f"speedtorch, {name}", table, kind=kind, bound=bound))
    for figure in way.peers(section, host_table("registered", SIZES.rows, 128), bound):
        report.add(figure)


def records(way: Direction, report: Report) -> None:
    """A weight and two states side by side."""
    section = "records of 384 float32"
    bound = report.add(way.bound(section, SIZES.batch, 1536))
    for name, rows in (("5 GB", SIZES.rows // 3), (LARGE, rows_in("managed", 1536))):
        table = host_table("managed", rows, 384)
        name = f"speedtorch, managed memory, {name}"
        report.add(way.move(section, name, table, kind="managed", bound=bound))


def tables_on_the_gpu(way: Direction, report: Report) -> None:
    """No link at all: torch's own ops are the measure."""
    section = "table on the GPU"
    table = torch.zeros(SIZES.rows, 128, device=DEVICE)
    report.add(way.move(section, "speedtorch", table, kind="ours"))
    report.add(way.move(section, way.on_gpu_name, table, kind="torch", run=way.on_gpu))


def narrow_rows(way: Direction, report: Report) -> None:
    """A million rows of 64 bytes: not bytes but rows are what costs."""
    section, count = "16 float32", SIZES.large_batch
    report.add(way.bound(section, count, 64))
    rows = rows_in("registered", 64)
    for kind in ("managed", "registered"):
        table = host_table(kind, rows, 16)
        name = f"speedtorch, {kind} memory, {rows * 64 >> 30} GiB"
        report.add(way.move(section, name, table, kind=kind, count=count))
    if has_cupy():
        report.add(way.cupy(section, host_table("registered", rows, 16), count))


def zipf_ids(rows: int, count: int, exponent: float = 1.05) -> Tensor:
    """Ids of which few are frequent, spread over the table."""
    top = float(rows) ** (1 - exponent)
    uniform = torch.rand(count, device=DEVICE, dtype=torch.float64)
    rank = (1 + uniform * (top - 1)).pow(1 / (1 - exponent)).long() - 1
    return rank.clamp_(0, rows - 1) * 7_654_321 % rows  # odd and no factor of a round number


def repeated_ids(way: Direction, report: Report) -> None:
    """Frequent ids must not cross the link again and again."""
    section = "repeated ids"
    table = host_table("managed", SIZES.rows, 128)
    batches = [zipf_ids(SIZES.rows, SIZES.large_batch) for _ in turns(9)]
    distinct = [ids.unique() for ids in batches]
    distinct = [ids[torch.randperm(len(ids), device=DEVICE)] for ids in distinct]
    half = [ids.where(torch.rand(len(ids), device=DEVICE) < 0.5, 7) for ids in uniform_ids()]
    for name, kind, ids in (
        ("Zipf 1.05", "zipf", batches),
        ("the distinct rows of those batches", "distinct", distinct),
        ("uniform", "uniform", uniform_ids()),
        ("one row is half of the batch", "half", half),
    ):
        if kind != "distinct":  # how many of them there are is chance
            name = f"{name}, {len(ids[0]):,} ids"
        report.add(way.move(section, name, table, kind=kind, count=max(map(len, ids)), ids=ids))


def uniform_ids() -> list[Tensor]:
    """Batches of the usual size from the usual table."""
    return fresh_ids(SIZES.rows, SIZES.batch)


def widths(way: Direction, report: Report) -> None:
    """Rows that begin anywhere, beside the next wider that begin where lines do."""
    for dtype, columns in (
        (torch.float32, (1, 3, 47, 94, 100, 188, 257)),
        (torch.bfloat16, (1, 3, 47, 94, 100, 188, 257)),
    ):
        short = str(dtype).removeprefix("torch.")
        for width in columns:
            nbytes = width * dtype.itemsize
            wider = 64 if nbytes <= 64 else -(-nbytes // 128) * 128
            for each in (width, wider // dtype.itemsize):
                table = host_table("managed", SIZES.rows, each, dtype)
                figure = way.move(
                    f"widths, {short}",
                    f"{each} columns",
                    table,
                    kind="odd" if each == width else "even",
                    repetitions=9,
                )
                figure.parameters["width"] = width
                report.add(figure)


def small_calls(way: Direction, report: Report) -> None:
    """Microseconds of one call: mostly the CPU's."""
    host = host_table("managed", SIZES.rows, 128)
    on_gpu = torch.zeros(min(SIZES.rows, 1_000_000), 128, device=DEVICE)
    for count in (1, 10, 100, 1000, 4096):
        for name, call in _calls(way, host, on_gpu, count).items():
            times = sorted(microseconds_synchronised(call))
            parameters = {"kind": name, "batch": count, "issued_us": microseconds_issued(call)}
            middle, low, high = (times[k] / 1e3 for k in (len(times) // 2, 0, -1))
            rate = count * 512 / middle / 1e6
            title = f"{count:,} rows, {name}"
            report.add(Figure("small calls", title, middle, low, high, rate, None, parameters))


def _calls(
    way: Direction, host: Tensor, on_gpu: Tensor, count: int
) -> dict[str, Callable[[], object]]:
    """Ways to move a few rows; each call takes other ids than the one before."""
    rows = torch.zeros(count, 128, device=DEVICE)
    pinned = torch.zeros(count, 128, pin_memory=DEVICE == "cuda")
    target, source = (rows, pinned) if way.inward else (pinned, rows)
    batches = cycle([torch.randint(len(host), (count,), device=DEVICE) for _ in range(64)])
    few = cycle([torch.randint(len(on_gpu), (count,), device=DEVICE) for _ in range(64)])
    calls: dict[str, Callable[[], object]] = {
        "speedtorch": lambda: way.ours(host, next(batches), rows),
        f"{way.on_gpu_name}, table on the GPU": lambda: way.on_gpu(on_gpu, next(few), rows),
        "torch copy of contiguous pinned rows": lambda: target.copy_(source, non_blocking=True),
    }
    if way.inward:  # without out=, as most call them
        calls["speedtorch"] = lambda: speedtorch.pinned_gather(host, next(batches))
        calls["torch.index_select, table on the GPU"] = lambda: torch.index_select(
            on_gpu, 0, next(few)
        )
    return calls


def curves(way: Direction, report: Report) -> None:
    """What the plots show: row width, rows per batch and table size, each alone."""
    batch = SIZES.batch
    for row_bytes in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096):
        report.add(way.bound("curve: row width", batch, row_bytes))
        for kind in ("managed", "registered"):
            table = host_table(kind, rows_in("registered", row_bytes), row_bytes // 4)
            _point(way, report, "curve: row width", table, kind, batch)
            if kind == "registered" and has_cupy() and row_bytes >= 64:
                report.add(way.cupy("curve: row width", table, batch))
    for count in (1000, 4000, 16_000, 64_000, 256_000, 1 << 20):
        count = min(count, SIZES.large_batch)
        report.add(way.bound("curve: rows per batch", count, 512))
        for kind in ("managed", "registered"):
            table = host_table(kind, SIZES.rows, 128)
            _point(way, report, "curve: rows per batch", table, kind, count)
            if kind == "registered" and has_cupy():
                report.add(way.cupy("curve: rows per batch", table, count))
    for size in (1, 2, 4, 8, 16, 32, 48):
        nbytes = SIZES.managed_bytes // 48 * size
        for kind in ("managed", "registered"):
            if kind == "registered" and nbytes > SIZES.registered_bytes:
                continue
            table = host_table(kind, nbytes // 512, 128)
            _point(way, report, "curve: table size", table, kind, batch)
            if kind == "registered" and has_cupy():
                report.add(way.cupy("curve: table size", table, batch))


def _point(
    way: Direction, report: Report, section: str, table: Tensor, kind: str, count: int
) -> None:
    report.add(way.move(section, kind, table, kind=kind, count=count, repetitions=7))

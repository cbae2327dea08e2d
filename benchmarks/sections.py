"""The sections that gather and scatter have in common: what moves, from which tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

import speedtorch
from benchmarks import harness
from benchmarks.directions import Direction
from benchmarks.harness import Figure, event, figure_of, fresh_ids, synchronize, turns, wall_ms
from benchmarks.sizes import DEVICE, SIZES
from benchmarks.tables import KINDS, host_table, rows_in

LARGE = f"{SIZES.managed_bytes >> 30} GiB"
ROWS = f"{SIZES.rows:,} rows"
_PRODUCTS = 100  # so many that an exchange falls on every part of one


def rows_of_512_bytes(way: Direction) -> Iterator[Figure]:
    """The seed's own work, beside its peers; a table beyond every translation's reach too."""
    section = "128 float32"
    yield (bound := way.bound(section, SIZES.batch, 512))
    for name, kind, rows in (
        (f"managed memory, {ROWS}", "managed", SIZES.rows),
        (f"managed memory, {LARGE}", "managed", rows_in("managed", 512)),
        (f"registered memory, {ROWS}", "registered", SIZES.rows),
    ):
        table = host_table(kind, rows, 128)
        yield way.move(section, f"speedtorch, {name}", table, kind=kind, bound=bound)
    yield from way.peers(section, host_table("registered", SIZES.rows, 128), bound)


def records(way: Direction) -> Iterator[Figure]:
    """A weight and two states side by side."""
    section = "records of 384 float32"
    yield (bound := way.bound(section, SIZES.batch, 1536))
    for name, rows in (("5 GB", SIZES.rows // 3), (LARGE, rows_in("managed", 1536))):
        table = host_table("managed", rows, 384)
        name = f"speedtorch, managed memory, {name}"
        yield way.move(section, name, table, kind="managed", bound=bound)


def tables_on_the_gpu(way: Direction) -> Iterator[Figure]:
    """No link at all: torch's own ops are the measure."""
    section = "table on the GPU"
    table = torch.zeros(SIZES.rows, 128, device=DEVICE)
    yield way.move(section, "speedtorch", table, kind="ours")
    yield way.move(section, way.on_gpu_name, table, kind="torch", run=way.on_gpu)


def narrow_rows(way: Direction) -> Iterator[Figure]:
    """A million rows of 64 bytes: not bytes but rows are what costs."""
    section, count = "16 float32", SIZES.large_batch
    yield way.bound(section, count, 64)
    rows = rows_in("registered", 64)
    for kind in KINDS:
        table = host_table(kind, rows, 16)
        name = f"speedtorch, {kind} memory, {rows * 64 >> 30} GiB"
        yield way.move(section, name, table, kind=kind, count=count)
    yield from way.cupy(section, host_table("registered", rows, 16), count)


def zipf_ids(rows: int, count: int, exponent: float = 1.05) -> Tensor:
    """Ids of which few are frequent, spread over the table."""
    top = float(rows) ** (1 - exponent)
    uniform = torch.rand(count, device=DEVICE, dtype=torch.float64)
    rank = (1 + uniform * (top - 1)).pow(1 / (1 - exponent)).long() - 1
    return spread(rank.clamp_(0, rows - 1), rows)


def spread(ids: Tensor, rows: int) -> Tensor:
    """Other ids instead, one for each, so that small ones are apart."""
    return ids * 7_654_321 % rows  # odd and no factor of a round number


def repeated_ids(way: Direction) -> Iterator[Figure]:
    """Frequent ids must not cross the link again and again."""
    section = "repeated ids"
    table = host_table("managed", SIZES.rows, 128)
    batches = [zipf_ids(SIZES.rows, SIZES.large_batch) for _ in turns(9)]
    distinct = [ids.unique() for ids in batches]
    distinct = [ids[torch.randperm(len(ids), device=DEVICE)] for ids in distinct]
    uniform, half = (fresh_ids(SIZES.rows, SIZES.batch) for _ in range(2))
    half = [ids.where(torch.rand(len(ids), device=DEVICE) < 0.5, 7) for ids in half]
    for name, kind, ids in (
        ("Zipf 1.05", "zipf", batches),
        ("the distinct rows of those batches", "distinct", distinct),
        ("uniform", "uniform", uniform),
        ("one row is half of the batch", "half", half),
    ):
        if kind != "distinct":  # how many of them there are is chance
            name = f"{name}, {len(ids[0]):,} ids"
        yield way.move(section, name, table, kind=kind, count=max(map(len, ids)), ids=ids)


def widths(way: Direction) -> Iterator[Figure]:
    """Rows that begin anywhere, beside the next wider that begin where lines do."""
    for dtype in (torch.float32, torch.bfloat16):
        section = f"widths, {str(dtype).removeprefix('torch.')}"
        for width in (1, 3, 47, 94, 100, 188, 257):
            nbytes = width * dtype.itemsize
            wider = 64 if nbytes <= 64 else -(-nbytes // 128) * 128
            for kind, columns in (("odd", width), ("even", wider // dtype.itemsize)):
                table = host_table("managed", SIZES.rows, columns, dtype)
                name = f"{columns} columns"
                yield way.move(section, name, table, kind=kind, repetitions=9, width=width)


def small_calls(way: Direction) -> Iterator[Figure]:
    """Microseconds of one call: mostly the CPU's."""
    host = host_table("managed", SIZES.rows, 128)
    on_gpu = torch.zeros(min(SIZES.rows, 1_000_000), 128, device=DEVICE)
    for count in (1, 10, 100, 1000, 4096):
        for name, call in _calls(way, host, on_gpu, count).items():
            yield figure_of(
                "small calls",
                f"{count:,} rows, {name}",
                _calls_ms(call),
                nbytes=count * 512,
                kind=name,
                batch=count,
                issued_us=_issued_us(call),
            )


def _calls_ms(call: Callable[[], object]) -> list[float]:
    """Wall times of calls, each waited for."""
    harness.take_turn()
    warm_ups = SIZES.calls // 5
    return [wall_ms(lambda _: call()) for _ in range(warm_ups + SIZES.calls)][warm_ups:]


def _issued_us(call: Callable[[], object]) -> float:
    """Time that a call keeps the CPU, of many that nothing waits for."""
    for _ in range(SIZES.calls // 5):
        call()
    synchronize()
    begin = time.perf_counter()
    for _ in range(SIZES.calls):
        call()
    spent = time.perf_counter() - begin
    synchronize()
    return spent / SIZES.calls * 1e6


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


def multiprocessors(way: Direction) -> Iterator[Figure]:
    """GB/s on 1 to 32 multiprocessors; rows of 516 bytes cannot be moved by bulk copies."""
    usual = speedtorch.get_num_sms()
    for columns in (128, 384, 129):
        table = host_table("managed", SIZES.rows // 3, columns)
        for sms in (1, 2, 3, 4, 8, 12, 16, 32):
            speedtorch.set_num_sms(sms)
            name = f"{columns * 4} B, {sms} at most"
            move = {"kind": "managed", "repetitions": 7, "sms": sms}
            yield way.move("multiprocessors", name, table, **move)
    speedtorch.set_num_sms(usual)


def _products(count: int, factors: Sequence[Tensor]) -> tuple[Any, Any]:
    """Queues matrix products, between two events."""
    left, right, out = factors
    start, stop = event(), event()
    start.record()
    for _ in range(count):
        torch.mm(left, right, out=out)
    stop.record()
    return start, stop


def _each_ms(count: int, events: tuple[Any, Any]) -> float:
    """Milliseconds for one of so many between two events."""
    start, stop = events
    stop.synchronize()
    return float(start.elapsed_time(stop)) / count


def matrix_product(way: Direction) -> Iterator[Figure]:
    """A bfloat16 product alone and beside exchanges on another stream, both in a loop."""
    shape = (SIZES.product, SIZES.product)
    left, right = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    factors = (left, right, torch.empty_like(left))
    _products(20, factors)
    synchronize()
    alone = _each_ms(_PRODUCTS, _products(_PRODUCTS, factors))
    section = "beside a matrix product"
    yield figure_of(section, "the product alone", [alone], kind="alone")
    for columns in (128, 384):
        table = host_table("managed", SIZES.rows // 3, columns)
        batches = fresh_ids(SIZES.rows // 3, SIZES.batch, 61)
        rows = torch.zeros(SIZES.batch, columns, device=DEVICE)
        product_ms, exchange_ms = _both(way, table, batches, rows, factors)
        row = f"rows of {columns * 4} B"
        for name, each, kind, nbytes in (
            (f"the product beside {row}", product_ms, "product", 0),
            (f"{row} beside the product", exchange_ms, "exchange", rows.nbytes),
        ):
            told = {"kind": kind, "row_bytes": columns * 4, "slow_down": each / alone - 1}
            yield figure_of(section, name, [each], nbytes=nbytes, **told)


def _both(
    way: Direction, table: Tensor, batches: list[Tensor], rows: Tensor, factors: Sequence[Tensor]
) -> tuple[float, float]:
    """Milliseconds for a product and for an exchange, while both go on."""
    side = torch.cuda.stream(torch.cuda.Stream()) if DEVICE == "cuda" else nullcontext()
    synchronize()
    products = _products(_PRODUCTS, factors)
    exchanges = 0
    with side:
        start, stop = event(), event()
        start.record()
        while not (exchanges and products[1].query()):
            for batch in batches[exchanges % len(batches) :][:8]:
                way.ours(table, batch, rows)
                exchanges += 1
            stop.record()
            stop.synchronize()  # no more exchanges in the queue than products last for
    return _each_ms(_PRODUCTS, products), _each_ms(exchanges, (start, stop))


def curves(way: Direction) -> Iterator[Figure]:
    """What the plots show: row width, rows per batch and table size, each alone."""
    for row_bytes in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096):
        yield way.bound("curve: row width", SIZES.batch, row_bytes)
        rows = rows_in("registered", row_bytes)
        yield from _points(way, "curve: row width", rows, row_bytes, SIZES.batch)
    for count in (1000, 4000, 16_000, 64_000, 256_000, 1 << 20):
        count = min(count, SIZES.large_batch)
        yield way.bound("curve: rows per batch", count, 512)
        yield from _points(way, "curve: rows per batch", SIZES.rows, 512, count)
    for size in (1, 2, 4, 8, 16, 32, 48):
        rows = SIZES.managed_bytes // 48 * size // 512
        yield from _points(way, "curve: table size", rows, 512, SIZES.batch)


def _points(
    way: Direction, section: str, rows: int, row_bytes: int, count: int
) -> Iterator[Figure]:
    for kind in KINDS:
        if rows > rows_in(kind, row_bytes):
            continue
        table = host_table(kind, rows, row_bytes // 4)
        yield way.move(section, kind, table, kind=kind, count=count, repetitions=7)
        if kind == "registered" and row_bytes >= 64:
            yield from way.cupy(section, table, count)


def sections_of(way: Direction) -> Iterator[Figure]:
    """All figures of one direction."""
    for section in (
        rows_of_512_bytes,
        records,
        tables_on_the_gpu,
        narrow_rows,
        repeated_ids,
        widths,
        small_calls,
        multiprocessors,
        matrix_product,
        curves,
    ):
        yield from section(way)

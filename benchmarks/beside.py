"""What a matrix product feels of an exchange beside it, and the exchange of the product."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.directions import Direction
from benchmarks.harness import Figure, figure_of, fresh_ids
from benchmarks.sizes import DEVICE, SIZES
from benchmarks.tables import host_table

_PRODUCTS = 100  # so many that an exchange falls on every part of one


def _products(
    count: int, left: Tensor, right: Tensor, out: Tensor
) -> tuple[Callable[[], bool], Callable[[], float]]:
    """Queues matrix products; tells when they are done, and milliseconds for each."""
    begin = time.perf_counter()
    if DEVICE == "cpu":
        for _ in range(count):
            torch.mm(left, right, out=out)
        spent = (time.perf_counter() - begin) * 1e3 / count
        return lambda: True, lambda: spent
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        torch.mm(left, right, out=out)
    stop.record()
    return stop.query, lambda: (stop.synchronize(), start.elapsed_time(stop) / count)[1]


def matrix_product(way: Direction) -> Iterator[Figure]:
    """A bfloat16 product alone and beside exchanges on another stream, both in a loop."""
    shape = (SIZES.product, SIZES.product)
    left, right = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    factors = (left, right, torch.empty_like(left))
    _products(20, *factors)[1]()
    alone = _products(_PRODUCTS, *factors)[1]()
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
    way: Direction,
    table: Tensor,
    batches: list[Tensor],
    rows: Tensor,
    factors: tuple[Tensor, Tensor, Tensor],
) -> tuple[float, float]:
    """Milliseconds for a product and for an exchange, while both go on."""
    if DEVICE == "cpu":
        way.ours(table, batches[0], rows)
        each = _products(2, *factors)[1]()
        return each, each
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    done, milliseconds = _products(_PRODUCTS, *factors)
    exchanges = 0
    with torch.cuda.stream(side):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        while not done():
            for batch in batches[exchanges % len(batches) :][:8]:
                way.ours(table, batch, rows)
                exchanges += 1
            stop.record()
            stop.synchronize()  # no more exchanges in the queue than products last for
    torch.cuda.synchronize()
    return milliseconds(), start.elapsed_time(stop) / exchanges

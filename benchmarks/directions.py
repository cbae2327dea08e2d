"""The two directions over the link, as the benchmarks of gather and scatter see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import speedtorch
from benchmarks.harness import Figure, fresh_ids, measure, turns
from benchmarks.peers import cupy_view, has_cupy
from benchmarks.sizes import DEVICE, SIZES

__all__ = ["GATHER", "SCATTER", "Direction"]


@dataclass(frozen=True)
class Direction:
    """To the GPU or from it: our op, torch's on a table of the GPU, and the copy that bounds them.

    Each function takes the table, the ids and the rows on the GPU.
    """

    stem: str
    title: str
    ours: Callable[[Tensor, Tensor, Tensor], object]
    on_gpu: Callable[[Tensor, Tensor, Tensor], object]
    on_gpu_name: str
    inward: bool

    def bound(self, section: str, count: int, row_bytes: int) -> Figure:
        """memcpy of as many contiguous bytes between pinned memory and the GPU."""
        host = torch.empty(count * row_bytes, dtype=torch.uint8, pin_memory=DEVICE == "cuda")
        device = torch.empty(count * row_bytes, dtype=torch.uint8, device=DEVICE)
        target, source = (device, host) if self.inward else (host, device)
        return measure(
            section,
            "bound: memcpy of the same bytes, pinned",
            lambda _: target.copy_(source, non_blocking=True),
            turns(),
            nbytes=count * row_bytes,
            kind="bound",
            row_bytes=row_bytes,
            batch=count,
        )

    def move(
        self,
        section: str,
        name: str,
        table: Tensor,
        *,
        kind: str,
        count: int = SIZES.batch,
        bound: Figure | None = None,
        ids: Sequence[Tensor] | None = None,
        run: Callable[[Tensor, Tensor, Tensor], object] | None = None,
        on_host_clock: bool = False,
        repetitions: int | None = None,
    ) -> Figure:
        """Times one way of moving `count` rows of the table, ids fresh, planning included."""
        rows = torch.empty(count, *table.shape[1:], dtype=table.dtype, device=DEVICE)
        rows.view(torch.uint8).random_()
        work = run or self.ours
        row_bytes = table.shape[1] * table.itemsize
        return measure(
            section,
            name,
            lambda batch: work(table, batch, rows[: len(batch)]),
            ids or fresh_ids(table.shape[0], count, repetitions),
            nbytes=count * row_bytes,
            bound=bound,
            on_host_clock=on_host_clock,
            kind=kind,
            row_bytes=row_bytes,
            batch=count,
            table_bytes=table.shape[0] * row_bytes,
        )

    def peers(self, section: str, table: Tensor, bound: Figure) -> list[Figure]:
        """What users have today, on the same table in mapped memory."""
        rows = torch.empty(SIZES.batch, table.shape[1], device=DEVICE)
        staging = torch.empty(SIZES.batch, table.shape[1], pin_memory=DEVICE == "cuda")
        ways = {"torch as SpeedTorch timed it": (_as_timed_in if self.inward else _as_timed_out)}
        well = _staged_in if self.inward else _staged_out
        ways["torch done well"] = lambda table, ids, rows: well(table, ids, rows, staging)
        figures = []
        for name, way in ways.items():
            figures.append(
                measure(
                    section,
                    name,
                    lambda ids, way=way: way(table, ids, rows),
                    [ids.cpu() for ids in fresh_ids(table.shape[0], SIZES.batch, 9)],
                    nbytes=rows.nbytes,
                    bound=bound,
                    on_host_clock=True,
                    kind=name,
                    row_bytes=table.shape[1] * 4,
                    batch=SIZES.batch,
                    table_bytes=table.nbytes,
                )
            )
        if has_cupy():
            figures.append(self.cupy(section, table, SIZES.batch, bound))
        return figures

    def cupy(self, section: str, table: Tensor, count: int, bound: Figure | None = None) -> Figure:
        """CuPy's zero-copy take and put, which SpeedTorch was made of."""
        view = cupy_view(table)

        def take(_: Tensor, ids: Tensor, __: Tensor) -> None:
            view.take(cupy_view(ids), axis=0)

        def put(_: Tensor, ids: Tensor, rows: Tensor) -> None:
            view[cupy_view(ids)] = cupy_view(rows)

        return self.move(
            section,
            "CuPy zero-copy, as SpeedTorch did",
            table,
            kind="CuPy",
            count=count,
            bound=bound,
            run=take if self.inward else put,
            repetitions=9,
        )


def _as_timed_in(table: Tensor, ids: Tensor, rows: Tensor) -> None:
    table[ids].to(DEVICE)


def _as_timed_out(table: Tensor, ids: Tensor, rows: Tensor) -> None:
    table[ids] = rows.cpu()


def _staged_in(table: Tensor, ids: Tensor, rows: Tensor, staging: Tensor) -> None:
    torch.index_select(table, 0, ids, out=staging)
    rows.copy_(staging, non_blocking=True)


def _staged_out(table: Tensor, ids: Tensor, rows: Tensor, staging: Tensor) -> None:
    staging.copy_(rows)
    table.index_copy_(0, ids, staging)


GATHER = Direction(
    stem="pinned_gather",
    title="rows from host memory to the GPU",
    ours=lambda table, ids, rows: speedtorch.pinned_gather(table, ids, out=rows),
    on_gpu=lambda table, ids, rows: torch.index_select(table, 0, ids, out=rows),
    on_gpu_name="torch.index_select",
    inward=True,
)
SCATTER = Direction(
    stem="pinned_scatter",
    title="rows from the GPU to host memory",
    ours=lambda table, ids, rows: speedtorch.pinned_scatter(table, ids, rows),
    on_gpu=lambda table, ids, rows: table.index_copy_(0, ids, rows),
    on_gpu_name="torch index_copy_",
    inward=False,
)

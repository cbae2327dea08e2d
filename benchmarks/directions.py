"""The two directions over the link, as the benchmarks of gather and scatter see them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

import speedtorch
from benchmarks.harness import Figure, fresh_ids, measure, turns
from benchmarks.sizes import DEVICE, SIZES
from benchmarks.tables import cupy_view, has_cupy

Move: TypeAlias = Callable[[Tensor, Tensor, Tensor], object]
"""Takes the table, the ids and the rows on the GPU."""


@dataclass(frozen=True)
class Direction:
    """To the GPU or from it: our op, torch's on a table of the GPU, and what others do."""

    inward: bool
    ours: Move
    on_gpu: Move
    on_gpu_name: str
    as_timed: Move
    """By torch, as SpeedTorch timed it in 2019."""
    done_well: Callable[[Tensor, Tensor, Tensor, Tensor], object]
    """By torch, through pinned staging."""
    cupy_move: Callable[[Any, Any, Any], object]
    """The same on CuPy's arrays."""

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
        ids: Sequence[Tensor] | None = None,
        run: Move | None = None,
        repetitions: int = SIZES.repetitions,
        **told: Any,
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
            kind=kind,
            row_bytes=row_bytes,
            batch=count,
            table_bytes=table.shape[0] * row_bytes,
            **told,
        )

    def peers(self, section: str, table: Tensor, bound: Figure) -> Iterator[Figure]:
        """What users have today, on the same table in mapped memory."""
        staging = torch.empty(SIZES.batch, table.shape[1], pin_memory=DEVICE == "cuda")
        ways: dict[str, Move] = {
            "torch as SpeedTorch timed it": self.as_timed,
            "torch done well": lambda *move: self.done_well(*move, staging),
        }
        for name, way in ways.items():
            ids = [ids.cpu() for ids in fresh_ids(table.shape[0], SIZES.batch, 9)]
            told = {"kind": name, "ids": ids, "run": way, "bound": bound, "on_host_clock": True}
            yield self.move(section, name, table, **told)
        yield from self.cupy(section, table, SIZES.batch, bound)

    def cupy(
        self, section: str, table: Tensor, count: int, bound: Figure | None = None
    ) -> Iterator[Figure]:
        """CuPy's zero-copy take and put, which SpeedTorch was made of, where CuPy is."""
        if not has_cupy():
            return
        view = cupy_view(table)
        name = "CuPy zero-copy, as SpeedTorch did"
        told = {"kind": "CuPy", "count": count, "bound": bound, "repetitions": 9}
        told["run"] = lambda _, ids, rows: self.cupy_move(view, cupy_view(ids), rows)
        yield self.move(section, name, table, **told)


def _staged_in(table: Tensor, ids: Tensor, rows: Tensor, staging: Tensor) -> None:
    torch.index_select(table, 0, ids, out=staging)
    rows.copy_(staging, non_blocking=True)


def _staged_out(table: Tensor, ids: Tensor, rows: Tensor, staging: Tensor) -> None:
    staging.copy_(rows)
    table.index_copy_(0, ids, staging)


GATHER = Direction(
    inward=True,
    ours=lambda table, ids, rows: speedtorch.pinned_gather(table, ids, out=rows),
    on_gpu=lambda table, ids, rows: torch.index_select(table, 0, ids, out=rows),
    on_gpu_name="torch.index_select",
    as_timed=lambda table, ids, rows: table[ids].to(DEVICE),
    done_well=_staged_in,
    cupy_move=lambda view, ids, rows: view.take(ids, axis=0),
)
SCATTER = Direction(
    inward=False,
    ours=lambda table, ids, rows: speedtorch.pinned_scatter(table, ids, rows),
    on_gpu=lambda table, ids, rows: table.index_copy_(0, ids, rows),
    on_gpu_name="torch index_copy_",
    as_timed=lambda table, ids, rows: table.__setitem__(ids, rows.cpu()),
    done_well=_staged_out,
    cupy_move=lambda view, ids, rows: view.__setitem__(ids, cupy_view(rows)),
)

"""opcheck: schema, fake kernel, autograd registration and tracing of every overload."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import Place
from reference import random_rows
from torch import Tensor

import speedtorch

ops = torch.ops.speedtorch
ROWS, COLUMNS, IDS, LOAD = 37, 6, [3, 0, 36, 17], [21, 3, 8]


def overload_arguments(place: Place) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Every overload with arguments that fit it."""

    def rows(count: int, seed: int) -> Tensor:
        return place.work(random_rows(count, (COLUMNS,), torch.int32, seed=seed))

    table = place.table(random_rows(ROWS, (COLUMNS,), torch.int32, gap=2))
    other = place.table(random_rows(5, (COLUMNS,), torch.int32, seed=4))
    index, load = place.ids(IDS), place.ids(LOAD, torch.int32)
    plan, load_plan = (speedtorch.plan_rows(ids, ROWS) for ids in (index, load))
    out, leaving, arriving = rows(4, 1), rows(5, 2), rows(3, 3)
    up, up_load = (place.work(torch.tensor(sorted(ids))) for ids in (IDS, LOAD))
    places, load_places = (place.work(torch.tensor(ids)) for ids in ([4, 0, 1, 3], [2, 0, 1]))
    two = place.ids([2])
    gather, scatter, swap = ops.pinned_gather, ops.pinned_scatter, ops.optimizer_state_swap
    return {
        "gather": (gather.default, (table, index)),
        "gather.out": (gather.out, (table, index, out)),
        "gather.planned": (gather.planned, (table, index, plan)),
        "gather.planned_out": (gather.planned_out, (table, index, plan, out)),
        "scatter": (scatter.default, (table, index, out)),
        "scatter_add": (scatter.default, (table, index, out, True)),
        "scatter.planned": (scatter.planned, (table, index, out, plan)),
        "scatter.planned_add": (scatter.planned, (table, index, out, plan, True)),
        "swap": (swap.default, ([table], [leaving], index, [arriving], load)),
        "swap.planned": (
            swap.planned,
            ([table], [leaving], index, plan, [arriving], load, load_plan),
        ),
        "swap.placed": (
            swap.placed,
            ([table], [leaving], up, places, [arriving], up_load, load_places),
        ),
        "swap.tables": (
            swap.tables,
            ([table, other], 2, [leaving], up, places, [arriving], up_load, load_places),
        ),
        "swap.counted": (
            swap.counted,
            ([table], [leaving], up, places, two, [arriving], up_load, load_places, two.clone()),
        ),
        "plan_rows": (ops.plan_rows.default, (index, ROWS)),
    }


OVERLOADS = (
    *("gather", "gather.out", "gather.planned", "gather.planned_out"),
    *("scatter", "scatter_add", "scatter.planned", "scatter.planned_add"),
    *("swap", "swap.planned", "swap.placed", "swap.tables", "swap.counted", "plan_rows"),
)


@pytest.mark.parametrize("overload", OVERLOADS)
def test_opcheck_finds_nothing(place: Place, overload: str) -> None:
    if overload in ("swap.tables", "swap.counted") and place.memory not in ("plain", "cuda"):
        pytest.skip("refuses the pageable memory that opcheck copies a table to")
    op, arguments = overload_arguments(place)[overload]
    torch.library.opcheck(op, arguments)
    speedtorch.synchronize()


@pytest.mark.parametrize("overload", ["gather", "gather.planned"])
def test_opcheck_finds_nothing_in_the_gradient(place: Place, overload: str) -> None:
    op, (_, *others) = overload_arguments(place)[overload]
    table = place.table(torch.rand(ROWS, COLUMNS)).requires_grad_()
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op, (table, *others), test_utils=tests)
    speedtorch.synchronize()


@pytest.mark.parametrize(
    "name", ["pinned_gather", "pinned_scatter", "optimizer_state_swap", "plan_rows"]
)
def test_every_overload_is_checked(name: str) -> None:
    place = Place("cpu", "plain")
    checked = {str(op) for op, _ in overload_arguments(place).values()}
    assert {
        f"speedtorch.{name}.{overload}" for overload in getattr(ops, name).overloads()
    } <= checked

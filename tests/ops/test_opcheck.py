"""opcheck: schema, fake kernel, autograd registration and tracing of every overload."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import Place
from op_arguments import (
    COLUMNS,
    NOT_IN_GRAPHS,
    ROWS,
    WRITTEN,
    are_written,
    op_arguments,
    tensors_of,
)
from reference import random_rows
from torch import Tensor
from torch.library import opcheck

import speedtorch

NAMES = list(op_arguments("cpu"))
ROWS_APART = ("pinned_gather", "pinned_scatter", "optimizer_state_swap", "exchange_rows")
UNTRACED = ("test_schema", "test_autograd_registration", "test_faketensor")


def arguments_at(place: Place, name: str) -> tuple[Any, tuple[Any, ...]]:
    """The op and its arguments, with tables in the place's memory, their rows apart if they may."""

    def hosted(rows: Tensor) -> Tensor:
        wide = torch.cat([rows, rows], 1)
        return place.table(
            (wide[:, : rows.shape[1]] if name.startswith(ROWS_APART) else rows).cpu()
        )

    return op_arguments(place.device, hosted)[name]


@pytest.mark.parametrize("name", NAMES)
def test_opcheck_finds_nothing(place: Place, name: str) -> None:
    pageable = name in ("exchange_rows, of tables", "exchange_rows, counted", "exchange_cached")
    if pageable and place.memory not in ("plain", "cuda"):
        pytest.skip("refuses the pageable memory that opcheck copies a table to")
    # Of some results what follows the entries that count is not written: two calls differ there.
    utils = {"test_utils": ("test_schema", "test_faketensor")} if name in WRITTEN else {}
    if name in NOT_IN_GRAPHS:
        utils = {"test_utils": ("test_schema",)}
    opcheck(*arguments_at(place, name), **utils)
    speedtorch.synchronize()


@pytest.mark.parametrize("name", NAMES)
def test_the_version_changes_of_exactly_the_written_arguments(device: str, name: str) -> None:
    op, arguments = op_arguments(device)[name]
    tensors = tensors_of(arguments)
    before = [tensor._version for tensor in tensors]
    op(*arguments)
    speedtorch.synchronize()
    changed = [tensor._version != version for tensor, version in zip(tensors, before, strict=True)]
    assert changed == are_written(op, arguments)


def test_opcheck_finds_nothing_where_no_rows_are_put_aside(device: str) -> None:
    op, (held, incoming, _, *lists) = op_arguments(device)["hold_rows"]
    opcheck(op, (held, incoming, [], *lists), test_utils="test_schema")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", ["pinned_gather", "pinned_gather.planned"])
def test_opcheck_finds_nothing_in_the_gradient(place: Place, name: str, dtype: torch.dtype) -> None:
    op, (_, index, *plan) = arguments_at(place, name)
    table = place.table(random_rows(ROWS, (COLUMNS,)).nan_to_num()).requires_grad_()
    opcheck(op, (table, index.to(dtype), *plan), test_utils=UNTRACED)
    speedtorch.synchronize()

"""Exchanges that do not fit: a ValueError that names the field, the value and what is allowed."""

from __future__ import annotations

import pytest
import torch
from conftest import NEEDS_GPU, Place
from reference import assert_same_storage, random_rows
from test_argument_errors import IDS, refused
from torch import Tensor

import speedtorch

pytestmark = pytest.mark.dealt("place", "gpu_place")


def swap_faults(place: Place) -> dict[str, tuple[dict[str, object], str]]:
    """Arguments of a swap of two fields to replace, and what the message must say."""

    def rows(count: int, columns: int) -> Tensor:
        return place.work(random_rows(count, (columns,)))

    wide, narrow = place.table(random_rows(8, (6,))), place.table(random_rows(8, (2,)))
    both = [rows(3, 6), rows(3, 2)]
    buffer = rows(6, 6)
    faults: dict[str, tuple[dict[str, object], str]] = {
        "no_fields": ({"host": [], "leaving": [], "arriving": []}, r"host .*at least one"),
        "other_rows": ({"host": [wide, narrow[:7]]}, r"host\[1\] has 7 rows, host\[0\] has 8"),
        "one_buffer": (
            {"leaving": [buffer[:3], both[1]], "arriving": [buffer[2:5], rows(3, 2)]},
            r"arriving\[0\] and leaving\[0\] overlap",
        ),
        "one_result_twice": (
            {"host": [narrow, wide[:, :2]], "leaving": both[1:] * 2, "arriving": both[1:] * 2},
            r"overlap",
        ),
        "columns_in_common": (
            {
                "host": [wide[:, :2], wide[:, 1:3]],
                "leaving": [rows(3, 2), rows(3, 2)],
                "arriving": [rows(3, 2), rows(3, 2)],
            },
            r"host\[0\] and host\[1\] overlap",
        ),
    }
    for side, counts in (("leaving", "2, 1 and 2"), ("arriving", "2, 2 and 1")):
        for fault, given, message in (
            ("fewer", both[:1], f"same length, got {counts}"),
            ("few", [both[0], rows(2, 2)], rf"{side}\[1\] has 2 rows.* 3 "),
            ("wide", [both[0], rows(3, 3)], rf"{side}\[1\] has shape \[3, 3\], expected \[3, 2\]"),
            ("integers", [both[0], rows(3, 2).int()], rf"{side}\[1\] has dtype Int, .* Float"),
            ("doubles", [both[0].double(), both[1]], rf"{side}\[0\] has dtype Double, .* Float"),
            ("strided", [both[0], rows(3, 4)[:, :2]], rf"{side}\[1\] must be contiguous"),
            ("first strided", [rows(3, 12)[:, :6], both[1]], rf"{side}\[0\] must be contiguous"),
        ):
            faults[f"{side} {fault}"] = {side: given}, message
    return faults


@pytest.mark.parametrize("fault", swap_faults(Place("cpu", "plain")))
def test_exchanges_that_do_not_fit(place: Place, fault: str) -> None:
    host = [place.table(random_rows(8, (columns,), seed=columns)) for columns in (6, 2)]
    arguments: dict[str, object] = {
        "host": host,
        "leaving": [place.work(random_rows(3, (columns,), seed=1)) for columns in (6, 2)],
        "evict": place.ids(IDS),
        "arriving": [place.work(random_rows(3, (columns,), seed=2)) for columns in (6, 2)],
        "load": place.ids([7, 3, 1]),
    }
    replaced, message = swap_faults(place)[fault]
    arguments |= replaced
    refused(
        lambda: speedtorch.optimizer_state_swap(**arguments),  # type: ignore[arg-type]
        f"optimizer_state_swap: .*{message}",
    )
    for rows, columns in zip(host, (6, 2), strict=True):
        assert_same_storage(rows, random_rows(8, (columns,), seed=columns))


@NEEDS_GPU
def test_fields_on_the_gpu_and_in_pageable_memory_do_not_mix() -> None:
    host = [torch.zeros(8, 2, device="cuda"), torch.zeros(8, 2)]
    rows, ids = [torch.ones(1, 2, device="cuda") for _ in host], torch.tensor([3], device="cuda")
    arriving = [torch.zeros_like(tensor) for tensor in rows]
    with pytest.raises(ValueError, match="some host fields are on the GPU and others in pageable"):
        speedtorch.optimizer_state_swap(host, rows, ids, arriving, ids)
    assert not any(tensor.any() for tensor in host)

"""Arguments that do not fit: a ValueError that says what, which value and what is allowed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import NEEDS_GPU, Place
from reference import assert_same_storage, random_rows
from torch import Tensor

import speedtorch

pytestmark = pytest.mark.dealt("place", "gpu_place")

IDS = [3, 0, 5]


def table_faults(values: Tensor) -> dict[str, tuple[Tensor, str]]:
    """Tables `[8, 6]` that no op takes, and what the message must say."""
    return {
        "scalar": (values[0, 0], r"at least one dimension"),
        "columns_apart": (values[:, ::2], r"contiguous, but .*stride 2, expected 1"),
        "transposed": (values.t()[:, :6], r"contiguous, but .*stride 6, expected 1"),
        "columns_repeated": (values[:, :1].expand(8, 6), r"contiguous, but .*stride 0"),
        "inner_gap": (values.reshape(8, 2, 3)[:, :, :2], r"contiguous, but .*stride 3, expected 2"),
        "sparse": (values.to_sparse(), r"dense|strided"),
    }


TABLE_FAULTS = table_faults(torch.zeros(8, 6))
INDEX_DTYPES = [torch.float32, torch.bool, torch.uint8, torch.int16, torch.complex64]


def refused(call: Callable[[], object], message: str) -> None:
    """The call raises ValueError with that message, before anything moves."""
    with pytest.raises(ValueError, match=message):
        call()
    speedtorch.synchronize()


@pytest.mark.parametrize("fault", TABLE_FAULTS)
def test_tables_that_are_no_rows(fault: str) -> None:
    table, message = table_faults(torch.rand(8, 6))[fault]
    index = torch.tensor(IDS)
    src = torch.zeros(3, *table.shape[1:])
    refused(lambda: speedtorch.pinned_gather(table, index), f"pinned_gather: .*table.*{message}")
    refused(
        lambda: speedtorch.pinned_scatter(table, index, src), f"pinned_scatter: .*table.*{message}"
    )
    refused(
        lambda: speedtorch.optimizer_state_swap([table], [src], index, [src.clone()], index),
        rf"optimizer_state_swap: .*host.*{message}",
    )


def test_more_ids_than_one_call_supports() -> None:
    table, index = random_rows(8, (6,)), torch.tensor(3).expand(2**31)  # of one number
    message = "index has 2147483648 ids, at most 2147483647 are allowed in one call"
    refused(lambda: speedtorch.pinned_gather(table, index), f"pinned_gather: {message}")
    refused(lambda: speedtorch.plan_rows(index, 8), f"plan_rows: {message}")


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=str)
def test_ids_of_another_dtype(place: Place, dtype: torch.dtype) -> None:
    table, index = place.table(random_rows(8, (6,))), place.ids(IDS)
    src, wrong = place.work(random_rows(3, (6,))), place.ids(IDS).to(dtype)
    message = "must be int32 or int64, got "
    refused(lambda: speedtorch.pinned_gather(table, wrong), f"pinned_gather: index {message}")
    refused(
        lambda: speedtorch.pinned_scatter(table, wrong, src), f"pinned_scatter: index {message}"
    )
    for name, evict, load in (("evict", wrong, index), ("load", index, wrong)):
        refused(
            lambda evict=evict, load=load: speedtorch.optimizer_state_swap(  # type: ignore[misc]
                [table], [src], evict, [src.clone()], load
            ),
            f"optimizer_state_swap: {name} {message}",
        )


# pinned_gather

OUT_FAULTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "too_few": (lambda out: out[:2], r"out has shape \[2, 6\], expected \[3, 6\]"),
    "flat": (lambda out: out.reshape(-1), r"out has shape \[18\], expected \[3, 6\]"),
    "wide": (lambda out: out.repeat(1, 2), r"out has shape \[3, 12\], expected \[3, 6\]"),
    "dtype": (lambda out: out.double(), r"out has dtype Double, expected Float"),
    "columns_apart": (lambda out: out.repeat(1, 2)[:, ::2], r"out .*contiguous"),
    "repeated": (lambda out: out[:1].expand(3, 6), r"out .*(contiguous|overlap)"),
}


@pytest.mark.parametrize("fault", OUT_FAULTS)
def test_a_result_that_does_not_fit(place: Place, fault: str) -> None:
    table, index = place.table(random_rows(8, (6,))), place.ids(IDS)
    spoil, message = OUT_FAULTS[fault]
    out = spoil(torch.full((3, 6), -1.0, device=place.device))
    plan = speedtorch.plan_rows(index, 8)
    refused(lambda: speedtorch.pinned_gather(table, index, out=out), f"pinned_gather: {message}")
    refused(
        lambda: speedtorch.pinned_gather(table, index, out=out, plan=plan),
        f"pinned_gather: {message}",
    )
    assert out.eq(-1).all()


@pytest.mark.parametrize(
    ("op", "names"), [("pinned_gather", "out and table"), ("pinned_scatter", "table and src")]
)
def test_rows_inside_the_table(device: str, op: str, names: str) -> None:
    values = random_rows(8, (6,))
    table, index = Place(device, device).work(values), torch.tensor(IDS, device=device)
    given = {"out" if op == "pinned_gather" else "src": table[2:5]}
    refused(lambda: getattr(speedtorch, op)(table, index, **given), f"{op}: {names} overlap")
    assert_same_storage(table, values)


# pinned_scatter

SRC_FAULTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "too_few": (lambda src: src[:2], r"src has shape \[2, 6\], expected \[3, 6\]"),
    "one_row": (lambda src: src[0], r"src has shape \[6\], expected \[3, 6\]"),
    "wide": (lambda src: src.repeat(1, 2), r"src has shape \[3, 12\], expected \[3, 6\]"),
    "dtype": (lambda src: src.half(), r"src has dtype Half, expected Float"),
}


@pytest.mark.parametrize("accumulate", [False, True], ids=["write", "add"])
@pytest.mark.parametrize("fault", SRC_FAULTS)
def test_rows_to_write_that_do_not_fit(place: Place, fault: str, accumulate: bool) -> None:
    values = random_rows(8, (6,))
    table, index = place.table(values), place.ids(IDS)
    spoil, message = SRC_FAULTS[fault]
    src = spoil(place.work(torch.zeros(3, 6)))
    plan = speedtorch.plan_rows(index, 8)
    for plans in (None, plan):
        refused(
            lambda plans=plans: speedtorch.pinned_scatter(  # type: ignore[misc]
                table, index, src, accumulate=accumulate, plan=plans
            ),
            f"pinned_scatter: {message}",
        )
    assert_same_storage(table, values)


def test_a_table_whose_rows_are_one_is_not_written() -> None:
    table = torch.zeros(1, 6).expand(8, 6)
    refused(
        lambda: speedtorch.pinned_scatter(table, torch.tensor(IDS), torch.ones(3, 6)),
        "pinned_scatter: the rows of table overlap",
    )
    assert not table.any()


# Devices


@NEEDS_GPU
def test_a_table_on_the_gpu_needs_a_result_there() -> None:
    index, there = torch.tensor(IDS), torch.zeros(8, 6, device="cuda")
    refused(
        lambda: speedtorch.pinned_gather(there, index),
        r"pinned_gather: table is on cuda:0 but index is on cpu",
    )
    refused(
        lambda: speedtorch.pinned_gather(there, index, out=torch.zeros(3, 6)),
        r"pinned_gather: table is on cuda:0 but .* is on cpu",
    )
    refused(
        lambda: speedtorch.pinned_scatter(there, index, torch.zeros(3, 6)),
        r"pinned_scatter: table is on cuda:0 but src is on cpu",
    )


def test_ids_on_the_gpu_need_their_rows_there(gpu_place: Place) -> None:
    table, index = gpu_place.table(random_rows(8, (6,))), gpu_place.ids(IDS)
    rows = torch.zeros(3, 6)
    refused(lambda: speedtorch.pinned_gather(table, index, out=rows), r"cuda:0.* is on cpu")
    refused(lambda: speedtorch.pinned_scatter(table, index, rows), r"cuda:0.* is on cpu")
    refused(
        lambda: speedtorch.optimizer_state_swap([table], [rows], index, [rows.clone()], index),
        r"cuda:0.* is on cpu",
    )
    refused(
        lambda: speedtorch.optimizer_state_swap([table], [rows.cuda()], index, [rows], index),
        r"cuda:0.* is on cpu|cpu.* is on cuda:0",
    )


def test_a_plan_on_the_cpu_serves_the_cpu_alone(gpu_place: Place) -> None:
    table, index = gpu_place.table(random_rows(8, (6,))), gpu_place.ids(IDS)
    plan = speedtorch.plan_rows(index.cpu(), 8)
    refused(
        lambda: speedtorch.pinned_gather(table, index, plan=plan),
        r"pinned_gather: .*plan.* is on cpu but .* is on cuda:0",
    )


@pytest.mark.parametrize("ids", [[1], 1, None], ids=str)
def test_ids_that_are_no_tensor_are_refused_with_the_remedy(ids: object) -> None:
    table = torch.zeros(3, 2)
    calls: list[Callable[[], object]] = [
        lambda: speedtorch.pinned_gather(table, ids),  # type: ignore[arg-type]
        lambda: speedtorch.pinned_scatter(table, ids, table),  # type: ignore[arg-type]
        lambda: speedtorch.plan_rows(ids, 3),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(TypeError, match="index: expected an int32 or int64 tensor.*as_tensor"):
            call()


def test_a_graph_that_was_not_watched_is_refused() -> None:
    with pytest.raises(ValueError, match="watch_graph: on must be on a GPU, got cpu"):
        torch.ops.speedtorch.watch_graph(torch.zeros(1))
    with pytest.raises(ValueError, match="graph_is_alive: no watched graph has number -1"):
        torch.ops.speedtorch.graph_is_alive(-1)


def test_meta_tensors_do_not_mix_with_real_ones() -> None:
    table, index = torch.zeros(3, 2), torch.tensor([0])
    rows = torch.zeros(1, 2)
    plan = [tensor.to("meta") for tensor in speedtorch.plan_rows(index, 3)]
    for call in (
        lambda: speedtorch.pinned_gather(table.to("meta"), index),
        lambda: speedtorch.pinned_gather(table, index, out=rows.to("meta")),
        lambda: speedtorch.pinned_gather(table, index, plan=plan),
        lambda: speedtorch.sum_rows(rows, plan, 3, distinct=1),
        lambda: speedtorch.pinned_scatter(table.to("meta"), index, rows),
        lambda: speedtorch.optimizer_state_swap([table.to("meta")], [rows], index, [rows], index),
    ):
        with pytest.raises(ValueError, match="one op cannot take both meta"):
            call()

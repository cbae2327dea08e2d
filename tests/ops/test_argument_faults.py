"""Memory that is gone, plans that are none, numbers that name nothing: told, and nothing moves."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import NEEDS_GPU
from cuda_calls import PretendedDriver
from op_arguments import COUNT, ROWS, numbers, op_arguments, ops, tensors_of, with_tensors
from reference import assert_same_bytes
from test_argument_errors import at_an_odd_address, refused
from test_argument_overlaps import NAMES, assert_same
from torch import Tensor

import speedtorch
from speedtorch.ops import functions

# Memory


def apart(name: str) -> tuple[Any, tuple[Any, ...], list[Tensor]]:
    """An op, its other arguments, and its tensors in memory of their own."""
    op, arguments = op_arguments("cpu")[name]
    return op, arguments, [tensor.clone() for tensor in tensors_of(arguments)]


@pytest.mark.parametrize("left", [0, 8], ids=["freed", "shrunk"])
@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_whose_memory_is_gone_is_refused(name: str, left: int) -> None:
    for place in range(len(apart(name)[2])):
        op, arguments, tensors = apart(name)
        if tensors[place].nbytes <= left:
            continue  # a count
        before = [tensor.clone() for tensor in tensors]
        tensors[place].untyped_storage().resize_(left)
        with pytest.raises(ValueError, match=f"bytes of storage, but its storage has {left},"):
            op(*with_tensors(arguments, tensors))
        assert_same(tensors[:place] + tensors[place + 1 :], before[:place] + before[place + 1 :])


def in_a_fork(child: Callable[[], None]) -> int:
    """The status with which a forked child ends that makes this call, within a minute."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)  # the child of a process that ends for this wait would keep its pipes
        try:
            child()
        except BaseException as error:
            print(error, file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_forked_child_may_pass_no_managed_memory_to_any_op(
    driver: PretendedDriver, name: str
) -> None:
    op, arguments, tensors = apart(name)
    calls = []
    for place, tensor in enumerate(tensors):
        managed = speedtorch.empty(tensor.shape, dtype=tensor.dtype, memory="managed")
        managed.copy_(tensor)
        calls.append(with_tensors(arguments, [*tensors[:place], managed, *tensors[place + 1 :]]))

    def child() -> None:
        torch.set_num_threads(1)
        for call in calls:
            with pytest.raises(RuntimeError, match="managed memory of process .* forked child"):
                op(*call)

    assert in_a_fork(child) == 0


def test_what_is_resized_while_it_is_pinned_is_unpinned(driver: PretendedDriver) -> None:
    tensor = torch.zeros(1000, 4)
    speedtorch.pin_memory_(tensor)
    (address,) = driver.registered
    tensor.resize_(100_000, 4)
    assert speedtorch.memory_kind(tensor) == "plain"
    speedtorch.unpin_memory_(tensor)
    assert not driver.registered
    assert driver.named("host_unregister") == [("host_unregister", address)]
    speedtorch.pin_memory_(tensor)
    assert speedtorch.memory_kind(tensor) == "registered"
    del tensor
    assert not driver.registered


def test_memory_that_a_pinned_tensor_left_is_known_as_plain(driver: PretendedDriver) -> None:
    reused = False
    for rows in range(1000, 1050):  # until the allocator returns the same address again
        tensor = torch.zeros(rows, 4)
        speedtorch.pin_memory_(tensor)
        (address,) = driver.registered
        tensor.untyped_storage().resize_(0)
        tables = [torch.zeros(rows, 4) for _ in range(50)]
        reused = address in (table.data_ptr() for table in tables)
        assert {speedtorch.memory_kind(table) for table in tables} == {"plain"}
        assert not (reused and driver.registered)
        speedtorch.unpin_memory_(tensor)
        if reused:
            break
    assert reused


# What is written

BAD_IDS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "scatter": lambda table, rows: speedtorch.pinned_scatter(table, torch.tensor([ROWS]), rows),
    "gather": lambda table, rows: speedtorch.pinned_gather(table, torch.tensor([ROWS]), out=rows),
    "swap": lambda table, rows: speedtorch.optimizer_state_swap(
        [table], [rows.clone()], torch.tensor([0]), [rows], torch.tensor([-1])
    ),
}


@pytest.mark.parametrize("call", BAD_IDS)
def test_a_refused_write_lets_a_backward_pass_use_the_old_values(call: str) -> None:
    table, rows = torch.rand(ROWS, 3), torch.rand(1, 3)
    factors = torch.ones(3, requires_grad=True)
    loss = (table * factors).sum() + (rows * factors).sum()
    with pytest.raises(IndexError, match="no row was moved"):
        BAD_IDS[call](table, rows)
    loss.backward()


@pytest.mark.parametrize("kind", ["conjugated", "negated"])
def test_a_view_that_conjugates_or_negates_is_not_written_to(kind: str) -> None:
    ones = torch.ones(ROWS, 2, dtype=torch.complex64)
    view = ones.conj() if kind == "conjugated" else ones.conj().imag
    index, rows, gone = torch.tensor([1, 2]), torch.zeros(2, 2, dtype=view.dtype), view[:2]
    table = torch.zeros(ROWS, 2, dtype=view.dtype)
    calls: list[Callable[[], object]] = [
        lambda: speedtorch.pinned_scatter(view, index, rows),
        lambda: speedtorch.pinned_gather(table, index, out=gone),
        lambda: speedtorch.pinned_copy(gone, rows),
        lambda: speedtorch.optimizer_state_swap([view], [rows], index, [rows.clone()], index),
        lambda: speedtorch.optimizer_state_swap([table], [rows], index, [gone], index),
        lambda: torch.ops.speedtorch.pinned_scatter(view, index, rows),
        lambda: torch.ops.speedtorch.pinned_gather.out(table, index, gone),
        lambda: torch.ops.speedtorch.pinned_copy(gone, rows),
        lambda: torch.ops.speedtorch.optimizer_state_swap([view], [rows], index, [gone], index),
    ]
    for call in calls:
        refused(call, "conjugated or negated view.*resolve_conj")
    assert torch.equal(ones, torch.ones_like(ones))


# Kinds


@pytest.mark.parametrize("given", [np.zeros((ROWS, 3), np.float32), None, 3])
def test_what_is_no_tensor_is_no_table_and_no_rows(given: Any) -> None:
    table, index, rows = torch.zeros(ROWS, 3), torch.tensor([1]), torch.zeros(1, 3)
    calls: dict[str, list[Callable[[], object]]] = {
        "table": [
            lambda: speedtorch.pinned_scatter(given, index, rows),
            lambda: speedtorch.pinned_gather(given, index),
        ],
        "src": [lambda: speedtorch.pinned_scatter(table, index, given)],
        "dst": [lambda: speedtorch.pinned_copy(given, rows)],
        "out": [lambda: speedtorch.pinned_gather(table, index, out=given)],
        "host": [lambda: speedtorch.optimizer_state_swap([given], [rows], index, [rows], index)],
    }
    if given is None:
        del calls["out"]  # which may be None
    for name, both in calls.items():
        for call in both:
            expected = f"'.*Tensor.*' for argument '{name}'|: {name} must be a tensor, got None"
            with pytest.raises((RuntimeError, ValueError), match=expected):
                call()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Tensor.to_sparse, r"must be a dense \(strided\) tensor; call .to_dense"),
        (lambda tensor: tensor.to("meta"), "one op cannot take both meta|is part of a step"),
    ],
    ids=["sparse", "meta"],
)
@pytest.mark.parametrize("name", NAMES)
def test_sparse_and_meta_tensors_are_refused_as_any_argument(
    name: str, kind: Callable[[Tensor], Tensor], message: str
) -> None:
    for place in range(len(apart(name)[2])):
        op, arguments, tensors = apart(name)
        tensors[place] = kind(tensors[place])
        if len(tensors) > 1 or tensors[place].is_sparse:
            with pytest.raises((ValueError, NotImplementedError), match=message):
                op(*with_tensors(arguments, tensors))


@pytest.mark.filterwarnings("ignore:.*quantized")
def test_quantized_tensors_are_refused() -> None:
    table, index = torch.zeros(ROWS, 3), torch.tensor([1, 2])
    quantized = torch.quantize_per_tensor(table, 0.1, 0, torch.qint8)
    for call in (
        lambda: speedtorch.pinned_gather(quantized, index),
        lambda: speedtorch.pinned_gather(table, quantized),
        lambda: speedtorch.pinned_scatter(quantized, index, table[:2]),
        lambda: speedtorch.pinned_copy(quantized, quantized),
    ):
        refused(call, r"(table|index|dst) has an unsupported dtype .*int_repr")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32])
def test_rows_are_added_at_any_address(dtype: torch.dtype) -> None:
    table, rows = (torch.rand(count, 5).mul(100).to(dtype) for count in (ROWS, 3))
    index = torch.tensor([4, 0, 4])
    odd = at_an_odd_address(table)
    speedtorch.pinned_scatter(table, index, rows, accumulate=True)
    speedtorch.pinned_scatter(
        odd, at_an_odd_address(index), at_an_odd_address(rows), accumulate=True
    )
    assert_same_bytes(odd, table)
    assert_same_bytes(speedtorch.pinned_gather(odd, at_an_odd_address(index)), table[index])


# Plans and numbers


def planned_swap(plan: list[Tensor], index: Tensor) -> list[Tensor]:
    """Swaps with this plan for both lists; the table and what arrives."""
    table, rows = numbers(ROWS, 3, seed=1), numbers(COUNT, 3, seed=2)
    arriving = torch.zeros_like(rows)
    before = table.clone()
    try:
        ops.optimizer_state_swap.planned(
            [table], [rows], index, plan, [arriving], index.clone(), list(plan)
        )
    except (ValueError, IndexError):
        assert torch.equal(table, before)
        assert not arriving.any()
        raise
    return [table, arriving]


def plans_with(number: int, index: Tensor) -> Iterator[list[Tensor]]:
    """Plans of these ids, each with the number in the place of another one."""
    for part, entries in enumerate(speedtorch.plan_rows(index, ROWS)):
        for place in range(len(entries)):
            plan = speedtorch.plan_rows(index, ROWS)
            plan[part][place] = number
            yield plan


@pytest.mark.parametrize("number", [-1, -(2**62), 1, 2, 3, 4, 5, 10, ROWS, 2**31, 2**62])
def test_a_plan_with_any_other_number_in_it_moves_no_row(number: int) -> None:
    index = torch.tensor([7, 2, 9, 0])
    right = planned_swap(speedtorch.plan_rows(index, ROWS), index)
    for plan in plans_with(number, index):
        try:
            result = planned_swap(plan, index)
        except (ValueError, IndexError) as error:
            assert "plan" in str(error) or "twice" in str(error)
        else:
            assert_same(result, right)


@pytest.mark.parametrize("number", [-1, -(2**62), 0, 1, 2, 3, 4, 2**31, 2**62])
def test_sums_over_a_plan_with_any_other_number_read_only_within_the_rows(number: int) -> None:
    for plan in plans_with(number, torch.tensor([7, 2, 7, 0])):
        try:
            ops.sum_rows(torch.ones(4, 2), plan, ROWS, 0, 3)
        except (ValueError, IndexError) as error:
            assert "plan" in str(error)


def test_a_plan_of_another_batch_moves_no_row() -> None:
    plan = speedtorch.plan_rows(torch.tensor([1, 2, 3, 4]), ROWS)
    with pytest.raises(
        ValueError, match=r"plan of evict was made for other ids: .*plan_rows\(evict"
    ):
        planned_swap(plan, torch.tensor([1, 2, 3, 5]))


@pytest.mark.parametrize("missing", ["evict", "load"])
def test_bad_ids_are_blamed_on_the_swap_that_had_to_plan_them(missing: str) -> None:
    ids = {"evict": torch.tensor([1]), "load": torch.tensor([2])}
    given = {
        f"{name}_plan": speedtorch.plan_rows(ids[name], ROWS) for name in ids if name != missing
    }
    ids[missing][0] = ROWS
    table, rows = torch.zeros(ROWS, 2), torch.ones(1, 2)
    with pytest.raises(
        IndexError, match=f"optimizer_state_swap: id {ROWS} at position 0 of {missing}"
    ):
        speedtorch.optimizer_state_swap([table], [rows], arriving=[rows.clone()], **ids, **given)
    assert not table.any()


def test_memory_that_ran_out_on_the_gpu_is_torchs_own_error() -> None:
    def failing(message: str) -> Callable[..., Any]:
        def op(*_: object) -> None:
            raise RuntimeError(message)

        return functions._checked(op)

    with pytest.raises(torch.OutOfMemoryError, match="plan_rows: out of memory"):
        failing("plan_rows: out of memory: torch failed at allocating a tensor")(1)
    with pytest.raises(RuntimeError, match="illegal memory access") as caught:
        failing("pinned_copy failed: an illegal memory access (CUDA error 700)")()
    assert caught.type is RuntimeError


def test_the_package_calls_an_op_in_one_way() -> None:
    package = Path(speedtorch.__file__).parent
    calling = {
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        if re.search(r"torch\.ops\.speedtorch\w*\.\w+\(", file.read_text())
    }
    assert calling == set()


# On a GPU


@NEEDS_GPU
def test_sums_over_an_invalid_plan_are_zeros_and_reported() -> None:
    rows = torch.ones(3, 40, device="cuda")
    good = torch.tensor([1, 3, 1], device="cuda")
    for ids, table_rows, distinct, message in (
        (torch.tensor([1, ROWS, 1], device="cuda"), ROWS, 2, f"id {ROWS} at position 1 of index"),
        (good, ROWS + 1, 2, f"made for a table of {ROWS} rows"),
        (good, ROWS, 3, "distinct is 3, but the plan of index has 2"),
        (good, ROWS, 1, "distinct is 1, but the plan of index has 2"),
    ):
        summed = ops.sum_rows(rows, speedtorch.plan_rows(ids, ROWS), table_rows, 0, distinct)
        with pytest.raises((ValueError, IndexError), match=f"sum_rows: .*{message}"):
            speedtorch.synchronize()
        assert summed.shape == (distinct, 40)
        assert not summed.any()


@NEEDS_GPU
def test_a_bad_id_of_a_pageable_table_is_reported_once() -> None:
    table, rows = torch.zeros(ROWS, 2), torch.ones(3, 2, device="cuda")
    arriving, ids = torch.zeros(3, 2, device="cuda"), torch.tensor([1, ROWS], device="cuda")
    places = torch.tensor([0, 2], device="cuda")
    with pytest.raises(IndexError, match=f"id {ROWS} at position 1 of evict"):
        ops.optimizer_state_swap.placed(
            [table], [rows], ids, places, [arriving], ids[:1], places[:1]
        )
    speedtorch.synchronize()
    assert not table.any()
    assert not arriving.any()


@NEEDS_GPU
def test_rows_are_added_at_any_address_by_a_gpu() -> None:
    memory = speedtorch.empty(ROWS * 20 + 1, dtype=torch.uint8, memory="registered")
    odd = torch.frombuffer(memory.numpy(), dtype=torch.float32, offset=1).view(ROWS, 5)
    table, rows, index = torch.rand(ROWS, 5), torch.rand(3, 5), torch.tensor([4, 0, 4])
    odd.copy_(table)
    speedtorch.pinned_scatter(table, index, rows, accumulate=True)
    speedtorch.pinned_scatter(odd, index.cuda(), rows.cuda(), accumulate=True)
    speedtorch.synchronize()
    assert_same_bytes(odd, table)

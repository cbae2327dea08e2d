"""Every op of the library with arguments of which any two may share memory.

All tensors hold int64 numbers that are rows of the table, so that whatever comes to lie in the
place of ids is an id.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import speedtorch
from speedtorch.ops import functions

ops = torch.ops.speedtorch
ROWS, COLUMNS, COUNT = 11, 3, 4


def numbers(*shape: int, seed: int) -> Tensor:
    """int64 numbers in `[0, ROWS)`."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(ROWS, shape, generator=random)


def op_arguments(
    device: str, hosted: Callable[[Tensor], Tensor] = lambda rows: rows
) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Every overload that takes tensors, with arguments that fit it.

    Args:
        device: where all of them are.
        hosted: moves the tables, which may be in host memory.
    """

    def rows(count: int, seed: int) -> Tensor:
        return numbers(count, COLUMNS, seed=seed).to(device)

    def ids(*values: int) -> Tensor:
        return torch.tensor(values, device=device)

    table, other = hosted(rows(ROWS, 1)), hosted(numbers(ROWS, 2, seed=2).to(device))
    host = [table, other]
    second = [hosted(rows(2, 10)), hosted(rows(2, 11)[:, :2].contiguous())]
    index, up, load = ids(7, 2, 7, 0), ids(2, 3, 7, 9), ids(0, 3, 9)
    plan, up_plan, load_plan = (speedtorch.plan_rows(each, ROWS) for each in (index, up, load))
    block = rows(COUNT, 3)
    leaving = [rows(COUNT, 4), numbers(COUNT, 2, seed=5).to(device)]
    arriving = [rows(COUNT, 6), numbers(COUNT, 2, seed=7).to(device)]
    places, load_places = ids(3, 0, 2, 1), ids(2, 0, 3)
    moved = (leaving, up, places, arriving, load, load_places)
    # append_batch is of the CPU alone; it makes the hash table of ids 2, 3, 7 and 9.
    on_cpu, joined = (
        [numbers(count, COLUMNS, seed=16), numbers(count, 2, seed=17)] for count in (ROWS, 4)
    )
    four, none = torch.tensor([2, 3, 7, 9]), torch.empty(0, dtype=torch.int64)
    ids_of, table_of, *joined = ops.append_batch.default(
        *([], [], None, None, joined, four, none, 4, [none], ROWS, -1)
    )[9:-1]
    for each in (ids_of, *joined):
        each[4:] = 0
    appended = (joined, ids_of, table_of, 4, [torch.tensor([0, 3, 9])], ROWS, -1)
    gather, scatter, swap = ops.pinned_gather, ops.pinned_scatter, ops.optimizer_state_swap
    sums, apart = block.double(), ids(0, 5, 5, ROWS - 5).view(2, 2)
    held, held_ids = [rows(COUNT, 8), rows(COUNT, 9)[:, :2].contiguous()], ids(1, 2, 6, 8)
    changes = (ids(0, 2, 1, 3), places, ids(5, 6, 7, 8), ids(1, 2, 0, 3), ids(3, 2, 1, 2), up)
    slots = torch.tensor([[0, 1]] + [[-1, 0]] * (ROWS - 1), dtype=torch.int32, device=device)
    word, held_status = (torch.zeros(8, dtype=torch.int64, device=device) for _ in range(2))
    return {
        "append_batch": (
            ops.append_batch.default,
            (on_cpu, [each.cpu() for each in leaving], up.cpu(), places.cpu(), *appended),
        ),
        "plan_rows": (ops.plan_rows.default, (index, ROWS)),
        "pinned_gather": (gather.default, (table, index)),
        "pinned_gather_detached": (ops.pinned_gather_detached.default, (table, index)),
        "pinned_gather.out": (gather.out, (table, index, block)),
        "pinned_gather.planned": (gather.planned, (table, index, plan)),
        "pinned_gather.planned_out": (gather.planned_out, (table, index, plan, block)),
        "pinned_scatter": (scatter.default, (table, index, block)),
        "pinned_scatter, adding": (scatter.default, (table, index, block, True)),
        "pinned_scatter.planned": (scatter.planned, (table, index, block, plan)),
        "pinned_scatter.planned, adding": (scatter.planned, (table, index, block, plan, True)),
        "optimizer_state_swap": (swap.default, (host, leaving, up, arriving, load)),
        "optimizer_state_swap.planned": (
            swap.planned,
            (host, leaving, up, up_plan, arriving, load, load_plan),
        ),
        "optimizer_state_swap.placed": (swap.placed, (host, *moved)),
        "exchange_rows": (ops.exchange_rows.default, (host, *moved)),
        "exchange_rows, of tables": (ops.exchange_rows.default, ([*host, *second], *moved, 2)),
        "exchange_rows, counted": (ops.exchange_rows.default, (host, *moved, 1, ids(3), ids(2))),
        "exchange_rows, at host rows": (
            ops.exchange_rows.default,
            (host, *moved, 1, None, None, ids(4, 0, 10, 5), ids(1, 4, 5)),
        ),
        "exchange_cached": (
            ops.exchange_cached.default,
            (host, [rows(5, 12), rows(5, 13)[:, :2].contiguous()], slots, *moved),
        ),
        "pinned_copy": (ops.pinned_copy.default, (hosted(rows(COUNT, 1)), block)),
        "sum_rows": (ops.sum_rows.default, (sums, plan, ROWS, 0, 3)),
        "sum_rows, of bags": (ops.sum_rows.default, (sums, plan, ROWS, 0, 3, ids(1, 1, 0, 3))),
        "sum_rows, counted": (ops.sum_rows.default, (sums, plan, ROWS, 0, 5, None, ids(3))),
        "table_ids": (
            ops.table_ids.default,
            (index, ids(0, 1, 1, 3, 4), ids(0, 9, 9, 3).view(2, 2), 2),
        ),
        "pool_rows": (ops.pool_rows.default, (sums, places, ids(0, 1, 1, 3, 4), 2, False)),
        "plan_batch": (ops.plan_batch.default, (index, ROWS, 2, -1)),
        "plan_batch, after others": (
            ops.plan_batch.default,
            (index, ROWS, -1, -1, load, load_plan[4]),
        ),
        "plan_parts": (ops.plan_parts.default, ([index, up.int()], ROWS, 2, -1)),
        "plan_parts, after others": (
            ops.plan_parts.default,
            ([index, load.view(1, -1)], ROWS, -1, -1, up, up_plan[4]),
        ),
        "load_rows": (ops.load_rows.default, (host, leaving, up, load)),
        "load_batch": (ops.load_batch.default, (host, leaving, up, [index], ROWS, 2)),
        "join_batch": (
            ops.join_batch.default,
            (host, leaving, up, places, held, held_ids, [index], ROWS, -1),
        ),
        "count_batch": (ops.count_batch.default, ([index], up, ROWS, 2)),
        "merge_rows": (ops.merge_rows.default, ([block, rows(COUNT, 1)], up, ids(0, 5))),
        "diff_ids": (
            ops.diff_ids.default,
            (load, load_plan[4], up, up_plan[4], ROWS, ids(0, 0), word),
        ),
        "spoil_plan": (ops.spoil_plan.default, (plan[4], 2, ids(4))),
        "shard_ids": (ops.shard_ids.default, (index, ids(0, 4, 0), ROWS, 4, 8, 2, -1)),
        "shard_ids, in blocks": (ops.shard_ids.default, (index, ids(0, 4, 0), ROWS, 4, 8, 2, 3)),
        "requested_ids": (
            ops.requested_ids.default,
            (ids(3, -1, 0, 2, 5, 1).view(2, 3), 7, ids(1)),
        ),
        "hold_rows": (
            ops.hold_rows.default,
            (held, arriving, leaving, *changes, held_ids, held_status, ids(1, 2, 3, 4), ids(0)),
        ),
        "split_plan": (
            ops.split_plan.default,
            (speedtorch.plan_rows(ids(2, 0, 2, 7), ROWS), ids(0, 3, 4), apart, ROWS),
        ),
        "clear_rows": (ops.clear_rows.default, ([block, rows(ROWS, 1)], ids(2))),
        "round_rows": (
            ops.round_rows.default,
            ([rows(COUNT, 14), rows(COUNT, 15)], up, ids(7, 2), [0, 0], True),
        ),
    }


# Ops that take a tensor and no second one, nor write to it: see test_every_op_is_listed.
ONE_TENSOR = {
    *("plan_fault", "explain_move", "set_costs", "host_register", "memory_kind"),
    *("let_captured_go", "check_owner", "watch_graph", "registration_seams", "use_on"),
    *("numbers_to_host", "chunk_digests", "resident_open", "resident_slots", "resident_write"),
    *("resident_read_ahead", "resident_begin_find"),
}

# Those of ops that no graph holds.
NOT_IN_GRAPHS = {
    name for name in op_arguments("cpu") if name.partition(",")[0] in functions._OF_STEPS
}

# Of ops with results of which some entries are left as they come: those that are all written.
WRITTEN = {
    **{f"plan_{of}, after others": slice(5) for of in ("batch", "parts")},
    "diff_ids": slice(6, 7),
    "merge_rows": slice(3),
}


def tensors_of(arguments: tuple[Any, ...]) -> list[Tensor]:
    """The tensors among arguments, those of lists too."""
    parts = (part if isinstance(part, list) else [part] for part in arguments)
    return [each for part in parts for each in part if isinstance(each, Tensor)]


def with_tensors(arguments: tuple[Any, ...], tensors: list[Tensor]) -> tuple[Any, ...]:
    """The arguments with other tensors in the order of tensors_of."""
    left = iter(tensors)

    def replaced(part: Any) -> Any:
        return next(left) if isinstance(part, Tensor) else part

    return tuple(
        [replaced(each) for each in part] if isinstance(part, list) else replaced(part)
        for part in arguments
    )


def are_written(op: Any, arguments: tuple[Any, ...]) -> list[bool]:
    """Of each tensor whether the op's schema says that it is written."""
    written = []
    for part, declared in zip(arguments, op._schema.arguments, strict=False):
        count = len(tensors_of((part,)))
        written += [declared.alias_info is not None and declared.alias_info.is_write] * count
    return written

"""Arguments that do not fit: a ValueError that says what, which value and what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import NEEDS_GPU, Place
from op_arguments import ROWS, op_arguments, ops, tensors_of
from reference import random_rows
from test_argument_overlaps import assert_same

import speedtorch

pytestmark = pytest.mark.dealt("place", "gpu_place")

Spoil = Callable[[Any], Any]
Faults = dict[str, list[tuple[str, Spoil, str]]]
"""For each op of ARGUMENTS: an argument, what is passed instead, and the message."""

STATUS_OF_PLAN = torch.tensor([0, 3, 0, 1, ROWS, 9, 9, 0])
ARGUMENTS: dict[str, tuple[Any, tuple[Any, ...]]] = op_arguments("cpu") | {
    "plan_fault": (ops.plan_fault.default, (STATUS_OF_PLAN, 5)),
    "numbers_to_host": (ops.numbers_to_host.default, (STATUS_OF_PLAN, 1)),
    "chunk_digests": (ops.chunk_digests.default, (STATUS_OF_PLAN.view(torch.uint8), 4)),
    "explain_move": (ops.explain_move.default, (torch.zeros(3, 2), 5, 0, False)),
    "link_launch": (ops.link_launch.default, (0, 16, 0, 0, 5, False, 16)),
}
# Whose checks an op makes.
PART_OF = dict.fromkeys(("exchange_cached", "exchange_rows"), "optimizer_state_swap")
PART_OF |= {"plan_parts": "plan_batch", "explain_move": "explain"}
IDS = [3, 0, 5]
LEAST = -(2**63)


def give(*values: int) -> Spoil:
    """Other int64 numbers on the device of an argument."""
    return lambda given: torch.tensor(values, dtype=torch.int64, device=given.device)


def number(value: int) -> Spoil:
    return lambda _: value


def nothing(_: object) -> None:
    return None


def none(_: object) -> list[object]:
    """A list without entries."""
    return []


def first(spoil: Spoil) -> Spoil:
    """Spoils the first tensor of a list."""
    return lambda tensors: [spoil(tensors[0]), *tensors[1:]]


def second(spoil: Spoil) -> Spoil:
    return lambda tensors: [tensors[0], spoil(tensors[1])]


def cut(length: int) -> Spoil:
    return lambda rows: rows[:length]


def shorter(rows: Any) -> Any:
    return rows[:-1]


def int32(tensor: Any) -> Any:
    return tensor.int()


def double(tensor: Any) -> Any:
    return tensor.double()


def wider(rows: Any) -> Any:
    return rows.repeat(1, 2)


def columns_apart(rows: Any) -> Any:
    return rows.repeat(1, 2)[:, ::2]


def apart(rows: Any) -> Any:
    return wider(rows)[:, : rows.shape[1]]


def longer(rows: Any) -> Any:
    return rows.repeat(2, 1)


def fields_in_common(host: Any) -> Any:
    """Fields of one record, of which the second begins within the first."""
    wide = wider(host[0])
    return [wide[:, :3], wide[:, 2:4]]


def at_an_odd_address(tensor: Any) -> Any:
    """A copy that begins one byte after an address of a number."""
    memory = bytearray(tensor.numel() * tensor.itemsize + 1)
    copy = torch.frombuffer(memory, dtype=tensor.dtype, offset=1).view(tensor.shape)
    return copy.copy_(tensor)


def too_many(index: Any) -> Any:
    return index[:1].expand(2**31)


def status_of(unique: int) -> Spoil:
    """A plan's status with another number of unique ids."""
    return lambda status: status.index_fill(0, torch.tensor(3), unique)


def changed(place: int) -> Spoil:
    """A plan with another place of its last id."""
    return lambda plan: [plan[0], torch.tensor([1, 0, 1, place]), *plan[2:]]


FIVE = give(0, 1, 2, 3, 0)
NO_FIELD = "must have at least one field, got an empty list"
# Of two fields of 3 and 2 columns, int64; the lists have 4 and 3 ids.
TABLES: list[tuple[Spoil, str]] = [
    (lambda table: table[0, 0], "at least one dimension"),
    (columns_apart, "contiguous, but .*stride 2, expected 1"),
    (lambda table: table.t(), "contiguous, but .*stride 3, expected 1"),
    (lambda table: table[:, :1].expand(-1, 3), "contiguous, but .*stride 0"),
    (lambda table: table.repeat(1, 4).view(-1, 3, 4)[..., :2], "contiguous, but .*stride 4, exp"),
]
INDEX: list[tuple[str, Spoil, str]] = [
    ("index", lambda index, dtype=dtype: index.to(dtype), "index must be int32 or int64, got ")
    for dtype in (torch.float32, torch.bool, torch.uint8, torch.int16, torch.complex64)
]
OUT: list[tuple[str, Spoil, str]] = [
    ("out", cut(2), r"out has shape \[2, 3\], expected \[4, 3\]"),
    ("out", lambda out: out.reshape(-1), r"out has shape \[12\], expected \[4, 3\]"),
    ("out", wider, r"out has shape \[4, 6\], expected \[4, 3\]"),
    ("out", double, "out has dtype Double, expected Long"),
    ("out", columns_apart, "out .*contiguous"),
    ("out", lambda out: out[:1].expand(4, 3), "out .*(contiguous|overlap)"),
]
SRC: list[tuple[str, Spoil, str]] = [
    ("src", cut(2), r"src has shape \[2, 3\], expected \[4, 3\]"),
    ("src", lambda src: src[0], r"src has shape \[3\], expected \[4, 3\]"),
    ("src", wider, r"src has shape \[4, 6\], expected \[4, 3\]"),
    ("src", lambda src: src.half(), "src has dtype Half, expected Long"),
]
SIDES: list[tuple[str, Spoil, str]] = [
    (side, spoil, message.format(side=side, counts=counts))
    for side, counts in (("leaving", "2, 1 and 2"), ("arriving", "2, 2 and 1"))
    for spoil, message in (
        (cut(1), "same length, got {counts}"),
        (second(cut(2)), r"{side}\[1\] has 2 rows.* [34] "),
        (second(wider), r"{side}\[1\] has shape \[4, 4\], .* \[[34], 2\]"),
        (second(int32), r"{side}\[1\] has dtype Int, .* Long"),
        (first(double), r"{side}\[0\] has dtype Double, .* Long"),
        (second(columns_apart), r"{side}\[1\] must be contiguous"),
        (first(apart), r"{side}\[0\] must be contiguous"),
    )
]
ANYWHERE: Faults = {
    "pinned_gather": INDEX,
    "pinned_scatter": [*INDEX, *SRC],
    "optimizer_state_swap": [
        *(("evict", spoil, message.replace("index", "evict")) for _, spoil, message in INDEX),
        *(("load", spoil, message.replace("index", "load")) for _, spoil, message in INDEX),
        ("host", second(cut(7)), r"host\[1\] has 7 rows, host\[0\] has 11"),
        *SIDES,
    ],
    **dict.fromkeys(("pinned_gather.out", "pinned_gather.planned_out"), OUT),
    **dict.fromkeys((f"pinned_scatter{how}, adding" for how in ("", ".planned")), SRC),
    "pinned_scatter.planned": SRC,
    "pinned_copy": [
        ("src", cut(3), r"src has shape \[3, 3\], expected \[4, 3\]"),
        ("src", double, "src has dtype Double, expected Long, the dtype of dst"),
        ("src", columns_apart, "each row of src must be contiguous"),
        ("dst", lambda dst: dst[:1].expand(4, 3), "rows of dst overlap"),
    ],
    "merge_rows": [
        ("rows", none, NO_FIELD),
        *(("rows", at(lambda rows: rows[0, 0]), "at least one dim") for at in (first, second)),
        ("rows", first(cut(2)), r"rows\[0\] has 2 rows, .* of 4 held ids, or one more"),
        ("rows", first(longer), r"rows\[0\] has 8 rows, .* of 4 held ids"),
        ("rows", second(longer), r"rows\[1\] has 8 rows, expected 4 like rows\[0\]"),
    ],
    "pinned_gather.planned": [
        ("plan", spoil, "plan")
        for spoil in (
            *(shorter, lambda plan: [*plan, plan[0]], none, first(int32)),
            *(lambda plan: [*plan[:4], plan[4][:7]], first(lambda ids: ids.repeat(2)[::2])),
        )
    ],
    "plan_rows": [("rows", number(-1), "rows.*-1"), *INDEX],
}
TOO_MANY = "index has 2147483648 ids, at most 2147483647 are allowed in one call"
INT64 = "must be a contiguous int64"
ODD = "a multiple of its element size, . bytes.*clone"
NO_HOST = ("host", none, f"host {NO_FIELD}")
PLACED: list[tuple[str, Spoil, str]] = [
    NO_HOST,
    ("evict", int32, f"evict {INT64}"),
    ("load_places", int32, f"load_places {INT64}"),
    ("load_places", shorter, r"load_places has shape \[2\], expected \[3\]"),
    ("leaving", second(shorter), r"leaving\[1\] has 3 rows, leaving\[0\] has 4"),
]
STATUS: list[tuple[str, Spoil, str]] = [
    ("status", shorter, "status"),
    ("status", int32, "status must"),
    ("status", lambda status: status.view(2, 4), "status must"),
]
ON_CPU: Faults = {
    "pinned_gather": [
        *(("table", spoil, f"table .*{message}") for spoil, message in TABLES),
        ("index", too_many, TOO_MANY),
    ],
    "pinned_scatter": [
        *(("table", spoil, f"table .*{message}") for spoil, message in TABLES),
        ("table", lambda table: table[:1].expand(ROWS, 3), "the rows of table overlap"),
    ],
    "plan_rows": [("index", too_many, TOO_MANY)],
    "optimizer_state_swap": [
        *(("host", first(spoil), f"host.*{message}") for spoil, message in TABLES),
        NO_HOST,
        ("host", fields_in_common, r"host\[0\] and host\[1\] overlap"),
    ],
    "optimizer_state_swap.placed": PLACED,
    "exchange_rows": PLACED,
    "exchange_rows, of tables": [
        *(("tables", number(count), NO_HOST[2]) for count in (0, -1)),
        ("host", lambda host: [*host, host[0]], "host has 5 fields, .* each of 2 tables"),
        ("tables", number(4), "must have the same length, got 1, 2 and 2"),
        ("leaving", first(wider), r"leaving\[0\] has shape"),
        ("host", lambda host: [*host[:3], host[1]], r"host\[3\] has 11 rows, .*\[2\] has 2"),
    ],
    "exchange_rows, counted": [
        *(
            (name, spoil, f"{name} {message}")
            for name in ("evict_count", "load_count")
            for spoil, message in (
                (give(1, 1), r"has shape \[2\], expected \[1\]"),
                (double, f"{INT64} tensor"),
                *((give(n), f"must be 0 to [43], got {n}") for n in (-1, 5, 2**62, LEAST)),
            )
        ),
        ("load_count", nothing, "evict_count and load_count must be passed together"),
    ],
    "exchange_rows, at host rows": [
        *(
            (name, spoil, f"{name} {message}")
            for name in ("evict_rows", "load_rows")
            for spoil, message in (
                (give(1, 1), r"has shape \[2\], expected \[[43]\]"),
                (double, f"{INT64} tensor"),
            )
        ),
        *((name, nothing, "must be passed together") for name in ("evict_rows", "load_rows")),
        ("evict_count", lambda _: torch.tensor([1]), "must be passed together"),
    ],
    "exchange_cached": [
        ("cache", lambda cache: [rows[:0] for rows in cache], "cache must have at least one slot"),
        ("hot", lambda hot: hot.float(), "hot must be a contiguous int32"),
        ("hot", lambda hot: hot.t().contiguous().t(), "hot must be a contiguous int32"),
        ("hot", at_an_odd_address, ODD),
        ("hot", shorter, r"hot has shape \[10, 2\], expected \[11, 2\]"),
    ],
    "sum_rows": [
        ("rows", int32, "float.*got Int"),
        ("rows", lambda rows: rows.t(), "contiguous"),
        ("begin", number(1), "rows 1 to 5.*4 ids"),
        ("rows", at_an_odd_address, ODD),
        ("plan", lambda plan: [at_an_odd_address(part) for part in plan], ODD),
        *(
            ("begin", number(begin), f"rows {begin} to {begin + 4} must be within the 4 ids")
            for begin in (-1, 2, 2**31, LEAST, 2**63 - 1)
        ),
        ("distinct", number(5), "0 to 4.*got 5"),
        ("distinct", number(1), "is 1.*has 3"),
        ("plan", shorter, "4 tensors"),
    ],
    "sum_rows, of bags": [
        ("source", give(0, 2, 4), "source has 4 at position 2.* for 4 rows"),
        ("source", give(-1, 2, 5), "source has -1 at position 0.* for 4 rows"),
        ("source", give(0, 0, 0, 0, 0), "rows 0 to 5.*4 ids"),
        ("begin", number(2), "rows 2 to 6.*4 ids"),
        ("source", int32, f"source {INT64}"),
    ],
    "sum_rows, counted": [
        ("distinct", number(-1), "capacity must be 0 to"),
        ("distinct", number(2), "2"),
        ("named", give(6), "named must be 0 to 5, got 6"),
        ("named", give(-1), "named must be 0 to 5, got -1"),
        ("named", give(1), "1"),
        ("named", give(1, 1), r"named has shape \[2\], expected \[1\]"),
        ("named", double, f"named {INT64} tensor"),
    ],
    "table_ids": [
        ("ids", double, "int32 or int"),
        ("ids", lambda ids: ids[::2], r"tensor \[n\]"),
        ("offsets", int32, "offsets must"),
        ("ranges", lambda ranges: ranges.t(), "ranges must"),
        ("samples", number(-1), "negative, got -1"),
        ("samples", number(2**62), f"offsets has 5 entries.*2 features times {2**62} samples"),
        ("samples", number(0), "offsets has 5 entries"),
        ("offsets", give(1, 1, 1, 3, 4), "offsets has 1 at position 0. .* 0 to 4"),
        ("offsets", give(0, -1, 1, 3, 4), "offsets has -1 at position 1"),
        ("offsets", give(0, 5, 1, 3, 4), "offsets has 5 at position 1"),
        ("offsets", give(0, 1, 1, 3, 3), "offsets has 3 at position 4"),
    ],
    "pool_rows": [
        ("rows", int32, "rows must be float.*got Int"),
        ("rows", lambda rows: rows[0], r"rows must be \[rows, columns\].*\[3\]"),
        ("rows", lambda rows: rows.t(), "rows must be contiguous"),
        ("places", int32, f"places {INT64}"),
        ("offsets", lambda offsets: offsets[None], f"offsets {INT64}"),
        ("offsets", give(), "offsets must have one entry more"),
        *(
            ("features", number(count), f"features must divide the 4 bags, got {count}")
            for count in (3, 0, -3)
        ),
        ("places", lambda places: places + 1, "places has 4 at position 0.* for 4 rows"),
        ("places", lambda places: places - 1, "places has -1 at position 1"),
        ("offsets", lambda offsets: offsets + 1, "offsets has 1 at position 0. .* 0 to 4"),
        ("offsets", lambda offsets: offsets.flip(0), "offsets has 4 at position 0"),
        ("places", cut(3), "offsets has 4 at position 4"),
    ],
    "plan_batch": [
        *(
            ("padding", number(row), f"-1 or a row of a table of 11 rows, got {row}")
            for row in (-2, ROWS)
        ),
        *(
            ("capacity", number(rows), f"capacity must be -1 or at least 1, got {rows}")
            for rows in (0, -2, LEAST)
        ),
        ("rows", number(-1), "rows must not be negative"),
    ],
    "plan_batch, after others": [
        ("held_status", nothing, "held and held_status must be passed together"),
        ("held", at_an_odd_address, ODD),
        ("held_status", status_of(-1), "held_status must report 0 to 3 unique ids, .* got -1"),
        ("held_status", status_of(5), "held_status must report 0 to 3 unique ids, .* got 5"),
        ("held_status", status_of(2**62), f"must report 0 to 3 unique ids, .* got {2**62}"),
    ],
    "plan_parts": [
        ("parts", none, "parts"),
        ("parts", second(double), r"parts\[1\] must be int32 or int64"),
    ],
    "diff_ids": [
        *(
            (name, cut(0), rf"{name} has shape \[0\], expected \[8\]")
            for name in ("named_status", "held_status")
        ),
        ("halt", give(0), r"halt has shape \[1\], expected \[2\]"),
        ("halt", double, f"halt {INT64} tensor"),
        ("fault", give(0), r"fault has shape \[1\], expected \[8\]"),
        *(
            (name, status_of(count), f"{name} must report 0 to [34] unique ids, .* got {count}")
            for name in ("named_status", "held_status")
            for count in (-1, 5, 2**62)
        ),
    ],
    "spoil_plan": [*STATUS, ("agreed", int32, "agreed must")],
    "plan_fault": [*STATUS, ("capacity", number(-1), "capacity must not be negative, got -1")],
    "shard_ids": [
        ("ids", double, "ids must be int32 or int64"),
        ("distances", shorter, r"distances has shape \[2\], expected \[3\]"),
        ("distances", int32, "distances must"),
        ("rows", number(-1), "rows must be 0 to .*, got -1"),
        ("block", number(0), "block must be 1 to .*, got 0"),
        ("rows_per_rank", number(-1), "rows_per_rank must be 0 to .*, got -1"),
        ("ranks", number(0), "ranks must be 1 to .*, got 0"),
        ("share", number(-2), "share must be -1 to .*, got -2"),
        ("rows_per_rank", number(2**62), f"rows_per_rank must be .* to {2**62 - 1}, got {2**62}"),
        ("share", number(2**30), f"share must be .* to {2**30 - 2}, got {2**30}"),
    ],
    "requested_ids": [
        ("blocks", int32, f"blocks {INT64}"),
        ("blocks", lambda blocks: blocks.t(), f"blocks {INT64}"),
        ("blocks", lambda blocks: blocks[0], f"blocks {INT64}"),
        ("blocks", lambda blocks: blocks[:, :0], r"blocks has shape \[2, 0\], expected \[2, 1\]"),
        ("differs", give(0, 0), r"differs has shape \[2\], expected \[1\]"),
    ],
    "hold_rows": [
        ("held", none, f"held {NO_FIELD}"),
        ("incoming", shorter, "must have the same length .evicted may be empty., got 2, 1 and 2"),
        ("evicted", shorter, "length .evicted may be empty., got 2, 2 and 1"),
        ("incoming", first(shorter), r"incoming\[0\] has 3 rows, expected 4, the length of"),
        ("incoming", first(wider), r"incoming\[0\] has shape \[4, 6\], expected \[4, 3\]"),
        ("evicted", first(double), r"evicted\[0\] has dtype Double, .* Long, .* of held\[0\]"),
        ("evicted", first(columns_apart), r"each row of evicted\[0\] must be contiguous"),
        ("held", first(apart), r"held\[0\] must be contiguous"),
        ("evicted_ids", FIVE, r"evicted_ids has shape \[5\], expected \[4\]"),
        ("saved_ids", FIVE, r"saved_ids has shape \[5\], expected \[4\]"),
        ("saved_count", FIVE, r"saved_count has shape \[5\], expected \[1\]"),
        ("kept_from", FIVE, r"kept_from has shape \[5\], expected \[4\]"),
        ("counts", FIVE, r"counts has shape \[5\], expected \[4\]"),
        ("held_status", FIVE, r"held_status has shape \[5\], expected \[8\]"),
        ("ids", double, f"ids {INT64} tensor"),
        ("counts", give(5, 0, 0, 0), r"counts\[0\] must be 0 to 4, got 5"),
        ("counts", give(0, -1, 0, 0), r"counts\[1\] must be 0 to 4, got -1"),
        ("counts", give(0, 0, 0, 5), r"counts\[3\] must be 0 to 4, got 5"),
        ("ids", give(4), r"counts\[0\] must be 0 to 1, got 3"),
        ("kept_places", give(0, 4, 1, 3), "kept_places has 4 at position 1, .* for 4 rows"),
        ("kept_from", give(-1, 0, 2, 1), "kept_from has -1 at position 0, .* for 4 rows"),
        ("evicted_places", give(0, 9, 1, 2), "evicted_places has 9 at position 1, .* for 4 rows"),
    ],
    "split_plan": [
        *(
            ("plan", changed(place), "was not made by plan_rows, was changed")
            for place in (-1, 4, 1 << 40)
        ),
        ("plan", shorter, "the plan of index has 4 tensors, expected the 5"),
        ("offsets", int32, f"offsets {INT64}"),
        ("offsets", cut(1), "offsets must have at least two entries"),
        ("ranges", cut(1), r"ranges has shape \[1, 2\], expected \[2, 2\]"),
        ("ranges", int32, f"ranges {INT64} tensor"),
        ("offsets", give(0, 3, 3), "offsets"),
        ("offsets", give(0, 2, 4), "id 2 at position 2 is not a row of table 1"),
        *(
            ("ranges", lambda _, to=to: torch.tensor(to), "expected first row 5 and at most 6 rows")
            for to in ([[0, 5], [6, 5]], [[0, 5], [5, 7]])
        ),
    ],
    "numbers_to_host": [
        ("numbers", lambda numbers: numbers[::2], "numbers must be contiguous"),
        ("numbers", lambda numbers: numbers, "numbers must be int64 on a GPU, got Long on cpu"),
    ],
    "chunk_digests": [
        ("data", lambda data: data.float(), r"data must be uint8 .* Float of shape \[64\] on cpu"),
        ("data", lambda data: data.view(2, 32), r"data must .* Byte of shape \[2, 32\] on cpu"),
        ("data", lambda data: data[::2], "data must be contiguous"),
        ("chunk_bytes", number(0), "chunk_bytes must be at least 1, got 0"),
        ("chunk_bytes", number(-3), "chunk_bytes must be at least 1, got -3"),
    ],
    "explain_move": [
        *(("direction", number(to), "direction must be 0 .* 1") for to in (-1, 2, 2**40)),
        ("ids", number(-5), "ids must not be negative"),
    ],
    "link_launch": [
        *(("direction", number(to), "direction must be 0 .* 1") for to in (-1, 2, 2**40)),
        ("sms", number(0), "sms at least 1"),
    ],
    "clear_rows": [
        ("rows", none, f"rows {NO_FIELD}"),
        ("rows", first(lambda rows: rows[:, :1]), r"rows\[0\] must be contiguous"),
        ("count", give(1, 1), r"count has shape \[2\], expected \[1\]"),
        ("count", give(5), "count must be 0 to 4, got 5"),
        ("count", give(-1), "count must be 0 to 4, got -1"),
    ],
    "round_rows": [
        ("exponent_bits", lambda _: [11, 0], "exponent_bits must be 0, 5 or 8, got 11"),
        ("exponent_bits", none, "must have the same length, got 2 and 0"),
        ("exponent_bits", lambda _: [8, 8], "must be float32 to be stored in 16 bits, got"),
        ("rows", none, NO_FIELD),
        ("rows", first(shorter), r"rows\[0\] has 3 rows, at least 4 are needed"),
        ("rows", first(columns_apart), r"rows\[0\]"),
        ("key", give(1, 0, 0), r"key has shape \[3\], expected \[2\]"),
        ("ids", int32, f"ids {INT64}"),
    ],
}
BAD_IDS: Faults = {
    "sum_rows": [("table_rows", number(5), "table of 11 rows.*has 5")],
    "split_plan": [("table_rows", number(8), "table of 11 rows, but this table has 8")],
    "plan_parts": [("parts", second(lambda ids: ids * 9), "id 18 at position 4")],
}


def cases(all_faults: Faults) -> list[Any]:
    return [
        pytest.param(name, *fault, id=f"{name}-{fault[0]}-{number}")
        for name, faults in all_faults.items()
        for number, fault in enumerate(faults)
    ]


def refused(call: Callable[[], object], message: str, error: type[Exception] = ValueError) -> None:
    """The call raises that error before anything moves."""
    with pytest.raises(error, match=message):
        call()
    speedtorch.synchronize()


def check(
    op: Any,
    arguments: tuple[Any, ...],
    argument: str,
    spoil: Spoil,
    message: str,
    error: type[Exception] = ValueError,
) -> None:
    names = [declared.name for declared in op._schema.arguments]
    given = dict(zip(names, arguments, strict=False))
    before = [tensor.clone() for tensor in tensors_of(arguments)]
    given[argument] = spoil(given[argument])
    own = op._schema.name.removeprefix("speedtorch::")
    message = f"^({own}|{PART_OF.get(own)}): .*{message}"
    refused(lambda: op(*given.values()), message, error)
    assert_same(tensors_of(arguments), before)


CASE = "name", "argument", "spoil", "message"


@pytest.mark.parametrize(CASE, cases(ANYWHERE))
def test_arguments_that_do_not_fit_are_refused_anywhere(
    place: Place, name: str, argument: str, spoil: Spoil, message: str
) -> None:
    check(*op_arguments(place.device, place.table)[name], argument, spoil, message)


@pytest.mark.parametrize(CASE, cases(ON_CPU))
def test_arguments_that_do_not_fit_are_refused_on_the_cpu(
    name: str, argument: str, spoil: Spoil, message: str
) -> None:
    check(*ARGUMENTS[name], argument, spoil, message)


@pytest.mark.parametrize(CASE, cases(BAD_IDS))
def test_ids_that_no_table_has(name: str, argument: str, spoil: Spoil, message: str) -> None:
    check(*ARGUMENTS[name], argument, spoil, message, IndexError)


# Devices


@NEEDS_GPU
def test_a_table_on_the_gpu_needs_a_result_there() -> None:
    index, there, rows = torch.tensor(IDS), torch.zeros(8, 6, device="cuda"), torch.zeros(3, 6)
    gather, scatter = speedtorch.pinned_gather, speedtorch.pinned_scatter
    on = "table is on cuda:0 but"
    refused(lambda: gather(there, index), f"pinned_gather: {on} index is on cpu")
    refused(lambda: gather(there, index, out=rows), f"pinned_gather: {on} .* is on cpu")
    refused(lambda: scatter(there, index, rows), f"pinned_scatter: {on} src is on cpu")


def test_ids_on_the_gpu_need_their_rows_and_their_plan_there(gpu_place: Place) -> None:
    table, index, rows = (
        gpu_place.table(random_rows(8, (6,))),
        gpu_place.ids(IDS),
        torch.zeros(3, 6),
    )
    gather, swap = speedtorch.pinned_gather, speedtorch.optimizer_state_swap
    plan = speedtorch.plan_rows(index.cpu(), 8)
    on_cpu = "cuda:0.* is on cpu"
    refused(lambda: gather(table, index, out=rows), on_cpu)
    refused(lambda: gather(table, index, plan=plan), "plan.* is on cpu but .* is on cuda:0")
    refused(lambda: speedtorch.pinned_scatter(table, index, rows), on_cpu)
    refused(lambda: swap([table], [rows], index, [rows.clone()], index), on_cpu)
    refused(
        lambda: swap([table], [rows.cuda()], index, [rows], index),
        f"{on_cpu}|cpu.* is on cuda:0",
    )


@NEEDS_GPU
def test_fields_on_the_gpu_and_in_pageable_memory_do_not_mix() -> None:
    host = [torch.zeros(8, 2, device="cuda"), torch.zeros(8, 2)]
    rows, ids = [torch.ones(1, 2, device="cuda") for _ in host], torch.tensor([3], device="cuda")
    arriving = [torch.zeros_like(tensor) for tensor in rows]
    refused(
        lambda: speedtorch.optimizer_state_swap(host, rows, ids, arriving, ids),
        "some host fields are on the GPU and others in pageable",
    )
    assert not any(tensor.any() for tensor in host)


@pytest.mark.parametrize("ids", [[1], 1, None], ids=str)
def test_ids_that_are_no_tensor_are_refused_with_the_remedy(ids: Any) -> None:
    table = torch.zeros(3, 2)
    for call in (
        lambda: speedtorch.pinned_gather(table, ids),
        lambda: speedtorch.pinned_scatter(table, ids, table),
        lambda: speedtorch.plan_rows(ids, 3),
        lambda: speedtorch.table_ids(ids, table, table, 1),
    ):
        with pytest.raises(
            TypeError, match="(index|ids): expected an int32 or int64 tensor.*as_tensor"
        ):
            call()


def test_a_graph_that_was_not_watched_is_refused() -> None:
    with pytest.raises(ValueError, match="watch_graph: on must be on a GPU, got cpu"):
        torch.ops.speedtorch.watch_graph(torch.zeros(1))
    with pytest.raises(ValueError, match="graph_is_alive: no watched graph has number -1"):
        torch.ops.speedtorch.graph_is_alive(-1)

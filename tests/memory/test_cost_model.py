"""The choice of path, its explanation and the launches' shapes: none of this needs a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from conftest import Place
from cuda_calls import PretendedDriver
from torch import Tensor

import speedtorch
from speedtorch.memory import cost_model
from speedtorch.ops.functions import _ops

GATHER, SCATTER = 0, 1
DIRECT, DISTINCT, ORDERED, STAGED = range(4)
COSTS = 30


@pytest.fixture(autouse=True)
def usual_costs() -> Iterator[None]:
    """Tests may change the costs; the ones that were there come back."""
    before, calibrated = _ops.costs(), cost_model._calibrated
    yield
    cost_model.use_costs(before, calibrated=calibrated)


@pytest.fixture
def choose(driver: PretendedDriver) -> Callable[..., int]:
    """The path for `ids` ids of rows of a kind of memory, by round figures.

    One row costs 10 ns, in index order of mapped memory 30; hashing 10 us and sorting 100 us.
    """
    costs = torch.full((COSTS,), 10.0, dtype=torch.float64)
    costs[12:15] = costs[18:21] = 30.0
    costs[24:28] = torch.tensor([10.0, 0.0, 100.0, 0.0])
    cost_model.use_costs(costs, calibrated=True)

    def path(memory: str, ids: int, direction: int = GATHER, accumulate: bool = False) -> int:
        table = speedtorch.empty((16, 128), memory=memory)
        if memory != "plain":
            # Beyond the reach of small pages: a view of few rows that lie far apart has as many
            # bytes as a table; nothing of it is touched.
            table = table[:1].as_strided((3, 128), (2**28, 1)) if memory == "managed" else table
        return int(_ops.explain_move(table, ids, direction, accumulate)[0])

    return path


@pytest.mark.parametrize(
    ("memory", "ids", "how", "expected"),
    [
        ("registered", 100, {}, DIRECT),
        ("registered", 4096, {}, DIRECT),
        ("registered", 4097, {}, DISTINCT),
        ("registered", 100, {"direction": SCATTER}, DIRECT),
        ("registered", 2048, {"direction": SCATTER}, DIRECT),
        ("registered", 2049, {"direction": SCATTER}, DISTINCT),
        ("registered", 1, {"direction": SCATTER, "accumulate": True}, ORDERED),
        ("plain", 10, {}, STAGED),
    ],
)
def test_the_path_of_a_batch(
    choose: Callable[..., int], memory: str, ids: int, how: dict[str, int], expected: int
) -> None:
    """More ids than one block can check are hashed, and sums are always ordered."""
    assert choose(memory, ids, **how) == expected


def test_order_pays_once_it_saves_more_than_sorting_costs(driver: PretendedDriver) -> None:
    costs = torch.full((COSTS,), 10.0, dtype=torch.float64)
    costs[0:3] = 30.0  # managed, to the GPU, in index order
    costs[24:28] = torch.tensor([0.0, 0.0, 200.0, 0.0])
    cost_model.use_costs(costs, calibrated=True)
    table = speedtorch.empty((16, 128), memory="managed")
    paths = [int(_ops.explain_move(table, ids, GATHER, False)[0]) for ids in (5000, 9000, 11000)]
    assert paths == [DISTINCT, DISTINCT, ORDERED]  # 20 ns are saved for each id


@pytest.mark.parametrize(
    ("columns", "nanoseconds"), [(1, 10), (16, 10), (72, 15), (128, 20), (256, 30), (640, 60)]
)
def test_times_between_measured_lengths_lie_on_a_line(
    driver: PretendedDriver, columns: int, nanoseconds: float
) -> None:
    costs = torch.full((COSTS,), 1.0, dtype=torch.float64)
    costs[0:3] = torch.tensor([10.0, 20.0, 40.0])  # 64, 512 and 1,536 bytes
    cost_model.use_costs(costs, calibrated=True)
    table = speedtorch.empty((16, columns), memory="managed")
    assert float(_ops.explain_move(table, 1000, GATHER, False)[1]) == pytest.approx(nanoseconds)


@pytest.mark.parametrize("path", [DIRECT, DISTINCT, ORDERED])
def test_a_forced_path_is_the_one_that_is_chosen(choose: Callable[..., int], path: int) -> None:
    with cost_model.forced_path(cost_model.PATHS[path]):
        assert choose("registered", 100) == path
    assert choose("registered", 100) == DIRECT


def test_a_path_that_is_not_possible_is_not_forced(choose: Callable[..., int]) -> None:
    with (
        cost_model.forced_path("distinct"),
        pytest.raises(ValueError, match="explain: path 1 is not possible for 100 ids of this tab"),
    ):
        choose("registered", 100, SCATTER, accumulate=True)


# explain


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """As if it were on a GPU: it has no memory and is not on the CPU."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_ops_on_the_cpu_use_no_gpu_path() -> None:
    table, ids = torch.zeros(4, 2), torch.tensor([1])
    assert speedtorch.explain("pinned_gather", table, ids).path == "cpu"
    assert speedtorch.explain("pinned_scatter", table, ids, torch.zeros(1, 2)).path == "cpu"
    assert speedtorch.explain("pinned_copy", table, table).path == "torch"
    swap = ([table], [table[:1]], ids, [table[:1]], ids)
    assert speedtorch.explain("optimizer_state_swap", *swap).path == "cpu"


def test_arguments_that_are_no_tensors_are_named() -> None:
    with pytest.raises(TypeError, match="explain: index must be a tensor, got int"):
        speedtorch.explain("pinned_gather", torch.zeros(4, 2), 3)
    with pytest.raises(TypeError, match="explain: load must be a tensor, got list"):
        speedtorch.explain("optimizer_state_swap", [], [], torch.tensor([1]), [], [1])


def test_an_explanation_has_path_reason_and_rates(driver: PretendedDriver) -> None:
    costs = torch.full((COSTS,), 10.0, dtype=torch.float64)
    costs[-2:] = 64.0
    cost_model.use_costs(costs, calibrated=True)
    table = speedtorch.empty((16, 128), memory="managed")
    before = len(driver.calls)
    explanation = speedtorch.explain("pinned_gather", table, meta(1000, dtype=torch.int64))
    assert not {"event_record", "advise_accessed_by"} & {name for name, *_ in driver.calls[before:]}
    assert (explanation.path, explanation.predicted_us) == ("direct", 10.0)
    assert explanation.predicted_gbps == explanation.measured_gbps == pytest.approx(51.2)
    assert (explanation.link_gbps, explanation.share_of_link) == (64.0, pytest.approx(0.8))
    assert set(explanation.alternatives_us) == {"direct", "distinct", "ordered"}
    text = str(explanation)
    assert "pinned_gather: direct (one launch" in text
    assert "1,000 rows of 512 B, managed memory; estimates: direct 10 us" in text
    assert "51.2 GB/s (calibrated here); link: 64.0 GB/s; share of the link: 0.80" in text


def test_an_explanation_says_whose_figures_they_are(driver: PretendedDriver) -> None:
    cost_model.use_costs(_ops.costs(), calibrated=False)
    table = speedtorch.empty((16, 128), memory="managed")
    text = str(speedtorch.explain("pinned_gather", table, meta(1000, dtype=torch.int64)))
    assert "not calibrated here: of an H200" in text


def test_pageable_memory_is_explained_with_its_remedy(driver: PretendedDriver) -> None:
    ids = meta(8, dtype=torch.int64)
    explanation = speedtorch.explain("pinned_scatter", torch.zeros(9, 4), ids, meta(8, 4))
    assert explanation.path == "staged"
    assert "pin_memory_(table) pins it" in str(explanation)
    assert explanation.predicted_us is None


def test_a_plan_is_followed(driver: PretendedDriver) -> None:
    table, ids = speedtorch.empty((16, 128), memory="managed"), meta(8, dtype=torch.int64)
    explanation = speedtorch.explain("pinned_gather", table, ids, plan=[])
    assert explanation.path == "ordered"
    assert "the ids are planned already" in explanation.why


def test_swaps_and_copies_have_one_path(driver: PretendedDriver) -> None:
    table, ids = speedtorch.empty((16, 128), memory="managed"), meta(8, dtype=torch.int64)
    rows = [meta(8, 128)]
    assert (
        speedtorch.explain("optimizer_state_swap", [table], rows, ids, rows, ids).path
        == "one sweep"
    )
    assert speedtorch.explain("pinned_copy", table, meta(16, 128)).path == "consecutive"
    pageable = torch.zeros(16, 128)
    staged = speedtorch.explain(
        "optimizer_state_swap", [table, pageable], rows * 2, ids, rows * 2, ids
    )
    assert staged.path == "staged"
    assert speedtorch.explain("pinned_copy", meta(16, 128), pageable).path == "torch"


def test_explain_agrees_with_what_runs(gpu_place: Place) -> None:
    table = gpu_place.table(torch.rand(6000, 128))
    ids = torch.randint(6000, (5000,), device="cuda")
    explanation = speedtorch.explain("pinned_gather", table, ids)
    assert (explanation.path == "staged") == (not gpu_place.mapped)
    if gpu_place.mapped:
        with cost_model.forced_path(explanation.path):
            assert torch.equal(speedtorch.pinned_gather(table, ids), table.cuda()[ids])


# multiprocessors and shapes of launches


def launch(
    row_bytes: int,
    rows: int,
    *,
    direction: int = GATHER,
    bits: int = 0,
    bulk: int = 1,
    sms: int = 16,
) -> dict[str, int]:
    names = ("bulk", "blocks", "threads", "access_bytes", "per_row", "shared_bytes")
    addresses = bits or row_bytes, bits
    made = _ops.link_launch(direction, row_bytes, *addresses, rows, bool(bulk), sms)
    return dict(zip(names, made, strict=True))


MANY = 100_000
LAUNCHES: dict[str, list[tuple[dict[str, int], dict[str, int]]]] = {
    "accesses are as wide as length and addresses allow": [
        ({"row_bytes": row_bytes, "bits": bits, "rows": 100}, {"access_bytes": access})
        for row_bytes, bits, access in (
            *((512, 0, 16), (512, 8, 8), (188, 0, 4), (94, 0, 2)),
            *((47, 0, 1), (1536, 3, 1), (24, 0, 8)),
        )
    ],
    "a row is shared by as many threads as it has accesses": [
        ({"row_bytes": row_bytes, "rows": 100}, {"per_row": lanes})
        for row_bytes, lanes in ((4, 1), (12, 3), (64, 4), (188, 32), (512, 32), (8192, 32))
    ],
    "bulk copies serve large batches of long aligned rows": [
        ({"row_bytes": 512, "rows": 4097}, {"bulk": 1}),
        ({"row_bytes": 512, "rows": 4097, "bulk": 0}, {"bulk": 0}),  # not on this GPU
        ({"row_bytes": 512, "rows": 4096}, {"bulk": 0}),  # a small batch
        ({"row_bytes": 240, "rows": MANY}, {"bulk": 0}),  # short rows
        ({"row_bytes": 512, "bits": 4, "rows": MANY}, {"bulk": 0}),  # rows that begin anywhere
        ({"row_bytes": 400, "rows": MANY}, {"bulk": 0}),  # or within a line
        ({"row_bytes": 514, "rows": MANY}, {"bulk": 0}),
    ],
    "long rows are copied in chunks": [
        ({"row_bytes": row_bytes, "rows": MANY}, {"per_row": pieces, "access_bytes": piece_bytes})
        for row_bytes, pieces, piece_bytes in ((512, 1, 512), (2048, 1, 2048), (8320, 5, 2048))
    ],
    "bulk copies of long rows take few multiprocessors": [
        (
            {"row_bytes": row_bytes, "rows": MANY, "direction": direction, "sms": sms},
            {"blocks": min(blocks, sms)},
        )
        for row_bytes, direction, blocks in (
            *((512, GATHER, 3), (512, SCATTER, 2), (1536, GATHER, 2)),
            *((1536, SCATTER, 2), (256, GATHER, 16)),
        )
        for sms in (16, 1)
    ],
}


@pytest.mark.parametrize("fact", LAUNCHES)
def test_the_shape_of_a_launch(fact: str) -> None:
    for given, expected in LAUNCHES[fact]:
        shape = launch(**given)
        assert {name: shape[name] for name in expected} == expected, given


@pytest.mark.parametrize("sms", [1, 4, 16, 64])
@pytest.mark.parametrize("row_bytes", [4, 94, 256, 512, 2048, 100_000])
@pytest.mark.parametrize("rows", [1, 5000, 10**9])
def test_a_launch_stays_within_its_multiprocessors(row_bytes: int, rows: int, sms: int) -> None:
    shape = launch(row_bytes, rows, sms=sms)
    assert 1 <= shape["blocks"] <= sms
    assert 32 <= shape["threads"] <= 512
    assert shape["shared_bytes"] <= 227 * 1024


# links that are faster than the one that counts of multiprocessors were measured on


@pytest.fixture
def unset_sms() -> Iterator[None]:
    speedtorch.set_num_sms(None)
    yield
    speedtorch.set_num_sms(None)


def with_link(*gbps: float) -> None:
    costs = _ops.costs()
    costs[-2:] = torch.tensor(gbps)
    cost_model.use_costs(costs, calibrated=True)


@pytest.mark.parametrize(
    ("link", "sms", "gather", "record"),
    [
        *((link, 16, 3, 2) for link in ((12.0, 12.0), (26.0, 25.0), (51.0, 51.2), (57.0, 58.0))),
        ((110.8, 120), 32, 6, 4),
        ((415.5, 387.8), 112, 21, 14),
    ],
)
def test_links_that_are_faster_than_pcie_5_take_as_many_times_more_multiprocessors(
    unset_sms: None, link: tuple[float, float], sms: int, gather: int, record: int
) -> None:
    with_link(*link)
    assert speedtorch.get_num_sms() == sms
    assert [launch(512, 100_000, sms=132)["blocks"] for _ in range(2)] == [gather] * 2
    assert launch(1536, 100_000, sms=132)["blocks"] == record
    assert launch(1536, 100_000, sms=3)["blocks"] == min(record, 3)


def test_what_the_user_has_set_is_a_limit_on_any_link(unset_sms: None) -> None:
    with_link(400.0, 400.0)
    speedtorch.set_num_sms(5)
    assert speedtorch.get_num_sms() == 5
    speedtorch.set_num_sms(None)
    assert speedtorch.get_num_sms() > 100


@pytest.mark.parametrize("link", [(1e5, 1e5), (float("inf"),) * 2, (float("nan"),) * 2], ids=str)
def test_an_implausible_link_speed_gives_a_valid_number_of_multiprocessors(
    unset_sms: None, link: tuple[float, float]
) -> None:
    with_link(*link)
    assert 16 <= launch(256, 10**9, sms=speedtorch.get_num_sms())["blocks"] <= 16_000

"""Training a collection equals training each of its tables in place, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from conftest import NEEDS_GPU
from embedding_reference import Squares, Trained, first_weight, random_ids, train_in_place, trained
from optimizer_cases import CASES, GPU_VARIANTS, Case, make_optimizer
from reference import assert_same_content
from torch import Tensor, nn, optim

import speedtorch

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
STEPS = 40
TABLES = {"user": (97, 8), "item": (61, 8), "word": (53, 5)}
"""Rows and columns: two of one layout, one of another."""
Batch = dict[str, tuple[Tensor, Tensor]]


def batches_of(overlap: float, *, one_by_one: bool = False) -> list[Batch]:
    """Ids and offsets of each table; the bags may be empty, or have one id each."""
    random = torch.Generator().manual_seed(4)
    ids = {
        name: random_ids(rows, STEPS, overlap, seed=seed)
        for seed, (name, (rows, _)) in enumerate(TABLES.items())
    }

    def offsets(count: int, samples: int) -> Tensor:
        if one_by_one:
            return torch.arange(count + 1)
        cuts = torch.randint(count + 1, (samples - 1,), generator=random).sort().values
        return torch.cat([torch.tensor([0]), cuts, torch.tensor([count])])

    return [
        {name: (bag[step], offsets(len(bag[step]), 1 + step % 6)) for name, bag in ids.items()}
        for step in range(STEPS)
    ]


def moved(batch: Batch, device: str) -> Batch:
    return {name: (ids.to(device), offsets.to(device)) for name, (ids, offsets) in batch.items()}


def collection(*, pooled: bool, device: str, capacity: int | None = None) -> Any:
    weights = {name: first_weight(*shape) for name, shape in TABLES.items()}
    kind = speedtorch.EmbeddingBagCollection if pooled else speedtorch.EmbeddingCollection
    config = speedtorch.EmbeddingBagConfig if pooled else speedtorch.EmbeddingConfig
    configs = [config(*shape, name) for name, shape in TABLES.items()]
    return kind.from_pretrained(configs, weights, freeze=False, device=device, capacity=capacity)


def optimizer_of(
    case: Case, variant: str, model: nn.Module, losses: dict[str, Squares]
) -> optim.Optimizer:
    first, *more = model.parameters()
    scales = [loss.scale for loss in losses.values() if loss.scale.requires_grad]
    optimizer = make_optimizer(case, variant, first, scales)
    for each in more:
        optimizer.add_param_group({"params": [each]})
    if case.rows:
        speedtorch.attach(optimizer, model)
    return optimizer


def trained_rows(
    case: Case, optimizer: optim.Optimizer, module: Any, rows: slice, scale: nn.Parameter
) -> Trained:
    """What is in some rows of a module's table."""
    module.flush()
    fields = {name: module.table[name][rows] for name in module.table.fields}
    return trained(case, optimizer, module.weight, fields, scale)


def train(
    case: Case,
    variant: str,
    device: str,
    batches: list[Batch],
    *,
    pooled: bool,
    ahead: bool,
    ids_on: str = "cpu",
    capacity: int | None = None,
) -> dict[str, Trained]:
    sparse = case.make is optim.SparseAdam
    losses = {name: Squares(width, device, dense=not sparse) for name, (_, width) in TABLES.items()}
    tables = collection(pooled=pooled, device=device, capacity=capacity)
    optimizer = optimizer_of(case, variant, tables, losses)
    loader: Iterable[Batch] = [moved(batch, ids_on) for batch in batches]
    if ahead:
        loader = speedtorch.prefetch(loader, tables, ids=lambda batch: batch)
    for batch in loader:
        optimizer.zero_grad()
        found = tables(batch)
        rows = {name: found[name] if pooled else found[name].values() for name in TABLES}
        sum(loss(rows[name]) for name, loss in losses.items()).backward()  # type: ignore[union-attr]
        optimizer.step()
    result = {}
    for name, loss in losses.items():
        group = tables.group_of(name)
        result[name] = trained_rows(case, optimizer, group, group.ranges.range_of(name), loss.scale)
    return result


def train_all_in_place(
    case: Case, variant: str, batches: list[Batch], *, pooled: bool
) -> dict[str, Trained]:
    result = {}
    for name, (rows, width) in TABLES.items():
        ids = [batch[name][0] for batch in batches]
        bags = [batch[name][1] for batch in batches] if pooled else []
        result[name] = train_in_place(case, variant, width, "cpu", rows, ids, bags, in_order=True)
    return result


AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["at-once", "prefetch"])
POOLED = pytest.mark.parametrize("pooled", [False, True], ids=["rows", "bags"])
CAPACITY = 80
"""Rows of a group of two tables, whose largest batches have so many ids."""
OVERLAPS = {"apart": 0, "half": 0.5, "same": 1}
_in_place: dict[tuple[Any, ...], dict[str, Trained]] = {}


def assert_same_as_in_place(
    case: Case,
    variant: str,
    overlap: float,
    *,
    pooled: bool,
    ahead: bool,
    capacity: int | None = None,
) -> None:
    batches = batches_of(overlap)
    known = (id(case), variant, overlap, pooled)
    if known not in _in_place:  # The same with and without prefetch.
        _in_place[known] = train_all_in_place(case, variant, batches, pooled=pooled)
    given = {"pooled": pooled, "ahead": ahead, "capacity": capacity}
    actual = train(case, variant, "cpu", batches, **given)
    assert_same_content(actual, _in_place[known])


# Not of each with each: that takes long, and the next test has the rest for one optimizer.
@pytest.mark.dealt("overlap", "pooled", "ahead")
@pytest.mark.parametrize(
    ("overlap", "pooled", "ahead"),
    [(0, False, True), (0.5, True, False), (0.5, True, True), (1, False, True)],
    ids=["apart-rows-prefetch", "half-bags-at-once", "half-bags-prefetch", "same-rows-prefetch"],
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_training_equals_training_in_place_bit_for_bit(
    case: Case, overlap: float, pooled: bool, ahead: bool
) -> None:
    assert_same_as_in_place(case, case.variants[0], overlap, pooled=pooled, ahead=ahead)


# An exchange does not depend on the optimizer, whose every kind the test above has.
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[] if name == "Adam" else pytest.mark.nightly)
        for name, case in CASES.items()
    ],
)
def test_training_with_a_capacity_equals_training_in_place_bit_for_bit(case: Case) -> None:
    variant = case.variants[0]
    assert_same_as_in_place(case, variant, 0.5, pooled=True, ahead=True, capacity=CAPACITY)


@AHEAD
@POOLED
@pytest.mark.parametrize("overlap", OVERLAPS.values(), ids=OVERLAPS)
def test_rows_and_bags_of_every_overlap_train_bit_for_bit(
    overlap: float, pooled: bool, ahead: bool
) -> None:
    assert_same_as_in_place(CASES["SGD"], "single", overlap, pooled=pooled, ahead=ahead)


def train_apart(
    case: Case, variant: str, device: str, batches: list[Batch], ids_on: str
) -> dict[str, Trained]:
    """Trains a speedtorch.Embedding for each table."""
    sparse = case.make is optim.SparseAdam
    losses = {name: Squares(width, device, dense=not sparse) for name, (_, width) in TABLES.items()}
    weights = {name: first_weight(*shape) for name, shape in TABLES.items()}
    model = nn.ModuleDict(
        {
            name: speedtorch.Embedding.from_pretrained(weight, freeze=False, device=device)
            for name, weight in weights.items()
        }
    )
    optimizer = optimizer_of(case, variant, model, losses)
    for batch in batches:
        optimizer.zero_grad()
        for name, loss in losses.items():
            loss(model[name](batch[name][0].to(ids_on))).backward()
        optimizer.step()
    return {
        name: trained_rows(case, optimizer, model[name], slice(None), loss.scale)
        for name, loss in losses.items()
    }


# A bag of one id is the row of a lookup: bags of more have no counterpart whose order of adding is
# the same, so these are compared with and without prefetch.
@NEEDS_GPU
@pytest.mark.dealt("overlap", "ids_on", "capacity", "pooled", "ahead")
@AHEAD
@POOLED
@pytest.mark.parametrize("capacity", [None, CAPACITY], ids=["counted", "capacity"])
@pytest.mark.parametrize("ids_on", ["cpu", "cuda"])
@pytest.mark.parametrize("overlap", OVERLAPS.values(), ids=OVERLAPS)
@pytest.mark.parametrize(("case", "variant"), GPU_VARIANTS)
def test_training_on_a_gpu_equals_training_embeddings_bit_for_bit(
    case: Case,
    variant: str,
    overlap: float,
    ids_on: str,
    capacity: int | None,
    pooled: bool,
    ahead: bool,
) -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    batches = batches_of(overlap, one_by_one=True)
    expected = train_apart(case, variant, "cuda", batches, ids_on)
    given = {"pooled": pooled, "ahead": ahead, "ids_on": ids_on, "capacity": capacity}
    actual = train(case, variant, "cuda", batches, **given)
    assert_same_content(actual, expected)


@NEEDS_GPU
@pytest.mark.parametrize("ids_on", ["cpu", "cuda"])
@pytest.mark.parametrize("overlap", OVERLAPS.values(), ids=OVERLAPS)
def test_bags_on_a_gpu_train_alike_with_and_without_prefetch(overlap: float, ids_on: str) -> None:
    results = [
        train(
            CASES["Adam"],
            "fused",
            "cuda",
            batches_of(overlap),
            pooled=True,
            ahead=ahead,
            ids_on=ids_on,
        )
        for ahead in (False, True)
    ]
    assert_same_content(results[1], results[0])


def test_the_reference_trains_every_table_to_numbers() -> None:
    # Guards the tests above: one that trained nothing, or grew without end, would equal anything.
    batches = batches_of(0.5)
    for name, value in train_all_in_place(CASES["SGD"], "single", batches, pooled=True).items():
        assert bool(value.weight.isfinite().all())
        assert bool((value.weight != first_weight(*TABLES[name])).any())

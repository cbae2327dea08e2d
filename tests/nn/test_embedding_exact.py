"""Training tables equals training the same rows in place, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from conftest import NEEDS_GPU
from embedding_reference import Squares, Trained, first_weight, random_ids, train_in_place, trained
from optimizer_cases import CASES, GPU_VARIANTS, VARIANTS, Case, make_optimizer
from reference import assert_same_content
from torch import Tensor, nn, optim

import speedtorch

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
STEPS = 40
Shapes = dict[str, tuple[int, int]]
"""Rows and columns of each table."""
ONE: Shapes = {"user": (97, 8)}
TABLES: Shapes = {"user": (97, 8), "item": (61, 8), "word": (53, 5)}
"""Two of one layout, one of another."""
Batch = dict[str, tuple[Tensor, Tensor]]
CAPACITY = 40
"""As many rows of a table as the ids of the largest batch, of which some are alike."""


def batches_of(overlap: float, shapes: Shapes, *, one_by_one: bool = False) -> list[Batch]:
    """Ids and offsets of each table; the bags may be empty, or have one id each."""
    random = torch.Generator().manual_seed(4)
    ids = {
        name: random_ids(rows, STEPS, overlap, seed=seed)
        for seed, (name, (rows, _)) in enumerate(shapes.items())
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


class Tables:
    """An Embedding of each table, or a collection that returns rows or bags."""

    def __init__(self, kind: str, shapes: Shapes, **settings: Any) -> None:
        self.kind, self.model = kind, nn.ModuleDict()
        weights = {name: first_weight(*shape) for name, shape in shapes.items()}
        settings["freeze"] = False
        if kind == "embeddings":
            make = speedtorch.Embedding.from_pretrained
            self.model.update({name: make(rows, **settings) for name, rows in weights.items()})
            return
        name = "EmbeddingBag" if kind == "bags" else "Embedding"
        config = getattr(speedtorch, f"{name}Config")
        configs = [config(*shape, name) for name, shape in shapes.items()]
        collection = getattr(speedtorch, f"{name}Collection")
        self.model["all"] = collection.from_pretrained(configs, weights, **settings)

    def ids(self, batch: Batch) -> dict[nn.Module, Any]:
        """What is looked up in each module."""
        if self.kind == "embeddings":
            return {self.model[name]: ids for name, (ids, _) in batch.items()}
        return {self.model["all"]: batch}

    def look_up(self, batch: Batch) -> dict[str, Tensor]:
        if self.kind == "embeddings":
            return {name: self.model[name](ids) for name, (ids, _) in batch.items()}
        found: Any = self.model["all"](batch)
        return {
            name: found[name] if self.kind == "bags" else found[name].values() for name in batch
        }

    def place(self, name: str) -> tuple[Any, slice]:
        """The module with a table's rows, and which of its rows they are."""
        if self.kind == "embeddings":
            return self.model[name], slice(None)
        group: Any = self.model["all"].group_of(name)  # type: ignore[operator]
        return group, group.ranges.range_of(name)


def train(
    case: Case,
    variant: str,
    batches: list[Batch],
    kind: str,
    shapes: Shapes = TABLES,
    *,
    device: str = "cpu",
    ahead: bool = False,
    ids_on: str = "cpu",
    **settings: Any,
) -> dict[str, Trained]:
    dense = case.make is not optim.SparseAdam
    losses = {name: Squares(width, device, dense=dense) for name, (_, width) in shapes.items()}
    tables = Tables(kind, shapes, device=device, **settings)
    first, *more = tables.model.parameters()
    scales = [loss.scale for loss in losses.values() if dense]
    optimizer = make_optimizer(case, variant, first, scales)
    for each in more:
        optimizer.add_param_group({"params": [each]})
    if case.rows:
        speedtorch.attach(optimizer, tables.model)
    loader: Iterable[Batch] = [
        {name: (ids.to(ids_on), offsets.to(ids_on)) for name, (ids, offsets) in batch.items()}
        for batch in batches
    ]
    if ahead:
        loader = speedtorch.prefetch(loader, tables.model, ids=tables.ids)
    for batch in loader:
        optimizer.zero_grad()
        rows = tables.look_up(batch)
        torch.stack([loss(rows[name]) for name, loss in losses.items()]).sum().backward()
        optimizer.step()
    result = {}
    for name, loss in losses.items():
        module, place = tables.place(name)
        module.flush()
        fields = {field: module.table[field][place] for field in module.table.fields}
        result[name] = trained(case, optimizer, module.weight, fields, loss.scale)
    return result


def train_all_in_place(
    case: Case,
    variant: str,
    batches: list[Batch],
    kind: str,
    shapes: Shapes = TABLES,
    device: str = "cpu",
) -> dict[str, Trained]:
    result = {}
    for name, (rows, width) in shapes.items():
        ids = [batch[name][0] for batch in batches]
        bags = [batch[name][1] for batch in batches] if kind == "bags" else []
        in_order = kind != "embeddings"
        result[name] = train_in_place(
            case, variant, width, device, rows, ids, bags, in_order=in_order
        )
    return result


_in_place: dict[tuple[Any, ...], dict[str, Trained]] = {}


def assert_same_as_in_place(
    case: Case, variant: str, kind: str, overlap: float, *, ahead: bool, **settings: Any
) -> None:
    shapes = ONE if kind == "embeddings" else TABLES
    batches, known = batches_of(overlap, shapes), (id(case), variant, overlap, kind)
    if known not in _in_place:  # The same with and without prefetch.
        _in_place[known] = train_all_in_place(case, variant, batches, kind, shapes)
    actual = train(case, variant, batches, kind, shapes, ahead=ahead, **settings)
    assert_same_content(actual, _in_place[known])


AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["at-once", "prefetch"])
COLLECTIONS = pytest.mark.parametrize("kind", ["rows", "bags"])
OVERLAPS = pytest.mark.parametrize("overlap", [0, 0.5, 1], ids=["apart", "half", "same"])
IDS_ON = pytest.mark.parametrize("ids_on", ["cpu", "cuda"])


@pytest.mark.dealt("overlap", "ahead")
@AHEAD
@OVERLAPS
@pytest.mark.parametrize(("case", "variant"), VARIANTS)
def test_training_equals_training_in_place_bit_for_bit(
    case: Case, variant: str, overlap: float, ahead: bool
) -> None:
    assert_same_as_in_place(case, variant, "embeddings", overlap, ahead=ahead)


# Not of each with each: that takes long, and another test has the rest for one optimizer.
@pytest.mark.dealt("overlap", "kind", "ahead")
@pytest.mark.parametrize(
    ("overlap", "kind", "ahead"),
    [(0, "rows", True), (0.5, "bags", False), (0.5, "bags", True), (1, "rows", True)],
    ids=["apart-rows-prefetch", "half-bags-at-once", "half-bags-prefetch", "same-rows-prefetch"],
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_training_a_collection_equals_training_in_place_bit_for_bit(
    case: Case, overlap: float, kind: str, ahead: bool
) -> None:
    assert_same_as_in_place(case, case.variants[0], kind, overlap, ahead=ahead)


@AHEAD
@COLLECTIONS
@OVERLAPS
def test_rows_and_bags_of_every_overlap_train_bit_for_bit(
    overlap: float, kind: str, ahead: bool
) -> None:
    assert_same_as_in_place(CASES["SGD"], "single", kind, overlap, ahead=ahead)


# Without prefetch what differs is that each exchange is one, which the next test has.
@pytest.mark.dealt("variant")
@pytest.mark.parametrize(("case", "variant"), VARIANTS)
def test_training_with_a_capacity_equals_training_in_place_bit_for_bit(
    case: Case, variant: str
) -> None:
    assert_same_as_in_place(case, variant, "embeddings", 0.5, ahead=True, capacity=CAPACITY)


# An exchange does not depend on the optimizer, whose every kind the test above has.
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[] if name == "Adam" else pytest.mark.nightly)
        for name, case in CASES.items()
    ],
)
def test_a_collection_with_a_capacity_trains_bit_for_bit(case: Case) -> None:
    assert_same_as_in_place(case, case.variants[0], "bags", 0.5, ahead=True, capacity=2 * CAPACITY)


@AHEAD
@pytest.mark.parametrize("full", [False, True], ids=["some-room", "full"])
@pytest.mark.parametrize("overlap", [0, 1], ids=["apart", "same"])
def test_every_overlap_and_a_full_capacity_train_bit_for_bit(
    overlap: float, full: bool, ahead: bool
) -> None:
    ids = [batch["user"][0] for batch in batches_of(overlap, ONE)]
    capacity = max(len(each.unique()) for each in ids) if full else CAPACITY
    case = CASES["AdamW"]
    assert_same_as_in_place(case, "fused", "embeddings", overlap, ahead=ahead, capacity=capacity)


@AHEAD
@pytest.mark.parametrize("width", [1, 3, 47, 100])
def test_every_width_trains_bit_for_bit(width: int, ahead: bool) -> None:
    case, shapes = CASES["AdamW"], {"user": (97, width)}
    batches = batches_of(0.5, shapes)
    expected = train_all_in_place(case, "fused", batches, "embeddings", shapes)
    actual = train(case, "fused", batches, "embeddings", shapes, ahead=ahead)
    assert_same_content(actual, expected)


def assert_same_on_a_gpu(case: Case, variant: str, overlap: float = 0.5, **settings: Any) -> None:
    batches = batches_of(overlap, ONE)
    expected = train_all_in_place(case, variant, batches, "embeddings", ONE, "cuda")
    actual = train(case, variant, batches, "embeddings", ONE, device="cuda", **settings)
    assert_same_content(actual, expected)


@NEEDS_GPU
@pytest.mark.usefixtures("deterministic")
@pytest.mark.dealt("overlap", "ids_on", "capacity", "ahead")
@AHEAD
@pytest.mark.parametrize("capacity", [None, CAPACITY], ids=["counted", "capacity"])
@IDS_ON
@OVERLAPS
@pytest.mark.parametrize(("case", "variant"), GPU_VARIANTS)
def test_training_on_a_gpu_equals_training_in_place_on_it_bit_for_bit(
    case: Case, variant: str, overlap: float, ids_on: str, capacity: int | None, ahead: bool
) -> None:
    given = {"ahead": ahead, "ids_on": ids_on, "capacity": capacity}
    assert_same_on_a_gpu(case, variant, overlap, **given)


@NEEDS_GPU
@pytest.mark.usefixtures("deterministic")
@AHEAD
@pytest.mark.parametrize("memory", ["managed", "registered", "plain", "cuda"])
def test_every_kind_of_memory_trains_the_same_on_a_gpu(memory: str, ahead: bool) -> None:
    assert_same_on_a_gpu(CASES["Adam"], "fused", ahead=ahead, memory=memory)


# A bag of one id is the row of a lookup: bags of more have no counterpart whose order of adding is
# the same, so these are compared with and without prefetch.
@NEEDS_GPU
@pytest.mark.dealt("overlap", "ids_on", "capacity", "kind", "ahead")
@AHEAD
@COLLECTIONS
@pytest.mark.parametrize("capacity", [None, 2 * CAPACITY], ids=["counted", "capacity"])
@IDS_ON
@OVERLAPS
@pytest.mark.parametrize(("case", "variant"), GPU_VARIANTS)
def test_training_on_a_gpu_equals_training_embeddings_bit_for_bit(
    case: Case,
    variant: str,
    overlap: float,
    ids_on: str,
    capacity: int | None,
    kind: str,
    ahead: bool,
) -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    batches = batches_of(overlap, TABLES, one_by_one=True)
    expected = train(case, variant, batches, "embeddings", device="cuda", ids_on=ids_on)
    given: dict[str, Any] = {"ahead": ahead, "ids_on": ids_on, "capacity": capacity}
    assert_same_content(train(case, variant, batches, kind, device="cuda", **given), expected)


@NEEDS_GPU
@IDS_ON
@OVERLAPS
def test_bags_on_a_gpu_train_alike_with_and_without_prefetch(overlap: float, ids_on: str) -> None:
    case, batches = CASES["Adam"], batches_of(overlap, TABLES)
    given: dict[str, Any] = {"device": "cuda", "ids_on": ids_on}
    results = [
        train(case, "fused", batches, "bags", ahead=ahead, **given) for ahead in (False, True)
    ]
    assert_same_content(results[1], results[0])


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_the_reference_moves_rows_and_changes_no_other_row(name: str) -> None:
    # Guards the tests above: one that trained nothing, or grew without end, would equal anything.
    batches = batches_of(0.5, TABLES)[:3]
    after = train_all_in_place(CASES[name], "single", batches, "bags")
    for table, (rows, width) in TABLES.items():
        touched = torch.zeros(rows, dtype=torch.bool)
        touched[torch.cat([batch[table][0] for batch in batches])] = True
        changed = (after[table].weight != first_weight(rows, width)).any(1)
        assert torch.equal(changed, touched)
        assert bool(after[table].weight.isfinite().all())

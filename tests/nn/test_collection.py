"""Collections of tables have the arguments and results of torchrec's, and the rows of torch's."""

from __future__ import annotations

import copy
import math
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import NEEDS_GPU
from interrupts import every_interrupt
from keyed_ids import Deduplicated, KeyedIds, Strided
from loops import sgd_step
from reference import FLOATS, assert_same_bytes, assert_same_content, dtype_name
from torch import Tensor, nn, optim
from torch._subclasses.fake_tensor import FakeTensorMode

import speedtorch
from speedtorch import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from speedtorch.nn.table_group import TableGroup
from speedtorch.nn.table_ranges import TableRanges

ROWS = {"user": 20, "item": 30, "word": 25}
COLUMNS = {"user": 4, "item": 4, "word": 3}
BAGS = {
    "user": [[3], [19], [3]],
    "seen": [[1, 2, 29], [], [4, 4]],
    "bought": [[7, 0], [7], [5]],
    "word": [[24], [0, 1, 2, 0], []],
}
"""Ids of each feature, three samples."""
TABLE_OF = {"user": "user", "seen": "item", "bought": "item", "word": "word"}
COLLECTIONS = pytest.mark.parametrize("pooled", [False, True], ids=["rows", "bags"])


def configs(pooled: bool = True, names: Any = tuple(ROWS), **settings: Any) -> list[Any]:
    """Of tables in two layouts, one with two features."""
    kind = EmbeddingBagConfig if pooled else EmbeddingConfig
    features = {"item": ["seen", "bought"]}
    return [
        kind(ROWS[name], COLUMNS[name], name, feature_names=features.get(name, []), **settings)
        for name in names
    ]


def made(pooled: bool = True, device: str = "cpu", **settings: Any) -> Any:
    torch.manual_seed(0)
    kind = EmbeddingBagCollection if pooled else EmbeddingCollection
    return kind(configs(pooled), device=device, **settings)


def one(rows: int = 10, columns: int = 2, name: str = "a", device: str = "cpu", **k: Any) -> Any:
    return EmbeddingBagCollection([EmbeddingBagConfig(rows, columns, name, **k)], device=device)


def names_of(collection: Any) -> list[str]:
    return [key.split(".")[1] for key in collection.state_dict()]


def weights_of(collection: Any) -> dict[str, Tensor]:
    return {name: collection.table_weight(name).cpu().clone() for name in names_of(collection)}


def held_by(collection: Any) -> list[list[int]]:
    """The ids of the rows that a step holds, group by group."""
    groups = [module for module in collection.modules() if isinstance(module, TableGroup)]
    return [group.step_ids.tolist() for group in groups]


# ------------------------------------------------------------------------------------------------
# Lookups that test_collection_lookups.py does not draw


def test_weights_are_ignored_unless_it_is_weighted() -> None:
    keyed = KeyedIds.of({"a": [[1]]}, weights=torch.tensor([5.0]))
    ours = one()
    assert_same_bytes(ours(keyed)["a"].detach(), ours.table_weight("a")[[1]])


def test_a_result_has_the_offsets_of_its_lookup() -> None:
    ours = EmbeddingCollection([EmbeddingConfig(9, 2, "a")])
    ids, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3])
    found = ours({"a": (ids, offsets)})
    offsets.copy_(torch.tensor([0, 2, 3]))
    assert found["a"].lengths().tolist() == [1, 2]


def test_equal_tensors_that_are_offsets_of_another_feature_are_other_ids(device: str) -> None:
    tables = [EmbeddingBagConfig(9, 2, "a"), EmbeddingBagConfig(9, 2, "b")]
    ours = EmbeddingBagCollection(tables, device=device)
    x, y, z = torch.tensor([5]), torch.tensor([0, 0, 1]), torch.tensor([0, 3])
    assert ours({"a": (x, y), "b": z})["a"].shape == (2, 2)
    found = ours({"a": x, "b": (y, z)})
    a, b = ours.table_weight("a"), ours.table_weight("b")
    assert_same_bytes(found["a"].detach().cpu(), a[x])
    assert_same_bytes(found["b"].detach().cpu(), (b[0] + b[0] + b[1])[None])


# ------------------------------------------------------------------------------------------------
# Configs and first values


def test_an_init_fn_sees_the_shape_of_its_table_alone() -> None:
    tables = [
        EmbeddingConfig(30, 6, "a", init_fn=nn.init.xavier_uniform_),
        EmbeddingConfig(3000, 6, "b", init_fn=nn.init.zeros_),
    ]
    ours = EmbeddingCollection(tables)
    assert len(list(ours.parameters())) == 1
    bound, largest = math.sqrt(6 / 36), float(ours.table_weight("a").abs().max())
    assert 0.9 * bound < largest <= bound
    assert not ours.table_weight("b").any()


def test_first_values_are_uniform_in_the_bounds_of_each_config() -> None:
    bound = math.sqrt(1 / 400)
    bounds: dict[str, Any] = {"a": (None, None), "b": (0.0, None), "c": (5.0, 6.0)}
    configs = [
        EmbeddingConfig(400, 50, name, weight_init_min=low, weight_init_max=high)
        for name, (low, high) in bounds.items()
    ]
    ours = EmbeddingCollection(configs)
    for _ in range(2):
        before = weights_of(ours)
        for (low, high), rows in zip(bounds.values(), before.values(), strict=True):
            low, high = -bound if low is None else low, bound if high is None else high
            most = (high - low) / 100
            assert low <= rows.min() < low + most and high - most < rows.max() <= high
            assert abs(float(rows.mean()) - (low + high) / 2) < 2 * most
        ours.reset_parameters()
        assert not any(torch.equal(rows, before[name]) for name, rows in weights_of(ours).items())


def test_torchs_seed_makes_first_values_repeatable() -> None:
    first, second = weights_of(made()), weights_of(made())
    assert_same_content(first, second)
    assert not torch.equal(first["user"], first["item"][:20])


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_name)
def test_data_type_is_a_dtype_or_has_torchrecs_name(dtype: torch.dtype) -> None:
    names = {"float16": "FP16", "bfloat16": "BF16", "float32": "FP32", "float64": "FP64"}
    for kind in (dtype, names[dtype_name(dtype)]):
        assert one(data_type=kind).table_weight("a").dtype == dtype


def test_the_configs_have_the_names_of_their_features() -> None:
    bags, rows = configs(), configs(pooled=False)
    bag_configs = EmbeddingBagCollection(bags).embedding_bag_configs()
    row_configs = EmbeddingCollection(rows).embedding_configs()
    for given, found in ((bags, bag_configs), (rows, row_configs)):
        assert [each.feature_names for each in given] == [[], ["seen", "bought"], []]
        assert [each.feature_names for each in found] == [["user"], ["seen", "bought"], ["word"]]
        assert found[1] is given[1]
    assert EmbeddingBagCollection(bags, True).is_weighted() is True
    assert EmbeddingBagCollection(bags).is_weighted() is False


# ------------------------------------------------------------------------------------------------
# Groups


def test_tables_of_one_layout_and_group_are_one_parameter_and_one_table() -> None:
    ours = made()
    assert len(list(ours.parameters())) == 2
    assert ours.group_of("user") is ours.group_of("item")
    assert ours.group_of("user") is not ours.group_of("word")
    assert ours.group_of("user").table.rows == 50
    others = [EmbeddingConfig(9, 2, "a"), EmbeddingConfig(9, 2, "b", data_type=torch.float16)]
    others += [EmbeddingConfig(9, 2, name, group="slowly") for name in "cd"]
    ours = EmbeddingCollection(others)
    assert len(list(ours.parameters())) == 3
    assert ours.group_of("c") is ours.group_of("d")


@NEEDS_GPU
def test_features_that_are_planned_ahead_are_made_rows_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also those of several lookups of a batch. On the CPU rows are known by their values."""
    tables, read = one(device="cuda"), []
    make = TableRanges._made
    monkeypatch.setattr(TableRanges, "_made", lambda *given: read.append(1) or make(*given))
    batches = [[{"a": torch.tensor([k, 3 + j])} for j in range(3)] for k in range(5)]
    for batch in speedtorch.prefetch(batches, tables, ids=lambda batch: batch):
        sum(tables(each).values().sum() for each in batch).backward()
    assert len(read) == 15


def test_offsets_that_are_kept_are_of_no_fake_mode() -> None:
    ids = {"a": torch.tensor([[1, 2], [3, 4]])}
    with FakeTensorMode() as mode, pytest.raises(RuntimeError):
        one()({"a": mode.from_tensor(ids["a"])})
    assert one()(ids).values().shape == (2, 2)


def test_several_lookups_of_a_step_are_prefetched_as_a_list() -> None:
    ours, copied = (EmbeddingCollection([EmbeddingConfig(9, 2, "a")]) for _ in range(2))
    copied.load_state_dict(ours.state_dict())
    batches = [({"a": torch.tensor([k, 2])}, {"a": torch.tensor([k + 1])}) for k in range(5)]
    for first, second in speedtorch.prefetch(batches, ours, ids=list):
        sgd_step(ours, ours(first).rows().sum() + ours(second).rows().square().sum())
    for first, second in batches:
        sgd_step(copied, copied(first).rows().sum() + copied(second).rows().square().sum())
    assert_same_bytes(ours.table_weight("a"), copied.table_weight("a"))


@pytest.mark.parametrize("how", ["frozen", "rate", "optimizer"])
def test_a_group_is_frozen_or_trained_by_itself(how: str, device: str) -> None:
    tables = [EmbeddingBagConfig(9, 2, "a"), EmbeddingBagConfig(9, 2, "b", group="other")]
    ours = EmbeddingBagCollection(tables, device=device)
    a, b = (ours.group_of(name) for name in "ab")
    settings = [{"params": [a.weight], "lr": 1.0}, {"params": [b.weight], "lr": 0.25}]
    steps: list[optim.Optimizer] = [optim.SGD(settings)]
    if how == "optimizer":
        steps = [optim.Adam([a.weight], lr=1.0), optim.SGD([b.weight], lr=0.25)]
        speedtorch.attach(steps[0], a)
    a.weight.requires_grad_(how != "frozen")
    expected = weights_of(ours)
    expected["a"][1:3] -= {"frozen": 0.0}.get(how, 1.0)
    expected["b"][1:3] -= 0.25
    ours({"a": torch.tensor([1, 2]), "b": torch.tensor([1, 2])}).values().sum().backward()
    for each in steps:
        each.step()
    torch.testing.assert_close(weights_of(ours), expected)


# ------------------------------------------------------------------------------------------------
# As a module


@COLLECTIONS
def test_rows_of_torchs_modules_are_loaded_and_load_ours(pooled: bool) -> None:
    """By the names that torchrec has for them."""
    kind, first = (nn.EmbeddingBag, "embedding_bags") if pooled else (nn.Embedding, "embeddings")
    tables = nn.ModuleDict({name: kind(ROWS[name], COLUMNS[name]) for name in ROWS})
    theirs, ours = nn.ModuleDict({first: tables}), made(pooled)
    given = copy.deepcopy(theirs.state_dict())
    own = {f"{first}.{name}.weight": rows for name, rows in weights_of(ours).items()}
    assert [*ours.state_dict()] == [*given] == [*own]
    theirs.load_state_dict(ours.state_dict())
    assert_same_content(theirs.state_dict(), own)
    ours.load_state_dict(given)
    assert_same_content(ours.state_dict(), given)


def test_a_state_dict_of_other_tables_is_refused_by_name() -> None:
    ours = made()
    state = ours.state_dict()
    more = [f"embedding_bags.{name}.weight" for name in ("film", "user+item")]
    state |= dict.fromkeys(more, state.pop("embedding_bags.item.weight"))
    unexpected = 'Unexpected key.*"embedding_bags.film.weight", "embedding_bags.user.item.weight"'
    for message in ('Missing key.*"embedding_bags.item.weight"', unexpected):
        with pytest.raises(RuntimeError, match=message):
            ours.load_state_dict(state)
    found = ours.load_state_dict(state, strict=False)
    assert found.missing_keys == ["embedding_bags.item.weight"]
    assert found.unexpected_keys == more


@COLLECTIONS
def test_from_pretrained_copies_tensors_tables_and_files(pooled: bool, tmp_path: Path) -> None:
    given = {name: torch.randn(ROWS[name], COLUMNS[name]) for name in ROWS}
    tables = {name: speedtorch.HostTable(*rows.shape) for name, rows in given.items()}
    for name, rows in given.items():
        tables[name]["weight"].copy_(rows)
    path = tmp_path / "word.safetensors"
    tables["word"].save(path)
    kind = EmbeddingBagCollection if pooled else EmbeddingCollection
    embeddings = {"word": path, "item": tables["item"], "user": given["user"]}
    ours: Any = kind.from_pretrained(configs(pooled), embeddings)
    for name, rows in given.items():
        assert_same_bytes(ours.table_weight(name), rows)
    assert not any(parameter.requires_grad for parameter in ours.parameters())
    trained: Any = kind.from_pretrained(configs(pooled), embeddings, freeze=False)
    assert all(parameter.requires_grad for parameter in trained.parameters())


def test_a_deepcopy_trains_alone(device: str) -> None:
    ours, keyed = made(device=device), KeyedIds.of(BAGS, device)
    sgd_step(ours, ours(keyed).values().sum())
    before = weights_of(ours)
    other = copy.deepcopy(ours)
    sgd_step(other, other(keyed).values().sum())
    for name, rows in weights_of(ours).items():
        assert_same_bytes(rows, before[name])
        assert not torch.equal(other.table_weight(name).cpu(), rows)
    assert other.embedding_bag_configs() == ours.embedding_bag_configs()


def test_a_collection_made_in_inference_mode_can_be_trained(device: str) -> None:
    with torch.inference_mode():
        ours = made(device=device)
    before = weights_of(ours)
    sgd_step(ours, ours(KeyedIds.of(BAGS, device)).values().sum())
    assert not torch.equal(weights_of(ours)["user"], before["user"])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = EmbeddingBagCollection(configs())
        self.layer = nn.Linear(15, 1)

    def forward(self, features: Any) -> Tensor:
        found = self.tables(features)
        result: Tensor = self.layer(found.values()) + found["word"].sum()
        return result


@pytest.mark.parametrize(
    "features",
    [KeyedIds.of(BAGS), {key: torch.tensor([[3, 1], [2, 2]]) for key in BAGS}],
    ids=["keyed", "dict"],
)
def test_a_compiled_model_trains_as_an_eager_one(features: Any) -> None:
    eager, other = Model(), Model()
    compiled = torch.compile(other, backend="eager")
    for _ in range(3):
        sgd_step(eager, eager(features).sum())
        sgd_step(other, compiled(features).sum())
    assert_same_content(other.state_dict(), eager.state_dict())


def test_compiled_rows_are_those_of_eager_mode() -> None:
    ours = made(False)
    compiled = torch.compile(lambda f: ours(f)["seen"].values() * 2, backend="eager")
    keyed = KeyedIds.of(BAGS)
    assert_same_bytes(compiled(keyed).detach(), (ours(keyed)["seen"].values() * 2).detach())


@NEEDS_GPU
def test_a_collection_moves_between_devices() -> None:
    ours, keyed = made(), KeyedIds.of(BAGS)
    for place in ("cuda", "cpu", "cuda"):
        before = weights_of(ours)
        ours.to(place)
        found = ours(keyed)
        assert found.values().device.type == place
        sgd_step(ours, found.values().sum())
        torch.testing.assert_close(weights_of(ours)["user"][19], before["user"][19] - 0.5)


def test_extra_repr_says_the_tables_and_where_they_are() -> None:
    assert "user: 20, item: 30; columns=4, device=cpu, memory=auto)" in repr(made())


def test_a_view_of_a_table_is_updated_by_flush_and_written_to(device: str) -> None:
    ours, keyed = made(device=device), KeyedIds.of(BAGS, device)
    rows = ours.table_weight("user")
    before = rows.clone()
    sgd_step(ours, ours(keyed).values().sum())
    ours.flush()
    assert (rows != before).any(1).nonzero().flatten().tolist() == [3, 19]
    sgd_step(ours, ours(keyed).values().sum())
    ours.table_weight("user").fill_(3.0)
    assert_same_bytes(ours(keyed)["user"].detach().cpu(), torch.full((3, 4), 3.0))


# ------------------------------------------------------------------------------------------------
# announce and prefetch


def test_announced_rows_are_loaded_by_the_first_lookup(device: str) -> None:
    ours = made(device=device)
    more = {key: [[(each + 1) % 20 for each in bag] for bag in bags] for key, bags in BAGS.items()}
    one, two = KeyedIds.of(BAGS, device), KeyedIds.of(more, device)
    ours.announce(one, two)
    first = ours(one)  # its graph keeps the step
    held = held_by(ours)
    ours(two)
    assert held_by(ours) == held and all(held)
    assert first.values().requires_grad


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("capacity", [None, 5])
def test_rows_of_an_interrupted_announce_are_in_no_step(capacity: int | None, every: int) -> None:
    """With weight decay a step moves rows without a gradient, if it takes them for its own."""
    given, good = ({key: torch.tensor([n, n + 2]) for key in TABLE_OF} for n in (5, 11))

    def begun() -> tuple[Any, optim.Optimizer]:
        tables = made(capacity=capacity)
        return tables, optim.SGD(tables.parameters(), lr=0.5, weight_decay=0.5)

    def train(tables: Any, sgd: optim.Optimizer) -> dict[str, Tensor]:
        sgd.zero_grad()
        tables.announce(good)
        tables(good).values().sum().backward()
        sgd.step()
        return weights_of(tables)

    expected = train(*begun())
    for training, lines in every_interrupt(
        begun, lambda made: made[0].announce(given), every=every
    ):
        assert_same_content(train(*training), expected), lines.where


def trained_beside_an_embedding(device: str, ahead: str = "") -> dict[str, Tensor]:
    tables = made(device=device)
    words = speedtorch.Embedding.from_pretrained(torch.ones(21, 15), freeze=False, device=device)
    model = nn.ModuleList([tables, words])
    adam = optim.Adam(model.parameters(), lr=0.1)
    speedtorch.attach(adam, model)
    drawn = [
        {key: [[(row + n) % 20 for row in b] for b in BAGS[key]] for key in BAGS} for n in range(20)
    ]
    loader: Any = [
        (KeyedIds.of(each, device), torch.tensor([n, n + 1, 0])) for n, each in enumerate(drawn)
    ]
    if ahead == "both":
        loader = speedtorch.prefetch(loader, model, ids=lambda b: {tables: b[0], words: b[1]})
    elif ahead == "the collection":
        loader = speedtorch.prefetch(loader, tables, ids=lambda b: b[0])
    assert len(loader) == 20
    for keyed, ids in loader:
        adam.zero_grad()
        (tables(keyed).values() * words(ids)).sum().backward()
        adam.step()
    return {name: rows.clone() for name, rows in model.state_dict().items()}


@pytest.mark.parametrize("ahead", ["both", "the collection"])
def test_prefetch_of_a_collection_beside_an_embedding(ahead: str, device: str) -> None:
    expected = trained_beside_an_embedding(device)
    assert_same_content(trained_beside_an_embedding(device, ahead), expected)


def test_prefetch_names_the_feature_of_bad_ids_when_the_batches_before_are_through(
    device: str,
) -> None:
    ours = one()
    ours.to(device)
    batches = [{"a": torch.tensor([each], device=device)} for each in (1, 2, 10, 3)]
    seen = []
    with pytest.raises(IndexError, match="feature 'a': id 10 at position 0"):
        for features in speedtorch.prefetch(batches, ours, ids=lambda batch: batch):
            seen.append(ours(features).values())
    assert len(seen) == 2


# ------------------------------------------------------------------------------------------------
# Bad ids


def bad_ids(ours: Any, features: Any, how: str) -> None:
    if how == "announce":
        ours.announce(features)
    elif how == "no_grad":
        with torch.no_grad():
            ours(features).values()
    ours(features).values()


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("how", ["training", "no_grad", "announce"])
@pytest.mark.parametrize(
    ("feature", "bad"),
    [
        *(("user", bad) for bad in (20, -1, 2**31 - 1, -(2**31))),
        *[("seen", -1), ("bought", 30), ("word", 25)],
    ],
)
def test_a_bad_id_is_named_and_no_row_is_touched(
    feature: str, bad: int, how: str, weighted: bool, device: str
) -> None:
    def given(bags: dict[str, list[list[int]]]) -> KeyedIds:
        count = sum(len(bag) for own in bags.values() for bag in own)
        return KeyedIds.of(bags, device, weights=torch.ones(count, device=device))

    ours, good = (made(device=device, is_weighted=weighted) for _ in range(2))
    keyed, table = given({**BAGS, feature: [[3], [bad], [bad]]}), TABLE_OF[feature]
    message = (
        f"feature {feature!r}: id {bad} at position 1 is out of range for table {table!r} of"
        f" {ROWS[table]} rows (2 of 3 ids are out of range); no row was moved"
    )
    for _ in range(2):  # looked up again it is an error again
        with pytest.raises(IndexError, match=f"^{re.escape(message)}$"):
            bad_ids(ours, keyed, how)
        if device == "cpu":
            assert held_by(ours) == [[], []]
    for collection in (ours, good):
        sgd_step(collection, collection(given(BAGS)).values().sum())
    assert_same_content(weights_of(ours), weights_of(good))


# ------------------------------------------------------------------------------------------------
# Every other error


def keyed(offsets: list[int], values: Tensor | None = None) -> KeyedIds:
    ids = torch.zeros(3, dtype=torch.int64) if values is None else values
    return KeyedIds(["a", "b"], ids, torch.tensor(offsets))


ZERO = torch.tensor([0])
UNEQUAL = "features must have equal numbers of samples, got {'a': 2, 'b': 1}"
PARTS = r"expected \(ids, offsets\) or \(ids, offsets, weights\)"
ENDS = "offsets must begin with 0, never decrease and end with the number of ids,"
BAD_FEATURES: dict[type[Exception], list[tuple[Any, str]]] = {
    KeyError: [
        ({"x": ZERO}, r"features \['a', 'b'\] are missing. The input has \['x'\]"),
        ({"a": ZERO, "b": ZERO, "flim": ZERO}, r"no table has the features \['flim'\]"),
    ],
    TypeError: [
        (ZERO, "expected a dict of features or a keyed jagged tensor, got Tensor. Pass {'a': ids,"),
        ({"a": [1, 2], "b": ZERO}, "'a': expected an int32 or int64 tensor"),
        (
            {"a": ZERO.float(), "b": ZERO},
            "'a': expected a dense int32 or int64 tensor, got torch.float32",
        ),
        (
            keyed([0, 1, 2], torch.zeros(2)),
            "values: expected a dense int32 or int64 tensor, got torch.float32",
        ),
        (
            {"a": (ZERO, torch.tensor([0.0, 1.0])), "b": ZERO},
            "'a': offsets: expected a dense int32 or int64 tensor",
        ),
    ],
    ValueError: [
        (Strided.of({"a": [[0], [0]], "b": [[0], [0]]}), UNEQUAL),
        ({"a": torch.tensor([0, 0]), "b": ZERO}, UNEQUAL),
        (keyed([0, 1, 2, 3]), "3 bags cannot be divided among 2 features"),
        ({"a": (), "b": ZERO}, f"'a': {PARTS}"),
        ({"a": ZERO, "b": (ZERO, torch.tensor([0, 1]), None, None)}, f"'b': {PARTS}"),
        (
            {"a": torch.tensor(0), "b": ZERO},
            r"'a': ids must be \[ids\] \(or \[samples, ids of each\]\), got the shape \[\]",
        ),
        (
            {"a": ZERO, "b": torch.zeros(1, 1, 1, dtype=torch.int64)},
            r"'b': ids must be .*, got the shape \[1, 1, 1\]",
        ),
        (
            {"a": (ZERO[None], torch.tensor([0, 1])), "b": ZERO},
            r"'a': ids must be \[ids\], got the shape \[1, 1\]",
        ),
        (
            {"a": (ZERO, torch.tensor([[0, 1]])), "b": ZERO},
            r"'a': offsets must be \[samples \+ 1\], got \[1, 2\]",
        ),
        (
            {"a": (ZERO[:0], ZERO[:0]), "b": ZERO[:0]},
            r"'a': offsets must be \[samples \+ 1\], got \[0\]",
        ),
        (
            {"a": (ZERO, torch.tensor([1, 1])), "b": ZERO},
            f"'a': {ENDS} 1. The first is 1 and the last is 1",
        ),
        (keyed([0, 1, 2]), f"{ENDS} 3. The first is 0 and the last is 2"),
        (
            {"a": (torch.tensor([0, 0]), torch.tensor([0, 2, 1, 2])), "b": torch.zeros(3).long()},
            f"'a': {ENDS} 2",
        ),
    ],
    NotImplementedError: [
        (Deduplicated.of({"a": [[3]], "b": [[0]]}), "inverse_indices are .*index_select"),
    ],
}


@COLLECTIONS
@pytest.mark.parametrize(
    ("error", "features", "message"),
    [(error, *row) for error, rows in BAD_FEATURES.items() for row in rows],
)
def test_bad_features_are_an_error_and_no_row_moves(
    error: type[Exception], features: Any, message: str, pooled: bool
) -> None:
    kind = EmbeddingBagCollection if pooled else EmbeddingCollection
    ours: Any = kind([EmbeddingBagConfig(9, 2, "a"), EmbeddingBagConfig(9, 2, "b")])
    for call in (ours, ours.announce):
        with pytest.raises(error, match=f"{kind.__name__}: {message}"):
            call(features)
    assert held_by(ours) == [[]]


@pytest.mark.filterwarnings("ignore:.*")  # torch's, that nested tensors are a prototype
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_ids_are_an_error_with_the_remedy(layout: torch.layout) -> None:
    ids = torch.nested.nested_tensor([ZERO, ZERO], layout=layout)
    with pytest.raises(TypeError, match=r"'a': .* got a nested tensor. Pass its values\(\)"):
        EmbeddingBagCollection([EmbeddingBagConfig(9, 2, "a")])({"a": ids})


def two(rows: Any) -> Any:
    return EmbeddingCollection.from_pretrained([EmbeddingConfig(9, 2, k) for k in "ab"], rows)


def of_a(**settings: Any) -> Any:
    return EmbeddingCollection([EmbeddingConfig(9, 2, "a", **settings)])


def weighted(features: Any) -> Any:
    return EmbeddingBagCollection([EmbeddingBagConfig(9, 2, "a")], is_weighted=True)(features)


def prefetch_a_group(ours: Any) -> None:
    next(iter(speedtorch.prefetch([ZERO], ours, ids=lambda ids: {ours.group_of("a"): ids})))


NINE = torch.zeros(9, 2)
NO_NAME = "tables: expected a table name without dots, got"
NO_WEIGHT = "is_weighted needs a weight for each id, got None"
NOT_THE_SHAPE = "weights must have the shape of the ids,"
ERRORS: dict[type[Exception], list[tuple[Any, str]]] = {
    ValueError: [
        (lambda: one(name=""), f"{NO_NAME} ''"),
        (lambda: one(name="a.b"), f"{NO_NAME} 'a.b'"),
        (lambda: one(name=3), f"{NO_NAME} 3"),  # type: ignore[arg-type]
        (lambda: one(rows=0), "a: num_embeddings must be an int of 1 or more, got 0"),
        (lambda: one(rows=1.5), "a: num_embeddings must be an int of 1 or more, got 1.5"),  # type: ignore[arg-type]
        (lambda: one(columns=-1), "a: embedding_dim must be an int of 1 or more, got -1"),
        (lambda: one(pooling="max"), "a: pooling must be 'sum' or 'mean', got 'max'"),
        (
            lambda: one(weight_init_min=1.0, weight_init_max=0.0),
            r"a: weight_init_min \(1.0\) exceeds weight_init_max \(0.0\)",
        ),
        (lambda: one(feature_names=["x", "y", "x"]), "a: feature_names has 'x' twice"),
        (lambda: of_a(group="x.y"), "a: group must be a name without dots, got 'x.y'"),
        (lambda: EmbeddingCollection([]), "EmbeddingCollection: tables: expected one or more"),
        (
            lambda: EmbeddingCollection([EmbeddingConfig(9, 2, "a"), EmbeddingConfig(9, 3, "a")]),
            "EmbeddingCollection: two tables have the name 'a'",
        ),
        (
            lambda: EmbeddingBagCollection([EmbeddingBagConfig(9, 2, "a", pooling="mean")], True),
            "a: is_weighted needs pooling='sum'",
        ),
        (
            lambda: made(False)(KeyedIds.of(BAGS)).rows(),
            "the tables differ in columns. Read features by name",
        ),
        (
            lambda: two({"a": NINE, "c": NINE}),
            r"embeddings: expected \['a', 'b'\]; missing or unknown: \['b', 'c'\]",
        ),
        (lambda: two({"a": NINE, "b": NINE[1:]}), "size mismatch for b"),
        (lambda: prefetch_a_group(one()), "Embeddings of the model, got another TableGroup"),
        (lambda: weighted({"a": ZERO}), f"'a': {NO_WEIGHT}"),
        (
            lambda: weighted({"a": (torch.tensor([0, 0]), None, torch.ones(3))}),
            rf"'a': {NOT_THE_SHAPE} \[2\], got \[3\]",
        ),
        (
            lambda: weighted(KeyedIds.of({"a": [[0]]}, weights=torch.ones(1, 1))),
            rf"{NOT_THE_SHAPE} \[1\], got \[1, 1\]",
        ),
    ],
    KeyError: [
        (lambda: one()({"a": ZERO})["b"], r"'b' is not one of the features \["),
        (lambda: of_a()({"a": ZERO})["b"], r"'b' is not one of the features \["),
        (lambda: one().table_weight("b"), r"'b' is not one of the tables \['a'\]"),
        (lambda: one().group_of("b"), r"'b' is not one of the tables \['a'\]"),
    ],
    TypeError: [
        (lambda: two({"a": NINE, "b": [1]}), "b: expected a tensor, got list"),
        (
            lambda: pickle.dumps(one()),
            "EmbeddingBagCollection cannot be pickled.* the rows of its tables. Save model.state_",
        ),
    ],
    RuntimeError: [
        (
            lambda: one().load_state_dict({"embedding_bags.a.weight": torch.zeros(11, 2)}),
            r"size mismatch for embedding_bags.a.weight: .* \(11, 2\) .* \(10, 2\)",
        ),
    ],
}


@pytest.mark.parametrize(
    ("error", "call", "message"), [(e, *row) for e, rows in ERRORS.items() for row in rows]
)
def test_other_errors_name_what_is_wrong(error: type[Exception], call: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_configs_may_be_an_iterator() -> None:
    given: Any = iter(configs())
    assert names_of(EmbeddingBagCollection(given)) == list(ROWS)


def test_a_capacity_that_is_too_small_is_reported_with_the_tables(device: str) -> None:
    names = [f"table{k}" for k in range(5)]
    tables = speedtorch.EmbeddingCollection(
        [speedtorch.EmbeddingConfig(10, 4, name) for name in names], device, capacity=3
    )
    features = {name: torch.tensor([1, 2]) for name in names}
    with pytest.raises(
        RuntimeError, match=r"tables 'table0', 'table1', 'table2' and 2 more: a step"
    ):
        tables(features)
        tables.flush()


@NEEDS_GPU
def test_a_bad_id_that_a_gpu_finds_is_reported_with_feature_and_table() -> None:
    for capacity in (None, 5):
        tables = speedtorch.EmbeddingCollection(
            [speedtorch.EmbeddingConfig(10, 4, name) for name in "ab"], "cuda", capacity=capacity
        )
        ids = torch.tensor([1, 10], device="cuda")
        with pytest.raises(IndexError, match="feature 'b': id 10 at position 1 .* table 'b' of 10"):
            tables({"a": ids[:1].repeat(2), "b": ids})
            torch.cuda.synchronize()
            tables.flush()

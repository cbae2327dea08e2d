"""Collections of tables have the arguments and results of torchrec's, and the rows of torch's."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import NEEDS_GPU
from keyed_ids import KeyedIds
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

DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]
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
Collection = EmbeddingBagCollection | EmbeddingCollection


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


def plain(collection: Any, mode: str = "sum", device: str = "cpu") -> dict[str, nn.EmbeddingBag]:
    """torch's module of each table, with the same rows."""
    return {
        name: nn.EmbeddingBag.from_pretrained(
            collection.table_weight(name).to(device).clone(), freeze=False, mode=mode
        )
        for name in names_of(collection)
    }


def jagged(bags: list[list[int]], device: str = "cpu") -> tuple[Tensor, Tensor]:
    keyed = KeyedIds.of({"": bags}, device)
    return keyed.values(), keyed.offsets()


def weights_of(collection: Any) -> dict[str, Tensor]:
    return {name: collection.table_weight(name).cpu().clone() for name in names_of(collection)}


def held_by(collection: Any) -> list[list[int]]:
    """The ids of the rows that a step holds, group by group."""
    groups = [module for module in collection.modules() if isinstance(module, TableGroup)]
    return [group.step_ids.tolist() for group in groups]


# ------------------------------------------------------------------------------------------------
# What is looked up


@pytest.mark.parametrize("trains", [True, False], ids=["training", "no_grad"])
@pytest.mark.parametrize("ids_on", DEVICES)
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=dtype_name)
def test_bags_are_those_of_plain_tables(
    mode: str, dtype: torch.dtype, device: str, ids_on: str, trains: bool
) -> None:
    ours = EmbeddingBagCollection(configs(pooling=mode), device=device)
    theirs = plain(ours, mode, device)
    with torch.set_grad_enabled(trains):
        found = ours(KeyedIds.of(BAGS, ids_on, dtype))
    for feature, bags in BAGS.items():
        ids, offsets = jagged(bags, device)
        expected = theirs[TABLE_OF[feature]](ids, offsets[:-1])
        if device == "cpu":
            assert_same_bytes(found[feature].detach(), expected.detach())
        else:
            torch.testing.assert_close(found[feature], expected)


@pytest.mark.parametrize("trains", [True, False], ids=["training", "no_grad"])
@pytest.mark.parametrize("ids_on", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=dtype_name)
def test_rows_are_those_of_plain_tables(
    dtype: torch.dtype, device: str, ids_on: str, trains: bool
) -> None:
    ours = EmbeddingCollection(configs(pooled=False), device=device)
    with torch.set_grad_enabled(trains):
        found = ours(KeyedIds.of(BAGS, ids_on, dtype))
    for feature, bags in BAGS.items():
        ids, offsets = jagged(bags)
        expected = ours.table_weight(TABLE_OF[feature])[ids]
        assert found[feature].values().device.type == device
        assert_same_bytes(found[feature].values().detach().cpu(), expected)
        assert found[feature].offsets().tolist() == offsets.tolist()
        assert found[feature].lengths().tolist() == [len(bag) for bag in bags]


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        (("user", "item", "word"), ["user", "seen", "bought", "word"]),
        (("user", "item"), ["user", "seen", "bought"]),
        (("user", "word", "item"), ["user", "word", "seen", "bought"]),
    ],
    ids=["two layouts", "one layout", "layouts that alternate"],
)
def test_values_are_the_features_side_by_side_in_table_order(
    names: tuple[str, ...], keys: list[str], device: str
) -> None:
    ours = EmbeddingBagCollection(configs(names=names), device=device)
    found = ours(KeyedIds.of(dict(reversed(BAGS.items())), device))
    assert found.keys() == keys
    assert_same_bytes(found.values(), torch.cat([*found.to_dict().values()], 1))
    if "word" not in names:  # the result itself
        assert found.values().data_ptr() == found["user"].data_ptr()


def test_rows_are_a_dict_in_table_order() -> None:
    found = made(False)(KeyedIds.of(dict(reversed(BAGS.items()))))
    assert isinstance(found, dict)
    assert [*found] == [*found.keys()] == ["user", "seen", "bought", "word"]
    for (key, rows), value in zip(found.items(), found.values(), strict=True):
        assert rows is value is found[key]


@pytest.mark.parametrize("group", ["", "own"], ids=["one group", "two groups"])
def test_rows_of_all_features_are_one_feature_after_another(group: str) -> None:
    ours = EmbeddingCollection(
        [EmbeddingConfig(9, 2, "a"), EmbeddingConfig(9, 2, "b", group=group)]
    )
    found = ours({"a": torch.tensor([1, 2]), "b": torch.tensor([[3, 4], [5, 6]])})
    expected = [ours.table_weight("a")[[1, 2]], ours.table_weight("b")[[3, 4, 5, 6]]]
    assert_same_bytes(found.rows().detach(), torch.cat(expected))


def test_a_feature_of_two_tables_has_the_tables_name_behind_it() -> None:
    tables = [
        EmbeddingBagConfig(9, 2, "a", feature_names=["x", "y"]),
        EmbeddingBagConfig(9, 2, "b", feature_names=["y"]),
    ]
    ours = EmbeddingBagCollection(tables)
    found = ours({"x": torch.tensor([0]), "y": torch.tensor([5])})
    assert found.keys() == ["x", "y@a", "y@b"]
    for key, table in (("y@a", "a"), ("y@b", "b")):
        assert_same_bytes(found[key].detach(), ours.table_weight(table)[[5]])


@COLLECTIONS
def test_features_of_no_table_are_ignored(pooled: bool) -> None:
    ours = made(pooled)
    more = {"before": [[99], [], []], **BAGS, "behind": [[], [99], [99, 99]]}
    assert [*ours(KeyedIds.of(more)).keys()] == list(BAGS)


def test_features_in_any_order_are_their_tables() -> None:
    ours = made()
    expected = ours(KeyedIds.of(BAGS))
    for order in (["word", "bought", "x", "seen", "user"], ["seen", "bought", "word", "user"]):
        found = ours(KeyedIds.of({key: BAGS.get(key, [[98], [], [99]]) for key in order}))
        for key in BAGS:
            assert_same_bytes(found[key], expected[key])


@pytest.mark.parametrize("as_list", [False, True], ids=["tuple", "list"])
def test_a_dict_has_ids_bags_of_one_length_or_offsets(device: str, as_list: bool) -> None:
    ours = made(device=device)
    pair: Any = jagged(BAGS["word"], device)
    found = ours(
        {
            "user": torch.tensor([3, 19, 3], device=device),
            "seen": torch.tensor([[1, 2], [4, 4], [0, 29]], device=device),
            "bought": jagged(BAGS["bought"], device),
            "word": list(pair) if as_list else pair,
        }
    )
    expected = ours(KeyedIds.of({**BAGS, "seen": [[1, 2], [4, 4], [0, 29]]}, device))
    assert_same_bytes(found.values(), expected.values())


def test_a_dict_may_mix_kinds_of_integers_and_devices(device: str) -> None:
    ours = made(device=device)
    ids, offsets = jagged(BAGS["word"])
    mixed = {
        "user": torch.tensor([3, 19, 3], dtype=torch.int32, device=device),
        "seen": jagged(BAGS["seen"]),
        "bought": jagged(BAGS["bought"], device),
        "word": (ids.to(device), offsets.int()),
    }
    assert_same_bytes(ours(mixed).values(), ours(KeyedIds.of(BAGS)).values())


@COLLECTIONS
def test_bags_of_no_ids_at_all(pooled: bool, device: str) -> None:
    ours = made(pooled, device)
    found = ours(KeyedIds.of({key: [[], []] for key in BAGS}, device))
    for key in BAGS:
        if pooled:
            assert_same_bytes(found[key], torch.zeros_like(found[key]))
            assert found[key].shape == (2, COLUMNS[TABLE_OF[key]])
        else:
            assert found[key].values().shape == (0, COLUMNS[TABLE_OF[key]])
            assert found[key].lengths().tolist() == [0, 0]


NO_SAMPLES: dict[str, Any] = {
    "keyed": KeyedIds.of({key: [] for key in BAGS}),
    "keyed in another order": KeyedIds.of({key: [] for key in reversed(BAGS)}),
    "ids": dict.fromkeys(BAGS, torch.empty(0, dtype=torch.int64)),
    "bags": dict.fromkeys(BAGS, torch.empty(0, 3, dtype=torch.int32)),
    "offsets": dict.fromkeys(BAGS, (torch.empty(0, dtype=torch.int64), torch.tensor([0]))),
}


@pytest.mark.parametrize("trains", [True, False], ids=["training", "no_grad"])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("features", NO_SAMPLES.values(), ids=NO_SAMPLES)
def test_no_samples_give_bags_of_none(features: Any, mode: str, trains: bool, device: str) -> None:
    ours = EmbeddingBagCollection(configs(pooling=mode), device=device)
    with torch.set_grad_enabled(trains):
        found = ours(features)
    assert found.values().shape == (0, 4 + 4 + 4 + 3)
    assert found["bought"].shape == (0, 4)
    if trains:
        sgd_step(ours, found.values().sum())
    for key, rows in made(False, device)(features).items():
        assert rows.values().shape == (0, COLUMNS[TABLE_OF[key]])
        assert rows.lengths().shape == (0,)


def test_bags_of_two_dimensions_without_columns_are_empty() -> None:
    found = one()({"a": torch.empty(3, 0, dtype=torch.int64)})
    assert_same_bytes(found["a"].detach(), torch.zeros(3, 2))


def test_tables_of_sum_and_mean_in_one_group(device: str) -> None:
    ours = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(9, 2, "a", pooling="mean"),
            EmbeddingBagConfig(9, 2, "b"),
            EmbeddingBagConfig(9, 2, "c", pooling="MEAN"),
        ],
        device=device,
    )
    bags = [[1, 2, 2], [], [8]]
    ids, offsets = jagged(bags, device)
    found = ours(KeyedIds.of({"a": bags, "b": bags, "c": bags}, device))
    assert len(list(ours.parameters())) == 1
    for key, mode in (("a", "mean"), ("b", "sum"), ("c", "mean")):
        expected = plain(ours, mode, device)[key](ids, offsets[:-1])
        torch.testing.assert_close(found[key], expected)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_name)
def test_rows_of_every_dtype(dtype: torch.dtype, mode: str, device: str) -> None:
    ours = EmbeddingBagCollection(configs(pooling=mode, data_type=dtype), device=device)
    theirs = plain(ours, mode, device)
    found = ours(KeyedIds.of(BAGS, device))
    for feature, bags in BAGS.items():
        ids, offsets = jagged(bags, device)
        expected = theirs[TABLE_OF[feature]](ids, offsets[:-1])
        # Of 16 bits they are converted after the sum, as torchrec's are.
        assert found[feature].dtype == (torch.float32 if dtype.itemsize == 2 else dtype)
        torch.testing.assert_close(found[feature].to(dtype), expected)


def test_the_gradient_of_every_table_is_that_of_a_plain_one(device: str) -> None:
    ours = made(device=device)
    theirs = plain(ours, "sum", device)
    found = ours(KeyedIds.of(BAGS, device))
    loss, expected = torch.zeros((), device=device), torch.zeros((), device=device)
    for number, (feature, bags) in enumerate(BAGS.items()):
        ids, offsets = jagged(bags, device)
        loss = loss + (number + 1) * found[feature].square().sum()
        looked_up = theirs[TABLE_OF[feature]](ids, offsets[:-1])
        expected = expected + (number + 1) * looked_up.square().sum()
    sgd_step(ours, loss)
    sgd_step(nn.ModuleDict(theirs), expected)
    for name, weight in weights_of(ours).items():
        torch.testing.assert_close(weight, theirs[name].weight.detach().cpu())


@pytest.mark.parametrize("others", ["sum", "mean"])
def test_a_mean_shares_its_gradient_among_its_rows(others: str, device: str) -> None:
    ours = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(9, 2, "a", pooling="mean"),
            EmbeddingBagConfig(9, 2, "b", pooling=others),
        ],
        device=device,
    )
    theirs = {**plain(ours, others, device), "a": plain(ours, "mean", device)["a"]}
    bags = [[1, 2, 2], [], [8, 1]]
    found = ours(KeyedIds.of({"a": bags, "b": bags}, device))
    ids, offsets = jagged(bags, device)
    sgd_step(ours, found.values().square().sum())
    sgd_step(
        nn.ModuleDict(theirs),
        sum(bag(ids, offsets[:-1]).square().sum() for bag in theirs.values()),  # type: ignore[arg-type]
    )
    for name, weight in weights_of(ours).items():
        torch.testing.assert_close(weight, theirs[name].weight.detach().cpu())


def test_rows_of_a_result_give_their_gradient(device: str) -> None:
    ours = made(False, device)
    before = weights_of(ours)
    found = ours(KeyedIds.of(BAGS, device))
    sgd_step(ours, found["seen"].values().sum() + 2 * found["bought"].values().sum())
    counts = torch.zeros(30, 1)
    for factor, feature in ((1, "seen"), (2, "bought")):
        for bag in BAGS[feature]:
            for each in bag:
                counts[each] += factor
    after = weights_of(ours)
    torch.testing.assert_close(after["item"], before["item"] - 0.5 * counts)
    assert_same_bytes(after["user"], before["user"])
    assert_same_bytes(after["word"], before["word"])


# ------------------------------------------------------------------------------------------------
# Weights of ids


def weighted(device: str = "cpu", **settings: Any) -> tuple[Any, dict[str, Any], Tensor]:
    """A weighted collection, its input and the weights of all ids, feature after feature."""
    ours = EmbeddingBagCollection(configs(**settings), is_weighted=True, device=device)
    count = sum(len(bag) for bags in BAGS.values() for bag in bags)
    factors = torch.rand(count, generator=torch.Generator().manual_seed(1)).to(device)
    parts = factors.split([sum(map(len, bags)) for bags in BAGS.values()])
    features = {
        key: (*jagged(bags, device), part)
        for (key, bags), part in zip(BAGS.items(), parts, strict=True)
    }
    return ours, features, factors


@pytest.mark.parametrize("trains", [True, False], ids=["training", "no_grad"])
def test_rows_are_multiplied_by_the_weights_of_their_ids(device: str, trains: bool) -> None:
    ours, features, factors = weighted(device)
    keyed = KeyedIds.of(BAGS, device, weights=factors)
    theirs = plain(ours, "sum", device)
    with torch.set_grad_enabled(trains):
        of_dict, of_keyed = ours(features), ours(keyed)
    for key, (ids, offsets, part) in features.items():
        expected = theirs[TABLE_OF[key]](ids, offsets[:-1], per_sample_weights=part)
        torch.testing.assert_close(of_dict[key], expected)
        assert_same_bytes(of_keyed[key], of_dict[key])


def test_weights_belong_to_features_in_any_order() -> None:
    ours, features, _ = weighted()
    expected = ours(features)
    order = ["word", "bought", "x", "seen", "user"]
    bags = {key: BAGS.get(key, [[1], [], [2]]) for key in order}
    parts = [features[key][2] if key in features else torch.zeros(2) for key in order]
    found = ours(KeyedIds.of(bags, weights=torch.cat(parts)))
    assert_same_bytes(found.values(), expected.values())


@pytest.mark.parametrize("freeze", [False, True], ids=["trained", "frozen"])
def test_weights_have_gradients(device: str, freeze: bool) -> None:
    ours, features, factors = weighted(device)
    ours.requires_grad_(not freeze)
    theirs = plain(ours, "sum", device)
    (own, plains) = (factors.clone().requires_grad_() for _ in range(2))
    ours(KeyedIds.of(BAGS, device, weights=own)).values().square().sum().backward()
    parts = iter(plains.split([len(feature[0]) for feature in features.values()]))
    for key, (ids, offsets, _) in features.items():
        looked_up = theirs[TABLE_OF[key]](ids, offsets[:-1], per_sample_weights=next(parts))
        looked_up.square().sum().backward()
    torch.testing.assert_close(own.grad, plains.grad)
    if not freeze:
        sgd_step(ours, torch.zeros((), requires_grad=True))
        sgd_step(nn.ModuleDict(theirs), torch.zeros((), requires_grad=True))
        for name, weight in weights_of(ours).items():
            torch.testing.assert_close(weight, theirs[name].weight.detach().cpu())


def test_weights_of_ids_and_of_bags_of_one_length_stand_third() -> None:
    ours = EmbeddingBagCollection(
        [EmbeddingBagConfig(9, 2, "a"), EmbeddingBagConfig(9, 2, "b")], is_weighted=True
    )
    ids, bags = torch.tensor([1, 2]), torch.tensor([[3, 4], [5, 5]])
    factors = torch.tensor([2.0, 0.5]), torch.tensor([[1.0, 2.0], [4.0, -4.0]])
    found = ours({"a": (ids, None, factors[0]), "b": (bags, None, factors[1])})
    a, b = ours.table_weight("a"), ours.table_weight("b")
    assert_same_bytes(found["a"].detach(), a[ids] * factors[0][:, None])
    torch.testing.assert_close(found["b"].detach(), (b[bags] * factors[1][..., None]).sum(1))


def test_weights_are_ignored_unless_it_is_weighted() -> None:
    keyed = KeyedIds.of({"a": [[1]]}, weights=torch.tensor([5.0]))
    ours = one()
    assert_same_bytes(ours(keyed)["a"].detach(), ours.table_weight("a")[[1]])


# ------------------------------------------------------------------------------------------------
# Ids that come again


def test_ids_changed_in_place_are_not_mistaken_for_the_old_ones(device: str) -> None:
    ours = made(device=device)
    keyed = KeyedIds.of(BAGS, device)
    ours(keyed)
    changed = {**BAGS, "user": [[4], [5], [6]]}
    keyed.values().copy_(KeyedIds.of(changed).values())
    expected = ours(KeyedIds.of(changed))
    assert_same_bytes(ours(keyed).values(), expected.values())


def test_offsets_changed_in_place_are_not_mistaken_for_the_old_ones(device: str) -> None:
    ours = one()
    ours.to(device)
    ids, offsets = torch.tensor([1, 2, 3], device=device), torch.tensor([0, 1, 3], device=device)
    first = ours({"a": (ids, offsets)}).values().detach().clone()
    offsets.copy_(torch.tensor([0, 2, 3]))
    second = ours({"a": (ids, offsets)}).values().detach().clone()
    rows = ours.table_weight("a").to(device)
    assert_same_bytes(first, torch.stack([rows[1], rows[2] + rows[3]]))
    assert_same_bytes(second, torch.stack([rows[1] + rows[2], rows[3]]))
    again = ours({"a": (ids, torch.tensor([0, 1, 3], device=device))})
    assert_same_bytes(again.values().detach(), first)


def test_a_result_has_the_offsets_of_its_lookup() -> None:
    ours = EmbeddingCollection([EmbeddingConfig(9, 2, "a")])
    ids, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3])
    found = ours({"a": (ids, offsets)})
    offsets.copy_(torch.tensor([0, 2, 3]))
    assert found["a"].lengths().tolist() == [1, 2]


def test_equal_tensors_of_other_keys_are_other_ids(device: str) -> None:
    ours = EmbeddingBagCollection(
        [EmbeddingBagConfig(9, 2, "a"), EmbeddingBagConfig(9, 2, "b")], device=device
    )
    ids, offsets = torch.tensor([1, 2], device=device), torch.tensor([0, 1, 2], device=device)
    for keys in (["a", "b"], ["b", "a"]):
        found = ours(KeyedIds(keys, ids, offsets))
        for at, key in enumerate(keys):
            assert_same_bytes(found[key].detach().cpu(), ours.table_weight(key)[[at + 1]])
    alone = one(device=device)
    for keys, samples in ((["a"], 2), (["a", "x"], 1)):
        assert alone(KeyedIds(keys, ids, offsets))["a"].shape == (samples, 2)


def test_equal_tensors_that_are_offsets_of_another_feature_are_other_ids() -> None:
    ours = EmbeddingBagCollection([EmbeddingBagConfig(9, 2, "a"), EmbeddingBagConfig(9, 2, "b")])
    x, y, z = torch.tensor([5]), torch.tensor([0, 0, 1]), torch.tensor([0, 3])
    assert ours({"a": (x, y), "b": z})["a"].shape == (2, 2)
    found = ours({"a": x, "b": (y, z)})
    a, b = ours.table_weight("a"), ours.table_weight("b")
    assert_same_bytes(found["a"].detach(), a[x])
    assert_same_bytes(found["b"].detach(), (b[0] + b[0] + b[1])[None])


def test_weights_changed_for_the_same_ids_count() -> None:
    ours = EmbeddingBagCollection([EmbeddingBagConfig(9, 2, "a")], is_weighted=True)
    ids = torch.tensor([1, 2])
    for factors in (torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])):
        found = ours({"a": (ids, None, factors)})
        assert_same_bytes(found["a"].detach(), ours.table_weight("a")[ids] * factors[:, None])


def test_rows_changed_since_the_same_ids_were_looked_up_count(device: str) -> None:
    ours, keyed = made(device=device), KeyedIds.of(BAGS, device)
    for _ in range(3):
        found = ours(keyed)
        for feature, bags in BAGS.items():
            rows = ours.table_weight(TABLE_OF[feature])
            expected = torch.stack([rows[bag].sum(0) for bag in bags])
            torch.testing.assert_close(found[feature].detach().cpu(), expected)
        sgd_step(ours, found.values().sum())


# ------------------------------------------------------------------------------------------------
# Configs and first values


def test_first_values_are_uniform_in_torchrecs_bounds() -> None:
    rows = one(400, 50).table_weight("a")
    bound = math.sqrt(1 / 400)
    assert 0.99 * bound < rows.max() <= bound
    assert -bound <= rows.min() < -0.99 * bound
    assert abs(float(rows.mean())) < bound / 20


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


def test_first_values_are_in_the_bounds_of_each_config() -> None:
    lows = {"a": 0.0, "b": 5.0, "c": 10.0}
    tables = [
        EmbeddingConfig(400, 50, name, weight_init_min=low, weight_init_max=low + 1)
        for name, low in lows.items()
    ]
    for name, rows in weights_of(EmbeddingCollection(tables)).items():
        low = lows[name]
        assert low <= rows.min() < low + 0.01 and low + 0.99 < rows.max() <= low + 1


def test_torchs_seed_makes_first_values_repeatable() -> None:
    first, second = weights_of(made()), weights_of(made())
    assert_same_content(first, second)
    assert not torch.equal(first["user"], first["item"][:20])


def test_reset_parameters_draws_all_rows_anew() -> None:
    ours = EmbeddingBagCollection(configs(weight_init_min=0.0))
    before = weights_of(ours)
    ours.reset_parameters()
    for name, rows in weights_of(ours).items():
        assert not torch.equal(rows, before[name])
        assert 0 <= rows.min() <= rows.max() <= math.sqrt(1 / ROWS[name])


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


@pytest.mark.parametrize("samples", [0, 1, 3])
@pytest.mark.parametrize("sizes", [(None, None), (None, 2), (2, 2), (1, None), (0, 3), (0, 0)])
def test_a_dict_of_ids_alone_is_that_of_ids_and_offsets(
    sizes: tuple[int | None, int | None], samples: int, device: str
) -> None:
    """Also after other batches, and where the ids were another's lookup without gradients."""
    ours = EmbeddingCollection([EmbeddingConfig(9, 2, each) for each in "ab"], device=device)
    shapes = {
        key: (samples, *[size] * (size is not None)) for key, size in zip("ab", sizes, strict=True)
    }
    for where in ("cpu", device):
        ids = {key: torch.randint(9, shape, device=where) for key, shape in shapes.items()}
        ends = {
            key: torch.arange(samples + 1) * (1 if size is None else size)
            for key, size in zip("ab", sizes, strict=True)
        }
        with torch.inference_mode():
            ours(ids)
        found = ours(ids)
        expected = ours({key: (ids[key].reshape(-1), ends[key].to(where)) for key in ids})
        for key in ids:
            assert_same_bytes(found[key].values(), expected[key].values())
            assert_same_bytes(found[key].offsets(), expected[key].offsets())
        found.rows().sum().backward()


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


def test_the_result_can_be_gone_through_by_name() -> None:
    found = made()(KeyedIds.of(BAGS))
    assert "seen" in found and "b" not in found and len(found) == 4
    assert list(found) == found.keys() == list(found.to_dict()) == list(BAGS)
    assert_same_content(found.to_dict(), dict(found.items()))
    assert all(torch.equal(value, found[name]) for name, value in found.items())


def groups(device: str) -> tuple[Any, dict[str, Tensor]]:
    tables = [EmbeddingBagConfig(9, 2, "a"), EmbeddingBagConfig(9, 2, "b", group="other")]
    ours = EmbeddingBagCollection(tables, device=device)
    return ours, {"a": torch.tensor([1, 2]), "b": torch.tensor([1, 2])}


def test_a_group_is_frozen_alone(device: str) -> None:
    ours, features = groups(device)
    before = weights_of(ours)
    ours.group_of("a").weight.requires_grad_(False)
    sgd_step(ours, ours(features).values().sum())
    after = weights_of(ours)
    assert_same_bytes(after["a"], before["a"])
    assert not torch.equal(after["b"], before["b"])


@pytest.mark.parametrize("optimizers", [1, 2])
def test_a_group_has_a_learning_rate_or_an_optimizer_of_its_own(
    optimizers: int, device: str
) -> None:
    ours, features = groups(device)
    a, b = (ours.group_of(name) for name in "ab")
    if optimizers == 1:
        settings = [{"params": [a.weight], "lr": 1.0}, {"params": [b.weight], "lr": 0.25}]
        steps: list[optim.Optimizer] = [optim.SGD(settings)]
    else:
        steps = [optim.Adam([a.weight], lr=1.0), optim.SGD([b.weight], lr=0.25)]
        speedtorch.attach(steps[0], a)
    before = weights_of(ours)
    ours(features).values().sum().backward()
    for each in steps:
        each.step()
    after = weights_of(ours)
    torch.testing.assert_close(after["a"][1:3], before["a"][1:3] - 1.0)
    torch.testing.assert_close(after["b"][1:3], before["b"][1:3] - 0.25)


def test_only_rows_that_were_looked_up_are_trained(device: str) -> None:
    ours = made(device=device)
    adam = optim.Adam(ours.parameters(), lr=0.1)
    speedtorch.attach(adam, ours)
    before = weights_of(ours)
    for _ in range(2):
        adam.zero_grad()
        ours(KeyedIds.of(BAGS, device)).values().square().sum().backward()
        adam.step()
    for name, rows in weights_of(ours).items():
        named = [bags for feature, bags in BAGS.items() if TABLE_OF[feature] == name]
        touched = {each for bags in named for bag in bags for each in bag}
        changed = (rows != before[name]).any(1).nonzero().flatten().tolist()
        assert changed == sorted(touched)


# ------------------------------------------------------------------------------------------------
# As a module


@COLLECTIONS
def test_state_dict_keys_are_torchrecs(pooled: bool) -> None:
    model = nn.ModuleDict({"tables": made(pooled)})
    first = "embedding_bags" if pooled else "embeddings"
    assert list(model.state_dict()) == [f"tables.{first}.{name}.weight" for name in ROWS]


def test_a_state_dict_has_tables_as_they_are_after_a_step(device: str) -> None:
    ours = made(device=device)
    sgd_step(ours, ours(KeyedIds.of(BAGS, device)).values().sum())
    for name, rows in weights_of(ours).items():
        saved = ours.state_dict()[f"embedding_bags.{name}.weight"]
        assert saved.is_contiguous()
        assert_same_bytes(saved.cpu(), rows)


@COLLECTIONS
def test_a_state_dict_is_loaded_by_another_collection(pooled: bool, device: str) -> None:
    first, second = made(pooled, device), made(pooled, device)
    first.reset_parameters()
    expected = first(KeyedIds.of(BAGS))
    second(KeyedIds.of(BAGS))  # holds rows
    assert str(second.load_state_dict(first.state_dict())) == "<All keys matched successfully>"
    for key, value in second(KeyedIds.of(BAGS)).items():
        rows, same = (value, expected[key]) if pooled else (value.values(), expected[key].values())
        assert_same_bytes(rows.detach(), same.detach())


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_rows_of_torchs_modules_are_loaded_and_load_ours(kind: Any) -> None:
    theirs, ours = nn.Module(), made()
    theirs.embedding_bags = nn.ModuleDict({name: kind(ROWS[name], COLUMNS[name]) for name in ROWS})
    given = copy.deepcopy(theirs.state_dict())
    own = {f"embedding_bags.{name}.weight": rows for name, rows in weights_of(ours).items()}
    theirs.load_state_dict(ours.state_dict())
    assert_same_content(theirs.state_dict(), own)
    ours.load_state_dict(given)
    assert_same_content(ours.state_dict(), given)


def test_a_state_dict_of_other_tables_is_refused_by_name() -> None:
    ours = made()
    state = ours.state_dict()
    state["embedding_bags.film.weight"] = state.pop("embedding_bags.item.weight")
    with pytest.raises(RuntimeError) as raised:
        ours.load_state_dict(state)
    assert 'Missing key(s) in state_dict: "embedding_bags.item.weight"' in str(raised.value)
    assert 'Unexpected key(s) in state_dict: "embedding_bags.film.weight"' in str(raised.value)
    found = ours.load_state_dict(state, strict=False)
    assert found.missing_keys == ["embedding_bags.item.weight"]
    assert found.unexpected_keys == ["embedding_bags.film.weight"]


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


def test_evaluation_sees_the_last_step_and_trains_nothing(device: str) -> None:
    ours, keyed = made(device=device), KeyedIds.of(BAGS, device)
    sgd_step(ours, ours(keyed).values().sum())
    ours.eval()
    with torch.no_grad():
        found = ours(keyed)
    assert not found.values().requires_grad
    rows = ours.table_weight("item")
    expected = torch.stack([rows[bag].sum(0) for bag in BAGS["seen"]])
    torch.testing.assert_close(found["seen"].cpu(), expected)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_inference_mode_is_the_same_and_training_goes_on(mode: str, device: str) -> None:
    ours = EmbeddingBagCollection(configs(pooling=mode), device=device)
    keyed = KeyedIds.of(BAGS, device)
    with torch.inference_mode():
        first = ours(keyed).values()
        made_there = ours(KeyedIds.of(BAGS, device)).values()
    assert_same_bytes(made_there.clone(), first.clone())
    found = ours(keyed).values()
    assert_same_bytes(found.detach(), first.clone())
    before = weights_of(ours)
    sgd_step(ours, found.sum())
    assert not torch.equal(weights_of(ours)["user"], before["user"])


def test_a_collection_made_in_inference_mode_can_be_trained(device: str) -> None:
    with torch.inference_mode():
        ours = made(device=device)
    before = weights_of(ours)
    sgd_step(ours, ours(KeyedIds.of(BAGS, device)).values().sum())
    assert not torch.equal(weights_of(ours)["user"], before["user"])


@COLLECTIONS
def test_a_frozen_collection_returns_rows_and_trains_none(pooled: bool, device: str) -> None:
    ours = made(pooled, device, freeze=True)
    found = ours(KeyedIds.of(BAGS, device))["user"]
    assert not (found if pooled else found.values()).requires_grad
    assert not any(parameter.requires_grad for parameter in ours.parameters())


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
    "features", [KeyedIds.of(BAGS), {k: jagged(v) for k, v in BAGS.items()}], ids=["keyed", "dict"]
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


def test_a_conversion_is_refused_by_the_next_lookup() -> None:
    ours = made()
    ours.to(torch.float16)
    with pytest.raises(TypeError, match="its table remains torch.float32"):
        ours(KeyedIds.of(BAGS))
    ours.to(torch.float32)
    ours(KeyedIds.of(BAGS))


def test_extra_repr_says_the_tables_and_where_they_are() -> None:
    assert "user: 20, item: 30; columns=4, device=cpu, memory=auto)" in repr(made())


def test_flush_updates_a_view_of_the_table(device: str) -> None:
    ours = made(device=device)
    rows = ours.table_weight("user")
    before = rows.clone()
    sgd_step(ours, ours(KeyedIds.of(BAGS, device)).values().sum())
    ours.flush()
    changed = (rows != before).any(1).nonzero().flatten().tolist()
    assert changed == [3, 19]


def test_rows_written_through_table_weight_are_looked_up(device: str) -> None:
    ours, keyed = made(device=device), KeyedIds.of(BAGS, device)
    sgd_step(ours, ours(keyed).values().sum())
    ours.table_weight("user").fill_(3.0)
    assert_same_bytes(ours(keyed)["user"].detach().cpu(), torch.full((3, 4), 3.0))


# ------------------------------------------------------------------------------------------------
# announce and prefetch


def second_bags() -> dict[str, list[list[int]]]:
    return {key: [[(each + 1) % 20 for each in bag] for bag in bags] for key, bags in BAGS.items()}


@pytest.mark.parametrize("announced", [False, True])
def test_two_lookups_of_a_step_train_as_one(announced: bool, device: str) -> None:
    ours, theirs = made(device=device), made(device=device)
    one, two = KeyedIds.of(BAGS, device), KeyedIds.of(second_bags(), device)
    if announced:
        ours.announce(one, two)
    sgd_step(ours, ours(one).values().sum() + ours(two).values().sum())
    both = {key: [*bags, *second_bags()[key]] for key, bags in BAGS.items()}
    sgd_step(theirs, theirs(KeyedIds.of(both, device)).values().sum())
    for name, rows in weights_of(ours).items():
        torch.testing.assert_close(rows, weights_of(theirs)[name])


def test_announced_rows_are_loaded_by_the_first_lookup(device: str) -> None:
    ours = made(device=device)
    one, two = KeyedIds.of(BAGS, device), KeyedIds.of(second_bags(), device)
    ours.announce(one, two)
    first = ours(one)  # its graph keeps the step
    held = held_by(ours)
    ours(two)
    assert held_by(ours) == held and all(held)
    assert first.values().requires_grad


def loop_batches(device: str) -> list[KeyedIds]:
    random = torch.Generator().manual_seed(5)

    def bags(rows: int) -> list[list[int]]:
        lengths = torch.randint(4, (5,), generator=random).tolist()
        return [torch.randint(rows, (n,), generator=random).tolist() for n in lengths]

    return [
        KeyedIds.of({key: bags(ROWS[table]) for key, table in TABLE_OF.items()}, device)
        for _ in range(20)
    ]


def trained_in_a_loop(how: str, device: str) -> dict[str, Tensor]:
    ours, batches = made(device=device), loop_batches(device)
    adam = optim.Adam(ours.parameters(), lr=0.1)
    speedtorch.attach(adam, ours)
    ids: Any = {
        "the collection's input": lambda batch: batch,
        "a dict by module": lambda batch: {ours: batch},
        "a dict of features": lambda batch: as_dict(batch),
    }
    loader: Any = batches
    if how != "no prefetch":
        loader = speedtorch.prefetch(batches, ours, ids=ids[how])
        assert len(loader) == len(batches)
    for batch in loader:
        adam.zero_grad()
        ours(batch).values().square().sum().backward()
        adam.step()
    return weights_of(ours)


def as_dict(keyed: KeyedIds) -> dict[str, tuple[Tensor, Tensor]]:
    samples = (len(keyed.offsets()) - 1) // len(keyed.keys())
    features = {}
    for at, key in enumerate(keyed.keys()):
        offsets = keyed.offsets()[at * samples : (at + 1) * samples + 1]
        features[key] = (keyed.values()[offsets[0] : offsets[-1]], offsets - offsets[0])
    return features


@pytest.mark.parametrize(
    "how", ["the collection's input", "a dict by module", "a dict of features"]
)
def test_prefetch_takes(how: str, device: str) -> None:
    expected = trained_in_a_loop("no prefetch", device)
    assert_same_content(trained_in_a_loop(how, device), expected)


def trained_beside_an_embedding(device: str, *, ahead: bool) -> dict[str, Tensor]:
    tables = made(device=device)
    words = speedtorch.Embedding.from_pretrained(torch.ones(21, 15), freeze=False, device=device)
    model = nn.ModuleList([tables, words])
    adam = optim.Adam(model.parameters(), lr=0.1)
    speedtorch.attach(adam, model)
    batches = [(batch, torch.tensor([n, n + 1])) for n, batch in enumerate(loop_batches(device))]
    loader: Any = batches
    if ahead:
        loader = speedtorch.prefetch(batches, model, ids=lambda b: {tables: b[0], words: b[1]})
    for keyed, ids in loader:
        adam.zero_grad()
        (tables(keyed).values().sum(0) * words(ids)).sum().backward()
        adam.step()
    return {name: rows.clone() for name, rows in model.state_dict().items()}


def test_prefetch_of_a_collection_beside_an_embedding(device: str) -> None:
    expected = trained_beside_an_embedding(device, ahead=False)
    assert_same_content(trained_beside_an_embedding(device, ahead=True), expected)


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


@pytest.mark.parametrize("how", ["training", "no_grad", "announce"])
@pytest.mark.parametrize("bad", [20, -1, 2**31 - 1, -(2**31)])
def test_a_bad_id_is_named_and_no_row_is_touched(bad: int, how: str, device: str) -> None:
    ours = made(device=device)
    before = weights_of(ours)
    keyed = KeyedIds.of({**BAGS, "user": [[3], [bad], [bad]]}, device)
    message = (
        f"feature 'user': id {bad} at position 1 is out of range for table 'user' of 20 rows"
        " (2 of 3 ids are out of range); no row was moved"
    )
    with pytest.raises(IndexError) as raised:
        bad_ids(ours, keyed, how)
    assert str(raised.value) == message
    sgd_step(ours, ours(KeyedIds.of(BAGS, device)).values().sum())  # goes on
    good = made(device=device)
    sgd_step(good, good(KeyedIds.of(BAGS, device)).values().sum())
    for name, rows in weights_of(ours).items():
        assert_same_bytes(rows, weights_of(good)[name])
        assert rows.shape == before[name].shape


def test_the_last_and_the_next_row_of_a_table_before_another() -> None:
    ours = EmbeddingBagCollection([EmbeddingBagConfig(5, 2, "a"), EmbeddingBagConfig(5, 2, "b")])
    good = ours({"a": torch.tensor([4]), "b": torch.tensor([0])})
    assert_same_bytes(good["a"].detach(), ours.table_weight("a")[[4]])
    with pytest.raises(IndexError, match="feature 'a': id 5 at position 0 .* 'a' of 5 rows"):
        ours({"a": torch.tensor([5]), "b": torch.tensor([0])})
    with pytest.raises(IndexError, match="feature 'b': id -1 at position 0 .* 'b' of 5 rows"):
        ours({"a": torch.tensor([0]), "b": torch.tensor([-1])})


def test_a_bad_id_of_the_last_group_moves_no_row_of_the_first(device: str) -> None:
    ours = made(device=device)
    with pytest.raises(IndexError, match="feature 'word': id 25 at position 5"):
        ours(KeyedIds.of({**BAGS, "word": [[24], [0, 1, 2, 0], [25]]}, device))
    if device == "cpu":
        assert held_by(ours) == [[], []]


def test_a_bad_id_that_is_looked_up_again_is_an_error_again(device: str) -> None:
    ours, keyed = made(device=device), KeyedIds.of({**BAGS, "user": [[3], [99], [3]]}, device)
    for _ in range(3):
        with pytest.raises(IndexError, match="feature 'user': id 99"):
            ours(keyed)


@pytest.mark.parametrize("how", ["training", "no_grad"])
def test_a_bad_id_of_a_weighted_collection_is_named(how: str, device: str) -> None:
    ours, _, factors = weighted(device)
    keyed = KeyedIds.of({**BAGS, "word": [[24], [0, 1, 2, 77], []]}, device, weights=factors)
    with pytest.raises(IndexError, match="feature 'word': id 77 at position 4"):
        bad_ids(ours, keyed, how)


# ------------------------------------------------------------------------------------------------
# Every other error


ZERO = torch.tensor([0])
BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "no name": ({"name": ""}, "tables: expected a table name without dots, got ''"),
    "a dot": ({"name": "a.b"}, "tables: expected a table name without dots, got 'a.b'"),
    "no text": ({"name": 3}, "tables: expected a table name without dots, got 3"),
    "no rows": ({"rows": 0}, "a: num_embeddings must be 1 or more, got 0"),
    "half a row": ({"rows": 1.5}, "a: num_embeddings must be 1 or more, got 1.5"),
    "no columns": ({"columns": -1}, "a: embedding_dim must be 1 or more, got -1"),
    "integers": ({"data_type": torch.int8}, "a: data_type must be one of .*, got torch.int8"),
    "max": ({"pooling": "max"}, "a: pooling must be 'sum' or 'mean', got 'max'"),
    "bounds": (
        {"weight_init_min": 1.0, "weight_init_max": 0.0},
        r"a: weight_init_min \(1.0\) exceeds weight_init_max \(0.0\)",
    ),
    "a feature twice": ({"feature_names": ["x", "y", "x"]}, "a: feature_names has 'x' twice"),
}


@pytest.mark.parametrize(("settings", "message"), BAD_CONFIGS.values(), ids=BAD_CONFIGS)
def test_a_bad_config_is_an_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        one(**settings)


def test_configs_may_be_an_iterator() -> None:
    given: Any = iter(configs())
    assert names_of(EmbeddingBagCollection(given)) == list(ROWS)


class VariedIds(KeyedIds):
    """Of another number of samples for each feature."""

    def variable_stride_per_key(self) -> bool:
        return True

    def stride_per_key(self) -> list[int]:
        return [2, 1]


BAD_FEATURES: dict[str, tuple[Any, type[Exception], str]] = {
    "a tensor": (ZERO, TypeError, "expected a dict of features or a keyed jagged tensor, got T"),
    "missing": ({"x": ZERO}, KeyError, r"features \['a', 'b'\] are missing. The input has \['x'\]"),
    "missing in keyed": (
        KeyedIds.of({"b": [[0]]}),
        KeyError,
        r"features \['a'\] are missing. The input has \['b'\]",
    ),
    "strides that vary": (
        VariedIds(["a", "b"], torch.tensor([0, 0, 0]), torch.tensor([0, 1, 2, 3])),
        ValueError,
        "features must have equal numbers of samples, got {'a': 2, 'b': 1}",
    ),
    "samples that vary": (
        {"a": torch.tensor([0, 0]), "b": ZERO},
        ValueError,
        "features must have equal numbers of samples, got {'a': 2, 'b': 1}",
    ),
    "bags that are not shared out": (
        KeyedIds(["a", "b"], torch.tensor([0, 0, 0]), torch.tensor([0, 1, 2, 3])),
        ValueError,
        "3 bags cannot be divided among 2 features",
    ),
    "nothing for a feature": (
        {"a": (), "b": ZERO},
        ValueError,
        r"'a': expected \(ids, offsets\) or \(ids, offsets, weights\)",
    ),
    "four tensors": (
        {"a": ZERO, "b": (ZERO, torch.tensor([0, 1]), None, None)},
        ValueError,
        r"'b': expected \(ids, offsets\) or \(ids, offsets, weights\)",
    ),
    "numbers": ({"a": [1, 2], "b": ZERO}, TypeError, "'a': expected an int32 or int64 tensor"),
    "floats": (
        {"a": ZERO.float(), "b": ZERO},
        TypeError,
        "'a': expected a dense int32 or int64 tensor, got torch.float32",
    ),
    "floats in keyed": (
        KeyedIds(["a", "b"], torch.zeros(2), torch.tensor([0, 1, 2])),
        TypeError,
        "values: expected a dense int32 or int64 tensor, got torch.float32",
    ),
    "ids of no dimension": (
        {"a": torch.tensor(0), "b": ZERO},
        ValueError,
        r"'a': ids must be \[ids\] \(or \[samples, ids of each\]\), got the shape \[\]",
    ),
    "ids of three dimensions": (
        {"a": ZERO, "b": torch.zeros(1, 1, 1, dtype=torch.int64)},
        ValueError,
        r"'b': ids must be .*, got the shape \[1, 1, 1\]",
    ),
    "ids of two dimensions and offsets": (
        {"a": (ZERO[None], torch.tensor([0, 1])), "b": ZERO},
        ValueError,
        r"'a': ids must be \[ids\], got the shape \[1, 1\]",
    ),
    "offsets of floats": (
        {"a": (ZERO, torch.tensor([0.0, 1.0])), "b": ZERO},
        TypeError,
        "'a': offsets: expected a dense int32 or int64 tensor",
    ),
    "offsets of two dimensions": (
        {"a": (ZERO, torch.tensor([[0, 1]])), "b": ZERO},
        ValueError,
        r"'a': offsets must be \[samples \+ 1\], got \[1, 2\]",
    ),
    "no offsets": (
        {"a": (ZERO[:0], ZERO[:0]), "b": ZERO[:0]},
        ValueError,
        r"'a': offsets must be \[samples \+ 1\], got \[0\]",
    ),
    "offsets that begin late": (
        {"a": (ZERO, torch.tensor([1, 1])), "b": ZERO},
        ValueError,
        "'a': .* end with the number of ids, 1. The first is 1 and the last is 1",
    ),
    "offsets that end early": (
        KeyedIds(["a", "b"], torch.tensor([0, 0, 0]), torch.tensor([0, 1, 2])),
        ValueError,
        ".* end with the number of ids, 3. The first is 0 and the last is 2",
    ),
    "offsets that fall": (
        {"a": (torch.tensor([0, 0]), torch.tensor([0, 2, 1, 2])), "b": torch.tensor([0, 0, 0])},
        ValueError,
        "'a': offsets must begin with 0, never decrease and end with the number of ids, 2",
    ),
}


def two(rows: Any) -> Any:
    return EmbeddingCollection.from_pretrained([EmbeddingConfig(9, 2, k) for k in "ab"], rows)


def prefetch_a_group(ours: Any) -> None:
    next(iter(speedtorch.prefetch([ZERO], ours, ids=lambda ids: {ours.group_of("a"): ids})))


def load_another_shape(ours: Any) -> None:
    ours.load_state_dict({"embedding_bags.a.weight": torch.zeros(11, 2)})


NINE = torch.zeros(9, 2)
OTHER_ERRORS: dict[str, tuple[Any, type[Exception], str]] = {
    "a group with a dot": (
        lambda: EmbeddingCollection([EmbeddingConfig(9, 2, "a", group="x.y")]),
        ValueError,
        "a: group must be a name without dots, got 'x.y'",
    ),
    "no tables": (
        lambda: EmbeddingCollection([]),
        ValueError,
        "EmbeddingCollection: tables: expected one or more",
    ),
    "two tables of a name": (
        lambda: EmbeddingCollection([EmbeddingConfig(9, 2, "a"), EmbeddingConfig(9, 3, "a")]),
        ValueError,
        "EmbeddingCollection: two tables have the name 'a'",
    ),
    "weights with means": (
        lambda: EmbeddingBagCollection([EmbeddingBagConfig(9, 2, "a", pooling="mean")], True),
        ValueError,
        "a: is_weighted needs pooling='sum'",
    ),
    "no feature": (lambda: one()({"a": ZERO})["b"], KeyError, r"'b' is not one of the features \["),
    "no table": (
        lambda: one().table_weight("b"),
        KeyError,
        r"'b' is not one of the tables \['a'\]",
    ),
    "no group": (lambda: one().group_of("b"), KeyError, r"'b' is not one of the tables \['a'\]"),
    "columns that differ": (
        lambda: made(False)(KeyedIds.of(BAGS)).rows(),
        ValueError,
        "the tables differ in columns. Read features by name",
    ),
    "unknown rows": (
        lambda: two({"a": NINE, "c": NINE}),
        ValueError,
        r"embeddings: expected \['a', 'b'\]; missing or unknown: \['b', 'c'\]",
    ),
    "few rows": (lambda: two({"a": NINE, "b": NINE[1:]}), ValueError, "size mismatch for b"),
    "a list": (lambda: two({"a": NINE, "b": [1]}), TypeError, "b: expected a tensor, got list"),
    "pickled": (
        lambda: pickle.dumps(one()),
        TypeError,
        "EmbeddingBagCollection cannot be pickled.* the rows of its tables. Save model.state_dict",
    ),
    "a group in prefetch": (
        lambda: prefetch_a_group(one()),
        ValueError,
        "Embeddings of the model, got a TableGroup",
    ),
    "another shape": (
        lambda: load_another_shape(one()),
        RuntimeError,
        r"size mismatch for embedding_bags.a.weight: .* \(11, 2\) .* \(10, 2\)",
    ),
    "a feature of no table": (
        lambda: one()({"a": ZERO, "flim": ZERO}),
        KeyError,
        r"no table has the features \['flim'\]",
    ),
    "an announced feature of no table": (
        lambda: one().announce({"a": ZERO, "flim": ZERO}),
        KeyError,
        r"no table has the features \['flim'\]",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), OTHER_ERRORS.values(), ids=OTHER_ERRORS)
def test_other_errors_name_what_is_wrong(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@COLLECTIONS
@pytest.mark.parametrize(("features", "error", "message"), BAD_FEATURES.values(), ids=BAD_FEATURES)
def test_bad_features_are_an_error_and_no_row_moves(
    features: Any, error: type[Exception], message: str, pooled: bool
) -> None:
    kind = EmbeddingBagCollection if pooled else EmbeddingCollection
    ours: Any = kind([EmbeddingBagConfig(9, 2, "a"), EmbeddingBagConfig(9, 2, "b")])
    with pytest.raises(error, match=f"{kind.__name__}: {message}"):
        ours(features)
    with pytest.raises(error, match=message):
        ours.announce(features)
    assert held_by(ours) == [[]]


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"a": ZERO}, "'a': is_weighted needs a weight for each id, got None"),
        (KeyedIds.of({"a": [[0]]}), "is_weighted needs a weight for each id, got None"),
        (
            {"a": (torch.tensor([0, 0]), None, torch.ones(3))},
            r"'a': weights must have the shape of the ids, \[2\], got \[3\]",
        ),
        (
            KeyedIds.of({"a": [[0]]}, weights=torch.ones(1, 1)),
            r"weights must have the shape of the ids, \[1\], got \[1, 1\]",
        ),
    ],
    ids=["none", "none in keyed", "another number", "another shape"],
)
def test_weights_that_do_not_fit_are_an_error(features: Any, message: str) -> None:
    ours = EmbeddingBagCollection([EmbeddingBagConfig(9, 2, "a")], is_weighted=True)
    with pytest.raises(ValueError, match=message):
        ours(features)


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

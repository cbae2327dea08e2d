"""Collections beside torchrec's own: configs, inputs, results and state dicts.

Needs torchrec: make clients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import assert_same_bytes

import speedtorch

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
torchrec = pytest.importorskip("torchrec")
for module in (
    "fx",
    "models.deepfm",
    "models.dlrm",
    "modules.fp_embedding_modules",
    "modules.regroup",
):
    pytest.importorskip(f"torchrec.{module}")

BAGS = {
    "user": [[3], [19], [3]],
    "seen": [[1, 2, 29], [], [4, 4]],
    "word": [[24], [0, 1, 2, 0], []],
}


def configs(pooled: bool, **settings: Any) -> list[Any]:
    """torchrec's own, with a feature of two tables."""
    kind = torchrec.EmbeddingBagConfig if pooled else torchrec.EmbeddingConfig
    return [
        kind(name="user", num_embeddings=20, embedding_dim=4, feature_names=["user"], **settings),
        kind(
            name="item",
            num_embeddings=30,
            embedding_dim=4,
            feature_names=["seen", "word"],
            **settings,
        ),
        kind(name="word", num_embeddings=25, embedding_dim=4, feature_names=["word"], **settings),
    ]


def keyed(weights: bool = False, dtype: torch.dtype = torch.int64) -> Any:
    bags = [bag for each in BAGS.values() for bag in each]
    values = torch.tensor([each for bag in bags for each in bag], dtype=dtype)
    factors = torch.linspace(-1, 2, len(values)) if weights else None
    return torchrec.KeyedJaggedTensor.from_lengths_sync(
        keys=list(BAGS),
        values=values,
        lengths=torch.tensor([len(bag) for bag in bags], dtype=torch.int32),
        weights=factors,
    )


def pair(pooled: bool, **settings: Any) -> tuple[Any, Any]:
    """torchrec's collection and ours of the same configs, with the same rows."""
    if pooled:
        weighted = settings.pop("is_weighted", False)
        theirs = torchrec.EmbeddingBagCollection(configs(True, **settings), weighted)
        ours: Any = speedtorch.EmbeddingBagCollection(configs(True, **settings), weighted)
    else:
        theirs = torchrec.EmbeddingCollection(configs(False, **settings))
        ours = speedtorch.EmbeddingCollection(configs(False, **settings))
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


KINDS = pytest.mark.parametrize("pooled", [False, True], ids=["rows", "bags"])
DataType = torchrec.modules.embedding_configs.DataType
SETTINGS: dict[str, tuple[bool, dict[str, Any]]] = {
    "rows": (False, {}),
    "sums": (True, {}),
    "means": (True, {"pooling": torchrec.PoolingType.MEAN}),
    "rows of 16 bits": (False, {"data_type": DataType.FP16}),
    "sums of 16 bits": (True, {"data_type": DataType.FP16}),
}
FEATURES: dict[str, Callable[[], Any]] = {
    "int64": keyed,
    "int32": lambda: keyed(dtype=torch.int32),
    "permuted": lambda: keyed().permute([2, 0, 1]),
    "no samples": lambda: torchrec.KeyedJaggedTensor(
        list(BAGS), torch.empty(0, dtype=torch.int64), lengths=torch.empty(0, dtype=torch.int32)
    ),
}


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize(("pooled", "settings"), SETTINGS.values(), ids=SETTINGS)
def test_results_are_torchrecs_bit_for_bit(
    pooled: bool, settings: dict[str, Any], features: Callable[[], Any]
) -> None:
    theirs, ours = pair(pooled, **settings)
    expected, found = theirs(features()), ours(features())
    assert [*found.keys()] == [*expected.keys()] == ["user", "seen", "word@item", "word@word"]
    if pooled:
        assert_same_bytes(found.values().detach(), expected.values().detach())
        expected, found = expected.to_dict(), found.to_dict()
        assert [*found] == [*expected]
    for key, own in expected.items():
        if pooled:
            assert_same_bytes(found[key].detach(), own.detach())
            continue
        assert_same_bytes(found[key].values().detach(), own.values().detach())
        assert found[key].lengths().tolist() == own.lengths().tolist()
        assert found[key].offsets().tolist() == own.offsets().tolist()


def test_weighted_bags_are_torchrecs() -> None:
    theirs, ours = pair(True, is_weighted=True)
    features = keyed(weights=True)
    torch.testing.assert_close(ours(features).values(), theirs(features).values())
    assert ours.is_weighted() is theirs.is_weighted() is True


@KINDS
def test_state_dicts_load_both_ways(pooled: bool) -> None:
    theirs, ours = pair(pooled)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.reset_parameters()
    theirs.load_state_dict(ours.state_dict())
    for key, rows in ours.state_dict().items():
        assert_same_bytes(theirs.state_dict()[key], rows)
    again = pair(pooled)[1]
    again.load_state_dict(theirs.state_dict())
    for key, rows in ours.state_dict().items():
        assert_same_bytes(again.state_dict()[key], rows)


@KINDS
def test_a_step_of_sgd_returns_torchrecs_rows(pooled: bool) -> None:
    theirs, ours = pair(pooled)
    for module in (theirs, ours):
        found = module(keyed()).to_dict() if pooled else module(keyed())
        rows = [value if pooled else value.values() for value in found.values()]
        torch.cat([row.square().sum()[None] for row in rows]).sum().backward()
        torch.optim.SGD(module.parameters(), lr=0.5).step()
    for key, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[key], value)


def test_strides_that_vary_are_refused_by_name() -> None:
    features = torchrec.KeyedJaggedTensor(
        ["user", "seen", "word"],
        torch.tensor([1, 2, 3, 4]),
        lengths=torch.tensor([1, 1, 1, 1]),
        stride_per_key_per_rank=[[1], [2], [1]],
    )
    with pytest.raises(
        ValueError, match="equal numbers of samples, got {'user': 1, 'seen': 2, 'word': 1}"
    ):
        pair(True)[1](features)


@pytest.mark.parametrize(
    ("data_type", "dtype"),
    [("FP32", torch.float32), ("FP16", torch.float16), ("BF16", torch.bfloat16)],
)
def test_torchrecs_data_types_are_ours(data_type: str, dtype: torch.dtype) -> None:
    kind = getattr(DataType, data_type)
    ours = speedtorch.EmbeddingBagCollection(configs(True, data_type=kind))
    assert ours.table_weight("user").dtype == dtype


def test_a_data_type_that_is_no_float_is_refused() -> None:
    kind = DataType.INT8
    with pytest.raises(ValueError, match="user: data_type must be one of"):
        speedtorch.EmbeddingBagCollection(configs(True, data_type=kind))


@pytest.mark.parametrize(
    ("settings", "low", "high"),
    [
        ({}, -((1 / 20) ** 0.5), (1 / 20) ** 0.5),
        ({"weight_init_min": 2.0, "weight_init_max": 3.0}, 2.0, 3.0),
        ({"init_fn": lambda rows: rows.fill_(7.0)}, 7.0, 7.0),
    ],
    ids=["default", "bounds", "init_fn"],
)
def test_torchrecs_configs_give_first_values(
    settings: dict[str, Any], low: float, high: float
) -> None:
    ours = speedtorch.EmbeddingBagCollection(configs(True, **settings))
    rows = ours.table_weight("user")
    assert low - 1e-6 <= rows.min() <= low + 0.2 * (high - low)
    assert high - 0.2 * (high - low) <= rows.max() <= high + 1e-6


def test_our_configs_are_torchrecs_by_their_fields() -> None:
    theirs = configs(True)[1]
    ours = speedtorch.EmbeddingBagConfig(
        num_embeddings=30, embedding_dim=4, name="item", feature_names=["seen", "word"]
    )
    for field in ("num_embeddings", "embedding_dim", "name", "feature_names"):
        assert getattr(ours, field) == getattr(theirs, field)
    assert torchrec.PoolingType.SUM.value.lower() == ours.pooling


def test_prefetch_takes_torchrecs_features() -> None:
    _, ours = pair(True)
    seen = []
    for features in speedtorch.prefetch([keyed() for _ in range(4)], ours, ids=lambda batch: batch):
        seen.append(ours(features).values().detach().clone())
    assert len(seen) == 4
    assert_same_bytes(seen[3], seen[0])


def test_a_keyed_result_has_the_methods_of_torchrecs() -> None:
    theirs, ours = pair(True)
    expected, found = theirs(keyed()), ours(keyed())
    for method in ("offset_per_key", "length_per_key", "key_dim", "device", "keys"):
        assert getattr(found, method)() == getattr(expected, method)()
    moved = found.to(torch.device("cpu"))
    assert_same_bytes(moved.values().detach(), expected.values().detach())


GROUPS = {
    "each key once": [["word@item", "user"], ["seen", "word@word"]],
    "some keys": [["seen"]],
    "a key twice": [["seen", "user"], ["seen", "word@item"]],
}


@pytest.mark.parametrize("how", ["regroup", "regroup_as_dict", "KTRegroupAsDict"])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_torchrec_regroups_our_results(groups: list[list[str]], how: str) -> None:
    names = [f"group{number}" for number in range(len(groups))]

    def regrouped(result: Any) -> list[torch.Tensor]:
        keyed_tensor = torchrec.KeyedTensor
        if how == "regroup":
            return list(keyed_tensor.regroup([result], groups))
        if how == "regroup_as_dict":
            return [*keyed_tensor.regroup_as_dict([result], groups, names).values()]
        return [*torchrec.modules.regroup.KTRegroupAsDict(groups, names)([result]).values()]

    theirs, ours = pair(True)
    expected, found = regrouped(theirs(keyed())), regrouped(ours(keyed()))
    for part, own in zip(found, expected, strict=True):
        assert_same_bytes(part.detach(), own.detach())
    torch.cat(found, 1).sum().backward()
    assert ours.group_of("user").weight.grad is not None


def test_torchrec_regroups_our_results_beside_its_own() -> None:
    theirs, ours = pair(True)
    other = torchrec.KeyedTensor(["more"], [2], torch.ones(3, 2))
    groups = [["more", "seen"], ["user"]]
    expected = torchrec.KeyedTensor.regroup([theirs(keyed()), other], groups)
    found = torchrec.KeyedTensor.regroup([ours(keyed()), other], groups)
    for part, own in zip(found, expected, strict=True):
        assert_same_bytes(part.detach(), own.detach())


def test_rows_of_a_feature_have_the_methods_of_torchrecs() -> None:
    theirs = torchrec.EmbeddingCollection(configs(False), need_indices=True)
    ours = speedtorch.EmbeddingCollection(configs(False), need_indices=True)
    ours.load_state_dict(theirs.state_dict())
    assert ours.embedding_names_by_table() == theirs.embedding_names_by_table()
    assert ours.embedding_dim() == theirs.embedding_dim()
    assert ours.need_indices() is theirs.need_indices() is True
    assert ours.device == theirs.device
    expected, found = theirs(keyed()), ours(keyed())
    for key in expected:
        for method in ("values", "lengths", "offsets", "weights", "weights_or_none"):
            own = getattr(expected[key], method)()
            assert_same_bytes(getattr(found[key], method)().to(own.dtype).detach(), own.detach())
        for method in ("to_dense", "to_dense_weights"):
            pairs = zip(
                getattr(found[key], method)(), getattr(expected[key], method)(), strict=True
            )
            for part, own in pairs:
                assert_same_bytes(part.detach(), own.detach())
        for length, padding in ((None, 0.0), (2, -1.0), (6, 7.0)):
            for method in ("to_padded_dense", "to_padded_dense_weights"):
                part, own = (
                    getattr(each[key], method)(length, padding) for each in (found, expected)
                )
                assert_same_bytes(part.detach(), own.detach())


def test_a_table_is_read_by_its_name_as_torchrecs() -> None:
    for pooled, kept_as in ((True, "embedding_bags"), (False, "embeddings")):
        theirs, ours = pair(pooled)
        expected, found = getattr(theirs, kept_as), getattr(ours, kept_as)
        assert list(found) == list(expected)
        for name, table in expected.items():
            assert_same_bytes(found[name].weight.clone(), table.weight.detach())
            assert found[name].weight.shape == table.weight.shape


def test_a_tensor_dict_has_features() -> None:
    tables = pair(True)[1]
    tensordict = pytest.importorskip("tensordict")
    features = {key: torch.tensor([3, 4, 0]) for key in BAGS}
    found = tables(tensordict.TensorDict(features, batch_size=[3]))
    assert_same_bytes(found.values().detach(), tables(features).values().detach())


def test_inverse_indices_are_refused_rather_than_ignored() -> None:
    features = torchrec.KeyedJaggedTensor(
        ["user", "seen", "word"],
        torch.tensor([1, 2, 3]),
        lengths=torch.tensor([1, 1, 1]),
        inverse_indices=(["user", "seen", "word"], torch.zeros(3, 2, dtype=torch.int64)),
    )
    assert pair(True)[0](features).values().shape[0] == 2
    with pytest.raises(NotImplementedError, match="inverse_indices are not supported"):
        pair(True)[1](features)


def one_width() -> list[Any]:
    """A table for each of two features, which the models take by their names."""
    return [
        torchrec.EmbeddingBagConfig(
            name=f"t{name}", num_embeddings=30, embedding_dim=4, feature_names=[name]
        )
        for name in ("user", "seen")
    ]


def twins(**settings: Any) -> list[Any]:
    theirs = torchrec.EmbeddingBagCollection(one_width(), **settings)
    ours = speedtorch.EmbeddingBagCollection(one_width(), **settings)
    ours.load_state_dict(theirs.state_dict())
    return [theirs, ours]


def test_dlrm_trains_with_our_tables_as_with_torchrecs() -> None:
    models = []
    for tables in twins():
        torch.manual_seed(0)
        dlrm = torchrec.models.dlrm.DLRM(tables, 3, [8, 4], [5, 1])
        models.append(torchrec.models.dlrm.DLRMTrain(dlrm))
    batch = torchrec.datasets.utils.Batch(torch.rand(3, 3), keyed(), torch.tensor([0, 1, 1]))
    losses: list[list[Any]] = [[], []]
    for model, own in zip(models, losses, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(4):
            optimizer.zero_grad()
            loss, _ = model(batch)
            loss.backward()
            optimizer.step()
            own.append(loss.detach())
    torch.testing.assert_close(torch.stack(losses[1]), torch.stack(losses[0]))
    for key, value in models[0].state_dict().items():
        torch.testing.assert_close(models[1].state_dict()[key], value)
    assert losses[0][-1] < losses[0][0]


def test_deepfm_returns_with_our_tables_what_it_returns_with_torchrecs() -> None:
    found = []
    for tables in twins():
        torch.manual_seed(0)
        model = torchrec.models.deepfm.SimpleDeepFMNN(
            num_dense_features=3,
            embedding_bag_collection=tables,
            hidden_layer_size=5,
            deep_fm_dimension=4,
        )
        torch.manual_seed(1)
        found.append(model(torch.rand(3, 3), keyed()))
        found[-1].sum().backward()
    assert_same_bytes(found[1].detach(), found[0].detach())


@pytest.mark.parametrize("collection", [False, True], ids=["dict", "collection"])
def test_position_weights_train_with_our_tables(collection: bool) -> None:
    modules = torchrec.modules.feature_processor_
    results, gradients = [], []
    for tables in twins(is_weighted=True):
        lengths = {"user": 5, "seen": 5}
        processors: Any = {
            key: modules.PositionWeightedModule(max_feature_length=n) for key, n in lengths.items()
        }
        if collection:
            processors = modules.PositionWeightedModuleCollection(lengths)
        model = torchrec.modules.fp_embedding_modules.FeatureProcessedEmbeddingBagCollection(
            tables, processors
        )
        found = model(keyed()).to_dict()
        results.append(torch.cat([found["user"], found["seen"]], 1))
        results[-1].square().sum().backward()
        named = model._feature_processors.named_parameters()
        gradients.append({name: each.grad for name, each in named})
    torch.testing.assert_close(results[1], results[0])
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


def test_a_traced_dlrm_calls_our_tables() -> None:
    model = torchrec.models.dlrm.DLRM(twins()[1], 3, [8, 4], [5, 1])
    traced = torchrec.fx.symbolic_trace(model)
    dense = torch.rand(3, 3)
    assert_same_bytes(traced(dense, keyed()).detach(), model(dense, keyed()).detach())

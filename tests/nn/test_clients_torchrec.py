"""Collections beside torchrec's own: configs, inputs, results and state dicts.

Needs torchrec: make clients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import assert_same_bytes

import speedtorch

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
torchrec = pytest.importorskip("torchrec")

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
DTYPES = pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=["int64", "int32"])


@DTYPES
@pytest.mark.parametrize("pooling", ["SUM", "MEAN"])
def test_bags_are_torchrecs_bit_for_bit(pooling: str, dtype: torch.dtype) -> None:
    theirs, ours = pair(True, pooling=getattr(torchrec.PoolingType, pooling))
    features = keyed(dtype=dtype)
    expected, found = theirs(features), ours(features)
    assert found.keys() == expected.keys() == ["user", "seen", "word@item", "word@word"]
    assert_same_bytes(found.values().detach(), expected.values().detach())
    for key in expected.keys():  # noqa: SIM118
        assert_same_bytes(found[key].detach(), expected[key].detach())
    assert list(found.to_dict()) == list(expected.to_dict())


def test_weighted_bags_are_torchrecs() -> None:
    theirs, ours = pair(True, is_weighted=True)
    features = keyed(weights=True)
    torch.testing.assert_close(ours(features).values(), theirs(features).values())
    assert ours.is_weighted() is theirs.is_weighted() is True


@DTYPES
def test_rows_are_torchrecs_bit_for_bit(dtype: torch.dtype) -> None:
    theirs, ours = pair(False)
    features = keyed(dtype=dtype)
    expected, found = theirs(features), ours(features)
    assert found.keys() == list(expected)
    for key, rows in expected.items():
        assert_same_bytes(found[key].values().detach(), rows.values().detach())
        assert found[key].lengths().tolist() == rows.lengths().tolist()
        assert found[key].offsets().tolist() == rows.offsets().tolist()


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
def test_a_step_of_sgd_gives_torchrecs_rows(pooled: bool) -> None:
    theirs, ours = pair(pooled)
    for module in (theirs, ours):
        found = module(keyed()).to_dict() if pooled or module is ours else module(keyed())
        rows = [each if pooled else each.values() for each in found.values()]
        torch.cat([each.square().sum()[None] for each in rows]).sum().backward()
        torch.optim.SGD(module.parameters(), lr=0.5).step()
    for key, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[key], value)


def test_features_that_torchrec_has_permuted_or_not_asked_for() -> None:
    theirs, ours = pair(True)
    features = keyed().permute([2, 0, 1])
    assert_same_bytes(ours(features).values().detach(), theirs(features).values().detach())


@KINDS
def test_no_samples_are_torchrecs(pooled: bool) -> None:
    theirs, ours = pair(pooled)
    features = torchrec.KeyedJaggedTensor(
        list(BAGS), torch.empty(0, dtype=torch.int64), lengths=torch.empty(0, dtype=torch.int32)
    )
    expected, found = theirs(features), ours(features)
    if pooled:
        assert found.values().shape == expected.values().shape
    else:
        for key, rows in expected.items():
            assert found[key].values().shape == rows.values().shape


def test_strides_that_vary_are_refused_by_name() -> None:
    features = torchrec.KeyedJaggedTensor(
        ["user", "seen", "word"],
        torch.tensor([1, 2, 3, 4]),
        lengths=torch.tensor([1, 1, 1, 1]),
        stride_per_key_per_rank=[[1], [2], [1]],
    )
    with pytest.raises(ValueError, match="as many samples, got {'user': 1, 'seen': 2, 'word': 1}"):
        pair(True)[1](features)


@pytest.mark.parametrize(
    ("data_type", "dtype"),
    [("FP32", torch.float32), ("FP16", torch.float16), ("BF16", torch.bfloat16)],
)
def test_torchrecs_data_types_are_ours(data_type: str, dtype: torch.dtype) -> None:
    kind = getattr(torchrec.modules.embedding_configs.DataType, data_type)
    ours = speedtorch.EmbeddingBagCollection(configs(True, data_type=kind))
    assert ours.table_weight("user").dtype == dtype


def test_a_data_type_that_is_no_float_is_refused() -> None:
    kind = torchrec.modules.embedding_configs.DataType.INT8
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

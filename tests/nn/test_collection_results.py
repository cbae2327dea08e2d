"""What collections give has the methods of torchrec's KeyedTensor and JaggedTensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import NEEDS_GPU
from keyed_ids import KeyedIds
from reference import assert_same_bytes
from torch import Tensor, nn

from speedtorch import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)

BAGS = {"user": [[3], [9], [3]], "seen": [[1, 2, 8], [], [4, 4]], "word": [[4], [0, 1, 2, 0], []]}
"""Ids of each feature, three samples."""
TABLES = {"user": (10, 4, ["user"]), "item": (9, 2, ["seen"]), "word": (5, 4, ["word"])}
"""Rows, columns and features: two tables of one group, around one of another."""
GROUPS = pytest.mark.parametrize("names", [("user", "item", "word"), ("user", "word")])


def bags(names: Any = tuple(TABLES), device: str = "cpu") -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(rows, columns, name, feature_names=features)
        for name, (rows, columns, features) in TABLES.items()
        if name in names
    ]
    return EmbeddingBagCollection(configs, device=device)


def rows(need_indices: bool = False, device: str = "cpu", columns: int = 0) -> EmbeddingCollection:
    configs = [
        EmbeddingConfig(size, columns or wide, name, feature_names=features)
        for name, (size, wide, features) in TABLES.items()
    ]
    return EmbeddingCollection(configs, device, need_indices)


@GROUPS
def test_features_lie_where_offset_per_key_says(names: tuple[str, ...], device: str) -> None:
    ours = bags(names, device)
    found = ours(KeyedIds.of(BAGS, device))
    offsets, columns, values = found.offset_per_key(), found.length_per_key(), found.values()
    assert columns == [TABLES[name][1] for name in names]
    assert found.key_dim() == 1
    assert "user" in found and "film" not in found and len(found) == len(names)
    assert offsets[-1] == values.shape[found.key_dim()]
    assert ours.device.type == found.device().type == device
    for key, first, width in zip(found.keys(), offsets, columns, strict=False):
        assert_same_bytes(found[key], values[:, first : first + width])
    assert found.values() is values  # put side by side once
    if len(names) == 2:  # of one group: nothing is copied
        assert values.data_ptr() == found["user"].data_ptr()


@pytest.mark.parametrize("reading", [torch.no_grad, torch.inference_mode])
def test_values_that_were_read_without_gradients_have_a_gradient_later(reading: Any) -> None:
    ours = bags()
    found = ours(KeyedIds.of(BAGS))
    with reading():
        values = found.values()
        values.norm()
    assert found.values() is values
    values.square().sum().backward()
    for name in TABLES:
        assert ours.group_of(name).weight.grad.abs().sum() > 0
    with reading():
        found = ours(KeyedIds.of(BAGS))
        assert found.values() is found.values() and not found.values().requires_grad


@GROUPS
def test_a_result_moves_to_a_device_with_its_gradient(names: tuple[str, ...], device: str) -> None:
    ours = bags(names)
    found = ours(KeyedIds.of(BAGS))
    moved = found.to(torch.device(device), non_blocking=True)
    assert moved.device().type == moved.values().device.type == device
    assert moved.keys() == found.keys()
    assert moved.offset_per_key() == found.offset_per_key()
    for key, value in found.items():
        assert_same_bytes(moved[key].detach().cpu(), value.detach())
    moved["word"].sum().backward()
    assert ours.group_of("word").weight.grad is not None


@NEEDS_GPU
@GROUPS
def test_a_result_is_recorded_on_a_stream(names: tuple[str, ...]) -> None:
    bags(names, "cuda")(KeyedIds.of(BAGS, "cuda")).record_stream(torch.cuda.Stream())


def test_reprs_say_the_features() -> None:
    assert repr(bags()(KeyedIds.of(BAGS))) == "KeyedFeatures({'user': 4, 'seen': 2, 'word': 4})"
    assert repr(rows()(KeyedIds.of(BAGS))["seen"]) == "JaggedRows(samples=3, columns=2)"


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bags_of_16_bits_are_float32_and_train_16_bits(dtype: torch.dtype, weighted: bool) -> None:
    config = EmbeddingBagConfig(9, 2, "a", data_type=dtype)
    ours = EmbeddingBagCollection([config], is_weighted=weighted)
    ids, offsets = torch.tensor([1, 2, 2]), torch.tensor([0, 2, 3])
    rows = ours.table_weight("a").clone()
    given = (ids, offsets, torch.full((3,), 0.5)) if weighted else (ids, offsets)
    found = ours({"a": given})["a"]
    factor = 0.5 if weighted else 1
    expected = torch.stack([rows[1] * factor + rows[2] * factor, rows[2] * factor])
    assert_same_bytes(found.detach(), expected.float())
    assert nn.Linear(2, 1)(found).shape == (2, 1)
    found.sum().backward()
    torch.optim.SGD(ours.parameters(), lr=1.0).step()
    assert_same_bytes(ours.table_weight("a")[1], rows[1] - factor)


def test_rows_are_ordered_by_sample() -> None:
    found = rows()(KeyedIds.of(BAGS))["seen"]
    assert [each.shape for each in found.to_dense()] == [(3, 2), (0, 2), (2, 2)]
    assert_same_bytes(torch.cat(found.to_dense()), found.values())


@pytest.mark.parametrize("length", [None, 2, 3, 5, 0])
def test_rows_are_padded_to_one_length(length: int | None, device: str) -> None:
    found = rows(device=device)(KeyedIds.of(BAGS, device))["seen"]
    padded = found.to_padded_dense(length, padding_value=7.0)
    length = 3 if length is None else length
    assert padded.shape == (3, length, 2)
    for sample, own in zip(padded, found.to_dense(), strict=True):
        count = min(length, len(own))
        assert_same_bytes(sample[:count].detach(), own[:count].detach())
        assert_same_bytes(sample[count:].detach(), torch.full_like(sample[count:], 7.0))


def test_padding_passes_rows_the_gradient_of_their_places() -> None:
    ours = rows()
    found = ours(KeyedIds.of(BAGS))["seen"]
    factors = torch.arange(1.0, 13).view(3, 2, 2)
    (found.to_padded_dense(2) * factors).sum().backward()
    gradient = torch.zeros(9, 2)
    places = {1: (0, 0), 2: (0, 1)}  # 8 is behind the second
    for row, place in places.items():
        gradient[row] = factors[place]
    gradient[4] = factors[2, 0] + factors[2, 1]
    before = ours.table_weight("item").clone()
    torch.optim.SGD(ours.parameters(), lr=1.0).step()
    assert_same_bytes(ours.table_weight("item"), before - gradient)


@pytest.mark.parametrize("samples", [0, 2])
def test_no_rows_are_all_padding(samples: int) -> None:
    found = rows(need_indices=True)(KeyedIds.of({key: [[]] * samples for key in BAGS}))["seen"]
    assert found.to_padded_dense().shape == (samples, 0, 2)
    assert_same_bytes(found.to_padded_dense(2, 1.0).detach(), torch.ones(samples, 2, 2))
    assert found.to_padded_dense_weights(2).shape == (samples, 2)  # type: ignore[union-attr]
    assert len(found.to_dense()) == samples


def test_need_indices_returns_the_ids_as_weights(device: str) -> None:
    ours = rows(need_indices=True, device=device)
    assert ours.need_indices() is True and ours.device.type == device
    for features in (KeyedIds.of(BAGS, device), KeyedIds.of(dict(reversed(BAGS.items())))):
        found = ours(features)
        for key, bags_ in BAGS.items():
            assert found[key].weights().tolist() == [row for bag in bags_ for row in bag]
    seen = found["seen"]
    assert [weight.tolist() for weight in seen.to_dense_weights()] == BAGS["seen"]  # type: ignore[union-attr]
    padded = seen.to_padded_dense_weights(2, padding_value=-1)
    assert padded.tolist() == [[1, 2], [-1, -1], [4, 4]]  # type: ignore[union-attr]


def test_without_need_indices_there_are_no_weights() -> None:
    ours = rows()
    found = ours(KeyedIds.of(BAGS))["seen"]
    assert ours.need_indices() is False
    assert found.weights_or_none() is None
    assert found.to_dense_weights() is None
    assert found.to_padded_dense_weights() is None
    with pytest.raises(ValueError, match="build the EmbeddingCollection with need_indices=True"):
        found.weights()


@pytest.mark.parametrize("need_indices", [False, True])
def test_rows_of_a_feature_move_to_a_device(need_indices: bool, device: str) -> None:
    found = rows(need_indices)(KeyedIds.of(BAGS))["word"]
    moved = found.to(device)
    assert moved.device().type == device
    assert_same_bytes(moved.values().detach().cpu(), found.values().detach())
    assert moved.offsets().tolist() == found.offsets().tolist() == [0, 1, 5, 5]
    assert moved.lengths().tolist() == found.lengths_or_none().tolist() == [1, 4, 0]
    assert moved.offsets_or_none().device.type == device
    if need_indices:
        assert moved.weights().tolist() == found.weights().tolist()
    else:
        assert moved.weights_or_none() is None
    assert_same_bytes(moved.to_padded_dense().detach().cpu(), found.to_padded_dense().detach())


@NEEDS_GPU
def test_rows_are_recorded_on_a_stream() -> None:
    rows(True, "cuda")(KeyedIds.of(BAGS, "cuda"))["word"].record_stream(torch.cuda.Stream())


@NEEDS_GPU
def test_where_rows_of_a_gpu_are_is_read_at_first_need() -> None:
    ours, keyed = rows(True, "cuda", columns=4), KeyedIds.of(BAGS, "cuda")
    ours(keyed)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = ours(keyed)
        assert found.rows().shape == (13, 4)
        assert found["seen"].lengths().shape == (3,)
        assert found["seen"].offsets().shape == (4,)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found["seen"].lengths().tolist() == [3, 0, 2]


def test_a_collection_names_its_results_by_table() -> None:
    ours = EmbeddingCollection(
        [
            EmbeddingConfig(9, 2, "a", feature_names=["x", "y"]),
            EmbeddingConfig(9, 2, "b"),
            EmbeddingConfig(9, 2, "c", feature_names=["y"]),
        ]
    )
    assert ours.embedding_names_by_table() == [["x", "y@a"], ["b"], ["y@c"]]
    assert ours.embedding_dim() == 2


def test_columns_that_differ_have_no_embedding_dim() -> None:
    with pytest.raises(ValueError, match=r"the tables have several dimensions, \[2, 4\]"):
        rows().embedding_dim()


@pytest.mark.parametrize("pooled", [False, True], ids=["rows", "bags"])
def test_a_traced_model_calls_its_collection(pooled: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = bags() if pooled else rows()

        def forward(self, features: Any) -> Tensor:
            found = self.tables(features)["seen"]
            result: Tensor = (found if pooled else found.values()) * 2
            return result

    model = Model()
    traced = torch.fx.symbolic_trace(model)
    assert_same_bytes(traced(KeyedIds.of(BAGS)).detach(), model(KeyedIds.of(BAGS)).detach())
    with pytest.raises(NotImplementedError, match="torch.fx cannot trace a lookup"):
        torch.fx.symbolic_trace(model.tables)

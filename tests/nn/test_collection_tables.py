"""The tables of a collection by name: their weights, the names of parameters, and checkpoints."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from keyed_ids import KeyedIds
from loops import sgd_step
from reference import assert_same_bytes, assert_same_content
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
)
from torch_checkpoints import Training, WithCheckpoint

import speedtorch
from speedtorch import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from speedtorch.table.lazy_init import ShardSpec

ROWS = {"user": 20, "word": 25, "item": 30, "city": 15}
COLUMNS = {"user": 4, "word": 3, "item": 4, "city": 4}
BAGS = {"user": [[3], [19]], "item": [[1, 29], [4]], "word": [[24], []], "city": [[0], [14, 0]]}
COLLECTIONS = pytest.mark.parametrize("pooled", [False, True], ids=["rows", "bags"])


def made(pooled: bool = True, device: str = "cpu") -> Any:
    """Two joined tables, one of other columns between them, and one in a group of its own."""
    kind = EmbeddingBagCollection if pooled else EmbeddingCollection
    config = EmbeddingBagConfig if pooled else EmbeddingConfig
    groups = {"city": "slow"}
    tables = [config(ROWS[n], COLUMNS[n], n, group=groups.get(n, "")) for n in ROWS]
    return kind(tables, device=device)


def tables_of(collection: Any) -> Any:
    return getattr(collection, collection._kept_as)


def train(collection: Any) -> None:
    sgd_step(collection, loss(collection))


def loss(collection: Any) -> Tensor:
    found = collection(KeyedIds.of(BAGS))
    values = found.to_dict() if isinstance(collection, EmbeddingBagCollection) else found
    parts = [v if isinstance(v, Tensor) else v.values() for v in values.values()]
    return sum(part.square().sum() for part in parts)  # type: ignore[return-value]


@COLLECTIONS
def test_a_parameters_name_has_the_names_of_its_tables(pooled: bool) -> None:
    model = nn.ModuleDict({"tables": made(pooled)})
    first = "tables.embedding_bags" if pooled else "tables.embeddings"
    names = [name for name, _ in model.named_parameters()]
    assert names == [f"{first}.user+item.weight", f"{first}.word.weight", f"{first}.city.weight"]


@COLLECTIONS
def test_torch_finds_a_parameter_by_its_name(pooled: bool) -> None:
    model = nn.ModuleDict({"tables": made(pooled)})
    for name, parameter in model.named_parameters():
        assert model.get_parameter(name) is parameter


@pytest.mark.parametrize("name", ["items", "type", "training", "_modules"])
def test_a_table_called_as_an_attribute_of_a_module_dict_is_refused(name: str) -> None:
    message = rf"'{name}' cannot be a table name.*feature_names=\['{name}'\]"
    with pytest.raises(ValueError, match=message):
        EmbeddingBagCollection([EmbeddingBagConfig(9, 2, name)])


def test_a_table_called_as_two_joined_ones_is_refused() -> None:
    tables = [EmbeddingBagConfig(9, 2, "a"), EmbeddingBagConfig(9, 2, "b")]
    with pytest.raises(ValueError, match=r"'a\+b' is also the parameter name of"):
        EmbeddingBagCollection([*tables, EmbeddingBagConfig(9, 3, "a+b")])
    joined = [*tables, EmbeddingBagConfig(9, 2, "a+b")]  # of one group, which is another name
    ours = EmbeddingBagCollection(joined)
    assert [n for n, _ in ours.named_parameters()] == ["embedding_bags.a+b+a+b.weight"]


@COLLECTIONS
def test_tables_are_gone_through_by_name(pooled: bool) -> None:
    tables = tables_of(made(pooled))
    names = ["user", "word", "item", "city"]
    assert [*tables] == [*tables.keys()] == [name for name, _ in tables.items()] == names
    assert len(tables) == len([*tables.values()]) == 4
    assert "item" in tables and "user+item" not in tables
    for name, table in tables.items():
        assert (table.num_embeddings, table.embedding_dim) == (ROWS[name], COLUMNS[name])
    with pytest.raises(KeyError, match=r"'film' is not one of the tables \['user', 'word'"):
        tables["film"]
    with pytest.raises(AttributeError, match="film"):
        tables.film  # noqa: B018


@COLLECTIONS
def test_a_tables_weight_has_its_rows_as_they_are_now(pooled: bool, device: str) -> None:
    ours = made(pooled, device)
    tables = tables_of(ours)
    weights = {name: table.weight for name, table in tables.items()}
    for _ in range(2):
        for name, weight in weights.items():
            assert weight.shape == (ROWS[name], COLUMNS[name])
            with torch.no_grad():
                assert_same_bytes(weight.clone(), ours.table_weight(name))
                assert_same_bytes(weight[[3, 3]].cpu(), ours.table_weight(name)[[3, 3]])
        train(ours)


def test_a_table_alone_in_its_group_has_the_parameter_as_its_weight() -> None:
    ours = made()
    for name in ("word", "city"):
        assert ours.embedding_bags[name].weight is ours.group_of(name).weight
        assert ours.embedding_bags[name] is getattr(ours.embedding_bags, name)


def test_reading_the_shape_of_a_joined_table_takes_no_memory() -> None:
    ours = made()
    weight = ours.embedding_bags["item"].weight
    assert (weight.shape, weight.size(0), len(weight), weight.dim()) == ((30, 4), 30, 30, 2)
    assert (weight.dtype, weight.numel(), weight.device.type) == (torch.float32, 120, "cpu")
    assert not ours.group_of("item").trained_rows.table.is_drawn


WRITES: dict[str, Any] = {
    "fill_": lambda weight: weight.fill_(2.0),
    "data": lambda weight: weight.data.fill_(2.0),
    "copy_": lambda weight: weight.copy_(torch.full((30, 4), 2.0)),
    "slice": lambda weight: weight.__setitem__(slice(None), 2.0),
    "init": lambda weight: nn.init.constant_(weight, 2.0),
    "data is set": lambda weight: setattr(weight, "data", torch.full((30, 4), 2.0)),
    "out": lambda weight: torch.add(torch.ones(30, 4), 1, out=weight),
}


@pytest.mark.parametrize("how", WRITES)
def test_rows_written_to_a_joined_table_are_looked_up(how: str, device: str) -> None:
    ours = made(device=device)
    before = ours.table_weight("user").clone()
    features = KeyedIds.of(BAGS)
    ours(features)  # holds rows
    WRITES[how](ours.embedding_bags["item"].weight)
    expected = torch.tensor([[4.0] * 4, [2.0] * 4])
    assert_same_bytes(ours(features)["item"].detach().cpu(), expected)
    assert_same_bytes(ours.table_weight("user"), before)


def test_a_joined_weight_changes_in_place_and_is_the_same_object() -> None:
    table = made().embedding_bags["item"]
    before = table.weight.clone()
    weight = table.weight
    table.weight *= 2
    assert table.weight is weight
    assert_same_bytes(weight.clone(), before * 2)
    with pytest.raises(AttributeError, match="table 'item': its weight cannot be replaced"):
        table.weight = nn.Parameter(torch.zeros(30, 4))


def test_older_data_of_a_joined_weight_raises_after_an_assignment() -> None:
    weight = made().embedding_bags["item"].weight
    first, copied = [weight.data, weight.detach()], weight.data.clone()
    weight.data *= 2
    assert_same_bytes(first[0].clone(), copied * 2)
    weight.data = first[1]  # its own rows
    weight.data = torch.zeros(30, 4)
    for older in first:
        for use in (older.sum, lambda older=older: setattr(weight, "data", older)):
            with pytest.raises(NotImplementedError, match="'item': .* older than an assignment"):
                use()
    weight.data = copied
    assert_same_bytes(weight.data.clone(), copied)


def test_rows_of_another_shape_are_not_set_as_a_joined_tables() -> None:
    weight = made().embedding_bags["item"].weight
    with pytest.raises(ValueError, match=r"size mismatch for table 'item'.*\(1, 4\)"):
        weight.data = torch.zeros(1, 4)


@pytest.mark.parametrize(
    "use",
    [
        lambda weight: weight.requires_grad_(False),
        lambda weight: setattr(weight, "requires_grad", False),
        lambda weight: weight.grad,
        lambda weight: setattr(weight, "grad", torch.zeros(30, 4)),
        lambda weight: weight.retain_grad(),
        lambda weight: optim.SGD([weight], lr=1.0),
    ],
    ids=["requires_grad_", "requires_grad", "grad", "set grad", "retain_grad", "optimizer"],
)
def test_a_joined_table_is_no_parameter_and_says_which_is(use: Any) -> None:
    message = r"table 'item' has no .* group_of\('item'\).weight, of tables 'user', 'item'. .*"
    with pytest.raises(RuntimeError, match=message + "set group='item' in the table's config"):
        use(made().embedding_bags["item"].weight)


def test_a_joined_table_is_no_module_and_says_what_is() -> None:
    table = made().embedding_bags["item"]
    with pytest.raises(AttributeError, match=r"has no 'parameters'\. .*group_of\('item'"):
        table.parameters()
    assert repr(table) == "JoinedTable(item: 30; columns=4)"


@pytest.mark.parametrize("rows", [1, 7, 30, 100])
def test_a_joined_table_returns_its_rows_in_blocks(rows: int) -> None:
    ours = made()
    train(ours)  # held rows are in the blocks, too
    table = ours.embedding_bags["item"]
    blocks = [*table.blocks(rows)]
    assert [first for first, _ in blocks] == [*range(0, 30, rows)]
    assert_same_bytes(torch.cat([block for _, block in blocks]), table.weight.clone())
    assert_same_bytes(torch.from_numpy(table.numpy()), table.weight.clone())
    blocks[0][1].zero_()  # a copy
    table.numpy()[29] = 5  # a view
    assert table.weight[29].tolist() == [5] * 4 and table.weight[0].any()
    with pytest.raises(ValueError, match="rows: expected 1 or more"):
        table.blocks(0)


def test_a_joined_table_requires_a_gradient_as_its_group_does() -> None:
    ours = made()
    weight = ours.embedding_bags["item"].weight
    assert weight.requires_grad is True
    ours.group_of("item").weight.requires_grad_(False)
    assert weight.requires_grad is False


def test_a_joined_weight_is_copied_and_saved_as_a_tensor() -> None:
    weight = made().embedding_bags["item"].weight
    assert type(copy.deepcopy(weight)) is Tensor
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    assert_same_bytes(torch.load(file), weight.clone())
    assert_same_bytes(torch.from_numpy(weight.numpy()), weight.clone())


@COLLECTIONS
def test_rows_of_a_share_are_not_taken_for_all(pooled: bool) -> None:
    ours = made(pooled)
    for group in {id(each): each for each in map(ours.group_of, ROWS)}.values():
        rows = range(group.num_embeddings // 2)
        shard_spec = ShardSpec(group.num_embeddings, [(rows, rows)], lambda seed: seed)
        group.keep_shard(shard_spec, lambda trained, _: trained)
    reads: list[Any] = [
        lambda: ours.table_weight("item"),
        lambda: ours.table_weight("word"),
        lambda: tables_of(ours)["item"].weight.sum(),
    ]
    for read in reads:
        with pytest.raises(RuntimeError, match=r"this rank has only a shard .* state_dict\(\)"):
            read()


def weights_of(collection: Any) -> dict[str, Tensor]:
    return {name: collection.table_weight(name).clone() for name in ROWS}


@pytest.mark.parametrize("full", [False, True], ids=["as it is", "full"])
@COLLECTIONS
def test_torchs_model_state_dict_is_loaded(pooled: bool, full: bool, device: str) -> None:
    options = StateDictOptions(full_state_dict=full)
    first, second = (nn.Sequential(made(pooled, device)) for _ in range(2))
    train(first[0])
    state = get_model_state_dict(first, options=options)
    loss(second[0])  # holds rows
    result = set_model_state_dict(second, state, options=options)
    assert str(result) == "<All keys matched successfully>"
    for name, rows in weights_of(first[0]).items():
        assert_same_bytes(second[0].table_weight(name), rows)


def with_sgd(model: nn.Sequential, rate: float) -> Training:
    """One group of the optimizer has a rate of its own."""
    slow = model[0].group_of("city").weight
    fast = [parameter for parameter in model.parameters() if parameter is not slow]
    groups = [{"params": fast, "lr": rate}, {"params": [slow], "lr": 2 * rate}]
    return model, [optim.SGD(groups)]


def with_adam(model: nn.Sequential, rate: float) -> Training:
    optimizer = optim.Adam(model.parameters(), lr=rate)
    speedtorch.attach(optimizer, model)
    return model, [optimizer]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("steps_before", [0, 1], ids=["fresh", "stepped"])
@pytest.mark.parametrize("begin", [with_sgd, with_adam], ids=["groups", "attached"])
@COLLECTIONS
def test_torchs_checkpoints_resume_state_and_settings(
    pooled: bool,
    begin: Callable[[nn.Sequential, float], Training],
    steps_before: int,
    device: str,
    tmp_path: Path,
) -> None:
    def steps(training: Training, count: int = 1) -> dict[str, Tensor]:
        collection, optimizer = training[0][0], training[1][0]
        for _ in range(count):
            loss(collection).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights_of(collection)

    first, second = (begin(nn.Sequential(made(pooled, device)), k) for k in (0.25, 1.0))
    steps(first, 3)
    steps(second, steps_before)
    WithCheckpoint().save(first, tmp_path)
    expected = steps(first)
    WithCheckpoint().load(second, tmp_path)
    rates = [[group["lr"] for group in part[1][0].param_groups] for part in (first, second)]
    assert rates[0] == rates[1]
    assert_same_content(steps(second), expected)


@COLLECTIONS
@pytest.mark.parametrize("attached", [False, True])
def test_every_saved_table_has_a_storage_of_its_own(
    pooled: bool, attached: bool, device: str
) -> None:
    """accelerate takes tensors of one storage for one, and saves the first of them alone."""
    ours = made(pooled, device)
    if attached:
        speedtorch.attach(optim.Adam(ours.parameters()), ours)
    loss(ours).backward()
    saved = ours.state_dict()
    assert len({value.untyped_storage().data_ptr() for value in saved.values()}) == len(ROWS)
    for key, value in saved.items():
        assert value.untyped_storage().nbytes() == value.nbytes
        assert_same_bytes(value, ours.table_weight(key.split(".")[1]))


def test_an_attached_optimizers_state_is_saved_by_group() -> None:
    model = nn.Sequential(made())
    optimizer = optim.Adam(model.parameters())
    speedtorch.attach(optimizer, model)
    loss(model[0]).backward()
    optimizer.step()
    state = get_state_dict(model, optimizer)[1]["state"]
    shapes = {name: fields["exp_avg"].shape for name, fields in state.items()}  # type: ignore[union-attr, index]
    assert shapes == {
        "0.embedding_bags.user+item.weight": (50, 4),
        "0.embedding_bags.word.weight": (25, 3),
        "0.embedding_bags.city.weight": (15, 4),
    }

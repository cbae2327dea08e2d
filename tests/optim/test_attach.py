"""attach: what an optimizer keeps of the rows lives in the table."""

from __future__ import annotations

import copy
import gc
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from probed_optimizers import Boxed
from reference import assert_same_bytes, assert_same_content
from torch import Tensor, nn, optim
from torch_checkpoints import through_a_file

import speedtorch
from speedtorch.optim import RowWiseAdagrad

ROWS, WIDTH = 20, 4
IDS = torch.tensor([3, 1, 3, 19])
EVERY = torch.arange(ROWS)


class Model(nn.Module):
    """An embedding and a dense layer; with torch's embedding the reference."""

    def __init__(self, make: Any = speedtorch.Embedding, device: str = "cpu") -> None:
        super().__init__()
        self.words = make(ROWS, WIDTH, device=device)
        self.out = nn.Linear(WIDTH, 1, device=device)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.words(ids).tanh())


def pair(
    make: Callable[..., optim.Optimizer] = optim.Adam, device: str = "cpu"
) -> list[tuple[Model, optim.Optimizer]]:
    """torch's model and ours with the same values, each with its optimizer; ours is attached."""
    torch.manual_seed(0)
    theirs, ours = Model(nn.Embedding, device), Model(device=device)
    ours.load_state_dict(theirs.state_dict())
    made = [(model, make(model.parameters(), lr=0.1)) for model in (theirs, ours)]
    speedtorch.attach(made[1][1], ours)
    return made


def train(made: list[tuple[Model, optim.Optimizer]], count: int = 1, ids: Tensor = EVERY) -> None:
    """Steps both in turn."""
    for _ in range(count):
        for model, optimizer in made:
            step(model, optimizer, ids)


def step(model: nn.Module, optimizer: optim.Optimizer, ids: Tensor = EVERY) -> None:
    optimizer.zero_grad()
    model(ids).square().sum().backward()
    optimizer.step()


def saved(*holders: Any) -> list[Any]:
    """State dicts as a file gives them back."""
    return list(through_a_file([holder.state_dict() for holder in holders]))


def test_loading_one_of_both_keeps_the_other_of_the_held_rows() -> None:
    (_, _), (ours, adam) = pair()
    model_state, adam_state = copy.deepcopy([ours.state_dict(), adam.state_dict()])
    step(ours, adam, IDS)
    rows = ours.words.table["weight"][[1, 3, 19]].clone()
    adam.load_state_dict(adam_state)
    assert_same_bytes(ours.state_dict()["words.weight"][[1, 3, 19]], rows)
    step(ours, adam, IDS)
    moments = adam.state[ours.words.weight]["exp_avg"].clone()
    ours.load_state_dict(model_state)
    assert moments.shape == (ROWS, WIDTH) and moments[[1, 3, 19]].any(1).all()
    assert_same_bytes(adam.state_dict()["state"][0]["exp_avg"], moments)


@pytest.mark.parametrize("make", [optim.Adam, Boxed])
def test_state_that_does_not_fit_changes_nothing(make: Any) -> None:
    (_, _), (ours, adam) = pair(make)
    step(ours, adam, IDS)
    before = copy.deepcopy(adam.state_dict())
    for wrong in (torch.zeros(3, WIDTH), None):
        bad = copy.deepcopy(before)
        bad["param_groups"][0]["lr"] = 7.0
        entries = bad["state"][0]
        entries.get("box", entries)["exp_avg"] = wrong
        with pytest.raises(ValueError, match=r"'exp_avg' of Embedding.*\[20, 4\].*nothing was"):
            adam.load_state_dict(bad)
    assert_same_content(adam.state_dict(), before)


def test_loading_a_fresh_state_forgets_the_old_one() -> None:
    (_, _), (ours, adam) = pair()
    fresh = copy.deepcopy(adam.state_dict())
    step(ours, adam, IDS)
    adam.load_state_dict(fresh)
    assert adam.state_dict()["state"].keys() == set()
    assert not ours.words.table["exp_avg"].any()


def test_state_fields_lie_in_the_record_of_the_row() -> None:
    model = Model()
    adam = optim.Adam(model.parameters())
    first = model.words.table["weight"].clone()
    speedtorch.attach(adam, model)
    assert list(model.words.table.fields) == ["weight", "exp_avg", "exp_avg_sq"]
    assert model.words.table.record_bytes == 3 * WIDTH * 4
    assert_same_bytes(model.words.table["weight"], first)


def test_rows_of_every_source_move_into_the_record(tmp_path: Path) -> None:
    rows = torch.randn(ROWS, WIDTH)
    table = speedtorch.HostTable(ROWS, WIDTH)
    table["weight"].copy_(rows)
    table.save(tmp_path / "rows.npy")
    trained = speedtorch.Embedding.from_pretrained(rows, freeze=False)
    trained(IDS)  # may have trained: its rows are not those of the source for sure
    changed = rows.clone()
    gone = speedtorch.Embedding.from_pretrained(changed, freeze=False)
    changed.zero_()
    for embedding in (
        speedtorch.Embedding.from_pretrained(rows, freeze=False),
        speedtorch.Embedding.from_pretrained(rows.clone(), freeze=False),
        speedtorch.Embedding.from_pretrained(tmp_path / "rows.npy", freeze=False),
        trained,
        gone,
    ):
        speedtorch.attach(optim.Adam(embedding.parameters()), embedding)
        assert "exp_avg" in embedding.table
        assert_same_bytes(embedding.table["weight"], rows)


def test_a_table_of_the_user_is_kept_and_state_is_stored_beside_it() -> None:
    table = speedtorch.HostTable(ROWS, WIDTH).normal_(seed=1)
    embedding = speedtorch.Embedding.from_pretrained(table, freeze=False)
    adam = optim.Adam(embedding.parameters())
    speedtorch.attach(adam, embedding)
    step(embedding, adam, IDS)
    assert embedding.table is table and list(table.fields) == ["weight"]
    assert adam.state_dict()["state"][0]["exp_avg"].shape == (ROWS, WIDTH)
    with_state = speedtorch.HostTable(ROWS, WIDTH, state=("exp_avg", "exp_avg_sq")).fill_(1)
    embedding = speedtorch.Embedding.from_pretrained(with_state, freeze=False)
    adam = optim.Adam(embedding.parameters())
    speedtorch.attach(adam, embedding)
    step(embedding, adam, IDS)
    embedding.flush()
    assert with_state["exp_avg"].any()


def test_a_saved_table_goes_on_with_its_state(tmp_path: Path) -> None:
    (_, _), (ours, adam) = pair()
    step(ours, adam, IDS)
    ours.words.flush()
    ours.words.table.save(tmp_path / "words.safetensors")
    again = speedtorch.Embedding.from_pretrained(tmp_path / "words.safetensors", freeze=False)
    speedtorch.attach(optim.Adam(again.parameters()), again)
    for name in ("weight", "exp_avg", "exp_avg_sq"):
        assert_same_bytes(again.table[name], ours.words.table[name])


def without_memory_for(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No table with such a field can be made."""
    make = speedtorch.HostTable.from_fields.__func__  # type: ignore[attr-defined]

    def too_large(cls: Any, rows: int, fields: dict[str, Any], *args: Any, **more: Any) -> Any:
        if field in fields:
            raise MemoryError("no")
        return make(cls, rows, fields, *args, **more)

    monkeypatch.setattr(speedtorch.HostTable, "from_fields", classmethod(too_large))


def test_no_memory_for_a_second_table_puts_the_state_beside_the_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    embedding = speedtorch.Embedding(ROWS, WIDTH)
    embedding.table.fill_(1.5)
    adam = optim.Adam(embedding.parameters())
    without_memory_for("weight", monkeypatch)
    speedtorch.attach(adam, embedding)
    step(embedding, adam, IDS)
    assert list(embedding.table.fields) == ["weight"]
    assert adam.state_dict()["state"][0]["exp_avg"][3].any()


def test_no_memory_at_all_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    expected = speedtorch.Embedding(ROWS, WIDTH).table["weight"]
    torch.manual_seed(5)
    embedding = speedtorch.Embedding(ROWS, WIDTH)
    without_memory_for("exp_avg", monkeypatch)
    adam = optim.Adam(embedding.parameters())
    for _ in range(2):
        with pytest.raises(MemoryError):
            speedtorch.attach(adam, embedding)
    assert_same_bytes(embedding.table["weight"], expected)
    with pytest.raises(ValueError, match="not attached"):
        speedtorch.detach(adam)


def test_attached_twice_or_not_at_all_is_an_error() -> None:
    model = Model()
    adam, other = optim.Adam(model.parameters()), optim.Adam(model.parameters())
    speedtorch.attach(adam, model)
    with pytest.raises(ValueError, match="Adam is attached already"):
        speedtorch.attach(adam, model)
    with pytest.raises(ValueError, match="Embedding is attached to another optimizer"):
        speedtorch.attach(other, model)
    with pytest.raises(ValueError, match="Embedding is attached to another optimizer than this"):
        step(model, other)
    with pytest.raises(ValueError, match="Adam is not attached"):
        speedtorch.detach(other)
    with pytest.raises(ValueError, match="holds no weight of an Embedding in Linear"):
        speedtorch.attach(other, model.out)
    with pytest.raises(ValueError, match="SGD holds no weight of an Embedding in Model"):
        speedtorch.attach(optim.SGD(model.out.parameters()), model)


def test_detach_writes_rows_back_and_allows_another_optimizer() -> None:
    (_, _), (ours, adam) = pair()
    step(ours, adam, IDS)
    rows = ours.words.table["weight"][[1, 3, 19]].clone()
    speedtorch.detach(adam)
    assert_same_bytes(ours.words.table["weight"][[1, 3, 19]], rows)
    assert_same_bytes(ours.words.weight.data[[1, 3, 19]], rows)
    assert ours.words.weight not in adam.state
    assert set(adam.state_dict()["state"]) == {1, 2}  # the dense parameters keep theirs
    with pytest.raises(RuntimeError, match="Adam keeps"):
        step(ours, adam)
    other = optim.Adagrad(ours.parameters())
    speedtorch.attach(other, ours)
    step(ours, other, IDS)
    assert other.state_dict()["state"][0]["sum"].shape == (ROWS, WIDTH)


def test_rows_of_a_deleted_optimizer_are_kept() -> None:
    def train(embedding: speedtorch.Embedding) -> Tensor:
        adam = optim.Adam(embedding.parameters(), lr=0.1)
        speedtorch.attach(adam, embedding)
        step(embedding, adam, IDS)
        return embedding.table["weight"][[1, 3, 19]].clone()

    embedding = speedtorch.Embedding(ROWS, WIDTH)
    for _ in range(2):
        rows = train(embedding)
        gc.collect()
        assert_same_bytes(embedding(torch.tensor([1, 3, 19])), rows)
        assert_same_bytes(embedding.state_dict()["weight"][[1, 3, 19]], rows)
    rows = train(embedding)
    gc.collect()
    embedding(IDS).sum().backward()
    with pytest.raises(RuntimeError, match="Adam keeps"):
        optim.Adam(embedding.parameters()).step()
    optim.SGD(embedding.parameters(), lr=1.0).step()
    changed = embedding.state_dict()["weight"][[1, 3, 19]]
    assert_same_bytes(changed, rows - torch.tensor([[1.0], [2.0], [1.0]]))


def test_schedulers_clipping_and_groups_work_as_in_torch() -> None:
    torch.manual_seed(0)
    theirs, ours = Model(nn.Embedding), Model()
    ours.load_state_dict(theirs.state_dict())
    for model in (theirs, ours):
        groups = [
            {"params": [model.words.weight], "lr": 0.3, "betas": (0.5, 0.9)},
            {"params": model.out.parameters()},
        ]
        optimizer = optim.AdamW(groups, lr=0.1)
        if model is ours:
            speedtorch.attach(optimizer, model)
        scheduler = optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
        for _ in range(4):
            optimizer.zero_grad(set_to_none=False)
            model(EVERY).square().sum().backward()
            model.norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
    assert_same_bytes(ours.norm, theirs.norm)
    assert_same_content(ours.state_dict(), theirs.state_dict())


class KnowsParameters(optim.Adam):
    """Another library's, for all that attach knows."""


@pytest.mark.parametrize(
    ("make", "times"),
    [
        (lambda tables: optim.Adam([*tables.parameters()]), 2),
        (lambda tables: optim.Adagrad([*tables.parameters()]), 2),
        (lambda tables: RowWiseAdagrad([*tables.parameters()]), 2),
        (lambda tables: optim.Adam([{"params": [table.weight]} for table in tables]), 4),
        (lambda tables: KnowsParameters([*tables.parameters()]), 4),
    ],
    ids=["one group", "state from the constructor", "ours", "a group each", "another library's"],
)
def test_an_optimizer_is_tried_once_for_equal_tables(
    make: Callable[[nn.ModuleList], optim.Optimizer], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed: list[Tensor] = []

    def counted(optimizer: Any, parameter: Tensor, **how: Any) -> Any:
        probed.append(parameter)
        return probe(optimizer, parameter, **how)

    module = sys.modules["speedtorch.optim.attach"]
    probe = module.probe_optimizer
    monkeypatch.setattr(module, "probe_optimizer", counted)
    tables = nn.ModuleList(speedtorch.Embedding(ROWS, width) for width in (4, 4, 8, 4))
    before = [table.weight.detach().clone() for table in tables]
    optimizer = make(tables)
    speedtorch.attach(optimizer, tables)
    assert len(probed) == times
    for _ in range(2):
        optimizer.zero_grad()
        sum(table(IDS).sum() for table in tables).backward()
        optimizer.step()
    states = optimizer.state_dict()["state"]
    for number, (each, first) in enumerate(zip(tables, before, strict=True)):
        plain = nn.Parameter(first[IDS.unique()])
        reference = type(optimizer)([plain])
        for _ in range(2):
            reference.zero_grad()
            (plain * torch.tensor([[1.0], [2.0], [1.0]])).sum().backward()
            reference.step()
        assert torch.equal(each.state_dict()["weight"][IDS.unique()], plain)
        assert states[number].keys() == reference.state[plain].keys()


def test_attach_keeps_neither_optimizer_nor_model_alive() -> None:
    model = Model()
    adam = optim.Adam(model.parameters())
    speedtorch.attach(adam, model)
    step(model, adam)
    gone = [weakref.ref(model), weakref.ref(adam), weakref.ref(model.words.table)]
    del model, adam
    gc.collect()
    assert [reference() for reference in gone] == [None, None, None]


def test_training_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (_, _), (ours, adam) = pair()
        step(ours, adam, IDS)
        step(ours, adam, IDS)
        embedding = speedtorch.Embedding(ROWS, WIDTH)
        sparse = optim.SparseAdam(list(embedding.parameters()))
        speedtorch.attach(sparse, embedding)
        step(embedding, sparse, IDS)

"""Embedding has the arguments and results of torch.nn.Embedding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loops import sgd_step
from reference import assert_same_bytes
from torch import Tensor, nn

import speedtorch

ROWS, WIDTH = 20, 3
IDS = torch.tensor([[3, 1, 3], [0, 19, 3]])
MODULES = pytest.mark.parametrize("make", [speedtorch.Embedding, speedtorch.EmbeddingBag])


def pair(device: str = "cpu", **settings: Any) -> tuple[nn.Embedding, speedtorch.Embedding]:
    """torch's module and ours with the same rows."""
    torch.manual_seed(0)
    theirs = nn.Embedding(ROWS, WIDTH, **settings)
    return theirs.to(device), speedtorch.Embedding.from_module(theirs, device=device)


def held(module: speedtorch.Embedding) -> int:
    """How many rows a step holds."""
    return len(module.step_ids)


def rows_of(embedding: speedtorch.Embedding) -> Tensor:
    embedding.flush()
    return embedding.table["weight"].cpu()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (6,), (2, 3), (2, 0, 3), (1, 2, 1, 3)], ids=str)
def test_ids_of_any_shape_return_what_torch_returns(
    shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    theirs, ours = pair(device)
    ids = torch.randint(ROWS, shape, dtype=dtype)
    for place in {"cpu", device}:
        assert_same_bytes(ours(ids.to(place)), theirs(ids.to(device)))
        with torch.no_grad():
            assert_same_bytes(ours(ids.to(place)), theirs(ids.to(device)))


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"padding_idx": 3},
    "padding from the end": {"padding_idx": -1},
    "padding that is not named": {"padding_idx": 7},
    "max_norm": {"max_norm": 0.7},
    "max_norm 1": {"max_norm": 0.7, "norm_type": 1.0},
    "max_norm and padding": {"max_norm": 0.7, "padding_idx": 3},
    "by frequency": {"scale_grad_by_freq": True},
    "sparse": {"sparse": True},
    "sparse with padding": {"sparse": True, "padding_idx": 3},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_three_sgd_steps_return_the_rows_of_torch(settings: dict[str, Any], device: str) -> None:
    theirs, ours = pair(device, **settings)
    before = theirs.weight.detach().clone()
    if settings.get("padding_idx") == 3:
        with torch.no_grad():
            theirs.weight[3] = torch.arange(1.0, 1.0 + WIDTH)
        ours.load_state_dict(theirs.state_dict())
    for step in range(3):
        ids = (IDS + step).remainder(ROWS).to(device)
        factor = torch.linspace(-1, 2, 2 * 3 * WIDTH, device=device).view(2, 3, WIDTH)
        for module in (theirs, ours):
            sgd_step(module, (module(ids) * factor).sum())
    assert_same_bytes(rows_of(ours), theirs.weight.detach().cpu())
    assert not torch.equal(before, theirs.weight)


def test_evaluation_shortens_long_rows_as_torch_does(device: str) -> None:
    theirs, ours = pair(device, max_norm=0.5, padding_idx=3)
    with torch.no_grad():
        assert_same_bytes(ours(IDS), theirs(IDS.to(device)))
    assert_same_bytes(rows_of(ours), theirs.weight.detach().cpu())


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("capacity", [None, 4])
@pytest.mark.parametrize("padding", [None, 3])
def test_max_norm_needs_no_ids(
    trains: bool, capacity: int | None, padding: int | None, device: str
) -> None:
    settings = {"max_norm": 0.5, "padding_idx": padding, "capacity": capacity, "device": device}
    bag = speedtorch.EmbeddingBag(ROWS, WIDTH, mode="sum", **settings)  # type: ignore[arg-type]
    before = rows_of(bag).clone()
    with torch.set_grad_enabled(trains):
        found = bag(IDS[0, :0].to(device), torch.zeros(2, dtype=torch.int64, device=device))
    assert found.tolist() == [[0.0] * WIDTH] * 2
    assert_same_bytes(rows_of(bag), before)


def test_no_graph_captures_max_norm_of_padded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    padded = speedtorch.Embedding(ROWS, WIDTH, max_norm=0.5, padding_idx=3, capacity=4)
    before = rows_of(padded).clone()
    monkeypatch.setattr(type(padded.trained_rows.exchange.held), "captures", lambda _: True)
    for trains in (True, False):
        with (
            torch.set_grad_enabled(trains),
            pytest.raises(NotImplementedError, match="max_norm and padding_idx, because such a"),
        ):
            padded(IDS)
    monkeypatch.undo()
    assert_same_bytes(rows_of(padded), before)


def test_a_step_holds_every_row_once(device: str) -> None:
    _, ours = pair(device)
    assert ours.weight.shape == (ROWS, WIDTH) and held(ours) == 0
    ours(IDS).sum().backward()
    assert ours.weight.shape == (ROWS, WIDTH) and held(ours) == 4
    assert ours.step_ids.tolist() == [0, 1, 3, 19]
    assert ours.weight.device.type == ours.step_ids.device.type == device
    assert ours.weight.grad is not None
    assert ours.weight.grad[ours.step_ids, 0].tolist() == [1, 1, 3, 1]
    assert ours.weight.grad[:, 0].tolist() == IDS.flatten().bincount(minlength=ROWS).tolist()


def test_a_penalty_on_looked_up_rows_is_torchs_and_one_on_all_rows_is_refused() -> None:
    theirs, ours = pair()
    for ids in (IDS[0], IDS[1, :2]):
        for module in (theirs, ours):
            sgd_step(module, module(ids).sum() + module.weight[ids.unique()].square().sum())
        penalty = ours.weight.square().sum()
        with pytest.raises(RuntimeError, match=r"gradient of square\(\).*Use emb\(ids\)"):
            penalty.backward()
        torch.testing.assert_close(penalty.detach(), rows_of(ours).square().sum())
    assert_same_bytes(rows_of(ours), theirs.weight.detach())


def test_evaluation_moves_no_row_back(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = pair()
    version = ours.table["weight"]._version
    with torch.no_grad():
        ours(IDS)
    ours.eval()(IDS)
    ours(IDS[0])
    ours.flush()
    assert ours.table["weight"]._version == version


def test_lookups_that_are_not_trained_do_not_pile_up() -> None:
    _, ours = pair()
    for row in range(ROWS):
        ours(torch.tensor([row]))
    assert held(ours) == 1


@MODULES
def test_from_pretrained_is_frozen_by_default(make: Any) -> None:
    weight = torch.randn(5, 2)
    frozen, trained = make.from_pretrained(weight), make.from_pretrained(weight, freeze=False)
    out = frozen(torch.tensor([[4], [4], [0]]))
    assert torch.equal(out.view(3, 2), weight[[4, 4, 0]])
    assert not (frozen.weight.requires_grad or out.requires_grad)
    assert trained.weight.requires_grad and trained(torch.tensor([[4]])).requires_grad


def test_from_pretrained_takes_a_saved_table_or_a_table(tmp_path: Path) -> None:
    table = speedtorch.HostTable(5, 2).normal_(seed=1)
    table.save(tmp_path / "rows.safetensors")
    opened = speedtorch.Embedding.from_pretrained(tmp_path / "rows.safetensors")
    own = speedtorch.Embedding.from_pretrained(table)
    assert own.table is table and opened.table is not table
    for each in (opened, own):
        assert torch.equal(each(torch.arange(5)), table["weight"])


@MODULES
def test_from_pretrained_names_a_field_that_is_missing(make: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "model.safetensors")
    table = speedtorch.HostTable.from_fields(5, {"emb.weight": (2, torch.float32)}).fill_(
        7, "emb.weight"
    )
    table.save(path)
    has = "has no field 'weight'. Its fields are emb.weight. Pass the rows"
    with pytest.raises(ValueError, match=f"embeddings: {path} {has}") as caught:
        make.from_pretrained(path)
    assert str(caught.value).endswith(f" as HostTable.open({path!r})['emb.weight'].")
    opened = speedtorch.HostTable.open(path)
    assert bool((make.from_pretrained(opened["emb.weight"]).weight.data == 7).all())
    with pytest.raises(ValueError, match=f"embeddings: this HostTable {has}"):
        make.from_pretrained(table)
    with pytest.raises(ValueError, match=f"_weight: this HostTable {has}"):
        make(5, 2, _weight=table)
    config = speedtorch.EmbeddingBagConfig(5, 2, "words")
    with pytest.raises(ValueError, match=rf"embeddings\['words'\]: {path} has no field 'weight'"):
        speedtorch.EmbeddingBagCollection.from_pretrained([config], {"words": path})


def test_equal_seeds_give_equal_rows_and_other_dtypes_work() -> None:
    rows = []
    for _ in range(2):
        torch.manual_seed(4)
        rows.append(speedtorch.Embedding(50, 4, padding_idx=2, dtype=torch.bfloat16))
    first, second = (rows_of(row) for row in rows)
    assert first.dtype == torch.bfloat16 and torch.equal(first, second)
    assert not first[2].any() and first[3].any()
    assert rows[0](torch.tensor([2])).dtype == torch.bfloat16
    rows[0].reset_parameters()
    assert not torch.equal(rows_of(rows[0]), second)


def test_first_values_are_drawn_once_when_they_are_needed() -> None:
    calls: list[int] = []

    def ones(rows: Tensor, value: float) -> Tensor:
        calls.append(len(rows))
        return rows.fill_(value)

    embedding = speedtorch.Embedding(50, 4, padding_idx=1).init_(ones, 5.0).init_(ones, value=3.0)
    adam = torch.optim.Adam(embedding.parameters())
    speedtorch.attach(adam, embedding)
    assert not calls
    assert embedding(torch.tensor([0, 1, 49]))[:, 0].tolist() == [3.0, 0.0, 3.0]
    drawn = len(calls)
    embedding(torch.tensor([2])).sum().backward()
    adam.step()
    embedding.init_(ones, 7.0)
    assert len(calls) > drawn
    assert embedding(torch.tensor([2, 1]))[:, 0].tolist() == [7.0, 0.0]
    seeded = [
        speedtorch.Embedding(9, 2).init_(nn.init.uniform_, -1, 1, seed=3).table["weight"]
        for _ in range(2)
    ]
    assert torch.equal(*seeded) and seeded[0].abs().max() <= 1


def test_repr_is_that_of_torch_with_the_place_of_the_rows() -> None:
    theirs, ours = pair(padding_idx=3, max_norm=0.5, sparse=True)
    place = f", device=cpu, memory={ours.table.memory})"
    assert repr(ours).replace("'", "") == repr(theirs).replace("'", "")[:-1] + place


def test_backward_through_rows_that_have_left_is_an_error() -> None:
    _, ours = pair()
    early = ours(IDS[0]).sum()
    sgd_step(ours, ours(IDS[0]).sum())
    ours(IDS[1])
    with pytest.raises(RuntimeError, match="Embedding: backward through a lookup of an earlier"):
        early.backward()


def test_gradients_of_gradients_and_hooks_are_refused() -> None:
    _, ours = pair()
    with pytest.raises(NotImplementedError, match="gradients of gradients"):
        ours(IDS[0]).pow(3).sum().backward(create_graph=True)
    ours.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(NotImplementedError, match="gradient hooks of the weight"):
        ours(IDS)

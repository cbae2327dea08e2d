"""The rules of a step and of its table, where what is read or written is not what a loop sees."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from optimizer_cases import CASES
from plain_training import PlainTraining, assert_same_numbers, make_optimizer
from reference import assert_same_bytes
from torch import Tensor, nn, optim
from torch.optim import _functional as sparse_adam

import speedtorch

ROWS, WIDTH = 8, 2
FIRST, SECOND = torch.tensor([1, 2]), torch.tensor([3, 4])
ALL = torch.arange(ROWS)


def first_rows() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


class Pair:
    """An embedding with an attached optimizer, and the reference of both."""

    def __init__(self, optimizer: str, device: str = "cpu", **settings: Any) -> None:
        self.embedding = speedtorch.Embedding(
            ROWS, WIDTH, _weight=first_rows(), device=device, **settings
        )
        self.case = CASES[optimizer]
        self.optimizer = make_optimizer(self.case, self.embedding.parameters())
        speedtorch.attach(self.optimizer, self.embedding)
        padding = settings.get("padding_idx")
        self.plain = PlainTraining.begin(self.case, [first_rows().to(device)], [padding])

    def learn(self, ids: Tensor, factor: float = 1.0) -> None:
        """A lookup and its backward."""
        (self.embedding(ids).sum() * factor).backward()
        table = self.plain.tables[0]
        table.look_up(ids.to(table.weight.device))
        gradient = torch.full((*ids.shape, WIDTH), factor, device=table.weight.device)
        table.add_gradient(ids.to(table.weight.device), gradient)

    def step(self) -> None:
        self.optimizer.step()
        self.plain.step()

    def zero_grad(self, *, to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=to_none)
        self.plain.zero_grad()

    def numbers(self) -> list[dict[str, Any]]:
        self.embedding.flush()
        entries = self.optimizer.state_dict()["state"][0]
        return [{"weight": self.embedding.state_dict()["weight"], **entries}]

    def check(self) -> None:
        assert_same_numbers(self.numbers(), self.plain.numbers())


def trained(device: str) -> tuple[speedtorch.Embedding, Tensor]:
    """An embedding whose last step no flush has followed, and what its rows must be."""
    embedding = speedtorch.Embedding(ROWS, WIDTH, _weight=first_rows(), device=device)
    sgd = optim.SGD(embedding.parameters(), lr=1.0)
    embedding(FIRST.to(device)).sum().backward()
    sgd.step()
    sgd.zero_grad()
    expected = first_rows()
    expected[FIRST] -= 1
    return embedding, expected


def reopened(table: speedtorch.HostTable, path: Path, **how: Any) -> Tensor:
    table.save(path, **how)
    return speedtorch.HostTable.open(path, "plain")["weight"]


def saved_in_parts(table: speedtorch.HostTable, folder: Path) -> Tensor:
    parts = (slice(2), slice(2, None))
    return torch.cat([reopened(table, folder / "rows.npy", rows=rows) for rows in parts])


def sevens(folder: Path) -> Path:
    path = folder / "seven.safetensors"
    speedtorch.HostTable(ROWS, WIDTH, memory="plain").fill_(7.0).save(path)
    return path


READERS: dict[str, Callable[[speedtorch.HostTable, Path], Tensor]] = {
    "gathered": lambda table, folder: table.gather(ALL, "weight"),
    "gathered record": lambda table, folder: table.gather(ALL)[:, :WIDTH],
    "as numpy": lambda table, folder: torch.from_numpy(table.numpy("weight")).clone(),
    "saved": lambda table, folder: reopened(table, folder / "rows.safetensors"),
    "saved as npy": lambda table, folder: reopened(table, folder / "rows.npy"),
    "saved in parts": saved_in_parts,
}
# Each writes so much to these rows.
SOME = slice(2, 5)
WRITERS: dict[str, tuple[Callable[[Any, Path], object], float, slice]] = {
    "fill": (lambda emb, folder: emb.table.fill_(3.0), 3.0, slice(None)),
    "zeros": (lambda emb, folder: emb.table.zeros_(), 0.0, slice(None)),
    "table init": (lambda emb, folder: emb.table.init_(nn.init.constant_, 5.0), 5.0, slice(None)),
    "module init": (lambda emb, folder: emb.init_(nn.init.constant_, 5.0), 5.0, slice(None)),
    "load": (lambda emb, folder: emb.table.load(sevens(folder)), 7.0, slice(None)),
    "load of some rows": (
        lambda emb, folder: emb.table.load(sevens(folder), rows=SOME, stored=slice(3)),
        7.0,
        SOME,
    ),
    "scatter": (
        lambda emb, folder: emb.table.scatter(ALL, torch.full((ROWS, WIDTH), 4.0), "weight"),
        4.0,
        slice(None),
    ),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_a_tables_reader_sees_the_last_step_or_is_refused(
    device: str, reader: Callable[..., Tensor], tmp_path: Path
) -> None:
    embedding, expected = trained(device)
    try:
        rows = reader(embedding.table, tmp_path)
    except RuntimeError as error:
        assert "Embedding" in str(error) and "flush" in str(error)
        return
    assert_same_bytes(rows.cpu(), expected)


@pytest.mark.parametrize(("write", "value", "rows"), WRITERS.values(), ids=WRITERS)
def test_a_write_to_the_table_is_not_undone_by_a_later_flush(
    device: str, write: Callable[[Any, Path], object], value: float, rows: slice, tmp_path: Path
) -> None:
    embedding, expected = trained(device)
    try:
        write(embedding, tmp_path)
    except RuntimeError as error:
        assert "Embedding" in str(error)
    else:
        expected[rows] = value
    with torch.no_grad():
        assert_same_bytes(embedding(ALL.to(device)).cpu(), expected)
    embedding(SECOND.to(device))
    embedding.flush()
    assert_same_bytes(embedding.table["weight"].cpu(), expected)


def test_state_that_is_filled_between_steps_is_kept(device: str) -> None:
    pair = Pair("Adam", device)
    pair.learn(FIRST.to(device))
    pair.step()
    pair.zero_grad()
    try:
        pair.embedding.table.fill_(0.5, "exp_avg")
        pair.plain.tables[0].fields["exp_avg"].fill_(0.5)
    except RuntimeError as error:
        assert "Embedding" in str(error)
    pair.learn(FIRST.to(device))
    pair.step()
    pair.check()


def test_a_table_that_is_closed_has_the_rows_of_the_last_step(device: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.bin"
    table = speedtorch.HostTable(ROWS, WIDTH, memory="file", path=path)
    table["weight"].copy_(first_rows())
    embedding = speedtorch.Embedding.from_pretrained(table, freeze=False, device=device)
    sgd = optim.SGD(embedding.parameters(), lr=1.0)
    embedding(FIRST.to(device)).sum().backward()
    sgd.step()
    try:
        table.close()
    except RuntimeError as error:
        assert "Embedding" in str(error)
        embedding.flush()
        table.close()
    rows = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32)
    expected = first_rows()
    expected[FIRST] -= 1
    assert_same_bytes(rows[: ROWS * WIDTH].view(ROWS, WIDTH), expected)


@pytest.mark.parametrize(
    "use",
    [
        lambda embedding, ids: embedding(ids),
        lambda embedding, ids: embedding.requires_grad_(False)(ids),
        lambda embedding, ids: embedding.state_dict(),
    ],
    ids=["lookup", "evaluation", "state_dict"],
)
def test_a_closed_table_answers_no_lookup(
    device: str, use: Callable[[speedtorch.Embedding, Tensor], object]
) -> None:
    embedding, _ = trained(device)
    embedding.flush()
    embedding.table.close()
    with pytest.raises((RuntimeError, ValueError), match="clos"):
        use(embedding, FIRST.to(device))
    with pytest.raises((RuntimeError, ValueError), match="clos"):
        use(embedding, SECOND.to(device))


WRITES: dict[str, Callable[[Tensor], object]] = {
    "multiply by one": lambda weight: weight.mul_(1.0),
    "add zero": lambda weight: weight.add_(0.0),
    "clamp wide": lambda weight: weight.clamp_(-1e9, 1e9),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("optimizer", ["SGD-momentum", "Adam"])
def test_a_write_to_the_weight_within_a_step_drops_no_gradient(
    device: str, optimizer: str, write: Callable[[Tensor], object]
) -> None:
    pair = Pair(optimizer, device)
    for ids in (FIRST, SECOND):
        pair.learn(ids.to(device))
        with torch.no_grad():
            try:
                write(pair.embedding.weight)
            except RuntimeError as error:
                assert "emb.table" in str(error)  # or it is refused by name
    pair.step()
    pair.check()


@pytest.mark.parametrize("factor", [0.0, 1.0])
@pytest.mark.parametrize("norm", [1e-3, 1e9])
def test_a_gradient_that_is_clipped_within_a_step_is_stepped(
    device: str, norm: float, factor: float
) -> None:
    """Zeros that clipping has written to are no zero_grad."""
    pair = Pair("SGD-momentum", device)
    pair.learn(torch.arange(4, device=device))
    pair.step()
    pair.zero_grad()
    pair.learn(FIRST.to(device), factor)
    nn.utils.clip_grad_norm_(pair.embedding.parameters(), norm)
    table = pair.plain.tables[0]
    assert table.gradient is not None
    scale = (norm / (table.gradient.norm() + 1e-6)).clamp(max=1.0)
    table.gradient *= scale
    pair.learn(SECOND.to(device))
    pair.step()
    pair.check()


def test_zeros_that_are_clipped_after_the_step_are_stepped_again_as_in_torch(device: str) -> None:
    pair = Pair("SGD-momentum", device)
    pair.learn(FIRST.to(device))
    pair.step()
    pair.learn(FIRST.to(device), 0.0)
    nn.utils.clip_grad_norm_(pair.embedding.parameters(), 1.0)
    pair.step()
    pair.check()


def attach_again(pair: Pair) -> None:
    speedtorch.detach(pair.optimizer)
    speedtorch.attach(pair.optimizer, pair.embedding)
    pair.plain.forget_state(0)


BETWEEN: dict[str, Callable[[Pair], object]] = {
    "nothing": lambda pair: None,
    "load": lambda pair: pair.embedding.load_state_dict(copied(pair.embedding)),
    "load the optimizer": lambda pair: pair.optimizer.load_state_dict(copied(pair.optimizer)),
    "attach": attach_again,
}


def copied(of: Any) -> Any:
    return copy.deepcopy(of.state_dict())


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
@pytest.mark.parametrize("to_none", [True, False], ids=["none", "zeros"])
def test_rows_of_a_step_that_was_skipped_do_not_count(
    device: str, to_none: bool, between: Callable[[Pair], object]
) -> None:
    pair = Pair("SGD-momentum", device)
    pair.learn(torch.arange(6, device=device))
    pair.step()
    pair.zero_grad()
    pair.learn(FIRST.to(device))  # a GradScaler leaves this step out
    pair.zero_grad(to_none=to_none)
    between(pair)
    pair.learn(SECOND.to(device))
    pair.step()
    pair.check()


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_gradients_of_nothing_but_padding_can_be_clipped(device: str, norm_type: float) -> None:
    embedding = speedtorch.Embedding(
        ROWS, WIDTH, padding_idx=0, _weight=first_rows(), device=device
    )
    other = nn.Parameter(torch.ones(2, device=device))
    embedding(torch.tensor([0, 0], device=device)).sum().backward()
    other.sum().backward()
    total = nn.utils.clip_grad_norm_([*embedding.parameters(), other], 1e9, norm_type)
    assert float(total) == pytest.approx(1.0 if norm_type != 2.0 else 2.0**0.5)
    optim.SGD([*embedding.parameters(), other], lr=1.0).step()
    embedding.flush()
    assert_same_bytes(embedding.table["weight"].cpu()[1:], first_rows()[1:])


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_announced_row_is_in_the_step_of_sparse_adam(
    device: str, deterministic: bool, sparse: bool
) -> None:
    pair = Pair("SparseAdam", device, sparse=sparse)
    torch.use_deterministic_algorithms(deterministic)
    try:
        pair.learn(torch.arange(6, device=device))
        pair.step()
        pair.zero_grad()
        first, second = FIRST.to(device), SECOND.to(device)
        pair.embedding.announce(first, second)
        pair.plain.tables[0].announce(FIRST, SECOND)
        unused = pair.embedding(first)
        pair.learn(second)
        seen: list[Tensor] = []
        steps_rows = sparse_adam.sparse_adam

        def watched(rows: list[Tensor], gradients: list[Tensor], *args: Any, **rest: Any) -> None:
            seen.extend(gradients)
            steps_rows(rows, gradients, *args, **rest)

        with patch.object(sparse_adam, "sparse_adam", watched):
            pair.optimizer.step()
        pair.plain.step()
        assert unused.requires_grad
    finally:
        torch.use_deterministic_algorithms(False)
    (gradient,) = (each.coalesce() for each in seen)
    assert gradient.indices().flatten().tolist() == [0, 1, 2, 3]
    assert gradient.values()[:2].count_nonzero() == 0
    pair.check()


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("optimizer", ["SparseAdam", "Adam", "SGD-momentum"])
def test_a_closure_that_looks_up_and_goes_back_trains_as_without(
    device: str, optimizer: str, sparse: bool
) -> None:
    if sparse and optimizer != "SparseAdam":
        pytest.skip("it takes no sparse gradients")
    pair = Pair(optimizer, device, sparse=sparse)
    for ids in (FIRST, SECOND, FIRST):
        ids = ids.to(device)

        def closure(ids: Tensor = ids) -> Tensor:
            pair.optimizer.zero_grad()
            loss = pair.embedding(ids).sum()
            loss.backward()
            return loss

        pair.optimizer.step(closure) if ids[0] == FIRST[0] else pair.optimizer.step(closure=closure)
        table = pair.plain.tables[0]
        pair.plain.zero_grad()
        table.look_up(ids)
        table.add_gradient(ids, torch.ones(len(ids), WIDTH, device=device))
        pair.plain.step()
    pair.check()


@pytest.mark.parametrize("max_norm", [None, 100.0])
def test_the_paddings_row_is_read_again_where_a_step_holds_no_other(
    device: str, max_norm: float | None
) -> None:
    weight = torch.full((3, 64), 5.0)
    embedding = speedtorch.Embedding.from_pretrained(
        weight, freeze=False, padding_idx=1, max_norm=max_norm, device=device
    )
    for _ in range(20):  # or chance may put the row where it was
        rows = embedding(torch.tensor([1]))
        embedding.table.settle()
        again = embedding(torch.tensor([1]))
        assert rows.unique().tolist() == again.unique().tolist() == [5.0]
        assert embedding.table["weight"].unique().tolist() == [5.0]
        del rows, again


def test_a_generator_for_first_values_is_refused_at_once() -> None:
    embedding = speedtorch.Embedding(4, 2)
    with pytest.raises(TypeError, match="generator: each block of rows has its own. Pass seed="):
        embedding.init_(nn.init.normal_, generator=torch.Generator())


@pytest.mark.parametrize("part", [slice(None), slice(1, 3)], ids=["weight", "rows"])
def test_the_weight_has_no_array_interface(part: slice) -> None:
    weight = speedtorch.Embedding(4, 2, device="cpu").weight
    rows: Any = weight if part == slice(None) else weight[part]
    assert not hasattr(rows, "__cuda_array_interface__")
    message = "__cuda_array_interface__ (of its weight is not supported|on non-CUDA tensor)"
    with pytest.raises(AttributeError, match=message):
        rows.__cuda_array_interface__  # noqa: B018

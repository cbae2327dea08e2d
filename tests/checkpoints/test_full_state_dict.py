"""The first rank saves the rows of all ranks where a library knows one process alone."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_backends import BACKENDS, RANKS, on_ranks
from rank_processes import own_device
from sharded_training import ROWS, WIDTH, assert_own_rows, own_rows, raises, same, soon
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.checkpoints.full_state_dict import full_state_dict
from speedtorch.memory import host_memory
from speedtorch.parallel import sharded_rows
from speedtorch.parallel.shard import shard
from speedtorch.table.row_shard import RowShard

REFUSED = r"with speedtorch.full_state_dict\(model\):"


class Model(nn.Module):
    """Rows, two tables of one width in a group, rows of 16 bits, and a dense layer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        config = speedtorch.EmbeddingBagConfig
        tables = [config(ROWS, WIDTH, "a"), config(ROWS - 7, WIDTH, "b"), config(9, 2, "c")]
        self.rows = speedtorch.Embedding(ROWS, WIDTH, padding_idx=2)
        self.short = speedtorch.Embedding(ROWS, WIDTH, dtype=torch.bfloat16)
        self.tables = speedtorch.EmbeddingBagCollection(tables=tables)
        self.out = nn.Linear(8 + 2 * WIDTH, 1)
        self.to(own_device())

    def forward(self, ids: Tensor) -> Tensor:
        found = self.tables(dict.fromkeys("abc", ids % 9)).values()
        single = torch.cat([self.rows(ids).mean(1), self.short(ids).mean(1).float()], 1)
        return self.out(torch.cat([single, found], 1))


MAKES: dict[str, Callable[..., optim.Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, lr=0.25),  # which keeps nothing: fields are alone in their tables
    "Adam": lambda p: optim.Adam(p, lr=0.25),
    "Rprop": lambda p: optim.Rprop(p, lr=0.25),
}


def trained(name: str, seed: int, *, sharded: bool = True) -> tuple[Model, optim.Optimizer]:
    model = Model(seed)
    if sharded:
        shard(model)
    optimizer = MAKES[name](model.parameters())
    speedtorch.attach(optimizer, model)
    step(model, optimizer, seed)
    return model, optimizer


def step(model: nn.Module, optimizer: optim.Optimizer, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randint(ROWS, (5, 2), generator=random).to(own_device())).sum().backward()
    optimizer.step()


@on_ranks
@pytest.mark.dealt("collected_bytes")
@pytest.mark.parametrize("collected_bytes", [1 << 20, 50], ids=["at once", "in parts"])
@pytest.mark.parametrize("name", MAKES)
@RANKS
def test_the_first_rank_saves_all_rows_and_their_state(name: str, collected_bytes: int) -> None:
    """By torch.save; any number of ranks loads them."""
    model, optimizer = trained(name, 1)
    wrapped = nn.Sequential(model)
    file = io.BytesIO()
    with mock.patch.object(sharded_rows, "_COLLECTED_BYTES", collected_bytes):
        saving = full_state_dict(wrapped)
        saving.__enter__()
    if dist.get_rank() == 0:
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        storages = {
            value.untyped_storage().data_ptr()
            for key, value in model.state_dict().items()
            if not key.startswith("out")
        }
        assert len(storages) == 5
    else:
        raises(TypeError, REFUSED, lambda: torch.save(model.state_dict(), io.BytesIO()))
    saving.__exit__(None, None, None)
    assert isinstance(model.state_dict()["rows.weight"], RowShard)
    saved: list[Any] = [file.getvalue()]
    dist.broadcast_object_list(saved)
    weights, state = torch.load(io.BytesIO(saved[0]), map_location="cpu")
    whole, of_whole = trained(name, 2, sharded=False)
    again, of_again = trained(name, 3)
    for other, of_other in ((whole, of_whole), (again, of_again)):
        other.load_state_dict(weights)
        of_other.load_state_dict(state)
    rows = model.state_dict()["rows.weight"]
    blocks = [(range(0), range(0)), *rows.blocks]  # as of another number of ranks
    others = RowShard(len(rows), rows.field, blocks)
    state_of_others = {**again.state_dict(), "rows.weight": others}
    message = "these rows are another shard.*distributed.checkpoint"
    raises(ValueError, message, lambda: again.load_state_dict(state_of_others))
    assert_own_rows(model, whole)
    assert same(own_rows(again), own_rows(model))
    for module, of_module in ((model, optimizer), (again, of_again)):
        step(module, of_module, 4)
    assert same(own_rows(again), own_rows(model))


@on_ranks
@BACKENDS
def test_what_is_wrong_on_one_rank_raises_on_all() -> None:
    """Soon; then they go on."""
    rank, is_last = dist.get_rank(), dist.get_rank() == dist.get_world_size() - 1
    last = dist.get_world_size() - 1
    model, optimizer = trained("Adam", 1)

    def begin() -> None:
        with full_state_dict(model):
            raise AssertionError("begun")

    room = mock.patch.object(host_memory, "available_bytes", lambda: 100)
    message = "all rows and their state need 5,130 bytes .* 100 are available. Use torch.distrib"
    with soon("memory"), room:
        raises(MemoryError, message, begin)
    if is_last:
        speedtorch.detach(optimizer)
    message = rf"rank {last if rank != last else 0} has the fields .* optimizers attached"
    with soon("fields"):
        raises(RuntimeError, message, begin)
    if is_last:
        speedtorch.attach(optimizer, model)

    def failed(*_: object) -> None:
        raise OSError("lost")

    rows = model.rows.trained_rows
    patch = mock.patch.object(rows, "flush", failed) if is_last else mock.MagicMock()
    kind, message = (OSError, "lost") if is_last else (RuntimeError, f"rank {last} raises OSError")
    with soon("flush"), patch:
        raises(kind, message, begin)
    with full_state_dict(model):
        assert isinstance(model.state_dict()["rows.weight"], RowShard) == (rank > 0)
    alone = speedtorch.Embedding(ROWS, WIDTH)
    with full_state_dict(nn.Sequential(alone, nn.Linear(1, 1))):
        assert type(alone.state_dict()["weight"]) is Tensor


@on_ranks
def test_rows_of_other_ranks_have_no_local_memory() -> None:
    """The error says how to save them."""
    module = speedtorch.Embedding(ROWS, WIDTH)
    shard(module)
    saved = module.state_dict()["weight"]
    for call in (saved.untyped_storage, saved.storage, saved.is_contiguous):
        raises(NotImplementedError, REFUSED, call)


def test_a_model_of_one_process_does_not_change() -> None:
    model = nn.Sequential(speedtorch.Embedding(5, 2))
    with speedtorch.full_state_dict(model):
        assert torch.equal(model.state_dict()["0.weight"], model[0].table["weight"])

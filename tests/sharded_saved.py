"""What the first rank saves within full_state_dict(), and what goes wrong on one rank alone."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rank_processes import own_device
from sharded_disagreements import soon
from sharded_training import raises
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.checkpoints.full_state_dict import full_state_dict
from speedtorch.memory import host_memory
from speedtorch.nn.row_module import RowModule
from speedtorch.parallel import sharded_rows
from speedtorch.parallel.block_cyclic import BlockCyclic
from speedtorch.parallel.shard import shard
from speedtorch.table.row_blocks import rows_of_a_block
from speedtorch.table.row_shard import RowShard

ROWS, WIDTH = 41, 3
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


def tables_of(model: nn.Module) -> list[Any]:
    return [module.table for module in model.modules() if isinstance(module, RowModule)]


def share_of(values: Tensor) -> Tensor:
    """This rank's rows of all."""
    sharding = BlockCyclic.of(len(values), dist.get_world_size(), rows_of_a_block(values.shape[1:]))
    blocks = sharding.blocks(dist.get_rank())
    return torch.cat([values[there.start : there.stop] for there, _ in blocks])


def check_saved(name: str, collected_bytes: int) -> None:
    """torch.save of the first rank has all rows and states, which any number of ranks loads."""
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
    own_rows = model.state_dict()["rows.weight"]
    blocks = [(range(0), range(0)), *own_rows.blocks]  # as of another number of ranks
    others = RowShard(len(own_rows), own_rows.field, blocks)
    state_of_others = {**again.state_dict(), "rows.weight": others}
    message = "these rows are another shard.*distributed.checkpoint"
    raises(ValueError, message, lambda: again.load_state_dict(state_of_others))
    for own, theirs, resumed in zip(*map(tables_of, (model, whole, again)), strict=True):
        assert own.fields == theirs.fields == resumed.fields
        for field in own.fields:
            assert torch.equal(own[field], share_of(theirs[field])), field
            assert torch.equal(own[field], resumed[field]), field
    for module, of_module in ((model, optimizer), (again, of_again)):
        step(module, of_module, 4)
    for own, resumed in zip(tables_of(model), tables_of(again), strict=True):
        for field in own.fields:
            assert torch.equal(own[field], resumed[field]), field


def check_refusals() -> None:
    """What is wrong on one rank raises on all of them, soon; then they go on."""
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


def check_memory_refused() -> None:
    """What asks for the memory of rows that are elsewhere is told how to save them."""
    module = speedtorch.Embedding(ROWS, WIDTH)
    shard(module)
    saved = module.state_dict()["weight"]
    for call in (saved.untyped_storage, saved.storage, saved.is_contiguous):
        raises(NotImplementedError, REFUSED, call)

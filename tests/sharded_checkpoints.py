"""Ranks that share rows out save one run together, and load it on any number of them."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_processes import own_device
from sharded_saved import tables_of
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import speedtorch
from speedtorch.checkpoints import generation_writer
from speedtorch.checkpoints.joined_files import JoinedFile
from speedtorch.checkpoints.saved_generation import DamagedError, SavedGeneration
from speedtorch.files import system_calls
from speedtorch.table.row_shard import RowShard

ROWS, STEPS = 301, 5


def batch(step: int) -> Tensor:
    return torch.randint(ROWS, (12,), generator=torch.Generator().manual_seed(step))


class Run:
    """Three tables and a layer with Adam; gradients of rows are whole numbers of few ids."""

    def __init__(
        self, seed: int = 0, *, shard: bool = True, stored: Any = None, cache: Any = None
    ) -> None:
        torch.manual_seed(seed)
        device = own_device()
        config = speedtorch.EmbeddingBagConfig
        bags = [config(ROWS, 4, "user"), config(2, 4, "few")]  # fewer rows than ranks
        self.model = nn.ModuleDict(
            {
                "emb": speedtorch.Embedding(ROWS, 6, device=device, stored=stored, cache=cache),
                "bags": speedtorch.EmbeddingBagCollection(bags, device=device),
                "out": nn.Linear(3, 3, device=device),
            }
        )
        if shard:
            speedtorch.shard(self.model)
        self.optimizer = optim.Adam(self.model.parameters(), lr=0.1)
        speedtorch.attach(self.optimizer, self.model)

    def train(self, first: int, steps: int) -> Run:
        for step in range(first, first + steps):
            self.step(batch(step))
        return self

    def step(self, ids: Tensor) -> None:
        model: Any = self.model
        self.optimizer.zero_grad()
        loss = model["emb"](ids).sum() + model["bags"]({"user": ids, "few": ids % 2}).values().sum()
        (loss + model["out"](torch.ones(3, device=own_device())).sum()).backward()
        self.optimizer.step()

    @property
    def tables(self) -> list[speedtorch.HostTable]:
        return tables_of(self.model)

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def own(self) -> dict[str, Tensor]:
        """What this rank has, by name."""
        found = dict(self.model.state_dict())
        for number, kept in self.optimizer.state_dict()["state"].items():
            found |= {f"{number}.{key}": each for key, each in kept.items()}
        return {
            name: (each.field if isinstance(each, RowShard) else each).detach().cpu().clone()
            for name, each in found.items()
        }


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, each in one.items():
        assert torch.equal(each, other[name]), name


def check_saved(folder: str, stored: Any) -> None:
    """Ranks save and go on; what they load goes on as well, bit for bit."""
    run = Run(stored=stored).train(0, STEPS)
    with mock.patch.object(generation_writer, "SHARD_BYTES", 12_000):
        saved = speedtorch.save(folder, **run.parts(), step=STEPS, rank=dist.get_rank())
    assert saved.generation == 1 and saved.nbytes > 0
    names = sorted(each for each in os.listdir(saved.path) if each.startswith("rows"))
    assert 1 < len(names) < 6  # of weights and two moments of two tables
    other = Run(seed=3, stored=stored)
    found = speedtorch.load(folder, **other.parts())
    assert found == {"step": STEPS, "rank": 0}
    assert_same(other.own(), run.own())
    assert_same(other.train(STEPS, 3).own(), run.train(STEPS, 3).own())


def check_unfit(folder: str, since: int | None) -> None:
    """A part that does not fit on one rank leaves the objects of all ranks as they were."""
    run = Run().train(0, 1)
    for table in run.tables:
        table.track_changes()
    for base in (None, 1):
        speedtorch.save(folder, base=base, **run.train(1, 1).parts(), layer=nn.Linear(2, 2))
    other, rank = Run(seed=3), dist.get_rank()
    before = other.own()
    for at in range(2):
        layer = nn.Linear(2, 3 if rank == at else 2)
        message = "size mismatch for weight" if rank == at else f"load: rank {at} raises"
        with pytest.raises(RuntimeError, match=message):
            speedtorch.load(folder, since=since, **other.parts(), layer=layer)
        assert_same(other.own(), before)
    speedtorch.load(folder, **other.parts(), layer=nn.Linear(2, 2))
    assert_same(other.own(), run.own())


def check_fallback(folder: str) -> None:
    """All ranks pass over generations that one of them finds damaged, or raise."""
    run, other, rank = Run(), Run(seed=3), dist.get_rank()
    expected = []
    for step in range(3):
        speedtorch.save(folder, keep=9, **run.train(step, 1).parts(), step=step)
        expected.append(run.own())
    real, damaged = SavedGeneration.verify, {rank: 3 - rank}  # each finds another one

    def verify(opened: SavedGeneration, *arguments: Any) -> None:
        if opened.number >= damaged[rank]:
            raise DamagedError(opened.number, f"{opened.path} is damaged", "")
        real(opened, *arguments)

    with mock.patch.object(SavedGeneration, "verify", verify):
        with pytest.warns(RuntimeWarning, match=r"loads generation 1, because \[2, 3\]"):
            assert speedtorch.load(folder, **other.parts())["step"] == 0
        assert_same(other.own(), expected[0])
        damaged[rank] = 4 - 3 * rank
        message = "all generations" if rank else "rank 1 raises .*all generations"
        with pytest.raises((ValueError, RuntimeError), match=message):
            speedtorch.load(folder, **other.train(9, 1).parts())
    assert speedtorch.load(folder, **other.parts())["step"] == 2
    assert_same(other.own(), expected[2])


class FullySharded:
    """Layers of FSDP2, some with fewer rows than ranks, beside a table that ranks share out."""

    def __init__(self, seed: int, dims: tuple[int, ...], kind: Any) -> None:
        torch.manual_seed(seed)
        self.emb = speedtorch.Embedding(ROWS, 3)
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
        self.model = nn.ModuleList([self.emb, self.layers])
        names = ("replica", "shard")[-len(dims) :]
        fully_shard(self.layers, mesh=init_device_mesh("cpu", dims, mesh_dim_names=names))
        speedtorch.shard(self.emb)
        self.optimizer = kind(self.model.parameters(), lr=0.1, foreach=False)
        speedtorch.attach(self.optimizer, self.model)

    def train(self, first: int, steps: int) -> FullySharded:
        for step in range(first, first + steps):
            self.optimizer.zero_grad()
            self.layers(self.emb(batch(step))).square().sum().backward()
            self.optimizer.step()
        return self

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def own(self) -> dict[str, Tensor]:
        found = dict(self.model.state_dict())
        for number, kept in self.optimizer.state_dict()["state"].items():
            found |= {f"{number}.{key}": each for key, each in kept.items()}
        for name, each in found.items():
            local = each.to_local() if isinstance(each, DTensor) else each
            found[name] = (local.field if isinstance(local, RowShard) else local).clone()
        return found


def check_fully_sharded(folder: str, dims: tuple[int, ...]) -> None:
    """Each rank saves its shards of DTensors and loads them, and training goes on."""
    for number, kind in enumerate([optim.Adam, optim.Adagrad, optim.SGD]):
        run = FullySharded(0, dims, kind).train(0, 2)
        place = f"{folder}/{number}"
        speedtorch.save(place, **run.parts(), step=2)
        speedtorch.async_save(place, **run.train(2, 1).parts(), step=3).result(60)
        expected = run.own()
        for generation in (1, 2):
            other = FullySharded(7, dims, kind).train(7, generation - 1)
            found = speedtorch.load(place, generation=generation, **other.parts())
            assert_same(other.train(found["step"], 3 - found["step"]).own(), expected)
        assert_same(other.train(3, 2).own(), run.train(3, 2).own())
        speedtorch.save(place, keep=9, **other.parts(), layer=nn.Linear(3, 2))
        before = other.train(9, 1).own()
        with pytest.raises(RuntimeError, match="size mismatch for weight|rank 1 raises"):
            layer = nn.Linear(3, 2 + dist.get_rank() % 2)
            speedtorch.load(place, **other.parts(), layer=layer)
        assert_same(other.own(), before)


def check_of_plain(folder: str) -> None:
    """DTensors load what one process saved of plain tensors."""
    run = FullySharded(3, (dist.get_world_size(),), optim.Adam)
    speedtorch.load(folder, layers=run.layers)
    plain = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    speedtorch.load(folder, layers=plain)
    for name, each in run.layers.state_dict().items():
        full = each.full_tensor() if isinstance(each, DTensor) else each
        assert torch.equal(full, plain.state_dict()[name])


def check_loaded(folder: str, stored: Any) -> None:
    """Another number of ranks has the rows of one process that loads the same."""
    run, whole = Run(seed=5, stored=stored), Run(seed=6, shard=False, stored=stored)
    for each in (run, whole):
        assert speedtorch.load(folder, **each.parts())["step"] == STEPS
    assert_rows_of(run, whole)


def assert_rows_of(run: Run, whole: Run) -> None:
    expected = whole.model.state_dict()
    for name, rows in run.model.state_dict().items():
        if isinstance(rows, RowShard):
            for there, here in rows.blocks:
                mine = rows.field[here.start : here.stop]
                assert torch.equal(mine, expected[name][there.start : there.stop])
        else:
            assert torch.equal(rows, expected[name])


def saved(folder: str, run: Run, *, background: bool = False, **how: Any) -> speedtorch.types.Saved:
    if background:
        return speedtorch.async_save(folder, keep=9, **run.parts(), **how).result(60)
    return speedtorch.save(folder, keep=9, **run.parts(), **how)


def size(made: speedtorch.types.Saved) -> int:
    return sum(each.stat().st_size for each in Path(made.path).glob("rows*"))


def check_deltas(folder: str, background: bool, cache: Any) -> None:
    """Generations of changed rows, made while rows are held and prefetched, are the run."""
    last = dist.get_rank() == dist.get_world_size() - 1
    run = Run(cache=cache).train(0, 2)
    for table in run.tables:
        table.track_changes()
    kept, sizes = {}, []
    loop = speedtorch.prefetch(map(batch, range(2, 8)), run.model["emb"], ids=lambda ids: ids)
    for step, ids in enumerate(loop, 2):
        run.step(ids)
        base = max(kept, default=None)
        made = saved(folder, run, base=base, background=background, step=step)
        assert made.base == base and (made.waited is not None) == background
        kept[made.generation] = run.own()
        sizes.append(size(made))
        if step == 4 and last:  # a write that names no rows, on one rank
            run.tables[0]["weight"][0] = 1.0
    assert max(sizes[1:3] + sizes[4:]) < sizes[3] < sizes[0]
    other = Run(seed=3)
    for table in other.tables:
        table.track_changes()
    for number, expected in kept.items():
        speedtorch.load(folder, generation=number, **other.parts())
        assert_same(other.own(), expected)
    made = saved(folder, other.train(8, 1), base=6)
    assert size(made) < sizes[0] / 3
    speedtorch.load(folder, **run.parts())
    assert_same(run.own(), other.own())
    folders = [each for each in os.listdir(folder) if not each.startswith("generation")]
    assert folders == []


def check_followed(folder: str) -> None:
    """Any number of ranks follows a chain row by row, and has the rows of one process."""
    run, whole = Run(seed=5), Run(seed=6, shard=False)
    speedtorch.load(folder, generation=1, **run.parts())
    for table in run.tables:
        table.track_changes()
    for number in range(2, 8):
        moments = [table.track_changes() for table in run.tables]
        speedtorch.load(folder, generation=number, since=number - 1, **run.parts())
        counts = [len(t.changed(at)) for t, at in zip(run.tables, moments, strict=True)]
        assert max(counts) < ROWS / 4 or number == 4
    speedtorch.load(folder, **whole.parts())
    assert_rows_of(run, whole)
    assert saved(folder, run, base=7).base == 7


def check_without_room(folder: str) -> None:
    """Files for whose copies a rank has no room are written before the call returns."""
    run, rank = Run().train(0, STEPS), dist.get_rank()
    files, real = [], JoinedFile.write

    def write(file: JoinedFile, *given: Any) -> None:
        files.append((file.name, threading.current_thread().name))
        real(file, *given)

    with (
        mock.patch.object(generation_writer, "SHARD_BYTES", 12_000),
        mock.patch.object(JoinedFile, "write", write),
    ):
        most = 10_000 if rank else 1
        saving = speedtorch.async_save(folder, max_memory=most, **run.parts(), step=STEPS)
        saving.result(60)
    before = [name for name, thread in files if thread == "MainThread"]
    assert 0 < len(before) <= len(files) and (before == [name for name, _ in files]) == (rank == 0)


def check_whole(folder: str) -> None:
    """A table of which a rank does not know what has changed is written whole."""
    run = Run().train(0, 1)
    for table in run.tables[dist.get_rank() :]:  # the last rank notes nothing of the first table
        table.track_changes()
    sizes = [size(saved(folder, run.train(1, 1), base=base)) for base in (None, 1, 2)]
    assert sizes[0] * 0.2 < sizes[1] < sizes[0] * 0.9 and sizes[2] < sizes[0] / 4
    other = Run(seed=3)
    speedtorch.load(folder, **other.parts())
    assert_same(other.own(), run.own())


@contextmanager
def failing_call(name: str, number: int) -> Iterator[list[int]]:
    """The `number`-th call on a file of this name fails; gives how many are left until then."""
    real: Callable[..., Any] = getattr(system_calls.calls, name)
    left = [number]

    def call(*args: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args)

    setattr(system_calls.calls, name, call)
    try:
        yield left
    finally:
        setattr(system_calls.calls, name, real)


def check_failing(folder: str, failing: int, how: dict[str, Any]) -> None:
    """A rank that fails at one of its calls leaves all with an error, and the old generation."""
    warnings.simplefilter("ignore", RuntimeWarning)
    run, is_failing = Run().train(0, 2), dist.get_rank() == failing
    for table in run.tables:
        table.track_changes()
    saved(folder, run, step=1)
    before, failed = run.own(), 0
    for name in ("open", "write", "read", "fsync", "lockf"):
        for number in (1, 2, 3, 5, 8, 11):
            with failing_call(name, number if is_failing else 0) as left:
                try:
                    saved(folder, run, **how, step=2)
                except (OSError, RuntimeError) as error:
                    text = str(error)
                else:
                    text = ""
            came = torch.tensor(int(left[0] <= 0) if is_failing else 0, dtype=torch.int64)
            dist.all_reduce(came)
            there = sorted(e for e in os.listdir(folder) if not e.endswith(".ranks"))
            assert there[0] == "generation-00000001" and there[1:] in ([], ["generation-00000002"])
            if there[1:]:  # what failed was no matter, or came after the switch
                assert speedtorch.load(folder)["step"] == 2
                assert not text or name != "write", text
            else:
                assert "Input/output error" in text or "has ended" in text, text
                failed += 1
            dist.barrier()
            if there[1:] and dist.get_rank() == 0:
                shutil.rmtree(os.path.join(folder, there[1]))
            dist.barrier()
            if came == 0:
                break
    assert failed >= 8, failed
    assert_same(run.own(), before)
    assert saved(folder, run, step=3).generation == 2
    assert speedtorch.load(folder)["step"] == 3


def check_differing(folder: str) -> None:
    """Ranks that save different tables are told on all."""
    run = Run()
    run.train(0, 1)
    model, is_first = {"model": run.model}, dist.get_rank() == 0
    for how in (
        dict(model) if is_first else run.parts(),
        model | {"base": 1 if is_first else None},
        model,
    ):
        is_other = how is model and is_first
        save: Any = speedtorch.async_save if is_other else speedtorch.save
        try:
            save(folder, **how)
        except ValueError as error:
            assert "save the same tables" in str(error)
        else:
            raise AssertionError("it was saved")
    assert not Path(folder).exists()

"""Ranks that share rows out save and load one run together."""

from __future__ import annotations

import errno
import math
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
from rank_backends import TWO_AND_THREE_RANKS, on_ranks
from rank_processes import exit_codes, in_processes
from sharded_checkpoints import (
    ROWS,
    STEPS,
    Run,
    assert_rows_of,
    assert_same,
    batch,
    check_loaded,
    saved,
    size,
)
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import speedtorch
from speedtorch.checkpoints import generation_writer
from speedtorch.checkpoints.joined_files import JoinedFile
from speedtorch.checkpoints.saved_generation import DamagedError, SavedGeneration
from speedtorch.files import system_calls


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


@TWO_AND_THREE_RANKS
@pytest.mark.parametrize("stored", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_run_of_ranks_goes_on_and_is_loaded_by_any_number(
    stored: Any, ranks: int, backend: str, tmp_path: Path
) -> None:
    folder = str(tmp_path / "run")
    in_processes(ranks, check_saved, folder, stored, backend=backend)
    in_processes(5 - ranks, check_loaded, folder, stored, backend="gloo")


@on_ranks
@pytest.mark.parametrize("since", [None, 1])
def test_a_part_that_does_not_fit_on_one_rank_is_loaded_on_none(
    since: int | None, tmp_path: Path
) -> None:
    run, folder = Run().train(0, 1).tracked(), tmp_path / "run"
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


@on_ranks
def test_all_ranks_pass_over_what_one_of_them_finds_damaged(tmp_path: Path) -> None:
    """All raise if nothing is left."""
    run, other, rank, folder = Run(), Run(seed=3), dist.get_rank(), tmp_path / "run"
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


class FullySharded(Run):
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

    def step(self, ids: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.layers(self.emb(ids)).square().sum().backward()
        self.optimizer.step()


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


@pytest.mark.parametrize("dims", [(2,), (3,), (2, 2)])
def test_shards_of_dtensors_are_saved_and_loaded(dims: tuple[int, ...], tmp_path: Path) -> None:
    in_processes(math.prod(dims), check_fully_sharded, str(tmp_path), dims)
    for each in tmp_path.iterdir():
        assert speedtorch.load(each, generation=2)["step"] == 3  # in one process


def check_of_plain(folder: str) -> None:
    run = FullySharded(3, (dist.get_world_size(),), optim.Adam)
    speedtorch.load(folder, layers=run.layers)
    plain = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    speedtorch.load(folder, layers=plain)
    for name, each in run.layers.state_dict().items():
        full = each.full_tensor() if isinstance(each, DTensor) else each
        assert torch.equal(full, plain.state_dict()[name])


def test_dtensors_load_plain_tensors(tmp_path: Path) -> None:
    layers = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    speedtorch.save(tmp_path, layers=layers)
    in_processes(2, check_of_plain, str(tmp_path))


def check_deltas(folder: str, background: bool, cache: Any) -> None:
    """Generations of changed rows, made while rows are held and prefetched, are the run."""
    last = dist.get_rank() == dist.get_world_size() - 1
    run = Run(cache=cache).train(0, 2).tracked()
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
    other = Run(seed=3).tracked()
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
    run.tracked()
    for number in range(2, 8):
        moments = [table.track_changes() for table in run.tables]
        speedtorch.load(folder, generation=number, since=number - 1, **run.parts())
        counts = [len(t.changed(at)) for t, at in zip(run.tables, moments, strict=True)]
        assert max(counts) < ROWS / 4 or number == 4
    speedtorch.load(folder, **whole.parts())
    assert_rows_of(run, whole)
    assert saved(folder, run, base=7).base == 7


@TWO_AND_THREE_RANKS
@pytest.mark.parametrize("how", ["foreground", "background"])
def test_base_and_deltas_of_ranks_are_the_run_on_any_number(
    how: str, ranks: int, backend: str, tmp_path: Path
) -> None:
    folder, background = str(tmp_path / "run"), how == "background"
    cache = "2KiB" if background else None
    in_processes(ranks, check_deltas, folder, background, cache, backend=backend)
    in_processes(5 - ranks, check_followed, folder, backend="gloo")


def check_without_room(folder: str) -> None:
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


def test_files_without_room_for_copies_are_written_before(tmp_path: Path) -> None:
    """Before the call returns."""
    folder = str(tmp_path / "run")
    in_processes(2, check_without_room, folder)
    in_processes(3, check_loaded, folder, None)


@on_ranks
def test_a_table_of_which_one_rank_knows_no_changes_is_whole(tmp_path: Path) -> None:
    run, folder = Run().train(0, 1), str(tmp_path / "run")
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

    with mock.patch.object(system_calls.calls, name, call):
        yield left


@on_ranks
@pytest.mark.parametrize("failing", [0, 1], ids=["first", "last"])
@pytest.mark.parametrize(
    "how", [{}, {"background": True, "base": 1}], ids=["foreground", "background"]
)
def test_an_error_of_a_rank_raises_on_all_and_keeps_the_old_generation(
    how: dict[str, Any], failing: int, tmp_path: Path
) -> None:
    """At each of its calls on files."""
    warnings.simplefilter("ignore", RuntimeWarning)
    folder, run, is_failing = str(tmp_path), Run().train(0, 2).tracked(), dist.get_rank() == failing
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


@on_ranks
def test_ranks_with_different_tables_raise(tmp_path: Path) -> None:
    run, folder = Run().train(0, 1), tmp_path / "run"
    model, is_first = {"model": run.model}, dist.get_rank() == 0
    for how in (
        dict(model) if is_first else run.parts(),
        model | {"base": 1 if is_first else None},
        model,
    ):
        is_other = how is model and is_first
        save: Any = speedtorch.async_save if is_other else speedtorch.save
        with pytest.raises(ValueError, match="save the same tables"):
            save(folder, **how)
    assert not folder.exists()


@on_ranks
def test_an_error_before_the_first_byte_on_one_rank_raises_on_all(tmp_path: Path) -> None:
    parts, at = Run().train(0, 1).parts(), dist.get_rank()
    wrong: Any
    model: Any = parts["model"]
    for wrong in ({"config": object()}, {"keep": 0}, {"base": "last"}, {"keeps": 3}):
        kind = RuntimeError if at == 0 else (TypeError, ValueError)
        for given in (parts, {"state": {"model": model.state_dict()}}):
            with pytest.raises(kind, match="save: rank 1 raises" if at == 0 else ""):
                speedtorch.save(tmp_path, **given, **(wrong if at else {}))
    with speedtorch.full_state_dict(model), pytest.raises(ValueError, match="save the same tables"):
        speedtorch.save(tmp_path, **parts)
    with pytest.raises(ValueError, match="'path'"):
        speedtorch.save(tmp_path / str(at), **parts)
    assert not [*tmp_path.iterdir()]
    assert speedtorch.save(tmp_path, **parts).generation == 1


@on_ranks
def test_groups_of_ranks_save_and_load_tables_of_their_own(tmp_path: Path) -> None:
    rank, groups = dist.get_rank(), [dist.new_group([at]) for at in range(2)]

    def made(seed: int, process_group: Any) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.ModuleList([speedtorch.Embedding(9, 2)])
        speedtorch.shard(model, process_group=process_group)
        return model

    model, other, folder = made(rank, groups[rank]), made(5, groups[rank]), tmp_path / str(rank)
    saved = speedtorch.save(folder, model=model)
    assert os.path.isdir(saved.path)
    speedtorch.async_save(folder, model=model).result()
    speedtorch.load(folder, model=other)
    assert torch.equal(*(each[0](torch.arange(9)) for each in (model, other)))
    whole = made(7, None), made(8, dist.new_group([0, 1]))  # two groups of the same ranks
    speedtorch.save(tmp_path / "both", models=whole)
    with pytest.raises(ValueError, match=r"each of the 9 rows of 'model.0.weight' once.*\[9, 9\]"):
        speedtorch.save(tmp_path, model=model.state_dict())
    call: Any
    for call in (speedtorch.save, speedtorch.load):
        with pytest.raises(NotImplementedError, match="sharded among different ranks"):
            call(tmp_path, model=model, other=whole[0])


def check_saved_too_late(folder: str) -> None:
    parts = Run().parts()
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match=r"Save before torch.distributed.destroy_process_group"):
        speedtorch.save(folder, **parts)
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)  # for the end of the test


def test_a_save_after_the_end_of_the_process_group_says_so(tmp_path: Path) -> None:
    assert exit_codes(1, check_saved_too_late, str(tmp_path)) == [0]

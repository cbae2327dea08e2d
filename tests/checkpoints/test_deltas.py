"""Saves of the rows that have changed: with their base they are the table, bit for bit."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from file_faults import count_calls, fail
from reference import as_bytes
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.checkpoints import change_tracking, deltas, generation_writer
from speedtorch.checkpoints.saved_generation import SavedGeneration
from speedtorch.files.safetensors_format import DTYPES
from speedtorch.step.trained_rows import TrainedRows

ROWS = 200
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cache": {"cache": "2KiB"},
    "capacity": {"capacity": 8},
    "bfloat16": {"stored": torch.bfloat16},
}


class Run:
    """A table and a layer, with their optimizer."""

    def __init__(self, device: str, seed: int = 0, **settings: Any) -> None:
        torch.manual_seed(seed)
        emb = speedtorch.Embedding(ROWS, 4, device=device, **settings)
        self.model = nn.ModuleDict({"emb": emb, "out": nn.Linear(4, 1, device=device)})
        self.optimizer = optim.Adam(self.model.parameters(), lr=0.1)
        speedtorch.attach(self.optimizer, self.model)
        self.random = random.Random(seed)
        self.device = device

    def train(self, steps: int) -> Run:
        for _ in range(steps):
            ids = torch.tensor(self.random.choices(range(ROWS), k=6), device=self.device)
            self.optimizer.zero_grad()
            self.model["out"](self.model["emb"](ids)).square().mean().backward()
            self.optimizer.step()
        return self

    @property
    def table(self) -> speedtorch.HostTable:
        table: speedtorch.HostTable = self.model["emb"].table
        return table

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def tensors(self) -> list[Tensor]:
        state = self.optimizer.state_dict()["state"]
        kept = [torch.as_tensor(each) for of in state.values() for each in of.values()]
        return [each.detach().clone() for each in (*self.model.state_dict().values(), *kept)]


def assert_same(one: Run, other: Run) -> None:
    for found, expected in zip(one.tensors(), other.tensors(), strict=True):
        assert torch.equal(as_bytes(found.cpu()), as_bytes(expected.cpu()))


def size(saved: speedtorch.types.Saved) -> int:
    return sum(each.stat().st_size for each in Path(saved.path).iterdir())


@pytest.mark.parametrize("how", SETTINGS)
def test_base_and_deltas_are_the_table(how: str, device: str, tmp_path: Path) -> None:
    run = Run(device, **SETTINGS[how]).train(3)
    run.table.track_changes()
    saved = speedtorch.save(tmp_path, **run.parts)
    whole = size(saved)
    for number in range(2, 5):
        run.train(2)
        saved = speedtorch.save(tmp_path, base=saved.generation, **run.parts, step=number)
        assert (saved.generation, saved.base) == (number, number - 1)
        assert size(saved) < whole / 2
        again = Run(device, seed=7, **SETTINGS[how]).train(1)
        assert speedtorch.load(tmp_path, **again.parts) == {"step": number}
        assert_same(again, run)
    again.random.setstate(run.random.getstate())
    assert_same(again.train(3), run.train(3))


@pytest.mark.parametrize("how", SETTINGS)
def test_a_reader_takes_only_what_has_changed(how: str, device: str, tmp_path: Path) -> None:
    run, reader = Run(device, **SETTINGS[how]).train(3), Run(device, seed=7, **SETTINGS[how])
    run.table.track_changes()
    reader.train(1)
    speedtorch.save(tmp_path, keep=9, **run.parts)
    speedtorch.load(tmp_path, **reader.parts)
    reader.table.track_changes()
    has = 1
    for base, steps in ((1, 2), (2, 1), (2, 0)):
        run.train(steps)
        saved = speedtorch.save(tmp_path, keep=9, base=base, **run.parts)
        if base != has:
            continue
        before = reader.table.track_changes()
        speedtorch.load(tmp_path, since=has, **reader.parts)
        assert_same(reader, run)
        assert 0 < len(reader.table.changed(before)) < ROWS / 4
        has = saved.generation
    speedtorch.load(tmp_path, since=1, **reader.parts)  # which it no longer has: rows of 2 and 4
    assert_same(reader, run)
    with torch.no_grad():
        reader.model["out"].weight.zero_()
    speedtorch.load(tmp_path, since=3, **reader.parts)  # none of those before 4: all of it
    assert_same(reader, run)


@pytest.mark.parametrize("tracks", [False, True])
@pytest.mark.parametrize("how", SETTINGS)
def test_a_reader_reads_only_changes(
    how: str, tracks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, reader = Run("cpu", **SETTINGS[how]).train(3), Run("cpu", seed=7, **SETTINGS[how])
    run.table.track_changes()
    if tracks:
        reader.table.track_changes()
    (base,) = Path(speedtorch.save(tmp_path, **run.parts).path).glob("*.safetensors")
    speedtorch.load(tmp_path, **reader.parts)
    speedtorch.save(tmp_path, base=1, **run.train(2).parts)
    data = base.read_bytes()
    base.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    how_loaded: dict[str, Any] = {"generation": 2, "since": 1}
    with monkeypatch.context() as patch:
        patch.setattr(change_tracking, "have_same_bytes", None)  # no full comparison is needed
        assert speedtorch.load(tmp_path, **how_loaded, **reader.parts) == {}
    assert_same(reader, run)
    assert speedtorch.load(tmp_path, **how_loaded, model=reader.model, optimizer=None) == {}
    with pytest.raises(KeyError, match="no part 'optimiser'. Parts:"):
        speedtorch.load(tmp_path, **how_loaded, **reader.parts, optimiser=None)
    for parts in ({}, {"model": reader.model}):  # the rest is copied, with its base
        with pytest.raises(ValueError, match="do not match their digest"):
            speedtorch.load(tmp_path, **how_loaded, **parts)
    base.write_bytes(data)
    saved = speedtorch.save(tmp_path, base=2, **reader.train(1).parts)
    assert (size(saved) < len(data) / 2) == tracks
    again = Run("cpu", seed=9, **SETTINGS[how])
    speedtorch.load(tmp_path, **again.parts)
    assert_same(again, reader)


def test_rows_that_change_during_a_load_are_saved(tmp_path: Path) -> None:
    run, reader = Run("cpu").train(2), Run("cpu", seed=7)
    for each in (run, reader):
        each.table.track_changes()
    speedtorch.save(tmp_path, keep=9, **run.parts)
    speedtorch.load(tmp_path, **reader.parts)
    saved = speedtorch.save(tmp_path, keep=9, base=1, **run.train(1).parts)

    def write(module: nn.Module, keys: Any) -> None:
        reader.table.scatter(torch.arange(9), torch.ones(9, 4), "weight")

    reader.model.register_load_state_dict_post_hook(write)
    speedtorch.load(tmp_path, since=1, **reader.parts)
    speedtorch.save(tmp_path, keep=9, base=saved.generation, **reader.parts)
    again = Run("cpu", seed=9)
    speedtorch.load(tmp_path, **again.parts)
    assert_same(again, reader)


def test_a_reader_that_has_the_last_generation_writes_no_row(tmp_path: Path) -> None:
    run, reader = Run("cpu").train(2), Run("cpu", seed=7)
    for base in (None, 1):
        run.table.track_changes()
        saved = speedtorch.save(tmp_path, base=base, **run.train(1).parts, step=base)
        speedtorch.load(tmp_path, **reader.parts)
        before = reader.table.track_changes()
        assert speedtorch.load(tmp_path, since=saved.generation, **reader.parts) == {"step": base}
        assert len(reader.table.changed(before)) == 0
        assert_same(reader, run)


def test_a_table_that_noted_nothing_goes_as_a_whole_once(tmp_path: Path) -> None:
    run = Run("cpu").train(3)
    first = speedtorch.save(tmp_path, **run.parts)
    second = speedtorch.save(tmp_path, base=1, **run.train(1).parts)
    third = speedtorch.save(tmp_path, base=2, **run.train(1).parts)
    assert size(second) > size(first) * 0.9 > size(third) * 2
    again = Run("cpu", seed=7)
    again.table.track_changes()
    speedtorch.load(tmp_path, **again.parts)
    assert_same(again, run)
    fourth = speedtorch.save(tmp_path, base=3, **again.train(1).parts)  # goes on after a restart
    assert size(fourth) < size(first) / 2
    speedtorch.load(tmp_path, **run.parts)
    assert_same(again, run)


def test_a_table_that_a_graph_uses_goes_as_a_whole_until_the_graph_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, sizes = Run("cpu").train(3), []
    with monkeypatch.context() as patch:
        patch.setattr(TrainedRows, "is_captured", True)
        for base in (None, 1, 2):
            sizes.append(size(speedtorch.save(tmp_path, base=base, **run.train(1).parts)))
        assert run.table.changes is None
    for base in (3, 4):
        sizes.append(size(speedtorch.save(tmp_path, base=base, **run.train(1).parts)))
    assert min(sizes[:4]) > max(sizes[:4]) * 0.9 > sizes[4] * 2


def test_checkpoints_that_are_needed_remain(tmp_path: Path) -> None:
    run = Run("cpu")
    run.table.track_changes()
    for number in range(1, 4):
        speedtorch.save(tmp_path, keep=1, base=number - 1 or None, **run.train(1).parts)
    assert sorted(os.listdir(tmp_path)) == [f"generation-0000000{n}" for n in (1, 2, 3)]
    speedtorch.save(tmp_path, keep=2, **run.parts)
    assert len(os.listdir(tmp_path)) == 4
    speedtorch.save(tmp_path, keep=2, **run.parts)
    assert sorted(os.listdir(tmp_path)) == [f"generation-0000000{n}" for n in (4, 5)]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_rows_of_every_dtype_are_put_over_those_of_the_base(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    table = speedtorch.HostTable(9, 3, dtype=dtype)
    table.track_changes()
    speedtorch.save(tmp_path, rows=table["weight"])
    for base in (1, 2):
        row = torch.arange(3 * dtype.itemsize, dtype=torch.uint8) % (
            2 if dtype == torch.bool else 9
        )
        table.scatter(torch.tensor([3 * base]), row.view(dtype).view(1, 3), "weight")
        assert speedtorch.save(tmp_path, base=base, rows=table["weight"]).base == base
    found = speedtorch.load(tmp_path)["rows"]
    assert torch.equal(as_bytes(found), as_bytes(table["weight"]))


def test_other_changes_are_saved_as_well(tmp_path: Path) -> None:
    run = Run("cpu").train(2)
    run.table.track_changes()
    speedtorch.save(tmp_path, **run.parts)
    run.table["weight"][17] = 3.0
    speedtorch.save(tmp_path, base=1, **run.parts)
    run.table.scatter(torch.tensor([4]), torch.ones(1, 4), "exp_avg")
    speedtorch.save(tmp_path, base=2, **run.parts)
    again = Run("cpu", seed=7)
    speedtorch.load(tmp_path, **again.parts)
    assert_same(again, run)


def test_random_runs(device: str, tmp_path: Path) -> None:
    """Whatever is trained, written, saved against whichever generation and loaded again."""
    for seed in range(6):
        chance, folder = random.Random(seed), tmp_path / str(seed)
        settings = chance.choice(list(SETTINGS.values()))
        run = Run(device, seed, **settings)
        run.table.track_changes()
        kept: dict[int, list[Tensor]] = {}
        for _ in range(12):
            what = chance.choice(["train", "train", "save", "save", "load", "write", "scatter"])
            if what == "train":
                run.train(chance.randint(1, 3))
            elif what == "save":
                base = chance.choice([None, *kept]) if kept else None
                saved = speedtorch.save(folder, keep=99, base=base, **run.parts)
                kept[saved.generation] = run.tensors()
            elif what == "load" and kept:
                speedtorch.load(folder, generation=chance.choice(list(kept)), **run.parts)
            elif what == "write":
                run.table["weight"][chance.randrange(ROWS)] = 1.0
            elif what == "scatter":
                rows = torch.full((1, 4), 0.5, dtype=run.table["weight"].dtype)
                run.table.scatter(torch.tensor([chance.randrange(ROWS)]), rows, "weight")
        for number, expected in kept.items():
            speedtorch.load(folder, generation=number, **run.parts)
            for one, other in zip(run.tensors(), expected, strict=True):
                assert torch.equal(as_bytes(one.cpu()), as_bytes(other.cpu()))


def test_lookups_beside_a_delta_see_old_or_new_rows(device: str, tmp_path: Path) -> None:
    run, reader = Run(device).train(1), Run(device, seed=7)
    run.table.track_changes()
    run.table.fill_(0)
    speedtorch.save(tmp_path, keep=99, model=run.model)
    speedtorch.load(tmp_path, model=reader.model)
    reader.model.eval()
    stop, wrong = threading.Event(), []

    def serve() -> None:
        ids = torch.arange(ROWS, device=device)
        while not stop.is_set():
            with torch.no_grad():
                rows = reader.model["emb"](ids)
            if not bool((rows == rows[:, :1]).all()):
                wrong.append(rows.cpu())

    thread = threading.Thread(target=serve)
    thread.start()
    for number in range(1, 9):
        ids = torch.arange(number % 4, ROWS, 4)
        run.table.scatter(ids, torch.full((len(ids), 4), float(number)), "weight")
        speedtorch.save(tmp_path, keep=99, base=number, model=run.model)
        speedtorch.load(tmp_path, since=number, model=reader.model)
    stop.set()
    thread.join()
    assert not wrong
    assert torch.equal(reader.table["weight"], run.table["weight"])


def test_another_base_is_found(tmp_path: Path) -> None:
    run = Run("cpu").train(1)
    run.table.track_changes()
    speedtorch.save(tmp_path, **run.parts)
    speedtorch.save(tmp_path, base=1, **run.train(1).parts)
    shutil.copytree(tmp_path / "generation-00000001", tmp_path / "kept")
    shutil.rmtree(tmp_path / "generation-00000001")
    again = Run("cpu", seed=7)
    before = again.tensors()
    with pytest.raises(ValueError, match="Generation 2 has the base generation 1"):
        speedtorch.load(tmp_path, **again.parts)
    speedtorch.save(tmp_path / "other", **run.train(1).parts)
    shutil.move(tmp_path / "other" / "generation-00000001", tmp_path)
    with pytest.raises(ValueError, match="its base, generation 1, was replaced"):
        speedtorch.load(tmp_path, generation=2, **again.parts)
    for one, other in zip(again.tensors(), before, strict=True):
        assert torch.equal(one, other)
    shutil.rmtree(tmp_path / "generation-00000001")
    shutil.move(tmp_path / "kept", tmp_path / "generation-00000001")
    path = tmp_path / "generation-00000001" / "tensors-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="generation-00000001.*do not match"):
        speedtorch.load(tmp_path, **again.parts)


def test_wrong_bases_raise(tmp_path: Path) -> None:
    run = Run("cpu")
    with pytest.raises(FileNotFoundError, match="no checkpoint in this"):
        speedtorch.save(tmp_path, base=1, **run.parts)
    saved: Any = speedtorch.save(tmp_path, **run.parts)
    for wrong in (2, 0, -1):
        with pytest.raises(FileNotFoundError, match=rf"no generation {wrong}, only \[1\]"):
            speedtorch.save(tmp_path, base=wrong, **run.parts)
    for call in (
        lambda: speedtorch.save(tmp_path, base=saved, step=2),
        lambda: speedtorch.load(tmp_path, since=saved),
        lambda: speedtorch.load(tmp_path, generation=True),
    ):
        with pytest.raises(TypeError, match="expected a number such as Saved.generation, got"):
            call()
    assert os.listdir(tmp_path) == ["generation-00000001"]


@pytest.mark.slow
def test_a_call_that_fails_leaves_the_next_delta_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run("cpu").train(1)
    run.table.track_changes()
    first = speedtorch.save(tmp_path, keep=9, **run.parts)

    def save() -> object:
        return speedtorch.save(tmp_path, keep=2, base=first.generation, **run.parts)

    run.train(1)
    failed = 0
    for name, count in count_calls(monkeypatch, save).items():
        for number in range(1, count + 1, 2):
            with monkeypatch.context() as patch:
                fail(patch, name, number)
                try:
                    save()
                except OSError:
                    failed += 1
            run.train(1)
            save()
            again = Run("cpu", seed=7)
            speedtorch.load(tmp_path, **again.parts)
            assert_same(again, run)
    assert failed > 20


def test_tables_that_change_places_are_whole(tmp_path: Path) -> None:
    runs = [Run("cpu", seed).train(1) for seed in (1, 2)]
    for run in runs:
        run.table.track_changes()
    for base, (one, other) in ((None, runs), (1, runs[::-1])):
        speedtorch.save(tmp_path, base=base, one=one.model, other=other.model)
    found = Run("cpu", seed=7)
    speedtorch.load(tmp_path, one=found.model)
    assert torch.equal(found.table["weight"], runs[1].table["weight"])


def test_what_a_module_loads_otherwise_is_saved(tmp_path: Path) -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = speedtorch.Embedding(ROWS, 4)

        def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            return super().load_state_dict({}, strict=False)

    run, frozen = Run("cpu"), Frozen()
    speedtorch.save(tmp_path, emb=nn.ModuleDict({"emb": run.model["emb"]}))
    frozen.emb.table.track_changes()
    speedtorch.load(tmp_path, emb=frozen)
    speedtorch.save(tmp_path, base=1, emb=frozen)
    assert torch.equal(speedtorch.load(tmp_path)["emb"]["emb.weight"], frozen.emb.table["weight"])


def test_what_a_reader_has_trained_is_saved(tmp_path: Path) -> None:
    run, reader = Run("cpu").train(1), Run("cpu", seed=7)
    for each in (run, reader):
        each.table.track_changes()
    speedtorch.save(tmp_path, keep=9, **run.parts)
    speedtorch.load(tmp_path, **reader.parts)
    speedtorch.save(tmp_path, keep=9, base=1, **run.train(1).parts)
    speedtorch.load(tmp_path, since=1, **reader.train(1).parts)
    speedtorch.save(tmp_path, keep=9, base=2, **reader.parts)
    again = Run("cpu", seed=9)
    speedtorch.load(tmp_path, **again.parts)
    assert_same(again, reader)


def test_state_beside_a_given_table_goes_by_rows(tmp_path: Path) -> None:
    def made(seed: int) -> tuple[speedtorch.Embedding, optim.Adam]:
        table = speedtorch.HostTable(ROWS, 4).normal_(seed=seed)
        emb = speedtorch.Embedding.from_pretrained(table, freeze=False)
        optimizer = optim.Adam(emb.parameters(), lr=0.1)
        emb.table.track_changes()
        speedtorch.attach(optimizer, emb)
        return emb, optimizer

    emb, optimizer = made(1)
    sizes = []
    for number in range(3):
        emb(torch.tensor([number, 9])).sin().sum().backward()
        optimizer.step()
        saved = speedtorch.save(tmp_path, base=number or None, emb=emb, optimizer=optimizer)
        sizes.append(size(saved))
    assert max(sizes[1:]) < sizes[0] / 4
    again, other = made(2)
    speedtorch.load(tmp_path, emb=again, optimizer=other)
    assert torch.equal(again.table["weight"], emb.table["weight"])
    found, expected = (each.state_dict()["state"][0] for each in (other, optimizer))
    assert all(torch.equal(found[name], each) for name, each in expected.items())


def test_tables_of_a_collection_go_by_rows(device: str, tmp_path: Path) -> None:
    def made() -> dict[str, Any]:
        configs = [
            speedtorch.EmbeddingConfig(
                num_embeddings=rows, embedding_dim=4, name=name, feature_names=[name]
            )
            for name, rows in (("a", ROWS), ("b", 2 * ROWS), ("c", ROWS))
        ]
        model = speedtorch.EmbeddingCollection(tables=configs, device=device)
        optimizer = optim.Adam(model.parameters(), lr=0.1)
        speedtorch.attach(optimizer, model)
        return {"model": model, "optimizer": optimizer}

    one, sizes = made(), []
    for number in range(4):
        batch = {name: torch.tensor([number, 7 * number], device=device) for name in "abc"}
        sum(each.values().sin().sum() for each in one["model"](batch).values()).backward()
        one["optimizer"].step()
        sizes.append(size(speedtorch.save(tmp_path, keep=9, base=number or None, **one)))
    assert max(sizes[2:]) < min(sizes[:2]) / 4
    reader = made()
    speedtorch.load(tmp_path, generation=3, **reader)
    speedtorch.load(tmp_path, since=3, **reader)
    again = made()
    speedtorch.load(tmp_path, **again)
    for name, expected in one["model"].state_dict().items():
        for found in (again, reader):
            assert torch.equal(found["model"].state_dict()[name], expected)


def test_long_chains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "LONGEST_CHAIN", 40)
    table = speedtorch.HostTable(ROWS, 1, memory="plain")
    table.track_changes()
    limit = sys.getrecursionlimit()
    depth = next(n for n in range(limit) if sys._getframe(n).f_back is None)
    bases: list[int | None] = []
    try:
        for number in range(42):
            table.scatter(torch.tensor([number]), torch.ones(1, 1), "weight")
            rows = table["weight"]
            sys.setrecursionlimit(depth + 90)
            saved = speedtorch.save(tmp_path, keep=1, base=number or None, rows=rows)
            if number == 40:
                assert torch.equal(speedtorch.load(tmp_path)["rows"], rows)
            bases.append(saved.base)
            sys.setrecursionlimit(limit)
    finally:
        sys.setrecursionlimit(limit)
    assert bases == [None, *range(1, 41), None]
    assert os.listdir(tmp_path) == ["generation-00000042"]
    assert torch.equal(speedtorch.load(tmp_path)["rows"], table["weight"])


def test_a_damaged_base_names_what_does_not_need_it(tmp_path: Path) -> None:
    table = speedtorch.HostTable(ROWS, 1, memory="plain")
    table.track_changes()
    for number in range(3):
        speedtorch.save(tmp_path, keep=9, base=max(0, number - 1) or None, rows=table["weight"])
    (tmp_path / "generation-00000002" / "manifest.json").write_bytes(b"{}")
    with pytest.raises(ValueError, match=r"generation=1\) for the"):
        speedtorch.load(tmp_path, generation=2)
    (tmp_path / "generation-00000001" / "manifest.json").write_bytes(b"{}")
    with pytest.raises(ValueError, match=r"all generations \[1, 2, 3\]"):
        speedtorch.load(tmp_path)


@pytest.mark.parametrize("since", [None, 1, 4])
def test_a_chain_with_a_damaged_link_falls_back_to_the_last_whole_run(
    since: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, reader = Run("cpu").train(1), Run("cpu", seed=7)
    run.table.track_changes()
    expected = []
    for number in range(5):
        base = None if number == 2 else number or None  # 2 goes on from 1, 4 and 5 from 3
        saved = speedtorch.save(tmp_path, keep=9, base=base, **run.train(1).parts, step=number)
        expected.append(run.tensors())
        if number == 3:
            path = Path(saved.path)
    if since is not None:
        speedtorch.load(tmp_path, generation=since, **reader.parts)
    os.unlink(path / "tensors-00001.safetensors")
    verified, real = set(), SavedGeneration.verify

    def verify(of: SavedGeneration, *arguments: Any) -> None:
        verified.add(of.number)
        real(of, *arguments)

    monkeypatch.setattr(SavedGeneration, "verify", verify)
    match = rf"loads generation 3, because \[4, 5\].*{path.name}"
    with pytest.warns(RuntimeWarning, match=match):
        assert speedtorch.load(tmp_path, since=since, **reader.parts) == {"step": 2}
    for one, other in zip(reader.tensors(), expected[2], strict=True):
        assert torch.equal(as_bytes(one), as_bytes(other))
    assert verified == {3}  # the links above one that is known as damaged are not read


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": "changed rows.1"}, "the 'rows' of its base are not a dict"),
        ({"generation": 0}, "it has the invalid base {'generation': 0"),
        ({"generation": 7}, "its base must be an older generation, got 7"),
    ],
)
def test_a_base_that_no_save_has_written_is_an_error(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    table = speedtorch.HostTable(ROWS, 1, memory="plain")
    table.track_changes()
    speedtorch.save(tmp_path, rows=table["weight"])
    rewrite_base(speedtorch.save(tmp_path, base=1, rows=table["weight"]), **change)
    with pytest.raises(ValueError, match=f"manifest.json: is damaged.*{message}"):
        speedtorch.load(tmp_path, generation=2)


def rewrite_base(saved: speedtorch.types.Saved, **change: Any) -> None:
    """Changes what a manifest says of its base."""
    path = Path(saved.path) / "manifest.json"
    content = json.loads(path.read_text())
    content["base"].update(change)
    text = json.dumps(content).encode()
    path.write_bytes(text)
    path.with_suffix(".crc32").write_text(f"{zlib.crc32(text):08x}\n")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ("rows", r"rows \(1, 1\) with ids \(1, 1\) do not fit a tensor of \(200, 1\)"),
        ("two", r"rows \(1, 1\) with ids \(2,\) do not fit a tensor of \(200, 1\)"),
        ("above", "its ids of changed rows must be within the 200 rows"),
        ("below", "its ids of changed rows must be within the 200 rows"),
    ],
)
def test_ids_that_are_not_of_the_changed_rows_are_an_error(
    ids: str, message: str, tmp_path: Path
) -> None:
    values = {"two": [0, 1], "above": [ROWS], "below": [-1]}
    others = {name: torch.tensor(each) for name, each in values.items()}
    table = speedtorch.HostTable(ROWS, 1, memory="plain")
    table.track_changes()
    speedtorch.save(tmp_path, rows=table["weight"], **others)
    table.scatter(torch.tensor([3]), torch.ones(1, 1), "weight")
    saved = speedtorch.save(tmp_path, base=1, rows=table["weight"], **others)
    rewrite_base(saved, rows={"rows": ids})
    with pytest.raises(ValueError, match=message):
        speedtorch.load(tmp_path, generation=2)


def test_a_base_that_is_removed_during_the_save_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = speedtorch.HostTable(ROWS, 1, memory="plain")
    table.track_changes()
    speedtorch.save(tmp_path, rows=table["weight"])
    write = generation_writer.write_safetensors

    def write_without_base(*arguments: Any) -> None:
        write(*arguments)
        shutil.rmtree(tmp_path / "generation-00000001")

    monkeypatch.setattr(generation_writer, "write_safetensors", write_without_base)
    with pytest.raises(RuntimeError, match=r"generation 1, was removed during the save.*base="):
        speedtorch.save(tmp_path, base=1, rows=table["weight"])
    assert os.listdir(tmp_path) == []


def test_a_table_forgets_the_oldest_checkpoints_that_have_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_tracking, "_MOST_KNOWN", 2)
    table = speedtorch.HostTable(ROWS, 1, memory="plain")
    table.track_changes()
    rows = table["weight"]
    for number in range(3):
        table.scatter(torch.tensor([number]), torch.ones(1, 1), "weight")
        speedtorch.save(tmp_path, keep=9, rows=rows)
    sizes = [size(speedtorch.save(tmp_path, keep=9, base=base, rows=rows)) for base in (1, 3)]
    assert sizes[0] > 4 * ROWS > sizes[1]
    assert torch.equal(speedtorch.load(tmp_path)["rows"], rows)


def test_a_table_that_cannot_be_used_is_no_matter(tmp_path: Path) -> None:
    other = speedtorch.HostTable(ROWS, 4, memory="file", path=tmp_path / "rows")
    os.truncate(tmp_path / "rows", 10)
    assert speedtorch.save(tmp_path / "run", rows=torch.ones(3)).generation == 1
    with pytest.raises(ValueError):
        other.check()

"""Saves of the rows that have changed: with their base they are the table, bit for bit."""

from __future__ import annotations

import os
import random
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from file_faults import count_calls, fail
from reference import assert_same_bytes, assert_same_content
from saved_runs import (
    ROWS,
    SETTINGS,
    Run,
    assert_same,
    damage,
    rewrite_manifest,
    size,
    tracked_table,
)
from torch import nn, optim

import speedtorch
from speedtorch.checkpoints import change_tracking, deltas, generation_writer
from speedtorch.checkpoints.saved_generation import SavedGeneration
from speedtorch.files.safetensors_format import DTYPES
from speedtorch.step.trained_rows import TrainedRows


@pytest.mark.parametrize("how", SETTINGS)
def test_base_and_deltas_are_the_run_which_goes_on(how: str, device: str, tmp_path: Path) -> None:
    run, sizes = Run(device, **SETTINGS[how]).train(1).tracked(), []
    for number in range(1, 5):
        run.train(2)
        base, values = number - 1 or None, {"step": number, "note": ["a", 1.5]}
        saved = speedtorch.save(tmp_path / "runs", base=base, **run.parts, **values)
        assert (saved.generation, saved.base) == (number, base)
        assert saved.seconds > 0 and f"generation {number}" in str(saved)
        sizes.append(size(saved))
        assert sizes[-1] - 9 <= saved.nbytes
        again = Run(device, seed=7, **SETTINGS[how]).train(1)
        assert speedtorch.load(tmp_path / "runs", **again.parts) == values
        assert_same(again, run)
    assert max(sizes[1:]) < sizes[0] / 2
    again.random.setstate(run.random.getstate())
    assert_same(again.train(3), run.train(3))


@pytest.mark.parametrize("how", SETTINGS)
def test_a_reader_takes_only_what_has_changed(how: str, device: str, tmp_path: Path) -> None:
    run, reader = (Run(device, seed, **SETTINGS[how]).train(1).tracked() for seed in (0, 7))
    speedtorch.save(tmp_path, keep=9, **run.parts)
    speedtorch.load(tmp_path, **reader.parts)
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
        reader.model["out"][1].weight.zero_()
    speedtorch.load(tmp_path, since=3, **reader.parts)  # none of those before 4: all of it
    assert_same(reader, run)


@pytest.mark.parametrize("tracks", [False, True])
@pytest.mark.parametrize("how", SETTINGS)
def test_a_reader_reads_only_changes(
    how: str, tracks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, reader, again = (Run(seed=seed, **SETTINGS[how]) for seed in (0, 7, 9))
    run.train(3).tracked()
    if tracks:
        reader.tracked()
    first = speedtorch.save(tmp_path, **run.parts)
    speedtorch.load(tmp_path, **reader.parts)
    speedtorch.save(tmp_path, base=1, **run.train(2).parts)
    damage(Path(first.path))
    how_loaded: dict[str, Any] = {"generation": 2, "since": 1}
    with monkeypatch.context() as patch:
        patch.setattr(change_tracking, "have_same_bytes", None)  # no full comparison is needed
        assert speedtorch.load(tmp_path, **how_loaded, **reader.parts) == {}
    assert_same(reader, run)
    left_out = {"optimizer": None, "scheduler": None}
    assert speedtorch.load(tmp_path, **how_loaded, **left_out, model=reader.model) == {}
    with pytest.raises(KeyError, match="no part 'optimiser'. Parts:"):
        speedtorch.load(tmp_path, **how_loaded, **reader.parts, optimiser=None)
    for parts in ({}, {"model": reader.model}):  # the rest is copied, with its base
        with pytest.raises(ValueError, match="do not match their digest"):
            speedtorch.load(tmp_path, **how_loaded, **parts)
    damage(Path(first.path))  # its bytes are those of before
    saved = speedtorch.save(tmp_path, base=2, **reader.train(1).parts)
    assert (size(saved) < size(first) / 2) == tracks
    speedtorch.load(tmp_path, **again.parts)
    assert_same(again, reader)


def test_rows_that_change_during_a_load_are_saved(tmp_path: Path) -> None:
    run, reader, again = Run().train(2).tracked(), Run(seed=7).tracked(), Run(seed=9)
    speedtorch.save(tmp_path, keep=9, **run.parts)
    speedtorch.load(tmp_path, **reader.parts)
    saved = speedtorch.save(tmp_path, keep=9, base=1, **run.train(1).parts)

    def write(module: nn.Module, keys: Any) -> None:
        reader.table.scatter(torch.arange(9), torch.ones(9, 4), "weight")

    reader.model.register_load_state_dict_post_hook(write)
    speedtorch.load(tmp_path, since=1, **reader.parts)
    speedtorch.save(tmp_path, keep=9, base=saved.generation, **reader.parts)
    speedtorch.load(tmp_path, **again.parts)
    assert_same(again, reader)


def test_rows_are_unchanged_if_a_part_with_code_of_its_own_raises(tmp_path: Path) -> None:
    class Refusing:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("refused")

    run, reader, part = Run().train(1).tracked(), Run(seed=7).train(1), Refusing()
    parts = {name: getattr(reader, name) for name in ("model", "optimizer")}
    speedtorch.save(tmp_path, **run.parts, part=part)
    speedtorch.load(tmp_path, **parts)
    before = reader.state()
    speedtorch.save(tmp_path, base=1, **run.train(1).parts, part=part)
    with pytest.raises(KeyError, match="refused"):
        speedtorch.load(tmp_path, since=1, **parts, part=part)
    assert_same_content(reader.state(), before)


def test_a_reader_that_has_the_last_generation_writes_no_row(tmp_path: Path) -> None:
    run, reader = Run().train(2), Run(seed=7)
    for base in (None, 1):
        saved = speedtorch.save(tmp_path, base=base, **run.tracked().train(1).parts, step=base)
        speedtorch.load(tmp_path, **reader.parts)
        before = reader.table.track_changes()
        assert speedtorch.load(tmp_path, since=saved.generation, **reader.parts) == {"step": base}
        assert len(reader.table.changed(before)) == 0
        assert_same(reader, run)


def test_a_table_that_noted_nothing_goes_as_a_whole_once(tmp_path: Path) -> None:
    run, again, sizes = Run().train(3), Run(seed=7).tracked(), []
    for base in (None, 1, 2):
        sizes.append(size(speedtorch.save(tmp_path, base=base, **run.train(1).parts)))
    speedtorch.load(tmp_path, **again.parts)
    assert_same(again, run)
    # goes on after a restart
    sizes.append(size(speedtorch.save(tmp_path, base=3, **again.train(1).parts)))
    assert sizes[1] > sizes[0] * 0.9 > max(sizes[2:]) * 1.8
    speedtorch.load(tmp_path, **run.parts)
    assert_same(again, run)


def test_a_table_that_a_graph_uses_goes_as_a_whole_until_the_graph_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, sizes = Run().train(3), []
    with monkeypatch.context() as patch:
        patch.setattr(TrainedRows, "is_captured", True)
        for base in (None, 1, 2):
            sizes.append(size(speedtorch.save(tmp_path, base=base, **run.train(1).parts)))
        assert run.table.changes is None
    for base in (3, 4):
        sizes.append(size(speedtorch.save(tmp_path, base=base, **run.train(1).parts)))
    assert min(sizes[:4]) > max(sizes[:4]) * 0.9 > sizes[4] * 2


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_rows_of_every_dtype_are_put_over_those_of_the_base(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    table, largest = tracked_table(3, dtype), 2 if dtype == torch.bool else 9
    speedtorch.save(tmp_path, rows=table["weight"])
    for base in (1, 2):
        row = torch.arange(3 * dtype.itemsize, dtype=torch.uint8) % largest
        table.scatter(torch.tensor([3 * base]), row.view(dtype).view(1, 3), "weight")
        assert speedtorch.save(tmp_path, base=base, rows=table["weight"]).base == base
    assert_same_bytes(speedtorch.load(tmp_path)["rows"], table["weight"])


def test_random_runs(device: str, tmp_path: Path) -> None:
    """Whatever is trained, written, saved against whichever generation and loaded again."""
    for seed in range(6):
        chance, folder = random.Random(seed), tmp_path / str(seed)
        run = Run(device, seed, **chance.choice(list(SETTINGS.values()))).tracked()
        kept: dict[int, dict[str, Any]] = {}
        for _ in range(12):
            what = chance.choice(["train", "train", "save", "save", "load", "write", "scatter"])
            if what == "train":
                run.train(chance.randint(1, 3))
            elif what == "save":
                base = chance.choice([None, *kept]) if kept else None
                saved = speedtorch.save(folder, keep=99, base=base, **run.parts)
                kept[saved.generation] = run.state()
            elif what == "load" and kept:
                speedtorch.load(folder, generation=chance.choice(list(kept)), **run.parts)
            elif what == "write":
                run.table["weight"][chance.randrange(ROWS)] = 1.0
            elif what == "scatter":
                field = chance.choice(["weight", "exp_avg"])
                rows = torch.full_like(run.table[field][:1], 0.5)
                run.table.scatter(torch.tensor([chance.randrange(ROWS)]), rows, field)
        for number, expected in kept.items():
            speedtorch.load(folder, generation=number, **run.parts)
            assert_same_content(run.state(), expected)


def test_lookups_beside_a_delta_see_old_or_new_rows(device: str, tmp_path: Path) -> None:
    run, reader = Run(device).train(1).tracked(), Run(device, seed=7)
    run.table.fill_(0)
    speedtorch.save(tmp_path, keep=99, model=run.model)
    speedtorch.load(tmp_path, model=reader.model)
    reader.model.eval()
    stop, wrong = threading.Event(), []

    def serve() -> None:
        ids = torch.arange(ROWS, device=device)
        while not stop.is_set():
            with torch.no_grad():
                rows = reader.emb(ids)
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
    run, again, first = Run().train(1).tracked(), Run(seed=7), "generation-00000001"
    before = again.state()
    speedtorch.save(tmp_path, **run.parts)
    speedtorch.save(tmp_path, base=1, **run.train(1).parts)
    shutil.move(tmp_path / first, tmp_path / "kept")
    with pytest.raises(ValueError, match="Generation 2 has the base generation 1"):
        speedtorch.load(tmp_path, **again.parts)
    speedtorch.save(tmp_path / "other", **run.train(1).parts)
    shutil.move(tmp_path / "other" / first, tmp_path)
    with pytest.raises(ValueError, match="its base, generation 1, was replaced"):
        speedtorch.load(tmp_path, generation=2, **again.parts)
    shutil.rmtree(tmp_path / first)
    shutil.move(tmp_path / "kept", tmp_path / first)
    damage(tmp_path / first)
    with pytest.raises(ValueError, match="generation-00000001.*do not match"):
        speedtorch.load(tmp_path, **again.parts)
    assert_same_content(again.state(), before)


def test_wrong_bases_raise(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint in this"):
        speedtorch.save(tmp_path, base=1, step=1)
    saved: Any = speedtorch.save(tmp_path, step=1)
    for wrong in (2, 0, -1):
        with pytest.raises(FileNotFoundError, match=rf"no generation {wrong}, only \[1\]"):
            speedtorch.save(tmp_path, base=wrong, step=2)
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
    run = Run().train(1).tracked()
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
            again = Run(seed=7)
            speedtorch.load(tmp_path, **again.parts)
            assert_same(again, run)
    assert failed > 20


def test_tables_that_change_places_are_whole(tmp_path: Path) -> None:
    runs, found = [Run(seed=seed).train(1).tracked() for seed in (1, 2)], Run(seed=7)
    for base, (one, other) in ((None, runs), (1, runs[::-1])):
        speedtorch.save(tmp_path, base=base, one=one.model, other=other.model)
    speedtorch.load(tmp_path, one=found.model)
    assert torch.equal(found.table["weight"], runs[1].table["weight"])


def test_what_a_module_loads_otherwise_is_saved(tmp_path: Path) -> None:
    class Frozen(nn.ModuleDict):
        def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            return super().load_state_dict({}, strict=False)

    run, other = Run(), Run(seed=7).tracked()
    frozen = Frozen({"emb": other.emb})
    speedtorch.save(tmp_path, emb=nn.ModuleDict({"emb": run.emb}))
    speedtorch.load(tmp_path, emb=frozen)
    speedtorch.save(tmp_path, base=1, emb=frozen)
    assert torch.equal(speedtorch.load(tmp_path)["emb"]["emb.weight"], other.table["weight"])


def test_what_a_reader_has_trained_is_saved(tmp_path: Path) -> None:
    run, reader, again = Run().train(1).tracked(), Run(seed=7).tracked(), Run(seed=9)
    speedtorch.save(tmp_path, keep=9, **run.parts)
    speedtorch.load(tmp_path, **reader.parts)
    speedtorch.save(tmp_path, keep=9, base=1, **run.train(1).parts)
    speedtorch.load(tmp_path, since=1, **reader.train(1).parts)
    speedtorch.save(tmp_path, keep=9, base=2, **reader.parts)
    speedtorch.load(tmp_path, **again.parts)
    assert_same(again, reader)


def test_state_beside_a_given_table_goes_by_rows(tmp_path: Path) -> None:
    def made(seed: int) -> dict[str, Any]:
        table = speedtorch.HostTable(ROWS, 4).normal_(seed=seed)
        emb = speedtorch.Embedding.from_pretrained(table, freeze=False)
        optimizer = optim.Adam(emb.parameters(), lr=0.1)
        emb.table.track_changes()
        speedtorch.attach(optimizer, emb)
        return {"model": emb, "optimizer": optimizer}

    one, again, sizes = made(1), made(2), []
    for number in range(3):
        one["model"](torch.tensor([number, 9])).sin().sum().backward()
        one["optimizer"].step()
        sizes.append(size(speedtorch.save(tmp_path, base=number or None, **one)))
    assert max(sizes[1:]) < sizes[0] / 4
    speedtorch.load(tmp_path, **again)
    for name, part in one.items():
        assert_same_content(again[name].state_dict(), part.state_dict())


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

    one, reader, again, sizes = made(), made(), made(), list[int]()
    for number in range(4):
        batch = {name: torch.tensor([number, 7 * number], device=device) for name in "abc"}
        sum(each.values().sin().sum() for each in one["model"](batch).values()).backward()
        one["optimizer"].step()
        sizes.append(size(speedtorch.save(tmp_path, keep=9, base=number or None, **one)))
    assert max(sizes[2:]) < min(sizes[:2]) / 4
    speedtorch.load(tmp_path, generation=3, **reader)
    speedtorch.load(tmp_path, since=3, **reader)
    speedtorch.load(tmp_path, **again)
    for name, part in one.items():
        for found in (again, reader):
            assert_same_content(found[name].state_dict(), part.state_dict())


def test_long_chains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "LONGEST_CHAIN", 40)
    table = tracked_table()
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
    table = tracked_table()
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
    run, reader, expected = Run().train(1).tracked(), Run(seed=7), []
    for number, base in enumerate((None, 1, None, 3, 4)):
        speedtorch.save(tmp_path, keep=9, base=base, **run.train(1).parts, step=number)
        expected.append(run.state())
    if since is not None:
        speedtorch.load(tmp_path, generation=since, **reader.parts)
    os.unlink(tmp_path / "generation-00000004" / "tensors-00001.safetensors")
    verified, real = set(), SavedGeneration.verify

    def verify(of: SavedGeneration, *arguments: Any) -> None:
        verified.add(of.number)
        real(of, *arguments)

    monkeypatch.setattr(SavedGeneration, "verify", verify)
    match = r"loads generation 3, because \[4, 5\].*generation-00000004"
    with pytest.warns(RuntimeWarning, match=match):
        assert speedtorch.load(tmp_path, since=since, **reader.parts) == {"step": 2}
    assert_same_content(reader.state(), expected[2])
    assert verified == {3}  # the links above one that is known as damaged are not read


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ("rows", r"rows \(1, 1\) with ids \(1, 1\) do not fit a tensor of \(200, 1\)"),
        ("two", r"rows \(1, 1\) with ids \(2,\) do not fit a tensor of \(200, 1\)"),
        ("above", "manifest.json: .* ids of changed rows of 'rows' must be within its 200 rows"),
        ("below", "manifest.json: .* ids of changed rows of 'rows' must be within its 200 rows"),
    ],
)
def test_ids_that_are_not_of_the_changed_rows_are_an_error(
    ids: str, message: str, tmp_path: Path
) -> None:
    values = {"two": [0, 1], "above": [ROWS], "below": [-1]}
    others = {name: torch.tensor(each) for name, each in values.items()}
    table = tracked_table()
    speedtorch.save(tmp_path, rows=table["weight"], **others)
    table.scatter(torch.tensor([3]), torch.ones(1, 1), "weight")
    saved = speedtorch.save(tmp_path, base=1, rows=table["weight"], **others)
    rewrite_manifest(saved, lambda content: content["base"].update(rows={"rows": ids}))
    with pytest.raises(ValueError, match=message):
        speedtorch.load(tmp_path, generation=2)


def test_a_base_that_is_removed_during_the_save_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tracked_table()
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
    table = tracked_table()
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
        other.make_current()

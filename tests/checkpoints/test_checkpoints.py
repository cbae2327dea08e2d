"""save and load: a run goes on bit for bit, and a folder has whole generations, whatever fails."""

from __future__ import annotations

import _thread
import copy
import errno
import hashlib
import json
import os
import stat
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checksums import crc32c
from file_faults import Journal, count_calls, fail, snapshot
from killed_saves import TURNS, check, values
from reference import assert_same_content
from safetensors.torch import load_file
from saved_runs import Run, damage, rewrite_manifest, tracked_table
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from warm_python import run_warm

import speedtorch
from speedtorch.checkpoints import generation_writer, load
from speedtorch.checkpoints.generations import generations_of, new_generation
from speedtorch.checkpoints.saved_generation import SavedGeneration
from speedtorch.files import safetensors_format, system_calls


@pytest.mark.parametrize(
    "made",
    [
        lambda given: optim.lr_scheduler.MultiStepLR(given, [2, 2, 4]),
        lambda given: optim.lr_scheduler.SequentialLR(
            given,
            [optim.lr_scheduler.ConstantLR(given), optim.lr_scheduler.MultiStepLR(given, [3])],
            [2],
        ),
        lambda given: optim.lr_scheduler.ReduceLROnPlateau(given),
    ],
)
def test_schedulers_go_on(made: Any, tmp_path: Path) -> None:
    rates: list[list[float]] = []
    for number in range(2):
        optimizer = optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        scheduler = made(optimizer)
        if number:
            speedtorch.load(tmp_path, optimizer=optimizer, scheduler=scheduler)
        rates.append([])
        for step in range(3 * number, 6):
            optimizer.step()
            is_plateau = isinstance(scheduler, optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*([1.0] if is_plateau else []))
            rates[-1].append(optimizer.param_groups[0]["lr"])
            if (number, step) == (0, 2):
                speedtorch.save(tmp_path, optimizer=optimizer, scheduler=scheduler)
    assert rates[1] == rates[0][3:]


def test_what_is_loaded_is_no_part_of_the_file(device: str, tmp_path: Path) -> None:
    layer = nn.Linear(3, 3, device=device)
    optimizer = optim.Adam(layer.parameters())
    layer(torch.ones(2, 3, device=device)).sum().backward()
    optimizer.step()
    given = {"x": torch.ones(3), "rows": np.ones((2, 3))}
    path = Path(speedtorch.save(tmp_path, layer=layer, optimizer=optimizer, **given).path)
    before = snapshot(path)
    found = speedtorch.load(tmp_path, layer=layer, optimizer=optimizer)
    for each in found.values():
        each += 1
    optimizer.step()
    assert "generation-" not in Path("/proc/self/maps").read_text()
    assert snapshot(path) == before


def test_a_learning_rate_that_is_loaded_has_no_memory_but_its_own(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    optimizer = optim.SGD(layer.parameters(), lr=torch.tensor(0.25))
    speedtorch.save(tmp_path, large=torch.ones(1000), optimizer=optimizer)
    speedtorch.load(tmp_path, optimizer=optimizer)
    rate = optimizer.param_groups[0]["lr"]
    assert rate == 0.25 and rate.untyped_storage().nbytes() == 4


def test_plain_safetensors_reads_the_files(tmp_path: Path) -> None:
    run = Run().train(1)
    saved = speedtorch.save(tmp_path, **run.parts)
    found = load_file(Path(saved.path) / "tensors-00001.safetensors")
    assert torch.equal(found["model.emb.weight"], run.table["weight"])
    assert torch.equal(found["optimizer.state.0.exp_avg"], run.table["exp_avg"])


def test_tied_and_odd_tensors_are_saved_once_and_restored(tmp_path: Path) -> None:
    base = torch.randn(6, 8)
    given = {
        "tied": [base, base],
        "part": base[1:4, ::2],
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
        "x'][y": torch.ones(1),
        "x": {"y": torch.zeros(1)},
    }
    saved = speedtorch.save(tmp_path, given=given)
    assert_same_content(speedtorch.load(tmp_path)["given"], given)
    assert len(load_file(Path(saved.path) / "tensors-00001.safetensors")) == len(given)


def test_large_runs_are_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_writer, "SHARD_BYTES", 5000)
    given = [torch.full((1000,), number) for number in range(5)]
    saved = speedtorch.save(tmp_path, given=given)
    assert len(os.listdir(saved.path)) == 5 + 2
    assert_same_content(speedtorch.load(tmp_path)["given"], given)


def test_many_long_names_are_several_files(tmp_path: Path) -> None:
    given = {"n" * 300 + str(number): torch.tensor(number) for number in range(4000)}
    saved = speedtorch.save(tmp_path, given=given)
    assert len(os.listdir(saved.path)) == 2 + 2
    assert_same_content(speedtorch.load(tmp_path)["given"], given)
    with pytest.raises(ValueError, match="the header needs"):
        speedtorch.save(tmp_path, given={"n" * 1_100_000: torch.ones(1)})


@pytest.mark.parametrize("at", ["first", "header", "middle", "last", "cut", "longer", "gone"])
@pytest.mark.parametrize("name", ["tensors-00001.safetensors", "manifest.json", "manifest.crc32"])
def test_damage_is_found_before_anything_is_loaded_and_passed_over(
    name: str, at: str, tmp_path: Path
) -> None:
    layer = nn.Linear(700, 700)
    speedtorch.save(tmp_path, layer=layer, step=1)
    expected = copy.deepcopy(layer.state_dict())
    nn.init.ones_(layer.weight)
    path = Path(speedtorch.save(tmp_path, layer=layer, step=2).path) / name
    data = bytearray(path.read_bytes())
    places = {"first": 0, "header": min(20, len(data) - 1), "middle": len(data) // 2, "last": -1}
    if at in places:
        data[places[at]] ^= 4
    elif at == "cut":
        del data[-1]
    else:
        data += b"\0"
    path.write_bytes(data)
    message = "is damaged, or not of a speedtorch checkpoint: "
    if at == "gone":
        path.unlink()
        message = f"{name}: is missing"
    with pytest.raises(ValueError, match=rf"{message}.*generation=1\) for the"):
        speedtorch.load(tmp_path, generation=2, layer=layer)
    assert bool((layer.weight == 1).all())
    with pytest.warns(RuntimeWarning, match=r"loads generation 1, because \[2\].*0002/") as caught:
        assert speedtorch.load(tmp_path, layer=layer) == {"step": 1}
    assert len(caught) == 1 and caught[0].filename == __file__
    assert_same_content(layer.state_dict(), expected)
    assert speedtorch.save(tmp_path, step=3).generation == 3
    assert speedtorch.load(tmp_path) == {"step": 3}  # without a warning


def test_where_no_generation_is_whole_nothing_is_loaded(tmp_path: Path) -> None:
    layer = nn.Linear(3, 3)
    for _ in range(2):
        damage(Path(speedtorch.save(tmp_path, layer=layer).path))
    nn.init.ones_(layer.weight)
    with pytest.raises(ValueError, match=r"all generations \[1, 2\] of .*0002/.*0001/"):
        speedtorch.load(tmp_path, layer=layer)
    assert bool((layer.weight == 1).all())


def test_an_older_generation_whose_parts_are_others_raises_after_the_warning(
    tmp_path: Path,
) -> None:
    speedtorch.save(tmp_path, step=1)
    damage(Path(speedtorch.save(tmp_path, step=2, layer=nn.Linear(3, 3)).path))
    with (
        pytest.warns(RuntimeWarning, match=r"loads generation 1, because \[2\]"),
        pytest.raises(KeyError, match="has no part 'layer'"),
    ):
        speedtorch.load(tmp_path, layer=nn.Linear(3, 3))


def test_a_damaged_generation_without_a_part_is_passed_over(tmp_path: Path) -> None:
    layer = nn.Linear(3, 3)
    speedtorch.save(tmp_path, layer=layer)
    damage(Path(speedtorch.save(tmp_path, rows=torch.ones(3)).path))
    with pytest.warns(RuntimeWarning, match=r"loads generation 1, because \[2\]"):
        assert speedtorch.load(tmp_path, layer=layer) == {}


def test_errors_of_use_and_of_the_disk_pass_over_no_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speedtorch.save(tmp_path, layer=nn.Linear(2, 2))
    speedtorch.save(tmp_path, layer=nn.Linear(3, 3))
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        speedtorch.load(tmp_path, layer=nn.Linear(2, 2))
    fail(monkeypatch, "read", 1)
    with pytest.raises(OSError, match=r"Input/output error: Use load\(..., generation=1\) for"):
        speedtorch.load(tmp_path, layer=nn.Linear(3, 3))


def file_with(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["files"][0].update(values)


def base_with(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["base"].update(values)


NO_NAME = "it has the invalid file name '"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (file_with(name="a" * 244 + ".safetensors"), NO_NAME),
        (file_with(name="../tensors.safetensors"), NO_NAME),
        (file_with(name="tensors"), NO_NAME),
        (file_with(crc32c=[-1]), "its byte counts and digests must be integers from 0 on"),
        (file_with(bytes="3"), "its byte counts and digests must be integers from 0 on"),
        (lambda content: content["files"][0]["crc32c"].append(0), "it has 1 chunks, but 2 digests"),
        (lambda content: content.update(parts=["a"]), "its 'parts' are not a dict"),
        (lambda content: content.update(version=1), "expected 'speedtorch checkpoint', version 2"),
        (lambda content: content.update(format="x"), "expected 'speedtorch checkpoint', version 2"),
        (lambda content: content.update(version=2), "'crc32'"),
        (lambda content: content["files"][0].pop("crc32c"), "'crc32c'"),
        (base_with(rows="changed rows.1"), "the 'rows' of its base are not a dict"),
        (base_with(generation=0), "it has the invalid base {'generation': 0"),
        (base_with(generation=7), "its base must be an older generation, got 7"),
    ],
)
def test_a_manifest_of_other_contents_is_an_error(
    change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:
    rows = tracked_table()["weight"]
    speedtorch.save(tmp_path, rows=rows)
    rewrite_manifest(speedtorch.save(tmp_path, base=1, rows=rows), change)
    file = "tensors-00001.safetensors" if "chunks" in message else "manifest.json"
    expected = f"{file}: is damaged, or not of a speedtorch checkpoint: {message}"
    with pytest.raises(ValueError, match=expected):
        speedtorch.load(tmp_path, generation=2)


@pytest.mark.parametrize(
    "call", ["open", "reserve", "write", "fsync", "lock", "rename", "make_folder"]
)
def test_a_failing_call_leaves_the_generations_of_before(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speedtorch.save(tmp_path, **values(0))
    times = count_calls(monkeypatch, lambda: speedtorch.save(tmp_path, keep=9, **values(0)))[call]
    assert times > 0
    for number in range(1, times + (call != "fsync")):  # the last one is of the folder
        before = sorted(os.listdir(tmp_path))
        with monkeypatch.context() as patch:
            fail(patch, call, number)
            with pytest.raises(OSError, match="Input/output error"):
                speedtorch.save(tmp_path, keep=9, **values(1))
        assert sorted(os.listdir(tmp_path)) == before
        check(tmp_path, (0,))


def test_a_failing_sync_of_the_folder_says_that_the_generation_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = count_calls(monkeypatch, lambda: speedtorch.save(tmp_path, **values(0)))["fsync"]
    fail(monkeypatch, "fsync", times)
    with pytest.raises(OSError, match="complete and in place, but a power loss may still undo"):
        speedtorch.save(tmp_path, **values(1))
    check(tmp_path, (1,))


def test_all_is_on_the_disk_before_the_folder_switches_and_the_switch_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_writer, "SHARD_BYTES", 100_000)
    journal = Journal(monkeypatch, tmp_path)
    path = Path(speedtorch.save(tmp_path, **values(1)).path)
    expected = {f"{path.name}/{name}": data for name, data in snapshot(path).items()}

    def visible(state: dict[str, bytes]) -> dict[str, bytes]:
        return {name: data for name, data in state.items() if "partial" not in name}

    def is_safe(events: list[Any]) -> bool:
        """Whether a power loss leaves nothing or all at any moment, and all at the end."""
        moments = [
            [visible(state) for state in journal.after_power_loss(events[:end])]
            for end in range(len(events) + 1)
        ]
        is_whole = all(found in ({}, expected) for moment in moments for found in moment)
        return is_whole and all(found == expected for found in moments[-1])

    events = journal.events
    assert is_safe(events)
    syncs = [at for at, (kind, _) in enumerate(events) if kind.startswith("fsync")]
    needed = [at for at in syncs if not is_safe(events[:at] + events[at + 1 :])]
    assert len(needed) == len(expected) + 1  # the bytes of each file, and the generation's name


def test_too_small_a_disk_raises_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speedtorch.save(tmp_path, **values(0))
    real = os.statvfs(tmp_path)
    full = type(real)((*real[:3], 10, 10, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    with pytest.raises(OSError, match="checkpoint needs .* bytes, but 40,960 are free") as raised:
        speedtorch.save(tmp_path, **values(1))
    assert raised.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == ["generation-00000001"]


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("turn", range(TURNS))
@pytest.mark.parametrize("kind", ["run", "background", "deltas", "resident"])
def test_a_save_that_is_killed_at_any_call_leaves_the_old_or_the_new_run(
    kind: str, turn: int, tmp_path: Path
) -> None:
    # A fork cannot use the GPU of its parent.
    command = ("-m", "killed_saves", kind, tmp_path / "runs", str(turn))
    done = run_warm(*command, CUDA_VISIBLE_DEVICES="")
    kills, switched = map(int, done.stdout.split())
    assert kills > 40 and 0 < switched < kills


def test_parts_may_have_names_that_files_and_options_have(tmp_path: Path) -> None:
    given = {"__metadata__": torch.ones(2), "generator": torch.default_generator.get_state()}
    speedtorch.save(tmp_path, **given)
    assert_same_content(speedtorch.load(tmp_path), given)


STRAY: dict[str, Any] = {
    "a file": lambda path: path.touch(),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a manifest that is a folder": lambda path: (path / "manifest.json").mkdir(parents=True),
    "nine digits": lambda path: path.with_name("generation-000000007").mkdir(),
    "arabic digits": lambda path: path.with_name("generation-" + "\u0667" * 8).mkdir(),
}


@pytest.mark.parametrize("number", [2, 7])
@pytest.mark.parametrize("what", STRAY)
def test_a_stray_entry_stops_no_save_and_no_load(what: str, number: int, tmp_path: Path) -> None:
    speedtorch.save(tmp_path, step=1)
    STRAY[what](tmp_path / f"generation-{number:08d}")
    stray = set(os.listdir(tmp_path))
    assert speedtorch.load(tmp_path) == {"step": 1}
    for step in (2, 3, 4):
        speedtorch.save(tmp_path, step=step)
        assert speedtorch.load(tmp_path) == {"step": step}
    assert stray - {"generation-00000001"} <= set(os.listdir(tmp_path))


def test_a_hidden_folder_that_is_removed_while_it_is_swept_stops_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, gone = os.listdir, ".generation-1.1-00000000.ranks"
    monkeypatch.setattr(os, "listdir", lambda folder: [*real(folder), gone])
    assert speedtorch.save(tmp_path, step=1).generation == 1


def test_a_save_that_later_saves_overtake_remains(tmp_path: Path) -> None:
    with new_generation(str(tmp_path), 2, lambda _: None) as slow:
        for step in range(4):
            speedtorch.save(tmp_path, step=step)
    assert slow.number == 5
    assert generations_of(str(tmp_path)) == [4, 5]


def test_a_generation_that_is_a_link_is_removed_as_one(tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    os.rename(speedtorch.save(tmp_path / "run", step=1).path, moved)
    (tmp_path / "run" / "generation-00000001").symlink_to(moved)
    assert speedtorch.load(tmp_path / "run") == {"step": 1}
    speedtorch.save(tmp_path / "run", keep=1, step=2)
    assert os.listdir(tmp_path / "run") == ["generation-00000002"] and moved.is_dir()


def test_a_save_and_a_load_need_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any) -> int:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", start)
    speedtorch.save(tmp_path, rows=torch.arange(3_000_000))
    assert torch.equal(speedtorch.load(tmp_path)["rows"], torch.arange(3_000_000))


def test_a_strangers_lock_keeps_no_save_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    monkeypatch.setattr(system_calls, "_LOCK_SECONDS", 0.05)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        speedtorch.save(tmp_path, step=1)
    finally:
        os.close(descriptor)
    assert speedtorch.load(tmp_path) == {"step": 1}


def test_a_file_system_that_syncs_no_folder_has_generations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = system_calls.calls.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(descriptor)

    monkeypatch.setattr(system_calls.calls, "fsync", fsync)
    assert speedtorch.save(tmp_path, step=1).generation == 1
    assert speedtorch.load(tmp_path) == {"step": 1}


def test_threads_save_generations_of_their_own(tmp_path: Path) -> None:
    def save(_: int) -> int:
        return speedtorch.save(tmp_path, keep=20, **values(1)).generation

    with ThreadPoolExecutor(3) as threads:
        assert sorted(threads.map(save, range(15))) == list(range(1, 16))
    check(tmp_path, (1,))


@pytest.mark.parametrize(
    ("module", "name"), [(safetensors_format, "read_arrays"), (os.path, "isdir")]
)
def test_a_generation_that_is_removed_while_it_is_looked_for_gives_way_to_the_next(
    module: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speedtorch.save(tmp_path, **values(0))
    real = getattr(module, name)

    def save_between(*arguments: Any) -> Any:
        found = real(*arguments)
        if name == "isdir" and "generation-" not in str(arguments[0]):
            return found
        monkeypatch.undo()
        speedtorch.save(tmp_path, keep=1, **values(1))
        return real(*arguments) if name == "isdir" else found

    monkeypatch.setattr(module, name, save_between)
    check(tmp_path, (1,))


def test_a_generation_that_is_replaced_during_every_try_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "_TRIES", 3)
    speedtorch.save(tmp_path, **values(0))
    real, tries = SavedGeneration.opened, []

    def save_between(folder: str, number: int) -> Any:
        tries.append(number)
        speedtorch.save(tmp_path, keep=1, **values(number))
        return real(folder, number)

    monkeypatch.setattr(SavedGeneration, "opened", save_between)
    with pytest.raises(RuntimeError, match=r"during each of 3 tries.*Pass generation="):
        speedtorch.load(tmp_path)
    assert tries == [1, 2, 3]


def test_a_reader_beside_a_writer_sees_whole_runs(tmp_path: Path) -> None:
    def save() -> None:
        for step in range(1, 15):
            speedtorch.save(tmp_path, keep=1, **values(step))

    speedtorch.save(tmp_path, **values(0))
    with ThreadPoolExecutor(1) as threads:
        writing, seen = threads.submit(save), []
        while not writing.done():
            seen.append(check(tmp_path, tuple(range(15))))
    writing.result()
    assert seen == sorted(seen)


class Quantized(Tensor):
    """A tensor whose values are in others, as torchao's."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> Quantized:
        made: Quantized = Tensor._make_wrapper_subclass(cls, values.shape)
        made.values = values
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.detach.default, func
        return cls(args[0].values)


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ({}, TypeError, "save: expected parts to save"),
        ({"keep": 0, "step": 1}, ValueError, "keep: expected an int of 1 or more, got 0"),
        ({"a": {"b": {1}}}, TypeError, r"a\['b'\]: .* cannot hold a builtins.set"),
        ({"a": torch.eye(3).to_sparse()}, ValueError, "a: .*, got the layout torch.sparse_coo"),
        ({"a": torch.empty(2, device="meta")}, ValueError, "a: .*, got one on the meta device"),
        (
            {"a": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)},
            ValueError,
            "a: .*, got a nested tensor",
        ),
        ({"a": nn.LazyLinear(3)}, ValueError, r"a\['weight'\]: .* got an uninitialized"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, ValueError, "cannot hold torch.complex128"),
        ({"background": True}, TypeError, "background.*async_save"),
        ({"background": False}, TypeError, "background.*async_save"),
        ({"back_ground": True}, TypeError, "back_ground.*async_save"),
        ({"keeps": 10}, TypeError, "Write keep= for the option, or choose another name"),
        ({"Base": 1}, TypeError, "Write base="),
        ({"max_memory": 1}, TypeError, "max_memory= is an option of async_save"),
        ({"generation": 1}, TypeError, "generation= is an option of load. Choose another name"),
        (
            {"a": {"b": Quantized(torch.ones(3))}},
            TypeError,
            r"a\['b'\]: expected a plain tensor, got .*Quantized. Save its plain values",
        ),
    ],
)
def test_parts_that_cannot_be_saved_raise(
    parts: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        speedtorch.save(tmp_path, **parts)
    assert os.listdir(tmp_path) == []


def test_wrong_folders_raise(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match="there is no checkpoint in this"):
            speedtorch.load(folder)
    (tmp_path / "file").write_text("x")
    for call in (partial(speedtorch.save, a=1), speedtorch.load):
        with pytest.raises(NotADirectoryError, match="is a file; pass the folder"):
            call(tmp_path / "file")
    in_bytes: Any = os.fsencode(tmp_path / "bytes")
    speedtorch.save(in_bytes, step=1)
    assert speedtorch.load(in_bytes) == {"step": 1}


def test_the_path_of_a_checkpoint_is_no_folder_of_checkpoints(tmp_path: Path) -> None:
    saved = speedtorch.save(tmp_path, step=1)
    (tmp_path / "last").symlink_to(saved.path)
    for path in (saved.path, saved.path + "/", tmp_path / "last"):
        call: Any
        for call in (speedtorch.load, partial(speedtorch.save, step=2)):
            with pytest.raises(ValueError, match="Pass the folder that contains generation-000000"):
                call(path)
    assert speedtorch.save(tmp_path, step=3).generation == 2


def test_wrong_arguments_of_loads_raise_and_load_nothing(tmp_path: Path) -> None:
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    speedtorch.save(tmp_path, layers=[layer, layer], layer=layer, step=1)
    before = other.weight.detach().clone()
    loads: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"model": other}, KeyError, r"has no part 'model'. Parts: \['layers', 'layer', 'step'\]"),
        ({"step": 3}, TypeError, "step: expected an object with load_state_dict"),
        ({"layers": [other]}, ValueError, "layers: a list of 2 was saved, got a list of 1"),
        ({"layers": [other] * 3}, ValueError, "layers: a list of 2 was saved, got a list of 3"),
        ({"layers": [other, nn.Linear(3, 3)]}, RuntimeError, "size mismatch for weight"),
        ({"layers": [other] * 2, "layer": [other]}, ValueError, "layer: no list was saved, got a "),
        ({"generation": 3}, FileNotFoundError, r"there is no generation 3, only \[1\]"),
    ]
    for parts, error, message in loads:
        with pytest.raises(error, match=message):
            speedtorch.load(tmp_path, **{"layer": other, **parts})
        assert torch.equal(other.weight, before)


def test_a_weight_that_stands_for_a_table_is_none_of_the_values(tmp_path: Path) -> None:
    emb = speedtorch.Embedding(9, 2)
    emb(torch.tensor([1, 2])).sum().backward()
    for each in (emb.weight, emb.weight.detach(), emb.weight.data):
        with pytest.raises(
            TypeError, match=r"w\['a'\]: this weight represents all rows of .*. Pass the module"
        ):
            speedtorch.save(tmp_path, w={"a": each})
    assert os.listdir(tmp_path) == []
    speedtorch.save(tmp_path, w=emb.weight.detach().clone())
    assert torch.equal(speedtorch.load(tmp_path)["w"], emb.table["weight"])


def parts_with(**others: Any) -> dict[str, Any]:
    return {**Run().train(1).parts, **others}


def with_optimizer(change: Any) -> dict[str, Any]:
    """Parts whose optimizer's state is malformed."""
    parts = parts_with()
    state = copy.deepcopy(parts["optimizer"].state_dict())
    change(state)
    return {**parts, "optimizer": state}


SHAPE = "'exp_avg' of parameter 1 has the shape"
UNFIT: dict[str, tuple[Any, Any]] = {
    "another optimizer": (
        lambda: Run(kind=optim.Adagrad).train(1).parts,
        "state does not fit Adam",
    ),
    "an optimizer without state": (
        lambda: Run(kind=optim.SGD).train(1).parts,
        r"the options \['betas', 'eps'\] of a parameter group were not saved",
    ),
    "another model": (lambda: Run(width=5).train(1).parts, "(size mismatch|exp_avg)"),
    "a model of other names": (lambda: parts_with(model=nn.Linear(4, 1)), "missing"),
    "a number for a model": (lambda: parts_with(model=3), "loads a dict, but .* is of type int"),
    "a number for a tensor": (
        lambda: parts_with(model={**Run().model.state_dict(), "out.1.bias": 3}),
        "out.1.bias was saved as a int, but the module has a tensor",
    ),
    "a number for an optimizer": (lambda: parts_with(optimizer=3), "loads a dict"),
    "another scheduler": (lambda: parts_with(scheduler=3), ""),
    "no groups": (lambda: with_optimizer(lambda s: s.pop("param_groups")), "no 'param_groups'"),
    "a group less": (lambda: with_optimizer(lambda s: s["param_groups"].clear()), "groups of"),
    "no step": (lambda: with_optimizer(lambda s: s["state"][1].pop("step")), "no 'step'"),
    "a number as state": (
        lambda: with_optimizer(lambda s: s["state"].update({1: 3})),
        "not a dict",
    ),
    "another shape of state": (
        lambda: with_optimizer(lambda s: s["state"][1].update(exp_avg=torch.ones(2, 2))),
        SHAPE,
    ),
    "state of other dimensions": (
        lambda: with_optimizer(lambda s: s["state"][1].update(exp_avg=torch.ones(4, 1))),
        SHAPE,
    ),
}


@pytest.mark.dealt("turned", "since")
@pytest.mark.parametrize("since", [None, 1])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("what", UNFIT)
def test_a_part_that_does_not_fit_raises_before_anything_is_loaded(
    what: str, turned: bool, since: int | None, tmp_path: Path
) -> None:
    parts, message = UNFIT[what]
    speedtorch.save(tmp_path, **parts())
    run = Run(seed=7).train(1)
    before = run.state()
    given = dict(reversed(run.parts.items())) if turned else run.parts
    with pytest.raises((ValueError, RuntimeError), match=f"{message}.*Nothing has been loaded"):
        speedtorch.load(tmp_path, since=since, **given)
    assert_same_content(run.state(), before)


def stored_tables(*groups: str) -> nn.Module:
    configs = [
        speedtorch.EmbeddingBagConfig(4, 2, name, group=group)
        for name, group in zip("ab", groups, strict=True)
    ]
    return speedtorch.EmbeddingBagCollection(configs, stored=torch.bfloat16)


@pytest.mark.parametrize(
    "saved, given",
    [
        (lambda: speedtorch.Embedding(4, 2, stored=torch.bfloat16), lambda: nn.Embedding(4, 2)),
        (lambda: stored_tables("", ""), lambda: stored_tables("a", "b")),
    ],
    ids=["a plain Embedding", "other groups"],
)
def test_a_state_of_rounding_without_16_bit_rows_raises_before_anything_is_loaded(
    saved: Any, given: Any, tmp_path: Path
) -> None:
    speedtorch.save(tmp_path, dense=nn.Linear(2, 2), rows=saved())
    parts = {"dense": nn.Linear(2, 2), "rows": given()}
    before = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
    with pytest.raises(RuntimeError, match=r"unexpected key '.*rounding_state'.*has been loaded"):
        speedtorch.load(tmp_path, **parts)
    assert_same_content({name: part.state_dict() for name, part in parts.items()}, before)


class Counter(nn.Module):
    """A module with a buffer that norm layers of torch have too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2))
        self.register_buffer("num_batches_tracked", torch.tensor(0))


@pytest.mark.parametrize("make", [lambda: nn.BatchNorm1d(2), Counter], ids=["norm", "counter"])
def test_a_missing_count_raises_before_anything_is_loaded(make: Any, tmp_path: Path) -> None:
    state = make().state_dict()
    del state["num_batches_tracked"]
    speedtorch.save(tmp_path, module=state)
    module = make()
    module.weight.data.fill_(3)
    with pytest.raises(RuntimeError, match=r"missing key 'num_batches_tracked'.*has been loaded"):
        speedtorch.load(tmp_path, module=module)
    assert module.weight.tolist() == [3, 3]


def test_norm_layers_load_a_state_from_before_they_counted(tmp_path: Path) -> None:
    state = {"weight": torch.ones(2), "bias": torch.ones(2)}
    state |= {"running_mean": torch.ones(2), "running_var": torch.ones(2)}
    speedtorch.save(tmp_path, module=state)
    module = nn.BatchNorm1d(2)
    speedtorch.load(tmp_path, module=module)
    assert module.running_mean.tolist() == [1, 1]


def test_an_option_that_torch_adds_to_the_defaults_alone_need_not_be_saved(tmp_path: Path) -> None:
    optimizer = optim.SparseAdam(nn.Linear(2, 2).parameters())
    for _ in range(2):
        speedtorch.save(tmp_path, optimizer=optimizer)
        speedtorch.load(tmp_path, optimizer=optimizer)
    assert "differentiable" in optimizer.defaults


def test_a_chained_scheduler_that_does_not_fit_raises_before_anything_is_loaded(
    tmp_path: Path,
) -> None:
    run = Run()
    chained = optim.lr_scheduler.ChainedScheduler([run.scheduler] * 2)
    for saved in (3, run.scheduler):
        speedtorch.save(tmp_path, **parts_with(scheduler=saved))
        before = run.state()
        with pytest.raises((ValueError, KeyError)):
            speedtorch.load(tmp_path, **{**run.parts, "scheduler": chained})
        assert_same_content(run.state(), before)


def test_a_module_that_loads_other_keys_by_code_of_its_own_loads(tmp_path: Path) -> None:
    class Renamed(nn.Linear):
        def _load_from_state_dict(self, state: Any, prefix: str, *more: Any) -> None:
            super()._load_from_state_dict({"weight": state["w"]}, prefix, *more)

    speedtorch.save(tmp_path, layer={"w": torch.ones(2, 2)})
    layer = Renamed(2, 2, bias=False)
    speedtorch.load(tmp_path, layer=layer)
    assert bool((layer.weight == 1).all())


def test_rows_that_cannot_be_written_raise_before_anything_is_loaded(tmp_path: Path) -> None:
    speedtorch.HostTable(10, 4, memory="plain").save(tmp_path / "rows.safetensors")
    path = tmp_path / "rows.safetensors"
    emb = speedtorch.Embedding.from_pretrained(path, freeze=True, memory="mapped")
    layer = nn.Linear(2, 2)
    speedtorch.save(tmp_path / "run", layer=nn.Linear(2, 2), emb=emb)
    before = layer.weight.detach().clone()
    with pytest.raises(ValueError, match="read-only mapping"):
        speedtorch.load(tmp_path / "run", layer=layer, emb=emb)
    assert torch.equal(layer.weight, before)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("placement", [Shard(1), Replicate(), Partial()])
def test_dtensors_whose_rows_ranks_do_not_share_are_named_and_load_nothing(
    placement: Placement, tmp_path: Path
) -> None:
    model, layer, folder = nn.Linear(2, 2, bias=False), nn.Linear(2, 2), tmp_path / "run"
    speedtorch.save(folder, layer=nn.Linear(2, 2), model=model)
    mesh = init_device_mesh("cpu", (1,))
    model.weight = nn.Parameter(DTensor.from_local(model.weight.data, mesh, [placement]))
    before = layer.weight.detach().clone()
    message = r"\['weight'\]: a DTensor must be sharded by Shard\(0\) .* the placements"
    for call in (speedtorch.save, partial(speedtorch.load, layer=layer)):
        with pytest.raises(TypeError, match=message):
            call(folder, model=model)
    assert torch.equal(layer.weight, before)


def test_the_manifest_is_plain_json(tmp_path: Path) -> None:
    saved = speedtorch.save(tmp_path, step=3, a=torch.ones(2))
    content = json.loads((Path(saved.path) / "manifest.json").read_text())
    assert content["parts"] == {"step": 3, "a": ["tensor", "a"]}
    (file,) = content["files"]
    data = (Path(saved.path) / file["name"]).read_bytes()
    assert file == {
        "name": "tensors-00001.safetensors",
        "bytes": len(data),
        "crc32c": [crc32c(data)],
    }


def as_of_crc32(saved: speedtorch.types.Saved, base: str | None = None) -> str:
    """Gives a generation the manifest of the first versions; returns the manifest's digest."""

    def change(content: dict[str, Any]) -> None:
        content["version"] = 1 if base is None else 2
        for file in content["files"]:
            data = (Path(saved.path) / file["name"]).read_bytes()
            chunks = (data[at : at + (1 << 20)] for at in range(0, len(data), 1 << 20))
            del file["crc32c"]
            file["crc32"] = [zlib.crc32(each) for each in chunks]
        if base is not None:
            content["base"]["sha256"] = base

    return hashlib.sha256(rewrite_manifest(saved, change)).hexdigest()


def test_checkpoints_of_the_first_versions_are_read(tmp_path: Path) -> None:
    table = speedtorch.HostTable(300_000, 1, memory="plain").fill_(1.0)
    table.track_changes()
    whole = speedtorch.save(tmp_path, rows=table["weight"], step=1)
    table.scatter(torch.tensor([7, 299_999]), torch.full((2, 1), 2.0), "weight")
    delta = speedtorch.save(tmp_path, base=1, rows=table["weight"], step=2)
    as_of_crc32(delta, as_of_crc32(whole))
    found = speedtorch.load(tmp_path, generation=2)
    assert found["step"] == 2 and torch.equal(found["rows"], table["weight"])
    (file,) = Path(whole.path).glob("*.safetensors")
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        opened.write(b"\xff")
    for generation in (1, 2):
        with pytest.raises(ValueError, match="its bytes from 1,048,576 on do not match"):
            speedtorch.load(tmp_path, generation=generation)

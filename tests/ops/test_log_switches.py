"""SPEEDTORCH_LOG: what its values log, keep and report, and that they change no result."""

from __future__ import annotations

import json
import pickle
import re
import runpy
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import NEEDS_GPU
from torch import nn
from warm_python import run_warm

import speedtorch
from speedtorch.__main__ import main
from speedtorch.dump_file import open_dump, write_dump
from speedtorch.files.safetensors_format import read_arrays, safetensors_header
from speedtorch.files.system_calls import open_to_read
from speedtorch.ops import log_switches
from speedtorch.ops.call_log import call_text
from speedtorch.replay import replay

CALLS_OF_ALL_OPS = """
from op_arguments import op_arguments
from speedtorch.ops.functions import _ops
for op, arguments in op_arguments("cpu").values():
    call = getattr(_ops, op._schema.name.partition("::")[2])
    (call if op._overloadname == "default" else getattr(call, op._overloadname))(*arguments)
"""
A_STEP = """
import sys, torch, speedtorch
emb = speedtorch.Embedding(9, 2, device="cpu")
optimizer = torch.optim.Adam(emb.parameters())
speedtorch.attach(optimizer, emb)
files = set()
sys.setprofile(lambda frame, event, _: files.add(frame.f_code.co_filename))
emb(torch.tensor([2, 2])).sum().backward()
optimizer.step()
sys.setprofile(None)
names = {"call_log.py", "op_dump.py", "alive_report.py", "log_switches.py"}
print(sorted(name for name in names for file in files if file.endswith(name)))
print(sorted({name[:-3] for name in names} & {name.rpartition(".")[2] for name in sys.modules}))
"""


def run(value: str, program: str, folder: Path) -> CompletedProcess[str]:
    """A program in a fresh process with a value of the variable; it must succeed."""
    return run_warm(
        "-m" if program.isidentifier() else "-c", program, cwd=folder, SPEEDTORCH_LOG=value
    )


def dump_of(program: str, folder: Path, value: str = "dump:100") -> Path:
    """The dump that a program has written."""
    errors = run(value, program, folder).stderr
    (path,) = folder.glob("*")
    assert f"`speedtorch replay {path}`" in errors and path.name.startswith("speedtorch-dump-")
    return path


def parts_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """The description and the memory of a dump."""
    with open_to_read(path) as file:
        arrays = read_arrays(file.read, file.size)
    whole, found = path.read_bytes(), arrays["calls"]
    text = whole[found.offset : found.offset + found.nbytes]
    return json.loads(text), whole[arrays["storages"].offset :]


def write_parts(path: Path, content: dict[str, Any], data: bytes) -> None:
    text = json.dumps(content).encode()
    sizes = {"calls": len(text), "storages": len(data)}
    header = safetensors_header({name: ([size], torch.uint8) for name, size in sizes.items()})
    path.write_bytes(header + text + data)


def value_of(entries: list[Any], name: str) -> Any:
    """A value of a dict in a description."""
    return dict(entries[1:])[name]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", (False, 0, False)),
        ("calls", (True, 0, False)),
        ("alive,dump", (False, 16, True)),
        ("dump:999,calls,", (True, 999, False)),
    ],
)
def test_values(value: str, expected: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEEDTORCH_LOG", value)
    read = runpy.run_path(log_switches.__file__)
    assert (read["LOGS_CALLS"], read["MAX_DUMPED_CALLS"], read["REPORTS_ALIVE"]) == expected


@pytest.mark.parametrize("value", ["call", "1", "dump:0", "dump:", "dump:1000", "calls;dump"])
def test_an_unknown_value_raises(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEEDTORCH_LOG", value)
    expected = f"expected 'calls', 'dump', .* or 'alive', .*, got '{value}'; unset"
    with pytest.raises(ValueError, match=expected):
        runpy.run_path(log_switches.__file__)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
def test_values_are_shown_without_what_tensors_hold() -> None:
    rows = torch.zeros(2, 3, dtype=torch.int32)
    shown = {
        "int32[2, 3]@cpu": rows,
        "float32[2]@meta": torch.empty(2, device="meta"),
        "float32[nested]@cpu": torch.nested.nested_tensor([[1.0], [2.0, 3.0]]),
        "Linear": nn.Linear(2, 2),
        "(None, True, 1.5, torch.int8, cpu)": (
            *(None, True, 1.5, torch.int8, torch.device("cpu")),
        ),
        "dict[('rows', [int32[2, 3]@cpu]), (int32[2, 3]@cpu, 1)]": {"rows": [rows], rows: 1},
        "[0, 1, 2, 3, 4, 5, ...]": list(range(7)),
        "set": {rows},
        "'aaaaaaaaaaaa...aaaaaaaaaaaaa'": "a" * 61,
    }
    assert {text: call_text(value) for text, value in shown.items()} == {
        value: value for value in shown
    }


@pytest.mark.slow
def test_without_the_variable_a_step_runs_no_code_of_it(tmp_path: Path) -> None:
    files, modules = run("", A_STEP, tmp_path).stdout.splitlines()
    assert (files, modules) == ("[]", "['log_switches']")
    files, modules = run("calls,dump,alive", A_STEP, tmp_path).stdout.splitlines()
    assert files == "['call_log.py', 'op_dump.py']"
    assert modules == "['alive_report', 'call_log', 'log_switches', 'op_dump']"


@pytest.fixture(scope="module")
def plain_results(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run("", "logged_programs", tmp_path_factory.mktemp("plain")).stdout


@pytest.mark.slow
@pytest.mark.parametrize("value", ["calls", "dump:3", "alive", "calls,dump,alive"])
def test_results_are_bitwise_those_without_it(
    value: str, plain_results: str, tmp_path: Path
) -> None:
    assert len(plain_results.splitlines()) == 7
    assert run(value, "logged_programs", tmp_path).stdout == plain_results


@pytest.mark.slow
def test_calls_are_lines_with_shapes_and_times(tmp_path: Path) -> None:
    program = """
import logging, pickle, weakref, torch, speedtorch
table = speedtorch.HostTable(9, 2, memory="plain")
rows = table.gather(torch.tensor([1, 2]), field="weight")
gone = weakref.ref(rows)
del rows
assert gone() is None
assert pickle.loads(pickle.dumps(speedtorch.empty)) is speedtorch.empty
speedtorch.optim.RowWiseAdagrad([torch.zeros(3, 2, requires_grad=True)]).step()
speedtorch.sum_rows(torch.ones(1, 2), speedtorch.plan_rows(torch.tensor([7]), 9), 9)
for mistake in (
    lambda: speedtorch.HostTable.gather(),
    lambda: speedtorch.pinned_gather(torch.zeros(3, 2), torch.tensor([5])),
):
    try:
        mistake()
    except (IndexError, TypeError):
        print("raised")
logging.basicConfig(format="root: %(message)s")
speedtorch.empty(1, memory="plain")
"""
    done = run("calls", program, tmp_path)
    lines = [re.sub(r", \d+ us$", "", line) for line in done.stderr.splitlines()]
    plan = ", ".join(["int64[1]@cpu"] * 3 + ["int64[2]@cpu", "int64[8]@cpu"])
    assert done.stdout == "raised\nraised\n"
    assert lines[:-3] == [
        "HostTable.__init__(9, 2, memory='plain') -> None",
        "HostTable.gather(int64[2]@cpu, field='weight') -> float32[2, 2]@cpu",
        "RowWiseAdagrad.__init__([float32[3, 2]@cpu]) -> None",
        "RowWiseAdagrad.step() -> None",
        f"plan_rows(int64[1]@cpu, 9) -> [{plan}]",
        f"sum_rows(float32[1, 2]@cpu, [{plan}], 9) -> float32[1, 2]@cpu",
    ]
    assert lines[-3].startswith("HostTable.gather() raised TypeError: HostTable.gather() missing")
    assert lines[-2].startswith(
        "pinned_gather(float32[3, 2]@cpu, int64[1]@cpu) raised IndexError: pinned_gather: id 5 at"
    )
    assert lines[-1] == "root: empty(1, memory='plain') -> float32[1]@cpu"


@pytest.mark.slow
def test_a_dump_has_no_contents_of_saved_files(tmp_path: Path) -> None:
    program = """
import os, tempfile, torch, speedtorch
speedtorch.pinned_gather(torch.ones(3, 2), torch.tensor([1]))
with tempfile.TemporaryDirectory() as folder:
    speedtorch.save(folder, rows=torch.ones(3))
    speedtorch.load(folder)
"""
    content, _ = parts_of(dump_of(program, tmp_path))
    names = [value_of(call, "op") for call in content["calls"]]
    assert "pinned_gather_detached" in str(names) and len(names) == 1


@pytest.mark.slow
def test_every_operator_is_replayed_with_the_same_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = dump_of(CALLS_OF_ALL_OPS, tmp_path)
    assert main(["replay", str(path)]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == f"{len(lines)} of {len(lines)} operators had the same results"
    assert len({line.split()[1].partition("(")[0] for line in lines}) > 25
    content, data = parts_of(path)
    value_of(content["calls"][4], "digests")[1] = ""
    write_parts(path, content, data)
    assert main(["replay", str(path)]) == 1
    assert capsys.readouterr().out.splitlines()[4].endswith("us, results; recorded: other results")


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_a_plan_is_replayed_without_the_handle_of_its_process(device: str, tmp_path: Path) -> None:
    program = f"""
import torch, speedtorch
emb = speedtorch.Embedding(9, 2, device="{device}")
for ids in (torch.tensor([2, 3]), torch.tensor([3, 4])):
    emb.announce(ids)
    emb(ids).sum().backward()
    torch.optim.SGD(emb.parameters(), lr=0.1).step()
"""
    path = dump_of(program, tmp_path)
    calls = parts_of(path)[0]["calls"]
    plans = [value_of(call, "inputs") for call in calls if "plan_parts" in str(call)]
    assert len(plans) == 2 and all(inputs[-1] == -1 for inputs in plans)
    assert main(["replay", str(path)]) == 0


@pytest.mark.slow
def test_an_operator_that_raises_is_dumped_and_raises_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = """
import torch, speedtorch
table = torch.zeros(3, 2)
for _ in range(4):
    speedtorch.pinned_scatter(table, torch.tensor([1]), torch.ones(1, 2), accumulate=True)
try:
    speedtorch.pinned_gather(table, torch.tensor([5]))
except IndexError:
    speedtorch.pinned_gather(table, torch.tensor([1]))  # is not in the dump
"""
    path = dump_of(program, tmp_path, "dump:3")
    assert main(["replay", str(path)]) == 0
    first, second, third, _ = capsys.readouterr().out.splitlines()
    assert first.endswith("us, the same results") and second.endswith("us, the same results")
    assert "us, the same IndexError: pinned_gather: id 5 at position 0" in third
    with open_dump(str(path)) as dump:
        tables = [call["inputs"][0].tolist()[1] for call in dump]
    assert tables == [[2, 2], [3, 3], [4, 4]]
    content, data = parts_of(path)
    content["calls"][1].remove(["digests", value_of(content["calls"][1], "digests")])
    content["calls"][2][-1][1] = "OutOfMemoryError: no memory"
    write_parts(path, content, data)
    assert main(["replay", str(path)]) == 1
    _, second, third, last = capsys.readouterr().out.splitlines()
    assert second.endswith("us, results; recorded: the call did not end")
    assert third.endswith("; recorded: OutOfMemoryError: no memory")
    assert last == "1 of 3 operators had the same results"


@pytest.mark.slow
def test_a_dump_that_cannot_be_written_does_not_replace_the_error(tmp_path: Path) -> None:
    program = """
import os, torch, speedtorch
os.rmdir(os.getcwd())
try:
    speedtorch.pinned_gather(torch.zeros(3, 2), torch.tensor([5]))
except IndexError:
    os._exit(0)
"""
    (tmp_path / "gone").mkdir()
    (line,) = run("dump", program, tmp_path / "gone").stderr.splitlines()
    assert line.startswith("pinned_gather_detached.default raised IndexError. The dump /")
    assert "[Errno 2] No such file or directory" in line


@pytest.mark.slow
def test_inputs_that_a_dump_does_not_hold_are_not_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = """
import torch, speedtorch
speedtorch.pinned_gather(torch.zeros(17 << 20, 1), torch.tensor([5]))
speedtorch.pinned_gather(torch.zeros(3, dtype=torch.complex64).conj(), torch.tensor([1]))
"""
    path = dump_of(program, tmp_path)
    assert main(["replay", str(path)]) == 1
    large, conjugated, last = capsys.readouterr().out.splitlines()
    assert large.endswith("float32[17825792, 1]@cpu is not recorded: a call has over 64 MiB")
    assert conjugated.endswith("complex64[3]@cpu is not recorded: it is not a plain tensor")
    assert last == "0 of 2 operators had the same results"


ADD = {
    "op": ["sum_rows", "default"],
    "grad": False,
    "inputs": [torch.arange(6.0).view(3, 2).t(), None, 2.5, [torch.tensor([True])]],
    "error": "",
}


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """A dump of one call."""
    write_dump(tmp_path / "file", [ADD])
    return tmp_path / "file"


def test_a_dump_is_a_safetensors_file_without_code(dump: Path) -> None:
    content, data = parts_of(dump)
    assert content["format"] == "speedtorch dump 2"
    assert data == struct.pack("6f?", *range(6), True)
    with open_dump(str(dump)) as opened:
        (call,) = opened
    assert {key: call[key] for key in ("op", "grad", "error")} == {
        key: ADD[key] for key in ("op", "grad", "error")
    }
    transposed, nothing, number, (flags,) = call["inputs"]
    assert transposed.tolist() == [[0, 2, 4], [1, 3, 5]] and transposed.stride() == (1, 2)
    assert (nothing, number, flags.tolist(), flags.dtype) == (None, 2.5, [True], torch.bool)


def test_inputs_that_share_memory_share_it_in_a_replay(tmp_path: Path) -> None:
    whole = torch.zeros(4, requires_grad=True)
    view = whole.detach()[1:3]
    write_dump(tmp_path / "file", [{"op": ["a", "b"], "grad": True, "inputs": [whole, view]}])
    with open_dump(str(tmp_path / "file")) as opened:
        for call in (*opened, *opened):
            again, part = call["inputs"]
            assert again.requires_grad and not part.requires_grad
            part.fill_(5)
            assert again.tolist() == [0, 5, 5, 0]


def test_other_files_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contents = {
        "empty": b"",
        "junk": b"junk" * 9,
        "pickled": pickle.dumps({"format": "speedtorch dump 2"}),
        "table": safetensors_header({"weight": ([0, 2], torch.float32)}),
    }
    torch.save({"format": "speedtorch dump 1", "calls": []}, tmp_path / "saved")
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    for name in (*contents, "saved"):
        assert main(["replay", str(tmp_path / name)]) == 1
        expected = f"speedtorch: {tmp_path / name}: expected a file that SPEEDTORCH_LOG"
        assert expected in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "none")]) == 1
    assert "No such file or directory" in capsys.readouterr().err


def test_a_closed_output_is_no_error_of_the_file(
    dump: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = Mock(side_effect=[BrokenPipeError, None])
    monkeypatch.setattr("speedtorch.replay.print", error, raising=False)
    with pytest.raises(BrokenPipeError):
        replay(str(dump))
    assert not capsys.readouterr().err


def tensor_with(place: int, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["tensors"][0].__setitem__(place, value)


def call_with(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        content["calls"][0] = [pair for pair in content["calls"][0] if pair[0] != name]
        content["calls"][0].append([name, value])

    return change


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda content: content.update(format="speedtorch dump 1"), "the format 'speedtorch dum"),
        (lambda content: content.pop("calls"), "'calls'"),
        (lambda content: content["storages"].pop(), "storages of another size"),
        (lambda content: content["storages"][0].__setitem__(1, -1), "the storage ['cpu', -1]"),
        (lambda content: content["storages"][0].__setitem__(0, "mps"), "the storage ['mps', 24]"),
        (tensor_with(0, 7), "list index out of range"),
        (tensor_with(0, -1), "the tensor [-1, "),
        (tensor_with(1, "torch.load"), "expected a value, got ['dtype', 'torch.load']"),
        (tensor_with(2, [3, 3]), "in a storage of 24"),
        (tensor_with(2, [0]), "the tensor [0, "),
        (tensor_with(2, [2**62, 2]), "the tensor [0, "),
        (tensor_with(3, [1, 2**62]), "in a storage of 24"),
        (tensor_with(4, 1), "in a storage of 24"),
        (tensor_with(5, 1), "the tensor [0, "),
        (lambda content: content["tensors"][1].__setitem__(5, True), "with a gradient"),
        (lambda content: content["calls"].__setitem__(0, ["list"]), "the call []"),
        (lambda content: content["calls"].__setitem__(0, ["eval", "1"]), "expected a value, got"),
        (call_with("inputs", ["list", ["tensor", "9"]]), "list index out of range"),
        (call_with("inputs", 1), "the call {"),
        (call_with("more", 1), "the call {"),
        (call_with("op", ["list", "sum_rows"]), "the operator ['sum_rows']"),
    ],
)
def test_damaged_files_are_errors_before_an_operator_runs(
    change: Callable[[dict[str, Any]], None],
    expected: str,
    dump: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    content, data = parts_of(dump)
    change(content)
    write_parts(dump, content, data)
    assert main(["replay", str(dump)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"speedtorch: {dump}: expected a file that ")
    assert expected in printed.err


def test_any_byte_may_be_wrong(dump: Path) -> None:
    """A byte of the header or of the JSON is another one, or the file ends before it."""
    whole = dump.read_bytes()
    for at in range(0, len(whole) - 25, 3):
        wrong = b'\x009]"'[at % 4 : at % 4 + 1]
        dump.write_bytes(whole[:at] + wrong + whole[at + 1 :])
        with suppress(ValueError), open_dump(str(dump)) as opened:
            assert len([*opened]) <= 1
        dump.write_bytes(whole[:at])
        with pytest.raises(ValueError, match="expected a file that"), open_dump(str(dump)):
            pass


def test_a_dump_names_operators_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = {"op": ["host_unregister", "default"], "grad": True, "inputs": [1, True]}
    write_dump(tmp_path / "file", [call])
    assert main(["replay", str(tmp_path / "file")]) == 1
    line = "  1 host_unregister(1, True): not run: dumps cannot contain this operator\n"
    assert capsys.readouterr().out == f"{line}0 of 1 operators had the same results\n"


@pytest.mark.slow
def test_live_tables_are_reported_with_their_places(tmp_path: Path) -> None:
    program = """
import os, sys, torch, speedtorch
gone = speedtorch.HostTable(5, 2, memory="plain")
cycle = [gone]
cycle.append(cycle)
table = speedtorch.HostTable(3, 2, memory="plain")
embedding = speedtorch.Embedding(3, 2, memory="plain")
del gone, cycle
embedding(torch.tensor([1]))
if os.fork() == 0:
    sys.exit()
os.wait()
"""
    *_, first, second, third, fourth, fifth, sixth = run(
        "alive", program, tmp_path
    ).stderr.splitlines()
    table = repr(speedtorch.HostTable(3, 2, memory="plain"))
    assert first == "alive at exit: 2 tables"
    assert [second, third] == [f"  {table}, created at <string>:{line}" for line in (6, 9)]
    assert fourth == "0 pinned tensors"
    assert fifth.startswith("bytes of host memory: {'plain': 48, 'registered': 0, ")
    assert sixth == "streams and events of the whole program: {}"

"""`speedtorch doctor`: what each check finds, and what the command prints and returns."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda_calls import PretendedDriver
from documents import ROOT
from torch import Tensor
from warm_python import run_warm, warm_python

from speedtorch import doctor, info
from speedtorch.__main__ import main
from speedtorch.doctor import Check, Finding, checks, run_doctor
from speedtorch.files import system_calls
from speedtorch.info import Link, peak_gbps
from speedtorch.memory import sysfs
from speedtorch.ops.functions import _ops

GIB = 1 << 30
MEMINFO = "MemTotal:       16777216 kB\nMemFree:  1000 kB\nMemAvailable:    8388608 kB\n\n"
FACTS = replace(info(), gpus=(), driver=None, cuda="13.0", kernels="CPU and CUDA")
ONE_GPU = replace(FACTS, gpus=(SimpleNamespace(name="a GPU"),), driver="580.65.06")
PCIE_4 = Link(4, 16, 4, 16, None, None)
WSL = "5.15.153.1-Microsoft-standard-WSL2"
MEMORY_BYTES = 1 << 16


@pytest.mark.parametrize(
    ("name", "given", "status", "found"),
    [
        ("gpus", (FACTS,), "ok", "none; speedtorch runs on the CPU"),
        ("gpus", (ONE_GPU,), "ok", "a GPU; driver 580.65.06"),
        ("gpus", (replace(ONE_GPU, gpus=()),), "note", "torch sees no GPU"),
        ("gpus", (replace(ONE_GPU, kernels="CPU (x)"),), "wrong", "CPU (x)"),
        ("link", (PCIE_4, 26, 25), "ok", "26.0 GB/s to the GPU, 25.0 GB/s back"),
        ("link", (PCIE_4, 26, 22.0), "wrong", "31.5, of which less than 70%"),
        ("link", (PCIE_4, 22.0, 26), "wrong", "31.5, of which less than 70%"),
        ("link", (PCIE_4, 22.1, 22.1), "ok", "PCIe 4 x16: GT/s x lanes"),
        ("link", (PCIE_4, 400, 20), "ok", "not the link in use"),
        (
            "link",
            (replace(PCIE_4, generation=None), 9, 9),
            "note",
            "does not show the link's speed",
        ),
        (
            "link",
            (replace(PCIE_4, width=8), 13, 13),
            "note",
            "PCIe 4 x8: GT/s x lanes x encoding / 8 = 15.8; the GPU can do PCIe 4 x16",
        ),
        ("link", (replace(PCIE_4, max_generation=5), 26, 26), "note", "the GPU can do PCIe 5 x16"),
        ("link", (replace(PCIE_4, max_generation=None), 26, 26), "ok", "26.0 GB/s"),
        ("locked_memory", (resource.RLIM_INFINITY, 1), "ok", "no limit"),
        ("locked_memory", (8 << 20, 1), "note", "8.0 MiB (RLIMIT_MEMLOCK)"),
        ("locked_memory", (8 << 20, 0), "ok", "not used without a GPU"),
        (
            "available_memory",
            (8 * GIB, MEMINFO),
            "ok",
            "8.0 GiB available; the machine has 16.0 GiB",
        ),
        (
            "available_memory",
            (7 * GIB, MEMINFO),
            "note",
            "7.0 GiB available; the machine has 16.0 GiB, 8.0 GiB of it available: the cgroup",
        ),
        ("huge_pages", ("always [madvise] never",), "ok", "[madvise]"),
        ("huge_pages", ("[always] madvise never",), "ok", "[always]"),
        ("huge_pages", ("always madvise [never]",), "note", "small pages"),
        ("huge_pages", ("",), "note", "does not show"),
        ("kernel", ("6.8.0-41-generic",), "ok", "6.8.0-41-generic"),
        ("kernel", (WSL,), "note", f"{WSL}: WSL"),
        ("iommu", ([], 0, [""]), "ok", "none is visible"),
        ("iommu", (["dmar0"], 9, []), "ok", "dmar0, 9 groups; there is no GPU"),
        ("iommu", (["dmar0"], 9, ["identity"]), "ok", "groups: identity"),
        (
            "iommu",
            (["dmar0", "dmar1"], 9, ["identity", "DMA-FQ", ""]),
            "note",
            "dmar0, dmar1, 9 groups; the GPUs' groups: identity, DMA-FQ, unknown",
        ),
        ("iommu", ([], 2, ["DMA"]), "note", "no IOMMU, 2 groups"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_check_judges_what_it_is_given(
    name: str, given: tuple[Any, ...], status: str, found: str
) -> None:
    finding = getattr(doctor, f"check_{name}")(*given)
    assert finding.status == status
    assert found in finding.found
    assert (finding.advice is None) == (status == "ok")


def test_a_driver_without_a_gpu_is_the_fault_of_torch_or_of_the_container() -> None:
    hidden = replace(ONE_GPU, gpus=())
    assert "CUDA_VISIBLE_DEVICES" in str(doctor.check_gpus(hidden).advice)
    assert "built with CUDA" in str(doctor.check_gpus(replace(hidden, cuda=None)).advice)


@pytest.mark.parametrize(
    ("generation", "width", "gbps"),
    [(1, 1, 0.25), (2, 4, 2.0), (3, 16, 15.754), (4, 8, 15.754), (5, 16, 63.015), (6, 16, 121.0)],
)
def test_the_peak_of_a_link_follows_from_its_generation_and_width(
    generation: int, width: int, gbps: float
) -> None:
    assert peak_gbps(generation, width) == pytest.approx(gbps, abs=1e-3)


def test_names_in_a_folder_that_the_system_does_not_show_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysfs, "ROOT", tmp_path)
    (tmp_path / "class").mkdir()
    for name in ("dmar1", "dmar0"):
        (tmp_path / "class" / name).touch()
    assert sysfs.names_in("class") == ["dmar0", "dmar1"]
    assert sysfs.names_in("class/iommu") == sysfs.names_in("class/dmar0") == []


# Host memory


@pytest.mark.parametrize("kind", ["plain", "registered", "managed"])
def test_memory_that_keeps_its_bits_is_ok(driver: PretendedDriver, kind: str) -> None:
    found = "64.0 KiB written and read by cpu: same bits"
    assert doctor.check_memory(kind, ["cpu"], MEMORY_BYTES) == Finding("ok", found)
    calls = {"plain": [], "registered": ["host_register"], "managed": ["malloc_managed"]}[kind]
    assert [name for name, *_ in driver.named("host_register", "malloc_managed")] == calls


def test_managed_memory_that_a_gpu_lacks_is_a_note() -> None:
    with PretendedDriver(True, False) as driver:
        finding = doctor.check_memory("managed", ["cpu"], MEMORY_BYTES)
        assert finding.status == "note" and "concurrentManagedAccess" in finding.found
        assert driver.named("malloc_managed") == []


@pytest.mark.parametrize(
    ("kind", "call"), [("registered", "host_register"), ("managed", "malloc_managed")]
)
def test_memory_that_cannot_be_had_is_wrong(driver: PretendedDriver, kind: str, call: str) -> None:
    driver.fail(call)
    finding = finding_of(doctor.check_memory, kind, ["cpu"], MEMORY_BYTES)
    assert (finding.status, finding.advice) == ("wrong", "advice")
    assert re.match("RuntimeError: .*pretended reason 2", finding.found)


def flipped_gather(table: Tensor, ids: Tensor) -> Tensor:
    rows = table[ids]
    rows[3, 5] ^= 1 << 40
    return rows


@pytest.mark.parametrize(
    ("op", "fault", "found"),
    [
        ("pinned_gather", flipped_gather, "1 of 128 rows read by cpu differ"),
        ("pinned_scatter", lambda table, ids, rows: None, "128 of 128 rows written by cpu differ"),
    ],
)
def test_rows_that_change_on_their_way_are_wrong(
    monkeypatch: pytest.MonkeyPatch, op: str, fault: object, found: str
) -> None:
    monkeypatch.setattr(doctor, op, fault)
    finding = doctor.check_memory("plain", ["cpu"], MEMORY_BYTES)
    assert (finding.status, finding.found) == ("wrong", found)
    assert 'memory="plain"' in str(finding.advice)


# Folders


def finding_of(check: Callable[..., Finding], *given: object) -> Finding:
    """What a check of the command finds, whose advice is "advice" after an error."""
    return Check("it", partial(check, *given), "advice").finding()


def raising(error: BaseException) -> Callable[[], Finding]:
    def run() -> Finding:
        raise error

    return run


@pytest.mark.parametrize(("least", "status"), [(0.0, "ok"), (1e9, "note")])
def test_a_folder_is_ok_unless_it_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: float, status: str
) -> None:
    monkeypatch.setattr(doctor, "_LEAST_FILE_GBPS", least)
    monkeypatch.setattr(doctor, "_BLOCK_BYTES", 1000)
    finding = doctor.check_folder(str(tmp_path), 3000)
    assert finding.status == status and (finding.advice is None) == (status == "ok")
    assert re.fullmatch(r"write \S+ GB/s with fsync, read \S+ GB/s, 2.9 KiB", finding.found)
    assert list(tmp_path.iterdir()) == []


def test_random_reads_of_a_folder_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = doctor.check_folder(str(tmp_path), 3 * doctor._PAGE_BYTES).found
    assert re.fullmatch(r".*, 12.0 KiB; [1-9]\S* random reads of 4 KiB a second", found)
    failed = (None, torch.tensor([errno.EIO, 0]))
    monkeypatch.setattr(doctor, "resident_slots", lambda *_: failed)
    finding = finding_of(doctor.check_folder, str(tmp_path), 4096)
    assert finding.status == "wrong" and "Input/output error" in finding.found


def test_a_folder_is_written_and_read_at_the_reported_speeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that advances 2 us while it is written, and 1 us at each of three reads."""
    times = iter([0.0, 2e-6, *(us * 1e-6 for us in (3, 4, 5, 6, 7, 8))])
    monkeypatch.setattr(doctor, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    monkeypatch.setattr(doctor, "_BLOCK_BYTES", 1000)
    found = doctor.check_folder(str(tmp_path), 3000).found
    assert found == "write 1.50 GB/s with fsync, read 1.00 GB/s, 2.9 KiB"


@pytest.mark.parametrize("harm", ["changed", "cut_off"])
def test_a_file_that_is_read_otherwise_than_written_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    def damage(descriptor: int) -> None:
        if harm == "cut_off":
            os.truncate(descriptor, 2999)
        else:
            (byte,) = os.pread(descriptor, 1, 2500)
            os.pwrite(descriptor, bytes([byte ^ 1]), 2500)

    monkeypatch.setattr(doctor, "_BLOCK_BYTES", 1000)
    monkeypatch.setattr(system_calls.calls, "fsync", damage)
    finding = doctor.check_folder(str(tmp_path), 3000)
    assert (finding.status, finding.found[:11]) == ("wrong", "1 of 3 bloc")


@pytest.mark.parametrize("error", [OSError("Input/output error"), KeyboardInterrupt()], ids=repr)
def test_after_an_error_or_an_interrupt_there_is_no_file_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(system_calls.calls, "fsync", lambda _: raising(error)())
    with nullcontext() if isinstance(error, OSError) else pytest.raises(KeyboardInterrupt):
        finding = finding_of(doctor.check_folder, str(tmp_path), 3000)
        assert finding.status == "wrong" and "Input/output error" in finding.found
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> list[Check]:
    """The checks of the command: an ok one, a note, and one that raises."""
    made = [
        Check("a", lambda: Finding("ok", "fine"), ""),
        Check("long name", lambda: Finding("note", "slow", "buy another"), ""),
        Check("c", raising(ValueError("two\n  lines")), "mend it"),
    ]
    monkeypatch.setattr(doctor, "checks", lambda folder: made)
    return made


def test_a_check_that_raises_is_wrong_and_the_other_checks_run(
    three: list[Check], capsys: pytest.CaptureFixture[str]
) -> None:
    three.reverse()
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "wrong  c          ValueError: two lines",
        "                  mend it",
        "note   long name  slow",
        "                  buy another",
        "ok     a          fine",
    ]
    three.pop(0)
    assert run_doctor() == 0  # notes are no failure


def test_the_json_is_a_list_with_the_same_findings(
    three: list[Check], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)
    assert [list(finding) for finding in findings] == [["check", "status", "found", "advice"]] * 3
    assert [list(finding.values()) for finding in findings] == [
        ["a", "ok", "fine", None],
        ["long name", "note", "slow", "buy another"],
        ["c", "wrong", "ValueError: two\n  lines", "mend it"],
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_only_a_terminal_shows_which_check_runs(
    three: list[Check], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    run_doctor()
    assert ("long name" in stream.getvalue()) == terminal
    assert terminal or stream.getvalue() == ""


def test_the_checks_of_a_machine_follow_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = ["available memory", "locked memory", "huge pages", "kernel", "iommu"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [check.name for check in checks()] == ["gpus", "plain memory", *limits]
    assert [check.name for check in checks("/")][-1] == "folder"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(_ops, "built_with_cuda", lambda: True)
    kinds = ["plain memory", "registered memory", "managed memory"]
    links = ["link of cuda:0", "link of cuda:1"]
    assert [check.name for check in checks()] == ["gpus", *kinds, *links, *limits]
    monkeypatch.setattr(_ops, "built_with_cuda", lambda: False)
    assert [check.name for check in checks()] == ["gpus", "plain memory", *links, *limits]


def test_a_link_is_compared_with_what_was_measured_on_its_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus = [SimpleNamespace(link=replace(PCIE_4, width=8)), SimpleNamespace(link=PCIE_4)]
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", lambda at: nullcontext(chosen.append(at)))
    monkeypatch.setattr(doctor, "measure_link", lambda: (13.0, 13.5))
    monkeypatch.setattr(doctor, "info", lambda: SimpleNamespace(gpus=gpus))
    found = {check.name: check.finding() for check in checks() if "link" in check.name}
    assert [finding.status for finding in found.values()] == ["note", "wrong"]
    assert found["link of cuda:1"].found.startswith("13.0 GB/s to the GPU, 13.5 GB/s back; PCIe 4")
    assert chosen == [0, 1]


def test_this_machine_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_FILE_BYTES", 1 << 20)
    names = [check.name for check in checks(str(tmp_path))]
    status = main(["doctor", "--folder", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    found = [
        re.fullmatch(r"(ok|note|wrong) +(\w[\w:]*(?: \w[\w:]*)*)  +\S.*", line) for line in lines
    ]
    assert [match[2] for match in found if match] == names
    states = [match[1] for match in found if match]
    assert len(lines) == len(names) + sum(state != "ok" for state in states)
    assert status == int("wrong" in states)
    assert list(tmp_path.iterdir()) == []
    status = main(["doctor", "--json"])
    findings = json.loads(capsys.readouterr().out)
    assert [finding["check"] for finding in findings] == names[:-1]
    assert status == int("wrong" in [finding["status"] for finding in findings])
    assert all((finding["advice"] is None) == (finding["status"] == "ok") for finding in findings)


@pytest.mark.parametrize("name", ["missing", "file"])
def test_an_unknown_folder_is_an_error_in_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--folder", str(tmp_path / name)])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert f"--folder: '{tmp_path / name}' is not a folder" in printed.err and printed.out == ""


@pytest.mark.slow
def test_the_module_runs_the_doctor() -> None:
    done = run_warm("-m", "speedtorch", "doctor", "--json", status=None)
    states = [finding["status"] for finding in json.loads(done.stdout)]
    assert (done.returncode, done.stderr) == (int("wrong" in states), "")


def test_a_reader_that_goes_away_ends_the_command_in_silence() -> None:
    command = [warm_python(), "-m", "speedtorch", "doctor"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(60) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's full device")
def test_output_that_cannot_be_written_is_a_short_error() -> None:
    command = [warm_python(), "-m", "speedtorch", "info"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [f"speedtorch: {OSError(28, os.strerror(28))}"]

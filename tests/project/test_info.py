"""speedtorch.info() says what is installed, what was built, and what it runs on."""

from __future__ import annotations

import platform
from dataclasses import FrozenInstanceError, fields
from importlib import import_module
from pathlib import Path

import pytest
import torch
from conftest import NEEDS_GPU
from cuda_calls import PretendedDriver, library_path

import speedtorch
from speedtorch import info, memory_kind, memory_stats


def test_it_prints_one_line_for_each_fact() -> None:
    found = info()
    lines = str(found).splitlines()
    assert len(lines) == len(fields(found))
    for line, field in zip(lines, fields(found), strict=True):
        assert line.startswith(field.name.replace("_", " "))
        assert line.endswith(f"  {getattr(found, field.name)}")
        assert getattr(found, field.name) not in ("", None)


def test_versions_are_those_of_this_process() -> None:
    found = info()
    assert (found.python, found.torch) == (platform.python_version(), torch.__version__)
    assert found.speedtorch == speedtorch.__version__


def test_the_library_is_the_one_that_holds_the_ops() -> None:
    assert Path(info().library).samefile(library_path())


def test_kernels_are_what_was_built() -> None:
    with_cuda = torch.ops.speedtorch.built_with_cuda()
    assert info().kernels.startswith("CPU and CUDA" if with_cuda else "CPU (")


def test_the_default_memory_is_what_auto_gives() -> None:
    assert info().default_memory == memory_kind(speedtorch.empty(1))


@pytest.mark.parametrize(
    ("gpus", "seen", "expected"),
    [((True, True), True, "managed"), ((True, False), True, "registered"), ((), False, "plain")],
    ids=["concurrent", "not_concurrent", "no_gpu"],
)
def test_the_default_memory_follows_the_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: tuple[bool, ...], seen: bool, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    # The package's attribute of this name is the function.
    module = import_module("speedtorch.info")
    monkeypatch.setattr(module, "_link_of_first_gpu", lambda: "pretended")
    monkeypatch.setattr(torch.ops.speedtorch, "built_with_cuda", lambda: seen)
    with PretendedDriver(*gpus):
        assert info().default_memory == expected


@pytest.mark.parametrize("kind", ["plain", "registered", "managed"])
def test_memory_in_use_is_told_by_kind(kind: str) -> None:
    with PretendedDriver(True):
        before = memory_stats()
        tensor = speedtorch.empty(1000, memory=kind)
        assert info().host_bytes == before | {kind: before[kind] + 4000}
        del tensor
        assert info().host_bytes == before


def test_what_was_told_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        info().torch = "another"  # type: ignore[misc]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_there_is_none_and_no_link() -> None:
    assert (info().gpu, info().link, info().default_memory) == ("none", "none", "plain")


@NEEDS_GPU
def test_every_gpu_is_named_and_the_link_is_told() -> None:
    found = info()
    count = torch.cuda.device_count()
    assert found.gpu.split(", ") == [torch.cuda.get_device_name(i) for i in range(count)]
    assert " x" in found.link or found.link == "not told by this system"


@NEEDS_GPU
def test_info_takes_no_memory_of_the_gpu() -> None:
    before = torch.cuda.memory_reserved()
    info()
    assert torch.cuda.memory_reserved() == before

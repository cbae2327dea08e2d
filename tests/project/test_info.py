"""speedtorch.info() says what is installed, what was built, and what it runs on."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, asdict
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import NEEDS_GPU
from cuda_calls import PretendedDriver, library_path

import speedtorch
from speedtorch import info, memory_kind, memory_stats
from speedtorch.info import Gpu, Host, Link
from speedtorch.memory import calibration, sysfs
from speedtorch.memory.nvml import Driver
from speedtorch.ops.functions import _ops

# The package's attribute of this name is the function.
module = import_module("speedtorch.info")
UNKNOWN = "not reported by this system"
UNITS = {"": 1, "GB/s": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
ADDRESSES = ["0000:19:00.0", "0001:0a:1f.0"]
FILES = {
    "current_link_speed": "16.0 GT/s PCIe",
    "current_link_width": "8",
    "max_link_speed": "32.0 GT/s PCIe",
    "max_link_width": "16",
    "numa_node": "1",
}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """Pretends a machine of two nodes with up to two GPUs, and gives the root of its sysfs."""

    def properties(index: int) -> Any:
        places = [(0, 0x19, 0), (1, 0x0A, 0x1F)]
        pci = zip(("pci_domain_id", "pci_bus_id", "pci_device_id"), places[index], strict=True)
        name, memory = f"a GPU of kind {index}", (index + 1) * 3 << 29
        return SimpleNamespace(
            name=name, major=9, minor=index, total_memory=memory, uuid=f"uuid-{index}", **dict(pci)
        )

    def driver(uuids: list[str]) -> Driver:
        assert uuids == ["uuid-0", "uuid-1"][: len(uuids)]
        return Driver("580.65.06", "13.0", [1 << 30, None][: len(uuids)])

    def make(count: int) -> Path:
        for address in ADDRESSES[:count]:
            folder = tmp_path / "bus/pci/devices" / address
            folder.mkdir(parents=True)
            for name, text in FILES.items():
                (folder / name).write_text(f"{text}\n")
        (tmp_path / "devices/system/node").mkdir(parents=True)
        (tmp_path / "devices/system/node/online").write_text("0-1\n")
        monkeypatch.setattr(sysfs, "ROOT", tmp_path)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(module, "query_driver", driver)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: 1000 + index)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 2 << 20)
        return tmp_path

    return make


def kept(gpu: str, *gbps: float) -> Path:
    """A file of costs of this machine with a GPU, as calibrate() keeps them."""
    path = calibration.cache_file(gpu)
    assert path is not None
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"gpu": gpu, "costs": [1.0] * 28 + [*gbps]}))
    return path


def leaves(facts: Any) -> Iterator[tuple[str, Any]]:
    """The facts of a JSON object, each with its key, in their order; an empty list is one."""
    for key, value in facts.items() if isinstance(facts, dict) else enumerate(facts):
        if isinstance(value, dict | list) and value:
            yield from leaves(value)
        else:
            yield key, value


@pytest.mark.parametrize("count", [0, 1, 2])
def test_the_text_has_one_line_for_each_fact_of_the_json(
    machine: Callable[[int], Path], count: int
) -> None:
    machine(count)
    kept("a GPU of kind 1", 50.0, 40)
    found = info()
    facts = list(leaves(json.loads(found.as_json())))
    lines = [line for line in str(found).splitlines() if re.search(r"\S  +\S", line)]
    assert len({line.rindex("  ") for line in lines}) == 1
    for (key, value), line in zip(facts, lines, strict=True):
        label, fact = re.split(r"(?<=\S)  +", line)
        assert key.removesuffix("_bytes").removesuffix("_gbps") == label.strip().replace(" ", "_")
        if value is None:
            assert fact == UNKNOWN or fact.startswith(("none: ", "not measured here; "))
        elif isinstance(value, int | float):
            number, _, unit = fact.partition(" ")
            assert float(number.replace(",", "")) * UNITS[unit] == pytest.approx(value, rel=0.05)
        else:
            assert fact == ("none" if value == [] else value)


def test_the_json_is_what_info_has_and_its_keys_are_stable(machine: Callable[[int], Path]) -> None:
    machine(2)
    found = info()
    facts = json.loads(found.as_json())
    assert facts == asdict(found) | {"gpus": [*map(asdict, found.gpus)]}
    gpu = facts["gpus"][0]
    assert list(facts) == [
        *("speedtorch", "python", "torch", "cuda", "driver", "driver_cuda", "library", "kernels"),
        *("default_memory", "gpus", "host", "host_bytes"),
    ]
    assert list(facts["host"]) == [
        *("processors", "usable_processors", "numa_nodes", "memory_bytes", "available_bytes")
    ]
    assert list(gpu) == [
        *("index", "name", "compute_capability", "memory_bytes", "free_bytes"),
        *("torch_allocated_bytes", "torch_reserved_bytes", "pci_address", "numa_node", "link"),
    ]
    assert list(gpu["link"]) == [
        *("generation", "width", "max_generation", "max_width", "to_gpu_gbps", "from_gpu_gbps")
    ]
    assert list(facts["host_bytes"]) == ["plain", "registered", "managed", "captured"]


def test_each_gpu_is_reported_with_its_link(machine: Callable[[int], Path]) -> None:
    machine(2)
    kept("a GPU of kind 1", 50.25, 40)
    found = info()
    assert (found.driver, found.driver_cuda) == ("580.65.06", "13.0")
    assert found.gpus == (
        Gpu(
            *(0, "a GPU of kind 0", "9.0", 3 << 29, 1 << 30, 1000, 2 << 20, ADDRESSES[0], 1),
            Link(4, 8, 5, 16, None, None),
        ),
        Gpu(
            *(1, "a GPU of kind 1", "9.1", 3 << 30, None, 1001, 2 << 20, ADDRESSES[1], 1),
            Link(4, 8, 5, 16, 50.25, 40),
        ),
    )


def test_a_gpu_is_a_group_of_aligned_lines(machine: Callable[[int], Path]) -> None:
    root = machine(1)
    (root / "bus/pci/devices" / ADDRESSES[0] / "numa_node").write_text("-1\n")
    (root / "bus/pci/devices" / ADDRESSES[0] / "max_link_speed").unlink()
    kept("a GPU of kind 0", 50.25, 40)
    assert """
gpu 0
  index               0
  name                a GPU of kind 0
  compute capability  9.0
  memory              1.5 GiB
  free                1.0 GiB
  torch allocated     1,000 B
  torch reserved      2.0 MiB
  pci address         0000:19:00.0
  numa node           none
  link
    generation        4
    width             8
    max generation    not reported by this system
    max width         16
    to gpu            50.2 GB/s
    from gpu          40.0 GB/s

host
  processors""" in str(info())


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "content", [None, b"", b"Unknown\n", b"\xff\xfe", b"GT/s", b"1.2.3", "folder"], ids=repr
)
def test_a_value_that_the_system_does_not_report_is_none(
    machine: Callable[[int], Path], name: str, content: bytes | str | None
) -> None:
    file = machine(1) / "bus/pci/devices" / ADDRESSES[0] / name
    file.unlink()
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content == "folder":
        file.mkdir()
    found = info()
    (gpu,) = found.gpus
    facts = {
        "current_link_speed": gpu.link.generation,
        "current_link_width": gpu.link.width,
        "max_link_speed": gpu.link.max_generation,
        "max_link_width": gpu.link.max_width,
        "numa_node": gpu.numa_node,
    }
    assert [fact for fact in facts if facts[fact] is None] == [name]
    assert str(found).count(UNKNOWN) == 1


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        *(("link_width", "0", None), ("link_width", "255", None)),
        *(("link_speed", "2.5 GT/s PCIe", 1), ("link_speed", "5 GT/s", 2)),
        *(("link_speed", f"{1 << n}.0 GT/s PCIe", n) for n in range(3, 8)),
        *(("link_speed", "5.0 GT/s PCIe", 2), ("link_speed", "3.5 GT/s PCIe", None)),
    ],
)
def test_a_link_has_the_width_and_the_generation_that_linux_reports(
    machine: Callable[[int], Path], name: str, text: str, expected: int | None
) -> None:
    folder = machine(1) / "bus/pci/devices" / ADDRESSES[0]
    for kind in ("current", "max"):
        (folder / f"{kind}_{name}").write_text(text)
    link = info().gpus[0].link
    found = (
        (link.width, link.max_width) if "width" in name else (link.generation, link.max_generation)
    )
    assert found == (expected, expected)


def test_without_sysfs_the_other_facts_are_reported(
    machine: Callable[[int], Path], tmp_path: Path
) -> None:
    shutil.rmtree(machine(2))
    found = info()
    assert [gpu.name for gpu in found.gpus] == ["a GPU of kind 0", "a GPU of kind 1"]
    assert [gpu.link for gpu in found.gpus] == [Link(*[None] * 6)] * 2
    assert [gpu.numa_node for gpu in found.gpus] == [None] * 2
    assert found.host.numa_nodes is None


def test_the_host_is_reported(
    machine: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(0)
    monkeypatch.setattr(module, "available_bytes", lambda: 12345)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert info().host == Host(64, 2, 2, memory_bytes, 12345)


def test_available_memory_without_a_bound_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_bytes", lambda: torch.iinfo(torch.int64).max)
    assert info().host.available_bytes is None


def test_nothing_is_measured_and_no_gpu_gets_a_context(
    machine: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine(1)
    before = sorted(root.rglob("*"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: pytest.fail("makes a context"))
    monkeypatch.setattr(calibration, "_steps", lambda: pytest.fail("measures"))
    found = info()
    assert found.gpus[0].link.to_gpu_gbps is None
    assert str(found).count("not measured here; speedtorch.calibrate() does") == 2
    assert sorted(root.rglob("*")) == before


@pytest.mark.parametrize(
    ("count", "words"),
    [
        *((0, "0 B"), (1023, "1,023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB")),
        *((1 << 20, "1.0 MiB"), (5 << 40, "5.0 TiB"), (3 << 50, "3,072.0 TiB")),
    ],
)
def test_bytes_are_formatted_with_units(
    monkeypatch: pytest.MonkeyPatch, count: int, words: str
) -> None:
    monkeypatch.setattr(module, "memory_stats", lambda: {"managed": count})
    assert re.search(rf"^  managed +{words}$", str(info()), re.MULTILINE)


def test_versions_library_and_memory_are_those_of_this_process() -> None:
    found = info()
    assert (found.python, found.torch) == (platform.python_version(), torch.__version__)
    assert found.speedtorch == speedtorch.__version__
    assert Path(found.library).samefile(library_path())
    with_cuda = torch.ops.speedtorch.built_with_cuda()
    assert found.kernels.startswith("CPU and CUDA" if with_cuda else "CPU (")
    assert found.default_memory == memory_kind(speedtorch.empty(1))


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
    monkeypatch.setattr(_ops, "built_with_cuda", lambda: seen)
    with PretendedDriver(*gpus):
        assert info().default_memory == expected


@pytest.mark.parametrize("kind", ["plain", "registered", "managed"])
def test_memory_in_use_is_reported_by_kind(kind: str) -> None:
    with PretendedDriver(True):
        before = memory_stats()
        tensor = speedtorch.empty(1000, memory=kind)
        assert info().host_bytes == before | {kind: before[kind] + 4000}
        del tensor
        assert info().host_bytes == before


def test_an_info_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        info().torch = "another"  # type: ignore[misc]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_there_is_none() -> None:
    assert (info().gpus, info().default_memory) == ((), "plain")


@NEEDS_GPU
def test_every_gpu_of_this_machine_is_reported() -> None:
    found = info()
    assert [gpu.name for gpu in found.gpus] == [
        torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
    ]
    assert found.cuda == torch.version.cuda
    for gpu in found.gpus:
        assert gpu.free_bytes is None or 0 <= gpu.free_bytes <= 1.1 * gpu.memory_bytes
        assert gpu.torch_allocated_bytes == torch.cuda.memory_allocated(gpu.index)


@NEEDS_GPU
def test_info_takes_no_memory_of_the_gpu() -> None:
    before = torch.cuda.memory_reserved()
    info()
    assert torch.cuda.memory_reserved() == before

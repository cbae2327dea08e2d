"""Tables are filled by processors near the current GPU, on a pretended machine of two nodes."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda_calls import PretendedDriver

from speedtorch import empty
from speedtorch.memory import near_gpu, sysfs

ADDRESS = "0001:0a:1f.0"
ADDRESSED = SimpleNamespace(pci_domain_id=1, pci_bus_id=10, pci_device_id=31)
FIRST = min(os.sched_getaffinity(0))

needs_two = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="needs two processors, of which one is near"
)


class Watched(PretendedDriver):
    """Notes where the thread that calls it may run."""

    def __init__(self) -> None:
        super().__init__(True)
        self.ran_on: dict[str, set[int]] = {}

    def answer(self, name: str, *arguments: Any) -> int:
        """As ever."""
        self.ran_on[name] = os.sched_getaffinity(0)
        return super().answer(name, *arguments)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nodes with processors, and a GPU near the first processor that this process may use."""
    for name, text in {
        "devices/system/node/has_cpu": "0-1",
        f"bus/pci/devices/{ADDRESS}/local_cpulist": f"{FIRST}",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(sysfs, "ROOT", tmp_path)
    pretend_gpus(monkeypatch, {1: ADDRESSED}, current=1)
    return tmp_path


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, gpus: dict[int, Any], current: int) -> None:
    """For near_gpu alone: torch itself would make the pretended GPU current, and fail."""
    cuda = SimpleNamespace(
        is_available=lambda: bool(gpus),
        current_device=lambda: current,
        get_device_properties=gpus.__getitem__,
    )
    monkeypatch.setattr(near_gpu, "torch", SimpleNamespace(cuda=cuda))


def ran_on(kind: str, call: str) -> set[int]:
    """Where memory of a kind is made, seen at a call of the driver."""
    before = os.sched_getaffinity(0)
    with Watched() as driver:
        made = empty(64 << 20, dtype=torch.uint8, memory=kind)
        assert not made.any()
        del made
        assert os.sched_getaffinity(0) == before
        return driver.ran_on[call]


@needs_two
@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("kind", "call"), [("managed", "malloc_managed"), ("registered", "host_register")]
)
def test_memory_is_made_by_processors_near_the_gpu(kind: str, call: str) -> None:
    assert ran_on(kind, call) == {FIRST}


@needs_two
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("devices/system/node/has_cpu", "0"),
        ("devices/system/node/has_cpu", None),
        (f"bus/pci/devices/{ADDRESS}/local_cpulist", ""),
        (f"bus/pci/devices/{ADDRESS}/local_cpulist", None),
        (f"bus/pci/devices/{ADDRESS}/local_cpulist", "0-4095"),
        (f"bus/pci/devices/{ADDRESS}/local_cpulist", "4000-4002,4095"),
    ],
    ids=["one node", "no nodes", "near none", "not known", "near all", "near others"],
)
def test_nothing_changes_where_there_is_nothing_to_choose(
    machine: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str | None
) -> None:
    (machine / name).unlink()
    if text is not None:
        (machine / name).write_text(f"{text}\n")
    monkeypatch.delattr(os, "sched_setaffinity")
    assert ran_on("registered", "host_register") == os.sched_getaffinity(0)


@needs_two
def test_without_a_gpu_nothing_changes(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, {}, current=0)
    assert ran_on("registered", "host_register") == os.sched_getaffinity(0)


@needs_two
@pytest.mark.usefixtures("machine")
def test_allocating_plain_memory_does_not_move_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    assert not empty(3, memory="plain").any()


@needs_two
@pytest.mark.usefixtures("machine")
def test_a_refusal_of_the_system_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "not here")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with pytest.warns(UserWarning, match=r"may be far from the current GPU: .*not here") as caught:
        ran_on("registered", "host_register")
    assert caught[0].filename == __file__

"""What a driver tells of itself and of free memory, by a pretended library of NVIDIA's."""

from __future__ import annotations

from typing import Any

import pytest

from speedtorch.memory import nvml
from speedtorch.memory.nvml import Driver, query_driver


class Pretended:
    """Knows two GPUs, one of them a part of a GPU; calls of the names in `failing` fail."""

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.users = 0
        self.free = {b"GPU-whole": 3 << 30, b"MIG-part": 1 << 30}

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: 999) if name in self.failing else getattr(self, f"_{name}")

    def _nvmlInit_v2(self) -> int:
        self.users += 1
        return 0

    def _nvmlShutdown(self) -> int:
        self.users -= 1
        return 0

    def _nvmlSystemGetDriverVersion(self, text: Any, size: int) -> int:
        assert size == len(text)
        text.value = b"580.65.06"
        return 0

    def _nvmlSystemGetCudaDriverVersion_v2(self, number: Any) -> int:
        number._obj.value = 12080
        return 0

    def _nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        if uuid not in self.free:
            return 6
        handle._obj.value = self.free[uuid]  # a handle may be any number
        return 0

    def _nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total, memory._obj.free = 4 << 30, handle.value
        return 0


def driver_facts(monkeypatch: pytest.MonkeyPatch, *failing: str) -> Driver:
    """What such a library tells; all that was opened is closed."""
    library = Pretended(*failing)
    monkeypatch.setattr(nvml, "CDLL", {"libnvidia-ml.so.1": library}.__getitem__)
    driver = query_driver(["whole", "part", "of another machine"])
    assert library.users == 0
    return driver


def test_the_driver_tells_its_versions_and_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert driver_facts(monkeypatch) == ("580.65.06", "12.8", [3 << 30, 1 << 30, None])


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("nvmlInit_v2", (None, None, [None] * 3)),
        ("nvmlSystemGetDriverVersion", (None, "12.8", [3 << 30, 1 << 30, None])),
        ("nvmlSystemGetCudaDriverVersion_v2", ("580.65.06", None, [3 << 30, 1 << 30, None])),
        ("nvmlDeviceGetHandleByUUID", ("580.65.06", "12.8", [None] * 3)),
        ("nvmlDeviceGetMemoryInfo", ("580.65.06", "12.8", [None] * 3)),
    ],
)
def test_a_value_that_a_call_does_not_report_is_none(
    monkeypatch: pytest.MonkeyPatch, call: str, expected: tuple[object, ...]
) -> None:
    assert driver_facts(monkeypatch, call) == expected


def test_without_a_driver_all_values_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(nvml, "CDLL", missing)
    assert query_driver([]) == (None, None, [])
    assert query_driver(["whole"]) == (None, None, [None])


@pytest.mark.parametrize("missing", ["nvmlInit_v2", "nvmlSystemGetCudaDriverVersion_v2"])
def test_a_driver_from_before_a_call_tells_nothing(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    class Older(Pretended):
        def __getattr__(self, name: str) -> Any:
            if name == missing:
                raise AttributeError(name)
            return super().__getattr__(name)

    library = Older()
    monkeypatch.setattr(nvml, "CDLL", lambda name: library)
    assert query_driver(["whole"]) == Driver(free_bytes=[None])
    assert library.users == 0

"""Queries NVIDIA's driver without CUDA: the driver's version, and the free memory of GPUs.

CUDA would create a context of some hundred MiB on each GPU to report free memory. The names and the
struct are from NVIDIA's nvml.h. The driver installs the library.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL, Structure, byref, c_int, c_ulonglong, c_void_p, create_string_buffer
from typing import NamedTuple

__all__ = ["Driver", "query_driver"]


class Driver(NamedTuple):
    """The driver's versions and free memory; None for a value that is unavailable."""

    version: str | None = None  # such as "580.65.06"
    cuda: str | None = None  # the newest CUDA version that the driver runs, such as "13.0"
    free_bytes: Sequence[int | None] = ()  # per GPU


class _Memory(Structure):
    _fields_ = [(name, c_ulonglong) for name in ("total", "free", "used")]


def query_driver(uuids: Sequence[str]) -> Driver:
    """Queries the driver and the GPUs with these UUIDs (torch's, without prefix); never raises."""
    unknown = Driver(free_bytes=[None] * len(uuids))
    try:
        nvml = CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return unknown
    except (OSError, AttributeError):  # no driver, or one older than these calls
        return unknown
    try:
        text, number = create_string_buffer(80), c_int()
        version = cuda = None
        if nvml.nvmlSystemGetDriverVersion(text, len(text)) == 0:
            version = text.value.decode()
        if nvml.nvmlSystemGetCudaDriverVersion_v2(byref(number)) == 0:
            cuda = f"{number.value // 1000}.{number.value % 1000 // 10}"
        return Driver(version, cuda, [_free_bytes(nvml, uuid) for uuid in uuids])
    except AttributeError:
        return unknown
    finally:
        nvml.nvmlShutdown()


def _free_bytes(nvml: CDLL, uuid: str) -> int | None:
    handle, memory = c_void_p(), _Memory()
    for kind in ("GPU", "MIG"):  # a MIG partition has its own UUID
        name = f"{kind}-{uuid}".encode()
        if (
            nvml.nvmlDeviceGetHandleByUUID(name, byref(handle)) == 0
            and nvml.nvmlDeviceGetMemoryInfo(handle, byref(memory)) == 0
        ):
            return int(memory.free)
    return None

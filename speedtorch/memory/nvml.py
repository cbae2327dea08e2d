"""What NVIDIA's driver tells without CUDA: its version, and the free memory of GPUs.

CUDA would need a context for the latter, of some hundred MiB on each GPU. The names and the record
are those of NVIDIA's nvml.h; a driver brings the library along.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL, Structure, byref, c_int, c_ulonglong, c_void_p, create_string_buffer
from typing import NamedTuple

__all__ = ["Driver", "ask_driver"]


class Driver(NamedTuple):
    """The driver; None is what it does not tell, or that there is none."""

    version: str | None = None  # as in "580.65.06"
    cuda: str | None = None  # the newest CUDA that it runs, as in "13.0"
    free_bytes: Sequence[int | None] = ()  # of each GPU's memory


class _Memory(Structure):
    _fields_ = [(name, c_ulonglong) for name in ("total", "free", "used")]


def ask_driver(uuids: Sequence[str]) -> Driver:
    """What the driver tells of itself, and of the GPUs of these UUIDs (torch's, bare); no error."""
    untold = Driver(free_bytes=[None] * len(uuids))
    try:
        nvml = CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return untold
    except (OSError, AttributeError):  # none, or one from before these calls
        return untold
    try:
        text, number = create_string_buffer(80), c_int()
        version = cuda = None
        if nvml.nvmlSystemGetDriverVersion(text, len(text)) == 0:
            version = text.value.decode()
        if nvml.nvmlSystemGetCudaDriverVersion_v2(byref(number)) == 0:
            cuda = f"{number.value // 1000}.{number.value % 1000 // 10}"
        return Driver(version, cuda, [_free_bytes(nvml, uuid) for uuid in uuids])
    except AttributeError:
        return untold
    finally:
        nvml.nvmlShutdown()


def _free_bytes(nvml: CDLL, uuid: str) -> int | None:
    handle, memory = c_void_p(), _Memory()
    for kind in ("GPU", "MIG"):  # a part of a GPU has a UUID of its own
        name = f"{kind}-{uuid}".encode()
        if (
            nvml.nvmlDeviceGetHandleByUUID(name, byref(handle)) == 0
            and nvml.nvmlDeviceGetMemoryInfo(handle, byref(memory)) == 0
        ):
            return int(memory.free)
    return None

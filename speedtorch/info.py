"""Reports what is installed and built, and the hardware that speedtorch runs on."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from speedtorch.memory.byte_count import text_of
from speedtorch.memory.calibration import saved_link_gbps
from speedtorch.memory.host_memory import available_bytes, default_kind, memory_stats
from speedtorch.memory.nvml import query_driver
from speedtorch.memory.sysfs import pci_address, sysfs_numbers, sysfs_text
from speedtorch.ops.functions import _ops
from speedtorch.version import __version__

__all__ = ["Gpu", "Host", "Info", "Link", "info", "peak_gbps"]

# PCIe generations by a lane's speed in GT/s.
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6, 128.0: 7}

_MISSING = {
    "cuda": "none: torch is built without it",
    "to_gpu_gbps": "not measured here; speedtorch.calibrate() does",
    "from_gpu_gbps": "not measured here; speedtorch.calibrate() does",
}


@dataclass(frozen=True)
class Link:
    """A GPU's PCIe link."""

    generation: int | None
    """Current PCIe generation, which an idle GPU may have lowered."""
    width: int | None
    """Current number of lanes."""
    max_generation: int | None
    """The GPU's maximum generation; the slot may support less."""
    max_width: int | None
    """The GPU's number of lanes."""
    to_gpu_gbps: float | None
    """GB/s (10^9 bytes/s) that `calibrate` measured on this machine; None before calibration."""
    from_gpu_gbps: float | None
    """GB/s in the other direction."""


def peak_gbps(generation: int, width: int) -> float:
    """GB/s of a PCIe link in one direction, including packet headers: GT/s x lanes x encoding / 8.

    The encoding is the share of data bits: 8 of 10 up to generation 2, 128 of 130 up to 5, and 242
    of 256 from 6 on.

    Example:
        >>> f"{peak_gbps(4, 16):.1f}"
        '31.5'
    """
    (speed,) = (speed for speed, number in _GENERATIONS.items() if number == generation)
    encoding = 8 / 10 if generation < 3 else 128 / 130 if generation < 6 else 242 / 256
    return speed * width * encoding / 8


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch sees."""

    index: int
    """The index in "cuda:0"."""
    name: str
    compute_capability: str
    """Such as "9.0"."""
    memory_bytes: int
    free_bytes: int | None
    """Memory that no process has allocated, as the driver reports."""
    torch_allocated_bytes: int
    """Memory of this process's tensors."""
    torch_reserved_bytes: int
    """Memory of this process's tensors and torch's cache."""
    pci_address: str
    """Such as "0000:19:00.0"."""
    numa_node: int | None
    """The nearest NUMA node of the host; -1 without one."""
    link: Link


@dataclass(frozen=True)
class Host:
    """The machine around the GPUs."""

    processors: int | None
    usable_processors: int
    """Processors that this thread may run on."""
    numa_nodes: int | None
    memory_bytes: int
    available_bytes: int | None
    """Memory available to this process: the minimum of the system's and the cgroup's free bytes."""


@dataclass(frozen=True)
class Info:
    """Versions, build, GPUs and their links, the host, and its memory in use.

    A value is None if this system, such as a container, does not report it. `str()` is a table
    with one fact per line; `as_json` returns the same facts for programs.
    """

    speedtorch: str
    python: str
    torch: str
    cuda: str | None
    """The CUDA version that torch is built with; None without CUDA."""
    driver: str | None
    """The version of NVIDIA's driver."""
    driver_cuda: str | None
    """The newest CUDA version that the driver runs."""
    library: str
    """The path of the library with the ops."""
    kernels: str
    """"CPU and CUDA", or "CPU" and the reason: the library was built without nvcc or with
    SPEEDTORCH_CUDA=0, or the driver is too old for the library's CUDA version."""
    default_memory: str
    """The kind of memory that `memory="auto"` selects here."""
    gpus: tuple[Gpu, ...]
    host: Host
    host_bytes: dict[str, int]
    """Bytes of host memory in use through speedtorch, by kind (`memory_stats`)."""

    def as_json(self) -> str:
        """Returns the facts as a JSON object.

        The keys are the fields of `Info`. "host" is an object with the fields of `Host`, each item
        of "gpus" has the fields of `Gpu`, and the "link" of a GPU has the fields of `Link`. These
        classes state the meanings and units. The keys are stable. None becomes null.

        Example:
            >>> json.loads(info().as_json())["speedtorch"] == __version__
            True
        """
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        lines = list(_lines(asdict(self)))
        width = max(len(label) for label, _ in lines)
        return "\n".join(f"{label:{width}}  {fact}".rstrip() for label, fact in lines)


def info() -> Info:
    """Collects versions, build, GPUs, links, host and memory in use; prints as a table.

    Measures nothing and allocates no GPU memory.

    Example:
        >>> info().torch == torch.__version__
        True
    """
    from speedtorch import _C

    with_gpu = torch.cuda.is_available()
    count = torch.cuda.device_count() if with_gpu else 0
    gpus: list[Any] = [torch.cuda.get_device_properties(index) for index in range(count)]
    driver = query_driver([str(gpu.uuid) for gpu in gpus])
    gbps = {name: saved_link_gbps(name) for name in {gpu.name for gpu in gpus}}
    return Info(
        speedtorch=__version__,
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        driver=driver.version,
        driver_cuda=driver.cuda,
        library=_C.__file__,
        kernels=_kernels(),
        default_memory=default_kind(),
        gpus=tuple(
            _gpu(index, gpu, free, gbps[gpu.name])
            for index, (gpu, free) in enumerate(zip(gpus, driver.free_bytes, strict=True))
        ),
        host=_host(),
        host_bytes=memory_stats(),
    )


def _kernels() -> str:
    if not _ops.built_with_cuda():
        return "CPU (built without nvcc, or with SPEEDTORCH_CUDA=0)"
    try:
        _ops.check_driver()
    except RuntimeError as error:
        return f"CPU ({error})"
    return "CPU and CUDA"


def _gpu(index: int, gpu: Any, free_bytes: int | None, gbps: tuple[Any, Any]) -> Gpu:
    """Builds a Gpu from torch's device properties, whose PCI fields are in no type stub."""
    address = pci_address(gpu)
    folder = f"bus/pci/devices/{address}"
    return Gpu(
        index=index,
        name=gpu.name,
        compute_capability=f"{gpu.major}.{gpu.minor}",
        memory_bytes=gpu.total_memory,
        free_bytes=free_bytes,
        torch_allocated_bytes=torch.cuda.memory_allocated(index),
        torch_reserved_bytes=torch.cuda.memory_reserved(index),
        pci_address=address,
        numa_node=_number(sysfs_text(f"{folder}/numa_node")),
        link=Link(
            _generation(sysfs_text(f"{folder}/current_link_speed")),
            _width(sysfs_text(f"{folder}/current_link_width")),
            _generation(sysfs_text(f"{folder}/max_link_speed")),
            _width(sysfs_text(f"{folder}/max_link_width")),
            *gbps,
        ),
    )


def _host() -> Host:
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = available_bytes()
    return Host(
        processors=os.cpu_count(),
        usable_processors=len(os.sched_getaffinity(0)),
        numa_nodes=len(sysfs_numbers("devices/system/node/online")) or None,
        memory_bytes=memory_bytes,
        # A larger value means that neither the system nor a cgroup reports one.
        available_bytes=available if available <= memory_bytes else None,
    )


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _width(text: str) -> int | None:
    """Lanes; 0 and 255 are Linux's "reserved" and "unknown" (pcie_link_width in linux/pci.h)."""
    width = _number(text)
    return None if width in (0, 255) else width


def _generation(text: str) -> int | None:
    """The PCIe generation for a lane speed such as "32.0 GT/s PCIe"; None for "Unknown"."""
    speed = re.match(r"(\d+(\.\d+)?) GT/s", text)
    return _GENERATIONS.get(float(speed[1])) if speed else None


def _lines(facts: dict[str, Any], suffix: str = "", indent: str = "") -> Iterator[tuple[str, str]]:
    """Yields (label, fact) per line; a group's label has an empty fact and its facts follow."""
    for name, value in facts.items():
        if isinstance(value, dict):
            if not indent:
                yield "", ""
            yield indent + name.replace("_", " "), ""
            yield from _lines(value, "_bytes" if name.endswith("_bytes") else "", indent + "  ")
        elif isinstance(value, tuple) and value:
            yield from _lines({f"{name[:-1]} {index}": item for index, item in enumerate(value)})
        else:
            label = name.removesuffix("_bytes").removesuffix("_gbps").replace("_", " ")
            yield indent + label, _in_words(name + suffix, value)


def _in_words(name: str, value: Any) -> str:
    if value is None:
        return _MISSING.get(name, "not reported by this system")
    if value == () or (name, value) == ("numa_node", -1):
        return "none"
    if name.endswith("_gbps"):
        return f"{value:.1f} GB/s"
    if not name.endswith("_bytes"):
        return str(value)
    return text_of(value)

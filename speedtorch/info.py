"""What this installation of speedtorch is and what it runs on."""

from __future__ import annotations

import platform
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from speedtorch.memory.host_memory import memory_stats
from speedtorch.version import __version__

__all__ = ["Info", "info"]


@dataclass(frozen=True)
class Info:
    """Versions, what was built, the GPU and its link, and host memory in use; prints as a table."""

    speedtorch: str
    python: str
    torch: str
    library: str
    """Path of the library that holds the ops."""
    kernels: str
    """"CPU and CUDA", or "CPU" where nvcc was missing when the library was built."""
    gpu: str
    """Names of the GPUs that torch sees."""
    link: str
    """PCIe speed and width of the first GPU's link, as the system tells them."""
    default_memory: str
    """What `memory="auto"` means here."""
    host_bytes: dict[str, int]
    """Bytes of host memory in use, by kind."""

    def __str__(self) -> str:
        names = [field.name for field in fields(self)]
        width = max(map(len, names))
        return "\n".join(
            f"{name.replace('_', ' '):{width}}  {getattr(self, name)}" for name in names
        )


def _link_of_first_gpu() -> str:
    properties: Any = torch.cuda.get_device_properties(0)  # its PCI fields are in no stub
    domain, bus = properties.pci_domain_id, properties.pci_bus_id
    address = f"{domain:04x}:{bus:02x}:{properties.pci_device_id:02x}.0"
    folder = Path("/sys/bus/pci/devices") / address
    try:
        speed = (folder / "current_link_speed").read_text().strip()
        width = (folder / "current_link_width").read_text().strip()
    except OSError:
        return "not told by this system"
    return f"{speed} x{width}"


def info() -> Info:
    """Collects versions, build, GPU, link and memory in use; prints as a table.

    Example:
        >>> info().torch == torch.__version__
        True
    """
    from speedtorch import _C  # type: ignore[attr-defined]

    ops = torch.ops.speedtorch
    with_gpu = torch.cuda.is_available()
    with_kernels = ops.built_with_cuda()
    gpus = range(torch.cuda.device_count() if with_gpu else 0)
    without_managed = "registered" if with_gpu and with_kernels else "plain"
    return Info(
        speedtorch=__version__,
        python=platform.python_version(),
        torch=torch.__version__,
        library=_C.__file__,
        kernels="CPU and CUDA"
        if with_kernels
        else "CPU (built without nvcc, or with SPEEDTORCH_CUDA=0)",
        gpu=", ".join(map(torch.cuda.get_device_name, gpus)) or "none",
        link=_link_of_first_gpu() if with_gpu else "none",
        default_memory="managed" if ops.managed_supported() else without_managed,
        host_bytes=memory_stats(),
    )

"""What this installation of speedtorch is and what it runs on."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from speedtorch.memory.host_memory import default_kind, memory_stats
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
        width = max(map(len, vars(self)))
        return "\n".join(f"{n.replace('_', ' '):{width}}  {fact}" for n, fact in vars(self).items())


def _link_of_first_gpu() -> str:
    gpu: Any = torch.cuda.get_device_properties(0)  # its PCI fields are in no stub
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    folder = Path("/sys/bus/pci/devices", address)
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
    without_nvcc = "CPU (built without nvcc, or with SPEEDTORCH_CUDA=0)"
    return Info(
        speedtorch=__version__,
        python=platform.python_version(),
        torch=torch.__version__,
        library=_C.__file__,
        kernels="CPU and CUDA" if with_kernels else without_nvcc,
        gpu=", ".join(map(torch.cuda.get_device_name, gpus)) or "none",
        link=_link_of_first_gpu() if with_gpu else "none",
        default_memory=default_kind(),
        host_bytes=memory_stats(),
    )

"""Host memory near a GPU: on the NUMA node whose processors touch it first.

Linux takes a page from the node of the processor that touches it, and so does the CUDA driver for
managed memory that prefers no node (uvm_cpu_chunk_alloc in NVIDIA's open-gpu-kernel-modules: "by
the process policy"). A node that is full leaves the rest to others; a policy that the user has set,
as numactl does, stands.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

__all__ = ["near_gpu"]

_SYSFS = Path("/sys")


@contextmanager
def near_gpu() -> Iterator[None]:
    """This thread, and those that it starts, run on processors near the current GPU meanwhile.

    Nothing changes where one node has all processors, where none of those that the thread may use
    is near, or where the system does not say which are. Warns if the system refuses.
    """
    before = os.sched_getaffinity(0)
    near = (_near_processors() & before) or before
    if near != before:
        try:
            os.sched_setaffinity(0, near)
        except OSError as error:
            warnings.warn(f"this table may lie far from its GPU: {error}", stacklevel=4)
            near = before
    try:
        yield
    finally:
        if near != before:
            os.sched_setaffinity(0, before)


def _near_processors() -> set[int]:
    if len(_listed("devices/system/node/has_cpu")) < 2 or not torch.cuda.is_available():
        return set()
    return _listed(f"bus/pci/devices/{_pci_address()}/local_cpulist")


def _pci_address() -> str:
    """Of the current GPU, as sysfs names it."""
    gpu: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def _listed(name: str) -> set[int]:
    """The numbers in a file such as "0-3,8"; none if there is no such file."""
    file = _SYSFS / name
    spans = file.read_text().strip().split(",") if file.exists() else []
    ends = [[int(end) for end in span.split("-")] for span in spans if span]
    return {number for each in ends for number in range(each[0], each[-1] + 1)}

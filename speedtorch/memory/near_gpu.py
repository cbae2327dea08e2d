"""Host memory near a GPU: on the NUMA node of the processors that first touch its pages.

Linux allocates a page on the node of the processor that touches it first. The CUDA driver does the
same for managed memory without a preferred node (uvm_cpu_chunk_alloc in NVIDIA's
open-gpu-kernel-modules: "by the process policy"). If that node is full, other nodes provide the
remaining pages. A policy that the user has set, such as with numactl, has precedence.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from speedtorch.memory.sysfs import pci_address, sysfs_numbers

__all__ = ["near_gpu"]


@contextmanager
def near_gpu() -> Iterator[None]:
    """Runs this thread, and threads that it starts inside, on processors near the current GPU.

    Nothing changes if there is no GPU, if one node has all processors, or if no processor that the
    thread may use is known to be near. Warns if the system refuses the change.
    """
    near = before = os.sched_getaffinity(0)
    if len(sysfs_numbers("devices/system/node/has_cpu")) > 1 and torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        near = sysfs_numbers(f"bus/pci/devices/{pci_address(gpu)}/local_cpulist") & before or before
    with ExitStack() as stack:
        if near != before:
            try:
                os.sched_setaffinity(0, near)
                stack.callback(os.sched_setaffinity, 0, before)
            except OSError as error:
                warnings.warn(f"new memory may be far from the current GPU: {error}", stacklevel=4)
        yield

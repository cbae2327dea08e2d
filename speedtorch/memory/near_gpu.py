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
from contextlib import ExitStack, contextmanager

import torch

from speedtorch.memory.sysfs import listed, pci_address

__all__ = ["near_gpu"]


@contextmanager
def near_gpu() -> Iterator[None]:
    """This thread, and those that it starts, run on processors near the current GPU meanwhile.

    Nothing changes where one node has all processors, where none of those that the thread may use
    is near, or where the system does not say which are. Warns if the system refuses.
    """
    near = before = os.sched_getaffinity(0)
    if len(listed("devices/system/node/has_cpu")) > 1 and torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        near = listed(f"bus/pci/devices/{pci_address(gpu)}/local_cpulist") & before or before
    with ExitStack() as stack:
        if near != before:
            try:
                os.sched_setaffinity(0, near)
                stack.callback(os.sched_setaffinity, 0, before)
            except OSError as error:
                warnings.warn(f"this table may lie far from its GPU: {error}", stacklevel=4)
        yield

"""The command `speedtorch doctor`: checks this machine for speedtorch's requirements.

Each check is a function that receives the values to judge as arguments and returns a Finding.
`checks` reads those values from this machine; check_memory and check_folder also measure. An
exception in a check becomes a finding, too.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from tqdm import tqdm

from speedtorch.files.system_calls import calls
from speedtorch.info import Info, Link, info, peak_gbps
from speedtorch.memory import host_memory
from speedtorch.memory.byte_count import text_of
from speedtorch.memory.calibration import measure_link
from speedtorch.memory.host_memory import HostMemoryKind
from speedtorch.memory.sysfs import names_in, sysfs_text
from speedtorch.ops.functions import (
    _ops,
    pinned_gather,
    pinned_scatter,
    resident_close,
    resident_open,
    resident_slots,
    wait_for_rows,
)
from speedtorch.table.resident_rows import index_shape

__all__ = ["Check", "Finding", "checks", "run_doctor"]

_MEMORY_BYTES = 64 << 20
_FILE_BYTES = 256 << 20
_BLOCK_BYTES = 8 << 20
_ROW_BYTES = 512
_PAGE_BYTES = 4096
_RANDOM_READS = 16_384
# Odd, so that the multiples modulo 2^64 are distinct and use all bits.
_PATTERN_STEP = -7046029254386353131
# Copies of pinned memory reach about 87 % of a link; packet headers use the rest.
_LEAST_LINK_SHARE = 0.7
# Below this share of the system's available memory, the cgroup's limit is reported.
_LEAST_MEMORY_SHARE = 0.9
# The approximate speed of one hard disk.
_LEAST_FILE_GBPS = 0.2
_HUGE_PAGES = "kernel/mm/transparent_hugepage/enabled"
_REPORT = "report this line together with the output of `speedtorch info`"


@dataclass(frozen=True)
class Finding:
    """The result of a check."""

    status: Literal["ok", "note", "wrong"]
    """"note": works, but may be slow or fail in some uses; "wrong": must be changed."""
    found: str
    advice: str | None = None
    """What to change; None for "ok"."""


class Check(NamedTuple):
    """A check, with advice in case the check raises an exception."""

    name: str
    run: Callable[[], Finding]
    advice: str

    def finding(self) -> Finding:
        """Runs the check and turns an exception into a finding."""
        try:
            return self.run()
        except Exception as error:
            return Finding("wrong", f"{type(error).__name__}: {error}", self.advice)


def check_gpus(facts: Info) -> Finding:
    """Checks that torch sees the GPUs and that the library has kernels for them."""
    if facts.gpus and facts.kernels != "CPU and CUDA":
        advice = "build speedtorch with SPEEDTORCH_CUDA=1, or update NVIDIA's driver"
        return Finding("wrong", f"torch sees a GPU; kernels: {facts.kernels}", advice)
    if facts.gpus:
        names = ", ".join(gpu.name for gpu in facts.gpus)
        return Finding("ok", f"{names}; driver {facts.driver or 'version unknown'}")
    if facts.driver is None:
        return Finding("ok", "none; speedtorch runs on the CPU")
    advice = (
        "check CUDA_VISIBLE_DEVICES, that the container was started with its GPUs, and that the"
        " driver supports torch's CUDA version"
    )
    if facts.cuda is None:
        advice = "install a torch that is built with CUDA"
    return Finding("note", f"driver {facts.driver} is installed, torch sees no GPU", advice)


def check_memory(
    kind: HostMemoryKind, devices: Sequence[str], nbytes: int = _MEMORY_BYTES
) -> Finding:
    """Checks a kind of host memory: the CPU and each device write rows that the other reads."""
    if kind == "managed" and not _ops.managed_supported():
        advice = 'no action is needed; memory="auto" selects registered memory'
        return Finding("note", "not every GPU has concurrentManagedAccess", advice)
    shape = (nbytes // _ROW_BYTES, _ROW_BYTES // 8)
    table = host_memory.empty(shape, dtype=torch.int64, memory=kind)
    pattern = (torch.arange(table.numel()) * _PATTERN_STEP).view(shape)
    backwards = torch.arange(len(table)).flip(0)
    faults = []
    for device in devices:
        ids = backwards.to(device)
        table.copy_(pattern)
        read = pinned_gather(table, ids).cpu()
        # The new bits differ from the old ones, so that a write without effect is found.
        pinned_scatter(table, ids, ~pattern.to(device))
        wait_for_rows(device)
        for done, there in (("read", read), ("written", ~table)):
            if count := int((there != pattern.flip(0)).any(1).sum()):
                faults.append(f"{count:,} of {len(table):,} rows {done} by {device} differ")
    if faults:
        advice = f'do not use memory="{kind}" here; test the RAM, and update the driver'
        return Finding("wrong", "; ".join(faults), advice)
    return Finding("ok", f"{text_of(nbytes)} written and read by {', '.join(devices)}: same bits")


def check_link(link: Link, to_gpu_gbps: float, from_gpu_gbps: float) -> Finding:
    """Compares a link's measured speed with the peak of its generation and width."""
    found = f"{to_gpu_gbps:.1f} GB/s to the GPU, {from_gpu_gbps:.1f} GB/s back"
    if link.generation is None or link.width is None:
        wide = f"{peak_gbps(4, 16):.1f} GB/s for PCIe 4 x16, {peak_gbps(5, 16):.1f} for 5 x16"
        advice = f"compare with GT/s x lanes x encoding / 8 of the slot: {wide}"
        return Finding("note", f"{found}; the system does not show the link's speed", advice)
    peak = peak_gbps(link.generation, link.width)
    found += f"; PCIe {link.generation} x{link.width}: GT/s x lanes x encoding / 8 = {peak:.1f}"
    if max(to_gpu_gbps, from_gpu_gbps) > peak:
        return Finding("ok", f"{found}: not the link in use, as in a virtual machine")
    if min(to_gpu_gbps, from_gpu_gbps) < _LEAST_LINK_SHARE * peak:
        advice = "check again on an idle machine, on the GPU's NUMA node, and with iommu=pt"
        return Finding("wrong", f"{found}, of which less than {_LEAST_LINK_SHARE:.0%}", advice)
    most = (link.max_generation or link.generation, link.max_width or link.width)
    if peak < peak_gbps(*most):
        advice = "use a slot of the GPU's generation and width; check riser and BIOS settings"
        return Finding("note", f"{found}; the GPU can do PCIe {most[0]} x{most[1]}", advice)
    return Finding("ok", found)


def check_locked_memory(limit_bytes: int, gpus: int) -> Finding:
    """Checks RLIMIT_MEMLOCK, which limits RDMA but not memory that CUDA registers."""
    if limit_bytes == resource.RLIM_INFINITY:
        return Finding("ok", "no limit (RLIMIT_MEMLOCK)")
    found = f"{text_of(limit_bytes)} (RLIMIT_MEMLOCK)"
    if gpus == 0:
        return Finding("ok", f"{found}, which is not used without a GPU")
    advice = "CUDA does not use this limit; for NCCL over InfiniBand set `ulimit -l unlimited`"
    return Finding("note", found, advice)


def check_available_memory(available_bytes: int, meminfo: str) -> Finding:
    """Compares the memory available to this process with the machine's in /proc/meminfo."""
    words = {line.split()[0]: line.split()[1] for line in meminfo.splitlines() if line.strip()}
    total, free = (int(words[name]) << 10 for name in ("MemTotal:", "MemAvailable:"))
    found = f"{text_of(available_bytes)} available; the machine has {text_of(total)}"
    if available_bytes < _LEAST_MEMORY_SHARE * free:
        advice = "raise the memory limit of the container or job, or keep tables below it"
        found += f", {text_of(free)} of it available"
        return Finding("note", f"{found}: the cgroup has a limit", advice)
    return Finding("ok", found)


def check_huge_pages(setting: str) -> Finding:
    """Checks the kernel's transparent_hugepage/enabled, such as "always [madvise] never"."""
    if not setting:
        advice = "no action is needed in a sandbox, whose host chooses the page size"
        return Finding("note", "the system does not show transparent huge pages", advice)
    if "[never]" in setting:
        advice = "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        return Finding("note", f"{setting}: tables are in small pages, which is slower", advice)
    return Finding("ok", setting)


def check_kernel(release: str) -> Finding:
    """Checks whether Linux runs inside Windows (WSL)."""
    if "microsoft" not in release.lower():
        return Finding("ok", release)
    advice = 'use memory="registered", not pin_memory_; set memory= in .wslconfig for large tables'
    return Finding("note", f"{release}: WSL", advice)


def check_iommu(iommus: Sequence[str], groups: int, types: Sequence[str]) -> Finding:
    """Checks the machine's IOMMUs, the number of groups, and the types of the GPUs' groups."""
    if not iommus and not groups:
        return Finding("ok", "none is visible")
    found = f"{', '.join(iommus) or 'no IOMMU'}, {groups} groups"
    if not types:
        return Finding("ok", f"{found}; there is no GPU")
    found += f"; the GPUs' groups: {', '.join(kind or 'unknown' for kind in types)}"
    if all(kind == "identity" for kind in types):
        return Finding("ok", found)
    advice = "if a link is slow or copies between GPUs hang, boot with iommu=pt"
    return Finding("note", found, advice)


def check_folder(folder: str, nbytes: int) -> Finding:
    """Writes and reads a nameless file, which the kernel deletes however the check ends."""
    block = os.urandom(min(nbytes, _BLOCK_BYTES))
    into = bytearray(len(block))
    read_s, differ, count = 0.0, 0, nbytes // len(block)
    with tempfile.TemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        for _ in range(count):
            file.write(block)
        file.flush()
        calls.fsync(file.fileno())
        write_s = time.perf_counter() - start
        # Empties the page cache before the read; tmpfs and some network file systems ignore this.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        for _ in range(count):
            start = time.perf_counter()
            length = file.readinto(into)
            read_s += time.perf_counter() - start
            differ += length != len(block) or into != block
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        random_reads = _random_reads(file.fileno(), nbytes)
    if differ:
        advice = "do not store tables or checkpoints there; check the disk and the kernel's log"
        return Finding("wrong", f"{differ} of {count} blocks differ when read again", advice)
    speeds = [count * len(block) / 1e9 / max(seconds, 1e-9) for seconds in (write_s, read_s)]
    found = f"write {speeds[0]:.2f} GB/s with fsync, read {speeds[1]:.2f} GB/s, {text_of(nbytes)}"
    if random_reads is not None:
        found += f"; {random_reads:,.0f} random reads of 4 KiB a second"
    if min(speeds) < _LEAST_FILE_GBPS:
        advice = 'use a local SSD for memory="file" and for checkpoints of large tables'
        return Finding("note", found, advice)
    return Finding("ok", found)


def _random_reads(descriptor: int, nbytes: int) -> float | None:
    """Measures random reads of pages, as a table with resident rows reads; pages per second.

    Returns None for a file of less than a page.
    """
    pages = nbytes // _PAGE_BYTES
    if not (count := min(pages, _RANDOM_READS)):
        return None
    slots = torch.empty(count, _PAGE_BYTES, dtype=torch.uint8)
    handle = resident_open(
        slots, torch.empty(index_shape(count), dtype=torch.uint8), descriptor, pages
    )
    try:
        ids = torch.randperm(pages)[:count]
        start = time.perf_counter()
        _, failure = resident_slots(handle, ids, 0, 0)
        seconds = time.perf_counter() - start
    finally:
        resident_close(handle)
    if error := int(failure[0]):
        raise OSError(error, os.strerror(error))
    return count / max(seconds, 1e-9)


def _link(index: int) -> Finding:
    with torch.cuda.device(index):
        gbps = measure_link()
    return check_link(info().gpus[index].link, *gbps)  # read at once: an idle link slows down


def _available_memory() -> Finding:
    return check_available_memory(host_memory.available_bytes(), Path("/proc/meminfo").read_text())


def _iommu() -> Finding:
    folders = [f"bus/pci/devices/{gpu.pci_address}/iommu_group" for gpu in info().gpus]
    types = [sysfs_text(f"{folder}/type") for folder in folders]
    return check_iommu(names_in("class/iommu"), len(names_in("kernel/iommu_groups")), types)


def checks(folder: str | None = None) -> list[Check]:
    """The checks for this machine, with a check of `folder` if given."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    with_kernels = gpus > 0 and _ops.built_with_cuda()
    devices = ["cpu", *(f"cuda:{index}" for index in range(gpus if with_kernels else 0))]
    kinds = [k for k in host_memory.HOST_KINDS if k == "plain" or (with_kernels and k != "auto")]
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    less = "free host memory, update NVIDIA's driver, or use another kind until this check is ok"
    free = "free GPU memory (nvidia-smi shows which process uses it) and repeat the check"
    found = [
        Check("gpus", lambda: check_gpus(info()), _REPORT),
        *(Check(f"{kind} memory", partial(check_memory, kind, devices), less) for kind in kinds),
        *(Check(f"link of cuda:{at}", partial(_link, at), free) for at in range(gpus)),
        Check("available memory", _available_memory, _REPORT),
        Check("locked memory", partial(check_locked_memory, locked, gpus), _REPORT),
        Check("huge pages", partial(check_huge_pages, sysfs_text(_HUGE_PAGES)), _REPORT),
        Check("kernel", partial(check_kernel, platform.release()), _REPORT),
        Check("iommu", _iommu, _REPORT),
    ]
    if folder is not None:
        advice = f"choose a writable folder with {text_of(_FILE_BYTES)} free"
        found.append(Check("folder", partial(check_folder, folder, _FILE_BYTES), advice))
    return found


def run_doctor(folder: str | None = None, *, as_json: bool = False) -> int:
    """Runs all checks and prints each result with its advice, or a JSON list (`as_json`).

    The objects of the list have the keys check, status, found and advice. The advice is null if the
    status is "ok".
    Returns the exit status: 1 if something is wrong, 0 otherwise.
    """
    all_checks = checks(folder)
    width = max(len(check.name) for check in all_checks)
    objects = []
    with tqdm(all_checks, leave=False, unit="check", disable=None) as progress:  # on a terminal
        for check in progress:
            progress.set_description(check.name)
            finding = check.finding()
            objects.append({"check": check.name} | asdict(finding))
            if not as_json:
                found = " ".join(finding.found.split())  # CUDA's messages have several lines
                tqdm.write(f"{finding.status:5}  {check.name:{width}}  {found}")
                if finding.advice is not None:
                    tqdm.write(f"{'':{width + 9}}{finding.advice}")
    if as_json:
        print(json.dumps(objects, indent=2))
    return int(any(finding["status"] == "wrong" for finding in objects))

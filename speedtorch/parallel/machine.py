"""The total host memory that the ranks on one machine need."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from speedtorch.memory import host_memory
from speedtorch.parallel.ranks import Ranks

__all__ = ["check_host_memory", "this_machine"]

_BOOT = Path("/proc/sys/kernel/random/boot_id")


class _Report(NamedTuple):
    """The message that each rank sends to the other ranks; `needed` and `available` are bytes."""

    machine: tuple[str, str]
    needed: int
    available: int | None
    """None if the check is off."""


def this_machine() -> tuple[str, str]:
    """The host name, and the kernel's boot id because hosts may have equal names.

    Containers of one kernel count as one machine if they have the same host name.
    """
    boot = ""
    with suppress(OSError):  # not every system has the file
        boot = _BOOT.read_text().strip()
    return socket.gethostname(), boot


def check_host_memory(ranks: Ranks, needed: int) -> None:
    """Raises MemoryError on all ranks if the ranks of some machine need more memory than it has.

    Args:
        ranks: The ranks, all of which call this.
        needed: Bytes of host memory that this rank is about to allocate.
    """
    available = host_memory.available_bytes() if host_memory.is_checked() else None
    machines: dict[tuple[str, str], list[_Report]] = {}
    for report in ranks.all_gather(_Report(this_machine(), needed, available)):
        machines.setdefault(report.machine, []).append(report)
    for (host, _), reports in machines.items():
        total = sum(report.needed for report in reports)
        # The limits of some ranks may be lower (cgroups, for example).
        limits = [report.available for report in reports if report.available is not None]
        least = min(limits, default=total)
        if total > least:
            raise MemoryError(
                f"shard: the rows of {len(reports)} ranks on host {host!r} need {total:,} bytes of"
                f" host memory, but only {least:,} bytes are available. Free memory, use fewer or"
                " narrower rows, or use more machines. SPEEDTORCH_MEMORY_CHECK=0 skips this check."
            )

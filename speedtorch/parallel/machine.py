"""The total host memory that the ranks on one machine need."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

from speedtorch.memory import host_memory
from speedtorch.parallel.ranks import Ranks

__all__ = ["check_host_memory", "this_machine"]

_BOOT = Path("/proc/sys/kernel/random/boot_id")


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
        ranks: The ranks, all of which must call this.
        needed: Bytes of host memory that this rank is about to allocate.
    """
    available = host_memory.available_bytes() if host_memory.is_checked() else None
    machines: dict[tuple[str, str], list[tuple[int, int | None]]] = {}
    for machine, nbytes, limit in ranks.all_gather((this_machine(), needed, available)):
        machines.setdefault(machine, []).append((nbytes, limit))
    for (host, _), reports in machines.items():
        total = sum(nbytes for nbytes, _ in reports)
        # The limits of some ranks may be lower (cgroups, for example), or their check is off.
        least = min((limit for _, limit in reports if limit is not None), default=total)
        if total > least:
            raise MemoryError(
                f"shard: the rows of {len(reports)} ranks on host {host!r} need {total:,} bytes of"
                f" host memory, but only {least:,} bytes are available. Free memory, use fewer or"
                " narrower rows, or use more machines. SPEEDTORCH_MEMORY_CHECK=0 on all of these"
                " ranks skips this check."
            )

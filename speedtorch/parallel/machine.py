"""The total host memory that the ranks on one machine need."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from speedtorch.memory import host_memory
from speedtorch.parallel.ranks import Ranks

__all__ = ["refuse_if_short", "this_machine"]

_BOOT = Path("/proc/sys/kernel/random/boot_id")


class _Need(NamedTuple):
    """The message that each rank sends to the others; `needed` and `available` are bytes."""

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


def refuse_if_short(ranks: Ranks, needed: int) -> None:
    """Raises MemoryError on all ranks if the ranks of some machine need more memory than it has.

    Args:
        ranks: The ranks, all of which call this.
        needed: Bytes of host memory that this rank is about to allocate.
    """
    available = host_memory.available_bytes() if host_memory.is_checked() else None
    machines: dict[tuple[str, str], list[_Need]] = {}
    for each in ranks.all_gather(_Need(this_machine(), needed, available)):
        machines.setdefault(each.machine, []).append(each)
    for (host, _), needs in machines.items():
        total = sum(each.needed for each in needs)
        # The limits of some ranks may be lower (cgroups, for example).
        least = min((each.available for each in needs if each.available is not None), default=total)
        if total > least:
            raise MemoryError(
                f"shard: the rows of {len(needs)} ranks on {host!r} need {total:,} bytes of host"
                f" memory there together; available are {least:,}: free memory, use fewer or"
                " narrower rows, or more machines, or set SPEEDTORCH_MEMORY_CHECK=0 to try all the"
                " same"
            )

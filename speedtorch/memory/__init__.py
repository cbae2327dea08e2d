"""Host memory: kinds, where a table's bytes are placed, what moving a row costs."""

from speedtorch.memory.host_memory import (
    available_bytes,
    check_owner,
    empty,
    memory_kind,
    memory_stats,
    pin_memory_,
    release,
    unpin_memory_,
)

__all__ = [
    "available_bytes",
    "check_owner",
    "empty",
    "memory_kind",
    "memory_stats",
    "pin_memory_",
    "release",
    "unpin_memory_",
]

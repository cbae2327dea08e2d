"""Train on rows that live in host memory: tables larger than the GPU, exchanged at the speed of the link."""

from speedtorch.info import info
from speedtorch.memory import empty, memory_kind, memory_stats, pin_memory_, unpin_memory_
from speedtorch.ops import (
    optimizer_state_swap,
    pinned_gather,
    pinned_scatter,
    plan_rows,
    synchronize,
)
from speedtorch.table import HostTable

__all__ = [
    "HostTable",
    "empty",
    "info",
    "memory_kind",
    "memory_stats",
    "optimizer_state_swap",
    "pin_memory_",
    "pinned_gather",
    "pinned_scatter",
    "plan_rows",
    "synchronize",
    "unpin_memory_",
]

# TEMPORARY while the legacy package is being written
import importlib.util as _u
if _u.find_spec("speedtorch.legacy.model_factory"):
    from speedtorch import legacy
    from speedtorch.legacy import *
    __all__ += getattr(legacy, "__all__", [])

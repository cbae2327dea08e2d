"""Host memory: its kinds, the placement of a table's bytes, and the cost to copy a row."""

from speedtorch.memory import host_memory
from speedtorch.memory.host_memory import *  # noqa: F403

__all__ = host_memory.__all__

"""Host memory: kinds, where a table's bytes are placed, what moving a row costs."""

from speedtorch.memory import host_memory
from speedtorch.memory.host_memory import *  # noqa: F403

__all__ = host_memory.__all__

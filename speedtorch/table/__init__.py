"""HostTable: rows and their optimizer state in host memory, stored as records."""

from speedtorch.table.host_table import HostTable

__all__ = ["HostTable"]

"""HostTable: rows with their state, as records."""

from speedtorch.table.host_table import HostTable

__all__ = ["HostTable"]

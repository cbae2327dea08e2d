"""Rows that are sharded among processes, each of which trains its shard."""

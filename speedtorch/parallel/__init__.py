"""Rows that are shared out among processes, each of which trains its own."""

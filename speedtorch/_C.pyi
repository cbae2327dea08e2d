class Turn:
    """A lock that its thread may take again, and that goes to threads in the order they ask."""

    def __enter__(self) -> None: ...
    def __exit__(self, kind: object, error: object, trace: object) -> None: ...
    def unite(self, other: Turn) -> None:
        """Makes both one turn for ever. RuntimeError unless this thread has both."""

from collections.abc import Sequence

class NumbersHandle:
    """Names a copy of numbers from a GPU to the CPU, and frees the copy's memory with the object.

    An op queues the copy under number(). A forked child frees nothing.
    """

    def number(self) -> int:
        """The name of the copy for ops."""

    def read(self) -> list[int]:
        """Waits for the copy and returns the numbers. RuntimeError if no copy was queued."""

    def is_complete(self) -> bool:
        """Whether read() would not wait. RuntimeError if no copy was queued."""

class RankWords:
    """Numbers from each rank to each rank, in a file of `begin + 16 * size**2 * width` bytes.

    `width` is the maximum count of numbers for a rank in one exchange. Raises OSError if the file
    cannot be mapped or locked, ValueError if it has another size.
    """

    def __new__(cls, file: int, begin: int, width: int, rank: int, size: int) -> RankWords: ...
    def exchange(self, sent: Sequence[Sequence[int]], seconds: float) -> list[list[int]] | None:
        """See SharedMemoryBarrier.exchange. ValueError if `sent` is not as described there."""

    def abort(self) -> None:
        """See SharedMemoryBarrier.abort."""

class RowLock:
    """A reentrant lock that serves threads in the order of their requests."""

    def __enter__(self) -> None: ...
    def __exit__(self, kind: object, error: object, trace: object) -> None: ...
    def merge(self, other: RowLock) -> None:
        """Merges both locks into one. Raises RuntimeError unless this thread owns both."""

class RowLocks:
    """Acquires several locks together. A thread that waits for one of them owns none of them."""

    def __new__(cls, *locks: RowLock) -> RowLocks: ...
    def __enter__(self) -> None: ...
    def __exit__(self, kind: object, error: object, trace: object) -> None: ...

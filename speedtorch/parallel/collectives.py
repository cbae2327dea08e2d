"""Collectives: processes that work in stages; an Exception on one process raises on all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar, cast

__all__ = ["Collectives", "SingleProcess", "run_on_all", "run_on_first"]

_Value = TypeVar("_Value")


class Collectives(Protocol):
    """Processes that act together, such as to save; this process has the number `rank`."""

    rank: int
    size: int

    def all_gather(self, value: Any) -> list[Any]:
        """All-gathers a value; all processes must call this."""

    def broadcast(self, value: Any) -> Any:
        """Broadcasts the first process's value; all processes must call this."""
        return self.all_gather(value)[0]


class SingleProcess(Collectives):
    """One process."""

    rank, size = 0, 1

    def all_gather(self, value: Any) -> list[Any]:
        """See Collectives.all_gather."""
        return [value]


def run_on_all(
    ranks: Collectives,
    stage: Callable[[], _Value],
    call: str = "save",
    error_of: Callable[[str], Exception] = RuntimeError,
    gather: Callable[[Any], list[Any]] | None = None,
) -> list[_Value]:
    """Runs a stage on all ranks, and all-gathers the results (or calls `gather` instead).

    Raises the error of this rank's stage, or `error_of(text with call)` if another rank's raises.
    """
    gather = gather or ranks.all_gather
    try:
        value = stage()
    except Exception as error:
        with suppress(Exception):  # the first error is the one to raise
            gather((None, f"{type(error).__name__}: {error}"))
        raise
    results = gather((value, None))
    for rank, (_, text) in enumerate(results):
        if text is not None:
            raise error_of(f"{call}: rank {rank} raises {text}")
    return [value for value, _ in results]


def run_on_first(ranks: Collectives, stage: Callable[[], _Value]) -> _Value:
    """Runs a stage on the first rank only and broadcasts its result; raises as run_on_all()."""
    own: Callable[[], Any] = (lambda: None) if ranks.rank else stage
    (value,) = run_on_all(ranks, own, gather=lambda result: [ranks.broadcast(result)])
    return cast(_Value, value)

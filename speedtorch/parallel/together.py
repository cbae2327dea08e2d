"""Together: processes that work in stages; an error of one process raises on all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

__all__ = ["Alone", "Together", "agreed", "by_first"]

_Value = TypeVar("_Value")


class Together(Protocol):
    """The processes that write a checkpoint; this process has the number `rank`."""

    rank: int
    size: int

    def every(self, value: Any) -> list[Any]:
        """All-gathers a value; all processes call this."""

    def agreed(self, value: Any) -> Any:
        """Broadcasts the first process's value; all processes call this."""
        return self.every(value)[0]


class Alone(Together):
    """One process."""

    rank, size = 0, 1

    def every(self, value: Any) -> list[Any]:
        """As Together.every."""
        return [value]


def agreed(
    ranks: Together,
    stage: Callable[[], _Value],
    call: str = "save",
    error_of: Callable[[str], Exception] = RuntimeError,
    tell: Callable[[Any], list[Any]] | None = None,
) -> list[_Value]:
    """Runs a stage on all ranks, and all-gathers the results (or calls `tell` instead).

    Raises the error of this rank's stage, or `error_of(text with call)` if another rank's raises.
    """
    tell = tell or ranks.every
    try:
        given = stage()
    except Exception as error:
        with suppress(Exception):  # the first error is the one to raise
            tell((None, f"{type(error).__name__}: {error}"))
        raise
    told = tell((given, None))
    for rank, (_, text) in enumerate(told):
        if text is not None:
            raise error_of(f"{call}: rank {rank} raises {text}")
    return [value for value, _ in told]


def by_first(ranks: Together, stage: Callable[[], _Value]) -> _Value:
    """Runs a stage on the first rank only and broadcasts its result; raises as agreed()."""
    own: Callable[[], Any] = (lambda: None) if ranks.rank else stage
    given: list[_Value] = agreed(ranks, own, tell=lambda said: [ranks.agreed(said)])
    return given[0]

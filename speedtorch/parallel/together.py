"""Together: processes that do something in stages; an error of one of them raises on all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

__all__ = ["Alone", "Together", "agreed", "by_first"]

_Value = TypeVar("_Value")


class Together(Protocol):
    """The processes that write a generation; this one has the number `rank`."""

    rank: int
    size: int

    def every(self, value: Any) -> list[Any]:
        """What each of them says, by rank: all call it."""

    def agreed(self, value: Any) -> Any:
        """What the first one says: all call it."""
        return self.every(value)[0]


class Alone(Together):
    """One process."""

    rank, size = 0, 1

    def every(self, value: Any) -> list[Any]:
        """As of Together."""
        return [value]


def agreed(
    ranks: Together,
    stage: Callable[[], _Value],
    call: str = "save",
    error_of: Callable[[str], Exception] = RuntimeError,
    tell: Callable[[Any], list[Any]] | None = None,
) -> list[_Value]:
    """What each rank gives, by rank, or what `tell` lets ranks tell; all call it, within `call`.

    Raises what this rank's stage raises, and `error_of` a text if another's does.
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
    """What the first rank gives, which alone makes the call; errors as of agreed()."""
    own: Callable[[], Any] = (lambda: None) if ranks.rank else stage
    given: list[_Value] = agreed(ranks, own, tell=lambda said: [ranks.agreed(said)])
    return given[0]

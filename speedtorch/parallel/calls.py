"""Call: a rank's next exchange as a number, which the rank sends before the exchange.

Ranks at different exchanges would mix up rows and gradients, or wait forever. Each rank therefore
sends its calls first, and all ranks raise if two calls differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from speedtorch.step.disagreement import DisagreementError

__all__ = ["END", "Call", "Kind", "are_counts", "disagreement"]

_NUMBERED = 1 << 40  # more than any count of rows or lookups


class Kind(IntEnum):
    """The data that ranks exchange."""

    COUNTS = 0
    """The number of rows that a lookup requests of a rank."""
    COUNTS_AHEAD = 1
    """The same for an announced or prefetched lookup."""
    OTHER_IDS = 2
    """Nothing: a lookup of other ids than the announced and prefetched ones follows."""
    IDS = 3
    """The ids of the last batch that prefetch() has planned."""
    ROWS = 4
    """Rows of a lookup whose ids were sent before."""
    BLOCKS = 5
    """Ids of a lookup of rows with a capacity."""
    BLOCKS_AHEAD = 6
    """The same for an announced or prefetched lookup."""
    GRADIENTS = 7
    """Gradients of a lookup's rows."""
    FULL = 8
    """All rows, which the first rank saves."""
    NONE = 9
    """Nothing, because a loop of prefetch() has an error of its own."""
    STEP = 10
    """Nothing: an optimizer is about to step the rows."""
    NO_STEP = 11
    """Nothing: an optimizer has an error of its own instead."""
    PACE = 12
    """The duration of steps in a loop of prefetch()."""
    REPLAY = 13
    """Nothing: a CUDA graph with a step's lookups is about to be replayed."""
    END = 14
    """Nothing: no further call follows."""


class Call(NamedTuple):
    """One exchange of a rank."""

    kind: Kind
    table: int
    """The table's number, the same on all ranks."""
    lookup: int = 0
    """The lookup's number since the last error, from 0, for IDS, ROWS and GRADIENTS.

    For REPLAY, the number of the graph among the table's captures, from 1. For PACE, the duration
    that ranks compare. For other kinds 0.
    """

    @property
    def code(self) -> int:
        """The call as an int64; callers may add up to 2 ** 40 - 1 for counts."""
        return (self.table * len(Kind) + self.kind) * _NUMBERED + self.lookup

    @classmethod
    def of(cls, code: int) -> Call:
        """The call of a code, without the number of counts or PACE."""
        place, number = divmod(code, _NUMBERED)
        table, kind = divmod(place, len(Kind))
        return cls(Kind(kind), table, 0 if kind in _WITH_NUMBER else number)

    def text(self, tables: Sequence[str]) -> str:
        """The call as text, with the table's name."""
        table = tables[self.table] if self.table < len(tables) else f"table {self.table}"
        return {
            Kind.COUNTS: f"a new lookup of {table}",
            Kind.COUNTS_AHEAD: f"announce() or prefetch() of {table}",
            Kind.OTHER_IDS: f"a lookup of {table} with other ids than announced or prefetched",
            Kind.BLOCKS: f"a new lookup of {table} in training",
            Kind.BLOCKS_AHEAD: f"announce() or prefetch() of {table} with a capacity",
            Kind.IDS: f"the last batch of prefetch() of {table}",
            Kind.ROWS: f"lookup {self.lookup} of {table}, which was announced or prefetched",
            Kind.GRADIENTS: f"the backward of lookup {self.lookup} of {table}",
            Kind.FULL: f"full_state_dict() of {table}",
            Kind.NONE: f"an error in prefetch() of {table}",
            Kind.PACE: f"a step of prefetch() of {table} whose duration ranks compare",
            Kind.STEP: f"optimizer.step() of {table}",
            Kind.NO_STEP: f"an error in optimizer.step() of {table}",
            Kind.REPLAY: f"a step of graphed(), CUDA graph {self.lookup} of {table}",
            Kind.END: "no further lookup, announce() or prefetch()",
        }[self.kind]


_WITH_NUMBER = (Kind.COUNTS, Kind.COUNTS_AHEAD, Kind.PACE)

END = Call(Kind.END, 0).code
"""The code that follows the codes of the calls that ranks compare."""


def are_counts(numbers: Sequence[int]) -> bool:
    """Whether numbers are valid counts: from -1 (bad ids) to 2 ** 40 - 2."""
    return min(numbers) >= -1 and max(numbers) < _NUMBERED - 1


def disagreement(name: str, calls: Sequence[Call], tables: Sequence[str]) -> DisagreementError:
    """The error about ranks at different exchanges."""
    ranks: dict[Call, list[int]] = {}
    for rank, call in enumerate(calls):
        ranks.setdefault(call, []).append(rank)
    texts = ", ".join(f"ranks {group} are at {call.text(tables)}" for call, group in ranks.items())
    return DisagreementError(
        f"{name}: {texts}. No row has changed. All ranks must make the same lookups, backward"
        " passes, optimizer steps, steps of graphed() and calls of full_state_dict() in the same"
        " order. A rank without data must look up an empty batch. All ranks must look up announced"
        " and prefetched tensors in the order of announce() and prefetch(), or all must look up"
        " other tensors."
    )

"""AccessPredictor: predicts the next calls from the previous order of calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from math import inf
from typing import Generic, TypeVar

__all__ = ["AccessPredictor"]

Call = TypeVar("Call", bound=Hashable)
Key = TypeVar("Key", bound=Hashable)

HORIZON = 256  # the most calls predicted ahead


class AccessPredictor(Generic[Call, Key]):
    """Predicts that two successive calls are followed by the call that last followed them.

    A predicted call costs a few operations. Any other call rebuilds up to `HORIZON` predictions.
    `keys` returns the objects that a call uses.
    """

    def __init__(self, keys: Callable[[Call], Iterable[Key]]) -> None:
        self._keys = keys
        self._next: dict[tuple[Call | None, Call], Call] = {}
        self._before: Call | None = None
        self._last: Call | None = None
        self._calls = 0
        self.expected: deque[Call] = deque()
        """The next calls."""
        self._end: tuple[Call | None, Call] | None = None
        """The last two expected calls."""
        self._uses: dict[Key, deque[int]] = {}
        """The numbers of the expected calls that use each key."""

    def note(self, call: Call) -> None:
        """Records a call, and extends the expected calls."""
        if self._last is not None:
            self._next[self._before, self._last] = call
        self._before, self._last = self._last, call
        self._calls += 1
        if self.expected and self.expected[0] == call:
            self.expected.popleft()
            for key in self._keys(call):
                self._uses[key].popleft()
        else:
            self.expected.clear()
            self._uses.clear()
            self._end = self._before, call
        while len(self.expected) < HORIZON and self._end is not None:
            if (found := self._next.get(self._end)) is None:
                return
            # Uses first: an error before the append then leaves extra uses, never missing ones.
            for key in self._keys(found):
                self._uses.setdefault(key, deque()).append(self._calls + len(self.expected) + 1)
            self.expected.append(found)
            self._end = self._end[1], found

    def next_use(self, key: Key) -> float:
        """Number of calls until a key is used next; inf if no expected call uses the key."""
        uses = self._uses.get(key)
        return uses[0] - self._calls if uses else inf

"""Parts of batches by their keys."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from speedtorch.step.step import KnownParts


def batch_of(*keys: str) -> Any:
    return SimpleNamespace(parts=SimpleNamespace(keys=lambda: keys))


def test_batches_that_are_added_again_are_there_once() -> None:
    known, first, second = KnownParts(), batch_of("a", "b"), batch_of("b")
    for batches in ([first], [first], [first, second], [first], [first, second]):
        known.add(batches)
    assert known == {"a": [(0, 0)], "b": [(0, 1), (1, 0)]} and known.count == 2

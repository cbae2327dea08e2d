"""Parts of batches by their keys."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import speedtorch
from speedtorch.plan.planned_batch import SeenIds
from speedtorch.step.step import KnownParts


def batch_of(*keys: str) -> Any:
    return SimpleNamespace(parts=SimpleNamespace(keys=lambda: keys))


def test_batches_that_are_added_again_are_there_once() -> None:
    known, first, second = KnownParts(), batch_of("a", "b"), batch_of("b")
    for batches in ([first], [first], [first, second], [first], [first, second]):
        known.add(batches)
    assert known == {"a": [(0, 0)], "b": [(0, 1), (1, 0)]} and known.count == 2


@pytest.mark.parametrize("announces", [False, True])
def test_a_lookup_is_compared_with_few_of_many_earlier_ones(
    announces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[Tensor] = []
    matches = SeenIds.matches
    monkeypatch.setattr(
        SeenIds, "matches", lambda seen, ids: compared.append(ids) or matches(seen, ids)
    )
    module = speedtorch.Embedding(10_000, 2, device="cpu")
    lookups = [torch.randint(10_000, (4,)) for _ in range(60)]
    if announces:
        module.announce(*lookups)
    lookups[30] = lookups[3].clone()  # one that comes again
    torch.stack([module(ids).sum() for ids in lookups]).sum().backward()
    assert len(compared) < 3 * len(lookups) + 40

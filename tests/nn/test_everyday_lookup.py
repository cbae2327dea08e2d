"""An everyday lookup stays short: few calls of Python and of ops, as the host's time counts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from dispatched_ops import Ops
from torch import Tensor, nn, optim

import speedtorch

PACKAGE = str(Path(speedtorch.__file__).parent)
MOST_CALLS, MOST_FILES = 43, 15


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam], ids=lambda kind: kind.__name__)
def test_a_lookup_of_a_plain_loop_makes_few_calls_in_few_files(
    kind: type[optim.Optimizer],
) -> None:
    embedding = speedtorch.Embedding(1000, 8)
    optimizer = kind(embedding.parameters(), lr=0.1)  # type: ignore[call-arg]
    speedtorch.attach(optimizer, embedding)
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE):
            calls.append((file.removeprefix(PACKAGE), frame.f_code.co_name))

    for step in range(3):
        ids = torch.randint(1000, (64,))
        sys.setprofile(note if step == 2 else None)
        try:
            rows = embedding(ids)
        finally:
            sys.setprofile(None)
        optimizer.zero_grad()
        rows.sum().backward()
        optimizer.step()
    assert len({file for file, _ in calls}) <= MOST_FILES
    assert 20 < len(calls) <= MOST_CALLS, calls


KEYS = [f"t{number}" for number in range(26)]
OPS = ["load_batch"]


def embedding(padding: int | None = None) -> tuple[nn.Module, Callable[[], Any]]:
    made = speedtorch.Embedding(1000, 8, padding_idx=padding)
    return made, lambda: torch.randint(1000, (64,))


def bags(*shape: int) -> tuple[nn.Module, Callable[[], Any]]:
    tables = [speedtorch.EmbeddingBagConfig(1000, 8, key) for key in KEYS]
    made = speedtorch.EmbeddingBagCollection(tables)
    return made, lambda: {key: torch.randint(1000, shape) for key in KEYS}


LOOKUPS = {
    "plain": (embedding, [*OPS, "embedding"]),
    "padding": (lambda: embedding(3), [*OPS, "embedding"]),
    "dict of ids": (lambda: bags(64), ["cat", "table_ids", *OPS, "pool_rows"]),
    "dict of bags": (lambda: bags(64, 3), ["cat", "table_ids", *OPS, "pool_rows"]),
}


@pytest.mark.parametrize(("make", "expected"), LOOKUPS.values(), ids=LOOKUPS)
def test_a_lookup_of_a_plain_loop_makes_few_ops(make: Any, expected: list[str]) -> None:
    """Also after others, whose ids it is not compared with."""
    module, batch = make()
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        ids = batch()
        with Ops() as ops:
            found = module(ids)
        rows: Tensor = found if isinstance(found, Tensor) else found.values()
        optimizer.zero_grad()
        rows.sum().backward()
        optimizer.step()
    assert ops.names == expected

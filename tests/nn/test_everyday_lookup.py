"""An everyday step stays short: few calls of Python and of ops, as the host's time counts."""

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
MOST_CALLS = {"zero_grad": 17, "lookup": 42, "backward": 10, "step": 72}
MOST_FILES = 15


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam], ids=lambda kind: kind.__name__)
def test_a_step_of_a_plain_loop_makes_few_calls(kind: type[optim.Optimizer]) -> None:
    embedding = speedtorch.Embedding(1000, 8)
    optimizer = kind(embedding.parameters(), lr=0.1)  # type: ignore[call-arg]
    speedtorch.attach(optimizer, embedding)
    calls: dict[str, list[str]] = {}

    def counted(phase: str, work: Callable[[], Any]) -> Any:
        calls[phase] = []

        def note(frame: FrameType, event: str, _: object) -> None:
            file = frame.f_code.co_filename
            if event == "call" and file.startswith(PACKAGE):
                calls[phase].append(file.removeprefix(PACKAGE))

        sys.setprofile(note)
        try:
            return work()
        finally:
            sys.setprofile(None)

    for _ in range(3):
        counted("zero_grad", optimizer.zero_grad)
        ids = torch.randint(1000, (64,))
        rows = counted("lookup", lambda ids=ids: embedding(ids))
        counted("backward", rows.sum().backward)
        counted("step", optimizer.step)
    assert len(set(calls["lookup"])) <= MOST_FILES
    made = {phase: len(files) for phase, files in calls.items()}
    assert all(0 < made[phase] <= most for phase, most in MOST_CALLS.items()), made


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

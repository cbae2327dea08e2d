"""An everyday lookup stays short: few calls of Python in few files, as the host's time counts."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import optim

import speedtorch

PACKAGE = str(Path(speedtorch.__file__).parent)
MOST_CALLS, MOST_FILES = 48, 13


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

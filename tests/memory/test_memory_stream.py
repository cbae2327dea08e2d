"""MemoryStream: a change of the current stream is ordered, on every machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from speedtorch.memory import side_stream
from speedtorch.memory.side_stream import MemoryStream


class RecordedStream:
    """A stream that notes for which streams it waits."""

    def __init__(self) -> None:
        self.waited: list[RecordedStream] = []

    def wait_stream(self, other: RecordedStream) -> None:
        self.waited.append(other)


@pytest.mark.parametrize("captures", [False, True])
def test_another_stream_waits_for_the_last_one_unless_it_is_captured(
    captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = RecordedStream(), RecordedStream()
    current: list[Any] = [first]
    monkeypatch.setattr(side_stream, "current_stream", lambda _: current[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    memory = MemoryStream(torch.device("cuda", 0))
    for stream in (first, first, second, second, first):
        current[0] = stream
        memory.follow(list)
    assert second.waited == ([] if captures else [first])
    assert first.waited == ([] if captures else [second])

"""What a table's memory waits for."""

from __future__ import annotations

import pytest

from speedtorch.memory import placement
from speedtorch.memory.placement import make_placement


@pytest.mark.parametrize("call", ["settle", "flush"])
def test_the_gpus_work_on_the_bytes_is_waited_for(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[object] = []
    monkeypatch.setattr(placement, "wait_for_rows", waits.append)
    getattr(make_placement(8, 1, "plain", None, None), call)()
    assert waits == [None]

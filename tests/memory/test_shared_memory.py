"""First values of fields in shared memory."""

from __future__ import annotations

import pytest

from speedtorch.memory.shared_memory import SharedMemory


def test_a_field_is_filled_once_and_never_after_values_were_given() -> None:
    memory, filled = SharedMemory.made(8, fields=2), list[str]()
    memory.note_given(1)
    assert memory.begin(0, b"zeros", lambda: filled.append("first"))
    assert memory.begin(0, b"zeros", lambda: filled.append("again"))
    assert not memory.begin(0, b"ones", lambda: filled.append("otherwise"))
    assert memory.begin(1, b"zeros", lambda: filled.append("given"))
    assert filled == ["first"]
    memory.close()


@pytest.mark.parametrize("fields", [1, 3])
def test_words_of_fields_are_apart(fields: int) -> None:
    memory = SharedMemory.made(8, fields)
    for field in range(fields):
        assert memory.begin(field, b"%d" % field, lambda: None)
    assert all(memory.begin(field, b"%d" % field, lambda: None) for field in range(fields))
    assert memory.version == 0
    memory.close()

"""First values of fields in shared memory, and the version that writers count up."""

from __future__ import annotations

import errno
import os
import select
from contextlib import suppress

import pytest

from speedtorch.memory.shared_memory import SharedMemory


def test_a_field_is_filled_once_and_never_after_values_were_given() -> None:
    memory, filled = SharedMemory.create(8, fields=2), list[str]()
    memory.mark_loaded(1)
    assert memory.begin(0, b"zeros", lambda: filled.append("first"))
    assert memory.begin(0, b"zeros", lambda: filled.append("again"))
    assert not memory.begin(0, b"ones", lambda: filled.append("otherwise"))
    assert memory.begin(1, b"zeros", lambda: filled.append("given"))
    assert filled == ["first"]
    memory.close()


def test_memory_is_made_where_linux_knows_no_seal_of_execution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make, tried = os.memfd_create, list[int]()

    def make_before_linux_6_3(name: str, flags: int) -> int:
        tried.append(flags)
        if flags > os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING:
            raise OSError(errno.EINVAL, "pretended")
        return make(name, flags)

    monkeypatch.setattr(os, "memfd_create", make_before_linux_6_3)
    memory = SharedMemory.create(8, fields=1)
    assert len(tried) == 2 and memory.version == 0
    memory.close()


def test_a_process_without_free_descriptors_is_no_lack_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, "pretended")

    monkeypatch.setattr(os, "memfd_create", fail)
    with pytest.raises(OSError, match="pretended"):
        SharedMemory.create(8, fields=1)


@pytest.mark.parametrize("fields", [1, 3])
def test_words_of_fields_are_apart(fields: int) -> None:
    memory = SharedMemory.create(8, fields)
    for field in range(fields):
        assert memory.begin(field, b"%d" % field, lambda: None)
    assert all(memory.begin(field, b"%d" % field, lambda: None) for field in range(fields))
    assert memory.version == 0
    memory.close()


@pytest.mark.parametrize("fails", [False, True])
def test_a_writers_version_is_odd_until_its_rows_are_settled(fails: bool) -> None:
    memory, versions = SharedMemory.create(8, fields=1), list[int]()
    for _ in range(2):
        with suppress(KeyError), memory.writing(lambda: versions.append(memory.version)):
            versions.append(memory.version)
            if fails:
                raise KeyError
        versions.append(memory.version)
    assert versions == [1, 1, 2, 3, 3, 4]
    memory.close()


def test_a_forked_child_within_writing_neither_settles_nor_ends_the_block() -> None:
    memory, (reads, writes) = SharedMemory.create(8, fields=1), os.pipe()
    child = -1
    try:
        with memory.writing(lambda: os.write(writes, b"settled")):
            if (child := os.fork()) == 0:
                raise KeyError
            os.waitpid(child, 0)
            assert memory.version == 1 and not select.select([reads], [], [], 0)[0]
    finally:
        if child == 0:
            os._exit(0)
    assert memory.version == 2 and os.read(reads, 99) == b"settled"
    os.close(reads)
    os.close(writes)
    memory.close()

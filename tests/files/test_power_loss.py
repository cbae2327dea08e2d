"""Power loss while files are replaced: recorded calls, replayed up to each moment.

A killed process proves nothing about syncs, because the kernel still writes what it was given.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from file_faults import NEW, Journal, of_one_save, replace

OLD = {"a": b"old a", "b": b"old b"}
NAMES = pytest.mark.parametrize("names", [("a",), ("a", "b")], ids=["one file", "two files"])


def found_in(journal: Journal, events: list[Any], names: tuple[str, ...]) -> list[dict[str, bytes]]:
    """The files in every state of the folder that a power loss at any moment may leave."""
    moments = range(len(events) + 1)
    all_states = [state for end in moments for state in journal.after_power_loss(events[:end])]
    return [of_one_save(state, *names[:1], *names) for state in all_states]


@NAMES
@pytest.mark.parametrize("there", [True, False], ids=["old files", "no old files"])
def test_a_power_loss_at_any_moment_leaves_all_files_old_or_new_and_later_new(
    folder: Path, monkeypatch: pytest.MonkeyPatch, there: bool, names: tuple[str, ...]
) -> None:
    for name in () if there else names:
        (folder / name).unlink()
    journal = Journal(monkeypatch, folder)
    replace(folder, *names)
    found = found_in(journal, journal.events, names)
    old, new = ({name: state[name] for name in names} for state in (OLD, NEW))
    old = old if there else {}
    assert all(each in (old, new) for each in found)
    assert old in found and new in found
    for state in journal.after_power_loss(journal.events):
        assert {name: state[name] for name in names} == new


@NAMES
@pytest.mark.parametrize("kind", ["fsync", "fsync folder"])
def test_the_replay_notices_a_missing_sync(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, names: tuple[str, ...]
) -> None:
    journal = Journal(monkeypatch, folder)
    replace(folder, *names)
    events = journal.without(kind)
    if (kind, names) == ("fsync folder", ("a",)):  # the file is whole, and may be the old one
        assert b"old a" in {state["a"] for state in journal.after_power_loss(events)}
    else:
        whole = [{name: state[name] for name in names} for state in (OLD, NEW)]
        assert not all(each in whole for each in found_in(journal, events, names))

"""Power loss while files are replaced: recorded calls, replayed up to each moment.

A killed process proves nothing about syncs, because the kernel still writes what it was given.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from file_faults import NEW, Journal, of_one_save, replace


def states(journal: Journal, events: list[tuple[str, Any]]) -> list[dict[str, bytes]]:
    """Every state of the folder that a power loss at any moment may leave."""
    moments = range(len(events) + 1)
    return [state for end in moments for state in journal.after_power_loss(events[:end])]


def test_a_power_loss_at_any_moment_leaves_one_file_old_or_new(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(monkeypatch, folder)
    replace(folder, "a")
    assert {state["a"] for state in states(journal, journal.events)} == {b"old a", NEW["a"]}


OLD = {"a": b"old a", "b": b"old b"}


@pytest.mark.parametrize("there", [True, False], ids=["old files", "no old files"])
def test_a_power_loss_at_any_moment_leaves_several_files_old_or_new(
    folder: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    for name in () if there else NEW:
        (folder / name).unlink()
    journal = Journal(monkeypatch, folder)
    replace(folder, "a", "b")
    found = [of_one_save(state, "a", "a", "b") for state in states(journal, journal.events)]
    old = OLD if there else {}
    assert all(each in (old, NEW) for each in found)
    assert old in found and NEW in found


@pytest.mark.parametrize("kind", ["fsync", "fsync folder"])
def test_the_replay_notices_a_missing_sync_of_several_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    journal = Journal(monkeypatch, folder)
    replace(folder, "a", "b")
    found = [of_one_save(each, "a", "a", "b") for each in states(journal, journal.without(kind))]
    assert not all(each in (OLD, NEW) for each in found)


def test_after_the_replacement_a_power_loss_undoes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(monkeypatch, folder)
    replace(folder, "a", "b")
    for state in journal.after_power_loss(journal.events):
        assert {name: state[name] for name in NEW} == NEW


def test_all_files_are_synced_before_the_first_switch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(monkeypatch, folder)
    replace(folder, "a", "b")
    kinds = [kind for kind, _ in journal.events]
    switched = [
        kind == "names" and any(name == ".a.switch" for _, name, _ in what)
        for kind, what in journal.events
    ]
    assert max(at for at, kind in enumerate(kinds) if kind == "fsync") < switched.index(True)


def test_the_replay_notices_a_missing_sync_of_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(monkeypatch, folder)
    replace(folder, "a")
    found = {state["a"] for state in states(journal, journal.without("fsync"))}
    assert not found <= {b"old a", NEW["a"]}


def test_the_replay_notices_a_missing_sync_of_the_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(monkeypatch, folder)
    replace(folder, "a")
    events = journal.without("fsync folder")
    assert b"old a" in {state["a"] for state in journal.after_power_loss(events)}

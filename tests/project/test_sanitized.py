"""A sanitizer that a machine cannot run is left out with the reason."""

from __future__ import annotations

import shutil

import pytest
import sanitized
from sanitized import Sanitizer

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


@pytest.mark.parametrize(
    ("runtime", "started_by", "lack"),
    [
        ("libnone.so", (), "gcc has no libnone.so"),
        ("libgcc_s.so.1", ("no-program", "-R"), "no-program is not installed"),
        ("libgcc_s.so.1", ("false", "-R"), "false -R is not permitted"),
        ("libgcc_s.so.1", ("env",), None),
    ],
)
def test_what_a_machine_lacks_is_named(
    runtime: str, started_by: tuple[str, ...], lack: str | None
) -> None:
    assert Sanitizer("thread", runtime, {}, started_by).lacks() == lack


def test_tests_that_cannot_run_are_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    none = Sanitizer("thread", "libnone.so", {})
    monkeypatch.setitem(sanitized.SANITIZERS, "thread", none)
    assert sanitized.main("thread") == 0
    said = "speedtorch: no test ran with -fsanitize=thread: gcc has no libnone.so\n"
    assert capsys.readouterr().err == said

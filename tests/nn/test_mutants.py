"""The random programs find every fault of a list of them, but those that a test finds by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import MUTANTS, PACKAGE, Mutant, mutated_copy

# What judges a copy of the package, and how many programs it runs, others at every call.
MACHINE = "tests/nn/test_embedding_machine.py"
PROGRAMS = {"SPEEDTORCH_PROGRAMS": "4000", "SPEEDTORCH_SHRINK": "0"}
# Tests that find a mutant which the programs cannot.
NAMED = sorted({mutant.found_by for mutant in MUTANTS if mutant.found_by is not None})


def judge(folder: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
        cwd=folder,
        env={**os.environ, **PROGRAMS, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_mutants_text_is_in_the_source() -> None:
    wrong = []
    for mutant in MUTANTS:
        try:
            mutant.changed(PACKAGE)
        except (LookupError, SyntaxError) as error:
            wrong.append(str(error))
    assert not wrong, "\n".join(wrong)
    assert [mutant.name for mutant in MUTANTS if "#" in mutant.old] == []  # comments change


@pytest.mark.nightly
def test_the_package_itself_passes_its_judges(tmp_path: Path) -> None:
    result = judge(mutated_copy(tmp_path, None), MACHINE, *NAMED)
    assert result.returncode == 0, result.stdout[-4000:]


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_mutant_is_found(mutant: Mutant, tmp_path: Path) -> None:
    result = judge(mutated_copy(tmp_path, mutant), mutant.found_by or MACHINE)
    assert result.returncode == 1 and "1 failed" in result.stdout, result.stdout[-4000:]

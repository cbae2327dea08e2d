"""Random programs of ranks that share rows, against a mirror of all rows; see tests/stress.

SPEEDTORCH_RANK_PROGRAMS is how many are run, as "500", or which, as "500-700"; by default few,
always the same ones.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ordinary_run import programs
from stress.modes import MODES

FIRST, _, END = f"0-{os.environ.get('SPEEDTORCH_RANK_PROGRAMS', programs(16))}".rpartition("-")


@pytest.mark.filterwarnings("ignore")
def test_programs_train_as_one_process_does(tmp_path: Path) -> None:
    features = set[str]()
    for seed in range(int(FIRST.split("-")[-1]), int(END)):
        folder = tmp_path / str(seed)
        folder.mkdir()
        features |= MODES["ranks"].run(seed, folder)
    assert features

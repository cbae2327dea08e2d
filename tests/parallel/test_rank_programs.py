"""Random programs of two ranks train as one process with the batches of both.

SPEEDTORCH_RANK_PROGRAMS is how many are run, as "500", or which, as "500-700"; by default few,
always the same ones.
"""

from __future__ import annotations

import os

from ordinary_run import programs
from rank_processes import in_processes
from sharded_programs import check_programs

FIRST, _, END = f"0-{os.environ.get('SPEEDTORCH_RANK_PROGRAMS', programs(25))}".rpartition("-")


def test_programs_train_as_one_process_does() -> None:
    in_processes(2, check_programs, range(int(FIRST.split("-")[-1]), int(END)))

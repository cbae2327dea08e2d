"""The kinds of programs that the stress test runs."""

from __future__ import annotations

import json
import random
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import paces
import pytest
import torch
from rank_processes import in_processes
from restless_caches import make_restless

from stress.histories import run_shared_table
from stress.kills import run_killed_training
from stress.ranks import RANKS, run_ranks
from stress.training import Interrupt, Program

__all__ = ["MODES", "FailedProgram", "Mode", "device"]

Run = Callable[[int, Path], set[str]]
"""Runs a program in a folder, and returns the features that it used."""


def device() -> str:
    """Where programs of one process train."""
    return "cuda" if torch.cuda.is_available() else "cpu"


class FailedProgram(Exception):
    """A program that found a fault.

    Attributes:
        features: That it used.
    """

    def __init__(self, features: set[str], text: str) -> None:
        super().__init__(text)
        self.features = features


class Mode(Protocol):
    """A kind of programs."""

    @property
    def share(self) -> int:
        """How many of the programs are of this kind, compared with the others."""

    def run(self, seed: int, folder: Path) -> set[str]:
        """Runs a program in an empty folder, and returns the features that it used.

        Raises FailedProgram with what differs.
        """


class OneProcess:
    """This process trains, saves, loads, sleeps and fails."""

    share = 40

    def run(self, seed: int, folder: Path) -> set[str]:
        draw, log, features = random.Random(f"paces {seed}"), list[str](), set[str]()
        paces.choose(draw.choice([paces.AHEAD, paces.Turning(), None]))
        with pytest.MonkeyPatch.context() as patches:
            if draw.random() < 0.5:
                make_restless(patches)
            try:
                program = Program(seed, folder, device())
                log, features = program.log, program.features
                try:
                    program.run()
                finally:
                    program.end()
            except (Exception, Interrupt) as error:
                frames = traceback.extract_tb(error.__traceback__)[-4:]
                lines = [f"at {frame.filename}:{frame.lineno}" for frame in frames]
                text = "\n  ".join([f"{type(error).__name__}: {error}", *lines, *log])
                raise FailedProgram(features, text) from error
        return features


class OtherProcesses:
    """Processes that are kept from program to program run it, all of them alike.

    Args:
        function: Runs the program.
        features: That every program has.
        share: As of Mode.
        size: How many processes there are.
    """

    def __init__(self, function: Run, features: set[str], *, share: int, size: int = 1) -> None:
        self._function, self._features, self.share, self._size = function, features, share, size

    def run(self, seed: int, folder: Path) -> set[str]:
        backend = "nccl" if 1 < self._size <= torch.cuda.device_count() else "gloo"
        try:
            in_processes(self._size, _run_there, self._function, seed, folder, backend=backend)
        except AssertionError as error:
            raise FailedProgram(self._features, str(error)) from error
        features: list[str] = json.loads((folder / "features.json").read_text())
        return self._features | set(features)


def _run_there(function: Run, seed: int, folder: Path) -> None:
    features = function(seed, folder)
    if torch.distributed.get_rank() == 0:
        (folder / "features.json").write_text(json.dumps(sorted(features)))


MODES: dict[str, Mode] = {
    "training": OneProcess(),
    "ranks": OtherProcesses(run_ranks, {"ranks"}, share=8, size=RANKS),
    "kills": OtherProcesses(run_killed_training, {"kills"}, share=3),
    "readers": OtherProcesses(run_shared_table, {"readers", "shared table"}, share=4),
}

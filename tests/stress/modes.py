"""The kinds of programs that the stress test runs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Protocol

import paces
import pytest
import torch
from restless_caches import make_restless

from stress.training import Interrupt, Program

__all__ = ["MODES", "FailedProgram", "Mode"]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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
    """One process trains, saves, loads, sleeps and fails."""

    share = 40

    def run(self, seed: int, folder: Path) -> set[str]:
        draw, log, features = random.Random(f"paces {seed}"), list[str](), set[str]()
        paces.choose(draw.choice([paces.AHEAD, paces.Turning(), None]))
        with pytest.MonkeyPatch.context() as patches:
            if draw.random() < 0.5:
                make_restless(patches)
            try:
                program = Program(seed, folder, DEVICE)
                log, features = program.log, program.features
                try:
                    program.run()
                finally:
                    program.end()
            except (Exception, Interrupt) as error:
                text = "\n  ".join([f"{type(error).__name__}: {error}", *log])
                raise FailedProgram(features, text) from error
        return features


MODES: dict[str, Mode] = {"training": OneProcess()}

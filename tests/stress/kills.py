"""Training that is killed at a call on a file or at a line, and goes on from its last save."""

from __future__ import annotations

import os
import random
import signal
import traceback
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from interrupts import PACKAGE, Lines
from killed_saves import killed_at
from saves_beside_loads import forked

import speedtorch
from speedtorch.checkpoints.generations import generations_of
from stress.tables import Input
from stress.training import Batch, Difference, Training

__all__ = ["run_killed_training"]


class Kill(NamedTuple):
    """Where a life is killed."""

    steps: int  # of the life before
    calls: int | None  # the most calls on files from there; None: the package's lines count
    number: int  # of the call, modulo `calls`, or of the line

    def arm(self, stack: ExitStack) -> None:
        if self.calls is None:
            stack.enter_context(Lines(PACKAGE, self.number, _die))
        else:
            killed_at(1 + self.number % self.calls)


class Life(Training):
    """A run of one process, from the last save to the end or until it is killed.

    Each life draws the same modules and the same batches. `folder` is its own, `saves` is that of
    all lives.
    """

    def __init__(self, seed: int, folder: Path, saves: Path) -> None:
        super().__init__(seed, folder, "cpu")
        self.seed, self.saves = seed, saves
        draw = random.Random(f"lives {seed}")
        self.total, self.every = draw.randint(6, 14), draw.choice([1, 2, 3])
        self.is_ahead = draw.random() < 0.5
        self.last: int | None = None
        self.saving: tuple[int, Future[Any]] | None = None

    def step_batch(self, step: int) -> Batch:
        """The batch of a step, whichever life trains it."""
        self.draw.seed(f"{self.seed} {step}")
        for number, owner in enumerate(self.owners.values()):
            owner.numbers = np.random.default_rng((self.seed, step, number))
        return self.batch()

    def go_on(self) -> None:
        """Loads the last save, if there is one, and checks it against the mirror of its step."""
        if generations_of(str(self.saves)):
            found = speedtorch.load(self.saves, **self.parts())
            for step in range(found["step"]):
                batch = self.step_batch(step)
                self.shorten(batch)
                self.mirror_train(batch)
            self.steps, self.last = found["step"], found["number"]
        acknowledged = self.saves.with_name("acknowledged")
        known = int(acknowledged.read_text()) if acknowledged.exists() else 0
        if self.steps < known:
            raise Difference(f"step {known} was saved, and step {self.steps} is loaded")
        self.check()

    def run(self, kill: Kill | None, stack: ExitStack) -> None:
        """Trains to the end, or until it is killed; `stack` is closed after it."""
        self.go_on()
        first = self.steps
        for batch, inputs in self.loop():
            if kill is not None and self.steps == first + kill.steps:
                kill.arm(stack)
            if any("capacity" in owner.settings for owner in self.owners.values()):
                for module, given in self.announced(batch, inputs).items():
                    module.announce(*given)
            self.optimizer.zero_grad()
            loss = self.dense.sum()
            for (name, lookup), given in zip(batch, inputs, strict=True):
                loss = loss + self.look_up(name, lookup[0], given)
            loss.backward()
            self.optimizer.step()
            self.mirror_train(batch)
            self.steps += 1
            if self.steps % self.every == 0:
                self.save()
        self.wait()
        self.check()

    def loop(self) -> Iterator[tuple[Batch, list[Input]]]:
        batches = map(self.step_batch, range(self.steps, self.total))
        pairs = ((batch, self.inputs(batch)) for batch in batches)
        if self.is_ahead:
            self.features.add("prefetch")
            return iter(
                speedtorch.prefetch(pairs, self.model, ids=lambda pair: self.announced(*pair))
            )
        return pairs

    def save(self) -> None:
        self.wait()
        number = (self.last or 0) + 1
        base = self.last if self.steps % 4 else None
        given = {**self.parts(), "step": self.steps, "number": number}
        if self.steps % 5 == 0:
            made = speedtorch.save(self.saves, base=base, **given)
            self.acknowledge(self.steps, made.generation)
        else:
            self.saving = self.steps, speedtorch.async_save(self.saves, base=base, **given)

    def wait(self) -> None:
        if self.saving is not None:
            step, future = self.saving
            self.saving = None
            self.acknowledge(step, future.result(60).generation)

    def acknowledge(self, step: int, generation: int) -> None:
        """Notes a save that is complete: no later life may load an earlier one."""
        self.last = generation
        beside = self.saves.with_name("acknowledged.new")
        beside.write_text(str(step))
        beside.replace(self.saves.with_name("acknowledged"))


def _die() -> BaseException:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a killed process goes on")


def _lived(seed: int, folder: Path, number: int, kill: Kill | None) -> None:
    """A life, whose fault is written to a file."""
    own = folder / f"life-{number}"
    own.mkdir()
    life = None
    try:
        life = Life(seed, own, folder / "saves")
        with ExitStack() as stack:
            life.run(kill, stack)
    except BaseException:
        log = [] if life is None else life.log
        (folder / "fault").write_text("\n  ".join([traceback.format_exc(), *log]))
        raise


def run_killed_training(seed: int, folder: Path) -> set[str]:
    draw = random.Random(f"kills {seed}")
    kills: list[Kill | None] = [
        Kill(draw.randint(0, 8), draw.choice([None, 40]), draw.randint(1, draw.choice([40, 3000])))
        for _ in range(draw.randint(1, 3))
    ]
    for number, kill in enumerate([*kills, None]):
        child = forked(partial(_lived, seed, folder, number, kill))
        _, status = os.waitpid(child, 0)
        if status not in (0, signal.SIGKILL):
            fault = folder / "fault"
            text = fault.read_text() if fault.exists() else f"ended with {status}"
            raise AssertionError(f"life {number} of {kills}: {text}")
    features = Life(seed, folder, folder / "saves").features
    return features | {"kills", "background saves", "delta saves"}

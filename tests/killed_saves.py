"""Saves that are killed at each of their calls on files, one after another, in forks."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import speedtorch
from speedtorch.files import system_calls


def values(step: int) -> dict[str, Any]:
    return {"step": step, "a": torch.full((70_000,), step), "b": {"c": torch.full((5, 3), step)}}


def check(folder: Path, steps: tuple[int, ...]) -> int:
    """Gives the step that is there, of these; all values are of that."""
    found = speedtorch.load(folder)
    step: int = found["step"]
    assert step in steps, (step, steps)
    assert found["a"].eq(step).all() and found["b"]["c"].eq(step).all()
    return step


def killed_at(number: int) -> None:
    """Kills this process at its n-th call on a file from here."""
    left = [number]

    def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)

        return call

    for name, real in vars(system_calls.calls).items():
        setattr(system_calls.calls, name, wrapped(real))


def main(folder: Path) -> None:
    """Kills a save at each call; prints how many kills there were, and how many were too late."""
    torch.set_num_threads(1)
    speedtorch.save(folder, **values(0))
    number = switched = 0
    while True:
        number += 1
        before = check(folder, tuple(range(2 * number)))
        if (child := os.fork()) == 0:
            try:
                killed_at(number)
                speedtorch.save(folder, **values(2 * number))
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        switched += check(folder, (before, 2 * number)) != before
        speedtorch.save(folder, **values(2 * number + 1))
        check(folder, (2 * number + 1,))
        left = [each for each in os.listdir(folder) if each.startswith(".")]
        assert left == [], left
        assert len(os.listdir(folder)) == 2
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    print(number - 1, switched)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

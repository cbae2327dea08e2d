"""Training that is killed at random moments and goes on from its last save, in forks."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.checkpoints.generations import generations_of

_LOOK = os.WEXITED | os.WNOHANG | os.WNOWAIT
ROWS, END, EVERY = 500, 540, 3


def batch(number: int) -> Tensor:
    return torch.randint(ROWS, (12,), generator=torch.Generator().manual_seed(number))


def train(folder: Path | None) -> dict[str, Any]:
    """Trains to the end from the last save on, saving in each way in turn; gives all tensors."""
    torch.manual_seed(0)
    emb = speedtorch.Embedding(ROWS, 4, cache="2KiB")
    model = nn.ModuleDict({"emb": emb, "out": nn.Linear(4, 1), "drop": nn.Dropout(0.3)})
    optimizer = optim.Adam(model.parameters(), lr=0.1)
    speedtorch.attach(optimizer, model)
    parts = {"model": model, "optimizer": optimizer}
    emb.table.track_changes()
    step, last = 0, None
    if folder is not None and folder.exists() and os.listdir(folder):
        try:
            found = speedtorch.load(folder, **parts)
        except FileNotFoundError as error:
            assert "no generation" in str(error)  # it was killed before the first one
        else:
            step, last = found["step"], found["number"]
            torch.set_rng_state(found["random"])
    loader = speedtorch.prefetch(map(batch, range(step, END)), emb, ids=lambda ids: ids)
    saving: Future[speedtorch.types.Saved] | None = None
    for ids in loader:
        optimizer.zero_grad()
        model["out"](model["drop"](emb(ids))).square().mean().backward()
        optimizer.step()
        step += 1
        if folder is None or step % EVERY:
            continue
        if saving is not None:
            last = saving.result().generation
        number = (last or 0) + 1
        base = last if step % 4 and last is not None else None
        values = {"step": step, "random": torch.get_rng_state(), "number": number}
        saving = speedtorch.async_save(folder, base=base, **parts, **values)
        if step % 5 == 0:
            assert saving.result().generation == number
    state = optimizer.state_dict()["state"]
    kept = {f"{n} {name}": each for n, of in state.items() for name, each in of.items()}
    return {**model.state_dict(), **kept}


def newest(folder: Path) -> int:
    return max(generations_of(str(folder)), default=0)


def killed_after(seconds: float, folder: Path, *, waits: bool) -> bool:
    """Trains in a fork, which is killed; whether it was before its end.

    The seconds count from its first save on if it `waits`, however slow the machine is.
    """
    before = newest(folder)
    if (child := os.fork()) == 0:
        train(folder)
        os._exit(0)
    while waits and newest(folder) == before and os.waitid(os.P_PID, child, _LOOK) is None:
        time.sleep(1e-3)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status != 0


def main(folder: Path, kills: int, seed: int) -> None:
    """Says how often it was killed in the middle, if the end is that without a kill."""
    torch.set_num_threads(1)
    chance, killed, resumed = random.Random(seed), 0, 0
    expected = train(None)
    for _ in range(kills):
        resumed += newest(folder) > 0
        killed += killed_after(chance.uniform(0, 0.15), folder, waits=chance.random() < 0.8)
    ours = train(folder)
    assert ours.keys() == expected.keys()
    for name, each in expected.items():
        assert torch.equal(ours[name], each), name
    print(killed, resumed)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

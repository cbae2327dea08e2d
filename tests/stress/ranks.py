"""Ranks that share rows out run one program, each with its own part of every batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_processes import own_device

import speedtorch
from stress.mirror import Fields
from stress.tables import Owner
from stress.training import Program

__all__ = ["RANKS", "run_ranks"]

RANKS = 2


class RanksProgram(Program):
    """A program that every rank draws alike."""

    def __init__(self, seed: int, folder: Path) -> None:
        super().__init__(seed, folder, str(own_device()), ranks=RANKS)
        self.features.add("ranks")

    def actions(self) -> list[Callable[[], object]]:
        actions: list[Callable[[], object]] = [self.train_one] * 6
        actions += [self.loop, self.loop, self.evaluate, self.train_without_backward]
        actions += [self.load_state, self.reload]
        if self.device == "cpu":  # with a capacity other devices raise at the next lookup
            actions += [self.fail]
        return [*actions, self.save, self.save, self.load, self.start_again, self.follow]

    def share(self) -> None:
        self.rank = dist.get_rank()
        speedtorch.shard(self.model, average=self.average)

    def connect(self) -> None:
        super().connect()
        whole = {"dense.weight": torch.from_numpy(self.dense_mirror.fields["weight"])}
        for name, owner in self.owners.items():
            rows = torch.from_numpy(owner.mirror.fields["weight"].copy())
            names = [key for key in self.model.state_dict() if key.startswith(f"{name}.")]
            names = [key for key in names if key.endswith("weight")]
            whole |= dict(zip(names, rows.split(owner.counts), strict=True))
        self.model.load_state_dict(whole, strict=False)

    def read(self, how: str = "state") -> dict[str, Fields]:
        with speedtorch.full_state_dict(self.model):
            return super().read()

    def states(self) -> list[dict[str, Any]]:
        """A copy of state_dict() with all rows, on every rank."""
        with speedtorch.full_state_dict(self.model):
            found = [super().states()]
        dist.broadcast_object_list(found)
        return found[0]

    def reload(self) -> None:
        """Loads what this rank's own state_dict() had before another step."""
        self.say("reload")
        self.drop()
        snapshot, own = self.snapshot(), super().states()
        self.train_one()
        self.drop()
        self.model.load_state_dict(own[0])
        self.optimizer.load_state_dict(own[1])
        self.restore(snapshot)

    def read_owner(self, owner: Owner, how: str, state: dict[str, Any]) -> Fields:
        """The fields of all rows on the first rank, and the mirror's on the others."""
        if self.rank == 0:
            return super().read_owner(owner, how, state)
        owner.module.state_dict()
        return owner.mirror.fields

    def read_rows(self) -> None:
        """Compares all rows within a step, which all ranks do together."""
        self.say("read")
        self.check()


def run_ranks(seed: int, folder: Path) -> set[str]:
    program = RanksProgram(seed, folder)
    try:
        program.run()
    except BaseException as error:
        raise AssertionError("\n  ".join([f"{error}", *program.log])) from error
    finally:
        program.end()
    return program.features

"""The processes of a demonstration: this one alone, or those that torchrun has begun."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from speedtorch.parallel.shard import shard

__all__ = ["ALONE", "Processes", "joined"]


@dataclass(frozen=True)
class Processes:
    """Those that train one model together; one alone sends nothing, and has all of everything.

    All of them call the same methods, in the same order.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the one that makes files and tells the user."""
        return self.rank == 0

    def share(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """What this process has of a batch: as many as the others, or one more or less.

        Example:
            >>> [Processes(rank, 2).share(np.arange(5)).tolist() for rank in range(2)]
            [[0, 1, 2], [3, 4]]
        """
        return np.array_split(places, self.size)[self.rank]

    def summed(self, values: Tensor) -> Tensor:
        """The sum of what all processes give, on the CPU."""
        if self.size > 1:
            dist.all_reduce(values := values.clone())
        return values

    def any(self, said: bool) -> bool:
        """Whether one of them says so."""
        return bool(self.summed(torch.tensor(int(said))))

    def wait(self) -> None:
        """Waits until all of them have come here."""
        self.any(False)

    def spread(self, model: nn.Module, loss: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        """Shares a model's rows out, before they are used; gives what gives its loss from then on.

        Gradients are averages over the processes, those of rows as well as all others.
        """
        if self.size == 1:
            return loss
        whole = _Loss(model, loss)
        shard(whole)
        return nn.parallel.DistributedDataParallel(whole)


ALONE = Processes()


class _Loss(nn.Module):
    """The loss of a model, as a module, which DistributedDataParallel calls."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, batch: Any) -> Tensor:
        return self._loss(batch)


@contextmanager
def joined(device: torch.device) -> Iterator[Processes]:
    """Joins those that torchrun has begun, until the run is over; the first alone prints.

    If the device is a GPU, each has one of its own, which is the current one from then on. All come
    to the end before one leaves, as torchrun kills the others when one ends with another status
    than 0; after an error no process waits.

    Raises ValueError if there are fewer GPUs than processes.
    """
    is_torchrun = dist.is_available() and dist.is_torchelastic_launched()
    if not is_torchrun or os.environ["WORLD_SIZE"] == "1":
        yield ALONE
        return
    if device.type == "cuda":
        here, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
        if here > gpus:
            raise ValueError(
                f"{here} processes on this machine need a GPU each, and there are {gpus}: use"
                f" torchrun --nproc-per-node {gpus}, or --device cpu"
            )
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    processes = Processes(dist.get_rank(), dist.get_world_size())
    with nullcontext() if processes.is_first else redirect_stdout(None):
        yield processes
    processes.wait()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # nothing is left to do but to give the status
    dist.destroy_process_group()

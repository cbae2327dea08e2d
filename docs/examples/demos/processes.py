"""The processes of a demonstration: a single one, or the processes of torchrun."""

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

__all__ = ["SINGLE_PROCESS", "Processes", "join_torchrun"]


@dataclass(frozen=True)
class Processes:
    """Processes that train one model together; a single process communicates nothing.

    All processes call the same methods in the same order.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def share(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """This process's part of a batch; the sizes of two parts differ by at most one.

        Example:
            >>> [Processes(rank, 2).share(np.arange(5)).tolist() for rank in range(2)]
            [[0, 1, 2], [3, 4]]
        """
        return np.array_split(places, self.size)[self.rank]

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum of the CPU tensors of all processes."""
        if self.size > 1:
            dist.all_reduce(values := values.clone())
        return values

    def any(self, flag: bool) -> bool:
        """Whether `flag` is True in at least one process."""
        return bool(self.sum(torch.tensor(int(flag))))

    def wait(self) -> None:
        """Waits until all processes have called this method."""
        self.any(False)

    def distribute(
        self, model: nn.Module, loss: Callable[[Any], Tensor]
    ) -> Callable[[Any], Tensor]:
        """Shards a model's rows before their first use, and returns the function for its loss.

        All gradients, also those of rows, are averages over the processes.
        """
        if self.size == 1:
            return loss
        whole = _Loss(model, loss)
        shard(whole)
        return nn.parallel.DistributedDataParallel(whole)


SINGLE_PROCESS = Processes()


class _Loss(nn.Module):
    """A module that computes a model's loss, for DistributedDataParallel."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, batch: Any) -> Tensor:
        """Returns the loss of this process's part of a batch."""
        return self._loss(batch)


@contextmanager
def join_torchrun(device: torch.device) -> Iterator[Processes]:
    """Joins the process group of torchrun for the run; only the first process prints.

    If the device is a GPU, each process makes its own GPU the current one. All processes wait for
    each other at the end, because torchrun kills the other processes if one ends with a status
    other than 0. After an error no process waits.

    Raises ValueError if there are fewer GPUs than processes.
    """
    is_torchrun = dist.is_available() and dist.is_torchelastic_launched()
    if not is_torchrun or os.environ["WORLD_SIZE"] == "1":
        yield SINGLE_PROCESS
        return
    if device.type == "cuda":
        local_size, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
        if local_size > gpus:
            raise ValueError(
                f"each process must have its own GPU, got {local_size} processes and {gpus} GPUs."
                f" Use torchrun --nproc-per-node {gpus}, or --device cpu."
            )
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    processes = Processes(dist.get_rank(), dist.get_world_size())
    with nullcontext() if processes.is_first else redirect_stdout(None):
        yield processes
    processes.wait()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # only the exit status remains to be returned
    dist.destroy_process_group()

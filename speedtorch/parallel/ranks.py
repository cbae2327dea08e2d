"""Ranks: the processes that share the rows of a model, and what they send each other.

Every call is one of all ranks. What cannot be agreed on raises on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from speedtorch.torch_internals import timeout_of

__all__ = ["Asked", "Ranks"]


_Value = TypeVar("_Value")


class Asked(NamedTuple):
    """Rows that ranks have asked each other for."""

    ids: Tensor
    """Of the rows that this rank is asked for, `[n]`, those of each rank after another."""
    given: list[int]
    """How many of them each rank asks for."""
    got: list[int]
    """How many rows this rank has asked each for."""


class Ranks:
    """The processes of a group, in a group of its own.

    Args:
        group: of torch.distributed; None: all processes.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        group = group or dist.group.WORLD
        assert group is not None
        # Collectives of others, such as those of DistributedDataParallel, go their own way.
        self._group = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout_of(group),
            dist.get_backend_config(group),
            use_local_synchronization=True,
        )
        self.rank, self.size = dist.get_rank(self._group), dist.get_world_size(self._group)

    def ask(
        self, name: str, number: int, ids: Sequence[Tensor] | None, device: torch.device
    ) -> Asked:
        """Asks each rank for rows, by their ids there; None if ids are bad and none are asked for.

        Args:
            name: of who asks, for errors.
            number: of who asks: the same on all ranks.
            ids: for each rank, `[n]` int64 on the device.
            device: where the ids of others go.

        Raises:
            IndexError: ids of another rank are bad.
            RuntimeError: another rank asks for rows of another module, or is gone.
        """
        counts = [-1] * self.size if ids is None else [len(each) for each in ids]
        told = torch.tensor([[number, count] for count in counts], device=device)
        numbers, given = self._exchanged(name, told).t().tolist()
        if numbers != [number] * self.size:
            others = [rank for rank, each in enumerate(numbers) if each != number]
            raise RuntimeError(
                f"{name}: ranks {others} look up rows of another module now; all ranks make the"
                " same lookups in the same order, with an empty batch where they have none"
            )
        if bad := [rank for rank, count in enumerate(given) if count < 0 and rank != self.rank]:
            raise IndexError(f"{name}: an id on ranks {bad} is out of range; no row was moved")
        if ids is None:
            return Asked(torch.empty(0, dtype=torch.int64, device=device), given, counts)
        asked = torch.cat(list(ids))
        return Asked(self._exchanged(name, asked, given, counts), given, counts)

    def bring(self, name: str, rows: Tensor, asked: Asked) -> Tensor:
        """Gives the rows that others have asked for, `[n, ...]`; gets those asked for by this."""
        return self._exchanged(name, rows, asked.got, asked.given)

    def give_back(self, name: str, rows: Tensor, asked: Asked) -> Tensor:
        """The other way round, as gradients go."""
        return self._exchanged(name, rows, asked.given, asked.got)

    def agreed(self, value: _Value) -> _Value:
        """What the first rank says."""
        values = [value]
        dist.broadcast_object_list(values, group=self._group, group_src=0)
        return values[0]

    def summed(self, number: Tensor) -> Tensor:
        """The sum of a tensor of each rank."""
        return self._reduced(number, dist.ReduceOp.SUM)

    def most(self, number: Tensor) -> Tensor:
        """The largest of the numbers of each rank."""
        return self._reduced(number, dist.ReduceOp.MAX)

    def _reduced(self, number: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        result = number.clone()
        dist.all_reduce(result, how, group=self._group)
        return result

    def _exchanged(
        self,
        name: str,
        sent: Tensor,
        received: list[int] | None = None,
        counts: list[int] | None = None,
    ) -> Tensor:
        """Parts of a tensor, of so many rows, to each rank; gets as many rows of each as said."""
        size = len(sent) if received is None else sum(received)
        out = sent.new_empty((size, *sent.shape[1:]))
        try:
            dist.all_to_all_single(out, sent.contiguous(), received, counts, group=self._group)
        except RuntimeError as error:
            raise RuntimeError(
                f"{name}: rows of other ranks did not come; all ranks make the same lookups in the"
                f" same order, with an empty batch where they have none: {error}"
            ) from error
        return out

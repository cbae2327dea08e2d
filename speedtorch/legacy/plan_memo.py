"""Caches one plan per batch, the address order of its ids, for all ops on the same ids.

A batch is gathered and scattered once for the weight and once per field of optimizer state, all
with the same plan. Each table has one memo, so classes that share a table also share its plans.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from speedtorch.legacy import batch_ids
from speedtorch.legacy.batch_ids import Indexes, all_within, flat_index
from speedtorch.ops.functions import plan_rows
from speedtorch.plan.planned_batch import SeenIds
from speedtorch.table.host_table import HostTable

__all__ = ["Plan", "PlanMemo", "plans_of", "plans_pay"]

Plan = list[Tensor]

_BATCHES = 2  # the maximum number of batches, so that the next one can be fetched ahead


def plans_pay(memory: str, device: torch.device) -> bool:
    """Whether ops on a kind of memory are faster with a precomputed plan.

    Only kernels over the link use a plan's order. During the capture of a CUDA graph, whose ids
    change between replays, the ops compute their own plans.
    """
    mapped = memory in ("managed", "registered")
    return device.type == "cuda" and mapped and not _captures(device)


def _captures(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _stream(device: torch.device) -> int | None:
    """The current stream, which orders work after a new plan; other streams must not reuse it."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


@dataclass(eq=False)
class _Batch:
    """A plan and the ids that identify it: flat ids, or unread tensors on a GPU.

    Some writes do not change a tensor's version: those of a replayed CUDA graph, through `.data` or
    from another library. `steps` therefore stores each caller's last step. If a caller repeats this
    step or passes an earlier one, the batch is a new one, even in the same tensors.
    """

    place: tuple[torch.device, int | None, bool]  # device, stream, whether the ids are unread
    seen: list[SeenIds]
    index: Tensor
    plan: Plan
    steps: dict[Hashable, int]

    def matches(self, place: tuple[torch.device, int | None, bool], ids: list[Any]) -> bool:
        """Whether the plan of this batch is valid for `ids` at `place`."""
        if place != self.place or len(ids) != len(self.seen):
            return False
        return all(seen.matches(part) for seen, part in zip(self.seen, ids, strict=True))


class PlanMemo:
    """The plans of the last two batches of a table."""

    def __init__(self, rows: int, memory: str) -> None:
        self._rows, self._memory = rows, memory
        self._batches: tuple[_Batch, ...] = ()

    def __len__(self) -> int:
        return len(self._batches)

    def find(
        self,
        positives: Indexes,
        negatives: Indexes | None,
        device: torch.device,
        caller: Hashable = None,
        step: int = 0,
    ) -> tuple[Tensor, Plan | None]:
        """Returns the flat ids of a batch and their plan, which is computed if unknown.

        Ids on the CPU are compared by value with a copy. Ids on a GPU are never read: they must be
        the same tensors with the same version. Bad ids on the CPU have no plan, so that the next op
        raises. For bad ids on a GPU, the plan makes a later call raise.

        `device` is the device of the work on the rows; `step` is 0 for a caller's first use of a
        batch.
        """
        if not plans_pay(self._memory, device):
            return flat_index(positives, negatives, device), None
        parts = [part for part in (positives, negatives) if part is not None]
        unread = all(map(batch_ids.on_gpu, parts))
        given: Any = parts if unread else [flat_index(positives, negatives, device)]
        place = (device, _stream(device), unread)
        matching = [batch for batch in self._batches if batch.matches(place, given)]
        for batch in matching:
            if not unread or step > batch.steps.get(caller, -1):
                batch.steps[caller] = step
                return batch.index, batch.plan
        index = flat_index(positives, negatives, device) if unread else given[0]
        if not self._can_plan(index):
            return index, None
        # An inference tensor has no version counter, and concatenated GPU ids cannot be recognised.
        is_cached = not any(ids.is_inference() for ids in given) if unread else index.is_cpu
        if not is_cached:
            return index, plan_rows(index, self._rows)
        seen = [SeenIds(ids, device, unread=unread) for ids in given]
        if not unread:
            index = seen[0].values.to(device, non_blocking=device.type == "cuda")
        new = _Batch(place, seen, index, plan_rows(index, self._rows), {caller: step})
        self._batches = (new, *(b for b in self._batches if b not in matching))[:_BATCHES]
        return index, new.plan

    def _can_plan(self, index: Tensor) -> bool:
        in_range = all_within(index, self._rows) if index.is_cpu else index.is_cuda
        return index.numel() > 0 and in_range


_memos: WeakKeyDictionary[HostTable, PlanMemo] = WeakKeyDictionary()


def plans_of(table: HostTable) -> PlanMemo:
    """The memo of a table."""
    if (memo := _memos.get(table)) is None:
        memo = _memos[table] = PlanMemo(table.rows, table.memory)
    return memo

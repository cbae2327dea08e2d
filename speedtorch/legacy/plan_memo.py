"""One plan per batch: the address order of its ids, kept for the ops that follow on the same ids.

A batch is gathered and scattered once for the weight and once for each field of the optimizer's
state, all by the same plan. Each table has one memo, so that classes which share it share the
plans.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
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

_BATCHES = 2  # remembered at most, so that the next one can be fetched ahead


def plans_pay(memory: str, device: torch.device) -> bool:
    """Whether the ops on a kind of memory are faster with a plan that is made before.

    Only kernels that cross the link use its order; and a CUDA graph, whose ids change between its
    replays, makes its own.
    """
    mapped = memory in ("managed", "registered")
    return device.type == "cuda" and mapped and not _captures(device)


def _captures(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _stream(device: torch.device) -> int | None:
    """The stream whose work sees a plan that is made now: only there may it be used again."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


@dataclass(eq=False)
class _Batch:
    """A plan, and how to know its ids again: one row of numbers, or unread, as given on a GPU.

    Not every write to a tensor makes a new version of it: a replayed CUDA graph's does not, nor one
    through `.data` or another library. A caller that asks for an earlier step than the last, which
    `steps` keeps of each, has come to another batch, which may lie in the same tensors.
    """

    place: tuple[torch.device, int | None, bool]  # device, stream, whether the ids are unread
    seen: list[SeenIds]
    index: Tensor
    plan: Plan
    steps: dict[Hashable, int]

    def is_of(self, place: tuple[torch.device, int | None, bool], ids: list[Any]) -> bool:
        """Whether these are its ids."""
        alike = place == self.place and len(ids) == len(self.seen)
        return alike and all(seen.are(each) for seen, each in zip(self.seen, ids, strict=True))


class PlanMemo:
    """The plans of the last two batches of a table."""

    def __init__(
        self, rows: int, memory: str, wanted: Callable[[str, torch.device], bool] = plans_pay
    ) -> None:
        self.wanted = wanted
        self._rows = rows
        self._memory: str | None = memory
        self._batches: tuple[_Batch, ...] = ()

    def __len__(self) -> int:
        return len(self._batches)

    def find(
        self,
        positives: Indexes,
        negatives: Indexes | None,
        device: torch.device,
        asker: Hashable = None,
        step: int = 0,
    ) -> tuple[Tensor, Plan | None]:
        """The ids of a batch, as flat_index gives them, and their plan, new if it is not known yet.

        Ids from the CPU are compared by content with a copy of the last ones. Ids on a GPU are
        never waited for: they must be the same tensors, of the same version. Bad ids get no plan if
        they are from the CPU, so that the op that is called next refuses them, and a plan that
        makes it refuse them if they are on the GPU.

        `device` is where the rows are worked on, `step` 0 for an asker's first use of a batch.
        """
        if self._memory is None or not self.wanted(self._memory, device):
            return flat_index(positives, negatives, device), None
        parts = [part for part in (positives, negatives) if part is not None]
        unread = all(map(batch_ids.on_gpu, parts))
        given: Any = parts if unread else [flat_index(positives, negatives, device)]
        place = (device, _stream(device), unread)
        known = [each for each in self._batches if each.is_of(place, given)]
        for batch in known:
            if not unread or step > batch.steps.get(asker, -1):
                batch.steps[asker] = step
                return batch.index, batch.plan
        index = flat_index(positives, negatives, device) if unread else given[0]
        if not self._can_plan(index):
            return index, None
        # An inference tensor does not count its versions; of mixed parts no tensor can be kept.
        known_again = not any(ids.is_inference() for ids in given) if unread else index.is_cpu
        if not known_again:
            return index, plan_rows(index, self._rows)
        seen = [SeenIds(ids, device, unread=unread) for ids in given]
        if not unread:
            index = seen[0].values.to(device, non_blocking=device.type == "cuda")
        made = _Batch(place, seen, index, plan_rows(index, self._rows), {asker: step})
        others = [each for each in self._batches if each not in known]
        self._batches = (made, *others)[:_BATCHES]
        return index, made.plan

    def _can_plan(self, index: Tensor) -> bool:
        known_good = all_within(index, self._rows) if index.is_cpu else index.is_cuda
        return index.numel() > 0 and known_good

    def close(self) -> None:
        """Forgets all plans and makes no more."""
        self._memory, self._batches = None, ()


_memos: WeakKeyDictionary[HostTable, PlanMemo] = WeakKeyDictionary()


def plans_of(table: HostTable) -> PlanMemo:
    """The memo of a table; that of a closed table is empty."""
    if (memo := _memos.get(table)) is None:
        memo = _memos[table] = PlanMemo(table.rows, table.memory)
    if table.closed:
        memo.close()
    return memo

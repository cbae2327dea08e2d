"""Ranks: the collectives of the processes among which a model's rows are sharded.

All ranks make every call together. A disagreement raises on every rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from speedtorch.memory.side_stream import SideStream
from speedtorch.parallel.calls import END, Call, are_counts, differing
from speedtorch.parallel.shared_memory_barrier import WORDS, SharedMemoryBarrier
from speedtorch.plan.host_copy import HostCopy
from speedtorch.step.disagreement import DisagreementError
from speedtorch.torch_internals import group_like, timeout_of

__all__ = ["LOOKUPS", "Asked", "Ranks", "divided"]

LOOKUPS = WORDS - 1
"""The maximum number of lookups in one comparison; END follows the last one."""

_Value = TypeVar("_Value")


class Asked(NamedTuple):
    """The rows that ranks request from each other at one lookup."""

    ids: Tensor
    """The ids of this rank's rows that ranks request, `[n]`, in the order of the ranks."""
    given: list[int]
    """How many of them each rank requests."""
    got: list[int]
    """How many rows this rank requests from each rank."""


class Ranks:
    """The processes of a group, with two process groups of their own: one for ids, one for rows.

    A step's rows wait for the previous step. Ids of later steps use another group and need not
    wait for these rows.

    Attributes:
        tables: The names of the tables in errors, by their numbers, the same on all ranks.
        faults: The number of errors that all ranks have raised.
        members: Global ranks of the processes.
        patience: Seconds for which a rank waits for the others.
    """

    faults = 0
    _lost = ""
    """The first error after which the ranks cannot get in step again."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.tables: list[str] = []
        # New groups, so that collectives of others (DistributedDataParallel) keep their order.
        self._giving, self._asking = group_like(group), group_like(group)
        self._meeting = SideStream("meeting")
        self.rank, self.size = dist.get_rank(self._giving), dist.get_world_size(self._giving)
        self.members = frozenset(dist.get_process_group_ranks(group))
        self._barrier = SharedMemoryBarrier.of_ranks(self)
        # At the full timeout NCCL ends the process without naming the missing ranks.
        self.patience = 0.9 * timeout_of(group).total_seconds()

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> Ranks:
        """The Ranks of a group of torch.distributed, by default all processes.

        All models share it, because each communicator uses GPU memory that is never released.
        """
        group = group or dist.group.WORLD
        assert group is not None
        if group not in _ranks:
            _ranks[group] = cls(group)
        return _ranks[group]

    @property
    def meets_beside_the_device(self) -> bool:
        """Whether meet() waits for the other ranks only, and not for the device."""
        return self._barrier is not None

    @property
    def name(self) -> str:
        """The group's name: the same on all its ranks, and unique among groups."""
        return str(self._giving.group_name)

    def numbered(self, name: str) -> int:
        """The number of a new table with this qualified name."""
        said = repr(name)
        if said in self.tables:  # a table of another model
            said += f" (table {len(self.tables)})"
        self.tables.append(said)
        return len(self.tables) - 1

    def count_fault(self) -> None:
        """Counts an error that all ranks raise."""
        self.faults += 1

    def meet(self, name: str, calls: Sequence[Call], device: torch.device) -> None:
        """Waits until all ranks make the same calls, LOOKUPS at most.

        Raises DisagreementError on all ranks if the calls differ.
        """
        if self._barrier is not None:
            words = [[*(call.code for call in calls), END]] * self.size
            if (found := self.met(name, words)) != words:
                raise self.differing(name, found)
            return
        with self._meeting.after(device):  # need not wait for work queued on the current stream
            codes = HostCopy(self.calls(name, calls, device).reshape(-1))
        self.refuse_if_differing(name, codes, len(calls))

    def tell_each(self, name: str, call: Call) -> list[int]:
        """All-gathers the number in `call.lookup`; raises as meet().

        Needs meets_beside_the_device.
        """
        found = self.met(name, [[call.code, END]] * self.size)
        told = [words[0] - call.code + call.lookup for words in found]
        if not are_counts(told):
            raise self.differing(name, found)
        return told

    def met(self, name: str, words: list[list[int]]) -> list[list[int]]:
        """As SharedMemoryBarrier.exchange; raises RuntimeError if a rank is missing."""
        assert self._barrier is not None
        self._refuse_if_lost(name)
        if (found := self._barrier.exchange(words, self.patience)) is None:
            raise self._lose(name, "they have ended, stay away, or have lost others")
        return found

    def words(self, codes: list[int], device: torch.device) -> Tensor:
        """Codes, followed by END, for each rank: `[size, WORDS]`, an expanded view of one row."""
        words = torch.tensor([*codes, END] + [0] * (LOOKUPS - len(codes)))
        if device.type == "cuda":  # the host would wait for a copy from pageable memory
            words = words.pin_memory().to(device, non_blocking=True)
        return words.expand(self.size, WORDS)

    def calls(self, name: str, calls: Sequence[Call], device: torch.device) -> Tensor:
        """All-gathers codes of calls, and the word behind them: `[size, calls + 1]`, on the device.

        The host does not wait.
        """
        words = self.words([call.code for call in calls], device)
        return self.exchanged(name, words)[:, : len(calls) + 1]

    def refuse_if_differing(self, name: str, codes: HostCopy, count: int) -> None:
        """Raises DisagreementError on all ranks if the results of calls() differ."""
        words = divided(self.read(name, codes), count + 1)
        if any(each != words[self.rank] for each in words):
            raise self.differing(name, words)

    def differing(self, name: str, words: Sequence[Sequence[int]]) -> DisagreementError:
        """The error about the first calls that are not the same on all ranks."""
        self.count_fault()
        calls = list(zip(*([Call.of(word) for word in each] for each in words), strict=True))
        # All calls are equal if one rank compares codes in tell() and another sends counts.
        first = next((each for each in calls if each.count(each[0]) < self.size), calls[0])
        return differing(name, first, self.tables)

    def read(self, name: str, numbers: HostCopy) -> list[int]:
        """Waits for numbers from other ranks; RuntimeError if a rank is too late."""
        if not numbers.is_complete(self.patience):
            raise self._lose(name, f"nothing for {self.patience:.0f} s")
        return numbers.read()

    @torch.no_grad()
    def bring(self, name: str, rows: Sequence[Tensor], asked: Sequence[Asked]) -> list[Tensor]:
        """Sends the rows `[n, ...]` that ranks request; returns the rows that this one requests."""
        got, given = [each.got for each in asked], [each.given for each in asked]
        return self.exchanged_jointly(name, rows, got, given, group=self._giving)

    def give_back(self, name: str, rows: Tensor, asked: Asked) -> Tensor:
        """Sends gradients back to the rows' owners: the reverse of bring()."""
        return self.exchanged(name, rows, asked.given, asked.got, group=self._giving)

    def collected(self, name: str, rows: Tensor, counts: list[int]) -> Tensor:
        """Gathers rows `[n, ...]` on rank 0, where `counts` has the number of rows per rank."""
        if self.rank:
            counts = [0] * self.size
        given = [len(rows)] + [0] * (self.size - 1)
        return self.exchanged(name, rows, counts, given, group=self._giving)

    def broadcast(self, value: _Value) -> _Value:
        """Broadcasts the first rank's value."""
        values = [value]
        dist.broadcast_object_list(values, group=self._asking, group_src=0)
        return values[0]

    def all_gather(self, value: _Value) -> list[_Value]:
        """All-gathers a value."""
        values = [value] * self.size
        dist.all_gather_object(values, value, group=self._asking)
        return values

    def summed_(self, number: Tensor) -> Tensor:
        """All-reduces a tensor by its sum, in place."""
        dist.all_reduce(number, dist.ReduceOp.SUM, group=self._giving)
        return number

    def most_(self, number: Tensor) -> Tensor:
        """All-reduces numbers by their maximum, in place."""
        dist.all_reduce(number, dist.ReduceOp.MAX, group=self._giving)
        return number

    def exchanged(
        self,
        name: str,
        sent: Tensor,
        received: list[int] | None = None,
        counts: list[int] | None = None,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> Tensor:
        """Sends `counts[i]` rows to rank i and receives `received[i]` rows from rank i.

        The default is one row for each rank, in the group for ids.
        """
        if self.size == 1:
            return sent.clone()
        self._refuse_if_lost(name)
        size = len(sent) if received is None else sum(received)
        out = sent.new_empty((size, *sent.shape[1:]))
        # Threads of the group keep references to both tensors for a while. Detached tensors keep
        # no graph, or ranks would disagree on whether a step still waits for its backward.
        sent = sent.detach().contiguous()
        try:
            group = group or self._asking
            dist.all_to_all_single(out.detach(), sent, received, counts, group=group)
        except RuntimeError as error:
            raise self._lose(name, str(error)) from error
        return out

    def exchanged_jointly(
        self,
        name: str,
        sent: Sequence[Tensor],
        received: Sequence[list[int]],
        counts: Sequence[list[int]],
        *,
        group: dist.ProcessGroup | None = None,
    ) -> list[Tensor]:
        """As exchanged(), for several tensors of one dtype in one collective."""
        if len(sent) == 1:
            return [self.exchanged(name, sent[0], received[0], counts[0], group=group)]
        got, given = (
            [
                [n * each.shape[1:].numel() for n in part]
                for each, part in zip(sent, of, strict=True)
            ]
            for of in (received, counts)
        )
        of_ranks, to_ranks = list(zip(*got, strict=True)), list(zip(*given, strict=True))
        flat = _transposed(torch.cat([each.reshape(-1) for each in sent]), given)
        sums = list(map(sum, of_ranks)), list(map(sum, to_ranks))
        every = _transposed(self.exchanged(name, flat, *sums, group=group), of_ranks)
        apart = torch.unsafe_split_with_sizes(every, list(map(sum, got)))
        rows = zip(apart, received, sent, strict=True)
        return [part.view(sum(of), *each.shape[1:]) for part, of, each in rows]

    def _lose(self, name: str, what: str) -> RuntimeError:
        """The error about missing ranks, which would take later data for the data of this call.

        All further calls raise, here at once and on the ranks that wait for this one.
        """
        error = RuntimeError(
            f"{name}: rows of other ranks did not come; all ranks make the same lookups in the same"
            " order, with an empty batch where they have none, and go backward through the results"
            f" of all or of none: {what}"
        )
        self._lost = str(error)
        if self._barrier is not None:
            self._barrier.abort()
        return error

    def _refuse_if_lost(self, name: str) -> None:
        if self._lost:
            raise RuntimeError(
                f"{name}: this rank has waited for other ranks in vain, and they cannot get in step"
                " again: end all ranks and begin anew from the last checkpoint;"
                " docs/several_gpus.md says how one rank skips a batch. What happened first:"
                f" {self._lost}"
            )


def divided(numbers: list[int], size: int) -> list[list[int]]:
    """Splits numbers into lists of one size."""
    return [numbers[begin : begin + size] for begin in range(0, len(numbers), size)]


def _transposed(rows: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
    """Reorders parts of `counts[i][j]` rows from i-major to j-major order."""
    parts = torch.unsafe_split_with_sizes(rows, [count for each in counts for count in each])
    size = len(counts[0])
    return torch.cat([part for j in range(size) for part in parts[j::size]])


_ranks: weakref.WeakKeyDictionary[dist.ProcessGroup, Ranks] = weakref.WeakKeyDictionary()

"""Ranks: the processes that share the rows of a model, and what they send each other.

Every call is one of all ranks. What cannot be agreed on raises on every rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from speedtorch.memory.side_stream import SideStream
from speedtorch.parallel.board import WORDS, Board
from speedtorch.parallel.calls import END, Call, are_counts, differing
from speedtorch.plan.host_copy import HostCopy
from speedtorch.step.disagreement import DisagreementError
from speedtorch.torch_internals import group_like, timeout_of

__all__ = ["LOOKUPS", "Asked", "Ranks", "divided"]

LOOKUPS = WORDS - 1
"""The most lookups that ranks compare at once; END follows the last one."""

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
    """The processes of a group, in groups of their own.

    What they ask goes beside what they give: rows of a step wait for the step before, and requests
    of later steps wait for no rows.

    Attributes:
        tables: What errors call the tables, by their numbers, the same on all ranks.
        faults: Errors that all ranks have raised.
        members: Their ranks among all processes.
        patience: Seconds for which a rank waits for the others.
    """

    faults = 0
    _lost = ""
    """Why the other ranks may be elsewhere for good."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.tables: list[str] = []
        # Collectives of others, such as those of DistributedDataParallel, go their own way.
        self._giving, self._asking = group_like(group), group_like(group)
        self._meeting = SideStream("meeting")
        self.rank, self.size = dist.get_rank(self._giving), dist.get_world_size(self._giving)
        self.members = frozenset(dist.get_process_group_ranks(group))
        self._board = Board.of_machine(self.rank, self.size, self.agreed, self.every)
        # When the time is over NCCL ends the process without the names of those that are missing.
        self.patience = 0.9 * timeout_of(group).total_seconds()

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> Ranks:
        """Those of a group of torch.distributed, by default all processes.

        All models have the same: on a GPU each communicator takes memory that is never given back.
        """
        group = group or dist.group.WORLD
        assert group is not None
        if group not in _ranks:
            _ranks[group] = cls(group)
        return _ranks[group]

    @property
    def meets_beside_the_device(self) -> bool:
        """Whether meet() waits for the other ranks alone, and not for the device."""
        return self._board is not None

    @property
    def name(self) -> str:
        """The same on all of them, and another for others."""
        return str(self._giving.group_name)

    def numbered(self, name: str) -> int:
        """The number of another table, whose qualified name is given."""
        said = repr(name)
        if said in self.tables:  # of another model
            said += f" (table {len(self.tables)})"
        self.tables.append(said)
        return len(self.tables) - 1

    def count_fault(self) -> None:
        """Says that all ranks raise an error."""
        self.faults += 1

    def meet(self, name: str, calls: Sequence[Call], device: torch.device) -> None:
        """Waits until all ranks are at the same calls, LOOKUPS at most.

        Raises DisagreementError on all ranks if some are not.
        """
        if self._board is not None:
            words = [[*(call.code for call in calls), END]] * self.size
            if (found := self.met(name, words)) != words:
                raise self.differing(name, found)
            return
        with self._meeting.after(device):  # beside what the device has to do before the exchange
            codes = HostCopy(self.calls(name, calls, device).reshape(-1))
        self.refuse_if_differing(name, codes, len(calls))

    def tell_each(self, name: str, call: Call) -> list[int]:
        """What each rank tells in the place of its call's lookup; raises as meet().

        Of ranks that meet beside the device.
        """
        found = self.met(name, [[call.code, END]] * self.size)
        told = [words[0] - call.code + call.lookup for words in found]
        if not are_counts(told):
            raise self.differing(name, found)
        return told

    def met(self, name: str, words: list[list[int]]) -> list[list[int]]:
        """As Board.exchange; raises RuntimeError if some rank does not come."""
        assert self._board is not None
        self._refuse_if_lost(name)
        if (found := self._board.exchange(words, self.patience)) is None:
            raise self._lose(name, "they have ended, stay away, or have lost others")
        return found

    def words(self, codes: list[int], device: torch.device) -> Tensor:
        """Codes, and END, for each rank: `[size, WORDS]`, a view of one row."""
        words = torch.tensor([*codes, END] + [0] * (LOOKUPS - len(codes)))
        if device.type == "cuda":  # for which the host would wait
            words = words.pin_memory().to(device, non_blocking=True)
        return words.expand(self.size, WORDS)

    def calls(self, name: str, calls: Sequence[Call], device: torch.device) -> Tensor:
        """The codes of as many calls of each rank, and the word behind them, on the device.

        `[size, calls + 1]`. Nothing waits.
        """
        words = self.words([call.code for call in calls], device)
        return self.exchanged(name, words)[:, : len(calls) + 1]

    def refuse_if_differing(self, name: str, codes: HostCopy, count: int) -> None:
        """Raises DisagreementError, on all ranks, unless the ranks' calls() are the same."""
        words = divided(self.read(name, codes), count + 1)
        if any(each != words[self.rank] for each in words):
            raise self.differing(name, words)

    def differing(self, name: str, words: Sequence[Sequence[int]]) -> DisagreementError:
        """The error about the first calls that are not the same on all ranks."""
        self.count_fault()
        calls = list(zip(*([Call.of(word) for word in each] for each in words), strict=True))
        # Of the same lookups one rank may be told ahead, and another one be asked.
        first = next((each for each in calls if each.count(each[0]) < self.size), calls[0])
        return differing(name, first, self.tables)

    def read(self, name: str, numbers: HostCopy) -> list[int]:
        """Numbers that need the other ranks; RuntimeError if these do not come in time."""
        if not numbers.have_come(self.patience):
            raise self._lose(name, f"nothing for {self.patience:.0f} s")
        return numbers.read()

    @torch.no_grad()
    def bring(self, name: str, rows: Sequence[Tensor], asked: Sequence[Asked]) -> list[Tensor]:
        """Gives the rows that others have asked for, `[n, ...]`; gets those asked for by this."""
        got, given = [each.got for each in asked], [each.given for each in asked]
        return self.exchanged_jointly(name, rows, got, given, group=self._giving)

    def give_back(self, name: str, rows: Tensor, asked: Asked) -> Tensor:
        """The other way round, as gradients go."""
        return self.exchanged(name, rows, asked.given, asked.got, group=self._giving)

    def collected(self, name: str, rows: Tensor, counts: list[int]) -> Tensor:
        """Gives rows `[n, ...]` to the first rank, which gets those of each, as many as it says."""
        if self.rank:
            counts = [0] * self.size
        given = [len(rows)] + [0] * (self.size - 1)
        return self.exchanged(name, rows, counts, given, group=self._giving)

    def agreed(self, value: _Value) -> _Value:
        """What the first rank says."""
        values = [value]
        dist.broadcast_object_list(values, group=self._asking, group_src=0)
        return values[0]

    def every(self, value: _Value) -> list[_Value]:
        """What each rank says."""
        values = [value] * self.size
        dist.all_gather_object(values, value, group=self._asking)
        return values

    def summed_(self, number: Tensor) -> Tensor:
        """The sum of a tensor of each rank, in place."""
        dist.all_reduce(number, dist.ReduceOp.SUM, group=self._giving)
        return number

    def most_(self, number: Tensor) -> Tensor:
        """The largest of the numbers of each rank, in place."""
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
        """Parts of a tensor, of so many rows, to each rank; gets as many rows of each as said.

        By default a row to each, and with what ranks ask.
        """
        if self.size == 1:
            return sent.clone()
        self._refuse_if_lost(name)
        size = len(sent) if received is None else sum(received)
        out = sent.new_empty((size, *sent.shape[1:]))
        # Threads of the group keep both tensors for a while. Detached ones keep no graph: ranks
        # would disagree on whether a step still waits for a backward.
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
        """As exchanged(), of several tensors of one dtype at once."""
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
        """The error about ranks that did not come; they would take what comes later for this.

        All further calls raise, here at once and on the ranks that wait for this one.
        """
        error = RuntimeError(
            f"{name}: rows of other ranks did not come; all ranks make the same lookups in the same"
            " order, with an empty batch where they have none, and go backward through the results"
            f" of all or of none: {what}"
        )
        self._lost = str(error)
        if self._board is not None:
            self._board.leave()
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
    """Numbers in parts of one size."""
    return [numbers[begin : begin + size] for begin in range(0, len(numbers), size)]


def _transposed(rows: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
    """Parts of `counts[i][j]` rows, those of each i one after another: those of each j, instead."""
    parts = torch.unsafe_split_with_sizes(rows, [count for each in counts for count in each])
    size = len(counts[0])
    return torch.cat([part for j in range(size) for part in parts[j::size]])


_ranks: weakref.WeakKeyDictionary[dist.ProcessGroup, Ranks] = weakref.WeakKeyDictionary()

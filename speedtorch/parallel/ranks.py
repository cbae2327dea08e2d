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
from speedtorch.parallel.calls import END, Call, differing
from speedtorch.plan.planned_batch import HostCopy
from speedtorch.torch_internals import group_like, timeout_of

__all__ = ["LOOKUPS", "Asked", "Ranks", "Told"]

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


class Told(NamedTuple):
    """How many rows ranks will ask each other for at lookups, on its way to the CPU."""

    names: Sequence[str]
    """What errors call the table of each lookup."""
    calls: Sequence[Call]
    counts: HostCopy
    """The numbers of this rank; behind them, unless ranks meet beside the device, the words of the
    others."""


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

    def tell(self, names: Sequence[str], calls: Sequence[Call], counts: Tensor) -> Told:
        """Tells each rank how many of its rows this rank will ask for, without waiting.

        Ranks that meet beside the device tell it in ask(), where the CPU has read the counts.

        Args:
            names: of the rows of each lookup, for errors.
            calls: one of Kind.COUNTS for each lookup, LOOKUPS at most.
            counts: `[lookups, size]` int64, on the device of the rows; -1 each where ids are bad.
        """
        if self._board is not None:
            return Told(names, calls, HostCopy(counts.reshape(-1)))
        own = self._words(calls, counts.device).clone()
        own[:, : len(calls)] += counts.t() + 1
        others = self._exchanged(names[0], own, group=self._asking)[:, : len(calls) + 1]
        told = Told(names, calls, HostCopy(torch.cat([counts.reshape(-1), others.reshape(-1)])))
        if counts.is_cpu:  # they have come
            self._counts(told)
        return told

    def _counts(self, told: Told) -> tuple[list[list[int]], list[list[int]]]:
        """For how many rows this rank asks each rank and each asks this; -1 where ids are bad.

        One list for each lookup. Raises DisagreementError on all ranks unless all are at the same
        lookups now.
        """
        name, length = told.names[0], len(told.calls) * self.size
        if self._board is not None:
            own = told.counts.read()
            given = [own[rank :: self.size] for rank in range(self.size)]
            numbers = self._met(name, self._board, told.calls, given)
        else:
            read = self.read(name, told.counts)
            own, words = read[:length], _divided(read[length:], len(told.calls) + 1)
            numbers = self._compared(name, told.calls, words)
        return _divided(own, self.size), [[each - 1 for each in some] for some in numbers]

    def ask(self, told: Told, ids: Sequence[Tensor]) -> list[Asked | IndexError]:
        """Asks each rank for rows: for each lookup `ids` there, those of each rank after another.

        An IndexError stands for a lookup whose ids are bad on some rank: nothing was asked for.

        Raises RuntimeError if another rank asks for rows of other modules, or none in time, or is
        gone.
        """
        found: list[Asked | IndexError] = []
        for name, got, given in zip(told.names, *self._counts(told), strict=True):
            if bad := [rank for rank, count in enumerate(given) if count < 0]:
                found.append(
                    IndexError(
                        f"{name}: an id on ranks {bad} is out of range, or no integer; no row was"
                        " moved"
                    )
                )
            else:
                found.append(Asked(ids[len(found)][: sum(got)], given, got))
        good = [each for each in found if isinstance(each, Asked)]
        asked = iter(self._asked(told.names[0], good))
        return [next(asked) if isinstance(each, Asked) else each for each in found]

    def _asked(self, name: str, lookups: Sequence[Asked]) -> list[Asked]:
        """The ids that other ranks ask this one for, in the place of those that it asks for."""
        if len(lookups) < 2:
            return [
                each._replace(ids=self._exchanged(name, *each, group=self._asking))
                for each in lookups
            ]
        sent = _transposed(torch.cat([each.ids for each in lookups]), [n.got for n in lookups])
        given = list(zip(*(each.given for each in lookups), strict=True))
        got = zip(*(each.got for each in lookups), strict=True)
        counts = list(map(sum, given)), list(map(sum, got))
        every = _transposed(self._exchanged(name, sent, *counts, group=self._asking), given)
        apart = torch.unsafe_split_with_sizes(every, [sum(each.given) for each in lookups])
        return [each._replace(ids=ids) for each, ids in zip(lookups, apart, strict=True)]

    def meet(self, name: str, calls: Sequence[Call], device: torch.device) -> None:
        """Waits until all ranks are at the same calls, LOOKUPS at most.

        Raises DisagreementError on all ranks if some are not.
        """
        if self._board is not None:
            self._met(name, self._board, calls)
            return
        with self._meeting.after(device):  # beside what the device has to do before the exchange
            codes = HostCopy(self.calls(name, calls, device).reshape(-1))
        self.refuse_if_differing(name, calls, codes)

    def tell_each(self, name: str, call: Call) -> list[int]:
        """What each rank tells in the place of its call's lookup; raises as meet().

        Of ranks that meet beside the device.
        """
        assert self._board is not None
        call, told = call._replace(lookup=0), call.lookup - 1
        return self._met(name, self._board, [call], [[told]] * self.size)[0]

    def _met(
        self,
        name: str,
        board: Board,
        calls: Sequence[Call],
        counts: Sequence[Sequence[int]] | None = None,
    ) -> list[list[int]]:
        """As _compared(), of what each rank gives each: counts, plus one, or none."""
        self._refuse_if_lost(name)
        codes, end = [call.code for call in calls], END.code
        words = [[*codes, end]] * self.size
        if counts is not None:
            words = [[*(c + n + 1 for c, n in zip(codes, to, strict=True)), end] for to in counts]
        if (found := board.exchange(words, self.patience)) is None:
            raise self._lose(name, "they have ended, stay away, or have lost others")
        return self._compared(name, calls, found)

    def _compared(
        self, name: str, calls: Sequence[Call], words: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        """What each rank has added to the codes of its calls: a list for each call.

        Args:
            name: of the rows, for errors.
            calls: of this rank.
            words: of each rank, one more than there are calls.

        Raises DisagreementError, on all ranks, unless all of them are at these calls.
        """
        numbers = []
        for call, codes in zip((*calls, END), zip(*words, strict=True), strict=True):
            if (added := call.told(codes)) is None:
                self.count_fault()
                raise differing(name, [Call.of(code) for code in codes], self.tables)
            numbers.append(added)
        return numbers[:-1]

    def _words(self, calls: Sequence[Call], device: torch.device) -> Tensor:
        """The codes of calls, and END, for each rank: `[size, WORDS]`, a view of one row."""
        codes = [*(call.code for call in calls), END.code]
        words = torch.tensor(codes + [0] * (WORDS - len(codes)))
        if device.type == "cuda":  # for which the host would wait
            words = words.pin_memory().to(device, non_blocking=True)
        return words.expand(self.size, WORDS)

    def calls(self, name: str, calls: Sequence[Call], device: torch.device) -> Tensor:
        """The codes of as many calls of each rank, and the word behind them, on the device.

        `[size, calls + 1]`. Nothing waits.
        """
        words = self._words(calls, device)
        return self._exchanged(name, words, group=self._asking)[:, : len(calls) + 1]

    def refuse_if_differing(self, name: str, calls: Sequence[Call], codes: HostCopy) -> None:
        """Raises DisagreementError, on all ranks, unless the codes of calls() are of these."""
        self._compared(name, calls, _divided(self.read(name, codes), len(calls) + 1))

    def read(self, name: str, numbers: HostCopy) -> list[int]:
        """Numbers that need the other ranks; RuntimeError if these do not come in time."""
        if not numbers.have_come(self.patience):
            raise self._lose(name, f"nothing for {self.patience:.0f} s")
        return numbers.read()

    def exchanged(self, name: str, blocks: Tensor) -> Tensor:
        """Tells each rank a block of as many numbers, `[size, n]`; gives what each has told."""
        return self._exchanged(name, blocks, group=self._asking)

    def bring(self, name: str, rows: Tensor, asked: Asked) -> Tensor:
        """Gives the rows that others have asked for, `[n, ...]`; gets those asked for by this."""
        return self._exchanged(name, rows, asked.got, asked.given, group=self._giving)

    def give_back(self, name: str, rows: Tensor, asked: Asked) -> Tensor:
        """The other way round, as gradients go."""
        return self._exchanged(name, rows, asked.given, asked.got, group=self._giving)

    def collected(self, name: str, rows: Tensor, counts: list[int]) -> Tensor:
        """Gives rows `[n, ...]` to the first rank, which gets those of each, as many as it says."""
        if self.rank:
            counts = [0] * self.size
        given = [len(rows)] + [0] * (self.size - 1)
        return self._exchanged(name, rows, counts, given, group=self._giving)

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
        return self._reduced(number, dist.ReduceOp.SUM)

    def most_(self, number: Tensor) -> Tensor:
        """The largest of the numbers of each rank, in place."""
        return self._reduced(number, dist.ReduceOp.MAX)

    def _reduced(self, number: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        dist.all_reduce(number, how, group=self._giving)
        return number

    def _exchanged(
        self,
        name: str,
        sent: Tensor,
        received: list[int] | None = None,
        counts: list[int] | None = None,
        *,
        group: dist.ProcessGroup,
    ) -> Tensor:
        """Parts of a tensor, of so many rows, to each rank; gets as many rows of each as said."""
        if self.size == 1:
            return sent.clone()
        self._refuse_if_lost(name)
        size = len(sent) if received is None else sum(received)
        out = sent.new_empty((size, *sent.shape[1:]))
        try:
            dist.all_to_all_single(out, sent.contiguous(), received, counts, group=group)
        except RuntimeError as error:
            raise self._lose(name, str(error)) from error
        return out

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


def _divided(numbers: list[int], size: int) -> list[list[int]]:
    """Numbers in parts of one size."""
    return [numbers[begin : begin + size] for begin in range(0, len(numbers), size)]


def _transposed(rows: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
    """Parts of `counts[i][j]` rows, those of each i one after another: those of each j, instead."""
    parts = torch.unsafe_split_with_sizes(rows, [count for each in counts for count in each])
    size = len(counts[0])
    return torch.cat([part for j in range(size) for part in parts[j::size]])


_ranks: weakref.WeakKeyDictionary[dist.ProcessGroup, Ranks] = weakref.WeakKeyDictionary()

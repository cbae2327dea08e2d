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
from speedtorch.parallel.board import Board
from speedtorch.parallel.calls import Call, Kind, differing
from speedtorch.plan.host_copy import HostCopy
from speedtorch.torch_internals import group_like, timeout_of

__all__ = ["Asked", "Ranks", "Told"]


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
    """How many rows ranks will ask each other for, on its way to the CPU."""

    name: str
    call: Call
    counts: HostCopy
    """Those of this rank, where ranks meet beside the device; else the codes of the calls of this
    rank and of the others, with the counts, plus one."""


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

    def tell(self, name: str, table: int, counts: Tensor) -> Told:
        """Tells each rank how many of its rows this rank will ask for, without waiting.

        Args:
            name: of the rows, for errors.
            table: number of the table: the same on all ranks.
            counts: `[size]` int64, on the device of the rows; -1 each where ids are bad.
        """
        call = Call(Kind.COUNTS, table)
        if self._board is not None:
            self.meet(name, call, counts.device)
            return Told(name, call, HostCopy(counts))
        told = counts + (call.code + 1)
        others = self._exchanged(name, told, group=self._asking)
        made = Told(name, call, HostCopy(torch.cat([told, others])))
        if counts.is_cpu:  # they have come
            self._counts(made)
        return made

    def _counts(self, told: Told) -> list[int]:
        """For how many rows this rank asks each rank and each asks this; -1 where ids are bad.

        Raises DisagreementError on all ranks unless all ask for rows of this table now.
        """
        if self._board is not None:
            own = told.counts.read()
            given = [count + 1 for count in own]  # not negative
            taken = self._met(told.name, self._board, told.call, given)[1]
            return [*own, *(each - 1 for each in taken)]
        codes = self.read(told.name, told.counts)
        if (numbers := told.call.told(codes)) is None:
            self._refuse_if_differing(told.name, [Call.of(code)[0] for code in codes[self.size :]])
            raise AssertionError("ranks that differ were not told")
        return [number - 1 for number in numbers]

    def ask(self, told: Told, ids: Tensor) -> Asked:
        """Asks each rank for rows: `ids` there, those of each rank after another.

        Raises:
            IndexError: ids of a rank are bad; nothing was asked for.
            RuntimeError: another rank asks for rows of another module, or none in time, or is gone.
        """
        counts = self._counts(told)
        got, given = counts[: self.size], counts[self.size :]
        if bad := [rank for rank, count in enumerate(given) if count < 0]:
            raise IndexError(
                f"{told.name}: an id on ranks {bad} is out of range, or no integer; no row was"
                " moved"
            )
        ids = ids[: sum(got)]
        return Asked(self._exchanged(told.name, ids, given, got, group=self._asking), given, got)

    def meet(self, name: str, call: Call, device: torch.device) -> None:
        """Waits until all ranks are at a call; raises DisagreementError on all if some are not."""
        if self._board is not None:
            self._met(name, self._board, call, [0] * self.size)
            return
        with self._meeting.after(device):  # beside what the device has to do before the exchange
            codes = HostCopy(self.calls(name, call, device))
        self.refuse_if_differing(name, codes)

    def tell_each(self, name: str, call: Call) -> list[int]:
        """What each rank tells in the place of its call's lookup; raises as meet().

        Of ranks that meet beside the device.
        """
        assert self._board is not None
        told = [call.lookup] * self.size
        return self._met(name, self._board, call._replace(lookup=0), told)[1]

    def _met(
        self, name: str, board: Board, call: Call, given: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """As Board.exchange, of ranks that are all at this call; raises as meet()."""
        self._refuse_if_lost(name)
        if (found := board.exchange(call.code, given, self.patience)) is None:
            raise self._lose(name, "they have ended, stay away, or have lost others")
        if found[0].count(call.code) != self.size:
            self._refuse_if_differing(name, [Call.of(code)[0] for code in found[0]])
        return found

    def calls(self, name: str, call: Call, device: torch.device) -> Tensor:
        """The codes of the calls that ranks are at, `[size]`, on the device; nothing waits."""
        own = torch.full((self.size,), call.code, device=device)
        return self._exchanged(name, own, group=self._asking)

    def refuse_if_differing(self, name: str, codes: HostCopy) -> None:
        """Raises DisagreementError, on all ranks, unless the calls of calls() are the same."""
        self._refuse_if_differing(name, [Call.of(code)[0] for code in self.read(name, codes)])

    def _refuse_if_differing(self, name: str, calls: list[Call]) -> None:
        if (error := differing(name, calls, self.tables)) is not None:
            self.count_fault()
            raise error

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


_ranks: weakref.WeakKeyDictionary[dist.ProcessGroup, Ranks] = weakref.WeakKeyDictionary()

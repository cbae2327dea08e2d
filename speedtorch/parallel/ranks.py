"""Ranks: the collectives of the processes among which a model's rows are sharded.

All ranks must make every call together. If compare_calls() finds different calls, it raises on
every rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from speedtorch.memory.side_stream import SideStream
from speedtorch.parallel.calls import END, Call, are_counts, disagreement
from speedtorch.parallel.shared_memory_barrier import WORDS, SharedMemoryBarrier
from speedtorch.plan.host_copy import HostCopy
from speedtorch.step.disagreement import DisagreementError
from speedtorch.torch_internals import group_like, timeout_of

__all__ = ["LOOKUPS", "Ranks", "RequestedRows", "split_evenly"]

LOOKUPS = WORDS - 1
"""The maximum number of lookups in one comparison; END follows the last one."""

_Value = TypeVar("_Value")


class RequestedRows(NamedTuple):
    """The rows that ranks request from each other at one lookup."""

    ids: Tensor
    """The ids of this rank's rows that ranks request, `[n]`, in the order of the ranks."""
    sent_counts: list[int]
    """The number of rows that this rank sends to each rank."""
    received_counts: list[int]
    """The number of rows that this rank requests from each rank."""


class Ranks:
    """The processes of a group, with two process groups of their own: one for ids, one for rows.

    A step's rows wait for the previous step. Ids of later steps use another group and need not
    wait for these rows.

    Attributes:
        tables: The names of the tables in errors, by their numbers, the same on all ranks.
        error_count: The number of errors that all ranks have raised.
        members: Global ranks of the processes.
        timeout: Seconds for which a rank waits for the other ranks.
    """

    error_count = 0
    _aborted = ""
    """The text of the first error of _abort(); after it each exchange raises."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.tables: list[str] = []
        # New groups, so that collectives of others (DistributedDataParallel) keep their order.
        self._row_group, self._id_group = group_like(group), group_like(group)
        self._rendezvous = SideStream("rendezvous")
        self.rank, self.size = dist.get_rank(self._row_group), dist.get_world_size(self._row_group)
        self.members = frozenset(dist.get_process_group_ranks(group))
        self._barrier = SharedMemoryBarrier.of_ranks(self)
        # At the full timeout NCCL ends the process without naming the missing ranks.
        self.timeout = 0.9 * timeout_of(group).total_seconds()

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
    def has_barrier(self) -> bool:
        """Whether compare_calls() waits for the other ranks only, and not for the device."""
        return self._barrier is not None

    @property
    def name(self) -> str:
        """The group's name: the same on all its ranks, and unique among groups."""
        return str(self._row_group.group_name)

    def add_table(self, name: str) -> int:
        """Adds a table with this qualified name; returns the table's number."""
        text = repr(name)
        if text in self.tables:  # a table of another model
            text += f" (table {len(self.tables)})"
        self.tables.append(text)
        return len(self.tables) - 1

    def count_error(self) -> None:
        """Counts an error that all ranks raise."""
        self.error_count += 1

    def compare_calls(self, name: str, calls: Sequence[Call], device: torch.device) -> None:
        """Compares calls, LOOKUPS at most, with those of the other ranks, and waits for these.

        Raises DisagreementError on all ranks if the calls differ.
        """
        if self._barrier is not None:
            words = [[*(call.code for call in calls), END]] * self.size
            if (found := self.exchange_words(name, words)) != words:
                raise self.disagreement(name, found)
            return
        with self._rendezvous.after(device):  # need not wait for work on the current stream
            codes = HostCopy(self.gather_codes(name, calls, device).reshape(-1))
        self.compare_codes(name, codes, len(calls))

    def all_gather_number(self, name: str, call: Call) -> list[int]:
        """All-gathers the number in `call.lookup`; raises as compare_calls().

        Needs has_barrier.
        """
        found = self.exchange_words(name, [[call.code, END]] * self.size)
        numbers = [words[0] - call.code + call.lookup for words in found]
        if not are_counts(numbers):
            raise self.disagreement(name, found)
        return numbers

    def exchange_words(self, name: str, words: list[list[int]]) -> list[list[int]]:
        """Like SharedMemoryBarrier.exchange; raises RuntimeError if a rank is missing."""
        assert self._barrier is not None
        self._raise_if_aborted(name)
        if (found := self._barrier.exchange(words, self.timeout)) is None:
            raise self._abort(name, f"a rank has ended or failed, or is {self.timeout:.0f} s late")
        return found

    def gather_codes(
        self, name: str, calls: Sequence[Call], device: torch.device, added: Tensor | None = None
    ) -> Tensor:
        """All-gathers codes of calls, and the word behind them: `[size, calls + 1]`, on the device.

        `added` `[size, calls]` is added to the codes for each rank. The host does not wait.
        """
        words = torch.tensor([*(call.code for call in calls), END] + [0] * (LOOKUPS - len(calls)))
        if device.type == "cuda":  # the host would wait for a copy from pageable memory
            words = words.pin_memory().to(device, non_blocking=True)
        words = words.repeat(self.size, 1)
        if added is not None:
            words[:, : len(calls)] += added
        return self.all_to_all(name, words)[:, : len(calls) + 1]

    def compare_codes(self, name: str, codes: HostCopy, count: int) -> None:
        """Raises DisagreementError on all ranks if the results of gather_codes() differ."""
        words = split_evenly(self.read(name, codes), count + 1)
        if any(codes_of_rank != words[self.rank] for codes_of_rank in words):
            raise self.disagreement(name, words)

    def disagreement(self, name: str, words: Sequence[Sequence[int]]) -> DisagreementError:
        """The error about the first calls that are not the same on all ranks."""
        self.count_error()
        calls = list(zip(*([Call.of(code) for code in codes] for codes in words), strict=True))
        # All calls are equal if one rank only compares codes and another sends counts.
        first = next((of_ranks for of_ranks in calls if len(set(of_ranks)) > 1), calls[0])
        return disagreement(name, first, self.tables)

    def read(self, name: str, numbers: HostCopy) -> list[int]:
        """Waits for numbers from other ranks; RuntimeError after `timeout` seconds."""
        if not numbers.is_complete(self.timeout):
            raise self._abort(name, f"no data for {self.timeout:.0f} s")
        return numbers.read()

    @torch.no_grad()
    def send_rows(
        self, name: str, rows: Sequence[Tensor], requests: Sequence[RequestedRows]
    ) -> list[Tensor]:
        """Sends the rows `[n, ...]` that ranks request; returns the rows that this one requests."""
        received = [request.received_counts for request in requests]
        sent = [request.sent_counts for request in requests]
        return self.all_to_all_jointly(name, rows, received, sent, group=self._row_group)

    def send_gradients(self, name: str, rows: Tensor, requested: RequestedRows) -> Tensor:
        """Sends gradients back to the rows' owners: the reverse of send_rows()."""
        received, sent = requested.sent_counts, requested.received_counts
        return self.all_to_all(name, rows, received, sent, group=self._row_group)

    def gather_rows(self, name: str, rows: Tensor, counts: list[int]) -> Tensor:
        """Gathers rows `[n, ...]` on rank 0, where `counts` has the number of rows per rank."""
        if self.rank:
            counts = [0] * self.size
        sent = [len(rows)] + [0] * (self.size - 1)
        return self.all_to_all(name, rows, counts, sent, group=self._row_group)

    def broadcast(self, value: _Value) -> _Value:
        """Broadcasts the first rank's value."""
        values = [value]
        dist.broadcast_object_list(values, group=self._id_group, group_src=0)
        return values[0]

    def all_gather(self, value: _Value) -> list[_Value]:
        """All-gathers a value."""
        values = [value] * self.size
        dist.all_gather_object(values, value, group=self._id_group)
        return values

    def all_reduce_sum_(self, number: Tensor) -> Tensor:
        """All-reduces a tensor by its sum, in place."""
        dist.all_reduce(number, dist.ReduceOp.SUM, group=self._row_group)
        return number

    def all_reduce_max_(self, number: Tensor) -> Tensor:
        """All-reduces numbers, none of them NaN, by their maximum, in place."""
        dist.all_reduce(number, dist.ReduceOp.MAX, group=self._row_group)
        return number

    def all_to_all(
        self,
        name: str,
        rows: Tensor,
        received_counts: list[int] | None = None,
        sent_counts: list[int] | None = None,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> Tensor:
        """Sends `sent_counts[i]` rows to rank i; receives `received_counts[i]` rows from rank i.

        The default is one row for each rank, in the group for ids.
        """
        if self.size == 1:
            return rows.clone()
        self._raise_if_aborted(name)
        size = len(rows) if received_counts is None else sum(received_counts)
        out = rows.new_empty((size, *rows.shape[1:]))
        # Threads of the group keep references to both tensors for a while. Detached tensors keep
        # no graph, or ranks would disagree on whether a step still waits for its backward.
        rows, counts = rows.detach().contiguous(), (received_counts, sent_counts)
        try:
            dist.all_to_all_single(out.detach(), rows, *counts, group=group or self._id_group)
        except RuntimeError as error:
            raise self._abort(name, str(error)) from error
        return out

    def all_to_all_jointly(
        self,
        name: str,
        tensors: Sequence[Tensor],
        received_counts: Sequence[list[int]],
        sent_counts: Sequence[list[int]],
        *,
        group: dist.ProcessGroup | None = None,
    ) -> list[Tensor]:
        """Like all_to_all(), for several tensors of one dtype in one collective."""
        if len(tensors) == 1:
            counts = received_counts[0], sent_counts[0]
            return [self.all_to_all(name, tensors[0], *counts, group=group)]
        widths = [rows.shape[1:].numel() for rows in tensors]
        received, sent = (
            [[count * width for count in counts] for counts, width in zip(of, widths, strict=True)]
            for of in (received_counts, sent_counts)
        )
        of_ranks, to_ranks = list(zip(*received, strict=True)), list(zip(*sent, strict=True))
        flat = _transposed(torch.cat([rows.reshape(-1) for rows in tensors]), sent)
        sums = list(map(sum, of_ranks)), list(map(sum, to_ranks))
        flat = _transposed(self.all_to_all(name, flat, *sums, group=group), of_ranks)
        parts = torch.unsafe_split_with_sizes(flat, list(map(sum, received)))
        results = zip(parts, received_counts, tensors, strict=True)
        return [part.view(sum(counts), *rows.shape[1:]) for part, counts, rows in results]

    def _abort(self, name: str, reason: str) -> RuntimeError:
        """The error about missing ranks, which could mistake later data for the data of this call.

        Later exchanges of calls, ids and rows raise at once on this rank. With a barrier, ranks
        that wait for this rank raise too.
        """
        error = RuntimeError(
            f"{name}: an exchange with other ranks failed ({reason}). All ranks must make the same"
            " lookups in the same order. A rank without data must look up an empty batch. Either"
            " all ranks or none must call backward on the result of a lookup."
        )
        self._aborted = str(error)
        if self._barrier is not None:
            self._barrier.abort()
        return error

    def _raise_if_aborted(self, name: str) -> None:
        if self._aborted:
            raise RuntimeError(
                f"{name}: an earlier exchange with other ranks failed, so ranks can no longer"
                " exchange rows. End all ranks and restart from the last checkpoint."
                " docs/several_gpus.md shows how one rank skips a batch. The first error was:"
                f" {self._aborted}"
            )


def split_evenly(numbers: list[int], size: int) -> list[list[int]]:
    """Splits numbers into lists of one size."""
    return [numbers[begin : begin + size] for begin in range(0, len(numbers), size)]


def _transposed(rows: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
    """Reorders parts of `counts[i][j]` rows from i-major to j-major order."""
    parts = torch.unsafe_split_with_sizes(rows, [count for row in counts for count in row])
    size = len(counts[0])
    return torch.cat([part for j in range(size) for part in parts[j::size]])


_ranks: weakref.WeakKeyDictionary[dist.ProcessGroup, Ranks] = weakref.WeakKeyDictionary()

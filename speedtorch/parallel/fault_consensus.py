"""FaultConsensus: all ranks begin a step of rows with a capacity, or none does.

Only the rank that owns the rows finds that a step has too many rows (a fault). On the CPU all ranks
raise at once. On a GPU the ranks all-reduce their fault codes without a wait of the host. If one
rank has a fault, no row changes on any rank. The next lookup reads the all-reduced code, and all
ranks raise there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from speedtorch.parallel.calls import Call
from speedtorch.parallel.ranks import Ranks
from speedtorch.plan.fixed_size_batch import raises_at_once
from speedtorch.plan.host_copy import HostCopy
from speedtorch.step.disagreement import DisagreementError
from speedtorch.step.fixed_blocks import rank_error
from speedtorch.step.fixed_memory import FixedMemory, Replays

__all__ = ["FaultConsensus"]


class FaultConsensus:
    """The fault codes of all ranks at their last lookups. Implements FaultAllReduce.

    Args:
        memory: The memory of the rows that this rank owns, which calls agree().
        ranks: All ranks that own rows of the table.
    """

    def __init__(self, memory: FixedMemory, ranks: Ranks) -> None:
        self._memory, self._ranks = memory, ranks
        self._last: list[HostCopy] = []
        """All-reduced fault codes that read_fault() has not read."""
        self._expected: Tensor | None = None
        self._calls: list[HostCopy] = []
        """The ranks' call codes since the last lookup, not compared yet."""
        self._captured: list[Tensor] | None = None
        """The all-reduced fault codes of a capture's lookups; None outside of capturing()."""

    @property
    def compares_at_once(self) -> bool:
        """Whether ranks compare their calls before they exchange anything."""
        return raises_at_once(self._memory.held.device) or self._ranks.has_barrier

    def compare_calls(self, calls: Sequence[Call]) -> Tensor | None:
        """Like Requests.compare_calls; more than one call only if compares_at_once."""
        name, device = self._memory.held.name, self._memory.held.device
        if self.compares_at_once:
            self._ranks.compare_calls(name, calls, device)
            return None
        (call,) = calls
        codes = self._ranks.gather_codes(name, calls, device)
        self._calls.append(HostCopy(codes.reshape(-1)))
        return (codes[:, 0] != call.code).any().long().view(1)

    def check(self) -> None:
        """Raises DisagreementError on all ranks if they made different calls since the last lookup.

        Waits for the GPU that gathers the ranks' call codes.
        """
        while self._calls:
            self._ranks.compare_codes(self._memory.held.name, self._calls[0], 1)
            del self._calls[0]

    def raise_if_calls_differ(self) -> None:
        """Like check(), at a lookup. After the error, the memory can start a new step."""
        try:
            self.check()
        except DisagreementError:
            self._calls, self._last = [], []
            self._memory.resume()
            raise

    def stop(self, fault: Tensor) -> None:
        """See FixedMemory.stop."""
        with self._memory.lock:
            self._memory.stop(fault)

    def expect(self, faults: list[Tensor]) -> None:
        """Sets the fault codes of the next lookup's ids: `[1]` each, on the device."""
        self._expected = None
        if not raises_at_once(self._memory.held.device):  # otherwise faults are already raised
            self._expected = faults[0] if len(faults) == 1 else torch.cat(faults).max().view(1)

    def agree(self, fault: Tensor) -> Tensor | int:
        """Returns the largest fault code of all ranks, or 0; all ranks must call this.

        On a GPU the result is a tensor `[1]`. read_fault() reads it later.
        """
        if self._expected is not None:
            fault = torch.maximum(fault, self._expected)
        largest = self._ranks.all_reduce_max_(fault)
        if self._captured is not None:
            self._captured.append(largest)
            return largest
        if not raises_at_once(largest.device):
            self.note(largest)
            return largest
        if code := int(largest):
            self._ranks.count_error()
        return code

    def note(self, fault: Tensor) -> None:
        """Queues an all-reduced fault code, `[1]`, for read_fault()."""
        self._last.append(HostCopy(fault))

    @property
    def is_capturing(self) -> bool:
        """Whether a CUDA graph may capture lookups now."""
        return self._captured is not None

    @contextmanager
    def capturing(self, call: Call) -> Iterator[Replays]:
        """See Lookups.capturing. Before each replay, ranks compare `call`."""
        captured: list[Tensor] = []
        self._captured, self._expected = captured, None
        try:
            yield _Replays(self, call, captured)
            if captured:
                captured[:] = [torch.cat(captured).amax(0, keepdim=True)]
        finally:
            self._captured = self._expected = None

    def agree_on_replay(self, call: Call, compared: set[object]) -> None:
        """Raises DisagreementError on all ranks unless all are about to replay the same graph.

        Then raises the faults of the replays before the last one, on all ranks. The code of the
        last replay is not read, because the host would wait for its end.
        """
        if self._ranks not in compared:
            compared.add(self._ranks)
            self._ranks.compare_calls(self._memory.held.name, [call], self._memory.held.device)
        if fault := self.read_fault(keep=1):
            self.raise_fault(fault)

    def read_fault(self, *, keep: int = 0) -> int:
        """Reads the largest fault code since the previous read; 0: no fault. Waits for the GPU.

        The last `keep` codes are left for a later read.
        """
        last = self._last[: len(self._last) - keep]
        self._last = self._last[len(last) :]
        name = self._memory.held.name
        return max((self._ranks.read(name, code)[0] for code in last), default=0)

    def raise_fault(self, fault: int) -> None:
        """Raises the fault of the last lookup on all ranks, unless every rank has raised it before.

        A rank at fault raises the error of its exchange; the other ranks raise rank_error().
        """
        error: IndexError | RuntimeError | None = None
        device = self._memory.held.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        try:
            self._memory.raise_faults()
        except (IndexError, RuntimeError) as found:
            error = found
        is_new = torch.tensor([error is not None], device=device).long()
        if int(self._ranks.all_reduce_max_(is_new)):
            self._ranks.count_error()
            outcome = "Until this error, lookups of the batch returned zeros. No row has changed."
            raise error or rank_error(self._memory.held.name, fault, outcome)


class _Replays(Replays):
    """The rows of one table on all ranks in the replays of a CUDA graph.

    `faults` has the largest fault code of a replay's lookups, `[1]`, in the graph's memory; it is
    empty if the graph has no lookup of the table.
    """

    def __init__(self, consensus: FaultConsensus, call: Call, faults: list[Tensor]) -> None:
        super().__init__(consensus._memory)
        self._consensus, self._call, self._faults = consensus, call, faults

    def agree(self, compared: set[object]) -> None:
        """See Replays.agree."""
        self._consensus.agree_on_replay(self._call, compared)

    def after(self) -> None:
        """See Replays.after."""
        for fault in self._faults:
            self._consensus.note(fault)

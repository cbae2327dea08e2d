"""FaultConsensus: all ranks begin a step of rows with a capacity, or none does.

Only the rank that owns the rows finds that a step has too many rows (a fault). On the CPU all ranks
raise at once. On a GPU the ranks all-reduce their fault codes without a wait of the host. If one
rank has a fault, no row changes on any rank. The next lookup reads the all-reduced code, and all
ranks raise there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speedtorch.parallel.calls import Call
from speedtorch.parallel.ranks import Ranks
from speedtorch.plan.fixed_size_batch import raises_at_once
from speedtorch.plan.host_copy import HostCopy
from speedtorch.step.disagreement import DisagreementError
from speedtorch.step.fixed_blocks import rank_error
from speedtorch.step.fixed_memory import FixedMemory

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
        if not raises_at_once(largest.device):
            self._last.append(HostCopy(largest))
            return largest
        if code := int(largest):
            self._ranks.count_error()
        return code

    def read_fault(self) -> int:
        """Reads the largest fault code since the previous read; 0: no fault. Waits for the GPU."""
        last, self._last = self._last, []
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
            outcome = "Its lookup returned zeros. No row has changed."
            raise error or rank_error(self._memory.held.name, fault, outcome)

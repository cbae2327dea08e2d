"""Agreement: a step of rows of a capacity begins on all ranks, or on none.

Only the rank that owns the rows finds that they are too many. On the CPU all ranks raise at once.
On a GPU no rank waits: a step that is wrong on one rank moves no row on any, and all ranks raise at
the next lookup, where each knows what all have agreed on at the last one.
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
from speedtorch.step.fixed_blocks import of_ranks
from speedtorch.step.fixed_memory import FixedMemory

__all__ = ["Agreement"]


class Agreement:
    """What ranks have agreed on at their last lookups.

    Args:
        memory: Of the rows that this rank owns, which asks by agree().
        ranks: all that own some.
    """

    def __init__(self, memory: FixedMemory, ranks: Ranks) -> None:
        self._memory, self._ranks = memory, ranks
        self._last: list[HostCopy] = []
        """What has yet to be looked at."""
        self._known: Tensor | None = None
        self._calls: list[HostCopy] = []
        """Of the ranks since the last lookup, not compared yet."""

    @property
    def compares_at_once(self) -> bool:
        """Whether ranks compare their calls before they exchange anything."""
        return raises_at_once(self._memory.held.device) or self._ranks.meets_beside_the_device

    def meet(self, calls: Sequence[Call]) -> Tensor | None:
        """As Requests.meet; several calls only if ranks compare them at once."""
        name, device = self._memory.held.name, self._memory.held.device
        if self.compares_at_once:
            self._ranks.meet(name, calls, device)
            return None
        (call,) = calls
        codes = self._ranks.calls(name, calls, device)
        self._calls.append(HostCopy(codes.reshape(-1)))
        return (codes[:, 0] != call.code).any().long().view(1)

    def check(self) -> None:
        """As FaultAllReduce.check."""
        while self._calls:
            self._ranks.refuse_if_differing(self._memory.held.name, self._calls[0], 1)
            del self._calls[0]

    def settle_calls(self) -> None:
        """As check(), at a lookup: what raises here raises on all ranks, and a new step begins."""
        try:
            self.check()
        except DisagreementError:
            self._calls, self._last = [], []
            self._memory.resume()
            raise

    def stop(self, fault: Tensor) -> None:
        """As FixedMemory.stop."""
        with self._memory.turn:
            self._memory.stop(fault)

    def expect(self, faults: list[Tensor]) -> None:
        """Says what may be wrong with ids of the next lookup: `[1]` each, on the device."""
        self._known = None
        if not raises_at_once(self._memory.held.device):  # or it has been raised
            self._known = faults[0] if len(faults) == 1 else torch.cat(faults).max().view(1)

    def agree(self, fault: Tensor) -> Tensor | int:
        """As FaultAllReduce.agree."""
        if self._known is not None:
            fault = torch.maximum(fault, self._known)
        agreed = self._ranks.most_(fault)
        if not raises_at_once(agreed.device):
            self._last.append(HostCopy(agreed))
            return agreed
        if found := int(agreed):
            self._ranks.count_fault()
        return found

    def last(self) -> int:
        """What was wrong at the last lookups, since this was asked last; 0: nothing."""
        last, self._last = self._last, []
        name = self._memory.held.name
        return max((self._ranks.read(name, each)[0] for each in last), default=0)

    def settle(self, fault: int) -> None:
        """Raises on all ranks what was wrong at the last lookup, unless each has raised it since.

        Raises IndexError or RuntimeError, on the rank whose rows were wrong as its exchange does.
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
        if int(self._ranks.most_(is_new)):
            self._ranks.count_fault()
            so = "its rows were looked up as zeros, and no table's were moved or changed"
            raise error or of_ranks(self._memory.held.name, fault, so)

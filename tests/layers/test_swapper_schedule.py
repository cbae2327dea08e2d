"""When copies come and go beside the computing: with the clocks of a pretended GPU, on the CPU.

Copies do what they do on a CPU, at once. The clocks tell when they would have been done, and
whoever would wait waits for these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

from speedtorch.layers import (
    Memory,
    Swapper,
    flat_buffer,
    host_buffer,
    module_groups,
    module_steps,
)

BLOCKS, ELEMENTS = 16, 2048
BLOCK_BYTES = 4 * ELEMENTS
STATE_BYTES = 2 * BLOCK_BYTES
COPY = 8.0  # milliseconds for the weights of a block, either way
COMING, LEAVING = "layers load", "layers write back"


@dataclass
class Clocks:
    """Milliseconds at which the host, computing, and the copies each way are done."""

    host: float = 0.0
    compute: float = 0.0
    copies: dict[str, float] = field(default_factory=lambda: {COMING: 0.0, LEAVING: 0.0})
    busy: dict[str, float] = field(default_factory=lambda: {COMING: 0.0, LEAVING: 0.0})

    def work(self, duration: float) -> None:
        """The host launches what the GPU computes."""
        self.host += 0.5
        self.compute = max(self.compute, self.host) + duration

    def wait(self) -> float:
        """The host waits for the computing; what time it is then."""
        self.host = max(self.host, self.compute)
        return self.host


class Event:
    """A moment of a clock."""

    def __init__(self, clocks: Clocks, at: float) -> None:
        self._clocks, self.at = clocks, at

    def query(self) -> bool:
        return self.at <= self._clocks.host

    def synchronize(self) -> None:
        self._clocks.host = max(self._clocks.host, self.at)


def side_stream(clocks: Clocks) -> type:
    """Pretends to be a SharedSideStream."""

    class Stream:
        def __init__(self, purpose: str, *, is_timed: bool) -> None:
            self._purpose = purpose
            self.end: Event | None = None

        def after_current(self, _: torch.device) -> Any:
            return self._turn([clocks.compute])

        def after(self, _: torch.device, *ends: Event | None) -> Any:
            return self._turn([each.at for each in ends if each is not None])

        @contextmanager
        def _turn(self, begins: Sequence[float]) -> Iterator[None]:
            clocks.host += 0.05
            now = clocks.copies[self._purpose]
            clocks.copies[self._purpose] = max(now, clocks.host, *begins)
            yield
            self.end = Event(clocks, clocks.copies[self._purpose])

        @property
        def is_done(self) -> bool:
            return self.end is None or self.end.query()

        def finish(self) -> None:
            if self.end is not None:
                self.end.synchronize()

        def join(self) -> None:
            if self.end is not None:
                clocks.compute = max(clocks.compute, self.end.at)

    return Stream


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    """Those of a GPU beside which layers come and go."""
    found = Clocks()
    copy, step = host_buffer.copy_spans, module_steps.ModuleSteps._step
    stored = flat_buffer.FlatBuffer.store

    def copy_spans(*args: Any, to: Memory, **kwargs: Any) -> None:
        duration = sum(end - begin for begin, end in args[2]) / BLOCK_BYTES * COPY
        for each in (found.copies, found.busy):
            each[COMING if to is Memory.DEVICE else LEAVING] += duration
        copy(*args, to=to, **kwargs)

    def store(target: flat_buffer.FlatBuffer, name: str, tensor: Tensor) -> None:
        found.host = found.wait() + tensor.nbytes / BLOCK_BYTES * COPY
        stored(target, name, tensor)

    def stepped(*args: Any) -> None:
        step(*args)
        found.work(1.0)

    monkeypatch.setattr(flat_buffer, "SharedSideStream", side_stream(found))
    monkeypatch.setattr(flat_buffer, "copy_spans", copy_spans)
    monkeypatch.setattr(flat_buffer.FlatBuffer, "store", store)
    monkeypatch.setattr(module_groups, "end_of_current", lambda _: Event(found, found.compute))
    monkeypatch.setattr(module_steps.ModuleSteps, "_step", stepped)
    return found


class _Takes(torch.autograd.Function):
    """Adds one of the weights, which takes its time: twice as long in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, work: Callable[[float], None], duration: float
    ) -> Tensor:
        ctx.work, ctx.duration = work, duration
        ctx.save_for_backward(weight)
        work(duration)
        return x + weight[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        ctx.work(2 * ctx.duration)
        return gradients[0], torch.ones_like(weight), None, None


class Block(nn.Module):
    """A layer whose forward takes some milliseconds."""

    def __init__(self, clocks: Clocks, duration: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ELEMENTS))
        self._how = clocks.work, duration

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Takes.apply(x, self.weight, *self._how)  # type: ignore[no-untyped-call]
        return y


class Training:
    """Of blocks that are computed twice, within a budget of so many blocks with their state."""

    def __init__(self, clocks: Clocks, *, duration: float, budget: float) -> None:
        self._clocks = clocks
        self.blocks = nn.Sequential(*(Block(clocks, duration) for _ in range(BLOCKS)))
        self.optimizer = optim.AdamW(self.blocks.parameters())
        nbytes = int(budget * (BLOCK_BYTES + STATE_BYTES))
        self.swapper = Swapper(self.blocks, self.optimizer, device="cpu", budget=nbytes)

    def backward(self) -> None:
        x = torch.zeros(2, requires_grad=True)
        for each in self.blocks:
            x = checkpoint(each, x, use_reentrant=False)
        x.sum().backward()  # type: ignore[no-untyped-call]

    def took(self, run: Callable[[], object]) -> tuple[float, float]:
        """Milliseconds that something takes, and those of its copies in the busier direction."""
        begin, busy = self._clocks.wait(), dict(self._clocks.busy)
        run()
        copies = max(self._clocks.busy[each] - busy[each] for each in busy)
        return self._clocks.wait() - begin, copies


def test_copies_hide_behind_computing_that_takes_longer(clocks: Clocks) -> None:
    training = Training(clocks, duration=12.0, budget=6)
    with training.swapper.auto(step=True):
        for _ in range(3):
            training.backward()
        time, copies = training.took(training.backward)
    computing = BLOCKS * (4 * 12.0 + 1)
    assert 0.4 * computing < copies
    assert time <= 1.01 * computing


@pytest.mark.parametrize(("ahead", "most"), [(0, 1.55), (1, 1.1), (2, 1.1), (3, 1.1)])
def test_modules_ahead_hide_copies_that_take_as_long(
    clocks: Clocks, ahead: int, most: float
) -> None:
    training = Training(clocks, duration=6.0, budget=6)
    with training.swapper.auto(step=True, ahead=ahead):
        for _ in range(3):
            training.backward()
        time, copies = training.took(training.backward)
    computing = BLOCKS * (4 * 6.0 + 1)
    assert most - 0.15 < time / max(computing, copies) <= most


def test_the_next_modules_are_loaded_while_the_optimizer_steps(clocks: Clocks) -> None:
    training = Training(clocks, duration=6.0, budget=6)
    with training.swapper.auto():
        for _ in range(3):
            training.backward()
            time, copies = training.took(training.optimizer.step)
            training.optimizer.zero_grad()
    assert copies <= 52 * COPY  # weights, gradients and state of 16, less what stays
    assert copies <= time <= 1.3 * copies

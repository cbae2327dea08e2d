"""An error at any line of a load or an eviction keeps all tensors whole."""

from __future__ import annotations

import pytest
import torch
from interrupts import EVERY, Lines, first_of_each, out_of_memory, source_files
from offloaded_models import (
    assert_equal,
    copies,
    tensors_of,
    with_steps,
)
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from speedtorch.layers import Memory, OffloadedModule

PACKAGE = source_files("layers/*.py")


class Small(nn.Module):
    """A parameter, another one that has a part of its memory, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0))
        self.low = nn.Parameter(self.weight.data[:2])
        self.calls = nn.Buffer(torch.zeros(1))

    def forward(self) -> Tensor:
        self.calls.add_(1)
        return self.weight.square().sum() + self.low.sum()


Prepared = tuple[Small, Optimizer, OffloadedModule]


def small_step(small: Small, optimizer: Optimizer) -> None:
    small().backward()
    optimizer.step()


def prepare(move: str) -> Prepared:
    """A module before a move: all as it was, with new state and gradients, or with new buffers."""
    small = Small()
    optimizer = optim.SGD(small.parameters(), lr=0.1, momentum=0.9)
    offloaded = with_steps(small, optimizer, device="cpu", name="small")
    offloaded.load()
    small_step(small, optimizer)
    if move == "evict-new":
        return small, optimizer, offloaded
    offloaded.evict()
    if move == "load-new":
        optimizer.load_state_dict(optimizer.state_dict())
        small.calls = torch.ones(1)
    if move == "evict":
        offloaded.load()
        small_step(small, optimizer)
    return small, optimizer, offloaded


def do(prepared: Prepared, move: str) -> None:
    getattr(prepared[2], move.removesuffix("-new"))()


@pytest.mark.usefixtures("one_thread")
@EVERY
@pytest.mark.parametrize("follows", ["step", "load", "evict"])
@pytest.mark.parametrize("move", ["load", "evict", "load-new", "evict-new"])
def test_an_error_at_any_line_keeps_all_tensors_whole(move: str, follows: str, every: int) -> None:
    small, optimizer, _ = prepare(move)
    values = copies(tensors_of(small, optimizer))
    small_step(small, optimizer)
    stepped = copies(tensors_of(small, optimizer))
    prepared = prepare(move)
    with Lines(PACKAGE) as counted:
        do(prepared, move)
    assert counted.seen is not None
    last = {len(counted.seen) + 1 - each for each in first_of_each(counted.seen[::-1])}
    for number in sorted(last | set(first_of_each(counted.seen)))[::-every]:
        prepared = small, optimizer, offloaded = prepare(move)
        with Lines(PACKAGE, number, (KeyboardInterrupt, out_of_memory)[number % 2]) as lines:
            do(prepared, move)
        assert lines.came_out, lines.where
        assert_equal(tensors_of(small, optimizer), values)
        if follows == "step":  # what changes between two moves is not lost
            small_step(small, optimizer)
        else:
            do(prepared, follows)
            assert_equal(tensors_of(small, optimizer), values)
            small_step(small, optimizer)
        for again in (offloaded.load, offloaded.evict, offloaded.load):
            again()
            assert_equal(tensors_of(small, optimizer), stepped)
        assert (
            offloaded.evict() == offloaded.groups.nbytes
            and offloaded.groups.own.memory is Memory.HOST
        )
        small_step(small, optimizer)
        assert small.weight[:2].equal(small.low)

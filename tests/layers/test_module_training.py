"""Training with modules that are loaded and evicted equals a model on the device, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from interrupts import EVERY, Lines, first_of_each, out_of_memory, source_files
from offloaded_models import (
    COMMON_OPTIMIZERS,
    Layer,
    assert_equal,
    copies,
    tensors_of,
    with_steps,
)
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from speedtorch.layers import Memory, OffloadedModule

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    **COMMON_OPTIMIZERS,
    "Adam-single": partial(optim.Adam, foreach=False),
    "Adam-fused": partial(optim.Adam, fused=True),
    "AdamW-amsgrad": partial(optim.AdamW, amsgrad=True, weight_decay=0.1),
    "Adagrad-fused": partial(optim.Adagrad, lr=0.1, fused=True),
}
PACKAGE = source_files("layers/*.py")


class Model(nn.Module):
    """Two layers that may be modules, and a head that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Layer(), Layer(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.second(self.first(x)))
        return y


def model(device: str, make: Callable[..., Optimizer]) -> tuple[Model, Optimizer]:
    torch.manual_seed(5)
    made = Model().to(device)
    return made, make(made.parameters())


def batch(step: int, device: str) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(step)).to(device)


def train(
    made: Model, optimizer: Optimizer, device: str, before: Callable[[str], None], steps: int = 6
) -> list[Tensor]:
    """Trains, freezing a part for a while, and returns the losses; says what comes next."""
    losses = []
    for step in range(steps):
        made.second.into.weight.requires_grad_(step not in (2, 3))
        if step % 3 != 2:  # else gradients add up
            before("zero_grad")
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        before("forward")
        loss = made(batch(step, device)).square().mean()
        before("backward")
        loss.backward()
        before("step")
        optimizer.step()
        losses.append(loss.detach().cpu())
    return losses


def keep(_: str) -> None:
    """The model that stays."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors of a few elements, for which several threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("seed", range(2))
def test_training_equals_a_resident_model(device: str, kind: str, seed: int) -> None:
    expected, whole = model(device, OPTIMIZERS[kind])
    try:
        losses = train(expected, whole, device, keep)
    except RuntimeError as error:  # torch 2.11 has no fused Adagrad for GPUs
        pytest.skip(str(error))
    made, optimizer = model(device, OPTIMIZERS[kind])
    modules = [
        with_steps(layer, optimizer, device=device, name=name)
        for name, layer in (("first", made.first), ("second", made.second))
    ]
    choices = random.Random(f"{kind} {seed}")

    def before(what: str) -> None:
        for offloaded in choices.choices(modules, k=choices.randrange(5)):
            choices.choice([offloaded.load, offloaded.evict])()
        if what != "zero_grad":
            for offloaded in modules:
                offloaded.load()

    found = train(made, optimizer, device, before)
    assert all(torch.equal(a, b) for a, b in zip(found, losses, strict=True))
    assert_equal(tensors_of(made, optimizer), tensors_of(expected, whole))
    for offloaded in modules:
        offloaded.evict()
    assert_equal(tensors_of(made, optimizer), tensors_of(expected, whole))


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

"""Random programs of offloaded models and optimizers, each against a plain one of torch.

A program trains two models with the same calls: one whose layers are units of a Swapper, or whose
optimizer has a StateSwapper, or whose state sleeps and wakes, and one that stays where it is. The
calls train, step, clip, print, save and load, edit values by hand, change the dtype, copy the
model, and raise within forward, backward and step. After every call both have observed the same
numbers and raised the same errors; in the end both have the same weights, gradients and state.

SPEEDTORCH_PROGRAMS is how many programs are run; by default 40, always the same ones.
"""

from __future__ import annotations

import copy
import os
import random
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from offloaded_models import reloaded
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.utils import checkpoint

from speedtorch.layers import StateSwapper, Swapper, TrainingState

pytestmark = pytest.mark.usefixtures("one_thread")

PROGRAMS = int(os.environ.get("SPEEDTORCH_PROGRAMS", "40"))
CALLS, WIDTH, BLOCKS = 22, 4, 4
KINDS = ["units by use", "units by auto", "optimizer state", "sleep", "optimizer state and sleep"]
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": partial(optim.Adam, lr=0.02, amsgrad=True),
    "AdamW-fused": partial(optim.AdamW, lr=0.02, fused=True),
    "Adam-foreach": partial(optim.Adam, lr=0.02, foreach=True),
    "Adagrad": partial(optim.Adagrad, lr=0.05),
    "RMSprop": partial(optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "NAdam": optim.NAdam,
    "Adafactor": optim.Adafactor,
}


class Broken(Exception):
    """What a program raises in the middle of something."""


class Block(nn.Module):
    """Trained, tied, frozen and normalising parts, and a buffer that no state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.back = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.back.weight = self.into.weight
        self.norm = nn.BatchNorm1d(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("shift", torch.arange(WIDTH) / WIDTH, persistent=False)
        self.register_buffer("calls", torch.tensor(0))
        self.breaks = False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.norm(self.back(torch.tanh(self.into(x) + self.shift)) * self.scale)
        if self.breaks:
            raise Broken
        return x + self.frozen(y)


class Model(nn.Module):
    """Blocks, and a head that is no unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, numbers: list[int], *, again: bool = False) -> Tensor:
        for number in numbers:
            block = self.blocks[number]
            x = checkpoint.checkpoint(block, x, use_reentrant=False) if again else block(x)
        y: Tensor = self.head(x)
        return y


class World:
    """A model in training, which is offloaded or not."""

    def __init__(self, kind: str | None, optimizer: str, device: str, budget: int) -> None:
        torch.manual_seed(1)
        self.device, self.kind, self.budget = device, kind or "", budget
        self.model = Model()
        (self.model.head if "units" in self.kind else self.model).to(device)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.schedule = optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.average = [each.detach().cpu().clone() for each in self.model.parameters()]
        self.seen: list[Any] = []
        self.saved: Any = None
        self.swapper: Swapper | None = None
        self.states: StateSwapper | None = None
        self.sleeper: TrainingState | None = None
        self.offload()
        if "sleep" in self.kind:
            self.sleeper = TrainingState(self.model, self.optimizer, device=device)

    def offload(self) -> None:
        """Makes the swappers, or others after these were closed."""
        if "units" in self.kind:
            budget = None if "use" in self.kind else self.budget
            self.swapper = Swapper(
                self.model.blocks, self.optimizer, device=self.device, budget=budget
            )
            if "auto" in self.kind:
                self.swapper.auto()
        if "optimizer state" in self.kind:
            self.states = StateSwapper(self.optimizer, budget=self.budget, device=self.device)

    def close(self) -> None:
        for swapper in filter(None, (self.swapper, self.states)):
            swapper.close()

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def used(self, numbers: list[int]) -> AbstractContextManager[None]:
        if self.swapper is None or "auto" in self.kind or not numbers:
            return nullcontext()
        return self.swapper.use(*(self.model.blocks[each] for each in numbers))

    def observe(self, value: Any) -> None:
        """Notes what the program sees."""
        if isinstance(value, Tensor):
            value = value.detach().cpu().clone()
        self.seen.append(value)

    def state(self) -> dict[str, Any]:
        """All numbers by name."""
        found: dict[str, Any] = dict(self.model.named_parameters())
        found |= self.model.named_buffers()
        for name, each in self.model.named_parameters():
            found[f"gradient of {name}"] = each.grad
            for key, value in self.optimizer.state.get(each, {}).items():
                found[f"{key} of {name}"] = value
        found["groups"] = [
            {k: v for k, v in group.items() if k != "params"}
            for group in self.optimizer.param_groups
        ]
        return {
            name: each.detach().cpu().clone() if isinstance(each, Tensor) else copy.deepcopy(each)
            for name, each in found.items()
        }


Call = Callable[[World], object]


def train(world: World, seed: int, numbers: list[int], *, again: bool = False) -> None:
    batch = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed))
    x = batch.to(world.device, world.model.head.weight.dtype)
    with world.used(numbers):
        loss = world.model(x, numbers, again=again).square().mean()
        world.observe(loss)
        loss.backward()


def evaluate(world: World, seed: int, numbers: list[int], context: Any) -> None:
    x = torch.ones(5, WIDTH) * seed / 7
    world.model.eval()
    try:
        with context(), world.used(numbers):
            x = x.to(world.device, world.model.head.weight.dtype)
            world.observe(world.model(x, numbers).clone())
    finally:
        world.model.train()


def break_forward(world: World, number: int, numbers: list[int]) -> None:
    block = world.model.blocks[number]
    block.breaks = True
    try:
        train(world, 3, numbers)
    finally:
        block.breaks = False


def break_backward(world: World, number: int, numbers: list[int]) -> None:
    def broken(_: object) -> None:
        raise Broken

    handle = world.model.blocks[number].scale.register_hook(broken)
    try:
        train(world, 4, numbers)
    finally:
        handle.remove()
        world.optimizer.zero_grad()  # which parts were reached is autograd's


def break_step(world: World, *, before: bool) -> None:
    def broken(*_: object) -> None:
        raise Broken

    of = world.optimizer
    handle = (of.register_step_pre_hook if before else of.register_step_post_hook)(broken)
    try:
        of.step()
    finally:
        handle.remove()


def step_with_closure(world: World, seed: int, numbers: list[int], *, by_swapper: bool) -> None:
    def closure() -> Tensor:
        world.optimizer.zero_grad()
        train(world, seed, numbers)
        return torch.tensor(float(seed))

    stepper: Any = (world.swapper if by_swapper else None) or world.optimizer
    world.observe(stepper.step(closure))


def clip(world: World, limit: float, *, by_norm: bool) -> None:
    if by_norm and world.device == "cpu":  # a GPU adds in another order than the host, asleep
        world.observe(torch.nn.utils.clip_grad_norm_(world.model.parameters(), limit))
    elif any(each.grad is not None for each in world.parameters):  # or torch raises
        torch.nn.utils.clip_grad_value_(world.model.parameters(), limit)


def look(world: World, number: int) -> None:
    block = world.model.blocks[number]
    world.observe(block.into.weight.sum())
    world.observe(block.norm.running_mean.tolist())
    world.observe(str(block.into.weight.detach().cpu()))
    world.observe(float(block.scale.detach()))
    if block.scale.grad is not None:
        world.observe(block.scale.grad)
    world.observe(repr(block.into))


def print_(world: World, number: int) -> None:
    texts = repr(world.model.blocks[number].back.weight), str(world.model.blocks[number].norm.bias)
    without = [re.sub(r",\s*device='cuda:0'", "", each) for each in texts]
    world.observe([" ".join(each.split()) for each in without])


def look_at_all(world: World) -> None:
    world.observe(nn.utils.parameters_to_vector([e.detach().cpu() for e in world.parameters]))


def save(world: World, *, by_file: bool) -> None:
    state = world.model.state_dict(), world.optimizer.state_dict(), world.schedule.state_dict()
    if by_file:
        world.saved = reloaded(state, map_location="cpu")
    else:
        world.saved = copy.deepcopy(state)
    for name, each in world.saved[0].items():
        world.observe((name, each.dtype))
        world.observe(each)


def load(world: World, *, optimizer: bool) -> None:
    if world.saved is None:
        return
    state = copy.deepcopy(world.saved)
    world.model.load_state_dict(state[0])
    if optimizer:
        world.optimizer.load_state_dict(state[1])
        world.schedule.load_state_dict(state[2])


def load_own(world: World, how: str) -> None:
    state = world.optimizer.state_dict()
    if how == "after a step":
        world.optimizer.step()
    for kept in state["state"].values() if how == "written" else ():
        for value in kept.values():
            if isinstance(value, Tensor) and value.dim():
                value.fill_(0.5)
    world.optimizer.load_state_dict(state)


def change_dtype(world: World, dtype: torch.dtype) -> None:
    world.model.to(dtype)
    # Torch's optimizers cannot step with state of another dtype: loading converts it.
    world.optimizer.load_state_dict(copy.deepcopy(world.optimizer.state_dict()))
    world.saved = None


EDITS: dict[str, Callable[[Block], object]] = {
    "mul_": lambda block: block.into.weight.mul_(0.5),
    "data": lambda block: block.into.bias.data.add_(0.25),
    "row": lambda block: block.into.weight.__setitem__(1, 0.5),
    "buffer": lambda block: block.norm.running_mean.add_(0.125),
    "init": lambda block: nn.init.constant_(block.back.bias, 0.375),
    "frozen": lambda block: block.frozen.weight.copy_(block.into.weight),
    "assign": lambda block: setattr(block.scale, "data", torch.full_like(block.scale, 1.25)),
}


@torch.no_grad()
def edit(world: World, number: int, how: str) -> None:
    EDITS[how](world.model.blocks[number])


def edit_gradient(world: World, number: int, how: str) -> None:
    weight = world.model.blocks[number].into.weight
    if how == "make":
        weight.grad = torch.full_like(weight, 0.125)
    elif weight.grad is None:
        return
    elif how == "mul_":
        weight.grad.mul_(0.5)
    elif how == "clone":
        weight.grad = weight.grad.clone()
    elif how == "none":
        weight.grad = None


def edit_state(world: World, number: int, how: str) -> None:
    weight = world.model.blocks[number].into.weight
    if how == "pop":
        world.optimizer.state.pop(weight, None)
        return
    for key, value in world.optimizer.state.get(weight, {}).items():
        if isinstance(value, Tensor) and value.shape == weight.shape:
            if how == "zero_":
                value.zero_()
            elif how == "replace":
                world.optimizer.state[weight][key] = value * 0.5
            else:
                world.observe(value)
            return


def average(world: World) -> None:
    with torch.no_grad():
        for mean, each in zip(world.average, world.parameters, strict=True):
            mean.lerp_(each.detach().to("cpu", mean.dtype), 0.25)
    world.observe(world.average[0])


def copied(world: World) -> None:
    made = copy.deepcopy(world.model)
    world.observe(nn.utils.parameters_to_vector([e.detach().cpu() for e in made.parameters()]))
    with torch.no_grad():
        for each in made.parameters():
            each.zero_()


def freeze(world: World, number: int) -> None:
    bias = world.model.blocks[number].back.bias
    bias.requires_grad_(not bias.requires_grad)
    if not bias.requires_grad:
        bias.grad = None


def set_rate(world: World) -> None:
    world.optimizer.param_groups[0]["lr"] *= 0.5


def norm_gradient(world: World, numbers: list[int]) -> None:
    x = torch.ones(5, WIDTH).to(world.device, world.model.head.weight.dtype)
    with world.used(numbers):
        loss = world.model(x, numbers).square().mean()
        weights = [world.model.blocks[each].into.weight for each in numbers[:1]]
        world.observe(torch.autograd.grad(loss, [*weights, world.model.head.weight])[0])


def swap(world: World, what: str, number: int) -> None:
    block = world.model.blocks[number]
    if what == "new":
        world.close()
        world.offload()
    if what == "evict" and world.states is not None:
        world.states.evict()
    if world.swapper is not None and what != "new":
        is_all = what == "flush" or (what == "evict" and not number)
        getattr(world.swapper, what)(*([] if is_all else [block]))


def sleep(world: World, parts: list[Any]) -> None:
    if world.sleeper is not None:
        world.sleeper.sleep(parts)


def wake(world: World, parts: list[Any] | None) -> None:
    if world.sleeper is not None:
        world.sleeper.wake(parts)


def within_sleep(world: World, parts: list[Any], call: Call) -> None:
    with nullcontext() if world.sleeper is None else world.sleeper.asleep(parts):
        call(world)


def discard(world: World) -> None:
    """Lets weights be lost and loads them again, which a plain model does as well."""
    state = copy.deepcopy(world.model.state_dict())
    if world.sleeper is not None:
        world.sleeper.wake()
        world.sleeper.sleep(discard=["weights"])
        world.sleeper.wake()
        with pytest.raises(RuntimeError, match="discarded by sleep"):
            evaluate(world, 1, [0], torch.no_grad)
    world.model.load_state_dict(state)


def drawn(rng: random.Random, *, nested: bool = False) -> tuple[str, Call]:
    """A call, and what it is called in a failure."""
    number = rng.randrange(BLOCKS)
    numbers = sorted(rng.sample(range(BLOCKS), rng.randint(1, BLOCKS)))
    seed = rng.randrange(100)
    parts = rng.sample(["weights", "gradients", "optimizer"], rng.randint(1, 3))
    gradients = ["make", "mul_", "clone", "none"]
    calls: list[tuple[int, Callable[..., object], tuple[Any, ...], dict[str, Any]]] = [
        (16, train, (seed, numbers), {"again": rng.random() < 0.2}),
        (14, lambda world: world.optimizer.step(), (), {}),
        (4, step_with_closure, (seed, numbers), {"by_swapper": rng.random() < 0.5}),
        (6, lambda world: world.optimizer.zero_grad(), (), {}),
        (2, lambda world: world.optimizer.zero_grad(set_to_none=False), (), {}),
        (4, evaluate, (seed, numbers, rng.choice([torch.no_grad, torch.inference_mode])), {}),
        (3, break_forward, (rng.choice(numbers), numbers), {}),
        (3, break_backward, (rng.choice(numbers), numbers), {}),
        (3, break_step, (), {"before": rng.random() < 0.5}),
        (4, clip, (rng.choice([0.05, 1.0]),), {"by_norm": rng.random() < 0.7}),
        (5, look, (number,), {}),
        (3, print_, (number,), {}),
        (2, look_at_all, (), {}),
        (4, save, (), {"by_file": rng.random() < 0.5}),
        (4, load, (), {"optimizer": rng.random() < 0.7}),
        (4, load_own, (rng.choice(["at once", "after a step", "written"]),), {}),
        (2, change_dtype, (rng.choice([torch.float64, torch.bfloat16, torch.float32]),), {}),
        (5, edit, (number, rng.choice(list(EDITS))), {}),
        (4, edit_gradient, (number, rng.choice(gradients)), {}),
        (4, edit_state, (number, rng.choice(["zero_", "replace", "pop", "look"])), {}),
        (2, average, (), {}),
        (3, copied, (), {}),
        (2, freeze, (number,), {}),
        (2, lambda world: world.schedule.step(), (), {}),
        (1, set_rate, (), {}),
        (2, norm_gradient, (numbers,), {}),
    ]
    if not nested:
        swaps = ["prefetch", "evict", "flush", "touch", "new"]
        name, call = drawn(rng, nested=True)
        calls += [
            (10, swap, (rng.choice(swaps), number), {}),
            (5, sleep, (parts,), {}),
            (5, wake, (rng.choice([None, parts]),), {}),
            (4, within_sleep, (parts, call), {}),
            (3, discard, (), {}),
        ]
    _, function, args, more = rng.choices(calls, [weight for weight, *_ in calls])[0]
    said = f"{function.__name__}{args}{more or ''}"
    if function is within_sleep:
        said = f"asleep {parts}: {name}"
    return said, lambda world: function(world, *args, **more)


def done(world: World, call: Call) -> list[Any]:
    """What a call has shown, with the error that it has raised."""
    world.seen = []
    try:
        call(world)
    except Broken:
        world.seen.append("Broken")
    return world.seen


def is_same(value: Any, other: Any) -> bool:
    """Whether two are equal bit for bit; NaNs are."""
    if isinstance(value, Tensor):
        return (
            isinstance(other, Tensor)
            and value.dtype is other.dtype
            and value.shape == other.shape
            and torch.equal(value.nan_to_num(7), other.nan_to_num(7))
        )
    return bool(value == other)


def run(seed: int, device: str) -> None:
    """One program."""
    rng = random.Random(seed)
    kind, optimizer = KINDS[seed % len(KINDS)], rng.choice(list(OPTIMIZERS))
    budget = rng.choice([12, 20, 1000]) << 10
    found, expected = (World(each, optimizer, device, budget) for each in (kind, None))
    history = [f"seed {seed}: {kind}, {optimizer}, budget {budget}"]
    for _ in range(CALLS):
        name, call = drawn(rng)
        history.append(name)
        try:
            seen, wanted = done(found, call), None
            wanted = done(expected, call)
            same = len(seen) == len(wanted) and all(map(is_same, seen, wanted))
        except Exception as error:
            raise AssertionError("\n".join(history)) from error
        assert same, "\n".join(history) + f"\n{seen}\n{wanted}"
    if found.sleeper is not None and rng.random() < 0.5:
        found.sleeper.wake()
    for _ in range(2):
        ours, torchs = found.state(), expected.state()
        assert ours.keys() == torchs.keys(), "\n".join(history)
        wrong = [name for name, each in ours.items() if not is_same(each, torchs[name])]
        assert not wrong, "\n".join([*history, f"differ: {wrong}"])
        found.close()


@pytest.mark.parametrize("part", range(4))
def test_random_programs_have_the_numbers_of_torch(part: int, device: str) -> None:
    for seed in range(part, PROGRAMS, 4):
        run(seed, device)

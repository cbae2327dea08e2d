"""Programs of a Swapper's calls in any order give the bits of a model that stays."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from interrupts import EVERY, Lines, first_of_each, out_of_memory, source_files
from offloaded_models import (
    COMMON_OPTIMIZERS,
    Layer,
    Pair,
    assert_equal,
    copies,
    reloaded,
    tensors_of,
)
from ordinary_run import programs
from torch import Tensor, nn, optim
from torch.optim import Optimizer

pytestmark = pytest.mark.usefixtures("one_thread")

Make = Callable[..., Optimizer]
OPTIMIZERS: dict[str, Make] = {
    **COMMON_OPTIMIZERS,
    "Adam": optim.Adam,
    "Adam-single": partial(optim.Adam, foreach=False),
    "Adam-fused": partial(optim.Adam, fused=True),
    "AdamW-fused": partial(optim.AdamW, fused=True, amsgrad=True),
    "Adagrad-fused": partial(optim.Adagrad, lr=0.1, fused=True),
    "Adafactor": optim.Adafactor,
    "Muon": partial(optim.Muon, lr=0.05),
}
LAYERS = OPTIMIZERS.keys() - {"Muon"}
"""Kinds of runs whose modules have tensors of all kinds; others have matrices alone."""
OPTIMIZERS["Adam of matrices"] = optim.Adam
MODULES = 4
BUDGETS = ["20KiB", "36KiB", None]
PACKAGE = source_files("layers/*.py")

module = st.integers(0, MODULES - 1)
CALLS = st.one_of(
    st.tuples(st.just("train"), module, module),
    st.tuples(st.just("train late"), module, module),
    st.tuples(st.just("evaluate"), module, module),
    st.tuples(st.sampled_from(["prefetch", "evict", "freeze"]), module, module),
    st.tuples(st.sampled_from(["step", "zero_grad", "none_grad", "flush", "evict all"])),
    st.tuples(st.sampled_from(["save", "load", "schedule"])),
)


class Model(nn.Module):
    """Modules of all kinds of tensors, or of matrices alone, and a head that is none."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        matrix = partial(nn.Linear, 4, 4, bias=False)
        made = [Layer() if kind in LAYERS else matrix() for _ in range(MODULES)]
        self.layers = nn.ModuleList(made)
        self.head = nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor, *numbers: int) -> Tensor:
        for number in numbers:
            x = self.layers[number](x)
        y: Tensor = self.head(x)
        return y


class Run(Pair):
    """A program's calls on a model with a swapper, and on the same one without.

    Attributes:
        seen: the losses of both.
    """

    def __init__(self, kind: str, device: str, budget: str | None) -> None:
        torch.manual_seed(5)
        model = Model(kind)
        super().__init__(model, device, OPTIMIZERS[kind], lambda m: list(m.layers), budget=budget)
        self.schedules = [optim.lr_scheduler.StepLR(each, 2, 0.5) for each in self.optimizers]
        self.seen: list[list[Tensor]] = []
        self.save()

    def do(self, call: tuple[Any, ...], number: int) -> None:
        """One call; `number` makes it another than the others."""
        what, *modules = call
        layers = [self.made.layers[each] for each in modules]
        if what in ("train", "train late", "evaluate"):
            self.run(what, modules, number)
        elif what == "prefetch":
            self.swapper.prefetch(*layers)
        elif what.startswith("evict"):
            self.swapper.evict(*layers[:1])
        elif what == "flush":
            self.swapper.flush()
        elif what in ("save", "load"):
            getattr(self, what)()
        for (model, optimizer), schedule in zip(self, self.schedules, strict=True):
            if what == "freeze":
                weight = next(model.layers[modules[0]].parameters())
                weight.requires_grad_(not weight.requires_grad)
            elif what == "step":
                optimizer.step()
            elif what in ("zero_grad", "none_grad"):
                optimizer.zero_grad(set_to_none=what == "none_grad")
            elif what == "schedule":
                schedule.step()

    def run(self, what: str, modules: list[int], number: int) -> None:
        random = torch.Generator().manual_seed(number)
        x = torch.randn(6, 4, generator=random).to(self.swapper.device)
        used = partial(self.swapper.use, *{self.made.layers[each]: None for each in modules})
        with torch.inference_mode(what == "evaluate"), used():
            losses = [model(x, *modules).square().mean() for model, _ in self]
            if what == "train":
                torch.autograd.backward(losses)
        if what == "train late":
            self.swapper.evict()
            with used():
                torch.autograd.backward(losses)
        self.seen.append([loss.detach() for loss in losses])

    def save(self) -> None:
        states = [(model.state_dict(), optimizer.state_dict()) for model, optimizer in self]
        self.saved = reloaded(states, map_location="cpu")

    def load(self) -> None:
        for states, (model, optimizer) in zip(copy.deepcopy(self.saved), self, strict=True):
            model.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])

    def tensors(self) -> dict[str, Tensor]:
        return tensors_of(self.made, self.optimizers[0])


@pytest.mark.slow
@settings(max_examples=programs(4))
@pytest.mark.parametrize("kind", [*sorted(LAYERS), "Muon"])
@given(program=st.lists(CALLS, max_size=14), budget=st.sampled_from(BUDGETS))
def test_any_program_equals_a_resident_model(
    device: str, kind: str, program: list[tuple[Any, ...]], budget: str | None
) -> None:
    if kind == "Adagrad-fused" and device == "cuda":
        pytest.skip("torch has no fused Adagrad for CUDA")
    run = Run(kind, device, budget)
    before = 0
    for number, call in enumerate(program):
        run.do(call, number)
        if budget is not None:
            report = run.swapper.report()
            most = max(report.budget_bytes, before)  # prefetch waits for none that is to leave
            assert report.resident_bytes <= most or call[0] in ("step", "load")
            before = report.resident_bytes
    assert all(torch.equal(*losses) for losses in run.seen)
    run.assert_same()
    run.swapper.close()


def trained() -> Run:
    """A run with state, gradients, modules that are there and some that are not."""
    run = Run("Adam of matrices", "cpu", "2KiB")
    for number, call in enumerate([("train", 0, 1), ("step",), ("train", 1, 2), ("train", 3, 3)]):
        run.do(call, number)
    return run


@pytest.mark.slow
@EVERY
@pytest.mark.parametrize(
    "call",
    [("evaluate", 0, 2), ("prefetch", 0, 1), ("evict", 3, 3), ("evict all",), ("flush",)],
    ids=lambda call: call[0],
)
def test_an_error_at_any_line_changes_no_number(call: tuple[Any, ...], every: int) -> None:
    after = [("train", 2, 0), ("step",), ("evict all",)]
    values = copies(trained().tensors())
    run = trained()
    with Lines(PACKAGE) as counted:
        run.do(call, 9)
    assert counted.seen is not None
    for number in sorted(first_of_each(counted.seen))[::-every]:
        run = trained()
        with Lines(PACKAGE, number, (KeyboardInterrupt, out_of_memory)[number % 2]) as lines:
            run.do(call, 9)
        # A device without room is asked again when another module has left.
        assert lines.came_out or isinstance(lines.raised, torch.OutOfMemoryError), lines.where
        assert_equal(run.tensors(), values)
        for place, each in enumerate(after):
            run.do(each, 20 + place)
        assert not run.swapper.report().in_use


@pytest.mark.slow
@EVERY
def test_after_an_error_in_a_step_each_module_is_before_or_after_it(every: int) -> None:
    before = copies(trained().tensors())  # looking at them is a use, which the others have not
    run = trained()
    with Lines(PACKAGE) as counted:
        run.do(("step",), 9)
    after = copies(run.tensors())
    assert counted.seen is not None
    for number in sorted(first_of_each(counted.seen))[::-every]:
        run = trained()
        groups = [list(group["params"]) for group in run.optimizers[0].param_groups]
        with Lines(PACKAGE, number, (KeyboardInterrupt, out_of_memory)[number % 2]) as lines:
            run.do(("step",), 9)
        # A device without room is asked again when another module has left.
        assert lines.came_out or isinstance(lines.raised, torch.OutOfMemoryError), lines.where
        found = run.tensors()
        for place in range(MODULES):
            names = [name for name in found if f"layers.{place}." in name]
            states = [
                all(torch.equal(found[n].cpu(), each[n]) for n in names) for each in (before, after)
            ]
            assert any(states), (place, lines.where)
        now = [list(group["params"]) for group in run.optimizers[0].param_groups]
        assert [list(map(id, each)) for each in groups] == [list(map(id, each)) for each in now]
        run.do(("train", 0, 1), 10)
        run.do(("step",), 11)

"""Programs of a Swapper's calls in any order give the bits of a model that stays."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from interrupts import EVERY, Lines, first_of_each, out_of_memory, source_files
from offloaded_models import COMMON_OPTIMIZERS, Layer, assert_equal, copies, tensors_of
from ordinary_run import programs
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from speedtorch.layers import Swapper

Make = Callable[..., Optimizer]
OPTIMIZERS: dict[str, Make] = {
    **COMMON_OPTIMIZERS,
    "Adam": optim.Adam,
    "AdamW-fused": partial(optim.AdamW, fused=True, amsgrad=True),
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


class Run:
    """A program's calls on a model, with a swapper or without."""

    def __init__(self, kind: str, device: str, budget: str | None, *, swaps: bool) -> None:
        torch.manual_seed(5)
        self.device = device
        self.model = Model(kind)
        if swaps:
            self.model.head.to(device)
        else:
            self.model.to(device)
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.schedule = optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.swapper: Swapper | None = None
        if swaps:
            layers = self.model.layers
            self.swapper = Swapper(layers, self.optimizer, device=device, budget=budget)
        self.saved = io.BytesIO()
        self.seen: list[Tensor] = []
        self.save()

    def do(self, call: tuple[Any, ...], number: int) -> None:
        """One call; `number` makes it another than the others."""
        what, *modules = call
        if what in ("train", "train late", "evaluate"):
            self.run(what, modules, number)
        elif what == "freeze":
            weight = next(self.model.layers[modules[0]].parameters())
            weight.requires_grad_(not weight.requires_grad)
        elif what == "step":
            self.optimizer.step()
        elif what in ("zero_grad", "none_grad"):
            self.optimizer.zero_grad(set_to_none=what == "none_grad")
        elif what == "schedule":
            self.schedule.step()
        elif what == "save":
            self.save()
        elif what == "load":
            self.load()
        elif self.swapper is not None:
            layers = [self.model.layers[each] for each in modules]
            {
                "prefetch": lambda: self.swapper.prefetch(*layers),
                "evict": lambda: self.swapper.evict(layers[0]),
                "evict all": lambda: self.swapper.evict(),
                "flush": lambda: self.swapper.flush(),
            }[what]()

    def run(self, what: str, modules: list[int], number: int) -> None:
        random = torch.Generator().manual_seed(number)
        x = torch.randn(6, 4, generator=random).to(self.device)
        layers = {self.model.layers[each]: None for each in modules}

        def forward() -> Tensor:
            loss: Tensor = self.model(x, *modules).square().mean()
            self.seen.append(loss.detach().cpu())
            return loss

        if what == "evaluate":
            with torch.inference_mode(), self.used(*layers):
                forward()
        elif what == "train":
            with self.used(*layers):
                forward().backward()  # type: ignore[no-untyped-call]
        else:
            with self.used(*layers):
                loss = forward()
            if self.swapper is not None:
                self.swapper.evict()
            with self.used(*layers):
                loss.backward()  # type: ignore[no-untyped-call]

    def used(self, *layers: nn.Module) -> Any:
        return nullcontext() if self.swapper is None else self.swapper.use(*layers)

    def save(self) -> None:
        self.saved = io.BytesIO()
        torch.save((self.model.state_dict(), self.optimizer.state_dict()), self.saved)

    def load(self) -> None:
        self.saved.seek(0)
        model, optimizer = torch.load(self.saved, map_location="cpu")
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def tensors(self) -> dict[str, Tensor]:
        return tensors_of(self.model, self.optimizer)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@settings(max_examples=programs(4))
@pytest.mark.parametrize("kind", [*sorted(LAYERS), "Muon"])
@given(program=st.lists(CALLS, max_size=14), budget=st.sampled_from(BUDGETS))
def test_any_program_equals_a_resident_model(
    device: str, kind: str, program: list[tuple[Any, ...]], budget: str | None
) -> None:
    found, expected = (Run(kind, device, budget, swaps=swaps) for swaps in (True, False))
    assert found.swapper is not None
    before = 0
    for number, call in enumerate(program):
        for run in (found, expected):
            run.do(call, number)
        if budget is not None:
            report = found.swapper.report()
            most = max(report.budget_bytes, before)  # prefetch waits for none that is to leave
            assert report.resident_bytes <= most or call[0] in ("step", "load")
            before = report.resident_bytes
    assert all(map(torch.equal, found.seen, expected.seen))
    assert_equal(found.tensors(), expected.tensors())
    found.swapper.evict()
    assert_equal(found.tensors(), expected.tensors())
    found.swapper.close()


def trained(kind: str = "Adam of matrices") -> Run:
    """A run with state, gradients, modules that are there and some that are not."""
    run = Run(kind, "cpu", "2KiB", swaps=True)
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
    expected = trained()
    values = copies(expected.tensors())
    expected.do(call, 9)
    buffers = copies(dict(expected.model.named_buffers()))
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
        whole = {**values, **{k: v for k, v in copies(run.tensors()).items() if k in buffers}}
        assert_equal(run.tensors(), whole)
        for place, each in enumerate(after):
            run.do(each, 20 + place)
        assert run.swapper is not None and not run.swapper.report().in_use


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
        groups = [list(group["params"]) for group in run.optimizer.param_groups]
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
        now = [list(group["params"]) for group in run.optimizer.param_groups]
        assert [list(map(id, each)) for each in groups] == [list(map(id, each)) for each in now]
        run.do(("train", 0, 1), 10)
        run.do(("step",), 11)

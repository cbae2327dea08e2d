"""attach, where settings, state or gradients change behind it."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from probed_optimizers import Boxed, Own
from reference import assert_same_bytes, assert_same_content
from test_attach import EVERY, IDS, ROWS, WIDTH, Model, pair, step, train
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.optim.attached_state import state_of
from speedtorch.optim.optimizer_copy import OptimizerCopy

Make = Callable[..., optim.Optimizer]


def assert_same_rows(ours: Model, theirs: Model) -> None:
    assert_same_content(ours.state_dict(), theirs.state_dict())


class Lookahead(Own):
    """Keeps a number from its tenth step on, and a slow copy of the weights from its eleventh."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state["step"] = state.setdefault("step", 0) + 1
        parameter -= group["lr"] * gradient
        if state["step"] == 10:
            state["scale"] = torch.ones(1)
        if state["step"] == 11:
            state["slow"] = parameter.clone()


@pytest.mark.parametrize("attached", [False, True])
def test_momentum_that_is_switched_on_later_is_refused_before_a_step(attached: bool) -> None:
    embedding = speedtorch.Embedding(ROWS, WIDTH)
    sgd = optim.SGD(embedding.parameters(), lr=0.1)
    if attached:
        speedtorch.attach(sgd, embedding)
    step(embedding, sgd, IDS)
    before = embedding.state_dict()["weight"].clone()
    sgd.param_groups[0]["momentum"] = 0.9
    with pytest.raises(RuntimeError, match="SGD keeps momentum_buffer of each row.*[Nn]othing w"):
        step(embedding, sgd, IDS)
    assert_same_bytes(embedding.state_dict()["weight"], before)
    if attached:
        speedtorch.detach(sgd)
    speedtorch.attach(sgd, embedding)
    for ids in ([0, 1, 2], [5, 6, 7], [0, 1, 2]):
        step(embedding, sgd, torch.tensor(ids))
    buffer = embedding.table["momentum_buffer"]
    assert bool((buffer[[0, 5]] != 0).all()) and not bool(buffer[3].any())


@pytest.mark.parametrize("ids", [IDS, IDS[:1]], ids=["rows", "one row"])
def test_per_row_state_that_is_made_in_a_later_step_is_refused(ids: Tensor) -> None:
    embedding = speedtorch.Embedding(ROWS, WIDTH)
    lookahead = Lookahead(embedding.parameters())
    speedtorch.attach(lookahead, embedding)
    for _ in range(10):
        step(embedding, lookahead, ids)
    with pytest.raises(RuntimeError, match="unexpected per-row state 'slow'"):
        step(embedding, lookahead, ids)


@pytest.mark.parametrize("clears", ["hook", "closure"])
def test_state_is_saved_though_the_gradient_is_gone(clears: str) -> None:
    (_, _), (ours, adam) = pair()
    if clears == "hook":
        adam.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())
        step(ours, adam)
    else:

        def closure() -> Tensor:
            loss = ours(EVERY).square().sum()
            loss.backward()
            return loss

        adam.step(closure)
    saved = adam.state_dict()["state"][0]
    assert bool(saved["exp_avg"].all()) and saved["step"] == 1


def momentum(parameters: Any, lr: float) -> optim.Optimizer:
    return optim.SGD(parameters, lr, momentum=0.9)


@pytest.mark.parametrize("make", [optim.Rprop, optim.ASGD, optim.Adam, optim.Adagrad, momentum])
def test_a_scheduler_made_after_attach_changes_how_state_starts(make: Make) -> None:
    (theirs, theirs_opt), (ours, ours_opt) = made = pair(make)
    for model, optimizer in made:
        schedule: Any = optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
        if make is momentum:  # which it changes as well
            schedule = optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
        for _ in range(5):
            step(model, optimizer)
            schedule.step()
    assert_same_rows(ours, theirs)
    assert_same_content(ours_opt.state_dict(), theirs_opt.state_dict())


@pytest.mark.parametrize("make", [momentum, optim.Adam, Boxed])
@pytest.mark.parametrize("loads", ["model", "optimizer", "both", "fresh"])
def test_loading_keeps_a_gradient_that_waits_for_its_step(make: Make, loads: str) -> None:
    """`fresh`: State of before the first step."""
    models = pair(make)
    for model, optimizer in models:
        fresh = copy.deepcopy(optimizer.state_dict())
        step(model, optimizer)
        saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        step(model, optimizer)
        optimizer.zero_grad()
        model(EVERY).square().sum().backward()
        if loads in ("model", "both"):
            model.load_state_dict(saved[0])
        if loads != "model":
            optimizer.load_state_dict(fresh if loads == "fresh" else saved[1])
        optimizer.step()
    assert_same_rows(models[1][0], models[0][0])


def test_attach_after_the_step_that_needs_it_keeps_the_gradient() -> None:
    torch.manual_seed(0)
    theirs, ours = Model(nn.Embedding), Model()
    ours.load_state_dict(theirs.state_dict())
    for model in (theirs, ours):
        adam = optim.Adam(model.parameters(), lr=0.1)
        model(EVERY).square().sum().backward()
        if model is ours:
            before = [parameter.detach().clone() for parameter in ours.parameters()]
            names = "Adam keeps exp_avg, exp_avg_sq"
            with pytest.raises(RuntimeError, match=rf"{names}.*speedtorch.attach\("):
                adam.step()
            assert_same_content([parameter.detach() for parameter in ours.parameters()], before)
            speedtorch.attach(adam, model)
        adam.step()
    assert_same_rows(ours, theirs)


def test_what_torch_refuses_to_load_has_changed_nothing() -> None:
    (_, _), (ours, adam) = pair()
    step(ours, adam)
    expected = copy.deepcopy(adam.state_dict())
    fewer = optim.Adam([nn.Parameter(torch.zeros(1))]).state_dict()
    more_groups = {**expected, "param_groups": expected["param_groups"] * 2}
    for wrong in (fewer, more_groups):
        with pytest.raises(ValueError, match="parameter group"):
            adam.load_state_dict(wrong)
        assert_same_content(adam.state_dict(), expected)
    for name, value in (
        ("exp_avg_sq", expected["state"][0]["exp_avg_sq"].to("meta")),
        ("exp_avg_sq", expected["state"][0]["exp_avg_sq"].to_sparse()),
        ("exp_avg_sq", None),
        ("max_exp_avg_sq", torch.zeros(ROWS, WIDTH)),
    ):
        entries = {**expected["state"][0], name: value}
        with pytest.raises(ValueError, match=name):
            adam.load_state_dict({**expected, "state": {**expected["state"], 0: entries}})
        assert_same_content(adam.state_dict(), expected)
    entries = {n: v for n, v in expected["state"][0].items() if n != "step"}
    with pytest.raises(ValueError, match="Embedding has no step; nothing was loaded"):
        adam.load_state_dict({**expected, "state": {**expected["state"], 0: entries}})
    assert_same_content(adam.state_dict(), expected)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (optim.Adagrad, "sum"),
        (optim.Adam, "exp_avg"),
        (partial(optim.SGD, momentum=0.9), "momentum_buffer"),
    ],
)
def test_state_that_is_assigned_before_the_first_step_is_stepped_with(
    make: Make, name: str
) -> None:
    made = pair(make)
    for model, optimizer in made:
        state = optimizer.state[model.words.weight]
        state[name] = torch.full((ROWS, WIDTH), 0.5)
        if make is optim.Adam:
            state |= {"step": torch.tensor(3.0), "exp_avg_sq": torch.ones(ROWS, WIDTH)}
    train(made, 2)
    assert_same_rows(made[1][0], made[0][0])


def test_a_table_that_joins_an_attached_optimizer_keeps_the_state_of_the_first() -> None:
    torch.manual_seed(1)
    ours = [speedtorch.Embedding(ROWS, WIDTH) for _ in range(2)]
    theirs = [nn.Embedding(ROWS, WIDTH) for _ in range(2)]
    for own, other in zip(ours, theirs, strict=True):
        other.load_state_dict(own.state_dict())
    optimizers = [optim.Adam(tables[0].parameters(), lr=0.1) for tables in (ours, theirs)]
    speedtorch.attach(optimizers[0], ours[0])
    ids, count = torch.arange(ROWS), 1
    for number in range(4):
        if number == 2:
            for tables, optimizer in zip((ours, theirs), optimizers, strict=True):
                optimizer.add_param_group({"params": tables[1].parameters(), "lr": 0.01})
            speedtorch.attach(optimizers[0], nn.ModuleList(ours))
            count = 2
        for tables, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            torch.stack([table(ids).square().sum() for table in tables[:count]]).sum().backward()
            optimizer.step()
    for own, other in zip(ours, theirs, strict=True):
        assert_same_bytes(own.state_dict()["weight"], other.weight.detach())
    own_state, other_state = (optimizer.state_dict()["state"] for optimizer in optimizers)
    assert_same_content(own_state, other_state)


def test_a_table_that_cannot_join_keeps_the_state_of_the_first() -> None:
    first, second = (speedtorch.Embedding(ROWS, WIDTH) for _ in range(2))
    adam = optim.Adam(first.parameters())
    speedtorch.attach(adam, first)
    step(first, adam, IDS)
    before = adam.state_dict()["state"][0]["exp_avg"].clone()
    other = optim.Adam(second.parameters())
    speedtorch.attach(other, second)
    adam.add_param_group({"params": second.parameters()})
    with pytest.raises(ValueError, match="attached to another optimizer"):
        speedtorch.attach(adam, nn.ModuleList([first, second]))
    assert_same_bytes(adam.state_dict()["state"][0]["exp_avg"], before)


def test_attach_that_fails_at_the_second_table_keeps_the_first() -> None:
    both = nn.ModuleList([speedtorch.Embedding(ROWS, WIDTH), speedtorch.Embedding(ROWS, WIDTH)])
    adam = optim.Adam(both.parameters())
    adam.state[both[1].weight]["exp_avg"] = torch.zeros(ROWS, WIDTH)
    with pytest.raises(ValueError, match="Embedding has no step; nothing was loaded"):
        speedtorch.attach(adam, both)
    assert not adam._optimizer_state_dict_post_hooks
    del adam.state[both[1].weight]
    speedtorch.attach(adam, both)
    with pytest.raises(ValueError, match="attached already to every Embedding"):
        speedtorch.attach(adam, both)
    (both[0](IDS) + both[1](IDS)).sum().backward()
    adam.step()
    assert len(adam.state_dict()["state"]) == 2


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"
        ),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=repr,
)
def test_memory_that_runs_out_while_attach_tries_an_optimizer_is_no_fault_of_it(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedding = speedtorch.Embedding(ROWS, WIDTH)
    adagrad = optim.Adagrad(embedding.parameters())
    before = copy.deepcopy(adagrad.state_dict())
    step, calls = OptimizerCopy.step, [0]

    def fails(self: OptimizerCopy, gradient: Tensor, *, sparse: bool) -> None:
        calls[0] += 1
        if calls[0] == at:
            raise error
        step(self, gradient, sparse=sparse)

    monkeypatch.setattr(OptimizerCopy, "step", fails)
    for at in (1, 2, 8, 20):  # in each part of the probe
        calls[0] = 0
        with pytest.raises(type(error)) as raised:
            speedtorch.attach(adagrad, embedding)
        assert raised.value is error and calls[0] == at
    assert not embedding.trained_rows.state
    assert_same_content(adagrad.state_dict(), before)
    at = 0
    speedtorch.attach(adagrad, embedding)
    assert not state_of(embedding.trained_rows).sparse


def test_attach_that_fails_keeps_what_was_loaded_or_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = speedtorch.Embedding(ROWS, WIDTH), speedtorch.Embedding(ROWS, WIDTH)
    adam = optim.Adam(first.parameters(), lr=0.1)
    speedtorch.attach(adam, first)
    step(first, adam)
    saved = copy.deepcopy(adam.state_dict())
    first.flush()
    first.table.save(tmp_path / "rows.safetensors")
    loaded = speedtorch.Embedding(ROWS, WIDTH)
    read = speedtorch.Embedding.from_pretrained(tmp_path / "rows.safetensors", False)
    for module in (loaded, read):
        both = nn.ModuleList([module, second])
        adam = optim.Adam(both.parameters(), lr=0.1)
        if module is loaded:
            groups = adam.state_dict()["param_groups"]
            adam.load_state_dict({"state": saved["state"], "param_groups": groups})

        def no_room(*_: Any, **__: Any) -> bool:
            raise MemoryError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(second.trained_rows, "attach", no_room)
            with pytest.raises(MemoryError, match="no room"):
                speedtorch.attach(adam, both)
        with pytest.raises(ValueError, match="is not attached"):
            speedtorch.detach(adam)
        speedtorch.attach(adam, both)
        assert_same_bytes(module.table["exp_avg"], saved["state"][0]["exp_avg"])
        speedtorch.detach(adam)


class CountsInGroup(Own):
    """Makes its counter in the group when it steps first."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        super().step(closure)

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if group["step"] == 1:
            state["mean"] = torch.zeros_like(parameter)
        scale = state.get("never assigned", 1.0)
        parameter -= group["lr"] * scale * state["mean"].lerp_(gradient, 0.1)


def test_a_counter_in_the_group_is_no_setting() -> None:
    (theirs, _), (ours, _) = made = pair(CountsInGroup)
    train(made, 3)
    assert_same_rows(ours, theirs)


class KeepsBeside(Own):
    """Momentum, and something else beside it that is neither a tensor nor counted."""

    beside: Any

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(mean=torch.zeros_like(parameter), beside=self.beside)
        parameter -= group["lr"] * state["mean"].mul_(0.9).add_(gradient)


class Many(dict[str, int]):
    """A dict of a class of its own."""


BESIDE = (
    None,
    "text",
    float("nan"),
    {"a": 1},
    [None] * 3,
    (1, "a"),
    {1, 2},
    Counter(a=1),
    Many(b=2),
)


@pytest.mark.parametrize("beside", BESIDE, ids=lambda beside: type(beside).__name__)
def test_state_that_is_no_number_is_kept_beside_the_rows(beside: Any) -> None:
    kind = type("KeepsBeside", (KeepsBeside,), {"beside": beside})
    (theirs, _), (ours, ours_opt) = made = pair(kind)
    train(made, 2)
    assert_same_rows(ours, theirs)
    for entries in ours_opt.state_dict()["state"].values():
        assert repr(entries["beside"]) == repr(beside)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_within_a_step_does_not_change_the_outer_steps_rows(compiled: bool) -> None:
    scale, seen = nn.Parameter(torch.ones(1)), []
    sgd = optim.SGD([scale])

    class StepsAnother(Own):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)

        def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
            sgd.step()
            seen.append((type(parameter), tuple(parameter.shape)))
            parameter -= gradient

    embedding = speedtorch.Embedding(ROWS, WIDTH)
    step(embedding, optim.SGD(embedding.parameters()), IDS)  # SGD's step function is known
    before = embedding.state_dict()["weight"].clone()
    outer = StepsAnother(embedding.parameters())
    if compiled:  # torch.compile's own functions stand between a step and our hooks
        outer.step = torch.compile(outer.step, backend="eager")  # type: ignore[method-assign]
    step(embedding, outer, torch.tensor([2, 5]))
    assert seen[-1] == (nn.Parameter, (2, WIDTH))
    after = embedding.state_dict()["weight"]
    assert [row for row in range(ROWS) if not torch.equal(after[row], before[row])] == [2, 5]


@pytest.mark.parametrize("looks_up", [False, True])
def test_a_copy_of_model_and_optimizer_goes_on_with_the_whole_state(looks_up: bool) -> None:
    (_, _), (ours, adam) = pair()
    step(ours, adam)
    step(ours, adam, IDS)
    copied, copied_adam = copy.deepcopy((ours, adam))
    with pytest.raises(RuntimeError, match=r"Call speedtorch.attach\(.* Nothing was stepped"):
        step(copied, copied_adam, IDS)
    if looks_up:
        copied(IDS)
    speedtorch.attach(copied_adam, copied)
    another = copy.deepcopy(ours)
    fresh = optim.Adam(another.parameters(), lr=0.1)
    speedtorch.attach(fresh, another)
    fresh.load_state_dict(copy.deepcopy(adam.state_dict()))  # torch shares the step count
    for model, optimizer in ((ours, adam), (copied, copied_adam), (another, fresh)):
        step(model, optimizer, IDS)
        step(model, optimizer)
    for model, optimizer in ((copied, copied_adam), (another, fresh)):
        assert_same_rows(model, ours)
        assert_same_content(optimizer.state_dict(), adam.state_dict())


def test_the_next_optimizer_of_a_table_from_a_file_begins_anew(tmp_path: Path) -> None:
    (_, _), (ours, adam) = pair()
    step(ours, adam)
    ours.words.flush()
    ours.words.table.save(tmp_path / "rows.safetensors")
    embedding = speedtorch.Embedding.from_pretrained(tmp_path / "rows.safetensors", False)
    first = optim.Adam(embedding.parameters(), lr=0.1)
    speedtorch.attach(first, embedding)
    with pytest.warns(UserWarning, match="a file had the rows' exp_avg, exp_avg_sq, but step"):
        step(embedding, first, IDS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(embedding, first, IDS)
    speedtorch.detach(first)
    second = optim.Adam(embedding.parameters(), lr=0.1)
    speedtorch.attach(second, embedding)
    embedding(IDS)
    assert not bool(embedding.table["exp_avg"].any())
    again = speedtorch.Embedding.from_pretrained(tmp_path / "rows.safetensors", False)
    third = optim.Adam(again.parameters(), lr=0.1)
    speedtorch.attach(third, again)
    entries = {**adam.state_dict()["state"][0]}
    group = {**adam.state_dict()["param_groups"][0], "params": [0]}
    third.load_state_dict({"state": {0: entries}, "param_groups": [group]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(again, third, IDS)

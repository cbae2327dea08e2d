"""attach with GradScaler and schedulers, and what a step needs no probe or copy for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_attach import EVERY, IDS, Model, pair, step
from torch import nn, optim

import speedtorch

Make = Callable[..., optim.Optimizer]


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p, lr: optim.SGD(p, lr, fused=True),
    "SGD-nesterov": lambda p, lr: optim.SGD(p, lr, momentum=0.9, nesterov=True, fused=True),
    "Adam": lambda p, lr: optim.Adam(p, lr, fused=True),
    "Adam-foreach": lambda p, lr: optim.Adam(p, lr, foreach=True),
    "AdamW": lambda p, lr: optim.AdamW(p, lr, fused=True),
    "Adagrad": lambda p, lr: optim.Adagrad(p, lr, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("attached", [True, False], ids=["attached", "alone"])
def test_a_grad_scaler_and_a_later_scheduler_work_as_in_torch(
    device: str, name: str, attached: bool
) -> None:
    if (not attached and name != "SGD") or (device == "cuda" and name == "Adagrad"):
        pytest.skip("has state, or torch has none on a GPU")
    made = pair(OPTIMIZERS[name], device)
    if not attached:
        speedtorch.detach(made[1][1])
    for model, optimizer in made:
        scaler = torch.amp.GradScaler(device, init_scale=4.0)
        schedule = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for number in range(5):
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = model(EVERY.to(device)).float().square().sum()
            if number == 2:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
        assert scaler.get_scale() == 2.0
    (theirs, their_optimizer), (ours, our_optimizer) = made
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name].to(device), value)
    kept = our_optimizer.state_dict()["state"].get(0, {})
    for name, value in their_optimizer.state_dict()["state"].get(0, {}).items():
        torch.testing.assert_close(kept[name].to(value.device), value)


def test_numbers_that_a_scheduler_changes_need_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    (_, _), (ours, adam) = pair()
    schedule = optim.lr_scheduler.OneCycleLR(adam, 0.1, total_steps=6)

    def no(*_: Any) -> None:
        raise AssertionError("probed")

    monkeypatch.setattr("speedtorch.optim.step_state.probe_optimizer", no)
    step(ours, adam, IDS)
    monkeypatch.setattr("speedtorch.optim.step_state.learn_state", no)
    for _ in range(3):
        schedule.step()
        step(ours, adam, IDS)


def test_a_model_that_its_optimizer_holds_is_not_copied_by_attach_or_step() -> None:
    class Watcher(optim.Adam):
        def __init__(self, model: nn.Module) -> None:
            super().__init__(model.parameters(), lr=0.1)
            self.model = model

    made = []
    from_fields = speedtorch.HostTable.from_fields
    model = Model()
    watcher = Watcher(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            speedtorch.HostTable,
            "from_fields",
            lambda *args, **more: made.append(args) or from_fields(*args, **more),
        )
        speedtorch.attach(watcher, model)
        step(model, watcher)
        watcher.param_groups[0]["amsgrad"] = False
        watcher.param_groups[0]["weight_decay"] = 0.1
        step(model, watcher)
    assert len(made) == 1

"""What a captured step keeps takes over a state that is loaded, in the tensors that it has."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.nn.captured_state import CapturedState

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "Adam": lambda p: optim.Adam(p, lr=0.1, amsgrad=True),
    "Adam, rate in a tensor": lambda p: optim.Adam(p, lr=torch.tensor(0.1)),
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "Rprop": lambda p: optim.Rprop(p, lr=0.1),
}


class Run:
    """A table and a layer, their optimizer, and what a graph of its step would keep."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.emb = speedtorch.Embedding(20, 4, capacity=8)
        self.layer = nn.Linear(4, 1)
        self.modules = [self.emb, self.layer]
        self.optimizer = OPTIMIZERS[name](nn.ModuleList(self.modules).parameters())
        speedtorch.attach(self.optimizer, self.emb)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.layer(self.emb(torch.arange(4))).square().mean().backward()
        self.optimizer.step()

    def captured(self) -> CapturedState:
        return CapturedState(self.modules, [self.optimizer], [self.emb.trained_rows])

    def tensors(self) -> dict[str, Tensor]:
        own = self.optimizer.state[self.layer.weight]
        found = {name: value for name, value in own.items() if isinstance(value, Tensor)}
        rate = self.optimizer.param_groups[0]["lr"]
        return found | ({"lr": rate} if isinstance(rate, Tensor) else {})


def saved(optimizer: optim.Optimizer) -> Any:
    torch.save(optimizer.state_dict(), file := io.BytesIO())
    return torch.load(io.BytesIO(file.getvalue()))


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loaded_state_is_that_of_the_graphs_tensors(name: str, steps: int) -> None:
    run = Run(name)
    for _ in range(steps):
        run.step()
    state = saved(run.optimizer)
    expected = {key: tensor.clone() for key, tensor in run.tensors().items()}
    for _ in range(3):
        run.step()
    captured, own = run.captured(), run.tensors()
    run.optimizer.load_state_dict(state)
    for _ in range(2):
        captured.before_replay()
        now = run.tensors()
        assert now.keys() == own.keys()
        assert all(now[key] is value for key, value in own.items())
        first = 0.1 if name == "Rprop" else 0.0
        for key, value in own.items():
            start = first if key == "step_size" else 0.0
            assert torch.equal(value, expected.get(key, torch.full_like(value, start))), key
    run.step()


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    run = Run("Adam")
    run.step()
    captured = run.captured()
    state = saved(run.optimizer)
    before = {key: tensor.clone() for key, tensor in run.tensors().items()}
    own = run.tensors()
    state["state"][1]["exp_avg"] = torch.zeros(3)
    run.optimizer.load_state_dict(state)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"'exp_avg' of Adam was .* \[1, 4\] .* now \[3\]"):
            captured.before_replay()
    assert all(torch.equal(own[key], value) for key, value in before.items())

"""load_state_dict of an attached optimizer, interrupted at any line: all is old, or all is new."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from interrupts import OPTIMIZERS, PACKAGE, Lines, first_of_each, out_of_memory
from probed_optimizers import Boxed
from reference import assert_same_bytes, assert_same_content
from test_attach import IDS, ROWS, WIDTH, step
from torch import Tensor, nn, optim

import speedtorch


class Model(nn.Module):
    """Two tables and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([speedtorch.Embedding(ROWS, WIDTH) for _ in range(2)])
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        first, second = self.tables
        return self.out((first(ids) + second(ids)).tanh())


class Training:
    """Training that begins again and again, and the state that it is to load in the middle."""

    def __init__(self, make: Any) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = make(self.model.parameters(), lr=0.1)
        speedtorch.attach(self.optimizer, self.model)
        step(self.model, self.optimizer, IDS)
        self._begin = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        for ids in ([3, 7], [1, 2, 7]):
            step(self.model, self.optimizer, torch.tensor(ids))
        self.optimizer.param_groups[0]["lr"] = 0.3
        self.states = {"new": copy.deepcopy(self.optimizer.state_dict())}
        self.states["old"] = copy.deepcopy(self.begun().optimizer.state_dict())
        self.goes_on = {}
        for which in self.states:
            self.begun().load(which)
            self.goes_on[which] = self.go_on()

    def begun(self) -> Training:
        """In the middle of training: held rows are newer than the table's."""
        weights, state = copy.deepcopy(self._begin)
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(state)
        step(self.model, self.optimizer, torch.tensor([3, 4]))
        return self

    def load(self, which: str = "new") -> None:
        self.optimizer.load_state_dict(copy.deepcopy(self.states[which]))

    def go_on(self) -> dict[str, Tensor]:
        step(self.model, self.optimizer, torch.tensor([3, 4, 7]))
        return copy.deepcopy(self.model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "error"), [(optim.Adam, KeyboardInterrupt), (Boxed, out_of_memory)]
)
@pytest.mark.parametrize(
    "every", [5, pytest.param(1, marks=pytest.mark.nightly)], ids=["every-5th-line", "every-line"]
)
def test_an_interrupted_load_is_all_of_it_or_nothing(make: Any, error: Any, every: int) -> None:
    training, files, seen = Training(make), PACKAGE | OPTIMIZERS, set()
    training.begun()
    with Lines(files) as lines:
        training.load()
    for number, at in enumerate(first_of_each(lines.seen or [])[::every]):
        training.begun()
        with Lines(files, at, error) as lines:
            training.load()
        assert lines.came_out, lines.where
        # Every second time the tables are used before the optimizer is.
        tables = [m.table["exp_avg"].clone() for m in training.model.tables[: number % 2 * 2]]
        found = training.optimizer.state_dict()
        which = "new" if found["param_groups"][0]["lr"] == 0.3 else "old"
        assert_same_content(found, training.states[which])
        for table, entries in zip(tables, found["state"].values(), strict=False):
            assert_same_bytes(table, entries.get("box", entries)["exp_avg"])
        assert_same_content(training.go_on(), training.goes_on[which])
        seen.add(which)
    assert seen == {"old", "new"}

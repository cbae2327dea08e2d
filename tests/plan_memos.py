"""Tables that make plans on the CPU too, and what the tests of plan memos watch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from model_families import ROWS, WIDTH, filled
from optimizer_families import build
from optimizer_families import filled as filled_state
from torch import Tensor, nn

import speedtorch
from speedtorch import HostTable, ModelFactory, OptimizerFactory
from speedtorch.legacy import batch_exchange, plan_memo, switcher
from speedtorch.legacy.plan_memo import PlanMemo

CPU = torch.device("cpu")


def always(memory: str, device: torch.device) -> bool:
    return True


class Made(list[list[int]]):
    """The ids of every plan that was made, in order."""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """Counts the plans of the memos."""
    result = Made()

    def plan_rows(index: Tensor, rows: int) -> list[Tensor]:
        result.append(index.tolist())
        return speedtorch.plan_rows(index, rows)

    monkeypatch.setattr(plan_memo, "plan_rows", plan_rows)
    return result


@pytest.fixture
def planning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every table makes plans on the CPU too."""
    monkeypatch.setattr(plan_memo, "plans_pay", always)


@pytest.fixture
def memo(monkeypatch: pytest.MonkeyPatch) -> PlanMemo:
    """Makes plans on the CPU."""
    monkeypatch.setattr(plan_memo, "plans_pay", always)
    return PlanMemo(ROWS, "plain")


def check(found: tuple[Tensor, Any], ids: list[int]) -> None:
    """The index holds these ids, and the plan is theirs."""
    index, plan = found
    assert index.tolist() == ids
    for part, expected in zip(plan, speedtorch.plan_rows(torch.tensor(ids), ROWS), strict=True):
        assert torch.equal(part, expected)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The plan that each op of a SpeedTorch class was given, in order."""
    given: list[Any] = []

    def watched(op: Any) -> Any:
        def call(*args: Any, plan: Any = None, **kwargs: Any) -> Any:
            given.append(plan)
            return op(*args, plan=plan, **kwargs)

        return call

    for module, name in ((switcher, "pinned_gather"), (batch_exchange, "pinned_scatter")):
        monkeypatch.setattr(module, name, watched(getattr(speedtorch, name)))
    yield given


def shared(
    memory: str = "plain", device: str = "cpu"
) -> tuple[HostTable, nn.Embedding, ModelFactory, OptimizerFactory]:
    """A table that a ModelFactory and an OptimizerFactory share, with known rows."""
    model, optimizer = build(device=device)
    table = HostTable(ROWS, WIDTH, state=("exp_avg", "exp_inf"), memory=memory)
    weights = ModelFactory(model.users, ROWS, WIDTH, table=table)
    states = OptimizerFactory(optimizer, ROWS, WIDTH, model, "users", table=table)
    states.optInit()
    filled_state(states)
    filled(weights)
    return table, model.users, weights, states


def exchange(weights: Any, states: Any, ids: Any) -> None:
    """What a training step does with the rows of a batch."""
    weights.beforeForwardPass(ids)
    states.beforeForwardPass(ids)
    weights.afterOptimizerStep(ids)
    states.afterOptimizerStep(ids)

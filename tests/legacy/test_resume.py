"""Training that stops and goes on from files gives the numbers of training that never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plan_memos import planning
from reference import assert_same_bytes
from torch import nn

from speedtorch import HostTable, ModelFactory, OptimizerFactory

__all__ = ["planning"]

ROWS, WIDTH = 50, 7


class Training:
    """Adam on random batches of a table shared by a ModelFactory and an OptimizerFactory."""

    def __init__(self, table: HostTable) -> None:
        self.table = table
        self.model = nn.ModuleDict({"u": nn.Embedding(4, WIDTH)})
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.rows = ModelFactory(self.model["u"], ROWS, WIDTH, table=table)
        row = (self.optimizer, ROWS, WIDTH, self.model, "u")
        self.state = OptimizerFactory(*row, table=table)

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            draw = torch.Generator().manual_seed(step)
            ids = torch.randperm(ROWS, generator=draw)[:8]
            self.rows.beforeForwardPass(ids)
            self.state.beforeForwardPass(ids)
            self.optimizer.zero_grad()
            target = torch.rand(8, WIDTH, generator=draw)
            (self.model["u"](torch.arange(8)) - target).square().sum().backward()
            self.optimizer.step()
            self.rows.afterOptimizerStep(ids)
            self.state.afterOptimizerStep(ids)


def new_table() -> HostTable:
    return HostTable(ROWS, WIDTH, state=["exp_avg", "exp_avg_sq"], memory="plain").uniform_(
        -1, 1, seed=1
    )


def test_a_shared_table_read_from_a_file_goes_on_without_optinit(tmp_path: Path) -> None:
    whole, first = Training(new_table()), Training(new_table())
    for training in (whole, first):
        training.state.optInit()
    whole.steps(0, 12)
    first.steps(0, 5)
    first.table.save(tmp_path / "t.safetensors")
    kept: Any = first.optimizer.state_dict()

    second = Training(HostTable.open(tmp_path / "t.safetensors", "plain"))
    second.optimizer.load_state_dict(kept)  # the step count
    second.steps(5, 12)
    assert_same_bytes(second.table.record, whole.table.record)


def test_a_new_shared_table_still_needs_optinit() -> None:
    training = Training(new_table())
    training.rows.beforeForwardPass([1])
    with pytest.raises(RuntimeError, match="Call optInit"):
        training.state.beforeForwardPass([1])


@pytest.mark.parametrize("planned", [True, False])
def test_a_closed_table_is_not_trained_on(request: pytest.FixtureRequest, planned: bool) -> None:
    if planned:
        request.getfixturevalue("planning")
    training = Training(new_table())
    training.state.optInit()
    training.steps(0, 1)
    training.table.close()
    for switcher in (training.rows, training.state):
        with pytest.raises(ValueError, match="this table is closed"):
            switcher.beforeForwardPass([1])
        with pytest.raises(ValueError, match="this table is closed"):
            switcher.afterOptimizerStep(torch.arange(8))

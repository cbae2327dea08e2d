"""Rows that move beside the computing wait for the steps before, and the next step for them."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import pytest
import torch
from recorded_streams import RecordedStreams
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.memory.side_stream import SideStream
from speedtorch.step import counted_memory, joint_exchange
from speedtorch.step.counted_memory import CountedMemory
from speedtorch.step.fixed_blocks import FixedBlocks
from speedtorch.step.fixed_memory import FixedMemory
from speedtorch.step.joint_exchange import JointExchange
from speedtorch.step.row_store import RowStore

STEPS = 5


class Kept:
    """The memory that is kept for a side stream, and that it reads."""

    def __init__(self, streams: RecordedStreams, patch: pytest.MonkeyPatch) -> None:
        self.addresses: set[int] = set()
        self.read: set[int] = set()

        def uses(_: SideStream, tensors: Sequence[Tensor]) -> None:
            self.addresses |= {each.data_ptr() for each in tensors}

        def watched(owner: type, name: str, at: int) -> None:
            call: Any = getattr(owner, name)

            def exchange(*args: Any) -> None:
                if args[at] is not None and streams.current.name == "exchange of main":
                    self.read |= {each.data_ptr() for each in args[at].rows}
                call(*args)

            patch.setattr(owner, name, exchange)

        patch.setattr(SideStream, "uses", uses)
        watched(RowStore, "exchange", 2)
        watched(JointExchange, "_exchange", 1)


@pytest.fixture(params=["one table", "two tables at once", "a capacity"])
def model(
    request: pytest.FixtureRequest, streams: RecordedStreams, monkeypatch: pytest.MonkeyPatch
) -> Iterator[nn.ModuleList]:
    """Tables whose plans, exchanges of rows and carried rows are recorded."""
    streams.pretend_on_cpu()
    kept = Kept(streams, monkeypatch)
    kind, capacity = request.param, None
    if kind == "two tables at once":
        streams.works(JointExchange, "_exchange", "exchange")
        streams.works(joint_exchange, "JointBatch", "plan")
        streams.works(joint_exchange, "carry_rows", "carry")
    elif kind == "one table":
        streams.works(RowStore, "load", "exchange")
        streams.works(RowStore, "exchange", "exchange")
        streams.works(CountedMemory, "plan", "plan")
        streams.works(counted_memory, "carry_rows", "carry")
    else:
        capacity = 8
        streams.works(RowStore, "exchange_counted", "exchange")
        streams.works(FixedMemory, "plan", "plan")
        streams.works(FixedBlocks, "begin", "carry", first=0)  # the first step carries none
    count = 1 + (kind == "two tables at once")
    yield nn.ModuleList(speedtorch.Embedding(20, 4, capacity=capacity) for _ in range(count))
    # The blocks of a capacity are never freed.
    assert bool(kept.read) == (capacity is None) and kept.read <= kept.addresses


def train(model: nn.ModuleList, streams: RecordedStreams, steps: int = STEPS) -> None:
    """Overlapping batches: "ids 1", "plan 1", "exchange 1", "lookup 1", "step 1", "carry 1" ..."""
    sgd = optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    speedtorch.attach(sgd, model)

    def batches() -> Iterator[Tensor]:
        for at in range(0, 3 * STEPS, 3):
            streams.count("ids")
            yield torch.arange(at, at + 6)

    loop = speedtorch.prefetch(batches(), model, ids=lambda ids: dict.fromkeys(model, ids))
    for ids in islice(loop, steps):
        found = [module(ids).sum() for module in model]
        streams.count("lookup")
        torch.stack(found).sum().backward()
        sgd.step()
        sgd.zero_grad()
        streams.count("step")


def test_plans_and_rows_of_the_next_batch_are_beside_the_computing(
    model: nn.ModuleList, streams: RecordedStreams
) -> None:
    train(model, streams)
    for number in range(2, STEPS):
        assert streams.on[f"plan {number}"] == "planning of main"
        assert streams.on[f"exchange {number}"] == "exchange of main"
        assert f"exchange {number + 1}" not in streams.before(f"step {number}")


def test_a_plan_is_made_behind_its_ids(model: nn.ModuleList, streams: RecordedStreams) -> None:
    train(model, streams)
    for number in range(1, STEPS + 1):
        assert f"ids {number}" in streams.before(f"plan {number}")


def test_rows_move_behind_the_steps_before_and_the_plans(
    model: nn.ModuleList, streams: RecordedStreams
) -> None:
    train(model, streams)
    assert "plan 1" in streams.before("exchange 1")
    for number in range(2, STEPS):
        wanted = {f"plan {number - 1}", f"plan {number}", f"exchange {number - 1}"}
        if number > 2:
            wanted |= {f"step {number - 2}", f"carry {number - 2}"}
        assert wanted <= streams.before(f"exchange {number}")


def test_a_step_begins_behind_its_rows_and_plan(
    model: nn.ModuleList, streams: RecordedStreams
) -> None:
    train(model, streams)
    for number in range(1, STEPS):
        assert {f"exchange {number + 1}", f"step {number}"} <= streams.before(f"carry {number}")
    for number in range(1, STEPS + 1):
        assert {f"plan {number}", f"exchange {number}"} <= streams.before(f"lookup {number}")


def test_prefetched_rows_of_a_loop_that_is_left_are_written_behind_their_arrival(
    model: nn.ModuleList, streams: RecordedStreams
) -> None:
    train(model, streams, steps=3)  # and the rows of a fourth are on their way
    gc.collect()
    for module in model:
        module.state_dict()
    streams.work("read")
    last = max(name for name, on in streams.on.items() if on == "exchange of main")
    assert last == "exchange 4" and last in streams.before("read")
    written = [
        name
        for name in streams.on
        if name.startswith("exchange") and name > last and streams.on[name] == "main"
    ]
    assert written and all(last in streams.before(name) for name in written)

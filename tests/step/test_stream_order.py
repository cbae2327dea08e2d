"""No stream uses memory out of order, in training with rows that move beside the computing."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_streams import RecordedStreams
from stream_order import StreamOrder
from stress.training import Program
from torch import Tensor, nn

import speedtorch

# Random programs: how many, and the seed of the first. Some of these leave a prefetch loop early.
ROUNDS = int(os.environ.get("SPEEDTORCH_ROUNDS", "6"))
FIRST = int(os.environ.get("SPEEDTORCH_FIRST", "0"))
STEPS = 12


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (Tensor.zero_, Tensor.sum, "zero_.default writes it on side, aten.sum.default reads"),
        (Tensor.sum, Tensor.zero_, "sum.default reads it on side, aten.zero_.default writes"),
    ],
    ids=["read", "write"],
)
def test_use_without_a_wait_for_another_stream_is_a_fault(
    before: Callable[[Tensor], Tensor],
    after: Callable[[Tensor], Tensor],
    text: str,
    order: StreamOrder,
    streams: RecordedStreams,
) -> None:
    main, side = streams.current, streams.stream("side")

    def work() -> None:
        values = torch.zeros(3)
        side.wait_stream(main)
        streams.use(side)
        before(values)
        streams.use(main)
        after(values)
        main.wait_stream(side)
        after(values)

    assert order.found(work) == f"memory [3] of main: aten.{text} it on main"


@pytest.mark.parametrize("kept", ["by nothing", "by the allocator", "by a wait", "by a reference"])
def test_freeing_what_another_stream_still_uses_is_a_fault(
    kept: str, order: StreamOrder, streams: RecordedStreams
) -> None:
    main, side = streams.current, streams.stream("side")

    def work() -> list[Tensor]:
        values = torch.zeros(3)
        side.wait_stream(main)
        streams.use(side)
        values.sum()
        streams.use(main)
        if kept == "by the allocator":
            order.keep([values], "side")
        if kept == "by a wait":
            main.wait_stream(side)
        references = [values] if kept == "by a reference" else []
        del values
        torch.ones(3)
        return references

    text = "aten.sum.default reads it on side, aten.ones.default may get it on main"
    assert order.found(work) == (f"memory [3] of main: {text}" if kept == "by nothing" else "")


def one_table() -> list[speedtorch.Embedding]:
    return [speedtorch.Embedding(40, 4)]


def tables_at_once() -> list[speedtorch.Embedding]:
    return [speedtorch.Embedding(40, 4), speedtorch.Embedding(40, 4)]


def capacity() -> list[speedtorch.Embedding]:
    return [speedtorch.Embedding(40, 4, capacity=24)]


def stored() -> list[speedtorch.Embedding]:
    return [speedtorch.Embedding(40, 4, stored=torch.bfloat16)]


def cached() -> list[speedtorch.Embedding]:
    (module,) = one_table()
    speedtorch.cache(module, "1KiB")
    return [module]


def renormed() -> list[speedtorch.Embedding]:
    """Lookups write the padding row to the table."""
    return [speedtorch.Embedding(40, 4, padding_idx=0, max_norm=0.5)]


def train(modules: list[speedtorch.Embedding], *, ahead: bool) -> None:
    """Steps of one and of two lookups, whose second brings rows or none; a loop is left early."""
    adam = torch.optim.Adam([each for module in modules for each in module.parameters()])
    model = nn.ModuleList(modules)
    speedtorch.attach(adam, model)

    def batches() -> Iterator[list[Tensor]]:
        for step in range(STEPS):
            ids = torch.arange(3 * step % 12, 3 * step % 12 + 6)
            yield [ids, ids[:3] + (20 if step % 3 else 0)][: 1 + step % 2]

    def named(batch: list[Tensor]) -> dict[nn.Module, list[Tensor]]:
        return dict.fromkeys(model, batch)

    for end in (STEPS, 3):
        loop: Any = speedtorch.prefetch(batches(), model, ids=named) if ahead else batches()
        for step, batch in enumerate(loop):
            if step == end:
                break
            for module in modules:
                if not ahead and (step % 4 == 3 or module.capacity is not None):
                    module.announce(*batch)
            adam.zero_grad()
            torch.stack([module(ids).sum() for module in modules for ids in batch]).sum().backward()
            adam.step()
        del loop, batch
        for module in modules:
            module.state_dict()


@pytest.mark.parametrize("ahead", [False, True], ids=["by turns", "prefetch"])
@pytest.mark.parametrize("make", [one_table, tables_at_once, capacity, stored, cached, renormed])
def test_training_uses_memory_in_order(
    make: Callable[[], list[speedtorch.Embedding]], ahead: bool, order: StreamOrder
) -> None:
    assert order.found(lambda: train(make(), ahead=ahead)) == ""
    assert order.side_uses > 0 or not (ahead or make is one_table)


def train_on_changing_streams(
    modules: list[speedtorch.Embedding], streams: RecordedStreams
) -> None:
    """Steps on one of two streams each, which never wait for each other."""
    torch.manual_seed(0)
    chosen, model = random.Random(0), nn.ModuleList(modules)
    adam = torch.optim.Adam(model.parameters())
    speedtorch.attach(adam, model)
    for _ in range(4 * STEPS):
        streams.use(streams.stream(chosen.choice(["main", "other"])))
        batch = [torch.randint(40, (chosen.randint(1, 8),)) for _ in range(chosen.randint(1, 2))]
        for module in modules:
            if module.capacity is not None or chosen.random() < 0.3:
                module.announce(*batch)
        adam.zero_grad()
        torch.stack([module(ids).sum() for module in modules for ids in batch]).sum().backward()
        adam.step()
        if chosen.random() < 0.3:
            model.state_dict()


@pytest.mark.parametrize("make", [one_table, tables_at_once, capacity, stored, cached, renormed])
def test_rows_follow_the_current_stream(
    make: Callable[[], list[speedtorch.Embedding]], order: StreamOrder, streams: RecordedStreams
) -> None:
    streams.pretend_rows_follow()
    assert order.found(lambda: train_on_changing_streams(make(), streams)) == ""
    assert order.side_uses > 100


def test_rows_that_follow_no_stream_are_found(order: StreamOrder, streams: RecordedStreams) -> None:
    text = order.found(lambda: train_on_changing_streams(one_table(), streams))
    assert "reads it on other" in text or "writes it on other" in text


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(ROUNDS))
def test_random_programs_use_memory_in_order(
    number: int, tmp_path: Path, order: StreamOrder
) -> None:
    program = Program(FIRST + number, tmp_path, "cpu")
    assert order.found(program.run) == "", program.log

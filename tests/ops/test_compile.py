"""torch.compile and torch.export work on the table itself, not on a clone."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from conftest import Place
from reference import assert_same_bytes, assert_same_storage, layout_copy, random_rows
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import speedtorch

ROWS, COLUMNS, IDS, LOAD = 37, 6, [3, 0, 36, 17], [21, 3, 8]

# torch.compile


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function compiled as one graph, without what earlier tests left in the cache."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True)


class Step:
    """A table, one batch of it, and what the ops should make of them."""

    def __init__(self, place: Place) -> None:
        self.values = random_rows(ROWS, (COLUMNS,), torch.int32, gap=2)
        self.table = place.table(self.values)
        self.index = place.ids(IDS)
        self.expected = layout_copy(self.values)
        self.address = self.table.data_ptr()

    def assert_table(self) -> None:
        """The table holds what was expected, where it was."""
        speedtorch.synchronize()
        assert self.table.data_ptr() == self.address
        assert_same_storage(self.table, self.expected)


@pytest.mark.slow
def test_a_compiled_gather_returns_the_rows(place: Place) -> None:
    step = Step(place)
    function = compiled(lambda table, index: speedtorch.pinned_gather(table, index + 1) * 2)
    rows = function(step.table, step.index - 1)
    assert_same_bytes(rows, reference.pinned_gather(step.values, torch.tensor(IDS)) * 2)
    step.assert_table()


def test_a_compiled_step_works_on_the_table_itself(place: Place) -> None:
    step = Step(place)

    @compiled
    def function(table: Tensor, index: Tensor) -> Tensor:
        plan = speedtorch.plan_rows(index, ROWS)
        rows = speedtorch.pinned_gather(table, index, plan=plan)
        speedtorch.pinned_scatter(table, index, rows + 1, plan=plan)
        speedtorch.pinned_scatter(table, index, rows, accumulate=True)
        return speedtorch.pinned_gather(table, index)

    result = function(step.table, step.index)
    step.expected[IDS] = step.values[IDS] * 2 + 1
    step.assert_table()
    assert_same_bytes(result, step.expected[IDS])


def test_a_compiled_swap_works_on_the_tables_themselves(place: Place) -> None:
    step = Step(place)
    leaving = place.work(random_rows(4, (COLUMNS,), torch.int32, seed=1))
    arriving = place.work(random_rows(3, (COLUMNS,), torch.int32, seed=2))
    address = arriving.data_ptr()

    @compiled
    def function(
        host: list[Tensor],
        leaving: list[Tensor],
        evict: Tensor,
        arriving: list[Tensor],
        load: Tensor,
    ) -> None:
        speedtorch.optimizer_state_swap(host, [leaving[0] + 1], evict, arriving, load)

    function([step.table], [leaving], step.index, [arriving], place.ids(LOAD))
    expected = random_rows(3, (COLUMNS,), torch.int32)
    reference.optimizer_state_swap(
        [step.expected], [leaving.cpu() + 1], torch.tensor(IDS), [expected], torch.tensor(LOAD)
    )
    step.assert_table()
    assert arriving.data_ptr() == address
    assert_same_bytes(arriving, expected)


def test_a_compiled_function_fills_the_result_itself(place: Place) -> None:
    step = Step(place)
    out = torch.zeros(4, COLUMNS, dtype=torch.int32, device=place.device)

    @compiled
    def function(table: Tensor, index: Tensor, out: Tensor) -> None:
        speedtorch.pinned_gather(table, index, out=out)

    function(step.table, step.index, out)
    assert_same_bytes(out, step.values[IDS])
    step.assert_table()


def test_a_compiled_copy_writes_the_table_itself(place: Place) -> None:
    step = Step(place)
    rows = place.work(random_rows(ROWS, (COLUMNS,), torch.int32, seed=1))
    compiled(lambda table, rows: speedtorch.pinned_copy(table, rows * 2))(step.table, rows)
    step.expected.copy_(rows.cpu() * 2)
    step.assert_table()


def test_one_graph_serves_batches_of_any_length(place: Place) -> None:
    step = Step(place)
    torch._dynamo.reset()
    function = torch.compile(
        lambda table, index: speedtorch.pinned_gather(table, index) + 1,
        fullgraph=True,
        dynamic=True,
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        for ids in ([1, 2, 3], [4, 5], [36] * 9):
            expected = step.values[ids] + 1
            assert_same_bytes(function(step.table, place.ids(ids)), expected)


def test_a_compiled_gather_has_a_gradient(place: Place) -> None:
    table = place.table(torch.rand(ROWS, COLUMNS)).requires_grad_()
    function = compiled(lambda table, index: speedtorch.pinned_gather(table, index) * 2)
    rows = function(table, place.ids([3, 0, 3]))
    assert_same_bytes(rows, table.detach().cpu()[[3, 0, 3]] * 2)
    rows.sum().backward()
    assert table.grad is not None
    assert table.grad.layout == torch.sparse_coo
    assert table.grad.cpu().to_dense()[:4, 0].tolist() == [2, 0, 0, 4]


def swap_arguments(rows: int, columns: int) -> tuple[Tensor, tuple[Any, ...]]:
    """A record of two fields, and the arguments of a swap of both."""
    record = torch.arange(rows * 2.0 * columns).view(rows, 2 * columns)
    leaving = [torch.full((2, columns), value) for value in (1000.0, 2000.0)]
    arriving = list(torch.zeros(4, columns).split(2))
    fields = [record[:, :columns], record[:, columns:]]
    return record, (fields, leaving, torch.tensor([3, 1]), arriving, torch.tensor([2, 5]))


@pytest.mark.parametrize("places", [False, True], ids=["whole", "placed"])
@pytest.mark.parametrize("dynamic", [True, False, None], ids=["dynamic", "static", "automatic"])
def test_a_compiled_swap_moves_every_field_of_a_record(dynamic: bool | None, places: bool) -> None:
    rows = torch.tensor([0, 1])
    place = {"evict_places": rows, "load_places": rows} if places else {}

    def swap(fields: Any, leaving: Any, evict: Tensor, arriving: Any, load: Tensor) -> None:
        speedtorch.optimizer_state_swap(fields, leaving, evict.sort()[0], arriving, load, **place)

    torch._dynamo.reset()
    function = torch.compile(swap, fullgraph=True, dynamic=dynamic)
    for shape in ((6, 4), (9, 4), (9, 6)):
        record, given = swap_arguments(*shape)
        expected, plain = swap_arguments(*shape)
        function(*given)
        swap(*plain)
        assert torch.equal(record, expected)
        assert all(torch.equal(a, b) for a, b in zip(given[3], plain[3], strict=True))


def test_a_compiled_swap_clones_no_field() -> None:
    _, given = swap_arguments(6, 4)
    swap = compiled(lambda *given: speedtorch.optimizer_state_swap(*given))
    _, code = run_and_get_code(swap, *given)
    assert "empty_strided_cpu(" not in code[0]


def test_a_registered_swap_raises_where_the_compiler_loses_offsets() -> None:
    record, given = swap_arguments(6, 4)
    swap = torch.ops.speedtorch.optimizer_state_swap
    torch._dynamo.reset()
    function = torch.compile(lambda *given: swap(*given), fullgraph=True, dynamic=True)
    before = record.clone()
    with pytest.raises(Exception, match="loses the offsets"):
        function(*given)
    assert torch.equal(record, before)


# torch.export


class Exchange(nn.Module):
    """Reads rows, writes them back doubled, and returns what it read."""

    def forward(self, table: Tensor, index: Tensor) -> Tensor:
        """Returns the rows as they were."""
        rows: Tensor = torch.ops.speedtorch.pinned_gather(table, index)
        torch.ops.speedtorch.pinned_scatter(table, index, rows * 2)
        return rows


def check_module(module: Any, step: Step) -> None:
    """The module reads and writes the table that it is given."""
    rows = module(step.table, step.index)
    assert_same_bytes(rows, step.values[IDS])
    step.expected[IDS] = step.values[IDS] * 2
    step.assert_table()


def test_an_exported_module_takes_the_table_as_an_argument(place: Place) -> None:
    step = Step(place)
    program = torch.export.export(Exchange(), (step.table, step.index))
    step.assert_table()
    check_module(program.module(), step)


def test_an_exported_module_can_be_saved(place: Place) -> None:
    step, archive = Step(place), io.BytesIO()
    torch.export.save(torch.export.export(Exchange(), (step.table, step.index)), archive)
    archive.seek(0)
    check_module(torch.export.load(archive).module(), step)


class Writes(nn.Module):
    """Calls each Python function that writes."""

    def forward(self, table: Tensor, rows: Tensor, index: Tensor, out: Tensor) -> Tensor:
        """Returns the table's sum."""
        speedtorch.pinned_copy(table[:2], rows)
        speedtorch.pinned_scatter(table, index, rows + 1)
        speedtorch.pinned_gather(table, index, out=out)
        speedtorch.optimizer_state_swap([table], [rows * 2], index + 2, [out], index)
        return table.sum()


def writes_arguments() -> tuple[Tensor, ...]:
    return torch.zeros(5, 2), torch.ones(2, 2), torch.tensor([1, 2]), torch.zeros(2, 2)


def test_unflatten_keeps_the_writes_of_functions() -> None:
    expected, given = writes_arguments(), writes_arguments()
    Writes()(*expected)
    program = torch.export.export(Writes(), writes_arguments())
    torch.export.unflatten(program)(*given)
    assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))


def test_a_program_that_calls_functions_can_be_saved() -> None:
    expected, given, archive = writes_arguments(), writes_arguments(), io.BytesIO()
    Writes()(*expected)
    torch.export.save(torch.export.export(Writes(), writes_arguments()), archive)
    archive.seek(0)
    torch.export.load(archive).module()(*given)
    assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))

"""torch.compile and torch.export work on the table itself, not on a clone."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Place
from reference import assert_same_bytes, assert_same_storage, random_rows
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import speedtorch

ROWS, COLUMNS, IDS, LOAD = 37, 6, [3, 0, 36, 17], [21, 3, 8]
CPU = Place("cpu", "plain")

# torch.compile


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function compiled as one graph, without what earlier tests left in the cache."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True)


def arguments(place: Place) -> tuple[Tensor, ...]:
    """A table whose rows lie apart, ids, rows to write, memory of a result, and other ids."""
    table = place.table(random_rows(ROWS, (COLUMNS,), torch.int32, gap=2))
    rows, out = (
        place.work(random_rows(count, (COLUMNS,), torch.int32, seed=count)) for count in (4, 3)
    )
    return table, place.ids(IDS), rows, out, place.ids(LOAD)


def assert_does_the_same(run: Callable[..., Any], eager: Callable[..., Any], place: Place) -> None:
    """It returns and writes what the ops on the CPU do, and writes to the tensors themselves."""
    given, expected = arguments(place), arguments(CPU)
    addresses = [tensor.data_ptr() for tensor in given]
    result, wanted = run(*given), eager(*expected)
    speedtorch.synchronize()
    assert [tensor.data_ptr() for tensor in given] == addresses
    for actual, other in zip(given, expected, strict=True):
        assert_same_storage(actual, other)
    assert_same_bytes(result, wanted)


def gather(table: Tensor, index: Tensor, rows: Tensor, out: Tensor, load: Tensor) -> Tensor:
    return speedtorch.pinned_gather(table, index + 1 - 1) * 2


def step(table: Tensor, index: Tensor, rows: Tensor, out: Tensor, load: Tensor) -> Tensor:
    plan = speedtorch.plan_rows(index, ROWS)
    read = speedtorch.pinned_gather(table, index, plan=plan)
    speedtorch.pinned_scatter(table, index, read + 1, plan=plan)
    speedtorch.pinned_scatter(table, index, rows, accumulate=True)
    speedtorch.pinned_gather(table, load, out=out)
    return speedtorch.pinned_gather(table, index)


def swap(table: Tensor, index: Tensor, rows: Tensor, out: Tensor, load: Tensor) -> Tensor:
    speedtorch.optimizer_state_swap([table], [rows + 1], index, [out], load)
    return out + 1


def copy(table: Tensor, index: Tensor, rows: Tensor, out: Tensor, load: Tensor) -> Tensor:
    speedtorch.pinned_copy(table[:4], rows * 2)
    return rows + 1


@pytest.mark.parametrize("function", [gather, step, swap, copy])
def test_a_compiled_function_works_on_the_tensors_themselves(
    place: Place, function: Callable[..., Tensor]
) -> None:
    assert_does_the_same(compiled(function), function, place)


def test_one_graph_serves_batches_of_any_length(place: Place) -> None:
    values = random_rows(ROWS, (COLUMNS,), torch.int32, gap=2)
    table = place.table(values)
    torch._dynamo.reset()
    function = torch.compile(
        lambda table, index: speedtorch.pinned_gather(table, index) + 1,
        fullgraph=True,
        dynamic=True,
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        for ids in ([1, 2, 3], [4, 5], [36] * 9):
            assert_same_bytes(function(table, place.ids(ids)), values[ids] + 1)


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


class Step(nn.Module):
    """Calls each op, by its function or as it is registered."""

    def forward(self, *tensors: Tensor) -> Tensor:
        """Returns rows of the table."""
        made = swap(*tensors), copy(*tensors), gather(*tensors)
        table, index, rows, *_ = tensors
        torch.ops.speedtorch.pinned_scatter(table, index, rows * 2)
        return torch.cat([*made, torch.ops.speedtorch.pinned_gather(table, index), step(*tensors)])


def saved(program: Any) -> Any:
    archive = io.BytesIO()
    torch.export.save(program, archive)
    archive.seek(0)
    return torch.export.load(archive).module()


@pytest.mark.parametrize(
    "build",
    [lambda program: program.module(), torch.export.unflatten, saved],
    ids=["exported", "unflattened", "saved"],
)
def test_an_exported_module_works_on_the_tensors_it_is_passed(
    place: Place, build: Callable[[Any], Callable[..., Any]]
) -> None:
    given = arguments(place)
    program = torch.export.export(Step(), given)
    for tensor, expected in zip(given, arguments(CPU), strict=True):
        assert_same_storage(tensor, expected)
    assert_does_the_same(build(program), Step(), place)

"""Every op has a fake kernel, which gives what the op gives or names the op that no graph holds."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import ROOT
from op_arguments import NOT_IN_GRAPHS, WRITTEN, op_arguments, tensors_of, with_tensors
from reference import assert_same_bytes
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import speedtorch
from speedtorch.ops import functions

NAMES = sorted(op_arguments("cpu").keys() - NOT_IN_GRAPHS)
OF_THE_PROCESS = functions._OF_THE_PROCESS
FROM_2_13 = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="the loader of torch 2.11 crashes on a package with these ops",
)


def registered(library: str) -> set[str]:
    """The overloads of a library, as "name" and "name.overload"."""
    names = torch._C._dispatch_get_all_op_names()
    return {name.removeprefix(f"{library}::") for name in names if name.startswith(f"{library}::")}


def test_every_op_has_a_fake_kernel() -> None:
    assert registered("speedtorch") == set(functions._FAKE_KERNELS)
    assert registered("speedtorch_lists") < registered("speedtorch")


def test_the_page_names_every_op_that_no_graph_can_hold() -> None:
    page = (ROOT / "docs" / "ops.md").read_text()
    (named,) = re.findall(r"names them: (.*?)\. Without", page, re.DOTALL)
    assert re.findall(r"`(\w+)`", named) == list(OF_THE_PROCESS)


def made_by(op: Any, arguments: tuple[Any, ...]) -> list[Tensor]:
    """The op's results."""
    made = op(*arguments)
    return [] if made is None else [made] if isinstance(made, Tensor) else list(made)


@pytest.mark.parametrize("name", NAMES)
def test_a_fake_kernel_returns_the_shapes_of_the_op(name: str) -> None:
    op, arguments = op_arguments("cpu")[name]
    with FakeTensorMode() as mode:
        faked = [mode.from_tensor(tensor) for tensor in tensors_of(arguments)]
        fakes = made_by(op, with_tensors(arguments, faked))
    made = made_by(op, arguments)
    assert [(tensor.shape, tensor.dtype, tensor.device) for tensor in fakes] == [
        (tensor.shape, tensor.dtype, tensor.device) for tensor in made
    ]


def process_arguments(name: str) -> tuple[Any, tuple[Any, ...]]:
    """An op that queries or changes the process, with arguments of its schema."""
    op = getattr(torch.ops.speedtorch, name).default
    values = {"Tensor": torch.zeros(2), "int": 1, "bool": False, "Optional[int]": 1}
    return op, tuple(values[str(argument.type)] for argument in op._schema.arguments)


@pytest.mark.parametrize("name", [*sorted(NOT_IN_GRAPHS), *OF_THE_PROCESS])
def test_an_op_that_no_graph_holds_is_refused_by_name(name: str) -> None:
    why = "queries or changes" if name in OF_THE_PROCESS else "is part of a step"
    op, arguments = process_arguments(name) if name in OF_THE_PROCESS else op_arguments("cpu")[name]
    message = rf"speedtorch\.{name.partition(',')[0]} {why}"
    with FakeTensorMode() as mode:
        faked = [mode.from_tensor(tensor) for tensor in tensors_of(arguments)]
        with pytest.raises(NotImplementedError, match=message):
            op(*with_tensors(arguments, faked))


class Owner(nn.Module):
    """A module that checks its table."""

    def forward(self, table: Tensor) -> Tensor:
        """The table plus one."""
        torch.ops.speedtorch.check_owner(table)
        torch.ops.speedtorch.throw_pending()
        return table + 1


def test_a_graph_checks_its_owner() -> None:
    table = torch.zeros(3, 2)
    torch._dynamo.reset()
    compiled = torch.compile(Owner(), fullgraph=True, backend="aot_eager")
    assert compiled(table).sum().item() == 6
    program = torch.export.export(Owner(), (table,))
    assert program.module()(table).sum().item() == 6


def test_a_graph_breaks_where_the_memory_is_queried() -> None:
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager")
    def function(table: Tensor) -> tuple[str, Tensor]:
        kind = speedtorch.memory_kind(table)
        return kind, table + 1

    kind, more = function(torch.zeros(3))
    assert (kind, more.tolist()) == ("plain", [1.0, 1.0, 1.0])


# Every op compiled, exported, and compiled ahead of time


class Calls(nn.Module):
    """Calls ops one after another, with the tensors that it is given."""

    def __init__(self, names: list[str], device: str) -> None:
        super().__init__()
        self.names, self.calls = names, [op_arguments(device)[name] for name in names]

    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors of all calls, in memory of their own."""
        return tuple(tensor.clone() for _, given in self.calls for tensor in tensors_of(given))

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        """What the ops have made and written in full, and one that needs no op."""
        results, left = [tensors[0] + 0], list(tensors)
        for name, (op, given) in zip(self.names, self.calls, strict=True):
            count = len(tensors_of(given))
            made = made_by(op, with_tensors(given, left[:count]))
            results += made[WRITTEN.get(name, slice(None))]
            left = left[count:]
        return results


def check(
    names: list[str], build: Callable[[nn.Module, tuple[Tensor, ...]], Any], device: str = "cpu"
) -> None:
    """What is built of the calls gives and writes what they do."""
    calls = Calls(names, device)
    run = build(calls, calls.tensors())
    tensors, expected = calls.tensors(), calls.tensors()
    for _ in range(2):
        results, made = run(*tensors), calls(*expected)
        for actual, wanted in zip([*results, *tensors], [*made, *expected], strict=True):
            assert_same_bytes(actual, wanted)


def compiled(calls: nn.Module, tensors: tuple[Tensor, ...]) -> Any:
    torch._dynamo.reset()
    return torch.compile(calls, fullgraph=True, backend="aot_eager")


def exported(calls: nn.Module, tensors: tuple[Tensor, ...]) -> Any:
    return torch.export.export(calls, tensors).module()


def decomposed(calls: nn.Module, tensors: tuple[Tensor, ...]) -> Any:
    return torch.export.export(calls, tensors).run_decompositions().module()


@pytest.mark.dealt("build")
@pytest.mark.parametrize("build", [compiled, exported, decomposed])
@pytest.mark.parametrize("name", NAMES)
def test_a_graph_does_what_the_op_does(device: str, name: str, build: Any) -> None:
    check([name], build, device)


@pytest.mark.examples
@FROM_2_13
def test_ops_compiled_ahead_of_time_do_what_they_do(tmp_path: Path) -> None:
    def packaged(calls: nn.Module, tensors: tuple[Tensor, ...]) -> Any:
        program = torch.export.export(calls, tensors)
        path = str(tmp_path / "package.pt2")
        return torch._inductor.aoti_load_package(
            torch._inductor.aoti_compile_and_package(program, package_path=path)
        )

    check(NAMES, packaged)


class SwapOfTwoFields(nn.Module):
    """The function on two fields of a record, without plans and with one."""

    def forward(self, record: Tensor, rows: Tensor, evict: Tensor, load: Tensor) -> Tensor:
        """Returns the rows that were loaded."""
        fields, arriving = [record[:, :2], record[:, 2:]], [rows + 1, rows + 2]
        speedtorch.optimizer_state_swap(fields, [rows, rows + 3], evict, arriving, load)
        plan = speedtorch.plan_rows(load, 9)
        speedtorch.optimizer_state_swap(
            fields, [rows, rows + 3], evict, arriving, load, load_plan=plan
        )
        return torch.cat(arriving)


@pytest.mark.examples
@FROM_2_13
def test_the_swap_function_compiled_ahead_of_time_moves_the_rows(tmp_path: Path) -> None:
    def arguments() -> tuple[Tensor, ...]:
        record, rows = torch.arange(36.0).view(9, 4), torch.full((2, 2), 50.0)
        return record, rows, torch.tensor([3, 1]), torch.tensor([2, 8])

    program = torch.export.export(SwapOfTwoFields(), arguments())
    path = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "package.pt2")
    )
    (given, *rest), (expected, *ids) = arguments(), arguments()
    loaded = torch._inductor.aoti_load_package(path)(given, *rest)
    assert torch.equal(loaded, SwapOfTwoFields()(expected, *ids))
    assert torch.equal(given, expected)

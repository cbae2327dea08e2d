"""TorchScript calls every op as Python does: lists stay whole, and no call is removed."""

from __future__ import annotations

import io
import itertools
import linecache
import subprocess
import sys
import typing
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from op_arguments import WRITTEN, op_arguments, tensors_of, with_tensors
from reference import assert_same_bytes, random_rows
from torch import Tensor
from warm_python import warm_python

import speedtorch

pytestmark = [
    pytest.mark.skipif(sys.version_info >= (3, 14), reason="torch refuses TorchScript on 3.14"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning"),
]
NAMES = sorted(op_arguments("cpu"))
WITH_LISTS = [
    name
    for name, (_, arguments) in sorted(op_arguments("cpu").items())
    if any(isinstance(argument, list) for argument in arguments)
]
TIMES = 3
_numbers = itertools.count()


def scripted(
    op: Any, arguments: tuple[Any, ...], *, literals: bool = False, library: str = "speedtorch"
) -> Any:
    """A module whose forward takes the tensors and lists, calls the op three times, and returns
    what the op has made and the lists. With `literals` it takes the tensors of a list one by one.
    """
    taken, given, lists = [], [], []
    for declared, part in zip(op._schema.arguments, arguments, strict=False):
        name = declared.name
        if isinstance(part, Tensor):
            taken.append(f"{name}: Tensor")
            given.append(f"{name}={name}")
        elif not isinstance(part, list) or not isinstance(part[0], Tensor):
            given.append(f"{name}={part!r}")
        elif literals:
            names = [f"{name}_{k}" for k in range(len(part))]
            taken += [f"{name}: Tensor" for name in names]
            given.append(f"{name}=[{', '.join(names)}]")
        else:
            taken.append(f"{name}: List[Tensor]")
            given.append(f"{name}={name}" if library == "speedtorch" else f"{name}=list({name})")
            lists.append(name)
    returns = [str(result.type) for result in op._schema.returns]
    call = f"torch.ops.{library}.{op._schema.name.split('::')[1]}({', '.join(given)})"
    entries = ", ".join(f"all_[{k}]" for k in range(len(returns)))
    kept = {"": call, "List[Tensor]": f"made += {call}", "Tensor": f"made.append({call})"}
    line = kept.get(",".join(returns), f"all_ = {call}; made += [{entries}]")
    source = f"""
class Scripted(torch.nn.Module):
    def forward(self, {", ".join(taken)}) -> Tuple[List[Tensor], List[List[Tensor]]]:
        made: List[Tensor] = []
        kept: List[List[Tensor]] = [{", ".join(lists)}]
        for _ in range({TIMES}):
            {line}
        return made, kept
"""
    # torch.jit.script reads the source of what it is given.
    file = f"<scripted {next(_numbers)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names: dict[str, Any] = {"torch": torch, "Tensor": Tensor, **vars(typing)}
    exec(compile(source, file, "exec"), names)
    return torch.jit.script(names["Scripted"]())


def loaded(module: Any) -> Any:
    """The module after it was saved and loaded."""
    archive = io.BytesIO()
    torch.jit.save(module, archive)
    archive.seek(0)
    return torch.jit.load(archive)


def check(name: str, module: Any, *, literals: bool = False) -> None:
    """The module gives and writes what as many calls from Python do, and keeps its lists."""
    op, arguments = op_arguments("cpu")[name]
    expected = [tensor.clone() for tensor in tensors_of(arguments)]
    results: list[Tensor] = []
    for _ in range(TIMES):
        made = op(*with_tensors(arguments, expected))
        results += [] if made is None else [made] if isinstance(made, Tensor) else made
    width = len(results) // TIMES
    tensors = [tensor.clone() for tensor in tensors_of(arguments)]
    parts = [part for part in with_tensors(arguments, tensors) if tensors_of((part,))]
    if literals:
        parts = tensors_of(tuple(parts))
    made, kept = module(*parts)
    assert len(made) == len(results)
    if name in WRITTEN:
        made, results = (
            [
                tensor
                for first in range(0, len(all_), width)
                for tensor in all_[first:][WRITTEN[name]]
            ]
            for all_ in (made, results)
        )
    for one, other in zip([*made, *tensors], [*results, *expected], strict=True):
        assert_same_bytes(one, other)
    given = [part for part in parts if isinstance(part, list)]
    assert len(kept) == len(given)
    for one, other in zip(kept, given, strict=True):
        assert [tensor.data_ptr() for tensor in one] == [tensor.data_ptr() for tensor in other]


@pytest.mark.parametrize(
    ("name", "literals"),
    [*((name, False) for name in NAMES), *((name, True) for name in WITH_LISTS)],
)
def test_a_scripted_loop_does_what_calls_from_python_do(name: str, literals: bool) -> None:
    """Lists that are passed and lists that are made in the function are written."""
    module = scripted(*op_arguments("cpu")[name], literals=literals)
    for _ in range(3):  # the second call optimizes the graph
        check(name, module, literals=literals)
    check(name, loaded(module), literals=literals)


@pytest.mark.parametrize("name", WITH_LISTS)
def test_a_scripted_op_keeps_its_lists_in_inference_mode(name: str) -> None:
    with torch.inference_mode():
        check(name, scripted(*op_arguments("cpu")[name]))


class Fields(torch.nn.Module):
    """Keeps the lists of an exchange, as TorchScript's attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.host = [torch.zeros(9, 2)]
        self.arriving = [torch.zeros(1, 2)]

    def forward(self, leaving: Tensor, evict: Tensor, load: Tensor) -> Tensor:
        """Writes rows, and returns those that are read."""
        torch.ops.speedtorch.optimizer_state_swap(self.host, [leaving], evict, self.arriving, load)
        return self.arriving[0]


def test_a_scripted_call_that_raises_keeps_its_lists() -> None:
    module = torch.jit.script(Fields())
    one, two = torch.tensor([1]), torch.tensor([2])
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"index 9 is out of range|9 .*out of"):
            module(torch.ones(1, 2), torch.tensor([9]), one)
        module(torch.ones(1, 2) * 3, one, two)
        assert module(torch.ones(1, 2), two, one).tolist() == [[3.0, 3.0]]


def in_the_interpreter(op: Any, arguments: tuple[Any, ...]) -> None:
    parts = [part for part in arguments if tensors_of((part,))]
    scripted(op, arguments)(*parts)


def from_python(op: Any, arguments: tuple[Any, ...]) -> None:
    op(*arguments)


def of_lists(op: Any, arguments: tuple[Any, ...]) -> None:
    overload = op._schema.overload_name or "default"
    packet = getattr(torch.ops.speedtorch_lists, op._schema.name.split("::")[1])
    getattr(packet, overload)(*arguments)


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize("call", [in_the_interpreter, from_python, of_lists])
@pytest.mark.parametrize("name", WITH_LISTS)
def test_no_call_keeps_a_tensor(
    name: str, call: Callable[[Any, tuple[Any, ...]], None], fails: bool
) -> None:
    op, arguments = op_arguments("cpu")[name]
    memory = [tensor.numpy().copy() for tensor in tensors_of(arguments)]
    held = [sys.getrefcount(array) for array in memory]
    for _ in range(3):
        tensors = [torch.from_numpy(array) for array in memory]
        if fails:
            tensors = [
                tensor.to_sparse() if tensor.dim() else tensor for tensor in tensors[:1]
            ] + tensors[1:]
            with pytest.raises((RuntimeError, ValueError), match="dense"):
                call(op, with_tensors(arguments, tensors))
        else:
            call(op, with_tensors(arguments, tensors))
        del tensors
    assert [sys.getrefcount(array) for array in memory] == held


# torch.jit.trace


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.usefixtures("quiet")
def test_a_traced_exchange_keeps_its_lists() -> None:
    def exchange(host: Tensor, leaving: Tensor, evict: Tensor, arriving: Tensor) -> Tensor:
        plan = speedtorch.plan_rows(evict, 9)
        for _ in range(2):
            speedtorch.optimizer_state_swap([host], [leaving], evict, [arriving], evict)
            speedtorch.pinned_scatter(host, evict, arriving + 1, plan=plan)
        return speedtorch.pinned_gather(host, evict, plan=plan)

    def arguments() -> tuple[Tensor, ...]:
        return torch.zeros(9, 2), torch.ones(2, 2), torch.tensor([3, 5]), torch.zeros(2, 2)

    traced = torch.jit.trace(exchange, arguments(), check_trace=False)
    assert "speedtorch_lists::" not in str(traced.graph)
    for module in (traced, loaded(traced)):
        for _ in range(3):
            ours, expected = arguments(), arguments()
            assert_same_bytes(module(*ours), exchange(*expected))
            for one, other in zip(ours, expected, strict=True):
                assert_same_bytes(one, other)


# The library without the package

ALONE = """
import sys, torch
library, exchange, swap, given, read, device = sys.argv[1:]
torch.ops.load_library(library)
table, index, *lists = torch.load(given, weights_only=True)
rows = torch.jit.load(exchange)(table, index.to(device))
torch.save((rows.cpu(), table), read)
host, leaving, evict, arriving, load = lists
_, kept = torch.jit.load(swap)(host, leaving, evict, arriving, load)
assert "speedtorch" not in sys.modules
assert host[0].tolist() == [[7.0], [5.0], [0.0]]
assert arriving[0].tolist() == [[7.0]]
assert all(each[0].numel() for each in kept)
"""


class Doubled(torch.nn.Module):
    """Reads rows, writes them back doubled, and returns what it read."""

    def forward(self, table: Tensor, index: Tensor) -> Tensor:
        """Returns the rows as they were."""
        rows: Tensor = torch.ops.speedtorch.pinned_gather(table, index)
        torch.ops.speedtorch.pinned_scatter(table, index, rows * 2)
        return rows


@pytest.mark.slow
def test_scripted_modules_run_with_the_library_alone(device: str, tmp_path: Path) -> None:
    """Lists that they copy stay whole, too."""
    op, one = torch.ops.speedtorch.optimizer_state_swap.default, torch.tensor([1])
    host, leaving = torch.tensor([[7.0], [0.0], [0.0]]), torch.tensor([[5.0]])
    lists = ([host], [leaving], one, [torch.zeros(1, 1)], one - 1)
    (library,) = Path(speedtorch.__file__).parent.glob("_C*.so")
    files = [tmp_path / name for name in ("exchange.pt", "swap.pt", "given.pt", "read.pt")]
    torch.jit.save(torch.jit.script(Doubled()), files[0])
    torch.jit.save(scripted(op, lists, library="speedtorch_lists"), files[1])
    values, index = random_rows(37, (6,), torch.int32), torch.tensor([3, 0, 36, 17])
    torch.save((values, index, *lists), files[2])
    command = [warm_python(), "-c", ALONE, str(library), *map(str, files), device]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows, table = torch.load(files[3], weights_only=True)
    assert_same_bytes(rows, values[index])
    values[index] = values[index] * 2
    assert_same_bytes(table, values)


class SwapOfAttributes(torch.nn.Module):
    """Writes rows into its own table, and reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(5, 2))
        self.register_buffer("ids", torch.tensor([1, 3]))

    def forward(self, rows: Tensor) -> Tensor:
        """Returns the rows that it was given."""
        none = self.ids[:0]
        torch.ops.speedtorch.optimizer_state_swap([self.table], [rows], self.ids, [rows + 1], none)
        return torch.ops.speedtorch.pinned_gather(self.table, self.ids)


def test_a_frozen_module_that_preserves_its_table_reads_what_it_wrote() -> None:
    scripted_module = torch.jit.script(SwapOfAttributes().eval())
    module = torch.jit.freeze(scripted_module, preserved_attrs=["table"])
    for value in (7.0, 8.0):
        assert module(torch.full((2, 2), value)).tolist() == [[value] * 2] * 2


def test_memory_of_numpy_is_counted() -> None:
    """What test_no_call_keeps_a_tensor relies on."""
    memory = np.zeros(3)
    before = sys.getrefcount(memory)
    tensor = torch.from_numpy(memory)
    assert sys.getrefcount(memory) == before + 1
    del tensor
    assert sys.getrefcount(memory) == before

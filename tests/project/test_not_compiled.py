"""What torch.compile must not trace: lookups and the hooks of optimizers' steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.torch_internals import not_compiled


class Graphs:
    """A backend that runs graphs as they are, and notes where their calls were written."""

    def __init__(self) -> None:
        self.written_in: set[str] = set()

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        for node in graph.graph.nodes:
            self.written_in |= set(node.meta.get("stack_trace", "").split('"')[1::2])
        return graph.forward


@pytest.fixture
def graphs() -> Graphs:
    torch._dynamo.reset()
    return Graphs()


def trained(embedding: nn.Module, make: Any, batches: Any, backend: Any) -> Tensor:
    """The rows after a step for each batch, with the optimizer's step compiled."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 2)
    optimizer = make([*embedding.parameters(), *layer.parameters()])
    if isinstance(embedding, speedtorch.Embedding):
        speedtorch.attach(optimizer, embedding)
    step = torch.compile(optimizer.step, backend=backend)
    for ids in batches:
        optimizer.zero_grad()
        layer(embedding(torch.tensor(ids))).square().sum().backward()
        step()
    rows: Tensor = embedding.state_dict()["weight"]
    return rows.clone()


@pytest.mark.parametrize(
    ("make", "batches"),
    [
        (lambda parameters: optim.SGD(parameters, lr=0.1), ([1, 2], [7, 8, 2], [1, 9])),
        # torch's own table moves every row; so every row takes part.
        (lambda parameters: optim.Adam(parameters, lr=0.1), [[*range(10)], [*range(9, -1, -1)]]),
    ],
    ids=["SGD", "Adam"],
)
def test_a_compiled_step_is_bitwise_identical_and_traces_no_hooks(
    make: Any, batches: Any, graphs: Graphs
) -> None:
    values = torch.rand(10, 4)
    table = nn.Embedding.from_pretrained(values.clone(), freeze=False)
    expected = trained(table, make, batches, "eager")
    ours = speedtorch.Embedding.from_pretrained(values, freeze=False)
    assert torch.equal(trained(ours, make, batches, graphs), expected)
    assert any("/torch/optim/" in file for file in graphs.written_in)
    assert not any("/speedtorch/" in file for file in graphs.written_in)


def test_a_function_that_is_not_compiled_runs_in_python_within_a_compiled_one(
    graphs: Graphs,
) -> None:
    compiling: list[bool] = []

    @not_compiled
    def count(ids: Tensor) -> int:
        compiling.append(torch.compiler.is_compiling())
        return len(set(ids.tolist()))

    @torch.compile(backend=graphs)
    def mean(ids: Tensor) -> Tensor:
        return (ids + 1).sum() / count(ids * 2)

    for ids, expected in (([1, 1, 4], 4.5), ([1, 2], 2.5)):
        assert mean(torch.tensor(ids)).item() == expected
    assert compiling == [False, False]


def test_without_a_compiler_it_is_the_function_itself() -> None:
    @not_compiled
    def double(number: int, *, times: int = 1) -> int:
        """Twice that."""
        return 2 * number * times

    assert double(3, times=2) == 12
    assert (double.__name__, double.__doc__) == ("double", "Twice that.")

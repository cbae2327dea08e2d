"""graphed() where rows are held on the CPU: the same program runs, and nothing is captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import NEEDS_GPU
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.nn.graphed import _Captured

ROWS, WIDTH = 50, 4


class World:
    """A table, a layer behind it, and steps that train both."""

    def __init__(self, capacity: int | None = 16) -> None:
        torch.manual_seed(0)
        self.embedding = speedtorch.Embedding(ROWS, WIDTH, capacity=capacity)
        self.layer = nn.Linear(WIDTH, 1)
        parameters = [*self.embedding.parameters(), *self.layer.parameters()]
        # As a graph of a GPU needs it.
        self.optimizer = optim.Adam(parameters, lr=0.1, fused=True, capturable=True)
        speedtorch.attach(self.optimizer, self.embedding)

    def step(self, ids: Tensor, targets: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = (self.layer(self.embedding(ids)).squeeze(1) - targets).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss

    def graphed(self, *example: Any, **given: Any) -> Any:
        modules = [self.embedding, self.layer]
        return speedtorch.graphed(
            self.step, *example, modules=modules, optimizers=self.optimizer, **given
        )

    def state(self) -> list[Tensor]:
        return [self.embedding.table["weight"].clone(), *map(torch.clone, self.layer.parameters())]


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randint(ROWS, (8,)), torch.randn(8)) for _ in range(6)]


@pytest.mark.parametrize("ahead", [False, True])
def test_it_trains_as_the_step_itself(ahead: bool) -> None:
    plain, world, given = World(), World(), batches()
    step = world.graphed(*given[0], next_ids=given[0][0] if ahead else None)
    for batch, (following, _) in zip(given, [*given[1:], given[0]], strict=True):
        expected = plain.step(*batch)
        found = step(*batch, next_ids=following) if ahead else step(*batch)
        assert torch.equal(found, expected) and not found.requires_grad
    assert all(map(torch.equal, world.state(), plain.state()))


def test_making_it_trains_nothing() -> None:
    world, given = World(), batches()
    before, random = world.state(), torch.get_rng_state()
    world.graphed(*given[0])
    assert all(map(torch.equal, world.state(), before))
    assert torch.equal(torch.get_rng_state(), random)


def test_a_hyperparameter_that_a_graph_would_not_see_is_the_same_error() -> None:
    world, given = World(), batches()
    step = world.graphed(*given[0])
    step(*given[0])
    world.optimizer.param_groups[0]["lr"] = 0.5
    before = world.state()
    with pytest.raises(RuntimeError, match=r"graphed: .* lr was 0\.1, is 0\.5"):
        step(*given[1])
    assert all(map(torch.equal, world.state(), before))


def test_parameter_groups_that_are_added_are_the_same_error() -> None:
    world, given = World(), batches()
    world.optimizer.add_param_group({"params": []})
    step = world.graphed(*given[0])
    step(*given[0])
    world.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(RuntimeError, match="changed since then: the number of parameter groups"):
        step(*given[0])


def test_a_graph_fits_no_batch_with_tensors_in_other_places() -> None:
    captured = _Captured.__new__(_Captured)
    one, other = torch.arange(3), torch.arange(3, 6)
    captured._inputs = ({"liked": one, "seen": other}, [one, 2])
    assert captured._fits(({"liked": other, "seen": one}, [other, 2]))
    unlike: list[tuple[Any, ...]] = [
        ({"seen": one, "liked": other}, [one, 2]),
        ({"liked": one, "bought": other}, [one, 2]),
        ({"liked": one, "seen": other}, [[one], 2]),
        ({"liked": one, "seen": other}, [one, 3]),
        ({"liked": one, "seen": other[:2]}, [one, 2]),
        ({"liked": one, "seen": other.int()}, [one, 2]),
    ]
    assert not any(map(captured._fits, unlike))


def test_next_ids_of_a_step_that_was_made_without_are_the_same_error() -> None:
    world, given = World(), batches()
    with pytest.raises(ValueError, match="graphed: next_ids need an example"):
        world.graphed(*given[0])(*given[0], next_ids=given[1][0])
    with pytest.raises(TypeError, match="ids: expected"):
        world.graphed(*given[0], next_ids=3)


def test_rows_without_a_capacity_are_the_same_error() -> None:
    with pytest.raises(ValueError, match="graphed: Embedding has no capacity"):
        World(capacity=None).graphed(*batches()[0])


def test_wrong_arguments_are_named() -> None:
    world, (given, *_) = World(), batches()
    with pytest.raises(TypeError, match="step: expected a function that trains a batch, got None"):
        speedtorch.graphed(None, *given, modules=world.embedding, optimizers=world.optimizer)
    with pytest.raises(TypeError, match="modules: expected Module or a list of them, got 5"):
        speedtorch.graphed(world.step, *given, modules=5, optimizers=world.optimizer)
    with pytest.raises(TypeError, match=r"optimizers: expected Optimizer or .* got \[3\]"):
        speedtorch.graphed(world.step, *given, modules=world.embedding, optimizers=[3])


def test_requirements_of_a_capture_are_not_checked() -> None:
    """As the documentation says: an optimizer that a graph repeats, tensors of its own."""
    embedding = speedtorch.Embedding(ROWS, WIDTH, capacity=16)
    adagrad = optim.Adagrad(embedding.parameters())
    speedtorch.attach(adagrad, embedding)

    def train(ids: Tensor) -> Tensor:
        adagrad.zero_grad()
        loss = embedding(ids).sum()
        loss.backward()
        adagrad.step()
        return loss

    step = speedtorch.graphed(train, torch.arange(40), modules=embedding, optimizers=adagrad)
    first, second = step(torch.arange(3)), step(torch.arange(5))
    assert first.data_ptr() != second.data_ptr()
    embedding.to("cpu")
    speedtorch.detach(adagrad)


@NEEDS_GPU
def test_rows_on_both_devices_are_refused() -> None:
    world = World()
    other = speedtorch.Embedding(ROWS, WIDTH, capacity=16, device="cuda")
    with pytest.raises(ValueError, match="are on the CPU and other rows are on a GPU"):
        speedtorch.graphed(
            world.step, *batches()[0], modules=[world.embedding, other], optimizers=world.optimizer
        )

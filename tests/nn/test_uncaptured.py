"""graphed() where rows are held on the CPU: the same program runs, and nothing is captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import NEEDS_GPU
from reference import assert_same_content
from small_training import SmallTraining
from torch import Tensor, nn, optim

import speedtorch


def made(capacity: int | None = 20) -> SmallTraining:
    return SmallTraining(as_a_graph_needs_it, steps=0, capacity=capacity)


def as_a_graph_needs_it(parameters: Any, lr: float) -> optim.Optimizer:
    return optim.Adam(parameters, lr, fused=True, capturable=True)


@pytest.mark.parametrize("ahead", [False, True])
def test_it_trains_as_the_step_itself(ahead: bool) -> None:
    plain, training = made(), made()
    batches = [plain.batch(number) for number in range(6)]
    step = training.graphed(next_ids=batches[0] if ahead else None)
    for batch, following in zip(batches, [*batches[1:], batches[0]], strict=True):
        found = step(batch, next_ids=following) if ahead else step(batch)
        assert torch.equal(found, plain.step(batch))
    assert_same_content(training.fields(), plain.fields())


def test_making_it_trains_nothing() -> None:
    training = made()
    before, random = training.fields(), torch.get_rng_state()
    training.graphed()
    assert_same_content(training.fields(), before)
    assert torch.equal(torch.get_rng_state(), random)


def test_a_hyperparameter_that_a_graph_would_not_see_is_the_same_error() -> None:
    training = made()
    step = training.graphed()
    step(training.batch(0))
    training.optimizer.param_groups[0]["lr"] = 0.5
    before = training.fields()
    with pytest.raises(RuntimeError, match=r"graphed: .* lr was 0\.1, is 0\.5"):
        step(training.batch(1))
    assert_same_content(training.fields(), before)


def with_example(example: Any) -> object:
    training = made()
    given = {"modules": training.module, "optimizers": training.optimizer}
    return speedtorch.graphed(training.step, example, **given)


def of_two_modules(next_ids: Any) -> object:
    trainings = [made(), made()]
    modules = [training.module for training in trainings]
    optimizers = [training.optimizer for training in trainings]
    return trainings[0].graphed(modules=modules, optimizers=optimizers, next_ids=next_ids)


WRONG: list[tuple[Callable[[], object], type[Exception], str]] = [
    (
        lambda: made().graphed()(made().batch(0), next_ids=made().batch(1)),
        ValueError,
        r"next_ids: expected None, because graphed\(\) was called without next_ids, got Tensor\. P",
    ),
    (
        lambda: made().graphed(next_ids=3),
        TypeError,
        "^next_ids: expected an int32 or int64 tensor, got int. Convert",
    ),
    (
        lambda: made().graphed(next_ids={made().module: made().batch(0)}),
        ValueError,
        "^next_ids: expected keys that .* got another Embedding. Use the model's own modules as",
    ),
    (
        lambda: of_two_modules(made().batch(0)),
        ValueError,
        "^next_ids: expected a dict by module, .* has 2 Embeddings, got Tensor. Use the modules",
    ),
    (
        lambda: of_two_modules({"users": made().batch(0)}),
        ValueError,
        r"^next_ids: expected a dict by module, .* got dict with the keys \['users'\]. Use the mod",
    ),
    (
        lambda: made().graphed()(ids=made().batch(0)),
        TypeError,
        r"graphed: expected the arguments .* by position, got .* \['ids'\]. Pass the whole batch",
    ),
    (lambda: made(None).graphed(), ValueError, "graphed: Embedding has no capacity"),
    (
        lambda: speedtorch.graphed(None, modules=made().module, optimizers=made().optimizer),
        TypeError,
        "step: expected a function that trains a batch, got None",
    ),
    (
        lambda: made().graphed(modules=5),
        TypeError,
        "modules: expected Module or a list of them, got 5",
    ),
    (
        lambda: made().graphed(optimizers=[3]),
        TypeError,
        r"optimizers: expected Optimizer or .* got \[3\]",
    ),
    (lambda: made().graphed(optimizers=[]), ValueError, "optimizers: expected the optimizers"),
    (
        lambda: made().graphed(optimizers=optim.SGD([nn.Parameter(torch.ones(1))])),
        ValueError,
        "optimizers: expected also the optimizer that steps the rows of Embedding",
    ),
    (
        lambda: made().graphed(
            optimizers=[made().optimizer, optim.SGD(speedtorch.Embedding(5, 2).parameters())]
        ),
        ValueError,
        "modules: expected also the module of Embedding, whose rows the (Adam|SGD) steps",
    ),
    (
        lambda: with_example(made().batch(0).numpy()),
        TypeError,
        "example: expected tensors, numbers, strings or None.* got ndarray",
    ),
    (lambda: with_example({"ids": [object()]}), TypeError, "example: .* got object"),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG)
def test_wrong_arguments_are_the_same_errors(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


def test_requirements_of_a_capture_are_not_checked() -> None:
    """As the documentation says: an optimizer that a graph repeats, tensors of its own."""
    training = SmallTraining(optim.Adagrad, steps=0, capacity=20)

    def train(ids: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        loss: Tensor = training.module(ids).sum()
        loss.backward()
        training.optimizer.step()
        return loss

    step = speedtorch.graphed(
        train, torch.arange(40), modules=training.module, optimizers=training.optimizer
    )
    first, second = step(torch.arange(3)), step(torch.arange(5))
    assert first.data_ptr() != second.data_ptr() and not first.requires_grad
    training.module.to("cpu")
    speedtorch.detach(training.optimizer)


@NEEDS_GPU
def test_rows_on_both_devices_are_refused() -> None:
    training = made()
    other = speedtorch.Embedding(50, 4, capacity=16, device="cuda")
    with pytest.raises(ValueError, match="are on the CPU and other rows are on a GPU"):
        training.graphed(modules=[training.module, other])

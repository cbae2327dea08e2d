"""A step of rows that are sharded among ranks trains in a CUDA graph as it does without one.

On the CPU the same calls run the step itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_backends import NEEDS_GPU, ON_RANKS
from rank_processes import own_device
from sharded_training import (
    ROWS,
    WIDTH,
    local_ids,
    made_collection,
    own_rows,
    raises,
    row_modules,
    same,
)
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.parallel.shard import shard
from speedtorch.step.disagreement import DisagreementError

pytestmark = ON_RANKS
ONE_AND_TWO = pytest.mark.parametrize(
    ("ranks", "backend"),
    [
        (2, "gloo"),
        pytest.param(1, "nccl", marks=NEEDS_GPU),
        pytest.param(2, "nccl", marks=NEEDS_GPU),
    ],
)
ON_GPUS = pytest.mark.parametrize(
    ("ranks", "backend"),
    [pytest.param(1, "nccl", marks=NEEDS_GPU), pytest.param(2, "nccl", marks=NEEDS_GPU)],
)
CAPACITY, IDS, STEPS = 40, 8, 12


def random_ids(step: int, *, rows: int = ROWS, count: int = IDS) -> Tensor:
    """This rank's ids of a step, some of them equal."""
    random = torch.Generator().manual_seed(10 * step + dist.get_rank())
    ids = torch.randint(rows, (count,), generator=random)
    return ids.where(torch.rand(count, generator=random) < 0.8, 5).to(own_device())


def flushed(model: nn.Module) -> list[Tensor]:
    """The rows and state of this rank."""
    for module in row_modules(model):
        module.flush()
    return own_rows(model)


class Training:
    """Two lookups of a table, their optimizer, and a trained scale of this rank's own."""

    def __init__(
        self,
        make: Callable[..., optim.Optimizer],
        *,
        is_graphed: bool,
        rows: int = ROWS,
        capacity: int = CAPACITY,
        example: tuple[Tensor, Tensor] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        torch.manual_seed(3)
        made = speedtorch.Embedding(rows, WIDTH, capacity=capacity, **(settings or {}))
        self.module = made.to(own_device())
        shard(nn.Sequential(self.module))
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5, device=own_device()))
        self.optimizer = make([self.module.weight, self.scale])
        speedtorch.attach(self.optimizer, self.module)
        self.run: Any = self.step
        if is_graphed:
            self.run = self.graphed(self.step, *(example or (random_ids(99), random_ids(98))))

    def graphed(self, step: Callable[..., Any], *example: Tensor) -> Any:
        both = nn.ModuleList([self.module, nn.ParameterList([self.scale])])
        return speedtorch.graphed(step, *example, modules=both, optimizers=self.optimizer)

    def step(self, first: Tensor, second: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        self.module.announce(first, second)
        found = (self.module(first) * self.scale).square().sum()
        loss = found + (self.module(second) - 1).square().sum()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def everything(self) -> list[Tensor]:
        return [*flushed(self.module), self.scale.detach().clone()]


def adam(parameters: Any) -> optim.Optimizer:
    return optim.Adam(parameters, lr=0.1, fused=True, capturable=own_device().type == "cuda")


def sgd(parameters: Any) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.1, momentum=0.5)


@ONE_AND_TWO
def test_replays_train_as_eager_steps_do() -> None:
    """Lookups without gradients, flushes and batches of other shapes come between replays."""
    for make in (adam, sgd):
        eager, graphed = (Training(make, is_graphed=choice) for choice in (False, True))
        assert same(graphed.everything(), eager.everything())  # warm-ups change nothing
        for step in range(STEPS):
            count = IDS - 3 if step == 7 else IDS
            batch = [random_ids(2 * step + k, count=count) for k in (0, 1)]
            losses = [each.run(*batch).clone() for each in (eager, graphed)]
            assert torch.equal(*losses), step
            if step % 5 == 2:
                every = local_ids(*range(ROWS))
                with torch.no_grad():
                    assert torch.equal(graphed.module(every), eager.module(every))
            if step % 4 == 3:
                assert same(graphed.everything(), eager.everything()), step
        assert same(graphed.everything(), eager.everything())


@ONE_AND_TWO
def test_a_collection_trains_in_a_graph() -> None:
    """Several tables, some of another width, share the exchanges of a step."""
    models = [made_collection(40) for _ in range(2)]
    runs = []
    for model in models:
        shard(model)
        optimizer = adam(model.parameters())
        speedtorch.attach(optimizer, model)

        def step(
            batch: dict[str, Tensor],
            model: nn.Module = model,
            optimizer: optim.Optimizer = optimizer,
        ) -> None:
            optimizer.zero_grad()
            model(batch).values().square().sum().backward()
            optimizer.step()

        runs.append((step, optimizer))

    def batch(step: int) -> dict[str, Tensor]:
        sizes = {"a": 37, "b": 5, "c": 29}
        return {n: random_ids(step, rows=rows).view(4, 2) % rows for n, rows in sizes.items()}

    step, optimizer = runs[1]
    graph = speedtorch.graphed(step, batch(99), modules=models[1], optimizers=optimizer)
    for number in range(STEPS):
        runs[0][0](batch(number))
        graph(batch(number))
    assert same(flushed(models[1]), flushed(models[0]))


@ON_GPUS
def test_a_fault_of_one_rank_raises_on_all_and_changes_no_row() -> None:
    """A bad id, or too many rows, of the last rank; training continues after the error."""
    rows, capacity = 400, 12
    # Each rank has some of these rows.
    few, others = (local_ids(*2 * ids) for ids in ((0, 40, 80, 120), (80, 120, 160, 200)))
    settings: Any = {"rows": rows, "capacity": capacity, "example": (few, others)}
    training = Training(adam, is_graphed=True, **settings)
    many = local_ids(*range(IDS)), local_ids(*range(IDS, 2 * IDS))
    is_last = dist.get_rank() == dist.get_world_size() - 1
    for kind, bad in ((IndexError, (few, few + rows)), (RuntimeError, many)):
        training.run(few, others)
        before = training.everything()[:-1]
        with pytest.raises(kind, match="Embedding"):
            training.run(*(bad if is_last else (few, others)))
            for _ in range(4):
                training.run(few, others)
        assert same(training.everything()[:-1], before)
        training.run(*(bad if is_last else (few, others)))
        with pytest.raises(kind, match="Embedding"):
            training.module.flush()
        training.step(few, others)  # announces both, although the fault's code is still to read
        training.module.flush()
        assert not same(training.everything()[:-1], before)
        before = training.everything()[:-1]
        training.run(*(bad if is_last else (few, others)))
        with pytest.raises(kind, match="Embedding"):
            training.module.flush()
        assert same(training.everything()[:-1], before)
        training.run(few, others)
        assert not same(training.everything()[:-1], before)


@ON_GPUS
def test_ranks_at_other_calls_raise() -> None:
    """Rank 1 trains without a graph, or replays another graph of the same lookups."""
    if dist.get_world_size() == 1:
        return
    training = Training(adam, is_graphed=True)
    batch = random_ids(0), random_ids(1)
    for other in (training.step, training.graphed(training.step, *batch)):
        before = training.everything()
        run = other if dist.get_rank() else training.run
        raises(
            DisagreementError,
            r"ranks \[0\] are at a step of graphed\(\), CUDA graph 1 of ",
            lambda run=run: run(*batch),
        )
        assert same(training.everything(), before)
        training.run(*batch)
        assert not same(training.everything(), before)


def test_ranks_compare_the_order_numbers_of_graphs() -> None:
    """On the CPU the graphs are empty."""
    training, replays = Training(sgd, is_graphed=False), []
    for _ in range(2):
        with training.module.lookups.capturing() as graph:
            replays.append(graph)
    rank = dist.get_rank()
    for _ in range(2):
        raises(
            DisagreementError,
            r"\[0\] are at a step of graphed\(\), CUDA graph 1 of .*\[1\] are .*, CUDA graph 2 of ",
            lambda: replays[rank].agree(set()),
        )
        for graph in replays:
            graph.agree(set())
    before = training.everything()
    training.run(random_ids(0), random_ids(1))
    assert not same(training.everything(), before)


@ON_GPUS
def test_next_ids_are_refused() -> None:
    training, ids = Training(adam, is_graphed=False), random_ids(0)
    given = {"modules": training.module, "optimizers": training.optimizer}
    raises(
        NotImplementedError,
        "rows of Embedding are sharded among ranks, so a replay cannot load the rows of the next",
        lambda: speedtorch.graphed(training.step, ids, ids, next_ids=ids, **given),
    )
    training.run(ids, ids)


@ONE_AND_TWO
def test_lookups_without_gradients_are_refused_in_a_capture() -> None:
    training, eager = (Training(adam, is_graphed=False) for _ in range(2))
    batch = random_ids(0), random_ids(1)
    with training.module.lookups.capturing(), torch.no_grad():
        raises(
            RuntimeError,
            "Embedding: a CUDA graph cannot capture a lookup without gradients of rows that are",
            lambda: training.module(batch[0]),
        )
    with torch.no_grad():
        assert torch.equal(training.module(batch[0]), eager.module(batch[0]))
    for each in (training, eager):
        each.step(*batch)
    assert same(training.everything(), eager.everything())


@ON_GPUS
def test_a_step_with_a_lookup_without_gradients_is_not_captured() -> None:
    training = Training(adam, is_graphed=False)
    batch = random_ids(0), random_ids(1)

    def evaluating(first: Tensor, second: Tensor) -> None:
        with torch.no_grad():
            training.module(first)
        training.step(first, second)

    raises(
        RuntimeError,
        "cannot capture a lookup without gradients",
        lambda: training.graphed(evaluating, *batch),
    )
    training.step(*batch)


@ONE_AND_TWO
def test_a_step_that_clips_and_scales_is_captured() -> None:
    def step_of(training: Training, scaler: speedtorch.GradScaler) -> Callable[..., None]:
        def step(first: Tensor, second: Tensor) -> None:
            training.optimizer.zero_grad()
            training.module.announce(first, second)
            found = (training.module(first) * training.scale).square().sum()
            scaler.scale(found + (training.module(second) - 1).square().sum()).backward()
            scaler.unscale_(training.optimizer)
            speedtorch.clip_grad_norm_([training.module.weight, training.scale], 0.5)
            scaler.step(training.optimizer)
            scaler.update()

        return step

    eager, graphed = (Training(adam, is_graphed=False) for _ in range(2))
    scalers = [speedtorch.GradScaler(own_device().type, init_scale=4.0) for _ in range(2)]
    run = graphed.graphed(step_of(graphed, scalers[1]), random_ids(99), random_ids(98))
    for step in range(STEPS):
        batch = random_ids(2 * step), random_ids(2 * step + 1)
        step_of(eager, scalers[0])(*batch)
        run(*batch)
    assert same(graphed.everything(), eager.everything())


@ON_GPUS
def test_a_capture_that_fails_changes_no_row_and_training_continues() -> None:
    training, eager = (Training(adam, is_graphed=False) for _ in range(2))
    batch = random_ids(0), random_ids(1)

    def failing(first: Tensor, second: Tensor) -> None:
        if torch.cuda.is_current_stream_capturing():
            training.module.announce(first, second)
            raise ZeroDivisionError
        training.step(first, second)

    with pytest.raises(ZeroDivisionError):
        training.graphed(failing, *batch)
    for each in (training, eager):
        each.step(*batch)
    assert same(training.everything(), eager.everything())


@ONE_AND_TWO
@pytest.mark.parametrize(
    "settings",
    [
        {"padding_idx": 5},
        {"max_norm": 0.7},
        {"cache": "2KiB"},
        {"stored": torch.bfloat16},
        {"cache": "2KiB", "stored": {"exp_avg": torch.bfloat16}, "padding_idx": 0},
    ],
    ids=lambda settings: " ".join(settings),
)
def test_graphs_train_rows_of_every_kind(settings: dict[str, Any]) -> None:
    eager, graphed = (
        Training(adam, is_graphed=choice, settings=settings) for choice in (False, True)
    )
    for step in range(STEPS):
        batch = random_ids(2 * step), random_ids(2 * step + 1)
        losses = [each.run(*batch).clone() for each in (eager, graphed)]
        assert torch.equal(*losses), step
        if step % 4 == 3:
            assert same(graphed.everything(), eager.everything()), step


@ONE_AND_TWO
def test_two_graphs_and_steps_without_one_take_turns() -> None:
    eager, graphed = (Training(adam, is_graphed=choice) for choice in (False, True))

    def second(training: Training) -> Callable[[Tensor], None]:
        def step(ids: Tensor) -> None:
            training.optimizer.zero_grad()
            (training.module(ids) + training.scale).square().sum().backward()
            training.optimizer.step()

        return step

    other = graphed.graphed(second(graphed), random_ids(97))
    for step in range(STEPS):
        batch = random_ids(2 * step), random_ids(2 * step + 1)
        if step % 3 == 2:
            second(eager)(batch[0])
            other(batch[0])
        else:
            run = graphed.step if step % 4 == 1 else graphed.run
            assert torch.equal(eager.step(*batch), run(*batch)), step
        if step % 4 == 3:
            assert same(graphed.everything(), eager.everything()), step
    assert same(graphed.everything(), eager.everything())

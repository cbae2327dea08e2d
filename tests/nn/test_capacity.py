"""A capacity: blocks of one size, whose rows are counted on the device alone."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import loops
import pytest
import torch
from conftest import NEEDS_GPU
from embedding_reference import random_ids
from interrupts import EVERY, every_interrupt
from loops import ROWS, WIDTH, first_rows
from reference import assert_same_bytes, assert_same_content
from torch import Tensor, nn, optim
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

import speedtorch
from speedtorch.plan.fixed_size_batch import FixedSizeBatch
from speedtorch.plan.planned_batch import PlannedBatch
from speedtorch.torch_internals import as_plain

pytestmark = pytest.mark.usefixtures("deterministic")
TOO_MANY = "Embedding: a step has 5 unique rows, but capacity=4"
NEW_ROWS = (
    "with capacity= all lookups of a step must be announced before the first of them, or be one"
    r" lookup. Call announce\(\), also for the batch of a prefetch\(\) loop that has ended. This"
    " call has 1 new rows. Nothing has"
)


@pytest.fixture
def late(device: str) -> Iterator[None]:
    """The CPU finds too many rows as late as a GPU does; its bad ids are found at once."""
    with patch.object(FixedSizeBatch, "count", lambda batch: None):
        yield
        with suppress(RuntimeError, IndexError):  # what a test has left
            speedtorch.synchronize()
        gc.collect()


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


GOOD, OTHER, MANY = ids(1, 2, 3), ids(2, 5), ids(1, 6, 7, 8, 9, 6)
"""Three rows, two, and five, which no step of a capacity of four holds."""


class Training(loops.Training):
    """A training with a capacity, as it comes."""

    def __init__(
        self, device: str = "cpu", capacity: int | None = 4, make: Any = optim.Adam, **settings: Any
    ) -> None:
        super().__init__(loops.Way(capacity=capacity), make, device, **settings)

    @property
    def blocks(self) -> list[Tensor]:
        """The blocks of every field, as they are."""
        return list(self.emb.trained_rows.exchange.held.now.rows)


def rows_of(training: Training) -> Tensor:
    return training.fields()["weight"]


def moved_rows(training: Training) -> list[int]:
    moved: list[int] = (rows_of(training) != first_rows()).any(1).nonzero().flatten().tolist()
    return moved


def assert_as_without(train: Callable[[Any], object]) -> None:
    """Training with a capacity leaves the same numbers as without, bit for bit."""
    loops.assert_same_numbers(train, (loops.Way(capacity=4), loops.PLAIN))


# ------------------------------------------------------------------------------------------------
# Blocks


def test_the_blocks_have_so_many_rows_and_keep_their_memory(device: str) -> None:
    training = Training(device)
    seen = set()
    for part in (GOOD, OTHER, ids(4), ids(1, 1, 4, 5, 6), *random_ids(ROWS, 10, 0.5, most=4)):
        training.emb(part).square().sum().backward()
        assert training.emb.trained_rows.parameter.shape == (4, WIDTH)
        with training.emb.trained_rows.lock:  # as the optimizer is given it
            gradient = training.emb.trained_rows.own_gradient()
        count = len(part.unique())
        assert gradient.shape == (4, WIDTH)
        assert gradient[:count].all() and not gradient[count:].any()
        assert training.emb.weight.grad is not None
        assert training.emb.weight.grad.shape == (ROWS, WIDTH)
        training.optimizer.step()
        training.optimizer.zero_grad()
        seen.add(tuple(block.data_ptr() for block in training.blocks))
    assert len(seen) == 1


def nan_of_zeros(parameters: Any, lr: float) -> optim.Optimizer:
    return optim.Adam(parameters, lr=lr, eps=0.0, weight_decay=0.1)


NOT_ZERO = {"AdamW": optim.AdamW, "Rprop": optim.Rprop, "eps=0": nan_of_zeros}


@pytest.mark.parametrize("make", NOT_ZERO.values(), ids=NOT_ZERO)
def test_rows_beyond_the_count_are_zeros_before_and_after_a_step(
    device: str, make: Callable[..., Any]
) -> None:
    training = Training(device, make=make)
    seen = []

    def look(*_: object) -> None:
        seen.append([bool(block[3:].any()) for block in training.blocks])

    training.optimizer.register_step_pre_hook(look)
    for _ in range(3):
        training.learn(GOOD)
        look()
    assert len(seen) == 6 and not any(map(any, seen))


def test_rows_beyond_the_count_are_zeros_after_a_step_that_an_exception_has_left() -> None:
    training = Training(make=nan_of_zeros)
    torchs = sys.modules["torch.optim.adam"]
    step = torchs.adam  # type: ignore[attr-defined]

    def interrupted(*args: Any, **kwargs: Any) -> None:
        step(*args, **kwargs)
        raise KeyboardInterrupt

    training.emb(GOOD).sum().backward()
    with patch.object(torchs, "adam", interrupted), suppress(KeyboardInterrupt):
        training.optimizer.step()
    training.emb(GOOD)
    assert not any(block[3:].any() for block in training.blocks)


def test_clipping_sees_the_norm_of_the_held_rows(device: str) -> None:
    norms = []
    for capacity in (4, None):
        training = Training(device, capacity)
        training.emb(GOOD).square().sum().backward()
        norms.append(nn.utils.clip_grad_norm_([training.emb.weight], 0.5))
    torch.testing.assert_close(*norms)


def test_a_gradient_whose_rows_are_no_longer_known_raises(device: str) -> None:
    training = Training(device)
    training.emb(GOOD.to(device)).sum().backward()
    gradient: Any = training.emb.weight.grad
    training.optimizer.zero_grad()
    training.emb.flush()
    with pytest.raises(NotImplementedError, match="row ids of an earlier step's gradient"):
        gradient.to_dense()


def test_a_gradient_of_zeros_remains_when_its_rows_are_written_back(device: str) -> None:
    training = Training(device)
    training.emb(GOOD.to(device)).sum().backward()
    gradient: Any = training.emb.weight.grad
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=False)
    training.emb.flush()
    assert training.emb.weight.grad is gradient and not gradient.to_dense().any()


def test_a_gradient_of_zeros_from_before_the_first_lookup_remains(device: str) -> None:
    weight: Any = (training := Training(device)).emb.weight
    weight.grad = gradient = torch.zeros_like(weight)
    training.emb(GOOD.to(device)).sum().backward()
    assert weight.grad is gradient and gradient.to_dense()[GOOD].eq(1).all()


def test_it_is_at_most_the_table() -> None:
    assert speedtorch.Embedding(3, 2, capacity=50).capacity == 3
    assert "capacity=3" in repr(speedtorch.Embedding(3, 2, capacity=50))
    assert type(speedtorch.Embedding(9, 2, capacity=torch.tensor(4)).capacity) is int


@pytest.mark.parametrize("wrong", [0, -1, True, 2.5, "4"], ids=repr)
def test_other_numbers_are_refused(wrong: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="capacity: expected .*, got "):
        speedtorch.Embedding(3, 2, capacity=wrong)


def test_every_maker_takes_it(device: str) -> None:
    rows, to = first_rows(), {"device": device, "capacity": 4}
    config = speedtorch.EmbeddingBagConfig(ROWS, WIDTH, "a")
    bags = speedtorch.EmbeddingBagCollection([config], **to)
    for made in (
        speedtorch.Embedding.from_pretrained(rows, **to),
        speedtorch.EmbeddingBag.from_pretrained(rows, **to),
        speedtorch.Embedding.from_module(nn.Embedding(ROWS, WIDTH), **to),
        speedtorch.EmbeddingBag.from_module(nn.EmbeddingBag(ROWS, WIDTH), **to),
        speedtorch.EmbeddingBag(ROWS, WIDTH, **to),
        bags.group_of("a"),
    ):
        assert made.capacity == 4


# ------------------------------------------------------------------------------------------------
# The same numbers as without


def test_the_paddings_row_takes_no_place(device: str) -> None:
    training = Training(device, padding_idx=0)
    training.learn(ids(0, 1, 2, 3, 4))
    training.learn(ids(0, 0))
    assert_same_bytes(rows_of(training)[0], first_rows()[0])


def test_frozen_rows_are_looked_up_in_any_number(device: str) -> None:
    emb = speedtorch.Embedding.from_pretrained(first_rows(), device=device, capacity=2)
    assert_same_bytes(emb(torch.arange(ROWS)).cpu(), first_rows())


def test_a_deep_copy_trains_by_itself(device: str) -> None:
    training = Training(device)
    training.learn(GOOD)
    training.emb(OTHER).sum().backward()
    copied = copy.deepcopy(training.emb)
    before = rows_of(training)
    copied(MANY[:4]).sum().backward()
    optim.SGD(copied.parameters(), lr=1.0).step()
    assert copied.capacity == 4
    assert_same_bytes(rows_of(training), before)
    expected = before.clone()
    expected[MANY[:4]] -= 1
    assert_same_bytes(copied.state_dict()["weight"], expected)


# ------------------------------------------------------------------------------------------------
# What does not fit, found at once


@pytest.mark.parametrize("announced", [False, True])
def test_new_rows_within_a_step_are_an_error_and_the_step_goes_on(
    announced: bool, device: str
) -> None:
    training = Training(device)
    rows = training.emb(GOOD)
    with pytest.raises(RuntimeError, match=NEW_ROWS):
        (training.emb.announce if announced else training.emb)(OTHER)
    rows.sum().backward()
    training.optimizer.step()
    assert moved_rows(training) == GOOD.tolist()
    training.optimizer.zero_grad()
    training.learn(OTHER)


def test_a_lookup_that_was_not_announced_needs_no_room_for_what_was(device: str) -> None:
    training = Training(device)
    training.emb.announce(ids(1, 2))
    training.learn(ids(3))
    assert moved_rows(training) == [3]


def test_a_refused_lookup_ends_what_was_announced_within_the_step(device: str) -> None:
    training = Training(device)
    rows = training.emb(GOOD)
    training.emb.announce(GOOD)
    with pytest.raises(RuntimeError, match=NEW_ROWS):
        training.emb(OTHER)
    del rows
    training.optimizer.zero_grad()
    training.learn(OTHER)


@pytest.mark.parametrize("announced", [False, True])
def test_too_many_rows_are_an_error_at_once_on_the_cpu_and_change_nothing(announced: bool) -> None:
    def train(training: Training) -> None:
        training.learn(GOOD)
        if training.emb.capacity is not None:
            if announced:
                training.emb.announce(GOOD)
            with pytest.raises(RuntimeError, match=f"{TOO_MANY}.* Nothing has changed"):
                training.emb.announce(ids(4, 5)) if announced else training.emb(MANY)
        training.learn(OTHER)

    assert_as_without(train)


def test_a_prefetched_batch_of_too_many_rows_is_an_error_when_it_is_looked_up() -> None:
    def train(training: Training) -> None:
        batches = [GOOD, OTHER, MANY, GOOD]
        refused = 0
        for part in speedtorch.prefetch(batches, training.emb, ids=lambda part: part):
            try:
                if training.emb.capacity is not None or part is not MANY:
                    training.learn(part)
            except RuntimeError as error:
                refused += str(error).startswith(TOO_MANY)
        assert refused == (training.emb.capacity is not None)

    assert_as_without(train)


# ------------------------------------------------------------------------------------------------
# What does not fit, found late


def raise_late(training: Training) -> None:
    """Lets the error be raised that a batch before has left."""
    if training.emb.weight.is_cuda:
        torch.cuda.synchronize()
    with pytest.raises((RuntimeError, IndexError), match="Embedding: "):
        training.emb.flush()


def after_good(device: str, **given: Any) -> Training:
    training = Training(device, **given)
    training.learn(GOOD)
    return training


@pytest.fixture
def faulty(device: str, late: None) -> Iterator[Callable[..., Training]]:
    """Makes a training whose last batch did not fit, after one that did."""

    def make(*, step: bool = True, **given: Any) -> Training:
        training = after_good(device, **given)
        training.emb.flush()
        if step:
            training.learn(MANY)
        else:
            assert not training.emb(MANY).any()
        if device == "cuda":
            torch.cuda.synchronize()
        return training

    return make


Faulty = Callable[..., Training]
LATER: dict[str, Callable[[Training], object]] = {
    "lookup": lambda t: t.emb(OTHER),
    "same-lookup": lambda t: t.emb(MANY),
    "evaluation": lambda t: t.emb.eval()(OTHER) if not t.emb.weight.requires_grad_(False) else 0,
    "announce": lambda t: t.emb.announce(OTHER),
    "flush": lambda t: t.emb.flush(),
    "state_dict": lambda t: t.emb.state_dict(),
    "table": lambda t: t.emb.table["weight"],
    "synchronize": lambda t: speedtorch.synchronize(),
    "deepcopy": lambda t: copy.deepcopy(t.emb),
    "detach": lambda t: speedtorch.detach(t.optimizer),
}


@pytest.mark.parametrize("later", LATER)
@pytest.mark.parametrize("step", [True, False], ids=["stepped", "looked-up"])
def test_training_goes_on_after_the_error(faulty: Faulty, later: str, step: bool) -> None:
    training = faulty(step=step)
    expected = after_good(training.device)
    with pytest.raises(RuntimeError, match=TOO_MANY):
        LATER[later](training)
    training.emb.weight.requires_grad_(True)
    assert_same_bytes(training.emb(MANY[:1]).detach(), expected.emb(MANY[:1]).detach())
    assert_same_content(training.fields(), expected.fields())
    speedtorch.synchronize()  # the error is raised once
    training.learn(OTHER)


def test_the_error_says_what_happened_to_the_batch(faulty: Faulty) -> None:
    with pytest.raises(RuntimeError) as error:
        faulty().emb.flush()
    assert str(error.value) == (
        f"{TOO_MANY}. Use smaller batches or a larger capacity. Until this error, lookups of the"
        " batch returned zeros. No row has changed. Optimizer steps since then changed other"
        " parameters, except for fused optimizers that also step these rows."
    )


def test_the_error_within_its_step_does_not_say_that_this_lookup_returned(
    device: str, late: None
) -> None:
    training = Training(device)
    parts = ids(1, 2).to(device), ids(3, 4, 5).to(device)
    training.emb.announce(*parts)
    assert not training.emb(parts[0]).any()
    if device == "cuda":
        torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="Until this error, lookups of the batch returned zeros"):
        training.emb(parts[1])


@NEEDS_GPU
def test_a_bad_id_on_a_gpu_is_reported_late() -> None:
    training = after_good("cuda")
    training.learn(ids(1, ROWS))
    torch.cuda.synchronize()
    with pytest.raises(IndexError, match="id 30 at position 1 is out of range for a table of 30"):
        training.emb.flush()


@pytest.mark.parametrize("number", [0, -1, 2**40])
def test_a_table_without_rows_has_no_valid_id(device: str, number: int) -> None:
    embedding = speedtorch.Embedding(0, WIDTH, capacity=4, device=device)
    with pytest.raises(IndexError, match=f"id {number} at position 0 is out of range for a table"):
        embedding(ids(number).to(device))
        speedtorch.synchronize()
    assert embedding(ids().to(device)).shape == (0, WIDTH)


def test_its_gradient_is_zero(faulty: Faulty) -> None:
    training = faulty(step=False)
    gradient = training.emb.weight.grad
    assert gradient is None or not gradient.any()


def test_later_batches_are_zeros_and_counted_until_the_error_is_raised(faulty: Faulty) -> None:
    training = faulty()
    memory = type(training.emb.trained_rows.exchange.memory)
    with patch.object(memory, "raise_faults", lambda self: None):  # nobody has seen it yet
        for part in (GOOD, OTHER):
            assert not training.emb(part).any()
            training.optimizer.step()
    with pytest.raises(RuntimeError, match=r"the batch \(and those of 2 later batches\) ret"):
        training.emb.flush()


def fused(parameters: Any, lr: float) -> optim.Optimizer:
    return optim.Adam(parameters, lr=lr, fused=True)


def test_a_fused_optimizer_steps_no_other_layer_either(faulty: Faulty) -> None:
    training = faulty(make=fused)
    expected = after_good(training.device, make=fused)
    assert_same_bytes(training.scale.detach(), expected.scale.detach())
    raise_late(training)
    for each in (training, expected):
        assert not hasattr(each.optimizer, "found_inf")
        each.learn(OTHER)
    assert_same_bytes(training.scale.detach(), expected.scale.detach())


@pytest.mark.parametrize("fits", [True, False])
def test_a_fused_optimizer_with_a_grad_scaler_skips_it_too(
    device: str, late: None, fits: bool
) -> None:
    training, scaler = Training(device, make=fused), torch.amp.GradScaler(device, init_scale=8.0)
    training.learn(GOOD)
    training.emb.flush()
    before = training.scale.detach().clone()
    loss = (training.emb(OTHER if fits else MANY) * training.scale).sum() + training.scale.sum()
    scaler.scale(loss).backward()
    scaler.step(training.optimizer)
    scaler.update()
    assert torch.equal(training.scale, before) is not fits
    if not fits:
        raise_late(training)


def test_other_tables_are_trained_after_a_fault_in_one(device: str, late: None) -> None:
    tables = [speedtorch.Embedding(ROWS, WIDTH, _weight=first_rows(), device=device, capacity=4)]
    tables.append(copy.deepcopy(tables[0]))
    model = nn.ModuleList(tables)
    sgd = optim.SGD(model.parameters(), lr=1.0)
    for parts in ((GOOD, GOOD), (OTHER, MANY)):
        sgd.zero_grad()
        for table, part in zip(tables, parts, strict=True):
            table(part).sum().backward()
        sgd.step()
    expected = first_rows()
    expected[GOOD] -= 1
    if device == "cuda":
        torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match=TOO_MANY):
        tables[1].flush()
    assert_same_bytes(tables[1].state_dict()["weight"], expected)
    expected[OTHER] -= 1
    assert_same_bytes(tables[0].state_dict()["weight"], expected)


def test_synchronize_raises_the_errors_of_all_tables_one_by_one(device: str, late: None) -> None:
    trainings = [after_good(device) for _ in range(2)]
    for training in trainings:
        training.learn(MANY)
    for _ in trainings:
        with pytest.raises(RuntimeError, match=TOO_MANY):
            speedtorch.synchronize()
    speedtorch.synchronize()


def test_batches_around_a_prefetched_one_that_does_not_fit_are_trained(
    device: str, late: None
) -> None:
    training, expected = Training(device), Training(device)
    batches = [part.to(device) for part in (GOOD, OTHER, MANY, GOOD, OTHER)]
    reported = 0
    for number, part in enumerate(
        speedtorch.prefetch(batches, training.emb, ids=lambda part: part)
    ):
        if number == 3:
            if device == "cuda":
                torch.cuda.synchronize()
            with pytest.raises(RuntimeError, match=TOO_MANY):
                training.learn(part)
            reported += 1
        training.learn(part)
    for part in (GOOD, OTHER, ids(), GOOD, OTHER):  # Adam counts the step that moved nothing
        expected.learn(part)
    assert reported == 1
    assert_same_bytes(rows_of(training), rows_of(expected))


def test_a_table_that_changes_while_a_fault_waits_keeps_what_was_written(faulty: Faulty) -> None:
    training = faulty()
    with pytest.raises(RuntimeError, match=TOO_MANY):
        training.emb.table.fill_(0.5)
    training.emb.table.fill_(0.5)
    assert bool((training.emb(GOOD) == 0.5).all())


# ------------------------------------------------------------------------------------------------
# Interrupts of what no loop does


def move(training: Training) -> None:
    with as_plain():
        training.emb.trained_rows.exchange.moving(lambda: None)


INTERRUPTED: dict[str, Callable[[Training], object]] = {
    "detach": lambda training: speedtorch.detach(training.optimizer),
    "move": move,
}


@pytest.mark.dealt("with_gradient")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@EVERY
@pytest.mark.parametrize("with_gradient", [True, False])
@pytest.mark.parametrize("call", INTERRUPTED.values(), ids=INTERRUPTED)
def test_rows_are_the_tables_wherever_it_is_interrupted(
    call: Callable[[Training], object], with_gradient: bool, every: int
) -> None:
    expected = rows_of(after_good("cpu"))

    def begun() -> Training:
        training = after_good("cpu")
        if with_gradient:
            training.emb(OTHER).sum().backward()
        return training

    for training, _ in every_interrupt(begun, call, every=every):
        assert_same_bytes(rows_of(training), expected)
        training.emb.table.fill_(0.5)
        training.optimizer.zero_grad()
        assert bool((training.emb(ids(2, 4)) == 0.5).all())
        training.emb.flush()


@pytest.mark.parametrize("zeroes", [False, True])
def test_a_backward_that_fails_refuses_no_lookup_after_it(zeroes: bool) -> None:
    """torch keeps what is left of it on the CPU, lookups whose gradient has not come with it."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: Tensor) -> Tensor:
            return rows.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise MemoryError

    training = Training()
    rows = training.emb(GOOD)
    loss = rows.sum() + Fails.apply(training.scale).sum()  # type: ignore[no-untyped-call]
    del rows
    with pytest.raises(MemoryError):
        loss.backward()
    del loss
    if zeroes:
        training.optimizer.zero_grad()
    training.learn(OTHER)


class Replaces(optim.Optimizer):
    """Gives its parameters other memory, and fails on request."""

    fails = False

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in (p for group in self.param_groups for p in group["params"]):
            if each.grad is not None:
                each.data = each.data - each.grad
        if self.fails:
            raise MemoryError


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@EVERY
def test_rows_in_other_memory_after_a_failed_step_are_moved_once(every: int) -> None:
    def begun() -> Training:
        training = Training(make=Replaces, attach=False)
        training.learn(ids(1, 2))
        training.optimizer.fails = True
        training.emb(ids(3, 4)).sum().backward()
        with suppress(MemoryError):
            training.optimizer.step()
        training.optimizer.zero_grad()
        return training

    def look_up(training: Training) -> object:
        return training.emb(ids(5, 6))

    expected = rows_of(begun())
    for training, _ in every_interrupt(begun, look_up, every=every):
        assert_same_bytes(rows_of(training), expected)


# ------------------------------------------------------------------------------------------------
# Nobody waits


WAITS = ("Synchronize", "cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaMemcpy2D")


@NEEDS_GPU
@pytest.mark.parametrize("ahead", [False, True], ids=["at-once", "prefetch"])
def test_a_profile_of_50_steps_shows_no_wait_and_no_new_memory(ahead: bool) -> None:
    training = loops.Training(loops.Way(ahead=ahead, capacity=6), device="cuda")
    batches = [part.cuda() for part in random_ids(ROWS, 64, 0.5, most=6)]

    def train_on(given: list[Tensor]) -> None:
        for part in training.loop(given):
            training.learn(part)

    train_on(batches[:14])
    torch.cuda.synchronize()
    gc.collect()  # or tables of other tests may go meanwhile, for which a GPU is waited
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as profiled, record_function("fifty steps"):
        train_on(batches[14:])
    calls = [event for event in profiled.events() if event.device_type == DeviceType.CPU]
    (whole,) = (call.time_range for call in calls if call.name == "fifty steps")
    within = {call.name for call in calls if whole.start <= call.time_range.start < whole.end}
    if not any(name.startswith(("cudaLaunch", "cuLaunch")) for name in within):
        pytest.skip("the profiler sees no calls of CUDA on this machine")
    waits = {name for name in within if name.startswith("cu") and any(w in name for w in WAITS)}
    assert not waits - {"cudaMemcpyAsync"} and "cudaMemcpy" not in within


def test_nobody_asks_for_a_count_of_rows(device: str, late: None) -> None:
    training = Training(device)
    with patch.object(PlannedBatch, "count", side_effect=AssertionError):
        for part in (GOOD, OTHER, GOOD):
            training.learn(part)

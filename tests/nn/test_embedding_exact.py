"""Training an Embedding equals training the same rows in place, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from conftest import NEEDS_GPU
from embedding_reference import Squares, Trained, first_weight, random_ids, train_in_place, trained
from optimizer_cases import CASES, GPU_VARIANTS, VARIANTS, Case, make_optimizer
from reference import assert_same_content
from torch import Tensor, optim

import speedtorch

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
ROWS = 97
STEPS = 40
WIDTH = 8


def train(
    case: Case,
    variant: str,
    width: int,
    device: str,
    batches: list[Tensor],
    *,
    ahead: bool,
    memory: str = "auto",
    ids_on: str = "cpu",
    capacity: int | None = None,
) -> Trained:
    sparse = case.make is optim.SparseAdam
    loss = Squares(width, device, dense=not sparse)
    embedding = speedtorch.Embedding.from_pretrained(
        first_weight(ROWS, width), freeze=False, device=device, memory=memory, capacity=capacity
    )
    optimizer = make_optimizer(case, variant, embedding.weight, [] if sparse else [loss.scale])
    if case.rows:
        speedtorch.attach(optimizer, embedding)
    loader: Iterable[Tensor] = [ids.to(ids_on) for ids in batches]
    if ahead:
        loader = speedtorch.prefetch(loader, embedding, ids=lambda ids: ids)
    for ids in loader:
        optimizer.zero_grad()
        loss(embedding(ids)).backward()
        optimizer.step()
    embedding.flush()
    fields = {name: embedding.table[name] for name in embedding.table.fields}
    return trained(case, optimizer, embedding.weight, fields, loss.scale)


_in_place: dict[tuple[int, str, float], Trained] = {}
AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["at-once", "prefetch"])
CAPACITY = 40
"""As many as the ids of the largest batch, of which some are alike: no block is ever full."""


@pytest.mark.dealt("overlap", "ahead")
@AHEAD
@pytest.mark.parametrize("overlap", [0, 0.5, 1], ids=["apart", "half", "same"])
@pytest.mark.parametrize(("case", "variant"), VARIANTS)
def test_training_equals_training_in_place_bit_for_bit(
    case: Case, variant: str, overlap: float, ahead: bool
) -> None:
    batches = random_ids(ROWS, STEPS, overlap)
    known = (id(case), variant, overlap)
    if known not in _in_place:  # The same with and without prefetch.
        _in_place[known] = train_in_place(case, variant, WIDTH, "cpu", ROWS, batches)
    actual = train(case, variant, WIDTH, "cpu", batches, ahead=ahead)
    assert_same_content(actual, _in_place[known])


# Without prefetch what differs is that each exchange is one, which the next test has.
@pytest.mark.dealt("variant")
@pytest.mark.parametrize(("case", "variant"), VARIANTS)
def test_training_with_a_capacity_equals_training_in_place_bit_for_bit(
    case: Case, variant: str
) -> None:
    batches = random_ids(ROWS, STEPS, 0.5)
    known = (id(case), variant, 0.5)
    if known not in _in_place:
        _in_place[known] = train_in_place(case, variant, WIDTH, "cpu", ROWS, batches)
    actual = train(case, variant, WIDTH, "cpu", batches, ahead=True, capacity=CAPACITY)
    assert_same_content(actual, _in_place[known])


@AHEAD
@pytest.mark.parametrize("full", [False, True], ids=["some-room", "full"])
@pytest.mark.parametrize("overlap", [0, 1], ids=["apart", "same"])
def test_every_overlap_and_a_full_capacity_train_bit_for_bit(
    overlap: float, full: bool, ahead: bool
) -> None:
    batches = random_ids(ROWS, STEPS, overlap)
    capacity = max(len(ids.unique()) for ids in batches) if full else CAPACITY
    case = CASES["AdamW"]
    expected = train_in_place(case, "fused", WIDTH, "cpu", ROWS, batches)
    actual = train(case, "fused", WIDTH, "cpu", batches, ahead=ahead, capacity=capacity)
    assert_same_content(actual, expected)


@AHEAD
@pytest.mark.parametrize("width", [1, 3, 47, 100])
def test_every_width_trains_bit_for_bit(width: int, ahead: bool) -> None:
    batches = random_ids(ROWS, 50, 0.5)
    case = CASES["AdamW"]
    expected = train_in_place(case, "fused", width, "cpu", ROWS, batches)
    assert_same_content(train(case, "fused", width, "cpu", batches, ahead=ahead), expected)


@NEEDS_GPU
@pytest.mark.usefixtures("deterministic")
@pytest.mark.dealt("overlap", "ids_on", "capacity", "ahead")
@AHEAD
@pytest.mark.parametrize("capacity", [None, CAPACITY], ids=["counted", "capacity"])
@pytest.mark.parametrize("ids_on", ["cpu", "cuda"])
@pytest.mark.parametrize("overlap", [0, 0.5, 1], ids=["apart", "half", "same"])
@pytest.mark.parametrize(("case", "variant"), GPU_VARIANTS)
def test_training_on_a_gpu_equals_training_in_place_on_it_bit_for_bit(
    case: Case, variant: str, overlap: float, ids_on: str, capacity: int | None, ahead: bool
) -> None:
    batches = random_ids(ROWS, STEPS, overlap)
    expected = train_in_place(case, variant, WIDTH, "cuda", ROWS, batches)
    given = {"ahead": ahead, "ids_on": ids_on, "capacity": capacity}
    actual = train(case, variant, WIDTH, "cuda", batches, **given)
    assert_same_content(actual, expected)


@NEEDS_GPU
@pytest.mark.usefixtures("deterministic")
@AHEAD
@pytest.mark.parametrize("memory", ["managed", "registered", "plain", "cuda"])
def test_every_kind_of_memory_trains_the_same_on_a_gpu(memory: str, ahead: bool) -> None:
    batches = random_ids(ROWS, 50, 0.5)
    case = CASES["Adam"]
    expected = train_in_place(case, "fused", WIDTH, "cuda", ROWS, batches)
    actual = train(case, "fused", WIDTH, "cuda", batches, ahead=ahead, memory=memory)
    assert_same_content(actual, expected)


def test_the_reference_moves_rows_and_changes_no_other_row() -> None:
    # Guards the tests above: a reference that trained nothing would equal anything.
    batches = random_ids(ROWS, 3, 0.5)
    after = train_in_place(CASES["Adam"], "foreach", 3, "cpu", ROWS, batches)
    touched = torch.zeros(ROWS, dtype=torch.bool)
    touched[torch.cat(batches)] = True
    changed = (after.weight != first_weight(ROWS, 3)).any(1)
    assert torch.equal(changed, touched)

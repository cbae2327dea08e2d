"""prefetch loses no row when something raises on its way."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import NEEDS_GPU
from interrupts import Lines, source_files
from reference import assert_same_bytes
from torch import Tensor, nn, optim

import speedtorch

ROWS, WIDTH = 20, 4
BATCHES = [torch.tensor(ids) for ids in ([1, 2], [2, 3], [4, 5], [6, 7], [8, 9])]


class Training:
    """An embedding, SGD that takes 1 from each row of a step, and what rows must be."""

    def __init__(self, device: str = "cpu", decay: float = 0.0) -> None:
        weight = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
        self.expected, self.decay = weight.clone(), decay
        self.embedding = speedtorch.Embedding.from_pretrained(weight, False, device=device)
        self.sgd = optim.SGD(self.embedding.parameters(), lr=1.0, weight_decay=decay)

    def ahead(self, batches: Any) -> Any:
        return speedtorch.prefetch(batches, self.embedding, ids=lambda ids: ids)

    def step(self, ids: Tensor) -> None:
        self.sgd.zero_grad()
        self.embedding(ids).sum().backward()
        self.sgd.step()
        self.expected[ids.cpu()] -= 1 + self.decay * self.expected[ids.cpu()]

    def rows(self) -> Tensor:
        self.embedding.flush()
        return self.embedding.table["weight"].cpu()

    def check(self) -> None:
        assert_same_bytes(self.rows(), self.expected)


def test_bad_ids_of_the_next_batch_are_no_error_of_this_one(device: str) -> None:
    training = Training(device)
    given = [*BATCHES[:3], torch.tensor([6, ROWS]), *BATCHES[3:]]
    given = [ids.to(device) for ids in given]
    seen = 0
    with pytest.raises(IndexError, match="id 20 .*20 rows"):
        for ids in training.ahead(given):
            training.step(ids)
            seen += 1
    assert seen == 3
    training.check()


def test_what_a_loader_returned_before_it_failed_is_trained() -> None:
    training = Training()

    def loader() -> Iterator[Tensor]:
        yield from BATCHES[:4]
        raise OSError("the disk is gone")

    seen = []
    with pytest.raises(OSError, match="the disk is gone"):
        for ids in training.ahead(loader()):
            training.step(ids)
            seen.append(ids)
    assert len(seen) == 4
    training.check()


@pytest.mark.parametrize("ahead", [False, True], ids=["at-once", "prefetch"])
def test_what_was_announced_before_a_loop_and_not_looked_up_is_in_no_step(
    device: str, ahead: bool
) -> None:
    training = Training(device, decay=0.5)
    training.embedding.announce(torch.tensor([17, 18], device=device))
    given: Any = [ids.to(device) for ids in BATCHES]
    for ids in training.ahead(given) if ahead else given:
        training.step(ids)
    torch.testing.assert_close(training.rows(), training.expected)


def test_announcements_before_and_within_the_loop_are_of_one_step(device: str) -> None:
    training = Training(device, decay=0.5)
    embedding, expected = training.embedding, training.expected
    before, within = torch.tensor([17, 18]).to(device), torch.tensor([18, 19]).to(device)
    embedding.announce(before)
    given: Any = [ids.to(device) for ids in BATCHES[:1]]
    for ids in training.ahead(given):
        embedding.announce(within)
        assert embedding(before).requires_grad
        held = len(embedding.step_ids)
        loss = embedding(ids).sum() + 0 * embedding(within).sum()
        assert held == 3  # of both announcements
        loss.backward()
        training.sgd.step()
    gradient = torch.zeros(ROWS, 1)
    gradient[BATCHES[0]] = 1
    changed = [*BATCHES[0].tolist(), 18, 19]
    expected[changed] -= gradient[changed] + 0.5 * expected[changed]
    torch.testing.assert_close(training.rows()[:17], expected[:17])
    torch.testing.assert_close(training.rows()[18:], expected[18:])


def changed_after(announce_more: Callable[[speedtorch.Embedding], object]) -> list[int]:
    """Rows that a step changes that looks up a loop's batch, and 17 and 18, announced before."""
    embedding = speedtorch.Embedding(20, 1, _weight=torch.ones(20, 1))
    sgd = optim.SGD(embedding.parameters(), lr=1.0, weight_decay=0.5)
    early = torch.tensor([17, 18])
    embedding.announce(early)
    for ids in speedtorch.prefetch([torch.tensor([1, 2])], embedding, ids=lambda b: b):
        announce_more(embedding)
        (embedding(ids).sum() + embedding(early).sum()).backward()
        sgd.step()
    return (embedding.table["weight"] != 1).flatten().nonzero().flatten().tolist()


def test_a_refused_announcement_within_the_loop_takes_no_other_with_it() -> None:
    def refused(embedding: speedtorch.Embedding) -> None:
        with pytest.raises(IndexError, match="id 999 "):
            embedding.announce(torch.tensor([999]))

    assert changed_after(refused) == [1, 2, 17, 18]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupted_announcement_within_the_loop_changes_no_row_in_silence() -> None:
    found = set()
    for number in itertools.count(1):
        lines = Lines(source_files("step/*.py", "nn/row_module.py"), number)

        def interrupted(embedding: speedtorch.Embedding, lines: Lines = lines) -> None:
            with lines:
                embedding.announce(torch.tensor([19]))

        try:
            found.add(tuple(changed_after(interrupted)))
        except RuntimeError as error:  # it was through by then, and nobody has looked 19 up
            assert "was not looked up" in str(error)
            found.add(())
        if lines.raised is None:
            break
    assert found == {(1, 2, 17, 18), ()}


def test_what_was_announced_and_not_looked_up_joins_no_step_that_goes_on_after_all() -> None:
    embedding = speedtorch.Embedding(20, 1, _weight=torch.ones(20, 1))
    sgd = optim.SGD(embedding.parameters(), lr=1.0, weight_decay=0.5)
    embedding(torch.tensor([1, 2]))
    embedding.announce(torch.tensor([17]), torch.tensor([18]))
    embedding.weight.grad = torch.zeros(20, 1)
    embedding(torch.tensor([3])).sum().backward()
    sgd.step()
    assert (embedding.table["weight"] != 1).flatten().nonzero().flatten().tolist() == [1, 2, 3]


def test_a_batch_may_name_no_row() -> None:
    training = Training()
    given = [[], [BATCHES[0]], [], [BATCHES[1]]]
    for parts in training.ahead(given):
        for ids in parts:
            training.step(ids)
    training.check()


def one() -> nn.Module:
    return Training().embedding


def two() -> nn.Module:
    return nn.ModuleList(speedtorch.Embedding(ROWS, 2) for _ in range(2))


def of_batch(batch: Tensor) -> Tensor:
    return batch


NO_IDS = "ids: expected an int32 or int64 tensor, got"
WRONG: list[tuple[Callable[[], Any], Any, type[Exception], str]] = [
    (lambda: nn.Linear(1, 1), of_batch, ValueError, "Linear has no speedtorch.Embedding"),
    (lambda: 3, of_batch, TypeError, "model: expected a torch.nn.Module, got int"),
    (two, None, TypeError, "ids: expected a function of a batch, got NoneType"),
    (two, of_batch, ValueError, "ids: expected a dict by module, because the model has 2 Emb"),
    (two, lambda b: {nn.Embedding(1, 1): b}, ValueError, "keys that are Embeddings"),
    (one, lambda _: None, TypeError, f"{NO_IDS} NoneType"),
    (one, lambda _: 1, TypeError, f"{NO_IDS} int"),
    (one, lambda _: [1], TypeError, f"{NO_IDS} int"),
    (one, lambda _: [[1]], TypeError, f"{NO_IDS} list"),
    (one, Tensor.float, TypeError, "expected a dense int32 or int64 tensor, got torch.float32"),
]


@pytest.mark.parametrize(("model", "ids", "error", "message"), WRONG)
def test_arguments_of_a_wrong_kind_are_reported(
    model: Callable[[], Any], ids: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        list(speedtorch.prefetch(BATCHES, model(), ids=ids))


def test_a_loader_without_a_length_has_none_ahead() -> None:
    assert len(Training().ahead(BATCHES)) == len(BATCHES)
    with pytest.raises(TypeError):
        len(Training().ahead(iter([])))


@NEEDS_GPU
def test_a_bad_batch_is_bad_again() -> None:
    """Its counts are read once, into memory that later batches use again."""
    training = Training("cuda")
    given = [*BATCHES[:2], torch.tensor([3, ROWS]), *BATCHES[2:], *BATCHES]
    refused = 0
    given = [ids.to("cuda") for ids in given]
    for number, ids in enumerate(training.ahead(given)):
        if number == 2:
            for _ in range(3):
                with pytest.raises(IndexError, match=r"id 20 at position 1 is out of range"):
                    training.embedding(ids)
                refused += 1
            continue
        training.step(ids)
    assert refused == 3
    training.check()

"""When prefetch plans batches ahead, and what it does where it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import paces
import pytest
import torch
from conftest import NEEDS_GPU
from loops import PLAIN, WAYS, Training
from reference import assert_same_content
from small_training import SmallTraining
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.nn.prefetch_pace import AHEAD, AT_ONCE, MeasuredPace, Pace, pace_of

pytestmark = pytest.mark.usefixtures("deterministic")


class Machine:
    """A clock, for a loop whose steps take so long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        self.pace = MeasuredPace()

    def run(self, steps: int, seconds: Callable[[bool], float]) -> list[bool]:
        """Which of the steps were planned ahead."""
        self.pace.begin()
        seen = []
        for _ in range(steps):
            seen.append(self.pace.is_ahead)
            self.now += seconds(self.pace.is_ahead)
            self.pace.note_step()
        return seen


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_small_steps_are_handed_through_after_one_trial(machine: Machine) -> None:
    seen = machine.run(300, lambda ahead: 1.4 if ahead else 1.0)
    assert seen[:36] == [True] * 12 + [False] * 12 + [True] * 12
    assert not any(seen[36:])
    assert not any(machine.run(300, lambda ahead: 1.4 if ahead else 1.0)[:100])  # the next epoch


def test_where_planning_ahead_is_faster_trials_become_rare(machine: Machine) -> None:
    seen = machine.run(10_000, lambda ahead: 1.0 if ahead else 1.05)
    assert seen.count(False) == 6 * 12
    assert False in machine.run(20_000, lambda ahead: 1.0 if ahead else 1.05)[-4200:]


def test_where_planning_ahead_is_much_faster_trials_are_rare_at_once(machine: Machine) -> None:
    seen = machine.run(10_000, lambda ahead: 1.0 if ahead else 1.6)
    assert seen[:1000] == [True] * 12 + [False] * 12 + [True] * 976
    assert seen.count(False) == 4 * 12


def test_batches_are_planned_again_when_the_gpu_has_more_to_do(machine: Machine) -> None:
    machine.run(200, lambda ahead: 1.4 if ahead else 1.0)
    seen = machine.run(300, lambda ahead: 2.0 if ahead else 3.0)
    assert all(seen[-100:])


def test_a_trial_that_its_loop_has_not_ended_counts_for_nothing(machine: Machine) -> None:
    assert machine.run(285, lambda _: 1.0)[-1] is False
    assert all(machine.run(512, lambda _: 1.0))


def test_a_trial_of_a_short_loop_continues_in_the_next_loop(machine: Machine) -> None:
    loops = [machine.run(20, lambda ahead: 1.4 if ahead else 1.0) for _ in range(4)]
    assert loops[0] == [True] * 12 + [False] * 8
    assert loops[1] == [False] * 12 + [True] * 8
    assert loops[2] == [True] * 12 + [False] * 8
    assert loops[3] == [False] * 20


def test_a_wait_for_the_next_trial_ends_if_the_steps_are_others(machine: Machine) -> None:
    machine.run(100, lambda ahead: 1.4 if ahead else 1.0)
    machine.run(3000, lambda _: 1.0)  # trials have failed: the next one would be far away
    assert all(machine.run(100, lambda ahead: 2.5 if ahead else 3.0)[-40:])


def test_a_single_slow_step_decides_nothing(machine: Machine) -> None:
    given = iter([1.0] * 15 + [90.0] + [1.0] * 400)
    seen = machine.run(400, lambda _: next(given))
    assert seen.count(False) <= 4 * 12


def test_slow_first_steps_decide_nothing(machine: Machine) -> None:
    first = iter([5.0] * 12)
    seen = machine.run(120, lambda ahead: next(first, 2.5 if ahead else 3.5))
    assert seen == [True] * 12 + [False] * 12 + [True] * 96


def test_the_time_of_a_step_includes_the_plan_of_a_later_batch() -> None:
    seen: list[str] = []

    class Recording(paces.Turning):
        def note_step(self) -> None:
            seen.append("noted")

    def given() -> Iterator[Tensor]:
        for k in range(5):
            seen.append("planned")
            yield torch.tensor([k])

    paces.choose(Recording())
    embedding = speedtorch.Embedding(5, 2)
    for ids in speedtorch.prefetch(given(), embedding, ids=lambda ids: ids):
        embedding(ids)
        seen.append("trained")
    assert seen[2:8] == ["planned", "noted", "trained"] * 2


@pytest.mark.parametrize(("lookups", "capacity"), [(1, None), (2, None), (1, 4)])
def test_ids_of_unplanned_batches_are_requested_if_they_are_announced(
    lookups: int, capacity: int | None, device: str
) -> None:
    requested: list[int] = []

    def ids(number: int) -> list[Tensor]:
        requested.append(number)
        return given[number][:lookups]

    given = [[torch.tensor([k]), torch.tensor([k + 1])] for k in range(12)]
    embedding = speedtorch.Embedding(13, 2, device=device, capacity=capacity)
    sgd = optim.SGD(embedding.parameters(), lr=1.0)
    before = embedding.state_dict()["weight"].clone()
    for paced in (paces.Turning(checks=False), paces.Turning()):
        paces.choose(paced)
        requested.clear()
        for number in speedtorch.prefetch(range(12), embedding, ids=ids):
            sgd.zero_grad()
            sum(embedding(each).sum() for each in given[number][:lookups]).backward()
            sgd.step()
        is_requested = paced.checks or lookups > 1 or capacity is not None
        assert requested == [*range(12)] if is_requested else 3 <= len(requested) < 10
    trained = (before - embedding.state_dict()["weight"])[:, 0].round().tolist()
    assert trained == [2.0, *[2.0 * lookups] * 11, 2.0 * (lookups - 1)]


def test_on_the_cpu_there_is_no_link_to_hide() -> None:
    assert pace_of([speedtorch.Embedding(3, 2)]) is AT_ONCE


@NEEDS_GPU
def test_rows_of_two_devices_are_always_planned_ahead() -> None:
    assert pace_of([speedtorch.Embedding(3, 2), speedtorch.Embedding(3, 2, device="cuda")]) is AHEAD


@NEEDS_GPU
def test_on_a_gpu_a_loop_keeps_its_pace_for_the_next_epoch() -> None:
    paces.choose(None)
    training = Training(WAYS["prefetch"], device="cuda")
    for _ in range(3):
        for ids in training.loop(training.batches(100)):
            training.learn(ids)
    plain = Training(PLAIN, device="cuda")
    for _ in range(3):
        for ids in plain.batches(100):
            plain.learn(ids)
    assert_same_content(training.result(), plain.result())
    assert isinstance(pace := pace_of([training.emb]), MeasuredPace)
    assert pace is pace_of([training.emb])


def test_bad_ids_of_unplanned_batches_are_reported_in_order() -> None:
    paces.choose(AT_ONCE)
    embedding = speedtorch.Embedding(5, 2)
    given = [torch.tensor(ids) for ids in ([1], [2, 3], [1, 5, -1], [4])]
    loop = iter(speedtorch.prefetch(given, embedding, ids=lambda ids: ids))
    assert [next(loop).tolist(), next(loop).tolist()] == [[1], [2, 3]]
    with pytest.raises(IndexError, match="id 5 at position 1 .*is out of range for a table of 5"):
        next(loop)


def test_lookups_of_a_batch_that_is_handed_through_are_announced(device: str) -> None:
    paces.choose(AT_ONCE)
    embedding = speedtorch.Embedding(10, 2, device=device)
    sgd = optim.SGD(embedding.parameters(), lr=1.0)
    given = [(torch.tensor([1, 2]), torch.tensor([3]))] * 2
    loop = speedtorch.prefetch(given, embedding, ids=list)
    for number, (one, other) in enumerate(loop):
        embedding(one).sum().backward()
        if number:
            embedding(other).sum().backward()
            sgd.step()
        else:
            with pytest.raises(RuntimeError, match="number 1 .*was not looked up"):
                sgd.step()
        sgd.zero_grad()


class SGDTraining:
    """Ten rows of zeros, and batches of two lookups."""

    def __init__(self, device: str, capacity: int | None) -> None:
        self.embedding = speedtorch.Embedding(10, 2, device=device, capacity=capacity)
        self.embedding.init_(torch.nn.init.zeros_)
        self.sgd = optim.SGD(self.embedding.parameters(), lr=1.0)
        self.pair = tuple(torch.tensor(ids, device=device) for ids in ([1, 2], [3]))

    def prefetched(self) -> Iterable[tuple[Tensor, ...]]:
        return speedtorch.prefetch([self.pair] * 4, self.embedding, ids=list)

    def learn(self, *parts: Tensor) -> None:
        torch.stack([self.embedding(ids).sum() for ids in parts]).sum().backward()
        self.sgd.step()
        self.sgd.zero_grad()

    def rows(self) -> Tensor:
        return self.embedding.state_dict()["weight"][:, 0]

    def moved(self) -> list[int]:
        return self.rows().nonzero().flatten().tolist()


@pytest.mark.parametrize("capacity", [None, 4])
@pytest.mark.parametrize("steps", [0, 1])
def test_ids_of_a_loop_that_was_left_before_its_lookups_are_given_up(
    steps: int, capacity: int | None, device: str
) -> None:
    paces.choose(AT_ONCE)
    trained = SGDTraining(device, capacity)
    for number, pair in enumerate(trained.prefetched()):
        if number == steps:
            break
        trained.learn(*pair)
    trained.learn(trained.pair[1])
    assert trained.rows()[:4].tolist() == [0, -steps, -steps, -1 - steps]


@pytest.mark.parametrize("pace", [AHEAD, AT_ONCE], ids=["ahead", "at-once"])
@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.parametrize("steps", [0, 1])
def test_the_late_end_of_a_loop_gives_up_no_ids_that_were_announced_after_its_last_batch(
    steps: int, clears: bool, pace: Pace, device: str
) -> None:
    paces.choose(pace)
    trained = SGDTraining(device, capacity=6)
    loop = iter(trained.prefetched())
    batch = next(loop)
    for _ in range(steps):
        trained.learn(*batch)
    if clears:
        trained.sgd.zero_grad()
    later = tuple(ids + 4 for ids in batch)
    trained.embedding.announce(*later)
    del loop
    trained.learn(*later)
    assert trained.moved() == ([1, 2, 3, 5, 6, 7] if steps else [5, 6, 7])


@pytest.mark.parametrize("pace", [AHEAD, AT_ONCE], ids=["ahead", "at-once"])
def test_a_batch_of_an_ended_loop_is_looked_up_as_one_of_a_plain_loader(
    pace: Pace, device: str
) -> None:
    paces.choose(pace)
    trained = SGDTraining(device, capacity=3)
    batch = next(iter(trained.prefetched()))
    with pytest.raises(RuntimeError, match=r"announce\(\), also for .* prefetch\(\) loop that has"):
        trained.learn(*batch)
    assert trained.moved() == []
    trained.sgd.zero_grad()
    trained.embedding.announce(*batch)
    trained.learn(*batch)
    assert trained.moved() == [1, 2, 3]


@pytest.mark.parametrize("capacity", [None, 3])
def test_batches_that_are_left_out_need_no_room(capacity: int | None, device: str) -> None:
    paces.choose(AT_ONCE)
    embedding = speedtorch.Embedding(10, 2, device=device, capacity=capacity)
    sgd = optim.SGD(embedding.parameters(), lr=1.0)
    before = embedding.state_dict()["weight"].clone()
    given = [(torch.tensor([k, k + 1]), torch.tensor([k + 2])) for k in range(6)]
    for number, (one, other) in enumerate(speedtorch.prefetch(given, embedding, ids=list)):
        if number % 2:
            continue
        (embedding(one).sum() + embedding(other).sum()).backward()
        sgd.step()
        sgd.zero_grad()
    trained = (before - embedding.state_dict()["weight"])[:, 0].round().tolist()
    assert trained == [1, 1, 2, 1, 2, 1, 1, 0, 0, 0]


def evaluated(training: Training, given: list[Tensor], *, first: bool) -> list[Tensor]:
    """Trains, and looks rows up in a loop of its own before or after each step."""
    seen: list[Tensor] = []

    def evaluate() -> None:
        with torch.no_grad():
            seen.extend(training.rows(ids).clone() for ids in training.loop(given[:3]))

    for ids in training.loop(given):
        if first:
            evaluate()
        training.learn(ids)
        if not first:
            evaluate()
    return seen


@pytest.mark.parametrize("first", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("way", [way for way in WAYS if "prefetch" in way])
def test_an_evaluation_may_prefetch_within_a_training_that_does(
    way: str, first: bool, device: str
) -> None:
    training, plain = Training(WAYS[way], device=device), Training(PLAIN, device=device)
    seen = evaluated(training, training.batches(), first=first)
    expected = evaluated(plain, plain.batches(), first=first)
    assert_same_content(training.result(), plain.result())
    assert len(seen) == len(expected) > 0
    for one, other in zip(seen, expected, strict=True):
        assert torch.equal(one, other)


def test_two_loops_in_turns_train_as_one_after_another() -> None:
    ahead, plain = SmallTraining(steps=0), SmallTraining(steps=0)
    given = [plain.batch(number) for number in range(10)]
    orders = given, given[::-1]
    loops = [speedtorch.prefetch(each, ahead.module, ids=lambda ids: ids) for each in orders]
    for training, pairs in ((ahead, zip(*loops, strict=True)), (plain, zip(*orders, strict=True))):
        for pair in pairs:
            for ids in pair:
                training.step(ids)
    assert_same_content(ahead.fields(), plain.fields())


def test_a_loop_within_another_does_not_change_the_outer_loops_rows() -> None:
    first, second = speedtorch.Embedding(30, 2), speedtorch.Embedding(30, 2)
    both = nn.ModuleList([first, second])
    given = [torch.tensor([k]) for k in range(6)]
    outer = iter(speedtorch.prefetch(given, second, ids=lambda ids: ids))
    next(outer)
    inner = speedtorch.prefetch(given, both, ids=lambda ids: {first: ids, second: ids})
    assert len(list(inner)) == len(given)
    assert len(list(outer)) == len(given) - 1

"""An exception at any line of the factories leaves each call wholly done or not done.

The judge knows nothing of our classes: full-size tensors, of which index_select takes a batch's
rows out and index_copy_ puts them back. It makes the same calls, once with the interrupted one and
once without it; everything afterwards equals one of the two bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from interrupts import PACKAGE, Lines, every_interrupt, source_files
from plan_memos import always
from torch import Tensor, nn, optim

from speedtorch import HostTable, ModelFactory, OptimizerFactory
from speedtorch.legacy import optimizer_factory, plan_memo
from speedtorch.optim.probe import probe_optimizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
ROWS, WIDTH = 9, 2
BATCHES = [torch.tensor(ids) for ids in ([1, 4, 2], [4, 7], [2, 7, 1, 0])]
CALLS = ("weights_out", "state_out", "learn", "weights_back", "state_back")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(1, WIDTH)


def targets(batch: int) -> Tensor:
    random = torch.Generator().manual_seed(batch)
    return torch.randn(len(BATCHES[batch]), WIDTH, generator=random)


def first_rows() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100))


class Training:
    """The calls of a step, by name, for one batch after the other."""

    def __init__(self) -> None:
        self.model = Model()
        self.optimizer = optim.Adam(self.model.parameters(), lr=0.1)

    @property
    def parameter(self) -> Tensor:
        return self.model.rows.weight

    def learn(self, batch: int) -> None:
        self.optimizer.zero_grad()
        places = torch.arange(len(BATCHES[batch]))
        (self.model.rows(places) - targets(batch)).square().sum().backward()
        self.optimizer.step()

    def step(self, batch: int, calls: Sequence[str] = CALLS) -> None:
        """A step, or a part of it."""
        for name in calls:
            getattr(self, name)(batch)

    def scalars(self) -> dict[str, Any]:
        state = self.optimizer.state.get(self.parameter, {})
        return {name: value for name, value in state.items() if name not in STATE}


STATE = ("exp_avg", "exp_avg_sq")


class InPlace(Training):
    """The judge."""

    def __init__(self, sums: bool) -> None:
        super().__init__()
        self.weight = first_rows()
        self.state = {name: torch.zeros(ROWS, WIDTH) for name in STATE}
        self.sums = sums

    def weights_out(self, batch: int) -> None:
        self.parameter.grad = None
        self.parameter.data = self.weight.index_select(0, BATCHES[batch])
        self.before = self.parameter.data.clone()

    def state_out(self, batch: int) -> None:
        kept = self.scalars() or {"step": torch.tensor(0.0)}
        taken = {name: rows.index_select(0, BATCHES[batch]) for name, rows in self.state.items()}
        self.optimizer.state[self.parameter] = kept | taken

    def weights_back(self, batch: int) -> None:
        rows = self.parameter.detach()
        if self.sums:
            self.weight.index_add_(0, BATCHES[batch], rows - self.before)
        else:
            self.weight.index_copy_(0, BATCHES[batch], rows)

    def state_back(self, batch: int) -> None:
        state = self.optimizer.state[self.parameter]
        for name, rows in self.state.items():
            rows.index_copy_(0, BATCHES[batch], state[name])

    def look(self) -> dict[str, Tensor]:
        return {"weight": self.weight, **self.state}


class Factories(Training):
    """Our classes; the ids of all batches come in one array, as data loaders make them."""

    def __init__(self, *, sums: bool = False, shared: bool = False) -> None:
        super().__init__()
        tables = [HostTable(ROWS, WIDTH, state=STATE, memory="plain") for _ in range(2 - shared)]
        for table in tables:
            table["weight"].copy_(first_rows())
            table.was_read = True  # so that the state needs no optInit
        row = (ROWS, WIDTH)
        self.weights = ModelFactory(self.model.rows, *row, sumDuplicates=sums, table=tables[0])
        state = (self.optimizer, *row, self.model, "rows")
        self.states = OptimizerFactory(*state, table=tables[-1])
        self._ids = torch.empty(max(map(len, BATCHES)), dtype=torch.int64).numpy()

    def ids(self, batch: int) -> Any:
        ids = self._ids[: len(BATCHES[batch])]
        ids[:] = BATCHES[batch]
        return ids

    def weights_out(self, batch: int) -> None:
        self.weights.beforeForwardPass(self.ids(batch))

    def state_out(self, batch: int) -> None:
        self.states.beforeForwardPass(self.ids(batch))

    def weights_back(self, batch: int) -> None:
        self.weights.afterOptimizerStep(self.ids(batch))

    def state_back(self, batch: int) -> None:
        self.states.afterOptimizerStep(self.ids(batch))

    def look(self) -> dict[str, Tensor]:
        weight = {"weight": self.weights.getNumpyVersion()}
        rows = weight | self.states.getNumpyVersion()
        return {name: torch.from_numpy(array.copy()) for name, array in rows.items()}


def everything(training: Any) -> dict[str, Any]:
    """All that a step leaves behind, the rows that torch shows included."""
    looked = {f"table {name}": rows.clone() for name, rows in training.look().items()}
    state = training.optimizer.state.get(training.parameter, {})
    shown = {f"shown {name}": torch.as_tensor(value).clone() for name, value in state.items()}
    return looked | shown | {"shown rows": training.parameter.detach().clone()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        rows.dtype == right[name].dtype and torch.equal(rows, right[name])
        for name, rows in left.items()
    )


WAYS: dict[str, Callable[[], Factories]] = {
    "two-tables": Factories,
    "shared-table-with-plans": lambda: Factories(shared=True),
    "sums": lambda: Factories(sums=True),
}


@pytest.fixture(autouse=True, scope="module")
def probed_once() -> Iterator[None]:
    """What the optimizer keeps is the same in every run: learn it once."""
    model = Model()
    found = probe_optimizer(optim.Adam(model.parameters()), model.rows.weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_factory, "probe_optimizer", lambda *_: found)
        yield


INTERRUPTED = [
    pytest.param(make, call, id=f"{way}-{call}")
    for way, make in WAYS.items()
    for call in CALLS
    if call != "learn" and (way != "sums" or call.startswith("weights"))
]


@pytest.fixture(autouse=True)
def plans(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared table makes plans on the CPU, too."""
    if "with-plans" in request.node.name:
        monkeypatch.setattr(plan_memo, "plans_pay", always)


SWITCH = source_files("legacy/*.py", "legacy/plan_memo.py", "ops/functions.py")


def interrupts(
    make: Any, call: str, error: type[BaseException], files: frozenset[str] = SWITCH
) -> Iterator[tuple[Factories, Lines]]:
    def prepare() -> Factories:
        training: Factories = make()
        training.step(0)
        training.step(1, CALLS[: CALLS.index(call)])
        return training

    return every_interrupt(prepare, lambda switcher: getattr(switcher, call)(1), error, files=files)


@cache
def expected(sums: bool, call: str, *, done: bool, rest: bool, more: bool) -> dict[str, Tensor]:
    """What the judge has after the second batch with or without the call.

    The calls after it are made if `rest` says so, and a third batch's if `more` does.
    """
    judge, at = InPlace(sums), CALLS.index(call)
    judge.step(0)
    judge.step(1, CALLS[: at + done])
    if rest:
        judge.step(1, CALLS[at + 1 :])
    if more:
        judge.step(2)
    return everything(judge)


def outcomes(training: Factories, call: str, *, more: bool) -> list[bool]:
    """Whether everything is as if the call had not been made, and as if it had."""
    sums, found = training.weights.sumDuplicates, everything(training)
    outcomes = [expected(sums, call, done=done, rest=False, more=more) for done in (False, True)]
    return [same(found, judge) for judge in outcomes]


@pytest.mark.dealt("make")
@pytest.mark.parametrize(("make", "call"), INTERRUPTED)
def test_an_interrupted_call_is_wholly_done_or_not_done(make: Any, call: str) -> None:
    done = []
    for training, lines in interrupts(make, call, KeyboardInterrupt, PACKAGE):
        not_done, is_done = outcomes(training, call, more=False)
        # What may not fail, a generator that is thrown away, swallows an interrupt.
        assert is_done or (not_done and lines.came_out), f"{lines.where}: neither done nor not done"
        if lines.came_out:
            done.append(is_done)
    assert done == sorted(done), "a call that was done is not done at a later line"
    assert done[-1]
    assert not done[0]


@pytest.mark.dealt("make")
@pytest.mark.parametrize(("make", "call"), INTERRUPTED)
def test_training_goes_on_with_the_next_batch_after_an_interrupt(make: Any, call: str) -> None:
    for training, _ in interrupts(make, call, torch.OutOfMemoryError):
        training.step(2)
        assert any(outcomes(training, call, more=True))


@pytest.mark.dealt("make")
@pytest.mark.parametrize(("make", "call"), INTERRUPTED)
def test_an_interrupted_call_can_be_made_again(make: Any, call: str) -> None:
    for training, _ in interrupts(make, call, IndexError):
        try:
            getattr(training, call)(1)
        except RuntimeError as error:  # of sums that were added before the interrupt
            assert "requires beforeForwardPass" in str(error)
            assert training.weights.sumDuplicates
        training.step(1, CALLS[CALLS.index(call) + 1 :])
        training.step(2)
        sums = training.weights.sumDuplicates
        judge = expected(sums, call, done=True, rest=True, more=True)
        assert same(everything(training), judge)


def test_the_judge_trains() -> None:
    # Guards the tests above: a judge that did nothing would equal anything.
    judge = InPlace(sums=False)
    judge.step(0)
    assert (judge.weight != first_rows()).any(1).nonzero().flatten().tolist() == [1, 2, 4]

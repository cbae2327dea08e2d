"""An exception at any line of the factories leaves each call wholly done or not done.

The judge knows nothing of our classes: full-size tensors, of which index_select takes a batch's
rows out and index_copy_ puts them back. It makes the same calls, once with the interrupted one and
once without it; everything afterwards equals one of the two bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from interrupts import every_interrupt
from plan_memos import planning
from torch import Tensor, nn, optim

from speedtorch import HostTable, ModelFactory, OptimizerFactory
from speedtorch.legacy import optimizer_switcher
from speedtorch.optimizer_state import probe_optimizer

__all__ = ["planning"]

ROWS, WIDTH = 9, 2
BATCHES = ([1, 4, 2], [4, 7], [2, 7, 1, 0])
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

    def step(self, batch: int, *, without: str = "", until: str = "", after: str = "") -> None:
        """A step, or a part of it."""
        begin = CALLS.index(after) + 1 if after else 0
        end = CALLS.index(until) + 1 if until else len(CALLS)
        for name in CALLS[begin:end]:
            if name != without:
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
        self.parameter.data = self.weight.index_select(0, torch.tensor(BATCHES[batch]))
        self.before = self.parameter.data.clone()

    def state_out(self, batch: int) -> None:
        ids = torch.tensor(BATCHES[batch])
        kept = self.scalars() or {"step": torch.tensor(0.0)}
        taken = {name: rows.index_select(0, ids) for name, rows in self.state.items()}
        self.optimizer.state[self.parameter] = kept | taken

    def weights_back(self, batch: int) -> None:
        ids = torch.tensor(BATCHES[batch])
        rows = self.parameter.detach()
        if self.sums:
            self.weight.index_add_(0, ids, rows - self.before)
        else:
            self.weight.index_copy_(0, ids, rows)

    def state_back(self, batch: int) -> None:
        state = self.optimizer.state[self.parameter]
        for name, rows in self.state.items():
            rows.index_copy_(0, torch.tensor(BATCHES[batch]), state[name])

    def look(self) -> dict[str, Tensor]:
        return {"weight": self.weight, **self.state}


class Factories(Training):
    """Our classes; the ids of all batches come in one array, as data loaders make them."""

    def __init__(self, sums: bool, shared: bool) -> None:
        super().__init__()
        table = HostTable(ROWS, WIDTH, state=STATE, memory="plain") if shared else None
        row = (ROWS, WIDTH)
        self.weights = ModelFactory(self.model.rows, *row, sumDuplicates=sums, table=table)
        self.states = OptimizerFactory(self.optimizer, *row, self.model, "rows", table=table)
        self.weights.zerosInit()
        self.weights.getCupyVar().copy_(first_rows())
        self.states.optInit()
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


WAYS = {
    "two-tables": lambda: Factories(sums=False, shared=False),
    "shared-table": lambda: Factories(sums=False, shared=True),
    "sums": lambda: Factories(sums=True, shared=False),
}


@pytest.fixture(autouse=True)
def probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the optimizer keeps is the same in every run: learn it once."""
    model = Model()
    found = probe_optimizer(optim.Adam(model.parameters()), model.rows.weight)
    monkeypatch.setattr(optimizer_switcher, "probe_optimizer", lambda *_: found)


INTERRUPTED = [call for call in CALLS if call != "learn"]
ERRORS = (KeyboardInterrupt, torch.OutOfMemoryError, IndexError)


@pytest.fixture(params=WAYS.values(), ids=WAYS.keys())
def make(request: pytest.FixtureRequest) -> Callable[[], Factories]:
    """Builds the factories of a training, and trains a first batch."""

    def built() -> Factories:
        training: Factories = request.param()
        training.step(0)
        return training

    return built


def judged(training: Factories, call: str, *, done: bool, rest: bool) -> InPlace:
    """The judge, after the second batch with or without the call, and the calls after it."""
    judge = InPlace(training.weights.sumDuplicates)
    judge.step(0)
    judge.step(1, until=call, without="" if done else call)
    if rest:
        judge.step(1, after=call)
    return judge


def up_to(make: Callable[[], Factories], call: str) -> Callable[[], Factories]:
    """Builds a training that has come to the call in its second batch."""

    def built() -> Factories:
        training = make()
        before = CALLS.index(call)
        for name in CALLS[:before]:
            getattr(training, name)(1)
        return training

    return built


def interrupts(make: Any, call: str, error: type[BaseException]) -> Any:
    return every_interrupt(up_to(make, call), lambda each: getattr(each, call)(1), error=error)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("call", INTERRUPTED)
def test_an_interrupted_call_is_wholly_done_or_not_done(
    make: Any, call: str, error: type[BaseException]
) -> None:
    found = []
    for training in interrupts(make, call, error):
        after = everything(training)
        outcomes = [
            same(after, everything(judged(training, call, done=done, rest=False)))
            for done in (False, True)
        ]
        assert any(outcomes), f"place {len(found)}: neither done nor not done"
        found.append(outcomes[1])
    assert found == sorted(found), "a call that was done is not done at a later place"
    assert len(found) > 10


@pytest.mark.parametrize("call", INTERRUPTED)
def test_training_goes_on_with_the_next_batch_after_an_interrupt(make: Any, call: str) -> None:
    for training in interrupts(make, call, torch.OutOfMemoryError):
        training.step(2)
        after = everything(training)
        outcomes = []
        for done in (False, True):
            judge = judged(training, call, done=done, rest=False)
            judge.step(2)
            outcomes.append(same(after, everything(judge)))
        assert any(outcomes)


@pytest.mark.parametrize("call", INTERRUPTED)
def test_an_interrupted_call_can_be_made_again(make: Any, call: str) -> None:
    for training in interrupts(make, call, KeyboardInterrupt):
        try:
            getattr(training, call)(1)
        except RuntimeError as error:  # of sums that were added before the interrupt
            assert "needs a beforeForwardPass" in str(error)
            assert training.weights.sumDuplicates
        training.step(1, after=call)
        training.step(2)
        judge = judged(training, call, done=True, rest=True)
        judge.step(2)
        assert same(everything(training), everything(judge))


@pytest.mark.usefixtures("planning")
@pytest.mark.parametrize("call", INTERRUPTED)
def test_plans_that_an_interrupt_left_behind_are_of_their_batch(make: Any, call: str) -> None:
    test_training_goes_on_with_the_next_batch_after_an_interrupt(make, call)


def test_the_judge_trains() -> None:
    # Guards the tests above: a judge that did nothing would equal anything.
    judge = InPlace(sums=False)
    judge.step(0)
    assert (judge.weight != first_rows()).any(1).nonzero().flatten().tolist() == [1, 2, 4]

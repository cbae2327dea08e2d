"""Every operation of torch on weight gives what a plain parameter gives, or raises.

Each operation runs on the weight of an Embedding and on that of torch's module after the same
training. Results, arguments, the table, the gradient and the optimizer's state are compared. An
operation that raises has changed none of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import weight_contract as contract
import weight_operations as hand
from torch import Tensor, nn, optim
from weight_contract import ROWS, WIDTH, Found, Operation, difference, numbers, plain
from weight_operations import by_hand

import speedtorch

# ------------------------------------------------------------------------------------------------
# States of training


@dataclass(frozen=True)
class State:
    """A training up to an operation.

    Attributes:
        settings: Of the module under test.
        torchs: Of torch's module.
        attached: The optimizer with state in the table; otherwise SGD trains.
        ids: The lookup of each step.
        steps: Steps before the operation.
        backward: Whether there is a gradient.
        where: "after" the backward, in a hook "pre" or "post" of a step, or in its "closure".
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    torchs: dict[str, Any] = field(default_factory=dict)
    attached: Any = None
    ids: tuple[int, ...] = (3, 1, 3, 11)
    steps: int = 0
    backward: bool = True
    where: str = "after"


PADDING = {"padding_idx": 0}
BITS = {"stored": torch.bfloat16, "rounding": "nearest"}
STATES = [
    State("undrawn", backward=False),
    State("untouched", backward=False),
    State("held"),
    State("stepped", steps=1, backward=False),
    State("all-rows", ids=tuple(range(ROWS))),
    State("one-row", ids=(5,)),
    State("padding", PADDING, PADDING, ids=(0, 0)),
    State("capacity", {"capacity": ROWS}),
    State("capacity-4", {"capacity": 4}, ids=(7, 2), steps=1),
    State("cache", {"cache": "64KiB"}, steps=1),
    State("16-bits", BITS),
    State("pre-hook", where="pre"),
    State("post-hook", where="post"),
    State("closure", where="closure"),
    State("attached", attached=optim.Adam, steps=2),
]
BY_NAME = {state.name: state for state in STATES}
ADAGRAD = State("adagrad", attached=optim.Adagrad, steps=2)


class Subject:
    """A module under test on a device, or torch's, and its optimizer."""

    def __init__(
        self, state: State, device: str, *, steps: bool = False, is_ours: bool = True
    ) -> None:
        kind: Any = speedtorch.Embedding if is_ours else nn.Embedding
        settings = {**(state.settings if is_ours else state.torchs), "device": device}
        self.state, self.is_ours = state, is_ours
        rows = numbers(ROWS, WIDTH).to(device)
        if self.is_ours and state.name == "undrawn":  # the table has no memory yet
            self.module = kind(ROWS, WIDTH, **settings)
            self.module.table.init_(lambda table: table.copy_(rows))
        else:
            self.module = kind(ROWS, WIDTH, _weight=rows, **settings)
        self.weight = self.module.weight
        self.optimizer: Any = None
        if steps or state.steps or state.where != "after":  # one takes milliseconds
            self.optimizer = (state.attached or optim.SGD)(self.module.parameters(), lr=0.25)
        if self.is_ours and state.attached:
            speedtorch.attach(self.optimizer, self.module)

    def backward(self) -> None:
        ids = torch.tensor(self.state.ids, device=self.weight.device)
        factors = torch.arange(1.0, len(ids) + 1, device=ids.device)[:, None]
        (self.module(ids) * factors).sum().backward()

    def train(self, act: Callable[[], None]) -> None:
        """Trains up to the state, and calls `act` there."""
        for _ in range(self.state.steps):
            self.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

        def closure() -> float:
            self.optimizer.zero_grad()
            self.backward()
            act()
            return 0.0

        if self.state.where == "closure":
            self.optimizer.step(closure)
            return
        if self.state.backward:
            self.backward()
        if self.state.where == "after":
            act()
            return
        register = getattr(self.optimizer, f"register_step_{self.state.where}_hook")
        handle = register(lambda *_: act())
        self.optimizer.step()
        handle.remove()

    def end(self) -> dict[str, Any]:
        """What there is after an operation."""
        found = {"gradient": plain(self.weight.grad)}
        if self.state.attached:
            found["state"] = plain(self.optimizer.state_dict()["state"])
        if self.is_ours:
            with torch.no_grad():
                ids = torch.arange(ROWS, device=self.weight.device)
                found["lookup"] = as_stored(self.state, plain(self.weight[ids]))
            self.module.flush()
            found["table"] = plain(self.module.table["weight"].float())
        else:
            own = self.module._parameters.get("weight", self.weight)  # another, or renamed
            found["table"] = found["lookup"] = as_stored(self.state, plain(own.detach()))
        return found


def as_stored(state: State, value: Any) -> Any:
    """Results as a table of 16 bits has them."""
    if "stored" not in state.settings:
        return value
    if isinstance(value, Found) and value.tensor.dtype == torch.float32:
        return Found(value.tensor.bfloat16().float(), value.trains)
    return [as_stored(state, each) for each in value] if isinstance(value, list) else value


# ------------------------------------------------------------------------------------------------
# Running operations


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda data: data[2:6],
    "transposed": lambda data: data.t(),
    "columns": lambda data: data[:, 1:3],
    "flat": lambda data: data.view(-1),
    "row": lambda data: data[3],
}


@dataclass(frozen=True)
class Way:
    """How operations run.

    Attributes:
        grad: Whether gradients are recorded.
        steps: Whether a step follows.
        target: The "weight", its "gradient" or its "module", a view of its data, the "states" of it
            in the optimizer, or the one "state" of Adagrad.
    """

    state: State
    grad: bool = False
    steps: bool = False
    target: str = "weight"
    device: str = "cpu"

    def __str__(self) -> str:
        mode = "grad" if self.grad else "no_grad"
        return f"[{self.target}, {self.state.name}, {mode}{', step' * self.steps}]"

    def target_of(self, subject: Subject) -> Any:
        if self.target in ("module", "weight"):
            return getattr(subject, self.target)
        if self.target == "gradient":
            return subject.weight.grad
        if self.target in VIEWS:
            return VIEWS[self.target](subject.weight.data)
        state = subject.optimizer.state[subject.weight]
        return state if self.target == "states" else state["sum"]

    @property
    def near(self) -> bool:
        """Whether torch computes elements otherwise, as they are elsewhere in memory."""
        is_same = self.device == "cpu" and not self.state.attached
        return not is_same or self.target != "weight"


class NotStepped(NotImplementedError):
    """A step was not made, as the gradient that was written cannot be trained."""


def run(way: Way, operations: Sequence[Operation], device: str | None) -> tuple[list[Any], Any]:
    """What operations give one after the other, or the errors, and what there is afterwards.

    Without a device, they are torch's: on the CPU, as reads of all rows are, but for gradients.
    """
    where = way.device if device is None and way.target == "gradient" else device or "cpu"
    subject = Subject(way.state, where, steps=way.steps, is_ours=device is not None)
    results: list[Any] = []

    def act() -> None:
        if way.state.where == "post" and way.grad:
            subject.weight.grad = None  # as the next lookup of ours drops it
        for each in operations:
            torch.default_generator.manual_seed(0)  # manual_seed of torch notes the stack
            if way.device != "cpu":
                torch.cuda.manual_seed(0)
            with torch.set_grad_enabled(way.grad):
                try:
                    results.append(plain(each.call(way.target_of(subject))))
                except Exception as error:
                    results.append(error)
            if not subject.is_ours and "stored" in way.state.settings:
                rows = as_stored(way.state, plain(subject.weight)).tensor
                subject.weight.data = rows.to(subject.weight.device)

    try:
        subject.train(act)
        if way.steps:
            subject.optimizer.step()
        return results, subject.end()
    except NotImplementedError as error:  # of a step with a gradient of rows that cannot join
        subject.weight.grad = None
        return [NotStepped(str(error))], {**subject.end(), "gradient": None}


OTHER_ERRORS = (
    *("read-only", "Cannot access data pointer", "invalid python storage", "Cannot swap t1"),
    *("with capacity= all lookups of a step must be announced", "its weight was replaced"),
    "is not supported for tensor subclasses",
)
NO_DERIVATIVE = ("Autograd not support dtype", "the derivative for", "not differentiable")


def fault(way: Way, each: Operation, found: Any, expected: Any) -> str:
    """What is wrong with a result, or nothing."""
    if isinstance(found, Exception):
        is_limited = way.device != "cpu" or {"capacity", "padding_idx"} & way.state.settings.keys()
        is_supported = way.grad in each.supported and not is_limited
        is_allowed = isinstance(found, NotImplementedError) and not is_supported
        is_allowed |= isinstance(expected, Exception)
        is_allowed |= any(reason in str(found) for reason in OTHER_ERRORS)
        is_allowed &= isinstance(expected, RecursionError) or not isinstance(found, RecursionError)
        return "" if is_allowed else f"got {found!r:.300}, expected {expected!r:.300}"
    if isinstance(expected, Exception):
        if any(each in str(expected) for each in NO_DERIVATIVE) and way.grad:
            return ""  # a backward raises
        return f"got {found!r:.300}, expected {expected!r:.300}"
    if each.writes:
        found, expected = as_stored(way.state, found), as_stored(way.state, expected)
    near = way.near or each.is_linalg
    return difference(found, expected, values=not each.is_random, near=near)


def faults_of_one(way: Way, each: Operation, untouched: Any, device: str) -> Iterator[str]:
    """What is wrong with the result of an operation and with what there is afterwards."""
    try:
        (expected,), wanted = run(way, [each], None)
    except Exception as error:  # of a step with a gradient of another shape
        expected, wanted = error, untouched
    try:
        (found,), end = run(way, [each], device)
    except Exception as error:
        yield f"{each.name} {way}: then training raises {error!r:.300}"
        return
    texts = {"": fault(way, each, found, expected)}
    is_refused = isinstance(found, Exception)
    if isinstance(found, NotStepped):  # the training ended there
        state = replace(way.state, where="after", backward=False)
        _, untouched = run(replace(way, state=state, steps=False), [], None)
    for name, value in end.items():
        how = {"values": not each.is_random or is_refused, "near": way.near}
        expected = (untouched if is_refused else wanted)[name]
        texts[f"{name} afterwards: "] = difference(value, expected, **how)
    raised = f" (raised {found!r:.100})" if is_refused else ""
    yield from (f"{each.name} {way}: {name}{text}{raised}" for name, text in texts.items() if text)


def in_runs(operations: Sequence[Operation]) -> Iterator[Sequence[Operation]]:
    """Operations that only read together, and each that writes alone."""
    reads = [each for each in operations if not each.writes]
    yield from (reads[begin : begin + 40] for begin in range(0, len(reads), 40))
    yield from ([each] for each in operations if each.writes)


def faults_of_some(
    way: Way, some: Sequence[Operation], untouched: Any, device: str
) -> Iterator[str]:
    """Wrong results of operations that run one after the other; of halves if any is wrong."""
    if len(some) == 1:
        yield from faults_of_one(way, some[0], untouched, device)
        return
    with suppress(Exception):
        (wanted, _), (found, end) = (run(way, some, where) for where in (None, device))
        pairs = list(zip(some, found, wanted, strict=True))
        differs = any(difference(end[name], untouched[name], near=way.near) for name in end)
        if not differs and not any(fault(way, *pair) for pair in pairs):
            return
    half = len(some) // 2
    yield from faults_of_some(way, some[:half], untouched, device)
    yield from faults_of_some(way, some[half:], untouched, device)


def faults(way: Way, operations: Sequence[Operation], device: str) -> Iterator[str]:
    """Wrong results of operations; those that only read run one after the other."""
    _, untouched = run(way, [], None)
    for some in in_runs(operations):
        yield from faults_of_some(way, some, untouched, device)


OF_DEVICES = re.compile(
    r"cpu|cuda|get_device|Tensor\.type\(|pin_memory|is_[a-z]pu|tensor_split|view\(torch\.int32"
    r"|searchsorted\(w\.data|t\.ids \+ 10|grad\[t\.ids\] =|grad\.(mul|div)_\((t\.scalar \*|w\.grad)"
    r"|grad\.normal_|grad\.max\(0\)|hash_tensor|square\(\)\.mean\(\)\)\.backward"
    r"|scatter_?\(w, -?\d, int64\[[\d, ]*\], (src=)?\["
)
"""Operations that differ by the device of a plain tensor, or whose results differ on a GPU: other
sums, rows that are written twice, errors that are raised later, results in host memory."""


def check(device: str, *runs: tuple[Sequence[Way], Sequence[Operation]]) -> None:
    """Fails if operations are wrong in some way."""
    found: list[str] = []
    for ways, operations in runs:
        some = [each for each in operations if device == "cpu" or not OF_DEVICES.search(each.name)]
        for way in ways:
            found += faults(replace(way, device=device), some, device)
    if found:
        shown = "\n".join(each[:400] for each in found[:100])
        pytest.fail(f"{len(found)} wrong results\n{shown}", pytrace=False)


# ------------------------------------------------------------------------------------------------
# The tests


ALL = pytest.param(True, marks=pytest.mark.nightly, id="all")
EVERY = pytest.mark.parametrize("all_of_them", [pytest.param(False, id="some"), ALL])
OVER_STATES = pytest.mark.parametrize("state", STATES, ids=lambda state: state.name)
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, that functions are old or new


def ways_of(state: State, **settings: Any) -> list[Way]:
    """Without gradients and with them."""
    return [Way(state, grad, **settings) for grad in (False, True)]


def dealt(
    state: State, operations: Sequence[Operation], all_of_them: bool, count: int, **settings: Any
) -> Any:
    """Some operations without gradients and some with them.

    The ordinary run has each operation in one of `count` states. As `count` is odd, other states
    have it the other way round.
    """
    ways, number = ways_of(state, **settings), STATES.index(state)
    if all_of_them:
        return [(ways, operations)]
    some, place = operations[number % count :: count], number % 2
    return [([ways[place]], some[::2]), ([ways[1 - place]], some[1::2])]


@OVER_STATES
@EVERY
def test_generated_operations(device: str, all_of_them: bool, state: State) -> None:
    reads, writes = ([op for op in contract.generated() if op.writes == w] for w in (False, True))
    runs = dealt(state, reads, all_of_them, 3) + dealt(state, writes, all_of_them, 7)
    check(device, *runs)


@OVER_STATES
@EVERY
def test_operations_by_hand(device: str, all_of_them: bool, state: State) -> None:
    both, neither = (False, True), ()
    writes = by_hand(hand.BACKWARDS, hand.WRITES, hand.VIEWS, supported=both)
    writes += by_hand(hand.WRITES_WITHOUT_GRADIENTS, supported=(False,))
    writes += by_hand(hand.BACKWARDS_THAT_RAISE, hand.WRITES_THAT_RAISE, supported=neither)
    if "stored" in state.settings:  # torch ignores that the array, a copy of all rows, is read-only
        writes = tuple(each for each in writes if "from_numpy" not in each.name)
    reads = by_hand(hand.READS, writes=False, supported=both)
    reads += by_hand(hand.READS_WITHOUT_GRADIENTS, writes=False, supported=(False,))
    reads += by_hand(hand.READS_THAT_RAISE, writes=False, supported=neither)
    check(device, *dealt(state, reads, all_of_them, 1), *dealt(state, writes, all_of_them, 3))


@pytest.mark.parametrize("state", [s for s in STATES if s.backward], ids=lambda state: state.name)
@EVERY
def test_gradients(device: str, all_of_them: bool, state: State) -> None:
    steps = state.where == "after"
    check(device, *dealt(state, by_hand(hand.GRADIENTS), all_of_them, 3, steps=steps))


@pytest.mark.parametrize("name", ["held", "padding", "16-bits", "capacity", "pre-hook"])
@EVERY
def test_generated_operations_of_the_gradient(device: str, all_of_them: bool, name: str) -> None:
    # torch.Tensor.const_data_ptr(grad) returns 0, which is no address; the method raises.
    operations = [each for each in contract.generated() if "const_data_ptr" not in each.name]
    if all_of_them or name == "held":
        check(device, ([Way(BY_NAME[name], target="gradient")], operations))


@OVER_STATES
@EVERY
def test_results_then_written(device: str, all_of_them: bool, state: State) -> None:
    if all_of_them or state.name == "attached":
        operations = contract.then_written()[:: 1 if all_of_them else 3]
        check(device, ([Way(state)], operations))


@OVER_STATES
@EVERY
def test_results_then_backward(device: str, all_of_them: bool, state: State) -> None:
    if all_of_them or state.name == "untouched":
        operations = contract.then_backward()[:: 1 if all_of_them else 3]
        check(device, ([Way(state, grad=True)], operations))


def test_state_of_the_optimizer(device: str) -> None:
    replaced = ways_of(ADAGRAD, target="states"), by_hand(hand.STATES_REPLACED)
    check(device, (ways_of(ADAGRAD, target="state"), by_hand(hand.STATE)), replaced)


def test_a_state_of_another_shape_raises_at_its_next_use(device: str) -> None:
    subject = Subject(ADAGRAD, device)
    subject.backward()
    before = subject.end()
    own = subject.optimizer.state[subject.weight]
    kept, own["sum"] = own["sum"], numbers(WIDTH, WIDTH)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"values for its sum must have shape \[12, 4\]"):
            subject.optimizer.step()
    own["sum"] = kept
    assert not difference(subject.end(), before)


@pytest.mark.nightly
def test_generated_operations_of_the_state(device: str) -> None:
    check(device, (ways_of(ADAGRAD, target="state"), contract.generated()))


@pytest.mark.nightly
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", ["held", "capacity-4", "16-bits", "attached"])
def test_generated_operations_of_views(device: str, name: str, view: str) -> None:
    shape = tuple(VIEWS[view](torch.empty(ROWS, WIDTH)).shape)
    check(device, ([Way(BY_NAME[name], target=view)], contract.generated(shape)))


REFUSED = {
    *("chain_matmul", "slice_inverse", "_foreach_maximum_", "_foreach_minimum_", "_foreach_powsum"),
    *("data_ptr", "const_data_ptr", "module_load", "numpy", "set_", "share_memory_", "storage"),
    *("storage_type", "detach_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_"),
    *("unsqueeze_", "resize_as"),
}


def test_functions_of_memory_are_refused_and_no_others(device: str) -> None:
    """On a GPU also those of other tensors, which are there."""
    assert len(contract.generated()) > 2500  # of 1,100 functions
    refused = set()
    for some in in_runs(contract.generated()):
        for each, result in zip(some, run(Way(BY_NAME["held"]), some, device)[0], strict=True):
            has_others = device != "cpu" and ("[" in each.name or "out=" in each.name)
            if isinstance(result, Exception) and "out=w" not in each.name and not has_others:
                refused.add(each.name.partition("(")[0].rpartition(".")[2])
    assert refused <= REFUSED


INITIALISERS: dict[str, tuple[Callable[[Tensor], object], float, float]] = {
    "uniform_": (lambda w: nn.init.uniform_(w, -0.5, -0.25), -0.5, -0.25),
    "normal_": (lambda w: nn.init.normal_(w, 9.0, 0.1), 8.0, 10.0),
    "trunc_normal_": (lambda w: nn.init.trunc_normal_(w, 9.0, 1.0, 8.5, 9.5), 8.5, 9.5),
    "xavier_uniform_": (nn.init.xavier_uniform_, -((6 / 16) ** 0.5), (6 / 16) ** 0.5),
    "xavier_normal_": (nn.init.xavier_normal_, -2.0, 2.0),
    "kaiming_uniform_": (nn.init.kaiming_uniform_, -(1.5**0.5), 1.5**0.5),
    "kaiming_normal_": (nn.init.kaiming_normal_, -4.0, 4.0),
    "orthogonal_": (nn.init.orthogonal_, -1.0, 1.0),
    "sparse_": (lambda w: nn.init.sparse_(w, 0.5, 0.1), -0.5, 0.5),
    "trunc_normal_ at a tail": (lambda w: nn.init.trunc_normal_(w, 0.0, 1.0, 1.0, 1.5), 1.0, 1.5),
    "trunc_normal_ often": (lambda w: nn.init.trunc_normal_(w, 0.0, 1.0, -0.5, 0.5), -0.5, 0.5),
    "data.uniform_": (lambda w: w.data.uniform_(-0.5, -0.25), -0.5, -0.25),
    "data.normal_": (lambda w: w.data.normal_(9.0, 0.1), 8.0, 10.0),
    "rows": (lambda w: w.data[:].uniform_(2, 3), 2.0, 3.0),
}


@OVER_STATES
def test_random_initialisation(device: str, state: State) -> None:
    """Rows lie within bounds, vary, are others than before, and repeat with the seed."""
    for name, (initialise, low, high) in INITIALISERS.items():
        operation = Operation(name, lambda weight, call=initialise: (call(weight), None)[1])
        ends, way = [], Way(replace(state, where="after"), device=device)
        for _ in range(2):
            (result,), end = run(way, [operation], device)
            assert result is None, name
            ends.append(end)
        assert not any(difference(ends[0][key], ends[1][key]) for key in ends[0]), name
        rows = ends[0]["table"].tensor
        assert bool(((rows >= low - 0.01) & (rows <= high + 0.01)).all()), name
        assert rows.std() > (high - low) / 40 and len(rows.unique()) > 4, name
        assert not bool((rows == numbers(ROWS, WIDTH)).all(1).any()), name
        if name == "orthogonal_" and "stored" not in state.settings:
            torch.testing.assert_close(rows.t() @ rows, torch.eye(WIDTH))


CONSTANTS: dict[str, Callable[[Any], object]] = {
    "zeros_": nn.init.zeros_,
    "ones_": nn.init.ones_,
    "constant_": lambda w: nn.init.constant_(w, 2.0),
    "data.zero_": lambda w: w.data.zero_(),
    "data.fill_": lambda w: w.data.fill_(3.0),
    "data.mul_": lambda w: w.data.mul_(0.5),
}


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_draws_no_random_number(name: str, is_used: bool) -> None:
    """Later layers then have the same first values as without the call."""
    embedding = speedtorch.Embedding(ROWS, WIDTH)
    if is_used:
        embedding(torch.tensor([1]))
    before = torch.random.get_rng_state()
    CONSTANTS[name](embedding.weight)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name", ["held", "16-bits", "attached"])
def test_modules(device: str, name: str) -> None:
    operations = by_hand(hand.MODULES, hand.REPARAMETRIZED)
    check(device, (ways_of(BY_NAME[name], target="module"), operations))

"""What an optimizer remembers about each row of a parameter, learnt from a tiny probe of it.

No list of optimizers' names: copies of the optimizer (same class, same settings) step a parameter
of a few rows with random gradients, and see which state it makes and how that starts. A batch of
rows can be stepped without the rest of its table only where

- rows are treated separately: stepped together, apart or in another order, step after step, they
  and their state become the same, and so does what the optimizer keeps for all rows at once;
- a row's state starts alike for every row: a step that begins with that start is a first step;
- the kind of the state does not depend on how many rows a batch has.

Whatever breaks this rule is refused by name, with what broke it.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedtorch.optim.optimizer_copy import OptimizerCopy, copy_optimizer, group_of, snapshot

__all__ = ["OptimizerProbe", "RowState", "learn_state", "probe_optimizer", "refuse_wrapper"]

# Primes above any vector register's number of lanes; no other dimension has this size by chance.
_ROW_COUNTS = (19, 23, 29)
# The rows of each step, in changing numbers: RAdam and NAdam change their formula at the sixth.
_BATCHES = ((0, 19), (0, 19), (4, 19), (2, 9), (0, 1), (0, 19), (3, 17), (1, 19))
# Optimizers that quantise do so from some number of elements on, 4,096 as a rule, and where blocks
# of up to 256 of them come out even.
_MANY_ELEMENTS, _BLOCK = 1 << 14, 256
# A scheduler's warm-up often starts at 0, which would hide every difference.
_PLAIN = {"lr": 0.01}


@dataclass(frozen=True)
class RowState:
    """One entry of an optimizer's state that holds a row for each row of the parameter.

    Attributes:
        shape: the shape of one row, often that of the parameter's row.
        dtype: the dtype of the entry.
        initial: the row before the first update `[*shape]`, on the parameter's device.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    initial: Tensor


@dataclass(frozen=True)
class OptimizerProbe:
    """What one optimizer keeps for one parameter.

    Attributes:
        row_state: the entries that have one row per row of the parameter, by name.
        scalar_state: the other entries (step counts and the like) before the first update.
        sparse: whether it takes sparse gradients only.
    """

    row_state: dict[str, RowState]
    scalar_state: dict[str, Any]
    sparse: bool = False


def probe_optimizer(optimizer: Optimizer, parameter: Tensor) -> OptimizerProbe:
    """Learns which state an optimizer keeps for each row of a parameter, and how it starts.

    Optimizer, parameter, hooks, schedulers and random generators are left exactly as they are;
    modules, tables and large tensors that the optimizer refers to are not copied. A momentum
    buffer, which torch's SGD makes out of the first gradient, starts as zeros.

    Args:
        optimizer: any torch optimizer, third-party ones too, that holds the parameter.
        parameter: `[rows, ...]`; its number of rows does not matter.

    Returns:
        The row state and the scalar state, both before the first update.

    Raises:
        ValueError: the optimizer does not hold the parameter, its step fails or needs a closure,
            a row's state does not start alike for every row, depends on how many rows there are or
            is no tensor, or rows are not treated separately.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2, 4))
        >>> probe = probe_optimizer(torch.optim.Adamax([weight]), weight)
        >>> sorted(probe.row_state), probe.row_state["exp_inf"].shape, sorted(probe.scalar_state)
        (['exp_avg', 'exp_inf'], (4,), ['step'])
    """
    _refuse_unfit(optimizer, parameter)
    with _kept_random(parameter):
        probe = _Probe(optimizer, parameter, parameter.dtype)
        found = probe.learn()
        probe.check_size(found)
        # Two steps that differ round to the same half-precision numbers: compare them in float32.
        if parameter.dtype.itemsize < 4:
            probe = _Probe(optimizer, parameter, torch.float32)
        probe.check_rows()
    return found


def learn_state(optimizer: Optimizer, parameter: Tensor) -> OptimizerProbe:
    """As probe_optimizer, of an optimizer that has been probed, with its settings of now."""
    with _kept_random(parameter):
        return _Probe(optimizer, parameter, parameter.dtype).learn()


@contextmanager
def _kept_random(parameter: Tensor) -> Iterator[None]:
    """Random generators stay as they are; a default device of the user's makes no state."""
    devices = [parameter.device] if parameter.device.type == "cuda" else []
    on_meta = torch.get_default_device().type == "meta"
    with torch.random.fork_rng(devices=devices), torch.device("cpu") if on_meta else nullcontext():
        yield


def _refuse_unfit(optimizer: Optimizer, parameter: Tensor) -> None:
    name = type(optimizer).__name__
    if parameter.dim() == 0:
        raise ValueError("a parameter without dimensions has no rows: it needs at least one")
    refuse_wrapper(optimizer)
    group_of(optimizer, parameter)  # raises if it is not held
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(f"{name} cannot step rows on their own: its step needs a closure")


def refuse_wrapper(optimizer: Optimizer) -> None:
    """Raises ValueError if an optimizer is made out of another one."""
    for attribute, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} cannot be used: it wraps another optimizer"
                f" ({type(value).__name__}, its {attribute!r}), whose state of a batch's rows would"
                " be out of reach"
            )


class _Probe:
    """Copies of one optimizer that step a parameter of a few random rows."""

    def __init__(self, optimizer: Optimizer, parameter: Tensor, dtype: torch.dtype) -> None:
        self._optimizer = optimizer
        self._parameter = parameter
        self._name = type(optimizer).__name__
        self._dtype = dtype
        row_shape = tuple(parameter.shape[1:])
        rows = next(count for count in _ROW_COUNTS if count not in row_shape)
        self._shape = (rows, *row_shape)
        self._sparse = False
        self._construct = False
        self._random = torch.Generator("cpu").manual_seed(0)

    # --------------------------------------------------------------------------------------------
    # Which state there is, and how it starts

    def learn(self, settings: Mapping[str, Any] = MappingProxyType({})) -> OptimizerProbe:
        """The state before the first update, with these settings, and which of it goes by rows."""
        self._choose_way()
        first, again = self._first_values(settings), self._first_values(settings)
        decay = group_of(self._optimizer, self._parameter).get("weight_decay")
        if decay and any(self._uneven(name, first, again) for name in first):
            # A momentum buffer made out of the first gradient holds the decay of the row as well.
            settings = {**settings, "weight_decay": 0.0}
            first, again = self._first_values(settings), self._first_values(settings)
        rows: dict[str, RowState] = {}
        for name, value in first.items():
            if self._goes_by_rows(value):
                if self._uneven(name, first, again):
                    raise self._refusal(
                        f"its state {name!r} starts from the row's own value or at random, so rows"
                        " that no batch has named yet have no state to start from"
                    )
                if name == "weight" or not isinstance(name, str):
                    raise self._refusal(f"a table cannot hold a state called {name!r}")
                row = value[0].clone()
                # -0.0, from a gradient of zero that was negated, is a zero as well.
                rows[name] = RowState(tuple(row.shape), row.dtype, row.masked_fill_(row == 0, 0))
        others = {name: first[name] for name in first if name not in rows}
        return OptimizerProbe(rows, others, self._sparse)

    def _refuse_kinds(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if a state is nothing that a table, or a copy of it, can keep."""
        for name, value in state.items():
            for each in _leaves(value):
                kind = type(each).__name__
                if isinstance(each, Tensor):
                    rows = self._shape[0]
                    if type(each) not in (Tensor, nn.Parameter):
                        pass
                    elif each is not value and rows in each.shape:
                        kind = f"{type(value).__name__} of tensors of all rows"
                    elif rows in each.shape[1:] and each.shape[0] != rows:
                        kind = f"tensor {list(each.shape)} whose rows are not its first dimension"
                    else:
                        continue
                elif each is None or isinstance(each, str | int | float | complex):
                    continue
                raise self._refusal(
                    f"its state {name!r} is a {kind}, but a table keeps tensors that have a row for"
                    " each of its rows, and the optimizer tensors or numbers for all of them"
                )

    def _choose_way(self) -> None:
        """Finds out whether a bare copy can step or a constructed one, and which gradients."""
        errors: list[Exception] = []
        for construct, sparse in itertools.product((False, True), repeat=2):
            self._construct, self._sparse = construct, sparse
            try:
                self._stepped_once({})
                return
            except Exception as error:  # the optimizer's own, of any kind; told below
                errors.append(error)
        raise self._refusal(
            f"a step of a small parameter {list(self._shape)} fails with dense zero gradients"
            f" ({errors[0]}) and with sparse ones ({errors[1]})"
        ) from errors[0]

    def _stepped_once(self, settings: Mapping[str, Any]) -> OptimizerCopy:
        copied = self._copy(self._optimizer, self._parameter, self._random_rows(), settings)
        copied.step(torch.zeros_like(copied.probe), sparse=self._sparse)
        return copied

    def _first_values(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        copied = self._stepped_once(settings)
        first = copied.first_values()
        if first is None:
            raise self._refusal(
                "it replaces the dict that holds its state, so that the start of that state cannot"
                " be seen"
            )
        self._refuse_kinds(copied.state)
        return first

    def check_size(self, learnt: OptimizerProbe) -> None:
        """Raises ValueError if many rows get another kind of state than few, or other numbers."""
        few, row_shape = self._shape[0], self._shape[1:]
        width = max(1, math.prod(row_shape))
        even = _BLOCK // math.gcd(_BLOCK, width)
        rows = even * -(-max(_MANY_ELEMENTS // width, 2 * few) // even)
        self._shape = (rows, *row_shape)
        try:
            values, gradient = self._random_rows(), self._random_rows()
            many = self._copy(self._optimizer, self._parameter, values, _PLAIN)
            parts = self._copy(self._optimizer, self._parameter, values[:few], _PLAIN)
            for copied, each in ((many, gradient), (parts, gradient[:few])):
                copied.step(each, sparse=self._sparse)
        except Exception as error:
            raise self._refusal(f"its step fails where there are many rows ({error})") from error
        finally:
            self._shape = (few, *row_shape)
        for name in learnt.scalar_state:
            one, other = (_shape(copied.state.get(name)) for copied in (many, parts))
            if one != other:
                raise self._refusal(
                    f"its state {name!r} is of size {other} for {few} rows and {one} for {rows},"
                    " and has no row for each of them"
                )
        for name in learnt.row_state:
            kinds = [_kind(copied.state.get(name)) for copied in (many, parts)]
            if kinds[0] != kinds[1]:
                raise self._refusal(
                    f"its state {name!r} is a {kinds[1]} where a batch has few rows and a"
                    f" {kinds[0]} where it has many, and batches change; choose one kind of state"
                    " for this parameter, if the optimizer has a setting for that"
                )
            self._compare(f"state {name!r}", many.state[name][:few], parts.state[name])
        self._compare("rows", many.probe[:few], parts.probe, parts.probe - values[:few])

    # --------------------------------------------------------------------------------------------
    # Whether rows are treated separately

    def check_rows(self) -> None:
        """Raises ValueError unless a batch of rows can be stepped without the rest."""
        learnt = self.learn(_PLAIN)
        self._check_start(learnt)
        self._check_separate(learnt)

    def _check_start(self, learnt: OptimizerProbe) -> None:
        """Raises ValueError if steps that begin with the learnt state are not the first ones."""
        values = self._random_rows()
        # torch's SGD leaves the dampening out of its first step, which we say we do not.
        settings = {**_PLAIN, "dampening": 0.0}
        fresh = self._copy(self._optimizer, self._parameter, values, settings)
        begun = self._copy(self._optimizer, self._parameter, values, settings)
        begun.state.update(_snapshots(learnt.scalar_state))
        rows = {n: r.initial.expand(self._shape[0], *r.shape) for n, r in learnt.row_state.items()}
        begun.install(values, rows)
        for _ in range(3):
            gradient = self._random_rows()
            for copied in (fresh, begun):
                self._stepped(copied, gradient, rows)
            for name in learnt.scalar_state:
                expected, found = fresh.state.get(name), begun.state.get(name)
                if not _agree(expected, found):
                    raise self._refusal(
                        f"its state {name!r} is first assigned after an update, so that its start"
                        f" cannot be seen ({expected} after a first step, {found} after one that"
                        " begins with what was seen)"
                    )
            for name in learnt.row_state:
                if not _agree(fresh.state.get(name), begun.state.get(name)):
                    first = fresh.first_values() or {}
                    cause = next((n for n in rows if not _agree(first.get(n), rows[n])), name)
                    raise self._refusal(
                        f"its state {cause!r} starts from the first gradient, so rows that no batch"
                        " has named yet have no state to start from"
                    )
            if not _agree(fresh.probe, begun.probe):
                raise self._refusal(
                    "its first steps differ from steps that begin with the state that it makes"
                )

    def _check_separate(self, learnt: OptimizerProbe) -> None:
        """Raises ValueError unless rows stepped in changing batches, apart and turned round agree.

        One copy lives through all batches, as the user's optimizer will; the rows of each batch are
        also stepped by fresh copies of it, in two parts and in another order.
        """
        values = self._random_rows() / 10
        start = values.clone()
        table = {
            name: row.initial.expand(self._shape[0], *row.shape).clone()
            for name, row in learnt.row_state.items()
        }
        together = self._copy(self._optimizer, self._parameter, values, _PLAIN)
        together.state.update(_snapshots(learnt.scalar_state))
        for low, high in _BATCHES:
            gradient = self._random_rows()[low:high]
            before = values[low:high].clone()
            state = {name: rows[low:high].clone() for name, rows in table.items()}
            count = high - low
            every = torch.arange(count, device=before.device)
            orders = [every.roll(-(count // 3)).flip(0), every[:1], every[1:]]
            copies = []
            for places in orders[: 1 if count == 1 else 3]:
                apart = self._copy(together.optimizer, together.probe, before[places], {})
                apart.state.update(together.copied_state())
                apart.install(before[places], {n: rows[places] for n, rows in state.items()})
                copies.append((places, apart, self._stepped(apart, gradient[places], table)))
            together.install(before, state)
            result = self._stepped(together, gradient, table)
            for places, apart, found in copies:
                for name, rows in found.items():
                    scale = result[name] - before if name == "" else None
                    what = f"state {name!r}" if name else "rows"
                    self._compare(what, result[name][places], rows, scale)
                self._check_shared(together, apart, table)
            values[low:high] = result.pop("")
            for name, rows in result.items():
                table[name][low:high] = rows
        if values.numel() and torch.equal(values, start):
            raise self._refusal(f"{len(_BATCHES)} steps of it with random gradients train no row")

    def _check_shared(
        self, together: OptimizerCopy, apart: OptimizerCopy, table: Mapping[str, Tensor]
    ) -> None:
        """Raises ValueError if what is kept for all rows depends on which of them were stepped."""
        one, other = (_shared(copied, table) for copied in (together, apart))
        for (place, name), value in one.items():
            if not _agree(value, other.get((place, name))):
                raise self._refusal(
                    f"it keeps {name!r} for all rows at once, and that depends on which rows a"
                    " batch has"
                )

    # --------------------------------------------------------------------------------------------

    def _copy(
        self, optimizer: Optimizer, parameter: Tensor, values: Tensor, settings: Mapping[str, Any]
    ) -> OptimizerCopy:
        return copy_optimizer(optimizer, parameter, values, settings, construct=self._construct)

    def _stepped(
        self, copied: OptimizerCopy, gradient: Tensor, table: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The rows after a step, under "", and those of each state."""
        try:
            copied.step(gradient, sparse=self._sparse)
        except Exception as error:
            raise self._refusal(f"its step fails when the rows change ({error})") from error
        state = copied.state
        for name in table:
            if getattr(state.get(name), "shape", ())[:1] != gradient.shape[:1]:
                raise self._refusal(f"its state {name!r} loses its rows")
        for name, value in state.items():
            # With one row, a state of one row that all rows share looks the same.
            by_rows = getattr(value, "shape", None) == gradient.shape and gradient.shape[0] != 1
            if by_rows and name not in table:
                raise self._refusal(f"it makes its state {name!r} in a later step only")
        rows = {name: state[name].detach().clone() for name in table}
        return {"": copied.probe.detach().clone(), **rows}

    def _compare(self, what: str, rows: Tensor, apart: Tensor, scale: Tensor | None = None) -> None:
        if not _agree(rows, apart, scale):
            raise self._refusal(
                f"it does not treat rows separately (its {what} differ between rows stepped"
                " together and apart), so that a batch cannot be stepped without the rest of its"
                " table; SGD, Adam, Adamax, Adagrad and others do"
            )

    def _refusal(self, reason: str) -> ValueError:
        return ValueError(f"{self._name} cannot be used: {reason}")

    def _random_rows(self) -> Tensor:
        rows = torch.randn(self._shape, generator=self._random, device="cpu")
        return rows.to(self._parameter.device, self._dtype)

    def _goes_by_rows(self, value: Any) -> bool:
        return isinstance(value, Tensor) and tuple(value.shape[:1]) == self._shape[:1]

    def _uneven(self, name: str, first: dict[str, Any], again: dict[str, Any]) -> bool:
        """Whether the rows of a state differ from each other, or from those of another draw."""
        if not self._goes_by_rows(first[name]):
            return False
        one = first[name][:1].expand_as(first[name])
        return not (_same_bytes(one, first[name]) and _same_bytes(one, again[name]))


def _snapshots(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: snapshot(value) for name, value in state.items()}


_CONTAINER = (Mapping, list, tuple, set, frozenset, deque)


def _leaves(value: Any) -> Iterator[Any]:
    """What the containers of a state hold."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, _CONTAINER):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _shared(copied: OptimizerCopy, table: Mapping[str, Tensor]) -> dict[tuple[int, str], Any]:
    """Numbers that an optimizer keeps for all rows: in its state, its group and its attributes."""
    optimizer = copied.optimizer
    states: Mapping[Any, Any] = optimizer.state
    for_all = {key: value for key, value in states.items() if isinstance(key, str)}
    places = (copied.state, optimizer.param_groups[0], for_all, vars(optimizer))
    own = {"params", "state", "param_groups", *table}
    return {
        (place, name): [each for each in _leaves(value) if _is_shared(each, copied.probe)]
        for place, entries in enumerate(places)
        for name, value in entries.items()
        if name not in own
    }


def _is_shared(value: Any, parameter: Tensor) -> bool:
    if isinstance(value, Tensor):
        return value.shape[:1] != parameter.shape[:1] or parameter.shape[0] == 1
    return isinstance(value, int | float | complex)


def _shape(value: Any) -> list[int] | None:
    return list(value.shape) if isinstance(value, Tensor) else None


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{type(value).__name__} of {value.dtype}, {list(value.shape[1:])} a row"


def _same_bytes(left: Tensor, right: Tensor) -> bool:
    flat = [side.contiguous().reshape(-1).view(torch.uint8) for side in (left, right)]
    return torch.equal(flat[0], flat[1])


def _agree(left: Any, right: Any, scale: Tensor | None = None) -> bool:
    """Whether two values are the same, to a ten-thousandth of the largest `scale` or of `left`."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if left.shape != right.shape:
            return False
        if not left.numel() or not (left.is_floating_point() or left.is_complex()):
            return torch.equal(left, right)
        rounding = 8 * torch.finfo(left.dtype).eps * left.abs().nan_to_num(0, 0, 0).amax()
        largest = (left if scale is None else scale).abs().nan_to_num(0, 0, 0).amax()
        near = (left - right).abs() <= 1e-4 * largest + rounding
        return bool((near | (left == right) | (left.isnan() & right.isnan())).all())
    if isinstance(left, _CONTAINER) and isinstance(right, _CONTAINER):
        pair = list(_leaves(left)), list(_leaves(right))
        return len(pair[0]) == len(pair[1]) and all(map(_agree, *pair))
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=1e-4) or (left != left and right != right)
    return bool(left == right)

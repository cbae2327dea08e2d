"""A probe that finds an optimizer's per-row state and checks that a batch can be stepped alone.

Copies of the optimizer step a parameter of a few rows, and once of many rows, with zero and random
gradients. The probe records the state and its initial values. A batch can be stepped without the
rest of its table only if

- rows are separate: several steps of rows together, apart or in another order have the same results
  (rows, their state, and scalars), apart from rounding;
- the state of all rows starts alike: a step from that initial state equals a first step;
- the kind of the state does not depend on the number of rows.

For an optimizer that breaks a rule, the probe raises a ValueError that names the reason.
"""

from __future__ import annotations

import inspect
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set, ValuesView
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedtorch.optim.optimizer_copy import (
    OptimizerCopy,
    Recorder,
    group_of,
    own_steps,
    plain_values,
    snapshot,
)
from speedtorch.torch_internals import step_without_hooks

__all__ = [
    "OptimizerProbe",
    "agree",
    "forgotten_by",
    "kept_random",
    "learn_state",
    "probe_optimizer",
    "raise_if_no_memory",
]

# Primes above any vector register's number of lanes; no other dimension has this size by chance.
_ROW_COUNTS = (19, 23, 29)
# First and end row of each step. RAdam and NAdam change their formula at the sixth step.
_BATCHES = ((0, 19), (0, 19), (4, 19), (2, 9), (0, 1), (0, 19), (3, 17), (1, 19))
# Quantizing optimizers require a least number of elements, usually 4,096, and a multiple of the
# block size, up to 256.
_MANY_ELEMENTS, _BLOCK = 1 << 14, 256
# A learning rate of 0, such as at the start of a warm-up, would hide every difference.
_PLAIN = {"lr": 0.01}
# Error texts of torch's allocators in a RuntimeError.
_NO_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "alloc_failed")


@dataclass(frozen=True)
class OptimizerProbe:
    """An optimizer's state of one parameter by name, before the first update."""

    row_state: dict[str, Tensor]
    """One initial row of each state that has a row per parameter row, on the parameter's device."""
    scalar_state: dict[str, Any]
    """The other state, such as step counts."""
    sparse: bool = False
    """Whether the probe used sparse gradients: on request, or because dense ones fail."""


def probe_optimizer(
    optimizer: Optimizer, parameter: Tensor, *, sparse: bool = False
) -> OptimizerProbe:
    """Finds an optimizer's per-row state of a parameter and its initial values.

    The optimizer, parameter, hooks, schedulers and default random generators do not change. A
    momentum buffer starts as zeros, although torch's SGD makes it from the first gradient. Raises
    ValueError if the optimizer does not hold the parameter or breaks a rule of this module. An
    out-of-memory error is raised unchanged. With `sparse` all gradients are sparse.
    """
    if parameter.dim() == 0:
        raise ValueError("parameter: expected at least one dimension, which counts the rows")
    for attribute, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} cannot be used: it wraps another optimizer"
                f" ({type(value).__name__}, its {attribute!r}), whose per-row state is inaccessible"
            )
    group_of(optimizer, parameter)  # raises if it is not held
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} cannot step rows separately: its step() needs a closure"
            " that computes the loss of all rows again. Use Adam, Adagrad, SGD or a similar one."
        )
    with kept_random(parameter.device):
        try:
            return _probed(optimizer, parameter, sparse)
        except ValueError:
            # Code of a subclass around super().step() sees all rows: probe the own step only.
            kind = type(optimizer)
            if (own := own_steps.get(kind)) in (None, step_without_hooks(kind)):
                raise
            return _probed(optimizer, parameter, sparse, own)


def _probed(
    optimizer: Optimizer,
    parameter: Tensor,
    sparse: bool,
    step: Callable[[Optimizer], object] | None = None,
) -> OptimizerProbe:
    """Like probe_optimizer(), with the given step function or, by default, the class's."""
    probe = _Probe(optimizer, parameter, parameter.dtype, sparse, step)
    found = probe.learn({})
    probe.check_size(found)
    # Different steps may round to the same half-precision numbers, so compare in float32.
    if parameter.dtype.itemsize < 4:
        probe = _Probe(optimizer, parameter, torch.float32, sparse, step)
    plain = probe.learn(_PLAIN)
    probe.check_start(plain)
    probe.check_separate(plain)
    return found


def learn_state(optimizer: Optimizer, parameter: Tensor, *, sparse: bool = False) -> OptimizerProbe:
    """Learns the initial state again with the present settings, for an optimizer probed before."""
    with kept_random(parameter.device):
        return _Probe(optimizer, parameter, parameter.dtype, sparse).learn({})


def forgotten_by(
    optimizer: Optimizer, parameter: Tensor, *, sparse: bool = False
) -> dict[str, Any]:
    """Returns attributes that mark a first step, with the values that a step sets; usually none.

    With such attributes, the optimizer's next step would overwrite loaded state.
    """
    with kept_random(parameter.device):
        probe = _Probe(optimizer, parameter, parameter.dtype, sparse)
        try:
            return probe.find_forgotten(probe.learn(_PLAIN))
        except ValueError:  # a new parameter fails, so its next step is no first step
            return {}


@contextmanager
def kept_random(device: torch.device) -> Iterator[None]:
    """Restores default random generators afterwards; makes CPU the default device if it is meta."""
    on_gpu = device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
    devices = [device] if on_gpu else []  # no generator of a GPU can be read in a capture
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    on_meta = torch.get_default_device().type == "meta"
    with torch.random.fork_rng(devices=devices), torch.device("cpu") if on_meta else nullcontext():
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)  # noqa: NPY002


@dataclass
class _Probe:
    """Copies of one optimizer that step a parameter of a few random rows.

    Dicts hold the rows under "" and their states under the states' names.
    """

    optimizer: Optimizer
    parameter: Tensor
    _dtype: torch.dtype
    _sparse: bool
    _step: Callable[[Optimizer], object] | None = None
    _construct: bool = False

    def __post_init__(self) -> None:
        self._row_shape = tuple(self.parameter.shape[1:])
        self._rows = next(count for count in _ROW_COUNTS if count not in self._row_shape)
        self._layouts = (True,) if self._sparse else (False, True)
        self._random = torch.Generator("cpu").manual_seed(0)

    def learn(self, settings: Mapping[str, Any]) -> OptimizerProbe:
        """Returns the state before the first update with these settings, split by row or scalar."""
        self._choose_trial()
        # A momentum buffer made from the first gradient also contains the row's weight decay.
        for tried in (settings, {**settings, "weight_decay": 0.0}):
            first, again = self._first_values(tried), self._first_values(tried)
            by_rows = [name for name, value in first.items() if _by_rows(value, self._rows)]
            starts = {name: torch.cat([first[name], again[name]]) for name in by_rows}
            same = {n: torch.allclose(s, s[:1], 0, 0, equal_nan=True) for n, s in starts.items()}
            if all(same.values()):
                break
        else:
            name = next(name for name in by_rows if not same[name])
            raise self._refusal(
                f"its state {name!r} starts from the row's own value or at random, so the initial"
                " state of other rows is unknown"
            )
        for name in by_rows:
            if name == "weight" or not isinstance(name, str):
                raise self._refusal(
                    f"a state name must be a string other than 'weight', got {name!r}"
                )
        # Replace -0.0, which comes from a negated zero gradient, with 0.0.
        rows = {name: first[name][0].masked_fill(first[name][0] == 0, 0) for name in by_rows}
        scalars = {name: value for name, value in first.items() if name not in rows}
        return OptimizerProbe(rows, scalars, self._sparse)

    def _choose_trial(self) -> None:
        """Finds a kind of copy and of gradient with which a trial step succeeds."""
        errors: list[Exception] = []
        layouts = self._layouts
        try:
            for self._construct, self._sparse in itertools.product((False, True), layouts):
                try:
                    self._stepped_once({})
                    return
                except Exception as error:  # any error of the optimizer, reported below
                    raise_if_no_memory(error)
                    errors.append(error)
            raise self._refusal(
                f"all trial steps of a small parameter {[self._rows, *self._row_shape]} with zero"
                f" gradients fail ({errors[0]}; {errors[1]})"
            ) from errors[0]
        finally:
            # A traceback keeps the frames of all callers. This frame would keep the tracebacks.
            errors.clear()

    def _stepped_once(self, settings: Mapping[str, Any]) -> OptimizerCopy:
        copied = self._copy(self._random_rows(), settings)
        copied.step(torch.zeros_like(copied.parameter), sparse=self._sparse)
        return copied

    def _first_values(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        copied = self._stepped_once(settings)
        if not isinstance(copied.state, Recorder):
            raise self._refusal(
                "its step replaces optimizer.state[parameter], so the initial values of the state"
                " are unknown"
            )
        for name, value in copied.state.items():
            for leaf in _nested_values(value):
                if type(leaf) not in (Tensor, nn.Parameter):
                    if leaf is None or isinstance(leaf, str | int | float | complex):
                        continue
                    kind = type(leaf).__name__
                elif leaf is not value and self._rows in leaf.shape:
                    kind = f"{type(value).__name__} of tensors of all rows"
                elif self._rows in leaf.shape[1:] and leaf.shape[0] != self._rows:
                    kind = f"tensor {list(leaf.shape)} whose rows are not its first dimension"
                else:
                    continue
                raise self._refusal(
                    f"its state {name!r} is a {kind}. Supported are tensors with a row for each row"
                    " of the parameter, and tensors or numbers for all rows"
                )
        return copied.state.first

    def check_size(self, learnt: OptimizerProbe) -> None:
        """Raises ValueError if the state of many rows differs in kind or value from that of few."""
        few, width = self._rows, max(1, math.prod(self._row_shape))
        even = _BLOCK // math.gcd(_BLOCK, width)
        rows = even * -(-max(_MANY_ELEMENTS // width, 2 * few) // even)
        try:
            values, gradient = self._random_rows(rows), self._random_rows(rows)
            many, parts = (self._copy(values[:count], _PLAIN) for count in (rows, few))
            for copied in (many, parts):
                copied.step(gradient[: len(copied.parameter)], sparse=self._sparse)
        except Exception as error:
            raise_if_no_memory(error)
            raise self._refusal(f"its step fails with many rows ({error})") from error
        for name in learnt.scalar_state:
            large, small = (getattr(c.state.get(name), "shape", ()) for c in (many, parts))
            if large != small:
                raise self._refusal(
                    f"its state {name!r} is of size {list(small)} for {few} rows and {list(large)}"
                    f" for {rows} rows, but has no row for each row of the parameter"
                )
        for name in learnt.row_state:
            kind, small_kind = (_kind(copied.state.get(name)) for copied in (many, parts))
            if kind != small_kind:
                raise self._refusal(
                    f"its state {name!r} is a {small_kind} with few rows and a {kind} with many"
                    " rows, and the number of rows changes from step to step. If the optimizer has"
                    " a setting for the kind of state, choose one kind for this parameter"
                )
            self._compare(name, many.state[name][:few], parts.state[name])
        self._compare("", many.parameter[:few], parts.parameter, parts.parameter - values[:few])

    def check_start(self, learnt: OptimizerProbe) -> None:
        """Raises ValueError if steps from the learnt state differ from first steps."""
        values = self._random_rows()
        # torch's SGD does not dampen the first gradient, but a step from zeros does. attach()
        # documents this, so compare without dampening.
        settings, start = {**_PLAIN, "dampening": 0.0}, self._start(learnt)
        fresh = self._copy(values, settings)
        begun = self._copy(values, settings, {**learnt.scalar_state, **start})
        for _ in range(3):
            gradient = self._random_rows()
            first, after = (self._stepped(copied, gradient, start) for copied in (fresh, begun))
            for name in learnt.scalar_state:
                expected, found = fresh.state.get(name), begun.state.get(name)
                if not agree(expected, found):
                    raise self._refusal(
                        f"its state {name!r} is first assigned after an update, so its initial"
                        f" value is unknown ({expected} after a first step, {found} after a step"
                        " from the assigned value)"
                    )
            if wrong := [name for name, rows in first.items() if not agree(rows, after[name])]:
                for name, rows in start.items():
                    if not agree(fresh.state.first[name], rows):
                        raise self._refusal(
                            f"its state {name!r} starts from the first gradient, so the initial"
                            " state of other rows is unknown"
                        )
                what = f"state {wrong[-1]!r}" if wrong[-1] else "rows"
                raise self._refusal(
                    f"its {what} after first steps differ from its {what} after steps from the"
                    " initial state"
                )

    def check_separate(self, learnt: OptimizerProbe) -> None:
        """Raises ValueError if a row's step depends on the order or presence of other rows.

        `together`, a copy of the optimizer, steps the batches in sequence. For each batch of
        several rows, three copies of `together` step the batch in another order, its first row, and
        its other rows. One copy steps a batch of one row.
        """
        first, names = self._random_rows() / 10, list(learnt.row_state)
        table = {"": first.clone(), **_snapshots(self._start(learnt))}
        together = self._copy(first, _PLAIN, learnt.scalar_state)
        for low, high in _BATCHES:
            gradient = self._random_rows()[low:high]
            before = {name: rows[low:high] for name, rows in table.items()}
            batch = torch.arange(high - low, device=first.device)
            orders = [batch.roll(-(len(batch) // 3)).flip(0), batch[:1], batch[1:]]
            copies = []
            for places in orders[: 1 if len(batch) == 1 else 3]:
                rows = {name: values[places] for name, values in before.items()}
                apart = self._copy(rows[""], {}, together.state, together)
                apart.hold(rows)
                copies.append((places, apart, self._stepped(apart, gradient[places], names)))
            together.hold(before)
            result = self._stepped(together, gradient, names)
            for places, apart, found in copies:
                for name, values in found.items():
                    scale = None if name else result[name] - before[name]
                    self._compare(name, result[name][places], values, scale)
                shared = _shared(apart, names)
                for place, value in _shared(together, names).items():
                    if not agree(value, shared.get(place)):
                        raise self._refusal(
                            f"it keeps one {place[1]!r} for all rows, whose value depends on the"
                            " rows of the batch"
                        )
            for name, values in result.items():
                table[name][low:high] = values
        if first.numel() and torch.equal(table[""], first):
            raise self._refusal(f"{len(_BATCHES)} steps with random gradients change no row")

    def find_forgotten(self, learnt: OptimizerProbe) -> dict[str, Any]:
        """See forgotten_by()."""
        values, gradient, start = self._random_rows(), self._random_rows(), self._start(learnt)
        shift = {n: rows + self._random_rows(len(rows)).mean().abs() for n, rows in start.items()}

        def step_both(attributes: Mapping[str, Any]) -> tuple[bool, OptimizerCopy]:
            """Steps from two states; returns whether the results are equal, and the first copy."""
            copies, results = [], []
            for state in (start, shift):
                copies.append(self._copy(values, _PLAIN, {**learnt.scalar_state, **state}))
                vars(copies[-1].optimizer).update(attributes)
                results.append(self._stepped(copies[-1], gradient, start))
            first, second = results
            return all(torch.equal(first[name], second[name]) for name in first), copies[0]

        (are_equal, copied), before = step_both({}), plain_values(vars(self.optimizer))
        after = plain_values(vars(copied.optimizer))
        known = {name: value for name, value in after.items() if before.get(name) != value}
        return known if known and are_equal and not step_both(known)[0] else {}

    def _copy(
        self,
        values: Tensor,
        settings: Mapping[str, Any],
        state: Mapping[str, Any] | None = None,
        of: OptimizerCopy | None = None,
    ) -> OptimizerCopy:
        optimizer, parameter = (of or self).optimizer, (of or self).parameter
        made = OptimizerCopy(
            optimizer, parameter, values, settings, construct=self._construct, step=self._step
        )
        if state is not None:  # reading made.state creates it
            made.state.update(_snapshots(state))
        return made

    def _start(self, learnt: OptimizerProbe) -> dict[str, Tensor]:
        """The state of all probed rows before the first update."""
        return {n: row.expand(self._rows, *row.shape) for n, row in learnt.row_state.items()}

    def _stepped(
        self, copied: OptimizerCopy, gradient: Tensor, names: Collection[str]
    ) -> dict[str, Tensor]:
        """Returns the rows after a step, under "", and the states of these names."""
        try:
            copied.step(gradient, sparse=self._sparse)
        except Exception as error:
            raise_if_no_memory(error)
            raise self._refusal(
                f"its step fails in a trial of several steps and numbers of rows ({error})"
            ) from error
        state = copied.state
        for name in names:
            if not _by_rows(state.get(name), len(gradient)):
                raise self._refusal(f"a step removes the rows of its state {name!r}")
        for name, value in state.items():
            # In a batch of one row, state that all rows share may have the shape of per-row state.
            by_rows = getattr(value, "shape", None) == gradient.shape and gradient.shape[0] != 1
            if by_rows and name not in names:
                raise self._refusal(
                    f"its first step does not create the state {name!r}, but a later step does"
                )
        return _snapshots({"": copied.parameter, **{name: state[name] for name in names}})

    def _compare(self, name: str, rows: Tensor, apart: Tensor, scale: Tensor | None = None) -> None:
        if not agree(rows, apart, scale):
            what = f"state {name!r}" if name else "rows"
            raise self._refusal(
                f"it does not treat rows separately (its {what} differ between rows stepped"
                " together and apart). Use SGD, Adam, Adamax, Adagrad or a similar optimizer"
            )

    def _refusal(self, reason: str) -> ValueError:
        return ValueError(f"{type(self.optimizer).__name__} cannot be used: {reason}")

    def _random_rows(self, rows: int | None = None) -> Tensor:
        shape = (rows or self._rows, *self._row_shape)
        drawn = torch.randn(shape, generator=self._random, device="cpu")
        return drawn.to(self.parameter.device, self._dtype)


def raise_if_no_memory(error: Exception) -> None:
    """Raises an out-of-memory error again, because it is no fault of the optimizer."""
    message = str(error).lower()
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        isinstance(error, RuntimeError) and text in message for text in _NO_MEMORY
    ):
        raise error


def _snapshots(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: snapshot(value) for name, value in state.items()}


def _by_rows(value: Any, rows: int) -> bool:
    return isinstance(value, Tensor) and value.shape[:1] == (rows,)


def _shared(copied: OptimizerCopy, names: Iterable[str]) -> dict[tuple[int, str], Any]:
    """The numbers for all rows in an optimizer's state, group and attributes."""
    states: Mapping[Any, Any] = copied.optimizer.state
    for_all = {key: value for key, value in states.items() if isinstance(key, str)}
    places = copied.state, copied.optimizer.param_groups[0], for_all, vars(copied.optimizer)
    rows = len(copied.parameter)
    return {
        (place, name): [
            leaf
            for leaf in _nested_values(value)
            if isinstance(leaf, Tensor | int | float | complex)
            and (rows == 1 or not _by_rows(leaf, rows))
        ]
        for place, entries in enumerate(places)
        for name, value in entries.items()
        if name not in {"params", "state", "param_groups", *names}
    }


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{type(value).__name__} of {value.dtype}, {list(value.shape[1:])} a row"


def _nested_values(value: Any) -> list[Any]:
    """The values in nested containers, or the value itself."""
    parts = value.values() if isinstance(value, Mapping) else value
    if not isinstance(parts, ValuesView | list | tuple | Set | deque):
        return [value]
    return [leaf for part in parts for leaf in _nested_values(part)]


def agree(left: Any, right: Any, scale: Tensor | None = None) -> bool:
    """Whether two values are equal within 1e-4 times the largest `scale`, by default of `left`."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if left.shape != right.shape:
            return False
        if not left.numel() or not (left.is_floating_point() or left.is_complex()):
            return torch.equal(left, right.to(left.device))
        scale = left if scale is None else scale
        own, most = (float(t.detach().abs().nan_to_num(0, 0, 0).amax()) for t in (left, scale))
        near = 1e-4 * most + 8 * torch.finfo(left.dtype).eps * own
        return torch.allclose(left, right.to(left), rtol=0, atol=near, equal_nan=True)
    ours, theirs = _nested_values(left), _nested_values(right)
    if len(ours) != 1 or ours[0] is not left:  # a container
        return len(ours) == len(theirs) and all(map(agree, ours, theirs))
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=1e-4) or (left != left and right != right)
    return bool(left == right)

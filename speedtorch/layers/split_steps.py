"""Optimizer steps that are split into several groups of parameters, and trials of such steps.

StateSwapper and Swapper step parameters in several parts. An optimizer that computes one number
from all parameters (D-Adaptation, Prodigy, a norm of all gradients), or counts calls in place,
would then train with other results and without an error. Trials with copies of the optimizer detect
such an optimizer, and measure the size of its state.
"""

from __future__ import annotations

import inspect
import itertools
import random
import weakref
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from speedtorch.layers.state_tensors import plain_tensors
from speedtorch.optim.attach import saved_state_of
from speedtorch.optim.optimizer_copy import OptimizerCopy, copy_with
from speedtorch.optim.probe import agree, kept_random, raise_if_no_memory
from speedtorch.step.gradient_sums import sparse_of_all
from speedtorch.torch_internals import STEP_HOOKS, as_plain, step_without_hooks, tree_leaves

__all__ = [
    "ChangedSetting",
    "FirstState",
    "PartialStep",
    "check_can_be_split",
    "check_not_attached",
    "check_steps_apart",
    "check_when_given",
    "needs_arguments",
    "rows_refused",
    "swapped_optimizers",
]

# The maximum number of small parameters in total. The second number limits parameters of equally
# many dimensions in a group with more than twice as many parameters.
_MOST, _MOST_ALIKE = 24, 2
_SIZE = 6
"""The most elements in a dimension of a small parameter."""
# Large gradients detect clipping by a norm. RAdam changes its formula at the sixth step.
_GRADIENT_SCALES = (1.0, 1.0, 0.01, 30.0, 1.0, 1.0, 1e4, 1.0, 0.1, 1.0)
# A warm-up often starts with lr=0, which would hide all differences.
_SETTINGS = {"lr": 0.01}
# Torch's capturable steps raise for CPU tensors. The parameters may move to a GPU after the trial.
_ON_CPU = {**_SETTINGS, "capturable": False}

_ABSENT = object()


class ChangedSetting(NamedTuple):
    """A changed optimizer setting, such as a counter; `before` is _ABSENT for a new setting."""

    place: int
    """0: an attribute of the optimizer; otherwise the group's index plus 1."""
    name: str
    before: object
    after: object


class PartialStep:
    """Runs one step of an optimizer in several parts, without the optimizer's step hooks.

    A shallow copy of the optimizer steps each part. The copy has the same state and group settings,
    but only the part's parameters. The optimizer's own groups remain correct after an error.

    Each part makes the same changes to settings, such as a counter in a group. `settle()` copies
    these changes to the optimizer once. In-place changes of other objects (a tensor, a list, state
    without a parameter) happen once per part.

    `args` and `kwargs` are passed to the step of each part. `changes` are settings that an earlier
    PartialStep of other parameters changed. Each part begins with the settings before these
    changes: both PartialSteps belong to one step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        changes: Sequence[ChangedSetting] = (),
    ) -> None:
        self.optimizer, self._args, self._kwargs = optimizer, args, kwargs or {}
        self._earlier_changes = changes
        self._last: Optimizer | None = None
        self._places = {
            id(param): (number, place)
            for number, group in enumerate(optimizer.param_groups)
            for place, param in enumerate(group["params"])
        }

    def shallow_copy(self, parameters: Collection[Tensor]) -> Optimizer:
        """Returns a shallow copy of the optimizer with only these parameters."""
        optimizer = self.optimizer
        selected: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
        found = (self._places.get(id(param)) for param in parameters)
        for number, place in sorted(filter(None, found)):
            selected[number].append(optimizer.param_groups[number]["params"][place])
        copied: Optimizer = object.__new__(type(optimizer))
        copied.__dict__.update(optimizer.__dict__)
        # A base class's step() that the optimizer's step() calls would run the hooks.
        copied.__dict__.update({name: OrderedDict() for name in STEP_HOOKS})
        copied.param_groups = [
            {**group, "params": of_group}
            for group, of_group in zip(optimizer.param_groups, selected, strict=True)
        ]
        settings = _settings_of(copied)
        for place, name, before, after in self._earlier_changes:
            if settings[place].get(name) is not after:  # other code has changed the setting
                continue
            settings[place][name] = before
            if before is _ABSENT:
                del settings[place][name]
        self._last = copied
        return copied

    def step(self, parameters: Collection[Tensor]) -> None:
        """Steps only these parameters."""
        step: Any = step_without_hooks(type(self.optimizer))
        step(self.shallow_copy(parameters), *self._args, **self._kwargs)

    def settle(self) -> list[ChangedSetting]:
        """Copies the settings that the last part changed to the optimizer, and returns them."""
        if self._last is None:
            return []
        changes: list[ChangedSetting] = []
        places = zip(_settings_of(self.optimizer), _settings_of(self._last), strict=True)
        for place, (settings, changed) in enumerate(places):
            kept = ("params",) if place else ("param_groups", *STEP_HOOKS)
            for name, value in changed.items():
                before = settings.get(name, _ABSENT)
                if name not in kept and before is not value:
                    settings[name] = value
                    changes.append(ChangedSetting(place, name, before, value))
        return changes


def _settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The attributes of an optimizer, followed by its groups."""
    return [vars(optimizer), *optimizer.param_groups]


swapped_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers that have a StateSwapper."""


def check_can_be_split(optimizer: Optimizer) -> None:
    """Raises TypeError if the optimizer steps all parameters at once, or wraps another one.

    Raises ValueError if the optimizer has a StateSwapper, or attached rows of an Embedding.
    """
    name = type(optimizer).__name__
    check_not_attached(optimizer)
    if optimizer in swapped_optimizers:
        raise ValueError(f"optimizer: {name} already has a StateSwapper. Call its close() first.")
    if isinstance(optimizer, LBFGS):
        raise TypeError(
            f"optimizer: {name} steps all parameters at once. Use an optimizer that steps each"
            " parameter separately, such as AdamW."
        )
    for value in tree_leaves(vars(optimizer)):
        if isinstance(value, Optimizer):
            inner = type(value).__name__
            raise TypeError(
                f"optimizer: {name} wraps a {inner}, and would step all its parameters in each"
                f" partial step. Pass the {inner} instead."
            )


def check_not_attached(optimizer: Optimizer) -> None:
    """Raises ValueError if the state of an Embedding's rows is attached to the optimizer."""
    if saved_state_of(optimizer) is not None:
        raise rows_refused(optimizer)


def rows_refused(optimizer: Optimizer) -> ValueError:
    """The error for an optimizer of an Embedding's rows and of other parameters."""
    return ValueError(
        f"optimizer: {type(optimizer).__name__} has the rows of an Embedding, whose state attach()"
        " offloads. Create a separate optimizer for the rows."
    )


def needs_arguments(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step() has required arguments besides a closure."""
    _, *arguments = inspect.signature(type(optimizer).step).parameters.values()
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return any(
        argument.default is inspect.Parameter.empty
        and argument.kind not in variadic
        and argument.name != "closure"
        for argument in arguments
    )


def check_when_given(optimizer: Optimizer, device: torch.device | None) -> None:
    """Runs check_steps_apart, unless step() needs arguments: then the first step runs it."""
    if not needs_arguments(optimizer):
        check_steps_apart(optimizer, device)


def check_steps_apart(
    optimizer: Optimizer,
    device: torch.device | None,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Raises ValueError if steps of all parameters together and one by one differ or fail.

    Copies of the optimizer step small parameters. The optimizer, its parameters and random
    generators are not changed. The small parameters are on `device`; None: the optimizer's own
    device. `args` and `kwargs` are passed to the steps, but a closure among them is not called.
    """
    kwargs = dict(kwargs or {})
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if args and callable(args[0]):
        args = (_no_loss, *args[1:])
    elif callable(kwargs.get("closure")) or (
        not args and closure is not None and closure.default is inspect.Parameter.empty
    ):
        kwargs["closure"] = _no_loss
    if not (shapes := _shapes(optimizer)):
        return
    device = device or next(iter(optimizer.param_groups[min(shapes)]["params"])).device
    if device.type == "meta":
        return
    kind = type(optimizer).__name__
    errors: list[Exception | None] = []
    try:
        for construct, sparse in itertools.product((False, True), (False, True)):
            with as_plain(), kept_random(device):
                errors.append(
                    _compare_steps(optimizer, shapes, device, args, kwargs, construct, sparse)
                )
            if errors[-1] is None:
                return
        raise ValueError(
            f"optimizer: {kind} must step each parameter separately. Whether {kind} does so cannot"
            f" be checked on {device}, because a step of small parameter copies fails there"
            f" ({errors[0]}). Move the parameters to a device on which {kind} can step them, or"
            f" pass this device as device=. Otherwise use {kind} without a StateSwapper or Swapper."
        ) from errors[0]
    finally:
        # A traceback keeps the frames of all callers. This frame would keep the tracebacks.
        errors.clear()


def _no_loss() -> Tensor:
    """Replaces the caller's closure."""
    return torch.ones(())


def _next_random() -> tuple[float, ...]:
    """Draws from the global generators; the results show whether equally many were drawn before."""
    return float(torch.rand((), device="cpu")), random.random(), np.random.random()  # noqa: NPY002


_SmallParameters = dict[int, dict[int, Tensor]]
"""Small parameters by group index and index within the group."""


def _shapes(optimizer: Optimizer) -> _SmallParameters:
    """Meta tensors for a few parameters of each group; frozen ones only if no other exists."""
    found: _SmallParameters = {}
    count = 0
    for number, group in enumerate(optimizer.param_groups):
        alike: Counter[int] = Counter()
        trained = [param for param in group["params"] if param.requires_grad] or group["params"]
        chosen = {id(param) for param in trained}
        for index, param in enumerate(group["params"]):
            if count == _MOST or id(param) not in chosen:
                continue
            alike[param.dim()] += 1
            if len(group["params"]) <= 2 * _MOST_ALIKE or alike[param.dim()] <= _MOST_ALIKE:
                shape = tuple(max(1, min(size, _SIZE)) for size in param.shape)
                dtype = param.dtype if param.is_complex() else torch.float32
                found.setdefault(number, {})[index] = torch.empty(shape, dtype=dtype, device="meta")
                count += 1
    return found


def _error_for(optimizer: Optimizer, why: str) -> ValueError:
    """The error of an optimizer whose steps together and one by one differ."""
    name = type(optimizer).__name__
    return ValueError(
        f"optimizer: {name} does not step each parameter separately: {why}. Use an optimizer"
        f" that does, such as AdamW, or step {name} without a StateSwapper or Swapper."
    )


def _compare_steps(
    optimizer: Optimizer,
    shapes: _SmallParameters,
    device: torch.device,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    construct: bool,
    sparse: bool,
) -> Exception | None:
    """Steps equal small parameters with two optimizer copies: all together, and one by one.

    Raises ValueError if the results differ. Returns an error if the copies cannot step together.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    settings = _ON_CPU if device.type == "cpu" else _SETTINGS
    values = {
        number: {index: _drawn(shape, generator, device) for index, shape in group.items()}
        for number, group in shapes.items()
    }
    copies: list[tuple[Optimizer, list[nn.Parameter]]] = []
    for _ in range(2):
        small = {
            number: {index: nn.Parameter(value.clone()) for index, value in group.items()}
            for number, group in values.items()
        }
        try:
            copy = copy_with(optimizer, small, settings, construct=construct)
            if callable(train := getattr(copy, "train", None)):  # schedule-free optimizers
                train()
        except Exception as error:
            raise_if_no_memory(error)
            return error
        copies.append((copy, [param for group in small.values() for param in group.values()]))
    (together, params), (apart, params_apart) = copies
    for number, scale in enumerate(_GRADIENT_SCALES):
        for index, (param, param_apart) in enumerate(zip(params, params_apart, strict=True)):
            param.grad = param_apart.grad = None
            if number != 2 or index or len(params_apart) == 1:  # else like an expert without tokens
                gradient = _drawn(param, generator, device) * scale
                if sparse and gradient.dim():
                    rows = torch.arange(len(gradient), device=gradient.device)
                    gradient = sparse_of_all(gradient, rows)
                param.grad, param_apart.grad = gradient, gradient.clone()
        try:
            with kept_random(device):
                step: Any = step_without_hooks(type(together))
                step(together, *args, **kwargs)
                following = _next_random()
        except Exception as error:
            raise_if_no_memory(error)
            return error
        try:
            with kept_random(device):
                parts = PartialStep(apart, args, kwargs)
                for param in params_apart:
                    if param.grad is not None:
                        parts.step([param])
                parts.step(())
                parts.settle()
                is_alike = following == _next_random()
        except Exception as error:
            raise_if_no_memory(error)
            failure = f"{type(error).__name__}: {error}"
            why = f"a step of one parameter after another fails ({failure})"
            raise _error_for(optimizer, why) from error
        if not is_alike:
            raise _error_for(optimizer, "its step draws random numbers for all parameters at once")
        expected = dict(_numbers(together, params))
        found = dict(_numbers(apart, params_apart))
        for name in dict.fromkeys((*expected, *found)):
            if not agree(expected.get(name), found.get(name)):
                raise _error_for(optimizer, f"{name} differs after steps together and one by one")
    return None


def _drawn(like: Tensor, generator: torch.Generator, device: torch.device) -> Tensor:
    """Random numbers in the shape and dtype of a tensor, equal on all devices."""
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device="cpu").to(device)


def _numbers(optimizer: Optimizer, parameters: list[nn.Parameter]) -> Iterator[tuple[str, Any]]:
    """Yields parameters, and tensors and numbers of their state and of groups, with names."""
    places: list[tuple[str, Any]] = []
    for number, param in enumerate(parameters):
        places += [(f"parameter {number}", param)]
        kept: Mapping[Any, Any] = optimizer.state.get(param) or {}
        places += [(f"state {key!r} of parameter {number}", value) for key, value in kept.items()]
    for number, group in enumerate(optimizer.param_groups):
        rest = {name: value for name, value in group.items() if name != "params"}
        places += [(f"{name!r} of group {number}", value) for name, value in rest.items()]
    states: Mapping[Any, Any] = optimizer.state
    places += [(f"state {key!r}", states[key]) for key in states if isinstance(key, str)]
    for name, value in places:
        if isinstance(value, bool | int | float | complex):
            yield name, value
        yield from plain_tensors(name, value)


class FirstState:
    """Computes the size of optimizer state before the state exists.

    A copy of the optimizer steps a parameter of the same shape and dtype on the meta device, which
    allocates no memory.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._known: dict[tuple[int, torch.Size, torch.dtype], int] = {}
        self._groups: dict[int, int] = {}
        """Group indices by the parameters' ids."""

    def nbytes(self, parameter: Tensor) -> int:
        """Bytes of state on the parameter's device; 0 if the copy needs real elements to step.

        In that case the state counts only once it exists.
        """
        groups = self._optimizer.param_groups
        if len(self._groups) != sum(len(group["params"]) for group in groups):
            self._groups = {id(p): n for n, group in enumerate(groups) for p in group["params"]}
        if (number := self._groups.get(id(parameter))) is None:
            return 0
        kind = number, parameter.shape, parameter.dtype
        if kind not in self._known:
            self._known[kind] = _measured(self._optimizer, parameter)
        return self._known[kind]


def _measured(optimizer: Optimizer, parameter: Tensor) -> int:
    with as_plain():  # under auto() an operation on a parameter loads its module
        like = torch.empty_like(parameter, device="meta", requires_grad=False)
    # Neither setting changes the state's size. Fused kernels do not support the meta device.
    settings = {"fused": False, "foreach": False}
    try:
        with as_plain():
            copy = OptimizerCopy(optimizer, parameter, like, settings, construct=False)
        with torch.random.fork_rng(devices=()):  # the step may draw random numbers of the CPU
            copy.step(like, sparse=False)
    except MemoryError:
        raise
    except Exception:  # the optimizer's code may raise anything for a tensor without elements
        return 0
    tensors = [value for value in copy.state.values() if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in tensors if tensor.is_meta)

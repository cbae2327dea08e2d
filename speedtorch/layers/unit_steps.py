"""UnitSteps: an optimizer's step, unit by unit, each of which is brought for it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from speedtorch.layers.optimizer_trials import check_steps_apart, needs_arguments
from speedtorch.layers.partial_step import Counted, PartialStep
from speedtorch.layers.residency import Residency
from speedtorch.layers.unit import Unit, host_copy, is_of_unit
from speedtorch.torch_internals import (
    LENT_BY_GRAD_SCALER,
    STEP_HOOKS,
    WeakTensorKeyDictionary,
    not_compiled,
    stepping_grad_scaler,
    tree_leaves,
    version_of,
)

__all__ = [
    "UnitSteps",
    "check_steps_in_pieces",
    "refuse_hasty_scaler",
    "replace_method",
    "steps_by",
]

_, _POST_HOOKS = STEP_HOOKS


class UnitSteps:
    """Lets `optimizer.step()` step units one by one, and then what belongs to none.

    Its state_dict() gives what the host has.
    """

    def __init__(
        self, optimizer: Optimizer, units: Mapping[nn.Module, Unit], residency: Residency
    ) -> None:
        self.optimizer, self._units, self._residency = optimizer, units, residency
        self._are_in_backward = False
        self._left: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        """What a backward has left to optimizer.step(): gradients, with their versions."""
        self._counted: Sequence[Counted] = ()
        """By a backward that has stepped units: optimizer.step() is a part of that step."""
        self._shown = WeakTensorKeyDictionary()
        """Copies that state_dict() has given, of which tensors, and their versions then."""
        for unit in units.values():
            unit.tell_steps()
        device = next(iter(units.values())).device
        self._undo = steps_by(optimizer, self._step_units, device, lambda: self._counted)
        self._saved = (
            optimizer.register_state_dict_post_hook(self._saved_state),
            optimizer.register_load_state_dict_pre_hook(self._given_state),
        )

    def note_backward(self, *, steps: bool) -> None:
        """Says whether units are stepped in the backward pass."""
        self._are_in_backward = steps
        self._left.clear()
        self._counted = ()

    def note_begun_backward(self) -> None:
        """Says that a backward begins, which changes gradients."""
        self._left.clear()

    def note_ended_backward(self, counted: Sequence[Counted]) -> None:
        """Says that a backward has ended, whose steps have changed this of the optimizer itself."""
        self._counted = counted
        self._left = {
            id(each): (weakref.ref(each.grad), version_of(each.grad))
            for group in self.optimizer.param_groups
            for each in group["params"]
            if type(each) in (nn.Parameter, Tensor) and not is_of_unit(each)
            if each.grad is not None
        }

    def close(self) -> None:
        """The optimizer is as before."""
        self._undo()
        for each in self._saved:
            each.remove()

    def _step_units(self, step: PartialStep) -> Collection[Tensor]:
        """Steps all units; gives the parameters that are left."""
        owners = {id(e): unit for unit in self._units.values() for e in unit.module.parameters()}
        parts: dict[Unit | None, list[nn.Parameter]] = {None: []}
        for group in step.optimizer.param_groups:
            for each in group["params"]:
                parts.setdefault(owners.get(id(each)), []).append(each)
        others = parts.pop(None)
        waiting = [
            unit
            for unit, parameters in parts.items()
            if unit is not None and any(each.grad is not None for each in parameters)
        ]
        self._check_scaler(is_asked=bool(waiting))
        self._check_left(others)
        self._residency.check_room_to_step(waiting)
        with closing(self._residency.each(waiting, state=True, ahead=1)) as units:
            for unit in units:
                self._step(unit, step, parts[unit])
        self._counted = ()
        return others

    def step_unit(self, unit: Unit, step: PartialStep) -> None:
        """Steps a unit alone, without the hooks of the optimizer's step."""
        with self._residency.using([unit], state=True):
            self._step(unit, step, list(unit.module.parameters()))

    def _check_scaler(self, *, is_asked: bool) -> None:
        """Raises RuntimeError if gradients were not scaled back, as of units that are asked for."""
        stepping = stepping_grad_scaler()
        if stepping is not None and self._are_in_backward:
            raise RuntimeError(
                "GradScaler: units have been stepped in the backward pass, by gradients that were"
                " still scaled: use auto() without step=True, or no scaler"
            )
        if is_asked:
            refuse_hasty_scaler()

    def _check_left(self, parameters: Iterable[nn.Parameter]) -> None:
        """Raises RuntimeError if gradients have changed since a backward that stepped units."""
        for each in parameters:
            if id(each) not in self._left or each.grad is None:
                continue
            gradient, version = self._left[id(each)]
            if each.grad is not gradient() or version_of(each.grad) != version:
                raise RuntimeError(
                    "auto(step=True): gradients have been changed between the backward and"
                    " optimizer.step(), as by clip_grad_norm_ or by another backward, and the units"
                    " have been stepped in the backward by theirs as they were; nothing else has"
                    " been stepped: use auto() without step=True, or parameter.register_hook() to"
                    " change each gradient within the backward, or another optimizer for what"
                    " belongs to no unit"
                )
        self._left.clear()  # what is changed after a step is no clipping

    def _step(self, unit: Unit, step: PartialStep, parameters: list[nn.Parameter]) -> None:
        try:
            step.step(parameters)
        finally:
            unit.note_step()

    def _saved_state(self, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """Gives state_dict() what the host has, which stays readable when units leave."""
        on_host: dict[int, Tensor] = {}
        for unit in self._residency.there:
            on_host |= unit.on_host(state=True)

        def found(value: Any) -> Any:
            if not isinstance(value, Tensor) or (host := host_copy(value, on_host)) is None:
                return value
            # A copy: a later move writes to the host memory, and what is given may be loaded.
            shown = host.clone()
            self._shown[shown] = weakref.ref(value), version_of(shown)
            return shown

        return _mapped(found, saved)

    def _given_state(self, _: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        """Lets load_state_dict() take the unit's own tensors for copies that were not written.

        So it does in torch, whose state_dict() has these.
        """
        kept = [each for each in self.optimizer.state.values() if isinstance(each, dict)]
        own = {id(each) for of_one in kept for each in of_one.values()}

        def found(value: Any) -> Any:
            if type(value) is not Tensor or value not in self._shown:
                return value
            of, version = self._shown[value]
            is_same = version == version_of(value) and id(of()) in own
            return of() if is_same else value

        return _mapped(found, given)


def _mapped(of_value: Callable[[Any], Any], saved: dict[str, Any]) -> dict[str, Any]:
    """A state_dict() of an optimizer with other values of parameters' state."""
    state = {
        number: {key: of_value(value) for key, value in kept.items()}
        if isinstance(kept, dict)
        else kept
        for number, kept in saved["state"].items()
    }
    return {**saved, "state": state}


def refuse_hasty_scaler() -> None:
    """Raises RuntimeError if torch's GradScaler is about to step gradients in host memory."""
    stepping = stepping_grad_scaler()
    if stepping is not None and not stepping.waits:
        raise RuntimeError(
            "GradScaler: torch's divides gradients in host memory before its scale has come there"
            " from the GPU; nothing has been stepped: use speedtorch.GradScaler, which waits"
        )


def check_steps_in_pieces(optimizer: Optimizer) -> None:
    """Raises TypeError if the optimizer steps all parameters at once, or another optimizer."""
    name = type(optimizer).__name__
    if isinstance(optimizer, LBFGS):
        raise TypeError(f"optimizer: {name} steps all parameters at once, and not in pieces")
    for each in tree_leaves(vars(optimizer)):
        if isinstance(each, Optimizer):
            inner = type(each).__name__
            raise TypeError(
                f"optimizer: {name} has a {inner} within, and would step all of it with each part:"
                f" give that {inner} instead"
            )


def _closure_done(args: tuple[Any, ...], kwargs: Any) -> tuple[tuple[Any, ...], Any]:
    """Calls the closure of a step, and gives the arguments with one that returns its result."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):  # a step of its own may be given something else
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    if len(args) > 1:
        return (args[0], lambda: loss, *args[2:]), kwargs
    return args, {**kwargs, "closure": lambda: loss}


def steps_by(
    optimizer: Optimizer,
    parts: Callable[[PartialStep], Collection[Tensor]],
    device: torch.device | None,
    counted: Callable[[], Sequence[Counted]] = tuple,
) -> Callable[[], None]:
    """Lets an optimizer's step() step parts first, and then what these leave; gives what undoes it.

    One that needs arguments is tried out with those of its first step, on this device. What a step
    of other parameters has `counted` before is completed.

    Hooks of the step are called once, before and after all of it: ours are the last of those before
    and the first of those after, which find what the step has counted.
    """
    is_tried = not needs_arguments(optimizer)  # or it has been when it was given

    def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal is_tried
        if not is_tried:
            check_steps_apart(optimizer, device, args, kwargs)
            is_tried = True
        settle: list[Callable[[], object]] = []

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
            # The first argument is the optimizer, or its twin for what another Swapper leaves.
            (asked, *given), kwargs = _closure_done(args, kwargs)
            step = PartialStep(asked, tuple(given), kwargs, counted())
            left = parts(step)
            settle.append(step.settle)
            return (step.twin(left), *given), kwargs

        def after(*_: Any) -> None:
            for each in settle:
                each()

        try:
            with ExitStack() as hooks:
                hooks.enter_context(optimizer.register_step_pre_hook(before))
                last = hooks.enter_context(optimizer.register_step_post_hook(after))
                vars(optimizer)[_POST_HOOKS].move_to_end(last.id, last=False)
                return original(*args, **kwargs)
        except BaseException:
            if stepping_grad_scaler() is not None:  # which would take them back after a step only
                for name in LENT_BY_GRAD_SCALER:
                    vars(optimizer).pop(name, None)
            raise

    return replace_method(optimizer, "step", step)


def replace_method(
    optimizer: Optimizer, name: str, called: Callable[..., Any]
) -> Callable[[], None]:
    """Lets an optimizer's method be `called(original, ...)`; gives what puts the original back.

    Whatever has wrapped the method in turn calls the original from then on.
    """
    original, is_closed = getattr(optimizer, name), False

    # A GradScaler looks at its signature, with the optimizer itself.
    @not_compiled
    @wraps(getattr(original, "__func__", original))
    def method(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if is_closed else called(original, *args, **kwargs)

    bound = MethodType(method, optimizer)  # whose function schedulers look for
    setattr(optimizer, name, bound)

    def put_back() -> None:
        nonlocal is_closed
        is_closed = True
        if vars(optimizer).get(name) is bound:
            setattr(optimizer, name, original)

    return put_back

"""ModuleSteps: runs an optimizer's step unit by unit, and loads each unit for its step."""

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

from speedtorch.layers.offloaded_module import OffloadedModule, host_copy, is_offloaded
from speedtorch.layers.optimizer_trials import check_steps_apart, needs_arguments
from speedtorch.layers.partial_step import Counted, PartialStep
from speedtorch.layers.residency import Residency
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
    "ModuleSteps",
    "check_steps_in_pieces",
    "refuse_hasty_scaler",
    "replace_method",
    "steps_by",
]

_, _POST_HOOKS = STEP_HOOKS


class ModuleSteps:
    """Makes `optimizer.step()` step units one by one, and then parameters outside units.

    The optimizer's state_dict() returns host copies.
    """

    def __init__(
        self, optimizer: Optimizer, units: Mapping[nn.Module, OffloadedModule], residency: Residency
    ) -> None:
        self.optimizer, self._units, self._residency = optimizer, units, residency
        self._are_in_backward = False
        self._left: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        """Gradients outside units, which a backward leaves to optimizer.step(), with versions."""
        self._counted: Sequence[Counted] = ()
        """Changes of optimizer settings by steps in the backward, which step() completes."""
        self._shown = WeakTensorKeyDictionary()
        """Copies that state_dict() has returned, with their source tensors and versions then."""
        for unit in units.values():
            unit.remove_step_hooks()
        device = next(iter(units.values())).device
        self._undo = steps_by(optimizer, self._step_units, device, lambda: self._counted)
        self._saved = (
            optimizer.register_state_dict_post_hook(self._saved_state),
            optimizer.register_load_state_dict_pre_hook(self._given_state),
        )

    def note_backward(self, *, steps: bool) -> None:
        """Sets whether units are stepped in the backward pass."""
        self._are_in_backward = steps
        self._left.clear()
        self._counted = ()

    def note_begun_backward(self) -> None:
        """Notes that a backward begins, which changes gradients."""
        self._left.clear()

    def note_ended_backward(self, counted: Sequence[Counted]) -> None:
        """Notes the end of a backward, and the changes of optimizer settings by its steps."""
        self._counted = counted
        self._left = {
            id(each): (weakref.ref(each.grad), version_of(each.grad))
            for group in self.optimizer.param_groups
            for each in group["params"]
            if type(each) in (nn.Parameter, Tensor) and not is_offloaded(each)
            if each.grad is not None
        }

    def close(self) -> None:
        """Restores the optimizer's methods and removes the hooks."""
        self._undo()
        for each in self._saved:
            each.remove()

    def _step_units(self, step: PartialStep) -> Collection[Tensor]:
        """Steps all units with gradients, and returns the parameters outside units."""
        owners = {id(e): unit for unit in self._units.values() for e in unit.module.parameters()}
        parts: dict[OffloadedModule | None, list[nn.Parameter]] = {None: []}
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

    def step_unit(self, unit: OffloadedModule, step: PartialStep) -> None:
        """Steps one unit, without the hooks of the optimizer's step."""
        with self._residency.using([unit], state=True):
            self._step(unit, step, list(unit.module.parameters()))

    def _check_scaler(self, *, is_asked: bool) -> None:
        """Raises RuntimeError if a GradScaler cannot have unscaled gradients correctly.

        `is_asked`: whether units are about to be stepped.
        """
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
        self._left.clear()  # changes after a step are allowed

    def _step(
        self, unit: OffloadedModule, step: PartialStep, parameters: list[nn.Parameter]
    ) -> None:
        try:
            step.step(parameters)
        finally:
            unit.note_step()

    def _saved_state(self, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """Puts host copies into state_dict(), which remain readable when units are evicted."""
        on_host: dict[int, Tensor] = {}
        for unit in self._residency.there:
            on_host |= unit.on_host(state=True)

        def found(value: Any) -> Any:
            if not isinstance(value, Tensor) or (host := host_copy(value, on_host)) is None:
                return value
            # A clone, because later evictions write to the host memory, and the caller may load it.
            shown = host.clone()
            self._shown[shown] = weakref.ref(value), version_of(shown)
            return shown

        return _mapped(found, saved)

    def _given_state(self, _: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        """Replaces unchanged copies from state_dict() with the original state tensors.

        This matches torch, whose state_dict() contains the original tensors.
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
    """An optimizer's state_dict() with `of_value` applied to the state of each parameter."""
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
    """Raises TypeError if the optimizer steps all parameters at once, or wraps another one."""
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
    """Calls the closure of a step, and returns arguments with a closure that returns its loss."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):  # a custom step() may accept other arguments
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
    """Makes an optimizer's step() call `parts`, then step the rest; returns a function to undo it.

    `parts` steps some parameters and returns the remaining ones. An optimizer whose step() needs
    arguments is checked at its first step with these arguments, on `device`. `counted` returns
    changes of earlier partial steps, which this step completes.

    Step hooks are called once, before and after the whole step. Our pre-hook runs last and our
    post-hook first, so that other post-hooks see the updated settings.
    """
    is_tried = not needs_arguments(optimizer)  # others were checked when they were passed

    def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal is_tried
        if not is_tried:
            check_steps_apart(optimizer, device, args, kwargs)
            is_tried = True
        settle: list[Callable[[], object]] = []

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
            # The first argument is the optimizer, or a shallow copy from another Swapper's step.
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
            if stepping_grad_scaler() is not None:  # removes them only after a successful step
                for name in LENT_BY_GRAD_SCALER:
                    vars(optimizer).pop(name, None)
            raise

    return replace_method(optimizer, "step", step)


def replace_method(
    optimizer: Optimizer, name: str, called: Callable[..., Any]
) -> Callable[[], None]:
    """Replaces a method by `called(original, ...)`; returns a function that restores the original.

    After the restore, wrappers around the replacement call the original.
    """
    original, is_closed = getattr(optimizer, name), False

    # GradScaler inspects the signature, which must include the optimizer itself.
    @not_compiled
    @wraps(getattr(original, "__func__", original))
    def method(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if is_closed else called(original, *args, **kwargs)

    bound = MethodType(method, optimizer)  # schedulers need its __func__
    setattr(optimizer, name, bound)

    def put_back() -> None:
        nonlocal is_closed
        is_closed = True
        if vars(optimizer).get(name) is bound:
            setattr(optimizer, name, original)

    return put_back

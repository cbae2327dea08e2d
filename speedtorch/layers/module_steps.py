"""ModuleSteps: runs an optimizer's step module by module, and loads each module for its step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedtorch.layers.module_groups import host_copy
from speedtorch.layers.module_tensors import is_offloaded
from speedtorch.layers.offloaded_module import OffloadedModule
from speedtorch.layers.residency import Residency
from speedtorch.layers.split_steps import (
    ChangedSetting,
    PartialStep,
    check_not_attached,
    check_steps_apart,
    needs_arguments,
)
from speedtorch.torch_internals import (
    SET_BY_GRAD_SCALER,
    STEP_HOOKS,
    WeakTensorKeyDictionary,
    not_compiled,
    stepping_grad_scaler,
    version_of,
)

__all__ = [
    "ModuleSteps",
    "check_scaler_waits",
    "replace_method",
    "replace_step",
]

_, _POST_HOOKS = STEP_HOOKS


class ModuleSteps:
    """Makes `optimizer.step()` step modules one by one, and then parameters outside modules.

    The optimizer's state_dict() returns host copies of state that is on the device.
    """

    def __init__(
        self, optimizer: Optimizer, offloaded: Mapping[Any, OffloadedModule], residency: Residency
    ) -> None:
        self.optimizer, self._offloaded, self._residency = optimizer, offloaded, residency
        self._are_in_backward = False
        self._outside_gradients: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        """Gradients of parameters outside modules after a backward, with their versions."""
        self._backward_step: PartialStep | None = None
        """The step of modules in the current backward, once one has been stepped."""
        self._changes: Sequence[ChangedSetting] = ()
        """Changes of optimizer settings by steps in the backward, which step() completes."""
        self._returned = WeakTensorKeyDictionary()
        """Copies that state_dict() has returned, with their source tensors and versions then."""
        device = next(iter(offloaded.values())).device
        self._undo = replace_step(optimizer, self._step_modules, device, lambda: self._changes)
        self._hooks = (
            optimizer.register_state_dict_post_hook(self._after_state_dict),
            optimizer.register_load_state_dict_pre_hook(self._before_load_state_dict),
        )

    def note_backward(self, *, steps: bool) -> None:
        """Sets whether modules are stepped in the backward pass."""
        self._are_in_backward = steps
        self._outside_gradients.clear()
        self._changes = ()

    def begin_backward(self) -> None:
        """Discards the records of the last backward, because a new one changes gradients."""
        self._outside_gradients.clear()
        self._backward_step = None

    def step_module(self, offloaded: OffloadedModule) -> None:
        """Steps one module in the backward, without the hooks of the optimizer's step."""
        if self._backward_step is None:
            self._backward_step = PartialStep(self.optimizer)
        with self._residency.using([offloaded], state=True):
            self._step(offloaded, self._backward_step, list(offloaded.module.parameters()))

    def end_backward(self) -> None:
        """Completes the step of a backward, and notes gradients that step() must find unchanged."""
        step, self._backward_step = self._backward_step, None
        self._changes = [] if step is None else step.settle()
        self._outside_gradients = {
            id(param): (weakref.ref(param.grad), version_of(param.grad))
            for group in self.optimizer.param_groups
            for param in group["params"]
            if type(param) in (nn.Parameter, Tensor) and not is_offloaded(param)
            if param.grad is not None
        }

    def close(self) -> None:
        """Restores the optimizer's methods and removes the hooks."""
        self._undo()
        for hook in self._hooks:
            hook.remove()

    def _step_modules(self, step: PartialStep) -> Collection[Tensor]:
        """Steps all modules with gradients, and returns the parameters outside modules."""
        modules = self._offloaded.values()
        owners = {id(param): owner for owner in modules for param in owner.module.parameters()}
        parts: dict[OffloadedModule | None, list[nn.Parameter]] = {None: []}
        for group in step.optimizer.param_groups:
            for param in group["params"]:
                parts.setdefault(owners.get(id(param)), []).append(param)
        outside = parts.pop(None)
        waiting = [
            offloaded
            for offloaded, parameters in parts.items()
            if offloaded is not None and any(param.grad is not None for param in parameters)
        ]
        if self._are_in_backward and stepping_grad_scaler() is not None:
            raise RuntimeError(
                "GradScaler: auto(step=True) has stepped modules in the backward pass with"
                " gradients that were still scaled. Use auto() without step=True, or no GradScaler."
            )
        if waiting:
            check_scaler_waits()
        self._check_outside_gradients(outside)
        self._residency.modules.check_budget_for_step(waiting)
        with closing(self._residency.loaded_in_order(waiting)) as loaded:
            for offloaded in loaded:
                self._step(offloaded, step, parts[offloaded])
        self._changes = ()
        return outside

    def _check_outside_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Raises RuntimeError if gradients have changed since a backward that stepped modules."""
        for param in parameters:
            if id(param) not in self._outside_gradients or param.grad is None:
                continue
            gradient, version = self._outside_gradients[id(param)]
            if param.grad is not gradient() or version_of(param.grad) != version:
                raise RuntimeError(
                    "auto(step=True): a gradient of a parameter outside the Swapper's modules was"
                    " changed between backward() and optimizer.step(), for example by"
                    " clip_grad_norm_ or another backward(). The Swapper's modules were already"
                    " stepped with their unchanged gradients. Nothing else was stepped. Use auto()"
                    " without step=True, change gradients in parameter.register_hook(), or use"
                    " a separate optimizer for the parameters outside."
                )
        self._outside_gradients.clear()  # changes after a step are allowed

    def _step(self, module: OffloadedModule, step: PartialStep, params: list[nn.Parameter]) -> None:
        try:
            step.step(params)
        finally:
            module.changes.note_step()

    def _after_state_dict(self, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """Puts host copies into state_dict(), which remain readable when modules are evicted."""
        on_host: dict[int, Tensor] = {}
        for offloaded in self._residency.modules.loaded:
            on_host |= offloaded.groups.on_host(state=True)

        def host_clone(value: Any) -> Any:
            """A copy of a device tensor in host memory; other values are returned unchanged."""
            if not isinstance(value, Tensor) or (host := host_copy(value, on_host)) is None:
                return value
            # A clone, because later evictions write to the host memory, and the caller may load it.
            clone = host.clone()
            self._returned[clone] = weakref.ref(value), version_of(clone)
            return clone

        return _map_state(host_clone, saved)

    def _before_load_state_dict(self, _: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
        """Replaces unchanged copies from state_dict() with the original state tensors.

        This matches torch, whose state_dict() contains the original tensors.
        """
        states = [state for state in self.optimizer.state.values() if isinstance(state, dict)]
        own = {id(value) for state in states for value in state.values()}

        def original(value: Any) -> Any:
            """The source tensor of an unchanged copy; other values are returned as they are."""
            if type(value) is not Tensor or value not in self._returned:
                return value
            source, version = self._returned[value]
            is_same = version == version_of(value) and id(source()) in own
            return source() if is_same else value

        return _map_state(original, loaded)


def _map_state(of_value: Callable[[Any], Any], saved: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state_dict() with `of_value` applied to the state of each parameter."""
    state = {
        number: {key: of_value(value) for key, value in kept.items()}
        if isinstance(kept, dict)
        else kept
        for number, kept in saved["state"].items()
    }
    return {**saved, "state": state}


def check_scaler_waits() -> None:
    """Raises RuntimeError if torch's GradScaler is about to step gradients in host memory."""
    stepping = stepping_grad_scaler()
    if stepping is not None and not stepping.waits:
        raise RuntimeError(
            "GradScaler: torch's scaler divides gradients in host memory without a wait for the"
            " copy of its scale from the GPU. Nothing has been stepped. Use speedtorch.GradScaler,"
            " which waits."
        )


def _call_closure(args: tuple[Any, ...], kwargs: Any) -> tuple[tuple[Any, ...], Any]:
    """Calls the closure of a step, and returns arguments with a closure that returns its loss."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):  # a custom step() may accept other arguments
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    if len(args) > 1:
        return (args[0], lambda: loss, *args[2:]), kwargs
    return args, {**kwargs, "closure": lambda: loss}


def replace_step(
    optimizer: Optimizer,
    parts: Callable[[PartialStep], Collection[Tensor]],
    device: torch.device | None,
    changes: Callable[[], Sequence[ChangedSetting]] = tuple,
) -> Callable[[], None]:
    """Makes an optimizer's step() call `parts`, then step the rest; returns a function to undo it.

    `parts` steps some parameters and returns the remaining ones. An optimizer whose step() needs
    arguments is checked at its first step with these arguments, on `device`. `changes` returns
    changes of earlier partial steps, which this step completes.

    Step hooks are called once, before and after the whole step. This function's pre-hook runs last
    and its post-hook first, so that other post-hooks see the optimizer's updated settings.
    """
    is_tried = not needs_arguments(optimizer)  # checked when the optimizer was passed

    def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Adds hooks that first step the parts, and calls the original method."""
        nonlocal is_tried
        check_not_attached(optimizer)
        if not is_tried:
            check_steps_apart(optimizer, device, args, kwargs)
            is_tried = True
        partial_steps: list[PartialStep] = []

        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
            """Steps the parts, and passes the original step() only the remaining parameters."""
            # The first argument is the optimizer, or a shallow copy from another Swapper's step.
            (stepped, *arguments), kwargs = _call_closure(args, kwargs)
            partial_steps.append(step := PartialStep(stepped, tuple(arguments), kwargs, changes()))
            return (step.shallow_copy(parts(step)), *arguments), kwargs

        def after_step(*_: Any) -> None:
            """Copies changed settings to the optimizer."""
            for partial_step in partial_steps:
                partial_step.settle()

        try:
            with ExitStack() as hooks:
                hooks.enter_context(optimizer.register_step_pre_hook(before_step))
                last = hooks.enter_context(optimizer.register_step_post_hook(after_step))
                vars(optimizer)[_POST_HOOKS].move_to_end(last.id, last=False)
                return original(*args, **kwargs)
        except BaseException:
            if stepping_grad_scaler() is not None:  # removes them only after a successful step
                for name in SET_BY_GRAD_SCALER:
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
        """Calls the replacement, or the original after the restore."""
        return original(*args, **kwargs) if is_closed else called(original, *args, **kwargs)

    bound = MethodType(method, optimizer)  # schedulers need its __func__
    setattr(optimizer, name, bound)

    def restore() -> None:
        """Restores the original method, unless other code has replaced it since."""
        nonlocal is_closed
        is_closed = True
        if vars(optimizer).get(name) is bound:
            setattr(optimizer, name, original)

    return restore

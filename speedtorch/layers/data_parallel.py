"""Averaging: lets DistributedDataParallel average the gradients of units, or raises if it cannot.

DistributedDataParallel detects a gradient with a hook on the parameter's gradient accumulation
node. If `.data` moves to another device, as in a unit, torch creates another node without the hook.
This module runs the old node when the new node has accumulated the gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from speedtorch.layers.module_hook import weak_call
from speedtorch.torch_internals import (
    WeakTensorKeyDictionary,
    active_data_parallel,
    as_plain,
    current_node,
    gradient_hooks,
    place_buckets,
    takes_uneven_inputs,
)

__all__ = ["Averaging", "averaged_parameters"]


class _Made:
    """Counts all DistributedDataParallels created so far, and keeps weak references to them."""

    def __init__(self) -> None:
        self.number = 0
        self.alive: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        register_module_module_registration_hook(self._note)

    def _note(self, module: nn.Module, name: str, child: object) -> None:
        if name == "module" and isinstance(module, DistributedDataParallel):
            self.number += 1
            self.alive.add(module)


_made = _Made()

_members: weakref.WeakKeyDictionary[DistributedDataParallel, list[Averaging]]
_members = weakref.WeakKeyDictionary()
"""The units that have been used in each DistributedDataParallel's forward.

Units of a deleted Swapper remain here, because the wrapper still averages their parameters.
"""

_averaged: weakref.WeakKeyDictionary[DistributedDataParallel, frozenset[int]]
_averaged = weakref.WeakKeyDictionary()
"""The ids of the parameters that each DistributedDataParallel does not ignore."""

_placed: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
"""The DistributedDataParallels that have allocated their final buckets."""


def averaged_parameters() -> frozenset[int]:
    """The ids of trained parameters in all DistributedDataParallels created so far."""
    return frozenset(
        id(each) for wrapper in _made.alive for each in wrapper.parameters() if each.requires_grad
    )


class _Reach(torch.autograd.Function):
    """A result whose backward runs a parameter's accumulation node without a gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        return parameter.detach().new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


class Averaging:
    """Reports the gradients of one unit to DistributedDataParallel; errors contain `name`."""

    def __init__(self, name: str, module: nn.Module, device: torch.device) -> None:
        self._name, self._module, self._device = name, module, device
        # If a DistributedDataParallel may exist already, its hooks are on the current nodes.
        is_known = not (dist.is_available() and dist.is_initialized())
        self._noted = _made.number if is_known else -1
        self._reached: Any = WeakTensorKeyDictionary()
        """The nodes that each parameter had at note(), with results whose backward runs them."""
        self._told: Any = WeakTensorKeyDictionary()
        """The handles of the gradient hooks, by parameter."""

    def note(self) -> None:
        """Records the parameters' nodes before the unit moves, because a move replaces them."""
        if self._noted == _made.number:
            return
        parameters = [each for each in self._module.parameters() if each.is_leaf]
        parameters = [e for e in parameters if e.is_floating_point() or e.is_complex()]
        with as_plain(), torch.enable_grad(), torch.inference_mode(False):
            for each in parameters:
                is_trained = each.requires_grad  # a frozen parameter may be trained later
                try:
                    each.requires_grad_()
                    self._reach(each)
                finally:
                    each.requires_grad_(is_trained)
            if _made.number:
                self._tell_of(parameters)
        self._noted = _made.number

    def _reach(self, parameter: nn.Parameter) -> None:
        """Records a parameter's current node, which a reducer may have hooked."""
        known = self._reached.setdefault(parameter, [])
        node = get_gradient_edge(parameter).node
        if all(each is not node for each, _ in known):
            result: Any = _Reach.apply(parameter)  # type: ignore[no-untyped-call]
            known.append((node, result))

    def forget_replaced(self) -> None:
        """Forgets parameters that are no longer in the module; their nodes keep them alive."""
        own = {id(each) for each in self._module.parameters()}
        for known in (self._reached, self._told):
            for each in [each for each in known if id(each) not in own]:
                del known[each]

    def _trained(self) -> Iterator[nn.Parameter]:
        return (each for each in self._module.parameters() if each.requires_grad)

    def check(self, *, steps: bool) -> None:
        """Checks a use of the unit if it is in a DistributedDataParallel's forward.

        Raises NotImplementedError in three cases. The unit is stepped in the backward, before its
        gradients are averaged. Gradients are views of buckets, but a move gives them other memory.
        The wrapper searches the graph for parameters' nodes, and moves have replaced these nodes.
        """
        wrapper = active_data_parallel()
        if wrapper is None or not (averaged := self._averaged_by(wrapper)):
            return
        if steps:
            raise NotImplementedError(
                f"unit {self._name!r}: auto(step=True) steps units by the gradients of this rank,"
                " before DistributedDataParallel has averaged them: use auto() without step=True,"
                " and optimizer.step()"
            )
        if wrapper.gradient_as_bucket_view:
            raise NotImplementedError(
                f"unit {self._name!r}: its gradients move with it, and those of"
                " DistributedDataParallel(gradient_as_bucket_view=True) must stay where they are"
                " averaged: use gradient_as_bucket_view=False"
            )
        looks_for_nodes = wrapper.find_unused_parameters and not wrapper.static_graph
        if looks_for_nodes and self._has_other_nodes(averaged):
            raise NotImplementedError(
                f"unit {self._name!r}: DistributedDataParallel(find_unused_parameters=True) would"
                " take its parameters for unused, as they have moved: use"
                " find_unused_parameters=False"
            )
        self._join(wrapper, averaged)

    def _has_other_nodes(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether a parameter's current node was not recorded."""
        with as_plain(), torch.enable_grad():
            return any(
                all(node is not get_gradient_edge(each).node for node, _ in self._reached[each])
                for each in parameters
                if each in self._reached
            )

    def _averaged_by(self, wrapper: DistributedDataParallel) -> list[nn.Parameter]:
        """The unit's trained parameters that the wrapper does not ignore."""
        if wrapper not in _averaged:  # the reducer keeps the parameters alive, so ids remain valid
            ignored, named = wrapper.parameters_to_ignore, wrapper.module.named_parameters()
            _averaged[wrapper] = frozenset(id(each) for name, each in named if name not in ignored)
        return [each for each in self._trained() if id(each) in _averaged[wrapper]]

    def _join(self, wrapper: DistributedDataParallel, averaged: Iterable[nn.Parameter]) -> None:
        if wrapper not in _members:
            _members[wrapper] = []
            wrapper.register_forward_pre_hook(_begins)
        members = _members[wrapper]
        if not any(each is self for each in members):
            for each in members:
                self._follow(each)
            members.append(self)
        self._tell_of(averaged)

    def _follow(self, before: Averaging) -> None:
        """Moves the records and hooks of an earlier unit's parameters to this unit."""
        for each in self._module.parameters():
            if each in before._told:
                before._told.pop(each).remove()
            if each in before._reached:
                known = self._reached.setdefault(each, [])
                known += before._reached.pop(each)

    def _tell_of(self, parameters: Iterable[nn.Parameter]) -> None:
        """Registers gradient hooks, which run after all other hooks of the parameters."""
        tell = weak_call(self._tell)
        with as_plain():
            for each in parameters:
                if each not in self._told:
                    if not each.requires_grad:
                        continue
                    hook = each.register_post_accumulate_grad_hook(tell)  # type: ignore[no-untyped-call]
                    self._told[each] = hook
                hooks: Any = gradient_hooks(each)[1]
                if next(reversed(hooks)) != self._told[each].id:
                    hooks.move_to_end(self._told[each].id)

    def _tell(self, parameter: Tensor) -> None:
        """Runs the earlier nodes of a parameter after its current node accumulated a gradient."""
        if parameter not in self._reached:
            return
        others = [result for node, result in self._reached[parameter] if node is not current_node()]
        if not others:  # the current node has the reducer's hook
            return
        # The parameter's hooks have run for this gradient, and must not run again.
        hooks: list[Any] = [each for each in gradient_hooks(parameter) if each]
        kept = [dict(each) for each in hooks]
        try:
            for each in hooks:
                each.clear()
            for result in others:
                result.backward(torch.ones_like(result), retain_graph=True)
        finally:
            for each, before in zip(hooks, kept, strict=True):
                each.update(before)

    @property
    def away(self) -> list[nn.Parameter]:
        """Trained parameters that are not on the unit's device."""
        return [each for each in self._trained() if each.device != self._device]

    @contextmanager
    def pretending(self) -> Iterator[None]:
        """Replaces `data` of host parameters by device tensors of one element within the block."""
        away = self.away
        homes = [each.data for each in away]
        try:
            for each in away:
                each.data = each.new_empty((), device=self._device).expand(each.shape)
            yield
        finally:
            for each, home in zip(away, homes, strict=True):
                each.data = home


def _begins(wrapper: nn.Module, _: object) -> None:
    """Prepares the forward of a DistributedDataParallel with units.

    In the forward after the first backward, the wrapper allocates its buckets on the parameters'
    device. Parameters on the host therefore appear on the unit's device during that allocation.
    Raises NotImplementedError if the wrapper would broadcast host buffers, or allocate buckets on
    the host.
    """
    assert isinstance(wrapper, DistributedDataParallel)
    if (members := _members.get(wrapper)) is None:  # a copy of a wrapper
        return
    sent = wrapper.modules_buffers if wrapper.will_sync_module_buffers() else ()  # type: ignore[no-untyped-call]
    if wrapper.device.type != "cpu" and any(each.is_cpu for each in sent):
        raise NotImplementedError(
            "DistributedDataParallel sends the buffers of units that are on the host: use"
            " broadcast_buffers=False, or bring all units that have some by use()"
        )
    if wrapper in _placed or not torch.is_grad_enabled():
        return
    if takes_uneven_inputs(wrapper):  # join() counts ranks before any allocation
        if any(each.away for each in members):
            raise NotImplementedError(
                "DistributedDataParallel.join() places gradients where the parameters are as its"
                " second forward begins, and some are on the host: bring all units by use() around"
                " that"
            )
        return
    with as_plain(), ExitStack() as places:
        for each in members:
            places.enter_context(each.pretending())
        if place_buckets(wrapper):
            _placed.add(wrapper)

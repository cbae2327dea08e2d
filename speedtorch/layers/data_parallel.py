"""Units within a DistributedDataParallel: it averages their gradients, or an error tells why not.

It learns of a gradient by a hook of the node of autograd that adds it up. Where `.data` changes its
device, as that of a unit does, torch makes another node for the parameter, which has no such hook.
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
    """Counts the DistributedDataParallels that are made, and knows those that there are still."""

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
"""The units of each DistributedDataParallel, as far as they have been used in its forward.

It goes on with the parameters of units that have gone.
"""

_averaged: weakref.WeakKeyDictionary[DistributedDataParallel, frozenset[int]]
_averaged = weakref.WeakKeyDictionary()
"""The ids of the parameters that each of them does not ignore."""

_placed: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
"""Those that have placed what they average for good."""


def averaged_parameters() -> frozenset[int]:
    """The ids of the parameters of all DistributedDataParallels, as far as they are known."""
    return frozenset(
        id(each) for wrapper in _made.alive for each in wrapper.parameters() if each.requires_grad
    )


class _Reach(torch.autograd.Function):
    """A result whose backward runs the node of a parameter and adds up nothing there."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        return parameter.detach().new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


class Averaging:
    """What DistributedDataParallel has to be told of one unit, which errors call by its name."""

    def __init__(self, name: str, module: nn.Module, device: torch.device) -> None:
        self._name, self._module, self._device = name, module, device
        # One may have been made before: then the nodes are those that it knows.
        is_known = not (dist.is_available() and dist.is_initialized())
        self._noted = _made.number if is_known else -1
        self._reached: Any = WeakTensorKeyDictionary()
        """The nodes that each parameter had when it was noted, and results that reach them."""
        self._told: Any = WeakTensorKeyDictionary()
        """The hooks of the parameters whose gradients are told."""

    def note(self) -> None:
        """Is called before the unit moves: its parameters may lose the nodes that are known."""
        if self._noted == _made.number:
            return
        parameters = [each for each in self._module.parameters() if each.is_leaf]
        parameters = [e for e in parameters if e.is_floating_point() or e.is_complex()]
        with as_plain(), torch.enable_grad(), torch.inference_mode(False):
            for each in parameters:
                is_trained = each.requires_grad  # it may be again later
                try:
                    each.requires_grad_()
                    self._reach(each)
                finally:
                    each.requires_grad_(is_trained)
            if _made.number:
                self._tell_of(parameters)
        self._noted = _made.number

    def _reach(self, parameter: nn.Parameter) -> None:
        """Adds the current node of a parameter to those that a reducer may have a hook on."""
        known = self._reached.setdefault(parameter, [])
        node = get_gradient_edge(parameter).node
        if all(each is not node for each, _ in known):
            result: Any = _Reach.apply(parameter)  # type: ignore[no-untyped-call]
            known.append((node, result))

    def forget_replaced(self) -> None:
        """Forgets parameters that the module has no more, which a node keeps alive."""
        own = {id(each) for each in self._module.parameters()}
        for known in (self._reached, self._told):
            for each in [each for each in known if id(each) not in own]:
                del known[each]

    def _trained(self) -> Iterator[nn.Parameter]:
        return (each for each in self._module.parameters() if each.requires_grad)

    def check(self, *, steps: bool) -> None:
        """Is called as a use of the unit begins, perhaps in a DistributedDataParallel's forward.

        Raises NotImplementedError if the unit is stepped within the backward, before its gradients
        are averaged; if its gradients are views of what is averaged, which no longer are when a
        move of the unit has given them other memory; or if nodes of its parameters are looked for
        in the graph.
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
        """Whether the node of one is none of those that were noted."""
        with as_plain(), torch.enable_grad():
            return any(
                all(node is not get_gradient_edge(each).node for node, _ in self._reached[each])
                for each in parameters
                if each in self._reached
            )

    def _averaged_by(self, wrapper: DistributedDataParallel) -> list[nn.Parameter]:
        """The trained parameters that it does not ignore."""
        if wrapper not in _averaged:  # its reducer keeps the parameters, and their ids
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
        """Takes over what a unit before this one knows of parameters that are here now."""
        for each in self._module.parameters():
            if each in before._told:
                before._told.pop(each).remove()
            if each in before._reached:
                known = self._reached.setdefault(each, [])
                known += before._reached.pop(each)

    def _tell_of(self, parameters: Iterable[nn.Parameter]) -> None:
        """Registers the hooks that report gradients, behind all other hooks of the parameters."""
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
        """The gradient of a parameter has been added up, by its node of now."""
        if parameter not in self._reached:
            return
        others = [result for node, result in self._reached[parameter] if node is not current_node()]
        if not others:  # it has the hook
            return
        # The hooks of the parameter have run for this gradient, and must not run again.
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
        """Lets parameters that are on the host be on the device, without memory there."""
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
    """The forward of a DistributedDataParallel with units begins.

    In that after the first backward it places what it averages where the parameters are then, which
    has to be the device. Raises NotImplementedError if it would send buffers that are on the host
    to the other ranks, or place gradients on the host.
    """
    assert isinstance(wrapper, DistributedDataParallel)
    if (members := _members.get(wrapper)) is None:  # a copy
        return
    sent = wrapper.modules_buffers if wrapper.will_sync_module_buffers() else ()  # type: ignore[no-untyped-call]
    if wrapper.device.type != "cpu" and any(each.is_cpu for each in sent):
        raise NotImplementedError(
            "DistributedDataParallel sends the buffers of units that are on the host: use"
            " broadcast_buffers=False, or bring all units that have some by use()"
        )
    if wrapper in _placed or not torch.is_grad_enabled():
        return
    if takes_uneven_inputs(wrapper):  # then it counts ranks before it places anything
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

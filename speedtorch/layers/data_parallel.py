"""Units within a DistributedDataParallel: it averages their gradients, or refuses by name.

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

from speedtorch.torch_internals import (
    WeakTensorKeyDictionary,
    active_data_parallel,
    as_plain,
    current_node,
    place_buckets,
)

__all__ = ["Averaging"]


class _Made:
    """Counts the DistributedDataParallels that are made."""

    def __init__(self) -> None:
        self.number = 0
        register_module_module_registration_hook(self._note)

    def _note(self, module: nn.Module, name: str, child: object) -> None:
        if name == "module" and isinstance(module, DistributedDataParallel):
            self.number += 1


_made = _Made()

_members: weakref.WeakKeyDictionary[DistributedDataParallel, weakref.WeakSet[Averaging]]
_members = weakref.WeakKeyDictionary()
"""The units of each DistributedDataParallel, as far as their forwards have begun in its own."""

_placed: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
"""Those that have placed what they average for good."""


class _Reach(torch.autograd.Function):
    """A result whose backward runs the node of a parameter and adds up nothing there."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        return parameter.detach().new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


class Averaging:
    """What DistributedDataParallel has to be told of one unit.

    Args:
        name: what errors call the unit.
        module: of the unit.
        device: where the unit is when loaded.
    """

    def __init__(self, name: str, module: nn.Module, device: torch.device) -> None:
        self._name, self._module, self._device = name, module, device
        # One may have been made before: then the nodes are those that it knows.
        is_known = not (dist.is_available() and dist.is_initialized())
        self._noted = _made.number if is_known else -1
        self._reached: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """The node of each parameter when it was noted, and a result that reaches it."""
        self._told: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """The parameters whose gradients are told."""

    def note(self) -> None:
        """Is called before the unit moves: its parameters may lose the nodes that are known."""
        if self._noted == _made.number:
            return
        with as_plain(), torch.enable_grad(), torch.inference_mode(False):
            for each in self._trained():
                reach: Any = _Reach.apply(each)  # type: ignore[no-untyped-call]
                self._reached[each] = (get_gradient_edge(each).node, reach)
        self._noted = _made.number

    def _trained(self) -> Iterator[nn.Parameter]:
        return (each for each in self._module.parameters() if each.requires_grad)

    def check(self, *, steps: bool) -> None:
        """Is called as the unit's forward begins, perhaps in that of a DistributedDataParallel.

        Args:
            steps: whether the unit is stepped within the backward.

        Raises:
            NotImplementedError: the unit would be stepped before its gradients are averaged; its
                gradients are views of what is averaged, which no longer are when a move of the unit
                has given them other memory; nodes of its parameters are looked for in the graph.
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
        """Whether the node of one is no longer that which was noted."""
        with as_plain(), torch.enable_grad():
            return any(
                self._reached[each][0] is not get_gradient_edge(each).node
                for each in parameters
                if each in self._reached
            )

    def _averaged_by(self, wrapper: DistributedDataParallel) -> list[nn.Parameter]:
        """The trained parameters that it does not ignore."""
        trained = {id(each) for each in self._trained()}
        ignored = wrapper.parameters_to_ignore
        return [
            parameter
            for name, parameter in wrapper.module.named_parameters()
            if id(parameter) in trained and name not in ignored
        ]

    def _join(self, wrapper: DistributedDataParallel, averaged: Iterable[nn.Parameter]) -> None:
        if wrapper not in _members:
            _members[wrapper] = weakref.WeakSet()
            wrapper.register_forward_pre_hook(_begins)
        _members[wrapper].add(self)
        weak = weakref.ref(self)

        def tell(parameter: Tensor) -> None:
            if (averaging := weak()) is not None:
                averaging._tell(parameter)

        with as_plain():
            for each in averaged:
                if each not in self._told:
                    hook = each.register_post_accumulate_grad_hook(tell)  # type: ignore[no-untyped-call]
                    self._told[each] = hook

    def _tell(self, parameter: Tensor) -> None:
        """The gradient of a parameter has been added up, by its node of now."""
        if parameter not in self._reached:
            return
        node, result = self._reached[parameter]
        if current_node() is node:  # it has the hook
            return
        hooks = parameter._backward_hooks
        kept = dict(hooks or {})
        if hooks:
            hooks.clear()  # they have had this gradient
        try:
            result.backward(torch.ones_like(result), retain_graph=True)
        finally:
            if hooks is not None:
                hooks.update(kept)

    @contextmanager
    def pretending(self) -> Iterator[None]:
        """Lets parameters that are on the host be on the device, without memory there."""
        away = [each for each in self._trained() if each.device != self._device]
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
    has to be the device.

    Raises:
        NotImplementedError: it would send buffers that are on the host to the other ranks.
    """
    assert isinstance(wrapper, DistributedDataParallel)
    sent = wrapper.modules_buffers if wrapper.will_sync_module_buffers() else ()  # type: ignore[no-untyped-call]
    if wrapper.device.type != "cpu" and any(each.is_cpu for each in sent):
        raise NotImplementedError(
            "DistributedDataParallel sends the buffers of units that are on the host: use"
            " broadcast_buffers=False, or bring all units that have some by use()"
        )
    if wrapper in _placed or not torch.is_grad_enabled():
        return
    with as_plain(), ExitStack() as places:
        for each in _members[wrapper]:
            places.enter_context(each.pretending())
        if place_buckets(wrapper):
            _placed.add(wrapper)

"""Averaging: lets DistributedDataParallel average the gradients of an offloaded module, or raises.

DistributedDataParallel detects a gradient with a hook on the parameter's gradient accumulation
node. If `.data` moves to another device, torch creates another node without the hook.
This module runs the old node when the new node has accumulated the gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
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
    allows_uneven_inputs,
    as_plain,
    current_node,
    gradient_hooks,
    rebuild_buckets,
)

__all__ = ["Averaging", "averaged_parameters"]


class _WrapperRegistry:
    """Counts all DistributedDataParallels created so far, and keeps weak references to them."""

    def __init__(self) -> None:
        self.number = 0
        self.alive: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        register_module_module_registration_hook(self._note)

    def _note(self, module: nn.Module, name: str, child: object) -> None:
        if name == "module" and isinstance(module, DistributedDataParallel):
            self.number += 1
            self.alive.add(module)


_registry = _WrapperRegistry()

_members: weakref.WeakKeyDictionary[DistributedDataParallel, list[Averaging]]
_members = weakref.WeakKeyDictionary()
"""The offloaded modules that have been used in each DistributedDataParallel's forward.

This dict keeps the Averaging of a deleted Swapper alive. The wrapper still averages the parameters,
and their gradient hooks refer to the Averaging only weakly.
"""

_averaged: weakref.WeakKeyDictionary[DistributedDataParallel, frozenset[int]]
_averaged = weakref.WeakKeyDictionary()
"""The ids that _averaged_ids() has returned for each DistributedDataParallel."""

_placed: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
"""The DistributedDataParallels that have allocated their final buckets."""


def averaged_parameters() -> frozenset[int]:
    """The ids of parameters that a living DistributedDataParallel averages."""
    return frozenset(chain.from_iterable(map(_averaged_ids, _registry.alive)))


def _averaged_ids(wrapper: DistributedDataParallel) -> frozenset[int]:
    """The ids of the parameters that a wrapper does not ignore, by the names that its reducer uses.

    A parameter with several names is averaged if one of them is not ignored. The model's own
    parameters are averaged in any case, because the reducer compares names such as ".weight".
    """
    if wrapper not in _averaged:  # the reducer keeps the parameters alive, so ids remain valid
        _averaged[wrapper] = frozenset(
            id(param)
            for prefix, module in wrapper.module.named_modules()
            for name, param in module.named_parameters(recurse=False)
            if f"{prefix}.{name}" not in wrapper.parameters_to_ignore
        )
    return _averaged[wrapper]


class _NodeLink(torch.autograd.Function):
    """A result whose backward runs a parameter's accumulation node without a gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        """Returns a 0-dim result whose graph contains the accumulation node."""
        return parameter.detach().new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        """Passes no gradient on, so that the node accumulates nothing."""
        return None


class Averaging:
    """Reports a module's gradients to DistributedDataParallel; errors contain `name`."""

    def __init__(self, name: str, module: nn.Module, device: torch.device) -> None:
        self._name, self._module, self._device = name, module, device
        # If a DistributedDataParallel may exist already, its hooks are on the current nodes.
        is_known = not (dist.is_available() and dist.is_initialized())
        self._wrappers_noted = _registry.number if is_known else -1
        self._nodes: Any = WeakTensorKeyDictionary()
        """The nodes that each parameter had at note(), with results whose backward runs them."""
        self._hooks: Any = WeakTensorKeyDictionary()
        """The handles of the gradient hooks, by parameter."""

    def note(self) -> None:
        """Records the parameters' nodes before the module moves, because a move replaces them.

        A move without note() before it loses the averaging without an error.
        """
        if self._wrappers_noted == _registry.number:
            return
        parameters = [param for param in self._module.parameters() if param.is_leaf]
        parameters = [e for e in parameters if e.is_floating_point() or e.is_complex()]
        with as_plain(), torch.enable_grad(), torch.inference_mode(False):
            for param in parameters:
                is_trained = param.requires_grad  # a frozen parameter may be trained later
                try:
                    param.requires_grad_()
                    self._record_node(param)
                finally:
                    param.requires_grad_(is_trained)
            if _registry.number:
                self._register_hooks(parameters)
        self._wrappers_noted = _registry.number

    def _record_node(self, parameter: nn.Parameter) -> None:
        """Records a parameter's current node, which a reducer may have hooked."""
        known = self._nodes.setdefault(parameter, [])
        node = get_gradient_edge(parameter).node
        if all(other is not node for other, _ in known):
            result: Any = _NodeLink.apply(parameter)  # type: ignore[no-untyped-call]
            known.append((node, result))

    def forget_replaced(self) -> None:
        """Forgets parameters that are no longer in the module; their nodes keep them alive."""
        own = {id(param) for param in self._module.parameters()}
        for known in (self._nodes, self._hooks):
            for param in [param for param in known if id(param) not in own]:
                del known[param]

    def _trained(self) -> Iterator[nn.Parameter]:
        return (param for param in self._module.parameters() if param.requires_grad)

    def check(self, *, steps: bool) -> None:
        """Checks a use of the module if it is in a DistributedDataParallel's forward.

        Raises NotImplementedError in three cases. auto(step=True) steps the module in the backward,
        before its gradients are averaged. With gradient_as_bucket_view=True, gradients must remain
        views of buckets, but a move gives them other memory. With find_unused_parameters=True, the
        wrapper searches the graph for the parameters' nodes, which moves have replaced.
        """
        wrapper = active_data_parallel()
        if wrapper is None or not (averaged := self._averaged_by(wrapper)):
            return
        if steps:
            raise NotImplementedError(
                f"module {self._name!r}: auto(step=True) steps with the gradients of this rank,"
                " before DistributedDataParallel has averaged them. Use auto() without step=True,"
                " and call optimizer.step()."
            )
        if wrapper.gradient_as_bucket_view:
            raise NotImplementedError(
                f"module {self._name!r}: its gradients are moved between host and device, but"
                " DistributedDataParallel(gradient_as_bucket_view=True) needs them in its buckets."
                " Use gradient_as_bucket_view=False."
            )
        searches_graph = wrapper.find_unused_parameters and not wrapper.static_graph
        if searches_graph and self._has_other_nodes(averaged):
            raise NotImplementedError(
                f"module {self._name!r}: DistributedDataParallel(find_unused_parameters=True) would"
                " treat its parameters as unused, because they have moved between host and device."
                " Use find_unused_parameters=False."
            )
        self._add_to(wrapper, averaged)

    def _has_other_nodes(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether a parameter's current node was not recorded."""
        with as_plain(), torch.enable_grad():
            return any(
                all(node is not get_gradient_edge(param).node for node, _ in self._nodes[param])
                for param in parameters
                if param in self._nodes
            )

    def _averaged_by(self, wrapper: DistributedDataParallel) -> list[nn.Parameter]:
        """The module's trained parameters that the wrapper does not ignore."""
        averaged = _averaged_ids(wrapper)
        return [param for param in self._trained() if id(param) in averaged]

    def _add_to(self, wrapper: DistributedDataParallel, averaged: Iterable[nn.Parameter]) -> None:
        if wrapper not in _members:
            _members[wrapper] = []
            wrapper.register_forward_pre_hook(_before_forward)
        members = _members[wrapper]
        if not any(member is self for member in members):
            for member in members:
                self._replace(member)
            members.append(self)
        self._register_hooks(averaged)

    def _replace(self, replaced: Averaging) -> None:
        """Moves the records and hooks of an earlier module's parameters to this module."""
        for param in self._module.parameters():
            if param in replaced._hooks:
                replaced._hooks.pop(param).remove()
            if param in replaced._nodes:
                known = self._nodes.setdefault(param, [])
                known += replaced._nodes.pop(param)

    def _register_hooks(self, parameters: Iterable[nn.Parameter]) -> None:
        """Registers gradient hooks, which run after all other hooks of the parameters."""
        run_earlier = weak_call(self._run_earlier_nodes)
        with as_plain():
            for param in parameters:
                if param not in self._hooks:
                    if not param.requires_grad:
                        continue
                    hook = param.register_post_accumulate_grad_hook(run_earlier)  # type: ignore[no-untyped-call]
                    self._hooks[param] = hook
                hooks: Any = gradient_hooks(param)[1]
                if next(reversed(hooks)) != self._hooks[param].id:
                    hooks.move_to_end(self._hooks[param].id)

    def _run_earlier_nodes(self, parameter: Tensor) -> None:
        """Runs the earlier nodes of a parameter after its current node accumulated a gradient."""
        if parameter not in self._nodes:
            return
        earlier = [result for node, result in self._nodes[parameter] if node is not current_node()]
        if not earlier:  # no move has replaced the node that DistributedDataParallel has hooked
            return
        # The parameter's hooks have run for this gradient, and must not run again.
        kinds: list[Any] = [hooks for hooks in gradient_hooks(parameter) if hooks]
        kept = [dict(hooks) for hooks in kinds]
        try:
            for hooks in kinds:
                hooks.clear()
            for result in earlier:
                result.backward(torch.ones_like(result), retain_graph=True)
        finally:
            for hooks, removed in zip(kinds, kept, strict=True):
                hooks.update(removed)

    @property
    def host_parameters(self) -> list[nn.Parameter]:
        """Trained parameters that are not on the module's device now."""
        return [param for param in self._trained() if param.device != self._device]

    @contextmanager
    def with_device_data(self) -> Iterator[None]:
        """Replaces `data` of host parameters by device tensors of one element within the block."""
        host_parameters = self.host_parameters
        host_data = [param.data for param in host_parameters]
        try:
            for param in host_parameters:
                param.data = param.new_empty((), device=self._device).expand(param.shape)
            yield
        finally:
            for param, data in zip(host_parameters, host_data, strict=True):
                param.data = data


def _before_forward(wrapper: nn.Module, _: object) -> None:
    """Prepares the forward of a DistributedDataParallel with offloaded modules.

    In the forward after the first backward, the wrapper allocates its buckets on the parameters'
    device. Parameters on the host therefore appear on the module's device during that allocation.
    Raises NotImplementedError if the wrapper would broadcast host buffers, or allocate buckets on
    the host.
    """
    assert isinstance(wrapper, DistributedDataParallel)
    if (members := _members.get(wrapper)) is None:  # a copy of a wrapper
        return
    sent = wrapper.modules_buffers if wrapper.will_sync_module_buffers() else ()  # type: ignore[no-untyped-call]
    if wrapper.device.type != "cpu" and any(buffer.is_cpu for buffer in sent):
        raise NotImplementedError(
            "DistributedDataParallel cannot broadcast buffers in host memory. Set"
            " broadcast_buffers=False, or run the forward within swapper.use() of all offloaded"
            " modules that have buffers."
        )
    if wrapper in _placed or not torch.is_grad_enabled():
        return
    if allows_uneven_inputs(wrapper):
        # join() first all-reduces the number of active ranks. The rebuild of the buckets also
        # communicates, so this hook must not rebuild them before that all-reduce.
        if any(member.host_parameters for member in members):
            raise NotImplementedError(
                "DistributedDataParallel.join() allocates gradients on the parameters' device in"
                " its second forward, but some parameters are in host memory. Run the second"
                " forward within swapper.use() of all modules."
            )
        return
    with as_plain(), ExitStack() as places:
        for member in members:
            places.enter_context(member.with_device_data())
        if rebuild_buckets(wrapper):
            _placed.add(wrapper)

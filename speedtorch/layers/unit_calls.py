"""UnitCalls: forwards of a unit's module, operations on its tensors, and graphs of their results.

Autograd numbers its nodes as it makes them, and a backward runs the ready node of the highest
number first, so that the nodes of one call run one after another.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from speedtorch.layers.data_parallel import Averaging
from speedtorch.layers.module_hook import ModuleHook, weak_call
from speedtorch.layers.state_tensors import within_frozen
from speedtorch.layers.transfers import Memory
from speedtorch.layers.unit_packs import UnitPacks, host_copy
from speedtorch.layers.unit_use import UnitUse
from speedtorch.torch_internals import (
    base_of,
    buffers_of,
    next_node_number,
    number_of_node,
    tree_leaves,
    tree_map,
)

__all__ = ["Caller", "UnitCalls"]

U = TypeVar("U")
U_contra = TypeVar("U_contra", contravariant=True)


class Caller(Protocol[U_contra]):
    """Loads units as the program reaches them, and knows in which order it does."""

    def using(self, unit: U_contra) -> AbstractContextManager[None]:
        """The unit is on the device within, for one operation of the program."""

    def is_nested(self, unit: U_contra) -> bool:
        """Whether a call of another unit is under way."""

    def reaches(self, unit: U_contra, *, nested: bool) -> None:
        """A backward reaches a result of a unit; `nested`: of a call within another unit's."""

    def end_failed(self) -> None:
        """Ends uses by a backward that has failed."""

    def next_use(self, unit: U_contra, *, state: bool) -> float:
        """In how many calls a unit is used next, or its state; inf: unknown."""


def _nodes_since(begun: int, results: Iterable[Tensor]) -> dict[Node, bool]:
    """The nodes of results since a number of autograd's, and whether each is a result's last one.

    A view has its own node and that of its base, which is the last that a backward reaches. A
    change in place of the view, or of its base, replaces the first in the graph, not the second.
    """
    found: dict[Node, bool] = {}
    for each in results:
        last = None if (base := base_of(each)) is None else base.grad_fn
        for node in (last, each.grad_fn):
            if node is not None and number_of_node(node) >= begun:
                is_last = last is None or number_of_node(last) < begun or node is last
                found[node] = found.get(node, False) or is_last
    return found


class UnitCalls(Generic[U]):
    """Hooks of a unit's module, and what AccessTracker reports of its tensors (see Tracking).

    Attributes:
        open_results: results with a graph that no backward has reached.
        has_graph: whether a graph may need the unit's memory, as far as is known.
        gives_views: whether its module has returned views of its tensors.
        has_views: whether the program may have views of its tensors, taken since it was evicted.
    """

    def __init__(
        self,
        unit: U,
        module: nn.Module,
        packs: UnitPacks,
        use: UnitUse,
        averaging: Averaging,
        before_gradients: Callable[[U], object],
    ) -> None:
        self._ref, self._module, self.device = weakref.ref(unit), module, averaging.device
        self._packs, self._use, self._averaging = packs, use, averaging
        self._before_gradients = before_gradients
        self._name = averaging.name
        self.open_results = 0
        self.gives_views = self.has_views = self.has_graph = False
        self._caller: Caller[U] | None = None
        self._begun: list[int] = []
        """The number of autograd's next node when each forward began."""
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._hooks: list[RemovableHandle] = []
        self._forward_hook = ModuleHook(weak_call(self._ends))
        self._node_hook = weak_call(self._before_backward)

    @property
    def _unit(self) -> U:
        unit = self._ref()
        assert unit is not None  # which owns this
        return unit

    def register(self) -> None:
        """Hooks the beginning of the module's forward."""
        hook = ModuleHook(weak_call(self._begins))
        self._hooks.append(self._module.register_forward_pre_hook(hook, prepend=True))

    def watch(self) -> None:
        """Hooks the end of forwards of the module, and of modules within that have buffers."""
        for each in self._module.modules():
            if each in self._watched or (each is not self._module and not buffers_of(each)):
                continue
            self._watched.add(each)
            # Also after a forward that has failed half-way.
            self._hooks.append(each.register_forward_hook(self._forward_hook, always_call=True))
            self._use.note_buffers()

    def remove(self) -> None:
        """Removes all hooks."""
        for each in self._hooks:
            each.remove()

    def follow(self, caller: Caller[U] | None) -> None:
        """The caller loads the unit as the program reaches it; None ends that."""
        self._caller = caller

    @property
    def comes_by_itself(self) -> bool:
        """Whether there is a Caller."""
        return self._caller is not None

    @contextmanager
    def operation(self) -> Iterator[Callable[[Any], Any]]:
        """See Tracking."""
        assert self._caller is not None
        with self._caller.using(self._unit):
            self._use.note()
            yield partial(self._given, next_node_number())

    def note_access(self, *, is_counted: bool) -> None:
        """See Tracking: a tensor is used outside of any use."""
        self._use.note()
        if not is_counted:
            self._use.touch()

    def note_result(self, result: Tensor) -> None:
        """See Tracking."""
        self.has_views = self.has_views or self.is_view(result)

    def host_copy(self, tensor: Tensor) -> Tensor | None:
        """See Tracking; tensors on the device share one storage, whatever their dtypes."""
        found = host_copy(tensor, self._packs.on_host())
        return host_copy(tensor, self._packs.on_host(state=True)) if found is None else found

    def note_evicted(self) -> None:
        """Says that the unit has been evicted, and its views have no memory."""
        self.has_views = False
        self.has_graph = self.has_graph and self._packs.is_held

    def forget_results(self) -> None:
        """Says that no backward is to come."""
        self.open_results = 0

    def is_view(self, tensor: Tensor) -> bool:
        """Whether it shares the memory of parameters and buffers on the device."""
        return any(map(self._packs.own.slab.has, within_frozen({"": tensor}).values()))

    def _is_trained_view(self, each: object) -> bool:
        return isinstance(each, Tensor) and each.requires_grad and self.is_view(each)

    def _begins(self, module: nn.Module, args: object) -> None:
        """A forward of the module begins."""
        self._begun.append(next_node_number())
        self._averaging.check(steps=False)

    def _ends(self, module: nn.Module, args: object, output: object) -> object:
        """A forward ends; returns what torch returns instead of the output."""
        self._use.note()
        if module is not self._module:
            return None
        return self._given(self._begun.pop() if self._begun else 0, output)

    def _given(self, begun: int, output: Any) -> Any:
        """Returns the result of a call for the program, and hooks the nodes made since `begun`.

        With a Caller trained tensors of the unit are replaced by copies. Older nodes are of tensors
        that the call was given.
        """
        if self._packs.memory is None:
            return output
        is_container = isinstance(output, Tensor | list | tuple | dict)
        is_record = not is_container and hasattr(output, "__dict__")
        given = dict(vars(output)) if is_record else output
        may_leave = self.comes_by_itself and torch.is_grad_enabled()
        if may_leave and any(map(self._is_trained_view, tree_leaves(given))):
            # Torch makes the graph of a view anew if its base has changed, as by an eviction.
            given = tree_map(lambda e: e.clone() if self._is_trained_view(e) else e, given)
            if is_record:
                output = copy.copy(output)
                vars(output).update(given)
            else:
                output = given
        results = [each for each in tree_leaves(given) if isinstance(each, Tensor)]
        if any(map(self.is_view, results)):
            self.gives_views = True
        nodes = _nodes_since(begun, results)
        is_nested = bool(nodes) and self._caller is not None and self._caller.is_nested(self._unit)
        for node, is_last in nodes.items():
            self.has_graph = self.has_graph or is_last
            self.open_results += is_last
            hook = partial(self._node_hook, self._packs.memory, is_last, is_nested)
            node.register_prehook(hook)
        return output

    def _before_backward(self, memory: Memory, is_last: bool, is_nested: bool, _: object) -> None:
        """A backward reaches a node of a result, and is about to make gradients."""
        self._use.note()
        if memory is Memory.DEVICE:
            self.open_results -= is_last
            if self._caller is not None:
                self._caller.reaches(self._unit, nested=is_nested)
            else:
                self._before_gradients(self._unit)
        if self._packs.memory is not memory:
            there = {Memory.HOST: "evicted", Memory.DEVICE: "loaded", None: "half moved"}
            raise RuntimeError(
                f"unit {self._name!r}: a backward reached it while it is"
                f" {there[self._packs.memory]}, and its forward ran while it was {there[memory]}:"
                f" {'load' if memory is Memory.DEVICE else 'evict'}() it before the backward"
            )

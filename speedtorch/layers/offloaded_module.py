"""OffloadedModule: a module with its parameters, buffers, gradients and optimizer state."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from speedtorch.layers.access_tracker import AccessTracker, untracked
from speedtorch.layers.data_parallel import Averaging
from speedtorch.layers.flat_buffer import Memory
from speedtorch.layers.module_groups import ModuleChanges, ModuleGroups, host_copy
from speedtorch.layers.module_hook import ModuleHook, weak_call
from speedtorch.layers.module_tensors import ModuleTensors
from speedtorch.layers.tensor_group import TensorGroup
from speedtorch.layers.transfer_stats import TransferStats
from speedtorch.optim.wrappers import optimizers_within
from speedtorch.torch_internals import (
    base_of,
    buffers_of,
    next_node_number,
    number_of_node,
    tree_leaves,
    tree_map,
)

__all__ = ["AutoLoader", "OffloadedModule", "exact_device"]


class AutoLoader(Protocol):
    """Loads modules when the program reaches them, and records their order of use."""

    def using(self, module: OffloadedModule) -> AbstractContextManager[None]:
        """Context manager that keeps the module on the device for one operation of the program."""

    def is_nested(self, module: OffloadedModule) -> bool:
        """Whether a call of another module is running."""

    def reaches(self, module: OffloadedModule, *, nested: bool) -> None:
        """Notes that a backward reaches a result of a module.

        `nested`: the result belongs to a call within another module's call.
        """

    def end_failed(self) -> None:
        """Ends the uses of failed forwards and backwards."""

    def next_use(self, module: OffloadedModule, *, state: bool) -> float:
        """Number of calls until the next use of a module or its state; inf: unknown."""


def _nodes_since(begun: int, results: Iterable[Tensor]) -> dict[Node, bool]:
    """Autograd nodes of results made since node number `begun`, and whether each is a last node.

    A view has its own node and its base's node; a backward reaches the base's node last. An
    in-place change of the view or its base replaces the view's node, but not the base's node.
    """
    found: dict[Node, bool] = {}
    for result in results:
        last = None if (base := base_of(result)) is None else base.grad_fn
        for node in (last, result.grad_fn):
            if node is not None and number_of_node(node) >= begun:
                is_last = last is None or number_of_node(last) < begun or node is last
                found[node] = found.get(node, False) or is_last
    return found


class OffloadedModule:
    """A module with its optimizer state, in host memory or on the device.

    A new object is evicted. An evicted module consists of ordinary CPU tensors. Parameter objects,
    hooks, requires_grad and param_groups remain the same. Gradients and tensors of
    `optimizer.state` move with the module, including tensors created later. 0-dim tensors that
    torch keeps on the CPU (`step`) remain there. Tied tensors are stored once and remain tied.

    Only data that may have changed is written back: gradients, buffers after a call of a module
    with buffers, data changed by optimizer steps, and tensors whose version has changed. Call
    `changes.note_step()` after an optimizer step, and `changes.touch()` after other changes through
    `parameter.data`, which change no version.

    The constructor and methods that move the module raise TypeError or ValueError for a tensor that
    cannot be moved. Too little host memory for new tensors raises MemoryError, and too little
    device memory raises RuntimeError (torch.OutOfMemoryError). After an error the module remains
    where it was, except that prefetched tensors may have been loaded.

    `before_gradients` is called with this object when a backward reaches the module and there is no
    AutoLoader.

    Attributes:
        tensors: the current tensors by name.
        changes: what may have changed since it was copied.
        groups: the memory of the tensors.
        averaging: lets DistributedDataParallel average the gradients.
        open_results: number of results with a graph that no backward has reached.
        has_graph: whether a known autograd graph may need the module's memory.
        has_views: whether the program may hold views that it has got since the last eviction.
    """

    def __init__(
        self,
        module: nn.Module,
        *optimizers: Optimizer,
        device: torch.device | str,
        name: str = "module",
        traffic: TransferStats | None = None,
        before_gradients: Callable[[OffloadedModule], object] = lambda _: None,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"module: expected an nn.Module, got {type(module).__name__}")
        self.device = exact_device(device)
        self.module, self.name, given = module, name, optimizers_within(optimizers)
        own, gradients, state = (TensorGroup(self.device, traffic) for _ in range(3))
        self.tensors = ModuleTensors(module, given, name, state, weak_call(self._watch))
        self.changes = ModuleChanges(self.device, self.tensors)
        self.groups = ModuleGroups((own, gradients, state), self.tensors, self.changes)
        self.averaging = Averaging(name, module, self.device)
        self.open_results = 0
        self.has_views = self.has_graph = False
        self._auto_loader: AutoLoader | None = None
        self._before_gradients = before_gradients
        self._forward_starts: list[int] = []
        """Autograd's next node number at the begin of each running forward."""
        self._tracker = AccessTracker(self)
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._hooks: list[RemovableHandle] = []
        self._forward_hook, begins, ends_failed, saved = (
            ModuleHook(weak_call(method))
            for method in (
                self._after_forward,
                self._before_forward,
                self._before_state_dict,
                self.groups.save_on_host,
            )
        )
        self._node_hook = weak_call(self._before_backward)
        try:
            self.evict()
        except BaseException:
            self.tensors.disown()
            raise
        self._hooks += [
            module.register_forward_pre_hook(begins, prepend=True),
            module.register_state_dict_pre_hook(ends_failed),  # type: ignore[no-untyped-call]
            module.register_state_dict_post_hook(saved),  # type: ignore[no-untyped-call]
        ]

    def prefetch(self, *, state: bool = True) -> None:
        """Starts copying the module to the device; `state` includes the optimizer state.

        The tensors remain on the host until load(), which copies later changes again.
        """
        self._move(TensorGroup.prefetch, state=state)
        self.track()

    def load(self, *, state: bool = True) -> None:
        """Loads the module to the device, unless it is loaded already.

        Later work on the current stream waits for the copy. A forward and a backward do not need
        the optimizer state.
        """
        self._move(TensorGroup.load, state=state)

    def _move(self, call: Callable[..., None], *, state: bool) -> None:
        self._tracker.stop()
        self.averaging.note()
        try:
            self.groups.move_to_device(call, state=state)
        except BaseException:
            self.track()
            raise

    def evict(self, *, search: bool = True) -> int:
        """Copies changes to the host, frees the device memory, and returns the freed bytes.

        The result is 0 if the module had no device memory. Views that the search finds keep that
        memory; see held_by().
        `search` is the same as in TensorGroup.evict, for parameters and buffers.
        """
        self._tracker.stop()
        self.averaging.note()
        freed = self.groups.evict(search=search)
        self.has_views = False
        self.has_graph = self.has_graph and any(g.buffer.is_held for g in self.groups.all)
        self.track()
        return freed

    def evict_state(self) -> int:
        """Evicts only the optimizer state, and returns the freed bytes.

        The module can then be used, but not stepped.
        """
        self._tracker.stop()
        return self.groups.evict(only_state=True)

    def begin_use(self) -> None:
        """Orders the current stream behind earlier uses, and stops tracking the tensors."""
        self.changes.begin_use()
        self._tracker.stop()

    def end_use(self) -> None:
        """Joins the streams of the use, tracks the tensors again, and notes the end of the use."""
        self.changes.join_streams()
        self.track()
        self.changes.end_use()

    @untracked
    def track(self) -> None:
        """Tracks operations on the module's tensors until its next use.

        Such operations count as changes of a loaded module. An AutoLoader loads an evicted one.
        """
        if self.groups.device_bytes:
            self._tracker.start(self.tensors.current.all_tensors())
        else:
            self._tracker.start(self.tensors.current.own.values() if self.loads_on_use else ())

    def set_auto_loader(self, auto_loader: AutoLoader | None) -> None:
        """Sets the AutoLoader that loads the module for each use; None removes it."""
        self._auto_loader = auto_loader
        if not self.groups.device_bytes:  # loaded tensors are tracked already, unless in use
            self.track()

    @property
    def loads_on_use(self) -> bool:
        """Whether there is an AutoLoader."""
        return self._auto_loader is not None

    @contextmanager
    def operation(self) -> Iterator[Callable[[Any], Any]]:
        """See TrackedOwner."""
        assert self._auto_loader is not None
        with self._auto_loader.using(self):
            self.changes.note_use()
            yield partial(self._finish_call, next_node_number())

    def note_access(self, *, is_counted: bool) -> None:
        """See TrackedOwner: notes that a tensor is accessed outside any use."""
        self.changes.note_use()
        if not is_counted:
            self.changes.touch()

    def note_result(self, result: Tensor) -> None:
        """See TrackedOwner."""
        self.has_views = self.has_views or self.groups.is_view(result)

    def host_copy(self, tensor: Tensor) -> Tensor | None:
        """See TrackedOwner; the device tensors share one storage, whatever their dtypes."""
        found = host_copy(tensor, self.groups.on_host())
        return host_copy(tensor, self.groups.on_host(state=True)) if found is None else found

    def forget_results(self) -> None:
        """Notes that no backward of the open results follows."""
        self.open_results = 0

    def _watch(self) -> None:
        """Hooks the forward of the module, and of submodules with buffers, which may change.

        Called after tensors were replaced, which may belong to new submodules.
        """
        for module in self.module.modules():
            if module in self._watched or (module is not self.module and not buffers_of(module)):
                continue
            self._watched.add(module)
            # always_call: a failed forward may have changed buffers.
            self._hooks.append(module.register_forward_hook(self._forward_hook, always_call=True))
            self.changes.note_use()
        self.averaging.forget_replaced()

    def _before_forward(self, module: nn.Module, args: object) -> None:
        """Hook before a forward of the module."""
        self._forward_starts.append(next_node_number())
        self.averaging.check(steps=False)

    def _before_state_dict(self, *_: object) -> None:
        """Hook before state_dict(), which else misses changes since a failed backward."""
        if self._auto_loader is not None:
            self._auto_loader.end_failed()

    def _after_forward(self, module: nn.Module, args: object, output: object) -> object:
        """Hook after a forward of the module, or of a submodule with buffers.

        Returns the replacement for the output; None: no replacement.
        """
        self.changes.note_use()
        if module is not self.module:
            return None
        return self._finish_call(self._forward_starts.pop() if self._forward_starts else 0, output)

    def _finish_call(self, begun: int, output: Any) -> Any:
        """Returns the output for the program, for a call that began at node number `begun`.

        Under `auto`, trained tensors of the module are replaced by copies. A result counts as the
        module's if autograd made its node during the call, because a module may return its inputs.
        Autograd numbers nodes in creation order, and a backward runs the ready node with the
        highest number first. The nodes of one call therefore run one after another.
        """
        if (memory := self.groups.own.memory) is None:
            return output
        is_container = isinstance(output, Tensor | list | tuple | dict)
        is_record = not is_container and hasattr(output, "__dict__")
        content = dict(vars(output)) if is_record else output
        may_be_evicted = self.loads_on_use and torch.is_grad_enabled()
        if may_be_evicted and any(map(self._is_trained_view, tree_leaves(content))):
            # Torch rebuilds the graph of a view after its base has changed, such as by an eviction.
            content = tree_map(lambda e: e.clone() if self._is_trained_view(e) else e, content)
            if is_record:
                output = copy.copy(output)
                vars(output).update(content)
            else:
                output = content
        results = [leaf for leaf in tree_leaves(content) if isinstance(leaf, Tensor)]
        if any(map(self.groups.is_view, results)):
            self.has_views = True
        nodes = _nodes_since(begun, results)
        loader = self._auto_loader
        is_nested = bool(nodes) and loader is not None and loader.is_nested(self)
        for node, is_last in nodes.items():
            self.has_graph = self.has_graph or is_last
            self.open_results += is_last
            node.register_prehook(partial(self._node_hook, memory, is_last, is_nested))
        return output

    def _is_trained_view(self, value: object) -> bool:
        return isinstance(value, Tensor) and value.requires_grad and self.groups.is_view(value)

    def _before_backward(self, memory: Memory, is_last: bool, is_nested: bool, _: object) -> None:
        """Hook before a backward runs a node of a result, before gradients are created.

        Raises RuntimeError if the module is in another memory than during its forward.
        """
        self.changes.note_use()
        if memory is Memory.DEVICE:
            self.open_results -= is_last
            if self._auto_loader is not None:
                self._auto_loader.reaches(self, nested=is_nested)
            else:
                self._before_gradients(self)
        if (now := self.groups.own.memory) is not memory:
            states = {Memory.HOST: "evicted", Memory.DEVICE: "loaded", None: "partly moved"}
            remedy = "use() around" if memory is Memory.DEVICE else "evict() before"
            raise RuntimeError(
                f"module {self.name!r}: its forward ran while it was {states[memory]}, and a"
                f" backward reached it while it is {states[now]}. Call {remedy} the backward."
            )

    def close(self) -> None:
        """Evicts the module and removes its hooks; another module may then own its tensors."""
        self._auto_loader = None
        self.evict()
        for hook in self._hooks:
            hook.remove()
        self.tensors.disown()


def exact_device(device: torch.device | str) -> torch.device:
    """Returns the device with its index: "cuda" becomes the current GPU.

    Raises RuntimeError if the device is a GPU and there is none, and ValueError for other devices.
    """
    found = torch.device(device)
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected 'cuda' or 'cpu', got {str(device)!r}")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"device={str(device)!r} needs a GPU, and torch finds none.")
    is_current = found.type == "cuda" and found.index is None
    return torch.device("cuda", torch.cuda.current_device()) if is_current else found

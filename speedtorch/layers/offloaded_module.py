"""OffloadedModule: a module with its parameters, buffers, gradients and optimizer state.

An offloaded module has three tensor groups: parameters and buffers, gradients, and optimizer state.
A forward therefore loads no state, and gradients are not loaded after the program dropped them.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from speedtorch.layers.access_tracker import AccessTracker, is_plain_tensor
from speedtorch.layers.data_parallel import Averaging
from speedtorch.layers.flat_buffer import Memory
from speedtorch.layers.module_hook import ModuleHook, weak_call
from speedtorch.layers.offloaded_parameters import follow_inner
from speedtorch.layers.state_tensors import TensorIndex, is_cpu_step, within_frozen, wrappers_in
from speedtorch.layers.tensor_group import Members, TensorGroup
from speedtorch.layers.transfer_stats import TransferStats
from speedtorch.optim.wrappers import optimizers_within
from speedtorch.step.trained_rows import rows_of_parameter
from speedtorch.torch_internals import (
    WeakTensorKeyDictionary,
    as_plain,
    base_of,
    buffers_of,
    current_stream,
    next_node_number,
    number_of_node,
    tree_leaves,
    tree_map,
    version_of,
)

__all__ = ["AutoLoader", "OffloadedModule", "exact_device", "host_copy", "is_offloaded"]

_Part: TypeAlias = tuple[TensorGroup, Members]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _untracked(method: _Method) -> _Method:
    """Runs a method without tracking its accesses to tensors as uses by the program."""

    @wraps(method)
    def untracked_method(self: OffloadedModule, *args: Any, **kwargs: Any) -> Any:
        """Calls the method while the tensors behave as plain tensors."""
        with as_plain():
            return method(self, *args, **kwargs)

    return untracked_method  # type: ignore[return-value]


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
        """Ends the uses of a failed backward."""

    def next_use(self, module: OffloadedModule, *, state: bool) -> float:
        """Number of calls until the next use of a module or its state; inf: unknown."""


_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The offloaded module of each tensor, as a weakref: a tensor belongs to at most one."""


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
    with buffers, data changed by optimizer steps, and tensors whose version has changed. Changes
    through `parameter.data` change no version. Call `touch()` after them, unless an optimizer step
    makes or follows them.

    On a GPU, prefetch(), load() and write_back() copy on side streams. Methods that move the module
    raise TypeError or ValueError for a tensor that cannot be moved, MemoryError if the host has too
    little memory for new tensors, and RuntimeError (torch.OutOfMemoryError) if the device has too
    little. The module then remains where it was, or its prefetched tensors are on the device.

    If you keep a view of a loaded module's tensor (`parameter.detach()`), the view keeps the device
    memory of the whole module and the values there; held_by() names the view. Tensors that autograd
    saved have no memory while the module is evicted, and a backward then raises RuntimeError.

    The constructor raises the same errors, and ValueError for a tensor of another module. Modules
    that share a parameter must be offloaded as one (nn.ModuleList). `before_gradients` is called
    with this object when a backward reaches the module and there is no AutoLoader.

    Attributes:
        open_results: number of results with a graph that no backward has reached.
        has_graph: whether a known autograd graph may need the module's memory.
        returned_views: whether the module has returned views of its own tensors.
        has_views: whether the program may hold views that it made since the last eviction.
        was_stepped: whether the module was stepped the last time it was on the device.
        created_state_bytes: bytes of optimizer state that steps created on the device, as counted
            by the last other_bytes().
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
        if self.device.type == "meta":
            raise ValueError("device: expected a device with memory, such as 'cuda', got 'meta'")
        self.module, self.optimizers, self.name = module, optimizers_within(optimizers), name
        self._uses = self.open_results = 0
        self.returned_views = self.has_views = self.has_graph = self.was_stepped = False
        self._auto_loader: AutoLoader | None = None
        self._before_gradients = before_gradients
        # All tensors may have changed before. Threads set these flags without reading them.
        self._is_touched = self._is_used = self._is_state_new = True
        self._index: TensorIndex | None = None
        self._stepped: set[str] = set()
        """Names of parameters that a step may have changed."""
        self._copied_versions: list[int] = []
        self._groups = tuple(TensorGroup(self.device, traffic) for _ in range(3))
        self._own, self._gradients, self._state = self._groups
        self._forward_starts: list[int] = []
        """Autograd's next node number at the begin of each running forward."""
        self.averaging = Averaging(name, module, self.device)
        self._tracker = AccessTracker(self)
        self.created_state_bytes = 0
        self._streams: set[torch.cuda.Stream] = set()
        """Streams that have run the module or used its tensors since _join_streams()."""
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._hooks: list[RemovableHandle] = []
        self._forward_hook, begins, saved = (
            ModuleHook(weak_call(method))
            for method in (self._after_forward, self._before_forward, self._save_on_host)
        )
        self._node_hook = weak_call(self._before_backward)
        self._check_ownership()
        try:
            self.evict()
        except BaseException:
            self._disown()
            raise
        self._hooks += [
            module.register_forward_pre_hook(begins, prepend=True),
            module.register_state_dict_post_hook(saved),  # type: ignore[no-untyped-call]
        ]
        after_step = weak_call(self.note_step)
        self._step_hooks = [o.register_step_post_hook(after_step) for o in self.optimizers]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory, which are also the device bytes of a loaded module."""
        return sum(group.buffer.nbytes for group in self._groups)

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory now, without tensors created there since the load."""
        return sum([group.buffer.device_bytes for group in self._groups])

    @property
    def memory(self) -> Memory | None:
        """Memory of the parameters; None after a failed move, until another move completes it."""
        return self._own.memory

    def is_written_back(self, *, only_state: bool) -> bool:
        """Whether copies of write_back() are done, so evict() or evict_state() need not wait."""
        groups = self._groups[2:] if only_state else self._groups
        return all(group.buffer.write_back_stream.is_done for group in groups)

    def _parts(self) -> tuple[_Part, _Part, _Part]:
        """The groups with their current members: parameters and buffers, gradients, state."""
        found = self._current_index
        # Torch's batch norm changes its statistics without a new version.
        buffers = found.buffers if self._is_used else ()
        is_touched = self._is_touched or self._wrapper_versions() != self._copied_versions
        written = found.own.keys() if is_touched else self._stepped.union(buffers)
        state = found.state.keys() if self._is_state_new else ()
        return (
            (self._own, Members(found.own, written)),
            # Some changes of gradients do not change their version.
            (self._gradients, Members(found.gradients, found.gradients.keys())),
            (self._state, Members(found.state, state)),
        )

    def prefetch(self, *, state: bool = True) -> None:
        """Starts copying the module to the device; `state` includes the optimizer state.

        The tensors remain on the host until load(), which copies later changes again.
        """
        try:
            self._move_to_device(TensorGroup.prefetch, state=state)
        finally:
            self.track()

    def load(self, *, state: bool = True) -> None:
        """Loads the module to the device, unless it is loaded already.

        Later work on the current stream waits for the copy. A forward and a backward do not need
        the optimizer state.
        """
        self._move_to_device(TensorGroup.load, state=state)
        for group in self._groups if state else self._groups[:2]:
            group.buffer.load_stream.join()

    @_untracked
    def _move_to_device(self, call: Callable[..., None], *, state: bool) -> None:
        self._tracker.stop()
        self.averaging.note()
        if not self.device_bytes:  # the load copies all tensors, so host and device are equal
            self.was_stepped = self._is_state_new = False
            self._note_copied()
        empty = [group for group in self._groups if not group.buffer.device_bytes]
        called: list[_Part] = []
        try:
            # The copy of the tensors in _index starts first. While it runs, _parts() checks whether
            # _index still has exactly the module's tensors.
            is_begun = self._index is not None and self._own.begin_load(self._index.own)
            parts = self._parts()
            for group, members in parts if state else parts[:2]:
                called.append((group, members))
                call(group, members, begun=is_begun and group is self._own)
            self._follow_inner()
        except BaseException as error:
            for group in self._groups:  # evict() below must follow copies that have begun
                group.buffer.load_stream.join()
            for group, members in called if isinstance(error, RuntimeError) else ():
                if group in empty:
                    group.evict(members)
            if self._own in empty and self._own.memory is Memory.HOST:
                self._own.buffer.empty()
            self.track()
            raise

    @_untracked
    def write_back(
        self, after: torch.cuda.Event | None = None, *, only_state: bool = False
    ) -> None:
        """Starts copying changes on the device to the host, or only those of the optimizer state.

        The module remains on the device. evict() then waits for these copies, and makes no others
        unless the module changes meanwhile. Only evict() copies gradients. The copies wait for
        `after`, the end of the module's last use; None: for all work queued on the current stream.
        """
        self._join_streams(after)
        (own, members), _, (of_state, state) = self._parts()
        if not only_state:
            own.write_back(members, after)
            if own.memory is Memory.DEVICE:
                self._note_copied()
        of_state.write_back(state, after)
        if of_state.memory is Memory.DEVICE:
            self._is_state_new = False

    @_untracked
    def evict(self, after: torch.cuda.Event | None = None, *, search: bool = True) -> int:
        """Copies changes to the host, frees the device memory, and returns the freed bytes.

        The result is 0 if the module was on the host. Views keep their memory; see held_by().
        `after` is the same as in write_back(). `search` is the same as in TensorGroup.evict, for
        parameters and buffers.
        """
        self._tracker.stop()
        self.averaging.note()
        self._join_streams(after)
        freed, parts = 0, self._parts()[::-1]
        # All copies are queued before the host waits for the first.
        copied = [group.begin_write_back(members) for group, members in parts]
        for (group, members), names in zip(parts, copied, strict=True):
            # Autograd graphs hold views only of parameters and buffers.
            is_searched = search or group is not self._own
            freed += group.evict(members, after, search=is_searched, copied=names)
        self._follow_inner()
        self._is_state_new = self.has_views = False
        self.created_state_bytes = 0
        self._note_copied()
        self.has_graph = self.has_graph and any(group.buffer.is_held for group in self._groups)
        self.track()
        return freed

    def _follow_inner(self) -> None:
        """Updates the device of wrapper tensors to the device of their inner tensors."""
        with torch.inference_mode(False):
            for wrapper in self._current_index.wrappers:
                follow_inner(wrapper)

    @_untracked
    def evict_state(self, after: torch.cuda.Event | None = None) -> int:
        """Evicts only the optimizer state, and returns the freed bytes.

        The module can then be used, but not stepped.
        """
        self._tracker.stop()
        self._join_streams(after)
        *_, (state, members) = self._parts()
        freed = state.evict(members, after)
        self._is_state_new, self.created_state_bytes = False, 0
        return freed

    @_untracked
    def free_gradients(self, after: torch.cuda.Event | None = None) -> None:
        """Frees the device memory of gradients if the program has dropped them all."""
        if self._gradients.buffer.device_bytes and not self._current_index.gradients:
            self._join_streams(after)
            self._gradients.evict(Members({}, ()), after)

    @property
    def state_bytes(self) -> int:
        """Bytes of device memory of the optimizer state, without made_state_bytes."""
        return self._state.buffer.device_bytes

    @property
    @_untracked
    def has_new_tensors(self) -> bool:
        """Whether parameters or buffers were added or renamed since the last eviction.

        Autograd must not save them before an eviction, because they are not in the buffer yet.
        """
        return not self._own.has_all(self._current_index.own)

    def held_by(self) -> list[str]:
        """Descriptions of views that the program holds, which keep device memory allocated."""
        return [view for group in self._groups for view in group.held_by()]

    @_untracked
    def missing_bytes(self, *, state: bool) -> int:
        """Bytes of device memory that load() would allocate."""
        count = 3 if state else 2
        if not any(group.buffer.missing_bytes for group in self._groups[:count]):
            return 0
        return sum(group.missing_bytes(members) for group, members in self._parts()[:count])

    @property
    @_untracked
    def needed_bytes(self) -> int:
        """Device bytes of all current tensors of the module."""
        return sum(group.needed_bytes(members) for group, members in self._parts())

    @_untracked
    def new_bytes(self) -> int:
        """Bytes on the device that evict() would copy now."""
        return sum(group.new_bytes(members) for group, members in self._parts())

    @_untracked
    def other_bytes(self) -> int:
        """Bytes of tensors created on the device since the load, such as gradients and state."""
        own, gradients, self.created_state_bytes = (
            group.other_bytes(members) for group, members in self._parts()
        )
        return own + gradients + self.created_state_bytes

    @_untracked
    def missing_gradients(self) -> int:
        """Bytes of gradients that a backward may create."""
        without = [param for param in self._parameters.values() if param.grad is None]
        return sum(param.nbytes for param in without if param.requires_grad)

    @_untracked
    def without_state(self) -> list[tuple[Optimizer, nn.Parameter]]:
        """Pairs of an optimizer and a parameter for which its next step may create state."""
        return [
            (optimizer, param)
            for optimizer in self.optimizers
            for param in self._parameters.values()
            if param.requires_grad and param not in optimizer.state
        ]

    def _note_copied(self) -> None:
        """Notes that parameters and buffers have not changed since they were copied."""
        self._is_touched = self._is_used = False
        self._stepped = set()
        self._copied_versions = self._wrapper_versions()

    def _wrapper_versions(self) -> list[int]:
        """Versions of wrappers: torch counts a change on the wrapper, not on inner tensors."""
        return [] if self._index is None else list(map(version_of, self._index.wrappers))

    def touch(self) -> None:
        """Notes that any tensor of the module may have changed without a new version."""
        self._is_touched = self._is_state_new = True
        self._uses += 1

    def note_access(self, *, is_counted: bool) -> None:
        """See TrackedOwner: notes that a tensor is accessed outside any use."""
        self.note_use()
        if not is_counted:
            self.touch()

    def note_result(self, result: Tensor) -> None:
        """See TrackedOwner."""
        self.has_views = self.has_views or self.is_view(result)

    def host_copy(self, tensor: Tensor) -> Tensor | None:
        """See TrackedOwner; the device tensors share one storage, whatever their dtypes."""
        found = host_copy(tensor, self.on_host())
        return host_copy(tensor, self.on_host(state=True)) if found is None else found

    def note_use(self) -> None:
        """Notes that the module runs forward or backward, or that a tensor of it is used."""
        self._is_used = True
        self._uses += 1
        if self.device.type == "cuda":
            self._streams.add(current_stream(self.device))

    def begin_use(self) -> None:
        """Stops tracking the module's tensors, and joins the streams of earlier uses."""
        self._tracker.stop()
        self._join_streams()

    def end_use(self) -> None:
        """Joins the streams of the use, and tracks uses of the tensors again.

        An event that the current stream records next is behind all work on the module.
        """
        self._join_streams()
        self.track()

    @_untracked
    def track(self) -> None:
        """Tracks operations on the module's tensors until its next use.

        Such operations count as changes of a loaded module. An AutoLoader loads an evicted one.
        """
        if self.device_bytes:
            self._tracker.start(self._current_index.all_tensors())
        else:
            self._tracker.start(self._current_index.own.values() if self.loads_on_use else ())

    def _join_streams(self, after: torch.cuda.Event | None = None) -> None:
        """Makes the current stream wait for streams of the last use, unless `after` is given."""
        if after is not None or not self._streams:
            return
        current = current_stream(self.device)
        for stream in self._streams:
            if stream is not current:
                # The module ran on that stream: its memory must not be reused before.
                current.wait_stream(stream)
        self._streams.clear()

    @property
    def changes(self) -> int:
        """A count that grows with each use, step, and new version of the module's tensors.

        Outside a use, track() also counts changes of gradients and optimizer state. Moves of the
        module count too.
        """
        own = () if self._index is None else self._index.own.values()
        with as_plain():
            return self._uses + sum(map(version_of, own)) + sum(self._wrapper_versions())

    def set_auto_loader(self, auto_loader: AutoLoader | None) -> None:
        """Sets the AutoLoader that loads the module for each use; None removes it."""
        self._auto_loader = auto_loader
        if not self.device_bytes:  # loaded tensors are tracked already, unless in use
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
            self.note_use()
            yield partial(self._finish_call, next_node_number())

    def _before_forward(self, module: nn.Module, args: object) -> None:
        """Hook before a forward of the module."""
        self._forward_starts.append(next_node_number())
        self.averaging.check(steps=False)

    def _after_forward(self, module: nn.Module, args: object, output: object) -> object:
        """Hook after a forward of the module, or of a submodule with buffers.

        Returns the replacement for the output; None: no replacement.
        """
        self.note_use()
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
        if self.memory is None:
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
        if any(map(self.is_view, results)):
            self.returned_views = True
        nodes = _nodes_since(begun, results)
        loader = self._auto_loader
        is_nested = bool(nodes) and loader is not None and loader.is_nested(self)
        for node, is_last in nodes.items():
            self.has_graph = self.has_graph or is_last
            self.open_results += is_last
            node.register_prehook(partial(self._node_hook, self.memory, is_last, is_nested))
        return output

    def _before_backward(self, memory: Memory, is_last: bool, is_nested: bool, _: object) -> None:
        """Hook before a backward runs a node of a result, before gradients are created.

        Raises RuntimeError if the module is in another memory than during its forward.
        """
        self.note_use()
        if memory is Memory.DEVICE:
            self.open_results -= is_last
            if self._auto_loader is not None:
                self._auto_loader.reaches(self, nested=is_nested)
            else:
                self._before_gradients(self)
        if self.memory is not memory:
            states = {Memory.HOST: "evicted", Memory.DEVICE: "loaded", None: "partly moved"}
            remedy = "use() around" if memory is Memory.DEVICE else "evict() before"
            raise RuntimeError(
                f"module {self.name!r}: its forward ran while it was {states[memory]}, and a"
                f" backward reached it while it is {states[self.memory]}. Call {remedy} it."
            )

    def _save_on_host(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Puts host tensors into state_dict(), which remain readable after an eviction."""
        if self.memory is Memory.HOST:
            return
        on_host = self.on_host()
        # state_dict(keep_vars=True) returns these objects.
        own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        for name, value in state.items():
            if name.startswith(prefix) and isinstance(value, Tensor) and id(value) not in own:
                state[name] = _on_host(value, on_host)

    def is_view(self, tensor: Tensor) -> bool:
        """Whether a tensor shares memory with parameters or buffers on the device."""
        return any(map(self._own.buffer.has, within_frozen({"": tensor}).values()))

    def _is_trained_view(self, value: object) -> bool:
        return isinstance(value, Tensor) and value.requires_grad and self.is_view(value)

    def forget_results(self) -> None:
        """Notes that no backward of the open results follows."""
        self.open_results = 0

    def remove_step_hooks(self) -> None:
        """Removes the step hooks; the caller must call note_step() after each step."""
        for hook in self._step_hooks:
            hook.remove()

    def wait(self) -> None:
        """Waits for the copies that write_back() has started."""
        for group in self._groups:
            group.buffer.write_back_stream.finish()

    @property
    @_untracked
    def has_gradients(self) -> bool:
        """Whether a parameter has a gradient, so that an optimizer step would change the module."""
        return any(param.grad is not None for param in self._parameters.values())

    @_untracked
    def on_host(self, *, state: bool = False) -> dict[int, Tensor]:
        """Host copies of parameters and buffers, or of the state, by device address.

        Writes changes back first, and waits for the copies.
        """
        group, members = self._parts()[2 if state else 0]
        if group.buffer.device_bytes:
            self.write_back()
            self.wait()
        return group.on_host(members)

    @_untracked
    def note_step(self, *_: object) -> None:
        """Notes that an optimizer has stepped the module."""
        self._is_used = self._is_state_new = self.was_stepped = True
        self._uses += 1
        named = self._parameters.items()
        self._stepped |= {n for n, p in named if p.requires_grad or p.grad is not None}

    def close(self) -> None:
        """Evicts the module and removes its hooks; another module may then own its tensors."""
        self._auto_loader = None
        self.evict()
        for hook in (*self._hooks, *self._step_hooks):
            hook.remove()
        self._disown()

    def _check_ownership(self) -> None:
        """Raises if a tensor cannot belong to this module.

        ValueError: it belongs to another one. TypeError: it is an Embedding's or no plain tensor.
        """
        for name, tensor in _tensors_of(self.module):
            if rows_of_parameter(tensor) is not None:
                raise TypeError(
                    f"module {self.name!r}: {name} is a speedtorch.Embedding's weight, which is in"
                    " host memory already. Offload only modules without an Embedding."
                )
            if not is_plain_tensor(tensor) and not is_lazy(tensor):
                kind = type(tensor)
                raise TypeError(
                    f"module {self.name!r}: {name} must be a plain tensor, got"
                    f" {kind.__module__}.{kind.__qualname__}, which a copy of its bytes may not"
                    " reproduce. Keep this module on the device, or offload the whole model with"
                    " TrainingState."
                )
            other = _owner_of(tensor)
            within = () if other is None or other is self else _tensors_of(other.module)
            if other is not None and (names := [its for its, e in within if e is tensor]):
                raise ValueError(
                    f"module {self.name!r}: {name} is also {names[0]} of the offloaded module"
                    f" {other.name!r}. A tensor can be offloaded with one module only. Offload both"
                    " modules as one (nn.ModuleList), or close() the Swapper of the other."
                )

    def _disown(self) -> None:
        """Removes the module as owner of its tensors."""
        for _, tensor in _tensors_of(self.module):
            if _owner_of(tensor) is self:
                del _owners[tensor]

    @property
    def _parameters(self) -> dict[str, nn.Parameter]:
        if self._index is not None and self._index.is_current():
            return self._index.parameters
        return dict(self.module.named_parameters())

    @property
    def _current_index(self) -> TensorIndex:
        """The index of the module's current tensors."""
        if self._index is None or not self._index.is_current():
            self._index = TensorIndex(self.module, self.optimizers, self._is_of_state)
            for tensor in self._index.own.values():
                _owners[tensor] = weakref.ref(self)
            self._watch()
            self.averaging.forget_replaced()
        return self._index

    def _watch(self) -> None:
        """Hooks the forward of the module, and of submodules with buffers, which may change."""
        for module in self.module.modules():
            if module in self._watched or (module is not self.module and not buffers_of(module)):
                continue
            self._watched.add(module)
            # always_call: a failed forward may have changed buffers.
            self._hooks.append(module.register_forward_hook(self._forward_hook, always_call=True))
            self._is_used = True

    def _is_of_state(
        self, optimizer: Optimizer, name: str, parameter: Tensor, key: str, value: Any
    ) -> bool:
        """Whether a value of a parameter's optimizer state moves with the module.

        Raises TypeError for tensors within containers.
        """
        if isinstance(value, Tensor):
            placed = self._state.has_place(f"{key} of {name}", value)
            return placed or not is_cpu_step(optimizer, parameter, key, value)
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
            raise TypeError(
                f"module {self.name!r}: {type(optimizer).__name__} stores a"
                f" {type(value).__name__} of tensors as state {key!r} of {name}. A Swapper needs"
                " separate tensors for each parameter. Use another optimizer."
            )
        return False


def exact_device(device: torch.device | str) -> torch.device:
    """Returns the device with its index: "cuda" becomes the current GPU.

    Raises RuntimeError if the device is a GPU and there is none.
    """
    found = torch.device(device)
    if found.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"device={str(device)!r} needs a GPU, and torch finds none.")
    is_current = found.type == "cuda" and found.index is None
    return torch.device("cuda", torch.cuda.current_device()) if is_current else found


def _owner_of(tensor: Tensor) -> OffloadedModule | None:
    found = _owners.get(tensor)  # type: ignore[no-untyped-call]
    return None if found is None else found()


def is_offloaded(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter or buffer of an offloaded module, of any Swapper."""
    return len(_owners) > 0 and _owner_of(tensor) is not None


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from within_frozen(dict(module.named_parameters())).items()
    yield from within_frozen(dict(module.named_buffers())).items()


def host_copy(tensor: Tensor, on_host: Mapping[int, Tensor]) -> Tensor | None:
    """The host copy of a device tensor in the result of OffloadedModule.on_host(), or None."""
    found = on_host.get(tensor.data_ptr())
    is_like = found is not None and (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
    return found if is_like else None


def _on_host(tensor: Tensor, on_host: Mapping[int, Tensor]) -> Tensor:
    """The host copy of a tensor, also within wrappers; the tensor itself if there is none."""
    if type(tensor) is Tensor and not tensor.requires_grad:
        found = host_copy(tensor, on_host)
        return tensor if found is None else found.detach()
    if tensor.requires_grad or not wrappers_in(tensor):
        return tensor
    names, settings = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: _on_host(getattr(tensor, name), on_host) for name in names}
    made: Any = type(tensor)
    result: Tensor = made.__tensor_unflatten__(inner, settings, tensor.shape, tensor.stride())
    return result

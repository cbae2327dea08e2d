"""A module's parameters and buffers, with gradients and optimizer state, as one that moves.

A unit has three packs: parameters and buffers, their gradients, and what the optimizer keeps of
them. So a forward brings no state to the device, and a unit whose step is done no gradients.
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
from speedtorch.layers.module_hook import ModuleHook, weak_call
from speedtorch.layers.offloaded_parameters import follow_inner
from speedtorch.layers.pack import Members, Pack
from speedtorch.layers.slab import Memory
from speedtorch.layers.state_tensors import TensorIndex, stays_on_cpu, within_frozen, wrappers_in
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

__all__ = ["Caller", "Unit", "exact_device", "host_copy", "is_of_unit"]

_Part: TypeAlias = tuple[Pack, Members]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _untracked(method: _Method) -> _Method:
    """Lets a method look at tracked tensors without being taken for the program."""

    @wraps(method)
    def call(self: Unit, *args: Any, **kwargs: Any) -> Any:
        with as_plain():
            return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]


class Caller(Protocol):
    """Brings units as the program reaches them, and knows in which order it does."""

    def using(self, unit: Unit) -> AbstractContextManager[None]:
        """The unit is on the device within, for one operation of the program."""

    def is_nested(self, unit: Unit) -> bool:
        """Whether a call of another unit is under way."""

    def reaches(self, unit: Unit, *, nested: bool) -> None:
        """A backward reaches a result of a unit; `nested`: of a call within another unit's."""

    def end_failed(self) -> None:
        """Ends uses by a backward that has failed."""

    def next_use(self, unit: Unit, *, state: bool) -> float:
        """In how many calls a unit is used next, or its state; inf: unknown."""


_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The unit of each tensor, as a weakref: it belongs to one at most."""


def _nodes_since(begun: int, results: Iterable[Tensor]) -> dict[Node, bool]:
    """The nodes of results since a number of autograd's, and whether each is a result's last one.

    Of a view they are its own, and the one of its base, which is the last that a backward reaches.
    A change in place of the view, or of its base, replaces the first in the graph, not the second.
    """
    found: dict[Node, bool] = {}
    for each in results:
        last = None if (base := base_of(each)) is None else base.grad_fn
        for node in (last, each.grad_fn):
            if node is not None and number_of_node(node) >= begun:
                is_last = last is None or number_of_node(last) < begun or node is last
                found[node] = found.get(node, False) or is_last
    return found


class Unit:
    """A module and what an optimizer keeps of it: in host memory, or on the device.

    The unit is evicted at first. An evicted unit is ordinary CPU tensors. Parameter objects, their
    hooks, requires_grad and an optimizer's param_groups stay as they are; gradients and the tensors
    of `optimizer.state` move along, those that are made later as well. Tensors without dimensions
    that torch keeps on the CPU (`step`) stay there. Tied tensors are there once, and stay tied.

    Written back is what may have changed: gradients, buffers if a module that has some has been
    called, what a step of the optimizer has changed, and whatever torch has counted a change of.
    Torch counts none of `parameter.data`: say `touch()` after such a change, unless a step of the
    optimizer follows or does it.

    On a GPU bring(), load() and write_back() go beside the current stream. All that moves the unit
    raises TypeError or ValueError for a tensor that cannot be moved, MemoryError if the host has
    too little memory for what came to it, and RuntimeError (torch.OutOfMemoryError) if the device
    has; the unit is where it was then, or what of it was prefetched is on the device.

    A view of a loaded unit's tensor that you keep (`parameter.detach()`) keeps the device memory of
    the whole unit, and the values there; evict() names it. What autograd keeps has no memory while
    the unit is evicted: a backward raises RuntimeError then.

    Making one raises the same errors, and ValueError for a tensor of another unit. Of modules that
    share a parameter make one unit (nn.ModuleList). `before_gradients` is called with the unit
    where a backward reaches it and there is no Caller.

    Attributes:
        open_results: results with a graph that no backward has reached.
        has_graph: whether a graph may need its memory, as far as is known.
        gives_views: whether its module has returned views of its tensors.
        has_views: whether the program may have views of its tensors, taken since it was evicted.
        was_stepped: whether it was stepped when it was on the device last.
        made_state_bytes: of the optimizer's state that steps made on the device, as other_bytes()
            has counted it last.
    """

    def __init__(
        self,
        module: nn.Module,
        *optimizers: Optimizer,
        device: torch.device | str,
        name: str = "unit",
        traffic: TransferStats | None = None,
        before_gradients: Callable[[Unit], object] = lambda _: None,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"module: expected an nn.Module, got {type(module).__name__}")
        self.device = exact_device(device)
        if self.device.type == "meta":
            raise ValueError("device: expected one with memory, as 'cuda' or 'cpu', got 'meta'")
        self.module, self.optimizers, self.name = module, optimizers_within(optimizers), name
        self._uses = self.open_results = 0
        self.gives_views = self.has_views = self.has_graph = self.was_stepped = False
        self._caller: Caller | None = None
        self._before_gradients = before_gradients
        # All that it has may have been changed before. Threads set each flag without reading it.
        self._is_touched = self._is_used = self._is_state_new = True
        self._index: TensorIndex | None = None
        self._stepped: set[str] = set()
        """Parameters that a step may have changed."""
        self._copied_versions: list[int] = []
        self._own, self._gradients, self._state = (Pack(self.device, traffic) for _ in range(3))
        self._packs = self._own, self._gradients, self._state
        self._begun: list[int] = []
        """The number of autograd's next node when each forward began."""
        self.averaging = Averaging(name, module, self.device)
        self._tracker = AccessTracker(self)
        self.made_state_bytes = 0
        self._streams: set[torch.cuda.Stream] = set()
        """Streams that the module ran on, and its tensors were used on, since _join_streams()."""
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._hooks: list[RemovableHandle] = []
        self._forward_hook, begins, saved = (
            ModuleHook(weak_call(each)) for each in (self._ends, self._begins, self._save)
        )
        self._node_hook = weak_call(self._before_backward)
        self._check_alone()
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
        self._step_hooks = [each.register_step_post_hook(after_step) for each in self.optimizers]

    @property
    def nbytes(self) -> int:
        """Bytes of its host memory, and on the device if all of it is there."""
        return sum(pack.slab.nbytes for pack in self._packs)

    @property
    def device_bytes(self) -> int:
        """Bytes of its device memory now, without what came to it there since it was loaded."""
        return sum([pack.slab.device_bytes for pack in self._packs])

    @property
    def memory(self) -> Memory | None:
        """Where its parameters are; None after an error in a move, until another completes it."""
        return self._own.memory

    def is_home(self, *, state_alone: bool) -> bool:
        """Whether evict(), or evict_state(), would wait for no copy that write_back() has begun."""
        packs = self._packs[2:] if state_alone else self._packs
        return all(pack.slab.leaving.is_done for pack in packs)

    def _parts(self) -> tuple[_Part, _Part, _Part]:
        """Its packs and what is in them now: its own, gradients, what the optimizer keeps."""
        found = self._found
        # Torch's batch norm changes its statistics and counts no version.
        buffers = found.buffers if self._is_used else ()
        is_touched = self._is_touched or self._wrapper_versions() != self._copied_versions
        written = found.own.keys() if is_touched else self._stepped.union(buffers)
        state = found.state.keys() if self._is_state_new else ()
        return (
            (self._own, Members(found.own, written)),
            # Torch counts not all changes of gradients.
            (self._gradients, Members(found.gradients, found.gradients.keys())),
            (self._state, Members(found.state, state)),
        )

    def bring(self, *, state: bool = True) -> None:
        """Begins to copy the unit to the device, with the optimizer's state if that is asked for.

        Its tensors stay on the host until load(), which copies what has changed there meanwhile.
        """
        try:
            self._come(Pack.bring, state=state)
        finally:
            self.track()

    def load(self, *, state: bool = True) -> None:
        """Brings the unit to the device, where it stays if it is there.

        What the current stream gets from now on waits for it. A forward and a backward do not need
        the optimizer's state.
        """
        self._come(Pack.load, state=state)
        for pack in self._packs if state else self._packs[:2]:
            pack.slab.coming.join()

    @_untracked
    def _come(self, call: Callable[..., None], *, state: bool) -> None:
        self._tracker.stop()
        self.averaging.note()
        if not self.device_bytes:  # all is on the host, and all is copied
            self.was_stepped = self._is_state_new = False
            self._note_copied()
        empty = [pack for pack in self._packs if not pack.slab.device_bytes]
        called: list[_Part] = []
        try:
            # Even whether the index is current is seen while the copy is on its way.
            is_begun = self._index is not None and self._own.begin(self._index.own)
            parts = self._parts()
            for pack, members in parts if state else parts[:2]:
                called.append((pack, members))
                call(pack, members, begun=is_begun and pack is self._own)
            self._follow_inner()
        except BaseException as error:
            for pack in self._packs:  # some may be on the device already
                pack.slab.coming.join()
            for pack, members in called if isinstance(error, RuntimeError) else ():
                if pack in empty:
                    pack.evict(members)
            if self._own in empty and self._own.memory is Memory.HOST:
                self._own.slab.empty()
            self.track()
            raise

    @_untracked
    def write_back(
        self, after: torch.cuda.Event | None = None, *, state_alone: bool = False
    ) -> None:
        """Begins to copy what is new on the device to the host, or of the optimizer's state alone.

        The unit stays there. evict() then waits for these copies, and makes no others unless the
        unit is changed meanwhile. Gradients are left to evict(). `after` is the end of the unit's
        last use; None: after all that the current stream has by now.
        """
        self._join_streams(after)
        (own, members), _, (of_state, state) = self._parts()
        if not state_alone:
            own.write_back(members, after)
            if own.memory is Memory.DEVICE:
                self._note_copied()
        of_state.write_back(state, after)
        if of_state.memory is Memory.DEVICE:
            self._is_state_new = False

    @_untracked
    def evict(self, after: torch.cuda.Event | None = None, *, search: bool = True) -> int:
        """Brings the unit to the host, and what is new of it; returns the bytes of device memory.

        These are free then. 0 if it was on the host. Memory that views keep is not; see held_by().
        `after` is as of write_back(), `search` as of Pack.evict, of parameters and buffers.
        """
        self._tracker.stop()
        self.averaging.note()
        self._join_streams(after)
        freed, parts = 0, self._parts()[::-1]
        # All are on their way before the first is waited for.
        copied = [pack.begin_back(members) for pack, members in parts]
        for (pack, members), names in zip(parts, copied, strict=True):
            # Graphs have views of its own tensors alone.
            is_searched = search or pack is not self._own
            freed += pack.evict(members, after, search=is_searched, copied=names)
        self._follow_inner()
        self._is_state_new = self.has_views = False
        self.made_state_bytes = 0
        self._note_copied()
        self.has_graph = self.has_graph and any(pack.slab.is_held for pack in self._packs)
        self.track()
        return freed

    def _follow_inner(self) -> None:
        """Lets wrappers be seen where the tensors within have moved."""
        with torch.inference_mode(False):
            for each in self._found.wrappers:
                follow_inner(each)

    @_untracked
    def evict_state(self, after: torch.cuda.Event | None = None) -> int:
        """Brings the optimizer's state to the host alone; returns the bytes that are free then.

        The unit can be used, and not be stepped.
        """
        self._tracker.stop()
        self._join_streams(after)
        *_, (state, members) = self._parts()
        freed = state.evict(members, after)
        self._is_state_new, self.made_state_bytes = False, 0
        return freed

    @_untracked
    def free_gradients(self, after: torch.cuda.Event | None = None) -> None:
        """Frees the device memory of gradients if the program has dropped them all."""
        if self._gradients.slab.device_bytes and not self._found.gradients:
            self._join_streams(after)
            self._gradients.evict(Members({}, ()), after)

    @property
    def state_bytes(self) -> int:
        """Bytes of device memory of the optimizer's state, but for made_state_bytes."""
        return self._state.slab.device_bytes

    @property
    @_untracked
    def has_new_tensors(self) -> bool:
        """Whether parameters or buffers were added or renamed since the unit was evicted last.

        A graph must not save them before they have been moved: they are not in the slab yet.
        """
        return not self._own.has_all(self._found.own)

    def held_by(self) -> list[str]:
        """Views that the program keeps, and with them device memory that it has left, as text."""
        return [each for pack in self._packs for each in pack.held_by()]

    @_untracked
    def missing_bytes(self, *, state: bool) -> int:
        """Bytes of device memory that load() would take."""
        count = 3 if state else 2
        if not any(pack.slab.missing_bytes for pack in self._packs[:count]):
            return 0
        return sum(pack.missing_bytes(members) for pack, members in self._parts()[:count])

    @property
    @_untracked
    def needed_bytes(self) -> int:
        """Bytes on the device of all that there is of it now."""
        return sum(pack.needed_bytes(members) for pack, members in self._parts())

    @_untracked
    def new_bytes(self) -> int:
        """Bytes on the device that evict() would copy now."""
        return sum(pack.new_bytes(members) for pack, members in self._parts())

    @_untracked
    def other_bytes(self) -> int:
        """Bytes of gradients and state that came to it on the device since it was loaded."""
        own, gradients, self.made_state_bytes = (
            pack.other_bytes(members) for pack, members in self._parts()
        )
        return own + gradients + self.made_state_bytes

    @_untracked
    def missing_gradients(self) -> int:
        """Bytes of gradients that a backward may make."""
        parameters = self._parameters.values()
        return sum(each.nbytes for each in parameters if each.requires_grad and each.grad is None)

    @_untracked
    def without_state(self) -> list[tuple[Optimizer, nn.Parameter]]:
        """Optimizers, and parameters of which the next step of each may make state."""
        return [
            (optimizer, each)
            for optimizer in self.optimizers
            for each in self._parameters.values()
            if each.requires_grad and each not in optimizer.state
        ]

    def _note_copied(self) -> None:
        """Notes that parameters and buffers have not changed since they were copied."""
        self._is_touched = self._is_used = False
        self._stepped = set()
        self._copied_versions = self._wrapper_versions()

    def _wrapper_versions(self) -> list[int]:
        """Torch counts a change of a wrapper there, and not of the tensors within."""
        return [] if self._index is None else list(map(version_of, self._index.wrappers))

    def touch(self) -> None:
        """Says that any of its tensors may have changed without torch's counting it."""
        self._is_touched = self._is_state_new = True
        self._uses += 1

    def note_access(self, *, is_counted: bool) -> None:
        """See Tracking: a tensor is used outside of any use."""
        self.note_use()
        if not is_counted:
            self.touch()

    def note_result(self, result: Tensor) -> None:
        """See Tracking."""
        self.has_views = self.has_views or self.is_view(result)

    def host_copy(self, tensor: Tensor) -> Tensor | None:
        """See Tracking; its tensors on the device share one storage, whatever their dtypes."""
        found = host_copy(tensor, self.on_host())
        return host_copy(tensor, self.on_host(state=True)) if found is None else found

    def note_use(self) -> None:
        """Says that its module runs, forward or backward, or that a tensor of it is used."""
        self._is_used = True
        self._uses += 1
        if self.device.type == "cuda":
            self._streams.add(current_stream(self.device))

    def begin_use(self) -> None:
        """From now on its tensors are used without being tracked."""
        self._tracker.stop()
        self._join_streams()

    def end_use(self) -> None:
        """From now on track() finds each use of its tensors, and the current stream is behind all.

        An event that the current stream records next is behind all work on the unit.
        """
        self._join_streams()
        self.track()

    @_untracked
    def track(self) -> None:
        """Finds operations on its tensors until it is used: they are changes, or bring it."""
        if self.device_bytes:
            self._tracker.start(self._found.all_tensors())
        else:
            self._tracker.start(() if self._caller is None else self._found.own.values())

    def _join_streams(self, after: torch.cuda.Event | None = None) -> None:
        """Lets the current stream wait for the streams of the last use, unless its end is known."""
        if after is not None or not self._streams:
            return
        current = current_stream(self.device)
        for each in self._streams:
            if each is not current:
                # The module ran there: its memory is reused behind that, too.
                current.wait_stream(each)
        self._streams.clear()

    @property
    def changes(self) -> int:
        """Grows with each use, each step, and each change of its tensors that torch counts.

        Changes of gradients and of the optimizer's state count outside of a use, by track(). What
        moves the unit counts, too.
        """
        own = () if self._index is None else self._index.own.values()
        with as_plain():
            return self._uses + sum(map(version_of, own)) + sum(self._wrapper_versions())

    def follow(self, caller: Caller | None) -> None:
        """The caller brings the unit as the program reaches it; None ends that."""
        self._caller = caller
        if not self.device_bytes:  # on the device tensors are tracked unless they are in use
            self.track()

    @property
    def comes_by_itself(self) -> bool:
        """Whether there is a Caller."""
        return self._caller is not None

    @contextmanager
    def operation(self) -> Iterator[Callable[[Any], Any]]:
        """See Tracking."""
        assert self._caller is not None
        with self._caller.using(self):
            self.note_use()
            yield partial(self._given, next_node_number())

    def _begins(self, module: nn.Module, args: object) -> None:
        """A forward of its module begins."""
        self._begun.append(next_node_number())
        self.averaging.check(steps=False)

    def _ends(self, module: nn.Module, args: object, output: object) -> object:
        """A forward of its module, or of one in it that has buffers, ends.

        What torch returns instead of the output; None: the output.
        """
        self.note_use()
        if module is not self.module:
            return None
        return self._given(self._begun.pop() if self._begun else 0, output)

    def _given(self, begun: int, output: Any) -> Any:
        """What the program is given as the result of a call that began at this number.

        Under `auto` trained tensors of the unit are replaced by copies. A result counts as the
        unit's if autograd made its node during the call: a unit may also return what it was given.
        Autograd numbers its nodes as it makes them, and a backward runs the ready node of the
        highest number first, so that the nodes of one call run one after another.
        """
        if self.memory is None:
            return output
        is_container = isinstance(output, Tensor | list | tuple | dict)
        is_record = not is_container and hasattr(output, "__dict__")
        given = dict(vars(output)) if is_record else output
        may_leave = self.comes_by_itself and torch.is_grad_enabled()
        if may_leave and any(map(self._is_trained_view, tree_leaves(given))):
            # Torch makes the graph of a view anew where its base has changed, as by leaving.
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
        is_nested = bool(nodes) and self._caller is not None and self._caller.is_nested(self)
        for node, is_last in nodes.items():
            self.has_graph = self.has_graph or is_last
            self.open_results += is_last
            node.register_prehook(partial(self._node_hook, self.memory, is_last, is_nested))
        return output

    def _before_backward(self, memory: Memory, is_last: bool, is_nested: bool, _: object) -> None:
        """A backward reaches a node of a result, and is about to make gradients."""
        self.note_use()
        if memory is Memory.DEVICE:
            self.open_results -= is_last
            if self._caller is not None:
                self._caller.reaches(self, nested=is_nested)
            else:
                self._before_gradients(self)
        if self.memory is not memory:
            there = {Memory.HOST: "evicted", Memory.DEVICE: "loaded", None: "half moved"}
            raise RuntimeError(
                f"unit {self.name!r}: a backward reached it while it is {there[self.memory]}, and"
                f" its forward ran while it was {there[memory]}:"
                f" {'load' if memory is Memory.DEVICE else 'evict'}() it before the backward"
            )

    def _save(self, module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        """Gives state_dict() the tensors on the host, which stay readable when the unit leaves."""
        if self.memory is Memory.HOST:
            return
        on_host = self.on_host()
        # Which are given if variables are kept.
        own = {id(each) for each in (*module.parameters(), *module.buffers())}
        for name, each in state.items():
            if name.startswith(prefix) and isinstance(each, Tensor) and id(each) not in own:
                state[name] = _on_host(each, on_host)

    def is_view(self, tensor: Tensor) -> bool:
        """Whether it shares the memory of parameters and buffers on the device."""
        return any(map(self._own.slab.has, within_frozen({"": tensor}).values()))

    def _is_trained_view(self, each: object) -> bool:
        return isinstance(each, Tensor) and each.requires_grad and self.is_view(each)

    def forget_results(self) -> None:
        """Says that no backward is to come."""
        self.open_results = 0

    def tell_steps(self) -> None:
        """Promises note_step(); otherwise each step of an optimizer may have changed the unit."""
        for each in self._step_hooks:
            each.remove()

    def wait(self) -> None:
        """Waits for the copies that write_back() has begun."""
        for pack in self._packs:
            pack.slab.leaving.finish()

    @property
    @_untracked
    def has_gradients(self) -> bool:
        """Whether an optimizer's step would change it."""
        return any(each.grad is not None for each in self._parameters.values())

    @_untracked
    def on_host(self, *, state: bool = False) -> dict[int, Tensor]:
        """Its parameters and buffers, or the state, on the host by their addresses on the device.

        Waits until what is new on the device is on the host.
        """
        pack, members = self._parts()[2 if state else 0]
        if pack.slab.device_bytes:
            self.write_back()
            self.wait()
        return pack.on_host(members)

    @_untracked
    def note_step(self, *_: object) -> None:
        """Says that an optimizer has stepped it."""
        self._is_used = self._is_state_new = self.was_stepped = True
        self._uses += 1
        named = self._parameters.items()
        self._stepped |= {n for n, p in named if p.requires_grad or p.grad is not None}

    def close(self) -> None:
        """Evicts the unit; another unit may have its tensors then."""
        self._caller = None
        self.evict()
        for each in (*self._hooks, *self._step_hooks):
            each.remove()
        self._disown()

    def _check_alone(self) -> None:
        """ValueError if a parameter or buffer belongs to another unit, TypeError if to a table."""
        for name, tensor in _of_module(self.module):
            if rows_of_parameter(tensor) is not None:
                raise TypeError(
                    f"unit {self.name!r}: {name} are rows of an Embedding, which are in host memory"
                    " already, and come by themselves: make units of other modules alone"
                )
            if not is_plain_tensor(tensor) and not is_lazy(tensor):
                kind = type(tensor)
                raise TypeError(
                    f"unit {self.name!r}: {name}: expected a plain tensor, got"
                    f" {kind.__module__}.{kind.__qualname__}, whose elements a copy of bytes may"
                    " not be: make units of other modules and leave this one on the device, or move"
                    " all of the model between uses by TrainingState"
                )
            other = _owner_of(tensor)
            within = () if other is None or other is self else _of_module(other.module)
            if other is not None and (names := [its for its, e in within if e is tensor]):
                raise ValueError(
                    f"unit {self.name!r}: {name} is {names[0]} of unit {other.name!r} as well, and"
                    " moves with one unit alone; make one unit of both modules (nn.ModuleList), or"
                    " close() the other"
                )

    def _disown(self) -> None:
        """Lets its tensors be another's."""
        for _, tensor in _of_module(self.module):
            if _owner_of(tensor) is self:
                del _owners[tensor]

    @property
    def _parameters(self) -> dict[str, nn.Parameter]:
        if self._index is not None and self._index.is_current():
            return self._index.parameters
        return dict(self.module.named_parameters())

    @property
    def _found(self) -> TensorIndex:
        """Its tensors as they are now."""
        if self._index is None or not self._index.is_current():
            self._index = TensorIndex(self.module, self.optimizers, self._is_of_state)
            for tensor in self._index.own.values():
                _owners[tensor] = weakref.ref(self)
            self._watch()
            self.averaging.forget_replaced()
        return self._index

    def _watch(self) -> None:
        """Hooks the forward of its module, and of modules within that have buffers to change."""
        for each in self.module.modules():
            if each in self._watched or (each is not self.module and not buffers_of(each)):
                continue
            self._watched.add(each)
            # Also after a forward that has failed half-way.
            self._hooks.append(each.register_forward_hook(self._forward_hook, always_call=True))
            self._is_used = True

    def _is_of_state(
        self, optimizer: Optimizer, name: str, parameter: Tensor, key: str, value: Any
    ) -> bool:
        """Whether a value of an optimizer's state of a parameter moves with the unit."""
        if isinstance(value, Tensor):
            placed = self._state.has_place(f"{key} of {name}", value)
            return placed or not stays_on_cpu(optimizer, parameter, key, value)
        if any(isinstance(each, Tensor) for each in tree_leaves(value)):
            raise TypeError(
                f"unit {self.name!r}: {type(optimizer).__name__} keeps a"
                f" {type(value).__name__} of tensors as {key!r} of {name}; it must keep single"
                " tensors, each of one parameter"
            )
        return False


def exact_device(device: torch.device | str) -> torch.device:
    """As tensors there name it: "cuda" is the current GPU.

    Raises RuntimeError if it is a GPU and there is none.
    """
    found = torch.device(device)
    if found.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"device={str(device)!r} needs a GPU, and torch finds none here")
    is_current = found.type == "cuda" and found.index is None
    return torch.device("cuda", torch.cuda.current_device()) if is_current else found


def _owner_of(tensor: Tensor) -> Unit | None:
    found = _owners.get(tensor)  # type: ignore[no-untyped-call]
    return None if found is None else found()


def is_of_unit(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter or buffer of a unit, of any Swapper."""
    return len(_owners) > 0 and _owner_of(tensor) is not None


def _of_module(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from within_frozen(dict(module.named_parameters())).items()
    yield from within_frozen(dict(module.named_buffers())).items()


def host_copy(tensor: Tensor, on_host: Mapping[int, Tensor]) -> Tensor | None:
    """What Unit.on_host() has of a tensor on the device."""
    found = on_host.get(tensor.data_ptr())
    is_like = found is not None and (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
    return found if is_like else None


def _on_host(tensor: Tensor, on_host: Mapping[int, Tensor]) -> Tensor:
    """The same of Unit.on_host(); the tensor itself if that has it not."""
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

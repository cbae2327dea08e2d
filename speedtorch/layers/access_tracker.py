"""AccessTracker: finds operations on tensors of an offloaded module that is not in use.

An event marks the end of a module's last use, and the module's device memory is reused after that
event. Work that the program queues on the tensors later would access reused memory. Tensors of a
module that is not in use therefore have a subclass, whose `__torch_function__` reports operations
that read or write elements. Within the operation the tensors are plain, and its results are plain.

Under `auto()`, most operations that compute with a module's tensors load the module, like a call of
the module; see _loads().
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from speedtorch.torch_internals import (
    VERSION_GETTER,
    as_plain,
    never_compiled,
    tree_leaves,
    tree_map,
)

__all__ = ["AccessTracker", "TrackedOwner", "is_plain_tensor", "on_device", "untracked"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


class TrackedOwner(Protocol):
    """The owner of tracked tensors, which are used on its device."""

    device: torch.device

    @property
    def loads_on_use(self) -> bool:
        """Whether an operation may load the tensors to the device."""

    def operation(self) -> AbstractContextManager[Callable[[Any], Any]]:
        """Keeps the tensors on the device; yields a function to apply to the result."""

    def note_access(self, *, is_counted: bool) -> None:
        """Called before an operation on the current stream.

        `is_counted`: whether torch's tensor version counts the operation's writes.
        """

    def note_result(self, result: Tensor) -> None:
        """Called with each returned tensor, which may share memory with a tracked tensor."""

    def host_copy(self, tensor: Tensor) -> Tensor | None:
        """A copy of a tensor in host memory, for pickling; None: pickle the tensor itself."""


def _named(owner: Any, names: str) -> list[Any]:
    return [getattr(owner, name) for name in names.split()]


# Optimizers, zero_grad() and modules call these on all tensors; none reads or writes elements.
_PROPERTIES = "dtype device grad grad_fn is_cuda is_leaf layout ndim requires_grad shape"
_METHODS = "dim element_size is_complex is_floating_point nelement numel size"
_GRADIENT: Any = Tensor.grad
_METADATA = frozenset(
    [
        *(accessor.__get__ for accessor in _named(Tensor, _PROPERTIES)),
        *_named(Tensor, _METHODS),
        _GRADIENT.__set__,
        _GRADIENT.__delete__,
        VERSION_GETTER,
    ]
)

# The results of these share the tensor's elements, but not its version counter.
_SHARING = "__array__ __dlpack__ data_ptr numpy storage untyped_storage"
_DATA: Any = Tensor.data
_UNCOUNTED = frozenset([_DATA.__get__, _DATA.__set__, *_named(Tensor, _SHARING)])

# These use a tensor on its current device, and never load its module.
_OF_A_TENSOR = "__dlpack_device__ __format__ __hash__ __len__ __repr__ __setstate__ backward detach"
_OF_A_TENSOR += " dim_order get_device is_contiguous is_pinned is_shared register_hook"
_OF_A_TENSOR += " register_post_accumulate_grad_hook retain_grad storage_offset storage_type stride"
_OF_A_TENSOR += " type"
_LOOKS = frozenset(
    [
        *_named(Tensor, _OF_A_TENSOR),
        torch.autograd.backward,
        torch.autograd.grad,
        torch.is_same_size,
    ]
)
_ACCESSORS = {"__get__", "__set__", "__delete__"}
_COMPUTING_ACCESSORS = frozenset(e.__get__ for e in _named(Tensor, "H T imag mH mT real"))

_OPERATORS = "add sub mul truediv floordiv mod pow and or xor lshift rshift"
_IN_PLACE = {"__setitem__", *(f"__i{name}__" for name in _OPERATORS.split())}


class AccessTracker:
    """Tracks tensors until `stop()`, and reports operations to their owner while it is alive."""

    def __init__(self, owner: TrackedOwner) -> None:
        self.owner = weakref.ref(owner)
        # Weak: a gradient that the program drops is freed at once.
        self._tracked: list[weakref.ref[Tensor]] = []
        self._starts = 0

    def start(self, tensors: Iterable[Tensor]) -> None:
        """Tracks plain tensors and parameters; other classes are not changed."""
        self.stop()
        for tensor in tensors:
            if type(tensor) in _TRACKED:
                self._tracked.append(weakref.ref(tensor))
                _track(tensor, self)

    def stop(self) -> None:
        """Makes all tracked tensors plain again."""
        self._starts += 1
        while self._tracked:
            if (tensor := self._tracked[-1]()) is not None:
                _untrack(tensor)
            self._tracked.pop()

    @contextmanager
    def reported(self, tensor: Tensor, *, is_counted: bool = True) -> Iterator[None]:
        """Reports an operation, and makes the tensor plain within the block."""
        if (owner := self.owner()) is not None:
            owner.note_access(is_counted=is_counted)
        starts = self._starts
        _untrack(tensor)
        try:
            yield
        finally:
            if starts == self._starts:
                _track(tensor, self)


class _Tracked(Tensor):
    """A tracked tensor."""

    _tracker: AccessTracker

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})

    # nn.Parameter's own methods check the class before they read elements.
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with self._tracker.reported(self):
            return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        owner = self._tracker.owner()
        with self._tracker.reported(self):
            copied = None if owner is None else owner.host_copy(self)
            if copied is None:
                return self.__reduce_ex__(protocol)
            if isinstance(self, nn.Parameter):
                copied = nn.Parameter(copied, self.requires_grad)
            vars(copied).update(vars(self))
            reduced: Any = copied.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
            return reduced


class _TrackedParameter(_Tracked, nn.Parameter):
    pass


_TRACKED: dict[type, type[Tensor]] = {Tensor: _Tracked, nn.Parameter: _TrackedParameter}
_PLAIN: dict[type, type[Tensor]] = {_Tracked: Tensor, _TrackedParameter: nn.Parameter}


def on_device(given: Any, device: torch.device) -> Any:
    """Copies tensors in `given` to a device; without a tensor elsewhere returns `given` itself."""
    if all(not isinstance(e, Tensor) or e.device == device for e in tree_leaves(given)):
        return given
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, given)


@partial(never_compiled, reason="offloaded modules move between host and device")
def _dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    if func not in _METADATA:
        tensors = {id(e): e for e in tree_leaves((args, kwargs)) if isinstance(e, Tensor)}
        tracked = [tensor for tensor in tensors.values() if isinstance(tensor, _Tracked)]
        if tracked:
            plain = [tensor for tensor in tensors.values() if not isinstance(tensor, _Tracked)]
            return _run_tracked(func, args, kwargs, tracked, plain)
    with as_plain():  # prevents a recursive call of this function
        return func(*args, **kwargs)


def _run_tracked(func: Any, args: Any, kwargs: Any, tracked: list[Any], plain: list[Tensor]) -> Any:
    alive = dict.fromkeys(tensor._tracker.owner() for tensor in tracked)
    owners: list[TrackedOwner] = [owner for owner in alive if owner is not None]
    loading = [owner for owner in owners if owner.loads_on_use]
    if loading and not _loads(func, args, kwargs, tracked, plain):
        loading = []
    with ExitStack() as stack:
        to_outputs = [stack.enter_context(owner.operation()) for owner in loading]
        if loading and not _is_in_place(func) and "out" not in kwargs:
            args, kwargs = on_device((args, kwargs), loading[0].device)
        for tensor in tracked:
            if isinstance(tensor, _Tracked):  # operation() has made tensors in use plain
                reported = tensor._tracker.reported(tensor, is_counted=func not in _UNCOUNTED)
                stack.enter_context(reported)
        result = func(*args, **kwargs)
        for to_output in to_outputs:
            result = to_output(result)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                for owner in owners:
                    owner.note_result(leaf)
        return result


def _loads(func: Any, args: Any, kwargs: Any, tracked: list[Any], plain: list[Tensor]) -> bool:
    """Whether an operation under `auto()` loads the modules of its tracked tensors.

    Inspection loads no module. A computation with another tensor on a module's GPU loads the
    modules. Any other computation loads the modules unless it writes to a tracked tensor, or uses
    several modules without a gradient.
    """
    if not _computes(func):
        return False
    with as_plain():
        owners = {owner for tensor in tracked if (owner := tensor._tracker.owner()) is not None}
        devices = {tensor.device for tensor in plain if tensor.device.type != "cpu"}
        if any(owner.device in devices for owner in owners):
            return True
        written = args[:1] if _is_in_place(func) else kwargs.get("out")
        if any(isinstance(leaf, _Tracked) for leaf in tree_leaves(written)):
            return False
        is_trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tracked)
        return is_trained or len(owners) == 1


def _computes(func: Any) -> bool:
    """Whether a function returns or writes elements that depend on its inputs' elements."""
    if func in _METADATA or func in _UNCOUNTED or func in _LOOKS:
        return False
    return _name_of(func) not in _ACCESSORS or func in _COMPUTING_ACCESSORS


def _is_in_place(func: Any) -> bool:
    """Whether a function writes to its first argument, according to its name."""
    name = _name_of(func)
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _name_of(func: Any) -> str:
    return getattr(func, "__name__", "")


def _track(tensor: Any, tracker: AccessTracker) -> None:
    vars(tensor)["_tracker"] = tracker
    tensor.__class__ = _TRACKED[type(tensor)]


def _untrack(tensor: Any) -> None:
    if (plain := _PLAIN.get(type(tensor))) is not None:
        tensor.__class__ = plain
    vars(tensor).pop("_tracker", None)


def is_plain_tensor(tensor: object) -> bool:
    """Whether an object is exactly a `Tensor` or `nn.Parameter`, tracked or not."""
    return type(tensor) in _TRACKED or type(tensor) in _PLAIN


def untracked(function: _Method) -> _Method:
    """Decorates a function whose accesses to tensors are no uses by the program.

    Tensors created within are ordinary tensors without a graph, also in inference mode.
    """

    @wraps(function)
    def untracked_function(*args: Any, **kwargs: Any) -> Any:
        """Calls the function while the tensors behave as plain tensors."""
        with as_plain():
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False), torch.no_grad():  # the former enables gradients
                    return function(*args, **kwargs)
            if not torch.is_grad_enabled():  # entering no_grad() takes microseconds
                return function(*args, **kwargs)
            with torch.no_grad():
                return function(*args, **kwargs)

    return untracked_function  # type: ignore[return-value]

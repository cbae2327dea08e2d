"""AccessTracker: finds operations on tensors of a unit that is not in use.

An event marks the end of a unit's last use, and the unit's device memory is reused after that
event. The program may queue later work on the unit's tensors. Tensors of a unit that is not in use
therefore have a subclass, whose `__torch_function__` reports operations that read or write
elements. Within the operation the tensors are plain, and its results are plain.

Under `auto()`, an operation that computes with a unit's tensors is a use of the unit, like a call
of its module.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from speedtorch.torch_internals import (
    VERSION_ASKED,
    as_plain,
    never_compiled,
    tree_leaves,
    tree_map,
)

__all__ = ["AccessTracker", "Tracking", "is_plain_tensor", "on_device"]


class Tracking(Protocol):
    """The owner of tracked tensors, which are used on its device."""

    device: torch.device

    @property
    def comes_by_itself(self) -> bool:
        """Whether an operation may load the tensors to the device."""

    def operation(self) -> AbstractContextManager[Callable[[Any], Any]]:
        """Keeps the tensors on the device within; yields a map for the operation's result."""

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
        *(each.__get__ for each in _named(Tensor, _PROPERTIES)),
        *_named(Tensor, _METHODS),
        _GRADIENT.__set__,
        _GRADIENT.__delete__,
        VERSION_ASKED,
    ]
)

# The results of these share the tensor's elements, but not its version counter.
_SHARING = "__array__ __dlpack__ data_ptr numpy storage untyped_storage"
_DATA: Any = Tensor.data
_UNCOUNTED = frozenset([_DATA.__get__, _DATA.__set__, *_named(Tensor, _SHARING)])

# These use a tensor on its current device, and never load its unit.
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

    def __init__(self, owner: Tracking) -> None:
        self.owner = weakref.ref(owner)
        # Weak: a gradient that the program drops is freed at once.
        self._tracked: list[weakref.ref[Tensor]] = []
        self._starts = 0

    def start(self, tensors: Iterable[Tensor]) -> None:
        """Tracks plain tensors and parameters; other classes are not changed."""
        self.stop()
        for each in tensors:
            if type(each) in _TRACKED:
                self._tracked.append(weakref.ref(each))
                _track(each, self)

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
        return _called(func, args, kwargs or {})

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
    """Returns `given` with all tensors on a device; unchanged if all are there already."""
    if all(not isinstance(e, Tensor) or e.device == device for e in tree_leaves(given)):
        return given
    return tree_map(lambda each: each.to(device) if isinstance(each, Tensor) else each, given)


@partial(never_compiled, reason="units come and go")
def _called(func: Any, args: Any, kwargs: Any) -> Any:
    if func not in _METADATA:
        tensors = {id(e): e for e in tree_leaves((args, kwargs)) if isinstance(e, Tensor)}
        tracked = [each for each in tensors.values() if isinstance(each, _Tracked)]
        if tracked:
            others = [each for each in tensors.values() if not isinstance(each, _Tracked)]
            return _operated(func, args, kwargs, tracked, others)
    with as_plain():  # prevents a recursive call of this function
        return func(*args, **kwargs)


def _operated(func: Any, args: Any, kwargs: Any, tracked: list[Any], others: list[Tensor]) -> Any:
    found = dict.fromkeys(each._tracker.owner() for each in tracked)
    owners: list[Tracking] = [each for each in found if each is not None]
    coming = [each for each in owners if each.comes_by_itself]
    if coming and not _brings(func, args, kwargs, tracked, others):
        coming = []
    with ExitStack() as stack:
        results = [stack.enter_context(each.operation()) for each in coming]
        if coming and not _is_in_place(func) and "out" not in kwargs:
            args, kwargs = on_device((args, kwargs), coming[0].device)
        for tensor in tracked:
            if isinstance(tensor, _Tracked):  # operation() has made tensors in use plain
                reported = tensor._tracker.reported(tensor, is_counted=func not in _UNCOUNTED)
                stack.enter_context(reported)
        result = func(*args, **kwargs)
        for given in results:
            result = given(result)
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                for owner in owners:
                    owner.note_result(each)
        return result


def _brings(func: Any, args: Any, kwargs: Any, tracked: list[Any], others: list[Tensor]) -> bool:
    """Whether an operation under `auto()` loads the units of its tracked tensors.

    Inspection never loads units. A computation with another tensor on a unit's device always does.
    Otherwise in-place writes, and operations without a gradient on several units, load none.
    """
    if not _computes(func):
        return False
    with as_plain():
        owners = {owner for each in tracked if (owner := each._tracker.owner()) is not None}
        there = {each.device for each in others if each.device.type != "cpu"}
        if any(owner.device in there for owner in owners):
            return True
        written = args[:1] if _is_in_place(func) else kwargs.get("out")
        if any(isinstance(each, _Tracked) for each in tree_leaves(written)):
            return False
        is_trained = torch.is_grad_enabled() and any(each.requires_grad for each in tracked)
        return is_trained or len(owners) == 1


def _computes(func: Any) -> bool:
    """Whether a function returns or writes elements that depend on its inputs' elements."""
    if func in _METADATA or func in _UNCOUNTED or func in _LOOKS:
        return False
    return _name_of(func) not in _ACCESSORS or func in _COMPUTING_ACCESSORS


def _is_in_place(func: Any) -> bool:
    """Whether a function writes to its first argument."""
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

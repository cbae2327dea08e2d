"""AccessTracker: finds operations on tensors of a unit that is not in use.

The end of a unit's last use is an event, and the unit's device memory is reused behind that event.
What the program queues on the unit's tensors later is found here: the tensors of a unit that is not
in use have a subclass, whose `__torch_function__` reports operations that read or write elements.
They are plain tensors within the operation, and its results are plain.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from speedtorch.torch_internals import as_plain, never_compiled, tree_leaves

__all__ = ["AccessTracker", "Tracking", "is_plain_tensor"]


class Tracking(Protocol):
    """What has the tracked tensors."""

    def note_access(self, *, is_counted: bool) -> None:
        """An operation on a tensor begins, in its thread and on its stream.

        `is_counted`: torch counts what the program may write by it.
        """

    def note_result(self, result: Tensor) -> None:
        """An operation has given a tensor, which may share memory with a tracked one."""

    def host_copy(self, tensor: Tensor) -> Tensor | None:
        """The elements of a tensor in host memory, for a file; None: the tensor's own serve."""


class AccessTracker:
    """Tracks tensors until it is stopped.

    Args:
        owner: is told of operations, for as long as it is alive.
    """

    def __init__(self, owner: Tracking) -> None:
        self._owner = weakref.ref(owner)
        # Weak: a gradient that the program drops is freed at once.
        self._tracked: list[weakref.ref[Tensor]] = []
        self._starts = 0

    def start(self, tensors: Iterable[Tensor]) -> None:
        """Tracks plain tensors and parameters; others are left as they are."""
        self.stop()
        for each in tensors:
            if type(each) in _TRACKED:
                self._tracked.append(weakref.ref(each))
                _track(each, self)

    def stop(self) -> None:
        """Makes all of them plain tensors again."""
        self._starts += 1
        while self._tracked:
            if (tensor := self._tracked[-1]()) is not None:
                _untrack(tensor)
            self._tracked.pop()

    @property
    def owner(self) -> Tracking | None:
        """See AccessTracker."""
        return self._owner()

    @contextmanager
    def reported(self, tensor: Tensor, *, is_counted: bool) -> Iterator[None]:
        """Reports an operation; the tensor is plain within."""
        if (owner := self.owner) is not None:
            owner.note_access(is_counted=is_counted)
        starts = self._starts
        _untrack(tensor)
        try:
            yield
        finally:
            if starts == self._starts:
                _track(tensor, self)


class _Tracked:
    """What the subclasses of tracked tensors have in common."""

    _tracker: AccessTracker

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _called(func, args, kwargs or {})

    def _reported(self, *, is_counted: bool = True) -> AbstractContextManager[None]:
        assert isinstance(self, Tensor)
        return self._tracker.reported(self, is_counted=is_counted)

    # A parameter's own methods look at its class before they read elements.
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with self._reported():
            return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        owner = self._tracker.owner
        with self._reported():
            assert isinstance(self, Tensor)
            copied = None if owner is None else owner.host_copy(self)
            if copied is None:
                return self.__reduce_ex__(protocol)
            if isinstance(self, nn.Parameter):
                copied = nn.Parameter(copied, self.requires_grad)
            vars(copied).update(vars(self))
            reduced: Any = copied.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
            return reduced


class _TrackedTensor(_Tracked, Tensor):
    pass


class _TrackedParameter(_Tracked, nn.Parameter):
    pass


_TRACKED: dict[type, type[Tensor]] = {Tensor: _TrackedTensor, nn.Parameter: _TrackedParameter}
_PLAIN: dict[type, type[Tensor]] = {_TrackedTensor: Tensor, _TrackedParameter: nn.Parameter}

# Neither reads nor writes elements; optimizers, zero_grad() and modules call these of all tensors.
_PROPERTIES = "dtype device grad grad_fn is_cuda is_leaf layout ndim requires_grad shape _version"
_GRADIENT: Any = Tensor.grad
_METADATA = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES.split()),
        _GRADIENT.__set__,
        _GRADIENT.__delete__,
        Tensor.dim,
        Tensor.element_size,
        Tensor.is_complex,
        Tensor.is_floating_point,
        Tensor.nelement,
        Tensor.numel,
        Tensor.size,
    ]
)

# What they give shares the elements, but not the count of changes.
_DATA: Any = Tensor.data
_UNCOUNTED = frozenset(
    [
        _DATA.__get__,
        _DATA.__set__,
        Tensor.__array__,
        Tensor.__dlpack__,
        Tensor.data_ptr,
        Tensor.numpy,
        Tensor.storage,
        Tensor.untyped_storage,
    ]
)


@partial(never_compiled, reason="units come and go")
def _called(func: Any, args: Any, kwargs: Any) -> Any:
    if func not in _METADATA:
        found = [each for each in tree_leaves((args, kwargs)) if isinstance(each, _Tracked)]
        if found:
            with ExitStack() as stack:
                owners = {each._tracker.owner for each in found} - {None}
                for each in {id(each): each for each in found}.values():
                    stack.enter_context(each._reported(is_counted=func not in _UNCOUNTED))
                result = func(*args, **kwargs)
                for given in tree_leaves(result):
                    if isinstance(given, Tensor):
                        for owner in filter(None, owners):
                            owner.note_result(given)
                return result
    with as_plain():  # or this would be called again
        return func(*args, **kwargs)


def _track(tensor: Any, tracker: AccessTracker) -> None:
    vars(tensor)["_tracker"] = tracker
    tensor.__class__ = _TRACKED[type(tensor)]


def _untrack(tensor: Any) -> None:
    if (plain := _PLAIN.get(type(tensor))) is not None:
        tensor.__class__ = plain
    vars(tensor).pop("_tracker", None)


def is_plain_tensor(tensor: object) -> bool:
    """Whether it is a tensor or a parameter of torch's own classes, tracked or not."""
    return type(tensor) in _TRACKED or type(tensor) in _PLAIN

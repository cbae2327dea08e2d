"""AccessTracker: finds operations on tensors of a unit that is not in use.

The end of a unit's last use is an event, and the unit's device memory is reused behind that event.
What the program queues on the unit's tensors later is found here: the tensors of a unit that is not
in use have a subclass, whose `__torch_function__` reports operations that read or write elements.
They are plain tensors within the operation, and its results are plain.

Where units come by themselves, an operation that computes something of a unit's tensors is a use of
the unit, as a call of its module is.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from speedtorch.layers.operations import computes, is_counted, is_in_place, is_of_metadata
from speedtorch.torch_internals import as_plain, never_compiled, tree_leaves, tree_map

if TYPE_CHECKING:
    from speedtorch.layers.unit import Unit

__all__ = ["AccessTracker", "is_plain_tensor", "on_device"]


class AccessTracker:
    """Tracks tensors until it is stopped, and tells their unit for as long as that is alive."""

    def __init__(self, owner: Unit) -> None:
        self.owner = weakref.ref(owner)
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

    @contextmanager
    def reported(self, tensor: Tensor, *, is_counted: bool = True) -> Iterator[None]:
        """Reports an operation; the tensor is plain within."""
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

    # A parameter's own methods look at its class before they read elements.
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
    """The same with all tensors on a device; what is there already is given as it is."""
    if all(not isinstance(e, Tensor) or e.device == device for e in tree_leaves(given)):
        return given
    return tree_map(lambda each: each.to(device) if isinstance(each, Tensor) else each, given)


@partial(never_compiled, reason="units come and go")
def _called(func: Any, args: Any, kwargs: Any) -> Any:
    if not is_of_metadata(func):
        tensors = {id(e): e for e in tree_leaves((args, kwargs)) if isinstance(e, Tensor)}
        tracked = [each for each in tensors.values() if isinstance(each, _Tracked)]
        if tracked:
            others = [each for each in tensors.values() if not isinstance(each, _Tracked)]
            return _operated(func, args, kwargs, tracked, others)
    with as_plain():  # or this would be called again
        return func(*args, **kwargs)


def _operated(func: Any, args: Any, kwargs: Any, tracked: list[Any], others: list[Tensor]) -> Any:
    found = dict.fromkeys(each._tracker.owner() for each in tracked)
    owners: list[Unit] = [each for each in found if each is not None]
    coming = [each for each in owners if each.comes_by_itself]
    if coming and not _brings(func, args, kwargs, tracked, others):
        coming = []
    with ExitStack() as stack:
        results = [stack.enter_context(each.operation()) for each in coming]
        if coming and not is_in_place(func) and "out" not in kwargs:
            args, kwargs = on_device((args, kwargs), coming[0].device)
        for tensor in tracked:
            if isinstance(tensor, _Tracked):  # and not in use
                reported = tensor._tracker.reported(tensor, is_counted=is_counted(func))
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
    """Whether tracked tensors are used on the device, where their units come by themselves.

    What looks at them or writes to them finds them where they are, and so does what is computed of
    several units without a gradient, unless it is with others that are on the device.
    """
    if not computes(func):
        return False
    with as_plain():
        owners = {owner for each in tracked if (owner := each._tracker.owner()) is not None}
        there = {each.device for each in others if each.device.type != "cpu"}
        if any(owner.device in there for owner in owners):
            return True
        written = args[:1] if is_in_place(func) else kwargs.get("out")
        if any(isinstance(each, _Tracked) for each in tree_leaves(written)):
            return False
        is_trained = torch.is_grad_enabled() and any(each.requires_grad for each in tracked)
        return is_trained or len(owners) == 1


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

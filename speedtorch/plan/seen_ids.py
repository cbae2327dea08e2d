"""Ids that are recognised when they come again: what a batch was planned with, or made of."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from operator import is_

import torch
from torch import Tensor

from speedtorch.torch_internals import version_of

__all__ = ["SeenIds", "SeenTensors"]


class SeenIds:
    """Ids that are recognised when they come again.

    Ids on the CPU are compared with a copy, which no other code writes to and which a GPU takes
    without waiting. Those that are to stay `unread`, as they lie on a GPU, must be the same tensor,
    unchanged. It is kept, and so is its memory, which it can be made to leave (`tensor.data =
    other`): no other tensor comes to lie there.
    """

    def __init__(self, ids: Tensor, device: torch.device, *, unread: bool) -> None:
        self.shape = ids.shape
        self._is_copy = ids.is_cpu and not unread
        self._unread: Tensor | None = None
        if not self._is_copy:
            self.values = ids.detach()
        elif device.type == "cuda":  # where they will be needed
            self.values = torch.empty_like(ids, pin_memory=True).copy_(ids)
        else:
            self.values = ids.clone()
        if unread and not ids.is_inference():  # such a tensor does not count its versions
            self._unread, self._state = ids, _states_of([ids])

    @classmethod
    def of_copy(cls, copied: Tensor, shape: torch.Size) -> SeenIds:
        """Ids of this shape on the CPU, of which there is a copy that nothing writes to."""
        seen = cls.__new__(cls)
        seen.shape, seen.values = shape, copied if len(shape) == 1 else copied.view(shape)
        seen._is_copy, seen._unread = True, None
        return seen

    @property
    def copied(self) -> Tensor | None:
        """A copy of the ids on the CPU, if that is how they are recognised."""
        return self.values if self._is_copy else None

    def are(self, ids: Tensor) -> bool:
        """Whether these are the ids, for certain."""
        if self._unread is not None:
            return ids is self._unread and _states_of([ids]) == self._state
        same_kind = self._is_copy and ids.is_cpu and ids.dtype == self.values.dtype
        return same_kind and torch.equal(ids, self.values)

    def are_those(self, other: SeenIds) -> bool:
        """Whether both are the same ids, for certain."""
        if self._unread is None:
            return other._is_copy and self.are(other.values)
        return self._unread is other._unread and self._state == other._state


class SeenTensors:
    """The tensors of ids of several features, recognised together, each as SeenIds does.

    `unread` as there, of all of them; those on a GPU are unread in any case.
    """

    def __init__(
        self, tensors: Sequence[Tensor], device: torch.device, *, unread: bool = False
    ) -> None:
        self._each: list[SeenIds] = []
        self._tensors: list[Tensor] = []
        if any(not (unread or ids.is_cuda) or ids.is_inference() for ids in tensors):
            self._each = [SeenIds(ids, device, unread=unread or ids.is_cuda) for ids in tensors]
            return
        self._tensors, self._states = [*tensors], _states_of(tensors)
        self._memory = [ids.untyped_storage() for ids in tensors]

    def are(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these, as many, are the tensors, for certain."""
        if self._each:
            return all(seen.are(ids) for seen, ids in zip(self._each, tensors, strict=True))
        return all(map(is_, self._tensors, tensors)) and _states_of(tensors) == self._states


def _states_of(tensors: Sequence[Tensor]) -> list[tuple[Hashable, ...]]:
    """What shows that tensors have changed, without reading them."""
    return [
        (version_of(ids), ids.data_ptr(), ids.shape, ids.stride(), ids.dtype) for ids in tensors
    ]

"""GradientSums: adds the gradients of a step's lookups to the gradient of its rows."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from speedtorch.torch_internals import (
    current_backward,
    sparse_coo,
    sparse_indices,
    sparse_values,
)

__all__ = ["GradientSums", "among_more", "of_rows", "sparse_of_all"]


class GradientSums:
    """Adds gradients in torch's order: first within one backward, then to the earlier gradient."""

    def __init__(self) -> None:
        self._backward: int | None = None
        self._last_sum: Callable[[], Tensor | None] = lambda: None
        self._parts: tuple[Tensor, Tensor] | None = None
        """The gradient from before this backward, and the sum of this backward so far."""

    def add(
        self,
        gradient: Tensor | None,
        added: Tensor,
        places: Tensor | None,
        rows: int,
        *,
        expects_more: bool,
    ) -> Tensor:
        """Adds the gradient of one lookup within a backward, in place if both are dense.

        Args:
            gradient: The gradient of the step's rows so far, or None.
            added: The gradient of the lookup's rows.
            places: The place of each of these rows in the step; None if they are all rows in order.
            rows: The number of the step's rows.
            expects_more: Other lookups may add gradients in this backward.
        """
        backward = current_backward()
        continues = backward == self._backward and gradient is self._last_sum()
        if gradient is None or not continues:
            self._parts = None
        parts = (added, *(self._parts or ()))
        is_sparse = gradient is not None and any(part.is_sparse for part in (gradient, *parts))
        if gradient is not None and continues and places is not None and not is_sparse:
            summed = self._add_some(gradient, added[: len(places)], places)
        else:
            summed = added if places is None else among_more(added, places, rows)
            if gradient is not None:
                summed = self._add_all(
                    gradient, summed, continues=continues, expects_more=expects_more
                )
        self._backward, self._last_sum = backward, weakref.ref(summed)
        return summed

    def _add_some(self, gradient: Tensor, added: Tensor, places: Tensor) -> Tensor:
        """Adds to some rows. The others need no addition of 0.0: no sum of a backward is -0.0."""
        before = gradient
        if self._parts is not None:
            before, new = self._parts
            added = new.index_select(0, places).add_(added)
            new.index_copy_(0, places, added)
        return gradient.index_copy_(0, places, before.index_select(0, places).add_(added))

    def _add_all(
        self, gradient: Tensor, added: Tensor, *, continues: bool, expects_more: bool
    ) -> Tensor:
        """Adds to all rows."""
        if not continues:
            self._parts = (gradient.clone(), added.clone()) if expects_more else None
        elif self._parts is not None:
            self._parts = (self._parts[0], _sum(self._parts[1], added))
        before, new = self._parts or (gradient, added)
        is_sparse = any(part.is_sparse for part in (gradient, before, new))
        return _sum(before, new) if is_sparse else torch.add(before, new, out=gradient)


def _sum(one: Tensor, other: Tensor) -> Tensor:
    """Adds two gradients; torch requires that a dense one is the first."""
    return other + one if one.is_sparse and not other.is_sparse else one + other


def of_rows(gradient: Tensor, indices: Tensor, rows: int) -> Tensor:
    """Makes a sparse gradient of `rows` rows, with the values of `gradient` at `indices`."""
    shape = (rows, *gradient.shape[1:])
    coalesced = gradient.is_coalesced()
    return sparse_coo(indices, sparse_values(gradient), shape, is_coalesced=coalesced)


def among_more(gradient: Tensor, places: Tensor, rows: int) -> Tensor:
    """Expands a gradient to `rows` rows; its own rows are at `places`, others are zeros."""
    if gradient.is_sparse:
        return of_rows(gradient, places[sparse_indices(gradient)], rows)
    more = gradient.new_zeros((rows, *gradient.shape[1:]))
    return more.index_copy_(0, places, gradient[: len(places)])


def sparse_of_all(gradient: Tensor, indices: Tensor) -> Tensor:
    """Makes a sparse gradient with an entry for every row; `indices` are 0 to n - 1."""
    if gradient.is_sparse:
        summed = gradient.coalesce()
        if len(sparse_values(summed)) == len(indices):
            return summed
        gradient = among_more(sparse_values(summed), sparse_indices(summed)[0], len(indices))
    return sparse_coo(indices[None], gradient, gradient.shape, is_coalesced=True)

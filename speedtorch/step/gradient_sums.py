"""How the gradients of one step's lookups become that of the held rows."""

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
    """Adds gradients up in torch's order: those of one backward first, then what was there."""

    def __init__(self) -> None:
        self._backward: int | None = None
        self._given: Callable[[], Tensor | None] = lambda: None
        self._parts: tuple[Tensor, Tensor] | None = None
        """What was there before this backward, and what has come in it."""

    def add(self, gradient: Tensor | None, added: Tensor, *, more_to_come: bool) -> Tensor:
        """The gradient with what one lookup adds to it within a backward, in place if it can be.

        `more_to_come`: other lookups may add to it in this backward.
        """
        backward, summed = current_backward(), added
        if gradient is None:
            self._parts = None
        else:
            if backward != self._backward or gradient is not self._given():
                self._parts = (gradient.clone(), added) if more_to_come else None
            elif self._parts is not None:
                self._parts = (self._parts[0], self._parts[1] + added)
            before, new = self._parts or (gradient, added)
            is_sparse = gradient.is_sparse or added.is_sparse
            summed = before + new if is_sparse else torch.add(before, new, out=gradient)
        self._backward, self._given = backward, weakref.ref(summed)
        return summed


def of_rows(gradient: Tensor, indices: Tensor, rows: int) -> Tensor:
    """A sparse gradient as one of this number of rows."""
    shape = (rows, *gradient.shape[1:])
    coalesced = gradient.is_coalesced()
    return sparse_coo(indices, sparse_values(gradient), shape, is_coalesced=coalesced)


def among_more(gradient: Tensor, places: Tensor, rows: int) -> Tensor:
    """A gradient as one of more rows, which got none; `places` is where its rows are now."""
    if gradient.is_sparse:
        return of_rows(gradient, places[sparse_indices(gradient)], rows)
    more = gradient.new_zeros((rows, *gradient.shape[1:]))
    return more.index_copy_(0, places, gradient[: len(places)])


def sparse_of_all(gradient: Tensor, every: Tensor) -> Tensor:
    """A gradient as a sparse one that names `every` row, 0 to n - 1, also those that got none."""
    if gradient.is_sparse:
        summed = gradient.coalesce()
        if len(sparse_values(summed)) == len(every):
            return summed
        gradient = among_more(sparse_values(summed), sparse_indices(summed)[0], len(every))
    return sparse_coo(every[None], gradient, gradient.shape, is_coalesced=True)

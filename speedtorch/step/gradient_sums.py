"""How the gradients of one step's lookups become that of the held rows."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from speedtorch.torch_internals import current_backward, sparse_indices, sparse_values

__all__ = ["GradientSums", "among_more", "of_rows", "sparse_of_all"]

_NO_BACKWARD = -2  # torch says -1 outside of any


class GradientSums:
    """Adds gradients up in torch's order: those of one backward first, then what was there."""

    def __init__(self) -> None:
        self._backward = _NO_BACKWARD
        self._before: Tensor | None = None
        self._sum: Tensor | None = None
        self._given: weakref.ref[Tensor] | None = None

    def add(self, gradient: Tensor | None, added: Tensor, *, more_to_come: bool) -> Tensor:
        """The gradient with what one lookup adds to it within a backward, in place if it can be.

        `more_to_come`: other lookups may add to it in this backward.
        """
        summed = self._added(gradient, added, more_to_come)
        self._given = weakref.ref(summed)
        return summed

    def _added(self, gradient: Tensor | None, added: Tensor, more_to_come: bool) -> Tensor:
        backward = current_backward()
        if gradient is None:
            self._backward, self._before = backward, None
            return added
        given = None if self._given is None else self._given()
        if backward != self._backward or gradient is not given:
            self._backward, self._before, self._sum = backward, None, None
            if more_to_come:
                self._before, self._sum = gradient.clone(), added
        elif self._before is not None and self._sum is not None:
            self._sum = self._sum + added
            if gradient.is_sparse or added.is_sparse:
                return self._before + self._sum
            return torch.add(self._before, self._sum, out=gradient)
        return gradient + added if gradient.is_sparse or added.is_sparse else gradient.add_(added)


def of_rows(gradient: Tensor, indices: Tensor, rows: int) -> Tensor:
    """A sparse gradient as one of this number of rows."""
    return torch.sparse_coo_tensor(
        indices,
        sparse_values(gradient),
        (rows, *gradient.shape[1:]),
        is_coalesced=gradient.is_coalesced(),
        check_invariants=False,
    )


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
        gradient = among_more(sparse_values(summed), sparse_indices(summed)[0], len(every))
    return torch.sparse_coo_tensor(
        every[None], gradient, gradient.shape, is_coalesced=True, check_invariants=False
    )

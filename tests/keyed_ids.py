"""A keyed jagged tensor for the tests: the methods of torchrec's that collections use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["Deduplicated", "KeyedIds", "Strided"]


class KeyedIds:
    """Ids of features, bag after bag."""

    def __init__(
        self, keys: Sequence[str], values: Tensor, offsets: Tensor, weights: Tensor | None = None
    ) -> None:
        self._keys, self._values, self._offsets, self._weights = keys, values, offsets, weights

    @classmethod
    def of(
        cls,
        features: Mapping[str, Sequence[Sequence[int]]],
        device: str = "cpu",
        dtype: torch.dtype = torch.int64,
        weights: Tensor | None = None,
    ) -> KeyedIds:
        """Made of the bags of each feature."""
        bags = [bag for each in features.values() for bag in each]
        values = torch.tensor([row for bag in bags for row in bag], dtype=dtype, device=device)
        offsets = torch.tensor([0, *map(len, bags)], device=device).cumsum(0)
        return cls(list(features), values, offsets, weights)

    def keys(self) -> list[str]:
        return list(self._keys)

    def values(self) -> Tensor:
        return self._values

    def offsets(self) -> Tensor:
        return self._offsets

    def weights_or_none(self) -> Tensor | None:
        return self._weights


class Strided(KeyedIds):
    """Whose first feature has one sample more than the others."""

    variable_stride_per_key = staticmethod(lambda: True)

    def stride_per_key(self) -> list[int]:
        return [2, *(1 for _ in self.keys()[1:])]


class Deduplicated(KeyedIds):
    """Whose samples are to be selected of the result's."""

    def inverse_indices_or_none(self) -> object:
        return self.keys(), torch.zeros(len(self.keys()), 2, dtype=torch.int64)

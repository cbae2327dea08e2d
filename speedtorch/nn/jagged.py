"""Ids of many features, a bag of them for each sample: what collections take and give."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedtorch.ops.planned_batch import check_ids

__all__ = ["Features", "Jagged", "JaggedRows", "KeyedFeatures", "read_features"]

Features = Any
"""A keyed jagged tensor, or a dict: see EmbeddingBagCollection."""


class Jagged(NamedTuple):
    """Bags of ids, feature after feature, sample after sample."""

    ids: Tensor
    """`[ids]`, int32 or int64."""
    offsets: Tensor
    """Where each bag begins, and the number of ids: `[features * samples + 1]`, int64."""
    samples: int
    begins: list[int] | None
    """Where the ids of each feature begin, and their number, if the host knows."""

    def begins_of(self, features: int) -> list[int]:
        """Where the ids of each feature begin, and their number, read from a GPU if need be."""
        if self.begins is None:
            ends: list[int] = self.offsets[:: max(1, self.samples)].tolist()
            return ends if self.samples else [0] * (features + 1)
        return self.begins


class Source(NamedTuple):
    """Features that can be read once somebody needs them, and the tensors of their ids."""

    tensors: list[Tensor]
    form: Hashable
    """What the tensors are to the features: others of the same values are of the same ids then."""
    samples: int
    parts: Callable[[], Sequence[_Bags]]

    def read(self, device: torch.device) -> Jagged:
        """Their bags side by side on a device, for which nobody waits."""
        return _joined(self.parts(), self.samples, device)

    def weights(self, device: torch.device) -> Tensor:
        """The factor of each id, on a device."""
        factors = [part.weights for part in self.parts() if part.weights is not None]
        return torch.cat([each.reshape(-1).to(device, non_blocking=True) for each in factors])


class _Bags(NamedTuple):
    """Successive bags of one feature or of several."""

    ids: Tensor
    offsets: Tensor | int
    """Where each begins, relative to the first, and the number of ids; or how many each has."""
    bags: int
    weights: Tensor | None


def read_features(given: Features, wanted: list[str], name: str, *, weighted: bool) -> Source:
    """Looks what there is of the wanted features, in their order; the values are not read.

    `name` is what errors call who asks. A feature may be wanted twice.
    """
    if isinstance(given, Mapping):
        return _of_dict(given, wanted, name, weighted)
    if all(callable(getattr(given, each, None)) for each in ("keys", "values", "offsets")):
        return _of_keyed(given, wanted, name, weighted)
    raise TypeError(
        f"{name}: expected a dict of features or a keyed jagged tensor, got {type(given).__name__}"
    )


def _check_named(name: str, keys: list[str], wanted: list[str]) -> None:
    if keys != wanted and (missing := sorted(set(wanted) - set(keys))):
        raise KeyError(f"{name}: features {missing} are missing; given are {keys}")


def _of_keyed(given: Any, wanted: list[str], name: str, weighted: bool) -> Source:
    keys = list(given.keys())
    _check_named(name, keys, wanted)
    if getattr(given, "variable_stride_per_key", bool)():
        strides = dict(zip(keys, given.stride_per_key(), strict=True))
        raise ValueError(f"{name}: all features must have as many samples, got {strides}")
    ids, offsets = given.values(), given.offsets()
    weights = getattr(given, "weights_or_none", lambda: None)() if weighted else None
    _check_ids(f"{name}: values", ids)
    _check_weights(name, ids, weights, weighted)
    bags = len(offsets) - 1
    if not keys or bags % len(keys):
        raise ValueError(f"{name}: {bags} bags are not as many for each of {len(keys)} features")
    _check_offsets(name, offsets, ids, bags)
    samples = bags // len(keys)

    @cache
    def parts() -> list[_Bags]:
        if wanted == keys:
            return [_Bags(ids, offsets, bags, weights)]
        # Where the ids of each feature begin is read, which waits for a GPU.
        begins = offsets[::samples].tolist() if samples else [0] * (len(keys) + 1)
        at = {key: number for number, key in enumerate(keys)}
        made = []
        for first, last in _runs([at[key] for key in wanted]):
            begin, end = begins[first], begins[last + 1]
            some = offsets[first * samples : (last + 1) * samples + 1] - begin
            factors = None if weights is None else weights[begin:end]
            made.append(_Bags(ids[begin:end], some, len(some) - 1, factors))
        return made

    return Source([ids, offsets], tuple(keys), samples, parts)


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The first and the last of each run of successive numbers."""
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        yield members[0], members[-1]


def _of_dict(given: Mapping[str, Any], wanted: list[str], name: str, weighted: bool) -> Source:
    _check_named(name, list(given), wanted)
    parts, tensors = [], []
    for key in wanted:
        part = _of_value(f"{name}: {key!r}", given[key], weighted)
        parts.append(part)
        tensors += [each for each in (part.ids, part.offsets) if isinstance(each, Tensor)]
    samples = {key: part.bags for key, part in zip(wanted, parts, strict=True)}
    if len(set(samples.values())) > 1:
        raise ValueError(f"{name}: all features must have as many samples, got {samples}")
    form = tuple(isinstance(part.offsets, Tensor) for part in parts)
    return Source(tensors, form, parts[0].bags if parts else 0, lambda: parts)


def _of_value(name: str, value: Any, weighted: bool) -> _Bags:
    given = value if isinstance(value, tuple | list) else (value,)
    if not 1 <= len(given) <= 3:
        raise ValueError(f"{name}: expected (ids, offsets) or (ids, offsets, weights)")
    ids, offsets, weights = (*given, None, None)[:3]
    _check_ids(name, ids, 2 if offsets is None else 1)
    _check_weights(name, ids, weights, weighted)
    if offsets is not None:
        _check_offsets(name, offsets, ids, None)
        return _Bags(ids, offsets, len(offsets) - 1, weights)
    per_bag = 1 if ids.dim() == 1 else ids.shape[1]
    return _Bags(ids, per_bag, len(ids), weights)


def _check_ids(name: str, ids: object, most: int = 1) -> None:
    check_ids(name, ids)
    if isinstance(ids, Tensor) and not 1 <= ids.dim() <= most:
        also = " (or [samples, ids of each])" if most > 1 else ""
        raise ValueError(f"{name}: ids must be [ids]{also}, got the shape {list(ids.shape)}")


def _check_weights(name: str, ids: Tensor, weights: object, weighted: bool) -> None:
    if weighted and not isinstance(weights, Tensor):
        raise ValueError(f"{name}: is_weighted asks for a weight of each id, got {weights!r}")
    if isinstance(weights, Tensor) and weights.shape != ids.shape:
        shapes = f"{list(ids.shape)}, got {list(weights.shape)}"
        raise ValueError(f"{name}: weights must have the shape of the ids, {shapes}")


def _check_offsets(name: str, offsets: object, ids: Tensor, bags: int | None) -> None:
    """Offsets on a GPU are not waited for: an id of no bag is left out there."""
    check_ids(f"{name}: offsets", offsets)
    assert isinstance(offsets, Tensor)
    if offsets.dim() != 1 or len(offsets) == 0:
        raise ValueError(f"{name}: offsets must be [samples + 1], got {list(offsets.shape)}")
    if not offsets.is_cpu:
        return
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0 or last != len(ids) or bool((offsets.diff() < 0).any()):
        raise ValueError(
            f"{name}: offsets must rise from 0 to the number of ids, {len(ids)}; got {first} to"
            f" {last}"
        )


def _joined(parts: Sequence[_Bags], samples: int, device: torch.device) -> Jagged:
    """Bags side by side on a device, which nobody waits for."""
    ids = _moved([part.ids.reshape(-1) for part in parts], device)
    if len(parts) == 1 and isinstance(parts[0].offsets, Tensor):
        offsets = _moved([parts[0].offsets], device)
    elif len({each for part in parts if isinstance(each := part.offsets, int)}) == 1 and not any(
        isinstance(part.offsets, Tensor) for part in parts
    ):
        per_bag = parts[0].offsets
        assert isinstance(per_bag, int)
        bags = sum(part.bags for part in parts)
        offsets = torch.arange(bags + 1, device=device) * per_bag
    else:
        pieces, begin = [], 0
        for part in parts:
            each = part.offsets
            if isinstance(each, int):
                each = torch.arange(part.bags, device=part.ids.device) * each
            pieces.append(each[: part.bags] + begin)
            begin += part.ids.numel()
        pieces.append(torch.full((1,), begin, device=pieces[-1].device))
        offsets = _moved(pieces, device)
    begins = None
    if samples and all(part.bags == samples for part in parts):
        begins = [0, *accumulate(part.ids.numel() for part in parts)]
    # Those on the CPU may be written to after the lookup, which is known by these.
    offsets = offsets.to(torch.int64, copy=device.type == "cpu").contiguous()
    return Jagged(ids.contiguous(), offsets, samples, begins)


def _moved(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Integers of one list, on a device that nobody waits for."""
    if len({part.device for part in parts}) > 1:
        parts = [_on(part, device) for part in parts]
    whole = parts[0] if len(parts) == 1 else torch.cat([*parts]) if parts else None
    return torch.empty(0, dtype=torch.int64, device=device) if whole is None else _on(whole, device)


def _on(ids: Tensor, device: torch.device) -> Tensor:
    if ids.device == device:
        return ids
    if device.type != "cuda":
        return ids.to(device)
    return (ids.pin_memory() if ids.is_cpu else ids).to(device, non_blocking=True)


# ------------------------------------------------------------------------------------------------
# What comes out


class JaggedRows:
    """Looked-up rows of one feature, as many for each sample as it has ids.

    Its methods are those of torchrec's JaggedTensor.
    """

    def __init__(self, values: Tensor, offsets: Tensor) -> None:
        self._values = values
        self._offsets = offsets

    def values(self) -> Tensor:
        """The rows, sample after sample: `[ids, columns]`."""
        return self._values

    def offsets(self) -> Tensor:
        """Where each sample's rows begin, and their number: `[samples + 1]`."""
        return self._offsets

    def lengths(self) -> Tensor:
        """How many rows each sample has: `[samples]`."""
        return self._offsets.diff()


class KeyedFeatures:
    """What was looked up, by feature; the methods are those of torchrec's KeyedTensor.

    A feature of two tables is called `feature@table`.
    """

    def __init__(
        self,
        places: Mapping[str, tuple[int, int]],
        part: Callable[[int, int], Any],
        values: Callable[[], Tensor],
    ) -> None:
        self._places = places
        self._part = part
        self._values = values

    def keys(self) -> list[str]:
        """The features, in the order of the tables and of their features."""
        return list(self._places)

    def values(self) -> Tensor:
        """All features: pooled ones side by side, `[samples, columns]`; rows `[ids, columns]`."""
        return self._values()

    def __getitem__(self, key: str) -> Any:
        """One feature: pooled `[samples, columns]`, or its JaggedRows."""
        if key not in self._places:
            raise KeyError(f"{key!r} is none of the features {self.keys()}")
        return self._part(*self._places[key])

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def items(self) -> Iterator[tuple[str, Any]]:
        """Each feature's name, and what was looked up."""
        return ((key, self._part(*place)) for key, place in self._places.items())

    def to_dict(self) -> dict[str, Any]:
        """Each feature by its name."""
        return dict(self.items())

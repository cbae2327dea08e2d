"""The input and results of collections: bags of ids by feature and sample, and their rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import accumulate, groupby, repeat
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from speedtorch.plan.planned_batch import ID_DTYPES, check_ids

__all__ = [
    "Features",
    "GroupRows",
    "Jagged",
    "JaggedRows",
    "KeyedFeatures",
    "RowsByFeature",
    "read_features",
]

Features = Any
"""A keyed jagged tensor or a dict; see EmbeddingBagCollection."""


class Jagged(NamedTuple):
    """Bags of ids, ordered by feature, then sample."""

    ids: Tensor
    """`[ids]`, int32 or int64."""
    offsets: Tensor
    """The first position of each bag, then the number of ids: `[features * samples + 1]`, int64."""
    samples: int
    begins: list[int] | None
    """The result of begins_of(), if the host knows this without reading offsets."""

    def begins_of(self, features: int) -> list[int]:
        """The first position of each feature's ids, then the number of ids. May wait for a GPU."""
        if self.begins is None:
            ends: list[int] = self.offsets[:: max(1, self.samples)].tolist()
            return ends if self.samples else [0] * (features + 1)
        return self.begins


class Source(NamedTuple):
    """Features that read() converts to Jagged."""

    tensors: list[Tensor]
    """The ids and offsets."""
    form: Hashable
    """The roles of the tensors: sources with equal form and equal tensors have the same ids."""
    samples: int
    parts: Callable[[], Sequence[_Bags]]
    sizes: tuple[int, ...] | None = None
    """The bag size of each tensor, if every tensor has bags of one size."""

    def read(self, device: torch.device) -> Jagged:
        """Concatenates the bags on a device.

        Waits for a GPU only if the bags are copied from it to the CPU, or if a keyed tensor on it
        has other features, or another order, than wanted.
        """
        parts, sizes = self.tensors, self.sizes
        if sizes is None or (device.type != "cpu" and len({*sizes}) > 1):
            return _joined(self.parts(), self.samples, device)
        if not len({*sizes}) == len({ids.dim() for ids in parts}) == 1:
            parts = [ids.reshape(-1) for ids in parts]
        ids = _moved(parts, device).reshape(-1).contiguous()
        if device.type == "cpu":
            # A new tensor for each lookup, which may run in another mode, such as inference mode.
            offsets = torch.from_numpy(_even_offsets(sizes, self.samples))
            return Jagged(ids, offsets, self.samples, None)
        offsets = torch.arange(len(sizes) * self.samples + 1, device=device)
        if sizes[0] != 1:
            offsets *= sizes[0]
        begins = [feature * self.samples * sizes[0] for feature in range(len(sizes) + 1)]
        return Jagged(ids, offsets, self.samples, begins)

    def weights(self, device: torch.device) -> Tensor:
        """Returns the weight of each id on a device."""
        factors = [part.weights for part in self.parts() if part.weights is not None]
        return torch.cat([weights.reshape(-1).to(device, non_blocking=True) for weights in factors])


class _Bags(NamedTuple):
    """Consecutive bags of one or several features."""

    ids: Tensor
    offsets: Tensor | int
    """Offsets relative to the first bag, with the number of ids at the end; or the bag size."""
    bags: int
    weights: Tensor | None = None


def read_features(given: Features, wanted: list[str], name: str, *, weighted: bool) -> Source:
    """Checks the input and returns the wanted features in order.

    Values of ids, and of tensors on a GPU, are not read. `name` is the module's name in error
    messages. `wanted` may contain a feature twice.
    """
    if isinstance(given, Mapping):
        return _of_dict(given, wanted, name, weighted)
    if all(callable(getattr(given, method, None)) for method in ("keys", "values", "offsets")):
        return _of_keyed(given, wanted, name, weighted)
    raise TypeError(
        f"{name}: expected a dict of features or a keyed jagged tensor, got {type(given).__name__}."
        f" Pass {{{wanted[0]!r}: ids, ...}}."
    )


def _check_named(name: str, keys: list[str], wanted: list[str]) -> None:
    if keys != wanted and (missing := sorted(set(wanted) - set(keys))):
        raise KeyError(f"{name}: features {missing} are missing. The input has {keys}.")


def _of_keyed(given: Any, wanted: list[str], name: str, weighted: bool) -> Source:
    keys = list(given.keys())
    _check_named(name, keys, wanted)
    if getattr(given, "variable_stride_per_key", bool)():
        strides = dict(zip(keys, given.stride_per_key(), strict=True))
        raise ValueError(f"{name}: features must have equal numbers of samples, got {strides}")
    if getattr(given, "inverse_indices_or_none", lambda: None)() is not None:
        raise NotImplementedError(
            f"{name}: inverse_indices are not supported. Look the features up without them, and"
            " expand the result: result[key].index_select(0, inverse_indices)."
        )
    ids, offsets = given.values(), given.offsets()
    weights = getattr(given, "weights_or_none", lambda: None)() if weighted else None
    _check_ids(f"{name}: values", ids)
    _check_weights(name, ids, weights, weighted)
    bags = len(offsets) - 1
    if not keys or bags % len(keys):
        raise ValueError(f"{name}: {bags} bags cannot be divided among {len(keys)} features")
    _check_offsets(name, offsets, ids, bags)
    samples = bags // len(keys)

    @cache
    def parts() -> list[_Bags]:
        """Returns the bags of the wanted features in order."""
        if wanted == keys:
            return [_Bags(ids, offsets, bags, weights)]
        # Reads the first position of each feature's ids, which waits for a GPU.
        begins = offsets[::samples].tolist() if samples else [0] * (len(keys) + 1)
        at = {key: number for number, key in enumerate(keys)}
        made = []
        for first, last in _runs([at[key] for key in wanted]):
            begin, end = begins[first], begins[last + 1]
            own_offsets = offsets[first * samples : (last + 1) * samples + 1] - begin
            factors = None if weights is None else weights[begin:end]
            made.append(_Bags(ids[begin:end], own_offsets, len(own_offsets) - 1, factors))
        return made

    return Source([ids, offsets], tuple(keys), samples, parts)


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the first and the last number of each run of consecutive numbers."""
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        yield members[0], members[-1]


def _of_dict(given: Mapping[str, Any], wanted: list[str], name: str, weighted: bool) -> Source:
    _check_named(name, list(given.keys()), wanted)  # iter(TensorDict) yields samples
    values = [given[key] for key in wanted]
    if not weighted and (sizes := _sizes_of(values)) is not None:
        form, bags = (False,) * len(values), len(values[0])
        return Source(values, form, bags, lambda: [*map(_Bags, values, sizes, repeat(bags))], sizes)
    parts = [
        _of_value(f"{name}: {key!r}", value, weighted)
        for key, value in zip(wanted, values, strict=True)
    ]
    if len({part.bags for part in parts}) > 1:
        samples = {key: part.bags for key, part in zip(wanted, parts, strict=True)}
        raise ValueError(f"{name}: features must have equal numbers of samples, got {samples}")
    tensors = [tensor for part in parts for tensor in part[:2] if isinstance(tensor, Tensor)]
    form = tuple(isinstance(part.offsets, Tensor) for part in parts)
    return Source(tensors, form, parts[0].bags, lambda: parts)


def _sizes_of(values: list[Any]) -> tuple[int, ...] | None:
    """Returns each feature's bag size; None unless all are valid tensors of ids without offsets."""
    if {*map(type, values)} != {Tensor} or {ids.layout for ids in values} != {torch.strided}:
        return None
    if any(ids.is_nested for ids in values):  # nested tensors have no shape
        return None
    shapes = [ids.shape for ids in values]
    kinds = {*shapes}  # usually a single shape
    if not ({ids.dtype for ids in values} <= ID_DTYPES and {*map(len, kinds)} <= {1, 2}):
        return None
    if len({shape[0] for shape in kinds}) > 1:
        return None
    return tuple([1 if len(shape) == 1 else shape[1] for shape in shapes])


def _of_value(name: str, value: Any, weighted: bool) -> _Bags:
    given = value if isinstance(value, tuple | list) else (value,)
    if not 1 <= len(given) <= 3:
        raise ValueError(
            f"{name}: expected (ids, offsets) or (ids, offsets, weights), got {len(given)} values"
        )
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
        raise ValueError(f"{name}: is_weighted needs a weight for each id, got {weights!r}")
    if isinstance(weights, Tensor) and weights.shape != ids.shape:
        shapes = f"{list(ids.shape)}, got {list(weights.shape)}"
        raise ValueError(f"{name}: weights must have the shape of the ids, {shapes}")


def _check_offsets(name: str, offsets: object, ids: Tensor, bags: int | None) -> None:
    """Checks the dtype and shape of offsets, and their values if they are on the CPU."""
    check_ids(f"{name}: offsets", offsets)
    assert isinstance(offsets, Tensor)
    if offsets.dim() != 1 or len(offsets) == 0:
        raise ValueError(f"{name}: offsets must be [samples + 1], got {list(offsets.shape)}")
    if not offsets.is_cpu:
        return
    values = offsets.numpy()  # runs in every lookup
    if values[0] != 0 or values[-1] != len(ids) or (values[1:] < values[:-1]).any():
        raise ValueError(
            f"{name}: offsets must begin with 0, never decrease and end with the number of ids,"
            f" {len(ids)}. The first is {values[0]} and the last is {values[-1]}. If there is one"
            " offset for each bag, append len(ids)."
        )


@lru_cache(maxsize=4)  # an entry of a large batch takes megabytes
def _even_offsets(sizes: tuple[int, ...], samples: int) -> npt.NDArray[np.int64]:
    """Returns offsets of `samples` bags for each size. Callers share them and must not write."""
    steps = np.repeat([0, *sizes], [1, *[samples] * len(sizes)])
    return steps.cumsum(dtype=np.int64)


def _joined(parts: Sequence[_Bags], samples: int, device: torch.device) -> Jagged:
    """Concatenates bags on a device. A copy to a GPU does not wait."""
    flat = [part.ids if part.ids.dim() == 1 else part.ids.reshape(-1) for part in parts]
    ids, bags = _moved(flat, device), sum(part.bags for part in parts)
    sizes = {part.offsets if isinstance(part.offsets, int) else None for part in parts}
    if len(parts) == 1 and isinstance(parts[0].offsets, Tensor):
        # Copy offsets on the CPU: the caller may overwrite them while the result still uses them.
        offsets = _moved([parts[0].offsets], device).to(torch.int64, copy=device.type == "cpu")
    elif len(sizes) == 1 and (per_bag := sizes.pop()) is not None:
        offsets = torch.arange(bags + 1, device=device)
        offsets = offsets if per_bag == 1 else offsets * per_bag
    else:
        offset_parts, begin = [], 0
        for part in parts:
            part_offsets = part.offsets
            if isinstance(part_offsets, int):
                part_offsets = torch.arange(part.bags, device=part.ids.device) * part_offsets
            offset_parts.append(part_offsets[: part.bags] + begin)
            begin += part.ids.numel()
        offset_parts.append(torch.full((1,), begin, device=offset_parts[-1].device))
        offsets = _moved(offset_parts, device)
    begins = None
    if samples and all(part.bags == samples for part in parts):
        begins = [0, *accumulate(ids.numel() for ids in flat)]
    offsets = offsets.to(torch.int64).contiguous()
    return Jagged(ids.contiguous(), offsets, samples, begins)


def _moved(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Concatenates integer tensors on a device. A copy to a GPU does not wait."""
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


# ---- Results


class GroupRows:
    """Looked-up rows of one group, ordered by feature.

    Args:
        rows: The rows, `[ids, columns]`.
        jagged: The ids.
        features: The number of features.
        has_ids: Whether results also have the ids.
    """

    def __init__(self, rows: Tensor, jagged: Jagged, features: int, *, has_ids: bool) -> None:
        self.rows, self.jagged = rows, jagged
        self.ids = jagged.ids if has_ids else None
        self._features = features
        self._begins: list[int] | None = None

    def place_of(self, number: int) -> slice:
        """Returns the positions of a feature's rows. The first call may wait for a GPU."""
        if self._begins is None:
            self._begins = self.jagged.begins_of(self._features)
        return slice(*self._begins[number : number + 2])

    def bags_of(self, number: int) -> Tensor:
        """The first position of each sample's rows in a feature, then their end."""
        first = number * self.jagged.samples
        return self.jagged.offsets[first : first + self.jagged.samples + 1]


class JaggedRows:
    """Looked-up rows of one feature, one row for each id of a sample.

    The methods behave as those of torchrec's JaggedTensor. values() returns the rows. weights()
    returns the ids if the collection has need_indices.
    """

    def __init__(self, group: GroupRows, number: int) -> None:
        self._group, self._number = group, number

    def values(self) -> Tensor:
        """The rows, ordered by sample: `[ids, columns]`."""
        return self._group.rows[self._group.place_of(self._number)]

    def offsets(self) -> Tensor:
        """The first position of each sample's rows, then their number: `[samples + 1]`, int64."""
        bags = self._group.bags_of(self._number)
        return bags - bags[:1]

    def offsets_or_none(self) -> Tensor:
        """Returns offsets()."""
        return self.offsets()

    def lengths(self) -> Tensor:
        """The number of rows of each sample: `[samples]`, int64."""
        return self._group.bags_of(self._number).diff()

    def lengths_or_none(self) -> Tensor:
        """Returns lengths()."""
        return self.lengths()

    def weights(self) -> Tensor:
        """The id of each row, `[ids]`. Raises ValueError without need_indices."""
        if (weights := self.weights_or_none()) is None:
            raise ValueError("weights(): build the EmbeddingCollection with need_indices=True")
        return weights

    def weights_or_none(self) -> Tensor | None:
        """The id of each row, `[ids]`, or None without need_indices."""
        ids = self._group.ids
        return None if ids is None else ids[self._group.place_of(self._number)]

    def device(self) -> torch.device:
        """The device of the rows."""
        return self._group.rows.device

    def to(self, device: torch.device | str, non_blocking: bool = False) -> JaggedRows:
        """Returns the rows, offsets and ids on a device."""
        ids, has_ids = self.weights_or_none(), self._group.ids is not None
        rows, offsets = self.values(), self.offsets()
        given = (rows, offsets, offsets[:0] if ids is None else ids)
        rows, offsets, ids = (tensor.to(device, non_blocking=non_blocking) for tensor in given)
        jagged = Jagged(ids, offsets, len(offsets) - 1, [0, len(rows)])
        return JaggedRows(GroupRows(rows, jagged, 1, has_ids=has_ids), 0)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Calls Tensor.record_stream for all tensors: `stream` uses them."""
        group = self._group
        for tensor in (group.rows, group.jagged.offsets, group.ids):
            if tensor is not None:
                tensor.record_stream(stream)

    def to_dense(self) -> list[Tensor]:
        """The rows of each sample: `[ids of the sample, columns]`."""
        return [*torch.split(self.values(), self.lengths().tolist())]

    def to_dense_weights(self) -> list[Tensor] | None:
        """The ids of each sample, or None without need_indices."""
        weights = self.weights_or_none()
        return None if weights is None else [*torch.split(weights, self.lengths().tolist())]

    def to_padded_dense(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor:
        """Returns equally many rows for each sample: `[samples, desired_length, columns]`.

        Args:
            desired_length: Rows of each sample; by default the maximum of all samples. Longer
                samples are truncated at the end.
            padding_value: The value of the elements after the rows of a shorter sample.
        """
        return self._padded(self.values(), desired_length, padding_value)

    def to_padded_dense_weights(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor | None:
        """Returns padded ids `[samples, desired_length]`, or None without need_indices."""
        weights = self.weights_or_none()
        return None if weights is None else self._padded(weights, desired_length, padding_value)

    def _padded(self, values: Tensor, length: int | None, padding: float) -> Tensor:
        bags = self._group.bags_of(self._number)
        offsets, lengths = (bags - bags[:1])[:-1, None], bags.diff()[:, None]
        samples = len(lengths)
        if length is None:
            length = int(lengths.max()) if samples else 0
        if not len(values):
            return values.new_full((samples, length, *values.shape[1:]), padding)
        places = torch.arange(length, device=values.device)
        is_padding = places >= lengths
        padded = values[(offsets + places).clamp(max=len(values) - 1)]
        return padded.masked_fill(
            is_padding[..., None] if values.dim() > 1 else is_padding, padding
        )

    def __repr__(self) -> str:
        jagged, columns = self._group.jagged, self._group.rows.shape[1]
        return f"{type(self).__name__}(samples={jagged.samples}, columns={columns})"


class RowsByFeature(dict[str, JaggedRows]):
    """The result of an EmbeddingCollection: the rows of each feature."""

    def __init__(self, features: Mapping[str, JaggedRows], rows: Sequence[Tensor] = ()) -> None:
        """`rows` has one tensor for each group of tables, with the rows of its features."""
        super().__init__(features)
        self._rows = rows

    def rows(self) -> Tensor:
        """Concatenates the rows of all features in their order: `[ids, columns]`.

        With one group of tables the call does not wait for the GPU. values() of a feature may wait.
        Raises ValueError if tables differ in columns.
        """
        if len(self._rows) == 1:
            return self._rows[0]
        parts = [feature.values() for feature in self.values()]
        if len({rows.shape[1] for rows in parts}) > 1:
            raise ValueError("rows(): the tables differ in columns. Read features by name.")
        return torch.cat(parts)

    def __missing__(self, key: str) -> NoReturn:
        raise KeyError(f"{key!r} is not one of the features {list(self)}")


class KeyedFeatures:
    """The result of an EmbeddingBagCollection: pooled rows by feature.

    The methods behave as those of torchrec's KeyedTensor, and KeyedTensor.regroup() accepts this
    class. A feature of several tables is called `feature@table`.
    """

    def __init__(self, places: Mapping[str, tuple[int, int, int]], parts: Sequence[Tensor]) -> None:
        """`places` has (number of the part, first column, columns) by feature."""
        self._places = places
        self._parts = parts
        self._whole = parts[0] if len(parts) == 1 else None

    def keys(self) -> list[str]:
        """The feature names, ordered by tables, then features."""
        return list(self._places)

    def values(self) -> Tensor:
        """Concatenates all features: `[samples, columns of all]`."""
        if self._whole is None:  # a later caller may need the graph
            with torch.inference_mode(False), torch.enable_grad():
                self._whole = torch.cat([rows for _, rows in self.items()], 1)
        return self._whole

    def key_dim(self) -> int:
        """The dimension of values() in which features are concatenated: 1."""
        return 1

    def length_per_key(self) -> list[int]:
        """The number of columns of each feature."""
        return [columns for _, _, columns in self._places.values()]

    def offset_per_key(self) -> list[int]:
        """The first column of each feature in values(), then the number of columns."""
        return [0, *accumulate(self.length_per_key())]

    def device(self) -> torch.device:
        """The device of the result."""
        return self._parts[0].device

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyedFeatures:
        """Returns the result on a device."""
        moved = self.values().to(device, non_blocking=non_blocking)
        spans = zip(self._places, self.offset_per_key(), self.length_per_key(), strict=False)
        return KeyedFeatures({key: (0, first, n) for key, first, n in spans}, [moved])

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Calls Tensor.record_stream for the result: `stream` uses it."""
        for tensor in (*self._parts, self.values()):
            tensor.record_stream(stream)

    def __getitem__(self, key: str) -> Tensor:
        """Returns the pooled rows of a feature, `[samples, columns]`."""
        if key not in self._places:
            raise KeyError(f"{key!r} is not one of the features {self.keys()}")
        part, first, columns = self._places[key]
        return self._parts[part].narrow(1, first, columns)

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Returns pairs of a feature name and its pooled rows."""
        return ((key, self[key]) for key in self._places)

    def to_dict(self) -> dict[str, Tensor]:
        """Returns the pooled rows by feature name."""
        return dict(self.items())

    def _key_indices(self) -> dict[str, int]:
        """The position of each feature; torchrec's KeyedTensor.regroup calls this method."""
        return {key: number for number, key in enumerate(self._places)}

    def __repr__(self) -> str:
        columns = dict(zip(self._places, self.length_per_key(), strict=True))
        return f"{type(self).__name__}({columns})"

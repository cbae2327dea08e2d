"""SparseRows: a tensor of a table's shape with memory for only some of its rows.

Examples are the gradient of an Embedding's weight and torch.zeros_like(weight). Operations return
values equal to those of a dense tensor, or raise NotImplementedError; docs/differences.md lists
exceptions. Pointwise operations, sums, norms, index_select and reads of a row with memory use only
the rows that have memory, as long as the other rows equal one number. Most other operations
allocate all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor

from speedtorch.torch_internals import (
    FOREACH_TYPES,
    forbid_data_pointer,
    increment_versions,
    is_pointwise,
    is_view,
    no_torch_function,
    tensor_without_memory,
    tree_leaves,
    tree_map,
    version_of,
)

__all__ = ["LIKE_FILLS", "RowContent", "SparseRows", "map_lists", "single_name"]

_ALIASES = frozenset({"detach", "alias", "lift_fresh", "detach_"})
# Pointwise operations that torch does not tag as pointwise.
_ELEMENTWISE = frozenset({"_to_copy", "copy_", "zero_", "fill_", "masked_fill_"})
LIKE_FILLS = {"zeros_like": 0.0, "ones_like": 1.0, "empty_like": 0.0, "full_like": None}
"""The fill of the result of a function such as torch.zeros_like; None if an argument sets it."""
# Reductions to which zero elements contribute nothing.
_SUMS = frozenset({"linalg_vector_norm", "sum", "any", "count_nonzero", "norm"})
# Functions of lists that keep zeros if the other arguments are numbers or one-element tensors.
_KEEP_ZEROS = frozenset(
    f"_foreach_{name}{end}"
    for name in ("mul", "div", "zero", "sqrt", "norm", "clone")
    for end in ("", "_")
) | {"_amp_foreach_non_finite_check_and_unscale_"}
_CLAMPS = {"_foreach_clamp_min_": -1, "_foreach_clamp_max_": 1}
# Operations that replace the memory, the shape or the strides.
_REPLACES = frozenset({"set_", "resize_", "resize_as_", "t_", "transpose_", "swapaxes_"}) | {
    *("swapdims_", "squeeze_", "unsqueeze_", "as_strided_", "slice_inverse")
}
# Operations that a rank may apply to its shard, because every rank applies them to its own shard.
_ALIKE = frozenset({"mul_", "div_", "zero_", "clamp_", "clamp_min_", "clamp_max_"}) | {
    *("_foreach_mul_", "_foreach_div_", "_foreach_zero_", *_CLAMPS)
}


_Scales: TypeAlias = tuple[tuple[Callable[[Tensor, Tensor], Tensor], Tensor, int], ...]


class RowContent:
    """The rows that a SparseRows and its aliases share.

    Attributes:
        values: `[n, ...]`, the rows with memory, in the order of the ids; rows after the last id
            equal `fill`.
        scales: (operation, number, version) of GPU numbers that multiplied or divided the other
            rows, which were zero. 0 * NaN is NaN, but a read of the number waits for the GPU.
        dense: All rows `[N, ...]`, allocated by the first operation that needs them. Then `dense`
            replaces the other attributes.
        local_only: Why only operations that treat all elements alike are supported, or None.
    """

    def __init__(
        self,
        ids: Tensor | Callable[[], Tensor],
        values: Tensor,
        fill: float = 0.0,
        *,
        scales: _Scales = (),
        local_only: str | None = None,
        zeroed: Callable[[], Callable[[RowContent], object] | None] = lambda: None,
    ) -> None:
        self._ids = ids
        self.values, self.own_fill, self.scales = values, fill, scales
        self.dense: Tensor | None = None
        self.local_only = local_only
        self.zeroed = zeroed
        """A weak reference to a function that is called with this content after zero_()."""

    @property
    def ids(self) -> Tensor:
        """Ids of the rows with memory; with a capacity a read waits for the device."""
        if not isinstance(self._ids, Tensor):
            self._ids = self._ids()
        return self._ids

    @property
    def has_zeros(self) -> bool:
        """Whether the rows without memory are zero, or were zero before their `scales`."""
        return self.own_fill == 0 and self.dense is None

    @property
    def scaled_zero(self) -> Tensor | None:
        """The fill of the rows without memory after their `scales`; None without scales."""
        scaled = self.values.new_full((), self.own_fill) if self.scales else None
        for operation, number, version in self.scales:
            if _version(number) != version:
                raise NotImplementedError(
                    "the gradient of an Embedding was scaled by a tensor that has changed since."
                    " Rows without memory can no longer be computed. Scale by a clone of it."
                )
            scaled = operation(scaled, number.reshape(()))  # type: ignore[arg-type]
        return scaled

    @property
    def fill(self) -> float:
        """The value of all elements without memory. Waits for the GPU if there are `scales`."""
        return self.own_fill if (scaled := self.scaled_zero) is None else float(scaled)

    @property
    def is_constant(self) -> bool:
        """Whether all elements equal one number because no row has memory."""
        return self.dense is None and not len(self.values)

    def are_of(self, ids: Tensor) -> bool:
        """Whether `ids` is the very tensor of the rows' ids."""
        return self._ids is ids

    @property
    def rows(self) -> Tensor:
        """The rows of the ids."""
        return self.values[: len(self.ids)]

    def report_zeros(self, zeroed: Callable[[], Callable[[RowContent], object] | None]) -> None:
        """Replaces `zeroed`."""
        self.zeroed = zeroed

    def keep(self, ids: Tensor | Callable[[], Tensor], values: Tensor) -> None:
        """Replaces the ids and the values."""
        self._ids, self.values = ids, values

    def set_fill(self, fill: float, scales: _Scales) -> None:
        """Replaces the fill and the scales of the rows without memory."""
        self.own_fill, self.scales = fill, scales

    def has_rows_of(self, other: RowContent) -> bool:
        """Whether both have the same ids tensor and number of values, tested without a wait."""
        return self._ids is other._ids and len(self.values) == len(other.values)

    def rows_at(self, ids: Tensor) -> Tensor:
        """Copies the rows of any ids, `[*ids.shape, ...]`."""
        self._check_all()
        own, place = torch.sort(self.ids)
        requested = ids.to(own.device).reshape(-1)
        rows = self.values.new_full((len(requested), *self.values.shape[1:]), self.fill)
        if len(own):
            found = torch.searchsorted(own, requested).clamp_(max=len(own) - 1)
            there = (own[found] == requested).nonzero().squeeze(1)
            rows[there] = self.rows[place[found[there]]]
        return rows.view(*ids.shape, *rows.shape[1:])

    def all_rows(self, count: int) -> Tensor:
        """Copies all rows, `[count, ...]`."""
        self._check_all()
        shape = (count, *self.values.shape[1:])
        if self.dense is not None:
            return self.dense.clone()
        dense = self.values.new_full(shape, self.fill)
        return dense.index_copy_(0, self.ids.to(dense.device), self.rows)

    def _check_all(self) -> None:
        """Raises NotImplementedError if other ranks have some of the rows."""
        if self.local_only is not None:
            raise NotImplementedError(f"the gradient of {self.local_only}")


class SparseRows(Tensor):
    """A tensor `[N, ...]` whose elements equal one number, except for the rows with memory.

    `torch.zeros_like(emb.weight)` and `emb.weight.grad` return such tensors. Indexed writes, views
    and most other operations that are not pointwise allocate all N rows on the device.
    """

    content: RowContent

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @staticmethod
    def of(rows: int, content: RowContent) -> SparseRows:
        """A tensor with `rows` rows and this content."""
        values = content.values
        made = tensor_without_memory(
            SparseRows, (rows, *values.shape[1:]), dtype=values.dtype, device=values.device
        )
        forbid_data_pointer(made)
        vars(made)["content"] = content
        return made

    @staticmethod
    def filled(rows: int, like: Tensor, fill: float) -> SparseRows:
        """A tensor filled with one number, with the row shape, dtype and device of `like`."""
        ids = torch.empty(0, dtype=torch.int64, device=like.device)
        return SparseRows.of(rows, RowContent(ids, like[:0].detach().clone(), fill))

    @property
    def data(self) -> Tensor:
        """The same elements with an own version, so that graphs do not notice writes to them."""
        return SparseRows.of(self.shape[0], self.content)

    @data.setter
    def data(self, value: Tensor) -> None:
        """Replaces the elements by copies of `value`; torch's own setter would have no effect."""
        if value.shape != self.shape or value.dtype != self.dtype or value.device != self.device:
            raise RuntimeError(
                f"{self!r}: attempting to assign data of {[*value.shape]} {value.dtype} on"
                f" {value.device}"
            )
        if getattr(value, "content", None) is not self.content:  # grad.data *= 2 assigns itself
            made = SparseRows.filled(self.shape[0], self.content.values, 0.0)
            made.content.local_only = self.content.local_only
            made.content.report_zeros(self.content.zeroed)
            with torch.no_grad():
                made.copy_(value)
            # Other tensors keep the old elements, although writes to this one change the gradient.
            self.content.keep(self.content._ids, self.content.values.clone())
            vars(self)["content"] = made.content

    def to_dense(self, *_: Any, **__: Any) -> Tensor:
        """Copies all rows to a dense tensor."""
        return self.content.all_rows(self.shape[0])

    def numpy(self, **options: Any) -> Any:
        """Returns all rows, as a dense tensor does."""
        return self.in_memory().numpy(**options)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.in_memory().__array__(*args, **kwargs)  # type: ignore[no-untyped-call]

    def tolist(self) -> Any:
        """Returns all rows, as a dense tensor does."""
        return self.to_dense().tolist()

    def untyped_storage(self) -> NoReturn:
        """Raises NotImplementedError, as all functions that need the memory itself do."""
        raise NotImplementedError(f"{self!r} has no storage. Use to_dense(), a copy of all rows.")

    share_memory_ = storage = const_data_ptr = untyped_storage

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copied = self.clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.to_dense().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SparseRows({[*self.shape]}, {self.dtype}, device={self.device})"

    def in_memory(self) -> Tensor:
        """Allocates memory for all rows, which the tensor uses from then on, and returns it."""
        content = self.content
        if content.dense is None:
            with torch.inference_mode(False):
                content.dense = content.all_rows(self.shape[0])
        return content.dense

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.is_inference_mode_enabled():  # inference tensors could not be written to later
            with torch.inference_mode(False), torch.no_grad():
                return cls.__torch_dispatch__(func, types, args, kwargs)
        kwargs, name = kwargs or {}, _name_of(func)
        if args and isinstance(args[0], list) and "foreach" in name:
            return _of_lists(func, name, args, kwargs)
        sparse = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, SparseRows)]
        first = sparse[0]
        if name in _ALIASES:
            return SparseRows.of(first.shape[0], first.content)
        if name in LIKE_FILLS and not kwargs.get("dtype") and not kwargs.get("device"):
            fill: Any = args[1] if name == "full_like" else LIKE_FILLS[name]
            return SparseRows.filled(first.shape[0], first.content.values, fill)
        if name.startswith("new_"):
            return func(first.content.values.detach(), *args[1:], **kwargs)
        writes = func._schema.is_mutable
        is_out = writes and any(isinstance(leaf, SparseRows) for leaf in kwargs.values())
        if name in _REPLACES or is_out:
            raise NotImplementedError(
                f"{name}() is not supported for a tensor with memory for only some of its rows. Use"
                " to_dense(), a copy of all rows."
            )
        _check_alike(name, args, [leaf.content for leaf in sparse])
        result = NotImplemented
        if all(leaf.content.dense is None for leaf in sparse):
            if is_pointwise(func) or name in _ELEMENTWISE:
                result = _pointwise(func, args, kwargs, sparse)
            elif len(sparse) == 1 and first is args[0] and not writes:
                result = _of_rows(func, name, first, args, kwargs)
        if result is NotImplemented:
            result = _of_all_rows(func, args, kwargs)
        if writes:
            _note_written(name, [leaf.content for leaf in sparse])
        is_own = result is not None and result is first.content.dense
        return first if is_own else result


@cache
def _name_of(func: Any) -> str:
    """The name of an operation without its namespace."""
    name: str = func._schema.name
    return name.partition("::")[2]


def _note_written(name: str, contents: Sequence[RowContent]) -> None:
    """Increments the version, which torch does not do below autograd."""
    increment_versions([content.values for content in contents])
    for content in contents:
        if name in ("zero_", "_foreach_zero_") and (zeroed := content.zeroed()) is not None:
            zeroed(content)


def _check_alike(name: str, args: Sequence[Any], contents: Sequence[RowContent]) -> None:
    """Raises NotImplementedError if a rank has a shard of the rows and `name` needs all rows."""
    reason = next((content.local_only for content in contents if content.local_only), None)
    if reason is None:
        return
    plain = [
        a for a in tree_leaves(args) if isinstance(a, Tensor) and not isinstance(a, SparseRows)
    ]
    in_a_list = isinstance(args[0], list)
    if name not in _ALIKE or (any(a.dim() for a in plain) and not in_a_list):
        raise NotImplementedError(f"{name}() of the gradient of {reason}")


def _of_all_rows(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls `func` with all rows allocated; the tensors keep this memory if it may be written."""
    # Operations of other libraries, such as collectives, may write without a mutable schema.
    keeps_memory = func._schema.is_mutable or is_view(func) or func.namespace != "aten"

    def all_rows_of(leaf: Any) -> Any:
        """Returns all rows of a SparseRows as a dense tensor."""
        if not isinstance(leaf, SparseRows):
            return leaf
        is_allocated = leaf.content.dense is not None
        return leaf.in_memory() if keeps_memory or is_allocated else leaf.to_dense()

    return func(*tree_map(all_rows_of, args), **tree_map(all_rows_of, kwargs))


def _of_rows(func: Any, name: str, tensor: SparseRows, args: Any, kwargs: Any) -> Any:
    """The result of a reduction or a lookup, or NotImplemented if all rows are needed."""
    content = tensor.content
    given = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
    if name in _SUMS and content.has_zeros and given.get("dim") in (None, []):
        order = given.get("ord", given.get("p", 1))
        if order is None or order > 0:
            found = func(_some(content.values), *args[1:], **kwargs)
            if (zero := content.scaled_zero) is None:
                return found
            if found.is_floating_point():
                return found + zero
    if name == "index_select" and given["dim"] % tensor.dim() == 0:
        return content.rows_at(given["index"])
    if name == "select" and given["dim"] == 0:
        place = (content.ids == given["index"] % max(1, tensor.shape[0])).nonzero()
        if len(place):
            return content.values[int(place[0])]
    return NotImplemented


def _some(values: Tensor) -> Tensor:
    """The values, or one zero row instead of no rows, whose maximum torch does not define."""
    return values if len(values) else values.new_zeros((1, *values.shape[1:]))


def _pointwise(func: Any, args: Any, kwargs: Any, sparse: Sequence[SparseRows]) -> Any:
    """The result of a pointwise operation, or NotImplemented if all rows are needed."""
    first, contents = sparse[0], [leaf.content for leaf in sparse]
    shape, own = first.shape, contents[0]
    written = func._schema.is_mutable
    leaves = tree_leaves((args, kwargs))
    plain = [a for a in leaves if isinstance(a, Tensor) and not isinstance(a, SparseRows)]
    if any(leaf.shape != shape for leaf in sparse) or (written and args[0] is not first):
        return NotImplemented
    if any(leaf.dim() > len(shape) for leaf in plain) or "out" in kwargs:
        return NotImplemented
    differs = any(leaf.dim() == len(shape) and leaf.shape[0] != 1 for leaf in plain)
    fill: float | None = own.own_fill
    scales = None if len(sparse) > 1 or kwargs else _scales_of_call(func, args, first)
    if scales is None:
        fill, scales = _fill(func, args, kwargs, contents, plain, len(shape), differs), ()
    if fill is None:
        return NotImplemented
    ids: Any = own._ids
    if all(own.has_rows_of(content) for content in contents):
        ids = own.ids if differs else ids
        rows = [content.rows if differs else content.values for content in contents]
    else:
        ids = torch.unique(torch.cat([content.ids for content in contents]))
        if len(ids) == len(own.ids):
            ids = own.ids
        rows = [c.rows if c.ids is ids else c.rows_at(ids) for c in contents]
    remaining = iter(rows)

    def rows_of_ids(leaf: Any) -> Any:
        """Returns the rows of the ids from an argument that has all rows."""
        if isinstance(leaf, SparseRows):
            return next(remaining)
        is_whole = isinstance(leaf, Tensor) and leaf.dim() == len(shape) and leaf.shape[0] != 1
        return leaf.index_select(0, ids.to(leaf.device)) if is_whole else leaf

    result = func(*tree_map(rows_of_ids, args), **tree_map(rows_of_ids, kwargs))
    if written:
        if result.data_ptr() != own.values.data_ptr():
            own.keep(ids, result)
        own.set_fill(fill, scales)
        return first
    return SparseRows.of(shape[0], RowContent(ids, result, fill, scales=scales))


def _scales_of_call(func: Any, args: Any, tensor: SparseRows) -> _Scales | None:
    """The scales after a call; None unless the call multiplies or divides zeros by a number."""
    name = _name_of(func).rstrip("_")
    if name not in ("mul", "div") or len(args) != 2 or (name == "div" and args[0] is not tensor):
        return None
    return _scales_after(tensor.content, name, args[1] if args[0] is tensor else args[0])


def _scales_after(content: RowContent, name: str, number: Any) -> _Scales | None:
    """The scales after zeros are multiplied or divided by a number; None if they become others."""
    if not content.has_zeros or isinstance(number, SparseRows):
        return None
    divides = "div" in name
    if isinstance(number, Tensor):
        if number.numel() != 1:
            return None
        if number.is_cuda:
            operation = torch.div if divides else torch.mul
            return *content.scales, (operation, number, _version(number))
        number = number.item()
    if not isinstance(number, int | float):
        return None
    is_zero = number > 0 if divides else 0 <= number < math.inf  # other numbers make -0.0 or NaN
    # A rank has no gradient of other ranks' rows.
    return content.scales if is_zero or content.local_only is not None else None


def _version(number: Tensor) -> int:
    return 0 if number.is_inference() else version_of(number)


def _fill(
    func: Any,
    args: Any,
    kwargs: Any,
    contents: Sequence[RowContent],
    plain: Sequence[Tensor],
    dims: int,
    differs: bool,
) -> float | None:
    """The new fill of rows without memory, or None if these rows no longer equal one number."""
    shapes = [leaf.shape for leaf in plain]
    size = torch.broadcast_shapes((1,) * dims, *shapes)  # type: ignore[no-untyped-call]
    place = plain[0].device if differs else torch.device("cpu")

    def fill_of(leaf: Any) -> Any:
        """Returns the elements without memory of an argument."""
        if isinstance(leaf, SparseRows):
            return torch.full(size, leaf.content.fill, dtype=leaf.dtype, device=place)
        return leaf.to(place) if isinstance(leaf, Tensor) else leaf

    options = {key: place if key == "device" else value for key, value in kwargs.items()}
    found = func(*tree_map(fill_of, args), **tree_map(fill_of, options))
    if not isinstance(found, Tensor):
        return None
    if differs:
        is_fill = torch.ones(len(found), dtype=torch.bool, device=place)
        for content in contents:
            is_fill[content.ids.to(place)] = False
        found = found[is_fill]
    if found.numel() == 0:
        return 0.0
    value = found.reshape(-1)[0]
    same = (found == value) | ((found != found) & (value != value))
    return value.item() if bool(same.all()) else None


def _of_lists(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Calls a function of lists of tensors."""
    first, rest = args[0], args[1:]
    contents = [leaf.content for leaf in first if isinstance(leaf, SparseRows)]
    _check_alike(name, args, contents)
    is_simple = name in _KEEP_ZEROS and not (rest and isinstance(rest[0], list | SparseRows))
    if name == "_foreach_norm" and rest and rest[0] < 0:  # zero rows make the norm zero
        is_simple = False
    if (sign := _CLAMPS.get(name)) is not None:
        is_simple = isinstance(rest[0], int | float) and rest[0] * sign >= 0
    scales: list[_Scales | None] = [content.scales for content in contents]
    if is_simple and name.rstrip("_").endswith(("mul", "div", "unscale")):
        scales = [_scales_after(content, name, rest[-1]) for content in contents]
    if is_simple and None not in scales and all(content.has_zeros for content in contents):
        values = [leaf.content.values if isinstance(leaf, SparseRows) else leaf for leaf in first]
        results = func(
            list(map(_some, values)) if name == "_foreach_norm" else values, *rest, **kwargs
        )
        places = [place for place, leaf in enumerate(first) if isinstance(leaf, SparseRows)]
        for place, content, after in zip(places, contents, scales, strict=True):
            if results is None:
                content.scales = after or ()
                if name == "_foreach_zero_":
                    content.set_fill(0.0, ())
            elif name != "_foreach_norm":
                fill = content.own_fill
                made = RowContent(content._ids, results[place], fill, scales=after or ())
                results[place] = SparseRows.of(first[place].shape[0], made)
            elif (zero := content.scaled_zero) is not None:
                results[place] = results[place] + zero
    elif name.startswith("_amp"):
        return _of_all_rows(func, args, kwargs)
    else:
        base = single_name(name, args)
        single = getattr(torch.ops.aten, "linalg_vector_norm" if base == "norm" else base, None)
        if single is None:
            raise NotImplementedError(
                f"{name}() does not support {first[0]!r}. Call the one-tensor function instead."
            )
        results = map_lists(single, base, args, kwargs)
    if func._schema.is_mutable:
        return _note_written(name, contents)
    return results


def single_name(name: str, args: Sequence[Any]) -> str:
    """The name of the one-tensor function that a function of lists calls for each tensor."""
    base = name.removeprefix("_foreach_")
    if len(args) > 1 and isinstance(args[1], int | float):
        base = base.replace("maximum", "clamp_min").replace("minimum", "clamp_max")
    return base


def map_lists(
    function: Callable[..., Any], base: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[Any]:
    """Calls a one-tensor function, `base`, for each place of the arguments' lists."""
    results = []
    for place in range(len(args[0])):
        own = [a[place] if isinstance(a, list | tuple) else a for a in args]
        if base.startswith("addc") and len(own) > 3:  # `value` is a keyword in the one-tensor call
            kwargs = {**kwargs, "value": own.pop()}
        results.append(function(*own, **kwargs))
    return results


# torch.nn.utils uses functions of lists only for tensors of these types. One gradient of another
# type would make torch.nn.utils slow for the gradients of a whole model.
FOREACH_TYPES.append(SparseRows)

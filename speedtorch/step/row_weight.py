"""RowWeight: the parameter of an Embedding, which represents all rows of its table.

A RowWeight has the table's shape and no memory. Functions look rows up, compute with the table in
host memory, or raise an error, mostly NotImplementedError. docs/embedding.md lists the operations.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial, wraps
from types import FunctionType
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from speedtorch.step.sparse_rows import LIKE_FILLS, SparseRows, map_lists, single_name
from speedtorch.table.read_only_rows import ReadOnlyRows
from speedtorch.torch_internals import (
    as_plain,
    base_of,
    forbid_data_pointer,
    plain_truncated_normal,
    replace_truncated_normal,
    storage_id,
    tensor_without_memory,
    torch_function_is_on,
    tree_leaves,
    tree_map,
    version_of,
)

__all__ = ["RowWeight", "dense"]

_GRADIENT = torch.Tensor.grad


def _names(listed: str) -> frozenset[str]:
    return frozenset(listed.split())


_ELEMENTS = _names("T mT H mH real imag")
"""Properties that are views of the elements."""
_METADATA = _names(
    "size dim ndimension numel nelement __len__ stride is_contiguous storage_offset element_size"
    " get_device is_floating_point is_complex is_signed is_conj is_neg has_names"
    " __hash__ result_type can_cast is_tensor is_distributed is_coalesced is_inference"
    " untyped_storage register_hook register_post_accumulate_grad_hook retain_grad backward"
)
"""Methods and functions that read no element."""
_OF_GRAPH = _names("requires_grad grad_fn is_leaf shape device")
_MEMORY = _names(
    "data_ptr storage _typed_storage storage_type set_ share_memory_ resize_ resize_as_ __dlpack__"
    " _to_dlpack as_strided as_strided_ swap_tensors module_load t_ transpose_ swapaxes_ swapdims_"
    " squeeze_ unsqueeze_ detach_ slice_inverse const_data_ptr map_ map2_ apply_ chain_matmul"
    " resize resize_as"
)
"""Functions that use or replace the memory, its shape or its strides."""
_CONVERSIONS = _names("cpu cuda to contiguous type float double half bfloat16 resolve_conj")
"""Methods that return the tensor itself if it already has the requested kind."""
_RESHAPES = _names(
    "view reshape flatten ravel contiguous view_as reshape_as unflatten _unsafe_view take_along_dim"
    " isin"
)
"""Functions that return a view of contiguous elements, and otherwise copy or raise."""
_UNTRACKED = _names("unsafe_chunk unsafe_split unsafe_split_with_sizes")
"""Functions whose results share memory, though autograd does not track them as views."""
_ACROSS_DEVICES = _names("copy_ view_as reshape_as expand_as")
"""Functions that accept tensors on different devices."""
_OVERWRITE = _names(
    "zero_ fill_ uniform_ normal_ exponential_ log_normal_ cauchy_ geometric_ random_"
)
"""Methods whose results do not depend on the old elements."""
_CONSTANT = _names("zero_ fill_ zeros_ ones_ constant_")
"""Functions of torch and torch.nn.init that draw no random number when they fill rows."""
_CHANGE = _names(
    "mul_ multiply_ div_ divide_ add_ sub_ subtract_ neg_ abs_ clamp_ clip_ clamp_min_ clamp_max_"
    " pow_ sqrt_ square_ exp_ log_ sin_ cos_ tanh_ sigmoid_ erf_ erfinv_ round_ floor_ ceil_"
)
"""Methods that change each element independently; every rank calls them for its shard."""
_OPERATORS = {"__imul__": "mul_", "__iadd__": "add_", "__isub__": "sub_", "__itruediv__": "div_"}
_WRITES = frozenset({*_OPERATORS, "__ifloordiv__", "__ipow__", "__imod__", "__setitem__"})


_Memory: TypeAlias = dict[tuple[Any, str], Tensor]


class RowWeight(Tensor):
    """All rows of a field of a table, or a view of them, without memory of its own.

    `emb.weight`, its data, views of both, and the optimizer state of all rows are such tensors.
    """

    _rows: Any
    """The TrainedRows that creates these tensors."""
    _lookups: Any
    _field: str
    _path: tuple[Callable[[Tensor], Tensor], ...]
    """The view functions from all rows to these elements, in order."""
    _count: int
    """The number of rows of the table when this tensor was made."""
    _assigned: int
    """The value of `_rows.assigned` for the field when this tensor was made."""
    _is_compact = False
    """Whether the views need rows without gaps; host records have state between them."""

    @staticmethod
    def of(
        rows: Any,
        lookups: Any,
        *,
        requires_grad: bool = False,
        field: str = "weight",
        path: tuple[Callable[[Tensor], Tensor], ...] = (),
        like: Tensor | None = None,
        device: torch.device | None = None,
    ) -> RowWeight:
        """Makes a tensor for all rows, or for a view with the shape and dtype of `like`."""
        if like is None:
            shape, dtype = rows.fields_shape(field)
            like = torch.empty(shape, dtype=dtype, device="meta")
        made = tensor_without_memory(
            RowWeight,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=device or rows.parameter.device,
            requires_grad=requires_grad,
        )
        forbid_data_pointer(made)
        own = {"_rows": rows, "_lookups": lookups, "_field": field, "_path": path}
        vars(made).update(own, _count=rows.table.whole_rows, _assigned=rows.assigned[field])
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__self__", None) is _GRADIENT:  # bypasses the property below
            return _gradient(func.__name__, *args)
        return _answer(func, tuple(args), kwargs or {})

    # zero_grad() reads and sets `grad` in each step; __torch_function__ would take longer.
    @property
    def grad(self) -> Tensor | None:
        """The weight's gradient: the gradient of the step's rows, and zeros for other rows."""
        get = _gradient if torch_function_is_on() else _own_gradient
        found: Tensor | None = get("__get__", self)
        return found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        """Sets the gradient of the step's rows from a gradient of all rows."""
        (_gradient if torch_function_is_on() else _own_gradient)("__set__", self, value)

    @grad.deleter
    def grad(self) -> None:
        """Sets the gradient to None."""
        (_gradient if torch_function_is_on() else _own_gradient)("__delete__", self)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.partition("::")[2]
        weight = next(e for e in tree_leaves((args, kwargs)) if isinstance(e, RowWeight))
        reads = name not in ("detach", "alias", "is_pinned") and not name.endswith("_like")
        if weight._rows.parameter.is_cuda and reads and not name.startswith("new_"):
            _refuse_share(weight, f"{name}, called by C++,")
            raise _all_rows_needed(weight, f"{name}(), called by C++,")
        return _answer(func, tuple(args), kwargs or {}, name=name)

    __hash__ = object.__hash__

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copies all rows to a dense tensor, or to a dense parameter if this is a parameter."""
        _refuse_share(self, "deepcopy")
        with as_plain(), torch.no_grad():
            copied: Tensor = self._elements().clone(memory_format=torch.contiguous_format)
            if getattr(self, "_is_param", False):
                copied = nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __tensor_flatten__(self) -> NoReturn:
        """Raises NotImplementedError; tracers and compilers call this method."""
        raise NotImplementedError(self._rows.untraceable)

    __tensor_unflatten__ = __tensor_flatten__

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise _refused(
            self,
            "pickle of",
            "a copy would be as large as the table",
            "the module's state_dict(). If that contains this weight a second time, under another"
            " key, delete the key",
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with as_plain():
            if self._path:
                return repr(self._elements())
            kind = "Parameter" if getattr(self, "_is_param", False) else "Tensor"
            shape, dtype, device = [*self.shape], self.dtype, self.device
            return (
                f"{kind} of {self._rows.name}: {shape} {dtype} in host memory, loaded to"
                f" {device}, requires_grad={self.requires_grad}"
            )

    def check_age(self) -> None:
        """Raises an error if the rows were resized, or all values assigned, since then."""
        if self._count != self._rows.table.whole_rows:
            raise RuntimeError(
                f"{self._rows.name}: this view of its weight or optimizer state is older than"
                " resize(). Read it from emb.weight or optimizer.state again."
            )
        if self._assigned != self._rows.assigned[field := self._field]:
            place = "weight.data" if field == "weight" else f"optimizer.state[weight][{field!r}]"
            raise NotImplementedError(
                f"{self._rows.name}: this view of its {field} is older than an assignment to"
                f" {place}, which overwrote its values. In torch the view keeps them. Keep a copy"
                f" instead, such as backup = {place}.clone()."
            )

    def _elements(self, memory: _Memory | None = None, *, is_compact: bool = False) -> Tensor:
        """Returns the elements of this view, in the table's memory.

        A copy is returned if rows must be contiguous, or are stored in another dtype than the
        step's.
        """
        memory = {} if memory is None else memory
        key = self._rows, self._field
        self.check_age()
        if key not in memory:
            with torch.inference_mode(False):  # an inference tensor counts no writes
                rows = self._rows.memory(self._field)
                memory[key] = rows.contiguous() if is_compact or self._is_compact else rows
        found = memory[key]
        for view in self._path:
            found = view(found)
        return found

    def _view(
        self, like: Tensor, step: Callable[[Tensor], Tensor] | None = None, *, is_compact: bool
    ) -> RowWeight:
        path = self._path if step is None else (*self._path, step)
        made = RowWeight.of(self._rows, self._lookups, field=self._field, path=path, like=like)
        vars(made)["_is_compact"] = is_compact or self._is_compact
        return made


class _LookedUp(Tensor):
    """Looked-up rows that act as a view of the weight, `weight[3]`: writes change the table."""

    _of: RowWeight
    """The view of the weight, which has the current values."""
    _again: Callable[[], Tensor]
    """Looks the rows up again."""
    _when: tuple[int, int]
    """The value of `_rows.rows_version()` at the lookup."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, _name_of(func, args)
        own = partial(tree_map, lambda leaf: leaf._of if isinstance(leaf, _LookedUp) else leaf)
        if getattr(func, "__module__", "") == nn.init.__name__:
            with torch.no_grad():
                func(*own(args), **own(kwargs))
            return next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        writes = _is_write(func, name, args, kwargs)
        is_of_graph = torch.is_grad_enabled() and name not in ("data", "detach")
        if is_of_graph and writes:
            weight = next(e._of for e in tree_leaves((args, kwargs)) if isinstance(e, cls))
            raise _refused(weight, f"{name}() of rows of", "gradients are recorded", _NO_GRAD)
        if is_of_graph or name in _METADATA | _OF_GRAPH:
            return cls._with_gradient(func, args, kwargs)
        result = func(*own(args), **own(kwargs))
        return args[0] if writes and result is own(args)[0] else result

    @staticmethod
    def of(rows: Tensor, view: RowWeight, again: Callable[[], Tensor]) -> Tensor:
        """Wraps looked-up rows as a view of the weight."""
        with as_plain():
            made = rows.as_subclass(_LookedUp)
        vars(made).update(_of=view, _again=again, _when=view._rows.rows_version())
        return made

    def _now(self) -> Tensor:
        self._of.check_age()
        return self if self._when == self._of._rows.rows_version() else self._again()

    @classmethod
    def _with_gradient(cls, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        current = partial(tree_map, lambda leaf: leaf._now() if isinstance(leaf, cls) else leaf)
        own_args, own_kwargs = current(args), current(kwargs)
        with as_plain():
            result = func(*own_args, **own_kwargs)
            is_view = isinstance(result, Tensor) and base_of(result) is not None
        first = args[0] if args else None
        if not (is_view and isinstance(first, cls)):
            return result
        view = func(first._of, *args[1:], **kwargs)
        again = partial(func, first, *args[1:], **kwargs)
        return cls.of(result, view, again) if isinstance(view, RowWeight) else result


_NO_GRAD = "torch.no_grad() or weight.data"
_NOT_A_VIEW = (
    "is a copy of rows that ranks share, and a write to it would not change them. Clone it, or load"
    " new rows with load_state_dict()."
)


def _name_of(func: Any, args: Sequence[Any]) -> str:
    name: str = getattr(func, "__name__", str(func))
    if name not in ("__get__", "__set__", "__delete__"):
        return name
    of: Any = func.__self__
    named: Any = of.fget if isinstance(of, property) else of
    return str(named.__name__)


def _is_write(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call writes to an argument."""
    if name.endswith("_") and not name.startswith("__"):
        return True
    if name in _WRITES or kwargs.get("out") is not None:
        return True
    # Functions of torch.nn.functional have the parameter `inplace`.
    code = func.__code__ if isinstance(func, FunctionType) else None
    names = () if code is None else code.co_varnames[: code.co_argcount]
    return bool((dict(zip(names, args, strict=False)) | kwargs).get("inplace"))


def _refused(weight: RowWeight, what: str, reason: str, remedy: str) -> NotImplementedError:
    text = f"{weight._rows.name}: {what} its weight is not supported, because {reason}."
    return NotImplementedError(f"{text} Use {remedy}.")


def _all_rows_needed(weight: RowWeight, what: str) -> NotImplementedError:
    rows = weight._rows
    return NotImplementedError(
        f"{rows.name}: {what} of its weight would need all {rows.whole_shape[0]:,} rows, but a step"
        " loads only a batch. Use emb(ids), which is differentiable, for the rows of a batch. Use"
        ' torch.no_grad() or emb.table["weight"] to read or write the whole table in host memory,'
        " with other tensors on the CPU."
    )


def _refuse_share(weight: RowWeight, name: str) -> None:
    """Raises NotImplementedError if ranks share the rows."""
    if weight._rows.table.shard_spec is not None:
        raise NotImplementedError(
            f"{weight._rows.name}: {name}() of its weight needs the rows of all ranks, but each"
            " rank has a shard of them. Use emb(ids), speedtorch.clip_grad_norm_,"
            " speedtorch.GradScaler, or model.state_dict() within"
            " speedtorch.full_state_dict(model). Call speedtorch.shard() with the whole module that"
            " DistributedDataParallel wraps, without torchrec's DistributedModelParallel. Call"
            " fully_shard() with"
            " ignored_params=speedtorch.row_parameters(model) (FullyShardedDataParallel:"
            " ignored_states=)."
        )


def _check_collective(name: str, weights: Sequence[RowWeight]) -> None:
    """Raises NotImplementedError unless the elements are contiguous in the tables' own memory.

    gloo reads and writes strided memory as if it were contiguous: between the rows of a table is
    optimizer state.
    """
    for weight in weights:
        _refuse_share(weight, name)
        elements = weight._elements()
        is_own = elements.dtype == weight._rows.table.field(weight._field).dtype
        if not (is_own and elements.is_contiguous()):
            reason = "the rows are in 16 bits, or optimizer state is between them"
            remedy = "a copy: rows = weight.detach().clone(), and weight.data.copy_(rows) after it"
            raise _refused(weight, f"{name}() of", reason, remedy)


def _own_gradient(access: str, weight: RowWeight, *value: Any) -> Any:
    """Accesses torch's own `grad` attribute."""
    return getattr(_GRADIENT, access)(weight, *value)


def _gradient(access: str, weight: RowWeight, *value: Any) -> Any:
    """Returns or sets the gradient of the weight."""
    rows = weight._rows
    if rows.weight_reference() is not weight:
        if access == "__get__":
            return None
        raise _refused(weight, "a gradient of a view of", "a view has none", "emb.weight.grad")
    if access == "__get__":
        return rows.weight_gradient()
    return rows.set_gradient(*value or (None,))


def _answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = "") -> Any:
    """The result of a torch function for a weight; for a property `func` is its accessor."""
    access = getattr(func, "__name__", "")
    name = name or _name_of(func, args)
    weights = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, RowWeight)]
    if not weights:
        with as_plain():
            return func(*args, **kwargs)
    weight = weights[0]
    in_module = str(getattr(func, "__module__", ""))
    if getattr(func, "namespace", "") == "c10d" or in_module.startswith("torch.distributed."):
        _check_collective(name, weights)
    is_first = bool(args) and args[0] is weight
    if is_first and access in ("__get__", "__set__", "__delete__"):
        if name not in _ELEMENTS:
            return _property(func, access, name, args)
    elif (
        name in _METADATA
        and not isinstance(func, OpOverload)
        and not (name == "backward" and is_first)
    ):
        with as_plain():
            return func(*args, **kwargs)
    for leaf in weights:
        leaf.check_age()
    if getattr(func, "__module__", "") == nn.init.__name__:
        return _initialised(func, args, kwargs)
    if name in ("detach", "alias"):
        return weight._view(_meta(weight), is_compact=False)
    if name == "backward" and is_first:
        raise _refused(weight, "backward() of", "a step trains only some rows", "loss.backward()")
    if name in _MEMORY or (name == "data" and access == "__set__"):
        remedy = "emb.table['weight'], or a copy of it, clone()"
        reason = "its memory, shape and strides are the table's"
        raise _refused(weight, f"{name}() of", reason, remedy)
    if name == "grad":
        remedy = "loss.backward() and emb.weight.grad"
        raise _refused(weight, "autograd.grad() of", "autograd has no gradient of all rows", remedy)
    with as_plain():
        trains = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in weights)
    if name in ("is_pinned", "is_shared"):
        return False
    if name == "requires_grad_":
        return _require_gradient(weight, *args[1:], **kwargs)
    if name.startswith("new_") or (name in LIKE_FILLS and is_first):
        return _made_like(func, name, args, kwargs)
    if name.startswith("_foreach_"):
        return _of_lists(name, args, kwargs)
    if name in _UNTRACKED:
        func = getattr(torch.Tensor, name := name.removeprefix("unsafe_"))
    if (out := kwargs.get("out")) is not None:
        if any(isinstance(leaf, RowWeight) for leaf in tree_leaves(out)) and not trains:
            return _written_out(func, name, args, kwargs)
    else:
        found = _looked_up(func, name, args, kwargs, weight, trains)
        if found is not NotImplemented:
            return found
    writes = _is_write(func, name, args, kwargs)
    if weight._rows.table.shard_spec is not None:
        plain = all(isinstance(e, int | float | None) for e in (*args[1:], *kwargs.values()))
        if not (is_first and plain and _OPERATORS.get(name, name) in _OVERWRITE | _CHANGE):
            _refuse_share(weight, name)
    if name in ("numpy", "__array__"):
        with as_plain():
            if torch.is_grad_enabled() and weight.requires_grad and not kwargs.get("force"):
                raise RuntimeError(
                    "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy()"
                    " instead."
                )
        array = weight._elements().detach().numpy()
        array.flags.writeable = False  # rows on the device would miss a write
        return array if name == "numpy" else array.__array__(*args[1:], **kwargs)
    if trains:
        return _with_gradient(func, name, args, kwargs, weights, writes)
    if is_first and writes and _changed(name, args, kwargs, weight):
        return weight
    return _without_gradient(func, name, args, kwargs)


def _without_gradient(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Computes with the whole table; results that share its memory become views of the weight."""
    memory: _Memory = {}
    found: list[tuple[RowWeight, Tensor]] = []
    leaves = tree_leaves((args, kwargs))
    weights = [leaf for leaf in leaves if isinstance(leaf, RowWeight)]
    first, is_compact = weights[0], name in _RESHAPES or any(leaf._is_compact for leaf in weights)
    writes = _is_write(func, name, args, kwargs)
    if writes and len({leaf._path for leaf in weights}) > 1:
        is_compact = True  # torch detects overlapping views, but not in the layout of host records
    is_first = bool(args) and args[0] is first
    if is_first and name in _CONVERSIONS and _is_of_kind(func, name, args, kwargs):
        return first

    def on_host(leaf: Any) -> Any:
        """Returns the host memory of a weight's elements, and numbers of a GPU on the CPU."""
        if isinstance(leaf, RowWeight):
            found.append((leaf, leaf._elements(memory, is_compact=is_compact)))
            return found[-1][1]
        is_number = isinstance(leaf, Tensor) and leaf.is_cuda and not leaf.dim()
        return leaf.cpu() if isinstance(leaf, SparseRows) or is_number else leaf

    with as_plain():
        is_elsewhere = (
            first.is_cuda and name not in _ACROSS_DEVICES and any(map(_is_on_gpu, leaves))
        )
        written = args[0] if writes and args else None
        if is_elsewhere or (isinstance(written, SparseRows) and written.is_cuda):
            raise _all_rows_needed(first, f"{name}()")
        given = tree_map(on_host, args), tree_map(on_host, kwargs)
        versions = {key: version_of(base) for key, base in memory.items()}
        result = func(*given[0], **given[1])
        if isinstance(func, OpOverload) and func._schema.is_mutable:
            versions = dict.fromkeys(versions, -1)  # below autograd writes change no version
        _store(memory, versions)
    storages = {storage_id(base.untyped_storage()) for base in memory.values()}
    place = -1

    def as_view(leaf: Any) -> Any:
        """Returns a view of the weight for a result that shares the table's memory."""
        nonlocal place
        place += 1
        if not isinstance(leaf, Tensor) or isinstance(leaf, RowWeight | SparseRows):
            return leaf
        for weight, own in found:
            if leaf is own:
                return leaf.clone() if is_first and name in _CONVERSIONS else weight
        if leaf.layout != torch.strided or storage_id(leaf.untyped_storage()) not in storages:
            return leaf
        step = partial(_again, func, args, kwargs, first, place)
        plain = (tree_map(_as_meta, given) for given in (args, kwargs))
        like = tree_leaves(func(*next(plain), **next(plain)))[place]
        return first._view(like, step, is_compact=is_compact)

    with as_plain():
        return tree_map(as_view, result)


def _is_of_kind(func: Any, name: str, args: Any, kwargs: Any) -> bool:
    """Whether a conversion would return the tensor itself."""
    with as_plain():
        if name == "contiguous":
            return bool(args[0].is_contiguous(**kwargs))
        like = torch.empty(1, dtype=args[0].dtype, device=args[0].device)
        return func(like, *args[1:], **kwargs) is like


def _store(memory: _Memory, versions: dict[Any, int]) -> None:
    """Stores written rows, for which the table may use another dtype or layout."""
    for (rows, field), base in memory.items():
        if version_of(base) != versions[rows, field]:
            rows.store(field, base)


def _written_out(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Computes a function whose out= is a weight; torch would resize the weight if necessary."""
    out = kwargs["out"]
    result = func(*args, **{key: value for key, value in kwargs.items() if key != "out"})
    with as_plain():
        fits = isinstance(out, RowWeight) and isinstance(result, Tensor)
        if not (fits and result.shape == out.shape and torch.can_cast(result.dtype, out.dtype)):
            weight = next(leaf for leaf in tree_leaves(out) if isinstance(leaf, RowWeight))
            reason = "the result has another shape or dtype"
            raise _refused(weight, f"{name}() with out=", reason, "another tensor as out=")
    out.copy_(result)
    return out  # type: ignore[no-any-return]


def _is_on_gpu(leaf: Any) -> bool:
    """Whether an argument is a GPU tensor other than a scalar; the table is on the CPU."""
    is_other = isinstance(leaf, Tensor) and not isinstance(leaf, RowWeight | SparseRows)
    return is_other and leaf.is_cuda and leaf.dim() > 0


def _again(
    func: Any, args: Any, kwargs: Any, weight: RowWeight, place: int, base: Tensor
) -> Tensor:
    """Takes a view of a weight again from the table's current memory, `base`."""

    def memory_of(leaf: Any) -> Any:
        """Returns the present memory of a weight's elements."""
        return base if leaf is weight else leaf._elements() if isinstance(leaf, RowWeight) else leaf

    own = partial(tree_map, memory_of)
    result: Tensor = tree_leaves(func(*own(args), **own(kwargs)))[place]
    return result


def _with_gradient(
    func: Any, name: str, args: Any, kwargs: Any, weights: list[RowWeight], writes: bool
) -> Any:
    """Computes with the whole table while gradients are recorded; its backward raises."""
    leaves = tree_leaves((args, kwargs))
    plain = [e for e in leaves if isinstance(e, Tensor) and not isinstance(e, RowWeight)]
    with as_plain():
        is_elsewhere = weights[0].is_cuda and any(leaf.is_cuda for leaf in plain)
        if writes or is_elsewhere or any(leaf.requires_grad for leaf in plain):
            raise _all_rows_needed(weights[0], f"{name}()")
    refusal = str(_all_rows_needed(weights[0], f"a gradient of {name}()"))
    with torch.no_grad():
        result = _without_gradient(func, name, args, kwargs)

    def with_refusal(leaf: Any) -> Any:
        """Attaches the backward that raises to a floating-point result."""
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            return leaf
        if isinstance(leaf, RowWeight):
            if any(leaf is weight for weight in weights):
                return leaf
            raise _all_rows_needed(weights[0], f"{name}()")
        with as_plain():
            return _Read.apply(weights[0], [leaf], refusal)  # type: ignore[no-untyped-call]

    return tree_map(with_refusal, result)


class _Read(torch.autograd.Function):
    """A tensor computed from all rows, whose backward raises NotImplementedError."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, read: list[Tensor], refusal: str) -> Tensor:
        """Returns the only tensor of `read`, with `parameter` as its autograd input."""
        ctx.refusal = refusal
        return read[0]  # the list keeps autograd from treating the result as a view of an input

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        """Raises NotImplementedError with the text of `refusal`."""
        raise NotImplementedError(ctx.refusal)


def _property(func: Any, access: str, name: str, args: tuple[Any, ...]) -> Any:
    """Reads or sets a property of a weight."""
    weight = args[0]
    if name == "data":
        if access == "__get__":
            return weight.detach()
        value = args[1]
        is_own = isinstance(value, RowWeight) and value._rows is weight._rows and not value._path
        if is_own and value._field == weight._field:
            value.check_age()
            return None  # weight.data *= 2 assigns the tensor that it has changed in place
        with as_plain():
            fits = value.shape == weight.shape and value.dtype == weight.dtype
        if weight._rows._weight() is not weight or not fits:
            reason = "only the weight itself accepts values, of its shape and dtype"
            raise _refused(weight, "assigning the data of", reason, "weight.data.copy_(values)")
        _load(weight, value)
        weight._rows.assigned["weight"] += 1
        vars(weight)["_assigned"] = weight._rows.assigned["weight"]
        return None
    if name == "requires_grad" and access == "__set__":
        _require_gradient(weight, args[1])
        return None
    if name == "__cuda_array_interface__":  # AttributeError, because libraries call hasattr()
        reason = "it has no memory on a device"
        raise AttributeError(str(_refused(weight, f"{name} of", reason, 'emb.table["weight"]')))
    with as_plain():
        return func(*args)


def _require_gradient(weight: RowWeight, requires: bool = True) -> RowWeight:
    with as_plain():
        weight.requires_grad = requires
        if getattr(weight, "_is_param", False) and weight._rows.weight is weight:
            weight._rows.parameter.requires_grad = requires
    return weight


def _load(weight: RowWeight, value: Any) -> None:
    """Copies values to all rows."""
    _refuse_share(weight, "copy_")
    with as_plain(), torch.no_grad():
        weight._rows.load(dense(value), weight._field)


def dense(value: Tensor) -> Tensor:
    """Returns `value`, or a dense copy if `value` has no memory for all elements."""
    with as_plain(), torch.no_grad():
        if isinstance(value, RowWeight):
            _refuse_share(value, "clone")
            return value._elements().clone()
        return value.to_dense() if isinstance(value, SparseRows) else value


def _made_like(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """The result of new_*() or *_like() functions of a weight."""
    weight: RowWeight = args[0]
    with as_plain():
        dtype, device = kwargs.get("dtype") or weight.dtype, kwargs.get("device") or weight.device
        like = torch.empty((0, *weight.shape[1:]), dtype=dtype, device=device)
        if name.startswith("new_"):
            data = [leaf._elements() if isinstance(leaf, RowWeight) else leaf for leaf in args[1:]]
            return func(like, *data, **kwargs)
        if weight._path or not weight.dim():
            return func(weight._elements(), *args[1:], **kwargs)
        fill = (*args[1:], kwargs.get("fill_value"))[0] if name == "full_like" else LIKE_FILLS[name]
        made = SparseRows.filled(weight.shape[0], like, fill)  # type: ignore[arg-type]
        return made.requires_grad_(bool(kwargs.get("requires_grad")))


def _initialised(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Initializes rows with a function of torch.nn.init, at once or at the rows' first use."""
    given = inspect.signature(func).bind(*args, **kwargs).arguments
    weight: RowWeight = given.pop(next(iter(given)))
    numbers = {key: value for key, value in given.items() if value is not None}
    if "generator" in numbers or weight._path or weight._field != "weight":
        _refuse_share(weight, func.__name__)
        with torch.no_grad(), as_plain():
            memory: _Memory = {}
            own = weight._elements(memory)
            versions = {key: version_of(base) for key, base in memory.items()}
            func(own, **numbers)
            _store(memory, versions)
    else:
        is_random = func.__name__ not in _CONSTANT
        weight._rows.draw(lambda tensor: func(tensor, **numbers), anew=True, is_random=is_random)
    return weight


@wraps(plain_truncated_normal)
def _truncated(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Replaces torch's function, which ignores __torch_function__, unlike others of nn.init."""
    if not isinstance(tensor, RowWeight):
        return plain_truncated_normal(tensor, *args, **kwargs)
    return _initialised(plain_truncated_normal, (tensor, *args), kwargs)


replace_truncated_normal(_truncated)


def _of_lists(name: str, args: Any, kwargs: Any) -> Any:
    """Computes a function of lists tensor by tensor."""
    single = single_name(name, args)
    norm: Any = torch.linalg.vector_norm
    function = norm if single == "norm" else getattr(Tensor, single, None)
    if function is None:
        weight = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, RowWeight))
        remedy = "the function of one tensor"
        raise _refused(weight, f"{name}() of", "no function of one tensor has its name", remedy)
    results = map_lists(function, single, args, kwargs)
    return args[0] if name.endswith("_") else results


def _as_meta(leaf: Any) -> Any:
    return _meta(leaf) if isinstance(leaf, RowWeight) else leaf


def _meta(weight: RowWeight) -> Tensor:
    """A meta tensor with the weight's shape, strides and dtype."""
    with as_plain():
        shape, strides = weight.shape, weight.stride()
        return torch.empty_strided(shape, strides, dtype=weight.dtype, device="meta")


# ---- Lookups of rows


def _looked_up(
    func: Any, name: str, args: Any, kwargs: Any, weight: RowWeight, trains: bool
) -> Any:
    """The rows that a call looks up by ids, or NotImplemented for other calls."""
    if weight._path or weight._field != "weight":
        return NotImplemented
    if name == "__getitem__":
        return _indexed(weight, args[1], trains)
    given: dict[str, Any] = {}
    if name == "embedding":
        swapped = args[:1] and args[0] is weight  # torch.embedding's order
        names = ["weight", "input"] if swapped else ["input", "weight"]
        names += ["padding_idx", "scale_grad_by_freq", "sparse"] if swapped else ["padding_idx"]
        names += [] if swapped else ["max_norm", "norm_type", "scale_grad_by_freq", "sparse"]
        given = dict(zip(names, args, strict=False)) | kwargs
        given["input"] = given.get("input", given.get("indices"))
    elif name == "embedding_bag" and trains:
        given = dict(zip(("input", "weight"), args, strict=False)) | kwargs
    elif name == "index_select":
        given = dict(zip(("self", "dim", "input"), args, strict=False)) | kwargs
        given["input"] = given.get("index", given.get("input"))
        if given["dim"] not in (0, -2):
            return NotImplemented
    ids = given.get("input")
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        return NotImplemented
    if trains and weight._rows._weight() is not weight:
        remedy = "speedtorch.Embedding.from_pretrained(emb.table), or emb itself"
        raise _refused(weight, f"{name}() of a copy of", "it would not be trained", remedy)
    settings = ("max_norm", "scale_grad_by_freq", "sparse", "per_sample_weights")
    padding = given.get("padding_idx")
    known: tuple[Any, ...] = (None, -1, weight._rows.padding)
    if name == "embedding_bag" and (padding, weight._rows.padding) != (None, None):
        known = ()  # embedding_bag gets positions instead of ids, so no padding id is supported
    given_settings = [given.get(setting) for setting in settings]
    if trains and (
        any(s is not None and s is not False for s in given_settings) or padding not in known
    ):
        raise _refused(
            weight, f"{name}() with these options of", "the module sets its options", "emb(ids)"
        )
    if name == "embedding_bag":
        with as_plain():
            places, rows = weight._lookups.rows_of(ids)
            return func(places, rows, *args[2:], **{**kwargs, "sparse": False})
    if not trains and name == "embedding" and given.get("max_norm"):
        return NotImplemented
    return _by_ids(weight, ids, trains, is_padded=padding not in (None, -1))


def _indexed(weight: RowWeight, index: Any, trains: bool) -> Any:
    """The rows of an index, with a gradient if `trains`; NotImplemented for other indices."""
    if trains and weight._rows._weight() is not weight:
        return NotImplemented
    first, *rest = index if isinstance(index, tuple) and index else (index,)
    count = weight._rows.whole_shape[0]
    if isinstance(first, list) or (hasattr(first, "__array__") and not isinstance(first, Tensor)):
        first = torch.as_tensor(first)
    if isinstance(first, Tensor) and first.dtype == torch.bool:
        if first.dim() != 1 or len(first) != count:
            return NotImplemented
        first = first.nonzero().squeeze(1)
    is_basic = isinstance(first, int | slice) and not isinstance(first, bool)
    if any(isinstance(leaf, Tensor | list) or leaf is None for leaf in rest):
        return NotImplemented
    if isinstance(first, Tensor) and first.dtype in (torch.int32, torch.int64):
        rows = _by_ids(weight, torch.where(first < 0, first + count, first), trains)
        return rows[(*[slice(None)] * first.dim(), *rest)] if rest else rows
    if not is_basic or (not trains and weight._rows.table.shard_spec is None):
        return NotImplemented
    if isinstance(first, int):
        if not -count <= first < count:
            raise IndexError(f"weight: row {first} is out of range for a table of {count} rows")
        rows = _by_ids(weight, torch.tensor([first % count]), trains)[0]
        rows = rows[tuple(rest)] if rest else rows
    else:
        rows = _by_ids(weight, torch.arange(*first.indices(count)), trains)
        rows = rows[(slice(None), *rest)] if rest else rows
    if weight._rows.table.shard_spec is not None:
        # A write would be lost; torch raises for a write to a result of unbind().
        return rows[None].unbind()[0] if trains else ReadOnlyRows(rows, _NOT_A_VIEW)
    again = partial(weight.__getitem__, index)
    return _LookedUp.of(rows, weight.detach()[index], again)  # type: ignore[arg-type]


def _by_ids(weight: RowWeight, ids: Tensor, trains: bool, *, is_padded: bool = False) -> Tensor:
    """Looks up rows by id; with `is_padded` the caller expects no gradient of the padding row."""
    with as_plain():
        if trains:
            rows: Tensor = nn.functional.embedding(*weight._lookups.rows_of(ids))
            if (padding := weight._rows.padding) is None or is_padded:
                return rows
            if ids.is_cpu and not bool((ids == padding).any()):
                return rows
            refusal = (
                f"{weight._rows.name}: the row of padding_idx={padding} has no gradient, but"
                " torch.nn.Embedding's weight[ids] has one for it. Use emb(ids), or omit this id."
            )

            def check(gradient: Tensor) -> None:
                """Raises NotImplementedError if the padding row has a gradient."""
                if bool(gradient[(ids == padding).to(gradient.device)].any()):
                    raise NotImplementedError(refusal)

            rows.register_hook(check)  # type: ignore[no-untyped-call]
            return rows
        found: Tensor = weight._lookups.read(ids)
        return found


# ---- Writes


def _changed(name: str, args: Any, kwargs: Any, weight: RowWeight) -> bool:
    """Changes all rows directly, now or lazily, if possible; returns whether this was possible."""
    name, rows = _OPERATORS.get(name, name), weight._rows
    if weight._path or weight._field != "weight":
        return False
    if name == "copy_" and isinstance(args[1], Tensor) and args[1].shape == rows.whole_shape:
        _load(weight, args[1])
        return True
    numbers = {key: value for key, value in kwargs.items() if value is not None}
    if name in ("add_", "sub_") and isinstance(added := args[1], SparseRows):
        content = added.content
        if content.dense is None and content.fill == 0 and added.dtype == weight.dtype:
            rows.add_rows(content, name, numbers)
            return True
    if any(isinstance(leaf, Tensor | torch.Generator) for leaf in (*args[1:], *numbers.values())):
        return False
    undrawn = not rows.table.is_drawn
    if name in _OVERWRITE or (name in _CHANGE and undrawn):
        method, rest = getattr(torch.Tensor, name), args[1:]
        rows.draw(
            lambda tensor: method(tensor, *rest, **numbers),
            anew=name in _OVERWRITE,
            is_random=name in _OVERWRITE - _CONSTANT,
        )
        return True
    return False

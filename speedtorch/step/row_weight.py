"""RowWeight: the parameter of an Embedding, which stands for the whole table.

Its memory is that of the rows of a step, and that is what an optimizer's step() works on: there it
is a plain torch.nn.Parameter. Everywhere else torch's functions are given the table instead, or
an error that says what to use.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from speedtorch.step.trained_rows import TrainedRows, rows_of_parameter
from speedtorch.torch_internals import (
    CLIPS_BY_NORM,
    GRADIENT_ASKED_TO_BE_ZERO,
    TRUNCATED_NORMAL,
    UNSCALES,
    as_plain,
    tree_leaves,
    tree_map,
)

__all__ = ["RowWeight", "hide_rows", "show_rows"]

_GRADIENT = torch.Tensor.grad


def _names(listed: str) -> frozenset[str]:
    return frozenset(listed.split())


# Of the properties of a tensor, those that show its elements; the others are told of the held rows.
_ELEMENTS = frozenset({"T", "mT", "H", "mH", "real", "imag"})
# What is told of the held rows or changes none of them: constructors of optimizers use the first.
_OF_HELD_ROWS = _names(
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty"
    " new_zeros new_ones new_full new_tensor new_empty_strided data_ptr untyped_storage"
    " storage_offset stride is_contiguous element_size get_device is_floating_point is_complex"
    " is_signed is_pinned is_shared is_set_to is_conj is_neg requires_grad_ retain_grad"
    " register_hook register_post_accumulate_grad_hook has_names __hash__ result_type can_cast"
    " is_tensor is_same_size is_distributed is_coalesced type_as_tensor _is_view is_inference"
)
# Methods that give every element another value whatever it was, and those that change each by
# itself: they are noted where the table has no memory yet.
_OVERWRITE = _names(
    "zero_ fill_ uniform_ normal_ exponential_ log_normal_ cauchy_ geometric_ random_"
)
_CHANGE = _names(
    "mul_ multiply_ div_ divide_ add_ sub_ subtract_ neg_ abs_ clamp_ clip_ clamp_min_ clamp_max_"
    " pow_ sqrt_ square_ exp_ log_ sin_ cos_ tanh_ sigmoid_ erf_ erfinv_ round_ floor_ ceil_"
)
_OPERATORS = ("__imul__", "__iadd__", "__isub__", "__itruediv__", "__ifloordiv__", "__ipow__")
# Methods that programs save with, which give a tensor itself where it is of that kind already.
_CONVERSIONS = _names("cpu to contiguous")
_EXTENTS = ("size", "dim", "ndimension", "numel", "nelement", "__len__")


class _Whole(torch.Tensor):
    """A RowWeight without its gradient: weight.data and weight.detach()."""

    _rows: Callable[[], TrainedRows | None] = staticmethod(lambda: None)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__self__", None) is _GRADIENT:  # what every step asks for
            return _gradient(func, args, sys._getframe(1).f_code)
        return _answer(func, tuple(args), kwargs or {}, sys._getframe(1))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """The held rows as a parameter of their own; copy the module to copy the table."""
        with as_plain():
            copied = nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"{_rows_of(self).name}: its weight is not pickled: save the state_dict()")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        rows = _rows_of(self)
        with as_plain():
            held, dtype, device = self.shape[0], self.dtype, self.device
        return (
            f"Parameter of {rows.name}: {rows.shape[0]:,} rows of {rows.shape[1]} {dtype} in host"
            f" memory, {held:,} of them held on {device}, requires_grad={self.requires_grad}"
        )


class RowWeight(_Whole, nn.Parameter):
    """A parameter that stands for all rows and has the memory of the held ones; see Embedding."""

    def __del__(self) -> None:
        if sys.is_finalizing() or (rows := rows_of_parameter(self)) is None:
            return
        rows.end(self)  # these are its own: with a module they would have kept it


def show_rows(parameter: nn.Parameter, rows: TrainedRows) -> None:
    """Makes a parameter stand for a table, which its module keeps alive."""
    parameter.__class__ = RowWeight
    if rows_of_parameter(parameter) is not rows:
        parameter._rows = weakref.ref(rows)  # type: ignore[attr-defined]


def hide_rows(parameter: nn.Parameter) -> None:
    """Makes it the parameter of its held rows, as an optimizer's step needs it."""
    parameter.__class__ = nn.Parameter


def _rows_of(weight: _Whole) -> TrainedRows:
    if (rows := weight._rows()) is None:
        raise RuntimeError("the module of this weight is gone, and its table with it")
    return rows


def _answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], caller: Any) -> Any:
    """What a function of torch gives that was called with a weight, by the frame `caller`.

    Of a property the function is its __get__ or __set__.
    """
    name = getattr(func, "__name__", str(func))
    if getattr(func, "__module__", "") == nn.init.__name__:
        return _initialised(func, args, kwargs)
    weight = args[0] if args and isinstance(args[0], _Whole) else None
    if weight is not None:
        if name in ("__get__", "__set__", "__delete__"):
            access, name = name, func.__self__.__name__
            if name not in _ELEMENTS:
                return _attribute(func, args, access, name)
        elif name in _EXTENTS:
            return func(_extents_of(weight), *args[1:], **kwargs)
        elif name == "detach":
            return _whole(weight)
    if caller.f_code is TRUNCATED_NORMAL:
        return _truncated(func, name, args, kwargs, caller.f_locals)
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    weights = [each for each in tensors if isinstance(each, _Whole)]
    with as_plain():
        if name in _OF_HELD_ROWS or not weights:
            return func(*args, **kwargs)
        others = [each for each in tensors if not isinstance(each, _Whole)]
        # A _Whole requires no gradient.
        trains = torch.is_grad_enabled() and any(each.requires_grad for each in weights)
        trains_others = trains and any(each.requires_grad for each in others)
        # Other tensors are, or may come, from the GPU, where the table is not.
        is_elsewhere = weights[0].is_cuda and (
            name in _ELEMENTS or any(each.is_cuda for each in others)
        )
    rows = _rows_of(weights[0])
    ids = _looked_up(name, args, kwargs, rows.shape[0])
    if ids is not None and (trains or isinstance(ids, Tensor)):
        return _by_ids(rows, ids, trains)
    in_place = name in _OPERATORS or (name.endswith("_") and not name.startswith("__"))
    if weight is not None and in_place and not trains and _changed(name, args, kwargs, rows):
        return weight
    if str(caller.f_globals.get("__name__")).startswith("torch.distributed.fsdp"):
        raise NotImplementedError(
            f"{rows.name}: FSDP cannot share out the rows of a table in host memory: give"
            " fully_shard() ignored_params=speedtorch.row_parameters(model)"
            " (FullyShardedDataParallel: ignored_states=)"
        )
    # What the weight is written to would need a gradient of all rows from then on.
    is_written = in_place or name == "__setitem__" or kwargs.get("out") is not None
    if is_elsewhere or trains_others or (trains and is_written):
        raise RuntimeError(_refusal(rows, f"{name}() of its weight"))
    if trains:
        return _read(func, name, args, kwargs, rows)
    args, kwargs = tree_map(
        lambda each: _rows_of(each).view() if isinstance(each, _Whole) else each, (args, kwargs)
    )
    answer = func(*args, **kwargs)
    return weight if weight is not None and in_place else answer


def _refusal(rows: TrainedRows, what: str) -> str:
    return (
        f"{rows.name}: {what} would need all {rows.shape[0]:,} rows, of which a step holds few; use"
        " emb(ids), which is differentiable, for the rows of a batch, and torch.no_grad() or"
        ' emb.table["weight"] to read or write the whole table in host memory, with other tensors'
        " on the CPU"
    )


def _read(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], rows: TrainedRows
) -> Any:
    """The whole table's answer where gradients are asked; a backward through it raises.

    Raises RuntimeError for a view: what follows would compute with all rows before its backward.
    """
    refusal = _refusal(rows, f"a gradient of {name}() of its weight")
    memory = []

    def refused(tensor: Tensor, *, is_shared: bool) -> Tensor:
        with as_plain():
            # As a view it is not written to in place, as torch refuses it of a parameter's memory.
            read = tensor.view_as(tensor) if is_shared else tensor
            return _Read.apply(rows.parameter, [read], refusal)  # type: ignore[no-any-return, no-untyped-call]

    def whole(each: Any) -> Any:
        if not isinstance(each, _Whole):
            return each
        view = _rows_of(each).view()
        memory.append(view.untyped_storage().data_ptr())
        return refused(view, is_shared=True)

    def answered(each: Any) -> Any:
        if not isinstance(each, Tensor) or not each.requires_grad:
            return each
        is_dense = each.layout == torch.strided
        is_shared = is_dense and each.untyped_storage().data_ptr() in memory
        if is_shared and name not in _CONVERSIONS:
            raise RuntimeError(_refusal(rows, f"{name}() of its weight"))
        # The backward of the function itself would compute with all rows before it raises.
        return refused(each.detach(), is_shared=is_shared)

    args, kwargs = tree_map(whole, (args, kwargs))
    return tree_map(answered, func(*args, **kwargs))


class _Read(torch.autograd.Function):
    """A tensor of all rows, or computed of them, whose gradient is refused."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, read: list[Tensor], refusal: str) -> Tensor:
        ctx.refusal = refusal
        return read[0]  # in a list, or autograd would take the result for a view of an input

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        raise RuntimeError(ctx.refusal)


def _attribute(func: Any, args: tuple[Any, ...], access: str, attribute: str) -> Any:
    """A property of a weight, or another value for it."""
    weight = args[0]
    rows = _rows_of(weight)
    if attribute == "data":
        if access == "__get__":
            return _whole(weight)
        # weight.data *= 2 assigns what it has changed.
        if not isinstance(args[1], _Whole) or _rows_of(args[1]) is not rows:
            rows.load(args[1])
        return None
    if access == "__get__" and attribute in ("shape", "ndim", "nbytes"):
        return func(_extents_of(weight))
    with as_plain():
        return func(*args)


def _gradient(func: Any, args: Sequence[Any], caller: CodeType) -> Any:
    """The gradient of the held rows, or another one for them, that some code asks for or sets."""
    with as_plain():
        rows = _rows_of(args[0])
        if rows.table.portion is not None:
            _refuse_portion(rows.name, caller)
        zeroes = caller in GRADIENT_ASKED_TO_BE_ZERO
        with rows.turn:
            rows.show_gradient(zeroes=zeroes)
            if len(args) > 1 and func.__name__ == "__set__":
                func(*args)
                return rows.parameter_view.note_gradient()
            if zeroes:
                rows.exchange.note_zero_grad()
            gradient = func(*args)
            # A gradient of no rows (a step of the padding's alone) has no largest element: a norm
            # of infinity raises. A GradScaler must see that there is one, or it would not step.
            is_empty = gradient is not None and gradient.shape[0] == 0
            is_hidden = is_empty and not zeroes and caller.co_name != UNSCALES
            return None if is_hidden else gradient


def _refuse_portion(name: str, caller: CodeType) -> None:
    """Raises NotImplementedError for code that takes one rank's gradient for that of all rows."""
    if caller in CLIPS_BY_NORM:
        raise NotImplementedError(
            f"{name}: its gradient is that of one rank's rows, and so would be the norm that all"
            " are clipped by: use speedtorch.clip_grad_norm_ (in transformers' Trainer and with"
            " accelerate: accelerator.clip_grad_norm_ = speedtorch.clip_grad_norm_; in Lightning:"
            " in the module's configure_gradient_clipping())"
        )
    if caller.co_name == UNSCALES:
        raise NotImplementedError(
            f"{name}: its gradient is that of one rank's rows, and each rank would skip other"
            " steps: use speedtorch.GradScaler"
        )


def _initialised(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A weight whose rows get first values by a function of torch.nn.init."""
    given = inspect.signature(func).bind(*args, **kwargs).arguments
    weight: _Whole = given.pop(next(iter(given)))
    numbers = {key: value for key, value in given.items() if value is not None}
    if "generator" in numbers:
        func(_rows_of(weight).view(), **numbers)
    else:
        _rows_of(weight).draw(lambda tensor: func(tensor, **numbers), anew=True)
    return weight


def _truncated(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], given: dict[str, Any]
) -> Any:
    """What trunc_normal_ gets within itself: its first write is that of all rows, its last one."""
    if isinstance(args[0], _Whole) and name.endswith("_"):
        if name in ("normal_", "uniform_"):
            own = {key: given.get(key) for key in ("mean", "std", "a", "b", "generator")}
            _initialised(nn.init.trunc_normal_, args[:1], own)
        return args[0]
    with as_plain():
        return func(*args, **kwargs)


def _extents_of(weight: _Whole) -> Tensor:
    """A tensor that has the table's extents and no elements."""
    with as_plain():
        return torch.empty(_rows_of(weight).shape, dtype=weight.dtype, device="meta")


def _whole(weight: _Whole) -> _Whole:
    with as_plain():
        whole = weight.detach().as_subclass(_Whole)
    # As a view keeps its tensor.
    whole._rows = partial(_rows_of, weight) if isinstance(weight, RowWeight) else weight._rows
    return whole


def _looked_up(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int) -> Any:
    """The ids, int or slice that a call looks up by row, or None."""
    ids = None
    if name == "__getitem__":
        ids = args[1]
    elif name == "embedding":  # torch.nn.functional's gives the settings by name
        settings = [kwargs.get(each) for each in ("max_norm", "scale_grad_by_freq", "sparse")]
        if args and not any(settings) and kwargs.get("padding_idx") in (None, -1):
            ids = args[0]
    elif name == "index_select":
        given = dict(zip(("input", "dim", "index"), args, strict=False)) | kwargs
        ids = given.get("index") if given.get("dim") == 0 else None
    if isinstance(ids, Tensor):
        return ids if ids.dtype in (torch.int64, torch.int32) else None
    if isinstance(ids, bool) or not isinstance(ids, int | slice):
        return None
    if isinstance(ids, int) and not -rows <= ids < rows:
        raise IndexError(f"weight: row {ids} is out of range for a table of {rows} rows")
    return ids


def _by_ids(rows: TrainedRows, ids: Any, trains: bool) -> Tensor:
    if isinstance(ids, int):
        return _by_ids(rows, torch.tensor([ids % rows.shape[0]]), trains)[0]
    if isinstance(ids, slice):
        return _by_ids(rows, torch.arange(*ids.indices(rows.shape[0])), trains)
    if ids.is_cpu and bool((ids < 0).any()):  # which count from the end
        ids = torch.where(ids < 0, ids + rows.shape[0], ids)
    with as_plain():
        return nn.functional.embedding(*rows.rows_of(ids)) if trains else rows.read(ids)


def _changed(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], rows: TrainedRows) -> bool:
    """Whether a method has changed all rows, or they will be at first need."""
    numbers = {key: value for key, value in kwargs.items() if value is not None}
    if name == "copy_" and isinstance(args[1], Tensor):
        rows.load(args[1].expand(rows.shape))
        return True
    if name in ("add_", "sub_", "__iadd__", "__isub__") and isinstance(args[1], Tensor):
        with as_plain():
            rows.exchange.change()
            held = rows.parameter.detach()
        if args[1].shape == held.shape:  # a gradient: that of other rows is zero
            getattr(held, name)(*args[1:], **kwargs)
            return True
    if any(isinstance(each, Tensor | torch.Generator) for each in (*args[1:], *numbers.values())):
        return False
    if name in _OVERWRITE or (name in _CHANGE and not rows.table.is_drawn):
        method, rest = getattr(torch.Tensor, name), args[1:]
        rows.draw(lambda tensor: method(tensor, *rest, **numbers), anew=name in _OVERWRITE)
        return True
    return False

"""Operations of torch for a tensor of rows, and what a plain tensor gives for them.

Arguments are generated from the signatures that torch.overrides lists. An operation is kept if a
plain parameter accepts its arguments.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import get_testing_overrides, resolve_name

from speedtorch.step.row_weight import RowWeight
from speedtorch.step.sparse_rows import SparseRows

ROWS, WIDTH = 12, 4
TRIES, KEPT = 48, 2
"""How many arguments are tried for a function, which takes seconds for all, and how many kept."""


def numbers(*shape: int, seed: int = 1) -> Tensor:
    """Distinct numbers that are exact in 16 bits, positive and negative."""
    return drawn(shape, seed).clone()


@cache
def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    count = torch.Size(shape).numel()
    order = torch.randperm(2 * count, generator=torch.Generator().manual_seed(seed))
    return ((order[:count].float() - count + 0.5) / 16).view(shape)


class Weight:
    """The place of the tensor among the arguments."""

    def __repr__(self) -> str:
        return "w"


# The tensors by names that weight_operations uses in lower case, and arguments by their names.
W = Weight()
SAME, ROW, SCALAR = numbers(ROWS, WIDTH, seed=2), numbers(WIDTH, seed=3), torch.tensor(0.75)
IDS, PLACES = torch.tensor([1, 3, 3, 0]), numbers(ROWS, WIDTH, seed=4).argsort(1)
SQUARE, WIDE = numbers(WIDTH, WIDTH, seed=5), numbers(WIDTH, ROWS, seed=6)
MASK, CLASSES = SAME > 0, torch.arange(ROWS) % WIDTH
OTHERS = ("SAME", "ROW", "SCALAR", "IDS", "PLACES", "SQUARE", "WIDE", "MASK", "CLASSES")
TENSORS = [SAME, ROW, SCALAR, IDS, WIDE, SQUARE, PLACES, MASK, CLASSES]
ANY: list[Any] = [*TENSORS[:6], 1, 0.5, 2, (2,), PLACES, MASK, CLASSES, True, "sum", [SAME]]
NAMED: dict[str, list[Any]] = {
    **{key: [0, 1, -1] for key in ("dim", "axis")},
    **{key: [0] for key in ("dim0", "padding_idx", "correction")},
    **{key: [1] for key in ("dim1", "dim2", "diagonal", "decimals")},
    **{key: [2] for key in ("k", "n", "chunks", "alpha")},
    **{key: [True] for key in ("keepdim", "inplace", "descending", "accumulate", "copy")},
    **{key: [False] for key in ("sorted", "unbiased")},
    **{key: [SAME, SQUARE] for key in ("values", "tensor")},
    **{key: [SAME, SQUARE, numbers(48), 0.5] for key in ("source", "src")},
    "dims": [(1, 0), (0,), 2],
    "other": [SAME, 0.5, ROW, MASK],
    "index": [IDS, PLACES, 2],
    "indices": [(IDS,), IDS],
    "mask": [MASK, MASK[:, :1]],
    "value": [0.5, SAME, SCALAR],
    "mat2": [WIDE, SQUARE],
    "size": [(4, 12), (48,), (12, 4), (3, 12, 4)],
    "target": [SAME, CLASSES],
    "vec": [ROW],
    "dtype": [torch.float64, torch.int32],
    "p": [2, 1.5],
    "min": [-0.5, SAME],
    "max": [0.5, SAME],
    "exponent": [2, 3.0],
    "reduce": ["sum", "amax"],
    "reduction": ["sum", "none"],
    "rounding_mode": ["floor"],
    "tensors": [[W, SAME], [SAME, W], [W]],
    "memory_format": [torch.contiguous_format],
    "ord": [1, float("inf")],
    "max_norm": [1.0],
    "normalized_shape": [(4,)],
    "offsets": [torch.tensor([0, 2])],
    "weight": [SAME, SQUARE],
}
NAMED["tensor_list"] = NAMED["tensors"]
# Functions of no elements, of the process, or of memory beyond the tensor's; one never returns.
LEFT_OUT = {"torch._reshape_alias_copy"} | {
    f"torch.Tensor.{name}"
    for name in (
        *("__repr__", "__hash__", "__format__", "__sizeof__", "__dlpack_device__", "__reduce_ex__"),
        *("device.__get__", "_cdata.__get__", "_version.__get__", "_base.__get__", "_is_view"),
        "index",
    )
}


@dataclass(frozen=True)
class Operation:
    """A function of a tensor, with its other arguments.

    `supported` has False if NotImplementedError is wrong while no gradients are recorded, and True
    if it is wrong while they are.
    """

    name: str
    call: Callable[[Any], Any]  # returns the result and the other arguments, as they are then
    writes: bool = False  # to a plain tensor
    is_random: bool = False  # results of a plain tensor differ by the seed
    supported: tuple[bool, ...] = ()

    @property
    def is_linalg(self) -> bool:
        """Whether results depend on the alignment of the elements in memory."""
        return any(each in self.name for each in ("linalg", "svd", "qr(", "lstsq", "nuclear_norm"))


def replaced(value: Any, weight: Any) -> Any:
    """Arguments with the tensor in its place, and copies of the others."""
    if isinstance(value, Weight):
        return weight
    if isinstance(value, Tensor):
        return value.to(device_of(weight), copy=True)
    if type(value) in (list, tuple):
        return type(value)(replaced(each, weight) for each in value)
    return value


def device_of(value: Any) -> Any:
    """The device of a tensor, or the CPU."""
    return value.device if isinstance(value, Tensor) else "cpu"


def shown(value: Any) -> str:
    """An argument in the name of an operation."""
    if isinstance(value, Tensor):
        kind = "" if value.dtype == torch.float32 else str(value.dtype).removeprefix("torch.")
        return f"{kind}{list(value.shape)}"
    if type(value) in (list, tuple):
        return f"[{', '.join(map(shown, value))}]"
    return str(value)


@contextmanager
def repeated_in_order(func: Any, device: Any) -> Iterator[None]:
    """On a GPU, of the elements that a call writes to one place the last one stays."""
    name = getattr(func, "__name__", "")
    writes = any(each in name for each in ("put", "scatter", "index_copy"))
    if not writes or torch.device(device).type == "cpu":
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def called(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[Any], Any]:
    """A call with a weight in its place, which returns the result and the other arguments."""

    def call(weight: Any) -> Any:
        given = [replaced(each, weight) for each in args]
        options = {key: replaced(each, weight) for key, each in kwargs.items()}
        with repeated_in_order(func, device_of(weight)):
            result = func(*given, **options)
        others = [each for each in (*given, *options.values()) if each is not weight]
        return [result, *(each for each in others if isinstance(each, Tensor | list))]

    return call


# ------------------------------------------------------------------------------------------------
# What is compared


def plain(value: Any) -> Any:
    """A result in memory of its own, of tensors, numbers and lists."""
    if isinstance(value, Tensor):
        # Without recording, views of what needs a gradient say that they need one, too.
        trains = torch.is_grad_enabled() and value.requires_grad
        with torch.no_grad():
            value = value.detach()
            if isinstance(value, SparseRows) or value.layout != torch.strided:
                value = value.to_dense()
            value = value.dequantize() if value.is_quantized else value.resolve_neg()
            value = value.cpu().clone()
        if isinstance(value, RowWeight | SparseRows):
            raise TypeError(f"a copy is a {type(value).__name__}")
        return Found(value, trains)
    if isinstance(value, np.ndarray):
        return Found(torch.from_numpy(value.copy()), False)
    if isinstance(value, torch.Size | bool | int | float | complex | str | torch.dtype | None):
        return value
    if isinstance(value, list | tuple | range):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return type(value).__name__


@dataclass
class Found:
    """A tensor of a result, and whether a gradient goes through it."""

    tensor: Tensor
    trains: bool = False

    def __repr__(self) -> str:
        kind, shape = str(self.tensor.dtype).removeprefix("torch."), list(self.tensor.shape)
        trains = " that trains" if self.trains else ""
        return f"{kind}{shape}{trains} {self.tensor.flatten()[:8].tolist()}"

    def difference(self, other: Found, *, values: bool, near: bool) -> str:
        """How it differs from what is expected, or nothing."""
        one, two = self.tensor, other.tensor
        is_same = (one.shape, one.dtype) == (two.shape, two.dtype)
        is_same = is_same and self.trains >= other.trains  # a backward through either may raise
        if not is_same or not values:
            return "" if is_same else f"got {self}, expected {other}"
        if one.is_floating_point() or one.is_complex():
            wide = torch.complex128 if one.is_complex() else torch.float64
            tolerance = (1e-5, 1e-6) if near else (0.0, 0.0)
            same = torch.isclose(one.to(wide), two.to(wide), *tolerance, equal_nan=True)
        else:
            same = one == two
        if bool(same.all()):
            return ""
        where = (~same).nonzero()[0].tolist()
        got, expected = one[tuple(where)].item(), two[tuple(where)].item()
        return f"at {where} of {[*one.shape]}: got {got}, expected {expected}"


def difference(found: Any, expected: Any, *, values: bool = True, near: bool = False) -> str:
    """How results differ, or nothing; without `values` only shapes and dtypes count."""
    same = {"values": values, "near": near}
    if isinstance(expected, Found) and isinstance(found, Found):
        return found.difference(expected, **same)
    if isinstance(expected, list) and isinstance(found, list):
        if len(found) != len(expected):
            return f"got {len(found)} results, expected {len(expected)}"
        pairs = zip(found, expected, strict=True)
        return next(filter(None, (difference(*pair, **same) for pair in pairs)), "")
    if isinstance(expected, dict) and isinstance(found, dict):
        return difference([*map(list, found.items())], [*map(list, expected.items())], **same)
    if isinstance(expected, float) and isinstance(found, float):
        one, other = (Found(torch.tensor(each, dtype=torch.float64)) for each in (found, expected))
        return one.difference(other, **same)
    if type(found) is not type(expected) or (values and found != expected):
        return f"got {found!r:.200}, expected {expected!r:.200}"
    return ""


# ------------------------------------------------------------------------------------------------
# Operations of torch


def tried(call: Callable[[Any], Any], shape: Sequence[int], seed: int = 0) -> Any:
    """What a plain parameter gives and becomes, or None if it raises."""
    weight = nn.Parameter(numbers(*shape))
    torch.default_generator.manual_seed(seed)
    with torch.no_grad():
        try:
            return [plain(call(weight)), plain(weight), weight.requires_grad]
        except Exception:
            return None


def accepted(name: str, call: Callable[[Any], Any], shape: Sequence[int]) -> Operation | None:
    """The operation, or None if a plain parameter raises."""
    found = tried(call, shape)
    if found is None:
        return None
    writes = bool(difference(found[1:], [Found(numbers(*shape)), True]))
    is_random = "empty" in name or bool(difference(tried(call, shape, 1), found))
    is_random = is_random and "data_ptr" not in name  # no other pointer is the same
    return Operation(name, call, writes, is_random)


def signatures() -> Iterator[tuple[str, Any, list[inspect.Parameter]]]:
    """Functions that torch.overrides lists, and further methods that write."""
    listed = get_testing_overrides()
    for func, dummy in listed.items():
        name = resolve_name(func) or f"torch.{func.__name__}"
        if name not in LEFT_OUT and "fbgemm" not in name:
            yield name, func, list(inspect.signature(dummy).parameters.values())
    for name in dir(Tensor):
        method = getattr(Tensor, name)
        if not name.endswith("_") or name.startswith("__") or method in listed:
            continue
        dummy = listed.get(getattr(Tensor, name[:-1], None), lambda self, a=0, b=0: None)
        yield f"torch.Tensor.{name}", method, list(inspect.signature(dummy).parameters.values())


def of_function(
    name: str, func: Any, parameters: list[inspect.Parameter], shape: Sequence[int]
) -> Iterator[Operation]:
    """Operations of a function, of which a plain parameter accepts the arguments."""
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p.name for p in positional if p.default is p.empty]
    if any(p.kind == p.VAR_POSITIONAL for p in parameters):
        needed.append("*")
    if not needed:
        return

    def kept(choices: list[list[Any]], most: int, **kwargs: Any) -> Iterator[Operation]:
        left = most
        for args in itertools.islice(itertools.product(*choices), TRIES):
            text = ", ".join([*map(shown, args), *(f"{k}={shown(v)}" for k, v in kwargs.items())])
            found = accepted(f"{name}({text})", called(func, args, kwargs), shape)
            if found is not None:
                yield found
                left -= 1
                if not left:
                    return

    first: list[Any] = NAMED[needed[0]] if needed[0] in ("tensors", "tensor_list") else [W]
    rest = [NAMED.get(each, ANY) for each in needed[1:4]]
    own = list(kept([first, *rest], KEPT))
    yield from own
    if own and rest:
        for place in range(1, len(needed[:3])):
            yield from kept([TENSORS, *rest[: place - 1], [W], *rest[place:]], 1)
    names = [p.name for p in parameters if p.default is not p.empty or p.kind == p.KEYWORD_ONLY]
    taken = 0
    for each in names:
        if each == "out":
            yield from kept([TENSORS, *rest], 1, out=W)
            yield from kept([first, *rest], 1, out=torch.empty(0))
        elif each in NAMED and taken < 3:
            for value in NAMED[each][:2]:
                found = list(kept([first, *rest], 1, **{each: value}))
                taken += len(found)
                yield from found


def without_gradients(func: Any, first: Any, *args: Any) -> Any:
    """Results of a function of lists: in torch, those of all tensors train if one does."""
    results = func(first, *args)
    if results is None or results is first:
        return results
    return [each.detach() for each in results]


def foreach(shape: Sequence[int]) -> Iterator[Operation]:
    """Functions of lists of tensors."""
    lists: list[Any] = [[W], [W, ROW], [SAME], [SAME, ROW], [0.5, 2.0]]
    others: list[Any] = [*lists, 0.5, 2, SCALAR]
    for name in dir(torch):
        if not name.startswith("_foreach_"):
            continue
        func, left = getattr(torch, name), 5
        for count in range(3):
            for args in itertools.product(lists[:4], *[others] * count):
                if not any(isinstance(a, list) and W in a for a in args) or not left:
                    continue
                text = ", ".join(map(shown, args))
                call = called(partial(without_gradients, func), args, {})
                found = accepted(f"torch.{name}({text})", call, shape)
                if found is not None:
                    left -= 1
                    yield found


@cache
def generated(shape: tuple[int, ...] = (ROWS, WIDTH)) -> list[Operation]:
    """All operations for a tensor of this shape, in a fixed order."""
    found = [op for each in signatures() for op in of_function(*each, shape)]
    found += foreach(shape)
    return list({op.name: op for op in found}.values())


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a result."""
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in tensors_of(each)]
    return [value] if isinstance(value, Tensor) and value.is_floating_point() else []


def derived(name: str, then: Callable[[list[Tensor]], None], grad: bool) -> list[Operation]:
    """Operations that only read, and one more of their results."""

    def with_more(call: Callable[[Any], Any]) -> Callable[[Any], None]:
        def both(weight: Any) -> None:
            with torch.set_grad_enabled(grad):
                then(tensors_of(call(weight)[0]))

        return both

    reads = [each for each in generated() if not each.writes and not each.is_random]
    made = [accepted(f"{each.name}{name}", with_more(each.call), (ROWS, WIDTH)) for each in reads]
    return [replace(each, writes=each.writes or grad) for each in made if each is not None]


@cache
def then_written() -> list[Operation]:
    """Writes to results, which may be views."""

    def write(results: list[Tensor]) -> None:
        for each in results:
            each.mul_(2)

    return derived(".mul_(2)", write, grad=False)


@cache
def then_backward() -> list[Operation]:
    """Gradients through results."""

    def backward(results: list[Tensor]) -> None:
        sums = [each.double().sum() for each in results if each.requires_grad]
        torch.stack(sums).sum().backward()

    return derived(".sum().backward()", backward, grad=True)

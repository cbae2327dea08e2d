"""Values of a training run as JSON with the names of tensors, without pickle and without code.

None, bools, strings, ints of up to 2048 bits and finite floats are plain JSON values. Any other
value is a list whose first item is the name of its type. A dict's keys are strings, numbers or
bools.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["described", "restored"]

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_SEQUENCES = {kind.__name__.lower(): kind for kind in (list, tuple, torch.Size)}
_DEEPEST = 100
_LONG_BITS = 2048  # longer ints are hex, as Python may limit decimal text to 640 digits


def described(name: str, value: Any, keep: Callable[[str, Tensor], str], depth: int = 0) -> Any:
    """Converts a value of the types in save() to JSON types; `name` names the value in errors.

    `keep(name, tensor)` stores a tensor and returns its key. Raises TypeError for an unsupported
    type, and ValueError if a value is nested too deeply or within itself.
    """
    if depth > _DEEPEST:
        raise ValueError(f"{name}: is nested more than {_DEEPEST} levels deep, or within itself")

    def inner(place: str, item: Any) -> Any:
        """Converts an item of the value; errors name its `place`."""
        return described(name + place, item, keep, depth + 1)

    kind = type(value)
    if kind is int and value.bit_length() > _LONG_BITS:
        return ["int", hex(value)]
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else ["float", repr(value)]
    if isinstance(value, Tensor):
        return ["tensor", keep(name, value)]
    if kind is bytes:
        return ["bytes", value.hex()]
    if kind in (torch.dtype, torch.device):
        return [kind.__name__, str(value)]
    if isinstance(value, np.generic) and _has_plain_type(value.dtype):
        return ["number", value.dtype.str, value.tobytes().hex()]
    if kind in (np.ndarray, np.memmap) and _has_plain_type(value.dtype):
        data = torch.from_numpy(np.frombuffer(value.tobytes(), np.uint8).copy())
        return ["array", value.dtype.str, [*value.shape], keep(name, data)]
    if kind in (list, tuple, torch.Size):
        items = [inner(f"[{at}]", item) for at, item in enumerate(value)]
        return [kind.__name__.lower(), *items]
    if isinstance(value, Mapping) and kind in (dict, Counter, OrderedDict):
        entries = []
        for key, item in value.items():
            if type(key) not in (str, int, float, bool):
                raise TypeError(
                    f"{name}: has the key {key!r}, a {type(key).__name__}; expected strings and"
                    " numbers"
                )
            entries.append([inner("'s key", key), inner(f"[{key!r}]", item)])
        if kind is not OrderedDict:
            return [kind.__name__.lower(), *entries]
        metadata = getattr(value, "_metadata", None)  # state_dict() of a module has it
        return ["ordered", inner("'s metadata", metadata), *entries]
    remedy = (
        "the value in one of these types. If the object has a state_dict(), pass that, or the"
        " object as a part of its own"
    )
    if isinstance(value, np.generic | np.ndarray):
        remedy = "a plain array of numbers, such as np.asarray(array, dtype=np.float32)"
    raise TypeError(
        f"{name}: a checkpoint has no pickled objects, so it cannot hold a {kind.__module__}."
        f"{kind.__qualname__}. Expected None, numbers, strings, bytes, tensors, plain NumPy arrays,"
        f" and dicts, lists and tuples of them. Pass {remedy}."
    )


def restored(value: Any, found: Callable[[str], Tensor], depth: int = 0) -> Any:
    """Converts the result of described() back; `found` returns tensors by their keys.

    Raises ValueError or KeyError if `value` is not such a result.
    """
    if depth > 2 * _DEEPEST:
        raise ValueError("it is nested too deeply")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if not isinstance(value, list) or not value or type(value[0]) is not str:
        raise ValueError(f"expected a value, got {str(value)[:80]}")
    word, *rest = value

    def inner(item: Any) -> Any:
        """Converts an item of the value back."""
        return restored(item, found, depth + 1)

    if word in _SEQUENCES:
        return _SEQUENCES[word]([inner(item) for item in rest])
    if word in ("dict", "counter"):  # Counter: milestones of schedulers
        return (dict if word == "dict" else Counter)(dict(_pairs(rest, inner)))
    if word == "ordered" and rest:
        entries: Any = OrderedDict(_pairs(rest[1:], inner))
        if (metadata := inner(rest[0])) is not None:
            vars(entries)["_metadata"] = metadata
        return entries
    if word in ("array", "number"):
        return _array(word, rest, found)
    if len(rest) == 1 and isinstance(text := rest[0], str):
        if word == "tensor":
            return found(text)
        if word == "float" and text in ("inf", "-inf", "nan"):
            return float(text)
        if word == "int":
            return int(text, 16)
        if word == "bytes":
            return bytes.fromhex(text)
        if word == "dtype" and text in _DTYPES:
            return _DTYPES[text]
        if word == "device":
            try:
                return torch.device(text)
            except RuntimeError as error:  # torch does not know the text
                raise ValueError(f"expected a device, got {text[:80]!r}") from error
    raise ValueError(f"expected a value, got {str(value)[:80]}")


def _has_plain_type(dtype: np.dtype[Any]) -> bool:
    """Whether a NumPy dtype has bytes, and its `str` describes it: no objects, no structure."""
    return not dtype.hasobject and dtype.itemsize > 0 and np.dtype(dtype.str) == dtype


def _plain_type(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.str != name or not _has_plain_type(dtype):
        raise ValueError(f"expected a type of numbers, got {name[:80]!r}")
    return dtype


def _array(word: str, rest: list[Any], found: Callable[[str], Tensor]) -> Any:
    """A NumPy array in its own memory, or a NumPy number."""
    if word == "number" and len(rest) == 2 and all(type(text) is str for text in rest):
        (number,) = np.frombuffer(bytes.fromhex(rest[1]), _plain_type(rest[0]))
        return number
    if len(rest) == 3 and type(rest[0]) is type(rest[2]) is str and isinstance(rest[1], list):
        data = found(rest[2]).contiguous().view(torch.uint8).numpy().tobytes()
        return np.frombuffer(data, _plain_type(rest[0])).reshape(rest[1]).copy()
    raise ValueError(f"expected a value, got {str([word, *rest])[:80]}")


def _pairs(entries: list[Any], inner: Callable[[Any], Any]) -> list[tuple[Any, Any]]:
    if not all(isinstance(entry, list) and len(entry) == 2 for entry in entries):
        raise ValueError(f"expected pairs, got {str(entries)[:80]}")
    return [(inner(key), inner(value)) for key, value in entries]

"""Files of `SPEEDTORCH_LOG=dump`: safetensors files with two byte arrays, and without code.

`calls` is JSON with the operators, their inputs and digests. `storages` contains the storages of
all inputs, one after another; inputs of a call that share memory are views of one storage.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedtorch.checkpoints.saved_values import described, restored
from speedtorch.files.file_format import are_sizes
from speedtorch.files.safetensors_format import read_arrays, safetensors_header
from speedtorch.files.system_calls import OpenFile, open_to_read
from speedtorch.memory import empty
from speedtorch.torch_internals import storage_id

__all__ = ["DUMP_FORMAT", "Dump", "open_dump", "write_dump"]

DUMP_FORMAT = "speedtorch dump 2"


def _bytes_of(storage: Any) -> Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return whole.set_(storage).cpu()


def write_dump(path: Path, calls: Sequence[dict[str, Any]]) -> None:
    """Writes calls to a file; their values are None, numbers, texts, tensors and lists of them."""
    places: dict[int, int] = {}
    storages: list[Any] = []
    tensors: list[Any] = []

    def add(name: str, value: Tensor) -> str:
        """Adds a tensor and, if it is new, its storage; returns the tensor's number as a text."""
        storage = value.untyped_storage()
        if (key := storage_id(storage)) not in places:
            places[key] = len(storages)
            storages.append(storage)
        layout = [[*value.shape], [*value.stride()], value.storage_offset()]
        tensors.append([places[key], str(value.dtype), *layout, value.requires_grad])
        return str(len(tensors) - 1)

    content = {
        "calls": [described(f"calls[{at}]", call, add) for at, call in enumerate(calls)],
        "format": DUMP_FORMAT,
        "storages": [[storage.device.type, storage.nbytes()] for storage in storages],
        "tensors": tensors,
    }
    text = json.dumps(content, separators=(",", ":")).encode()
    sizes = {"calls": len(text), "storages": sum(storage.nbytes() for storage in storages)}
    header = safetensors_header({name: ([size], torch.uint8) for name, size in sizes.items()})
    with path.open("wb") as file:
        file.write(header + text)
        for storage in storages:
            file.write(_bytes_of(storage).numpy().data)


class _Tensor(NamedTuple):
    """An input tensor as a view of a storage."""

    storage: int
    dtype: torch.dtype
    shape: list[int]
    stride: list[int]
    offset: int
    requires_grad: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the storage up to the tensor's last element."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * by for size, by in zip(self.shape, self.stride, strict=True))
        return (self.offset + last + 1) * self.dtype.itemsize


class Dump:
    """The validated calls of a dump in an open file; see open_dump()."""

    def __init__(self, file: OpenFile) -> None:
        arrays = read_arrays(file.read, file.size)
        kinds = {(name, array.dtype, len(array.shape)) for name, array in arrays.items()}
        if kinds != {("calls", torch.uint8, 1), ("storages", torch.uint8, 1)}:
            raise ValueError(f"the arrays {[*arrays][:4]}")
        self._file, self._begins = file, [arrays["storages"].offset]
        text = bytearray(arrays["calls"].nbytes)
        file.read(memoryview(text), arrays["calls"].offset)
        content = json.loads(text)
        if not isinstance(content, dict) or content.get("format") != DUMP_FORMAT:
            found = content.get("format") if isinstance(content, dict) else content
            raise ValueError(f"the format {str(found)[:40]!r}")
        self._storages = [self._storage(entry) for entry in content["storages"]]
        if self._begins[-1] - self._begins[0] != arrays["storages"].nbytes:
            raise ValueError("storages of another size")
        self._tensors = [self._tensor(entry) for entry in content["tensors"]]
        self._calls = content["calls"]
        nothing = [torch.empty(0)] * len(self._tensors)
        for at in range(len(self)):
            self._call(at, nothing.__getitem__)

    def _storage(self, entry: Any) -> tuple[bool, int]:
        """Validates a storage's entry; returns whether it was on a GPU, and its bytes."""
        device, nbytes = entry
        if device not in ("cpu", "cuda") or not are_sizes([nbytes]):
            raise ValueError(f"the storage {entry}")
        self._begins.append(self._begins[-1] + nbytes)
        return device == "cuda", nbytes

    def _tensor(self, entry: Any) -> _Tensor:
        storage, dtype, shape, stride, offset, requires_grad = entry
        kind = restored(["dtype", dtype], dict[str, Tensor]().__getitem__)
        made = _Tensor(storage, kind, shape, stride, offset, requires_grad)
        is_sized = are_sizes([storage, offset]) and are_sizes(shape) and are_sizes(stride)
        if not is_sized or len(shape) != len(stride) or type(requires_grad) is not bool:
            raise ValueError(f"the tensor {entry}")
        if len(shape) > 64 or math.prod(shape) * kind.itemsize >= 2**63:
            raise ValueError(f"the tensor {entry}")
        if made.nbytes > self._storages[storage][1]:
            raise ValueError(f"the tensor {entry} in a storage of {self._storages[storage][1]}")
        if requires_grad and not (kind.is_floating_point or kind.is_complex):
            raise ValueError(f"the tensor {entry} with a gradient")
        return made

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yields the calls with their inputs in new memory."""
        for at in range(len(self)):
            loaded: dict[int, Tensor] = {}
            yield self._call(at, partial(self._input, loaded))

    def _call(self, at: int, input_of: Callable[[int], Tensor]) -> dict[str, Any]:
        call = restored(self._calls[at], lambda name: input_of(int(name)))
        known = {"op": list, "grad": bool, "inputs": list, "digests": list, "error": str}
        if not isinstance(call, dict) or not {"op", "grad", "inputs"} <= call.keys():
            raise ValueError(f"the call {str(call)[:80]}")
        if any(type(value) is not known.get(name) for name, value in call.items()):
            raise ValueError(f"the call {str(call)[:80]}")
        if [type(part) for part in call["op"]] != [str, str]:
            raise ValueError(f"the operator {str(call['op'])[:80]}")
        return call

    def _input(self, loaded: dict[int, Tensor], number: int) -> Tensor:
        """Loads a tensor of a call; `loaded` has the storages of the call's other tensors."""
        storage, dtype, shape, stride, offset, requires_grad = self._tensors[number]
        if storage not in loaded:
            loaded[storage] = self._load(storage)
        whole = loaded[storage].untyped_storage()
        made = torch.empty(0, dtype=dtype, device=whole.device)
        return made.set_(whole, offset, shape, stride).requires_grad_(requires_grad)

    def _load(self, storage: int) -> Tensor:
        """Loads a storage on a GPU if it was on one and torch sees one."""
        was_on_gpu, nbytes = self._storages[storage]
        read = torch.empty(nbytes, dtype=torch.uint8)
        self._file.read(read.numpy().data, self._begins[storage])
        if was_on_gpu and torch.cuda.is_available():
            return read.cuda()
        return empty(nbytes, dtype=torch.uint8).copy_(read)


@contextmanager
def open_dump(path: str) -> Iterator[Dump]:
    """Opens a dump and validates its contents. Raises ValueError for other files."""
    with open_to_read(path) as file:
        try:
            dump = Dump(file)
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: expected a file that SPEEDTORCH_LOG=dump has written (format"
                f" {DUMP_FORMAT!r}). This file has other contents: {error}"
            ) from error
        yield dump

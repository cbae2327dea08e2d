"""The families of SpeedTorch's classes, which differ in the table's place and in their files.

| family                         | place of the table                                    |
|--------------------------------|-------------------------------------------------------|
| ModelFactory, ...              | with the variable, or host memory if CPUPinn          |
| GPUPytorchModelFactory, ...    | with the variable                                     |
| CPUPytorchModelFactory, ...    | host memory                                           |
| PytorchModelFactory, ...       | by deviceType, pinType                                |
| ModelFactoryMM, ...            | a memory-mapped file                                  |
"""

from __future__ import annotations

import inspect
import itertools
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from speedtorch.table.host_table import HostTable

Fields = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""The shape and dtype of rows, or of whole fields, by name."""
Datatype = str | torch.dtype | npt.DTypeLike


@dataclass(frozen=True)
class TablePlace:
    """The place of a table that is created later."""

    memory: str  # one of HostTable's kinds, or "variable": the device that make_table() gets
    diskname: str = ""  # for "file": the start of the file names

    def make_table(self, rows: int, fields: Fields, device: torch.device) -> HostTable:
        """Creates a zeroed table; `device` is the place of a table with memory "variable".

        A table in a file uses the first free name `<diskname><number>.memmap`.
        """
        settings: dict[str, Any] = {"memory": self.memory}
        if self.memory == "file":
            names = (f"{self.diskname}{number}.memmap" for number in itertools.count())
            settings["path"] = next(name for name in names if not os.path.lexists(name))
        elif self.memory == "variable" and device.type == "cuda":
            settings = {"memory": "cuda", "device": device}
        elif self.memory == "variable":
            settings = {"memory": "plain"}
        return HostTable.from_fields(rows, fields, **settings)


def constructor(
    start: Callable[..., None], place: Callable[..., TablePlace], defaults: Mapping[str, Any]
) -> Callable[..., None]:
    """Creates a class's constructor, with the arguments of `start` and of `place`.

    `diskname` precedes the first argument with a default; the other arguments of `place` follow the
    last positional one. `defaults` are the defaults of the family.
    """
    of_self, *own = inspect.signature(start).parameters.values()
    of_place = inspect.signature(place).parameters

    def order(param: inspect.Parameter) -> int:
        """The position of the parameter's group in the signature."""
        if param.name in of_place:
            return 1 if param.name == "diskname" else 3
        return 4 if param.kind is param.KEYWORD_ONLY else 0 if param.default is param.empty else 2

    params = [
        param.replace(default=defaults.get(param.name, param.default))
        for param in sorted((*own, *of_place.values()), key=order)
    ]
    signature = inspect.Signature(params)

    def __init__(self: Any, *args: Any, **settings: Any) -> None:
        try:
            bound = signature.bind(*args, **settings)
        except TypeError as error:
            raise TypeError(
                f"{type(self).__name__}: {error}. The signature is {signature}."
            ) from None
        bound.apply_defaults()
        self._place = place(**{name: bound.arguments.pop(name) for name in of_place})
        start(self, **bound.arguments)

    of_self = of_self.replace(kind=of_self.POSITIONAL_ONLY)
    vars(__init__)["__signature__"] = signature.replace(parameters=[of_self, *params])
    return __init__


def with_variable() -> TablePlace:
    """The device of the variable, or default_device() for classes without a variable."""
    return TablePlace("variable")


def in_host_memory() -> TablePlace:
    """Host memory that a GPU, if there is one, can access directly (HostTable's kind "auto")."""
    return TablePlace("auto")


def host_or_variable(CPUPinn: bool = False) -> TablePlace:
    """Host memory that the GPU can access directly, or the variable's own device."""
    return in_host_memory() if CPUPinn else with_variable()


def in_file(diskname: str = "", CPUPinn: bool = False) -> TablePlace:
    """A memory-mapped file; warns if CPUPinn is set, because its pages cannot be pinned."""
    if CPUPinn:
        warnings.warn(
            "CPUPinn=True has no effect on a memory-mapped file, because writable pages of files"
            " cannot be pinned. A GPU uses staged copies. With CPUPinn=True, the class without MM"
            " uses host memory that a GPU accesses directly.",
            stacklevel=3,
        )
    return TablePlace("file", diskname)


def of_kind(deviceType: str | torch.device = "cuda", pinType: bool = False) -> TablePlace:
    """The table's place that corresponds to torch.zeros(device=deviceType, pin_memory=pinType).

    Raises ValueError for devices other than the CPU and GPUs, and for pinned memory on a GPU.
    """
    kind = str(deviceType).partition(":")[0]
    if kind == "cpu":
        return TablePlace("auto" if pinType else "plain")
    if kind == "cuda" and not pinType:
        return TablePlace("variable")
    raise ValueError(
        "(deviceType, pinType) must be ('cuda', False), ('cpu', True) or ('cpu', False), got"
        f" {(str(deviceType), pinType)}"
    )


def default_device() -> torch.device:
    """The device for classes without a variable: the current GPU if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def as_dtype(datatype: object, argument: str) -> torch.dtype:
    """Converts a torch dtype, a NumPy dtype or a name to a torch dtype.

    Example:
        >>> as_dtype("float32", "dtype"), as_dtype(np.int8, "dtype"), as_dtype("bfloat16", "dtype")
        (torch.float32, torch.int8, torch.bfloat16)
    """
    named = getattr(torch, datatype, None) if isinstance(datatype, str) else datatype
    if isinstance(named, torch.dtype):
        return named
    try:
        return torch.from_numpy(np.empty(0, np.dtype(datatype))).dtype  # type: ignore[call-overload]
    except TypeError as error:
        raise ValueError(
            f"{argument} must be a torch dtype, such as torch.float32, or a name, such as"
            f" 'float32', 'float16', 'bfloat16', 'int32' or 'uint32', got {datatype!r}"
        ) from error

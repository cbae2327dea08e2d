"""Where a SpeedTorch class keeps its table, which is all that its families differ in.

| family                         | where the table is                                    |
|--------------------------------|-------------------------------------------------------|
| ModelFactory, ...              | with the variable, or host memory if CPUPinn          |
| GPUPytorchModelFactory, ...    | with the variable                                     |
| CPUPytorchModelFactory, ...    | host memory                                           |
| PytorchModelFactory, ...       | by deviceType, pinType                                |
| ModelFactoryMM, ...            | a memory-mapped file                                  |
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from speedtorch.table.host_table import HostTable

__all__ = [
    "Datatype",
    "TablePlace",
    "as_dtype",
    "default_device",
    "host_or_variable",
    "in_file",
    "of_kind",
]


Datatype = str | torch.dtype | npt.DTypeLike


@dataclass(frozen=True)
class TablePlace:
    """A place for tables that are made later.

    Attributes:
        memory: "variable" for the device of the variable that the table serves, or one of
            HostTable's kinds.
        diskname: for "file", how the names of the files start.
    """

    memory: str
    diskname: str = ""

    def make_table(
        self,
        rows: int,
        fields: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        device: torch.device,
    ) -> HostTable:
        """Makes a table of zeros.

        Args:
            rows: how many rows.
            fields: name to (shape of a row, dtype).
            device: where the variable is that the table serves.

        Returns:
            The table; one in a file gets the first free name `<diskname><number>.memmap`.
        """
        if self.memory == "file":
            return HostTable.from_fields(
                rows, fields, memory="file", path=_unused_name(self.diskname)
            )
        if self.memory == "variable":
            if device.type == "cuda":
                return HostTable.from_fields(rows, fields, memory="cuda", device=device)
            return HostTable.from_fields(rows, fields, memory="plain")
        return HostTable.from_fields(rows, fields, memory=self.memory)


def _unused_name(start: str) -> str:
    number = 0
    while os.path.lexists(f"{start}{number}.memmap"):
        number += 1
    return f"{start}{number}.memmap"


def host_or_variable(CPUPinn: bool) -> TablePlace:
    """Host memory that the GPU reaches by itself, or the variable's own device."""
    return TablePlace("auto" if CPUPinn else "variable")


def in_file(diskname: str, CPUPinn: bool) -> TablePlace:
    """A memory-mapped file; its pages cannot be pinned, which is said if it was asked for."""
    if CPUPinn:
        warnings.warn(
            "CPUPinn=True has no effect on a memory-mapped file: its pages cannot be pinned while"
            " they are writable, so rows take a staged copy; the families without MM can pin",
            stacklevel=3,
        )
    return TablePlace("file", diskname)


def of_kind(deviceType: str | torch.device, pinType: bool) -> TablePlace:
    """What torch.zeros(device=deviceType, pin_memory=pinType) means for a table.

    Raises:
        ValueError: neither "cuda" nor "cpu", or pinned memory on the GPU.
    """
    kind = str(deviceType).partition(":")[0]
    if kind == "cpu":
        return TablePlace("auto" if pinType else "plain")
    if kind == "cuda" and not pinType:
        return TablePlace("variable")
    raise ValueError(
        f"deviceType={str(deviceType)!r}, pinType={pinType!r}: choose ('cuda', False),"
        " ('cpu', True) or ('cpu', False)"
    )


def default_device() -> torch.device:
    """Where rows are wanted that serve no variable: the current GPU if there is one."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def as_dtype(datatype: object, argument: str) -> torch.dtype:
    """The torch dtype that a torch dtype, a NumPy dtype or a name stands for.

    Args:
        datatype: torch.float32, np.float32, "float32", "f4", "bfloat16", ...
        argument: what it is called where it came from.

    Returns:
        The torch dtype.

    Raises:
        ValueError: torch has no such dtype.

    Example:
        >>> as_dtype("float32", "dtype"), as_dtype(np.int8, "dtype"), as_dtype("bfloat16", "dtype")
        (torch.float32, torch.int8, torch.bfloat16)
    """
    if isinstance(datatype, torch.dtype):
        return datatype
    named = getattr(torch, datatype, None) if isinstance(datatype, str) else None
    if isinstance(named, torch.dtype):
        return named
    try:
        return torch.from_numpy(np.empty(0, np.dtype(datatype))).dtype  # type: ignore[call-overload]
    except TypeError as error:
        raise ValueError(
            f"{argument}={datatype!r} is no dtype of torch's: give one such as torch.float32, or a"
            " name such as 'float32', 'float16', 'bfloat16', 'int32' or 'uint32'"
        ) from error

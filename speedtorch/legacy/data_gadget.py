"""DataGadget: copies rows of a file or an array to the device of the training."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from speedtorch.files.file_format import joined_names
from speedtorch.files.table_files import StoredField, open_fields
from speedtorch.legacy import families
from speedtorch.legacy.batch_ids import Indexes, as_tensor, flat_index
from speedtorch.legacy.numpy_index import Index, elements_of, row_ids
from speedtorch.legacy.switcher import OneField, Stored, gathered
from speedtorch.legacy.switcher_files import (
    CupyFiles,
    MappedFiles,
    TorchFiles,
    file_name,
    read_into,
    read_tensors,
)
from speedtorch.ops.functions import pinned_scatter
from speedtorch.table.host_table import HostTable

__all__ = [
    "CPUPytorchDataGadget",
    "DataGadget",
    "DataGadgetMM",
    "GPUPytorchDataGadget",
    "PytorchDataGadget",
]

Source = str | os.PathLike[str] | npt.NDArray[Any] | Tensor

_Field = TypeVar("_Field")


class GadgetSwitcher(OneField):
    """The common base of the DataGadget classes."""

    _how_to_start = "gadgetInit() first"

    def _start(self, fileName: Source, *, field: str | None = None) -> None:
        """Checks the source; gadgetInit or the first use reads its rows."""
        self._field = field
        self._data: Tensor | None = None
        self.fileName: str | None = None
        if isinstance(fileName, np.ndarray | Tensor):
            self._data = as_tensor(fileName)
            if self._data.dim() == 0:
                raise ValueError("fileName: the data must have at least one dimension")
        else:
            self.fileName = os.fspath(fileName)
            with open_fields(self.fileName, field=field) as stored:
                _only(stored)

    def gadgetInit(self) -> None:
        """Reads the rows into the gadget's own memory; the first use calls this if needed."""
        if self._stored is None and self.fileName is not None:
            self._read_file(self.fileName)
        elif self._stored is None and self._data is not None:
            self._fill(self._data)
            self._data = None  # so that the rows are not in memory twice

    def _read_file(self, path: str) -> None:
        with open_fields(path, field=self._field) as stored:
            self._fill(_only(stored))

    def _fill(self, source: Tensor | StoredField) -> None:
        """Creates and fills a table, which then replaces the old one."""
        fields = {"weight": (tuple(source.shape[1:]), source.dtype)}
        table = self._place.make_table(source.shape[0], fields, self._device())
        read_into(source, table["weight"])
        self._store(Stored(table, {"weight": table["weight"]}))

    def _rows(self) -> dict[str, Tensor]:
        self.gadgetInit()
        return super()._rows()

    def getData(self, indexes: Index, retrievedNegIndexes: Indexes | None = None) -> Tensor:
        """Copies `data[indexes]` to the GPU, or without a GPU to the CPU.

        Args:
            indexes: Any NumPy index: ids of any shape (array, list, or a tensor on any device), a
                slice, a mask, or a tuple of these for several axes, such as (rows, columns).
                Negative ids count from the end. Ids, slices and masks of whole rows are fast.
            retrievedNegIndexes: More ids. The result is then `[ids, ...]`, with the rows of
                `indexes` first, in order.

        Returns:
            NumPy's result as a new tensor; for ids `[*indexes.shape, ...]`.

        Raises:
            IndexError: An id is out of range. With ids on a GPU, a later call raises instead, and
                the result is zeros.
        """
        device = self._device()
        field, ids = self._selected(indexes, retrievedNegIndexes, device)
        return gathered(field, ids.reshape(-1), device).view((*ids.shape, *field.shape[1:]))

    def _selected(
        self, indexes: Index, negatives: Indexes | None, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """The rows and the selected ids; for several axes all elements and their positions."""
        field = self._rows()["weight"]
        if negatives is not None:
            indexes = flat_index(cast(Indexes, indexes), negatives, device)
        ids = row_ids(indexes, field.shape[0], device)
        return elements_of(field, indexes) if ids is None else (field, ids)

    def insertData(
        self,
        dataObject: Tensor | npt.NDArray[Any],
        indexes: Index,
        retrievedNegIndexes: Indexes | None = None,
    ) -> None:
        """Writes `data[indexes] = dataObject`; for a repeated id the last row wins.

        Args:
            dataObject: The values, on any device, with the shape that getData returns for these
                indexes or a shape that NumPy would broadcast to it. Another dtype is cast to the
                rows' dtype as in a NumPy assignment: torch warns and drops an imaginary part.
            indexes: See getData.
            retrievedNegIndexes: See getData.

        Raises:
            IndexError: An id is out of range; nothing has changed. With ids on a GPU, a later call
                raises instead.
            ValueError: The number of rows or the shape does not match, or the file is mapped
                read-only; nothing has changed.
        """
        where = self._rows()["weight"].device
        if self._stored is not None and self._stored.table is not None:
            self._stored.table.check_writable("insertData")
        rows = as_tensor(dataObject)
        if where.type == "cuda":
            rows = rows.to(where, non_blocking=True)
        field, ids = self._selected(indexes, retrievedNegIndexes, rows.device)
        shape = (*ids.shape, *field.shape[1:])
        try:
            values = rows.expand(shape)
        except RuntimeError as error:
            raise ValueError(
                f"insertData: the values must broadcast to {list(shape)}, got {list(rows.shape)}"
            ) from error
        values = values.to(field.dtype).reshape(ids.numel(), *field.shape[1:])
        pinned_scatter(field, ids.reshape(-1), values.contiguous())


def _only(stored: Mapping[str, _Field]) -> _Field:
    """The single tensor of a file, or the one that `field` has chosen."""
    if len(stored) > 1:
        raise ValueError(f"field must be one of the file's {joined_names(stored)}, got None")
    return next(iter(stored.values()))


class _CupyGadget(CupyFiles, GadgetSwitcher):
    def loadCupy(self, loadFileName: str | os.PathLike[str]) -> None:
        """Loads other data, of any shape and dtype, from a .npy or .safetensors file.

        Args:
            loadFileName: The file name; `.npy` is appended to names without either ending.

        Raises:
            ValueError: The file has another format; the gadget does not change.
        """
        self._read_file(file_name(loadFileName))


class _TorchGadget(TorchFiles, GadgetSwitcher):
    def loadTorch(self, loadFileName: str | os.PathLike[str]) -> None:
        """Loads other data, of any shape and dtype, with torch.load(weights_only=True).

        Args:
            loadFileName: A file of saveTorch.

        Raises:
            ValueError: The file does not contain exactly one tensor; the gadget does not change.
        """
        content = read_tensors(loadFileName)
        if set(content) != {"weight"}:
            raise ValueError(
                f"{os.fspath(loadFileName)} must contain one tensor, got {sorted(content)}"
            )
        self._fill(content["weight"])


class DataGadget(_CupyGadget, place=families.host_or_variable):
    """Stores data of any number of dimensions and copies rows of it to the GPU.

    Replaces SpeedTorch's class of 2019. gadgetInit or the first use copies arrays and tensors into
    the gadget's own memory; do not change them before. With `mapped` the rows remain in a file
    instead, as in HostTable.open(file, "mapped").

    Args:
        fileName: A .npy or .safetensors file, a NumPy array or a tensor on any device.
        CPUPinn: True keeps the rows in host memory that the GPU can access. False keeps the rows on
            the GPU, or without a GPU in ordinary memory.
        field: The name of the tensor in a .safetensors file with several tensors.
        mapped: True maps the file read-only: no copy, and one page cache for all processes.
            CPUPinn then has no effect, and insertData raises ValueError. A file that cannot be
            mapped is loaded instead.

    Raises:
        TypeError: `mapped` is True and `fileName` is not a file.
        ValueError, OSError: The file cannot be read or has another format.

    Example:
        >>> gadget = DataGadget(np.arange(12.0).reshape(4, 3), CPUPinn=True)
        >>> gadget.insertData(torch.ones(1, 3, dtype=torch.float64), [2])
        >>> gadget.getData([2, 0]).tolist()
        [[1.0, 1.0, 1.0], [0.0, 1.0, 2.0]]
    """

    def _start(self, fileName: Source, *, field: str | None = None, mapped: bool = False) -> None:
        if mapped and isinstance(fileName, np.ndarray | Tensor):
            raise TypeError(f"mapped=True requires a file name, got {type(fileName).__name__}")
        self._is_mapped = mapped
        super()._start(fileName, field=field)

    def _read_file(self, path: str) -> None:
        if not self._is_mapped:
            super()._read_file(path)
            return
        table = HostTable.open(path, "mapped", field=self._field)
        rows = _only({name: table[name] for name in table.fields})
        self._store(Stored(table, {"weight": rows}))


class GPUPytorchDataGadget(_TorchGadget, place=families.with_variable):
    """DataGadget with the rows on the GPU, if there is one, and torch's file format."""


class CPUPytorchDataGadget(_TorchGadget, place=families.in_host_memory):
    """DataGadget with the rows in host memory, and torch's file format."""


class PytorchDataGadget(_TorchGadget, place=families.of_kind):
    """DataGadget with the rows' place chosen by deviceType and pinType, and torch's file format."""


class DataGadgetMM(MappedFiles, _CupyGadget, place=partial(families.in_file, "")):
    """DataGadget with rows in their memory-mapped file: insertData changes the file.

    No process may truncate the file while the gadget lives. The system ends a process (SIGBUS),
    without an exception, that reads or writes rows behind the end of the file. Write a new file
    beside the old one and rename the new one instead.
    """

    # The argument names are those of 2019.
    def getData(
        self, retrievedPosIndexes: Index, retrievedNegIndexes: Indexes | None = None
    ) -> Tensor:
        """DataGadget.getData with the argument names of 2019.

        Args:
            retrievedPosIndexes: Any NumPy index; see DataGadget.getData.
            retrievedNegIndexes: More ids.

        Returns:
            The result of NumPy.

        Raises:
            IndexError: See DataGadget.getData.
        """
        return super().getData(retrievedPosIndexes, retrievedNegIndexes)

    def _start(self, fileName: Source, *, field: str | None = None) -> None:
        if isinstance(fileName, np.ndarray | Tensor):
            raise TypeError("fileName: DataGadgetMM requires a file; use DataGadget for arrays")
        super()._start(fileName, field=field)

    @property
    def table(self) -> NoReturn:
        """Not available, because the rows remain in their file.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("DataGadgetMM has no HostTable. getCupyMM() returns the mapped rows.")

    def _read_file(self, path: str) -> None:
        with open_fields(path, field=self._field) as stored:
            array = _only(stored)
        data = torch.empty(array.shape, dtype=array.dtype)
        if array.nbytes:  # an empty range cannot be mapped
            mapped = np.memmap(path, np.uint8, "r+", offset=array.offset, shape=(array.nbytes,))
            data = torch.from_numpy(mapped).view(array.dtype).view(array.shape)
        self._mapped_file = os.path.realpath(path)
        self._store(Stored(None, {"weight": data}))

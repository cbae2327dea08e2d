"""DataGadget: rows of a file or an array, brought to where they are trained on."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from speedtorch.files.file_format import listed
from speedtorch.files.table_files import open_fields
from speedtorch.legacy import families
from speedtorch.legacy.batch_ids import Indexes, flat_index
from speedtorch.legacy.numpy_index import Index, parts_of, put_parts, row_ids
from speedtorch.legacy.switcher import OneField, Stored, gathered
from speedtorch.legacy.switcher_files import (
    CupyFiles,
    MappedFiles,
    TorchFiles,
    file_name,
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
    """What the DataGadget of every family does."""

    _how_to_start = "gadgetInit() first"

    def _start(self, fileName: Source, *, field: str | None = None) -> None:
        """Checks the source; its rows are read by gadgetInit or at their first use."""
        self._field = field
        self._data: Tensor | None = None
        self.fileName: str | None = None
        if isinstance(fileName, np.ndarray | Tensor):
            self._data = _as_tensor(fileName)
            if self._data.dim() == 0:
                raise ValueError("fileName: the data has no dimensions; it needs at least one")
        else:
            self.fileName = os.fspath(fileName)
            with open_fields(self.fileName) as stored:
                _choose(stored, field)

    def gadgetInit(self) -> None:
        """Reads the rows into the gadget's own memory; called at first use if not before."""
        if self._stored is None and self.fileName is not None:
            self._read_file(self.fileName)
        elif self._stored is None and self._data is not None:
            self._copy_in(self._data)
            self._data = None  # so that the rows are not held twice

    def _copy_in(self, data: Tensor) -> None:
        self._fill(data.shape, data.dtype, lambda rows: rows.copy_(data))

    def _read_file(self, path: str) -> None:
        with open_fields(path) as stored:
            chosen = _choose(stored, self._field)
            self._fill(chosen.shape, chosen.dtype, chosen.read_into)

    def _fill(
        self, shape: tuple[int, ...], dtype: torch.dtype, fill: Callable[[Tensor], object]
    ) -> None:
        """Makes a table, which replaces the old one once it is filled."""
        fields = {"weight": (tuple(shape[1:]), dtype)}
        table = self._place.make_table(shape[0], fields, families.default_device())
        fill(table["weight"])
        self._stored = Stored(table, {"weight": table["weight"]})

    def _rows(self) -> dict[str, Tensor]:
        self.gadgetInit()
        return super()._rows()

    def getData(self, indexes: Index, retrievedNegIndexes: Indexes | None = None) -> Tensor:
        """Brings `data[indexes]` to the GPU, or on a machine without one to the CPU.

        Args:
            indexes: what NumPy takes: ids of any shape (array, list, or a tensor on either device)
                that from -1 down count from the end, a slice, a mask, or a tuple of these for
                several axes, such as (rows, columns). Ids, slices and masks of whole rows are fast.
            retrievedNegIndexes: more ids; the result is then `[ids, ...]`, those of `indexes`
                first, in order.

        Returns:
            What NumPy gives: of ids `[*indexes.shape, ...]`, ready to be a variable's data.

        Raises:
            IndexError: an id out of range.
        """
        device = families.default_device()
        field = self._rows()["weight"]
        ids = self._ids_of(indexes, retrievedNegIndexes, device)
        if ids is None:
            self._settle()
            return parts_of(field, indexes).to(device)
        rows = gathered(field, ids.reshape(-1), device)
        return rows.view(*ids.shape, *field.shape[1:])

    def _ids_of(
        self, indexes: Index, negatives: Indexes | None, device: torch.device
    ) -> Tensor | None:
        """The ids of whole rows, in the shape of the result; None for parts of rows."""
        total = self._rows()["weight"].shape[0]
        if negatives is not None:
            indexes = flat_index(cast(Indexes, indexes), negatives, device)
        return row_ids(indexes, total, device)

    def insertData(
        self,
        dataObject: Tensor | npt.NDArray[Any],
        indexes: Index,
        retrievedNegIndexes: Indexes | None = None,
    ) -> None:
        """Writes `data[indexes] = dataObject`; of an id named several times the last row stays.

        Args:
            dataObject: what getData gives for these indexes, or what NumPy would repeat to that
                shape; on either device. Another dtype is cast to that of the rows here, as NumPy
                casts what is assigned: an imaginary part is dropped with torch's warning.
            indexes: as for getData.
            retrievedNegIndexes: as for getData.

        Raises:
            IndexError: an id out of range; nothing is changed.
            ValueError: another number of rows, or another shape; nothing is changed.
        """
        field = self._rows()["weight"]
        if self._stored is not None and self._stored.table is not None:
            self._stored.table.check_writable("insertData")
        rows = _as_tensor(dataObject)
        if field.is_cuda:
            rows = rows.to(field.device, non_blocking=True)
        ids = self._ids_of(indexes, retrievedNegIndexes, rows.device)
        if ids is None:
            self._settle()
            put_parts(field, indexes, rows.to(field.dtype))
            return
        shape = (*ids.shape, *field.shape[1:])
        try:
            every = rows.expand(shape)
        except RuntimeError as error:
            raise ValueError(
                f"insertData got {list(rows.shape)} for {ids.numel()} ids; rows here are"
                f" {list(field.shape[1:])}"
            ) from error
        every = every.to(field.dtype).reshape(ids.numel(), *field.shape[1:])
        pinned_scatter(field, ids.reshape(-1), every.contiguous())


def _as_tensor(data: Tensor | npt.ArrayLike) -> Tensor:
    """The data as a tensor; shared where torch can share it."""
    if isinstance(data, Tensor):
        return data.detach()
    array = np.asarray(data)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    # A copy only of what torch cannot share: read-only arrays and backward strides.
    shared = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return torch.from_numpy(array if shared else array.copy())


def _choose(stored: Mapping[str, _Field], field: str | None) -> _Field:
    """The one tensor of a file that is meant."""
    if field is None and len(stored) == 1:
        return next(iter(stored.values()))
    if field is None or field not in stored:
        raise ValueError(f"field={field!r}: the file holds {listed(stored)}; choose one of them")
    return stored[field]


class _CupyGadget(CupyFiles, GadgetSwitcher):
    def loadCupy(self, loadFileName: str | os.PathLike[str]) -> None:
        """Loads other data, of any shape and dtype, from a .npy or .safetensors file.

        Args:
            loadFileName: names without either ending get `.npy` added.

        Raises:
            ValueError: the file is not such a file; the gadget is as it was.
        """
        self._read_file(file_name(loadFileName))


class _TorchGadget(TorchFiles, GadgetSwitcher):
    def loadTorch(self, loadFileName: str | os.PathLike[str]) -> None:
        """Loads other data, of any shape and dtype, with torch.load(weights_only=True).

        Args:
            loadFileName: what saveTorch wrote.

        Raises:
            ValueError: the file does not hold one tensor; the gadget is as it was.
        """
        content = read_tensors(loadFileName)
        if set(content) != {"weight"}:
            raise ValueError(
                f"{os.fspath(loadFileName)} holds {sorted(content)}; expected a tensor"
            )
        self._copy_in(content["weight"])


class DataGadget(_CupyGadget, place=families.host_or_variable):
    """Holds data of any number of dimensions and brings rows of it to the GPU.

    After SpeedTorch's class of 2019. The rows are the gadget's own: arrays and tensors are copied
    by gadgetInit or at the first use; leave them as they are until then. With `mapped` they are
    those of a file instead, as HostTable.open(file, "mapped") has them.

    Args:
        fileName: a .npy or .safetensors file, a NumPy array or a tensor on any device.
        CPUPinn: True keeps the rows in host memory that the GPU reaches; False on the GPU, or
            without one in ordinary memory.
        field: which tensor of a .safetensors file that holds several.
        mapped: True maps the file, to be read: no copy, and one page cache for all processes.
            CPUPinn then has no effect, and insertData raises ValueError.

    Raises:
        TypeError: `mapped`, and it is no file.
        ValueError, OSError: the file cannot be read, or is no such file.

    Example:
        >>> gadget = DataGadget(np.arange(12.0).reshape(4, 3), CPUPinn=True)
        >>> gadget.insertData(torch.ones(1, 3, dtype=torch.float64), [2])
        >>> gadget.getData([2, 0]).tolist()
        [[1.0, 1.0, 1.0], [0.0, 1.0, 2.0]]
    """

    def _start(self, fileName: Source, *, field: str | None = None, mapped: bool = False) -> None:
        if mapped and isinstance(fileName, np.ndarray | Tensor):
            raise TypeError("mapped=True maps a file; the rows of an array or tensor are copied")
        self._is_mapped = mapped
        super()._start(fileName, field=field)

    def _read_file(self, path: str) -> None:
        if not self._is_mapped:
            super()._read_file(path)
            return
        table = HostTable.open(path, "mapped")
        rows = _choose({name: table[name] for name in table.fields}, self._field)
        self._stored = Stored(table, {"weight": rows})


class GPUPytorchDataGadget(_TorchGadget, place=families.with_variable):
    """DataGadget with the rows on the GPU, if there is one, and torch's files."""


class CPUPytorchDataGadget(_TorchGadget, place=families.in_host_memory):
    """DataGadget with the rows in host memory, and torch's files."""


class PytorchDataGadget(_TorchGadget, place=families.of_kind):
    """DataGadget with the rows where deviceType and pinType say, and torch's files."""


class DataGadgetMM(MappedFiles, _CupyGadget, place=partial(families.in_file, "")):
    """DataGadget whose rows stay in their file, mapped into memory: inserting changes the file.

    The file must not be shortened while the gadget lives, by this process or another: there is
    no memory behind rows that the file lacks, and the system ends a process that reads or writes
    them (SIGBUS), without an exception. Write a new file beside it and rename that instead.
    """

    # The names of 2019.
    def getData(
        self, retrievedPosIndexes: Index, retrievedNegIndexes: Indexes | None = None
    ) -> Tensor:
        """As DataGadget's, whose first argument is called otherwise.

        Args:
            retrievedPosIndexes: what NumPy takes; see DataGadget.getData.
            retrievedNegIndexes: more ids.

        Returns:
            What NumPy gives.

        Raises:
            IndexError: an id out of range.
        """
        return super().getData(retrievedPosIndexes, retrievedNegIndexes)

    def saveCupy(self, saveFileName: str | os.PathLike[str]) -> None:
        """As DataGadget's, to another file: the gadget's own holds every insert already.

        Raises:
            ValueError: it is the gadget's own file, or the format does not know the dtype.
        """
        own, target = self.fileName, file_name(saveFileName)
        if own is not None and os.path.exists(target) and os.path.samefile(own, target):
            raise ValueError(f"{target} is the file that this gadget maps: it is saved already")
        super().saveCupy(saveFileName)

    def _start(self, fileName: Source, *, field: str | None = None) -> None:
        if isinstance(fileName, np.ndarray | Tensor):
            raise TypeError("fileName: DataGadgetMM maps a file; DataGadget takes arrays")
        super()._start(fileName, field=field)

    @property
    def table(self) -> NoReturn:
        """There is none: the rows stay in their file.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("DataGadgetMM maps its file and has no HostTable: see getCupyMM()")

    def _read_file(self, path: str) -> None:
        with open_fields(path) as stored:
            array = _choose(stored, self._field)
        data = torch.empty(array.shape, dtype=array.dtype)
        if array.nbytes:  # an empty range cannot be mapped
            mapped = np.memmap(path, np.uint8, "r+", offset=array.offset, shape=(array.nbytes,))
            data = torch.from_numpy(mapped).view(array.dtype).view(array.shape)
        self._stored = Stored(None, {"weight": data})

"""The files of the SpeedTorch classes: .npy and .safetensors, or the format of torch.save.

There is a mixin for the families that used CuPy in 2019 and one for those that used torch.
`loadTorch` is the only code in this package that reads a pickled file, and accepts only plain
tensors.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from speedtorch.files.new_files import replace_files
from speedtorch.files.table_files import FORMATS, StoredField, open_fields, save_fields
from speedtorch.legacy.families import Fields
from speedtorch.legacy.switcher import Switcher

__all__ = ["CupyFiles", "MappedFiles", "TorchFiles", "file_name", "read_into"]
__all__ += ["read_tensors"]


class CupyFiles(Switcher):
    """Files of the families that used CuPy: .npy and .safetensors, never pickle."""

    _mapped_file: str | None = None
    """The real path of the file whose mapping is the rows (DataGadgetMM)."""

    def getCupyVar(self) -> Any:
        """The rows themselves: a torch tensor `[rows, ...]`, or a dict of them by state name.

        `cupy.asarray` wraps tensors on a GPU without a copy. This package does not need CuPy.
        """
        return self._variable()

    CUPYcorpus = property(getCupyVar)

    def saveCupy(self, saveFileName: str | os.PathLike[str]) -> None:
        """Saves all rows to `*.npy` or `*.safetensors`; a complete file then replaces the old one.

        Args:
            saveFileName: The file name; `.npy` is appended to other names, as np.save does. Several
                fields are saved to one .safetensors file, or to one `name.field.npy` each.

        Raises:
            ValueError: The format does not support the dtype (bfloat16 and float8 in .npy). Or the
                optimizer has no state. Or the file is the one that a DataGadgetMM maps, which
                contains all inserts already.
        """
        self._settle()
        save_fields(file_name(saveFileName), self._to_save(), self._mapped_file)

    def loadCupy(self, loadFileName: str | os.PathLike[str]) -> None:
        """Loads all rows from a file of `saveCupy` or np.save with exactly these fields.

        Args:
            loadFileName: `*.npy` or `*.safetensors`; `.npy` is appended to other names.

        Raises:
            ValueError: Names, shapes or dtypes do not match; nothing has changed.
        """
        path = file_name(loadFileName)
        with open_fields(path, self._layout()) as stored:
            _load(self, path, stored)


class MappedFiles(CupyFiles):
    """Files of the families whose table is a memory-mapped file.

    CUPYmemmap is the mapped rows; for an OptimizerFactory, a list in the order of optVarList.
    """

    CUPYmemmap = property(Switcher._listed_variable)
    getCupyMM = CupyFiles.getCupyVar


class TorchFiles(Switcher):
    """Files of the families that used torch.

    pytorchGPUVar and pytorchCPUVar are the rows themselves; for an OptimizerFactory, a list in the
    order of optVarList.
    """

    pytorchGPUVar = pytorchCPUVar = property(Switcher._listed_variable)

    def getTorchVar(self) -> Any:
        """The rows themselves: a torch tensor `[rows, ...]`, or a dict of them by state name."""
        return self._variable()

    def saveTorch(self, saveFileName: str | os.PathLike[str]) -> None:
        """Saves all rows with torch.save; the old file remains until the new one is complete.

        Args:
            saveFileName: Any file name.
        """
        self._settle()
        content = {name: _in_own_storage(field) for name, field in self._to_save().items()}
        with replace_files([saveFileName]) as (file,):
            whole = content["weight"] if set(content) == {"weight"} else content
            torch.save(whole, file)  # type: ignore[arg-type]

    def loadTorch(self, loadFileName: str | os.PathLike[str]) -> None:
        """Loads all rows with torch.load(weights_only=True).

        Args:
            loadFileName: A file of saveTorch.

        Raises:
            ValueError: Names, shapes or dtypes do not match; nothing has changed.
        """
        _load(self, os.fspath(loadFileName), read_tensors(loadFileName))


def read_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Reads the tensors of a saveTorch file to the CPU; a single one has the name "weight"."""
    name = os.fspath(path)
    try:
        with open(path, "rb") as file:  # torch.load reads the path *.safetensors as that format
            content = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch.load raises many types for files in other formats
        raise ValueError(
            f"{name} cannot be read as a file of saveTorch: torch.load(weights_only=True) raised"
            f" {type(error).__name__}"
        ) from error
    if isinstance(content, Tensor):
        content = {"weight": content}
    if not isinstance(content, dict) or not all(
        isinstance(value, Tensor) and value.layout == torch.strided and value.dim() > 0
        for value in content.values()
    ):
        raise ValueError(
            f"{name} must contain a dense tensor of at least one dimension or a dict of such"
            f" tensors, as saveTorch writes them, got a {type(content).__name__}"
        )
    return content


def read_into(source: Tensor | StoredField, rows: Tensor) -> None:
    """Copies a tensor, or reads a field of a file, into rows of the same shape and dtype."""
    if isinstance(source, Tensor):
        rows.copy_(source)
    else:
        source.read_into(rows)


def _load(switcher: Switcher, path: str, stored: Mapping[str, Tensor | StoredField]) -> None:
    """Reads all fields of a file; raises ValueError unless they are exactly the switcher's."""
    has = {name: (tuple(field.shape), field.dtype) for name, field in stored.items()}
    if has != (wanted := switcher._layout()):
        raise ValueError(f"{path} must contain {_listed(wanted)}, got {_listed(has)}")
    switcher._settle()  # before a table is created: an error leaves the switcher unchanged
    content = switcher._to_load()
    for name, rows in content.items():
        read_into(stored[name], rows)
    switcher._loaded(content)


def _listed(layout: Fields) -> str:
    named = [f"{name} {list(shape)} {str(dtype)[6:]}" for name, (shape, dtype) in layout.items()]
    return ", ".join(sorted(named)) or "nothing"


def _in_own_storage(field: Tensor) -> Tensor:
    """The field in its own storage, because torch.save writes whole storages."""
    storage_bytes = field.untyped_storage().nbytes()
    if field.is_contiguous() and storage_bytes == field.nbytes and not field.is_cuda:
        return field.detach()
    return torch.empty(field.shape, dtype=field.dtype).copy_(field.detach())


def file_name(name: str | os.PathLike[str]) -> str:
    """Appends `.npy` to a name without a known format, as np.save does."""
    path = os.fspath(name)
    return path if path.endswith(tuple(FORMATS)) else f"{path}.npy"

"""ModelFactory: all rows of a model's variable, whose weight holds those of one batch only.

Five families with one implementation; table_place.py says what they differ in.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from speedtorch.legacy.model_switcher import ModelSwitcher, RowShape, Variable
from speedtorch.legacy.switcher_files import CupyFiles, MappedFiles, TorchFiles
from speedtorch.legacy.table_place import (
    Datatype,
    TablePlace,
    host_or_variable,
    in_file,
    of_kind,
)
from speedtorch.table.host_table import HostTable

__all__ = [
    "CPUPytorchModelFactory",
    "GPUPytorchModelFactory",
    "ModelFactory",
    "ModelFactoryMM",
    "PytorchModelFactory",
]


class ModelFactory(CupyFiles, ModelSwitcher):
    """Keeps all rows of a variable; the model holds and trains those of one batch.

    After SpeedTorch's class of 2019, without CuPy, duplicates that get lost, and synchronisation.

    Args:
        model_variable: the module whose weight is trained, such as nn.Embedding, or a Parameter.
        total_classes: rows of the whole table.
        embed_dimension: columns of a row, or its shape.
        datatype: the variable's dtype, as a NumPy-style name or a torch dtype.
        CPUPinn: True keeps the table in host memory that the GPU reaches; False with the variable.
        sumDuplicates: add up the changes of an id's occurrences instead of keeping the last one.
        table: a HostTable with a field "weight", to share its records, and each batch's plan, with
            OptimizerFactory.

    Raises:
        TypeError, ValueError: something does not fit; the message says what would.

    Example:
        >>> layer = torch.nn.Embedding(3, 2)
        >>> switcher = ModelFactory(layer, total_classes=1000, embed_dimension=2, CPUPinn=True)
        >>> switcher.zerosInit()
        >>> switcher.beforeForwardPass([5, 999, 5])
        >>> with torch.no_grad():
        ...     _ = layer.weight.add_(torch.tensor([[1.0], [2.0], [3.0]]))
        >>> switcher.afterOptimizerStep([5, 999, 5])
        >>> switcher.getNumpyVersion()[[5, 999]].tolist()
        [[3.0, 3.0], [2.0, 2.0]]
    """

    def __init__(
        self,
        model_variable: Variable,
        total_classes: int,
        embed_dimension: RowShape,
        datatype: Datatype = "float32",
        CPUPinn: bool = False,
        *,
        sumDuplicates: bool = False,
        table: HostTable | None = None,
    ) -> None:
        """See the class."""
        place = host_or_variable(CPUPinn)
        row = (model_variable, total_classes, embed_dimension, datatype)
        super().__init__(place, *row, sumDuplicates, table)


class OneMemoryModelFactory(TorchFiles, ModelSwitcher):
    """ModelFactory with the table in one kind of memory, and torch's files."""

    _memory: ClassVar[str]

    def __init__(
        self,
        model_variable: Variable,
        total_classes: int,
        embed_dimension: RowShape,
        datatype: Datatype = torch.float32,
        *,
        sumDuplicates: bool = False,
        table: HostTable | None = None,
    ) -> None:
        """See ModelFactory."""
        row = (model_variable, total_classes, embed_dimension, datatype)
        super().__init__(TablePlace(self._memory), *row, sumDuplicates, table)


class GPUPytorchModelFactory(OneMemoryModelFactory):
    """ModelFactory with the table on the variable's device, and torch's files."""

    _memory = "variable"


class CPUPytorchModelFactory(OneMemoryModelFactory):
    """ModelFactory with the table in host memory, and torch's files."""

    _memory = "auto"


class PytorchModelFactory(TorchFiles, ModelSwitcher):
    """ModelFactory with the table where deviceType and pinType say, and torch's files."""

    def __init__(
        self,
        model_variable: Variable,
        total_classes: int,
        embed_dimension: RowShape,
        datatype: Datatype = torch.float32,
        deviceType: str | torch.device = "cuda",
        pinType: bool = False,
        *,
        sumDuplicates: bool = False,
        table: HostTable | None = None,
    ) -> None:
        """See ModelFactory."""
        row = (model_variable, total_classes, embed_dimension, datatype)
        super().__init__(of_kind(deviceType, pinType), *row, sumDuplicates, table)


class ModelFactoryMM(MappedFiles, ModelSwitcher):
    """ModelFactory with the table in a memory-mapped file, `<diskname><number>.memmap`."""

    def __init__(
        self,
        model_variable: Variable,
        total_classes: int,
        embed_dimension: RowShape,
        diskname: str = "variable",
        datatype: Datatype = "float32",
        CPUPinn: bool = False,
        *,
        sumDuplicates: bool = False,
        table: HostTable | None = None,
    ) -> None:
        """See ModelFactory."""
        row = (model_variable, total_classes, embed_dimension, datatype)
        super().__init__(in_file(diskname, CPUPinn), *row, sumDuplicates, table)

"""OptimizerFactory: an optimizer's state of all rows, while the optimizer holds that of one batch.

Five families with one implementation; table_place.py says what they differ in.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from speedtorch.legacy.model_switcher import RowShape
from speedtorch.legacy.optimizer_switcher import OptimizerSwitcher
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
    "CPUPytorchOptimizerFactory",
    "GPUPytorchOptimizerFactory",
    "OptimizerFactory",
    "OptimizerFactoryMM",
    "PytorchOptimizerFactory",
]


class OptimizerFactory(CupyFiles, OptimizerSwitcher):
    """Keeps the optimizer's state of all rows; the optimizer holds that of one batch.

    After SpeedTorch's class of 2019. Any optimizer works that treats rows separately, also those
    that torch does not define: SGD, SparseAdam, Adam, AdamW, Adamax, Adadelta, Adagrad, RMSprop,
    Rprop, ASGD, NAdam, RAdam and others. Other variables and groups of the optimizer stay alone.

    Args:
        given_optimizer: the optimizer, built with the model's parameters.
        total_classes: rows of the whole table.
        embed_dimension: columns of a row, or its shape.
        model: the model that has the variable.
        variable_name: the variable's name in the model, such as "u_embeddings".
        dtype: the variable's dtype, as a NumPy-style name or a torch dtype.
        CPUPinn: True keeps the table in host memory that the GPU reaches; False with the variable.
        table: a HostTable with a field for each state, to share its records, and each batch's plan,
            with ModelFactory.

    Raises:
        ValueError: something does not fit, or the optimizer does not treat rows separately.

    Example:
        >>> model = torch.nn.ModuleDict({"u": torch.nn.Embedding(2, 3)})
        >>> optimizer = torch.optim.Adamax(model.parameters())
        >>> switcher = OptimizerFactory(optimizer, 1000, 3, model, "u", CPUPinn=True)
        >>> switcher.optInit()
        >>> switcher.beforeForwardPass([7, 999])
        >>> model["u"].weight.sum().backward()
        >>> optimizer.step()
        >>> switcher.afterOptimizerStep([7, 999])
        >>> switcher.getNumpyVersion()["exp_inf"][[6, 7]].tolist()
        [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    """

    def __init__(
        self,
        given_optimizer: Optimizer,
        total_classes: int,
        embed_dimension: RowShape,
        model: nn.Module,
        variable_name: str,
        dtype: Datatype = "float32",
        CPUPinn: bool = False,
        *,
        table: HostTable | None = None,
    ) -> None:
        """See the class."""
        row = (total_classes, embed_dimension, model, variable_name, dtype)
        super().__init__(host_or_variable(CPUPinn), given_optimizer, *row, table)


class OneMemoryOptimizerFactory(TorchFiles, OptimizerSwitcher):
    """OptimizerFactory with the table in one kind of memory, and torch's files."""

    _memory: ClassVar[str]

    def __init__(
        self,
        given_optimizer: Optimizer,
        total_classes: int,
        embed_dimension: RowShape,
        model: nn.Module,
        variable_name: str,
        dtype: Datatype = torch.float32,
        *,
        table: HostTable | None = None,
    ) -> None:
        """See OptimizerFactory."""
        row = (total_classes, embed_dimension, model, variable_name, dtype)
        super().__init__(TablePlace(self._memory), given_optimizer, *row, table)


class GPUPytorchOptimizerFactory(OneMemoryOptimizerFactory):
    """OptimizerFactory with the table on the variable's device, and torch's files."""

    _memory = "variable"


class CPUPytorchOptimizerFactory(OneMemoryOptimizerFactory):
    """OptimizerFactory with the table in host memory, and torch's files."""

    _memory = "auto"


class PytorchOptimizerFactory(TorchFiles, OptimizerSwitcher):
    """OptimizerFactory with the table where deviceType and pinType say, and torch's files."""

    def __init__(
        self,
        given_optimizer: Optimizer,
        total_classes: int,
        embed_dimension: RowShape,
        model: nn.Module,
        variable_name: str,
        dtype: Datatype = torch.float32,
        deviceType: str | torch.device = "cuda",
        pinType: bool = False,
        *,
        table: HostTable | None = None,
    ) -> None:
        """See OptimizerFactory."""
        row = (total_classes, embed_dimension, model, variable_name, dtype)
        super().__init__(of_kind(deviceType, pinType), given_optimizer, *row, table)


class OptimizerFactoryMM(MappedFiles, OptimizerSwitcher):
    """OptimizerFactory with the table in a memory-mapped file, `<variable><optimizer>...`."""

    def __init__(
        self,
        given_optimizer: Optimizer,
        total_classes: int,
        embed_dimension: RowShape,
        model: nn.Module,
        variable_name: str,
        dtype: Datatype = "float32",
        CPUPinn: bool = False,
        *,
        table: HostTable | None = None,
    ) -> None:
        """See OptimizerFactory."""
        name = f"{variable_name}{type(given_optimizer).__name__}"
        row = (total_classes, embed_dimension, model, variable_name, dtype)
        super().__init__(in_file(name, CPUPinn), given_optimizer, *row, table)

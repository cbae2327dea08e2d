"""ModelFactory: stores all rows of a variable, whose weight contains only the rows of one batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from speedtorch.legacy import families
from speedtorch.legacy.batch_exchange import BatchExchange, Rows, RowShape
from speedtorch.legacy.families import Datatype
from speedtorch.legacy.plan_memo import Plan
from speedtorch.legacy.switcher import OneField, gathered
from speedtorch.legacy.switcher_files import CupyFiles, MappedFiles, TorchFiles
from speedtorch.ops.functions import pinned_gather, pinned_scatter, plan_rows
from speedtorch.step.parameter_view import replace_rows
from speedtorch.table.host_table import HostTable

__all__ = [
    "CPUPytorchModelFactory",
    "GPUPytorchModelFactory",
    "ModelFactory",
    "ModelFactoryMM",
    "PytorchModelFactory",
]

Variable = nn.Module | nn.Parameter


class ModelSwitcher(BatchExchange, OneField):
    """The common base of the ModelFactory classes."""

    _how_to_start = (
        "zerosInit(), uniformDistributionInit(low, high), normalDistributionInit(mean, stdDev),"
        " customInit(initFunction, *args) or a load method first"
    )

    def _start(
        self,
        model_variable: Variable,
        total_classes: int,
        embed_dimension: RowShape,
        datatype: Datatype = torch.float32,
        *,
        sumDuplicates: bool = False,
        table: HostTable | None = None,
    ) -> None:
        """Checks all arguments that can be checked before the table is created."""
        self.model_variable = model_variable
        self.sumDuplicates = sumDuplicates
        self._before: Tensor | None = None  # with sumDuplicates: the rows before their training
        self._fit_rows(total_classes, embed_dimension, datatype, "datatype", "model_variable")
        if table is not None:
            self._check_table(table)
            self._store(self._all_of(table))

    def _parameter(self) -> Tensor:
        variable = self.model_variable
        parameter = variable if isinstance(variable, Tensor) else getattr(variable, "weight", None)
        if not isinstance(parameter, Tensor):
            raise TypeError(
                "model_variable: expected a module with a weight, such as nn.Embedding, or an"
                f" nn.Parameter, got {type(variable).__name__}"
            )
        return parameter

    def _ensure_table(self) -> HostTable:
        self._store(self._stored_or_new())
        return self.table

    def zerosInit(self) -> None:
        """Sets all rows to zero."""
        self._ensure_table().zeros_("weight")

    def uniformDistributionInit(self, low: float, high: float) -> None:
        """Draws all rows from [low, high). torch.manual_seed makes the result reproducible."""
        self._ensure_table().uniform_(low, high, field="weight")

    def normalDistributionInit(self, mean: float, stdDev: float) -> None:
        """Draws all rows from a normal distribution. torch.manual_seed makes it reproducible."""
        self._ensure_table().normal_(mean, stdDev, field="weight")

    def customInit(self, initFunction: Callable[..., object], *args: Any) -> None:
        """Calls `initFunction(rows, *args)`, such as a function of torch.nn.init, on all rows."""
        self._ensure_table().init_(initFunction, *args, field="weight")

    def variableTransformer(
        self, batchSize: int, posPerBatch: int, negPerBatch: int | None = None
    ) -> npt.NDArray[np.int64] | tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns the model's inputs in place of ids: the positions of the ids' rows.

        Args:
            batchSize: Number of examples.
            posPerBatch: Positive ids per example.
            negPerBatch: Negative ids per example, if any.

        Returns:
            Positions `[batchSize, posPerBatch]`. With negatives, also the positions
            `[batchSize, negPerBatch]` after them.
        """
        end = batchSize * posPerBatch
        positives = np.arange(end).reshape(batchSize, posPerBatch)
        if negPerBatch is None:
            return positives
        negatives = np.arange(end, end + batchSize * negPerBatch)
        return positives, negatives.reshape(batchSize, negPerBatch)

    def _set_rows(self, rows: Rows) -> None:
        before = rows["weight"].clone() if self.sumDuplicates else None
        self._commit(partial(self._install, self._parameter(), rows["weight"], before))

    def _install(self, parameter: Tensor, rows: Tensor, before: Tensor | None) -> None:
        replace_rows(parameter, rows)
        self._before = before

    def _trained_rows(self, name: str) -> tuple[Tensor, str]:
        return self._parameter(), "the variable"

    def _rows_to_write(self, fields: Rows, index: Tensor, rows: Rows, plan: Plan | None) -> Rows:
        if not self.sumDuplicates:
            return rows
        # Compute, at the last place of each id, the row after all changes of the id. Writing these
        # rows can be repeated after an exception; adding changes to the table cannot.
        weight = rows["weight"]
        if self._before is None or self._before.shape != weight.shape:
            raise RuntimeError(
                "afterOptimizerStep: sumDuplicates=True requires beforeForwardPass with the same"
                " ids just before the step"
            )
        result = gathered(fields["weight"], index, weight.device, plan)
        _, inverse, order, offsets, _ = plan or plan_rows(index, self.total_classes)
        last = pinned_gather(order, pinned_gather(offsets, inverse + 1) - 1)
        pinned_scatter(result, last, weight - self._before, accumulate=True)
        return {"weight": result}

    def _write(self, index: Tensor, rows: Rows, plan: Plan | None) -> None:
        super()._write(index, rows, plan)
        self._before = None


class ModelFactory(CupyFiles, ModelSwitcher, place=families.host_or_variable, datatype="float32"):
    """Stores all rows of a variable; the model contains and trains the rows of one batch.

    Replaces SpeedTorch's class of 2019, without CuPy. With sumDuplicates, no change of a repeated
    id is lost.

    Args:
        model_variable: The module whose weight is trained, such as nn.Embedding, or a Parameter.
        total_classes: Number of rows of the whole table.
        embed_dimension: Number of columns of a row, or its shape.
        datatype: The variable's dtype, as a NumPy-style name or a torch dtype.
        CPUPinn: True keeps the table in host memory for the GPU; False on the variable's device.
        sumDuplicates: Add the changes of all occurrences of an id instead of keeping the last row.
        table: A HostTable with a field "weight". Sharing it with OptimizerFactory shares the
            records and the plan of each batch.

    Raises:
        TypeError, ValueError: An argument does not fit; the message states what would fit.

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


class GPUPytorchModelFactory(TorchFiles, ModelSwitcher, place=families.with_variable):
    """ModelFactory with the table on the variable's device, and torch's file format."""


class CPUPytorchModelFactory(TorchFiles, ModelSwitcher, place=families.in_host_memory):
    """ModelFactory with the table in host memory, and torch's file format."""


class PytorchModelFactory(TorchFiles, ModelSwitcher, place=families.of_kind):
    """ModelFactory with the place chosen by deviceType and pinType, and torch's file format."""


class ModelFactoryMM(
    MappedFiles, ModelSwitcher, place=families.in_file, diskname="variable", datatype="float32"
):
    """ModelFactory with the table in a memory-mapped file, `<diskname><number>.memmap`."""

"""BatchExchange: loads a batch's rows from a table before a step and writes them back after it."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial

import torch
from torch import Tensor

from speedtorch.legacy.batch_ids import Indexes, all_within, flat_index
from speedtorch.legacy.families import Datatype, as_dtype
from speedtorch.legacy.plan_memo import Plan, plans_of
from speedtorch.legacy.switcher import Switcher, gathered
from speedtorch.ops.functions import pinned_scatter
from speedtorch.ops.shapes import row_count, row_shape
from speedtorch.table.host_table import HostTable

__all__ = ["BatchExchange", "RowShape", "Rows", "check_type"]

RowShape = int | tuple[int, ...]
Rows = dict[str, Tensor]
"""The rows of every field by name."""


class BatchExchange(Switcher):
    """Exchanges the rows of each batch with the variable or optimizer that trains them.

    Ids have the forms of the 2019 classes: positives of any shape and optional negatives of any
    shape. Both are flattened, the positives first.
    """

    def _fit_rows(
        self, rows: int, embed_dimension: RowShape, dtype: Datatype, argument: str, variable: str
    ) -> None:
        """Sets the table's size and dtype. Raises ValueError unless rows fit the parameter."""
        self.total_classes = row_count(rows, "total_classes")
        self.embed_dimension = embed_dimension
        self._row_shape = row_shape(embed_dimension, "embed_dimension")
        self._dtype = as_dtype(dtype, argument)
        parameter = self._parameter()
        if parameter.dim() == 0 or parameter.shape[1:] != self._row_shape:
            raise ValueError(
                f"embed_dimension={embed_dimension} does not match the rows of {variable}, which"
                f" have the shape {list(parameter.shape[1:])}. Pass that shape, or build the model"
                " with rows of this size."
            )
        if parameter.dtype != self._dtype:
            raise ValueError(
                f"{argument}={str(self._dtype)[6:]!r} does not match {variable}, whose dtype is"
                f" {str(parameter.dtype)[6:]!r}. Pass that dtype, or convert the model first."
            )

    @abstractmethod
    def _parameter(self) -> Tensor:
        """The trained parameter."""

    def _device(self) -> torch.device:
        return self._parameter().device

    @abstractmethod
    def _set_rows(self, rows: Rows) -> None:
        """Installs these rows of every field for training; changes nothing after an exception."""

    @abstractmethod
    def _trained_rows(self, name: str) -> tuple[Tensor, str]:
        """The trained rows of a field, and a description of the object that has them."""

    def _rows_to_write(self, fields: Rows, index: Tensor, rows: Rows, plan: Plan | None) -> Rows:
        """The rows to write back for the trained `rows`."""
        return rows

    def beforeForwardPass(
        self, retrievedPosIndexes: Indexes, retrievedNegIndexes: Indexes | None = None
    ) -> None:
        """Loads the rows of a batch into the variable or optimizer, one row per id in order.

        Args:
            retrievedPosIndexes: Ids of any shape: a NumPy array, a list, or a tensor on any device.
            retrievedNegIndexes: More ids, whose rows follow.

        Raises:
            IndexError: An id is out of range; the loaded rows do not change. With ids on a GPU, a
                later call raises instead, and all loaded rows are zeros.
            RuntimeError: The table has not been created yet.
        """
        device, fields = self._device(), self._rows().items()
        index, plan = self._ids(retrievedPosIndexes, retrievedNegIndexes, device, step=0)
        self._set_rows({name: gathered(field, index, device, plan) for name, field in fields})

    def afterOptimizerStep(
        self, retrievedPosIndexes: Indexes, retrievedNegIndexes: Indexes | None = None
    ) -> None:
        """Writes the rows of a batch back to the table.

        For an id that occurs several times the last row wins. With ModelFactory's sumDuplicates the
        change of each occurrence is added, in order. Without sumDuplicates, ModelFactory writes the
        variable's rows even if beforeForwardPass was not called. After an exception you can repeat
        the call.

        Args:
            retrievedPosIndexes: The ids that beforeForwardPass received.
            retrievedNegIndexes: The ids that beforeForwardPass received.

        Raises:
            IndexError: An id is out of range; the table does not change. With ids on a GPU, a later
                call raises instead.
            ValueError: The numbers of ids and rows differ, or the variable has another dtype, row
                shape or GPU than the table.
            RuntimeError: The table has not been created yet. With an OptimizerFactory or
                sumDuplicates: beforeForwardPass was not called. With sumDuplicates also: an earlier
                call has added the changes and then raised, so that nothing is left to write.
        """
        device, fields = self._device(), self._rows()
        index, plan = self._ids(retrievedPosIndexes, retrievedNegIndexes, device, step=1)
        rows = {}
        for name, field in fields.items():
            trained, owner = self._trained_rows(name)
            _check_trained(index, trained, field, owner)
            rows[name] = trained.detach()
        # A repeated write has the same result. Ids may share memory that the caller reuses for the
        # next batch, so they are cloned, unless a GPU uses the plan in their place. The next
        # exchange does not write to the rows' memory.
        rows = self._rows_to_write(fields, index, rows, plan)
        rows = {name: values.contiguous() for name, values in rows.items()}
        total = next((len(field) for field in fields.values()), 0)
        if plan is None and index.is_cpu and rows and not all_within(index, total):
            self._write(index, rows, plan)  # the op raises
        ids = index.clone() if plan is None or index.is_cpu else index
        self._commit(partial(self._write, ids, rows, plan))

    def _ids(
        self, positives: Indexes, negatives: Indexes | None, device: torch.device, step: int
    ) -> tuple[Tensor, Plan | None]:
        """The flat ids of a batch, and their plan if the ops benefit from one.

        All factories of a table share the plan. `step` is 0 before a batch, 1 after it.
        """
        if self._stored is None or self._stored.table is None:
            return flat_index(positives, negatives, device), None
        return plans_of(self._stored.table).find(positives, negatives, device, id(self), step)

    def _write(self, index: Tensor, rows: Rows, plan: Plan | None) -> None:
        fields = self._open_fields()
        for name, values in rows.items():
            pinned_scatter(fields[name], index, values, plan=plan)

    def _check_table(self, table: HostTable) -> None:
        """Raises TypeError or ValueError unless a table has the required rows and fields."""
        check_type("table", table, HostTable)
        if len(table) != self.total_classes:
            raise ValueError(
                f"table must have total_classes={self.total_classes:,} rows, got {len(table):,}"
            )
        fields = self._row_fields()
        for name, (shape, dtype) in fields.items():
            if name not in table.fields:
                raise ValueError(
                    f"table must have the fields {', '.join(fields)}, got"
                    f" {', '.join(table.fields)}. Create it with HostTable(rows, dim, state=...)."
                )
            has = table[name]
            if tuple(has.shape[1:]) != shape or has.dtype != dtype:
                raise ValueError(
                    f"table: the field {name!r} must have rows {list(shape)} of {dtype}, got rows"
                    f" {list(has.shape[1:])} of {has.dtype}"
                )


def check_type(argument: str, value: object, kind: type) -> None:
    """Raises TypeError unless a value has a type; `argument` names the value."""
    if not isinstance(value, kind):
        found = type(value).__name__
        raise TypeError(f"{argument}: expected an instance of {kind.__name__}, got {found}")


def _check_trained(index: Tensor, rows: Tensor, field: Tensor, owner: str) -> None:
    """Raises ValueError unless the rows of a batch in `owner` fit a table's field."""
    if rows.shape[:1] != index.shape:
        raise ValueError(
            f"afterOptimizerStep: got {index.numel()} ids, but {owner} has"
            f" {rows.shape[0] if rows.dim() else 0} rows. Pass the ids that beforeForwardPass got."
        )
    on_one_device = field.is_cpu or field.device == rows.device
    if (rows.shape[1:], rows.dtype) != (field.shape[1:], field.dtype) or not on_one_device:
        raise ValueError(
            f"afterOptimizerStep: {owner} has rows {list(rows.shape[1:])} of {rows.dtype} on"
            f" {rows.device}, but the table has {list(field.shape[1:])} of {field.dtype} on"
            f" {field.device}. Convert or move the model before you create the factories."
        )

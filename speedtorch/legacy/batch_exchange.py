"""What the factories share: rows of a batch leave the table before a step and return after it."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial

import torch
from torch import Tensor

from speedtorch.legacy.batch_ids import Indexes, all_within, flat_index
from speedtorch.legacy.plan_memo import Plan, plans_of
from speedtorch.legacy.switcher import Switcher, gathered
from speedtorch.ops.functions import pinned_scatter
from speedtorch.table.host_table import HostTable

__all__ = ["BatchExchange", "RowShape", "Rows", "check_rows"]

RowShape = int | tuple[int, ...]
Rows = dict[str, Tensor]
"""Rows of every field by its name."""


class BatchExchange(Switcher):
    """Exchanges the rows of one batch after the other with what holds them while it trains.

    Ids arrive as the 2019 classes took them: positives of any shape and, if there are, negatives of
    any shape; both are flattened, the positives first.
    """

    embed_dimension: RowShape

    @abstractmethod
    def _parameter(self) -> Tensor:
        """The variable."""

    @abstractmethod
    def _hold(self, rows: Rows) -> None:
        """Makes what trains hold these rows of every field, or leaves it as it was."""

    @abstractmethod
    def _held(self, name: str) -> tuple[Tensor, str]:
        """A field's rows that are trained, and what holds them."""

    def _to_put(self, fields: Rows, index: Tensor, rows: Rows, plan: Plan | None) -> Rows:
        """What to write in place of rows that are held."""
        return rows

    def beforeForwardPass(
        self, retrievedPosIndexes: Indexes, retrievedNegIndexes: Indexes | None = None
    ) -> None:
        """Makes the variable, or the optimizer, hold the rows of a batch, one for each id in order.

        Args:
            retrievedPosIndexes: ids of any shape; NumPy, list, or a tensor on either device.
            retrievedNegIndexes: more of them, whose rows follow.

        Raises:
            IndexError: an id out of range; the rows held are as they were.
        """
        device = self._parameter().device
        index, plan = self._ids(retrievedPosIndexes, retrievedNegIndexes, device, step=0)
        fields = self._rows().items()
        self._hold({name: gathered(field, index, device, plan) for name, field in fields})

    def afterOptimizerStep(
        self, retrievedPosIndexes: Indexes, retrievedNegIndexes: Indexes | None = None
    ) -> None:
        """Puts the rows of a batch back into the table.

        Of an id that occurs several times the last row stays; with ModelFactory's sumDuplicates the
        change of each is added, in order. After an exception the call can be made again.

        Args:
            retrievedPosIndexes: what beforeForwardPass got.
            retrievedNegIndexes: what beforeForwardPass got.

        Raises:
            IndexError: an id out of range; the table is as it was.
            ValueError: another number of ids than there are rows.
            RuntimeError: no beforeForwardPass came before; with sumDuplicates also: the changes are
                added already, and an exception came after that.
        """
        device = self._parameter().device
        index, plan = self._ids(retrievedPosIndexes, retrievedNegIndexes, device, step=1)
        rows, fields = {}, self._rows()
        for name, field in fields.items():
            held, holder = self._held(name)
            _check_held(index, held, field, holder)
            rows[name] = held.detach()
        # Repeated, this writes the same rows to the same places: ids may lie in the caller's
        # memory, where the next batch's come, and are copied, unless a GPU takes the plan in their
        # place; the rows are in memory that the next exchange leaves alone.
        rows = self._to_put(fields, index, rows, plan)
        rows = {name: each.contiguous() for name, each in rows.items()}
        total = next((len(field) for field in fields.values()), 0)
        if plan is None and index.is_cpu and rows and not all_within(index, total):
            self._write(index, rows, plan)  # the op refuses
        ids = index.clone() if plan is None or index.is_cpu else index
        self._take(partial(self._write, ids, rows, plan))

    def _ids(
        self, positives: Indexes, negatives: Indexes | None, device: torch.device, step: int
    ) -> tuple[Tensor, Plan | None]:
        """The ids of a batch as one row of numbers, and their plan where the ops need one.

        All that share the table share the plan. `step` is 0 before a batch, 1 after it.
        """
        self._finish()
        if self._stored is None or self._stored.table is None:
            return flat_index(positives, negatives, device), None
        return plans_of(self._stored.table).find(positives, negatives, device, id(self), step)

    def _write(self, index: Tensor, rows: Rows, plan: Plan | None) -> None:
        fields = self._open_fields()
        for name, each in rows.items():
            pinned_scatter(fields[name], index, each, plan=plan)

    def _check_table(self, table: HostTable) -> None:
        """Raises ValueError unless a table has the rows and fields that are needed."""
        if len(table) != self.total_classes:
            raise ValueError(
                f"table: it has {len(table):,} rows, total_classes is {self.total_classes:,}"
            )
        fields = self._row_fields()
        for name, (shape, dtype) in fields.items():
            if name not in table.fields:
                raise ValueError(
                    f"table: it has no field {name!r}, only {', '.join(table.fields)}; needed are"
                    f" {', '.join(fields)} (HostTable(rows, dim, state=...))"
                )
            has = table[name]
            if tuple(has.shape[1:]) != shape or has.dtype != dtype:
                raise ValueError(
                    f"table: its field {name!r} has rows {list(has.shape[1:])} of {has.dtype};"
                    f" needed are rows {list(shape)} of {dtype}"
                )


def check_rows(
    parameter: Tensor, shape: tuple[int, ...], dtype: torch.dtype, variable: str, datatype: str
) -> None:
    """Raises ValueError unless rows of this shape and dtype fit a parameter."""
    if parameter.dim() == 0 or tuple(parameter.shape[1:]) != shape:
        raise ValueError(
            f"embed_dimension={shape[0] if len(shape) == 1 else shape}: the rows of {variable},"
            f" {list(parameter.shape)}, have the shape {list(parameter.shape[1:])}; give that, or"
            " build the model with rows of this size"
        )
    if parameter.dtype != dtype:
        raise ValueError(
            f"{datatype}={str(dtype)[6:]!r}: {variable} is {str(parameter.dtype)[6:]!r}; give that,"
            " or convert the model first"
        )


def _check_held(index: Tensor, rows: Tensor, field: Tensor, holder: str) -> None:
    """Raises ValueError unless rows of a batch that `holder` has fit a table's field."""
    if rows.shape[:1] != index.shape:
        raise ValueError(
            f"afterOptimizerStep got {index.numel()} ids, but {holder} holds"
            f" {rows.shape[0] if rows.dim() else 0} rows: pass what beforeForwardPass got"
        )
    on_one_device = field.is_cpu or field.device == rows.device
    if (rows.shape[1:], rows.dtype) != (field.shape[1:], field.dtype) or not on_one_device:
        raise ValueError(
            f"afterOptimizerStep: {holder} holds rows {list(rows.shape[1:])} of {rows.dtype} on"
            f" {rows.device}, the table {list(field.shape[1:])} of {field.dtype} on {field.device}:"
            " convert or move the model before the factories are made"
        )

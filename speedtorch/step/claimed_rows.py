"""ClaimedRows: the rows of a table that one module trains, and the weight of these rows."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from speedtorch.step.exchange import Exchange
from speedtorch.step.parameter_view import OptimizerState, ParameterView
from speedtorch.step.resident_store import store_of
from speedtorch.step.rounding import Rounding
from speedtorch.step.row_lock import serialized
from speedtorch.step.row_store import RowStore
from speedtorch.step.row_weight import RowWeight
from speedtorch.table.lazy_table import LazyTable
from speedtorch.table.whole_fields import WholeFields
from speedtorch.torch_internals import TensorWeakRef, as_plain, outside_modes, version_of

__all__ = ["ClaimedRows"]

_late: list[ClaimedRows] = []
"""Rows that became garbage while a CUDA graph was captured.

The next deletion of a ClaimedRows after the capture writes these rows back and releases them. Until
then, methods of the table still write the rows back. At interpreter exit nothing is written back.
"""


class ClaimedRows:
    """Claims a module's table for training, and writes the step's rows back to the table.

    Only one module at a time has the claim of a table. If the parameter requires a gradient and the
    table is writable, the constructor claims the table. The module that had the claim before then
    raises RuntimeError at its next use, until the new module is deleted. A parameter that requires
    a gradient later needs claim(), which raises RuntimeError if another module has the claim.

    This class implements RowHolder of speedtorch/table/host_table.py. `view` shows the step's rows
    as the module's parameter. The other arguments are those of TrainedRows.
    """

    def __init__(
        self,
        name: str,
        table: LazyTable,
        view: ParameterView,
        padding: int | None,
        capacity: int | None,
        rounding: Rounding | None,
    ) -> None:
        self.name = name
        self.table = table
        self.fields = WholeFields(table)
        self.parameter_view, self.parameter = view, view.parameter
        store = store_of(table, view.parameter.dtype, rounding)
        self.held_dtype, self.rounding = store.held_dtype, rounding
        # With a capacity, a shard that lacks the padding row has padding == table.rows. This id
        # names a row of zeros outside the table.
        self._padding = None if padding == table.rows else padding
        self.exchange = Exchange(name, store, view, padding, capacity)
        self.steps = self.exchange.steps
        self.lock = self.exchange.lock
        """The lock that a thread acquires while it uses the rows; HeldRows documents its rules."""
        self._weight: Callable[[], RowWeight | None] = lambda: None
        self.weight_reference: Callable[[], Tensor | None] = self._weight
        """Returns the weight for comparisons with `is` only; other code calls `_weight`."""
        self.untraceable = (
            f"{name}: torch.export, torch.jit and ONNX cannot export a lookup, because its table is"
            " in host memory. Export the layers after the lookup, with the rows emb(ids) as input,"
            " or a torch.nn module that has loaded the state_dict()."
        )
        self.assigned = defaultdict[str, int](int)
        """The number of assignments of all values by field, such as to the weight's `data`."""
        self.is_released = False
        """Whether the module was deleted, so that a new module may train the rows."""
        if view.parameter.requires_grad and table.writable:
            table.claim.register(self)

    @property
    def shape(self) -> torch.Size:
        """Shape `[rows, ...]` of the weights of this rank's rows."""
        return torch.Size((self.table.rows, *self.table.row_shape))

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the weights of all rows, even if this rank has only some."""
        return (self.table.whole_rows, *self.table.row_shape)

    @property
    def _store(self) -> RowStore:
        return self.exchange.held.store

    @property
    def padding(self) -> int | None:
        """Id of the row that is never trained; None if the table has only some of the rows."""
        return self._padding if self.table.shard_spec is None else None

    @property
    def state(self) -> OptimizerState | None:
        """The optimizer state of the step's rows, or None."""
        return self.parameter_view.attached.state

    def fields_shape(self, field: str) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape of a field of all rows, and its dtype in a step."""
        shape, dtype = self.exchange.held.fields[field]
        return (self.table.whole_rows, *shape), dtype

    def make_weight(self, lookups: Any) -> RowWeight:
        """Makes the weight parameter of all rows; `lookups` returns rows by their ids."""
        weight = RowWeight.of(self, lookups, requires_grad=self.parameter.requires_grad)
        vars(weight)["_is_param"] = True  # makes isinstance(weight, nn.Parameter) true
        return self.take_weight(weight, lookups)

    def take_weight(self, weight: RowWeight, lookups: Any) -> RowWeight:
        """Attaches a weight of the same shape to these rows."""
        vars(weight).update(_rows=self, _lookups=lookups, _count=self.table.whole_rows)
        self._weight = TensorWeakRef(weight)
        self.weight_reference = self._weight.ref
        return weight

    def weight_on(self, device: torch.device) -> RowWeight:
        """Makes a tensor like the weight on a device, as its replacement."""
        return RowWeight.of(self, None, device=device)

    def rows_version(self) -> tuple[int, int]:
        """A pair of numbers that changes if another step begins or the step's rows may change."""
        return self.exchange.held.now.number, version_of(self.parameter)

    @property
    def weight(self) -> RowWeight:
        """The weight parameter of all rows; raises RuntimeError after it was deleted."""
        if (weight := self._weight()) is None:
            raise RuntimeError(f"{self.name}: the module was deleted. Keep a reference to it.")
        return weight

    def claim(self) -> None:
        """Claims the table's rows for training by this module.

        Raises RuntimeError if another living module has the claim, ValueError if the table is
        read-only.
        """
        self.table.check_writable(f"{self.name}: training its rows")
        holder = self.table.claim.holder
        if holder is self:
            return
        if holder is None or (isinstance(holder, ClaimedRows) and holder.is_released):
            self.table.claim.register(self)
        else:
            self._refuse_replaced()

    def _check_claim(self) -> None:
        if self.table.claim.was_replaced:
            self.claim()  # succeeds if the other module was deleted

    def _refuse_replaced(self) -> None:
        raise RuntimeError(
            f"{self.name}: another module has claimed the rows of the same HostTable for training."
            " Each module would miss the changes of the other. Use only one of them, and delete the"
            " other module before you train this one."
        )

    @serialized
    def write_back(self) -> None:
        """Writes the step's rows to the table and waits until the CPU can read them.

        Does nothing in a forked child that has made no lookup and shares the table's memory: its
        parent writes the rows.
        """
        if self.exchange.held.is_inherited:
            return
        with as_plain():
            self.exchange.held.write_back()
            self._store.settle(self.exchange.held.device)
            self.exchange.memory.raise_faults()

    def flush(self) -> None:
        """Like write_back(); raises RuntimeError if another module has claimed the table."""
        self._check_claim()
        self.write_back()

    @property
    def is_captured(self) -> bool:
        """Whether a captured CUDA graph uses the rows."""
        return self.exchange.memory.is_captured

    def refuse_if_captured(self, what: str) -> None:
        """Raises RuntimeError if a captured CUDA graph uses the rows; `what` names the call."""
        self.exchange.memory.refuse_if_captured(what)

    @serialized
    def release(self) -> None:
        """Called when the module is deleted: writes its rows to the table.

        A weight that an optimizer or a caller still references keeps the table alive and usable.
        """
        self.is_released = True
        self._write_back_at_end()

    def _write_back_at_end(self) -> None:
        """Writes the rows back, unless in a forked child or while a CUDA graph is captured.

        A forked child cannot read rows on a GPU. is_of_fork is true in every such child,
        is_inherited only if the child shares the table's memory with its parent. A CUDA graph would
        capture the copies, and repeat them in each replay.
        """
        held = self.exchange.held
        if not held.is_of_fork and not held.captures():
            with outside_modes():
                self.write_back()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At exit this module's globals may be None already.
        if is_finalizing() or "exchange" not in vars(self):
            return
        held = self.exchange.held
        if not held.is_of_fork and held.captures():
            _late.append(self)  # this object lives again
            if self.table.claim.holder is None:  # the garbage collector cleared the weak reference
                self.table.claim.register(self)
            return
        self._end()
        while _late and not _late[-1].exchange.held.captures():
            _late.pop()._end()

    def _end(self) -> None:
        try:
            self._write_back_at_end()
        finally:
            self.exchange.end()
            self.table.claim.unregister(self)

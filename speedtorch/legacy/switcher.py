"""What all SpeedTorch classes share: a table and the ids of a batch.

A switcher holds all rows of a variable, of its optimizer state or of data, and exchanges those of a
batch. Ids arrive as the 2019 classes took them: positives of any shape and, if there are, negatives
of any shape; both are flattened, the positives first.

An exception at any line (out of memory, Ctrl-C) leaves an exchange wholly done or not done. What it
needs is made first and can be thrown away; then one assignment, `_take`'s, makes the exchange
current; what follows can be repeated, and every method repeats it first until it is through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor

from speedtorch.ops.batch_ids import Indexes, all_within, flat_index
from speedtorch.ops.functions import pinned_gather, pinned_scatter, synchronize
from speedtorch.table.host_table import HostTable
from speedtorch.table.plan_memo import Plan

__all__ = ["OneField", "Stored", "Switcher"]


class Stored(NamedTuple):
    """Where the rows are: fields `[rows, ...]` by name, and the table of them if there is one."""

    table: HostTable | None
    fields: dict[str, Tensor]


class Switcher:
    """A set of fields, all with one row per class, whose rows are exchanged batch by batch."""

    _how_to_start = ""  # which methods make the table

    def __init__(self) -> None:
        """Starts without a table."""
        self._stored: Stored | None = None
        self._unfinished: Callable[[], object] | None = None

    @property
    def table(self) -> HostTable:
        """The HostTable that holds the rows.

        Raises:
            RuntimeError: there is none yet.
        """
        self._finish()
        if self._stored is None or self._stored.table is None:
            raise self._not_started()
        return self._stored.table

    def _not_started(self) -> RuntimeError:
        return RuntimeError(f"{type(self).__name__} has no table yet: call {self._how_to_start}")

    def _use_table(self, table: HostTable, names: tuple[str, ...]) -> None:
        self._stored = Stored(table, {name: table[name] for name in names})

    def _take(self, exchange: Callable[[], object]) -> None:
        """Makes an exchange current: something that can be repeated, and that nothing refuses."""
        self._unfinished = exchange
        self._finish()

    def _finish(self) -> None:
        """Repeats what an exception has cut short."""
        if self._unfinished is not None:
            self._unfinished()
            self._unfinished = None

    def _rows(self) -> dict[str, Tensor]:
        """The fields `[rows, ...]` by name, made on first use where that needs no argument."""
        self._finish()
        return self._open_fields()

    def _open_fields(self) -> dict[str, Tensor]:
        if self._stored is None:
            raise self._not_started()
        if self._stored.table is not None:
            _ = self._stored.table.record  # a closed table refuses: rows put there would be lost
        return self._stored.fields

    def _ids(
        self, positives: Indexes, negatives: Indexes | None, device: torch.device, step: int
    ) -> tuple[Tensor, Plan | None]:
        """The ids of a batch as one row of numbers, and their plan where the ops need one.

        Everyone who shares the table shares the plan. `step` is 0 before a batch, 1 after it.
        """
        self._finish()
        if self._stored is None or self._stored.table is None:
            return flat_index(positives, negatives, device), None
        return self._stored.table.plans.find(positives, negatives, device, id(self), step)

    def _gather(
        self, name: str, index: Tensor, device: torch.device, plan: Plan | None = None
    ) -> Tensor:
        field = self._rows()[name]
        out = torch.empty((index.numel(), *field.shape[1:]), dtype=field.dtype, device=device)
        pinned_gather(field, index, out=out, plan=plan)
        return out

    def _put(self, index: Tensor, rows: Mapping[str, Tensor], plan: Plan | None) -> None:
        """Puts a batch's rows back, of all fields or of none; they are known to fit.

        Repeated, it writes the same rows to the same places: ids may lie in the caller's memory,
        where the next batch's come, and are copied, unless a GPU takes the plan in their place; the
        rows are in memory that the next exchange leaves alone.

        Raises:
            IndexError: an id on the CPU is out of range; nothing is changed.
        """
        fields = self._rows()
        held = {name: each.contiguous() for name, each in rows.items()}
        total = next((field.shape[0] for field in fields.values()), 0)
        if plan is None and index.is_cpu and held and not all_within(index, total):
            self._write(index, held, plan)  # the op refuses
        ids = index.clone() if plan is None or index.is_cpu else index
        self._take(partial(self._write, ids, held, plan))

    def _write(self, index: Tensor, rows: Mapping[str, Tensor], plan: Plan | None) -> None:
        fields = self._open_fields()
        for name, each in rows.items():
            pinned_scatter(fields[name], index, each, plan=plan)

    def _settle(self) -> None:
        """Waits for the GPU, so that the CPU's view of the rows is current."""
        self._finish()
        if self._stored is None or self._stored.table is None:
            synchronize()
        else:
            self._stored.table.settle()

    def _to_numpy(self) -> dict[str, npt.NDArray[Any]]:
        """Every field; a view where the table is in host memory, a copy where it is on the GPU."""
        rows = self._rows()
        self._settle()
        return {name: field.cpu().numpy() for name, field in rows.items()}

    def _variable(self) -> Tensor | dict[str, Tensor]:
        return self._rows()

    # What switcher_files.py needs to know.

    def _to_save(self) -> dict[str, Tensor]:
        """What files hold: tensors with one row per class."""
        return self._rows()

    def _layout(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of what a file must hold, by name."""
        return {name: (tuple(rows.shape), rows.dtype) for name, rows in self._to_save().items()}

    def _to_load(self) -> dict[str, Tensor]:
        """Where the content of a file goes; called when it is known to fit."""
        return self._rows()

    def _loaded(self, content: dict[str, Tensor]) -> None:
        """Called once all of a file's content is there."""


class OneField(Switcher):
    """A switcher of a single field, "weight"."""

    def getNumpyVersion(self) -> npt.NDArray[Any]:
        """All rows as a NumPy array, current when this returns.

        Returns:
            A view of the table (no copy; later exchanges show in it) where it is in host memory, a
            copy where it is on the GPU.
        """
        return self._to_numpy()["weight"]

    def _variable(self) -> Tensor:
        return self._rows()["weight"]

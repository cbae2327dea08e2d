"""What all SpeedTorch classes share: a table of all rows of a variable, of state or of data.

An exception at any line (out of memory, Ctrl-C) leaves an exchange wholly done or not done. What it
needs is made first and can be thrown away; then one assignment, `_take`'s, makes the exchange
current; what follows can be repeated, and every method repeats it first until it is through.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor

from speedtorch.legacy.families import Fields, TablePlace, constructor
from speedtorch.legacy.plan_memo import Plan
from speedtorch.ops.functions import pinned_gather, synchronize
from speedtorch.table.host_table import HostTable

__all__ = ["OneField", "Stored", "Switcher", "gathered"]


class Stored(NamedTuple):
    """Where the rows are: fields `[rows, ...]` by name, and the table of them if there is one."""

    table: HostTable | None
    fields: dict[str, Tensor]


class Switcher(ABC):
    """A set of fields, all with one row per class.

    A subclass with a `place`, one of the functions of families.py, gets a constructor with the
    arguments of its method `_start` and of the function; further keywords are defaults.
    """

    total_classes: int
    _place: TablePlace
    _how_to_start = ""  # which methods make the table
    _stored: Stored | None = None
    _unfinished: Callable[[], object] | None = None

    def __init_subclass__(
        cls, place: Callable[..., TablePlace] | None = None, **defaults: Any
    ) -> None:
        if place is not None:
            made: Any = cls
            made.__init__ = constructor(made._start, place, defaults)

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

    @abstractmethod
    def _row_fields(self) -> Fields:
        """Shape and dtype of a row of each field."""

    def _make(self, place: TablePlace, device: torch.device) -> Stored:
        return self._all_of(place.make_table(self.total_classes, self._row_fields(), device))

    def _all_of(self, table: HostTable) -> Stored:
        return Stored(table, {name: table[name] for name in self._row_fields()})

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
            self._stored.table.check()  # a closed one refuses: rows put there would be lost
        return self._stored.fields

    def _settle(self) -> None:
        """Waits for the GPU, so that the CPU's view of the rows is current."""
        self._finish()
        if self._stored is None or self._stored.table is None:
            synchronize()
        else:
            self._stored.table.settle()

    def _to_numpy(self) -> dict[str, npt.NDArray[Any]]:
        """Copies of every field."""
        rows = self._rows()
        self._settle()
        return {name: field.to("cpu", copy=True).numpy() for name, field in rows.items()}

    def _variable(self) -> Tensor | dict[str, Tensor]:
        return self._rows()

    def _listed_variable(self) -> Tensor | list[Tensor]:
        """The variable as the attributes of 2019 have it."""
        variable = self._variable()
        return variable if isinstance(variable, Tensor) else list(variable.values())

    # What switcher_files.py needs to know.

    def _to_save(self) -> dict[str, Tensor]:
        """What files hold: tensors with one row per class."""
        return self._rows()

    def _layout(self) -> Fields:
        """Shape and dtype of what a file must hold, by name."""
        rows = self._row_fields().items()
        return {name: ((self.total_classes, *shape), dtype) for name, (shape, dtype) in rows}

    def _to_load(self) -> dict[str, Tensor]:
        """Where the content of a file goes; called when it is known to fit."""
        return self._rows()

    def _loaded(self, content: dict[str, Tensor]) -> None:  # noqa: B027
        """Called once all of a file's content is there."""


class OneField(Switcher):
    """A switcher of a single field, "weight"."""

    _shape: tuple[int, ...]
    _dtype: torch.dtype

    def _row_fields(self) -> Fields:
        return {"weight": (self._shape, self._dtype)}

    def getNumpyVersion(self) -> npt.NDArray[Any]:
        """A copy of all rows as a NumPy array, which later exchanges do not change."""
        return self._to_numpy()["weight"]

    def _variable(self) -> Tensor:
        return self._rows()["weight"]


def gathered(
    field: Tensor, index: Tensor, device: torch.device, plan: Plan | None = None
) -> Tensor:
    """Rows `[n, ...]` of a field `[rows, ...]` by n ids, in new memory on a device."""
    out = torch.empty((index.numel(), *field.shape[1:]), dtype=field.dtype, device=device)
    pinned_gather(field, index, out=out, plan=plan)
    return out

"""The base of the classes of SpeedTorch 0.1.6: all rows of an embedding, optimizer state or data.

The argument `total_classes` of these classes is the number of rows, so a "class" is an id.

An exchange copies rows to the table or to the trained parameter. An exception at any line (out of
memory, Ctrl-C) leaves an exchange either done or not done. The preparation has no side effects. The
assignment to `_unfinished` in `_commit` commits the exchange. The remaining work can be repeated,
and every method first repeats it until it has completed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor

from speedtorch.legacy.families import Fields, TablePlace, constructor, default_device
from speedtorch.legacy.plan_memo import Plan
from speedtorch.ops.functions import pinned_gather, synchronize
from speedtorch.table.host_table import HostTable

__all__ = ["OneField", "Stored", "Switcher", "gathered"]


class Stored(NamedTuple):
    """The fields `[rows, ...]` by name, and their table if there is one."""

    table: HostTable | None
    fields: dict[str, Tensor]


class Switcher(ABC):
    """A set of fields, all with one row per id.

    `class Name(Base, place=..., **defaults)` creates the constructor of a public class. `place` is
    a function of families.py. The constructor has the arguments of `_start` and of `place`;
    `defaults` replace default values of these arguments.
    """

    total_classes: int
    _row_shape: tuple[int, ...]
    _dtype: torch.dtype
    _place: TablePlace
    _how_to_start = ""  # the methods that create the table, for errors
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
        """The HostTable with the rows.

        Raises:
            RuntimeError: The table has not been created yet, or an optimizer without state per row
                needs none.
        """
        self._finish()
        if self._stored is None or self._stored.table is None:
            raise self._not_started()
        return self._stored.table

    def _not_started(self) -> RuntimeError:
        return RuntimeError(f"{type(self).__name__} has no table yet. Call {self._how_to_start}.")

    @abstractmethod
    def _row_fields(self) -> Fields:
        """The shape and dtype of a row of each field."""

    def _device(self) -> torch.device:
        """The device of the work on the rows."""
        return default_device()

    def _make(self, place: TablePlace) -> Stored:
        fields = self._row_fields()
        return self._all_of(place.make_table(self.total_classes, fields, self._device()))

    def _stored_or_new(self) -> Stored:
        """The current storage of the rows, or the storage to use for them."""
        self._finish()
        return self._stored or self._make(self._place)

    def _all_of(self, table: HostTable) -> Stored:
        return Stored(table, {name: table[name] for name in self._row_fields()})

    def _store(self, stored: Stored) -> None:
        self._stored = stored

    def _commit(self, exchange: Callable[[], object]) -> None:
        """Commits and runs an exchange, after the caller has called _finish().

        The exchange must be repeatable. A ValueError would recur in every later method, so it
        cancels the exchange.
        """
        self._unfinished = exchange
        try:
            self._finish()
        except ValueError:
            self._unfinished = None
            raise

    def _finish(self) -> None:
        """Repeats an exchange that an exception has interrupted."""
        if self._unfinished is not None:
            self._unfinished()
            self._unfinished = None

    def _rows(self) -> dict[str, Tensor]:
        """The fields `[rows, ...]` by name; the first use creates them if no argument is needed."""
        self._finish()
        return self._open_fields()

    def _open_fields(self) -> dict[str, Tensor]:
        if self._stored is None:
            raise self._not_started()
        if self._stored.table is not None:
            # Raises for a closed table, which would lose new rows.
            self._stored.table.make_current()
        return self._stored.fields

    def _settle(self) -> None:
        """Waits for the GPU, so that the CPU's view of the rows is current."""
        self._finish()
        if self._stored is None or self._stored.table is None:
            synchronize()
        else:
            self._stored.table.settle()

    def _to_numpy(self) -> dict[str, npt.NDArray[Any]]:
        """Copies every field to NumPy."""
        rows = self._rows()
        self._settle()
        return {name: field.to("cpu", copy=True).numpy() for name, field in rows.items()}

    def _variable(self) -> Tensor | dict[str, Tensor]:
        return self._rows()

    def _listed_variable(self) -> Tensor | list[Tensor]:
        """The fields in the form of the attributes of 2019: a tensor, or a list of tensors."""
        variable = self._variable()
        return variable if isinstance(variable, Tensor) else list(variable.values())

    # The interface for switcher_files.py.

    def _to_save(self) -> dict[str, Tensor]:
        """The content of a file: tensors with one row per id."""
        return self._rows()

    def _layout(self) -> Fields:
        """The shape and dtype of each field that a file must contain."""
        rows = self._row_fields().items()
        return {name: ((self.total_classes, *shape), dtype) for name, (shape, dtype) in rows}

    def _to_load(self) -> dict[str, Tensor]:
        """The destination of a file's content, whose layout has been checked."""
        self._store(self._stored_or_new())
        return self._rows()

    def _loaded(self, content: dict[str, Tensor]) -> None:  # noqa: B027
        """Runs after all of a file's content has been read."""


class OneField(Switcher):
    """A Switcher with a single field, "weight"."""

    def _row_fields(self) -> Fields:
        return {"weight": (self._row_shape, self._dtype)}

    def getNumpyVersion(self) -> npt.NDArray[Any]:
        """A copy of all rows as a NumPy array, which later exchanges do not change.

        Raises TypeError for a dtype that NumPy lacks, such as bfloat16.
        """
        return self._to_numpy()["weight"]

    def _variable(self) -> Tensor:
        return self._rows()["weight"]


def gathered(
    field: Tensor, index: Tensor, device: torch.device, plan: Plan | None = None
) -> Tensor:
    """Copies rows `[n, ...]` of a field `[rows, ...]` to new memory on a device, given n ids."""
    out = torch.empty((index.numel(), *field.shape[1:]), dtype=field.dtype, device=device)
    pinned_gather(field, index, out=out, plan=plan)
    return out

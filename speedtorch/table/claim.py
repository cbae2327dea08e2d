"""Claim: which object trains the rows of a table, even before the table is allocated."""

from __future__ import annotations

import weakref

from speedtorch.table.host_table import HostTable, RowHolder

__all__ = ["Claim"]


class Claim:
    """Registers a module's RowHolder with its table. Another module may replace this holder.

    Args:
        table: The table, or None before allocation.
    """

    def __init__(self, table: HostTable | None) -> None:
        self._table = table
        self._own: weakref.ref[RowHolder] | None = None

    @property
    def holder(self) -> RowHolder | None:
        """The current RowHolder of the table, which may belong to another module."""
        reference = self._own if self._table is None else self._table.holder
        return None if reference is None else reference()

    def register(self, holder: RowHolder) -> None:
        """Makes `holder` the RowHolder. The previous one first writes its rows back."""
        if self._table is not None:
            self._table.write_back()
        self._own = weakref.ref(holder)
        if self._table is not None:
            self._table.set_holder(self._own)

    def unregister(self, holder: RowHolder) -> None:
        """Removes `holder`, if it is the current RowHolder."""
        if self.holder is holder:
            self._own = None
            if self._table is not None:
                self._table.set_holder(None)

    def move_to_table(self, table: HostTable) -> None:
        """Registers this module's holder with a new table, which replaces any earlier one."""
        table.set_holder(self._own)
        self._table = table

    def register_beside(self, beside: HostTable) -> None:
        """Registers this module's holder with a second table too."""
        beside.set_holder(self._own)

    @property
    def is_registered(self) -> bool:
        """Whether the table is allocated, and this module's holder is registered with it."""
        table = self._table
        return self._own is not None and table is not None and table.holder is self._own

    @property
    def was_replaced(self) -> bool:
        """Whether this module had a holder, and the table now has a different one or none."""
        return self._own is not None and self.holder is not self._own()

    def write_back_other_module(self) -> None:
        """Writes newer copies of rows back if another module trains them."""
        table = self._table
        if table is not None and table.holder is not self._own:
            table.write_back()

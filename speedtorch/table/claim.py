"""Claim: which object trains the rows of a table, also before the table has its memory."""

from __future__ import annotations

import weakref

from speedtorch.table.host_table import HostTable, RowHolder

__all__ = ["Claim"]


class Claim:
    """What holds rows of a table elsewhere, as a module knows it and as the table does.

    Args:
        table: None as long as there is none.
    """

    def __init__(self, table: HostTable | None) -> None:
        self._table = table
        self._own: weakref.ref[RowHolder] | None = None

    @property
    def holder(self) -> RowHolder | None:
        """What holds rows of the table, whichever module that belongs to."""
        reference = self._own if self._table is None else self._table.holder
        return None if reference is None else reference()

    def take(self, holder: RowHolder) -> None:
        """Says what holds rows of the table; what did before writes them back."""
        if self._table is not None:
            self._table.write_back()
        self._own = weakref.ref(holder)
        if self._table is not None:
            self._table.be_held(self._own)

    def drop(self, holder: RowHolder) -> None:
        """Says that a holder holds rows no more."""
        if self.holder is holder:
            self._own = None
            if self._table is not None:
                self._table.be_held(None)

    def carry_to(self, table: HostTable) -> None:
        """Says that the table was made, or has taken the place of the one before."""
        table.be_held(self._own)
        self._table = table

    def share_with(self, beside: HostTable) -> None:
        """Says that the module's holder has rows of another table as well."""
        beside.be_held(self._own)

    @property
    def is_held_here(self) -> bool:
        """Whether the table is there and tells the module's holder before it closes."""
        table = self._table
        return self._own is not None and table is not None and table.holder is self._own

    @property
    def was_replaced(self) -> bool:
        """Whether another holder has rows of the table than the module's."""
        return self._own is not None and self.holder is not self._own()

    def write_back_others(self) -> None:
        """Rows that another module trains are in the table, too, after this."""
        table = self._table
        if table is not None and table.holder is not self._own:
            table.write_back()

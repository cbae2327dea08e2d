"""WholeFields: all rows of a field at once, as state dicts and checkpoints save and load them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from speedtorch.memory import host_memory
from speedtorch.ops.functions import pinned_copy
from speedtorch.table.host_table import is_same
from speedtorch.table.lazy_table import LazyTable
from speedtorch.table.read_only_rows import ReadOnlyRows, in_own_storage
from speedtorch.table.shared_rows import SharedRows

__all__ = ["WholeFields", "given_in_place"]

_are_given_in_place: ContextVar[bool] = ContextVar("given in place", default=False)

_BLOCK_BYTES = 64 << 20  # of a field that is converted on its way


class WholeFields:
    """The fields of a table, each with all of its rows, in the order of the ids.

    Rows that a step holds come home before any of these is called.
    """

    def __init__(self, table: LazyTable) -> None:
        self._table = table
        self._full: Mapping[str, Tensor] = {}
        """All rows of the sharded table, by field, within replaced_by()."""

    def fill(self, name: str, row: Tensor) -> None:
        """Copies one row to all rows of a field."""
        self._table.home_of(name).fill_(row, name)

    def begin(self, name: str, row: Tensor) -> None:
        """As fill(), of what an optimizer's state begins with; see HostTable.begin_state."""
        self._table.home_of(name).begin_state(name, row)

    def check_loadable(self, row: Tensor, value: Tensor) -> None:
        """Raises what load() of all rows would, of a field with such a row; changes nothing."""
        portion = self._table.portion
        if portion is not None and isinstance(value, SharedRows):
            self._check_share(value, portion.within(slice(None)))
        else:
            row.new_empty((0, *row.shape)).copy_(value.detach()[:0])

    def load(self, name: str, value: Tensor, first: int = 0) -> None:
        """Copies rows `[n, ...]` of a field, `first` and those after it, from wherever they are.

        Takes no memory for another copy of them. They may be of any dtype that torch converts to
        the field's.
        """
        are_all = len(value) == self._table.whole_rows
        home = self._table.home_of(name, anew=are_all)
        home.check_writable(f"{self._table.name}: loading {name!r}")
        home.settle()
        field, rows = home.rows_of(name), slice(first, first + len(value))
        if (portion := self._table.portion) is not None:
            self._load_portion(field, value, portion.within(rows))
        else:
            _convert(value.detach(), field[rows])
            home.settle()
        home.note_given(name)
        if name == "weight" and are_all:
            self._table.new.note_drawn()

    def _load_portion(
        self, field: Tensor, value: Tensor, blocks: list[tuple[range, range]]
    ) -> None:
        if not isinstance(value, SharedRows):
            value = value.detach()
            for there, here in blocks:
                field[here.start : here.stop].copy_(value[there.start : there.stop])
        else:
            self._check_share(value, blocks)
            if not is_same(value.field, field):
                for _, here in blocks:
                    field[here.start : here.stop].copy_(value.field[here.start : here.stop])

    def _check_share(self, value: SharedRows, blocks: list[tuple[range, range]]) -> None:
        if list(value.blocks) != blocks:
            raise ValueError(
                f"{self._table.name}: these are the rows of another share;"
                " torch.distributed.checkpoint loads the rows of any number of ranks into"
                " model.state_dict()"
            )

    def in_place(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Rows of a field, in the table's memory; SharedRows where some of them are not here."""
        field, portion = self._table.field(name), self._table.portion
        if portion is None:
            return field[rows]
        first, end, _ = rows.indices(portion.rows)
        return SharedRows(end - first, field, portion.within(rows))

    @contextmanager
    def replaced_by(self, full: Mapping[str, Tensor]) -> Iterator[None]:
        """Within the block saved() returns these: all rows of the sharded table, by field."""
        before, self._full = self._full, full
        try:
            yield
        finally:
            self._full = before

    def saved(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Rows of a field as other libraries save them: contiguous, in memory of their own.

        A field that is alone in its table is that already. Where there is no room for a copy, it is
        the strided view of the records, which torch.save takes.
        """
        if name in self._full:
            return in_own_storage(self._full[name][rows])
        field = self.in_place(name, rows)
        if isinstance(field, SharedRows | ReadOnlyRows) or _are_given_in_place.get():
            return field
        if field.is_contiguous():
            return in_own_storage(field)
        nbytes = field.numel() * field.element_size()
        if field.is_cuda or nbytes > host_memory.available_bytes() // 2:
            return field
        return field.contiguous()


@contextmanager
def given_in_place() -> Iterator[None]:
    """Within, this thread's saved() gives views of the table, for what reads them at once."""
    token = _are_given_in_place.set(True)
    try:
        yield
    finally:
        _are_given_in_place.reset(token)


def _convert(value: Tensor, field: Tensor) -> None:
    """Copies rows to those of a field, by blocks where they have to cross from a GPU."""
    if is_same(value, field):
        return
    if not value.is_cuda or field.is_cuda:
        field.copy_(value)
        return
    row_bytes = max(1, value[:1].numel() * value.element_size())
    rows = max(1, _BLOCK_BYTES // row_bytes)
    for begin in range(0, len(field), rows):
        block = value[begin : begin + rows].to(field.dtype).contiguous()
        pinned_copy(field[begin : begin + rows], block)

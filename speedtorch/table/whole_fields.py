"""WholeFields: saves and loads all rows of a field, for state dicts and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

from torch import Tensor

from speedtorch.memory import host_memory
from speedtorch.ops.functions import pinned_copy
from speedtorch.table.host_table import is_same_view
from speedtorch.table.lazy_table import LazyTable
from speedtorch.table.read_only_rows import ReadOnlyRows, in_own_storage
from speedtorch.table.resident_rows import reading_only
from speedtorch.table.row_shard import RowShard

__all__ = ["WholeFields", "reading_state", "state_dict_views"]

_returns_views: ContextVar[bool] = ContextVar("returns views", default=False)

_BLOCK_BYTES = 64 << 20  # bytes of rows that are converted together on the copy from a GPU


class WholeFields:
    """The fields of a table, each with all rows in the order of the ids.

    The caller must write rows of a step back to the table before it calls any method.
    """

    def __init__(self, table: LazyTable) -> None:
        self._table = table
        self._full: Mapping[str, Tensor] = {}
        """Field name to all rows of the sharded table, within replaced_by()."""

    def fill(self, name: str, row: Tensor) -> None:
        """Copies one row to all rows of a field."""
        self._table.table_of(name).fill_(row, name)

    def is_shared(self, name: str) -> bool:
        """Whether a field is in memory that other processes may open."""
        return self._table.table_of(name).memory == "shared"

    def begin(self, name: str, row: Tensor) -> None:
        """Initializes an optimizer state in all rows. See HostTable.begin_state."""
        self._table.table_of(name).begin_state(name, row)

    def check_loadable(self, row: Tensor, value: Tensor) -> None:
        """Raises if load() cannot copy a value of this dtype and row shape, or of another shard.

        Changes nothing, and does not check the number of rows. `row` is one row of the field.
        """
        shard_spec = self._table.shard_spec
        if shard_spec is not None and isinstance(value, RowShard):
            self._check_share(value, shard_spec.within(slice(None)))
        else:
            row.new_empty((0, *row.shape)).copy_(value.detach()[:0])

    def load(self, name: str, value: Tensor, first: int = 0) -> None:
        """Copies `value` `[n, ...]`, on any device, to the rows of a field from row `first` on.

        Torch converts their dtype to the field's. From a GPU to an unsharded table in host memory,
        the rows are copied in blocks, without a second full copy. For a sharded table, `value` has
        rows of all ranks, of which this rank's rows are copied.
        """
        are_all = len(value) == self._table.whole_rows
        table = self._table.table_of(name, anew=are_all)
        table.check_writable(f"{self._table.name}: loading {name!r}")
        table.settle()
        field, rows = table.rows_of(name), slice(first, first + len(value))
        if (shard_spec := self._table.shard_spec) is not None:
            self._load_shard(field, value, shard_spec.within(rows))
        else:
            _convert(value.detach(), field[rows])
            table.settle()
        table.mark_loaded(name)
        if name == "weight" and are_all:
            self._table.new.mark_drawn()

    def _load_shard(self, field: Tensor, value: Tensor, blocks: list[tuple[range, range]]) -> None:
        if not isinstance(value, RowShard):
            value = value.detach()
            for whole, local in blocks:
                field[local.start : local.stop].copy_(value[whole.start : whole.stop])
        else:
            self._check_share(value, blocks)
            if not is_same_view(value.field, field):
                for _, local in blocks:
                    rows = slice(local.start, local.stop)
                    field[rows].copy_(value.field[rows])

    def _check_share(self, value: RowShard, blocks: list[tuple[range, range]]) -> None:
        if list(value.blocks) != blocks:
            raise ValueError(
                f"{self._table.name}: these rows are another shard. To load the rows of any"
                " number of ranks, load into model.state_dict() by torch.distributed.checkpoint."
            )

    def in_place(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Returns rows of a field in the table's memory, as RowShard if the table is sharded."""
        field, shard_spec = self._table.field(name), self._table.shard_spec
        if shard_spec is None:
            return field[rows]
        first, end, _ = rows.indices(shard_spec.rows)
        return RowShard(end - first, field, shard_spec.within(rows))

    @contextmanager
    def replaced_by(self, full: Mapping[str, Tensor]) -> Iterator[None]:
        """A context in which saved() returns rows of `full`: field name to all ranks' rows."""
        before, self._full = self._full, full
        try:
            yield
        finally:
            self._full = before

    def saved(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Returns rows of a field for other libraries to save: contiguous, with their own storage.

        A field that is alone in its table needs no copy. Other fields on a GPU, or larger than half
        of the available host memory, are returned as a strided view for torch.save. A sharded field
        is returned as RowShard, and a field of a mapped file as ReadOnlyRows.
        """
        if name in self._full:
            return in_own_storage(self._full[name][rows])
        field = self.in_place(name, rows)
        if isinstance(field, RowShard | ReadOnlyRows) or _returns_views.get():
            return field
        if field.is_contiguous():
            return in_own_storage(field)
        nbytes = field.numel() * field.element_size()
        if field.is_cuda or nbytes > host_memory.available_bytes() // 2:
            return field
        return field.contiguous()


@contextmanager
def state_dict_views() -> Iterator[None]:
    """A context in which saved(), in this thread, returns views of the table instead of copies.

    The caller must read the views before the table changes, and must not write to them.
    """
    token = _returns_views.set(True)
    try:
        yield
    finally:
        _returns_views.reset(token)


def reading_state() -> AbstractContextManager[None]:
    """A context for a state dict, which writes rows back and then calls saved().

    Within state_dict_views() the caller only reads, so resident rows of a file keep their slots.
    """
    return reading_only(_returns_views.get())


def _convert(value: Tensor, field: Tensor) -> None:
    """Copies rows to a field. Rows from a GPU are converted and copied in blocks."""
    if is_same_view(value, field):
        return
    if not value.is_cuda or field.is_cuda:
        field.copy_(value)
        return
    row_bytes = max(1, value[:1].numel() * value.element_size())
    rows = max(1, _BLOCK_BYTES // row_bytes)
    for begin in range(0, len(field), rows):
        block = value[begin : begin + rows].to(field.dtype).contiguous()
        pinned_copy(field[begin : begin + rows], block)

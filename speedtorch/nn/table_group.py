"""TableGroup: several tables in one HostTable with one parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from speedtorch.memory.placement import MemoryKind
from speedtorch.nn.jagged import Source
from speedtorch.nn.row_module import Device, RowModule
from speedtorch.nn.table_config import Table
from speedtorch.nn.table_ranges import TableIds, TableRanges
from speedtorch.step.rounding import RoundingMode, StoredAs
from speedtorch.step.trained_rows import Bags
from speedtorch.step.whole_weight import random_seed
from speedtorch.table.lazy_init import LazyInit
from speedtorch.torch_internals import as_plain

__all__ = ["TableGroup"]


class TableGroup(RowModule):
    """Tables with equal row layout, which share one HostTable and one parameter.

    EmbeddingCollection and EmbeddingBagCollection create groups and look up rows in them.

    Attributes:
        weight: The parameter of all rows of all tables.
        table: The HostTable with all rows of all tables.
        ranges: The range of rows of each table.
    """

    ranges: TableRanges

    def __init__(
        self,
        tables: Sequence[Table],
        device: Device,
        memory: MemoryKind,
        freeze: bool,
        capacity: int | None,
        stored: StoredAs | None,
        rounding: RoundingMode,
    ) -> None:
        ranges, (_, _, columns, dtype, *_) = TableRanges(tables), tables[0]
        own = (None, None, freeze, device, dtype, memory, capacity)
        how: Any = {"stored": stored, "rounding": rounding}
        super().__init__(ranges.rows, columns, *own, ranges=ranges, **how)

    def _label(self) -> str:
        names = [repr(table.name) for table in self.ranges.tables]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"{'tables' if len(names) > 1 else 'table'} {', '.join(names[:3])}{more}"

    def reset_parameters(self) -> None:
        """Initializes all rows again by the init_fn or the initial range of their config."""
        for first, table in zip(self.ranges.firsts, self.ranges.tables, strict=True):
            rows = slice(first, first + table.rows)
            draw = LazyInit((table.draw,), random_seed(), None, rows)
            self.trained_rows.table.draw(draw, anew=True)

    @property
    def settings(self) -> dict[str, object]:
        """See RowModule. Lookup settings are listed for each table."""
        return {
            f"table {table.name!r}": (table.rows, table.features, "mean" if table.mean else "sum")
            for table in self.ranges.tables
        } | self._stored_as()

    def extra_repr(self) -> str:
        """The tables with their numbers of rows, the device and the kind of memory."""
        tables = ", ".join(f"{table.name}: {table.rows}" for table in self.ranges.tables)
        return f"{tables}; columns={self.embedding_dim}, {self.places()}"

    def resize(self, *args: object, **kwargs: object) -> NoReturn:
        """Raises NotImplementedError, because only the collection resizes tables."""
        name = self.ranges.tables[-1].name
        raise NotImplementedError(
            f"{self._label()}: only the collection can resize its tables. Call"
            f" collection.resize({name!r}, n)."
        )

    def resize_table(self, table: Table, rows: Tensor | None, notify: Callable[[], object]) -> None:
        """Resizes one of the tables; see Embedding.resize. `table` is the new description.

        `notify` is called after the change, and again after an exception has undone the change.
        """
        before = self.ranges
        at = [old.name for old in before.tables].index(table.name)
        after = TableRanges([*before.tables[:at], table, *before.tables[at + 1 :]])
        count = self._count_new_rows(before.tables[at].rows, table.rows, rows, table.name)

        def update_ranges() -> None:
            """Sets the ranges of the current number of rows."""
            self.ranges = after if self.num_embeddings == after.rows else before
            notify()

        end = before.range_of(table.name).stop
        self._insert(end, count, table.draw if rows is None else rows, update_ranges)

    def ids_of(self, source: Source, *, planned: bool = False) -> TableIds:
        """Converts feature ids to row ids, for a lookup or `planned` ahead; see TableRanges."""
        device = self.trained_rows.exchange.held.device
        if self.lookups is self.trained_rows:
            return self.ranges.ids_of(source, device)
        return self.ranges.ids_of_rank(source, device, planned=planned)

    def checked(self, ids: TableIds) -> TableIds:
        """Returns `ids`; raises IndexError for bad ids on the CPU if rows are not sharded."""
        is_alone = self.lookups is self.trained_rows
        if is_alone and ids.rows.is_cpu and ids.rows.numpy().min(initial=0) < 0:
            raise self.ranges.explained(IndexError(), ids)
        return ids

    def announcement(self, *ids: Tensor) -> Callable[[], None]:
        """See RowModule.announcement. Errors about bad ids name the feature and the table."""
        try:
            return super().announcement(*ids)
        except IndexError as error:
            raise self.ranges.explained(error) from None

    def forward(self, *args: object, **kwargs: object) -> NoReturn:
        """Raises NotImplementedError, because the collection looks up all tables together."""
        raise NotImplementedError(
            f"{self._label()}: a collection looks up all its tables together. Call it with a dict"
            " of all features, collection({feature: ids, ...})[feature]. For a table with its own"
            " lookups, build a speedtorch.Embedding or EmbeddingBag."
        )

    def flush(self) -> None:
        """See RowModule.flush. Errors about bad ids name the feature and the table."""
        try:
            super().flush()
        except IndexError as error:
            raise self.ranges.explained(error) from None

    def look_up(self, ids: TableIds, weights: Tensor | None, *, pooled: bool) -> Tensor:
        """Returns the rows `[ids, columns]`, or pooled rows `[samples, features * columns]`.

        Rows of 16 bits are converted to float32 after the sum. Raises IndexError with the feature
        and the table if an id is out of range.
        """
        with as_plain():
            trains, rows = self._check_lookup(ids.rows), self.lookups
            is_row_wise = not pooled or weights is not None
            try:
                if trains:
                    found = rows.summed(ids.rows, None if is_row_wise else ids.bags)
                else:
                    places, held = rows.borrow(ids.rows, None, 2.0)
                    found = held[places] if is_row_wise else ids.bags.pool(held, places)
            except IndexError as error:
                raise self.ranges.explained(error, ids) from None
            if pooled and is_row_wise:
                assert weights is not None
                factors = weights.to(found.dtype)[:, None]
                found = _PooledRows.apply(found * factors, ids.bags)  # type: ignore[no-untyped-call]
            if found.element_size() == 2:
                found = found.float()
            if not pooled:
                return found
            return found.view(ids.jagged.samples, len(self.ranges.features) * self.embedding_dim)

    # ---- The collection saves and loads each table.

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        pass

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        pass


class _PooledRows(torch.autograd.Function):
    """Pools the rows of ids by bag."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bags: Bags) -> Tensor:
        """Returns pooled rows `[bags, columns]`."""
        ctx.bags = bags
        places = torch.arange(len(rows), device=rows.device)
        return bags.pool(rows.contiguous(), places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Returns the gradient of each id's row."""
        bags = ctx.bags
        gradient = gradient.reshape(-1, gradient.shape[-1]).contiguous()
        return bags.share(gradient).index_select(0, bags.of_ids), None

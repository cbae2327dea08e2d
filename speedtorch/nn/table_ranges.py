"""TableRanges: tables as row ranges of one table, and feature ids as its row ids."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from speedtorch.nn.jagged import Jagged, Source
from speedtorch.nn.table_config import Table
from speedtorch.ops.functions import table_ids
from speedtorch.plan.planned_batch import SeenTensors
from speedtorch.step.trained_rows import Bags

__all__ = ["TableIds", "TableRanges"]

# The lookups whose row ids are remembered: four each of the current batch and of the two batches
# that prefetch plans ahead.
_KEPT = 12


class TableIds(NamedTuple):
    """The ids of a batch as row ids of a group."""

    rows: Tensor
    """Row ids in the group's table, `[ids]`; -1 for ids out of range."""
    bags: Bags
    jagged: Jagged


class TableRanges:
    """Tables with equal row layout, as ranges of the rows of one table.

    Attributes:
        tables: The tables, in order.
        firsts: The first row of each table.
        features: Pairs of a table's position and a feature name, in order.
        keys: The feature names.
        rows: The number of rows of all tables.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = list(tables)
        *self.firsts, self.rows = [0, *accumulate(table.rows for table in tables)]
        self.features = [(k, key) for k, table in enumerate(tables) for key in table.features]
        self.keys = [key for _, key in self.features]
        self._are_means = [self.tables[k].mean for k, _ in self.features]
        self._ranges: dict[torch.device, Tensor] = {}
        self._means: dict[torch.device, Tensor] = {}
        self._cache = deque[_Entry](maxlen=_KEPT)
        """The latest converted ids."""
        self._awaited: list[_Entry] = []
        """Ids of this rank, until their row ids are garbage collected."""

    def __deepcopy__(self, memo: object) -> TableRanges:
        """Copies the tables without the remembered ids."""
        return TableRanges(self.tables)

    def range_of(self, name: str) -> slice:
        """Returns the rows of a table."""
        at = [table.name for table in self.tables].index(name)
        return slice(self.firsts[at], self.firsts[at] + self.tables[at].rows)

    def ids_of(self, source: Source, device: torch.device) -> TableIds:
        """Converts feature ids to row ids; the lookup finds bad ids, see explained().

        If the rows or ids are on a GPU, reuses the result for equal ids on the CPU, or for the same
        unchanged tensors on the GPU.
        """
        if device.type == "cpu" and not any(tensor.is_cuda for tensor in source.tensors):
            # No cache is needed: announce() and prefetch recognize row ids on the CPU by values.
            return self._made(source.read(device), device)
        # A CUDA graph must convert ids itself, because its inputs change with each replay.
        place = (device, device.type == "cuda" and torch.cuda.is_current_stream_capturing())
        if any(captured != place[1] for _, _, (_, captured), _ in self._cache):
            self._cache.clear()  # a capture has begun or ended since
        known = _find(self._cache, source, place)
        if known is None:
            seen = [SeenTensors(source.tensors, device)]
            known = self._made(source.read(device), device)
            self._cache.append((source.form, seen, place, lambda: known))
        return known

    def ids_of_rank(self, source: Source, device: torch.device, *, planned: bool) -> TableIds:
        """Converts feature ids to row ids as ids_of() does, if rows are sharded among ranks.

        A result that is `planned` ahead is remembered while its row ids are alive. Only lookups of
        the same tensors reuse it, because values that are equal here may differ on other ranks. The
        result for a lookup is not reused. The lookup finds bad ids on all ranks.
        """
        place = (device, False)
        self._awaited = [entry for entry in self._awaited if entry[-1]() is not None]
        known = _find(self._awaited, source, place)
        if known is None:
            tensors = source.tensors if planned else []
            # The first entry requires the same tensor objects. The second compares the values of
            # CPU tensors, because a write through NumPy changes no version counter.
            seen = [SeenTensors(tensors, device, unread=True), SeenTensors(tensors, device)]
            known = self._made(source.read(device), device)
            form = source.form if planned else None  # no features have the form None
            self._awaited.append((form, seen, place, _while_kept(known)))
        return known

    def _made(self, jagged: Jagged, device: torch.device) -> TableIds:
        if device not in self._ranges:
            # This copy waits for the GPU, which a capture forbids. A warm-up step has made it.
            ranges = [(self.firsts[k], self.tables[k].rows) for k, _ in self.features]
            self._ranges[device] = torch.tensor(ranges, device=device).reshape(-1, 2)
        ids, offsets, samples, _ = jagged
        rows, bags = table_ids(ids, offsets, self._ranges[device], samples)
        means, divisors = self._are_means, None
        if any(means):
            lengths = offsets.diff().view(len(means), samples).t().clamp(min=1)
            if not all(means):
                if device not in self._means:
                    self._means[device] = torch.tensor(means, device=device)
                lengths = lengths.where(self._means[device], 1)
            divisors = lengths.reshape(-1, 1).to(self.tables[0].dtype)
        return TableIds(rows, Bags(offsets, bags, len(means), all(means), divisors), jagged)

    def explained(self, error: IndexError, latest: TableIds | None = None) -> IndexError:
        """Returns an error that names feature and table of the latest bad ids.

        Returns `error` itself if neither `latest` nor the remembered row ids have bad ids.
        """
        before = [made() for *_, made in (*self._cache, *self._awaited)]
        for ids in reversed([*before, latest]):
            if ids is not None and (named := self._bad_id(ids)) is not None:
                self._cache.clear()
                return named
        return error

    def _bad_id(self, ids: TableIds) -> IndexError | None:
        bad = ids.rows < 0
        if not bool(bad.any()):
            return None
        position = int(bad.to(torch.int8).argmax())
        begins = ids.jagged.begins_of(len(self.features))
        at = max(k for k in range(len(self.features)) if begins[k] <= position)
        of_feature = bad[begins[at] : begins[at + 1]]
        k, feature = self.features[at]
        table = self.tables[k]
        return IndexError(
            f"feature {feature!r}: id {int(ids.jagged.ids[position])} at position"
            f" {position - begins[at]} is out of range for table {table.name!r} of"
            f" {table.rows} rows ({int(of_feature.sum())} of {len(of_feature)} ids are out of"
            " range); no row was moved"
        )


_Place = tuple[torch.device, bool]
"""A device, and whether a CUDA graph is being captured on it."""


_Entry = tuple[Hashable, list[SeenTensors], _Place, Callable[[], TableIds | None]]
"""The form and tensors of a source, the place, and a function that returns the result or None."""


def _find(entries: Sequence[_Entry], source: Source, place: _Place) -> TableIds | None:
    """Returns the row ids of a source if its tensors are known to be unchanged, else None."""
    for form, seen, where, made in reversed(entries):
        # An equal form also means an equal number of tensors.
        same_form = (form, where) == (source.form, place)
        if same_form and all(tensors.matches(source.tensors) for tensors in seen):
            return made()
    return None


def _while_kept(ids: TableIds) -> Callable[[], TableIds | None]:
    """Returns a function that returns `ids` while their row ids are alive elsewhere."""
    rows, bags, jagged = weakref.ref(ids.rows), ids.bags, ids.jagged
    return lambda: None if (kept := rows()) is None else TableIds(kept, bags, jagged)

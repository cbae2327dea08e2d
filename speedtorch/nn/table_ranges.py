"""TableRanges: tables as ranges of the rows of one, and ids of features as rows of it."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedtorch.nn.jagged import Jagged, Source
from speedtorch.nn.table_config import Table
from speedtorch.ops.functions import table_ids
from speedtorch.plan.planned_batch import SeenTensors
from speedtorch.step.trained_rows import Bags

__all__ = ["TableIds", "TableRanges"]

# Lookups whose ids have been made rows: of each batch that prefetch has planned and of the one in
# training four, if they have as many.
_KEPT = 12


class TableIds(NamedTuple):
    """Ids of a batch as rows of a group."""

    rows: Tensor
    """Of the one table that the group's tables are ranges of: `[ids]`, -1 where there is none."""
    bags: Bags
    jagged: Jagged


class TableRanges:
    """Tables of one row layout, each a range of the rows of one.

    Attributes:
        tables: The tables, in order.
        firsts: The first row of each.
        features: Each table's number and the name of each of its features, in order.
        keys: The features' names.
        rows: Of all tables.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = list(tables)
        *self.firsts, self.rows = [0, *accumulate(each.rows for each in tables)]
        self.features = [(k, key) for k, each in enumerate(tables) for key in each.features]
        self.keys = [key for _, key in self.features]
        self._are_means = [self.tables[k].mean for k, _ in self.features]
        self._ranges: dict[torch.device, Tensor] = {}
        self._means: dict[torch.device, Tensor] = {}
        self._known = _Known()
        self._awaited: list[_Entry] = []
        """Ids of this rank, for as long as their rows are kept."""

    def range_of(self, name: str) -> slice:
        """The rows of a table."""
        at = [each.name for each in self.tables].index(name)
        return slice(self.firsts[at], self.firsts[at] + self.tables[at].rows)

    def ids_of(self, source: Source, device: torch.device) -> TableIds:
        """Ids of the features as rows; where a GPU takes part, once for the tensors of the ids.

        Nothing waits. Bad ids are found by the lookup; see explained().
        """
        if device.type == "cpu" and not any(each.is_cuda for each in source.tensors):
            # Ids that were announced or planned ahead are known by the values of these rows.
            return self._made(source.read(device), device)
        # A CUDA graph makes the rows itself, of what its inputs are then.
        place = (device, device.type == "cuda" and torch.cuda.is_current_stream_capturing())
        known = self._known.find(source, place)
        if known is None:
            seen = [SeenTensors(source.tensors, device)]
            known = self._made(source.read(device), device)
            self._known.append((source.form, seen, place, lambda: known))
        return known

    def ids_of_rank(self, source: Source, device: torch.device, *, planned: bool) -> TableIds:
        """As `ids_of`, where other ranks look up theirs.

        Ids of other tensors are never taken for these: on other ranks their values may differ. Nor
        is what is `planned` ahead forgotten for others; a lookup's ids serve that alone. Bad ids
        are found by the lookup, on all ranks.
        """
        place = (device, False)
        self._awaited = [each for each in self._awaited if each[-1]() is not None]
        known = _find(self._awaited, source, place)
        if known is None:
            tensors = source.tensors if planned else []
            # These tensors, and of the values that they had, which NumPy may have changed.
            seen = [SeenTensors(tensors, device, unread=True), SeenTensors(tensors, device)]
            known = self._made(source.read(device), device)
            form = source.form if planned else None  # which no features have
            self._awaited.append((form, seen, place, _while_kept(known)))
        return known

    def _made(self, jagged: Jagged, device: torch.device) -> TableIds:
        if device not in self._ranges:
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
        """An error about bad ids with the feature and the table, if the ids can still be found."""
        before = [made() for *_, made in (*self._known, *self._awaited)]
        for ids in reversed([*before, latest]):
            if ids is not None and (named := self._bad_id(ids)) is not None:
                self._known.clear()
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
"""A device, and whether a CUDA graph is captured there."""


_Entry = tuple[Hashable, list[SeenTensors], _Place, Callable[[], TableIds | None]]
"""The form of a source, its tensors, and what they were made, if that is still there."""


def _find(entries: Sequence[_Entry], source: Source, place: _Place) -> TableIds | None:
    """What the tensors of a source were made, if they are known to be the same."""
    for form, seen, where, made in reversed(entries):
        # Of one form: as many.
        same_form = (form, where) == (source.form, place)
        if same_form and all(each.are(source.tensors) for each in seen):
            return made()
    return None


def _while_kept(ids: TableIds) -> Callable[[], TableIds | None]:
    """Gives them for as long as their rows are kept elsewhere."""
    rows, bags, jagged = weakref.ref(ids.rows), ids.bags, ids.jagged
    return lambda: None if (kept := rows()) is None else TableIds(kept, bags, jagged)


class _Known(deque[_Entry]):
    """Ids that were made rows before; a copy of a module begins without."""

    def __init__(self, ids: Iterable[Any] = ()) -> None:
        super().__init__(ids, maxlen=_KEPT)

    def __deepcopy__(self, memo: object) -> _Known:
        return _Known()

    def find(self, source: Source, place: _Place) -> TableIds | None:
        """What the tensors of a source were made, if they are known to be the same."""
        if any(captured != place[1] for _, _, (_, captured), _ in self):
            self.clear()  # of another capture, or of none
        return _find(self, source, place)

"""Deltas: of tables that note their changes, the rows written since another generation."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from speedtorch.files.field_blocks import SomeRows
from speedtorch.parallel.saved_generation import SavedGeneration
from speedtorch.table.host_table import FieldRows, HostTable, field_rows

__all__ = ["Delta", "Moments", "changed_rows", "moments_of", "remember"]

Moments = list[tuple[str, FieldRows, int]]
"""Rows of tables with their keys, and the moment up to which they are saved."""

_known: weakref.WeakKeyDictionary[HostTable, dict[tuple[str, str, str, int], int]]
_known = weakref.WeakKeyDictionary()
"""By a generation's digest, a key in it, a field and the first row: when the table's were that."""
_MOST_KNOWN = 10_000  # of a table, as runs of months save often


class Delta(NamedTuple):
    """What is written against a generation.

    Attributes:
        tensors: By their keys, of some of them the rows that have changed.
        ids_of: By the key of such a field: that of the ids of its rows.
    """

    tensors: dict[str, Tensor | SomeRows]
    ids_of: dict[str, str]


def changed_rows(base: SavedGeneration, tensors: Mapping[str, Tensor]) -> Delta:
    """Looks which rows have changed since a generation.

    A field goes as a whole whose table did not note its changes then: it does from now on.
    """
    made: dict[str, Tensor | SomeRows] = dict(tensors)
    ids_of: dict[str, str] = {}
    changed: dict[tuple[HostTable, int], Tensor] = {}
    ids_keys: dict[tuple[HostTable, int, range], str] = {}
    for key, tensor in tensors.items():
        if (found := field_rows(tensor)) is None:
            continue
        table = found.table
        moment = _known.get(table, {}).get((base.digest, key, found.field, found.first))
        if table.changes is None and table.can_note_changes:
            table.track_changes()
        if moment is None or not base.has(key, tensor):
            continue
        if (table, moment) not in changed:
            changed[table, moment] = table.changed(moment)
        here = range(found.first, found.first + len(tensor))
        if (place := (table, moment, here)) not in ids_keys:
            names = (f"changed rows.{number}" for number in itertools.count(1))
            ids_keys[place] = next(each for each in names if each not in made)
            every = changed[table, moment]
            made[ids_keys[place]] = every[(every >= here.start) & (every < here.stop)] - here.start
        ids = made[ids_keys[place]]
        assert isinstance(ids, Tensor)
        made[key] = SomeRows(tensor, ids)
        ids_of[key] = ids_keys[place]
    return Delta(made, ids_of)


def moments_of(tensors: Mapping[str, Tensor]) -> Moments:
    """Begins a new moment of the tables that note their changes, for all fields among these."""
    found = [(key, field_rows(tensor)) for key, tensor in tensors.items()]
    noted = [(key, each) for key, each in found if each and each.table.changes]
    begun = {table: table.track_changes() for table in {each.table for _, each in noted}}
    return [(key, each, begun[each.table]) for key, each in noted]


def remember(digest: str, moments: Moments) -> None:
    """Says that a generation has these fields as they were at these moments."""
    for key, rows, moment in moments:
        of_table, place = _known.setdefault(rows.table, {}), (digest, key, rows.field, rows.first)
        of_table.pop(place, None)
        of_table[place] = moment
        for oldest in list(of_table)[:-_MOST_KNOWN]:
            of_table.pop(oldest, None)

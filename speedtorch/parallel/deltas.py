"""Deltas: of tables that note their changes, the rows written since another generation."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from speedtorch.files.table_files import SomeRows
from speedtorch.parallel.saved_generation import SavedGeneration
from speedtorch.table.host_table import HostTable, table_and_field

__all__ = ["Delta", "Moments", "changed_rows", "moments_of", "remember"]

Moments = list[tuple[HostTable, tuple[str, str], int]]
"""Tables, with the key and the name of a field, and the moment up to which it is saved."""

_known: weakref.WeakKeyDictionary[HostTable, dict[tuple[str, str, str], int]]
_known = weakref.WeakKeyDictionary()
"""By a generation's digest, a key in it and a field: the moment when the table's was that."""
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
    ids_keys: dict[tuple[HostTable, int], str] = {}
    for key, tensor in tensors.items():
        if (found := table_and_field(tensor)) is None:
            continue
        table, field = found
        moment = _known.get(table, {}).get((base.digest, key, field))
        if table.changes is None and table.can_note_changes:
            table.track_changes()
        if moment is None or not base.has(key, tensor):
            continue
        if (place := (table, moment)) not in ids_keys:
            names = (f"changed rows.{number}" for number in itertools.count(1))
            ids_keys[place] = next(each for each in names if each not in made)
            made[ids_keys[place]] = table.changed(moment)
        ids = made[ids_keys[place]]
        assert isinstance(ids, Tensor)
        made[key] = SomeRows(tensor, ids)
        ids_of[key] = ids_keys[place]
    return Delta(made, ids_of)


def moments_of(tensors: Mapping[str, Tensor]) -> Moments:
    """Begins a new moment of the tables that note their changes, for all fields among these."""
    found = [(key, table_and_field(tensor)) for key, tensor in tensors.items()]
    noted = [(each[0], (key, each[1])) for key, each in found if each and each[0].changes]
    begun = {table: table.track_changes() for table in dict(noted)}
    return [(table, place, begun[table]) for table, place in noted]


def remember(digest: str, moments: Moments) -> None:
    """Says that a generation has these fields as they were at these moments."""
    for table, (key, field), moment in moments:
        of_table = _known.setdefault(table, {})
        of_table.pop((digest, key, field), None)
        of_table[digest, key, field] = moment
        for oldest in list(of_table)[:-_MOST_KNOWN]:
            of_table.pop(oldest, None)

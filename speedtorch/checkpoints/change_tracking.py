"""Change tracking: records which checkpoints have a table's rows, and finds rows changed since."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from speedtorch.checkpoints.saved_generation import SavedGeneration
from speedtorch.files.field_blocks import SelectedRows, have_same_bytes
from speedtorch.table.host_table import HostTable, field_rows
from speedtorch.table.row_shard import RowShard

__all__ = [
    *(
        "Changed",
        "ChangedTensor",
        "SavedVersions",
        "are_same",
        "changed_rows",
        "begin_versions",
        "place_of",
        "remember",
    ),
    "unchanged",
    "write_changes",
]

_Ranges = Sequence[tuple[range, range]]
_Written = TypeVar("_Written")

_known: weakref.WeakKeyDictionary[HostTable, dict[tuple[str, str, str, int], int]]
_known = weakref.WeakKeyDictionary()
"""Version up to which a checkpoint has a table's rows.

The keys are the checkpoint's digest, the tensor's key, the field and the first row.
"""
_MOST_KNOWN = 10_000  # entries per table; long runs save often


class _Place(NamedTuple):
    """The place of a tensor's rows in a table."""

    table: HostTable
    field: str
    before: int  # number of the field's rows before `rows`
    rows: Tensor  # in the table's memory
    blocks: _Ranges  # the tensor's rows on this rank, and their places in `rows`

    @property
    def first(self) -> int:
        """The first of these rows in the table."""
        return self.before + (self.blocks[0][1].start if self.blocks else 0)


SavedVersions = list[tuple[str, _Place, int]]
"""Keys, the places of their rows in tables, and the versions up to which the rows are saved."""


@dataclass(frozen=True)
class Changed(Generic[_Written]):
    """The changed rows of a tensor, and their ids."""

    group: Hashable  # equal for tensors with the same ids
    rows: _Written
    ids: _Written


class ChangedTensor(NamedTuple):
    """Changes of a table's rows that a checkpoint has."""

    key: str
    tensor: Tensor  # all rows, in the table's memory
    changes: list[tuple[Tensor, Tensor]]  # ids and rows, in writing order


def changed_rows(
    base: SavedGeneration, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, Changed[Tensor | SelectedRows]]]:
    """Yields, by key, the rows that have changed since a checkpoint.

    Skips tensors whose changes are unknown. Begins to track changes of their tables if possible.
    """
    changed: dict[tuple[HostTable, int], Tensor] = {}
    groups: dict[Hashable, str] = {}
    for key, tensor in tensors.items():
        if isinstance(tensor, RowShard) and not tensor.blocks and base.has(key, tensor):
            nothing = torch.empty(0, dtype=torch.int64, device="cpu")
            yield key, Changed("", SelectedRows(tensor.field, nothing), nothing)
            continue
        if (place := place_of(tensor)) is None:
            continue
        table = place.table
        version = _known.get(table, {}).get((base.digest, key, place.field, place.first))
        if table.changes is None and table.can_track_changes and not table.is_captured:
            table.track_changes()
        if version is None or not base.has(key, tensor):
            continue
        if (table, version) not in changed:
            changed[table, version] = table.changed(version)
        field_ids = changed[table, version] - place.before
        is_own, ids = _across(field_ids, [(local, whole) for whole, local in place.blocks])
        group = groups.setdefault((table, version, place.before, tuple(place.blocks)), key)
        yield key, Changed(group, SelectedRows(place.rows, field_ids[is_own]), ids)


def begin_versions(tensors: Mapping[str, Tensor]) -> SavedVersions:
    """Begins a new version of each table that tracks changes; returns the versions of tensors."""
    found = [(key, place_of(tensor)) for key, tensor in tensors.items()]
    tracked = [(key, place) for key, place in found if place and place.table.changes]
    begun = {table: table.track_changes() for table in {place.table for _, place in tracked}}
    return [(key, place, begun[place.table]) for key, place in tracked]


def remember(digest: str, versions: SavedVersions) -> None:
    """Records that the checkpoint with this digest has the rows of these versions."""
    for key, place, version in versions:
        of_table, what = _known.setdefault(place.table, {}), (digest, key, place.field, place.first)
        of_table.pop(what, None)
        of_table[what] = version
        for oldest in list(of_table)[:-_MOST_KNOWN]:
            of_table.pop(oldest, None)


def write_changes(tensors: Sequence[ChangedTensor], base: str) -> SavedVersions:
    """Writes the changed rows of tensors to their tables; skips rows of other ranks.

    Returns the versions of tensors that then have all rows of the loaded checkpoint. Before the
    writes, all other rows of such a tensor were those of the checkpoint with the digest `base`.
    """
    known = {given.key: given.tensor for given in tensors if _differs_only_in(given, base)}
    for given in tensors:
        place = place_of(given.tensor)
        assert place is not None
        for ids, rows in given.changes:
            is_own, at = _across(ids, place.blocks)
            own = rows if len(at) == len(ids) else rows[is_own]
            place.table.scatter(at + place.before, own, place.field)
    return begin_versions(known)


def _differs_only_in(given: ChangedTensor, base: str) -> bool:
    """Whether a table is known to have all rows of a checkpoint that are not among the changes."""
    place = place_of(given.tensor)
    if place is None or place.table.changes is None:
        return False
    version = _known.get(place.table, {}).get((base, given.key, place.field, place.first))
    if version is None:
        return False
    own = place.table.changed(version) - place.before
    _, ids = _across(own, [(local, whole) for whole, local in place.blocks])
    changes = [ids[:0], *(changed for changed, _ in given.changes)]
    return bool(torch.isin(ids, torch.cat(changes)).all())


def unchanged(versions: SavedVersions) -> SavedVersions:
    """The entries whose tables have not changed since their versions."""
    return [entry for entry in versions if not len(entry[1].table.changed(entry[2]))]


def are_same(tensor: Tensor, stored: Tensor) -> bool:
    """Whether this rank's rows of both have equal bytes; False if no changes are tracked."""
    place = place_of(tensor)
    if place is None or place.table.changes is None:
        return False
    place.table.settle_to_read()
    return have_same_bytes(
        (place.rows[local.start : local.stop], stored[whole.start : whole.stop])
        for whole, local in place.blocks
    )


def place_of(tensor: Tensor) -> _Place | None:
    """The place of a tensor's rows in their table; None if the tensor belongs to no table."""
    rows = tensor.field if isinstance(tensor, RowShard) else tensor
    if (found := field_rows(rows)) is None:
        return None
    every = range(len(rows))
    blocks = tensor.blocks if isinstance(tensor, RowShard) else [(every, every)]
    return _Place(found.table, found.field, found.first, rows, blocks)


def _across(ids: Tensor, ranges: _Ranges) -> tuple[Tensor, Tensor]:
    """Maps ids from the first range of each pair to the second: a mask `[n]`, and the mapped ids.

    Ranges ascend, and ids are on the CPU. The mask is False for ids outside of all first ranges.
    """
    if not ranges:
        return torch.zeros_like(ids, dtype=torch.bool), ids[:0]
    numbers = [(source.start, source.stop, to.start - source.start) for source, to in ranges]
    begins, ends, moves = torch.tensor(numbers, device="cpu").t().contiguous()
    at = torch.searchsorted(begins, ids, right=True) - 1
    is_inside = (at >= 0) & (ids < ends[at])
    return is_inside, (ids + moves[at])[is_inside]

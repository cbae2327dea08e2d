"""Deltas: chooses the tensors of an incremental checkpoint, with only changed rows of tables."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from speedtorch.checkpoints.change_tracking import Changed, changed_rows
from speedtorch.checkpoints.generations import chosen
from speedtorch.checkpoints.joined_files import JoinedRows
from speedtorch.checkpoints.saved_generation import SavedGeneration
from speedtorch.checkpoints.saved_tensors import SavedTensors
from speedtorch.files.field_blocks import SelectedRows
from speedtorch.parallel.collectives import Collectives, run_on_all
from speedtorch.table.row_shard import RowShard

__all__ = ["Change", "change_since"]

_Written = TypeVar("_Written")

LONGEST_CHAIN = 256  # a load uses one file descriptor for each file of the chain
_IDS = "changed rows"  # prefix of the ids' keys


class Change(NamedTuple):
    """The tensors to write, by key."""

    base: SavedGeneration | None
    own: dict[str, Tensor | SelectedRows]  # written by one process, the first rank
    shared: dict[str, JoinedRows]  # written by all ranks together
    ids_of: dict[str, str]  # the key of changed rows -> the key of their ids

    @property
    def base_number(self) -> int | None:
        """The number of the base, or None."""
        return None if self.base is None else self.base.number


def change_since(
    ranks: Collectives, folder: str, base: int | None, tensors: SavedTensors
) -> Change:
    """Finds the changes since `base`; all tensors without a base, or if its chain is too long."""

    def full_change() -> Change:
        """All rows of all tensors."""
        shared = {key: JoinedRows.of(rows) for key, rows in tensors.shared.items()}
        return Change(None, {**tensors.by_key}, shared, {})

    if base is None:
        return full_change()
    opened: list[SavedGeneration] = []
    changed: dict[str, Changed[Tensor | SelectedRows]] = {}

    def find_changes() -> tuple[dict[str, tuple[Hashable, int]], list[str]] | None:
        """Returns groups and counts of changed rows, and taken keys; None for a long chain."""
        opened.append(SavedGeneration.opened(folder, chosen(folder, base)))
        if len(opened[0].chain) > LONGEST_CHAIN:
            return None
        changed.update(changed_rows(opened[0], tensors.all_by_key))
        counts = {key: (change.group, change.ids.shape[0]) for key, change in changed.items()}
        return counts, [key for key in tensors.by_key if key.startswith(_IDS)]

    found = [changes for changes in run_on_all(ranks, find_changes) if changes is not None]
    if len(found) < ranks.size:
        return full_change()
    of_ranks, (names, *_) = zip(*found, strict=True)
    joined = dict(_joined(tensors.shared, changed, of_ranks, ranks.rank))
    rest = {key: JoinedRows.of(rows) for key, rows in tensors.shared.items() if key not in joined}
    shared, ids_of = _delta(rest, joined, taken={*tensors.shared, *names})
    local = {key: change for key, change in changed.items() if key in tensors.by_key}
    own, own_ids_of = _delta(tensors.by_key, local, taken=shared)
    return Change(opened[0], own, shared, own_ids_of | ids_of)


def _delta(
    tensors: Mapping[str, _Written],
    changed: Mapping[str, Changed[_Written]],
    taken: Collection[str],
) -> tuple[dict[str, _Written], dict[str, str]]:
    """Replaces `changed` tensors by their changed rows and ids; also returns the ids' keys.

    The ids' keys are new and not in `taken`. The second dict maps the rows' keys to them.
    """
    made, ids_of, names = dict(tensors), dict[str, str](), dict[Hashable, str]()
    for key, change in changed.items():
        if change.group not in names:
            found = (f"{_IDS}.{number}" for number in itertools.count(1))
            names[change.group] = next(n for n in found if n not in made and n not in taken)
            made[names[change.group]] = change.ids
        made[key], ids_of[key] = change.rows, names[change.group]
    return made, ids_of


def _joined(
    shared: Mapping[str, RowShard],
    own: Mapping[str, Changed[Tensor | SelectedRows]],
    every: Sequence[Mapping[str, tuple[Hashable, int]]],
    rank: int,
) -> Iterator[tuple[str, Changed[JoinedRows]]]:
    """Yields the joined changed rows, by key, of `shared` tensors whose changes all ranks know.

    `own` has this rank's changes; `every` has each rank's groups and numbers of changed rows.
    """
    for key, rows in shared.items():
        of_ranks = [known[key] for known in every if key in known]
        if len(of_ranks) < len(every):
            continue
        counts = [count for _, count in of_ranks]
        total, first = sum(counts), sum(counts[:rank])
        shape = (total, *rows.shape[1:])
        yield (
            key,
            Changed(
                tuple(group for group, _ in of_ranks),
                JoinedRows(shape, rows.dtype, {first: own[key].rows}),
                JoinedRows((total,), torch.int64, {first: own[key].ids}),
            ),
        )

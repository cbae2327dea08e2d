"""change_since: the tensors of an incremental checkpoint, with only changed rows of tables."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from speedtorch.checkpoints.change_tracking import Changed, changed_rows
from speedtorch.checkpoints.generations import existing_number
from speedtorch.checkpoints.joined_files import JoinedRows
from speedtorch.checkpoints.saved_generation import SavedGeneration
from speedtorch.checkpoints.saved_tensors import SavedTensors
from speedtorch.files.field_blocks import SelectedRows
from speedtorch.parallel.collectives import Collectives, run_on_all
from speedtorch.table.row_shard import RowShard

__all__ = ["TensorsToWrite", "change_since"]

_Written = TypeVar("_Written")

LONGEST_CHAIN = 256  # a load uses one file descriptor for each file of the chain
_IDS = "changed rows"  # prefix of the ids' keys


class TensorsToWrite(NamedTuple):
    """The tensors to write, by key."""

    base: SavedGeneration | None
    of_first_rank: dict[str, Tensor | SelectedRows]  # empty on other ranks
    shared: dict[str, JoinedRows]  # written by all ranks together
    ids_of: dict[str, str]  # the key of changed rows -> the key of their ids

    @property
    def base_number(self) -> int | None:
        """The number of the base, or None."""
        return None if self.base is None else self.base.number


def change_since(
    ranks: Collectives, folder: str, base: int | None, tensors: SavedTensors
) -> TensorsToWrite:
    """Finds the changes since `base`.

    Without a base, or if its chain is too long on a rank, returns all tensors as a whole.
    """

    def all_tensors() -> TensorsToWrite:
        """All rows of all tensors."""
        shared = {key: JoinedRows.of(rows) for key, rows in tensors.shared.items()}
        return TensorsToWrite(None, {**tensors.by_key}, shared, {})

    if base is None:
        return all_tensors()
    opened: list[SavedGeneration] = []
    changed: dict[str, Changed[Tensor | SelectedRows]] = {}

    def find_changes() -> tuple[dict[str, tuple[Hashable, int]], list[str]] | None:
        """Returns the group and number of changed rows by key, and keys that begin like ids' keys.

        Returns None if the chain is too long.
        """
        opened.append(SavedGeneration.opened(folder, existing_number(folder, base)))
        if len(opened[0].chain) > LONGEST_CHAIN:
            return None
        changed.update(changed_rows(opened[0], tensors.all_by_key))
        counts = {key: (change.group, change.ids.shape[0]) for key, change in changed.items()}
        return counts, [key for key in tensors.by_key if key.startswith(_IDS)]

    found = [changes for changes in run_on_all(ranks, find_changes) if changes is not None]
    if len(found) < ranks.size:
        return all_tensors()
    by_rank, (keys, *_) = zip(*found, strict=True)
    joined = dict(_joined(tensors.shared, changed, by_rank, ranks.rank))
    rest = {key: JoinedRows.of(rows) for key, rows in tensors.shared.items() if key not in joined}
    shared, ids_of = _delta(rest, joined, taken={*tensors.shared, *keys})
    local = {key: change for key, change in changed.items() if key in tensors.by_key}
    of_first_rank, local_ids_of = _delta(tensors.by_key, local, taken=shared)
    return TensorsToWrite(opened[0], of_first_rank, shared, local_ids_of | ids_of)


def _delta(
    tensors: Mapping[str, _Written],
    changed: Mapping[str, Changed[_Written]],
    taken: Collection[str],
) -> tuple[dict[str, _Written], dict[str, str]]:
    """Replaces `changed` tensors by their changed rows and ids; also returns the ids' keys.

    The ids' keys are new and not in `taken`. The second dict maps the rows' keys to them.
    """
    made, ids_of, ids_keys = dict(tensors), dict[str, str](), dict[Hashable, str]()
    for key, change in changed.items():
        if change.group not in ids_keys:
            free = (f"{_IDS}.{number}" for number in itertools.count(1))
            ids_keys[change.group] = next(k for k in free if k not in made and k not in taken)
            made[ids_keys[change.group]] = change.ids
        made[key], ids_of[key] = change.rows, ids_keys[change.group]
    return made, ids_of


def _joined(
    shared: Mapping[str, RowShard],
    of_this_rank: Mapping[str, Changed[Tensor | SelectedRows]],
    by_rank: Sequence[Mapping[str, tuple[Hashable, int]]],
    rank: int,
) -> Iterator[tuple[str, Changed[JoinedRows]]]:
    """Yields the joined changed rows, by key, of `shared` tensors whose changes all ranks know.

    `by_rank` has each rank's groups and numbers of changed rows.
    """
    for key, rows in shared.items():
        known = [changes[key] for changes in by_rank if key in changes]
        if len(known) < len(by_rank):
            continue
        counts = [count for _, count in known]
        total, first = sum(counts), sum(counts[:rank])
        shape = (total, *rows.shape[1:])
        yield (
            key,
            Changed(
                tuple(group for group, _ in known),
                JoinedRows(shape, rows.dtype, {first: of_this_rank[key].rows}),
                JoinedRows((total,), torch.int64, {first: of_this_rank[key].ids}),
            ),
        )

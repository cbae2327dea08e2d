"""Deltas: chooses the tensors of an incremental checkpoint, with only changed rows of tables."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from speedtorch.checkpoints.generations import chosen
from speedtorch.checkpoints.joined_files import JoinedRows
from speedtorch.checkpoints.noted_rows import Changed, changed_rows
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

    against: SavedGeneration | None  # the base
    own: dict[str, Tensor | SelectedRows]  # written by one process, the first rank
    shared: dict[str, JoinedRows]  # written by all ranks together
    ids_of: dict[str, str]  # the key of changed rows -> the key of their ids

    @property
    def base(self) -> int | None:
        """The number of the base, or None."""
        return None if self.against is None else self.against.number


def change_since(
    ranks: Collectives, folder: str, base: int | None, tensors: SavedTensors
) -> Change:
    """Finds the changes since `base` that all ranks know; all tensors if its chain is too long."""

    def whole() -> Change:
        shared = {key: JoinedRows.of(each) for key, each in tensors.shared.items()}
        return Change(None, {**tensors.by_key}, shared, {})

    if base is None:
        return whole()
    opened: list[SavedGeneration] = []
    changed: dict[str, Changed[Tensor | SelectedRows]] = {}

    def look() -> tuple[dict[str, tuple[Hashable, int]], list[str]] | None:
        opened.append(SavedGeneration.opened(folder, chosen(folder, base)))
        if len(opened[0].chain) > LONGEST_CHAIN:
            return None
        changed.update(changed_rows(opened[0], tensors.all_by_key))
        counts = {key: (each.group, each.ids.shape[0]) for key, each in changed.items()}
        return counts, [key for key in tensors.by_key if key.startswith(_IDS)]

    every = [each for each in run_on_all(ranks, look) if each is not None]
    if len(every) < ranks.size:
        return whole()
    of_ranks, (names, *_) = zip(*every, strict=True)
    together = dict(_joined(tensors.shared, changed, of_ranks, ranks.rank))
    rest = {k: JoinedRows.of(each) for k, each in tensors.shared.items() if k not in together}
    shared, ids_of = _delta(rest, together, taken={*tensors.shared, *names})
    alone = {key: each for key, each in changed.items() if key in tensors.by_key}
    own, own_ids_of = _delta(tensors.by_key, alone, taken=shared)
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
    for key, each in changed.items():
        if each.group not in names:
            found = (f"{_IDS}.{number}" for number in itertools.count(1))
            names[each.group] = next(e for e in found if e not in made and e not in taken)
            made[names[each.group]] = each.ids
        made[key], ids_of[key] = each.rows, names[each.group]
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
    for key, each in shared.items():
        of_ranks = [known[key] for known in every if key in known]
        if len(of_ranks) < len(every):
            continue
        counts = [count for _, count in of_ranks]
        total, first = sum(counts), sum(counts[:rank])
        shape = (total, *each.shape[1:])
        yield (
            key,
            Changed(
                tuple(group for group, _ in of_ranks),
                JoinedRows(shape, each.dtype, {first: own[key].rows}),
                JoinedRows((total,), torch.int64, {first: own[key].ids}),
            ),
        )

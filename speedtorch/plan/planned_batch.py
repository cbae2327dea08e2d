"""The distinct rows that a batch names, where each of them will be held, and how many they are.

Everything is computed on the device of the rows without waiting; only the counts come to the host,
and only when they are asked for. With the rows of an earlier batch given, a batch also knows
which rows it has in common with that one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from operator import is_
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from speedtorch.ops.functions import _ops, not_ids, plan_batch, sum_rows
from speedtorch.plan.host_copy import HostCopy
from speedtorch.torch_internals import version_of

__all__ = [
    "ID_DTYPES",
    "BatchIds",
    "LoadedBatch",
    "PlannedBatch",
    "SeenIds",
    "SeenTensors",
    "check_ids",
]

_Made = TypeVar("_Made")

# Places among the counts, of which those of the plan's status come first.
_DISTINCT, _STATUS_FIELDS, _ARRIVING, _LEAVING = 3, 8, 10, 11

_KEY_IDS = 256  # at most, by which ids are told apart

ID_DTYPES = frozenset({torch.int64, torch.int32})


def check_ids(name: str, ids: object, numbers: type[Exception] = TypeError) -> None:
    """Raises TypeError, or for tensors of other numbers `numbers`, unless torch looks these up."""
    if not isinstance(ids, Tensor):
        raise not_ids(name, ids)
    is_dense = ids.layout == torch.strided and not ids.is_nested
    if ids.dtype not in ID_DTYPES or not is_dense or ids.is_meta:
        if ids.is_meta:
            raise NotImplementedError(f"{name}: ids on the meta device have no values to look up")
        expected = f"{name}: expected a dense int32 or int64 tensor, got"
        if ids.is_nested:
            raise numbers(
                f"{expected} a nested one: give its values(), and for bags its offsets() as well"
            )
        layout = "" if is_dense else f" in {ids.layout}"
        remedy = ": convert them with ids.long()" if is_dense else ""
        raise numbers(f"{expected} {ids.dtype} of shape {list(ids.shape)}{layout}{remedy}")


class SeenIds:
    """Ids that are recognised when they come again.

    Ids on the CPU are compared with a copy, which no other code writes to and which a GPU takes
    without waiting. Those that are to stay `unread`, as they lie on a GPU, must be the same tensor,
    unchanged. It is kept, and so is its memory, which it can be made to leave (`tensor.data =
    other`): no other tensor comes to lie there.
    """

    def __init__(self, ids: Tensor, device: torch.device, *, unread: bool) -> None:
        self.shape = ids.shape
        self._is_copy = ids.is_cpu and not unread
        self._unread: Tensor | None = None
        if not self._is_copy:
            self.values = ids.detach()
        elif device.type == "cuda":  # where they will be needed
            self.values = torch.empty_like(ids, pin_memory=True).copy_(ids)
        else:
            self.values = ids.clone()
        if unread and not ids.is_inference():  # such a tensor does not count its versions
            self._unread, self._state = ids, _state_of(ids)

    @classmethod
    def of_copy(cls, copied: Tensor, shape: torch.Size) -> SeenIds:
        """Ids of this shape on the CPU, of which there is a copy that nothing writes to."""
        seen = cls.__new__(cls)
        seen.shape, seen.values = shape, copied if len(shape) == 1 else copied.view(shape)
        seen._is_copy, seen._unread = True, None
        return seen

    @property
    def key(self) -> Hashable:
        """One of keys_of() the same ids."""
        return _value_key(self.values) if self._unread is None else id(self._unread)

    @staticmethod
    def keys_of(ids: Tensor) -> list[Hashable]:
        """Of ids that are looked up; other ids may have the same."""
        return [id(ids), _value_key(ids)] if ids.is_cpu else [id(ids)]

    @property
    def copied(self) -> Tensor | None:
        """A copy of the ids on the CPU, if that is how they are recognised."""
        return self.values if self._is_copy else None

    def are(self, ids: Tensor) -> bool:
        """Whether these are the ids, for certain."""
        if self._unread is not None:
            return ids is self._unread and _state_of(ids) == self._state
        same_kind = self._is_copy and ids.is_cpu and ids.dtype == self.values.dtype
        return same_kind and torch.equal(ids, self.values)

    def are_those(self, other: SeenIds) -> bool:
        """Whether both are the same ids, for certain."""
        if self._unread is None:
            return other._is_copy and self.are(other.values)
        return self._unread is other._unread and self._state == other._state


def _value_key(ids: Tensor) -> Hashable:
    """The values of ids, or some of them, where these are on the CPU."""
    if not ids.is_cpu:
        return None
    flat = ids.numpy().reshape(-1)
    return ids.shape, flat[:: flat.size // _KEY_IDS + 1].tobytes()


class SeenTensors:
    """The tensors of ids of several features, recognised together, each as SeenIds does.

    `unread` as there, of all of them; those on a GPU are unread in any case.
    """

    def __init__(
        self, tensors: Sequence[Tensor], device: torch.device, *, unread: bool = False
    ) -> None:
        self._each: list[SeenIds] = []
        self._tensors: list[Tensor] = []
        if any(not (unread or ids.is_cuda) or ids.is_inference() for ids in tensors):
            self._each = [SeenIds(ids, device, unread=unread or ids.is_cuda) for ids in tensors]
            return
        self._tensors, self._states = [*tensors], [*map(_state_of, tensors)]
        self._memory = [ids.untyped_storage() for ids in tensors]

    def are(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these, as many, are the tensors, for certain."""
        if self._each:
            return all(seen.are(ids) for seen, ids in zip(self._each, tensors, strict=True))
        if not all(map(is_, self._tensors, tensors)):
            return False
        return [*map(_state_of, tensors)] == self._states


def _state_of(ids: Tensor) -> tuple[Hashable, ...]:
    """What shows that a tensor has changed, without reading it."""
    return version_of(ids), ids.data_ptr(), ids.shape, ids.stride(), ids.dtype


class BatchIds:
    """The ids of a batch, of any shape on either device, one part for each of its lookups.

    `ids` are all of them, `[count]`, until they are planned: by plan_by_itself(), or together with
    those of other tables. `plan` is on the device of the rows, as plan_batch makes it. With
    `are_uploaded` the op that plans one part takes ids of the CPU for rows of a GPU, too.
    """

    plan: Sequence[Tensor]

    def __init__(
        self,
        parts: Sequence[Tensor],
        rows: int,
        device: torch.device,
        name: str,
        *,
        are_uploaded: bool = False,
    ) -> None:
        self.name = name
        self.rows = rows
        self._planned: torch.cuda.Event | None = None
        self._seen: list[SeenIds] = []
        self._begins = [0]
        self._uncopied: torch.Size | None = None
        """The shape of a part of which the plan makes the copy, `_seen`."""
        if len(parts) == 1 and parts[0].is_cpu and (device.type == "cpu" or are_uploaded):
            self._uncopied = parts[0].shape
            self._begins.append(parts[0].numel())
            ids = parts[0].detach()
            self.ids: Tensor | None = ids if ids.dim() == 1 else ids.reshape(-1)
            return
        flat = []
        for part in parts or [torch.empty(0, dtype=torch.int64)]:
            seen = SeenIds(part, device, unread=part.is_cuda)
            ids = seen.values if len(seen.shape) == 1 else seen.values.reshape(-1)
            if ids.device != device:  # without a wait towards a GPU
                ids = ids.to(device, non_blocking=device.type == "cuda")
            self._seen.append(seen)
            self._begins.append(self._begins[-1] + ids.shape[0])
            flat.append(ids)
        self.ids = flat[0] if len(flat) == 1 else torch.cat(flat)

    def plan_by_itself(self, *others: object) -> list[Tensor]:
        """Plans the ids; gives what plan_batch makes of them and of these arguments.

        The plan comes first in that. It has as many entries as the batch has ids, because the
        number of distinct ids is still on the device: -1 follows them.

        Raises IndexError if rows are held on the CPU and an id is out of range.
        """
        return self.plan_by(plan_batch, *others)

    def plan_by(self, plan: Callable[..., list[Tensor]], *others: object) -> list[Tensor]:
        """As plan_by_itself, by an op that gives more, and of ids on the CPU a copy as the last."""
        try:
            made = plan(self.ids, self.rows, *others)
        except IndexError as error:  # "<op>: id 5 at position 1 of <argument> is ..."
            told = str(error).partition(": ")[2].replace(" of index", "", 1)
            raise IndexError(f"{self.name}: {told}") from None
        if self._uncopied is not None:
            self._seen.append(SeenIds.of_copy(made[-1], self._uncopied))
        self.plan, self.ids = made[:5], None
        return made

    def planned_as(self, plan: Sequence[Tensor]) -> None:
        """Gives the plan of the ids, which were planned with those of other tables."""
        if self._uncopied is not None and self.ids is not None:
            self._seen.append(SeenIds.of_copy(self.ids.clone(), self._uncopied))
        self.plan, self.ids = plan, None

    def __len__(self) -> int:
        """How many parts there are."""
        return len(self._begins) - 1

    @property
    def count(self) -> int:
        """Ids in all."""
        return self._begins[-1]

    def begin(self, part: int) -> int:
        """How many ids come before those of a part."""
        return self._begins[part]

    def part_of(self, ids: Tensor) -> int | None:
        """Which of the parts these ids are, if they are known to be one."""
        for part, seen in enumerate(self._seen):
            if seen.are(ids):
                return part
        return None

    def keys(self) -> Iterator[Hashable]:
        """Of each part, as SeenIds has it."""
        return (seen.key for seen in self._seen)

    def is_part(self, part: int, ids: Tensor) -> bool:
        """Whether these ids are known to be that part."""
        return self._seen[part].are(ids)

    def is_same(self, part: int, others: BatchIds, other: int) -> bool:
        """Whether a part's ids are known to be those of a part of others."""
        return self._seen[part].are_those(others._seen[other])

    def shape(self, part: int) -> torch.Size:
        """Of the ids of a part."""
        return self._seen[part].shape

    def values(self, part: int) -> Tensor | None:
        """The ids of a part, if the CPU has them."""
        return self._seen[part].copied

    def local(self, part: int, places: Tensor | None = None) -> Tensor:
        """The places of the rows that a part names, in the part's shape.

        `places` are those of the distinct rows; by default their order.
        """
        entries = self.plan[1]
        if len(self._seen) > 1:
            begin = self._begins[part]
            entries = entries.narrow(0, begin, self._begins[part + 1] - begin)
        local, shape = entries if places is None else places[entries], self._seen[part].shape
        return local if local.shape == shape else local.view(shape)

    def tensors(self) -> Iterator[Tensor]:
        """The plan, and the ids that are kept."""
        yield from self.plan
        yield from (seen.values for seen in self._seen)

    def planned_until(self, event: torch.cuda.Event | None) -> None:
        """Says after which event the plan is there, if it is made beside the current stream."""
        self._planned = event

    def join(self) -> None:
        """What the current stream gets from now on begins when the plan is there."""
        if self._planned is not None:
            torch.cuda.current_stream(self._planned.device).wait_event(self._planned)
            self._planned = None

    def error(self, bad: int, position: int, bad_id: int) -> IndexError:
        """The error about so many ids out of range, the first of them at a position."""
        return IndexError(
            f"{self.name}: id {bad_id} at position {position} is out of range for a table of"
            f" {self.rows} rows ({bad} of {self.count} ids are out of range); no row was moved"
        )


def _held_before(after: Planned | Tensor) -> tuple[Tensor, Tensor]:
    """The ids of held rows, ascending, and the status that counts them; empty: all count."""
    if isinstance(after, Tensor):
        return after, after[:0]
    return after.parts.plan[0], after.parts.plan[4]


class Planned(Protocol):
    """Rows that are held are those of a plan."""

    parts: BatchIds


class Joint(Protocol):
    """The batches of several tables, planned as one."""

    bounds: list[int]
    """Where the rows of each table begin among those of all, and where the last ones end."""

    def count(self) -> bool:
        """Waits for the counts; whether all ids are good."""


class PlannedBatch:
    """The distinct rows of a batch, in address order: the order in which a step holds them.

    The ids of all `parts` are the batch. The row of the padding follows those, whether it is named
    or not. `following()` is the batch that was planned after this one. Known after count() are
    `held`, the number of distinct rows without the padding's, `ids`, theirs, ascending: `[held]`,
    always the same tensor, and `loaded`, the ids with that of the padding behind them.

    Args:
        after: the batch whose rows are held before this one's, or ids of held rows, ascending.
        name: what errors call the module.
        joint: what `parts` are planned in, with those of other tables, and which alone has the
            lists of rows that arrive, stay and leave. The caller has counted the rows of all
            before, and no ids are bad.
        number: of the table in it.

    Raises:
        IndexError: rows are held on the CPU and an id is out of range; a GPU's are reported by
            count().
    """

    def __init__(
        self,
        parts: Sequence[Tensor] | BatchIds,
        rows: int,
        device: torch.device,
        padding: int | None = None,
        *,
        after: Planned | Tensor | None = None,
        name: str = "ids",
        joint: Joint | None = None,
        number: int = 0,
    ) -> None:
        self.device = device
        self._padding = padding
        self.parts = parts if isinstance(parts, BatchIds) else BatchIds(parts, rows, device, name)
        self.following: Callable[[], PlannedBatch | None] = lambda: None
        self.joint, self._number = joint, number
        self._is_counted = False
        if joint is None:
            others = () if after is None else _held_before(after)
            made = self.parts.plan_by_itself(-1 if padding is None else padding, -1, *others)
            self._uncounted, self._changes = HostCopy(made[4]), made[5:11]
        if isinstance(after, PlannedBatch):
            after.following = weakref.ref(self)

    def tensors(self) -> Iterator[Tensor]:
        """All that is kept on the device of the rows."""
        yield from self.parts.tensors()
        if self.joint is None:
            yield from self._changes

    def count(self) -> None:
        """Waits for the counts; IndexError if an id on a GPU is out of range."""
        if self._is_counted:
            return
        if self.joint is not None:
            first, end = self.joint.bounds[self._number : self._number + 2]
            self.held = end - first
        else:
            counts = self._uncounted.read()
            bad, position, bad_id, self.held, *_ = counts
            if bad:
                raise self.parts.error(bad, position, bad_id)
            if len(counts) > _STATUS_FIELDS:
                self._arriving, self._leaving = counts[_ARRIVING], counts[_LEAVING]
        unique = self.parts.plan[0]
        self.ids = self.loaded = unique[: self.held]
        if self._padding is not None:
            self.loaded = unique[: self.held + 1]
        self._is_counted = True

    @property
    def brings(self) -> int:
        """How many rows were not held before, without the padding's."""
        self.count()
        return self._arriving - (self._padding is not None)

    @property
    def arriving(self) -> tuple[Tensor, Tensor]:
        """Ids and places of the rows that were not held before, then those of the padding."""
        return self._listed(0)

    @property
    def staying(self) -> tuple[Tensor, Tensor]:
        """Places now and before of the rows that were held before as well."""
        return self._listed(1)

    @property
    def leaving(self) -> tuple[Tensor, Tensor]:
        """Ids and places before of the rows that this batch does not name."""
        return self._listed(2)

    def _listed(self, change: int) -> tuple[Tensor, Tensor]:
        self.count()
        count = (self._arriving, self.held - self.brings, self._leaving)[change]
        ids, places = self._changes[2 * change : 2 * change + 2]
        return ids[:count], places[:count]

    def places_among(self, ids: Tensor) -> Tensor:
        """Where its distinct rows are among others, which are held with them: `ids` ascending."""
        unique = self.parts.plan[0]
        places = torch.searchsorted(ids, unique)
        if self._padding is not None:
            places = torch.where(unique == self._padding, len(ids), places)
        return places

    def summed(self, rows: Tensor, part: int, source: Tensor | None) -> Tensor:
        """The gradients of the rows that a part looked up, added up for each row of the batch.

        `rows` are those of its ids, or with `source` those that it names for each id. The padding's
        gradient is zeros.
        """
        parts, plan, begin = self.parts, self.parts.plan, self.parts.begin(part)
        if self._padding is None:
            return sum_rows(rows, plan, parts.rows, begin=begin, distinct=self.held, source=source)
        summed: Tensor = _ops.sum_rows(
            rows, list(plan), parts.rows, begin, self.held + 1, source, plan[4][3:4]
        )
        return summed


class LoadedBatch(PlannedBatch):
    """A batch of one lookup's ids, whose rows were loaded when it was planned and counted.

    `brought` are the rows, field by field.

    Args:
        load: RowStore.load_batch, of the ids, the number of rows and the padding.
        ids, rows, device, padding, name: As for PlannedBatch.

    Raises:
        IndexError: An id is out of range; no row has moved.
    """

    def __init__(
        self,
        ids: Tensor,
        rows: int,
        device: torch.device,
        padding: int | None,
        load: Callable[..., list[Tensor]],
        name: str,
    ) -> None:
        self.device = device
        self._padding = padding
        self.following: Callable[[], PlannedBatch | None] = lambda: None
        self.joint = None
        self.parts = parts = BatchIds([ids], rows, device, name, are_uploaded=True)
        made = parts.plan_by(load, -1 if padding is None else padding)
        self.ids, self.loaded, *self.brought = made[5:-1] if ids.is_cpu else made[5:]
        self.held = self.ids.shape[0]
        self._changes, self._is_counted = [], True

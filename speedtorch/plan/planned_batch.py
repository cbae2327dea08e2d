"""The unique rows of a batch: their ids, their positions in a step, and their number.

All results are computed on the device of the rows. The host copies only the counts, and waits for
them only in `count()`, or in the constructor of a LoadedBatch. A batch that follows an earlier
batch also lists which rows the two have in common.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from operator import is_
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from speedtorch._C import NumbersHandle
from speedtorch.ops.functions import _ops, not_ids, plan_parts
from speedtorch.plan.host_copy import HostCopy
from speedtorch.torch_internals import version_of

__all__ = [
    "ID_DTYPES",
    "BatchIds",
    "LoadedBatch",
    "PlannedAhead",
    "PlannedBatch",
    "SeenIds",
    "SeenTensors",
    "check_ids",
]

_Made = TypeVar("_Made")

# Positions in the counts. The fields of the plan's status come first.
_DISTINCT, _STATUS_FIELDS, _INCOMING, _OUTGOING = 3, 8, 10, 11

_KEY_IDS = 256  # the maximum number of ids in a key

_MANY_PARTS = 8  # alone() plans a part again if the batch has more than so many times its ids

ID_DTYPES = frozenset({torch.int64, torch.int32})


def check_ids(name: str, ids: object, numbers: type[Exception] = TypeError) -> None:
    """Raises TypeError unless `ids` is a tensor, and `numbers` for another dtype or layout.

    A tensor on the meta device raises NotImplementedError.
    """
    if not isinstance(ids, Tensor):
        raise not_ids(name, ids)
    is_dense = ids.layout == torch.strided and not ids.is_nested
    if ids.dtype not in ID_DTYPES or not is_dense or ids.is_meta:
        if ids.is_meta:
            raise NotImplementedError(f"{name}: ids on the meta device have no values to look up")
        expected = f"{name}: expected a dense int32 or int64 tensor, got"
        if ids.is_nested:
            raise numbers(
                f"{expected} a nested tensor. Pass its values(), and for bags also its offsets()."
            )
        layout = "" if is_dense else f" in {ids.layout}"
        remedy = ". Convert them with ids.long()." if is_dense else ". Pass ids.to_dense()."
        raise numbers(f"{expected} {ids.dtype} of shape {list(ids.shape)}{layout}{remedy}")


class SeenIds:
    """Ids of an earlier call, which later calls can recognise.

    Ids on the CPU are compared with a private copy that no other code writes to. A GPU loads that
    copy without a wait. `unread` ids, such as those on a GPU, must be the same tensor, unchanged.
    Their tensor and its storage are kept alive. `tensor.data = other` can replace the tensor's
    storage, but no other tensor is allocated at the old address.
    """

    def __init__(self, ids: Tensor, device: torch.device, *, unread: bool) -> None:
        self.shape = ids.shape
        self._is_copy = ids.is_cpu and not unread
        self._unread: Tensor | None = None
        if not self._is_copy:
            self.values = ids.detach()
        elif device.type == "cuda":  # pinned, for a copy to the GPU without a wait
            self.values = torch.empty_like(ids, pin_memory=True).copy_(ids)
        else:
            self.values = ids.clone()
        if unread and not ids.is_inference():  # such a tensor does not count its versions
            self._unread, self._state = ids, _state_of(ids)

    @classmethod
    def of_copy(cls, copied: Tensor, shape: torch.Size, begin: int) -> SeenIds:
        """Ids of this shape on the CPU, from index `begin` of a copy that no code writes to."""
        seen = cls.__new__(cls)
        seen.shape, seen.values = shape, copied
        if copied.shape != shape:
            seen.values = _view(copied, shape, begin)
        seen._is_copy, seen._unread = True, None
        return seen

    @property
    def key(self) -> Hashable:
        """A key of these ids, which is one of `keys_of()` for equal ids."""
        return _value_key(self.values) if self._unread is None else id(self._unread)

    @staticmethod
    def keys_of(ids: Tensor) -> list[Hashable]:
        """The keys under which ids may be stored; different ids may have equal keys."""
        return [id(ids), _value_key(ids)] if ids.is_cpu else [id(ids)]

    @property
    def copied(self) -> Tensor | None:
        """The private copy of the ids on the CPU, if they are recognised by value."""
        return self.values if self._is_copy else None

    def matches(self, ids: Tensor) -> bool:
        """Whether `ids` certainly equal the recorded ids."""
        if self._unread is not None:
            return ids is self._unread and _state_of(ids) == self._state
        same_kind = self._is_copy and ids.is_cpu and ids.dtype == self.values.dtype
        return same_kind and torch.equal(ids, self.values)

    def matches_seen(self, other: SeenIds) -> bool:
        """Whether both objects certainly record the same ids."""
        if self._unread is None:
            return other._is_copy and self.matches(other.values)
        return self._unread is other._unread and self._state == other._state


def _view(tensor: Tensor, shape: Sequence[int], begin: int = 0) -> Tensor:
    """A view of contiguous elements from `begin` on; slices, narrow() and reshape() are slower."""
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    return tensor.as_strided(shape, strides[: len(shape)], tensor.storage_offset() + begin)


def _flat(ids: Tensor) -> Tensor:
    if ids.dim() == 1:
        return ids
    return _view(ids, (ids.numel(),)) if ids.is_contiguous() else ids.reshape(-1)


def _value_key(ids: Tensor) -> Hashable:
    """The shape and a sample of the values of ids on the CPU; None for ids on a GPU."""
    if not ids.is_cpu:
        return None
    flat = ids.numpy().reshape(-1)
    return ids.shape, flat[:: flat.size // _KEY_IDS + 1].tobytes()


class SeenTensors:
    """The id tensors of several features, recognised together by the rules of SeenIds.

    `unread` applies to all tensors. Tensors on a GPU are always unread.
    """

    def __init__(
        self, tensors: Sequence[Tensor], device: torch.device, *, unread: bool = False
    ) -> None:
        self._seen: list[SeenIds] = []
        self._tensors: list[Tensor] = []
        if any(not (unread or ids.is_cuda) or ids.is_inference() for ids in tensors):
            self._seen = [SeenIds(ids, device, unread=unread or ids.is_cuda) for ids in tensors]
            return
        self._tensors, self._states = [*tensors], [*map(_state_of, tensors)]
        self._memory = [ids.untyped_storage() for ids in tensors]

    def matches(self, tensors: Sequence[Tensor]) -> bool:
        """Whether `tensors`, of the same number, certainly equal the recorded tensors."""
        if self._seen:
            return all(seen.matches(ids) for seen, ids in zip(self._seen, tensors, strict=True))
        if not all(map(is_, self._tensors, tensors)):
            return False
        return [*map(_state_of, tensors)] == self._states


def _state_of(ids: Tensor) -> tuple[Hashable, ...]:
    """Properties that reveal a change of a tensor without a read of its values."""
    return version_of(ids), ids.data_ptr(), ids.shape, ids.stride(), ids.dtype


class PlannedAhead:
    """A plan that a side stream may compute."""

    _planned: torch.cuda.Event | None = None

    def planned_until(self, event: torch.cuda.Event | None) -> None:
        """Sets the event after which the plan is complete, if a side stream computes the plan."""
        self._planned = event

    def join(self) -> None:
        """Makes the current stream wait until the plan is complete, once."""
        if self._planned is not None:
            torch.cuda.current_stream(self._planned.device).wait_event(self._planned)
            self._planned = None


class BatchIds(PlannedAhead):
    """The ids of a batch, of any shape, on the CPU or a GPU, with one part per lookup.

    Ids are planned either with `plan_by()` or together with the ids of other tables. `plan` is the
    result of `plan_batch` on the device of the rows. With `are_uploaded` the op that plans a single
    part also accepts CPU ids for GPU rows.
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
        self._seen: list[SeenIds] = []
        self.number = len(parts) or 1
        """The number of parts."""
        self._begins = [0]
        self.unplanned: list[Tensor] = []
        """The ids of each part on the device of the rows, until they are planned."""
        self._uncopied: list[torch.Size] = []
        """The shapes of the parts, if the plan makes the copy for `_seen`."""
        parts = parts or [torch.empty(0, dtype=torch.int64)]
        dtype = parts[0].dtype
        is_copied = device.type == "cpu" or (are_uploaded and self.number == 1)
        for part in parts:
            self._begins.append(self._begins[-1] + part.numel())
            is_copied = is_copied and part.is_cpu and part.dtype == dtype
        for part in parts:
            if is_copied:
                self._uncopied.append(part.shape)
                ids = part.detach()
            else:
                seen = SeenIds(part, device, unread=part.is_cuda)
                self._seen.append(seen)
                ids = seen.values
                if ids.device != device:  # a copy to a GPU does not wait
                    ids = ids.to(device, non_blocking=device.type == "cuda")
            self.unplanned.append(ids)

    @property
    def ids(self) -> Tensor:
        """The unplanned ids of all parts, concatenated `[count]`."""
        flat = [*map(_flat, self.unplanned)]
        return flat[0] if len(flat) == 1 else torch.cat(flat)

    def plan_by(
        self, plan: Callable[..., list[Tensor]], ids: Tensor | list[Tensor], *args: object
    ) -> list[Tensor]:
        """Plans this object's `ids` or `unplanned`, and returns the results of the op `plan`.

        The results begin with those of plan_batch, and end for CPU ids with their copy. The number
        of unique ids is still on the device, so their list has as many entries as the batch has
        ids, padded with -1.

        Raises IndexError if the rows are on the CPU and an id is out of range.
        """
        try:
            made = plan(ids, self.rows, *args)
        except IndexError as error:  # "<op>: id 5 at position 1 of <argument> is ..."
            text = str(error).partition(": ")[2].replace(" of index", "", 1)
            raise IndexError(f"{self.name}: {text}") from None
        self._take(made[:5], made[-1])
        return made

    def planned_as(self, plan: Sequence[Tensor]) -> None:
        """Stores the plan of these ids, which were planned together with other tables' ids."""
        self._take(plan, self.ids.clone() if self._uncopied else None)

    def _take(self, plan: Sequence[Tensor], copied: Tensor | None) -> None:
        """Stores the plan, and the copy of the ids if there is none yet."""
        if self._uncopied and copied is not None:
            for begin, shape in zip(self._begins, self._uncopied, strict=False):
                self._seen.append(SeenIds.of_copy(copied, shape, begin))
            self._uncopied = []
        self.plan, self.unplanned = plan, []

    @property
    def count(self) -> int:
        """The number of ids in all parts."""
        return self._begins[-1]

    def begin(self, part: int) -> int:
        """The number of ids in all parts before this one."""
        return self._begins[part]

    def part_of(self, ids: Tensor) -> int | None:
        """The index of the part that certainly equals `ids`, or None."""
        for part, seen in enumerate(self._seen):
            if seen.matches(ids):
                return part
        return None

    def keys(self) -> Iterator[Hashable]:
        """The `SeenIds.key` of each part."""
        return (seen.key for seen in self._seen)

    def is_part(self, part: int, ids: Tensor) -> bool:
        """Whether `ids` certainly equal this part."""
        return self._seen[part].matches(ids)

    def is_same(self, part: int, batch: BatchIds, number: int) -> bool:
        """Whether a part certainly equals part `number` of another batch."""
        return self._seen[part].matches_seen(batch._seen[number])

    def shape(self, part: int) -> torch.Size:
        """The shape of a part's ids."""
        return self._seen[part].shape

    def values(self, part: int) -> Tensor | None:
        """The CPU copy of a part's ids, or None."""
        return self._seen[part].copied

    def local(self, part: int, places: Tensor | None = None) -> Tensor:
        """The positions of the rows that a part names, in the part's shape.

        `places` are the positions of all ids of the batch, by default among its unique rows.
        """
        entries, shape = self.plan[1] if places is None else places, self._seen[part].shape
        return entries if entries.shape == shape else _view(entries, shape, self._begins[part])

    def tensors(self) -> Iterator[Tensor]:
        """The tensors of the plan and the recorded ids."""
        yield from self.plan
        yield from (seen.values for seen in self._seen)

    def error(self, bad: int, position: int, bad_id: int) -> IndexError:
        """The error for `bad` ids out of range; the first bad id is at `position`."""
        return IndexError(
            f"{self.name}: id {bad_id} at position {position} is out of range for a table of"
            f" {self.rows} rows ({bad} of {self.count} ids are out of range); no row was moved"
        )


class Planned(Protocol):
    """A batch whose rows are listed in a plan."""

    parts: BatchIds


class Joint(Protocol):
    """The batches of several tables, planned as one."""

    bounds: list[int]
    """Cumulative row counts: table k has the rows from `bounds[k]` to `bounds[k + 1]`."""

    def count(self) -> bool:
        """Waits for the counts and returns whether all ids are in range."""


class PlannedBatch:
    """The unique rows of a batch in ascending order, which is their order in a step.

    The padding's row follows these rows, even if no id names the padding. `following()` is the
    batch that was planned after this one, or None.

    count() sets `held`, the number of unique rows without the padding's. It also sets `ids`
    `[held]`, the ascending ids, and `loaded`, `ids` followed by the padding. Later accesses return
    the same tensor objects.

    Args:
        parts: The ids of the batch: one tensor per lookup, or a BatchIds.
        rows: The number of rows of the table.
        device: The device of the step's rows.
        padding: The id of the padding's row, or None.
        after: The batch of the step before, or the ascending ids of that step's rows.
        name: The name of the module in errors.
        joint: The joint batch in which `parts` are planned with other tables' ids. Only it lists
            incoming, kept and outgoing rows. The caller must first check its ids with count().
        number: The index of the table in `joint`.

    Raises:
        IndexError: The rows are on the CPU and an id is out of range. For rows on a GPU, count()
            raises this error.
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
            held: tuple[Tensor, ...] = ()  # the earlier ids, and the status that counts them
            if isinstance(after, Tensor):
                held = after, _view(after, (0,))  # without a status all are valid
            elif after is not None:
                held = after.parts.plan[0], after.parts.plan[4]
            handle, number = NumbersHandle(), -1 if padding is None else padding
            unplanned = self.parts.unplanned
            made = self.parts.plan_by(plan_parts, unplanned, number, handle.number(), *held)
            self._uncounted, self._changes = HostCopy(made[4], handle), made[5:11]
        if isinstance(after, PlannedBatch):
            after.following = weakref.ref(self)

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that this batch keeps on the device of the rows."""
        yield from self.parts.tensors()
        if self.joint is None:
            yield from self._changes

    def count(self) -> None:
        """Waits for the counts. Raises IndexError if an id on a GPU is out of range."""
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
                self._incoming, self._outgoing = counts[_INCOMING], counts[_OUTGOING]
        unique = self.parts.plan[0]
        self.ids = self.loaded = _view(unique, (self.held,))
        if self._padding is not None:
            self.loaded = _view(unique, (self.held + 1,))
        self._is_counted = True

    @property
    def new_row_count(self) -> int:
        """The number of rows that the batch before did not hold, without the padding's."""
        self.count()
        return self._incoming - (self._padding is not None)

    @property
    def incoming(self) -> tuple[Tensor, Tensor]:
        """Ids and positions of rows that the batch before did not hold, then the padding's."""
        return self._listed(0)

    @property
    def kept(self) -> tuple[Tensor, Tensor]:
        """New and old positions of the rows that the batch before held as well."""
        return self._listed(1)

    @property
    def outgoing(self) -> tuple[Tensor, Tensor]:
        """Ids and old positions of the batch before's rows that this batch does not name."""
        return self._listed(2)

    def _listed(self, change: int) -> tuple[Tensor, Tensor]:
        self.count()
        count = (self._incoming, self.held - self.new_row_count, self._outgoing)[change]
        ids, places = self._changes[2 * change : 2 * change + 2]
        return _view(ids, (count,)), _view(places, (count,))

    def places_among(self, ids: Tensor) -> Tensor:
        """The positions of all ids of this batch in `ids`, an ascending superset."""
        unique, inverse = self.parts.plan[:2]
        places = torch.searchsorted(ids, unique)
        if self._padding is not None:
            places = torch.where(unique == self._padding, len(ids), places)
        return places[inverse]

    def alone(self, part: int) -> tuple[PlannedBatch, int]:
        """Returns a batch and its part for summed(), whose time grows with the whole batch.

        On the CPU this is a batch of only this part, if all parts together have many more ids.
        """
        parts, ids = self.parts, self.parts.values(part)
        if ids is None or self.device.type != "cpu" or parts.count <= _MANY_PARTS * ids.numel():
            return self, part
        batch = PlannedBatch([ids], parts.rows, self.device, self._padding, name=parts.name)
        batch.count()
        return batch, 0

    def summed(self, rows: Tensor, part: int, source: Tensor | None) -> Tensor:
        """Sums the gradients of a part's lookups into one gradient per row of the batch.

        `rows` has one gradient per id, or with `source` the gradients that it names for each id.
        The gradient of the padding is zero.
        """
        parts, plan, begin = self.parts, self.parts.plan, self.parts.begin(part)
        distinct, named = self.held, None
        if self._padding is not None:
            distinct, named = distinct + 1, _view(plan[4], (1,), _DISTINCT)
        summed: Tensor = _ops.sum_rows(rows, list(plan), parts.rows, begin, distinct, source, named)
        return summed


class LoadedBatch(PlannedBatch):
    """A batch whose ids the planning op has also counted, and whose rows it has loaded.

    `results` are the op's results after those of count_batch.

    Args:
        load: An op of a RowStore, called with the ids, the number of rows and the padding.
        parts, rows, device, padding, name: See PlannedBatch.

    Raises:
        IndexError: An id is out of range. No row has moved.
    """

    def __init__(
        self,
        parts: Sequence[Tensor],
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
        self.parts = planned = BatchIds(parts, rows, device, name, are_uploaded=True)
        has_copy = planned.unplanned[0].is_cpu
        made = planned.plan_by(load, planned.unplanned, -1 if padding is None else padding)
        self.ids, self.loaded, *self.results = made[5:-1] if has_copy else made[5:]
        self.held = self.ids.shape[0]
        self._changes, self._is_counted = [], True

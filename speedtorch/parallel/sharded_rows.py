"""ShardedRows: lookups of rows that are sharded row-wise among ranks.

A lookup sends ids to the owners of their rows, which send the rows back. The backward sends the
gradients to the owners. The owner's step is an ordinary one: its lookup has the ids of all ranks,
in the order of the ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from speedtorch.nn.shared_lookups import Ids, NoIds, SharedLookups
from speedtorch.ops.functions import rows_at
from speedtorch.parallel.block_cyclic import BlockCyclic
from speedtorch.parallel.calls import Call, Kind
from speedtorch.parallel.lookup_request import LookupRequest
from speedtorch.parallel.ranks import Asked, Ranks
from speedtorch.parallel.requests import Requests
from speedtorch.step.disagreement import DisagreementError
from speedtorch.step.trained_rows import Bags, TrainedRows, check_once
from speedtorch.torch_internals import (
    active_data_parallel,
    composable_data_parallel,
    takes_uneven_inputs,
)

__all__ = ["ShardedRows", "ranks_of"]

_COLLECTED_BYTES = 16 << 20  # from each rank in one collective of collect()

_MOST_MICROSECONDS = 1 << 38  # twice this, plus a flag, fits into a Call

_ranks: weakref.WeakKeyDictionary[TrainedRows, Ranks] = weakref.WeakKeyDictionary()
"""The ranks among which the table of a TrainedRows is sharded."""


def ranks_of(rows: TrainedRows) -> Ranks | None:
    """The ranks among which these rows are sharded; None if the rows are not sharded."""
    return _ranks.get(rows)


class ShardedRows(SharedLookups):
    """Looks up rows by ids of the whole table; all ranks make every call together.

    Args:
        rows: The rows that this rank owns.
        own_padding: Index of the padding's row among them; None if this rank does not own it.
        dealt: Maps each row to its owner.
        ranks: The ranks that own the rows.
        number: The table's number, the same on all ranks.
        padding: Id of the row that is never trained, or None.
        average: Divide gradients by the number of ranks.
        sparse: Whether the module asks for sparse gradients.
        model: Returns the sharded model, or None once that is gone.
    """

    def __init__(
        self,
        rows: TrainedRows,
        own_padding: int | None,
        *,
        dealt: BlockCyclic,
        ranks: Ranks,
        number: int,
        padding: int | None,
        average: bool,
        sparse: bool,
        model: Callable[[], nn.Module | None],
    ) -> None:
        self._rows, self._ranks = rows, ranks
        self._model = model
        self._wrapped = 0
        """The number of modules of fully_shard and replicate that are already checked."""
        self._dealt, self._number = dealt, number
        self._owns_padding = own_padding is not None
        self._padding = None if padding is None else int(dealt.numbers(torch.tensor(padding)))
        rows.parameter_view.divide_by(ranks.size if average else 1)
        self._sparse = sparse
        _ranks[rows] = ranks
        padded = padding is not None
        self._joint: JointRows | None = None
        self.exchange = Requests(rows.exchange, dealt, ranks, number, own_padding, padded=padded)
        self.steps = self.exchange

    def rows_of(
        self, ids: Tensor, max_norm: float | None = None, norm_type: float = 2.0
    ) -> tuple[Tensor, Tensor]:
        """As TrainedRows.rows_of; the rows are copies of the owners' rows."""
        self._refuse_replicas()
        request = self.exchange.of(ids)
        places, held = self._rows.rows_of(request.asked.ids, max_norm, norm_type)
        padding = len(held) - 1 if self._owns_padding else -1
        sparse = self._rows.gives_sparse(asked=self._sparse)
        rows = torch.embedding(held, places, padding, False, sparse)
        brought = self._brought(rows, request, self._given(rows, request))
        return self._operand(request, brought)

    def summed(self, ids: Ids, bags: Bags | None = None) -> Tensor:
        """As TrainedRows.summed."""
        self._refuse_replicas()
        request, rows, came = (self._joint or JointRows({self: ids})).take(self)
        brought = self._brought(rows, request, came)
        result: Tensor = _Spread.apply(brought, request, bags)  # type: ignore[no-untyped-call]
        return result

    def _refuse_replicas(self) -> None:
        """Raises NotImplementedError if ranks that own no rows train the model too."""
        if (active := active_data_parallel()) is not None:
            if takes_uneven_inputs(active):
                raise NotImplementedError(
                    f"{self._rows.name}: its rows are sharded among ranks, and within"
                    " DistributedDataParallel.join() a rank that has no more batches makes no"
                    " lookups, for which the others would wait: leave join() out, and let such a"
                    " rank go on with empty batches"
                )
            ranks = dist.get_process_group_ranks(active.process_group)
            self._refuse_others("DistributedDataParallel", ranks)
        if self._ranks.size == dist.get_world_size():
            return
        wrapped = composable_data_parallel()
        if self._wrapped == len(wrapped):
            return
        weight: Tensor = self._rows.weight
        model = self._model()
        own = set() if model is None else set(model.modules())
        for module, name, ranks in wrapped:
            if module in own or any(weight is each for each in module.parameters()):
                self._refuse_others(name, ranks)
        self._wrapped = len(wrapped)

    def _refuse_others(self, wrapper: str, ranks: Iterable[int]) -> None:
        """Raises NotImplementedError if the rows are not sharded among all ranks of a wrapper."""
        if others := set(ranks) - self._ranks.members:
            same = "the same process_group"
            if wrapper != "DistributedDataParallel":
                same = "a mesh of the same ranks"
            raise NotImplementedError(
                f"{self._rows.name}: its rows are shared out among ranks"
                f" {sorted(self._ranks.members)}, and {wrapper} trains the model on"
                f" ranks {sorted(others)}, too, whose rows would become others: call"
                f" speedtorch.shard() and {wrapper} with {same}"
            )

    @property
    def can_agree(self) -> bool:
        """Whether ranks can compare calls without waiting for their GPUs."""
        return self._ranks.meets_beside_the_device

    def agree_on_pace(self, seconds: float, is_idle: bool) -> tuple[float, bool]:
        """The seconds of the slowest rank, and whether the GPUs of all ranks were idle."""
        told = min(int(seconds * 1e6), _MOST_MICROSECONDS) * 2 + is_idle
        call = Call(Kind.PACE, self._number, told)
        every = self._ranks.tell_each(self._rows.name, call)
        return max(each >> 1 for each in every) / 1e6, all(each & 1 for each in every)

    def fail(self, error: Exception, *, trains: bool, announced: int = 0) -> None:
        """Joins the ranks' lookups, which all raise: here `error`, unless the ranks disagree."""
        none = NoIds(error)
        if announced:
            self.exchange.plan_announced([none] * announced)
        else:
            self.summed(none) if trains else self.read(none)

    def end_by_error(self) -> None:
        """Makes the other ranks raise at their next call, unless their loops raise as well."""
        with suppress(DisagreementError):  # the caller raises this rank's own error
            self.exchange.meet(Kind.NONE)

    def read(self, ids: Ids) -> Tensor:
        """As TrainedRows.read."""
        request = self.exchange.of_no_step(ids)
        rows = self._given(self._rows.read(request.asked.ids), request)
        return torch.embedding(rows, request.places)

    def borrow(
        self, ids: Tensor, max_norm: float | None, norm_type: float
    ) -> tuple[Tensor, Tensor]:
        """As TrainedRows.borrow."""
        request = self.exchange.of_no_step(ids)
        places, held = self._rows.borrow(request.asked.ids, max_norm, norm_type)
        return self._operand(request, self._given(held[places], request))

    @property
    def ranks(self) -> Ranks:
        """The ranks that own the rows."""
        return self._ranks

    @property
    def shared_by(self) -> tuple[Ranks, torch.device]:
        """The ranks that own the rows, and the device of a step's rows."""
        return self._ranks, self._rows.exchange.held.device

    def meet_for_all(self) -> None:
        """Raises DisagreementError on all ranks unless all are about to call collect()."""
        calls = [Call(Kind.FULL, self._number)]
        self._ranks.meet(self._rows.name, calls, self._rows.exchange.held.device)

    def empty_for_all(self, name: str) -> Tensor:
        """Allocates host memory for all rows of a field."""
        field, rows = self._rows.table.field(name), self._dealt.rows
        return torch.empty((rows, *field.shape[1:]), dtype=field.dtype, device="cpu")

    def collect(self, name: str, every: Tensor | None) -> None:
        """Copies all rows of a field from their owners to `every`, which only rank 0 passes."""
        dealt, ranks, field = self._dealt, self._ranks, self._rows.table.field(name)
        owned = [sum(len(here) for _, here in dealt.blocks(rank)) for rank in range(ranks.size)]
        elements = field.shape[1:].numel()
        most = max(1, _COLLECTED_BYTES // (elements * field.element_size()))
        for begin in range(0, dealt.room, most):
            parts = [range(min(begin, rows), min(begin + most, rows)) for rows in owned]
            own = parts[ranks.rank]
            sent = field[own.start : own.stop].reshape(len(own), elements).view(torch.uint8)
            sent = sent.to(self._rows.exchange.held.device)
            got = ranks.collected(self._rows.name, sent, list(map(len, parts)))
            if every is not None:
                ids = torch.cat([dealt.ids(rank, part) for rank, part in enumerate(parts)])
                every.view(dealt.rows, elements).view(torch.uint8).index_copy_(0, ids, got.cpu())

    def gives_sparse(self, *, asked: bool) -> bool:
        """Never: ranks exchange dense gradients; the owner makes them sparse."""
        return False

    def _operand(self, request: LookupRequest, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The places and rows of a lookup; the last row is the padding's, if there is one."""
        if self._padding is None:
            return request.places, rows
        return request.with_padding(rows, self._padding)

    def _given(self, rows: Tensor, request: LookupRequest) -> Tensor:
        (came,) = self._ranks.bring(self._rows.name, [rows], [request.asked])
        return came

    def _brought(self, rows: Tensor, request: LookupRequest, came: Tensor) -> Tensor:
        brought: Tensor = _Brought.apply(rows, [came], request, self)  # type: ignore[no-untyped-call]
        return brought

    @contextmanager
    def together(
        self, lookups: Sequence[tuple[ShardedRows, Sequence[Ids], bool]]
    ) -> Iterator[None]:
        """As SharedLookups.together."""
        alike: dict[object, dict[ShardedRows, Ids]] = {}
        for rows, parts, trains in lookups:
            if trains and len(parts) == 1:
                alike.setdefault(rows.shared_by, {})[rows] = parts[0]
        with Requests.together([(rows.exchange, ids, trains) for rows, ids, trains in lookups]):
            try:
                for some in alike.values():
                    joint = JointRows(some)
                    for rows in some:
                        rows._joint = joint
                yield
            finally:
                for rows, *_ in lookups:
                    rows._joint = None

    def begin(self, ids: Ids) -> tuple[LookupRequest, Tensor]:
        """The request of a step's lookup, and the rows that all ranks request from this rank."""
        request = self.exchange.of(ids)
        return request, self._rows.summed(request.asked.ids)

    def give_back(self, gradient: Tensor, asked: Asked, lookup: int) -> Tensor:
        """Sends the gradients of a lookup's rows to the owners; returns the gradients received."""
        self.exchange.before_gradients(lookup)
        return self._ranks.give_back(self._rows.name, gradient, asked)


class JointRows:
    """Rows of several tables' lookups, received from their owners in one collective per dtype."""

    def __init__(self, lookups: Mapping[ShardedRows, Ids]) -> None:
        self._lookups = lookups
        self._made: dict[ShardedRows, tuple[LookupRequest, Tensor, Tensor]] | None = None
        self._error: Exception | None = None
        """The error that all ranks raise at one lookup, after which they make no further lookup."""

    def take(self, table: ShardedRows) -> tuple[LookupRequest, Tensor, Tensor]:
        """A table's request, rows requested by all ranks, and rows received; once per table."""
        if self._made is None:
            self._made = self._brought(table.ranks)
        if table not in self._made and self._error is not None:
            raise self._error
        return self._made.pop(table)

    def _brought(self, ranks: Ranks) -> dict[ShardedRows, tuple[LookupRequest, Tensor, Tensor]]:
        made, begun, faults = {}, [], ranks.faults
        for table, ids in self._lookups.items():
            try:
                begun.append((table, *table.begin(ids)))
            except Exception as error:
                if ranks.faults == faults:  # the other ranks wait for this one
                    raise
                self._error = error
                break
        for dtype in dict.fromkeys(rows.dtype for *_, rows in begun):
            some = [each for each in begun if each[2].dtype == dtype]
            given, asked = [rows for *_, rows in some], [request.asked for _, request, _ in some]
            came = ranks.bring(some[0][1].name, given, asked)
            for (table, request, rows), brought in zip(some, came, strict=True):
                made[table] = request, rows, brought
        return made


class _Brought(torch.autograd.Function):
    """Received rows; the backward sends their gradients to the owners."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, came: list[Tensor], request: LookupRequest, sharded: ShardedRows
    ) -> Tensor:
        ctx.asked, ctx.lookup, ctx.sharded = request.asked, request.lookup, sharded
        return came.pop()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        check_once(gradient)
        return ctx.sharded.give_back(gradient, ctx.asked, ctx.lookup), None, None, None


class _Spread(torch.autograd.Function):
    """Received rows in the order of the ids; the backward sums gradients by the plan of the ids."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, request: LookupRequest, bags: Bags | None) -> Tensor:
        ctx.request, ctx.bags = request, bags
        places = request.places
        return rows_at(rows, places) if bags is None else bags.pool(rows, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        check_once(gradient)
        return ctx.request.summed(gradient, ctx.bags), None, None

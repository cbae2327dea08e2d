"""ShardedRows: lookups of rows that are sharded row-wise among ranks.

A lookup sends ids to the owners of their rows, which send the rows back. The backward sends the
gradients to the owners. The owner's step is an ordinary one: its lookup has the ids of all ranks,
in the order of the ranks.
"""

from __future__ import annotations

import itertools
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
from speedtorch.parallel.ranks import Ranks, RequestedRows
from speedtorch.parallel.requests import Requests
from speedtorch.step.disagreement import DisagreementError
from speedtorch.step.fixed_memory import Replays
from speedtorch.step.trained_rows import Bags, TrainedRows, check_once
from speedtorch.torch_internals import (
    active_data_parallel,
    allows_uneven_inputs,
    composable_data_parallel,
)

__all__ = ["ShardedRows", "ranks_of"]

_COLLECTED_BYTES = 16 << 20  # from each rank in one collective of gather_field()

_MOST_MICROSECONDS = 1 << 38  # fits into a Call

_ranks: weakref.WeakKeyDictionary[TrainedRows, Ranks] = weakref.WeakKeyDictionary()
"""The ranks among which the table of a TrainedRows is sharded."""


def ranks_of(rows: TrainedRows) -> Ranks | None:
    """The ranks among which these rows are sharded; None if the rows are not sharded."""
    return _ranks.get(rows)


class ShardedRows(SharedLookups):
    """Looks up rows by ids of the whole table; all ranks must make every call together.

    Args:
        rows: The rows that this rank owns.
        own_padding: Index of the padding's row in `rows`. If another rank owns that row: None, or
            with a capacity the number of `rows`, an index that reads as zeros.
        sharding: Maps each row to its owner.
        ranks: The ranks that own the rows.
        number: The table's number, the same on all ranks.
        padding: Id of the row that is never trained, or None.
        average: Divide gradients by the number of ranks.
        sparse: Whether the module requests sparse gradients.
        model: Returns the sharded model, or None after its deletion.
    """

    def __init__(
        self,
        rows: TrainedRows,
        own_padding: int | None,
        *,
        sharding: BlockCyclic,
        ranks: Ranks,
        number: int,
        padding: int | None,
        average: bool,
        sparse: bool,
        model: Callable[[], nn.Module | None],
    ) -> None:
        self.rows, self.ranks = rows, ranks
        self._model = model
        self._wrapped = 0
        """The number of modules of fully_shard and replicate that are already checked."""
        self._sharding, self._number = sharding, number
        self._owns_padding = own_padding is not None
        self._padding = None if padding is None else int(sharding.numbers(torch.tensor(padding)))
        rows.parameter_view.divide_by(ranks.size if average else 1)
        self._sparse = sparse
        _ranks[rows] = ranks
        padded = padding is not None
        self._joint: JointRows | None = None
        self._graphs = itertools.count(1)
        self.exchange = Requests(rows.exchange, sharding, ranks, number, own_padding, padded=padded)
        self.steps = self.exchange

    def rows_of(
        self, ids: Tensor, max_norm: float | None = None, norm_type: float = 2.0
    ) -> tuple[Tensor, Tensor]:
        """Like TrainedRows.rows_of; the rows are copies of the owners' rows."""
        self._check_replicas()
        request = self.exchange.for_step(ids)
        places, held = self.rows.rows_of(request.requested.ids, max_norm, norm_type)
        padding = len(held) - 1 if self._owns_padding else -1
        sparse = self.rows.makes_sparse(requested=self._sparse)
        rows = torch.embedding(held, places, padding, False, sparse)
        received = self._exchange_rows(rows, request)
        return self._operand(request, self._with_backward(rows, request, received))

    def summed(self, ids: Ids, bags: Bags | None = None) -> Tensor:
        """See TrainedRows.summed."""
        self._check_replicas()
        request, rows, received = (self._joint or JointRows({self: ids})).pop(self)
        received = self._with_backward(rows, request, received)
        result: Tensor = _SpreadRows.apply(received, request, bags)  # type: ignore[no-untyped-call]
        return result

    def _check_replicas(self) -> None:
        """Raises NotImplementedError within join(), or if ranks without rows train the model."""
        if (active := active_data_parallel()) is not None:
            if allows_uneven_inputs(active):
                raise NotImplementedError(
                    f"{self.rows.name}: sharded rows cannot be looked up within"
                    " DistributedDataParallel.join(). A rank without further batches makes no"
                    " lookups there, and the other ranks would wait for it. Do not use join(). A"
                    " rank without further batches must look up empty batches."
                )
            ranks = dist.get_process_group_ranks(active.process_group)
            self._check_members("DistributedDataParallel", ranks)
        if self.ranks.size == dist.get_world_size():
            return
        wrapped = composable_data_parallel()
        if self._wrapped == len(wrapped):
            return
        weight: Tensor = self.rows.weight
        model = self._model()
        own = set() if model is None else set(model.modules())
        for module, name, ranks in wrapped:
            if module in own or any(weight is param for param in module.parameters()):
                self._check_members(name, ranks)
        self._wrapped = len(wrapped)

    def _check_members(self, wrapper: str, ranks: Iterable[int]) -> None:
        """Raises NotImplementedError if the rows are not sharded among all ranks of a wrapper."""
        if other_ranks := set(ranks) - self.ranks.members:
            same = "the same process_group"
            if wrapper != "DistributedDataParallel":
                same = "a mesh of the same ranks"
            raise NotImplementedError(
                f"{self.rows.name}: the rows are sharded among ranks"
                f" {sorted(self.ranks.members)}, but {wrapper} also trains the model on ranks"
                f" {sorted(other_ranks)}. The copies of the rows would differ. Call"
                f" speedtorch.shard() and {wrapper} with {same}."
            )

    @property
    def can_agree(self) -> bool:
        """Whether ranks can compare calls without waiting for their GPUs."""
        return self.ranks.has_barrier

    def agree_on_pace(self, seconds: float) -> float:
        """The seconds of the slowest rank."""
        microseconds = min(int(seconds * 1e6), _MOST_MICROSECONDS)
        call = Call(Kind.PACE, self._number, microseconds)
        return max(self.ranks.all_gather_number(self.rows.name, call)) / 1e6

    def fail(self, error: Exception, *, trains: bool, announced: int = 0) -> None:
        """Makes the ranks' lookup raise on all ranks: here `error`, if ranks are at one call."""
        no_ids = NoIds(error)
        if announced:
            self.exchange.plan_announced([no_ids] * announced)
        else:
            self.summed(no_ids) if trains else self.read(no_ids)

    def end_by_error(self) -> None:
        """Makes the other ranks raise at their next call, unless their loops raise as well."""
        with suppress(DisagreementError):  # the caller raises this rank's own error
            self.exchange.compare_calls(Kind.NONE)

    def check_capturable(self, *, prefetches: bool) -> None:
        """See Lookups.check_capturable."""
        if prefetches:
            raise NotImplementedError(
                f"graphed: the rows of {self.rows.name} are sharded among ranks, so a replay cannot"
                " load the rows of the next batch. Call graphed() without next_ids."
            )
        if not self.ranks.has_barrier:
            raise NotImplementedError(
                f"graphed: the ranks that share the rows of {self.rows.name} are on several"
                " machines, and cannot compare their replays. Train without graphed()."
            )

    @contextmanager
    def capturing(self) -> Iterator[Replays]:
        """See Lookups.capturing. Ids that were announced outside, or in a failed capture, end."""
        consensus = self.exchange.consensus
        assert consensus is not None
        self.exchange.give_up()
        try:
            call = Call(Kind.REPLAY, self._number, next(self._graphs))
            with consensus.capturing(call) as replays:
                yield replays
        finally:
            self.exchange.give_up()

    def read(self, ids: Ids) -> Tensor:
        """See TrainedRows.read."""
        request = self.exchange.without_step(ids)
        rows = self._exchange_rows(self.rows.read(request.requested.ids), request)
        return torch.embedding(rows, request.places)

    def borrow(
        self, ids: Tensor, max_norm: float | None, norm_type: float
    ) -> tuple[Tensor, Tensor]:
        """See TrainedRows.borrow."""
        request = self.exchange.without_step(ids)
        places, held = self.rows.borrow(request.requested.ids, max_norm, norm_type)
        return self._operand(request, self._exchange_rows(held[places], request))

    def check_gather(self) -> None:
        """Raises DisagreementError on all ranks unless all are about to call gather_field()."""
        calls = [Call(Kind.FULL, self._number)]
        self.ranks.compare_calls(self.rows.name, calls, self.rows.exchange.held.device)

    def allocate_all_rows(self, name: str) -> Tensor:
        """Allocates host memory for all rows of a field."""
        field, rows = self.rows.table.field(name), self._sharding.rows
        return torch.empty((rows, *field.shape[1:]), dtype=field.dtype, device="cpu")

    def gather_field(self, name: str, out: Tensor | None) -> None:
        """Copies all rows of a field from their owners to `out`, which only rank 0 passes."""
        sharding, ranks, field = self._sharding, self.ranks, self.rows.table.field(name)
        owned = [sum(len(rows) for rows, _ in sharding.blocks(rank)) for rank in range(ranks.size)]
        elements = field.shape[1:].numel()
        most = max(1, _COLLECTED_BYTES // (elements * field.element_size()))
        for begin in range(0, sharding.stride, most):
            parts = [range(min(begin, rows), min(begin + most, rows)) for rows in owned]
            own = parts[ranks.rank]
            sent = field[own.start : own.stop].reshape(len(own), elements).view(torch.uint8)
            sent = sent.to(self.rows.exchange.held.device)
            received = ranks.gather_rows(self.rows.name, sent, list(map(len, parts)))
            if out is not None:
                ids = torch.cat([sharding.ids(rank, part) for rank, part in enumerate(parts)])
                whole = out.view(sharding.rows, elements).view(torch.uint8)
                whole.index_copy_(0, ids, received.cpu())

    def makes_sparse(self, *, requested: bool) -> bool:
        """Returns False: ranks exchange dense gradients, and the owner makes them sparse."""
        return False

    def _operand(self, request: LookupRequest, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The places and rows of a lookup; the last row is the padding's, if there is one."""
        if self._padding is None:
            return request.places, rows
        return request.with_padding(rows, self._padding)

    def _exchange_rows(self, rows: Tensor, request: LookupRequest) -> Tensor:
        (received,) = self.ranks.send_rows(self.rows.name, [rows], [request.requested])
        return received

    def _with_backward(self, rows: Tensor, request: LookupRequest, received: Tensor) -> Tensor:
        out: Tensor = _ReceivedRows.apply(rows, [received], request, self)  # type: ignore[no-untyped-call]
        return out

    @contextmanager
    def together(
        self, lookups: Sequence[tuple[ShardedRows, Sequence[Ids], bool]]
    ) -> Iterator[None]:
        """See SharedLookups.together."""
        alike: dict[object, dict[ShardedRows, Ids]] = {}
        for rows, parts, trains in lookups:
            if trains and len(parts) == 1:
                alike.setdefault(rows.exchange.shared_by, {})[rows] = parts[0]
        with Requests.together([(rows.exchange, ids, trains) for rows, ids, trains in lookups]):
            try:
                for ids_of in alike.values():
                    joint = JointRows(ids_of)
                    for rows in ids_of:
                        rows._joint = joint
                yield
            finally:
                for rows, *_ in lookups:
                    rows._joint = None

    def begin(self, ids: Ids) -> tuple[LookupRequest, Tensor]:
        """The request of a step's lookup, and the rows that all ranks request from this rank."""
        request = self.exchange.for_step(ids)
        return request, self.rows.summed(request.requested.ids)

    def send_gradients(self, gradient: Tensor, requested: RequestedRows, lookup: int) -> Tensor:
        """Sends the gradients of a lookup's rows to the owners; returns the gradients received."""
        fault = self.exchange.compare_calls(Kind.GRADIENTS, lookup)
        if fault is not None and self.exchange.consensus is not None:
            self.exchange.consensus.stop(fault)
        return self.ranks.send_gradients(self.rows.name, gradient, requested)


class JointRows:
    """Rows of several tables' lookups, received from their owners in one collective per dtype."""

    def __init__(self, lookups: Mapping[ShardedRows, Ids]) -> None:
        self._lookups = lookups
        self._results: dict[ShardedRows, tuple[LookupRequest, Tensor, Tensor]] | None = None
        self._error: Exception | None = None
        """The error that all ranks raise at one lookup, after which they make no further lookup."""

    def pop(self, table: ShardedRows) -> tuple[LookupRequest, Tensor, Tensor]:
        """A table's request, rows requested by all ranks, and rows received; once per table."""
        if self._results is None:
            self._results = self._exchange(table.ranks)
        if table not in self._results and self._error is not None:
            raise self._error
        return self._results.pop(table)

    def _exchange(self, ranks: Ranks) -> dict[ShardedRows, tuple[LookupRequest, Tensor, Tensor]]:
        results, begun, error_count = {}, [], ranks.error_count
        for table, ids in self._lookups.items():
            try:
                begun.append((table, *table.begin(ids)))
            except Exception as error:
                if ranks.error_count == error_count:  # the other ranks wait for this rank
                    raise
                self._error = error
                break
        for dtype in dict.fromkeys(rows.dtype for *_, rows in begun):
            lookups = [lookup for lookup in begun if lookup[2].dtype == dtype]
            sent, requested = [it[2] for it in lookups], [it[1].requested for it in lookups]
            received = ranks.send_rows(lookups[0][1].name, sent, requested)
            for (table, request, rows), received_rows in zip(lookups, received, strict=True):
                results[table] = request, rows, received_rows
        return results


class _ReceivedRows(torch.autograd.Function):
    """Received rows; the backward sends their gradients to the owners."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, received: list[Tensor], request: LookupRequest, table: ShardedRows
    ) -> Tensor:
        """Returns the tensor in `received`; its gradient becomes the gradient of `rows`."""
        ctx.requested, ctx.lookup, ctx.table = request.requested, request.lookup.number, table
        return received.pop()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Sends gradients to the rows' owners; a collective call of all ranks."""
        if torch.is_grad_enabled():
            check_once(gradient)
        return ctx.table.send_gradients(gradient, ctx.requested, ctx.lookup), None, None, None


class _SpreadRows(torch.autograd.Function):
    """Received rows in the order of the ids; the backward sums gradients by the plan of the ids."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, request: LookupRequest, bags: Bags | None) -> Tensor:
        """Returns one row per id, or the pooled rows of `bags`."""
        ctx.request, ctx.bags = request, bags
        places = request.places
        return rows_at(rows, places) if bags is None else bags.pool(rows, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Sums the gradients of each received row's ids."""
        if torch.is_grad_enabled():
            check_once(gradient)
        return ctx.request.summed(gradient, ctx.bags), None, None

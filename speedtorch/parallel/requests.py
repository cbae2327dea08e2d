"""Requests: sends ids to the ranks that own their rows, at a lookup or ahead of it.

A lookup sends each unique id once. Ids of an announced or prefetched batch are sent early. The
lookup recognizes its request by the identity of the ids tensor, never by values: all ranks run the
same code on different values. A request serves one lookup. A rank that passes one tensor (such as
an empty one) to several lookups therefore sends as many requests as other ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from weakref import WeakMethod

import torch
from torch import Tensor

from speedtorch.memory.side_stream import SideStream
from speedtorch.nn.shared_lookups import Ids
from speedtorch.parallel.block_cyclic import BlockCyclic
from speedtorch.parallel.calls import Call, Kind
from speedtorch.parallel.counted_requests import CountedRequest
from speedtorch.parallel.fair_shares import FairShares
from speedtorch.parallel.fault_consensus import FaultConsensus
from speedtorch.parallel.fixed_requests import FixedRequest
from speedtorch.parallel.lookup_request import Lookup, LookupRequest, group_in_rounds
from speedtorch.parallel.ranks import Ranks
from speedtorch.parallel.sharded_ids import ShardedIds
from speedtorch.plan.fixed_size_batch import BAD_IDS
from speedtorch.plan.planned_batch import PlannedAhead
from speedtorch.step.announcements import Announced
from speedtorch.step.disagreement import DisagreementError
from speedtorch.step.exchange import Exchange
from speedtorch.step.fixed_blocks import OTHER_MODULE, OVER_SHARE
from speedtorch.step.fixed_memory import FixedMemory
from speedtorch.step.step import Batch

__all__ = ["PlannedRequests", "Requests"]


class PlannedRequests(PlannedAhead):
    """A batch's requests, and the plan of the rows that all ranks request from this rank."""

    def __init__(self, requests: Sequence[LookupRequest], after: PlannedRequests | None) -> None:
        self.requests = requests
        self.after = after
        self.own: Batch | None = None
        self.announced: Announced | None = None
        """The argument of exchange.steps.announce()."""
        self.error: Exception | None = None
        self.is_exchanged = False

    def send_counts(self) -> None:
        """Sends the other ranks the numbers of requested rows; see LookupRound.send_counts."""
        for request in self.requests:
            request.round.send_counts()

    def exchange_ids(self) -> bool:
        """Exchanges the ids with the other ranks, once; False if that failed and `error` is set."""
        if not self.is_exchanged:
            self.is_exchanged = True
            try:
                for request in self.requests:
                    request.exchange_ids()
            except Exception as error:
                self.error = error
        return self.error is None

    @property
    def ids(self) -> list[Tensor]:
        """For each lookup the ids of the rows that all ranks request from this rank."""
        return [request.requested.ids for request in self.requests]

    @property
    def faults(self) -> list[Tensor]:
        """The fault code of each request with a capacity, `[1]`, on the device."""
        return [request.fault for request in self.requests]


class JointRequests:
    """Lookups of several tables; the first pop() makes the requests of all tables."""

    def __init__(self, lookups: Mapping[Requests, tuple[Sequence[Ids], bool]]) -> None:
        self._lookups = lookups
        self._requests: dict[Requests, list[LookupRequest]] | None = None

    def pop(self, table: Requests, *, ahead: bool) -> list[LookupRequest] | None:
        """Returns a table's requests on its first call; None afterwards."""
        if self._requests is None:
            self._requests = {
                key: key.make(*lookups, ahead=ahead) for key, lookups in self._lookups.items()
            }
            every = [request for made in self._requests.values() for request in made]
            group_in_rounds(every, table.shared_by[0])
        return self._requests.pop(table, None)


class Requests:
    """Requests a table's rows from their owners; all ranks must make every call together.

    Args:
        exchange: The exchange of the rows that this rank owns.
        sharding: Maps each row to its owner.
        ranks: The ranks that own the rows.
        number: The table's number, the same on all ranks.
        no_row: With a capacity, the index of unused ids in a block; see FixedRequest.
        padded: Whether some rank owns the padding's row.
    """

    ahead = 3
    """Batches that a loop plans ahead: PlannedSteps.ahead, plus one whose ids are in exchange."""

    def __init__(
        self,
        exchange: Exchange,
        sharding: BlockCyclic,
        ranks: Ranks,
        number: int,
        no_row: int | None,
        *,
        padded: bool,
    ) -> None:
        self._exchange, self._sharding, self._ranks = exchange, sharding, ranks
        self._number, self._distances = number, sharding.distances()
        self._joint: JointRequests | None = None
        self._lookups = itertools.count()
        self._announced: list[PlannedRequests] = []
        """The batches of announce() calls since the latest lookup before them."""
        self._announced_in = 0
        """`exchange.steps.batches_over` at the last announce()."""
        self._returned: list[PlannedRequests] = []
        """The latest announced batch at the time when a loop returned its batch, if any."""
        self._expected: PlannedRequests | None = None
        """The prefetched batch that a loop has yielded last."""
        self._was_looked_up = False
        self._error_count = ranks.error_count
        self._planning = SideStream("planning")
        self._latest: PlannedRequests | None = None
        """The batch of the latest lookup."""
        exchange.steps.disable_lookup_check()
        exchange.steps.agree_on_steps(WeakMethod(self.before_step))
        self.consensus: FaultConsensus | None = None
        self._fixed: tuple[FairShares, int, FaultConsensus] | None = None
        """Arguments of FixedRequest if the exchange has a capacity."""
        if isinstance(memory := exchange.memory, FixedMemory):
            assert no_row is not None
            self.consensus = FaultConsensus(memory, ranks)
            memory.agree_with(self.consensus)
            shares = FairShares(memory.capacity, sharding, padded)
            self._fixed = shares, no_row, self.consensus

    @property
    def shared_by(self) -> tuple[Ranks, torch.device]:
        """The ranks that own the rows, and the device of a step's rows, which may be moved."""
        return self._ranks, self._exchange.held.device

    def _request(
        self, parts: Sequence[Ids], *, trains: bool = True, ahead: bool
    ) -> list[LookupRequest]:
        """The requests of lookups, in one round with the requests of other tables in together()."""
        requests = None if self._joint is None else self._joint.pop(self, ahead=ahead)
        if requests is None:
            group_in_rounds(requests := self.make(parts, trains, ahead=ahead), self._ranks)
        return requests

    def make(self, parts: Sequence[Ids], trains: bool, *, ahead: bool) -> list[LookupRequest]:
        """New requests of lookups, without any communication.

        `ahead`: The lookups are announced or prefetched.
        """
        fixed, held = self._fixed if trains else None, self._exchange.held
        share = -1 if fixed is None else fixed[0].rows
        self._distances = self._distances.to(held.device)  # after a move of the module
        requests: list[LookupRequest] = []
        for given in parts:
            number, device = next(self._lookups), held.device
            lookup = Lookup(held.name, self._number, number, given, device, is_ahead=ahead)
            on_device = lookup.ids.to(device, non_blocking=True)
            ids = ShardedIds(on_device, self._sharding, self._distances, share)
            requests.append(
                CountedRequest(lookup, ids) if fixed is None else FixedRequest(lookup, ids, *fixed)
            )
        return requests

    def for_step(self, ids: Ids) -> LookupRequest:
        """The request of a step's lookup, exchanged now unless it was exchanged ahead.

        A lookup without gradients never uses a planned request, because the tensor may be a
        planned one on some ranks only.

        Raises IndexError on all ranks if an id on one of them is out of range. With a capacity on a
        GPU, the next lookup raises it.
        """
        self._before_lookup()
        found, fault = self._planned_for(ids) if torch.is_grad_enabled() else (None, None)
        if found is None:
            (request,) = self._request([ids], ahead=False)
            found = PlannedRequests([request], None), request
        planned, request = found
        self._exchange_ids(planned)
        request.lookup.mark_used()
        self._latest = planned
        self._expect([*self._announced, planned], fault)
        return request

    def _planned_for(
        self, ids: Ids
    ) -> tuple[tuple[PlannedRequests, LookupRequest] | None, Tensor | None]:
        """The batch and request planned for a lookup, and the result of compare_calls()."""
        self._was_looked_up = True
        found, is_next, any_unused = None, False, False
        for batches in (self._announced, [] if self._expected is None else [self._expected]):
            every = [(batch, request) for batch in batches for request in batch.requests]
            unused = [(batch, request) for batch, request in every if not request.lookup.is_used]
            any_unused = any_unused or bool(unused)
            places = [n for n, (_, request) in enumerate(unused) if request.lookup.matches(ids)]
            if places:
                found, is_next = unused[places[0]], places[0] == 0
                break
        fault = None
        if any_unused:
            kind = Kind.OTHER_IDS if found is None else Kind.ROWS
            fault = self.compare_calls(kind, 0 if found is None else found[1].lookup.number)
        for planned in self._announced:
            if not planned.is_exchanged:
                self._exchange_and_plan(planned)
                self._exchange.steps.announce(planned.announced)
        if found is not None and not is_next and self.consensus is not None:
            self._exchange_ids(found[0])
            raise RuntimeError(
                f"{self._exchange.name}: on several ranks, a module with capacity= must look ids up"
                " in the order of announce() and of the ids of prefetch(). Look up the earlier"
                " tensors first."
            )
        return found, fault

    def compare_calls(self, kind: Kind, lookup: int = 0) -> Tensor | None:
        """Raises DisagreementError on all ranks if the ranks are at different exchanges.

        If errors of rows with a capacity are raised later, returns whether the ranks differ, `[1]`.
        """
        calls = [Call(kind, self._number, lookup)]
        if self.consensus is not None:
            return self.consensus.compare_calls(calls)
        self._ranks.compare_calls(self._exchange.name, calls, self._exchange.held.device)
        return None

    def before_step(self, compared: set[object], *, fails: bool) -> None:
        """With a barrier, raises DisagreementError on all ranks unless all are about to step.

        An optimizer calls this before it steps the rows, or `fails` to, without holding a lock.
        Ranks compare once for all tables, which `compared` records. Ranks without a barrier do not
        compare.
        """
        if self._ranks.has_barrier and self._ranks not in compared:
            compared.add(self._ranks)
            call = Call(Kind.NO_STEP if fails else Kind.STEP, self._number)
            self._ranks.compare_calls(self._exchange.name, [call], self._exchange.held.device)

    def without_step(self, ids: Ids) -> LookupRequest:
        """The request of a lookup that trains nothing, for any number of rows.

        Raises IndexError on all ranks if an id on one of them is out of range.
        """
        if self.consensus is None:
            return self.for_step(ids)
        if self.consensus.is_capturing:
            raise RuntimeError(
                f"{self._exchange.name}: a CUDA graph cannot capture a lookup without gradients of"
                " rows that are sharded among ranks. Look these ids up outside of the step."
            )
        self._before_lookup()
        (request,) = self._request([ids], trains=False, ahead=False)
        self._exchange_ids(PlannedRequests([request], None))
        return request

    def _forget_after_errors(self) -> None:
        """Discards all plans after an error on all ranks.

        The next lookups may use the planned tensors on some ranks and different ones on others.
        """
        if self._error_count != self._ranks.error_count:
            self._error_count = self._ranks.error_count
            self._announced, self._expected = [], None
            self._lookups = itertools.count()  # the counts of the ranks may differ
            with self._exchange.lock:
                self._exchange.held.announced.give_up()

    def _before_lookup(self) -> None:
        """Raises the errors found at the last lookup, and RuntimeError in a capture of others."""
        if self.consensus is not None and self.consensus.is_capturing:
            return  # the replays raise the errors
        if self._exchange.held.captures():
            raise RuntimeError(
                f"{self._exchange.name}: torch.cuda.graph cannot capture a lookup of rows that are"
                " sharded among ranks. Use speedtorch.graphed(), or capture only the code after the"
                " lookup."
            )
        self._forget_after_errors()
        latest, self._latest = self._latest, None
        if self.consensus is None:
            return
        self.consensus.raise_if_calls_differ()
        if not (fault := self.consensus.read_fault()):
            return
        try:
            self.consensus.raise_fault(fault)
        except (IndexError, RuntimeError):
            if fault in (BAD_IDS, OVER_SHARE):
                for request in [] if latest is None else latest.requests:
                    if (own := request.own_error()) is not None:
                        raise own from None
            raise

    def _expect(self, plans: Sequence[PlannedRequests], fault: Tensor | None = None) -> None:
        """Passes the fault codes of the planned batches to the FaultConsensus, if there is one."""
        if self.consensus is not None:
            faults = [fault for planned in plans for fault in planned.faults]
            faults += [] if fault is None else [fault * OTHER_MODULE]
            self.consensus.expect(faults)

    def plan_announced(self, parts: Sequence[Ids]) -> PlannedRequests:
        """Like PlannedSteps.plan_announced; discards batches announced before the latest lookup."""
        self._forget_after_errors()
        if self._was_looked_up or self._announced_in != self._exchange.steps.batches_over:
            self._announced, self._was_looked_up = [], False
        planned = PlannedRequests(self._request(parts, ahead=True), None)
        if self._exchange.held.device.type == "cpu":  # a later wait would save no time
            self._exchange_and_plan(planned)
        else:
            planned.send_counts()
        return planned

    def announce(self, announced: PlannedRequests) -> None:
        """See PlannedSteps.announce."""
        self._announced_in = self._exchange.steps.batches_over
        self._announced.append(announced)
        if announced.is_exchanged:
            self._exchange.steps.announce(announced.announced)

    def give_up(self) -> None:
        """See PlannedSteps.give_up."""
        self._announced = []
        self._exchange.steps.give_up()

    def plan_ahead(self, parts: Sequence[Tensor], after: PlannedRequests | None) -> PlannedRequests:
        """Like PlannedSteps.plan_ahead; also plans the batch before, whose counts are received."""
        self._forget_after_errors()
        # Copied on the current stream, for which the side stream waits.
        self._distances = self._distances.to(self._exchange.held.device)
        self._planning.uses(parts)  # the plan may be discarded before it is made
        with self._planning.after_current(self._exchange.held.device):
            planned = PlannedRequests(self._request(parts, ahead=True), after)
            planned.send_counts()
        planned.planned_until(self._planning.end)
        if after is not None:
            self._plan(after)
        return planned

    def expect(self, batch: PlannedRequests | None) -> None:
        """See PlannedSteps.expect."""
        self._forget_after_errors()
        self._expected = batch
        if batch is not None:
            # Only the last batch of a loop has not sent its ids before.
            if not all(request.round.is_exchanged for request in batch.requests):
                self.compare_calls(Kind.IDS, batch.requests[0].lookup.number)
            self._plan(batch)
        self._exchange.steps.expect(None if batch is None else batch.own)

    def start_loop(self, loop: object) -> bool:
        """See PlannedSteps.start_loop."""
        return self._exchange.steps.start_loop(loop)

    def refuse_bad(self, parts: Sequence[Tensor]) -> None:
        """Does nothing: the lookup raises the error on all ranks."""

    def note_returned(self) -> None:
        """See PlannedSteps.note_returned."""
        self._returned = self._announced[-1:]
        self._exchange.steps.note_returned()

    def end_loop(self, loop: object) -> None:
        """See PlannedSteps.end_loop."""
        if not self._exchange.steps.is_loop(loop):  # another loop may be running
            return
        self._expected = None
        if self._announced[-1:] == self._returned:
            self._announced = []
        self._returned = []
        self._exchange.steps.end_loop(loop)

    def _plan(self, batch: PlannedRequests) -> None:
        """Exchanges a batch's ids and plans the requested rows, after the batch before.

        The lookup raises errors about ids. This method raises DisagreementError.
        """
        if batch.is_exchanged:
            return
        with self._planning.after_current(self._exchange.held.device):
            batch.exchange_ids()
        batch.planned_until(self._planning.end)
        if isinstance(batch.error, DisagreementError):  # all ranks discard their batches
            raise batch.error
        if batch.error is None:
            before = None if batch.after is None else batch.after.own
            batch.own = self._exchange.steps.plan_ahead(batch.ids, before)
        batch.after = None

    def _exchange_and_plan(self, planned: PlannedRequests) -> None:
        """Exchanges the ids of a batch, and plans the rows requested from this rank."""
        self._exchange_ids(planned)
        self._expect([*self._announced, planned])
        try:
            planned.announced = self._exchange.steps.plan_announced(planned.ids)
        except (IndexError, RuntimeError):
            self._ranks.count_error()
            raise

    def _exchange_ids(self, planned: PlannedRequests) -> None:
        """Exchanges the ids of a batch; raises its error on all ranks."""
        if not planned.exchange_ids():
            assert planned.error is not None
            self._ranks.count_error()
            raise planned.error
        planned.join()

    @staticmethod
    @contextmanager
    def together(lookups: Sequence[tuple[Requests, Sequence[Ids], bool]]) -> Iterator[None]:
        """See SharedLookups.together."""
        alike: dict[object, dict[Requests, tuple[Sequence[Ids], bool]]] = {}
        for table, parts, trains in lookups:
            table._forget_after_errors()
            table._distances = table._distances.to(table._exchange.held.device)
            alike.setdefault(table.shared_by, {})[table] = parts, trains
        try:
            for by_table in alike.values():
                joint = JointRequests(by_table)
                for table in by_table:
                    table._joint = joint
            yield
        finally:
            for table, *_ in lookups:
                table._joint = None

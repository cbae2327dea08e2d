"""Requests: what ranks ask each other for, at a lookup or ahead of it.

Ids go to the owners of their rows, each distinct one once. Requests of a batch that is announced,
or planned by a loop, are asked then; at the lookup they are known again by their tensors, never by
values: all ranks run the same code, and have other values. A request serves one lookup. A rank
that passes one tensor, such as an empty one, to several lookups therefore asks as often as others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from weakref import WeakMethod

import torch
from torch import Tensor

from speedtorch.memory.side_stream import SideStream
from speedtorch.nn.shared_lookups import Ids
from speedtorch.parallel.agreement import Agreement
from speedtorch.parallel.block_cyclic import BlockCyclic
from speedtorch.parallel.calls import Call, Kind
from speedtorch.parallel.counted_requests import Request
from speedtorch.parallel.fair_shares import FairShares
from speedtorch.parallel.fixed_requests import FixedRequest
from speedtorch.parallel.lookup_request import Lookup, LookupRequest, in_rounds
from speedtorch.parallel.lookup_turn import LookupTurn
from speedtorch.parallel.ranks import Ranks
from speedtorch.parallel.sharded_ids import ShardedIds
from speedtorch.plan.fixed_size_batch import BAD_IDS
from speedtorch.step.announcements import Announced
from speedtorch.step.disagreement import DisagreementError
from speedtorch.step.exchange import Exchange
from speedtorch.step.fixed_blocks import OTHER_MODULE, OVER_SHARE
from speedtorch.step.fixed_memory import FixedMemory
from speedtorch.step.step import Batch

__all__ = ["PlannedRequests", "Requests"]


class PlannedRequests:
    """The requests of a batch, and the batch of the rows that this rank is asked for."""

    def __init__(self, requests: Sequence[LookupRequest], after: PlannedRequests | None) -> None:
        self.requests = requests
        self.after = after
        self.own: Batch | None = None
        self.announced: Announced | None = None
        """What the exchange is to announce of them."""
        self.error: Exception | None = None
        self.is_asked = False
        self._until: torch.cuda.Event | None = None

    def planned_until(self, event: torch.cuda.Event | None) -> None:
        """Says after which event all is there that was made beside the current stream."""
        self._until = event

    def join(self) -> None:
        """What the current stream gets from now on begins when all is there."""
        if self._until is not None:
            torch.cuda.current_stream(self._until.device).wait_event(self._until)
            self._until = None

    @property
    def waits_for_ranks(self) -> bool:
        """Whether ids have yet to go to the other ranks."""
        return not all(each.round.is_asked for each in self.requests)

    def tell(self) -> None:
        """Tells the other ranks how many rows they will be asked for; see LookupRound.tell."""
        for each in self.requests:
            each.round.tell()

    def ask(self) -> bool:
        """Asks the other ranks, once; whether their answers are good. See error, if not."""
        if not self.is_asked:
            self.is_asked = True
            try:
                for each in self.requests:
                    each.ask()
            except Exception as error:
                self.error = error
        return self.error is None

    def plan_announced(self, exchange: Exchange) -> None:
        """Plans what the exchange is to announce of them; see PlannedSteps.plan_announced."""
        self.announced = exchange.steps.plan_announced(self.ids)

    @property
    def ids(self) -> list[Tensor]:
        """Of the rows of this rank that each of the lookups asks for."""
        return [each.asked.ids for each in self.requests]

    @property
    def faults(self) -> list[Tensor]:
        """What is known to be wrong with blocks of the ids, `[1]` each, on the device."""
        return [each.fault for each in self.requests if isinstance(each, FixedRequest)]


class RequestMaker:
    """Makes the requests of a table's lookups.

    Args:
        exchange: of the rows that this rank owns.
        dealt: which rank owns which row.
        ranks: that own them.
        number: of the table, the same on all ranks.
        fixed: for an exchange with a capacity what its FixedRequests are made with.
    """

    def __init__(
        self,
        exchange: Exchange,
        dealt: BlockCyclic,
        ranks: Ranks,
        number: int,
        fixed: tuple[FairShares, int, Agreement] | None,
    ) -> None:
        self._exchange, self._dealt, self._ranks = exchange, dealt, ranks
        self._number, self._fixed = number, fixed
        self._distances = dealt.distances()
        self._others: JointRequests | None = None
        self.restart()

    def restart(self) -> None:
        """Counts lookups from 0 again: before an error some ranks may have counted one more."""
        self._lookups = itertools.count()

    @property
    def shared_by(self) -> tuple[Ranks, torch.device]:
        """The ranks that own the rows, and where the rows of a step are."""
        return self._ranks, self._exchange.held.device

    def distances(self) -> Tensor:
        """Those of the blocks of rows, on the device, where they are from the first lookup on."""
        if (device := self._exchange.held.device) != self._distances.device:
            self._distances = self._distances.to(device)
        return self._distances

    def join(self, others: JointRequests | None) -> None:
        """Makes the next requests with those of other tables; None: alone."""
        self._others = others
        self.distances()

    def requests(self, parts: Sequence[Ids], *, trains: bool = True) -> list[LookupRequest]:
        """The requests of lookups, with those of the tables of join() if there are any."""
        made = None if self._others is None else self._others.take(self)
        if made is None:
            in_rounds(made := self.made(parts, trains), self._ranks)
        return made

    def made(self, parts: Sequence[Ids], trains: bool) -> list[LookupRequest]:
        """New requests of lookups, which no rank knows yet."""
        fixed, device = self._fixed if trains else None, self._exchange.held.device
        share, distances = -1 if fixed is None else fixed[0].rows, self.distances()
        made: list[LookupRequest] = []
        for ids in parts:
            turn = LookupTurn(ids, device)
            there = turn.ids.to(device, non_blocking=True)
            sharded = ShardedIds(there, self._dealt, distances, share)
            number, name = next(self._lookups), self._exchange.name
            lookup = Lookup(name, self._number, turn, sharded, number)
            made.append(Request(lookup) if fixed is None else FixedRequest(lookup, *fixed))
        return made


class JointRequests:
    """Lookups of several tables; the first table that makes its requests makes those of all."""

    def __init__(self, lookups: Mapping[RequestMaker, tuple[Sequence[Ids], bool]]) -> None:
        self._lookups = lookups
        self._made: dict[RequestMaker, list[LookupRequest]] | None = None

    def take(self, maker: RequestMaker) -> list[LookupRequest] | None:
        """The requests of a table, once."""
        if self._made is None:
            self._made = {each: each.made(*lookups) for each, lookups in self._lookups.items()}
            in_rounds([each for made in self._made.values() for each in made], maker.shared_by[0])
        return self._made.pop(maker, None)


class Requests:
    """Asks for rows of a table, ahead where it is told to; every call is one of all ranks.

    Args:
        exchange, dealt, ranks, number: As for RequestMaker.
        none: for an exchange with a capacity the id of a row that is none, or of the padding's.
        padded: whether some rank owns the padding's.
    """

    ahead = 3
    """Batches that are planned ahead: those of PlannedSteps, and one that is asked for."""

    def __init__(
        self,
        exchange: Exchange,
        dealt: BlockCyclic,
        ranks: Ranks,
        number: int,
        none: int | None,
        *,
        padded: bool,
    ) -> None:
        self._exchange, self._ranks, self._number = exchange, ranks, number
        self._told: list[PlannedRequests] = []
        """Announced since the last lookup before."""
        self._told_in = 0
        """Of how many batches the exchange had seen the end then."""
        self._expected: PlannedRequests | None = None
        """Of the batch that a loop gives."""
        self._was_looked_up = False
        self._faults = ranks.faults
        self._planning = SideStream("planning")
        self._latest: PlannedRequests | None = None
        """What was looked up last."""
        exchange.steps.leave_lookups_unchecked()
        exchange.steps.agree_on_steps(WeakMethod(self.before_step))
        self._agreement: Agreement | None = None
        fixed = None
        if isinstance(memory := exchange.memory, FixedMemory):
            assert none is not None
            self._agreement = Agreement(memory, ranks)
            memory.agree_with(self._agreement)
            fixed = FairShares.of(memory.capacity, dealt, padded=padded), none, self._agreement
        self._maker = RequestMaker(exchange, dealt, ranks, number, fixed)

    def of(self, ids: Ids) -> LookupRequest:
        """The request of a lookup of a step, which is asked now unless it was before.

        None was for a lookup without gradients, which may be of one of the planned tensors on some
        ranks alone.

        Raises IndexError on all ranks if an id on one of them is out of range.
        """
        self._before_lookup()
        found, fault = self._planned_for(ids) if torch.is_grad_enabled() else (None, None)
        if found is None:
            (request,) = self._maker.requests([ids])
            found = PlannedRequests([request], None), request
        planned, request = found
        self._ask(planned)
        request.turn.come()
        self._latest = planned
        self._expect([*self._told, planned], fault)
        return request

    def _planned_for(
        self, ids: Ids
    ) -> tuple[tuple[PlannedRequests, LookupRequest] | None, Tensor | None]:
        """What was planned for a lookup, and whether the ranks' lookups differ, as meet() says."""
        self._was_looked_up = True
        found, is_next, some_wait = None, False, False
        for batches in (self._told, [] if self._expected is None else [self._expected]):
            every = [(batch, each) for batch in batches for each in batch.requests]
            waiting = [(batch, each) for batch, each in every if not each.turn.has_come]
            some_wait = some_wait or bool(waiting)
            places = [n for n, (_, each) in enumerate(waiting) if each.turn.is_of(ids)]
            if places:
                found, is_next = waiting[places[0]], places[0] == 0
                break
        fault = None
        if some_wait:
            fault = (
                self.meet(Kind.COUNTS) if found is None else self.meet(Kind.ROWS, found[1].lookup)
            )
        for planned in self._told:
            if not planned.is_asked:
                self._ask_all(planned)
                self._exchange.steps.announce(planned.announced)
        if found is not None and not is_next and self._agreement is not None:
            self._ask(found[0])
            raise RuntimeError(
                f"{self._exchange.name}: with a capacity ranks take lookups for those that come"
                " next: make them in the order of announce() and of prefetch's ids"
            )
        return found, fault

    def meet(self, kind: Kind, lookup: int = 0) -> Tensor | None:
        """Raises DisagreementError on all ranks if some of them are at another exchange.

        Where what is wrong with rows of a capacity is raised later, gives whether they are: `[1]`.
        """
        calls = [Call(kind, self._number, lookup)]
        if self._agreement is not None:
            return self._agreement.meet(calls)
        self._ranks.meet(self._exchange.name, calls, self._exchange.held.device)
        return None

    def before_gradients(self, lookup: int) -> None:
        """Called before gradients of a lookup's rows go to their owners; as meet()."""
        fault = self.meet(Kind.GRADIENTS, lookup)
        if fault is not None and self._agreement is not None:
            self._agreement.stop(fault)

    def before_step(self, met: set[object], *, fails: bool) -> None:
        """Called before an optimizer steps the rows, or `fails` to, outside of a turn.

        Raises DisagreementError on all ranks unless all of them are about to step. Ranks compare
        once for all tables, of which `met` has noted it; those of several machines do not.
        """
        if self._ranks.meets_beside_the_device and self._ranks not in met:
            met.add(self._ranks)
            call = Call(Kind.NO_STEP if fails else Kind.STEP, self._number)
            self._ranks.meet(self._exchange.name, [call], self._exchange.held.device)

    def of_no_step(self, ids: Ids) -> LookupRequest:
        """The request of a lookup that trains nothing; of any number of rows.

        Raises IndexError on all ranks if an id on one of them is out of range.
        """
        if self._agreement is None:
            return self.of(ids)
        self._before_lookup()
        (request,) = self._maker.requests([ids], trains=False)
        self._ask(PlannedRequests([request], None))
        return request

    def _forget_after_faults(self) -> None:
        """Forgets what was planned before an error on all ranks.

        Some of them may then look up the same tensors, and those whose ids were bad others.
        """
        if self._faults != self._ranks.faults:
            self._faults = self._ranks.faults
            self._told, self._expected = [], None
            self._maker.restart()
            with self._exchange.turn:
                self._exchange.held.announced.give_up()

    def _before_lookup(self) -> None:
        """Raises what was found wrong at the last lookup; RuntimeError within a CUDA graph."""
        if self._exchange.held.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self._exchange.name}: a CUDA graph cannot hold a lookup of rows that are shared"
                " out among ranks; capture what comes after it"
            )
        self._forget_after_faults()
        latest, self._latest = self._latest, None
        if self._agreement is None:
            return
        self._agreement.settle_calls()
        if not (fault := self._agreement.last()):
            return
        self._told = []
        try:
            self._agreement.settle(fault)
        except (IndexError, RuntimeError):
            if fault in (BAD_IDS, OVER_SHARE):
                for each in [] if latest is None else latest.requests:
                    if isinstance(each, FixedRequest) and (own := each.own_error()) is not None:
                        raise own from None
            raise

    def _expect(self, plans: Sequence[PlannedRequests], fault: Tensor | None = None) -> None:
        """Tells the agreement of ranks what is known to be wrong with what may be held now."""
        if self._agreement is not None:
            faults = [fault for planned in plans for fault in planned.faults]
            faults += [] if fault is None else [fault * OTHER_MODULE]
            self._agreement.expect(faults)

    def plan_announced(self, parts: Sequence[Ids]) -> PlannedRequests:
        """As PlannedSteps.plan_announced; a batch before that may have been given up is."""
        self._forget_after_faults()
        if self._was_looked_up or self._told_in != self._exchange.steps.batches_over:
            self._told, self._was_looked_up = [], False
        planned = PlannedRequests(self._maker.requests(parts), None)
        if self._exchange.held.device.type == "cpu":  # nothing is gained by waiting later
            self._ask_all(planned)
        else:
            planned.tell()
        return planned

    def announce(self, announced: PlannedRequests) -> None:
        """As PlannedSteps.announce."""
        self._told_in = self._exchange.steps.batches_over
        self._told.append(announced)
        if announced.is_asked:
            self._exchange.steps.announce(announced.announced)

    def give_up(self) -> None:
        """As PlannedSteps.give_up."""
        self._told = []
        self._exchange.steps.give_up()

    def plan_ahead(self, parts: Sequence[Tensor], after: PlannedRequests | None) -> PlannedRequests:
        """As PlannedSteps.plan_ahead; it plans the batch before, whose counts have come."""
        self._forget_after_faults()
        self._maker.distances()  # on the current stream
        with self._planning.after_current(self._exchange.held.device):
            planned = PlannedRequests(self._maker.requests(parts), after)
            planned.tell()
        planned.planned_until(self._planning.end)
        if after is not None:
            self._plan(after)
        return planned

    def expect(self, batch: PlannedRequests | None) -> None:
        """As PlannedSteps.expect."""
        self._forget_after_faults()
        self._expected = batch
        if batch is not None:
            if batch.waits_for_ranks:  # as the last batch of a loop does
                self.meet(Kind.IDS, batch.requests[0].lookup)
            self._plan(batch)
        self._exchange.steps.expect(None if batch is None else batch.own)

    def start_loop(self, loop: object) -> bool:
        """As PlannedSteps.start_loop."""
        return self._exchange.steps.start_loop(loop)

    def refuse_bad(self, parts: Sequence[Tensor]) -> None:
        """Nothing: the lookup raises it on all ranks."""

    def end_loop(self, loop: object) -> None:
        """As PlannedSteps.end_loop."""
        self._expected = None
        self._exchange.steps.end_loop(loop)

    def _plan(self, batch: PlannedRequests) -> None:
        """Asks, and plans what this rank is asked for, as what follows the batch before.

        Errors about ids are raised by the lookup, and DisagreementError now.
        """
        if batch.is_asked:
            return
        with self._planning.after_current(self._exchange.held.device):
            batch.ask()
        batch.planned_until(self._planning.end)
        if isinstance(batch.error, DisagreementError):  # all ranks forget their batches
            raise batch.error
        if batch.error is None:
            before = None if batch.after is None else batch.after.own
            batch.own = self._exchange.steps.plan_ahead(batch.ids, before)
        batch.after = None

    def _ask_all(self, planned: PlannedRequests) -> None:
        """Asks the other ranks, and plans what they ask for."""
        self._ask(planned)
        self._expect([*self._told, planned])
        try:
            planned.plan_announced(self._exchange)
        except (IndexError, RuntimeError):
            self._ranks.count_fault()
            raise

    def _ask(self, planned: PlannedRequests) -> None:
        """Asks the other ranks; raises what is wrong."""
        if not planned.ask():
            assert planned.error is not None
            self._ranks.count_fault()
            raise planned.error
        planned.join()

    @staticmethod
    @contextmanager
    def together(lookups: Sequence[tuple[Requests, Sequence[Ids], bool]]) -> Iterator[None]:
        """As SharedLookups.together."""
        alike: dict[object, dict[RequestMaker, tuple[Sequence[Ids], bool]]] = {}
        for each, parts, trains in lookups:
            each._forget_after_faults()
            alike.setdefault(each._maker.shared_by, {})[each._maker] = parts, trains
        with ExitStack() as end:
            for some in alike.values():
                joint = JointRequests(some)
                for maker in some:
                    end.callback(maker.join, None)
                    maker.join(joint)
            yield

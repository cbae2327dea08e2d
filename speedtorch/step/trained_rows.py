"""TrainedRows: all rows of a module, as it looks them up and as an optimizer trains them."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedtorch.ops.functions import pool_rows, rows_at
from speedtorch.step.cache_budget import CacheBudget, Need
from speedtorch.step.cached_store import CachedStore
from speedtorch.step.hot_rows import CacheReport
from speedtorch.step.parameter_view import OptimizerState
from speedtorch.step.row_store import Fields, RowStore
from speedtorch.step.row_weight import RowWeight
from speedtorch.step.step import Batch, LookupPlaces
from speedtorch.step.stepping import places_of_weights
from speedtorch.step.turn import alone
from speedtorch.step.whole_weight import WholeWeight
from speedtorch.torch_internals import (
    apply_of,
    as_plain,
    current_backward,
    top_saved_tensors_hooks,
    without_autograd,
)

__all__ = ["Bags", "TrainedRows", "check_once", "rows_held_by", "rows_of_parameter", "summed"]

_HALF = (torch.float16, torch.bfloat16)


class Bags(NamedTuple):
    """How the rows of ids are added up, bag by bag: feature after feature, sample after sample."""

    offsets: Tensor
    """Where each bag's ids begin, and the number of ids: `[features * samples + 1]`."""
    of_ids: Tensor
    """Of each id the row of the result that it goes to: `sample * features + feature`."""
    features: int
    mean: bool = False
    """Whether all bags are divided by their numbers of ids."""
    divisors: Tensor | None = None
    """By what each row of the result is divided, `[samples * features, 1]`, if any is."""

    def pool(self, rows: Tensor, places: Tensor) -> Tensor:
        """The bags of rows `[n, columns]` by their places: `[samples * features, columns]`."""
        pooled = pool_rows(rows, places, self.offsets, self.features, mean=self.mean)
        if self.divisors is not None and not self.mean:
            pooled /= self.divisors
        return pooled

    def share(self, gradient: Tensor) -> Tensor:
        """What each row of a bag gets of the bag's gradient, multiplied as torch does."""
        return gradient if self.divisors is None else gradient * self.divisors.reciprocal()


class TrainedRows(WholeWeight):
    """All rows of an Embedding, those of a step as its parameter, and the state kept of them.

    It knows what trains which rows: the table knows it as its holder, the parameter as what it
    stands for, and the hooks of every optimizer's step find it through the parameter.

    Args:
        name: what errors call it.
        table: all rows.
        parameter: has the rows of a step; an optimizer's own step function works on it. Everything
            else is given `weight`, which stands for all rows and keeps this object alive.
        padding: id of the row that is never trained, or None; with a capacity that behind the last
            may be one that is none, whose weights are zeros.
        capacity: the most rows of a step, or None for any number.
        rounding: how held rows are rounded, if the table stores them in 16 bits.
    """

    budget: CacheBudget | None = None
    """What the bytes of the cache are a share of."""

    def cache(
        self, nbytes: int | None, members: Tensor | None = None, budget: CacheBudget | None = None
    ) -> None:
        """Keeps rows that are loaded often on the device, in so many bytes; None: no more.

        With `members` `[n]` those of these distinct ids. `budget` is what the bytes are a share of.
        A table without rows has no cache. Raises RuntimeError while a CUDA graph uses the rows'
        memory; nothing has changed then.
        """
        kind, rounding = self.held_dtype, self.rounding
        store = RowStore(self.table, kind, rounding)
        if nbytes is not None and self.shape[0]:
            store = CachedStore(self.name, self.table, kind, nbytes, members, rounding)
        with as_plain():
            self.exchange.held.use(store)
        self.budget = budget

    @property
    def cache_bytes(self) -> int | None:
        """The bytes that the cache was given, if there is one."""
        return self._store.nbytes if isinstance(self._store, CachedStore) else None

    def cache_need(self, state: Fields | None = None) -> Need:
        """What a cache of all rows takes, as they are kept now, or with these fields of state."""
        fields = self.exchange.held.fields
        if state is not None:
            fields = {"weight": fields["weight"], **state}
        stored = self._stored(fields).values()
        row_bytes = sum(prod(shape) * dtype.itemsize for shape, dtype in stored)
        return Need(self.shape[0], row_bytes)

    def _stored(self, fields: Fields) -> Fields:
        """Held fields as the table has them."""
        return fields if self.rounding is None else self.rounding.stored_fields(fields)

    @alone
    def cache_report(self) -> CacheReport:
        """What the cache holds and saves; ValueError if there is none, or nothing was loaded."""
        if not self.shape[0]:
            raise ValueError(f"{self.name}: it has no rows here, and so no cache to report of")
        if not isinstance(self._store, CachedStore):
            raise ValueError(
                f"{self.name}: it has no cache to report of; give it one by cache= or"
                " speedtorch.cache(module, '1GiB')"
            )
        return self._store.report()

    def rows_of(
        self, ids: Tensor, max_norm: float | None = None, norm_type: float = 2.0
    ) -> tuple[Tensor, Tensor]:
        """The rows that ids name, held from now until the optimizer's next step is done.

        Gives positions of the shape of ids, and the held rows `[n, ...]`, of which the last is the
        padding's, both on the device; gradients of the rows go to the parameter. With `max_norm`
        rows of a larger norm are shortened, as torch.embedding_renorm_ does. Bad ids raise
        IndexError, and what is held did not change.
        """
        self._check_max_norm(max_norm)
        with self.turn:
            self.claim()
            found = self.exchange.hold(ids)
            if found.has_moved and current_backward() != -1 and top_saved_tensors_hooks(True):
                raise RuntimeError(
                    f"{self.name}: a checkpoint computes a lookup again after other rows have"
                    " joined the step; announce() all ids of the step before its first lookup"
                )
            # These count their own changes: rows that join the step are no change of these.
            rows = self.exchange.held.now.rows[0].detach()
            if max_norm is not None:
                self.exchange.held.change()
                torch.embedding_renorm_(rows, found.positions, max_norm, norm_type)
                if self._padding is not None:
                    self._store.write(torch.tensor([self._padding]), rows[-1:])
                    self.exchange.memory.note_padding()
                self.parameter_view.mark()
            # In lists, as autograd is to make no views of them.
            return found.positions, _rows_of_step(self.weight, [rows], [found.positions], self)

    def _check_max_norm(self, max_norm: float | None) -> None:
        """Raises NotImplementedError where rows of 16 bits would be shortened."""
        if max_norm is not None and self.rounding is not None:
            raise NotImplementedError(
                f"{self.name}: rows that are stored in 16 bits are rounded after steps, and"
                " max_norm would change them at lookups: leave one of the two out"
            )

    def summed(self, ids: Tensor, bags: Bags | None = None) -> Tensor:
        """The rows that ids name, `[*ids.shape, ...]`, held as those of `rows_of` are.

        With `bags` they are added up: `[samples * features, ...]`.
        """
        with self.turn:
            if self.table.claim.holder is not self:  # as claim() asks, which most steps are spared
                self.claim()
            found = self.exchange.hold(ids)
            looked_up: Tensor = _summed_lookup(self._weight(), found, bags, self)
            return looked_up

    @alone
    def borrow(
        self, ids: Tensor, max_norm: float | None, norm_type: float
    ) -> tuple[Tensor, Tensor]:
        """As `rows_of`, but of rows that no step holds."""
        self._check_max_norm(max_norm)
        batch = self.exchange.memory.planned([ids])
        batch.count()
        borrowed, local = batch.ids, batch.parts.local(0)
        if self._padding is not None:
            borrowed = torch.cat([borrowed, borrowed.new_full((1,), self._padding)])
        rows = self.read(borrowed)
        if max_norm is not None:
            with torch.no_grad():
                torch.embedding_renorm_(rows, local, max_norm, norm_type)
            # Those of them that a step holds are read again.
            self.exchange.held.write_back()
            self._store.write(borrowed, rows)
        return local, rows

    def adds_in_order(self) -> bool:
        """Whether gradients must be added up by torch, whose sums have other bits than ours."""
        if self.parameter.is_cpu:
            # Ours are torch's, but for half precision, which torch rounds after each row, and
            # sparse gradients, of which torch adds all lookups' rows of an id one by one.
            state = self.parameter_view.kept.state
            return self.held_dtype in _HALF or (state is not None and state.sparse)
        return torch.are_deterministic_algorithms_enabled()

    can_agree = True

    def agree_on_pace(self, seconds: float, is_idle: bool) -> tuple[float, bool]:
        """What counts of how long a step takes here, and whether the GPU was idle: just that."""
        return seconds, is_idle

    def fail(self, error: Exception, *, trains: bool, announced: int = 0) -> None:
        """Called in place of a lookup whose ids are none: nothing is to be done here."""

    def end_by_error(self) -> None:
        """Called before a loop of batches raises an error: nothing is to be done here."""

    def gives_sparse(self, *, asked: bool) -> bool:
        """Whether autograd makes a sparse gradient, as it is asked to or as the optimizer wants."""
        # torch adds up the rows of a dense one in a tenth of the time on a GPU, but not in the same
        # order; the step makes it sparse when the optimizer wants that.
        state = self.state
        return asked or (state is not None and state.sparse and self.adds_in_order())

    @alone
    def attach(self, state: OptimizerState, fields: Fields) -> bool:
        """Keeps fields of state, name to (row shape, dtype), beside the weight.

        Returns whether they have values already, because the table was read from a file with them.
        Raises MemoryError if there is no room for them; nothing has changed.
        """
        self.claim()
        self.exchange.memory.refuse_if_captured("attaching an optimizer")
        self.exchange.memory.raise_faults()
        if self.rounding is not None:
            self.rounding.check_fields({"weight": self.exchange.held.fields["weight"], **fields})
        self.exchange.held.write_back()
        has_values = self.table.make_room(self._stored(fields))
        self.parameter_view.keep(state, fields)
        self.exchange.held.show_anew()
        return has_values

    @alone
    def detach(self, *, was_read: bool = False) -> None:
        """Keeps the weight alone; the fields of the state stay unused, held rows stay held.

        With `was_read` the next optimizer's state goes on with what a file has given.
        """
        self.exchange.memory.refuse_if_captured("detaching its optimizer")
        self.exchange.memory.raise_faults()
        self.exchange.held.write_back()
        self.parameter_view.keep(None, {})
        self.exchange.held.show_anew()
        self.table.note_read(was_read)


class _RowsOfStep(torch.autograd.Function):
    """The held rows as the operand of a lookup; their gradient goes to `asker`.

    torch's own node for a parameter's gradient knows one shape for its lifetime. The rows of a step
    become more with each lookup, so their gradient takes this way round it.
    """

    @staticmethod
    def forward(
        ctx: Any, parameter: Tensor, rows: list[Tensor], places: list[Tensor], asker: TrainedRows
    ) -> Tensor:
        step = asker.exchange.held.now
        ctx.asker, ctx.ids, ctx.number, ctx.places = asker, step.ids, step.number, places
        ctx.pending = asker.exchange.held.backwards.made(step.number)
        return rows[0]  # in a list, or autograd would take the result for a view of an input

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        check_once(gradient)
        with ctx.asker.turn:  # or another thread would find that no gradient is to come
            ctx.pending = None
            ctx.asker.add_gradient(gradient, ctx.ids, ctx.number, lambda: ctx.places[0])
        return None, None, None, None


class _SummedLookup(torch.autograd.Function):
    """Rows by their places, whose gradients are added up by the plan of their batch.

    What torch's embedding computes, in a third of the time on a GPU: the batch is sorted already.
    """

    @staticmethod
    def forward(
        ctx: Any, parameter: Tensor, found: LookupPlaces, bags: Bags | None, asker: TrainedRows
    ) -> Tensor:
        ctx.asker, ctx.batch, ctx.part, ctx.bags = asker, found.batch, found.part, bags
        ctx.number = number = asker.exchange.held.now.number
        ctx.pending = asker.exchange.held.backwards.made(number)
        held = asker.parameter.detach()
        if bags is None:
            return rows_at(held, found.positions)
        with without_autograd():
            return bags.pool(held, found.positions)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        check_once(gradient)
        asker, batch, part = ctx.asker, ctx.batch, ctx.part
        with asker.turn:  # or another thread would find that no gradient is to come
            ctx.pending = None
            if ctx.number != asker.exchange.held.now.number:
                if batch.parts.shape(part).numel() == 0:  # of bags without ids it is no gradient
                    return None, None, None, None
                asker.check_held(ctx.number)
            added = summed(gradient, batch, part, ctx.bags)
            asker.add_gradient(added, batch.ids, ctx.number, lambda: batch.parts.local(part))
        return None, None, None, None


_rows_of_step, _summed_lookup = map(apply_of, (_RowsOfStep, _SummedLookup))


def summed(gradient: Tensor, batch: Batch, part: int, bags: Bags | None) -> Tensor:
    """The gradient of a lookup's result, added up for each distinct id of its batch."""
    rows, source = rows_of_ids(gradient, bags)
    with without_autograd():
        return batch.summed(rows, part, source)


def rows_of_ids(gradient: Tensor, bags: Bags | None) -> tuple[Tensor, Tensor | None]:
    """The gradient of a lookup's result as rows, and which row each id has: None if its own."""
    if gradient.dim() != 2:
        rows = gradient.numel() // max(1, gradient.shape[-1])
        gradient = gradient.reshape(rows, gradient.shape[-1])
    if bags is not None:
        gradient = bags.share(gradient)
    if gradient.stride(1) != 1:
        gradient = gradient.contiguous()
    return gradient, None if bags is None else bags.of_ids


def check_once(gradient: Tensor) -> None:
    """Raises NotImplementedError within a backward that is to be differentiated itself."""
    if torch.is_grad_enabled() and gradient.requires_grad:
        raise NotImplementedError(
            "gradients of gradients do not go through an Embedding's rows; use torch.nn"
        )


def rows_held_by(optimizer: torch.optim.Optimizer) -> list[TrainedRows]:
    """The rows whose weights an optimizer holds, in its order."""
    return [held[place]._rows for held, place in places_of_weights(optimizer)]


def rows_of_parameter(parameter: Tensor) -> TrainedRows | None:
    """The rows that a parameter stands for, if it does for any."""
    if type(parameter) is not RowWeight or parameter._rows._weight() is not parameter:
        return None
    rows: TrainedRows = parameter._rows
    return rows

"""TrainedRows: all rows of a module, for its lookups and its optimizer."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedtorch.ops.functions import pool_rows, rows_at
from speedtorch.step.cache_budget import CacheBudget, Need
from speedtorch.step.cached_store import CachedStore
from speedtorch.step.fixed_memory import FixedMemory, Replays
from speedtorch.step.hot_rows import CacheReport
from speedtorch.step.parameter_view import OptimizerState
from speedtorch.step.resident_store import store_of
from speedtorch.step.row_lock import serialized
from speedtorch.step.row_store import Fields
from speedtorch.step.row_weight import RowWeight
from speedtorch.step.step import Batch, LookupPlaces
from speedtorch.step.stepping import places_of_weights
from speedtorch.step.whole_weight import WholeWeight
from speedtorch.torch_internals import (
    apply_of,
    as_plain,
    current_backward,
    top_saved_tensors_hooks,
    without_autograd,
)

__all__ = ["Bags", "TrainedRows", "check_once", "rows_of_optimizer", "rows_of_parameter", "summed"]

_HALF = (torch.float16, torch.bfloat16)


class Bags(NamedTuple):
    """Bags of ids whose rows are summed or averaged, ordered by feature, then by sample."""

    offsets: Tensor
    """The first id of each bag, then the number of ids: `[features * samples + 1]`."""
    of_ids: Tensor
    """The row of the result to which each id is added: `sample * features + feature`."""
    features: int
    mean: bool = False
    """Whether each bag is divided by its number of ids."""
    divisors: Tensor | None = None
    """Divisor of each row of the result, `[samples * features, 1]`, or None."""

    def pool(self, rows: Tensor, places: Tensor) -> Tensor:
        """Pools rows `[n, columns]` at `places` into bags `[samples * features, columns]`."""
        pooled = pool_rows(rows, places, self.offsets, self.features, mean=self.mean)
        if self.divisors is not None and not self.mean:
            pooled /= self.divisors
        return pooled

    def share(self, gradient: Tensor) -> Tensor:
        """Divides each bag's gradient, multiplying by the divisor's reciprocal as torch does."""
        return gradient if self.divisors is None else gradient * self.divisors.reciprocal()


class TrainedRows(WholeWeight):
    """All rows of an Embedding, the step's rows as a parameter, and the optimizer state per row.

    The table records this object as its holder. Optimizers have a RowWeight as a parameter, which
    refers to this object; the hooks of optimizer steps find this object through the RowWeight.

    Args:
        name: The name in error messages.
        table: All rows.
        parameter: Contains the step's rows, on which the optimizer's step function computes. All
            other code uses `weight`, which represents all rows and keeps this object alive.
        padding: Id of the row that is never trained, or None. With a capacity the id after the last
            row is allowed; its weights are zeros.
        capacity: The maximum number of rows of a step, or None for any number.
        rounding: Rounds the step's rows, if the table stores them in 16 bits.
    """

    budget: CacheBudget | None = None
    """The budget of which the cache's bytes are a share."""

    def cache(
        self, nbytes: int | None, members: Tensor | None = None, budget: CacheBudget | None = None
    ) -> None:
        """Caches frequent rows on the device in `nbytes` bytes; None removes the cache.

        `members` `[n]` limits the cache to these unique ids. The bytes are a share of `budget`. A
        table without rows has no cache. Raises RuntimeError, without any change, while a CUDA graph
        uses the memory of the rows.
        """
        kind, rounding = self.held_dtype, self.rounding
        store = store_of(self.table, kind, rounding)
        if nbytes is not None and self.shape[0]:
            store = CachedStore(self.name, self.table, kind, nbytes, members, rounding)
        with as_plain():
            self.exchange.held.use(store)
        self.budget = budget

    @property
    def cache_bytes(self) -> int | None:
        """The size of the cache in bytes, or None without a cache."""
        return self._store.nbytes if isinstance(self._store, CachedStore) else None

    def cache_need(self, state: Fields | None = None) -> Need:
        """The memory that a cache of all rows needs, with the current state or with `state`.

        Raises NotImplementedError for a file table with `resident`.
        """
        if self.table.resident is not None:
            raise NotImplementedError(
                f"{self.name}: a cache needs all rows in host memory, but only the most used rows"
                " of this file table are there. Use resident= or cache=, not both."
            )
        fields = self.exchange.held.fields
        if state is not None:
            fields = {"weight": fields["weight"], **state}
        stored = self._stored(fields).values()
        row_bytes = sum(prod(shape) * dtype.itemsize for shape, dtype in stored)
        return Need(self.shape[0], row_bytes)

    def _stored(self, fields: Fields) -> Fields:
        """The shapes and dtypes with which the table stores these fields."""
        return fields if self.rounding is None else self.rounding.stored_fields(fields)

    @serialized
    def cache_report(self) -> CacheReport:
        """Reports rows and hits of the cache; ValueError without rows, a cache or a load so far."""
        if not self.shape[0]:
            raise ValueError(
                f"{self.name}: the table has no rows on this rank, and so no cache to report."
            )
        if not isinstance(self._store, CachedStore):
            raise ValueError(
                f"{self.name}: there is no cache to report. Create one with cache= or"
                " speedtorch.cache(module, '1GiB')."
            )
        return self._store.report()

    def rows_of(
        self, ids: Tensor, max_norm: float | None = None, norm_type: float = 2.0
    ) -> tuple[Tensor, Tensor]:
        """Looks up ids, whose rows join the current step.

        Returns positions in the shape of the ids and the step's rows `[n, ...]`, both on the
        device. The padding row is the last. Backward adds gradients of the rows to the parameter.
        With `max_norm` rows are renormalized as in torch.embedding_renorm_. Invalid ids raise
        IndexError, and the step's rows do not change; with a capacity on a GPU, a later call raises
        the error.
        """
        self._check_max_norm(max_norm)
        with self.lock:
            self.claim()
            found = self.exchange.hold(ids)
            if found.has_moved and current_backward() != -1 and top_saved_tensors_hooks(True):
                raise RuntimeError(
                    f"{self.name}: activation checkpointing repeats a lookup after other rows have"
                    " joined the step. Call the module's announce() with all ids of the step"
                    " before its first lookup."
                )
            # A detached tensor has its own version counter, so that rows that join the step later
            # do not count as a change.
            rows = self.exchange.held.now.rows[0].detach()
            if max_norm is not None:
                self.exchange.held.change()
                _renormalize(rows, found.positions, max_norm, norm_type)
                if self._padding is not None:
                    # The transfer may read the padding row, and change slots of a cache.
                    self.exchange.held.transfer_stream.join()
                    self._store.write(torch.tensor([self._padding]), rows[-1:])
                    self.exchange.memory.note_padding()
                self.parameter_view.mark()
            # Lists keep autograd from making views of the tensors.
            return found.positions, _rows_of_step(self.weight, [rows], [found.positions], self)

    def _check_max_norm(self, max_norm: float | None) -> None:
        """Raises NotImplementedError for 16-bit rows, and for padded rows in a graph's capture."""
        if max_norm is None:
            return
        if self.rounding is not None:
            raise NotImplementedError(
                f"{self.name}: rows stored in 16 bits are rounded after steps, but max_norm would"
                " change them at lookups. Use only one of the two."
            )
        if self._padding is not None and self.exchange.held.captures():
            raise NotImplementedError(
                f"{self.name}: a CUDA graph cannot capture a lookup with max_norm and padding_idx,"
                " because such a lookup also writes the padding row to the table. Use only one of"
                " the two, or train without a graph."
            )

    def summed(self, ids: Tensor, bags: Bags | None = None) -> Tensor:
        """Looks up the rows of ids, `[*ids.shape, ...]`, which join the step as in `rows_of`.

        With `bags` the result is the bags' sums or means: `[samples * features, ...]`.
        """
        with self.lock:
            if self.table.claim.holder is not self:  # claim() tests this, too; most steps skip it
                self.claim()
            found = self.exchange.hold(ids, ordered=False)
            looked_up: Tensor = _summed_lookup(self._weight(), found, bags, self)
            return looked_up

    @serialized
    def borrow(
        self, ids: Tensor, max_norm: float | None, norm_type: float
    ) -> tuple[Tensor, Tensor]:
        """Reads rows for a lookup without adding them to the step; returns what `rows_of` does.

        With `max_norm` the renormalized rows are also written to the table.
        """
        self._check_max_norm(max_norm)
        batch = self.exchange.memory.planned([ids])
        batch.count()
        borrowed, local = batch.ids, batch.parts.local(0)
        if self._padding is not None:
            borrowed = torch.cat([borrowed, borrowed.new_full((1,), self._padding)])
        rows = self.read(borrowed)
        if max_norm is not None:
            with torch.no_grad():
                _renormalize(rows, local, max_norm, norm_type)
            # The step reads its own rows again after the write.
            self.exchange.held.write_back()
            self._store.write(borrowed, rows)
        return local, rows

    def adds_in_order(self) -> bool:
        """Whether torch must sum gradients, because the bits of our sums would differ."""
        if self.parameter.is_cpu:
            # Our sums are bitwise identical to torch's, with two exceptions. torch rounds half
            # precision after each row, and adds an id's sparse rows of all lookups one by one.
            state = self.parameter_view.attached.state
            return self.held_dtype in _HALF or (state is not None and state.sparse)
        return torch.are_deterministic_algorithms_enabled()

    can_agree = True

    def agree_on_pace(self, seconds: float) -> float:
        """Returns the argument, because no other rank shares the rows."""
        return seconds

    def fail(self, error: Exception, *, trains: bool, announced: int = 0) -> None:
        """Called instead of a lookup whose ids are invalid; does nothing on a single rank."""

    def end_by_error(self) -> None:
        """Called by prefetch() before its loop raises an error of the loader or of the ids.

        Does nothing without other ranks; ShardedRows makes the other ranks raise.
        """

    def check_capturable(self, *, prefetches: bool) -> None:
        """See Lookups.check_capturable; a graph can contain every lookup with a capacity."""

    def capturing(self) -> AbstractContextManager[Replays]:
        """See Lookups.capturing."""
        memory = self.exchange.memory
        assert isinstance(memory, FixedMemory)
        return nullcontext(Replays(memory))

    def makes_sparse(self, *, requested: bool) -> bool:
        """Whether autograd makes a sparse gradient, by request or for the optimizer."""
        # On a GPU torch sums the rows of a dense gradient in a tenth of the time, but in another
        # order. The step converts a dense gradient if the optimizer requires a sparse one.
        state = self.state
        return requested or (state is not None and state.sparse and self.adds_in_order())

    @serialized
    def attach(self, state: OptimizerState, fields: Fields) -> bool:
        """Adds optimizer state columns, name to (row shape, dtype), to the rows.

        Returns whether the columns already have values from a file from which the table was read.
        Raises MemoryError, without any change, if host memory is insufficient.
        """
        self.claim()
        self.exchange.memory.refuse_if_captured("attaching an optimizer")
        self.exchange.memory.raise_faults()
        if self.rounding is not None:
            self.rounding.check_fields({"weight": self.exchange.held.fields["weight"], **fields})
        self.exchange.held.write_back()
        has_values = self.table.add_state(self._stored(fields))
        self.parameter_view.attach(state, fields)
        self.exchange.held.reload_rows()
        return has_values

    @serialized
    def detach(self, *, was_read: bool = False) -> None:
        """Detaches the optimizer state. The step's rows remain, and the state columns are unused.

        With `was_read` the next optimizer continues with the state that was read from a file.
        """
        self.exchange.memory.refuse_if_captured("detaching its optimizer")
        self.exchange.memory.raise_faults()
        self.exchange.held.write_back()
        self.parameter_view.attach(None, {})
        self.exchange.held.reload_rows()
        self.table.set_was_read(was_read)


class _RowsOfStep(torch.autograd.Function):
    """The step's rows as the operand of a lookup; backward adds their gradient to `owner`.

    torch's own node that accumulates a parameter's gradient has one shape for its lifetime. A step
    may gain rows with each lookup, so this function bypasses that node.
    """

    @staticmethod
    def forward(
        ctx: Any, parameter: Tensor, rows: list[Tensor], places: list[Tensor], owner: TrainedRows
    ) -> Tensor:
        """Returns the step's rows."""
        step = owner.exchange.held.now
        ctx.owner, ctx.ids, ctx.number, ctx.places = owner, step.ids, step.number, places
        ctx.pending = owner.exchange.held.backwards.made(step.number)
        return rows[0]  # the list keeps autograd from treating the result as a view of an input

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        """Adds the gradient of the rows to the parameter's gradient."""
        if torch.is_grad_enabled():
            check_once(gradient)
        with ctx.owner.lock:  # else another thread could see no pending gradient before the sum
            ctx.pending = None
            ctx.owner.add_gradient(gradient, ctx.ids, ctx.number, lambda: ctx.places[0])
        return None, None, None, None


class _SummedLookup(torch.autograd.Function):
    """A lookup of the step's rows whose backward sums gradients by the batch plan.

    On a GPU the sums take a third of the time of torch's embedding, because the plan is sorted.
    Their last bits may differ from torch's there.
    """

    @staticmethod
    def forward(
        ctx: Any, parameter: Tensor, found: LookupPlaces, bags: Bags | None, owner: TrainedRows
    ) -> Tensor:
        """Returns the looked-up rows, or their sums by bag."""
        ctx.owner, ctx.batch, ctx.part, ctx.bags = owner, found.batch, found.part, bags
        ctx.number = number = owner.exchange.held.now.number
        ctx.pending = owner.exchange.held.backwards.made(number)
        rows = owner.parameter if found.joined is None else found.joined
        if bags is None:
            return rows_at(rows, found.positions)
        with without_autograd():
            return bags.pool(rows, found.positions)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        """Sums the gradient by row and adds the sums to the parameter's gradient."""
        if torch.is_grad_enabled():
            check_once(gradient)
        owner, batch, part = ctx.owner, ctx.batch, ctx.part
        with owner.lock:  # else another thread could see no pending gradient before the sum
            ctx.pending = None
            if ctx.number != owner.exchange.held.now.number:
                if batch.parts.shape(part).numel() == 0:  # empty bags have no gradient
                    return None, None, None, None
                owner.check_held(ctx.number)
            if batch.parts.number > 1:
                batch, part = batch.alone(part)
            added = summed(gradient, batch, part, ctx.bags)
            owner.add_gradient(added, batch.ids, ctx.number, lambda: batch.parts.local(part))
        return None, None, None, None


_rows_of_step, _summed_lookup = map(apply_of, (_RowsOfStep, _SummedLookup))


def summed(gradient: Tensor, batch: Batch, part: int, bags: Bags | None) -> Tensor:
    """Sums the gradient of a lookup's result for each unique id of its batch."""
    rows, source = rows_of_ids(gradient, bags)
    with without_autograd():
        return batch.summed(rows, part, source)


def rows_of_ids(gradient: Tensor, bags: Bags | None) -> tuple[Tensor, Tensor | None]:
    """A lookup's gradient as rows, and the row of each id; None if row i belongs to id i."""
    if gradient.dim() != 2:
        rows = gradient.numel() // max(1, gradient.shape[-1])
        gradient = gradient.reshape(rows, gradient.shape[-1])
    if bags is not None:
        gradient = bags.share(gradient)
    if gradient.stride(1) != 1:
        gradient = gradient.contiguous()
    return gradient, None if bags is None else bags.of_ids


def _renormalize(rows: Tensor, positions: Tensor, max_norm: float, norm_type: float) -> None:
    """Calls torch.embedding_renorm_ unless `positions` is empty, for which it raises on a GPU."""
    if positions.numel():
        torch.embedding_renorm_(rows, positions, max_norm, norm_type)


def check_once(gradient: Tensor) -> None:
    """Raises NotImplementedError if `gradient` has a graph itself, as with create_graph=True."""
    if gradient.requires_grad:
        raise NotImplementedError(
            "an Embedding does not support gradients of gradients. Use torch.nn.Embedding."
        )


def rows_of_optimizer(optimizer: torch.optim.Optimizer) -> list[TrainedRows]:
    """The TrainedRows of an optimizer's weights, in the optimizer's order."""
    return [params[place]._rows for params, place in places_of_weights(optimizer)]


def rows_of_parameter(parameter: Tensor) -> TrainedRows | None:
    """The TrainedRows whose weight is this parameter; None for all other parameters."""
    if type(parameter) is not RowWeight or parameter._rows._weight() is not parameter:
        return None
    rows: TrainedRows = parameter._rows
    return rows

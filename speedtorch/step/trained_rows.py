"""TrainedRows: all rows of a module, as it looks them up and as an optimizer trains them."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, Protocol
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from speedtorch.ops.functions import pool_rows, rows_at
from speedtorch.step.cached_store import CachedStore
from speedtorch.step.counted_exchange import CountedExchange
from speedtorch.step.exchange import Exchange
from speedtorch.step.fixed_exchange import FixedExchange
from speedtorch.step.gradient_sums import GradientSums, among_more, of_rows
from speedtorch.step.hot_rows import BYTES_OF_SLOT, CacheReport
from speedtorch.step.parameter_view import OptimizerState, ParameterView
from speedtorch.step.rounding import Rounding
from speedtorch.step.row_store import Fields, RowStore
from speedtorch.step.row_weight import RowWeight
from speedtorch.step.sparse_rows import RowContent, SparseRows
from speedtorch.step.step import Batch, LookupPlaces
from speedtorch.step.turn import alone
from speedtorch.table.host_table import HostTable
from speedtorch.table.lazy_init import LazyInit
from speedtorch.table.lazy_table import LazyTable
from speedtorch.table.whole_fields import WholeFields
from speedtorch.torch_internals import (
    TensorWeakRef,
    apply_of,
    as_plain,
    current_backward,
    sparse_coo,
    sparse_indices,
    sparse_values,
    top_saved_tensors_hooks,
    version_of,
    without_autograd,
)

__all__ = [
    "Bags",
    "TrainedRows",
    "check_once",
    "places_of_weights",
    "random_seed",
    "rows_held_by",
    "rows_of_parameter",
    "stepping",
    "summed",
]


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


class TrainedRows:
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

    def __init__(
        self,
        name: str,
        table: LazyTable,
        parameter: nn.Parameter,
        padding: int | None,
        capacity: int | None = None,
        rounding: Rounding | None = None,
    ) -> None:
        self.name = name
        self.table = table
        self.fields = WholeFields(table)
        store = RowStore(table, parameter.dtype, rounding)
        self.held_dtype, self.rounding = store.held_dtype, rounding
        self._padding = None if padding == table.rows else padding
        self.parameter = parameter
        self.parameter_view = ParameterView(name, parameter, WeakMethod(self.set_gradient))
        self.exchange: Exchange
        if capacity is None:
            self.exchange = CountedExchange(name, store, self.parameter_view, padding)
        else:
            self.exchange = FixedExchange(name, store, self.parameter_view, padding, capacity)
        self.turn = self.exchange.turn
        """Held while a thread uses the rows; see Exchange."""
        self._sums = GradientSums()
        self._zeroed = WeakMethod(self._note_zeroed)
        self._weight: Callable[[], RowWeight | None] = lambda: None
        self.untraceable = (
            f"{name}: torch.export, torch.jit and ONNX cannot keep a lookup, as its table is in"
            " host memory; export what follows it, given the rows emb(ids), or a torch.nn module"
            " that has loaded its state_dict()"
        )
        self.is_left = False
        """Whether the module is gone, so that a new one may train the rows."""
        if parameter.requires_grad and table.writable:
            table.claim.take(self)

    @property
    def shape(self) -> torch.Size:
        """Of the weights that are here."""
        return torch.Size((self.table.rows, *self.table.row_shape))

    @property
    def _store(self) -> RowStore:
        return self.exchange.store

    @property
    def padding(self) -> int | None:
        """Id of the row that is never trained, if all rows are here."""
        return self._padding if self.table.portion is None else None

    def make_weight(self, lookups: Any) -> RowWeight:
        """Makes the parameter that stands for all rows; `lookups` returns rows by their ids."""
        weight = RowWeight.of(self, lookups, requires_grad=self.parameter.requires_grad)
        vars(weight)["_is_param"] = True  # which makes it an nn.Parameter to isinstance
        return self.take_weight(weight, lookups)

    def take_weight(self, weight: RowWeight, lookups: Any) -> RowWeight:
        """Makes a weight of the same shape stand for these rows."""
        vars(weight).update(_rows=self, _lookups=lookups, _count=self.table.whole_rows)
        self._weight = TensorWeakRef(weight)
        return weight

    def weight_on(self, device: torch.device) -> RowWeight:
        """A tensor like the weight for a device, whose place it can take."""
        return RowWeight.of(self, None, device=device)

    @property
    def weight(self) -> RowWeight:
        """The parameter that stands for all rows; RuntimeError once it is gone."""
        if (weight := self._weight()) is None:
            raise RuntimeError(f"{self.name}: its weight is gone, and its module before it")
        return weight

    def cache(self, nbytes: int | None, members: Tensor | None = None) -> None:
        """Keeps rows that are loaded often on the device, in so many bytes; None: no more.

        With `members` `[n]` those of these distinct ids. A table without rows has no cache. Raises
        RuntimeError while a CUDA graph uses the rows' memory; nothing has changed then.
        """
        kind, rounding = self.held_dtype, self.rounding
        store = RowStore(self.table, kind, rounding)
        if nbytes is not None and self.shape[0]:
            store = CachedStore(self.name, self.table, kind, nbytes, members, rounding)
        with as_plain():
            self.exchange.use(store)

    @property
    def cached_bytes(self) -> int:
        """Bytes of a cache that has all rows, as they are kept now."""
        fields = self._stored(self.exchange.fields).values()
        row_bytes = sum(prod(shape) * dtype.itemsize for shape, dtype in fields)
        return self.shape[0] * (row_bytes + BYTES_OF_SLOT)

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

    def claim(self) -> None:
        """Trains the rows from now on, or refuses to if another module was made to.

        Raises ValueError if they cannot be written.
        """
        self.table.check_writable(f"{self.name}: training its rows")
        holder = self.table.claim.holder
        if holder is self:
            return
        if holder is None or (isinstance(holder, TrainedRows) and holder.is_left):
            self.table.claim.take(self)
        else:
            self._refuse_replaced()

    def _check_claim(self) -> None:
        if self.table.claim.was_replaced:
            self._refuse_replaced()

    def _refuse_replaced(self) -> None:
        raise RuntimeError(
            f"{self.name}: another module was made to train the rows of its HostTable, and each"
            " would miss the changes of the other; use that one in both places"
        )

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
            rows = self.exchange.now.rows[0].detach()
            if max_norm is not None:
                self.exchange.change()
                torch.embedding_renorm_(rows, found.positions, max_norm, norm_type)
                if self._padding is not None:
                    self._store.write(torch.tensor([self._padding]), rows[-1:])
                    self.exchange.note_padding()
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
    def read(self, ids: Tensor) -> Tensor:
        """Rows by their ids as they are now, whatever holds them, outside of any step."""
        self._check_claim()
        self.exchange.write_back(changes=False)
        self.exchange.raise_faults()
        self.table.claim.write_back_others()
        shape = (*ids.shape, *self._store.row_shape)
        out = torch.empty(shape, dtype=self.held_dtype, device=self.exchange.device)
        self._store.read(ids.detach(), out)
        return out

    @alone
    def borrow(
        self, ids: Tensor, max_norm: float | None, norm_type: float
    ) -> tuple[Tensor, Tensor]:
        """As `rows_of`, but of rows that no step holds."""
        self._check_max_norm(max_norm)
        batch = self.exchange.planned([ids])
        batch.count()
        borrowed, local = batch.ids, batch.parts.local(0)
        if self._padding is not None:
            borrowed = torch.cat([borrowed, borrowed.new_full((1,), self._padding)])
        rows = self.read(borrowed)
        if max_norm is not None:
            with torch.no_grad():
                torch.embedding_renorm_(rows, local, max_norm, norm_type)
            # Those of them that a step holds are read again.
            self.exchange.write_back()
            self._store.write(borrowed, rows)
        return local, rows

    @alone
    def write_back(self) -> None:
        """See RowHolder; the CPU sees the rows, too, after this."""
        if self.exchange.is_inherited:  # and what is on its way on a GPU is the parent's
            return
        with as_plain():
            self.exchange.write_back()
            self._store.settle(self.exchange.device)
            self.exchange.raise_faults()

    @property
    def is_captured(self) -> bool:
        """See RowHolder."""
        return self.exchange.is_captured

    def refuse_if_captured(self, what: str) -> None:
        """See RowHolder."""
        self.exchange.refuse_if_captured(what)

    @alone
    def let_go(self) -> None:
        """Called when the module goes: its rows are in the table, and its weight keeps them alive.

        A weight that an optimizer or a caller still has stands for the table as before.
        """
        self.is_left = True
        self._come_home()

    def _come_home(self) -> None:
        """As write_back(), as the last that is done with held rows; nothing in a forked child.

        Those that are on a GPU it cannot read.
        """
        if not self.exchange.is_of_fork:
            self.write_back()

    def __del__(self) -> None:
        if sys.is_finalizing() or "exchange" not in vars(self):
            return
        try:
            self._come_home()
        finally:
            self.table.claim.drop(self)

    def flush(self) -> None:
        """Brings the table up to date, until the CPU sees it."""
        self._check_claim()
        self.write_back()

    def fields_shape(self, field: str) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape of all rows of a field, and the dtype that they have in a step."""
        shape, dtype = self.exchange.fields[field]
        return (self.table.whole_rows, *shape), dtype

    @alone
    def memory(self, field: str = "weight") -> Tensor:
        """All rows of a field in host memory, as they are now; they may be written to.

        Rows that are stored in another dtype than a step has are copied; see store().
        """
        with as_plain():
            self._check_claim()
            self.table.home_of(field).settle()
            rows = self.table.field(field)[:]  # a tensor of the caller's
            return rows.to(self.exchange.fields[field][1])

    @alone
    def store(self, field: str, rows: Tensor) -> None:
        """Stores all rows of a field; nothing happens to those that are in the table's memory."""
        with as_plain():
            if self.table.field(field).data_ptr() != rows.data_ptr():
                self.fields.load(field, rows)

    @alone
    def copied(self, rows: slice) -> Tensor:
        """A copy on the CPU of some rows `[n, ...]`, as they are now."""
        with as_plain():
            some = self.memory()[rows]
            return some.to("cpu", copy=True, memory_format=torch.contiguous_format)

    @alone
    def draw(self, function: Callable[[Tensor], object], *, anew: bool) -> None:
        """Changes all rows, at first need if they were never used; see LazyInit."""
        with as_plain():
            self.table.draw(LazyInit((function,), random_seed(), None), anew=anew)

    @alone
    def load_some(self, values: Tensor, first: int) -> None:
        """Copies values `[n, ...]` to rows `first` to `first + n`."""
        with as_plain():
            self.fields.load("weight", values, first)

    @alone
    def load(self, values: Tensor, field: str = "weight") -> None:
        """Copies values `[rows, ...]` to all rows of a field."""
        if tuple(values.shape) != (shape := self.fields_shape(field)[0]):
            raise ValueError(
                f"{self.name}: its {field} stands for a table of {[*shape]}, got values of"
                f" {list(values.shape)}: write to emb.table to change some rows"
            )
        with as_plain():
            self.fields.load(field, values)

    @alone
    def insert(
        self,
        first: int,
        count: int,
        fill: Callable[[HostTable], object],
        follow: Callable[[], object],
    ) -> None:
        """Adds rows before row `first` with their state, all or, if this raises, none of them.

        Args:
            first: Where.
            count: How many.
            fill: Writes the weights of the new rows, zeros so far, to the larger table.
            follow: Called whenever there is another number of rows.
        """
        self._check_claim()
        state = self.state
        with as_plain(), torch.inference_mode(False), torch.no_grad():
            first_rows = {} if state is None else state.first_rows()
            self.exchange.end_for_resize()
            before = self.table.place()
            made = self.table.with_rows(first, count, first_rows)
            fill(made)
            try:
                self.table.move_to(made)
                self._follow_table(follow)
            except BaseException:
                self.table.move_to(*before)
                self._follow_table(follow)
                raise
            for table in before:
                if table is not None:
                    table.be_held(None)
                    table.close()

    def _follow_table(self, follow: Callable[[], object]) -> None:
        self.exchange.hold_none()
        weight = self.weight
        weight.data = self.weight_on(self.parameter.device)
        vars(weight)["_count"] = self.table.whole_rows
        if self.state is not None:
            self.state.follow_table()
        follow()

    @alone
    def add_rows(self, content: RowContent, method: str, options: Mapping[str, Any]) -> None:
        """Adds rows to those of their ids by `method`, "add_" or "sub_"; no other row changes."""
        with as_plain(), torch.no_grad():
            self.exchange.change()
            held, values = self.parameter.detach(), content.values
            if content.are_of(self.exchange.now.ids) and len(values) == len(held):
                getattr(held, method)(values, **options)
                return
            ids = content.ids
            rows = self.read(ids)
            getattr(rows, method)(content.rows, **options)
            self.exchange.write_back()
            self._store.write(ids, rows)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Of the weight of all rows, also where only some are here."""
        return (self.table.whole_rows, *self.table.row_shape)

    def add_gradient(
        self, gradient: Tensor, ids: Tensor, number: int, places: Callable[[], Tensor]
    ) -> None:
        """Adds the gradient of the rows `ids`, held in the step of this number, to the parameter's.

        The padding's row is the last. `places` are those among them that the lookup names. Called
        within a turn. Raises RuntimeError if the rows have left.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.add_gradient(gradient, ids, number, places)
        with as_plain():
            self.exchange.await_step()
            if number != self.exchange.now.number:
                if (named := places()).numel() == 0:
                    return
                self.check_held(number)
                gradient, ids = _named_alone(gradient, ids, named)
                if len(ids) == 0:
                    return
                self.exchange.rejoin(ids)
            step = self.exchange.now
            self.parameter_view.show(step)
            self.parameter_view.collect()
            added, held = gradient, step.rows[0].shape[0]
            if ids is not step.ids:
                added = among_more(gradient, torch.searchsorted(step.ids, ids), held)
            elif gradient.is_sparse:
                added = of_rows(gradient, sparse_indices(gradient), held)
            added = self.parameter_view.summand(added)
            more_to_come = self.exchange.expects_gradient()
            summed = self._sums.add(self.parameter.grad, added, more_to_come=more_to_come)
            self.parameter.grad = summed
            self.parameter_view.note_gradient()

    def check_held(self, number: int) -> None:
        """Raises RuntimeError if rows that a step of this number has looked up have left."""
        if not self.exchange.holds(number):
            raise RuntimeError(
                f"{self.name}: backward through a lookup of an earlier step, whose rows have gone"
                " back to the table: call backward before the lookup that follows the optimizer's"
                " step"
            )

    def moment(self) -> tuple[int, int]:
        """Another pair whenever the step's rows may have changed, or are those of another step."""
        return self.exchange.now.number, version_of(self.parameter)

    def step_ids(self) -> Tensor:
        """Ids of the step's rows, without the padding's, in the order of the rows on the device."""
        ids = self.exchange.step_ids()
        return ids if (portion := self.table.portion) is None else portion.numbers(ids)

    def own_gradient(self) -> Tensor | None:
        """The gradient of the step's rows, as the optimizer is given it, within a turn."""
        self.exchange.await_step()
        self.parameter_view.show(self.exchange.now)
        self.parameter_view.collect()
        self.parameter_view.divide()
        return self.parameter.grad

    def weight_gradient(self) -> Tensor | None:
        """The gradient of the weight: that of the step's rows, and zero for all others."""
        if (now := stepping.now) is not None:
            self._check_entered(*now)
        with self.turn:
            gradient, view = self.own_gradient(), self.parameter_view
            step = self.exchange.now
            if step.before is not None and step.before.gradient is not None:
                gradient, step = step.before.gradient, step.before
            if gradient is None and (gradient := view.make_zeros()) is None:
                self.exchange.note_zero_grad()
                return None
            view.note_read()
            if (shown := view.shown_of(gradient)) is not None:
                return shown
            if gradient.is_sparse and self.table.portion is None:
                ids, shape = self.step_ids(), (self.table.whole_rows, *gradient.shape[1:])
                (places,), values = sparse_indices(gradient), sparse_values(gradient)
                is_coalesced = gradient.is_coalesced()
                if is_coalesced and len(places) == len(gradient):  # all rows of the device in order
                    places, values = places[: len(ids)], values[: len(ids)]
                shown = sparse_coo(ids[places][None], values, shape, is_coalesced=is_coalesced)
            else:
                values = sparse_values(gradient) if gradient.is_sparse else gradient
                local_only = None
                if self.table.portion is not None:
                    local_only = (
                        f"{self.name} needs the rows of all ranks, and each has the gradient of its"
                        " own: use speedtorch.clip_grad_norm_ (in transformers' Trainer and with"
                        " accelerate: accelerator.clip_grad_norm_ = speedtorch.clip_grad_norm_; in"
                        " Lightning: in the module's configure_gradient_clipping()), and"
                        " speedtorch.GradScaler"
                    )
                content = RowContent(
                    self.exchange.ids_of(step), values, local_only=local_only, zeroed=self._zeroed
                )
                shown = SparseRows.of(self.table.whole_rows, content)
            view.note_shown(shown, gradient, values)
            return shown

    def _check_entered(self, optimizer: torch.optim.Optimizer, entered: Entered) -> None:
        """Raises RuntimeError within a step of an optimizer that was given the weight unseen."""
        weight = self.weight
        if any(each is weight for each in entered.weights):
            return
        if any(held[place] is weight for held, place in places_of_weights(optimizer)):
            entered.forget()
            stepping.end()  # by the error
            raise RuntimeError(
                f"{self.name}: its weight took the place of a parameter in a group of this"
                f" {type(optimizer).__name__} that has stepped before, which nothing has told: none"
                " of its rows was stepped. The next step() finds it; assign a new list to"
                " group['params'], or build the optimizer with it, and no step is missed"
            )

    def _note_zeroed(self) -> None:
        """Called when the gradient was filled with zeros, as by zero_grad(set_to_none=False)."""
        with self.turn:
            self.parameter_view.collect()
            before = self.exchange.now.before
            gradient = None if before is None else before.gradient
            self.parameter_view.note_zeros(self.parameter.grad if gradient is None else gradient)
            self.exchange.note_zero_grad(is_zero=True)

    def set_gradient(self, value: Tensor | None) -> None:
        """Sets the gradient of the weight, `[N, ...]`, dense or sparse.

        Rows that have a gradient and are not on the device join the step. Raises RuntimeError for
        another shape or dtype, NotImplementedError if the rows do not fit into a capacity.
        """
        with self.turn:
            self.exchange.await_step()
            view = self.parameter_view
            view.show(self.exchange.now)
            if value is None:
                self.parameter.grad = None
                view.note_none()
                self.exchange.note_zero_grad()
            else:
                self._set_rows_gradient(value)

    def _set_rows_gradient(self, value: Tensor) -> None:
        with torch.no_grad():
            view = self.parameter_view
            if isinstance(value, RowWeight):
                raise NotImplementedError(
                    f"{self.name}: its gradient cannot share the memory of a weight: use clone()"
                )
            shape, dtype = self.fields_shape("weight")
            if tuple(value.shape) != shape or value.dtype != dtype:
                raise RuntimeError(
                    f"{self.name}: attempting to assign a gradient of {list(value.shape)}"
                    f" {value.dtype} to a weight of {list(shape)} {dtype}"
                )
            content = value.content if isinstance(value, SparseRows) else None
            is_zero = content is not None and content.is_constant and content.fill == 0
            if self.table.portion is not None and not is_zero:
                raise NotImplementedError(
                    f"{self.name}: its rows are sharded among ranks, so no gradient of all rows can"
                    " be assigned; scale or clip the one that it has in place"
                )
            self.exchange.note_gradient_asked()
            view.show(self.exchange.now)
            ids, rows = _with_gradient(value.to(self.exchange.device))
            if self._padding is not None and bool((ids == self._padding).any()):
                raise NotImplementedError(
                    f"{self.name}: the row of padding_idx={self._padding} is never trained, and the"
                    " gradient that is assigned has one for it; set that row of it to zero"
                )
            own = self.step_ids()
            if missing := ids[~torch.isin(ids, own)].shape[0]:
                if not self.exchange.takes_more:
                    raise NotImplementedError(
                        f"{self.name}: {missing} rows with a gradient are not among the step's, and"
                        " with capacity none can join it: look them up in this step"
                    )
                self.exchange.rejoin(ids[~torch.isin(ids, own)])
                own = self.step_ids()
            self.exchange.reopen()
            places = torch.searchsorted(own, ids)
            if value.is_sparse:
                shape = tuple(self.parameter.shape)
                self.parameter.grad = sparse_coo(places[None], rows, shape, is_coalesced=True)
            else:
                gradient = torch.zeros_like(self.parameter.detach())
                gradient[places] = rows
                self.parameter.grad = gradient
            view.note_gradient()

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

    @property
    def state(self) -> OptimizerState | None:
        """What keeps the state of the held rows."""
        return self.parameter_view.kept.state

    @alone
    def attach(self, state: OptimizerState, fields: Fields) -> bool:
        """Keeps fields of state, name to (row shape, dtype), beside the weight.

        Returns whether they have values already, because the table was read from a file with them.
        Raises MemoryError if there is no room for them; nothing has changed.
        """
        self.claim()
        self.exchange.refuse_if_captured("attaching an optimizer")
        self.exchange.raise_faults()
        if self.rounding is not None:
            self.rounding.check_fields({"weight": self.exchange.fields["weight"], **fields})
        self.exchange.write_back()
        has_values = self.table.make_room(self._stored(fields))
        self.parameter_view.keep(state, fields)
        self.exchange.show_anew()
        return has_values

    @alone
    def detach(self, *, was_read: bool = False) -> None:
        """Keeps the weight alone; the fields of the state stay unused, held rows stay held.

        With `was_read` the next optimizer's state goes on with what a file has given.
        """
        self.exchange.refuse_if_captured("detaching its optimizer")
        self.exchange.raise_faults()
        self.exchange.write_back()
        self.parameter_view.keep(None, {})
        self.exchange.show_anew()
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
        step = asker.exchange.now
        ctx.asker, ctx.ids, ctx.number, ctx.places = asker, step.ids, step.number, places
        ctx.pending = asker.exchange.backwards.made(step.number)
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
        ctx.number = number = asker.exchange.now.number
        ctx.pending = asker.exchange.backwards.made(number)
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
            if ctx.number != asker.exchange.now.number:
                if gradient.numel() == 0:
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


def _named_alone(gradient: Tensor, ids: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of those of the rows `ids` that are at these places, and their ids, ascending.

    A place after the last is that of the padding.
    """
    named = torch.unique(places)
    named = named[named < ids.shape[0]]
    if gradient.is_sparse:
        among = torch.searchsorted(named, sparse_indices(gradient))
        return of_rows(gradient, among, named.shape[0]), ids[named]
    return gradient[named], ids[named]


def check_once(gradient: Tensor) -> None:
    """Raises NotImplementedError within a backward that is to be differentiated itself."""
    if torch.is_grad_enabled() and gradient.requires_grad:
        raise NotImplementedError(
            "gradients of gradients do not go through an Embedding's rows; use torch.nn"
        )


def _with_gradient(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The ids of the rows of a gradient `[N, ...]` that are not zero, ascending, and the rows."""
    if isinstance(gradient, SparseRows):
        content = gradient.content
        if content.dense is None and content.fill == 0:
            ids, order = torch.sort(content.ids)
            return ids.to(gradient.device), content.rows[order]
        gradient = gradient.to_dense()
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        return sparse_indices(gradient)[0], sparse_values(gradient)
    ids = (gradient != 0).flatten(1).any(1).nonzero().squeeze(1)
    return ids, gradient[ids]


class Entered(Protocol):
    """An optimizer whose step() runs."""

    @property
    def weights(self) -> Sequence[RowWeight]:
        """Those that it is known to hold."""

    def forget(self) -> None:
        """Called when it holds others: its next step looks at each parameter again."""


class Stepping(threading.local):
    """The optimizer whose step() runs in this thread; an exception may have left it.

    It keeps neither the optimizer nor its weights.
    """

    _now: tuple[Callable[[], Any], Callable[[], Any]] | None = None

    def begin(self, optimizer: torch.optim.Optimizer, entered: Entered) -> None:
        """Called before a step()."""
        self._now = weakref.ref(optimizer), weakref.ref(entered)

    def end(self) -> None:
        """Called after it."""
        self._now = None

    @property
    def now(self) -> tuple[torch.optim.Optimizer, Entered] | None:
        """It, and what is known of its weights."""
        if self._now is None:
            return None
        optimizer, entered = (each() for each in self._now)
        if optimizer is None or entered is None:
            return None
        return optimizer, entered


stepping = Stepping()


def places_of_weights(optimizer: torch.optim.Optimizer) -> list[tuple[list[Any], int]]:
    """Where the weights of rows are that an optimizer holds: a list of a group, and the index."""
    return [
        (held, place)
        for group in optimizer.param_groups
        for held in (group["params"],)
        for place, each in enumerate(held)
        if type(each) is RowWeight and each._rows._weight() is each
    ]


def rows_held_by(optimizer: torch.optim.Optimizer) -> list[TrainedRows]:
    """The rows whose weights an optimizer holds, in its order."""
    return [held[place]._rows for held, place in places_of_weights(optimizer)]


def rows_of_parameter(parameter: Tensor) -> TrainedRows | None:
    """The rows that a parameter stands for, if it does for any."""
    if type(parameter) is not RowWeight or parameter._rows._weight() is not parameter:
        return None
    rows: TrainedRows = parameter._rows
    return rows


def random_seed() -> int:
    """A seed from torch's default generator."""
    return int(torch.randint(2**63 - 1, (), device="cpu"))

"""WholeWeight: values and gradient of all rows, the backend of a RowWeight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from speedtorch.step.claimed_rows import ClaimedRows
from speedtorch.step.gradient_sums import GradientSums, of_rows
from speedtorch.step.parameter_view import ParameterView
from speedtorch.step.rounding import Rounding
from speedtorch.step.row_lock import serialized
from speedtorch.step.row_weight import RowWeight
from speedtorch.step.sparse_rows import RowContent, SparseRows
from speedtorch.step.stepping import Entered, places_of_weights, stepping
from speedtorch.table.host_table import HostTable
from speedtorch.table.lazy_init import LazyInit
from speedtorch.table.lazy_table import LazyTable
from speedtorch.torch_internals import as_plain, sparse_coo, sparse_indices, sparse_values

__all__ = ["WholeWeight", "random_seed"]


class WholeWeight(ClaimedRows):
    """Reads and writes all rows, and shows and assigns their gradient."""

    def __init__(
        self,
        name: str,
        table: LazyTable,
        parameter: nn.Parameter,
        padding: int | None,
        capacity: int | None = None,
        rounding: Rounding | None = None,
    ) -> None:
        self._sums = GradientSums()
        self._zeroed = WeakMethod(self._note_zeroed)
        set_gradient, note_zeros = WeakMethod(self.set_gradient), WeakMethod(self._note_zeros)
        view = ParameterView(name, parameter, set_gradient, note_zeros)
        super().__init__(name, table, view, padding, capacity, rounding)

    @serialized
    def read(self, ids: Tensor) -> Tensor:
        """Reads rows by id without starting a step. The step's rows are written back first."""
        self._check_claim()
        self.exchange.held.write_back(changes=False)
        self.exchange.memory.raise_faults()
        self.table.claim.write_back_other_module()
        shape = (*ids.shape, *self._store.row_shape)
        out = torch.empty(shape, dtype=self.held_dtype, device=self.exchange.held.device)
        self._store.read(ids.detach(), out)
        return out

    @serialized
    def memory(self, field: str = "weight") -> Tensor:
        """All current rows of a field in host memory; the caller may write to them.

        If the stored dtype is not the step's dtype, the result is a copy; see store().
        """
        with as_plain():
            self._check_claim()
            self.table.table_of(field).settle()
            rows = self.table.field(field)[:]  # a new tensor object for the caller
            return rows.to(self.exchange.held.fields[field][1])

    @serialized
    def copied(self, rows: slice) -> Tensor:
        """Copies a range of current rows `[n, ...]` to the CPU."""
        with as_plain():
            some = self.memory()[rows]
            return some.to("cpu", copy=True, memory_format=torch.contiguous_format)

    @serialized
    def store(self, field: str, rows: Tensor) -> None:
        """Stores all rows of a field, unless `rows` is the table's own memory."""
        with as_plain():
            if self.table.field(field).data_ptr() != rows.data_ptr():
                self.fields.load(field, rows)

    @serialized
    def load(self, values: Tensor, field: str = "weight") -> None:
        """Copies values `[rows, ...]` to all rows of a field."""
        if tuple(values.shape) != (shape := self.fields_shape(field)[0]):
            raise ValueError(
                f"{self.name}: values for its {field} must have shape {[*shape]}, got"
                f" {list(values.shape)}. Write to emb.table to change only some rows."
            )
        with as_plain():
            self.fields.load(field, values)

    @serialized
    def load_some(self, values: Tensor, first: int) -> None:
        """Copies values `[n, ...]` to the n rows from `first` on."""
        with as_plain():
            self.fields.load("weight", values, first)

    @serialized
    def draw(
        self, function: Callable[[Tensor], object], *, anew: bool, is_random: bool = True
    ) -> None:
        """Changes all rows by `function`, lazily if no row was used yet; see LazyInit.

        Only if `is_random`, torch's default generator draws a seed.
        """
        with as_plain():
            seed = random_seed() if is_random else 0
            self.table.draw(LazyInit((function,), seed, None), anew=anew)

    @serialized
    def insert(
        self,
        first: int,
        count: int,
        fill: Callable[[HostTable], object],
        follow: Callable[[], object],
    ) -> None:
        """Inserts rows and their state before row `first`; after an exception none is added.

        Args:
            first: The index of the first new row.
            count: The number of new rows.
            fill: Writes the weights of the new rows, initially zeros, to the larger table.
            follow: Called after each change of the number of rows.
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
                    table.set_holder(None)
                    table.close()

    def _follow_table(self, follow: Callable[[], object]) -> None:
        self.parameter_view.note_none()  # a gradient of zeros has the rows of before
        self.exchange.begin_empty()
        weight = self.weight
        weight.data = self.weight_on(self.parameter.device)
        vars(weight)["_count"] = self.table.whole_rows
        if self.state is not None:
            self.state.follow_table()
        follow()

    @serialized
    def add_rows(self, content: RowContent, method: str, options: Mapping[str, Any]) -> None:
        """Changes rows by id with `method`, "add_" or "sub_"; other rows do not change."""
        with as_plain(), torch.no_grad():
            self.exchange.held.change()
            held, values = self.parameter.detach(), content.values
            if content.are_of(self.exchange.held.now.ids) and len(values) == len(held):
                getattr(held, method)(values, **options)
                return
            ids = content.ids
            rows = self.read(ids)
            getattr(rows, method)(content.rows, **options)
            self.exchange.held.write_back()
            self._store.write(ids, rows)

    def add_gradient(
        self, gradient: Tensor, ids: Tensor, number: int, places: Callable[[], Tensor]
    ) -> None:
        """Adds the gradient of the rows `ids` of step `number` to the parameter's gradient.

        The padding row is the last. `places` returns the lookup's positions in `ids`. The caller
        holds `lock`. Raises RuntimeError if the rows are written back and cannot rejoin the step.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.add_gradient(gradient, ids, number, places)
        if not self.parameter.requires_grad:  # frozen since the lookup
            return
        with as_plain():
            if self.exchange.stepping.call is not None:
                self.exchange.stepping.await_step()
            if number != self.exchange.held.now.number:
                if (named := places()).numel() == 0:
                    return
                self.check_held(number)
                gradient, ids = _named_rows(gradient, ids, named)
                if len(ids) == 0:
                    return
                self.exchange.rejoin(ids)
            view = self.parameter_view
            if view.shown is not None:
                view.collect()
            held = self.exchange.held
            if held.now.joined is not None:
                held.complete()
            step = held.now
            if view.rows is not step.rows:
                view.show(step)
            at, rows = None, step.rows[0].shape[0]
            if ids is not step.ids:
                at = torch.searchsorted(step.ids, ids)
            elif gradient.is_sparse:
                gradient = of_rows(gradient, sparse_indices(gradient), rows)
            if view.divisor != 1:
                gradient = view.summand(gradient)
            more = self.exchange.held.backwards.are_expected(step.number)
            summed = self._sums.add(self.parameter.grad, gradient, at, rows, expects_more=more)
            self.parameter.grad = summed
            view.note_gradient()
            if view.shown is not None:
                view.follow(self.exchange.memory.ids_of(step), is_sum=True)

    def check_held(self, number: int) -> None:
        """Raises RuntimeError if the rows of step `number` were written back and cannot rejoin."""
        if not self.exchange.can_reach(number):
            raise RuntimeError(
                f"{self.name}: backward through a lookup of an earlier step, whose rows were"
                " written back to the table. Call backward before optimizer.step(), and with"
                " capacity= also before zero_grad()."
            )

    def step_ids(self) -> Tensor:
        """Ids of the step's rows, ascending, without the padding's."""
        if self.exchange.held.now.joined is not None:  # the Step has only some of the rows
            self.exchange.held.complete()
        ids = self.exchange.memory.step_ids()
        return ids if (shard_spec := self.table.shard_spec) is None else shard_spec.numbers(ids)

    def own_gradient(self) -> Tensor | None:
        """The gradient of the step's rows for the optimizer. The caller holds `lock`."""
        if self.exchange.stepping.call is not None:
            self.exchange.stepping.await_step()
        view = self.parameter_view
        if view.shown is not None:
            view.collect()
        now = self.exchange.held.now
        if view.rows is not now.rows:
            view.show(now)
        if view.is_sum:
            view.divide(self.exchange.memory.ids_of(now))
        return self.parameter.grad

    def weight_gradient(self) -> Tensor | None:
        """The weight's gradient: the gradient of the step's rows, and zeros for other rows."""
        if (now := stepping.now) is not None:
            self._check_entered(*now)
        with self.lock:
            gradient, view = self.own_gradient(), self.parameter_view
            step = self.exchange.held.now
            if step.before is not None and step.before.gradient is not None:
                gradient, step = step.before.gradient, step.before
            if gradient is None and (gradient := view.make_zeros()) is None:
                self.exchange.note_zero_grad()
                return None
            if view.zeros is not None:
                view.set_was_read()
            if gradient is not self.parameter.grad:
                view.forget_shown()
            elif view.shown is not None and view.shown.gradient is not gradient:
                view.follow(self.exchange.memory.ids_of(step))
            if view.shown is not None:
                return view.shown.tensor
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False):  # else zero_() of the result could raise later
                    return self.weight_gradient()
            if gradient.is_sparse and self.table.shard_spec is None:
                # Not self.step_ids(), which would replace the gradient of joined rows.
                ids = self.exchange.memory.step_ids()
                shape = (self.table.whole_rows, *gradient.shape[1:])
                (places,), values = sparse_indices(gradient), sparse_values(gradient)
                is_coalesced = gradient.is_coalesced()
                if is_coalesced and len(places) == len(gradient):  # all rows of the step in order
                    places, values = places[: len(ids)], values[: len(ids)]
                shown = sparse_coo(ids[places][None], values, shape, is_coalesced=is_coalesced)
            else:
                values = sparse_values(gradient) if gradient.is_sparse else gradient
                local_only = None
                if self.table.shard_spec is not None:
                    local_only = (
                        f"{self.name} needs the rows of all ranks, but each rank has only its own."
                        " Use speedtorch.clip_grad_norm_ (in transformers' Trainer and with"
                        " accelerate: accelerator.clip_grad_norm_ = speedtorch.clip_grad_norm_; in"
                        " Lightning: in the module's configure_gradient_clipping()), and"
                        " speedtorch.GradScaler."
                    )
                ids_of = self.exchange.memory.ids_of
                content = RowContent(
                    ids_of(step), values, local_only=local_only, zeroed=self._zeroed
                )
                shown = SparseRows.of(self.table.whole_rows, content)
            view.note_shown(shown, gradient, values)
            return shown

    def _check_entered(self, optimizer: torch.optim.Optimizer, entered: Entered) -> None:
        """Raises RuntimeError in a step of an optimizer to which the weight was added unnoticed."""
        weight = self.weight
        if any(param is weight for param in entered.weights):
            return
        if any(params[place] is weight for params, place in places_of_weights(optimizer)):
            entered.forget()
            stepping.end()  # the error ends the step
            raise RuntimeError(
                f"{self.name}: its weight replaced a parameter in a group of this"
                f" {type(optimizer).__name__} in place, after an earlier step. This step() changed"
                " no row of the table; the next step() will. To miss no step, assign a new list"
                " to group['params'], or create the optimizer with the weight."
            )

    def _note_zeroed(self, content: RowContent) -> None:
        """Called after zero_() of a SparseRows that was returned as the weight's gradient."""
        with self.lock:
            gradient = self.parameter_view.gradient_of(content)
            is_own = gradient is self.parameter.grad
            self.parameter_view.collect()
            self._note_zeros(self.parameter.grad if is_own else gradient)

    def _note_zeros(self, gradient: Tensor | None) -> None:
        """Called after a gradient of the rows was filled with zeros; ignores a former gradient."""
        before = self.exchange.held.now.before
        is_before = before is not None and gradient is before.gradient
        if gradient is not None and (is_before or gradient is self.parameter.grad):
            self.parameter_view.note_zeros(gradient)
            self.exchange.note_zero_grad(is_zero=True)

    def set_gradient(self, value: Tensor | None) -> None:
        """Sets the gradient of the weight, `[N, ...]`, dense or sparse.

        Rows with a gradient that are not in the step join it. Raises RuntimeError for another shape
        or dtype. Raises NotImplementedError for a weight, for a gradient of the padding row, and if
        rows cannot join because of a capacity. If ranks share the rows, only a result of
        torch.zeros_like(weight) is accepted.
        """
        with self.lock:
            if self.exchange.stepping.call is not None:
                self.exchange.stepping.await_step()
            view, now = self.parameter_view, self.exchange.held.now
            if view.rows is not now.rows:
                view.show(now)
            if value is None:
                self.parameter.grad = None
                view.note_none()
                self.exchange.note_zero_grad()
            else:
                self._set_rows_gradient(value)

    def _set_rows_gradient(self, value: Tensor) -> None:
        with torch.inference_mode(False), torch.no_grad():
            view = self.parameter_view
            if isinstance(value, RowWeight):
                raise NotImplementedError(
                    f"{self.name}: its gradient cannot share the memory of a weight. Use clone()."
                )
            shape, dtype = self.fields_shape("weight")
            if tuple(value.shape) != shape or value.dtype != dtype:
                raise RuntimeError(
                    f"{self.name}: attempting to assign a gradient of {list(value.shape)}"
                    f" {value.dtype} to a weight of {list(shape)} {dtype}"
                )
            content = value.content if isinstance(value, SparseRows) else None
            is_zero = content is not None and content.is_constant and content.fill == 0
            if self.table.shard_spec is not None and not is_zero:
                raise NotImplementedError(
                    f"{self.name}: its rows are sharded among ranks, so no gradient of all rows can"
                    " be assigned. Scale or clip the existing gradient in place."
                )
            self.exchange.note_gradient_access()
            view.show(self.exchange.held.now)
            ids, rows = _with_gradient(value.to(self.exchange.held.device))
            if self._padding is not None and bool((ids == self._padding).any()):
                raise NotImplementedError(
                    f"{self.name}: the row of padding_idx={self._padding} is never trained, but the"
                    " assigned gradient contains this row. Remove the row from a sparse gradient"
                    " or set it to zero in a dense gradient."
                )
            own = self.step_ids()
            missing, takes_more = ids[~torch.isin(ids, own)], self.exchange.memory.takes_more
            if len(missing) and not takes_more:
                raise NotImplementedError(
                    f"{self.name}: the assigned gradient has {len(missing)} rows that are not in"
                    " the current step, and with capacity= no row can join it. Look them up before"
                    " the assignment."
                )
            if takes_more and (len(missing) or not self.exchange.held.now.batches):
                self.exchange.rejoin(missing)
                own = self.step_ids()
            self.exchange.held.reopen()
            places = torch.searchsorted(own, ids)
            if value.is_sparse:
                shape = tuple(self.parameter.shape)
                self.parameter.grad = sparse_coo(places[None], rows, shape, is_coalesced=True)
            else:
                gradient = torch.zeros_like(self.parameter.detach())
                gradient[places] = rows
                self.parameter.grad = gradient
            view.note_gradient()
            self._share(value)

    def _share(self, value: Tensor) -> None:
        """Makes an assigned gradient the weight's gradient, as torch does, if it can be shared."""
        view, gradient = self.parameter_view, self.parameter.grad
        view.forget_shown()
        device = self.exchange.held.device
        is_sparse = value.is_sparse or (gradient is not None and gradient.is_sparse)
        if self.table.shard_spec is not None or is_sparse or value.device != device:
            return
        if isinstance(value, SparseRows):
            if value.content.zeroed() not in (None, self._zeroed()):
                return  # the gradient of another weight
            value.content.report_zeros(self._zeroed)
        view.note_shown(value, None, value)
        view.follow(self.exchange.memory.ids_of(self.exchange.held.now))


def _named_rows(gradient: Tensor, ids: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the rows `ids[places]` and their unique ids, ascending.

    Places after the last id refer to the padding row and are dropped.
    """
    named = torch.unique(places)
    named = named[named < ids.shape[0]]
    if gradient.is_sparse:
        among = torch.searchsorted(named, sparse_indices(gradient))
        return of_rows(gradient, among, named.shape[0]), ids[named]
    return gradient[named], ids[named]


def _with_gradient(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The ascending ids and the rows of a gradient: stored if sparse, nonzero if dense."""
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


def random_seed() -> int:
    """Draws a seed from torch's default generator."""
    return int(torch.randint(2**63 - 1, (), device="cpu"))

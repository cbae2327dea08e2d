"""TrainedRows: all rows of a module, as it looks them up and as an optimizer trains them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from speedtorch.ops.functions import gather_detached, sum_rows
from speedtorch.ops.planned_batch import PlannedBatch
from speedtorch.step.exchange import Exchange, HeldState, Placed, ShownRows, Told
from speedtorch.step.gradient_sums import GradientSums, among_more, of_rows
from speedtorch.step.row_store import Draw, Fields, RowStore
from speedtorch.step.row_weight import forget_rows, show_rows
from speedtorch.torch_internals import (
    as_plain,
    current_backward,
    sparse_indices,
    top_saved_tensors_hooks,
)

__all__ = ["TrainedRows", "random_seed", "rows_held_by"]


class _Token:
    """Lives as long as a graph may still bring a gradient of a step's lookups."""


class TrainedRows:
    """All rows of an Embedding, those of a step as its parameter, and the state kept of them.

    The one who knows who trains what: the table knows it as its holder, the parameter as what it
    stands for, and the hooks of every optimizer's step find it through the parameter. In front of
    the step it asks for the rows of this process's lookups (exchange.Requester).

    Args:
        name: what errors call it.
        store: the rows.
        parameter: holds the rows of a step; it stands for the table from now on.
        padding: id of the row that is never trained, or None.

    Attributes:
        exchange: the steps of the rows.
    """

    def __init__(
        self, name: str, store: RowStore, parameter: nn.Parameter, padding: int | None
    ) -> None:
        self.name = name
        self.store = store
        self.parameter = parameter
        self.shape = torch.Size((store.rows, *store.row_shape))
        self._padding = padding
        self._shown = ShownRows(name, parameter)
        self.exchange = Exchange(name, store, self._shown, padding, self)
        self._token: tuple[int, ref[_Token] | None] = (0, None)
        """Of the lookups of a step, and its number."""
        self._told = Told()
        self._sums: tuple[int, GradientSums] = (0, GradientSums())
        self._claimed = False
        if parameter.requires_grad:
            self._claim(anew=True)
        show_rows(parameter, self)

    # --------------------------------------------------------------------------------------------
    # Who trains the table

    def _claim(self, *, anew: bool = False) -> None:
        """Trains the rows from now on, or refuses to if another module was made to."""
        holder = self.store.holder
        if holder is self:
            return
        if not anew and holder is not None:
            self._refuse_replaced()
        self.store.keep_holder(self)
        self._claimed = True

    def _check_claim(self) -> None:
        if self._claimed and self.store.holder is not self:
            self._refuse_replaced()

    def _refuse_replaced(self) -> None:
        raise RuntimeError(
            f"{self.name}: another module was made to train the rows of its HostTable, and each"
            " would miss the changes of the other; use that one in both places"
        )

    def start_loop(self, loop: object) -> None:
        """See Exchange.start_loop."""
        self._claim()
        self.exchange.start_loop(loop)

    # --------------------------------------------------------------------------------------------
    # Lookups

    def announce(self, parts: Sequence[Tensor]) -> None:
        """Lets the next lookup bring the rows of all of these ids; those after it load nothing.

        Nothing waits: where a step is over, the ids are planned, so that several tables can be
        announced to before the first of them counts its rows. Bad ids raise IndexError, on a GPU at
        the next lookup.
        """
        if self._hold(parts, announced=True) is None:
            parts = [*self._told.parts, *parts]
            self._told = Told(parts, self.exchange.planned(parts))

    def _hold(self, parts: Sequence[Tensor], *, announced: bool = False) -> list[Placed] | None:
        """Holds rows, and those that were announced before: until they are held they wait."""
        self._claim()
        told = self._told
        if told.plan is not None and told.plan.device != self.exchange.device:
            told = Told(told.parts)
        try:
            found = self.exchange.hold(parts, told, announced=announced)
        except IndexError:
            if self._told.plan is not None:
                try:  # ids of which one is bad, which somebody is told now, are forgotten
                    self._told.plan.count()
                except IndexError:
                    self._told = Told()
            raise
        if found is not None and told.parts:
            self._told = Told()
        return found

    def rows_of(
        self, ids: Tensor, max_norm: float | None = None, norm_type: float = 2.0
    ) -> tuple[Tensor, Tensor]:
        """The rows that ids name, held from now until the optimizer's next step is done.

        Gives positions of the shape of ids, and the held rows `[n, ...]`, or `[n + 1, ...]` with
        the padding's as the last, both on the device; gradients of the rows go to the parameter.
        With `max_norm` rows of a larger norm are shortened, as torch.embedding_renorm_ does. Bad
        ids raise IndexError, and what is held did not change.
        """
        found = (self._hold([ids]) or [])[0]
        if found.has_moved and _recomputes():
            raise RuntimeError(
                f"{self.name}: a checkpoint computes a lookup again after other rows have joined"
                " the step; announce() all ids of the step before its first lookup"
            )
        step = self.exchange.now
        # These count their own changes: rows that join the step are no change of these.
        rows = step.padded.detach()
        if max_norm is not None:
            step = self.exchange.change()
            torch.embedding_renorm_(rows, found.positions, max_norm, norm_type)
            self._write_padding(rows)
            self._shown.mark()
        parameter = self.parameter
        return found.positions, _RowsOfStep.apply(parameter, [rows], step.ids, self, step.number)  # type: ignore[no-untyped-call]

    def summed(self, ids: Tensor) -> Tensor:
        """The rows that ids name, `[*ids.shape, ...]`, held as those of `rows_of` are."""
        found = (self._hold([ids]) or [])[0]
        parameter, number = self.parameter, self.exchange.now.number
        looked_up: Tensor = _SummedLookup.apply(  # type: ignore[no-untyped-call]
            parameter, parameter.detach(), found, self.store.rows, self, number
        )
        return looked_up

    def lookup(self, ids: Tensor) -> Tensor:
        """Rows by their ids, held from now on."""
        with as_plain():
            return nn.functional.embedding(*self.rows_of(ids))

    # --------------------------------------------------------------------------------------------
    # Rows without a step

    def read(self, ids: Tensor) -> Tensor:
        """Rows by their ids as they are now, outside of any step."""
        with as_plain():
            self._see_all()
            out = self._empty(*ids.shape)
            self.store.read(ids.detach(), out)
            return out

    def borrow(
        self, ids: Tensor, max_norm: float | None, norm_type: float
    ) -> tuple[Tensor, Tensor]:
        """As `rows_of`, but of rows that no step holds."""
        self._see_all()
        batch = self.exchange.planned([ids])
        batch.count()
        count, local = batch.held, batch.local(0)
        rows = self._empty(count + int(self._padding is not None))
        self.store.read(batch.ids, rows[:count])
        if self._padding is not None:
            self.store.read(torch.tensor([self._padding]), rows[count:])
        if max_norm is not None:
            with torch.no_grad():
                torch.embedding_renorm_(rows, local, max_norm, norm_type)
            # Those of them that a step holds are read again.
            self.exchange.bring_home()
            self.store.write(batch.ids, rows[:count])
            self._write_padding(rows)
        return local, rows

    def _see_all(self) -> None:
        """Rows of the table are there as they are now, whoever holds them."""
        self._check_claim()
        self.exchange.bring_home(changes=False)
        self.store.bring_others_home()

    def _empty(self, *shape: int) -> Tensor:
        shape = (*shape, *self.store.row_shape)
        return torch.empty(shape, dtype=self.store.dtype, device=self.exchange.device)

    def _write_padding(self, rows: Tensor) -> None:
        if self._padding is not None:
            self.store.write(torch.tensor([self._padding]), rows[-1:])

    # --------------------------------------------------------------------------------------------
    # The table

    def bring_home(self) -> None:
        """See RowHolder; the CPU sees the rows, too, after this."""
        with as_plain():
            self.exchange.bring_home()
            self.store.settle(self.exchange.device)
            self.store.forget_fields()

    def let_go(self) -> None:
        """Called when the module goes: its rows are in the table, and nobody trains them."""
        try:
            self.bring_home()
        finally:
            if self.state is None:  # else the optimizer's state_dict() is still that of all rows
                self.store.drop_holder(self)
                forget_rows(self.parameter)

    def flush(self) -> None:
        """Brings the table up to date, until the CPU sees it."""
        self._check_claim()
        self.bring_home()

    @property
    def is_drawn(self) -> bool:
        """Whether the rows have their first values."""
        return self.store.is_drawn

    def held(self) -> Tensor:
        """The held rows, which may be changed: they go back to the table as they are then."""
        with as_plain():
            self.exchange.change()
            return self.parameter.detach()

    def view(self) -> Tensor:
        """All rows in the table's memory, as they are now; they may be written to."""
        with as_plain():
            self._check_claim()
            self.store.table.settle()
            return self.store.field("weight")

    def draw(self, function: Callable[[Tensor], object], *, anew: bool) -> None:
        """Changes all rows, at first need if nobody has used them; see Draw."""
        with as_plain():
            self.store.draw(Draw((function,), random_seed(), None), anew=anew)

    def load(self, values: Tensor) -> None:
        """Copies values `[rows, ...]` to all rows."""
        if tuple(values.shape) != tuple(self.shape):
            raise ValueError(
                f"{self.name}: its weight stands for a table of {list(self.shape)}, got values of"
                f" {list(values.shape)}: write to emb.table to change some rows"
            )
        with as_plain():
            self.store.load("weight", values)

    # --------------------------------------------------------------------------------------------
    # Gradients

    def expects_gradient(self) -> bool:
        """See Requester."""
        number, token = self._token
        return token is not None and token() is not None and number == self.exchange.now.number

    def token(self, number: int) -> object:
        """What a graph keeps for as long as a gradient of a step's rows may come of it."""
        known, reference = self._token
        token = None if reference is None or known != number else reference()
        if token is None:
            token = _Token()
            self._token = (number, ref(token))
        return token

    def add_gradient(self, gradient: Tensor, ids: Tensor, number: int) -> None:
        """Adds the gradient of the rows `ids`, held in the step of this number, to the parameter's.

        It may have the padding's row after them. Raises RuntimeError if the rows have left.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.add_gradient(gradient, ids, number)
        with as_plain():
            self.exchange.refuse_earlier(number)
            step = self.exchange.now
            self._shown.show(step)
            added, held = gradient, step.ids.shape[0]
            if ids is not step.ids:
                added = among_more(gradient, torch.searchsorted(step.ids, ids), held)
            elif gradient.is_sparse:
                added = of_rows(gradient, sparse_indices(gradient), held)
            elif gradient.shape[0] != held:  # that of the padding is none
                added = gradient[:held]
            if self._sums[0] != number:
                self._sums = (number, GradientSums())
            summed = self._sums[1].add(
                self.parameter.grad, added, more_to_come=self.expects_gradient()
            )
            self.exchange.add_gradient(summed, number)

    def before_gradient(self, *, to_zero: bool) -> None:
        """Somebody asks for the gradient, perhaps to fill it with zeros."""
        self._shown.show(self.exchange.now)
        if to_zero:
            self._shown.note_zero_grad()

    def note_gradient(self) -> None:
        """Somebody has set the gradient."""
        self._shown.note_gradient()

    # --------------------------------------------------------------------------------------------
    # Optimizers

    @property
    def state(self) -> HeldState | None:
        """What keeps the state of the held rows."""
        return self._shown.kept.state

    def attach(self, state: HeldState, fields: Fields) -> bool:
        """Keeps fields of state, name to (row shape, dtype), beside the weight.

        Returns whether they have values already, because the table was read from a file with them.
        Raises MemoryError if there is no room for them; nothing has changed.
        """
        with as_plain():
            self._claim()
            self.exchange.bring_home()
            has_values = self.store.make_room(fields)
            self._shown.keep(state)
            self.exchange.show_anew()
            return has_values

    def detach(self, *, was_read: bool = False) -> None:
        """Keeps the weight alone; the fields of the state stay unused, held rows stay held.

        With `was_read` the next optimizer's state goes on with what a file has given.
        """
        with as_plain():
            self.exchange.bring_home()
            self._shown.keep(None)
            self.exchange.show_anew()
            self.store.note_read(was_read)


# ------------------------------------------------------------------------------------------------
# Through autograd


class _RowsOfStep(torch.autograd.Function):
    """The held rows as the operand of a lookup; their gradient goes to who asked.

    torch's own node for a parameter's gradient knows one shape for its lifetime. The rows of a step
    become more with each lookup, so their gradient takes this way round it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        parameter: Tensor,
        rows: list[Tensor],
        ids: Tensor,
        asker: TrainedRows,
        number: int,
    ) -> Tensor:
        """Returns the one of `rows` as computed from the parameter; see TrainedRows.rows_of."""
        ctx.ids, ctx.asker, ctx.number, ctx.token = ids, asker, number, asker.token(number)
        return rows[0]  # in a list, or autograd would take the result for a view of an input

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        """Hands the gradient on."""
        _check_once(gradient)
        ctx.token = None
        ctx.asker.add_gradient(gradient, ctx.ids, ctx.number)
        return (None,) * 5


class _SummedLookup(torch.autograd.Function):
    """Rows by their places, whose gradients are added up by the plan of their batch.

    What torch's embedding computes, in a third of the time on a GPU: the batch is sorted already.
    """

    @staticmethod
    def forward(
        ctx: Any,
        parameter: Tensor,
        rows: Tensor,
        found: Placed,
        table_rows: int,
        asker: TrainedRows,
        number: int,
    ) -> Tensor:
        """Returns the rows of a part of a batch, `[*ids, ...]`."""
        ctx.batch, ctx.part, ctx.table_rows = found.batch, found.part, table_rows
        ctx.asker, ctx.number, ctx.token = asker, number, asker.token(number)
        return gather_detached(rows, found.positions)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        """Adds the gradient up and hands it on."""
        _check_once(gradient)
        ctx.token = None
        batch: PlannedBatch = ctx.batch
        ids = gradient.numel() // max(1, gradient.shape[-1])
        summed = sum_rows(
            gradient.reshape(ids, gradient.shape[-1]).contiguous(),
            batch.plan,
            ctx.table_rows,
            begin=batch.begin(ctx.part),
            distinct=batch.distinct,
        )
        ctx.asker.add_gradient(summed, batch.ids, ctx.number)
        return (None,) * 6


def _check_once(gradient: Tensor) -> None:
    if torch.is_grad_enabled() and gradient.requires_grad:
        raise NotImplementedError(
            "gradients of gradients do not go through an Embedding's rows; use torch.nn"
        )


def _recomputes() -> bool:
    """Whether a checkpoint looks for what it did not keep, within a backward."""
    if current_backward() == -1:
        return False
    return top_saved_tensors_hooks(True) is not None


# ------------------------------------------------------------------------------------------------


def rows_held_by(optimizer: torch.optim.Optimizer) -> list[TrainedRows]:
    """The rows whose parameters an optimizer holds, in its order."""
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            reference = parameter.__dict__.get("_rows")
            rows = None if reference is None else reference()
            if isinstance(rows, TrainedRows):
                found.append(rows)
    return found


def random_seed() -> int:
    """A seed from torch's default generator."""
    return int(torch.randint(2**63 - 1, (), device="cpu"))

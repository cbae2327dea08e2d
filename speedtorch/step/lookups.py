"""Lookups: this process's requests in front of the step, and their way through autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import torch
from torch import Tensor

from speedtorch.ops.functions import gather_detached, sum_rows
from speedtorch.step.exchange import Exchange
from speedtorch.step.gradient_sums import GradientSums, among_more, of_rows
from speedtorch.step.planned_batch import PlannedBatch
from speedtorch.step.row_store import RowStore
from speedtorch.step.row_weight import as_plain
from speedtorch.step.shown_rows import ShownRows
from speedtorch.step.step import Placed

__all__ = ["Lookups"]

_T = TypeVar("_T")


class _Token:
    """Lives as long as a graph may still bring a gradient of a step's lookups."""


class _Told(NamedTuple):
    """Ids that were announced for the step that the next lookup begins."""

    parts: list[Tensor]
    plan: PlannedBatch


class Lookups:
    """The lookups of one module: what a Requester is in a single process.

    Args:
        name: what errors call it.
        store: where the rows come from.
        shown: shows those that are held.
        padding: id of a row that is never trained, or None.
    """

    def __init__(self, name: str, store: RowStore, shown: ShownRows, padding: int | None) -> None:
        self._name = name
        self._store = store
        self._shown = shown
        self._padding = padding
        self._token: tuple[int, ref[_Token] | None] = (0, None)
        """Of the lookups of a step, and its number."""
        self._told: _Told | None = None
        self._sums: tuple[int, GradientSums] = (0, GradientSums())
        self.exchange = Exchange(name, store, shown, padding, self)

    # --------------------------------------------------------------------------------------------
    # Rows of a step

    def announce(self, parts: Sequence[Tensor]) -> None:
        """Lets the next lookup bring the rows of all of these ids; those after it load nothing.

        Nothing waits: where a step is over, the ids are planned, so that several tables can be
        announced to before the first of them counts its rows.

        Args:
            parts: ids of any shape, on either device.

        Raises:
            IndexError: rows are held on the CPU and an id is out of range; on a GPU the next lookup
                says so.
        """
        if not self._with_told(self.exchange.announce, parts):
            parts = [*self._told_now()[0], *parts]
            self._told = _Told(parts, self.exchange.planned(parts))

    def _told_now(self) -> tuple[list[Tensor], PlannedBatch | None]:
        if self._told is None:
            return [], None
        parts, plan = self._told
        return parts, plan if plan.device == self.exchange.device else None

    def _with_told(self, hold: Callable[..., _T], parts: Sequence[Tensor]) -> _T:
        """Holds rows, if hold does, and those that were announced before: until then they wait."""
        try:
            held = hold(parts, *self._told_now())
        except IndexError:
            self._forget_bad_ids()
            raise
        if held:
            self._told = None
        return held

    def _forget_bad_ids(self) -> None:
        """Forgets announced ids of which one is bad, which somebody is told now."""
        if self._told is not None:
            try:
                self._told.plan.count()
            except IndexError:
                self._told = None

    def _hold(self, ids: Tensor) -> Placed:
        (found,) = self._with_told(self.exchange.hold, [ids])
        self.exchange.looked_up()
        return found

    def rows(
        self, ids: Tensor, max_norm: float | None = None, norm_type: float = 2.0
    ) -> tuple[Tensor, Tensor]:
        """The rows that ids name, held from now until the optimizer's next step is done.

        Args:
            ids: of any shape, on either device.
            max_norm: rows with a larger norm are shortened, as torch.embedding_renorm_ does.
            norm_type: the p of that norm.

        Returns:
            Positions of the shape of ids, and the held rows `[n, ...]`, or `[n + 1, ...]` with the
            padding's as the last, both on the device; gradients of the rows go to the parameter.

        Raises:
            IndexError: an id is out of range; what is held did not change.
        """
        found = self._hold(ids)
        if found.has_moved and _recomputes():
            raise RuntimeError(
                f"{self._name}: a checkpoint computes a lookup again after other rows have joined"
                " the step; announce() all ids of the step before its first lookup"
            )
        step = self.exchange.now
        # These count their own changes: rows that join the step are no change of these.
        rows = step.rows[0].detach()
        if max_norm is not None:
            step = self.exchange.change()
            torch.embedding_renorm_(rows, found.positions, max_norm, norm_type)
            self._write_padding(rows, step.held)
            self._shown.mark()
        parameter = self._shown.parameter
        return found.positions, _RowsOfStep.apply(parameter, [rows], step.ids, self, step.number)  # type: ignore[no-untyped-call]

    def summed(self, ids: Tensor) -> Tensor:
        """The rows that ids name, `[*ids.shape, ...]`, held as those of `rows` are.

        Args:
            ids: of any shape, on either device.

        Returns:
            The rows; their gradients go to the parameter.

        Raises:
            IndexError: an id is out of range; what is held did not change.
        """
        found = self._hold(ids)
        parameter, number = self._shown.parameter, self.exchange.now.number
        looked_up: Tensor = _SummedLookup.apply(  # type: ignore[no-untyped-call]
            parameter, parameter.detach(), found, self._store.rows, self, number
        )
        return looked_up

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
        """Adds the gradient of rows that were held in a step to the parameter's.

        Args:
            gradient: of the rows `ids`, in their order, and perhaps of the padding after them.
            ids: of the rows that were held when they were looked up.
            number: of the step in which that was.

        Raises:
            RuntimeError: the rows of that step have left.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.add_gradient(gradient, ids, number)
        with as_plain():
            self.exchange.refuse_earlier(number)
            self.exchange.show()
            step = self.exchange.now
            if ids is not step.ids:
                places = torch.searchsorted(step.ids, ids)
                added = among_more(gradient, places, step.held)
            elif gradient.is_sparse:
                added = of_rows(gradient, gradient._indices(), step.held)
            else:
                added = gradient if gradient.shape[0] == step.held else gradient[: step.held]
            if self._sums[0] != number:
                self._sums = (number, GradientSums())
            summed = self._sums[1].add(
                self._shown.parameter.grad, added, more_to_come=self.expects_gradient()
            )
            self.exchange.add_gradient(summed, number)

    # --------------------------------------------------------------------------------------------
    # Rows without a step

    def read(self, ids: Tensor) -> Tensor:
        """Rows as they are now, `[*ids.shape, ...]`, outside of any step."""
        self._come_home()
        shape = (*ids.shape, *self._store.row_shape)
        out = torch.empty(shape, dtype=self._store.dtype, device=self.exchange.device)
        self._store.read(ids.detach(), out)
        return out

    def borrow(
        self, ids: Tensor, max_norm: float | None, norm_type: float
    ) -> tuple[Tensor, Tensor]:
        """As `rows`, but of rows that no step holds."""
        self._come_home()
        batch = self.exchange.planned([ids])
        count, local = batch.held, batch.local(0)
        with_padding = count + int(self._padding is not None)
        rows = torch.empty(
            (with_padding, *self._store.row_shape),
            dtype=self._store.dtype,
            device=self.exchange.device,
        )
        self._store.read(batch.ids, rows[:count])
        if self._padding is not None:
            self._store.read(torch.tensor([self._padding]), rows[count:])
        if max_norm is not None:
            with torch.no_grad():
                torch.embedding_renorm_(rows, local, max_norm, norm_type)
            # Those of them that a step holds are read again.
            self.exchange.bring_home()
            self._store.write(batch.ids, rows[:count])
            self._write_padding(rows, count)
        return local, rows

    def _come_home(self) -> None:
        """Rows of the table are there as they are now, whoever holds them."""
        self.exchange.bring_home(changes=False)
        self._store.bring_others_home()

    def _write_padding(self, rows: Tensor, at: int) -> None:
        if self._padding is not None:
            self._store.write(torch.tensor([self._padding]), rows[at : at + 1])


class _RowsOfStep(torch.autograd.Function):
    """The held rows as the operand of a lookup; their gradient goes to who asked.

    torch's own node for a parameter's gradient knows one shape for its lifetime. The rows of a step
    become more with each lookup, so their gradient takes this way round it.
    """

    @staticmethod
    def forward(
        ctx: Any, parameter: Tensor, rows: list[Tensor], ids: Tensor, lookups: Lookups, number: int
    ) -> Tensor:
        """Returns the one of `rows` as computed from the parameter; see Lookups.rows."""
        ctx.ids, ctx.lookups, ctx.number, ctx.token = ids, lookups, number, lookups.token(number)
        return rows[0]  # in a list, or autograd would take the result for a view of an input

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        """Hands the gradient on.

        Raises:
            NotImplementedError: the gradient is to be differentiated itself.
        """
        _check_once(gradient)
        ctx.token = None
        ctx.lookups.add_gradient(gradient, ctx.ids, ctx.number)
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
        lookups: Lookups,
        number: int,
    ) -> Tensor:
        """Returns the rows of a part of a batch, `[*ids, ...]`."""
        ctx.batch, ctx.part, ctx.table_rows = found.batch, found.part, table_rows
        ctx.lookups, ctx.number, ctx.token = lookups, number, lookups.token(number)
        return gather_detached(rows, found.positions)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        """Adds the gradient up and hands it on.

        Raises:
            NotImplementedError: the gradient is to be differentiated itself.
        """
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
        ctx.lookups.add_gradient(summed, batch.ids, ctx.number)
        return (None,) * 6


def _check_once(gradient: Tensor) -> None:
    if torch.is_grad_enabled() and gradient.requires_grad:
        raise NotImplementedError(
            "gradients of gradients do not go through an Embedding's rows; use torch.nn"
        )


def _recomputes() -> bool:
    """Whether a checkpoint looks for what it did not keep, within a backward."""
    if torch._C._current_graph_task_id() == -1:
        return False
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None

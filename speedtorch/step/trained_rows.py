"""TrainedRows: who trains which rows: a table, the parameter of its held rows, and an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from speedtorch.step.exchange import OptimizerCall
from speedtorch.step.lookups import Lookups
from speedtorch.step.planned_batch import PlannedBatch
from speedtorch.step.row_store import Draw, Fields, RowStore
from speedtorch.step.row_weight import as_plain, show_rows
from speedtorch.step.shown_rows import HeldState, ShownRows
from speedtorch.table.host_table import HostTable

__all__ = ["TrainedRows", "random_seed", "rows_held_by"]


class TrainedRows:
    """All rows of an Embedding, those of a step as its parameter, and the state kept of them.

    The one who knows who trains what: the table knows it as its holder, the parameter as what it
    stands for, and the hooks of every optimizer's step find it through the parameter.

    Args:
        name: what errors call it.
        store: the rows.
        parameter: holds the rows of a step; it stands for the table from now on.
        padding: id of the row that is never trained, or None.
    """

    def __init__(
        self, name: str, store: RowStore, parameter: nn.Parameter, padding: int | None
    ) -> None:
        self.name = name
        self.store = store
        self.parameter = parameter
        self.padding = padding
        self.shape = torch.Size((store.rows, *store.row_shape))
        self._shown = ShownRows(name, parameter)
        self._lookups = Lookups(name, store, self._shown, padding)
        self._exchange = self._lookups.exchange
        self._claimed = False
        if parameter.requires_grad:
            self._claim(anew=True)
        show_rows(parameter, self)

    @property
    def is_on_cpu(self) -> bool:
        """Whether rows are held on the CPU."""
        return self._exchange.device.type == "cpu"

    @property
    def table(self) -> HostTable:
        """The table, with its first values; it brings held rows home before it is used."""
        return self.store.table

    # --------------------------------------------------------------------------------------------
    # Who trains the table

    def _claim(self, *, anew: bool = False) -> None:
        """Trains the rows from now on, or refuses to if another module was made to."""
        holder = self.store.holder
        if holder is self:
            return
        if not anew and holder is not None:
            self._refuse_replaced()
        self.store.holder = self
        self._claimed = True

    def _check_claim(self) -> None:
        if self._claimed and self.store.holder is not self:
            self._refuse_replaced()

    def _refuse_replaced(self) -> None:
        raise RuntimeError(
            f"{self.name}: another module was made to train the rows of its HostTable, and each"
            " would miss the changes of the other; use that one in both places"
        )

    # --------------------------------------------------------------------------------------------
    # Lookups

    def announce(self, ids: Sequence[Tensor]) -> None:
        """See Lookups.announce."""
        self._claim()
        self._lookups.announce(ids)

    def rows_of(
        self, ids: Tensor, max_norm: float | None, norm_type: float
    ) -> tuple[Tensor, Tensor]:
        """See Lookups.rows."""
        self._claim()
        return self._lookups.rows(ids, max_norm, norm_type)

    def summed(self, ids: Tensor) -> Tensor:
        """See Lookups.summed."""
        self._claim()
        return self._lookups.summed(ids)

    def lookup(self, ids: Tensor) -> Tensor:
        """Rows by their ids, held from now on."""
        with as_plain():
            local, rows = self.rows_of(ids, None, 2.0)
            return nn.functional.embedding(local, rows)

    def read(self, ids: Tensor) -> Tensor:
        """Rows by their ids as they are now, outside of any step."""
        with as_plain():
            self._check_claim()
            return self._lookups.read(ids)

    def borrow(
        self, ids: Tensor, max_norm: float | None, norm_type: float
    ) -> tuple[Tensor, Tensor]:
        """See Lookups.borrow."""
        self._check_claim()
        return self._lookups.borrow(ids, max_norm, norm_type)

    # --------------------------------------------------------------------------------------------
    # The table

    def bring_home(self) -> None:
        """See RowHolder; the CPU sees them, too, after this."""
        with as_plain():
            self._exchange.bring_home()
            self.store.settle(self._exchange.device)

    def flush(self) -> None:
        """Brings the table up to date, until the CPU sees it."""
        self._check_claim()
        self.bring_home()

    def moving(self, move: Callable[[], object]) -> None:
        """Holds no row while the parameter is moved to another device."""
        self._exchange.moving(move)

    @property
    def is_drawn(self) -> bool:
        """Whether the rows have their first values."""
        return self.store.is_drawn

    def held(self) -> Tensor:
        """The held rows, which may be changed: they go back to the table as they are then."""
        with as_plain():
            self._exchange.change()
            return self.parameter.detach()

    def view(self) -> Tensor:
        """All rows in the table's memory, as they are now; they may be written to."""
        with as_plain():
            self._check_claim()
            self.table.settle()
            return self.store.field("weight")

    def draw(self, function: Callable[[Tensor], object], *, anew: bool) -> None:
        """Changes all rows, at first need if nobody has used them; see Draw."""
        with as_plain():
            self.store.draw(Draw((function,), random_seed(), None), anew=anew)

    def load(self, values: Tensor) -> None:
        """Copies values `[rows, ...]` to all rows.

        Raises:
            ValueError: they have another shape.
        """
        if tuple(values.shape) != tuple(self.shape):
            raise ValueError(
                f"{self.name}: its weight stands for a table of {list(self.shape)}, got values of"
                f" {list(values.shape)}: write to emb.table to change some rows"
            )
        with as_plain():
            self.store.load("weight", values)

    # --------------------------------------------------------------------------------------------
    # Batches that are planned ahead

    def start_loop(self, loop: object) -> None:
        """See Exchange.start_loop."""
        self._claim()
        self._exchange.start_loop(loop)

    def end_loop(self, loop: object) -> None:
        """See Exchange.end_loop."""
        with as_plain():
            self._exchange.end_loop(loop)

    def plan_ahead(self, parts: Sequence[Tensor], after: PlannedBatch | None) -> PlannedBatch:
        """See Exchange.plan_ahead."""
        with as_plain():
            return self._exchange.plan_ahead(parts, after)

    def expect(self, batch: PlannedBatch | None) -> None:
        """See Exchange.expect."""
        self._exchange.expect(batch)

    # --------------------------------------------------------------------------------------------
    # Optimizers

    @property
    def state(self) -> HeldState | None:
        """What keeps the state of the held rows."""
        return self._shown.state

    @property
    def takes_sparse(self) -> bool:
        """Whether the optimizer takes sparse gradients only."""
        return self.state is not None and self.state.sparse

    def attach(self, state: HeldState, fields: Fields) -> bool:
        """Keeps fields of state beside the weight.

        Args:
            state: holds the state of the held rows.
            fields: name to (row shape, dtype).

        Returns:
            Whether they have values already, because the table was read from a file with them.

        Raises:
            MemoryError: there is no room for them; nothing has changed.
        """
        with as_plain():
            self._claim()
            self._exchange.bring_home()
            has_values = self.store.make_room(fields)
            self._shown.state = state
            self._exchange.show_anew()
            return has_values

    def detach(self) -> None:
        """Keeps the weight alone; the fields of the state stay unused, held rows stay held."""
        with as_plain():
            self._exchange.bring_home()
            self._shown.state = None
            self._exchange.show_anew()
            self.store.was_read = False  # the next optimizer's state begins anew

    def before_gradient(self, *, to_zero: bool) -> None:
        """Somebody asks for the gradient, perhaps to fill it with zeros."""
        self._exchange.show()
        if to_zero:
            self._shown.note_zero_grad()

    def note_gradient(self) -> None:
        """Somebody has set the gradient."""
        self._shown.note_gradient()

    def before_optimizer(self, call: OptimizerCall) -> None:
        """Called before an optimizer's step: see Exchange."""
        self._exchange.before_optimizer(call)

    def after_optimizer(self) -> bool:
        """Called after it; whether there was something to step."""
        return self._exchange.after_optimizer()


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

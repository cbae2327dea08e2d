"""TableRows: all rows of an Embedding in host memory, and those of a step as its parameter."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from speedtorch.held_rows import HeldState
from speedtorch.ops import pinned_copy
from speedtorch.swapper import Swapper
from speedtorch.table import HostTable

__all__ = ["TableRows"]

_Fields = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
_BLOCK_BYTES = 64 << 20  # of a field that is converted on its way

# Who trains the rows of a HostTable that a user gave.
_trained: weakref.WeakKeyDictionary[HostTable, Callable[[], TableRows | None]]
_trained = weakref.WeakKeyDictionary()


class TableRows:
    """The table of an Embedding, its optimizer state, and the swapper that holds some rows.

    Args:
        name: what errors call it.
        table: has a field "weight".
        parameter: holds the rows of a step.
        padding: id of the row that is never trained, or None.
        initialise: gives the rows their first values when somebody needs them, or None if they have
            some.
        source: the rows' values, copied now.
        owned: whether the table may be replaced by one with more fields.
    """

    def __init__(
        self,
        name: str,
        table: HostTable,
        parameter: nn.Parameter,
        padding: int | None,
        initialise: Callable[[HostTable], object] | None = None,
        *,
        source: Tensor | None = None,
        owned: bool = True,
    ) -> None:
        self.name = name
        self.rows = table.rows
        self.parameter = parameter
        self.owned = owned
        self._table = table
        self._initialise = initialise
        self._state_table: HostTable | None = None
        self._swapper = Swapper(name, table["weight"], parameter, padding)
        self._replaced = False
        if not owned and parameter.requires_grad:
            former = _trained.get(table, lambda: None)()
            if former is not None:
                former.let_go()
                former._replaced = True
            _trained[table] = weakref.ref(self)
        self._source = None if source is None else _Source(source)
        if source is not None:
            self.write("weight", source)

    @property
    def table(self) -> HostTable:
        """The table, with its first values; rows that are held may be newer than its own."""
        self._source = None  # from now on the rows may become others
        if self._initialise is not None:
            initialise, self._initialise = self._initialise, None
            initialise(self._table)
        return self._table

    def initialise(self, initialise: Callable[[HostTable], object]) -> None:
        """Gives all rows other first values: when somebody needs them, if nobody has yet."""
        self._swapper.ignore_lost_write()
        if self._initialise is not None:
            self._initialise = initialise
            return
        self.swapper.let_go()
        initialise(self._table)

    @property
    def swapper(self) -> Swapper:
        """Holds the rows of a step; the table has its first values.

        Raises:
            RuntimeError: another module trains the table's rows now.
        """
        if self._replaced:
            raise RuntimeError(
                f"{self.name}: another module was made to train the rows of its HostTable, and each"
                " would miss the changes of the other; use that one in both places"
            )
        _ = self.table
        return self._swapper

    def _holder(self, name: str) -> HostTable:
        apart = self._state_table
        return apart if apart is not None and name in apart else self._table

    def field(self, name: str) -> Tensor:
        """All rows of a field, in the table or beside it."""
        return self._holder(name)[name]

    def fill(self, name: str, row: Tensor) -> None:
        """Copies one row to all rows of a field."""
        self._holder(name).fill_(row, name)

    def write(self, name: str, value: Tensor) -> None:
        """Copies all rows of a field, without taking memory for another copy of them.

        Args:
            name: which field.
            value: `[rows, ...]` on any device, of any dtype that torch converts to the field's.
        """
        field = self.field(name)
        self._holder(name).settle()
        value = value.detach()
        if value.is_cuda and not field.is_cuda:
            row_bytes = max(1, value[:1].numel() * value.element_size())
            rows = max(1, _BLOCK_BYTES // row_bytes)
            for begin in range(0, len(field), rows):
                block = value[begin : begin + rows].to(field.dtype).contiguous()
                pinned_copy(field[begin : begin + rows], block)
        else:
            field.copy_(value)
        self._holder(name).settle()

    # --------------------------------------------------------------------------------------------

    @property
    def state(self) -> HeldState | None:
        """What keeps the state of the held rows."""
        return self._swapper.state

    @property
    def was_read(self) -> bool:
        """Whether the table's fields have values from a file."""
        return self._table.was_read

    @was_read.setter
    def was_read(self, was_read: bool) -> None:
        self._table.was_read = was_read

    def let_go(self) -> None:
        """Holds no rows any more; the table is up to date."""
        self._swapper.let_go()

    def keeping_gradient(self) -> AbstractContextManager[None]:
        """Held rows that have a gradient are held again, with it, when this ends."""
        return self._swapper.keeping_gradient()

    def attach(self, state: HeldState, fields: _Fields, *, sparse: bool) -> bool:
        """Keeps fields of state beside the weight.

        Args:
            state: holds the state of the held rows.
            fields: name to (row shape, dtype).
            sparse: the optimizer takes sparse gradients only.

        Returns:
            Whether they have values already, because the table was read from a file with them.

        Raises:
            MemoryError: there is no room for them.
        """
        self._swapper.let_go()
        known = self._table.fields
        there = all(known.get(name) == field for name, field in fields.items())
        if not there:
            self._make_room(fields)
        self._use(state, [self.field(name) for name in fields])
        self._swapper.takes_sparse = sparse
        return there and self.was_read

    def detach(self) -> None:
        """Keeps the weight alone; the fields of the state stay unused, held rows stay held."""
        self._swapper.drop_state()
        self.was_read = False  # the next optimizer's state begins anew

    def _use(self, state: HeldState | None, fields: Sequence[Tensor]) -> None:
        self._swapper.use(self._table["weight"], state, fields)

    def _make_room(self, fields: _Fields) -> None:
        if not self.owned:
            self._state_table = self._made(fields)
            return
        everything = {"weight": self._table.fields["weight"], **fields}
        source = None if self._source is None else self._source.tensor()
        if self._initialise is not None or source is not None:
            # What is in the table can be had again: it goes before the new one comes.
            weight_alone = {"weight": everything["weight"]}
            self._let_table_go()
            try:
                self._table = self._made(everything)
            except BaseException:
                self._table = self._made(weight_alone)
                self._use(None, [])
                raise
            finally:
                if source is not None:
                    self.write("weight", source)
            return
        try:
            table = self._made(everything)
        except MemoryError:
            self._state_table = self._made(fields)  # there may be room for this beside the old one
            return
        table["weight"].copy_(self._table["weight"])
        table.was_read = self._table.was_read
        self._let_table_go()
        self._table = table

    def _made(self, fields: _Fields) -> HostTable:
        table = self._table
        device = table.device if table.memory == "cuda" else None
        memory = "auto" if table.memory == "file" else table.memory
        return HostTable.from_fields(table.rows, fields, memory, device=device)

    def _let_table_go(self) -> None:
        self._swapper.use(self._table["weight"][:0].clone(), None, [])
        self._table.close()


class _Source:
    """A tensor that may still have the values that it had."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._version = -1 if tensor.is_inference() else tensor._version

    def tensor(self) -> Tensor | None:
        """The tensor, if it is still there, and the same."""
        tensor = self._tensor()
        same = tensor is not None and not tensor.is_inference() and tensor._version == self._version
        return tensor if same else None

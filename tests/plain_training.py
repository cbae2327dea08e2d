"""Plain training of whole tables by SparseAdam's rule: what an Embedding's numbers must be.

Tables and their state are full-size tensors. A step takes the rows that were looked up out of them,
gives them to one of torch's optimizers, and puts them back; rows of all tables, one optimizer. It
knows nothing of our classes. Gradients are sums of whole numbers, so that no order of adding shows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from optimizer_cases import Case
from reference import as_bytes
from torch import Tensor, nn, optim

__all__ = ["PlainTable", "PlainTraining", "assert_same_numbers", "differences", "make_optimizer"]


def make_optimizer(case: Case, parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    return case.make(list(parameters), lr=0.25, **case.settings)


@dataclass
class PlainTable:
    """All rows of a table, their state, and the step that goes on.

    If the step is `left`, lookups without a gradient begin another step, but for those that were
    announced, although a graph of this one is there. Lookups of a backward that failed are `kept`
    by torch: they count for the step until lookups of other ids come.
    """

    weight: Tensor  # [rows, columns]
    fields: dict[str, Tensor]  # the state of all rows
    scalars: dict[str, Any]  # the state that does not go by rows
    padding: int | None = None  # a row that is never trained
    max_norm: float | None = None  # rows with a larger norm are shortened when looked up
    held: set[int] = field(default_factory=set)  # rows of the step
    gradient: Tensor | None = None  # of all rows; None before a backward
    zeros: set[int] | None = None  # rows of a step left out, for which zero_grad() made zeros
    over: bool = True  # the step was stepped: the next lookup begins another
    left: bool = False  # a zero_grad has come since the last lookup
    parts: list[Tensor] = field(default_factory=list)  # ids of lookups and of the step's beginning
    unseen: list[Tensor] = field(default_factory=list)  # announced parts without a lookup yet
    looked_up: set[int] = field(default_factory=set)  # all ids of the step's lookups
    waiting: list[tuple[Tensor, ...]] = field(default_factory=list)  # announced, call by call
    before: list[tuple[Tensor, ...]] = field(default_factory=list)  # of a batch perhaps given up
    is_new: bool = False  # the next announcement is of another batch
    returned: list[tuple[Tensor, ...]] = field(default_factory=list)  # `waiting` of a loop's batch
    due: tuple[Tensor, ...] = ()  # of a loop's batch: a step that begins with it has all its rows
    kept: bool = False
    capacity: bool = False  # lookups of a step may bring no rows after the first
    stored: dict[str, torch.dtype] = field(default_factory=dict)  # 16 bits, rounded to nearest
    number: int = 0  # of the step

    def _rows(self, *parts: Tensor) -> set[int]:
        return {each for ids in parts for each in ids.flatten().tolist()} - {self.padding}

    def announce(self, *parts: Tensor) -> None:
        if self.over or (self.left and self.gradient is None):
            if self.is_new:
                self.before, self.waiting, self.is_new = self.waiting, [], False
            self.waiting = [*self.waiting, parts]
        elif not all(_is_one_of(part, self.parts) for part in parts):
            self._join(parts)

    def _join(self, parts: Sequence[Tensor]) -> None:
        """Announced ids become those of the step."""
        self.unseen = [*self.unseen, *parts]
        self.held = self.held | self._rows(*parts)
        self.parts = [*self.parts, *parts]

    def end_batch(self) -> None:
        """A batch may have been given up."""
        self.is_new = bool(self.waiting)

    def give_up_unless_used(self) -> None:
        """The step's lookups and a batch may have been given up."""
        self.left = True
        self.end_batch()

    def give_up(self) -> None:
        """Nothing that was announced waits."""
        self.waiting, self.before, self.is_new, self.left = [], [], False, True

    def go_on(self) -> None:
        """See PlainTraining.go_on."""
        self.due = ()
        self.end_batch()

    def end_loop(self) -> None:
        """See PlainTraining.end_loop."""
        self.due = ()
        if self.returned and self.waiting is self.returned:
            self.waiting, self.before, self.is_new = [], [], False
        elif self.before is self.returned:
            self.before = []
        self.returned = []

    def _begin(self, ids: Tensor, announced: list[Tensor]) -> None:
        self.held, self.gradient, self.over, self.kept = set(), None, False, False
        self.zeros = None
        self.number += 1
        self.parts, self.unseen, self.looked_up = [], [], set()
        due, self.due = self.due if self._is_due(ids) else (), ()
        if due:
            self._join(due)
        elif announced:
            self._join(announced)

    def _is_due(self, ids: Tensor) -> bool:
        """Whether these are ids of the loop's batch, or all of its rows."""
        due = self.due
        return bool(due) and (_is_one_of(ids, due) or self._rows(*due) == self._rows(ids))

    def look_up(self, ids: Tensor, *, shortens: bool = True) -> Tensor:
        """Brings the rows into the step; returns their values.

        One that was interrupted may have counted, and yet have shortened no row.
        """
        announced = _from_the_call_of(ids, self.waiting)
        if not announced and (announced := _from_the_call_of(ids, self.before)):
            announced += [part for call in self.waiting for part in call]
        is_left = self.left and self.gradient is None
        if is_left and (announced or _is_one_of(ids, self.due)):
            pass
        elif is_left and self.capacity:
            is_left = not _is_one_of(ids, self.parts)
        elif is_left:
            is_left = ids.numel() == 0 or not _is_one_of(ids, self.unseen)
        if self.over or is_left:
            rows = self._rows(ids)
            if self.capacity and not (announced or self.is_new or self._is_due(ids)):
                every = [part for call in self.waiting for part in call]
                announced = every if rows and rows <= self._rows(*every) else []
            self._begin(ids, announced)
        if announced:
            if not all(_is_one_of(part, self.parts) for part in announced):
                self._join(announced)
            self.waiting, self.before, self.is_new = [], [], False
        self.held = self.held | self._rows(ids)
        if not _is_one_of(ids, self.parts):
            self.parts = [*self.parts, ids]
        self.unseen = [part for part in self.unseen if not _is_one_of(part, [ids])]
        self.looked_up = self.looked_up | set(ids.flatten().tolist())
        if self.left and ids.numel() > 0:
            self.left, self.zeros = False, None
        return self.read(ids) if shortens else self.weight[ids]

    def is_refused(self) -> bool:
        """Whether a step would change rows that were announced and not looked up."""
        if self.over or self.gradient is None:
            return False
        return any(not self._rows(part) <= self.looked_up for part in self.unseen)

    def read(self, ids: Tensor) -> Tensor:
        """The rows' values, outside of the step."""
        if self.max_norm is not None:
            torch.embedding_renorm_(self.weight, ids, self.max_norm, 2.0)
        return self.weight[ids]

    def add_gradient(self, ids: Tensor, gradient: Tensor) -> None:
        """Adds the gradient of a lookup, `[*ids, columns]`."""
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.weight)
        self.held = self.held | self._rows(ids)  # its lookup may have been given up
        self.looked_up = self.looked_up | set(ids.flatten().tolist())
        self.gradient.index_put_((ids,), gradient, accumulate=True)

    def copy(self) -> PlainTable:
        return replace(
            self,
            weight=self.weight.clone(),
            fields={name: each.clone() for name, each in self.fields.items()},
            scalars=copy.deepcopy(self.scalars),
            gradient=None if self.gradient is None else self.gradient.clone(),
        )

    def forget(self, *, to_none: bool = True) -> None:
        """zero_grad when no lookup waits for its backward: the step holds nothing."""
        if to_none:
            self.zeros = None
        elif self.gradient is not None and not self.over:
            self.zeros = None if self.unseen else self.held
        self.gradient, self.left = None, True
        self.end_batch()
        if not self.kept:
            self.held, self.over = set(), True

    def round(self) -> None:
        """Rows become those that are stored; the others are already."""
        for name, dtype in self.stored.items():
            every = self.weight if name == "weight" else self.fields[name]
            every.copy_(every.to(dtype))

    def taken(self) -> Tensor:
        """The rows of the step, ascending."""
        held = self.held if self.zeros is None else self.zeros
        return torch.tensor(sorted(held), dtype=torch.int64, device=self.weight.device)


@dataclass
class PlainTraining:
    """Tables with one optimizer, in its order."""

    case: Case
    tables: list[PlainTable]

    @classmethod
    def begin(
        cls, case: Case, weights: Sequence[Tensor], paddings: Sequence[int | None] = ()
    ) -> PlainTraining:
        tables = []
        for number, weight in enumerate(weights):
            padding = paddings[number] if paddings else None
            tables.append(PlainTable(weight.clone(), {}, {}, padding))
        training = cls(case, tables)
        for number in range(len(tables)):
            training.forget_state(number)
        return training

    def copy(self) -> PlainTraining:
        return PlainTraining(self.case, [table.copy() for table in self.tables])

    def keeping(self, numbers: Sequence[int]) -> PlainTraining:
        """A copy after a backward that failed, where torch keeps lookups of these tables."""
        training = self.copy()
        for number in numbers:
            training.tables[number].kept = not training.tables[number].over
        return training

    def go_on(self) -> None:
        """A loop goes on: its batch is not that of now."""
        for table in self.tables:
            table.go_on()

    def end_loop(self) -> None:
        """A loop ends, and what it has announced last does not wait, unless others joined it."""
        for table in self.tables:
            table.end_loop()

    def forget_state(self, number: int) -> None:
        """The state is that before the first step."""
        table = self.tables[number]
        table.fields = self.case.first_fields(table.weight)
        table.scalars = {name: make() for name, make in self.case.scalars.items()}

    def is_refused(self) -> bool:
        """Whether a step raises, and changes nothing."""
        return any(table.is_refused() for table in self.tables)

    def zero_grad(self, *, to_none: bool = True) -> None:
        for table in self.tables:
            table.forget(to_none=to_none)

    def step(self, during: AbstractContextManager[object] | None = None) -> None:
        """Steps the rows of the step by torch, in `during`; rows left half done go back, too."""
        held = [nn.Parameter(table.weight[table.taken()]) for table in self.tables]
        optimizer = make_optimizer(self.case, held)
        for table, rows in zip(self.tables, held, strict=True):
            ids, gradient = table.taken(), table.gradient
            if table.zeros is not None:  # of rows that only this step may change
                gradient = torch.zeros_like(table.weight)
            if gradient is not None:
                rows.grad = gradient[ids]
                if self.case.make is optim.SparseAdam:
                    rows.grad = _all_rows(gradient[ids])
            taken = {name: each[ids] for name, each in table.fields.items()}
            optimizer.state[rows] = {**copy.deepcopy(table.scalars), **taken}
        try:
            with during or nullcontext():
                optimizer.step()
        finally:
            for table, rows in zip(self.tables, held, strict=True):
                ids, state = table.taken(), optimizer.state[rows]
                table.weight[ids] = rows.detach()
                for name, each in table.fields.items():
                    each[ids] = state[name]
                table.scalars = {name: state[name] for name in table.scalars}
                table.round()
        for table in self.tables:
            table.over |= table.gradient is not None or table.zeros is not None
            table.zeros = None
            table.waiting, table.before, table.is_new = [], [], False

    def state(self) -> list[dict[str, Any]]:
        """What the optimizer's state dict has of each table."""
        return [{**table.fields, **table.scalars} for table in self.tables]

    def numbers(self) -> list[dict[str, Any]]:
        """For each table its rows, their state, and the counts beside them."""
        return [{"weight": table.weight, **table.fields, **table.scalars} for table in self.tables]


def _from_the_call_of(ids: Tensor, calls: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """Of announced ids those of the call that has these, and of the calls after it."""
    for number, call in enumerate(calls):
        if _is_one_of(ids, call):
            return [part for each in calls[number:] for part in each]
    return []


def _is_one_of(ids: Tensor, parts: Iterable[Tensor]) -> bool:
    return any(ids.dtype == each.dtype and torch.equal(ids.cpu(), each.cpu()) for each in parts)


def _all_rows(gradient: Tensor) -> Tensor:
    """A sparse gradient that names each row once."""
    numbers = torch.arange(len(gradient), device=gradient.device)
    return torch.sparse_coo_tensor(
        numbers[None], gradient, gradient.shape, is_coalesced=True, check_invariants=False
    )


def differences(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> str:
    """What two trainings do not have in common, bit by bit; empty if they are the same."""
    found = []
    for number, (table, reference) in enumerate(zip(actual, expected, strict=True)):
        assert table.keys() == reference.keys()
        for name, value in reference.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                rows = _other_rows(table[name].cpu(), value.cpu())
                if rows:
                    found.append(f"{name} of table {number}: rows {rows}")
            elif float(table[name]) != float(value):
                found.append(f"{name} of table {number}: {float(table[name])} != {float(value)}")
    return "; ".join(found)


def _other_rows(actual: Tensor, expected: Tensor) -> list[int]:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    other = (as_bytes(actual) != as_bytes(expected)).reshape(len(actual), -1).any(1)
    rows: list[int] = other.nonzero().flatten().tolist()
    return rows


def assert_same_numbers(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    found = differences(actual, expected)
    assert not found, found

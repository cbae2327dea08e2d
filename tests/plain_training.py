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

__all__ = [
    "PlainTable",
    "PlainTraining",
    "assert_same_numbers",
    "differences",
    "make_optimizer",
]


def make_optimizer(case: Case, parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    return case.make(list(parameters), lr=0.25, **case.settings)


@dataclass
class PlainTable:
    """All rows of a table, their state, and the step that goes on.

    Attributes:
        weight: `[rows, columns]`.
        fields: the state of all rows, by its name.
        scalars: the state that does not go by rows.
        padding: id of a row that is never trained, or None.
        max_norm: rows with a larger norm are shortened when they are looked up.
        held: rows of the step.
        gradient: of all rows, or None before a backward.
        over: whether the step was stepped, so that the next lookup begins another.
        announced: rows that the next lookup brings too.
        due: ids of the batch that a loop gives: a step that begins with them has all of its rows.
        kept: whether a backward that failed keeps its lookups, in torch, so that they count for the
            step whatever zero_grad says.
    """

    weight: Tensor
    fields: dict[str, Tensor]
    scalars: dict[str, Any]
    padding: int | None = None
    max_norm: float | None = None
    held: set[int] = field(default_factory=set)
    gradient: Tensor | None = None
    over: bool = True
    announced: set[int] = field(default_factory=set)
    due: tuple[Tensor, ...] = ()
    kept: bool = False

    def _rows(self, ids: Tensor) -> set[int]:
        return set(ids.flatten().tolist()) - {self.padding}

    def announce(self, *parts: Tensor) -> None:
        self._begin_with(parts)
        for ids in parts:
            self.announced |= self._rows(ids)

    def _begin_with(self, parts: Sequence[Tensor]) -> None:
        """Takes the batch that is due if a step begins with parts of it, or with all its rows."""
        if not (self.over and self.due):
            return
        due, self.due = self.due, ()
        rows = set[int]().union(*map(self._rows, due))
        of_it = all(any(torch.equal(part, each) for each in due) for part in parts)
        if of_it or rows == set[int]().union(*map(self._rows, parts)):
            self.announced |= rows

    def look_up(self, ids: Tensor) -> Tensor:
        """Brings the rows into the step; returns their values."""
        if self.over:
            self._begin_with([ids])
            self.held, self.gradient, self.over, self.kept = set(), None, False, False
        self.held |= self._rows(ids) | self.announced
        self.announced = set()
        return self.read(ids)

    def read(self, ids: Tensor) -> Tensor:
        """The rows' values, outside of the step."""
        if self.max_norm is not None:
            torch.embedding_renorm_(self.weight, ids, self.max_norm, 2.0)
        return self.weight[ids]

    def add_gradient(self, ids: Tensor, gradient: Tensor) -> None:
        """Adds the gradient of a lookup, `[*ids, columns]`."""
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.weight)
        self.gradient.index_put_((ids,), gradient, accumulate=True)

    def copy(self) -> PlainTable:
        return replace(
            self,
            weight=self.weight.clone(),
            fields={name: each.clone() for name, each in self.fields.items()},
            scalars=copy.deepcopy(self.scalars),
            held=set(self.held),
            gradient=None if self.gradient is None else self.gradient.clone(),
            announced=set(self.announced),
        )

    def forget(self) -> None:
        """zero_grad when no lookup waits for its backward: the step holds nothing."""
        self.gradient = None
        if not self.kept:
            self.held, self.over = set(), True

    def taken(self) -> Tensor:
        """The rows of the step, ascending."""
        return torch.tensor(sorted(self.held), dtype=torch.int64, device=self.weight.device)


@dataclass
class PlainTraining:
    """Tables with one optimizer.

    Attributes:
        case: the optimizer, and what it keeps of each row and beside them.
        tables: in the order in which the optimizer has them.
    """

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

    def let_due_go(self, *numbers: int) -> None:
        """A loop goes on or ends: its batch is not that of now; of these tables, or of all."""
        for number in numbers or range(len(self.tables)):
            self.tables[number].due = ()

    def forget_state(self, number: int) -> None:
        """The state is that before the first step."""
        table = self.tables[number]
        table.fields = {n: torch.full_like(table.weight, v) for n, v in self.case.rows.items()}
        table.scalars = {name: make() for name, make in self.case.scalars.items()}

    def zero_grad(self) -> None:
        for table in self.tables:
            table.forget()

    def step(self, during: AbstractContextManager[object] | None = None) -> None:
        """torch's own step on the rows of the step; what it leaves half done goes back too.

        Args:
            during: entered around that step.
        """
        held = [nn.Parameter(table.weight[table.taken()]) for table in self.tables]
        optimizer = make_optimizer(self.case, held)
        for table, rows in zip(self.tables, held, strict=True):
            ids = table.taken()
            if table.gradient is not None:
                rows.grad = table.gradient[ids]
                if self.case.make is optim.SparseAdam:
                    rows.grad = _all_rows(table.gradient[ids])
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
        for table in self.tables:
            table.over |= table.gradient is not None

    def state(self) -> list[dict[str, Any]]:
        """What the optimizer's state dict has of each table."""
        return [{**table.fields, **table.scalars} for table in self.tables]

    def numbers(self) -> list[dict[str, Any]]:
        """For each table its rows, their state, and the counts beside them."""
        return [{"weight": table.weight, **table.fields, **table.scalars} for table in self.tables]


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

"""All rows of a table with their optimizer state, in NumPy.

Learning rates and decays are powers of two, and gradients are small whole numbers: products are
exact. Each operation then rounds once, so that NumPy and torch compute the same bits on every
device, in any order of the batch. Square roots are torch's, which its libraries round in their own
way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import optim

from speedtorch.optim import RowWiseAdagrad

__all__ = ["RULES", "Array", "Fields", "Mirror", "Rule", "differing", "rounded"]

Array = npt.NDArray[np.float32]
Fields = dict[str, Array]
HALF, QUARTER, EIGHTH, EPSILON = (np.float32(value) for value in (0.5, 0.25, 0.125, 1e-10))


@dataclass(frozen=True)
class Rule:
    """An optimizer and its step in NumPy.

    The step computes the fields of rows from those before, the gradient of the rows, and a function
    for square roots.
    """

    make: Callable[[Iterable[Any]], optim.Optimizer]
    state: Mapping[str, bool]  # the names of per-row state, and whether it has the row's width
    step: Callable[[Fields, Array, Callable[[Array], Array]], Fields]
    is_graphed: bool = True  # a CUDA graph can repeat the step
    is_sparse: bool = False  # takes sparse gradients


def _sgd(fields: Fields, gradient: Array, _: object) -> Fields:
    return {"weight": fields["weight"] - QUARTER * gradient}


def _momentum(fields: Fields, gradient: Array, _: object) -> Fields:
    buffer = HALF * fields["momentum_buffer"] + (gradient + EIGHTH * fields["weight"])
    return {"weight": fields["weight"] - QUARTER * buffer, "momentum_buffer": buffer}


def _nesterov(fields: Fields, gradient: Array, _: object) -> Fields:
    buffer = HALF * fields["momentum_buffer"] + gradient
    ahead = gradient + HALF * buffer
    return {"weight": fields["weight"] - QUARTER * ahead, "momentum_buffer": buffer}


def _adagrad(fields: Fields, gradient: Array, root: Callable[[Array], Array]) -> Fields:
    total = fields["sum"] + gradient * gradient
    divisor = root(total) + EPSILON
    return {"weight": fields["weight"] + -QUARTER * gradient / divisor, "sum": total}


def _row_wise(fields: Fields, gradient: Array, root: Callable[[Array], Array]) -> Fields:
    total = fields["sum"] + (gradient * gradient).mean(1, keepdims=True)
    divisor = root(total) + EPSILON
    return {"weight": fields["weight"] + -QUARTER * gradient / divisor, "sum": total}


RULES: dict[str, Rule] = {
    "SGD": Rule(lambda params: optim.SGD(params, lr=0.25), {}, _sgd, is_sparse=True),
    "momentum": Rule(
        lambda params: optim.SGD(params, lr=0.25, momentum=0.5, weight_decay=0.125),
        {"momentum_buffer": True},
        _momentum,
    ),
    "nesterov": Rule(
        lambda params: optim.SGD(params, lr=0.25, momentum=0.5, nesterov=True),
        {"momentum_buffer": True},
        _nesterov,
    ),
    "Adagrad": Rule(
        lambda params: optim.Adagrad(params, lr=0.25, eps=1e-10),
        {"sum": True},
        _adagrad,
        is_graphed=False,
        is_sparse=True,
    ),
    "RowWiseAdagrad": Rule(
        lambda params: RowWiseAdagrad(params, lr=0.25),
        {"sum": False},
        _row_wise,
        is_graphed=False,
        is_sparse=True,
    ),
}


def rounded(values: Array, dtype: str) -> Array:
    """Rounds to the nearest number of a 16-bit dtype, ties to even."""
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        return (bits & np.uint32(0xFFFF0000)).view(np.float32)
    return values


def differing(found: Array, expected: Array) -> npt.NDArray[np.intp]:
    """Rows with other bits; the sign of a zero does not count."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return (_bits(found) != _bits(expected)).any(1).nonzero()[0]


def _bits(rows: Array) -> npt.NDArray[np.uint32]:
    return np.ascontiguousarray(rows + np.float32(0)).view(np.uint32)


@dataclass
class Mirror:
    """The rows of a table, and the lookups and gradients of its current step."""

    fields: Fields  # the weight [N, D] and the state of all rows
    rule: Rule
    stored: Mapping[str, str]  # the 16-bit dtype of fields by name
    padding: int | None = None  # a row that is not trained
    divisor: int = 1  # of the gradients, which ranks average
    device: str = "cpu"  # of the optimizer's square roots
    named: list[npt.NDArray[np.int64]] = field(default_factory=list)
    gradient: Array | None = None

    @classmethod
    def of(cls, rows: Array, rule: Rule, stored: Mapping[str, str], **more: Any) -> Mirror:
        count, width = rows.shape
        state = {
            name: np.zeros((count, width if is_wide else 1), np.float32)
            for name, is_wide in rule.state.items()
        }
        weight = rounded(rows.copy(), stored.get("weight", ""))
        return cls({"weight": weight, **state}, rule, stored, **more)

    def copy(self) -> Fields:
        return {name: values.copy() for name, values in self.fields.items()}

    def give_up(self) -> None:
        self.named, self.gradient = [], None

    def look_up(self, ids: npt.NDArray[np.int64]) -> None:
        self.named.append(ids)

    def backward(self, ids: npt.NDArray[np.int64], gradients: Array) -> None:
        if self.gradient is None:
            self.gradient = np.zeros_like(self.fields["weight"])
        np.add.at(self.gradient, ids, gradients)

    def halve(self) -> None:
        """Halves the gradient."""
        if self.gradient is not None:
            self.gradient *= HALF

    def held(self) -> npt.NDArray[np.int64]:
        """The ids of the rows that the next step changes."""
        named = np.unique(np.concatenate([*self.named, np.zeros(0, np.int64)]))
        return named[named != (-1 if self.padding is None else self.padding)]

    def whole_gradient(self) -> Array:
        """The gradient of all rows, zeros for those that are not trained."""
        rows, held = np.zeros_like(self.fields["weight"]), self.held()
        if self.gradient is not None:
            rows[held] = self.gradient[held] / np.float32(self.divisor)
        return rows

    def forget_state(self) -> None:
        """Makes the state of each row that of one that no step has trained."""
        for name in self.rule.state:
            self.fields[name] = np.zeros_like(self.fields[name])

    def stepped(self) -> Fields:
        """The fields after a step of the rows that were looked up."""
        after = self.copy()
        if self.gradient is None:
            return after
        held = self.held()
        gradient = self.whole_gradient()[held]
        fields = {name: values[held] for name, values in after.items()}
        made = self.rule.step(fields, gradient, self._root)
        for name, values in made.items():
            after[name][held] = rounded(values, self.stored.get(name, ""))
        return after

    def _root(self, values: Array) -> Array:
        found: Array = torch.from_numpy(values).to(self.device).sqrt().cpu().numpy()
        return found

    def squares(self) -> float:
        """The sum of the squares of the gradients of the rows that are trained."""
        if self.gradient is None:
            return 0.0
        gradient = self.gradient.astype(np.float64) / self.divisor
        if self.padding is not None:
            gradient[self.padding] = 0
        return float(np.square(gradient).sum())

    def step(self) -> None:
        self.fields = self.stepped()
        self.give_up()

    def write(self, ids: npt.NDArray[np.int64], rows: Array) -> None:
        self.fields["weight"][ids] = rounded(rows, self.stored.get("weight", ""))

    def grow(self, rows: Array) -> None:
        """Adds rows, whose state is that of a row that no step has trained."""
        for name, values in self.fields.items():
            more = np.zeros((len(rows), values.shape[1]), np.float32)
            self.fields[name] = np.concatenate([values, rows if name == "weight" else more])

    def difference(self, found: Fields) -> str:
        """The rows that differ, by field; "" if none does."""
        wrong = []
        for name, expected in self.fields.items():
            rows = differing(found[name], expected)
            if len(rows):
                wrong.append(
                    f"{name}: rows {rows.tolist()}: {found[name][rows].tolist()}"
                    f" for {expected[rows].tolist()}"
                )
        return "; ".join(wrong)

    def adopt(self, found: Fields) -> str:
        """Takes the rows after an interrupted step, each of which is before or after the step.

        Returns:
            The rows that are neither; "" if there is none.
        """
        after, wrong = self.stepped(), np.zeros(len(self.fields["weight"]), bool)
        is_after = wrong.copy()
        for name in after:
            is_after[differing(found[name], self.fields[name])] = True
        for name, values in after.items():
            rows = differing(found[name], np.where(is_after[:, None], values, self.fields[name]))
            wrong[rows] = True
        if wrong.any():
            return f"rows {wrong.nonzero()[0].tolist()} are neither before nor after the step"
        self.fields = {
            name: np.where(is_after[:, None], values, self.fields[name])
            for name, values in after.items()
        }
        return ""

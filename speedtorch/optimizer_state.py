"""What an optimizer remembers about each row of a parameter, learnt from a tiny probe of it.

No list of optimizers' names: a copy of the optimizer (same class, same settings) steps a parameter
of a few rows. The probe sees which state it makes, how that state starts, and whether rows are
treated separately, which is what lets a batch of rows be stepped without the rest of its table.
"""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .optimizer_copy import OptimizerCopy, copy_optimizer, group_of

__all__ = ["OptimizerProbe", "RowState", "probe_optimizer"]

# Primes above any vector register's number of lanes; no other dimension has this size by chance.
_ROW_COUNTS = (19, 23, 29)
# The rows of each step, in changing numbers: RAdam and NAdam change their formula at the sixth.
_BATCHES = ((0, 19), (0, 19), (4, 19), (2, 9), (0, 1), (0, 19), (3, 17), (1, 19))


@dataclass(frozen=True)
class RowState:
    """One entry of an optimizer's state that holds a row for each row of the parameter.

    Attributes:
        shape: the shape of one row, often that of the parameter's row.
        dtype: the dtype of the entry.
        initial: the row before the first update `[*shape]`, on the parameter's device.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    initial: Tensor


@dataclass(frozen=True)
class OptimizerProbe:
    """What one optimizer keeps for one parameter.

    Attributes:
        row_state: the entries that have one row per row of the parameter, by name.
        scalar_state: the other entries (step counts and the like) before the first update.
        sparse: whether it takes sparse gradients only.
    """

    row_state: dict[str, RowState]
    scalar_state: dict[str, Any]
    sparse: bool = False


def probe_optimizer(optimizer: Optimizer, parameter: Tensor) -> OptimizerProbe:
    """Learns which state an optimizer keeps for each row of a parameter, and how it starts.

    Optimizer, parameter, hooks, schedulers and random generators are left exactly as they are. A
    momentum buffer, which torch's SGD makes out of the first gradient, starts as zeros.

    Args:
        optimizer: any torch optimizer, third-party ones too, that holds the parameter.
        parameter: `[rows, ...]`; its number of rows does not matter.

    Returns:
        The row state and the scalar state, both before the first update.

    Raises:
        ValueError: the optimizer does not hold the parameter, its step fails or needs a closure,
            a row's state does not start alike for every row, or rows are not treated separately.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2, 4))
        >>> probe = probe_optimizer(torch.optim.Adamax([weight]), weight)
        >>> sorted(probe.row_state), probe.row_state["exp_inf"].shape, sorted(probe.scalar_state)
        (['exp_avg', 'exp_inf'], (4,), ['step'])
    """
    if parameter.dim() == 0:
        raise ValueError("a parameter without dimensions has no rows: it needs at least one")
    group_of(optimizer, parameter)  # raises if it is not held
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} cannot step rows on their own: its step needs a closure"
        )
    devices = [parameter.device] if parameter.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        found = _Probe(optimizer, parameter, parameter.dtype).learn()
        # Two steps that differ round to the same half-precision numbers: compare them in float32.
        half = parameter.dtype.itemsize < 4
        _Probe(optimizer, parameter, torch.float32 if half else parameter.dtype).check_separate()
    return found


class _Probe:
    """Copies of one optimizer that step a parameter of a few random rows."""

    def __init__(self, optimizer: Optimizer, parameter: Tensor, dtype: torch.dtype) -> None:
        self._optimizer = optimizer
        self._parameter = parameter
        self._name = type(optimizer).__name__
        self._dtype = dtype
        row_shape = tuple(parameter.shape[1:])
        rows = next(count for count in _ROW_COUNTS if count not in row_shape)
        self._shape = (rows, *row_shape)
        self._sparse = False
        self._construct = False
        self._random = torch.Generator().manual_seed(0)

    def learn(self) -> OptimizerProbe:
        """The state before the first update, and which of it goes by rows."""
        self._choose_way()
        first, again = self._first_values({}), self._first_values({})
        decay = group_of(self._optimizer, self._parameter).get("weight_decay")
        if decay and any(self._uneven(name, first, again) for name in first):
            # A momentum buffer made out of the first gradient holds the decay of the row as well.
            settings = {"weight_decay": 0.0}
            first, again = self._first_values(settings), self._first_values(settings)
        rows: dict[str, RowState] = {}
        for name, value in first.items():
            if self._goes_by_rows(value):
                if self._uneven(name, first, again):
                    raise ValueError(
                        f"{self._name} cannot be used: its state '{name}' starts from the row's own"
                        " value, so rows that no batch has named yet have no state to start from"
                    )
                if name == "weight" or not isinstance(name, str):
                    raise ValueError(
                        f"{self._name} cannot be used: a table cannot hold a state called {name!r}"
                    )
                row = value[0].clone()
                # -0.0, from a gradient of zero that was negated, is a zero as well.
                rows[name] = RowState(tuple(row.shape), row.dtype, row.masked_fill_(row == 0, 0))
        others = {name: first[name] for name in first if name not in rows}
        return OptimizerProbe(rows, others, self._sparse)

    def check_separate(self) -> None:
        """Raises ValueError unless rows stepped in changing batches and rows stepped apart agree.

        One copy lives through all batches, as the user's optimizer will; the rows of each batch are
        also stepped by fresh copies of it, in two parts.
        """
        learnt = self.learn()
        self._check_start(learnt)
        values = self._random_rows() / 10
        table = {
            name: row.initial.expand(self._shape[0], *row.shape).clone()
            for name, row in learnt.row_state.items()
        }
        # A scheduler's warm-up often starts at 0, which would hide every difference.
        together = self._copy(self._optimizer, self._parameter, values, {"lr": 0.01})
        together.state.update(learnt.scalar_state)
        for low, high in _BATCHES:
            gradient = self._random_rows()[low:high]
            before = values[low:high].clone()
            state = {name: rows[low:high].clone() for name, rows in table.items()}
            parts = []
            for part in (slice(0, 1), slice(1, None)):
                if before[part].shape[0]:
                    apart = self._copy(together.optimizer, together.probe, before[part], {})
                    apart.state.update(together.copied_state())
                    apart.install(before[part], {name: rows[part] for name, rows in state.items()})
                    parts.append(self._stepped(apart, gradient[part], table))
            together.install(before, state)
            result = self._stepped(together, gradient, table)
            values[low:high] = result.pop("")
            for name, rows in result.items():
                table[name][low:high] = rows
                self._compare(f"state '{name}'", rows, torch.cat([p[name] for p in parts]), rows)
            new = values[low:high]
            self._compare("rows", new, torch.cat([p[""] for p in parts]), new - before)

    def _check_start(self, learnt: OptimizerProbe) -> None:
        """Raises ValueError if a step that begins with the learnt state counts differently."""
        values, gradient = self._random_rows(), self._random_rows()
        fresh = self._copy(self._optimizer, self._parameter, values, {"lr": 0.01})
        begun = self._copy(self._optimizer, self._parameter, values, {"lr": 0.01})
        begun.state.update(learnt.scalar_state)
        rows = {n: r.initial.expand(self._shape[0], *r.shape) for n, r in learnt.row_state.items()}
        begun.install(values, rows)
        for copied in (fresh, begun):
            copied.step(gradient, sparse=self._sparse)
        for name in learnt.scalar_state:
            expected, found = fresh.state.get(name), begun.state.get(name)
            if not _same_value(expected, found):
                raise ValueError(
                    f"{self._name} cannot be used: its state '{name}' is first assigned after an"
                    f" update, so that its start cannot be seen ({expected} after a first step,"
                    f" {found} after one that begins with what was seen)"
                )

    # --------------------------------------------------------------------------------------------

    def _choose_way(self) -> None:
        """Finds out whether a bare copy can step or a constructed one, and which gradients."""
        errors: list[Exception] = []
        for construct, sparse in itertools.product((False, True), repeat=2):
            self._construct, self._sparse = construct, sparse
            try:
                self._stepped_once({})
                return
            except Exception as error:  # the optimizer's own, of any kind; told below
                errors.append(error)
        raise ValueError(
            f"{self._name} cannot be used: a step of a small parameter {list(self._shape)} fails"
            f" with dense zero gradients ({errors[0]}) and with sparse ones ({errors[1]})"
        ) from errors[0]

    def _stepped_once(self, settings: dict[str, Any]) -> OptimizerCopy:
        copied = self._copy(self._optimizer, self._parameter, self._random_rows(), settings)
        copied.step(torch.zeros_like(copied.probe), sparse=self._sparse)
        return copied

    def _first_values(self, settings: dict[str, Any]) -> dict[str, Any]:
        first = self._stepped_once(settings).first_values()
        if first is None:
            raise ValueError(
                f"{self._name} cannot be used: it replaces the dict that holds its state, so that"
                " the start of that state cannot be seen"
            )
        return first

    def _copy(
        self, optimizer: Optimizer, parameter: Tensor, values: Tensor, settings: dict[str, Any]
    ) -> OptimizerCopy:
        return copy_optimizer(optimizer, parameter, values, settings, construct=self._construct)

    def _stepped(
        self, copied: OptimizerCopy, gradient: Tensor, table: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """The rows after a step, under "", and those of each state."""
        try:
            copied.step(gradient, sparse=self._sparse)
        except Exception as error:
            raise ValueError(
                f"{self._name} cannot be used: its step fails when the rows change ({error})"
            ) from error
        state = copied.state
        for name in table:
            if getattr(state.get(name), "shape", ())[:1] != gradient.shape[:1]:
                raise ValueError(f"{self._name} cannot be used: its state '{name}' loses its rows")
        for name, value in state.items():
            # With one row, a state of one row that all rows share looks the same.
            by_rows = getattr(value, "shape", None) == gradient.shape and gradient.shape[0] != 1
            if by_rows and name not in table:
                raise ValueError(
                    f"{self._name} cannot be used: it makes its state '{name}' in a later step only"
                )
        rows = {name: state[name].detach().clone() for name in table}
        return {"": copied.probe.detach().clone(), **rows}

    def _compare(self, what: str, rows: Tensor, apart: Tensor, scale: Tensor) -> None:
        """Raises unless `rows` and `apart` agree to a ten-thousandth of the largest `scale`."""
        if rows.numel() and (rows.is_floating_point() or rows.is_complex()):
            rounding = 8 * torch.finfo(rows.dtype).eps * rows.abs().amax()
            same = bool(((rows - apart).abs() <= 1e-4 * scale.abs().amax() + rounding).all())
        else:
            same = torch.equal(rows, apart)
        if not same:
            raise ValueError(
                f"{self._name} cannot be used: it does not treat rows separately (its {what} differ"
                " between rows stepped together and apart), so that a batch cannot be stepped"
                " without the rest of its table; SGD, Adam, Adamax, Adagrad and others do"
            )

    def _random_rows(self) -> Tensor:
        rows = torch.randn(self._shape, generator=self._random)
        return rows.to(self._parameter.device, self._dtype)

    def _goes_by_rows(self, value: Any) -> bool:
        return isinstance(value, Tensor) and tuple(value.shape[:1]) == self._shape[:1]

    def _uneven(self, name: str, first: dict[str, Any], again: dict[str, Any]) -> bool:
        """Whether the rows of a state differ from each other, or from those of another draw."""
        if not self._goes_by_rows(first[name]):
            return False
        one = first[name][:1].expand_as(first[name])
        return not (_same_bytes(one, first[name]) and _same_bytes(one, again[name]))


def _same_bytes(left: Tensor, right: Tensor) -> bool:
    flat = [side.contiguous().reshape(-1).view(torch.uint8) for side in (left, right)]
    return torch.equal(flat[0], flat[1])


def _same_value(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_same_value, left, right))
    return bool(left == right)

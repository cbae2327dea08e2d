"""Hooks of every optimizer's step: the rows that it changes must go back to their table."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from speedtorch.attached_state import AttachedState, attached_to
from speedtorch.compiling import not_compiled
from speedtorch.optimizer_copy import settings_of
from speedtorch.optimizer_state import probe_optimizer
from speedtorch.table_rows import TableRows

__all__ = ["watch_steps"]

# The rows that a parameter holds, for the hooks of every optimizer's step.
_watched: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def watch_steps(rows: TableRows) -> None:
    """Lets the rows of a parameter know of the steps of whichever optimizer holds it."""
    _start_watching()
    _watched[rows.parameter] = weakref.ref(rows)


_watching: list[RemovableHandle] = []


def _start_watching() -> None:
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(_before_step))
        _watching.append(register_optimizer_step_post_hook(_after_step))


def _watched_rows(optimizer: Optimizer) -> Iterator[TableRows]:
    if not _watched:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            reference = _watched.get(parameter, None)  # type: ignore[no-untyped-call]
            rows = None if reference is None else reference()
            if rows is not None:
                yield rows


@not_compiled
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for rows in _watched_rows(optimizer):
        attached = attached_to(rows)
        if attached is None:
            _check_stateless(optimizer, rows)
        elif attached is not optimizer:
            raise ValueError(
                f"{rows.name} is attached to another optimizer than this"
                f" {type(optimizer).__name__}: detach that first"
            )
        elif isinstance(rows.state, AttachedState):
            rows.state.before_step(optimizer)
        rows.swapper.before_optimizer()


@not_compiled
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for rows in _watched_rows(optimizer):
        stepped = rows.swapper.after_optimizer()
        if isinstance(rows.state, AttachedState):
            rows.state.after_step(stepped=stepped)


_stateless: weakref.WeakKeyDictionary[Optimizer, dict[int, dict[str, Any]]]
_stateless = weakref.WeakKeyDictionary()


def _check_stateless(optimizer: Optimizer, rows: TableRows) -> None:
    """Raises unless the optimizer keeps nothing of the rows, which come and go without it."""
    parameter = rows.parameter
    settings = settings_of(optimizer, parameter)
    settings.pop("lr", None)
    known = _stateless.setdefault(optimizer, {})
    if known.get(id(parameter)) == settings:
        return
    kept = probe_optimizer(optimizer, parameter).row_state
    if kept:
        raise RuntimeError(
            f"{type(optimizer).__name__} keeps {', '.join(kept)} of each row of {rows.name}, whose"
            " rows come and go: call speedtorch.attach(optimizer, model) once before the first"
            " step; nothing was stepped"
        )
    known[id(parameter)] = settings

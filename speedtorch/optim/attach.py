"""attach: an optimizer's state of an Embedding's rows lives in the table, beside the rows."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from speedtorch.optim.attached_state import AttachedState, SavedState, state_of
from speedtorch.optim.optimizer_copy import group_of
from speedtorch.optim.probe import OptimizerProbe, agree, probe_optimizer
from speedtorch.optim.row_wise_adagrad import RowWiseAdagrad
from speedtorch.optim.step_hooks import find_own_step
from speedtorch.optim.wrappers import show_all_rows, show_held_rows, stepped_by
from speedtorch.step.cache_budget import CacheBudget, CachedRows, Need
from speedtorch.step.row_store import Fields
from speedtorch.step.sparse_rows import SparseRows
from speedtorch.step.trained_rows import TrainedRows, rows_held_by
from speedtorch.torch_internals import as_plain

__all__ = ["attach", "detach", "saved_state_of"]

_attached: weakref.WeakKeyDictionary[Optimizer, SavedState] = weakref.WeakKeyDictionary()


def attach(optimizer: Optimizer, module: nn.Module) -> None:
    """Makes an optimizer keep its state of Embeddings' rows in their tables, beside the rows.

    Of an attached optimizer, tables that add_param_group() gave it later are attached, and the
    state of the others stays.

    From here on the optimizer sees the rows of a step and their state, and nothing else changes:
    the same step(), schedulers, scalers and state_dict(), which holds the state of all rows. Attach
    before the first use or loading: the table then takes its memory once, with the state as part of
    each row's record; rows that are there already move to a new table. state_dict() of the module
    and of the optimizer then have contiguous copies, or without room for one a view of the records.

    load_state_dict() loads all of a state or nothing. Where it is interrupted while it copies rows,
    their next use copies them all, and raises what is in the way. torch.distributed.checkpoint
    loads a process that has stepped nothing by get_state_dict(), load() and set_state_dict().

    A step changes the rows that it has looked up, and there is one step count for all rows, as with
    torch.optim.SparseAdam. A momentum buffer starts as zeros (torch's SGD starts it as the first
    gradient, which is the same unless there is dampening).

    It raises RuntimeError for an optimizer that does not treat rows separately (a norm of all rows,
    a factor of them), keeps something for all rows that depends on which were stepped, starts a
    row's state from its first gradient, its own value or at random, keeps its state in lists or
    dicts of tensors or in another kind where a batch has many rows (8-bit optimizers), wraps
    another optimizer, or needs a closure. A probe of a few rows finds that out.

    Args:
        optimizer: any torch optimizer that treats rows separately, also one that torch does not
            define, and one that accelerate, Lightning, Fabric or torchrec has wrapped: attach the
            outermost of torchrec's wrappers, whose state_dict() then has all rows. One with a
            load_state_dict of its own loads as that does, which may take the state of all rows to
            the parameter's device for a moment; torchrec's write in place, row after row.
        module: an Embedding or EmbeddingBag, or a module that contains some; those are attached
            whose weight the optimizer holds.

    Raises:
        TypeError: it is no torch optimizer, or the module is none.
        ValueError: the optimizer holds no Embedding's weight of the module, or is attached to all
            of them already; another is attached to one, it is a copy of an attached one, or it
            breaks the rule above; or the bytes of a cache hold no row with its state.
            Nothing has changed.
        MemoryError: there is no room for the state, or to try the optimizer (on a GPU
            torch.OutOfMemoryError). Nothing has changed.

    Example:
        >>> import speedtorch, torch
        >>> embedding = speedtorch.Embedding(1000, 4)
        >>> optimizer = torch.optim.Adam(embedding.parameters(), lr=0.1)
        >>> speedtorch.attach(optimizer, embedding)
        >>> embedding(torch.tensor([7, 7, 999])).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state_dict()["state"][0]["exp_avg"][[6, 7, 999], 0]
        tensor([0.0000, 0.2000, 0.1000])
    """
    if not isinstance(module, nn.Module):
        kinds = f"{type(optimizer).__name__}, {type(module).__name__}"
        raise TypeError(
            f"attach: expected an optimizer and a module, in this order, got {kinds}: give several"
            " modules as one nn.ModuleList([...])"
        )
    with as_plain():
        rows = {id(getattr(each, "trained_rows", None)) for each in module.modules()}
        within = stepped_by(optimizer)
        holding = [each for each in within if any(id(r) in rows for r in rows_held_by(each))]
        added: dict[Optimizer, list[AttachedState]] = {}
        try:
            for each in holding or within[:1]:  # without such an optimizer, _attach raises
                added[each] = _attach(each, module)
            if not any(added.values()):
                raise ValueError(
                    f"{type(within[0]).__name__} is attached already to every Embedding of"
                    f" {type(module).__name__}: attach() adds tables that add_param_group() gave"
                    " it later; detach() it first to begin its state anew"
                )
            show_all_rows(optimizer, {each: _attached[each] for each in added})
        except BaseException:
            for each, states in added.items():
                _detach(each, states)
            if not any(each in _attached for each in within):
                show_held_rows(optimizer)
            raise


def _attach(optimizer: Optimizer, module: nn.Module) -> list[AttachedState]:
    """Attaches the tables of a module that are not attached yet, and returns their states."""
    kind = type(optimizer).__name__
    of_module = {
        id(getattr(each, "trained_rows", None)): getattr(each, "sparse", False)
        for each in module.modules()
    }
    found, probes, is_held = [], _Probes(optimizer), False
    for rows in rows_held_by(optimizer):
        if id(rows) in of_module:
            is_held = True
            find_own_step(optimizer, rows)
            if (before := state_of(rows)) is not None:
                if before.optimizer() is optimizer:
                    continue
                raise ValueError(f"{rows.name} is attached to another optimizer: detach that first")
            probe = probes.of(rows, sparse=of_module[id(rows)])
            loaded = dict(optimizer.state.get(rows.weight, {}))
            found.append((rows, probe, loaded, rows.table.was_read))
    if not is_held:
        raise ValueError(
            f"{kind} holds no weight of an Embedding in {type(module).__name__}: build it with"
            " module.parameters() first, and attach the module that has a speedtorch.Embedding or"
            " EmbeddingBag"
        )
    if not found:
        return []
    saved = _attached.get(optimizer) or SavedState(optimizer)
    added: list[AttachedState] = []
    try:
        _share_caches({rows: _fields_of(probe) for rows, probe, *_ in found})
        for rows, probe, loaded, _ in found:
            state = AttachedState(optimizer, rows, probe)
            _attach_rows(state, kind, loaded)
            added.append(state)
        saved.states.extend(added)
        _attached[optimizer] = saved
    except BaseException:
        for state in added:
            if state in saved.states:
                saved.states.remove(state)
        if not saved.states:
            _attached.pop(optimizer, None)
            saved.remove(optimizer)
        for rows, _, loaded, was_read in found:
            if rows.state is not None:
                rows.detach(was_read=was_read)
                optimizer.state.pop(rows.weight, None)
                if loaded:
                    optimizer.state[rows.weight] = loaded
        _share_caches({rows: None for rows, *_ in found})
        raise
    return added


class _Probes:
    """What one optimizer keeps of rows, learnt once for equal tables.

    Optimizers of torch and ours treat parameters alike that have a group, the shape of a row, dtype
    and device in common, and equal states to start from. An optimizer of another library may know
    more of a parameter, and is tried with each.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        kind = type(optimizer)
        self._treats_alike = kind is RowWiseAdagrad or kind.__module__.startswith("torch.optim.")
        self._known: dict[tuple[Any, ...], list[tuple[dict[str, Any], OptimizerProbe]]] = {}

    def of(self, rows: TrainedRows, *, sparse: bool) -> OptimizerProbe:
        """What it keeps of rows, whose gradients are `sparse` if the module gives such."""
        parameter = rows.weight
        state = dict(self._optimizer.state.get(parameter, {}))
        group = id(group_of(self._optimizer, parameter))
        kind = (group, parameter.shape[1:], parameter.dtype, parameter.device, sparse)
        known = self._known.setdefault(kind, [])
        if self._treats_alike:
            for other, probe in known:
                if state.keys() == other.keys() and agree(state, other):
                    return probe
        known.append((state, _probed(self._optimizer, rows, sparse=sparse)))
        return known[-1][1]


def _probed(optimizer: Optimizer, rows: TrainedRows, *, sparse: bool) -> OptimizerProbe:
    """See _Probes.of()."""
    probe = probe_optimizer(optimizer, rows.weight)
    if sparse and not probe.sparse:
        with suppress(ValueError):  # it takes sparse gradients in a way that a probe does not see
            asked = probe_optimizer(optimizer, rows.weight, sparse=True)
            if asked.row_state.keys() != probe.row_state.keys():
                return asked
    return probe


def _attach_rows(state: AttachedState, kind: str, loaded: dict[str, Any]) -> None:
    """Makes room for the state and puts there what it is so far.

    What load_state_dict put into the optimizer before is the state of all rows; what its
    constructor put there is that of the held ones, before any update.
    """
    rows, probe = state.table_rows, state.probe
    every = rows.table.whole_rows
    # torch.full_like(weight, number) of a constructor is what the probe has learnt.
    loaded = {n: v for n, v in loaded.items() if n not in state.names or not _is_constant(v)}
    lengths = {n: len(v) if v.dim() else 1 for n, v in loaded.items() if isinstance(v, Tensor)}
    counts = {lengths[name] for name in state.names if name in lengths}
    anew = "build a new optimizer, attach it, and load the original's state_dict()"
    if every in counts:
        state.check(loaded)
    elif counts:
        raise ValueError(
            f"{kind} has the state of {max(counts)} rows of {rows.name}, which has {every}: {anew}"
        )
    else:
        for name, first in probe.scalar_state.items():
            if name in loaded and not agree(first, loaded[name]):
                raise ValueError(
                    f"{kind} has stepped {rows.name} with the state of a few rows only, or is a"
                    f" copy of an attached optimizer: {anew}"
                )
        for name in lengths.keys() - {*probe.row_state, *probe.scalar_state}:
            if lengths[name] == every and loaded[name].dim():
                raise ValueError(
                    f"{kind} cannot be used: it was built with a state {name!r} of all rows of"
                    f" {rows.name}, and makes none for those of a step"
                )
    if was_read := rows.attach(state, _fields_of(probe)):
        state.check_kept()
    state.take(loaded if every in counts else None, was_read=was_read)


def _fields_of(probe: OptimizerProbe) -> Fields:
    return {name: (row.shape, row.dtype) for name, row in probe.row_state.items()}


def _share_caches(states: Mapping[TrainedRows, Fields | None]) -> None:
    """Divides the bytes of caches for rows with these fields of state, or None for those of now.

    Raises ValueError if the bytes are too few.
    """
    changed: dict[CacheBudget, dict[CachedRows, Need]] = {}
    for rows, state in states.items():
        if rows.budget is not None:
            changed.setdefault(rows.budget, {})[rows] = rows.cache_need(state)
    for budget, needs in changed.items():
        budget.check(needs)
    for budget, needs in changed.items():
        budget.share(needs)


def _is_constant(value: object) -> bool:
    return isinstance(value, SparseRows) and value.content.is_constant


def saved_state_of(optimizer: Optimizer) -> SavedState | None:
    """How an attached optimizer saves and loads the state of rows; None if it is not attached."""
    return _attached.get(optimizer)


def detach(optimizer: Optimizer) -> None:
    """Undoes attach, or raises ValueError: rows go to the table, and their state is forgotten.

    Example:
        >>> import speedtorch, torch
        >>> embedding = speedtorch.Embedding(10, 4)
        >>> optimizer = torch.optim.Adam(embedding.parameters())
        >>> speedtorch.attach(optimizer, embedding)
        >>> speedtorch.detach(optimizer)
        >>> optimizer.state_dict()["state"]
        {}
    """
    with as_plain():
        within = stepped_by(optimizer)
        attached = [each for each in within if each in _attached]
        if not attached:
            raise ValueError(
                f"{type(within[0]).__name__} is not attached: give detach() the optimizer that"
                " attach() was given"
            )
        for each in attached:
            _detach(each, list(_attached[each].states))
        show_held_rows(optimizer)


def _detach(optimizer: Optimizer, states: list[AttachedState]) -> None:
    if not states:
        return
    saved = _attached[optimizer]
    for state in reversed(states):
        rows = state.table_rows
        rows.detach()
        optimizer.state.pop(rows.weight, None)
        saved.states.remove(state)
    if not saved.states:
        saved.remove(optimizer)
        del _attached[optimizer]

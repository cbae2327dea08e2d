"""attach: stores an optimizer's per-row state in host memory, beside the rows of the tables."""

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
from speedtorch.step.trained_rows import TrainedRows, rows_of_optimizer
from speedtorch.torch_internals import as_plain

__all__ = ["attach", "detach", "saved_state_of"]

_attached: weakref.WeakKeyDictionary[Optimizer, SavedState] = weakref.WeakKeyDictionary()


def attach(optimizer: Optimizer, module: nn.Module) -> None:
    """Stores an optimizer's per-row state in the Embeddings' tables, beside the rows.

    If the optimizer is attached already, only tables that are not attached yet are attached, such
    as those of a later add_param_group(). The state of the other tables does not change.

    The optimizer's own step function then sees only the step's rows and their state. step(),
    schedulers and gradient scalers work as before, and state_dict() returns the state of all rows.
    Attach before the first use or loading, so that the table allocates its memory once. A later
    attach() copies the existing rows to a new table whose records have the state. A table that was
    passed in or shared without state, or is too large to copy, is not replaced: a second table has
    the state. If one table has both, state_dict() of the module and of the optimizer return
    contiguous copies. If a copy would take more than half of the free memory, they return a view of
    the records.

    load_state_dict() loads a whole state or nothing; torchrec's wrappers are an exception, see
    below. If an exception interrupts its copy of per-row state to the tables, the next use of the
    rows repeats this copy, and raises its errors.

    With torch.distributed.checkpoint, a process that has not stepped yet can load its state with
    get_state_dict(), load() and set_state_dict().

    A step changes the rows that were looked up, and all rows share one step count, as with
    torch.optim.SparseAdam. A momentum buffer starts as zeros. In torch's SGD the buffer starts as
    the first gradient; without dampening the results are the same.

    A probe steps copies of the optimizer, and raises ValueError for an optimizer that

    - does not treat rows separately, such as one that uses a norm or a factor of all rows;
    - keeps a value for all rows that depends on which rows were stepped;
    - starts a row's state from its first gradient, from its own value or at random;
    - keeps per-row state in lists or dicts, or another kind of state for many rows (8-bit
      optimizers);
    - wraps another optimizer, except for the wrappers below, or needs a closure.

    Args:
        optimizer: any torch optimizer that treats rows separately, also from another library or
            wrapped by accelerate, Lightning, Fabric or torchrec. Attach the outermost of torchrec's
            wrappers: its state_dict() then has all rows. An optimizer with its own load_state_dict
            still loads with that method, which may briefly copy the state of all rows to the
            parameter's device. torchrec's wrappers write a loaded state in place, so an exception
            can leave it partly loaded.
        module: an Embedding or EmbeddingBag, or a module that contains some. An Embedding is
            attached if the optimizer holds its weight.

    Raises:
        TypeError: `optimizer` is no torch optimizer, or `module` is no torch module.
        ValueError: the optimizer holds no Embedding's weight of the module, or is attached to all
            of them already; another optimizer is attached to one of them; the optimizer has a
            step count from earlier steps, but no state of all rows; the probe raises; the table is
            read-only; or the bytes of a cache are too few for one row with its state. Rows and
            optimizer state have not changed.
        NotImplementedError: the optimizer's class overrides a step() of a base class, and the step
            cannot be tried out.
        RuntimeError: a captured CUDA graph uses the rows, another module trains them now, or a step
            on a GPU exceeded the capacity.
        MemoryError: memory is too small for the state or for the probe (on a GPU
            torch.OutOfMemoryError). Rows and optimizer state have not changed.

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
            f"attach: expected an optimizer and a module, in this order, got {kinds}. Pass several"
            " modules as one nn.ModuleList([...])."
        )
    with as_plain():
        rows = {id(getattr(child, "trained_rows", None)) for child in module.modules()}
        within = stepped_by(optimizer)
        holding = [own for own in within if any(id(r) in rows for r in rows_of_optimizer(own))]
        added: dict[Optimizer, list[AttachedState]] = {}
        try:
            for inner in holding or within[:1]:  # without such an optimizer, _attach raises
                added[inner] = _attach(inner, module)
            if not any(added.values()):
                raise ValueError(
                    f"{type(within[0]).__name__} is attached already to every Embedding of"
                    f" {type(module).__name__}. Another attach() only adds tables that are not"
                    " attached yet. To start with new state, call detach() first."
                )
            show_all_rows(optimizer, {inner: _attached[inner] for inner in added})
        except BaseException:
            for inner, states in added.items():
                _detach(inner, states)
            if not any(inner in _attached for inner in within):
                show_held_rows(optimizer)
            raise


def _attach(optimizer: Optimizer, module: nn.Module) -> list[AttachedState]:
    """Attaches the tables of a module that are not attached yet, and returns their states."""
    kind = type(optimizer).__name__
    of_module = {
        id(getattr(child, "trained_rows", None)): getattr(child, "sparse", False)
        for child in module.modules()
    }
    found, probes, is_held = [], _Probes(optimizer), False
    for rows in rows_of_optimizer(optimizer):
        if id(rows) in of_module:
            is_held = True
            find_own_step(optimizer, rows)
            if (before := state_of(rows)) is not None:
                if before.optimizer() is optimizer:
                    continue
                raise ValueError(
                    f"{rows.name} is attached to another optimizer. Call"
                    " speedtorch.detach(optimizer) with that optimizer first."
                )
            probe = probes.of(rows, sparse=of_module[id(rows)])
            loaded = dict(optimizer.state.get(rows.weight, {}))
            found.append((rows, probe, loaded, rows.table.was_read))
    if not is_held:
        raise ValueError(
            f"{kind} holds no weight of an Embedding in {type(module).__name__}. Build it with"
            " module.parameters(), and attach the module that contains the speedtorch.Embedding or"
            " EmbeddingBag."
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
        # The loop above may have ended within any table. Tables without state were not changed.
        for rows, _, loaded, was_read in found:
            if rows.state is not None:
                rows.detach(was_read=was_read)
                optimizer.state.pop(rows.weight, None)
                if loaded:
                    optimizer.state[rows.weight] = loaded
        _share_caches({rows: None for rows, *_ in found})  # the tables have their old fields again
        raise
    return added


class _Probes:
    """Probes of one optimizer's per-row state.

    Parameters share a probe if their group, row shape, dtype, device, `sparse` and present state
    are equal. Optimizers of other libraries are probed for each parameter.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        kind = type(optimizer)
        self._treats_alike = kind is RowWiseAdagrad or kind.__module__.startswith("torch.optim.")
        self._known: dict[tuple[Any, ...], list[tuple[dict[str, Any], OptimizerProbe]]] = {}

    def of(self, rows: TrainedRows, *, sparse: bool) -> OptimizerProbe:
        """Returns the probe for rows; `sparse` if the module makes sparse gradients."""
        parameter = rows.weight
        state = dict(self._optimizer.state.get(parameter, {}))
        group = id(group_of(self._optimizer, parameter))
        kind = (group, parameter.shape[1:], parameter.dtype, parameter.device, sparse)
        known = self._known.setdefault(kind, [])
        if self._treats_alike:
            for known_state, probe in known:
                if state.keys() == known_state.keys() and agree(state, known_state):
                    return probe
        known.append((state, _probed(self._optimizer, rows, sparse=sparse)))
        return known[-1][1]


def _probed(optimizer: Optimizer, rows: TrainedRows, *, sparse: bool) -> OptimizerProbe:
    """Probes the rows; if `sparse`, with sparse gradients if these lead to other per-row state."""
    probe = probe_optimizer(optimizer, rows.weight)
    if sparse and not probe.sparse:
        with suppress(ValueError):  # the probe may not support this sparse step
            with_sparse = probe_optimizer(optimizer, rows.weight, sparse=True)
            if with_sparse.row_state.keys() != probe.row_state.keys():
                return with_sparse
    return probe


def _attach_rows(state: AttachedState, kind: str, loaded: dict[str, Any]) -> None:
    """Adds the state to the table's records and fills it with the optimizer's present state.

    State of all rows, from an earlier load_state_dict(), is loaded. Without per-row state the rows
    begin with the state before the first update. Raises ValueError if the optimizer has state from
    earlier steps, but no state of all rows, or if check() does.
    """
    rows, probe = state.table_rows, state.probe
    row_count = rows.table.whole_rows
    # A constant is the constructor's torch.full_like(weight, number), which the probe has, too.
    loaded = {n: v for n, v in loaded.items() if n not in state.names or not _is_constant(v)}
    lengths = {n: len(v) if v.dim() else 1 for n, v in loaded.items() if isinstance(v, Tensor)}
    counts = {lengths[name] for name in state.names if name in lengths}
    anew = "Build a new optimizer, attach it, and load a complete state_dict()."
    if row_count in counts:
        state.check(loaded)
    elif counts:
        raise ValueError(
            f"{kind} has state of {max(counts)} rows, but {rows.name} has {row_count} rows. Build a"
            f" new optimizer and attach it. Then load a state of {row_count} rows, if there is one."
        )
    else:
        for name, first in probe.scalar_state.items():
            if name in loaded and not agree(first, loaded[name]):
                raise ValueError(
                    f"{kind} has the state {name!r} of {rows.name} from earlier steps, but no"
                    f" per-row state. {anew}"
                )
        for name in lengths.keys() - {*probe.row_state, *probe.scalar_state}:
            if lengths[name] == row_count and loaded[name].dim():
                raise ValueError(
                    f"{kind} cannot be used: its constructor makes the state {name!r} of all rows"
                    f" of {rows.name}, but its step does not make this state for other rows"
                )
    if was_read := rows.attach(state, _fields_of(probe)):
        state.check_kept()
    state.take(loaded if row_count in counts else None, was_read=was_read)


def _fields_of(probe: OptimizerProbe) -> Fields:
    return {name: (row.shape, row.dtype) for name, row in probe.row_state.items()}


def _share_caches(states: Mapping[TrainedRows, Fields | None]) -> None:
    """Divides the cache bytes anew for rows with these state fields; None: their present fields.

    Raises ValueError, before any change, if the bytes are too few.
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
    """Returns the object that saves and loads an attached optimizer's per-row state, or None."""
    return _attached.get(optimizer)


def detach(optimizer: Optimizer) -> None:
    """Undoes attach(): writes the rows back to their tables and discards their optimizer state.

    Raises:
        TypeError: `optimizer` is no torch optimizer.
        ValueError: the optimizer is not attached.
        RuntimeError: a captured CUDA graph uses the rows.

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
        attached = [inner for inner in within if inner in _attached]
        if not attached:
            raise ValueError(
                f"{type(within[0]).__name__} is not attached. Pass detach() the optimizer that was"
                " passed to attach()."
            )
        for inner in attached:
            _detach(inner, list(_attached[inner].states))
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

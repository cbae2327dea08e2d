"""attach: an optimizer's state of an Embedding's rows lives in the table, beside the rows."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from speedtorch.attached_state import AttachedState, attached_to
from speedtorch.optimizer_state import OptimizerProbe, probe_optimizer
from speedtorch.row_weight import as_plain
from speedtorch.trained_rows import TrainedRows

__all__ = ["attach", "detach"]

# The attached optimizers, and the hooks of their state_dict.
_attached: weakref.WeakKeyDictionary[Optimizer, list[AttachedState]] = weakref.WeakKeyDictionary()
_handles: weakref.WeakKeyDictionary[Optimizer, list[RemovableHandle]] = weakref.WeakKeyDictionary()


def attach(optimizer: Optimizer, module: nn.Module) -> None:
    """Makes an optimizer keep its state of Embeddings' rows in their tables, beside the rows.

    From here on the optimizer sees the rows of a step and their state, and nothing else changes:
    the same step(), schedulers, scalers and state_dict(), which holds the state of all rows. Attach
    before the first step and best before anything is loaded: the state becomes part of each row's
    record, and rows that are there already move to a new table.

    A step changes the rows that it has looked up, and there is one step count for all rows, as with
    torch.optim.SparseAdam. A momentum buffer starts as zeros (torch's SGD starts it as the first
    gradient, which is the same unless there is dampening). Other parameters of the optimizer are
    trained as ever.

    Args:
        optimizer: any torch optimizer that treats rows separately, also one that torch does not
            define; a probe finds out.
        module: an Embedding or EmbeddingBag, or a module that contains some; those are attached
            whose weight the optimizer holds.

    Raises:
        ValueError: the optimizer holds no Embedding's weight of the module, it or another is
            attached to it already, or it does not treat rows separately. Nothing has changed.
        MemoryError: there is no room for the state.

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
    if optimizer in _attached:
        raise ValueError(
            f"{type(optimizer).__name__} is attached already: detach it first, and attach it once"
            " to a module that has all of its Embeddings"
        )
    probed = []
    for rows in _rows_of(module):
        if not _holds(optimizer, rows.parameter):
            continue
        if attached_to(rows) is not None:
            raise ValueError(f"{rows.name} is attached to another optimizer: detach that first")
        probed.append((rows, probe_optimizer(optimizer, rows.parameter)))
    if not probed:
        raise ValueError(
            f"{type(optimizer).__name__} holds no weight of an Embedding in"
            f" {type(module).__name__}: build it with module.parameters() first, and attach the"
            " module that has a speedtorch.Embedding or EmbeddingBag"
        )
    states: list[AttachedState] = []
    before = [
        (rows, dict(optimizer.state.get(rows.parameter, {})), rows.store.was_read)
        for rows, _ in probed
    ]
    try:
        for rows, probe in probed:
            states.append(_attach_rows(optimizer, rows, probe))
    except BaseException:
        for rows, entries, was_read in before:
            if rows.state is not None:
                rows.detach()
                rows.store.was_read = was_read
                optimizer.state.pop(rows.parameter, None)
                if entries:
                    optimizer.state[rows.parameter] = entries
        raise
    _attached[optimizer] = states
    handles = [
        optimizer.register_state_dict_post_hook(_complete_state_dict),
        optimizer.register_load_state_dict_pre_hook(_take_state_dict),
    ]
    _handles[optimizer] = handles


def _attach_rows(optimizer: Optimizer, rows: TrainedRows, probe: OptimizerProbe) -> AttachedState:
    """Makes room for the state and puts there what it is so far."""
    state = AttachedState(optimizer, rows, probe)
    with as_plain():
        held = len(rows.parameter)
    # What load_state_dict put there before is the state of all rows; what the optimizer's
    # constructor put there is that of the held ones, before any update.
    loaded = dict(optimizer.state.get(rows.parameter, {}))
    found = [loaded[name] for name in state.names if isinstance(loaded.get(name), Tensor)]
    was_loaded = any(len(each) not in (0, held) for each in found) or (
        bool(found) and len(found[0]) == rows.store.rows
    )
    if was_loaded:
        state.check(loaded)
    elif any(
        _differ(loaded[name], first) for name, first in probe.scalar_state.items() if name in loaded
    ):
        raise ValueError(
            f"{type(optimizer).__name__} has stepped {rows.name} with the state of a few rows only:"
            " load a state_dict into a new optimizer and attach that"
        )
    fields = {name: (row.shape, row.dtype) for name, row in probe.row_state.items()}
    has_values = rows.attach(state, fields)
    if was_loaded or not has_values:
        state.take(loaded if was_loaded else None)
    state.has_stepped = was_loaded or has_values
    state.counts_anew = has_values and not was_loaded and bool(probe.scalar_state)
    return state


def detach(optimizer: Optimizer) -> None:
    """Undoes attach: the rows go back to the table, and the optimizer forgets their state.

    Args:
        optimizer: an attached one.

    Raises:
        ValueError: it is not attached.

    Example:
        >>> import speedtorch, torch
        >>> embedding = speedtorch.Embedding(10, 4)
        >>> optimizer = torch.optim.Adam(embedding.parameters())
        >>> speedtorch.attach(optimizer, embedding)
        >>> speedtorch.detach(optimizer)
        >>> optimizer.state_dict()["state"]
        {}
    """
    if optimizer not in _attached:
        raise ValueError(f"{type(optimizer).__name__} is not attached")
    for state in _attached[optimizer]:
        state.table_rows.detach()
        optimizer.state.pop(state.table_rows.parameter, None)
    del _attached[optimizer]
    for handle in _handles.pop(optimizer):
        handle.remove()


def _differ(value: Any, first: Any) -> bool:
    return bool((torch.as_tensor(value).cpu() != torch.as_tensor(first).cpu()).any())


def _rows_of(module: nn.Module) -> Iterator[TrainedRows]:
    for each in module.modules():
        rows = getattr(each, "trained_rows", None)
        if isinstance(rows, TrainedRows):
            yield rows


def _holds(optimizer: Optimizer, parameter: Tensor) -> bool:
    return any(held is parameter for group in optimizer.param_groups for held in group["params"])


# ------------------------------------------------------------------------------------------------
# Hooks of state_dict and load_state_dict


def _numbers(optimizer: Optimizer, groups: list[dict[str, Any]]) -> dict[int, Any]:
    """What a state dict calls each parameter, by the parameter's id()."""
    numbers: dict[int, Any] = {}
    for group, saved in zip(optimizer.param_groups, groups, strict=False):
        for parameter, number in zip(group["params"], saved["params"], strict=False):
            numbers[id(parameter)] = number
    return numbers


def _complete_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    numbers = _numbers(optimizer, state_dict["param_groups"])
    for state in _attached.get(optimizer, ()):
        number = numbers[id(state.table_rows.parameter)]
        entries = state.complete()
        if entries is None:
            state_dict["state"].pop(number, None)
        else:
            state_dict["state"][number] = entries


def _take_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Takes the rows' state out, so that torch does not copy that of all rows to the GPU."""
    states = _attached.get(optimizer, ())
    lengths = [len(group["params"]) for group in optimizer.param_groups]
    if lengths != [len(group["params"]) for group in state_dict["param_groups"]]:
        return state_dict  # torch says what is wrong, and nothing has changed
    numbers = _numbers(optimizer, state_dict["param_groups"])
    saved = [
        state_dict["state"].get(numbers.get(id(state.table_rows.parameter))) for state in states
    ]
    for state, entries in zip(states, saved, strict=True):
        if entries is not None:
            state.check(entries)
    rest = dict(state_dict["state"])
    for state, entries in zip(states, saved, strict=True):
        state.take(entries)
        if entries is not None:
            rest[numbers[id(state.table_rows.parameter)]] = {
                name: value for name, value in entries.items() if name not in state.names
            }
    return {**state_dict, "state": rest}

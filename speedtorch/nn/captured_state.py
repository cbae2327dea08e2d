"""CapturedState: the parameters and optimizer state whose memory a CUDA graph uses.

An optimizer's load_state_dict() puts new tensors into the optimizer. Before the next replay their
values are copied to the graph's tensors, and the graph's tensors replace them in the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedtorch.layers.state_tensors import state_tensors
from speedtorch.layers.storage_offloader import times_moved
from speedtorch.optim.attached_state import AttachedState
from speedtorch.optim.optimizer_copy import snapshot
from speedtorch.optim.probe import learn_state
from speedtorch.step.fixed_memory import FixedMemory
from speedtorch.step.row_weight import RowWeight
from speedtorch.step.trained_rows import TrainedRows
from speedtorch.torch_internals import as_plain

__all__ = ["CapturedState", "restored_afterwards"]

_Entries = dict[str, Any]


class _Captured(NamedTuple):
    """One optimizer's state and group dicts, and the graph's tensors in them at the capture."""

    state: Mapping[Tensor, _Entries]
    groups: list[_Entries]
    of_parameters: dict[Tensor, dict[str, Tensor]]
    of_groups: list[dict[str, Tensor]]

    def is_current(self, optimizer: Optimizer) -> bool:
        """Whether the dicts are those of the capture, and the groups have the graph's tensors."""
        state, groups = optimizer.state, optimizer.param_groups
        if state is not self.state or groups is not self.groups:
            return False
        return len(state) == len(self.of_parameters) and all(
            group.get(name) is tensor
            for group, own in zip(groups, self.of_groups, strict=False)
            for name, tensor in own.items()
        )


class CapturedState:
    """The parameters and optimizer state that a CUDA graph uses, except rows and their state.

    Args:
        modules, optimizers: The modules and optimizers of the captured step.
        tables: The tables whose rows the step trains.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        tables: Sequence[TrainedRows],
    ) -> None:
        self._modules = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        self._optimizers = optimizers
        self._tables = {id(rows.weight): rows for rows in tables}
        self._own = [self._captured(optimizer) for optimizer in optimizers]
        self._moved = times_moved()
        self._tensors = self._named()
        self._places = {name: tensor.data_ptr() for name, tensor in self._tensors.items()}

    def _named(self) -> dict[str, Tensor]:
        parts = state_tensors(self._modules, self._optimizers).parts
        tensors = {**parts["weights"], **parts["optimizer"]}
        return {name: tensor for name, tensor in tensors.items() if tensor.is_cuda}

    def _captured(self, optimizer: Optimizer) -> _Captured:
        own = {
            parameter: {n: v for n, v in of.items() if n not in self._names_of_rows(parameter)}
            for parameter, of in optimizer.state.items()
        }
        groups = optimizer.param_groups
        return _Captured(
            optimizer.state,
            groups,
            {parameter: _tensors_in(of) for parameter, of in own.items()},
            [_tensors_in(group) for group in groups],
        )

    def _names_of_rows(self, parameter: Tensor) -> tuple[str, ...]:
        """The names of the state that the exchange loads with the rows."""
        rows = self._tables.get(id(parameter))
        state = None if rows is None else rows.state
        return state.names if isinstance(state, AttachedState) else ()

    def before_replay(self) -> None:
        """Copies new optimizer state, such as loaded state, to the graph's tensors.

        Raises RuntimeError if shapes or the number of groups do not fit, or if a TrainingState has
        moved the graph's tensors. An optimizer that does not fit has not changed then.
        """
        for number, (optimizer, own) in enumerate(zip(self._optimizers, self._own, strict=True)):
            if not own.is_current(optimizer):
                self._take_over(optimizer, own)
                self._own[number] = self._captured(optimizer)
        if self._moved != times_moved():
            self._check_places()

    def _take_over(self, optimizer: Optimizer, own: _Captured) -> None:
        given = {
            param: {n: v for n, v in optimizer.state.get(param, {}).items() if v is not None}
            for param in own.of_parameters
        }
        groups = optimizer.param_groups
        if len(groups) != len(own.of_groups):
            raise RuntimeError(
                f"graphed: {type(optimizer).__name__} had {len(own.of_groups)} parameter groups at"
                f" the capture and has {len(groups)} now. Call graphed() again."
            )
        pairs = [(given[parameter], tensors) for parameter, tensors in own.of_parameters.items()]
        for now, tensors in (*pairs, *zip(groups, own.of_groups, strict=True)):
            _check_fits(optimizer, now, tensors)
        with torch.no_grad(), as_plain():
            for now, tensors in zip(groups, own.of_groups, strict=True):
                _fill(tensors, now)
                now.update(tensors)
            for parameter, tensors in own.of_parameters.items():
                _fill(tensors, _completed(optimizer, parameter, tensors, given[parameter]))
                optimizer.state[parameter] = {**given[parameter], **tensors}
        for rows in self._tables.values():
            if isinstance(state := rows.state, AttachedState) and state.optimizer() is optimizer:
                state.begin_replay()

    def _check_places(self) -> None:
        now = self._named()
        for name, address in self._places.items():
            if name not in now or now[name].data_ptr() != address:
                raise RuntimeError(
                    f"graphed: the memory address of {name} has changed since the capture, because"
                    " a TrainingState was put to sleep. Call its wake(). Without"
                    " keep_addresses=True, also call graphed() again."
                )
        self._moved = times_moved()


def _tensors_in(entries: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in entries.items() if isinstance(value, Tensor)}


def _check_fits(
    optimizer: Optimizer, now: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    for name, own in tensors.items():
        value = now.get(name, own)
        if not isinstance(value, Tensor) or value.shape != own.shape:
            shape = list(value.shape) if isinstance(value, Tensor) else repr(value)
            raise RuntimeError(
                f"graphed: {name!r} of {type(optimizer).__name__} was a tensor of the shape"
                f" {list(own.shape)} at the capture and is now {shape}. Call graphed() again."
            )


def _completed(
    optimizer: Optimizer,
    parameter: Tensor,
    names: Iterable[str],
    entries: _Entries,
    *,
    of_rows: bool = True,
) -> _Entries:
    """Returns state entries; missing names get the values before the first step.

    Without `of_rows`, only state of the whole parameter is added.
    """
    if all(name in entries for name in names):
        return entries
    learnt = learn_state(optimizer, parameter)
    return {**learnt.scalar_state, **(learnt.row_state if of_rows else {}), **entries}


def _fill(tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Copies values into the tensors with the same names."""
    for name, own in tensors.items():
        if isinstance(value := values.get(name), Tensor) and value is not own:
            own.copy_(value.expand_as(own))


@contextmanager
def restored_afterwards(
    modules: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    memories: Mapping[TrainedRows, FixedMemory],
) -> Iterator[None]:
    """Restores rows, parameters, buffers, optimizer state and torch's generators afterwards."""
    device = next(iter(memories.values())).held.device
    held = {id(rows.weight) for rows in memories}
    own = [p for module in modules for p in (*module.parameters(), *module.buffers())]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    own += [p for group in groups for p in group["params"]]
    tensors = {id(p): p for p in own if id(p) not in held}
    before = {key: (p, p.detach().clone()) for key, p in tensors.items()}
    states = [
        {p: {n: snapshot(v) for n, v in _own(of).items()} for p, of in optimizer.state.items()}
        for optimizer in optimizers
    ]
    random = torch.get_rng_state(), torch.cuda.get_rng_state(device)
    paused = ExitStack()
    try:
        with as_plain():
            for memory in memories.values():
                paused.enter_context(memory.paused())
        yield
    finally:
        with as_plain():
            paused.close()
        torch.set_rng_state(random[0])
        torch.cuda.set_rng_state(random[1], device)
        with torch.no_grad(), as_plain():
            for p, value in before.values():
                p.copy_(value)
            for optimizer, known in zip(optimizers, states, strict=True):
                _put_back(optimizer, known, held)


def _own(entries: _Entries) -> _Entries:
    """Returns the entries except those that are views of all rows of a table."""
    return {name: value for name, value in entries.items() if not isinstance(value, RowWeight)}


def _put_back(optimizer: Optimizer, known: dict[Tensor, _Entries], held: set[int]) -> None:
    """Copies earlier state into the current tensors, which a graph continues to use."""
    for parameter, state in optimizer.state.items():
        # State of the step's rows is not restored: the table has per-row state for each step.
        own = id(parameter) not in held
        known_of = known.get(parameter, {})
        before = _completed(optimizer, parameter, _own(state), known_of, of_rows=own)
        for name, value in _own(state).items():
            if isinstance(value, Tensor) and isinstance(before.get(name), Tensor):
                if own or value.shape == before[name].shape:
                    value.copy_(before[name].expand_as(value))
            elif name in before:
                state[name] = before[name]

"""SavedState: state_dict and load_state_dict of an attached optimizer, which are about all rows."""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from speedtorch.optim.attached_state import AttachedState

__all__ = ["SavedState"]


class SavedState:
    """Hooks of an optimizer's state_dict and load_state_dict, until they are removed.

    A class with a load_state_dict of its own, which may know other formats and no hooks, loads as
    it does; what it has loaded then goes into the tables.

    Args:
        optimizer: is attached from now on; its hooks keep this object.

    Raises:
        ValueError: its class has a state_dict of its own that torch's hooks cannot complete.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        _refuse_own_state_dict(optimizer)
        self.states: list[AttachedState] = []
        """What it keeps of each table's rows."""
        self._optimizer = weakref.ref(optimizer)
        self._handles: list[RemovableHandle] = [
            optimizer.register_state_dict_post_hook(self._complete)
        ]
        if type(optimizer).load_state_dict is Optimizer.load_state_dict:
            self._handles += [
                optimizer.register_load_state_dict_pre_hook(self._take),
            ]
        else:
            # torch copies and pickles an optimizer without such attributes, as without its hooks.
            optimizer.load_state_dict = self._load_own  # type: ignore[method-assign]

    def remove(self) -> None:
        """Makes state_dict and load_state_dict those of the class again."""
        for handle in self._handles:
            handle.remove()
        optimizer = self._optimizer()
        if optimizer is not None:
            vars(optimizer).pop("load_state_dict", None)

    def _complete(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        numbers = _numbers(optimizer, state_dict["param_groups"])
        for state in self.states:
            number = numbers[id(state.table_rows.parameter)]
            entries = state.complete()
            if entries is None:
                state_dict["state"].pop(number, None)
            else:
                state_dict["state"][number] = entries

    def _take(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Takes the rows' state out, so that torch does not copy that of all rows to the GPU."""
        lengths = [len(group["params"]) for group in optimizer.param_groups]
        if lengths != [len(group["params"]) for group in state_dict["param_groups"]]:
            return state_dict  # torch says what is wrong, and nothing has changed
        numbers = _numbers(optimizer, state_dict["param_groups"])
        saved = [
            state_dict["state"].get(numbers.get(id(state.table_rows.parameter)))
            for state in self.states
        ]
        for state, entries in zip(self.states, saved, strict=True):
            if entries is not None:
                state.check(entries)
        rest = dict(state_dict["state"])
        for state, entries in zip(self.states, saved, strict=True):
            state.take(entries)
            if entries is not None:
                rest[numbers[id(state.table_rows.parameter)]] = {
                    name: value for name, value in entries.items() if name not in state.names
                }
        return {**state_dict, "state": rest}

    def _load_own(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As the class's load_state_dict; nothing of the rows has changed if it raises."""
        optimizer = self._optimizer()
        assert optimizer is not None  # its own attribute is being called
        for state in self.states:
            state.table_rows.bring_home()
        before = optimizer.state, optimizer.param_groups
        try:
            type(optimizer).load_state_dict(optimizer, state_dict, *args, **kwargs)
            loaded = [dict(state.entries()) for state in self.states]
            for state, entries in zip(self.states, loaded, strict=True):
                if entries:
                    state.check(entries)
        except BaseException:
            optimizer.state, optimizer.param_groups = before
            raise
        for state, entries in zip(self.states, loaded, strict=True):
            state.take(entries or None)


def _refuse_own_state_dict(optimizer: Optimizer) -> None:
    if type(optimizer).state_dict is Optimizer.state_dict:
        return
    called: list[bool] = []
    handle = optimizer.register_state_dict_post_hook(lambda *_: called.append(True))
    try:
        optimizer.state_dict()
    finally:
        handle.remove()
    if not called:
        raise ValueError(
            f"{type(optimizer).__name__} cannot be used: its own state_dict does not call torch's"
            " hooks, so that it would save the state of a batch's rows for that of all"
        )


def _numbers(optimizer: Optimizer, groups: list[dict[str, Any]]) -> dict[int, Any]:
    """What a state dict calls each parameter, by the parameter's id()."""
    numbers: dict[int, Any] = {}
    for group, saved in zip(optimizer.param_groups, groups, strict=False):
        for parameter, number in zip(group["params"], saved["params"], strict=False):
            numbers[id(parameter)] = number
    return numbers

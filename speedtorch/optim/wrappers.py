"""Optimizers that wrap others: accelerate's, Lightning's, Fabric's and torchrec's.

The wrapped torch optimizer keeps the state. torchrec's wrappers read that state directly, by name,
so they see the state of all rows while they save or load.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any, NoReturn

from torch.optim import Optimizer

from speedtorch.optim.attached_state import SavedState

__all__ = [
    "given_optimizers",
    "is_wrapper",
    "optimizers_within",
    "show_all_rows",
    "show_held_rows",
    "stepped_by",
]

# These wrappers step the optimizer that they wrap, and add no update rule.
_WRAPPERS = {"AcceleratedOptimizer", "LightningOptimizer", "_FabricOptimizer"}
# torchrec's classes; subclasses count too.
_KEYED, _COMBINED = "KeyedOptimizer", "CombinedOptimizer"
_SHOWN = ("state_dict", "load_state_dict")


@lru_cache(maxsize=64)
def _kinds(kind: type) -> frozenset[str]:
    """Names of a class and its base classes."""
    return frozenset(base.__name__ for base in kind.__mro__)


def _within(optimizer: Any) -> list[Any]:
    """The optimizers that a wrapper steps; empty if the argument is no wrapper."""
    kinds = _kinds(optimizer.__class__)
    if kinds & _WRAPPERS:
        return [optimizer.optimizer]
    if _COMBINED in kinds:
        return [inner for _, inner in optimizer.optimizers]
    if _KEYED in kinds and "_optimizer" in vars(optimizer):
        return [optimizer._optimizer]
    return []


def is_wrapper(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step only calls the steps of other optimizers."""
    return bool(_within(optimizer))


def _tree(optimizer: Any) -> Iterator[Any]:
    """Yields an optimizer and all optimizers that it wraps, at any depth."""
    yield optimizer
    for inner in _within(optimizer):
        yield from _tree(inner)


def stepped_by(optimizer: Any) -> list[Optimizer]:
    """Returns the wrapped optimizers that keep state; TypeError if one is no torch optimizer."""
    found = [inner for inner in _tree(optimizer) if not _within(inner)]
    for inner in found:
        if not isinstance(inner, Optimizer):
            raise TypeError(
                f"expected a torch.optim.Optimizer, got {type(inner).__name__}. If it wraps an"
                " optimizer, pass the wrapped optimizer."
            )
    return found


def given_optimizers(optimizer: Any) -> tuple[Any, ...]:
    """Returns an argument of None, one optimizer or several as a tuple; wrappers are allowed."""
    if optimizer is None:
        return ()
    if isinstance(optimizer, Iterable) and not isinstance(optimizer, str):
        return tuple(optimizer)
    return (optimizer,)


def optimizers_within(given: Iterable[Any]) -> list[Optimizer]:
    """Returns the optimizers that keep state, unwrapped.

    Raises TypeError if an argument is no optimizer, ValueError for duplicates.
    """
    found = []
    for outer in given:
        if not isinstance(outer, Optimizer) and not is_wrapper(outer):
            raise TypeError(
                f"optimizer: expected a torch.optim.Optimizer, got {type(outer).__name__}"
            )
        found += stepped_by(outer)
    if len(set(map(id, found))) < len(found):
        raise ValueError("optimizer: one optimizer occurs twice. Pass each optimizer once.")
    return found


def show_all_rows(wrapper: Any, saved: Mapping[Optimizer, SavedState]) -> None:
    """Makes state_dict() and load_state_dict() of torchrec's wrappers use the state of all rows.

    As in torchrec, load_state_dict() writes into existing state, which init_state() or a step
    makes. An interrupted load may leave a part of the state loaded.
    """
    shown = _Shown(saved)
    for keyed in _keyed(wrapper):
        vars(keyed).update({name: partial(getattr(shown, name), keyed) for name in _SHOWN})


def show_held_rows(wrapper: Any) -> None:
    """Undoes show_all_rows()."""
    for keyed in _keyed(wrapper):
        for name in _SHOWN:
            vars(keyed).pop(name, None)


def _keyed(wrapper: Any) -> list[Any]:
    return [o for o in _tree(wrapper) if _within(o) and _KEYED in _kinds(o.__class__)]


class _Shown:
    """A wrapper's state_dict() and load_state_dict() with the state of all rows."""

    def __init__(self, saved: Mapping[Optimizer, SavedState]) -> None:
        self._saved = saved

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "torchrec's wrapper of an attached optimizer cannot be copied or pickled. Build another"
            " one, attach it, and load the state_dict()."
        )

    def state_dict(self, wrapper: Any) -> dict[str, Any]:
        """Like the wrapper's method, with the state of all rows."""
        shown = {kept: saved.shown(kept, to_write=False) for kept, saved in self._saved.items()}
        state: dict[str, Any] = type(wrapper).state_dict(_stand_in(wrapper, shown))
        return state

    def load_state_dict(self, wrapper: Any, state_dict: Mapping[str, Any]) -> None:
        """Like the wrapper's method, with the state of all rows, which the tables then adopt."""
        shown = {kept: saved.shown(kept, to_write=True) for kept, saved in self._saved.items()}
        type(wrapper).load_state_dict(_stand_in(wrapper, shown), state_dict)
        for kept, saved in self._saved.items():
            saved.was_written(shown[kept])


def _stand_in(wrapper: Any, shown: Mapping[Optimizer, Mapping[Any, Any]]) -> Any:
    """Copies a wrapper, with `shown` as the state of its optimizers."""
    own = {name: value for name, value in vars(wrapper).items() if name not in _SHOWN}
    if _COMBINED in _kinds(wrapper.__class__):
        own["_optims"] = [(name, _stand_in(inner, shown)) for name, inner in wrapper.optimizers]
    elif not (within := _within(wrapper)):
        return wrapper
    elif within[0] in shown:
        own["state"] = shown[within[0]]
    elif _KEYED in _kinds(within[0].__class__):
        own["_optimizer"] = _stand_in(within[0], shown)
        own["state"] = own["_optimizer"].state
    made = object.__new__(type(wrapper))
    vars(made).update(own)
    return made

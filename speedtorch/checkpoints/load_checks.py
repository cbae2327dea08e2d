"""Checks before a load whether each saved state fits its object, without any change."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from speedtorch.checkpoints.sharded_tensors import has_dtensors, has_shards
from speedtorch.nn.row_module import RowModule
from speedtorch.optim.attach import saved_state_of
from speedtorch.optim.attached_state import calls_load_hooks
from speedtorch.parallel.ranks import Ranks
from speedtorch.parallel.sharded_rows import ranks_of
from speedtorch.table.read_only_rows import ReadOnlyRows
from speedtorch.table.row_shard import RowShard
from speedtorch.table.whole_fields import state_dict_views
from speedtorch.torch_internals import as_plain, load_hooks, loads_by_own_code

__all__ = ["check_loads", "objects_of", "ranks_sharing"]

_UNCHANGED = "Nothing has been loaded."
_SHAPED_OTHERWISE = ("Adafactor", "LBFGS", "Muon")
"""Optimizers whose state tensors do not have the shapes of their parameters."""


def ranks_sharing(parts: Iterable[Any]) -> Ranks | None:
    """The ranks among which objects have sharded rows or DTensors; None if they have none.

    Raises NotImplementedError if objects are sharded among different ranks.
    """
    found: set[Ranks] = set()
    if not (dist.is_available() and dist.is_initialized()):
        return None
    for part in chain.from_iterable(map(objects_of, parts)):
        if has_dtensors(part) or has_shards(part):
            found.add(Ranks.of())
        if isinstance(part, nn.Module):
            rows = [getattr(module, "trained_rows", None) for module in part.modules()]
        elif isinstance(part, Optimizer) and (saved := saved_state_of(part)) is not None:
            rows = [state.table_rows for state in saved.states]
        else:
            continue
        found |= {ranks for own in rows if own is not None and (ranks := ranks_of(own)) is not None}
    members = {ranks.members for ranks in found}
    if len(members) > 1:
        raise NotImplementedError(
            f"the parts are sharded among different ranks: {sorted(map(sorted, members))}. Save and"
            " load each of them in a call of its own, with a folder of its own."
        )
    return min(found, key=lambda ranks: ranks.name, default=None)  # the same on all ranks


def objects_of(part: Any) -> Sequence[Any]:
    """The objects of a part, which is an object or a list of objects."""
    return part if isinstance(part, list | tuple) else [part]


def check_loads(name: str, part: Any, state: Any) -> bool:
    """Checks whether a state fits an object; False if only its load_state_dict() can check that.

    Raises:
        ValueError: The state has a different form, does not fit the optimizer, or would write to a
            table that is read-only.
        RuntimeError: The state does not fit the module.
    """
    is_known = isinstance(part, nn.Module | Optimizer)
    if not isinstance(state, Mapping) and (is_known or isinstance(part.state_dict(), Mapping)):
        raise ValueError(
            f"{name}: {type(part).__name__} loads a dict, but the value saved under this name is of"
            f" type {type(state).__name__}. Pass the object that was saved. {_UNCHANGED}"
        )
    if isinstance(part, nn.Module):
        return _check_module(name, part, state)
    return isinstance(part, Optimizer) and _check_optimizer(name, part, state)


def _check_module(name: str, module: nn.Module, state: Mapping[Any, Any]) -> bool:
    with as_plain(), torch.no_grad(), state_dict_views():
        own = module.state_dict()
    for key, value in own.items():
        if isinstance(value, ReadOnlyRows):
            raise ValueError(f"{name}: cannot load {key!r}: the table {value.remedy} {_UNCHANGED}")
    if not (wrong := [*_differences(module, own, state)]):
        # Tensors of other classes do their own checks when they load.
        known = (Tensor, nn.Parameter, RowShard)
        return all(type(value) in known for value in own.values() if isinstance(value, Tensor))
    if any(map(loads_by_own_code, module.modules())):
        return False
    more = f"; and {len(wrong) - 10} more" if len(wrong) > 10 else ""
    raise RuntimeError(
        f"{name}: the saved state does not fit {type(module).__name__}: {'; '.join(wrong[:10])}"
        f"{more}. {_UNCHANGED}"
    )


def _differences(
    module: nn.Module, own: Mapping[str, Any], state: Mapping[Any, Any]
) -> Iterator[str]:
    """Yields texts about missing or unexpected keys, other shapes, and values without a tensor."""
    owners = dict(module.named_modules(remove_duplicate=False))
    metadata: Mapping[str, Any] = getattr(state, "_metadata", {})

    def is_rounding(key: Any) -> bool:
        """Whether a module of rows has the key with 16-bit rows, and ignores it otherwise."""
        owner, _, name = str(key).rpartition(".")
        return name == "rounding_state" and isinstance(owners.get(owner), RowModule)

    def is_new_count(key: str) -> bool:
        """Whether a norm layer has the key since version 2, and the state is older."""
        owner, _, name = key.rpartition(".")
        is_of_norm = hasattr(owners.get(owner), "track_running_stats")
        is_old = (metadata.get(owner, {}).get("version") or 0) < 2
        return name == "num_batches_tracked" and is_of_norm and is_old

    for key in {**own, **state}:
        if key not in own:
            if not is_rounding(key):
                yield f"unexpected key {key!r}"
        elif key not in state:
            if not (is_rounding(key) or is_new_count(key)):
                yield f"missing key {key!r}"
        elif isinstance(value := own[key], Tensor) and not is_lazy(value):
            if not isinstance(given := state[key], Tensor):
                yield f"{key} was saved as a {type(given).__name__}, but the module has a tensor"
            elif given.shape != value.shape and (value.dim() or given.dim() != 1):
                yield (
                    f"size mismatch for {key}: {tuple(given.shape)} was saved, but the module has"
                    f" {tuple(value.shape)}"
                )


def _check_optimizer(name: str, optimizer: Optimizer, state: Mapping[Any, Any]) -> bool:
    saved = saved_state_of(optimizer)
    foreign_hooks = load_hooks(optimizer) - (saved is not None)
    if not calls_load_hooks(optimizer) or foreign_hooks:
        return False
    try:
        groups, entries = state["param_groups"], state["state"]
        sizes = [len(group["params"]) for group in groups]
        own = [len(group["params"]) for group in optimizer.param_groups]
        if sizes != own:
            raise ValueError(f"groups of {sizes} parameters were saved, expected {own}")
        if not all(isinstance(entry, Mapping) for entry in entries.values()):
            raise TypeError("the state of a parameter is not a dict")
        if saved is not None:
            saved.check_loads(optimizer, state)
        if type(optimizer).__module__.startswith("torch.optim."):
            _try(optimizer, groups, entries)
    except Exception as error:
        no_key = f"the saved state has no {error}" if isinstance(error, KeyError) else ""
        text = no_key or re.sub(r"(\W+nothing was loaded)?\.?$", "", str(error), flags=re.I)
        raise ValueError(
            f"{name}: the saved state does not fit {type(optimizer).__name__}: {text}. {_UNCHANGED}"
        ) from error
    return True


def _try(optimizer: Optimizer, groups: Any, entries: Mapping[Any, Any]) -> None:
    """Loads a state with empty tensors into a shallow copy of the optimizer.

    Also raises ValueError if state and parameters differ in shape, or a group lacks an option of
    the optimizer, which torch does not check.
    """
    is_shaped_alike = type(optimizer).__name__ not in _SHAPED_OTHERWISE
    parameters = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in groups for number in group["params"]]
    for parameter, number in zip(parameters, numbers, strict=True):
        for key, value in entries.get(number, {}).items():
            is_tensor = isinstance(value, Tensor) and value.dim() > 0
            if is_tensor and value.shape != parameter.shape and is_shaped_alike:
                raise ValueError(
                    f"the state {key!r} of parameter {number} has the shape {tuple(value.shape)},"
                    f" but the parameter has {tuple(parameter.shape)}"
                )
    made = object.__new__(type(optimizer))
    hooks = {name: OrderedDict[Any, Any]() for name in vars(optimizer) if "_hooks" in name}
    vars(made).update(vars(optimizer) | hooks)
    vars(made).pop("load_state_dict", None)

    def without_elements(value: Any) -> Any:
        """Replaces a tensor by an empty one; scalars and other values remain."""
        is_array = isinstance(value, Tensor) and value.dim() > 0
        return torch.empty(0, dtype=value.dtype, device="cpu") if is_array else value

    empty = {
        number: {key: without_elements(value) for key, value in entry.items()}
        for number, entry in entries.items()
    }
    made.load_state_dict({"state": empty, "param_groups": groups})
    # __setstate__() adds options that older versions of torch lack.
    for own, loaded in zip(optimizer.param_groups, made.param_groups, strict=True):
        if missing := [name for name in own if name in optimizer.defaults and name not in loaded]:
            raise ValueError(f"the options {missing} of a parameter group were not saved")

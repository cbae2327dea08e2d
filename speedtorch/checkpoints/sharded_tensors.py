"""DTensors (of FSDP2): saved as rows that are sharded among ranks, loaded from whole tensors."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from speedtorch.table.row_shard import RowShard
from speedtorch.table.whole_fields import state_dict_views
from speedtorch.torch_internals import as_plain, tree_leaves

__all__ = ["fill_shards", "has_dtensors", "is_dtensor", "rows_of_dtensor"]


def is_dtensor(value: object) -> bool:
    """Whether a value is a DTensor, without importing that class, which takes half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def has_dtensors(part: Any) -> bool:
    """Whether any tensor of a module, or parameter of an optimizer, is a DTensor."""
    if isinstance(part, nn.Module):
        return any(map(is_dtensor, [*part.parameters(), *part.buffers()]))
    return isinstance(part, Optimizer) and any(map(is_dtensor, _parameters(part)))


def has_shards(value: Any) -> bool:
    """Whether any tensor of a value, such as a state_dict(), is sharded among ranks."""
    return any(isinstance(leaf, RowShard) or is_dtensor(leaf) for leaf in tree_leaves(value))


def rows_of_dtensor(name: str, tensor: Any) -> RowShard:
    """The rows of all ranks; this rank saves its shard if it is the first replica of the shard.

    Raises TypeError unless the rows are sharded by Shard(0) on a mesh of all ranks.
    """
    rows, is_first = _shard(name, tensor)
    local = tensor.to_local().detach().contiguous()
    blocks = [(rows, range(len(rows)))] if rows and is_first else []
    return RowShard(len(tensor), local, blocks)


def fill_shards(name: str, part: Any, state: Any) -> None:
    """Replaces whole tensors of a state by this rank's shards if the object has DTensors there."""
    if not has_dtensors(part):
        return
    if isinstance(part, nn.Module):
        with as_plain(), torch.no_grad(), state_dict_views():
            every = part.state_dict()
        for key, own in every.items():
            if is_dtensor(own) and own.shape == getattr(state.get(key), "shape", None):
                state[key] = _like(f"{name}[{key!r}]", own, state[key])
    else:
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        for param, number in zip(_parameters(part), numbers, strict=True):
            entry = state["state"].get(number, {}) if is_dtensor(param) else {}
            for key, value in entry.items():
                if not isinstance(value, Tensor) or value.dim() == 0:
                    continue
                what = f"{name}: the state {key!r} of parameter {number}"
                if value.shape != param.shape:
                    raise ValueError(
                        f"{what} has the shape {tuple(value.shape)}, but the DTensor"
                        f" has {tuple(param.shape)}. Nothing has been loaded."
                    )
                entry[key] = _like(what, param, value)


def _parameters(optimizer: Optimizer) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _like(name: str, own: Any, whole: Tensor) -> Tensor:
    rows, _ = _shard(name, own)
    made: Tensor = type(own).from_local(
        whole[rows.start : rows.stop].clone(),
        own.device_mesh,
        own.placements,
        run_check=False,
        shape=own.shape,
        stride=own.stride(),
    )
    return made


def _shard(name: str, tensor: Any) -> tuple[range, bool]:
    """This rank's rows of a DTensor, and whether this rank is their first replica."""
    mesh, placements = tensor.device_mesh, tensor.placements
    sharding = {dim: kind for dim, kind in enumerate(placements) if not kind.is_replicate()}
    kinds = [(type(kind).__name__, getattr(kind, "dim", None)) for kind in sharding.values()]
    if kinds == [("Shard", 0)] and mesh.size() == dist.get_world_size():
        (at,) = sharding
        count = -(-len(tensor) // mesh.size(at))  # like torch.chunk
        begin = min(mesh.get_local_rank(at) * count, len(tensor))
        rows = range(begin, min(begin + count, len(tensor)))
        replicas = [mesh.get_local_rank(dim) for dim in range(mesh.ndim) if dim != at]
        if len(tensor.to_local()) == len(rows):
            return rows, not any(replicas)
    raise TypeError(
        f"{name}: a DTensor must be sharded by Shard(0) on all {dist.get_world_size()} ranks, got"
        f" the placements {placements} on {mesh.size()} ranks. Use torch.distributed.checkpoint, or"
        " save and load its full_tensor()."
    )

"""Arguments that Embedding and EmbeddingBag take, and how they are told again."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from speedtorch.batch_ids import check_ids
from speedtorch.compiling import not_compiled
from speedtorch.table import HostTable

__all__ = [
    "Device",
    "Rows",
    "Source",
    "check_bags",
    "check_module",
    "described",
    "not_compiled",
    "opened",
]

Rows = Tensor | HostTable
Source = Rows | str | os.PathLike[str]
Device = str | int | torch.device | None


def opened(embeddings: Source, device: Device, memory: str) -> tuple[Rows, tuple[int, int], Device]:
    """The rows, how many of how many columns, and where lookups give them."""
    if isinstance(embeddings, str | os.PathLike):
        embeddings = HostTable.open(embeddings, memory)
    if isinstance(embeddings, HostTable):
        shape = (embeddings.rows, *embeddings.fields["weight"][0])
    elif not isinstance(embeddings, Tensor):
        raise TypeError(
            "embeddings: expected a tensor, a HostTable or the path of a saved one, got"
            f" {type(embeddings).__name__}"
        )
    else:
        shape = tuple(embeddings.shape)
        device = embeddings.device if device is None else device
    if len(shape) != 2:
        raise ValueError(f"embeddings: expected [rows, columns], got the shape {list(shape)}")
    return embeddings, (shape[0], shape[1]), device


def check_module(module: object, kind: type[nn.Module]) -> None:
    """Raises TypeError unless a module is of a kind of torch's."""
    if not isinstance(module, kind) or hasattr(module, "trained_rows"):
        given = type(module)
        raise TypeError(
            f"module: expected a torch.nn.{kind.__name__}, got {given.__module__}.{given.__name__}"
        )


def check_bags(module: Any, ids: Tensor, offsets: object, weights: object) -> None:
    """Raises what torch's EmbeddingBag would, before a row moves."""
    name = type(module).__name__
    if ids.dim() not in (1, 2):
        raise ValueError(f"{name}: input must be [ids] or [bags, ids], got {list(ids.shape)}")
    if ids.dim() == 2 and offsets is not None:
        raise ValueError(f"{name}: rows of a 2-D input are the bags: offsets must be None")
    if ids.dim() == 1:
        check_ids(f"{name}: offsets", offsets)
        assert isinstance(offsets, Tensor)
        least = int(module.include_last_offset)
        if offsets.dim() != 1 or len(offsets) < least:
            raise ValueError(
                f"{name}: offsets must be [bags{' + 1' * least}], got {list(offsets.shape)}"
            )
        # Those on a GPU are not waited for.
        if offsets.is_cpu and len(offsets) > 0 and (offsets[0] != 0 or offsets[-1] > len(ids)):
            raise ValueError(
                f"{name}: offsets must begin with 0 and end within the {len(ids)} ids, got"
                f" {int(offsets[0])} to {int(offsets[-1])}"
            )
    if weights is not None:
        if not isinstance(weights, Tensor) or weights.dtype != module.weight.dtype:
            given = weights.dtype if isinstance(weights, Tensor) else type(weights).__name__
            raise TypeError(
                f"{name}: per_sample_weights must be a tensor of {module.weight.dtype}, got {given}"
            )
        if weights.shape != ids.shape or module.mode != "sum":
            raise ValueError(
                f"{name}: per_sample_weights go with mode='sum' and have input's shape"
                f" {list(ids.shape)}; got {list(weights.shape)} with mode={module.mode!r}"
            )


def described(module: nn.Module, **defaults: Any) -> str:
    """A module's arguments, as far as they differ from their defaults."""
    said = [f"{module.num_embeddings}, {module.embedding_dim}"]
    for name, default in defaults.items():
        value = getattr(module, name)
        if value != default:
            said.append(f"{name}={value!r}")
    return ", ".join(said)

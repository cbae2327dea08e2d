"""Arguments that Embedding and EmbeddingBag take, and how they are told again."""

from __future__ import annotations

import os
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from speedtorch.ops.compiling import not_compiled
from speedtorch.table.host_table import HostTable

__all__ = [
    "Device",
    "Rows",
    "Source",
    "check_bags",
    "check_device",
    "check_module",
    "check_values",
    "check_way",
    "described",
    "not_compiled",
    "opened",
    "refuse_graph",
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
        check_values("embeddings", embeddings)
        shape = tuple(embeddings.shape)
        device = embeddings.device if device is None else device
    if len(shape) != 2:
        raise ValueError(f"embeddings: expected [rows, columns], got the shape {list(shape)}")
    return embeddings, (shape[0], shape[1]), device


def check_values(argument: str, values: Tensor) -> None:
    """Raises ValueError for a tensor that has no dense elements to copy."""
    if values.is_nested or values.layout != torch.strided:
        kind = "a nested" if values.is_nested else f"a {values.layout}"
        raise ValueError(f"{argument}: expected a dense tensor, got {kind} one; use to_dense()")
    if values.is_quantized:
        raise ValueError(
            f"{argument}: expected plain numbers, got {values.dtype}; use dequantize()"
        )
    if values.is_meta:
        raise ValueError(f"{argument}: a tensor on the device meta has no values to copy")


def check_device(name: str, device: Device) -> None:
    """Raises NotImplementedError unless lookups can give their rows on a device."""
    place = torch.get_default_device() if device is None else torch.device(device)
    if place.type not in ("cpu", "cuda"):
        raise NotImplementedError(
            f"{name}: rows are held on the CPU or a GPU, not {place}: make it with"
            " device='cpu' or 'cuda', whatever the other layers' is; its table takes no memory"
            " before its first use"
        )


def check_way(name: str, ids: object, trains: bool) -> None:
    """Raises NotImplementedError where torch would keep a lookup as a graph, or transform it.

    Args:
        name: of the module.
        ids: what it was given.
        trains: whether the lookup holds rows for a step.
    """
    if torch._C._is_tracing() or torch.compiler.is_exporting():
        refuse_graph(name)
    inside = torch._C._functorch.is_batchedtensor
    if torch._C._are_functorch_transforms_active() and (
        trains or (isinstance(ids, Tensor) and inside(ids))
    ):
        raise NotImplementedError(
            f"{name}: torch.func's transforms (vmap, grad, jvp) cannot go through a lookup; look"
            " the rows up before, and give the function emb(ids)"
        )


def refuse_graph(name: str) -> NoReturn:
    """Raises NotImplementedError: a lookup cannot be kept as a graph."""
    raise NotImplementedError(
        f"{name}: torch.export, torch.jit and ONNX cannot keep a lookup, as its table is in host"
        " memory; export what follows it, given the rows emb(ids), or a torch.nn module that has"
        " loaded its state_dict()"
    )


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
        _check_offsets(name, len(ids), offsets, int(module.include_last_offset))
    if weights is not None:
        _check_weights(name, ids.shape, weights, module)


def _check_offsets(name: str, ids: int, offsets: object, last: int) -> None:
    if offsets is None:
        raise ValueError(f"{name}: a 1-D input needs offsets [bags], got None")
    if not isinstance(offsets, Tensor):
        raise TypeError(f"{name}: offsets: expected a tensor, got {type(offsets).__name__}")
    if offsets.dtype.is_floating_point or offsets.is_complex() or offsets.layout != torch.strided:
        raise RuntimeError(
            f"{name}: offsets: expected a dense tensor of integers, got {offsets.dtype} of shape"
            f" {list(offsets.shape)}"
        )
    if offsets.dim() != 1:
        raise ValueError(
            f"{name}: offsets must be [bags{' + 1' * last}], got {list(offsets.shape)}"
        )
    if len(offsets) < last or (ids and len(offsets) == 0):
        raise RuntimeError(f"{name}: offsets must be [bags{' + 1' * last}] for {ids} ids, got none")
    # Those on a GPU are not waited for.
    if offsets.is_cpu and len(offsets) > 0 and (offsets[0] != 0 or offsets[-1] > ids):
        raise RuntimeError(
            f"{name}: offsets must begin with 0 and end within the {ids} ids, got"
            f" {int(offsets[0])} to {int(offsets[-1])}"
        )


def _check_weights(name: str, shape: torch.Size, weights: object, module: Any) -> None:
    if not isinstance(weights, Tensor):
        raise TypeError(
            f"{name}: per_sample_weights: expected a tensor, got {type(weights).__name__}"
        )
    if weights.shape != shape:
        raise ValueError(
            f"{name}: per_sample_weights must have input's shape {list(shape)}, got"
            f" {list(weights.shape)}"
        )
    if module.mode != "sum":
        raise NotImplementedError(
            f"{name}: per_sample_weights go with mode='sum', not mode={module.mode!r}"
        )
    if weights.dtype != module.weight.dtype:
        raise RuntimeError(
            f"{name}: per_sample_weights must be a tensor of {module.weight.dtype}, got"
            f" {weights.dtype}"
        )


def described(module: nn.Module, **defaults: Any) -> str:
    """A module's arguments, as far as they differ from their defaults."""
    said = [f"{module.num_embeddings}, {module.embedding_dim}"]
    for name, default in defaults.items():
        value = getattr(module, name)
        if value != default:
            said.append(f"{name}={value!r}")
    return ", ".join(said)

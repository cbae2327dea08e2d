"""same_modules: checks that all ranks have the same modules with the same settings."""

from __future__ import annotations

import zlib
from itertools import zip_longest

import torch
from torch import nn

from speedtorch.nn.row_module import RowModule
from speedtorch.parallel.collectives import run_on_all
from speedtorch.parallel.ranks import Ranks

__all__ = ["same_modules"]

_VALUES = "init_"
"""The key of a digest of initial values, which shows whether init functions differ."""
_Settings = dict[str, str]
"""A module's settings as text."""


def same_modules(ranks: Ranks, model: nn.Module, *, average: bool) -> dict[str, RowModule]:
    """The modules of a model whose rows can be sharded, by their qualified names.

    Raises on all ranks if a rank has an error: its own error there, ValueError on other ranks.
    Raises ValueError on all ranks if two ranks differ.
    """
    named: dict[str, RowModule] = {}

    def settings() -> list[tuple[str, _Settings]]:
        """Returns the names and settings of this rank's modules."""
        named.update(_modules_of(model))
        return [(name, _settings_of(module, average=average)) for name, module in named.items()]

    def error_of(text: str) -> ValueError:
        """Returns the error to raise if another rank has failed."""
        return ValueError(f"{text} (nothing has changed on any rank)")

    of_ranks = run_on_all(ranks, settings, "shard", error_of)
    for rank, modules in enumerate(of_ranks):
        _compare(of_ranks[0], modules, rank)
    return named


def _modules_of(model: nn.Module) -> dict[str, RowModule]:
    """The modules to shard; raises if there are none, or if some cannot be sharded."""
    named = {
        name or type(module).__name__: module
        for name, module in model.named_modules()
        if isinstance(module, RowModule)
    }
    if not named:
        raise ValueError(
            f"{type(model).__name__} has no speedtorch.Embedding, EmbeddingBag or collection to"
            " shard. Pass a model with such a module."
        )
    for module in named.values():
        name = module.trained_rows.name
        if getattr(module, "scale_grad_by_freq", False):
            raise NotImplementedError(
                f"{name}: sharded rows do not support scale_grad_by_freq, which needs the counts"
                " of all ranks. Scale the gradient of the lookup's result instead."
            )
        limits = (module.padding_idx, getattr(module, "max_norm", None), module.capacity)
        if None not in limits:
            raise NotImplementedError(
                f"{name}: rows with padding_idx, max_norm and capacity together cannot be sharded,"
                " because max_norm would change the row of padding_idx. Omit one of the three."
            )
        module.check_shardable()
    return named


def _settings_of(module: RowModule, *, average: bool) -> _Settings:
    """The settings that must be the same on all ranks."""
    table, weight = module.trained_rows.table, module.weight
    settings = {
        "class": type(module).__name__,
        "num_embeddings": module.num_embeddings,
        "embedding_dim": module.embedding_dim,
        "dtype": table.stored_dtype,
        "device": weight.device.type,
        "padding_idx": module.padding_idx,
        "capacity": module.capacity,
        **module.settings,
        "weight.requires_grad": weight.requires_grad,
        "average": average,
        _VALUES: [
            f"values of digest {zlib.crc32(values.view(torch.uint8).numpy().tobytes()):08x}"
            for values in table.new.samples()
        ],
    }
    return {name: str(value) for name, value in settings.items()}


def _compare(
    first: list[tuple[str, _Settings]], of_rank: list[tuple[str, _Settings]], rank: int
) -> None:
    """Raises ValueError if the modules of a rank or their settings differ from the first rank's."""
    remedy = (
        "Build the same model, and pass the same arguments, on all ranks. Nothing has changed on"
        " any rank."
    )
    for ours, theirs in zip_longest(first, of_rank):
        if ours is None or theirs is None or ours[0] != theirs[0]:
            module, of_first = (
                "no further module" if named is None else f"module {named[0]!r}"
                for named in (theirs, ours)
            )
            raise ValueError(
                f"shard: rank {rank} has {module}, but rank 0 has {of_first}. {remedy}"
            )
        name, settings = ours
        differing = [key for key in settings | theirs[1] if settings.get(key) != theirs[1].get(key)]
        if len(differing) > 1 and _VALUES in differing:
            differing.remove(_VALUES)  # the other settings cause this difference
        if differing:
            text, of_first = (
                ", ".join(f"{key}={values.get(key)}" for key in differing)
                for values in (theirs[1], settings)
            )
            raise ValueError(
                f"shard: {name!r} has {text} on rank {rank}, but {of_first} on rank 0. {remedy}"
            )

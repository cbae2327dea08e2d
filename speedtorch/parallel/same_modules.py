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

    Raises on all ranks if one rank is wrong: its own error there, and ValueError on the others.
    Raises ValueError on all ranks if two ranks differ.
    """
    named: dict[str, RowModule] = {}

    def settings() -> list[tuple[str, _Settings]]:
        named.update(_modules_of(model))
        return [(name, _settings_of(each, average=average)) for name, each in named.items()]

    def error_of(text: str) -> Exception:
        return ValueError(f"{text}; nothing has changed on any rank")

    every = run_on_all(ranks, settings, "shard", error_of)
    for rank, modules in enumerate(every):
        _refuse_if_differing(every[0], modules, rank)
    return named


def _modules_of(model: nn.Module) -> dict[str, RowModule]:
    """The modules to shard; raises if there are none, or if some cannot be sharded."""
    named = {
        name or type(each).__name__: each
        for name, each in model.named_modules()
        if isinstance(each, RowModule)
    }
    if not named:
        raise ValueError(f"{type(model).__name__} has no speedtorch.Embedding or EmbeddingBag")
    for module in named.values():
        name = module.trained_rows.name
        if getattr(module, "scale_grad_by_freq", False):
            raise NotImplementedError(
                f"{name}: scale_grad_by_freq would need the counts of all ranks; scale the"
                " gradient of the lookup's result"
            )
        limits = (module.padding_idx, getattr(module, "max_norm", None), module.capacity)
        if None not in limits:
            raise NotImplementedError(
                f"{name}: rows with a padding_idx, a max_norm and a capacity cannot be shared out,"
                " as the padding's row fills blocks and would be shortened; leave one of them out"
            )
        module.trained_rows.table.check_unused()
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
            f"values of digest {zlib.crc32(each.view(torch.uint8).numpy().tobytes()):08x}"
            for each in table.new.samples()
        ],
    }
    return {name: str(value) for name, value in settings.items()}


def _refuse_if_differing(
    first: list[tuple[str, _Settings]], others: list[tuple[str, _Settings]], rank: int
) -> None:
    """Raises ValueError if the modules of a rank or their settings differ from the first rank's."""
    remedy = "build the same model on all ranks; nothing has changed on any rank"
    for ours, theirs in zip_longest(first, others):
        if ours is None or theirs is None or ours[0] != theirs[0]:
            has, of_first = (
                "no further module" if e is None else repr(e[0]) for e in (theirs, ours)
            )
            raise ValueError(f"shard: rank {rank} has {has} where rank 0 has {of_first}; {remedy}")
        name, settings = ours
        differing = [key for key in settings | theirs[1] if settings.get(key) != theirs[1].get(key)]
        if len(differing) > 1 and _VALUES in differing:
            differing.remove(_VALUES)  # the other settings cause this difference
        if differing:
            said, of_first = (
                ", ".join(f"{key}={each.get(key)}" for key in differing)
                for each in (theirs[1], settings)
            )
            raise ValueError(
                f"shard: of {name!r} rank {rank} has {said} where rank 0 has {of_first}; {remedy}"
            )

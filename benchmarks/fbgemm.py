"""FBGEMM's table-batched embedding where it can be imported: lookup and optimizer in one."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from benchmarks.sizes import DEVICE

__all__ = ["PLACES", "places_of", "tables_of"]

_MANAGED, _ON_GPU = "managed memory", "all in GPU memory"
PLACES = (_MANAGED, f"{_MANAGED}, 20 % cache", _ON_GPU)


@cache
def _modules() -> tuple[Any, Any, Any] | None:
    package = "fbgemm_gpu"
    with suppress(ImportError, OSError):
        training = importlib.import_module(f"{package}.split_table_batched_embeddings_ops_training")
        common = importlib.import_module(f"{package}.split_table_batched_embeddings_ops_common")
        return training, common, importlib.import_module(f"{package}.split_embedding_configs")
    return None


def tables_of(
    sizes: Sequence[int], columns: int, optimizer: str, *, pooled: bool
) -> Iterator[tuple[str, Any]]:
    """A name and a module for each place of the rows; none where FBGEMM cannot be imported."""
    for place, _, module in places_of(sizes, columns, optimizer, pooled=pooled, shares=(0.2,)):
        yield f"FBGEMM, {optimizer}, {place}", module


def places_of(
    sizes: Sequence[int], columns: int, optimizer: str, *, pooled: bool, shares: Iterable[float]
) -> Iterator[tuple[str, float, Any]]:
    """The name of each place of the rows, the share of them that is cached, and a module.

    It is called with ids `[n]` and offsets `[tables * samples + 1]`; `optimizer`: "Adam", "SGD" or
    "row-wise Adagrad". None where FBGEMM cannot be imported.
    """
    if DEVICE == "cpu" or (modules := _modules()) is None:
        return
    training, common, configs = modules
    kinds = common.EmbeddingLocation
    steps = {
        "Adam": configs.EmbOptimType.ADAM,
        "SGD": configs.EmbOptimType.EXACT_SGD,
        "row-wise Adagrad": configs.EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    }
    pooling = common.PoolingMode.SUM if pooled else common.PoolingMode.NONE
    places = [(_MANAGED, kinds.MANAGED, 0.0)]
    places += [(f"{_MANAGED}, {each:.0%} cache", kinds.MANAGED_CACHING, each) for each in shares]
    for name, place, share in [*places, (_ON_GPU, kinds.DEVICE, 1.0)]:
        cached = {"cache_load_factor": share} if place == kinds.MANAGED_CACHING else {}
        specs = [(rows, columns, place, training.ComputeDevice.CUDA) for rows in sizes]
        module = training.SplitTableBatchedEmbeddingBagsCodegen(
            specs,
            optimizer=steps[optimizer],
            learning_rate=0.001,
            pooling_mode=pooling,
            bounds_check_mode=common.BoundsCheckMode.NONE,
            device=torch.device(DEVICE),
            **cached,
        )
        yield name.replace("%", " %"), share, module

"""FBGEMM's table-batched embedding where it can be imported: lookup and optimizer in one."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from benchmarks.sizes import DEVICE

__all__ = ["PLACES", "tables_of"]

PLACES = ("managed memory", "managed memory, 20 % cache", "all in GPU memory")


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
    """A name and a module for each place of the rows; none where FBGEMM cannot be imported.

    It is called with ids `[n]` and offsets `[tables * samples + 1]`; `optimizer`: "Adam" or "SGD".
    """
    if DEVICE == "cpu" or (modules := _modules()) is None:
        return
    training, common, configs = modules
    kinds = common.EmbeddingLocation
    steps = {"Adam": configs.EmbOptimType.ADAM, "SGD": configs.EmbOptimType.EXACT_SGD}
    pooling = common.PoolingMode.SUM if pooled else common.PoolingMode.NONE
    places = (kinds.MANAGED, kinds.MANAGED_CACHING, kinds.DEVICE)
    for name, place in zip(PLACES, places, strict=True):
        cached = {"cache_load_factor": 0.2} if place == kinds.MANAGED_CACHING else {}
        specs = [(rows, columns, place, training.ComputeDevice.CUDA) for rows in sizes]
        yield (
            f"FBGEMM, {optimizer}, {name}",
            training.SplitTableBatchedEmbeddingBagsCodegen(
                specs,
                optimizer=steps[optimizer],
                learning_rate=0.001,
                pooling_mode=pooling,
                bounds_check_mode=common.BoundsCheckMode.NONE,
                device=torch.device(DEVICE),
                **cached,
            ),
        )

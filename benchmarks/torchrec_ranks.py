"""TorchRec's table, shared out row-wise, where TorchRec is installed: rows, exchanges and Adam."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.sizes import DEVICE

__all__ = ["Place", "Table", "places"]


class Place(NamedTuple):
    """Where the rows are, and how they are looked up."""

    name: str
    kernel: str
    distinct: bool
    """Whether a rank asks for an id once, however often its batch names it."""
    pipeline: str
    """What brings ids of the next batch to their owners, or its rows too, beside a step."""
    settings: dict[str, Any]
    """More of FBGEMM's module."""


def places() -> tuple[Place, ...]:
    """None where TorchRec or a GPU is missing."""
    if DEVICE == "cpu" or find_spec("torchrec") is None:
        return ()
    ids, rows = "TrainPipelineSparseDist", "PrefetchTrainPipelineSparseDist"
    name, cache = "managed memory", {"cache_load_factor": 0.2, "prefetch_pipeline": True}
    return (
        Place(name, "fused_uvm", False, ids, {}),
        Place(f"{name}, distinct ids", "fused_uvm", True, ids, {}),
        Place(f"{name}, distinct ids, 20 % cache", "fused_uvm_caching", True, rows, cache),
    )


class _Given(torch.autograd.Function):
    """A loss whose gradient by the rows is given: a pipeline begins the backward itself."""

    @staticmethod
    def forward(context: Any, rows: Tensor, gradient: Tensor) -> Tensor:
        context.save_for_backward(gradient)
        return rows.new_zeros(())

    @staticmethod
    def backward(context: Any, _: Tensor) -> Any:
        return *context.saved_tensors, None


class _Rows(nn.Module):
    """The rows `[n, D]` of a batch in the order of its ids."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, batch: Any) -> Any:
        return self.collection(batch)["id"].values()


class Table:
    """A float32 table of which each rank has a block of rows; it is trained within the backward.

    All steps have the same `gradient` of the looked-up rows, `[most ids, D]`.
    """

    def __init__(self, rows: int, place: Place, gradient: Tensor) -> None:
        self._torchrec = importlib.import_module("torchrec")
        distributed = "torchrec.distributed"
        embedding = importlib.import_module(f"{distributed}.embedding")
        plans = importlib.import_module(f"{distributed}.sharding_plan")
        shards = importlib.import_module(f"{distributed}.shard")
        pipelines = importlib.import_module(f"{distributed}.train_pipeline")
        optimizers = importlib.import_module("fbgemm_gpu.split_embedding_configs").EmbOptimType
        config = self._torchrec.EmbeddingConfig(
            name="rows",
            num_embeddings=rows,
            embedding_dim=gradient.shape[1],
            feature_names=["id"],
        )
        fused = {"optimizer": optimizers.ADAM, "learning_rate": 0.001, **place.settings}
        collection = shards.shard(
            self._torchrec.EmbeddingCollection(tables=[config], device=torch.device("meta")),
            {"rows": plans.row_wise(compute_kernel=place.kernel)},
            device=gradient.device,
            sharder=embedding.EmbeddingCollectionSharder(fused, use_index_dedup=place.distinct),
        )
        self.rows = _Rows(collection)
        self._gradient = gradient
        # One for all loops: FBGEMM keeps the stream on which the first brings rows.
        self._pipeline = getattr(pipelines, place.pipeline)(
            self.rows, collection.fused_optimizer, gradient.device, custom_model_fwd=self._loss
        )

    def batch(self, ids: Tensor) -> Any:
        """Ids `[n]` as TorchRec takes them: samples of one each."""
        ones = torch.ones(len(ids), dtype=torch.int32, device=ids.device)
        return self._torchrec.KeyedJaggedTensor(["id"], ids, lengths=ones)

    def steps(self, batches: Sequence[Any]) -> Iterator[None]:
        """Trains batch after batch."""
        for batch in batches:
            rows = self.rows(batch)
            rows.backward(self._gradient[: len(rows)])
            yield

    def pipelined(self, batches: Sequence[Any]) -> Iterator[None]:
        """The same with the next batch on its way."""
        self._pipeline.attach()
        coming = iter(batches)
        for _ in batches:
            self._pipeline.progress(coming)
            yield
        self._pipeline.detach()

    def _loss(self, batch: Any) -> tuple[Tensor, None]:
        rows = self.rows(batch)
        loss = _Given.apply(rows, self._gradient[: len(rows)])  # type: ignore[no-untyped-call]
        return loss, None

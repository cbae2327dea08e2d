"""TorchRec's lines of docs/from_torchrec.md run, and what they save loads as the page says.

Needs torchrec: make clients.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from documents import blocks
from reference import assert_same_bytes
from test_torchrec_page import DATA_PARALLEL, PAGE, pattern
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

import speedtorch

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
torchrec = pytest.importorskip("torchrec")
trained_with = pytest.importorskip("torchrec.distributed.train_pipeline")
keyed_optimizers = pytest.importorskip("torchrec.optim.keyed")
inference = pytest.importorskip("torchrec.inference.modules")

DEVICE = torch.device("cpu")


class Ranker(nn.Module):
    def __init__(self, tables: Any) -> None:
        super().__init__()
        self.tables = tables
        self.score = nn.Linear(48, 1)

    def forward(self, features: Any) -> Any:
        found = self.score(self.tables(features).values()).squeeze(1)
        return (found - 1).square().mean(), found


def keyed(samples: int = 3) -> Any:
    lengths = torch.tensor([1, 2, 1] * samples, dtype=torch.int32)
    ids = torch.arange(int(lengths.sum())) % 100
    return torchrec.KeyedJaggedTensor.from_lengths_sync(["user", "seen", "bought"], ids, lengths)


def ours() -> Ranker:
    kind = speedtorch.EmbeddingBagConfig
    return Ranker(
        speedtorch.EmbeddingBagCollection(
            [kind(100_000, 16, "user"), kind(50_000, 16, "item", feature_names=["seen", "bought"])]
        )
    )


@pytest.fixture
def saved(process_group: object, tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """The checkpoint of the page's model of TorchRec, and its tensors, after three steps."""
    lines = blocks(PAGE, "text")[0]
    names = {
        "torch": torch,
        "torchrec": torchrec,
        "Ranker": Ranker,
        "device": DEVICE,
        "apply_optimizer_in_backward": apply_optimizer_in_backward,
        "KeyedOptimizerWrapper": keyed_optimizers.KeyedOptimizerWrapper,
        "CombinedOptimizer": keyed_optimizers.CombinedOptimizer,
        "TrainPipelineSparseDist": trained_with.TrainPipelineSparseDist,
    }
    exec(compile(lines.text, PAGE.name, "exec"), names)
    batches = iter([keyed()] * 3)
    for _ in range(3):
        names["pipeline"].progress(batches)
    state, optimizer = names["model"].state_dict(), names["optimizer"].state_dict()
    checkpoint.save({"model": state, "optimizer": optimizer}, checkpoint_id=tmp_path / "checkpoint")
    whole = {}
    for key, value in state.items():
        shards = value.local_shards() if hasattr(value, "local_shards") else None
        whole[key] = (value if shards is None else shards[0].tensor).detach().clone()
    return tmp_path, whole


@pytest.mark.parametrize("sharded", [False, True], ids=["one process", "sharded"])
def test_a_checkpoint_of_torchrec_loads(
    saved: tuple[Path, dict[str, torch.Tensor]], sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, rows = saved
    monkeypatch.chdir(folder)
    model = ours()
    if sharded:
        speedtorch.shard(model)
    exec(compile(blocks(PAGE, "text")[1].text, PAGE.name, "exec"), {"torch": torch, "model": model})
    with speedtorch.full_state_dict(model):
        loaded = model.state_dict()
    assert len(rows) == len(loaded) == 4
    for key, value in rows.items():
        assert_same_bytes(loaded[key], value)


def test_the_state_of_a_fused_optimizer_does_not_load(
    saved: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    model = ours()
    optimizer = speedtorch.optim.RowWiseAdagrad(model.tables.parameters(), lr=0.02)
    speedtorch.attach(optimizer, model)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    with pytest.raises(checkpoint.CheckpointException, match="Missing key"):
        checkpoint.load(state, checkpoint_id=saved[0] / "checkpoint")


def test_torchrecs_pipeline_trains_and_prefetches_no_rows() -> None:
    model = ours()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline = trained_with.TrainPipelineSparseDist(model, optimizer, DEVICE)
    batches, before = iter([keyed()] * 2), model.tables.table_weight("user").clone()
    pipeline.progress(batches)
    assert pipeline._pipelined_modules == []
    changed = (model.tables.table_weight("user") != before).any(1).nonzero().flatten()
    assert changed.tolist() == keyed()["user"].values().unique().tolist()


def test_quantize_embeddings_quantizes_only_torchrecs_with_our_rows() -> None:
    model = ours()
    kept = inference.quantize_embeddings(model, torch.qint8, inplace=False)
    assert type(kept.tables) is speedtorch.EmbeddingBagCollection
    theirs = Ranker(
        torchrec.EmbeddingBagCollection(
            [
                torchrec.EmbeddingBagConfig(
                    num_embeddings=table.num_embeddings,
                    embedding_dim=table.embedding_dim,
                    name=table.name,
                    feature_names=table.feature_names,
                )
                for table in model.tables.embedding_bag_configs()
            ]
        )
    )
    theirs.load_state_dict(model.state_dict())
    quantized = inference.quantize_embeddings(theirs, torch.qint8, inplace=True)
    expected = model.tables(keyed())["user"]
    torch.testing.assert_close(quantized.tables(keyed())["user"], expected, rtol=0, atol=1e-4)


def test_a_distributed_model_parallel_of_ours_raises(process_group: object) -> None:
    wrapped = torchrec.distributed.DistributedModelParallel(ours(), device=DEVICE)
    with pytest.raises(NotImplementedError, match=pattern(DATA_PARALLEL)):
        wrapped(keyed())


def test_the_collection_has_none_of_a_sharded_modules_parts() -> None:
    for name in ("fused_optimizer", "input_dist", "compute", "output_dist"):
        assert not hasattr(ours().tables, name)

"""A training run to save and load, and changes to the files of its checkpoints."""

from __future__ import annotations

import copy
import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from reference import assert_same_content
from torch import nn, optim

import speedtorch

__all__ = ["ROWS", "SETTINGS", "Run", "assert_same", "damage", "rewrite_manifest", "size"]
__all__ += ["tracked_table"]

ROWS = 200
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cache": {"cache": "2KiB"},
    "capacity": {"capacity": 8},
    "bfloat16": {"stored": torch.bfloat16},
}


class Run:
    """A table and layers, their optimizer and its scheduler; batches are prefetched."""

    def __init__(
        self,
        device: str = "cpu",
        seed: int = 0,
        kind: Any = optim.Adam,
        width: int = 4,
        **settings: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.emb = speedtorch.Embedding(ROWS, width, device=device, **settings)
        layers = nn.BatchNorm1d(width, device=device), nn.Linear(width, 1, device=device)
        self.model = nn.ModuleDict({"emb": self.emb, "out": nn.Sequential(*layers)})
        self.optimizer = kind(self.model.parameters(), lr=0.1)
        speedtorch.attach(self.optimizer, self.model)
        self.scheduler = optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.random = random.Random(seed)
        self.device = device

    def train(self, steps: int) -> Run:
        batches = [self.random.choices(range(ROWS), k=6) for _ in range(steps)]
        ids_of_batches = [torch.tensor(batch, device=self.device) for batch in batches]
        for ids in speedtorch.prefetch(ids_of_batches, self.emb, ids=lambda ids: ids):
            self.optimizer.zero_grad()
            self.model["out"](self.emb(ids)).sin().square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()
        return self

    def tracked(self) -> Run:
        """Notes changed rows from now on."""
        self.table.track_changes()
        return self

    @property
    def table(self) -> speedtorch.HostTable:
        return self.emb.table

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def state(self) -> dict[str, Any]:
        return {name: copy.deepcopy(part.state_dict()) for name, part in self.parts.items()}


def assert_same(one: Run, other: Run) -> None:
    assert_same_content(one.state(), other.state())


def tracked_table(dim: int = 1, dtype: torch.dtype = torch.float32) -> speedtorch.HostTable:
    table = speedtorch.HostTable(ROWS, dim, dtype, memory="plain").zeros_()
    table.track_changes()
    return table


def size(saved: speedtorch.types.Saved) -> int:
    return sum(file.stat().st_size for file in Path(saved.path).iterdir())


def damage(path: Path) -> None:
    """Changes the last byte of a generation's first file."""
    (file,) = path.glob("*-00001.safetensors")
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def rewrite_manifest(
    saved: speedtorch.types.Saved, change: Callable[[dict[str, Any]], object]
) -> bytes:
    """Writes a manifest with a change, and its digest; returns its text."""
    path = Path(saved.path) / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    text = json.dumps(content).encode()
    path.write_bytes(text)
    path.with_suffix(".crc32").write_text(f"{zlib.crc32(text):08x}\n")
    return text

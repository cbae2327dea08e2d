"""Small modules of every kind with an attached optimizer, which trains the same random batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim

import speedtorch

__all__ = ["COLLECTIONS", "KINDS", "SmallTraining"]

COLLECTIONS = ["EmbeddingCollection", "EmbeddingBagCollection"]
KINDS = ["Embedding", "EmbeddingBag", *COLLECTIONS]
SIZES = {"user": (40, 4), "item": (30, 4), "wide": (20, 6)}
"""Rows and columns of a collection's tables, which are two groups; other modules have (50, 4)."""


class SmallTraining:
    """A module and its optimizer after 12 steps, or after so many `steps`."""

    def __init__(
        self,
        make: Callable[..., optim.Optimizer] = optim.Adam,
        device: str = "cpu",
        kind: str = "Embedding",
        steps: int = 12,
        **settings: Any,
    ) -> None:
        torch.manual_seed(0)
        self.kind, self.device, build = kind, device, getattr(speedtorch, kind)
        if kind in COLLECTIONS:
            config = getattr(speedtorch, kind.replace("Collection", "Config"))
            configs = [config(*size, name) for name, size in SIZES.items()]
            self.module = build(configs, device=device, **settings)
        else:
            self.module = build(50, 4, device=device, **settings)
        self.optimizer = make(self.module.parameters(), lr=0.1)
        speedtorch.attach(self.optimizer, self.module)
        self.train(steps)

    def batch(self, number: int) -> Any:
        random = torch.Generator().manual_seed(number)
        if self.kind in COLLECTIONS:
            drawn = (torch.rand(3, 8, 2, generator=random) ** 3 * 20).long().to(self.device)
            return dict(zip(SIZES, drawn, strict=True))
        ids = (torch.rand(20, generator=random) ** 3 * 50).long().to(self.device)
        return ids if self.kind == "Embedding" else ids.view(5, 4)

    def step(self, batch: Any) -> Tensor:
        """Trains a batch; returns the loss."""
        self.optimizer.zero_grad()
        found = self.module(batch)
        parts = [each.values() for each in found.values()] if isinstance(found, dict) else [found]
        values = [part if isinstance(part, Tensor) else part.values() for part in parts]
        loss = torch.stack([rows.float().square().sum() for rows in values]).sum()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def train(self, steps: int, begin: int = 0, *, ahead: bool = False) -> None:
        batches: Any = [self.batch(number) for number in range(begin, begin + steps)]
        if ahead:
            batches = speedtorch.prefetch(batches, self.module, ids=lambda b: {self.module: b})
        for batch in batches:
            self.step(batch)

    def graphed(self, **given: Any) -> Any:
        """The step as one CUDA graph, where it runs on a GPU."""
        given = {"modules": self.module, "optimizers": self.optimizer, **given}
        return speedtorch.graphed(self.step, self.batch(0), **given)

    def fields(self) -> dict[str, Tensor]:
        """A copy of all rows and of their state."""
        self.module.flush()
        modules: dict[str, nn.Module] = {"": self.module}
        if self.kind in COLLECTIONS:
            modules = {f"{name}.": self.module.group_of(name) for name in ("user", "wide")}
        return {
            f"{first}{name}": module.table[name].clone()
            for first, module in modules.items()
            for name in module.table.fields
        }

    def state(self) -> list[dict[str, Any]]:
        return [self.module.state_dict(), self.optimizer.state_dict()]

    def load(self, state: list[dict[str, Any]]) -> None:
        self.module.load_state_dict(state[0])
        self.optimizer.load_state_dict(state[1])

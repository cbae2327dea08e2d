"""`speedtorch demo experts`: a mixture of experts, few of which are on the device at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from demos import batches, loop
from demos.batches import Outcome
from demos.runner import Demo
from demos.settings import CommonSettings, option
from speedtorch.layers.host_init import host_init
from speedtorch.layers.swapper import Swapper

__all__ = ["Experts", "ExpertsDemo", "Settings"]


@dataclass(frozen=True, kw_only=True)
class Settings(CommonSettings):
    """All settings of a run, each with an option of the command line."""

    optimizer: ClassVar[str] = "AdamW"
    out: Path = option(Path("experts"), "folder for the results", metavar="FOLDER")
    experts: int = option(32, "number of experts")
    active: int = option(2, "experts that a step uses")
    resident: int = option(4, "experts that fit on the device, with their state")
    width: int = option(64, "numbers of an example")
    batch: int = option(256, "examples of each expert in a step")
    steps: int = option(400, "steps of training")
    lr: float = option(0.003, "learning rate of AdamW")
    compare: bool = option(False, "also train with all experts on the device and compare")

    def __post_init__(self) -> None:
        for name, most in (("active", self.resident), ("resident", self.experts)):
            if (value := getattr(self, name)) > most:
                raise ValueError(f"{name} must be at most {most}, got {value}")


@dataclass(frozen=True, eq=False)
class Batch(batches.Batch):
    """Examples of several kinds.

    Attributes:
        kinds: the K kinds.
        x: inputs `[K, B, width]`.
        y: targets `[K, B, width]`.
    """

    kinds: list[int]
    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        """The number of examples, `K * B`."""
        return self.x.shape[:2].numel()


class Batches(batches.Batches):
    """Random examples; each kind has its own function to learn, and each step its own kinds."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        super().__init__(batch=settings.batch, steps=settings.steps, seed=settings.seed)
        self._settings, self._device = settings, device
        random = torch.Generator().manual_seed(settings.seed)
        shape = (settings.experts, settings.width, settings.width)
        self._functions = torch.randn(shape, generator=random) / settings.width**0.5

    def epoch(self, number: int) -> Iterator[Batch]:
        """Yields one batch."""
        random = torch.Generator().manual_seed(self.seed + 2 * number)
        order = torch.randperm(self._settings.experts, generator=random)
        kinds = sorted(order[: self._settings.active].tolist())
        random.manual_seed(self.seed + 2 * number + 1)
        x = torch.randn((len(kinds), self.batch, self._settings.width), generator=random)
        yield Batch(kinds, x, torch.tanh(x @ self._functions[kinds])).to(self._device)

    def track(self, outcome: Outcome, batch: Batch) -> float:
        """Returns the progress, from 0 to 1."""
        return outcome.steps / self._settings.steps


class Experts(loop.Model):
    """One small network per kind of example."""

    averages = True
    swapper: Swapper

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width, hidden = settings.width, 4 * settings.width
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
            for _ in range(settings.experts)
        )

    def forward(self, batch: Batch) -> Tensor:
        """Returns the mean squared error."""
        found = [self.experts[kind](rows) for kind, rows in zip(batch.kinds, batch.x, strict=True)]
        return nn.functional.mse_loss(torch.stack(found), batch.y)

    def prefetched(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yields batches while their experts, with their state, are on the device."""
        for batch, following in itertools.pairwise(itertools.chain(batches, [None])):
            assert batch is not None
            with self.swapper.use(*(self.experts[kind] for kind in batch.kinds)):
                if following:
                    soon = (self.experts[kind] for kind in following.kinds)
                    self.swapper.prefetch(*soon, state=True)
                yield batch


class ExpertsDemo(Demo):
    """Each expert learns its own function.

    A step uses a few experts. The weights and AdamW state of the other experts are in host memory
    and are prefetched during the previous step.
    """

    summary = "a mixture of experts, of which few are on the device at a time"
    settings_type = Settings
    settings: Settings
    example, unit = "example", "steps"

    def make_model(self) -> Experts:
        """Creates the experts in host memory."""
        torch.manual_seed(self.settings.seed)
        with host_init():
            return Experts(self.settings)

    def attach(self) -> None:
        """Offloads the experts; their parameters are on the device only while they are used."""
        experts = self.model.experts
        # An expert's weight, its gradient and two states of AdamW, each aligned to 256 bytes.
        nbytes = 4 * sum(param.nbytes + 256 for param in experts[0].parameters())
        budget = self.settings.resident * nbytes
        self.model.swapper = Swapper(experts, self.optimizer, device=self.device, budget=budget)

    def batches(self) -> Batches:
        """Draws the functions to learn."""
        return Batches(self.settings, self.device)

    def results(self, before: None, after: None) -> tuple[dict[str, Any], list[str]]:
        """How the experts moved; writes all of them back to host memory."""
        moved = self.model.swapper.report()
        self.model.swapper.evict()
        return {"units": asdict(moved)}, str(moved).splitlines()

    def plain_model(self) -> Experts:
        """All experts on the device."""
        return Experts(self.settings)

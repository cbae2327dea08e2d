"""`speedtorch demo experts`: a mixture of experts, few of which are on the device at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from demos import report
from demos.comparison import compare_with_plain
from demos.loop import STEPS_LAYOUT, Outcome
from demos.session import DIFFERENT, choose_device, ended, interrupt, make_folder
from demos.settings import CommonSettings, option
from speedtorch.layers.host_init import host_init
from speedtorch.layers.swapper import Swapper

__all__ = ["ABOUT", "HELP", "Experts", "Settings", "run"]

HELP = "a mixture of experts, of which few are on the device at a time"
ABOUT = (
    "Each expert learns its own function. A step uses a few experts. The weights and AdamW state "
    "of the other experts are in host memory and are prefetched during the previous step."
)


@dataclass(frozen=True, kw_only=True)
class Settings(CommonSettings):
    """All settings of a run, each with an option of the command line."""

    out: Path = option(Path("experts"), "folder for the results", metavar="FOLDER")
    experts: int = option(32, "number of experts")
    active: int = option(2, "experts that a step uses")
    resident: int = option(4, "experts that fit on the device, with their state")
    width: int = option(64, "numbers of an example")
    batch: int = option(256, "examples of each expert in a step")
    steps: int = option(400, "steps of training")
    lr: float = option(0.003, "learning rate of AdamW")
    compare: bool = option(
        False, "also train with all experts on the device and compare", action="store_true"
    )


class Experts(nn.Module):
    """One small network per kind of example."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width, hidden = settings.width, 4 * settings.width
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
            for _ in range(settings.experts)
        )

    def loss(self, kinds: list[int], x: Tensor, y: Tensor) -> Tensor:
        """Returns the mean squared error of examples `[kinds, batch, width]`."""
        found = [self.experts[kind](rows) for kind, rows in zip(kinds, x, strict=True)]
        return nn.functional.mse_loss(torch.stack(found), y)


class Task:
    """Random examples of several kinds; each kind has its own function to learn."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self._settings, self._device = settings, device
        random = torch.Generator().manual_seed(settings.seed)
        shape = (settings.experts, settings.width, settings.width)
        self._functions = torch.randn(shape, generator=random) / settings.width**0.5

    def kinds(self, step: int) -> list[int]:
        """The kinds of examples that a step uses."""
        random = torch.Generator().manual_seed(self._settings.seed + 2 * step)
        order = torch.randperm(self._settings.experts, generator=random)
        return sorted(order[: self._settings.active].tolist())

    def batch(self, step: int) -> tuple[list[int], Tensor, Tensor]:
        """A step's kinds, and their inputs and targets `[kinds, batch, width]`."""
        kinds = self.kinds(step)
        random = torch.Generator().manual_seed(self._settings.seed + 2 * step + 1)
        shape = (len(kinds), self._settings.batch, self._settings.width)
        x = torch.randn(shape, generator=random)
        y = torch.tanh(x @ self._functions[kinds])
        return kinds, x.to(self._device), y.to(self._device)


def train(
    model: Experts,
    optimizer: torch.optim.Optimizer,
    swapper: Swapper | None,
    task: Task,
    steps: int,
    stop: Callable[[], bool],
    label: str,
) -> Outcome:
    """Trains; a swapper prefetches the next step's experts during each step."""
    outcome = Outcome()
    begin = time.perf_counter()
    seen: list[Tensor] = []

    def record_loss() -> None:
        """Records the mean loss of the steps since the last call."""
        if seen:
            outcome.losses.append(torch.stack(seen).mean().item())
            seen.clear()

    bar: Any = tqdm(range(steps), desc=label, bar_format=STEPS_LAYOUT, disable=None)
    for step in bar:
        kinds, x, y = task.batch(step)
        used = [model.experts[kind] for kind in kinds]
        with nullcontext() if swapper is None else swapper.use(*used):
            if swapper is not None and step + 1 < steps:
                following = [model.experts[kind] for kind in task.kinds(step + 1)]
                swapper.prefetch(*following, state=True)
            optimizer.zero_grad()
            loss = model.loss(kinds, x, y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        seen.append(loss.detach())
        outcome.steps += 1
        if outcome.steps % 25 == 0:
            record_loss()
            bar.set_postfix(loss=f"{outcome.losses[-1]:.4f}")
        if stop():
            break
    record_loss()
    outcome.seconds = time.perf_counter() - begin
    outcome.finished = outcome.steps == steps
    return outcome


def _new_experts(settings: Settings) -> Experts:
    torch.manual_seed(settings.seed)
    with host_init():
        return Experts(settings)


def run(settings: Settings) -> int:
    """Trains, saves the model and prints a report.

    Returns the exit status: 0, DIFFERENT if the comparison found a difference, or STOPPED if Ctrl-C
    ended the training early. After Ctrl-C, the results so far are saved and reported.

    Raises ValueError if a step uses more experts than fit on the device, or than there are.
    """
    device = choose_device(settings)
    for name, most in (("active", settings.resident), ("resident", settings.experts)):
        if (value := getattr(settings, name)) > most:
            raise ValueError(f"{name} must be at most {most}, got {value}")
    make_folder(settings.out)
    model, task = _new_experts(settings), Task(settings, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    # An expert's weight, its gradient and two states of AdamW, each aligned to 256 bytes.
    nbytes = 4 * sum(param.nbytes + 256 for param in model.experts[0].parameters())
    swapper = Swapper(model.experts, optimizer, device=device, budget=settings.resident * nbytes)
    report.reset_gpu_peak(device)
    with interrupt() as stop:
        outcome = train(model, optimizer, swapper, task, settings.steps, stop, "training")
        moved = swapper.report()
        swapper.evict()
        facts: dict[str, Any] = {
            "settings": {**asdict(settings), "out": str(settings.out)},
            "device": str(device),
            "peak_gpu_bytes": report.peak_gpu_bytes(device),
            "peak_host_bytes": report.peak_host_bytes(),
            "training": asdict(outcome),
            "units": asdict(moved),
        }
        if settings.compare and outcome.finished:
            facts["plain"] = _compared(settings, device, model, task, outcome, stop)
    lines = list(_lines(facts, str(moved)))
    report.print_report(facts, report.save_model(settings.out, model, facts), lines)
    if not facts.get("plain", {"same": True})["same"]:
        return DIFFERENT
    return ended(outcome.finished)


def _lines(facts: dict[str, Any], moved: str) -> Iterator[str]:
    training = facts["training"]
    first, last = (f"{training['losses'][place]:.4f}" for place in (0, -1))
    speed = training["steps"] / training["seconds"]
    yield f"time       {training['seconds']:.1f} s on {facts['device']}: {speed:,.1f} steps/s"
    yield f"loss       {first} at first, {last} at the end"
    yield from moved.splitlines()
    if (gpu := facts["peak_gpu_bytes"]) is not None:
        yield f"peak       {report.size_text(gpu)} on the GPU"


def _compared(
    settings: Settings,
    device: torch.device,
    model: Experts,
    task: Task,
    outcome: Outcome,
    stop: Callable[[], bool],
) -> dict[str, Any]:
    """Compares with the same run with all experts on the device."""
    whole = _new_experts(settings).to(device)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=settings.lr)
    report.reset_gpu_peak(device)
    plain = train(whole, optimizer, None, task, settings.steps, stop, "plain torch")
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    rows = ((ours.detach().cpu(), theirs.detach().cpu()) for ours, theirs in pairs)
    losses = {"loss": (outcome.losses[-1], plain.losses[-1])}
    return compare_with_plain(device, rows, losses, plain.seconds)

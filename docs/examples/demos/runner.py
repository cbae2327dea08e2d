"""Runs a demonstration: training, score, report, files and the comparison with plain torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from demos import report
from demos.batches import Batches, Outcome
from demos.comparison import compare_with_plain
from demos.loop import Model, Optimizer, train
from demos.processes import Processes, join_torchrun
from demos.session import DIFFERENT, STOPPED, choose_device, interrupt, make_folder
from demos.settings import CommonSettings, make_optimizer
from speedtorch.optim.attach import attach

__all__ = ["Demo", "run"]


class Demo(ABC):
    """A demonstration; the docstring of a subclass describes its command."""

    summary: ClassVar[str]
    """The line about the command in `demo --help`."""
    settings_type: ClassVar[type[CommonSettings]]
    example: ClassVar[str]
    """The name of an example, in the singular."""
    unit: ClassVar[str]
    """The unit of the speed, as in loop.train."""
    last_rate: ClassVar[float] = 1.0
    """The last learning rate, as in loop.train."""
    distributed: ClassVar[bool] = False
    """Whether the processes of torchrun can train the model together."""

    def __init__(self, settings: Any, device: torch.device, processes: Processes) -> None:
        self.settings, self.device, self.processes = settings, device, processes
        self.model: Any = self.make_model()
        self.loss_of = processes.distribute(self.model, self.model.loss)
        self.optimizer = self.make_optimizer(self.model.parameters())
        self.attach()
        self.model.draw_rows(settings.seed)

    @abstractmethod
    def make_model(self) -> Model:
        """Creates the model, after reading the data that its size depends on."""

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Creates an optimizer of the kind in the settings."""
        return make_optimizer(self.settings.optimizer, self.settings.lr, parameters)

    def attach(self) -> None:
        """Connects the optimizer with the parameters in host memory."""
        attach(self.optimizer, self.model)

    @abstractmethod
    def batches(self) -> Batches:
        """Reads the rest of the data, prints a line about the data, and returns the batches."""

    def score(self, model: Any) -> Any:
        """Returns a dataclass with the score of a model, or None without a score."""
        return None

    @abstractmethod
    def results(self, before: Any, after: Any) -> tuple[dict[str, Any], list[str]]:
        """Facts and lines for the report, after training; the arguments are scores."""

    def save(self, facts: dict[str, Any]) -> list[Path]:
        """Writes the model and the facts; returns the paths."""
        if self.processes.size > 1:
            return report.save_checkpoint(self.settings.out, self.model, self.optimizer, facts)
        return report.save_model(self.settings.out, self.model, facts)

    def plain_model(self) -> Model:
        """A model in plain torch with the same state dict, for --compare."""
        raise NotImplementedError

    def plain_optimizer(self, model: Any) -> Optimizer:
        """The optimizer of the model in plain torch."""
        return self.make_optimizer(model.parameters())


def run(kind: type[Demo], settings: Any) -> int:
    """Trains, saves the model and prints a report.

    Returns the exit status: 0, DIFFERENT if the comparison found a difference, or STOPPED if Ctrl-C
    ended the training early. After Ctrl-C, the results so far are saved and reported.
    """
    device = choose_device(settings)
    with join_torchrun(device) as processes:
        # The call releases the model; the end of a process group can hang if
        # DistributedDataParallel still refers to the group.
        return _run(kind, settings, device, processes)


def _run(kind: type[Demo], settings: Any, device: torch.device, processes: Processes) -> int:
    compares = getattr(settings, "compare", False)
    if processes.size > 1 and (compares or not kind.distributed):
        what = "--compare" if compares else "this demonstration"
        raise ValueError(f"{what} requires one process, got {processes.size}. Omit torchrun.")
    demo = kind(settings, device, processes)
    make_folder(settings.out)
    batches = demo.batches()
    plain = demo.plain_model() if compares else None
    if plain:
        plain.load_state_dict(demo.model.state_dict())
    with interrupt() as stop:
        how: Any = {"unit": kind.unit, "last_rate": kind.last_rate, "stop": stop}
        before = demo.score(demo.model)
        report.reset_gpu_peak(device)
        outcome = train(
            demo.model,
            demo.optimizer,
            batches,
            loss_of=demo.loss_of,
            processes=processes,
            label="training",
            **how,
        )
        after = demo.score(demo.model)
        own_facts, lines = demo.results(before, after)
        facts = {
            **report.run_facts(settings, device, demo.model.embeddings(), outcome, processes),
            "before": before and asdict(before),
            "after": after and asdict(after),
            **own_facts,
        }
        paths = ", ".join(map(str, demo.save(facts)))
        lines = [*report.common_lines(facts, kind.example, kind.unit), *lines]
        print(*lines, f"saved      {paths}", sep="\n", flush=True)
        if not outcome.finished:
            print("stopped    by Ctrl-C; the results so far are saved")
            return STOPPED
        if plain is None:
            return 0
        report.reset_gpu_peak(device)
        optimizer = demo.plain_optimizer(plain.to(device))
        other = train(plain, optimizer, batches, ahead=False, label="plain torch", **how)
        if not other.finished:
            print("stopped    by Ctrl-C before the comparison was complete; the model is saved")
            return STOPPED
        ours, theirs = _figures(outcome, after), _figures(other, demo.score(plain))
        figures = {name: (value, theirs[name]) for name, value in ours.items()}
        values = zip(_values(demo.model), _values(plain), strict=True)
        facts["plain_torch"] = compare_with_plain(device, values, figures, other.seconds)
        demo.save(facts)
    return 0 if facts["plain_torch"]["same"] else DIFFERENT


def _figures(outcome: Outcome, score: Any) -> dict[str, float]:
    """The last loss and the figures of a score."""
    figures = {"loss": outcome.losses[-1], **(vars(score) if score else {})}
    return {name: value for name, value in figures.items() if isinstance(value, float)}


def _values(model: nn.Module) -> list[Tensor]:
    """The values of a model's state dict, on the CPU."""
    return [value.cpu() for _, value in sorted(model.state_dict().items())]

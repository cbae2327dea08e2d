"""`speedtorch demo dlrm`: settings, training, comparison with plain torch, report and files."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from demos import report
from demos.click_batches import ClickBatches
from demos.comparison import compare_with_plain
from demos.criteo import Clicks, read_clicks, write_clicks
from demos.dlrm import DLRM, held_out_score, train
from demos.processes import Processes, join_torchrun
from demos.session import (
    DIFFERENT,
    STOPPED,
    choose_device,
    ended,
    interrupt,
    make_folder,
)
from demos.settings import StoredSettings, make_optimizer, option, optional_count
from speedtorch.optim.attach import attach

__all__ = ["ABOUT", "HELP", "Settings", "run"]

HELP = "a click model on Criteo's format, with 26 tables in host memory"
ABOUT = (
    "DLRM on a file in Criteo's format, such as train.txt of Kaggle's challenge, or on a generated "
    "file. A speedtorch.EmbeddingBagCollection keeps the rows of 26 tables and their optimizer "
    "state in host memory and prefetches the rows of the next batch during a step. With torchrun, "
    "each process has a shard of the rows and trains a part of every batch."
)
# With these optimizers, torch does not change rows that a step does not look up.
_COMPARED = ("Adagrad", "SGD")


@dataclass(frozen=True, kw_only=True)
class Settings(StoredSettings):
    """All settings of a run, each with an option of the command line."""

    clicks: Path | None = option(
        None, "in Criteo's format, plain or gzip (default: generated)", type=Path, metavar="FILE"
    )
    lines: int | None = optional_count("maximum number of lines to read")
    out: Path = option(Path("dlrm"), "folder for the results", metavar="FOLDER")
    optimizer: str = option("Adagrad", "any of torch.optim", metavar="NAME")
    lr: float = option(0.01, "learning rate")
    rows: int = option(20_000, "rows of each table; a category's id is the category modulo rows")
    dim: int = option(16, "numbers per row")
    epochs: int = option(2, "passes over the lines")
    batch: int = option(1024, "lines per batch")
    held_out: float = option(0.1, "share of the lines, at the end, for the score only")
    compare: bool = option(
        False, "also train in plain torch and compare the results", action="store_true"
    )


def run(settings: Settings) -> int:
    """Trains, saves the model and prints a report.

    Returns the exit status: 0, DIFFERENT if the comparison found a difference, or STOPPED if Ctrl-C
    ended the training early. After Ctrl-C, the results so far are saved and reported.
    """
    if settings.compare and settings.optimizer not in _COMPARED:
        raise ValueError(
            f"--compare requires {' or '.join(_COMPARED)}, got {settings.optimizer}: with other"
            " optimizers torch steps all rows, but speedtorch steps only rows that are looked up"
        )
    if settings.compare:
        settings.check_comparable()
    device = choose_device(settings)
    with join_torchrun(device) as processes:
        return _run(settings, device, processes)


def _run(settings: Settings, device: torch.device, processes: Processes) -> int:
    if settings.compare and processes.size > 1:
        raise ValueError(
            f"--compare requires one process, got {processes.size}. Omit torchrun or --compare."
        )
    seed = settings.seed
    how = {"memory": settings.memory, **settings.stored_as()}
    model = DLRM(settings.rows, settings.dim, device=device, seed=seed, **how)
    loss_of = processes.distribute(model, model.loss)
    optimizer = make_optimizer(settings.optimizer, settings.lr, model.parameters())
    attach(optimizer, model)
    make_folder(settings.out)
    training, held = _read(settings, processes).split(settings.held_out)
    batches = ClickBatches(
        training,
        settings.rows,
        batch=settings.batch,
        epochs=settings.epochs,
        seed=seed,
        processes=processes,
    )
    plain = DLRM(settings.rows, settings.dim, plain=True) if settings.compare else None
    if plain:
        plain.load_state_dict(model.state_dict())
    report.reset_gpu_peak(device)
    with interrupt() as stop:
        before = held_out_score(model, held, processes)
        outcome = train(
            model,
            optimizer,
            batches,
            loss_of=loss_of,
            processes=processes,
            stop=stop,
            label="training",
        )
        after = held_out_score(model, held, processes)
        facts = {
            **report.run_facts(settings, device, model.embeddings(), outcome, processes),
            "before": asdict(before),
            "after": asdict(after),
        }
        lines = [
            *report.training_lines(facts, "steps", "samples", digits=4),
            f"AUC        {before.auc:.4f} before training, {after.auc:.4f} after, for the last"
            f" {after.samples:,} lines",
            f"entropy    {before.normalised_entropy:.4f} before training,"
            f" {after.normalised_entropy:.4f} after; 1 for a model that knows only the share",
            *report.memory_lines(facts),
        ]
        if processes.size > 1:
            paths = report.save_checkpoint(settings.out, model, optimizer, facts)
        else:
            paths = report.save_model(settings.out, model, facts)
        report.print_report(facts, paths, lines)
        if (status := ended(outcome.finished)) or not plain:
            return status
        report.reset_gpu_peak(device)
        optimizer = make_optimizer(settings.optimizer, settings.lr, plain.to(device).parameters())
        plain_outcome = train(
            plain, optimizer, batches, ahead=False, stop=stop, label="plain torch"
        )
        if not plain_outcome.finished:
            print("stopped    by Ctrl-C before the comparison was complete; the model is saved")
            return STOPPED
        score = held_out_score(plain, held)
        figures = {
            "loss": (outcome.losses[-1], plain_outcome.losses[-1]),
            "auc": (after.auc, score.auc),
            "normalised_entropy": (after.normalised_entropy, score.normalised_entropy),
        }
        pairs = zip(_numbers(model), _numbers(plain), strict=True)
        facts["plain_torch"] = compare_with_plain(device, pairs, figures, plain_outcome.seconds)
        report.save_model(settings.out, model, facts)
    return 0 if facts["plain_torch"]["same"] else DIFFERENT


def _read(settings: Settings, processes: Processes) -> Clicks:
    """Reads the clicks of the given file, or of a new generated file."""
    file = settings.clicks or settings.out / "clicks.txt"
    if not settings.clicks and processes.is_first:
        write_clicks(file, seed=settings.seed)
    processes.wait()
    label = "reading" if processes.is_first else None
    clicks = read_clicks(file, lines=settings.lines, label=label)
    share = 100 * clicks.clicked.mean()
    print(f"clicks     {share:.1f} % of {len(clicks):,} lines of {file}", flush=True)
    return clicks


def _numbers(model: DLRM) -> list[Tensor]:
    """The values of a model's state dict, on the CPU."""
    return [value.cpu() for _, value in sorted(model.state_dict().items())]

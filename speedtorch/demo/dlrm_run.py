"""DLRM as a user runs it: choices, training, comparison with plain torch, report and files."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from speedtorch.demo import report
from speedtorch.demo.agreement import compared
from speedtorch.demo.click_batches import ClickBatches
from speedtorch.demo.criteo import Clicks, read_clicks, write_clicks
from speedtorch.demo.dlrm import DLRM, held_out_score, train
from speedtorch.demo.processes import Processes, joined
from speedtorch.demo.session import (
    DIFFERENT,
    STOPPED,
    choose_device,
    ended,
    interrupt,
    make_folder,
)
from speedtorch.demo.settings import StoredSettings, make_optimizer, option, optional_count
from speedtorch.optim.attach import attach

__all__ = ["ABOUT", "HELP", "Settings", "run"]

HELP = "a click model on Criteo's format, with 26 tables in host memory"
ABOUT = (
    "DLRM on a file in Criteo's format, such as train.txt of Kaggle's challenge, or on one that is "
    "made up. The rows of 26 tables and their optimizer state are kept in host memory by a "
    "speedtorch.EmbeddingBagCollection; those of the next batch travel while the current one is "
    "trained. Of several processes that torchrun begins each has its share of the rows, and of the "
    "lines of every batch."
)
# With these torch leaves rows as they are that a step does not look up.
_COMPARED = ("Adagrad", "SGD")


@dataclass(frozen=True, kw_only=True)
class Settings(StoredSettings):
    """All choices of a run; the command line has one option for each."""

    clicks: Path | None = option(
        None, "in Criteo's format, plain or gzip; made up if none", type=Path, metavar="FILE"
    )
    lines: int | None = optional_count("read no more of the file than so many lines")
    out: Path = option(Path("dlrm"), "folder for the results", metavar="FOLDER")
    optimizer: str = option("Adagrad", "any of torch.optim", metavar="NAME")
    lr: float = option(0.01, "learning rate")
    rows: int = option(20_000, "of each table; a category's id is its remainder")
    dim: int = option(16, "numbers per row")
    epochs: int = option(2, "passes over the lines")
    batch: int = option(1024, "lines per batch")
    held_out: float = option(0.1, "share of the lines, the last ones, that only the score sees")
    compare: bool = option(
        False, "train the same in plain torch afterwards, and compare", action="store_true"
    )


def run(settings: Settings) -> int:
    """Trains, saves the model and prints a report.

    Gives an exit status: 0; DIFFERENT if a comparison found a difference; STOPPED if Ctrl-C ended
    the training early, after which everything is saved and told as usual.
    """
    if settings.compare and settings.optimizer not in _COMPARED:
        raise ValueError(
            f"--compare is for {' and '.join(_COMPARED)}, not {settings.optimizer}: with others"
            " torch steps all rows, where ours are stepped when they are looked up"
        )
    if settings.compare:
        settings.check_comparable()
    device = choose_device(settings)
    with joined(device) as processes:
        return _run(settings, device, processes)


def _run(settings: Settings, device: torch.device, processes: Processes) -> int:
    if settings.compare and processes.size > 1:
        raise ValueError(
            f"--compare is for one process, not {processes.size}: leave torchrun out, or --compare"
        )
    seed = settings.seed
    how = {"memory": settings.memory, **settings.stored_as()}
    model = DLRM(settings.rows, settings.dim, device=device, seed=seed, **how)
    loss_of = processes.spread(model, model.loss)
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
    report.forget_gpu_peak(device)
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
            f" {after.normalised_entropy:.4f} after; the share of clicks alone gives 1",
            *report.memory_lines(facts),
        ]
        if processes.size > 1:
            paths = report.save_checkpoint(settings.out, model, optimizer, facts)
        else:
            paths = report.save_model(settings.out, model, facts)
        report.print_report(facts, paths, lines)
        if (status := ended(outcome.finished)) or not plain:
            return status
        report.forget_gpu_peak(device)
        optimizer = make_optimizer(settings.optimizer, settings.lr, plain.to(device).parameters())
        theirs = train(plain, optimizer, batches, ahead=False, stop=stop, label="plain torch")
        if not theirs.finished:
            print("stopped    by Ctrl-C before the comparison was done; the model is saved")
            return STOPPED
        score = held_out_score(plain, held)
        figures = {
            "loss": (outcome.losses[-1], theirs.losses[-1]),
            "auc": (after.auc, score.auc),
            "normalised_entropy": (after.normalised_entropy, score.normalised_entropy),
        }
        pairs = zip(_numbers(model), _numbers(plain), strict=True)
        facts["plain_torch"] = compared(device, pairs, figures, theirs.seconds)
        report.save_model(settings.out, model, facts)
    return 0 if facts["plain_torch"]["same"] else DIFFERENT


def _read(settings: Settings, processes: Processes) -> Clicks:
    """The clicks of a file, which is made up first where none was given."""
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
    """All that a model has learnt, on the CPU: its rows and layers."""
    return [value.cpu() for _, value in sorted(model.state_dict().items())]

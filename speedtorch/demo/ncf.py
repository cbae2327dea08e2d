"""A recommender, with its rows and their optimizer state in host memory: the NCF demonstration."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from speedtorch.demo.neumf import NeuMF, held_out_score, train
from speedtorch.demo.ranking import BatchStream, Candidates
from speedtorch.demo.ratings import generated_ratings, leave_one_out, read_ratings
from speedtorch.demo.report import memory_lines, run_facts
from speedtorch.demo.session import (
    STOPPED,
    check_memory,
    check_seed,
    choose_device,
    interrupt,
    make_folder,
)
from speedtorch.demo.settings import add_run_arguments, positive
from speedtorch.files.new_files import replace_files
from speedtorch.files.table_files import write_safetensors
from speedtorch.optim.attach import attach

__all__ = ["ABOUT", "HELP", "Settings", "add_arguments", "run"]

HELP = "a recommender, with the rows of users and items in host memory"
ABOUT = (
    "Neural collaborative filtering (NeuMF) on a MovieLens file or on generated ratings. Rows and "
    "their optimizer state are kept in host memory."
)


@dataclass(frozen=True)
class Settings:
    """All choices of a run; the command line has one option for each.

    Attributes:
        ratings: a file in one of MovieLens's formats; None for a generated set.
        out: folder for the results.
        dim: numbers per row of the factorisation; rows of the perceptron have twice as many.
        epochs: passes over the ratings.
        batch: ratings per batch.
        lr: learning rate of Adam.
        negatives: sampled items per rating.
        seed: everything random depends on it alone.
        device: "auto", "cpu" or "cuda".
        memory: kind of the tables' memory, as for HostTable.
    """

    ratings: Path | None = None
    out: Path = Path("ncf")
    dim: int = 16
    epochs: int = 8
    batch: int = 1024
    lr: float = 0.003
    negatives: int = 4
    seed: int = 0
    device: str = "auto"
    memory: str = "auto"


def add_arguments(parser: ArgumentParser) -> None:
    """Gives a parser one option for each of the Settings."""
    d = Settings()
    add = parser.add_argument
    add("--ratings", type=Path, metavar="FILE", help="u.data, ratings.dat or ratings.csv")
    add("--dim", type=positive, default=d.dim, help="numbers per row (%(default)s)")
    add("--epochs", type=positive, default=d.epochs, help="passes (%(default)s)")
    add("--batch", type=positive, default=d.batch, help="ratings per batch (%(default)s)")
    add("--lr", type=float, default=d.lr, help="learning rate of Adam (%(default)s)")
    add("--negatives", type=positive, default=d.negatives, help="per rating (%(default)s)")
    add_run_arguments(parser, out=d.out)


def run(settings: Settings) -> int:
    """Trains, saves the model and prints a report.

    Args:
        settings: what to do.

    Returns:
        An exit status: 0, or STOPPED if Ctrl-C ended the training early, after which everything is
        saved and told as usual.

    Raises:
        ValueError, OSError, MemoryError: a setting, a file or the memory at hand does not fit.
    """
    device = choose_device(settings.device)
    check_memory(settings.memory)
    check_seed(settings.seed)
    seed, file = settings.seed, settings.ratings
    ratings = read_ratings(file) if file else generated_ratings(seed=seed)
    split = leave_one_out(ratings)
    candidates = Candidates.draw(ratings, split, seed=seed)
    users, items = len(ratings.user_ids), len(ratings.item_ids)
    stream = BatchStream(
        split, items, batch=settings.batch, negatives=settings.negatives, seed=seed
    )
    model = NeuMF(users, items, settings.dim, memory=settings.memory, device=device, seed=seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)
    attach(optimizer, model)
    model.draw_rows(seed)
    make_folder(settings.out)
    print(
        f"ratings    {len(ratings):,} of {users:,} users for {items:,} items,"
        f" {'from a file' if file else 'generated'}",
        flush=True,
    )
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with interrupt() as stop:
        before = held_out_score(model, candidates)
        outcome = train(
            model, optimizer, stream, epochs=settings.epochs, stop=stop, label="training"
        )
        after = held_out_score(model, candidates)
        facts = {
            **run_facts(settings, device, model.embeddings(), outcome),
            "users": users,
            "items": items,
            "ratings": len(ratings),
            "before": asdict(before),
            "after": asdict(after),
        }
        paths = _save(settings.out, model, facts)
        _print_report(facts, paths)
    if not outcome.finished:
        print("stopped    by Ctrl-C; what was learnt until then is saved")
        return STOPPED
    return 0


def _save(folder: Path, model: NeuMF, facts: Mapping[str, Any]) -> list[Path]:
    """Writes the model's state dict and what is known about it; both files, or none."""
    paths = [folder / name for name in ("model.safetensors", "report.json")]
    with replace_files(paths) as (saved, report):
        write_safetensors(saved, model.state_dict())
        report.write(json.dumps(dict(facts), indent=2).encode() + b"\n")
    return paths


def _print_report(facts: Mapping[str, Any], paths: Sequence[Path]) -> None:
    training, before, after = facts["training"], facts["before"], facts["after"]
    speed = training["ratings"] / training["seconds"]
    lines = [
        f"time       {training['seconds']:.1f} s on {facts['device']}: {training['steps']:,} steps,"
        f" {training['ratings']:,} ratings, {speed:,.0f} ratings/s",
        f"loss       {training['losses'][0]:.3f} at first, {training['losses'][-1]:.3f} at the end",
        f"hit rate   {before['hit_rate']:.3f} at 10 before training, {after['hit_rate']:.3f} after,"
        f" for {after['users']:,} users",
        f"NDCG       {before['ndcg']:.3f} at 10 before training, {after['ndcg']:.3f} after",
        *memory_lines(facts),
        f"saved      {', '.join(map(str, paths))}",
    ]
    print("\n".join(lines), flush=True)

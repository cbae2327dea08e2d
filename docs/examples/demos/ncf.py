"""`speedtorch demo ncf`: settings, training, report and files."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from demos import report
from demos.neumf import NeuMF, held_out_score, train
from demos.ranking import BatchStream, Candidates
from demos.ratings import generated_ratings, leave_one_out, read_ratings
from demos.session import choose_device, ended, interrupt, make_folder
from demos.settings import RunSettings, option
from speedtorch.optim.attach import attach

__all__ = ["ABOUT", "HELP", "Settings", "run"]

HELP = "a recommender, with the rows of users and items in host memory"
ABOUT = (
    "Neural collaborative filtering (NeuMF) on a MovieLens file or on generated ratings. Rows and "
    "their optimizer state are in host memory."
)


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """All settings of a run, each with an option of the command line."""

    ratings: Path | None = option(
        None, "u.data, ratings.dat or ratings.csv (default: generated)", type=Path, metavar="FILE"
    )
    out: Path = option(Path("ncf"), "folder for the results", metavar="FOLDER")
    dim: int = option(16, "numbers per row of the factorisation; the perceptron has twice as many")
    epochs: int = option(8, "passes over the ratings")
    batch: int = option(1024, "ratings per batch")
    lr: float = option(0.003, "learning rate of Adam")
    negatives: int = option(4, "sampled items per rating")


def run(settings: Settings) -> int:
    """Trains, saves the model and prints a report.

    Returns the exit status: 0, or STOPPED if Ctrl-C ended the training early. After Ctrl-C, the
    results so far are saved and reported.
    """
    device = choose_device(settings)
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
    report.reset_gpu_peak(device)
    with interrupt() as stop:
        before = held_out_score(model, candidates)
        outcome = train(
            model, optimizer, stream, epochs=settings.epochs, stop=stop, label="training"
        )
        after = held_out_score(model, candidates)
        facts = {
            **report.run_facts(settings, device, model.embeddings(), outcome),
            "users": users,
            "items": items,
            "ratings": len(ratings),
            "before": asdict(before),
            "after": asdict(after),
        }
        lines = [
            *report.training_lines(facts, "ratings", "ratings"),
            f"hit rate   {before.hit_rate:.3f} at 10 before training, {after.hit_rate:.3f} after,"
            f" for {after.users:,} users",
            f"NDCG       {before.ndcg:.3f} at 10 before training, {after.ndcg:.3f} after",
            *report.memory_lines(facts),
        ]
        report.print_report(facts, report.save_model(settings.out, model, facts), lines)
    return ended(outcome.finished)

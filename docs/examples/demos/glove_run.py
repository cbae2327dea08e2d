"""`speedtorch demo glove`: settings, training, report and files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from demos import report
from demos.cooccurrence import count_cooccurrence
from demos.corpus import Corpus
from demos.evaluate import content_words, nearest_neighbours
from demos.glove import GloVe, train
from demos.glove_batches import PairBatches
from demos.session import choose_device, ended, interrupt, make_folder
from demos.settings import RunSettings, make_optimizer, option, optional_count
from speedtorch.optim.attach import attach

__all__ = ["ABOUT", "HELP", "Settings", "run"]

HELP = "word vectors from counts of word pairs, with speedtorch.Embedding"
ABOUT = (
    "GloVe. Four speedtorch.Embedding modules keep vectors, biases and their optimizer state in "
    "host memory and prefetch the rows of the next batch during a step."
)
_NEIGHBOURS_OF = 8


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """All settings of a run, each with an option of the command line."""

    corpus: Path | None = option(None, "text to train on, plain or gzip", type=Path, metavar="FILE")
    out: Path = option(Path("glove"), "folder for the results", metavar="FOLDER")
    optimizer: str = option("Adagrad", "any of torch.optim", metavar="NAME")
    lr: float = option(0.05, "learning rate")
    dim: int = option(100, "numbers per vector")
    window: int = option(10, "maximum distance of a context word")
    min_count: int = option(10, "drop rarer words")
    x_max: float = option(100.0, "counts below this value have a lower weight")
    alpha: float = option(0.75, "exponent of that weight")
    epochs: int = option(15, "passes over the pairs")
    steps: int | None = optional_count("batches to train on, instead of --epochs")
    batch: int = option(8192, "pairs per batch")


def run(settings: Settings) -> int:
    """Counts, trains, saves the vectors and prints a report.

    Returns the exit status: 0, or STOPPED if Ctrl-C ended the training early. After Ctrl-C, the
    results so far are saved and reported.
    """
    device = choose_device(settings)
    corpus = Corpus.read(settings.corpus, min_count=settings.min_count)
    words = corpus.words
    weight = {"x_max": settings.x_max, "alpha": settings.alpha}
    model = GloVe(len(words), settings.dim, **weight, device=device, memory=settings.memory)
    optimizer = make_optimizer(settings.optimizer, settings.lr, model.parameters())
    attach(optimizer, model)
    make_folder(settings.out)
    print(f"text       {corpus}", flush=True)
    pairs = count_cooccurrence(corpus, window=settings.window, label="counting")
    batches = PairBatches(
        pairs,
        batch=settings.batch,
        epochs=settings.epochs,
        steps=settings.steps,
        seed=settings.seed,
        device=device,
    )
    model.reset_parameters(settings.seed)
    report.reset_gpu_peak(device)
    with interrupt() as stop:
        outcome = train(model, optimizer, batches, stop=stop, label="training")
        chosen = content_words(corpus, _NEIGHBOURS_OF)
        facts = {
            **report.run_facts(settings, device, model.embeddings, outcome),
            "words": len(words),
            "pairs": len(pairs),
            "neighbours": nearest_neighbours(model.vectors, words, chosen),
        }
        paths = report.save_results(settings.out, model.vectors, words, facts)
        lines = [
            f"pairs      {len(pairs):,} unique pairs within {settings.window} words",
            *report.training_lines(facts, "pairs", per=" per pair", digits=4),
            *report.memory_lines(facts),
        ]
        report.print_report(facts, paths, lines)
    return ended(outcome.finished)

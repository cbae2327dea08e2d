"""What is told and kept after training."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from speedtorch.demo.evaluate import Rows, Score, row_blocks
from speedtorch.demo.loop import Outcome
from speedtorch.demo.skipgram import SIDES, SkipGram
from speedtorch.files.new_files import replace_files
from speedtorch.files.npy_format import npy_header
from speedtorch.nn.embedding import Embedding

__all__ = [
    "compare",
    "memory_lines",
    "peak_gpu_bytes",
    "peak_host_bytes",
    "print_report",
    "run_facts",
    "save_results",
    "size_text",
]

# How far a figure may be from plain torch's on a GPU, where sums are formed in any order.
_GPU_TOLERANCE = 0.01


def save_results(
    folder: Path, rows: Rows, words: Sequence[str], facts: Mapping[str, Any]
) -> list[Path]:
    """Writes vectors and what is known about them; all of the files, or none.

    Args:
        folder: made if it is not there.
        rows: gives the trained vectors.
        words: the vocabulary, `[V]`.
        facts: to be kept as JSON.

    Returns:
        The files: `vectors.npy` `[V, D]` float32; `vectors.txt` with the words, in word2vec's text
        format (gensim: `KeyedVectors.load_word2vec_format`), whose digits give the same float32
        back; `report.json`.

    Raises:
        OSError: a file cannot be written; earlier ones are as they were.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in ("vectors.npy", "vectors.txt", "report.json")]
    dim = rows(torch.zeros(1, dtype=torch.int64)).shape[1]
    line = "%s" + " %.9g" * dim + "\n"
    with replace_files(paths) as (array, text, report):
        array.write(npy_header((len(words), dim), torch.float32))
        text.write(f"{len(words)} {dim}\n".encode())
        done = 0
        for block in row_blocks(rows, len(words)):
            array.write(block.contiguous().numpy().tobytes())
            named = zip(words[done : done + len(block)], block.tolist(), strict=True)
            text.write("".join(line % (word, *values) for word, values in named).encode())
            done += len(block)
        report.write(json.dumps(dict(facts), indent=2).encode() + b"\n")
    return paths


def peak_host_bytes() -> int | None:
    """The most host memory that this process has held so far; None where nobody counts it."""
    try:
        import resource
    except ImportError:  # not a Unix system
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_gpu_bytes(device: torch.device) -> int | None:
    """The most GPU memory that torch has given out since its peak was reset; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def size_text(count: int | None) -> str:
    """A number of bytes in words."""
    return "not counted here" if count is None else f"{count / 1e6:,.1f} MB"


def run_facts(
    settings: Any, device: torch.device, embeddings: Sequence[Embedding], outcome: Outcome
) -> dict[str, Any]:
    """What is kept of every run: its settings, where it ran, what memory it took, what it did.

    Args:
        settings: a dataclass.
        device: did the work.
        embeddings: the model's.
        outcome: what training did.
    """
    choices = asdict(settings)
    return {
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in choices.items()},
        "device": str(device),
        "memory": embeddings[0].table.memory,
        "table_bytes": sum(embedding.table.nbytes for embedding in embeddings),
        "peak_gpu_bytes": peak_gpu_bytes(device),
        "peak_host_bytes": peak_host_bytes(),
        "training": asdict(outcome),
    }


def memory_lines(facts: Mapping[str, Any]) -> list[str]:
    """The lines of a report that tell what memory the run took."""
    gpu = facts["peak_gpu_bytes"]
    return [
        f"tables     {size_text(facts['table_bytes'])}, {facts['memory']} memory, optimizer state"
        " included",
        f"peak       {size_text(facts['peak_host_bytes'])} of host memory"
        + ("" if gpu is None else f", {size_text(gpu)} on the GPU"),
    ]


def print_report(facts: Mapping[str, Any], paths: Sequence[Path]) -> None:
    """Prints what a run did, learnt and saved.

    Args:
        facts: as in `report.json`.
        paths: the files saved.
    """
    training, held = facts["training"], facts["held_out"]
    speed = training["words"] / training["seconds"]
    lines = [
        f"time       {training['seconds']:.1f} s on {facts['device']}: {training['steps']:,} steps,"
        f" {training['pairs']:,} pairs, {speed:,.0f} words/s",
        f"loss       {training['losses'][0]:.3f} per pair at first, {training['losses'][-1]:.3f} at"
        " the end",
        *memory_lines(facts),
    ]
    if held:
        lines.append(
            f"held out   AUC {held['auc']:.4f}, log-likelihood {held['log_likelihood']:.4f} on"
            f" {held['pairs']:,} pairs kept out of training"
        )
    lines.append("nearest")
    lines += [f"  {word:11}{', '.join(near)}" for word, near in facts["neighbours"].items()]
    lines.append(f"saved      {', '.join(map(str, paths))}")
    print("\n".join(lines), flush=True)


def compare(
    device: torch.device,
    words: int,
    ours: tuple[SkipGram, Outcome, Score | None],
    theirs: tuple[SkipGram, Outcome, Score | None],
) -> dict[str, Any]:
    """Compares a run with the same one in plain torch, and prints what came out.

    Args:
        device: what trained both.
        words: rows of each table.
        ours: model, outcome and score of our run.
        theirs: those of the other.

    Returns:
        `same`: on the CPU, whether all rows of both tables are equal bit for bit; on a GPU, whether
        scores and last loss are within 1 %. `identical`, `farthest` (largest difference of two
        numbers in the tables), `seconds`, `auc`, `log_likelihood`, `loss` and `peak_gpu_bytes` of
        plain torch.
    """
    identical, farthest = True, 0.0
    for side in SIDES:
        one_side, other_side = (partial(run[0].rows, side) for run in (ours, theirs))
        blocks = zip(row_blocks(one_side, words), row_blocks(other_side, words), strict=True)
        for one, other in blocks:
            identical &= torch.equal(one.view(torch.int32), other.view(torch.int32))
            farthest = max(farthest, (one - other).abs().max().item())
    figures = {"loss": (ours[1].losses[-1], theirs[1].losses[-1])}
    if ours[2] and theirs[2]:
        figures["auc"] = (ours[2].auc, theirs[2].auc)
        figures["log_likelihood"] = (ours[2].log_likelihood, theirs[2].log_likelihood)
    near = all(abs(one - other) <= _GPU_TOLERANCE * abs(other) for one, other in figures.values())
    same = identical if device.type == "cpu" else near
    told = ", ".join(
        f"{name.replace('_', '-')} {other:.4f}" for name, (_, other) in figures.items()
    )
    print(
        f"plain      torch on full-size tensors: {theirs[1].seconds:.1f} s, {told}"
        + ("" if device.type == "cpu" else f", peak {size_text(peak_gpu_bytes(device))} on the GPU")
        + "\nagreement  "
        + ("bit for bit" if identical else f"numbers differ by {farthest:.2g} at most")
        + ("" if same else ": MORE THAN THEY SHOULD"),
        flush=True,
    )
    return {
        "same": same,
        "identical": identical,
        "farthest": farthest,
        "seconds": theirs[1].seconds,
        "peak_gpu_bytes": peak_gpu_bytes(device),
        **{name: other for name, (_, other) in figures.items()},
    }

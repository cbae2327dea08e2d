"""What is told and kept after training."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from speedtorch.demo.evaluate import Rows, row_blocks
from speedtorch.demo.loop import Outcome
from speedtorch.demo.processes import ALONE, Processes
from speedtorch.demo.settings import RunSettings
from speedtorch.files.new_files import replace_files
from speedtorch.files.npy_format import npy_header
from speedtorch.files.table_files import write_safetensors
from speedtorch.nn.row_module import RowModule

__all__ = [
    "forget_gpu_peak",
    "json_bytes",
    "memory_lines",
    "peak_gpu_bytes",
    "peak_host_bytes",
    "print_report",
    "run_facts",
    "save_checkpoint",
    "save_model",
    "save_results",
    "size_text",
    "training_lines",
]


def json_bytes(facts: Mapping[str, Any]) -> bytes:
    """What `report.json` holds."""
    return json.dumps(dict(facts), indent=2).encode() + b"\n"


def save_results(
    folder: Path, rows: Rows, words: Sequence[str], facts: Mapping[str, Any]
) -> list[Path]:
    """Writes the vectors of `words` and what is known about them; all of the files, or none.

    They are `vectors.npy` `[V, D]` float32; `vectors.txt` with the words, in word2vec's text format
    (gensim: `KeyedVectors.load_word2vec_format`), whose digits give the same float32 back;
    `report.json`.
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
        report.write(json_bytes(facts))
    return paths


def save_model(folder: Path, model: nn.Module, facts: Mapping[str, Any]) -> list[Path]:
    """Writes a model's state dict and what is known about it; both files, or none."""
    paths = [folder / name for name in ("model.safetensors", "report.json")]
    with replace_files(paths) as (saved, told):
        write_safetensors(saved, model.state_dict())
        told.write(json_bytes(facts))
    return paths


def save_checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, facts: Mapping[str, Any]
) -> list[Path]:
    """Writes what all processes have of a model and its optimizer, and report.json after it.

    Every process calls it, each with its share. torch.distributed.checkpoint.load reads it, into
    {"model": ..., "optimizer": ...} with state dicts of one process or of any number of them. A
    checkpoint that was there before cannot be read any more once this one has begun.
    """
    from torch.distributed.checkpoint.state_dict_saver import save  # only this needs it

    paths = [folder / "checkpoint", folder / "report.json"]
    (paths[0] / ".metadata").unlink(missing_ok=True)  # of other shares than those written now
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    save(states, checkpoint_id=paths[0])
    if torch.distributed.get_rank() == 0:
        with replace_files(paths[1:]) as (told,):
            told.write(json_bytes(facts))
    return paths


def peak_host_bytes() -> int | None:
    """The most host memory that this process has held so far; None where none is counted."""
    try:
        import resource
    except ImportError:  # not a Unix system
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def forget_gpu_peak(device: torch.device) -> None:
    """Begins to count for peak_gpu_bytes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gpu_bytes(device: torch.device) -> int | None:
    """The most GPU memory that torch has given out since its peak was reset; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def size_text(count: int | None) -> str:
    """A number of bytes in words."""
    return "not counted here" if count is None else f"{count / 1e6:,.1f} MB"


def run_facts(
    settings: RunSettings,
    device: torch.device,
    embeddings: Sequence[RowModule],
    outcome: Outcome,
    processes: Processes = ALONE,
) -> dict[str, Any]:
    """What is kept of every run: its settings, where it ran, what memory it took, what it did.

    The tables are those of all processes, the peaks those of this one.
    """
    choices = asdict(settings)
    table_bytes = sum(embedding.table.nbytes for embedding in embeddings)
    return {
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in choices.items()},
        "device": str(device),
        "processes": processes.size,
        "memory": embeddings[0].table.memory,
        "table_bytes": int(processes.summed(torch.tensor(table_bytes))),
        "peak_gpu_bytes": peak_gpu_bytes(device),
        "peak_host_bytes": peak_host_bytes(),
        "training": asdict(outcome),
    }


def training_lines(
    facts: Mapping[str, Any], unit: str, counted: str = "", *, each: str = "", digits: int = 3
) -> list[str]:
    """The lines of a report that tell how fast the run was, and how well it learnt."""
    training = facts["training"]
    first, last = (f"{training['losses'][place]:.{digits}f}" for place in (0, -1))
    counts = f"{training[counted]:,} {counted}, " if counted else ""
    speed = training[unit] / training["seconds"]
    return [
        f"time       {training['seconds']:.1f} s on {facts['device']}: {training['steps']:,} steps,"
        f" {counts}{speed:,.0f} {unit}/s",
        f"loss       {first}{each} at first, {last} at the end",
    ]


def memory_lines(facts: Mapping[str, Any]) -> list[str]:
    """The lines of a report that tell what memory the run took."""
    gpu = facts["peak_gpu_bytes"]
    several = "" if facts["processes"] == 1 else f", on {facts['processes']} processes"
    first = ", by the first process" if several else ""
    return [
        f"tables     {size_text(facts['table_bytes'])}, {facts['memory']} memory, optimizer state"
        f" included{several}",
        f"peak       {size_text(facts['peak_host_bytes'])} of host memory"
        + ("" if gpu is None else f", {size_text(gpu)} on the GPU")
        + first,
    ]


def print_report(facts: Mapping[str, Any], paths: Sequence[Path], lines: Sequence[str]) -> None:
    """Prints what a run did, words' neighbours if it found some, and the files saved."""
    near = facts.get("neighbours")
    told = [*lines, *([] if near is None else ["nearest"])]
    told += [f"  {word:11}{', '.join(others)}" for word, others in (near or {}).items()]
    print("\n".join([*told, f"saved      {', '.join(map(str, paths))}"]), flush=True)

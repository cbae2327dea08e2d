"""Prints and saves the results of a training run."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from demos.batches import Outcome
from demos.processes import SINGLE_PROCESS, Processes
from demos.settings import CommonSettings
from speedtorch.files.new_files import replace_files
from speedtorch.files.table_files import write_safetensors
from speedtorch.nn.row_module import RowModule

__all__ = [
    "common_lines",
    "json_bytes",
    "peak_gpu_bytes",
    "peak_host_bytes",
    "reset_gpu_peak",
    "run_facts",
    "save_checkpoint",
    "save_model",
    "size_text",
]


def json_bytes(facts: Mapping[str, Any]) -> bytes:
    """The content of `report.json`."""
    return json.dumps(dict(facts), indent=2, default=str).encode() + b"\n"


def save_model(folder: Path, model: nn.Module, facts: Mapping[str, Any]) -> list[Path]:
    """Writes a model's state dict and the facts, either both files or none."""
    paths = [folder / name for name in ("model.safetensors", "report.json")]
    with replace_files(paths) as (state, report):
        write_safetensors(state, model.state_dict())
        report.write(json_bytes(facts))
    return paths


def save_checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, facts: Mapping[str, Any]
) -> list[Path]:
    """Writes a checkpoint of a sharded model and its optimizer, and then report.json.

    All processes call this function. torch.distributed.checkpoint.load reads the checkpoint into
    {"model": ..., "optimizer": ...} with the state dicts of any number of processes. An earlier
    checkpoint in the folder is unreadable from the start of this call.
    """
    # A slow import that only this function needs.
    from torch.distributed.checkpoint.state_dict_saver import save

    paths = [folder / "checkpoint", folder / "report.json"]
    # This file describes the earlier checkpoint.
    (paths[0] / ".metadata").unlink(missing_ok=True)
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    save(states, checkpoint_id=paths[0])
    if torch.distributed.get_rank() == 0:
        with replace_files(paths[1:]) as (report,):
            report.write(json_bytes(facts))
    return paths


def peak_host_bytes() -> int | None:
    """The peak host memory of this process; None if the system does not count it."""
    try:
        import resource
    except ImportError:  # not a Unix system
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_gpu_peak(device: torch.device) -> None:
    """Resets the peak of peak_gpu_bytes()."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gpu_bytes(device: torch.device) -> int | None:
    """The peak GPU memory that torch has allocated since the last reset; None on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def size_text(count: int | None) -> str:
    """Formats a number of bytes in MB."""
    return "not available" if count is None else f"{count / 1e6:,.1f} MB"


def run_facts(
    settings: CommonSettings,
    device: torch.device,
    embeddings: Sequence[RowModule],
    outcome: Outcome,
    processes: Processes = SINGLE_PROCESS,
) -> dict[str, Any]:
    """The facts about a run: settings, device, memory and training results.

    The size of tables is that of all processes; the peaks are those of this process.
    """
    tables = [embedding.table for embedding in embeddings]
    table_bytes = torch.tensor(sum(table.nbytes for table in tables))
    return {
        "settings": asdict(settings),
        "device": str(device),
        "processes": processes.size,
        "memory": tables[0].memory if tables else None,
        "table_bytes": int(processes.sum(table_bytes)),
        "peak_gpu_bytes": peak_gpu_bytes(device),
        "peak_host_bytes": peak_host_bytes(),
        "training": asdict(outcome),
    }


def common_lines(facts: Mapping[str, Any], example: str, unit: str) -> list[str]:
    """The lines of a report about speed, loss and memory."""
    training, gpu = facts["training"], facts["peak_gpu_bytes"]
    first, last = (f"{training['losses'][place]:.4f}" for place in (0, -1))
    speed = training.get(unit, training["examples"]) / training["seconds"]
    several = "" if facts["processes"] == 1 else f", on {facts['processes']} processes"
    lines = [
        f"time       {training['seconds']:.1f} s on {facts['device']}: {training['steps']:,} steps,"
        f" {training['examples']:,} {example}s, {speed:,.0f} {unit}/s",
        f"loss       {first} per {example} at first, {last} at the end",
        f"tables     {size_text(facts['table_bytes'])}, {facts['memory']} memory, with optimizer"
        f" state{several}",
        f"peak       {size_text(facts['peak_host_bytes'])} of host memory"
        + ("" if gpu is None else f", {size_text(gpu)} on the GPU")
        + (", in the first process" if several else ""),
    ]
    return lines if facts["table_bytes"] else [*lines[:2], lines[3]]

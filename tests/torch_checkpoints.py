"""Checkpoints of a model and its optimizers by torch, for the tests of resumed training."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as checkpoint
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

__all__ = ["Training", "WithCheckpoint", "through_a_file"]

Training = tuple[nn.Module, list[optim.Optimizer]]


def through_a_file(value: Any, *, weights_only: bool = True) -> Any:
    """The value as torch.load returns it after torch.save."""
    torch.save(value, file := io.BytesIO())
    return torch.load(io.BytesIO(file.getvalue()), weights_only=weights_only)


class WithCheckpoint:
    """torch.distributed.checkpoint, with names instead of numbers."""

    def __init__(self, **options: bool) -> None:
        self.options = StateDictOptions(**options)

    def save(self, training: Training, path: Path) -> None:
        state = get_state_dict(*training, options=self.options)
        checkpoint.save({"model": state[0], "optimizer": state[1]}, checkpoint_id=path)

    def load(self, training: Training, path: Path) -> None:
        model_state, optimizer_state = get_state_dict(*training, options=self.options)
        state = {"model": model_state, "optimizer": optimizer_state}
        checkpoint.load(state, checkpoint_id=path)
        set_state_dict(
            *training,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=self.options,
        )

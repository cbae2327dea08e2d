"""CapturingGraphs: whether CUDA graphs that use the same memory still exist."""

from __future__ import annotations

import gc
import time

import torch
from torch import Tensor

from speedtorch.ops.functions import _ops

__all__ = ["CapturingGraphs"]

_SECONDS_TO_GO = 0.2
"""How long remain() waits for CUDA's own thread, which reports a freed graph."""


class CapturingGraphs:
    """Tracks CUDA graphs from their capture until CUDA has freed them."""

    def __init__(self) -> None:
        self._captures: list[int] = []

    def watch(self, on: Tensor) -> None:
        """Adds the graph that is being captured on the device of tensor `on`."""
        self._captures.append(_ops.watch_graph(on))

    @property
    def are_alive(self) -> bool:
        """Whether one of the graphs still exists."""
        alive = _ops.graph_is_alive
        self._captures = [capture for capture in self._captures if alive(capture)]
        return bool(self._captures)

    def remain(self, device: torch.device) -> bool:
        """Waits until CUDA can free deleted graphs; returns whether a graph still exists."""
        if not self.are_alive:
            return False
        gc.collect()
        torch.cuda.synchronize(device)
        until = time.monotonic() + _SECONDS_TO_GO
        while self.are_alive and time.monotonic() < until:
            time.sleep(1e-3)
        return self.are_alive

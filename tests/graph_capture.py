"""Work captured in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch

import speedtorch


def captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Runs the work once on a side stream, as torch asks for, then captures it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    speedtorch.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph

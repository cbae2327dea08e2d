"""Host buffers: pinned, through small buffers, or as torch copies; the bytes are the same."""

from __future__ import annotations

import pytest
import torch
from conftest import NEEDS_GPU
from offloaded_models import with_steps
from torch import nn, optim

from speedtorch.layers import host_buffer
from speedtorch.layers.host_buffer import Stage, host_bytes
from speedtorch.memory import host_memory


@pytest.mark.parametrize("nbytes", [0, 1, 99, 100, 101, 200, 1234])
def test_staged_copies_are_bitwise_identical(device: str, nbytes: int) -> None:
    stage = Stage(torch.device(device), 100)
    random = torch.Generator().manual_seed(nbytes)
    given = torch.randint(256, (nbytes,), generator=random, dtype=torch.uint8)
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    back = torch.empty(nbytes, dtype=torch.uint8)
    for _ in range(2):
        stage.fill(given, there)
        assert torch.equal(there.cpu(), given)
        stage.drain(back, there)
        assert torch.equal(back, given)
        given += 1


@NEEDS_GPU
@pytest.mark.parametrize("pinned", [0, 2])
def test_modules_in_pageable_memory_are_loaded_and_evicted(
    monkeypatch: pytest.MonkeyPatch, pinned: int
) -> None:
    made = []

    def empty(size: int, *, dtype: torch.dtype, memory: str) -> torch.Tensor:
        """Pins as many buffers, and no flat buffer."""
        if memory == "registered":
            made.append(size)
            if size != 1000 or made.count(1000) > pinned:
                raise RuntimeError("no more pages")
        return real(size, dtype=dtype, memory=memory)

    real = host_memory.empty
    monkeypatch.setattr(host_memory, "empty", empty)
    monkeypatch.setattr(host_buffer, "STAGE_BYTES", 1000)
    for cached in (host_buffer._stage, host_buffer._warn_once):
        cached.cache_clear()
    with pytest.warns(UserWarning, match="pageable host memory, whose copies are slower: no more"):
        layer = nn.Linear(30, 30)
        before = layer.weight.detach().clone()
        optimizer = optim.SGD(layer.parameters(), lr=1.0)
        module = with_steps(layer, optimizer, device="cuda")
    assert (host_buffer._stage(module.device) is not None) == bool(pinned)
    module.load()
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    module.evict()
    assert torch.equal(layer.weight.detach(), before - 1)
    for cached in (host_buffer._stage, host_buffer._warn_once):
        cached.cache_clear()


def test_bytes_for_the_cpu_are_not_pinned() -> None:
    assert host_memory.memory_kind(host_bytes(10, torch.device("cpu"))) == "plain"

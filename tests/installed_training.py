"""A program for an installed wheel: three steps of training, with the numbers of torch in place.

`make wheel` runs it in an environment without a compiler, outside the checkout. With --cuda it
fails if the library has no CUDA kernels.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import speedtorch

ROWS, COLUMNS, STEPS = 1_000, 16, 3


def trained(embedding: torch.nn.Embedding, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """All rows after three steps, whose ids have duplicates. [ROWS, COLUMNS]"""
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        ids = torch.randint(ROWS, (256,), generator=generator)
        embedding(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return embedding.weight.detach().cpu()


def main() -> None:
    """Trains both and compares them."""
    plain = torch.nn.Embedding(ROWS, COLUMNS, sparse=True)
    first = plain.weight.detach().clone()
    ours = speedtorch.Embedding.from_pretrained(first.clone(), freeze=False)
    # The two add eps at different places: so small a one makes their numbers the same.
    adam = torch.optim.Adam(ours.parameters(), lr=0.1, eps=1e-30)
    speedtorch.attach(adam, ours)
    rows = trained(ours, adam)
    sparse_adam = torch.optim.SparseAdam(plain.parameters(), lr=0.1, eps=1e-30)
    expected = trained(plain, sparse_adam)
    torch.testing.assert_close(rows, expected)
    assert not torch.equal(rows, first), "no row was trained"
    kernels = speedtorch.info().kernels
    assert "--cuda" not in sys.argv or "CUDA" in kernels, f"its kernels are for {kernels}"
    place = Path(speedtorch.__file__).parent
    print(f"{STEPS} steps as torch does them, with kernels for {kernels}, in {place}")


if __name__ == "__main__":
    main()

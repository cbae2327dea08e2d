"""Trains a model larger than its memory budget: each layer is on the device only while in use.

A residual network of 24 blocks with AdamW. The budget of the device is a quarter of the memory of
weights, gradients and optimizer state. `auto(step=True)` steps each block in the backward pass.

    python swapper.py
    python swapper.py --plain  # the whole model on the device, with the same numbers
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import speedtorch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    """A residual block with two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[samples, width]` to the same shape."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


def built(width: int, blocks: int) -> tuple[nn.Sequential, nn.Linear]:
    """Creates the blocks and the head in host memory."""
    torch.manual_seed(0)
    with speedtorch.host_init():
        return nn.Sequential(*(Block(width) for _ in range(blocks))), nn.Linear(width, 1)


def main(arguments: list[str] | None = None) -> list[float]:
    """Trains and returns the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--plain", action="store_true", help="keep the whole model on the device")
    chosen = parser.parse_args(arguments)
    model, head = built(chosen.width, chosen.blocks)
    head.to(DEVICE)
    if chosen.plain:
        model.to(DEVICE)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-3)
    swapper = None
    if not chosen.plain:
        weights = sum(param.nbytes for param in model.parameters())
        swapper = speedtorch.Swapper(model, optimizer, device=DEVICE, budget=weights)
        swapper.auto(step=True)
    random, losses = torch.Generator().manual_seed(1), []
    for step in range(chosen.steps):
        x = torch.randn(64, chosen.width, generator=random).to(DEVICE)
        loss = (head(model(x)).squeeze(1) - x.sum(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if not step % 5:
            print(f"step {step}: loss {losses[-1]:.3f}")
    if swapper is not None:
        print(swapper.report())
        swapper.close()
    return losses


if __name__ == "__main__":
    main()

"""Trains on two or more ranks: each rank owns a shard of the rows, and saves and loads it.

torchrun --nproc-per-node 2 two_ranks.py
python two_ranks.py  # one process trains on the batches of both ranks, with the same rows
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn

import speedtorch

ON_GPU = torch.cuda.is_available()
ROWS, COLUMNS, SIZE = 10_000, 64, 256


class Model(nn.Module):
    """Maps eight ids to a score."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.items = speedtorch.Embedding(ROWS, COLUMNS, device=device)

    def forward(self, ids: Tensor) -> Tensor:
        """Maps ids `[samples, 8]` to scores `[samples]`."""
        return self.items(ids).sum(1).mean(1)


def main(arguments: list[str] | None = None) -> None:
    """Trains on this rank's batches and saves the rows of all ranks as one checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("two_ranks_checkpoint"))
    chosen = parser.parse_args(arguments)
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("cpu:gloo,cuda:nccl" if ON_GPU else "gloo")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if ON_GPU else "cpu"
    model = Model(torch.device(device))
    if distributed:
        speedtorch.shard(model, average=False)  # sums the gradients of all ranks
    generator = torch.Generator().manual_seed(0)
    model.load_state_dict({"items.weight": torch.randn(ROWS, COLUMNS, generator=generator)})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    speedtorch.attach(optimizer, model)
    for _ in range(chosen.steps):
        both = torch.randint(ROWS, (2, SIZE, 8), generator=generator)
        own = both[rank::ranks] if distributed else both
        for ids in own:
            model(ids.to(device)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint.save(state, checkpoint_id=chosen.out, no_dist=not distributed)
    if rank == 0:
        print(f"{chosen.steps} steps on {ranks} ranks, saved in {chosen.out}")
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

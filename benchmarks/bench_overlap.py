"""Training where the compute takes as long as the exchange: how much of the latter still shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn, optim

import speedtorch
from benchmarks.bench_embedding import COLUMNS, batches_of
from benchmarks.harness import Report
from benchmarks.overlap import measure_overlap
from benchmarks.sizes import DEVICE, SIZES
from benchmarks.training import Loop, step_figure

EXPONENT = 1.05
LAYERS = 2


class Tower(nn.Module):
    """An embedding and dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = speedtorch.Embedding(SIZES.rows, COLUMNS, device=DEVICE)
        layers = [nn.Linear(COLUMNS, COLUMNS, device=DEVICE) for _ in range(LAYERS)]
        self.layers = nn.Sequential(*(part for each in layers for part in (each, nn.ReLU())))

    def forward(self, ids: Tensor) -> Tensor:
        return self.layers(self.rows(ids)).square().mean()


def loop_of(tower: Tower, optimizer: optim.Optimizer, *, ahead: bool) -> Loop:
    """Trains on batch after batch."""

    def loop(given: Sequence[Tensor]) -> Iterator[None]:
        for ids in speedtorch.prefetch(given, tower, ids=lambda ids: ids) if ahead else given:
            optimizer.zero_grad()
            tower(ids).backward()
            optimizer.step()
            yield

    return loop


def main() -> None:
    """Measures and stores all figures in one run."""
    title = f"{LAYERS} dense layers behind an embedding, {SIZES.large_batch:,} ids, Zipf {EXPONENT}"
    report = Report("overlap", title)
    tower = Tower()
    optimizer = optim.Adam(tower.parameters(), fused=True)
    speedtorch.attach(optimizer, tower)
    for ahead in (False, True):
        name = "speedtorch, prefetch" if ahead else "speedtorch"
        loop = loop_of(tower, optimizer, ahead=ahead)
        report.add(step_figure("step", name, loop, batches_of(EXPONENT), kind="ours", ahead=ahead))
    loop = loop_of(tower, optimizer, ahead=True)
    report.extra = measure_overlap(loop, batches_of(EXPONENT, 9))
    for key in ("exchange_ms", "compute_ms", "share_hidden"):
        if key in report.extra:
            print(f"overlap: {key} {report.extra[key]:.3f}", flush=True)
    report.save()


if __name__ == "__main__":
    main()

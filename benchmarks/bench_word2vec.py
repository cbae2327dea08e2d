"""word2vec steps of the seed's size: two tables, few rows a step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import speedtorch
from benchmarks.harness import Report, turns
from benchmarks.peers import cupy_view, has_cupy
from benchmarks.sections import zipf_ids
from benchmarks.sizes import DEVICE, SIZES
from benchmarks.training import Loop, step_figure

COLUMNS = 128
POSITIVES, NEGATIVES = 4, 64
CENTRES = SIZES.centres
STEPS = 60


@dataclass
class Batch:
    """Row ids of a step."""

    centres: Tensor
    positives: Tensor
    negatives: Tensor


def batches(rows: int = SIZES.rows, steps: int = STEPS) -> list[Batch]:
    """Frequent words are frequent everywhere."""

    def ids(*shape: int) -> Tensor:
        return zipf_ids(rows, torch.Size(shape).numel()).view(shape)

    return [
        Batch(ids(CENTRES), ids(CENTRES, POSITIVES), ids(CENTRES, NEGATIVES)) for _ in turns(steps)
    ]


def loss_of(centres: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
    """Skip-gram with negative sampling: `[n, D]`, `[n, p, D]`, `[n, q, D]`."""
    columns = centres.unsqueeze(2)
    near, far = torch.bmm(positives, columns), torch.bmm(negatives, columns)
    return -(F.logsigmoid(near).sum() + F.logsigmoid(-far).sum()) / len(centres)


class SkipGram(nn.Module):
    """Two tables of one kind."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.u, self.v = make(), make()

    def forward(self, batch: Batch) -> Tensor:
        return loss_of(self.u(batch.centres), self.v(batch.positives), self.v(batch.negatives))


def loop_of(model: SkipGram, optimizer: optim.Optimizer, *, ahead: bool = False) -> Loop:
    """Trains on batch after batch; our rows come by announce or prefetch."""
    announces = isinstance(model.v, speedtorch.Embedding) and not ahead

    def ids(batch: Batch) -> dict[nn.Module, list[Tensor]]:
        return {model.u: [batch.centres], model.v: [batch.positives, batch.negatives]}

    def loop(given: Sequence[Batch]) -> Iterator[None]:
        for batch in speedtorch.prefetch(given, model, ids=ids) if ahead else given:
            if announces:
                model.u.announce(batch.centres)
                model.v.announce(batch.positives, batch.negatives)
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
            yield

    return loop


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SparseAdam": lambda parameters: optim.SparseAdam(list(parameters)),
    "Adam, fused": lambda parameters: optim.Adam(parameters, fused=True),
    "Adamax": lambda parameters: optim.Adamax(parameters),
}


def ours(report: Report) -> None:
    """Rows and state in host memory."""
    for name in OPTIMIZERS:
        ours_with(name, report)
        gc.collect()


def ours_with(name: str, report: Report) -> None:
    """One optimizer; its tables go with this call, as the loops that hold them do."""
    model = SkipGram(lambda: speedtorch.Embedding(SIZES.rows, COLUMNS, device=DEVICE))
    optimizer = OPTIMIZERS[name](model.parameters())
    speedtorch.attach(optimizer, model)
    for ahead in (False, True):
        title = f"speedtorch, {name}{', prefetch' if ahead else ''}"
        loop = loop_of(model, optimizer, ahead=ahead)
        figure = step_figure(
            "step", title, loop, batches(), kind="ours", optimizer=name, ahead=ahead
        )
        report.add(figure)


def torchs(report: Report) -> None:
    """Everything in the memory of the GPU."""
    for name, sparse in (("SparseAdam", True), ("Adamax", False)):
        model = SkipGram(
            lambda sparse=sparse: nn.Embedding(SIZES.rows, COLUMNS, sparse=sparse, device=DEVICE)
        )
        optimizer = OPTIMIZERS[name](model.parameters())
        title = f"torch, {'sparse' if sparse else 'dense'} {name}, all in GPU memory"
        loop = loop_of(model, optimizer)
        given = batches() if sparse else batches()[:12]
        figure = step_figure("step", title, loop, given, kind="torch", optimizer=name)
        report.add(figure)
        del model, optimizer, loop
        gc.collect()


class Slots(SkipGram):
    """The model as SpeedTorch has it used: holds one batch's rows, and is called with positions."""

    def __init__(self) -> None:
        sizes = iter((CENTRES, CENTRES * (POSITIVES + NEGATIVES)))
        super().__init__(lambda: nn.Embedding(next(sizes), COLUMNS, device=DEVICE))
        centres = torch.arange(CENTRES, device=DEVICE)
        others = torch.arange(self.v.num_embeddings, device=DEVICE)
        near, far = others.split([CENTRES * POSITIVES, CENTRES * NEGATIVES])
        self._positions = Batch(centres, near.view(CENTRES, -1), far.view(CENTRES, -1))

    def loss(self) -> Tensor:
        loss: Tensor = self(self._positions)
        return loss


def ids_of(batch: Batch) -> dict[str, Tensor]:
    """The ids of each variable, one for each slot."""
    return {
        "u": batch.centres,
        "v": torch.cat([batch.positives.flatten(), batch.negatives.flatten()]),
    }


def factories(report: Report) -> None:
    """ModelFactory and OptimizerFactory, which the user calls before and after each step."""
    model = Slots()
    optimizer = optim.Adamax(model.parameters())
    switchers = {}
    for name in ("u", "v"):
        table = speedtorch.HostTable(SIZES.rows, COLUMNS, state=("exp_avg", "exp_inf"))
        weights = speedtorch.ModelFactory(
            getattr(model, name), SIZES.rows, COLUMNS, CPUPinn=True, table=table
        )
        states = speedtorch.OptimizerFactory(
            optimizer, SIZES.rows, COLUMNS, model, name, CPUPinn=True, table=table
        )
        states.optInit()
        switchers[name] = (weights, states)

    def loop(given: Sequence[Batch]) -> Iterator[None]:
        for batch in given:
            ids = ids_of(batch)
            for name, pair in switchers.items():
                for switcher in pair:
                    switcher.beforeForwardPass(ids[name])
            optimizer.zero_grad()
            model.loss().backward()
            optimizer.step()
            for name, pair in switchers.items():
                for switcher in pair:
                    switcher.afterOptimizerStep(ids[name])
            yield

    title = "speedtorch, ModelFactory and OptimizerFactory, Adamax"
    report.add(step_figure("step", title, loop, batches(), kind="factories", optimizer="Adamax"))


def cupys(report: Report) -> None:
    """A loop as SpeedTorch wrote it with CuPy: zero-copy take before, put after a step.

    Its ids are NumPy arrays, which each take and put brings to the GPU.
    """
    model = Slots()
    optimizer = optim.Adamax(model.parameters())
    model.loss().backward()
    optimizer.step()
    memory = "registered" if DEVICE == "cuda" else "plain"
    shape = (SIZES.rows, COLUMNS)
    tables = {
        name: {
            field: cupy_view(speedtorch.empty(shape, memory=memory))
            for field in ("weight", "exp_avg", "exp_inf")
        }
        for name in ("u", "v")
    }

    def held(name: str) -> dict[str, Tensor]:
        weight = getattr(model, name).weight
        state = optimizer.state[weight]
        return {"weight": weight.data, "exp_avg": state["exp_avg"], "exp_inf": state["exp_inf"]}

    def loop(given: Sequence[Any]) -> Iterator[None]:
        for ids in given:
            for name, fields in tables.items():
                for field, rows in held(name).items():
                    rows.copy_(torch.as_tensor(fields[field].take(ids[name], axis=0)))
            optimizer.zero_grad()
            model.loss().backward()
            optimizer.step()
            for name, fields in tables.items():
                for field, rows in held(name).items():
                    fields[field][ids[name]] = cupy_view(rows)
            yield

    title = "CuPy zero-copy, as SpeedTorch did, Adamax"
    given = [
        {name: ids.cpu().numpy() for name, ids in ids_of(batch).items()} for batch in batches()
    ]
    report.add(step_figure("step", title, loop, given, kind="CuPy", optimizer="Adamax"))


def main() -> None:
    """Measures and stores all figures in one run."""
    title = (
        f"word2vec, {CENTRES} centres, {POSITIVES} positives and {NEGATIVES} negatives each, "
        f"2 tables of {SIZES.rows:,} x {COLUMNS}"
    )
    report = Report("word2vec", title)
    torchs(report)
    ours(report)
    factories(report)
    gc.collect()
    if has_cupy():
        cupys(report)
    report.save()


if __name__ == "__main__":
    main()

"""Steps of rows that are shared out among GPUs, beside those of one GPU that has them all."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn, optim

import speedtorch
from benchmarks import bench_embedding, bench_many_tables, bench_word2vec
from benchmarks.harness import WARM_UPS, Measured, event, figure_of, forget, synchronize
from benchmarks.sizes import DEVICE, SIZES
from benchmarks.training import loop_of, prefetched, step_figure
from speedtorch.parallel.ranks import Ranks
from speedtorch.parallel.shard import shard

RANKS = 2
EXPONENT = 1.05
STEPS = 30
TITLE = f"steps of {RANKS} ranks and of one, Adam, {SIZES.rows:,} x {bench_embedding.COLUMNS}"


def measured() -> Measured:
    """One process alone, then as many as there are GPUs to take."""
    for size in (1, RANKS):
        if DEVICE == "cuda" and torch.cuda.device_count() < size:
            yield "left out", f"{size} GPUs, of which this machine has {torch.cuda.device_count()}"
            return
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_rank, (size, folder), size)  # type: ignore[no-untyped-call]
            yield from torch.load(Path(folder, "told"), weights_only=False)


def _rank(rank: int, size: int, folder: str) -> None:
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, f"file://{folder}/meet", rank=rank, world_size=size)
    torch.manual_seed(rank)
    told: list[Any] = []
    for way in (large_steps, small_steps, many_tables):
        told += way(size)
        gc.collect()
    if rank == 0:
        torch.save(told, Path(folder, "told"))
    dist.barrier()
    dist.destroy_process_group()


def titled(size: int, what: str) -> str:
    """The name of a figure."""
    return f"{what}, {f'each of {size} GPUs' if size > 1 else 'one GPU'}"


def shared(model: nn.Module, size: int) -> None:
    """Shares the rows out, if there are several ranks."""
    if size > 1:
        shard(model)


@contextmanager
def timed_exchanges(found: list[tuple[Any, Any]]) -> Iterator[None]:
    """Notes when rows and gradients set off and arrive on the stream of the step."""

    def noted(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def timed(*given: Any) -> Tensor:
            begin, end = event(), event()
            begin.record()
            result = call(*given)
            end.record()
            found.append((begin, end))
            return result

        return timed

    with (
        patch.object(Ranks, "bring", noted(Ranks.bring)),
        patch.object(Ranks, "give_back", noted(Ranks.give_back)),
    ):
        yield


def not_waiting(times: list[tuple[Any, Any]]) -> list[float]:
    """The exchanges of each step, on the rank that comes last to them, as it waits for nobody."""
    own = torch.tensor([begin.elapsed_time(end) for begin, end in times], device=DEVICE)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    steps = torch.stack(every).amin(0).view(-1, 2).sum(1)  # rows come, gradients go
    return steps[WARM_UPS:].tolist()


def large_steps(size: int) -> Measured:
    """Many ids a step: as many on each GPU, and as many in all."""
    module = speedtorch.Embedding(SIZES.rows, bench_embedding.COLUMNS, device=DEVICE)
    shared(module, size)
    optimizer = optim.Adam(module.parameters(), fused=True)
    speedtorch.attach(optimizer, module)
    for count in sorted({SIZES.large_batch, SIZES.large_batch // size}, reverse=True):
        gradient = torch.randn(count, bench_embedding.COLUMNS, device=DEVICE)

        def backward(ids: Tensor, gradient: Tensor = gradient) -> None:
            module(ids).backward(gradient)

        for ahead in (False, True):
            forget()
            every = bench_embedding.batches_of(EXPONENT, STEPS)
            ids = [each[:count].clone() for each in every]
            loader = prefetched(module) if ahead else iter
            title = titled(size, f"{count:,} ids{', prefetch' * ahead}")
            told = {"ranks": size, "ids": count, "ahead": ahead}
            loop = loop_of(optimizer, backward, loader=loader)
            yield step_figure("large batches", title, loop, ids, **told)
        times: list[tuple[Any, Any]] = []
        with timed_exchanges(times):
            step_figure("", "", loop, ids)
        synchronize()
        if size > 1:
            told["ahead"] = "exchanges"
            yield figure_of("rows and gradients between GPUs", title, not_waiting(times), **told)


def small_steps(size: int) -> Measured:
    """word2vec: two tables, few rows a step."""
    make = bench_word2vec.SkipGram
    columns = bench_word2vec.COLUMNS
    model = make(lambda: speedtorch.Embedding(SIZES.rows, columns, device=DEVICE))
    shared(model, size)
    optimizer = optim.Adam(model.parameters(), fused=True)
    speedtorch.attach(optimizer, model)
    for ahead in (False, True):
        loop = bench_word2vec.skip_gram_loop(model, optimizer, ahead=ahead)
        title = titled(size, "prefetch" if ahead else "announce")
        told = {"ranks": size, "ahead": ahead}
        yield step_figure("word2vec", title, loop, bench_word2vec.batches(), **told)


def many_tables(size: int) -> Measured:
    """26 tables and a dense part, which DistributedDataParallel trains."""
    work = bench_many_tables.Work.of(len(bench_many_tables.KAGGLE))
    top = bench_many_tables.Top(work)
    model = bench_many_tables.collection(work)
    if size > 1:
        shard(model)
        given = {"device_ids": [torch.cuda.current_device()]} if DEVICE == "cuda" else {}
        top.net = nn.parallel.DistributedDataParallel(top.net, **given)
    optimizer = optim.Adam(model.parameters(), fused=True)
    speedtorch.attach(optimizer, model)
    train = top.train_on(lambda batch: model(batch).values(), [optimizer])
    for ahead in (False, True):
        loader = prefetched(model) if ahead else iter
        title = titled(size, f"{work.samples:,} samples{', prefetch' * ahead}")
        told = {"ranks": size, "ahead": ahead}

        def loop(batches: Any, loader: Any = loader) -> Any:
            return train(loader(batches))

        yield step_figure("26 tables", title, loop, work.batches(), **told)

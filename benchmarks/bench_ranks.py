"""Steps of rows that are shared out among GPUs, beside those of one GPU that has them all."""

from __future__ import annotations

import datetime
import gc
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn, optim
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

import speedtorch
from benchmarks import bench_embedding, bench_many_tables, bench_word2vec, torchrec_ranks
from benchmarks.harness import WARM_UPS, Measured, event, figure_of, forget, synchronize
from benchmarks.sizes import DEVICE, SIZES
from benchmarks.training import graph_loop, loop_of, prefetched, step_figure
from speedtorch.parallel.ranks import Ranks
from speedtorch.parallel.shard import shard

Way: TypeAlias = Callable[[int], Measured]
"""What each of a number of ranks does."""

RANKS = 2
EXPONENT = 1.05
STEPS = 30
TITLE = f"steps of {RANKS} ranks and of one, Adam, {SIZES.rows:,} x {bench_embedding.COLUMNS}"


def measured() -> Measured:
    """One process alone, then as many as there are GPUs to take; a peer after all of ours.

    Each of its tables has processes of its own: an error ends the figures of that table alone.
    """
    for size in (1, RANKS):
        if DEVICE == "cuda" and torch.cuda.device_count() < size:
            yield "left out", f"{size} GPUs, of which this machine has {torch.cuda.device_count()}"
            return
        yield from told_by(size, WAYS)
    for place in torchrec_ranks.places():
        try:
            yield from told_by(RANKS, [partial(torchrec_steps, place)])
        except (ProcessExitedException, ProcessRaisedException) as failure:
            yield f"TorchRec, {place.name}, failed", str(failure)


def told_by(size: int, ways: Sequence[Way]) -> Measured:
    """What the first of a number of ranks measures, also if one of them ends before its time."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "told")
        try:
            mp.spawn(_rank, (size, told, ways), size)  # type: ignore[no-untyped-call]
        finally:
            if told.exists():
                yield from torch.load(told, weights_only=False)


def _rank(rank: int, size: int, path: Path, ways: Sequence[Way]) -> None:
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    waits = datetime.timedelta(minutes=3)  # then a rank that others wait for in vain ends them
    meeting = f"file://{path.parent}/meet"
    dist.init_process_group(backend, meeting, timeout=waits, rank=rank, world_size=size)
    torch.manual_seed(rank)
    told: list[Any] = []
    for way in ways:
        for each in way(size):
            told.append(each)
            if rank == 0:
                torch.save(told, path)
        gc.collect()
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
        patch.object(Ranks, "send_rows", noted(Ranks.send_rows)),
        patch.object(Ranks, "send_gradients", noted(Ranks.send_gradients)),
    ):
        yield


def not_waiting(times: list[tuple[Any, Any]]) -> list[float]:
    """The exchanges of each step, on the rank that comes last to them, as it waits for no other."""
    own = torch.tensor([begin.elapsed_time(end) for begin, end in times], device=DEVICE)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    steps = torch.stack(every).amin(0).view(-1, 2).sum(1)  # rows come, gradients go
    return steps[WARM_UPS:].tolist()


def counts(size: int) -> list[int]:
    """Ids of a step: as many on each GPU as on one alone, and as many in all."""
    return sorted({SIZES.large_batch, SIZES.large_batch // size}, reverse=True)


def batches(count: int) -> list[Tensor]:
    """The ids of this rank's steps, `[count]` each."""
    return [each[:count].clone() for each in bench_embedding.batches_of(EXPONENT, STEPS)]


def large_steps(size: int) -> Measured:
    """Many ids a step."""
    module = speedtorch.Embedding(SIZES.rows, bench_embedding.COLUMNS, device=DEVICE)
    shared(module, size)
    optimizer = optim.Adam(module.parameters(), fused=True)
    speedtorch.attach(optimizer, module)
    for count in counts(size):
        gradient = torch.randn(count, bench_embedding.COLUMNS, device=DEVICE)

        def backward(ids: Tensor, gradient: Tensor = gradient) -> None:
            module(ids).backward(gradient)

        for ahead in (False, True):
            forget()
            ids = batches(count)
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


def torchrec_steps(place: torchrec_ranks.Place, size: int) -> Measured:
    """The same with TorchRec's table."""
    gradient = torch.randn(SIZES.large_batch, bench_embedding.COLUMNS, device=DEVICE)
    table = torchrec_ranks.Table(SIZES.rows, place, gradient)
    for count in counts(size):
        for ahead, loop in ((False, table.steps), (True, table.pipelined)):
            forget()
            what = f"TorchRec, row-wise, {place.name}, {count:,} ids{', pipelined' * ahead}"
            told = {"kind": "TorchRec", "ranks": size, "ids": count, "ahead": ahead}
            given = [table.batch(ids) for ids in batches(count)]
            yield step_figure("large batches", titled(size, what), loop, given, **told)


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


def small_steps_in_a_graph(size: int) -> Measured:
    """The same in a CUDA graph."""
    model, optimizer = bench_word2vec.in_blocks(size, 1.0, lambda model: shared(model, size))
    first, *given = bench_word2vec.batches()
    loop = graph_loop(bench_word2vec.graphed(model, optimizer, first, ahead=False))
    told = {"ranks": size, "ahead": "graph"}
    yield step_figure("word2vec", titled(size, "CUDA graph"), loop, given, **told)


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


def many_tables_in_a_graph(size: int) -> Measured:
    """The same step in a CUDA graph, which also averages the dense part's gradients."""
    work = bench_many_tables.Work.of(len(bench_many_tables.KAGGLE))
    top, (first, *given) = bench_many_tables.Top(work), work.batches()
    counts = [sum(len(ids.unique()) for ids in batch.by_table) for batch in given]
    most = torch.tensor(max(counts), device=DEVICE)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    model = bench_many_tables.collection(work, int(1.5 * most))
    shared(model, size)
    optimizer = optim.Adam(model.parameters(), fused=True, capturable=True)
    speedtorch.attach(optimizer, model)

    def step(batch: bench_many_tables.Batch) -> None:
        optimizer.zero_grad()
        top.sgd.zero_grad()
        top(model(batch).values()).backward()
        if size > 1:
            for parameter in top.net.parameters():
                parameter.grad /= size
                dist.all_reduce(parameter.grad)
        optimizer.step()
        top.sgd.step()

    both = [optimizer, top.sgd]
    loop = graph_loop(speedtorch.graphed(step, first, modules=model, optimizers=both))
    title = titled(size, f"{work.samples:,} samples, CUDA graph")
    yield step_figure("26 tables", title, loop, given, ranks=size, ahead="graph")


WAYS = [large_steps, small_steps, small_steps_in_a_graph, many_tables, many_tables_in_a_graph]

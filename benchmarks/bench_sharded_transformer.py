"""A transformer whose shards two GPUs have by FSDP2, with its state or all of it in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn, optim

import speedtorch
from benchmarks.bench_ranks import RANKS, told_by
from benchmarks.bench_transformer import (
    FULL,
    TOKENS,
    WARM,
    Transformer,
    adam,
    batches,
    built,
    timed,
    trained,
)
from benchmarks.harness import Figure, Measured, figure_of, forget
from benchmarks.sizes import DEVICE
from speedtorch.memory.byte_count import text_of

TITLE = f"a transformer of 8 billion parameters in shards on {RANKS} GPUs, bfloat16, AdamW"
BUDGET = 12 << 30 if FULL else 1 << 14
ALONE = "FSDP2, all on the GPUs"
OURS = f"speedtorch, StateSwapper, at most {text_of(BUDGET)}"
OFFLOADED = "FSDP2's CPUOffloadPolicy"
STEPPED = f"{OFFLOADED}, stepped by speedtorch's StateSwapper, at most {text_of(BUDGET)}"

_Way = tuple[nn.Module, Callable[[Tensor], Tensor]]
"""The model, and a step of it."""


def measured() -> Measured:
    """Each way in processes of its own, first all on the GPUs: how fast a step can be."""
    if DEVICE == "cuda" and torch.cuda.device_count() < RANKS:
        yield "left out", f"{RANKS} GPUs, of which this machine has {torch.cuda.device_count()}"
        return
    yield from told_by(RANKS, [partial(steps, ALONE, on_gpus)])
    yield from told_by(RANKS, [partial(steps, OURS, state_on_host)])
    yield from told_by(RANKS, [partial(steps, STEPPED, stepped_on_gpus)])
    yield from told_by(RANKS, [partial(steps, OFFLOADED, offloaded, few=True)])


def steps(
    name: str, way: Callable[[], _Way], size: int, *, few: bool = False
) -> Iterator[Figure | tuple[str, object]]:
    """Steps of one way; `few`: of those that take seconds."""
    model, step = way()
    for tokens in TOKENS:
        data, begin = batches(tokens), 1 if few else WARM
        times, losses = timed(step, data[:3] if few else data)
        yield figure_of(f"{tokens} tokens a step on each of {size} GPUs", name, times[begin:])
        yield f"{name}, losses of {tokens}", [float(each) for each in losses]
    if DEVICE == "cuda":
        yield f"{name}, GiB at most on a GPU", torch.cuda.max_memory_allocated() / 2**30
    del model, step
    forget()


def in_shards(device: str, **policy: object) -> Transformer:
    """The model, a block at a time."""
    from torch.distributed.fsdp import fully_shard

    model = built(device)
    for each in (*model, model):
        fully_shard(each, **policy)  # type: ignore[call-overload]
    return model


def on_gpus() -> _Way:
    """Weights, gradients and state in the memory of the GPUs."""
    model = in_shards(DEVICE)
    return model, trained(model, adam(model))


def state_on_host() -> _Way:
    """The optimizer's state in host memory, which steps bring piece by piece."""
    model = in_shards(DEVICE)
    optimizer: optim.Optimizer = adam(model)
    swapper = speedtorch.StateSwapper(optimizer, budget=BUDGET)
    step = trained(model, optimizer)
    return model, lambda words, swapper=swapper: step(words)  # type: ignore[misc]


def offloaded() -> _Way:
    """All in host memory, where the optimizer steps."""
    model = in_host_memory()
    return model, trained(model, adam(model))


def stepped_on_gpus() -> _Way:
    """All in host memory; what a step needs comes to the GPU for it, piece by piece."""
    model = in_host_memory()
    optimizer: optim.Optimizer = adam(model)
    swapper = speedtorch.StateSwapper(optimizer, budget=BUDGET, device=DEVICE)
    step = trained(model, optimizer)
    return model, lambda words, swapper=swapper: step(words)  # type: ignore[misc]


def in_host_memory() -> Transformer:
    """The model in shards that FSDP2 brings layer by layer."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    return in_shards("cpu", offload_policy=CPUOffloadPolicy(pin_memory=DEVICE == "cuda"))

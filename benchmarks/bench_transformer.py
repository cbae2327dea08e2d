"""A transformer of 8 billion parameters with AdamW, trained in a fraction of a GPU's memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

import speedtorch
from benchmarks.harness import Figure, Measured, figure_of, forget, synchronize
from benchmarks.sizes import DEVICE, SIZES

TITLE = "a transformer that is larger than the memory it trains in"

FULL = SIZES.is_large
GIB = 1 << 30
WIDTH, HEADS, KEY_HEADS, INNER = (4096, 32, 8, 14336) if FULL else (64, 4, 2, 224)
LAYERS, WORDS = (36, 32000) if FULL else (12, 100)
TOKENS = tuple(
    int(each) for each in os.environ.get("TOKENS", "8192 16384" if FULL else "32").split()
)
CAP = 24 * GIB
UNITS = 12 * GIB if FULL else 2 << 20
"""Of the cap: what offloaded modules take at most."""
WARM, STEPS = (2, 5) if FULL else (1, 2)


class Attention(nn.Module):
    """Causal, with fewer heads of keys than of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.size = WIDTH // HEADS
        self.queries = nn.Linear(WIDTH, WIDTH, bias=False)
        self.keys, self.values = (
            nn.Linear(WIDTH, KEY_HEADS * self.size, bias=False) for _ in range(2)
        )
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for each in (self.queries, self.keys, self.values)
        )
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(found.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, and a gated layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Transformer(nn.Sequential):
    """Words `[sequences, length + 1]` to the loss; blocks compute their activations twice."""

    def __init__(self) -> None:
        blocks = (Block() for _ in range(LAYERS))
        ends = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False))
        super().__init__(nn.Embedding(WORDS, WIDTH), *blocks, ends)

    def forward(self, words: Tensor) -> Tensor:
        embedding, *blocks, ends = self
        x = embedding(words[:, :-1])
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return F.cross_entropy(ends(x).flatten(0, 1), words[:, 1:].flatten())


def built(device: str) -> Transformer:
    """Of bfloat16, without memory for anything larger meanwhile."""
    with torch.device("meta"):
        model = Transformer().to(torch.bfloat16)
    model.to_empty(device=device)
    torch.manual_seed(1)
    drawn = torch.empty(1 << 24 if FULL else 1 << 12, dtype=torch.bfloat16).normal_(std=0.02)
    drawn = drawn.to(device)
    with torch.no_grad():
        for each in model.parameters():
            if each.dim() == 1:
                each.fill_(1)
                continue
            for part in each.view(-1).split(drawn.numel()):
                part.copy_(drawn[: part.numel()])
    return model


def batches(tokens: int) -> list[Tensor]:
    """Of sequences of at most 4096 words."""
    length = min(tokens, 4096)
    size = tokens // length, length + 1
    return [torch.randint(WORDS, size, device=DEVICE) for _ in range(WARM + STEPS)]


def timed(step: Callable[[Tensor], Tensor], data: list[Tensor]) -> tuple[list[float], list[Tensor]]:
    """Milliseconds of each step, and its loss."""
    times, losses = [], []
    for words in data:
        synchronize()
        begin = time.perf_counter()
        losses.append(step(words))
        synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    print([round(each) for each in times], flush=True)
    return times, losses


def trained(model: Transformer, optimizer: optim.Optimizer) -> Callable[[Tensor], Tensor]:
    """A step of it."""

    def step(words: Tensor) -> Tensor:
        loss = model(words)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def adam(model: Transformer) -> optim.Optimizer:
    """Whose state is of bfloat16 as well."""
    return optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def measured() -> Measured:
    """All of it on the GPU, which is the time to compute; then within the cap."""
    data = {tokens: batches(tokens) for tokens in TOKENS}
    found: dict[int, list[float]] = {}
    computed = {}
    model = built(DEVICE)
    step = trained(model, adam(model))
    for tokens, words in data.items():
        _, first = timed(step, words[:WARM])
        times, rest = timed(step, words[WARM:])
        found[tokens] = [float(each) for each in (*first, *rest)]
        computed[tokens] = figure_of(f"{tokens} tokens a step", "all on the GPU", times)
        yield computed[tokens]
    del model, step
    forget()
    yield from swapped(data, found, computed)
    forget()
    if FULL:
        yield from sharded(data[TOKENS[0]], computed[TOKENS[0]])


def swapped(
    data: dict[int, list[Tensor]], losses: dict[int, list[float]], computed: dict[int, Figure]
) -> Iterator[Figure | tuple[str, object]]:
    """The same model in host memory."""
    if FULL:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(CAP / whole)
    begin = time.perf_counter()
    model = built("cpu")
    print(f"built in {time.perf_counter() - begin:.1f} s", flush=True)
    optimizer = adam(model)
    swapper = speedtorch.Swapper(model, optimizer, device=DEVICE, budget=UNITS)
    print(f"modules offloaded in {time.perf_counter() - begin:.1f} s", flush=True)
    step = trained(model, optimizer)
    with swapper.auto(step=True):
        for tokens, words in data.items():
            _, first = timed(step, words[:WARM])
            before = swapper.report()
            times, rest = timed(step, words[WARM:])
            after, count = swapper.report(), len(times)
            found = [float(each) for each in (*first, *rest)]
            came = (after.bytes_in - before.bytes_in) / count
            left = (after.bytes_out - before.bytes_out) / count
            print(after, flush=True)
            yield figure_of(
                f"{tokens} tokens a step",
                "speedtorch, at most 24 GiB",
                times,
                bound=computed[tokens],
                nbytes=came + left,
                came=came,
                left=left,
                misses=(after.misses - before.misses) / count,
            )
            yield f"losses of {tokens}", [losses[tokens], found]
        yield "report", str(swapper.report())
    if FULL:
        yield "peak GiB", torch.cuda.max_memory_reserved() / GIB
        yield "peak GiB in use", torch.cuda.max_memory_allocated() / GIB
        torch.cuda.set_per_process_memory_fraction(1.0)
    needed = sum(each.nbytes for each in model.parameters())
    needed += sum(
        each.nbytes
        for kept in optimizer.state.values()
        for each in kept.values()
        if isinstance(each, Tensor)
    )
    yield "host bytes, of what is needed", swapper.report().host_bytes / needed
    swapper.close()


def sharded(data: list[Tensor], computed: Figure) -> Iterator[Figure]:
    """By fully_shard with its CPUOffloadPolicy, whose optimizer runs on the CPU."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    model = built("cpu")
    for each in (*model, model):
        fully_shard(each, offload_policy=CPUOffloadPolicy())
    step = trained(model, adam(model))
    timed(step, data[:1])
    times, _ = timed(step, data[1:3])
    section = f"{data[0].numel() - len(data[0])} tokens a step"
    name = "FSDP2's CPUOffloadPolicy, one GPU"
    yield figure_of(section, name, times, bound=computed)
    dist.destroy_process_group()

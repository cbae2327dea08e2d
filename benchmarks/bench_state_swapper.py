"""AdamW whose state is in host memory: streamed through its steps by us, and as others do it.

All ways begin a step with gradients where they take them: on the GPU, or on the host for those that
step there, which a backward hides. A package that is missing leaves its way out, and so does a
DeepSpeed that finds no compiler: it builds its step when that is first used.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn, optim

import speedtorch
from benchmarks.bench_host_memory import status_bytes
from benchmarks.harness import (
    WARM_UPS,
    Figure,
    Measured,
    figure_of,
    forget,
    synchronize,
    turns,
    wall_ms,
)
from benchmarks.sizes import DEVICE, SIZES

FULL = SIZES.is_large
WIDTH = SIZES.swapped_width
BLOCK = 12 * WIDTH * WIDTH
"""Parameters of a block's matrices, and of the embedding."""
BLOCKS = math.ceil(SIZES.swapped_parameters / BLOCK) - 1
SHAPES = (
    (12 * WIDTH, WIDTH),
    *(
        shape
        for _ in range(BLOCKS)
        for shape in (
            (WIDTH,),
            (3 * WIDTH, WIDTH),
            (WIDTH, WIDTH),
            (WIDTH,),
            (4 * WIDTH, WIDTH),
            (WIDTH, 4 * WIDTH),
        )
    ),
)
COUNT = sum(math.prod(shape) for shape in SHAPES)
NBYTES = 2 * 4 * COUNT
"""Of exp_avg and exp_avg_sq."""
TITLE = (
    f"a step of AdamW with {COUNT:,} parameters in {len(SHAPES)} tensors, whose"
    f" {NBYTES / 1e9:.2f} GB of state cross the link each way"
)
SECTION = "step"
RATES = {"lr": 1e-4, "weight_decay": 0.01}


class LeftOutError(Exception):
    """A way cannot be measured here; says why."""


@dataclass
class Way:
    """An optimizer that is ready to step.

    Attributes:
        step: what is measured.
        prepare: brings gradients to where the step takes them.
        facts: more of it, asked for at the end.
    """

    step: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    facts: Callable[[], dict[str, Any]] = dict


Parameters: TypeAlias = list[nn.Parameter]


def model() -> Parameters:
    """Weights with gradients, the same each time."""
    torch.manual_seed(1)
    made = []
    for shape in SHAPES:
        made.append(nn.Parameter(torch.randn(shape, device=DEVICE)))
        made[-1].grad = torch.randn(shape, device=DEVICE)
    return made


def all_on_gpu(parameters: Parameters) -> Way:
    """Plain AdamW."""
    return Way(optim.AdamW(parameters, fused=True, **RATES).step)


def ours(parameters: Parameters, budget: int, stored: torch.dtype | None = None) -> Way:
    """A StateSwapper around the same AdamW."""
    optimizer = optim.AdamW(parameters, fused=True, **RATES)
    swapper = speedtorch.StateSwapper(optimizer, budget=budget, stored=stored)

    def facts() -> dict[str, Any]:
        told = swapper.report()
        return {"pieces": told.num_buckets, "GB/s in": told.gbps_in, "GB/s out": told.gbps_out}

    return Way(lambda: optimizer.step(), facts=facts)


def of_torchao(parameters: Parameters) -> Way:
    """CPUOffloadOptimizer: weights and state on the host, and the step on its CPU."""
    kind = imported("torchao.optim").CPUOffloadOptimizer
    if not FULL:
        raise LeftOutError("torchao's CPUOffloadOptimizer needs a GPU")
    optimizer = kind(parameters, optim.AdamW, fused=True, **RATES)
    nothing = [torch.zeros((), device=DEVICE).expand_as(each) for each in parameters]
    # Its hooks of the backward copy gradients to the host.
    return Way(optimizer.step, lambda: torch.autograd.backward(parameters, nothing))


def of_bitsandbytes(parameters: Parameters) -> Way:
    """PagedAdamW: state in managed memory, which leaves the GPU where that is full."""
    kind = imported("bitsandbytes.optim").PagedAdamW
    if not FULL:
        raise LeftOutError("bitsandbytes pages nothing without a GPU")
    return Way(kind(parameters, optim_bits=32, **RATES).step)


def of_deepspeed(parameters: Parameters) -> Way:
    """DeepSpeedCPUAdam: weights and state on the host, and the step on its CPU."""
    kind = imported("deepspeed.ops.adam").DeepSpeedCPUAdam
    on_host = [nn.Parameter(pinned(each)) for each in parameters]
    for host, each in zip(on_host, parameters, strict=True):
        assert each.grad is not None
        host.grad = pinned(each.grad)
    try:
        optimizer = kind(on_host, **RATES)
    except Exception as error:  # of any kind: it compiles
        raise LeftOutError(f"DeepSpeed cannot build its step here: {error}") from error

    def gradients_to_host() -> None:
        for host, each in zip(on_host, parameters, strict=True):
            host.grad.copy_(each.grad, non_blocking=True)

    @torch.no_grad()
    def step() -> None:
        optimizer.step()
        for host, each in zip(on_host, parameters, strict=True):
            each.copy_(host, non_blocking=True)

    return Way(step, gradients_to_host)


def pinned(tensor: Tensor) -> Tensor:
    """A copy in host memory, as torch pins it."""
    made = torch.empty_like(tensor, device="cpu", pin_memory=FULL)
    return made.copy_(tensor.detach())


def imported(name: str) -> Any:
    """A module of a package that may be missing."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # a library that finds no CUDA raises errors of many kinds
        raise LeftOutError(f"{name} cannot be imported: {error}") from error


ON_GPU = "torch, all on the GPU"
OTHERS: dict[str, Callable[[Parameters], Way]] = {
    "torchao, CPUOffloadOptimizer": of_torchao,
    "DeepSpeed, DeepSpeedCPUAdam": of_deepspeed,
    "bitsandbytes, PagedAdamW, 32 bits": of_bitsandbytes,
}
"""The last one never frees its managed memory."""


def memcpy() -> Figure:
    """As many bytes in and out at once, by one buffer each way."""
    size = min(SIZES.run_bytes, NBYTES)
    kind = "registered" if FULL else "plain"
    host = [speedtorch.empty((size,), dtype=torch.uint8, memory=kind) for _ in range(2)]
    device = [torch.empty(size, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    streams = [torch.cuda.Stream() if FULL else None for _ in range(2)]
    pairs = [(device[0], host[0]), (host[1], device[1])]

    def both_ways(_: object) -> None:
        for begin in range(0, NBYTES, size):
            count = min(size, NBYTES - begin)
            for stream, (target, source) in zip(streams, pairs, strict=True):
                with torch.cuda.stream(stream):
                    target[:count].copy_(source[:count], non_blocking=True)

    times = [wall_ms(both_ways) for _ in turns(SIZES.swapped_steps)]
    name = "bound: memcpy of the state, both ways at once"
    return figure_of(SECTION, name, times[WARM_UPS:], nbytes=2 * NBYTES, kind="bound")


def digest(parameters: Parameters) -> int:
    """A number that other bits have too, but for a small chance."""
    words = (each.detach().view(torch.int32) for each in parameters)
    return sum((number + 1) * int(each.sum()) for number, each in enumerate(words))


def used_bytes() -> int:
    """Of the GPU's memory, as the driver counts it: managed memory as well."""
    if not FULL:
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def stepped(name: str, make: Callable[[Parameters], Way], bound: Figure, **told: Any) -> Measured:
    """One way, on a model of its own."""
    release()
    parameters = model()
    synchronize()
    begun = used_bytes()
    given = torch.cuda.memory_allocated() if FULL else 0
    resident = status_bytes("VmRSS:")
    try:
        way = make(parameters)
    except LeftOutError as reason:
        yield f"left out: {name}", str(reason).partition("\n")[0]
        return
    times: list[float] = []
    begin = time.perf_counter()
    for turn in turns(SIZES.swapped_steps):
        way.prepare()
        synchronize()
        if turn == 1:
            forget()  # what the first step alone has taken, to make state
        if FULL and turn == WARM_UPS:
            torch.cuda.reset_peak_memory_stats()
        times.append(wall_ms(lambda _: way.step()))
    seconds = time.perf_counter() - begin
    facts: dict[str, Any] = {
        "the first step, ms": round(times[0], 1),
        "GPU bytes beside, at the peak": torch.cuda.max_memory_allocated() - given if FULL else 0,
        "GPU bytes beside, by the driver": used_bytes() - begun,
        "host bytes": status_bytes("VmRSS:") - resident,
        "digest of the weights": digest(parameters),
        "seconds in all": round(seconds, 1),
    }
    yield figure_of(SECTION, name, times[WARM_UPS:], bound=bound, **told)
    yield name, facts | way.facts()


def release() -> None:
    """Gives cached memory back, pinned memory of torch as well."""
    forget()
    if FULL and (empty := getattr(torch._C, "_host_emptyCache", None)) is not None:
        empty()


def measured() -> Measured:
    """The bound, all on the GPU, ours by budget, and others."""
    bound = memcpy()
    yield bound
    yield from stepped(ON_GPU, all_on_gpu, bound, kind="all on the GPU")
    yield from by_budgets(bound)
    for name, make in OTHERS.items():
        yield from stepped(name, make, bound, kind="others")


def by_budgets(bound: Figure) -> Iterator[Figure | tuple[str, Any]]:
    """Ours, with room for more and for fewer bytes of state."""
    for budget in SIZES.swapped_budgets:
        name = f"speedtorch, StateSwapper, at most {said(budget)}"
        make = partial(ours, budget=budget)
        yield from stepped(name, make, bound, kind="ours", budget=budget)
    make = partial(ours, budget=budget, stored=torch.bfloat16)
    yield from stepped(f"{name}, bfloat16", make, bound, kind="ours, bfloat16", budget=budget)


def said(nbytes: int) -> str:
    """As 512 MiB."""
    size, unit = (nbytes >> 20, "MiB") if nbytes >> 20 else (nbytes >> 10, "KiB")
    return f"{size:,} {unit}"

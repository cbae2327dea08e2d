"""Units of layers between host memory and the GPU: one, both ways at once, and in training."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

import speedtorch
from benchmarks.harness import (
    WARM_UPS,
    Figure,
    Measured,
    figure_of,
    forget,
    measure,
    synchronize,
    turns,
    wall_ms,
)
from benchmarks.sizes import DEVICE, SIZES
from speedtorch.layers import OffloadedModule, Swapper

TITLE = "units of layers between host memory and the GPU"

FULL = SIZES.is_large
WIDTH, NARROW = (4096, 256) if FULL else (64, 32)
EXPERTS, ACTIVE, STEPS = (32, 2, 24) if FULL else (8, 2, 4)
TOKENS = 8192 if FULL else 16


def layers(width: int = WIDTH) -> nn.Module:
    """As many bytes of weights as a contiguous range of the other benchmarks has."""
    count = max(1, SIZES.run_bytes // (4 * width * width))
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


def nbytes_of(module: nn.Module) -> int:
    """Of its parameters."""
    return sum(each.nbytes for each in module.parameters())


def apart(run: Callable[[], object], again: Callable[[], object]) -> list[float]:
    """Milliseconds of a call, each after another that undoes it."""
    times = []
    for _ in turns():
        times.append(wall_ms(lambda _: run()))
        again()
        synchronize()
    return times[WARM_UPS:]


def measured() -> Measured:
    """One module of 1 GiB, of large tensors and of small ones; the host's time; experts."""
    bounds = list(memcpy(nbytes_of(layers())))
    yield from bounds
    for width in (WIDTH, NARROW):
        forget()
        count = len(list(layers(width).parameters()))
        section = f"one unit of {count} tensors"
        yield from as_modules(section, width, *bounds)
        forget()
        yield from as_others(section, width, *bounds[:2])
    forget()
    yield from host_time()
    forget()
    yield from experts()


def memcpy(nbytes: int) -> Iterator[Figure]:
    """To the GPU, to the host, and both at once."""
    kind = "registered" if FULL else "plain"
    host = [speedtorch.empty((nbytes // 4,), memory=kind) for _ in range(2)]
    device = [torch.empty(nbytes // 4, device=DEVICE) for _ in range(2)]

    def copy(pair: tuple[Tensor, Tensor]) -> None:
        pair[0].copy_(pair[1], non_blocking=True)

    for to, target, source in (("to the GPU", device, host), ("to the host", host, device)):
        name = f"of registered memory {to}: the bound"
        yield measure("memcpy", name, copy, [(target[0], source[0])] * len(turns()), nbytes=nbytes)
    streams = [torch.cuda.Stream() if FULL else None for _ in range(2)]
    pairs = [(device[0], host[0]), (host[1], device[1])]

    def both() -> None:
        for stream, pair in zip(streams, pairs, strict=True):
            with torch.cuda.stream(stream):
                copy(pair)

    name = "both ways at once"
    yield figure_of("memcpy", name, apart(both, synchronize), nbytes=2 * nbytes)


def as_modules(
    section: str, width: int, to_gpu: Figure, to_host: Figure, both_ways: Figure
) -> Iterator[Figure]:
    """As speedtorch moves them."""
    first, second = (OffloadedModule(layers(width), device=DEVICE, name="layers") for _ in range(2))
    nbytes = first.groups.nbytes

    def leave() -> None:
        first.changes.touch()
        first.evict()

    def change_places() -> None:
        first.changes.touch()
        first.groups.write_back()
        second.prefetch()
        first.evict()

    def back() -> None:
        second.evict()
        first.load()

    for name, run, again, bound in (
        ("load", first.load, first.evict, to_gpu),
        ("evict what has changed", leave, first.load, to_host),
        ("evict one while another comes", change_places, back, both_ways),
    ):
        again()
        moved = nbytes * (1 + (run is change_places))
        times = apart(run, again)
        yield figure_of(section, f"speedtorch, {name}", times, nbytes=moved, bound=bound)
    first.close()
    second.close()


def as_others(section: str, width: int, to_gpu: Figure, to_host: Figure) -> Iterator[Figure]:
    """As others move them."""
    for make in (of_torch, tensor_by_tensor, of_accelerate, of_fsdp):
        module = layers(width)
        nbytes = nbytes_of(module)
        for name, come, leave, changes in make(module):
            come()
            for to, run, again, bound in (
                ("to the GPU", come, leave, to_gpu),
                ("to the host", leave, come, to_host),
            ):
                again()
                synchronize()
                times = apart(run, again)
                if run is come or changes:
                    told = f"{name}, {to}"
                    yield figure_of(section, told, times, nbytes=nbytes, bound=bound)
            leave()
        del module
        forget()


Mover: TypeAlias = tuple[str, Callable[[], object], Callable[[], object], bool]
"""A name, what brings a module to the GPU, what lets it leave, and whether changes go along."""


def of_torch(module: nn.Module) -> Iterator[Mover]:
    """As torch does."""
    yield "module.to()", lambda: module.to(DEVICE), lambda: module.to("cpu"), True


def tensor_by_tensor(module: nn.Module) -> Iterator[Mover]:
    """From pinned memory and back, as DeepSpeed's offload_states does."""
    parameters = list(module.parameters())
    pinned = [each.detach().pin_memory() if FULL else each.detach() for each in parameters]

    def come() -> None:
        for parameter, tensor in zip(parameters, pinned, strict=True):
            parameter.data = tensor.to(DEVICE, non_blocking=True)

    def leave() -> None:
        for parameter, tensor in zip(parameters, pinned, strict=True):
            tensor.copy_(parameter.detach(), non_blocking=True)
            parameter.data = tensor

    yield "each tensor, pinned", come, leave, True


def of_accelerate(module: nn.Module) -> Iterator[Mover]:
    """The hooks of its cpu_offload, which bring weights for a forward and drop them after it."""
    if find_spec("accelerate") is None:
        return
    from accelerate import cpu_offload  # type: ignore[import-not-found]

    cpu_offload(module, execution_device=torch.device(DEVICE))
    hooks = [(each, each._hf_hook) for each in module.modules() if hasattr(each, "_hf_hook")]

    def come() -> None:
        for each, hook in hooks:
            hook.pre_forward(each)

    def leave() -> None:
        for each, hook in hooks:
            hook.post_forward(each, None)

    yield "accelerate's cpu_offload, weights alone", come, leave, False


def of_fsdp(module: nn.Module) -> Iterator[Mover]:
    """fully_shard with its CPUOffloadPolicy, in a group of one process."""
    if not FULL:
        return
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    fully_shard(module, offload_policy=CPUOffloadPolicy())
    module(torch.zeros(1, module[0].in_features, device=DEVICE))  # makes what it needs
    yield "FSDP2's CPUOffloadPolicy, weights alone", module.unshard, module.reshard, False
    dist.destroy_process_group()


def host_time() -> Iterator[Figure]:
    """What the host does for modules of few and of many small tensors, with Adam's state."""
    for count in (2, 16, 64):
        module = nn.Sequential(*(nn.Linear(32, 32) for _ in range(count)))
        optimizer = optim.AdamW(module.parameters(), foreach=True)
        offloaded = OffloadedModule(module, optimizer, device=DEVICE)
        optimizer.register_step_post_hook(offloaded.changes.note_step)
        offloaded.load()
        module(torch.ones(4, 32, device=DEVICE)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        offloaded.evict()
        tensors = 6 * count
        loads, leaves = [], []
        for _ in turns(31):
            begin = time.perf_counter()
            offloaded.load()
            loads.append((time.perf_counter() - begin) * 1e3)
            synchronize()
            optimizer.step()  # changes none, and may have changed all
            offloaded.groups.write_back()
            offloaded.groups.wait()
            begin = time.perf_counter()
            offloaded.evict()
            leaves.append((time.perf_counter() - begin) * 1e3)
            synchronize()
        for name, times in (("load", loads), ("evict what is written back", leaves)):
            told = f"{name}, {tensors} tensors"
            yield figure_of("the host's time", told, times[WARM_UPS:], tensors=tensors)
        offloaded.close()


class Experts(nn.Module):
    """Of which each step uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor, numbers: list[int]) -> Tensor:
        found = [
            self.experts[each](part) for each, part in zip(numbers, x.chunk(ACTIVE), strict=True)
        ]
        return torch.cat(found)


def experts() -> Measured:
    """Steps of experts that all stay on the GPU, and of experts that come and go."""
    chosen = random.Random(1)
    plans = [chosen.sample(range(EXPERTS), ACTIVE) for _ in range(STEPS + 1)]
    x = torch.randn(TOKENS * ACTIVE, WIDTH, device=DEVICE)
    for kept in (True, False):
        torch.manual_seed(1)
        model = Experts()
        if kept:
            model.to(DEVICE)
        optimizer = optim.AdamW(model.parameters(), fused=True)
        swapper = None
        if not kept:
            budget = 4 * 3 * nbytes_of(model.experts[0]) + (64 << 20)
            swapper = Swapper(model.experts, optimizer, device=DEVICE, budget=budget)
        times: list[float] = []

        def step(numbers: list[int], model: Experts = model) -> None:
            model(x, numbers).square().mean().backward()

        for turn, (numbers, later) in enumerate(itertools.pairwise(plans * 2)):
            if turn == STEPS:
                synchronize()
                begin = time.perf_counter()
            mark = time.perf_counter()
            if swapper is None:
                step(numbers)
                optimizer.step()
            else:
                with swapper.use(*(model.experts[each] for each in numbers)):
                    swapper.prefetch(*(model.experts[each] for each in later), state=True)
                    step(numbers)
                    swapper.step()
            optimizer.zero_grad()
            times.append((time.perf_counter() - mark) * 1e3)
        synchronize()
        count = len(plans) * 2 - 1 - STEPS
        mean = (time.perf_counter() - begin) * 1e3 / count
        name = "all on the GPU" if kept else "at most 4 there, with prefetch"
        yield figure_of(f"{EXPERTS} experts, {ACTIVE} a step", name, [mean])
        if swapper is not None:
            print(swapper.report(), flush=True)
            yield "experts", str(swapper.report())
        del model, optimizer, swapper
        forget()

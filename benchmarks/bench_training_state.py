"""A whole training state to host memory and back, by us and as other programs do it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import speedtorch
from benchmarks.harness import (
    WARM_UPS,
    Figure,
    Measured,
    figure_of,
    forget,
    synchronize,
    timed,
    turns,
)
from benchmarks.sizes import DEVICE, SIZES


class Case(NamedTuple):
    """So many square matrices.

    Attributes:
        more: what the names of sections have.
    """

    tensors: int
    side: int
    more: str

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return self.tensors * self.side * self.side * 4

    @property
    def title(self) -> str:
        """Bytes and tensors."""
        return f"{self.nbytes / 1e9:.2f} GB in {self.tensors:,} tensors"


LARGE = Case(510, SIZES.state_side, "")
"""As in NVIDIA-NeMo/RL's issue 3976."""
SMALL = Case(SIZES.small_tensors, SIZES.small_side, ", small tensors")
TITLE = (
    f"{LARGE.title}, three of four of them changed in between, to host"
    " memory and back, the GPU's memory free meanwhile"
)

PAUSE = 0.1
"""Seconds asleep, in which something else would have the memory. Copies to memory that is made at
once after as much was freed take longer: ours to kept addresses 102 ms for 96 after 20 ms."""

_Way = tuple[Callable[[], object], Callable[[], object]]
"""Goes to sleep, and wakes."""


def model(case: Case) -> nn.ParameterList:
    """Matrices, every fourth of which is not trained."""
    made = (torch.randn(case.side, case.side, device=DEVICE) for _ in range(case.tensors))
    return nn.ParameterList(nn.Parameter(each, number % 4 > 0) for number, each in enumerate(made))


def empty_cache() -> None:
    """Gives the GPU's memory back."""
    synchronize()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def ours(parameters: nn.ParameterList, *, keep_addresses: bool = False) -> _Way:
    """A TrainingState."""
    state = speedtorch.TrainingState(parameters, keep_addresses=keep_addresses)
    return state.sleep, state.wake


def ours_in_place(parameters: nn.ParameterList) -> _Way:
    """A TrainingState whose tensors wake where they were; only a GPU has such addresses."""
    return ours(parameters, keep_addresses=DEVICE == "cuda")


def each_to(parameters: nn.ParameterList, *, non_blocking: bool) -> _Way:
    """`tensor.to()` for each, which makes memory every time, pinned if it is not to wait."""

    def move(device: str) -> None:
        for each in parameters:
            each.data = each.data.to(device, non_blocking=non_blocking)
        empty_cache()

    return (lambda: move("cpu")), (lambda: move(DEVICE))


def each_pinned(parameters: nn.ParameterList) -> _Way:
    """A copy of each to pinned memory that was made before."""
    pinned = [torch.empty_like(each, device="cpu") for each in parameters]
    if DEVICE == "cuda":
        pinned = [each.pin_memory() for each in pinned]

    def sleep() -> None:
        for each, host in zip(parameters, pinned, strict=True):
            host.copy_(each.data, non_blocking=True)
        synchronize()
        for each, host in zip(parameters, pinned, strict=True):
            each.data = host
        empty_cache()

    def wake() -> None:
        for each, host in zip(parameters, pinned, strict=True):
            each.data = host.to(DEVICE, non_blocking=True)
        synchronize()

    return sleep, wake


def module_to(parameters: nn.ParameterList) -> _Way:
    """`module.to()`, from memory to memory that is not pinned."""

    def sleep() -> None:
        parameters.to("cpu")
        empty_cache()

    return sleep, lambda: parameters.to(DEVICE)


def memcpy(case: Case) -> Iterator[Figure]:
    """The same bytes in one piece."""
    kind = "registered" if DEVICE == "cuda" else "plain"
    host = speedtorch.empty((case.nbytes // 4,), memory=kind)
    there = torch.empty_like(host, device=DEVICE)
    for name, to, given in (("asleep", host, there), ("awake", there, host)):
        times = [timed(lambda to=to, given=given: to.copy_(given)) for _ in turns()]  # type: ignore[misc]
        yield figure_of(name + case.more, "memcpy", times[WARM_UPS:], nbytes=case.nbytes)


def change(parameters: nn.ParameterList) -> None:
    """As a step does."""
    trained: list[Tensor] = [each for each in parameters if each.requires_grad]
    with torch.no_grad():
        torch._foreach_add_(trained, 1.0)


def measured() -> Measured:
    """Large tensors in each way; small ones in those that pin memory once."""
    ways: dict[str, Callable[[nn.ParameterList], _Way]] = {
        "speedtorch, TrainingState": ours,
        "speedtorch, keep_addresses=True": ours_in_place,
        "each tensor, pinned memory made once": each_pinned,
        "each tensor .to(), not blocking": lambda given: each_to(given, non_blocking=True),
        "each tensor .to()": lambda given: each_to(given, non_blocking=False),
        "module.to()": module_to,
    }
    yield from measured_case(LARGE, ways)
    few = {n: way for n, way in ways.items() if way in (ours, ours_in_place, each_pinned)}
    yield from measured_case(SMALL, few)


def measured_case(
    case: Case, ways: Mapping[str, Callable[[nn.ParameterList], _Way]]
) -> Iterator[Figure | tuple[str, Any]]:
    """Each way on a model of its own; the first time makes host memory, and is told apart."""
    if case.more:
        yield f"title{case.more}", case.title
    bounds = list(memcpy(case))
    yield from bounds
    forget()
    for name, way in ways.items():
        parameters = model(case)
        sleep, wake = way(parameters)
        first = {"asleep, ms": timed(sleep), "awake, ms": timed(wake)}
        times: list[tuple[float, float]] = []
        for _ in turns(SIZES.sleeps):
            change(parameters)
            asleep = timed(sleep)
            time.sleep(PAUSE)
            times.append((asleep, timed(wake)))
        for bound, some in zip(bounds, zip(*times, strict=True), strict=True):
            told = {"nbytes": case.nbytes, "bound": bound, "kind": name}
            yield figure_of(bound.section, name, some, **told)  # type: ignore[arg-type]
        facts = {f"the first time, {what}": round(ms, 1) for what, ms in first.items()}
        if name.startswith("speedtorch"):
            state = sleep.__self__  # type: ignore[attr-defined]
            facts["host bytes beyond the state's"] = state.host_bytes - case.nbytes
        yield name + case.more, facts
        del parameters, sleep, wake
        forget()

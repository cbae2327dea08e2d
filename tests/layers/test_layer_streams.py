"""Copies of layers beside the computing wait for what they must, and are waited for."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from offloaded_models import linears
from recorded_streams import DEVICE, RecordedStream, RecordedStreams, RecordedTensor
from stream_order import StreamOrder
from torch import Tensor, nn, optim

from speedtorch.layers import (
    StateSwapper,
    Swapper,
    TrainingState,
    flat_buffer,
    state_swapper,
    storage_offloader,
)
from speedtorch.layers.flat_buffer import FlatBuffer, Memory
from speedtorch.layers.host_buffer import Stage
from speedtorch.layers.module_groups import ModuleChanges
from speedtorch.layers.offloaded_module import OffloadedModule
from speedtorch.layers.offloaded_parameters import OffloadedParameters
from speedtorch.layers.storage_offloader import StorageOffloader
from speedtorch.layers.transfer_stats import TransferStats

CPU = torch.device("cpu")
BUDGET = 24 * 16 * 17  # bytes: six of such weights, gradients or moments


@pytest.fixture
def made(streams: RecordedStreams) -> FlatBuffer:
    """A flat buffer whose copies are recorded as "copy 1" and so on."""
    streams.pretend_on_cpu()
    streams.works(flat_buffer, "copy_spans", "copy")
    found = FlatBuffer({"weight": torch.ones(4), "bias": torch.ones(4)}, CPU)
    streams.work("earlier")
    return found


def loaded(made: FlatBuffer, streams: RecordedStreams) -> FlatBuffer:
    """The flat buffer on the device, where "use" has used it."""
    made.copy_to(Memory.DEVICE, [], [])
    made.load_stream.join()
    streams.work("use")
    return made


def test_a_first_load_waits_for_nothing_and_its_use_for_the_load(
    made: FlatBuffer, streams: RecordedStreams
) -> None:
    loaded(made, streams)
    assert streams.before("copy 1") == set()
    assert streams.before("use") == {"earlier", "copy 1"}


def test_a_load_over_loaded_tensors_waits_for_their_use(
    made: FlatBuffer, streams: RecordedStreams
) -> None:
    loaded(made, streams).copy_to(Memory.DEVICE, ["weight"], [])
    assert "use" in streams.before("copy 2")


def test_a_write_back_waits_for_the_use_and_the_host_for_the_write_back(
    made: FlatBuffer, streams: RecordedStreams
) -> None:
    loaded(made, streams).copy_to(Memory.HOST, ["weight"], [])
    streams.work("later")
    assert "use" in streams.before("copy 2")
    assert "copy 2" not in streams.before("later") | streams.host
    made.write_back_stream.finish()
    assert "copy 2" in streams.host


@pytest.mark.parametrize("is_passed", [False, True])
def test_a_write_back_waits_for_a_load(
    is_passed: bool, made: FlatBuffer, streams: RecordedStreams
) -> None:
    after: Any = streams.current.record_event() if is_passed else None
    made.copy_to(Memory.DEVICE, [], [])
    streams.work("later")
    made.copy_to(Memory.HOST, ["weight"], [], after)
    expected = {"earlier", "copy 1"} | (set() if is_passed else {"later"})
    assert streams.before("copy 2") == expected


@pytest.mark.parametrize("is_passed", [False, True])
def test_a_second_load_waits_for_the_last_use_of_the_memory(
    is_passed: bool, made: FlatBuffer, streams: RecordedStreams
) -> None:
    loaded(made, streams)
    after: Any = streams.current.record_event() if is_passed else None
    streams.work("later")
    made.empty(after)
    made.copy_to(Memory.DEVICE, [], [])
    assert "use" in streams.before("copy 2")
    assert ("later" in streams.before("copy 2")) == (not is_passed)


def test_a_larger_buffer_is_made_after_write_backs_of_the_former(
    made: FlatBuffer, streams: RecordedStreams
) -> None:
    loaded(made, streams).copy_to(Memory.HOST, ["weight"], [])
    FlatBuffer({"weight": torch.ones(4), "another": torch.ones(4)}, CPU, made)
    assert "copy 2" in streams.host


@pytest.mark.parametrize("is_fork", [False, True])
def test_a_load_after_a_dropped_buffer_waits_for_its_last_use(
    is_fork: bool, made: FlatBuffer, streams: RecordedStreams
) -> None:
    loaded(made, streams)
    flat_buffer._order_reuse(made.load_stream, DEVICE, os.getpid() + is_fork)
    FlatBuffer({"weight": torch.ones(4)}, CPU).copy_to(Memory.DEVICE, [], [])
    assert ("use" in streams.before("copy 2")) == (not is_fork)


def test_memory_of_remaining_views_is_recorded_on_the_current_stream(
    made: FlatBuffer, streams: RecordedStreams
) -> None:
    loaded(made, streams)
    whole = RecordedTensor()
    made._whole = whole  # type: ignore[assignment]
    made.drop_device_storage()
    assert whole.streams == ["main"]


def test_parameters_are_loaded_after_gradients_and_written_back_after_the_step(
    streams: RecordedStreams,
) -> None:
    streams.pretend_on_cpu()
    streams.works(TransferStats, "begin", "copy")
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    parameters = OffloadedParameters(CPU, TransferStats())
    streams.work("gradients")
    parameters.prefetch([parameter])
    streams.work("beside")
    parameters.load()
    streams.work("step")
    parameters.write_back()
    assert streams.before("copy 1") == {"gradients"}
    assert "copy 1" not in streams.before("beside")
    assert "copy 1" in streams.before("step")
    assert "step" in streams.before("copy 2") and not streams.host
    parameters.offload()
    assert "copy 2" in streams.host


def test_a_staging_buffer_is_reused_after_its_copy(streams: RecordedStreams) -> None:
    streams.pretend_on_cpu()
    streams.works(Stage, "_mark", "part")
    stage, host, there = Stage(CPU, 100), *torch.zeros(2, 300, dtype=torch.uint8)
    stage.fill(host, there)
    assert streams.host == {"part 1"}
    stage.drain(host, there)
    assert {f"part {number}" for number in range(1, 7)} <= streams.host


class Timeline:
    """Which work used the memory of each layer last, of layers whose weights are their numbers."""

    def __init__(self, streams: RecordedStreams, patch: pytest.MonkeyPatch) -> None:
        self._streams = streams
        self.copies: dict[float, str] = {}
        self.uses: dict[float, str] = {}
        self.evicted: set[str] = set()
        self.returned = 0
        copy, empty = flat_buffer.copy_spans, FlatBuffer.empty

        def copied(host: Tensor, *args: Any, to: Memory, **options: Any) -> None:
            copy(host, *args, to=to, **options)
            number = self._number(host)
            name = f"copy of {number} {len(streams.on)}"
            streams.work(name)
            if to is Memory.DEVICE:
                assert self.evicted <= streams.before(name)
                self.copies[number] = name
            else:
                assert self.uses[number] in streams.before(name)
                self.returned += 1

        def emptied(one: FlatBuffer, after: Any = None) -> int:
            freed = empty(one, after)
            if freed and self._number(one.host) in self.uses:
                self.evicted.add(self.uses[self._number(one.host)])
            return freed

        patch.setattr(flat_buffer, "copy_spans", copied)
        patch.setattr(FlatBuffer, "empty", emptied)

    @staticmethod
    def _number(host: Tensor) -> float:
        return float(host[:4].view(torch.float32).item())

    def use(self, number: float) -> None:
        """A kernel reads the layer."""
        self.uses[number] = f"use of {number} {len(self._streams.on)}"
        self._streams.work(self.uses[number])
        assert self.copies[number] in self._streams.before(self.uses[number])


class _Uses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, timeline: Timeline, number: float) -> Tensor:
        ctx.timeline, ctx.number = timeline, number
        timeline.use(number)
        return x + weight[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.timeline.use(ctx.number)
        return gradients[0], gradients[0].sum().expand(1024), None, None


class NumberedLayer(nn.Module):
    """A layer that tells a timeline of its uses."""

    def __init__(self, number: float, timeline: Timeline) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1024,), number))
        self.number, self.timeline = number, timeline

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Uses.apply(x, self.weight, self.timeline, self.number)
        return found


def test_layers_are_used_after_their_copies_and_evicted_after_their_uses(
    streams: RecordedStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams.pretend_on_cpu()
    timeline = Timeline(streams, monkeypatch)
    model = nn.Sequential(*(NumberedLayer(float(number), timeline) for number in range(1, 7)))
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    swapper = Swapper(model, optimizer, budget="24KiB", device="cpu")
    with swapper.auto(step=True):
        for _ in range(3):
            model(torch.zeros(1)).sum().backward()
    assert timeline.evicted and timeline.returned


def test_a_loaded_layer_is_used_on_another_stream_after_its_last_use(
    streams: RecordedStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams.pretend_on_cpu()
    timeline = Timeline(streams, monkeypatch)
    monkeypatch.setattr(ModuleChanges, "_stream", lambda _: streams.current)
    model = nn.Sequential(*(NumberedLayer(float(number), timeline) for number in range(1, 4)))
    swapper = Swapper(model, budget="1MiB", device="cpu")
    with swapper.auto(), torch.no_grad():
        model(torch.zeros(1))
        first = dict(timeline.uses)
        streams.use(streams.stream("other"))
        model(torch.zeros(1))
    for number, name in timeline.uses.items():
        assert streams.on[name] == "other" and first[number] in streams.before(name)


def test_the_end_of_a_use_is_after_all_streams_that_used_the_module(
    streams: RecordedStreams,
) -> None:
    module = OffloadedModule(nn.Linear(2, 2), device=CPU)
    main, other = streams.current, streams.stream("other")
    streams.use(other)
    streams.work("use")
    streams.use(main)
    module.changes._streams.add(other)  # type: ignore[arg-type]
    module.end_use()
    streams.work("next")
    assert "use" in streams.before("next")


def test_fingerprints_of_loaded_storages_are_taken_after_the_copies(
    streams: RecordedStreams,
) -> None:
    streams.pretend_on_cpu()
    model = nn.Linear(8, 8).requires_grad_(False)
    state = TrainingState(model)
    state.sleep()
    streams.works(storage_offloader, "bytes_at", "bytes")
    streams.works(storage_offloader, "fingerprint", "fingerprint")
    state.wake()
    copies = {name for name, on in streams.on.items() if on == "training state"}
    assert copies and copies <= streams.before("fingerprint 1")


def test_tensors_are_moved_after_the_host_has_waited_for_the_copies(
    streams: RecordedStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of the device goes then, and other threads read host memory without a wait."""

    def synchronize(_: StorageOffloader) -> None:
        streams.finish()

    streams.pretend_on_cpu()
    monkeypatch.setattr(StorageOffloader, "_wait", synchronize)
    streams.works(storage_offloader, "bytes_at", "bytes")
    streams.works(storage_offloader, "point_to_host", "offloaded")
    streams.works(storage_offloader, "point_to_device", "loaded")
    state = TrainingState(nn.Linear(8, 8))
    state.sleep()
    offload = {name for name, on in streams.on.items() if on == "training state"}
    assert offload and offload <= streams.before("offloaded 1")
    state.wake()
    load = {name for name, on in streams.on.items() if on == "training state"} - offload
    assert load and load <= streams.before("loaded 1")


class NumberedSGD(optim.SGD):
    """Tells a timeline of the use of each parameter's state, which has the gradient's value."""

    timeline: Timeline | None = None

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if self.timeline is not None and param.grad is not None:
                    self.timeline.use(float(param.grad[0]))
        return super().step(closure)


@pytest.mark.parametrize(
    ("device", "budget"),
    [(None, "13KiB"), ("cpu", "24KiB")],
    ids=["state", "state and parameters"],
)
def test_state_is_used_after_its_copies_and_evicted_after_its_uses(
    device: str | None, budget: str, streams: RecordedStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams.pretend_on_cpu()
    monkeypatch.setattr(state_swapper, "_BUCKET_BYTES", 1)
    parameters = [nn.Parameter(torch.zeros(1024)) for _ in range(5)]
    for number, param in enumerate(parameters):
        param.grad = torch.full((1024,), 1.0 + number)
    optimizer = NumberedSGD(parameters, lr=0.1, momentum=0.5, dampening=0.5)
    optimizer.step()
    StateSwapper(optimizer, budget=budget, device=device)
    optimizer.timeline = timeline = Timeline(streams, monkeypatch)
    for _ in range(3):
        optimizer.step()
    assert timeline.evicted and timeline.returned


def trained(way: str, budget: int) -> tuple[Any, Callable[[], object]]:
    """A swapper in one of its ways, and a call that trains two steps with it."""
    model = linears(5, 16)
    adam = optim.AdamW(model.parameters(), 1e-2)
    swapper: Any
    if "state" in way:
        stored = torch.bfloat16 if way == "stored state" else None
        swapper = StateSwapper(adam, budget=budget, stored=stored)
    else:
        swapper = Swapper(model, adam, budget=budget, device="cpu")
    if way.startswith("auto"):
        swapper.auto(step=way == "auto step")

    def steps() -> None:
        for _ in range(2):
            given = torch.randn(3, 16)
            for number, layer in enumerate(model if way == "by hand" else [model]):
                with swapper.use(layer) if way == "by hand" else nullcontext():
                    if way == "by hand":
                        swapper.prefetch(model[(number + 1) % len(model)], state=True)
                    (layer(given) - given).square().mean().backward()
                    adam.step()
                    adam.zero_grad()

    return swapper, steps


@pytest.mark.parametrize("way", ["by hand", "auto", "auto step", "state", "stored state"])
def test_training_uses_memory_in_order(way: str, order: StreamOrder) -> None:
    swapper, steps = trained(way, BUDGET)
    steps()  # the host also copies the first values, on no stream
    assert order.found(lambda: (steps(), swapper.close())) == "" and order.side_uses > 100


def test_a_missing_wait_of_a_swapper_is_found(
    order: StreamOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, steps = trained("auto", BUDGET)
    steps()
    monkeypatch.setattr(RecordedStream, "wait_event", lambda *_: None)
    assert "writes it on layers load" in order.found(steps)

"""A training state that wakes where it was: addresses, graphs, memory, and what shares it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conftest import NEEDS_GPU
from interrupts import EVERY
from offloaded_models import assert_equal, copies, linears
from test_training_state import ERRORS, Training, assert_errors_lose_nothing, assert_trains_on
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.layers import TrainingState, offloaded_storage, training_state
from speedtorch.layers.offloaded_storage import DeviceMemory, OffloadedStorage, bytes_at
from speedtorch.nn.graphed import graphed
from speedtorch.torch_internals import storage_of, storage_reference

MIB = 1 << 20
NEEDS_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def _model(side: int = 64) -> nn.Sequential:
    return linears(4, side).append(nn.BatchNorm1d(side)).cuda()


def _places(model: nn.Module, optimizer: optim.Optimizer | None = None) -> list[int]:
    found = [param.data_ptr() for param in (*model.parameters(), *model.buffers())]
    for kept in optimizer.state.values() if optimizer else ():
        found += [tensor.data_ptr() for tensor in kept.values() if tensor.is_cuda]
    return found


class _Graph:
    """A whole step of torch alone in a CUDA graph, with an optimizer that a graph can repeat."""

    def __init__(self, sleeps: bool) -> None:
        self.model = _model()
        self.optimizer = optim.Adam(self.model.parameters(), lr=0.01, capturable=True)
        self.batch = torch.zeros(8, 64, device="cuda")
        self.state = TrainingState(self.model, self.optimizer, keep_addresses=True)
        side = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            for number in range(3):
                self.fill(number)
                self.train()
        torch.cuda.synchronize()
        if sleeps:
            with self.state.asleep():
                pass
        self.optimizer.zero_grad()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.train()

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()

    def fill(self, number: int) -> None:
        random = torch.Generator().manual_seed(number)
        self.batch.copy_(torch.randn(8, 64, generator=random))

    def step(self, number: int) -> None:
        self.fill(number)
        self.graph.replay()

    def values(self) -> list[Tensor]:
        kept = [tensor for of in self.optimizer.state.values() for tensor in of.values()]
        return [tensor.clone() for tensor in (*self.model.state_dict().values(), *kept)]


@NEEDS_GPU
def test_a_graph_captured_after_the_first_sleep_remains_valid() -> None:
    ours, plain = _Graph(sleeps=True), _Graph(sleeps=False)
    places = _places(ours.model, ours.optimizer)
    for number in range(3, 9):
        ours.step(number)
        plain.step(number)
        before = ours.values()
        # The graph has gradients of its own, which are in its pool.
        with ours.state.asleep(["weights", "optimizer"]) as report:
            assert report.reserved_bytes > 0
            assert _places(ours.model, ours.optimizer) != places
            assert all(map(torch.equal, ours.values(), before))
            torch.full((64 * MIB,), 3.0, device="cuda")  # takes what is free
        assert _places(ours.model, ours.optimizer) == places
        for one, other in zip(ours.values(), plain.values(), strict=True):
            assert torch.equal(one, other)


@NEEDS_GPU
def test_a_graphed_step_raises_while_offloaded_and_continues_after_wake() -> None:
    def trained(sleeps: bool) -> list[Tensor]:
        torch.manual_seed(0)
        emb = speedtorch.Embedding(20, 4, device="cuda", capacity=8)
        model = nn.ModuleDict({"emb": emb, "out": nn.Linear(4, 1, device="cuda")})
        optimizer = optim.Adam(model.parameters(), lr=0.1, capturable=True)
        speedtorch.attach(optimizer, model)

        def train(ids: Tensor) -> None:
            optimizer.zero_grad(set_to_none=False)
            model["out"](emb(ids)).square().sum().backward()
            optimizer.step()

        ids = torch.arange(3, device="cuda")
        train(ids)
        state = TrainingState(model, optimizer, keep_addresses=True)
        if sleeps:
            with state.asleep():
                pass
        step = graphed(train, ids, modules=model, optimizers=optimizer)
        for number in range(4):
            step(ids + number)
            if sleeps:
                with (
                    state.asleep(),
                    pytest.raises(RuntimeError, match=r"address of out.weight has changed"),
                ):
                    step(ids)
        emb.flush()
        return [model["out"].weight.detach(), emb.table["weight"].clone()]

    for one, other in zip(trained(True), trained(False), strict=True):
        assert torch.equal(one, other)


@NEEDS_GPU
def test_memory_is_free_while_offloaded_and_the_same_after_wake() -> None:
    # So much that what other processes take and give meanwhile does not matter.
    nbytes, most = 8 << 30, 3 << 30
    model = nn.ParameterList(torch.ones(128 * MIB // 4, device="cuda") for _ in range(64))
    state = TrainingState(model, keep_addresses=True)
    state.sleep()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        report = state.wake()
        assert abs(report.device_bytes + nbytes) <= most
        assert report.reserved_bytes >= nbytes
        report = state.sleep()
        assert abs(report.device_bytes - nbytes) <= most
        assert report.reserved_bytes < nbytes
    state.wake()
    del model, state
    gc.collect()
    torch.cuda.empty_cache()
    end = time.monotonic() + 60
    while abs(torch.cuda.mem_get_info()[0] - before) > most:
        assert time.monotonic() < end, "the memory was not freed"
        time.sleep(0.1)  # what other processes took meanwhile goes again


@NEEDS_GPU
@pytest.mark.parametrize(
    ("tensors", "count"),
    [(2000, 256 * 256), (1, 1), (1, 300_000), (1, 2_000_000), (1, 3_000_000)],
)
def test_tensors_of_any_number_and_size_keep_their_values(tensors: int, count: int) -> None:
    model = nn.ParameterList(torch.full((count,), n + 3.0, device="cuda") for n in range(tensors))
    state = TrainingState(model, keep_addresses=True)
    for _ in range(3):
        with state.asleep():
            assert all(bool((model[n] == n + 3).all()) for n in range(0, tensors, 97))
        assert all(bool((param == n + 3).all()) for n, param in enumerate(model))


@NEEDS_GPU
def test_dropped_gradients_keep_no_ranges() -> None:
    model = _model(512)
    state = TrainingState(model, keep_addresses=True)
    reserved = []
    for _ in range(6):
        model(torch.ones(2, 512, device="cuda")).sum().backward()
        with state.asleep():
            model.zero_grad()
        reserved.append(state.sleep().reserved_bytes)
        state.wake()
    assert reserved[-1] <= reserved[1]
    assert len(state._parts["gradients"].memory._ranges) <= 2  # type: ignore[attr-defined]


@NEEDS_GPU
def test_a_tensor_removed_from_the_model_is_loaded_for_its_other_owner() -> None:
    model = _model()
    state = TrainingState(model, keep_addresses=True)
    with state.asleep():
        pass
    last = model[3].weight.detach()
    first_row = model[0].weight.detach()[0]
    expected = last.clone(), first_row.clone()
    del model[3]
    for _ in range(2):
        with state.asleep():
            pass
        assert torch.equal(last, expected[0]) and torch.equal(first_row, expected[1])


@NEEDS_GPU
def test_parts_that_share_kept_addresses_sleep_together() -> None:
    layer = nn.Linear(2, 2, bias=False, device="cuda")
    both = torch.arange(8.0, device="cuda")
    layer.weight.data, layer.weight.grad = both[:4].view(2, 2), both[4:].view(2, 2)
    state = TrainingState(layer, keep_addresses=True)
    with state.asleep():
        pass
    with pytest.raises(ValueError, match="keep_addresses: part 'weights' shares memory with"):
        state.sleep(["weights"])
    assert not state.is_asleep and both.tolist() == list(range(8))


@NEEDS_GPU
def test_tensors_outlive_their_state_loaded_and_offloaded() -> None:
    for is_asleep in (False, True):
        model = _model()
        expected = [tensor.clone() for tensor in model.state_dict().values()]
        state = TrainingState(model, keep_addresses=True)
        with state.asleep():
            pass
        if is_asleep:
            state.sleep()
        del state
        gc.collect()
        torch.cuda.empty_cache()
        assert all(map(torch.equal, model.state_dict().values(), expected))
        model(torch.ones(2, 64, device="cuda")).sum().backward()


@NEEDS_GPUS
def test_another_gpu_reads_tensors_with_kept_addresses() -> None:
    torch.zeros(1, device="cuda:1")  # it is in use
    model = _model()
    state = TrainingState(model, keep_addresses=True)
    with state.asleep():
        pass
    other = model[0].weight.detach().to("cuda:1")
    assert torch.equal(other.cpu(), model[0].weight.detach().cpu())
    model[0].weight.data.copy_(other + 1)
    assert torch.equal(model[0].weight.detach().cpu(), other.cpu() + 1)


def test_addresses_that_cannot_be_kept_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(text: str, device: str | None = "cuda:0") -> None:
        with pytest.raises(ValueError, match=text):
            TrainingState(nn.Linear(2, 2), device=device, keep_addresses=True)

    refused("expected a state on a GPU, got device 'cpu'", device=None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    refused("torch's allocator 'cudaMallocAsync' has no memory")
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    refused("because PYTORCH_NO_CUDA_MEMORY_CACHING is set")


# ------------------------------------------------------------------------------------------------
# On the CPU, whose storages stay where they are: what is in a range without memory is overwritten


class PretendedRange:
    """As AddressRange, for storages of the CPU; `of` is the one that is open."""

    open: PretendedRange | None = None

    def __init__(self, nbytes: int, device: torch.device) -> None:
        assert nbytes > 0
        self.reserved, self.is_mapped, self.base, self.end = nbytes, False, 0, 0
        self.has: list[tuple[Any, int]] = []

    @property
    def storages(self) -> list[torch.UntypedStorage]:
        """Those that are still there."""
        found = [(storage_of(ref), address) for ref, address in self.has]
        return [
            storage
            for storage, at in found
            if storage is not None and storage.data_ptr() == at != 0
        ]

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes() for storage in self.storages)

    @contextmanager
    def allocating(self) -> Iterator[None]:
        PretendedRange.open = self
        try:
            yield
        finally:
            PretendedRange.open = None

    def map(self) -> None:
        if not self.is_mapped:
            self.overwrite(0xCD)
        self.is_mapped = True

    def unmap(self) -> None:
        self.is_mapped = False
        self.overwrite(0xAB)

    def overwrite(self, value: int) -> None:
        for storage in self.storages:
            bytes_at(storage.data_ptr(), storage.nbytes(), storage.device).fill_(value)


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a state of the CPU keep its addresses in pretended ranges."""
    fill = offloaded_storage._fill

    def filled(storages: Sequence[OffloadedStorage], device: torch.device) -> None:
        try:
            fill(storages, device)
        finally:
            if (of := PretendedRange.open) is not None:
                of.has += [(storage_reference(e.untyped), e.untyped.data_ptr()) for e in storages]
                of.overwrite(0xEF)

    def range_at(memory: DeviceMemory, address: int) -> PretendedRange | None:
        every: Any = memory._ranges
        return next((r for r in every if address in [e.data_ptr() for e in r.storages]), None)

    monkeypatch.setattr(offloaded_storage, "AddressRange", PretendedRange)
    monkeypatch.setattr(offloaded_storage, "_fill", filled)
    monkeypatch.setattr(DeviceMemory, "_range_at", range_at)
    monkeypatch.setattr(training_state, "_check_can_keep", lambda device: None)


@pytest.fixture
def trained(ranges: None) -> Training:
    """A small model on the CPU after steps."""
    return Training("cpu", keep_addresses=True).step(2)


@pytest.mark.usefixtures("ranges")
@EVERY
@ERRORS
@pytest.mark.parametrize("call", ["sleep the first time", "sleep", "wake"])
def test_an_error_at_any_line_loses_nothing_with_kept_addresses(
    call: str, error: Callable[[], BaseException], every: int
) -> None:
    assert_errors_lose_nothing("cpu", call, error, every, keep_addresses=True)


@pytest.mark.parametrize("keeps", [False, True], ids=["other-addresses", "same-addresses"])
def test_a_second_error_while_a_wake_is_undone_loses_nothing(
    keeps: bool, monkeypatch: pytest.MonkeyPatch, trained: Training
) -> None:
    expected = copies(trained.tensors())
    trained.state = TrainingState(trained.layer, trained.optimizer, keep_addresses=keeps)
    trained.state.sleep()

    def fails(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    of = trained.state._parts["weights"]
    with monkeypatch.context() as patch:
        patch.setattr(of, "_copy", fails)
        patch.setattr(of.memory, "free", fails)
        with pytest.raises(KeyboardInterrupt):
            trained.state.wake()
    assert_equal(trained.tensors(), expected)
    trained.state.wake()
    assert_equal(trained.tensors(), expected)
    assert_trains_on(trained)


@pytest.mark.parametrize("part", ["weights", "optimizer"])
def test_all_remain_offloaded_if_memory_is_too_little(
    part: Any, monkeypatch: pytest.MonkeyPatch, trained: Training
) -> None:
    with trained.state.asleep():
        pass
    expected = copies(trained.tensors())
    trained.state.sleep()
    (full,) = trained.state._parts[part].memory._ranges  # type: ignore[attr-defined]

    def fails() -> None:
        raise torch.OutOfMemoryError

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(full, "map", fails)
            with pytest.raises(torch.OutOfMemoryError):
                trained.state.wake()
        assert trained.state._parts[part].is_offloaded
        assert_equal(trained.tensors(), expected)
    trained.state.wake()
    assert_equal(trained.tensors(), expected)
    assert_trains_on(trained)


def test_a_range_is_deleted_after_its_tensors_are_dropped(trained: Training) -> None:
    for count in (1, 0):
        with trained.state.asleep():
            pass
        assert len(trained.state._parts["gradients"].memory._ranges) == count  # type: ignore[attr-defined]
        trained.optimizer.zero_grad()


@pytest.mark.usefixtures("ranges")
@pytest.mark.parametrize("parts", [["weights", "optimizer"], ["optimizer", "weights"]])
def test_tensors_whose_memory_two_parts_have_exchanged_sleep(parts: list[Any]) -> None:
    layer = nn.Linear(4, 4, bias=False)
    optimizer = optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = TrainingState(layer, optimizer, keep_addresses=True)
    with state.asleep():
        pass
    kept = optimizer.state[layer.weight]
    one, other = layer.weight.data, kept["momentum_buffer"].data
    layer.weight.data, kept["momentum_buffer"].data = other, one
    expected = layer.weight.detach().clone(), kept["momentum_buffer"].clone()
    del one, other
    with pytest.raises(ValueError, match="shares memory with a part that would remain"):
        state.sleep(["weights"])
    for _ in range(2):
        state.sleep()
        assert torch.equal(layer.weight, expected[0])
        assert torch.equal(kept["momentum_buffer"], expected[1])
        for part in parts:
            state.wake([part])
        assert torch.equal(layer.weight, expected[0])
        assert torch.equal(kept["momentum_buffer"], expected[1])


@pytest.mark.usefixtures("ranges")
@pytest.mark.parametrize("count", [0, 256])
def test_a_tensor_moved_out_of_its_range_is_not_offloaded_with_the_range(count: int) -> None:
    model = nn.ParameterDict({"kept": torch.ones(4), "other": torch.ones(4)})
    state = TrainingState(model, keep_addresses=True)
    with state.asleep():
        pass
    storage = model["other"].detach().untyped_storage()
    del model["other"]
    storage.resize_(0)  # as FSDP frees what it has gathered
    storage.resize_(count)
    address = storage.data_ptr()
    bytes_at(address, count, torch.device("cpu")).fill_(3)
    with state.asleep():
        assert storage.data_ptr() == address and storage.nbytes() == count
        assert bool((bytes_at(address, count, torch.device("cpu")) == 3).all())
    assert storage.data_ptr() == address


@pytest.mark.usefixtures("ranges")
def test_a_range_has_addresses_for_segments_of_torchs_allocator() -> None:
    model = nn.ParameterList([torch.ones(300_000)])  # torch takes a segment of 20 MiB for it
    state = TrainingState(model, keep_addresses=True)
    with state.asleep():
        pass
    (made,) = state._parts["weights"].memory._ranges  # type: ignore[attr-defined]
    assert made.reserved >= 20 * MIB


@NEEDS_GPUS
def test_a_state_of_another_gpu_than_the_current_one_wakes_where_it_was() -> None:
    model = _model().to("cuda:1")
    expected = [tensor.clone() for tensor in model.state_dict().values()]
    state = TrainingState(model, keep_addresses=True)
    with state.asleep():
        pass
    places = _places(model)
    for _ in range(2):
        with state.asleep():
            pass
        assert _places(model) == places
        assert all(map(torch.equal, model.state_dict().values(), expected))

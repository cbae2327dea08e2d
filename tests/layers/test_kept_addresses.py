"""A training state that wakes where it was: addresses, graphs, memory, and what shares it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from conftest import NEEDS_GPU
from rank_backends import NEEDS_GPUS
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.layers import TrainingState
from speedtorch.nn.graphed import graphed

MIB = 1 << 20


def _model(side: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(side, side, device="cuda") for _ in range(4)]
    return nn.Sequential(*layers, nn.BatchNorm1d(side, device="cuda"))


def _places(model: nn.Module, optimizer: optim.Optimizer | None = None) -> list[int]:
    found = [each.data_ptr() for each in (*model.parameters(), *model.buffers())]
    for kept in optimizer.state.values() if optimizer else ():
        found += [each.data_ptr() for each in kept.values() if each.is_cuda]
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
        kept = [each for of in self.optimizer.state.values() for each in of.values()]
        return [each.clone() for each in (*self.model.state_dict().values(), *kept)]


@NEEDS_GPU
def test_a_graph_that_was_captured_after_the_first_sleep_lives_on() -> None:
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
def test_a_graphed_step_is_refused_asleep_and_goes_on_awake() -> None:
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
                    pytest.raises(RuntimeError, match=r"out.weight is not where it was"),
                ):
                    step(ids)
        emb.flush()
        return [model["out"].weight.detach(), emb.table["weight"].clone()]

    for one, other in zip(trained(True), trained(False), strict=True):
        assert torch.equal(one, other)


@NEEDS_GPU
def test_memory_is_free_asleep_and_no_more_than_before_awake() -> None:
    model = nn.ParameterList(torch.ones(1024, 1024, device="cuda") for _ in range(32))
    state = TrainingState(model, keep_addresses=True)
    state.sleep()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        report = state.wake()
        assert -136 * MIB <= report.device_bytes <= -128 * MIB
        assert report.reserved_bytes >= 128 * MIB
        report = state.sleep()
        assert abs(torch.cuda.mem_get_info()[0] - before) <= 8 * MIB
        assert report.device_bytes >= 120 * MIB
    state.wake()
    del model, state
    gc.collect()
    torch.cuda.empty_cache()
    assert abs(torch.cuda.mem_get_info()[0] - before) <= 8 * MIB


@NEEDS_GPU
def test_thousands_of_small_tensors_move_and_stay_what_they_are() -> None:
    model = nn.ParameterList(torch.full((256, 256), float(n), device="cuda") for n in range(2000))
    state = TrainingState(model, keep_addresses=True)
    for _ in range(3):
        with state.asleep():
            assert all(bool((model[n] == n).all()) for n in range(0, 2000, 97))
        assert all(bool((each == n).all()) for n, each in enumerate(model))


@NEEDS_GPU
def test_gradients_that_come_and_go_leave_nothing() -> None:
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
    assert len(state._parts["gradients"]._memory._ranges) <= 2  # type: ignore[attr-defined]


@NEEDS_GPU
def test_what_the_model_has_no_more_and_something_else_has_comes_back() -> None:
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
    with pytest.raises(ValueError, match="keep_addresses: memory of the weights is also that of"):
        state.sleep(["weights"])
    assert not state.is_asleep and both.tolist() == list(range(8))


@NEEDS_GPU
def test_tensors_outlive_their_state_awake_and_asleep() -> None:
    for is_asleep in (False, True):
        model = _model()
        expected = [each.clone() for each in model.state_dict().values()]
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


@pytest.fixture
def full_gpu() -> Iterator[list[Tensor]]:
    """A list for a tensor of nearly all the memory that the GPU has."""
    held: list[Tensor] = []
    yield held
    held.clear()
    torch.cuda.empty_cache()


@NEEDS_GPU
def test_all_sleeps_on_where_the_gpu_is_full(full_gpu: list[Tensor]) -> None:
    model = nn.ParameterList(torch.full((1024, 1024), 3.0, device="cuda") for _ in range(64))
    state = TrainingState(model, keep_addresses=True)
    with state.asleep():
        pass
    places = _places(model)
    state.sleep()
    free = torch.cuda.mem_get_info()[0]
    full_gpu.append(torch.empty(free - 128 * MIB, dtype=torch.uint8, device="cuda"))
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match="address range: out of memory: GPU 0"):
            state.wake()
        assert state.is_asleep and all((each == 3).all() for each in model)
    full_gpu.clear()  # torch keeps it, and gives it back when it is asked
    state.wake()
    assert _places(model) == places and all((each == 3).all() for each in model)


@NEEDS_GPUS
def test_another_gpu_reads_what_has_kept_addresses() -> None:
    torch.zeros(1, device="cuda:1")  # it is in use
    model = _model()
    state = TrainingState(model, keep_addresses=True)
    with state.asleep():
        pass
    other = model[0].weight.detach().to("cuda:1")
    assert torch.equal(other.cpu(), model[0].weight.detach().cpu())
    model[0].weight.data.copy_(other + 1)
    assert torch.equal(model[0].weight.detach().cpu(), other.cpu() + 1)


def test_where_addresses_cannot_be_kept_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(
        ValueError, match="keep_addresses: expected a GPU's state, got one on 'cpu'"
    ):
        TrainingState(layer, keep_addresses=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    with pytest.raises(ValueError, match="torch's allocator is 'cudaMallocAsync', which has no"):
        TrainingState(layer, device="cuda:0", keep_addresses=True)

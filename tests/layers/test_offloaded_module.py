"""OffloadedModule: which tensors move, remain the same object, and are written back; errors."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import NEEDS_GPU
from offloaded_models import Layer, assert_equal, copies, reloaded, tensors_of, with_steps
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

import speedtorch
from speedtorch.layers import Memory, OffloadedModule, flat_buffer
from speedtorch.layers.flat_buffer import FlatBuffer
from speedtorch.memory.side_stream import SharedSideStream
from speedtorch.torch_internals import version_of


def made(
    device: str, kind: type[Optimizer] = optim.Adam
) -> tuple[Layer, Optimizer, OffloadedModule]:
    torch.manual_seed(1)
    layer = Layer()
    optimizer = kind(layer.parameters())
    return layer, optimizer, with_steps(layer, optimizer, device=device, name="layer")


def train(layer: nn.Module, optimizer: Optimizer, device: str, seed: int = 0) -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    layer(x.to(device)).square().sum().backward()
    optimizer.step()


def test_objects_and_their_hooks_remain_the_same(device: str) -> None:
    layer, optimizer, offloaded = made(device)
    parameters, groups = list(layer.parameters()), optimizer.param_groups
    calls: list[str] = []
    parameters[0].register_hook(lambda gradient: calls.append("hook"))
    offloaded.load()
    train(layer, optimizer, device)
    gradients = [each.grad for each in parameters]
    states = [optimizer.state[each]["exp_avg"] for each in parameters if each in optimizer.state]
    offloaded.evict()
    offloaded.load()
    assert all(a is b for a, b in zip(parameters, layer.parameters(), strict=True))
    assert all(each.grad is g for each, g in zip(parameters, gradients, strict=True))
    kept = [optimizer.state[each]["exp_avg"] for each in parameters if each in optimizer.state]
    assert len(kept) == 8 and all(a is b for a, b in zip(states, kept, strict=True))
    assert optimizer.param_groups is groups and layer.back.weight is layer.into.weight
    assert [each.requires_grad for each in layer.frozen.parameters()] == [False, False]
    train(layer, optimizer, device)
    assert calls == ["hook", "hook"]


def test_all_is_where_the_module_is(device: str) -> None:
    layer, optimizer, offloaded = made(device)
    for memory in (Memory.DEVICE, Memory.HOST, Memory.DEVICE):
        offloaded.load() if memory is Memory.DEVICE else offloaded.evict()
        where = {each.device.type for each in tensors_of(layer, optimizer).values() if each.dim()}
        assert offloaded.groups.own.memory is memory
        assert where == {device if memory is Memory.DEVICE else "cpu"}
        train(layer, optimizer, device if memory is Memory.DEVICE else "cpu")


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_steps_remain_on_the_cpu_where_torch_keeps_them(device: str, fused: bool) -> None:
    layer = nn.Linear(3, 3)
    optimizer = optim.Adam(layer.parameters(), fused=fused)
    offloaded = with_steps(layer, optimizer, device=device)
    offloaded.load()
    layer(torch.ones(3, device=device)).sum().backward()
    optimizer.step()
    step = optimizer.state[layer.weight]["step"]
    address = step.data_ptr()
    offloaded.evict()
    assert step.device.type == "cpu" and (step.data_ptr() == address) == (not fused)
    offloaded.load()
    assert step.device.type == (device if fused else "cpu")
    optimizer.step()
    assert step.item() == 2


def test_an_evicted_module_is_ordinary_tensors(device: str) -> None:
    layer, _, offloaded = made(device)
    offloaded.load()
    offloaded.evict()
    x = torch.randn(5, 4)
    assert layer(x).shape == (5, 4) and "Parameter" in repr(layer.into.weight)
    for each in (reloaded(layer, weights_only=False), copy.deepcopy(layer)):
        assert torch.equal(layer.eval()(x), each.eval()(x))
        each(x).sum().backward()  # its guard knows no module


def test_an_evicted_module_has_no_memory_on_the_device(device: str) -> None:
    layer, optimizer, offloaded = made(device)
    offloaded.load()
    train(layer, optimizer, device)
    loaded = offloaded.groups.nbytes
    assert offloaded.evict() == loaded and offloaded.evict() == 0
    offloaded.load()
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    assert offloaded.evict() == offloaded.groups.nbytes > loaded
    if device == "cuda":
        assert before - torch.cuda.memory_allocated() >= offloaded.groups.nbytes


def calls_of_cuda(count: int) -> Counter[str]:
    """What a load and an eviction of a module of so many layers ask the driver for."""
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))
    optimizer = optim.Adam(module.parameters())
    offloaded = with_steps(module, optimizer, device="cuda")
    for step in range(3):
        offloaded.load()
        module(torch.ones(4, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        if step < 2:
            offloaded.evict()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        offloaded.evict()
        offloaded.load()
    return Counter(each.name for each in profiled.events() if each.name.startswith("cu"))


@NEEDS_GPU
def test_calls_of_the_driver_do_not_depend_on_the_number_of_tensors() -> None:
    few, many = calls_of_cuda(1), calls_of_cuda(20)
    if not few:
        pytest.skip("the profiler sees no calls of CUDA on this machine")
    assert few["cudaMemcpyAsync"] == 4  # two groups, there and back
    assert few == many


def written_back(offloaded: OffloadedModule) -> list[int]:
    """Bytes of each piece that an eviction copies."""
    copied: list[int] = []
    copy_spans = flat_buffer.copy_spans

    def counted(host: Tensor, other: Tensor, spans: Any, **rest: Any) -> None:
        copied.extend(end - begin for begin, end in spans)
        copy_spans(host, other, spans, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat_buffer, "copy_spans", counted)
        offloaded.evict()
    return copied


def test_what_has_not_changed_travels_one_way(device: str) -> None:
    layer = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False))
    optimizer = optim.SGD(layer.parameters(), lr=0.1)
    offloaded = with_steps(layer, optimizer, device=device)
    offloaded.load()
    with torch.no_grad():
        layer(torch.ones(8, device=device))
    assert written_back(offloaded) == []
    offloaded.load()
    layer(torch.ones(8, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert written_back(offloaded) == [256 + 32]  # a weight and a bias; not the frozen ones
    offloaded.load()
    layer[1].weight.data.mul_(2)
    twice = copies({"weight": layer[1].weight})
    offloaded.changes.touch()
    assert len(written_back(offloaded)) == 1
    assert_equal({"weight": layer[1].weight}, twice)


def test_copies_begin_before_each_tensor_is_looked_at(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def note(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **rest: (calls.append(name), function(*args, **rest))[1]

    offloaded = OffloadedModule(nn.Linear(4, 4), device=device)
    monkeypatch.setattr(flat_buffer, "copy_spans", note("copy", flat_buffer.copy_spans))
    monkeypatch.setattr(FlatBuffer, "where", note("look", FlatBuffer.where))
    for move in (offloaded.load, offloaded.groups.write_back, offloaded.evict, offloaded.prefetch):
        offloaded.changes.touch()
        calls.clear()
        move()
        assert calls[0] == "copy" and calls.count("copy") == 1


def test_tensors_replaced_in_the_same_memory_are_moved(device: str) -> None:
    layer = nn.Linear(4, 4).requires_grad_(False)
    offloaded = OffloadedModule(layer, device=device)
    for moves in ((offloaded.load, offloaded.evict), (offloaded.evict, offloaded.load)):
        layer.weight.data = layer.weight.data.t()
        expected = copies(dict(layer.named_parameters()))
        offloaded.changes.touch()
        for move in moves:
            move()
            assert_equal(dict(layer.named_parameters()), expected)
        offloaded.load()


def test_writes_to_the_state_dict_of_a_loaded_module_do_not_change_it(device: str) -> None:
    layer = nn.Linear(4, 4)
    expected = layer.weight.detach().clone()
    offloaded = OffloadedModule(layer, device=device)
    offloaded.load()
    with torch.inference_mode():
        saved = layer.state_dict()
    saved["weight"].zero_()
    offloaded.evict()
    assert saved["weight"].is_cpu and torch.equal(layer.weight, expected)
    saved["weight"].fill_(7.0)
    assert torch.equal(layer.weight, expected)


def test_a_parameter_in_the_memory_of_another_is_written_back(device: str) -> None:
    layer = nn.Linear(4, 4)
    offloaded = OffloadedModule(layer, device=device)
    for _ in range(2):  # each of the two counts one change
        offloaded.load()
        layer.weight = nn.Parameter(layer.weight.data)
        layer.weight.detach().add_(1)
        expected = layer.weight.detach().cpu().clone()
        offloaded.evict()
        assert torch.equal(layer.weight.detach(), expected)


def test_a_failed_load_frees_its_device_memory(device: str) -> None:
    layer = nn.Linear(2, 2, dtype=torch.complex64).requires_grad_(False)
    offloaded = OffloadedModule(layer, device=device)
    layer.weight.data = layer.weight.data.t().conj()
    for move in (offloaded.load, offloaded.prefetch):
        with pytest.raises(ValueError, match="conjugated"):
            move()
        assert offloaded.groups.device_bytes == 0 and offloaded.groups.own.memory is Memory.HOST


def test_gradients_that_came_are_taken_after_a_copy_that_spans_their_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late: list[Callable[[], None]] = []
    copy_spans = flat_buffer.copy_spans

    def copy_late(host: Tensor, other: Tensor, spans: Any, *, to: Memory, **rest: Any) -> None:
        source = other if to is Memory.DEVICE else other.clone()
        late.append(lambda: copy_spans(host, source, spans, to=to, **rest))
        if to is Memory.DEVICE:
            late.pop()()

    def finish(_: SharedSideStream) -> None:
        while late:
            late.pop(0)()

    monkeypatch.setattr(flat_buffer, "copy_spans", copy_late)
    monkeypatch.setattr(SharedSideStream, "finish", finish)
    module = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    offloaded = OffloadedModule(module, device="cpu")
    for keeps in (True, False):
        offloaded.load()
        if not keeps:
            module[1].weight.grad = None  # between two that are added to where they are
        module(torch.randn(4)).sum().backward()
        expected = [each.grad.clone() for each in module.parameters() if each.grad is not None]
        offloaded.evict()
    found = [each.grad for each in module.parameters() if each.grad is not None]
    assert len(found) == 3 and all(map(torch.equal, found, expected))


def test_gradients_that_came_count_once(device: str) -> None:
    layer, _, offloaded = made(device)
    for _ in range(2):
        offloaded.load()
        loaded = offloaded.groups.device_bytes
        layer(torch.randn(6, 4, device=device)).sum().backward()
        assert offloaded.groups.missing_bytes(state=True) == 0
        assert offloaded.groups.device_bytes == loaded
        offloaded.evict()
        layer.zero_grad()


def test_gradients_that_are_dropped_are_gone_at_once(device: str) -> None:
    layer, _, offloaded = made(device)
    offloaded.load()
    layer(torch.randn(6, 4, device=device)).sum().backward()
    assert offloaded.groups.other_bytes()
    kept = [weakref.ref(each.grad) for each in layer.parameters() if each.grad is not None]
    layer.zero_grad()
    assert kept and all(each() is None for each in kept)


def test_a_backward_after_load_is_right_and_before_is_refused_by_name(device: str) -> None:
    results = []
    for moves in (False, True):
        layer, optimizer, offloaded = made(device)
        offloaded.load()
        train(layer, optimizer, device)
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(3)).to(device)
        loss = layer(x).square().sum()
        if moves:
            offloaded.evict()  # the first that finds gradients and state
            with pytest.raises(RuntimeError, match="module 'layer': its forward ran while it was"):
                loss.backward(retain_graph=True)
            offloaded.load()
        loss.backward()
        results.append(copies(tensors_of(layer, optimizer)))
    assert_equal(*results)


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_backward_through_what_has_changed_meanwhile_is_refused(device: str, where: str) -> None:
    weight = nn.Parameter(torch.ones(3, 3))
    holder = nn.ParameterList([weight])
    offloaded = OffloadedModule(holder, device=device)
    offloaded.load()
    x = torch.ones(3, device=device, requires_grad=True)
    result = (x @ weight.t()).sum()
    offloaded.evict()
    if where == "device":
        offloaded.load()
    with torch.no_grad():
        weight.add_(1)
    for _ in range(2):
        offloaded.load()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.backward(retain_graph=True)
        offloaded.evict()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.backward(retain_graph=True)


def test_no_count_of_one_memory_is_ever_one_of_the_other(device: str) -> None:
    layer, optimizer, offloaded = made(device)
    seen: dict[Memory, set[int]] = {memory: set() for memory in Memory}
    for seed in range(3):
        offloaded.load()
        train(layer, optimizer, device, seed)
        seen[Memory.DEVICE].add(version_of(layer.into.weight))
        offloaded.evict()
        seen[Memory.HOST].add(version_of(layer.into.weight))
    assert len(seen[Memory.DEVICE]) == len(seen[Memory.HOST]) == 3
    assert seen[Memory.DEVICE].isdisjoint(seen[Memory.HOST])


def test_state_of_a_second_optimizer_that_has_moved_goes_on_moving(device: str) -> None:
    layer = nn.Linear(3, 3)
    optimizer = optim.Adam(layer.parameters(), fused=True)
    offloaded = with_steps(
        layer, optim.SGD(layer.parameters(), momentum=0.9), optimizer, device=device
    )
    offloaded.load()
    layer(torch.ones(3, device=device)).sum().backward()
    optimizer.step()
    step = optimizer.state[layer.weight]["step"]
    offloaded.evict()
    optimizer.param_groups[0]["fused"] = False  # a new step would stay on the CPU
    layer.zero_grad()  # the module looks for its tensors again
    offloaded.load()
    assert offloaded.groups.state.buffer.has(step)
    offloaded.evict()
    assert not offloaded.groups.state.buffer.has(step) and step.item() == 1


def test_state_that_is_loaded_from_a_file_moves(device: str) -> None:
    layer, optimizer, offloaded = made(device)
    offloaded.load()
    train(layer, optimizer, device)
    saved = copy.deepcopy(optimizer.state_dict())
    train(layer, optimizer, device)
    offloaded.evict()
    offloaded.load()
    optimizer.load_state_dict(saved)
    kept = [each for state in optimizer.state.values() for each in state.values() if each.dim()]
    assert kept and all(offloaded.groups.state.buffer.has(each) for each in kept) is False
    offloaded.evict()
    offloaded.load()
    assert all(offloaded.groups.state.buffer.has(each) for each in kept)


def test_tensors_tied_within_a_loaded_module_remain_tied(device: str) -> None:
    layer = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    offloaded = OffloadedModule(layer, device=device)
    offloaded.load()
    layer[1].weight.data = layer[0].weight.data
    for move in (offloaded.evict, offloaded.load):
        move()
        with torch.no_grad():
            layer[0].weight.add_(1)
        assert torch.equal(layer[0].weight, layer[1].weight)


def test_a_tensor_of_two_modules_is_refused_by_name() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.weight = one.weight
    offloaded = OffloadedModule(one, device="cpu", name="one")
    with pytest.raises(ValueError, match="'other': weight is also weight of the .* module 'one'"):
        OffloadedModule(other, device="cpu", name="other")
    offloaded.close()
    both = OffloadedModule(nn.ModuleList([one, other]), device="cpu")
    both.load()
    assert other.weight is one.weight


class Quantized(Tensor):
    """A tensor of a class that does not expose inner tensors."""


def with_weight(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


@pytest.mark.parametrize(
    ("refused", "kind", "message"),
    [
        (nn.LazyLinear(1), TypeError, "1.weight: expected a plain tensor"),
        (with_weight(torch.ones(2, 2).to_sparse()), ValueError, "1.weight: expected a dense tens"),
        (
            speedtorch.Embedding(5, 2),
            TypeError,
            "module 'block': 1.weight is a speedtorch.Embedding's weight, .* Offload only modules",
        ),
        (
            with_weight(torch.ones(2, 2).as_subclass(Quantized)),
            TypeError,
            "module 'block': 1.weight must be a plain tensor, .*Quantized, .* TrainingState",
        ),
    ],
    ids=["lazy", "sparse", "rows", "quantized"],
)
def test_modules_of_other_tensors_are_refused_by_name(
    refused: nn.Module, kind: type[Exception], message: str
) -> None:
    block = nn.Sequential(nn.Linear(2, 2), refused)
    with pytest.raises(kind, match=message) as kept:
        OffloadedModule(block, device="cpu", name="block")
    OffloadedModule(block[0], device="cpu").close()
    assert kept.value.__traceback__ is not None  # which has the first one


def test_wrong_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(1, 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    wrong: list[tuple[tuple[Any, ...], str, type[Exception], str]] = [
        (([],), "cpu", TypeError, "module: expected an nn.Module, got list"),
        ((layer, "adam"), "cpu", TypeError, "optimizer: expected .* got str"),
        ((layer,), "cuda:0", RuntimeError, "device='cuda:0' needs a GPU, and torch finds none"),
    ]
    for arguments, device, kind, message in wrong:
        with pytest.raises(kind, match=message):
            OffloadedModule(*arguments, device=device)


def test_an_optimizer_of_whole_models_is_refused_by_name() -> None:
    layer = nn.Linear(2, 1)
    optimizer = optim.LBFGS(layer.parameters(), max_iter=3)
    offloaded = with_steps(layer, optimizer, device="cpu", name="layer")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = layer(torch.ones(2)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match="module 'layer': LBFGS stores a list of tensors as state '.+' of weight"
    ):
        offloaded.load()


def test_sparse_gradients_are_refused_by_name_and_nothing_moves(device: str) -> None:
    layer = nn.Embedding(3, 2, sparse=True)
    offloaded = OffloadedModule(layer, device=device)
    offloaded.load()
    layer(torch.tensor([1], device=device)).sum().backward()
    with pytest.raises(ValueError, match="the gradient of weight: expected a dense tensor"):
        offloaded.evict()
    assert offloaded.groups.own.memory is Memory.DEVICE and layer.weight.device.type == device
    layer.weight.grad = None
    assert offloaded.evict() == offloaded.groups.nbytes

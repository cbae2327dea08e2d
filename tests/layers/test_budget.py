"""The budget bounds device memory of modules, with gradients and state that a step creates."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from conftest import NEEDS_GPU
from offloaded_models import Pair, own_optimizer
from torch import Tensor, nn, optim

from speedtorch.layers import Swapper, module_groups
from speedtorch.layers.split_steps import FirstState, PartialStep

WIDTH = 64
MODULE_BYTES = 2 * 4 * WIDTH * (WIDTH + 1)  # bytes of the weights of a module


def layers(count: int = 8, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(count)
        )
    )


OPTIMIZERS: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "SGD": lambda m: optim.SGD(m.parameters(), lr=0.1),
    "SGD, momentum": lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "AdamW": lambda m: optim.AdamW(m.parameters(), foreach=False),
    "AMSGrad, fused": lambda m: optim.Adam(m.parameters(), amsgrad=True, fused=True),
}


@contextmanager
def watched(swapper: Swapper, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """What modules take on the device after each gradient and each part of a step."""
    found: list[int] = []
    modules = list(swapper._offloaded.values())

    def look(_: object = None) -> None:
        groups = [offloaded.groups for offloaded in modules]
        found.append(sum(each.device_bytes + each.other_bytes() for each in groups))

    step = PartialStep.step

    def stepped(self: PartialStep, parameters: list[Tensor]) -> None:
        step(self, parameters)
        look()

    params = [param for offloaded in modules for param in offloaded.module.parameters()]
    hooks = [param.register_post_accumulate_grad_hook(look) for param in params]
    with monkeypatch.context() as patch:
        patch.setattr(PartialStep, "step", stepped)
        yield found
    for hook in hooks:
        hook.remove()


@pytest.mark.dealt("extra", "step")
@pytest.mark.parametrize("step", [False, True], ids=["optimizer steps", "backward steps"])
@pytest.mark.parametrize("extra", [1.05, 2.4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_modules_loaded_by_auto_keep_the_budget(
    optimizer: str, extra: float, step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = layers()
    made = OPTIMIZERS[optimizer](model)
    kept = {"SGD": 0, "SGD, momentum": 1, "AdamW": 2, "AMSGrad, fused": 3}[optimizer]
    budget = int((2 + kept) * (MODULE_BYTES + 1024) * extra)
    swapper = Swapper(model, made, device="cpu", budget=budget)
    with swapper.auto(step=step), watched(swapper, monkeypatch) as found:
        for _ in range(3):
            model(torch.ones(1, WIDTH)).sum().backward()
            made.step()
            made.zero_grad()
    assert found and MODULE_BYTES * (2 + kept) <= max(found) <= budget


def test_modules_in_use_keep_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    model = layers()
    made = OPTIMIZERS["AdamW"](model)
    budget = int(5.2 * (MODULE_BYTES + 1024))
    swapper = Swapper(model, made, device="cpu", budget=budget)
    with watched(swapper, monkeypatch) as found:
        for _ in range(2):
            for offloaded in model:
                with swapper.use(offloaded):
                    offloaded(torch.ones(1, WIDTH)).sum().backward()
                    made.step()
                made.zero_grad()
    assert found and max(found) <= budget


@pytest.mark.parametrize("room", [12.5, 14.5], ids=["one ahead", "two ahead"])
def test_prefetched_modules_are_kept_until_their_use(room: float, device: str) -> None:
    # Two experts in use take 4 modules' weights each with gradients and state, those ahead 3 each.
    model = layers(16)
    optimizer = optim.AdamW(model.parameters(), fused=True)
    swapper = Swapper(model, optimizer, device=device, budget=int(room * MODULE_BYTES))
    chosen = random.Random(0)
    plans = [chosen.sample(range(16), 2) for _ in range(40)]
    x = torch.randn(4, WIDTH, device=device)
    for number, (used, later) in enumerate(itertools.pairwise(plans * 2)):
        if number == len(plans):
            before = swapper.report()
        with swapper.use(*(model[each] for each in used)):
            swapper.prefetch(*(model[each] for each in later), state=True)
            (model[used[0]](x) + model[used[1]](x)).square().mean().backward()
            if device == "cuda":  # other processes of this run have the GPU, too
                torch.cuda.synchronize()
            swapper.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()  # what leaves has left
        swapper.prefetch()  # what found no room until then
    after, count = swapper.report(), len(plans) - 1
    assert after.bytes_in - before.bytes_in <= count * 2 * 3 * 1.1 * MODULE_BYTES
    assert after.bytes_out - before.bytes_out <= count * 2 * 3 * 1.1 * MODULE_BYTES
    assert after.misses - before.misses <= count * 2 * 0.05


def test_weights_that_were_replaced_in_a_use_count() -> None:
    model = layers(4)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    swapper = Swapper(model, optimizer, device="cpu", budget=int(4.5 * MODULE_BYTES))
    modules = list(swapper._offloaded.values())
    x = torch.randn(4, WIDTH)
    with swapper.use(model[0]):
        for _ in range(2):  # the gradients stay the same tensors
            model[0](x).sum().backward()
        own = list(model[0].parameters())
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(own).detach() * 2, own)
    for each in (1, 2):
        with swapper.use(model[each]):
            model[each](x)
    there = [each for each in modules if each.groups.device_bytes]
    other_bytes = [
        tensor.nbytes
        for each in there
        for weight in each.module.parameters()
        for tensor in (weight, weight.grad)
        if tensor is not None
        and not each.groups.own.buffer.has(tensor)
        and not each.groups.gradients.buffer.has(tensor)
    ]
    assert sum(each.groups.device_bytes for each in there) + sum(other_bytes) <= 4.5 * MODULE_BYTES


def test_an_evicted_module_is_loaded_only_by_a_use_or_a_prefetch() -> None:
    model = layers(3)
    optimizer = optim.AdamW(model.parameters(), fused=True)
    swapper = Swapper(model, optimizer, device="cpu", budget=int(4.3 * (MODULE_BYTES + 2048)))
    x = torch.randn(4, WIDTH)
    for each in model[:2]:
        with swapper.use(each):
            each(x).square().mean().backward()
            swapper.step()
        optimizer.zero_grad()
    swapper.evict()
    with torch.no_grad(), swapper.use(model[0], model[1]):
        model[1](model[0](x))
    swapper.evict()
    with torch.no_grad(), swapper.use(model[2]):
        model[2](x)
    assert swapper.report().resident == ("2",)


def test_gradients_that_were_dropped_and_state_make_room_for_modules_in_use() -> None:
    budget = int(4.6 * (MODULE_BYTES + 1024))  # weights and gradients of both, and no state
    models = Pair(layers(2), "cpu", partial(optim.AdamW, foreach=False), budget=budget)
    for _ in range(3):
        for model, optimizer in models:
            with models.swapper.use(*models.made) if model is models.made else nullcontext():
                model(torch.ones(1, WIDTH)).sum().backward()
                assert models.swapper.report().resident_bytes <= budget
            optimizer.step()
            optimizer.zero_grad()
    models.assert_same()


def test_a_backward_without_room_for_its_gradients_says_so() -> None:
    model = layers(2)
    swapper = Swapper(model, device="cpu", budget=int(1.5 * MODULE_BYTES))
    with swapper.use(model[0]):
        result = model[0](torch.ones(1, WIDTH)).sum()
        with pytest.raises(RuntimeError, match=r"in use, \['0'\], with their gradients. Increase"):
            result.backward()
    assert all(each.grad is None for each in model.parameters())
    with torch.no_grad(), swapper.use(model[0]):
        model[0](torch.ones(1, WIDTH))


def test_a_module_in_use_that_no_backward_reaches_needs_no_room_for_gradients() -> None:
    model = layers(3)
    swapper = Swapper(model, device="cpu", budget=int(3.3 * MODULE_BYTES))
    with swapper.use(model[0], model[1]):
        model[0](torch.ones(1, WIDTH)).sum().backward()
        swapper.prefetch(model[2])
        assert swapper.report().resident_bytes <= int(3.3 * MODULE_BYTES)
        model[0](torch.ones(1, WIDTH)).sum().backward()


def test_a_module_whose_eviction_failed_waits_for_all_queued_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end = object()
    monkeypatch.setattr(module_groups, "end_of_current", lambda _: end)
    model = layers(2)
    swapper = Swapper(model, device="cpu")
    with swapper.use(model[0]):
        pass
    offloaded = swapper._offloaded[model[0]]
    assert offloaded.changes.boundary() is end
    with monkeypatch.context() as patch:
        patch.setattr(
            type(offloaded.groups.own), "evict", lambda *_, **__: (_ for _ in ()).throw(MemoryError)
        )
        with pytest.raises(MemoryError):
            swapper.evict(model[0])
    assert offloaded.groups.device_bytes and offloaded.changes.boundary() is None


@pytest.mark.parametrize(("optimizer", "kept"), zip(OPTIMIZERS, range(4), strict=True))
def test_state_is_known_before_there_is_any(optimizer: str, kept: int) -> None:
    model = layers(1)
    made = OPTIMIZERS[optimizer](model)
    first = FirstState(made)
    assert [first.nbytes(each) for each in model.parameters()] == [
        kept * each.nbytes for each in model.parameters()
    ]
    assert not made.state
    assert first.nbytes(nn.Parameter(torch.ones(3))) == 0  # which the optimizer does not have


@own_optimizer
def reads(optimizer: Any, params: list[Any]) -> None:
    """Reads elements, which a trial without memory cannot."""
    for param in params:
        if param.grad.sum().item() != 0:
            optimizer.state[param]["kept"] = torch.zeros_like(param)


def test_state_of_an_optimizer_that_reads_elements_counts_once_it_is_there() -> None:
    model = layers(4)
    made = reads(model.parameters())
    assert FirstState(made).nbytes(model[0][0].weight) == 0
    swapper = Swapper(model, made, device="cpu", budget=int(4.2 * (MODULE_BYTES + 1024)))
    for offloaded in model:
        with swapper.use(offloaded):
            offloaded(torch.ones(1, WIDTH)).sum().backward()
            made.step()
        made.zero_grad()
    assert swapper.report().resident_bytes <= int(4.2 * (MODULE_BYTES + 1024))


@NEEDS_GPU
@pytest.mark.parametrize("step", [False, True], ids=["optimizer steps", "backward steps"])
@pytest.mark.parametrize("extra", [1.05, 1.6, 2.3])
def test_the_allocator_has_given_no_more(extra: float, step: bool) -> None:
    width = 1024
    model = layers(8, width)
    made = optim.AdamW(model.parameters(), foreach=False)
    budget = int(4 * 8 * width * (width + 1) * extra)
    x = torch.ones(1, width, device="cuda")
    leaf = torch.ones(width, 1, device="cuda", requires_grad=True)
    (x @ leaf).sum().backward()  # what cuBLAS allocates for each thread is there
    del leaf
    swapper = Swapper(model, made, device="cuda", budget=budget)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with swapper.auto(step=step):
        for _ in range(4):
            model(x).sum().backward()
            made.step()
            made.zero_grad()
    # A step of AdamW has two temporaries of a weight's size.
    assert torch.cuda.max_memory_allocated() - before <= budget + 3 * 4 * width**2

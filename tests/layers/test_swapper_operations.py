"""Under auto() an operation on a module's tensors brings it, wherever the program has it from."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import NEEDS_GPU
from offloaded_models import Pair, linears
from torch import Tensor, nn, optim
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from speedtorch.layers import Swapper

WIDTH = 32


ADAMW = partial(optim.AdamW, lr=0.02)
STEP = pytest.mark.parametrize("step", [False, True], ids=["optimizer steps", "backward steps"])


class Model(nn.Module):
    """What is trained: named parts, of which some are offloaded."""

    offloaded: list[nn.Module]
    at_once = 1
    """How many modules are used at once."""

    def loss(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Tied(Model):
    """A language model whose tied modules are one nn.ModuleList, which has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, WIDTH)
        self.middle = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.out = nn.Linear(WIDTH, 20, bias=False)
        self.out.weight = self.words.weight
        self.offloaded = [nn.ModuleList([self.words, self.out]), *self.middle]

    def loss(self, x: Tensor) -> Tensor:
        ids = (x[:, :3].abs() * 19).long() % 20
        return F.cross_entropy(self.out(self.middle(self.words(ids))).mean(1), ids[:, 0])


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.into(x)))

    def decode(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(x)
        return y


class Methods(Model):
    """Modules whose forward is not called, but methods of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.offloaded = [Coder() for _ in range(3)]
        self.parts = nn.ModuleList(self.offloaded)

    def loss(self, x: Tensor) -> Tensor:
        coders: list[Any] = self.offloaded
        for each in coders:
            x = each.encode(x)
        for each in reversed(coders):
            x = x + each.decode(x)
        return x.square().mean()


class Penalty(Model):
    """The loss has a term of each weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.offloaded = list(self.layers)

    def loss(self, x: Tensor) -> Tensor:
        loss = self.layers(x).square().mean()
        for each in self.parameters():
            loss = loss + 0.01 * each.square().sum()
        return loss


class Head(nn.Module):
    """Computes with the weight of another module."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self._of_other = [other]  # and is no parent of it

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.before(x))
        y: Tensor = self.after(torch.tanh(F.linear(x, self._of_other[0].weight)))
        return y


class Borrowed(Model):
    at_once = 2

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = Head(self.first)
        self.offloaded = [self.first, self.second, self.head]

    def loss(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return y.square().mean()


class Outer(nn.Module):
    """Calls another module."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self._other = [other]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.after(torch.tanh(self._other[0](torch.tanh(self.before(x)))))
        return y


class Nested(Model):
    at_once = 2

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.first, self.second = Outer(self.shared), Outer(self.shared)
        self.offloaded = [self.shared, self.first, self.second]

    def loss(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x)))
        return y.square().mean()


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, WIDTH))
        self.scale: Tensor
        self.register_buffer("scale", torch.randn(WIDTH))


class Parts(Model):
    """Takes views of a module's tensors, trained and not."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
        self.offloaded = [self.positions, *self.layers]

    def loss(self, x: Tensor) -> Tensor:
        x = self.layers(x + self.positions.table[: len(x)])
        x = x * self.positions.scale + self.positions.table.T.T[: len(x)]
        return self.layers(x).square().mean()


class Checkpointed(Model):
    """Its methods are computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Methods()
        self.offloaded = self.model.offloaded

    def loss(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.model.loss, x, use_reentrant=False)
        return y


MODELS: list[type[Model]] = [Tied, Methods, Penalty, Borrowed, Nested, Parts, Checkpointed]


@pytest.mark.dealt("narrow", "step")
@pytest.mark.parametrize("narrow", [False, True], ids=["", "autocast"])
@STEP
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_operations_on_modules_train_like_resident_ones(
    kind: type[Model], step: bool, narrow: bool, device: str
) -> None:
    torch.manual_seed(2)
    model = kind()
    nbytes = [sum(each.nbytes for each in module.parameters()) for module in model.offloaded]
    needed = 4 * max(nbytes) + 8000  # of the largest one, with gradients and state
    budget = needed * model.at_once
    pair = Pair(model, device, ADAMW, lambda model: model.offloaded, budget=budget)
    pair.swapper.auto(step=step)
    for number in range(4):
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(number)).to(device)

        def loss(model: Model, x: Tensor = x) -> Tensor:
            with torch.autocast(device, torch.bfloat16, enabled=narrow):
                loss = model.loss(x)
            if model is pair.made:
                pair.swapper.evict()
            return loss

        pair.train(loss)
    assert pair.swapper.report().misses > 2 * len(nbytes)  # they have left all the while
    pair.assert_same()
    pair.swapper.close()
    pair.assert_same()
    tensors = model.state_dict(keep_vars=True).values()
    assert all(type(each) in (nn.Parameter, Tensor) for each in tensors)


LOOKS: dict[str, Callable[[nn.Sequential], object]] = {
    "print": lambda m: repr(m[0].weight),
    "state_dict": lambda m: m.state_dict(),
    "detach": lambda m: m[0].weight.detach(),
    "copy": copy.deepcopy,
    "data": lambda m: m[0].weight.data.sum(),
    "freeze": lambda m: m[0].requires_grad_(False),
    "hook": lambda m: m[0].weight.register_hook(lambda gradient: gradient),
    "zero_grad": lambda m: m.zero_grad(),
    "fill": lambda m: nn.init.ones_(m[0].weight),
    "load": lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
    "all at once": torch.no_grad()(lambda m: torch._foreach_norm(list(m.parameters()))),
}


@pytest.mark.parametrize("look", LOOKS)
def test_what_looks_at_a_module_or_writes_to_it_finds_it_where_it_is(
    look: str, device: str
) -> None:
    model = linears(3, WIDTH)
    swapper = Swapper(model, device=device)
    with swapper.auto():
        LOOKS[look](model)
        assert not swapper.report().resident
        x = torch.ones(2, WIDTH, device=device)
        alike = copy.deepcopy(model).to(device)
        assert torch.equal(model(x), alike(x))


def test_an_operation_on_modules_that_do_not_fit_names_them() -> None:
    model = linears(3, WIDTH)
    swapper = Swapper(model, device="cpu", budget=2 * 4 * WIDTH * (WIDTH + 2))
    with swapper.auto(), pytest.raises(RuntimeError, match="too small for the modules"):
        torch.cat([each.weight for each in model])
    assert not swapper.report().in_use
    with swapper.auto():
        assert model(torch.ones(2, WIDTH)).shape == (2, WIDTH)


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "vmap": lambda m, x: torch.vmap(m)(x),
    "vmap of a weight": lambda m, x: torch.vmap(lambda row: m.get_parameter("0.weight") @ row)(x),
    "grad": lambda m, x: torch.func.grad(lambda x: m(x).square().sum())(x),
    "grads of samples": lambda m, x: torch.vmap(torch.func.grad(lambda x: m(x).sum()))(x),
    "jvp": lambda m, x: torch.func.jvp(m, (x,), (x,)),
    "jacrev": lambda m, x: torch.func.jacrev(m)(x),
    "grad of a weight": lambda m, x: torch.func.grad(
        lambda weight: functional_call(m, {"0.weight": weight}, (x,)).sum()
    )(m.get_parameter("0.weight").detach()),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_torch_func_compute_with_modules_in_use(transform: str, device: str) -> None:
    model, x = linears(3), torch.randn(2, 4)
    compute = TRANSFORMS[transform]
    expected = compute(model, x)
    swapper = Swapper(model, device=device, budget=4096)
    with swapper.auto():
        with swapper.use(*model):
            found = compute(model, x.to(device))
        torch.testing.assert_close(found, expected, check_device=False)
        swapper.evict()
        with pytest.raises(NotImplementedError, match=r"module .0.: .* within swapper.use"):
            compute(model, x.to(device))
        assert not swapper.report().in_use
        assert model(x.to(device)).shape == (2, 4)
    if transform == "vmap of a weight":  # between uses
        found = compute(model, x.to(device))
        torch.testing.assert_close(found, expected, check_device=False)


def substitutes_of(model: nn.Module, kind: str, device: str) -> tuple[Tensor, dict[str, Any]]:
    """A tensor of all numbers, and what functional_call() computes with in place of parameters."""
    named = dict(model.named_parameters())
    sizes = [param.numel() for param in named.values()]
    # Not of the parameters themselves: nothing may be in their memory.
    copies = [param.detach().to(device, copy=True).flatten() for param in named.values()]
    whole = torch.cat(copies) * 0.9
    views = dict(zip(named, whole.split(sizes), strict=True))
    views = {name: view.view(named[name].shape) for name, view in views.items()}
    made: dict[str, Any] = {
        "views": lambda: views,
        "parameters": lambda: {name: nn.Parameter(view) for name, view in views.items()},
        "computed": lambda: {name: param * 1.1 for name, param in named.items()},
    }
    return whole, made[kind]()


@pytest.mark.parametrize("budget", [None, "3KiB"])
@pytest.mark.parametrize("kind", ["views", "parameters", "computed"])
def test_tensors_of_functional_call_are_the_programs(
    kind: str, budget: str | None, device: str
) -> None:
    models = Pair(linears(3), device, ADAMW, budget=budget)
    x = torch.randn(2, 4, device=device)
    with models.swapper.auto():
        for _ in range(3):
            found = []
            for model, optimizer in models:
                whole, substitutes = substitutes_of(model, kind, device)
                before = model(x)  # its graph is of the parameters
                result = functional_call(model, substitutes, (x,))
                (result - before).square().sum().backward()
                gradients = [each.grad for each in substitutes.values() if each.is_leaf]
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    whole *= 2  # of a view or a parameter too
                found.append([result, *gradients, *substitutes.values()])
                assert all(type(each) in (Tensor, nn.Parameter) for each in substitutes.values())
            for first, second in zip(*found, strict=True):
                assert first is second is None or torch.equal(first, second)
    models.assert_same()


@NEEDS_GPU
def test_inputs_on_another_device_are_copied() -> None:
    model = linears(3, WIDTH)
    alike = copy.deepcopy(model).cuda()
    swapper = Swapper(model, device="cuda")
    x = torch.randn(2, WIDTH)
    with swapper.auto():
        x = x.to(next(model.parameters()).device)
        assert x.device.type == "cpu"
        assert torch.equal(model(x), alike(x.cuda()))
        swapper.evict()
        assert torch.equal(F.linear(x, model[0].weight), F.linear(x.cuda(), alike[0].weight))
        swapper.evict()
        made = x.clone()
        with pytest.raises(RuntimeError, match="device"):
            made.add_(model[0].weight[:2])
        assert torch.equal(made, x)


class Adapted(nn.Module):
    """As peft does: around a layer, and where its weight is."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        where = base.weight.device
        self.down = nn.Linear(WIDTH, 4, bias=False, device=where)
        self.up = nn.Linear(4, WIDTH, bias=False, device=where)
        self.register_buffer("scale", torch.tensor([0.5], device=where))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.up(self.down(x)) * self.scale
        return y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer: nn.Module = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


@STEP
def test_parameters_are_added_to_modules_between_steps(step: bool, device: str) -> None:
    torch.manual_seed(3)
    blocks = nn.Sequential(*(Block() for _ in range(4)))
    pair = Pair(blocks, device, ADAMW, budget=2 * 16 * WIDTH * (WIDTH + 30))
    pair.swapper.auto(step=step)
    x = torch.randn(6, WIDTH, device=device)
    for number in range(8):
        pair.train(lambda model: model(x).square().mean())
        if number % 2 == 0:
            if number == 2:
                pair.swapper.evict()
            for model, optimizer in pair:
                block = model[number // 2]
                new = Adapted(block.layer)
                for each in (new.down, new.up):  # alike on a GPU
                    nn.init.constant_(each.weight, 0.1 * (number + 1))
                block.layer = new
                optimizer.add_param_group({"params": [new.down.weight, new.up.weight]})
    pair.assert_same()

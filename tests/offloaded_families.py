"""Families of models whose parts a Swapper offloads, and their training in each way.

A `Family` makes a tiny model, names the offloaded modules and computes a loss. ResNet and LSTM are
here, those that need a library in client_families.py. `trained` trains a model;
`assert_same_training` compares one with modules within a third of what they take, and one that
stays on the device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from offloaded_models import Pair, assert_equal
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from speedtorch.layers import Swapper

__all__ = [
    "FAMILIES",
    "MODES",
    "VARIANTS",
    "Family",
    "Setting",
    "assert_same_training",
    "assert_same_training_at_once",
    "assert_too_large_at_once",
    "drawn",
    "modules_of",
]

# With deterministic algorithms torch asks for this before it multiplies matrices on a GPU.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

STEPS = 3
MODES = ["use", "auto", "auto-step"]
VARIANTS = ["plain", "checkpoint", "reentrant-checkpoint", "lora", "accumulation", "autocast"]


@dataclass(frozen=True)
class Family:
    """A kind of model.

    If a model `shares` a tensor among modules (the states of an encoder), a graph that is cut
    between modules adds the tensor's gradients in another order.
    """

    make: Callable[[], nn.Module]
    offloaded: Callable[[Any], Iterable[nn.Module]]
    loss: Callable[[Any, int, str], Tensor]  # for a batch with this number, on a device
    checkpoints: Callable[[Any, bool], None]  # lets layers be computed again, with use_reentrant
    adapt: Callable[[Any], nn.Module]  # adds trained low-rank adapters and freezes the rest
    shares: bool = False


@dataclass(frozen=True)
class Setting:
    """How a family is trained: one of MODES, one of VARIANTS, and the device."""

    mode: str
    variant: str
    device: str


def drawn(number: int, *shape: int, high: int | None = None) -> Tensor:
    """Random numbers of a batch; `high`: whole ones from 1 below this."""
    generator = torch.Generator().manual_seed(number)
    if high is None:
        return torch.randn(shape, generator=generator)
    return torch.randint(1, high, shape, generator=generator)


def modules_of(family: Family, model: Any) -> list[nn.Module]:
    """The modules of a model, which peft may have wrapped."""
    return list(
        family.offloaded(model.get_base_model() if hasattr(model, "get_base_model") else model)
    )


# ------------------------------------------------------------------------------------------------
# A use for each forward and each backward of a module


class _Call:
    """A call of a module, whose graph is apart from the others'."""

    def __init__(self, using: Callable[[], AbstractContextManager[None]], run: Any) -> None:
        self.using, self.run = using, run
        self.given: list[Tensor] = []
        self.results: list[Tensor] = []
        self.leaves: list[Any] = []
        """What it gives, flat; at these places are the results."""
        self.places: list[int] = []
        self.shape: Any = None


def _places_with_gradients(leaves: list[Any]) -> list[int]:
    return [n for n, each in enumerate(leaves) if isinstance(each, Tensor) and each.requires_grad]


class _Apart(torch.autograd.Function):
    """Runs a call, and later its graph, each in a use of its own."""

    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, *tensors: Tensor) -> Any:
        call.given = [each.detach().requires_grad_() for each in tensors]
        with call.using(), torch.enable_grad():
            call.leaves, call.shape = tree_flatten(call.run(call.given))
        call.places = _places_with_gradients(call.leaves)
        call.results = [call.leaves[place] for place in call.places]
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(each.detach() for each in call.results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        call: _Call = ctx.call
        pairs = [
            (each, gradient)
            for each, gradient in zip(call.results, gradients, strict=True)
            if gradient is not None
        ]
        with call.using():
            torch.autograd.backward([each for each, _ in pairs], [each for _, each in pairs])
        return None, None, *(each.grad for each in call.given)


def use_by_call(module: nn.Module, using: Callable[[], AbstractContextManager[None]]) -> None:
    """Lets each forward of a module, and each backward, lie within `using()`."""

    class Used(type(module)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            called = super().__call__
            if not torch.is_grad_enabled():
                with using():
                    return called(*args, **kwargs)
            leaves, shape = tree_flatten((args, kwargs))
            places = _places_with_gradients(leaves)

            def run(tensors: list[Tensor]) -> Any:
                for place, each in zip(places, tensors, strict=True):
                    leaves[place] = each
                args, kwargs = tree_unflatten(leaves, shape)
                return called(*args, **kwargs)

            call = _Call(using, run)
            anchor = torch.empty(0, requires_grad=True)  # also where no argument has a gradient
            results = _Apart.apply(call, anchor, *(leaves[place] for place in places))
            for place, each in zip(call.places, results, strict=True):
                call.leaves[place] = each
            return tree_unflatten(call.leaves, call.shape)

    Used.__name__ = type(module).__name__
    module.__class__ = Used


# ------------------------------------------------------------------------------------------------
# Training


class _TwoDevices(TorchDispatchMode):
    """Refuses operations on parameters of evicted modules and other tensors, as with a GPU."""

    def __init__(self, swapper: Swapper) -> None:
        super().__init__()
        self._modules = swapper._offloaded.values()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        buffers = [module.groups.own.buffer for module in self._modules]
        on_host = {each._cdata for buffer in buffers for each in buffer._host_storages}
        are_there = {
            each.untyped_storage()._cdata in on_host
            for each in tree_leaves((args, kwargs))
            # Modules are copied as bytes.
            if isinstance(each, Tensor) and each.dim() and each.dtype != torch.uint8
        }
        assert len(are_there) < 2, f"{func}: parameters of an evicted module"
        return func(*args, **(kwargs or {}))


def _two_devices(swapper: Swapper) -> AbstractContextManager[Any]:
    return _TwoDevices(swapper) if swapper.device.type == "cpu" else nullcontext()


def training_bytes(offloaded: list[nn.Module]) -> int:
    """Bytes of modules with gradients and AdamW's state."""
    parameters = {each for module in offloaded for each in module.parameters()}
    buffers = {each for module in offloaded for each in module.buffers()}
    return sum(each.nbytes * (4 if each.requires_grad else 1) for each in parameters) + sum(
        each.nbytes for each in buffers
    )


def make_pair(family: Family, setting: Setting, thirds: int = 1) -> Pair:
    """A model whose modules are within so many thirds of what they take, and one on the device."""
    torch.manual_seed(0)
    model = family.make()
    if setting.variant == "lora":
        model = family.adapt(model)
    if "checkpoint" in setting.variant:
        family.checkpoints(model, setting.variant == "reentrant-checkpoint")
    modules = partial(modules_of, family)
    budget = training_bytes(modules(model)) * thirds // 3

    def make(parameters: Iterable[Tensor]) -> Optimizer:
        return optim.AdamW([param for param in parameters if param.requires_grad], lr=0.01)

    return Pair(model, setting.device, make, modules, budget=budget)


def trained(
    family: Family,
    model: nn.Module,
    optimizer: Optimizer,
    setting: Setting,
    after_step: Callable[[], None] = lambda: None,
    using: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> list[Tensor]:
    """Trains a model; gives its losses, in training and in evaluation.

    Each forward lies within `using()` with its backward.
    """
    torch.manual_seed(1)  # for dropout
    accumulates, narrows = setting.variant == "accumulation", setting.variant == "autocast"
    losses = []
    for step in range(STEPS):
        for part in range(2 if accumulates else 1):
            number = 2 * step + part
            with using():
                with torch.autocast(setting.device, torch.bfloat16, enabled=narrows):
                    loss = family.loss(model, number, setting.device)
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach().cpu())
            if setting.mode == "auto-step":  # each backward is a step
                optimizer.step()
                optimizer.zero_grad()
        optimizer.step()
        if step < STEPS - 1:  # gradients of the last step are compared
            optimizer.zero_grad()
        after_step()
    model.eval()
    with torch.no_grad(), using():
        losses.append(family.loss(model, 0, setting.device).cpu())
    model.train()
    return losses


def assert_same_training(family: Family, setting: Setting) -> None:
    """Trains with modules within a third of what they take, and without, and compares all bits.

    Where each call is a use, the graph is cut between modules; the plain model's is cut, too, where
    that alone gives other bits.
    """
    pair = make_pair(family, setting)
    swapper, offloaded = pair.swapper, modules_of(family, pair.made)
    nbytes = sum(param.nbytes for module in offloaded for param in module.parameters())
    auto: AbstractContextManager[Any] = nullcontext()
    if setting.mode == "use":
        for module in offloaded:
            use_by_call(module, lambda module=module: swapper.use(module))
        # Autocast casts a leaf once, and the inputs of a graph that is cut are leaves.
        is_cut = family.shares or setting.variant == "autocast"
        for module in modules_of(family, pair.whole) if is_cut else ():
            use_by_call(module, nullcontext)
    else:
        auto = swapper.auto(step=setting.mode == "auto-step")

    def check() -> None:
        report = swapper.report()
        assert report.resident_bytes <= report.budget_bytes and not report.in_use

    with auto, _two_devices(swapper):
        found = trained(family, pair.made, pair.optimizers[0], setting, check)
    expected = trained(family, pair.whole, pair.optimizers[1], setting)
    assert [each.item() for each in found] == [each.item() for each in expected]
    assert expected[0] != expected[-1]
    assert swapper.report().bytes_in > STEPS * nbytes
    pair.assert_same()
    groups, expected_groups = (each.state_dict()["param_groups"] for each in pair.optimizers)
    assert groups == expected_groups


def assert_same_training_at_once(family: Family, device: str) -> None:
    """Uses all modules for each forward and backward, within what weights and gradients take."""
    setting = Setting("use", "plain", device)
    pair = make_pair(family, setting, thirds=2)
    used = partial(pair.swapper.use, *modules_of(family, pair.made))
    with _two_devices(pair.swapper):
        found = trained(family, pair.made, pair.optimizers[0], setting, using=used)
    expected = trained(family, pair.whole, pair.optimizers[1], setting)
    assert [each.item() for each in found] == [each.item() for each in expected]
    report = pair.swapper.report()
    assert report.resident_bytes <= report.budget_bytes
    pair.assert_same()


def assert_too_large_at_once(family: Family, device: str) -> None:
    """A third is enough for all weights, and not for their gradients; nothing is stepped."""
    pair = make_pair(family, Setting("use", "plain", device))
    message = "too small for the modules in use, .*, with their gradients"
    used = pair.swapper.use(*modules_of(family, pair.made))
    with pytest.raises(RuntimeError, match=message), used:
        family.loss(pair.made, 0, device).backward()  # type: ignore[no-untyped-call]
    assert not pair.swapper.report().in_use
    assert_equal(*(dict(model.named_parameters()) for model, _ in pair))


# ------------------------------------------------------------------------------------------------
# Families of torch alone


class _Residual(nn.Module):
    """Two convolutions with batch norms, beside a shortcut."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(out)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.last_norm = nn.BatchNorm2d(out)
        self.shortcut = (
            nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))
            if stride > 1
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu_(self.norm(self.first(x)))
        y = self.last_norm(self.second(y))
        y += self.shortcut(x)
        return torch.relu_(y)


def _call(block: nn.Module, *args: Any, reentrant: bool | None) -> Any:
    if reentrant is None or not block.training:
        return block(*args)
    return checkpoint(block, *args, use_reentrant=reentrant)


class _ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        strides = [1, 2, 1, 1, 1]
        widths = [16, 16, 24, 24, 24, 24]
        self.blocks = nn.ModuleList(map(_Residual, widths, widths[1:], strides))
        self.head = nn.Linear(24, 5)
        self.reentrant: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = _call(block, x, reentrant=self.reentrant)
        y: Tensor = self.head(x.mean((2, 3)))
        return y


class _Recurrent(nn.Module):
    """An LSTM over the results of the one before, and what is added to them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.project = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, state = self.lstm(x, state)
        return x + self.dropout(self.project(y)), state


class _Lstm(nn.Module):
    """Several LSTMs, each of which begins with the state that the one before has left."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 24)
        self.blocks = nn.ModuleList(_Recurrent(24) for _ in range(5))
        self.head = nn.Linear(24, 32)
        self.reentrant: bool | None = None

    def forward(self, ids: Tensor) -> Tensor:
        x, state = self.words(ids), None
        for block in self.blocks:
            x, state = _call(block, x, state, reentrant=self.reentrant)
        y: Tensor = self.head(x)
        return y


class _LowRank(nn.Module):
    """A frozen layer beside two small ones that are trained."""

    def __init__(self, layer: nn.Linear | nn.Conv2d) -> None:
        super().__init__()
        self.layer, bias = layer, {"bias": False}
        if isinstance(layer, nn.Linear):
            self.down: nn.Module = nn.Linear(layer.in_features, 2, **bias)
            self.up: nn.Module = nn.Linear(2, layer.out_features, **bias)
        else:
            size, stride, padding = layer.kernel_size, layer.stride, layer.padding
            self.down = nn.Conv2d(layer.in_channels, 2, size, stride, padding, **bias)  # type: ignore[arg-type]
            self.up = nn.Conv2d(2, layer.out_channels, 1, **bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) + self.up(self.down(x))
        return y


def _adapt(*names: str) -> Callable[[nn.Module], nn.Module]:
    def adapt(model: nn.Module) -> nn.Module:
        model.requires_grad_(False)
        for block in model.blocks:  # type: ignore[union-attr]
            for name in names:
                setattr(block, name, _LowRank(getattr(block, name)))
        return model

    return adapt


def _set_reentrant(model: Any, reentrant: bool) -> None:
    model.reentrant = reentrant


def _resnet_loss(model: nn.Module, number: int, device: str) -> Tensor:
    x, label = drawn(number, 4, 3, 8, 8).to(device), drawn(number, 4, high=5).to(device)
    return nn.functional.cross_entropy(model(x), label)


def _lstm_loss(model: nn.Module, number: int, device: str) -> Tensor:
    ids = drawn(number, 3, 7, high=32).to(device)
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


FAMILIES = {
    "ResNet": Family(
        _ResNet,
        lambda model: [model.stem, *model.blocks, model.head],
        _resnet_loss,
        _set_reentrant,
        _adapt("first", "second"),
    ),
    "LSTM": Family(
        _Lstm,
        lambda model: [model.words, *model.blocks, model.head],
        _lstm_loss,
        _set_reentrant,
        _adapt("project"),
    ),
}

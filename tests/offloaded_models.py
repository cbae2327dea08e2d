"""Layers and optimizers for tests of offloaded modules."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_flatten_with_path

from speedtorch.layers import OffloadedModule, Swapper

COMMON_OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "Adam-foreach": partial(optim.Adam, foreach=True),
    "Adagrad": partial(optim.Adagrad, lr=0.1),
    "RMSprop": partial(optim.RMSprop, momentum=0.5, centered=True),
    "Adadelta": optim.Adadelta,
    "Adamax": optim.Adamax,
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "ASGD": optim.ASGD,
    "Rprop": optim.Rprop,
}
"""Those of every test of modules, by name."""


def own_optimizer(step: Callable[[Any, list[Any]], object]) -> type[Optimizer]:
    """A user's optimizer whose step calls a function of itself and of parameters with gradients."""

    class Own(Optimizer):
        def __init__(self, parameters: Any, lr: float = 0.1) -> None:
            super().__init__(parameters, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            params = [param for group in self.param_groups for param in group["params"]]
            step(self, [param for param in params if param.grad is not None])

    Own.__name__ = step.__name__
    return Own


def linears(count: int, width: int = 4, **options: Any) -> nn.Sequential:
    """Linear layers in a chain, with the same values at each call."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, **options) for _ in range(count)))


class Layer(nn.Module):
    """A tied weight, a batch norm, a frozen part and one of 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 4)
        self.back = nn.Linear(4, 4)
        self.back.weight = self.into.weight
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.narrow = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.back(torch.tanh(self.into(x)) * self.scale))
        y: Tensor = self.narrow(self.frozen(x).bfloat16())
        return y.float()


def with_steps(module: nn.Module, *optimizers: Optimizer, **options: Any) -> OffloadedModule:
    """An offloaded module that is told of its optimizers' steps."""
    offloaded = OffloadedModule(module, *optimizers, **options)
    for optimizer in optimizers:
        optimizer.register_step_post_hook(offloaded.changes.note_step)
    return offloaded


def tensors_of(layer: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """All that a step reads and writes."""
    found: dict[str, Tensor] = dict(layer.named_parameters(remove_duplicate=False))
    found |= layer.named_buffers()
    for name, parameter in layer.named_parameters():
        if parameter.grad is not None:
            found[f"gradient of {name}"] = parameter.grad
        for path, value in tree_flatten_with_path(optimizer.state.get(parameter, {}))[0]:
            if isinstance(value, Tensor):
                found[f"{keystr(path)} of {name}"] = value
    return found


def copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.detach().cpu().clone() for name, each in tensors.items()}


def reloaded(value: Any, **options: Any) -> Any:
    """What torch.load() reads of what torch.save() has written."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


def assert_equal(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    for name, each in tensors.items():
        assert torch.equal(each.cpu(), expected[name].cpu()), name


def move_rest(model: nn.Module, offloaded: list[nn.Module], device: str) -> None:
    """Moves what is not offloaded to the device."""
    within = {part for module in offloaded for part in module.modules()}
    for part in model.modules():
        if part not in within:
            part._apply(lambda tensor: tensor.to(device), recurse=False)


class Pair:
    """A model whose modules a Swapper offloads, and the same one that stays on the device.

    Iterating yields each with its optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        device: str,
        make: Callable[..., Optimizer] = optim.AdamW,
        modules: Callable[[Any], Any] = list,
        **settings: Any,
    ) -> None:
        self.made, self.whole = model, copy.deepcopy(model).to(device)
        offloaded = modules(model)
        move_rest(model, offloaded, device)
        self.optimizers = [make(each.parameters()) for each in (self.made, self.whole)]
        self.swapper = Swapper(offloaded, self.optimizers[0], device=device, **settings)

    def __iter__(self) -> Iterator[tuple[Any, Optimizer]]:
        return zip((self.made, self.whole), self.optimizers, strict=True)

    def train(self, loss: Callable[[Any], Tensor]) -> None:
        """A step of both, whose losses are equal."""
        losses = []
        for model, optimizer in self:
            losses.append(loss(model))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(*losses)

    def assert_same(self) -> None:
        """All is the same, wherever the modules are."""
        assert not self.swapper.report().in_use
        for evict in (lambda: 0, self.swapper.evict):
            evict()
            assert_equal(*(tensors_of(model, optimizer) for model, optimizer in self))

"""LoRA over quantized weights in modules: wrappers move by the tensors within them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from offloaded_models import Pair, assert_equal, copies
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.utils._pytree import tree_map

from speedtorch.layers import Memory, OffloadedModule

aten = torch.ops.aten


class Scaled(Tensor):
    """Integers of 8 bits and a scale for each row, as torchao's weights: it computes in floats."""

    codes: Any
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Any, scale: Tensor) -> Scaled:
        made: Scaled = Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=scale.dtype, device=codes.device
        )
        made.codes, made.scale = codes, scale
        return made

    @classmethod
    def of(cls, weight: Tensor) -> Scaled:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, settings: None, size: Any, stride: Any) -> Scaled:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.copy_.default:
            args[0].codes.copy_(args[1].codes)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        if func in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            return cls(
                *(func(each, *args[1:], **kwargs) for each in (args[0].codes, args[0].scale))
            )
        whole = tree_map(
            lambda e: e.codes * e.scale if isinstance(e, Scaled) else e, (args, kwargs)
        )
        return func(*whole[0], **whole[1])


class Nested(Scaled):
    """A wrapper whose integers are in another wrapper."""

    @classmethod
    def of(cls, weight: Tensor) -> Scaled:
        within = Scaled.of(weight)
        return cls(within, torch.ones_like(within.scale))


class LoRA(nn.Module):
    """A linear layer whose quantized weight is not trained, with a trained difference."""

    def __init__(self, kind: type[Scaled]) -> None:
        super().__init__()
        base = nn.Linear(8, 8)
        self.weight = nn.Parameter(kind.of(base.weight.detach()), requires_grad=False)
        self.register_buffer("bias", Scaled.of(base.bias.detach()[:, None]))
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = functional.linear(x, self.weight) + self.bias.sum(1)
        return y + self.up(self.down(x))


def made(kind: type[Scaled] = Scaled) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(LoRA(kind) for _ in range(4)))


def plain_values(module: nn.Module) -> dict[str, Tensor]:
    """A module's state on the CPU, dequantized."""
    return copies({name: each + 0 for name, each in module.state_dict().items()})


def trainable_adamw(parameters: Iterable[Tensor]) -> optim.Optimizer:
    return optim.AdamW([each for each in parameters if each.requires_grad], lr=0.05)


@pytest.mark.parametrize("kind", [Scaled, Nested])
@pytest.mark.parametrize("way", ["use", "auto", "auto, backward steps"])
def test_adapters_of_quantized_weights_are_trained_as_without_modules(
    kind: type[Scaled], way: str, device: str
) -> None:
    budget = "4KiB" if way != "use" else None
    pair = Pair(made(kind), device, trainable_adamw, budget=budget)
    with pair.swapper.use(*pair.made) if way == "use" else pair.swapper.auto(step="steps" in way):
        for step in range(4):
            x = torch.randn(3, 8, generator=torch.Generator().manual_seed(step)).to(device)
            pair.train(lambda model, x=x: model(x).square().mean())
    assert pair.swapper.report().misses
    assert_equal(plain_values(pair.made), plain_values(pair.whole))
    pair.assert_same()
    pair.swapper.close()


def test_inner_tensors_move_and_their_wrapper_is_the_same_object(device: str) -> None:
    layer = LoRA(Nested)
    weight, within = layer.weight, layer.weight.codes
    offloaded = OffloadedModule(layer, device=device)
    nbytes = sum(each.nbytes for each in (within.codes, within.scale, weight.scale))
    for memory in (Memory.DEVICE, Memory.HOST) * 2:
        offloaded.load() if memory is Memory.DEVICE else offloaded.evict()
        where = device if memory is Memory.DEVICE else "cpu"
        found = weight, within, within.codes, within.scale, weight.scale, layer.bias.codes
        assert {each.device.type for each in found} == {where}
        assert layer.weight is weight and weight.codes is within
        if memory is Memory.DEVICE:
            assert all(map(offloaded.groups.is_view, [within.codes, weight.scale, weight.detach()]))
    assert offloaded.groups.nbytes >= nbytes


def test_what_is_saved_on_the_device_is_on_the_host(device: str) -> None:
    layer = LoRA(Scaled)
    offloaded = OffloadedModule(layer, device=device)
    expected = plain_values(layer)
    offloaded.load()
    saved, file = layer.state_dict(), io.BytesIO()
    torch.save(saved, file)
    copied = copy.deepcopy(layer)
    assert not any(map(offloaded.groups.is_view, saved.values()))
    assert saved["weight"].codes.device.type == "cpu"
    assert layer.state_dict(keep_vars=True)["weight"] is layer.weight
    offloaded.evict()
    assert not offloaded.groups.held_by()
    assert_equal(plain_values(layer), expected)
    assert_equal(plain_values(copied), expected)
    file.seek(0)
    with torch.serialization.safe_globals([Scaled]):
        read = torch.load(file)
    assert torch.equal(read["weight"].codes, layer.weight.codes)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("loaded", [False, True])
def test_loaded_values_are_kept(assign: bool, loaded: bool, device: str) -> None:
    layer, other = LoRA(Scaled), LoRA(Scaled).to(device if loaded else "cpu")
    offloaded = OffloadedModule(layer, device=device)
    expected = plain_values(other)
    if loaded:
        offloaded.load()
    layer.load_state_dict(other.state_dict(), assign=assign)
    for _ in range(2):
        offloaded.evict()
        assert_equal(plain_values(layer), expected)
        offloaded.load()


def test_a_tensor_that_is_given_to_a_wrapper_moves(device: str) -> None:
    layer = LoRA(Scaled)
    offloaded = OffloadedModule(layer, device=device)
    layer.weight.scale = torch.full((8, 1), 0.5)
    offloaded.load()
    assert layer.weight.scale.device.type == device
    offloaded.evict()
    assert layer.weight.scale.tolist() == [[0.5]] * 8


def _trained(layer: LoRA) -> None:
    layer.weight.requires_grad_(True)


def _of_another_class(layer: LoRA) -> None:
    class Named(Tensor):
        pass

    layer.weight.scale = layer.weight.scale.as_subclass(Named)


@pytest.mark.parametrize("change", [_trained, _of_another_class])
def test_wrappers_that_are_trained_or_not_all_plain_are_refused(
    change: Callable[[LoRA], None], device: str
) -> None:
    layer = LoRA(Scaled)
    change(layer)
    with pytest.raises(TypeError, match="module 'layer': weight must be a plain tensor, .*Scaled"):
        OffloadedModule(layer, device=device, name="layer")
    OffloadedModule(layer.down, device=device).close()


def test_a_wrapper_of_two_modules_is_refused(device: str) -> None:
    one, other = LoRA(Scaled), LoRA(Scaled)
    other.weight = one.weight
    offloaded = OffloadedModule(one, device=device, name="one")
    with pytest.raises(ValueError, match=r"'other': weight.codes is also weight.codes of"):
        OffloadedModule(other, device=device, name="other")
    offloaded.close()
    OffloadedModule(other, device=device, name="other").close()

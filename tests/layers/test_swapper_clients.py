"""What else a training loop has: scalers, clipping, schedulers, hooks, files, compiled modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from offloaded_models import Layer, Pair, assert_equal, reloaded, tensors_of
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from speedtorch import GradScaler
from speedtorch.layers import Swapper

MODULES = 3


class Model(nn.Module):
    """Layers that are offloaded and a head that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(MODULES))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(x)
        return y


def pair(device: str, make: Callable[..., Optimizer] = optim.AdamW, **settings: Any) -> Pair:
    """A model with a swapper whose modules leave all the time, and one without."""
    torch.manual_seed(4)
    made = Pair(Model(), device, partial(make, lr=0.01, **settings), modules_of, budget="12KiB")
    made.swapper.auto()
    return made


def modules_of(model: Model) -> list[nn.Module]:
    return list(model.layers)


def batch(step: int, device: str) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(step)).to(device)


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_a_grad_scaler_skips_the_steps_of_modules(device: str, fused: bool) -> None:
    models = pair(device, fused=fused)
    for model, optimizer in models:
        for layer in model.layers:  # torch scales no gradients of 16 bits back
            layer.narrow.requires_grad_(False)
        scaler = GradScaler(device, init_scale=8.0)
        for step in range(4):
            optimizer.zero_grad()
            loss = model(batch(step, device)).square().mean()
            scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
            if step > 1:
                scaler.unscale_(optimizer)
                held = [each for each in model.head.parameters() if each.grad is not None]
                nn.utils.clip_grad_norm_(held, 0.1)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 4.0
    models.assert_same()


def test_schedulers_and_hooks_of_a_step_are_called_once(device: str) -> None:
    models = pair(device)
    calls: list[str] = []
    for model, optimizer in models:
        schedule = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)

        def clip(optimizer: Optimizer, *_: object) -> None:
            (group,) = optimizer.param_groups
            calls.append(f"before {len(group['params'])}")
            for each in group["params"]:
                if each.grad is not None:
                    each.grad.clamp_(-0.01, 0.01)

        optimizer.register_step_pre_hook(clip)
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        for step in range(3):
            optimizer.zero_grad()
            model(batch(step, device)).square().mean().backward()
            optimizer.step()
            schedule.step()
    assert calls == [f"before {len(list(models.whole.parameters()))}", "after"] * 6
    models.assert_same()


def test_what_an_optimizer_counts_for_itself_is_counted_once(device: str) -> None:
    class Counting(optim.SGD):
        """Keeps a number in each group, and one of its own, and divides by them."""

        steps = 0

        def step(self, closure: None = None) -> None:  # type: ignore[override]
            """Goes down by less and less."""
            self.steps += 1
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
                for each in group["params"]:
                    if each.grad is not None:
                        factor = -group["lr"] / (group["count"] * self.steps)
                        each.data.add_(each.grad, alpha=factor)

    models = pair(device, Counting)
    for x in [batch(step, device) for step in range(3)]:
        models.train(lambda model, x=x: model(x).square().mean())
    for optimizer in models.optimizers:
        assert optimizer.steps == 3 and optimizer.param_groups[0]["count"] == 3
    models.assert_same()


def files(folder: Path) -> dict[str, tuple[Callable[[Any], None], Callable[[Any], Any]]]:
    """How others write what state_dict() gives, and read it into another's."""
    from safetensors.torch import load_file, save_file

    def save(state: Any) -> None:
        torch.save(state, folder / "torch.pt")

    def save_tensors(state: Any) -> None:
        save_file(dict(state["model"]), folder / "tensors")

    return {
        "torch": (save, lambda _: torch.load(folder / "torch.pt", map_location="cpu")),
        "safetensors": (save_tensors, lambda _: {"model": load_file(folder / "tensors")}),
        "checkpoint": (
            lambda state: dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True),
            lambda state: dcp.load(state, checkpoint_id=folder / "dcp", no_dist=True) or state,
        ),
    }


@pytest.mark.parametrize("kind", ["torch", "safetensors", "checkpoint"])
def test_state_is_saved_and_read_at_any_time(device: str, kind: str, tmp_path: Path) -> None:
    torch.manual_seed(4)
    model = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(MODULES))
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    swapper = Swapper(model, optimizer, device=device)
    with swapper.use(*model):
        x = batch(0, device)
        for layer in model:
            x = layer(x)
        x.square().mean().backward()
        optimizer.step()
    swapper.evict(model[1])
    save, load = files(tmp_path)[kind]
    held = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    save(state)
    assert held == (torch.cuda.max_memory_allocated() if device == "cuda" else 0)
    assert {each.device.type for each in state["model"].values()} == {"cpu"}
    expected = tensors_of(model, optimizer)
    expected = {name: each.detach().cpu().clone() for name, each in expected.items()}
    swapper.evict()  # what was given stays readable
    assert torch.equal(state["model"]["0.0.weight"], expected["0.0.weight"])
    other = copy.deepcopy(model)
    for each in other.parameters():
        each.data.zero_()
    again = optim.AdamW(other.parameters(), lr=0.01)
    other_swapper = Swapper(other, again, device=device)
    with other_swapper.use(other[0]), torch.no_grad():
        found = load({"model": other.state_dict(), "optimizer": copy.deepcopy(state["optimizer"])})
        other.load_state_dict(found["model"])
        if "optimizer" in found:
            again.load_state_dict(found["optimizer"])
    found_now = tensors_of(other, again)
    names = [name for name in found_now if "gradient" not in name]
    assert ("optimizer" in found) == any("exp_avg" in name for name in names)
    assert_equal({n: found_now[n] for n in names}, {n: expected[n] for n in names})


def test_a_compiled_module_is_used_as_it_is(device: str) -> None:
    calls = 0

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        nonlocal calls
        calls += 1
        return graph.forward

    models = Pair(Model(), device, partial(optim.AdamW, lr=0.01), modules_of)
    compiled = [torch.compile(each, backend=backend) for each in models.made.layers]
    for step in range(3):
        x = batch(step, device)
        y = models.whole(x)
        with models.swapper.use(*models.made.layers):
            for layer in compiled:
                x = layer(x)
            found = models.made.head(x)
            torch.testing.assert_close(found, y)
            for result, optimizer in zip((found, y), models.optimizers, strict=True):
                optimizer.zero_grad()
                result.square().mean().backward()
                optimizer.step()
        models.swapper.evict()
    assert calls <= 3 * MODULES


def test_a_file_of_a_whole_model_is_one_of_the_model_alone(device: str) -> None:
    models = pair(device)
    models.made(batch(0, device)).sum().backward()
    models.swapper.evict()
    loaded = reloaded(models.made, weights_only=False).to(device)
    assert loaded(batch(1, device)).shape == (6, 2)

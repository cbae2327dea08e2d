"""EmbeddingBag has the arguments and results of torch.nn.EmbeddingBag."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import sgd_step
from reference import assert_same_bytes
from torch import Tensor, nn

import speedtorch

ROWS, WIDTH = 20, 4
IDS = torch.tensor([3, 1, 3, 0, 19, 3, 8])
OFFSETS = torch.tensor([0, 2, 2, 5])

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mean": ({}, {"offsets": OFFSETS}),
    "sum": ({"mode": "sum"}, {"offsets": OFFSETS}),
    "max": ({"mode": "max"}, {"offsets": OFFSETS}),
    "last offset": (
        {"mode": "sum", "include_last_offset": True},
        {"offsets": torch.tensor([0, 2, 5, 7])},
    ),
    "padding": ({"mode": "mean", "padding_idx": 3}, {"offsets": OFFSETS}),
    "max with padding": ({"mode": "max", "padding_idx": 3}, {"offsets": OFFSETS}),
    "max_norm": ({"mode": "sum", "max_norm": 0.9}, {"offsets": OFFSETS}),
    "by frequency": ({"mode": "sum", "scale_grad_by_freq": True}, {"offsets": OFFSETS}),
    "sparse": ({"mode": "sum", "sparse": True}, {"offsets": OFFSETS}),
    "weights": (
        {"mode": "sum"},
        {"offsets": OFFSETS, "per_sample_weights": torch.linspace(-1, 1, 7)},
    ),
}


def pair(device: str, settings: dict[str, Any]) -> tuple[nn.EmbeddingBag, speedtorch.EmbeddingBag]:
    torch.manual_seed(0)
    theirs = nn.EmbeddingBag(ROWS, WIDTH, **settings)
    return theirs.to(device), speedtorch.EmbeddingBag.from_module(theirs, device=device)


def on(device: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(device) for name, value in arguments.items()}


def rows_of(bag: speedtorch.EmbeddingBag) -> Tensor:
    bag.flush()
    return bag.table["weight"].cpu()


@pytest.mark.parametrize(("settings", "arguments"), CASES.values(), ids=CASES)
def test_evaluation_and_three_steps_return_what_torch_returns(
    settings: dict[str, Any], arguments: dict[str, Any], device: str
) -> None:
    theirs, ours = pair(device, settings)
    with torch.no_grad():
        expected = theirs(IDS.to(device), **on(device, arguments))
        assert_same_bytes(ours(IDS, **arguments), expected)
        two = torch.stack([IDS, IDS.flip(0)])
        if "per_sample_weights" not in arguments:
            assert_same_bytes(ours(two), theirs(two.to(device)))
    assert_same_bytes(rows_of(ours), theirs.weight.detach().cpu())
    for step in range(3):
        ids = (IDS + 5 * step).remainder(ROWS)
        outs = [theirs(ids.to(device), **on(device, arguments)), ours(ids, **arguments)]
        assert_same_bytes(outs[1], outs[0])
        factor = torch.arange(1.0, 1.0 + outs[0].numel(), device=device).view_as(outs[0])
        for module, out in zip((theirs, ours), outs, strict=True):
            sgd_step(module, (out * factor).sum())
    if device == "cuda" and settings.get("mode") == "max":
        torch.testing.assert_close(rows_of(ours), theirs.weight.detach().cpu())
    else:
        assert_same_bytes(rows_of(ours), theirs.weight.detach().cpu())


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_weights_of_samples_get_their_gradient(device: str, frozen: bool) -> None:
    theirs, ours = pair(device, {"mode": "sum"})
    gradients = []
    for bag in (theirs, ours):
        bag.weight.requires_grad_(not frozen)
        factors = torch.linspace(-1, 1, 7, device=device).requires_grad_()
        bag(IDS.to(device), OFFSETS.to(device), factors).square().sum().backward()
        gradients.append(factors.grad)
    assert_same_bytes(gradients[1], gradients[0])


def test_repr_names_what_differs_from_the_defaults() -> None:
    bag = speedtorch.EmbeddingBag(ROWS, WIDTH, mode="sum", padding_idx=2)
    assert repr(bag) == ("EmbeddingBag(20, 4, padding_idx=2, mode='sum', device=cpu, memory=auto)")

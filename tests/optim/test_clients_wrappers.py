"""Optimizers of torchrec that wrap torch's: they train, save by names and resume as in plain torch.

Needs torchrec: make clients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import assert_same_bytes, assert_same_content
from test_attach import EVERY, Model, step, train
from test_attach_changes import assert_same_rows
from torch import nn, optim
from torch_checkpoints import through_a_file

import speedtorch
from speedtorch.optim import RowWiseAdagrad

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]


def wrapped(model: nn.Module, make: Any) -> Any:
    keyed = pytest.importorskip("torchrec.optim.keyed")
    return keyed.KeyedOptimizerWrapper(dict(model.named_parameters()), lambda p: make(p, lr=0.1))


def combined(model: nn.Module, make: Any) -> Any:
    keyed = pytest.importorskip("torchrec.optim.keyed")
    parts = [
        keyed.KeyedOptimizerWrapper(
            {f"{name}.{n}": p for n, p in part.named_parameters()}, lambda p: make(p, lr=0.1)
        )
        for name, part in model.named_children()
    ]
    return keyed.CombinedOptimizer([("first", parts[0]), ("", parts[1])])


def warmed_up(model: nn.Module, make: Any) -> Any:
    warmup = pytest.importorskip("torchrec.optim.warmup")
    stages = [warmup.WarmupStage(warmup.WarmupPolicy.LINEAR, max_iters=4, value=0.1)]
    return warmup.WarmupOptimizer(wrapped(model, make), stages, lr=0.1)


def clipped(model: nn.Module, make: Any) -> Any:
    clipping = pytest.importorskip("torchrec.optim.clipping")
    return clipping.GradientClippingOptimizer(wrapped(model, make), max_gradient=0.5)


def pair(wrap: Callable[..., Any], make: Any) -> list[tuple[Model, Any]]:
    torch.manual_seed(0)
    theirs, ours = Model(nn.Embedding), Model()
    ours.load_state_dict(theirs.state_dict())
    made = [(module, wrap(module, make)) for module in (theirs, ours)]
    speedtorch.attach(made[1][1], ours)
    return made


@pytest.mark.parametrize("make", [optim.Adam, optim.Adagrad, optim.SGD, RowWiseAdagrad])
@pytest.mark.parametrize("wrap", [wrapped, combined, warmed_up, clipped])
def test_a_wrapper_trains_and_resumes_as_in_plain_torch(wrap: Any, make: Any) -> None:
    made = pair(wrap, make)
    (theirs, their_optimizer), (ours, our_optimizer) = made
    train(made, 2)
    assert_same_content(our_optimizer.state_dict(), their_optimizer.state_dict())
    weights, state = through_a_file([ours.state_dict(), our_optimizer.state_dict()])
    train(made)
    assert_same_rows(ours, theirs)
    resumed = Model()
    optimizer = wrap(resumed, make)
    speedtorch.attach(optimizer, resumed)
    optimizer.init_state()  # as torchrec wants before it loads
    optimizer.zero_grad()
    resumed.load_state_dict(weights)
    optimizer.load_state_dict(state)
    step(resumed, optimizer)
    assert_same_rows(resumed, theirs)
    assert_same_content(optimizer.state_dict(), their_optimizer.state_dict())
    speedtorch.detach(optimizer)
    assert "state_dict" not in vars(optimizer)


def test_a_wrapper_is_not_copied() -> None:
    (_, _), (_, optimizer) = pair(wrapped, optim.Adam)
    with pytest.raises(TypeError, match="wrapper of an attached optimizer cannot be copied"):
        copy.deepcopy(optimizer)


def test_loading_replaces_held_rows() -> None:
    (_, _), (ours, optimizer) = pair(wrapped, optim.Adam)
    step(ours, optimizer)
    saved = copy.deepcopy((ours.state_dict(), optimizer.state_dict()))
    step(ours, optimizer)
    expected = ours.state_dict()["words.weight"].clone()
    ours.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    step(ours, optimizer, EVERY)
    assert_same_bytes(ours.state_dict()["words.weight"], expected)

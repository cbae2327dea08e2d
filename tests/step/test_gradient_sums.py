"""How the gradients of a step's lookups become one, and what torch says meanwhile."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from reference import assert_same_bytes
from torch import Tensor, nn, optim
from torch.utils._python_dispatch import TorchDispatchMode

import speedtorch

ROWS, WIDTH = 9, 3
IDS = torch.tensor([4, 1, 4])


def trained(module: nn.Embedding, optimizer: optim.Optimizer) -> Tensor:
    """The rows after a step of two lookups, of which the second brings more rows."""
    loss = module(IDS).sum()
    (loss + (module(IDS + 2) * 2).sum()).backward()
    optimizer.step()
    return module.weight.detach()[:].clone()


@pytest.fixture
def before_2_13(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.sparse_coo_tensor warns as it does before torch 2.13, whatever it is given."""
    make = torch.sparse_coo_tensor

    def warned(*args: Any, **kwargs: Any) -> Tensor:
        warnings.warn("Sparse invariant checks are implicitly disabled", stacklevel=2)
        return make(*args, **kwargs)

    monkeypatch.setattr(torch, "sparse_coo_tensor", warned)


@pytest.mark.usefixtures("before_2_13")
@pytest.mark.parametrize("sparse", [False, True])
def test_steps_with_a_sparse_gradient_warn_of_nothing(sparse: bool) -> None:
    plain = nn.Embedding(ROWS, WIDTH, sparse=True)
    ours = speedtorch.Embedding(ROWS, WIDTH, sparse=sparse, _weight=plain.weight)
    adam = optim.SparseAdam(list(ours.parameters()))
    speedtorch.attach(adam, ours)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = trained(ours, adam)
    expected = trained(plain, optim.SparseAdam(list(plain.parameters())))
    assert_same_bytes(found, expected)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("lookups", [1, 3])
def test_dense_gradients_are_added_to_an_assigned_sparse_gradient(
    lookups: int, sparse: bool
) -> None:
    plain, gradients = nn.Embedding(ROWS, WIDTH, sparse=sparse), []
    for module in (plain, speedtorch.Embedding.from_module(plain)):
        rows = [module.weight[IDS], module(IDS + 2), module(IDS + 3)][:lookups]
        module.weight.grad = torch.sparse_coo_tensor(
            IDS[None, :2], torch.ones(2, WIDTH), (ROWS, WIDTH), check_invariants=False
        )
        torch.stack([part * (k + 2) for k, part in enumerate(rows)]).sum().backward()
        gradients.append(torch.tensor(module.weight.grad.numpy()))
    assert_same_bytes(*gradients)


class WrittenElements(TorchDispatchMode):
    """Counts the elements that operations write: all of a result, or those copied into it."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        written = args[-1] if func is torch.ops.aten.index_copy_.default else made
        if isinstance(written, Tensor):
            self.count += written.numel()
        return made


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("announces", [False, True])
def test_a_backward_takes_linear_time_in_the_lookups(announces: bool, accumulates: bool) -> None:
    counts = {}
    for lookups in (20, 80):
        module = speedtorch.Embedding(100_000, 4, device="cpu")
        optimizer = optim.SGD(module.parameters(), lr=0.1)
        if accumulates:
            module(torch.arange(50)).sum().backward()
        batches = [torch.randint(100_000, (32,)) for _ in range(lookups)]
        if announces:
            module.announce(*batches)
        loss = sum(module(ids).sum() for ids in batches)
        assert isinstance(loss, Tensor)
        with WrittenElements() as written:
            loss.backward()
        optimizer.step()
        counts[lookups] = written.count
    assert counts[80] < 6 * counts[20]

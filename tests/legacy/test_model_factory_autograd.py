"""ModelFactory exchanges rows under autograd: gradients, kept graphs and sparse gradients."""

from __future__ import annotations

import pytest
import torch
from model_families import ROWS, WIDTH, layer
from torch import nn

from speedtorch import ModelFactory

pytestmark = pytest.mark.usefixtures("own_folder")


def test_a_gradient_of_another_shape_is_dropped_and_a_matching_one_kept() -> None:
    embedding = layer()
    switcher = ModelFactory(embedding, ROWS, WIDTH)
    switcher.zerosInit()
    switcher.beforeForwardPass([1, 2, 3])
    embedding(torch.arange(3)).sum().backward()
    gradient = embedding.weight.grad
    switcher.beforeForwardPass([4, 5, 6])
    assert embedding.weight.grad is gradient
    switcher.beforeForwardPass([4, 5])
    assert embedding.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_loss_that_is_kept_does_not_break_the_next_backward(
    dtype: torch.dtype, device: str
) -> None:
    embedding = layer(device, dtype)
    switcher = ModelFactory(embedding, ROWS, WIDTH, datatype=dtype)
    switcher.zerosInit()
    kept = []
    for ids in ([1, 2, 3], [4, 5], [4, 5], [6, 7, 8, 9], [0]):
        switcher.beforeForwardPass(ids)
        loss = embedding(torch.arange(len(ids), device=device)).sum()
        kept.append(loss)  # keeps the old graph and its view of the variable alive
        loss.backward()
        assert embedding.weight.grad is not None
        assert embedding.weight.grad.shape == (len(ids), WIDTH)
        embedding.weight.grad = None


def test_a_backward_of_an_earlier_batch_raises_instead_of_using_other_rows() -> None:
    embedding = layer()
    switcher = ModelFactory(embedding, ROWS, WIDTH)
    switcher.zerosInit()
    switcher.beforeForwardPass([1, 2, 3])
    other = torch.ones(3, WIDTH, requires_grad=True)
    product = (embedding.weight * other).sum()
    switcher.beforeForwardPass([7, 8, 9])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_sparse_gradients_work() -> None:
    embedding = nn.Embedding(3, WIDTH, sparse=True)
    switcher = ModelFactory(embedding, ROWS, WIDTH)
    switcher.zerosInit()
    for ids in ([1, 2], [3]):
        switcher.beforeForwardPass(ids)
        embedding(torch.arange(len(ids))).sum().backward()
        assert embedding.weight.grad is not None
        assert embedding.weight.grad.is_sparse
        embedding.weight.grad = None

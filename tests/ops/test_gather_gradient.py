"""The gradient of pinned_gather: sparse, on the table's device, as torch's embedding gives it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Place
from reference import dtype_name
from torch import Tensor
from torch.nn.functional import embedding

import speedtorch

pytestmark = pytest.mark.dealt("place", "gpu_place")

IDS = [3, 0, 5, 3, 3, 1]


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small whole numbers: their sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


def gather(table: Tensor, index: Tensor) -> Tensor:
    """The gather with ids in index order."""
    return speedtorch.pinned_gather(table, index)


def gather_planned(table: Tensor, index: Tensor) -> Tensor:
    """The gather with ids in address order."""
    return speedtorch.pinned_gather(table, index, plan=speedtorch.plan_rows(index, table.size(0)))


GATHERS = pytest.mark.parametrize("gather_rows", [gather, gather_planned], ids=["plain", "planned"])


def table_gradient(
    place: Place,
    values: Tensor,
    index: Tensor,
    upstream: Tensor,
    gather_rows: Callable[[Tensor, Tensor], Tensor] = gather,
) -> tuple[Tensor, Tensor]:
    """The table and its gradient for one batch."""
    table = place.table(values).requires_grad_()
    gather_rows(table, index).backward(upstream.to(place.device))
    assert table.grad is not None
    return table, table.grad


@GATHERS
@pytest.mark.parametrize("shape", [(6,), (2, 3)], ids=["one_dim", "matrix"])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=dtype_name)
def test_it_equals_the_gradient_of_a_sparse_embedding(
    place: Place,
    shape: tuple[int, ...],
    id_dtype: torch.dtype,
    gather_rows: Callable[[Tensor, Tensor], Tensor],
) -> None:
    values, upstream = numbers(8, 4), numbers(*shape, 4, seed=1)
    index = place.ids(IDS, id_dtype).reshape(shape)
    table, grad = table_gradient(place, values, index, upstream, gather_rows)
    weight = values.clone().requires_grad_()
    embedding(index.cpu(), weight, sparse=True).backward(upstream)
    assert weight.grad is not None
    assert grad.layout == torch.sparse_coo
    assert grad.device == table.device
    assert (grad.shape, grad.dtype) == (weight.grad.shape, weight.grad.dtype)
    assert (grad.sparse_dim(), grad.dense_dim()) == (1, 1)
    ours, theirs = grad.coalesce(), weight.grad.coalesce()
    assert torch.equal(ours.indices().cpu(), theirs.indices())
    assert torch.equal(ours.values().cpu(), theirs.values())


@pytest.mark.parametrize(
    ("dtype", "row_shape"),
    [
        *(
            (dtype, (4,))
            for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.complex64)
        ),
        *((torch.float32, shape) for shape in ((), (3,), (2, 3), (0,))),
    ],
    ids=str,
)
def test_rows_of_every_dtype_and_any_number_of_dimensions(
    place: Place, dtype: torch.dtype, row_shape: tuple[int, ...]
) -> None:
    upstream = numbers(6, *row_shape, seed=1, dtype=dtype)
    values = numbers(8, *row_shape, dtype=dtype)
    _, grad = table_gradient(place, values, place.ids(IDS), upstream)
    assert (grad.sparse_dim(), grad.dense_dim()) == (1, len(row_shape))
    expected = torch.zeros_like(values).index_add_(0, torch.tensor(IDS), upstream)
    assert torch.equal(grad.cpu().to_dense(), expected)


def test_a_table_with_gaps_between_its_rows(place: Place) -> None:
    record = place.table(numbers(8, 12))
    field = record[:, 4:8].detach().requires_grad_()
    gather(field, place.ids(IDS)).sum().backward()
    assert field.grad is not None
    assert field.grad.shape == (8, 4)
    assert field.grad.cpu().to_dense()[:, 0].tolist() == [1, 1, 0, 3, 0, 1, 0, 0]


def test_no_ids_give_an_empty_gradient(place: Place) -> None:
    _, grad = table_gradient(place, numbers(8, 4), place.ids([]), torch.zeros(0, 4))
    assert grad.shape == (8, 4)
    assert not grad.cpu().to_dense().any()


def test_a_sparse_optimizer_changes_the_named_rows_alone(place: Place) -> None:
    values = numbers(8, 4)
    table = place.table(values).requires_grad_()
    optimizer = torch.optim.SGD([table], lr=0.5)
    gather(table, place.ids([3, 3, 1])).sum().backward()
    optimizer.step()
    steps = torch.tensor([0.0, 0.5, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]).reshape(8, 1)
    assert torch.equal(table.detach().cpu(), values - steps)


def test_without_a_gradient_there_is_no_graph(place: Place) -> None:
    table = place.table(numbers(8, 4))
    assert not gather(table, place.ids(IDS)).requires_grad
    table.requires_grad_()
    assert gather(table, place.ids(IDS)).requires_grad
    with torch.no_grad():
        assert not gather(table, place.ids(IDS)).requires_grad


def test_rows_that_need_a_gradient_can_be_written_back_without_one(place: Place) -> None:
    rows = place.work(numbers(2, 4, seed=1)).requires_grad_()
    table = place.table(numbers(8, 4))
    with torch.no_grad():
        speedtorch.pinned_scatter(table, place.ids([6, 2]), rows)
    speedtorch.synchronize()
    assert torch.equal(table.cpu()[[6, 2]], numbers(2, 4, seed=1))
    assert not table.requires_grad


@pytest.mark.parametrize("op", ["gather", "scatter", "swap_host", "swap_arriving"])
def test_torch_notices_what_an_op_wrote_over_before_backward(place: Place, op: str) -> None:
    rows, index = place.work(numbers(2, 4, seed=1)), place.ids([6, 2])
    table = place.table(numbers(8, 4))
    written = table if op in ("scatter", "swap_host") else place.work(numbers(2, 4, seed=2))
    factor = torch.ones_like(written).requires_grad_()
    product = (written * factor).sum()
    if op == "gather":
        speedtorch.pinned_gather(table, index, out=written)
    elif op == "scatter":
        speedtorch.pinned_scatter(table, index, rows)
    else:
        arriving = written if op == "swap_arriving" else place.work(numbers(2, 4, seed=2))
        speedtorch.optimizer_state_swap([table], [rows], index, [arriving], place.ids([0, 2]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_forward_mode_is_refused(device: str) -> None:
    table, ids = torch.rand(4, 3, device=device), torch.tensor([2, 0], device=device)

    def gathered(table: torch.Tensor) -> torch.Tensor:
        return speedtorch.pinned_gather(table, ids)

    with pytest.raises(NotImplementedError, match="forward-mode gradients are not supported"):
        torch.func.jvp(gathered, (table,), (torch.ones_like(table),))
    with torch.autograd.forward_ad.dual_level():
        assert torch.equal(gathered(table), table[ids])  # no tangent, nothing to lose
        dual = torch.autograd.forward_ad.make_dual(table, torch.ones_like(table))
        with pytest.raises(NotImplementedError, match="Use reverse mode"):
            gathered(dual)


def test_a_batched_gather_drops_no_gradient() -> None:
    ids = torch.tensor([2, 0])

    def loss(tables: Tensor) -> Tensor:
        return torch.func.vmap(lambda table: speedtorch.pinned_gather(table, ids))(tables).sum()

    with pytest.raises(RuntimeError, match="autograd.Function with functorch"):
        torch.func.grad(loss)(torch.ones(2, 4, 3))


def swap(ops: Any, rows: Tensor, ids: Tensor) -> None:
    """A swap that evicts rows."""
    ops.optimizer_state_swap([torch.zeros(6, 2)], [rows], ids, [torch.zeros(0, 2)], ids[:0])


RAW: Any = torch.ops.speedtorch
LISTS: Any = torch.ops.speedtorch_lists
BAGS = (torch.tensor([0, 1]), torch.tensor([0, 2]), 1)
WITHOUT_GRADIENT: dict[str, Callable[[Tensor, Tensor, list[Tensor]], object]] = {
    "scatter": lambda rows, ids, plan: speedtorch.pinned_scatter(torch.zeros(6, 2), ids, rows),
    "scatter_raw": lambda rows, ids, plan: RAW.pinned_scatter(torch.zeros(6, 2), ids, rows),
    "scatter_planned": lambda rows, ids, plan: speedtorch.pinned_scatter(
        torch.zeros(6, 2), ids, rows, plan=plan
    ),
    "scatter_planned_raw": lambda rows, ids, plan: RAW.pinned_scatter(
        torch.zeros(6, 2), ids, rows, plan, False
    ),
    "copy": lambda rows, ids, plan: speedtorch.pinned_copy(torch.zeros(2, 2), rows),
    "gather_out": lambda rows, ids, plan: speedtorch.pinned_gather(
        rows, ids[:0], out=torch.zeros(0, 2)
    ),
    "gather_planned_out": lambda rows, ids, plan: speedtorch.pinned_gather(
        rows, ids, out=torch.zeros(2, 2), plan=plan
    ),
    "swap": lambda rows, ids, plan: swap(speedtorch, rows, ids),
    "swap_raw": lambda rows, ids, plan: swap(RAW, rows, ids),
    "swap_lists": lambda rows, ids, plan: swap(LISTS, rows, ids),
    "sum_rows": lambda rows, ids, plan: speedtorch.sum_rows(rows, plan, 6, distinct=2),
    "sum_rows_raw": lambda rows, ids, plan: RAW.sum_rows(rows, plan, 6, 0, 2, None, None),
    "pool_rows": lambda rows, ids, plan: speedtorch.pool_rows(rows, *BAGS),
}


@pytest.mark.parametrize("call", WITHOUT_GRADIENT.values(), ids=WITHOUT_GRADIENT)
def test_an_op_without_a_gradient_raises_where_one_is_needed(
    call: Callable[[Tensor, Tensor, list[Tensor]], object],
) -> None:
    ids = torch.tensor([1, 3])
    rows, plan = torch.ones(2, 2, requires_grad=True) * 2, speedtorch.plan_rows(ids, 6)
    with pytest.raises(NotImplementedError, match="requires grad"):
        call(rows, ids, plan)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(rows.detach(), torch.ones(2, 2))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            call(dual, ids, plan)
    with pytest.raises(NotImplementedError, match="requires grad"):
        torch.compile(lambda rows: call(rows, ids, plan), backend="aot_eager")(rows)


@pytest.mark.parametrize("planned", [False, True])
def test_forward_mode_of_the_registered_gather_is_refused(planned: bool) -> None:
    table, ids = torch.rand(4, 3), torch.tensor([2, 0])
    rest = [speedtorch.plan_rows(ids, 4)] if planned else []
    with pytest.raises(NotImplementedError, match="forward-mode gradients are not supported"):
        torch.func.jvp(lambda table: RAW.pinned_gather(table, ids, *rest), (table,), (table,))


def test_a_gradient_warns_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    make = torch.sparse_coo_tensor

    def before_2_13(*args: Any, **kwargs: Any) -> Tensor:
        warnings.warn("Sparse invariant checks are implicitly disabled", stacklevel=2)
        return make(*args, **kwargs)

    monkeypatch.setattr(torch, "sparse_coo_tensor", before_2_13)
    table = torch.zeros(4, 2, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        speedtorch.pinned_gather(table, torch.tensor([1, 1])).sum().backward()
    assert table.grad is not None
    assert table.grad.to_dense().tolist() == [[0.0] * 2, [2.0] * 2, [0.0] * 2, [0.0] * 2]

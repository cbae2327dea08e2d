"""weight is a parameter of all rows; test_weight_contract.py has every operation on it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from reference import assert_same_bytes
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.step.sparse_rows import SparseRows

ROWS, WIDTH = 12, 4
IDS = torch.tensor([3, 1, 3, 11])
MODULES = [speedtorch.Embedding, speedtorch.EmbeddingBag]
Module = speedtorch.Embedding | speedtorch.EmbeddingBag


def first_rows() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def untouched(module: Module) -> None:
    pass


def held(module: Module) -> None:
    """Rows are looked up, and wait for a step."""
    module(IDS[None].to(module.weight.device)).sum().backward()


def stepped(module: Module) -> None:
    """Rows were trained, and are newer than the table's."""
    sgd = optim.SGD(module.parameters(), lr=1.0)
    module(IDS[None].to(module.weight.device)).sum().backward()
    sgd.step()


STATES = [untouched, held, stepped]


@pytest.fixture
def module(device: str) -> speedtorch.Embedding:
    return speedtorch.Embedding(ROWS, WIDTH, _weight=first_rows(), device=device)


def after(rows: Tensor, steps: int = 1) -> Tensor:
    """Rows after so many steps of SGD as `stepped` makes."""
    for _ in range(steps):
        rows = rows - torch.zeros_like(rows).index_add_(0, IDS, torch.ones(len(IDS), WIDTH))
    return rows


def rows_of(module: Module) -> Tensor:
    module.flush()
    return module.table["weight"].cpu().clone()


def over_the_states(test: Any) -> Any:
    return pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)(test)


# ------------------------------------------------------------------------------------------------
# What it is


@over_the_states
def test_its_repr_does_not_lie(
    module: speedtorch.Embedding, state: Callable[[Module], None]
) -> None:
    state(module)
    text = repr(module.weight)
    assert str(ROWS) in text and str(WIDTH) in text
    values = {f"{float(each):.4f}".lstrip("-") for each in rows_of(module)[IDS].flatten()}
    assert not any(each in text for each in values)  # held rows are not all rows
    assert repr(module)


# ------------------------------------------------------------------------------------------------
# In an optimizer


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf"), 0.0, -1.0, -float("inf")])
@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, speedtorch.clip_grad_norm_])
def test_it_is_clipped_as_by_torch(
    module: speedtorch.Embedding, clip: Any, norm_type: float, foreach: bool | None
) -> None:
    held(module)
    parameter = nn.Parameter(torch.zeros(ROWS, WIDTH))
    parameter.grad = torch.zeros(ROWS, WIDTH).index_add_(0, IDS, torch.ones(len(IDS), WIDTH))
    expected = nn.utils.clip_grad_norm_(parameter, 0.5, norm_type, foreach=foreach)
    found = clip(module.parameters(), 0.5, norm_type, foreach=foreach)
    assert module.weight.grad is not None
    torch.testing.assert_close(found.cpu(), expected)
    torch.testing.assert_close(module.weight.grad.to_dense().cpu(), parameter.grad)


WITHOUT_ROWS = {"padding": [0, 0], "no-ids": []}


def of_no_rows(ids: list[int], device: str) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=device)[:, None]


def scaled_steps(
    module: Any, optimizer: optim.Optimizer, batches: Any, scaler: Any, *, to_none: bool = True
) -> None:
    for ids in batches:
        optimizer.zero_grad(set_to_none=to_none)
        found = module(ids)
        loss = (found if isinstance(found, Tensor) else found.values()).sum()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()


@pytest.mark.dealt("make", "sparse", "attached", "capacity", "prefetched")
@pytest.mark.parametrize("prefetched", [False, True], ids=["plain", "prefetch"])
@pytest.mark.parametrize("capacity", [None, 4], ids=["counted", "capacity"])
@pytest.mark.parametrize("attached", [False, True], ids=["SGD", "Adam"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("make", MODULES)
@pytest.mark.parametrize("without", WITHOUT_ROWS.values(), ids=WITHOUT_ROWS)
@pytest.mark.parametrize(
    ("scaler", "to_none"),
    [(torch.amp.GradScaler, True), (torch.amp.GradScaler, False), (speedtorch.GradScaler, False)],
    ids=["to-none", "to-zeros", "speedtorchs"],
)
def test_a_grad_scaler_steps_where_lookups_name_no_row(
    device: str,
    scaler: Any,
    to_none: bool,
    without: list[int],
    make: Any,
    sparse: bool,
    attached: bool,
    capacity: int | None,
    prefetched: bool,
) -> None:
    """It makes the rows that the optimizer alone makes: its scale is a power of two."""
    ids, nothing = IDS[None].to(device), of_no_rows(without, device)
    given = {"padding_idx": 0, "sparse": sparse, "device": device, "capacity": capacity}
    made = []
    for scales in (False, True):
        module = make(ROWS, WIDTH, _weight=first_rows(), **given)
        optimizer: optim.Optimizer = optim.SGD(module.parameters(), lr=1.0)
        if attached:
            kind: Any = optim.SparseAdam if sparse else optim.Adam
            optimizer = kind(list(module.parameters()), lr=0.1)
            speedtorch.attach(optimizer, module)
        batches: Any = [nothing, ids, nothing, nothing, ids]
        if prefetched:
            batches = speedtorch.prefetch(batches, module, ids=lambda batch: batch)
        used = scaler(device, init_scale=4.0) if scales else None
        scaled_steps(module, optimizer, batches, used, to_none=to_none)
        made.append(rows_of(module))
    assert not torch.equal(made[0], first_rows())
    assert_same_bytes(made[1], made[0])


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("without", WITHOUT_ROWS.values(), ids=WITHOUT_ROWS)
@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, speedtorch.clip_grad_norm_])
def test_a_gradient_of_no_rows_is_clipped_between_unscale_and_step(
    device: str, clip: Any, without: list[int], norm_type: float, foreach: bool | None
) -> None:
    rows = first_rows()
    rows[0] = 0
    embedding = speedtorch.Embedding(ROWS, WIDTH, _weight=rows, padding_idx=0, device=device)
    model = nn.Sequential(embedding, nn.Linear(WIDTH, 1).to(device))
    sgd = optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler(device, init_scale=4.0)
    scaler.scale(model(of_no_rows(without, device)).sum()).backward()
    scaler.unscale_(sgd)
    norm = clip(model.parameters(), 1.0, norm_type, foreach=foreach)
    scaler.step(sgd)
    assert norm == len(without)  # the gradient of the bias alone
    assert_same_bytes(rows_of(embedding), rows)


def test_a_grad_scaler_steps_where_the_features_of_a_collection_name_no_row(device: str) -> None:
    some = {"rows": IDS[None].to(device)}
    nothing = {"rows": of_no_rows([], device).t()}
    config, kind = (
        speedtorch.EmbeddingBagConfig(ROWS, WIDTH, "rows"),
        speedtorch.EmbeddingBagCollection,
    )
    made = []
    for scales in (False, True):
        module = kind.from_pretrained([config], {"rows": first_rows()}, False, device=device)
        sgd = optim.SGD(module.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler(device, init_scale=4.0) if scales else None
        scaled_steps(module, sgd, [nothing, some, nothing], scaler)
        made.append(module.state_dict()["embedding_bags.rows.weight"].cpu().clone())
    assert not torch.equal(made[0], first_rows())
    assert_same_bytes(made[1], made[0])


NAN = float("nan")
SCALES: dict[str, Callable[[Tensor, Callable[[float], Tensor]], object]] = {
    "foreach_mul": lambda g, _: torch._foreach_mul_([g], NAN),
    "foreach_mul_tensor": lambda g, at: torch._foreach_mul_([g], at(float("inf"))),
    "foreach_div": lambda g, _: torch._foreach_div_([g], 0.0),
    "foreach_div_tensor": lambda g, at: torch._foreach_div_([g], at(0.0)),
    "mul": lambda g, at: g.mul_(at(NAN)),
    "div": lambda g, at: g.div_(at(0.0)),
    "finite": lambda g, at: (g.mul_(at(2.0)), g.div_(at(-3.0))),
    "then_zero": lambda g, at: (g.mul_(at(NAN)), torch._foreach_zero_([g])),
    "then_add": lambda g, at: (g.mul_(at(NAN)), g.add_(1)),
    "then_a_row": lambda g, at: (g.mul_(at(NAN)), g[5].zero_()),
    "columns": lambda g, at: g.mul_(torch.stack([at(x) for x in (1.0, NAN, 2.0, 3.0)])),
    "unscaled": lambda g, at: torch._amp_foreach_non_finite_check_and_unscale_(
        [g], at(0.0), at(float("inf"))
    ),
}
SCALED_READS: dict[str, Callable[[Tensor, Callable[[float], Tensor]], Tensor]] = {
    "clone": lambda g, _: g.clone(),
    "norm": lambda g, _: g.norm(),
    "foreach_norm": lambda g, _: torch._foreach_norm([g])[0],
    "sum": lambda g, _: g.sum(),
    "count_nonzero": lambda g, _: g.count_nonzero(),
    "reciprocal": lambda g, _: 1 / g,
    "dividend": lambda g, at: at(1.0) / g,
    "product": lambda g, at: g * at(NAN) / at(2.0) + 1,
    "foreach_product": lambda g, at: torch._foreach_mul([g], at(NAN))[0],
}


@pytest.mark.parametrize("scale", SCALES)
def test_rows_without_memory_of_a_scaled_gradient_are_torchs(scale: str, device: str) -> None:
    for name, read in SCALED_READS.items():
        found = []
        for kind in (nn.Embedding, speedtorch.Embedding):
            rows = torch.arange(48.0, device=device).view(12, 4)
            module: Any = kind(12, 4, _weight=rows, device=device)
            module(torch.tensor([1, 3, 3], device=device)).square().sum().backward()
            at = partial(torch.tensor, device=device)
            SCALES[scale](module.weight.grad, at)
            result = read(module.weight.grad, at).detach()
            found.append(result.to_dense() if isinstance(result, SparseRows) else result)
        torch.testing.assert_close(*found[::-1], equal_nan=True, msg=f"{scale}, {name}")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="numbers on the CPU are read at once")
def test_a_number_on_a_gpu_that_has_scaled_a_gradient_and_changed_is_refused() -> None:
    module = speedtorch.Embedding(12, 4, device="cuda")
    module(torch.tensor([1, 3], device="cuda")).sum().backward()
    gradient, factor = module.weight.grad, torch.tensor(2.0, device="cuda")
    assert gradient is not None
    gradient.mul_(factor)
    factor.zero_()
    with pytest.raises(NotImplementedError, match="Scale by a clone of it"):
        gradient.to_dense()


# ------------------------------------------------------------------------------------------------
# Reading rows


def test_a_gradient_of_the_paddings_row_that_torch_would_give_is_refused(
    module: speedtorch.Embedding,
) -> None:
    """torch's weight[ids] knows no padding_idx, and F.embedding is told of it."""
    device = module.weight.device
    padded = speedtorch.Embedding(ROWS, WIDTH, 1, _weight=first_rows(), device=device)
    weight, ids = padded.weight, torch.tensor([1, 3], device=device)
    for read in (lambda: weight[ids], lambda: weight[1], lambda: weight.index_select(0, ids)):
        found = read()
        with pytest.raises(NotImplementedError, match="padding_idx=1 has no gradient"):
            found.sum().backward()
        del found
        padded.zero_grad()
    F.embedding(ids, weight, padding_idx=1).sum().backward()
    weight[torch.tensor([2, 3], device=device)].sum().backward()
    assert weight.grad is not None
    assert weight.grad.to_dense()[:4, 0].tolist() == [0, 0, 1, 2]


def of_reads(weight: Any) -> Tensor:
    return weight.grad  # type: ignore[no-any-return]


def of_a_view(weight: Any) -> Tensor:
    return weight.grad.view(-1)  # type: ignore[no-any-return]


def of_changed_rows(weight: Any) -> Tensor:
    weight.grad[1:4] *= 2
    return weight.grad  # type: ignore[no-any-return]


def of_a_result(weight: Any) -> Tensor:
    weight.grad = found = weight.grad * 2
    return found  # type: ignore[no-any-return]


def of_an_assignment(weight: Any) -> Tensor:
    weight.grad = found = torch.ones(ROWS, WIDTH, device=weight.device)
    return found


def clip(module: Any) -> object:
    return nn.utils.clip_grad_norm_(module.parameters(), 0.5)


def train_more(module: Any) -> object:
    return module(IDS.to(module.weight.device) - 1).sum().backward()


def step_and_clear(module: Any) -> object:
    """A step, zeros in the same gradient, and a backward of other rows."""
    optim.SGD(module.parameters(), lr=1.0).step()
    module.zero_grad(set_to_none=False)
    return train_more(module)


@pytest.mark.parametrize("change", [clip, train_more, step_and_clear])
@pytest.mark.parametrize(
    "kept", [of_reads, of_a_view, of_changed_rows, of_a_result, of_an_assignment]
)
def test_a_kept_gradient_remains_the_gradient_of_the_weight_as_in_torch(
    module: speedtorch.Embedding,
    kept: Callable[[Any], Tensor],
    change: Callable[[Any], object],
) -> None:
    plain, found = nn.Embedding(ROWS, WIDTH, _weight=first_rows()), []
    for each in (module, plain):
        each(IDS.to(each.weight.device)).sum().backward()
        gradient = kept(each.weight)
        change(each)
        seen = gradient.detach().cpu().clone()
        gradient.mul_(3)
        optim.SGD(each.parameters(), lr=1.0).step()
        found.append((seen, each.weight.detach().cpu().clone()))
    torch.testing.assert_close(found[0][0].view(-1), found[1][0].view(-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("has_data", [False, True])
def test_an_assigned_gradient_of_another_module_remains_its_own(
    has_data: bool, module: speedtorch.Embedding
) -> None:
    other: Any = speedtorch.Embedding(ROWS, WIDTH, device=module.weight.device)
    module(IDS.to(module.weight.device)).sum().backward()
    gradient: Any = module.weight.grad
    if has_data:
        gradient.data = gradient.data * 2
    before = gradient.to_dense()
    other.weight.grad = gradient
    train_more(other)
    other.weight.grad.mul_(2)
    assert module.weight.grad is gradient
    assert torch.equal(gradient.to_dense(), before)


def test_an_assigned_gradient_of_zeros_remains_after_a_step(module: speedtorch.Embedding) -> None:
    """zero_grad(set_to_none=False) does not change it."""
    found = []
    for each in (module, nn.Embedding(ROWS, WIDTH)):
        weight: Any = each.weight
        weight.grad = gradient = torch.zeros(ROWS, WIDTH, device=weight.device)
        step_and_clear(each)
        assert weight.grad is gradient
        found.append(gradient.cpu())
    assert torch.equal(*found) and found[0].any()


@pytest.mark.parametrize("ids", [IDS, IDS - 1], ids=["same rows", "other rows"])
def test_a_graph_of_a_gradient_that_a_later_backward_has_changed_raises(
    module: speedtorch.Embedding, ids: Tensor
) -> None:
    for each in (nn.Embedding(ROWS, WIDTH, device=module.weight.device), module):
        weight: Any = each.weight
        each(IDS.to(weight.device)).sum().backward()
        factor = torch.ones(ROWS, WIDTH, device=weight.device, requires_grad=True)
        product = (weight.grad * factor).sum()
        each(ids.to(weight.device)).sum().backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


def test_a_graph_of_a_gradient_ignores_changes_of_its_data(module: speedtorch.Embedding) -> None:
    found = []
    for each in (nn.Embedding(ROWS, WIDTH, device=module.weight.device), module):
        weight: Any = each.weight
        each(IDS.to(weight.device)).sum().backward()
        factor = torch.ones(ROWS, WIDTH, device=weight.device, requires_grad=True)
        product = (weight.grad * factor).sum()
        weight.grad.data.mul_(2)
        product.backward()
        found.append(factor.grad)
    assert_same_bytes(*found)


@pytest.mark.parametrize("index", [ROWS, -ROWS - 1], ids=str)
def test_a_row_that_is_not_there_is_an_index_error(
    module: speedtorch.Embedding, index: int
) -> None:
    with torch.no_grad(), pytest.raises(IndexError):
        module.weight[index]


# ------------------------------------------------------------------------------------------------
# What it refuses


def assert_refused_by_name(call: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError) as caught:
        call()
    assert "emb(ids)" in str(caught.value) and "emb.table" in str(caught.value)


@over_the_states
def test_a_gradient_of_the_whole_is_refused_by_name(
    module: speedtorch.Embedding, state: Callable[[Module], None]
) -> None:
    """Views at once, results in the backward; test_weight_contract.py has every operation."""
    state(module)
    before = rows_of(module)
    for view in (lambda w: w.t(), lambda w: w.view(-1), lambda w: w.new_ones(WIDTH) @ w.t()):
        assert_refused_by_name(lambda view=view: view(module.weight))
    for read in (torch.sum, torch.clone, lambda w: torch.cat([w, w])):
        found = read(module.weight)
        torch.testing.assert_close(found.detach().cpu(), read(before))
        assert_refused_by_name(found.sum().backward)
    held(module)
    assert_same_bytes(rows_of(module), before)


def test_a_product_with_what_needs_a_gradient_is_refused_at_once(
    module: speedtorch.Embedding,
) -> None:
    """As the scores of a tied head, which would be computed for nothing."""
    hidden = module(IDS.to(module.weight.device))
    assert_refused_by_name(lambda: F.linear(hidden, module.weight))
    assert_refused_by_name(lambda: hidden @ module.weight.t())
    if not module.weight.is_cuda:
        with torch.no_grad():
            expected = F.linear(hidden, rows_of(module))
            assert torch.equal(F.linear(hidden, module.weight), expected)
        assert torch.equal(F.linear(hidden.detach(), module.weight).detach(), expected)
    module.weight.requires_grad_(False)
    if not module.weight.is_cuda:  # rows that are not trained
        hidden = hidden.detach().requires_grad_()
        F.linear(hidden, module.weight).sum().backward()
        assert hidden.grad is not None
        torch.testing.assert_close(hidden.grad, rows_of(module).sum(0).expand(4, WIDTH))


def test_an_error_in_a_closure_leaves_it_as_it_was(module: speedtorch.Embedding) -> None:
    sgd = optim.SGD(module.parameters(), lr=1.0)

    def closure() -> Tensor:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        sgd.step(closure)
    assert tuple(module.weight.shape) == (ROWS, WIDTH)
    assert_refused_by_name(lambda: module.weight.t())
    expected = rows_of(module)
    held(module)
    sgd.step()
    assert_same_bytes(rows_of(module), after(expected))


# ------------------------------------------------------------------------------------------------
# Writing


def test_a_write_to_a_row_that_was_looked_up_while_gradients_are_recorded_raises(
    module: speedtorch.Embedding,
) -> None:
    with pytest.raises(NotImplementedError, match="gradients are recorded"):
        module.weight[2].fill_(1)
    assert_same_bytes(rows_of(module), first_rows())


def test_a_row_that_was_looked_up_before_a_step_has_the_values_after_it(
    module: speedtorch.Embedding,
) -> None:
    row = module.weight[3]
    stepped(module)
    module.zero_grad()
    expected = rows_of(module)[3]
    assert_same_bytes(row.clone().detach().cpu(), expected)
    with torch.no_grad():
        assert_same_bytes(row.clone().cpu(), expected)
    sgd = optim.SGD(module.parameters(), lr=1.0)
    row[1:].sum().backward()
    sgd.step()
    expected[1:] -= 1
    assert_same_bytes(rows_of(module)[3], expected)


OLD_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "weight.data": lambda weight: weight.data,
    "weight.detach()": Tensor.detach,
    "weight.data[2:4]": lambda weight: weight.data[2:4],
    "weight[3]": lambda weight: weight[3],
}
OLD_VIEW_USES: dict[str, Callable[[Tensor], object]] = {
    "clone": torch.clone,
    "data": lambda view: view.data,
    "sum without gradients": torch.no_grad()(torch.sum),
    "index": lambda view: view[torch.tensor([0])],
    "write": lambda view: view.data.zero_(),
    "source of a copy": torch.no_grad()(lambda view: torch.zeros(view.shape).copy_(view)),
}


@pytest.mark.parametrize("use", OLD_VIEW_USES.values(), ids=OLD_VIEW_USES)
@pytest.mark.parametrize("view", OLD_VIEWS.values(), ids=OLD_VIEWS)
def test_a_view_from_before_data_was_assigned_raises_at_its_use(
    module: speedtorch.Embedding, view: Any, use: Any
) -> None:
    backup = view(module.weight)
    module.weight.data = torch.ones(ROWS, WIDTH, device=module.weight.device)
    with pytest.raises(NotImplementedError, match=r"backup = weight\.data\.clone\(\)"):
        use(backup)
    assert bool((rows_of(module) == 1).all())
    use(view(module.weight))


def test_a_view_from_before_data_was_assigned_is_not_copied(module: speedtorch.Embedding) -> None:
    backup = module.weight.data
    module.weight.data = torch.ones(ROWS, WIDTH, device=module.weight.device)
    with pytest.raises(NotImplementedError, match="older than an assignment"):
        copy.deepcopy(backup)


def test_averaged_rows_are_assigned_and_rows_that_were_kept_are_assigned_again(
    module: speedtorch.Embedding,
) -> None:
    average, weight = torch.ones(ROWS, WIDTH, device=module.weight.device), module.weight
    kept, backup = weight.data, weight.data.clone()
    weight.data = average
    with pytest.raises(NotImplementedError, match="older than an assignment"):
        weight.data = kept  # torch would assign the old rows
    weight.data = backup
    assert_same_bytes(rows_of(module), first_rows())


def test_averages_in_the_state_are_assigned_to_the_weight() -> None:
    for emb in (speedtorch.Embedding(ROWS, WIDTH), nn.Embedding(ROWS, WIDTH)):
        asgd = optim.ASGD(emb.parameters(), t0=0.0)
        if isinstance(emb, speedtorch.Embedding):
            speedtorch.attach(asgd, emb)
        for _ in range(3):
            emb(IDS).square().sum().backward()
            asgd.step()
            asgd.zero_grad()
        average = asgd.state[emb.weight]["ax"]
        expected = average.clone()
        assert not torch.equal(expected, emb.weight)
        emb.weight.data = average
        assert_same_bytes(emb.weight.detach().clone(), expected)


def init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        module.weight.data.normal_(mean=3.0, std=0.01)
        if module.padding_idx is not None:
            module.weight.data[module.padding_idx].zero_()


@pytest.mark.parametrize("attached", [False, True])
def test_rows_that_nobody_has_looked_up_can_be_multiplied_and_added_to(attached: bool) -> None:
    torch.manual_seed(3)
    embedding = speedtorch.Embedding(10, 4)
    expected = rows_of(copy.deepcopy(embedding))
    if attached:
        speedtorch.attach(optim.Adam(embedding.parameters()), embedding)
    embedding.weight.data.mul_(0.5)
    with torch.no_grad():
        embedding.weight.add_(torch.ones(10, 4)).mul_(0.5)
    embedding.weight.data -= 3 * torch.ones(10, 4)
    assert_same_bytes(rows_of(embedding), (expected * 0.5 + 1) * 0.5 - 3)


# ------------------------------------------------------------------------------------------------
# Models


@pytest.mark.parametrize("make", MODULES)
def test_a_models_init_function_finds_and_initialises_the_table(make: type[Module]) -> None:
    model = nn.Sequential(nn.ModuleDict({"rows": make(ROWS, WIDTH, padding_idx=5)}))
    model.apply(init_weights)
    rows = rows_of(model[0]["rows"])
    assert not bool(rows[5].any())
    others = rows[[row for row in range(ROWS) if row != 5]]
    assert bool((others > 2.5).all()) and len(others.unique()) > ROWS


@pytest.fixture
def huge() -> speedtorch.Embedding:
    """A table of 4 GiB, of which nobody has used a row."""
    return speedtorch.Embedding(1 << 24, 64)


def resident_bytes() -> int:
    with open("/proc/self/status") as status:
        line = next(each for each in status if each.startswith("VmRSS:"))
    return int(line.split()[1]) << 10


INITIALISERS: dict[str, Callable[[Any], object]] = {
    "uniform": lambda module: module.weight.data.uniform_(-0.5, -0.25),
    "normal": lambda module: module.weight.data.normal_(-100.0, 0.01),
    "xavier": lambda module: nn.init.xavier_uniform_(module.weight),
    "truncated": lambda module: nn.init.trunc_normal_(module.weight, -50.0, 1.0, -55.0, -45.0),
    "truncated-at-a-tail": lambda m: nn.init.trunc_normal_(m.weight.data, 0.0, 1.0, 1.0, 1.5),
    "truncated-often": lambda module: nn.init.trunc_normal_(module.weight, 0.0, 1.0, -0.5, 0.5),
    "constant": lambda module: nn.init.constant_(module.weight, -7.0),
    "zeros": lambda module: nn.init.zeros_(module.weight),
    "model": init_weights,
}


@pytest.mark.parametrize("write", INITIALISERS.values(), ids=INITIALISERS)
def test_initialising_an_untouched_table_takes_no_memory(
    huge: speedtorch.Embedding, write: Callable[[Any], object]
) -> None:
    before = resident_bytes()
    write(huge)
    write(huge)  # the last one counts
    assert huge.weight.shape == (1 << 24, 64)
    assert resident_bytes() - before < 64 << 20


def test_what_a_tensor_of_all_rows_becomes_changes_no_table() -> None:
    module = speedtorch.Embedding.from_pretrained(first_rows(), freeze=False)
    with torch.no_grad():
        for change in (lambda: module.weight.cpu().unsqueeze_(0), module.weight.data.t_):
            with pytest.raises(NotImplementedError, match="memory, shape and strides"):
                change()
    with pytest.raises(NotImplementedError, match=r"backward\(\) of its weight .* only some rows"):
        module.weight.backward()
    module.weight.detach().cpu().requires_grad_()
    sgd = optim.SGD(module.parameters(), lr=1.0)
    module(torch.tensor([1])).sum().backward()
    sgd.step()
    expected = first_rows()
    expected[1] -= 1
    assert_same_bytes(module.table["weight"], expected)


def test_state_from_before_an_assignment_raises_at_its_use() -> None:
    emb = speedtorch.Embedding(ROWS, WIDTH)
    adagrad = optim.Adagrad(emb.parameters())
    speedtorch.attach(adagrad, emb)

    def step() -> None:
        emb(IDS).sum().backward()
        adagrad.step()
        adagrad.zero_grad()

    step()
    state = adagrad.state[emb.weight]
    kept, backup = state["sum"], state["sum"].clone()
    state["sum"] = torch.zeros(ROWS, WIDTH)
    step()
    state["sum"] = kept
    with pytest.raises(NotImplementedError, match="view of its sum is older than an assignment"):
        step()
    adagrad.zero_grad()
    state["sum"] = backup
    step()
    assert_same_bytes(state["sum"] * 1, backup + backup)


NEW_DATA: dict[str, Callable[[Tensor], Tensor]] = {
    "clamped": lambda data: torch.clamp(data, -0.5, 0.5),
    "scaled": lambda data: data * 0.25,
    "dense": lambda data: torch.full((ROWS, WIDTH), 0.5, device=data.device),
    "itself": lambda data: data.mul_(0.5),
}


@pytest.mark.parametrize("attached", [False, True], ids=["SGD", "Adagrad"])
@pytest.mark.parametrize("make", NEW_DATA.values(), ids=NEW_DATA)
def test_data_assigned_to_the_gradient_is_the_gradient_as_in_torch(
    make: Callable[[Tensor], Tensor], attached: bool, device: str
) -> None:
    theirs = nn.Embedding(ROWS, WIDTH, _weight=first_rows()).to(device)
    ours = speedtorch.Embedding(ROWS, WIDTH, _weight=first_rows(), device=device)
    for module in (theirs, ours):
        kind = optim.Adagrad if attached else optim.SGD
        optimizer = kind(module.parameters(), lr=0.5)
        if module is ours:
            speedtorch.attach(optimizer, ours)
        for _ in range(2):
            module(IDS.to(device)).square().sum().backward()
            gradient = module.weight.grad
            assert gradient is not None
            gradient.data = make(gradient.data)
            assert module.weight.grad is gradient
            optimizer.step()
            optimizer.zero_grad()
    assert_same_bytes(rows_of(ours), theirs.weight.detach().cpu())


@pytest.mark.parametrize("data", [0.0, 3.0], ids=["scaled", "dense"])
@pytest.mark.parametrize("then", [Tensor.zero_, Tensor.neg_], ids=["zero_", "neg_"])
def test_an_earlier_alias_of_a_gradient_keeps_its_elements_if_data_is_assigned(
    then: Callable[[Tensor], Tensor], data: float
) -> None:
    theirs = nn.Embedding(ROWS, WIDTH, _weight=first_rows())
    ours = speedtorch.Embedding(ROWS, WIDTH, _weight=first_rows())
    aliases = []
    for module in (theirs, ours):
        module(IDS).sum().backward()
        gradient = module.weight.grad
        assert gradient is not None
        aliases.append(gradient.detach())
        gradient.data = gradient.data * 3 + torch.arange(WIDTH) * data
        then(gradient)
        module(IDS[:1]).sum().backward()
        optim.SGD(module.parameters(), lr=0.5).step()
    assert torch.equal(aliases[1].to_dense(), aliases[0])
    assert_same_bytes(rows_of(ours), theirs.weight.detach())


def test_an_alias_of_a_gradient_follows_if_its_own_data_is_assigned() -> None:
    emb = speedtorch.Embedding(ROWS, WIDTH)
    emb(IDS).sum().backward()
    gradient: Any = emb.weight.grad
    alias = gradient.detach()
    gradient.data *= 2
    gradient.add_(1)
    assert torch.equal(alias.to_dense(), gradient.to_dense())


def test_the_weight_is_assigned_to_the_data_of_its_gradient() -> None:
    theirs = nn.Embedding(ROWS, WIDTH, _weight=first_rows())
    ours = speedtorch.Embedding(ROWS, WIDTH, _weight=first_rows())
    for module in (theirs, ours):
        module(IDS).sum().backward()
        cast(Tensor, module.weight.grad).data = module.weight
        optim.SGD(module.parameters(), lr=0.5).step()
    assert_same_bytes(rows_of(ours), theirs.weight.detach())


def test_other_data_is_not_assigned_to_a_gradient() -> None:
    emb = speedtorch.Embedding(ROWS, WIDTH)
    emb(IDS).sum().backward()
    rows = torch.zeros(ROWS, WIDTH)
    for data in (rows[0], rows.double(), rows.to("meta")):
        with pytest.raises(RuntimeError, match="attempting to assign data of"):
            emb.weight.grad.data = data
    assert emb.weight.grad.sum() == len(IDS) * WIDTH


IN_INFERENCE_MODE: dict[str, Callable[[Tensor], object]] = {
    "row": lambda weight: weight[3].fill_(7),
    "rows": lambda weight: weight[2:5].mul_(2),
    "elements": lambda weight: weight.view(-1)[5:7].zero_(),
    "columns": lambda weight: weight.t()[1].add_(1),
    "foreach": lambda weight: torch._foreach_mul_([weight], 2.0),
}


@pytest.mark.parametrize("settings", [{}, {"stored": torch.bfloat16}], ids=["rows", "16 bits"])
@pytest.mark.parametrize("write", IN_INFERENCE_MODE.values(), ids=IN_INFERENCE_MODE)
def test_writes_in_inference_mode_change_the_table(
    write: Callable[[Tensor], object], settings: dict[str, Any]
) -> None:
    ours = speedtorch.Embedding(ROWS, WIDTH, _weight=first_rows(), **settings)
    speedtorch.attach(optim.Adam(ours.parameters()), ours)
    expected = ours.weight.detach().clone()
    with torch.inference_mode():
        write(ours.weight)
        write(expected)
        assert_same_bytes(ours.weight.bfloat16(), expected.bfloat16())
        ours.weight.detach().clone()
    ours(IDS).sum().backward()
    with torch.inference_mode():
        assert torch.equal(ours.weight.grad.detach()[1], torch.ones(WIDTH))


GRADIENT_IN_INFERENCE_MODE: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "row": lambda gradient, ones, other: gradient[3].fill_(7),
    "all": lambda gradient, ones, other: gradient.add_(ones),
    "other rows": lambda gradient, ones, other: gradient.add_(other),
    "foreach": lambda gradient, ones, other: torch._foreach_add_([gradient], 1.0),
    "read": lambda gradient, ones, other: np.asarray(gradient),
    "dense data": lambda gradient, ones, other: setattr(gradient, "data", ones),
    "data": lambda gradient, ones, other: setattr(gradient, "data", other),
    "zeros": lambda gradient, ones, other: gradient.zero_(),
}


@pytest.mark.parametrize("use", GRADIENT_IN_INFERENCE_MODE.values(), ids=GRADIENT_IN_INFERENCE_MODE)
def test_a_gradient_is_written_to_in_inference_mode_and_later(
    use: Callable[[Tensor, Tensor, Tensor], object],
) -> None:
    theirs = nn.Embedding(ROWS, WIDTH, _weight=first_rows())
    ours = speedtorch.Embedding(ROWS, WIDTH, _weight=first_rows())
    for module in (theirs, ours):
        other = type(module)(ROWS, WIDTH)
        other(IDS - 1).sum().backward()
        module(IDS).sum().backward()
        gradient, ones = cast(Tensor, module.weight.grad), torch.ones(ROWS, WIDTH)
        alias = gradient.detach()
        with torch.inference_mode():
            use(gradient, ones, cast(Tensor, other.weight.grad))
        alias.mul_(1.0)
        gradient.mul_(0.5)
        gradient[1] += 1.0
        module(IDS[:1]).sum().backward()
        gradient.add_(torch.ones(ROWS, WIDTH))
        optim.SGD(module.parameters(), lr=0.5).step()
    assert_same_bytes(rows_of(ours), theirs.weight.detach())


def test_a_weight_is_frozen_by_assignment() -> None:
    emb = speedtorch.Embedding(ROWS, WIDTH)
    emb.weight.requires_grad = False
    assert not emb.weight.requires_grad and not emb(IDS).requires_grad
    emb.weight.requires_grad = True
    emb(IDS).sum().backward()
    assert torch.equal(emb.weight.grad[1], torch.ones(WIDTH))


def test_a_view_of_a_weight_has_no_gradient_and_trains_no_rows() -> None:
    emb = speedtorch.Embedding(ROWS, WIDTH)
    view = emb.weight.detach()
    assert view.grad is None
    with pytest.raises(NotImplementedError, match="a view has none. Use emb.weight.grad"):
        view.grad = torch.ones(ROWS, WIDTH)
    with pytest.raises(NotImplementedError, match="of a copy of its weight is not supported"):
        F.embedding(IDS, view.requires_grad_())


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("settings", [{}, {"stored": torch.bfloat16}], ids=["state", "16 bits"])
def test_a_collective_of_rows_that_are_not_contiguous_raises(settings: dict[str, Any]) -> None:
    dist.all_reduce(speedtorch.Embedding(ROWS, WIDTH).weight.data)
    module = speedtorch.Embedding(ROWS, WIDTH, **settings)
    speedtorch.attach(optim.Adam(module.parameters()), module)
    before = module.table.record.clone()
    for call in (dist.all_reduce, partial(dist.broadcast, src=0)):
        with pytest.raises(NotImplementedError, match="in 16 bits, or optimizer state is between"):
            call(module.weight.data)
    assert torch.equal(module.table.record, before)

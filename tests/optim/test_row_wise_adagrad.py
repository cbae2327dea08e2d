"""RowWiseAdagrad steps rows by its formula, alone and attached to rows in host memory."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from reference import assert_same_bytes, assert_same_content, dtype_name
from torch import Tensor, nn, optim
from torch_checkpoints import through_a_file

import speedtorch
from speedtorch.optim import RowWiseAdagrad

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "decay": {"weight_decay": 0.1, "lr_decay": 0.3},
    "maximize": {"maximize": True, "initial_accumulator_value": 0.3, "eps": 0.01},
    "all": {"weight_decay": 0.2, "lr_decay": 0.1, "maximize": True, "eps": 1e-3},
}
SHAPES = [(7, 5), (4, 2, 3), (6,), (3, 1), (1, 9), (0, 4), (3, 0)]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
WITH_OPTIONS = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
WITH_DTYPES = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
BOTH = pytest.mark.parametrize("foreach", [False, True], ids=["single", "foreach"])


def drawn(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)


def parameters_of(shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: str) -> list[Any]:
    return [nn.Parameter(drawn(s, n, dtype).to(device)) for n, s in enumerate(shapes)]


def trained(
    shapes: Sequence[Sequence[int]] = SHAPES,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    steps: int = 5,
    **given: Any,
) -> list[tuple[Tensor, dict[str, Any]]]:
    """Parameters and their state after steps with random gradients; every third row's are zeros."""
    parameters = parameters_of(shapes, dtype, device)
    optimizer = RowWiseAdagrad(parameters, **{"lr": 0.1, **given})
    for step in range(steps):
        for number, parameter in enumerate(parameters):
            parameter.grad = drawn(parameter.shape, 100 * step + number, dtype).to(device)
            parameter.grad[step % 3 :: 3] = 0
        optimizer.step()
    return [(parameter.detach(), optimizer.state[parameter]) for parameter in parameters]


def by_hand(rows: list[list[float]], sums: list[float], step: int, **options: Any) -> None:
    """One step of `rows`, whose gradients are drawn as trained() does, in Python's numbers."""
    gradients = options["gradients"]
    rate = options["lr"] / (1 + step * options.get("lr_decay", 0))
    for number, row in enumerate(rows):
        sign = -1 if options.get("maximize") else 1
        decay = options.get("weight_decay", 0)
        gradient = [sign * g + decay * w for g, w in zip(gradients[number], row, strict=True)]
        sums[number] += sum(g * g for g in gradient) / max(1, len(row))
        divisor = math.sqrt(sums[number]) + options.get("eps", 1e-10)
        rows[number] = [w - rate * g / divisor for w, g in zip(row, gradient, strict=True)]


@WITH_OPTIONS
@pytest.mark.parametrize("shape", [(7, 5), (4, 2, 3), (6,), (3, 1), (1, 9)], ids=str)
def test_rows_become_what_the_formula_says(
    shape: tuple[int, ...], options: dict[str, Any], device: str
) -> None:
    ((found, state),) = trained([shape], torch.float64, device, **options)
    rows = drawn(shape, 0, torch.float64).view(shape[0], -1).tolist()
    sums = [options.get("initial_accumulator_value", 0.0)] * len(rows)
    for step in range(5):
        gradient = drawn(shape, 100 * step, torch.float64)
        gradient[step % 3 :: 3] = 0
        gradients = gradient.view(shape[0], -1).tolist()
        by_hand(rows, sums, step, lr=0.1, gradients=gradients, **options)
    expected = torch.tensor(rows, dtype=torch.float64).view(shape)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-12, atol=1e-14)
    expected = torch.tensor(sums, dtype=torch.float64).view(-1, 1)
    torch.testing.assert_close(state["sum"].cpu(), expected, rtol=1e-12, atol=1e-14)
    assert state["step"] == 5


@WITH_OPTIONS
@WITH_DTYPES
def test_parameters_together_step_as_single_ones(
    dtype: torch.dtype, options: dict[str, Any], device: str
) -> None:
    single = trained(dtype=dtype, device=device, foreach=False, **options)
    assert_same_content(trained(dtype=dtype, device=device, foreach=True, **options), single)
    assert_same_content(trained(dtype=dtype, device=device, **options), single)


@BOTH
@WITH_DTYPES
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1), torch.tensor([0.1])], ids=str)
def test_a_capturable_step_is_the_same(
    dtype: torch.dtype, lr: float | Tensor, foreach: bool, device: str
) -> None:
    expected = trained(dtype=dtype, device=device, foreach=False)
    if isinstance(lr, Tensor):
        lr = torch.full_like(lr, 0.1, dtype=torch.float64, device=device)
    found = trained(dtype=dtype, device=device, foreach=foreach, lr=lr, capturable=True)
    # torch's kernels multiply by a number before they divide, and by a tensor in a step of its own.
    same = assert_same_bytes
    if isinstance(lr, Tensor) and device == "cuda":
        same = torch.testing.assert_close
    for (parameter, state), (own, own_state) in zip(found, expected, strict=True):
        assert state["step"].device == parameter.device
        same(parameter, own)
        same(state["sum"], own_state["sum"])


@BOTH
def test_a_capturable_step_reads_the_decay_of_the_learning_rate_on_the_device(
    foreach: bool, device: str
) -> None:
    given: dict[str, Any] = {"device": device, "lr_decay": 0.3, "foreach": foreach}
    expected = trained(**given)
    for lr in (0.1, torch.tensor(0.1, device=device)):
        for (found, _), (own, _) in zip(
            trained(lr=lr, capturable=True, **given), expected, strict=True
        ):
            torch.testing.assert_close(found, own, rtol=1e-5, atol=1e-6)


def test_a_tensor_learning_rate_is_read_in_every_step() -> None:
    rate = torch.tensor(0.1, dtype=torch.float64)
    assert_same_content(trained(lr=rate), trained(lr=0.1))
    parameter = nn.Parameter(torch.ones(2, 3))
    optimizer = RowWiseAdagrad([parameter], rate)
    parameter.grad = torch.ones(2, 3)
    rate.zero_()
    optimizer.step()
    assert_same_bytes(parameter.detach(), torch.ones(2, 3))


# ------------------------------------------------------------------------------------------------
# Rows by themselves


@pytest.mark.parametrize("width", [1, 5, 100, 384, 1000, 40000])
def test_a_rows_numbers_do_not_depend_on_the_rows_beside_it(width: int, device: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        rows = 21
        gradient, values = drawn((rows, width), 1).to(device), drawn((rows, width), 2).to(device)

        def step(places: slice) -> tuple[Tensor, Tensor]:
            parameter = nn.Parameter(values[places].clone())
            optimizer = RowWiseAdagrad([parameter], weight_decay=0.1)
            parameter.grad = gradient[places].clone()
            optimizer.step()
            return parameter.detach(), optimizer.state[parameter]["sum"]

        together = step(slice(None))
        for places in (slice(4, 5), slice(0, 2), slice(1, 16), slice(3, 20)):
            for found, expected in zip(step(places), together, strict=True):
                assert_same_bytes(found, expected[places])
    finally:
        torch.set_num_threads(threads)


def test_memory_in_another_order_changes_no_number() -> None:
    values, gradient = drawn((9, 40), 1), drawn((9, 40), 2)
    found = []
    for turned in (False, True):
        parameter = nn.Parameter(values.t().contiguous().t() if turned else values.clone())
        parameter.grad = gradient.t().contiguous().t() if turned else gradient
        optimizer = RowWiseAdagrad([parameter])
        optimizer.step()
        found.append((parameter.detach().contiguous(), optimizer.state[parameter]["sum"]))
    assert_same_content(found[1], found[0])


@BOTH
def test_rows_and_parameters_without_a_gradient_do_not_change(foreach: bool) -> None:
    parameter, left = (nn.Parameter(torch.full((3, 2), -0.0)) for _ in range(2))
    optimizer = RowWiseAdagrad([left, parameter], foreach=foreach)
    parameter.grad = torch.tensor([[0.0, 0.0], [1.0, 2.0], [0.0, 0.0]])
    optimizer.step()
    assert_same_bytes(parameter.detach()[[0, 2]], torch.full((2, 2), -0.0))
    assert optimizer.state[parameter]["sum"].tolist() == [[0.0], [2.5], [0.0]]
    assert_same_bytes(left.detach(), torch.full((3, 2), -0.0))
    assert left not in optimizer.state


@WITH_DTYPES
def test_the_state_is_one_number_a_row(dtype: torch.dtype, device: str) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for parameter, state in trained(dtype=dtype, device=device, steps=1):
        assert sorted(state) == ["step", "sum"]
        assert (state["sum"].shape, state["sum"].dtype) == ((len(parameter), 1), wide)
        assert state["sum"].device == parameter.device
        assert (state["step"].shape, state["step"].device.type) == ((), "cpu")
        assert not state["sum"].isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_name)
def test_rows_of_16_bits_are_computed_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    values, gradient = drawn((8, 6), 1, dtype), drawn((8, 6), 2, dtype)
    found = []
    for of in (dtype, torch.float32):
        parameter = nn.Parameter(values.to(of, copy=True))
        parameter.grad = gradient.to(of)
        optimizer = RowWiseAdagrad([parameter], lr=0.1, weight_decay=0.1)
        optimizer.step()
        found.append((parameter.detach().to(dtype), optimizer.state[parameter]["sum"]))
    assert_same_content(found[0], found[1])


# ------------------------------------------------------------------------------------------------
# Sparse gradients


def stepped(
    gradients: Iterable[Tensor], values: Tensor, **options: Any
) -> tuple[Tensor, dict[str, Any]]:
    parameter = nn.Parameter(values.clone())
    optimizer = RowWiseAdagrad([parameter], lr=0.1, **options)
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()
    return parameter.detach(), optimizer.state[parameter]


@BOTH
@WITH_DTYPES
@pytest.mark.parametrize("shape", [(9, 5), (9, 2, 3), (9,), (9, 1)], ids=str)
def test_a_sparse_gradient_steps_as_the_dense_one(
    shape: tuple[int, ...], dtype: torch.dtype, foreach: bool
) -> None:
    random = torch.Generator().manual_seed(1)
    sparse = []
    for count in (6, 1, 0, 4):
        ids = torch.randint(9, (1, count), generator=random)
        # Whole numbers: the sum of an id's gradients is the same in any order.
        each = torch.randint(-3, 4, (count, *shape[1:]), generator=random).to(dtype)
        sparse.append(torch.sparse_coo_tensor(ids, each, shape, check_invariants=True))
    given = {"lr_decay": 0.1, "initial_accumulator_value": 0.5, "foreach": foreach}
    values = drawn(shape, 2, dtype)
    found = stepped(sparse, values, **given)
    assert_same_content(found, stepped([each.to_dense() for each in sparse], values, **given))


def test_weight_decay_with_a_sparse_gradient_changes_the_named_rows() -> None:
    values, ids = drawn((5, 3), 1), torch.tensor([1, 3])
    gradient = torch.sparse_coo_tensor(ids[None], drawn((2, 3), 2), (5, 3), check_invariants=True)
    found, state = stepped([gradient], values, weight_decay=0.5)
    dense, dense_state = stepped([gradient.to_dense()], values, weight_decay=0.5)
    assert_same_bytes(found[ids], dense[ids])
    assert_same_bytes(state["sum"][ids], dense_state["sum"][ids])
    others = torch.tensor([0, 2, 4])
    assert_same_bytes(found[others], values[others])
    assert not state["sum"][others].any()
    with pytest.raises(ValueError, match=r"of shape \[3, 2\] must name rows .*got sparse_dim 2"):
        stepped([torch.eye(3, 2).to_sparse()], torch.ones(3, 2))


# ------------------------------------------------------------------------------------------------
# State dicts


@WITH_DTYPES
def test_training_resumes_bit_for_bit(dtype: torch.dtype) -> None:
    def step(optimizer: RowWiseAdagrad, parameters: list[Any], number: int) -> None:
        for parameter in parameters:
            parameter.grad = drawn(parameter.shape, number, dtype)
        optimizer.step()

    parameters = parameters_of(SHAPES, dtype, "cpu")
    optimizer = RowWiseAdagrad(parameters, lr=0.1, lr_decay=0.3)
    for number in range(3):
        step(optimizer, parameters, number)
    again = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    resumed = RowWiseAdagrad(again)
    saved = through_a_file(optimizer.state_dict())
    resumed.load_state_dict(saved)
    assert_same_content(resumed.state_dict(), optimizer.state_dict())
    copied, pickled = copy.deepcopy([again, resumed]), pickle.dumps([again, resumed])
    kept = copy.deepcopy(optimizer.state_dict())
    for number in range(3, 6):
        step(optimizer, parameters, number)
    for rows, other in ([again, resumed], copied, pickle.loads(pickled)):
        assert_same_content(other.state_dict(), kept)
        for number in range(3, 6):
            step(other, rows, number)
        assert_same_content([row.detach() for row in rows], [p.detach() for p in parameters])
        assert_same_content(other.state_dict(), optimizer.state_dict())


def test_loaded_sums_of_16_bit_rows_are_those_that_the_users_hooks_give() -> None:
    parameter = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    optimizer, fine, seen = RowWiseAdagrad([parameter]), 1 + 2**-20, []
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    given = optimizer.state_dict()
    other = {**given, "state": {0: {**given["state"][0], "sum": torch.full((2, 1), fine)}}}
    optimizer.register_load_state_dict_pre_hook(lambda *_: other)
    optimizer.register_load_state_dict_post_hook(
        lambda made: seen.append(made.state[parameter]["sum"].clone())
    )
    for _ in range(2):
        optimizer.load_state_dict(given)
        assert_same_bytes(optimizer.state[parameter]["sum"], torch.full((2, 1), fine))
    assert [each.tolist() for each in seen] == [[[fine], [fine]]] * 2
    optimizer.step()  # which writes to a copy
    assert_same_bytes(other["state"][0]["sum"], torch.full((2, 1), fine))
    other["state"][0]["sum"] = torch.ones(2, 1, dtype=torch.bfloat16)
    optimizer.load_state_dict(given)
    assert_same_bytes(optimizer.state[parameter]["sum"], torch.ones(2, 1))


def test_a_state_dict_of_other_groups_changes_nothing() -> None:
    optimizer = RowWiseAdagrad([nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))])
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    optimizer.load_state_dict(before)
    assert_same_content(optimizer.state_dict(), before)


# ------------------------------------------------------------------------------------------------
# Arguments

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(
        ({name: value}, ValueError, f"RowWiseAdagrad: {name} must be at least 0, got {value}")
        for name in ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps")
        for value in (-0.5, math.nan)
    ),
    *(
        ({name: value}, TypeError, f"RowWiseAdagrad: {name} must be a number, got {value!r}")
        for name in ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps")
        for value in ("1", None)
    ),
    ({"eps": torch.tensor(1.0)}, TypeError, r"RowWiseAdagrad: eps must be a number, got tensor"),
    ({"lr": torch.tensor(-1.0)}, ValueError, "RowWiseAdagrad: lr must be at least 0, got -1.0"),
    ({"lr": torch.ones(2)}, ValueError, "a tensor of one element, got a tensor of 2 elements"),
    ({"foreach": 1}, TypeError, "foreach must be one of None, True, False, got 1"),
    ({"maximize": None}, TypeError, "maximize must be one of True, False, got None"),
    ({"capturable": "yes"}, TypeError, "capturable must be one of True, False, got 'yes'"),
]


@pytest.mark.parametrize(("given", "kind", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_option_is_named(
    given: dict[str, Any], kind: type[Exception], message: str
) -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    with pytest.raises(kind, match=message):
        RowWiseAdagrad([parameter], **given)
    with pytest.raises(kind, match=message):
        RowWiseAdagrad([{"params": [parameter], **given}])


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (torch.ones(2, 3, dtype=torch.complex64), TypeError, r"float32.*got torch.complex64 of"),
        (torch.ones(2, 3).to(torch.float8_e5m2), TypeError, r"got torch.float8_e5m2 of shape"),
        (torch.ones(2, 3, dtype=torch.int64), TypeError, r"got torch.int64 of shape \[2, 3\]"),
        (torch.tensor(1.0), ValueError, "a parameter must have rows .*got one without dimensions"),
    ],
    ids=["complex", "float8", "integer", "number"],
)
def test_a_parameter_of_another_kind_is_refused(
    value: Tensor, kind: type[Exception], message: str
) -> None:
    parameter = nn.Parameter(value, requires_grad=value.is_floating_point() or value.is_complex())
    with pytest.raises(kind, match=f"RowWiseAdagrad: .*{message}"):
        RowWiseAdagrad([parameter])
    optimizer = RowWiseAdagrad([nn.Parameter(torch.ones(2, 3))])
    with pytest.raises(kind, match=message):
        optimizer.add_param_group({"params": [parameter]})
    assert len(optimizer.param_groups) == 1


def test_groups_have_options_of_their_own() -> None:
    first, second = (nn.Parameter(torch.ones(2, 3)) for _ in range(2))
    optimizer = RowWiseAdagrad([("first", first)], lr=0.5)
    optimizer.add_param_group(
        {"params": [("second", second)], "lr": 0.25, "initial_accumulator_value": 3.0}
    )
    for part in (first, second):
        part.grad = torch.ones(2, 3)
    optimizer.step()
    assert first.tolist() == [[0.5] * 3] * 2
    assert second.tolist() == [[0.875] * 3] * 2


def test_a_closure_computes_the_loss_again() -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    optimizer = RowWiseAdagrad([parameter], lr=0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = parameter.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 6
    assert parameter.tolist() == [[0.5] * 3] * 2
    assert optimizer.step() is None


# ------------------------------------------------------------------------------------------------
# Rows in host memory

ROWS, WIDTH = 23, 6
# Without weight decay plain training, too, leaves the rows alone that a step does not look up.
KEPT: dict[str, Any] = {"lr": 0.25, "lr_decay": 0.1, "initial_accumulator_value": 0.5}


def batches(steps: int = 8) -> list[Tensor]:
    """Ids with duplicates, in changing numbers."""
    random = torch.Generator().manual_seed(5)
    return [torch.randint(ROWS, (1 + 5 * n % 17,), generator=random) for n in range(steps)]


def factors(rows: Tensor, seed: int) -> Tensor:
    """Whole numbers: the sum of an id's gradients is the same in any order."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, rows.shape, generator=random).to(rows)


def optimizer_of(model: nn.Module, **options: Any) -> RowWiseAdagrad:
    """Its optimizer; an Embedding's rows are attached."""
    optimizer = RowWiseAdagrad(model.parameters(), **KEPT, **options)
    if isinstance(model, speedtorch.Embedding):
        speedtorch.attach(optimizer, model)
    return optimizer


def train(model: nn.Module, optimizer: optim.Optimizer, loader: Iterable[Tensor]) -> None:
    for number, ids in enumerate(loader):
        optimizer.zero_grad()
        rows = model(ids)
        (rows * factors(rows, number)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("how", ["single", "foreach", "sparse"])
@WITH_DTYPES
@pytest.mark.parametrize("ahead", [False, True], ids=["at-once", "prefetch"])
@pytest.mark.parametrize("capacity", [None, 17], ids=["counted", "capacity"])
def test_an_embedding_trains_as_a_parameter_of_all_rows(
    capacity: int | None, ahead: bool, dtype: torch.dtype, how: str
) -> None:
    values = drawn((ROWS, WIDTH), 1, dtype)
    given: dict[str, Any] = {"freeze": False, "sparse": how == "sparse"}
    plain = nn.Embedding.from_pretrained(values, **given)
    ours = speedtorch.Embedding.from_pretrained(values.clone(), capacity=capacity, **given)
    loader: Iterable[Tensor] = batches()
    if ahead:
        loader = speedtorch.prefetch(loader, ours, ids=lambda ids: ids)
    optimizers = [optimizer_of(module, foreach=how == "foreach") for module in (ours, plain)]
    train(ours, optimizers[0], loader)
    train(plain, optimizers[1], batches())
    assert_same_content(ours.state_dict(), plain.state_dict())
    assert_same_content(*(optimizer.state_dict()["state"] for optimizer in optimizers))


def test_the_number_lies_behind_the_weight_of_its_row() -> None:
    embedding = speedtorch.Embedding(ROWS, 128)
    speedtorch.attach(RowWiseAdagrad(embedding.parameters()), embedding)
    assert embedding.table["sum"].shape == (ROWS, 1)
    assert embedding.table.record_bytes == 528
    assert embedding.table["sum"].storage_offset() == 128


def test_an_attached_optimizer_loads_by_torchs_hooks() -> None:
    """Its load_state_dict takes no state of all rows to the device of the parameter."""
    embedding = speedtorch.Embedding(ROWS, WIDTH)
    optimizer = RowWiseAdagrad(embedding.parameters())
    speedtorch.attach(optimizer, embedding)
    assert "load_state_dict" not in vars(optimizer)

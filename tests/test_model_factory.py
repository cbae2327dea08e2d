"""ModelFactory: which rows the variable holds, what goes back, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import assert_same_bytes, random_rows
from torch import Tensor, nn

import speedtorch
from speedtorch import (
    CPUPytorchModelFactory,
    GPUPytorchModelFactory,
    HostTable,
    ModelFactory,
    ModelFactoryMM,
    PytorchModelFactory,
)

ROWS, WIDTH = 12, 5


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory-mapped families write to the current folder."""
    monkeypatch.chdir(tmp_path)


def layer(device: str = "cpu", dtype: torch.dtype = torch.float32) -> nn.Embedding:
    return nn.Embedding(3, WIDTH, device=device, dtype=dtype)


MAKERS = {
    "ModelFactory": ModelFactory,
    "ModelFactory-pinned": lambda *a, **k: ModelFactory(*a, CPUPinn=True, **k),
    "GPUPytorch": GPUPytorchModelFactory,
    "CPUPytorch": CPUPytorchModelFactory,
    "Pytorch-device": PytorchModelFactory,
    "Pytorch-pinned": lambda *a, **k: PytorchModelFactory(*a, deviceType="cpu", pinType=True, **k),
    "Pytorch-pageable": lambda *a, **k: PytorchModelFactory(*a, deviceType="cpu", **k),
    "MM": ModelFactoryMM,
}


@pytest.fixture(params=MAKERS.values(), ids=MAKERS.keys())
def family(request: pytest.FixtureRequest) -> Any:
    """Builds a ModelFactory of each family."""
    return request.param


def filled(switcher: Any) -> Tensor:
    """Gives a switcher known rows and returns a copy of them."""
    switcher.zerosInit()
    values = random_rows(ROWS, (WIDTH,), switcher.table["weight"].dtype)
    switcher.table["weight"].copy_(values)
    return values


def table_rows(switcher: Any) -> Tensor:
    switcher.table.settle()
    return switcher.table["weight"].detach().cpu()


# ------------------------------------------------------------------------------------------------
# Exchange
# ------------------------------------------------------------------------------------------------


def test_the_variable_holds_the_rows_of_the_batch_in_order(family: Any, device: str) -> None:
    embedding = layer(device)
    switcher = family(embedding, ROWS, WIDTH)
    values = filled(switcher)
    switcher.beforeForwardPass(np.array([[3, 11], [0, 3]]), np.array([7]))
    speedtorch.synchronize()
    assert_same_bytes(embedding.weight, values[[3, 11, 0, 3, 7]])
    assert embedding.weight.device.type == device
    assert embedding.weight.is_contiguous()


def test_the_rows_of_the_batch_go_back_and_no_others_change(family: Any, device: str) -> None:
    embedding = layer(device)
    switcher = family(embedding, ROWS, WIDTH)
    expected = filled(switcher)
    ids = [4, 2, 9]
    switcher.beforeForwardPass(ids)
    new = random_rows(3, (WIDTH,), seed=9)
    embedding.weight.data.copy_(new)
    switcher.afterOptimizerStep(ids)
    expected[ids] = new
    assert_same_bytes(table_rows(switcher), expected)


IDS = [5, 0, 11, 5]
FORMS = {
    "int64": lambda d: torch.tensor(IDS),
    "int32": lambda d: torch.tensor(IDS, dtype=torch.int32),
    "uint8": lambda d: torch.tensor(IDS, dtype=torch.uint8),
    "on-the-device": lambda d: torch.tensor(IDS, device=d),
    "list": lambda d: IDS,
    "nested-tuple": lambda d: ((5, 0), (11, 5)),
    "numpy": lambda d: np.array(IDS),
    "numpy-int16": lambda d: np.array(IDS, dtype=np.int16),
    "numpy-uint32": lambda d: np.array(IDS, dtype=np.uint32),
    "numpy-big-endian": lambda d: np.array(IDS, dtype=">i8"),
    "numpy-backward": lambda d: np.array(IDS[::-1])[::-1],
    "numpy-read-only": lambda d: np.broadcast_to(np.array(IDS), (1, 4)),
    "numpy-3-d": lambda d: np.array(IDS).reshape(2, 1, 2),
    "tensor-transposed": lambda d: torch.tensor([[5, 11], [0, 5]]).t(),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_ids_come_in_any_form(form: Any, device: str) -> None:
    embedding = layer(device)
    switcher = ModelFactory(embedding, ROWS, WIDTH, CPUPinn=True)
    values = filled(switcher)
    switcher.beforeForwardPass(form(device))
    assert_same_bytes(embedding.weight, values[IDS])
    switcher.afterOptimizerStep(form(device))
    assert_same_bytes(table_rows(switcher), values)


def test_positives_and_negatives_may_differ_in_form_and_place(device: str) -> None:
    embedding = layer(device)
    switcher = ModelFactory(embedding, ROWS, WIDTH)
    values = filled(switcher)
    switcher.beforeForwardPass(torch.tensor([[1], [2]], device=device, dtype=torch.int32), [3, 4])
    assert_same_bytes(embedding.weight, values[[1, 2, 3, 4]])


def test_the_batch_may_grow_shrink_and_be_empty(device: str) -> None:
    embedding = layer(device)
    switcher = ModelFactory(embedding, ROWS, WIDTH, CPUPinn=True)
    values = filled(switcher)
    for ids in ([1], list(range(12)), [], [2, 3]):
        switcher.beforeForwardPass(ids)
        assert_same_bytes(embedding.weight, values[ids])
        switcher.afterOptimizerStep(ids)
    assert_same_bytes(table_rows(switcher), values)


def test_any_module_with_a_weight_and_a_parameter_will_do(device: str) -> None:
    linear = nn.Linear(WIDTH, 3, bias=False, device=device)
    parameter = nn.Parameter(torch.zeros(1, WIDTH, device=device))
    for variable, held in ((linear, linear.weight), (parameter, parameter)):
        switcher = ModelFactory(variable, ROWS, WIDTH)
        values = filled(switcher)
        switcher.beforeForwardPass([8, 1])
        assert_same_bytes(held, values[[8, 1]])


def test_rows_may_have_several_dimensions() -> None:
    parameter = nn.Parameter(torch.zeros(1, 2, 3, dtype=torch.float64))
    switcher = ModelFactory(parameter, 4, (2, 3), datatype=np.float64)
    switcher.uniformDistributionInit(0, 1)
    switcher.beforeForwardPass([3, 3])
    assert_same_bytes(parameter, switcher.table["weight"][[3, 3]])


@pytest.mark.parametrize(
    ("datatype", "dtype"),
    [
        ("float64", torch.float64),
        ("f2", torch.float16),
        (np.float16, torch.float16),
        (np.dtype("float32"), torch.float32),
        (torch.bfloat16, torch.bfloat16),
        ("bfloat16", torch.bfloat16),
        ("complex64", torch.complex64),
    ],
    ids=str,
)
def test_every_family_takes_numpys_and_torchs_dtypes(
    family: Any, datatype: Any, dtype: torch.dtype
) -> None:
    switcher = family(layer(dtype=dtype), ROWS, WIDTH, datatype=datatype)
    switcher.zerosInit()
    assert switcher.table["weight"].dtype == dtype


# ------------------------------------------------------------------------------------------------
# Duplicates
# ------------------------------------------------------------------------------------------------


def test_the_last_occurrence_of_an_id_stays(device: str) -> None:
    embedding = layer(device)
    switcher = ModelFactory(embedding, ROWS, WIDTH, CPUPinn=True)
    expected = filled(switcher)
    ids = [3, 8, 3, 3, 8]
    for seed in range(5):
        switcher.beforeForwardPass(ids)
        new = random_rows(5, (WIDTH,), seed=seed)
        embedding.weight.data.copy_(new)
        switcher.afterOptimizerStep(ids)
        expected[3], expected[8] = new[3], new[4]
        assert_same_bytes(table_rows(switcher), expected)


def test_with_sum_duplicates_changes_add_up_in_index_order(family: Any, device: str) -> None:
    embedding = layer(device)
    switcher = family(embedding, ROWS, WIDTH, sumDuplicates=True)
    switcher.zerosInit()
    switcher.table["weight"].copy_(torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH))
    expected = table_rows(switcher).clone().numpy()
    ids = [3, 8, 3, 0, 3]
    switcher.beforeForwardPass(ids)
    change = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(4)) * 1e3
    old = embedding.weight.detach().cpu().clone()
    embedding.weight.data.add_(change.to(device))
    new = embedding.weight.detach().cpu()
    switcher.afterOptimizerStep(ids)
    np.add.at(expected, ids, (new - old).numpy())
    assert_same_bytes(table_rows(switcher), torch.from_numpy(expected))


def test_sum_duplicates_needs_a_forward_pass_before_each_step() -> None:
    switcher = ModelFactory(layer(), ROWS, WIDTH, sumDuplicates=True)
    values = filled(switcher)
    with pytest.raises(RuntimeError, match="needs a beforeForwardPass with the same ids"):
        switcher.afterOptimizerStep([1, 2, 3])
    switcher.beforeForwardPass([1, 2, 3])
    switcher.afterOptimizerStep([1, 2, 3])
    with pytest.raises(RuntimeError, match="needs a beforeForwardPass with the same ids"):
        switcher.afterOptimizerStep([1, 2, 3])
    assert_same_bytes(table_rows(switcher), values)


# ------------------------------------------------------------------------------------------------
# Autograd
# ------------------------------------------------------------------------------------------------


def test_a_gradient_of_another_shape_is_dropped_and_one_that_fits_stays() -> None:
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


# ------------------------------------------------------------------------------------------------
# First values, files, views
# ------------------------------------------------------------------------------------------------


def test_initialisers_give_their_distribution_and_follow_the_seed(family: Any) -> None:
    switcher = family(layer(), 4000, WIDTH)
    torch.manual_seed(3)
    switcher.uniformDistributionInit(-2, 3)
    uniform = switcher.getNumpyVersion().copy()
    assert -2 <= uniform.min() < -1.9
    assert 2.9 < uniform.max() <= 3
    torch.manual_seed(3)
    switcher.uniformDistributionInit(-2, 3)
    assert np.array_equal(switcher.getNumpyVersion(), uniform)
    switcher.normalDistributionInit(mean=5, stdDev=0.5)
    normal = switcher.getNumpyVersion()
    assert normal.mean() == pytest.approx(5, abs=0.05)
    assert normal.std() == pytest.approx(0.5, abs=0.05)
    switcher.customInit(nn.init.constant_, 0.25)
    assert (switcher.getNumpyVersion() == 0.25).all()
    switcher.zerosInit()
    assert (switcher.getNumpyVersion() == 0).all()


@pytest.mark.parametrize("name", ["rows", "rows.npy", "rows.safetensors"])
@pytest.mark.parametrize("maker", [ModelFactory, ModelFactoryMM])
def test_saved_rows_come_back_without_an_init(maker: Any, name: str, device: str) -> None:
    first = maker(layer(device), ROWS, WIDTH)
    values = filled(first)
    first.saveCupy(name)
    assert os.path.exists(name if "." in name else "rows.npy")
    second = maker(layer(device), ROWS, WIDTH)
    second.loadCupy(name)
    assert_same_bytes(table_rows(second), values)


def test_the_npy_file_is_numpys() -> None:
    switcher = ModelFactory(layer(), ROWS, WIDTH)
    values = filled(switcher)
    switcher.saveCupy("rows")
    assert_same_bytes(torch.from_numpy(np.load("rows.npy", allow_pickle=False)), values)
    np.save("numpys.npy", np.ones((ROWS, WIDTH), dtype=np.float32))
    switcher.loadCupy("numpys.npy")
    assert (switcher.getNumpyVersion() == 1).all()


@pytest.mark.parametrize(
    "maker", [GPUPytorchModelFactory, CPUPytorchModelFactory, PytorchModelFactory]
)
def test_torchs_files_hold_the_tensor_itself(maker: Any, device: str) -> None:
    first = maker(layer(device), ROWS, WIDTH)
    values = filled(first)
    first.saveTorch("rows.pt")
    assert_same_bytes(torch.load("rows.pt", weights_only=True), values)
    second = maker(layer(device), ROWS, WIDTH)
    second.loadTorch("rows.pt")
    assert_same_bytes(table_rows(second), values)


def test_a_field_of_a_shared_table_is_saved_alone() -> None:
    table = HostTable(ROWS, WIDTH, state=("exp_avg",), memory="plain")
    switcher = GPUPytorchModelFactory(layer(), ROWS, WIDTH, table=table)
    filled(switcher)
    switcher.saveTorch("rows.pt")
    saved = torch.load("rows.pt", weights_only=True)
    assert saved.untyped_storage().nbytes() == ROWS * WIDTH * 4
    ModelFactory(layer(), ROWS, WIDTH, table=table).saveCupy("rows.npy")
    assert np.load("rows.npy").shape == (ROWS, WIDTH)


def test_a_file_that_does_not_fit_changes_nothing() -> None:
    switcher = ModelFactory(layer(), ROWS, WIDTH)
    np.save("narrow.npy", np.zeros((ROWS, WIDTH - 1), dtype=np.float32))
    with pytest.raises(ValueError, match=r"holds weight \[12, 4\] float32; expected .*\[12, 5\]"):
        switcher.loadCupy("narrow.npy")
    with pytest.raises(RuntimeError, match="has no table yet"):
        switcher.beforeForwardPass([0])
    values = filled(switcher)
    np.save("double.npy", np.zeros((ROWS, WIDTH)))
    with pytest.raises(ValueError, match="float64; expected weight .* float32"):
        switcher.loadCupy("double.npy")
    assert_same_bytes(table_rows(switcher), values)


def test_torch_files_with_other_content_are_refused() -> None:
    switcher = GPUPytorchModelFactory(layer(), ROWS, WIDTH)
    torch.save([torch.zeros(ROWS, WIDTH)], "list.pt")
    with pytest.raises(ValueError, match=r"list\.pt holds a list; expected what saveTorch writes"):
        switcher.loadTorch("list.pt")
    torch.save(torch.zeros(ROWS, 1), "narrow.pt")
    with pytest.raises(ValueError, match=r"holds weight \[12, 1\] float32; expected"):
        switcher.loadTorch("narrow.pt")


class Trap:
    """Would run code when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("trap",)


def test_a_pickle_with_code_is_not_run() -> None:
    torch.save(Trap(), "trap.pt")
    with pytest.raises(Exception, match="[Ww]eights"):
        GPUPytorchModelFactory(layer(), ROWS, WIDTH).loadTorch("trap.pt")
    assert not os.path.exists("trap")


def test_bfloat16_goes_to_safetensors_and_not_to_npy() -> None:
    switcher = ModelFactory(layer(dtype=torch.bfloat16), ROWS, WIDTH, datatype="bfloat16")
    values = filled(switcher)
    with pytest.raises(ValueError, match="safetensors"):
        switcher.saveCupy("rows.npy")
    switcher.saveCupy("rows.safetensors")
    switcher.zerosInit()
    switcher.loadCupy("rows.safetensors")
    assert_same_bytes(table_rows(switcher), values)


def test_the_numpy_version_is_a_view_of_host_memory() -> None:
    switcher = ModelFactory(layer(), ROWS, WIDTH)
    switcher.zerosInit()
    view = switcher.getNumpyVersion()
    switcher.table["weight"][3] = 7
    assert (view[3] == 7).all()


def test_each_family_gives_its_variable_by_its_own_name() -> None:
    for maker, name in (
        (ModelFactory, "getCupyVar"),
        (ModelFactoryMM, "getCupyMM"),
        (GPUPytorchModelFactory, "getTorchVar"),
    ):
        switcher = maker(layer(), ROWS, WIDTH)
        switcher.zerosInit()
        assert getattr(switcher, name)().data_ptr() == switcher.table["weight"].data_ptr()


# ------------------------------------------------------------------------------------------------
# Where the table is
# ------------------------------------------------------------------------------------------------


def kind(switcher: Any) -> str:
    switcher.zerosInit()
    memory: str = switcher.table.memory
    return memory


def test_the_placement_follows_the_family_and_its_arguments(device: str) -> None:
    with_variable = {"cpu": "plain", "cuda": "cuda"}[device]
    host = speedtorch.memory_kind(speedtorch.empty(1, memory="auto"))
    variable = (layer(device), ROWS, WIDTH)
    assert kind(ModelFactory(*variable)) == with_variable
    assert kind(ModelFactory(*variable, CPUPinn=True)) == host
    assert kind(GPUPytorchModelFactory(*variable)) == with_variable
    assert kind(CPUPytorchModelFactory(*variable)) == host
    assert kind(PytorchModelFactory(*variable)) == with_variable
    assert kind(PytorchModelFactory(*variable, deviceType="cuda:0")) == with_variable
    assert kind(PytorchModelFactory(*variable, deviceType="cpu")) == "plain"
    assert kind(PytorchModelFactory(*variable, deviceType="cpu", pinType=True)) == host
    assert kind(ModelFactoryMM(*variable)) == "file"


def test_memory_mapped_tables_take_the_first_free_name() -> None:
    for name in ("variable0.memmap", "variable1.memmap"):
        ModelFactoryMM(layer(), ROWS, WIDTH).zerosInit()
        assert os.path.getsize(name) == ROWS * WIDTH * 4
    ModelFactoryMM(layer(), ROWS, WIDTH, diskname="mine").zerosInit()
    assert os.path.exists("mine0.memmap")


def test_a_memory_mapped_table_says_that_it_cannot_be_pinned() -> None:
    with pytest.warns(UserWarning, match="CPUPinn=True has no effect on a memory-mapped file"):
        ModelFactoryMM(layer(), ROWS, WIDTH, CPUPinn=True)


def test_a_second_init_keeps_the_table() -> None:
    switcher = ModelFactory(layer(), ROWS, WIDTH)
    switcher.zerosInit()
    table = switcher.table
    switcher.uniformDistributionInit(1, 2)
    assert switcher.table is table


def test_a_given_table_is_used_as_it_is() -> None:
    table = HostTable(ROWS, WIDTH, state=("exp_avg",), memory="plain").fill_(2.0)
    embedding = layer()
    switcher = ModelFactory(embedding, ROWS, WIDTH, table=table)
    switcher.beforeForwardPass([1])
    assert (embedding.weight == 2).all()
    switcher.zerosInit()
    assert (table["weight"] == 0).all()


# ------------------------------------------------------------------------------------------------
# variableTransformer
# ------------------------------------------------------------------------------------------------


def test_the_transformer_numbers_the_rows_of_the_batch(family: Any) -> None:
    switcher = family(layer(), ROWS, WIDTH)
    positives = switcher.variableTransformer(2, 3)
    assert positives.tolist() == [[0, 1, 2], [3, 4, 5]]
    positives, negatives = switcher.variableTransformer(2, 1, 3)
    assert positives.tolist() == [[0], [1]]
    assert negatives.tolist() == [[2, 3, 4], [5, 6, 7]]
    positives, negatives = switcher.variableTransformer(2, 1, negPerBatch=0)
    assert negatives.shape == (2, 0)


# ------------------------------------------------------------------------------------------------
# Refusals
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, ROWS, 2**40, -(2**63)])
def test_an_id_out_of_range_changes_nothing_and_the_next_call_works(bad: int) -> None:
    embedding = layer()
    switcher = ModelFactory(embedding, ROWS, WIDTH, CPUPinn=True)
    values = filled(switcher)
    switcher.beforeForwardPass([1, 2, 3])
    held = embedding.weight.detach().clone()
    with pytest.raises(IndexError):
        switcher.beforeForwardPass([4, bad, 5])
    assert_same_bytes(embedding.weight, held)
    with pytest.raises(IndexError):
        switcher.afterOptimizerStep([4, bad, 5])
    assert_same_bytes(table_rows(switcher), values)
    switcher.beforeForwardPass([4, 5])
    assert_same_bytes(embedding.weight, values[[4, 5]])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0.5], "indexes: expected integers, got float64"),
        (np.array([True]), "indexes: expected integers, got bool"),
        (["a"], "indexes: expected integers, got <U1"),
        (torch.tensor([1.0]), "indexes: expected integers, got torch.float32"),
        (torch.tensor([True]), "indexes: expected integers, got torch.bool"),
    ],
)
def test_ids_that_are_no_integers_are_refused(ids: Any, message: str) -> None:
    switcher = ModelFactory(layer(), ROWS, WIDTH)
    switcher.zerosInit()
    with pytest.raises(TypeError, match=message):
        switcher.beforeForwardPass(ids)


def test_another_number_of_ids_than_rows_is_refused() -> None:
    switcher = ModelFactory(layer(), ROWS, WIDTH)
    values = filled(switcher)
    switcher.beforeForwardPass([1, 2, 3])
    message = "afterOptimizerStep got 2 ids, but the variable holds 3 rows"
    with pytest.raises(ValueError, match=message):
        switcher.afterOptimizerStep([1, 2])
    assert_same_bytes(table_rows(switcher), values)


@pytest.mark.parametrize("method", ["beforeForwardPass", "afterOptimizerStep"])
def test_a_table_that_was_not_initialised_is_named(method: str) -> None:
    switcher = ModelFactory(layer(), ROWS, WIDTH)
    with pytest.raises(RuntimeError, match=r"ModelFactory has no table yet: call zerosInit\(\)"):
        getattr(switcher, method)([0, 1, 2])
    with pytest.raises(RuntimeError, match="has no table yet"):
        _ = switcher.table


CONSTRUCTION_ERRORS: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (nn.ReLU(), {}, TypeError, "expected a module with a weight, .* got ReLU"),
    (layer(), {"embed_dimension": 4}, ValueError, r"embed_dimension=4: the rows of .*\[3, 5\]"),
    (layer(), {"embed_dimension": (5, 1)}, ValueError, r"embed_dimension=\(5, 1\)"),
    (layer(), {"embed_dimension": 5.0}, TypeError, "embed_dimension: expected an int"),
    (layer(), {"datatype": "float64"}, ValueError, "datatype='float64': .* is 'float32'"),
    (layer(), {"datatype": "floot"}, ValueError, "datatype='floot' is no dtype of torch's"),
    (layer(), {"datatype": "U3"}, ValueError, "datatype='U3' is no dtype of torch's"),
    (
        layer(),
        {"table": HostTable(3, WIDTH, memory="plain")},
        ValueError,
        "table: it has 3 rows, total_classes is 12",
    ),
    (
        layer(),
        {"table": HostTable(ROWS, 4, memory="plain")},
        ValueError,
        r"table: its field 'weight' has rows \[4\] of torch.float32; needed are rows \[5\]",
    ),
    (
        layer(),
        {"table": HostTable.from_fields(ROWS, {"sum": (5, torch.float32)}, "plain")},
        ValueError,
        "table: it has no field 'weight', only sum; needed are weight",
    ),
]


@pytest.mark.parametrize(("variable", "arguments", "error", "message"), CONSTRUCTION_ERRORS)
def test_what_does_not_fit_is_refused_at_construction(
    variable: Any, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ModelFactory(variable, **{"total_classes": ROWS, "embed_dimension": WIDTH} | arguments)


@pytest.mark.parametrize(("deviceType", "pinType"), [("cuda", True), ("tpu", False)])
def test_device_and_pin_types_that_do_not_exist_are_refused(deviceType: str, pinType: bool) -> None:
    with pytest.raises(ValueError, match=r"choose \('cuda', False\), \('cpu', True\) or"):
        PytorchModelFactory(layer(), ROWS, WIDTH, deviceType=deviceType, pinType=pinType)

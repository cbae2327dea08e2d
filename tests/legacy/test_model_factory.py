"""ModelFactory: which rows the variable holds and what goes back to the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from model_families import FAMILIES, ROWS, WIDTH, filled, layer, started, table_rows
from reference import assert_same_bytes, random_rows
from torch import nn

import speedtorch
from speedtorch import ModelFactory

pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES.keys())
def family(request: pytest.FixtureRequest) -> Any:
    """Builds a ModelFactory of each family."""
    return request.param


# Exchange


def test_the_variable_holds_the_rows_of_the_batch_in_order(family: Any, device: str) -> None:
    embedding, switcher, values = started(family, device)
    switcher.beforeForwardPass(np.array([[3, 11], [0, 3]]), np.array([7]))
    speedtorch.synchronize()
    assert_same_bytes(embedding.weight, values[[3, 11, 0, 3, 7]])
    assert embedding.weight.device.type == device
    assert embedding.weight.is_contiguous()


def test_only_the_rows_of_the_batch_are_written_back_and_the_last_of_an_id_wins(
    family: Any, device: str
) -> None:
    embedding, switcher, expected = started(family, device)
    ids = [3, 8, 3, 3, 8, 2]
    for seed in range(5):
        switcher.beforeForwardPass(ids)
        new = random_rows(6, (WIDTH,), seed=seed)
        embedding.weight.data.copy_(new)
        switcher.afterOptimizerStep(ids)
        expected[[3, 8, 2]] = new[3:]
        assert_same_bytes(table_rows(switcher), expected)


IDS = [5, 0, 11, 5]
FORMS: dict[str, Callable[[str], tuple[Any, ...]]] = {
    "int64": lambda d: (torch.tensor(IDS),),
    "int32": lambda d: (torch.tensor(IDS, dtype=torch.int32),),
    "uint8": lambda d: (torch.tensor(IDS, dtype=torch.uint8),),
    "on-the-device": lambda d: (torch.tensor(IDS, device=d),),
    "list": lambda d: (IDS,),
    "nested-tuple": lambda d: (((5, 0), (11, 5)),),
    "numpy": lambda d: (np.array(IDS),),
    "numpy-int16": lambda d: (np.array(IDS, dtype=np.int16),),
    "numpy-uint32": lambda d: (np.array(IDS, dtype=np.uint32),),
    "numpy-big-endian": lambda d: (np.array(IDS, dtype=">i8"),),
    "numpy-backward": lambda d: (np.array(IDS[::-1])[::-1],),
    "numpy-read-only": lambda d: (np.broadcast_to(np.array(IDS), (1, 4)),),
    "numpy-3-d": lambda d: (np.array(IDS).reshape(2, 1, 2),),
    "tensor-transposed": lambda d: (torch.tensor([[5, 11], [0, 5]]).t(),),
    "mixed": lambda d: (torch.tensor([[5], [0]], dtype=torch.int32, device=d), IDS[2:]),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_ids_may_have_any_form(form: Any, device: str) -> None:
    embedding, switcher, values = started(ModelFactory, device, CPUPinn=True)
    switcher.beforeForwardPass(*form(device))
    assert_same_bytes(embedding.weight, values[IDS])
    switcher.afterOptimizerStep(*form(device))
    assert_same_bytes(table_rows(switcher), values)


def test_the_batch_may_grow_shrink_and_be_empty(device: str) -> None:
    embedding, switcher, values = started(ModelFactory, device, CPUPinn=True)
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
    _, switcher, values = started(ModelFactory, sumDuplicates=True)
    with pytest.raises(RuntimeError, match="requires beforeForwardPass with the same ids"):
        switcher.afterOptimizerStep([1, 2, 3])
    switcher.beforeForwardPass([1, 2, 3])
    switcher.afterOptimizerStep([1, 2, 3])
    with pytest.raises(RuntimeError, match="requires beforeForwardPass with the same ids"):
        switcher.afterOptimizerStep([1, 2, 3])
    assert_same_bytes(table_rows(switcher), values)


# variableTransformer


def test_the_transformer_numbers_the_rows_of_the_batch(family: Any) -> None:
    switcher = family(layer(), ROWS, WIDTH)
    positives = switcher.variableTransformer(2, 3)
    assert positives.tolist() == [[0, 1, 2], [3, 4, 5]]
    positives, negatives = switcher.variableTransformer(2, 1, 3)
    assert positives.tolist() == [[0], [1]]
    assert negatives.tolist() == [[2, 3, 4], [5, 6, 7]]
    positives, negatives = switcher.variableTransformer(2, 1, negPerBatch=0)
    assert negatives.shape == (2, 0)

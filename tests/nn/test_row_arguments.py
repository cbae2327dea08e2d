"""What Embedding and EmbeddingBag refuse, in torch's kinds of errors, and that nothing changes."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import NEEDS_GPU
from reference import assert_same_bytes, assert_same_content
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import speedtorch

ROWS, WIDTH = 20, 4
IDS = torch.tensor([3, 1, 3, 0])
BAGS = IDS[None]
NONE = torch.empty(0, dtype=torch.int64)
MODULES = [speedtorch.Embedding, speedtorch.EmbeddingBag]

# Settings of a bag, and what it is called with.
BAD_BAGS: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "no offsets": ({}, (IDS,)),
    "offsets that begin late": ({}, (IDS, torch.tensor([1]))),
    "offsets that end late": ({}, (IDS, torch.tensor([0, 9]))),
    "a last offset that is late": ({"include_last_offset": True}, (IDS, torch.tensor([0, 9]))),
    "no last offset": ({"include_last_offset": True}, (IDS, NONE)),
    "offsets in two dimensions": ({}, (IDS, torch.tensor([[0]]))),
    "offsets in none": ({}, (IDS, torch.tensor(0))),
    "offsets of floats": ({}, (IDS, torch.tensor([0.0, 1.0]))),
    "offsets and bags": ({}, (BAGS, torch.tensor([0]))),
    "ids in three dimensions": ({}, (BAGS[None],)),
    "ids in none": ({}, (torch.tensor(3), torch.tensor([0]))),
    "ids of floats": ({}, (BAGS.float(),)),
    "ids of floats with offsets": ({}, (IDS.float(), torch.tensor([0]))),
    "ids of int16": ({}, (BAGS.short(),)),
    "sparse ids": ({}, (BAGS.to_sparse(),)),
    "weights with mean": ({"mode": "mean"}, (BAGS, None, torch.ones(1, 4))),
    "weights with max": ({"mode": "max"}, (BAGS, None, torch.ones(1, 4))),
    "weights of another shape": ({"mode": "sum"}, (BAGS, None, torch.ones(3))),
    "weights of another length": ({"mode": "sum"}, (IDS, torch.tensor([0]), torch.ones(3))),
    "weights of another dtype": ({"mode": "sum"}, (BAGS, None, torch.ones(1, 4).double())),
    "weights of integers": ({"mode": "sum"}, (BAGS, None, torch.ones(1, 4).long())),
    "weights of all that is wrong": ({}, (BAGS, None, torch.ones(3).double())),
    "weights of another dtype with mean": ({}, (BAGS, None, torch.ones(1, 4).double())),
    "no ids": ({}, ()),
    "another argument": ({}, (BAGS, None, None, None)),
}


def error_of(make: Callable[..., nn.Module], settings: dict[str, Any], given: Any) -> type:
    with pytest.raises(Exception) as raised:
        make(ROWS, WIDTH, **settings)(*given)
    return raised.type


@pytest.mark.parametrize(("settings", "given"), BAD_BAGS.values(), ids=BAD_BAGS)
def test_a_bad_call_of_a_bag_raises_torchs_kind_of_error(
    settings: dict[str, Any], given: tuple[Any, ...]
) -> None:
    expected = error_of(nn.EmbeddingBag, settings, given)
    assert error_of(speedtorch.EmbeddingBag, settings, given) is expected


@pytest.mark.parametrize(
    "given", [(BAGS.float(),), (BAGS.short(),), ([3],), (None,)], ids=["float", "int16", "list", ""]
)
def test_bad_ids_of_an_embedding_raise_torchs_kind_of_error(given: tuple[Any]) -> None:
    assert error_of(speedtorch.Embedding, {}, given) is error_of(nn.Embedding, {}, given)


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.int32])
def test_offsets_may_be_integers_of_any_size_as_in_torch(dtype: torch.dtype) -> None:
    theirs = nn.EmbeddingBag(ROWS, WIDTH)
    ours = speedtorch.EmbeddingBag.from_module(theirs)
    offsets = torch.tensor([0, 3], dtype=dtype)
    assert_same_bytes(ours(IDS, offsets), theirs(IDS, offsets))


def test_ids_in_no_bag_are_an_error_where_torch_would_crash() -> None:
    with pytest.raises(RuntimeError, match=r"offsets must be \[bags\] for 4 ids, got none"):
        speedtorch.EmbeddingBag(ROWS, WIDTH)(IDS, NONE)
    assert speedtorch.EmbeddingBag(ROWS, WIDTH)(NONE, NONE).shape == (0, WIDTH)
    bag = speedtorch.EmbeddingBag(ROWS, WIDTH, include_last_offset=True)
    with pytest.raises(RuntimeError, match="end with the number of ids, 4. .* the last is 1,"):
        bag(IDS, torch.tensor([0, 1]))


def embedding(rows: int = 5, **settings: Any) -> Any:
    return speedtorch.Embedding(rows, 3, **settings)


def replaced() -> None:
    own = embedding()
    own.weight = nn.Parameter(torch.zeros(5, 3))
    own(torch.tensor([1]))


from_rows = speedtorch.Embedding.from_pretrained
NO_MODULE = r"module: expected a torch.nn.Embedding(Bag)?, got"
NO_ROWS = "embeddings: expected a tensor, a HostTable or the path"
NOT_SHARED = "Embedding: its table cannot be moved to shared"
WRONG: dict[type[Exception], list[tuple[Callable[[], object], str]]] = {
    ValueError: [
        (lambda: embedding(padding_idx=5), "padding_idx.*-5 to 4.*5"),
        (lambda: embedding(-1), "-1"),
        (lambda: embedding(memory="disk"), "disk"),
        (lambda: embedding(memory="file"), "memory='file' needs a path.*from_pretrained"),
        (lambda: embedding(_weight=torch.zeros(4, 3)), r"\(5, 3\), got \(4, 3\)"),
        (lambda: from_rows(torch.zeros(4)), r"\[4\]"),
        (
            lambda: speedtorch.EmbeddingBag(3, 2, mode="min"),
            "mode: expected 'sum', 'mean' or 'max', got 'min'",
        ),
        (
            lambda: speedtorch.EmbeddingBag(ROWS, WIDTH, mode="sum")(IDS),
            r"EmbeddingBag: a 1-D input needs offsets \[bags\]",
        ),
    ],
    IndexError: [
        (
            lambda: speedtorch.EmbeddingBag(20, 3)(torch.tensor([20]), torch.tensor([0])),
            "20.*20 rows",
        ),
    ],
    TypeError: [
        (lambda: speedtorch.Embedding.from_module(embedding()), NO_MODULE),
        (lambda: speedtorch.Embedding.from_module(nn.EmbeddingBag(5, 3)), NO_MODULE),
        (lambda: speedtorch.EmbeddingBag.from_module(speedtorch.EmbeddingBag(5, 3)), NO_MODULE),
        (lambda: speedtorch.EmbeddingBag.from_module(nn.Embedding(5, 3)), NO_MODULE),
        (lambda: from_rows([[1.0, 2.0]]), NO_ROWS),
        (lambda: from_rows(None), NO_ROWS),
        (lambda: from_rows(torch.eye(3).numpy()), NO_ROWS),
        (lambda: embedding(_weight=[1]), "_weight: expected a tensor, got list"),
        (lambda: embedding(padding_idx=1.5), "float"),
        (
            lambda: torch.save(Model(), io.BytesIO()),
            "Embedding cannot be pickled.* its table. Save model",
        ),
    ],
    NotImplementedError: [
        (lambda: embedding().share_memory(), NOT_SHARED),
        (lambda: nn.Sequential(embedding()).share_memory(), NOT_SHARED),
        (lambda: embedding()._replicate_for_data_parallel(), "Embedding: DataParallel"),
    ],
    RuntimeError: [
        (lambda: embedding().load_state_dict({"weight": 3}), "weight: expected a tensor, got int"),
        (replaced, "Embedding: its weight was replaced"),
    ],
}


@pytest.mark.parametrize(
    ("error", "call", "message"), [(error, *row) for error, rows in WRONG.items() for row in rows]
)
def test_wrong_arguments_are_reported_by_name(
    error: type[Exception], call: Callable[[], object], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("make", MODULES)
@pytest.mark.parametrize("device", ["meta", torch.device("meta"), "mps"])
def test_a_device_that_cannot_hold_rows_is_refused_by_the_constructor(
    make: Any, device: Any
) -> None:
    kind = torch.device(device).type
    with pytest.raises(NotImplementedError, match=f"{make.__name__}: .* GPU, got device {kind}"):
        make(ROWS, WIDTH, device=device)


@pytest.mark.parametrize("make", MODULES)
def test_a_default_device_that_cannot_hold_rows_is_refused_by_the_constructor(make: Any) -> None:
    with (
        torch.device("meta"),
        pytest.raises(NotImplementedError, match="got device meta. Build the module with device="),
    ):
        make(ROWS, WIDTH)
    with torch.device("meta"):
        assert make(ROWS, WIDTH, device="cpu").weight.is_cpu


def quantized() -> Tensor:
    return torch.quantize_per_tensor(torch.eye(WIDTH), 0.1, 0, torch.qint8)


NO_VALUES: dict[str, tuple[Callable[[], Tensor], str]] = {
    "sparse": (lambda: torch.eye(WIDTH).to_sparse(), r"got torch.sparse_coo. Use to_dense"),
    "csr": (lambda: torch.eye(WIDTH).to_sparse_csr(), r"got torch.sparse_csr. Use to_dense"),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.eye(WIDTH)[:2], torch.eye(WIDTH)]),
        r"got nested. Use to_padded_tensor\(\)",
    ),
    "quantized": (quantized, r"expected plain numbers, got torch.qint8. Use dequantize\(\)"),
    "meta": (lambda: torch.empty(WIDTH, WIDTH, device="meta"), "values, got one on the meta"),
}


@pytest.mark.filterwarnings("ignore:.*")  # torch's, of its quantized and compressed tensors
@pytest.mark.parametrize("make", MODULES)
@pytest.mark.parametrize(("values", "message"), NO_VALUES.values(), ids=NO_VALUES)
def test_rows_without_dense_values_are_refused_by_name(
    make: Any, values: Callable[[], Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=f"embeddings: .*{message}"):
        make.from_pretrained(values())
    with pytest.raises(ValueError, match=f"_weight: .*{message}"):
        make(WIDTH, WIDTH, _weight=values())
    module = make(WIDTH, WIDTH)
    before = module.table["weight"].clone()
    with pytest.raises(RuntimeError, match=f"weight: .*{message}"):
        module.load_state_dict({"weight": values()})
    assert_same_bytes(module.table["weight"], before)


class Model(nn.Module):
    def __init__(self, make: Any = speedtorch.Embedding) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.words = make(ROWS, WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.first(self.words(ids)))


@pytest.mark.parametrize("make", MODULES)
@pytest.mark.parametrize("convert", ["half", "double", "bfloat16"])
def test_a_lookup_after_a_change_of_dtype_is_refused_by_name(make: Any, convert: str) -> None:
    model = Model(make)
    getattr(model, convert)()
    assert model.first.weight.dtype == model.last.weight.dtype != torch.float32
    message = rf"{make.__name__}: .* its table remains torch.float32. Convert it back with modul"
    for use in (model, model.words.announce):
        with pytest.raises(TypeError, match=message):
            use(BAGS)


@pytest.mark.parametrize("back", [nn.Module.float, lambda model: model.to(torch.float32)])
def test_a_model_that_is_converted_back_works_as_before(back: Any) -> None:
    model = Model()
    model(BAGS)  # holds rows
    model.double().cpu()
    with pytest.raises(TypeError, match="converted to torch.float64"):
        model(BAGS)
    back(model)
    assert model.words.table["weight"].dtype == model.words.weight.dtype == torch.float32
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.words.table["weight"].clone()
    model(BAGS).sum().backward()
    sgd.step()
    changed = (model.words.table["weight"] != before).any(1)
    assert changed.nonzero().flatten().tolist() == [0, 1, 3]


@NEEDS_GPU
def test_a_model_that_moves_and_changes_its_dtype_at_once_moves_and_keeps_its_rows() -> None:
    model = Model()
    before = model.words.table["weight"].clone()
    model.to("cuda", torch.float16)
    assert model.words.weight.is_cuda and model.words.weight.dtype == torch.float32
    with pytest.raises(TypeError, match="converted to torch.float16"):
        model(BAGS)
    model.cpu().cuda().float()
    assert torch.equal(model.words(IDS).detach().cpu(), before[IDS])


def test_a_copy_of_a_model_of_a_refused_dtype_is_refused_as_well() -> None:
    with pytest.raises(TypeError, match="converted to torch.float16"):
        copy.deepcopy(Model().half())(BAGS)


NESTED = [torch.tensor([3]), torch.tensor([1, 0])]


@pytest.mark.filterwarnings("ignore:.*")  # torch's, that nested tensors are a prototype
@pytest.mark.parametrize("make", MODULES)
def test_ids_that_are_not_dense_are_refused_with_their_layout(make: Any) -> None:
    module = make(5, 2)
    with pytest.raises(RuntimeError, match="got torch.int64 of shape .* in torch.sparse_coo"):
        module(torch.eye(3, dtype=torch.int64).to_sparse())
    for layout in (torch.strided, torch.jagged):
        ids = torch.nested.nested_tensor(NESTED, layout=layout)
        with pytest.raises(
            RuntimeError, match=r"got a nested tensor. Pass its values\(\), and for"
        ):
            module(ids)


WAYS: dict[str, Callable[[nn.Module], object]] = {
    "torch.jit.script": torch.jit.script,
    "torch.jit.trace": lambda model: torch.jit.trace(model, BAGS),
    "torch.export": lambda model: torch.export.export(model, (BAGS,)),
    "onnx": lambda model: torch.onnx.export(model, (BAGS,), io.BytesIO(), dynamo=False),
}


@pytest.mark.filterwarnings("ignore:.*")  # torch's, that some of these are deprecated
@pytest.mark.parametrize("make", MODULES)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("way", WAYS)
def test_a_graph_of_a_lookup_is_refused_by_name(way: str, frozen: bool, make: Any) -> None:
    model = Model(make).requires_grad_(not frozen)
    before = model(BAGS)
    message = f"{make.__name__}: torch.export, torch.jit and ONNX cannot export a lookup.*emb.ids."
    with pytest.raises(NotImplementedError, match=message):
        WAYS[way](model)
    assert torch.equal(model(BAGS), before)


TRANSFORMS: dict[str, Callable[[nn.Module], object]] = {
    "vmap": lambda model: torch.func.vmap(model)(BAGS[None]),
    "grad": lambda model: torch.func.grad(lambda x: (model(BAGS) * x).sum())(torch.ones(())),
    "jvp": lambda model: torch.func.jvp(
        lambda x: model(BAGS) * x, (torch.ones(1),), (torch.ones(1),)
    ),
}


@pytest.mark.parametrize("make", MODULES)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_transform_of_a_lookup_is_refused_by_name(transform: str, make: Any) -> None:
    model = Model(make)
    with pytest.raises(
        NotImplementedError, match=rf"{make.__name__}: torch.func's transforms .*to the function"
    ):
        TRANSFORMS[transform](model)
    model(BAGS).sum().backward()
    assert model.words.weight.grad is not None


def test_a_transform_of_what_follows_frozen_rows_works() -> None:
    model = Model().requires_grad_(False)
    expected = model(BAGS)
    given = torch.func.vmap(lambda x: model(BAGS) * x)(torch.arange(3.0))
    assert torch.equal(given[1], expected)


AVERAGES: dict[str, dict[str, Any]] = {
    "averages": {},
    "weights": {"multi_avg_fn": get_swa_multi_avg_fn()},
    "exponential": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "a function": {"avg_fn": lambda mean, new, count: mean + (new - mean) / (count + 1)},
}


@pytest.mark.parametrize("settings", AVERAGES.values(), ids=AVERAGES)
def test_averages_of_models_are_torchs(settings: dict[str, Any]) -> None:
    theirs, ours = Model(nn.Embedding), Model()
    ours.load_state_dict(theirs.state_dict())
    states = []
    for model in (theirs, ours):
        average = AveragedModel(model, **settings)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        for ids in (IDS, IDS + 1, IDS + 16):
            sgd.zero_grad()
            model(ids).square().sum().backward()
            sgd.step()
            average.update_parameters(model)
        states.append(average.module.state_dict())
    assert_same_content(states[1], states[0])

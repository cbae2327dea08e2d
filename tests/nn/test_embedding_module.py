"""Embedding as a module: devices, dtypes, copies, state_dict, compile, and what is refused."""

from __future__ import annotations

import copy
import gc
import inspect
import io
from typing import Any, cast

import pytest
import torch
from conftest import NEEDS_GPU
from reference import assert_same_bytes, assert_same_content
from torch import Tensor, nn

import speedtorch

ROWS, WIDTH = 20, 4
IDS = torch.tensor([3, 1, 3, 19])


class Model(nn.Module):
    def __init__(self, make: Any = speedtorch.Embedding) -> None:
        super().__init__()
        self.words = make(ROWS, WIDTH)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.words(ids).tanh())


def step(model: nn.Module, ids: Tensor = IDS) -> None:
    model(ids).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    optimizer.zero_grad()


def pair() -> tuple[Model, Model]:
    """torch's model and ours with the same values."""
    torch.manual_seed(0)
    theirs, ours = Model(nn.Embedding), Model()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def assert_same_state(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(actual) == list(expected)
    assert_same_content(actual, expected)


def test_state_dict_is_complete_at_any_time_and_interchanges_with_torch() -> None:
    theirs, ours = pair()
    for ids in (IDS, IDS + 0, torch.tensor([0, 3])):
        assert_same_state(ours.state_dict(), theirs.state_dict())
        step(theirs, ids)
        step(ours, ids)
        assert_same_state(ours.state_dict(), theirs.state_dict())
    back = Model(nn.Embedding)
    back.load_state_dict(ours.state_dict())
    assert_same_state(dict(back.state_dict()), dict(theirs.state_dict()))
    buffer = io.BytesIO()
    torch.save(ours.state_dict(), buffer)
    buffer.seek(0)
    again = Model()
    again.load_state_dict(torch.load(buffer, weights_only=True))
    assert_same_state(again.state_dict(), theirs.state_dict())


class LoadsByName(speedtorch.Embedding):
    """Loads as a subclass of torch's may."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *more: Any) -> None:
        names = list(inspect.signature(nn.Module._load_from_state_dict).parameters)[3:]
        given = dict(zip(names, more, strict=True))
        super()._load_from_state_dict(state_dict=state_dict, prefix=prefix, **given)


def test_a_subclass_may_load_by_the_names_of_torchs_arguments() -> None:
    rows = torch.rand(4, 2)
    embedding = LoadsByName(4, 2)
    embedding.load_state_dict({"weight": rows})
    assert torch.equal(embedding.state_dict()["weight"], rows)
    with pytest.raises(RuntimeError, match="Missing key"):
        embedding.load_state_dict({})


def test_state_that_does_not_fit_raises_as_in_torch() -> None:
    theirs, ours = pair()
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    wrong = theirs.state_dict() | {"words.weight": torch.zeros(3, WIDTH)}
    with pytest.raises(RuntimeError, match=r"size mismatch for words.weight.*\(3, 4\).*\(20, 4\)"):
        ours.load_state_dict(wrong)
    rest = {name: value for name, value in theirs.state_dict().items() if name != "words.weight"}
    with pytest.raises(RuntimeError, match='Missing key.*"words.weight"'):
        ours.load_state_dict(rest)
    assert ours.load_state_dict(rest, strict=False).missing_keys == ["words.weight"]
    with pytest.raises(RuntimeError, match='Unexpected key.*"words.other"'):
        ours.load_state_dict(theirs.state_dict() | {"words.other": torch.zeros(1)})
    assert_same_state(ours.state_dict(), before)


def test_another_dtype_is_converted_on_loading() -> None:
    theirs, ours = pair()
    ours.load_state_dict(theirs.double().state_dict())
    assert ours.words.table["weight"].dtype == torch.float32
    assert_same_state(ours.state_dict(), theirs.float().state_dict())


def test_the_same_device_and_dtype_are_left_alone() -> None:
    embedding = speedtorch.Embedding(ROWS, WIDTH)
    weight = embedding.weight
    rows = embedding(IDS).detach()
    assert embedding.to("cpu", torch.float32).float().cpu() is embedding
    assert embedding.weight is weight and len(embedding.step_ids) == 3
    assert torch.equal(embedding(IDS), rows)
    with pytest.raises(NotImplementedError, match="CPU or a GPU, got device meta"):
        embedding.to("meta")


@NEEDS_GPU
def test_a_model_moves_between_devices_within_training() -> None:
    theirs, ours = pair()
    weight = ours.words.weight
    for device in ("cuda", "cpu", "cuda"):
        theirs.to(device)
        assert ours.to(device) is ours and ours.words.weight is weight
        assert weight.device.type == device
        step(theirs, IDS.to(device))
        step(ours, IDS.to(device))
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name].cpu(), value.cpu())


def test_a_deep_copy_has_rows_of_its_own() -> None:
    theirs, ours = pair()
    step(theirs)
    step(ours)
    copied = copy.deepcopy(ours)
    assert copied.words.weight is not ours.words.weight
    for model in (theirs, copied):
        step(model)
    assert_same_state(copied.state_dict(), theirs.state_dict())
    assert not torch.equal(ours.state_dict()["words.weight"], theirs.state_dict()["words.weight"])
    assert copied.words.num_embeddings == ROWS and copied.words.weight.requires_grad


class WithBias(speedtorch.Embedding):
    """A subclass with a parameter of its own."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width)
        self.bias = nn.Parameter(torch.ones(width))


def test_a_module_is_saved_and_copied_in_inference_mode() -> None:
    words = speedtorch.Embedding(ROWS, WIDTH)
    words(IDS).sum().backward()
    with torch.inference_mode():
        state = copy.deepcopy(words.state_dict())
        average = torch.optim.swa_utils.AveragedModel(words)
        average.update_parameters(words)
        copies: list[Any] = [copy.deepcopy(words), average.module]
    after = {"weight": state["weight"].clone()}
    after["weight"][IDS.unique()] -= IDS.bincount()[IDS.unique(), None]
    for copied in copies:
        assert_same_state(copied.state_dict(), state)
        copied(IDS).sum().backward()
        torch.optim.SGD(copied.parameters(), lr=1.0).step()
        assert_same_state(copied.state_dict(), after)


def test_a_deep_copy_has_the_other_parameters_of_a_subclass() -> None:
    made = WithBias(ROWS, WIDTH)
    copied = copy.deepcopy(made)
    assert [name for name, _ in copied.named_parameters()] == ["weight", "bias"]
    assert copied.bias is not made.bias and torch.equal(copied.bias, made.bias)


@pytest.mark.usefixtures("process_group")
def test_distributed_data_parallel_is_refused_by_name_unless_the_weight_is_left_out() -> None:
    wrapped = nn.parallel.DistributedDataParallel(Model())
    with pytest.raises(NotImplementedError, match="Embedding: DistributedDataParallel"):
        wrapped(IDS)
    model = Model()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, ["words.weight"]
    )
    step(nn.parallel.DistributedDataParallel(model))


@pytest.mark.examples
def test_a_compiled_model_trains_as_an_eager_one() -> None:
    theirs, ours = pair()
    compiled = torch.compile(ours)
    for ids in (IDS, IDS + 0, torch.tensor([0, 3])):
        step(theirs, ids)
        compiled(ids).sum().backward()
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
        optimizer.step()
        optimizer.zero_grad()
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)


def test_one_graph_of_a_lookup_is_refused_by_name() -> None:
    model = torch.compile(Model(), fullgraph=True, backend="eager")
    with pytest.raises(
        Exception, match="number of rows changes from step to step|Embedding.forward"
    ):
        model(IDS)


def test_a_subclass_may_set_the_padding_again() -> None:
    class Padded(speedtorch.Embedding):
        def __init__(self, padding_idx: int) -> None:
            self.padding_idx = 2
            super().__init__(ROWS, WIDTH, padding_idx)
            self.padding_idx = padding_idx

    assert Padded(3).padding_idx == 3
    assert Padded(-1).padding_idx == ROWS - 1


class Scaled(speedtorch.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def test_a_traced_model_calls_its_modules() -> None:
    class Model(nn.Module):
        def __init__(self, words: nn.Module) -> None:
            super().__init__()
            self.words, self.bags = words, speedtorch.EmbeddingBag(ROWS, WIDTH, mode="sum")

        def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
            found: Tensor = self.words(ids[:1]) * self.bags(ids, offsets=offsets)
            return found * 2

    model = Model(speedtorch.Embedding(ROWS, WIDTH))
    ids, offsets = torch.tensor([3, 1, 3]), torch.tensor([0, 2])
    traced = torch.fx.symbolic_trace(model)
    assert_same_bytes(traced(ids, offsets).detach(), model(ids, offsets).detach())
    hooked = Model(speedtorch.Embedding(ROWS, WIDTH))
    hooked.words.register_forward_hook(lambda module, given, found: found * 2)
    for refused in (model.words, model.bags, Model(Scaled(ROWS, WIDTH)), hooked):
        with pytest.raises(NotImplementedError, match="torch.fx cannot trace a lookup"):
            torch.fx.symbolic_trace(refused)


@NEEDS_GPU
def test_a_cuda_graph_of_a_lookup_is_refused_by_name() -> None:
    embedding = speedtorch.Embedding(ROWS, WIDTH, device="cuda")
    ids = IDS.cuda()
    embedding(ids)
    graph = torch.cuda.CUDAGraph()
    refused = pytest.raises(RuntimeError, match="Embedding: a CUDA graph cannot capture a lookup")
    with refused, torch.cuda.graph(graph):
        embedding(ids)


def test_parametrised_modules_and_freezing_behave() -> None:
    theirs, ours = pair()
    for model in (theirs, ours):
        model.words.weight.requires_grad_(False)
        step(model)
        model.words.requires_grad_(True)
        step(model)
    assert_same_state(ours.state_dict(), theirs.state_dict())


def test_rows_that_are_frozen_after_their_lookup_get_no_gradient() -> None:
    """As in torch, which decides at the backward. GANs freeze the discriminator there."""
    theirs, ours = pair()
    for model in (theirs, ours):
        step(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(IDS).sum()
        model.words.requires_grad_(False)
        loss.backward()
        assert model.words.weight.grad is None
        optimizer.step()
        optimizer.zero_grad()
        model.words.requires_grad_(True)
        step(model, IDS.flip(0))
    assert_same_state(ours.state_dict(), theirs.state_dict())


class Shared(nn.Module):
    """Has a weight a second time, which torch's modules reach before the first."""

    def __init__(self, words: nn.Module) -> None:
        super().__init__()
        self.words, self.out = words, words.weight


class Held:
    """An optimizer before its model."""

    def __init__(self, words: nn.Module) -> None:
        self.optimizer, self.words = torch.optim.SGD(words.parameters(), lr=0.1), words


def with_its_optimizer(words: Any) -> nn.Module:
    words.optimizer = torch.optim.SGD(words.parameters(), lr=0.1)
    return cast(nn.Module, words)


@pytest.mark.parametrize(
    "hold", [Shared, Held, lambda words: [words.weight, words], with_its_optimizer]
)
def test_a_copy_that_would_separate_a_weight_from_its_module_is_refused(hold: Any) -> None:
    held = hold(speedtorch.Embedding(ROWS, WIDTH))
    with pytest.raises(NotImplementedError, match="after the model.*a property that returns"):
        copy.deepcopy(held)
    embedding = speedtorch.Embedding(ROWS, WIDTH)
    copied, weight = copy.deepcopy((embedding, embedding.weight))
    assert weight is copied.weight and weight is not embedding.weight


def test_one_table_is_trained_by_one_module() -> None:
    table = speedtorch.HostTable(5, 3).fill_(1)
    ids = torch.tensor([0, 1])
    first = speedtorch.Embedding.from_pretrained(table, freeze=False)
    sgd = torch.optim.SGD(first.parameters(), lr=1.0)
    first(ids).sum().backward()
    sgd.step()
    speedtorch.Embedding.from_pretrained(table)  # reads it only
    second = speedtorch.Embedding.from_pretrained(table, freeze=False)
    assert bool((second(ids) == 0).all())  # what the first one changed is there
    for use in (lambda: first(ids), first.flush, first.state_dict):
        with pytest.raises(RuntimeError, match="another module has claimed the rows of the same"):
            use()
    second = speedtorch.Embedding.from_pretrained(table, freeze=False)  # a cell that runs again
    second(ids)
    trained = torch.optim.SGD(second.parameters(), lr=1.0)
    second(ids).sum().backward()
    trained.step()
    del second, trained
    gc.collect()
    first.flush()
    assert first.state_dict()["weight"][:2].tolist() == [[-1.0] * 3] * 2
    assert bool((first(ids) == -1).all())


@pytest.mark.parametrize("is_first_trained", [True, False])
def test_a_module_created_frozen_trains_no_rows_of_another(is_first_trained: bool) -> None:
    table = speedtorch.HostTable(5, 3)
    made = [
        speedtorch.Embedding.from_pretrained(table, freeze=frozen)
        for frozen in (not is_first_trained, is_first_trained)
    ]
    made[is_first_trained].weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match="another module has claimed the rows of the same"):
        made[is_first_trained](torch.tensor([1]))


class FewArguments(speedtorch.Embedding):
    """A subclass with arguments of its own."""

    def __init__(self, vocabulary: list[str], **settings: Any) -> None:
        super().__init__(len(vocabulary), 4, padding_idx=0, **settings)


def test_a_subclass_with_arguments_of_its_own_tells_what_it_is() -> None:
    made = FewArguments(["the", "of"], max_norm=1.0)
    assert repr(made) == (
        "FewArguments(2, 4, padding_idx=0, max_norm=1.0, device=cpu, memory=auto)"
    )


@pytest.mark.parametrize("kind", [speedtorch.Embedding, speedtorch.EmbeddingBag])
def test_repr_names_the_requested_memory_until_it_is_allocated(kind: Any) -> None:
    module = kind(5, 2, memory="plain")
    auto = kind(5, 2)
    assert "device=cpu, memory=plain)" in repr(module)
    assert "device=cpu, memory=auto)" in repr(auto)
    table = auto.table
    assert f"device=cpu, memory={table.memory})" in repr(auto) and table.memory != "auto"
    table.close()
    assert "device=cpu, memory=closed)" in repr(auto)


def test_repr_names_the_device_of_lookups(device: str) -> None:
    made = speedtorch.Embedding(5, 2, device=device)
    assert f", device={made(torch.tensor([0], device=device)).device}, " in repr(made)
    assert ", device=cpu, " in repr(made.cpu())


class AsDocumented(speedtorch.Embedding):
    """A subclass with the documented arguments, and a setting that it keeps elsewhere."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Any = None,
        _freeze: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        memory: str = "auto",
    ) -> None:
        given = locals()
        names = inspect.signature(AsDocumented).parameters
        super().__init__(**{name: given[name] for name in names})

    @property
    def norm_type(self) -> float:  # type: ignore[override]
        return self.kept

    @norm_type.setter
    def norm_type(self, norm_type: float) -> None:
        self.kept = norm_type


class WithFreeze(torch.nn.Embedding):
    """One of torch's that has a method by the name of an argument of from_pretrained."""

    def freeze(self) -> None:
        self.weight.requires_grad_(False)


def test_a_subclass_with_the_documented_arguments_is_made_of_rows_that_exist() -> None:
    plain = WithFreeze(3, 4, norm_type=1.0)
    made = AsDocumented.from_module(plain)
    assert isinstance(made, AsDocumented) and made.kept == 1.0
    assert torch.equal(made.table["weight"], plain.weight.detach())


def test_a_transform_is_named_before_a_weight_that_it_replaces() -> None:
    embedding = speedtorch.Embedding(3, 4)

    def loss(weight: Tensor) -> Tensor:
        call = torch.func.functional_call(embedding, {"weight": weight}, torch.tensor([1]))
        return cast(Tensor, call.sum())

    with pytest.raises(NotImplementedError, match="torch.func's transforms"):
        torch.func.grad(loss)(torch.zeros(3, 4))


def test_from_module_has_torchs_first_values_and_changes_none_of_later_layers() -> None:
    torch.manual_seed(0)
    plain, plain_layer = nn.Embedding(10, 4), nn.Linear(4, 1)
    torch.manual_seed(0)
    embedding, layer = speedtorch.Embedding.from_module(nn.Embedding(10, 4)), nn.Linear(4, 1)
    assert_same_content(embedding.weight.detach().cpu(), plain.weight.detach())
    assert_same_content(layer.state_dict(), plain_layer.state_dict())

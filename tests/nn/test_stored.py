"""Tables of 16 bits, of which steps hold float32: the same numbers wherever a row goes."""

from __future__ import annotations

import copy
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import NEEDS_GPU
from loops import CAPACITY, JOINING, LOOPS, ROWS, TORCH, Training, Way, assert_same_numbers
from optimizer_cases import CASES
from probed_optimizers import Own
from reference import assert_same_bytes, assert_same_content
from small_training import KINDS, SmallTraining
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.ops.functions import round_rows

BF16, F16 = torch.bfloat16, torch.float16
ALL = {"weight": BF16, "exp_avg": BF16, "exp_avg_sq": F16}
WAYS = {
    "prefetch": Way(ahead=True),
    "capacity": Way(capacity=CAPACITY),
    "capacity-prefetch": Way(ahead=True, capacity=CAPACITY),
    "cache": Way(cache="1KiB"),
    "cache-prefetch": Way(cache="600B", ahead=True),
    "cache-capacity": Way(cache="600B", capacity=CAPACITY),
}
GRID = [(name, way) for name in LOOPS for way in WAYS]
GRID += [(name, way) for name in JOINING for way in WAYS if "capacity" not in way]


class Stored(Training):
    """A Training whose table has 16 bits; torch's rounds all rows after each step."""

    def __init__(self, way: Way, *given: Any, stored: Any = BF16, **settings: Any) -> None:
        rounding = settings.pop("rounding", "stochastic")
        if not way.by_torch:
            settings |= {"stored": stored, "rounding": rounding}
        super().__init__(way, *given, **settings)
        if not way.by_torch:
            self.emb.rounding_state.copy_(torch.tensor([7, 0]))
            return
        weight = self.emb.weight.detach()
        weight.copy_(weight.to(stored))
        key = torch.tensor([7, 0], device=weight.device)
        ids = torch.arange(ROWS, device=weight.device)
        bits, is_random = [8 if stored == BF16 else 5], rounding == "stochastic"

        def after_step(*_: object) -> None:
            round_rows([weight], ids, key, bits, is_random)

        self.optimizer.register_step_post_hook(after_step)

    def result(self) -> dict[str, Tensor]:
        return {name: value.float() for name, value in super().result().items()}


def assert_same(loop: str, ways: tuple[Way, Way], *given: Any, **settings: Any) -> None:
    """Both ways train to the same rows and see the same on the way."""
    train = {**LOOPS, **JOINING}[loop]
    assert_same_numbers(train, ways, *given, kind=Stored, **settings)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("stored", [BF16, F16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("loop", ["one_lookup_a_step", "several_lookups_a_step"])
def test_rows_are_those_of_torchs_embedding_rounded_after_every_step(
    loop: str, rounding: str, stored: torch.dtype, device: str
) -> None:
    settings = {"stored": stored, "rounding": rounding}
    assert_same(loop, (Way(), TORCH), optim.SGD, device, **settings)


@pytest.mark.usefixtures("deterministic", "restless")
@pytest.mark.dealt("way")
@pytest.mark.parametrize(("loop", "way"), GRID)
def test_rows_and_state_are_those_of_the_plain_way(loop: str, way: str, device: str) -> None:
    assert_same(loop, (WAYS[way], Way()), optim.Adam, device, stored=ALL)


def trained(*given: Any, **settings: Any) -> SmallTraining:
    return SmallTraining(*given, **{"stored": BF16, **settings})


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_optimizer_trains_rows_of_16_bits(case: Any, device: str) -> None:
    plain = trained(case.make, device).fields()
    assert plain["weight"].dtype == BF16
    assert BF16 not in [value.dtype for name, value in plain.items() if name != "weight"]
    other = trained(case.make, device, cache="600B", capacity=20)
    assert_same_content(other.fields(), plain)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_module_trains_rows_of_16_bits(kind: str, device: str) -> None:
    plain = trained(device=device, kind=kind, stored=ALL)
    other = trained(device=device, kind=kind, stored=ALL, cache="2KiB", capacity=20)
    for training in (plain, other):
        training.train(12, 12, ahead=training is other)
    fields = plain.fields()
    assert all(value.dtype == ALL[name.split(".")[-1]] for name, value in fields.items())
    assert_same_content(other.fields(), fields)


def test_a_lookup_returns_float32_and_the_table_has_16_bits(device: str) -> None:
    training = trained(device=device, stored=ALL)
    embedding = training.module
    assert embedding.table.record_bytes == 3 * 4 * 2
    assert embedding(torch.tensor([3])).dtype == embedding.weight.dtype == torch.float32
    assert embedding.state_dict()["weight"].dtype == BF16
    state = training.optimizer.state_dict()["state"][0]
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (BF16, F16)
    with torch.no_grad():
        rows = embedding(torch.arange(50))
    assert torch.equal(rows.cpu(), embedding.table["weight"].float())


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBagCollection"])
def test_a_saved_training_goes_on_bit_for_bit(kind: str, tmp_path: Path) -> None:
    training, other = (trained(kind=kind, stored=ALL) for _ in range(2))
    torch.save(training.state(), tmp_path / "all.pt")
    other.train(5, 20)
    other.load(torch.load(tmp_path / "all.pt"))
    for each in (training, other):
        each.train(12, 12)
        counts = [int(v[1]) for n, v in each.state()[0].items() if n.endswith("rounding_state")]
        assert counts == [24] * (1 + (kind != "Embedding"))
    assert_same_content(other.fields(), training.fields())


class Fails(Own):
    fails = False

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if self.fails:
            raise ZeroDivisionError
        parameter -= group["lr"] * gradient


def test_a_step_that_raises_rounds_no_rows_without_a_gradient() -> None:
    both = nn.ModuleList([speedtorch.Embedding(4, 8, stored=BF16) for _ in range(2)])
    optimizer = Fails(both.parameters())
    speedtorch.attach(optimizer, both)
    for number in range(2):
        optimizer.zero_grad()
        torch.stack(
            [module(torch.arange(4)).sum() for module in both[: 2 - number]]
        ).sum().backward()
        optimizer.fails = number == 1
        with pytest.raises(ZeroDivisionError) if number else nullcontext():
            optimizer.step()
    both[1].flush()
    assert int(both[1].rounding_state[1]) == 1


def test_a_hook_that_raises_before_a_step_rounds_no_rows() -> None:
    embedding = speedtorch.Embedding(4, 8, stored=BF16)
    sgd = optim.SGD(embedding.parameters(), lr=0.1)
    speedtorch.attach(sgd, embedding)
    embedding(torch.arange(4)).sum().backward()
    handle = sgd.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sgd.step()
    handle.remove()
    embedding.flush()
    assert int(embedding.rounding_state[1]) == 0


def test_an_assigned_state_is_counted_on_in_the_same_buffer() -> None:
    training, other = trained(optim.SGD), trained(optim.SGD, steps=15)
    buffer = other.module.rounding_state
    other.module.load_state_dict(training.module.state_dict(), assign=True)
    assert other.module.rounding_state is buffer
    for each in (training, other):
        each.train(3, 12)
    assert buffer[1] == 15
    assert_same_content(other.fields(), training.fields())


def test_a_copy_trains_as_the_original_does() -> None:
    training = trained(optim.SGD)
    other = copy.copy(training)
    other.module = copy.deepcopy(training.module)
    other.optimizer = optim.SGD(other.module.parameters(), lr=0.1)
    for each in (training, other):
        each.train(12, 12)
    assert_same_content(other.fields(), training.fields())
    assert other.module.rounding_state is not training.module.rounding_state


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_float32_are_loaded_rounded_and_given_back(kind: str) -> None:
    plain, stored = (SmallTraining(kind=kind, stored=each).module for each in (None, BF16))
    rows, before = ({**copy.deepcopy(each.state_dict())} for each in (plain, stored))
    stored.load_state_dict(plain.state_dict())
    rounded = {name: value.to(BF16) for name, value in rows.items()}
    states = {name: value for name, value in before.items() if "rounding_state" in name}
    assert_same_content(dict(stored.state_dict()), {**before, **rounded})
    plain.load_state_dict(stored.state_dict())
    assert_same_content(dict(plain.state_dict()), {n: v.float() for n, v in rounded.items()})
    for name, value in states.items():
        wrong = {**stored.state_dict(), name: torch.zeros(3, dtype=torch.int64)}
        with pytest.raises(RuntimeError, match=f"size mismatch for {re.escape(name)}"):
            stored.load_state_dict(wrong)
        assert torch.equal(stored.state_dict()[name], value)


def test_a_table_and_a_file_of_16_bits_are_trained_in_float32(tmp_path: Path) -> None:
    trained(optim.SGD).module.table.save(path := tmp_path / "rows.safetensors")
    opened, again = (speedtorch.HostTable.open(path) for _ in range(2))
    embedding = speedtorch.Embedding(50, 4, _weight=opened, stored=BF16)
    assert embedding(torch.tensor([1])).dtype == torch.float32
    assert speedtorch.Embedding(50, 4, _weight=again).weight.dtype == BF16
    with pytest.raises(ValueError, match="a HostTable of torch.float16, got torch.bfloat16"):
        speedtorch.Embedding(50, 4, _weight=opened, stored=F16)


def test_written_rows_are_rounded_before_they_are_used(device: str) -> None:
    embedding = speedtorch.Embedding(50, 4, stored=BF16, device=device)
    ids = torch.arange(8, device=device)
    embedding(ids).sum().backward()
    embedding.weight.data -= 0.001 * embedding.weight.grad
    held = embedding(ids).detach().clone()
    assert torch.equal(held.to(BF16).float(), held)


def test_several_tables_are_exchanged_together_where_they_are_stored_alike(device: str) -> None:
    def train(*, ahead: bool) -> list[Tensor]:
        torch.manual_seed(0)
        kinds = ({"stored": BF16}, {"stored": BF16}, {}, {})
        model = nn.ModuleList(speedtorch.Embedding(50, 4, device=device, **k) for k in kinds)
        optimizer = optim.Adam(model.parameters(), lr=0.1)
        speedtorch.attach(optimizer, model)
        random = torch.Generator().manual_seed(1)
        batches = [[torch.randint(50, (12,), generator=random) for _ in kinds] for _ in range(8)]
        loop: Any = batches
        if ahead:
            loop = speedtorch.prefetch(
                batches, model, ids=lambda parts: dict(zip(model, parts, strict=True))
            )
        for parts in loop:
            optimizer.zero_grad()
            losses = [each(ids).square().sum() for each, ids in zip(model, parts, strict=True)]
            sum(losses).backward()  # type: ignore[union-attr]
            optimizer.step()
        return [each.table[name].clone() for each in model for name in each.table.fields]

    assert_same_content(train(ahead=True), train(ahead=False))


@pytest.mark.parametrize("cache", [None, "600B"])
def test_a_graphed_step_rounds_as_an_eager_one(cache: str | None, device: str) -> None:
    def adam(parameters: Any, lr: float) -> optim.Optimizer:
        on_gpu = device == "cuda"
        return optim.Adam(parameters, lr=lr, capturable=on_gpu, fused=on_gpu)

    eager, in_graph = (
        trained(adam, device, stored=ALL, steps=0, capacity=20, cache=cache) for _ in range(2)
    )
    for training, run in ((eager, eager.step), (in_graph, in_graph.graphed())):
        for number in range(12):
            run(training.batch(number))
    assert_same_content(in_graph.fields(), eager.fields())
    assert torch.equal(in_graph.module.rounding_state, eager.module.rounding_state)


def test_a_module_says_how_its_rows_are_stored() -> None:
    text = repr(speedtorch.Embedding(5, 2, stored=BF16, rounding="nearest"))
    assert "stored={'weight': torch.bfloat16}, rounding='nearest'" in text
    assert "stored" not in repr(speedtorch.Embedding(5, 2))
    assert [*speedtorch.Embedding(5, 2).state_dict()] == ["weight"]


def test_all_rows_are_read_searched_and_exported(tmp_path: Path) -> None:
    embedding = trained(stored=F16).module
    rows = embedding.table["weight"]
    assert torch.equal(torch.cat([block for _, block in embedding.blocks(rows=7)]), rows)
    assert embedding.numpy().dtype == "float16"
    _, found = speedtorch.nearest_neighbors(embedding, embedding(torch.tensor([4])).detach(), k=1)
    assert found.tolist() == [[4]]
    words = [f"w{number}" for number in range(50)]
    speedtorch.save_word2vec_format(embedding, tmp_path / "words.txt", words, binary=False)
    first = (tmp_path / "words.txt").read_text().splitlines()[1].split()
    assert torch.equal(torch.tensor([*map(float, first[1:])]).to(F16), rows[0])


class Doubles(Own):
    """Sums gradients in float64."""

    def move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "sum" not in state:
            state["sum"] = torch.zeros_like(parameter, dtype=torch.float64)
        parameter.sub_(state["sum"].add_(gradient), alpha=group["lr"])


def with_max_norm(grad: bool = True) -> object:
    embedding = speedtorch.Embedding(5, 2, stored=BF16)
    embedding.max_norm = 1.0
    with torch.set_grad_enabled(grad):
        return embedding(torch.tensor([1]))


def attached(make: Any, stored: Any) -> object:
    embedding = speedtorch.Embedding(5, 2, stored=stored)
    try:
        return speedtorch.attach(make(embedding.parameters()), embedding)
    finally:
        embedding(torch.tensor([1])).sum().backward()  # goes on as before


def bags_of_16_bits() -> object:
    config = speedtorch.EmbeddingBagConfig(10, 4, "user", data_type=F16)
    return speedtorch.EmbeddingBagCollection([config], stored=BF16)


def made(**settings: Any) -> Any:
    return lambda: speedtorch.Embedding(5, 2, **settings)


NOT_NOW, NOT_BOTH = "max_norm would change them", "max_norm and stored= cannot be combined"
NEAREST = "rounding: 'nearest' is for numbers of 16 bits. Pass stored="
DOUBLE = "stored: 'sum' is torch.float64 in a step, but only float32 can be stored as"
REFUSED: list[tuple[Any, str]] = [
    (made(stored=torch.float32), "expected torch.bfloat16 or torch.float16 for 'weight', got"),
    (made(stored={"weight": torch.int16}), "for 'weight', got torch.int16"),
    (made(stored=BF16, dtype=torch.float64), "rows are torch.float64 in a step"),
    (made(rounding="nearest"), NEAREST),
    (made(stored=BF16, rounding="up"), "expected 'stochastic' or 'nearest', got 'up'"),
    (made(max_norm=1.0, stored=BF16), NOT_BOTH),
    (with_max_norm, f"{NOT_NOW} at lookups"),
    (lambda: with_max_norm(False), NOT_NOW),
    (
        lambda: attached(optim.Adam, {"weight": BF16, "sum": BF16}),
        "no field 'sum'. The optimizer has exp_avg, exp_avg_sq",
    ),
    (lambda: attached(optim.Adam, {"step": BF16}), "no field 'step'"),
    (lambda: attached(Doubles, {"sum": BF16}), DOUBLE),
    (bags_of_16_bits, "stored: rows are torch.float16 in a step"),
    (lambda: SmallTraining(kind="EmbeddingBagCollection", rounding="nearest"), NEAREST),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_cannot_be_stored_is_refused(call: Any, message: str) -> None:
    error = NotImplementedError if "max_norm" in message else ValueError
    with pytest.raises(error, match=message):
        call()


@NEEDS_GPU
def test_a_module_that_moves_to_a_gpu_rounds_there() -> None:
    embedding = speedtorch.Embedding(50, 4, stored=BF16, device="cpu")
    optimizer = optim.SGD(embedding.parameters(), lr=0.01)
    for device in ("cpu", "cuda", "cpu"):
        embedding.to(device)
        embedding(torch.arange(8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert embedding.rounding_state.device.type == device
        held = embedding.trained_rows.parameter.detach()
        assert torch.equal(held.to(BF16).float(), held)
    assert embedding.rounding_state[1] == 3


def test_a_group_rounds_what_an_embedding_with_its_seed_does(device: str) -> None:
    config = speedtorch.EmbeddingBagConfig(20, 6, "wide")
    made = speedtorch.EmbeddingBagCollection([config], device=device, stored=BF16)
    assert "stored=" in repr(made) and "stored" in made.group_of("wide").settings
    rows = made.table_weight("wide").float()
    bag: Any = speedtorch.EmbeddingBag(
        20, 6, mode="sum", _weight=rows, device=device, dtype=torch.float32, stored=BF16
    )
    bag.rounding_state.copy_(made.group_of("wide").rounding_state)
    lookups: list[tuple[Any, Any]] = [(made, lambda ids: made({"wide": ids}).values()), (bag, bag)]
    for module, look_up in lookups:
        optimizer = optim.SGD(module.parameters(), lr=0.1)
        for number in range(5):
            random = torch.Generator().manual_seed(number)
            ids = torch.randint(20, (8, 2), generator=random).to(device)
            optimizer.zero_grad()
            (look_up(ids) ** 2).sum().backward()
            optimizer.step()
    assert_same_bytes(made.table_weight("wide").clone(), bag.state_dict()["weight"].clone())

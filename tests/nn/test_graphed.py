"""A whole step in one CUDA graph trains as the step itself does."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import NEEDS_GPU
from embedding_reference import first_weight, random_ids
from reference import assert_same_bytes, assert_same_content
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.optim import RowWiseAdagrad

pytestmark = NEEDS_GPU
ROWS, COLUMNS, IDS = 97, 8, 40
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "Adam, fused": lambda p: optim.Adam(p, lr=0.1, fused=True, capturable=True),
    "Adam, eps=0": lambda p: optim.Adam(p, lr=0.1, eps=0.0, capturable=True),
    "AdamW": lambda p: optim.AdamW(p, lr=0.1, weight_decay=0.2, capturable=True),
    "AdamW, amsgrad": lambda p: optim.AdamW(p, lr=0.1, amsgrad=True, fused=True, capturable=True),
    "NAdam": lambda p: optim.NAdam(p, lr=0.1, capturable=True),
    "RAdam": lambda p: optim.RAdam(p, lr=0.1, capturable=True),
    "Adamax": lambda p: optim.Adamax(p, lr=0.1, capturable=True),
    "Rprop": lambda p: optim.Rprop(p, lr=0.1, capturable=True),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True, capturable=True),
    "ASGD": lambda p: optim.ASGD(p, lr=0.1, capturable=True),
    "Adadelta": lambda p: optim.Adadelta(p, lr=0.1, capturable=True),
    "RowWiseAdagrad": lambda p: RowWiseAdagrad(p, lr=0.1, lr_decay=0.1, capturable=True),
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD, momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "SGD, fused": lambda p: optim.SGD(p, lr=torch.tensor(0.1, device="cuda"), fused=True),
}


class World:
    """A model with a table and a trained scale, and its training step."""

    def __init__(self, name: str = "Adam, fused", capacity: int | None = IDS, **given: Any) -> None:
        self.embedding = speedtorch.Embedding.from_pretrained(
            first_weight(ROWS, COLUMNS), freeze=False, device="cuda", capacity=capacity, **given
        )
        self.scale = nn.Parameter(torch.full((COLUMNS,), 0.5, device="cuda"))
        self.model = nn.ModuleList([self.embedding, nn.ParameterList([self.scale])])
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        self.keeps = name not in ("SGD", "SGD, fused")
        if self.keeps:
            speedtorch.attach(self.optimizer, self.embedding)

    def step(self, ids: Tensor, targets: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = (self.embedding(ids) * self.scale - targets).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def graphed(self, *, ahead: bool = False) -> Any:
        ids, targets = batches(1)[0]
        how = {"next_ids": ids} if ahead else {}
        return speedtorch.graphed(
            self.step, ids, targets, modules=self.model, optimizers=self.optimizer, **how
        )

    def everything(self) -> dict[str, Tensor]:
        table = self.embedding.table
        kept = {name: table[name].clone() for name in table.fields}
        state = self.optimizer.state
        for key, of in (("scale", state[self.scale]), ("rows", state[self.embedding.weight])):
            kept |= {
                f"{key} {name}": torch.as_tensor(value).clone()
                for name, value in of.items()
                if name not in table.fields or key == "scale"
            }
        return kept | {"scale": self.scale.detach().clone()}


def batches(count: int, overlap: float = 0.5, ids: int = IDS) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(7)
    given = random_ids(ROWS, count, overlap)
    return [
        (each.repeat(ids)[:ids].cuda(), torch.randn(ids, COLUMNS, generator=random).cuda())
        for each in given
    ]


def bad(ids: Tensor) -> Tensor:
    return torch.where(torch.arange(IDS, device="cuda") == 3, ROWS, ids)


GUESSES: dict[str, Callable[[int], Tensor] | None] = {
    "none": None,
    "right": lambda number: batches(201)[number][0],
    "wrong": lambda number: batches(201)[number - 1][0],
    "some right": lambda number: batches(201)[number - number % 3 // 2][0],
    "bad": lambda number: bad(batches(201)[number][0]),
}


def assert_same_worlds(one: World, other: World) -> None:
    assert_same_content(one.everything(), other.everything())


class Pair:
    """A world without a graph, and one whose steps are a graph.

    `guess` names what the graph is told of the next batch's ids at each call.
    """

    def __init__(self, name: str = "Adam, fused", guess: str = "none", capacity: int = IDS) -> None:
        self.plain, self.world = World(name, capacity=None), World(name, capacity)
        self.worlds = (self.plain, self.world)
        self._guess, self._calls = GUESSES[guess], 0
        self._graph = self.world.graphed(ahead=self._guess is not None)

    def step(self, *batch: Tensor) -> Tensor:
        self._calls += 1
        given = {} if self._guess is None else {"next_ids": self._guess(self._calls)}
        result: Tensor = self._graph(*batch, **given)
        return result

    def train(self, *batch: Tensor) -> None:
        expected = self.plain.step(*batch)
        assert_same_bytes(self.step(*batch), expected)

    def check(self) -> None:
        assert_same_worlds(self.world, self.plain)


@pytest.mark.parametrize("overlap", [0, 0.5, 1], ids=["apart", "half", "same"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_graph_trains_as_the_step_itself(name: str, overlap: float) -> None:
    pair = Pair(name)
    for batch in batches(200, overlap):
        pair.train(*batch)
    pair.check()


@pytest.mark.dealt("name")
@pytest.mark.parametrize("guess", [guess for guess in GUESSES if guess != "none"])
@pytest.mark.parametrize("name", ["Adam, fused", "AdamW", "SGD"])
def test_what_is_foreseen_changes_no_number(name: str, guess: str) -> None:
    pair = Pair(name, guess)
    for batch in batches(50):
        pair.train(*batch)
    pair.check()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_warm_up_and_capture_change_nothing(name: str) -> None:
    world, untouched = World(name), World(name)
    for each in (world, untouched):
        each.step(*batches(1)[0])
    torch.manual_seed(3)
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    graph = world.graphed()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(torch.cuda.get_rng_state(), before[1])
    assert_same_worlds(world, untouched)
    assert graph is not None


def test_random_numbers_of_a_step_go_on_where_they_were() -> None:
    world, plain = World(), World(capacity=None)

    def noisy(of: World) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda ids, targets: of.step(ids, targets + torch.randn_like(targets))

    (ids, targets), *rest = batches(10)
    torch.manual_seed(3)
    step = speedtorch.graphed(
        noisy(world), ids, targets, modules=world.model, optimizers=world.optimizer
    )
    for batch in rest:
        step(*batch)
    torch.cuda.synchronize()
    assert not torch.equal(world.embedding.table["weight"], plain.embedding.table["weight"])


@pytest.mark.parametrize("guess", GUESSES)
def test_what_stands_between_replays_is_right(guess: str) -> None:
    pair = Pair(guess=guess)
    plain, world = pair.worlds
    for number, (ids, targets) in enumerate(batches(60)):
        if number % 5 == 4:  # of another size
            ids, targets = ids[:17], targets[:17]
        plain.step(ids, targets)
        (world.step if number % 7 == 3 else pair.step)(ids, targets)
        if number % 6 == 1:
            world.embedding.flush()
        if number % 6 == 2:
            saved = world.model.state_dict()["0.weight"]
            assert_same_bytes(saved, plain.embedding.table["weight"])
        if number % 6 == 3:
            with torch.no_grad():
                assert_same_bytes(world.embedding(ids), plain.embedding(ids))
        if number % 6 == 4:
            for each in pair.worlds:
                each.embedding.table["weight"][3] = number
        if number % 6 == 5:
            world.optimizer.state_dict()
    pair.check()


@pytest.mark.parametrize("guess", GUESSES)
@pytest.mark.parametrize("fault", ["bad id", "too many"])
def test_a_fault_is_reported_and_the_loop_goes_on(fault: str, guess: str) -> None:
    pair = Pair(guess=guess, capacity=30)
    errors = 0
    for number, (ids, targets) in enumerate(batches(40)):
        if number in (11, 25):
            wrong = ids.clone()
            if fault == "bad id":
                wrong[4] = ROWS
            else:
                wrong = torch.arange(IDS, device="cuda")
            scale = pair.world.scale.detach().clone()
            pair.step(wrong, targets)
            torch.cuda.synchronize()
            assert torch.equal(scale, pair.world.scale)  # a fused optimizer has skipped it
            error = IndexError if fault == "bad id" else RuntimeError
            match = (
                "id 97 at position 4" if fault == "bad id" else "40 unique rows, but capacity=30"
            )
            with pytest.raises(error, match=match):
                pair.step(ids, targets)
            errors += 1
        pair.plain.step(ids, targets)
        pair.step(ids, targets)
    assert errors == 2
    pair.check()


def test_after_a_fault_nothing_moves_until_it_is_raised() -> None:
    world = World()
    step, given = world.graphed(), batches(8)
    step(*given[0])
    before = world.everything()
    graph = step._graph
    step._inputs[0].fill_(ROWS)
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        step._inputs[0].copy_(given[1][0])
    with pytest.raises(IndexError, match="and those of 2 later batches"):
        world.embedding.flush()
    after = world.everything()
    for name in world.embedding.table.fields:
        assert_same_bytes(after[name], before[name])


def test_an_exception_between_replays_loses_nothing() -> None:
    pair = Pair()
    for number, (ids, targets) in enumerate(batches(30)):
        if number % 9 == 5:
            looked_up = pair.world.embedding(ids)
            with pytest.raises(ZeroDivisionError):
                looked_up.sum() / (1 // 0)
            del looked_up
        pair.train(ids, targets)
    pair.check()


def test_what_would_move_the_rows_is_refused_while_a_graph_lives() -> None:
    world = World()
    step = world.graphed()
    step(*batches(1)[0])
    for refused, work in (
        ("detaching", lambda: speedtorch.detach(world.optimizer)),
        ("moving", lambda: world.embedding.cpu()),
        ("closing", world.embedding.table.close),
    ):
        with pytest.raises(RuntimeError, match=f"{refused}.*captured CUDA graph uses"):
            work()
    step(*batches(1)[0])
    del step  # whose work is not done
    speedtorch.detach(world.optimizer)
    before = world.embedding.table["weight"].clone()
    assert torch.equal(world.embedding.table["weight"], before)
    world.embedding.cpu()
    world.embedding.table.close()


def copied(state: Any) -> Any:
    """As a file would have it."""
    torch.save(state, file := io.BytesIO())
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def churn() -> None:
    """Writes to memory of the GPU that is free again."""
    for size in (4, 32, 128, 1024):
        [torch.full((size,), 3.0, device="cuda") for _ in range(100)]


@pytest.mark.parametrize("steps", [0, 3], ids=["before the first step", "later"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_that_is_loaded_is_the_graphs(name: str, steps: int) -> None:
    pair, trained = Pair(name), batches(12)
    for batch in trained[:steps]:
        pair.train(*batch)
    kept = [copied(each.optimizer.state_dict()) for each in pair.worlds]
    for batch in trained[steps:8]:
        pair.train(*batch)
    for each, state in zip(pair.worlds, kept, strict=True):
        each.optimizer.load_state_dict(state)
        churn()
    for number, batch in enumerate(trained):
        pair.plain.step(*batch)
        (pair.world.step if number % 5 == 3 else pair.step)(*batch)
        churn()
    pair.check()


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_learning_rate_in_a_tensor_may_change(is_replaced: bool) -> None:
    pair = Pair("SGD, fused")
    for number, batch in enumerate(batches(20)):
        for each in pair.worlds:
            group, rate = each.optimizer.param_groups[0], torch.tensor(0.1 / (1 + number))
            if not is_replaced:
                group["lr"].copy_(rate)
            elif number % 3 == 2:
                group["lr"] = rate.cuda()
        churn()
        pair.train(*batch)
    pair.check()


def test_a_state_that_does_not_fit_the_graph_is_refused() -> None:
    world = World()
    step, (batch, *_) = world.graphed(), batches(1)
    step(*batch)
    state = copied(world.optimizer.state_dict())
    state["state"][1]["exp_avg"] = torch.zeros(3)
    right = copied(world.optimizer.state_dict())
    world.optimizer.load_state_dict(state)
    before = world.everything()["scale"]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"'exp_avg' of Adam was .* \[8\] .* now \[3\]"):
            step(*batch)
    assert torch.equal(world.everything()["scale"], before)
    world.optimizer.load_state_dict(right)
    step(*batch)


def test_the_rest_of_an_earlier_step_is_reported() -> None:
    world = World()
    loss = (world.embedding(batches(1)[0][0]) * world.scale).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match=r"earlier step whose loss, .* Release these objects"):
        world.graphed()
    torch.cuda.MemPool()  # ends the process where torch's allocator is within the capture
    del loss
    plain = World(capacity=None)
    step = world.graphed()
    for batch in batches(3):
        plain.step(*batch)
        step(*batch)
    assert_same_worlds(world, plain)


def test_what_a_cycle_has_left_of_a_step_before_is_no_fault() -> None:
    world = World()
    cycle: list[Any] = [world.embedding(batches(1)[0][0]) * world.scale]
    cycle[0].sum().backward()
    cycle.append(cycle)
    del cycle
    world.graphed()


@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)], ids=["number", "tensor on the CPU"])
def test_a_number_that_changes_is_refused(rate: float | Tensor) -> None:
    world = World(name="Adam, fused")
    group = world.optimizer.param_groups[0]
    group["lr"] = rate
    step, (batch, *_) = world.graphed(), batches(2)
    step(*batch)
    for changed in (0.25, 0.5):
        if isinstance(rate, Tensor):
            rate.fill_(changed)
        else:
            group["lr"] = changed
        if changed == 0.25:
            with pytest.raises(
                RuntimeError, match=r"lr was .*0.5.*, is .*0.25.*\. Pass lr as a te"
            ):
                step(*batch)
    step(*batch)


@pytest.mark.parametrize("ahead", [False, True])
def test_optimizers_that_a_graph_cannot_repeat_are_refused_by_name(ahead: bool) -> None:
    embedding = speedtorch.Embedding(ROWS, COLUMNS, device="cuda", capacity=IDS)
    for make in (lambda p: optim.Adagrad(p), lambda p: optim.Adam(p)):
        optimizer = make(embedding.parameters())
        speedtorch.attach(optimizer, embedding)

        def step(ids: Tensor, optimizer: optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            embedding(ids).sum().backward()
            optimizer.step()

        ids = batches(1)[0][0]
        with pytest.raises((RuntimeError, AssertionError), match="capturable"):
            speedtorch.graphed(
                step, ids, modules=embedding, optimizers=optimizer, next_ids=ids if ahead else None
            )
        torch.cuda.synchronize()
        before = embedding.table["weight"].clone()
        step(ids)  # goes on without
        assert not torch.equal(embedding.table["weight"], before)
        speedtorch.detach(optimizer)


def test_a_module_without_a_capacity_is_refused() -> None:
    world = World(capacity=None)
    with pytest.raises(ValueError, match="graphed: Embedding has no capacity"):
        world.graphed()
    with pytest.raises(ValueError, match="graphed: modules have no speedtorch.Embedding"):
        speedtorch.graphed(world.step, modules=nn.Linear(2, 2), optimizers=world.optimizer)


def test_a_capture_by_torch_trains_as_well() -> None:
    plain, world = World(capacity=None), World()
    given = batches(30)
    ids, targets = (each.clone() for each in given[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for batch in given[:3]:
            world.step(*batch)
            plain.step(*batch)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        world.step(ids, targets)
    for batch in given[3:]:
        plain.step(*batch)
        for own, new in zip((ids, targets), batch, strict=True):
            own.copy_(new)
        graph.replay()
    assert_same_worlds(world, plain)


def test_a_capture_in_the_middle_of_a_step_is_refused() -> None:
    world = World()
    ids, targets = batches(1)[0]
    world.step(ids, targets)
    looked_up = world.embedding(ids)
    with (
        pytest.raises(RuntimeError, match="the capture of a CUDA graph must begin a new step"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        world.step(ids, targets)
    torch.cuda.synchronize()
    looked_up.sum().backward()
    world.optimizer.step()
    world.step(ids, targets)


def test_ids_of_a_next_batch_of_another_kind_are_errors() -> None:
    world = World()
    step, (ids, targets) = world.graphed(ahead=True), batches(1)[0]
    other = speedtorch.Embedding(3, 2)
    for next_ids, error, match in (
        ([1, 2], TypeError, "next_ids: expected an int32 or int64 tensor, got int"),
        ({other: ids}, ValueError, "next_ids: expected keys that are Embeddings of the model"),
    ):
        with pytest.raises(error, match=match):
            step(ids, targets, next_ids=next_ids)
    step(ids, targets, next_ids=ids[:3])  # of another shape: not foreseen
    step(*batches(2)[1], next_ids=ids)
    with pytest.raises(ValueError, match="next_ids: expected None, because graphed"):
        World().graphed()(ids, targets, next_ids=ids)


def trained_on_several(*, graphed: bool, offset: int) -> dict[str, Tensor]:
    """What two lookups in one module and one in a collection train; `offset` batches ahead."""
    torch.manual_seed(0)
    users = speedtorch.Embedding(ROWS, 4, device="cuda", capacity=2 * IDS)
    tables = speedtorch.EmbeddingCollection(
        [speedtorch.EmbeddingConfig(ROWS, 4, name) for name in "ab"], "cuda", capacity=2 * IDS
    )
    model = nn.ModuleList([users, tables])
    adam = optim.Adam(model.parameters(), fused=True, capturable=True)
    speedtorch.attach(adam, model)

    def features(ids: Tensor) -> dict[str, Tensor]:
        return {"a": ids, "b": ids.flip(0)}

    def train(ids: Tensor, more: Tensor) -> None:
        adam.zero_grad()
        users.announce(ids, more)
        a, b = tables(features(ids)).rows().chunk(2)
        (users(ids) * a + 2 * users(more) - b).square().sum().backward()
        adam.step()

    def next_ids(ids: Tensor, more: Tensor) -> dict[nn.Module, Any]:
        return {users: [ids, more], tables: features(ids)}

    given = [(ids, ids.roll(3)) for ids, _ in batches(40)]
    step: Any = train
    if graphed:
        step = speedtorch.graphed(
            train, *given[0], modules=model, optimizers=adam, next_ids=next_ids(*given[0])
        )
    for number, batch in enumerate(given):
        following = next_ids(*given[(number + offset) % len(given)])
        step(*batch, **({"next_ids": following} if graphed else {}))
    state: dict[str, Tensor] = model.state_dict()
    return state


@pytest.mark.parametrize("offset", [1, 5], ids=["right", "wrong"])
def test_several_modules_and_lookups_are_foreseen(offset: int) -> None:
    expected = trained_on_several(graphed=False, offset=offset)
    assert_same_content(trained_on_several(graphed=True, offset=offset), expected)


def test_collections_train_in_a_graph() -> None:
    config = speedtorch.EmbeddingBagConfig
    worlds = []
    for capacity in (None, 64):
        torch.manual_seed(0)
        tables = speedtorch.EmbeddingBagCollection(
            tables=[
                config(50, 8, "user"),
                config(70, 8, "item", feature_names=["seen", "bought"], pooling="mean"),
                config(30, 4, "shop"),
            ],
            device="cuda",
            capacity=capacity,
        )
        optimizer = optim.Adam(tables.parameters(), lr=0.1, fused=True, capturable=True)
        speedtorch.attach(optimizer, tables)
        worlds.append((tables, optimizer))

    def step_of(world: tuple[Any, optim.Optimizer]) -> Callable[[dict[str, Tensor]], Tensor]:
        def step(features: dict[str, Tensor]) -> Tensor:
            tables, optimizer = world
            optimizer.zero_grad()
            loss = tables(features).values().square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    random = torch.Generator().manual_seed(1)

    def features() -> dict[str, Tensor]:
        shapes = {"user": (50, 8), "seen": (70, 8, 3), "bought": (70, 8, 2), "shop": (30, 8)}
        return {
            name: torch.randint(rows, shape, generator=random).cuda()
            for name, (rows, *shape) in shapes.items()
        }

    plain = step_of(worlds[0])
    graph = speedtorch.graphed(
        step_of(worlds[1]), features(), modules=worlds[1][0], optimizers=worlds[1][1]
    )
    for _ in range(40):
        batch = features()
        expected = plain(batch)
        assert_same_bytes(graph(batch), expected)
    ours, theirs = (tables.state_dict() for tables, _ in worlds)
    assert_same_content(ours, theirs)


def test_a_compiled_step_trains_with_a_capacity() -> None:
    plain, world = World(capacity=None), World()
    step = torch.compile(world.step, mode="reduce-overhead")
    for batch in batches(8):
        plain.step(*batch)
        step(*batch)
    for name, value in plain.everything().items():
        torch.testing.assert_close(world.everything()[name], value)


def test_gradients_that_the_caller_sets_to_none_do_not_add_up() -> None:
    """zero_grad() is called outside of the captured step."""
    eager, world = World(), World()

    def without_zero_grad(ids: Tensor, targets: Tensor) -> None:
        (world.embedding(ids) * world.scale - targets).square().mean().backward()
        world.optimizer.step()

    first, *given = batches(8)
    modules = {"modules": world.model, "optimizers": world.optimizer}
    step = speedtorch.graphed(without_zero_grad, *first, **modules)
    for ids, targets in given:
        world.optimizer.zero_grad()
        step(ids, targets)
        eager.step(ids, targets)
    assert_same_worlds(world, eager)


def test_a_capture_that_fails_in_its_preparation_stops_no_table() -> None:
    """The second module has a fault that no call has raised."""
    first, second = World(capacity=30), World(capacity=30)
    ids, targets = batches(1)[0]
    first.step(ids, targets)
    second.step(torch.arange(IDS, device="cuda"), targets)
    torch.cuda.synchronize()
    modules = [first.model, second.model]
    optimizers = [first.optimizer, second.optimizer]
    with pytest.raises(RuntimeError, match="40 unique rows, but capacity=30"):
        speedtorch.graphed(lambda: None, modules=modules, optimizers=optimizers)
    before = first.embedding.table["weight"].clone()
    first.step(ids, targets)
    first.embedding.flush()
    assert not torch.equal(first.embedding.table["weight"], before)


def test_a_step_that_reads_a_number_is_explained() -> None:
    world, (ids, targets) = World(), batches(1)[0]
    world.step(ids, targets)
    before = world.everything()
    with pytest.raises(RuntimeError, match="the step makes the host wait for the GPU"):
        speedtorch.graphed(
            lambda ids, targets: world.step(ids, targets).item(),
            ids,
            targets,
            modules=world.model,
            optimizers=world.optimizer,
        )
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert_same_content(world.everything(), before)
    world.step(ids, targets)


def test_batches_on_the_cpu_train_whether_or_not_they_are_like_the_example() -> None:
    pair = Pair()
    for number, (ids, targets) in enumerate(batches(12)):
        if number % 3 == 2:
            ids, targets = ids[:17], targets[:17]
        assert_same_bytes(pair.step(ids.cpu(), targets.cpu()), pair.plain.step(ids, targets))
    pair.check()


def test_ids_that_were_announced_before_a_replay_do_not_join_a_later_step() -> None:
    pair = Pair()
    given = batches(4)
    pair.world.embedding.announce(given[2][0], given[3][0])
    for number, batch in enumerate(given):
        expected = pair.plain.step(*batch)
        step = pair.world.step if number == 2 else pair.step
        assert_same_bytes(step(*batch), expected)
    pair.check()


def test_many_batches_unlike_the_example_warn_once() -> None:
    world = World()
    step, (ids, targets) = world.graphed(), batches(1)[0]
    with pytest.warns(UserWarning, match="the last 10 batches were unlike the example") as found:
        for _ in range(25):
            assert not step(ids[:-1], targets[:-1]).requires_grad
    assert len(found) == 1


def test_ids_that_were_announced_before_a_capture_are_refused_in_it() -> None:
    world, (ids, targets) = World(), batches(1)[0]
    for _ in range(2):
        world.step(ids, targets)
    world.optimizer.zero_grad()
    world.embedding.flush()
    before = world.everything()
    world.embedding.announce(ids)
    message = "ids were announced or planned outside of the capture"
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match=message):
        world.embedding(ids)
    assert_same_content(world.everything(), before)
    world.step(ids, targets)

"""What a step of an Embedding is, where a loop is not the usual one."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from interrupts import in_step_of_torch
from reference import assert_same_bytes
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

import speedtorch

ROWS, WIDTH = 12, 4
IDS = torch.tensor([1, 2])


def pair(device: str = "cpu", **settings: object) -> tuple[nn.Embedding, speedtorch.Embedding]:
    torch.manual_seed(0)
    theirs = nn.Embedding(ROWS, WIDTH, **settings)  # type: ignore[arg-type]
    return theirs.to(device), speedtorch.Embedding.from_module(theirs, device=device)


def rows_of(module: speedtorch.Embedding | speedtorch.EmbeddingBag) -> Tensor:
    module.flush()
    return module.table["weight"].cpu()


def test_a_gradient_that_accumulates_stays_the_same_tensor() -> None:
    _, ours = pair()
    ours.announce(IDS)
    ours(IDS).sum().backward()
    gradient = ours.weight.grad
    (ours(IDS).sum() + 2 * ours(IDS).sum() + ours(IDS).sum()).backward()
    assert gradient is not None and ours.weight.grad is gradient
    expected = torch.zeros(ROWS, WIDTH)
    expected[IDS] = 5
    assert_same_bytes(gradient.to_dense(), expected)


def test_a_gradient_is_freed_after_its_step() -> None:
    _, ours = pair()
    sgd = optim.SGD(ours.parameters(), lr=0.1)
    ours(IDS).sum().backward()
    rows = ours.trained_rows.parameter
    gradients = [weakref.ref(each.grad) for each in (ours.weight, rows)]  # type: ignore[arg-type]
    sgd.step()
    sgd.zero_grad()
    assert [each() for each in gradients] == [None, None]


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_of_several_lookups_add_up_as_in_torch(sparse: bool) -> None:
    theirs, ours = pair(sparse=sparse)
    ids = torch.randint(ROWS, (5, 40), generator=torch.Generator().manual_seed(1))
    factors = torch.randn(5, 40, WIDTH, generator=torch.Generator().manual_seed(2))
    ours.announce(torch.arange(ROWS))
    for module in (theirs, ours):
        for _ in range(3):
            losses = [
                (module(part) * factor).sum() for part, factor in zip(ids, factors, strict=True)
            ]
            torch.stack(losses).sum().backward()
    assert theirs.weight.grad is not None and ours.weight.grad is not None
    expected, actual = theirs.weight.grad, ours.weight.grad
    if sparse:
        expected, actual = expected.coalesce().to_dense(), actual.coalesce().to_dense()
    assert_same_bytes(actual, expected)


def test_a_second_step_with_the_same_gradient_is_torchs() -> None:
    theirs, ours = pair()
    for module in (theirs, ours):
        first, second = (optim.SGD(module.parameters(), lr=rate) for rate in (0.1, 1.0))
        for ids in (IDS, IDS + 1):
            module(ids).square().sum().backward()
            first.step()
            first.step()
            second.step()
            first.zero_grad()
    assert_same_bytes(rows_of(ours), theirs.weight.detach())


def test_a_lookup_without_a_gradient_outlives_the_step_of_another_table() -> None:
    theirs, ours = pair()
    for module in (theirs, ours):
        other = module.__class__(ROWS, WIDTH)
        sgd = optim.SGD([*module.parameters(), *other.parameters()], lr=0.5)
        early = module(IDS)
        other(IDS).sum().backward()
        sgd.step()
        sgd.zero_grad()
        (early.square().sum() + module(IDS + 1).square().sum()).backward()
        sgd.step()
    assert_same_bytes(rows_of(ours), theirs.weight.detach())


def test_a_closure_sees_the_weight_as_the_table() -> None:
    _, ours = pair()
    sgd = optim.SGD(ours.parameters(), lr=0.5)
    seen = []

    def closure() -> float:
        (of_optimizer,) = sgd.param_groups[0]["params"]
        assert of_optimizer is ours.weight
        seen.append(tuple(of_optimizer.shape))
        loss = ours(IDS).sum()
        loss.backward()
        return loss.item()

    ours(IDS).sum().backward()
    sgd.step(closure)
    assert seen == [(ROWS, WIDTH)]


ADAMS = pytest.mark.parametrize("make", [optim.Adam, optim.SparseAdam])


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("capacity", [None, 3])
def test_zeros_of_a_zero_grad_after_a_step_that_failed_move_no_row(
    capacity: int | None, set_to_none: bool
) -> None:
    """The rows are still as the optimizer's own code has left them when zero_grad() comes."""
    ours = speedtorch.Embedding(ROWS, WIDTH, capacity=capacity)
    adam = optim.Adam(ours.parameters(), lr=0.1, weight_decay=0.5)
    speedtorch.attach(adam, ours)
    ours(IDS).sum().backward()
    adam.step()
    adam.zero_grad()
    before = rows_of(ours).clone()
    ours(IDS + 2).sum().backward()
    with in_step_of_torch(1) as lines:
        adam.step()
    assert lines.came_out
    adam.zero_grad(set_to_none=set_to_none)
    ours(IDS + 5)  # with a capacity these are none of a step that goes on
    adam.step()
    assert_same_bytes(rows_of(ours), before)


SOME_OR_ALL = pytest.mark.parametrize("rows", [[1, 2], list(range(ROWS))], ids=["some", "all"])


@SOME_OR_ALL
@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_gradient_that_is_set_after_a_zero_grad_is_stepped(
    set_to_none: bool, rows: list[int]
) -> None:
    _, ours = pair()
    sgd = optim.SGD(ours.parameters(), lr=1.0)
    before = rows_of(ours).clone()
    ours(torch.tensor([1, 2])).sum().backward()
    gradient = ours.weight.grad
    assert gradient is not None
    sgd.zero_grad(set_to_none=set_to_none)
    if len(rows) == ROWS:
        gradient.fill_(0.5)
    else:
        gradient[rows] = 0.5
    ours.weight.grad = gradient
    sgd.step()
    before[rows] -= 0.5
    assert_same_bytes(rows_of(ours), before)


def test_a_gradient_of_zeros_that_follows_a_zero_grad_is_stepped() -> None:
    theirs, ours = pair()
    optimizers = [optim.SGD(each.parameters(), lr=1.0, momentum=0.5) for each in (theirs, ours)]
    speedtorch.attach(optimizers[1], ours)
    for module, sgd in zip((theirs, ours), optimizers, strict=True):
        for factor in (1.0, 0.0):
            module(IDS).sum().backward()
            loss = factor * module(IDS).sum()
            sgd.zero_grad(set_to_none=False)
            loss.backward()
            sgd.step()
    assert_same_bytes(rows_of(ours)[IDS], theirs.weight.detach()[IDS])


@pytest.mark.parametrize("sparse", [False, True])
def test_zeros_in_a_former_gradient_leave_the_gradient_as_it_is(sparse: bool) -> None:
    theirs, ours = pair(sparse=sparse)
    for module in (theirs, ours):
        sgd = optim.SGD(module.parameters(), lr=1.0)
        module(IDS).sum().backward()
        former = module.weight.grad
        assert former is not None
        sgd.zero_grad()
        module(IDS + 2).sum().backward()
        former.zero_()
        module(IDS + 4).sum().backward()
        sgd.step()
    assert_same_bytes(rows_of(ours), theirs.weight.detach())


@pytest.mark.parametrize("sparse", [False, True])
def test_a_gradient_read_in_inference_mode_can_be_zeroed_and_stays_the_same_tensor(
    sparse: bool,
) -> None:
    _, ours = pair(sparse=sparse)
    sgd = optim.SGD(ours.parameters(), lr=1.0)
    before = rows_of(ours).clone()
    ours(IDS).sum().backward()
    with torch.inference_mode():
        gradient = ours.weight.grad
    sgd.zero_grad(set_to_none=False)
    assert gradient is not None and ours.weight.grad is gradient
    assert not gradient.to_dense().any()
    sgd.step()
    assert_same_bytes(rows_of(ours), before)


def test_rows_that_an_optimizer_puts_in_other_memory_are_changed_without_a_gradient_too() -> None:
    class Halves(optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            (held,) = self.param_groups[0]["params"]
            held.data = held.data * 0.5

    _, ours = pair()
    before = rows_of(ours).clone()
    ours(IDS)
    Halves(ours.parameters()).step()
    before[IDS] *= 0.5
    assert_same_bytes(rows_of(ours), before)


@pytest.mark.parametrize("given", [False, True], ids=["own", "given"])
def test_rows_of_a_step_outlive_an_attach(given: bool) -> None:
    _, ours = pair()
    if given:
        ours = speedtorch.Embedding.from_pretrained(ours.table, freeze=False)
    adam, sgd = optim.Adam(ours.parameters(), lr=0.1), optim.SGD(ours.parameters(), lr=1.0)
    before = rows_of(ours).clone()
    ours(IDS).sum().backward()
    sgd.step()
    speedtorch.attach(adam, ours)
    before[IDS] -= 1
    assert_same_bytes(ours(IDS), before[IDS])
    assert_same_bytes(rows_of(ours), before)


@SOME_OR_ALL
def test_what_is_written_to_the_zeros_of_a_zero_grad_is_stepped_and_zeros_are_not(
    device: str, rows: list[int]
) -> None:
    _, ours = pair(device)
    sgd = optim.SGD(ours.parameters(), lr=1.0, weight_decay=0.5)
    ours(torch.tensor([1, 2])).sum().backward()
    sgd.step()
    before = rows_of(ours).clone()
    sgd.zero_grad(set_to_none=False)
    assert ours.weight.grad is not None
    ours.weight.grad.mul_(2.0)  # as clipping does
    sgd.step()
    assert_same_bytes(rows_of(ours), before)
    ours.weight.grad = None
    ours(torch.tensor([1, 2])).sum().backward()
    sgd.zero_grad(set_to_none=False)
    if len(rows) == ROWS:
        ours.weight.grad.add_(0.5)
    else:
        ours.weight.grad[rows] += 0.5
    sgd.step()
    before[rows] -= 0.5 + 0.5 * before[rows]
    assert_same_bytes(rows_of(ours), before)


@pytest.mark.parametrize("padding", [None, 0])
def test_rows_that_an_optimizer_resizes_are_refused(padding: int | None) -> None:
    class Grows(optim.SGD):
        grows = False

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            (held,) = self.param_groups[0]["params"]
            held.sub_(held.grad)
            if self.grows:
                held.data = torch.cat([held.data[:1], held.data])

    ours = speedtorch.Embedding(ROWS, WIDTH, padding)
    sgd = Grows(ours.parameters())
    for sgd.grows in (False, True):
        ours(torch.tensor([1, 2])).sum().backward()
        sgd.step()
    with pytest.raises(RuntimeError, match=r"have shape \[\d, .*must not resize them"):
        ours.flush()


@pytest.mark.parametrize("capacity", [None, 3])
@pytest.mark.parametrize("way", ["zero_", "foreach", "zero_grad", "zeros_like"])
def test_zeros_in_the_place_of_a_gradient_before_its_step_are_stepped_with(
    way: str, capacity: int | None
) -> None:
    torch.manual_seed(0)
    theirs = nn.Embedding(ROWS, WIDTH)
    ours = speedtorch.Embedding.from_module(theirs, capacity=capacity)
    for module in (theirs, ours):
        adam = optim.Adam(module.parameters(), lr=0.1)
        if module is ours:
            speedtorch.attach(adam, ours)
        module(IDS).sum().backward()
        adam.step()
        adam.zero_grad()
        module(IDS).sum().backward()
        gradient = module.weight.grad
        assert gradient is not None
        if way == "zero_":
            gradient.zero_()
        elif way == "foreach":
            torch._foreach_zero_([gradient])
        elif way == "zero_grad":
            adam.zero_grad(set_to_none=False)
        else:
            module.weight.grad = torch.zeros_like(module.weight)
        adam.step()
        assert module.weight.grad is not None
        assert not module.weight.grad.any()
        (state,) = adam.state_dict()["state"].values()
        assert state["step"] == 2
    assert_same_bytes(rows_of(ours), theirs.weight.detach())


@ADAMS
def test_zeros_of_rows_that_wait_for_a_step_are_the_same_with_prefetch(
    make: type[optim.Optimizer],
) -> None:
    """A step left out, zeros for its gradient, and a batch that names no row of one table."""
    found = []
    for loop in (None, speedtorch.prefetch):
        sparse = make is optim.SparseAdam
        users, items = (speedtorch.Embedding(99, 2, sparse=sparse) for _ in range(2))
        model = nn.ModuleList([users, items])
        nn.init.ones_(items.weight)
        adam = make(model.parameters(), lr=0.1)  # type: ignore[call-arg]
        speedtorch.attach(adam, model)
        batches = [{users: IDS, items: IDS + number} for number in range(5)]
        turns = batches if loop is None else loop(batches, model, ids=lambda batch: batch)
        for number, batch in enumerate(turns):
            loss = users(batch[users]).sum()
            if number < 3:
                loss = loss + items(batch[items]).sum()
            adam.zero_grad(set_to_none=False)
            loss.backward()
            if number != 2:
                adam.step()
            adam.zero_grad(set_to_none=False)
        found.append(rows_of(items).clone())
    assert_same_bytes(*found)


def test_rows_that_evaluation_shortens_are_short_in_the_step_too(device: str) -> None:
    theirs, ours = pair(device, max_norm=0.5)
    first, both = IDS[:1].to(device), IDS.to(device)
    ours.announce(both)
    for module in (theirs, ours):
        sgd = optim.SGD(module.parameters(), lr=0.1)
        loss = module(first).sum()
        with torch.no_grad():
            module(both)
        loss.backward()
        sgd.step()
    expected = theirs.weight.detach().cpu()
    torch.testing.assert_close(rows_of(ours)[IDS], expected[IDS])
    assert rows_of(ours)[2].norm() <= 0.5 + 1e-6


def bags(**settings: object) -> tuple[nn.EmbeddingBag, speedtorch.EmbeddingBag]:
    torch.manual_seed(0)
    theirs = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", **settings)  # type: ignore[arg-type]
    return theirs, speedtorch.EmbeddingBag.from_module(theirs)


@pytest.mark.parametrize("settings", [{}, {"padding_idx": 0}], ids=str)
def test_factors_with_a_gradient_and_rows_that_join_later(settings: dict[str, int]) -> None:
    results = []
    for bag in bags(**settings):
        factors = torch.ones(1, 2, requires_grad=True)
        first = bag(IDS[None], None, factors).square().sum()
        (first + bag(torch.tensor([[3, 4]])).sum()).backward()
        results.append(factors.grad)
    assert_same_bytes(results[1], results[0])


@pytest.mark.parametrize("settings", [{}, {"padding_idx": 0}], ids=str)
def test_a_backward_after_the_step_is_refused_as_in_torch(settings: dict[str, int]) -> None:
    for bag in bags(**settings):
        sgd = optim.SGD(bag.parameters(), lr=1.0)
        factors = torch.ones(1, 2, requires_grad=True)
        loss = bag(IDS[None], None, factors).sum()
        loss.backward(retain_graph=True)
        sgd.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


REPEATED = r"checkpointing repeats a lookup.*announce\(\)"


@pytest.mark.parametrize("announces", [False, True])
@pytest.mark.parametrize("make", [speedtorch.Embedding, speedtorch.EmbeddingBag])
def test_a_checkpoint_finds_its_rows_again_or_is_refused(make: Any, announces: bool) -> None:
    theirs, ours = getattr(nn, make.__name__)(ROWS, WIDTH), make(ROWS, WIDTH)
    ours.load_state_dict(theirs.state_dict())
    lookups = torch.tensor([[8, 9]]), torch.tensor([[1, 2]])
    if announces:
        ours.announce(*lookups)
    for module in (theirs, ours):

        def look_up(ids: Tensor, module: Any = module) -> Tensor:
            return module(ids).square().sum()  # type: ignore[no-any-return]

        loss = sum(checkpoint(look_up, ids, use_reentrant=False) for ids in lookups)
        if module is ours and make is speedtorch.EmbeddingBag and not announces:
            with pytest.raises(RuntimeError, match=REPEATED):  # positions are saved
                loss.backward()
            return
        loss.backward()
    torch.testing.assert_close(ours.weight.grad.to_dense(), theirs.weight.grad)


def test_a_checkpoint_that_makes_its_ids_anew_is_refused_too(device: str) -> None:
    module = speedtorch.EmbeddingBag(ROWS, WIDTH, device=device)
    ids = torch.tensor([[8, 9]], device=device)
    total = torch.zeros((), device=device)
    for less in (0, 7):  # a GPU's tensors are known again only if they are the same
        total = total + checkpoint(
            lambda less=less: module(ids - less).square().sum(), use_reentrant=False
        )
    with pytest.raises(RuntimeError, match=REPEATED):
        total.backward()


@pytest.mark.parametrize("make", [speedtorch.Embedding, speedtorch.EmbeddingBag])
def test_a_checkpoint_of_the_last_lookup_is_none_that_is_refused(make: type) -> None:
    torch.manual_seed(0)
    module = make(ROWS, WIDTH)
    expected = getattr(nn, make.__name__)(ROWS, WIDTH)
    expected.load_state_dict(module.state_dict())
    for each in (module, expected):
        first = each(torch.tensor([[8, 9]])).square().sum()
        second = checkpoint(lambda ids, each=each: each(ids).sin(), IDS[None], use_reentrant=False)
        (first + second.sum()).backward()
    torch.testing.assert_close(module.weight.grad.to_dense(), expected.weight.grad)


def test_announcements_under_no_grad_train_nothing() -> None:
    _, ours = pair()
    sgd = optim.SGD(ours.parameters(), lr=0.1, weight_decay=1.0)
    before = rows_of(ours).clone()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            ours.announce(torch.arange(ROWS))
            ours(IDS)
    ours.announce()
    ours(IDS).sum().backward()
    sgd.step()
    changed = (rows_of(ours) != before).any(1)
    assert changed.nonzero().flatten().tolist() == [1, 2]


def test_training_after_evaluation_in_inference_mode(device: str) -> None:
    bag = speedtorch.EmbeddingBag(ROWS, WIDTH, mode="sum", device=device, padding_idx=0)
    with torch.inference_mode():
        bag(IDS[None])
    bag(IDS[None]).sum().backward()
    assert bag.weight.grad is not None


def test_one_made_in_inference_mode_trains() -> None:
    with torch.inference_mode():
        ours = speedtorch.Embedding(ROWS, WIDTH)
    before = rows_of(ours).clone()
    sgd = optim.SGD(ours.parameters(), lr=1.0)
    ours(IDS).sum().backward()
    sgd.step()
    assert_same_bytes(rows_of(ours)[IDS], before[IDS] - 1)


BAD_BAGS: list[tuple[tuple[Any, ...], type[Exception], str]] = [
    ((IDS, torch.tensor([1])), RuntimeError, "must begin with 0, .* The first is 1, the last is 1"),
    ((IDS, torch.tensor([0, 9])), RuntimeError, "within the 2 ids. .* the last is 9"),
    ((IDS, torch.tensor([0, 2, 1])), RuntimeError, "never decrease .* and 1 are less"),
    ((IDS,), ValueError, r"a 1-D input needs offsets \[bags\], got None"),
    ((IDS, [0]), TypeError, "offsets: expected .* got list"),
    ((IDS, torch.tensor([0.0, 1.5])), RuntimeError, "offsets: .* torch.float32"),
    ((IDS, torch.tensor([[0]])), ValueError, r"offsets must be \[bags\], got"),
    ((IDS[None], torch.tensor([0])), ValueError, "offsets must be None"),
    ((IDS[None, None],), ValueError, r"input must be \[ids\] or \[bags, ids\]"),
    ((IDS[None], None, torch.ones(3)), ValueError, r"input's shape \[1, 2\]"),
    ((IDS[None], None, torch.ones(1, 2).double()), RuntimeError, "torch.float32"),
    ((IDS[None], None, [1.0]), TypeError, "per_sample_weights: .* got list"),
    (([1, 2],), TypeError, "EmbeddingBag: expected an int32 or int64 tensor"),
    ((IDS.float(),), RuntimeError, "EmbeddingBag: expected a dense int32 or int64"),
]


@pytest.mark.parametrize(("given", "error", "message"), BAD_BAGS)
def test_a_bag_that_is_refused_moves_no_row(
    given: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    bag = speedtorch.EmbeddingBag.from_pretrained(torch.full((ROWS, WIDTH), 3.0), False, mode="sum")
    bag.max_norm = 1.0
    sgd = optim.SGD(bag.parameters(), lr=1.0)
    with pytest.raises(error, match=message):
        bag(*given)
    bag(torch.tensor([[0]])).sum().backward()
    with pytest.raises(error, match=message):
        bag(*given)
    sgd.step()
    assert bool((rows_of(bag)[1:] == 3.0).all())
    assert bool((rows_of(bag)[0] != 3.0).all())


@pytest.mark.parametrize("ids", [[1, 2], None, 1, torch.tensor([1.0]), torch.tensor([True])])
def test_ids_of_a_wrong_kind_are_told(ids: object) -> None:
    for freeze in (False, True):
        embedding = speedtorch.Embedding.from_pretrained(torch.eye(3), freeze)
        kind = RuntimeError if isinstance(ids, Tensor) else TypeError  # as torch
        with pytest.raises(kind, match="Embedding: expected a(n| dense) int32 or int64 tensor"):
            embedding(ids)
        with pytest.raises(TypeError, match="Embedding.announce: expected"):
            embedding.announce(ids)  # type: ignore[arg-type]


@pytest.mark.parametrize("attached", [False, True])
def test_a_step_that_fails_leaves_a_table_alone_that_nobody_has_looked_up(attached: bool) -> None:
    class Fails(optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise KeyboardInterrupt
            return super().step(closure)

    both = nn.ModuleList([speedtorch.Embedding(10, 4), speedtorch.Embedding(10, 4)])
    optimizer = Fails(both.parameters(), lr=0.1, momentum=0.9 * attached)
    if attached:
        speedtorch.attach(optimizer, both)
    before = copy.deepcopy(both).state_dict()["1.weight"]
    both[0](torch.tensor([1, 2])).sum().backward()
    optimizer.fails = True
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    optimizer.fails = False
    assert torch.equal(both[1](torch.tensor([3])), before[[3]])
    assert torch.equal(both.state_dict()["1.weight"], before)
    optimizer.step()
    assert torch.equal(both.state_dict()["1.weight"], before)


@ADAMS
@pytest.mark.parametrize("again", ["once", "again", "interrupted"])
@pytest.mark.parametrize("reads", [False, True])
def test_zeros_of_a_zero_grad_are_read_after_a_lookup_and_step_no_row(
    make: Any, reads: bool, again: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sparse = make is optim.SparseAdam
    embedding = speedtorch.Embedding(10, 3, device=device, sparse=sparse)
    adam = make(list(embedding.parameters()), lr=0.1)
    speedtorch.attach(adam, embedding)
    embedding(torch.tensor([1, 2])).sum().backward()
    adam.step()
    adam.zero_grad(set_to_none=False)
    before = embedding.numpy().copy()
    kept = embedding(torch.tensor([2, 7]))  # and no backward
    if reads:
        gradient = embedding.weight.grad
        assert gradient is not None and gradient.shape == (10, 3)
        assert not gradient.to_dense().any()
    if again == "again":
        adam.zero_grad(set_to_none=False)
    if again == "interrupted":

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Tensor, "zero_", interrupted)
            adam.zero_grad(set_to_none=False)
    adam.step()
    assert (embedding.numpy() == before).all()
    assert embedding.weight.grad is not None  # as in torch, until it is set
    adam.zero_grad()
    assert embedding.weight.grad is None
    del kept


@pytest.mark.parametrize("announces", [False, True])
def test_a_write_to_zeros_of_a_stepped_gradient_waits_for_the_next_step(
    announces: bool, device: str
) -> None:
    theirs, ours = pair(device)
    for module in (theirs, ours):
        sgd = optim.SGD(module.parameters(), lr=0.5)
        module(torch.tensor([1, 2], device=device)).sum().backward()
        sgd.step()
        sgd.zero_grad(set_to_none=False)
        assert module.weight.grad is not None
        module.weight.grad[2] = 3.0
        ids = torch.tensor([0], device=device)
        if announces and isinstance(module, speedtorch.Embedding):
            module.announce(ids)
        module(ids).sum().backward()
        sgd.step()
    assert_same_bytes(rows_of(ours), theirs.weight.detach().cpu())


def test_a_write_to_zeros_of_a_stepped_gradient_keeps_rows_that_were_assigned(device: str) -> None:
    theirs, ours = pair(device)
    for module in (theirs, ours):
        sgd = optim.SGD(module.parameters(), lr=0.5)
        module(torch.tensor([1, 2], device=device)).sum().backward()
        sgd.step()
        gradient = module.weight.grad
        assert gradient is not None
        sgd.zero_grad(set_to_none=False)
        sgd.step()
        with torch.no_grad():
            module.weight[1] = 2.0
        gradient.add_(1)
        sgd.step()
    assert_same_bytes(rows_of(ours), theirs.weight.detach().cpu())


def test_zeros_that_are_written_to_are_a_gradient(device: str) -> None:
    embedding = speedtorch.Embedding.from_pretrained(torch.ones(4, 2), freeze=False, device=device)
    sgd = optim.SGD(embedding.parameters(), lr=1.0)
    embedding(torch.tensor([1])).sum().backward()
    sgd.zero_grad(set_to_none=False)
    embedding(torch.tensor([3]))
    gradient = embedding.weight.grad
    assert gradient is not None
    with torch.no_grad():
        gradient[3] = 0.5
    sgd.step()
    assert embedding.numpy()[:, 0].tolist() == [1, 1, 1, 0.5]

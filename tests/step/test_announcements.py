"""Announced ids belong to one step: all of them are looked up there, or none leaves a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import NEEDS_GPU
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

import speedtorch
from speedtorch import EmbeddingBagCollection, EmbeddingBagConfig

ROWS = 20
LEFT_OUT = "was not looked up"


def ids(*rows: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64)


class Trained:
    """An embedding of ones whose rows all move in every step that holds them."""

    def __init__(self, device: str = "cpu", **settings: Any) -> None:
        ones = torch.ones(ROWS, 1)
        self.emb = speedtorch.Embedding(ROWS, 1, _weight=ones, device=device, **settings)
        self.sgd = optim.SGD(self.emb.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)
        speedtorch.attach(self.sgd, self.emb)

    def learn(self, *parts: Tensor) -> None:
        torch.stack([self.emb(part).sum() for part in parts]).sum().backward()
        self.sgd.step()
        self.sgd.zero_grad()

    def moved(self) -> list[int]:
        rows = self.emb.state_dict()["weight"].cpu() != 1
        return rows.any(1).nonzero().flatten().tolist()


@pytest.mark.parametrize("capacity", [None, 8])
@pytest.mark.parametrize("following", [None, 5])
@pytest.mark.parametrize("others", [[], [5]])
def test_an_empty_lookup_loads_no_batch_that_was_given_up(
    others: list[int], following: int | None, device: str, capacity: int | None
) -> None:
    trained = Trained(device, capacity=capacity)
    none = ids().to(device)
    trained.emb.announce(ids(1, 2).to(device), none)
    trained.sgd.zero_grad()
    if following is not None:
        trained.emb.announce(ids(following).to(device))
    trained.learn(none.clone(), *(ids(each).to(device) for each in others))
    assert trained.moved() == others


@pytest.mark.parametrize("capacity", [None, 8])
def test_empty_bags_have_no_gradient(device: str, capacity: int | None) -> None:
    config = EmbeddingBagConfig(ROWS, 1, "a")
    bags = EmbeddingBagCollection([config], capacity=capacity, device=device)
    sgd = optim.SGD(bags.parameters(), lr=1.0)
    before = bags.state_dict()["embedding_bags.a.weight"].cpu().clone()
    none = {"a": (ids().to(device), ids(0, 0).to(device))}
    named = {"a": (ids(1, 2).to(device), ids(0, 2).to(device))}
    bags.announce(named)
    (bags(none)["a"].sum() + bags(named)["a"].sum()).backward()
    sgd.step()
    changed = bags.state_dict()["embedding_bags.a.weight"].cpu() != before
    assert changed.any(1).nonzero().flatten().tolist() == [1, 2]


def test_ids_equal_to_those_of_a_batch_that_was_given_up_begin_a_new_step(device: str) -> None:
    trained = Trained(device)
    parts = ids(5).to(device), ids(0).to(device)
    trained.emb.announce(*parts)
    given_up = trained.emb(parts[0])
    trained.sgd.zero_grad()
    trained.learn(parts[1])
    assert given_up.requires_grad  # its graph is still there
    assert trained.moved() == [0]


# ------------------------------------------------------------------------------------------------
# What a step leaves out


@pytest.mark.parametrize("capacity", [None, 8])
@pytest.mark.parametrize("how", ["one call", "two calls", "prefetch", "within the step"])
def test_a_step_that_leaves_an_announced_tensor_out_raises(
    device: str, how: str, capacity: int | None
) -> None:
    if how == "within the step" and capacity is not None:
        pytest.skip("announced rows that join a step do not fit")
    if how == "within the step" and device == "cuda":
        pytest.skip("the lookup before may have named ids of a GPU, which are not compared")
    trained = Trained(device, capacity=capacity)
    one, two = ids(1, 2).to(device), ids(3, 4, 5).to(device)
    if how == "one call":
        trained.emb.announce(one, two)
    if how == "two calls":
        trained.emb.announce(one)
        trained.emb.announce(two)
    if how == "prefetch":
        loop = iter(speedtorch.prefetch([(one, two)], trained.emb, ids=lambda batch: batch))
        next(loop)
    loss = trained.emb(one).sum()
    if how == "within the step":
        trained.emb.announce(two)
    loss.backward()
    with pytest.raises(RuntimeError, match=rf"Embedding: .*of shape \[3\], {LEFT_OUT}"):
        trained.sgd.step()
    assert trained.moved() == []
    trained.sgd.zero_grad()
    trained.learn(ids(7))
    assert trained.moved() == [7]


def test_labels_that_are_taken_for_ids_are_an_error_that_says_what_to_write() -> None:
    trained = Trained()
    loader = [(ids(5, 6), ids(0, 1)), (ids(7, 8), ids(1, 1))]
    with pytest.raises(RuntimeError, match=r"number 1 .*ids=lambda batch: batch\[0\] if a load"):
        for batch, _ in speedtorch.prefetch(loader, trained.emb, ids=lambda batch: batch):
            trained.learn(batch)
    assert trained.moved() == []


def test_no_row_of_any_table_has_moved_then_and_the_missing_lookup_mends_it() -> None:
    first, second = Trained(), Trained()
    dense = nn.Parameter(torch.ones(1))
    sgd = optim.SGD([dense, first.emb.weight, second.emb.weight], lr=0.1)
    speedtorch.detach(first.sgd)
    speedtorch.detach(second.sgd)
    for each in (first, second):
        each.emb.announce(ids(1), ids(2))
    loss = first.emb(ids(1)).sum() + first.emb(ids(2)).sum() + second.emb(ids(1)).sum()
    (loss * dense).sum().backward()
    with pytest.raises(RuntimeError, match=LEFT_OUT):
        sgd.step()
    assert first.moved() == second.moved() == []
    assert dense.item() == 1
    second.emb(ids(2)).sum().backward()
    sgd.step()
    assert first.moved() == second.moved() == [1, 2]


@pytest.mark.parametrize("ahead", [False, True], ids=["announce", "prefetch"])
def test_a_module_of_which_nothing_was_looked_up_is_left_alone(ahead: bool) -> None:
    both = nn.ModuleList([Trained().emb, Trained().emb])
    first, second = both
    sgd = optim.SGD(both.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)
    speedtorch.attach(sgd, both)
    batches = [{first: ids(1), second: [ids(2), ids(3)]}, {first: ids(4), second: ids(5)}]
    for batch in speedtorch.prefetch(batches, both, ids=lambda b: b) if ahead else batches:
        if not ahead:
            for module, named in batch.items():
                module.announce(*(named if isinstance(named, list) else [named]))
        first(batch[first]).sum().backward()
        sgd.step()
        sgd.zero_grad()
    second(ids(6)).sum().backward()
    sgd.step()
    for module, moved in ((first, [1, 4]), (second, [6])):
        rows = (module.state_dict()["weight"] != 1).flatten().nonzero().flatten().tolist()
        assert rows == moved


def test_a_step_that_was_given_up_raises_nothing_for_the_lookups_that_it_lacks() -> None:
    trained = Trained(capacity=8)
    trained.emb.announce(ids(1, 2), ids(3, 4, 5))
    trained.emb(ids(1, 2)).sum().backward()
    trained.emb.trained_rows.exchange.memory.resume()  # after what a device found has been raised
    trained.sgd.step()


def test_a_step_without_a_gradient_of_the_rows_raises_nothing() -> None:
    trained, dense = Trained(), nn.Parameter(torch.ones(1))
    trained.sgd.add_param_group({"params": [dense]})
    trained.emb.announce(ids(1), ids(2))
    assert trained.emb(ids(1)).requires_grad
    dense.sum().backward()
    trained.sgd.step()
    assert trained.moved() == [] and dense.item() != 1


# ------------------------------------------------------------------------------------------------
# What a step does not leave out


Parts = tuple[Tensor, ...]
ANNOUNCED_AND_LOOKED_UP: dict[str, Callable[[Tensor, Tensor], list[tuple[Parts, Parts]]]] = {
    "again": lambda one, two: [((one, two, one), (one, two)), ((one, two), (one, one, two, one))],
    "other tensors": lambda one, two: [((one, two), (one.clone(), two.view(-1, 1)))],
    "slices": lambda one, two: [((one, two), (one[:1], one[1:], two))],
    "a concatenation": lambda one, two: [((one, two), (torch.cat([one, two]),))],
    "of a concatenation": lambda one, two: [((torch.cat([one, two]),), (one, two))],
    "no ids": lambda one, two: [((one, two[:0], two), (one, two))],
    "beside others": lambda one, two: [((one, two), (one, one[:0], two))],
}
"""What is announced and what is looked up in each step."""


@pytest.mark.parametrize("capacity", [None, 8])
@pytest.mark.parametrize(
    "steps", ANNOUNCED_AND_LOOKED_UP.values(), ids=ANNOUNCED_AND_LOOKED_UP.keys()
)
def test_lookups_of_all_announced_rows_are_trained(
    device: str, steps: Callable[..., list[tuple[Parts, Parts]]], capacity: int | None
) -> None:
    trained = Trained(device, capacity=capacity)
    for announced, looked_up in steps(ids(1, 2).to(device), ids(3, 4, 5).to(device)):
        trained.emb.announce(*announced)
        trained.learn(*looked_up)
    assert trained.moved() == [1, 2, 3, 4, 5]


def a_lookup_without_a_backward(trained: Trained, one: Tensor, two: Tensor) -> None:
    trained.emb.announce(one, two)
    unused = trained.emb(two)
    trained.learn(one)
    assert unused.requires_grad


def a_closure(trained: Trained, one: Tensor, two: Tensor) -> None:
    trained.emb.announce(one, two)
    first = trained.emb(one).sum()
    first.backward()

    def closure() -> Tensor:
        loss = trained.emb(two).sum()
        loss.backward()
        return loss

    trained.sgd.step(closure)
    trained.sgd.zero_grad()


def zero_grad_before_and_between(trained: Trained, one: Tensor, two: Tensor) -> None:
    trained.emb.announce(one, two)
    trained.sgd.zero_grad()
    first = trained.emb(one).sum()
    trained.sgd.zero_grad()
    (first + trained.emb(two).sum()).backward()
    trained.sgd.step()
    trained.sgd.zero_grad()


def zero_grad_before_no_ids(trained: Trained, one: Tensor, two: Tensor) -> None:
    trained.emb.announce(two[:0], one, two)
    trained.sgd.zero_grad()
    trained.learn(two[:0], one, two)


def zero_grad_between_two_calls(trained: Trained, one: Tensor, two: Tensor) -> None:
    trained.emb.announce(one)
    trained.sgd.zero_grad()
    trained.emb.announce(two)
    trained.learn(one, two)


def recomputed(trained: Trained, one: Tensor, two: Tensor) -> None:
    trained.emb.announce(one, two)
    rows = checkpoint(lambda part: trained.emb(part).square(), one, use_reentrant=False)
    (rows.sum() + trained.emb(two).sum()).backward()
    trained.sgd.step()
    trained.sgd.zero_grad()


def accumulated(trained: Trained, one: Tensor, two: Tensor) -> None:
    for part in (one, two):
        trained.emb.announce(part)
        trained.emb(part).sum().backward()
    trained.sgd.step()
    trained.sgd.zero_grad()


PROGRAMS: list[Callable[[Trained, Tensor, Tensor], None]] = [
    a_lookup_without_a_backward,
    a_closure,
    zero_grad_before_and_between,
    zero_grad_before_no_ids,
    zero_grad_between_two_calls,
    recomputed,
    accumulated,
]


@pytest.mark.parametrize("capacity", [None, 8])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_that_looks_up_what_it_announces_is_trained(
    device: str, program: Callable[..., None], capacity: int | None
) -> None:
    if capacity is not None and program is accumulated:
        pytest.skip("with a capacity all of a step is announced before")
    trained = Trained(device, capacity=capacity)
    program(trained, ids(1, 2).to(device), ids(3, 4, 5).to(device))
    assert trained.moved() == [1, 2, 3, 4, 5]


@NEEDS_GPU
@pytest.mark.parametrize("capacity", [None, 8])
def test_copies_on_the_gpu_of_what_was_announced_on_the_cpu_raise_nothing(
    capacity: int | None,
) -> None:
    trained = Trained("cuda", capacity=capacity)
    one, two = ids(1, 2), ids(3, 4)
    trained.emb.announce(one, two)
    trained.learn(one.cuda(), two.cuda())
    for batch in speedtorch.prefetch([(one, two)], trained.emb, ids=lambda batch: batch):
        if capacity is None:
            trained.learn(*(part.cuda() for part in batch))
    assert trained.moved() == [1, 2, 3, 4]


def test_batches_that_a_loop_has_not_given_yet_and_those_left_out_raise_nothing() -> None:
    trained = Trained()
    batches = [(ids(k), ids(k + 8)) for k in range(1, 7)]
    for k, batch in enumerate(speedtorch.prefetch(batches, trained.emb, ids=lambda b: b)):
        if k % 3 == 1:
            trained.learn(ids(18))
        elif k % 3 == 0:
            trained.learn(*batch)
    assert trained.moved() == [1, 4, 9, 12, 18]


def test_bags_with_offsets_and_features_of_no_ids_raise_nothing() -> None:
    bag = speedtorch.EmbeddingBag(ROWS, 2, mode="sum")
    tables = EmbeddingBagCollection([EmbeddingBagConfig(9, 2, "a"), EmbeddingBagConfig(9, 4, "b")])
    sgd = optim.SGD([*bag.parameters(), *tables.parameters()], lr=0.1)
    none = torch.zeros(3, dtype=torch.int64)
    for _ in range(2):
        features = {"a": (ids(1, 2), ids(0, 1, 2)), "b": (none[:0], none)}
        bag.announce(ids(1, 2, 3), ids(7))
        tables.announce(features, features)
        loss = bag(ids(1, 2, 3), ids(0, 1)).sum() + bag(ids(7), ids(0)).sum()
        for _ in range(2):
            loss = loss + tables(features)["a"].sum()
        loss.backward()
        sgd.step()
        sgd.zero_grad()


def test_the_first_lookup_brings_the_rows_of_all(device: str) -> None:
    trained = Trained(device)
    one, two, three = ids(1, 2).to(device), ids(3).to(device), ids(4, 5).to(device)
    for first, held in ((one, 5), (two, 3), (three, 2)):
        trained.emb.announce(one)
        trained.emb.announce(two)
        trained.sgd.zero_grad()
        trained.emb.announce(three)
        rows = trained.emb(first)
        assert len(trained.emb.step_ids) == held
        del rows
        trained.sgd.zero_grad()


# ------------------------------------------------------------------------------------------------
# What was given up


def announced(trained: Trained) -> Any:
    return trained.emb.announce(ids(1, 2), ids(3))


def refused(trained: Trained) -> None:
    announced(trained)
    with pytest.raises(IndexError):
        trained.emb.announce(ids(ROWS))


FAILURES: dict[str, Callable[[Trained], Any]] = {
    "announced": announced,
    "looked up": lambda t: (announced(t), t.emb(ids(1, 2))),
    "looked up all": lambda t: (announced(t), t.emb(ids(1, 2)), t.emb(ids(3))),
    "looked up alone": lambda t: t.emb(ids(1, 2)),
    "gone back": lambda t: (announced(t), t.emb(ids(1, 2)).sum().backward())[:0],
    "refused": refused,
}
"""Returns what the caller keeps of a batch that fails."""
WAYS: dict[str, Callable[[Trained, dict[str, Any]], object]] = {
    "zero_grad": lambda t, _: t.sgd.zero_grad(),
    "zeros": lambda t, _: t.sgd.zero_grad(set_to_none=False),
    "module": lambda t, _: t.emb.zero_grad(),
    "load_state_dict": lambda t, saved: (t.sgd.zero_grad(), t.emb.load_state_dict(saved["emb"])),
    "optimizer": lambda t, saved: (t.sgd.zero_grad(), t.sgd.load_state_dict(saved["sgd"])),
}


@pytest.mark.dealt("capacity")
@pytest.mark.parametrize("announces", [False, True], ids=["looked up", "announced"])
@pytest.mark.parametrize("capacity", [None, 4])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("failure", FAILURES)
def test_a_batch_that_was_given_up_leaves_nothing(
    failure: str, way: str, capacity: int | None, announces: bool
) -> None:
    trained = Trained(capacity=capacity)
    trained.learn(ids(9))
    saved = {"emb": trained.emb.state_dict(), "sgd": trained.sgd.state_dict()}
    saved["emb"]["weight"] = torch.ones(ROWS, 1)
    trained.emb.load_state_dict(saved["emb"])
    kept = FAILURES[failure](trained)
    WAYS[way](trained, saved)
    good = (ids(5, 6), ids(7, 8))
    if announces:
        trained.emb.announce(*good)
    trained.learn(*(good if announces else [torch.cat(good)]))
    trained.learn(ids(10))
    assert trained.moved() == [5, 6, 7, 8, 10]
    del kept


@pytest.mark.parametrize("make", [optim.Adam, optim.SparseAdam])
def test_zeros_of_a_gradient_give_up_the_batch_whatever_the_layout(
    make: type[optim.Optimizer],
) -> None:
    emb = speedtorch.Embedding(ROWS, 1, _weight=torch.ones(ROWS, 1), sparse=make is not optim.Adam)
    adam = make(emb.parameters(), lr=0.1)  # type: ignore[call-arg]
    speedtorch.attach(adam, emb)
    emb(torch.arange(ROWS)).sum().backward()
    adam.step()  # from now on a gradient of zeros moves a row
    adam.zero_grad()
    before = emb.state_dict()["weight"].clone()
    emb.announce(ids(1, 2), ids(3))
    emb(ids(1, 2)).sum().backward()
    adam.zero_grad(set_to_none=False)
    adam.step()
    assert torch.equal(emb.state_dict()["weight"], before)
    kept = emb(ids(4)).sum()
    emb(ids(5)).sum().backward()
    adam.zero_grad(set_to_none=False)
    emb.announce(ids(6, 7), ids(8))
    (emb(ids(6, 7)).sum() + emb(ids(8)).sum()).backward()
    adam.step()
    moved = (emb.state_dict()["weight"] != before).any(1)
    assert moved.nonzero().flatten().tolist() == [6, 7, 8]
    del kept


def test_zeros_of_announced_rows_are_stepped_if_an_earlier_lookup_had_equal_ids() -> None:
    trained = Trained()
    first, second = ids(1, 2), ids(3)
    loss = trained.emb(first).sum()
    trained.emb.announce(first, second)
    (loss + trained.emb(first).sum() + trained.emb(second).sum()).backward()
    trained.sgd.zero_grad(set_to_none=False)
    trained.sgd.step()
    assert trained.moved() == [1, 2, 3]  # by weight_decay


@pytest.mark.parametrize("capacity", [None, 4])
def test_an_announce_after_an_exception_gives_up_the_one_before_it(capacity: int | None) -> None:
    trained = Trained(capacity=capacity)
    trained.emb.announce(ids(1), ids(2))  # and the user's code raises
    trained.emb.announce(ids(5), ids(6))
    trained.learn(ids(5), ids(6))
    assert trained.moved() == [5, 6]


def test_an_announce_of_a_frozen_module_expects_no_lookup() -> None:
    trained = Trained()
    trained.emb.weight.requires_grad_(False)
    trained.emb.announce(ids(1), ids(2))
    trained.emb.weight.requires_grad_()
    trained.learn(ids(5))
    assert trained.moved() == [5]


def test_loading_a_state_dict_ends_what_was_announced() -> None:
    trained = Trained()
    state = trained.emb.state_dict()
    trained.emb.announce(ids(1), ids(2))
    trained.emb.load_state_dict(state)
    trained.learn(ids(1))
    assert trained.moved() == [1]


def test_a_batch_of_a_loop_that_was_left_half_looked_up_is_given_up_by_the_next() -> None:
    trained = Trained()
    batches = [(ids(1), ids(2)), (ids(3), ids(4)), (ids(5), ids(6))]
    rows: Any = None
    for number, (one, two) in enumerate(
        speedtorch.prefetch(batches, trained.emb, ids=lambda batch: batch)
    ):
        try:
            rows = trained.emb(one)  # keeps its graph until the next batch has its own
            if number == 1:
                raise MemoryError
            loss = rows.sum() + trained.emb(two).sum()
        except MemoryError:
            continue
        trained.sgd.zero_grad()
        loss.backward()
        trained.sgd.step()
    assert trained.moved() == [1, 2, 5, 6]


def test_a_backward_through_lookups_that_seemed_given_up_is_of_the_step() -> None:
    trained = Trained()
    early = trained.emb(ids(1, 2)).sum()
    trained.sgd.zero_grad()
    late = trained.emb(ids(3)).sum()
    (early * 2 + late).backward()
    assert trained.emb.weight.grad is not None
    assert trained.emb.weight.grad.flatten().tolist() == [0, 2, 2, 1, *[0] * (ROWS - 4)]
    trained.sgd.step()
    assert trained.moved() == [1, 2, 3]


@pytest.mark.parametrize("kind", ["sparse", "padding", "bag", "collection"])
def test_such_a_backward_gives_torchs_gradient(kind: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(ROWS, 4)
    settings: dict[str, Any] = {"sparse": kind == "sparse"}
    if kind == "padding":
        settings["padding_idx"] = 2
    cls = nn.EmbeddingBag if kind == "bag" else nn.Embedding
    theirs = cls.from_pretrained(weight.clone(), False, **settings)
    ours: Any = getattr(speedtorch, cls.__name__).from_pretrained(weight, False, **settings)
    if kind == "collection":
        config = speedtorch.EmbeddingConfig(ROWS, 4, "a")
        ours = speedtorch.EmbeddingCollection.from_pretrained([config], {"a": weight}, freeze=False)

    def look_up(module: Any, part: Tensor) -> Tensor:
        if isinstance(module, speedtorch.EmbeddingCollection):
            return module({"a": part})["a"].values()
        rows: Tensor = module(part[None] if kind == "bag" else part)
        return rows

    results = []
    for module in (theirs, ours):
        sgd = optim.SGD(module.parameters(), lr=0.5)
        first = look_up(module, ids(1, 2, 2))
        sgd.zero_grad()
        second = look_up(module, ids(2, 3))
        (first.square().sum() + second.square().sum()).backward()
        sgd.step()
        results.append(next(iter(module.state_dict().values())).clone())
    torch.testing.assert_close(results[1], results[0])


def test_a_backward_of_a_step_before_the_optimizers_is_refused_as_ever() -> None:
    trained = Trained()
    early = trained.emb(ids(1, 2)).sum()
    trained.sgd.zero_grad()
    trained.learn(ids(3))
    assert trained.emb(ids(4)).requires_grad
    with pytest.raises(RuntimeError, match="backward through a lookup of an earlier step"):
        early.backward()


# ------------------------------------------------------------------------------------------------
# Collections


def two_groups(capacity: int | None) -> tuple[EmbeddingBagCollection, optim.Optimizer]:
    tables = [EmbeddingBagConfig(ROWS, 4, "a"), EmbeddingBagConfig(ROWS, 8, "b")]
    made = EmbeddingBagCollection(tables, capacity=capacity)
    sgd = optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
    speedtorch.attach(sgd, made)
    return made, sgd


BAD = {
    "too many": ({"a": ids(1, 2, 1, 2, 1), "b": ids(0, 1, 2, 3, 4)}, RuntimeError, "capacity=4"),
    "out of range": ({"a": ids(1, 2), "b": ids(3, ROWS)}, IndexError, "feature 'b': id 20"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_refused_announce_of_a_collection_leaves_no_group_with_it(bad: str) -> None:
    def trained(*, refused: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        # With momentum a step moves rows without a gradient as well, if it takes them for its own.
        tables, optimizer = two_groups(capacity=4)
        for number, rows in enumerate(((1, 2), (7, 8))):
            if number and refused:
                features, error, message = BAD[bad]
                with pytest.raises(error, match=message):
                    tables.announce(features)
            good = {name: ids(*rows) for name in "ab"}
            tables.announce(good)
            sum(each.sum() for each in tables(good).to_dict().values()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: rows.clone() for name, rows in tables.state_dict().items()}

    expected = trained(refused=False)
    assert all(torch.equal(rows, expected[n]) for n, rows in trained(refused=True).items())


def test_a_group_that_is_left_out_is_named_by_its_tables() -> None:
    tables, sgd = two_groups(capacity=None)
    one, two = ({name: ids(k) for name in "ab"} for k in (1, 2))
    tables.announce(one, two)
    tables(one)["b"].sum().backward()
    with pytest.raises(RuntimeError, match=rf"table 'b': .*number 1 .*{LEFT_OUT}"):
        sgd.step()


# ------------------------------------------------------------------------------------------------
# CUDA graphs


@NEEDS_GPU
def test_a_graph_of_a_step_that_leaves_announced_ids_out_is_not_made() -> None:
    emb = speedtorch.Embedding(ROWS, 4, device="cuda", capacity=8)
    sgd = optim.SGD(emb.parameters(), lr=0.1)
    before = emb.state_dict()["weight"].clone()

    def train(one: Tensor, two: Tensor) -> None:
        sgd.zero_grad()
        emb.announce(one, two)
        emb(one).sum().backward()
        sgd.step()

    with pytest.raises(RuntimeError, match=LEFT_OUT):
        speedtorch.graphed(train, ids(1, 2), ids(3, 4), modules=emb, optimizers=sgd)
    assert torch.equal(emb.state_dict()["weight"], before)


def test_a_replay_gives_up_announced_ids(device: str) -> None:
    trained = Trained(device, capacity=8)
    trained.emb.announce(ids(1, 2).to(device), ids(3).to(device))
    trained.emb.trained_rows.exchange.memory.before_replay()
    trained.learn(ids(1, 2).to(device))  # with the batch of row 3, step() would raise
    assert trained.moved() == [1, 2]

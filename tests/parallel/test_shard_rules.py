"""Ranks make the same lookups with any tensors; mistakes raise errors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_backends import BACKENDS, on_ranks
from rank_processes import own_device
from sharded_training import ROWS, bags_module, made_collection, raises, rows_module, train_both
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.utils.checkpoint import checkpoint

import speedtorch
from speedtorch.nn.row_module import RowModule
from speedtorch.parallel.clip import clip_grad_norm_
from speedtorch.parallel.grad_scaler import GradScaler
from speedtorch.parallel.shard import shard
from speedtorch.table.row_shard import RowShard

NOTHING = torch.empty(0, dtype=torch.int64)
"""What the other ranks look up, again and again, where the first has ids."""


def of_first(*ids: int) -> Tensor:
    """Ids on the CPU, which a GPU is sent; in memory that it reaches where there is one."""
    found = torch.tensor(ids) if dist.get_rank() == 0 else NOTHING
    return found.pin_memory() if own_device().type == "cuda" and len(found) else found


def rows_of_ranks(**settings: Any) -> tuple[speedtorch.Embedding, speedtorch.Embedding]:
    """A module that is sharded, and one of one process."""
    module, whole = rows_module(**settings), rows_module(**settings)
    shard(module)
    return module, whole


def assert_found(module: RowModule, whole: RowModule, ids: Tensor) -> Tensor:
    found: Tensor = module(ids)
    assert torch.equal(found, whole(ids))
    return found


@on_ranks
@BACKENDS
def test_one_tensor_may_be_looked_up_several_times() -> None:
    """Announced together; and again in a step that announces nothing."""
    module, whole = rows_of_ranks()
    first, second = of_first(1, 2, 3), of_first(5, 6)
    module.announce(first, second)
    found = [assert_found(module, whole, ids) for ids in (first, second, first)]
    torch.cat(found).sum().backward()
    module.zero_grad()
    assert_found(module, whole, of_first(7, 8)).sum().backward()


@on_ranks
@BACKENDS
def test_one_tensor_may_be_looked_up_several_times_in_a_loop() -> None:
    """The other ranks have run out of batches, and evaluate nothing."""
    module, whole = rows_of_ranks()
    batches = [of_first(1, number) for number in range(5)]
    for batch in speedtorch.prefetch(batches, module, ids=lambda batch: [batch, batch]):
        with torch.no_grad():
            assert_found(module, whole, of_first(9, 8))
        found = [assert_found(module, whole, ids) for ids in (batch, batch, of_first(3))]
        torch.cat(found).sum().backward()
        module.zero_grad()


@on_ranks
def test_an_ambiguous_lookup_raises() -> None:
    """Ranks that give them one tensor cannot know which is which; all raise, and go on together."""
    module, whole = rows_of_ranks()
    first, second = of_first(1, 2, 3), of_first(5, 6)
    module.announce(first, second)
    message = r"ranks \[0\] are at lookup 1 of 'Embedding'.*, which was .*\[1\] are at lookup 0 of"
    raises(RuntimeError, message, lambda: module(second))
    assert_found(module, whole, second).sum().backward()


@on_ranks
@pytest.mark.parametrize("capacity", [None, 20])
@pytest.mark.parametrize("is_announced", [True, False])
def test_an_announcement_of_one_rank_only_raises_on_all(
    capacity: int | None, is_announced: bool
) -> None:
    """Not after the timeout of the exchange of rows; whatever the rank looks up then."""
    module, whole = rows_of_ranks(capacity=capacity)
    ids, others = torch.tensor([1, 2]), torch.tensor([5])

    def step() -> None:
        if dist.get_rank() == 0:
            module.announce(ids)
        module(ids if is_announced else others)

    message = r"ranks \[0\] are at .*announce.*\[1.*\] are at a new lookup of"
    raises(RuntimeError, message, step)
    assert_found(module, whole, ids).sum().backward()


@on_ranks
@BACKENDS
def test_ids_may_be_written_by_numpy() -> None:
    """What a tensor holds now is looked up, in a step that announces nothing and after announce."""
    module, whole = rows_of_ranks()
    values = torch.tensor([1, 2, 3]).numpy()
    ids = torch.from_numpy(values)
    module.announce(ids)
    assert_found(module, whole, ids).sum().backward()
    module.zero_grad()
    values[:] = [4, 5, 6]
    assert_found(module, whole, ids)
    module.announce(ids)
    values[:] = [7, 8, 9]
    assert_found(module, whole, ids)


def features(number: int) -> dict[str, Tensor]:
    """Of made_collection(); empty bags on the other ranks, in tensors of their own."""
    ids = torch.tensor([[number % 5], [number % 4]])
    if dist.get_rank():
        ids = ids[:, :0]
    return {name: ids.clone().to(own_device()) for name in "abc"}


@on_ranks
@BACKENDS
def test_features_of_equal_values_are_never_taken_for_each_other() -> None:
    model, whole = made_collection(), made_collection()
    shard(model)

    def assert_pooled(given: dict[str, Tensor]) -> Tensor:
        found = model(given).values()
        assert torch.equal(found, whole(given).values())
        return found

    first, second = features(1), features(3)
    model.announce(first, second)
    (assert_pooled(second).sum() + assert_pooled(first).sum()).backward()
    model.zero_grad()
    assert_pooled(features(2)).sum().backward()
    batches = [(features(number), features(number + 2)) for number in range(5)]
    if dist.get_rank():  # the same of each, once this rank has run out of them
        batches[2:] = [(batches[0][0], batches[0][0])] * 3
    for batch in speedtorch.prefetch(batches, model, ids=list):
        model.zero_grad()
        with torch.no_grad():
            for number in range(5):
                assert_pooled(batches[2][0] if dist.get_rank() else features(number))
        torch.cat([assert_pooled(given) for given in batch]).sum().backward()


@on_ranks
@BACKENDS
def test_a_bad_id_of_a_feature_on_one_rank_raises_on_all() -> None:
    """At a lookup and ahead; the next step works."""
    model = made_collection()
    shard(model)
    good, bad = ({name: torch.tensor([1, last]) for name in "abc"} for last in (2, 5))
    bad["a"] = bad["c"] = good["a"]
    if dist.get_rank() != 1:
        bad = good
    message = r"ids of ranks \[1\] are out of range"
    if dist.get_rank() == 1:
        message = "feature 'b': id 5 at position 1 is out of range for table 'b' of 5 rows"

    def loop() -> None:
        seen = 0
        try:
            for given in speedtorch.prefetch([good, bad, good], model, ids=lambda given: given):
                model(given).values().sum().backward()
                seen += 1
        finally:
            assert seen == 1

    for call in (lambda: model(bad), lambda: (model.announce(bad), model(bad)), loop):
        raises(IndexError, message, call)
        model(good).values().sum().backward()
        model.zero_grad()


@on_ranks
def test_ids_that_are_no_tensor_on_one_rank_raise_on_all() -> None:
    """The next step works."""
    ids, other = torch.tensor([1, 2]), r"ids of ranks \[1\] are out of range or not integers"
    first, floats = torch.tensor([0]), torch.tensor([])
    for capacity, trains in ((None, True), (None, False), (20, True), (20, False)):
        module, bags = rows_module(capacity=capacity), bags_module(capacity=capacity)
        shard(module)
        shard(bags)
        wrong = partial(module, floats), partial(bags, ids)  # and no offsets
        right = partial(module, ids), partial(bags, ids, first)
        errors = (RuntimeError, "expected a dense int32"), (ValueError, "offsets")
        for (kind, own), bad, good in zip(errors, wrong, right, strict=True):
            with torch.set_grad_enabled(trains):
                if dist.get_rank() == 1:
                    raises(kind, own, bad)
                else:
                    raises(IndexError, other, good)
                good()
        module.announce(ids, ids)
        module(ids).sum().backward()
        is_odd = dist.get_rank() == 1
        kind, message = (TypeError, "expected a dense int32") if is_odd else (IndexError, other)
        with pytest.raises(kind, match=message):
            module.announce(ids, floats if is_odd else ids)
        module.zero_grad()
        module(ids).sum().backward()


@on_ranks
def test_ids_of_a_loop_that_are_no_tensor_on_one_rank_raise_on_all() -> None:
    """The next loop works."""
    module, _ = rows_of_ranks()
    good = [torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([5]), torch.tensor([1])]

    def loop(batches: list[Tensor]) -> None:
        for ids in speedtorch.prefetch(batches, module, ids=lambda ids: ids):
            module(ids).sum().backward()
            module.zero_grad()

    for number in range(len(good)):
        batches = [*good]
        if dist.get_rank() == 1:
            batches[number] = torch.tensor([])
        raises(Exception, "expected a dense int32|ranks .* are at", partial(loop, batches))
        loop(good)
    bad = [*good[:2], torch.tensor([])]
    raises(TypeError, "expected a dense int32", lambda: loop(bad))
    loop(good)


@on_ranks
def test_features_that_are_no_ids_on_one_rank_raise_on_all() -> None:
    """At a lookup and where they are announced; the next step works."""
    tables = [speedtorch.EmbeddingBagConfig(ROWS, n, name) for n, name in enumerate("abc", 2)]
    good: dict[str, Tensor] = dict.fromkeys("abc", torch.tensor([[1], [2]]))
    bad = good | {"b": torch.tensor([[1.0], [2.0]])}
    for capacity in (None, 20):
        model = speedtorch.EmbeddingBagCollection(tables=tables, capacity=capacity)
        shard(model)
        for call in (model, lambda given: model.announce(given, given)):  # noqa: B023
            for trains in (True, False):
                with torch.set_grad_enabled(trains):
                    if dist.get_rank() == 1:
                        raises(Exception, "'b'|int32", partial(call, bad))
                    elif call is model or trains:
                        raises(IndexError, r"of ranks \[1\] are out of", partial(call, good))
                    model(good)
                model(good).values().sum().backward()
                model.zero_grad()


@on_ranks
def test_rows_of_ranks_are_not_resized() -> None:
    """The error names the way by full_state_dict()."""
    module, _ = rows_of_ranks()
    raises(NotImplementedError, "full_state_dict", lambda: module.resize(ROWS + 1))
    assert module.num_embeddings == ROWS == len(module.weight)


@on_ranks
def test_ranks_have_the_capacity_of_the_whole_table() -> None:
    module, whole = rows_of_ranks(capacity=9 * ROWS)
    assert module.capacity == whole.capacity == ROWS
    assert_found(module, whole, torch.arange(ROWS)).sum().backward()
    assert module.capacity == ROWS


@on_ranks
def test_torchs_norm_of_all_gradients_is_refused_and_its_scaling_is_not() -> None:
    for foreach in (None, False):
        module, _ = rows_of_ranks()
        module(torch.tensor([1, 2, 3])).square().sum().backward()
        norm_of = partial(nn.utils.get_total_norm, [module.weight.grad], foreach=foreach)
        raises(NotImplementedError, "needs the rows of all ranks", norm_of)
        before = module.trained_rows.own_gradient()
        assert before is not None
        halved = before.clone() * (1.0 / (2.0 + 1e-6))
        norm = torch.tensor(2.0, device=own_device())
        nn.utils.clip_grads_with_norm_(module.weight, 1.0, norm, foreach)
        assert torch.equal(module.trained_rows.own_gradient(), halved)


@on_ranks
@BACKENDS
def test_ranks_may_look_up_other_tensors_after_an_error() -> None:
    """What was planned before an error is asked anew."""
    wholes = [rows_module(), rows_module()]
    first, second = model = nn.ModuleList([rows_module(), rows_module()])
    shard(model)
    rank = dist.get_rank()
    good = torch.tensor([1, 2 + rank])
    bad = torch.tensor([1, ROWS]) if rank == 1 else good

    def looked_up(ids: Tensor, *, again: bool) -> None:
        """Again: by the same tensor on some ranks, and by another where a bad id was."""
        for module, whole in zip(model, wholes, strict=True):
            given = ids.clone() if again and rank == 1 else ids
            assert_found(module, whole, given).sum().backward()
        model.zero_grad()

    def announced() -> None:
        first.announce(good)
        second.announce(bad)
        second(bad)

    raises(IndexError, "out of range", announced)
    looked_up(good, again=True)
    batches = [(good, good), (good, bad), (good, good)]
    plans = speedtorch.prefetch(
        batches, model, ids=lambda batch: {first: batch[0], second: batch[1]}
    )
    seen = 0
    for ids, other_ids in plans:
        if seen == 1:
            raises(IndexError, "out of range", partial(second, other_ids))
        looked_up(ids, again=seen == 1)
        seen += 1
    assert seen == 3


@on_ranks
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
@BACKENDS
def test_gradients_of_gradients_are_refused() -> None:
    for module in (rows_module(), bags_module(), made_collection()):
        shard(module)
        ids = torch.tensor([[1, 2]])
        is_row_module = isinstance(module, RowModule)
        found = module(ids) if is_row_module else module(dict.fromkeys("abc", ids)).values()
        message = "an Embedding does not support gradients of gradients"
        with pytest.raises(NotImplementedError, match=message):
            found.square().sum().backward(create_graph=True)


@on_ranks
@BACKENDS
@pytest.mark.parametrize("reentrant", [False, True])
def test_lookups_may_be_computed_again_in_the_backward_pass(reentrant: bool) -> None:
    def train(module: RowModule, ranks: Sequence[int]) -> None:
        optimizer = optim.SGD(module.parameters(), lr=0.25)
        factor = torch.ones((), device=own_device(), requires_grad=True)

        def loss(factor: Tensor, ids: Tensor) -> Tensor:
            return module(ids).square().sum() * factor

        for _ in range(2):
            optimizer.zero_grad()
            batch = [torch.tensor([1, k, k + 2 * n]) for n in range(2) for k in ranks]
            module.announce(*batch)
            losses = [checkpoint(loss, factor, ids, use_reentrant=reentrant) for ids in batch]
            (torch.stack(losses).sum() / len(ranks)).backward()
            optimizer.step()

    module, whole = train_both(rows_module, train)
    with torch.no_grad():
        every = torch.arange(ROWS)
        torch.testing.assert_close(module(every), whole(every))


@on_ranks
def test_the_order_of_parameters_may_differ_among_ranks() -> None:
    model = nn.ModuleList(rows_module() for _ in range(6))
    for embedding in model:
        shard(embedding)
    parameters = list(model.parameters())
    if dist.get_rank() == 1:
        parameters.reverse()
    optimizer = optim.SGD(parameters, lr=0.0)
    scaler = GradScaler("cpu", init_scale=2.0)
    losses = [embedding(torch.tensor([1])).sum() for embedding in model]
    scaler.scale(torch.stack(losses).sum()).backward()
    scaler.unscale_(optimizer)
    torch.testing.assert_close(clip_grad_norm_(parameters, 1.0), torch.tensor(18.0).sqrt())


@on_ranks
@pytest.mark.parametrize("ranks", [3])
def test_groups_of_some_ranks_and_of_all_ranks_can_coexist() -> None:
    """The other ranks raise."""
    some = dist.new_group([0, 1])
    part, whole = rows_module(), rows_module()
    if dist.get_rank() < 2:
        with mock.patch.object(type(dist.group.WORLD), "bound_device_id", torch.device("cuda", 0)):
            message = "must contain all processes if .* has a device_id.* Omit device_id"
            raises(ValueError, message, lambda: shard(part, process_group=some))
        shard(part, process_group=some)
        assert_found(part, whole, torch.arange(ROWS))
    else:
        message = "this process is not in process_group"
        raises(ValueError, message, lambda: shard(part, process_group=some))
    other = dist.new_group([1, 2])  # of ranks that are in more groups and in fewer
    if dist.get_rank() > 0:
        again = rows_module()
        shard(again, process_group=other)
        assert_found(again, whole, torch.arange(ROWS))
    every = rows_module()
    shard(every)
    assert_found(every, whole, torch.arange(ROWS))


def test_sharding_without_a_process_group_is_an_error() -> None:
    module = speedtorch.Embedding(4, 2)
    with pytest.raises(RuntimeError, match=r"not initialised.*init_process_group\(\) first"):
        speedtorch.shard(module)
    assert module(torch.tensor([3])).shape == (1, 2)
    assert module.table["weight"].shape == (4, 2)


def test_a_shard_returns_its_blocks_and_no_others() -> None:
    rows = torch.arange(4.0).view(4, 1)
    shard = RowShard(10, rows, [(range(2, 3), range(1)), (range(6, 9), range(1, 4))])
    places = [MetadataIndex("w", [row, 0]) for row in (2, 6, 3)]
    assert torch.equal(shard.__get_tensor_shard__(places[0]), rows[:1])
    assert torch.equal(shard.__get_tensor_shard__(places[1]), rows[1:])
    with pytest.raises(ValueError, match="w: no block of this rank begins at row 3"):
        shard.__get_tensor_shard__(places[2])

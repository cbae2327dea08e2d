"""What ranks that share rows out may do differently, and what must be refused on all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from rank_processes import own_device
from sharded_training import ROWS, WIDTH, made_collection, raises
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

import speedtorch
from speedtorch.nn.row_module import RowModule
from speedtorch.parallel.clip import clip_grad_norm_
from speedtorch.parallel.grad_scaler import GradScaler
from speedtorch.parallel.shard import shard

NOTHING = torch.empty(0, dtype=torch.int64)
"""What the other ranks look up, again and again, where the first has ids."""


def rows_module(**settings: object) -> speedtorch.Embedding:
    torch.manual_seed(3)
    return speedtorch.Embedding(ROWS, WIDTH, **settings).to(own_device())  # type: ignore[arg-type]


def bags_module(**settings: object) -> speedtorch.EmbeddingBag:
    torch.manual_seed(3)
    return speedtorch.EmbeddingBag(ROWS, WIDTH, mode="sum", **settings).to(own_device())  # type: ignore[arg-type]


def of_first(*ids: int) -> Tensor:
    """Ids on the CPU, which a GPU is sent; in memory that it reaches where there is one."""
    found = torch.tensor(ids) if dist.get_rank() == 0 else NOTHING
    return found.pin_memory() if own_device().type == "cuda" and len(found) else found


def assert_found(module: RowModule, whole: RowModule, ids: Tensor) -> Tensor:
    found: Tensor = module(ids)
    assert torch.equal(found, whole(ids))
    return found


def check_one_tensor_for_several_lookups() -> None:
    """Announced together; and again in a step that announces nothing."""
    module, whole = rows_module(), rows_module()
    shard(module)
    first, second = of_first(1, 2, 3), of_first(5, 6)
    module.announce(first, second)
    found = [assert_found(module, whole, ids) for ids in (first, second, first)]
    torch.cat(found).sum().backward()
    module.zero_grad()
    assert_found(module, whole, of_first(7, 8)).sum().backward()


def check_one_tensor_in_a_loop() -> None:
    """The other ranks have run out of batches, and evaluate nothing."""
    module, whole = rows_module(), rows_module()
    shard(module)
    batches = [of_first(1, number) for number in range(5)]
    for batch in speedtorch.prefetch(batches, module, ids=lambda batch: [batch, batch]):
        with torch.no_grad():
            assert_found(module, whole, of_first(9, 8))
        found = [assert_found(module, whole, ids) for ids in (batch, batch, of_first(3))]
        torch.cat(found).sum().backward()
        module.zero_grad()


def check_lookups_in_another_order() -> None:
    """Ranks that give them one tensor cannot know which is which; all raise, and go on together."""
    module, whole = rows_module(), rows_module()
    shard(module)
    first, second = of_first(1, 2, 3), of_first(5, 6)
    module.announce(first, second)
    message = r"ranks \[0\] are at lookup 1 of 'Embedding'.*, which was .*\[1\] are at lookup 0 of"
    raises(RuntimeError, message, lambda: module(second))
    assert_found(module, whole, second).sum().backward()


def check_ids_written_by_numpy() -> None:
    """What a tensor holds now is looked up, in a step that announces nothing and after announce."""
    module, whole = rows_module(), rows_module()
    shard(module)
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


def check_equal_features() -> None:
    """Features of equal values are those of other lookups, as they are on other ranks."""
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


def check_bad_features() -> None:
    """A bad id on one rank raises on all of them, at a lookup and ahead; the next step works."""
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


def check_no_ids() -> None:
    """What is no tensor of ids on one rank raises on all of them; the next step works."""
    ids, message = torch.tensor([1, 2]), r"ids of ranks \[1\] are out of range or not integers"
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
                    raises(IndexError, message, good)
                good()
        module.announce(ids, ids)
        module(ids).sum().backward()
        if dist.get_rank() == 1:
            raises(TypeError, "expected a dense int32", lambda: module.announce(ids, floats))  # noqa: B023
        else:
            raises(IndexError, message, lambda: module.announce(ids, ids))  # noqa: B023
        module.zero_grad()
        module(ids).sum().backward()


def check_no_ids_in_a_loop() -> None:
    """What is no tensor of ids in a batch of one rank raises on all; the next loop works."""
    module = rows_module()
    shard(module)
    good = [torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([5]), torch.tensor([1])]

    def loop(batches: list[Tensor]) -> None:
        for ids in speedtorch.prefetch(batches, module, ids=lambda ids: ids):
            module(ids).sum().backward()
            module.zero_grad()

    for number in range(len(good)):
        batches = [*good]
        if dist.get_rank() == 1:
            batches[number] = torch.tensor([])
        raises(Exception, "expected a dense int32|ranks .* are at", lambda: loop(batches))  # noqa: B023
        loop(good)
    bad = [*good[:2], torch.tensor([])]
    raises(TypeError, "expected a dense int32", lambda: loop(bad))
    loop(good)


def check_no_ids_of_features() -> None:
    """What is no id of a feature on one rank raises on all, at a lookup and where it is announced.

    The next step works.
    """
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
                        raises(Exception, "'b'|int32", lambda: call(bad))  # noqa: B023
                    elif call is model or trains:
                        raises(IndexError, r"of ranks \[1\] are out of", lambda: call(good))  # noqa: B023
                    model(good)
                model(good).values().sum().backward()
                model.zero_grad()


def check_resize() -> None:
    """A table of ranks names the way by full_state_dict(); nothing has changed."""
    module = rows_module()
    shard(module)
    raises(NotImplementedError, "full_state_dict", lambda: module.resize(ROWS + 1))
    assert module.num_embeddings == ROWS == len(module.weight)


def check_capacity_above_the_rows() -> None:
    """The capacity is that of all rows of the table, not of a rank's share of them."""
    module, whole = rows_module(capacity=9 * ROWS), rows_module(capacity=9 * ROWS)
    shard(module)
    assert module.capacity == whole.capacity == ROWS
    assert_found(module, whole, torch.arange(ROWS)).sum().backward()
    assert module.capacity == ROWS


def check_norms_of_torch() -> None:
    """torch's norm of all gradients is refused; its scaling by a given norm is each rank's own."""
    for foreach in (None, False):
        module = rows_module()
        shard(module)
        module(torch.tensor([1, 2, 3])).square().sum().backward()
        norm_of = partial(nn.utils.get_total_norm, [module.weight.grad], foreach=foreach)
        raises(NotImplementedError, "needs the rows of all ranks", norm_of)
        before = module.trained_rows.own_gradient()
        assert before is not None
        halved = before.clone() * (1.0 / (2.0 + 1e-6))
        norm = torch.tensor(2.0, device=own_device())
        nn.utils.clip_grads_with_norm_(module.weight, 1.0, norm, foreach)
        assert torch.equal(module.trained_rows.own_gradient(), halved)


def check_other_tensors_after_an_error() -> None:
    """What was planned before an error is asked anew: some ranks may look up other tensors."""
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
            raises(IndexError, "out of range", lambda other_ids=other_ids: second(other_ids))  # type: ignore[misc]
        looked_up(ids, again=seen == 1)
        seen += 1
    assert seen == 3


def check_twice_differentiated() -> None:
    """A gradient that is to be differentiated itself is refused, on all ranks."""
    for module in (rows_module(), bags_module(), made_collection()):
        shard(module)
        ids = torch.tensor([[1, 2]])
        found = module(dict.fromkeys("abc", ids)).values() if len([*module.children()]) else None
        looked_up = module(ids) if found is None else found
        raises(
            NotImplementedError,
            "an Embedding does not support gradients of gradients",
            lambda looked_up=looked_up: looked_up.square().sum().backward(create_graph=True),  # type: ignore[misc]
        )


def check_sparse_padding() -> None:
    """Sparse gradients, of rows one of which is never trained."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    kinds: list[Callable[..., RowModule]] = [rows_module, bags_module]
    for kind in kinds:
        module, whole = (kind(sparse=True, padding_idx=5) for _ in range(2))
        shard(module)
        for training, of_ranks in ((module, [rank]), (whole, range(ranks))):
            optimizer = optim.SparseAdam(list(training.parameters()))
            speedtorch.attach(optimizer, training)
            for step in range(3):
                optimizer.zero_grad()
                ids = torch.tensor([[[1, 5], [step, 2 + k]] for k in of_ranks]).view(-1, 2)
                (training(ids).sum() / (ranks if training is whole else 1)).backward()
                optimizer.step()
        with torch.no_grad():
            assert_found(module, whole, torch.arange(ROWS).view(-1, 1))


def check_checkpointed() -> None:
    """Lookups that are computed again within the backward pass are those of all ranks, too."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for reentrant in (False, True):
        module, whole = rows_module(), rows_module()
        shard(module)
        for training, of_ranks in ((module, [rank]), (whole, range(ranks))):
            optimizer = optim.SGD(training.parameters(), lr=0.25)
            factor = torch.ones((), device=own_device(), requires_grad=True)

            def loss(factor: Tensor, ids: Tensor, training: RowModule = training) -> Tensor:
                return training(ids).square().sum() * factor

            for _ in range(2):
                optimizer.zero_grad()
                batch = [torch.tensor([1, k, k + 2 * n]) for n in range(2) for k in of_ranks]
                training.announce(*batch)
                losses = [checkpoint(loss, factor, ids, use_reentrant=reentrant) for ids in batch]
                (torch.stack(losses).sum() / (ranks if training is whole else 1)).backward()
                optimizer.step()
        with torch.no_grad():
            every = torch.arange(ROWS)
            torch.testing.assert_close(module(every), whole(every))


def check_any_order_of_parameters() -> None:
    """Whoever shares rows out with whom, ranks ask each other in one order."""
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


def check_groups() -> None:
    """Some ranks share rows out beside all of them; the others are told that they do not."""
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

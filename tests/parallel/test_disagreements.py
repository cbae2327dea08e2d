"""Differences among ranks raise on all ranks, before any row has changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_backends import on_ranks
from rank_processes import in_groups_at_once, own_device
from sharded_training import (
    ROWS,
    SOON,
    WIDTH,
    assert_own_rows,
    local_ids,
    of_machines,
    raised_late,
    raises,
    soon,
)
from sharded_training import bags_module as bags
from sharded_training import rows_module as made
from torch import Tensor, nn, optim
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_on
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import speedtorch
from speedtorch.nn.row_module import RowModule
from speedtorch.parallel.ranks import Ranks
from speedtorch.parallel.shard import shard


def tables(**settings: Any) -> nn.Module:
    config = speedtorch.EmbeddingBagConfig(5, 4, "a", **settings)
    return speedtorch.EmbeddingBagCollection(tables=[config], device=own_device())


def frozen() -> RowModule:
    return made().requires_grad_(False)


def used() -> RowModule:
    module = made()
    module(torch.tensor([1]))
    return module


def named(*names: str) -> nn.Module:
    return nn.ModuleDict({name: made() for name in names})


Make = Callable[[], nn.Module]
MODELS: dict[str, tuple[Make, Make, str]] = {
    "rows": (made, partial(made, ROWS + 1), "num_embeddings=42 on rank 1"),
    "columns": (
        made,
        lambda: speedtorch.Embedding(ROWS, 4),
        "embedding_dim=4 on rank 1, but embedding_dim=3 on rank 0",
    ),
    "dtype": (made, partial(made, dtype=torch.float64), "dtype=torch.float64 on rank 1, but"),
    "class": (made, bags, "'m' has class=EmbeddingBag.* on rank 1"),
    "max_norm": (partial(made, max_norm=1.0), made, "max_norm=None on rank 1, but max_norm=1"),
    "norm_type": (made, partial(made, norm_type=1.0), "norm_type=1.0 on rank 1, but norm_type=2"),
    "padding": (made, partial(made, padding_idx=3), "padding_idx=3.* padding_idx=None"),
    "capacity": (partial(made, capacity=4), partial(made, capacity=5), "capacity=5 on rank 1"),
    "sparse": (partial(made, sparse=True), made, "sparse=False on rank 1, but sparse=True"),
    "mode": (bags, partial(bags, mode="sum"), "mode=sum on rank 1, but mode=mean"),
    "pooling": (tables, partial(tables, pooling="mean"), r"table 'a'=\(5, \['a'\], 'mean'\)"),
    "frozen": (made, frozen, "requires_grad=False on rank 1, but weight.requires_grad=True"),
    "first values": (
        made,
        lambda: made().init_(nn.init.normal_, 0.0, 2.0),
        r"init_=\['values of digest .*'\] on rank 1, but",
    ),
    "names": (partial(named, "a"), partial(named, "b"), "has module 'm.b', but .* 'm.a'"),
    "order": (partial(named, *"ab"), partial(named, *"ba"), "has module 'm.b', but rank 0"),
    "fewer": (partial(named, *"ab"), partial(named, "a"), "no further module, but rank 0 has"),
    "more": (partial(named, "a"), partial(named, *"ab"), "rank 1 has module 'm.b', but .* no"),
}
REFUSED: dict[str, tuple[Make, type[Exception], str]] = {
    "no rows": (lambda: nn.Linear(2, 2), ValueError, "has no speedtorch.Embedding"),
    "used": (used, RuntimeError, "Embedding: its rows have been used"),
    "cached rows": (
        partial(made, cache="1KiB", cache_rows=torch.tensor([1])),
        ValueError,
        "Embedding: cache_rows cannot be used with sharded rows",
    ),
    "frequencies": (
        partial(made, scale_grad_by_freq=True),
        NotImplementedError,
        "Embedding: sharded rows do not support scale_grad_by_freq",
    ),
}


@on_ranks
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_setting_that_differs_is_named() -> None:
    """Nothing changes."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    for name, (of_rest, of_last, message) in MODELS.items():
        model = nn.ModuleDict({"first": made(), "m": of_last() if is_last else of_rest()})
        if dist.get_world_size() > 2:
            message = message.replace("rank 1", f"rank {dist.get_world_size() - 1}")
        with soon(name), pytest.raises(ValueError, match=f"shard: .*{message}"):
            shard(model)
        assert model["first"].table.rows == ROWS
    with soon("average"):
        message = "'Embedding' has average=True on rank .*, but average=False on rank 0"
        raises(ValueError, message, lambda: shard(made(), average=is_last))
    for name, (of_last, kind, message) in REFUSED.items():
        model = nn.ModuleDict({"first": made(), "m": of_last()} if is_last else {"first": made()})
        if name == "no rows" and is_last:
            model = of_last()
        if not is_last:
            message = f"rank {dist.get_world_size() - 1} raises {kind.__name__}: .*{message}"
        with soon(name), pytest.raises(kind if is_last else ValueError, match=message):
            shard(model)
        assert name == "no rows" or model["first"].table.rows == ROWS
    other = made().init_(nn.init.normal_, 0.0, 1.0)  # the same values by other words
    shard(other if is_last else made())


@on_ranks
def test_a_mesh_is_refused_with_the_remedy() -> None:
    mesh = init_device_mesh(own_device().type, (dist.get_world_size(),), mesh_dim_names=("rows",))
    message = r"got a DeviceMesh. Pass mesh.get_group\(\).*get_group\(name\).*'rows'"
    raises(TypeError, message, lambda: shard(made(), process_group=mesh))
    shard(made(), process_group=mesh.get_group())


class Wrapped(nn.Module):
    """Rows, and a parameter that DistributedDataParallel trains."""

    def __init__(self, *kinds: Make) -> None:
        super().__init__()
        self.rows = nn.ModuleList(kind() for kind in kinds)
        self.bias = nn.Parameter(torch.zeros(WIDTH, device=own_device()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.stack([module(ids) + self.bias for module in self.rows])


@on_ranks
@pytest.mark.parametrize("ranks", [4])
def test_replicas_of_shared_rows_are_refused_on_all_ranks() -> None:
    """Rows of some ranks in a model that more ranks train; others are not refused."""
    mesh = init_device_mesh(own_device().type, (2, 2), mesh_dim_names=("replicas", "rows"))
    for kind in (made, partial(bags, mode="sum")):
        model = Wrapped(kind)
        shard(model, process_group=mesh.get_group("rows"))
        wrapped = nn.parallel.DistributedDataParallel(model)
        message = (
            r"sharded among ranks \[(0, 1|2, 3)\], but DistributedDataParallel .* on ranks"
            r" \[(2, 3|0, 1)\].* with the same process_group"
        )
        ids = local_ids(1, 2).view(-1, 1)
        with soon("replicas"), pytest.raises(NotImplementedError, match=message):
            wrapped(ids)
        same = {"process_group": mesh.get_group("rows")}
        nn.parallel.DistributedDataParallel(model, **same)(ids).sum().backward()


@on_ranks
def test_join_is_refused_at_the_first_lookup() -> None:
    """Ranks would end at different times."""
    model = Wrapped(made)
    shard(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    message = r"join\(\). A rank .* empty batches"
    with wrapped.join(), soon("join"), pytest.raises(NotImplementedError, match=message):
        wrapped(local_ids(1))


@on_ranks
@pytest.mark.parametrize("ranks", [4])
def test_replicas_of_fully_shard_and_replicate_are_refused() -> None:
    """They may be applied to the model or to a part of it."""
    device = own_device().type
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("replicas", "rows"))
    every, rows = init_device_mesh(device, (4,)), mesh["rows"]
    message = r"ranks \[(0, 1|2, 3)\], but (fully_shard|replicate) .* on ranks \[(2, 3|0, 1)\]"
    for wrap, of in (fully_shard, mesh), (fully_shard, every), (replicate_on, every):
        for part in (lambda model: model, lambda model: model[1]):
            lookup = _wrapped_lookup(partial(_wrap, wrap, part, of), rows)
            with soon("replicas"), pytest.raises(NotImplementedError, match=message):
                lookup()
    _wrapped_lookup(partial(_wrap, fully_shard, lambda model: model, rows), rows)().sum().backward()


def _wrap(wrap: Any, part: Callable[[nn.Module], nn.Module], mesh: Any, model: nn.Module) -> None:
    inner, own = part(model), speedtorch.row_parameters(model)
    wrap(inner, mesh=mesh, ignored_params=own if inner is model else None)


def _wrapped_lookup(wrap: Callable[..., object], rows: DeviceMesh) -> Callable[[], Tensor]:
    """A lookup of a model with rows that ranks of a mesh share."""
    model = nn.Sequential(made(), nn.Linear(WIDTH, WIDTH))
    shard(model, process_group=rows.get_group())
    wrap(model)
    return lambda: model(local_ids(1, 2))


class Pair:
    """Two tables, their optimizer, and one process that trains what all ranks do."""

    def __init__(self, capacity: int | None = None) -> None:
        self.optimizers, self.models = [], []
        for own in (capacity, None):
            model = nn.ModuleDict({name: made(capacity=own) for name in "ab"})
            if not self.models:
                shard(model)
            self.models.append(model)
            self.optimizers.append(optim.Adam(model.parameters(), lr=0.25))
            speedtorch.attach(self.optimizers[-1], model)
        self.model, self.whole = self.models
        self.good_step(5)
        self.before = [module.table["weight"].clone() for module in self.model.values()]

    def good_step(self, seed: int) -> None:
        """The same lookups in the same order on all ranks; their numbers are those of one."""
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            optimizer.zero_grad()
            ids = local_ids(seed, seed + 20, 2)
            found = [module(ids) for module in model.values()]
            torch.cat(found).sum().backward()
            optimizer.step()
        assert_own_rows(self.model, self.whole)

    def check_raises(self, differ: Callable[[Pair], None], name: str, message: str) -> None:
        """Ranks that differ raise, no row has changed, and they go on."""
        time.sleep(0.1 * is_odd())  # the others wait for it
        with soon(name), pytest.raises(RuntimeError, match=message):
            differ(self)
        for module, before in zip(self.model.values(), self.before, strict=True):
            module.flush()
            assert torch.equal(module.table["weight"], before), name
        self.model.zero_grad()
        self.good_step(7)


def is_odd() -> bool:
    """Whether this rank does otherwise than the rest."""
    return dist.get_rank() == 1


def lookups_in_another_order(pair: Pair) -> None:
    for name in "ba" if is_odd() else "ab":
        pair.model[name](local_ids(1, 2))


def backwards_in_another_order(pair: Pair) -> None:
    losses = [pair.model[name](local_ids(1, 2)).sum() * k for k, name in enumerate("ab", 1)]
    for loss in reversed(losses) if is_odd() else losses:
        loss.backward()


def backwards_of_one_table_in_another_order(pair: Pair) -> None:
    pair.model["a"].announce(first := local_ids(1, 2), second := local_ids(3, 4))
    losses = [pair.model["a"](ids).sum() for ids in (first, second)]
    for loss in reversed(losses) if is_odd() else losses:
        loss.backward()


def a_backward_of_one_rank(pair: Pair) -> None:
    found = pair.model["a"](local_ids(1, 2))
    if not is_odd():
        found.sum().backward()
    pair.model["a"](local_ids(3, 4))


def a_backward_of_another_table(pair: Pair) -> None:
    found = {name: pair.model[name](local_ids(1, 2)) for name in "ab"}
    found["b" if is_odd() else "a"].sum().backward()


def a_skipped_batch(pair: Pair, skipped: int) -> None:
    """One rank leaves out the backward of a batch that was prefetched."""
    module = pair.model["a"]
    batches = [local_ids(k, 20 + k) for k in range(6)]
    for step, ids in enumerate(speedtorch.prefetch(batches, module, ids=lambda batch: batch)):
        module.zero_grad()
        found = module(ids)
        if not (is_odd() and step == skipped):
            found.sum().backward()


def announced_by_one_rank(pair: Pair) -> None:
    ids = local_ids(1, 2)
    if is_odd():
        pair.model["a"].announce(ids)
    pair.model["b"](ids)
    pair.model["a"](ids)


def another_tensor_than_announced(pair: Pair) -> None:
    pair.model["a"].announce(ids := local_ids(1, 2))
    pair.model["a"](ids.clone() if is_odd() else ids)


def evaluated_by_one_rank(pair: Pair) -> None:
    with torch.set_grad_enabled(not is_odd()):
        found = pair.model["a"](local_ids(1, 2))
    if found.requires_grad:
        found.sum().backward()
    pair.model["a"](local_ids(1, 2))


def saved_by_one_rank(pair: Pair) -> None:
    with speedtorch.full_state_dict(pair.model) if is_odd() else nullcontext():
        pair.model["a"](local_ids(1, 2))


def frozen_later_by_one_rank(pair: Pair) -> None:
    pair.model["a"].weight.requires_grad_(not is_odd())
    try:
        evaluated_by_one_rank(pair)
    finally:
        pair.model["a"].weight.requires_grad_(True)


NEW, OTHER, BACK, TOLD = (
    "a new lookup of '{}'",
    "a lookup of '{}'.* with other ids than announced",
    "the backward of lookup {} of '{}'",
    "lookup {} of '{}'.*, wh",
)
CALLS: dict[str, tuple[Callable[[Pair], None], str, str]] = {
    "lookups": (lookups_in_another_order, NEW.format("a"), NEW.format("b")),
    "backwards": (backwards_in_another_order, BACK.format(1, "a"), BACK.format(1, "b")),
    "of one": (backwards_of_one_table_in_another_order, BACK.format(1, "a"), BACK.format(2, "a")),
    "no backward": (a_backward_of_one_rank, BACK.format(1, "a"), NEW.format("a")),
    "of another": (a_backward_of_another_table, BACK.format(1, "a"), BACK.format(1, "b")),
    "no first batch": (partial(a_skipped_batch, skipped=0), BACK.format(1, "a"), ".* of 'a'"),
    "no batch": (partial(a_skipped_batch, skipped=2), BACK.format(3, "a"), ".* of 'a'"),
    "not the third last": (partial(a_skipped_batch, skipped=3), BACK.format(4, "a"), ".* of 'a'"),
    "not the last but one": (partial(a_skipped_batch, skipped=4), BACK.format(5, "a"), ".* of 'a'"),
    # Ranks with a GPU compare announced lookups when they look ids up.
    "announced": (announced_by_one_rank, NEW.format("[ab]"), ".*announce"),
    "another tensor": (another_tensor_than_announced, TOLD.format(1, "a"), OTHER.format("a")),
    "evaluated": (evaluated_by_one_rank, "(the backward|a new lookup).* of 'a'", NEW.format("a")),
    "saved": (saved_by_one_rank, NEW.format("a"), r"full_state_dict\(\) of 'a'"),
    "frozen": (frozen_later_by_one_rank, "(the backward|a new lookup).* of 'a'", NEW.format("a")),
}


# The ordinary run has each call that differs once, on one machine or between two, and some calls
# again with a capacity.
ALL, FIRST, SECOND, THIRD = slice(None), slice(0, None, 2), slice(1, None, 2), slice(2, None, 3)


@on_ranks
@pytest.mark.parametrize(
    ("ranks", "on_machine", "capacity", "part"),
    [
        pytest.param(2, True, None, FIRST, id="2-counted-half"),
        pytest.param(2, True, 41, THIRD, id="2-capacity-third"),
        pytest.param(2, False, None, SECOND, id="machines-counted-half"),
        *(
            pytest.param(ranks, on_machine, capacity, ALL, id=name, marks=pytest.mark.nightly)
            for ranks, on_machine, capacity, name in (
                (2, True, None, "2-counted"),
                (2, True, 41, "2-capacity"),
                (3, True, None, "3-counted"),
                (3, True, 41, "3-capacity"),
                (2, False, None, "machines-counted"),
                (2, False, 41, "machines-capacity"),
            )
        ),
    ],
)
def test_an_exchange_that_differs_is_named_before_a_row_changes(
    on_machine: bool, capacity: int | None, part: slice
) -> None:
    assert Ranks.of().has_barrier
    with of_machines(on_machine):
        for name, (differ, first, odd) in list(CALLS.items())[part]:
            message = rf"ranks \[0.*\] are at {first}.*, ranks \[1\] are at {odd}"
            Pair(capacity).check_raises(differ, name, message)


def a_backward_left_out(pair: Pair) -> None:
    losses = [pair.model[name](local_ids(1, 2)).sum() for name in "ab"]
    losses[0].backward()
    if not is_odd():
        losses[1].backward()
    pair.optimizers[0].step()


def a_step_left_out(pair: Pair) -> None:
    sum(pair.model[name](local_ids(1, 2)).sum() for name in "ab").backward()
    if not is_odd():
        pair.optimizers[0].step()
    pair.model["a"](local_ids(3))


def a_step_that_one_rank_refuses(pair: Pair) -> None:
    sum(pair.model[name](local_ids(1, 2)).sum() for name in "ab").backward()
    (group,) = pair.optimizers[0].param_groups
    group["amsgrad"] = is_odd()
    try:
        pair.optimizers[0].step()
    finally:
        group["amsgrad"] = False


STEP = r"optimizer.step\(\) of 'a'"
OWN = "keeps exp_avg, exp_avg_sq, max_exp_avg_sq of each row of Embedding with its current settings"
STEPS: dict[str, tuple[Callable[[Pair], None], str, str]] = {
    "no backward": (a_backward_left_out, BACK.format(1, "b"), STEP),
    "no step": (a_step_left_out, STEP, NEW.format("a")),
    "refused": (a_step_that_one_rank_refuses, STEP, f"an error in {STEP}"),
}


@on_ranks
@pytest.mark.parametrize(("ranks", "capacity"), [(2, None), (3, 41)])
def test_a_step_that_differs_is_named_before_a_row_changes(capacity: int | None) -> None:
    for name, (differ, first, odd) in STEPS.items():
        message = rf"ranks \[0.*\] are at {first}.*, ranks \[1\] are at {odd}"
        is_own = is_odd() and name == "refused"
        Pair(capacity).check_raises(differ, name, OWN if is_own else message)


@on_ranks
def test_a_batch_is_skipped_on_one_rank_or_on_all() -> None:
    pair, ids = Pair(), local_ids(1, 2)
    pair.model.zero_grad()
    pair.model["a"](ids).sum()  # and no backward on any rank
    pair.good_step(7)
    for optimizer in pair.optimizers:
        optimizer.zero_grad()
    pair.whole["a"](ids).sum().div(2).backward()
    loss = pair.model["a"](ids).sum()
    (loss * 0 if is_odd() else loss).backward()
    for optimizer in pair.optimizers:
        optimizer.step()
    assert_own_rows(pair.model, pair.whole)
    pair.good_step(8)


def own_error(pair: Pair, where: str, seconds: float) -> None:
    """A step in which rank 1 has an error of its own: before its lookup, after it or in backward.

    The others wait for it, which does something else meanwhile, in vain.
    """
    pair.model.zero_grad()
    try:
        if where == "before":
            raise_if(is_odd())
        loss = pair.model["a"](local_ids(1, 2)).sum()
        if where == "after":
            raise_if(is_odd())
        if where == "within":
            loss.register_hook(lambda _: raise_if(is_odd()))
        loss.backward()
    except ValueError:
        time.sleep(seconds)
    except RuntimeError as error:
        assert "an exchange with other ranks failed" in str(error)


def raise_if(fails: bool) -> None:
    if fails:
        raise ValueError("its own")


def check_own_errors(where: str, on_machine: bool, timeout: float) -> None:
    with of_machines(on_machine):
        pair = Pair()
        own_error(pair, where, 1.5 * timeout)
        step = partial(pair.good_step, 7)
        for _ in range(3):
            raises(RuntimeError, "with other ranks failed|are at", step)
        begin = time.monotonic()
        raises(RuntimeError, "restart from the last checkpoint", step)
        assert time.monotonic() - begin < SOON


@pytest.mark.parametrize(
    ("ranks", "on_machine"),
    [(2, True), (2, False), pytest.param(3, True, marks=pytest.mark.nightly)],
)
def test_an_error_of_one_rank_raises_on_the_waiting_ranks(ranks: int, on_machine: bool) -> None:
    """Before its lookup, after it or in backward; all raise after ranks have waited in vain."""
    timeout = 3.0  # also of the steps before, on a machine that other tests keep busy
    calls = [(where, on_machine, timeout) for where in ("before", "after", "within")]
    in_groups_at_once(ranks, check_own_errors, *calls, timeout=timeout)


@on_ranks
@pytest.mark.parametrize("where", ["before", "after", "behind"])
def test_an_all_reduced_error_of_one_rank_skips_a_batch(where: str) -> None:
    """Before its lookup, after it or after the backward.

    It is caught before another rank waits for it, as the docs say.
    """
    pair, ids = Pair(), local_ids(1, 2)
    pair.model.zero_grad()
    failed = torch.tensor(float(is_odd()))
    if where == "before" and is_odd():
        ids = ids[:0]
    loss = pair.model["a"](ids).sum()
    if where == "behind":
        loss.backward()
    dist.all_reduce(failed, dist.ReduceOp.MAX)
    assert failed
    pair.good_step(7)


@on_ranks
@pytest.mark.parametrize("flushes", [False, True])
def test_a_backward_that_differs_changes_no_row_if_errors_are_raised_late(flushes: bool) -> None:
    """Rows of a capacity that are stepped before the error is known are as before the step."""
    with raised_late(), of_machines(False):
        pair = Pair(ROWS)
        backwards_in_another_order(pair)
        pair.optimizers[0].step()
        message = "ranks .* at the backward of lookup 1 of .*, ranks .* at the backward of lookup 1"
        if flushes:
            raises(RuntimeError, message, pair.model["a"].flush)
        for module in pair.model.values():
            raises(RuntimeError, message, partial(module, local_ids(1)))
        for module, before in zip(pair.model.values(), pair.before, strict=True):
            module.flush()
            assert torch.equal(module.table["weight"], before)
        found = pair.model["a"](local_ids(1, 2))
        with torch.no_grad():
            assert torch.equal(found, pair.whole["a"](local_ids(1, 2)))

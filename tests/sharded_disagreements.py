"""What ranks that share rows out do differently by mistake, and what each of them is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from rank_processes import own_device
from sharded_capacity import raised_late
from sharded_training import ROWS, WIDTH, assert_own_rows, local_ids, raises
from torch import Tensor, nn, optim
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_on
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import speedtorch
from speedtorch.nn.row_module import RowModule
from speedtorch.parallel.ranks import Ranks
from speedtorch.parallel.shard import shard

SOON = 5.0  # seconds


@contextmanager
def soon(what: str) -> Iterator[None]:
    """On every rank what is within ends soon after the last rank has begun it.

    Ranks of one machine have the same clock.
    """
    begin = time.monotonic()
    yield
    every: list[tuple[float, float]] = [(begin, time.monotonic())] * dist.get_world_size()
    dist.all_gather_object(every, every[dist.get_rank()])
    last = max(begun for begun, _ in every)
    late = [rank for rank, (_, ended) in enumerate(every) if ended - last > SOON]
    assert not late, f"{what}: ranks {late}"


def made(**settings: object) -> speedtorch.Embedding:
    return speedtorch.Embedding(ROWS, WIDTH, **settings).to(own_device())  # type: ignore[arg-type]


def bags(**settings: object) -> speedtorch.EmbeddingBag:
    return speedtorch.EmbeddingBag(ROWS, WIDTH, **settings).to(own_device())  # type: ignore[arg-type]


def tables(**settings: object) -> nn.Module:
    config = speedtorch.EmbeddingBagConfig(5, 4, "a", **settings)  # type: ignore[arg-type]
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
    "rows": (
        made,
        lambda: speedtorch.Embedding(ROWS + 1, WIDTH),
        "num_embeddings=42 on rank 1",
    ),
    "columns": (
        made,
        lambda: speedtorch.Embedding(ROWS, 4),
        "embedding_dim=4 on rank 1, but embedding_dim=3 on rank 0",
    ),
    "dtype": (made, partial(made, dtype=torch.float64), "dtype=torch.float64 on rank 1, but"),
    "class": (made, bags, "'m' has class=EmbeddingBag.* on rank 1"),
    "max_norm": (
        partial(made, max_norm=1.0),
        made,
        "max_norm=None on rank 1, but max_norm=1",
    ),
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
    "names": (
        partial(named, "a"),
        partial(named, "b"),
        "has module 'm.b', but .* 'm.a'",
    ),
    "order": (
        partial(named, "a", "b"),
        partial(named, "b", "a"),
        "has module 'm.b', but rank 0",
    ),
    "fewer": (
        partial(named, "a", "b"),
        partial(named, "a"),
        "no further module, but rank 0 has",
    ),
    "more": (
        partial(named, "a"),
        partial(named, "a", "b"),
        "rank 1 has module 'm.b', but .* no",
    ),
}
REFUSED: dict[str, tuple[Make, type[Exception], str]] = {
    "no rows": (lambda: nn.Linear(2, 2), ValueError, "has no speedtorch.Embedding"),
    "used": (used, RuntimeError, "Embedding: its rows have been used"),
    "frequencies": (
        partial(made, scale_grad_by_freq=True),
        NotImplementedError,
        "Embedding: sharded rows do not support scale_grad_by_freq",
    ),
}


def check_other_models() -> None:
    """Every setting that differs raises on all ranks, which name it, and nothing changes."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    for name, (of_rest, of_last, message) in MODELS.items():
        model = nn.ModuleDict({"first": made(), "m": of_last() if is_last else of_rest()})
        if dist.get_world_size() > 2:
            message = message.replace("rank 1", f"rank {dist.get_world_size() - 1}")
        with soon(name):
            raises(ValueError, f"shard: .*{message}", lambda model=model: shard(model))  # type: ignore[misc]
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
        with soon(name):
            raises(kind if is_last else ValueError, message, lambda model=model: shard(model))  # type: ignore[misc]
    other = made().init_(nn.init.normal_, 0.0, 1.0)  # the same values by other words
    shard(other if is_last else made())


def check_meshes() -> None:
    """A mesh says how its group is got."""
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


def check_replicas() -> None:
    """Rows of some ranks in a model that more ranks train are refused on all; others are not."""
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
        with soon("replicas"):
            raises(NotImplementedError, message, partial(wrapped, ids))
        same = {"process_group": mesh.get_group("rows")}
        nn.parallel.DistributedDataParallel(model, **same)(ids).sum().backward()


def check_join() -> None:
    """Ranks that would end at different times are refused on all."""
    model = Wrapped(made)
    shard(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    with wrapped.join(), soon("join"):
        raises(
            NotImplementedError, r"join\(\). A rank .* empty batches", lambda: wrapped(local_ids(1))
        )


def check_replicas_of_meshes() -> None:
    """As check_replicas, of fully_shard and replicate, applied to the model or to a part of it."""
    device = own_device().type
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("replicas", "rows"))
    every, rows = init_device_mesh(device, (4,)), mesh["rows"]
    message = r"ranks \[(0, 1|2, 3)\], but (fully_shard|replicate) .* on ranks \[(2, 3|0, 1)\]"
    for wrap, of in (fully_shard, mesh), (fully_shard, every), (replicate_on, every):
        for part in (lambda model: model, lambda model: model[1]):
            lookup = _wrapped_lookup(partial(_wrap, wrap, part, of), rows)
            with soon("replicas"):
                raises(NotImplementedError, message, lookup)
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
        torch.manual_seed(3)
        self.model = nn.ModuleDict({name: made(capacity=capacity) for name in "ab"})
        torch.manual_seed(3)
        self.whole = nn.ModuleDict({name: made() for name in "ab"})
        shard(self.model)
        self.optimizers = [
            optim.Adam(model.parameters(), lr=0.25) for model in (self.model, self.whole)
        ]
        speedtorch.attach(self.optimizers[0], self.model)
        speedtorch.attach(self.optimizers[1], self.whole)
        self.good_step(5)
        self.before = [module.table["weight"].clone() for module in self.model.values()]

    def good_step(self, seed: int) -> None:
        """The same lookups in the same order on all ranks; their numbers are those of one."""
        for model, optimizer in zip((self.model, self.whole), self.optimizers, strict=True):
            optimizer.zero_grad()
            ids = local_ids(seed, seed + 20, 2)
            found = [module(ids) for module in model.values()]
            torch.cat(found).sum().backward()
            optimizer.step()
        self.assert_as_whole()

    def assert_as_whole(self) -> None:
        for ours, theirs in zip(self.model.values(), self.whole.values(), strict=True):
            assert_own_rows(ours, theirs)


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


OTHERS = r"ranks \[1\] are at {}"
NEW, BACK, TOLD = (
    "a new lookup of '{}' ",
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
    "announced": (announced_by_one_rank, NEW.format("b"), NEW.format("a")),
    "another tensor": (another_tensor_than_announced, TOLD.format(1, "a"), NEW.format("a")),
    "evaluated": (evaluated_by_one_rank, "(the backward|a new lookup).* of 'a'", NEW.format("a")),
    "saved": (saved_by_one_rank, NEW.format("a"), r"full_state_dict\(\) of 'a'"),
    "frozen": (frozen_later_by_one_rank, "(the backward|a new lookup).* of 'a'", NEW.format("a")),
}


def check_other_calls(capacity: int | None, part: slice) -> None:
    """Whatever one rank does otherwise raises on all, which name both; then they go on."""
    assert Ranks.of().has_barrier
    check_differing_calls(capacity, part)


def check_other_calls_on_machines(capacity: int | None, part: slice) -> None:
    """The same of ranks that share no memory."""
    with patch.object(Ranks.of(), "_barrier", None):
        check_differing_calls(capacity, part)


def check_differing_calls(capacity: int | None, part: slice) -> None:
    """Each of this part of CALLS."""
    for name, (differ, first, odd) in list(CALLS.items())[part]:
        pair = Pair(capacity)
        time.sleep(0.1 * is_odd())  # the others wait for it
        with soon(name):
            message = rf"ranks \[0.*\] are at {first}.*, ranks \[1\] are at {odd}"
            raises(RuntimeError, message, partial(differ, pair))
        for module, before in zip(pair.model.values(), pair.before, strict=True):
            module.flush()
            assert torch.equal(module.table["weight"], before), name
        pair.model.zero_grad()
        pair.good_step(7)


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


def check_other_steps(capacity: int | None) -> None:
    """Ranks of a machine agree on a step before one of them changes a row."""
    for name, (differ, first, odd) in STEPS.items():
        pair = Pair(capacity)
        time.sleep(0.1 * is_odd())  # the others wait for it
        message = rf"ranks \[0.*\] are at {first}.*, ranks \[1\] are at {odd}"
        with soon(name):
            is_own = is_odd() and name == "refused"
            raises(RuntimeError, OWN if is_own else message, partial(differ, pair))
        for module, before in zip(pair.model.values(), pair.before, strict=True):
            module.flush()
            assert torch.equal(module.table["weight"], before), name
        pair.model.zero_grad()
        pair.good_step(7)


def check_skipped_batches() -> None:
    """A batch that one of two ranks cannot use is skipped by that rank, or by both."""
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
    pair.assert_as_whole()
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
    """After ranks have waited in vain all of them raise, with the remedy."""
    ranks = Ranks.of()
    with nullcontext() if on_machine else patch.object(ranks, "_barrier", None):
        pair = Pair()
        own_error(pair, where, 1.5 * timeout)
        for _ in range(3):
            raises(
                RuntimeError,
                "with other ranks failed|are at",
                lambda: pair.good_step(7),
            )
        begin = time.monotonic()
        raises(RuntimeError, "restart from the last checkpoint", lambda: pair.good_step(7))
        assert time.monotonic() - begin < SOON


def check_flagged_errors() -> None:
    """A rank's own error, before its lookup, after it or after the backward, skips a batch of all.

    It is caught before another rank waits for it, as the docs say.
    """
    for where in ("before", "after", "behind"):
        pair = Pair()
        failed = torch.zeros(())
        pair.model.zero_grad()
        ids = local_ids(1, 2)
        try:
            if where == "before":
                raise_if(is_odd())
        except ValueError:
            ids, failed = ids[:0], torch.ones(())
        loss = pair.model["a"](ids).sum()
        try:
            if where == "after":
                raise_if(is_odd())
        except ValueError:
            failed = torch.ones(())
        if where == "behind":
            loss.backward()
            failed = torch.tensor(float(is_odd()))
        dist.all_reduce(failed, dist.ReduceOp.MAX)
        assert failed
        pair.good_step(7)


def check_late_calls() -> None:
    """Rows of a capacity that are stepped before the error is known are as before the step."""
    with raised_late(), patch.object(Ranks.of(), "_barrier", None):
        for flushes in (False, True):
            pair = Pair(ROWS)
            backwards_in_another_order(pair)
            pair.optimizers[0].step()
            message = (
                "ranks .* at the backward of lookup 1 of .*, ranks .* at the backward of lookup 1"
            )
            if flushes:
                raises(RuntimeError, message, pair.model["a"].flush)
            for module in pair.model.values():
                raises(RuntimeError, message, lambda module=module: module(local_ids(1)))  # type: ignore[misc]
            for module, before in zip(pair.model.values(), pair.before, strict=True):
                module.flush()
                assert torch.equal(module.table["weight"], before)
            found = pair.model["a"](local_ids(1, 2))
            with torch.no_grad():
                assert torch.equal(found, pair.whole["a"](local_ids(1, 2)))

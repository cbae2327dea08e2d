"""Training on several ranks is bitwise identical to one process with all rows and batches.

SPEEDTORCH_ROUNDS sets how many random programs run, 3 by default, and SPEEDTORCH_FIRST the first.
"""

from __future__ import annotations

import copy
import io
import os
import random
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import optimizer_cases
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from ordinary_run import programs
from rank_backends import BACKENDS, EVERY_WAY, RANKS, TWO_AND_THREE_RANKS, on_ranks
from rank_processes import exit_codes, in_processes, own_device
from sharded_training import (
    CASES,
    FIXED,
    ROWS,
    WAYS,
    WIDTH,
    Biased,
    Case,
    assert_own_rows,
    batches_of,
    check_collections,
    check_training,
    local_ids,
    loss_of,
    made_collection,
    module_of,
    own_gradient,
    own_rows,
    raises,
    row_modules,
    same,
    share_of,
    train_both,
)
from torch import Tensor, nn, optim

import speedtorch
from speedtorch.parallel.block_cyclic import BlockCyclic
from speedtorch.parallel.clip import clip_grad_norm_
from speedtorch.parallel.shard import shard
from speedtorch.table.row_blocks import rows_of_a_block

ROUNDS = int(os.environ.get("SPEEDTORCH_ROUNDS", programs(3)))
FIRST = int(os.environ.get("SPEEDTORCH_FIRST", "0"))
# Every optimizer of torch that treats rows separately, once.
OPTIMIZERS = {
    name: Case(case.make, optimizer=dict(case.settings), uneven=True)
    for name, case in optimizer_cases.CASES.items()
    if case.make is not optim.SparseAdam  # which wants sparse gradients
}
DataParallel = nn.parallel.DistributedDataParallel


@on_ranks
@EVERY_WAY
@TWO_AND_THREE_RANKS
def test_ranks_train_as_one_process_does(ranks: int, backend: str, every_way: bool) -> None:
    # Sums are exact, and divided once.
    ways, cases = WAYS if every_way else None, CASES
    if backend == "gloo" and not every_way:  # pairs of cases, to two ranks or to three
        cases = {name: CASES[name] for at, name in enumerate(CASES) if (at // 2 - ranks) % 2}
    check_training(True, cases, ways)


@on_ranks
@pytest.mark.parametrize(
    "ranks", [2, *(pytest.param(n, marks=pytest.mark.nightly) for n in (3, 4))]
)
def test_random_programs_train_as_one_process_does() -> None:
    """With and without averages."""
    kinds = [items for cases in (CASES, FIXED, OPTIMIZERS) for items in cases.items()]
    for seed in range(FIRST, FIRST + ROUNDS):
        choose = random.Random(seed)
        name, case = choose.choice(kinds)
        lookups = choose.randint(1, 3)
        apart = choose.random() < 0.5 and case.capacity is None
        case = replace(
            case,
            lookups=lookups,
            uneven=choose.random() < 0.5,
            apart=apart,
            read=choose.random() < 0.3,
        )
        average, way = choose.random() < 0.7, choose.choice(WAYS)
        name = f"program {seed}: {name}, {lookups} lookups, apart={apart}, average={average}"
        check_training(average, {name: case}, [way])


@on_ranks
@EVERY_WAY
@TWO_AND_THREE_RANKS
def test_every_optimizer_trains_on_ranks_as_in_one_process(ranks: int, every_way: bool) -> None:
    half = dict(list(OPTIMIZERS.items())[ranks % 2 :: 2])  # the other half has other ranks
    check_training(ranks == 2, OPTIMIZERS if every_way else half, ["prefetched"])


@on_ranks
@RANKS
def test_a_run_has_the_same_bits_every_time() -> None:
    """Whatever the gradients, and also if a run waits."""
    rank, found = dist.get_rank(), []
    case = CASES["RMSprop, two lookups, uneven"]
    for way in ("at once", "announced", "prefetched"):
        for _ in range(2):
            module = module_of(case)
            shard(module)
            optimizer = optim.Adam(module.parameters(), lr=0.1)
            speedtorch.attach(optimizer, module)
            batches: Iterable[list[Tensor]] = batches_of(case, [rank])
            if way == "prefetched":
                batches = speedtorch.prefetch(batches, module, ids=lambda batch: batch)
            for step, batch in enumerate(batches):
                optimizer.zero_grad()
                if way == "announced":
                    module.announce(*batch)
                looked_up = torch.cat([module(ids) for ids in batch])
                random = torch.Generator().manual_seed(10 * step + rank)
                looked_up.backward(torch.randn(looked_up.shape, generator=random).to(looked_up))
                optimizer.step()
            found.append(own_rows(module))
    assert all(same(run, found[0]) for run in found[1:])


@on_ranks
@RANKS
def test_what_one_rank_does_wrong_raises_on_all() -> None:
    """No row has changed."""
    rank = dist.get_rank()
    model = nn.ModuleDict({name: module_of(CASES["Adam"]) for name in ("one", "other")})
    shard(model)
    module = model["one"]
    optimizer = optim.Adam(model.parameters())
    speedtorch.attach(optimizer, model)
    before = module.table["weight"].clone()
    ids, message = local_ids(1, 2), r"ids of ranks \[1\] are out of range or not integers. No row"
    if rank == 1:
        ids = local_ids(1, ROWS, -2)
        message = "id 41 at position 1 is out of range for a table of 41 rows .2 of 3"
    raises(IndexError, message, lambda: module(ids))
    assert torch.equal(module.table["weight"], before)
    module(local_ids(3, 4)).sum().backward()
    optimizer.step()
    module.flush()
    every = torch.zeros(ROWS, dtype=torch.bool)
    every[[3, 4]] = True
    assert torch.equal((module.table["weight"] != before).any(1), share_of(every))
    looked_up = model["other"] if rank == 1 else module
    message = r"ranks \[0.*\] are at a new lookup of 'one'.*, ranks \[1\] are at .* of 'other'"
    raises(RuntimeError, message, lambda: looked_up(ids[:1]))


@on_ranks
@BACKENDS
def test_collections_train_as_in_one_process() -> None:
    check_collections()


@on_ranks
def test_what_cannot_be_sharded_is_refused() -> None:
    """The modules beside it do not change."""
    used, once = module_of(CASES["Adam"]), module_of(CASES["Adam"])
    used(local_ids(1))
    shard(once)
    for module, kind, message in (
        (used, RuntimeError, "its rows have been used, were passed"),
        (once, RuntimeError, "its rows have been used, were passed"),
        (
            speedtorch.Embedding(ROWS, WIDTH, scale_grad_by_freq=True),
            NotImplementedError,
            "do not support scale_grad_by_freq, which needs the counts of all ranks",
        ),
        (
            speedtorch.Embedding(ROWS, WIDTH, 3, max_norm=1.0, capacity=4),
            NotImplementedError,
            "padding_idx, max_norm and capacity together cannot be sharded",
        ),
    ):
        fresh = module_of(CASES["Adam"])
        with pytest.raises(kind, match=message):
            shard(nn.Sequential(fresh, module))
        assert fresh.table.rows == ROWS
    raises(ValueError, "Linear has no speedtorch.Embedding", lambda: shard(nn.Linear(2, 2)))
    raises(NotImplementedError, "sharded rows cannot be copied", lambda: copy.deepcopy(once))
    saved = once.state_dict()["weight"]
    raises(TypeError, "torch.distributed.checkpoint.save", lambda: torch.save(saved, io.BytesIO()))
    raises(NotImplementedError, "this tensor has no rows of other ranks", lambda: saved + 1)
    assert f"[{ROWS}, {WIDTH}]" in repr(saved)


@on_ranks
@BACKENDS
def test_data_parallel_trains_the_dense_part() -> None:
    case, outer = CASES["Adam"], nn.Sequential(Biased())

    def make() -> Biased:
        model = Biased()
        model._ddp_params_and_buffers_to_ignore = ["a.name"]
        return model

    def wrap(model: Biased) -> DataParallel:
        assert model._ddp_params_and_buffers_to_ignore == ["a.name", "rows.weight"]
        return DataParallel(model)

    def train(model: nn.Module, ranks: Sequence[int]) -> None:
        optimizer = optim.Adam(model.parameters(), lr=0.25)
        speedtorch.attach(optimizer, model)
        for step, batch in enumerate(batches_of(case, ranks)):
            optimizer.zero_grad()
            (loss_of(model, case, step, ranks, batch) / len(ranks)).backward()
            optimizer.step()

    model, whole = train_both(make, train, wrap=wrap)
    assert torch.equal(model.bias, whole.bias) and bool((model.bias != 0).all())
    assert_own_rows(model, whole)
    shard(outer[0])
    call = lambda: DataParallel(outer)(local_ids(1))  # noqa: E731
    raises(NotImplementedError, "DistributedDataParallel", call)


def states_of(module: nn.Module, optimizer: optim.Optimizer) -> dict[str, Any]:
    return {"model": module.state_dict(), "optimizer": optimizer.state_dict()}


def trained(seed: int, *, alone: bool = False) -> tuple[nn.Module, optim.Optimizer]:
    """Two modules, and what some steps have made of them."""
    torch.manual_seed(seed)
    rows = speedtorch.Embedding(ROWS, WIDTH, device=own_device())
    model = nn.ModuleDict({"rows": rows, "tables": made_collection()})
    if not alone:
        shard(model)
    optimizer = optim.Adam(model.parameters(), lr=0.25)
    speedtorch.attach(optimizer, model)
    random = torch.Generator().manual_seed(seed + dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        ids = torch.randint(5, (4, 2), generator=random).to(own_device())
        found = model["tables"](dict.fromkeys("abc", ids)).values()
        (model["rows"](ids).sum() + (found * 2).sum()).backward()
        optimizer.step()
    return model, optimizer


def loaded(folder: str, *, alone: bool = False) -> tuple[nn.Module, optim.Optimizer]:
    """The same modules, trained otherwise, which load a checkpoint."""
    model, optimizer = trained(2, alone=alone)
    state = states_of(model, optimizer)
    checkpoint.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return model, optimizer


def save_checkpoint(folder: str, wholes: str, in_background: bool) -> None:
    """Saves what this many ranks have trained, and all rows of it for check_checkpoint()."""
    model, optimizer = trained(1)
    if in_background:
        saving = checkpoint.async_save(states_of(model, optimizer), checkpoint_id=folder)
        saved = own_rows(model)
        model["rows"](local_ids(*range(5))).sum().backward()
        optimizer.step()
        model["rows"].flush()
        assert not same(own_rows(model), saved)
        saving.result()
    else:
        checkpoint.save(states_of(model, optimizer), checkpoint_id=folder)
        saved = own_rows(model)
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, saved)
    if dist.get_rank() == 0:
        torch.save(shares, wholes)


def rows_saved(shares: list[Any], number: int, rows: int, width: int) -> Tensor:
    """All rows of a field, of the shares of ranks."""
    whole = torch.empty(rows, width)
    sharding = BlockCyclic.of(rows, len(shares), rows_of_a_block((width,)))
    for rank, share in enumerate(shares):
        for table, own in sharding.blocks(rank):
            whole[table.start : table.stop] = share[number][own.start : own.stop]
    return whole


def check_checkpoint(folder: str, wholes: str, alone: bool) -> None:
    """Loads what other ranks have saved, and has the same bits."""
    (model, optimizer), shares = loaded(folder, alone=alone), torch.load(wholes)
    modules = row_modules(model)
    for number, found in enumerate(own_rows(model)):
        shape = modules[number // 3].num_embeddings, modules[number // 3].embedding_dim
        whole = rows_saved(shares, number, *shape)
        assert torch.equal(found, whole if alone else share_of(whole, shape[1:])), number
    assert int(optimizer.state_dict()["state"][0]["step"]) == 3
    # What was held before is what was loaded, too.
    expected = rows_saved(shares, 0, ROWS, WIDTH)[:5]
    assert torch.equal(model["rows"](local_ids(*range(5))).cpu(), expected)


@pytest.mark.filterwarnings("ignore::UserWarning")
@BACKENDS
@pytest.mark.parametrize(
    "all_numbers", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["some", "all"]
)
def test_a_checkpoint_goes_to_another_number_of_ranks(
    tmp_path: Path, backend: str, all_numbers: bool
) -> None:
    numbers = ((2, 3), (3, 1), (1, 2)) if backend == "gloo" else ((2, 1), (1, 2))
    numbers = numbers if all_numbers else numbers[:1]
    for saved_by, loaded_by in numbers:
        given = (str(tmp_path / f"of {saved_by}"), str(tmp_path / f"of {saved_by}.pt"))
        in_background = backend == "gloo" and saved_by == 2  # which torch does through gloo
        in_processes(saved_by, save_checkpoint, *given, in_background, backend=backend)
        in_processes(loaded_by, check_checkpoint, *given, False, backend=backend)
    in_processes(1, check_checkpoint, *given, True, backend=backend)


@on_ranks
@pytest.mark.filterwarnings("ignore::UserWarning")
@BACKENDS
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_all_ranks_clip_by_the_norm_of_the_whole_model(sparse: bool) -> None:
    ranks = dist.get_world_size()
    ids = [local_ids(k, k + 7, 2, 30 + k).view(2, 2) for k in range(ranks)]

    def make() -> Biased:
        model = Biased()
        model.rows = speedtorch.Embedding(ROWS, WIDTH, sparse=sparse, device=own_device())
        return model

    def train(model: nn.Module, of_ranks: Sequence[int]) -> None:
        losses = [(model(ids[k]) * (k + 1)).sum() for k in of_ranks]
        torch.stack(losses).mean().backward()

    cases = ((2.0, 1.0, None), (float("inf"), 0.5, False), (1.0, 1e6, True))
    for norm_type, most, foreach in cases:
        model, whole = train_both(make, train, wrap=DataParallel)
        if sparse:
            values = whole.rows.weight.grad.coalesce().values().flatten()
            gradients = torch.cat([values, whole.bias.grad.flatten()])
            expected = torch.linalg.vector_norm(gradients, norm_type)
        else:
            expected = nn.utils.clip_grad_norm_(whole.parameters(), most, norm_type)
        found = clip_grad_norm_(model.parameters(), most, norm_type, foreach=foreach)
        torch.testing.assert_close(found, expected)
        clipped = torch.linalg.vector_norm(model.bias.grad, norm_type)
        factor = min(1.0, float(most / expected))
        before = torch.full((WIDTH,), 4.0) * torch.arange(1, ranks + 1).double().mean().float()
        torch.testing.assert_close(model.bias.grad.cpu(), before * factor)
        assert clipped <= most + 1e-6
        with pytest.raises(NotImplementedError, match="Use speedtorch.clip_grad_norm_"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not sparse:  # torch clips no values of sparse ones; a value is one of its own rank
            nn.utils.clip_grad_value_(model.parameters(), 0.25)
            held = own_gradient(model.rows)
            assert held is None or float(held.abs().max()) <= 0.25
    alone, other = Biased(), Biased()
    for each in (alone, other):
        each(ids[0]).sum().backward()
    found = clip_grad_norm_(alone.parameters(), 0.5)
    assert torch.equal(found, nn.utils.clip_grad_norm_(other.parameters(), 0.5))
    assert torch.equal(alone.bias.grad, other.bias.grad)
    alone.bias.grad.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(alone.parameters(), 0.5, error_if_nonfinite=True)


@on_ranks
def test_an_order_of_the_norm_that_is_not_positive_raises() -> None:
    model = Biased()
    shard(model)
    model(local_ids(1)).sum().backward()
    for norm_type in (0.0, -1.0, -float("inf"), float("nan")):
        message = f"norm_type must be a positive number or inf, got {norm_type}"
        with pytest.raises(ValueError, match=message):
            clip_grad_norm_(model.parameters(), 0.5, norm_type)
    assert torch.equal(model.bias.grad, torch.ones_like(model.bias))


@on_ranks
@RANKS
@pytest.mark.parametrize("norm_type", [1.0, float("inf")])
def test_nan_in_a_gradient_of_one_rank_is_the_norm_on_all_ranks(norm_type: float) -> None:
    for rank in range(dist.get_world_size()):
        model = Biased()
        shard(model)
        model(local_ids(*range(ROWS))).sum().backward()
        gradient = own_gradient(model.rows)
        assert gradient is not None
        if rank == dist.get_rank():
            gradient[0, 0] = float("nan")
        before = gradient.clone()
        with pytest.raises(RuntimeError, match=f"norm of order {norm_type} .* got nan"):
            clip_grad_norm_(model.parameters(), 0.5, norm_type, error_if_nonfinite=True)
        assert torch.equal(gradient.nan_to_num(-1.0), before.nan_to_num(-1.0))
        assert clip_grad_norm_(model.parameters(), 0.5, norm_type).isnan()
        assert gradient.isnan().all()


class Accelerator:
    """Clips as accelerate's does, whose norm transformers' Trainer logs without clipping."""

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: int = 2
    ) -> Tensor:
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)


@on_ranks
def test_accelerate_clips_with_the_function_of_the_error() -> None:
    """It gives the norm and leaves the gradients."""
    accelerator, model = Accelerator(), Biased()
    shard(model)
    wrapped = DataParallel(model)
    wrapped(local_ids(1, 2)).sum().backward()

    def gradients() -> list[Tensor | None]:
        return [own_gradient(model.rows), model.bias.grad]

    def clip() -> Tensor:
        return accelerator.clip_grad_norm_(wrapped.parameters(), float("inf"))

    before = [None if gradient is None else gradient.clone() for gradient in gradients()]
    message = "accelerate: accelerator.clip_grad_norm_ = speedtorch.clip_grad_norm_"
    raises(NotImplementedError, message, clip)
    vars(accelerator)["clip_grad_norm_"] = speedtorch.clip_grad_norm_
    torch.testing.assert_close(clip(), torch.tensor(3 * (1.0 + 1.0 + 4.0)).sqrt())
    for gradient, own in zip(gradients(), before, strict=True):
        assert gradient is own or torch.equal(gradient, own)


@on_ranks
def test_a_rank_without_gradients_clips_with_the_other_ranks() -> None:
    """Rows of several dtypes, of some of which one rank alone has gradients, or none has."""
    rank, dtypes = dist.get_rank(), (torch.float64, torch.bfloat16, torch.float32)

    def train(model: nn.Module, ranks: Sequence[int]) -> None:
        for module in model:  # row 0 is of the first rank
            (module(torch.zeros(len(ranks), dtype=torch.int64)) * 2).mean().backward()

    for of_modules in [*((first,) for first in dtypes), dtypes]:

        def make(dtypes: Sequence[torch.dtype] = of_modules) -> nn.ModuleList:
            return nn.ModuleList(speedtorch.Embedding(ROWS, WIDTH, dtype=kind) for kind in dtypes)

        close = {"rtol": 1e-2, "atol": 1e-2} if torch.bfloat16 in of_modules else {}
        for norm_type in (2.0, float("inf"), 1.0):
            model, whole = train_both(make, train)
            found = clip_grad_norm_(model.parameters(), 0.25, norm_type)
            expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.25, norm_type)
            torch.testing.assert_close(found, expected, check_dtype=False, **close)
            assert found.dtype == max(of_modules, key=lambda dtype: torch.finfo(dtype).bits) or (
                of_modules == (torch.bfloat16,)
            )
            for ours, theirs in zip(model, whole, strict=True):
                gradient = own_gradient(ours)
                assert (gradient is None or gradient.numel() == 0) == (rank > 0)
                if rank == 0:
                    torch.testing.assert_close(gradient, own_gradient(theirs), **close)


def check_a_missing_lookup(sleeps: float) -> None:
    module = module_of(CASES["Adam"])
    shard(module)
    module(local_ids(1)).sum().backward()
    if dist.get_rank() == 0:
        message = "Embedding: an exchange with other ranks failed .* make the same lookups"
        raises(RuntimeError, message, lambda: module(local_ids(2)))
    else:
        time.sleep(sleeps)


@BACKENDS
def test_a_lookup_that_not_all_ranks_make_raises_when_the_time_is_over(backend: str) -> None:
    timeout = 3 if backend == "gloo" else 10  # which NCCL's beginning is part of
    in_processes(2, check_a_missing_lookup, timeout + 2, timeout=timeout, backend=backend)


def check_a_killed_rank(folder: str) -> None:
    model, optimizer = trained(1)
    checkpoint.save(states_of(model, optimizer), checkpoint_id=folder)
    torch.save(own_rows(model), f"{folder}/{dist.get_rank()}.pt")
    dist.barrier()
    if dist.get_rank() == 1:
        model["rows"](local_ids(1))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(3):
            model["rows"](local_ids(1)).sum().backward()
    except RuntimeError as error:
        Path(folder, "said").write_text(str(error))
        os._exit(3)


def check_saved_before(folder: str) -> None:
    model, _ = loaded(folder)
    assert same(own_rows(model), torch.load(f"{folder}/{dist.get_rank()}.pt"))


@BACKENDS
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_ranks_raise_after_another_rank_is_killed(tmp_path: Path, backend: str) -> None:
    """What was saved before is whole."""
    folder = str(tmp_path / "saved")
    codes = exit_codes(2, check_a_killed_rank, folder, timeout=20, backend=backend)
    assert codes == [3, -signal.SIGKILL]
    assert "an exchange with other ranks failed" in Path(folder, "said").read_text()
    in_processes(2, check_saved_before, folder, backend=backend)

"""shard_ids says which rows a lookup asks each rank for; requested_ids what it is asked for."""

from __future__ import annotations

import pytest
import torch
from conftest import NEEDS_GPU
from torch import Tensor

from speedtorch.ops.functions import _ops
from speedtorch.parallel.block_cyclic import BlockCyclic
from speedtorch.plan.fixed_size_batch import BAD_IDS
from speedtorch.step.fixed_blocks import OTHER_MODULE, OVER_SHARE

PARTS = ["numbers", "unique", "inverse", "order", "offsets", "status", "counts", "sent"]
BLOCKS = ["places", "entries"]
# Rows that ranks own as many of, and not; in blocks of one row and of more; and none at all.
SHARDINGS = {
    "one rank": BlockCyclic.of(10, 1),
    "even": BlockCyclic(96, 3, 8),
    "uneven": BlockCyclic(97, 3, 8),
    "ranks without rows": BlockCyclic(3, 5, 2),
    "many": BlockCyclic.of(100_000, 64),
    "more ranks than threads": BlockCyclic(5000, 600, 3),
    "no rows": BlockCyclic.of(0, 2),
}


def shard_ids(ids: Tensor, sharding: BlockCyclic, share: int) -> list[Tensor]:
    """The reference, in torch's ops."""
    ranks, stride, end = sharding.ranks, sharding.stride, sharding.ranks * sharding.stride
    numbers = torch.full(ids.shape, end)
    if sharding.rows:
        numbers = sharding.numbers(ids)
        numbers = numbers.masked_fill(numbers < 0, end)
    unique, *plan = torch.ops.speedtorch.plan_rows(numbers, end + 1)
    bounds = torch.tensor([rank * stride for rank in range(ranks + 1)] + [end + 1])
    begins = torch.searchsorted(unique.remainder(end + 2), bounds)
    named, is_bad = begins.diff(), bool((numbers == end).any())
    counts = torch.full((ranks,), -1) if is_bad else named[:-1]
    made = [numbers, unique, *plan, counts]
    if share < 0:
        is_row = (unique >= 0) & (unique < end)
        return [*made, torch.where(is_row, unique % max(stride, 1), -1)]
    fault = OVER_SHARE if bool((named[:-1] > share).any()) else BAD_IDS * is_bad
    entries = begins[:ranks, None] + torch.arange(share)
    is_none = entries >= begins[1 : ranks + 1, None]
    entries = entries.masked_fill(is_none, numbers.numel())
    padded = torch.cat([unique, torch.tensor([-1])])
    rows = (padded[entries] % max(stride, 1)).masked_fill(is_none, -1)
    sent = torch.cat([rows, torch.full((ranks, 1), fault)], 1)
    owners = torch.where(numbers == end, ranks, numbers // max(stride, 1))
    places = plan[0].view(ids.shape) + (torch.arange(ranks + 1) * share - begins[:-1])[owners]
    return [*made, sent, places.clamp(max=ranks * share - 1).clamp(min=0), entries.flatten()]


def called(ids: Tensor, sharding: BlockCyclic, share: int, device: str) -> list[Tensor]:
    """The op, on a device."""
    of_rows = sharding.rows, sharding.block, sharding.stride, sharding.ranks
    made = _ops.shard_ids(ids.to(device), sharding.distances().to(device), *of_rows, share)
    assert all(tensor.device.type == device for tensor in made)
    return [tensor.cpu() for tensor in made]


def assert_is_the_reference(ids: Tensor, sharding: BlockCyclic, share: int, device: str) -> None:
    names = PARTS + BLOCKS * (share >= 0)
    made, expected = called(ids, sharding, share, device), shard_ids(ids, sharding, share)
    for name, found, wanted in zip(names, made, expected, strict=True):
        assert found.dtype == torch.int64 and found.shape == wanted.shape, name
        assert torch.equal(found, wanted), name


def test_a_small_table(device: str) -> None:
    """Of rows 0 to 6 in blocks of two the first rank owns 0, 1 and 6, the second the others."""
    sharding, ids = BlockCyclic(7, 2, 2), torch.tensor([[5, 6, 5], [0, 2, 3]])
    assert sharding.numbers(torch.arange(7)).tolist() == [0, 1, 4, 5, 6, 7, 2]
    assert sharding.stride == 4
    numbers, unique, inverse, *_, counts, sent = called(ids, sharding, -1, device)
    assert numbers.tolist() == [[7, 2, 7], [0, 4, 5]]
    assert unique.tolist() == [0, 2, 4, 5, 7, -1]
    assert inverse.tolist() == [4, 1, 4, 0, 2, 3]
    assert counts.tolist() == [2, 3]
    assert sent.tolist() == [0, 2, 0, 1, 3, -1]
    *_, counts, sent, places, entries = called(ids, sharding, 4, device)
    assert counts.tolist() == [2, 3]
    assert sent.tolist() == [[0, 2, -1, -1, 0], [0, 1, 3, -1, 0]]
    assert places.tolist() == [[6, 1, 6], [0, 4, 5]]
    assert entries.tolist() == [0, 1, 6, 6, 2, 3, 4, 6]
    assert called(ids, sharding, 2, device)[7].tolist() == [[0, 2, OVER_SHARE], [0, 1, OVER_SHARE]]
    ids[0, 1] = 7
    *_, counts, sent = called(ids, sharding, -1, device)
    assert counts.tolist() == [-1, -1]
    assert called(ids, sharding, 3, device)[7].tolist() == [
        [0, -1, -1, BAD_IDS],
        [0, 1, 3, BAD_IDS],
    ]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("count", [0, 1, 40, 3000])
@pytest.mark.parametrize("sharding", SHARDINGS.values(), ids=SHARDINGS)
def test_it_is_the_reference(
    sharding: BlockCyclic, count: int, dtype: torch.dtype, device: str
) -> None:
    random = torch.Generator().manual_seed(count)
    for low, high in ((0, sharding.rows), (-2, sharding.rows + 2)):
        if low == high:
            continue
        ids = torch.randint(low, high, (count,), generator=random).to(dtype)
        for share in (-1, 0, 1, 7, 500):
            assert_is_the_reference(ids, sharding, share, device)


@pytest.mark.parametrize("share", [-1, 9])
def test_ids_of_any_shape_and_stride_are_taken(device: str, share: int) -> None:
    sharding = SHARDINGS["uneven"]
    ids = torch.randint(97, (6, 8), generator=torch.Generator().manual_seed(0))
    for view in (ids, ids.t(), ids[:, ::3], ids[0, 0], ids[:0]):
        assert_is_the_reference(view, sharding, share, device)
    for bad in (-(2**63), 2**63 - 1):
        assert_is_the_reference(torch.tensor([5, bad, 5]), sharding, share, device)


@pytest.mark.parametrize("share", [-1, 2])
def test_distances_that_are_none_give_ids_that_are_no_rows(device: str, share: int) -> None:
    distances = torch.tensor([-1, 7, -(2**62)], device=device)
    ids = torch.tensor([0, 1, 2, 4], device=device)
    made = _ops.shard_ids(ids, distances, 6, 2, 4, 2, share)
    assert made[0].tolist() == [8, 0, 8, 8]
    assert made[6].tolist() == [-1, -1]


@NEEDS_GPU
def test_they_run_on_the_current_stream() -> None:
    sharding, share = SHARDINGS["uneven"], 9
    ids, side = torch.randint(97, (400,)), torch.cuda.Stream()
    there, distances = torch.zeros_like(ids).cuda(), sharding.distances().cuda()
    pinned = ids.pin_memory()
    of_rows = sharding.rows, sharding.block, sharding.stride, sharding.ranks
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        there.copy_(pinned, non_blocking=True)
        made = _ops.shard_ids(there, distances, *of_rows, share)
        requested, fault = _ops.requested_ids(made[7], 77)
    side.synchronize()
    expected = shard_ids(ids, sharding, share)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(made, expected, strict=True))
    rows, faults = expected[7][:, :-1], expected[7][:, -1]
    assert torch.equal(requested.cpu(), rows.masked_fill(rows < 0, 77).flatten())
    assert fault.tolist() == [int(faults.max())]


def test_requested_ids_of_a_small_table(device: str) -> None:
    blocks = torch.tensor([[4, -1, 0], [-1, -1, BAD_IDS], [0, 7, 0]], device=device)
    for differs, expected in ((None, BAD_IDS), (0, BAD_IDS), (1, OTHER_MODULE)):
        given = () if differs is None else (torch.tensor([differs], device=device),)
        ids, fault = _ops.requested_ids(blocks, 9, *given)
        assert ids.tolist() == [4, 9, 9, 9, 0, 7]
        assert fault.tolist() == [expected]


@pytest.mark.parametrize("share", [0, 1, 300])
@pytest.mark.parametrize("ranks", [1, 3, 700])
def test_requested_ids_are_the_reference(device: str, ranks: int, share: int) -> None:
    blocks = torch.randint(-3, 50, (ranks, share + 1)).clamp_(min=-1)
    blocks[:, -1] = torch.randint(4, (ranks,))
    ids, fault = _ops.requested_ids(blocks.to(device), 77)
    rows = blocks[:, :-1]
    assert torch.equal(ids.cpu(), rows.masked_fill(rows < 0, 77).flatten())
    assert fault.tolist() == [int(blocks[:, -1].max())]

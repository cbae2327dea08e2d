"""A step's plan: the padding behind the other rows, places within a capacity, copies of ids."""

from __future__ import annotations

import pytest
import torch
from conftest import NEEDS_GPU
from torch import Tensor

from speedtorch.ops.functions import plan_batch

ROWS = 60
# Few ids are planned by one block of a GPU, and compared on the CPU; keys have 32 bits or 64.
SIZES = {"none": 0, "one": 1, "few": 40, "some": 700, "many": 5000, "a million": 1_000_000}
TABLES = {"small": ROWS, "bits of the keys full": 63, "large": 1 << 20, "past 32 bits": 1 << 40}


def expected_plan(
    index: list[int], rows: int, padding: int, capacity: int
) -> tuple[list[int], list[int], list[int], list[int], list[int]]:
    """Unique, inverse, order, offsets and status, as plan_batch documents them."""
    count = len(index)
    order = sorted(range(count), key=lambda at: (index[at] == padding, index[at], at))
    distinct = sorted(set(index) - {padding})
    places = {id: place for place, id in enumerate(distinct)}
    if capacity >= 0:
        places = {id: min(place, capacity - 1) for id, place in places.items()}
    places[padding] = capacity if capacity >= 0 else len(distinct)
    offsets, seen, repeat = [], set(), count
    for at, position in enumerate(order):
        if index[position] != padding and index[position] not in seen:
            offsets.append(at)
            seen.add(index[position])
        elif index[position] != padding:
            repeat = min(repeat, position)
    offsets.append(sum(id != padding for id in index))
    unique = [*distinct, *[padding] * (padding >= 0)]
    unique += [-1] * (count + (padding >= 0) - len(unique))
    offsets += [count] * (count + 1 - len(offsets))
    status = [0, count, 0, len(distinct), rows, count, repeat]
    status.append(index[repeat] if repeat < count else 0)
    return unique, [places[id] for id in index], order, offsets, status


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=["int64", "int32"])
@pytest.mark.parametrize("rows", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("count", list(SIZES.values())[:-1], ids=list(SIZES)[:-1])
def test_a_plan_is_that_of_its_ids(count: int, rows: int, dtype: torch.dtype, device: str) -> None:
    if dtype == torch.int32 and rows > 1 << 31:
        rows = (1 << 31) - 1
    random = torch.Generator().manual_seed(count)
    spread = min(rows, max(8, count // 3))  # so that ids repeat
    index = torch.randint(spread, (count,), generator=random)
    index = torch.where(index % 2 == 0, index, rows - 1 - index)
    named = index[0].item() if count else 3
    for padding in (-1, int(named), rows - 1, 0):
        for capacity in (-1, 7, 1 << 21):
            made = plan_batch(index.to(device, dtype), rows, padding, capacity)
            plan = expected_plan(index.tolist(), rows, padding, capacity)
            for name, part, numbers in zip("uiofs", made[:5], plan, strict=True):
                assert part.tolist() == numbers, (name, padding, capacity)


@pytest.mark.parametrize("scale", [1, 10**9], ids=["32 bits", "64 bits"])
def test_a_plan_of_a_million_ids_has_them_all(device: str, scale: int) -> None:
    random = torch.Generator().manual_seed(1)
    index = torch.randint(300_000, (SIZES["a million"],), generator=random) * scale
    rows, padding = 300_000 * scale, 17 * scale
    unique, inverse, order, offsets, status = (
        tensor.cpu() for tensor in plan_batch(index.to(device), rows, padding, -1)[:5]
    )
    distinct = int(status[3])
    trained = index[index != padding].unique()
    assert torch.equal(unique[:distinct], trained) and unique[distinct] == padding
    assert torch.equal(unique[inverse], index)
    assert torch.equal(order, index.where(index != padding, rows).sort(stable=True).indices)
    assert torch.equal(index[order[offsets[:distinct]]], trained)


def ids_of_order(name: str, count: int, rows: int) -> Tensor:
    random = torch.Generator().manual_seed(count)
    if name == "few distinct":
        return rows - 1 - torch.randint(min(rows, 5), (count,), generator=random)
    if name == "most are distinct":
        return torch.randint(rows, (count,), generator=random)
    ascending = torch.arange(count) * rows // count
    return ascending if name == "ascending" else ascending.flip(0)


@NEEDS_GPU
@pytest.mark.parametrize("name", ["few distinct", "most are distinct", "ascending", "descending"])
@pytest.mark.parametrize("rows", [1, 2, 255, 257, 1 << 16, 10_000_000, (1 << 32) + 5])
@pytest.mark.parametrize(
    "count", [2047, 2048, 2049, 4096, 4097, 34_816, 131_071, 131_072, 131_073, 133_121]
)
def test_a_gpu_plans_as_the_cpu_does(count: int, rows: int, name: str) -> None:
    """One block, blocks that wait for each other, and a sort of many launches."""
    index = ids_of_order(name, count, rows)
    for padding, capacity in ((-1, -1), (int(index[count // 2]), -1), (rows - 1, count // 3)):
        expected = plan_batch(index, rows, padding, capacity)
        made = plan_batch(index.to("cuda"), rows, padding, capacity)
        for part, other in zip(made[:5], expected[:5], strict=True):
            assert torch.equal(part.cpu(), other), (padding, capacity)


@NEEDS_GPU
@pytest.mark.parametrize("count", [2049, 34_816, 131_073])
def test_a_graph_plans_the_ids_of_its_replay(count: int) -> None:
    random = torch.Generator().manual_seed(count)
    batches = torch.randint(count, (4, count), generator=random)
    index = batches[0].cuda()
    graph = torch.cuda.CUDAGraph()
    plan_batch(index, count, 3, -1)
    with torch.cuda.graph(graph):
        made = plan_batch(index, count, 3, -1)
    for batch in batches:
        index.copy_(batch)
        graph.replay()
        for part, other in zip(made[:5], plan_batch(batch, count, 3, -1)[:5], strict=True):
            assert torch.equal(part.cpu(), other)


@pytest.mark.parametrize("count", [5, 5000, 140_000])
def test_bad_ids_are_counted_and_the_first_is_named(count: int, device: str) -> None:
    index = torch.arange(count) % ROWS
    index[3], index[4] = ROWS + 2, -5
    if device == "cpu":
        with pytest.raises(IndexError, match=r"plan_batch: id 62 at position 3.*2 of"):
            plan_batch(index, ROWS, 1, -1)
    else:
        status = plan_batch(index.to(device), ROWS, 1, -1)[4]
        assert status[:3].tolist() == [2, 3, ROWS + 2]


def test_ids_on_the_cpu_are_copied() -> None:
    for index in (torch.tensor([[3, 1], [2, 2]]), torch.tensor([5, 4], dtype=torch.int32)):
        copy = plan_batch(index, ROWS, -1, -1)[-1]
        assert torch.equal(copy, index) and copy.dtype == index.dtype
        before = copy.clone()
        index += 1
        assert torch.equal(copy, before)

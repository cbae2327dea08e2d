"""Each loop of the CPU gives the same bytes on four threads as on one, and those that numpy gives.

The batches are large enough that each loop is cut into parts; `make sanitize` runs them with
ThreadSanitizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from reference import assert_same_bytes, assert_same_storage, layout_copy, random_rows
from test_argument_faults import in_a_fork
from torch import Tensor

import speedtorch
from speedtorch.ops.functions import _ops, round_rows

ROWS, COUNT = 5000, 1 << 15  # ids repeat, and there are enough for two threads to sort them


@pytest.fixture(autouse=True)
def threads_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def numbers(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))


def ids(count: int = COUNT, rows: int = ROWS) -> Tensor:
    return torch.randint(rows, (count,), generator=torch.Generator().manual_seed(count))


def distinct_ids(count: int) -> Tensor:
    return torch.randperm(ROWS, generator=torch.Generator().manual_seed(count))[:count]


def bags() -> Tensor:
    """Offsets of 8192 bags, of COUNT entries in all."""
    inner = torch.randint(COUNT, (8191,), generator=torch.Generator().manual_seed(3))
    return torch.cat([torch.tensor([0]), inner.sort().values, torch.tensor([COUNT])])


def gathered() -> list[Tensor]:
    return [speedtorch.pinned_gather(numbers(ROWS, 16), ids())]


def scattered(columns: int = 16, accumulate: bool = False) -> list[Tensor]:
    table = numbers(ROWS, columns)
    speedtorch.pinned_scatter(table, ids(), numbers(COUNT, columns), accumulate=accumulate)
    return [table]


def swapped() -> list[Tensor]:
    host, leaving = [[numbers(ROWS + k, width)[:ROWS] for width in (32, 7)] for k in (0, 1)]
    arriving = [torch.zeros(4000, width) for width in (32, 7)]
    evict, load = distinct_ids(3000), distinct_ids(4000)
    speedtorch.optimizer_state_swap(host, leaving, evict, arriving, load)
    return [*host, *arriving]


def held() -> list[Tensor]:
    """Rows that stay change places, others leave, and the rest become zeros."""
    count, kept, evicted = 4000, 3000, 1000
    rows, incoming, saved = ([numbers(count + k, 32)[:count]] for k in range(3))
    kept_places, kept_from = torch.arange(count), torch.arange(count).flip(0)
    evicted_ids, evicted_places = torch.arange(count), torch.arange(count)
    counts = torch.tensor([3500, kept, 500, evicted])
    held_ids, status, saved_ids, saved_count = (
        torch.zeros(size, dtype=torch.int64) for size in (count, 8, count, 1)
    )
    _ops.hold_rows(
        *(rows, incoming, saved, kept_places, kept_from, evicted_ids, evicted_places, counts),
        *(torch.arange(count), held_ids, status, saved_ids, saved_count),
    )
    return [*rows, *saved, held_ids, saved_ids]


def rounded() -> list[Tensor]:
    rows = [numbers(ROWS, 16)]
    round_rows(rows, torch.arange(ROWS), torch.tensor([7, 2]), [8], True)
    return rows


def summed() -> list[Tensor]:
    return [speedtorch.sum_rows(numbers(COUNT, 4), speedtorch.plan_rows(ids(), ROWS), ROWS)]


def pooled() -> list[Tensor]:
    return [speedtorch.pool_rows(numbers(ROWS, 4), ids(), bags(), 2)]


def named_in_a_table() -> list[Tensor]:
    ranges = torch.tensor([[0, ROWS], [ROWS, 9]])
    return list(speedtorch.table_ids(ids(), bags(), ranges, 4096))


def sharded(share: int) -> list[Tensor]:
    distances = torch.zeros(ROWS, dtype=torch.int64)
    return list(_ops.shard_ids(ids(), distances, ROWS, 1, ROWS, 2, share))


def many_looked_at() -> list[Tensor]:
    return [speedtorch.pinned_gather(numbers(ROWS, 1), ids(1 << 20))]


def bad_in_all_parts() -> list[Tensor]:
    """The position of the first bad id is said, whichever thread meets one first."""
    bad = ids(1 << 20)
    bad[1000::1000] = ROWS
    with pytest.raises(IndexError, match="position 1000 ") as error:
        speedtorch.pinned_gather(numbers(ROWS, 1), bad)
    return [torch.tensor(list(str(error.value).encode()))]


WORK: dict[str, Callable[[], list[Tensor]]] = {
    "gather": gathered,
    "scatter": scattered,
    "scatter past the caches": lambda: scattered(64),
    "scatter, adding": lambda: scattered(accumulate=True),
    "swap": swapped,
    "hold": held,
    "round": rounded,
    "sum": summed,
    "pool": pooled,
    "table ids": named_in_a_table,
    "shard ids": lambda: sharded(-1),
    "shard ids, in blocks": lambda: sharded(ROWS),
    "check ids": many_looked_at,
    "check bad ids": bad_in_all_parts,
}


@pytest.mark.parametrize("name", WORK)
def test_four_threads_give_the_bytes_of_one(name: str) -> None:
    torch.set_num_threads(1)
    expected = WORK[name]()
    torch.set_num_threads(4)
    for found, wanted in zip(WORK[name](), expected, strict=True):
        assert_same_bytes(found, wanted)


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_child_waits_for_no_thread_of_its_parent() -> None:
    """torch's own parallel loops do, so that the child gets its inputs and compares with numpy."""
    table, index, rows = numbers(ROWS, 16), ids(), numbers(COUNT, 16)
    written = table.clone()

    def work() -> list[Tensor]:
        speedtorch.pinned_scatter(written, index, rows)
        return [*speedtorch.plan_rows(index, ROWS), speedtorch.pinned_gather(table, index), written]

    torch.set_num_threads(4)
    expected = work()

    def child() -> None:
        for found, wanted in zip(work(), expected, strict=True):
            assert np.array_equal(found.numpy(), wanted.numpy())

    assert in_a_fork(child) == 0


# Scatters of so many bytes, in rows of a multiple of 32 bytes, store them past the caches.
PASSING_BYTES = 4 << 20


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize(("gap", "offset"), [(0, 0), (8, 0), (1, 0), (0, 8), (0, 1)])
@pytest.mark.parametrize("fewer", [0, 1], ids=["4MiB", "a row less"])
@pytest.mark.parametrize("row_bytes", [32, 36, 256, 512, 516, 8192])
def test_large_scatters_write_whole_rows(
    row_bytes: int, fewer: int, gap: int, offset: int, threads: int
) -> None:
    count, columns = -(-PASSING_BYTES // row_bytes) - fewer, row_bytes // 4
    table = random_rows(count // 2, (columns,), torch.int32, gap=gap, offset=offset)
    src = random_rows(count, (columns,), torch.int32, seed=1)
    positions = {row: position for position, row in enumerate(ids(count, len(table)).tolist())}
    expected = layout_copy(table)  # of equal ids the last wins
    expected.numpy()[list(positions)] = src.numpy()[list(positions.values())]
    torch.set_num_threads(threads)
    speedtorch.pinned_scatter(table, ids(count, len(table)), src)
    assert_same_storage(table, expected)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("row_bytes", [1, 4, 8, 16, 32, 64, 128, 512, 2048, 8192])
def test_batches_of_every_length_move_whole_rows(row_bytes: int, threads: int) -> None:
    """One row more and one less than are asked for ahead, and than a thread takes."""
    torch.set_num_threads(threads)
    ahead, of_thread = min(max(8192 // row_bytes, 4), 64), (64 << 10) // row_bytes
    table = random_rows(3 * of_thread + 99, (row_bytes,), torch.uint8, gap=1)
    for count in {1, ahead - 1, ahead, ahead + 1, of_thread, of_thread + 1, 3 * of_thread + 9}:
        rows, index = random_rows(count, (row_bytes,), torch.uint8, seed=1), ids(count, len(table))
        found = speedtorch.pinned_gather(table, index)
        assert np.array_equal(found.numpy(), table.numpy()[index.numpy()])
        expected = layout_copy(table)
        np.add.at(expected.numpy(), index.numpy(), rows.numpy())
        speedtorch.pinned_scatter(table, index, rows, accumulate=True)
        assert_same_storage(table, expected)

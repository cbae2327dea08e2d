"""A planned batch knows its distinct rows, and those that it has in common with others."""

from __future__ import annotations

import gc
import itertools
from contextlib import suppress

import pytest
import torch
from conftest import NEEDS_GPU
from recorded_streams import DEVICE, RecordedStreams
from torch import Tensor

from speedtorch.plan import host_copy
from speedtorch.plan.host_copy import HostCopy
from speedtorch.plan.planned_batch import BatchIds, PlannedBatch

ROWS = 40
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]


def batch(
    device: str, *ids: list[int], padding: int | None = None, after: object = None
) -> PlannedBatch:
    parts = [torch.tensor(each, dtype=torch.int64, device=device) for each in ids]
    made = PlannedBatch(parts, ROWS, torch.device(device), padding, after=after)  # type: ignore[arg-type]
    with suppress(IndexError):  # which those say that are given bad ids
        made.count()
    return made


def pairs(lists: tuple[Tensor, Tensor]) -> dict[int, int]:
    return dict(zip(lists[0].tolist(), lists[1].tolist(), strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_held_in_address_order(device: str) -> None:
    made = batch(device, [7, 2, 7], [9, 2])
    assert made.held == 3
    assert made.ids.tolist() == [2, 7, 9]
    assert made.parts.local(0).tolist() == [1, 0, 1] and made.parts.local(1).tolist() == [2, 0]
    assert made.parts.begin(1) == 3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("padding", [0, 7, 9, 39])
def test_the_padding_stands_after_the_rows(device: str, padding: int) -> None:
    made = batch(device, [7, 2, 7, 9, 0], padding=padding)
    ids = sorted({7, 2, 9, 0} - {padding})
    assert made.held == len(ids) and made.ids.tolist() == ids
    expected = [ids.index(id) if id != padding else len(ids) for id in (7, 2, 7, 9, 0)]
    assert made.parts.local(0).tolist() == expected
    among = [0, 2, 3, 7, 9]
    places = made.places_among(torch.tensor(among, device=device))
    assert made.parts.local(0, places).tolist() == [
        5 if id == padding else among.index(id) for id in (7, 2, 7, 9, 0)
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("padding", [None, 2, 11, 5])
@pytest.mark.parametrize(
    ("before", "now"),
    [
        ([1, 2, 5, 5, 11], [2, 3, 11, 38, 2]),
        ([], [2, 3]),
        ([2, 3], []),
        ([], []),
        ([2, 5], [2, 5]),
        ([1, 3], [2, 5]),
    ],
    ids=str,
)
def test_rows_that_arrive_stay_and_leave_are_found(
    device: str, before: list[int], now: list[int], padding: int | None
) -> None:
    first = batch(device, before, padding=padding)
    old = sorted(set(before) - {padding})
    new = sorted(set(now) - {padding})
    for after in (first, torch.tensor(old, dtype=torch.int64, device=device)):
        made = batch(device, now, padding=padding, after=after)
        assert made.ids.tolist() == new
        loaded = {id: new.index(id) for id in new if id not in old}
        assert made.new_row_count == len(loaded)
        if padding is not None:  # its row comes with every batch
            loaded[padding] = len(new)
        assert pairs(made.incoming) == loaded
        assert pairs(made.outgoing) == {id: old.index(id) for id in old if id not in new}
        both = {new.index(id): old.index(id) for id in new if id in old}
        assert pairs(made.kept) == both
        brought = made.incoming[0][: made.new_row_count].tolist()
        assert brought == sorted(brought)


@pytest.mark.parametrize("device", DEVICES)
def test_many_rows_are_compared(device: str) -> None:
    random = torch.Generator().manual_seed(0)
    lists = [torch.randint(20_000, (9000,), generator=random) for _ in range(2)]
    place = torch.device(device)
    first = PlannedBatch([lists[0].to(place)], 20_000, place)
    second = PlannedBatch([lists[1].to(place)], 20_000, place, after=first)
    old, new = (each.unique() for each in lists)
    assert torch.equal(second.incoming[0].cpu(), new[~torch.isin(new, old)])
    assert torch.equal(second.outgoing[0].cpu(), old[~torch.isin(old, new)])
    assert torch.equal(new[second.kept[0].cpu()], old[second.kept[1].cpu()])


@pytest.mark.parametrize("device", DEVICES)
def test_bad_ids_are_told_when_they_are_counted(device: str) -> None:
    with pytest.raises(IndexError, match="40 at position 1.*table of 40 rows.*2 of 3"):
        batch(device, [3, 40, -1]).count()


@pytest.mark.parametrize("device", DEVICES)
def test_parts_are_known_again(device: str) -> None:
    ids = torch.tensor([3, 4], device=device)
    made = PlannedBatch([torch.tensor([1], device=device), ids], ROWS, torch.device(device))
    assert made.parts.part_of(ids) == 1
    assert made.parts.part_of(torch.tensor([3], device=device)) is None
    ids[0] = 5
    assert made.parts.part_of(ids) is None


class NumbersOfAGpu(Tensor):
    """Numbers that lie on the pretended GPU."""

    is_cpu, device = False, DEVICE


class PretendedCopies:
    """Copies by the numbers of their handles: those of a GPU, where there is none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: dict[int, list[int]] = {}
        self.complete: set[int] = set()
        self.reads = 0
        copies, numbers = self, itertools.count()

        class Handle:
            """A handle that owns one of these copies."""

            def __init__(self) -> None:
                self._number = next(numbers)

            def number(self) -> int:
                return self._number

            def read(self) -> list[int]:
                copies.reads += 1
                return copies.made[self._number]

            def is_complete(self) -> bool:
                return self._number in copies.complete

            def __del__(self) -> None:
                copies.made.pop(self._number, None)

        monkeypatch.setattr(host_copy, "NumbersHandle", Handle)
        monkeypatch.setattr(host_copy, "numbers_to_host", self.numbers_to_host)

    def numbers_to_host(self, numbers: Tensor, handle: int) -> None:
        self.made[handle] = numbers.tolist()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> PretendedCopies:
    return PretendedCopies(monkeypatch)


def of_a_gpu(*numbers: int) -> Tensor:
    return torch.tensor(numbers).as_subclass(NumbersOfAGpu)


def test_numbers_are_dropped_with_their_object(copies: PretendedCopies) -> None:
    copy, other = HostCopy(of_a_gpu(4, 5, 6)), HostCopy(of_a_gpu(7))
    assert copy.read() == copy.read() == [4, 5, 6]
    assert other.read() == [7]
    del copy
    assert [*copies.made.values()] == [[7]]


def test_a_wait_for_numbers_ends_with_its_time(copies: PretendedCopies) -> None:
    copy = HostCopy(of_a_gpu(1))
    assert not copy.is_complete(0) and not copy.is_complete(2e-3) and not copies.reads
    copies.complete.update(copies.made)
    assert copy.is_complete(0)
    assert HostCopy(torch.tensor([1])).is_complete(0)


def test_an_interrupt_behind_a_copy_leaves_none(
    copies: PretendedCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(numbers: Tensor, handle: int) -> None:
        copies.numbers_to_host(numbers, handle)
        raise KeyboardInterrupt

    monkeypatch.setattr(host_copy, "numbers_to_host", interrupted)
    with pytest.raises(KeyboardInterrupt):
        HostCopy(of_a_gpu(1))
    gc.collect()
    assert not copies.made


def test_a_plan_beside_the_current_stream_is_used_behind_it(streams: RecordedStreams) -> None:
    parts = BatchIds([torch.tensor([1])], ROWS, torch.device("cpu"), "table")
    side = streams.stream("planning")
    streams.use(side)
    streams.work("plan")
    parts.planned_until(side.record_event())  # type: ignore[arg-type]
    streams.work("next plan")
    streams.use(streams.stream("main"))
    parts.join()
    streams.work("use")
    assert streams.before("use") == {"plan"}

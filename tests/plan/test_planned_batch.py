"""A planned batch knows its distinct rows, and those that it has in common with others."""

from __future__ import annotations

import gc
import threading
from collections import defaultdict
from contextlib import suppress
from threading import Barrier, BrokenBarrierError
from typing import Any
from unittest.mock import MagicMock

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
        assert made.brings == len(loaded)
        if padding is not None:  # its row comes with every batch
            loaded[padding] = len(new)
        assert pairs(made.arriving) == loaded
        assert pairs(made.leaving) == {id: old.index(id) for id in old if id not in new}
        both = {new.index(id): old.index(id) for id in new if id in old}
        assert pairs(made.staying) == both
        brought = made.arriving[0][: made.brings].tolist()
        assert brought == sorted(brought)


@pytest.mark.parametrize("device", DEVICES)
def test_many_rows_are_compared(device: str) -> None:
    random = torch.Generator().manual_seed(0)
    lists = [torch.randint(20_000, (9000,), generator=random) for _ in range(2)]
    place = torch.device(device)
    first = PlannedBatch([lists[0].to(place)], 20_000, place)
    second = PlannedBatch([lists[1].to(place)], 20_000, place, after=first)
    old, new = (each.unique() for each in lists)
    assert torch.equal(second.arriving[0].cpu(), new[~torch.isin(new, old)])
    assert torch.equal(second.leaving[0].cpu(), old[~torch.isin(old, new)])
    assert torch.equal(new[second.staying[0].cpu()], old[second.staying[1].cpu()])


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


def test_the_host_reads_numbers_behind_their_copy(
    streams: RecordedStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = torch.zeros(3, dtype=torch.int64), torch.cuda.Event()
    monkeypatch.setattr(host_copy, "_unused", defaultdict(list, {(DEVICE, 3): [pinned]}))
    monkeypatch.setattr(host_copy, "numbers_to_host", lambda numbers, host: host.copy_(numbers))
    streams.work("plan")
    copy = HostCopy(torch.tensor([4, 5, 6]).as_subclass(NumbersOfAGpu))
    streams.work("later")
    assert not copy.have_come(0) and not streams.host
    assert copy.read() == [4, 5, 6] and streams.host == {"plan"}


def test_memory_of_unread_numbers_is_used_again_behind_their_copy(
    streams: RecordedStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = ((torch.zeros(2, dtype=torch.int64), torch.cuda.Event()) for _ in range(2))
    monkeypatch.setattr(host_copy, "_unused", defaultdict(list, {(DEVICE, 2): [second, first]}))
    monkeypatch.setattr(host_copy, "_unread", defaultdict(list))
    monkeypatch.setattr(host_copy, "numbers_to_host", lambda numbers, host: host.copy_(numbers))

    def copied(*numbers: int) -> HostCopy:
        return HostCopy(torch.tensor(numbers).as_subclass(NumbersOfAGpu))

    streams.work("plan")
    made = copied(1, 2)
    assert made._slot is first
    del made
    following = copied(3, 4)
    assert following._slot is second
    monkeypatch.setattr(host_copy, "_unused", defaultdict(list))
    assert host_copy._unread[DEVICE, 2] == [first]
    assert following.read() == [3, 4]  # which waits for the GPU
    host_copy._unused.clear()
    assert copied(5, 6)._slot is first


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Memory of unread numbers, `[1]` each, of which one is enough for a test."""
    slots = [(torch.zeros(1, dtype=torch.int64), MagicMock()) for _ in range(2)]
    monkeypatch.setattr(host_copy, "_unused", defaultdict(list))
    monkeypatch.setattr(host_copy, "_unread", defaultdict(list, {(DEVICE, 1): slots}))
    monkeypatch.setattr(host_copy, "numbers_to_host", lambda numbers, host: host.copy_(numbers))
    return [*slots]


def test_two_threads_that_look_for_memory_at_once_take_two(
    streams: RecordedStreams, unread: list[Any]
) -> None:
    made = []

    def another() -> bool:
        unread[0][1].query = lambda: True
        thread = threading.Thread(target=copied)
        thread.start()
        thread.join()
        return True

    def copied() -> None:
        made.append(HostCopy(torch.tensor([1]).as_subclass(NumbersOfAGpu)))

    unread[0][1].query = another
    copied()
    assert [each._slot for each in made] == [unread[1], unread[0]]


def test_memory_that_two_threads_read_at_once_is_free_once(
    streams: RecordedStreams, unread: list[Any]
) -> None:
    copy, both, found = HostCopy(torch.tensor([7]).as_subclass(NumbersOfAGpu)), Barrier(2), []

    def wait() -> None:
        with suppress(BrokenBarrierError):
            both.wait(0.2)

    unread[0][1].synchronize = wait
    threads = [threading.Thread(target=lambda: found.append(copy.read())) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == [[7], [7]] and host_copy._unused[DEVICE, 1] == unread[:1]


def test_memory_is_never_used_again_if_an_exception_comes_before_the_event(
    streams: RecordedStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = torch.zeros(1, dtype=torch.int64), torch.cuda.Event()
    monkeypatch.setattr(host_copy, "_unused", defaultdict(list, {(DEVICE, 1): [slot]}))
    monkeypatch.setattr(host_copy, "_unread", defaultdict(list))
    monkeypatch.setattr(host_copy, "_lost", [])

    def interrupted(numbers: Tensor, host: Tensor) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(host_copy, "numbers_to_host", interrupted)
    with pytest.raises(KeyboardInterrupt):
        HostCopy(torch.tensor([1]).as_subclass(NumbersOfAGpu))
    gc.collect()
    assert host_copy._lost == [slot] and not host_copy._unread[DEVICE, 1]


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

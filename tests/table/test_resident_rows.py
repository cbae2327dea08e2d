"""File tables with resident rows: bitwise as in memory, for any number of slots and disk errors."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import random
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from conftest import NEEDS_GPU
from file_faults import opened_as
from torch import Tensor, nn, optim
from warm_python import run_warm

import speedtorch
from speedtorch import HostTable
from speedtorch.ops.functions import (
    pinned_scatter,
    resident_begin_find,
    resident_close,
    resident_counts,
    resident_end_find,
    resident_open,
    resident_read_ahead,
    resident_release,
    resident_slots,
    resident_write,
)
from speedtorch.table import resident_rows

ROWS, WIDTH, IDS, STEPS = 120, 4, 12, 25
RECORD = 3 * 4 * WIDTH
SLOTS = {"one": 1, "fewer than a batch": 5, "some": 40, "all": ROWS}
STATE = ("exp_avg", "exp_avg_sq")


def made(folder: Path, slots: int | None, state: Any = STATE, rows: int = ROWS) -> HostTable:
    """A table in memory, or in a file with so many slots."""
    if slots is None:
        table = HostTable(rows, WIDTH, state=state)
    else:
        resident = slots * (1 + len(state)) * 4 * WIDTH
        path = folder / "rows"
        table = HostTable(rows, WIDTH, state=state, memory="file", path=path, resident=resident)
        assert table.report().slots == slots
    return table.normal_(seed=1)


class Trained:
    """A module of a table's rows, and its optimizer: Adam if the table has state."""

    def __init__(self, table: HostTable, lr: float = 0.1, device: str = "cpu") -> None:
        given = {"freeze": False, "device": device}
        self.table, self.module = table, speedtorch.Embedding.from_pretrained(table, **given)
        make = optim.SGD if len(table.fields) == 1 else optim.Adam
        self.optimizer = make(self.module.parameters(), lr=lr)
        if len(table.fields) > 1:
            speedtorch.attach(self.optimizer, self.module)

    def step(self, ids: Tensor, power: int = 1) -> None:
        self.end_step(self.module(ids), power)

    def end_step(self, found: Tensor, power: int = 1) -> None:
        (found**power).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def batches(steps: int = STEPS) -> list[Tensor]:
    """Ids of which few are frequent, one of them the padding."""
    draws = random.Random(3)
    return [
        torch.tensor([int((ROWS - 1) * draws.random() ** 3) for _ in range(IDS)])
        for _ in range(steps)
    ]


def train(table: HostTable, device: str, ways: dict[str, Any]) -> list[Tensor]:
    """Trains and evaluates in turns; what was seen."""
    bag = ways.get("bag", False)
    make = speedtorch.EmbeddingBag if bag else speedtorch.Embedding
    module = make.from_pretrained(
        table, freeze=False, padding_idx=3, device=device, capacity=ways.get("capacity")
    )
    optimizer: optim.Optimizer
    if ways.get("sgd"):
        optimizer = optim.SGD(module.parameters(), lr=0.1)
    else:
        optimizer = optim.Adam(module.parameters(), lr=0.1)
        speedtorch.attach(optimizer, module)
    seen = []
    given = [ids.view(3, -1) if bag else ids for ids in batches()]
    loader = given
    if ways.get("ahead"):
        loader = speedtorch.prefetch(given, module, ids=lambda batch: batch)
    for number, ids in enumerate(loader):
        optimizer.zero_grad()
        if ways.get("announce"):
            module.announce(ids, ids + 1)
        result = module(ids.to(device))
        loss = (result**2).sum()
        if ways.get("announce") or ways.get("twice"):
            loss = loss + (module((ids + 1).to(device)) ** 3).sum()
        loss.backward()
        optimizer.step()
        seen.append(result.detach().cpu())
        if number == 10:
            seen.append(table["weight"].clone())
        if number % 7 == 4:
            with torch.no_grad():
                module.eval()
                seen.append(module(torch.arange(9, device=device).view(3, -1)).cpu())
                module.train()
    return seen


WAYS: dict[str, dict[str, Any]] = {
    "Adam": {},
    "SGD": {"sgd": True},
    "prefetch": {"ahead": True},
    "announce": {"announce": True},
    "two lookups": {"twice": True},
    "capacity": {"capacity": 2 * IDS},
    "bag": {"bag": True},
    "state beside the file": {"state": ()},
}


@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
def test_training_is_that_of_a_table_in_memory(
    ways: dict[str, Any], slots: int, device: str, tmp_path: Path
) -> None:
    state = () if ways.get("sgd") else ways.get("state", STATE)
    expected_table, table = (made(tmp_path, each, state) for each in (None, slots))
    expected, seen = (train(each, device, ways) for each in (expected_table, table))
    assert all(torch.equal(*pair) for pair in zip(expected, seen, strict=True))
    for name in table.fields:
        assert torch.equal(table[name], expected_table[name])
    report = table.report()
    if slots == ROWS:
        assert report.hit_rate > 0.3
    else:
        assert report.reads > 0 < report.writes
    table.flush()
    stored = np.fromfile(tmp_path / "rows", np.float32).reshape(ROWS, -1)
    assert np.array_equal(stored[:, :WIDTH], expected_table.numpy())


def test_rows_of_16_bits(device: str, tmp_path: Path) -> None:
    state = dict.fromkeys(STATE, (WIDTH, torch.bfloat16))
    tables = [
        HostTable(ROWS, WIDTH, torch.bfloat16, state, "plain"),
        HostTable(ROWS, WIDTH, torch.bfloat16, state, "file", path=tmp_path / "r", resident="240B"),
    ]
    stored = dict.fromkeys(["weight", *STATE], torch.bfloat16)
    for table in tables:
        table.normal_(seed=1)
        torch.manual_seed(7)
        module = speedtorch.Embedding(ROWS, WIDTH, _weight=table, stored=stored, device=device)
        optimizer = optim.Adam(module.parameters(), lr=0.1)
        speedtorch.attach(optimizer, module)
        for ids in batches():
            optimizer.zero_grad()
            (module(ids.to(device)) ** 2).sum().backward()
            optimizer.step()
    for name in stored:
        assert torch.equal(*(table[name] for table in tables)) and tables[0][name].any()


def read_whole(table: HostTable, folder: Path, parts: dict[str, Any]) -> list[Callable[[], Any]]:
    """Calls that read rows and write none."""
    table.track_changes()
    return [
        lambda: table.gather(torch.arange(ROWS), "exp_avg"),
        lambda: table.gather(torch.arange(ROWS)),
        lambda: table.changed(table.track_changes()),
        lambda: table.save(folder / "saved.safetensors"),
        lambda: speedtorch.save(folder / "runs", **parts),
        lambda: speedtorch.async_save(folder / "runs", base=1, **parts).result(),
    ]


def test_readers_leave_rows_resident(tmp_path: Path) -> None:
    table, expected = made(tmp_path, ROWS), made(tmp_path, None)
    pair = [Trained(each) for each in (table, expected)]
    parts = {"model": pair[0].module, "optimizer": pair[0].optimizer}
    for read in [lambda: None, *read_whole(table, tmp_path, parts), lambda: None]:
        before = table.report()
        read()
        assert (table.report().rows, table.report().reads) == (before.rows, before.reads)
        for trained in pair:
            for ids in batches(3):
                trained.step(ids, 2)
    assert table.report().rows == table.report().reads  # each row was read once
    assert torch.equal(table["weight"], expected["weight"])
    assert table.report().rows == 0  # the caller may write to the view
    found = speedtorch.HostTable.open(tmp_path / "saved.safetensors")
    assert found.fields == table.fields


def test_a_hook_of_a_save_may_write_rows(tmp_path: Path) -> None:
    table, expected = made(tmp_path, ROWS), made(tmp_path, None)
    for each in (table, expected):
        trained, gradients = Trained(each), list[Tensor]()
        module, optimizer = trained.module, trained.optimizer

        def write(module: speedtorch.Embedding, *_: Any, found: list[Tensor] = gradients) -> None:
            with torch.no_grad():
                module.weight.add_(found[0])
            if len(found) > 2:
                module.table["weight"].mul_(0.5)

        module.register_state_dict_pre_hook(write)
        for ids in [*batches(3), *batches(3)]:
            module(ids).square().sum().backward()
            gradients.append(cast(Tensor, module.weight.grad))
            optimizer.step()
            optimizer.zero_grad()
            speedtorch.save(tmp_path / f"runs {each is table}", model=module, optimizer=optimizer)
    for name in table.fields:
        assert torch.equal(table[name], expected[name])


@pytest.mark.parametrize("ids_on_gpu", [False, True])
def test_prefetch_reads_ahead(ids_on_gpu: bool, device: str, tmp_path: Path) -> None:
    if ids_on_gpu and device == "cpu":
        pytest.skip("needs a GPU")
    table, expected = made(tmp_path, ROWS // 2, ()), made(tmp_path, None, ())
    for each in (table, expected):
        trained = Trained(each, device=device)
        given = [ids.to(device) if ids_on_gpu else ids for ids in batches(9)]
        for _ in range(40):  # a GPU loop may stop planning
            for ids in speedtorch.prefetch(given, trained.module, ids=lambda batch: batch):
                trained.step(ids.to(device), 2)
    assert torch.equal(table["weight"], expected["weight"])
    assert (table.report().read_ahead > 40) != ids_on_gpu


def test_another_reader_sees_the_last_flush(tmp_path: Path) -> None:
    table = made(tmp_path, ROWS, ())
    table.flush()
    before = np.fromfile(tmp_path / "rows", np.float32)
    trained = Trained(table, lr=1.0)
    for ids in batches(3):
        trained.step(ids)
    assert np.array_equal(np.fromfile(tmp_path / "rows", np.float32), before)
    table.flush()
    assert np.array_equal(np.fromfile(tmp_path / "rows", np.float32), table.numpy().ravel())
    assert not np.array_equal(np.fromfile(tmp_path / "rows", np.float32), before)


def test_a_forked_child_writes_no_row_of_its_parent(tmp_path: Path) -> None:
    table = made(tmp_path, ROWS, ())
    trained, first = Trained(table, lr=1.0), table["weight"][5].clone()
    for row in (5, 6):  # the second step brings the row of the first to its slot
        trained.step(torch.tensor([row]))
    if (child := os.fork()) == 0:
        with torch.no_grad():
            seen = trained.module.eval()(torch.tensor([5]))[0]
        table.flush()
        os._exit(0 if torch.equal(seen, first) else 1)
    assert os.waitpid(child, 0)[1] == 0
    stored = np.fromfile(tmp_path / "rows", np.float32).reshape(ROWS, WIDTH)
    assert np.array_equal(stored[5], first.numpy())
    assert torch.equal(table["weight"][5], first - 1)


# ------------------------------------------------------------------------------------------------
# Other users of the table


def trained_beside(
    folder: Path,
    slots: int | None,
    other: Callable[[HostTable, int], object],
    device: str = "cpu",
) -> Tensor:
    """The rows after many steps of one module, with `other` called before each."""
    table = made(folder, slots, ())
    trained, draws = Trained(table, device=device), torch.Generator().manual_seed(0)
    for number in range(500):
        other(table, number)
        trained.step(torch.randint(ROWS, (6,), generator=draws).to(device))
    return table["weight"].clone()


def test_garbage_modules_of_the_table_lose_no_row(tmp_path: Path) -> None:
    def drop_a_module(table: HostTable, number: int) -> None:
        if number % 3 == 0:
            frozen = speedtorch.Embedding.from_pretrained(table)
            frozen.itself = [frozen]

    before = gc.get_threshold()
    gc.set_threshold(20)  # in the middle of exchanges
    try:
        rows = [trained_beside(tmp_path, slots, drop_a_module) for slots in (None, 20)]
    finally:
        gc.set_threshold(*before)
    assert torch.equal(*rows)


@pytest.mark.parametrize("slots", [20, ROWS])
def test_another_thread_that_reads_the_table_loses_no_row(
    slots: int, device: str, tmp_path: Path
) -> None:
    stop = threading.Event()
    threads: list[threading.Thread] = []

    def read_in_a_thread(table: HostTable, number: int) -> None:
        if number:
            return

        def read() -> None:
            frozen = speedtorch.Embedding.from_pretrained(table)
            while not stop.is_set():
                frozen(torch.arange(ROWS))

        threads.append(threading.Thread(target=read))
        threads[-1].start()

    expected = trained_beside(tmp_path, None, lambda *_: None, device)
    try:
        rows = trained_beside(tmp_path, slots, read_in_a_thread, device)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert torch.equal(rows, expected)


def test_a_garbage_cycle_of_weight_and_table_writes_all_rows(tmp_path: Path) -> None:
    table = made(tmp_path, 20, ())
    first = table["weight"].clone()
    module = speedtorch.Embedding.from_pretrained(table, freeze=False)
    optimizer = optim.SGD(module.parameters(), lr=1.0)
    weight: Tensor = module.weight
    del module
    for row in range(5):
        optimizer.zero_grad()
        torch.nn.functional.embedding(torch.tensor([row, row + 1]), weight).sum().backward()
        optimizer.step()
    cycle: list[object] = [weight, table, optimizer]
    cycle.append(cycle)
    del cycle, weight, table, optimizer
    gc.collect()
    stored = np.fromfile(tmp_path / "rows", np.float32).reshape(ROWS, WIDTH)
    expected = first.clone()
    for row in range(5):
        expected[row : row + 2] -= 1
    assert np.array_equal(stored, expected.numpy())


def test_a_process_that_ends_writes_the_rows_in_slots(tmp_path: Path) -> None:
    program = f"""
import torch, speedtorch
table = speedtorch.HostTable(50, 4, memory="file", path={str(tmp_path / "rows")!r}, resident="800B")
module = speedtorch.Embedding.from_pretrained(table, freeze=False)
optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
for row in range(6):
    optimizer.zero_grad()
    module(torch.tensor([row])).sum().backward()
    optimizer.step()
"""
    run_warm("-c", program)
    stored = np.fromfile(tmp_path / "rows", np.float32).reshape(50, 4)
    assert stored[:5].tolist() == [[-1.0] * 4] * 5


def test_a_closed_table_is_the_error_of_a_module(tmp_path: Path) -> None:
    table = made(tmp_path, 5, ())
    module = speedtorch.Embedding.from_pretrained(table)
    table.close()
    with pytest.raises(ValueError, match="this table is closed"):
        module(torch.tensor([1]))


# ------------------------------------------------------------------------------------------------
# Disk errors


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDONLY], ids=["reads", "writes"])
@pytest.mark.parametrize("slots", [14, 60])
def test_a_step_that_the_disk_fails_changes_nothing_and_loses_nothing(
    flags: int, slots: int, tmp_path: Path
) -> None:
    expected, table = (Trained(made(tmp_path, n, ())) for n in (None, slots))
    failed = 0
    for ids in batches():
        with opened_as(tmp_path / "rows", flags):
            try:
                table.module(ids)
            except OSError as error:
                failed += 1
                assert (error.errno, error.filename) == (errno.EBADF, str(tmp_path / "rows"))
                assert "the record of row" in str(error)
        for trained in (expected, table):
            trained.step(ids, 2)
    assert failed >= 4
    assert torch.equal(table.table["weight"], expected.table["weight"])


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDONLY], ids=["reads", "writes"])
@pytest.mark.parametrize("capacity", [None, 20])
def test_a_lookup_of_a_planned_batch_may_be_repeated_after_a_disk_error(
    flags: int, capacity: int | None, tmp_path: Path
) -> None:
    def trained(table: HostTable) -> Tensor:
        given = {"freeze": False, "capacity": capacity}
        module, failed = speedtorch.Embedding.from_pretrained(table, **given), 0
        optimizer = optim.SGD(module.parameters(), lr=0.1)
        pairs = [ids.split(6) for ids in batches()]
        for pair in speedtorch.prefetch(pairs, module, ids=lambda pair: list(pair)):
            optimizer.zero_grad()
            is_file = table.memory == "file"
            with opened_as(tmp_path / "rows", flags) if is_file else nullcontext():
                try:
                    rows = module(pair[0])
                except OSError:
                    failed += 1
                    rows = None
            rows = module(pair[0]) if rows is None else rows
            (rows.square().sum() + module(pair[1]).square().sum()).backward()
            optimizer.step()
        assert failed >= 4 * is_file
        return table["weight"].clone()

    expected, found = (trained(made(tmp_path, slots, ())) for slots in (None, 24))
    assert torch.equal(found, expected)


def test_a_flush_that_the_disk_fails_keeps_the_changes(tmp_path: Path) -> None:
    table = made(tmp_path, 60, ())
    trained, before = Trained(table, lr=1.0), table["weight"][7].clone()
    trained.step(torch.tensor([7]))
    with (
        opened_as(tmp_path / "rows", os.O_RDONLY),
        pytest.raises(OSError, match="writing the record of row 7"),
    ):
        table.flush()
    assert torch.equal(table["weight"][7], before - 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_rows_that_the_disk_failed_at_the_end_of_a_module_are_written_later(
    tmp_path: Path,
) -> None:
    table = made(tmp_path, 20, ())
    first, trained = table["weight"].clone(), Trained(table, lr=1.0)
    for row in range(5):
        trained.step(torch.tensor([row]))
    with opened_as(tmp_path / "rows", os.O_RDONLY):
        del trained
        gc.collect()
    assert torch.equal(table["weight"][:4], first[:4] - 1)


# ------------------------------------------------------------------------------------------------
# Wrong arguments


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"memory": "plain", "resident": 64}, ValueError, "requires memory='file', got memory='pl"),
        ({"resident": 15}, ValueError, "15 B are too few for one row of 16 bytes"),
        ({"resident": "many"}, ValueError, "resident: expected a text such as"),
        ({"resident": 1.5}, TypeError, "resident: expected bytes or a text"),
        ({"resident": 0}, ValueError, "resident: expected more than 0 bytes"),
    ],
)
def test_wrong_arguments_make_no_file(
    arguments: dict[str, Any], kind: type[Exception], message: str, tmp_path: Path
) -> None:
    path = None if "memory" in arguments else tmp_path / "rows"
    with pytest.raises(kind, match=message):
        HostTable(10, WIDTH, **{"memory": "file", "path": path, **arguments})
    assert not (tmp_path / "rows").exists()


WARNING = r"\d+% of the rows of the last 4 .* not among the 20 resident rows .* Increase resident="


@pytest.mark.parametrize("slots", [20, ROWS])
def test_too_few_resident_rows_warn_once(
    slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(resident_rows, "_WINDOW", 4)
    table = made(tmp_path, slots)
    module = speedtorch.Embedding.from_pretrained(table, freeze=False)
    for first in range(20):
        module((torch.arange(10) + 10 * first) % ROWS)
    found = [str(warning.message) for warning in recwarn if warning.category is RuntimeWarning]
    assert len(found) == (slots == 20)
    assert not found or re.search(WARNING, found[0])


def test_a_warning_that_is_an_error_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident_rows, "_WINDOW", 4)
    seen = []
    for table in (made(tmp_path, 20, ()), made(tmp_path, None, ())):
        trained, raised = Trained(table), 0
        for first in range(20):
            ids = (torch.arange(10) + 10 * first) % ROWS
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                try:
                    found = trained.module(ids)
                except RuntimeWarning:
                    raised += 1
                    found = trained.module(ids)
            trained.end_step(found, 2)
        seen.append(table["weight"].clone())
        assert raised == (table.memory == "file")
    assert torch.equal(*seen)


def test_a_mapped_table_has_no_resident_rows(tmp_path: Path) -> None:
    HostTable(3, 1, memory="plain").save(tmp_path / "t.safetensors")
    with pytest.raises(ValueError, match="requires memory='file', got memory='mapped'"):
        HostTable.open(tmp_path / "t.safetensors", "mapped", resident="1MB")


def test_a_saved_table_is_read_into_a_file_with_resident_rows(tmp_path: Path) -> None:
    saved = made(tmp_path, None)
    saved.save(tmp_path / "t.safetensors")
    path = tmp_path / "rows"
    with HostTable.open(tmp_path / "t.safetensors", "file", path=path, resident="96B") as table:
        assert torch.equal(table["weight"], saved["weight"]) and table.report().slots == 2


@pytest.mark.parametrize("close", [False, True])
def test_only_an_open_table_with_slots_has_a_report(close: bool, tmp_path: Path) -> None:
    table = made(tmp_path, 3 if close else None)
    if close:
        table.close()
    with pytest.raises(ValueError, match="is closed" if close else "only a nonempty table"):
        table.report()


def test_a_cache_needs_rows_in_memory(tmp_path: Path) -> None:
    table = made(tmp_path, 5)
    others = [speedtorch.Embedding(9, WIDTH) for _ in range(2)]
    model = nn.Sequential(others[0], speedtorch.Embedding.from_pretrained(table), others[1])
    with pytest.raises(NotImplementedError, match="Use resident= or cache=, not both"):
        speedtorch.cache(model, "1KB")
    assert [other.trained_rows.cache_bytes for other in others] == [None, None]
    with pytest.raises(NotImplementedError, match="Use resident= or cache=, not both"):
        speedtorch.Embedding(ROWS, WIDTH, _weight=table, cache="1KB")


def test_a_table_without_rows_has_no_slots(tmp_path: Path) -> None:
    with HostTable(0, WIDTH, memory="file", path=tmp_path / "rows", resident="1KB") as table:
        assert speedtorch.Embedding.from_pretrained(table)(torch.empty(0).long()).shape == (
            0,
            WIDTH,
        )


# ------------------------------------------------------------------------------------------------
# The ops


FOUND_BY_GPU: list[bool] = []


def slots_of(handle: int, ids: Tensor, changing: int, lease: int) -> list[Tensor]:
    """The slots of a new lease on the CPU, and the failure. The ids may be on a GPU.

    FOUND_BY_GPU tells of each call for a GPU whether all rows had slots.
    """
    if ids.is_cuda:
        slots = resident_begin_find(handle, ids, changing, lease)
        FOUND_BY_GPU.append(resident_end_find(handle, lease))
        if FOUND_BY_GPU[-1]:
            return [slots.cpu(), torch.zeros(2)]
    return list(resident_slots(handle, ids.cpu(), changing, lease))


def found_in(handle: int, ids: Tensor, changing: int, lease: int = 1) -> list[Tensor]:
    """The slots of a lease that ends at once, and the failure."""
    try:
        return slots_of(handle, ids, changing, lease)
    finally:
        resident_release(handle, lease)


def index_of(slots: int) -> Tensor:
    """Memory for an index, with bytes that mean nothing."""
    return torch.full(resident_rows.index_shape(slots), 77, dtype=torch.uint8)


Open = Callable[[int, int], tuple[int, Tensor, Path]]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Makes a file of records, and slots; returns the handle, the slots and the file."""
    closers: list[Callable[[], object]] = []
    FOUND_BY_GPU.clear()

    def make(rows: int, slots: int) -> tuple[int, Tensor, Path]:
        path = tmp_path / f"records {len(closers)}"
        np.arange(rows, dtype=np.int64).repeat(2).tofile(path)
        descriptor = os.open(path, os.O_RDWR)
        memory = speedtorch.empty((slots, 16), dtype=torch.uint8).zero_()
        index = speedtorch.empty(resident_rows.index_shape(slots), dtype=torch.uint8).fill_(77)
        handle = resident_open(memory, index, descriptor, rows)
        closers.extend((lambda: resident_close(handle), lambda: os.close(descriptor)))
        return handle, memory.view(torch.int64), path

    yield make
    for close in closers:
        close()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("slots", [1, 2, 7, 64, 700])
def test_slots_have_the_records_of_their_rows(
    opened: Open, slots: int, seed: int, device: str
) -> None:
    draws = random.Random(seed)
    rows = 400
    handle, memory, path = opened(rows, slots)
    mirror = np.arange(rows, dtype=np.int64)
    for call in range(200):
        count = draws.randint(0, min(slots, 60))
        ids = [draws.randrange(rows) for _ in range(count)]
        changing = len(dict.fromkeys(ids)) if draws.random() < 0.7 else 0
        ids = [*dict.fromkeys(ids)] if changing else ids
        changing = draws.randint(0, changing)
        given = torch.tensor(ids, dtype=torch.int64, device=device)
        found, failure = found_in(handle, given, changing)
        assert failure.tolist()[0] == 0
        assert memory[found, 0].tolist() == memory[found, 1].tolist() == mirror[ids].tolist()
        value = 1000 * call
        memory[found[:changing]] = torch.arange(changing)[:, None] + value
        mirror[ids[:changing]] = np.arange(changing) + value
        if draws.random() < 0.1:
            some = torch.tensor(draws.sample(range(rows), 50))
            assert resident_write(handle, some, False).tolist()[0] == 0
            stored = np.fromfile(path, np.int64).reshape(-1, 2)
            assert np.array_equal(stored[some, 0], mirror[some])
        if draws.random() < 0.05:
            assert resident_write(handle, None, True).tolist()[0] == 0
            assert np.array_equal(np.fromfile(path, np.int64).reshape(-1, 2)[:, 1], mirror)
            assert resident_counts(handle).tolist()[0] == 0
    resident_write(handle, None, False)
    assert np.array_equal(np.fromfile(path, np.int64).reshape(-1, 2)[:, 0], mirror)
    if device == "cuda":
        assert False in FOUND_BY_GPU and (slots < 700 or True in FOUND_BY_GPU)


@NEEDS_GPU
def test_a_gpu_that_misses_a_row_accesses_no_record(opened: Open) -> None:
    handle, memory, path = opened(10, 3)
    for ids in ([4, 2], []):
        resident_begin_find(handle, torch.tensor(ids, device="cuda").long(), 0, 0)
        assert not resident_end_find(handle, 0)
    assert resident_counts(handle).tolist() == [0] * 7
    found_in(handle, torch.tensor([2, 4, 5]), 2)
    memory.fill_(7)
    resident_begin_find(handle, torch.tensor([4, 1], device="cuda"), 0, 0)
    assert not resident_end_find(handle, 0)
    assert np.fromfile(path, np.int64).tolist() == np.arange(10).repeat(2).tolist()
    found = resident_begin_find(handle, torch.tensor([4, 2, 5], device="cuda"), 1, 0)
    assert resident_end_find(handle, 0) and resident_end_find(handle, 0)
    assert sorted(found.tolist()) == [0, 1, 2] and (memory == 7).all()
    resident_release(handle, 0)
    assert not resident_end_find(handle, 0)
    assert resident_counts(handle).tolist()[1:3] == [3, 3]


@NEEDS_GPU
def test_nobody_waits_for_slots_if_all_rows_have_one(opened: Open) -> None:
    handle, memory, path = opened(10, 10)
    found_in(handle, torch.arange(10), 0)
    ids = torch.tensor([7, 2, 5], device="cuda")
    for lease in range(3):
        torch.cuda._sleep(int(2e8))  # type: ignore[no-untyped-call]
        slots = resident_begin_find(handle, ids, 2, lease)
        assert resident_end_find(handle, lease)
        assert not torch.cuda.current_stream().query()
        if lease == 1:  # slots that are still searched are kept
            assert resident_write(handle, None, True).tolist()[0] == 0
            assert resident_counts(handle).tolist()[0] == 3
        resident_release(handle, lease)
        assert memory[slots.cpu(), 0].tolist() == [7, 2, 5]
        found_in(handle, torch.arange(10), 0)
        assert resident_write(handle, None, False).tolist()[0] == 0  # no row is changed now
    memory[slots.cpu()] = 99
    assert resident_counts(handle).tolist()[1] == 3 + 10 + 3 + 3 + 3 + 10
    slots = resident_begin_find(handle, ids, 2, 3)
    resident_release(handle, 3)
    assert resident_write(handle, None, True).tolist()[0] == 0  # the kernel has marked the changes
    stored = np.fromfile(path, np.int64).reshape(-1, 2)[:, 0].tolist()
    assert stored == [0, 1, 99, 3, 4, 5, 6, 99, 8, 9]


@NEEDS_GPU
@pytest.mark.parametrize("writes", [False, True])
def test_slots_that_a_gpu_found_are_kept_without_its_end(opened: Open, writes: bool) -> None:
    handle, memory, path = opened(10, 3)
    found_in(handle, torch.tensor([4, 5, 6]), 0)
    found = resident_begin_find(handle, torch.tensor([4, 5], device="cuda"), 1, 2)
    if writes:  # another thread, before the change is there
        assert resident_write(handle, None, True).tolist()[0] == 0
    assert found_in(handle, torch.tensor([7, 8]), 0)[1].tolist() == [errno.EBUSY, 8]
    assert resident_end_find(handle, 2)
    memory[found[0].cpu()] = 99
    resident_release(handle, 2)
    assert found_in(handle, torch.tensor([7, 8, 9]), 0)[1].tolist()[0] == 0
    assert np.fromfile(path, np.int64).reshape(-1, 2)[4:6].tolist() == [[99, 99], [5, 5]]


def test_many_records_are_read_at_once(opened: Open) -> None:
    handle, memory, _ = opened(5000, 3000)
    for _ in range(3):
        ids = torch.randperm(5000)[:3000]
        slots, failure = found_in(handle, ids, 0)
        assert failure.tolist()[0] == 0
        assert torch.equal(memory[slots], ids[:, None].expand(-1, 2))


def test_a_row_that_two_threads_find_counts_once(opened: Open) -> None:
    once, twice = (opened(30_000, 10_000) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        ids = (torch.rand(5000, generator=generator) ** 2 * 30_000).long().unique()
        both = torch.cat([ids, ids.flip(0)])
        found = [found_in(once[0], ids, 0)[0], found_in(twice[0], both, len(ids))[0]]
        assert torch.equal(found[1][: len(ids)], found[1][len(ids) :].flip(0))
        assert torch.equal(found[0], found[1][: len(ids)])  # the same rows were evicted
        assert torch.equal(twice[1][found[1], 0], both)
    assert found_in(twice[0], torch.arange(10_000), 0)[1].tolist()[0] == 0  # no slot is kept


def test_records_are_read_ahead(opened: Open) -> None:
    handle, memory, path = opened(50_000, 3000)
    found_in(handle, torch.arange(5), 0)
    ids = torch.randperm(50_000)[:3000]
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    invalid = torch.tensor([-1, -(2**63), 2**63 - 1, 2**60, 50_000])
    resident_read_ahead(handle, torch.cat([ids, ids[:9], invalid]))
    resident_read_ahead(handle, torch.arange(5))  # all are in slots
    slots, failure = found_in(handle, ids, 0)  # while the threads read
    assert failure.tolist()[0] == 0
    assert torch.equal(memory[slots], ids[:, None].expand(-1, 2))
    ahead = resident_counts(handle).tolist()[6]
    missing = len(ids) - int((ids < 5).sum())
    assert missing < ahead <= missing + 3
    for _ in range(50):  # some are skipped, because earlier ones still read
        resident_read_ahead(handle, torch.arange(6, 40_000))
    resident_close(handle)  # the threads continue


def test_batches_are_not_read_ahead_where_none_has_a_miss(opened: Open) -> None:
    handle, _, _ = opened(1000, 20)
    for calls, ahead in ((16, 10), (17, 0)):
        for _ in range(calls):  # the first reads a record
            found_in(handle, torch.tensor([calls]), 0)
        before = resident_counts(handle).tolist()[6]
        resident_read_ahead(handle, torch.arange(500, 510))
        assert resident_counts(handle).tolist()[6] - before == ahead


def cached(path: Path, rows: Tensor) -> list[bool]:
    """Whether records of 16 bytes are in the page cache."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        data = np.frombuffer(mapped, np.uint8)
        pages = np.zeros(-(-len(data) // mmap.PAGESIZE), np.uint8)
        address, size = ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(len(data))
        assert ctypes.CDLL(None).mincore(address, size, ctypes.c_void_p(pages.ctypes.data)) == 0
        del data
        return [bool(pages[16 * row // mmap.PAGESIZE] & 1) for row in rows.tolist()]


def test_pages_of_records_that_will_be_written_are_read_ahead(opened: Open) -> None:
    """A write of part of a page reads the page first, in ext4 one page at a time."""
    handle, _, path = opened(100_000, 20)
    changed = torch.arange(0, 20_000, 1000)
    found_in(handle, changed, 20)
    for _ in range(2):  # less used rows leave first
        found_in(handle, changed[10:], 0)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if any(cached(path, changed)):
        pytest.skip("the file system cannot drop pages")
    for first in (50_000, 90_000):  # the next batch, and the batch after it
        resident_read_ahead(handle, torch.arange(first, first + 5000, 1000))
    end = time.monotonic() + 30
    while not all(cached(path, changed[:10])):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert not any(cached(path, changed[10:]))


def test_a_file_that_was_cut_off_is_an_error(opened: Open) -> None:
    handle, memory, path = opened(10, 4)
    os.truncate(path, 50)
    found, failure = found_in(handle, torch.tensor([2, 3]), 0)
    assert failure.tolist() == [errno.EIO, 3]
    found, failure = found_in(handle, torch.tensor([2]), 0)
    assert failure.tolist()[0] == 0 and memory[found].tolist() == [[2, 2]]


def test_a_full_disk_is_an_error_and_the_slot_keeps_its_row() -> None:
    descriptor = os.open("/dev/full", os.O_RDWR)
    memory = torch.zeros(1, 16, dtype=torch.uint8)
    handle = resident_open(memory, index_of(1), descriptor, 10)
    (slot,), _ = found_in(handle, torch.tensor([5]), 1)
    memory[slot] = 7
    assert found_in(handle, torch.tensor([6]), 0)[1].tolist() == [errno.ENOSPC, 5]
    assert resident_write(handle, None, True).tolist() == [errno.ENOSPC, 5]
    assert found_in(handle, torch.tensor([5]), 0)[1].tolist()[0] == 0
    assert memory.tolist() == [[7] * 16] and resident_counts(handle).tolist()[0] == 1
    resident_close(handle)
    os.close(descriptor)


@NEEDS_GPU
def test_a_gpu_finds_and_marks_what_the_host_does(opened: Open) -> None:
    rows, generator = 50_000, torch.Generator().manual_seed(2)
    host, gpu = (opened(rows, 12_000) for _ in range(2))
    for call in range(60):
        ids = (torch.rand(3000, generator=generator) ** 3 * 600).long().unique()
        changing = call * 7 % len(ids)
        expected, failure = found_in(host[0], ids, changing)
        assert failure[0] == 0
        slots, failure = found_in(gpu[0], ids.cuda(), changing)
        assert failure[0] == 0 and torch.equal(slots, expected)  # the same rows were evicted
        for handle, memory, path in (host, gpu):
            memory[slots[:changing]] = call
            if call % 13 == 5:  # few slots keep their rows
                assert found_in(handle, torch.arange(30_000, 41_000), 0)[1][0] == 0
            if call % 9 == 8:
                assert resident_write(handle, None, call % 2 == 0)[0] == 0
                assert np.array_equal(np.fromfile(path, np.int64), np.fromfile(host[2], np.int64))
    assert 5 < sum(FOUND_BY_GPU) < 55
    numbers = [resident_counts(each[0])[:5].tolist() for each in (host, gpu)]
    assert numbers[0] == numbers[1]


@NEEDS_GPU
@pytest.mark.parametrize("forgets", [False, True])
def test_a_write_waits_for_exchanges_whose_lease_has_ended(opened: Open, forgets: bool) -> None:
    handle, memory, path = opened(10, 3)
    found_in(handle, torch.tensor([4, 5, 6]), 0)
    gpu = torch.device("cuda", torch.cuda.device_count() - 1)  # which need not be the current one
    slots = resident_begin_find(handle, torch.tensor([4, 5], device=gpu), 1, 2)
    assert resident_end_find(handle, 2)
    with torch.cuda.device(gpu):
        torch.cuda._sleep(int(2e8))  # type: ignore[no-untyped-call]
        pinned_scatter(memory, slots[:1], torch.full((1, 2), 99, device=gpu))
    resident_release(handle, 2)
    assert resident_write(handle, None, forgets).tolist()[0] == 0
    assert np.fromfile(path, np.int64).reshape(-1, 2)[4:6].tolist() == [[99, 99], [5, 5]]
    speedtorch.synchronize(gpu)


@NEEDS_GPU
def test_a_lease_may_end_before_its_search(opened: Open) -> None:
    handle, _, _ = opened(10, 3)
    found_in(handle, torch.tensor([4, 5, 6]), 0)
    ids = torch.tensor([4, 9, 7], device="cuda")  # a copy would wait for the GPU
    for row, of_row in zip((4, 9), ids.split(1), strict=False):
        torch.cuda._sleep(int(2e8))  # type: ignore[no-untyped-call]
        resident_begin_find(handle, of_row, 1, row)
        resident_release(handle, row)
        assert not resident_end_find(handle, row)
    assert found_in(handle, torch.tensor([7, 8, 9]), 0)[1].tolist()[0] == 0  # no slot is kept
    torch.cuda._sleep(int(2e8))  # type: ignore[no-untyped-call]
    resident_begin_find(handle, ids[2:], 1, 1)
    resident_close(handle)


@NEEDS_GPU
def test_a_gpu_finds_nothing_in_an_index_that_it_cannot_access(tmp_path: Path) -> None:
    memory, index = torch.zeros(2, 8, dtype=torch.uint8), index_of(2)
    (tmp_path / "records").write_bytes(bytes(64))
    with (tmp_path / "records").open("r+b") as file:
        handle = resident_open(memory, index, file.fileno(), 8)
    found_in(handle, torch.tensor([3]), 0)
    assert found_in(handle, torch.tensor([3], device="cuda"), 0)[1].tolist() == [0, 0]
    assert FOUND_BY_GPU[-1] is False
    resident_close(handle)


def test_a_lease_keeps_its_slots_and_their_changes(opened: Open, device: str) -> None:
    handle, memory, path = opened(10, 3)
    assert found_in(handle, torch.tensor([4, 5]), 0)[1].tolist()[0] == 0  # a GPU finds only hits
    slots, _ = slots_of(handle, torch.tensor([4, 5], device=device), 1, 2)
    assert [True] * (device == "cuda") == FOUND_BY_GPU
    assert resident_write(handle, None, True).tolist()[0] == 0  # before the change is there
    assert found_in(handle, torch.tensor([6]), 0)[1].tolist()[0] == 0
    assert found_in(handle, torch.tensor([7, 8]), 0)[1].tolist() == [errno.EBUSY, 8]
    memory[slots[0]] = 99
    resident_release(handle, 2)
    resident_release(handle, 2)
    assert found_in(handle, torch.tensor([7, 8, 9]), 0)[1].tolist()[0] == 0
    assert np.fromfile(path, np.int64).reshape(-1, 2)[4:6].tolist() == [[99, 99], [5, 5]]


def test_a_lease_whose_begin_was_interrupted_ends_without_an_error() -> None:
    resident_rows.Lease.__new__(resident_rows.Lease).release()


def test_used_rows_stay_longer_than_others(opened: Open) -> None:
    handle, _, _ = opened(1000, 20)
    frequent = torch.arange(10)
    for call in range(60):
        found_in(handle, frequent, 0)
        found_in(handle, torch.arange(100 + 5 * call, 105 + 5 * call), 0)
    _, hits, misses, reads, *_ = resident_counts(handle).tolist()
    assert reads == misses == 10 + 5 * 60 and hits == 10 * 59


def freed(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor whose storage has no memory."""
    tensor = torch.zeros(shape, dtype=dtype)
    tensor.untyped_storage().resize_(0)
    return tensor


def test_memory_that_was_freed_is_refused(opened: Open) -> None:
    handle, _, _ = opened(10, 4)
    rows, slots = freed(2), freed(4, 8, dtype=torch.uint8)
    index = freed(*resident_rows.index_shape(4), dtype=torch.uint8)
    for name, call in {
        "resident_open: slots": lambda: resident_open(slots, index_of(4), 0, 1),
        "resident_open: index": lambda: resident_open(torch.zeros_like(slots), index, 0, 1),
        "resident_slots: rows": lambda: resident_slots(handle, rows, 0, 1),
        "resident_begin_find: rows": lambda: resident_begin_find(handle, rows, 0, 1),
        "resident_read_ahead: rows": lambda: resident_read_ahead(handle, rows),
        "resident_write: rows": lambda: resident_write(handle, rows, False),
    }.items():
        with pytest.raises(ValueError, match=f"{name} needs .* of storage, but its storage has 0,"):
            call()


@NEEDS_GPU
def test_a_graph_cannot_hold_a_search(opened: Open) -> None:
    handle, _, _ = opened(10, 4)
    ids = torch.tensor([4], device="cuda")
    expected = pytest.raises(RuntimeError, match="begin_find: not supported while a CUDA graph")
    with expected, torch.cuda.graph(torch.cuda.CUDAGraph()):
        resident_begin_find(handle, ids, 0, 1)
    assert found_in(handle, ids, 0)[1].tolist()[0] == 0


def test_wrong_arguments_of_the_ops(opened: Open) -> None:
    handle, memory, _ = opened(10, 4)
    with pytest.raises(ValueError, match="no open rows have the handle -1"):
        found_in(-1, torch.arange(2), 0)
    with pytest.raises(ValueError, match="no open rows have the handle -1"):
        resident_end_find(-1, 0)
    with pytest.raises(ValueError, match="resident_slots: rows"):
        found_in(handle, torch.arange(5), 0)
    with pytest.raises(ValueError, match="resident_slots: changing"):
        found_in(handle, torch.arange(2), 3)
    with pytest.raises(ValueError, match="rows must be"):
        resident_write(handle, torch.arange(2).int(), False)
    with pytest.raises(ValueError, match="no open rows have the handle -1"):
        resident_read_ahead(-1, torch.arange(2))
    with pytest.raises(ValueError, match="resident_read_ahead: rows must be"):
        resident_read_ahead(handle, torch.arange(2).int())
    with pytest.raises(ValueError, match="slots must be uint8"):
        resident_open(memory, index_of(10), 0, 1)
    with pytest.raises(ValueError, match="rows must be on a GPU"):
        resident_begin_find(handle, torch.arange(2), 0, 0)
    slots, index = torch.zeros(4, 8, dtype=torch.uint8), index_of(4)
    with pytest.raises(ValueError, match="index must be uint8"):
        resident_open(slots, index.int(), 0, 1)
    with pytest.raises(ValueError, match=r"index has shape \[5, 32\], expected \[6, 32\]"):
        resident_open(slots, index_of(3), 0, 1)
    with pytest.raises(ValueError, match="index must be aligned to 16 bytes"):
        resident_open(slots, torch.zeros(193, dtype=torch.uint8)[1:].view(6, 32), 0, 1)
    assert resident_counts(handle).tolist()[0] == 0

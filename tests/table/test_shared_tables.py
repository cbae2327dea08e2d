"""Tables in memory of several processes: one copy, disjoint writers, versions, ended processes."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from cuda_calls import PretendedDriver
from file_faults import fail
from interrupts import every_interrupt, source_files
from ordinary_run import soaked
from rank_processes import warm_context
from table_processes import (
    Rows,
    counts_bytes,
    ends_while_it_writes,
    owns,
    random_work,
    received,
    smaps,
    smaps_of,
    spawned,
    train,
    trains,
    works_at_random,
    writes_versions,
)
from torch import Tensor

import speedtorch
from speedtorch import HostTable
from speedtorch.memory import host_memory, shared_memory
from speedtorch.table.table_handle import TableHandle


def small(**how: object) -> HostTable:
    """Ten rows of four columns, that several processes could share."""
    return HostTable(10, 4, memory="shared", **how)  # type: ignore[arg-type]


@pytest.fixture
def table() -> HostTable:
    return small()


def sent(table: HostTable) -> TableHandle:
    """The handle that another process would receive."""
    handle: TableHandle = pickle.loads(pickle.dumps(table.share()))
    return handle


# One process


def test_a_shared_table_is_as_any_other() -> None:
    table = small(state=("m",)).normal_(seed=3)
    plain = HostTable(10, 4, state=("m",), memory="plain").normal_(seed=3)
    assert table.memory == "shared" and "80 bytes" not in repr(table) and "shared" in repr(table)
    assert torch.equal(table.record, plain.record)
    assert (table.writable, table.memory_reason, table.device.type) == (True, "", "cpu")


def test_tables_of_handles_have_the_same_rows() -> None:
    table = small(state={"half": (2, torch.float16)})
    handles = pickle.loads(pickle.dumps([table.share(), table.share()]))
    other, last = map(HostTable.from_handle, handles)
    assert (other.fields, other.record_bytes) == (table.fields, table.record_bytes)
    other.scatter(torch.tensor([3]), torch.full((1, 2), 7.0, dtype=torch.float16), "half")
    assert table["half"][3].tolist() == last["half"][3].tolist() == [7, 7]
    other.close()
    table.fill_(2)
    assert table["weight"].sum() == 80


@pytest.mark.parametrize("rows", [0, 1])
def test_tables_of_few_rows_are_shared(rows: int) -> None:
    table = HostTable(rows, 1, memory="shared")
    other = HostTable.from_handle(sent(table)).fill_(5)
    assert table["weight"].flatten().tolist() == other["weight"].flatten().tolist() == [5] * rows
    assert other.version == 0


def test_its_owner_alone_may_open_the_memory_and_nobody_may_cut_it(table: HostTable) -> None:
    descriptor = table._open_placement().shared._descriptor.fileno()
    assert stat.S_IMODE(os.fstat(descriptor).st_mode) == 0o600
    for size in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)


def test_the_memory_is_taken_whole_and_goes_with_the_last_that_has_it() -> None:
    table = HostTable(1 << 18, 16, memory="shared")
    status = os.fstat(table._open_placement().shared._descriptor.fileno())
    assert 0 <= status.st_blocks * 512 - table.nbytes <= 1 << 16
    before = set(os.listdir("/proc/self/fd"))
    handle = table.share()
    table.close()
    other = HostTable.from_handle(handle)
    del handle
    assert other["weight"].sum() == 0
    other.close()
    del other, table
    assert len(set(os.listdir("/proc/self/fd"))) < len(before)
    assert smaps_of(status.st_ino, "Size")["Size"] == 0


def test_what_does_not_fit_is_refused_in_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 100)
    with pytest.raises(MemoryError, match=r"shared memory: 8,192 bytes are needed and 100 are"):
        small()


def test_memory_that_the_system_does_not_give_is_a_memory_error() -> None:
    before = os.listdir("/proc/self/fd")
    refused = mock.Mock(side_effect=OSError(28, "No space left on device"))
    with (
        mock.patch.object(shared_memory.calls, "reserve", refused),
        pytest.raises(MemoryError, match="could not reserve 8,192 bytes"),
    ):
        small()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_memory_that_cannot_be_mapped_is_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = small().share()
    before = os.listdir("/proc/self/fd")
    fail(monkeypatch, "map", code=errno.ENOMEM)
    with pytest.raises(OSError, match="Cannot allocate memory") as raised:
        HostTable.from_handle(handle)
    assert len(os.listdir("/proc/self/fd")) == len(before)
    other = [os.open("/dev/null", os.O_RDONLY) for _ in before]  # one of the same number
    del raised
    gc.collect()
    for each in other:
        os.close(each)


def test_an_interrupt_at_any_line_leaves_no_lock_and_no_descriptor(table: HostTable) -> None:
    def work(_: None) -> None:
        other = HostTable.from_handle(sent(table))
        with other.writing():
            pass
        other.read_consistently(int)
        other.begin_state("weight", torch.zeros(4))

    work(None)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    files = source_files("memory/shared_memory.py")
    for _ in every_interrupt(lambda: None, work, files=files):
        with table.writing():
            pass
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == before
        assert table.read_consistently(lambda: True, timeout_s=1)


def test_a_closed_table_is_not_shared_and_closing_twice_is_fine(table: HostTable) -> None:
    handle = sent(table)
    table.close()
    table.close()
    with pytest.raises(ValueError, match="this table is closed"):
        table.share()
    with pytest.raises(ProcessLookupError, match=r"has closed it or has ended\. Call share"):
        HostTable.from_handle(handle)


def test_a_table_of_one_process_is_not_shared() -> None:
    table = HostTable(2, 1, memory="plain")
    for use in (table.share, lambda: table.version, lambda: table.read_consistently(table.settle)):
        with pytest.raises(ValueError, match="memory is 'plain', but only memory="):
            use()
    assert not table.was_shared
    with pytest.raises(ValueError, match="Create the table with memory='shared'"), table.writing():
        pass
    with pytest.raises(TypeError, match="handle: expected the result of table.share"):
        HostTable.from_handle(table)  # type: ignore[arg-type]


OTHER = mock.Mock(return_value="other")
REFUSED = mock.Mock(side_effect=PermissionError(13, "Permission denied"))


@pytest.mark.parametrize(
    ("function", "pretended", "error", "says"),
    [
        ("_boot", OTHER, ValueError, "another machine, or this machine has since restarted"),
        ("_namespace", OTHER, ValueError, "a process of another container"),
        ("_Descriptor.file", OTHER, ProcessLookupError, "has closed it or has ended"),
        ("_start_of", OTHER, ProcessLookupError, "has closed it or has ended"),
        ("_Descriptor", REFUSED, PermissionError, "belongs to another user"),
    ],
)
def test_a_handle_of_another_machine_or_user_raises(
    table: HostTable,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    pretended: mock.Mock,
    error: type[Exception],
    says: str,
) -> None:
    handle = sent(table)
    monkeypatch.setattr(f"{shared_memory.__name__}.{function}", pretended)
    with pytest.raises(error, match=says):
        HostTable.from_handle(handle)


@pytest.mark.parametrize("what", ["socket", "folder"])
def test_a_descriptor_of_another_file_raises(what: str, table: HostTable) -> None:
    number = table._open_placement().shared._descriptor.fileno()
    handle = sent(table)
    table.close()
    opened = socket.socket().detach() if what == "socket" else os.open("/", os.O_RDONLY)
    assert os.dup2(opened, number) == number
    with pytest.raises(ProcessLookupError, match="has closed it or has ended"):
        HostTable.from_handle(handle)
    for each in {opened, number}:
        os.close(each)


def test_a_handle_of_another_layout_raises(table: HostTable) -> None:
    with pytest.raises(ValueError, match="Use one version of speedtorch in all processes"):
        HostTable.from_handle(table.share()._replace(record_bytes=32))


def test_a_system_without_such_memory_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(RuntimeError, match="memory='shared' needs memfd_create"):
        small()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_shared_table_of_a_module_is_the_trained_one(when: str) -> None:
    module = speedtorch.Embedding(10, 4, memory="shared")
    others = [HostTable.from_handle(module.table.share())] if when == "before" else []
    first = module.table["weight"].clone() if others else torch.zeros(10, 4)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    speedtorch.attach(optimizer, module)
    module(torch.arange(10)).sum().backward()
    optimizer.step()
    (other,) = others or [HostTable.from_handle(module.table.share())]
    assert torch.equal(module.table["weight"], other["weight"])
    assert not torch.equal(first, other["weight"])
    if not others:  # the table had no state when it was shared
        assert other["exp_avg"].tolist() == [[pytest.approx(0.1)] * 4] * 10
    assert copy.deepcopy(module).table.memory == "shared"


def adagrad(table: HostTable, first: float) -> None:
    """Attaches an Adagrad whose sums begin so, in a module as of another process."""
    module = speedtorch.Embedding.from_pretrained(HostTable.from_handle(table.share()), False)
    optimizer = torch.optim.Adagrad(module.parameters(), initial_accumulator_value=first)
    speedtorch.attach(optimizer, module)


@pytest.mark.filterwarnings("error")
def test_state_begins_once_for_all_processes() -> None:
    table = small(state=("sum",))
    adagrad(table, 0.5)
    assert (table["sum"] == 0.5).all()
    table["sum"][3] = 7
    adagrad(table, 0.5)
    assert table["sum"][:, 0].tolist() == [0.5] * 3 + [7] + [0.5] * 6
    with pytest.raises(RuntimeError, match="state 'sum' of this shared table was initi"):
        adagrad(table, 0.25)
    with table.writing():
        adagrad(table, 0.5)


def test_an_optimizer_that_has_not_stepped_saves_shared_state(tmp_path: Path) -> None:
    table = HostTable(9, 2, state=["exp_avg", "exp_avg_sq"], memory="shared")
    first, other = (
        speedtorch.Embedding.from_pretrained(HostTable.from_handle(handle), freeze=False)
        for handle in [table.share()] * 2
    )
    optimizers = [torch.optim.Adam(module.parameters()) for module in (first, other)]
    for module, optimizer in zip((first, other), optimizers, strict=True):
        speedtorch.attach(optimizer, module)
    first(torch.tensor([3])).sum().backward()
    optimizers[0].step()
    table.settle()
    first.table.settle()
    expected = table["exp_avg"].clone()
    assert torch.equal(optimizers[1].state_dict()["state"][0]["exp_avg"], expected)
    speedtorch.save(tmp_path, model=other, optimizer=optimizers[1])
    table["exp_avg"].zero_()
    speedtorch.load(tmp_path, model=other, optimizer=optimizers[1])
    assert expected.any() and torch.equal(table["exp_avg"], expected)


def test_settings_that_need_other_first_state_raise_before_the_first_step() -> None:
    table = HostTable(9, 2, state=["prev", "step_size"], memory="shared")
    module = speedtorch.Embedding.from_pretrained(table, freeze=False)
    optimizer = torch.optim.Rprop(module.parameters(), lr=0.01)
    speedtorch.attach(optimizer, module)
    optimizer.param_groups[0]["lr"] = 0.1  # at which plain torch would begin
    module(torch.tensor([3])).sum().backward()
    with pytest.raises(RuntimeError, match="'step_size' of this shared table was initialized with"):
        optimizer.step()
    assert not module.weight.detach().any()


def test_loading_a_fresh_state_begins_it_anew_for_all_processes() -> None:
    table = small(state=("sum",))
    module = speedtorch.Embedding.from_pretrained(table, freeze=False)
    optimizer = torch.optim.Adagrad(module.parameters())
    fresh = optimizer.state_dict()
    speedtorch.attach(optimizer, module)
    module(torch.tensor([3])).sum().backward()
    optimizer.step()
    assert table["sum"].any()
    optimizer.load_state_dict({**fresh, "state": {}})
    assert not table["sum"].any()


def test_state_that_was_loaded_is_not_begun(tmp_path: Path) -> None:
    HostTable(10, 4, state=("sum",), memory="plain").fill_(3, "sum").save(
        tmp_path / "t.safetensors"
    )
    read = HostTable.open(tmp_path / "t.safetensors", "shared")
    assert read.share().was_read
    other = small(state=("sum",))
    handle = other.share()
    other.load(tmp_path / "t.safetensors")
    for table in (read, other, HostTable.from_handle(handle)):
        adagrad(table, 0.5)
        assert (table["sum"] == 3).all()


def test_a_shared_table_is_saved_and_loaded(tmp_path: Path) -> None:
    table = small(state=("m",)).normal_(seed=1)
    table.save(tmp_path / "t.safetensors")
    again = HostTable.open(tmp_path / "t.safetensors", "shared")
    assert again.memory == "shared" and torch.equal(again.record, table.record)
    table.fill_(0).load(tmp_path / "t.safetensors")
    assert torch.equal(again.record, table.record)


def test_each_process_registers_the_memory_for_its_gpu(driver: PretendedDriver) -> None:
    table = small()
    assert driver.registered == {table.record.data_ptr(): (160, False)}
    other = HostTable.from_handle(table.share())
    assert len(driver.registered) == 2 and other.is_in_place
    other.close()
    row = table["weight"][3]
    table.close()
    del other, table
    assert len(driver.registered) == 1 and speedtorch.memory_kind(row) == "registered"
    del row
    assert not driver.registered


def test_memory_that_cuda_does_not_register_says_so(driver: PretendedDriver) -> None:
    driver.fail("host_register")
    table = small()
    assert "shared (not registered, so that a GPU uses staged copies of its rows" in repr(table)
    assert not table.is_in_place


# Versions


def test_the_version_is_odd_while_rows_are_written(table: HostTable) -> None:
    other = HostTable.from_handle(table.share())
    with table.writing():
        assert other.version == 1
    assert (other.version, table.version) == (2, 2)
    with pytest.raises(KeyError), table.writing():
        raise KeyError
    assert other.version == 4


def test_a_thread_that_writes_does_not_wait_for_itself(table: HostTable) -> None:
    with (
        table.writing(),
        pytest.raises(RuntimeError, match="this thread is already inside a writing"),
        table.writing(),
    ):
        pass
    assert table.version == 2


def test_rows_that_a_module_trains_are_written_back_before_the_version(table: HostTable) -> None:
    module = speedtorch.Embedding.from_pretrained(table, freeze=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    with table.writing():
        module(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    other = HostTable.from_handle(table.share())
    assert other["weight"].sum(1).tolist() == [0, -4, -4, *[0] * 7]


def test_a_read_beside_a_write_is_repeated() -> None:
    table, calls = small(), []

    def read() -> int:
        if not calls:
            with table.writing():
                pass
        calls.append(table.version)
        return calls[-1]

    assert table.read_consistently(read) == 2
    assert calls == [2, 2]


def test_a_reader_waits_so_long(table: HostTable) -> None:
    with ThreadPool(1) as reader, table.writing():
        read = partial(table.read_consistently, int, timeout_s=0.01)
        with pytest.raises(TimeoutError, match=r"every read for 0.01 s overlapped with a write"):
            reader.apply(read)


def test_a_thread_that_writes_reads_its_own_rows_at_once(table: HostTable) -> None:
    with table.writing():
        table.fill_(1)
        assert table.read_consistently(lambda: table["weight"].sum(), timeout_s=0) == 40


def test_a_child_that_was_forked_within_writing_neither_keeps_the_lock_nor_ends_the_block(
    table: HostTable,
) -> None:
    ends, child = os.pipe(), 0

    def write() -> None:
        with table.writing():
            pass

    with ThreadPool(1) as writer:
        with suppress(KeyError), table.writing():
            if (child := os.fork()) == 0:
                raise KeyError
            os.read(ends[0], 1)
            assert table.version == 1
        if child == 0:
            os.write(ends[1], b"x")
            time.sleep(60)
            os._exit(0)
        try:
            writer.apply_async(write).get(20)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert table.version == 4


# Two processes


@pytest.mark.soak
def test_random_work_of_two_processes_on_disjoint_rows_leaves_no_wrong_row(device: str) -> None:
    table, operations = HostTable(1000, 8, memory="shared").fill_(-1), soaked(5000, 50_000)
    with spawned(works_at_random, table.share(), operations, device) as (_, other):
        assert received(other) == "open"
        even = random_work(table, 0, 2, operations, device)
        odd = torch.from_numpy(received(other))
    assert torch.equal(table["weight"][::2], even)
    assert torch.equal(table["weight"][1::2], odd)


def test_two_processes_train_disjoint_rows_as_two_tables(device: str) -> None:
    def made(memory: str) -> HostTable:
        table = HostTable(100, 4, state=("exp_avg", "exp_avg_sq"), memory=memory)  # type: ignore[arg-type]
        return table.normal_(seed=5)

    table, *alone = made("shared"), made("plain"), made("plain")
    with spawned(trains, table.share(), device) as (_, other):
        train(table, 0, device)
        assert received(other) == "done"
    for part in (0, 1):
        train(alone[part], part, device)
        for name in table.fields:
            assert torch.equal(table[name][part::2], alone[part][name][part::2])


def test_a_reader_beside_a_writer_sees_whole_versions(device: str) -> None:
    table = HostTable(2000, 4, memory="shared")
    ids, seen = torch.arange(2000, device=device), [0.0]
    with spawned(writes_versions, table.share(), device) as (_, other):
        assert received(other) == "open"
        for _ in range(300):
            rows = table.read_consistently(lambda: table.gather(ids, "weight"))
            assert (rows == rows[0, 0]).all()
            seen.append(float(rows[0, 0]))
    assert seen == sorted(seen) and len(set(seen)) > 1


def test_an_ended_writer_raises_and_the_next_one_continues(table: HostTable) -> None:
    with spawned(ends_while_it_writes, table.share()) as (_, other):
        assert received(other) == "writing"
    assert table.version == 1
    with pytest.raises(RuntimeError, match="a writer ended within `with table.writing"):
        table.read_consistently(table.settle)
    with table.writing():
        table.fill_(2)
    assert table.read_consistently(lambda: table["weight"].sum()) == 80


def test_the_memory_outlives_the_process_that_made_it() -> None:
    with spawned(owns) as (process, other):
        handle = received(other)
        table, again = HostTable.from_handle(handle), pickle.dumps(handle)
        process.kill()
        process.join()
        with pytest.raises(ProcessLookupError, match=r"process \d+, which shared the table, has"):
            HostTable.from_handle(pickle.loads(again))
    assert table["weight"].sum() == 1200
    assert HostTable.from_handle(table.share())["weight"].sum() == 1200


def test_two_processes_take_the_memory_once() -> None:
    table = HostTable(1 << 20, 16, memory="shared").fill_(1)
    with spawned(counts_bytes, table.share()) as (_, other):
        assert received(other) == "read"
        here = smaps(table, "Pss", "Rss")
        other.send("count")
        there, stats = received(other)
    assert here["Rss"] == there["Rss"] == table.nbytes
    assert 0.99 * table.nbytes <= here["Pss"] + there["Pss"] <= 1.01 * table.nbytes
    assert stats["plain"] == stats["managed"] == 0


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize("start", ["forkserver", "fork"])
def test_workers_of_a_data_loader_read_a_shared_table(start: str) -> None:
    table = HostTable(20, 3, memory="shared").uniform_(seed=1)
    context = warm_context() if start == "forkserver" else start
    how: dict[str, object] = {"num_workers": 2, "multiprocessing_context": context}
    loader = torch.utils.data.DataLoader(Rows(table.share()), 5, **how)  # type: ignore[arg-type]
    assert torch.equal(torch.cat(list(loader)), table["weight"])


def test_a_forked_child_has_the_same_memory(table: HostTable) -> None:
    if (child := os.fork()) == 0:
        table["weight"][3] = 7
        with table.writing():
            pass
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert table["weight"][3].tolist() == [7] * 4 and table.version == 2


@contextmanager
def a_child_that(work: Callable[[], object]) -> Iterator[None]:
    """A fork, which does the work after this block and ends well."""
    goes_on, tells = os.pipe()
    if (child := os.fork()) == 0:
        os.read(goes_on, 1)
        try:
            work()
            gc.collect()
        except BaseException:
            os._exit(1)
        os._exit(0)
    yield
    os.write(tells, b"+")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class Trained:
    """A module of six rows of zeros in shared memory, and what trains it."""

    def __init__(self, **settings: Any) -> None:
        weight = torch.zeros(6, 2)
        self.module = speedtorch.Embedding(6, 2, _weight=weight, memory="shared", **settings)
        self.sgd = torch.optim.SGD(self.module.parameters(), lr=1.0)
        speedtorch.attach(self.sgd, self.module)

    def train(self, *batches: list[int]) -> None:
        for ids in batches:
            self.step(torch.tensor(ids))

    def step(self, ids: Tensor) -> None:
        self.sgd.zero_grad()
        self.module(ids).sum().backward()
        self.sgd.step()

    def loop(self, *batches: list[int]) -> Iterator[Tensor]:
        return iter(speedtorch.prefetch(map(torch.tensor, batches), self.module, ids=lambda x: x))

    def rows(self) -> list[float]:
        self.module.flush()
        return self.module.table["weight"][:, 0].tolist()


WORKS: dict[str, Callable[[Trained], object]] = {
    "none": lambda trained: None,
    "reads": lambda trained: trained.module.table["weight"],
    "looks up": torch.no_grad()(lambda trained: trained.module(torch.tensor([1, 2]))),
    "saves": lambda trained: trained.module.state_dict(),
    "trains": lambda trained: trained.train([4], [5]),
    "prefetches": lambda trained: [trained.step(ids) for ids in trained.loop([4], [5])],
}


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("settings", [{}, {"cache": "4KiB"}, {"capacity": 4}], ids=str)
def test_a_forked_child_writes_no_row_that_it_has_not_trained(
    settings: dict[str, Any], work: str
) -> None:
    trains = work in ("trains", "prefetches")
    if trains and torch.cuda.is_available():
        pytest.skip("torch goes backward in no forked child where its parent did and has a GPU")
    trained = Trained(**settings)
    trained.train([1, 2])  # held and not written back

    def works_and_drops() -> None:
        WORKS[work](trained)
        vars(trained).clear()

    with a_child_that(works_and_drops):
        trained.train([1, 3], [1])
        trained.module.flush()
    assert trained.rows() == [0.0, -3.0, -1.0, -1.0, -trains, -trains]


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_child_that_ends_a_loop_of_its_parent_writes_none_of_its_rows() -> None:
    trained = Trained()
    loops = [trained.loop([1, 2], [2, 3], [4])]
    trained.step(next(loops[0]))  # the next rows are held as well
    with a_child_that(loops.clear):
        for ids in loops[0]:
            trained.step(ids)
        trained.module.flush()
    assert trained.rows() == [0.0, -1.0, -2.0, -1.0, -1.0, 0.0]

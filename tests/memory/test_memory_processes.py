"""Host memory at the ends of processes: import, fork, limits, exit. Each program is a process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from warm_python import run_warm

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]

PRELUDE = """
import atexit, gc, json, os, resource, signal, sys, warnings
import torch
import cuda_calls

warnings.simplefilter("ignore")  # of forks beside threads
"""

# A table of each kind on two pretended GPUs, which stay until the process ends.
TABLES = """
import speedtorch
from speedtorch import HostTable

driver = cuda_calls.PretendedDriver(True, True)
driver.__enter__()
KINDS = ("managed", "registered", "plain")
tables = {kind: HostTable(6, 3, state=("exp_avg",), memory=kind).fill_(2.0) for kind in KINDS}
raw = {kind: speedtorch.empty((6, 3), memory=kind) for kind in KINDS}
pinned = speedtorch.pin_memory_(torch.ones(6, 3))
ids, rows = torch.tensor([5, 0]), torch.ones(2, 3)
"""

# Runs `child` in a fork, which then ends as any Python does; its status must be 0.
FORK = """
def forked(child):
    pid = os.fork()
    if pid == 0:
        child()
        sys.exit(0)
    status = os.waitpid(pid, 0)[1]
    assert status == 0, f"the child ended with status {status}"
    return pid
"""


def run_python(*parts: str) -> subprocess.CompletedProcess[str]:
    """Runs a program of these parts in a new process that finds the package and the tests."""
    return run_warm("-c", "\n".join([PRELUDE, *parts]), status=None)


def lines_of(*parts: str) -> list[Any]:
    """The JSON lines that such a program prints; it must end well."""
    done = run_python(*parts)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return [json.loads(line) for line in done.stdout.splitlines()]


# Import


def test_import_makes_no_cuda_call() -> None:
    program = """
        cuda_calls.abort_on_any_call()
        import speedtorch
        print(json.dumps(speedtorch.memory_stats()))
        print(json.dumps(torch.cuda.is_initialized()))
    """
    stats, initialised = lines_of(*map(str.strip, program.splitlines()))
    assert set(stats.values()) == {0}
    assert not initialised


# Fork


def test_a_forked_child_maps_nothing_else_at_managed_addresses() -> None:
    program = """
import ctypes
address = raw["managed"].data_ptr()
DONTFORK = 10  # as the driver advises for managed memory
assert ctypes.CDLL(None).madvise(ctypes.c_void_p(address), 4096, DONTFORK) == 0

def child():
    print(json.dumps(cuda_calls.mapping_of(address)))
    sys.stdout.flush()

sys.stdout.flush()
forked(child)
print(json.dumps(cuda_calls.mapping_of(address)))
"""
    assert lines_of(TABLES, FORK, program) == ["---p", "rw-s"]


def test_a_fork_beside_threads_with_resident_rows_does_not_hang() -> None:
    # Of this process, the rows are the first that the library keeps.
    program = """
import tempfile, threading
from speedtorch.ops.functions import resident_open, resident_slots

signal.alarm(60)
torch.set_num_threads(1)
file = tempfile.TemporaryFile()
file.write(bytes(64))
file.flush()
slots, index = (torch.zeros(shape, dtype=torch.uint8) for shape in ((2, 8), (4, 32)))
handle, ids, forks = resident_open(slots, index, file.fileno(), 8), torch.tensor([0]), []

def use():
    while len(forks) < 100:
        resident_slots(handle, ids, 0, 0)

threads = [threading.Thread(target=use) for _ in range(3)]
for thread in threads:
    thread.start()
while len(forks) < 100:
    if (child := os.fork()) == 0:
        os._exit(0)
    forks.append(os.waitpid(child, 0)[1])
for thread in threads:
    thread.join()
print(json.dumps(sum(forks)))
"""
    assert lines_of(program) == [0]


def test_a_forked_child_has_the_memory_that_a_thread_of_its_parent_was_allocating() -> None:
    program = """
import threading, speedtorch

def refusal():
    try:
        speedtorch.empty(1 << 50, dtype=torch.uint8, memory="plain")
    except MemoryError as error:
        return str(error)

def child():
    assert "other threads" not in refusal(), refusal()

options = {"dtype": torch.uint8, "memory": "plain"}
thread = threading.Thread(target=speedtorch.empty, args=(512 << 20,), kwargs=options)
thread.start()
while "other threads" not in refusal() and thread.is_alive():
    pass
forked(child)
thread.join()
print(json.dumps("other threads" in refusal()))
"""
    assert lines_of(FORK, program) == [False]


# What a child may try on a table and on a bare tensor.
TRIALS = """
table, tensor = tables[kind], raw[kind]
trials = {
    "gather": lambda: speedtorch.pinned_gather(tensor, ids),
    "scatter": lambda: speedtorch.pinned_scatter(tensor, ids, rows),
    "check_owner": lambda: speedtorch.memory.check_owner(tensor),
    "table gather": lambda: table.gather(ids),
    "table scatter": lambda: table.scatter(ids, rows, "weight"),
    "table item": lambda: table["weight"],
    "table record": lambda: table.record,
    "table numpy": lambda: table.numpy(),
    "table fill_": lambda: table.fill_(1.0),
    "table zeros_": lambda: table.zeros_("exp_avg"),
    "table uniform_": lambda: table.uniform_(0, 1, seed=1),
    "table flush": lambda: table.flush(),
    "table save": lambda: table.save(os.devnull + ".npy"),
}
if kind != "managed":
    del trials["table save"]

def child():
    for name, work in trials.items():
        try:
            work()
            print(json.dumps([name, None]))
        except RuntimeError as error:
            print(json.dumps([name, str(error)]))
    sys.stdout.flush()
"""


def test_the_error_of_a_forked_child_names_both_processes_and_the_remedies() -> None:
    program = "sys.stdout.flush(); print(json.dumps([os.getpid(), forked(child)]))"
    *outcomes, (parent, child) = lines_of(TABLES, FORK, "kind = 'managed'", TRIALS, program)
    assert len(outcomes) == 13
    for name, message in outcomes:
        assert message is not None, name
        start = f"managed memory of process {parent} cannot be used in its forked child {child}. "
        assert start in message, name
        for remedy in ("memory='shared'", "'spawn'", "memory='registered'"):
            assert remedy in message, name


FORKED = pytest.mark.parametrize("kind", ["registered", "plain"])


@FORKED
def test_a_forked_child_may_use_other_memory(kind: str) -> None:
    program = "forked(child); print(json.dumps(tables[kind]['weight'].tolist()))"
    *outcomes, parents = lines_of(TABLES, FORK, f"kind = {kind!r}", TRIALS, program)
    assert len(outcomes) == 12
    assert {name: message for name, message in outcomes if message} == {}
    assert parents == [[2.0] * 3] * 6  # what the child wrote is its own


def test_a_forked_child_makes_no_cuda_call_when_its_tables_go() -> None:
    program = """
def child():
    cuda_calls.abort_on_any_call()
    global pinned
    tables.clear()
    raw.clear()
    del pinned
    gc.collect()

forked(child)
print(json.dumps([driver.named("free_managed", "host_unregister"), speedtorch.memory_stats()]))
"""
    ((freed, stats),) = lines_of(TABLES, FORK, program)
    assert freed == []
    assert (stats["managed"], stats["plain"]) == (216, 216)
    assert stats["registered"] == 216 + 72  # tables of 6 x 6, tensors of 6 x 3 floats


@FORKED
def test_dataloader_workers_read_a_table_of_memory_that_may_be_forked(kind: str) -> None:
    rows, _ = lines_of(TABLES, LOADER.format(kind=kind))
    assert rows == [[[2.0] * 3] * 2] * 3


def test_dataloader_workers_of_a_managed_table_say_what_to_do() -> None:
    _, error = lines_of(TABLES, LOADER.format(kind="managed"))
    assert "RuntimeError in DataLoader worker" in error
    assert "memory='registered'" in error


LOADER = """
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, i):
        return tables["{kind}"].gather(ids, "weight")

loader = torch.utils.data.DataLoader(
    Rows(), batch_size=None, num_workers=1, multiprocessing_context="fork"
)
rows, error = [], None
try:
    rows = [batch.tolist() for batch in loader]
except RuntimeError as caught:
    error = str(caught)
print(json.dumps(rows))
print(json.dumps(error))
"""


# Exit

# Kept by a global, by a cycle that is garbage, by one that is not, and by another module.
HOLDERS = """
gc.disable()

class Holder:
    def __init__(self):
        self.me = self
        self.tables = [HostTable(9, 2, memory=kind) for kind in KINDS]
        self.pinned = speedtorch.pin_memory_(torch.ones(100))
        self.view = speedtorch.pin_memory_(torch.ones(100))[3:]

Holder()
holder = Holder()
torch.kept_to_the_end = [Holder(), speedtorch.empty(100, memory="managed")]
atexit.register(cuda_calls.abort_on_any_call)
"""


@pytest.mark.parametrize(
    ("begin", "ending", "status", "last_words"),
    [
        ("", "", 0, ""),
        pytest.param("", "sys.exit(0)", 0, "", marks=pytest.mark.nightly),
        ("", "sys.exit(3)", 3, ""),
        ("", "raise ValueError('the end')", 1, "Traceback.*\nValueError: the end\n"),
        ("atexit.register(lambda: [d.clear() for d in (tables, raw)])", "", 0, ""),
    ],
    ids=["end", "exit_0", "exit_3", "exception", "deleted_at_exit"],
)
def test_a_process_with_live_tables_ends_with_its_own_words_and_without_a_cuda_call(
    begin: str, ending: str, status: int, last_words: str
) -> None:
    done = run_python(begin, TABLES, HOLDERS, ending)
    assert (done.returncode, done.stdout) == (status, "")
    assert re.fullmatch(last_words, done.stderr, re.DOTALL)


def test_the_trap_for_cuda_calls_works() -> None:
    done = run_python(TABLES, "cuda_calls.abort_on_any_call()", "del raw['managed']", "print(1)")
    assert (done.returncode, done.stdout) == (-signal.SIGABRT, "")


# Limits

# Leaves `room` bytes of address space.
LIMIT = """
import speedtorch

def limit(room):
    pages = int(open("/proc/self/statm").read().split()[0])
    wanted = pages * resource.getpagesize() + room
    resource.setrlimit(resource.RLIMIT_AS, (wanted, resource.RLIM_INFINITY))
"""


def test_memory_beyond_the_limit_of_the_process_is_a_memory_error() -> None:
    program = """
limit(64 << 20)
try:
    speedtorch.empty(1 << 30, dtype=torch.uint8, memory="plain")
except MemoryError as error:
    print(json.dumps(str(error)))
print(json.dumps(speedtorch.memory_stats()["plain"]))
print(json.dumps(max(bytes(speedtorch.empty(1 << 20, dtype=torch.uint8, memory="plain").numpy()))))
"""
    message, held, largest = lines_of(LIMIT, program)
    assert message == f"host memory: mapping {1 << 30} bytes failed: Cannot allocate memory"
    assert (held, largest) == (0, 0)


@pytest.mark.parametrize(
    ("size", "room"), [(64 << 20, 1 << 20), (512 << 20, 12 << 20)], ids=["no_stack", "one_stack"]
)
def test_memory_is_filled_though_there_is_no_room_for_another_thread(size: int, room: int) -> None:
    program = f"""
limit({size} + (2 << 20) + {room})  # the table, what aligns it, and stacks of 8 MiB
table = speedtorch.empty({size}, dtype=torch.uint8, memory="plain")
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(json.dumps([table.numel(), table[:: 1 << 12].any().item(), table[-1].item()]))
"""
    assert lines_of(LIMIT, program) == [[size, False, 0]]


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """The folder of a group of processes that have 512 MiB of memory together."""
    for root, limit in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ("/sys/fs/cgroup", "memory.max"),
    ):
        folder = Path(root, f"speedtorch_{os.getpid()}")
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            with (folder / limit).open("r+") as file:
                file.write(str(512 << 20))
            yield folder
            return
        except FileNotFoundError:  # memory is not limited by groups of this kind
            continue
        finally:
            folder.rmdir()
    pytest.skip("this process may not limit the memory of others")


def test_who_takes_memory_at_the_same_time_is_refused_before_it_ends(limited_group: Path) -> None:
    program = f"""
import threading
import speedtorch

both, taken, errors = threading.Barrier(2), [], []

def take():
    both.wait()
    try:
        taken.append(speedtorch.empty(320 << 20, dtype=torch.uint8, memory="plain"))
    except MemoryError as error:
        errors.append(str(error))

open("{limited_group}/cgroup.procs", "w").write(str(os.getpid()))
threads = [threading.Thread(target=take) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
# What was refused has left its room.
room = speedtorch.memory.host_memory.available_bytes() >> 20
print(json.dumps([len(taken), room, speedtorch.memory_stats()["plain"] >> 20, errors]))
taken.clear()  # Python takes memory, too, as it ends
"""
    ((taken, room, held, errors),) = lines_of(program)
    assert taken + len(errors) == 2 and errors and held == 320 * taken
    assert all("335544320 bytes requested, " in error for error in errors)
    assert room > (500 if not taken else 180)

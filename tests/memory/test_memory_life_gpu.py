"""Host memory on a GPU: nothing goes before the GPU, a graph or a process is done with it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from conftest import NEEDS_GPU
from cuda_calls import Driver
from reference import assert_same_bytes, random_rows
from test_memory_gpu import LONG, OWN, ROWS, WIDTH, all_rows, table_of
from test_memory_processes import lines_of, run_python
from torch import Tensor

import speedtorch

pytestmark = NEEDS_GPU


def newer_memory(kind: str) -> list[Tensor]:
    """New memory full of NaN, for the allocator to hand out again what it should not have."""
    return [table_of(kind, torch.full((ROWS, WIDTH), float("nan"))) for _ in range(4)]


# Nothing goes before the GPU is done


@pytest.mark.parametrize("kind", [*OWN, "in_place", "torch_pinned"])
@pytest.mark.parametrize("streams", [1, 3], ids="streams_{}".format)
def test_a_table_deleted_behind_a_long_queue_was_read_whole(kind: str, streams: int) -> None:
    index, values = all_rows(), random_rows(ROWS, (WIDTH,))
    table, results = table_of(kind, values), []
    for _ in range(streams):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(LONG)
            results += [speedtorch.pinned_gather(table, index) for _ in range(100)]
    del table
    gc.collect()
    reused = newer_memory(kind)
    torch.cuda.synchronize()
    for result in results:
        assert_same_bytes(result, values.flip(0))
    assert len(reused) == 4


@pytest.mark.parametrize("kind", [*OWN, "in_place", "torch_pinned"])
def test_late_writes_do_not_reach_newer_memory(kind: str) -> None:
    index, rows = all_rows(), torch.full((ROWS, WIDTH), 7.0, device="cuda")
    table = table_of(kind, torch.zeros(ROWS, WIDTH))
    torch.cuda._sleep(LONG)
    for _ in range(100):
        speedtorch.pinned_scatter(table, index, rows)
    del table
    reused = newer_memory(kind)
    speedtorch.synchronize()
    assert all(tensor.isnan().all() for tensor in reused)


def test_memory_that_torch_pinned_is_not_handed_out_while_the_gpu_reads_it() -> None:
    index, values = all_rows(), random_rows(ROWS, (WIDTH,))
    table = values.pin_memory()
    address = table.data_ptr()
    torch.cuda._sleep(LONG)
    result = speedtorch.pinned_gather(table, index)
    del table
    reused = [torch.full((ROWS, WIDTH), float("nan"), pin_memory=True) for _ in range(4)]
    assert address not in [tensor.data_ptr() for tensor in reused]
    torch.cuda.synchronize()
    assert_same_bytes(result, values.flip(0))


def test_memory_that_torch_pinned_goes_back_once_the_gpu_is_done() -> None:
    index, table = all_rows(), torch.zeros(ROWS, WIDTH, pin_memory=True)
    table_lives = weakref.ref(table)
    torch.cuda._sleep(LONG)
    speedtorch.pinned_gather(table, index)
    del table
    assert table_lives() is not None
    speedtorch.synchronize()
    assert table_lives() is None


@pytest.mark.parametrize("kind", [*OWN, "in_place"])
def test_memory_is_given_back_after_waiting_for_every_stream_that_used_it(kind: str) -> None:
    index, give_back = all_rows(), "free_managed" if kind == "managed" else "host_unregister"
    streams = [torch.cuda.Stream() for _ in range(3)]
    with Driver() as watched:
        table = table_of(kind, torch.zeros(ROWS, WIDTH))
        address = table.data_ptr()
        for stream in [*streams, *streams]:
            with torch.cuda.stream(stream):
                speedtorch.pinned_gather(table, index)
        del table
    recorded = watched.named("event_record")
    events = list(dict.fromkeys(call[1] for call in recorded))
    assert [call[2] for call in recorded] == [stream.cuda_stream for stream in [*streams, *streams]]
    assert len(watched.named("event_create")) == len(events) == 3
    last = watched.named("event_synchronize", "event_destroy", give_back)
    assert [call for call in last if call[0] == "event_synchronize"] == [
        ("event_synchronize", event) for event in events
    ]
    assert [call for call in last if call[0] == "event_destroy"] == [
        ("event_destroy", event) for event in events
    ]
    assert last[-1] == (give_back, address)


# Processes

# A parent that uses torch's CUDA, forks, and goes on; the child waits for the parent's writes.
FORKED = """
import speedtorch

index = torch.tensor([5, 0], device="cuda")
table = speedtorch.empty((6, 3), memory={kind!r})
table.fill_(1.0)
assert speedtorch.pinned_gather(table, index).eq(1).all()
child_waits, parent_tells = os.pipe()
pid = os.fork()
if pid == 0:
    outcome = None
    try:
        rows = speedtorch.pinned_gather(table, torch.tensor([5, 0])).tolist()
        os.read(child_waits, 1)
        outcome = [rows, table.tolist()]
    except RuntimeError as error:
        os.read(child_waits, 1)
        outcome = str(error)
    print(json.dumps(outcome), flush=True)
    os._exit(0)
table.fill_(2.0)
read = speedtorch.pinned_gather(table, index).tolist()
speedtorch.pinned_scatter(table, index, torch.full((2, 3), 3.0, device="cuda"))
speedtorch.synchronize()
os.write(parent_tells, b"x")
status = os.waitpid(pid, 0)[1]
print(json.dumps([status, read, table[:, 0].tolist(), os.getpid(), pid]))
"""


@pytest.mark.parametrize("kind", OWN)
def test_a_fork_sees_registered_memory_as_it_was_and_gets_an_error_for_managed(kind: str) -> None:
    seen, (status, read, rows, parent, child) = lines_of(FORKED.format(kind=kind))
    if kind == "managed":
        assert f"memory of process {parent} cannot be used in its forked child {child}" in seen
    else:
        assert seen == [[[1.0] * 3] * 2, [[1.0] * 3] * 6]
    assert (status, read) == (0, [[2.0] * 3] * 2)
    assert rows == [3.0, 2.0, 2.0, 2.0, 2.0, 3.0]


EXIT = """
import speedtorch
from speedtorch import HostTable

tables = [HostTable(1000, 64, memory=kind) for kind in ("managed", "registered")]
pinned = speedtorch.pin_memory_(torch.ones(1000, 64))
foreign = torch.ones(1000, 64, pin_memory=True)
index = torch.arange(1000, device="cuda")
cycle = [speedtorch.empty((1000, 64))]
cycle.append(cycle)
all_tables = [*(table["weight"] for table in tables), pinned, foreign, cycle[0]]
for table in all_tables:
    speedtorch.pinned_gather(table, index)
torch.cuda.synchronize()
"""


@pytest.mark.parametrize(
    "ending",
    [
        "",
        "torch.cuda._sleep(300_000_000); [speedtorch.pinned_gather(t, index) for t in all_tables]",
        "atexit.register(all_tables.clear); del tables, pinned, foreign, cycle, table",
        "del tables, pinned, foreign, cycle, table; all_tables.clear()",
    ],
    ids=["idle", "busy", "deleted_at_exit", "deleted_before"],
)
def test_a_process_that_used_the_gpu_ends_silently(ending: str) -> None:
    done = run_python(EXIT, ending)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

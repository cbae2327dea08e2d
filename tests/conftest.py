"""Where tests run: on the CPU, and on a GPU with the table in each kind of memory.

A test that asks for `place` runs six times, one that asks for `device` twice; without a GPU all but
the CPU's are deselected. `place.table` puts a table where it belongs, `place.work` everything else.

The mark `dealt` names arguments of a grid that the ordinary run deals out over the other arguments'
values: it has each of both, and `make nightly` each with each. `dealt("place", "gpu_place")` is for
facts that do not depend on the kind of memory: the CPU has them all.
"""

from __future__ import annotations

import gc
import inspect
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import known_probes
import paces
import pytest
import torch
from cuda_calls import PretendedDriver
from hypothesis import HealthCheck, settings
from ordinary_run import dealt, process_count
from rank_backends import NEEDS_GPU
from rank_processes import in_processes
from recorded_streams import RecordedStreams
from reference import layout_copy
from restless_caches import make_restless
from stream_order import StreamOrder
from torch import Tensor

import speedtorch
from speedtorch import memory_stats
from speedtorch.files import field_blocks, table_files

gc.disable()  # until all tests are collected: what importing them makes is no garbage

# Large tables of tests are no reason to measure the machine.
os.environ["SPEEDTORCH_CALIBRATE"] = "0"

paces.install()

# A shell starts what runs in the background deaf to Ctrl-C, which some tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Beside other processes of the same run each of them takes two threads: more would only wait for a
# core, and with one no two threads would meet.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "2"
    torch.set_num_threads(2)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """What `-n auto` means: a process for each core, as far as host and GPU memory go.

    PYTEST_XDIST_AUTO_NUM_WORKERS sets another number of cores, for runs beside each other.
    """
    machine, given = speedtorch.info(), os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS")
    cores = int(given or len(os.sched_getaffinity(0)))
    host_bytes = machine.host.available_bytes or machine.host.memory_bytes
    free = [gpu.free_bytes or gpu.memory_bytes for gpu in machine.gpus]  # all use the first
    count = process_count(cores, host_bytes, free[0] if free else None)
    return count if count > 1 else 0  # then this process runs the tests itself


# The files that take longest begin first: begun last, one would run alone beside idle cores.
LONGEST = [
    "weight_contract",
    "graphed",
    "argument_overlaps",
    "embedding_interrupts",
    "shard",
    "embedding_machine",
]
LONGEST += ["embedding_exact", "capacity", "swapper_programs", "swapper_auto"]
LONGEST += ["packaging", "notebooks", "unit_training", "joint_exchange", "switch_interrupts"]
LONGEST += ["paths", "compare", "training_exact", "benchmarks", "glove"]
LONGEST += ["dlrm_processes", "binary", "several_gpus_page", "ncf", "dlrm", "properties", "readme"]
LONGEST += ["memory_processes", "word2vec", "commands", "loops", "disagreements"]
LONGEST += ["sharded_capacity", "cache", "attach_resume", "row_weight", "threads"]
RANKS = {f"test_{name}.py": rank for rank, name in enumerate(LONGEST)}


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Brings tests in order, without those of a GPU where there is none: skips take time, too."""
    items.sort(key=lambda item: RANKS.get(item.path.name, len(RANKS)))
    if not torch.cuda.is_available():
        left_out = [item for item in items if NEEDS_GPU.mark in item.iter_markers("skipif")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if NEEDS_GPU.mark not in item.iter_markers("skipif")]
    for item in left_to_nightly(items):  # of those that can run: nothing is dealt to the others
        item.add_marker("nightly")


def left_to_nightly(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """The cases of grids with the mark `dealt` that the ordinary run leaves out."""
    grids: defaultdict[object, list[tuple[pytest.Item, tuple[Hashable, Hashable]]]]
    grids = defaultdict(list)
    for item in items:
        mark, cases = item.get_closest_marker("dealt"), getattr(item, "callspec", None)
        if mark is None or cases is None or item.get_closest_marker("nightly"):
            continue
        if cases.params.get("place") == PLACES[0].values[0]:
            continue
        parts: tuple[list[Hashable], list[Hashable]] = ([], [])
        for name, value in cases.params.items():
            parts[name in mark.args].append((name, id(value)))  # not all can be compared
        fact, circumstance = map(tuple, parts)
        if circumstance:
            grids[item.parent, item.originalname].append((item, (fact, circumstance)))
    for grid in grids.values():
        taken = set(dealt([case for _, case in grid]))
        yield from (item for number, (item, _) in enumerate(grid) if number not in taken)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Calls a test with the mark `ranks` on each rank of a group; see rank_backends.py."""
    if pyfuncitem.get_closest_marker("ranks") is None:
        return None
    given, test = pyfuncitem.funcargs, pyfuncitem.obj
    arguments = [given[name] for name in inspect.signature(test).parameters]
    in_processes(given["ranks"], test, *arguments, backend=given["backend"])
    return True


@pytest.fixture
def ranks() -> int:
    """The number of ranks of a test, unless its parameters have another."""
    return 2


@pytest.fixture
def backend() -> str:
    """Of torch.distributed."""
    return "gloo"


def pytest_collection_finish() -> None:
    """Collects garbage from now on."""
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says how many random programs the tests have run that count them."""
    counts: defaultdict[str, int] = defaultdict(int)
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "programs":
                counts[report.nodeid.split("[")[0]] += value
    for test, count in counts.items():
        terminalreporter.write_line(f"{count:,} programs: {test}")


# A slow machine is no failure, and the blob repeats a failure elsewhere.
settings.register_profile(
    "speedtorch", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("speedtorch")


@dataclass(frozen=True)
class Place:
    """A device that does the work, and the memory that holds the table."""

    device: str  # "cpu" or "cuda"
    memory: str  # "plain", "managed", "registered", "torch_pinned", "pageable" or "cuda"

    def __str__(self) -> str:
        return self.device if self.device == "cpu" else f"{self.device}-{self.memory}"

    @property
    def examples(self) -> int:
        """Property-test examples per op: 2,000 on the CPU and 2,000 over the GPU's five kinds."""
        return 2000 if self.device == "cpu" else 400

    @property
    def mapped(self) -> bool:
        """Whether kernels reach the table without a staged copy."""
        return self.memory != "pageable"

    def allocate(self, count: int) -> Tensor:
        """`count` bytes of this memory, as a uint8 tensor `[count]`."""
        if self.memory in ("managed", "registered"):
            return speedtorch.empty(count, dtype=torch.uint8, memory=self.memory)
        device = "cuda" if self.memory == "cuda" else "cpu"
        pinned = self.memory == "torch_pinned"
        return torch.empty(count, dtype=torch.uint8, device=device, pin_memory=pinned)

    def table(self, values: Tensor) -> Tensor:
        """`values` in this memory, with the same strides, offset and bits."""
        return layout_copy(values, self.allocate)

    def work(self, values: Tensor) -> Tensor:
        """`values` on the device that does the work, with the same strides, offset and bits."""

        def allocate(count: int) -> Tensor:
            return torch.empty(count, dtype=torch.uint8, device=self.device)

        return layout_copy(values, allocate)

    def ids(self, values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        """Row ids on the device that does the work."""
        return torch.tensor(values, dtype=dtype, device=self.device)


GPU_MEMORY = ["managed", "registered", "torch_pinned", "pageable", "cuda"]
if not torch.cuda.is_available():  # thousands of tests that are not run take time to be made
    del GPU_MEMORY[1:]
PLACES = [
    pytest.param(Place("cpu", "plain"), id="cpu"),
    *(
        pytest.param(Place("cuda", memory), id=f"cuda-{memory}", marks=NEEDS_GPU)
        for memory in GPU_MEMORY
    ),
]


# Session scope, because hypothesis refuses to share function-scoped fixtures between examples.
@pytest.fixture(params=PLACES, scope="session")
def place(request: pytest.FixtureRequest) -> Place:
    """The CPU, then the GPU with each kind of memory."""
    result: Place = request.param
    return result


@pytest.fixture(params=PLACES[1:], scope="session")
def gpu_place(request: pytest.FixtureRequest) -> Place:
    """The GPU with each kind of memory, for what the CPU has no counterpart of."""
    result: Place = request.param
    return result


@pytest.fixture(params=[each for each in PLACES[1:] if each.values[0].mapped], scope="session")
def mapped_place(request: pytest.FixtureRequest) -> Place:
    """The GPU with each kind of memory that its kernels reach."""
    result: Place = request.param
    return result


@pytest.fixture(
    params=[8, pytest.param(1, marks=pytest.mark.nightly)], ids=["eighth", "all"], scope="session"
)
def examples(request: pytest.FixtureRequest, place: Place) -> int:
    """Of a property test: an eighth of the place's in the ordinary run, all in the nightly one."""
    return place.examples // int(request.param)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_GPU)], scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The device that does the work."""
    result: str = request.param
    return result


@pytest.fixture(autouse=True, scope="module")
def large_heap() -> None:
    """Tests collect garbage by the hundred: what was there before a file is not looked at again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_error_left_behind() -> Iterator[None]:
    """A bad id found on the GPU belongs to the test that passed it, not to the next one."""
    yield
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        speedtorch.synchronize()


@pytest.fixture(autouse=True)
def optimizers_are_tried_once(request: pytest.FixtureRequest) -> None:
    """Each with its settings, but anew in tests of the probe; others would take longer for it."""
    name = request.path.name
    anew = name == "test_attach_changes.py" or name.startswith("test_optimizer_state")
    known_probes.install(tries_anew=anew)


@pytest.fixture(autouse=True)
def batches_are_planned_ahead() -> None:
    """Whatever the test before has chosen; see paces.py."""
    paces.choose()


@pytest.fixture
def on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stderr is captured, and says that it is a terminal: progress bars are shown."""
    # Of the class: capsys takes another object for the test itself.
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda _: True)


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows change places as often as they can; see restless_caches.py."""
    make_restless(monkeypatch)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> RecordedStreams:
    """Streams of a pretended GPU, which record what waits for what."""
    return RecordedStreams(monkeypatch)


@pytest.fixture
def order(streams: RecordedStreams, monkeypatch: pytest.MonkeyPatch) -> StreamOrder:
    """Watches the operations of the test on the pretended GPU's streams."""
    streams.pretend_on_cpu()
    return StreamOrder(streams, monkeypatch)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For long tests of small rows: threads that have nothing to share only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Gradients of repeated ids are added up in one order on a GPU, too."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[timedelta]:
    """This process is the one rank of a group, which waits for so long."""
    distributed = pytest.importorskip("torch.distributed")
    waits, meet = timedelta(seconds=7), f"file://{tmp_path}/meet"
    distributed.init_process_group("gloo", meet, timeout=waits, rank=0, world_size=1)
    yield waits
    distributed.destroy_process_group()


@pytest.fixture
def driver() -> Iterator[PretendedDriver]:
    """One pretended GPU; a test must give back all that it took."""
    with PretendedDriver(True) as pretended:
        yield pretended
        assert pretended.nothing_left()


@pytest.fixture
def stats(driver: PretendedDriver) -> Callable[[], dict[str, int]]:
    """Bytes by kind, without what was there before the test."""
    before = memory_stats()
    return lambda: {name: count - before[name] for name, count in memory_stats().items()}


@pytest.fixture
def small_file_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read and written in blocks of 24 bytes: small tables have many."""
    for module in (table_files, field_blocks):
        monkeypatch.setattr(module, "_BLOCK_BYTES", 24)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files a and b."""
    (tmp_path / "a").write_bytes(b"old a")
    (tmp_path / "b").write_bytes(b"old b")
    return tmp_path


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of these tests go to a folder of their own."""
    monkeypatch.chdir(tmp_path)

"""Initialisers: the bits follow from the seed alone, and only the named field changes."""

from __future__ import annotations

import _thread
import multiprocessing
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import NEEDS_GPU
from reference import DTYPES, FLOAT8, assert_same_bytes, assert_same_storage, dtype_name
from torch import Tensor
from tqdm import tqdm
from warm_python import run_warm

from speedtorch import HostTable
from speedtorch.table import progress, row_blocks
from speedtorch.table.row_blocks import Share

init = torch.nn.init
ELEMENTWISE: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "uniform_": (init.uniform_, (-0.5, 2.0)),
    "normal_": (init.normal_, (1.0, 0.1)),
    "trunc_normal_": (init.trunc_normal_, (0.0, 1.0, -1.0, 1.5)),
    "trunc_normal_ far away": (init.trunc_normal_, (0.0, 1.0, 1.0, 1.5)),
    "xavier_uniform_": (init.xavier_uniform_, ()),
    "xavier_normal_": (init.xavier_normal_, ()),
    "kaiming_uniform_": (init.kaiming_uniform_, (0.0, "fan_out")),
    "kaiming_normal_": (init.kaiming_normal_, ()),
    "constant_": (init.constant_, (2.5,)),
    "ones_": (init.ones_, ()),
    "zeros_": (init.zeros_, ()),
}
WHOLE: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "orthogonal_": (init.orthogonal_, (2.0,)),
    "eye_": (init.eye_, ()),
    "sparse_": (init.sparse_, (0.5,)),
}
ALL = ELEMENTWISE | WHOLE


@pytest.fixture
def threads() -> Iterator[None]:
    """The number of threads as it was, afterwards."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def small_blocks() -> Iterator[None]:
    """Small tables have many blocks, whose pieces are small too, and wide rows several pieces."""
    with (
        mock.patch.object(row_blocks, "_BLOCK_ELEMENTS", 700),
        mock.patch.object(row_blocks, "_CHUNK_ELEMENTS", 99),
    ):
        yield


def table(dim: Any = 12, dtype: torch.dtype = torch.float32, rows: int = 301) -> HostTable:
    """A table whose weight has neighbours on both sides, all bits set."""
    fields = {"before": (dim, dtype), "weight": (dim, dtype), "after": (dim, dtype)}
    made = HostTable.from_fields(rows, fields, "plain")
    made.record.view(torch.uint8).fill_(1 if dtype == torch.bool else 255)
    return made


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", ALL)
def test_the_number_of_threads_changes_no_bit(name: str) -> None:
    function, args = ALL[name]
    made = []
    for count in (1, 3, 8):
        torch.set_num_threads(count)
        made.append(table().init_(function, *args, seed=7))
    assert_same_storage(made[1].record, made[0].record)
    assert_same_storage(made[2].record, made[0].record)


@pytest.mark.parametrize("name", ALL)
def test_a_strided_field_gets_the_bits_of_one_alone_and_its_neighbours_stay(name: str) -> None:
    function, args = ALL[name]
    alone = HostTable(301, 12, memory="plain").init_(function, *args, seed=7)
    among = table().init_(function, *args, seed=7)
    expected = table()
    expected["weight"].copy_(alone["weight"])
    assert_same_storage(among.record, expected.record)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=NEEDS_GPU) for kind in ("managed", "registered", "cuda")]
)
@pytest.mark.parametrize("name", ALL)
def test_the_kind_of_memory_changes_no_bit(name: str, kind: str) -> None:
    function, args = ALL[name]
    here = HostTable(301, 12, memory="plain").fill_(3, "weight").init_(function, *args, seed=7)
    there = HostTable(301, 12, memory=kind).fill_(3, "weight").init_(function, *args, seed=7)
    assert_same_bytes(there["weight"], here["weight"])


@pytest.mark.parametrize("name", [*ELEMENTWISE, "orthogonal_", "sparse_"])
def test_the_distribution_is_that_of_the_whole_tensor(name: str) -> None:
    function, args = ALL[name]
    shape = (400, 300)
    ours = HostTable(400, 300, memory="plain").init_(function, *args, seed=1)["weight"]
    torch.manual_seed(3)
    expected = function(torch.empty(shape), *args)
    for statistic in (torch.mean, torch.std, torch.amin, torch.amax):
        close = {"rtol": 0.3 if statistic in (torch.amin, torch.amax) else 0.02, "atol": 0.01}
        torch.testing.assert_close(statistic(ours), statistic(expected), **close)


@pytest.mark.parametrize("dim", [1, 12, 250, (3, 4), ()], ids=str)
def test_rows_of_any_shape_are_drawn_in_full(dim: Any) -> None:
    rows = table(dim, rows=57).uniform_(1, 2, seed=0)["weight"]
    assert bool(((rows >= 1) & (rows < 2)).all())
    assert len(rows.unique()) > rows.numel() * 0.99


@pytest.mark.parametrize("name", ["normal_", "orthogonal_", "sparse_"])
def test_without_a_seed_torchs_own_decides_which_a_seed_leaves_alone(name: str) -> None:
    function, args = ALL[name]
    torch.manual_seed(11)
    before, first = torch.get_rng_state(), table().init_(function, *args)
    second, state = table().init_(function, *args), torch.get_rng_state()
    seeded = [table().init_(function, *args, seed=seed)["weight"] for seed in (1, 2)]
    assert torch.equal(torch.get_rng_state(), state)
    torch.set_rng_state(before)
    assert_same_bytes(table().init_(function, *args).record, first.record)
    for one, other in ((first["weight"], second["weight"]), seeded):
        assert name == "sparse_" or (one != other).float().mean() > 0.99


RANDOM = [dtype for dtype in DTYPES if dtype.is_floating_point or dtype.is_complex]


@pytest.mark.parametrize("dtype", RANDOM, ids=dtype_name)
def test_normal_works_for_every_floating_dtype(dtype: torch.dtype) -> None:
    made, expected = table(dtype=dtype).normal_(0, 1, seed=5), table(dtype=dtype)
    values = made["weight"].to(torch.complex64 if dtype.is_complex else torch.float32)
    assert abs(float(values.abs().pow(2).mean()) - 1) < 0.1
    for name in ("before", "after"):
        assert_same_bytes(made[name], expected[name])


@pytest.mark.parametrize("dtype", FLOAT8, ids=dtype_name)
def test_float8_is_drawn_as_float32_and_rounded(dtype: torch.dtype) -> None:
    made = table(dtype=dtype).uniform_(-1, 1, seed=5)
    assert_same_bytes(made["weight"], table().uniform_(-1, 1, seed=5)["weight"].to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_numbers_and_rows_fill_every_dtype_bit_for_bit(dtype: torch.dtype) -> None:
    bits = torch.arange(12 * dtype.itemsize, dtype=torch.uint8) + 240
    row = (bits % 2 if dtype == torch.bool else bits).view(dtype)
    made, before = table(dtype=dtype), table(dtype=dtype)
    for fill, expected in (
        (lambda: made.fill_(row), row.expand(301, 12)),
        (lambda: made.fill_(True), torch.ones(301, 12).to(dtype)),
        (lambda: made.zeros_(), torch.zeros(301, 12, dtype=dtype)),
    ):
        fill()
        assert_same_bytes(made["weight"], expected)
        for name in ("before", "after"):
            assert_same_bytes(made[name], before[name])


@pytest.mark.parametrize(
    ("dtype", "given"),
    [
        (torch.float32, list(torch.tensor([0.5, 2.0], requires_grad=True))),
        (torch.bfloat16, [torch.tensor(n, dtype=torch.bfloat16) for n in (0.5, 2)]),
        (torch.float8_e4m3fn, list(torch.tensor([0.5, 2]).to(torch.float8_e4m3fn))),
        (torch.float64, np.array([0.5, 2], ">f4")),
        (torch.uint64, 2**63),
    ],
)
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_rows_of_any_numbers_fill_a_field(dtype: torch.dtype, given: Any) -> None:
    row = HostTable(2, 2, dtype).fill_(given)["weight"][1]
    assert row.tolist() == ([2**63] * 2 if dtype == torch.uint64 else [0.5, 2.0])


def test_functions_of_ones_own_run_in_parallel_too() -> None:
    def halves(rows: Tensor) -> None:
        rows.uniform_(0, 1).add_(1).clamp_(max=1.5)

    with mock.patch.object(row_blocks, "_draw_whole", side_effect=AssertionError):
        rows = table().init_(halves, seed=1)["weight"]
    assert (rows.min() >= 1, rows.max()) == (True, 1.5)


def test_partial_functions_get_the_rows_after_what_they_have() -> None:
    def scaled(scale: float, rows: Tensor, shift: float) -> None:
        rows.uniform_(0, scale).add_(shift)

    found = HostTable(50, 4).init_(partial(scaled, 0.5, shift=3.0), seed=1)["weight"]
    assert 3 <= found.min() < found.max() < 3.5
    known = HostTable(50, 4).init_(partial(init.uniform_, a=1.0, b=2.0), seed=1)
    assert_same_bytes(known["weight"], HostTable(50, 4).uniform_(1.0, 2.0, seed=1)["weight"])


def test_functions_that_read_the_rows_see_them() -> None:
    made = table().fill_(3)
    made.init_(lambda rows: rows.mul_(2))
    assert_same_bytes(made["weight"], torch.full((301, 12), 6.0))
    made.init_(lambda rows: rows[5].zero_())
    assert made["weight"].sum() == 300 * 12 * 6
    made.init_(lambda rows: rows.sub_(rows.mean()))
    assert abs(float(made["weight"].mean())) < 1e-5


@pytest.mark.parametrize(("rows", "dim"), [(0, 3), (3, 0), (2, 2)])
def test_every_initialiser_returns_the_table_also_without_rows(rows: int, dim: int) -> None:
    made = HostTable(rows, dim, memory="plain")
    filled = made.zeros_().uniform_().normal_(seed=1).init_(init.xavier_normal_).fill_(2)
    assert filled is made and bool((made["weight"] == 2).all())


@pytest.mark.parametrize(
    "initialise",
    [lambda made: made.fill_(1), lambda made: made.normal_(seed=1)],
    ids=["fill_", "normal_"],
)
def test_rows_are_written_between_two_waits_for_the_gpu(
    initialise: Callable[[HostTable], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queued kernels may write the rows back before, and CPU views are current afterwards."""
    calls: list[str] = []

    def note(owner: Any, name: str, call: str) -> None:
        function = getattr(owner, name)

        def noted(*args: Any) -> Any:
            calls.append(call)
            return function(*args)

        monkeypatch.setattr(owner, name, noted)

    note(HostTable, "settle", "wait")
    note(row_blocks, "fill_rows", "write")
    note(row_blocks, "draw_rows", "write")
    initialise(table())
    assert calls == ["wait", "write", "wait"]


def test_a_bar_is_shown_on_demand_and_else_on_a_terminal_when_it_takes_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table().normal_().zeros_()
    assert capsys.readouterr().err == ""
    table().normal_(progress=True)
    assert "301" in capsys.readouterr().err
    with mock.patch.object(progress, "_BAR_AFTER_SECONDS", 0.0):
        table().normal_()
        assert capsys.readouterr().err == ""
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        table().normal_()
        assert "301" in capsys.readouterr().err
        table().normal_(progress=False)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


# Threads

AT_EXIT = """
import atexit, torch, speedtorch
embedding = speedtorch.Embedding(10, 2, device="cpu")
optimizer = torch.optim.Adam(embedding.parameters())

@atexit.register
def last_words():
    torch.manual_seed(0)
    speedtorch.attach(optimizer, embedding)
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()
    embedding.flush()
    drawn = speedtorch.HostTable(301, 12).normal_(seed=3)["weight"]
    filled = speedtorch.HostTable(3, 2).fill_(7)["weight"]
    print(float(drawn.double().sum()), int(filled.sum()))
"""


@pytest.mark.slow
def test_everything_works_while_the_process_exits() -> None:
    done = run_warm("-c", AT_EXIT)
    with mock.patch.object(row_blocks, "_BLOCK_ELEMENTS", 1 << 20):
        expected = table().normal_(seed=3)["weight"].double().sum()
    assert (done.stdout, done.stderr) == (f"{float(expected)} 42\n", "")


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("startable", [0, 1, 2])
def test_where_threads_cannot_be_had_the_bits_are_the_same(
    monkeypatch: pytest.MonkeyPatch, startable: int
) -> None:
    expected = table().fill_(1).init_(init.xavier_uniform_, seed=5)
    made = table().fill_(1)
    torch.set_num_threads(4)
    real, left = _thread.start_new_thread, [startable]

    def start(*given: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("can't start new thread")
        return real(*given)

    monkeypatch.setattr(_thread, "start_new_thread", start)
    made.init_(init.xavier_uniform_, seed=5)
    monkeypatch.undo()
    assert_same_storage(made.record, expected.record)


def test_after_an_error_no_other_block_is_begun(threads: None) -> None:
    torch.set_num_threads(2)
    begun: list[int] = []

    def work(rows: Tensor, block: int) -> None:
        begun.append(block)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        row_blocks._in_parallel(torch.zeros(50_000, 1), work, False)
    assert len(begun) <= 2


def dealt(rows: int, block: int, turn: int) -> list[tuple[range, range]]:
    """Every third block of rows, from one on."""
    found, own = [], 0
    for first in range(turn * block, rows, 3 * block):
        there = range(first, min(first + block, rows))
        found.append((there, range(own, own + len(there))))
        own += len(there)
    return found


@pytest.mark.parametrize("block", [1, 3, 8, 16])
@pytest.mark.parametrize(
    "function",
    [init.normal_, init.xavier_uniform_, lambda rows: rows.uniform_().mul_(3).add_(1)],
    ids=["known", "by its shape", "several steps"],
)
def test_a_share_of_the_rows_has_the_bits_of_the_whole(
    function: Callable[..., object], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, columns = 29, 16
    monkeypatch.setattr(row_blocks, "_BLOCK_ELEMENTS", 8 * columns)
    whole = HostTable(rows, columns, memory="plain").init_(function, seed=5)
    for turn in range(3):
        blocks = dealt(rows, block, turn)
        own = HostTable(sum(len(here) for _, here in blocks), columns, memory="plain")
        own.init_(function, seed=5, share=Share(rows, blocks))
        for there, here in blocks:
            expected = whole["weight"][there.start : there.stop]
            assert_same_bytes(own["weight"][here.start : here.stop], expected)


def test_a_share_keeps_what_a_function_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    columns, blocks = 16, dealt(29, 3, 1)
    monkeypatch.setattr(row_blocks, "_BLOCK_ELEMENTS", 8 * columns)
    own = HostTable(9, columns, memory="plain").uniform_(seed=1)
    before = own["weight"].clone()
    own.init_(lambda rows: rows.mul_(-2), share=Share(29, blocks))
    assert_same_bytes(own["weight"], before * -2)


@pytest.mark.parametrize(
    ("function", "blocks", "message"),
    [
        (init.orthogonal_, [(range(3, 7), range(4))], "orthogonal_ needs all rows at once"),
        (init.normal_, [(range(3), range(3))], "its blocks have 3 rows, but the table has 4"),
        (init.normal_, [(range(8, 12), range(4))], "must pair some of the 9 rows"),
        (init.normal_, [(range(3), range(4))], "must pair some of the 9 rows"),
        (init.normal_, [(range(2), range(2)), (range(4, 6), range(3, 5))], "rows from 2 on"),
    ],
)
def test_a_share_that_cannot_be_drawn_is_an_error(
    function: Any, blocks: list[tuple[range, range]], message: str
) -> None:
    own = HostTable(4, 2, memory="plain").fill_(1.0)
    error = NotImplementedError if function == init.orthogonal_ else ValueError
    with pytest.raises(error, match=message):
        own.init_(function, share=Share(9, blocks))
    assert bool((own["weight"] == 1).all())


@pytest.mark.parametrize("locked", [tqdm, progress._Bar])
def test_a_forked_child_fills_a_table_whoever_had_the_lock_of_bars(locked: type[tqdm]) -> None:
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with locked.get_lock():
            held.set()
            forked.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = multiprocessing.get_context("fork").Process(target=table().normal_)
    child.start()
    forked.set()
    thread.join()
    child.join(60)
    child.kill()
    assert child.exitcode == 0

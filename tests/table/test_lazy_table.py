"""When a table takes its memory, what is refused before that, and what is saved of it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import optim

import speedtorch
from speedtorch import HostTable
from speedtorch.memory import host_memory
from speedtorch.table import new_table
from speedtorch.table.lazy_init import LazyInit
from speedtorch.table.lazy_table import LazyTable
from speedtorch.table.new_table import NewTable

ROWS, WIDTH = 1000, 8
NBYTES = 4 * ROWS * WIDTH


@pytest.fixture
def room_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were memory for one and a half of these tables."""
    monkeypatch.setattr(new_table, "_waiting", weakref.WeakSet())  # without those of other tests
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 3 * NBYTES // 2)


@pytest.mark.usefixtures("room_for_one")
def test_modules_that_have_yet_to_take_their_memory_count() -> None:
    first = speedtorch.Embedding(ROWS, WIDTH)
    with pytest.raises(
        MemoryError, match=r"EmbeddingBag: .* needs 32,000 bytes .* other tables will need 32,000"
    ):
        speedtorch.EmbeddingBag(ROWS, WIDTH)
    del first
    gc.collect()
    assert speedtorch.EmbeddingBag(ROWS, WIDTH).table.rows == ROWS


@pytest.mark.usefixtures("room_for_one")
def test_tables_of_a_gpu_count_for_no_host_memory() -> None:
    waiting = speedtorch.Embedding(ROWS, WIDTH, memory="cuda")
    assert speedtorch.Embedding(ROWS, WIDTH).table.rows == waiting.num_embeddings


@pytest.mark.usefixtures("room_for_one")
def test_a_table_that_was_refused_counts_no_more() -> None:
    for _ in range(3):
        with pytest.raises(MemoryError, match="needs 64,000 bytes .* other tables will need 0"):
            speedtorch.Embedding(2 * ROWS, WIDTH)
    speedtorch.Embedding(ROWS, WIDTH)


def test_too_little_memory_names_the_table_and_what_takes_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*args: object, **settings: object) -> None:
        raise MemoryError("no room")

    embedding = speedtorch.Embedding(ROWS, WIDTH)
    optimizer = torch.optim.Adam(embedding.parameters())
    monkeypatch.setattr(speedtorch.HostTable, "from_fields", full)
    state = r"^Embedding: no room. To use less memory: speedtorch.optim.RowWiseAdagrad .*stored="
    with pytest.raises(MemoryError, match=state):
        speedtorch.attach(optimizer, embedding)
    with pytest.raises(
        MemoryError, match=r"^Embedding: no room. To use less memory: stored=.*shard"
    ):
        embedding(torch.tensor([1]))


def test_the_remedies_for_a_16_bit_table_omit_16_bits() -> None:
    with pytest.raises(MemoryError, match="To use less memory: speedtorch.shard splits rows"):
        speedtorch.Embedding(1 << 38, 64, stored=torch.bfloat16)


def attached() -> speedtorch.Embedding:
    embedding = speedtorch.Embedding(ROWS, WIDTH)
    optimizer = torch.optim.Adam(embedding.parameters())
    speedtorch.attach(optimizer, embedding)
    embedding(torch.tensor([3, 7])).sum().backward()
    optimizer.step()
    return embedding


def test_an_attached_modules_state_dict_has_a_contiguous_copy_of_the_weight() -> None:
    embedding = attached()
    saved = embedding.state_dict()["weight"]
    assert saved.is_contiguous() and torch.equal(saved, embedding.table["weight"])
    assert saved.untyped_storage().nbytes() == NBYTES
    saved.zero_()
    assert bool(embedding.table["weight"].any())


@pytest.mark.usefixtures("room_for_one")
def test_without_room_for_a_copy_it_has_a_view_of_the_records() -> None:
    embedding = attached()
    saved = embedding.state_dict()["weight"]
    assert saved.stride() == (3 * WIDTH, 1)
    assert saved.data_ptr() == embedding.table["weight"].data_ptr()


def test_a_module_that_is_gone_leaves_its_table_to_others() -> None:
    table = speedtorch.HostTable(4, 2, memory="plain")
    first = speedtorch.Embedding.from_pretrained(table, freeze=False)
    loss = first(torch.tensor([1, 2])).sum()
    second = speedtorch.Embedding.from_pretrained(table)
    parameter = first.weight
    del first
    gc.collect()
    second.weight.requires_grad_(True)
    second(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="another module has claimed the rows of the same"):
        parameter.data.sum()
    assert loss.item() == 0  # kept by its graph all the time


def test_a_table_is_let_go_by_a_module_that_only_reads_it() -> None:
    table = speedtorch.HostTable(4, 2, memory="plain").fill_(1)
    frozen = speedtorch.Embedding.from_pretrained(table)
    rows = frozen.weight.data
    rows -= rows.mean(0)
    assert frozen(torch.tensor([3])).tolist() == [[0, 0]]
    memory = weakref.ref(table["weight"].untyped_storage())
    table.close()
    gc.collect()
    assert memory() is None
    with pytest.raises(ValueError, match="closed"):
        frozen(torch.tensor([3]))


@pytest.mark.parametrize("call", ["attach", "resize"])
def test_a_larger_table_has_the_rows_of_the_old_one_when_the_gpu_has_written_them_back(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedding = speedtorch.Embedding(ROWS, WIDTH)
    embedding(torch.tensor([3]))
    optimizer = torch.optim.Adam(embedding.parameters())
    old, settled = embedding.table, list[speedtorch.HostTable]()
    before = old["weight"].clone()
    settle, rows_of = speedtorch.HostTable.settle, speedtorch.HostTable.rows_of

    def copied(table: speedtorch.HostTable, field: str) -> torch.Tensor:
        assert table is not old or old in settled
        return rows_of(table, field)

    monkeypatch.setattr(
        speedtorch.HostTable, "settle", lambda table: (settle(table), settled.append(table))
    )
    monkeypatch.setattr(speedtorch.HostTable, "rows_of", copied)
    if call == "attach":
        speedtorch.attach(optimizer, embedding)
    else:
        embedding.resize(ROWS + 1)
    assert old.closed
    assert torch.equal(embedding.table["weight"][:ROWS], before)


FIRST_ROWS = slice(0, 2)


@pytest.mark.parametrize(
    ("zeros", "rows", "draws"),
    [
        ((None, None, None), (FIRST_ROWS, FIRST_ROWS), 2),
        ((None, None, None), (slice(None), slice(None)), 1),
        ((None, None, None), (FIRST_ROWS, slice(None)), 3),
        ((None, 1, None), (FIRST_ROWS, FIRST_ROWS), 3),
        ((None, None, 1), (FIRST_ROWS, FIRST_ROWS), 3),
    ],
    ids=["some rows", "all rows", "other rows", "after a zero row", "with a zero row"],
)
def test_draws_of_the_same_rows_become_one_and_all_happen_in_order(
    zeros: tuple[int | None, ...], rows: tuple[slice, slice], draws: int
) -> None:
    """A draw with a zero row remains alone."""
    table, expected = (
        LazyTable("rows", NewTable("rows", 4, 3, torch.float32, "plain")),
        torch.zeros(4, 3),
    )
    functions: list[Callable[[torch.Tensor], object]]
    functions = [lambda x: x.fill_(2), lambda x: x.mul_(3), lambda x: x.add_(1)]
    for function, zero, which in zip(functions, zeros, (slice(None), *rows), strict=True):
        table.draw(LazyInit((function,), seed=0, zero=zero, rows=which), anew=False)
        function(expected[which])
        if zero is not None:
            expected[zero] = 0
    assert len(table.new.samples()) == draws
    assert torch.equal(table.host_table["weight"], expected)


# ------------------------------------------------------------------------------------------------
# State in a table that was passed


def adam_of(module: speedtorch.Embedding, **settings: Any) -> optim.Adam:
    adam = optim.Adam(module.parameters(), **settings)
    speedtorch.attach(adam, module)
    return adam


def train(module: speedtorch.Embedding, adam: optim.Adam) -> None:
    draws = torch.Generator().manual_seed(1)
    for _ in range(12):
        adam.zero_grad()
        module(torch.randint(ROWS, (9,), generator=draws)).square().sum().backward()
        adam.step()
    module.flush()


@pytest.mark.parametrize(("memory", "resident"), [("plain", None), ("file", None), ("file", "2KB")])
def test_state_that_a_table_lacks_is_beside_the_state_that_it_has(
    memory: Any, resident: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "rows" if memory == "file" else None
    table = HostTable(
        ROWS, WIDTH, state=["exp_avg", "exp_avg_sq"], memory=memory, path=path, resident=resident
    ).normal_()
    expected = speedtorch.Embedding(ROWS, WIDTH, _weight=table["weight"].clone())
    train(expected, adam_of(expected, amsgrad=True))
    module = speedtorch.Embedding(ROWS, WIDTH, _weight=table)
    adam = adam_of(module, amsgrad=True)
    train(module, adam)
    for name in ("weight", "exp_avg", "exp_avg_sq"):
        assert torch.equal(table[name], expected.table[name])
    shown = adam.state_dict()["state"][0]["max_exp_avg_sq"]
    assert torch.equal(shown, expected.table["max_exp_avg_sq"])
    speedtorch.detach(adam)
    train(module, adam_of(module))  # has no use for the state beside
    assert table["exp_avg"].any() and module.trained_rows.table.place() == (table, None)


@pytest.mark.parametrize(
    ("state", "make", "message"),
    [
        (
            {"exp_avg": ((WIDTH,), torch.bfloat16)},
            optim.Adam,
            r"'exp_avg' has rows of \[8\], torch.float32, but the table has rows of \[8\],"
            r" torch.bfloat16, .* table with state=\{'exp_avg': \(\[8\], torch.float32\)\} or",
        ),
        (["sum"], speedtorch.optim.RowWiseAdagrad, r"'sum' has rows of \[1\], .* rows of \[8\], "),
    ],
    ids=["dtype", "shape"],
)
def test_state_of_another_kind_in_a_table_is_refused(state: Any, make: Any, message: str) -> None:
    table = HostTable(ROWS, WIDTH, state=state).normal_()
    module, before = speedtorch.Embedding(ROWS, WIDTH, _weight=table), table["weight"].clone()
    optimizer = make(module.parameters())
    with pytest.raises(ValueError, match=message):
        speedtorch.attach(optimizer, module)
    assert torch.equal(table["weight"], before) and not optimizer.state_dict()["state"]
    sgd = optim.SGD(module.parameters(), lr=1.0, momentum=0.5)
    speedtorch.attach(sgd, module)  # the first optimizer is not attached
    module(torch.tensor([3])).sum().backward()
    sgd.step()
    assert torch.equal(torch.from_numpy(module.numpy()[3]), before[3] - 1)


def test_state_that_was_read_is_not_mixed_with_new_state(tmp_path: Path) -> None:
    saved = speedtorch.Embedding(ROWS, WIDTH)
    train(saved, adam_of(saved))
    saved.table.save(tmp_path / "rows.safetensors")
    expected = speedtorch.Embedding(ROWS, WIDTH, _weight=saved.table["weight"].clone())
    train(expected, adam_of(expected, amsgrad=True))
    table = HostTable.open(tmp_path / "rows.safetensors", "plain")
    module = speedtorch.Embedding(ROWS, WIDTH, _weight=table)
    with pytest.warns(UserWarning, match=r"state exp_avg, exp_avg_sq, but the optimizer also has"):
        adam = adam_of(module, amsgrad=True)
    train(module, adam)
    assert torch.equal(table["weight"], expected.table["weight"])
    assert torch.equal(table["exp_avg"], saved.table["exp_avg"])


@pytest.mark.parametrize("kind", [int, np.int64, str])
def test_a_size_may_be_an_integer_of_numpy(kind: Any, tmp_path: Path) -> None:
    size = "320 B" if kind is str else kind(320)
    with HostTable(ROWS, WIDTH, memory="file", path=tmp_path / "rows", resident=size) as table:
        assert table.report().slots == 320 // (4 * WIDTH)

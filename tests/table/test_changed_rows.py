"""Which rows of a table were written: all that were, and as a rule no others."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import NEEDS_GPU
from torch import Tensor, nn, optim

import speedtorch
from speedtorch import HostTable
from speedtorch.table import host_table

ROWS = 50
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "capacity": {"capacity": 16},
    "cache": {"cache": "1KiB"},
    "capacity and cache": {"capacity": 16, "cache": "1KiB"},
    "bfloat16": {"stored": torch.bfloat16},
}


class Run:
    """An embedding whose table notes changes, and its optimizer."""

    def __init__(self, device: str, **settings: Any) -> None:
        self.emb = speedtorch.Embedding(ROWS, 4, device=device, **settings)
        self.optimizer = optim.Adam(
            self.emb.parameters(), lr=0.1, capturable=device == "cuda", foreach=False
        )
        speedtorch.attach(self.optimizer, self.emb)
        self.train([0, 1])
        self.table = self.emb.table
        self.since = self.table.track_changes()

    def train(self, *batches: list[int]) -> None:
        device = self.emb.weight.device
        given = [torch.tensor(ids, device=device) for ids in batches]
        for ids in speedtorch.prefetch(given, self.emb, ids=lambda ids: ids):
            self.step(ids)

    def step(self, ids: Tensor) -> None:
        self.optimizer.zero_grad()
        self.emb(ids).sin().sum().backward()
        self.optimizer.step()

    def changed(self) -> list[int]:
        return self.table.changed(self.since).tolist()


@pytest.fixture(params=WAYS)
def run(request: pytest.FixtureRequest, device: str) -> Run:
    return Run(device, **WAYS[request.param])


def test_trained_rows_are_reported(run: Run) -> None:
    assert run.changed() == []
    run.train([3, 7, 3])
    assert run.changed() == [3, 7]
    run.train([7, 9], [20, 3], [1])
    assert run.changed() == [1, 3, 7, 9, 20]


@pytest.mark.parametrize("how", WAYS)
def test_a_table_goes_on_to_note_changes_when_its_optimizer_is_attached(
    how: str, device: str
) -> None:
    emb = speedtorch.Embedding(ROWS, 4, device=device, **WAYS[how])
    since = emb.table.track_changes()
    optimizer = optim.Adam(emb.parameters(), lr=0.1, foreach=False)
    speedtorch.attach(optimizer, emb)
    assert emb.table.changed(since).tolist() == list(range(ROWS))  # all have state now
    since = emb.table.track_changes()
    emb(torch.tensor([3, 7], device=device)).sum().backward()
    optimizer.step()
    assert emb.table.changed(since).tolist() == [3, 7]
    emb.table["weight"][1] = 2.0
    assert emb.table.changed(since).tolist() == list(range(ROWS))


def test_versions_have_their_own_rows(run: Run) -> None:
    run.train([3, 7])
    first, run.since = run.since, run.table.track_changes()
    assert run.changed() == []
    run.train([7, 8])
    assert run.changed() == [7, 8]
    assert run.table.changed(first).tolist() == [3, 7, 8]


def test_reads_are_not_reported(run: Run) -> None:
    with torch.no_grad():
        run.emb.eval()(torch.arange(ROWS, device=run.emb.weight.device))
    run.emb.train()
    run.emb.state_dict()
    run.optimizer.state_dict()
    run.table.gather(torch.arange(ROWS), "weight")
    _ = run.table["weight"].clone(), run.table.record.sum()
    run.emb.flush()
    assert run.changed() == []


def test_rows_of_scatter_are_reported(run: Run) -> None:
    weight = run.table["weight"]
    rows = torch.ones(2, 4, dtype=weight.dtype)
    run.table.scatter(torch.tensor([[5], [6]]), rows[:, None], "weight")
    run.train([2])
    assert run.changed() == [2, 5, 6]
    with pytest.raises(IndexError):
        run.table.scatter(torch.tensor([5, ROWS]), rows, "weight")


@pytest.mark.parametrize(
    "write",
    [
        lambda run: run.table["weight"][3].fill_(1.0),
        lambda run: run.table["exp_avg"].zero_(),
        lambda run: run.table.record[2].zero_(),
        lambda run: run.table.normal_(),
        lambda run: run.table.fill_(2),
        lambda run: run.emb.load_state_dict({"weight": torch.zeros(ROWS, 4)}),
        lambda run: run.optimizer.load_state_dict(run.kept),
        lambda run: nn.init.ones_(run.table["weight"]),
        lambda run: torch.ops.speedtorch.pinned_scatter(
            run.table["weight"],
            torch.tensor([1]),
            torch.ones(1, 4, dtype=run.table["weight"].dtype),
            False,
        ),
    ],
    ids=["view", "state", "record", "init", "fill", "load", "load state", "torch.nn.init", "op"],
)
def test_writes_that_name_no_rows_count_for_all(run: Any, write: Callable[[Any], object]) -> None:
    run.kept = run.optimizer.state_dict()
    run.train([4])
    before = run.table.track_changes()
    write(run)
    run.train([3])
    assert run.table.changed(before).tolist() == list(range(ROWS))
    run.since = run.table.track_changes()
    run.train([3])
    assert run.changed() == [3]


def test_a_table_without_a_module(device: str) -> None:
    table = HostTable(ROWS, 4)
    since = table.track_changes()
    table.scatter(torch.tensor([8, 2], device=device), torch.ones(2, 4, device=device), "weight")
    table.scatter(torch.tensor([9]), torch.ones(1, 4), accumulate=True)
    assert table.changed(since).tolist() == [2, 8, 9]


def test_modules_that_train_together_go_on_as_before(device: str) -> None:
    worlds = []
    for notes in (True, False):
        torch.manual_seed(0)
        pair = nn.ModuleDict({each: speedtorch.Embedding(ROWS, 4, device=device) for each in "ab"})
        optimizer = optim.Adam(pair.parameters(), lr=0.1)
        speedtorch.attach(optimizer, pair)
        given = [{"a": torch.tensor([n, 2]), "b": torch.tensor([n, 3])} for n in (5, 6, 5, 9)]
        tables = [pair[each].table for each in "ab"]
        since: list[int] = []
        loop = speedtorch.prefetch(
            given, pair, ids=lambda of, pair=pair: {pair[each]: of[each] for each in "ab"}
        )
        for number, batch in enumerate(loop):
            optimizer.zero_grad()
            torch.stack([pair[name](batch[name]).sin().sum() for name in "ab"]).sum().backward()
            optimizer.step()
            if number == 0 and notes:
                since = [table.track_changes() for table in tables]
        reported = [table.changed(n).tolist() for table, n in zip(tables, since, strict=False)]
        worlds.append((reported, [table["weight"].clone() for table in tables]))
    (reported, noted), (_, plain) = worlds
    assert reported == [[2, 5, 6, 9], [3, 5, 6, 9]]
    assert all(torch.equal(one, other) for one, other in zip(noted, plain, strict=True))


@NEEDS_GPU
@pytest.mark.parametrize("way", [each for each in WAYS if "capacity" in each])
def test_replays_of_a_graph_are_reported(way: str) -> None:
    run = Run("cuda", **WAYS[way])
    example = torch.tensor([3, 4], device="cuda")
    step = speedtorch.graphed(run.step, example, modules=run.emb, optimizers=run.optimizer)
    run.since = run.table.track_changes()
    assert run.changed() == []
    step(torch.tensor([7, 9], device="cuda"))
    step(torch.tensor([9, 1], device="cuda"))
    assert run.changed() == [1, 7, 9]
    run.since = run.table.track_changes()
    step(torch.tensor([2, 2], device="cuda"))
    assert run.changed() == [2]


@NEEDS_GPU
def test_a_graph_of_before_is_refused() -> None:
    emb = speedtorch.Embedding(ROWS, 4, device="cuda", capacity=8)
    sgd = optim.SGD(emb.parameters(), lr=0.1)

    def train(ids: Tensor) -> None:
        sgd.zero_grad()
        emb(ids).sum().backward()
        sgd.step()

    ids = torch.tensor([1], device="cuda")
    step = speedtorch.graphed(train, ids, modules=emb, optimizers=sgd)
    with pytest.raises(RuntimeError, match="tracking its changes is not possible while a capt"):
        emb.table.track_changes()
    del step
    emb.table.track_changes()


def test_tables_that_other_processes_write_raise(tmp_path: Path) -> None:
    shared = HostTable(ROWS, 4, memory="shared")
    with pytest.raises(ValueError, match="only by this process, but memory is 'shared'"):
        shared.track_changes()
    for step in range(2):
        values = {"rows": shared["weight"], "step": step}
        speedtorch.save(tmp_path, base=step or None, **values)
        shared["weight"].fill_(1.0)
    assert not speedtorch.load(tmp_path, generation=1)["rows"].any()
    assert speedtorch.load(tmp_path)["rows"].all()
    shared.save(tmp_path / "table.npy")
    with pytest.raises(ValueError, match="memory is 'mapped'"):
        HostTable.open(tmp_path / "table.npy", "mapped").track_changes()


def test_wrong_numbers_raise() -> None:
    table = HostTable(3, 1, memory="plain")
    with pytest.raises(ValueError, match=r"track_changes\(\) has returned \(none yet\), got 1"):
        table.changed(1)
    table.track_changes()
    for wrong in (0, 2):
        with pytest.raises(ValueError, match=rf"\(1 to 1\), got {wrong}"):
            table.changed(wrong)
    empty = HostTable(0, 1, memory="plain")
    assert empty.changed(empty.track_changes()).tolist() == []


def test_a_closed_table_frees_its_change_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_table, "_tables", weakref.WeakSet())
    table = HostTable(3, 1, memory="plain")
    since = table.track_changes()
    record = weakref.ref(table.changes)
    assert host_table.any_tracks_changes()
    table.close()
    assert record() is None
    assert not host_table.any_tracks_changes()
    for call in (table.track_changes, lambda: table.changed(since)):
        with pytest.raises(ValueError, match="this table is closed"):
            call()


def test_bad_ids_raise_and_are_not_recorded() -> None:
    table = HostTable(3, 1, memory="plain")
    since = table.track_changes()
    wrong: list[Any] = [[1], torch.ones(1), torch.ones(1, dtype=torch.int64, device="meta")]
    for index in (*wrong, torch.ones(1, dtype=torch.int64).to_sparse()):
        with pytest.raises((TypeError, ValueError), match="index|meta"):
            table.scatter(index, torch.ones(1, 1))
    assert table.changed(since).tolist() == []


def test_another_default_device_is_no_matter() -> None:
    table = HostTable(3, 1, memory="plain")
    since = table.track_changes()
    for write, reported in (
        (lambda: table.scatter(torch.tensor([1]), torch.ones(1, 1)), [1]),
        (lambda: table.fill_(2), [0, 1, 2]),
    ):
        write()
        with torch.device("meta"):
            assert table.changed(since).tolist() == reported

"""Files that ranks write together: each rank's rows at their places, by one group of threads."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from speedtorch.checkpoints.joined_files import JoinedFile, JoinedRows
from speedtorch.files import field_blocks
from speedtorch.files.field_blocks import have_same_bytes
from speedtorch.files.threads import Threads, threads

RANKS, RUNS, ROWS = 2, 40, 3  # of a run
FIELDS = {"long": 320, "short": 1}


def strided(width: int) -> Tensor:
    """A field of int16, one of several in a record."""
    numbers = torch.arange(RUNS * ROWS * (width + 5)) * 7919 % 65_521 - 32_768
    return numbers.to(torch.int16).view(RUNS * ROWS, width + 5)[:, 2:-3]


def file_of(rank: int) -> JoinedFile:
    """A file as a rank knows it, to which ranks deal runs of rows in turn."""
    fields = {}
    for name, width in FIELDS.items():
        rows = strided(width)
        own = {at: rows[at : at + ROWS] for at in range(rank * ROWS, len(rows), RANKS * ROWS)}
        fields[name] = JoinedRows(tuple(rows.shape), rows.dtype, own)
    return JoinedFile("rows.safetensors", fields)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many threads each group of them may have."""
    made: list[int] = []

    def noted(most: int) -> AbstractContextManager[Threads]:
        made.append(most)
        return threads(most)

    monkeypatch.setattr(field_blocks, "threads", noted)
    return made


@pytest.mark.parametrize("block", [100, 1_000, 1 << 20])
def test_a_file_has_the_rows_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pools: list[int], block: int
) -> None:
    monkeypatch.setattr(field_blocks, "_BLOCK_BYTES", block)
    file_of(0).make(str(tmp_path))
    pools.clear()
    for file in map(file_of, range(RANKS)):
        file.write(str(tmp_path), file.own)
    assert len(pools) == RANKS
    found = load_file(tmp_path / "rows.safetensors")
    assert all(torch.equal(found[name], strided(width)) for name, width in FIELDS.items())


def test_runs_of_rows_are_compared_by_one_group_of_threads(pools: list[int]) -> None:
    rows, others = strided(7), strided(7).clone()

    def are_same() -> bool:
        return have_same_bytes(zip(rows.split(ROWS), others.split(ROWS), strict=True))

    assert are_same()
    others[-1, -1] += 1
    assert not are_same()
    assert len(pools) == 2

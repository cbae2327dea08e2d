"""If the ranks on a machine need too much memory, all raise before they allocate."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_backends import on_ranks
from torch import nn

import speedtorch
from speedtorch.memory import host_memory
from speedtorch.nn.row_module import RowModule
from speedtorch.parallel import machine
from speedtorch.parallel.shard import shard

ROWS, WIDTH = 41, 3
NBYTES = 4 * ROWS * WIDTH  # of all ranks' rows together


def made(memory: str = "plain") -> tuple[nn.Sequential, RowModule]:
    """A model with an Embedding, and the Embedding."""
    module = speedtorch.Embedding(ROWS, WIDTH, memory=memory)
    return nn.Sequential(module), module


def refused(message: str, model: nn.Module) -> None:
    """shard() raises on this rank; the other ranks wait for it."""
    with pytest.raises(MemoryError, match=message):
        shard(model)
    dist.barrier()


@on_ranks
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_on_a_machine_need_memory_for_the_rows_of_all() -> None:
    """Each rank's rows would fit, but not those of all."""
    ranks = dist.get_world_size()
    gc.collect()  # rows of earlier tests that wait for their memory count as well
    with pytest.MonkeyPatch.context() as patch:
        # One rank finds less than the others; what it finds counts.
        available = NBYTES - (dist.get_rank() == 1)
        patch.setattr(host_memory, "available_bytes", lambda: available)
        model, module = made()
        refused(
            f"the rows of {ranks} ranks on host .* need {NBYTES} bytes of host memory, but only"
            f" {NBYTES - 1} bytes are available.*SPEEDTORCH_MEMORY_CHECK=0",
            model,
        )
        assert module.trained_rows.table.shard_spec is None
        assert not hasattr(model, "_ddp_params_and_buffers_to_ignore")
        assert module.table.rows == ROWS

        on_gpu, _ = made("cuda")
        shard(on_gpu)
        patch.setattr(host_memory, "available_bytes", lambda: NBYTES)
        first, sharded = made()
        shard(first)
        second, _ = made()
        refused(f"need {2 * NBYTES:,} bytes", second)
        assert sharded(torch.arange(ROWS)).shape == (ROWS, WIDTH)
        shard(second)  # the first has its memory by now
        patch.setenv("SPEEDTORCH_MEMORY_CHECK", "0")
        patch.setattr(host_memory, "available_bytes", lambda: 0)
        shard(made()[0])


@on_ranks
@pytest.mark.parametrize("ranks", [3])
def test_ranks_on_other_machines_do_not_count() -> None:
    """The last rank is alone on a machine of its own, with the host name of the others'."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    is_alone = rank == ranks - 1
    gc.collect()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "this_machine", lambda: ("host", str(is_alone)))
        patch.setattr(host_memory, "available_bytes", lambda: NBYTES - 1)
        waiting, _ = made()
        shard(waiting)
        message = f"the rows of {ranks - 1} ranks on host 'host' need ([\\d,]+) bytes"
        model, _ = made()
        with pytest.raises(MemoryError, match=message) as caught:
            shard(model)
        found = re.search(message, str(caught.value))
        assert found is not None
        assert NBYTES <= int(found[1].replace(",", "")) < 2 * NBYTES


def test_machines_with_one_name_differ_by_their_boot_id(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "boot_id"
    monkeypatch.setattr(machine, "_BOOT", file)
    found: Callable[[], tuple[str, str]] = machine.this_machine
    without = found()
    file.write_text("one\n")
    one = found()
    file.write_text("other\n")
    assert len({without, one, found()}) == 3
    assert len({without[0], one[0], found()[0]}) == 1

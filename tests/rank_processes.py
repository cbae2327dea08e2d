"""Runs a function in several processes that belong to one group of torch.distributed."""

from __future__ import annotations

import datetime
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = 60.0  # seconds
CPU = torch.device("cpu")


def _begin(
    rank: int,
    function: Callable[..., Any],
    size: int,
    folder: str,
    timeout: float,
    backend: str,
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    waits = datetime.timedelta(seconds=timeout)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, f"file://{folder}/meet", timeout=waits, rank=rank, world_size=size
    )
    try:
        function(*arguments)
    except BaseException:
        Path(folder, f"failed_{rank}").write_text(traceback.format_exc())
        raise
    finally:
        dist.destroy_process_group()


def own_device() -> torch.device:
    """Where a rank trains: on its own GPU, or on the CPU."""
    return torch.device("cuda", dist.get_rank()) if dist.get_backend() == "nccl" else CPU


def in_processes(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float = TIMEOUT,
    backend: str = "gloo",
) -> None:
    """Calls function(*arguments) on each rank; fails with what every rank that failed has said."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(_begin, (function, size, folder, timeout, backend, arguments), size)  # type: ignore[no-untyped-call]
        except Exception as error:
            said = [path.read_text() for path in sorted(Path(folder).glob("failed_*"))]
            raise AssertionError("\n".join(said) or str(error)) from None


def exit_codes(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float = TIMEOUT,
    backend: str = "gloo",
) -> list[int | None]:
    """How each rank ends, while the others go on; None of one that does not end."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        given = (function, size, folder, timeout, backend, arguments)
        ranks = [context.Process(target=_begin, args=(rank, *given)) for rank in range(size)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(timeout + 60)
        codes = [each.exitcode for each in ranks]
        for each in ranks:
            each.kill()
    return codes

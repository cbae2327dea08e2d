"""Runs a function in several processes that belong to one group of torch.distributed."""

from __future__ import annotations

import atexit
import datetime
import faulthandler
import gc
import os
import queue
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest.mock import patch

import known_probes
import paces
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = 60.0  # seconds
# Seconds of one call: ranks that hang say where before their test ends. Long runs are asked for.
LONG_RUNS = {
    "SPEEDTORCH_PROGRAMS",
    "SPEEDTORCH_RANK_PROGRAMS",
    "SPEEDTORCH_ROUNDS",
    "SPEEDTORCH_SOAK",
}
AT_MOST = 3000.0 if LONG_RUNS & set(os.environ) else 240.0
CPU = torch.device("cpu")
ROOT = str(Path(__file__).parents[1])


def own_device() -> torch.device:
    """Where a rank trains: on its own GPU, on the only GPU, or on the CPU."""
    if dist.get_backend() != "nccl":
        return CPU
    return torch.device("cuda", dist.get_rank() % torch.cuda.device_count())


@cache
def warm_context() -> Any:
    """Starts processes as forks of one that has imported what takes seconds."""
    context = mp.get_context("forkserver")
    # Dynamo, too, as the first optimizer of a process imports it.
    modules = ["torch", "torch._dynamo", "torch.distributed", "pytest", "speedtorch"]
    context.set_forkserver_preload(modules)
    # It has not our sys.path. A fork cannot use a GPU that was woken before it: none is, should an
    # import look for one.
    environment = {"PYTHONPATH": ROOT, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    with patch.dict(os.environ, environment):
        forkserver.ensure_running()
    return context


def begin(rank: int, size: int, folder: str, timeout: float, backend: str) -> None:
    """Makes this process one of the ranks."""
    faulthandler.register(signal.SIGUSR1)
    if backend == "gloo":
        # The first backward in a fork starts a thread for each GPU. Two such threads would race for
        # torch's thread pool. If no GPU is visible, the CUDA driver ends the fork by a signal.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.partition(",")[0]
    torch.set_num_threads(1)
    if backend == "nccl":
        if (gpus := torch.cuda.device_count()) < size:
            # NCCL accepts two ranks on one GPU only if it takes them for ranks of two hosts.
            os.environ.update(NCCL_HOSTID=str(rank), NCCL_SOCKET_IFNAME="lo")
        torch.cuda.set_device(rank % gpus)
    known_probes.install()
    paces.install()
    gc.freeze()  # or each collection would look at all that torch made
    waits = datetime.timedelta(seconds=timeout)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group(backend, rendezvous, timeout=waits, rank=rank, world_size=size)


def _serve(rank: int, calls: Any, results: Any, *how: Any) -> None:
    begin(rank, *how)
    while (call := calls.get()) is not None:
        function, arguments = call
        paces.choose()
        try:
            function(*arguments)
        except BaseException:
            results.put((rank, traceback.format_exc()))
        else:
            results.put((rank, None))


class Ranks:
    """Processes of a group, which call one function after another."""

    def __init__(self, size: int, backend: str, timeout: float) -> None:
        context = warm_context()
        self._folder = tempfile.TemporaryDirectory()
        self._calls = [context.SimpleQueue() for _ in range(size)]
        self._results: Any = context.Queue()
        how = (self._results, size, self._folder.name, timeout, backend)
        self._processes = [
            context.Process(target=_serve, args=(rank, calls, *how), daemon=True)
            for rank, calls in enumerate(self._calls)
        ]
        for process in self._processes:
            process.start()

    @property
    def alive(self) -> bool:
        """Whether all processes are running."""
        return all(process.is_alive() for process in self._processes)

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Calls function(*arguments) on each rank; fails with the tracebacks of all ranks."""
        for calls in self._calls:
            calls.put((function, arguments))
        waiting, errors = set(range(len(self._calls))), []
        give_up = time.monotonic() + AT_MOST
        while waiting and time.monotonic() < give_up:
            try:
                rank, error = self._results.get(timeout=0.2)
            except queue.Empty:
                error, rank = (None if self.alive else "a rank has ended"), None
            waiting.discard(rank)
            if error is not None:
                errors.append(error)
                give_up = min(give_up, time.monotonic() + 5)  # the other ranks wait for this one
        if errors or waiting:
            errors += [f"rank {rank} has not answered" for rank in waiting]
            for rank in waiting:  # says where it is
                if self._processes[rank].is_alive():
                    os.kill(self._processes[rank].pid, signal.SIGUSR1)
            time.sleep(0.5 if waiting else 0)
            self.end()
            raise AssertionError("\n".join(dict.fromkeys(errors)))

    def end(self) -> None:
        """Ends the processes; those that wait for a call end by themselves, which counts lines."""
        for calls in self._calls:
            calls.put(None)
        for process in self._processes:
            process.join(2)
            process.kill()
            process.join()
        self._folder.cleanup()


@cache
def _kept(size: int, backend: str) -> list[Ranks]:
    return []


def in_processes(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float | None = None,
    backend: str = "gloo",
) -> None:
    """Calls function(*arguments) on each rank; fails with the tracebacks of all ranks.

    The processes serve later calls, unless the call has a timeout.
    """
    if timeout is not None:
        ranks = Ranks(size, backend, timeout)
        try:
            return ranks.call(function, arguments)
        finally:
            ranks.end()
    kept = _kept(size, backend)
    if not kept or not kept[0].alive:
        ranks = Ranks(size, backend, TIMEOUT)
        atexit.register(ranks.end)
        kept[:] = [ranks]
    kept[0].call(function, arguments)


def in_groups_at_once(
    size: int, function: Callable[..., Any], *calls: tuple[Any, ...], timeout: float
) -> None:
    """Calls function(*arguments) for each of `calls`, in a group of ranks each: ranks wait long."""
    warm_context()  # changes the environment meanwhile
    with ThreadPoolExecutor(len(calls)) as threads:
        groups = [
            threads.submit(in_processes, size, function, *arguments, timeout=timeout)
            for arguments in calls
        ]
        for group in groups:
            group.result()


def _once(rank: int, function: Callable[..., Any], arguments: tuple[Any, ...], *how: Any) -> None:
    begin(rank, *how)
    function(*arguments)
    dist.destroy_process_group()


def exit_codes(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float = TIMEOUT,
    backend: str = "gloo",
) -> list[int | None]:
    """The exit code of each rank; None if a rank does not end."""
    context = warm_context()
    with tempfile.TemporaryDirectory() as folder:
        how = (function, arguments, size, folder, timeout, backend)
        ranks = [context.Process(target=_once, args=(rank, *how)) for rank in range(size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(timeout + 60)
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
    return codes

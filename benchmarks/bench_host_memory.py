"""A table of 5.12 GB made ready: time, resident bytes and page tables of each kind of memory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.harness import Measured
from benchmarks.sizes import DEVICE, SIZES

ROWS, COLUMNS = SIZES.rows, 128
PAYLOAD = ROWS * COLUMNS * 4
KINDS = ("managed", "registered", "plain", "torch pin_memory") if DEVICE == "cuda" else ("plain",)
TITLE = f"{ROWS:,} x {COLUMNS} float32 ({PAYLOAD / 1e9:.2f} GB) made ready"


def status_bytes(key: str) -> int:
    """A size of /proc/self/status."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)
    )
    return int(line.split()[1]) * 1024


def make_ready(kind: str) -> dict[str, float]:
    """Allocates one table in this process, which has made a CUDA context before."""
    import speedtorch

    torch.zeros(1, device=DEVICE)
    if kind != "torch pin_memory":
        speedtorch.empty(1 << 22, memory=kind)  # what the first allocation loads and starts
    resident, tables = status_bytes("VmRSS:"), status_bytes("VmPTE:")
    begin = time.perf_counter()
    if kind == "torch pin_memory":
        table = torch.empty(ROWS, COLUMNS, pin_memory=True)
    else:
        table = speedtorch.empty((ROWS, COLUMNS), memory=kind)
    seconds = time.perf_counter() - begin
    assert table.numel() == ROWS * COLUMNS
    return {
        "seconds": seconds,
        "resident_bytes_beyond_payload": status_bytes("VmRSS:") - resident - PAYLOAD,
        "page_table_bytes": status_bytes("VmPTE:") - tables,
    }


def measured() -> Measured:
    """Each kind three times in processes of their own, so that one does not warm up the next."""
    for kind in KINDS:
        command = [sys.executable, "-m", "benchmarks.bench_host_memory", kind]
        runs = [
            json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            for _ in range(3)
        ]
        yield kind, sorted(runs, key=lambda run: run["seconds"])[1]


if __name__ == "__main__":
    print(json.dumps(make_ready(sys.argv[1])))

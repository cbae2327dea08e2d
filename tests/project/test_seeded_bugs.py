"""The sanitizers of `make sanitize` see bugs that are put into the kernels, one at a time."""

from __future__ import annotations

import functools
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import NamedTuple

import pytest
from documents import ROOT
from sanitized import SANITIZERS
from warm_python import finished

pytestmark = [pytest.mark.nightly, pytest.mark.slow]


class Bug(NamedTuple):
    """A change of one place of a file, a program that meets it, and what is said then."""

    file: str
    right: str
    wrong: str
    program: str
    message: str
    checks: str = "address,undefined"


BUGS = {
    "a byte too many of each gathered row": Bug(
        "move/cpu_copy.cpp",
        "std::memcpy(out.row(i), table.row(id[i]), width); });",
        "std::memcpy(out.row(i), table.row(id[i]), width + 1); });",
        "speedtorch.pinned_gather(torch.zeros(9, 5), torch.arange(9))",
        "heap-buffer-overflow",
    ),
    "a byte too many of each scattered row": Bug(
        "move/cpu_copy.cpp",
        "[width](char* row, const char* from) { std::memcpy(row, from, width); });",
        "[width](char* row, const char* from) { std::memcpy(row, from, width + 1); });",
        "speedtorch.pinned_scatter(torch.zeros(9, 5), torch.arange(9), torch.ones(9, 5))",
        "heap-buffer-overflow",
    ),
    "ids that are not looked at": Bug(
        "core/tensor_checks.cpp",
        "if (!good) all_good = false;",
        "if (!good) all_good = true;",
        "speedtorch.pinned_gather(torch.zeros(9, 5), torch.tensor([9]))",
        "heap-buffer-overflow",
    ),
    "no room for a counter of each thread": Bug(
        "move/cpu_copy.cpp",
        "std::vector<int64_t> ends(static_cast<size_t>(chunks * stride));",
        "std::vector<int64_t> ends(static_cast<size_t>(chunks * stride - stride - 1));",
        "torch.set_num_threads(2); i = torch.arange(1 << 17) % 5000;"
        " speedtorch.pinned_scatter(torch.zeros(5000, 64), i, torch.ones(1 << 17, 64))",
        "heap-buffer-overflow",
    ),
    "a bag's last id and the one after it": Bug(
        "ops/table_ids.cpp",
        "i < work.offsets[bag + 1]; ++i",
        "i <= work.offsets[bag + 1]; ++i",
        "torch.ops.speedtorch.table_ids(torch.tensor([1, 2]), torch.tensor([0, 1, 2]),"
        " torch.tensor([[0, 5]]), 2)",
        "heap-buffer-overflow",
    ),
    "a row more than arrives": Bug(
        "ops/optimizer_state_swap.cpp",
        "parallel_for(0, load.count, entries_per_task",
        "parallel_for(0, load.count + 1, entries_per_task",
        "e = speedtorch.Embedding(9, 5); e(torch.tensor([3, 8]))",
        "AddressSanitizer",
    ),
    "numbers that begin anywhere": Bug(
        "move/cpu_copy.cpp",
        "if (bits % sizeof(T) != 0) {",
        "if (bits % sizeof(T) == 99) {",
        "t = torch.frombuffer(bytearray(181), dtype=torch.float32, offset=1).view(9, 5);"
        " speedtorch.pinned_scatter(t, torch.arange(9), torch.ones(9, 5), accumulate=True)",
        "runtime error: (load of )?misaligned|misaligned address",
    ),
    "a sum of ids that is too large": Bug(
        "ops/table_ids.cpp",
        "id >= 0 && id < rows ?",
        "id >= 0 ?",
        "torch.ops.speedtorch.table_ids(torch.tensor([2**63 - 1]), torch.tensor([0, 1, 1]),"
        " torch.tensor([[7, 5]]), 2)",
        "signed integer overflow",
    ),
    "two threads that write one row": Bug(
        "move/cpu_copy.cpp",
        "const int64_t begin = task == 0 ? chunk_begin(chunk) : end[-1];",
        "const int64_t begin = chunk_begin(chunk);",
        # Few bytes: stores past the caches are not looked at.
        "torch.set_num_threads(2); i = torch.arange(1 << 15) % 5000;"
        " speedtorch.pinned_scatter(torch.zeros(5000, 16), i, torch.ones(1 << 15, 16))",
        "data race",
        "thread",
    ),
    "pieces of new memory that threads take without the lock": Bug(
        "memory/host_pages.cpp",
        "const std::scoped_lock lock(mutex);\n    const bool is_due",
        "const bool is_due",
        "speedtorch.memory.empty(1 << 27, dtype=torch.uint8, memory='plain')",
        "data race",
        "thread",
    ),
}


@pytest.fixture(scope="module")
def tree_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The sources, built once with each sanitizer: after a change one file is compiled again."""

    @functools.cache
    def tree_of(checks: str) -> Path:
        if lack := SANITIZERS[checks].lacks():
            pytest.skip(lack)
        made = tmp_path_factory.mktemp("seeded")
        ignored = shutil.ignore_patterns("_C*.so", "*.pyc")
        for name in ("csrc", "speedtorch"):
            shutil.copytree(ROOT / name, made / name, ignore=ignored)
        for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
            if (ROOT / name).exists():
                shutil.copy(ROOT / name, made / name)
        SANITIZERS[checks].build(made, "--inplace")
        return made

    return tree_of


def run(checks: str, tree: Path, program: str) -> CompletedProcess[str]:
    code = f"import torch, speedtorch\n{program}\nprint(speedtorch.__file__)"
    command = SANITIZERS[checks].python("-c", code)
    environment = os.environ | {"PYTHONPATH": str(tree)}
    return finished(command, env=environment, cwd=tree)


@pytest.mark.parametrize("name", BUGS)
def test_what_is_right_is_silent(name: str, tree_of: Callable[[str], Path]) -> None:
    bug = BUGS[name]
    tree = tree_of(bug.checks)
    done = run(bug.checks, tree, f"\ntry:\n    {bug.program}\nexcept IndexError: pass\n")
    assert done.returncode == 0 and "runtime error" not in done.stderr, done.stderr
    assert done.stdout.startswith(str(tree))


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_seen(name: str, tree_of: Callable[[str], Path]) -> None:
    bug = BUGS[name]
    tree = tree_of(bug.checks)
    path = tree / "csrc" / bug.file
    source = path.read_text()
    assert source.count(bug.right) == 1
    path.write_text(source.replace(bug.right, bug.wrong))
    try:
        SANITIZERS[bug.checks].build(tree, "--inplace")
        done = run(bug.checks, tree, bug.program)
        assert done.returncode != 0 and re.search(bug.message, done.stderr), done.stderr[-3000:]
    finally:
        path.write_text(source)

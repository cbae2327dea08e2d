"""Tests with a sanitizer: the library built with one of gcc's, or a tool of compute-sanitizer.

`python tests/sanitized.py thread ARGUMENTS` builds the library in a folder of its own, for the CPU
alone, and runs pytest with these arguments. `python tests/sanitized.py memcheck ARGUMENTS` runs it
in one process with the ordinary library on a GPU. Where the machine lacks what the sanitizer needs,
it says so.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).parents[1]


class Sanitizer(NamedTuple):
    """A value of SPEEDTORCH_SANITIZE, the runtime library, and how programs run with it."""

    checks: str
    runtime: str
    environment: Mapping[str, str]
    started_by: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As a compiler is given it."""
        return f"-fsanitize={self.checks}"

    def libraries(self) -> list[str]:
        """What is loaded before Python, which has no sanitizer."""
        names = [self.runtime, "libstdc++.so.6"]
        found = [["gcc", f"-print-file-name={name}"] for name in names]
        return [subprocess.check_output(each, text=True).strip() for each in found]

    def lacks(self) -> str | None:
        """What this machine lacks, if it lacks something."""
        for program in ("gcc", *self.started_by[:1]):
            if shutil.which(program) is None:
                return f"{program} is not installed"
        if not Path(self.libraries()[0]).is_absolute():  # gcc prints a name that it does not know
            return f"gcc has no {self.runtime}"
        start = [*self.started_by, "true"]
        if subprocess.run(start, capture_output=True).returncode != 0:
            return f"{' '.join(self.started_by)} is not permitted"
        return None

    def build(self, tree: Path, *arguments: str) -> None:
        """Builds the library of a source tree, without CUDA kernels."""
        options = {"SPEEDTORCH_CUDA": "0", "SPEEDTORCH_SANITIZE": self.checks}
        command = [sys.executable, "setup.py", "build_ext", *arguments]
        subprocess.run(command, cwd=tree, env=os.environ | options, check=True)

    def python(self, *arguments: str) -> list[str]:
        """The command of a Python with these arguments that may load the library.

        The libraries are loaded once started_by has done its work: it may not run with them.
        """
        settings = [f"{name}={value}" for name, value in self.environment.items()]
        settings.append(f"LD_PRELOAD={' '.join(self.libraries())}")
        return [*self.started_by, "env", *settings, sys.executable, *arguments]

    def prepared(self) -> list[str]:
        """Builds the package in build/; pytest's arguments that let tests have it."""
        folder = ROOT / "build" / f"sanitized-{self.checks}"
        shutil.rmtree(folder, ignore_errors=True)
        ignored = shutil.ignore_patterns("_C*.so", "__pycache__")
        shutil.copytree(ROOT / "speedtorch", folder / "speedtorch", ignore=ignored)
        (folder / "docs").symlink_to(ROOT / "docs")  # tests look for pages beside the package
        self.build(ROOT, "--build-lib", str(folder))
        return ["-o", f"pythonpath={folder}"]


# Torch captures no graph where each tensor has memory of its own.
ON_A_GPU = "not cpu and not captured"
OURS = ("--kernel-name", "kns=speedtorch")
"""Only kernels whose mangled names have our namespace: all others run at full speed."""


class GpuTool(NamedTuple):
    """A tool of compute-sanitizer, its options, and tests that it cannot judge."""

    tool: str
    options: tuple[str, ...] = OURS
    left_out: str = ON_A_GPU

    @property
    def name(self) -> str:
        """As it is started."""
        return f"compute-sanitizer --tool {self.tool}"

    def program(self) -> str | None:
        """The program of PATH, or of the CUDA toolkit."""
        homes = [os.environ.get("CUDA_HOME", "/usr/local/cuda"), "/usr/local/cuda"]
        folders = [os.environ["PATH"], *(f"{home}/bin" for home in homes)]
        return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))

    def lacks(self) -> str | None:
        """What this machine lacks, if it lacks something."""
        if not torch.cuda.is_available():
            return "there is no GPU"
        return None if self.program() else "compute-sanitizer is not installed"

    def prepared(self) -> list[str]:
        """Pytest's arguments."""
        return ["-k", self.left_out]

    def python(self, *arguments: str) -> list[str]:
        """The command of a Python with these arguments.

        Each tensor has memory of its own, where an access beyond it is seen. Backtraces would keep
        frames of Python alive, and their tensors.
        """
        options = ["--error-exitcode", "9", "--show-backtrace", "no", "--report-api-errors", "no"]
        command = [self.program() or "", "--tool", self.tool, *options, *self.options]
        return ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", *command, sys.executable, *arguments]


ADDRESS = Sanitizer(
    "address,undefined",
    "libasan.so",
    {
        "ASAN_OPTIONS": "detect_leaks=0",  # what Python and torch keep to the end is no leak
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    },
)
THREAD = Sanitizer(
    "thread",
    "libtsan.so",
    # Python and torch are not built with it: it does not see all that orders what they do.
    {"TSAN_OPTIONS": "halt_on_error=1:ignore_noninstrumented_modules=1"},
    # The kernel's random addresses may lie where ThreadSanitizer keeps its own data.
    ("setarch", platform.machine(), "-R"),
)
GPU_TOOLS = (
    GpuTool("memcheck"),
    GpuTool("racecheck"),
    # It must see the writes of all kernels, and does not see those of the CPU to managed memory. Of
    # what has room for more rows than there are, all are moved. A swap through the CPU waits by a
    # copy of a byte that was never written.
    GpuTool(
        "initcheck",
        options=(),
        left_out=f"{ON_A_GPU} and not managed and not capacity and not pageable",
    ),
    GpuTool("synccheck"),
)
SANITIZERS: dict[str, Sanitizer | GpuTool]
SANITIZERS = {each.checks: each for each in (ADDRESS, THREAD)}
SANITIZERS |= {each.tool: each for each in GPU_TOOLS}


def main(checks: str, *arguments: str) -> int:
    """Runs pytest with a sanitizer; returns what it returned, or 9 for what a GPU's tool found."""
    sanitizer = SANITIZERS[checks]
    if lack := sanitizer.lacks():
        print(f"speedtorch: no test ran with {sanitizer.name}: {lack}", file=sys.stderr)
        return 0
    # Reports go to file descriptor 2, which pytest would keep until the test ends.
    pytest = ["-m", "pytest", "--capture=sys", *sanitizer.prepared(), *arguments]
    return subprocess.run(sanitizer.python(*pytest), cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

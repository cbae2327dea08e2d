"""The library built with a sanitizer of gcc's, and programs that run with it.

`python tests/sanitized.py thread ARGUMENTS` builds it in a folder of its own, for the CPU alone,
and runs pytest with these arguments. Where the machine lacks what the sanitizer needs, it says so.
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

ROOT = Path(__file__).parents[1]


class Sanitizer(NamedTuple):
    """A value of SPEEDTORCH_SANITIZE, the runtime library, and how programs run with it."""

    checks: str
    runtime: str
    environment: Mapping[str, str]
    started_by: tuple[str, ...] = ()

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
SANITIZERS = {each.checks: each for each in (ADDRESS, THREAD)}


def main(checks: str, *arguments: str) -> int:
    """Builds the package in build/ and runs pytest with it; returns what pytest returned."""
    sanitizer = SANITIZERS[checks]
    if lack := sanitizer.lacks():
        print(f"speedtorch: no test ran with -fsanitize={checks}: {lack}", file=sys.stderr)
        return 0
    folder = ROOT / "build" / f"sanitized-{checks}"
    shutil.rmtree(folder, ignore_errors=True)
    ignored = shutil.ignore_patterns("_C*.so", "__pycache__")
    shutil.copytree(ROOT / "speedtorch", folder / "speedtorch", ignore=ignored)
    (folder / "docs").symlink_to(ROOT / "docs")  # tests look for pages beside the package
    sanitizer.build(ROOT, "--build-lib", str(folder))
    # Reports go to file descriptor 2, which pytest would keep until the test ends.
    pytest = ["-m", "pytest", "--capture=sys", "-o", f"pythonpath={folder}", *arguments]
    return subprocess.run(sanitizer.python(*pytest), cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

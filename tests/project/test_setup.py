"""What setup.py decides: with or without CUDA, when to stop, what to compile again."""

from __future__ import annotations

import os
import re
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT
from warm_python import finished, warm_python

SetupError = pytest.importorskip("setuptools.errors").SetupError


@pytest.fixture(autouse=True)
def no_choice_of_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may have chosen some."""
    monkeypatch.delenv("SPEEDTORCH_CUDA_ARCHS", raising=False)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """setup.py beside two CUDA files and a header, which one of them includes."""
    (tmp_path / "tree" / "csrc").mkdir(parents=True)
    shutil.copy(ROOT / "setup.py", tmp_path / "tree")
    for name in ("gather.cu", "scatter.cu", "rows.h"):
        (tmp_path / "tree" / "csrc" / name).touch()
    (tmp_path / "tree" / "csrc" / "gather.cu").write_text("csrc/rows.h")
    return tmp_path / "tree"


def setup_ends_with(tree: Path, change: str, command: str = "build_ext", **environment: str) -> str:
    """Runs a command of setup.py after a change to Python; the one line that it ends with."""
    program = f"import runpy, sys\n{change}\nsys.argv = ['setup.py', {command!r}]\n"
    program += "runpy.run_path('setup.py', run_name='__main__')\n"
    command = [warm_python(), "-c", program]
    done = finished(command, cwd=tree, env={**os.environ, **environment})
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "copying" not in done.stdout
    return done.stderr.splitlines()[-1]


NO_PROGRAMS = "import shutil; shutil.which = lambda *_, **__: None"


ENDS: list[tuple[str, dict[str, str], str]] = [
    (
        NO_PROGRAMS,
        {"SPEEDTORCH_CUDA": "1"},
        "error: speedtorch: SPEEDTORCH_CUDA=1 but nvcc was not found in",
    ),
    (
        "",
        {"SPEEDTORCH_CUDA": "yes"},
        "error: speedtorch: SPEEDTORCH_CUDA=yes; allowed are auto, 1 and 0$",
    ),
    (
        "import setuptools; setuptools.__version__ = '65.5.0'",
        {},
        "speedtorch: needs setuptools >= 77, found 65.5.0: pip install",
    ),
    (
        "import torch; torch.__version__ = '2.10.1+cu128'",
        {},
        r"error: speedtorch: needs torch >= 2.11, found 2.10.1\+cu128: upgrade torch$",
    ),
    (
        "sys.modules['torch'] = None",
        {},
        ".*needs torch >= 2.11.*pip install --no-build-isolation .",
    ),
    *(
        (
            NO_PROGRAMS,
            {"SPEEDTORCH_CUDA": "0", "CXX": named},
            r"error: speedtorch: the build needs a C\+\+20 compiler, and (.* )?"
            rf"{program} was not found: install g\+\+, or name a compiler in CXX",
        )
        for named, program in (("", r"c\+\+"), (" ", r"c\+\+"), ("no-such -O1", "no-such"))
    ),
]


@pytest.mark.dealt("command")
@pytest.mark.slow
@pytest.mark.parametrize("command", ["build_ext", "build"])
@pytest.mark.parametrize(("change", "environment", "message"), ENDS)
def test_a_build_that_cannot_succeed_ends_with_a_reason(
    tree: Path, command: str, change: str, environment: dict[str, str], message: str
) -> None:
    assert re.match(message, setup_ends_with(tree, change, command, **environment))


@pytest.fixture
def toolkit(tmp_path: Path) -> Path:
    """A folder that looks like a CUDA toolkit; its nvcc notes each file that it compiles.

    A file that it compiles contains the names of its headers.
    """
    home = tmp_path / "toolkit"
    for folder in ("bin", "include", "lib"):
        (home / folder).mkdir(parents=True)
    (home / "include" / "cuda_runtime_api.h").touch()
    (home / "lib" / "libcudart_static.a").touch()
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(
        "#!/bin/sh\n"
        'here=$(dirname "$(dirname "$0")")\n'
        'case "$*" in\n'
        '*--dryrun*) echo "#\\$ TOP=$here" ;;\n'
        "*--list-gpu-arch*) echo compute_80; echo compute_90 ;;\n"
        "*--version*) echo 'Cuda compilation tools, release 13.9, V13.9.1' ;;\n"
        "*broken.cu*) exit 1 ;;\n"
        '*) while [ "$1" != -c ]; do shift; done; echo "$2" >> "$here/log"; touch "$4"\n'
        '   printf "%s : %s \\\\\n %s\n" "$4" "$2" "$(cat "$2")" > "$7" ;;\n'
        "esac\n"
    )
    nvcc.chmod(0o755)
    return home


def refusal_of(tree: Path, toolkit: Path) -> str:
    """Opens a toolkit that setup.py refuses; what it says."""
    setup: dict[str, Any] = runpy.run_path(str(tree / "setup.py"))
    with pytest.raises(SetupError) as refusal:
        setup["open_toolkit"](str(toolkit / "bin" / "nvcc"))
    return str(refusal.value)


@pytest.mark.parametrize("file", ["include/cuda_runtime_api.h", "lib/libcudart_static.a"])
def test_a_toolkit_without_a_part_is_refused(tree: Path, toolkit: Path, file: str) -> None:
    (toolkit / file).unlink()
    assert f"has no {Path(file).name} below {toolkit}" in refusal_of(tree, toolkit)


def test_architectures_that_nvcc_does_not_know_are_refused(
    tree: Path, toolkit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for requested, unknown in (("35", "35"), ("80,35", "35"), ("90a", "90a"), ("90,", "")):
        monkeypatch.setenv("SPEEDTORCH_CUDA_ARCHS", requested)
        text = refusal_of(tree, toolkit)
        assert f"SPEEDTORCH_CUDA_ARCHS={requested}: " in text
        assert text.endswith(f"supports no architecture {unknown}; allowed are 80, 90")


@pytest.mark.slow
def test_an_nvcc_that_does_not_run_is_refused(tree: Path, toolkit: Path) -> None:
    (toolkit / "bin" / "nvcc").write_text("#!/bin/sh\necho no licence; exit 3\n")
    line = setup_ends_with(tree, "", CUDA_HOME=str(toolkit))
    assert line.endswith("failed: no licence")


def compiled(tree: Path, toolkit: Path) -> list[str]:
    """Runs setup.py's CUDA step; the files that it compiled, in order of their names."""
    setup: dict[str, Any] = runpy.run_path(str(tree / "setup.py"))
    (toolkit / "log").write_text("")
    setup["compile_cuda"](setup["open_toolkit"](str(toolkit / "bin" / "nvcc")))
    return sorted((toolkit / "log").read_text().split())


BOTH = ["csrc/gather.cu", "csrc/scatter.cu"]


def later(path: Path) -> None:
    """Gives a file a date after all that was compiled."""
    now = path.stat().st_mtime + 10
    os.utime(path, (now, now))


@pytest.mark.parametrize(
    ("change", "name", "again"),
    [
        (Path.exists, "csrc/scatter.cu", []),
        (later, "csrc/scatter.cu", ["csrc/scatter.cu"]),
        (later, "csrc/rows.h", ["csrc/gather.cu"]),
        (Path.unlink, "csrc/rows.h", ["csrc/gather.cu"]),
        (Path.unlink, "build/cuda/scatter.d", ["csrc/scatter.cu"]),  # the list of its headers
    ],
)
def test_cuda_files_are_compiled_once_and_after_a_change_of_theirs(
    tree: Path, toolkit: Path, change: Callable[[Path], object], name: str, again: list[str]
) -> None:
    assert compiled(tree, toolkit) == BOTH
    change(tree / name)
    assert compiled(tree, toolkit) == again


def test_other_architectures_compile_every_cuda_file_again(
    tree: Path, toolkit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(tree, toolkit)
    monkeypatch.setenv("SPEEDTORCH_CUDA_ARCHS", "90")
    assert compiled(tree, toolkit) == BOTH


def test_a_cuda_file_that_does_not_compile_is_named(tree: Path, toolkit: Path) -> None:
    (tree / "csrc" / "broken.cu").touch()
    with pytest.raises(Exception, match=r"nvcc failed on csrc/broken\.cu"):
        compiled(tree, toolkit)

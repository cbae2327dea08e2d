"""The library is one binary: of torch it needs the stable C ABI alone, of Python nothing."""

from __future__ import annotations

import re
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch
from documents import ROOT, blocks
from torch.utils.cpp_extension import include_paths, library_paths
from warm_python import finished, output_of

import speedtorch

LIBRARY = Path(speedtorch.__file__).parent / "_C.abi3.so"


def needs(*programs: str) -> pytest.MarkDecorator:
    """Skips a test where a program that it calls is missing."""
    missing = [program for program in programs if not shutil.which(program)]
    return pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}")


def symbols(*options: str) -> list[tuple[str, str]]:
    """(type, demangled name without version) of the library's dynamic symbols."""
    lines = output_of("nm", "-D", "-C", *options, LIBRARY).splitlines()
    found = [re.fullmatch(r"(?:[0-9a-f]+)?\s*(\S) (.*?)(?:@.*)?", line) for line in lines]
    assert found and all(found)
    return [(match[1], match[2]) for match in found if match]


@needs("nm")
@pytest.mark.parametrize(
    "needed",
    [r"\w .*\b(at|c10|torch)::", r"\w (__)?cu(da)?[A-Z]", r"U _?Py"],  # U: also outside Python
    ids=["torch", "cuda", "python"],
)
def test_of_torch_alone_symbols_are_needed_and_these_are_of_its_c_interface(needed: str) -> None:
    names = [f"{kind} {name}" for kind, name in symbols("--undefined-only")]
    assert any(name.startswith("U aoti_torch_") for name in names)
    assert [name for name in names if re.match(needed, name)] == []


@pytest.mark.slow
@needs("nm", "g++")
def test_every_symbol_of_python_that_is_used_is_in_the_limited_api(tmp_path: Path) -> None:
    used = [name for _, name in symbols("--undefined-only") if re.match(r"_?Py", name)]
    assert "Py_IsInitialized" in used
    addresses = ", ".join(f"(void*)&{name}" for name in used)
    source = tmp_path / "used.cpp"
    source.write_text(f"#include <Python.h>\nvoid* used[] = {{{addresses}}};\n")
    include = sysconfig.get_path("include")
    output_of("g++", "-fsyntax-only", "-DPy_LIMITED_API=0x030A0000", f"-I{include}", source)


@needs("nm")
def test_only_our_own_functions_are_exported() -> None:
    names = [name for kind, name in symbols("--defined-only") if kind in "TD"]
    own = re.compile(r"PyInit__C|speedtorch_\w+|_edata|_end|__bss_start|_init|_fini")
    assert [name for name in names if not own.fullmatch(name)] == []


@needs("readelf")
def test_libtorch_cpu_and_the_compilers_libraries_are_all_it_links() -> None:
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", output_of("readelf", "-d", LIBRARY))
    system = re.compile(r"lib(stdc\+\+|gcc_s|c|m|dl|rt|pthread|gomp)\.so.*|ld-linux.*")
    assert [name for name in needed if not system.fullmatch(name)] == ["libtorch_cpu.so"]


@needs("readelf")
def test_no_folder_of_the_building_machine_is_searched_for_libraries() -> None:
    dynamic = output_of("readelf", "-d", LIBRARY)
    assert not re.search(r"\((RPATH|RUNPATH)\).*torch", dynamic)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C++ program of docs/cpp.md, built against the installed libtorch."""
    folder = tmp_path_factory.mktemp("program")
    (block,) = blocks(ROOT / "docs" / "cpp.md", "cpp")
    (folder / "gather.cpp").write_text(block.text)
    command: list[str | Path] = ["g++", "-std=c++20", "-O0", "-o", folder / "gather"]
    command.append(folder / "gather.cpp")
    for path in include_paths():
        command += ["-isystem", path]
    for path in library_paths():
        command += [f"-L{path}", f"-Wl,-rpath,{path}"]
    abi = int(torch.compiled_with_cxx11_abi())
    output_of(*command, f"-D_GLIBCXX_USE_CXX11_ABI={abi}", "-ltorch_cpu", "-lc10", "-ldl")
    return folder / "gather"


@pytest.mark.examples
@needs("g++")
@pytest.mark.parametrize(
    "environment", [{}, {"LD_BIND_NOW": "1"}], ids=["bound-at-first-call", "bound-at-load"]
)
def test_a_program_without_python_gathers_rows(program: Path, environment: dict[str, str]) -> None:
    linked = output_of("ldd", program)
    assert "libtorch_cpu" in linked and "libpython" not in linked and "torch_python" not in linked
    lines = output_of(program, LIBRARY, **environment).splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["6", "7", "8"],
        ["0", "1", "2"],
        ["6", "7", "8"],
    ]


@pytest.mark.examples
@needs("g++")
def test_a_missing_library_is_named_in_the_error(program: Path) -> None:
    done = finished([program, "nowhere.so"])
    assert done.returncode == 1 and "nowhere.so" in done.stderr

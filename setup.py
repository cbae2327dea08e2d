"""Builds speedtorch/_C: one library for every torch >= 2.11 and every CPython >= 3.10.

Torch's BuildExtension compiles the C++ files. The CUDA files include no torch header, so nvcc
compiles them here, even if torch has no CUDA. The CUDA runtime is linked statically; the driver and
torch's CUDA libraries are not linked. Only a build of the library imports torch, not one of
metadata or of the source archive.

    SPEEDTORCH_CUDA=auto   CUDA kernels if nvcc is found (default)
    SPEEDTORCH_CUDA=1      stop if nvcc is not found
    SPEEDTORCH_CUDA=0      CPU kernels only
    SPEEDTORCH_CUDA_ARCHS  comma-separated GPU architectures instead of the list below
    CXXFLAGS               more options for the C++ files, after all others
    SPEEDTORCH_SANITIZE    gcc's sanitizers for the C++ files: address,undefined or thread
                           (make sanitize), or coverage, which counts line runs (make coverage)
    MAX_JOBS               maximum number of compilers at once
"""

import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import setuptools
from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, SetupError

if int(setuptools.__version__.partition(".")[0]) < 77:  # its own error has 91 lines
    raise SystemExit(
        f"speedtorch: needs setuptools >= 77, found {setuptools.__version__}:"
        " pip install -U 'setuptools>=77'"
    )

ROOT = Path(__file__).resolve().parent
BUILD = ROOT / "build"
ARCHS = (75, 80, 86, 89, 90, 100, 120)
# The binary uses no symbol newer than this torch and this CPython.
TORCH_TARGET = "0x020b000000000000"
PYTHON_TARGET = "0x030A0000"
SANITIZE = os.environ.get("SPEEDTORCH_SANITIZE")
INSTRUMENT = "--coverage" if SANITIZE == "coverage" else f"-fsanitize={SANITIZE}"
LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")
NO_NVCC = (
    "speedtorch: SPEEDTORCH_CUDA=1 but nvcc was not found in CUDA_HOME, CUDA_PATH, PATH or "
    "/usr/local/cuda"
)
WITHOUT = "SPEEDTORCH_CUDA=0 builds only the CPU kernels"


class Toolkit(NamedTuple):
    """A CUDA toolkit: compiler, compiler release, headers, static runtime and architectures."""

    nvcc: str
    version: str
    include: Path
    cudart: Path
    archs: tuple[int, ...]


def jobs() -> int:
    """The maximum number of compilers at once."""
    return max(1, int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0))))


def output_of(*command: str) -> str:
    """Standard output and standard error of a command that must succeed."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SetupError(f"speedtorch: {shlex.join(command)} failed: {done.stdout.strip()}")
    return done.stdout


def find_nvcc() -> str | None:
    """The first nvcc in CUDA_HOME, CUDA_PATH, PATH and /usr/local/cuda; None if there is none."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    named = [shutil.which(str(Path(home) / "bin" / "nvcc")) for home in homes]
    found = [*named, shutil.which("nvcc"), shutil.which("/usr/local/cuda/bin/nvcc")]
    return next((nvcc for nvcc in found if nvcc), None)


def open_toolkit(nvcc: str) -> Toolkit:
    """Finds the toolkit by `nvcc --dryrun`, because nvcc itself may be a link or a script."""
    dryrun = output_of(nvcc, "--dryrun", "-c", "-x", "cu", os.devnull, "-o", os.devnull)
    top = re.search(r"^#\$ TOP=(.*)$", dryrun, re.MULTILINE)
    home = Path(top[1].strip() if top else Path(nvcc).resolve().parent.parent).resolve()
    targets = [home, *sorted(home.glob("targets/*"))]
    named = [Path(path) for path in re.findall(r"-[IL]([^\s\"]+)", dryrun)]
    includes = [target / "include" for target in targets] + named
    libraries = [target / lib for target in targets for lib in ("lib64", "lib")] + named
    include = next((path for path in includes if (path / "cuda_runtime_api.h").is_file()), None)
    if include is None:
        raise SetupError(f"speedtorch: {nvcc} has no cuda_runtime_api.h below {home}; {WITHOUT}")
    archives = [path / "libcudart_static.a" for path in libraries]
    cudart = next((path for path in archives if path.is_file()), None)
    if cudart is None:
        raise SetupError(f"speedtorch: {nvcc} has no libcudart_static.a below {home}; {WITHOUT}")
    archs = architectures(nvcc)
    release = re.search(r"release [^\n]*", output_of(nvcc, "--version"))
    version = f"nvcc {release[0] if release else 'of unknown release'}"
    return Toolkit(nvcc, version, include.resolve(), cudart.resolve(), archs)


def architectures(nvcc: str) -> tuple[int, ...]:
    """The architectures to compile for: SPEEDTORCH_CUDA_ARCHS, or all of ARCHS that nvcc supports.

    Raises SetupError if nvcc does not support one of SPEEDTORCH_CUDA_ARCHS, or none of ARCHS.
    """
    known = {int(number) for number in re.findall(r"_(\d+)\b", output_of(nvcc, "--list-gpu-arch"))}
    requested = os.environ.get("SPEEDTORCH_CUDA_ARCHS")
    if not requested:
        archs = known.intersection(ARCHS)
        if not archs:
            raise SetupError(
                f"speedtorch: {nvcc} supports none of the architectures {ARCHS}; {WITHOUT}"
            )
        return tuple(sorted(archs))
    names = [name.strip() for name in requested.split(",")]
    unknown = [name for name in names if not name.isdecimal() or int(name) not in known]
    if unknown:
        raise SetupError(
            f"speedtorch: SPEEDTORCH_CUDA_ARCHS={requested}: {nvcc} supports no architecture "
            f"{', '.join(unknown)}; allowed are {', '.join(map(str, sorted(known)))}"
        )
    return tuple(sorted(set(map(int, names))))


def toolkit() -> Toolkit | None:
    """The CUDA toolkit that SPEEDTORCH_CUDA selects; None for a build without CUDA."""
    choice = os.environ.get("SPEEDTORCH_CUDA") or "auto"
    if choice not in ("auto", "1", "0"):
        raise SetupError(f"speedtorch: SPEEDTORCH_CUDA={choice}; allowed are auto, 1 and 0")
    nvcc = find_nvcc() if choice != "0" else None
    if choice == "1" and nvcc is None:
        raise SetupError(NO_NVCC)
    return open_toolkit(nvcc) if nvcc else None


def find_torch() -> ModuleType:
    """Imports torch. Raises SetupError with a remedy if torch is missing or older than 2.11."""
    try:
        import torch
        import torch.utils.cpp_extension
    except ModuleNotFoundError as error:
        raise SetupError(
            f"speedtorch: the build needs torch >= 2.11 in this environment ({error}): "
            "install torch, then run pip install --no-build-isolation ."
        ) from None
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
        raise SetupError(
            f"speedtorch: needs torch >= 2.11, found {torch.__version__}: upgrade torch"
        )
    return torch


def check_compiler() -> None:
    """Raises SetupError without a C++ compiler; torch's own error has 200 lines."""
    named = os.environ.get("CXX", "").strip()
    # Without CXX, torch compiles with c++, and setuptools links with Python's own compiler.
    for compiler in [named] if named else ["c++", sysconfig.get_config_var("CXX") or "c++"]:
        program = shlex.split(compiler)[0]
        if shutil.which(program) is None:
            raise SetupError(
                f"speedtorch: the build needs a C++20 compiler, and {program} was not found: "
                "install g++, or name a compiler in CXX"
            )


def outdated(target: Path, record: Path, command: str, inputs: list[Path]) -> bool:
    """Whether a file is missing, an input is newer, or another command made the target."""
    if not target.is_file() or not record.is_file() or record.read_text() != command:
        return True
    if not all(path.is_file() for path in inputs):
        return True
    return target.stat().st_mtime < max(path.stat().st_mtime for path in inputs)


def headers() -> list[Path]:
    """The headers that any source may include."""
    return sorted([*ROOT.glob("csrc/**/*.h"), *ROOT.glob("csrc/**/*.cuh")])


def read_by(made: Path) -> list[Path]:
    """The files that nvcc read for an object, from the make rule that nvcc wrote."""
    rule = made.read_text().partition(": ")[2] if made.is_file() else ""
    return [ROOT / name for name in rule.replace("\\\n", " ").split()]


def compile_cuda(cuda: Toolkit) -> list[str]:
    """Compiles every .cu of csrc that is out of date, several at once; returns the object files."""
    sources = sorted(ROOT.glob("csrc/**/*.cu"))
    folder = BUILD / "cuda"
    folder.mkdir(parents=True, exist_ok=True)
    # Paths are relative to the root: a space in its path does not survive nvcc's call of gcc.
    flags = ["-std=c++20", "-O3", "-DSPEEDTORCH_CUDA=1", "-Icsrc"]
    flags += ["--expt-relaxed-constexpr"]  # small functions serve the CPU and the GPU
    flags += ["-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wextra"]
    flags += ["-Xfatbin=-compress-all"]  # a third of the size
    flags += [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in cuda.archs]
    flags += [f"-gencode=arch=compute_{cuda.archs[-1]},code=compute_{cuda.archs[-1]}"]
    if os.environ.get("CXX"):
        flags += ["-ccbin", shlex.split(os.environ["CXX"])[-1]]
    at_once = min(jobs(), max(1, len(sources)))
    threads = f"--threads={max(1, jobs() // at_once)}"

    def compile_one(source: Path) -> str:
        target = folder / f"{source.stem}.o"
        record, rule = (folder / f"{source.stem}.{kind}" for kind in ("command", "d"))
        names = [str(path.relative_to(ROOT)) for path in (source, target)]
        command = [cuda.nvcc, *flags, "-c", names[0], "-o", names[1]]
        command += ["-MMD", "-MF", str(rule.relative_to(ROOT))]
        text = f"{cuda.version}\n{shlex.join(command)}\n"
        if outdated(target, record, text, read_by(rule) or [rule]):
            record.unlink(missing_ok=True)
            print(shlex.join([*command, threads]), flush=True)
            if subprocess.run([*command, threads], cwd=ROOT).returncode:
                raise CompileError(f"speedtorch: nvcc failed on {names[0]}; {WITHOUT}")
            record.write_text(text)
        return str(target)

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(compile_one, sources))


class Build(build):
    """The command `build`; checks the requirements before it copies a file."""

    def run(self) -> None:
        """Builds the library. Raises SetupError without torch, a compiler or the requested CUDA."""
        find_torch()
        toolkit()
        check_compiler()
        super().run()


class BuildLibrary(build_ext):
    """The command `build_ext`; creates torch's BuildExtension only to build the library.

    setuptools also runs this command to list files for the source archive and the metadata.
    """

    def finalize_options(self) -> None:
        """Stores C++ objects in build/; an editable install would use a new folder each time."""
        super().finalize_options()
        kind = f"-{SANITIZE}" if SANITIZE else ""
        self.build_temp = str(BUILD / f"cpp.{sysconfig.get_platform()}{kind}")

    def build_extensions(self) -> None:
        """Compiles the CUDA files, then lets torch compile the C++ files and link all."""
        torch = find_torch()
        cuda = toolkit()
        check_compiler()
        (extension,) = self.extensions
        add_torch(extension, torch)
        if cuda:
            extension.extra_compile_args += ["-DSPEEDTORCH_CUDA=1", "-isystem", str(cuda.include)]
            extension.extra_objects += [*compile_cuda(cuda), str(cuda.cudart)]
        print(f"speedtorch: {cuda.version if cuda else 'no CUDA: only CPU kernels'}", flush=True)
        # Without ninja, setuptools compares only dates, and would keep objects of other flags.
        command = shlex.join([*extension.extra_compile_args, *extension.extra_objects])
        record = Path(f"{self.build_temp}.command")
        if not record.is_file() or record.read_text() != command:
            self.force = True
        BUILD.mkdir(exist_ok=True)
        record.unlink(missing_ok=True)
        builder = torch.utils.cpp_extension.BuildExtension(self.distribution)
        vars(builder).update(vars(self))  # the options, the compiler and the extension
        builder.force = self.force or builder.use_ninja  # ninja finds changed files
        builder.build_extensions()
        record.write_text(command)


def library() -> Extension:
    """The extension module, without the options that add_torch() reads from torch."""
    return Extension(
        "speedtorch._C",
        sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/**/*.cpp")),
        depends=[str(path.relative_to(ROOT)) for path in [*headers(), *ROOT.glob("csrc/**/*.cu")]],
        include_dirs=[str(ROOT / "csrc")],
        # The CUDA runtime's symbols must be hidden, because torch links its own runtime.
        extra_link_args=[
            *("-Wl,--exclude-libs,ALL", "-Wl,--as-needed", "-ldl", "-lrt", "-lpthread"),
            *([INSTRUMENT] if SANITIZE else ()),
            *(["-Wl,--wrap=memcpy,--wrap=memmove,--wrap=memset"] if SANITIZE == "thread" else ()),
        ],
        language="c++",
        py_limited_api=LIMITED_API,
    )


def add_torch(extension: Extension, torch: ModuleType) -> None:
    """Adds the options of the C++ compiler, and links only libtorch_cpu of torch's libraries.

    A program without Python has no torch_python, and a torch without CUDA has no torch_cuda.
    """
    flags = ["-std=c++20", "-O3", "-g0", "-fvisibility=hidden", "-fvisibility-inlines-hidden"]
    flags += ["-Wall", "-Wextra", f"-DTORCH_TARGET_VERSION={TORCH_TARGET}"]
    # Messages name files without the folders of the machine that built the library.
    for folder, name in ((ROOT, "."), (Path(str(torch.__file__)).parent, "torch")):
        flags += [f"-ffile-prefix-map={folder}={name}"]
    # -isystem has precedence over -I for the same folder, and disables warnings from its headers.
    folders = torch.utils.cpp_extension.include_paths()
    for path in folders:
        flags += ["-isystem", path]
    if SANITIZE == "coverage":
        # Atomic counters count all threads. Optimized code has no exact source lines.
        flags += [INSTRUMENT, "-fprofile-update=atomic", "-Og"]
    elif SANITIZE:
        # Torch exports no type information of its classes, so pointers to them cannot be checked.
        flags += [INSTRUMENT, "-fno-sanitize=vptr", "-fno-omit-frame-pointer", "-g1"]
        # Python's own flags may have -fwrapv, which makes integer overflow defined.
        flags += ["-fno-wrapv"]
    if SANITIZE == "thread":
        flags += ["-fno-builtin"]  # announced_copies.cpp reports calls, not inlined code
    if LIMITED_API:
        flags += [f"-DPy_LIMITED_API={PYTHON_TARGET}"]
    flags += shlex.split(os.environ.get("CXXFLAGS", ""))
    extension.extra_compile_args += flags
    extension.include_dirs += folders
    extension.library_dirs += torch.utils.cpp_extension.library_paths()
    extension.libraries += ["torch_cpu"]


if __name__ == "__main__":
    setup(
        ext_modules=[library()],
        cmdclass={"build": Build, "build_ext": BuildLibrary},
        options={"bdist_wheel": {"py_limited_api": "cp310"}} if LIMITED_API else {},
    )

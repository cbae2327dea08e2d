"""The source archive, the wheel, and a fresh environment that imports it."""

from __future__ import annotations

import importlib.metadata
import shutil
import site
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from documents import ROOT
from warm_python import finished, output_of

import speedtorch

LEFT_BEHIND = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "*.so")

# Looking for the module pip with find_spec makes setuptools give up its own distutils.
tools = {package.metadata["Name"] for package in importlib.metadata.distributions()}
missing = [name for name in ("pip", "setuptools", "wheel") if name not in tools]
missing += [] if shutil.which("g++") else ["g++"]
pytestmark = [
    pytest.mark.examples,
    pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}"),
]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with nothing built in it."""
    return Path(
        shutil.copytree(ROOT, tmp_path_factory.mktemp("checkout") / "tree", ignore=LEFT_BEHIND)
    )


def from_setuptools(call: str, checkout: Path) -> str:
    """What a call of setuptools' build backend gives in a Python that cannot import torch."""
    program = "import sys; sys.modules['torch'] = None; from setuptools import build_meta"
    program += f"; print(build_meta.{call})"
    return output_of(sys.executable, "-c", program, cwd=checkout).splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(checkout: Path) -> Path:
    """The source archive."""
    return checkout / "dist" / from_setuptools("build_sdist('dist')", checkout)


@pytest.fixture(
    scope="module", params=["built here", pytest.param("built anew", marks=pytest.mark.nightly)]
)
def wheel(
    request: pytest.FixtureRequest, sdist: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A wheel of the source archive: with the library of this checkout, or with one of its own."""
    folder = tmp_path_factory.mktemp("wheel")
    if request.param == "built anew":  # with CPU kernels alone, as fast as can be
        command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"]
        command += ["--wheel-dir", folder, sdist]
        options = {"PIP_NO_INDEX": "1", "SPEEDTORCH_CUDA": "0", "CXXFLAGS": "-O0"}
        output_of(*command, cwd=folder, **options)
    else:
        shutil.unpack_archive(sdist, folder)
        (tree,) = folder.iterdir()
        output_of(sys.executable, "setup.py", "build_py", cwd=tree)
        (built,) = (tree / "build").glob("lib*")
        shutil.copy(speedtorch.info().library, built / "speedtorch")
        command = [sys.executable, "setup.py", "bdist_wheel", "--skip-build"]
        output_of(*command, "--dist-dir", folder, cwd=tree)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with the wheel, and with this one's torch."""
    folder = tmp_path_factory.mktemp("fresh")
    output_of(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)
    python = folder / "env" / "bin" / "python"
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(output_of(python, "-c", purelib, cwd=folder).strip())
    # .pth files in a folder named by a .pth file do not count: an editable install of this checkout
    # stays invisible.
    folders = [str(Path(torch.__file__).parent.parent), *site.getsitepackages()]
    (packages / "torch_of_the_tests.pth").write_text("\n".join(dict.fromkeys(folders)) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", python]
    output_of(*pip, "install", "--no-deps", wheel, cwd=folder, PIP_NO_INDEX="1")
    return python


def test_the_source_archive_holds_every_file_that_is_read_and_none_that_is_built(
    sdist: Path, checkout: Path
) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    patterns = ["csrc/**/*.*", "speedtorch/**/*.py", "tests/**/*.py", "notebooks/*.ipynb"]
    patterns.append("benchmarks/*.py")
    expected = {
        str(path.relative_to(checkout)) for line in patterns for path in checkout.glob(line)
    }
    expected |= {"setup.py", "pyproject.toml", "Makefile", "README.md", "CHANGELOG.md", "LICENSE"}
    expected |= {"speedtorch/py.typed", "CONTRIBUTING.md", "CITATION.cff", "docs/journeys.md"}
    assert expected - names == set()
    assert [name for name in names if name.endswith((".so", ".o", ".pyc"))] == []


def test_the_metadata_of_a_wheel_is_made_without_torch(checkout: Path) -> None:
    folder = from_setuptools("prepare_metadata_for_build_wheel('dist')", checkout)
    metadata = (checkout / "dist" / folder / "METADATA").read_text()
    assert "\nName: speedtorch\n" in metadata and "\nRequires-Dist: torch>=2.11\n" in metadata


def test_one_wheel_for_every_python_holds_the_library_and_every_module(
    wheel: Path, checkout: Path
) -> None:
    assert wheel.name.startswith("speedtorch-1.0.0-cp310-abi3-linux_")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert [name for name in names if name.endswith(".so")] == ["speedtorch/_C.abi3.so"]
    folders = {name.split("/")[0] for name in names}
    assert folders == {"speedtorch", "speedtorch-1.0.0.dist-info"}
    modules = {str(path.relative_to(checkout)) for path in (checkout / "speedtorch").rglob("*.py")}
    assert {*modules, "speedtorch/py.typed"} - {*names} == set()


def test_an_installed_wheel_says_where_the_demonstrations_are(installed: Path) -> None:
    command = [installed, "-I", "-m", "speedtorch", "demo", "word2vec", "--steps", "2"]
    done = finished(command, cwd="/")
    assert done.returncode == 2 and done.stdout == ""
    assert "docs/examples/demos of the source code" in done.stderr


@pytest.mark.nightly
def test_an_installed_wheel_trains_as_torch_does(installed: Path) -> None:
    program = ROOT / "tests" / "installed_training.py"
    printed = output_of(installed, "-I", program, cwd=Path("/"))
    assert printed.startswith("3 steps as torch does them")
    assert str(installed.parent.parent) in printed


def test_an_installed_wheel_gathers_rows_outside_the_checkout(installed: Path) -> None:
    program = (
        "import speedtorch, torch\n"
        "table = torch.arange(12.).view(4, 3)\n"
        "print(speedtorch.__file__)\n"
        "print(speedtorch.pinned_gather(table, torch.tensor([2, 0])).tolist())\n"
    )
    place, rows = output_of(installed, "-I", "-c", program, cwd=Path("/")).splitlines()
    assert Path(place).is_relative_to(installed.parent.parent)
    assert rows == "[[6.0, 7.0, 8.0], [0.0, 1.0, 2.0]]"


def test_info_says_which_kernels_were_built(
    installed: Path, request: pytest.FixtureRequest
) -> None:
    program = "import speedtorch; print(speedtorch.info().kernels); print(speedtorch.info())"
    kernels, *table = output_of(installed, "-I", "-c", program, cwd=Path("/")).splitlines()
    if request.node.callspec.params["wheel"] == "built here":
        assert kernels == speedtorch.info().kernels
    else:
        assert kernels.startswith("CPU") and not kernels.startswith("CPU and")
    assert any(line.split(maxsplit=1) == ["kernels", kernels] for line in table)


_TYPED = """import torch
import speedtorch
from speedtorch import types

kind: types.MemoryKind = "managed"
embedding = speedtorch.Embedding(3, 2, memory=kind)
rows: torch.Tensor = embedding(torch.tensor([1]))
bags: torch.Tensor = speedtorch.EmbeddingBag(3, 2, mode="max")(torch.tensor([[1]]))
config = speedtorch.EmbeddingBagConfig(3, 2, "t", pooling="mean")
found = speedtorch.EmbeddingBagCollection([config])({"t": torch.tensor([1])})
keyed: types.KeyedFeatures = found
loop: types.Prefetch[torch.Tensor] = speedtorch.prefetch([rows], embedding, ids=lambda b: b)
explanation: types.Explanation = speedtorch.explain("pinned_gather", rows, torch.tensor([0]))
speedtorch.Embedding(3, 2, memory="pinned")
speedtorch.EmbeddingBag(3, 2, mode="avg")
speedtorch.EmbeddingBagConfig(3, 2, "t", pooling="max")
speedtorch.empty(3, memory="cuda")
embedding("one")
"""


def test_a_type_checker_knows_every_public_name_and_finds_wrong_arguments(
    installed: Path, tmp_path: Path
) -> None:
    pytest.importorskip("mypy")
    names = [f"speedtorch.{name}" for name in (*speedtorch.__all__, "no_such_name")]
    (tmp_path / "names.py").write_text("\n".join(["import speedtorch", *names, ""]))
    (tmp_path / "typed.py").write_text(_TYPED)
    check = [sys.executable, "-m", "mypy", "--strict", "--python-executable", installed]
    done = finished([*check, "names.py", "typed.py"], cwd=tmp_path, seconds=600)
    errors = [line.split(":") for line in done.stdout.splitlines() if ": error: " in line]
    wrong = [("names.py", str(len(names) + 1)), *(("typed.py", str(n)) for n in range(14, 19))]
    assert sorted((file, line) for file, line, *_ in errors) == wrong, done.stdout

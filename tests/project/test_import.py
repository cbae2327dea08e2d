"""What `import speedtorch` loads, where it works, and what waits until it is needed."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from documents import ROOT
from warm_python import finished

import speedtorch
from speedtorch import legacy, ops

pytestmark = pytest.mark.slow


def run(program: str, *without: str) -> str:
    """Standard output of a fresh process, which has no variables of these names."""
    environment = {name: value for name, value in os.environ.items() if name not in without}
    environment["PYTHONPATH"] = str(ROOT)
    done = finished([sys.executable, "-c", program], env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


LOADED = """
import json, sys
import numpy, safetensors, torch, tqdm
before = set(sys.modules)
import speedtorch
speedtorch.Embedding(3, 2, device="cpu")(torch.tensor([2, 2]))
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_import_and_a_lookup_load_nothing_that_torch_would_not() -> None:
    loaded = json.loads(run(LOADED))
    packages = {name.split(".")[0] for name in loaded} - set(sys.stdlib_module_names)
    assert {name for name in packages if not name.startswith("_")} <= {"speedtorch", "numpy"}
    heavy = ("torch._dynamo", "torch._inductor", "torch.distributed", "torch.onnx")
    assert [name for name in loaded if name.startswith(heavy)] == []
    # Demonstrations, profilers and pictures are for who asks for them.
    assert {"cProfile", "matplotlib", "speedtorch.__main__"} & set(loaded) == set()


def test_every_op_and_every_class_of_2019_is_a_public_name() -> None:
    assert {*ops.__all__, *legacy.__all__} <= set(speedtorch.__all__)


def test_a_source_folder_without_the_library_names_the_installed_package(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "speedtorch",
        tmp_path / "speedtorch",
        ignore=shutil.ignore_patterns("_C*.so", "__pycache__"),
    )
    command = [sys.executable, "-m", "speedtorch", "info"]
    done = finished(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    expected = (
        f"instead of the installed {ROOT / 'speedtorch'}. Start Python in a folder other than"
    )
    assert expected in done.stderr.splitlines()[-1]


HOMELESS = """
import pwd
def nobody(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")
pwd.getpwuid = nobody
import torch, speedtorch
print(speedtorch.pinned_gather(torch.arange(3.0).view(3, 1), torch.tensor([2])).tolist())
"""


@pytest.mark.examples
def test_import_works_without_a_home_folder_and_user_name() -> None:
    assert run(HOMELESS, "HOME", "USER", "LOGNAME", "XDG_CACHE_HOME") == "[[2.0]]\n"


UNTOUCHED = """
import os, sys
os.makedirs(os.environ["XDG_CACHE_HOME"] + "/speedtorch", exist_ok=True)
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
import speedtorch, torch
print([name for name in opened if "costs-" in name], torch.cuda.is_initialized())
"""


@pytest.mark.examples
def test_import_reads_no_file_of_costs_and_wakes_no_gpu(tmp_path: Path) -> None:
    program = f"import os; os.environ['XDG_CACHE_HOME'] = {str(tmp_path)!r}\n{UNTOUCHED}"
    assert run(program) == "[] False\n"

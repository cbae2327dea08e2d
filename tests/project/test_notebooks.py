"""The notebooks run from top to bottom on the CPU, and are stored with the results of a GPU."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT
from warm_python import warm_python

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


# What the tables of the benchmark notebooks name on a machine without a GPU, and what they checked.
TABLES = {
    "03_speed": (
        "all ways move the same rows: True",
        [
            "speedtorch, table in host memory",
            "torch, table in host memory, as timed in 2019",
            "torch, table in host memory, done well",
        ],
    ),
    "04_optimizer_speed": (
        "the state comes back as it left: True",
        ["speedtorch, OptimizerFactory", "torch, as timed in 2019", "torch, done well"],
    ),
    "05_memory": ("payload: 0.102 GB", ["speedtorch plain"]),
}


def test_the_notebooks_are_there() -> None:
    assert [path.stem for path in NOTEBOOKS] == [
        "01_data_gadget",
        "02_word2vec_adamax",
        *TABLES,
        "06_glove",
        "07_recommender",
        "08_dlrm",
        "09_layers",
        "10_larger_than_the_gpu",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_with_the_results_of_one_run_on_a_gpu(path: Path) -> None:
    code = [cell for cell in read(path)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    outputs = [out for cell in code for out in cell["outputs"]]
    assert outputs and not any(out["output_type"] == "error" for out in outputs)
    texts = [[*out.get("text", ()), *out.get("data", {}).get("text/plain", ())] for out in outputs]
    printed = "".join(map("".join, texts))
    assert "no GPU here" not in printed and "Warning" not in printed
    assert re.search(r"(?<![\w.])/(home|root|tmp|work|opt)/", printed) is None
    assert path.stat().st_size < 200 * 1024


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The name of a kernel that has imported torch."""
    arguments = [warm_python(), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    folder = tmp_path / "kernels" / "warm"
    folder.mkdir(parents=True)
    spec = {"argv": arguments, "display_name": "warm", "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    return folder.name


@pytest.mark.examples
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(
    path: Path, kernel: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    if path.stem != "01_data_gadget":
        pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads would only wait for those of other tests
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    folder = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name=kernel, resources=folder).execute()
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    printed = "".join(out.get("text", "") for out in outputs)
    if path.stem == "01_data_gadget":
        assert "1000" in printed  # the id that is out of range, in the error's message
        return
    assert sum("image/png" in out.get("data", {}) for out in outputs) == 1
    if path.stem in TABLES:
        checked, rows = TABLES[path.stem]
        assert checked in printed
        assert "no GPU here" in printed
        for row in rows:
            line = next(line for line in printed.splitlines() if line.startswith(row + "  "))
            numbers = [float(number) for number in line.removeprefix(row).split()]
            assert numbers and all(number >= 0 for number in numbers) and numbers[0] > 0
        return
    if path.stem == "07_recommender":
        found = re.search(r"hit rate at 10: ([0-9.]+) before, ([0-9.]+) after", printed)
        assert found is not None and float(found[1]) < 0.15 and float(found[2]) > 0.3
        return
    if path.stem == "08_dlrm":
        found = re.search(r"AUC: ([0-9.]+) before, ([0-9.]+) after", printed)
        assert found is not None and float(found[1]) < 0.6 < 0.65 < float(found[2])
        assert "the same losses: True, the same rows: True" in printed
        return
    found = re.search(r"loss[a-z ]*: ([0-9.]+) at first, ([0-9.]+) at the end", printed)
    assert found is not None and float(found[2]) < 0.9 * float(found[1])
    if path.stem == "09_layers":
        assert "the same losses: True, the same weights: True" in printed
        moved = re.search(r"([0-9.]+) MiB to the device, ([0-9.]+) MiB back", printed)
        assert moved is not None and float(moved[1]) > 2 * float(moved[2])
        return
    if path.stem == "10_larger_than_the_gpu":
        assert printed.count("ms a step") == 2
        return
    if path.stem == "06_glove":
        assert "training: " in printed  # the progress bar
        neighbours = [line for line in printed.splitlines() if line.count(", ") == 5]
        assert len(neighbours) == 8
        return
    assert "read back equal: True" in printed

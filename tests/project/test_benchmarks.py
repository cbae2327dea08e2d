"""The benchmark suite rehearsed at tiny sizes on the CPU: every figure, picture and table."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from documents import ROOT
from warm_python import finished, warm_python

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from benchmarks import bench_ngram_tables, plots, report, targets
from benchmarks.marked_text import between

Results = tuple[Path, dict[str, Any], str]
"""The folder, the results by stem and what was printed."""


def run(*arguments: str, **environment: str) -> CompletedProcess[str]:
    known = {key: value for key, value in os.environ.items() if key != "OUT"}
    known |= {"CUDA_VISIBLE_DEVICES": "", **environment}
    command = [warm_python(), "-m", "benchmarks", *arguments]
    return finished(command, cwd=ROOT, env=known, seconds=900)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("results")
    done = run("--small", OUT=str(folder))
    assert done.returncode == 0, done.stderr
    return folder, report.read_results(folder), done.stdout


@pytest.mark.examples
def test_every_benchmark_writes_its_results(results: Results) -> None:
    folder, by_stem, _ = results
    assert tuple(by_stem) == report.STEMS
    for stem, result in by_stem.items():
        assert result["machine"]["gpu"] == "none"
        assert {"driver", "torch", "cuda", "commit", "date"} <= set(result["machine"])
        for figure in result["figures"]:
            names = ("low", "p20", "median", "p80", "high")
            times = [figure[f"{name}_ms"] for name in names]
            assert times == sorted(times) and times[0] > 0, (stem, figure)
    assert json.loads((folder / "cpu.json").read_text()) == by_stem["cpu"]


@pytest.mark.examples
def test_pictures_are_drawn_of_every_curve(results: Results) -> None:
    folder, by_stem, _ = results
    assert (folder / f"{plots.STEP_TIMES}.png").read_bytes().startswith(b"\x89PNG")
    for stem in plots.PICTURES:
        assert (folder / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
        widths = plots.curve(by_stem[stem], "curve: row width", "managed", "row_bytes")
        assert [x for x, _ in widths] == [16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
        assert all(rate > 0 for _, rate in widths)
        for section, x in (("rows per batch", "batch"), ("table size", "table_bytes")):
            assert len(plots.curve(by_stem[stem], f"curve: {section}", "managed", x)) >= 6


@pytest.mark.parametrize("stem", [*plots.PICTURES, plots.CACHES])
def test_a_legend_covers_no_curve(stem: str) -> None:
    result = report.read_results(ROOT / "benchmarks" / "results")[stem]
    if stem == plots.CACHES:
        figure = plots._draw_caches(result)
    else:
        figure = plots._draw_curves(result, "title")
    figure.tight_layout()
    figure.canvas.draw()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert [
        ax for ax in figure.axes if ax.get_legend() or ax.get_window_extent().overlaps(box)
    ] == []
    plots.plt.close(figure)


@pytest.mark.examples
def test_every_target_has_a_line(results: Results) -> None:
    _, by_stem, printed = results
    all_targets = targets.targets(by_stem)
    assert len(all_targets) > 60
    lines = [line for line in printed.splitlines() if line.startswith(("met", "MISSED"))]
    assert len(lines) == len(all_targets)
    for line, target in zip(lines, all_targets, strict=True):
        assert line.endswith(target.work)


@pytest.mark.examples
def test_the_table_of_ngram_tables_has_both_cases(results: Results) -> None:
    lines = report.ngram_table(results[1]).splitlines()
    assert lines[0].startswith("A step of 64 tokens of a GPT with 32,384 dense parameters")
    assert lines[2].count("rows x 128 bfloat16") == 2
    assert "| bytes of a row with its state | 272 | 768 |" in lines
    assert len([line for line in lines if line.startswith("| what tables add")]) == 3


@pytest.mark.examples
def test_the_table_of_the_recommender_has_each_way(results: Results) -> None:
    lines = report.recommender_table(results[1]).splitlines()
    assert lines[0].startswith("training steps of a DLRM: 26 tables, 6,776 rows of 32 float32")
    ways = [line.split(" | ")[0] for line in lines[4:]]
    assert ways == ["| speedtorch, host memory, prefetch", "| torch, SparseAdam, on the CPU"]
    losses = [each["losses"][:2] for each in results[1]["recommender"]["extra"].values()]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)  # they train the same batches


def test_the_lines_of_each_way_are_counted() -> None:
    page = report.RECOMMENDER.read_text()
    blocks = re.findall(r"^### \w+: (\d+) lines$.*?^# begin\n(.*?)^```$", page, re.M | re.S)
    assert len(blocks) == 3
    assert [int(stated) for stated, _ in blocks] == [len(code.splitlines()) for _, code in blocks]


@pytest.mark.examples
def test_the_table_of_training_states_has_each_way(results: Results) -> None:
    lines = report.sleep_table(results[1]).splitlines()
    assert lines[0].startswith("0.00 GB in 510 tensors")
    assert [line.split(" | ")[0] for line in lines[4:7]] == [
        "| memcpy",
        "| speedtorch, TrainingState",
        "| speedtorch, keep_addresses=True",
    ]
    assert lines[11:13] == ["", "0.00 GB in 64 tensors:"]
    assert [line.split(" | ")[0] for line in lines[16:]] == [
        "| memcpy",
        "| speedtorch, TrainingState",
        "| speedtorch, keep_addresses=True",
        "| each tensor, pinned memory made once",
    ]


@pytest.mark.examples
def test_the_table_of_state_swappers_has_each_way_that_can_be_measured(results: Results) -> None:
    lines = report.state_table(results[1]).splitlines()
    assert lines[0].startswith("a step of AdamW with ")
    assert [line.split(" | ")[0] for line in lines[4:7]] == [
        "| bound: memcpy of the state, both ways at once",
        "| torch, all on the GPU",
        "| speedtorch, StateSwapper, at most 64 KiB",
    ]
    facts = results[1]["state_swapper"]["extra"]
    assert "Left out: torchao, CPUOffloadOptimizer: " in "\n".join(lines)
    digests = {
        told["digest of the weights"]
        for name, told in facts.items()
        if "pieces" in told and "bfloat16" not in name
    }
    assert digests == {facts["torch, all on the GPU"]["digest of the weights"]}


@pytest.mark.examples
def test_the_table_of_shards_has_each_way(results: Results) -> None:
    lines = report.sharded_table(results[1]).splitlines()
    assert [line.split(" | ")[0] for line in lines[4:]] == [
        "| FSDP2, all on the GPUs",
        "| speedtorch, StateSwapper, at most 16.0 KiB",
        "| FSDP2's CPUOffloadPolicy, stepped by speedtorch's StateSwapper, at most 16.0 KiB",
        "| FSDP2's CPUOffloadPolicy",
    ]
    losses = [
        of for name, of in results[1]["sharded_transformer"]["extra"].items() if "loss" in name
    ]
    assert losses[0] == losses[1] == losses[2] and losses[3] == losses[0][: len(losses[3])]


@pytest.mark.examples
def test_the_table_of_checkpoints_has_each_figure(results: Results) -> None:
    lines = report.disk_table(results[1], "checkpoints").splitlines()
    assert len(lines) == 4 + 12
    assert lines[6].startswith("| save: speedtorch.save | ")


def test_ids_of_the_ngram_benchmark_depend_on_the_last_tokens_alone() -> None:
    tokens = torch.randint(5, (3, 40))
    for order in bench_ngram_tables.ORDERS:
        ids = bench_ngram_tables.hashed(tokens, order, 150_000_000)
        assert ids.shape == tokens.shape and 0 <= int(ids.min()) <= int(ids.max()) < 150_000_000
        grams = torch.nn.functional.pad(tokens, (order - 1, 0)).unfold(1, order, 1).flatten(0, 1)
        same = (grams[:, None] == grams).all(2)
        assert torch.equal(ids.flatten()[:, None] == ids.flatten(), same)


def test_a_target_is_met_on_its_own_side() -> None:
    assert targets.Target("a share", 0.9, 0.88, True).met
    assert not targets.Target("a share", 0.87, 0.88, True).met
    assert targets.Target("a time", 1.1, 1.15, False).met
    assert not targets.Target("a time", 1.2, 1.15, False).met


def test_the_documents_tables_are_those_of_the_results() -> None:
    results = report.read_results(report.RESULTS)
    made = between(report.PERFORMANCE.read_text(), report.BEGIN, report.END)
    assert made == report.tables(results)
    page = between(report.NGRAM_TABLES.read_text(), report.BEGIN, report.END)
    assert page == report.ngram_table(results)
    page = between(report.SLEEP.read_text(), report.BEGIN, report.END)
    assert page == report.sleep_table(results)
    page = between(report.LAYERS.read_text(), report.BEGIN, report.END)
    assert page == report.state_table(results)
    page = between(report.CHECKPOINTS.read_text(), report.BEGIN, report.END)
    assert page == report.disk_table(results, "checkpoints")
    first = between(report.README.read_text(), report.FIRST, report.LAST)
    assert first == report.steps_table(results)
    assert len(first.splitlines()) > 2  # a name of a figure that is none leaves its line out


@pytest.mark.examples
def test_what_cannot_run_says_why(tmp_path: Path) -> None:
    assert "no GPU here" in run("cpu").stderr
    assert "needs a folder for its results in OUT" in run("--small").stderr
    unknown = run("gather", "--small", OUT=str(tmp_path))
    assert unknown.returncode == 2
    assert "unknown: gather; there are pinned_gather" in unknown.stderr

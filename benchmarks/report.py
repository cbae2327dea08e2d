"""Brings the documents' tables and results/history.csv up to date with results/*.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import history, plots
from benchmarks.fbgemm import PLACES
from benchmarks.harness import RESULTS, results_folder
from benchmarks.marked_text import replaced
from benchmarks.processes import STEMS

ROOT = Path(__file__).parent.parent
README, PERFORMANCE = ROOT / "README.md", ROOT / "docs/performance.md"
OFFLOAD = ROOT / "docs/coming_from_offload.md"
NGRAM_TABLES = ROOT / "docs/ngram_tables.md"
SLEEP = ROOT / "docs/sleep.md"
LAYERS = ROOT / "docs/layers.md"
CHECKPOINTS = ROOT / "docs/checkpoints.md"
HOST_MEMORY = ROOT / "docs/host_memory.md"
RECOMMENDER = ROOT / "docs/example_recommender.md"
BEGIN, END = "<!-- bench -->", "<!-- /bench -->"
FIRST, LAST = "<!-- steps -->", "<!-- /steps -->"
_PICTURES = {
    plots.STEP_TIMES: "milliseconds of a step by Zipf's law, beside FBGEMM and torch",
    plots.CACHES: "milliseconds of a step by the share of rows that is cached, beside FBGEMM",
    plots.OVERLAP: "exchange beside compute",
    plots.LOSSES: "loss of a DLRM by steps and by seconds, beside FBGEMM and torch",
}


class Step(NamedTuple):
    """A line of README.md's first table: the same step in each place of the rows."""

    stem: str
    section: str
    ours: str
    fbgemm: str
    torch: str | None
    title: str


STEPS = (
    Step(
        "embedding",
        "Zipf 1.05",
        "speedtorch, Adam, fused, prefetch",
        "FBGEMM, Adam",
        "torch, SparseAdam, all in GPU memory",
        "1,048,576 ids (Zipf 1.05) of 10,000,000 rows of 128, Adam",
    ),
    Step(
        "embedding",
        "Zipf 1.05",
        "speedtorch, SGD, prefetch",
        "FBGEMM, SGD",
        None,
        "the same, SGD",
    ),
    Step(
        "many_tables",
        "26 tables",
        "speedtorch, collection, Adam, prefetch",
        "FBGEMM, Adam",
        None,
        "26 tables, 16,384 samples, and a dense part of 2 ms, Adam",
    ),
    Step(
        "many_tables",
        "26 tables",
        "speedtorch, collection, SGD, prefetch",
        "FBGEMM, SGD",
        None,
        "the same, SGD",
    ),
    Step(
        "word2vec",
        "step",
        "speedtorch, Adam, fused, the whole step in a CUDA graph",
        "FBGEMM, Adam",
        "torch, sparse SparseAdam, all in GPU memory",
        "word2vec, 512 centres and 68 words for each, Adam; ours in a CUDA graph",
    ),
    Step(
        "word2vec",
        "step",
        "speedtorch, Adam, fused",
        "FBGEMM, Adam",
        "torch, sparse SparseAdam, all in GPU memory",
        "the same, ours without a graph",
    ),
)


def read_results(folder: Path | None = None) -> dict[str, Any]:
    """The results that are there, by stem."""
    where = folder or results_folder()
    paths = {stem: where / f"{stem}.json" for stem in STEMS}
    return {stem: json.loads(path.read_text()) for stem, path in paths.items() if path.is_file()}


def figures_table(result: dict[str, Any]) -> list[str]:
    """One line for each figure; curves are in the pictures."""
    lines = [
        f"| {result['title']} | | ms | lowest to highest | GB/s | of the bound |",
        "|---|---|---|---|---|---|",
    ]
    before = ""
    for figure in result["figures"]:
        section, share = figure["section"], figure["share_of_bound"]
        if section.startswith("curve"):
            continue
        digits = 4 if figure["median_ms"] < 0.1 else 3
        spread = f"{figure['low_ms']:.{digits}f} to {figure['high_ms']:.{digits}f}"
        rate = figure["gigabytes_per_s"]
        lines.append(
            f"| {section if section != before else ''} | {figure['name']} |"
            f" {figure['median_ms']:.{digits}f} | {spread} | {f'{rate:.1f}' if rate else ''} |"
            f" {f'{share:.2f}' if share else ''} |"
        )
        before = section
    return lines


def headline_table(result: dict[str, Any]) -> list[str]:
    """What fits where, for each of the two cases."""
    lines = [
        "",
        "| tables | plain torch | host memory, GiB | GPU memory, GiB | widest, plain torch | "
        "widest tried here |",
        "|---|---|---|---|---|---|",
    ]
    for section, facts in result["extra"].items():
        ours, widest = facts["speedtorch"], facts["widest tried here"]
        lines.append(
            f"| {section} | {facts['plain torch'] or 'fits'} | {ours['host_bytes'] / 2**30:.1f} |"
            f" {ours['gpu_bytes'] / 2**30:.2f} | {facts['widest of plain torch']} |"
            f" {widest['columns']} ({widest['host_bytes'] / 2**30:.1f} GiB of host memory,"
            f" {widest['gpu_bytes'] / 2**30:.2f} of the GPU's) |"
        )
    return lines


def not_measured(stem: str) -> str:
    """What stands in place of a table."""
    return f"There are no figures yet. `python -m benchmarks {stem}` measures them on a GPU."


def sleep_table(results: dict[str, Any]) -> str:
    """A training state that sleeps and wakes, in each way, with the machine."""
    if (result := results.get("training_state")) is None:
        return not_measured("training_state")
    lines = [f"{result['title']}; {where(result)}:", "", *_sleep_lines(result, "")]
    more = ", small tensors"
    if (title := result["extra"].get(f"title{more}")) is not None:
        lines += ["", f"{title}:", "", *_sleep_lines(result, more)]
    return "\n".join(lines)


def _sleep_lines(result: dict[str, Any], more: str) -> list[str]:
    """One line for each way; `more` ends the names of sections and facts."""
    lines = ["| way | asleep, ms | awake, ms | the first time, ms |", "|---|---|---|---|"]
    times = {(each["section"], each["name"]): each["median_ms"] for each in result["figures"]}
    for name in dict.fromkeys(name for section, name in times if section == f"asleep{more}"):
        first = result["extra"].get(f"{name}{more}", {})
        whole = [f"{first[k]:,.0f}" for k in first if k.startswith("the first time")]
        both = (f"{times[f'{section}{more}', name]:,.1f}" for section in ("asleep", "awake"))
        lines.append(f"| {name} | {' | '.join(both)} | {' / '.join(whole)} |")
    return lines


def state_table(results: dict[str, Any]) -> str:
    """A step whose state is in host memory, in each way, with the machine."""
    if (result := results.get("state_swapper")) is None:
        return not_measured("state_swapper")
    lines = [
        f"{result['title']}; {where(result)}:",
        "",
        "| way | ms a step | of the bound | GPU memory beside weights and gradients, GiB |"
        " host memory, GiB | the first step, ms |",
        "|---|---|---|---|---|---|",
    ]
    for figure in result["figures"]:
        name, share = figure["name"], figure["share_of_bound"]
        cells = [f"{figure['median_ms']:,.1f}", f"{share:.2f}" if share else "", "", "", ""]
        if facts := result["extra"].get(name):
            on_gpu = max(facts[key] for key in facts if key.startswith("GPU bytes beside"))
            cells[2:4] = [f"{size / 2**30:.1f}" for size in (on_gpu, facts["host bytes"])]
            cells[4] = f"{facts['the first step, ms']:,.0f}"
        lines.append(f"| {name} | {' | '.join(cells)} |")
    left = [name for name in result["extra"] if name.startswith("left out: ")]
    lines += [f"\nL{name[1:]}: {result['extra'][name]}." for name in left]
    return "\n".join(lines)


def sharded_table(results: dict[str, Any]) -> str:
    """Steps of shards on two GPUs, in each way, with the machine."""
    if (result := results.get("sharded_transformer")) is None:
        return not_measured("sharded_transformer")
    times = {(each["section"], each["name"]): each["median_ms"] for each in result["figures"]}
    sections = list(dict.fromkeys(section for section, _ in times))
    names = list(dict.fromkeys(name for _, name in times))
    lines = [
        f"{result['title']}; {where(result)}:",
        "",
        f"| way | {' | '.join(f'{each}, ms' for each in sections)} | GiB at most on a GPU |",
        "|---|" + "---|" * (len(sections) + 1),
    ]
    for name in names:
        shares = (times[section, names[0]] / times[section, name] for section in sections)
        cells = [
            f"{times[section, name]:,.0f} ({share:.2f} of the speed)"
            for section, share in zip(sections, shares, strict=True)
        ]
        most = result["extra"].get(f"{name}, GiB at most on a GPU")
        cells.append(f"{most:.1f}" if most else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def disk_table(results: dict[str, Any], stem: str) -> str:
    """The milliseconds and rate of each figure of a benchmark, with the machine."""
    if (result := results.get(stem)) is None:
        return not_measured(stem)
    lines = [f"{result['title']}; {where(result)}:", "", "| | ms | GB/s |", "|---|---|---|"]
    for each in result["figures"]:
        rate = f"{each['gigabytes_per_s']:.2f}" if each["gigabytes_per_s"] else ""
        lines.append(f"| {each['section']}: {each['name']} | {each['median_ms']:,.1f} | {rate} |")
    return "\n".join(lines)


def recommender_table(results: dict[str, Any]) -> str:
    """A training run in each way: speed, quality and memory, with the machine."""
    if (result := results.get("recommender")) is None:
        return not_measured("recommender")
    lines = [
        f"{result['title']}; {where(result)}:",
        "",
        "| way | ms a step | samples a second | steps | loss of the last steps | AUC |"
        " host memory, GB | GPU memory, GB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for figure in result["figures"]:
        facts = result["extra"][figure["name"]]
        rate = figure["parameters"]["samples"] / figure["median_ms"] * 1e3
        memory = (facts["host bytes"], facts["GPU bytes"] + facts["GPU bytes outside torch"])
        cells = [f"{figure['median_ms']:.2f}", f"{rate:,.0f}", f"{facts['steps']:,}"]
        cells += [f"{facts['losses'][-1]:.4f}", f"{facts['AUC']:.4f}"]
        cells += [f"{nbytes / 1e9:.1f}" for nbytes in memory]
        lines.append(f"| {figure['name']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ngram_table(results: dict[str, Any]) -> str:
    """What tables of n-grams add to a step of a GPT, with the machine."""
    if (result := results.get("ngram_tables")) is None:
        return not_measured("ngram_tables")
    model = result["extra"]["model"]
    cases = {name: facts for name, facts in result["extra"].items() if name != "model"}
    times = {(each["section"], each["name"]): each["median_ms"] for each in result["figures"]}
    lines = [
        f"A step of {model['tokens a step']:,} tokens of a GPT with"
        f" {model['dense parameters']:,} dense parameters"
        f" ({'compiled' if model['compiled'] else 'not compiled'}), {where(result)}:",
        "",
        f"| | {' | '.join(cases)} |",
        f"|---|{'---|' * len(cases)}",
    ]

    def line(title: str, cell: Callable[[dict[str, Any]], str]) -> None:
        lines.append(f"| {title} | {' | '.join(map(cell, cases.values()))} |")

    line("bytes of a row with its state", lambda facts: f"{facts['record_bytes']}")
    line("host memory, GB", lambda facts: f"{facts['host_bytes'] / 1e9:.1f}")
    line("distinct rows of a step", lambda facts: f"{facts['distinct_rows']:,.0f}")
    names = dict.fromkeys(each["name"] for each in result["figures"])
    for name in names:
        cells = [f"{times[section, name]:.2f}" for section in cases]
        lines.append(f"| ms a step, {name} | {' | '.join(cells)} |")
    for key, title in (
        ("exposed", "what tables add"),
        ("exposed, no prefetch", "what tables add, no prefetch"),
        ("arithmetic", "what small tables on the GPU add"),
        ("exposed, recomputed", "what tables add, recomputed"),
    ):
        line(title, lambda facts, key=key: "{ms:.2f} ms, {percent:.2f} %".format(**facts[key]))
    for name in next(iter(cases.values()))["peak_gib"]:
        line(f"peak of GPU memory, GiB, {name}", lambda f, name=name: f"{f['peak_gib'][name]:.2f}")
    return "\n".join(lines)


def where(result: dict[str, Any]) -> str:
    """The machine, its software, the commit and the date of a result."""
    machine = result["machine"]
    told = ", ".join(f"{name} {machine[name]}" for name in ("driver", "torch", "commit"))
    return f"{machine['gpu']}, {machine['cpu_cores']} CPU cores, {told}, {machine['date']}"


def memory_table(result: dict[str, Any]) -> list[str]:
    """One line for each kind of memory."""
    lines = [
        "| " + result["title"] + " | s | resident beyond the payload, MiB | page tables, MiB |",
        "|---|---|---|---|",
    ]
    for kind, run in result["extra"].items():
        beyond = run["resident_bytes_beyond_payload"] / 2**20
        tables = run["page_table_bytes"] / 2**20
        lines.append(f"| {kind} | {run['seconds']:.2f} | {beyond:.1f} | {tables:.1f} |")
    return lines


def steps_table(results: dict[str, Any]) -> str:
    """What a step takes with its rows in host memory, and elsewhere, where all was measured.

    Raises ValueError unless all steps were measured on one GPU at one commit.
    """
    lines = [
        "| ms a step | speedtorch | FBGEMM, managed memory | FBGEMM, managed, 20 % cached |"
        " FBGEMM, all in GPU memory | torch, all in GPU memory |",
        "|---|---|---|---|---|---|",
    ]
    measured = set()
    for step in STEPS:
        result = results.get(step.stem, {"figures": []})
        figures = result["figures"]
        median = {f["name"]: f["median_ms"] for f in figures if f["section"] == step.section}
        names = [step.ours, *(f"{step.fbgemm}, {place}" for place in PLACES)]
        if all(name in median for name in names):
            cells = [f"{median[name]:.2f}" for name in names]
            cells.append(f"{median[step.torch]:.2f}" if step.torch else "")
            lines.append(f"| {step.title} | {' | '.join(cells)} |")
            measured.add(tuple(result["machine"][key] for key in ("gpu", "commit", "date")))
    if len(measured) > 1:
        raise ValueError(f"steps of the README's table: measured apart, {sorted(measured)}")
    for gpu, commit, date in measured:
        lines.insert(0, f"Milliseconds a step, on an {gpu}, commit {commit}, {date}:\n")
    return "\n".join(lines)


def tables(results: dict[str, Any]) -> str:
    """Pictures and tables as Markdown, with the machine that they are from."""
    parts = [
        f"![{title}](../benchmarks/results/{name}.png)"
        for name, title in {**_PICTURES, **plots.PICTURES}.items()
        if (RESULTS / f"{name}.png").is_file()
    ]
    for stem, result in results.items():
        lines = figures_table(result) if result["figures"] else memory_table(result)
        if stem == "headline":
            lines += headline_table(result)
        table = "\n".join(lines)
        parts.append(
            f"<details><summary><code>{stem}</code>: {result['title']}</summary>\n\n{table}\n\n"
            f"{where(result)}.\n\n</details>"
        )
    return "\n\n".join(parts)


def write_documents() -> None:
    """Adds figures to the history, and replaces what stands between the markers."""
    results = read_results(RESULTS)
    history.append(history.PATH, results.values())
    for document, begin, end, made in (
        (README, FIRST, LAST, steps_table(results)),
        (PERFORMANCE, BEGIN, END, tables(results)),
        (NGRAM_TABLES, BEGIN, END, ngram_table(results)),
        (SLEEP, BEGIN, END, sleep_table(results)),
        (LAYERS, BEGIN, END, state_table(results)),
        (CHECKPOINTS, BEGIN, END, disk_table(results, "checkpoints")),
        (HOST_MEMORY, BEGIN, END, disk_table(results, "file_tables")),
        (OFFLOAD, BEGIN, END, sharded_table(results)),
        (RECOMMENDER, BEGIN, END, recommender_table(results)),
    ):
        document.write_text(replaced(document.read_text(), begin, end, made))


if __name__ == "__main__":
    plots.draw(read_results(RESULTS), RESULTS)
    write_documents()

"""Writes the tables between README.md's bench markers from results/*.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.harness import RESULTS, results_folder
from benchmarks.processes import STEMS

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- bench -->", "<!-- /bench -->"


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


def tables(results: dict[str, Any]) -> str:
    """Pictures and tables as Markdown, with the machine that they are from."""
    parts = [
        f"![{title}](benchmarks/results/{name}.png)"
        for name, title in {**plots.PICTURES, plots.OVERLAP: "exchange beside compute"}.items()
        if (RESULTS / f"{name}.png").is_file()
    ]
    for stem, result in results.items():
        machine = result["machine"]
        lines = figures_table(result) if result["figures"] else memory_table(result)
        if stem == "headline":
            lines += headline_table(result)
        told = ", ".join(f"{name} {machine[name]}" for name in ("driver", "torch", "commit"))
        where = f"{machine['gpu']}, {machine['cpu_cores']} CPU cores, {told}, {machine['date']}"
        table = "\n".join(lines)
        parts.append(
            f"<details><summary><code>{stem}</code>: {result['title']}</summary>\n\n{table}\n\n"
            f"{where}.\n\n</details>"
        )
    return "\n\n".join(parts)


def write_readme() -> None:
    """Replaces what stands between the markers."""
    text = README.read_text()
    head, rest = text.split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    README.write_text(f"{head}{BEGIN}\n{tables(read_results(RESULTS))}\n{END}{tail}")


if __name__ == "__main__":
    plots.draw(read_results(RESULTS), RESULTS)
    write_readme()

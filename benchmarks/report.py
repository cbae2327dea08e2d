"""Writes the tables between README.md's bench markers from results/*.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- bench -->", "<!-- /bench -->"
STEMS = ("pinned_gather", "pinned_scatter", "optimizer_state_swap", "host_memory")


def figures_table(result: dict[str, Any]) -> list[str]:
    """One line for each figure."""
    lines = [
        "| " + result["title"] + " | ms | lowest to highest | GB/s | of the bound |",
        "|---|---|---|---|---|",
    ]
    for figure in result["figures"]:
        share = figure["share_of_bound"]
        lines.append(
            f"| {figure['name']} | {figure['median_ms']:.3f} | {figure['low_ms']:.3f} to "
            f"{figure['high_ms']:.3f} | {figure['gigabytes_per_s']:.1f} | "
            f"{f'{share:.2f}' if share else ''} |"
        )
    return lines


def memory_table(result: dict[str, Any]) -> list[str]:
    """One line for each kind of memory."""
    lines = [
        "| " + result["title"] + " | s | resident beyond the payload, MiB | page tables, MiB |",
        "|---|---|---|---|",
    ]
    for kind, run in result["extra"].items():
        beyond, tables = (
            run[key] / 2**20 for key in ("resident_bytes_beyond_payload", "page_table_bytes")
        )
        lines.append(f"| {kind} | {run['seconds']:.2f} | {beyond:.1f} | {tables:.1f} |")
    return lines


def tables() -> str:
    """All tables as Markdown, with the machine that they are from."""
    parts = []
    for stem in STEMS:
        path = RESULTS / f"{stem}.json"
        if not path.is_file():
            continue
        result = json.loads(path.read_text())
        machine = result["machine"]
        lines = figures_table(result) if result["figures"] else memory_table(result)
        lines.append("")
        lines.append(
            f"{machine['gpu']}, driver {machine['driver']}, torch {machine['torch']}, commit "
            f"{machine['commit']}, {machine['date']}."
        )
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def write_readme() -> None:
    """Replaces what stands between the markers."""
    text = README.read_text()
    head, rest = text.split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    README.write_text(f"{head}{BEGIN}\n{tables()}\n{END}{tail}")


if __name__ == "__main__":
    write_readme()

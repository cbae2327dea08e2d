"""Pictures: GB/s against row width, rows per batch and table size; a step's time by Zipf's law."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from benchmarks.harness import results_folder

OVERLAP = "overlap"
PICTURES = {
    "pinned_gather": "GB/s of rows from host memory to the GPU",
    "pinned_scatter": "GB/s of rows from the GPU to host memory",
}
STEP_TIMES = "embedding"
CACHES = "hot_rows"
LOSSES = "recommender"
# Ways to train, by the names of their figures, and how each is drawn.
_WAYS: dict[str, dict[str, Any]] = {
    "FBGEMM, Adam, managed memory": {"color": "tab:red", "marker": "^"},
    "FBGEMM, Adam, managed memory, 20 % cache": {"color": "tab:orange", "marker": "v"},
    "torch, SparseAdam, all in GPU memory": {"color": "tab:gray", "marker": "x"},
    "speedtorch, Adam, fused": {"color": "tab:blue", "marker": "s"},
    "speedtorch, Adam, fused, prefetch": {"color": "tab:green", "marker": "o"},
    "FBGEMM, Adam, all in GPU memory": {"color": "black", "linestyle": "--"},
}
_CACHES: dict[str, dict[str, Any]] = {
    "ours": {"color": "tab:green", "marker": "o", "label": "speedtorch: rows with their state"},
    "FBGEMM": {"color": "tab:red", "marker": "^", "label": "FBGEMM: weights"},
}
# Section, what is on the x axis, its label and unit.
_AXES = (
    ("curve: row width", "row_bytes", "bytes per row", 1),
    ("curve: rows per batch", "batch", "rows per batch", 1),
    ("curve: table size", "table_bytes", "GiB of the table", 2**30),
)
_STYLES: dict[str, dict[str, Any]] = {
    "bound": {"color": "black", "linestyle": "--", "label": "memcpy, the bound"},
    "managed": {"color": "tab:green", "marker": "o", "label": "speedtorch, managed memory"},
    "registered": {"color": "tab:blue", "marker": "s", "label": "speedtorch, registered memory"},
    "CuPy": {"color": "tab:red", "marker": "^", "label": "CuPy zero-copy (SpeedTorch 2019)"},
}


def curve(result: dict[str, Any], section: str, kind: str, x: str) -> list[tuple[float, float]]:
    """Points (x, GB/s) of one curve, by rising x."""
    return sorted(
        (figure["parameters"][x], figure["gigabytes_per_s"])
        for figure in result["figures"]
        if figure["section"] == section and figure["parameters"]["kind"] == kind
    )


def _draw_overlap(result: dict[str, Any]) -> Figure:
    """A few steps of a profiler's trace: the exchange, and the GPU's other work."""
    facts = result["extra"]
    figure, ax = plt.subplots(figsize=(12, 2.2))
    for place, (name, color) in enumerate((("exchange", "tab:green"), ("compute", "tab:blue"))):
        spans = [(begin, end - begin) for begin, end in facts[f"{name}_spans"]]
        ax.broken_barh(spans, (place - 0.4, 0.8), color=color)
    ax.set_yticks([0, 1], ["exchange", "compute"])
    ax.set_xlabel("ms")
    share = f"{facts['share_hidden']:.0%} of the exchange runs beside compute"
    ax.set_title(share + _machine(result))
    return figure


def _draw_curves(result: dict[str, Any], title: str) -> Figure:
    figure, axes = plt.subplots(1, len(_AXES), figsize=(15, 4.2), sharey=True)
    for ax, (section, x, label, unit) in zip(axes, _AXES, strict=True):
        for kind, style in _STYLES.items():
            points = curve(result, section, kind, x)
            if points:
                ax.plot([p[0] / unit for p in points], [p[1] for p in points], **style)
        if section == "curve: table size":
            bound = curve(result, "128 float32", "bound", "row_bytes")
            ax.axhline(bound[0][1], **_STYLES["bound"])
        if x == "row_bytes":
            # torch's two ways with 512-byte rows: one point each.
            torchs = (
                (each["name"], each["gigabytes_per_s"])
                for each in result["figures"]
                if each["section"] == "128 float32" and each["name"].startswith("torch")
            )
            for (name, rate), marker in zip(torchs, "xv", strict=False):
                ax.plot([512], [rate], marker, color="tab:gray", label=name)
        ax.set_xscale("log", base=2 if x != "batch" else 10)
        ax.set_xlabel(label)
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("GB/s over the link")
    axes[0].set_ylim(bottom=0)
    _legend_below(figure)
    figure.suptitle(title + _machine(result))
    return figure


def _draw_steps(result: dict[str, Any]) -> Figure:
    """Milliseconds of a step over the exponent of the ids' law, beside FBGEMM and torch."""
    figure, ax = plt.subplots(figsize=(11, 4.2))
    for name, style in _WAYS.items():
        points = sorted(
            (each["parameters"]["exponent"], each["median_ms"])
            for each in result["figures"]
            if each["name"] == name
        )
        if points:
            ax.plot(*zip(*points, strict=True), label=name, **style)
    ax.set_xlabel("exponent of Zipf's law; 0: all rows alike")
    ax.set_ylabel("ms a step")
    ax.set_ylim(bottom=0)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    ax.set_title(result["title"] + _machine(result), fontsize=9)
    return figure


def _draw_caches(result: dict[str, Any]) -> Figure:
    """Milliseconds of a step over the share of rows that is cached, for each law of the ids."""
    exponents = sorted({each["parameters"]["exponent"] for each in result["figures"]})
    figure, axes = plt.subplots(1, len(exponents), figsize=(15, 4.2))
    for ax, exponent in zip(axes, exponents, strict=True):
        for kind, style in _CACHES.items():
            points = sorted(
                (told["share"] * 100, each["median_ms"])
                for each in result["figures"]
                if (told := each["parameters"])["exponent"] == exponent
                and (told["kind"], told["optimizer"]) == (kind, "Adam")
                and told.get("stored", "float32") == "float32"
                and told["share"] < 1
            )
            if points:
                ax.plot(*zip(*points, strict=True), **style)
        ax.set_title(f"Zipf {exponent}", fontsize=9)
        ax.set_xlabel("% of the rows that are cached")
        ax.set_ylim(bottom=0)
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("ms a step, Adam")
    _legend_below(figure)
    figure.suptitle(result["title"] + _machine(result), fontsize=9)
    return figure


def _draw_losses(result: dict[str, Any]) -> Figure:
    """The loss of a training run in each way, by steps and by seconds."""
    figure, axes = plt.subplots(1, 2, figsize=(15, 4.2), sharey=True)
    for each in result["figures"]:
        losses, chunk = result["extra"][each["name"]]["losses"], each["parameters"]["chunk"]
        steps = [chunk * (number + 1) for number in range(len(losses))]
        axes[0].plot(steps, losses, label=each["name"])
        axes[1].plot([step * each["median_ms"] / 1e3 for step in steps], losses)
    for ax, label in zip(axes, ("steps", "seconds of training"), strict=True):
        ax.set_xlabel(label)
        ax.set_xscale("log")
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("binary cross-entropy")
    _legend_below(figure)
    figure.suptitle(result["title"] + _machine(result), fontsize=9)
    return figure


def _legend_below(figure: Figure) -> None:
    """One legend below all axes, where it covers no curve."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    settings: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0)}
    figure.legend(handles, labels, fontsize=8, ncols=len(labels), **settings)


def _machine(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return f" ({machine['gpu']}, torch {machine['torch']}, {machine['date']})"


def draw(results: dict[str, Any], folder: Path | None = None) -> list[Path]:
    """Writes a picture of each direction that has been measured, of steps, and of the overlap."""
    figures = {}
    if results.get(OVERLAP, {}).get("extra"):
        figures[OVERLAP] = _draw_overlap(results[OVERLAP])
    if STEP_TIMES in results:
        figures[STEP_TIMES] = _draw_steps(results[STEP_TIMES])
    if CACHES in results:
        figures[CACHES] = _draw_caches(results[CACHES])
    if LOSSES in results:
        figures[LOSSES] = _draw_losses(results[LOSSES])
    for stem, title in PICTURES.items():
        if stem in results:
            figures[stem] = _draw_curves(results[stem], title)
    paths = {stem: (folder or results_folder()) / f"{stem}.png" for stem in figures}
    for stem, figure in figures.items():
        figure.tight_layout()
        figure.savefig(paths[stem], dpi=110, bbox_inches="tight")
        plt.close(figure)
    return list(paths.values())

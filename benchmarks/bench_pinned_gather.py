"""Rows from host memory to the GPU."""

from __future__ import annotations

from benchmarks import beside, sections
from benchmarks.directions import GATHER, Direction
from benchmarks.harness import Report


def run(way: Direction) -> None:
    """Measures and stores all figures of one direction in one run."""
    report = Report(way.stem, way.title)
    for section in (
        sections.rows_of_512_bytes,
        sections.records,
        sections.tables_on_the_gpu,
        sections.narrow_rows,
        sections.repeated_ids,
        sections.widths,
        sections.small_calls,
        beside.multiprocessors,
        beside.matrix_product,
        sections.curves,
    ):
        section(way, report)
    report.save()


def main() -> None:
    """Measures and stores all figures in one run."""
    run(GATHER)


if __name__ == "__main__":
    main()

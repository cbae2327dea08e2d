"""Runs notebooks from top to bottom and stores what they print and draw: `make notebooks`.

    python notebooks/execute.py [NOTEBOOK ...] [--out FOLDER]

Without names it runs all of them. Outputs go into the files themselves, or into a folder; a
notebook in which a cell raises is left as it was, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

HERE = Path(__file__).resolve().parent


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook with outputs, without times and without the lines that a bar overwrote."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=600,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(HERE)}},
    )
    client.execute()
    notebook.metadata.language_info = {"name": "python"}
    text = nbformat.writes(notebook).replace(f"{HERE.parent}/", "")  # paths in the checkout
    return nbformat.reads(text, as_version=4)


def main() -> None:
    """Runs what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("notebooks", nargs="*", type=Path, metavar="NOTEBOOK")
    parser.add_argument("--out", type=Path, help="a folder for the notebooks with their outputs")
    given = parser.parse_args()
    found = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent), found]))
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
    failed = False
    for path in given.notebooks or sorted(HERE.glob("*.ipynb")):
        begin = time.monotonic()
        try:
            notebook = executed(path)
        except CellExecutionError as error:
            failed = True
            print(f"{path.name} failed: {error}", flush=True)
            continue
        target = path if given.out is None else given.out / path.name
        fresh = target.with_suffix(".partial")  # then it is replaced as a whole
        nbformat.write(notebook, fresh)
        fresh.replace(target)
        kib = target.stat().st_size / 1024
        print(f"{path.name}: {time.monotonic() - begin:.0f} s, {kib:.0f} KiB", flush=True)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

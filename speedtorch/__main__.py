"""The command line: `speedtorch info`, `doctor`, `calibrate`, `replay FILE` and `demo NAME`.

`python -m speedtorch` is the same command.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from speedtorch.doctor import run_doctor
from speedtorch.info import info
from speedtorch.memory.calibration import calibrate
from speedtorch.replay import replay
from speedtorch.version import __version__

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; `arguments` default to the command line of this process.

    Returns:
        The exit status. 0: success. 1: a demonstration's comparison found a difference, `calibrate`
        cannot measure this machine, `doctor` found something wrong, `replay` found other results or
        cannot read the file, or the output cannot be written. 2: wrong use, or `demo` outside of a
        checkout.
    """
    try:
        status = _run(arguments)
        print(end="", flush=True)  # sys.stdout is None if the shell has closed it
        return status
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # such as in `speedtorch doctor | head -1`
            print(f"speedtorch: {error}", file=sys.stderr)
        # Python flushes stdout again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser("speedtorch", description=__doc__)
    parser.add_argument("--version", action="version", version=f"speedtorch {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    about = commands.add_parser("info", help="versions, what was built, GPUs, links, host, memory")
    about.add_argument(
        "--json", action="store_true", help="for programs: a JSON object, with memory in bytes"
    )
    doctor = commands.add_parser("doctor", help="checks host memory, links, limits and a folder")
    doctor.add_argument("--json", action="store_true", help="for programs: a JSON list of findings")
    doctor.add_argument(
        "--folder",
        type=_folder,
        help="measures how fast a file of 256 MiB is written and read there",
    )
    commands.add_parser("calibrate", help="measures the time to copy a row, and saves it")
    replay_parser = commands.add_parser(
        "replay", help="runs the operators of a dump and compares results"
    )
    replay_parser.add_argument("file", help="a dump of a program with SPEEDTORCH_LOG=dump")
    demo = commands.add_parser("demo", help="trains an example model, in a checkout")
    if (demos := _demos()) is not None:
        demos.add_demos(demo)
    else:
        demo.add_argument("rest", nargs=argparse.REMAINDER)
    chosen = parser.parse_args(arguments)
    if chosen.command == "demo":
        if demos is not None:
            status: int = demos.run_demo(chosen)
            return status
        print(
            "speedtorch: the demonstrations are not installed. They are in the folder"
            " docs/examples/demos of the source code: run this command in a checkout.",
            file=sys.stderr,
        )
        return 2
    if chosen.command == "doctor":
        return run_doctor(chosen.folder, as_json=chosen.json)
    if chosen.command == "calibrate":
        return _calibrate()
    if chosen.command == "replay":
        return replay(chosen.file)
    print(info().as_json() if chosen.json else info())
    return 0


def _demos() -> ModuleType | None:
    """The command line of the demonstrations, or None outside of a checkout."""
    folder = Path(__file__).resolve().parents[1] / "docs" / "examples"
    if not (folder / "demos").is_dir():
        return None
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return importlib.import_module("demos.command")


def _folder(name: str) -> str:
    if not os.path.isdir(name):
        raise argparse.ArgumentTypeError(f"{name!r} is not a folder")
    return name


def _calibrate() -> int:
    try:
        figures = calibrate()
    except RuntimeError as error:
        print(f"speedtorch: {error}", file=sys.stderr)
        return 1
    print(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

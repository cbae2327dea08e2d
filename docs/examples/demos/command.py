"""The command line of the demonstrations."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

from demos.dlrm import DLRMDemo
from demos.experts import ExpertsDemo
from demos.glove import GloVeDemo
from demos.ncf import NCF
from demos.runner import Demo, run
from demos.session import STOPPED
from demos.settings import add_arguments
from demos.word2vec import Word2Vec

__all__ = ["DEMOS", "add_demos", "run_demo"]

_WRONG_USE = 2
DEMOS: dict[str, type[Demo]] = {
    "word2vec": Word2Vec,
    "glove": GloVeDemo,
    "ncf": NCF,
    "dlrm": DLRMDemo,
    "experts": ExpertsDemo,
}


def add_demos(parser: ArgumentParser) -> None:
    """Adds one subcommand per demonstration to the command `demo`."""
    demos = parser.add_subparsers(dest="demo", required=True)
    for name, kind in DEMOS.items():
        added = demos.add_parser(name, help=kind.summary, description=kind.__doc__)
        add_arguments(added, kind.settings_type)


def run_demo(chosen: Namespace) -> int:
    """Runs the selected demonstration and returns the exit status."""
    choices = {name: value for name, value in vars(chosen).items() if name != "command"}
    kind = DEMOS[choices.pop("demo")]
    try:
        return run(kind, kind.settings_type(**choices))
    except (ValueError, OSError, MemoryError) as error:
        print(f"speedtorch: {error}", file=sys.stderr)
        return _WRONG_USE
    except KeyboardInterrupt:
        print("speedtorch: interrupted by Ctrl-C", file=sys.stderr)
        return STOPPED

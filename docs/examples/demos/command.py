"""The command line of the demonstrations."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from types import ModuleType

from demos import dlrm_run, experts, glove_run, ncf, word2vec
from demos.session import STOPPED
from demos.settings import add_arguments

__all__ = ["add_demos", "run_demo"]

_WRONG_USE = 2
# Each module has HELP, ABOUT, Settings and run.
_DEMOS: dict[str, ModuleType] = {
    "word2vec": word2vec,
    "glove": glove_run,
    "ncf": ncf,
    "dlrm": dlrm_run,
    "experts": experts,
}


def add_demos(parser: ArgumentParser) -> None:
    """Adds one subcommand per demonstration to the command `demo`."""
    demos = parser.add_subparsers(dest="demo", required=True)
    for name, module in _DEMOS.items():
        added = demos.add_parser(name, help=module.HELP, description=module.ABOUT)
        add_arguments(added, module.Settings)


def run_demo(chosen: Namespace) -> int:
    """Runs the selected demonstration and returns the exit status."""
    choices = {name: value for name, value in vars(chosen).items() if name != "command"}
    module = _DEMOS[choices.pop("demo")]
    try:
        status: int = module.run(module.Settings(**choices))
        return status
    except (ValueError, OSError, MemoryError) as error:
        print(f"speedtorch: {error}", file=sys.stderr)
        return _WRONG_USE
    except KeyboardInterrupt:
        print("speedtorch: interrupted by Ctrl-C", file=sys.stderr)
        return STOPPED

"""The command line: `python -m speedtorch info` and `python -m speedtorch demo NAME`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType

from speedtorch.demo import glove_run, ncf, word2vec
from speedtorch.demo.session import STOPPED
from speedtorch.info import info

__all__ = ["main"]

_WRONG_USE = 2
# A demonstration's module has HELP, ABOUT, Settings, add_arguments and run.
_DEMOS: dict[str, ModuleType] = {"word2vec": word2vec, "glove": glove_run, "ncf": ncf}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command: what follows `python -m speedtorch`, by default in this process.

    Returns:
        The exit status: 0, 1 if a comparison found a difference, 2 for a wrong use, 130 after
        Ctrl-C.
    """
    parser = argparse.ArgumentParser("python -m speedtorch", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, what was built, GPU, memory in use")
    demo = commands.add_parser("demo", help="see it work")
    demos = demo.add_subparsers(dest="demo", required=True)
    for name, module in _DEMOS.items():
        module.add_arguments(demos.add_parser(name, help=module.HELP, description=module.ABOUT))
    chosen = vars(parser.parse_args(arguments))
    command = chosen.pop("command")
    if command == "info":
        print(info())
        return 0
    module = _DEMOS[chosen.pop("demo")]
    try:
        status: int = module.run(module.Settings(**chosen))
        return status
    except (ValueError, OSError, MemoryError) as error:
        print(f"speedtorch: {error}", file=sys.stderr)
        return _WRONG_USE
    except KeyboardInterrupt:
        print("speedtorch: ended by Ctrl-C", file=sys.stderr)
        return STOPPED


if __name__ == "__main__":
    sys.exit(main())

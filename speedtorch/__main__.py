"""The command line: `python -m speedtorch info` and `python -m speedtorch demo word2vec`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from speedtorch.demo.settings import Settings, add_arguments
from speedtorch.demo.word2vec import STOPPED, run
from speedtorch.info import info

__all__ = ["main"]

_WRONG_USE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: what follows `python -m speedtorch`; by default this process's own.

    Returns:
        The exit status: 0, 1 if a comparison found a difference, 2 for a wrong use, 130 after
        Ctrl-C.

    Example:
        >>> main(["info"])  # doctest: +ELLIPSIS
        speedtorch ...
        0
    """
    parser = argparse.ArgumentParser("python -m speedtorch", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, what was built, GPU, memory in use")
    demo = commands.add_parser("demo", help="see it work")
    demos = demo.add_subparsers(dest="demo", required=True)
    word2vec = demos.add_parser(
        "word2vec",
        help="word vectors from real text, with the tables in host memory",
        description="Skip-gram with negative sampling. Word vectors and their optimizer state "
        "are kept in host memory; model and optimizer hold the rows of one batch.",
    )
    add_arguments(word2vec)
    chosen = vars(parser.parse_args(arguments))
    command = chosen.pop("command")
    if command == "info":
        print(info())
        return 0
    chosen.pop("demo")
    try:
        return run(Settings(**chosen))
    except (ValueError, OSError, MemoryError) as error:
        print(f"speedtorch: {error}", file=sys.stderr)
        return _WRONG_USE
    except KeyboardInterrupt:
        print("speedtorch: ended by Ctrl-C", file=sys.stderr)
        return STOPPED


if __name__ == "__main__":
    sys.exit(main())

"""The code blocks of README.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

README = Path(__file__).parent.parent / "README.md"


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        line: the line of README.md on which its code starts, from 1.
        needs_gpu: whether `<!-- gpu -->` stands on the line above the fence.
        text: the code.
    """

    line: int
    needs_gpu: bool
    text: str


def blocks(language: str) -> list[Block]:
    """The blocks of README.md in that language, in order."""
    text = README.read_text()
    fence = re.compile(rf"^(<!-- gpu -->\n)?```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [
        Block(text.count("\n", 0, match.start(2)) + 1, match[1] is not None, match[2])
        for match in fence.finditer(text)
    ]

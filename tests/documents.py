"""README.md and the pages of docs/, and the code blocks in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))


class Block(NamedTuple):
    """A fenced block of a document."""

    document: Path
    line: int  # on which its code starts, from 1
    text: str

    def __str__(self) -> str:
        return f"{self.document.name}-line-{self.line}"


def blocks(document: Path, language: str) -> list[Block]:
    """The blocks of a document in that language, in order."""
    text = document.read_text()
    fence = re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [
        Block(document, text.count("\n", 0, match.start(1)) + 1, match[1])
        for match in fence.finditer(text)
    ]

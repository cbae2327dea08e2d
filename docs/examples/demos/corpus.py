"""Text for the demonstrations: Python's own documentation, or a file of the user.

The built-in text is the language reference behind `help()` (`pydoc_data.topics`) and the
docstrings of the standard library. `ast` reads the docstrings from the source files. No module is
imported, because an import may have side effects.
"""

from __future__ import annotations

import ast
import io
import re
import sysconfig
import warnings
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from demos.gzip_files import open_plain_or_gzip
from demos.settings import check_least

__all__ = ["Corpus", "builtin_passages", "file_passages"]

_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*")
_BLANK_LINE = re.compile(r"\n[ \t\r]*\n")
# Lines that start like an interactive session are code, not English.
_CODE_LINE = re.compile(r"^[ \t]*(?:>>>|\.\.\.).*$", re.MULTILINE)
# Tests are not prose, the docstrings of idlelib and turtledemo are mostly manual test scripts, and
# site-packages differ between machines.
_SKIPPED_FOLDERS = frozenset(
    ("test", "tests", "idle_test", "idlelib", "turtledemo", "site-packages", "dist-packages")
)
_BLOCK_CHARACTERS = 1 << 20
_REPLACEMENT = "\ufffd"  # the decoder's character for invalid bytes


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text as word ids, most frequent word first.

    Attributes:
        tokens: `[T]` int32, the ids of the kept words, in reading order.
        passage: `[T]` int32, the passage number of each token, ascending.
        words: The vocabulary, `[V]`; word `i` has id `i`.
        counts: `[V]` int64, the number of occurrences of each word, descending.
        characters: Length of the source text.

    Example:
        >>> corpus = Corpus.from_passages(["The cat sat.", "The cat ran."], min_count=2)
        >>> corpus.words, corpus.tokens.tolist(), corpus.passage.tolist()
        (('cat', 'the'), [1, 0, 1, 0], [0, 0, 1, 1])
    """

    tokens: npt.NDArray[np.int32]
    passage: npt.NDArray[np.int32]
    words: tuple[str, ...]
    counts: npt.NDArray[np.int64]
    characters: int

    @classmethod
    def from_passages(cls, passages: Iterable[str], *, min_count: int = 5) -> Corpus:
        """Reads passages once and keeps the words that occur at least `min_count` times.

        Training windows do not cross passages. Words with equal counts are in alphabetical order.
        """
        check_least(1, min_count=min_count)
        first_ids: dict[str, int] = {}
        tokens, lengths, characters = array("i"), array("q"), 0
        for text in passages:
            before = len(tokens)
            for word in _WORD.findall(text.lower()):
                tokens.append(first_ids.setdefault(word, len(first_ids)))
            lengths.append(len(tokens) - before)
            characters += len(text)
        read = np.frombuffer(tokens, dtype=np.intc) if tokens else np.zeros(0, np.intc)
        counts = np.bincount(read, minlength=len(first_ids))
        spelled = list(first_ids)
        kept = [i for i in range(len(spelled)) if counts[i] >= min_count]
        if len(kept) < 2:
            raise ValueError(
                f"the corpus must have 2 words that occur at least {min_count} times, got"
                f" {len(kept)} ({characters} characters, {len(read)} words). Choose a longer text"
                " or a lower minimum count."
            )
        kept.sort(key=lambda i: (-counts[i], spelled[i]))
        new_ids = np.full(len(spelled), -1, np.int32)
        new_ids[kept] = np.arange(len(kept), dtype=np.int32)
        ids = new_ids[read]
        passage = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        return cls(
            tokens=ids[ids >= 0],
            passage=passage[ids >= 0],
            words=tuple(spelled[i] for i in kept),
            counts=counts[kept].astype(np.int64),
            characters=characters,
        )

    @classmethod
    def read(cls, path: Path | None, *, min_count: int) -> Corpus:
        """The corpus of a file, or of Python's documentation."""
        passages = file_passages(path) if path else builtin_passages()
        return cls.from_passages(passages, min_count=min_count)

    def __len__(self) -> int:
        """The number of kept words, `T`."""
        return len(self.tokens)

    def __str__(self) -> str:
        return f"{self.characters:,} characters, {len(self):,} words, {len(self.words):,} unique"


def _paragraphs(text: str) -> Iterator[str]:
    return (part for part in _BLANK_LINE.split(text) if part.strip())


def _docstrings(source: bytes) -> Iterator[str]:
    """Yields the docstrings of a source file, or nothing if this Python cannot parse the file."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        # Some files of the library are for other versions or contain deliberate errors.
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def builtin_passages(root: Path | None = None) -> Iterator[str]:
    """Yields the paragraphs of Python's documentation, without repeated texts or examples.

    The language reference precedes the docstrings of the standard library, whose files are in
    alphabetical order. With `root`, yields only the docstrings of the source files in that folder.
    """
    texts: dict[str, None] = {}
    if root is None:
        root = Path(sysconfig.get_path("stdlib"))
        try:
            from pydoc_data.topics import topics
        except ImportError:
            pass  # some distributions omit this module; the docstrings are enough
        else:
            texts.update(dict.fromkeys(topics[name] for name in sorted(topics)))
    for path in sorted(root.rglob("*.py")):
        if not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts[:-1]):
            source = path.read_bytes()
            if b'"""' in source or b"'''" in source:
                texts.update(dict.fromkeys(_docstrings(source)))
    if not texts:
        raise ValueError(f"no documentation in this Python ({root}). Choose a text with --corpus.")
    for text in texts:
        yield from _paragraphs(_CODE_LINE.sub("", text))


def file_passages(path: Path) -> Iterator[str]:
    """Yields the paragraphs of a UTF-8 file, plain or gzip, in bounded memory.

    The first two bytes identify gzip; the file's name does not matter. Invalid bytes are read as
    blanks between words, and a warning states their number. A paragraph ends at a blank line, or
    after at most two million characters.
    """
    with open_plain_or_gzip(path) as raw:
        text = io.TextIOWrapper(raw, encoding="utf-8", errors="replace")
        rest, replaced = "", 0
        while block := text.read(_BLOCK_CHARACTERS):
            replaced += block.count(_REPLACEMENT)
            whole, rest = _split_tail(rest + block)
            yield from _paragraphs(whole)
        yield from _paragraphs(rest)
    if replaced:
        warnings.warn(
            f"{path}: {replaced:,} places are not UTF-8 and were read as blanks, which splits"
            " words. Convert the text first, such as with `iconv -f latin1 -t utf-8`.",
            stacklevel=2,
        )


def _split_tail(text: str) -> tuple[str, str]:
    """Splits a text before its last paragraph, or before its last word if the paragraph is long."""
    cut = max(text.rfind("\n\n"), text.rfind("\n\r\n"))
    if len(text) - max(cut, 0) > _BLOCK_CHARACTERS:
        cut = max(text.rfind(" "), text.rfind("\n"))
        # A "word" longer than a block is not a word. The cut bounds the memory.
        cut = len(text) if cut < 0 else cut
    return (text[:cut], text[cut:]) if cut > 0 else ("", text)

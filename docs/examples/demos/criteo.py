"""Reads clicks on advertisements in Criteo's format, and generates files in this format."""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from demos.gzip_files import open_plain_or_gzip
from speedtorch.files.new_files import replace_files

__all__ = ["CATEGORIES", "NUMBERS", "Clicks", "read_clicks", "write_clicks"]

NUMBERS = 13
CATEGORIES = tuple(f"C{number}" for number in range(1, 27))
"""Criteo's names of the categorical features."""

# Up to 8 hexadecimal digits fit into 32 bits.
_FIELDS = [rb"([01])", *[rb"(-?\d{1,18}|)"] * NUMBERS, *[rb"([0-9a-fA-F]{0,8})"] * len(CATEGORIES)]
_LINE = re.compile(rb"\t".join(_FIELDS))

_EMPTY = 0.05  # share of empty fields in generated files
_TASTES = 4


@dataclass(frozen=True, eq=False)
class Clicks:
    """Displayed advertisements, in the order of the file.

    Attributes:
        clicked: `[N]` float32, 1 for a click, else 0.
        numbers: `[N, 13]` float32, `log(1 + max(x, 0))` of each number `x`; 0 for an empty field.
        categories: `[N, 26]` uint32, as in the file; 0 for an empty field.
    """

    clicked: npt.NDArray[np.float32]
    numbers: npt.NDArray[np.float32]
    categories: npt.NDArray[np.uint32]

    def __len__(self) -> int:
        """The number of advertisements, `N`."""
        return len(self.clicked)

    def split(self, held_out: float) -> tuple[Clicks, Clicks]:
        """Splits off the last advertisements, a share of `held_out`, for the score.

        Raises ValueError if the first part is empty or the last part has only one kind of outcome.

        Example:
            >>> clicks = Clicks(np.float32([0, 1, 1, 0]), np.zeros((4, 13)), np.zeros((4, 26)))
            >>> [len(part) for part in clicks.split(0.5)]
            [2, 2]
        """
        if not 0 < held_out < 1:
            raise ValueError(f"held_out must be above 0 and below 1, got {held_out}")
        cut = len(self) - round(held_out * len(self))
        first, last = (
            Clicks(self.clicked[part], self.numbers[part], self.categories[part])
            for part in (slice(cut), slice(cut, None))
        )
        if not len(first) or len(np.unique(last.clicked)) < 2:
            raise ValueError(
                f"the held-out lines, the last {len(last):,} of {len(self):,}, must include lines"
                " with and without a click, and other lines must precede them. Use more lines."
            )
        return first, last


def read_clicks(path: Path, *, lines: int | None = None, label: str | None = None) -> Clicks:
    r"""Reads a file in Criteo's format, plain or gzip, such as train.txt of Kaggle's challenge.

    A line has a label (0 or 1), 13 integers and 26 categories of up to 8 hexadecimal digits,
    separated by tabs. Integers and categories may be empty. Empty lines are skipped. `lines` is the
    maximum number of lines to read. `label` shows a progress bar with this name.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     _ = file.write(b"1\t\t5" + b"\t" * 11 + b"\t68fd1e64" + b"\t" * 25)
        ...     file.flush()
        ...     clicks = read_clicks(Path(file.name))
        >>> clicks.numbers[0, :3].round(3), hex(clicks.categories[0, 0])
        (array([0.   , 1.792, 0.   ], dtype=float32), '0x68fd1e64')
    """
    clicked, numbers, categories = array("B"), array("f"), array("I")
    with open_plain_or_gzip(path) as file:
        bar = tqdm(file, desc=label, disable=True if label is None else None, unit=" lines")
        for number, line in enumerate(bar, 1):
            if len(clicked) == lines:
                break
            line = line.rstrip(b"\r\n")
            if not line:
                continue
            found = _LINE.fullmatch(line)
            if found is None:
                raise ValueError(f"{path}, line {number}: {_what_is_wrong(line)}")
            first, *rest = found.groups()
            clicked.append(first == b"1")
            numbers.extend([int(text or b"0") for text in rest[:NUMBERS]])
            categories.extend([int(text or b"0", 16) for text in rest[NUMBERS:]])
    if not clicked:
        raise ValueError(f"{path}: the file has no lines")
    logs = np.frombuffer(numbers, np.float32).reshape(-1, NUMBERS)
    np.log1p(np.maximum(logs, 0, out=logs), out=logs)
    return Clicks(
        np.frombuffer(clicked, np.uint8).astype(np.float32),
        logs,
        np.frombuffer(categories, np.uint32).reshape(-1, len(CATEGORIES)),
    )


def _what_is_wrong(line: bytes) -> str:
    text, count = line.decode(errors="replace"), line.count(b"\t") + 1
    no_label = count == len(_FIELDS) - 1
    return (
        f"expected {len(_FIELDS)} fields separated by tabs (a label, 0 or 1, and {NUMBERS} integers"
        f" and {len(CATEGORIES)} categories of up to 8 hexadecimal digits, which may be empty), got"
        f" {count}: {text if len(text) <= 60 else text[:60] + '...'!r}. "
        + ("Use Criteo's train.txt; test.txt has no labels." if no_label else "Correct the line.")
    )


def write_clicks(path: Path, *, lines: int = 60_000, seed: int = 0) -> None:
    r"""Writes a generated file in Criteo's format, from which a model can learn.

    About one in four advertisements is clicked. Each value of a category changes the probability of
    a click, alone and through the dot product of its latent vector with those of other categories.
    The frequencies of values are very uneven. One field in twenty is empty.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "clicks.txt"
        ...     write_clicks(path, lines=50)
        ...     read_clicks(path).categories.shape
        (50, 26)
    """
    random = np.random.default_rng([seed, lines])
    numbers = random.geometric(0.1, (lines, NUMBERS)) - 2  # from -1, as Criteo's second number
    logit = np.log1p(np.maximum(numbers, 0)) @ random.normal(0, 0.2, NUMBERS)
    categories = np.empty((lines, len(CATEGORIES)), np.uint32)
    taste, alone = np.zeros((lines, _TASTES)), np.zeros(lines)
    for place, values in enumerate(random.permutation(np.geomspace(4, 1000, len(CATEGORIES)))):
        pick = (values * random.random(lines) ** 3).astype(np.int64)
        count = int(values) + 1
        categories[:, place] = random.integers(1, 1 << 32, count)[pick]
        own = random.normal(0, 0.2, (count, _TASTES))[pick]
        logit += random.normal(0, 0.2, count)[pick]
        taste += own
        alone += (own**2).sum(1)
    logit += ((taste**2).sum(1) - alone) / 2  # the sum of the dot products of all pairs
    clicked = random.random(lines) < 1 / (1 + np.exp(1.6 + logit.mean() - logit))
    empty = random.random((lines, NUMBERS + len(CATEGORIES))) < _EMPTY
    with replace_files([path]) as (file,):
        for row in range(lines):
            texts = [*map(str, numbers[row]), *(f"{value:08x}" for value in categories[row])]
            texts = np.where(empty[row], "", texts).tolist()
            file.write("\t".join([str(int(clicked[row])), *texts]).encode() + b"\n")

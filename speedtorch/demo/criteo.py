"""Clicks on advertisements, in Criteo's format: a file that is read, or one that is made up."""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from speedtorch.demo.gzip_files import open_plain_or_gzip
from speedtorch.files.new_files import replace_files

__all__ = ["CATEGORIES", "NUMBERS", "Clicks", "read_clicks", "write_clicks"]

NUMBERS = 13
CATEGORIES = tuple(f"C{number}" for number in range(1, 27))
"""Names of the categorical features, as Criteo has them."""

# Up to 8 hexadecimal digits fit into 32 bits.
_FIELDS = [rb"([01])", *[rb"(-?\d{1,18}|)"] * NUMBERS, *[rb"([0-9a-fA-F]{0,8})"] * len(CATEGORIES)]
_LINE = re.compile(rb"\t".join(_FIELDS))

_EMPTY = 0.05  # share of the fields made up
_TASTES = 4


@dataclass(frozen=True, eq=False)
class Clicks:
    """Advertisements that were shown, in the order of the file.

    Attributes:
        clicked: `[N]` float32, 1 for those that were clicked, else 0.
        numbers: `[N, 13]` float32, `log(1 + max(x, 0))` of each number `x`; 0 where it is empty.
        categories: `[N, 26]` uint32, as in the file; 0 where one is empty.
    """

    clicked: npt.NDArray[np.float32]
    numbers: npt.NDArray[np.float32]
    categories: npt.NDArray[np.uint32]

    def __len__(self) -> int:
        """How many there are, `N`."""
        return len(self.clicked)

    def split(self, held_out: float) -> tuple[Clicks, Clicks]:
        """All but the last, to train on, and the last, a share of `held_out`, to score on.

        Raises ValueError if there is nothing to train on, or not both kinds to score.

        Example:
            >>> clicks = Clicks(np.float32([0, 1, 1, 0]), np.zeros((4, 13)), np.zeros((4, 26)))
            >>> [len(part) for part in clicks.split(0.5)]
            [2, 2]
        """
        if not 0 < held_out < 1:
            raise ValueError(f"held_out is {held_out}; it must be above 0 and below 1")
        cut = len(self) - round(held_out * len(self))
        first, last = (
            Clicks(self.clicked[part], self.numbers[part], self.categories[part])
            for part in (slice(cut), slice(cut, None))
        )
        if not len(first) or len(np.unique(last.clicked)) < 2:
            raise ValueError(
                f"the last {len(last):,} of {len(self):,} lines are held out: there must be some"
                " with a click and some without among them, and others before; give more lines"
            )
        return first, last


def read_clicks(path: Path, *, lines: int | None = None, label: str | None = None) -> Clicks:
    r"""Reads a file in Criteo's format, plain or gzip, such as train.txt of Kaggle's challenge.

    A line has a label (0 or 1), 13 whole numbers and 26 categories of up to 8 hexadecimal digits,
    separated by tabs; numbers and categories may be empty. Empty lines do not count. With `lines`
    only the first so many are read; `label` shows a progress bar of this name.

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
            numbers.extend([int(each or b"0") for each in rest[:NUMBERS]])
            categories.extend([int(each or b"0", 16) for each in rest[NUMBERS:]])
    if not clicked:
        raise ValueError(f"{path}: there are no lines in this file")
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
        f"expected {len(_FIELDS)} fields with tabs between them (a label, 0 or 1; {NUMBERS} whole"
        f" numbers and {len(CATEGORIES)} categories of up to 8 hexadecimal digits, any of which may"
        f" be empty), got {count}: {text if len(text) <= 60 else text[:60] + '...'!r}; "
        + ("take Criteo's train.txt, as test.txt has no labels" if no_label else "mend this line")
    )


def write_clicks(path: Path, *, lines: int = 60_000, seed: int = 0) -> None:
    r"""Writes a file in Criteo's format, made up so that something can be learnt from it.

    About one in four is clicked. Every value of a category makes a click more or less likely by
    itself and has latent tastes, and it matters how well those of two categories go together;
    frequent values are much more frequent than others. One field in twenty is empty.

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
    logit += ((taste**2).sum(1) - alone) / 2  # the sum over all pairs of their dot products
    clicked = random.random(lines) < 1 / (1 + np.exp(1.6 + logit.mean() - logit))
    empty = random.random((lines, NUMBERS + len(CATEGORIES))) < _EMPTY
    with replace_files([path]) as (file,):
        for row in range(lines):
            told = [*map(str, numbers[row]), *(f"{each:08x}" for each in categories[row])]
            kept = np.where(empty[row], "", told)
            file.write("\t".join([str(int(clicked[row])), *kept]).encode() + b"\n")

"""`speedtorch demo` on small files of its own, for the tests of the demonstrations."""

from __future__ import annotations

import functools
import gzip
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topics import topic_passages

from demos.criteo import write_clicks
from demos.ratings import Ratings, generated_ratings
from speedtorch.__main__ import main

__all__ = ["DEMOS", "Demo", "demo_file", "demo_ratings", "facts", "run_demo", "written"]


@dataclass(frozen=True)
class Demo:
    """A demonstration."""

    option: str | None  # names the input file
    write: Callable[[Path], object]  # writes a small one
    small: tuple[str, ...]  # settings for that
    files: tuple[str, ...]  # the names of what is saved, in order


@functools.cache
def demo_ratings() -> Ratings:
    return generated_ratings(users=600, items=300)


def _write_text(path: Path) -> None:
    path.write_text("\n\n".join(topic_passages()))


def _write_ratings(path: Path) -> None:
    """Writes MovieLens's first format, with other ids."""
    ratings = demo_ratings()
    pairs = zip(ratings.user.tolist(), ratings.item.tolist(), strict=True)
    path.write_text("".join(f"{10 * u + 7}\t{3 * i}\t4\t{n}\n" for n, (u, i) in enumerate(pairs)))


_TEXT = ("--dim", "8", "--batch", "256", "--min-count", "1", "--steps", "60")
_RATINGS = ("--dim", "4", "--batch", "512", "--epochs", "2")
_CLICKS = ("--dim", "4", "--rows", "100", "--batch", "256")
_EXPERTS = ("--experts", "6", "--resident", "3", "--width", "8", "--batch", "32", "--steps", "120")
_VECTORS = ("report.json", "vectors.npy", "vectors.txt")
_MODEL = ("model.safetensors", "report.json")
DEMOS = {
    "word2vec": Demo("--corpus", _write_text, _TEXT, _VECTORS),
    "glove": Demo("--corpus", _write_text, _TEXT, _VECTORS),
    "ncf": Demo("--ratings", _write_ratings, _RATINGS, _MODEL),
    "dlrm": Demo("--clicks", functools.partial(write_clicks, lines=3000), _CLICKS, _MODEL),
    "experts": Demo(None, Path.touch, _EXPERTS, _MODEL),
}


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Where the files lie; it goes with this process."""
    return tempfile.TemporaryDirectory()


@functools.cache
def demo_file(name: str) -> Path:
    path = Path(_folder().name) / name
    DEMOS[name].write(path)
    return path


def written(path: Path, content: str | bytes, zipped: bool = False) -> Path:
    """Writes a file, in a new folder if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(content) if zipped else content)
    return path


def run_demo(name: str, out: Path, *more: str, device: str = "cpu") -> int:
    """Runs the command on the demonstration's file; the last of equal options counts."""
    option = DEMOS[name].option
    file = (option, str(demo_file(name))) if option else ()
    given = ("--out", str(out), "--device", device, *DEMOS[name].small)
    return main(["demo", name, *file, *given, *more])


def facts(out: Path) -> dict[str, Any]:
    """The report."""
    found: dict[str, Any] = json.loads((out / "report.json").read_text())
    return found

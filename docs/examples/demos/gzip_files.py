"""Opens files that may be compressed."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, cast

__all__ = ["open_plain_or_gzip"]


@contextmanager
def open_plain_or_gzip(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for reading and decompresses gzip, which the first two bytes identify.

    A read of a damaged gzip file raises ValueError.
    """
    with ExitStack() as stack:
        raw: BinaryIO = stack.enter_context(path.open("rb"))
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        plain = stack.enter_context(gzip.GzipFile(fileobj=raw)) if zipped else raw
        try:
            yield cast(BinaryIO, plain)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path} is a damaged gzip file: {error}") from error

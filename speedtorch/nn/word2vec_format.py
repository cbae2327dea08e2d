"""save_word2vec_format: writes rows and their words in the file format of word2vec."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from speedtorch.files.new_files import replace_files
from speedtorch.nn.tables import Readable, check_readable
from speedtorch.table.progress import progress_bar

__all__ = ["save_word2vec_format"]

# Bytes of float32 in one write; text needs about fifty times as much memory during the write.
_BINARY_BLOCK = 16 << 20
_TEXT_BLOCK = 1 << 20
# Characters that end a word in the readers of word2vec and gensim.
_ENDS = frozenset(" \t\n\v\f\r")


def save_word2vec_format(
    emb: Readable,
    path: str | os.PathLike[str],
    words: Sequence[str],
    *,
    binary: bool = True,
    progress: bool | None = None,
) -> None:
    r"""Writes a table and the words of its rows for `KeyedVectors.load_word2vec_format`.

    The format of word2vec and gensim is a line `rows columns`, then for each row the word in UTF-8,
    a space, the numbers and a newline. Numbers are little-endian float32. With `binary=False` they
    are decimal text, from which a reader gets bitwise identical float32. Rows of other dtypes are
    converted to float32. The file is not compressed, whatever its name is.

    Rows are read in blocks by `emb.blocks()`. An existing file is replaced only after the new file
    is complete and on the disk.

    Args:
        emb: An Embedding or EmbeddingBag, or a table of a collection.
        path: The file.
        words: A unique word for each row, in the order of the ids.
        binary: Write numbers as bytes. Text (False) is larger and slower to read.
        progress: See nearest_neighbors.

    Raises:
        TypeError: `emb` is not an Embedding, EmbeddingBag or table of a collection, its rows are
            complex, or `words` is not a sequence of str.
        ValueError: There are more or fewer words than rows, or a word is empty, contains a space,
            a tab or a line end, is repeated, or has no UTF-8 encoding.
        RuntimeError: Ranks share the rows, or as for Embedding.blocks.
        OSError: The disk is full, or another file call failed. After an error the file at `path`
            has not changed, unless the message says that the new file is complete and in place.

    Example:
        >>> import tempfile, torch, speedtorch
        >>> emb = speedtorch.Embedding.from_pretrained(torch.tensor([[0.5, 1.0], [2.0, 0.1]]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     speedtorch.save_word2vec_format(emb, f"{folder}/v.txt", ["a", "b"], binary=False)
        ...     print(open(f"{folder}/v.txt").read())
        2 2
        a 0.5 1.0
        b 2.0 0.1
    """
    check_readable(emb)
    if (stored := emb.weight.dtype).is_complex:
        raise TypeError(f"emb: expected rows of real numbers, got {stored}")
    named = _checked(words, emb.num_embeddings)
    row_bytes = 4 * emb.embedding_dim
    block_bytes = _BINARY_BLOCK if binary else _TEXT_BLOCK
    blocks = emb.blocks(max(1, block_bytes // max(1, row_bytes)))
    header = f"{emb.num_embeddings} {emb.embedding_dim}\n".encode()
    lines = _binary_lines if binary else _text_lines
    with replace_files([path]) as (file,), progress_bar(emb.num_embeddings, progress) as bar:
        if binary:
            letters = sum(len(word.encode()) for word in named)
            file.reserve(len(header) + letters + (row_bytes + 2) * len(named))
        file.write(header)
        for first, block in blocks:
            block_words = named[first : first + len(block)]
            file.write(b"".join(lines(block_words, block.to(torch.float32))))
            bar.update(len(block))


def _checked(words: object, rows: int) -> list[str]:
    """Returns a list of the words; raises TypeError or ValueError if they are invalid."""
    is_sequence = hasattr(words, "__len__") and hasattr(words, "__getitem__")
    if not is_sequence or isinstance(words, str | bytes | Mapping | Set):
        raise TypeError(f"words: expected a sequence of str, got {type(words).__name__}")
    named = list(cast(Iterable[Any], words))
    if len(named) != rows:
        raise ValueError(f"words: expected {rows:,}, one for each row, got {len(named):,}")
    seen: set[str] = set()
    for place, word in enumerate(named):
        if not isinstance(word, str):
            raise TypeError(f"words[{place}]: expected a str, got {word!r}")
        if not word:
            raise ValueError(f"words[{place}]: expected a word, got an empty one")
        if not _ENDS.isdisjoint(word):
            raise ValueError(f"words[{place}]: expected no space, tab or line end, got {word!r}")
        if word in seen:
            before = named.index(word)
            raise ValueError(f"words[{place}]: expected unique words, words[{before}] is {word!r}")
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"words[{place}]: {word!r} has no UTF-8 encoding: {error}") from None
        seen.add(word)
    return named


def _binary_lines(words: Sequence[str], rows: Tensor) -> Iterable[bytes]:
    data, row_bytes = rows.numpy().astype("<f4", copy=False).tobytes(), 4 * rows.shape[1]
    for place, word in enumerate(words):
        yield word.encode() + b" "
        yield data[place * row_bytes : (place + 1) * row_bytes] + b"\n"


def _text_lines(words: Sequence[str], rows: Tensor) -> Iterable[bytes]:
    # The shortest decimal numbers that read back as the same float32.
    numbers = rows.numpy().astype(np.str_).tolist()
    for word, row in zip(words, numbers, strict=True):
        yield f"{' '.join([word, *row])}\n".encode()

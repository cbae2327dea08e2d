"""The common part of the word vector demonstrations: a text, nearest words, saved vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demos.corpus import Corpus
from demos.processes import Processes
from demos.report import json_bytes
from demos.runner import Demo
from speedtorch.files.new_files import replace_files
from speedtorch.files.npy_format import npy_header

__all__ = ["WordVectors", "content_words", "nearest_neighbours"]

_Rows = Callable[[Tensor], Tensor]
"""Returns the vectors `[N, D]`, on the CPU, of word ids `[N]` on the CPU."""

_BLOCK_ROWS = 1 << 14
_FREQUENT = 200
_NEIGHBOURS_OF = 8


def content_words(corpus: Corpus, number: int) -> list[int]:
    """Finds frequent words that carry a meaning, in any language.

    Such words occur in few passages for their frequency, whereas words like "the" are spread
    evenly. Returns up to `number` of these words with at least four letters, most frequent first.

    Example:
        >>> text = ["rain and rain", "cold with wind", "wind with sun", "fog with hail"]
        >>> corpus = Corpus.from_passages(text, min_count=1)
        >>> [corpus.words[i] for i in content_words(corpus, 1)]
        ['rain']
    """
    passages = len(np.unique(corpus.passage))
    both = np.unique(corpus.tokens.astype(np.int64) * (1 << 32) + corpus.passage)
    holding = np.bincount(both >> 32, minlength=len(corpus.words))
    # The share of passages with the word if its occurrences were spread evenly.
    even = -np.expm1(-corpus.counts / passages)
    crowding = np.log(even * passages / holding)
    long = np.array([i for i, word in enumerate(corpus.words) if len(word) >= 4], np.int64)
    frequent = long[:_FREQUENT]
    if not len(frequent):
        return []
    crowded = crowding[frequent] >= np.quantile(crowding[frequent], 2 / 3)
    found: list[int] = frequent[crowded][:number].tolist()
    return found


def nearest_neighbours(
    rows: _Rows, words: Sequence[str], chosen: Sequence[int], *, number: int = 6
) -> dict[str, list[str]]:
    """For each chosen word, the words with the highest cosine similarity, nearest first."""
    if not chosen:
        return {}
    query = _normalized(rows(torch.tensor(chosen)))
    blocks = _row_blocks(rows, len(words))
    likeness = torch.cat([query @ _normalized(block).T for block in blocks], dim=1)
    # A word is not its own neighbour.
    likeness[torch.arange(len(chosen)), torch.tensor(chosen)] = -2.0
    best = likeness.topk(min(number, len(words) - 1), dim=1).indices.tolist()
    return {words[i]: [words[j] for j in row] for i, row in zip(chosen, best, strict=True)}


def _normalized(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows, dim=1)


def _row_blocks(rows: _Rows, words: int) -> Iterable[Tensor]:
    """All rows, in blocks `[up to 16,384, D]`, so that no table is copied whole."""
    return map(rows, torch.split(torch.arange(words), _BLOCK_ROWS))


class WordVectors(Demo):
    """A demonstration that trains the vectors of a text's words."""

    example = "pair"

    def __init__(self, settings: Any, device: torch.device, processes: Processes) -> None:
        self.corpus = Corpus.read(settings.corpus, min_count=settings.min_count)
        print(f"text       {self.corpus}", flush=True)
        super().__init__(settings, device, processes)

    def results(self, before: Any, after: Any) -> tuple[dict[str, Any], list[str]]:
        """The words with the nearest vectors."""
        chosen = content_words(self.corpus, _NEIGHBOURS_OF)
        near = nearest_neighbours(self.model.vectors, self.corpus.words, chosen)
        lines = [f"  {word:11}{', '.join(nearest)}" for word, nearest in near.items()]
        return {"words": len(self.corpus.words), "neighbours": near}, ["nearest", *lines]

    def save(self, facts: dict[str, Any]) -> list[Path]:
        """Writes the words' vectors and the facts, either all files or none.

        `vectors.npy` is float32 `[V, D]`. `vectors.txt` has word2vec's text format, which gensim's
        `KeyedVectors.load_word2vec_format` reads, with enough digits for the same float32 values.
        """
        words, dim = self.corpus.words, self.settings.dim
        names = ("vectors.npy", "vectors.txt", "report.json")
        paths = [self.settings.out / name for name in names]
        line = "%s" + " %.9g" * dim + "\n"
        with replace_files(paths) as (array, text, report):
            array.write(npy_header((len(words), dim), torch.float32))
            text.write(f"{len(words)} {dim}\n".encode())
            done = 0
            for block in _row_blocks(self.model.vectors, len(words)):
                array.write(block.contiguous().numpy().tobytes())
                named = zip(words[done : done + len(block)], block.tolist(), strict=True)
                text.write("".join(line % (word, *values) for word, values in named).encode())
                done += len(block)
            report.write(json_bytes(facts))
        return paths

"""What the demonstrations of word vectors share: a text, nearest words and the saved vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from demos.corpus import Corpus
from demos.evaluate import content_words, nearest_neighbours, row_blocks
from demos.processes import Processes
from demos.report import json_bytes
from demos.runner import Demo
from speedtorch.files.new_files import replace_files
from speedtorch.files.npy_format import npy_header

__all__ = ["WordVectors"]

_NEIGHBOURS_OF = 8


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
            for block in row_blocks(self.model.vectors, len(words)):
                array.write(block.contiguous().numpy().tobytes())
                named = zip(words[done : done + len(block)], block.tolist(), strict=True)
                text.write("".join(line % (word, *values) for word, values in named).encode())
                done += len(block)
            report.write(json_bytes(facts))
        return paths

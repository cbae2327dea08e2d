"""The demonstrations: models on real data, trained on tables in host memory.

`python -m speedtorch demo word2vec` runs the first: `corpus` and `pairs` make batches out of text,
`skipgram` is the model, `plain` steps the same in plain torch to compare with, `evaluate` and
`report` score and save, and `word2vec` puts them together.

`python -m speedtorch demo glove` runs GloVe on `speedtorch.Embedding`: `cooccurrence` counts word
pairs, `glove_batches` makes batches of them, `glove` is the model and its training, and `glove_run`
puts them together.

`python -m speedtorch demo ncf` runs a recommender: `ratings` reads a file or makes ratings up,
`ranking` makes batches and scores, `neumf` is the model and its training, and `ncf` puts them
together.
"""

from __future__ import annotations

__all__ = [
    "cooccurrence",
    "corpus",
    "glove",
    "glove_batches",
    "glove_run",
    "ncf",
    "neumf",
    "pairs",
    "plain",
    "ranking",
    "ratings",
    "report",
    "skipgram",
    "word2vec",
]

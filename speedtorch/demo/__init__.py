"""The demonstration: word vectors from real text, trained on tables in host memory.

`python -m speedtorch demo word2vec` runs it; `corpus` and `pairs` make batches out of text,
`skipgram` is the model and its host tables, `plain` the same in plain torch to compare with,
`report` scores and saves, and `word2vec` puts them together.
"""

from __future__ import annotations

__all__ = ["corpus", "pairs", "plain", "report", "skipgram", "word2vec"]

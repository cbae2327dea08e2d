"""Files of vectors as gensim reads them. Needs gensim: make clients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import speedtorch

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
models = pytest.importorskip("gensim.models")


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "text"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gensim_reads_the_words_and_the_rows(
    dtype: torch.dtype, binary: bool, tmp_path: Path
) -> None:
    rows = torch.randn(7, 5).to(dtype)
    words = ["the", "Straße", "中文", "a\u00a0b", "1", "</s>", "z"]
    emb = speedtorch.Embedding.from_pretrained(rows)
    speedtorch.save_word2vec_format(emb, tmp_path / "file", words, binary=binary)
    read = models.KeyedVectors.load_word2vec_format(str(tmp_path / "file"), binary=binary)
    assert read.index_to_key == words
    assert np.array_equal(read.vectors, rows.float().numpy())


def test_neighbors_are_those_of_gensim(tmp_path: Path) -> None:
    rows, words = torch.randn(200, 16), [str(row) for row in range(200)]
    emb = speedtorch.Embedding.from_pretrained(rows)
    speedtorch.save_word2vec_format(emb, tmp_path / "file", words)
    read = models.KeyedVectors.load_word2vec_format(str(tmp_path / "file"), binary=True)
    _, ids = speedtorch.nearest_neighbors(emb, rows[:3], 11)
    for row in range(3):  # gensim leaves the word itself out
        assert [int(word) for word, _ in read.most_similar(str(row))] == ids[row, 1:].tolist()

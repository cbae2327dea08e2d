"""The demonstration's text: what is read, what is left out, and what is refused."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
from demo_commands import written

from demos import corpus as corpus_module
from demos.corpus import Corpus, builtin_passages, file_passages

TEXT = "The red fox.\n\nIt can't see the café!\n \nEnd"


@pytest.mark.examples
def test_every_python_carries_over_500_kb_of_english() -> None:
    corpus = Corpus.from_passages(builtin_passages())
    assert corpus.characters > 500_000
    assert {"the", "class", "returns", "file", "statement"} <= set(corpus.words)


def test_docstrings_are_read_without_importing_their_modules(tmp_path: Path) -> None:
    flag = tmp_path / "imported"
    source = f'"""Odd one."""\nopen({str(flag)!r}, "w")\nraise SystemExit\n'
    written(tmp_path / "library" / "odd_module_of_a_test.py", source)
    before = set(sys.modules)
    assert list(builtin_passages(tmp_path / "library")) == ["Odd one."]
    assert not flag.exists() and "odd_module_of_a_test" not in set(sys.modules) - before


def test_docstrings_of_modules_classes_and_functions_are_read_once(tmp_path: Path) -> None:
    source = (
        '"""Module."""\nclass A:\n    """Class."""\n    def f(self):\n        """Method."""\n'
        'async def g():\n    """Method."""\n    """No docstring."""\n'
    )
    written(tmp_path / "a.py", source)
    written(tmp_path / "b.py", source)
    assert list(builtin_passages(tmp_path)) == ["Module.", "Class.", "Method."]


def test_tests_and_other_peoples_packages_are_left_out(tmp_path: Path) -> None:
    for folder in ("test", "json/tests", "site-packages/x", "idlelib/idle_test"):
        written(tmp_path / folder / "a.py", '"""Out."""')
    written(tmp_path / "json" / "a.py", '"""In."""')
    assert list(builtin_passages(tmp_path)) == ["In."]


def test_sources_that_this_python_cannot_parse_are_skipped(tmp_path: Path) -> None:
    written(tmp_path / "a.py", '"""Good."""')
    written(tmp_path / "b.py", '"""Bad."""\ndef (')
    written(tmp_path / "c.py", b'"""Zero \0 byte."""')
    assert list(builtin_passages(tmp_path)) == ["Good."]


def test_interactive_examples_are_no_text(tmp_path: Path) -> None:
    written(tmp_path / "a.py", '"""Adds.\n\n    >>> f(1)\n    ... # more\n\nDone."""')
    assert [p.strip() for p in builtin_passages(tmp_path)] == ["Adds.", "Done."]


@pytest.mark.parametrize("name", ["text.txt", "text.gz", "text"])
@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gzip"])
def test_a_file_is_known_as_gzip_by_its_content(tmp_path: Path, name: str, zipped: bool) -> None:
    path = written(tmp_path / name, TEXT, zipped)
    parts = [part.strip() for part in file_passages(path)]
    assert parts == ["The red fox.", "It can't see the café!", "End"]


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("gap", [" ", "\n", "\n\n", "\r\n\r\n"], ids=repr)
def test_text_of_any_length_is_read_in_blocks_with_every_word_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zipped: bool, gap: str
) -> None:
    monkeypatch.setattr(corpus_module, "_BLOCK_CHARACTERS", 64)
    words = [f"word{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(500)]
    path = written(tmp_path / "t", gap.join(words), zipped)
    parts = list(file_passages(path))
    assert " ".join(parts).split() == words
    assert max(map(len, parts)) <= 2 * 64


def test_a_long_text_without_blank_lines_is_held_two_million_characters_at_a_time(
    tmp_path: Path,
) -> None:
    words = 1 << 20
    parts = list(file_passages(written(tmp_path / "t", "word " * words)))
    assert sum(part.count("word") for part in parts) == words
    assert max(map(len, parts)) <= 2 << 20


def test_one_endless_word_is_cut_rather_than_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "_BLOCK_CHARACTERS", 64)
    parts = list(file_passages(written(tmp_path / "t", "x" * 1000)))
    assert "".join(parts) == "x" * 1000 and max(map(len, parts)) <= 2 * 64


def test_bytes_that_are_no_utf8_separate_words_and_are_counted(tmp_path: Path) -> None:
    passages = file_passages(written(tmp_path / "t", b"left\xff\xferight left right"))
    with pytest.warns(UserWarning, match=r"t: 2 places are not UTF-8 .* `iconv"):
        corpus = Corpus.from_passages(passages, min_count=1)
    assert set(corpus.words) == {"left", "right"}


def test_text_in_utf8_is_read_without_a_warning(tmp_path: Path) -> None:
    passages = file_passages(written(tmp_path / "t", "Äpfel, naïve Bäume".encode()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        corpus = Corpus.from_passages(passages, min_count=1)
    assert set(corpus.words) == {"äpfel", "naïve", "bäume"}


def test_words_are_ordered_by_count_then_by_spelling() -> None:
    corpus = Corpus.from_passages(["b a c c", "d's B_A"], min_count=1)
    assert corpus.words == ("a", "b", "c", "d's")
    assert corpus.counts.tolist() == [2, 2, 2, 1]
    assert corpus.tokens.tolist() == [1, 0, 2, 2, 3, 1, 0]
    assert corpus.passage.tolist() == [0, 0, 0, 0, 1, 1, 1]


def test_rare_words_are_dropped_as_if_they_were_not_there() -> None:
    corpus = Corpus.from_passages(["a rare b", "b once a"], min_count=2)
    assert corpus.words == ("a", "b") and corpus.tokens.tolist() == [0, 1, 1, 0]
    assert len(corpus) == 4

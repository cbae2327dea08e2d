"""A made-up text with topics that training must find, for the tests of the demonstration."""

from __future__ import annotations

import numpy as np

__all__ = ["TOPIC_OF", "topic_passages"]

_TOPICS, _WORDS_PER_TOPIC, _ALL_WORDS = 6, 10, 70
_NAMES = ["".join(chr(97 + int(digit)) for digit in f"{i:05d}") for i in range(_ALL_WORDS)]
TOPIC_OF = {_NAMES[i]: i // _WORDS_PER_TOPIC for i in range(_TOPICS * _WORDS_PER_TOPIC)}


def topic_passages() -> list[str]:
    """240 passages of 30 words: 70 % from the passage's topic, 30 % that all topics share."""
    random = np.random.default_rng(11)
    parts = []
    for number in range(240):
        start = _WORDS_PER_TOPIC * (number % _TOPICS)
        own = random.integers(start, start + _WORDS_PER_TOPIC, 30)
        shared = random.integers(_TOPICS * _WORDS_PER_TOPIC, _ALL_WORDS, 30)
        ids = np.where(random.random(30) < 0.7, own, shared)
        parts.append(" ".join(_NAMES[int(i)] for i in ids))
    return parts

"""The part of a document between two markers, which is made by a program."""

from __future__ import annotations


def between(text: str, begin: str, end: str) -> str:
    """What stands between the markers."""
    return text.split(begin, 1)[1].split(end, 1)[0].strip()


def replaced(text: str, begin: str, end: str, made: str) -> str:
    """The document with something else between the markers."""
    head, rest = text.split(begin, 1)
    return f"{head}{begin}\n{made}\n{end}{rest.split(end, 1)[1]}"

"""Generations: folders with numbers within a folder, each whole and on the disk, or not there.

A generation is written under a hidden name, synced, and then renamed in one step, also at a power
loss. A reader takes the highest number; one that is being removed meanwhile stays readable where it
is open, and is looked for again where it is not.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from speedtorch.files.new_files import TOKEN, new_folder, new_token, rename_folder
from speedtorch.files.system_calls import calls, sync_folder

__all__ = [
    *("Generation", "check_number", "chosen", "generations_of", "new_generation", "path_of"),
]

_NAME = re.compile(r"generation-([0-9]{8,})")
_HIDDEN = re.compile(rf"\.generation-\d+\.{TOKEN}\.(partial|old|ranks)")


def path_of(folder: str, number: int) -> str:
    """Where a generation is."""
    return os.path.join(folder, f"generation-{number:08d}")


def generations_of(folder: str) -> list[int]:
    """The numbers of those that there are, ascending; none where there is no such folder.

    Other entries are passed over: files, links to nothing, folders of other names or contents.
    Raises NotADirectoryError for a file.
    """
    if os.path.exists(folder) and not os.path.isdir(folder):
        text = "is a file; name the folder that has, or is to have, the generations"
        raise NotADirectoryError(errno.ENOTDIR, text, folder)
    before: set[str] | None = None
    with suppress(FileNotFoundError):
        while (names := {n for n in os.listdir(folder) if _NAME.fullmatch(n)}) != before:
            found = sorted(
                number
                for number in {int(each.partition("-")[2]) for each in names}
                if os.path.basename(path := path_of(folder, number)) in names
                and os.path.isdir(path)
                and not os.path.isdir(os.path.join(path, "manifest.json"))
            )
            if found:
                return found
            before = names  # the last one may have been removed since, after the next one came
    return []


def check_number(what: str, given: object) -> None:
    """Raises TypeError for what is no number of a generation, nor None."""
    if isinstance(given, bool) or not isinstance(given, int | None):
        raise TypeError(f"{what}: expected a number, as Saved.generation is, got {given!r}")


def chosen(folder: str, generation: int | None, damaged: Mapping[int, str] = {}) -> int:
    """The number of a generation that is there: this one, or the last that is not `damaged`.

    Raises FileNotFoundError if it is not there, ValueError if all are damaged.
    """
    there = generations_of(folder)
    if generation in there:
        return generation
    if not there or generation is not None:
        text = "there is no generation of a checkpoint in this folder"
        text = f"there is no generation {generation}, but {there}" if there else text
        raise FileNotFoundError(errno.ENOENT, text, folder)
    if whole := [each for each in there if each not in damaged]:
        return whole[-1]
    texts = "; ".join(dict.fromkeys(damaged.values()))
    raise ValueError(f"load: {folder!r} has no whole generation, but {there}: {texts}")


@dataclass
class Generation:
    """One in the making."""

    number: int  # certain once it is there
    folder: str  # where its files are written

    @property
    def meeting(self) -> str:
        """A folder beside it for ranks that write it together; what is left is removed as well."""
        return f"{self.folder.removesuffix('partial')}ranks"

    def switch(self, folder: str) -> None:
        """Renames it to the first free number after all others."""
        # Other processes may have saved meanwhile. A number before theirs would be removed.
        self.number = max(generations_of(folder), default=0) + 1
        # What has the name may be no folder.
        while not rename_folder(self.folder, path_of(folder, self.number), errno.ENOTDIR):
            self.number = max([self.number, *generations_of(folder)]) + 1


@contextmanager
def new_generation(
    folder: str, keep: int, base_of: Callable[[int], int | None], base: int | None = None
) -> Iterator[Generation]:
    """Makes the next generation of a folder.

    Within the `with` block every file is written and synced. Then the folder switches, and all
    generations but the last `keep` are removed, and those that they go on from: `base` is that of
    the new one, and `base_of` says which an older one needs, or None. An error leaves what was
    there. What killed processes have left is removed first, unless another process saves to this
    folder now.

    Raises:
        OSError: Of the disk. If syncing the folder fails, the message says that the new generation
            is in place.
    """
    generations_of(folder)  # or it is no folder
    os.makedirs(folder, exist_ok=True)
    folder = os.path.realpath(folder)
    token, number = new_token(), max(generations_of(folder), default=0) + 1
    made = Generation(number, os.path.join(folder, f".generation-{number}.{token}.partial"))

    def switch(descriptor: int) -> None:
        bases = {each: base_of(each) for each in generations_of(folder)}
        made.switch(folder)
        sync_folder(folder, descriptor)
        bases[made.number] = base
        numbers = generations_of(folder)
        bases |= {each: base_of(each) for each in numbers if each not in bases}
        for number in _unneeded(numbers, keep, bases):
            hidden = os.path.join(folder, f".generation-{number}.{token}.old")
            with suppress(FileNotFoundError):  # another process has done so
                calls.rename(path_of(folder, number), hidden)  # at once no generation any more
                if os.path.islink(hidden):  # to another disk
                    calls.unlink(hidden)
                else:
                    shutil.rmtree(hidden)

    with new_folder(folder, made.folder, _HIDDEN, switch):
        yield made


def _unneeded(numbers: list[int], keep: int, bases: Mapping[int, int | None]) -> list[int]:
    """Generations to remove, the last one first: a delta is removed before its base."""
    needed: set[int] = set()
    for each in numbers[-keep:]:
        at: int | None = each
        while at is not None and at not in needed:
            needed.add(at)
            at = bases.get(at)
    return [each for each in reversed(numbers) if each not in needed]

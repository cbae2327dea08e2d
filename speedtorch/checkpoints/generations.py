"""Generations: numbered checkpoint folders, each complete on the disk or absent.

A checkpoint is written under a hidden name, synced, and then renamed. The rename is atomic, also at
a power loss. By default a reader opens the checkpoint with the highest number. A save may remove
this checkpoint meanwhile. Files that the reader has opened remain readable. If another file is
missing by then, the reader lists the checkpoints again.

An incremental checkpoint (delta) has, of each table that tracks changes, only the rows that have
changed since an earlier checkpoint, its base. A delta has all other tensors as a whole.
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
    "Generation",
    "check_number",
    "existing_number",
    "generations_of",
    "new_generation",
    "path_of",
]

_NAME = re.compile(r"generation-([0-9]{8,})")
_HIDDEN = re.compile(rf"\.generation-\d+\.{TOKEN}\.(partial|old|ranks)")


def path_of(folder: str, number: int) -> str:
    """The path of a checkpoint's folder."""
    return os.path.join(folder, f"generation-{number:08d}")


def generations_of(folder: str) -> list[int]:
    """The numbers of a folder's checkpoints, ascending; empty if the folder is missing.

    Ignores files, broken links, folders with other names, and folders in which `manifest.json` is a
    folder. Raises NotADirectoryError if `folder` is a file, and ValueError if it is a checkpoint.
    """
    if os.path.exists(folder) and not os.path.isdir(folder):
        text = "is a file; pass the folder of the checkpoints"
        raise NotADirectoryError(errno.ENOTDIR, text, folder)
    name = os.path.basename(os.path.realpath(folder))
    if _NAME.fullmatch(name) and os.path.isfile(os.path.join(folder, "manifest.json")):
        # A checkpoint within a checkpoint would be removed with it.
        raise ValueError(
            f"{folder}: expected the folder of the checkpoints, got the checkpoint {name}. Pass"
            f" the folder that contains {name}. To load it, pass its number as generation=."
        )
    before: set[str] | None = None
    with suppress(FileNotFoundError):
        while (names := {n for n in os.listdir(folder) if _NAME.fullmatch(n)}) != before:
            found = sorted(
                number
                for number in {int(name.partition("-")[2]) for name in names}
                if os.path.basename(path := path_of(folder, number)) in names
                and os.path.isdir(path)
                and not os.path.isdir(os.path.join(path, "manifest.json"))
            )
            if found:
                return found
            before = names  # meanwhile a save may have replaced the last checkpoint: list again
    return []


def check_number(what: str, given: object) -> None:
    """Raises TypeError unless `given` is an int or None."""
    if isinstance(given, bool) or not isinstance(given, int | None):
        raise TypeError(f"{what}: expected a number such as Saved.generation, got {given!r}")


def existing_number(folder: str, generation: int | None, damaged: Mapping[int, str] = {}) -> int:
    """The number of an existing checkpoint: `generation`, or the last that is not `damaged`.

    Raises FileNotFoundError if it does not exist, ValueError if all are damaged.
    """
    existing = generations_of(folder)
    if generation in existing:
        return generation
    if not existing or generation is not None:
        text = "there is no checkpoint in this folder"
        text = f"there is no generation {generation}, only {existing}" if existing else text
        raise FileNotFoundError(errno.ENOENT, text, folder)
    if whole := [number for number in existing if number not in damaged]:
        return whole[-1]
    texts = "; ".join(dict.fromkeys(damaged.values()))
    raise ValueError(f"load: all generations {existing} of {folder!r} are damaged: {texts}")


@dataclass
class Generation:
    """A checkpoint that is being written."""

    number: int  # may increase in switch()
    folder: str  # where its files are written

    @property
    def rendezvous_folder(self) -> str:
        """A sibling folder for the ranks' Rendezvous; a later save removes abandoned ones."""
        return f"{self.folder.removesuffix('partial')}ranks"

    def switch(self, folder: str) -> None:
        """Renames the hidden folder to its final name, with a number above all checkpoints."""
        # Other processes may have saved meanwhile. A lower number would be removed as too old.
        self.number = max(generations_of(folder), default=0) + 1
        # A file, or a checkpoint that another process has just saved, may have the name.
        while not rename_folder(self.folder, path_of(folder, self.number), errno.ENOTDIR):
            self.number = max([self.number, *generations_of(folder)]) + 1


@contextmanager
def new_generation(
    folder: str, keep: int, base_of: Callable[[int], int | None], base: int | None = None
) -> Iterator[Generation]:
    """Makes the next checkpoint of a folder.

    The caller must write and sync every file within the `with` block. Then the folder is renamed,
    and all checkpoints are removed except for the last `keep` and their bases. `base` is the base
    of the new checkpoint, and `base_of` returns the base of an older one, or None. After an error
    before the rename all previous checkpoints remain. Leftovers of killed processes are removed
    first, unless another process saves to this folder now.

    Raises:
        OSError: The disk raises an error. If the fsync of `folder` after the rename fails, the
            message says that the new file is in place.
    """
    generations_of(folder)  # raises if `folder` is a file
    os.makedirs(folder, exist_ok=True)
    folder = os.path.realpath(folder)
    token, number = new_token(), max(generations_of(folder), default=0) + 1
    made = Generation(number, os.path.join(folder, f".generation-{number}.{token}.partial"))

    def publish(descriptor: int) -> None:
        """Renames the new folder and removes the checkpoints that are no longer needed."""
        bases = {number: base_of(number) for number in generations_of(folder)}
        made.switch(folder)
        sync_folder(folder, descriptor)
        bases[made.number] = base
        numbers = generations_of(folder)
        bases |= {number: base_of(number) for number in numbers if number not in bases}
        for number in _unneeded(numbers, keep, bases):
            hidden = os.path.join(folder, f".generation-{number}.{token}.old")
            with suppress(FileNotFoundError):  # another process has removed it
                calls.rename(path_of(folder, number), hidden)  # hides it atomically
                if os.path.islink(hidden):  # a link to another disk
                    calls.unlink(hidden)
                else:
                    shutil.rmtree(hidden)

    with new_folder(folder, made.folder, _HIDDEN, publish):
        yield made


def _unneeded(numbers: list[int], keep: int, bases: Mapping[int, int | None]) -> list[int]:
    """The checkpoints to remove, the latest first, so that a delta is removed before its base."""
    needed: set[int] = set()
    for kept in numbers[-keep:]:
        at: int | None = kept
        while at is not None and at not in needed:
            needed.add(at)
            at = bases.get(at)
    return [number for number in reversed(numbers) if number not in needed]

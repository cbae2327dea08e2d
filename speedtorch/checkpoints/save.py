"""save, async_save: all of a training run in one generation of a folder, or none of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch

from speedtorch.checkpoints import background_saves
from speedtorch.checkpoints.deltas import change_since
from speedtorch.checkpoints.generation_writer import GenerationWriter
from speedtorch.checkpoints.generations import check_number, path_of
from speedtorch.checkpoints.saved_tensors import SavedTensors
from speedtorch.memory.byte_count import bytes_of, text_of
from speedtorch.parallel.machine import this_machine
from speedtorch.parallel.ranks import Ranks
from speedtorch.parallel.together import Alone, Together
from speedtorch.table.shared_rows import SharedRows
from speedtorch.table.whole_fields import given_in_place
from speedtorch.torch_internals import as_plain

__all__ = ["Saved", "async_save", "save"]


@dataclass(frozen=True)
class Saved:
    """What save() has written."""

    path: str
    """The folder of the generation."""
    generation: int
    nbytes: int
    """Of all files."""
    seconds: float
    base: int | None = None
    """The generation whose unchanged rows it goes on with."""
    waited: float | None = None
    """Seconds until async_save() returned; None for save()."""

    def __str__(self) -> str:
        return (
            f"generation {self.generation}: {text_of(self.nbytes)} in {self.seconds:.2f} s,"
            f" {self.path}"
        )


def save(
    path: str | os.PathLike[str],
    *,
    keep: int = 2,
    base: int | None = None,
    progress: bool | None = None,
    **parts: Any,
) -> Saved:
    """Saves all of a training run: tables, state, layers, schedulers, your own numbers.

    `path` is a folder, in which each call makes a new generation: `generation-00000007` has
    safetensors files and a manifest. It is there once every byte is on the disk, in one step: a
    process that is killed, or a power loss, leaves the generations of before. Tables are written
    block by block from where they are: no copy of them is made.

    Where ranks share rows out, every process of torch.distributed's default group calls it, with a
    folder that all of them reach. Each writes its rows; all other values are the first one's. The
    folder switches once all rows are on the disk: a rank that fails, or is killed, leaves the
    generations of before, and the other ranks raise.

    Args:
        path: A folder, which is made if it is not there.
        keep: How many generations stay; older ones are removed once the new one is there, but for
            those that these need as their base.
        base: The number of a generation of this folder: of tables only rows are written that have
            changed since then. A table that had noted no changes, on one of the ranks that share it
            out, is written as a whole, and notes them from now on (HostTable.track_changes) unless
            a CUDA graph uses it. After 256 in a row all rows are written, and Saved.base is None.
            No other process saves to the folder meanwhile.
        progress: Shows a bar on stderr: always (True), never (False), or when it takes longer than
            a moment and stderr is a terminal (None). There is none where ranks share rows out.
        **parts: By names of your own, such as `model=`, `optimizer=`, `scheduler=`, `step=`: what
            has a state_dict(), a list of such, or a value: None, numbers, strings, bytes, tensors,
            NumPy's numbers and arrays, and dicts, lists and tuples of them.

    Returns:
        Where it is, and how many bytes were written in what time.

    Raises:
        TypeError: There is nothing to save, a part is called nearly as an option, or a file without
            code cannot hold a value; it is named.
        ValueError: `keep` is less than 1, a tensor is of a kind that safetensors files do not have,
            the base is damaged, or ranks save different tables or in different ways.
        FileNotFoundError: The base is not there.
        OSError: Of the disk, such as too little room; the generations of before are as they were.
        RuntimeError: Another rank has raised an error, which is told, or has ended.

    Example:
        >>> import tempfile, torch, speedtorch
        >>> emb = speedtorch.Embedding(1000, 8)
        >>> optimizer = torch.optim.Adam(emb.parameters())
        >>> speedtorch.attach(optimizer, emb)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for step in (10, 20):
        ...         saved = speedtorch.save(folder, model=emb, optimizer=optimizer, step=step)
        ...     others = speedtorch.load(folder, model=emb, optimizer=optimizer)
        >>> saved.generation, others
        (2, {'step': 20})
    """
    finish, _ = _begun(os.fsdecode(path), keep, base, parts, progress=progress)
    return finish()


def async_save(
    path: str | os.PathLike[str],
    *,
    keep: int = 2,
    base: int | None = None,
    max_memory: int | str | None = None,
    **parts: Any,
) -> Future[Saved]:
    """Copies what save() would write, and writes it in a thread while training goes on.

    The next save or load of the folder, and the end of the process, wait until it is written. Ranks
    make no collectives meanwhile: they tell each other by files of the folder how far they are.

    Args:
        path: As of save().
        keep: As of save().
        base: As of save().
        max_memory: Most bytes of the copies of this process, as a number or "64GiB"; by default
            half of the host memory that is available, in equal parts for the ranks of a machine.
            Files of tensors for which there is none left are written before the call returns.
        **parts: As of save().

    Returns:
        A concurrent.futures.Future, whose result() is what save() returns, or raises what went
        wrong; a warning tells it at once.

    Raises:
        MemoryError: There is too little for the copies; nothing was saved.
        RuntimeError: No thread can be started; nothing was saved.

    What save() raises before it writes is raised by the call as well.

    Example:
        >>> import tempfile, torch, speedtorch
        >>> layer = torch.nn.Linear(2, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saving = speedtorch.async_save(folder, layer=layer, step=10)
        ...     print(saving.result().generation)
        1
    """
    max_bytes = None if max_memory is None else bytes_of("max_memory", max_memory)
    folder = os.path.abspath(os.fsdecode(path))  # the program may change its folder meanwhile
    begun = _begun(folder, keep, base, parts, progress=False, beside=True, max_bytes=max_bytes)
    return background_saves.begin(folder, *begun)


_OPTIONS = {
    **dict.fromkeys(("path", "keep", "base"), "save and async_save"),
    "progress": "save",
    "max_memory": "async_save",
    **dict.fromkeys(("generation", "since", "verify"), "load"),
}


def _check_names(parts: Mapping[str, Any]) -> None:
    """Raises TypeError for a part that may be meant as an option."""
    if not parts:
        raise TypeError("save: expected something to save, such as model=, optimizer= or step=")
    # Not those of load: `generator` is a good name of a part.
    of_save = [each for each, call in _OPTIONS.items() if call != "load"]
    plain = {each.replace("_", ""): each for each in (*of_save, "background")}
    for name in parts:
        found = get_close_matches(name.replace("_", "").lower(), plain, n=1, cutoff=0.8)
        option = name if name in _OPTIONS else plain[found[0]] if found else None
        if option is None:
            continue
        if option == "background":
            remedy = "speedtorch.async_save(path, ...) saves in the background"
        elif option == name:
            remedy = f"{option}= is an option of {_OPTIONS[option]}: give the part another name"
        else:
            remedy = f"write {option}= for the option, or give the part another name"
        raise TypeError(f"save: {name!r} is no name of a part: {remedy}; nothing was saved")


def _begun(
    folder: str,
    keep: int,
    base: int | None,
    parts: Mapping[str, Any],
    *,
    progress: bool | None,
    beside: bool = False,
    max_bytes: int | None = None,
) -> tuple[Callable[[], Saved], ExitStack]:
    """Begins a save; gives what writes the rest and switches, and what undoes it until then.

    A save `beside` training needs the parts no more: all is written or copied.
    """
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ValueError(f"keep: expected 1 generation or more, got {keep!r}")
    _check_names(parts)
    begin = time.perf_counter()
    check_number("base", base)
    background_saves.wait_for(folder)
    with as_plain(), torch.no_grad(), given_in_place(), ExitStack() as stack:
        tensors = SavedTensors()
        values = {name: tensors.described(name, each) for name, each in parts.items()}
        ranks: Together = Ranks.of() if tensors.shared else Alone()
        _check_same(ranks, tensors.shared, {"base": base, "async": beside})
        if ranks.rank:
            tensors.by_key.clear()  # they are the first one's
        progress = False if tensors.shared else progress
        change = change_since(ranks, folder, base, tensors)
        writing = GenerationWriter(ranks, folder, change, values, stack)
        later = 0
        if beside:
            here = this_machine()
            later = background_saves.fitting(writing.jobs, max_bytes, ranks.every(here).count(here))
        writing.make(keep)
        writing.begin(tensors, later, progress)
        if beside and isinstance(ranks, Ranks):
            writing.go_beside(ranks.patience)
        rest = stack.pop_all()
    waited = time.perf_counter() - begin if beside else None

    def finish() -> Saved:
        with rest:
            number, nbytes = writing.finish()
        seconds = time.perf_counter() - begin
        return Saved(path_of(folder, number), number, nbytes, seconds, change.base, waited)

    return finish, rest


def _check_same(ranks: Together, shared: Mapping[str, SharedRows], how: Mapping[str, Any]) -> None:
    """Raises ValueError on all ranks unless all save the same tables in the same way."""
    mine = [(key, tuple(each.shape), str(each.dtype)) for key, each in shared.items()], how
    for rank, theirs in enumerate(ranks.every(mine)):
        if theirs != mine:
            (tables, way), (own, _) = theirs, mine
            raise ValueError(
                f"save: rank {rank} saves the rows of {[key for key, *_ in tables]} with {way}, and"
                f" rank {ranks.rank} those of {[key for key, *_ in own]} with {how}, or of other"
                " shapes"
            )

"""save, async_save: write a training run atomically as a new checkpoint of a folder."""

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
import torch.distributed as dist

from speedtorch.checkpoints import background_saves
from speedtorch.checkpoints.deltas import change_since
from speedtorch.checkpoints.generation_writer import GenerationWriter
from speedtorch.checkpoints.generations import check_number, path_of
from speedtorch.checkpoints.load_checks import ranks_sharing
from speedtorch.checkpoints.saved_tensors import SavedTensors
from speedtorch.memory.byte_count import bytes_of, text_of
from speedtorch.parallel.collectives import Collectives, SingleProcess, run_on_all
from speedtorch.parallel.machine import this_machine
from speedtorch.parallel.ranks import Ranks
from speedtorch.table.row_shard import RowShard
from speedtorch.table.whole_fields import state_dict_views
from speedtorch.torch_internals import as_plain

__all__ = ["Saved", "async_save", "save"]


@dataclass(frozen=True)
class Saved:
    """The result of save()."""

    path: str
    """The folder of the new checkpoint."""
    generation: int
    nbytes: int
    """Bytes of the tensors' files and of the manifest."""
    seconds: float
    base: int | None = None
    """The checkpoint with unchanged rows, which a load also reads; None for a full checkpoint."""
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
    """Saves a training run: tables, optimizer state, layers, schedulers and your own values.

    Each call makes a new checkpoint (generation) in the folder `path`. For example
    `generation-00000007` has safetensors files and a manifest. The checkpoint appears in one step,
    once every byte is on the disk. A killed process or a power loss leaves the previous checkpoints
    intact. Tables are written block by block from host memory, without a copy of the table.

    If rows are sharded, all ranks that share them must call save() together, with one folder that
    all of them reach. Each rank writes its own rows. The first of these ranks writes all other
    values. The checkpoint appears once all rows are on the disk. If a rank fails or is killed, the
    previous checkpoints remain and the other ranks raise.

    Args:
        path: A folder, which is created if missing.
        keep: The number of checkpoints to keep. Older ones are removed once the new one is written,
            except for bases that the kept ones need.
        base: The number of a checkpoint of this folder. Of each table only the rows changed since
            then are written; all other values are written again. A table that did not track changes
            when the base was saved or loaded (for sharded rows: on one of the ranks) is written as
            a whole. Such a table tracks changes from then on, unless a CUDA graph uses it, or it is
            read-only or in shared memory (HostTable.track_changes). After 256 such saves in a row
            the next one is a full checkpoint: all rows are written, and Saved.base is None. No
            other process may save to the folder at the same time.
        progress: Shows a bar on stderr: always (True), never (False), or if the save takes longer
            than 2 s and stderr is a terminal (None). There is no bar for sharded rows.
        **parts: The parts by names of your own, such as `model=`, `optimizer=`, `scheduler=`,
            `step=`. A part is an object with a state_dict(), a list of such objects, or a value:
            None, numbers, strings, bytes, tensors, NumPy numbers and arrays, and dicts, lists and
            tuples of these.

    Returns:
        The path, number, bytes and duration of the new checkpoint.

    Raises:
        TypeError: There is nothing to save, a part's name resembles an option, `base` is no int, or
            a value has an unsupported type. The error names the value.
        ValueError: `path` is a checkpoint, `keep` is not an int of 1 or more, safetensors files do
            not support a kind of tensor, the base is damaged, or ranks pass different tables, or a
            different `path` or `base`.
        NotImplementedError: The parts are sharded among different ranks.
        FileNotFoundError: The base is missing.
        OSError: The disk has too little space or an error. All previous checkpoints remain, unless
            the error was in the removal of older ones, after the new one was in place.
        RuntimeError: Another rank has ended, or has raised an error, which the text includes, or
            the base was removed during the save, or rows are sharded and the process group was
            destroyed.

    Example:
        >>> import tempfile, torch, speedtorch
        >>> emb = speedtorch.Embedding(1000, 8)
        >>> optimizer = torch.optim.Adam(emb.parameters())
        >>> speedtorch.attach(optimizer, emb)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for step in (10, 20):
        ...         saved = speedtorch.save(folder, model=emb, optimizer=optimizer, step=step)
        ...     values = speedtorch.load(folder, model=emb, optimizer=optimizer)
        >>> saved.generation, values
        (2, {'step': 20})
    """
    finish, _ = _begin(os.fsdecode(path), keep, base, parts, progress=progress)
    return finish()


def async_save(
    path: str | os.PathLike[str],
    *,
    keep: int = 2,
    base: int | None = None,
    max_memory: int | str | None = None,
    **parts: Any,
) -> Future[Saved]:
    """Copies the data of save() to host memory, and writes it in a thread while training continues.

    The next save or load of the folder in this process, and the end of the process, wait until the
    checkpoint is written. Meanwhile ranks coordinate by files in the folder, without collectives.

    Args:
        path: See save().
        keep: See save().
        base: See save().
        max_memory: The maximum number of bytes for this process's copies, as a number or "64GiB".
            The default is half of the available host memory, in equal parts for the ranks of a
            machine. Files whose tensors do not fit are written before the call returns.
        **parts: See save().

    Returns:
        A concurrent.futures.Future. Its result() returns the same as save(), or raises the error of
        the save. After an error the thread also issues a RuntimeWarning at once.

    Raises:
        MemoryError: The copies need more than the available memory; nothing was saved.
        RuntimeError: No thread can be started; nothing was saved.

    The call also raises all errors that save() raises before it writes.

    Example:
        >>> import tempfile, torch, speedtorch
        >>> layer = torch.nn.Linear(2, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saving = speedtorch.async_save(folder, layer=layer, step=10)
        ...     print(saving.result().generation)
        1
    """
    max_bytes = None if max_memory is None else bytes_of("max_memory", max_memory)
    folder = os.path.abspath(os.fsdecode(path))  # the program may change its working directory
    begun = _begin(
        folder, keep, base, parts, progress=False, in_background=True, max_bytes=max_bytes
    )
    return background_saves.begin(folder, *begun)


_OPTIONS = {
    **dict.fromkeys(("path", "keep", "base"), "save and async_save"),
    "progress": "save",
    "max_memory": "async_save",
    **dict.fromkeys(("generation", "since", "verify"), "load"),
}


def _check_names(parts: Mapping[str, Any]) -> None:
    """Raises TypeError if a part's name resembles an option."""
    if not parts:
        raise TypeError("save: expected parts to save, such as model=, optimizer= or step=")
    # Without the options of load: `generator` is a good name for a part.
    of_save = [name for name, call in _OPTIONS.items() if call != "load"]
    plain = {name.replace("_", ""): name for name in (*of_save, "background")}
    for name in parts:
        found = get_close_matches(name.replace("_", "").lower(), plain, n=1, cutoff=0.8)
        option = name if name in _OPTIONS else plain[found[0]] if found else None
        if option is None:
            continue
        if option == "background":
            remedy = "Use speedtorch.async_save(path, ...) to save in the background."
        elif option == name:
            remedy = (
                f"{option}= is an option of {_OPTIONS[option]}. Choose another name for the part."
            )
        else:
            remedy = f"Write {option}= for the option, or choose another name for the part."
        raise TypeError(f"save: a part cannot have the name {name!r}. {remedy} Nothing was saved.")


def _begin(
    folder: str,
    keep: int,
    base: int | None,
    parts: Mapping[str, Any],
    *,
    progress: bool | None,
    in_background: bool = False,
    max_bytes: int | None = None,
) -> tuple[Callable[[], Saved], ExitStack]:
    """Begins a save; returns a function that finishes it, and a stack that undoes it until then.

    With `in_background`, all parts have been written or copied when this returns.
    """
    begin = time.perf_counter()
    background_saves.wait_for(folder)
    ranks: Collectives = ranks_sharing(parts.values()) or SingleProcess()
    with as_plain(), torch.no_grad(), state_dict_views(), ExitStack() as stack:
        tensors = SavedTensors()
        values: dict[str, Any] = {}

        def describe() -> None:
            """Checks the options, and describes all parts."""
            if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
                raise ValueError(f"keep: expected an int of 1 or more, got {keep!r}")
            _check_names(parts)
            check_number("base", base)
            for name, part in parts.items():
                values[name] = tensors.described(name, part)

        run_on_all(ranks, describe)
        if tensors.shared and isinstance(ranks, SingleProcess):  # in a part that is a state dict
            if not dist.is_initialized():
                raise RuntimeError(
                    "save: rows are sharded among ranks, but torch.distributed is not initialised."
                    " Save before torch.distributed.destroy_process_group()."
                )
            ranks = Ranks.of()
        how = {"path": os.path.realpath(folder), "base": base, "async": in_background}
        _check_same(ranks, tensors.shared, how)
        if ranks.rank:
            tensors.by_key.clear()  # the first rank writes them
        progress = False if tensors.shared else progress
        to_write = change_since(ranks, folder, base, tensors)
        writing = GenerationWriter(ranks, folder, to_write, values, stack)
        later = 0
        if in_background:
            hosts = ranks.all_gather(this_machine())
            later = background_saves.fitting(writing.jobs, max_bytes, hosts.count(this_machine()))
        writing.make(keep)
        writing.begin(tensors, later, progress)
        if in_background and isinstance(ranks, Ranks):
            writing.continue_in_background(ranks.timeout)
        rest = stack.pop_all()
    waited = time.perf_counter() - begin if in_background else None

    def finish() -> Saved:
        """Publishes the checkpoint; after an error, the stack removes it."""
        with rest:
            number, nbytes = writing.finish()
        seconds = time.perf_counter() - begin
        return Saved(path_of(folder, number), number, nbytes, seconds, to_write.base_number, waited)

    return finish, rest


def _check_same(ranks: Collectives, shared: Mapping[str, RowShard], how: Mapping[str, Any]) -> None:
    """Raises ValueError on all ranks unless all save the same tables with the same options.

    Also if several ranks have the same rows, because groups of ranks have tables of their own.
    """
    mine = [(key, tuple(rows.shape), str(rows.dtype)) for key, rows in shared.items()], how
    own_rows = [sum(len(whole) for whole, _ in rows.blocks) for rows in shared.values()]
    found, row_counts = zip(*ranks.all_gather((mine, own_rows)), strict=True)
    for rank, theirs in enumerate(found):
        if theirs != mine:
            (tables, way), (own, _) = theirs, mine
            raise ValueError(
                f"save: all ranks must save the same tables with the same options. Rank {rank}"
                f" saves {tables} with {way}, and rank {ranks.rank} saves {own} with {how}."
            )
    for (key, rows), counts in zip(shared.items(), zip(*row_counts, strict=True), strict=True):
        if sum(counts) != len(rows):
            raise ValueError(
                f"save: the ranks must have each of the {len(rows):,} rows of {key!r} once, but"
                f" have {list(counts)} rows. If groups of ranks shard tables of their own, pass"
                " the module and the optimizer, not their state_dict()."
            )

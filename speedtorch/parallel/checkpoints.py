"""save, async_save, load: all of a training run in one generation of a folder, or none of it."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import time
import warnings
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from speedtorch.files import safetensors_format
from speedtorch.files.field_blocks import SomeRows
from speedtorch.files.generations import Generation, generations_of, new_generation, path_of
from speedtorch.files.new_files import replace_files
from speedtorch.files.saved_values import described
from speedtorch.files.table_files import write_safetensors
from speedtorch.memory.byte_count import bytes_of, text_of
from speedtorch.parallel import background_saves, deltas
from speedtorch.parallel.background_saves import copies, fitting, wait_for
from speedtorch.parallel.deltas import remember
from speedtorch.parallel.load_checks import check_loads, shares_rows
from speedtorch.parallel.load_ranks import LoadRanks
from speedtorch.parallel.machine import this_machine
from speedtorch.parallel.meeting import Meeting
from speedtorch.parallel.ranks import Ranks
from speedtorch.parallel.saved_generation import (
    FORMAT,
    VERSION,
    VERSION_OF_DELTA,
    DamagedError,
    SavedGeneration,
    base_of,
)
from speedtorch.parallel.sharded_saves import (
    Alone,
    JoinedFile,
    JoinedRows,
    Together,
    agreed,
    by_first,
    check_same,
)
from speedtorch.parallel.sharded_tensors import fill_shards, is_dtensor, rows_of_dtensor
from speedtorch.step.row_weight import RowWeight
from speedtorch.table.host_table import any_notes_changes
from speedtorch.table.progress import progress_bar
from speedtorch.table.read_only_rows import ReadOnlyRows
from speedtorch.table.shared_rows import SharedRows
from speedtorch.table.whole_fields import given_in_place
from speedtorch.torch_internals import as_plain

__all__ = ["Saved", "async_save", "load", "save"]

_Written = TypeVar("_Written", bound=Tensor | SomeRows | JoinedRows)
SHARD_BYTES, SHARD_TENSORS = 4 << 30, 4096
_TRIES = 100  # each but the last meets the end of another save
LONGEST_CHAIN = 256  # each file takes a descriptor when it is loaded


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
    _check_number("base", base)
    wait_for(folder)
    with as_plain(), torch.no_grad(), given_in_place(), ExitStack() as stack:
        tensors = _Tensors()
        values = {
            name: described(name, _state_of(each), tensors.keep) for name, each in parts.items()
        }
        ranks: Together = Ranks.of() if tensors.shared else Alone()
        check_same(ranks, tensors.shared, {"base": base, "async": beside})
        if ranks.rank:
            tensors.by_key.clear()  # they are the first one's
        progress = False if tensors.shared else progress
        writing = _Writing(ranks, folder, _change(ranks, folder, base, tensors), values, stack)
        later = 0
        if beside:
            here = this_machine()
            later = fitting(writing.jobs, max_bytes, ranks.every(here).count(here))
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
        return Saved(path_of(folder, number), number, nbytes, seconds, writing.change.base, waited)

    return finish, rest


class _Change(NamedTuple):
    """What is written, by keys: by one process, the first rank, and by all ranks together."""

    against: SavedGeneration | None  # the base
    own: dict[str, Tensor | SomeRows]
    shared: dict[str, JoinedRows]
    ids_of: dict[str, str]  # by the key of changed rows: that of their ids

    @property
    def base(self) -> int | None:
        return None if self.against is None else self.against.number


def _change(ranks: Together, folder: str, base: int | None, tensors: _Tensors) -> _Change:
    """Looks what has changed since a generation, as all ranks know it."""

    def whole() -> _Change:
        shared = {key: JoinedRows.of(each) for key, each in tensors.shared.items()}
        return _Change(None, {**tensors.by_key}, shared, {})

    if base is None:
        return whole()
    opened: list[SavedGeneration] = []
    changed: dict[str, deltas.Changed[Tensor | SomeRows]] = {}

    def look() -> tuple[dict[str, tuple[Hashable, int]], list[str]] | None:
        opened.append(SavedGeneration.opened(folder, _chosen(folder, base)))
        if len(opened[0].chain) > LONGEST_CHAIN:
            return None
        changed.update(deltas.changed_rows(opened[0], {**tensors.by_key, **tensors.shared}))
        counts = {key: (each.group, each.ids.shape[0]) for key, each in changed.items()}
        return counts, [key for key in tensors.by_key if key.startswith(deltas.IDS)]

    every = [each for each in agreed(ranks, look) if each is not None]
    if len(every) < ranks.size:
        return whole()
    of_ranks, (names, *_) = zip(*every, strict=True)
    together = dict(deltas.joined(tensors.shared, changed, of_ranks, ranks.rank))
    rest = {k: JoinedRows.of(each) for k, each in tensors.shared.items() if k not in together}
    shared, ids_of = deltas.delta(rest, together, taken={*tensors.shared, *names})
    alone = {key: each for key, each in changed.items() if key in tensors.by_key}
    own, own_ids_of = deltas.delta(tensors.by_key, alone, taken=shared)
    return _Change(opened[0], own, shared, own_ids_of | ids_of)


@dataclass(eq=False)
class _Writing:
    """A generation that is written, by one process or by ranks together.

    Each method is called by all ranks, in the order in which they stand here. An error of one rank
    raises on all of them, and the generations of before stay. Its caller closes `stack` once it is
    written, or has failed.
    """

    _ranks: Together
    _folder: str
    change: _Change
    _values: Mapping[str, Any]
    _stack: ExitStack

    def __post_init__(self) -> None:
        self._switching = self._stack.enter_context(ExitStack())
        self._files = [
            JoinedFile(f"rows-{at:05d}.safetensors", each)
            for at, each in enumerate(_shards(self.change.shared), 1)
        ]
        # This rank's rows in each file of all ranks, and its own files.
        self.jobs: list[Mapping[Any, Tensor | SomeRows]] = [each.own for each in self._files]
        self.jobs += _shards(self.change.own)
        self._entries: list[dict[str, Any]] = []
        self._copies: list[dict[Any, Tensor]] = []
        self._moments: deltas.Moments = []

    def make(self, keep: int) -> None:
        """Makes the folder, and the files of all ranks in it."""

        def make() -> Generation:
            needed = partial(base_of, self._folder)
            new = new_generation(self._folder, keep, needed, self.change.base)
            made = self._switching.enter_context(new)
            every = (*self.change.own.values(), *self.change.shared.values())
            nbytes, status = sum(each.nbytes for each in every), os.statvfs(self._folder)
            if status.f_blocks and nbytes > (free := status.f_bavail * status.f_frsize):
                text = f"{nbytes:,} bytes are to be saved, and {free:,} are free"
                raise OSError(errno.ENOSPC, text, self._folder)
            for each in self._files:
                each.make(made.folder)
            return made

        # The first rank's is the object whose number is certain once it has switched.
        self._generation = by_first(self._ranks, make)

    def begin(self, tensors: _Tensors, later: int, progress: bool | None) -> None:
        """Writes the jobs, but for the last ones, so many, of which it makes copies."""
        first = len(self.jobs) - later
        now = self.jobs[:first]
        total = sum(each.nbytes for job in now for each in job.values())

        def begin() -> None:
            self._moments = deltas.moments_of({**tensors.by_key, **tensors.shared})
            with progress_bar(total, progress, unit="B") as bar:
                self._write(now, 0, bar.update)
            self._copies = copies(self.jobs[first:])

        agreed(self._ranks, begin)

    def go_beside(self, patience: float) -> None:
        """Lets ranks agree beside the collectives of training from now on; see Meeting."""
        ranks = self._ranks
        meeting = Meeting(self._generation.meeting, ranks.rank, ranks.size, patience)

        def make() -> None:
            self._stack.callback(meeting.remove)
            meeting.make()

        def enter() -> None:
            self._stack.enter_context(meeting)

        by_first(ranks, make)
        agreed(ranks, enter)
        meeting.look_for_locks(ranks)
        self._ranks = meeting

    def finish(self) -> tuple[int, int]:
        """Writes the rest and switches; gives the number, and the bytes of all files."""
        ranks = self._ranks

        def write() -> None:
            try:
                self._write(self._copies, len(self.jobs) - len(self._copies), lambda _: None)
            finally:
                self._copies.clear()

        agreed(ranks, write)
        of_ranks = agreed(
            ranks, lambda: [e.own_digests(self._generation.folder, ranks) for e in self._files]
        )
        for at, each in enumerate(self._files):
            digests = [digest for of_rank in of_ranks for digest in of_rank[at]]
            self._entries.append({"name": each.name, "bytes": each.nbytes, "crc32": digests})
        number, nbytes, digest = by_first(ranks, self._switch)
        remember(digest, self._moments)
        return number, nbytes

    def _write(
        self,
        jobs: Sequence[Mapping[Any, Tensor | SomeRows]],
        first: int,
        told: Callable[[int], object],
    ) -> None:
        """Writes jobs, or copies of them, from the `first` on."""
        for at, job in enumerate(jobs, first - len(self._files)):
            if at < 0:
                self._files[at].write(self._generation.folder, job)
            else:
                name, digests = f"tensors-{at + 1:05d}.safetensors", list[int]()
                with replace_files([os.path.join(self._generation.folder, name)]) as (file,):
                    write_safetensors(file, job, digests, told)
                self._entries.append({"name": name, "bytes": file.count, "crc32": digests})

    def _switch(self) -> tuple[int, int, str]:
        """Puts the generation in its place; gives its number, all bytes, and its digest."""
        against = self.change.against
        with self._switching.pop_all():
            content = {"version": VERSION, "files": self._entries, "parts": self._values}
            if against is not None:
                base = {"generation": against.number, "sha256": against.digest}
                base["rows"] = self.change.ids_of
                content |= {"version": VERSION_OF_DELTA, "base": base}
            text = json.dumps({"format": FORMAT, **content}, separators=(",", ":")).encode()
            self._write_small("manifest.json", text)
            self._write_small("manifest.crc32", f"{zlib.crc32(text):08x}\n".encode())
            if against is not None and against.number not in generations_of(self._folder):
                raise RuntimeError(
                    f"save: generation {against.number}, the base, was removed meanwhile: save"
                    " without it"
                )
        nbytes = sum(int(each["bytes"]) for each in self._entries) + len(text)
        return self._generation.number, nbytes, hashlib.sha256(text).hexdigest()

    def _write_small(self, name: str, data: bytes) -> None:
        with replace_files([os.path.join(self._generation.folder, name)]) as (file,):
            file.reserve(len(data))
            file.write(data)


def load(
    path: str | os.PathLike[str],
    *,
    generation: int | None = None,
    since: int | None = None,
    verify: bool = True,
    progress: bool | None = None,
    **parts: Any,
) -> dict[str, Any]:
    """Loads what save() has written: into the objects that are given, and gives the rest.

    Every byte is compared with its digest, and every part with its object, before anything is
    loaded. Objects with load code of their own are the exception: what they raise is known once
    they load, which they do first. Rows go from the file to the table without a copy in between.

    Where ranks share rows out, all of them call it together: an error of one leaves the objects of
    all as they were.

    Args:
        path: The folder that save() was given.
        generation: Its number. By default the last one; if one of its files, or of its base's, is
            damaged or missing, the last whole one, with a RuntimeWarning that names both.
        since: The number of the generation that the parts have now. If this one was written against
            that (`save(base=)`), or is that, only the rows that have changed since are written to
            the tables, and other threads may look rows up meanwhile; else all is loaded.
        verify: Compare all bytes with their digests.
        progress: As of save().
        **parts: By the names of save(): what has a load_state_dict(), or a list of such. Optimizers
            of tables are attached before.

    Returns:
        All other parts by name; tensors are on the CPU.

    Raises:
        FileNotFoundError: There is no generation, or not this one.
        KeyError: A part was not saved.
        TypeError: A part has no load_state_dict().
        ValueError: A file of this generation, or of each one, is damaged, cut, missing, or none of
            ours, or an optimizer does not take its part; nothing has been loaded.
        RuntimeError: A module does not take its part, or another rank has raised an error; nothing
            has been loaded.

    Example:
        >>> import tempfile, torch, speedtorch
        >>> layer = torch.nn.Linear(2, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = speedtorch.save(folder, layer=layer, epoch=3)
        ...     speedtorch.load(folder, layer=layer)
        {'epoch': 3}
    """
    folder = os.fsdecode(path)
    wait_for(folder)
    is_shared = (
        dist.is_available()
        and dist.is_initialized()
        and any(shares_rows(each) for part in parts.values() for each in _objects(part))
    )
    ranks: Together = LoadRanks(Ranks.of()) if is_shared else Alone()
    ready: list[Callable[[], dict[str, Any]]] = []
    damaged: dict[int, str] = {}

    def prepare() -> tuple[str | None, list[tuple[int, str]]]:
        """Gives the digest of the generation, None if it was removed meanwhile; and `damaged`."""
        _check_number("generation", generation)
        _check_number("since", since)
        for name, part in parts.items():
            if wrong := [each for each in _objects(part) if not hasattr(each, "load_state_dict")]:
                raise TypeError(
                    f"{name}: expected what has a load_state_dict(), got {type(wrong[0]).__name__};"
                    " values are in what load() returns"
                )
        while True:
            number = _chosen(folder, generation, damaged)
            try:
                opened = SavedGeneration.opened(folder, number)
                if bad := [each.number for each in opened.chain if each.number in damaged]:
                    damaged[number] = damaged[bad[0]]
                    continue
                made = _prepared(opened, parts, since=since, verify=verify, progress=progress)
            except DamagedError as error:
                if number not in generations_of(folder):
                    return None, [*damaged.items()]
                if generation is not None:
                    raise
                damaged[number] = damaged[error.generation] = error.text
            except Exception:
                _warn_of(damaged, number)  # of before, whose parts may be others
                raise
            else:
                _warn_of(damaged, number)
                ready.append(made)
                return opened.digest, [*damaged.items()]

    for _ in range(_TRIES):
        ready.clear()
        digests, found = zip(*agreed(ranks, prepare, "load"), strict=True)
        for each in found:
            damaged.update(each)
        if None not in digests and len(set(digests)) == 1:
            return ready[0]()
    raise RuntimeError(
        f"load: {folder!r} has had another last generation at each of {_TRIES} looks, or is not the"
        " same folder on all ranks: name a generation="
    )


def _prepared(
    opened: SavedGeneration,
    parts: Mapping[str, Any],
    *,
    since: int | None,
    verify: bool,
    progress: bool | None,
) -> Callable[[], dict[str, Any]]:
    """Reads and checks all that is loaded; what it returns fills parts, and gives the rest."""
    if verify:
        opened.verify(progress)
    saved = opened.manifest["parts"]
    if missing := [name for name in parts if name not in saved]:
        raise KeyError(f"{missing[0]!r} is none of the parts of {opened.path}: {list(saved)}")
    changes = ({} if since is None else opened.changed_since(since)) or {}
    states: dict[str, Any] = {}
    patches: list[tuple[Tensor, list[tuple[Tensor, Tensor]]]] = []
    for name, part in parts.items():
        live = _fields_in_place(opened, name, part) if changes else {}
        kept = {key: each for key, each in live.items() if key in changes}
        patches += [(each, changes[key]) for key, each in kept.items()]
        states[name] = opened.value(name, kept, copies=_copies(part))
    others = {name: opened.value(name, {}, copies=True) for name in saved if name not in parts}
    pairs: list[tuple[str, Any, Any]] = []
    for name, part in parts.items():
        state = states[name]
        if not isinstance(part, list | tuple):
            pairs.append((name, part, state))
            continue
        if not isinstance(state, list) or len(part) != len(state):
            count = len(state) if isinstance(state, list) else "no list"
            raise ValueError(f"{name}: {count} were saved, {len(part)} are given")
        names = [f"{name}[{at}]" for at in range(len(part))]
        pairs += zip(names, part, state, strict=True)
    known = [check_loads(*each) for each in pairs]
    for each in pairs:
        fill_shards(*each)
    # What may still raise loads first, while the other objects are unchanged.
    order = sorted(range(len(pairs)), key=known.__getitem__)

    def fill() -> dict[str, Any]:
        for tensor, rows in patches:
            deltas.write_changes(tensor, rows)
        for part, state in [pairs[at][1:] for at in order]:
            part.load_state_dict(state)
            if isinstance(part, Optimizer):
                opened.let_go(part)
        if any_notes_changes():
            # Its load_state_dict() may have done otherwise, or rows were not those of `since`.
            same = {
                key: each
                for name, part in parts.items()
                for key, each in _fields_in_place(opened, name, part).items()
                if deltas.are_same(each, opened.tensor(key))
            }
            remember(opened.digest, deltas.moments_of(same))
        return others

    return fill


def _objects(part: Any) -> Sequence[Any]:
    return part if isinstance(part, list | tuple) else [part]


def _fields_in_place(opened: SavedGeneration, name: str, part: Any) -> dict[str, Tensor]:
    """The fields of tables that a part and a generation have, by their keys there."""
    if _copies(part):
        return {}
    tensors = _Tensors()
    with as_plain(), torch.no_grad(), given_in_place():
        described(name, _state_of(part), tensors.keep)
    return {
        key: each
        for key, each in {**tensors.by_key, **tensors.shared}.items()
        if deltas.place_of(each) and opened.has(key, each)
    }


def _copies(part: Any) -> bool:
    """Whether what loads a part may keep the tensors that it is given."""
    return not all(isinstance(each, nn.Module | Optimizer) for each in _objects(part))


def _check_number(what: str, given: object) -> None:
    if isinstance(given, bool) or not isinstance(given, int | None):
        raise TypeError(f"{what}: expected a number, as Saved.generation is, got {given!r}")


def _chosen(folder: str, generation: int | None, damaged: Mapping[int, str] = {}) -> int:
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


def _warn_of(damaged: Mapping[int, str], number: int) -> None:
    """Warns if a generation is loaded instead of later ones."""
    if later := {each: text for each, text in damaged.items() if each > number}:
        texts = "; ".join(dict.fromkeys(later.values()))
        warnings.warn(
            f"load: generation {number} is loaded instead of {sorted(later)}, damaged: {texts}",
            RuntimeWarning,
            stacklevel=5,
        )


def _state_of(part: Any) -> Any:
    """What is saved of a part."""
    if isinstance(part, list | tuple) and part and all(hasattr(e, "state_dict") for e in part):
        return [each.state_dict() for each in part]
    return part.state_dict() if hasattr(part, "state_dict") else part


class _Tensors:
    """The tensors that a checkpoint has, each once."""

    def __init__(self) -> None:
        self.by_key: dict[str, Tensor] = {}
        self.shared: dict[str, SharedRows] = {}  # of which other ranks have rows, too
        self._keys: dict[tuple[Any, ...], str] = {}

    def keep(self, name: str, tensor: Tensor) -> str:
        """Takes one; what is the same memory in the same way has the same key."""
        plain = name.replace("'][", ".").replace("['", ".").replace("']", "")
        plain = plain.replace("][", ".").replace("[", ".").replace("]", "")
        key = next(
            each
            for number in itertools.count()
            if (each := plain + f"#{number}" * (number > 0)) != safetensors_format.RESERVED
            and each not in self.by_key
            and each not in self.shared
        )
        if is_dtensor(tensor):
            tensor = rows_of_dtensor(name, tensor)
        if isinstance(tensor, SharedRows):
            self.shared[key] = tensor
            return key
        tensor = _dense(name, tensor)
        same = tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
        if tensor.numel() and same in self._keys:
            return self._keys[same]
        self.by_key[key] = tensor
        return self._keys.setdefault(same, key) if tensor.numel() else key


def _shards(tensors: Mapping[str, _Written]) -> Iterator[dict[str, _Written]]:
    """Those of one file each."""
    shard: dict[str, _Written] = {}
    nbytes = of_header = 0
    for key, each in tensors.items():
        of_entry = len(json.dumps([key, *each.shape])) + 100  # with its dtype and its offsets
        is_full = nbytes + each.nbytes > SHARD_BYTES or len(shard) == SHARD_TENSORS
        if shard and (is_full or of_header + of_entry > safetensors_format.LARGEST_HEADER):
            yield shard
            shard, nbytes, of_header = {}, 0, 0
        shard[key] = each
        nbytes, of_header = nbytes + each.nbytes, of_header + of_entry
    if shard:
        yield shard


def _dense(name: str, tensor: Tensor) -> Tensor:
    """A tensor whose rows can be written; raises for what has no plain elements."""
    if isinstance(tensor, RowWeight):
        raise TypeError(
            f"{name}: stands for all rows of {tensor._rows.name}: give the module, its"
            " state_dict(), or weight.detach().clone()"
        )
    if is_lazy(tensor) or tensor.is_nested:
        what = "nested" if tensor.is_nested else "yet to be initialized, as of a lazy module"
        raise ValueError(f"{name}: is {what}; expected a dense tensor with elements")
    tensor = tensor.rows if isinstance(tensor, ReadOnlyRows) else tensor.detach()
    if type(tensor) is not Tensor:
        kind = type(tensor)
        remedy = "save its plain values, or this object by torch.save(part.state_dict(), file)"
        raise TypeError(
            f"{name}: is a {kind.__module__}.{kind.__qualname__}; expected a plain tensor: {remedy}"
        )
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        what = "quantized" if tensor.is_quantized else "of layout " + str(tensor.layout)
        what = "on the device meta" if tensor.is_meta else what
        raise ValueError(f"{name}: is {what}; expected a dense tensor with elements")
    if tensor.dtype not in safetensors_format.DTYPES.values():
        raise ValueError(f"{name}: safetensors files cannot hold {tensor.dtype}")
    tensor = tensor.resolve_conj().resolve_neg()
    is_in_rows = tensor.dim() > 0 and tensor.numel() > 0 and tensor[0].is_contiguous()
    return tensor if is_in_rows else tensor.contiguous()

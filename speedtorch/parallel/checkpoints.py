"""save and load: all of a training run in one generation of a folder, whole or not there."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedtorch.files import safetensors_format
from speedtorch.files.field_blocks import SomeRows, have_same_bytes
from speedtorch.files.generations import Generation, generations_of, new_generation, path_of
from speedtorch.files.new_files import replace_files
from speedtorch.files.saved_values import described
from speedtorch.files.table_files import write_safetensors
from speedtorch.memory.byte_count import bytes_of, text_of
from speedtorch.parallel.background_saves import begin as begin_saving
from speedtorch.parallel.background_saves import copies, fitting, wait_for
from speedtorch.parallel.deltas import Delta, changed_rows, moments_of, remember
from speedtorch.parallel.ranks import Ranks
from speedtorch.parallel.saved_generation import (
    FORMAT,
    VERSION,
    VERSION_OF_DELTA,
    SavedGeneration,
    base_of,
)
from speedtorch.parallel.sharded_saves import (
    agreed,
    check_same,
    make_file,
    own_digests,
    write_own,
)
from speedtorch.table.host_table import FieldRows, any_notes_changes, field_rows
from speedtorch.table.progress import progress_bar
from speedtorch.table.read_only_rows import ReadOnlyRows
from speedtorch.table.shared_rows import SharedRows
from speedtorch.table.whole_fields import given_in_place
from speedtorch.torch_internals import as_plain

__all__ = ["Saved", "load", "save"]

_Written = Mapping[str, Tensor | SomeRows]
SHARD_BYTES, SHARD_TENSORS = 4 << 30, 4096
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
    """Seconds until the call returned, of one that went on in the background."""

    def __str__(self) -> str:
        return (
            f"generation {self.generation}: {text_of(self.nbytes)} in {self.seconds:.2f} s,"
            f" {self.path}"
        )


@overload
def save(
    path: str | os.PathLike[str],
    *,
    keep: int = 2,
    base: int | None = None,
    background: Literal[False] = False,
    max_memory: int | str | None = None,
    progress: bool | None = None,
    **parts: Any,
) -> Saved: ...


@overload
def save(
    path: str | os.PathLike[str],
    *,
    keep: int = 2,
    base: int | None = None,
    background: Literal[True],
    max_memory: int | str | None = None,
    progress: bool | None = None,
    **parts: Any,
) -> Future[Saved]: ...


def save(
    path: str | os.PathLike[str],
    *,
    keep: int = 2,
    base: int | None = None,
    background: bool = False,
    max_memory: int | str | None = None,
    progress: bool | None = None,
    **parts: Any,
) -> Saved | Future[Saved]:
    """Saves all of a training run: tables, state, layers, schedulers, your own numbers.

    `path` is a folder, in which each call makes a new generation: `generation-00000007` has
    safetensors files and a manifest. It is there once every byte is on the disk, in one step: a
    process that is killed, or a power loss, leaves the generations of before. Tables are written
    block by block from where they are: no copy of them is made.

    Where ranks share rows out, every process of torch.distributed's default group calls it, with a
    folder that all of them reach. Each writes its rows; all other values are the first one's.

    Args:
        path: A folder, which is made if it is not there.
        keep: How many generations stay; older ones are removed once the new one is there, but for
            those that these need as their base.
        base: The number of a generation of this folder: of tables only rows are written that have
            changed since then. A table that had noted no changes is written as a whole, and notes
            them from now on (HostTable.track_changes). After 256 in a row all rows are written,
            and Saved.base is None. No other process saves to the folder meanwhile.
        background: Copy what is saved, and write it while training goes on. The next save or load
            of the folder, and the end of the process, wait until it is written.
        max_memory: Most bytes of the copies, as a number or "64GiB"; by default half of the host
            memory that is available. Files of tensors for which there is none left are written
            before the call returns.
        progress: Shows a bar on stderr: always (True), never (False), or when it takes longer than
            a moment and stderr is a terminal (None). There is none where ranks share rows out, nor
            in the background.
        **parts: By names of your own, such as `model=`, `optimizer=`, `scheduler=`, `step=`: what
            has a state_dict(), a list of such, or a value: None, numbers, strings, bytes, tensors,
            and dicts, lists and tuples of them.

    Returns:
        Where it is, and how many bytes were written in what time. In the background a
        concurrent.futures.Future of that, whose result() raises what went wrong; a warning tells it
        at once.

    Raises:
        TypeError: There is nothing to save, or a value that a file without code cannot hold; it is
            named.
        ValueError: `keep` is less than 1, a tensor is of a kind that safetensors files do not have,
            or the base is damaged.
        NotImplementedError: Ranks share rows out, and it is to go on in the background or from a
            base.
        MemoryError: There is too little for the copies; nothing was saved.
        FileNotFoundError: The base is not there.
        OSError: Of the disk, such as too little room; the generations of before are as they were.
        RuntimeError: Another rank has raised an error, which is told.

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
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ValueError(f"keep: expected 1 generation or more, got {keep!r}")
    if not parts:
        raise TypeError("save: expected something to save, such as model=, optimizer= or step=")
    begin, folder = time.perf_counter(), os.fspath(path)
    if background:  # the program may change its folder meanwhile
        folder = os.path.abspath(folder)
    max_bytes = None if max_memory is None else bytes_of("max_memory", max_memory)
    if base is not None:
        _check_number("base", base)
    wait_for(folder)
    with as_plain(), torch.no_grad(), given_in_place():
        tensors = _Tensors()
        values = {
            name: described(name, _state_of(each), tensors.keep) for name, each in parts.items()
        }
        if tensors.shared:
            if base is not None or background:
                raise NotImplementedError(
                    f"save: {next(iter(tensors.shared))} is shared out among ranks, which write it"
                    " together, whole and at once: leave base= and background= out"
                )
            return _save_together(folder, keep, tensors, values, begin)
        whole = Delta(dict(tensors.by_key), {})
        with ExitStack() as stack:
            delta, against = whole, None
            if base is not None:
                against = SavedGeneration.opened(folder, _chosen(folder, base))
                delta = changed_rows(against, tensors.by_key)
                if len(against.chain) > LONGEST_CHAIN:
                    delta, against, base = whole, None, None
            moments = moments_of(tensors.by_key)
            shards = list(_shards(delta.tensors))
            later = fitting(shards, max_bytes) if background else 0
            now = shards[: len(shards) - later]
            needed = partial(base_of, folder)
            generation = stack.enter_context(new_generation(folder, keep, needed, base))
            _check_room(folder, sum(each.nbytes for each in delta.tensors.values()))
            total = sum(each.nbytes for shard in now for each in shard.values())
            with progress_bar(total, progress, unit="B") as bar:
                files = _write_shards(generation.folder, now, 1, bar.update)
            left = copies(shards[len(now) :])
            rest = stack.pop_all()
    waited = time.perf_counter() - begin

    def finish() -> Saved:
        with rest:
            try:
                last = _write_shards(generation.folder, left, len(now) + 1, lambda _: None)
            finally:
                left.clear()
            every = [*files, *last]
            written = _write_manifest(generation.folder, every, values, against, delta.ids_of)
            if against is not None and base not in generations_of(folder):
                raise RuntimeError(
                    f"save: generation {base}, the base, was removed meanwhile: save without it"
                )
        remember(written.digest, moments)
        saved = _saved(folder, generation, written.nbytes, begin, base)
        return replace(saved, waited=waited) if background else saved

    return begin_saving(folder, finish, rest) if background else finish()


def _save_together(
    folder: str, keep: int, tensors: _Tensors, values: Mapping[str, Any], begin: float
) -> Saved:
    """As save(), where ranks share rows out: each writes its own."""
    shared, is_first = tensors.shared, Ranks.of().rank == 0
    check_same(shared)
    with ExitStack() as stack:

        def make() -> tuple[Generation, list[tuple[str, int, int]]] | None:
            if not is_first:
                return None
            needed = partial(base_of, folder)
            generation = stack.enter_context(new_generation(folder, keep, needed))
            nbytes = sum(each.numel() * each.dtype.itemsize for each in shared.values())
            nbytes += sum(each.nbytes for each in tensors.by_key.values())
            _check_room(folder, nbytes)
            named = (f"rows-{at:05d}.safetensors" for at in range(1, len(shared) + 1))
            return generation, [
                (name, *make_file(os.path.join(generation.folder, name), *each))
                for name, each in zip(named, shared.items(), strict=True)
            ]

        found = agreed(make)[0]
        assert found is not None
        generation, made = found

        def write() -> None:
            for (name, header, _), rows in zip(made, shared.values(), strict=True):
                write_own(os.path.join(generation.folder, name), header, rows)

        def look() -> list[list[int]]:
            paths = [(os.path.join(generation.folder, name), count) for name, _, count in made]
            return [own_digests(path, count) for path, count in paths]

        agreed(write)
        of_ranks = agreed(look)
        files = [
            {"name": name, "bytes": count, "crc32": [e for part in of_ranks for e in part[at]]}
            for at, (name, _, count) in enumerate(made)
        ]

        def switch() -> Saved | None:
            if not is_first:
                return None
            with stack.pop_all():
                shards = _shards(tensors.by_key)
                own = _write_shards(generation.folder, shards, 1, lambda _: None)
                written = _write_manifest(generation.folder, [*files, *own], values)
            return _saved(folder, generation, written.nbytes, begin)

        done = agreed(switch)[0]
        assert done is not None
        return done


def _saved(
    folder: str, generation: Generation, nbytes: int, begin: float, base: int | None = None
) -> Saved:
    number, seconds = generation.number, time.perf_counter() - begin
    return Saved(path_of(folder, number), number, nbytes, seconds, base)


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

    Every byte is compared with its digest before anything is loaded. Rows go from the file to the
    table without a copy in between.

    Args:
        path: The folder that save() was given.
        generation: Its number; by default the last one.
        since: The number of the generation that the parts have now. If this one was written against
            that (`save(base=)`), only the rows that have changed since are written to the tables,
            and other threads may look rows up meanwhile; else all is loaded.
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
        ValueError: A file is damaged, cut, or none of ours; nothing has been loaded.
        RuntimeError: What load_state_dict() raises of a model or an optimizer that does not fit.

    Example:
        >>> import tempfile, torch, speedtorch
        >>> layer = torch.nn.Linear(2, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = speedtorch.save(folder, layer=layer, epoch=3)
        ...     speedtorch.load(folder, layer=layer)
        {'epoch': 3}
    """
    folder = os.fspath(path)
    for what, number in (("generation", generation), ("since", since)):
        if number is not None:
            _check_number(what, number)
    wait_for(folder)
    for name, each in parts.items():
        _check_loads(name, each)
    while True:
        number = _chosen(folder, generation)
        try:
            opened = SavedGeneration.opened(folder, number)
            return _loaded(opened, parts, since=since, verify=verify, progress=progress)
        except FileNotFoundError:
            # It was removed between two looks, as a new one has come.
            if generation is not None or number in generations_of(folder):
                raise


def _loaded(
    opened: SavedGeneration,
    parts: Mapping[str, Any],
    *,
    since: int | None,
    verify: bool,
    progress: bool | None,
) -> dict[str, Any]:
    """Fills parts, and gives the values of the rest."""
    saved = opened.manifest["parts"]
    if missing := [name for name in parts if name not in saved]:
        raise KeyError(f"{missing[0]!r} is none of the parts of {opened.path}: {list(saved)}")
    if verify:
        opened.verify(progress)
    changes = None if since is None else opened.changed_since(since)
    states: dict[str, Any] = {}
    patches: list[tuple[FieldRows, Tensor, Tensor]] = []
    for name, part in parts.items():
        live = _fields_in_place(opened, name, part) if changes else {}
        kept = {key: each for key, each in live.items() if key in (changes or {})}
        for key, each in kept.items():
            found = field_rows(each)
            assert found is not None
            patches += [(found, ids, rows) for ids, rows in (changes or {})[key]]
        states[name] = opened.value(name, kept, copies=_copies(part))
    others = {name: opened.value(name, {}, copies=True) for name in saved if name not in parts}
    pairs: list[tuple[Any, Any]] = []  # before any of them is loaded
    for name, part in parts.items():
        state = states[name]
        if not isinstance(part, list | tuple):
            pairs.append((part, state))
            continue
        if not isinstance(state, list) or len(part) != len(state):
            count = len(state) if isinstance(state, list) else "no list"
            raise ValueError(f"{name}: {count} were saved, {len(part)} are given")
        pairs += zip(part, state, strict=True)
    for (table, field, first), ids, rows in patches:
        table.scatter(ids + first, rows, field)
    for each, state in pairs:
        each.load_state_dict(state)
        if isinstance(each, Optimizer):
            opened.let_go(each)
    if any_notes_changes():
        fields: dict[str, Tensor] = {}
        for name, part in parts.items():
            fields |= _fields_in_place(opened, name, part)
        # Its load_state_dict() may have done otherwise, or rows were not those of `since`.
        same = {key: each for key, each in fields.items() if _are_same(each, opened.tensor(key))}
        remember(opened.digest, moments_of(same))
    return others


def _fields_in_place(opened: SavedGeneration, name: str, part: Any) -> dict[str, Tensor]:
    """The fields of tables that a part and a generation have, by their keys there."""
    several = part if isinstance(part, list | tuple) else [part]
    if not all(isinstance(each, nn.Module | Optimizer) for each in several):
        return {}
    tensors = _Tensors()
    with as_plain(), torch.no_grad(), given_in_place():
        described(name, _state_of(part), tensors.keep)
    return {
        key: each
        for key, each in tensors.by_key.items()
        if field_rows(each) is not None and opened.has(key, each)
    }


def _are_same(field: Tensor, stored: Tensor) -> bool:
    """Whether rows that note their changes have the same bytes."""
    found = field_rows(field)
    if found is None or found.table.changes is None:
        return False
    found.table.settle()
    return have_same_bytes(field, stored)


def _copies(part: Any) -> bool:
    """Whether what loads a part may keep the tensors that it is given."""
    several = part if isinstance(part, list | tuple) else [part]
    return not all(isinstance(each, nn.Module | Optimizer) for each in several)


def _check_number(what: str, given: object) -> None:
    if isinstance(given, bool) or not isinstance(given, int):
        raise TypeError(f"{what}: expected a number, as Saved.generation is, got {given!r}")


def _chosen(folder: str, generation: int | None) -> int:
    there = generations_of(folder)
    if not there:
        raise FileNotFoundError(
            errno.ENOENT, "there is no generation of a checkpoint in this folder", folder
        )
    if generation is None:
        return there[-1]
    if generation not in there:
        raise FileNotFoundError(
            errno.ENOENT, f"there is no generation {generation}, but {there}", folder
        )
    return generation


def _state_of(part: Any) -> Any:
    """What is saved of a part."""
    if isinstance(part, list | tuple) and part and all(hasattr(e, "state_dict") for e in part):
        return [each.state_dict() for each in part]
    return part.state_dict() if hasattr(part, "state_dict") else part


def _check_loads(name: str, part: Any) -> None:
    for each in part if isinstance(part, list | tuple) else [part]:
        if not hasattr(each, "load_state_dict"):
            raise TypeError(
                f"{name}: expected what has a load_state_dict(), got {type(each).__name__}; values"
                " are in what load() returns"
            )


class _Tensors:
    """The tensors that a checkpoint has, each once."""

    def __init__(self) -> None:
        self.by_key: dict[str, Tensor] = {}
        self.shared: dict[str, SharedRows] = {}
        """Those of which other ranks have rows, too."""
        self._keys: dict[tuple[Any, ...], str] = {}

    def keep(self, name: str, tensor: Tensor) -> str:
        """Takes one; what is the same memory in the same way has the same key."""
        plain = name.replace("'][", ".").replace("['", ".").replace("']", "")
        plain = plain.replace("][", ".").replace("[", ".").replace("]", "")
        key = next(
            each
            for number in itertools.count()
            if (each := plain + f"#{number}" * (number > 0)) not in self.by_key
            and each not in self.shared
        )
        if isinstance(tensor, SharedRows):
            self.shared[key] = tensor
            return key
        tensor = _dense(name, tensor)
        same = tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
        if tensor.numel() and same in self._keys:
            return self._keys[same]
        self.by_key[key] = tensor
        return self._keys.setdefault(same, key) if tensor.numel() else key


def _shards(tensors: _Written) -> Iterator[_Written]:
    """Those of one file each."""
    shard: dict[str, Tensor | SomeRows] = {}
    nbytes = 0
    for key, each in tensors.items():
        if shard and (nbytes + each.nbytes > SHARD_BYTES or len(shard) == SHARD_TENSORS):
            yield shard
            shard, nbytes = {}, 0
        shard[key] = each
        nbytes += each.nbytes
    if shard:
        yield shard


def _dense(name: str, tensor: Tensor) -> Tensor:
    """A tensor whose rows can be written; raises for what has no plain elements."""
    tensor = tensor.rows if isinstance(tensor, ReadOnlyRows) else tensor.detach()
    if type(tensor) is not Tensor:
        kind = type(tensor)
        raise TypeError(
            f"{name}: is a {kind.__module__}.{kind.__qualname__}; expected a plain tensor"
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


# ------------------------------------------------------------------------------------------------
# Files


def _check_room(folder: str, nbytes: int) -> None:
    """Raises OSError unless the disk has room for so many bytes more."""
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if status.f_blocks and nbytes > free:
        text = f"{nbytes:,} bytes are to be saved, and {free:,} are free"
        raise OSError(errno.ENOSPC, text, folder)


def _write(folder: str, name: str, data: bytes) -> None:
    with replace_files([os.path.join(folder, name)]) as (file,):
        file.reserve(len(data))
        file.write(data)


def _write_shards(
    folder: str, shards: Iterable[_Written], first: int, told: Callable[[int], object]
) -> list[dict[str, Any]]:
    """Writes files, numbered from `first` on, and gives their entries in the manifest."""
    return [
        _write_shard(folder, f"tensors-{at:05d}.safetensors", shard, told)
        for at, shard in enumerate(shards, first)
    ]


class _Manifest(NamedTuple):
    """What tells all of a generation."""

    nbytes: int
    """Of all files."""
    digest: str


def _write_manifest(
    folder: str,
    files: Sequence[Mapping[str, Any]],
    values: Mapping[str, Any],
    base: SavedGeneration | None = None,
    ids_of: Mapping[str, str] | None = None,
) -> _Manifest:
    """Writes what tells all."""
    manifest = {"format": FORMAT, "version": VERSION, "files": files, "parts": values}
    if base is not None:
        against = {"generation": base.number, "sha256": base.digest, "rows": dict(ids_of or {})}
        manifest |= {"version": VERSION_OF_DELTA, "base": against}
    text = json.dumps(manifest, separators=(",", ":")).encode()
    _write(folder, "manifest.json", text)
    _write(folder, "manifest.crc32", f"{zlib.crc32(text):08x}\n".encode())
    nbytes = sum(int(each["bytes"]) for each in files) + len(text)
    return _Manifest(nbytes, hashlib.sha256(text).hexdigest())


def _write_shard(
    folder: str, name: str, tensors: _Written, told: Callable[[int], object]
) -> dict[str, Any]:
    """Writes a file, and gives its entry of the manifest."""
    digests: list[int] = []
    with replace_files([os.path.join(folder, name)]) as (file,):
        write_safetensors(file, tensors, digests, told)
    return {"name": name, "bytes": file.count, "crc32": digests}

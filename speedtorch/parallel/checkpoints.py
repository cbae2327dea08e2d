"""save and load: all of a training run in one generation of a folder, whole or not there."""

from __future__ import annotations

import errno
import itertools
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedtorch.files import safetensors_format
from speedtorch.files.chunk_digests import CHUNK_BYTES, DigestedFile, chunk_count, digests_of
from speedtorch.files.file_format import StoredArray
from speedtorch.files.generations import Generation, generations_of, new_generation, path_of
from speedtorch.files.new_files import replace_files
from speedtorch.files.saved_values import described, restored
from speedtorch.files.system_calls import about, calls, open_to_read
from speedtorch.files.table_files import write_safetensors
from speedtorch.layers.state_tensors import plain_tensors
from speedtorch.memory.byte_count import text_of
from speedtorch.parallel.ranks import Ranks
from speedtorch.parallel.sharded_saves import (
    agreed,
    check_same,
    make_file,
    own_digests,
    write_own,
)
from speedtorch.table.progress import progress_bar
from speedtorch.table.read_only_rows import ReadOnlyRows
from speedtorch.table.shared_rows import SharedRows
from speedtorch.table.whole_fields import given_in_place
from speedtorch.torch_internals import as_plain

__all__ = ["Saved", "load", "save"]

FORMAT = "speedtorch checkpoint"
VERSION = 1
SHARD_BYTES, SHARD_TENSORS = 4 << 30, 4096
_LARGEST_MANIFEST = 1 << 30
_THREADS = 4


@dataclass(frozen=True)
class Saved:
    """What save() has written."""

    path: str
    """The folder of the generation."""
    generation: int
    nbytes: int
    """Of all files."""
    seconds: float

    def __str__(self) -> str:
        return (
            f"generation {self.generation}: {text_of(self.nbytes)} in {self.seconds:.2f} s,"
            f" {self.path}"
        )


def save(
    path: str | os.PathLike[str], *, keep: int = 2, progress: bool | None = None, **parts: Any
) -> Saved:
    """Saves all of a training run: tables, state, layers, schedulers, your own numbers.

    `path` is a folder, in which each call makes a new generation: `generation-00000007` has
    safetensors files and a manifest. It is there once every byte is on the disk, in one step: a
    process that is killed, or a power loss, leaves the generations of before. Tables are written
    block by block from where they are: no copy of them is made.

    Where ranks share rows out, every process of torch.distributed's default group calls it, with a
    folder that all of them reach. Each writes its rows; all other values are the first one's.

    Args:
        path: A folder, which is made if it is not there.
        keep: How many generations stay; older ones are removed once the new one is there.
        progress: Shows a bar on stderr: always (True), never (False), or when it takes longer than
            a moment and stderr is a terminal (None). There is none where ranks share rows out.
        **parts: By names of your own, such as `model=`, `optimizer=`, `scheduler=`, `step=`: what
            has a state_dict(), a list of such, or a value: None, numbers, strings, bytes, tensors,
            and dicts, lists and tuples of them.

    Returns:
        Where it is, and how many bytes were written in what time.

    Raises:
        TypeError: There is nothing to save, or a value that a file without code cannot hold; it is
            named.
        ValueError: `keep` is less than 1, or a tensor is of a kind that safetensors files do not
            have.
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
    with as_plain(), torch.no_grad(), given_in_place():
        tensors = _Tensors()
        values = {
            name: described(name, _state_of(each), tensors.keep) for name, each in parts.items()
        }
        if tensors.shared:
            return _save_together(folder, keep, tensors, values, begin)
        total = sum(each.nbytes for each in tensors.by_key.values())
        with new_generation(folder, keep) as generation:
            _check_room(folder, total)
            with progress_bar(total, progress, unit="B") as bar:
                files = _write_shards(generation.folder, tensors, bar.update)
            nbytes = _write_manifest(generation.folder, files, values)
    return _saved(folder, generation, nbytes, begin)


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
            generation = stack.enter_context(new_generation(folder, keep))
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
                own = _write_shards(generation.folder, tensors, lambda _: None)
                nbytes = _write_manifest(generation.folder, [*files, *own], values)
            return _saved(folder, generation, nbytes, begin)

        done = agreed(switch)[0]
        assert done is not None
        return done


def _saved(folder: str, generation: Generation, nbytes: int, begin: float) -> Saved:
    number, seconds = generation.number, time.perf_counter() - begin
    return Saved(path_of(folder, number), number, nbytes, seconds)


def load(
    path: str | os.PathLike[str],
    *,
    generation: int | None = None,
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
    for name, each in parts.items():
        _check_loads(name, each)
    while True:
        number = _chosen(folder, generation)
        try:
            with _Opened(folder, number) as opened:
                return _loaded(opened, parts, verify=verify, progress=progress)
        except FileNotFoundError:
            # It was removed between two looks, as a new one has come.
            if generation is not None or number in generations_of(folder):
                raise


def _loaded(
    opened: _Opened, parts: Mapping[str, Any], *, verify: bool, progress: bool | None
) -> dict[str, Any]:
    """Fills parts, and gives the values of the rest."""
    saved = opened.manifest["parts"]
    if missing := [name for name in parts if name not in saved]:
        raise KeyError(f"{missing[0]!r} is none of the parts of {opened.path}: {list(saved)}")
    if verify:
        opened.verify(progress)
    states = {name: opened.value(name, copies=_copies(each)) for name, each in parts.items()}
    others = {name: opened.value(name, copies=True) for name in saved if name not in parts}
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
    for each, state in pairs:
        each.load_state_dict(state)
        if isinstance(each, Optimizer):
            opened.let_go(each)
    return others


def _copies(part: Any) -> bool:
    """Whether what loads a part may keep the tensors that it is given."""
    several = part if isinstance(part, list | tuple) else [part]
    return not all(isinstance(each, nn.Module | Optimizer) for each in several)


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

    def shards(self) -> Iterator[dict[str, Tensor]]:
        """Those of one file each."""
        shard: dict[str, Tensor] = {}
        nbytes = 0
        for key, each in self.by_key.items():
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
    folder: str, tensors: _Tensors, told: Callable[[int], object]
) -> list[dict[str, Any]]:
    """Writes all tensors, and gives the entries of their files in the manifest."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return [
            _write_shard(folder, f"tensors-{at:05d}.safetensors", shard, pool, told)
            for at, shard in enumerate(tensors.shards(), 1)
        ]


def _write_manifest(
    folder: str, files: Sequence[Mapping[str, Any]], values: Mapping[str, Any]
) -> int:
    """Writes what tells all; gives the bytes of all files."""
    manifest = {"format": FORMAT, "version": VERSION, "files": files, "parts": values}
    text = json.dumps(manifest, separators=(",", ":")).encode()
    _write(folder, "manifest.json", text)
    _write(folder, "manifest.crc32", f"{zlib.crc32(text):08x}\n".encode())
    return sum(int(each["bytes"]) for each in files) + len(text)


def _write_shard(
    folder: str,
    name: str,
    tensors: Mapping[str, Tensor],
    pool: ThreadPoolExecutor,
    told: Callable[[int], object],
) -> dict[str, Any]:
    """Writes a file, and gives its entry of the manifest."""
    with replace_files([os.path.join(folder, name)]) as (file,):
        digested = DigestedFile(file, pool, told)
        write_safetensors(digested, tensors)
    return {"name": name, "bytes": digested.count, "crc32": digested.digests}


class _Opened:
    """A generation to read."""

    def __init__(self, folder: str, number: int) -> None:
        self.path = path_of(folder, number)
        self._older = [each for each in generations_of(folder) if each != number]
        self._stack = ExitStack()
        self._arrays: dict[str, tuple[StoredArray, Tensor]] = {}
        self._ranges: list[range] = []

    def __enter__(self) -> _Opened:
        with self._stack:
            with self._damage("manifest.json"):
                self.manifest = self._manifest()
                names = [self._checked(each) for each in self.manifest["files"]]
            self._reads = {name: self._open(name) for name in names}
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @contextmanager
    def _damage(self, name: str) -> Iterator[None]:
        """Says in errors which file it is, and what else there is."""
        try:
            yield
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            others = f"; load(..., generation={self._older[-1]}) is there" if self._older else ""
            raise ValueError(
                f"{os.path.join(self.path, name)}: is damaged, or none of ours: {error}{others}"
            ) from error

    def _manifest(self) -> dict[str, Any]:
        text = _whole(os.path.join(self.path, "manifest.json"))
        digest = _whole(os.path.join(self.path, "manifest.crc32"))
        if f"{zlib.crc32(text):08x}\n".encode() != digest:
            raise ValueError("its bytes are not those that were written")
        content = json.loads(text)
        if content["format"] != FORMAT or content["version"] != VERSION:
            raise ValueError(f"expected {FORMAT!r}, version {VERSION}")
        if not isinstance(content["parts"], dict):
            raise ValueError("its parts have no names")
        for each in content["files"]:
            numbers = [each["bytes"], *each["crc32"]]
            if not all(type(number) is int and number >= 0 for number in numbers):
                raise ValueError("it has bytes or digests that are no numbers")
        return dict(content)

    @staticmethod
    def _checked(entry: Any) -> str:
        name = entry["name"]
        if os.path.basename(name) != name or not name.endswith(".safetensors"):
            raise ValueError(f"it names the file {name!r}")
        return str(name)

    def _open(self, name: str) -> Callable[..., None]:
        """Opens a file, and maps its arrays, privately: what is written to them stays here."""
        path = os.path.join(self.path, name)
        read, size = self._stack.enter_context(open_to_read(path))
        entry = self._entry(name)
        with self._damage(name):
            if size != entry["bytes"]:
                raise ValueError(f"it has {size:,} bytes of {entry['bytes']:,}")
            arrays = safetensors_format.read_arrays(read, size)
        descriptor = calls.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with about(path):
                mapped = torch.frombuffer(calls.map_copy(descriptor, size), dtype=torch.uint8)
        finally:
            calls.close(descriptor)
        self._ranges.append(range(mapped.data_ptr(), mapped.data_ptr() + size))
        for key, array in arrays.items():
            self._arrays[key] = array, mapped
        return read

    def _entry(self, name: str) -> dict[str, Any]:
        return next(each for each in self.manifest["files"] if each["name"] == name)

    def verify(self, progress: bool | None) -> None:
        """Raises ValueError unless all bytes are those that were written."""
        total = sum(each["bytes"] for each in self.manifest["files"])
        with ThreadPoolExecutor(_THREADS) as pool, progress_bar(total, progress, unit="B") as bar:
            for name, read in self._reads.items():
                entry = self._entry(name)
                with self._damage(name):
                    nbytes, count = entry["bytes"], chunk_count(entry["bytes"])
                    if len(entry["crc32"]) != count:
                        raise ValueError(f"it has {count} chunks of {len(entry['crc32'])}")
                    runs = [range(k, min(k + 16, count)) for k in range(0, count, 16)]
                    found = pool.map(partial(digests_of, read, nbytes), runs)
                    for run, digests in zip(runs, found, strict=True):
                        expected = entry["crc32"][run.start : run.stop]
                        for number, digest, other in zip(run, digests, expected, strict=True):
                            if digest != other:
                                begin = number * CHUNK_BYTES
                                raise ValueError(
                                    f"its bytes from {begin:,} on are not those written"
                                )
                        bar.update(min(run.stop * CHUNK_BYTES, nbytes) - run.start * CHUNK_BYTES)

    def value(self, name: str, *, copies: bool) -> Any:
        """The value of a part; its tensors are in the file's memory unless it `copies`."""

        def found(key: str) -> Tensor:
            array, mapped = self._arrays[key]
            made = torch.empty(0, dtype=array.dtype, device="cpu")
            if array.nbytes == 0:
                return made.view(array.shape)
            storage, begin = mapped.untyped_storage(), array.offset
            if begin % array.dtype.itemsize:  # none of our files
                part = mapped[begin : begin + array.nbytes].clone()
                storage, begin = part.untyped_storage(), 0
            # No view of another tensor, which would keep that and with it the file.
            strides = torch.empty(array.shape, device="meta").stride()
            made.set_(storage, begin // array.dtype.itemsize, array.shape, strides)
            return made.clone() if copies else made

        with self._damage("manifest.json"):
            return restored(self.manifest["parts"][name], found)

    def let_go(self, optimizer: Optimizer) -> None:
        """Gives an optimizer tensors of its own where it has kept those of the file."""
        for _, each in plain_tensors("", dict(enumerate(optimizer.state.values()))):
            if each.is_cpu and each.numel() and any(each.data_ptr() in r for r in self._ranges):
                each.data = each.data.clone()


def _whole(path: str) -> bytes:
    """All of a small file."""
    with open_to_read(path) as (read, size):
        if size > _LARGEST_MANIFEST:
            raise ValueError(f"it has {size:,} bytes, and the limit is {_LARGEST_MANIFEST:,}")
        data = bytearray(size)
        read(memoryview(data), 0)
    return bytes(data)

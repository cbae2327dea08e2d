"""SavedGeneration: reads a checkpoint of save(), full or incremental."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedtorch.checkpoints.generations import generations_of, path_of
from speedtorch.checkpoints.saved_values import restored
from speedtorch.files import safetensors_format
from speedtorch.files.file_digests import CHUNK_BYTES, all_digests, chunk_count, crc32c
from speedtorch.files.file_format import StoredArray
from speedtorch.files.system_calls import calls, open_to_read, path_in_errors, read_file
from speedtorch.layers.state_tensors import plain_tensors
from speedtorch.ops.functions import pinned_scatter
from speedtorch.table.progress import progress_bar

__all__ = ["FORMAT", "VERSION", "DamagedError", "SavedGeneration", "base_of"]

FORMAT = "speedtorch checkpoint"
VERSION = 3
_CRC32_VERSIONS = (1, 2)  # a full checkpoint and a delta, both with CRC-32 digests
_LARGEST_MANIFEST = 1 << 30


class DamagedError(ValueError):
    """A file of a checkpoint is missing or has wrong bytes; `text` names the file."""

    def __init__(self, generation: int, text: str, remedy: str) -> None:
        super().__init__(". ".join(filter(None, (text, remedy))))
        self.generation, self.text = generation, text


class SavedGeneration:
    """A checkpoint to read.

    For some tensors, an incremental checkpoint has only the rows that have changed since its
    `base`. `ids_of` maps the key of such a tensor to the key of the changed rows' ids.
    """

    def __init__(self, folder: str, number: int, later: int | None = None) -> None:
        self.number, self.path = number, path_of(folder, number)
        self.digest = ""  # SHA-256 of the manifest, which has the digests of all files
        self.base: SavedGeneration | None = None
        self.ids_of: dict[str, str] = {}
        self._folder, self._later = folder, later
        self._older = [older for older in generations_of(folder) if older < number]
        self._arrays: dict[str, tuple[StoredArray, mmap.mmap]] = {}
        self._ranges: list[range] = []
        self._is_verified = False
        self._open_files()

    @classmethod
    def opened(cls, folder: str, number: int) -> SavedGeneration:
        """Maps the files of a checkpoint and its chain, iteratively because chains can be long.

        Raises DamagedError if a file is damaged or missing.
        """
        last = made = cls(folder, number)
        while "base" in last.manifest:
            last = last._open_base()
        for link in reversed(made.chain):
            link._check_base()
        return made

    @property
    def chain(self) -> list[SavedGeneration]:
        """This checkpoint, its base, and further bases up to a checkpoint without one."""
        found = [self]
        while (base := found[-1].base) is not None:
            found.append(base)
        return found

    def _open_files(self) -> None:
        with self._damage("manifest.json"):
            text = read_file(os.path.join(self.path, "manifest.json"), _LARGEST_MANIFEST)
            digest = read_file(os.path.join(self.path, "manifest.crc32"), _LARGEST_MANIFEST)
            if f"{zlib.crc32(text):08x}\n".encode() != digest:
                raise ValueError("its bytes do not match their digest")
            content = json.loads(text)
            versions = (_CRC32_VERSIONS["base" in content], VERSION)
            if content["format"] != FORMAT or content["version"] not in versions:
                raise ValueError(f"expected {FORMAT!r}, version {versions[0]} or {VERSION}")
            self._digests = "crc32c" if content["version"] == VERSION else "crc32"
            self.digest = hashlib.sha256(text).hexdigest()
            if not isinstance(content["parts"], dict):
                raise ValueError("its 'parts' are not a dict")
            self.manifest = dict(content)
            for entry in self.manifest["files"]:
                name, numbers = entry["name"], [entry["bytes"], *entry[self._digests]]
                if not all(type(number) is int and number >= 0 for number in numbers):
                    raise ValueError("its byte counts and digests must be integers from 0 on")
                is_name = os.path.basename(name) == name and name.endswith(".safetensors")
                if not is_name or len(os.fsencode(name)) > 255:  # more than file systems accept
                    raise ValueError(f"it has the invalid file name {name[:300]!r}")
        for entry in self.manifest["files"]:
            name, nbytes = entry["name"], entry["bytes"]
            with self._damage(name), open_to_read(os.path.join(self.path, name)) as file:
                if file.size != nbytes:
                    raise ValueError(f"it has {file.size:,} bytes instead of {nbytes:,}")
                arrays = safetensors_format.read_arrays(file.read, file.size)
                mapped = file.map(calls.map_copy)  # writes to the mapping do not change the file
            first = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
            self._ranges.append(range(first, first + nbytes))
            self._arrays |= {key: (array, mapped) for key, array in arrays.items()}

    @contextmanager
    def _damage(self, name: str) -> Iterator[None]:
        """Turns errors into DamagedError with the file's path and the latest older checkpoint."""
        path, remedy = os.path.join(self.path, name), ""
        if self._older:
            remedy = f"Use load(..., generation={self._older[-1]}) for the checkpoint before it"
        try:
            yield
        except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError) as error:
            text = f"{path}: is damaged, or not of a speedtorch checkpoint: {error}"
            if isinstance(error, FileNotFoundError):
                text = f"{error.filename}: is missing"
            if self._later is not None:
                text += f". Generation {self._later} has the base generation {self.number}"
            raise DamagedError(self.number, text, remedy) from error
        except OSError as error:
            with path_in_errors(error.filename or path, remedy):
                raise error

    def _open_base(self) -> SavedGeneration:
        with self._damage("manifest.json"):
            entry = self.manifest["base"]
            number, digest = _base_in(entry)
            if number >= self.number:
                raise ValueError(f"its base must be an older generation, got {number}")
            if not isinstance(entry["rows"], dict):
                raise ValueError("the 'rows' of its base are not a dict")
            self.ids_of = {str(key): str(ids) for key, ids in entry["rows"].items()}
        self.base = SavedGeneration(self._folder, number, self.number)
        with self._damage("manifest.json"):
            if self.base.digest != digest:
                raise ValueError(
                    f"its base, generation {number}, was replaced by another checkpoint"
                )
        return self.base

    def _check_base(self) -> None:
        if self.base is not None:
            with self._damage("manifest.json"):
                for key, ids in self.ids_of.items():
                    rows, whole = self._arrays[key][0], self.base.array(key)
                    of_ids = self._arrays[ids][0]
                    fits = rows.dtype == whole.dtype and rows.shape[1:] == whole.shape[1:]
                    are_ids = of_ids.dtype == torch.int64 and of_ids.shape == rows.shape[:1]
                    if not fits or not are_ids or not whole.shape:
                        text = f"rows {rows.shape} with ids {of_ids.shape} do not fit a tensor of"
                        raise ValueError(f"{text} {whole.shape}")

    def array(self, key: str) -> StoredArray:
        """The shape and dtype of all rows of a tensor."""
        return self._whole_of(key)._arrays[key][0]

    def _whole_of(self, key: str) -> SavedGeneration:
        """The checkpoint of the chain with all rows of a tensor."""
        at = self
        while at.base is not None and key in at.ids_of:
            at = at.base
        return at

    def has(self, key: str, like: Tensor) -> bool:
        """Whether the checkpoint has a tensor of the same shape and dtype under a key."""
        if key not in self._whole_of(key)._arrays:
            return False
        array = self.array(key)
        return (tuple(array.shape), array.dtype) == (tuple(like.shape), like.dtype)

    def links_since(self, generation: int) -> list[SavedGeneration] | None:
        """The checkpoints of the chain after `generation`, the latest first.

        Returns None unless the chain contains `generation`.
        """
        later = list(itertools.takewhile(lambda link: link.number != generation, self.chain))
        return None if len(later) == len(self.chain) else later

    def changes_in(
        self, links: Sequence[SavedGeneration]
    ) -> dict[str, list[tuple[Tensor, Tensor]]]:
        """Returns, by key, the ids and rows that `links` have changed, in writing order.

        `links` are the latest checkpoints of the chain. The result omits tensors that one of these
        checkpoints stores completely.
        """
        keys = [key for key in self._arrays if all(key in link.ids_of for link in links)]
        return {key: [link._rows(key) for link in reversed(links)] for key in keys}

    def _rows(self, key: str) -> tuple[Tensor, Tensor]:
        """The ids of changed rows, checked to be in range, and the rows."""
        ids, count = self._mapped(self.ids_of[key]), self.array(key).shape[0]
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < count:
            with self._damage("manifest.json"):
                raise ValueError(
                    f"ids of changed rows of {key!r} must be within its {count:,} rows"
                )
        return ids, self._mapped(key)

    def verify(self, links: Iterable[SavedGeneration], progress: bool | None) -> None:
        """Compares the bytes of checkpoints of the chain with their digests, once.

        Raises DamagedError if some differ.
        """
        links = [link for link in links if not link._is_verified]
        files = [(link, entry) for link in links for entry in link.manifest["files"]]
        total = sum(entry["bytes"] for _, entry in files)
        lock = Lock()
        with progress_bar(total, progress, unit="B") as bar:

            def update_bar(count: int) -> None:
                """Updates the bar, under a lock because several threads call this."""
                with lock:
                    bar.update(count)

            for link, entry in files:
                name, nbytes, expected = entry["name"], entry["bytes"], entry[link._digests]
                digest_of = crc32c if link._digests == "crc32c" else zlib.crc32
                with link._damage(name), open_to_read(os.path.join(link.path, name)) as file:
                    if len(expected) != (count := chunk_count(nbytes)):
                        raise ValueError(f"it has {count} chunks, but {len(expected)} digests")
                    found = all_digests(file.read, nbytes, update_bar, digest_of)
                    for number, digests in enumerate(zip(found, expected, strict=True)):
                        if digests[0] != digests[1]:
                            begin = number * CHUNK_BYTES
                            raise ValueError(
                                f"its bytes from {begin:,} on do not match their digest"
                            )
        for link in links:
            link._is_verified = True

    def value(
        self,
        name: str,
        instead: Mapping[str, Tensor],
        *,
        copies: bool,
        before_read: Callable[[Sequence[SavedGeneration]], object],
    ) -> Any:
        """The value of a part; its tensors are mapped from the file, or copies if `copies`.

        Tensors in `instead` replace the file's tensors, by key. `before_read` is called with the
        checkpoints of each other tensor before the tensor is read.
        """

        def tensor_of(key: str) -> Tensor:
            """Returns the tensor of a key, cloned if it must not be mapped from the file."""
            if key in instead:
                return instead[key]
            before_read(self._links_of(key))
            made = self.tensor(key)
            return made.clone() if copies else made

        with self._damage("manifest.json"):
            return restored(self.manifest["parts"][name], tensor_of)

    def tensor(self, key: str) -> Tensor:
        """A tensor in the private mapping of the file, with all changed rows written to it."""
        *later, whole = self._links_of(key)
        made = whole._mapped(key)
        for link in reversed(later):
            pinned_scatter(made, *link._rows(key))
        return made

    def _links_of(self, key: str) -> list[SavedGeneration]:
        """The checkpoints of the chain up to the one with all rows of a tensor."""
        return self.chain[: self.chain.index(self._whole_of(key)) + 1]

    def _mapped(self, key: str) -> Tensor:
        array, mapped = self._arrays[key]
        if array.nbytes == 0:
            return torch.empty(array.shape, dtype=array.dtype, device="cpu")
        # A storage of only these bytes: deepcopy (of an optimizer's groups) copies whole storages.
        part = torch.frombuffer(mapped, dtype=torch.uint8, count=array.nbytes, offset=array.offset)
        if array.offset % array.dtype.itemsize:  # in files of other programs
            part = part.clone()
        # .data, because a view would keep a reference to its base tensor and so to the file.
        return part.view(array.dtype).view(array.shape).data

    def copy_mapped_state(self, optimizer: Optimizer) -> None:
        """Copies the tensors of an optimizer's state that are still mapped from the file."""
        ranges = [part for link in self.chain for part in link._ranges]
        for _, state in plain_tensors("", dict(enumerate(optimizer.state.values()))):
            if state.is_cpu and state.numel() and any(state.data_ptr() in part for part in ranges):
                state.data = state.data.clone()


def _base_in(entry: Any) -> tuple[int, str]:
    """The base's number and digest in a manifest; raises ValueError if they are malformed."""
    number, digest = entry["generation"], entry["sha256"]
    if type(number) is not int or number < 1 or not isinstance(digest, str):
        raise ValueError(f"it has the invalid base {str(entry)[:80]}")
    return number, digest


def base_of(folder: str, number: int) -> int | None:
    """The number of a checkpoint's base; None if it has no base, is damaged or cannot be opened.

    Raises OSError on an error of the disk.
    """
    try:
        path = os.path.join(path_of(folder, number), "manifest.json")
        manifest = json.loads(read_file(path, _LARGEST_MANIFEST))
        return _base_in(manifest["base"])[0] if "base" in manifest else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None  # load() raises the error
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EACCES, errno.ENOTDIR, errno.ELOOP):
            return None
        raise  # if this returned None, new_generation() could remove a base that is still needed

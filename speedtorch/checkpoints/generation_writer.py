"""GenerationWriter: writes a new checkpoint, by one process or by all ranks together."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from speedtorch.checkpoints.background_saves import copies
from speedtorch.checkpoints.change_tracking import SavedVersions, begin_versions, remember
from speedtorch.checkpoints.deltas import TensorsToWrite
from speedtorch.checkpoints.generations import Generation, generations_of, new_generation
from speedtorch.checkpoints.joined_files import JoinedFile, JoinedRows
from speedtorch.checkpoints.rendezvous import Rendezvous
from speedtorch.checkpoints.saved_generation import FORMAT, VERSION, base_of
from speedtorch.checkpoints.saved_tensors import SavedTensors
from speedtorch.files import safetensors_format
from speedtorch.files.field_blocks import SelectedRows
from speedtorch.files.new_files import replace_files
from speedtorch.files.table_files import write_safetensors
from speedtorch.parallel.collectives import Collectives, run_on_all, run_on_first
from speedtorch.table.progress import progress_bar

__all__ = ["GenerationWriter"]

_Written = TypeVar("_Written", bound=Tensor | SelectedRows | JoinedRows)
SHARD_BYTES, SHARD_TENSORS = 4 << 30, 4096


@dataclass(eq=False)
class GenerationWriter:
    """Writes one checkpoint, by one process or by all ranks together.

    All ranks must call the methods in the order of their definition. An error on one rank raises on
    all ranks. After an error before the rename in finish(), all previous checkpoints remain. The
    caller must exit `stack` at the end, after an error with that error. An exit without an error
    between make() and finish() would publish an incomplete checkpoint.
    """

    _ranks: Collectives
    _folder: str
    to_write: TensorsToWrite
    _values: Mapping[str, Any]
    _stack: ExitStack

    def __post_init__(self) -> None:
        self._switching = self._stack.enter_context(ExitStack())
        self._files = [
            JoinedFile(f"rows-{at:05d}.safetensors", shard)
            for at, shard in enumerate(_shards(self.to_write.shared), 1)
        ]
        # First this rank's rows of each file that all ranks write, then the files that only the
        # first rank writes. On other ranks `to_write.of_first_rank` is empty.
        self.jobs: list[Mapping[Any, Tensor | SelectedRows]] = [file.own for file in self._files]
        self.jobs += _shards(self.to_write.of_first_rank)
        self._entries: list[dict[str, Any]] = []
        self._copies: list[dict[Any, Tensor]] = []
        self._versions: SavedVersions = []

    def make(self, keep: int) -> None:
        """Creates the folder, and in it the files that all ranks write together."""

        def make() -> Generation:
            """Creates the hidden folder and checks the free space, on the first rank."""
            needed = partial(base_of, self._folder)
            new = new_generation(self._folder, keep, needed, self.to_write.base_number)
            made = self._switching.enter_context(new)
            tensors = (*self.to_write.of_first_rank.values(), *self.to_write.shared.values())
            nbytes, status = sum(tensor.nbytes for tensor in tensors), os.statvfs(self._folder)
            if status.f_blocks and nbytes > (free := status.f_bavail * status.f_frsize):
                text = f"the checkpoint needs {nbytes:,} bytes, but {free:,} are free"
                raise OSError(errno.ENOSPC, text, self._folder)
            for file in self._files:
                file.make(made.folder)
            return made

        # The rename may increase the first rank's `number`. Other ranks keep this earlier number
        # here, and receive the final one in finish().
        self._generation = run_on_first(self._ranks, make)

    def begin(self, tensors: SavedTensors, later: int, progress: bool | None) -> None:
        """Writes all jobs, but copies the tensors of the last `later` jobs to host memory instead.

        `progress` must be False if ranks write files together, because JoinedFile reports no bytes.
        """
        first = len(self.jobs) - later
        now = self.jobs[:first]
        total = sum(rows.nbytes for job in now for rows in job.values())

        def begin() -> None:
            """Begins new versions before rows are read, so that the next save has later changes."""
            self._versions = begin_versions(tensors.all_by_key)
            with progress_bar(total, progress, unit="B") as bar:
                self._write(now, 0, bar.update)
            self._copies = copies(self.jobs[first:])

        run_on_all(self._ranks, begin)

    def continue_in_background(self, timeout: float) -> None:
        """Replaces collectives by a Rendezvous for the next stages, which run beside training."""
        ranks = self._ranks
        rendezvous = Rendezvous(self._generation.rendezvous_folder, ranks.rank, ranks.size, timeout)

        def make() -> None:
            """Makes the rendezvous folder, and removes it when the save ends."""
            self._stack.callback(rendezvous.remove)
            rendezvous.make()

        def enter() -> None:
            """Locks this rank's file until the save ends."""
            self._stack.enter_context(rendezvous)

        run_on_first(ranks, make)
        run_on_all(ranks, enter)
        rendezvous.check_locks(ranks)
        self._ranks = rendezvous

    def finish(self) -> tuple[int, int]:
        """Writes the copies and publishes the checkpoint; returns its number and total bytes."""
        ranks = self._ranks

        def write() -> None:
            """Writes the copies and frees their memory, also after an error."""
            try:
                self._write(self._copies, len(self.jobs) - len(self._copies), lambda _: None)
            finally:
                self._copies.clear()

        run_on_all(ranks, write)
        of_ranks = run_on_all(
            ranks,
            lambda: [file.own_digests(self._generation.folder, ranks) for file in self._files],
        )
        for at, file in enumerate(self._files):
            digests = [digest for of_rank in of_ranks for digest in of_rank[at]]
            self._entries.append({"name": file.name, "bytes": file.nbytes, "crc32c": digests})
        number, nbytes, digest = run_on_first(ranks, self._switch)
        remember(digest, self._versions)
        return number, nbytes

    def _write(
        self,
        jobs: Sequence[Mapping[Any, Tensor | SelectedRows]],
        first: int,
        on_bytes: Callable[[int], object],
    ) -> None:
        """Writes jobs or their copies; `first` is the index of the first job."""
        for at, job in enumerate(jobs, first - len(self._files)):
            if at < 0:
                self._files[at].write(self._generation.folder, job)
            else:
                name, digests = f"tensors-{at + 1:05d}.safetensors", list[int]()
                with replace_files([os.path.join(self._generation.folder, name)]) as (file,):
                    write_safetensors(file, job, digests, on_bytes)
                self._entries.append({"name": name, "bytes": file.count, "crc32c": digests})

    def _switch(self) -> tuple[int, int, str]:
        """Publishes the checkpoint; returns its number, total bytes and digest."""
        base = self.to_write.base
        with self._switching.pop_all():
            content = {"version": VERSION, "files": self._entries, "parts": self._values}
            if base is not None:
                entry = {"generation": base.number, "sha256": base.digest}
                content["base"] = {**entry, "rows": self.to_write.ids_of}
            text = json.dumps({"format": FORMAT, **content}, separators=(",", ":")).encode()
            self._write_small("manifest.json", text)
            self._write_small("manifest.crc32", f"{zlib.crc32(text):08x}\n".encode())
            if base is not None and base.number not in generations_of(self._folder):
                raise RuntimeError(
                    f"save: the base, generation {base.number}, was removed during the save."
                    " Save again without base=."
                )
        nbytes = sum(int(entry["bytes"]) for entry in self._entries) + len(text)
        return self._generation.number, nbytes, hashlib.sha256(text).hexdigest()

    def _write_small(self, name: str, data: bytes) -> None:
        with replace_files([os.path.join(self._generation.folder, name)]) as (file,):
            file.reserve(len(data))
            file.write(data)


def _shards(tensors: Mapping[str, _Written]) -> Iterator[dict[str, _Written]]:
    """Splits tensors into files of limited bytes, tensors and header size."""
    shard: dict[str, _Written] = {}
    nbytes = of_header = 0
    for key, rows in tensors.items():
        of_entry = len(json.dumps([key, *rows.shape])) + 100  # 100 for dtype and offsets
        is_full = nbytes + rows.nbytes > SHARD_BYTES or len(shard) == SHARD_TENSORS
        if shard and (is_full or of_header + of_entry > safetensors_format.LARGEST_HEADER):
            yield shard
            shard, nbytes, of_header = {}, 0, 0
        shard[key] = rows
        nbytes, of_header = nbytes + rows.nbytes, of_header + of_entry
    if shard:
        yield shard

"""load: loads a checkpoint of save() into objects, and returns the other values."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedtorch.checkpoints.background_saves import wait_for
from speedtorch.checkpoints.change_tracking import (
    ChangedTensor,
    are_same,
    begin_versions,
    place_of,
    remember,
    unchanged,
    write_changes,
)
from speedtorch.checkpoints.generations import check_number, existing_number, generations_of
from speedtorch.checkpoints.load_checks import check_loads, objects_of, ranks_sharing
from speedtorch.checkpoints.load_ranks import LoadRanks
from speedtorch.checkpoints.saved_generation import DamagedError, SavedGeneration
from speedtorch.checkpoints.saved_tensors import SavedTensors
from speedtorch.checkpoints.sharded_tensors import fill_shards
from speedtorch.parallel.collectives import Collectives, SingleProcess, run_on_all
from speedtorch.table.host_table import any_tracks_changes
from speedtorch.table.whole_fields import state_dict_views
from speedtorch.torch_internals import as_plain

__all__ = ["load"]

_TRIES = 100  # a try fails if a save removes its checkpoint, or ranks find different checkpoints


def load(
    path: str | os.PathLike[str],
    *,
    generation: int | None = None,
    since: int | None = None,
    verify: bool = True,
    progress: bool | None = None,
    **parts: Any,
) -> dict[str, Any]:
    """Loads a checkpoint of save() into the given objects, and returns the other values.

    Every byte that is read is compared with its digest (unless `verify` is False), and every part
    with its object, before anything is loaded. Objects with their own load code cannot be checked:
    they load first and may raise then. Rows are copied from the mapped file directly to the table.

    If rows are sharded, all ranks that share them must call load() together. If a check fails on
    one rank, all ranks raise, and no object changes.

    Args:
        path: The folder that was passed to save().
        generation: The number of the checkpoint. By default the latest intact checkpoint is loaded.
            A RuntimeWarning names later checkpoints with a damaged or missing file, or with a
            damaged base.
        since: The number of the checkpoint that the parts have now. If the loaded checkpoint is
            this one or builds on it (`save(base=)`), only later changes of tables are read and
            written to the tables. Other threads may look up rows meanwhile. Otherwise everything is
            loaded.
        verify: Compare all bytes that are read with their digests.
        progress: See save().
        **parts: Objects with a load_state_dict(), or lists of such objects, by the names in save().
            Attach the optimizers of tables before load(). A part passed as None is neither read nor
            returned.

    Returns:
        All other parts by name; tensors are on the CPU.

    Raises:
        FileNotFoundError: There is no checkpoint, or none with the number `generation`.
        KeyError: A part was not saved.
        TypeError: A part has no load_state_dict(), a number is no int, or a DTensor is not sharded
            by rows among all ranks.
        ValueError: A file of the requested checkpoint, or of every checkpoint, is damaged, cut,
            missing or of an unsupported format. Or the saved state does not fit an optimizer or a
            list. Nothing has been loaded.
        RuntimeError: The saved state does not fit a module, another rank has raised an error, or
            ranks find different checkpoints. Nothing has been loaded.
        NotImplementedError: The parts are sharded among different ranks.

    Example:
        >>> import tempfile, torch, speedtorch
        >>> layer = torch.nn.Linear(2, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = speedtorch.save(folder, layer=layer, epoch=3)
        ...     speedtorch.load(folder, layer=layer)
        {'epoch': 3}
    """
    folder = os.fsdecode(path)
    left_out = [name for name, part in parts.items() if part is None]
    parts = {name: part for name, part in parts.items() if part is not None}
    wait_for(folder)
    sharing = ranks_sharing(parts.values())
    ranks: Collectives = SingleProcess() if sharing is None else LoadRanks(sharing)
    ready: list[Callable[[], dict[str, Any]]] = []
    damaged: dict[int, str] = {}

    def prepare() -> tuple[str | None, list[tuple[int, str]]]:
        """Returns the digest of the checkpoint (None if it was removed meanwhile) and `damaged`."""
        check_number("generation", generation)
        check_number("since", since)
        for name, part in parts.items():
            if wrong := [
                value for value in objects_of(part) if not hasattr(value, "load_state_dict")
            ]:
                raise TypeError(
                    f"{name}: expected an object with load_state_dict(), got"
                    f" {type(wrong[0]).__name__}. load() returns values such as numbers."
                )
        while True:
            number = existing_number(folder, generation, damaged)
            try:
                opened = SavedGeneration.opened(folder, number)
                if bad := [link.number for link in opened.chain if link.number in damaged]:
                    damaged[number] = damaged[bad[0]]
                    continue
                made = _prepared(
                    opened, parts, left_out, since=since, verify=verify, progress=progress
                )
            except DamagedError as error:
                if number not in generations_of(folder):
                    return None, [*damaged.items()]
                if generation is not None:
                    raise
                damaged[number] = damaged[error.generation] = error.text
            except Exception:
                _warn_of(damaged, number)  # the older checkpoint may be the cause of the error
                raise
            else:
                _warn_of(damaged, number)
                ready.append(made)
                return opened.digest, [*damaged.items()]

    for _ in range(_TRIES):
        ready.clear()
        digests, found = zip(*run_on_all(ranks, prepare, "load"), strict=True)
        for damaged_there in found:
            damaged.update(damaged_there)
        if None not in digests and len(set(digests)) == 1:
            return ready[0]()
    raise RuntimeError(
        f"load: the last generation of {folder!r} has changed during each of {_TRIES} tries, or the"
        " ranks have different folders. Pass generation=, and on all ranks the same folder."
    )


def _prepared(
    opened: SavedGeneration,
    parts: Mapping[str, Any],
    left_out: Sequence[str],
    *,
    since: int | None,
    verify: bool,
    progress: bool | None,
) -> Callable[[], dict[str, Any]]:
    """Reads and checks all parts; returns a function that loads `parts` and returns the rest."""

    def check_files(links: Sequence[SavedGeneration]) -> None:
        """Compares the files of `links` with their digests, if `verify` is set."""
        if verify:
            opened.verify(links, progress)

    later = None if since is None else opened.links_since(since)
    check_files(opened.chain if later is None else later)
    saved = opened.manifest["parts"]
    if missing := [name for name in (*parts, *left_out) if name not in saved]:
        raise KeyError(f"{opened.path} has no part {missing[0]!r}. Parts: {list(saved)}.")
    changes = {} if later is None else opened.changes_in(later)
    states: dict[str, Any] = {}
    patches: list[ChangedTensor] = []
    for name, part in parts.items():
        live = _fields_in_place(opened, name, part) if changes else {}
        kept = {key: rows for key, rows in live.items() if key in changes}
        patches += [ChangedTensor(key, rows, changes[key]) for key, rows in kept.items()]
        states[name] = opened.value(name, kept, copies=_copies(part), before_read=check_files)
    values = {
        name: opened.value(name, {}, copies=True, before_read=check_files)
        for name in saved
        if name not in parts and name not in left_out
    }
    pairs: list[tuple[str, Any, Any]] = []
    for name, part in parts.items():
        state = states[name]
        if not isinstance(part, list | tuple):
            pairs.append((name, part, state))
            continue
        if not isinstance(state, list) or len(part) != len(state):
            text = f"a list of {len(state)}" if isinstance(state, list) else "no list"
            raise ValueError(
                f"{name}: {text} was saved, got a list of {len(part)}. Pass objects as to save()."
                " Nothing has been loaded."
            )
        names = [f"{name}[{at}]" for at in range(len(part))]
        pairs += zip(names, part, state, strict=True)
    known = [check_loads(*pair) for pair in pairs]
    for pair in pairs:
        fill_shards(*pair)

    def load_parts(checked: bool) -> None:
        """Loads the parts that were checked, or the other parts."""
        for (_, part, state), is_known in zip(pairs, known, strict=True):
            if is_known == checked:
                part.load_state_dict(state)
                if isinstance(part, Optimizer):
                    opened.copy_mapped_state(part)

    def fill() -> dict[str, Any]:
        """Loads the checked states into their objects, and returns the other values."""
        load_parts(checked=False)  # may still raise, while tables and other objects are unchanged
        written = [] if later is None else write_changes(patches, opened.chain[len(later)].digest)
        load_parts(checked=True)
        if any_tracks_changes():
            known = unchanged(written)
            keys = {key for key, _, _ in known}
            # Compares, because load_state_dict() may change values, and `since` may be wrong.
            same = {
                key: rows
                for name, part in parts.items()
                for key, rows in _fields_in_place(opened, name, part).items()
                if key not in keys and are_same(rows, opened.tensor(key))
            }
            remember(opened.digest, known + begin_versions(same))
        return values

    return fill


def _fields_in_place(opened: SavedGeneration, name: str, part: Any) -> dict[str, Tensor]:
    """The tensors of tables that both a part and a checkpoint have, by the checkpoint's keys."""
    if _copies(part):
        return {}
    tensors = SavedTensors()
    with as_plain(), torch.no_grad(), state_dict_views():
        tensors.described(name, part)
    return {
        key: tensor
        for key, tensor in tensors.all_by_key.items()
        if place_of(tensor) and opened.has(key, tensor)
    }


def _copies(part: Any) -> bool:
    """Whether load_state_dict() of a part may keep the tensors, which must then be copies."""
    return not all(isinstance(owner, nn.Module | Optimizer) for owner in objects_of(part))


def _warn_of(damaged: Mapping[int, str], number: int) -> None:
    """Warns if a checkpoint is loaded instead of later, damaged ones."""
    if later := {bad: text for bad, text in damaged.items() if bad > number}:
        texts = "; ".join(dict.fromkeys(later.values()))
        warnings.warn(
            f"load: loads generation {number}, because {sorted(later)} are damaged: {texts}",
            RuntimeWarning,
            stacklevel=5,
        )

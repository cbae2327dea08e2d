"""TrainingState: offloads a model and its optimizers to host memory, and loads them again."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from threading import RLock
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedtorch.layers.access_tracker import untracked
from speedtorch.layers.discarded import Discarded
from speedtorch.layers.flat_buffer import check_dense
from speedtorch.layers.module_tensors import is_offloaded
from speedtorch.layers.offloaded_module import exact_device
from speedtorch.layers.offloaded_storage import OffloadedStorage
from speedtorch.layers.state_tensors import PARTS, StatePart, StateTensors, state_tensors
from speedtorch.layers.storage_offloader import StorageOffloader
from speedtorch.memory.byte_count import text_of
from speedtorch.optim.wrappers import given_optimizers, optimizers_within
from speedtorch.torch_internals import fully_sharded, is_resizable, storage_id

__all__ = ["SleepReport", "TrainingState"]

_REMEDIES: dict[StatePart, str] = {
    "weights": "Call wake() and load all weights, for example with model.load_state_dict().",
    "gradients": "Drop gradients before the backward, for example with zero_grad().",
    "optimizer": "Call wake() and optimizer.load_state_dict() before the step.",
}
"""Per part, how a caller restores discarded values or avoids needing them (in error texts)."""

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _without_collections(method: _Method) -> _Method:
    """Runs a method untracked, and without garbage collection.

    Thousands of new objects would trigger collections, which scan all objects. Collection is
    enabled again wherever Ctrl-C interrupts: the nested `finally` blocks cover each other's lines.
    """
    plain = untracked(method)

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        """Calls the method, and then enables garbage collection if it was enabled before."""
        collects = gc.isenabled()
        try:
            try:
                gc.disable()
                return plain(*args, **kwargs)
            finally:
                if collects:
                    gc.enable()
        finally:
            if collects:
                gc.enable()

    return call  # type: ignore[return-value]


@dataclass(frozen=True)
class SleepReport:
    """Reports the data that a TrainingState call moved, and the memory in use afterwards."""

    asleep: dict[StatePart, int]
    """Offloaded bytes, by part."""
    bytes_copied: int
    """Bytes that this call copied."""
    seconds: float
    """Duration of this call."""
    device_bytes: int
    """Increase of free device memory in bytes, as the driver counts it; negative: a decrease."""
    host_bytes: int
    """Bytes of host memory, which is kept for reuse and is pinned if the device is a GPU."""
    reserved_bytes: int
    """Device bytes that torch's allocator reserves, for loaded tensors and for memory pools such as
    those of CUDA graphs."""
    left: tuple[str, ...]
    """Names of tensors that remain on the device: a part that remains shares their storage, their
    storage does not belong to torch's allocator, or their part was offloaded before."""

    def __str__(self) -> str:
        offloaded = ", ".join(f"{part} {text_of(count)}" for part, count in self.asleep.items())
        speed = self.bytes_copied / self.seconds / 1e9 if self.seconds else 0.0
        lines = [
            f"asleep     {offloaded or 'nothing'}",
            f"copied     {text_of(self.bytes_copied)} in {self.seconds:.3f} s, {speed:.1f} GB/s",
            f"device     {text_of(abs(self.device_bytes))}"
            f" {'taken' if self.device_bytes < 0 else 'freed'}",
            f"host       {text_of(self.host_bytes)}",
            f"reserved   {text_of(self.reserved_bytes)}",
            *(f"left       {name}" for name in self.left),
        ]
        return "\n".join(lines)


class TrainingState:
    """Offloads a model and its optimizers to host memory while other work uses the device.

    `sleep()` copies their tensors on the device to host memory, which is pinned for a GPU, and
    frees the device memory. `wake()` copies the tensors back. Meanwhile another program or model
    can use the memory, such as generation between two training phases in reinforcement learning.
    Host memory is allocated once and reused. Training continues unchanged: objects, names,
    param_groups, hooks, tied weights and tensors that autograd has saved remain the same. Training
    steps need no extra calls.

    While offloaded, tensors still report their device, but are mapped host memory. You can read,
    save, load and compute with them at the speed of the link (PCIe or NVLink-C2C). Views that you
    made before (`weight[:10]`) have no memory meanwhile and must not be used. A backward that
    needs offloaded tensors raises RuntimeError. Discarded tensors have no elements.

    Tensors wake at new addresses, so a CUDA graph that reads them must be captured again. With
    keep_addresses=True, tensors move only once, during their first sleep, and keep those addresses
    afterwards. Graphs captured after that sleep remain valid, but must not be replayed while the
    state is offloaded.

    Embedding rows and their optimizer state are not included, because their table stores them.
    Evicted modules of a Swapper are not included either. Call Swapper.evict() before sleep(), which
    raises ValueError for tensors of a Swapper on the device.

    Args:
        model: any module, including FSDP2, DistributedDataParallel, compiled and quantized modules.
        optimizer: one or several optimizers, or None. Wrappers from accelerate, Lightning and
            Fabric are accepted.
        device: the device whose tensors are offloaded. Default: the device of the model's first
            tensor on a GPU, or of its first tensor if none is on a GPU.
        keep_addresses: whether tensors have the same addresses whenever they are loaded. The first
            sleep moves them into ranges of CUDA's virtual memory. Parts that share memory must then
            sleep together, torch's memory statistics count offloaded tensors, and tensors cannot be
            shared with another process (CUDA IPC).

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the device is neither a CPU nor a GPU, or cannot keep addresses. Or `device` is
            None and the model has no tensor.
        RuntimeError: `device` is a GPU, and torch finds none.

    Example:
        >>> import torch, speedtorch
        >>> model = torch.nn.Linear(256, 256)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> state = speedtorch.TrainingState(model, optimizer)
        >>> state.sleep().asleep
        {'weights': 263168}
        >>> state.wake().asleep
        {}
        >>> model(torch.ones(256)).shape
        torch.Size([256])
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        *,
        device: torch.device | str | None = None,
        keep_addresses: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
        self._model = model
        self._optimizers = optimizers_within(given_optimizers(optimizer))
        self.device = exact_device(_device_of(model) if device is None else device)
        if keep_addresses:
            _check_can_keep(self.device)
        self._lock = RLock()
        self._parts = {
            part: StorageOffloader(self.device, keep_addresses=keep_addresses) for part in PARTS
        }
        self._discarded = {part: Discarded(self.device, _REMEDIES[part]) for part in PARTS}

    def __repr__(self) -> str:
        offloaded = [part for part, offloader in self._parts.items() if offloader.is_offloaded]
        owners = f"{type(self._model).__name__}, {len(self._optimizers)} optimizers"
        return f"{type(self).__name__}({owners}, device={self.device}, asleep={offloaded})"

    @property
    def is_asleep(self) -> bool:
        """Whether any part is offloaded."""
        return any(offloader.is_offloaded for offloader in self._parts.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory in use or kept for reuse."""
        return sum(offloader.host_nbytes for offloader in self._parts.values())

    @_without_collections
    def sleep(
        self, parts: Collection[StatePart] | None = None, *, discard: Collection[StatePart] = ()
    ) -> SleepReport:
        """Copies device memory to the host, frees it on the device, and waits for both.

        The call first waits for all queued work on the device. Frozen weights that are unchanged
        since the last wake are not copied again, unless the program still uses their host copies or
        other host memory is allocated. Parts that are offloaded already are unchanged.

        Args:
            parts: any of "weights" (parameters and buffers), "gradients" and "optimizer" (its
                state). Default: all three.
            discard: a subset of `parts` whose values are no longer needed. They are not copied and
                use no host memory. Their tensors have no elements while offloaded. After wake() all
                bits of the tensors are set, which is NaN in dtypes such as float32 and bfloat16.
                Load new values before the next forward or optimizer step, which otherwise raises
                RuntimeError. Buffers that state_dict() omits (persistent=False) are copied anyway.

        Returns:
            The copied bytes, the freed memory, and the names of tensors that remain on the device.

        Raises:
            ValueError: a part does not exist, or `discard` contains a part that `parts` lacks. A
                tensor belongs to a Swapper, is sparse, quantized, nested or a lazily conjugated
                view, was made in inference mode, or shares kept addresses with a part that remains.
                Nothing has changed.
            MemoryError, RuntimeError: the host has too little memory, or CUDA cannot pin more.
                Parts that did not fit remain on the device.
        """
        wanted, lost = _chosen("parts", parts), _chosen("discard", discard)
        if outside := [part for part in lost if part not in wanted]:
            raise ValueError(f"discard: expected some of `parts`, {wanted}, got {outside[0]!r}")
        with self._lock:
            begin, free = time.perf_counter(), self._free_bytes()
            copied = 0
            self._synchronize()
            for offloader in self._parts.values():
                if offloader.is_interrupted:  # by an error in the last call
                    offloader.load()
            if "weights" in wanted and not self._parts["weights"].is_offloaded:
                # Gathered FSDP2 parameters would miss writes to a shard while it is offloaded.
                for module in filter(fully_sharded, self._model.modules()):
                    module.reshard()  # type: ignore[operator]
            found = state_tensors(self._model, self._optimizers)
            storages, left = self._storages(found, wanted, lost)
            named = [item for tensors in found.parts.values() for item in tensors.items()]
            used = [untyped for _, value in named if (untyped := _storage_of(value)) is not None]
            names = {id(tensor): name for name, tensor in named}
            for part, of_part in storages.items():
                if part in lost:
                    users = self._model.modules() if part == "weights" else self._optimizers
                    self._discarded[part].add(of_part, names, users)
                self._parts[part].release_if_used(used)
                copied += self._parts[part].offload(of_part)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            return self._report(begin, free, copied, left)

    @_without_collections
    def wake(self, parts: Collection[StatePart] | None = None) -> SleepReport:
        """Copies offloaded parts back to the device, and waits for the copies.

        Values that were written while offloaded are copied too. A tensor that received other memory
        meanwhile, such as by `parameter.data = values` or `model.cpu()`, keeps that memory.

        Args:
            parts: the parts to load, named as in sleep(). Default: all that are offloaded.

        Raises:
            ValueError: a part does not exist.
            RuntimeError: the device has too little memory (torch.OutOfMemoryError). Parts that did
                not fit remain offloaded.
        """
        wanted = _chosen("parts", parts)
        with self._lock:
            begin, free = time.perf_counter(), self._free_bytes()
            self._synchronize()
            copied = sum(self._parts[part].load() for part in wanted)
            return self._report(begin, free, copied, [])

    @contextmanager
    def asleep(
        self, parts: Collection[StatePart] | None = None, *, discard: Collection[StatePart] = ()
    ) -> Iterator[SleepReport]:
        """Context manager that calls sleep() at entry and wake() at exit, also after an exception.

        Parts that were offloaded before remain offloaded. Arguments and exceptions are the same as
        in sleep() and wake().
        """
        loaded = [part for part in _chosen("parts", parts) if not self._parts[part].is_offloaded]
        try:
            yield self.sleep(parts, discard=discard)
        finally:
            self.wake(loaded)

    def release(self) -> None:
        """Frees the host memory that is kept for reuse; the next sleep() allocates it again.

        Offloaded parts keep their host memory.
        """
        with self._lock:
            for offloader in self._parts.values():
                if not offloader.is_offloaded:
                    offloader.release()

    def _storages(
        self, found: StateTensors, wanted: Collection[StatePart], lost: Collection[StatePart]
    ) -> tuple[dict[StatePart, list[OffloadedStorage]], list[str]]:
        """Returns the storages to offload by part, and the names of tensors that remain.

        A storage that two parts share belongs to the first part. The storage remains on the device
        if either part does.
        """
        offloaded = {id(tensor) for part in self._parts.values() for tensor in part.tensors}
        kept_on_device = {
            storage_id(untyped)
            for part in PARTS
            for tensor in (() if part in wanted else found.parts[part].values())
            if self._is_loaded(tensor, offloaded) and (untyped := _storage_of(tensor)) is not None
        }
        by_id: dict[int, OffloadedStorage] = {}
        storages: dict[StatePart, list[OffloadedStorage]] = {part: [] for part in wanted}
        left = []
        for part in wanted:
            is_lost, was_offloaded = part in lost, self._parts[part].is_offloaded
            for name, tensor in found.parts[part].items():
                if not self._is_loaded(tensor, offloaded):
                    continue
                untyped = _storage_of(tensor)
                if untyped is not None and not (nbytes := untyped.nbytes()):
                    continue
                if is_offloaded(tensor):
                    raise ValueError(
                        f"{name}: a Swapper offloads this tensor. Use its evict(), or close() it."
                    )
                check_dense(name, tensor)
                assert untyped is not None
                key = storage_id(untyped)
                if key in kept_on_device or not is_resizable(untyped) or was_offloaded:
                    left.append(name)
                    kept_on_device.add(key)
                    continue
                if (storage := by_id.get(key)) is None:
                    storage = by_id[key] = OffloadedStorage(untyped, nbytes)
                    storages[part].append(storage)
                is_kept = not is_lost or name in found.unsaved
                storage.add(tensor, is_kept=is_kept, is_frozen=name in found.frozen)
        more = {part: self._parts[part].memory.neighbours(own) for part, own in storages.items()}
        for part, neighbours in more.items():
            if any(storage_id(storage.untyped) in kept_on_device for storage in neighbours):
                raise ValueError(
                    f"keep_addresses: part {part!r} shares memory with a part that would remain on"
                    " the device. Pass both parts to sleep(), or neither."
                )
        # A storage that moved to another part is offloaded with the part that keeps its addresses.
        moved = {storage_id(storage.untyped) for group in more.values() for storage in group}
        for part, neighbours in more.items():
            own = [item for item in storages[part] if storage_id(item.untyped) not in moved]
            known = [by_id.get(storage_id(storage.untyped), storage) for storage in neighbours]
            storages[part] = own + known
        return {part: own for part, own in storages.items() if own}, left

    def _is_loaded(self, tensor: Tensor, offloaded: Collection[int]) -> bool:
        """Whether a tensor is on the device and not offloaded."""
        return tensor.device == self.device and id(tensor) not in offloaded

    def _free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 0

    def _reserved_bytes(self) -> int:
        if self.device.type != "cuda":
            return 0
        unmapped = sum(offloader.memory.unmapped_bytes for offloader in self._parts.values())
        return torch.cuda.memory_reserved(self.device) - unmapped

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _report(self, begin: float, free: int, copied: int, left: Iterable[str]) -> SleepReport:
        return SleepReport(
            asleep={name: part.nbytes for name, part in self._parts.items() if part.is_offloaded},
            bytes_copied=copied,
            seconds=time.perf_counter() - begin,
            device_bytes=self._free_bytes() - free,
            host_bytes=self.host_bytes,
            reserved_bytes=self._reserved_bytes(),
            left=tuple(left),
        )


def _device_of(model: nn.Module) -> torch.device:
    devices = [tensor.device for tensor in (*model.parameters(), *model.buffers())]
    if not devices:
        raise ValueError("model: it has no parameter and no buffer. Pass device=.")
    return next((device for device in devices if device.type == "cuda"), devices[0])


def _check_can_keep(device: torch.device) -> None:
    if device.type != "cuda":
        raise ValueError(f"keep_addresses: expected a state on a GPU, got device {str(device)!r}")
    if (backend := torch.cuda.get_allocator_backend()) != "native":
        raise ValueError(
            f"keep_addresses: torch's allocator {backend!r} has no memory pools. Use torch's native"
            " allocator (PYTORCH_ALLOC_CONF=backend:native), and do not replace it by another."
        )
    if (variable := "PYTORCH_NO_CUDA_MEMORY_CACHING") in os.environ:
        raise ValueError(
            f"keep_addresses: torch's allocator has no memory pools because {variable} is set."
            " Unset this environment variable."
        )


def _storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Returns the storage of a strided tensor, and None for other layouts."""
    return tensor.untyped_storage() if tensor.layout == torch.strided else None


def _chosen(argument: str, parts: Any) -> list[StatePart]:
    """Returns the named parts in the order of PARTS; raises ValueError for unknown names."""
    if parts is None:
        return list(PARTS)
    named = [parts] if isinstance(parts, str) else list(parts)
    if unknown := [part for part in named if part not in PARTS]:
        raise ValueError(f"{argument}: expected some of {list(PARTS)}, got {unknown[0]!r}")
    return [part for part in PARTS if part in named]

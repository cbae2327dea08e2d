"""TrainingState: all that a training has on a device, put to sleep in host memory and woken."""

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

from speedtorch.layers.discarded import Discarded
from speedtorch.layers.sleeping_storages import SleepingStorages
from speedtorch.layers.slot import Slot
from speedtorch.layers.state_tensors import PARTS, StatePart, StateTensors, state_tensors
from speedtorch.layers.unit import exact_device, is_of_unit
from speedtorch.memory.byte_count import text_of
from speedtorch.optim.wrappers import given_optimizers, optimizers_within
from speedtorch.torch_internals import as_plain, fully_sharded, storage_id

__all__ = ["SleepReport", "TrainingState"]

_REMEDIES: dict[StatePart, str] = {
    "weights": "wake() the state and load all of its weights, as model.load_state_dict() does",
    "gradients": "drop them before the backward, as zero_grad() does",
    "optimizer": "wake() the state and optimizer.load_state_dict() before the step",
}
"""What loads the values of a part again, or does without them."""

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _without_collections(method: _Method) -> _Method:
    """Lets a method move tensors without a graph, and without collections of cycles meanwhile.

    Thousands of records would set off collections, which look at all objects that there are. They
    go on wherever Ctrl-C interrupts this: each line of one `finally` is in the block of the other.
    """

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        collects = gc.isenabled()
        try:
            try:
                gc.disable()
                with as_plain(), torch.no_grad(), torch.inference_mode(False):
                    return method(*args, **kwargs)
            finally:
                if collects:
                    gc.enable()
        finally:
            if collects:
                gc.enable()

    return call  # type: ignore[return-value]


@dataclass(frozen=True)
class SleepReport:
    """What a call of a TrainingState has moved, and what is where."""

    asleep: dict[StatePart, int]
    """Bytes that sleep, by part."""
    bytes_copied: int
    """By this call."""
    seconds: float
    """That it took."""
    device_bytes: int
    """By how much the device's free memory has grown, as the driver counts it; below 0: shrunk."""
    host_bytes: int
    """Of host memory, which is kept for the next time and is pinned if the device is a GPU."""
    reserved_bytes: int
    """Of the device, which torch's allocator has by now: of tensors that are awake, and of memory
    pools, as CUDA graphs have them."""
    left: tuple[str, ...]
    """Tensors of the parts that stay on the device: their memory is shared with what stays, or is
    not of torch's allocator."""

    def __str__(self) -> str:
        asleep = ", ".join(f"{part} {text_of(count)}" for part, count in self.asleep.items())
        speed = self.bytes_copied / self.seconds / 1e9 if self.seconds else 0.0
        lines = [
            f"asleep     {asleep or 'nothing'}",
            f"copied     {text_of(self.bytes_copied)} in {self.seconds:.3f} s, {speed:.1f} GB/s",
            f"device     {text_of(abs(self.device_bytes))}"
            f" {'taken' if self.device_bytes < 0 else 'freed'}",
            f"host       {text_of(self.host_bytes)}",
            f"reserved   {text_of(self.reserved_bytes)}",
            *(f"left       {each}" for each in self.left),
        ]
        return "\n".join(lines)


class TrainingState:
    """A model and its optimizers, which sleep in host memory while the device does something else.

    `sleep()` brings all that they have on the device to pinned host memory in one sweep and gives
    the device's memory back; `wake()` brings it again. In between another program, or another model
    of this one, has the memory: in reinforcement learning the generation between two trainings. The
    host memory is made once. Training is as if nothing had happened: objects, names, param_groups,
    hooks, tied weights and what autograd has saved stay as they are, and there is nothing to do at
    each step.

    Tensors that sleep are tensors of their device still, in mapped host memory: they can be read,
    saved and loaded, and even be computed with, at the speed of the link. Views of their former
    memory that the program has made (`weight[:10]`) have no memory meanwhile, and must not be used;
    a backward that needs what sleeps raises RuntimeError.

    Tensors wake at other addresses: a CUDA graph that reads them must be captured anew. With
    keep_addresses=True they move once, when they sleep for the first time, and from then on wake
    where they were: graphs that are captured after that live on, and must not be replayed while the
    state sleeps.

    Rows of an Embedding are not part of it: they are in host memory already. Neither are units of a
    Swapper, which has its own evict().

    Args:
        model: any module: of FSDP2 and DistributedDataParallel, compiled or quantized as well.
        optimizer: one or several, also as accelerate, Lightning or Fabric wrap them; None: none.
        device: whose tensors sleep; by default that of the model's first tensor on a GPU.
        keep_addresses: whether tensors have the same addresses whenever they are awake: ranges of
            CUDA's virtual memory, into which the first sleep moves them. Parts that share memory
            then sleep together, torch's own figures count what sleeps, and another process cannot
            be given the tensors (CUDA IPC).

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: the device is none of a tensor's memory, the model has no tensor, or addresses
            cannot be kept there.

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
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"device: expected 'cuda' or 'cpu', got {str(self.device)!r}")
        if keep_addresses:
            _check_can_keep(self.device)
        self._turn = RLock()
        self._parts = {
            part: SleepingStorages(self.device, keep_addresses=keep_addresses) for part in PARTS
        }
        self._discarded = {part: Discarded(self.device, _REMEDIES[part]) for part in PARTS}

    def __repr__(self) -> str:
        asleep = [part for part, each in self._parts.items() if each.is_asleep]
        said = f"{type(self._model).__name__}, {len(self._optimizers)} optimizers"
        return f"{type(self).__name__}({said}, device={self.device}, asleep={asleep})"

    @property
    def is_asleep(self) -> bool:
        """Whether any part sleeps."""
        return any(each.is_asleep for each in self._parts.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that it has, asleep or awake."""
        return sum(each.host_nbytes for each in self._parts.values())

    @_without_collections
    def sleep(
        self, parts: Collection[StatePart] | None = None, *, discard: Collection[StatePart] = ()
    ) -> SleepReport:
        """Brings what is on the device to host memory, and frees the device's; waits for both.

        It waits for all that the device has to do. Of weights that are not trained, what has not
        changed since it came is not copied again. What sleeps already stays as it is.

        Args:
            parts: "weights" (parameters and buffers), "gradients" and "optimizer" (its state); by
                default all three.
            discard: parts, or some of them, whose values are not needed any more: they are not
                copied and take no host memory. Their tensors have no elements meanwhile; once they
                wake, all are NaN (of integers all bits are set), and must be loaded: a forward of
                the model, or a step of an optimizer, raises RuntimeError before. Buffers that no
                state_dict() has (persistent=False) are copied all the same.

        Returns:
            What was copied, the memory that is free now, and what had to stay.

        Raises:
            ValueError: there is no such part; a tensor belongs to a Swapper's unit, is sparse,
                quantized, nested or a lazily conjugated view, was made in inference mode, or shares
                kept addresses with a part that stays; nothing has changed.
            MemoryError, RuntimeError: the host has too little memory, or CUDA pins no more of it;
                the parts that did not fit are awake.
        """
        wanted, lost = _chosen("parts", parts), _chosen("discard", discard)
        if outside := [each for each in lost if each not in wanted]:
            raise ValueError(f"discard: {outside[0]!r} is none of the parts that sleep, {wanted}")
        with self._turn:
            begin, free = time.perf_counter(), self._free_bytes()
            copied = 0
            self._synchronize()
            for each in self._parts.values():
                if each.is_half_way:  # an error has interrupted the last call
                    each.wake()
            if "weights" in wanted and not self._parts["weights"].is_asleep:
                # What FSDP2 has gathered would not see a shard that is written asleep.
                for module in filter(fully_sharded, self._model.modules()):
                    module.reshard()  # type: ignore[operator]
            found = state_tensors(self._model, self._optimizers)
            slots, left = self._slots(found, wanted, lost)
            storages = [_storage_of(each) for of in found.of.values() for each in of.values()]
            names = {id(each): name for of in found.of.values() for name, each in of.items()}
            for part, of_part in slots.items():
                if part in lost:
                    users = self._model.modules() if part == "weights" else self._optimizers
                    self._discarded[part].add(of_part, names, users)
                self._parts[part].spare(each for each in storages if each is not None)
                copied += self._parts[part].sleep(of_part)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            return self._report(begin, free, copied, left)

    @_without_collections
    def wake(self, parts: Collection[StatePart] | None = None) -> SleepReport:
        """Brings what sleeps back to the device, and waits until it is there.

        Values that were written meanwhile come along. A tensor that was given other memory, as by
        `parameter.data = values` or `model.cpu()`, keeps that.

        Args:
            parts: as of sleep(); by default all that sleep.

        Raises:
            ValueError: there is no such part.
            RuntimeError: what torch raises where the device has too little memory
                (torch.OutOfMemoryError); the parts that did not fit sleep on.
        """
        wanted = _chosen("parts", parts)
        with self._turn:
            begin, free = time.perf_counter(), self._free_bytes()
            self._synchronize()
            copied = sum(self._parts[part].wake() for part in wanted)
            return self._report(begin, free, copied, [])

    @contextmanager
    def asleep(
        self, parts: Collection[StatePart] | None = None, *, discard: Collection[StatePart] = ()
    ) -> Iterator[SleepReport]:
        """Lets parts sleep within, and wakes them afterwards, also after an error.

        Parts that sleep already sleep on.

        Args and errors are those of sleep() and wake().
        """
        falling = [part for part in _chosen("parts", parts) if not self._parts[part].is_asleep]
        try:
            yield self.sleep(parts, discard=discard)
        finally:
            self.wake(falling)

    def release(self) -> None:
        """Gives the host memory back that is kept for the next time.

        What sleeps keeps its own; sleep() makes it anew.
        """
        with self._turn:
            for part in self._parts.values():
                if not part.is_asleep:
                    part.release()

    def _slots(
        self, found: StateTensors, wanted: Collection[StatePart], lost: Collection[StatePart]
    ) -> tuple[dict[StatePart, list[Slot]], list[str]]:
        """What is to sleep of each part, and names of what stays.

        Memory that tensors of two parts share belongs to the first of them, and stays where one of
        them does.
        """
        sleeping = {id(each) for part in self._parts.values() for each in part.tensors}
        rest = [each for part in PARTS if part not in wanted for each in found.of[part].values()]
        stay = {
            storage_id(storage)
            for each in rest
            if self._is_awake(each, sleeping) and (storage := _storage_of(each)) is not None
        }
        by_storage: dict[int, Slot] = {}
        slots: dict[StatePart, list[Slot]] = {part: [] for part in wanted}
        left = []
        for part in wanted:
            is_lost, is_asleep = part in lost, self._parts[part].is_asleep
            for name, each in found.of[part].items():
                if not self._is_awake(each, sleeping):
                    continue
                storage = _storage_of(each)
                if storage is not None and not (nbytes := storage.nbytes()):
                    continue
                _check(name, each)
                assert storage is not None
                key = storage_id(storage)
                if key in stay or not storage.resizable() or is_asleep:
                    left.append(name)
                    stay.add(key)
                    continue
                if (slot := by_storage.get(key)) is None:
                    slot = by_storage[key] = Slot(storage, nbytes)
                    slots[part].append(slot)
                is_kept = not is_lost or name in found.unsaved
                slot.add(each, is_kept=is_kept, is_frozen=name in found.frozen)
        more = {part: self._parts[part].memory.others(some) for part, some in slots.items()}
        for part, others in more.items():
            if any(storage_id(each.storage) in stay for each in others):
                raise ValueError(
                    f"keep_addresses: memory of the {part} is also that of a part that stays; let"
                    " both sleep, or neither"
                )
        # A storage that another part has by now sleeps with the addresses that it has.
        moved = {storage_id(each.storage) for others in more.values() for each in others}
        for part, others in more.items():
            own = [each for each in slots[part] if storage_id(each.storage) not in moved]
            known = [by_storage.get(storage_id(each.storage), each) for each in others]
            slots[part] = own + known
        return {part: some for part, some in slots.items() if some}, left

    def _is_awake(self, tensor: Tensor, sleeping: Collection[int]) -> bool:
        """Whether a tensor is on the device and may have memory there."""
        return tensor.device == self.device and id(tensor) not in sleeping

    def _free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 0

    def _reserved_bytes(self) -> int:
        if self.device.type != "cuda":
            return 0
        absent = sum(each.memory.absent_bytes for each in self._parts.values())
        return torch.cuda.memory_reserved(self.device) - absent

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _report(self, begin: float, free: int, copied: int, left: Iterable[str]) -> SleepReport:
        return SleepReport(
            asleep={p: each.nbytes for p, each in self._parts.items() if each.is_asleep},
            bytes_copied=copied,
            seconds=time.perf_counter() - begin,
            device_bytes=self._free_bytes() - free,
            host_bytes=self.host_bytes,
            reserved_bytes=self._reserved_bytes(),
            left=tuple(left),
        )


def _device_of(model: nn.Module) -> torch.device:
    devices = [each.device for each in (*model.parameters(), *model.buffers())]
    if not devices:
        raise ValueError("model: it has no parameter and no buffer; give device=")
    return next((each for each in devices if each.type == "cuda"), devices[0])


def _check_can_keep(device: torch.device) -> None:
    if device.type != "cuda":
        raise ValueError(f"keep_addresses: expected a GPU's state, got one on {str(device)!r}")
    if (backend := torch.cuda.get_allocator_backend()) != "native":
        raise ValueError(
            f"keep_addresses: torch's allocator is {backend!r}, which has no memory pools; set"
            " PYTORCH_ALLOC_CONF=backend:native"
        )
    if (variable := "PYTORCH_NO_CUDA_MEMORY_CACHING") in os.environ:
        raise ValueError(
            f"keep_addresses: {variable} is set, with which torch's allocator has no memory pools:"
            " unset it"
        )


def _storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The memory of a dense tensor."""
    return tensor.untyped_storage() if tensor.layout == torch.strided else None


def _chosen(argument: str, parts: Any) -> list[StatePart]:
    """The parts that are named, in their order."""
    if parts is None:
        return list(PARTS)
    named = [parts] if isinstance(parts, str) else list(parts)
    if unknown := [each for each in named if each not in PARTS]:
        raise ValueError(f"{argument}: expected some of {list(PARTS)}, got {unknown[0]!r}")
    return [part for part in PARTS if part in named]


def _check(name: str, tensor: Tensor) -> None:
    """Raises ValueError for a tensor that cannot be let see other memory."""
    if is_of_unit(tensor):
        raise ValueError(f"{name}: it belongs to a unit of a Swapper: use its evict(), or close it")
    if tensor.layout != torch.strided:
        raise ValueError(
            f"{name}: it is a sparse tensor ({tensor.layout}), whose parts torch does not show:"
            " drop it before (zero_grad()), or leave its part awake"
        )
    if tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"{name}: expected elements as they are in memory, got a tensor that is quantized,"
            " nested, conjugated or negated: resolve that (dequantize(), resolve_conj(),"
            " resolve_neg()), or leave its part awake"
        )
    if tensor.is_inference():
        raise ValueError(
            f"{name}: it was made in torch.inference_mode(), where torch does not let its memory be"
            " changed; make the model outside"
        )

"""Tensors packed one after another into one run of bytes, on the host and on a device.

A slab is a layout, and two memories of that layout: a host slab, which is always there, and a
device slab, whose storage is emptied and filled again and stays the same object all the while, so
that views of it which autograd has saved are right again once it is filled.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import attrgetter, eq, methodcaller

import torch
from torch import Tensor

from speedtorch.layers.access_tracker import is_plain_tensor
from speedtorch.layers.host_slab import aligned, copy_spans, elements, host_bytes
from speedtorch.layers.transfer_stats import Memory, TransferStats
from speedtorch.memory.side_stream import SharedSideStream
from speedtorch.torch_internals import (
    current_stream,
    is_wrapped,
    storage_id,
    storage_uses,
    unwrapped,
)

__all__ = ["Memory", "Slab", "check_packable", "extent"]

# Where torch's own allocators begin a tensor at the finest (CUDA: 512, CPU: 64): as much as the
# widest loads, cuBLAS and TMA descriptors ask for, and little beside a parameter's kilobytes.
ALIGNMENT = 256
# What tensors in common memory keep of their address: that of the widest element, complex128.
_ELEMENT_ALIGNMENT = 16

_SHAPE, _STRIDE = attrgetter("shape"), methodcaller("stride")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor is in a slab: bytes from the slab's begin on, in the bytes of a slot."""

    begin: int
    nbytes: int
    slot: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def is_like(self, tensor: Tensor) -> bool:
        """Whether a dense tensor could lie there."""
        return (
            tensor.dtype is self.dtype
            and tensor.shape == self.size
            and tensor.stride() == self.stride
        )


def extent(tensor: Tensor) -> int:
    """Bytes from a tensor's lowest element to its highest; those of one for none.

    What lies between elements that are not dense counts as well. What has no elements has an
    address, too, and torch.load() reads storages of whole elements alone.
    """
    if tensor.numel() == 0:
        return tensor.itemsize
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    highest: int = sum((size - 1) * stride for size, stride in steps)
    return (highest + 1) * tensor.itemsize


def _address(tensor: Tensor) -> int:
    """Of its first element; data_ptr() is 0 where there is none."""
    start: int = tensor.untyped_storage().data_ptr()
    return start + int(tensor.storage_offset()) * tensor.itemsize


def _no_bytes(device: torch.device) -> torch.UntypedStorage:
    return torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()


def check_packable(name: str, tensor: object) -> None:
    """Raises TypeError, ValueError for what is more, or less, than elements in memory."""
    if not is_plain_tensor(tensor):
        kind = type(tensor)
        raise TypeError(
            f"{name}: expected a plain tensor, got {kind.__module__}.{kind.__qualname__}, whose"
            " elements a copy of bytes may not be"
        )
    assert isinstance(tensor, Tensor)
    if tensor.layout != torch.strided or tensor.is_quantized:
        what = "a quantized tensor" if tensor.is_quantized else f"layout {tensor.layout}"
        raise ValueError(f"{name}: expected a dense tensor (torch.strided), got {what}")
    if tensor.device.type == "meta":
        raise ValueError(
            f"{name}: it is on the meta device and has no elements; to_empty(device='cpu') or"
            " load_state_dict(..., assign=True) first"
        )
    if tensor.is_inference():
        raise ValueError(
            f"{name}: it was made in torch.inference_mode(), where torch does not count changes;"
            " clone() it outside"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{name}: a lazily conjugated or negated view; resolve_conj() first")


def _slots(tensors: Mapping[str, Tensor]) -> Iterable[dict[str, tuple[int, int]]]:
    """The names of tensors that share memory together: `{name: (address, bytes)}` of each slot."""
    owner: dict[str, str] = {name: name for name in tensors}
    spans = {name: (_address(tensor), extent(tensor)) for name, tensor in tensors.items()}
    # Tensors of one device in the order of their addresses: neighbours alone can overlap.
    ranked = sorted(tensors, key=lambda name: (str(tensors[name].device), spans[name]))
    first, end = "", 0
    for name in ranked:
        begin, nbytes = spans[name]
        if tensors[name].numel() == 0:
            continue
        if not first or tensors[name].device != tensors[first].device or begin >= end:
            first, end = name, 0
        owner[name], end = first, max(end, begin + nbytes)
    slots: dict[str, dict[str, tuple[int, int]]] = {}
    for name in tensors:  # in the order of their first names
        slots.setdefault(owner[name], {})[name] = spans[name]
    return slots.values()


def _gone(coming: SharedSideStream, device: torch.device, process: int) -> None:
    """Orders copies into the memory of a dropped slab behind the slab's last use."""
    if os.getpid() == process:  # no forked child, where CUDA takes no call
        with coming.after_current(device):
            pass


class Slab:
    """A layout of named tensors, its host memory, and its device memory while there is any.

    Tensors of any dtype, shape and strides keep these; memory that several of them share is there
    once. The bytes are not copied yet: `take` does that.

    On a GPU copies go beside the current stream, both ways at once, and the device slab's memory is
    of the stream that brings it. What uses the device slab waits for it by `coming.join()`, what
    reads the host slab by `leaving.finish()`; `empty` frees memory behind its last use.

    The tensors are packed in their order. On the device "cpu" the device slab is a second host
    memory. What is in the slab `before`, which fits them, stays where it is, with its bytes on the
    host, and the rest comes after it; the device slab has the same storage, empty. Making one
    raises as check_packable, and MemoryError if the host has too little memory.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        before: Slab | None = None,
        traffic: TransferStats | None = None,
    ) -> None:
        self.traffic = traffic or TransferStats()
        self.coming = SharedSideStream("layers coming", is_timed=True)
        """Of copies to the device slab."""
        self.leaving = SharedSideStream("layers leaving", is_timed=True)
        """Of copies to the host slab."""
        self.places: dict[str, _Place] = {} if before is None else dict(before.places)
        """Of all tensors in the layout, by name."""
        self._slots: list[tuple[int, int]] = [] if before is None else list(before._slots)
        end = self._slots[-1][1] if self._slots else 0
        tensors = {name: each for name, each in tensors.items() if name not in self.places}
        for name, tensor in tensors.items():
            check_packable(name, tensor)
        for slot in _slots(tensors):
            lowest = min(start for start, _ in slot.values())
            begin = aligned(end, ALIGNMENT)
            shift = lowest % _ELEMENT_ALIGNMENT if len(slot) > 1 else 0
            for name, (start, nbytes) in slot.items():
                at = begin + shift + start - lowest
                each = tensors[name]
                self.places[name] = _Place(
                    at, nbytes, len(self._slots), tuple(each.shape), each.stride(), each.dtype
                )
                end = max(end, at + nbytes)
            self._slots.append((begin, end))
        self.nbytes = aligned(end, ALIGNMENT)
        """Of either memory."""
        self.device = device
        self.host = host_bytes(self.nbytes, device)
        """`[nbytes]`, uint8."""
        # Nothing where a tensor without elements, which has no address, has a place.
        is_known = all(0 not in each.size for each in self.places.values())
        self._order = self.places if is_known else {}
        ordered = self._order.values()
        self._begins = [each.begin for each in ordered]
        self._dtypes = [each.dtype for each in ordered]
        self._sizes = [each.size for each in ordered]
        self._strides = [each.stride for each in ordered]
        if before is not None:
            before.leaving.finish()
            self.host[: before.nbytes].copy_(before.host)
        # A storage for each slot, so that a file of a view has the bytes of its slot alone.
        bytes_of_host = self.host.numpy()
        self._host_storages = [
            torch.from_numpy(bytes_of_host[begin:end]).untyped_storage()
            for begin, end in self._slots
        ]
        self._storage: torch.UntypedStorage = (
            _no_bytes(device) if before is None else before._storage
        )
        self.is_filled = False
        """Whether the device slab has its bytes, or is about to."""
        if device.type == "cuda":
            gone = weakref.finalize(self, _gone, self.coming, device, os.getpid())
            gone.atexit = False
        self._views: dict[Memory, dict[str, Tensor]] = {memory: {} for memory in Memory}
        self._whole: Tensor | None = None
        """The bytes of the device slab."""

    @property
    def device_bytes(self) -> int:
        """Bytes that the device slab takes now: all or none."""
        return self._storage.nbytes()

    @property
    def missing_bytes(self) -> int:
        """Bytes that the device slab needs before it can be filled: all or none."""
        return 0 if self.device_bytes else self.nbytes

    def where(self, tensors: Mapping[str, Tensor]) -> dict[str, Memory | None]:
        """In which of the memories each is the view of that name; None: it is no such view."""
        memory, values = self.memory_at(tensors), tensors.values()
        # All for one thing after another, which takes less time than one by one, and no lists of
        # thousands of tuples, which would set off collections of cycles.
        if (
            memory is not None
            and [each.dtype for each in values] == self._dtypes
            and all(map(eq, map(_SHAPE, values), self._sizes))
            and all(map(eq, map(_STRIDE, values), self._strides))
        ):
            return dict.fromkeys(tensors, memory)
        host, device = self.host.data_ptr(), self._storage.data_ptr()
        filled = self.device_bytes  # less than all where a larger slab was made around a loaded one
        found: dict[str, Memory | None] = {}
        for name, tensor in tensors.items():
            memory, place = None, self.places.get(name)
            if place is not None and tensor.layout is torch.strided:
                # data_ptr() is 0 of a tensor without elements.
                address = (tensor.data_ptr() or _address(tensor)) - place.begin
                if address == host:
                    memory = Memory.HOST
                elif address == device and place.begin + place.nbytes <= filled:
                    memory = Memory.DEVICE
                if memory is not None and not place.is_like(tensor):
                    memory = None
            found[name] = memory
        return found

    def memory_at(self, tensors: Mapping[str, Tensor]) -> Memory | None:
        """The memory in which all places have the addresses of these tensors; None: not known.

        What a tensor is like there is not looked at.
        """
        order = self._order
        if not order or len(tensors) != len(order) or [*tensors] != [*order]:
            return None
        try:
            pointers = [each.data_ptr() for each in tensors.values()]
        except RuntimeError:
            if all(each.layout is torch.strided for each in tensors.values()):
                raise
            return None  # a sparse tensor has none
        base = pointers[0] - self._begins[0]
        is_host = base == self.host.data_ptr()
        if not is_host and (base != self._storage.data_ptr() or self.device_bytes != self.nbytes):
            return None
        if [pointer - base for pointer in pointers] != self._begins:
            return None
        return Memory.HOST if is_host else Memory.DEVICE

    def fits(self, tensors: Mapping[str, Tensor], at: Mapping[str, Memory | None]) -> bool:
        """Whether those with a place are like it, and memory is shared as in the layout.

        Raises TypeError, ValueError if one of them cannot be packed, as when a slab is made.
        """
        for name, tensor in tensors.items():
            if at[name] is None:
                check_packable(name, tensor)
                if name in self.places and not self.places[name].is_like(tensor):
                    return False
        for slot in _slots(tensors):
            placed = {
                (place.slot, place.begin - start) if (place := self.places.get(name)) else None
                for name, (start, _) in slot.items()
            }
            if len(placed) > 1:
                return False
        return True

    def view(self, name: str, memory: Memory) -> Tensor:
        """The tensor of that name in one of the memories; the device slab must have been made."""
        made = self._views[memory]
        if name not in made:
            place = self.places[name]
            storage, begin = self._storage, place.begin
            if memory is Memory.HOST:
                storage = self._host_storages[place.slot]
                begin -= self._slots[place.slot][0]
            made[name] = elements(storage, begin, place.size, place.stride, place.dtype)
        return made[name]

    def take(self, name: str, tensor: Tensor) -> None:
        """Copies a tensor that is like the one of that name from elsewhere to the host slab."""
        if tensor.numel() == 0:
            return
        place, begin = self.places[name], int(tensor.storage_offset()) * tensor.itemsize
        source = elements(tensor.untyped_storage(), begin, (place.nbytes,))
        self.host[place.begin : place.begin + place.nbytes].copy_(source)

    def copy_to(
        self,
        memory: Memory,
        changed: Collection[str],
        settled: Collection[str],
        after: torch.cuda.Event | None = None,
    ) -> None:
        """Copies what has changed in the other memory, in one piece unless something is in between.

        What has not changed and lies between is copied too; what is `settled` is current in
        `memory` alone, and not written. A device slab without memory is given that, and gets all.
        It is read `after` an event; None: after all that the current stream has by now.
        """
        comes = memory is Memory.DEVICE
        is_new = comes and not self.is_filled
        must = self.places if is_new else changed
        if settled or len(must) < len(self.places):
            spans = self._spans(must, settled)
        else:
            spans = [(0, self.nbytes)]
        if not spans or not self.nbytes:
            return
        if is_new:  # no stream has used it since it was emptied
            turn = self.coming.after(self.device)
        elif comes:
            turn = self.coming.after_current(self.device)
        else:
            if after is None:
                self.coming.join()
            turn = self._beside(self.leaving, after, self.coming.end)
        with turn as stream:
            if self.device_bytes != self.nbytes:
                # Torch gives it what the same stream had before, in whose order it is used again.
                self._storage.resize_(self.nbytes)
            if self._whole is None:
                self._whole = elements(self._storage, 0, (self.nbytes,))
            begun = self.traffic.begin(stream)
            copy_spans(self.host, self._whole, spans, to=memory)
        copied = sum([end - begin for begin, end in spans])
        side = self.coming if comes else self.leaving
        self.traffic.end(begun, side.end, copied, memory)
        self.is_filled = self.is_filled or comes

    def empty(self, after: torch.cuda.Event | None = None) -> int:
        """Frees the device slab's memory; returns how many bytes that were.

        `after`: as of copy_to, for what comes to lie there.
        """
        self.is_filled = False
        freed = self.device_bytes
        if freed:
            with self._beside(self.coming, after):
                self._storage.resize_(0)
        return freed

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor has memory of the device slab."""
        while is_wrapped(tensor):
            tensor = unwrapped(tensor)
        is_dense = is_plain_tensor(tensor) and tensor.layout == torch.strided
        return is_dense and storage_id(tensor.untyped_storage()) == storage_id(self._storage)

    @property
    def is_held(self) -> bool:
        """Whether a graph or the program has a view of the device slab."""
        own = len(self._views[Memory.DEVICE]) + (self._whole is not None)
        return storage_uses(self._storage) > own + 1

    def held_by(self, members: Sequence[Tensor]) -> dict[weakref.ref[Tensor], str]:
        """Which tensors of Python programs but these are views of the device slab, with names.

        It looks at all objects that there are.
        """
        own = {id(view) for view in [self._whole, *self._views[Memory.DEVICE].values(), *members]}
        found = [
            each
            for each in gc.get_objects()
            if is_plain_tensor(each) and id(each) not in own and self.has(each)
        ]
        return {weakref.ref(each): self._described(each) for each in found}

    def _described(self, tensor: Tensor) -> str:
        begin = tensor.storage_offset() * tensor.itemsize
        of = [n for n, p in self.places.items() if p.begin <= begin < p.begin + max(1, p.nbytes)]
        return f"a {list(tensor.shape)} {str(tensor.dtype)[6:]} view of {of[0] if of else 'it'}"

    def leave(self) -> None:
        """Leaves the device slab to the views of it that are kept; the next one is another."""
        if self._whole is not None and self._whole.is_cuda:
            # The views are used on the current stream: the memory is reused behind their last use.
            self._whole.record_stream(current_stream(self.device))
        self._storage = _no_bytes(self.device)
        self._views[Memory.DEVICE], self._whole = {}, None
        self.is_filled = False

    def _beside(
        self,
        stream: SharedSideStream,
        after: torch.cuda.Event | None,
        *more: torch.cuda.Event | None,
    ) -> AbstractContextManager[torch.cuda.Stream | None]:
        if after is None:
            return stream.after_current(self.device)
        return stream.after(self.device, after, *more)

    def _spans(self, changed: Iterable[str], settled: Iterable[str]) -> list[tuple[int, int]]:
        """The fewest spans with all slots that must be copied, and none that must not."""
        must = {self.places[name].slot for name in changed}
        barred = {self.places[name].slot for name in settled}
        spans: list[tuple[int, int]] = []
        is_open = False
        for number, (begin, end) in enumerate(self._slots):
            if number in barred:
                is_open = False
            elif number in must:
                spans[-1 if is_open else len(spans) :] = [(spans[-1][0] if is_open else begin, end)]
                is_open = True
        return spans

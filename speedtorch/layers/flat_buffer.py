"""FlatBuffer: tensors packed into one flat buffer, on the host and on a device.

A flat buffer is a layout with two memories. The host buffer always exists. The device buffer's
storage is emptied and filled again, but remains the same object, unless the program holds views of
it at an eviction. Views that autograd has saved are therefore valid again once it is filled.
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
from speedtorch.layers.host_buffer import aligned, copy_spans, elements, host_bytes
from speedtorch.layers.transfer_stats import Memory, TransferStats
from speedtorch.memory.side_stream import SharedSideStream
from speedtorch.torch_internals import (
    current_stream,
    is_resizable,
    is_wrapped,
    storage_id,
    storage_uses,
    unwrapped,
)

__all__ = ["FlatBuffer", "Memory", "check_dense", "check_packable", "segments_of"]

# Between the alignments of torch's allocators (CUDA: 512, CPU: 64). Enough for the widest loads,
# cuBLAS and TMA descriptors, and small compared with a parameter's kilobytes.
ALIGNMENT = 256
# Tensors that share memory keep their address modulo the widest element size, complex128.
_ELEMENT_ALIGNMENT = 16

_SHAPE, _STRIDE = attrgetter("shape"), methodcaller("stride")


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of a tensor in a buffer: its segment, and its byte offset from the buffer's begin."""

    begin: int
    nbytes: int
    segment: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def is_like(self, tensor: Tensor) -> bool:
        """Whether a dense tensor has the dtype, shape and strides of this place."""
        return (
            tensor.dtype is self.dtype
            and tensor.shape == self.size
            and tensor.stride() == self.stride
        )


def _extent(tensor: Tensor) -> int:
    """Bytes from a tensor's lowest element to its highest, including gaps between elements.

    A tensor without elements counts as one element: such a tensor still needs an address, and
    torch.load() reads only storages of whole elements.
    """
    if tensor.numel() == 0:
        return tensor.itemsize
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    highest: int = sum((size - 1) * stride for size, stride in dims)
    return (highest + 1) * tensor.itemsize


def _address(tensor: Tensor) -> int:
    """Address of the first element; without elements, where it would be (data_ptr() is 0)."""
    start: int = tensor.untyped_storage().data_ptr()
    return start + int(tensor.storage_offset()) * tensor.itemsize


def _no_bytes(device: torch.device) -> torch.UntypedStorage:
    return torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()


def check_packable(name: str, tensor: object) -> None:
    """Raises TypeError or ValueError unless a copy of a tensor's bytes copies its values."""
    if not is_plain_tensor(tensor):
        kind = type(tensor)
        raise TypeError(
            f"{name}: expected a plain tensor, got {kind.__module__}.{kind.__qualname__}. Only"
            " bytes are copied, and a subclass may keep elements elsewhere."
        )
    assert isinstance(tensor, Tensor)
    check_dense(name, tensor)
    if tensor.device.type == "meta":
        raise ValueError(
            f"{name}: the tensor is on the meta device and has no elements. Call"
            " to_empty(device='cpu') or load_state_dict(..., assign=True) first."
        )


def check_dense(name: str, tensor: Tensor) -> None:
    """Raises ValueError unless a tensor's memory is known to torch, and has its values."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        is_strided = tensor.layout == torch.strided
        form = "a quantized or nested tensor" if is_strided else f"layout {tensor.layout}"
        raise ValueError(
            f"{name}: expected a dense tensor, got {form}. Convert or drop the tensor first, for"
            " example with dequantize() or zero_grad()."
        )
    if tensor.is_inference():
        raise ValueError(
            f"{name}: torch does not count changes of tensors that were created in"
            " torch.inference_mode(). Replace the tensor with its clone() outside of that mode."
        )
    if tensor.is_conj() or tensor.is_neg():
        view = "a lazily conjugated or negated view"
        raise ValueError(f"{name}: got {view}. Call resolve_conj().resolve_neg() first.")


def segments_of(tensors: Mapping[str, Tensor]) -> Iterable[dict[str, tuple[int, int]]]:
    """Groups tensors that share memory: `{name: (address, bytes)}` for each segment."""
    owner: dict[str, str] = {name: name for name in tensors}
    spans = {name: (_address(tensor), _extent(tensor)) for name, tensor in tensors.items()}
    # Sorted by device and address: only neighbours can overlap.
    first, end = "", 0
    for name in sorted(tensors, key=lambda name: (str(tensors[name].device), spans[name])):
        begin, nbytes = spans[name]
        if tensors[name].numel() == 0:
            continue
        if not first or tensors[name].device != tensors[first].device or begin >= end:
            first, end = name, 0
        owner[name], end = first, max(end, begin + nbytes)
    segments: dict[str, dict[str, tuple[int, int]]] = {}
    for name in tensors:  # in the order of their first names
        segments.setdefault(owner[name], {})[name] = spans[name]
    return segments.values()


def _order_reuse(load_stream: SharedSideStream, device: torch.device, process: int) -> None:
    """Orders copies into the memory of a dropped buffer behind the buffer's last use."""
    if os.getpid() == process:  # CUDA calls fail in a forked child
        with load_stream.after_current(device):
            pass


class FlatBuffer:
    """A layout of named tensors, its host memory, and its device memory while loaded.

    Tensors keep their dtype, shape and strides. Memory that several tensors share is stored once.
    The constructor does not copy the tensors' bytes; `store` does.

    On a GPU, copies run on side streams, one for each direction. The device buffer's memory belongs
    to `load_stream`. Call `load_stream.join()` before using the device buffer, and
    `write_back_stream.finish()` before reading the host buffer. `empty` frees memory after its last
    use.

    The tensors are packed in their order. On the device "cpu", the device buffer is a second host
    memory. Tensors of the buffer `before`, which must fit, keep their places and host bytes, and
    new tensors follow them. The new buffer uses the device storage of `before`, and is not filled.
    The constructor raises like check_packable, and MemoryError if the host has too little memory.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        before: FlatBuffer | None = None,
        traffic: TransferStats | None = None,
    ) -> None:
        self.traffic = traffic or TransferStats()
        self.load_stream = SharedSideStream("layers load", is_timed=True)
        """Side stream for copies to the device buffer."""
        self.write_back_stream = SharedSideStream("layers write back", is_timed=True)
        """Side stream for copies to the host buffer."""
        self.places: dict[str, _Place] = {} if before is None else dict(before.places)
        """Places of all tensors in the layout, by name."""
        self._segments: list[tuple[int, int]] = [] if before is None else list(before._segments)
        end = self._segments[-1][1] if self._segments else 0
        tensors = {name: tensor for name, tensor in tensors.items() if name not in self.places}
        for name, tensor in tensors.items():
            check_packable(name, tensor)
        for number, segment in enumerate(segments_of(tensors), len(self._segments)):
            lowest = min(start for start, _ in segment.values())
            begin = aligned(end, ALIGNMENT)
            shift = lowest % _ELEMENT_ALIGNMENT if len(segment) > 1 else 0
            for name, (start, nbytes) in segment.items():
                offset, tensor = begin + shift + start - lowest, tensors[name]
                self.places[name] = _Place(
                    offset, nbytes, number, tuple(tensor.shape), tensor.stride(), tensor.dtype
                )
                end = max(end, offset + nbytes)
            self._segments.append((begin, end))
        self.nbytes = aligned(end, ALIGNMENT)
        """Bytes of each memory."""
        self.device = device
        self.host = host_bytes(self.nbytes, device)
        """`[nbytes]`, uint8."""
        # Empty if a tensor has no elements and thus no address: memory_at() cannot compare it.
        is_known = all(0 not in place.size for place in self.places.values())
        self._order = self.places if is_known else {}
        ordered = self._order.values()
        self._begins = [place.begin for place in ordered]
        self._dtypes = [place.dtype for place in ordered]
        self._sizes = [place.size for place in ordered]
        self._strides = [place.stride for place in ordered]
        if before is not None:
            before.write_back_stream.finish()
            self.host[: before.nbytes].copy_(before.host)
        self._host_storages = self._new_host_storages()
        self._storage: torch.UntypedStorage = (
            _no_bytes(device) if before is None else before._storage
        )
        self.is_filled = False
        """Whether the bytes of the device buffer are copied, or their copy is queued."""
        if device.type == "cuda":
            finalizer = weakref.finalize(self, _order_reuse, self.load_stream, device, os.getpid())
            finalizer.atexit = False
        self._views: dict[Memory, dict[str, Tensor]] = {memory: {} for memory in Memory}
        self._whole: Tensor | None = None
        """The bytes of the device buffer."""

    def _new_host_storages(self) -> list[torch.UntypedStorage]:
        """A storage for each segment, because torch.save() of a view writes its whole storage."""
        bytes_of_host = self.host.numpy()
        return [
            torch.from_numpy(bytes_of_host[begin:end]).untyped_storage()
            for begin, end in self._segments
        ]

    @property
    def device_bytes(self) -> int:
        """Bytes of the device buffer now: all or none."""
        return self._storage.nbytes()

    @property
    def missing_bytes(self) -> int:
        """Bytes to allocate before the device buffer can be filled: `nbytes`, or 0 if allocated."""
        return 0 if self.device_bytes else self.nbytes

    def where(self, tensors: Mapping[str, Tensor]) -> dict[str, Memory | None]:
        """Finds, for each tensor, the memory whose view of that name it is; None: neither."""
        memory, values = self.memory_at(tensors), tensors.values()
        # Comparing one property of all tensors at a time is faster than tensor by tensor, and lists
        # of thousands of tuples would trigger garbage collections.
        if (
            memory is not None
            and [tensor.dtype for tensor in values] == self._dtypes
            and all(map(eq, map(_SHAPE, values), self._sizes))
            and all(map(eq, map(_STRIDE, values), self._strides))
        ):
            return dict.fromkeys(tensors, memory)
        host, device = self.host.data_ptr(), self._storage.data_ptr()
        filled = self.device_bytes  # less than nbytes if a larger buffer replaced a loaded one
        where: dict[str, Memory | None] = {}
        for name, tensor in tensors.items():
            memory, place = None, self.places.get(name)
            if place is not None and tensor.layout is torch.strided:
                # data_ptr() is 0 for a tensor without elements.
                address = (tensor.data_ptr() or _address(tensor)) - place.begin
                if address == host:
                    memory = Memory.HOST
                elif address == device and place.begin + place.nbytes <= filled:
                    memory = Memory.DEVICE
                if memory is not None and not place.is_like(tensor):
                    memory = None
            where[name] = memory
        return where

    def memory_at(self, tensors: Mapping[str, Tensor]) -> Memory | None:
        """The memory in which all tensors have the addresses of their places; None: unknown.

        Only addresses are compared, not dtypes, shapes or strides.
        """
        order = self._order
        if not order or len(tensors) != len(order) or [*tensors] != [*order]:
            return None
        try:
            pointers = [tensor.data_ptr() for tensor in tensors.values()]
        except RuntimeError:
            if all(tensor.layout is torch.strided for tensor in tensors.values()):
                raise
            return None  # a sparse tensor has no data_ptr()
        base = pointers[0] - self._begins[0]
        is_host = base == self.host.data_ptr()
        if not is_host and (base != self._storage.data_ptr() or self.device_bytes != self.nbytes):
            return None
        if [pointer - base for pointer in pointers] != self._begins:
            return None
        return Memory.HOST if is_host else Memory.DEVICE

    def fits(self, tensors: Mapping[str, Tensor], where: Mapping[str, Memory | None]) -> bool:
        """Whether tensors match their places in the layout, and share memory as the layout does.

        Raises TypeError or ValueError like check_packable if a tensor cannot be packed.
        """
        for name, tensor in tensors.items():
            if where[name] is None:
                check_packable(name, tensor)
                if name in self.places and not self.places[name].is_like(tensor):
                    return False
        for segment in segments_of(tensors):
            placed = {
                (place.segment, place.begin - start) if (place := self.places.get(name)) else None
                for name, (start, _) in segment.items()
            }
            if len(placed) > 1:
                return False
        return True

    def view(self, name: str, memory: Memory) -> Tensor:
        """The named tensor in one of the memories; the device buffer must have memory."""
        views, place = self._views[memory], self.places[name]
        if memory is Memory.HOST and self._host_storages[place.segment].is_shared():
            # torch.multiprocessing has given the storage another memory (share_memory_()).
            self._host_storages = self._new_host_storages()
            views.clear()
        if name not in views:
            storage, begin = self._storage, place.begin
            if memory is Memory.HOST:
                storage = self._host_storages[place.segment]
                begin -= self._segments[place.segment][0]
            views[name] = elements(storage, begin, place.size, place.stride, place.dtype)
        return views[name]

    def store(self, name: str, tensor: Tensor) -> None:
        """Copies a tensor outside the buffer, which matches the named place, to the host buffer."""
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
        """Starts copying `changed` tensors from the other memory to `memory` in the fewest spans.

        Unchanged tensors between them are copied too. `settled` tensors are current only in
        `memory` and are not overwritten. A device buffer without memory is allocated and copied
        whole. The device buffer is read `after` an event; None: after all work that the current
        stream has queued.
        """
        is_load = memory is Memory.DEVICE
        is_new = is_load and not self.is_filled
        copied = self.places if is_new else changed
        if settled or len(copied) < len(self.places):
            spans = self._spans(copied, settled)
        else:
            spans = [(0, self.nbytes)]
        if not spans or not self.nbytes:
            return
        if is_new:  # no stream has used it since it was emptied
            context = self.load_stream.after(self.device)
        elif is_load:
            context = self.load_stream.after_current(self.device)
        else:
            if after is None:
                self.load_stream.join()
            context = self._beside(self.write_back_stream, after, self.load_stream.end)
        with context as stream:
            if self.device_bytes != self.nbytes:
                # Allocated on the same stream as before, so the stream's order makes reuse safe.
                self._storage.resize_(self.nbytes)
            if self._whole is None:
                self._whole = elements(self._storage, 0, (self.nbytes,))
            begun = self.traffic.begin(stream)
            copy_spans(self.host, self._whole, spans, to=memory)
        nbytes = sum([end - begin for begin, end in spans])
        side = self.load_stream if is_load else self.write_back_stream
        self.traffic.end(begun, side.end, nbytes, memory)
        self.is_filled = self.is_filled or is_load

    def empty(self, after: torch.cuda.Event | None = None) -> int:
        """Frees the device buffer's memory, and returns its bytes.

        New contents of that memory are written `after` an event, as in copy_to.
        """
        self.is_filled = False
        freed = self.device_bytes
        if freed and not is_resizable(self._storage):  # a shared storage, on the CPU
            self.drop_device_storage()
        elif freed:
            with self._beside(self.load_stream, after):
                self._storage.resize_(0)
        return freed

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor has the device buffer's storage."""
        while is_wrapped(tensor):
            tensor = unwrapped(tensor)
        is_dense = is_plain_tensor(tensor) and tensor.layout == torch.strided
        return is_dense and storage_id(tensor.untyped_storage()) == storage_id(self._storage)

    @property
    def is_held(self) -> bool:
        """Whether an autograd graph or the user's code holds a view of the device buffer.

        Valid while all members are on the host, because a loaded member is a view, too.
        """
        own = len(self._views[Memory.DEVICE]) + (self._whole is not None)
        return storage_uses(self._storage) > own + 1

    def held_by(self, members: Sequence[Tensor]) -> dict[weakref.ref[Tensor], str]:
        """Describes Python tensors, except `members`, that are views of the device buffer.

        The search scans all objects of the garbage collector.
        """
        own = {id(view) for view in [self._whole, *self._views[Memory.DEVICE].values(), *members]}
        views = [
            value
            for value in gc.get_objects()
            if is_plain_tensor(value) and id(value) not in own and self.has(value)
        ]
        return {weakref.ref(view): self._described(view) for view in views}

    def _described(self, view: Tensor) -> str:
        begin = view.storage_offset() * view.itemsize
        ends = {name: place.begin + max(1, place.nbytes) for name, place in self.places.items()}
        names = (name for name, end in ends.items() if self.places[name].begin <= begin < end)
        kind = f"a {list(view.shape)} {str(view.dtype)[6:]} view"
        return f"{kind} of {next(names, 'offloaded memory')}"

    def drop_device_storage(self) -> None:
        """Drops the device storage, which remaining views keep; the next load makes a new one."""
        if self._whole is not None and self._whole.is_cuda:
            # Views are used on the current stream: the allocator must wait for it before reuse.
            self._whole.record_stream(current_stream(self.device))
        self._storage = _no_bytes(self.device)
        self._views[Memory.DEVICE], self._whole = {}, None
        self.is_filled = False

    def _beside(
        self,
        stream: SharedSideStream,
        after: torch.cuda.Event | None,
        *ends: torch.cuda.Event | None,
    ) -> AbstractContextManager[torch.cuda.Stream | None]:
        if after is None:
            return stream.after_current(self.device)
        return stream.after(self.device, after, *ends)

    def _spans(self, changed: Iterable[str], settled: Iterable[str]) -> list[tuple[int, int]]:
        """The fewest byte spans that cover all segments of `changed`, and none of `settled`."""
        copied = {self.places[name].segment for name in changed}
        excluded = {self.places[name].segment for name in settled}
        spans: list[tuple[int, int]] = []
        is_open = False
        for number, (begin, end) in enumerate(self._segments):
            if number in excluded:
                is_open = False
            elif number in copied:
                spans[-1 if is_open else len(spans) :] = [(spans[-1][0] if is_open else begin, end)]
                is_open = True
        return spans

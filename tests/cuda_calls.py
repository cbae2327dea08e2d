"""A pretended CUDA driver in the library's table of CUDA calls, and a watcher of the real one.

The library makes each CUDA call of its host side through one table of function pointers, which it
exports. `PretendedDriver` puts functions there that write down every call, hand out real host
memory, keep count of what was not given back, and fail when told to. So what the library does with
a GPU's memory is tested where there is none, and errors where there is one.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import itertools
import mmap
import threading
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, c_char, c_int, c_size_t, c_ulonglong, c_void_p
from pathlib import Path
from typing import Any

import torch

_INT, _ADDRESS = POINTER(c_int), POINTER(c_void_p)

# Names and arguments of the calls, in the order of the library's table; each returns an error.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "driver_version": (_INT,),
    "runtime_version": (_INT,),
    "device_count": (_INT,),
    "multiprocessors": (c_int, _INT),
    "concurrent_managed_access": (c_int, _INT),
    "host_page_tables": (c_int, _INT),
    "bulk_copies": (c_int, _INT),
    "malloc_managed": (_ADDRESS, c_size_t),
    "free_managed": (c_void_p,),
    "advise_preferred_host": (c_void_p, c_size_t),
    "advise_accessed_by": (c_void_p, c_size_t, c_int),
    "host_register": (c_void_p, c_size_t, c_int),
    "host_unregister": (c_void_p,),
    "host_alloc": (_ADDRESS, c_size_t),
    "host_free": (c_void_p,),
    "reserve_addresses": (_ADDRESS, c_size_t),
    "free_addresses": (c_void_p, c_size_t),
    "map_memory": (c_void_p, c_size_t, c_int, POINTER(c_ulonglong)),
    "unmap_memory": (c_void_p, c_size_t, c_ulonglong),
    "pointer_kind": (c_void_p, _INT, _ADDRESS),
    "copy_to_host": (c_void_p, c_void_p, c_size_t, c_void_p),
    "event_create": (_ADDRESS,),
    "event_record": (c_void_p, c_void_p),
    "event_query": (c_void_p,),
    "event_synchronize": (c_void_p,),
    "event_destroy": (c_void_p,),
    "stream_create": (_ADDRESS,),
    "stream_is_capturing": (c_void_p, _INT),
    "stream_id": (c_void_p, POINTER(c_ulonglong)),
    "relax_capture": (_INT,),
    "retain_in_capture": (c_void_p, c_void_p, c_void_p),
    "get_device": (_INT,),
    "set_device": (c_int,),
    "device_synchronize": (),
    "last_error": (),
}
PAGEABLE, HOST, DEVICE, MANAGED = range(4)
INVALID_VALUE, OUT_OF_MEMORY, INSUFFICIENT_DRIVER, NO_DEVICE, INVALID_HANDLE = 1, 2, 35, 100, 400
NOT_READY, CAPTURE_UNSUPPORTED = 600, 900
ALREADY_REGISTERED, NOT_REGISTERED = 712, 713
UNTOUCHED = 0xFF  # every byte of CUDA's memory that nothing has written to yet
GLOBAL, RELAXED = 0, 2  # cudaStreamCaptureMode
# What a thread must not call while another one captures a graph, unless it has relaxed its mode.
UNSAFE_IN_CAPTURE = {
    *("malloc_managed", "free_managed", "advise_preferred_host", "advise_accessed_by"),
    *("host_register", "host_unregister", "host_alloc", "host_free"),
    *("reserve_addresses", "free_addresses", "map_memory", "unmap_memory"),
    *("event_create", "event_query", "event_synchronize", "device_synchronize"),
}


class CudaCalls(ctypes.Structure):
    """The library's table; the text of an error comes back as an address."""

    _fields_ = [
        *((name, CFUNCTYPE(c_int, *arguments)) for name, arguments in SIGNATURES.items()),
        ("error_string", CFUNCTYPE(c_void_p, c_int)),
    ]


def library_path() -> Path:
    """Where the library is; finding it does not import the package."""
    spec = importlib.util.find_spec("speedtorch")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "_C.abi3.so"


def table() -> CudaCalls:
    """The table itself, not a copy. torch must have been imported, speedtorch need not."""
    function = ctypes.CDLL(str(library_path())).speedtorch_cuda_calls
    function.restype = POINTER(CudaCalls)
    result: CudaCalls = function().contents
    return result


def abort_on_any_call() -> None:
    """From here on a CUDA call kills this process, also one after Python itself is gone."""
    abort = ctypes.cast(ctypes.CDLL(None).abort, c_void_p).value
    for name, kind in CudaCalls._fields_:
        setattr(table(), name, kind(abort))


def mapping_of(address: int) -> str | None:
    """Permissions ("rw-p") of this process's memory at an address; None if nothing is there."""
    with open("/proc/self/maps") as lines:
        for line in lines:
            span, permissions = line.split()[:2]
            begin, end = (int(part, 16) for part in span.split("-"))
            if begin <= address < end:
                return permissions
    return None


def _map(known: dict[int, mmap.mmap], address: Any, count: int) -> int:
    memory = mmap.mmap(-1, count)
    first = ctypes.addressof(c_char.from_buffer(memory))
    ctypes.memset(first, UNTOUCHED, count)
    known[first] = memory
    address[0] = first
    return 0


def _unmap(known: dict[int, mmap.mmap], address: int) -> int:
    memory = known.pop(address, None)
    if memory is None:
        return INVALID_VALUE
    memory.close()
    return 0


class Driver:
    """Stands in the library's table while its `with` block runs, and writes the calls down."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []  # names and arguments but pointers for answers
        self.real: CudaCalls | None = None  # what the table held before
        # Kept for as long as this object: the library holds bare pointers to them.
        self._functions = {
            name: CFUNCTYPE(c_int, *arguments)(self._recorded(name))
            for name, arguments in SIGNATURES.items()
        }

    def _recorded(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            plain = [each for each in arguments if each is None or isinstance(each, int)]
            self.calls.append((name, *plain))
            return self.answer(name, *arguments)

        return call

    def answer(self, name: str, *arguments: Any) -> int:
        """What a call returns; here the real driver's own answer."""
        result: int = getattr(self.real, name)(*arguments)
        return result

    def named(self, *names: str) -> list[tuple[Any, ...]]:
        """The calls of these names, in order."""
        return [call for call in self.calls if call[0] in names]

    def __enter__(self) -> Any:
        """Garbage of earlier tests goes first: its memory belongs to the real driver."""
        import speedtorch

        if torch.cuda.is_available():
            speedtorch.synchronize()
        if any(speedtorch.memory_stats().values()):
            gc.collect()
        here = table()
        self.real = CudaCalls.from_buffer_copy(here)
        for name, function in self._functions.items():
            setattr(here, name, function)
        return self

    def __exit__(self, *_: object) -> None:
        ctypes.pointer(table())[0] = self.real


# Calls whose last argument is where the answer goes, and calls that return memory or take it back.
READS: dict[str, Callable[..., int]] = {
    "driver_version": lambda driver: driver.versions[0],
    "runtime_version": lambda driver: driver.versions[1],
    "host_page_tables": lambda driver, device: driver.host_page_tables,
    "concurrent_managed_access": lambda driver, device: driver.gpus[device],
    "stream_id": lambda driver, stream: driver.stream_ids.get(stream or 0, stream or 0),
    "stream_is_capturing": lambda driver, stream: stream in driver.capturing,
}
MAPS = {"malloc_managed": "managed", "host_alloc": "allocated", "reserve_addresses": "reserved"}
UNMAPS = {"free_managed": "managed", "host_free": "allocated"}
GIVES_BACK = UNMAPS | {"host_unregister": "registered"}


class PretendedDriver(Driver):
    """A driver with GPUs, each with concurrentManagedAccess or without, and none of their work.

    Dicts by address have what was allocated, reserved, mapped or registered and not given back.
    """

    def __init__(self, *gpus: bool) -> None:
        super().__init__()
        self.gpus = gpus
        self.managed: dict[int, mmap.mmap] = {}
        self.allocated: dict[int, mmap.mmap] = {}  # pinned
        self.reserved: dict[int, mmap.mmap] = {}
        self.mapped: dict[int, tuple[int, int, int]] = {}  # bytes, GPU and handle
        self.registered: dict[int, tuple[int, bool]] = {}  # bytes, and whether it is read-only
        self.registers_elsewhere = False  # GPUs find registered memory elsewhere, as on WSL2
        self.host_page_tables = False  # GPUs reach pageable memory as the CPU does, as on Grace
        self.versions = (13000, 13000)  # CUDA of the driver and of the library's runtime
        self.events: set[int] = set()  # not destroyed
        self.unfinished: set[int] = set()  # events that the GPU has not reached
        self.stream_ids: dict[int, int] = {}  # by handle, if they differ from it
        self.capturing: set[int] = set()  # streams
        self.other_captures = False  # by another thread: calls that are unsafe then fail
        self.on_call: Callable[[str], object] = lambda _: None  # before each call is answered
        self._capture_mode = threading.local()
        self.pinned_by_others: set[int] = set()
        self.pending = 0  # CUDA's last error: 0 unless a failure was not cleared
        self.advised_untouched: list[bool] = []  # for each advice: nobody had written before
        self.unregistered_mapped: list[bool] = []  # for each address: memory was still there
        self._failures: dict[str, tuple[set[int], int]] = {}
        self._handles = itertools.count(1)
        self._texts: dict[int, ctypes.Array[c_char]] = {}
        self._error_string = CFUNCTYPE(c_void_p, c_int)(self._text)

    def __enter__(self) -> PretendedDriver:
        super().__enter__()
        table().error_string = self._error_string
        return self

    def __exit__(self, *_: object) -> None:
        if not self.nothing_left():
            gc.collect()
        super().__exit__()

    def fail(self, name: str, *numbers: int, error: int = OUT_OF_MEMORY) -> None:
        """Makes the `numbers`-th calls of this name from here fail; all of them without numbers."""
        made = len(self.named(name))
        self._failures[name] = ({made + number for number in numbers}, error)

    def nothing_left(self) -> bool:
        """Whether all memory was given back and no failure is left for innocent code to find."""
        kept = self.managed or self.allocated or self.reserved or self.registered or self.events
        return not (kept or self.pending)

    def _text(self, error: int) -> int:
        text = self._texts.setdefault(
            error, ctypes.create_string_buffer(f"pretended reason {error}".encode())
        )
        return ctypes.addressof(text)

    def answer(self, name: str, *arguments: Any) -> int:
        if name == "last_error":
            error, self.pending = self.pending, 0
            return error
        self.on_call(name)
        numbers, error = self._failures.get(name, (set(), 0))
        relaxed = getattr(self._capture_mode, "value", GLOBAL) == RELAXED
        if self.other_captures and name in UNSAFE_IN_CAPTURE and not relaxed:
            error = CAPTURE_UNSUPPORTED
        elif not error or (numbers and len(self.named(name)) not in numbers):
            error = self._done(name, *arguments)
        self.pending = error or self.pending
        return error

    def _done(self, name: str, *arguments: Any) -> int:
        if name in READS:
            arguments[-1][0] = READS[name](self, *arguments[:-1])
            return 0
        if name in MAPS:
            return _map(getattr(self, MAPS[name]), *arguments)
        is_own = name not in GIVES_BACK or arguments[0] in getattr(self, GIVES_BACK[name])
        if not is_own and torch.cuda.is_available():
            # Memory of an earlier test, whose objects are freed only now. A registration that
            # remained would fail later ones of other memory at its address.
            return super().answer(name, *arguments)
        if name in UNMAPS:
            return _unmap(getattr(self, UNMAPS[name]), *arguments)
        error: int = getattr(self, f"_{name}", lambda *_: 0)(*arguments)
        return error

    def _relax_capture(self, mode: Any) -> int:
        before = getattr(self._capture_mode, "value", GLOBAL)
        self._capture_mode.value, mode[0] = mode[0], before
        return 0

    def _device_count(self, count: Any) -> int:
        count[0] = len(self.gpus)
        return 0 if self.gpus else NO_DEVICE

    def _free_addresses(self, address: int, count: int) -> int:
        if address in self.mapped or len(self.reserved.get(address, ())) != count:
            return INVALID_VALUE
        return _unmap(self.reserved, address)

    def _map_memory(self, address: int, count: int, device: int, memory: Any) -> int:
        if address in self.mapped or len(self.reserved.get(address, ())) < count:
            return INVALID_VALUE
        memory[0] = next(self._handles)
        self.mapped[address] = count, device, memory[0]
        return 0

    def _unmap_memory(self, address: int, count: int, memory: int) -> int:
        length, _, handle = self.mapped.get(address, (0, 0, 0))
        if (length, handle) != (count, memory):
            return INVALID_VALUE
        del self.mapped[address]
        return 0

    def _advise_preferred_host(self, address: int, count: int) -> int:
        if address not in self.managed:
            return INVALID_VALUE
        ends = ctypes.string_at(address, 1) + ctypes.string_at(address + count - 1, 1)
        self.advised_untouched.append(ends == bytes([UNTOUCHED]) * 2)
        return 0

    def _advise_accessed_by(self, address: int, count: int, device: int) -> int:
        return self._advise_preferred_host(address, count) if device < len(self.gpus) else 101

    def _host_register(self, address: int, count: int, read_only: int) -> int:
        for first, (length, _) in self.registered.items():
            if first < address + count and address < first + length:
                return ALREADY_REGISTERED
        permissions = mapping_of(address)
        if permissions is None or not ("w" in permissions or read_only):
            return INVALID_VALUE
        self.registered[address] = (count, bool(read_only))
        return 0

    def _host_unregister(self, address: int) -> int:
        self.unregistered_mapped.append(mapping_of(address) is not None)
        return 0 if self.registered.pop(address, None) else NOT_REGISTERED

    def _pointer_kind(self, address: int, kind: Any, on_gpu: Any) -> int:
        kind[0] = HOST if address in self.pinned_by_others else PAGEABLE
        moved = 0
        if any(first <= address < first + len(self.managed[first]) for first in self.managed):
            kind[0] = MANAGED
        elif any(first <= address < first + len(self.allocated[first]) for first in self.allocated):
            kind[0] = HOST
        elif any(first <= address < first + n for first, (n, _) in self.registered.items()):
            kind[0] = HOST
            moved = self.registers_elsewhere << 46
        on_gpu[0] = None if kind[0] == PAGEABLE else address + moved
        return 0

    def _event_create(self, event: Any) -> int:
        event[0] = 1 + len(self.named("event_create"))
        self.events.add(event[0])
        return 0

    def _event_record(self, event: int, _: object = None) -> int:
        return 0 if event in self.events else INVALID_HANDLE

    _event_synchronize = _event_record

    def _event_query(self, event: int) -> int:
        return NOT_READY if event in self.unfinished else self._event_record(event)

    def _event_destroy(self, event: int) -> int:
        error = self._event_record(event)
        self.events.discard(event)
        return error

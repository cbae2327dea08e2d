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
import mmap
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, c_char, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import torch

_INT, _ADDRESS = POINTER(c_int), POINTER(c_void_p)

# Names and arguments of the calls, in the order of the library's table; each returns an error.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "device_count": (_INT,),
    "concurrent_managed_access": (c_int, _INT),
    "bulk_copies": (c_int, _INT),
    "malloc_managed": (_ADDRESS, c_size_t),
    "free_managed": (c_void_p,),
    "advise_preferred_host": (c_void_p, c_size_t),
    "advise_accessed_by": (c_void_p, c_size_t, c_int),
    "host_register": (c_void_p, c_size_t, c_int),
    "host_unregister": (c_void_p,),
    "host_alloc": (_ADDRESS, c_size_t),
    "pointer_kind": (c_void_p, _INT),
    "event_create": (_ADDRESS,),
    "event_record": (c_void_p, c_void_p),
    "event_query": (c_void_p,),
    "event_synchronize": (c_void_p,),
    "event_destroy": (c_void_p,),
    "stream_create": (_ADDRESS,),
    "stream_is_capturing": (c_void_p, _INT),
    "relax_capture": (_INT,),
    "retain_in_capture": (c_void_p, c_void_p, c_void_p),
    "get_device": (_INT,),
    "set_device": (c_int,),
    "device_synchronize": (),
    "last_error": (),
}
PAGEABLE, HOST, DEVICE, MANAGED = range(4)
INVALID_VALUE, OUT_OF_MEMORY, NO_DEVICE, INVALID_HANDLE = 1, 2, 100, 400
ALREADY_REGISTERED, NOT_REGISTERED = 712, 713
UNTOUCHED = 0xFF  # every byte of managed memory that nobody has written to yet


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


class Driver:
    """Stands in the library's table while its `with` block runs, and writes the calls down.

    Attributes:
        calls: (name, arguments without the pointers that answers go to) of every call.
        real: What the table held before.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.real: CudaCalls | None = None
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


class PretendedDriver(Driver):
    """A driver with as many GPUs as wanted and none of their work.

    Args:
        gpus: For each GPU whether it has concurrentManagedAccess.

    Attributes:
        managed: Address to memory of what was allocated and not freed.
        registered: Address to (bytes, read-only) of what was registered and not unregistered.
        events: Handles that were made and not destroyed.
        pinned_by_others: Addresses that are pinned without us.
        pending: CUDA's last error: 0 unless a failure was not cleared.
        advised_untouched: For each piece of advice whether nobody had written to the memory.
        unregistered_mapped: For each unregistered address whether memory was still there.
    """

    def __init__(self, *gpus: bool) -> None:
        super().__init__()
        self.gpus = gpus
        self.managed: dict[int, mmap.mmap] = {}
        self.registered: dict[int, tuple[int, bool]] = {}
        self.events: set[int] = set()
        self.pinned_by_others: set[int] = set()
        self.pending = 0
        self.advised_untouched: list[bool] = []
        self.unregistered_mapped: list[bool] = []
        self._failures: dict[str, tuple[set[int], int]] = {}
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
        return not (self.managed or self.registered or self.events or self.pending)

    def _text(self, error: int) -> int:
        text = self._texts.setdefault(
            error, ctypes.create_string_buffer(f"pretended reason {error}".encode())
        )
        return ctypes.addressof(text)

    def answer(self, name: str, *arguments: Any) -> int:
        if name == "last_error":
            error, self.pending = self.pending, 0
            return error
        numbers, error = self._failures.get(name, (set(), 0))
        if not error or (numbers and len(self.named(name)) not in numbers):
            error = getattr(self, f"_{name}", lambda *_: 0)(*arguments)
        self.pending = error or self.pending
        return error

    def _device_count(self, count: Any) -> int:
        count[0] = len(self.gpus)
        return 0 if self.gpus else NO_DEVICE

    def _concurrent_managed_access(self, device: int, supported: Any) -> int:
        supported[0] = self.gpus[device]
        return 0

    def _malloc_managed(self, address: Any, count: int) -> int:
        memory = mmap.mmap(-1, count)
        first = ctypes.addressof(c_char.from_buffer(memory))
        ctypes.memset(first, UNTOUCHED, count)
        self.managed[first] = memory
        address[0] = first
        return 0

    def _free_managed(self, address: int) -> int:
        memory = self.managed.pop(address, None)
        if memory is None:
            return INVALID_VALUE
        memory.close()
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

    def _pointer_kind(self, address: int, kind: Any) -> int:
        kind[0] = HOST if address in self.pinned_by_others else PAGEABLE
        if any(first <= address < first + len(self.managed[first]) for first in self.managed):
            kind[0] = MANAGED
        elif any(first <= address < first + n for first, (n, _) in self.registered.items()):
            kind[0] = HOST
        return 0

    def _host_alloc(self, *_: Any) -> int:
        return NO_DEVICE  # only ops on a GPU ask for it

    def _event_create(self, event: Any) -> int:
        event[0] = 1 + len(self.named("event_create"))
        self.events.add(event[0])
        return 0

    def _event_record(self, event: int, _: object = None) -> int:
        return 0 if event in self.events else INVALID_HANDLE

    _event_query = _event_synchronize = _event_record

    def _event_destroy(self, event: int) -> int:
        error = self._event_record(event)
        self.events.discard(event)
        return error

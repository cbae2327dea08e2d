"""Finds operations that use memory out of order, among the streams of a pretended GPU.

Every tensor counts as GPU memory, which torch's caching allocator has given to the stream that made
it. Three faults are found: an operation reads what another stream still writes, an operation writes
what another stream still uses, and freed memory is used again while another stream still uses it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from recorded_streams import Clock, RecordedStreams
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from speedtorch.memory.side_stream import MemoryStream, SideStream
from speedtorch.plan.planned_batch import SeenIds

# Operations of the host, which use no stream.
BY_HOST = {
    f"speedtorch.{name}.default" for name in ("host_empty", "registration_seams", "check_owner")
}
BY_HOST |= {"aten.set_.source_Storage_storage_offset"}  # the tensor, not its memory


@dataclass
class Use:
    """An operation, the number of its stream's work, and whether it writes."""

    operation: str
    stream: str
    number: int
    writes: bool

    def is_done(self, clock: Clock) -> bool:
        """Whether it is before what follows the clock."""
        return clock[self.stream] >= self.number

    def __str__(self) -> str:
        return f"{self.operation} {'writes' if self.writes else 'reads'} it on {self.stream}"


@dataclass
class Memory:
    """The memory of one storage."""

    made_on: str  # the stream whose next allocation may get it once it is free
    shape: Sequence[int]  # of the tensor that was seen first
    uses: dict[tuple[str, bool], Use] = field(default_factory=dict)  # the last by stream and kind
    kept_for: set[str] = field(default_factory=set)  # streams that the allocator waits for


class StreamOrder(TorchDispatchMode):
    """Watches all operations of the current thread."""

    def __init__(self, streams: RecordedStreams, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._streams = streams
        self._memory: dict[int, Memory] = {}
        self._freed: defaultdict[str, list[Memory]] = defaultdict(list)
        self.faults: list[str] = []
        self.side_uses = 0  # of memory of another stream

        def uses(side: SideStream, tensors: Iterable[Tensor]) -> None:
            self.keep(tensors, side.stream(torch.device("cuda", 0)).name)  # type: ignore[attr-defined]

        def copy(seen: SeenIds, *args: Any, **kwargs: Any) -> None:
            self._by_host = True
            try:
                copied(seen, *args, **kwargs)
            finally:
                self._by_host = False

        copied, self._by_host = SeenIds.__init__, False
        patch.setattr(SeenIds, "__init__", copy)
        patch.setattr(SideStream, "uses", uses)
        patch.setattr(
            MemoryStream, "record", lambda _, tensors: self.keep(tensors, streams.current.name)
        )

    def found(self, work: Callable[[], object]) -> str:
        """The faults of a call, one a line."""
        with self:
            work()
        return "\n".join(self.faults)

    def keep(self, tensors: Iterable[Tensor], stream: str) -> None:
        """Lets the allocator wait for a stream before the tensors' memory is used again."""
        for storage in filter(None, map(storage_of, tensors)):
            self._of(storage, ()).kept_for.add(stream)

    def _of(self, storage: torch.UntypedStorage, shape: Sequence[int]) -> Memory:
        key = storage._cdata
        if key not in self._memory:
            storage._weak_ref()  # type: ignore[no-untyped-call]  # its address is not used again
            self._memory[key] = Memory(self._streams.current.name, shape)
        return self._memory[key]

    def _find_freed(self) -> None:
        """Looks for memory that has been freed since the last call."""
        for key in [key for key in self._memory if torch.UntypedStorage._expired(key)]:  # type: ignore[attr-defined]
            memory = self._memory.pop(key)
            torch.UntypedStorage._free_weak_ref(key)  # type: ignore[attr-defined]
            self._freed[memory.made_on].append(memory)

    def _check_reuse(self, operation: str, stream: str, before: Clock) -> None:
        """The allocator may have given an operation's result any freed memory of its stream."""
        for memory in self._freed.pop(stream, ()):
            for use in memory.uses.values():
                if use.stream not in (stream, *memory.kept_for) and not use.is_done(before):
                    self._report(f"{use}, {operation} may get it on {stream}", memory)

    def _report(self, text: str, memory: Memory) -> None:
        self.faults.append(f"memory {list(memory.shape)} of {memory.made_on}: {text}")

    def __torch_dispatch__(
        self,
        operation: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs the operation, and records what it uses."""
        if any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # the operations that it consists of come here
        if self._by_host or str(operation) in BY_HOST:
            return operation(*args, **(kwargs or {}))
        self._find_freed()
        result = operation(*args, **(kwargs or {}))
        before = self._streams.queue()
        stream = self._streams.current
        for tensor, writes in accesses(operation, args, kwargs or {}, result):
            if (storage := storage_of(tensor)) is None:
                continue
            if storage._cdata not in self._memory and writes:
                self._check_reuse(str(operation), stream.name, before)
            memory = self._of(storage, tensor.shape)
            self.side_uses += stream.name != memory.made_on
            use = Use(str(operation), stream.name, stream.clock[stream.name], writes)
            for earlier in memory.uses.values():
                if (writes or earlier.writes) and not (
                    earlier.stream == stream.name or earlier.is_done(before)
                ):
                    self._report(f"{earlier}, {use}", memory)
            memory.uses[stream.name, writes] = use
        return result


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Its memory; None of a tensor without."""
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        return None
    storage = tensor.untyped_storage()
    return storage if storage.nbytes() else None


def accesses(
    operation: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> Iterator[tuple[Tensor, bool]]:
    """Tensors that an operation uses, and whether it writes them; none of views and sizes."""
    schema = operation._schema
    results = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
    is_view = any(each.alias_info and not each.alias_info.is_write for each in schema.returns)
    if is_view or operation.namespace in ("prim", "profiler"):
        return
    seen = set()
    for at, argument in enumerate(schema.arguments):
        given = args[at] if at < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tree_leaves(given):
            if isinstance(tensor, Tensor):
                seen.add(id(tensor))
                yield tensor, writes
    yield from ((tensor, True) for tensor in results if id(tensor) not in seen)

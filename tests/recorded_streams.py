"""Streams and events that record which work waits for which, on machines without a GPU.

`RecordedStreams` puts them in place of torch's. Work on the CPU is done at once as ever; a test
names it with `work()`, and asks with `before()` whether a GPU would have kept the order.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from speedtorch.layers import flat_buffer, host_buffer, module_groups
from speedtorch.memory import side_stream
from speedtorch.memory.side_stream import MemoryStream, SideStream
from speedtorch.step.held_rows import HeldRows

DEVICE = torch.device("cuda", 0)


class Clock(dict[str, int]):
    """How many works of each stream, by name, are done."""

    def __missing__(self, _: str) -> int:
        return 0

    def include(self, other: Clock) -> None:
        """Adds what is done by another clock."""
        for name, count in other.items():
            self[name] = max(self[name], count)


class RecordedStream:
    """A stream that knows what work is done before the work that it gets next."""

    device_index = 0

    def __init__(self, streams: RecordedStreams, name: str) -> None:
        self._streams, self.name, self.stream_id = streams, name, id(self)
        self.clock = Clock()

    def record_event(self, event: RecordedEvent | None = None) -> RecordedEvent:
        event = RecordedEvent(self._streams) if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: RecordedEvent) -> None:
        self.clock.include(event.clock)

    def wait_stream(self, other: RecordedStream) -> None:
        self.clock.include(other.clock)


class RecordedEvent:
    """An event that knows what work is done before it."""

    device = DEVICE

    def __init__(self, streams: RecordedStreams) -> None:
        self._streams = streams
        self.clock = Clock()

    def record(self, stream: RecordedStream) -> None:
        self.clock = Clock(stream.clock)

    def query(self) -> bool:
        return all(self._streams.host_clock[name] >= count for name, count in self.clock.items())

    def synchronize(self) -> None:
        self._streams.host_clock.include(self.clock)

    def elapsed_time(self, _: RecordedEvent) -> float:
        return 1.0


class RecordedTensor:
    """Memory of a GPU, of which it is recorded for which streams it is kept."""

    is_cuda, device = True, DEVICE

    def __init__(self) -> None:
        self.streams: list[str] = []

    def record_stream(self, stream: RecordedStream) -> None:
        self.streams.append(stream.name)


class RecordedStreams:
    """All streams of a pretended GPU."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self._made: dict[object, RecordedStream] = {}
        self._works: dict[str, tuple[int, Clock]] = {}  # the number in its stream, what was before
        self._counts: defaultdict[str, int] = defaultdict(int)
        self.host_clock = Clock()  # what the host has waited for
        self.on: dict[str, str] = {}  # the stream of each work, in the order of the calls
        self._of_thread = threading.local()
        for module in (side_stream, flat_buffer, module_groups):
            patch.setattr(module, "current_stream", lambda _: self.current)
        patch.setattr(side_stream, "_stream", self._side)
        patch.setattr(torch.cuda, "Event", lambda **_: RecordedEvent(self))
        patch.setattr(torch.cuda, "current_stream", lambda _: self.current)
        patch.setattr(torch.cuda, "set_stream", self.use)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "set_device", lambda _: None)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    @property
    def current(self) -> RecordedStream:
        """The current stream of this thread."""
        current: RecordedStream = getattr(self._of_thread, "current", None) or self.stream("main")
        return current

    def pretend_on_cpu(self) -> None:
        """Work beside the current stream of a CPU is beside the pretended GPU's."""
        end_of_current = side_stream.end_of_current
        after, after_current = SideStream.after, SideStream.after_current
        patch = self._patch.setattr
        patch(SideStream, "after", lambda side, _, *ends: after(side, DEVICE, *ends))
        patch(SideStream, "after_current", lambda side, _: after_current(side, DEVICE))
        for module in (host_buffer, module_groups):
            self._patch.setattr(module, "end_of_current", lambda _: end_of_current(DEVICE))

    def pretend_rows_follow(self) -> None:
        """Rows on the CPU follow the current stream as on a GPU."""
        follow, complete = MemoryStream.follow, HeldRows.complete

        def follow_on_cpu(stream: MemoryStream, held: Callable[[], Iterable[Tensor]]) -> None:
            stream._device = DEVICE
            try:
                follow(stream, held)
            finally:
                stream._device = None

        def complete_on_cpu(held: HeldRows, **how: bool) -> None:
            held.memory_stream.follow(held.memory.tensors)
            complete(held, **how)

        self._patch.setattr(MemoryStream, "follow", follow_on_cpu)
        self._patch.setattr(HeldRows, "complete", complete_on_cpu)

    def stream(self, name: str) -> RecordedStream:
        """A stream of this name, the same one at each call."""
        return self._made.setdefault(name, RecordedStream(self, name))

    def _side(self, _: int, purpose: str, beside: int | None) -> RecordedStream:
        names = {id(each): each.name for each in self._made.values()}
        return self.stream(purpose if beside is None else f"{purpose} of {names[beside]}")

    def use(self, stream: RecordedStream) -> None:
        """Makes a stream the current one of this thread."""
        self._of_thread.current = stream

    def queue(self) -> Clock:
        """Queues work on the current stream, and returns what is done before it."""
        clock = self.current.clock
        clock.include(self.host_clock)
        before = Clock(clock)
        clock[self.current.name] += 1
        return before

    def work(self, name: str) -> None:
        """Queues work of a name on the current stream."""
        assert name not in self._works, f"{name} is there already"
        self.on[name] = self.current.name
        before = self.queue()
        self._works[name] = self.current.clock[self.current.name], before

    def count(self, name: str) -> None:
        """As work(), with a number behind the name, from 1 on."""
        self._counts[name] += 1
        self.work(f"{name} {self._counts[name]}")

    def works(self, module: Any, function: str, name: str, *, first: int = 1) -> None:
        """Lets a function of a module or class queue work at each call, numbered from first on."""
        self._counts[name] = first - 1
        call: Callable[..., Any] = getattr(module, function)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count(name)
            return call(*args, **kwargs)

        self._patch.setattr(module, function, counted)

    def before(self, name: str) -> set[str]:
        """The work that is done before work of this name begins, whatever the GPU does."""
        return self._done(self._works[name][1])

    @property
    def host(self) -> set[str]:
        """The work that the host has waited for."""
        return self._done(self.host_clock)

    def finish(self) -> None:
        """The host waits for all streams."""
        for stream in self._made.values():
            self.host_clock.include(stream.clock)

    def _done(self, clock: Clock) -> set[str]:
        return {name for name, (at, _) in self._works.items() if clock[self.on[name]] >= at}

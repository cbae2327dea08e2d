"""SideStream and MemoryStream: what waits for what, on every machine."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from recorded_streams import DEVICE, RecordedStreams, RecordedTensor

from speedtorch.memory.side_stream import MemoryStream, SharedSideStream, SideStream

KINDS = pytest.mark.parametrize("kind", [SideStream, SharedSideStream])


@KINDS
def test_work_beside_the_current_stream_begins_behind_what_that_has_and_no_more(
    kind: type[SideStream], streams: RecordedStreams
) -> None:
    side = kind("copies")
    streams.work("earlier")
    with side.after_current(DEVICE) as stream:
        assert streams.current is stream is not streams.stream("main")
        streams.work("copy")
    assert streams.current is streams.stream("main")
    streams.work("later")
    assert streams.before("copy") == {"earlier"}
    assert streams.before("later") == {"earlier"}


@KINDS
def test_work_after_events_waits_for_these_alone(
    kind: type[SideStream], streams: RecordedStreams
) -> None:
    side = kind("copies")
    streams.work("first")
    first = streams.current.record_event()
    streams.work("second")
    with side.after(DEVICE, None, first):  # type: ignore[arg-type]
        streams.work("copy")
    with kind("others").after(DEVICE):
        streams.work("other copy")
    assert streams.before("copy") == {"first"}
    assert streams.before("other copy") == set()


@KINDS
@pytest.mark.parametrize("fails", [False, True])
def test_what_follows_a_join_is_behind_the_objects_own_work_only(
    kind: type[SideStream], fails: bool, streams: RecordedStreams
) -> None:
    side = kind("copies")
    side.join()  # nothing to wait for
    error = pytest.raises(KeyboardInterrupt) if fails else nullcontext()
    with error, side.after_current(DEVICE):
        streams.work("copy")
        if fails:
            raise KeyboardInterrupt
    assert streams.current is streams.stream("main")
    with kind("copies").after_current(DEVICE):  # on the same stream
        streams.work("another's copy")
    side.join()
    streams.work("use")
    assert streams.before("use") == {"copy"}
    assert side.end is None


@KINDS
def test_only_finish_lets_the_host_wait(kind: type[SideStream], streams: RecordedStreams) -> None:
    side = kind("copies")
    with side.after_current(DEVICE):
        streams.work("copy")
    assert not side.is_done and streams.host == set()
    side.finish()
    assert side.is_done and streams.host == {"copy"}


@KINDS
def test_work_of_another_current_stream_is_behind_the_last_work(
    kind: type[SideStream], streams: RecordedStreams
) -> None:
    side = kind("copies")
    with side.after_current(DEVICE):
        streams.work("copy")
    streams.use(streams.stream("other"))
    with side.after(DEVICE):
        streams.work("next copy")
    assert streams.before("next copy") == {"copy"}


def test_each_stream_has_a_side_stream_of_its_own_unless_it_is_shared(
    streams: RecordedStreams,
) -> None:
    names = []
    for side in (SideStream("copies"), SharedSideStream("copies")):
        for name in ("main", "other"):
            streams.use(streams.stream(name))
            with side.after_current(DEVICE) as stream:
                names.append(stream.name)  # type: ignore[union-attr]
    assert names == ["copies of main", "copies of other", "copies", "copies"]


def test_memory_that_a_side_stream_uses_is_kept_for_it(streams: RecordedStreams) -> None:
    tensor = RecordedTensor()
    SideStream("copies").uses([tensor, torch.zeros(1)])  # type: ignore[list-item]
    assert tensor.streams == ["copies of main"]


@pytest.mark.parametrize("captures", [False, True])
def test_another_stream_waits_for_the_last_one_unless_it_is_captured(
    captures: bool, streams: RecordedStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    memory, held = MemoryStream(DEVICE), RecordedTensor()
    for number, name in enumerate(("main", "main", "other", "other", "main")):
        streams.use(streams.stream(name))
        memory.follow(lambda: [held])  # type: ignore[list-item]
        streams.work(f"use {number}")
    assert streams.before("use 2") == (set() if captures else {"use 0", "use 1"})
    assert streams.before("use 4") == {"use 0", "use 1"} | (
        set() if captures else {"use 2", "use 3"}
    )
    assert held.streams == ["other", "main"] and memory.has_changed

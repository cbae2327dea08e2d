"""Threads for files do all their work, and none is left after it, nor after an error."""

from __future__ import annotations

import threading
import time

import pytest

from speedtorch.files.threads import threads


def test_work_is_done_and_what_it_raises_is_raised() -> None:
    with threads(4) as pool:
        numbers = [pool.begin(divmod, 17, each) for each in (5, 3)]
        wrong = pool.begin(divmod, 1, 0)
    assert [each.result() for each in numbers] == [(3, 2), (5, 2)]
    with pytest.raises(ZeroDivisionError):
        wrong.result()


def test_after_an_interrupt_all_work_is_done_and_no_thread_is_left() -> None:
    before, done = threading.active_count(), list[int]()

    def work(number: int) -> None:
        time.sleep(0.01)
        done.append(number)

    with pytest.raises(KeyboardInterrupt), threads(3) as pool:
        for number in range(9):
            pool.begin(work, number)
        raise KeyboardInterrupt
    assert sorted(done) == list(range(9))
    assert threading.active_count() == before


@pytest.mark.parametrize("number", [1, 2, 3])
def test_where_no_thread_can_be_started_none_is_left(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, left, real = threading.active_count(), [number], threading.Thread.start

    def start(thread: threading.Thread) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start new thread"), threads(4):
        pass
    assert threading.active_count() == before

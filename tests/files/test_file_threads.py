"""Threads for files do all their work, and none is left after it, nor after an error."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from speedtorch.files import threads as file_threads
from speedtorch.files.threads import threads


@pytest.mark.parametrize("ends", [False, True], ids=["", "threads end before they take any"])
def test_work_is_done_and_what_it_raises_is_raised(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ends:
        monkeypatch.setattr(_thread, "start_new_thread", lambda *_: 0)
        monkeypatch.setattr(file_threads, "_START_SECONDS", 0.01)
    with threads(4) as pool:
        numbers = [pool.begin(divmod, 17, each) for each in (5, 3)]
        wrong = pool.begin(divmod, 1, 0)
        assert [pool.result(each) for each in numbers] == [(3, 2), (5, 2)]
        if ends:
            assert not wrong.done()  # result() runs no work behind its own
    with pytest.raises(ZeroDivisionError):
        wrong.result()


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_threads_that_begin_late_are_awaited(
    error: type[BaseException] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that begins after the end of the interpreter ends the process."""
    real, begun = _thread.start_new_thread, list[bool]()

    def late(function: Callable[..., object], given: tuple[Any, ...]) -> None:
        time.sleep(0.1)
        begun.append(True)
        function(*given)

    monkeypatch.setattr("os.cpu_count", lambda: 3)
    monkeypatch.setattr(_thread, "start_new_thread", lambda *given: real(late, given))
    expected = nullcontext() if error is None else pytest.raises(error)
    with expected, threads(3) as pool:
        assert pool.result(pool.begin(divmod, 17, 5)) == (3, 2)
        if error is not None:
            raise error
    assert begun == [True] * 3


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


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_work_is_done_where_no_thread_can_be_started(
    number: int, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, real = [number], _thread.start_new_thread

    def start(*given: Any) -> int:
        left[0] -= 1
        if left[0] == 0:
            raise error
        return real(*given)

    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr(_thread, "start_new_thread", start)
    with threads(4) as pool:
        numbers = [pool.begin(divmod, each, 5) for each in range(50)]
        assert [pool.result(each) for each in numbers] == [divmod(each, 5) for each in range(50)]
    assert left[0] == 0

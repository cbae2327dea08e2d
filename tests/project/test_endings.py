"""A process that trains ends as it should, whatever it does when it ends."""

from __future__ import annotations

import functools
import os
import signal
import sys
import textwrap
from pathlib import Path

import endings
import pytest
from ordinary_run import soaked
from warm_python import finished, run_warm, warm_python

import speedtorch

pytestmark = [pytest.mark.slow, pytest.mark.soak]

TESTS = Path(__file__).parents[1]
STATUS = {"exit_3": 3, "error": 1, "os_exit": 7, "sigterm_handled": 5, "sigterm": -signal.SIGTERM}
LAST_WORDS = {"error": "ValueError: the last words"}
CTRL_C = {"ctrl_c", "by_a_thread"}
LAST_WORDS |= dict.fromkeys(CTRL_C, "KeyboardInterrupt")


@functools.cache
def status_after_ctrl_c() -> int:
    """The signal's, or 1 where a Python within a Python does not know that it was one."""
    return finished([warm_python(), "-c", "raise KeyboardInterrupt"]).returncode


@pytest.mark.parametrize("seed", range(soaked(1, 12)))
@pytest.mark.parametrize("way", endings.BY_NAME)
def test_a_process_ends_with_its_own_status_and_says_nothing(
    device: str, way: str, seed: int, tmp_path: Path
) -> None:
    program = (
        f"import endings\nkept = endings.begin({way!r}, {seed}, {device!r}, {str(tmp_path)!r})"
    )
    # In a fork, autograd's threads of several GPUs race for torch's thread pool and log an error.
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    children = sys.executable
    done = run_warm(
        "-c", program, status=None, PYTHON_OF_CHILDREN=children, CUDA_VISIBLE_DEVICES=gpu
    )
    if way == "daemon_thread" and done.returncode == -signal.SIGABRT:
        # Python ends the thread within an op of torch's, which aborts: a plain Embedding does, too.
        assert (done.stdout, done.stderr) == ("", "terminate called without an active exception\n")
        return
    expected = status_after_ctrl_c() if way in CTRL_C else STATUS.get(way, 0)
    assert done.returncode == expected, done.stderr
    assert done.stdout == ""
    if way in LAST_WORDS:
        assert done.stderr.startswith("Traceback")
        assert done.stderr.endswith(f"\n{LAST_WORDS[way]}\n")
        assert "Exception ignored" not in done.stderr
    else:
        assert done.stderr == ""
    if way == "saving":
        assert speedtorch.load(tmp_path)["step"] == 5


def test_modules_that_outlive_their_globals_say_nothing() -> None:
    """gc.freeze() keeps reference cycles until Python has cleared the globals of all modules."""
    program = f"""
        import gc, sys
        sys.path += {[str(TESTS), str(TESTS.parent)]}
        import endings
        kept = endings.begin("end", 0, "cpu", "")
        gc.freeze()
    """
    done = finished([sys.executable, "-c", textwrap.dedent(program)])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_daemon_thread_that_waits_for_another_rank_ends_with_the_process(tmp_path: Path) -> None:
    """A child that holds the lock of the other rank keeps it waiting."""
    program = """
        import os, sys, threading, time
        from speedtorch._C import RankWords
        path = sys.argv[1]
        with open(path, "wb") as file:
            file.write(bytes(16 * 2 * 2 * 4))
        if os.fork() == 0:
            os.close(1), os.close(2)
            other = open(path, "r+b")
            words = RankWords(other.fileno(), 0, 4, 1, 2)
            time.sleep(6)
            os._exit(0)
        time.sleep(1)
        file = open(path, "r+b")
        words = RankWords(file.fileno(), 0, 4, 0, 2)
        wait = lambda: words.exchange([[1], [1]], 30.0)
        threading.Thread(target=wait, daemon=True).start()
        time.sleep(0.5)
    """
    done = finished([sys.executable, "-c", textwrap.dedent(program), tmp_path / "words"])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

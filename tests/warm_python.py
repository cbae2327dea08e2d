"""A Python that has imported torch before it is asked for anything: programs start at once.

Importing torch takes seconds of a core. One process of a run of tests does it, and forks for each
program that `warm_python()` is given, which runs to its end as any Python does: with arguments,
environment, folder and standard streams of its own, for four minutes at most. It is none for a
program that looks at what importing torch does.

A program that takes longer says where it is, and ends. So do all programs whose asker has ended.
"""

from __future__ import annotations

import functools
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SOURCE = """
import contextlib, faulthandler, gc, json, os, runpy, select, signal, socket, sys, threading, time
import types
import torch
import torch._dynamo  # as the first optimizer of a program does

gc.freeze()  # or each end would look at all that torch made
path, here, own_path = sys.argv[1], sys.argv[2], [each for each in sys.path if each]
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(path)
    listener.listen(64)
    print("ready", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait for programs
    while True:
        if 0 in select.select([listener, 0], [], [])[0]:
            sys.exit()  # who started this one has ended
        asked = listener.accept()[0]
        if os.fork() == 0:
            break
        asked.close()
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
_, streams, _, _ = socket.recv_fds(asked, 1, 3)
request = json.loads(asked.makefile().readline())
if (pid := os.fork()) != 0:
    has_ended = threading.Event()

    def end_all():
        for end in os.killpg, os.kill:  # it may not have begun its session
            with contextlib.suppress(ProcessLookupError):
                end(pid, signal.SIGKILL)

    def end_when_left():
        if not asked.recv(1) and not has_ended.is_set():
            end_all()

    asked.sendall(f"{pid}\\n".encode())
    threading.Thread(target=end_when_left, daemon=True).start()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    has_ended.set()
    if status == -signal.SIGALRM:
        end_all()
    with contextlib.suppress(BrokenPipeError):
        asked.sendall(f"{status}\\n".encode())
    os._exit(0)
asked.close()
os.setsid()
for number, stream in enumerate(streams):
    os.dup2(stream, number)
    os.close(stream)
os.chdir(request["folder"])
os.environ.clear()
os.environ.update(request["environment"])
until = float(os.environ.get("WARM_PYTHON_UNTIL", time.monotonic() + 240))
os.environ["WARM_PYTHON_UNTIL"] = str(until - 1)  # programs that it starts say first where they are
faulthandler.register(signal.SIGALRM, chain=True)
signal.setitimer(signal.ITIMER_REAL, max(0.1, until - time.monotonic()))
if "OMP_NUM_THREADS" in os.environ:  # read when torch is imported
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
if request["arguments"][0] == "-u":  # as torchrun gives
    del request["arguments"][0]
    sys.stdout.reconfigure(write_through=True)
flag, what, *arguments = request["arguments"]
folders = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
sys.path[:] = ["" if flag == "-c" else os.getcwd(), *folders, *own_path]
sys.executable = here
if flag == "-c":
    sys.argv = ["-c", *arguments]
    sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(what, "<string>", "exec"), vars(sys.modules["__main__"]))
elif flag == "-m":
    sys.argv = ["-m", *arguments]
    runpy.run_module(what, run_name="__main__", alter_sys=True)
else:
    sys.exit(f"a warm Python takes -c or -m, not {flag}")
"""

# Hands everything over, waits, and ends as the program did, or when the process that began it ends.
ASK = """
import json, os, select, signal, socket, sys

parent = os.getppid()

def answer():
    said = b""
    while not said.endswith(b"\\n"):
        while not select.select([source], [], [], 0.5)[0]:
            if os.getppid() != parent:
                sys.exit(1)
        said += source.recv(1) or b"\\n"
    return int(said)

handed_on = {signal.SIGINT, signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, handed_on)  # until there is who they are for
request = {"arguments": sys.argv[2:], "folder": os.getcwd(), "environment": dict(os.environ)}
with socket.socket(socket.AF_UNIX) as source:
    source.connect(sys.argv[1])
    socket.send_fds(source, [b"+"], [0, 1, 2])
    source.sendall(json.dumps(request).encode() + b"\\n")
    program = answer()
    for number in handed_on:
        signal.signal(number, lambda number, frame: os.kill(program, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handed_on)
    status = answer()
if status < 0:
    for number in handed_on:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Where the socket and the executable lie; it goes with this process."""
    return tempfile.TemporaryDirectory()


@functools.cache
def warm_python() -> str:
    """An executable that takes the place of sys.executable before `-c`, `-m` or `-u -m`."""
    folder = Path(_folder().name)
    executable, address = folder / "python", str(folder / "source")
    ask = [sys.executable, "-SE", "-c", ASK, address]
    executable.write_text(f'#!/bin/sh\nexec {shlex.join(ask)} "$@"\n')
    executable.chmod(0o755)
    source = subprocess.Popen(
        [sys.executable, "-E", "-c", SOURCE, address, str(executable)],
        # A fork cannot use a GPU that was woken before it: none is, should an import look for one.
        env={**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert source.stdout is not None and source.stdout.readline() == "ready\n"
    _sources.append(source)
    return str(executable)


def finished(
    command: Sequence[str | Path],
    *,
    seconds: float = 120.0,
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end, or fails with what it has said when the time is over.

    All that it has started ends then, too; programs of a warm Python have said where they are.
    """
    environment = {**(os.environ if env is None else env)}
    environment["WARM_PYTHON_UNTIL"] = str(time.monotonic() + 0.85 * seconds)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(
        list(map(str, command)), env=environment, start_new_session=True, **streams, **options
    )
    is_late, said = False, ["", ""]
    try:
        said = list(process.communicate(timeout=seconds))
    except subprocess.TimeoutExpired:
        is_late = True
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    if is_late or process.returncode == -signal.SIGALRM:
        try:
            said = list(process.communicate(timeout=10)) if is_late else said
        except subprocess.TimeoutExpired as late:  # something else has its streams
            said = [(each or b"").decode() for each in (late.stdout, late.stderr)]
        name = " ".join(map(str, command[1:]))
        raise AssertionError(f"has not ended in {seconds:.0f} s: {name}\n" + "\n".join(said))
    return subprocess.CompletedProcess(process.args, process.returncode, *said)


def output_of(
    *command: str | Path, seconds: float = 1200.0, cwd: Path | None = None, **environment: str
) -> str:
    """Standard output of a program that must succeed, in this environment with these variables."""
    done = finished(command, seconds=seconds, env={**os.environ, **environment}, cwd=cwd)
    assert done.returncode == 0, f"{command[0]}: {done.stdout}\n{done.stderr}"
    return done.stdout


def run_warm(
    *arguments: str | Path,
    status: int | None = 0,
    seconds: float = 200.0,
    cwd: Path | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Runs a warm Python that finds the package and the tests, and checks its status if not None.

    The program has the `environment` besides the variables of this process.
    """
    import speedtorch

    folders = [Path(speedtorch.__file__).parents[1], Path(__file__).parent]
    path = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    known = {**os.environ, "PYTHONPATH": os.pathsep.join(path), **environment}
    done = finished([warm_python(), *arguments], seconds=seconds, env=known, cwd=cwd)
    assert status in (None, done.returncode), done.stderr
    return done


# They end when their standard input does, with this process.
_sources: list[subprocess.Popen[str]] = []

"""A Python that has imported torch before it is asked for anything: programs start at once.

Importing torch takes seconds of a core. One process of a run of tests does it, and forks for each
program that `warm_python()` is given, which runs to its end as any Python does: with arguments,
environment, folder and standard streams of its own, for four minutes at most. It is none for a
program that looks at what importing torch does.
"""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = """
import gc, json, os, runpy, select, signal, socket, sys, types
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
request = json.loads(asked.makefile().read())
if (pid := os.fork()) != 0:
    asked.sendall(f"{pid}\\n".encode())
    asked.sendall(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\\n".encode())
    os._exit(0)
asked.close()
os.setsid()
for number, stream in enumerate(streams):
    os.dup2(stream, number)
    os.close(stream)
signal.alarm(240)
os.chdir(request["folder"])
os.environ.clear()
os.environ.update(request["environment"])
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

# Hands everything over, waits, and ends as the program did.
ASK = """
import json, os, signal, socket, sys

handed_on = {signal.SIGINT, signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, handed_on)  # until there is who they are for
request = {"arguments": sys.argv[2:], "folder": os.getcwd(), "environment": dict(os.environ)}
with socket.socket(socket.AF_UNIX) as source:
    source.connect(sys.argv[1])
    socket.send_fds(source, [b"+"], [0, 1, 2])
    source.sendall(json.dumps(request).encode())
    source.shutdown(socket.SHUT_WR)
    answers = source.makefile()
    program = int(answers.readline())
    for number in handed_on:
        signal.signal(number, lambda number, frame: os.kill(program, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handed_on)
    status = int(answers.readline())
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


# They end when their standard input does, with this process.
_sources: list[subprocess.Popen[str]] = []

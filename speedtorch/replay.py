"""`speedtorch replay FILE`: runs the operators of a dump again and compares their results."""

import sys
import time
from typing import Any

import torch

from speedtorch.dump_file import Dump, open_dump
from speedtorch.ops.call_log import call_text
from speedtorch.ops.functions import _FAKE_KERNELS, _overloads
from speedtorch.ops.op_dump import digests_of, is_operator, wait_for_gpu
from speedtorch.torch_internals import tree_leaves

__all__ = ["replay"]


def _repeated(call: dict[str, Any]) -> tuple[str, bool]:
    """Runs a call again; returns the text to print, and whether the results are the same."""
    inputs, (name, overload) = call["inputs"], call["op"]
    for value in tree_leaves(inputs):
        if isinstance(value, str):
            return f"not run: {value}", False
    full_name = name if overload == "default" else f"{name}.{overload}"
    if full_name not in _FAKE_KERNELS or not is_operator(op := _overloads(name)[overload]):
        return "not run: dumps cannot contain this operator", False
    error, results, began = "", None, time.perf_counter()
    try:
        with torch.set_grad_enabled(call["grad"]):
            results = op(*inputs)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    wait_for_gpu()
    taken = f"{(time.perf_counter() - began) * 1e6:.0f} us"
    if (error or digests_of(op, inputs, results)) == call.get("error", call.get("digests")):
        return f"{taken}, the same {error or 'results'}", True
    recorded = call.get("error", "other results" if "digests" in call else "the call did not end")
    return f"{taken}, {error or 'results'}; recorded: {recorded}", False


def replay(path: str) -> int:
    """Prints whether each operator of a dump has the same results here; runs no code of the file.

    Returns 0 if all results and errors are as recorded, else 1.
    """
    try:
        with open_dump(path) as dump:
            return _replayed(dump)
    except BrokenPipeError:  # the reader of the output has closed it, see main()
        raise
    except (OSError, ValueError) as error:
        print(f"speedtorch: {error}", file=sys.stderr)
        return 1


def _replayed(dump: Dump) -> int:
    """Replays an open dump; see replay()."""
    same = 0
    for number, call in enumerate(dump, 1):
        text, is_same = _repeated(call)
        name = ".".join(part for part in call["op"] if part != "default")
        print(f"{number:3} {name}({', '.join(map(call_text, call['inputs']))}): {text}")
        same += is_same
    print(f"{same} of {len(dump)} operators had the same results")
    return int(same != len(dump))

"""Records the last operators' inputs for `speedtorch replay`; loaded by SPEEDTORCH_LOG=dump."""

import atexit
import hashlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from speedtorch import torch_internals as internals
from speedtorch.ops.call_log import call_text
from speedtorch.ops.log_switches import MAX_DUMPED_CALLS

__all__ = ["digests_of", "is_operator", "recorded", "wait_for_gpu", "write_by"]

# Bytes of one call. Copies remain on the device of their inputs, so large inputs of many calls
# would fill the host's or the GPU's memory.
_MAX_BYTES = 64 << 20
# The number of leading results that these ops write completely. Later results have unwritten
# entries, which digests must exclude.
_WHOLE_RESULTS = {
    "plan_batch": 5,
    "plan_parts": 5,
    "append_batch": 9,
    "merge_rows": 3,
    "diff_ids": 0,
}
# The position of an argument that is a handle, by op. The handle of plan_parts names a queued copy
# of numbers to the host, which a replay lacks.
_HANDLES = {"plan_parts": 3}
_NO_HANDLE = -1
_process = os.getpid()  # calls of a forked child are not recorded
_path = Path(f"speedtorch-dump-{_process}.safetensors").absolute()
_calls: deque[dict[str, Any]] = deque(maxlen=MAX_DUMPED_CALLS)
_writers: list[Callable[[Path, Sequence[dict[str, Any]]], object]] = []
"""The function that writes calls to a file.

The package sets this function later, because its module imports the ops and therefore this module.
"""


def write_by(writer: Callable[[Path, Sequence[dict[str, Any]]], object]) -> None:
    """Sets the function that writes calls to a file."""
    _writers[:] = [writer]


def is_operator(op: Any) -> bool:
    """Whether an op takes tensors, and returns tensors or writes to them."""
    takes, _, returns = str(op._schema).partition("->")
    return "Tensor" in takes and ("Tensor" in returns or bool(internals.written_arguments(op)))


def wait_for_gpu() -> None:
    """Waits for kernels that may still write to the tensors of a call."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def digests_of(op: Any, arguments: Sequence[object], results: object) -> list[str]:
    """SHA-256 digests of an op's results and written arguments, except for large tensors."""
    wait_for_gpu()
    found = internals.tree_leaves(results)[: _WHOLE_RESULTS.get(op._schema.name.partition("::")[2])]
    for place in internals.written_arguments(op).values():
        found += internals.tree_leaves(arguments[place : place + 1])
    small = [part for part in found if isinstance(part, Tensor) and part.nbytes <= _MAX_BYTES]
    copies = (tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in small)
    return [
        hashlib.sha256(copy.cpu().view(-1).view(torch.uint8).numpy().data).hexdigest()
        for copy in copies
    ]


def _is_recording() -> bool:
    """Whether copies would become part of a trace, a transform or a graph capture."""
    if internals.is_tracing() or internals.is_transformed() or internals.dispatch_modes():
        return True
    has_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return has_gpu and torch.cuda.is_current_stream_capturing()


def _copied(arguments: Sequence[object]) -> Any:
    """Copies tensors, whose shared storages remain shared; a text replaces a tensor not copied."""
    copies: dict[int, torch.UntypedStorage] = {}

    def copy(value: object) -> object:
        """Returns a tensor over the copied storage, or a text with the reason if none is copied."""
        if not isinstance(value, Tensor):
            return value
        is_plain = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided
        if not is_plain or value.is_conj() or value.is_neg():
            return f"{call_text(value)} is not recorded: it is not a plain tensor"
        storage: Any = value.untyped_storage()
        if (key := internals.storage_id(storage)) not in copies:
            if sum(part.nbytes() for part in (storage, *copies.values())) > _MAX_BYTES:
                return f"{call_text(value)} is not recorded: a call has over {_MAX_BYTES >> 20} MiB"
            copies[key] = storage.clone()
        made = torch.empty(0, dtype=value.dtype, device=value.device)
        made.set_(copies[key], value.storage_offset(), value.shape, value.stride())
        return made.requires_grad_(value.requires_grad)

    wait_for_gpu()
    with torch.no_grad(), internals.as_plain():
        return internals.tree_map(copy, [*arguments])


def _write(why: str) -> None:
    """Writes the recorded calls to a file in the working directory at import."""
    if os.getpid() != _process or not _calls or not _writers:
        return
    log, new = logging.getLogger("speedtorch.dump"), _path.with_suffix(f".{threading.get_ident()}")
    try:
        _writers[0](new, [*map(dict, _calls.copy())])
        new.replace(_path)
    except OSError as error:
        new.unlink(missing_ok=True)
        log.error("%s. The dump %s cannot be written: %s", why, _path, error)
        return
    atexit.unregister(_write)  # so that the exit does not overwrite an error's dump
    log.warning(
        "%s: `speedtorch replay %s` runs the last operators again (at most %d of %d MiB each)",
        *(why, _path, MAX_DUMPED_CALLS, _MAX_BYTES >> 20),
    )


atexit.register(_write, "the program ends")


def recorded(op: Any) -> Callable[..., Any]:
    """Wraps an op to record its inputs and digests of its results."""
    if not is_operator(op):
        return op  # type: ignore[no-any-return]

    def call(*arguments: object) -> Any:
        """Records the inputs before the op runs, because the op may overwrite them."""
        if torch.compiler.is_compiling() or os.getpid() != _process or _is_recording():
            return op(*arguments)
        name = [op._schema.name.partition("::")[2], op._overloadname]
        inputs = _copied(arguments)
        if (place := _HANDLES.get(name[0])) is not None:
            inputs[place] = _NO_HANDLE
        made = {"op": name, "grad": torch.is_grad_enabled(), "inputs": inputs}
        _calls.append(made)
        try:
            results = op(*arguments)
        except Exception as error:
            made["error"] = f"{type(error).__name__}: {error}"
            _write(f"{'.'.join(name)} raised {type(error).__name__}")
            raise
        made["digests"] = digests_of(op, arguments, results)
        return results

    return call

"""Reports tables, pinned tensors and streams alive at exit; loaded by SPEEDTORCH_LOG=alive."""

import atexit
import gc
import logging
import os
import traceback
from collections import Counter
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from speedtorch.memory.host_memory import memory_stats, pinned_tensors
from speedtorch.ops.call_log import call_text
from speedtorch.table.host_table import HostTable

__all__ = ["report_at_exit"]

_LIBRARIES = tuple(f"{Path(file).parent}{os.sep}" for file in (__file__, torch.__file__))
_places: WeakKeyDictionary[HostTable, str] = WeakKeyDictionary()


def _report(process: int) -> None:
    if os.getpid() != process:  # a forked child has copies of all objects
        return
    gc.collect()  # frees objects that only reference cycles keep alive
    tables = [f"\n  {table!r}, created at {place}" for table, place in _places.items()]
    pinned = [f"\n  {call_text(tensor)}, {tensor.nbytes} bytes" for tensor in pinned_tensors()]
    types = [type(value) for value in gc.get_objects()]
    cuda = Counter(t.__name__ for t in types if issubclass(t, torch.cuda.Stream | torch.cuda.Event))
    logging.getLogger("speedtorch.alive").warning(
        "alive at exit: %d tables%s\n%d pinned tensors%s\nbytes of host memory: %s\n"
        "streams and events of the whole program: %s",
        *(len(tables), "".join(tables), len(pinned), "".join(pinned), memory_stats(), dict(cuda)),
    )


def report_at_exit() -> None:
    """Records the line that creates each table from now on, and logs live objects at exit."""
    make = HostTable._set_memory

    def set_memory_and_record(table: HostTable, *arguments: Any) -> None:
        """Creates the table and records the line of the program that creates it."""
        make(table, *arguments)
        stack = traceback.extract_stack()
        lines = [frame for frame in stack if not frame.filename.startswith(_LIBRARIES)]
        _places[table] = f"{lines[-1].filename}:{lines[-1].lineno}"

    setattr(HostTable, "_set_memory", set_memory_and_record)  # noqa: B010
    atexit.register(_report, os.getpid())

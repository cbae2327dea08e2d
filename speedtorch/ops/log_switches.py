"""The environment variable SPEEDTORCH_LOG, read once when the package is imported.

`calls` logs each public call. `dump` or `dump:K` writes the inputs of the last operators to a file,
after an error or at exit. `alive` logs tables, pinned tensors and streams that are alive at exit.
"""

import os
import re

__all__ = ["LOGS_CALLS", "MAX_DUMPED_CALLS", "REPORTS_ALIVE"]

_DEFAULT_DUMPED_CALLS = 16

_parts = [*filter(None, os.environ.get("SPEEDTORCH_LOG", "").split(","))]
for _part in _parts:
    if not re.fullmatch(r"calls|alive|dump(:[1-9]\d{0,2})?", _part):
        raise ValueError(
            "SPEEDTORCH_LOG: expected 'calls', 'dump', 'dump:K' with K from 1 to 999, or 'alive',"
            f" joined by commas, got {_part!r}; unset the variable to log nothing"
        )
LOGS_CALLS, REPORTS_ALIVE = "calls" in _parts, "alive" in _parts
_dumps = [part.partition(":")[2] for part in _parts if part.startswith("dump")]
MAX_DUMPED_CALLS = max([int(count or _DEFAULT_DUMPED_CALLS) for count in _dumps], default=0)
"""The number of last operators whose inputs are kept for a dump; 0 keeps none."""

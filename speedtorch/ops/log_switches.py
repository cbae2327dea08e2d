"""The environment variable SPEEDTORCH_LOG, read once when the package is imported."""

import os
import re

__all__ = ["DUMPED_CALLS", "LOGS_CALLS", "REPORTS_ALIVE"]

_parts = [*filter(None, os.environ.get("SPEEDTORCH_LOG", "").split(","))]
for _part in _parts:
    if not re.fullmatch(r"calls|alive|dump(:[1-9]\d{0,2})?", _part):
        raise ValueError(
            "SPEEDTORCH_LOG: expected 'calls', 'dump', 'dump:K' with K from 1 to 999, or 'alive',"
            f" joined by commas, got {_part!r}; unset the variable to log nothing"
        )
LOGS_CALLS, REPORTS_ALIVE = "calls" in _parts, "alive" in _parts
# The number of last operators whose inputs are recorded; 0 records none.
DUMPED_CALLS = max([int(part[5:] or 16) for part in _parts if part.startswith("dump")], default=0)

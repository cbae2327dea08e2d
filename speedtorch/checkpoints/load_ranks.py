"""LoadRanks: an all-gather for load(), through torch's store instead of collectives.

Other threads may look up rows during a load: a collective here could be paired with a lookup's.
"""

from __future__ import annotations

import json
import weakref
from datetime import timedelta
from typing import Any

from speedtorch.parallel.collectives import Collectives
from speedtorch.parallel.ranks import Ranks
from speedtorch.torch_internals import prefix_store

__all__ = ["LoadRanks"]

_counts: weakref.WeakKeyDictionary[Ranks, int] = weakref.WeakKeyDictionary()
"""The number of all-gathers so far, the same on all ranks."""


class LoadRanks(Collectives):
    """The processes that load one checkpoint; see Collectives."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.rank, self.size = ranks.rank, ranks.size
        self._store = prefix_store(f"speedtorch load {ranks.name}")

    def all_gather(self, value: Any) -> list[Any]:
        """All-gathers a value that consists of lists, numbers, strings and None.

        Raises RuntimeError if a rank's value is missing after the timeout, or the store fails.
        """
        number = _counts[self._ranks] = _counts.get(self._ranks, 0) + 1
        self._store.set(f"{number}/{self.rank}", json.dumps(value))
        keys = [f"{number}/{rank}" for rank in range(self.size)]
        try:
            self._store.wait(keys, timedelta(seconds=self._ranks.timeout))
        except RuntimeError as error:
            raise RuntimeError(
                "load: the all-gather among the ranks failed. All ranks with sharded rows must"
                " call load() together, and each must read its files within the timeout of the"
                f" process group ({error})."
            ) from error
        values = [json.loads(self._store.get(key)) for key in keys]
        if number > 1:  # all ranks are at this call, and have read the previous values
            self._store.delete_key(f"{number - 1}/{self.rank}")
        return values

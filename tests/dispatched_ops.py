"""Which of torch's ops a call makes: on a GPU each costs the host microseconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Ops(TorchDispatchMode):
    """Notes all ops but those that make a view of a tensor, or memory without values."""

    FREE = frozenset({"detach", "view", "as_strided", "slice", "select", "empty", "new_empty"})
    FREE |= {"lift_fresh"}

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if (name := func.name().partition("::")[2].partition(".")[0]) not in self.FREE:
            self.names.append(name)
        return func(*args, **(kwargs or {}))

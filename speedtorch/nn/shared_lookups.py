"""together: ranks compare and ask for the lookups of several modules at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from speedtorch.nn.row_module import RowModule

__all__ = ["failing", "together", "trained"]


def together(
    parts: Mapping[RowModule, Sequence[Tensor]], *, trains: bool | None = None
) -> AbstractContextManager[None]:
    """Within this the caller makes, announces or plans the lookups of these ids, and no others.

    `trains` says whether all of them are for a step; None: as lookups are now.
    """
    shared: list[tuple[Any, Sequence[Tensor], bool]] = []
    for module, ids in parts.items():
        if module.lookups is not module.trained_rows:
            is_now = torch.is_grad_enabled() and module.trained_rows.parameter.requires_grad
            shared.append((module.lookups.exchange, ids, is_now if trains is None else trains))
    # Requests documents the method.
    return shared[0][0].together(shared) if len(shared) > 1 else nullcontext()


def failing(modules: Iterable[RowModule], count: int = 1) -> AbstractContextManager[None]:
    """As together(), of so many lookups of each module that have no ids on this rank."""
    bad = {module: [torch.tensor([module.num_embeddings])] * count for module in modules}
    return together(bad)


def trained(modules: Iterable[RowModule]) -> list[RowModule]:
    """The modules that train their rows: announcing to others does nothing."""
    return [each for each in modules if each.trained_rows.parameter.requires_grad]

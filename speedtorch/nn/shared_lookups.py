"""together: ranks compare and ask for the lookups of several modules at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, cast

import torch
from torch import Tensor

from speedtorch.nn.row_module import RowModule

__all__ = ["announcing", "failing", "together", "trained"]


class _Shared(Protocol):
    """Lookups of rows that ranks share; ShardedRows documents the method."""

    def together(
        self, lookups: Sequence[tuple[_Shared, Sequence[Tensor], bool]]
    ) -> AbstractContextManager[None]: ...


def together(
    parts: Mapping[RowModule, Sequence[Tensor]], *, trains: bool | None = None
) -> AbstractContextManager[None]:
    """Within this the caller makes, announces or plans the lookups of these ids, and no others.

    `trains` says whether all of them are for a step; None: as lookups are now.
    """
    shared = []
    for module, ids in parts.items():
        if module.lookups is not module.trained_rows:
            is_grad = torch.is_grad_enabled() and module.trained_rows.parameter.requires_grad
            lookups = cast(_Shared, module.lookups)
            shared.append((lookups, ids, is_grad if trains is None else trains))
    return shared[0][0].together(shared) if len(shared) > 1 else nullcontext()


def announcing(parts: Mapping[RowModule, Sequence[Tensor]]) -> AbstractContextManager[None]:
    """As together(), of lookups that are announced to the modules that train their rows."""
    return together({each: parts[each] for each in trained(parts)})


def trained(modules: Iterable[RowModule]) -> list[RowModule]:
    """The modules that train their rows: announcing to others does nothing."""
    return [each for each in modules if each.trained_rows.parameter.requires_grad]


def failing(modules: Sequence[RowModule], count: int = 1) -> AbstractContextManager[None]:
    """As together(), of so many lookups of each module that have no ids on this rank."""
    bad = {module: [torch.tensor([module.num_embeddings])] * count for module in modules}
    return together(bad)

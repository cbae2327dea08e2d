"""together: ranks compare and ask for the lookups of several modules at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from speedtorch.nn.row_module import RowModule

__all__ = ["Ids", "NoIds", "SharedLookups", "fail", "together", "trained"]


class NoIds(NamedTuple):
    """In the place of a lookup's ids: this rank has none, because of this error."""

    error: Exception


Ids: TypeAlias = Tensor | NoIds

_Lookups = TypeVar("_Lookups", bound="SharedLookups")


class SharedLookups(ABC):
    """The lookups of a module whose rows several ranks share."""

    @abstractmethod
    def together(
        self: _Lookups, lookups: Sequence[tuple[_Lookups, Sequence[Ids], bool]]
    ) -> AbstractContextManager[None]:
        """Within this, modules of the same ranks make, announce or plan these lookups at once.

        The caller does so with just these, for each module with all of them or none. Each has the
        ids of its lookups, and whether these are for a step.
        """


def together(
    parts: Mapping[RowModule, Sequence[Ids]], *, trains: bool | None = None
) -> AbstractContextManager[None]:
    """Within this the caller makes, announces or plans the lookups of these ids, and no others.

    `trains` says whether all of them are for a step; None: as lookups are now.
    """
    shared: list[tuple[SharedLookups, Sequence[Ids], bool]] = []
    for module, ids in parts.items():
        if isinstance(lookups := module.lookups, SharedLookups):
            is_now = torch.is_grad_enabled() and module.trained_rows.parameter.requires_grad
            shared.append((lookups, ids, is_now if trains is None else trains))
    return shared[0][0].together(shared) if len(shared) > 1 else nullcontext()


def fail(modules: Sequence[RowModule], error: Exception, *, announced: int = 0) -> None:
    """As RowModule.fail, of a lookup of each module, or of announcing so many."""
    none = [NoIds(error)] * (announced or 1)
    with together(dict.fromkeys(modules, none)):
        for module in modules:
            module.fail(error, announced=announced)


def trained(modules: Iterable[RowModule]) -> list[RowModule]:
    """The modules that train their rows: announcing to others does nothing."""
    return [each for each in modules if each.trained_rows.parameter.requires_grad]

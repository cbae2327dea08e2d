"""together: ranks compare and request the lookups of several modules at once."""

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
    """Replaces a lookup's ids on a rank that has no ids because of `error`."""

    error: Exception


Ids: TypeAlias = Tensor | NoIds

_Lookups = TypeVar("_Lookups", bound="SharedLookups")


class SharedLookups(ABC):
    """Looks up rows of a module whose rows are sharded among ranks."""

    @abstractmethod
    def together(
        self: _Lookups, lookups: Sequence[tuple[_Lookups, Sequence[Ids], bool]]
    ) -> AbstractContextManager[None]:
        """Returns a context in which modules run, announce or plan lookups on all ranks at once.

        `lookups` has, for each module, the ids of its lookups and whether they train. The caller
        must use all of a module's lookups or none, and no others.
        """


def together(
    parts: Mapping[RowModule, Sequence[Ids]], *, trains: bool | None = None
) -> AbstractContextManager[None]:
    """Returns a context in which ranks compare and request the modules' lookups at once.

    Without several modules with sharded rows, the context has no effect. Within it the caller must
    run, announce or plan only the lookups of these ids. `trains` says whether all lookups train, by
    default as lookups at the time of the call.
    """
    shared: list[tuple[SharedLookups, Sequence[Ids], bool]] = []
    for module, ids in parts.items():
        if isinstance(lookups := module.lookups, SharedLookups):
            is_now = torch.is_grad_enabled() and module.trained_rows.parameter.requires_grad
            shared.append((lookups, ids, is_now if trains is None else trains))
    return shared[0][0].together(shared) if len(shared) > 1 else nullcontext()


def fail(modules: Sequence[RowModule], error: Exception, *, announced: int = 0) -> None:
    """Calls RowModule.fail for a lookup of each module, or for `announced` announced ids."""
    none = [NoIds(error)] * (announced or 1)
    with together(dict.fromkeys(modules, none)):
        for module in modules:
            module.fail(error, announced=announced)


def trained(modules: Iterable[RowModule]) -> list[RowModule]:
    """Returns the modules with trained rows; announce() has no effect on frozen rows."""
    return [module for module in modules if module.trained_rows.parameter.requires_grad]

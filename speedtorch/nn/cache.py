"""cache: keeps frequently loaded rows and their optimizer state on the device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from speedtorch.memory.byte_count import bytes_of
from speedtorch.nn.row_module import RowModule
from speedtorch.step.cache_budget import CacheBudget

__all__ = ["cache", "share_cache"]


def cache(module: nn.Module, nbytes: int | str | None) -> None:
    """Keeps the most frequently loaded rows and their optimizer state in device memory.

    A cache changes no result of a step. Rows that are in the cache do not cross the link:
    a tenth of the rows served 40 % of the loaded rows with Zipf 1.05 (docs/cache.md), and if all
    ids are equally frequent, a cache saves its share. Which rows it has is decided by how often
    they were loaded, after 4, 16, 64 and then every 64 exchanges, between two steps; a row takes
    the place of another only where that was surely loaded less often. With capacity= and
    speedtorch.graphed it is decided between two replays.

    The bytes are shared out over the tables of the module: at least one row to each, then as many
    bytes to each, and what a small table does not need to others. attach() and resize() change what
    tables need, and the bytes are shared out anew then; a cache with another number of slots begins
    without rows. Beside them 8 bytes of the device are taken for every row of a table, and for a
    moment when rows change places about 24 bytes for every row and 64 MiB. Calls that
    read or write a table (flush, save, state_dict, emb.table) first write the cached rows back to
    host memory. The next step loads them again.

    Args:
        module: An Embedding, EmbeddingBag or collection, or a module that contains some.
        nbytes: Device bytes for all tables, a number or text such as "4GiB"; None removes it.

    Raises:
        TypeError, ValueError: nbytes is no number of bytes, or too few for one row of each table;
            there is no such module. At the first step: the GPU does not read the table's memory in
            place.
        RuntimeError: A CUDA graph uses the rows; nothing has changed.

    Example:
        >>> import torch, speedtorch
        >>> model = torch.nn.Sequential(speedtorch.Embedding(1000, 4))
        >>> speedtorch.cache(model, "64KiB")
        >>> model(torch.tensor([1, 2])).sum().backward()
        >>> model[0].report().slots
        1000
    """
    if not isinstance(module, nn.Module):
        given = f"{type(module).__name__}, {type(nbytes).__name__}"
        raise TypeError(f"cache: expected an nn.Module and bytes, in this order, got {given}")
    modules = [each for each in module.modules() if isinstance(each, RowModule)]
    if not modules:
        raise ValueError(
            f"cache: {type(module).__name__} has no speedtorch.Embedding, EmbeddingBag or"
            " collection in it"
        )
    for each in modules:  # before the first of them changes
        each.trained_rows.exchange.memory.refuse_if_captured("changing its cache")
    if nbytes is None:
        for each in modules:
            each.set_cache(None)
        return
    share_cache(modules, CacheBudget(bytes_of("nbytes", nbytes)))


def share_cache(modules: Sequence[RowModule], budget: CacheBudget) -> None:
    """Divides bytes among the caches of modules; raises ValueError if they are too few."""
    for module in modules:
        budget.add(module, module.trained_rows)
    budget.check({})
    for module in modules:
        module.set_cache(budget)
    budget.share_anew()

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

    A cache does not change the results of a step. A step loads a cached row from device memory and
    writes it back there, so that the row does not cross the link (PCIe or NVLink-C2C). For ids with
    a Zipf distribution of exponent 1.05, a cache of a tenth of the rows served 40 % of the loaded
    rows (docs/cache.md). If all ids are equally frequent, a cache of a tenth serves a tenth.

    The cache selects the most frequently loaded rows before the 4th, the 16th and then every 64th
    exchange that writes rows back. With speedtorch.graphed the cache selects rows between two
    replays. A row replaces another only if the other was loaded significantly less often.

    The bytes are divided equally among the tables of the module, with at least one row for each
    table. Bytes that a small table does not need go to others. attach() and resize() divide the
    bytes again. A cache with a new number of rows starts empty. `cache_rows` of a module no longer
    applies: the new cache selects its rows.

    Beside these bytes, each row of a table takes 8 bytes of device memory. A selection temporarily
    takes about 24 bytes for each row, and 64 MiB. Calls that read or write a whole table (flush,
    save, state_dict, emb.table) first write all cached rows back to host memory. A later step loads
    them again.

    Args:
        module: An Embedding, EmbeddingBag or collection, or a module that contains some.
        nbytes: Device bytes for all tables, a number or "4GiB"; with None the cache is removed.

    Raises:
        TypeError, ValueError: nbytes is not a number of bytes, nbytes are too few for one row of
            each table, or `module` is or contains no such module. ValueError at the first step: the
            GPU cannot read the table's memory in place.
        RuntimeError: A CUDA graph uses the rows; nothing has changed.
        NotImplementedError: A table has `resident` rows of a file; nothing has changed.

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
    modules = [child for child in module.modules() if isinstance(child, RowModule)]
    if not modules:
        raise ValueError(
            f"cache: {type(module).__name__} has no speedtorch.Embedding, EmbeddingBag or"
            " collection in it"
        )
    for row_module in modules:  # check all modules before the first changes
        row_module.trained_rows.exchange.memory.refuse_if_captured("changing its cache")
    if nbytes is None:
        for row_module in modules:
            row_module.set_cache(None)
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

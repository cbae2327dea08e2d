"""full_state_dict: gathers all rows on the first rank, for libraries that save on one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from speedtorch.memory import host_memory
from speedtorch.nn.row_module import RowModule
from speedtorch.optim.attached_state import state_of
from speedtorch.parallel.collectives import run_on_all
from speedtorch.parallel.ranks import Ranks
from speedtorch.parallel.sharded_rows import ShardedRows

__all__ = ["full_state_dict"]


@contextmanager
def full_state_dict(model: nn.Module) -> Iterator[None]:
    """Makes state_dict() on the first rank contain all rows of a sharded model and their state.

    Use this with libraries whose first rank saves with torch.save or safetensors: accelerate,
    Lightning and transformers' Trainer. All ranks must enter the block, and save as without
    speedtorch. Within the block, state_dict() of the model, its wrapper and an attached optimizer
    returns plain tensors on the first rank. These are host copies of the rows at the start of the
    block. Load outside of the block: load_state_dict() of a sharded module accepts all rows and
    loads the rank's shard. A model without sharded rows does not change.

    The first rank needs host memory for all rows and their state. If that is too much, use
    torch.distributed.checkpoint outside of the block.

    Args:
        model: A model with sharded Embeddings, EmbeddingBags or collections, or its wrapper.

    Raises:
        MemoryError: The first rank has too little host memory.
        RuntimeError: The ranks do not all enter the block with the same modules and optimizers.

        Both raise on all ranks, and nothing has changed.

    Example:
        On all ranks::

            with speedtorch.full_state_dict(model):
                accelerator.save_state(folder)
    """
    sharing: dict[Ranks, list[ShardedRows]] = {}
    for module in model.modules():
        if isinstance(module, RowModule) and isinstance(module.lookups, ShardedRows):
            sharing.setdefault(module.lookups.ranks, []).append(module.lookups)
    made: list[tuple[ShardedRows, Mapping[str, Tensor]]] = []
    for ranks in sorted(sharing, key=lambda ranks: ranks.name):
        made += _collected(ranks, sharing[ranks])
    with ExitStack() as stack:
        for table, full in made:
            stack.enter_context(table.rows.fields.replaced_by(full))
        yield


def _collected(
    ranks: Ranks, tables: list[ShardedRows]
) -> Iterator[tuple[ShardedRows, Mapping[str, Tensor]]]:
    """Gathers all rows of tables, by field, on the first rank; empty on the other ranks."""
    tables[0].check_gather()
    full: list[dict[str, Tensor]] = []
    names: list[list[str]] = []

    def prepare() -> list[list[str]]:
        """Writes rows back and returns the field names; the first rank allocates memory."""
        for table in tables:
            table.rows.flush()
            state = state_of(table.rows)
            names.append(["weight", *(() if state is None else state.names)])
        if ranks.rank == 0:
            full.extend(_allocate(tables, names))
        return names

    def error_of(text: str) -> Exception:
        """A MemoryError of another rank remains a MemoryError."""
        return (MemoryError if "raises MemoryError:" in text else RuntimeError)(text)

    for rank, of_rank in enumerate(run_on_all(ranks, prepare, "full_state_dict", error_of)):
        if of_rank != names:
            raise RuntimeError(
                f"full_state_dict: rank {rank} has the fields {of_rank}, and rank {ranks.rank} has"
                f" {names}. Pass the same model, with the same optimizers attached, on all ranks."
            )
    for number, table in enumerate(tables):
        with table.rows.lock:
            for name in names[number]:
                table.gather_field(name, full[number][name] if full else None)
    return zip(tables, full, strict=False)


def _allocate(tables: list[ShardedRows], names: list[list[str]]) -> list[dict[str, Tensor]]:
    """Allocates host memory for all rows; raises MemoryError if there is too little."""
    pairs = list(zip(tables, names, strict=True))
    needed = 0
    for table, fields in pairs:
        for name in fields:
            field = table.rows.table.field(name)
            needed += table.rows.table.whole_rows * field.shape[1:].numel() * field.element_size()
    if host_memory.is_checked() and needed > (available := host_memory.available_bytes()):
        raise MemoryError(
            f"all rows and their state need {needed:,} bytes of host memory on the first rank, but"
            f" {available:,} are available. Use torch.distributed.checkpoint, which saves rows on"
            " each rank."
        )
    return [{name: table.allocate_all_rows(name) for name in fields} for table, fields in pairs]

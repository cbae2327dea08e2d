"""full_state_dict: all rows on the first rank, for what saves a state_dict() of one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from speedtorch.memory import host_memory
from speedtorch.nn.row_module import RowModule
from speedtorch.optim.attached_state import state_of
from speedtorch.parallel.ranks import Ranks
from speedtorch.parallel.sharded_rows import ShardedRows
from speedtorch.parallel.together import agreed

__all__ = ["full_state_dict"]


@contextmanager
def full_state_dict(model: nn.Module) -> Iterator[None]:
    """Lets the first rank's state_dict() have all rows of a sharded model, and their state.

    For libraries whose first rank saves by torch.save or safetensors: accelerate, Lightning and
    transformers' Trainer. All ranks begin the block; each then saves as without speedtorch. Within
    it state_dict() of the model, of what wraps it and of an attached optimizer has plain tensors on
    the first rank: copies in host memory of what the rows were when the block began. Load as
    always, outside of it: load_state_dict() of sharded modules takes all rows and keeps the rank's
    share. A model without sharded rows stays as it is.

    The first rank needs host memory for all rows and their state. For more than it has there is
    torch.distributed.checkpoint, which belongs outside of the block.

    Args:
        model: Has sharded Embeddings, EmbeddingBags or collections, or wraps a model that has some.

    Raises:
        MemoryError: The first rank has too little host memory.
        RuntimeError: Not all ranks begin the block, with the same modules and optimizers.

        Both raise on all ranks; nothing has changed then.

    Example:
        On all ranks::

            with speedtorch.full_state_dict(model):
                accelerator.save_state(folder)
    """
    sharing: dict[Ranks, list[tuple[RowModule, ShardedRows]]] = {}
    for each in model.modules():
        if isinstance(each, RowModule) and isinstance(each.lookups, ShardedRows):
            sharing.setdefault(each.lookups.ranks, []).append((each, each.lookups))
    made: list[tuple[RowModule, Mapping[str, Tensor]]] = []
    for ranks in sorted(sharing, key=lambda each: each.name):
        made += _collected(ranks, sharing[ranks])
    with ExitStack() as stack:
        for module, full in made:
            stack.enter_context(module.trained_rows.fields.replaced_by(full))
        yield


def _collected(
    ranks: Ranks, modules: list[tuple[RowModule, ShardedRows]]
) -> list[tuple[RowModule, Mapping[str, Tensor]]]:
    """All rows of modules by their fields, on the first rank; nothing on the others."""
    modules[0][1].meet_for_all()
    full: list[dict[str, Tensor]] = []
    names: list[list[str]] = []

    def prepare() -> list[list[str]]:
        for module, _ in modules:
            module.flush()
            state = state_of(module.trained_rows)
            names.append(["weight", *(() if state is None else state.names)])
        if ranks.rank == 0:
            full.extend(_room(modules, names))
        return names

    def error_of(text: str) -> Exception:
        return (MemoryError if "raises MemoryError:" in text else RuntimeError)(text)

    for rank, of_rank in enumerate(agreed(ranks, prepare, "full_state_dict", error_of)):
        if of_rank != names:
            raise RuntimeError(
                f"full_state_dict: rank {rank} has the fields {of_rank}, and rank {ranks.rank} has"
                f" {names}: give it the same model, with the same optimizers attached, on all ranks"
            )
    for number, (module, lookups) in enumerate(modules):
        with module.trained_rows.turn:
            for name in names[number]:
                lookups.collect(name, full[number][name] if full else None)
    return [(module, each) for (module, _), each in zip(modules, full, strict=False)]


def _room(
    modules: list[tuple[RowModule, ShardedRows]], names: list[list[str]]
) -> list[dict[str, Tensor]]:
    """Host memory for all rows; MemoryError if there is too little."""
    needed = 0
    for (module, _), fields in zip(modules, names, strict=True):
        table = module.trained_rows.table
        for name in fields:
            field = table.field(name)
            needed += table.whole_rows * field.shape[1:].numel() * field.element_size()
    if host_memory.is_checked() and needed > (available := host_memory.available_bytes()):
        raise MemoryError(
            f"all rows and their state need {needed:,} bytes of host memory of the first rank, and"
            f" available are {available:,}: use torch.distributed.checkpoint, which saves each"
            " rank's rows there"
        )
    return [
        {name: lookups.empty_for_all(name) for name in fields}
        for (_, lookups), fields in zip(modules, names, strict=True)
    ]

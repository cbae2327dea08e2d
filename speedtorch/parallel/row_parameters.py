"""row_parameters: the parameters of a model that stand for rows of tables."""

from __future__ import annotations

from torch import nn

from speedtorch.nn.row_module import RowModule

__all__ = ["row_parameters"]


def row_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The weights of a model's Embeddings, EmbeddingBags and collections.

    Wrappers that shard the other parameters must ignore these, such as
    `torch.distributed.fsdp.fully_shard(model, ignored_params=row_parameters(model))`. shard()
    shards the rows themselves: without it each process trains a separate copy of the rows.

    If an optimizer steps a group's parameters together (foreach, which torch chooses on a GPU, or
    fused), torch cannot mix parameters of fully_shard with others: use a separate parameter group
    for the rows. A GradScaler handles all gradients of an optimizer together: with a GradScaler
    use a separate optimizer for the rows.

    Args:
        model: Any model, with or without sharded rows.

    Returns:
        The parameters; an empty set if the model has no such module.

    Raises:
        TypeError: `model` is not an nn.Module.

    Example:
        >>> import speedtorch
        >>> model = nn.Sequential(speedtorch.Embedding(10, 4), nn.Linear(4, 2))
        >>> speedtorch.row_parameters(model) == {model[0].weight}
        True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    return {module.weight for module in model.modules() if isinstance(module, RowModule)}

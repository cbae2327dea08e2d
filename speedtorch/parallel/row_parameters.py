"""row_parameters: the weights of a model that stand for rows, which others leave alone."""

from __future__ import annotations

from torch import nn

from speedtorch.nn.row_module import RowModule

__all__ = ["row_parameters"]


def row_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The weights of a model's Embeddings, EmbeddingBags and collections.

    For what shards the other parameters, as
    `torch.distributed.fsdp.fully_shard(model, ignored_params=row_parameters(model))`. The rows
    themselves are for shard(): unless they are shared out, each process trains rows of its own.

    Where an optimizer steps a group's parameters together (foreach, which torch chooses on a GPU,
    or fused), torch does not take those of fully_shard and others at once: give the rows a
    parameter group of their own. A GradScaler goes through all of an optimizer's gradients: with
    one give the rows an optimizer of their own.

    Args:
        model: Of any kind; the rows may be shared out or not.

    Returns:
        The parameters; none if the model has no such module.

    Example:
        >>> import speedtorch
        >>> model = nn.Sequential(speedtorch.Embedding(10, 4), nn.Linear(4, 2))
        >>> speedtorch.row_parameters(model) == {model[0].weight}
        True
    """
    return {each.weight for each in model.modules() if isinstance(each, RowModule)}

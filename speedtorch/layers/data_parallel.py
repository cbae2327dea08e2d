"""What DistributedDataParallel cannot average of units, refused as their forward begins."""

from __future__ import annotations

from torch import nn

from speedtorch.torch_internals import active_data_parallel

__all__ = ["check_data_parallel"]


def check_data_parallel(name: str, module: nn.Module, *, steps: bool) -> None:
    """Checks a unit whose forward begins, perhaps within that of a DistributedDataParallel.

    Args:
        name: what the error calls the unit.
        module: of the unit; parameters that DistributedDataParallel ignores are left out.
        steps: whether the unit is stepped within the backward.

    Raises:
        NotImplementedError: the unit would be stepped before its gradients are averaged, or its
            gradients are views of what is averaged, which no longer are when a move of the unit
            has given them other memory.
    """
    wrapper = active_data_parallel()
    if wrapper is None or not (steps or wrapper.gradient_as_bucket_view):
        return
    trained = {id(each) for each in module.parameters() if each.requires_grad}
    if all(
        each in wrapper.parameters_to_ignore
        for each, parameter in wrapper.module.named_parameters()
        if id(parameter) in trained
    ):
        return
    if steps:
        raise NotImplementedError(
            f"unit {name!r}: auto(step=True) steps units by the gradients of this rank, before"
            " DistributedDataParallel has averaged them: use auto() without step=True, and"
            " optimizer.step()"
        )
    raise NotImplementedError(
        f"unit {name!r}: its gradients move with it, and those of"
        " DistributedDataParallel(gradient_as_bucket_view=True) must stay where they are averaged:"
        " use gradient_as_bucket_view=False"
    )

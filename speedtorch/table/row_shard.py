"""RowShard: one rank's part of a sharded field, for torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from speedtorch.torch_internals import tensor_without_memory

__all__ = ["RowShard"]

_REMEDY = (
    "Call torch.distributed.checkpoint.save(state_dict, checkpoint_id=folder) on all ranks, or save"
    " within `with speedtorch.full_state_dict(model):` on all ranks."
)


class RowShard(Tensor):
    """A tensor with the shape of all rows of a field, and memory only for this rank's rows.

    torch.distributed.checkpoint saves the rows of all ranks from such tensors, one chunk for each
    block, and can load them with another number of ranks. Other operations raise, except
    copy.deepcopy() and new_empty() with the same shape.
    """

    field: Tensor
    """This rank's rows `[n, ...]`, in the table's memory."""
    blocks: Sequence[tuple[range, range]]
    """The blocks of this rank: each block's range among all rows, then its range in `field`."""

    def __new__(cls, rows: int, field: Tensor, blocks: Sequence[tuple[range, range]]) -> RowShard:
        """Creates a tensor of the `rows` rows of all ranks, with no memory but that of `field`."""
        shape = (rows, *field.shape[1:])
        return tensor_without_memory(cls, shape, dtype=field.dtype, device=field.device)

    def __init__(self, rows: int, field: Tensor, blocks: Sequence[tuple[range, range]]) -> None:
        """Sets this rank's rows and their places."""
        self.field, self.blocks = field, blocks

    def __repr__(self) -> str:  # type: ignore[override]
        count = sum(len(whole) for whole, _ in self.blocks)
        return f"RowShard({list(self.shape)}, {self.dtype}, {count:,} rows of this rank)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> RowShard:
        if func is torch.ops.aten.new_empty.default and tuple(args[1]) == tuple(args[0].shape):
            # torch.distributed.checkpoint.async_save copies this rank's rows into a new RowShard.
            # `blocks` describe only a tensor of the same shape.
            given: RowShard = args[0]
            field = given.field.new_empty(given.field.shape, **(kwargs or {}))
            return RowShard(len(given), field, given.blocks)
        raise NotImplementedError(
            f"{func}: this tensor has no rows of other ranks. The module's `table` has the rows of"
            " this rank."
        )

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise TypeError(f"pickle, and so torch.save, would save one rank's rows only. {_REMEDY}")

    # safetensors and accelerate compare storages, and ignore a tensor whose untyped_storage()
    # raises. data_ptr() must return 0 for torch's async_save, so safetensors would write no values.
    # Therefore is_contiguous(), which safetensors calls next, raises the error for the user.

    def untyped_storage(self) -> NoReturn:
        """Raises NotImplementedError, because a caller would save one rank's rows as all rows."""
        raise NotImplementedError(f"this tensor has only the rows of one rank to save. {_REMEDY}")

    def storage(self) -> NoReturn:
        """Raises NotImplementedError, like untyped_storage()."""
        self.untyped_storage()

    def is_contiguous(self, *_: object, **__: object) -> NoReturn:
        """Raises NotImplementedError, like untyped_storage()."""
        self.untyped_storage()

    def __deepcopy__(self, _: object) -> RowShard:
        """Copies this rank's rows to new memory."""
        return RowShard(len(self), self.field.clone(), self.blocks)

    # The protocol of torch.distributed.checkpoint; see torch.distributed._checkpointable.

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        columns = self.shape[1:]
        zeros = [0] * len(columns)
        return [
            ChunkStorageMetadata(
                offsets=torch.Size([whole.start, *zeros]), sizes=torch.Size([len(whole), *columns])
            )
            for whole, _ in self.blocks
        ]

    def __create_write_items__(self, name: str, _: object) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties, size = TensorProperties.create_from_tensor(self.field), self.size()
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        for whole, local in self.blocks:
            if whole.start == index.offset[0]:  # of a chunk of __create_chunk_list__()
                return self.field[local.start : local.stop]
        raise ValueError(f"{index.fqn}: no block of this rank begins at row {index.offset[0]}")

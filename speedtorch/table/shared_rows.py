"""SharedRows: a field of a table whose rows several processes share, as checkpoints know it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from speedtorch.torch_internals import tensor_without_memory

__all__ = ["SharedRows"]

_REMEDY = (
    "use torch.distributed.checkpoint.save(state_dict, checkpoint_id=folder), on all ranks, or save"
    " within `with speedtorch.full_state_dict(model):`, which all ranks begin"
)


class SharedRows(Tensor):
    """All rows of a field by their shape, of which some are here.

    torch.distributed.checkpoint saves the rows of all ranks from such tensors, a chunk for each
    block, and loads them into the shares of as many ranks as there are then. Nothing can be
    computed with it.
    """

    field: Tensor
    """The rows that are here `[n, ...]`, in the table's memory."""
    blocks: Sequence[tuple[range, range]]
    """Where they are among all rows, and in the field."""

    def __new__(cls, rows: int, field: Tensor, blocks: Sequence[tuple[range, range]]) -> SharedRows:
        """Names `rows` rows."""
        shape = (rows, *field.shape[1:])
        return tensor_without_memory(cls, shape, dtype=field.dtype, device=field.device)

    def __init__(self, rows: int, field: Tensor, blocks: Sequence[tuple[range, range]]) -> None:
        """Has the blocks of them that are in a field."""
        self.field, self.blocks = field, blocks

    def __repr__(self) -> str:  # type: ignore[override]
        here = sum(len(there) for there, _ in self.blocks)
        return f"SharedRows({list(self.shape)}, {self.dtype}, {here:,} rows of this rank)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> SharedRows:
        if func is torch.ops.aten.new_empty.default and tuple(args[1]) == tuple(args[0].shape):
            # torch.distributed.checkpoint.async_save copies what is here into such a tensor.
            given: SharedRows = args[0]
            field = given.field.new_empty(given.field.shape, **(kwargs or {}))
            return SharedRows(len(given), field, given.blocks)
        raise NotImplementedError(
            f"{func}: the rows of other ranks are not here; this rank's are in emb.table"
        )

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise TypeError(f"torch.save would write the rows of one rank alone: {_REMEDY}")

    # safetensors and accelerate compare the storages of a state_dict(), also to load it, and skip
    # those that raise NotImplementedError. Before safetensors writes a tensor it asks whether that
    # is contiguous; with a data_ptr() of 0, which torch's async_save needs, it writes no values.

    def untyped_storage(self) -> NoReturn:
        """Refused, as all that would save the rows of one rank for those of all."""
        raise NotImplementedError(f"there are the rows of one rank alone to be saved: {_REMEDY}")

    def storage(self) -> NoReturn:
        """As untyped_storage."""
        self.untyped_storage()

    def is_contiguous(self, *_: object, **__: object) -> NoReturn:
        """As untyped_storage."""
        self.untyped_storage()

    def __deepcopy__(self, _: object) -> SharedRows:
        """The rows that are here, in memory of their own."""
        return SharedRows(len(self), self.field.clone(), self.blocks)

    # What torch.distributed.checkpoint asks for; see torch.distributed._checkpointable.

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        columns = self.shape[1:]
        zeros = [0] * len(columns)
        return [
            ChunkStorageMetadata(
                offsets=torch.Size([there.start, *zeros]), sizes=torch.Size([len(there), *columns])
            )
            for there, _ in self.blocks
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
        for there, here in self.blocks:
            if there.start == index.offset[0]:
                return self.field[here.start : here.stop]
        raise ValueError(f"{index.fqn}: no block of this rank begins at row {index.offset[0]}")

"""SavedTensors: the tensors of a run's parts, by their keys in the checkpoint's files."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from speedtorch.checkpoints.saved_values import described
from speedtorch.checkpoints.sharded_tensors import is_dtensor, rows_of_dtensor
from speedtorch.files import safetensors_format
from speedtorch.step.row_weight import RowWeight
from speedtorch.table.read_only_rows import ReadOnlyRows
from speedtorch.table.row_shard import RowShard

__all__ = ["SavedTensors"]


class SavedTensors:
    """The tensors of a checkpoint, without duplicates.

    Attributes:
        by_key: Tensors of this process.
        shared: Rows that are sharded among ranks.
    """

    def __init__(self) -> None:
        self.by_key: dict[str, Tensor] = {}
        self.shared: dict[str, RowShard] = {}
        self._keys: dict[tuple[Any, ...], str] = {}

    @property
    def all_by_key(self) -> dict[str, Tensor]:
        """`by_key` and `shared` together."""
        return {**self.by_key, **self.shared}

    def described(self, name: str, part: Any) -> Any:
        """Converts a part's state, or a value, to JSON types, and keeps its tensors here."""
        if (
            isinstance(part, list | tuple)
            and part
            and all(hasattr(item, "state_dict") for item in part)
        ):
            part = [item.state_dict() for item in part]
        elif hasattr(part, "state_dict"):
            part = part.state_dict()
        return described(name, part, self._keep)

    def _keep(self, name: str, tensor: Tensor) -> str:
        """Keeps a tensor and returns its key; views with the same memory and layout share a key."""
        plain = name.replace("'][", ".").replace("['", ".").replace("']", "")
        plain = plain.replace("][", ".").replace("[", ".").replace("]", "")
        key = next(
            free
            for number in itertools.count()
            if (free := plain + f"#{number}" * (number > 0)) != safetensors_format.RESERVED
            and free not in self.by_key
            and free not in self.shared
        )
        if is_dtensor(tensor):
            tensor = rows_of_dtensor(name, tensor)
        if isinstance(tensor, RowShard):
            self.shared[key] = tensor
            return key
        tensor = _dense(name, tensor)
        same = tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
        if tensor.numel() and same in self._keys:
            return self._keys[same]
        self.by_key[key] = tensor
        return self._keys.setdefault(same, key) if tensor.numel() else key


def _dense(name: str, tensor: Tensor) -> Tensor:
    """A dense tensor with contiguous rows to write; raises if a tensor has no plain elements."""
    if isinstance(tensor, RowWeight):
        raise TypeError(
            f"{name}: this weight represents all rows of {tensor._rows.name}. Pass the module, its"
            " state_dict(), or weight.detach().clone()."
        )
    if is_lazy(tensor) or tensor.is_nested:
        what = "a nested tensor" if tensor.is_nested else "an uninitialized one of a lazy module"
        raise ValueError(f"{name}: expected a dense tensor with elements, got {what}")
    tensor = tensor.rows if isinstance(tensor, ReadOnlyRows) else tensor.detach()
    if type(tensor) is not Tensor:
        kind = type(tensor)
        remedy = "Save its plain values, or save the part by torch.save(part.state_dict(), file)."
        raise TypeError(
            f"{name}: expected a plain tensor, got {kind.__module__}.{kind.__qualname__}. {remedy}"
        )
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        what = "a quantized one" if tensor.is_quantized else f"the layout {tensor.layout}"
        what = "one on the meta device" if tensor.is_meta else what
        raise ValueError(f"{name}: expected a dense tensor with elements, got {what}")
    if tensor.dtype not in safetensors_format.DTYPES.values():
        raise ValueError(
            f"{name}: safetensors files cannot hold {tensor.dtype}. Convert the tensor first."
        )
    tensor = tensor.resolve_conj().resolve_neg()
    is_in_rows = tensor.dim() > 0 and tensor.numel() > 0 and tensor[0].is_contiguous()
    return tensor if is_in_rows else tensor.contiguous()

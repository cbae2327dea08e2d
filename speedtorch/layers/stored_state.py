"""StoredState: stores float32 optimizer state in 16 bits between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from speedtorch.layers.access_tracker import is_plain_tensor
from speedtorch.ops.functions import round_rows
from speedtorch.step.rounding import EXPONENT_BITS, RoundingMode, check_mode

__all__ = ["StoredState"]

_ROW = 1024
"""Elements that are rounded as a row, so that few ids are needed."""

_STORED = "_speedtorch_stored"
"""An attribute of state tensors that were stored in 16 bits, also of copies of these tensors. An
optimizer may itself keep other tensors in 16 bits."""


class StoredState:
    """Rounds state tensors to 16 bits after a step, and makes them float32 before the next step.

    Random numbers are a function of an element's position in its tensor and of the number and sizes
    of the tensors rounded before, so that all ranks that step the same parameters round alike.

    Args:
        dtype: The dtype between steps, torch.bfloat16.
        mode: How numbers are rounded.
    """

    def __init__(self, dtype: torch.dtype, mode: RoundingMode) -> None:
        check_mode(mode, dtype)
        if dtype != torch.bfloat16:
            why = ", because squares of gradients would become 0" if dtype is torch.float16 else ""
            raise ValueError(f"stored: expected torch.bfloat16 or None, got {dtype!r}{why}")
        self.dtype, self.mode = dtype, mode
        self._keys: dict[torch.device, Tensor] = {}
        self._ids: dict[torch.device, Tensor] = {}

    def __str__(self) -> str:
        return f"stored={str(self.dtype)[6:]}, {self.mode} rounding"

    def applies(self, parameter: Tensor, value: Tensor) -> bool:
        """Whether a state tensor is stored in 16 bits: float32, with the parameter's shape.

        A tensor without dimensions may be a step count, and is not stored in 16 bits.
        """
        is_wide = value.dtype == torch.float32 or _STORED in vars(value)
        is_plain = is_wide and is_plain_tensor(value)
        is_alike = parameter.dtype == torch.float32 and value.shape == parameter.shape
        return is_plain and is_alike and value.dim() > 0 and value.numel() > 0 and _is_dense(value)

    def nbytes(self, parameter: Tensor, value: Tensor) -> int:
        """The bytes of a state tensor in a step."""
        return value.numel() * 4 if self.applies(parameter, value) else value.nbytes

    def widen(self, values: Sequence[Tensor]) -> None:
        """Makes state tensors float32."""
        for value in values:
            if value.dtype == self.dtype:
                value.data = value.detach().float()

    def narrow(self, values: Mapping[str, Tensor], memory: Mapping[str, Tensor]) -> None:
        """Rounds the state tensors of one parameter and stores them in 16 bits.

        `memory` has tensors with the result's dtype, shape and strides for some of the names.
        """
        wide = {name: value for name, value in values.items() if value.dtype == torch.float32}
        if not wide:
            return
        with torch.no_grad():
            self._round([value.detach() for value in wide.values()])
            for name, value in wide.items():
                if (place := memory.get(name)) is not None:
                    place.copy_(value)
                value.data = value.detach().to(self.dtype) if place is None else place
                vars(value)[_STORED] = True

    def _round(self, values: Sequence[Tensor]) -> None:
        """Rounds dense tensors of the same size in place."""
        flat = [value.as_strided((value.numel(),), (1,)) for value in values]
        device, (size,) = flat[0].device, flat[0].shape
        if device not in self._keys:
            self._keys[device] = torch.zeros(2, dtype=torch.int64, device=device)
        rows = size // _ROW
        for parts in (
            [part[: rows * _ROW].view(rows, _ROW) for part in flat],
            [part[rows * _ROW :] for part in flat],
        ):
            if count := len(parts[0]):
                bits = [EXPONENT_BITS[self.dtype]] * len(parts)
                ids, is_random = self._first_ids(device, count), self.mode == "stochastic"
                round_rows(parts, ids, self._keys[device], bits, is_random)

    def _first_ids(self, device: torch.device, count: int) -> Tensor:
        """Returns 0 to count - 1."""
        ids = self._ids.get(device)
        if ids is None or len(ids) < count:
            ids = self._ids[device] = torch.arange(max(count, _ROW), device=device)
        return ids[:count]


def _is_dense(value: Tensor) -> bool:
    """Whether a tensor has one element at each address from its first to its last."""
    if value.layout is not torch.strided:
        return False
    order = sorted(range(value.dim()), key=value.stride, reverse=True)
    return value.is_contiguous() or value.permute(order).is_contiguous()

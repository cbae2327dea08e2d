"""Rounding: float32 rows as a table stores them in 16 bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from speedtorch.ops.functions import round_rows
from speedtorch.step.row_store import Fields
from speedtorch.table.lazy_init import Portion

__all__ = ["Rounding", "RoundingMode", "StoredAs", "check_mode", "stored_dtypes"]

RoundingMode: TypeAlias = Literal["stochastic", "nearest"]
"""How numbers are rounded after each step."""
StoredAs: TypeAlias = torch.dtype | Mapping[str, torch.dtype]
"""The dtype of the weight in the table, or those of the weight and of named fields of state."""

_EXPONENT_BITS = {torch.bfloat16: 8, torch.float16: 5}


class Rounding:
    """Rounds held float32 rows, after each step, to numbers that the table's 16 bits store.

    The random numbers come from a generator that has no state but a key, (seed, step), and is asked
    by row id, field and column. So a row gets the same ones on the CPU and a GPU, with a cache or
    without, whatever the other rows of the batch are and whichever rank has it.

    Args:
        stored: The dtypes of fields that the table stores in 16 bits, by name.
        mode: How numbers are rounded.
        key: int64 `[2]` on the device of the rows: the seed, and how many steps were rounded.
        portion: Of which rows of a larger table the ids here are, or None.

    Attributes:
        stored: As given.
    """

    def __init__(
        self,
        stored: Mapping[str, torch.dtype],
        mode: RoundingMode,
        key: Tensor,
        portion: Portion | None = None,
    ) -> None:
        self.stored = dict(stored)
        self._is_random = mode == "stochastic"
        self._key = key
        self._portion = portion
        self._blocks: tuple[Tensor, Tensor] | None = None

    def follow(self, key: Tensor) -> None:
        """Counts steps in another tensor from now on, which may be on another device."""
        self._key, self._blocks = key, None

    def check_fields(self, fields: Fields) -> None:
        """Raises ValueError unless held fields can be stored so."""
        if unknown := self.stored.keys() - fields.keys() - {"weight"}:
            kept = ", ".join(name for name in fields if name != "weight") or "nothing"
            raise ValueError(
                f"stored: there is no field {sorted(unknown)[0]!r}; the optimizer keeps {kept} of"
                " each row"
            )
        for name, dtype in self.stored.items():
            if name in fields and fields[name][1] != torch.float32:
                raise ValueError(
                    f"stored: {name!r} is {fields[name][1]} in a step, and {dtype} can store"
                    " float32 alone"
                )

    def stored_fields(self, fields: Fields) -> Fields:
        """Held fields as the table has them."""
        return {
            name: (shape, self.stored.get(name, dtype)) for name, (shape, dtype) in fields.items()
        }

    def round(self, names: Iterable[str], ids: Tensor, rows: Sequence[Tensor]) -> None:
        """Rounds the rows of all fields in place: the first `len(ids)` are those of the ids."""
        bits = [_EXPONENT_BITS[self.stored[n]] if n in self.stored else 0 for n in names]
        round_rows(list(rows), self._whole(ids), self._key, bits, self._is_random)

    def _whole(self, ids: Tensor) -> Tensor:
        """Ids in the larger table; those that are no rows come out as some number."""
        if self._portion is None:
            return ids
        if self._blocks is None:
            blocks = self._portion.blocks
            begins = torch.tensor([here.start for _, here in blocks] or [0])
            shifts = torch.tensor([there.start - here.start for there, here in blocks] or [0])
            self._blocks = begins.to(ids.device), shifts.to(ids.device)
        begins, shifts = self._blocks
        block = torch.searchsorted(begins, ids, right=True) - 1
        return ids + shifts[block.clamp(min=0)]


def stored_dtypes(stored: object, held: torch.dtype) -> dict[str, torch.dtype] | None:
    """The dtypes of an argument `stored`, checked; None for none."""
    if stored is None:
        return None
    asked: dict[str, Any] = dict(stored) if isinstance(stored, Mapping) else {"weight": stored}
    for name, dtype in asked.items():
        if dtype not in _EXPONENT_BITS:
            raise ValueError(
                f"stored: expected torch.bfloat16 or torch.float16 for {name!r}, got {dtype}"
            )
    if held != torch.float32:
        raise ValueError(
            f"stored: rows are held as {held}, and 16 bits can store float32 alone: give"
            " dtype=torch.float32"
        )
    return asked


def check_mode(mode: object, stored: object) -> None:
    """Raises ValueError for what is no way of rounding, or where nothing is to be rounded."""
    if stored is None and mode == "nearest":
        raise ValueError("rounding: says how rows of 16 bits are rounded; give stored= as well")
    if mode not in get_args(RoundingMode):
        raise ValueError(f"rounding: expected 'stochastic' or 'nearest', got {mode!r}")

"""Rounding: rounds float32 rows that a table stores in 16 bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from speedtorch.ops.functions import round_rows
from speedtorch.step.row_store import Fields
from speedtorch.table.lazy_init import ShardSpec

__all__ = ["EXPONENT_BITS", "Rounding", "RoundingMode", "StoredAs", "check_mode", "stored_dtypes"]

RoundingMode: TypeAlias = Literal["stochastic", "nearest"]
"""How numbers are rounded after each step."""
StoredAs: TypeAlias = torch.dtype | Mapping[str, torch.dtype]
"""The weight's dtype in the table, or a mapping from "weight" and state names to dtypes."""

EXPONENT_BITS = {torch.bfloat16: 8, torch.float16: 5}


class Rounding:
    """Rounds the step's float32 rows, after each step, to numbers that a 16-bit dtype can store.

    Random numbers are a function of a key (seed, step), the row id, the field and the column. A row
    therefore has the same random numbers on the CPU and a GPU, with and without a cache, in any
    batch and on any rank.

    Args:
        stored: The dtypes of fields that the table stores in 16 bits, by name.
        mode: The rounding mode.
        key: int64 `[2]` on the device of the rows: the seed and the number of rounded steps.
        shard_spec: The rows of a larger table to which the ids refer, or None.

    Attributes:
        stored: The argument of this name.
    """

    def __init__(
        self,
        stored: Mapping[str, torch.dtype],
        mode: RoundingMode,
        key: Tensor,
        shard_spec: ShardSpec | None = None,
    ) -> None:
        self.stored = dict(stored)
        self._is_random = mode == "stochastic"
        self._key = key
        self._shard_spec = shard_spec
        self._blocks: tuple[Tensor, Tensor] | None = None

    def follow(self, key: Tensor) -> None:
        """Replaces the key tensor; the new tensor may be on another device."""
        self._key, self._blocks = key, None

    def check_fields(self, fields: Fields) -> None:
        """Raises ValueError if the fields cannot be stored in these dtypes."""
        if unknown := self.stored.keys() - fields.keys() - {"weight"}:
            kept = ", ".join(name for name in fields if name != "weight") or "nothing"
            raise ValueError(
                f"stored: there is no field {sorted(unknown)[0]!r}. The optimizer has {kept} for"
                " each row."
            )
        for name, dtype in self.stored.items():
            if name in fields and fields[name][1] != torch.float32:
                raise ValueError(
                    f"stored: {name!r} is {fields[name][1]} in a step, but only float32 can be"
                    f" stored as {dtype}."
                )

    def stored_fields(self, fields: Fields) -> Fields:
        """The shapes and dtypes with which the table stores these fields."""
        return {
            name: (shape, self.stored.get(name, dtype)) for name, (shape, dtype) in fields.items()
        }

    def round(self, names: Iterable[str], ids: Tensor, rows: Sequence[Tensor]) -> None:
        """Rounds the first `len(ids)` rows of all fields in place, in the order of the ids."""
        bits = [EXPONENT_BITS[self.stored[n]] if n in self.stored else 0 for n in names]
        round_rows(list(rows), self._whole(ids), self._key, bits, self._is_random)

    def _whole(self, ids: Tensor) -> Tensor:
        """Ids in the larger table; an id without a row becomes an arbitrary number."""
        if self._shard_spec is None:
            return ids
        if self._blocks is None:
            blocks = self._shard_spec.blocks
            begins = torch.tensor([local.start for _, local in blocks] or [0])
            shifts = torch.tensor([whole.start - local.start for whole, local in blocks] or [0])
            self._blocks = begins.to(ids.device), shifts.to(ids.device)
        begins, shifts = self._blocks
        block = torch.searchsorted(begins, ids, right=True) - 1
        return ids + shifts[block.clamp(min=0)]


def stored_dtypes(stored: object, held: torch.dtype) -> dict[str, torch.dtype] | None:
    """Checks the argument `stored` and returns its dtypes by field name, or None for None."""
    if stored is None:
        return None
    dtypes: dict[str, Any] = dict(stored) if isinstance(stored, Mapping) else {"weight": stored}
    for name, dtype in dtypes.items():
        if dtype not in EXPONENT_BITS:
            raise ValueError(
                f"stored: expected torch.bfloat16 or torch.float16 for {name!r}, got {dtype}"
            )
    if held != torch.float32:
        raise ValueError(
            f"stored: rows are {held} in a step, but only float32 can be stored in 16 bits. Pass"
            " dtype=torch.float32 (data_type= in a collection's config)."
        )
    return dtypes


def check_mode(mode: object, stored: object) -> None:
    """Raises ValueError for an unknown rounding mode, or for "nearest" without `stored`."""
    if stored is None and mode == "nearest":
        raise ValueError("rounding: 'nearest' is for numbers of 16 bits. Pass stored= as well.")
    if mode not in get_args(RoundingMode):
        raise ValueError(f"rounding: expected 'stochastic' or 'nearest', got {mode!r}")

"""Checks that the SpeedTorch classes make before anything changes; messages say what would fit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from speedtorch.table.host_table import HostTable

__all__ = ["check_held", "check_rows", "check_table"]


def check_rows(
    parameter: Tensor, shape: tuple[int, ...], dtype: torch.dtype, variable: str, datatype: str
) -> None:
    """Raises ValueError unless rows of this shape and dtype fit a parameter."""
    if parameter.dim() == 0 or tuple(parameter.shape[1:]) != shape:
        raise ValueError(
            f"embed_dimension={shape[0] if len(shape) == 1 else shape}: the rows of {variable},"
            f" {list(parameter.shape)}, have the shape {list(parameter.shape[1:])}; give that, or"
            " build the model with rows of this size"
        )
    if parameter.dtype != dtype:
        raise ValueError(
            f"{datatype}={str(dtype)[6:]!r}: {variable} is {str(parameter.dtype)[6:]!r}; give that,"
            " or convert the model first"
        )


def check_table(
    table: HostTable, rows: int, fields: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> None:
    """Raises ValueError unless a table has these rows and fields."""
    if len(table) != rows:
        raise ValueError(f"table: it has {len(table):,} rows, total_classes is {rows:,}")
    for name, (shape, dtype) in fields.items():
        if name not in table.fields:
            raise ValueError(
                f"table: it has no field {name!r}, only {', '.join(table.fields)}; needed are"
                f" {', '.join(fields)} (HostTable(rows, dim, state=...))"
            )
        has = table[name]
        if tuple(has.shape[1:]) != shape or has.dtype != dtype:
            raise ValueError(
                f"table: its field {name!r} has rows {list(has.shape[1:])} of {has.dtype}; needed"
                f" are rows {list(shape)} of {dtype}"
            )


def check_held(index: Tensor, rows: Tensor, field: Tensor, holder: str) -> None:
    """Raises ValueError unless rows of a batch that `holder` has fit a table's field."""
    if rows.shape[:1] != index.shape:
        raise ValueError(
            f"afterOptimizerStep got {index.numel()} ids, but {holder} holds"
            f" {rows.shape[0] if rows.dim() else 0} rows: pass what beforeForwardPass got"
        )
    on_one_device = field.is_cpu or field.device == rows.device
    if (rows.shape[1:], rows.dtype) != (field.shape[1:], field.dtype) or not on_one_device:
        raise ValueError(
            f"afterOptimizerStep: {holder} holds rows {list(rows.shape[1:])} of {rows.dtype} on"
            f" {rows.device}, the table {list(field.shape[1:])} of {field.dtype} on {field.device}:"
            " convert or move the model before the factories are made"
        )

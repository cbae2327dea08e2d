"""The tables of a collection, as their configs describe them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["EmbeddingBagConfig", "EmbeddingConfig", "Table"]

_NEEDED = ("name", "num_embeddings", "embedding_dim", "data_type", "feature_names")
_NAMES = {"FP16": "float16", "BF16": "bfloat16", "FP32": "float32", "FP64": "float64"}
_DTYPES: dict[object, torch.dtype] = {key: getattr(torch, name) for key, name in _NAMES.items()}
_DTYPES |= {dtype: dtype for dtype in _DTYPES.values()}


@dataclass
class EmbeddingConfig:
    """One table of an EmbeddingCollection.

    All fields except `group` are torchrec's. torchrec's EmbeddingConfig also works; its fields for
    sharding have no effect. The first seven fields have torchrec's order. Pass the others by name.

    Attributes:
        num_embeddings: Number of rows.
        embedding_dim: Number of columns.
        name: The table's name, without dots and not an attribute of torch.nn.ModuleDict.
        data_type: The dtype of the rows: a torch.dtype, or torchrec's DataType.
        feature_names: Features whose ids are rows of this table; by default the table's name.
        weight_init_max: The largest initial value; by default sqrt(1 / num_embeddings).
        weight_init_min: The smallest initial value; by default -sqrt(1 / num_embeddings).
        init_fn: Replaces the uniform initialization; called as in `HostTable.init_`.
        group: Tables with equal group, embedding_dim and data_type share one parameter.

    Raises:
        TypeError, ValueError: The collection raises for a missing or wrong field.

    Example:
        >>> EmbeddingConfig(1000, 16, "user", feature_names=["user", "friend"]).feature_names
        ['user', 'friend']
    """

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: Any = torch.float32
    feature_names: list[str] = field(default_factory=list)
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    init_fn: Callable[[Tensor], object] | None = None
    group: str = ""


@dataclass
class EmbeddingBagConfig(EmbeddingConfig):
    """One table of an EmbeddingBagCollection.

    Attributes:
        pooling: "sum" or "mean", or torchrec's PoolingType. Other fields: see EmbeddingConfig.

    Raises:
        TypeError, ValueError: The collection raises for a missing or wrong field.

    Example:
        >>> import speedtorch
        >>> config = EmbeddingBagConfig(1000, 16, "user", pooling="mean")
        >>> speedtorch.EmbeddingBagCollection([config])({"user": torch.tensor([[3, 5]])}).keys()
        ['user']
    """

    pooling: Literal["sum", "mean"] | Enum = "sum"


class Table(NamedTuple):
    """A table as its config describes it."""

    name: str
    rows: int
    columns: int
    dtype: torch.dtype
    features: list[str]
    mean: bool
    group: str
    draw: Callable[[Tensor], object]

    @classmethod
    def of(cls, config: Any) -> Table:
        """Reads a config of speedtorch or torchrec.

        Raises TypeError for another type, and ValueError for a wrong field.
        """
        if missing := [name for name in _NEEDED if not hasattr(config, name)]:
            raise TypeError(
                "tables: expected a list of EmbeddingBagConfig or EmbeddingConfig, got a"
                f" {type(config).__name__} in the list, which has no {missing[0]!r}"
            )
        name = config.name
        if not isinstance(name, str) or not name or "." in name:
            kind = type(config).__name__
            raise ValueError(
                f"tables: expected a table name without dots, got {name!r}. Write"
                f" {kind}(num_embeddings=, embedding_dim=, name=)."
            )
        rows, columns = config.num_embeddings, config.embedding_dim
        for what, size in (("num_embeddings", rows), ("embedding_dim", columns)):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}: {what} must be an int of 1 or more, got {size!r}")
        kind = config.data_type
        dtype = _DTYPES.get(getattr(kind, "value", kind))
        if dtype is None:
            raise ValueError(f"{name}: data_type must be one of {list(_DTYPES)}, got {kind!r}")
        pooling = getattr(config, "pooling", "sum")
        mode = str(getattr(pooling, "value", pooling)).lower()
        if mode not in ("sum", "mean"):
            raise ValueError(f"{name}: pooling must be 'sum' or 'mean', got {pooling!r}")
        bound = math.sqrt(1 / rows)
        low, high = config.weight_init_min, config.weight_init_max
        low, high = -bound if low is None else low, bound if high is None else high
        if not low <= high:
            raise ValueError(f"{name}: weight_init_min ({low}) exceeds weight_init_max ({high})")
        # torchrec's configs already build the same partial from these bounds as their init_fn.
        own = getattr(config, "init_fn", None)
        draw = own or partial(nn.init.uniform_, a=low, b=high)
        if isinstance(config.feature_names, str):
            raise TypeError(
                f"{name}: feature_names: expected a list of names, got {config.feature_names!r}"
            )
        features, group = list(config.feature_names) or [name], getattr(config, "group", "")
        if not isinstance(group, str) or "." in group:
            raise ValueError(f"{name}: group must be a name without dots, got {group!r}")
        if twice := [feature for feature, n in Counter(features).items() if n > 1]:
            raise ValueError(f"{name}: feature_names has {twice[0]!r} twice")
        return cls(name, rows, columns, dtype, features, mode == "mean", group, draw)

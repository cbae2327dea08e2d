"""TableGroup: tables of one row layout as ranges of the rows of one table."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from speedtorch.nn.jagged import Jagged, Source
from speedtorch.nn.row_module import Device, RowModule
from speedtorch.ops.functions import table_ids
from speedtorch.ops.planned_batch import SeenIds
from speedtorch.step.row_store import Draw
from speedtorch.step.trained_rows import Bags, random_seed
from speedtorch.torch_internals import as_plain

__all__ = ["EmbeddingBagConfig", "EmbeddingConfig", "TableGroup"]

_NAMES = {"FP16": "float16", "BF16": "bfloat16", "FP32": "float32", "FP64": "float64"}
_DTYPES: dict[object, torch.dtype] = {key: getattr(torch, name) for key, name in _NAMES.items()}
_DTYPES |= {dtype: dtype for dtype in _DTYPES.values()}
# Batches whose ids have been made rows: those that prefetch has planned, and the one in training.
_KEPT = 4


@dataclass
class EmbeddingConfig:
    """One table of an EmbeddingCollection; the fields are those of torchrec's EmbeddingConfig.

    Attributes:
        num_embeddings: Rows.
        embedding_dim: Columns.
        name: Of the table.
        data_type: The elements of the rows: a torch.dtype, or torchrec's DataType.
        feature_names: Features whose ids are rows of this table; by default one of its name.
        weight_init_max: The largest first value; by default sqrt(1 / num_embeddings).
        weight_init_min: The smallest; by default -sqrt(1 / num_embeddings).
        init_fn: Gives first values instead, called as HostTable.init_ calls it.
        group: Tables of one group, embedding_dim and data_type are one parameter.
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
        pooling: "sum" or "mean", or torchrec's PoolingType. All others as in EmbeddingConfig.
    """

    pooling: Any = "sum"


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
        """Reads a config of ours or of torchrec's; ValueError for what cannot be a table."""
        name = config.name
        if not isinstance(name, str) or not name or "." in name:
            raise ValueError(f"tables: a table needs a name without dots, got {name!r}")
        rows, columns = config.num_embeddings, config.embedding_dim
        for what, size in (("num_embeddings", rows), ("embedding_dim", columns)):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}: {what} must be 1 or more, got {size!r}")
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
            raise ValueError(f"{name}: weight_init_min is {low}, above weight_init_max, {high}")
        # torchrec's configs make an init_fn of these bounds themselves: the same partial.
        own = getattr(config, "init_fn", None)
        draw = own or partial(nn.init.uniform_, a=low, b=high)
        features, group = list(config.feature_names) or [name], getattr(config, "group", "")
        if twice := [feature for feature, n in Counter(features).items() if n > 1]:
            raise ValueError(f"{name}: feature_names has {twice[0]!r} twice")
        return cls(name, rows, columns, dtype, features, mode == "mean", group, draw)


class TableIds(NamedTuple):
    """Ids of a batch as rows of a group."""

    rows: Tensor
    """Of the one table that the group's tables are ranges of: `[ids]`, -1 where there is none."""
    bags: Bags
    jagged: Jagged


class TableGroup(RowModule):
    """Tables of one row layout, each a range of the rows of one HostTable and of one parameter.

    Made by EmbeddingCollection and EmbeddingBagCollection, whose lookups it does.

    Attributes:
        weight: The parameter, which stands for all rows of all tables.
        table: The HostTable with all of them.
        tables: The tables, in order.
        firsts: The first row of each.
        features: Each table's number and the name of each of its features, in order.
    """

    def __init__(self, tables: Sequence[Table], device: Device, memory: str, freeze: bool) -> None:
        rows, columns, dtype = (sum(each.rows for each in tables), *tables[0][2:4])
        super().__init__(rows, columns, None, None, freeze, device, dtype, memory)
        self.tables = list(tables)
        self.firsts = [0, *accumulate(each.rows for each in tables)][:-1]
        self.features = [(k, key) for k, each in enumerate(tables) for key in each.features]
        self._ranges: dict[torch.device, Tensor] = {}
        self._means: dict[torch.device, Tensor] = {}
        self._known = _Known()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all rows anew as the tables' configs say."""
        for first, table in zip(self.firsts, self.tables, strict=True):
            rows = slice(first, first + table.rows)
            draw = Draw((table.draw,), random_seed(), None, rows)
            self.trained_rows.store.draw(draw, anew=True)

    def extra_repr(self) -> str:
        """The tables and their rows."""
        tables = ", ".join(f"{each.name}: {each.rows}" for each in self.tables)
        return f"{tables}; columns={self.embedding_dim}"

    def range_of(self, name: str) -> slice:
        """The rows of a table."""
        at = [each.name for each in self.tables].index(name)
        return slice(self.firsts[at], self.firsts[at] + self.tables[at].rows)

    def table_ids(self, source: Source) -> TableIds:
        """Ids of the group's features as rows, once for the tensors that they are read from.

        Nobody waits. Raises IndexError where rows are held on the CPU and an id is out of range.
        """
        device = self.trained_rows.exchange.device
        known = self._known.find(source, device)
        if known is None:
            seen = [SeenIds(each, device, unread=each.is_cuda) for each in source.tensors]
            known = self._made(source.read(device), device)
            self._known.append((source.form, seen, device, known))
        return known

    def _made(self, jagged: Jagged, device: torch.device) -> TableIds:
        if device not in self._ranges:
            ranges = [(self.firsts[k], self.tables[k].rows) for k, _ in self.features]
            self._ranges[device] = torch.tensor(ranges, device=device).reshape(-1, 2)
        ids, offsets, samples, _ = jagged
        rows, bags = table_ids(ids, offsets, self._ranges[device], samples)
        means = [self.tables[k].mean for k, _ in self.features]
        divisors = None
        if any(means):
            lengths = offsets.diff().view(len(means), samples).t().clamp(min=1)
            if not all(means):
                if device not in self._means:
                    self._means[device] = torch.tensor(means, device=device)
                lengths = lengths.where(self._means[device], 1)
            divisors = lengths.reshape(-1, 1).to(self.trained_rows.store.dtype)
        made = TableIds(rows, Bags(offsets, bags, len(means), all(means), divisors), jagged)
        if device.type == "cpu" and (error := self._bad_id(made)) is not None:
            raise error
        return made

    def look_up(self, ids: TableIds, weights: Tensor | None, *, pooled: bool) -> Tensor:
        """The rows of ids `[ids, columns]`, or added up `[samples, features * columns]`.

        Raises IndexError, with the feature and the table, if an id is out of range.
        """
        with as_plain():
            trains, rows = self._check_lookup(ids.rows), self.trained_rows
            one_by_one = not pooled or weights is not None
            try:
                if trains:
                    found = rows.summed(ids.rows, None if one_by_one else ids.bags)
                else:
                    places, held = rows.borrow(ids.rows, None, 2.0)
                    found = held[places] if one_by_one else ids.bags.pool(held, places)
            except IndexError as error:
                raise self.explained(error) from None
            if pooled and one_by_one:
                assert weights is not None
                factors = weights.to(found.dtype)[:, None]
                found = _PooledRows.apply(found * factors, ids.bags)  # type: ignore[no-untyped-call]
            if not pooled:
                return found
            return found.view(ids.jagged.samples, len(self.features) * self.embedding_dim)

    def explained(self, error: IndexError) -> IndexError:
        """An error about bad ids with the feature and the table, if the ids can still be found."""
        for *_, ids in reversed(self._known):
            if (named := self._bad_id(ids)) is not None:
                self._known.clear()
                return named
        return error

    def _bad_id(self, ids: TableIds) -> IndexError | None:
        bad = ids.rows < 0
        if not bool(bad.any()):
            return None
        position = int(bad.to(torch.int8).argmax())
        begins = ids.jagged.begins_of(len(self.features))
        at = max(k for k in range(len(self.features)) if begins[k] <= position)
        of_feature = bad[begins[at] : begins[at + 1]]
        k, feature = self.features[at]
        table = self.tables[k]
        return IndexError(
            f"feature {feature!r}: id {int(ids.jagged.ids[position])} at position"
            f" {position - begins[at]} is out of range for table {table.name!r} of"
            f" {table.rows} rows ({int(of_feature.sum())} of {len(of_feature)} ids are out of"
            " range); no row was moved"
        )

    # --------------------------------------------------------------------------------------------
    # The tables are saved one by one, by the collection.

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        pass

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        pass


class _Known(deque[tuple[Hashable, list[SeenIds], torch.device, TableIds]]):
    """Ids that were made rows before; a copy of a module begins without."""

    def __init__(self, ids: Iterable[Any] = ()) -> None:
        super().__init__(ids, maxlen=_KEPT)

    def __deepcopy__(self, memo: object) -> _Known:
        return _Known()

    def find(self, source: Source, device: torch.device) -> TableIds | None:
        """What the tensors of a source were made, if they are known to be the same."""
        for form, seen, where, made in reversed(self):
            pairs = zip(seen, source.tensors, strict=False)  # of one form: as many
            if (form, where) == (source.form, device) and all(each.are(ids) for each, ids in pairs):
                return made
        return None


class _PooledRows(torch.autograd.Function):
    """Rows of ids, added up by bag."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bags: Bags) -> Tensor:
        ctx.bags = bags
        places = torch.arange(len(rows), device=rows.device)
        return bags.pool(rows.contiguous(), places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        bags = ctx.bags
        gradient = gradient.reshape(-1, gradient.shape[-1]).contiguous()
        return bags.share(gradient).index_select(0, bags.of_ids), None

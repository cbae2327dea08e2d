"""EmbeddingCollection and EmbeddingBagCollection: tables with one exchange for each group."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn

from speedtorch.memory.byte_count import bytes_of
from speedtorch.memory.placement import MemoryKind
from speedtorch.nn.cache import share_cache
from speedtorch.nn.jagged import (
    Features,
    GroupRows,
    JaggedRows,
    KeyedFeatures,
    RowsByFeature,
    Source,
    read_features,
)
from speedtorch.nn.row_module import Device, RowModule, RowsOrPath, loadable, opened, recorded
from speedtorch.nn.shared_lookups import fail, together, trained
from speedtorch.nn.table_config import Table
from speedtorch.nn.table_group import TableGroup
from speedtorch.nn.table_ranges import TableIds
from speedtorch.nn.tables import Tables, groups_of, place_of, places_of, rows_of
from speedtorch.step.cache_budget import CacheBudget
from speedtorch.step.hot_rows import CacheReport
from speedtorch.step.rounding import RoundingMode, StoredAs
from speedtorch.table.host_table import HostTable
from speedtorch.torch_internals import not_compiled

__all__ = ["EmbeddingBagCollection", "EmbeddingCollection", "TableCollection"]

_Self = TypeVar("_Self", bound="TableCollection")  # typing.Self needs Python 3.11.


class TableCollection(nn.Module):
    """The base class of both collections: tables, and the groups that store their rows."""

    _kept_as = "embeddings"
    """The attribute of the tables and the first part of state_dict keys, as in torchrec."""
    _pooled = _is_weighted = False

    def __init__(
        self,
        tables: Sequence[Any],
        device: Device = None,
        *,
        memory: MemoryKind = "auto",
        freeze: bool = False,
        capacity: int | None = None,
        cache: int | str | None = None,
        stored: StoredAs | None = None,
        rounding: RoundingMode = "stochastic",
    ) -> None:
        super().__init__()
        tables = list(tables)
        described = [Table.of(config) for config in tables]
        self._configs = [_with_features(*pair) for pair in zip(tables, described, strict=True)]
        if not described:
            raise ValueError(f"{type(self).__name__}: tables: expected one or more, got none")
        twice = [name for name, n in Counter(table.name for table in described).items() if n > 1]
        if twice:
            raise ValueError(f"{type(self).__name__}: two tables have the name {twice[0]!r}")
        by_group: dict[tuple[object, ...], list[Table]] = {}
        for table in described:
            kind = (table.group, table.columns, table.dtype)
            by_group.setdefault(kind, []).append(table)
        settings = (device, memory, freeze, capacity, stored, rounding)
        groups = [TableGroup(members, *settings) for members in by_group.values()]
        setattr(self, self._kept_as, Tables(groups, [table.name for table in described]))
        self._names = _result_names(described)
        self._places = self._placed(described)
        self._features = frozenset(key for table in described for key in table.features)
        if cache is not None:
            share_cache(groups, CacheBudget(bytes_of("cache", cache)))

    def _placed(self, tables: Sequence[Table]) -> dict[str, tuple[int, int]]:
        """Returns (group, number of the feature in the group) by result name, in table order."""
        places: dict[tuple[str, str], tuple[int, int]] = {}
        for group_number, group in enumerate(self._groups()):
            for feature_number, (table_number, feature) in enumerate(group.ranges.features):
                table_name = group.ranges.tables[table_number].name
                places[table_name, feature] = (group_number, feature_number)
        return {
            result_name: places[table.name, feature]
            for table, names in zip(tables, self._names, strict=True)
            for result_name, feature in zip(names, table.features, strict=True)
        }

    def _groups(self) -> list[TableGroup]:
        return groups_of(self._tables())

    def _tables(self) -> Tables:
        return cast(Tables, self._modules[self._kept_as])

    @property
    def device(self) -> torch.device:
        """The device of lookup results."""
        device: torch.device = self._groups()[0].weight.device
        return device

    # ---- Ids

    def _source(self, group: TableGroup, features: Features) -> Source:
        name, weighted = type(self).__name__, self._is_weighted
        return read_features(features, group.ranges.keys, name, weighted=weighted)

    def _check_features(self, features: Features) -> None:
        """Raises KeyError if a dict has all features and others; a keyed tensor may have others."""
        if not isinstance(features, Mapping) or not self._features < (keys := {*features.keys()}):
            return  # the caller then reads the features, and raises if one is missing
        more = keys - self._features
        raise KeyError(
            f"{type(self).__name__}: no table has the features {sorted(map(str, more))}. The tables"
            f" have {sorted(self._features)}. Remove them from the input, or add them to the"
            " feature_names of a config."
        )

    def _looked_up(self, features: Features) -> list[tuple[TableIds, Tensor]]:
        """Looks features up in all groups; returns the ids and the result of each group."""
        groups = self._groups()
        try:
            self._check_features(features)
            sources = [self._source(group, features) for group in groups]
            # Bad input raises before any row is copied: with several groups, all ids on the CPU are
            # checked first. The lookups check ids on a GPU, and the ids of a single group.
            read = [group.ids_of(source) for group, source in zip(groups, sources, strict=True)]
            if len(groups) > 1:
                read = [group.checked(ids) for group, ids in zip(groups, read, strict=True)]
        except Exception as error:
            fail(groups, error)
            raise
        found = []
        with together({group: [ids.rows] for group, ids in zip(groups, read, strict=True)}):
            for group, source, ids in zip(groups, sources, read, strict=True):
                weights = None
                if self._is_weighted:
                    weights = source.weights(ids.rows.device)
                found.append((ids, group.look_up(ids, weights, pooled=self._pooled)))
        return found

    def ids_by_module(
        self, features: Features | Sequence[Features]
    ) -> dict[RowModule, list[Tensor]]:
        """Returns the row ids of one lookup, or of a list of lookups, that prefetch plans."""
        several = isinstance(features, list | tuple) and not hasattr(features, "keys")
        lookups = features if several else [features]
        for lookup in lookups:
            self._check_features(lookup)
        return {
            group: [
                group.checked(group.ids_of(self._source(group, lookup), planned=True)).rows
                for lookup in lookups
            ]
            for group in self._groups()
        }

    def announce(self, *features: Features) -> None:
        """Makes the first lookup load the rows of all these lookups; see Embedding.announce.

        Args:
            *features: The features of each lookup.

        Raises:
            The exceptions of Embedding.announce; an IndexError names the table and the feature.
            After an exception, the call has announced no ids.
        """
        groups = trained(self._groups())
        try:
            named = self.ids_by_module(features)
        except Exception as error:
            fail(groups, error, announced=len(features))
            raise
        with together({group: named[group] for group in groups}):
            announcements = [group.announcement(*ids) for group, ids in named.items()]
        for announce in announcements:
            announce()

    # ---- Rows

    def table_weight(self, name: str) -> Tensor:
        """Returns the current rows of a table, `[num_embeddings, embedding_dim]`.

        The tensor is a view of the table's memory, which you may write to. Rows on the GPU are
        written back first. With `stored=` the rows have the stored dtype.

        Raises:
            KeyError: There is no such table.
            RuntimeError: The table is sharded, and this rank has only a part of its rows.
        """
        return rows_of(self._tables(), name)

    def resize(self: _Self, name: str, num_embeddings: int, *, rows: Tensor | None = None) -> _Self:
        """Adds rows after the last one of a table; see Embedding.resize.

        By default the new rows are initialized by the table's config, as in a table of the new
        size. Ids and rows of the other tables do not change.

        Args:
            name: The table's name.
            num_embeddings: The new number of rows of the table.
            rows: The new rows, `[num_embeddings - rows before, embedding_dim]`.

        Raises:
            KeyError: There is no such table.
            ValueError: num_embeddings is not an int, or as for Embedding.resize.
            TypeError, RuntimeError, NotImplementedError, MemoryError: See Embedding.resize.
        """
        group, before = self.group_of(name), self._configs
        at = list(places_of(self._tables())).index(name)
        config = copy.copy(before[at])
        vars(config).update(num_embeddings=num_embeddings)
        after = [*before[:at], config, *before[at + 1 :]]
        table = Table.of(config)

        def follow_resize() -> None:
            """Sets the configs: `after`, or `before` if an exception has undone the resize."""
            self._configs = after if table in group.ranges.tables else before

        group.resize_table(table, rows, follow_resize)
        return self

    def group_of(self, name: str) -> TableGroup:
        """Returns the group that trains a table, with its parameter `weight` and HostTable `table`.

        Raises:
            KeyError: There is no such table.
        """
        return place_of(self._tables(), name)[0]

    def reset_parameters(self) -> None:
        """Initializes all rows again by the init_fn or the initial range of their config."""
        for group in self._groups():
            group.reset_parameters()

    def report(self) -> dict[str, CacheReport]:
        """Returns the cache report of each group, by the name of the group's first table.

        Raises:
            ValueError: There is no cache, or no step has loaded rows of a group yet.
        """
        return {group.ranges.tables[0].name: group.report() for group in self._groups()}

    def flush(self) -> None:
        """Writes rows on the GPU back to the tables; see Embedding.flush."""
        for group in self._groups():
            group.flush()

    def _fill(self, embeddings: Mapping[str, RowsOrPath], memory: MemoryKind) -> None:
        places = places_of(self._tables())
        if names := sorted(set(places) ^ set(embeddings)):
            raise ValueError(f"embeddings: expected {list(places)}; missing or unknown: {names}")
        for name, rows in embeddings.items():
            rows = opened(f"embeddings[{name!r}]", rows, memory)
            group, where = places[name]
            shape = (where.stop - where.start, group.embedding_dim)
            values = rows["weight"] if isinstance(rows, HostTable) else rows
            group.trained_rows.load_some(loadable(name, values, shape), where.start)

    @classmethod
    def from_pretrained(
        cls: type[_Self],
        tables: Sequence[Any],
        embeddings: Mapping[str, RowsOrPath],
        freeze: bool = True,
        **settings: Any,
    ) -> _Self:
        """Creates a collection from existing rows.

        Args:
            tables: The configs.
            embeddings: The rows by table name, which are copied: a tensor, a HostTable, or the path
                of a saved table.
            freeze: Do not train the rows.
            **settings: See the class.

        Raises:
            TypeError, ValueError: Rows do not match their config, names do not match the tables, or
                as for the class.
        """
        made = cls(tables, freeze=freeze, **settings)
        made._fill(embeddings, settings.get("memory", "auto"))
        return made

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled, because a pickle would not contain the rows"
            " of its tables. Save model.state_dict()."
        )

    def __deepcopy__(self: _Self, memo: dict[int, Any]) -> _Self:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made


class EmbeddingBagCollection(TableCollection):
    """Tables with pooled lookups, and one exchange for all tables of a group.

    Arguments, input, result and state_dict are those of torchrec's EmbeddingBagCollection.
    torchrec's configs work too; docs/collections.md lists the differences. Lookups in 16-bit tables
    return float32, as in torchrec.

    Tables with equal embedding_dim, data_type and `group=` form a group. A group is one HostTable,
    with a range of rows for each table, and one parameter. Learning rate, freezing and optimizer
    are chosen for each group. The parameter's name contains the names of its tables, such as
    `embedding_bags.user+item.weight`. `embedding_bags["user"].weight` is the rows of one table. If
    the table shares its group, these rows can be read and written, and operations that need a
    parameter raise an error.

    Otherwise tables behave like Embedding. Each table computes the same numbers as a table with its
    own group, whatever else a batch contains. Exceptions are stochastic rounding with `stored=` and
    fused optimizers on the CPU. On the CPU a row's gradients are summed in the order of the batch's
    ids, on a GPU as for Embedding. torch's EmbeddingBag has another order for repeated ids.

    Args:
        tables: EmbeddingBagConfigs.
        is_weighted: Whether the input has a factor for each id. All tables must then pool by "sum".
        device: The device of lookup results; the tables are in host memory.
        memory: The tables' memory, as for HostTable.
        freeze: Do not train the rows.
        capacity: The maximum of unique rows of a step in each group, as for Embedding.
        cache: Device bytes for frequently loaded rows of all tables; see speedtorch.cache.
        stored: The dtype of the rows in the tables, or a mapping as for Embedding. Steps train
            float32, which must be each config's data_type.
        rounding: How a step's rows are rounded to 16 bits, as for Embedding.

    Raises:
        TypeError, ValueError: There are no tables, two tables have one name, or a config is
            invalid.
        MemoryError, NotImplementedError: See Embedding.

    Example:
        >>> import speedtorch
        >>> tables = speedtorch.EmbeddingBagCollection(tables=[
        ...     speedtorch.EmbeddingBagConfig(1000, 8, "user"),  # rows, columns, name
        ...     speedtorch.EmbeddingBagConfig(500, 8, "item", feature_names=["seen", "bought"]),
        ... ])
        >>> pooled = tables({
        ...     "user": torch.tensor([3, 999]),  # one id a sample
        ...     "seen": torch.tensor([[1, 2, 3], [4, 4, 4]]),  # [samples, ids of each]
        ...     "bought": (torch.tensor([7]), torch.tensor([0, 1, 1])),  # ids and offsets
        ... })
        >>> pooled.keys(), pooled.values().shape, pooled["seen"].shape
        (['user', 'seen', 'bought'], torch.Size([2, 24]), torch.Size([2, 8]))
    """

    _kept_as = "embedding_bags"
    _pooled = True

    def __init__(
        self,
        tables: Sequence[Any],
        is_weighted: bool = False,
        device: Device = None,
        *,
        memory: MemoryKind = "auto",
        freeze: bool = False,
        capacity: int | None = None,
        cache: int | str | None = None,
        stored: StoredAs | None = None,
        rounding: RoundingMode = "stochastic",
    ) -> None:
        more: Any = {"memory": memory, "freeze": freeze, "capacity": capacity, "cache": cache}
        more |= {"stored": stored, "rounding": rounding}
        super().__init__(tables, device, **more)
        self._is_weighted = is_weighted
        columns = [group.embedding_dim for group in self._groups()]
        self._columns = {
            key: (group, feature * columns[group], columns[group])
            for key, (group, feature) in self._places.items()
        }
        if is_weighted:
            for group in self._groups():
                for table in group.ranges.tables:
                    if table.mean:
                        raise ValueError(f"{table.name}: is_weighted needs pooling='sum'")

    def is_weighted(self) -> bool:
        """Whether the input has a factor for each id."""
        return self._is_weighted

    def embedding_bag_configs(self) -> list[Any]:
        """The configs of the tables."""
        return list(self._configs)

    if TYPE_CHECKING:  # torch's __call__ accepts any arguments

        def __call__(self, features: Features) -> KeyedFeatures:  # noqa: D102
            ...

    def forward(self, features: Features) -> KeyedFeatures:
        """Looks up bags of rows and reduces each bag to one row.

        Args:
            features: A keyed jagged tensor or a dict of features, int32 or int64, on the CPU or a
                GPU. The keyed jagged tensor is torchrec's, or has its methods keys(), values() and
                offsets(), and weights_or_none() with is_weighted. Unknown keys of a keyed jagged
                tensor are ignored. A feature in a dict is a tensor `[samples]` with one id for each
                sample, or a tensor `[samples, ids]` with a bag in each row. It can also be a tuple
                (ids, offsets) or (ids, offsets, weights) with offsets `[samples + 1]`.

        Returns:
            A KeyedFeatures with the methods of torchrec's KeyedTensor. values() is `[samples,
            columns of all features]` on the module's device, ordered by tables, then features.

        Raises:
            KeyError: A feature is missing, or a dict has a feature of no table.
            IndexError: An id is out of its table's range; the message names table and feature. If
                rows are on a GPU, a later call may raise instead, and may name only the tables.
            TypeError, ValueError: Ids, offsets or weights are invalid; no row was loaded. (The
                values of offsets on a GPU are not checked.)
            RuntimeError, NotImplementedError: See Embedding.
        """
        if isinstance(features, torch.fx.Proxy):
            return cast(KeyedFeatures, recorded(self, EmbeddingBagCollection.forward, features))
        if torch.compiler.is_dynamo_compiling():
            return _pooled_not_compiled(self, features)
        return KeyedFeatures(self._columns, [found for _, found in self._looked_up(features)])


class EmbeddingCollection(TableCollection):
    """Tables with lookups that are not pooled, and one exchange for all tables of a group.

    EmbeddingCollection behaves like EmbeddingBagCollection, but returns one row for each id. The
    result is a dict of jagged tensors, as in torchrec's EmbeddingCollection.

    Args:
        tables: EmbeddingConfigs.
        device: The device of lookup results; the tables are in host memory.
        need_indices: Whether the result has the ids, as weights() of a feature.
        memory: The tables' memory, as for HostTable.
        freeze: Do not train the rows.
        capacity: The maximum of unique rows of a step in each group, as for Embedding.
        cache: Device bytes for frequently loaded rows of all tables; see speedtorch.cache.
        stored: The dtype of the rows in the tables, or a mapping as for Embedding. Steps train
            float32, which must be each config's data_type.
        rounding: How a step's rows are rounded to 16 bits, as for Embedding.

    Raises:
        See EmbeddingBagCollection.

    Example:
        >>> import speedtorch
        >>> tables = speedtorch.EmbeddingCollection(
        ...     tables=[speedtorch.EmbeddingConfig(100, 8, "word")]  # rows, columns, name
        ... )
        >>> words = tables({"word": (torch.tensor([5, 1, 5]), torch.tensor([0, 2, 3]))})
        >>> words["word"].values().shape, words["word"].lengths().tolist()
        (torch.Size([3, 8]), [2, 1])
        >>> words["word"].to_padded_dense().shape  # samples, the most ids of one, columns
        torch.Size([2, 2, 8])
    """

    def __init__(
        self,
        tables: Sequence[Any],
        device: Device = None,
        need_indices: bool = False,
        *,
        memory: MemoryKind = "auto",
        freeze: bool = False,
        capacity: int | None = None,
        cache: int | str | None = None,
        stored: StoredAs | None = None,
        rounding: RoundingMode = "stochastic",
    ) -> None:
        more: Any = {"memory": memory, "freeze": freeze, "capacity": capacity, "cache": cache}
        more |= {"stored": stored, "rounding": rounding}
        super().__init__(tables, device, **more)
        self._need_indices = need_indices

    def embedding_configs(self) -> list[Any]:
        """The configs of the tables."""
        return list(self._configs)

    def embedding_dim(self) -> int:
        """The number of columns of each table; raises ValueError if tables differ in columns."""
        dims = {group.embedding_dim for group in self._groups()}
        if len(dims) > 1:
            raise ValueError(f"embedding_dim(): the tables have several dimensions, {sorted(dims)}")
        return dims.pop()

    def embedding_names_by_table(self) -> list[list[str]]:
        """The result's keys for each table; `feature@table` if several tables have the feature."""
        return [list(names) for names in self._names]

    def need_indices(self) -> bool:
        """Whether the result has the ids."""
        return self._need_indices

    if TYPE_CHECKING:  # torch's __call__ accepts any arguments

        def __call__(self, features: Features) -> RowsByFeature:  # noqa: D102
            ...

    def forward(self, features: Features) -> RowsByFeature:
        """Looks rows up.

        Args:
            features: See EmbeddingBagCollection.

        Returns:
            A dict with a JaggedRows for each feature, on the module's device, ordered by tables,
            then features. rows() of the dict concatenates the rows of all features, `[ids,
            columns]`.

        Raises:
            See EmbeddingBagCollection. rows() raises ValueError if tables differ in columns.
        """
        if isinstance(features, torch.fx.Proxy):
            return cast(RowsByFeature, recorded(self, EmbeddingCollection.forward, features))
        if torch.compiler.is_dynamo_compiling():
            return _rows_not_compiled(self, features)
        found = self._looked_up(features)
        groups = [
            GroupRows(rows, ids.jagged, len(group.ranges.features), has_ids=self._need_indices)
            for group, (ids, rows) in zip(self._groups(), found, strict=True)
        ]
        parts = {key: JaggedRows(groups[k], feature) for key, (k, feature) in self._places.items()}
        return RowsByFeature(parts, [rows for _, rows in found])


def _with_features(config: Any, table: Table) -> Any:
    """Returns the config with its table's feature_names, which models read."""
    if not config.feature_names:
        config = copy.copy(config)
        vars(config).update(feature_names=list(table.features))
    return config


def _result_names(tables: Sequence[Table]) -> list[list[str]]:
    """Returns result names by table: `feature@table` if several tables have the feature."""
    uses = Counter(feature for table in tables for feature in table.features)
    return [
        [f"{key}@{table.name}" if uses[key] > 1 else key for key in table.features]
        for table in tables
    ]


_pooled_not_compiled = not_compiled(EmbeddingBagCollection.forward)
_rows_not_compiled = not_compiled(EmbeddingCollection.forward)

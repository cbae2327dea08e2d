"""Tables: the attributes `embedding_bags` and `embeddings` of the collections."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy.typing as npt
import torch
from torch import Tensor, nn

from speedtorch.nn.row_module import RowModule, loadable
from speedtorch.nn.row_reading import blocks_of
from speedtorch.nn.table_group import TableGroup
from speedtorch.table.whole_fields import reading_state
from speedtorch.torch_internals import as_plain, tree_map

__all__ = [
    "JoinedTable",
    "Readable",
    "TableWeight",
    "Tables",
    "check_readable",
    "groups_of",
    "place_of",
    "places_of",
    "rows_of",
]


def check_readable(emb: object) -> None:
    """Raises TypeError if `emb` has no blocks() that reads all rows."""
    if not isinstance(emb, RowModule | JoinedTable):
        raise TypeError(
            "emb: expected a speedtorch Embedding or EmbeddingBag, or a table of a collection, got"
            f" {type(emb).__name__}"
        )


class Tables(nn.Module):
    """The tables of a collection by name, read, saved and loaded like a torch.nn.ModuleDict.

    The submodules are the groups, because a group has one parameter. A group's name joins the names
    of its tables with "+", so that a parameter's name contains its tables, such as
    `embedding_bags.user+item.weight`.
    """

    def __init__(self, groups: Sequence[TableGroup], names: Sequence[str]) -> None:
        """`names` are the table names, in order."""
        super().__init__()
        self._names = list(names)
        for name in names:
            if hasattr(self, name):
                raise ValueError(
                    f"tables: {name!r} cannot be a table name, because torch.nn.ModuleDict has an"
                    " attribute with this name. Choose another name and set"
                    f" feature_names=[{name!r}]."
                )
        for group in groups:
            joined = "+".join(table.name for table in group.ranges.tables)
            if len(group.ranges.tables) > 1 and joined in names:
                raise ValueError(
                    f"tables: the table name {joined!r} is also the parameter name of the tables"
                    f" {joined.split('+')}. Choose another name."
                )
            self.add_module(joined, group)

    # ---- As a ModuleDict of tables

    def __getitem__(self, name: str) -> TableGroup | JoinedTable:
        group, rows = place_of(self, name)
        return group if len(group.ranges.tables) == 1 else JoinedTable(name, group, rows)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name not in self:
                raise
        return self[name]  # torch.distributed.checkpoint reads state_dict keys as attributes

    def __contains__(self, name: object) -> bool:
        return name in places_of(self)

    def __iter__(self) -> Iterator[str]:
        return iter(places_of(self))

    def __len__(self) -> int:
        return len(places_of(self))

    def keys(self) -> Iterator[str]:
        """Returns the table names."""
        return iter(self)

    def values(self) -> Iterator[TableGroup | JoinedTable]:
        """Returns the tables."""
        return (self[name] for name in self)

    def items(self) -> Iterator[tuple[str, TableGroup | JoinedTable]]:
        """Returns pairs of a table name and its table."""
        return ((name, self[name]) for name in self)

    # ---- Saved and loaded

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        with reading_state():
            for group in groups_of(self):
                group.flush()
        for name, (group, rows) in places_of(self).items():
            destination[f"{prefix}{name}.weight"] = group.trained_rows.fields.saved("weight", rows)
        for joined, group in zip(self._modules, groups_of(self), strict=True):
            if group.stored is not None:
                state = group.rounding_state
                destination[f"{prefix}{joined}.rounding_state"] = (
                    state if keep_vars else state.detach()
                )

    def _load_from_state_dict(  # type: ignore[no-untyped-def]
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        groups = list(zip(self._modules, groups_of(self), strict=True))
        known = {f"{prefix}{joined}.rounding_state" for joined, _ in groups}
        for joined, group in groups:
            try:
                group.load_rounding(f"{prefix}{joined}.rounding_state", state_dict)
            except (TypeError, ValueError) as error:
                error_msgs.append(str(error))
        for name, (group, rows) in places_of(self).items():
            known.add(key := f"{prefix}{name}.weight")
            if key not in state_dict:
                missing_keys.append(key)
                continue
            shape = (rows.stop - rows.start, group.embedding_dim)
            group.lookups.steps.give_up()
            try:
                group.trained_rows.load_some(loadable(key, state_dict[key], shape), rows.start)
            except (TypeError, ValueError) as error:
                error_msgs.append(str(error))
        # torch's set_state_dict adds the parameters themselves to a full state_dict.
        own = {f"{prefix}{joined}.weight": group.weight for joined, group in groups}
        if strict:
            given = [key for key in state_dict if key.startswith(prefix)]
            unexpected_keys.extend(
                key for key in given if key not in known and state_dict[key] is not own.get(key)
            )


# These are functions, because a table cannot have the name of a method of Tables.


def groups_of(tables: Tables) -> list[TableGroup]:
    """Returns the groups, which hold the rows and the parameters."""
    groups: Any = vars(tables).get("_modules", {}).values()
    return list(groups)


def places_of(tables: Tables) -> dict[str, tuple[TableGroup, slice]]:
    """Returns (group, rows in the group) by table name, in table order."""
    places = {
        table.name: (group, group.ranges.range_of(table.name))
        for group in groups_of(tables)
        for table in group.ranges.tables
    }
    return {name: places[name] for name in vars(tables).get("_names", ()) if name in places}


def place_of(tables: Tables, name: str) -> tuple[TableGroup, slice]:
    """Returns a table's group and its rows in the group; raises KeyError for unknown names."""
    places = places_of(tables)
    if name not in places:
        raise KeyError(f"{name!r} is not one of the tables {list(places)}")
    return places[name]


def rows_of(tables: Tables, name: str) -> Tensor:
    """Returns the current rows of a table in its memory; the caller may write to them.

    Raises KeyError if there is no such table, and RuntimeError if ranks share the rows.
    """
    return _Member(name, *place_of(tables, name)).all_rows()


class JoinedTable:
    """A table that shares its group with other tables.

    Attributes:
        num_embeddings: The table's number of rows.
        embedding_dim: The table's number of columns.
    """

    def __init__(self, name: str, group: TableGroup, rows: slice) -> None:
        self._weight = TableWeight(_Member(name, group, rows))
        self.num_embeddings, self.embedding_dim = rows.stop - rows.start, group.embedding_dim

    @property
    def weight(self) -> TableWeight:
        """The table's rows `[num_embeddings, embedding_dim]`, in host memory."""
        return self._weight

    @weight.setter
    def weight(self, value: object) -> None:
        """Raises AttributeError except for the weight itself, which `weight *= 2` assigns."""
        if value is not self._weight:
            member = self._weight._member
            raise AttributeError(
                f"table {member.name!r}: its weight cannot be replaced. Write to it, for example"
                " with weight.copy_(rows), or build the collection with from_pretrained()."
            )

    def blocks(self, rows: int = 65_536) -> Iterator[tuple[int, Tensor]]:
        """Iterates over the table's rows in blocks, as Embedding.blocks() does."""
        member = self._weight._member
        return blocks_of(member.group.trained_rows, member.rows, rows, member.check_unsharded)

    def numpy(self) -> npt.NDArray[Any]:
        """Returns a view of the table's rows as a NumPy array, as Embedding.numpy() does."""
        member = self._weight._member
        member.check_unsharded()
        return member.group.numpy()[member.rows]

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Raises NotImplementedError, because the collection looks up all tables together."""
        self._weight._member.group.forward(*args, **kwargs)

    def __getattr__(self, attribute: str) -> NoReturn:
        # copy, pickle and torch probe for names that begin with "_".
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        raise AttributeError(self._weight._member.has_no(attribute))

    def __repr__(self) -> str:
        name, rows = self._weight._member.name, self.num_embeddings
        return f"{type(self).__name__}({name}: {rows}; columns={self.embedding_dim})"


Readable: TypeAlias = RowModule | JoinedTable
"""A module or table whose blocks() reads all rows."""


class _Member(NamedTuple):
    """The rows of one table in a group."""

    name: str
    group: TableGroup
    rows: slice

    def all_rows(self) -> Tensor:
        """See rows_of()."""
        self.check_unsharded()
        return self.group.table["weight"][self.rows]

    def check_unsharded(self) -> None:
        """Raises RuntimeError if this rank has only a shard of the rows."""
        if self.group.trained_rows.table.shard_spec is not None:
            raise RuntimeError(
                f"table {self.name!r}: this rank has only a shard of its rows. Read the rows from"
                " state_dict(), and write them with load_state_dict()."
            )

    def has_no(self, attribute: str) -> str:
        """Returns the error text for an attribute that a table without a parameter lacks."""
        name = repr(self.name)
        return (
            f"table {name} has no {attribute!r}. The table shares a parameter with other tables:"
            f" group_of({name}).weight, of {self.group._label()}. For a parameter of its own, set"
            f" group={name} in the table's config."
        )


class TableWeight(Tensor):
    """The rows of a table that shares its group. A TableWeight is not a parameter.

    Attributes and methods that need a parameter, such as `grad`, raise RuntimeError. The shape, the
    dtype and `requires_grad` are read without access to the rows. Every other torch function runs
    on the table's memory, after rows on the GPU are written back, and raises RuntimeError if ranks
    share the rows. `data` and detach() return another TableWeight of the same rows. An assignment
    to `data` copies the values; these older tensors then raise NotImplementedError.
    """

    _member: _Member
    _of: TableWeight | None
    """The weight whose `data` this is, or None."""
    _age = 0
    """The number of assignments to `data`."""

    def __new__(cls, member: _Member, of: TableWeight | None = None) -> TableWeight:
        """Creates a tensor with the shape of the rows and the memory of one element."""
        extents = member.rows.stop - member.rows.start, member.group.embedding_dim
        with as_plain():
            dtype = member.group.trained_rows.table.stored_dtype
            self = torch.empty(1, dtype=dtype, device="cpu").expand(extents).as_subclass(cls)
        self._member, self._of = member, of
        if of is not None:
            self._age = of._age
        return self

    @property
    def _origin(self) -> TableWeight:
        return self if self._of is None else self._of

    def _check_age(self) -> None:
        """Raises NotImplementedError if the weight's `data` was assigned since then."""
        if self._age != self._origin._age:
            raise NotImplementedError(
                f"table {self._member.name!r}: this tensor of its weight is older than an"
                " assignment to weight.data, which overwrote its values. In torch the tensor keeps"
                " them. Keep a copy instead, such as backup = weight.data.clone()."
            )

    def _assign(self, value: Any) -> None:
        """Copies values to all rows, unless `value` are these rows."""
        if isinstance(value, TableWeight) and value._origin is self._origin:
            return value._check_age()  # weight.data *= 2 assigns the tensor that it has changed
        member, shape = self._member, tuple(self.shape)
        rows = member.all_rows()
        rows.copy_(loadable(f"table {member.name!r}", value, shape))
        self._origin._age += 1
        self._age = self._origin._age

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        weight, name = args[0] if args else None, getattr(func, "__name__", "")
        with as_plain():
            if isinstance(weight, TableWeight):
                access, name = name, getattr(getattr(func, "__self__", None), "__name__", name)
                if access == "__get__" and name == "requires_grad":
                    return weight._member.group.weight.requires_grad
                if name in _OF_PARAMETERS:
                    raise RuntimeError(weight._member.has_no(name))
                if access == "__set__" and name == "data":
                    return weight._assign(args[1])
                if (access == "__get__" and name == "data") or name == "detach":
                    weight._check_age()
                    return TableWeight(weight._member, weight._origin)
                if name in _EXTENTS:
                    return func(*args, **(kwargs or {}))
            made: dict[int, Tensor] = {}

            def in_memory(value: Any) -> Any:
                """Replaces each TableWeight with one tensor of its rows."""
                if not isinstance(value, TableWeight):
                    return value
                value._check_age()
                return made.setdefault(id(value), value._member.all_rows())

            args, kwargs = tree_map(in_memory, (tuple(args), kwargs or {}))
            answer = func(*args, **kwargs)
            # In-place methods must return the TableWeight itself.
            is_itself = isinstance(weight, TableWeight) and answer is made.get(id(weight))
            return weight if is_itself else answer


# Without an error, these would silently describe a tensor that is not a parameter.
_OF_PARAMETERS = frozenset({"grad", "requires_grad", "requires_grad_", "retain_grad", "is_leaf"})
_EXTENTS = frozenset({"shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "__len__"})
_EXTENTS |= {"dtype", "device", "layout", "is_cuda", "is_cpu", "is_floating_point", "__hash__"}

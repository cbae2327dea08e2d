"""RowModule: the base class of Embedding and EmbeddingBag, with their host table and lookups."""

from __future__ import annotations

import copy
import inspect
import operator
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor, nn

from speedtorch.files.file_format import joined_names
from speedtorch.files.table_files import open_fields
from speedtorch.memory.byte_count import bytes_of
from speedtorch.memory.placement import MemoryKind
from speedtorch.nn.row_reading import blocks_of, checked_count
from speedtorch.optim.step_hooks import watch_steps
from speedtorch.plan.planned_batch import check_ids
from speedtorch.step.cache_budget import CacheBudget
from speedtorch.step.fixed_memory import Replays
from speedtorch.step.hot_rows import CacheReport
from speedtorch.step.rounding import (
    Rounding,
    RoundingMode,
    StoredAs,
    check_mode,
    stored_dtypes,
)
from speedtorch.step.row_weight import dense
from speedtorch.step.trained_rows import Bags, TrainedRows
from speedtorch.step.whole_weight import random_seed
from speedtorch.table.host_table import HostTable
from speedtorch.table.lazy_init import LazyInit, ShardSpec
from speedtorch.table.lazy_table import LazyTable
from speedtorch.table.new_table import NewTable
from speedtorch.table.whole_fields import reading_state
from speedtorch.torch_internals import (
    active_data_parallel,
    as_plain,
    forward_hooks,
    gradient_hooks,
    is_batched,
    is_tracing,
    is_transformed,
)

__all__ = [
    "Device",
    "RowModule",
    "Rows",
    "RowsOrPath",
    "loadable",
    "made_of_rows",
    "opened",
    "recorded",
]

Rows = Tensor | HostTable
RowsOrPath = Rows | str | os.PathLike[str]
"""Rows, or the path of a saved file with rows."""
Device = str | int | torch.device | None

_FIXED = frozenset({"padding_idx", "stored", "rounding"})
"""Attributes that may not change after construction."""

_Self = TypeVar("_Self", bound="RowModule")  # typing.Self needs Python 3.11.


class Steps(Protocol):
    """Plans and announces ids before their lookups; PlannedSteps documents the methods."""

    @property
    def ahead(self) -> int:
        """The number of batches that a loop plans ahead."""

    def plan_announced(self, parts: Sequence[Tensor]) -> Any:
        """Plans ids of the next step's lookups and returns the argument of announce()."""

    def announce(self, announced: Any) -> None:
        """Announces the result of plan_announced()."""

    def give_up(self) -> None:
        """Discards announced ids, and lets the next lookup begin a new step."""

    def start_loop(self, loop: object) -> bool:
        """Registers a loop that may plan ahead; returns False if another loop has not ended."""

    def plan_ahead(self, parts: Sequence[Tensor], after: Any) -> Any:
        """Plans a batch of a loop, which follows the batch `after`."""

    def expect(self, batch: Any) -> None:
        """Sets the planned batch that the next step may use."""

    def refuse_bad(self, parts: Sequence[Tensor]) -> None:
        """Raises IndexError for ids out of range, if the ids and the rows are on the CPU."""

    def note_returned(self) -> None:
        """Called after a loop has announced the ids of the batch that it returns."""

    def end_loop(self, loop: object) -> None:
        """Ends a loop that start_loop() has registered."""


class Lookups(Protocol):
    """Looks up rows by their ids; TrainedRows documents the methods."""

    @property
    def steps(self) -> Steps:
        """Plans announced ids and the batches of a loop."""

    @property
    def can_agree(self) -> bool:
        """Whether agree_on_pace() may be called."""

    def agree_on_pace(self, seconds: float) -> float:
        """Returns the seconds of the slowest rank."""

    def rows_of(
        self, ids: Tensor, max_norm: float | None = None, norm_type: float = 2.0
    ) -> tuple[Tensor, Tensor]:
        """Returns positions and rows of a step, the operands of torch's lookup."""

    def summed(self, ids: Tensor, bags: Bags | None = None) -> Tensor:
        """Looks up rows of a step; a batch plan sums their gradients."""

    def read(self, ids: Tensor) -> Tensor:
        """Returns a copy of the current rows without starting a step."""

    def borrow(
        self, ids: Tensor, max_norm: float | None, norm_type: float
    ) -> tuple[Tensor, Tensor]:
        """Returns positions and rows as rows_of() does, without starting a step."""

    def fail(self, error: Exception, *, trains: bool, announced: int = 0) -> None:
        """See RowModule.fail."""

    def check_capturable(self, *, prefetches: bool) -> None:
        """Raises NotImplementedError if no CUDA graph can contain the lookups of a step.

        `prefetches`: The graph also loads the rows of the next batch.
        """

    def capturing(self) -> AbstractContextManager[Replays]:
        """Returns a context in which a CUDA graph captures lookups of rows with a capacity."""

    def end_by_error(self) -> None:
        """Called before a loop of prefetch raises an exception of its loader or its ids."""

    def makes_sparse(self, *, requested: bool) -> bool:
        """Whether autograd computes a sparse gradient, as `requested` or as the optimizer needs."""


class RowModule(nn.Module):
    """Loads and writes back rows; the base class of Embedding, EmbeddingBag and TableGroup.

    `settings` are lookup options, which become attributes. Other arguments are as for Embedding.
    """

    weight: Any
    sparse: bool
    stored: dict[str, torch.dtype] | None
    rounding: RoundingMode
    rounding_state: Tensor
    _requested_dtype: torch.dtype | None = None
    """The dtype to which a caller converted the module; the table's dtype does not change. None
    if both dtypes are equal."""

    @torch.inference_mode(False)  # outside of inference mode, inference tensors are read-only
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None,
        _weight: Rows | None,
        _freeze: bool,
        device: Device,
        dtype: torch.dtype | None,
        memory: MemoryKind,
        capacity: int | None = None,
        cache: int | str | None = None,
        cache_rows: Tensor | None = None,
        stored: StoredAs | None = None,
        rounding: RoundingMode = "stochastic",
        **settings: Any,
    ) -> None:
        nn.Module.__init__(self)
        for setting, value in settings.items():
            setattr(self, setting, value)
        name = self._label()
        _check_device(name, device)
        if padding_idx is not None:
            padding_idx = operator.index(padding_idx)
            first, last = -num_embeddings, num_embeddings - 1
            if not first <= padding_idx <= last:
                raise ValueError(f"padding_idx: expected {first} to {last}, got {padding_idx}")
            padding_idx %= num_embeddings
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx
        if capacity is not None:
            capacity = checked_count("capacity", capacity, "the maximum of rows in a step")
        self._capacity = capacity
        self._settings = tuple(settings)
        self._cache = None if cache is None else CacheBudget(bytes_of("cache", cache))
        self._cache_rows = _members(cache_rows, cache, num_embeddings)
        shape = (num_embeddings, embedding_dim)
        given = shape if _weight is None else _shape_of("_weight", _weight, "a tensor")
        if given != shape:
            raise ValueError(f"_weight: expected the shape {shape}, got {given}")
        if isinstance(_weight, HostTable):
            table = LazyTable(name, _weight)
            kind = table.stored_dtype if stored is None else torch.float32
        else:
            default = torch.get_default_dtype() if _weight is None else _weight.dtype
            kind = dtype or default
        check_mode(rounding, stored)
        self.stored, self.rounding = stored_dtypes(stored, kind), rounding
        of_weight = (self.stored or {}).get("weight", kind)
        if isinstance(_weight, HostTable):
            if table.stored_dtype != of_weight:
                raise ValueError(
                    f"stored: expected a HostTable of {of_weight}, got {table.stored_dtype}"
                )
        else:
            table = LazyTable(name, NewTable(name, *shape, of_weight, memory))
        if self.stored is not None:
            if settings.get("max_norm") is not None:
                raise NotImplementedError(
                    f"{name}: max_norm and stored= cannot be combined. max_norm changes rows in"
                    " lookups, but 16-bit rows are rounded only after steps. Remove one of the two."
                )
            self.register_buffer("rounding_state", torch.tensor([random_seed(), 0], device=device))
        # With device=None torch uses its default device, which the user may have set.
        held = torch.empty(0, embedding_dim, dtype=kind, device=device)
        self._make_rows(table, nn.Parameter(held, requires_grad=not _freeze), self.padding_idx)
        if _weight is None:
            self.reset_parameters()
        elif isinstance(_weight, Tensor):
            with torch.no_grad():
                self.trained_rows.fields.load("weight", dense(_weight))
        watch_steps()

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute; raises NotImplementedError for one that only the constructor reads."""
        own = vars(self)
        if name in _FIXED and "trained_rows" in own:
            if isinstance(value, int) and -self.num_embeddings <= value < 0:
                value += self.num_embeddings
            if own[name] != value:
                raise NotImplementedError(
                    f"{self._label()}: {name} cannot be changed from {own[name]!r} to {value!r},"
                    " because the rows were made with it. Build another module with"
                    f" {name}={value!r}, and load the state_dict() of this one."
                )
        super().__setattr__(name, value)

    def _label(self) -> str:
        """The module's name in error messages."""
        return type(self).__name__

    def _make_rows(self, table: LazyTable, parameter: nn.Parameter, padding: int | None) -> None:
        name, capacity, rounding = self._label(), self._capacity, None
        if self.stored is not None:
            state, shard_spec = self.rounding_state, table.shard_spec
            if shard_spec is not None:
                state[0] = shard_spec.agreed(int(state[0]))
            rounding = Rounding(self.stored, self.rounding, state, shard_spec)
        self.trained_rows = TrainedRows(name, table, parameter, padding, capacity, rounding)
        self.lookups: Lookups = self.trained_rows
        self.weight = self.trained_rows.make_weight(self.lookups)
        if self._cache is not None:
            self._cache.add(self, self.trained_rows, self._cache_rows)
            self._cache.share()
        # The weight and the table may outlive the module, so the finalizer only writes rows back.
        self._finalizer = weakref.finalize(self, self.trained_rows.release)
        self._finalizer.atexit = False

    def check_shardable(self) -> None:
        """Raises RuntimeError if the rows have been used, ValueError if `cache_rows` was passed."""
        if self._cache_rows is not None:
            raise ValueError(
                f"{self._label()}: cache_rows cannot be used with sharded rows, because it names"
                " rows of the whole table. Build the module with cache= only."
            )
        self.trained_rows.table.check_unused()

    def keep_shard(
        self, shard_spec: ShardSpec, lookups: Callable[[TrainedRows, int | None], Lookups]
    ) -> None:
        """Keeps one shard of the rows. `lookups` returns the object that looks up all rows.

        `lookups` receives the shard's rows and the id of the padding row in the shard. If the shard
        does not contain this row, the id is None, or with a capacity the number of the shard's
        rows. Call check_shardable() first.
        """
        table = self.trained_rows.table.sharded(shard_spec)
        padding = shard_spec.place(self.padding_idx)
        if self.capacity is not None and padding is None:
            padding = table.rows
        self._finalizer.detach()
        weight = self.weight
        self._make_rows(table, self.trained_rows.parameter, padding)
        self.lookups = lookups(self.trained_rows, padding)
        # Keep the same weight object, because an optimizer may have it.
        self.weight = self.trained_rows.take_weight(weight, self.lookups)

    @classmethod
    def from_module(
        cls: type[_Self],
        module: nn.Embedding | nn.EmbeddingBag,
        *,
        device: Device = None,
        memory: MemoryKind = "auto",
        capacity: int | None = None,
    ) -> _Self:
        """Creates an Embedding or EmbeddingBag with the rows and arguments of torch's module.

        Build the optimizer afterwards. An older optimizer has the parameter of torch's module and
        trains no row of the new module.

        Args:
            module: torch's module of the same kind; its rows are copied.
            device: The device of lookup results; by default the device of `module`.
            memory: The table's memory, as for HostTable.
            capacity: The maximum of unique rows in a step, as for Embedding.

        Raises:
            TypeError: The module is of another kind, or a module of speedtorch.
            MemoryError: See Embedding.

        Example:
            >>> import speedtorch
            >>> plain = torch.nn.Embedding(10, 4, padding_idx=0)
            >>> speedtorch.Embedding.from_module(plain).padding_idx
            0
        """
        kind = nn.Embedding if issubclass(cls, nn.Embedding) else nn.EmbeddingBag
        if not isinstance(module, kind) or isinstance(module, RowModule):
            raise TypeError(f"module: expected a torch.nn.{kind.__name__}, got {type(module)}")
        named = inspect.signature(kind.from_pretrained).parameters
        settings = {name: getattr(module, name) for name in list(named)[2:]}  # after the rows
        freeze = not module.weight.requires_grad
        settings |= {"device": device, "memory": memory, "capacity": capacity}
        return made_of_rows(cls, module.weight, freeze, **settings).train(module.training)

    @property
    def table(self) -> HostTable:
        """The HostTable with all rows and their state.

        The table's methods that read or write rows first write rows on the GPU back. If the table
        is closed, lookups raise ValueError.
        """
        return self.trained_rows.table.host_table

    def resize(self: _Self, num_embeddings: int, *, rows: Tensor | None = None) -> _Self:
        """Adds rows after the last one, with their optimizer state, between two steps.

        Existing rows, their state and all settings do not change, and the optimizer's parameter
        remains the same object. Later steps have the results of a table that had the new rows from
        the start. The old table remains in memory until the new table is complete. A remaining
        gradient and announced ids are dropped. Old views of the weight and the old table raise an
        error. A call with the present number of rows changes nothing.

        Args:
            num_embeddings: The new number of rows.
            rows: The new rows, `[num_embeddings - self.num_embeddings, embedding_dim]`; by default
                initialized as in reset_parameters(). Their state is the initial state.

        Returns:
            The module.

        Raises:
            TypeError: num_embeddings is not an int, or `rows` is not a tensor.
            ValueError: num_embeddings is less than 1 or than before, `rows` has a wrong shape, or
                the bytes of a cache are too few.
            RuntimeError: A step or a loop of prefetch is running, a CUDA graph uses the rows,
                another module trains them, or the table was opened with optimizer state that is not
                attached.
            NotImplementedError: Ranks share the rows, or the caller provided the table, or it is in
                a file or in shared memory. Or `rows` is missing and a subclass overrides
                reset_parameters().
            MemoryError: Both tables do not fit. After any exception nothing has changed.

        Example:
            >>> import torch, speedtorch
            >>> embedding = speedtorch.Embedding(2, 3)
            >>> embedding.resize(4, rows=torch.ones(2, 3))(torch.tensor([3]))[0].tolist()
            [1.0, 1.0, 1.0]
        """
        before, name = self.num_embeddings, self._label()
        if rows is None and type(self).reset_parameters is not RowModule.reset_parameters:
            raise NotImplementedError(
                f"{name}: resize() cannot initialize new rows, because {type(self).__name__}"
                " overrides reset_parameters(). Pass the new rows as rows=."
            )
        count = self._count_new_rows(before, num_embeddings, rows)
        self._insert(before, count, nn.init.normal_ if rows is None else rows)
        return self

    def _count_new_rows(
        self, before: int, total: int, rows: Tensor | None, name: str | None = None
    ) -> int:
        """Returns the number of rows that resize() adds to `before`; raises its errors.

        `name`: The table's name in errors, if the module has several tables.
        """
        name = self._label() if name is None else f"table {name!r}"
        count = checked_count("num_embeddings", total, "the new number of rows") - before
        self._check_use()
        if self.trained_rows.table.shard_spec is not None:
            raise NotImplementedError(
                f"{name}: resize() does not support sharded rows. Read the state_dict() of rank 0"
                " within speedtorch.full_state_dict(model), and add the new rows to it. Build and"
                " shard a larger model, and load this state."
            )
        if count < 0:
            raise ValueError(
                f"num_embeddings: {name} has {before} rows, and resize({total}) would drop"
                f" {-count} of them. Build a smaller module and copy the remaining rows."
            )
        shape = (count, self.embedding_dim)
        if rows is not None and (given := _shape_of("rows", rows, "a tensor")) != shape:
            raise ValueError(f"rows: expected the shape {shape}, got {given}")
        return count

    def _insert(
        self,
        first: int,
        count: int,
        rows: Tensor | Callable[[Tensor], object],
        notify: Callable[[], object] = lambda: None,
    ) -> None:
        """Inserts rows (or an init function's rows) at row `first`; see TrainedRows.insert."""
        if count == 0:
            return
        if self._cache is not None:
            need = self.trained_rows.cache_need()
            self._cache.check({self.trained_rows: need._replace(rows=need.rows + count)})
        places = slice(first, first + count)

        def fill(table: HostTable) -> None:
            """Writes the new rows to a table that contains them."""
            if isinstance(rows, Tensor):
                table["weight"][places].copy_(rows)
            else:
                table.init_(rows, seed=random_seed(), rows=places)

        def update_size() -> None:
            """Adopts the number of rows after the insertion, or after its undo."""
            self.num_embeddings = self.trained_rows.shape[0]
            notify()

        self.trained_rows.insert(first, count, fill, update_size)
        if self._cache is not None:
            self._cache.share()

    def set_cache(self, budget: CacheBudget | None) -> None:
        """Uses a budget that already contains this module for the cache; None: no cache."""
        if budget is None:
            self.trained_rows.cache(None)
        if self._cache is not None:
            self._cache.remove(self)
        self._cache, self._cache_rows = budget, None

    def report(self) -> CacheReport:
        """Returns the size and the hit rates of the cache. The call waits for the device.

        Raises:
            ValueError: There is no cache, or no step has loaded rows yet.

        Example:
            >>> import speedtorch
            >>> embedding = speedtorch.Embedding(1000, 4, cache="64KiB")
            >>> embedding(torch.tensor([1, 2])).sum().backward()
            >>> embedding.report().slots
            1000
        """
        return self.trained_rows.cache_report()

    @property
    def capacity(self) -> int | None:
        """The maximum of unique rows in a step; the table's rows if these are fewer.

        The value is None without `capacity=`. If ranks share the rows, the value limits the
        unique rows of each rank's shard.
        """
        return self.trained_rows.exchange.memory.capacity

    @property
    def settings(self) -> dict[str, object]:
        """The lookup and storage settings, which must be equal on ranks that share the rows."""
        own = {name: getattr(self, name) for name in self._settings}
        return own | self._stored_as()

    def _stored_as(self) -> dict[str, object]:
        """The settings of 16-bit rows; empty without `stored`."""
        return {} if self.stored is None else {"stored": self.stored, "rounding": self.rounding}

    def extra_repr(self) -> str:
        """The sizes, the arguments that are set, the device and the kind of memory."""
        text = f"{self.num_embeddings}, {self.embedding_dim}"
        for name in ("padding_idx", *self._settings, "capacity"):
            value = getattr(self, name)
            if not (value is None or value is False or (name == "norm_type" and value == 2.0)):
                text += f", {name}={value!r}"
        return f"{text}, {self.places()}"

    def places(self) -> str:
        """The settings of 16-bit rows, the device of lookup results and the table's memory."""
        memory = self.trained_rows.table.memory or "closed"
        stored = "".join(f"{name}={value!r}, " for name, value in self._stored_as().items())
        return f"{stored}device={self.trained_rows.exchange.held.device}, memory={memory}"

    def init_(
        self: _Self,
        function: Callable[..., object],
        *args: Any,
        seed: int | None = None,
        **kwargs: Any,
    ) -> _Self:
        """Initializes all rows with a function of torch.nn.init or a similar function.

        If no row was used yet, the rows are initialized at first use, otherwise at once. The
        padding row becomes zero. Optimizer state does not change.

        Args:
            function: Called as in `HostTable.init_`.
            *args: Passed to `function`.
            seed: Makes the numbers repeatable. By default torch's default generator draws a seed
                now.
            **kwargs: Passed to `function`.

        Raises:
            TypeError, ValueError, NotImplementedError: See `HostTable.init_`. A generator raises
                at once; other errors may be raised at first use.

        Example:
            >>> import speedtorch
            >>> embedding = speedtorch.Embedding(1000, 8).init_(torch.nn.init.uniform_, -0.1, 0.1)
            >>> bool(embedding.table["weight"].abs().max() <= 0.1)
            True
        """
        if "generator" in kwargs:
            raise TypeError("generator: each block of rows has its own. Pass seed= instead.")
        seed = random_seed() if seed is None else seed
        # Without arguments, pass the function itself: draw_rows() recognizes normal_ and uniform_
        # by identity and then need not record their calls.
        drawn = (lambda rows: function(rows, *args, **kwargs)) if args or kwargs else function
        self.trained_rows.table.draw(LazyInit((drawn,), seed, self.padding_idx), anew=True)
        return self

    def reset_parameters(self) -> None:
        """Draws all rows again from N(0, 1); the padding row becomes zero."""
        self.init_(nn.init.normal_)

    def announce(self, *ids: Tensor) -> None:
        """Makes the first lookup of a step load the rows of all announced lookups of the step.

        A step of several lookups then has one exchange. Without announce(), a lookup that loads new
        rows may also copy all rows of the step. With several Embeddings, announce to all of them
        before the first lookup, so that all ids are planned before the host waits. If lookups do
        not train (no_grad, frozen rows), the call only checks the types of the ids.

        Announced ids belong to one step, which looks up all of the tensors or none:

        - The first lookup of one of the tensors loads the rows of all. If the step omits some of
          the tensors, optimizer.step() raises RuntimeError before any row changes. If ranks share
          the rows, optimizer.step() does not raise, and also steps the rows without a lookup.
        - After the first lookup of a step, announce() loads the rows at once, and the step must
          look up the tensors.
        - If the step looks up none of them, their rows do not change. The optimizer's step,
          load_state_dict() and resize() end the announcement; zero_grad() before the lookups does
          not. The end of a prefetch() loop ends only announcements of the loop.
        - Several calls announce ids of one step, looked up in the order of the calls. If a later
          call's tensors are looked up first, the earlier calls are discarded. Ids that remain from
          a step that raised an exception are discarded in this way.

        Ids on the CPU are recognized by their values, ids on a GPU only as the same unchanged
        tensor. A step may look up one announced tensor, but in place of a second one a slice, a
        view or a copy on another device. optimizer.step() then raises only if these tensors are on
        the CPU and an announced id was not looked up.

        Args:
            *ids: The tensors that the lookups will receive, of any shape, on the CPU or a GPU.

        Raises:
            TypeError: Ids are not integer tensors, or as for a lookup.
            IndexError: An id is out of range. If rows are on a GPU, a later lookup raises instead.
            RuntimeError: The ids name more rows than the capacity; nothing is announced then. If
                rows are on a GPU, a later lookup raises instead. Or as for a lookup.

        Example:
            >>> import torch, speedtorch
            >>> embedding = speedtorch.Embedding(1000, 4)
            >>> words, others = torch.tensor([1, 2]), torch.tensor([7, 8, 9])
            >>> embedding.announce(words, others)
            >>> embedding(words).shape, embedding(others).shape  # one exchange
            (torch.Size([2, 4]), torch.Size([3, 4]))
        """
        self.announcement(*ids)()

    def announcement(self, *ids: Tensor) -> Callable[[], None]:
        """Runs the parts of announce() that can raise, and returns a function for the rest."""
        with as_plain():
            self._check_use()
            try:
                for tensor in ids:
                    check_ids(f"{self.trained_rows.name}.announce", tensor)
            except Exception as error:
                self.fail(error, announced=len(ids))
                raise
            if not ids or not torch.is_grad_enabled():
                return lambda: None
            if not self.trained_rows.parameter.requires_grad:
                return lambda: None
            if self.trained_rows.table.claim.holder is not self.trained_rows:
                self.trained_rows.claim()
            steps = self.lookups.steps
            return partial(steps.announce, steps.plan_announced(ids))

    def fail(self, error: Exception, *, announced: int = 0) -> None:
        """Called before `error` is raised in place of a lookup or of `announced` announced ids.

        Raises `error` itself if the other ranks learn of the error now and fail too.
        """
        trains = torch.is_grad_enabled() and self.trained_rows.parameter.requires_grad
        if trains or not announced:  # announce() does nothing without training
            with as_plain():
                self.lookups.fail(error, trains=trains, announced=announced)

    def ids_by_module(self, ids: Any) -> dict[RowModule, list[Tensor]]:
        """Returns the ids of one or several lookups by module, as prefetch plans them."""
        if isinstance(ids, Mapping):
            raise ValueError(
                f"{self.trained_rows.name}: expected ids, got a dict with the keys {[*ids]}. Use"
                " the module itself as a key, as in {model.users: ids}, or pass only the ids."
            )
        return {self: list(ids) if isinstance(ids, list | tuple) else [ids]}

    def blocks(self, rows: int = 65_536) -> Iterator[tuple[int, Tensor]]:
        """Iterates over all rows in blocks, without a copy of the whole table.

        A block is a copy of the rows at the time of next(); later steps do not change the copy.
        Rows on the GPU are written back to the table first. A thread that trains at the same time
        waits while a block is copied, so later blocks may have the values of later steps.

        Args:
            rows: The maximum of rows in a block.

        Returns:
            An iterator over (id of the first row, rows `[n, embedding_dim]` on the CPU), in the
            order of the ids. Rows have the dtype of `weight`, which is float32 with `stored=`. The
            last block may have fewer rows.

        Raises:
            TypeError, ValueError: `rows` is not an int, or less than 1.
            RuntimeError: Ranks share the rows.
            RuntimeError, ValueError: At the next block: another module trains the rows now, a step
                on a GPU exceeded the capacity, or the table is closed.
            IndexError: At the next block: the GPU found an id out of range.

        Example:
            >>> import torch, speedtorch
            >>> embedding = speedtorch.Embedding(5, 2).init_(torch.nn.init.ones_)
            >>> [(first, block.shape[0]) for first, block in embedding.blocks(rows=2)]
            [(0, 2), (2, 2), (4, 1)]
        """
        all_rows = slice(0, self.num_embeddings)
        return blocks_of(self.trained_rows, all_rows, rows, self._check_unsharded)

    @property
    def step_ids(self) -> Tensor:
        """The ascending ids of the step's rows `[n]`, int64, on the device, without the padding id.

        `optimizer.step()` changes these rows. The ids remain until the next training lookup. With
        a capacity, the call waits for the GPU. If ranks share the rows, only ids of this rank's
        shard are returned.

        Example:
            >>> import torch, speedtorch
            >>> embedding = speedtorch.Embedding(10, 4)
            >>> embedding(torch.tensor([7, 2, 7])).sum().backward()
            >>> embedding.step_ids
            tensor([2, 7])
        """
        with as_plain(), self.trained_rows.lock:
            return self.trained_rows.step_ids()

    def numpy(self) -> npt.NDArray[Any]:
        """Returns all rows as a NumPy array `[num_embeddings, embedding_dim]`, a view of the table.

        Rows on the GPU are written back first. flush() updates the view with changes of later
        steps. attach() and resize() may move the rows to other memory: call numpy() again then.

        Raises:
            RuntimeError: Ranks share the rows, another module trains the rows now, or a step on a
                GPU exceeded the capacity.
            ValueError: The table is on a GPU (memory="cuda"), or NumPy lacks the dtype (bfloat16);
                use blocks() in both cases. Or the table is closed.
            IndexError: The GPU found an id out of range.

        Example:
            >>> import torch, speedtorch
            >>> embedding = speedtorch.Embedding(2, 3).init_(torch.nn.init.zeros_)
            >>> embedding.numpy().tolist()
            [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
        """
        self._check_unsharded()
        self.flush()
        return self.table.numpy()

    def _check_unsharded(self) -> None:
        """Raises RuntimeError if this rank has only a shard of the rows."""
        if self.trained_rows.table.shard_spec is not None:
            raise RuntimeError(
                f"{self.trained_rows.name}: this rank has only a shard of the rows. Read the shard"
                " from state_dict(). All rows are in state_dict() of rank 0 within"
                " speedtorch.full_state_dict(model)."
            )

    def flush(self) -> None:
        """Writes rows on the GPU back, for code that keeps a view. Methods of emb.table do so, too.

        Raises:
            IndexError: The GPU found an id out of range.
            RuntimeError: Another module trains the rows now, or a step on a GPU exceeded the
                capacity.
        """
        self.trained_rows.flush()

    # ---- Lookups; callers run all of these within as_plain()

    def _check_lookup(self, ids: object) -> bool:
        """Checks all but the values of the ids before any row is copied.

        Returns whether the lookup trains.
        """
        if is_tracing() or torch.compiler.is_exporting():
            self.__prepare_scriptable__()
        trains = torch.is_grad_enabled() and self.trained_rows.parameter.requires_grad
        if is_transformed() and (trains or (isinstance(ids, Tensor) and is_batched(ids))):
            raise NotImplementedError(
                f"{self.trained_rows.name}: torch.func's transforms (vmap, grad, jvp) do not"
                " support lookups. Look the rows up first, and pass emb(ids) to the function."
            )
        self._check_use()
        try:
            # RuntimeError for other dtypes, as in torch.
            check_ids(self.trained_rows.name, ids, RuntimeError)
        except Exception as error:
            self.lookups.fail(error, trains=trains)
            raise
        return trains

    def _check_use(self) -> None:
        """Raises for a converted dtype, a replaced weight, gradient hooks or unsupported DDP."""
        parameter = self.trained_rows.parameter
        name = self.trained_rows.name
        if self._requested_dtype is not None:
            dtype, requested = self.weight.dtype, self._requested_dtype
            raise TypeError(
                f"{name}: the module was converted to {requested}, but its table remains {dtype}."
                f" Convert it back with module.to({dtype}), or build it with rows of {requested}."
                " For mixed precision use torch.autocast."
            )
        weight: Tensor | None = self._parameters.get("weight")
        if weight is None or self.trained_rows.weight_reference() is not weight:
            raise RuntimeError(
                f"{name}: its weight was replaced by another parameter. Write to emb.table instead,"
                " or use from_pretrained() or load_state_dict(). With fully_shard(), pass"
                " ignored_params=speedtorch.row_parameters(model)."
            )
        if any(gradient_hooks(weight)):
            raise NotImplementedError(
                f"{name}: gradient hooks of the weight are not called, because each step trains"
                " other rows. Register the hook on the lookup's result."
            )
        if (active := active_data_parallel()) is not None and parameter.requires_grad:
            names = {n for n, held in active.module.named_parameters() if held is weight}
            if names - set(active.parameters_to_ignore):
                raise NotImplementedError(
                    f"{name}: DistributedDataParallel cannot average the gradients of rows that"
                    " differ between processes. Call speedtorch.shard() before wrapping, with the"
                    f" whole {type(active.module).__name__} instead of a part of it. torchrec's"
                    " DistributedModelParallel is not supported."
                )

    # ---- As a module

    def _apply(self: _Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Self:
        name, parameter = self.trained_rows.name, self.trained_rows.parameter
        dtype = parameter.dtype
        with as_plain():
            moved = fn(parameter.detach()[:0].to(self._requested_dtype or dtype))
            if moved.is_cpu and moved.is_shared():  # type: ignore[no-untyped-call]
                raise NotImplementedError(
                    f"{name}: its table cannot be moved to shared memory. Save it with"
                    " emb.table.save(path), and open the file in the other processes."
                )
            _check_device(name, moved.device)
            if moved.device != parameter.device:
                rest = nn.Module()  # for torch to move: all but the weight
                own = {"_buffers": self._buffers, "_modules": self._modules}
                vars(rest).update(own, _parameters={**self._parameters, "weight": None})
                move_rest: Any = rest._apply

                def move() -> None:
                    """Moves the weight and the rest of the module, after rows are written back."""
                    parameter.data = parameter.detach()[:0].to(moved.device)
                    self.weight.data = self.trained_rows.weight_on(moved.device)
                    move_rest(lambda tensor: fn(tensor).to(tensor.dtype), recurse)
                    self._parameters.update({**rest._parameters, "weight": self.weight})
                    self._follow_rounding()

                self.trained_rows.exchange.moving(move)
            # torch has already converted other layers, so raising here would leave the model half
            # converted. The next lookup raises unless the module is converted back before.
            self._requested_dtype = None if moved.dtype == dtype else moved.dtype
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        with as_plain():
            super()._save_to_state_dict(destination, prefix, keep_vars)
        with self.trained_rows.lock:  # no other thread may step the rows during the copy
            with reading_state():
                self.flush()
            destination[f"{prefix}weight"] = self.trained_rows.fields.saved("weight")

    def _load_from_state_dict(  # type: ignore[no-untyped-def]
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        key, more = f"{prefix}weight", (missing_keys, unexpected_keys, error_msgs)
        rounding_key = f"{prefix}rounding_state"
        own = (key, rounding_key)
        rest = {name: value for name, value in state_dict.items() if name not in own}
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, *more)
        # Checkpoints of 16-bit and of float32 rows are interchangeable, so this key is optional.
        if rounding_key in missing_keys:
            missing_keys.remove(rounding_key)
        try:
            self.load_rounding(rounding_key, state_dict)
        except (TypeError, ValueError) as error:
            error_msgs.append(str(error))
            return
        if key not in state_dict:
            return
        if key in missing_keys:
            missing_keys.remove(key)
        try:
            value = loadable(key, state_dict[key], self.trained_rows.whole_shape)
        except (TypeError, ValueError) as error:
            error_msgs.append(str(error))
            return
        self.lookups.steps.give_up()
        self.trained_rows.load(value)

    def load_rounding(self, key: str, state_dict: Mapping[str, Any]) -> None:
        """Loads the seed and the step count of rounding, if rows are rounded and the key exists.

        Raises TypeError or ValueError if the value is not a tensor of two numbers.
        """
        if self.stored is not None and key in state_dict:
            with torch.no_grad():
                self.rounding_state.copy_(loadable(key, state_dict[key], (2,)))

    def _follow_rounding(self) -> None:
        """Makes rounding count steps in the current buffer; torch replaces moved buffers."""
        if (rounding := self.trained_rows.rounding) is not None:
            rounding.follow(self.rounding_state)

    def __deepcopy__(self: _Self, memo: dict[int, Any]) -> _Self:
        if self.lookups is not self.trained_rows:
            raise NotImplementedError(
                f"{self.trained_rows.name}: a module with sharded rows cannot be copied. Build"
                " another model, shard it, and load the state_dict()."
            )
        made = type(self).__new__(type(self))
        nn.Module.__init__(made)
        memo[id(self)] = made
        own = {**vars(self), "_parameters": {**self._parameters, "weight": None}}
        own |= dict.fromkeys(("trained_rows", "lookups", "_finalizer", "_cache"))
        vars(made).update(copy.deepcopy(own, memo))
        if id(self.weight) in memo:
            raise NotImplementedError(
                f"{self.trained_rows.name}: deepcopy() copied its weight apart from the module, so"
                " the two copies could not share rows. Copy an optimizer after the model, as in"
                " copy.deepcopy((model, optimizer)). In the model, keep no other reference to the"
                " weight, such as an optimizer or a second registration: make an attribute such as"
                " `out` a property that returns self.emb.weight."
            )
        if self._cache is not None:
            vars(made)["_cache"] = self._cache.copied(self, memo)
        self.trained_rows.write_back()
        table = self.trained_rows.table.copied()
        with as_plain(), torch.inference_mode(False):
            held = self.trained_rows.parameter
            parameter = nn.Parameter(held.detach()[:0].clone(), requires_grad=held.requires_grad)
            made._make_rows(table, parameter, self.padding_idx)
        memo[id(self.weight)] = made.weight
        return made

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied by copy.copy(), because the result"
            " would not contain the rows of its table. Save model.state_dict(), call"
            " emb.table.save(path), or use copy.deepcopy(emb)."
        )

    def __prepare_scriptable__(self) -> NoReturn:
        raise NotImplementedError(self.trained_rows.untraceable)

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__}: DataParallel would copy its rows to every GPU. Use one GPU, or"
            " speedtorch.shard() in processes that torchrun starts."
        )


def recorded(
    module: nn.Module, forward: Callable[..., Any], first: torch.fx.Proxy, *rest: object
) -> Any:
    """Records a lookup under torch.fx as a call_module node, like a module of torch.nn.

    `forward` is the function that is traced. The node calls the module's forward(), which may be
    that of a subclass.
    """
    tracer: Any = first.tracer
    has_hooks = any(forward_hooks(module))  # which the graph would call twice
    if tracer.root is module or type(module).forward is not forward or has_hooks:
        raise NotImplementedError(
            f"{type(module).__name__}: torch.fx cannot trace a lookup, because its table is in host"
            f" memory. Trace a model that contains the {type(module).__name__}. If a subclass has"
            " its own forward(), or the module has forward hooks, make the module a leaf in"
            " Tracer.is_leaf_module()."
        )
    return tracer.create_proxy("call_module", tracer.path_of_module(module), (first, *rest), {})


def made_of_rows(cls: type[_Self], embeddings: RowsOrPath, freeze: bool, **given: Any) -> _Self:
    """Creates a module from existing rows; see from_pretrained."""
    rows = opened("embeddings", embeddings, given["memory"])
    shape = _shape_of("embeddings", rows, "a tensor, a HostTable or the path of a saved one")
    if len(shape) != 2:
        raise ValueError(f"embeddings: expected [rows, columns], got the shape {list(shape)}")
    if given["capacity"] is None:
        del given["capacity"]  # subclasses may lack this argument
    if isinstance(rows, Tensor) and given["device"] is None:
        given["device"] = rows.device
    made = cls(*shape, _weight=rows, _freeze=freeze, **given)
    if isinstance(rows, HostTable) and rows is not embeddings:
        made.trained_rows.table.own()
    return made


def _members(ids: object, cache: object, rows: int) -> Tensor | None:
    """Checks `cache_rows` and returns its unique ids in order, as int64 on the CPU."""
    if ids is None:
        return None
    if cache is None:
        raise ValueError("cache_rows: expected only together with cache=, which is missing")
    check_ids("cache_rows", ids)
    assert isinstance(ids, Tensor)
    members = ids.detach().reshape(-1).to("cpu", torch.int64)
    if members.numel() and not 0 <= int(members.min()) <= int(members.max()) < rows:
        bad = members[(members < 0) | (members >= rows)]
        raise IndexError(f"cache_rows: expected ids from 0 to {rows - 1}, got {int(bad[0])}")
    first: dict[int, None] = dict.fromkeys(members.tolist())  # unique, in order
    return torch.tensor([*first], dtype=torch.int64)


def opened(argument: str, source: RowsOrPath, memory: MemoryKind) -> Rows:
    """Opens a file as a HostTable in `memory`; returns tensors and HostTables unchanged.

    Raises ValueError for a file of torch.save, or without a field "weight", before any row is read.
    """
    if isinstance(source, str | os.PathLike):
        path = os.fspath(source)
        if path.endswith((".pt", ".pth", ".bin")):
            raise ValueError(f"{argument}: cannot read {path}. Pass torch.load(path)[key] instead.")
        with open_fields(path) as stored:
            _check_fields(argument, path, list(stored), f"HostTable.open({path!r})")
        return HostTable.open(path, memory)
    return source


def _check_fields(argument: str, source: str, fields: Sequence[str], table: str) -> None:
    if "weight" not in fields:
        raise ValueError(
            f"{argument}: {source} has no field 'weight'. Its fields are {joined_names(fields)}."
            f" Pass the rows themselves, such as {table}[{fields[0]!r}]."
        )


def loadable(key: str, value: object, expected: tuple[int, ...]) -> Tensor:
    """Returns a checkpoint's rows; raises TypeError or ValueError for another shape or kind."""
    if (rows := _dense(key, value, "a tensor")).shape != expected:
        raise ValueError(
            f"size mismatch for {key}: copying a param with shape {tuple(rows.shape)} from"
            f" checkpoint, the shape in current model is {tuple(expected)}."
        )
    return rows


def _shape_of(argument: str, rows: object, kinds: str) -> tuple[int, ...]:
    if isinstance(rows, HostTable):
        _check_fields(argument, "this HostTable", list(rows.fields), "table")
        return (rows.rows, *rows.fields["weight"][0])
    return tuple(_dense(argument, rows, kinds).shape)


def _dense(argument: str, values: object, kinds: str) -> Tensor:
    """Returns `values`; raises TypeError or ValueError unless they are a dense tensor."""
    if not isinstance(values, Tensor):
        remedy = " Convert it with torch.as_tensor()." if hasattr(values, "__array__") else ""
        raise TypeError(f"{argument}: expected {kinds}, got {type(values).__name__}.{remedy}")
    if values.is_nested or values.layout != torch.strided:
        layout = "nested" if values.is_nested else values.layout
        use = "to_padded_tensor()" if values.is_nested else "to_dense()"
        raise ValueError(f"{argument}: expected a dense tensor, got {layout}. Use {use}.")
    if values.is_quantized:
        kind = values.dtype
        raise ValueError(f"{argument}: expected plain numbers, got {kind}. Use dequantize().")
    if values.is_meta:
        raise ValueError(f"{argument}: expected a tensor with values, got one on the meta device.")
    return values


def _check_device(name: str, device: Device) -> None:
    """Raises NotImplementedError or RuntimeError if lookups cannot run on the device."""
    place = torch.get_default_device() if device is None else torch.device(device)
    if place.type not in ("cpu", "cuda"):
        raise NotImplementedError(
            f"{name}: rows can be on the CPU or a GPU, got device {place}. Build the module with"
            " device='cpu' or device='cuda', also if other layers are on another device. The table"
            " allocates no memory before its first use."
        )
    if place.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            f"{name}: device={str(place)!r} needs a GPU, but torch finds none. Use device='cpu'."
        )

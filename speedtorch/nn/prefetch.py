"""prefetch: copies the next batch's rows to the GPU during the current step."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, islice
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from speedtorch.nn.collection import TableCollection
from speedtorch.nn.prefetch_pace import AT_ONCE, Pace, pace_of
from speedtorch.nn.row_module import RowModule
from speedtorch.nn.shared_lookups import together, trained
from speedtorch.nn.table_group import TableGroup
from speedtorch.plan.joint_batch import JointBatch
from speedtorch.plan.planned_batch import check_ids
from speedtorch.step.disagreement import DisagreementError
from speedtorch.step.joint_exchange import JointExchange, join_exchanges
from speedtorch.step.step import Batch
from speedtorch.torch_internals import as_plain, outside_modes

__all__ = ["Prefetch", "ids_of_modules", "modules_with_ids", "prefetch"]

_Batch = TypeVar("_Batch")
_IdsOf = Callable[[Any], Any]
_Parts = dict[RowModule, list[Tensor]]
_Given = tuple[_Batch, _Parts, dict[RowModule, Batch] | None]


class _Loop:
    """The identity of a running loop, alive as long as its generator."""


class Prefetch(Generic[_Batch]):
    """Iterates over a loader's batches and prefetches their rows; see prefetch()."""

    def __init__(
        self,
        loader: Iterable[_Batch],
        named_modules: list[RowModule | TableCollection],
        modules: list[RowModule],
        ids: _IdsOf,
    ) -> None:
        self._loader = loader
        self._named_modules = named_modules
        self._modules = modules
        self._ids = ids

    def __len__(self) -> int:
        """Returns len(loader), if the loader has a length."""
        return len(self._loader)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        shown = [f"{type(module).__name__}({module.extra_repr()})" for module in self._modules[:3]]
        if more := len(self._modules) - len(shown):
            shown.append(f"{more} more")
        return f"{type(self).__name__}({type(self._loader).__name__}; {', '.join(shown)})"

    def __iter__(self) -> Iterator[_Batch]:
        """Yields the loader's batches in order, after reading the next ones."""
        with ExitStack() as end:
            loop = _Loop()
            is_alone = True
            for module in self._modules:
                end.callback(_end_loop, module, loop)
                module.trained_rows.claim()
                is_alone &= module.lookups.steps.start_loop(loop)
            pace = pace_of(self._modules) if is_alone else AT_ONCE
            pace.begin()
            given = self._planned(pace)
            ahead = max(module.lookups.steps.ahead for module in self._modules)
            window = deque(islice(given, ahead))
            while window:
                window.extend(islice(given, 1))
                if isinstance(first := window.popleft(), Exception):
                    self._modules[0].lookups.end_by_error()
                    raise first
                batch, parts, plans = first
                if plans is not None:
                    self._expect(plans)
                elif parts and is_alone:
                    _announce(parts)
                pace.note_step()
                yield batch
                if is_alone and (parts or plans is not None):
                    self._expect({})

    def _expect(self, plans: Mapping[RowModule, Batch]) -> None:
        """Sets the planned batch that each module's next step may use."""
        with as_plain(), torch.inference_mode(False):
            for module in self._modules:
                module.lookups.steps.expect(plans.get(module))

    def _planned(self, pace: Pace) -> Iterator[_Given[_Batch] | Exception]:
        """Yields batches with their plans, or at last the exception of the loader or a plan."""
        plans: _Plans | None = None
        needs_ids = True
        from_disk = {
            module: store
            for module in self._modules
            if module.lookups is module.trained_rows  # ids of ranks name rows of all ranks
            and (store := module.trained_rows.exchange.held.store).reads_ahead
        }
        try:
            for batch in self._loader:
                parts: _Parts = {}
                planned = None
                if needs_ids or pace.is_ahead:
                    parts = ids_of_modules(self._ids(batch), self._named_modules)
                    needs_ids = pace.checks or _needs_announcing(parts) or bool(from_disk)
                    for module, store in from_disk.items():
                        store.read_ahead(parts.get(module, ()))
                    # The loop may run in inference mode, and a plan's tensors must allow gradients.
                    with as_plain(), torch.inference_mode(False):
                        if pace.is_ahead:
                            plans = plans or _Plans(parts)
                            planned = plans.of(parts)
                        for module, ids in parts.items() if planned is None else ():
                            module.lookups.steps.refuse_bad(ids)
                if planned is None and plans is not None:
                    plans.restart()
                yield batch, parts, planned
        except DisagreementError:  # not deferred: all ranks raise at this point
            raise
        except Exception as error:
            yield error


class _Plans:
    """Plans the batches of a loop; `parts` are the ids of the first batch."""

    def __init__(self, parts: _Parts) -> None:
        own = [module for module in parts if module.lookups is module.trained_rows]
        self._together = join_exchanges({module: module.trained_rows.exchange for module in own})
        self._last: dict[RowModule, Batch] = {}
        self._joint: dict[JointExchange, JointBatch] = {}

    def restart(self) -> None:
        """Discards the previous batch plans after a batch without a plan."""
        self._last, self._joint = {}, {}

    def of(self, parts: _Parts) -> dict[RowModule, Batch]:
        """Plans the next batch and returns its plans by module."""
        alone, last = dict(parts), self._last
        for modules, exchange in self._together:
            if not all(module in parts for module in modules):
                continue
            ids = [alone.pop(module) for module in modules]
            self._joint[exchange] = exchange.plan_ahead(ids, self._joint.get(exchange))
            last |= zip(modules, self._joint[exchange].split_by_table(), strict=True)
        with together(alone, trains=True):
            for module, of_module in alone.items():
                plan_ahead = module.lookups.steps.plan_ahead
                last[module] = plan_ahead(of_module, last.get(module))
        return {module: last[module] for module in parts}


def _needs_announcing(parts: _Parts) -> bool:
    """Whether an unplanned batch with these ids needs announce() before its first lookup."""
    return any(len(ids) > 1 or module.capacity is not None for module, ids in parts.items())


def _announce(parts: _Parts) -> None:
    """Announces the ids of an unplanned batch to modules with several lookups."""
    several = {module: parts[module] for module in trained(parts) if len(parts[module]) > 1}
    with torch.enable_grad(), torch.inference_mode(False), together(several):
        for module, ids in several.items():
            module.announce(*ids)
            module.lookups.steps.note_returned()


def ids_of_modules(
    named: Any, modules: Sequence[RowModule | TableCollection], *, argument: str = "ids"
) -> dict[RowModule, list[Tensor]]:
    """Returns the ids of each module. `named` has the format of prefetch's `ids` results.

    Only these `modules` may be named: other keys raise ValueError. Ids of a wrong kind raise the
    errors of a lookup. Errors begin with the name of the `argument`, or with that of a collection.
    """
    if not isinstance(named, Mapping) or not any(isinstance(k, nn.Module) for k in named):
        if (count := len(modules)) != 1:
            keys = f" with the keys {list(named)}" if isinstance(named, Mapping) else ""
            raise ValueError(
                f"{argument}: expected a dict by module, because the model has {count} Embeddings,"
                f" got {type(named).__name__}{keys}. Use the modules as keys, such as"
                " {model.users: ids}."
            )
        named = {modules[0]: named}
    parts: dict[RowModule, list[Tensor]] = {}
    for module, ids in named.items():
        if module not in modules:
            kind = type(module).__name__
            raise ValueError(
                f"{argument}: expected keys that are Embeddings of the model, got another {kind}."
                " Use the model's own modules as keys, such as {model.users: ids}."
            )
        parts |= module.ids_by_module(ids)
    for part in chain.from_iterable(parts.values()):
        check_ids(argument, part)
    return parts


def modules_with_ids(modules: Iterable[nn.Module]) -> list[RowModule | TableCollection]:
    """Returns the modules that `ids` may name: a collection itself, not its groups."""
    children = [child for module in modules for child in module.modules()]
    found = [child for child in children if isinstance(child, RowModule | TableCollection)]
    return [child for child in found if not isinstance(child, TableGroup)]


def _end_loop(module: RowModule, loop: _Loop) -> None:
    if sys.is_finalizing():  # torch aborts the process if tensors are created at this time
        return
    if module.trained_rows.exchange.held.captures():  # the next lookup discards prefetched rows
        return
    with outside_modes():  # the garbage collector closes a loop that was left
        module.lookups.steps.end_loop(loop)


def prefetch(loader: Iterable[_Batch], model: nn.Module, *, ids: _IdsOf) -> Prefetch[_Batch]:
    """Iterates over a loader and copies the next batch's rows to the GPU during the current step.

    The loader is read two batches ahead (three if rows are sharded among ranks). During the current
    step, a side stream loads the next batch's rows from the table and writes the last batch's rows
    back. Rows that the current step changes are used with their new values, so prefetch changes no
    result. An error of the loader, or of ids on the CPU, is raised after the batches before it. If
    a break or an exception ends a loop, prefetched rows are written back to host memory; another
    loop may follow. Iterate and train on one stream.

    Modules with equal columns, dtype and state share one batch plan and one exchange, at the first
    lookup of a batch in any of them. Excluded are modules with a padding row, a capacity, a cache
    or frozen rows, and tables that are sharded or in a file, or that track changes.

    Planning ahead takes host time. Therefore a loop measures some steps without planning, and
    continues with the faster way. Ranks of one machine that share rows decide this together. Ranks
    of several machines always plan. Without a GPU, and within another loop over the same rows,
    batches are returned without a plan. A GPU loop that has stopped planning does not call `ids`,
    either. It still does if `ids` names several lookups of a module or a module with a capacity, or
    if a table has resident rows of a file.

    Pass the tensors that `ids` returns to the lookups. Other tensors with the same ids work too,
    but the search for their plan makes the host wait. If rows have a capacity and a step several
    lookups, only these tensors are allowed (on the CPU, equal tensors).

    Args:
        loader: Batches of any kind.
        model: A module with at least one speedtorch Embedding or EmbeddingBag.
        ids: Returns the ids that a batch will look up: a tensor (or a list of tensors for several
            lookups), a collection's features, or a dict of these by module. Rows without an id in
            the result are not prefetched, which costs time. A step looks up all of a module's
            tensors or none. If lookups use only some (for example, because labels were returned as
            ids), optimizer.step() raises RuntimeError before any row changes; see
            Embedding.announce. Ranks that share rows do not raise, and step the rows that no lookup
            names.

    Returns:
        An iterable of the loader's batches with the loader's len(). Each loop over it is an epoch.

    Raises:
        TypeError: `ids` is not a function of a batch, or `model` is not a module. In the loop: the
            result of `ids` has a wrong type.
        ValueError: The model has no Embedding or EmbeddingBag. In the loop: the result of `ids`
            names a module that is not in the model, or none although the model has several.

    Example:
        >>> import torch, speedtorch
        >>> embedding = speedtorch.Embedding(1000, 4)
        >>> loader = [(torch.tensor([1, 2]), 0.5), (torch.tensor([2, 999]), 1.0)]
        >>> for ids, label in prefetch(loader, embedding, ids=lambda batch: batch[0]):
        ...     print(tuple(embedding(ids).shape))
        (2, 4)
        (2, 4)
    """
    if not callable(ids):
        raise TypeError(f"ids: expected a function of a batch, got {type(ids).__name__}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if not (modules := [child for child in model.modules() if isinstance(child, RowModule)]):
        raise ValueError(
            f"model: {type(model).__name__} has no speedtorch.Embedding or EmbeddingBag"
        )
    return Prefetch(loader, modules_with_ids([model]), modules, ids)

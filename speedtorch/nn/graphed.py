"""graphed: captures a training step and its exchange with host memory in one CUDA graph."""

from __future__ import annotations

import gc
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedtorch.layers.access_tracker import on_device
from speedtorch.nn.captured_state import CapturedState, restored_afterwards
from speedtorch.nn.prefetch import ids_of_modules, modules_with_ids
from speedtorch.nn.row_module import Lookups, RowModule
from speedtorch.optim.optimizer_copy import settings_of
from speedtorch.optim.wrappers import stepped_by
from speedtorch.step.fixed_memory import FixedMemory
from speedtorch.step.row_weight import RowWeight
from speedtorch.step.trained_rows import TrainedRows, rows_of_optimizer
from speedtorch.torch_internals import as_plain, capturing, tree_flatten, tree_leaves, tree_map

__all__ = ["GraphedStep", "graphed"]

_Kind = TypeVar("_Kind")

_ISOLATION = ("cudaErrorStreamCaptureIsolation", "cudaErrorStreamCaptureImplicit")
"""CUDA errors of a capture that waits for work outside of the capture."""
_HOST_WAITS = ("cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is")
"""CUDA errors of a capture in which the host waits for the GPU."""
_WARM_UPS = 3  # as in torch's documentation of CUDA graphs
_CONSTANTS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
_MANY_UNLIKE = 10
"""Batches unlike the example, in a row, after which a graph warns."""


class GraphedStep(ABC):
    """A training step that graphed() returns."""

    def __init__(
        self,
        step: Callable[..., Any],
        modules: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        next_ids: Any,
    ) -> None:
        self._step = step
        self._optimizers = optimizers
        self._modules = modules_with_ids(modules)
        self._named = self._by_module(next_ids)
        self._settings = self._numbers()

    def _numbers(self) -> list[list[dict[str, Any]]]:
        """The hyperparameters that are numbers."""
        return [
            [
                settings_of(optimizer, group["params"][0]) if group["params"] else {}
                for group in optimizer.param_groups
            ]
            for optimizer in self._optimizers
        ]

    def __call__(self, *batch: Any, next_ids: Any = None, **keywords: NoReturn) -> Any:
        """Trains a batch with a replay. A batch unlike the example calls the step itself.

        A batch is unlike the example if the structure, a shape, a dtype or a value that is not a
        tensor differs. Without a graph, for rows on the CPU, each batch calls the step itself.

        Args:
            *batch: Arguments in the format of the example.
            next_ids: Ids of the next batch in the format of graphed(next_ids=...). Their rows are
                prefetched during this step. If the next batch has other ids, its step loads its own
                rows, and the results are the same.
            **keywords: Raise TypeError. Pass all arguments of the step by position.

        Returns:
            The step's result. All replays write to the same tensors, which are detached from
            autograd.

        Raises:
            IndexError: An earlier batch had an id out of range; this batch was not trained. For
                rows on the CPU, an id of this batch raises.
            RuntimeError: An earlier batch had more unique rows than the capacity (on the CPU: this
                batch). Or, since the capture, a hyperparameter changed that is a number or a tensor
                on the CPU, the optimizer's state or groups no longer fit, or a TrainingState slept.
            TypeError, ValueError: next_ids have a wrong format, graphed() got no next_ids, or there
                are keyword arguments.
        """
        if keywords:
            raise TypeError(
                "graphed: expected the arguments of the step by position, got the keyword arguments"
                f" {[*keywords]}. Pass the whole batch in the order of the example, without names."
            )
        if (now := self._numbers()) != self._settings:
            raise RuntimeError(
                "graphed: a CUDA graph repeats the numbers of its capture, but hyperparameters have"
                f" changed since then: {_changed(self._settings, now)}. Pass lr as a tensor on the"
                " device of the rows (lr=torch.tensor(..., device=...)), keep the other"
                " hyperparameters constant (OneCycleLR: cycle_momentum=False), or call graphed()"
                " again."
            )
        if next_ids is not None and not self._named:
            raise ValueError(
                "next_ids: expected None, because graphed() was called without next_ids, got"
                f" {type(next_ids).__name__}. Pass example ids to graphed(next_ids=...), too."
            )
        return self._train(batch, self._by_module(next_ids))

    def _by_module(self, next_ids: Any) -> dict[RowModule, list[Tensor]]:
        if next_ids is None:
            return {}
        return ids_of_modules(next_ids, self._modules, argument="next_ids")

    @abstractmethod
    def _train(self, batch: tuple[Any, ...], following: Mapping[RowModule, Any]) -> Any:
        """Trains a batch; `following` is the next batch's ids by module, possibly empty."""


class _Uncaptured(GraphedStep):
    """The step without a capture, for rows on the CPU; results are detached as in a replay."""

    def _train(self, batch: tuple[Any, ...], following: Mapping[RowModule, Any]) -> Any:
        return _without_nodes(self._step(*batch))


class _Captured(GraphedStep):
    """A step in a CUDA graph."""

    _unlike = 0
    """The number of batches unlike the example since the last replay."""

    def __init__(
        self,
        step: Callable[..., Any],
        example: tuple[Any, ...],
        modules: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        next_ids: Any,
        memories: Mapping[TrainedRows, FixedMemory],
        lookups: Sequence[Lookups],
    ) -> None:
        super().__init__(step, modules, optimizers, next_ids)
        for table in lookups:
            table.check_capturable(prefetches=bool(self._named))
        self._device = next(iter(memories.values())).held.device
        self._inputs = tree_map(self._own, example)
        self._next = {
            module: [self._own(ids) for ids in parts] for module, parts in self._named.items()
        }
        # Frees autograd nodes of eager steps in reference cycles, which belong to other streams.
        gc.collect()
        with restored_afterwards(modules, optimizers, memories):
            side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            # Each stream reads what the other wrote before, so each waits for the other.
            side.wait_stream(torch.cuda.current_stream(self._device))
            try:
                with torch.cuda.stream(side):
                    for _ in range(_WARM_UPS):
                        step(*self._inputs)
            finally:
                torch.cuda.current_stream(self._device).wait_stream(side)
        _drop_gradients(modules, optimizers)
        self._settings = self._numbers()
        self._graph = torch.cuda.CUDAGraph()
        # Capture on the stream of the warm-ups: autograd nodes that are still alive belong to it.
        with (
            _explained(),
            capturing(self._graph, side),
            ExitStack() as contexts,
        ):
            self._replays = [contexts.enter_context(table.capturing()) for table in lookups]
            for module, parts in self._next.items():
                memory = memories[module.trained_rows]
                contexts.enter_context(memory.prefetching_for_replay(parts))
            result = step(*self._inputs)
        # Detached, because a later backward through its nodes would run on the capture's stream.
        self._result = _without_nodes(result)
        self._state = CapturedState(modules, optimizers, [*memories])

    def _numbers(self) -> list[list[dict[str, Any]]]:
        """Like GraphedStep._numbers; a replay also repeats the values of tensors on the CPU."""
        found = super()._numbers()
        for optimizer, groups in zip(self._optimizers, found, strict=True):
            for group, numbers in zip(optimizer.param_groups, groups, strict=True):
                for name in optimizer.defaults:
                    value = group.get(name)
                    if isinstance(value, tuple):
                        numbers[name] = tuple(map(_number, value))
                    elif _number(value) is not value:
                        numbers[name] = _number(value)
        return found

    def _own(self, given: Any) -> Any:
        return given.detach().to(self._device, copy=True) if isinstance(given, Tensor) else given

    def _train(self, batch: tuple[Any, ...], following: Mapping[RowModule, Any]) -> Any:
        if not self._fits(batch):
            self._unlike += 1
            if self._unlike == _MANY_UNLIKE:
                warnings.warn(
                    f"graphed: the last {_MANY_UNLIKE} batches were unlike the example and were"
                    " trained without the graph, at the speed of eager steps. A batch needs the"
                    " structure, shapes, dtypes and non-tensor values of the example. Pass a number"
                    " that changes as a tensor.",
                    stacklevel=3,
                )
            return _without_nodes(self._step(*on_device(batch, self._device)))
        self._unlike = 0
        with as_plain():
            for replays in self._replays:
                replays.before()
        self._state.before_replay()
        for own, given in zip(tree_leaves(self._inputs), tree_leaves(batch), strict=True):
            if isinstance(own, Tensor):
                _send(given, own)
        self._foresee(following)
        compared: set[object] = set()
        with as_plain():
            for replays in self._replays:
                replays.agree(compared)
        self._graph.replay()
        for replays in self._replays:
            replays.after()
        return self._result

    def _foresee(self, following: Mapping[RowModule, Sequence[Tensor]]) -> None:
        """Copies the next batch's ids to the graph if their shapes fit."""
        for module, parts in following.items():
            own = self._next.get(module, [])
            if len(own) == len(parts) and all(map(_alike, own, parts)):
                for own_ids, given_ids in zip(own, parts, strict=True):
                    _send(given_ids, own_ids)

    def _fits(self, batch: tuple[Any, ...]) -> bool:
        """Whether a batch has the structure, shapes, dtypes and constants of the graph's inputs."""
        (own, own_form), (given, given_form) = tree_flatten(self._inputs), tree_flatten(batch)
        return own_form == given_form and all(map(_alike, own, given))


def _drop_gradients(modules: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> None:
    """Sets gradients to None before a capture, so that each replay writes them anew.

    A capture would otherwise add to the warm-ups' gradients, in memory that the graph does not own.
    """
    params = [param for module in modules for param in module.parameters()]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for param in [*params, *(param for group in groups for param in group["params"])]:
        if not isinstance(param, RowWeight):  # a step of rows begins without a gradient
            param.grad = None


def _texts(error: BaseException) -> list[str]:
    """The texts of an error and of the errors during whose handling it was raised."""
    causes: list[BaseException | None] = [error]
    while (cause := causes[-1]) is not None:
        causes.append(cause.__context__)
    return [*map(str, causes[:-1])]


@contextmanager
def _explained() -> Iterator[None]:
    """Replaces CUDA's errors of a capture by errors with the remedies."""
    try:
        yield
    except RuntimeError as error:
        for text in _texts(error):
            if any(name in text for name in _HOST_WAITS):
                raise RuntimeError(
                    "graphed: the step makes the host wait for the GPU, for example by item(),"
                    " print(), a condition on a tensor or a copy to the CPU. A CUDA graph cannot"
                    " repeat this. Return the tensor and read it after the call. A GradScaler needs"
                    " an optimizer with fused=True."
                ) from error
            if any(name in text for name in _ISOLATION):
                raise RuntimeError(
                    "graphed: the step waits for work outside of the capture, such as an earlier"
                    " step whose loss, output or exception is still alive. Release these objects"
                    " first (del loss, or keep loss.detach()). If there are none, remove the step's"
                    " waits for other streams."
                ) from error
        raise


def _without_nodes(result: Any) -> Any:
    """Detaches the tensors of a step's result from autograd."""
    return tree_map(lambda value: value.detach() if isinstance(value, Tensor) else value, result)


def _send(given: Tensor, own: Tensor) -> None:
    """Copies a tensor to GPU memory. The caller may overwrite `given` at once."""
    if given.is_cpu:
        # The GPU reads pinned memory after this function returns, when `given` may have changed.
        given = torch.empty_like(given, pin_memory=True).copy_(given.detach())
    own.copy_(given, non_blocking=True)


def _alike(own: Any, given: Any) -> bool:
    if not isinstance(own, Tensor):
        return type(own) is type(given) and bool(own == given)
    return isinstance(given, Tensor) and (own.shape, own.dtype) == (given.shape, given.dtype)


def _number(value: Any) -> Any:
    """Returns the numbers in a tensor on the CPU, and any other value as it is."""
    return value.tolist() if isinstance(value, Tensor) and value.is_cpu else value


def _changed(before: list[list[dict[str, Any]]], now: list[list[dict[str, Any]]]) -> str:
    if [*map(len, before)] != [*map(len, now)]:
        return "the number of parameter groups"
    pairs = (
        (name, old.get(name), new.get(name))
        for groups in zip(before, now, strict=True)
        for old, new in zip(*groups, strict=True)
        for name in old.keys() | new.keys()
    )
    return ", ".join(f"{name} was {old}, is {new}" for name, old, new in pairs if old != new)


def _listed(argument: str, given: object, kind: type[_Kind]) -> list[_Kind]:
    """Returns one or several objects of `kind` as a list; raises TypeError for anything else."""
    several = list(given) if isinstance(given, Iterable) else []
    if isinstance(given, kind):
        several = [given]
    elif not isinstance(given, Iterable) or not all(isinstance(item, kind) for item in several):
        raise TypeError(f"{argument}: expected {kind.__name__} or a list of them, got {given!r}")
    return several


def _memories_of(
    modules: Iterable[nn.Module],
) -> tuple[dict[TrainedRows, FixedMemory], list[Lookups]]:
    """The memories of the modules' rows by their owners, and what looks these rows up."""
    memories: dict[TrainedRows, FixedMemory] = {}
    children = [child for module in modules for child in module.modules()]
    found = [child for child in children if isinstance(child, RowModule)]
    for module in found:
        name, memory = module.trained_rows.name, module.trained_rows.exchange.memory
        if not isinstance(memory, FixedMemory):
            raise ValueError(f"graphed: {name} has no capacity. Build it with capacity=.")
        memories[module.trained_rows] = memory
    if not found:
        raise ValueError(
            "graphed: modules have no speedtorch.Embedding, EmbeddingBag or collection"
        )
    on_cpu = [rows.name for rows in memories if not rows.parameter.is_cuda]
    if 0 < len(on_cpu) < len(memories):
        raise ValueError(
            f"graphed: the rows of {on_cpu[0]} are on the CPU and other rows are on a GPU. A CUDA"
            " graph contains only work of the GPU. Move all modules to the GPU."
        )
    lookups = {module.trained_rows: module.lookups for module in found}
    return memories, list(lookups.values())


def _check_optimizers(tables: Iterable[TrainedRows], optimizers: Sequence[Optimizer]) -> None:
    """Raises ValueError unless `optimizers` step exactly these tables, except frozen ones."""
    if not optimizers:
        raise ValueError("optimizers: expected the optimizers that the step steps, got none")
    known = [inner for optimizer in optimizers for inner in stepped_by(optimizer)]
    stepped = {rows: optimizer for optimizer in known for rows in rows_of_optimizer(optimizer)}
    for rows, optimizer in stepped.items():
        if rows not in tables:
            raise ValueError(
                f"modules: expected also the module of {rows.name}, whose rows the"
                f" {type(optimizer).__name__} steps. Warm-ups would train them."
            )
    for rows in tables:
        if rows not in stepped and rows.parameter.requires_grad:
            raise ValueError(
                f"optimizers: expected also the optimizer that steps the rows of {rows.name}. If no"
                " optimizer steps them, freeze them with requires_grad_(False)."
            )


def graphed(
    step: Callable[..., Any],
    *example: Any,
    modules: nn.Module | Sequence[nn.Module],
    optimizers: Optimizer | Sequence[Optimizer],
    next_ids: Any = None,
) -> GraphedStep:
    """Captures a whole training step in one CUDA graph: lookups, exchange, backward, optimizer.

    The GPU decides which rows the exchange copies, so a replay needs no decision of the host. A
    call copies the batch to the graph's inputs and launches the graph once. Warm-up and capture
    change no row, parameter, optimizer state or default random generator of torch.

    If rows are on the CPU, nothing is captured and each call runs the step itself. The optimizer
    need not be capturable, the example is not used, and a TrainingState may sleep between calls. A
    changed hyperparameter that is a number raises RuntimeError as with a graph. Each call returns
    new tensors, and the step receives the caller's tensors.

    Args:
        step: Trains one batch: zero_grad(), lookups, backward(), step() of the optimizers. Called
            with copies of `example` on the GPU, which must contain the ids of the lookups.
        *example: Tensors, numbers, strings or None, or lists, tuples and dicts of them, with the
            shapes of a batch.
        modules: The trained modules. Every Embedding, EmbeddingBag or collection in them must have
            a capacity. An optimizer with per-row state must be attached to them.
        optimizers: All optimizers that the step steps: SGD, or optimizers with `capturable=True`.
            If a batch has bad ids, an optimizer with `fused=True` that steps these rows changes
            none of its other parameters, either.
        next_ids: Example ids in the format that prefetch's `ids` returns, to prefetch a batch's
            rows during the previous step. By default each step loads its own rows.

    Returns:
        A GraphedStep. Call `step(*batch)`, or `step(*batch, next_ids=...)` with the next batch's
        ids. Batches of other shapes are trained without the graph, and eager steps between replays
        are allowed. flush, state_dict and evaluation see the current rows. While a graph is alive,
        attach, detach, resize, cache, a move to another device and closing the table raise
        RuntimeError.

    Raises:
        TypeError: The step is not a function, or another argument has a wrong type.
        ValueError: No speedtorch module, a module without a capacity, only some rows on the CPU, or
            modules and optimizers that do not belong together.
        NotImplementedError: Ranks of several machines share the rows, ranks share rows and there
            are next_ids, or a lookup has both max_norm and padding_idx.
        RuntimeError: A graph cannot repeat the steps of an optimizer, which the message names; the
            step makes the host wait for the GPU; or results of an earlier eager step are alive.

    Example:
        >>> import torch, speedtorch
        >>> device = "cuda" if torch.cuda.is_available() else "cpu"
        >>> embedding = speedtorch.Embedding(1000, 8, device=device, capacity=64)
        >>> sgd = torch.optim.SGD(embedding.parameters(), lr=0.1)
        >>> def train(ids):
        ...     sgd.zero_grad()
        ...     loss = embedding(ids).square().mean()
        ...     loss.backward()
        ...     sgd.step()
        ...     return loss
        >>> ids = torch.arange(64, device=device)
        >>> step = speedtorch.graphed(train, ids, modules=embedding, optimizers=sgd)
        >>> first = step(ids).item()
        >>> step(ids).item() < first
        True
    """
    if not callable(step):
        raise TypeError(f"step: expected a function that trains a batch, got {step!r}")
    modules = _listed("modules", modules, nn.Module)
    optimizers = _listed("optimizers", optimizers, Optimizer)
    memories, lookups = _memories_of(modules)
    _check_optimizers(memories, optimizers)
    for value in tree_leaves(example):
        if not isinstance(value, (Tensor, *_CONSTANTS)):
            raise TypeError(
                "example: expected tensors, numbers, strings or None, in lists, tuples and dicts,"
                f" got {type(value).__name__}. A graph copies only tensors. Pass this object's"
                " tensors, and convert arrays with torch.as_tensor()."
            )
    if all(rows.parameter.is_cpu for rows in memories):
        return _Uncaptured(step, modules, optimizers, next_ids)
    return _Captured(step, example, modules, optimizers, next_ids, memories, lookups)

"""StateSwapper: keeps optimizer state in host memory between steps."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from speedtorch.layers.module_steps import (
    check_scaler_waits,
    check_steps_separately,
    replace_method,
    replace_step,
)
from speedtorch.layers.offloaded_module import exact_device, is_offloaded
from speedtorch.layers.offloaded_parameters import (
    OffloadedParameters,
    check_offloaded,
    follow_inner,
    move_to_host,
    offloaded_bytes,
)
from speedtorch.layers.optimizer_trials import FirstState, check_when_given
from speedtorch.layers.partial_step import PartialStep
from speedtorch.layers.state_tensors import is_cpu_step, plain_tensors
from speedtorch.layers.tensor_group import Members, TensorGroup
from speedtorch.layers.transfer_stats import StateReport, TransferStats
from speedtorch.memory.byte_count import bytes_of, text_of
from speedtorch.optim.wrappers import given_optimizers, optimizers_within
from speedtorch.step.trained_rows import rows_of_parameter
from speedtorch.torch_internals import as_plain, tree_leaves

__all__ = ["StateSwapper", "check_can_be_split"]

_swapped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers that have a StateSwapper."""

_AT_ONCE = 3
"""Pieces in transfer: the stepped one, which is copied back to the host, and the next two."""
_PIECE = 1 << 28
"""Most bytes of a piece: larger ones copy no faster, and the rest of the budget keeps state."""


class _Piece:
    """Parameters that are stepped together, and their optimizer state."""

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[Tensor],
        device: torch.device,
        traffic: TransferStats,
        *,
        brings: bool,
    ) -> None:
        self._optimizer, self._brings = optimizer, brings
        self.home = parameters[0].device
        """The device of all parameters."""
        self._parameters = [weakref.ref(each) for each in parameters]
        self._names: list[dict[Any, str]] = [{} for _ in parameters]
        """Names of each parameter's state by key, cached because a step needs thousands."""
        self.pack = TensorGroup(device, traffic)
        self.offloaded = OffloadedParameters(device, traffic)
        """The parameters, if they are in host memory and are copied to the device for a step."""

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that still exist."""
        return [each for ref in self._parameters if (each := ref()) is not None]

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient, so that a step would change the piece."""
        return any(each.grad is not None for each in self.parameters)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of parameters and gradients that are copied with the state."""
        return sum(map(offloaded_bytes, self.parameters)) if self._brings else 0

    def come(self, members: Members) -> Members:
        """Starts the copies to the device, and returns the argument for load()."""
        if self._brings:
            self.offloaded.prefetch(self.parameters)
        # State from an interrupted step is copied again: its host copy may have changed since.
        is_old = self.pack.buffer.is_filled
        self.pack.prefetch(members)
        return members if is_old else Members(members.tensors, ())

    def load(self, members: Members) -> None:
        """Moves state and parameters to the device; the current stream waits for the copies."""
        self.pack.load(members)
        self.pack.buffer.load_stream.join()
        self.offloaded.load()
        for each in self.parameters if self._brings else ():
            for value in tree_leaves(self._optimizer.state.get(each)):
                follow_inner(value)  # load_state_dict() may have made it a host tensor

    def leave(self, members: Members | None) -> None:
        """Finishes copies to the host and frees device memory; None: state remains there."""
        if members is not None:
            self.pack.evict(members, search=False)
        self.offloaded.offload()

    def members(self, shared: Mapping[int, int]) -> Members:
        """State tensors by name that can be moved.

        Tensors that several parameters share, or that alias a parameter or its gradient, are
        left out. A shared tensor that is on another device is copied to the piece's device.
        """
        found: dict[str, Tensor] = {}
        device, state = self.pack.buffer.device, self._optimizer.state
        groups = self._optimizer.param_groups
        may_stay = not all(group.get("capturable") or group.get("fused") for group in groups)
        for number, of in enumerate(self._parameters):
            parameter = of()
            if parameter is None or not (kept := state.get(parameter)):
                continue
            own, names = _spans(parameter), self._names[number]
            for key, value in kept.items():
                if (name := names.get(key)) is None:
                    name = names[key] = f"{key!r} of parameter {number}"
                is_count = may_stay and is_cpu_step(self._optimizer, parameter, key, value)
                if is_count and not self.pack.has_place(name, value):
                    continue
                is_plain = type(value) is Tensor
                for part, each in ((name, value),) if is_plain else plain_tensors(name, value):
                    address = each.data_ptr() if each.layout is torch.strided else -1
                    if [begin for begin, nbytes in own if 0 <= address - begin < nbytes]:
                        continue
                    if shared.get(id(each), 0) > 1:
                        if each.device != device:  # evicted while only one parameter had it
                            each.data = each.to(device)
                    elif each.is_cpu or each.device == device:
                        found[part] = each
        return Members(found, found.keys())


def _evicted(optimizer: Optimizer, pieces: Sequence[_Piece]) -> int:
    """Evicts the state of pieces, and returns the freed device bytes."""
    shared = _times_kept(optimizer) if pieces else Counter()
    return sum(each.pack.evict(each.members(shared), search=False) for each in pieces)


class StateSwapper:
    """Keeps optimizer state in host memory, and copies it to the device in pieces for each step.

    Parameters, gradients and activations remain on their device. `optimizer.step()` steps the
    parameters in pieces. While one piece is stepped, the state of the next piece is copied to
    the device, and the state of the previous piece is written back. Results equal a step with all
    state on the device. Pieces that fit into the budget beside the three in transfer remain on the
    device. Between steps, all other state consists of ordinary CPU tensors. state_dict() returns
    all state; load_state_dict() loads it into host memory.

    Any module works whose parameters remain on their device between steps. This includes
    DistributedDataParallel and `fully_shard` (FSDP2), whose ranks step their shards.

    With `device`, parameters may be in host memory, such as with FSDP2's CPUOffloadPolicy. Each
    step copies them to the device with their gradients and state, and writes new values back into
    the same host memory. Pinned memory is copied fastest.

    Args:
        optimizer: one or several optimizers that step each parameter separately. Wrappers from
            accelerate, Lightning and Fabric are accepted.
        budget: the most device memory for state, in bytes or as text such as "2GiB". Three pieces
            are in transfer, each with at most a third of the budget and at most 256 MiB. The state
            of one parameter is not split, so the largest counts three times. With `device`, copied
            parameters and gradients count as well.
        device: the device that steps parameters in host memory. None: their own device.

    Raises:
        TypeError: the object is no optimizer, steps all parameters at once (LBFGS), or wraps
            another optimizer (Lookahead).
        ValueError: an optimizer is given twice, is differentiable, does not step each parameter
            separately (checked with small copies), or has parameters that are rows of an Embedding
            or belong to a Swapper. The budget is no number of bytes. In a step: a parameter in host
            memory shares memory with another, has a sparse gradient, or is averaged by
            DistributedDataParallel.
        RuntimeError: the device is a GPU, and there is none. In a step: torch's GradScaler, whose
            scale is on a GPU, has unscaled gradients in host memory. Use speedtorch.GradScaler.

    Example:
        >>> import torch, speedtorch
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> swapper = speedtorch.StateSwapper(optimizer, budget="128KiB")
        >>> for _ in range(2):
        ...     model(torch.ones(2, 64)).sum().backward()
        ...     optimizer.step()
        >>> swapper.report().pieces
        6
    """

    def __init__(
        self,
        optimizer: Optimizer | Iterable[Optimizer],
        *,
        budget: int | str,
        device: torch.device | str | None = None,
    ) -> None:
        self._optimizers = optimizers_within(given_optimizers(optimizer))
        if not self._optimizers:
            raise TypeError("optimizer: expected a torch.optim.Optimizer, got none")
        self.budget = bytes_of("budget", budget)
        self.device = None if device is None else exact_device(device)
        if self.device is not None and self.device.type == "meta":
            raise ValueError("device: expected a device with memory, such as 'cuda', got 'meta'")
        self._traffic = TransferStats()
        for each in self._optimizers:
            check_can_be_split(each)
        self._pieces: dict[Optimizer, list[_Piece]] = {each: [] for each in self._optimizers}
        self._first = {each: FirstState(each) for each in self._optimizers}
        self._undo: list[Callable[[], None]] = []
        try:
            _swapped.update(self._optimizers)
            for each in self._optimizers:
                self._undo.append(replace_step(each, partial(self._step_pieces, each), self.device))
                self._undo.append(_load_on_host(each))
                self._undo.append(each.register_state_dict_pre_hook(self._evict_mixed).remove)
            self.evict()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        names = ", ".join(type(each).__name__ for each in self._optimizers)
        return f"{type(self).__name__}({names}; budget={text_of(self.budget)})"

    def evict(self) -> int:
        """Moves all state to the host until the next step, and returns the freed device bytes.

        Call this if other code needs the memory, if an exception interrupted a step, or if other
        code created or loaded state.

        Raises:
            TypeError, ValueError: a state tensor cannot be moved because it is sparse, quantized,
                or of a class that does not expose its inner tensors.
            MemoryError: the host has too little memory.
        """
        if not self._undo:  # it is closed
            return 0
        freed = 0
        with as_plain(), torch.no_grad():
            for optimizer in self._optimizers:
                self._arranged(optimizer)
                freed += _evicted(optimizer, self._pieces[optimizer])
        return freed

    def close(self) -> None:
        """Moves all state to the device of its parameters, and restores the optimizers' methods.

        Raises:
            RuntimeError: the device has too little memory for all state
                (torch.OutOfMemoryError). State that did not fit remains on the host.
        """
        for undo in self._undo:
            undo()
        self._undo = []
        _swapped.difference_update(self._optimizers)
        with as_plain(), torch.no_grad():
            for optimizer in [each for each, pieces in self._pieces.items() if pieces]:
                shared = self._arranged(optimizer, checks=False)
                for piece in self._pieces[optimizer]:
                    members = piece.members(shared)
                    if self.device is not None and piece.home.type == "cpu":
                        piece.pack.evict(members, search=False)
                        for each in piece.parameters:
                            move_to_host(optimizer.state.get(each))
                    else:
                        piece.pack.load(members)
                        piece.pack.buffer.load_stream.join()
                self._pieces[optimizer] = []

    def report(self) -> StateReport:
        """Reports where state is and what has been copied so far; waits for queued copies."""
        packs = [piece.pack for pieces in self._pieces.values() for piece in pieces]
        return StateReport(
            pieces=len(packs),
            host_bytes=sum(pack.buffer.nbytes for pack in packs),
            device_bytes=sum(pack.buffer.device_bytes for pack in packs),
            budget_bytes=self.budget,
            **self._traffic.figures(),
        )

    def _step_pieces(self, optimizer: Optimizer, step: PartialStep) -> tuple[()]:
        """Steps all pieces, and returns no remaining parameters."""
        with as_plain(), torch.no_grad():
            shared = self._arranged(optimizer)
            pieces = [each for each in self._pieces[optimizer] if each.has_gradients]
            if self.device is not None:
                check_scaler_waits()
                check_offloaded(each for piece in pieces for each in piece.parameters)
            staying = self._staying(optimizer, pieces)
            for other, its in self._pieces.items():  # these no longer fit into the budget
                going = [e for e in its if e.pack.buffer.device_bytes and e not in staying]
                _evicted(other, going)
                for each in going:
                    each.offloaded.offload()
        try:
            self._step_each(step, pieces, staying, shared)
        finally:
            with as_plain(), torch.no_grad():
                for piece in pieces:
                    piece.offloaded.offload()
        return ()

    def _step_each(
        self,
        step: PartialStep,
        pieces: Sequence[_Piece],
        staying: Collection[_Piece],
        shared: Mapping[int, int],
    ) -> None:
        """Steps pieces in order, and prefetches the next two."""
        with as_plain(), torch.no_grad():
            coming = deque(each.come(each.members(shared)) for each in pieces[:2])
        leaving: list[tuple[_Piece, Members | None]] = []
        for number, piece in enumerate(pieces):
            with as_plain(), torch.no_grad():
                piece.load(coming.popleft())
            step.step(piece.parameters)
            with as_plain(), torch.no_grad():
                piece.offloaded.write_back()
                members = piece.members(shared)
                if piece not in staying:
                    piece.pack.write_back(members)
                # Searched before the host waits in leave(): afterwards the link is idle.
                following = [(each, each.members(shared)) for each in pieces[number + 2 :][:1]]
                for each, its in leaving:
                    each.leave(its)
                coming.extend(each.come(its) for each, its in following)
                # write_back() has queued all changes of the step: nothing is copied again.
                leaving = [(piece, None if piece in staying else Members(members.tensors, ()))]
        with as_plain(), torch.no_grad():
            for each, its in leaving:
                each.leave(its)

    def _staying(self, optimizer: Optimizer, stepped: Iterable[_Piece]) -> set[_Piece]:
        """The first pieces whose state fits into the budget beside the pieces in transfer."""
        of = self._first[optimizer].nbytes
        new = [each.parameters for each in stepped if not each.pack.buffer.nbytes]
        first_bytes = [sum(of(each) for each in some if each.grad is not None) for some in new]
        pieces = [each for some in self._pieces.values() for each in some]
        sizes = [each.pack.buffer.nbytes for each in pieces]
        every = [*(e.pack.buffer.nbytes + e.offloaded_bytes for e in pieces), *first_bytes]
        room = self.budget
        if sum(every) > room:
            room -= _AT_ONCE * max(every)
        found = set()
        for piece, nbytes in zip(pieces, sizes, strict=True):
            if 0 < nbytes <= room:  # a piece without state creates it on the device
                room -= nbytes
                found.add(piece)
        return found

    def _evict_mixed(self, optimizer: Optimizer) -> None:
        """Evicts pieces with several dtypes before state_dict().

        torch.save raises for a storage with several dtypes. On the host each tensor has its own.
        """
        with as_plain(), torch.no_grad():
            there = [each for each in self._pieces[optimizer] if each.pack.buffer.device_bytes]
            dtypes = [{place.dtype for place in e.pack.buffer.places.values()} for e in there]
            _evicted(optimizer, [e for e, its in zip(there, dtypes, strict=True) if len(its) > 1])

    def _arranged(self, optimizer: Optimizer, *, checks: bool = True) -> Counter[int]:
        """Groups new parameters into pieces, and counts the parameters that keep each tensor.

        With `checks`, raises ValueError if a new parameter cannot be stepped in a piece.
        """
        pieces = [each for each in self._pieces[optimizer] if each.parameters]
        for piece in pieces:
            piece.offloaded.offload()  # an error may have interrupted the last call
        if any(e.device != piece.home for piece in pieces for e in piece.parameters):
            pieces = []
        owned = {id(each) for piece in pieces for each in piece.parameters}
        every = [each for group in optimizer.param_groups for each in group["params"]]
        added = [each for each in every if id(each) not in owned]
        if checks and added:
            _check_parameters(optimizer, added)
            check_when_given(optimizer, self.device)
        most = max(1, min(self.budget // _AT_ONCE, _PIECE))
        open_ones: dict[torch.device, list[Tensor]] = {}
        size: Counter[torch.device] = Counter()
        new = []
        for each in added:
            nbytes, home = self._bytes_of(optimizer, each), each.device
            some = open_ones.get(home)
            if some is None or size[home] + nbytes > most:
                some = open_ones[home] = []
                new.append((some, self.device if self.device and each.is_cpu else home))
                size[home] = 0
            some.append(each)
            size[home] += nbytes
        brings = self.device is not None
        # One assignment below: after an exception each parameter must be in exactly one piece.
        pieces += [_Piece(optimizer, *some, self._traffic, brings=brings) for some in new]
        self._pieces[optimizer] = pieces
        return _times_kept(optimizer)

    def _bytes_of(self, optimizer: Optimizer, parameter: Tensor) -> int:
        """Bytes of a parameter's state; before the first step, an estimate of at least its size.

        With `device`, bytes of the parameter and its gradient are added.
        """
        more = 0 if self.device is None else offloaded_bytes(parameter)
        if kept := optimizer.state.get(parameter):
            return more + sum(each.nbytes for _, each in plain_tensors("", kept))
        return more + max(parameter.nbytes, self._first[optimizer].nbytes(parameter))


def _load_on_host(optimizer: Optimizer) -> Callable[[], None]:
    """Keeps state on the host in load_state_dict(); returns a function that undoes this.

    Torch would copy all state to the parameters' device. It therefore receives empty tensors, and
    a hook puts host copies in their place afterwards.
    """

    def load(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        waiting: list[dict[str, Tensor]] = []  # one dict per parameter, in the order of the groups

        def begin(_: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
            state = dict(saved["state"])
            for number in (each for group in saved["param_groups"] for each in group["params"]):
                kept = state.get(number)
                found = kept if isinstance(kept, dict) else {}
                waits = {
                    key: each
                    for key, each in found.items()
                    if type(each) is Tensor and key != "step" and each.numel()
                }
                waiting.append(waits)
                if waits:
                    state[number] = {**found, **{key: e.new_empty(0) for key, e in waits.items()}}
            return {**saved, "state": state}

        @torch.inference_mode(False)
        def end(_: Optimizer) -> None:
            parameters = (each for group in optimizer.param_groups for each in group["params"])
            for parameter, waits in zip(parameters, waiting, strict=False):
                for key, each in waits.items():
                    kept = optimizer.state[parameter]
                    kept[key] = each.detach().to("cpu", kept[key].dtype, copy=True)  # torch's dtype
            waiting.clear()

        before = {name: vars(optimizer)[name] for name in ("state", "param_groups")}
        on_end = optimizer.register_load_state_dict_post_hook
        try:
            with ExitStack() as hooks:
                # Other hooks must see whole tensors: ours runs last before and first after.
                hooks.enter_context(optimizer.register_load_state_dict_pre_hook(begin))
                hooks.enter_context(on_end(end, prepend=True))
                original(*args, **kwargs)
        except BaseException:
            if waiting:  # state that torch has loaded may contain the empty tensors
                vars(optimizer).update(before)
            raise

    return replace_method(optimizer, "load_state_dict", load)


def _spans(parameter: Tensor) -> list[tuple[int, int]]:
    """(address, bytes) of a parameter and its gradient."""
    return [
        (each.data_ptr(), each.nbytes)
        for of in (parameter, parameter.grad)
        for _, each in plain_tensors("", of)
        if each.layout is torch.strided
    ]


def _times_kept(optimizer: Optimizer) -> Counter[int]:
    """Counts the parameters whose state has each tensor, by id."""
    every = optimizer.state.values()
    return Counter([id(each) for kept in every for _, each in plain_tensors("", kept)])


def check_can_be_split(optimizer: Optimizer) -> None:
    """Calls check_steps_separately(); raises ValueError if the optimizer has a StateSwapper."""
    if optimizer in _swapped:
        raise ValueError(
            f"optimizer: {type(optimizer).__name__} already has a StateSwapper. Call its close()"
            " first."
        )
    check_steps_separately(optimizer)


def _check_parameters(optimizer: Optimizer, parameters: Collection[Tensor]) -> None:
    """Raises ValueError if the optimizer cannot step one of the parameters in a piece."""
    name = type(optimizer).__name__
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(
            f"optimizer: {name} has differentiable=True. Backward through its step would need state"
            " that is offloaded. Set differentiable=False."
        )
    for each in parameters:
        if rows_of_parameter(each) is not None:
            raise ValueError(
                f"optimizer: {name} has the rows of an Embedding, whose state attach() offloads."
                " Create a separate optimizer for the rows."
            )
        if is_offloaded(each):
            raise ValueError(
                f"optimizer: {name} has a parameter of a Swapper, which offloads the state too."
                " Create a separate optimizer for the Swapper's parameters."
            )

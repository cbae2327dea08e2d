"""StateSwapper: keeps optimizer state in host memory between steps."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from speedtorch.layers.access_tracker import is_plain_tensor, untracked
from speedtorch.layers.flat_buffer import Memory
from speedtorch.layers.module_steps import (
    check_scaler_waits,
    replace_method,
    replace_step,
)
from speedtorch.layers.module_tensors import is_offloaded
from speedtorch.layers.offloaded_module import exact_device
from speedtorch.layers.offloaded_parameters import (
    OffloadedParameters,
    check_offloaded,
    follow_inner,
    move_to_host,
    offloaded_bytes,
)
from speedtorch.layers.split_steps import (
    FirstState,
    PartialStep,
    check_can_be_split,
    check_when_given,
    rows_refused,
    swapped_optimizers,
)
from speedtorch.layers.state_tensors import is_cpu_step, plain_tensors
from speedtorch.layers.stored_state import StoredState
from speedtorch.layers.tensor_group import Members, TensorGroup
from speedtorch.layers.transfer_stats import StateReport, TransferStats
from speedtorch.memory.byte_count import bytes_of, text_of
from speedtorch.optim.wrappers import given_optimizers, optimizers_within
from speedtorch.step.rounding import RoundingMode, check_mode
from speedtorch.step.trained_rows import rows_of_parameter
from speedtorch.torch_internals import tree_leaves

__all__ = ["StateSwapper"]

_IN_TRANSFER = 3
"""Buckets in transfer: the stepped one, which is copied back to the host, and the next two."""
_BUCKET_BYTES = 1 << 28
"""Most bytes of a bucket: larger ones copy no faster, and the rest of the budget keeps state."""


class _Bucket:
    """Parameters that are stepped together, and their optimizer state."""

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[Tensor],
        device: torch.device,
        traffic: TransferStats,
        *,
        copies_parameters: bool,
        stored: StoredState | None,
    ) -> None:
        self._optimizer, self._copies_parameters = optimizer, copies_parameters
        self._stored = stored
        self._stored_names: list[str] = []
        """Names of the state tensors that are stored in 16 bits, as of the last search."""
        self.parameter_device = parameters[0].device
        """The device of all parameters."""
        self._parameters = [weakref.ref(param) for param in parameters]
        self._names: list[dict[Any, str]] = [{} for _ in parameters]
        """Names of each parameter's state by key, cached because a step needs thousands."""
        self.state = TensorGroup(device, traffic)
        self.offloaded = OffloadedParameters(device, traffic)
        """The parameters, if they are in host memory and are copied to the device for a step."""

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that still exist."""
        return [param for ref in self._parameters if (param := ref()) is not None]

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient, so that a step would change the bucket."""
        return any(param.grad is not None for param in self.parameters)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of parameters and gradients that are copied with the state."""
        return sum(map(offloaded_bytes, self.parameters)) if self._copies_parameters else 0

    @untracked
    def prefetch(self, members: Members) -> Members:
        """Starts the copies to the device, and returns the argument for load()."""
        if self._copies_parameters:
            self.offloaded.prefetch(self.parameters)
        # State from an interrupted step is copied again: its host copy may have changed since.
        is_old = self.state.buffer.is_filled
        self.state.prefetch(members)
        return members if is_old else Members(members.tensors, ())

    @untracked
    def load(self, members: Members) -> None:
        """Moves state and parameters to the device; the current stream waits for the copies."""
        self.state.load(members)
        self.widen(members)
        self.offloaded.load()
        for param in self.parameters if self._copies_parameters else ():
            for value in tree_leaves(self._optimizer.state.get(param)):
                follow_inner(value)  # load_state_dict() may have made it a host tensor

    def widen(self, members: Members) -> None:
        """Makes stored state float32, where it is."""
        if self._stored is not None:
            self._stored.widen([members.tensors[name] for name in self._stored_names])

    def _narrow(self, values: dict[str, Tensor]) -> None:
        """Stores the state tensors of one parameter in 16 bits, in their places on the device."""
        assert self._stored is not None
        buffer, places = self.state.buffer, dict[str, Tensor]()
        for name, value in values.items() if buffer.is_filled else ():
            if name in buffer.places and value.device == buffer.device:
                view = buffer.view(name, Memory.DEVICE)
                is_alike = view.shape == value.shape and view.stride() == value.stride()
                if is_alike and view.dtype == self._stored.dtype:
                    places[name] = view
        if places:
            buffer.load_stream.join()
        self._stored.narrow(values, places)

    @untracked
    def write_back(self, members: Members | None) -> None:
        """Starts copies to the host after a step; None: state remains on the device."""
        self.offloaded.write_back()
        if members is not None:
            self.state.write_back(members)

    @untracked
    def evict(self, members: Members | None) -> int:
        """Finishes copies to the host, and returns the freed bytes of state; None: it remains."""
        freed = 0 if members is None else self.state.evict(members, search=False)
        self.offloaded.offload()
        return freed

    @untracked
    def members(self, shared: Mapping[int, int]) -> Members:
        """State tensors by name that can be moved; stored ones are rounded to 16 bits.

        Tensors that several parameters share, or that alias a parameter or its gradient, are
        left out. A shared tensor that is on another device is copied to the bucket's device.
        """
        found: dict[str, Tensor] = {}
        self._stored_names = []
        device, state = self.state.buffer.device, self._optimizer.state
        groups = self._optimizer.param_groups
        may_be_on_cpu = not all(group.get("capturable") or group.get("fused") for group in groups)
        for number, ref in enumerate(self._parameters):
            parameter = ref()
            if parameter is None or not (kept := state.get(parameter)):
                continue
            spans, names = _spans(parameter), self._names[number]
            stored: dict[str, Tensor] = {}
            for key, value in kept.items():
                if (name := names.get(key)) is None:
                    name = names[key] = f"{key!r} of parameter {number}"
                is_count = may_be_on_cpu and is_cpu_step(self._optimizer, parameter, key, value)
                if is_count and not self.state.has_place(name, value):
                    continue
                is_plain = type(value) is Tensor
                for part, tensor in ((name, value),) if is_plain else plain_tensors(name, value):
                    address = tensor.data_ptr() if tensor.layout is torch.strided else -1
                    if [begin for begin, nbytes in spans if 0 <= address - begin < nbytes]:
                        continue
                    if shared.get(id(tensor), 0) > 1:
                        if tensor.device != device:  # evicted while only one parameter had it
                            tensor.data = tensor.to(device)
                    elif tensor.is_cpu or tensor.device == device:
                        found[part] = tensor
                        if self._stored is not None and self._stored.applies(parameter, tensor):
                            stored[part] = tensor
            if stored:
                self._narrow(stored)
                self._stored_names += stored
        return Members(found, found.keys())


def _evicted(optimizer: Optimizer, buckets: Sequence[_Bucket]) -> int:
    """Evicts the state of buckets, and returns the freed device bytes."""
    shared = _times_kept(optimizer) if buckets else Counter()
    return sum(bucket.evict(bucket.members(shared)) for bucket in buckets)


class StateSwapper:
    """Keeps optimizer state in host memory, and copies it to the device in buckets for each step.

    Without `device`, parameters and gradients are not moved. `optimizer.step()` steps the
    parameters in buckets. While one bucket is stepped, the state of the next bucket is copied to
    the device, and the state of the previous bucket is written back. Without `stored`, results
    equal a step with all state on the device. Buckets that fit into the budget beside the three in
    transfer remain on the device. Between steps, the state of other buckets consists of ordinary
    CPU tensors. State tensors that several parameters share, or that alias a parameter or its
    gradient, are not moved to the host. state_dict() returns all state; load_state_dict() loads it
    into host memory.

    Any module works whose parameters remain on their device between steps. This includes
    DistributedDataParallel and `fully_shard` (FSDP2), whose ranks step their shards.

    With `device`, parameters may be in host memory, such as with FSDP2's CPUOffloadPolicy. Each
    step copies them to the device with their gradients and state, and writes new values back into
    the same host memory. Pinned memory is copied fastest.

    With `stored`, steps compute with float32 state, which is rounded to 16 bits after each step.
    This halves its bytes in host memory and over the link. Rounded are float32 state tensors with
    the shape of a float32 parameter, such as Adam's `exp_avg` and `exp_avg_sq`. Between steps they
    have the 16-bit dtype. The random numbers depend on an element's position in its tensor, and on
    the number and sizes of the tensors that this swapper has rounded before. Ranks that step the
    same parameters therefore round alike.

    Args:
        optimizer: one or several optimizers that step each parameter separately. Wrappers from
            accelerate, Lightning and Fabric are accepted.
        budget: the most device memory for state, in bytes or as text such as "2GiB". Three buckets
            are in transfer, each with at most a third of the budget and at most 256 MiB. The state
            of one parameter is not split: if it is larger than a third of the budget, a step may
            exceed the budget. With `device`, copied parameters and gradients count as well.
        device: the device that steps parameters in host memory. None: their own device.
        stored: torch.bfloat16, the dtype of float32 state between steps. None: state is not
            rounded.
        rounding: how `stored` state is rounded: "stochastic", or "nearest", with which Adam's state
            stops changing when its updates are smaller than half a unit in the last place.

    Raises:
        NotImplementedError: with `stored`: a parameter is a DTensor or another tensor subclass.
        TypeError: the object is no optimizer, steps all parameters at once (LBFGS), or wraps
            another optimizer (Lookahead).
        ValueError: an optimizer is given twice, is differentiable, does not step each parameter
            separately (checked with small copies), or has parameters that are rows of an Embedding
            or belong to a Swapper. The budget is no number of bytes, or `stored` is another dtype.
            In a step with `device`: a parameter in host memory shares memory with another, has a
            sparse gradient, or is averaged by DistributedDataParallel.
        RuntimeError: the device is a GPU, and there is none. In a step with `device`: torch's
            GradScaler, whose scale is on a GPU, has unscaled gradients in host memory. Use
            speedtorch.GradScaler.

    Example:
        >>> import torch, speedtorch
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> swapper = speedtorch.StateSwapper(optimizer, budget="128KiB")
        >>> for _ in range(2):
        ...     model(torch.ones(2, 64)).sum().backward()
        ...     optimizer.step()
        >>> swapper.report().num_buckets
        6
    """

    def __init__(
        self,
        optimizer: Optimizer | Iterable[Optimizer],
        *,
        budget: int | str,
        device: torch.device | str | None = None,
        stored: torch.dtype | None = None,
        rounding: RoundingMode = "stochastic",
    ) -> None:
        check_mode(rounding, stored)
        self._stored = None if stored is None else StoredState(stored, rounding)
        self._optimizers = optimizers_within(given_optimizers(optimizer))
        if not self._optimizers:
            raise TypeError("optimizer: expected a torch.optim.Optimizer, got none")
        self.budget = bytes_of("budget", budget)
        self.device = None if device is None else exact_device(device)
        self._traffic = TransferStats()
        for opt in self._optimizers:
            check_can_be_split(opt)
        self._buckets: dict[Optimizer, list[_Bucket]] = {opt: [] for opt in self._optimizers}
        self._first = {opt: FirstState(opt) for opt in self._optimizers}
        self._undo: list[Callable[[], None]] = []
        try:
            swapped_optimizers.update(self._optimizers)
            for opt in self._optimizers:
                self._undo.append(replace_step(opt, partial(self._step_buckets, opt), self.device))
                load = partial(_load_on_host, opt)
                self._undo.append(replace_method(opt, "load_state_dict", load))
                self._undo.append(opt.register_state_dict_pre_hook(self._evict_mixed).remove)
            self.evict()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        names = ", ".join(type(opt).__name__ for opt in self._optimizers)
        stored = "" if self._stored is None else f"; {self._stored}"
        return f"{type(self).__name__}({names}; budget={text_of(self.budget)}{stored})"

    @untracked
    def evict(self) -> int:
        """Moves the state of all buckets to the host until the next step; returns the freed bytes.

        Call this if other code needs the memory, if an exception interrupted a step, or if other
        code created or loaded state.

        Raises:
            TypeError, ValueError: a state tensor cannot be moved because it is sparse, quantized,
                or of a class that does not expose its inner tensors.
            MemoryError: the host has too little memory.
        """
        if not self._undo:  # closed
            return 0
        freed = 0
        for optimizer in self._optimizers:
            self._arranged(optimizer)
            freed += _evicted(optimizer, self._buckets[optimizer])
        return freed

    @untracked
    def close(self) -> None:
        """Moves all state to the device of its parameters, and restores the optimizers' methods.

        State that was stored in 16 bits becomes float32 again.

        Raises:
            RuntimeError: the device has too little memory for all state
                (torch.OutOfMemoryError). State that did not fit remains on the host.
        """
        for undo in self._undo:
            undo()
        self._undo = []
        swapped_optimizers.difference_update(self._optimizers)
        for optimizer in [opt for opt, buckets in self._buckets.items() if buckets]:
            shared = self._arranged(optimizer, checks=False)
            for bucket in self._buckets[optimizer]:
                members = bucket.members(shared)
                if self.device is not None and bucket.parameter_device.type == "cpu":
                    bucket.state.evict(members, search=False)
                    bucket.widen(members)
                    for param in bucket.parameters:
                        move_to_host(optimizer.state.get(param))
                else:
                    bucket.state.load(members)
                    bucket.widen(members)
            self._buckets[optimizer] = []

    def report(self) -> StateReport:
        """Reports where state is and what has been copied so far; waits for queued copies."""
        groups = [bucket.state for buckets in self._buckets.values() for bucket in buckets]
        return StateReport(
            num_buckets=len(groups),
            host_bytes=sum(group.buffer.nbytes for group in groups),
            device_bytes=sum(group.buffer.device_bytes for group in groups),
            budget_bytes=self.budget,
            **self._traffic.figures(),
        )

    def _step_buckets(self, optimizer: Optimizer, step: PartialStep) -> tuple[()]:
        """Steps all buckets, prefetches the next two, and returns no remaining parameters."""
        buckets, resident, shared = self._begin_step(optimizer)
        try:
            prefetched = deque(bucket.prefetch(bucket.members(shared)) for bucket in buckets[:2])
            stepped: list[tuple[_Bucket, Members | None]] = []
            for number, bucket in enumerate(buckets):
                bucket.load(prefetched.popleft())
                step.step(bucket.parameters)
                members = bucket.members(shared)
                bucket.write_back(None if bucket in resident else members)
                # This search precedes the wait in evict(), because the link would idle during it.
                following = [(ahead, ahead.members(shared)) for ahead in buckets[number + 2 :][:1]]
                for former, moved in stepped:
                    former.evict(moved)
                prefetched.extend(ahead.prefetch(needed) for ahead, needed in following)
                # write_back() has queued all changes of the step: nothing is copied again.
                stepped = [(bucket, None if bucket in resident else Members(members.tensors, ()))]
            for bucket, moved in stepped:
                bucket.evict(moved)
        finally:
            for bucket in buckets:
                bucket.evict(None)
        return ()

    @untracked
    def _begin_step(
        self, optimizer: Optimizer
    ) -> tuple[list[_Bucket], Collection[_Bucket], Mapping[int, int]]:
        """Returns the buckets to step, those that remain on the device, and counts of _arranged().

        Resident buckets of earlier steps that no longer fit are evicted.
        """
        shared = self._arranged(optimizer)
        buckets = [bucket for bucket in self._buckets[optimizer] if bucket.has_gradients]
        if self.device is not None:
            check_scaler_waits()
            check_offloaded(param for bucket in buckets for param in bucket.parameters)
        resident = self._resident(optimizer, buckets)
        for owner, owned in self._buckets.items():
            loaded = [bucket for bucket in owned if bucket.state.buffer.device_bytes]
            _evicted(owner, [bucket for bucket in loaded if bucket not in resident])
        return buckets, resident, shared

    def _resident(self, optimizer: Optimizer, stepped: Iterable[_Bucket]) -> set[_Bucket]:
        """The first buckets whose state fits into the budget beside the buckets in transfer."""
        nbytes_of = self._first[optimizer].nbytes
        sizes = [
            sum(nbytes_of(param) for param in bucket.parameters if param.grad is not None)
            for bucket in stepped
            if not bucket.state.buffer.nbytes
        ]
        buckets = [bucket for buckets in self._buckets.values() for bucket in buckets]
        sizes += [bucket.state.buffer.nbytes + bucket.offloaded_bytes for bucket in buckets]
        free = self.budget
        if self._stored is not None:  # the float32 state of a bucket in its step
            free -= 2 * max(sizes, default=0)
        if sum(sizes) > free:
            free -= _IN_TRANSFER * max(sizes)
        resident = set()
        for bucket in buckets:
            if 0 < (nbytes := bucket.state.buffer.nbytes) <= free:
                free -= nbytes  # a bucket without state creates it on the device
                resident.add(bucket)
        return resident

    @untracked
    def _evict_mixed(self, optimizer: Optimizer) -> None:
        """Evicts buckets with several dtypes before state_dict().

        torch.save raises for a storage with several dtypes. On the host each tensor has its own.
        """
        mixed = [
            bucket
            for bucket in self._buckets[optimizer]
            if (flat := bucket.state.buffer).device_bytes
            and len({place.dtype for place in flat.places.values()}) > 1
        ]
        _evicted(optimizer, mixed)

    def _arranged(self, optimizer: Optimizer, *, checks: bool = True) -> Counter[int]:
        """Groups new parameters into buckets, and counts the parameters that keep each tensor.

        With `checks`, raises ValueError if a new parameter cannot be stepped in a bucket.
        """
        buckets = [bucket for bucket in self._buckets[optimizer] if bucket.parameters]
        for bucket in buckets:
            bucket.offloaded.offload()  # an error may have interrupted the last call
        owned = [(param, bucket) for bucket in buckets for param in bucket.parameters]
        if any(param.device != bucket.parameter_device for param, bucket in owned):
            buckets, owned = [], []
        known = {id(param) for param, _ in owned}
        params = [param for group in optimizer.param_groups for param in group["params"]]
        added = [param for param in params if id(param) not in known]
        if checks and added:
            _check_parameters(optimizer, added, is_stored=self._stored is not None)
            check_when_given(optimizer, self.device)
        limit = max(1, min(self.budget // _IN_TRANSFER, _BUCKET_BYTES))
        last: dict[torch.device, list[Tensor]] = {}
        size: Counter[torch.device] = Counter()
        new = []
        for param in added:
            nbytes, device = self._bytes_of(optimizer, param), param.device
            if device not in last or size[device] + nbytes > limit:
                last[device] = []
                new.append((last[device], self.device if self.device and param.is_cpu else device))
                size[device] = 0
            last[device].append(param)
            size[device] += nbytes
        copies = self.device is not None
        # One assignment below: after an exception each parameter must be in exactly one bucket.
        buckets += [
            _Bucket(
                *(optimizer, params, device, self._traffic),
                copies_parameters=copies,
                stored=self._stored,
            )
            for params, device in new
        ]
        self._buckets[optimizer] = buckets
        return _times_kept(optimizer)

    def _bytes_of(self, optimizer: Optimizer, parameter: Tensor) -> int:
        """Bytes of a parameter's state; before the first step, an estimate of at least its size.

        With `device`, bytes of the parameter and its gradient are added.
        """
        extra = 0 if self.device is None else offloaded_bytes(parameter)
        if kept := optimizer.state.get(parameter):
            tensors = [tensor for _, tensor in plain_tensors("", kept)]
            if self._stored is not None:
                return extra + sum(self._stored.nbytes(parameter, tensor) for tensor in tensors)
            return extra + sum(tensor.nbytes for tensor in tensors)
        return extra + max(parameter.nbytes, self._first[optimizer].nbytes(parameter))


class _LoadedOnHost(TorchFunctionMode):
    """Copies tensors of a loaded state to host memory where torch copies them to a device."""

    def __init__(self) -> None:
        super().__init__()
        self._loaded: set[int] = set()

    def note(self, _: Optimizer, saved: dict[str, Any]) -> None:
        """Notes the tensors to load; torch calls this before it loads them."""
        self._loaded = {id(leaf) for leaf in tree_leaves(saved["state"]) if type(leaf) is Tensor}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not Tensor.to or id(args[0]) not in self._loaded or "device" not in kwargs:
            return func(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return func(*args, **{**kwargs, "device": "cpu", "copy": True})


def _load_on_host(
    optimizer: Optimizer, original: Callable[..., None], /, *args: Any, **kwargs: Any
) -> None:
    """Calls load_state_dict(), which would need device memory for all state at once."""
    mode = _LoadedOnHost()
    with optimizer.register_load_state_dict_pre_hook(mode.note), mode:
        original(*args, **kwargs)


def _spans(parameter: Tensor) -> list[tuple[int, int]]:
    """(address, bytes) of a parameter and its gradient."""
    return [
        (tensor.data_ptr(), tensor.nbytes)
        for value in (parameter, parameter.grad)
        for _, tensor in plain_tensors("", value)
        if tensor.layout is torch.strided
    ]


def _times_kept(optimizer: Optimizer) -> Counter[int]:
    """Counts the parameters whose state has each tensor, by id."""
    states = optimizer.state.values()
    return Counter([id(tensor) for kept in states for _, tensor in plain_tensors("", kept)])


def _check_parameters(
    optimizer: Optimizer, parameters: Collection[Tensor], *, is_stored: bool
) -> None:
    """Raises ValueError or NotImplementedError if a parameter cannot be stepped in a bucket."""
    name = type(optimizer).__name__
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(
            f"optimizer: {name} has differentiable=True. Backward through its step would need state"
            " that is offloaded. Set differentiable=False."
        )
    for param in parameters:
        if rows_of_parameter(param) is not None:
            raise rows_refused(optimizer)
        if is_stored and not is_plain_tensor(param):
            raise NotImplementedError(
                f"stored: {name} has a {type(param).__name__} as a parameter, but only the state of"
                " plain tensors is stored in 16 bits. Omit stored=."
            )
        if is_offloaded(param):
            raise ValueError(
                f"optimizer: {name} has a parameter of a Swapper, which offloads the state too."
                " Create a separate optimizer for the Swapper's parameters."
            )

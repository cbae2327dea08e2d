"""A module's parameters and buffers, with gradients and optimizer state, as one that moves.

**What is where.** A unit's tensors are views of one slab, either of its host memory or of its
device memory; what is of neither yet (a gradient, state of the first step) joins at the next move.
The objects stay: a move assigns their `data`.

**What autograd has saved.** It keeps views of the device slab, which are right again once the slab
has been filled with the same bytes, and have no memory before. Torch compares the version of a
tensor with the one at which it was saved, so each memory has a count of its own: a tensor that
moves takes the count of the memory that it comes to, one further if its elements have changed
since it was there. A graph of an evicted unit is refused by that, and is right after `load()`, as
is one whose unit has changed on the host.

**Errors at any line.** First all is copied, then the tensors are let see the copy one by one, and
only then the memory that they have left goes: each is whole all the while, and another call
completes the move.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedtorch.layers.slab import Memory, Slab
from speedtorch.torch_internals import set_versions, tree_leaves, version_of

__all__ = ["Unit"]

# Versions are 32 bits; those of the host are the upper half, so that none means both memories.
_HOST_VERSIONS = 1 << 31

_units: weakref.WeakSet[Unit] = weakref.WeakSet()
"""All that live: a tensor belongs to one of them at most."""


@dataclass(frozen=True)
class _Member:
    """One tensor of a unit.

    Attributes:
        tensor: the object.
        is_written: it may have changed although its version has not.
    """

    tensor: Tensor
    is_written: bool


class _Guard:
    """Names the unit whose backward is reached while it is not where its forward ran.

    It is a forward hook of the unit's module. Copies of the module, and files of it, get a guard of
    no unit.
    """

    def __init__(self, unit: Unit | None = None) -> None:
        self._unit = None if unit is None else weakref.ref(unit)

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        unit = None if self._unit is None else self._unit()
        if unit is None or unit.memory is None:
            return
        before = partial(self._before_backward, unit.memory)
        for each in tree_leaves(output):
            if isinstance(each, Tensor) and each.grad_fn is not None:
                each.grad_fn.register_prehook(before)

    def __reduce__(self) -> tuple[type[_Guard], tuple[()]]:
        return _Guard, ()

    def _before_backward(self, memory: Memory, gradients: object) -> None:
        unit = None if self._unit is None else self._unit()
        if unit is not None and unit.memory is not memory:
            there = {Memory.HOST: "evicted", Memory.DEVICE: "loaded", None: "half moved"}
            raise RuntimeError(
                f"unit {unit.name!r}: a backward reached it while it is {there[unit.memory]}, and"
                f" its forward ran while it was {there[memory]}:"
                f" {'load' if memory is Memory.DEVICE else 'evict'}() it before the backward"
            )


@contextmanager
def _plain_tensors() -> Iterator[None]:
    """What is made within is an ordinary tensor without a graph, whatever mode the caller is in."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class Unit:
    """A module and what an optimizer keeps of it: in host memory, or on the device.

    The unit is evicted at first. An evicted unit is ordinary CPU tensors. Parameter objects, their
    hooks, requires_grad and an optimizer's param_groups stay as they are; gradients and the tensors
    of `optimizer.state` move along, those that are made later as well. Tensors without dimensions
    that torch keeps on the CPU (`step`) stay there. Tied tensors are there once, and stay tied.

    Written back is what may have changed: buffers, what a step of the optimizer has changed, and
    whatever torch has counted a change of. Torch counts none of `parameter.data`: say `touch()`
    after such a change, unless a step of the optimizer follows or does it.

    A view of a loaded unit's tensor that you keep (`parameter.detach()`) has no memory while the
    unit is evicted: do not use it then. What autograd keeps it does not use then: a backward raises
    RuntimeError.

    Args:
        module: whose parameters and buffers these are. Of modules that share a parameter make one
            unit (nn.ModuleList).
        optimizer: any of torch's that keeps tensors for each parameter by itself.
        device: where it is when loaded; "cpu" is another part of host memory.
        name: what errors call it.

    Raises:
        TypeError: an argument is none of these; a tensor is of a class of its own; the optimizer
            keeps tensors within lists or dicts, as LBFGS does.
        ValueError: a parameter or buffer belongs to another unit; a tensor is sparse, quantized, on
            the meta device or made in inference mode; the device is "meta".
        MemoryError: the host has too little memory.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> unit = Unit(layer, device="cpu", name="layer")
        >>> unit.load()
        >>> result = layer(torch.ones(2))
        >>> unit.evict()
        512
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        device: torch.device | str,
        name: str = "unit",
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"module: expected an nn.Module, got {type(module).__name__}")
        if not isinstance(optimizer, Optimizer | None):
            raise TypeError(
                f"optimizer: expected a torch.optim.Optimizer or None, got"
                f" {type(optimizer).__name__}"
            )
        self.device = torch.device(device)
        if self.device.type == "meta":
            raise ValueError("device: expected one with memory, as 'cuda' or 'cpu', got 'meta'")
        self.module, self.optimizer, self.name = module, optimizer, name
        self.memory: Memory | None = None
        """Where it is; None after an error within a move, until another completes it."""
        self._is_touched = self._is_stepped = False
        self._versions: dict[str, tuple[int, int]] = {}
        """The last version of each tensor on the host and on the device."""
        self._check_alone()
        with _plain_tensors():
            self._slab = Slab({}, self.device)
        _units.add(self)
        self.evict()
        self._hooks = [module.register_forward_hook(_Guard(self))]
        if optimizer is not None:
            method = weakref.WeakMethod(self._after_step)

            def after_step(*_: Any) -> None:
                if (called := method()) is not None:
                    called()

            self._hooks.append(optimizer.register_step_post_hook(after_step))

    @property
    def nbytes(self) -> int:
        """Bytes of the host slab, and of the device slab of a loaded unit."""
        return self._slab.nbytes

    def load(self) -> None:
        """Brings the unit to the device, where it stays if it is there.

        Raises:
            RuntimeError: what torch raises where the device has too little memory
                (torch.OutOfMemoryError); the unit is where it was.
            TypeError, ValueError, MemoryError: as when the unit was made, for a tensor that came to
                it since.
        """
        members = self._members()
        memories = {self._slab.memory_of(name, each.tensor) for name, each in members.items()}
        if self.memory is Memory.DEVICE and Memory.HOST not in memories:
            return
        if None in memories:  # it came to the unit on the host, and has no place yet
            self.evict()
        if not self._slab.device_bytes:  # all is on the host, and all is copied
            self._is_touched = self._is_stepped = False
        with _plain_tensors():
            self._slab.fill()
            self._move(members, Memory.DEVICE)
        self.memory = Memory.DEVICE

    def evict(self) -> int:
        """Brings the unit to the host, and what is new of it; returns the device slab's bytes.

        These are free then. 0 if it was on the host.

        Raises:
            TypeError, ValueError: as when the unit was made, for a tensor that came to it since;
                the unit is where it was.
            MemoryError: the host has too little for what came to it since, which is where it was.
        """
        members = self._members()
        tensors = {name: each.tensor for name, each in members.items()}
        left = self._slab
        with _plain_tensors():
            if not left.fits(tensors):
                self._slab = Slab(tensors, self.device)
            elif not tensors.keys() <= left.names:
                self._grow(members)
            self._move(members, Memory.HOST)
        self.memory = Memory.HOST
        self._is_touched = self._is_stepped = False
        # Whose tensors have all left both.
        return left.empty() + (0 if self._slab is left else self._slab.empty())

    def touch(self) -> None:
        """Says that any of its tensors may have changed without torch's counting it."""
        self._is_touched = True

    def _after_step(self) -> None:
        self._is_stepped = True

    def close(self) -> None:
        """Evicts the unit, whose tensors are free to be another's then."""
        self.evict()
        for each in self._hooks:
            each.remove()
        _units.discard(self)

    def _grow(self, members: dict[str, _Member]) -> None:
        """Brings all to the host that has a place, and makes a larger slab around that."""
        left = self._slab
        held = {name: each for name, each in members.items() if name in left.names}
        self._move(held, Memory.HOST)
        tensors = {name: each.tensor for name, each in members.items()}
        self._slab = Slab(tensors, self.device, left)
        for name, each in held.items():
            # The memory that it leaves stays as it is: versions do so, too.
            each.tensor.data = self._slab.view(name, Memory.HOST)

    def _move(self, members: dict[str, _Member], memory: Memory) -> None:
        """Lets all tensors be in a memory, where what they are elsewhere is copied to first."""
        slab, at = self._slab, {}
        for name, each in members.items():
            at[name] = slab.memory_of(name, each.tensor)
        leaving = {name: each.tensor for name, each in members.items() if at[name] is not memory}
        if not leaving:
            return
        self.memory = None
        new = {
            name
            for name, tensor in leaving.items()
            if at[name] is None or version_of(tensor) not in self._versions[name]
        }
        copied = {name for name in leaving if members[name].is_written} | new
        slab.copy_to(
            memory,
            [name for name in copied if at[name] is not None],
            [name for name in members if at[name] is memory],
        )
        for name, tensor in leaving.items():
            if at[name] is None:
                slab.take(name, tensor)
        versions = []
        for name, tensor in leaving.items():
            if name in new:
                self._count(name, version_of(tensor), at[name])
            versions.append(self._versions[name][memory is Memory.DEVICE])
        set_versions(tuple(leaving.values()), tuple(versions))
        for name, tensor in leaving.items():
            tensor.data = slab.view(name, memory)

    def _count(self, name: str, version: int, left: Memory | None) -> None:
        """Notes that a tensor's elements have changed, at this version, in the memory it leaves."""
        host, device = self._versions.get(name, (_HOST_VERSIONS, 0))
        # Graphs of the memory that it leaves are right if they have saved these very elements.
        if version >= _HOST_VERSIONS:
            host, device = max(host, version + (left is not Memory.HOST)), device + 1
        else:
            host, device = host + 1, max(device, version + (left is not Memory.DEVICE))
        self._versions[name] = host, device

    def _check_alone(self) -> None:
        """ValueError if a parameter or buffer belongs to another unit."""
        for other in _units:
            names = {id(tensor): name for name, tensor in _of_module(other.module)}
            for name, tensor in _of_module(self.module):
                if id(tensor) in names:
                    raise ValueError(
                        f"unit {self.name!r}: {name} is {names[id(tensor)]} of unit"
                        f" {other.name!r} as well, and moves with one unit alone; make one unit of"
                        " both modules (nn.ModuleList), or close() the other"
                    )

    def _members(self) -> dict[str, _Member]:
        """All tensors that are the unit's now by name, those that are not trained first."""
        is_written = self._is_touched or self._is_stepped
        frozen: dict[str, _Member] = {}
        others: dict[str, _Member] = {}
        for name, each in self.module.named_parameters():
            if each.requires_grad:
                others[name] = _Member(each, is_written)
            else:
                frozen[name] = _Member(each, self._is_touched)
            if each.grad is not None:
                others[f"the gradient of {name}"] = _Member(each.grad, True)
            for key, value in self._state_of(name, each):
                others[f"{key} of {name}"] = _Member(value, is_written)
        for name, buffer in self.module.named_buffers():
            # Torch's batch norm changes its statistics and counts no version.
            others[name] = _Member(buffer, True)
        return frozen | others

    def _state_of(self, name: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
        """What an optimizer keeps of a parameter and needs where the parameter is."""
        if self.optimizer is None or parameter not in self.optimizer.state:
            return
        for key, value in self.optimizer.state[parameter].items():
            if isinstance(value, Tensor):
                if not self._stays(parameter, key, value):
                    yield key, value
            elif any(isinstance(each, Tensor) for each in tree_leaves(value)):
                raise TypeError(
                    f"unit {self.name!r}: {type(self.optimizer).__name__} keeps a"
                    f" {type(value).__name__} of tensors as {key!r} of {name}; it must keep single"
                    " tensors, each of one parameter"
                )

    def _stays(self, parameter: Tensor, key: str, value: Tensor) -> bool:
        """Whether it is a number on the CPU, where torch wants it whatever device steps."""
        if value.dim() or value.device.type != "cpu" or (parameter.dim() == 0 and key != "step"):
            return False
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            if any(each is parameter for each in group["params"]):
                return not (group.get("capturable") or group.get("fused"))
        return True


def _of_module(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()

"""host_init: builds modules in host memory, even if their code requests a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from speedtorch.torch_internals import tree_leaves

__all__ = ["host_init"]

HOST = torch.device("cpu")


class _OnHost(TorchFunctionMode):
    """Creates tensors on the CPU if a GPU is requested, and ignores moves to a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self._generators: dict[torch.Generator, torch.Generator] = {}
        """CPU generators by the device generators that they replace, with the same seed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            return args[0]
        if kwargs.get("device") is not None:
            kwargs["device"] = _on_host(kwargs["device"])
        given = kwargs.get("generator")
        if isinstance(given, torch.Generator) and given.device.type != "cpu":
            made = torch.Generator().manual_seed(given.initial_seed())
            kwargs["generator"] = self._generators.setdefault(given, made)
        if func is Tensor.to:
            args = (args[0], *(_on_host(value) for value in args[1:]))
        made = func(*args, **kwargs)
        # The GPU may be a default device set within, or named by type("torch.cuda.FloatTensor").
        if _is_away(made) and not any(map(_is_away, tree_leaves((args, kwargs)))):
            return made.cpu()
        return made


def _is_away(given: Any) -> bool:
    return isinstance(given, Tensor) and given.device.type not in ("cpu", "meta")


def _on_host(given: Any) -> Any:
    """Returns the CPU for a device other than meta; other values are returned unchanged."""
    is_device = isinstance(given, torch.device | str) or type(given) is int
    if not is_device:
        return given.cpu() if isinstance(given, Tensor) and given.device.type != "meta" else given
    return given if torch.device(given).type == "meta" else HOST


@contextmanager
def host_init() -> Iterator[None]:
    """Builds modules in host memory, even if their code requests a GPU.

    Use this for models larger than the GPU's memory, before you create a `Swapper`. Within the
    block, tensors are neither created on a GPU nor moved there, except results of operations on
    tensors that are on a GPU already. A GPU generator is replaced by a CPU generator with the same
    seed, which draws other numbers. The meta device still works.

    Only calls of torch in the current thread are changed. Other threads are not, such as a
    library's: with transformers' `from_pretrained`, omit `device_map="cuda"`.
    `torch.cuda.FloatTensor(...)` is not changed either. `torch.load` raises for files with GPU
    tensors without `map_location="cpu"`.

    For a model built on the meta device, load values into host memory with
    `model.load_state_dict(safetensors.torch.load_file(path), assign=True)`. Create the optimizer
    afterwards.

    Example:
        >>> import torch, speedtorch
        >>> with speedtorch.host_init():
        ...     layer = torch.nn.Linear(4, 4, device="cuda")
        >>> layer.weight.device
        device(type='cpu')
    """
    with HOST, _OnHost():
        yield

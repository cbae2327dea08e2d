"""host_init: modules are built in host memory, wherever their code asks for."""

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
    """Makes tensors on the CPU that are asked for on a device, and moves none to one."""

    def __init__(self) -> None:
        super().__init__()
        self._generators: dict[torch.Generator, torch.Generator] = {}
        """Those of the CPU that stand for those of a device, whose seed they have at first."""

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
            args = (args[0], *(_on_host(each) for each in args[1:]))
        made = func(*args, **kwargs)
        # Such as by set_default_device() within, or type("torch.cuda.FloatTensor").
        if _is_away(made) and not any(map(_is_away, tree_leaves((args, kwargs)))):
            return made.cpu()
        return made


def _is_away(given: Any) -> bool:
    return isinstance(given, Tensor) and given.device.type not in ("cpu", "meta")


def _on_host(given: Any) -> Any:
    """The CPU for a device with memory of its own; everything else as it is."""
    is_device = isinstance(given, torch.device | str) or type(given) is int
    if not is_device:
        return given.cpu() if isinstance(given, Tensor) and given.device.type != "meta" else given
    return given if torch.device(given).type == "meta" else HOST


@contextmanager
def host_init() -> Iterator[None]:
    """Builds modules in host memory, also where their code asks for a GPU.

    For models that are larger than the GPU's memory, before a Swapper takes them: within, nothing
    is made on a GPU or moved there. A generator of a GPU is replaced by one of the CPU that starts
    from its seed, and draws other numbers than a GPU. The meta device stays as it is.

    It changes calls of torch in this thread. Other threads go on as they are, those of a library
    too, as in transformers' `from_pretrained(device_map="cuda")`: leave device_map out. So does
    `torch.cuda.FloatTensor(...)`. `torch.load` wants `map_location="cpu"` and raises otherwise.

    A model that was built on the meta device takes its values from a file, on the host as well, by
    `model.load_state_dict(safetensors.torch.load_file(path), assign=True)`; make the optimizer
    after that.

    Example:
        >>> import torch, speedtorch
        >>> with speedtorch.host_init():
        ...     layer = torch.nn.Linear(4, 4, device="cuda")
        >>> layer.weight.device
        device(type='cpu')
    """
    with HOST, _OnHost():
        yield

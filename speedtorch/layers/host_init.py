"""host_init: modules are built in host memory, wherever their code asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["host_init"]

HOST = torch.device("cpu")


class _OnHost(TorchFunctionMode):
    """Makes tensors on the CPU that are asked for on a device, and moves none to one."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            return args[0]
        if kwargs.get("device") is not None:
            kwargs["device"] = _on_host(kwargs["device"])
        if func is Tensor.to:
            args = (args[0], *(_on_host(each) for each in args[1:]))
        return func(*args, **kwargs)


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
    is made on a GPU or moved there. The meta device stays as it is. A model that was built on that
    takes its values from a file by `model.load_state_dict(safetensors.torch.load_file(path),
    assign=True)`, on the host as well; make the optimizer after that.

    Example:
        >>> import torch, speedtorch
        >>> with speedtorch.host_init():
        ...     layer = torch.nn.Linear(4, 4, device="cuda")
        >>> layer.weight.device
        device(type='cpu')
    """
    with HOST, _OnHost():
        yield

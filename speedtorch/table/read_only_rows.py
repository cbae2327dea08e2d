"""ReadOnlyRows: rows that can be read as any tensor, and that no operation of torch writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from speedtorch.torch_internals import (
    schema_name,
    tensor_of_class,
    tree_leaves,
    tree_map,
    written_arguments,
)

__all__ = ["ReadOnlyRows", "in_own_storage"]


class ReadOnlyRows(Tensor):
    """Rows in memory that the system lets this process read only: a write would end it.

    Operations that write to them, or to a view of them, raise ValueError before anything happens;
    all others work, also those of other libraries. Results in memory of their own are plain, also
    what copy.deepcopy and pickle make, which has the elements of a view alone.

    No operation sees what is written through `untyped_storage()`, the `data` of another tensor, or
    torch.from_numpy: such a write ends the process.

    Attributes:
        rows: The same as a plain tensor, which nothing guards.
    """

    rows: Tensor
    remedy: str
    _whole: Tensor
    """What they are a view of: pinned memory stays pinned for as long as that object is there."""

    def __new__(cls, rows: Tensor, remedy: str, whole: Tensor | None = None) -> ReadOnlyRows:
        """Guards rows."""
        return tensor_of_class(cls, rows.detach())

    def __init__(self, rows: Tensor, remedy: str, whole: Tensor | None = None) -> None:
        """Guards rows; errors end with the remedy."""
        self.rows, self.remedy = rows, remedy
        self._whole = rows if whole is None else whole

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for name, place in written_arguments(func).items():
            written = kwargs[name] if name in kwargs else args[place : place + 1]
            for each in tree_leaves(written):
                if isinstance(each, ReadOnlyRows):
                    raise ValueError(f"{schema_name(func).split('::')[1]}: {name} {each.remedy}")
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, ReadOnlyRows)]
        result = func(*tree_map(_plain, args), **tree_map(_plain, kwargs))
        return tree_map(_guard_of(given), result)

    def tolist(self) -> Any:
        """As of any tensor."""
        return self.rows.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """A NumPy array of the same memory that cannot be written."""
        array = self.rows.numpy(force=force)
        array.setflags(write=False)
        return array

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy() if dtype is None else self.numpy().astype(dtype, copy=False)

    def apply_(self, *_: Any, **__: Any) -> NoReturn:
        """Refused, as torch calls no operation for it."""
        raise ValueError(f"the tensor {self.remedy}")

    map_ = map2_ = share_memory_ = apply_

    def __dlpack__(self, *_: Any, **__: Any) -> NoReturn:
        raise BufferError(f"__dlpack__: the receiver could write: the memory {self.remedy}")

    def __copy__(self) -> Tensor:
        return self.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A copy in memory of its own, which can be written."""
        memo[id(self)] = copied = self.rows.clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The storage that they have is the whole file, and multiprocessing moves what it sends.
        data = in_own_storage(self.rows.contiguous().view(-1).view(torch.uint8))
        own = data.view(self.rows.dtype).view(self.rows.shape)
        return own.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.rows)

    def __format__(self, form: str) -> str:
        return format(self.rows, form)


def in_own_storage(values: Tensor) -> Tensor:
    """A contiguous tensor in the same memory, whose storage begins and ends with it.

    accelerate takes tensors of one storage for one tensor, and saves the first of them alone.
    """
    if values.untyped_storage().nbytes() == values.numel() * values.element_size():
        return values
    with torch.inference_mode(False), torch.cuda.device(values.get_device()):
        return from_dlpack(values.__dlpack__())


def _plain(value: Any) -> Any:
    return value.rows if isinstance(value, ReadOnlyRows) else value


def _guard_of(given: list[ReadOnlyRows]) -> Callable[[Any], Any]:
    """Guards results that lie in the memory of one of these."""
    by_memory = {each.rows.untyped_storage().data_ptr(): each for each in given}

    def guarded(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.layout != torch.strided:
            return value.clone()  # sparse and nested tensors may have these rows as their values
        of = by_memory.get(value.untyped_storage().data_ptr())
        return value if of is None else ReadOnlyRows(value, of.remedy, of._whole)

    return guarded

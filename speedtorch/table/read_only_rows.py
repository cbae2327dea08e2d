"""ReadOnlyRows: a tensor over read-only memory. torch operations that write to it raise."""

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
    """Rows in memory that this process may only read: the system ends a process that writes there.

    A torch operation that writes to the rows, or to a view of them, raises ValueError before the
    write. `apply_`, `map_`, `share_memory_` and DLPack export raise too. Other torch operations
    work. Results in new memory are plain tensors. copy.deepcopy and pickle make plain tensors with
    only the elements of the view.

    Writes through `untyped_storage()`, the `data` of another tensor or torch.from_numpy are not
    checked and end the process.

    Attributes:
        rows: The same rows as a plain tensor. A write to it ends the process.
    """

    rows: Tensor
    remedy: str
    _whole: Tensor
    """The tensor object that `rows` views.

    Pinned memory is unpinned when the pinned tensor object dies, so each view keeps this object.
    """

    def __new__(cls, rows: Tensor, remedy: str, whole: Tensor | None = None) -> ReadOnlyRows:
        """Guards rows."""
        return tensor_of_class(cls, rows.detach())

    def __init__(self, rows: Tensor, remedy: str, whole: Tensor | None = None) -> None:
        """Guards rows. Error messages end with `remedy`."""
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
            for leaf in tree_leaves(written):
                if isinstance(leaf, ReadOnlyRows):
                    raise ValueError(f"{schema_name(func).split('::')[1]}: {name} {leaf.remedy}")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ReadOnlyRows)]
        result = func(*tree_map(_plain, args), **tree_map(_plain, kwargs))
        return tree_map(_guard_of(given), result)

    def tolist(self) -> Any:
        """See Tensor.tolist."""
        return self.rows.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Returns a read-only NumPy array of the same memory."""
        array = self.rows.numpy(force=force)
        array.setflags(write=False)
        return array

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy() if dtype is None else self.numpy().astype(dtype, copy=False)

    def apply_(self, *_: Any, **__: Any) -> NoReturn:
        """Raises ValueError, because torch dispatches no operation that could be checked."""
        raise ValueError(f"the tensor {self.remedy}")

    map_ = map2_ = share_memory_ = apply_

    def __dlpack__(self, *_: Any, **__: Any) -> NoReturn:
        raise BufferError(
            f"__dlpack__: the receiver could write to the memory, which {self.remedy}"
        )

    def __copy__(self) -> Tensor:
        return self.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Returns a writable copy in new memory."""
        memo[id(self)] = copied = self.rows.clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The rows' storage is the whole file. A pickle would contain the whole file, and
        # multiprocessing would move that storage to shared memory.
        data = in_own_storage(self.rows.contiguous().view(-1).view(torch.uint8))
        own = data.view(self.rows.dtype).view(self.rows.shape)
        return own.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.rows)

    def __format__(self, form: str) -> str:
        return format(self.rows, form)


def in_own_storage(values: Tensor) -> Tensor:
    """Returns a tensor of the same memory whose storage has exactly its elements.

    `values` must be contiguous. WholeFields.saved() needs this function, because accelerate saves
    only the first of several tensors with one storage.
    """
    if values.untyped_storage().nbytes() == values.numel() * values.element_size():
        return values
    with torch.inference_mode(False), torch.cuda.device(values.get_device()):
        return from_dlpack(values.__dlpack__())


def _plain(value: Any) -> Any:
    return value.rows if isinstance(value, ReadOnlyRows) else value


def _guard_of(given: list[ReadOnlyRows]) -> Callable[[Any], Any]:
    """Returns a function that guards a result if it shares memory with a tensor of `given`."""
    by_memory = {guard.rows.untyped_storage().data_ptr(): guard for guard in given}

    def guarded(value: Any) -> Any:
        """Returns the value itself, unless it shares memory with guarded rows."""
        if not isinstance(value, Tensor):
            return value
        if value.layout != torch.strided:
            return value.clone()  # Sparse and nested tensors may use these rows as values.
        of = by_memory.get(value.untyped_storage().data_ptr())
        return value if of is None else ReadOnlyRows(value, of.remedy, of._whole)

    return guarded

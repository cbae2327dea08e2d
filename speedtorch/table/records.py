"""Records: rows of several fields each in one stretch of memory, and their movement by row ids."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, Protocol, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor

from speedtorch.files.npy_format import NPY_DTYPES
from speedtorch.memory import host_memory
from speedtorch.memory.placement import Placement
from speedtorch.ops.functions import pinned_gather, pinned_scatter
from speedtorch.ops.shapes import check_span, row_shape
from speedtorch.table.plan_memo import PlanMemo
from speedtorch.table.record_layout import lay_out

__all__ = ["Records", "RowHolder"]

_Self = TypeVar("_Self", bound="Records")  # typing.Self needs Python 3.11.


class RowHolder(Protocol):
    """Who holds rows of a table elsewhere, as the parameter of a step for instance."""

    def bring_home(self) -> None:
        """Writes rows that are newer elsewhere to the table.

        Whoever asks may change the table then: held rows are read again before they are used.
        """


class Records:
    """Rows of fields in memory; the part of HostTable that holds and moves them.

    See HostTable for the arguments and attributes.
    """

    def __init__(
        self,
        rows: int,
        fields: Mapping[str, tuple[int | Sequence[int], torch.dtype]],
        kind: str,
        device: str | int | torch.device | None,
        path: str | os.PathLike[str] | None,
    ) -> None:
        if isinstance(rows, Sequence):
            raise TypeError(f"rows: expected an int, got {rows!r}")
        (self.rows,) = row_shape(rows, "rows")
        layout = lay_out(fields)
        for name, field in layout.fields.items():
            check_span(f"field {name!r}", (self.rows, *field.shape), field.dtype)
        self.fields = {name: (field.shape, field.dtype) for name, field in layout.fields.items()}
        self.record_bytes = layout.record_bytes
        self.nbytes = self.rows * self.record_bytes
        self.dim: int | tuple[int, ...] | None = None
        self.dtype: torch.dtype | None = layout.dtype
        if "weight" in self.fields:
            shape, self.dtype = self.fields["weight"]
            self.dim = shape[0] if len(shape) == 1 else shape
        self._placement: Placement | None = Placement(self.nbytes, kind, device, path)
        data = self._placement.data
        self.memory = self._placement.memory
        self.device = data.device
        self._views = {name: layout.rows_of(data, self.rows, name) for name in self.fields}
        self._record = layout.records_of(data, self.rows)
        self.plans = PlanMemo(self.rows, self.memory)

    holder: weakref.ref[RowHolder] | None = None
    """Who trains rows of the table."""

    def be_held(self, holder: weakref.ref[RowHolder] | None) -> None:
        """Says who trains rows of the table."""
        self.holder = holder

    def bring_home(self) -> None:
        """Brings rows home that a module trains: the table has all rows as they are now."""
        holder = None if self.holder is None else self.holder()
        if holder is not None:
            holder.bring_home()

    def _placed(self) -> Placement:
        if self._placement is None:
            raise ValueError("this table is closed")
        return self._placement

    def __len__(self) -> int:
        return self.rows

    def __contains__(self, field: object) -> bool:
        return field in self.fields

    # Iterating would mean rows to some and fields to others.
    __iter__ = None

    def __getitem__(self, field: str) -> Tensor:
        """All rows of one field, `[rows, *shape]`: a strided view of the records."""
        host_memory.check_owner(self._placed().data)
        self.bring_home()
        return self._rows_of_field(field)

    def rows_of(self, field: str | None) -> Tensor:
        """A field, or (None) all of them, as it is in memory; rows held elsewhere stay there."""
        self._placed()
        return self._record if field is None else self._rows_of_field(field)

    def _rows_of_field(self, field: str) -> Tensor:
        if field not in self.fields:
            raise KeyError(f"no field {field!r} in this table; it has {', '.join(self.fields)}")
        return self._views[field]

    def __repr__(self) -> str:
        fields = ", ".join(
            f"{name} {list(shape)} {str(dtype).removeprefix('torch.')}"
            for name, (shape, dtype) in self.fields.items()
        )
        kind = self.memory if self._placement else "closed"
        return (
            f"{type(self).__name__}({self.rows:,} rows of {fields}; {self.nbytes:,} bytes, {kind})"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a table is not pickled or copied: save() it, and open it by name in the other "
            "process, or fork with memory='registered'"
        )

    @property
    def record(self) -> Tensor:
        """All fields of all rows, `[rows, columns]` of their common dtype, or else uint8."""
        host_memory.check_owner(self._placed().data)
        self.bring_home()
        return self._record

    def gather(
        self,
        index: Tensor,
        field: str | None = None,
        *,
        out: Tensor | None = None,
        plan: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Rows by their ids, as ops.pinned_gather.

        Args:
            index: Row ids, int32 or int64, any shape.
            field: Which field; None: the whole record.
            out: Where to, also on another device than the ids; None: new memory.
            plan: Result of plan_rows for these ids.

        Returns:
            `[*index.shape, *shape]`, or `[*index.shape, columns]` of the record.

        Raises:
            IndexError: An id out of range; on the GPU at a later call or at flush().
            KeyError, ValueError: No such field; misfitting arguments.

        Example:
            >>> import speedtorch
            >>> speedtorch.HostTable(3, 2, memory="plain").gather(torch.tensor([[0], [2]])).shape
            torch.Size([2, 1, 2])
        """
        rows = self.rows_of(field)
        self.bring_home()
        return pinned_gather(rows, index, out=out, plan=plan)

    def scatter(
        self,
        index: Tensor,
        src: Tensor,
        field: str | None = None,
        *,
        accumulate: bool = False,
        plan: Sequence[Tensor] | None = None,
    ) -> None:
        """Writes rows by their ids, as ops.pinned_scatter: the last occurrence of an id wins.

        Args:
            index: Row ids, int32 or int64, any shape.
            src: The rows, `[*index.shape, *shape]`, or `[*index.shape, columns]` of the record.
            field: Which field; None: the whole record.
            accumulate: Add instead, in the order of the ids.
            plan: Result of plan_rows for these ids.

        Raises:
            IndexError: An id out of range; on the GPU at a later call or at flush().
            KeyError, ValueError: No such field; misfitting arguments; adding to records of
                different dtypes.

        Example:
            >>> import speedtorch
            >>> table = speedtorch.HostTable(3, 1, memory="plain")
            >>> table.scatter(torch.tensor([2, 2]), torch.tensor([[1.0], [5.0]]))
            >>> table["weight"].tolist()
            [[0.0], [0.0], [5.0]]
        """
        rows = self.rows_of(field)
        if accumulate and field is None and len({dtype for _, dtype in self.fields.values()}) > 1:
            raise ValueError("scatter: records of different dtypes cannot be added; name a field")
        self.bring_home()
        pinned_scatter(rows, index, src, accumulate=accumulate, plan=plan)

    def numpy(self, field: str = "weight") -> npt.NDArray[Any]:
        """A field as a NumPy array over the same memory, once the GPU's work on it is done.

        Args:
            field: Which field.

        Returns:
            `[rows, *shape]`; writing to it writes to the table.

        Raises:
            KeyError: There is no such field.
            ValueError: The rows are on a GPU, or NumPy has no such dtype.

        Example:
            >>> import speedtorch
            >>> speedtorch.HostTable(2, 1, memory="plain").numpy().tolist()
            [[0.0], [0.0]]
        """
        rows = self[field]
        if rows.is_cuda:
            raise ValueError("numpy: the rows are on a GPU; gather() those that you need")
        if rows.dtype not in NPY_DTYPES.values():
            raise ValueError(
                f"numpy: NumPy has no {rows.dtype}; view {field!r} as integers of the same size"
            )
        self.settle()
        return rows.numpy()

    def settle(self) -> None:
        """Brings rows home and waits for the GPU's work on them: CPU views are current then.

        Raises:
            IndexError: An id that the GPU found out of range.
            RuntimeError: Managed memory in a forked child.

        Example:
            >>> import speedtorch
            >>> speedtorch.HostTable(2, 1, memory="plain").settle()
        """
        self._placed()
        self.bring_home()
        self._placed().settle()

    def flush(self) -> None:
        """Settles, and with memory="file" brings all rows to the disk.

        Raises:
            IndexError: An id that the GPU found out of range.
            OSError: The disk did not take it.

        Example:
            >>> import speedtorch
            >>> speedtorch.HostTable(2, 1, memory="plain").flush()
        """
        self._placed()
        self.bring_home()
        self._placed().flush()

    def close(self) -> None:
        """Flushes and lets the memory go, once no view is left, also if a CUDA graph holds it.

        The file of memory="file" stays. Closing twice is fine; any other use is a ValueError, by a
        module that trains the rows as well.

        Raises:
            IndexError, OSError: As flush(); the table is closed all the same.

        Example:
            >>> import speedtorch
            >>> with speedtorch.HostTable(2, 1, memory="plain") as table:
            ...     table.rows
            2
        """
        if self._placement is None:
            return
        self.bring_home()
        placement, self._placement = self._placement, None
        self.plans.close()
        self._views.clear()
        del self._record
        try:
            placement.flush()
        finally:
            placement.release()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

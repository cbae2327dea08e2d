"""The initialisers of HostTable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from speedtorch.table import row_blocks
from speedtorch.table.records import Records

__all__ = ["Initialisers"]

_Self = TypeVar("_Self", bound="Initialisers")  # typing.Self needs Python 3.11.


class Initialisers(Records):
    """Methods that give a field its first values, in parallel; each returns the table.

    With a seed the bits are the same whatever the number of threads, the kind of memory and the
    other fields; without one it comes from torch's default generator (`torch.manual_seed`).
    `progress` shows a bar on stderr: always, never, or (None) when it takes longer than a moment.
    """

    def zeros_(self: _Self, field: str = "weight", *, progress: bool | None = None) -> _Self:
        """Sets all elements to zero.

        Args:
            field: Which field.
            progress: See the class.

        Returns:
            The table.

        Raises:
            KeyError: There is no such field.

        Example:
            >>> import speedtorch
            >>> speedtorch.HostTable(2, 2).zeros_()["weight"].tolist()
            [[0.0, 0.0], [0.0, 0.0]]
        """
        return self.fill_(False, field, progress=progress)

    def uniform_(
        self: _Self,
        low: float = 0.0,
        high: float = 1.0,
        *,
        field: str = "weight",
        seed: int | None = None,
        progress: bool | None = None,
    ) -> _Self:
        """Draws all elements evenly from `[low, high)`.

        Args:
            low: The lower bound.
            high: The upper bound.
            field: Which field.
            seed: See the class.
            progress: See the class.

        Returns:
            The table.

        Raises:
            KeyError: There is no such field.
            ValueError: `low` above `high`, or a field of integers.

        Example:
            >>> import speedtorch
            >>> table = speedtorch.HostTable(100, 8).uniform_(-1, 1, seed=0)
            >>> bool(table["weight"].abs().max() <= 1)
            True
        """
        if not low <= high:
            raise ValueError(f"uniform_: low must not exceed high, got {low} and {high}")
        function = torch.nn.init.uniform_
        return self.init_(function, low, high, field=field, seed=seed, progress=progress)

    def normal_(
        self: _Self,
        mean: float = 0.0,
        std: float = 1.0,
        *,
        field: str = "weight",
        seed: int | None = None,
        progress: bool | None = None,
    ) -> _Self:
        """Draws all elements from a normal distribution.

        Args:
            mean: Its mean.
            std: Its standard deviation.
            field: Which field.
            seed: See the class.
            progress: See the class.

        Returns:
            The table.

        Raises:
            KeyError: There is no such field.
            ValueError: A negative `std`, or a field of integers.

        Example:
            >>> import speedtorch
            >>> table = speedtorch.HostTable(1000, 8).normal_(5, 0.1, seed=0)
            >>> round(float(table["weight"].mean()), 1)
            5.0
        """
        if not std >= 0:
            raise ValueError(f"normal_: std must be 0 or more, got {std}")
        function = torch.nn.init.normal_
        return self.init_(function, mean, std, field=field, seed=seed, progress=progress)

    def init_(
        self: _Self,
        function: Callable[..., object],
        *args: Any,
        field: str = "weight",
        seed: int | None = None,
        progress: bool | None = None,
        **kwargs: Any,
    ) -> _Self:
        """Runs any function of torch.nn.init, or one like it, on a field.

        Functions that need the whole tensor at once (orthogonal_, eye_, dirac_, sparse_) take a
        copy of the field while they run, and as many threads as they like.

        Args:
            function: Called as function(tensor, *args, **kwargs), on a stand-in of the field's
                shape and on parts of it: it changes the tensor in place and does nothing else.
            *args: Passed on.
            field: Which field.
            seed: See the class.
            progress: See the class.
            **kwargs: Passed on.

        Returns:
            The table.

        Raises:
            KeyError: There is no such field.
            TypeError: `kwargs` holds a generator, or the seed is no int.
            ValueError: Random numbers for a field of integers.

        Example:
            >>> import speedtorch
            >>> table = speedtorch.HostTable(100, 8).init_(torch.nn.init.xavier_uniform_, seed=1)
            >>> bool(table["weight"].abs().max() <= (6 / 108) ** 0.5)
            True
        """
        rows = self[field]
        self.settle()
        row_blocks.draw_rows(rows, function, *args, seed=seed, progress=progress, **kwargs)
        self.settle()
        return self

    def fill_(
        self: _Self, value: Any, field: str = "weight", *, progress: bool | None = None
    ) -> _Self:
        """Copies a number, or one row, to all rows.

        Args:
            value: A number, or a row of the field's shape (a tensor of the field's dtype arrives
                bit for bit).
            field: Which field.
            progress: See the class.

        Returns:
            The table.

        Raises:
            KeyError: There is no such field.
            TypeError: Neither a number nor a row of them.
            ValueError: A row of another shape, of a dtype that loses its kind (complex to real,
                floating to integers), or with numbers beyond the field's dtype.

        Example:
            >>> import speedtorch
            >>> speedtorch.HostTable(2, 3).fill_([1, 2, 3])["weight"].tolist()
            [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]
        """
        rows = self[field]
        given = _as_row(value)
        if not isinstance(value, Tensor) and given.dtype in (torch.float32, torch.complex64):
            # Python's numbers have 64 bits; as float32 some would be infinite already.
            wide = torch.complex128 if given.dtype.is_complex else torch.float64
            given = torch.as_tensor(value, dtype=wide, device="cpu")
        if given.ndim and given.shape != rows.shape[1:]:
            raise ValueError(
                f"fill_: a row of {field!r} has the shape {tuple(rows.shape[1:])}, got "
                f"{tuple(given.shape)}"
            )
        if not torch.can_cast(given.dtype, rows.dtype):
            raise ValueError(f"fill_: {given.dtype} does not go into {field!r} of {rows.dtype}")
        row = given.detach().to(rows.dtype)
        if not _fits(given, row):
            raise ValueError(f"fill_: {value!r} is beyond what {field!r} of {rows.dtype} can hold")
        self.settle()
        row_blocks.fill_rows(rows, row.to(rows.device), progress=progress)
        self.settle()
        return self


def _as_row(value: Any) -> Tensor:
    try:
        given = value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
    except (RuntimeError, TypeError) as error:
        raise TypeError(f"fill_: expected a number or a row of them, got {value!r}") from error
    if given.layout != torch.strided:
        raise TypeError(f"fill_: expected a dense row, got {given.layout}")
    return given


def _fits(given: Tensor, row: Tensor) -> bool:
    """Whether no integer wrapped and no number was cut off when `given` became `row`."""
    if row.dtype == given.dtype:
        return True
    if not (row.dtype.is_floating_point or row.dtype.is_complex):
        return torch.equal(row.to(given.dtype), given)
    numbers, kept = given.to(torch.complex128), row.to(torch.complex128)
    # Some dtypes have no infinity and stop at their largest number instead.
    largest = torch.finfo(row.dtype).max
    small_enough = numbers.real.abs().maximum(numbers.imag.abs()) <= largest
    return bool((~numbers.isfinite() | kept.isfinite() & small_enough).all())

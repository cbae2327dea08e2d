"""Initializes rows of a table in parallel. The values do not depend on the number of threads.

Rows are split into fixed blocks. Each block has its own generator, seeded from the seed and the
block's number. Within a block, torch processes small chunks, each in one thread. A function that
needs the whole tensor is an exception: one call of the function processes a copy of all rows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedtorch.files.threads import threads
from speedtorch.table.progress import progress_bar
from speedtorch.torch_internals import TorchDispatchMode, schema_name, tree_leaves

__all__ = ["Share", "draw_rows", "fill_rows", "rows_of_a_block"]

# A block is one task of one thread: 4 MiB of float32.
_BLOCK_ELEMENTS = 1 << 20
# From 32,768 elements on, torch splits work between threads, which would change the rounding.
_CHUNK_ELEMENTS = 32_767
# Functions that draw all elements in the same way and need no recording. trunc_normal_ could not be
# recorded, because it redraws values out of range. The first recording of any other function takes
# a second, because torch loads its tracing code.
_KNOWN = (torch.nn.init.uniform_, torch.nn.init.normal_, torch.nn.init.trunc_normal_)


class Share(NamedTuple):
    """Rows of a larger table in a smaller table, to draw the values of the larger table."""

    rows: int
    """Rows of the larger table."""
    blocks: Sequence[tuple[range, range]]
    """Pairs of row ranges: in the larger table, and in the smaller table."""


def rows_of_a_block(shape: Sequence[int]) -> int:
    """Returns the number of rows in a block."""
    return max(1, _BLOCK_ELEMENTS // max(1, math.prod(shape)))


def fill_rows(field: Tensor, name: str, value: Any, progress: bool | None) -> None:
    """Copies a number, or one row, to all rows. See HostTable.fill_."""
    row = _row_for(field, name, value)

    def work(rows: Tensor, block: int) -> None:
        """Fills one block; its number does not matter."""
        for chunk in _chunks(rows):
            chunk.copy_(row.expand_as(chunk))

    _in_parallel(field, work, progress)


def draw_rows(
    field: Tensor,
    function: Callable[..., object],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    seed: int | None,
    progress: bool | None,
    share: Share | None = None,
) -> None:
    """Runs a function of torch.nn.init, or a similar one, on all rows. See HostTable.init_."""
    if isinstance(function, partial) and not function.args:  # args would precede the rows
        kwargs = function.keywords | kwargs
        function = function.func
    _check_no_generator(kwargs)
    if seed is None:
        seed = int(torch.randint(2**63 - 1, (), device="cpu"))
    elif isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise TypeError(f"seed: expected an int, got {seed!r}")
    if share is not None:
        _check_share(share, len(field))
    if field.numel() == 0:
        return
    # torch cannot draw float8: draw float32 and round.
    small = field.dtype.is_floating_point and field.dtype.itemsize == 1
    dtype = torch.float32 if small else field.dtype
    if function in _KNOWN:
        steps = [_Step(function, args, kwargs, random=True, overwrites=True)]
    else:
        # The recorded call gets a tensor of the full shape, because xavier's bounds depend on the
        # shape. The tensor has a single element in memory, and nothing is computed.
        rows = len(field) if share is None else share.rows
        target = torch.zeros(1, dtype=dtype, device="cpu").expand(rows, *field.shape[1:])
        recorder = _Recorder(target)
        with suppress(_NotElementwiseError), torch.no_grad(), recorder:
            function(target, *args, **kwargs)
        steps = recorder.steps
    continuous = field.dtype.is_floating_point or field.dtype.is_complex
    if any(step.random for step in steps) and not continuous:
        raise ValueError(
            f"init_: random numbers need a floating or complex field, got {field.dtype}. Use"
            " fill_(), or a field of another dtype."
        )
    if steps:
        _draw_elements(field, dtype, steps, int(seed), progress, share)
    elif share is not None:
        raise NotImplementedError(
            f"{getattr(function, '__name__', function)} needs all rows at once, but this table has"
            " only some. Use an elementwise function (uniform_, normal_, constant_), or load rows."
        )
    else:
        _draw_whole(field, dtype, lambda rows: function(rows, *args, **kwargs), int(seed))


def _check_no_generator(kwargs: dict[str, Any]) -> None:
    """Raises TypeError for a call with a generator."""
    if kwargs.get("generator") is not None:
        raise TypeError(
            "generator: each block of rows has its own generator. Pass seed= to init_, or call"
            " torch.manual_seed first."
        )


def _check_share(share: Share, rows: int) -> None:
    """Raises ValueError unless the blocks cover all `rows` in order, with pairs of equal length."""
    begin = 0
    for whole, local in share.blocks:
        fits = 0 <= whole.start <= whole.stop <= share.rows and len(whole) == len(local)
        if not fits or local.start != begin:
            raise ValueError(
                f"share: the block {(whole, local)} must pair some of the {share.rows} rows of the"
                f" larger table with as many local rows from {begin} on"
            )
        begin = local.stop
    if begin != rows:
        raise ValueError(f"share: its blocks have {begin} rows, but the table has {rows}")


class _Step(NamedTuple):
    """A recorded in-place call that changes all elements of a tensor in the same way."""

    function: Callable[..., object]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: bool
    overwrites: bool

    def __call__(self, values: Tensor, generator: torch.Generator) -> None:
        extra = {"generator": generator} if self.random else {}
        self.function(values, *self.args, **self.kwargs | extra)


class _NotElementwiseError(Exception):
    """The recorded function does not change each element independently of the others."""


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records in-place elementwise calls without running them.

    Any other call clears `steps` and raises _NotElementwiseError.
    """

    def __init__(self, target: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[_Step] = []
        self._target = target

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Tensor:
        _check_no_generator(kwargs or {})
        random = torch.Tag.nondeterministic_seeded in func.tags
        fills = func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)
        alike = random or fills or torch.Tag.pointwise in func.tags
        has_tensors = any(isinstance(leaf, Tensor) for leaf in tree_leaves((args[1:], kwargs)))
        in_place = bool(args) and args[0] is self._target and schema_name(func).endswith("_")
        if not (alike and in_place) or has_tensors:
            self.steps.clear()
            raise _NotElementwiseError
        # Random pointwise calls, such as dropout_, read the old values.
        overwrites = fills or (random and torch.Tag.pointwise not in func.tags)
        self.steps.append(_Step(func, args[1:], kwargs or {}, random, overwrites))
        return self._target


def _draw_elements(
    field: Tensor,
    dtype: torch.dtype,
    steps: list[_Step],
    seed: int,
    progress: bool | None,
    share: Share | None,
) -> None:
    first_seed = _mixed(seed)

    def work(rows: Tensor, block: int) -> None:
        """Draws one block with its own generator."""
        # torch's CPU generator uses only 32 bits of its seed. Consecutive seeds differ in them.
        generator = torch.Generator().manual_seed((first_seed + block) & 0xFFFFFFFF)
        chunks = _chunks(rows)
        buffer = torch.empty(chunks[0].numel(), dtype=dtype, device="cpu")
        for chunk in chunks:
            values = buffer[: chunk.numel()]
            if not steps[0].overwrites:
                values.view(chunk.shape).copy_(chunk)
            for part in torch.split(values, _CHUNK_ELEMENTS):
                for step in steps:
                    step(part, generator)
            chunk.copy_(values.view(chunk.shape))

    _in_parallel(field, work, progress, share)


def _draw_whole(
    field: Tensor, dtype: torch.dtype, function: Callable[[Tensor], object], seed: int
) -> None:
    values = torch.empty(field.shape, dtype=dtype, device="cpu").copy_(field.detach())
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(seed)
        function(values)
    field.detach().copy_(values)


def _mixed(seed: int) -> int:
    """Mixes a seed to 64 bits (SplitMix64's finaliser), so that close seeds become distant."""
    mask = 0xFFFFFFFFFFFFFFFF
    value = (seed + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def _chunks(rows: Tensor) -> Sequence[Tensor]:
    """Splits rows into chunks of whole rows, small enough that torch uses one thread for each."""
    return torch.split(rows, max(1, _CHUNK_ELEMENTS // math.prod(rows.shape[1:])))


class _Block(NamedTuple):
    """Rows that one thread processes with one generator."""

    number: int
    rows: int
    parts: list[tuple[slice, Tensor]]
    """The block's rows that the field has: their places in the block, and their memory."""


def _blocks_of(field: Tensor, share: Share | None) -> list[_Block]:
    share = share or Share(len(field), [(range(len(field)), range(len(field)))])
    size = rows_of_a_block(field.shape[1:])
    blocks: dict[int, _Block] = {}
    for whole, local in share.blocks:
        for number in range(whole.start // size, -(-whole.stop // size)):
            first = number * size
            block = blocks.setdefault(number, _Block(number, min(size, share.rows - first), []))
            begin, end = max(whole.start, first), min(whole.stop, first + size)
            moved = local.start - whole.start
            part = field[begin + moved : end + moved]
            block.parts.append((slice(begin - first, end - first), part))
    return list(blocks.values())


def _on_block(work: Callable[[Tensor, int], None], block: _Block) -> None:
    """Runs `work` on a block. If the field lacks rows of it, runs on a temporary whole block."""
    _, first = block.parts[0]
    if len(first) == block.rows:
        return work(first, block.number)
    whole = first.new_zeros((block.rows, *first.shape[1:]))
    for where, rows in block.parts:
        whole[where] = rows
    work(whole, block.number)
    for where, rows in block.parts:
        rows.copy_(whole[where])


def _in_parallel(
    field: Tensor,
    work: Callable[[Tensor, int], None],
    progress: bool | None,
    share: Share | None = None,
) -> None:
    """Calls work(rows, block number) for every block, in up to torch.get_num_threads() threads."""
    if field.numel() == 0:
        return
    blocks = _blocks_of(field.detach(), share)
    waiting = iter(blocks)  # shared by all threads, so that each block is processed once
    counting = Lock()
    count = min(torch.get_num_threads(), len(blocks))
    with progress_bar(len(field), progress) as bar, threads(count) as pool:

        def run() -> None:
            """Processes blocks from the common iterator until its end, or until an error."""
            try:
                for block in waiting:
                    _on_block(work, block)
                    with counting:
                        bar.update(sum(len(rows) for _, rows in block.parts))
            finally:
                deque(waiting, maxlen=0)  # Empties the iterator, so that no thread begins a block.

        try:
            for task in [pool.begin(run) for _ in range(count)]:
                pool.result(task)
        finally:
            deque(waiting, maxlen=0)  # also if Ctrl-C ends the wait for a thread


def _row_for(rows: Tensor, name: str, value: Any) -> Tensor:
    """Converts a number or a row to the dtype and device of a field's rows."""
    given = value if isinstance(value, Tensor) else _of_numbers(value)
    if given.layout != torch.strided:
        raise TypeError(f"fill_: expected a dense row, got {given.layout}")
    if given.ndim and given.shape != rows.shape[1:]:
        raise ValueError(
            f"fill_: a row of {name!r} has the shape {tuple(rows.shape[1:])}, got "
            f"{tuple(given.shape)}"
        )
    if not torch.can_cast(given.dtype, rows.dtype):
        raise ValueError(f"fill_: {given.dtype} cannot be cast to {rows.dtype} of {name!r}")
    row = given.detach().to(rows.dtype)
    if not _fits(given, row):
        raise ValueError(f"fill_: {value!r} is out of the range of {rows.dtype} of {name!r}")
    return row.to(rows.device)


def _of_numbers(value: Any) -> Tensor:
    try:
        # NumPy keeps Python floats as float64. torch converts them to float32, and some overflow.
        array = np.asarray(value)
        return torch.from_numpy(array.astype(array.dtype.str[1:]))  # in native byte order
    except (RuntimeError, TypeError):
        with suppress(RuntimeError, TypeError, ValueError):  # for dtypes unknown to NumPy
            return torch.as_tensor(value, device="cpu")
        error = ValueError if isinstance(value, int) else TypeError
        raise error(
            f"fill_: expected a number or a row of numbers that torch can store, got {value!r}"
        ) from None


def _fits(given: Tensor, row: Tensor) -> bool:
    """Returns whether no integer wrapped and no number overflowed when `given` became `row`."""
    if row.dtype == given.dtype:
        return True
    if not (row.dtype.is_floating_point or row.dtype.is_complex):
        return bool(row.tolist() == given.tolist())
    numbers, kept = given.to(torch.complex128), row.to(torch.complex128)
    # Some dtypes have no infinity: conversion saturates at their largest number.
    largest = torch.finfo(row.dtype).max
    small_enough = numbers.real.abs().maximum(numbers.imag.abs()) <= largest
    return bool((~numbers.isfinite() | kept.isfinite() & small_enough).all())

"""The registered ops as Python functions, their fake kernels and gradients.

Importing the library `speedtorch._C` registers `torch.ops.speedtorch.*`. These functions are those
ops with defaults and keywords. Public ops run on torch's current stream. The host waits for a GPU
only in synchronize(), in sum_rows() without `distinct`, in the backward of pinned_gather(), and for
a table that the GPU cannot access (in pageable memory). Ids on the CPU are checked before any row
moves. `synchronize` documents the check of ids on a GPU.
"""

from __future__ import annotations

import atexit
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from speedtorch.ops.log_switches import MAX_DUMPED_CALLS
from speedtorch.torch_internals import (
    below_autograd,
    is_forward_mode,
    is_transformed,
    sparse_coo,
    storage_id,
    written_arguments,
)

if MAX_DUMPED_CALLS:
    from speedtorch.ops.op_dump import recorded

__all__ = [
    "optimizer_state_swap",
    "pinned_copy",
    "pinned_gather",
    "pinned_scatter",
    "plan_rows",
    "pool_rows",
    "sum_rows",
    "synchronize",
    "table_ids",
]


def _why_not(error: ImportError) -> str:
    """The remedy for a library that is absent or does not load."""
    package = Path(__file__).parents[1]
    if built := sorted(package.glob("_C*.so")):
        return (
            f"the library {built[0]} does not load with torch {torch.__version__} ({error})."
            " Install torch >= 2.11, or build the library again with `make setup` or"
            " `pip install --no-build-isolation .` in a checkout"
        )
    folders = (Path(folder, "speedtorch") for folder in sys.path)
    if installed := [folder for folder in folders if [*folder.glob("_C*.so")]]:
        return (
            f"Python imports the folder {package}, which has no built library, instead of the"
            f" installed {installed[0]}. Start Python in a folder other than {package.parent}, and"
            " remove that folder from PYTHONPATH"
        )
    return (
        f"the library is not built in {package}. In {package.parent}, run `make setup`, or run"
        " `pip install --no-build-isolation .` and start Python in another folder"
    )


try:
    from speedtorch import _C  # noqa: F401
except ImportError as error:
    raise ImportError(f"speedtorch: {_why_not(error)}") from error


def _checked(op: Any) -> Callable[..., Any]:
    """Wraps an op to raise torch.OutOfMemoryError, which a stable-ABI library cannot throw."""
    if MAX_DUMPED_CALLS:
        op = recorded(op)

    def call(*args: object) -> Any:
        """Runs the op and recognizes errors of memory by their prefix."""
        try:
            return op(*args)
        except RuntimeError as error:
            if ": out of memory: " in str(error):
                raise torch.OutOfMemoryError(str(error)) from None
            raise

    return call


def _overloads(name: str) -> dict[str, Any]:
    """The overloads of an op. Ops with list arguments use the variant that owns its lists."""
    found: dict[str, Any] = {}
    for library in (torch.ops.speedtorch, torch.ops.speedtorch_lists):
        if (packet := getattr(library, name, None)) is not None:
            found |= {overload: getattr(packet, overload) for overload in packet.overloads()}
    return found


class _Ops:
    """The library's ops: `_ops.<op>` and `_ops.<op>.<overload>`."""

    def __getattr__(self, name: str) -> Any:
        overloads = {overload: _checked(op) for overload, op in _overloads(name).items()}
        if "default" not in overloads:
            raise AttributeError(f"speedtorch: the library has no op {name!r}")
        call = overloads.pop("default")
        vars(call).update(overloads)
        setattr(self, name, call)
        return call


_ops = _Ops()
# Tensors that die while the interpreter exits must make no CUDA call.
atexit.register(_ops.stop)


def not_ids(name: str, given: object) -> TypeError:
    """The error for a non-tensor argument in place of ids."""
    return TypeError(
        f"{name}: expected an int32 or int64 tensor, got {type(given).__name__}. Convert a list or"
        " an array of integers with torch.as_tensor(ids, dtype=torch.int64)"
    )


def plan_rows(index: Tensor, rows: int) -> list[Tensor]:
    """Sorts the ids of a batch once, so that all ops on the same ids can share the plan.

    Args:
        index: int32 or int64 ids of any shape, n in all, on the CPU or a GPU.
        rows: Number of rows of the table that the ids index.

    Returns:
        `[unique, inverse, order, offsets, status]` on the device of `index`, all int64. With u
        unique ids: the first u entries of `unique` [n] are the unique ids, ascending (-1 after
        them). `inverse` [n] is the entry of `unique` for each position. `order` [n] lists the
        positions sorted by id, equal ids in index order. Positions
        `order[offsets[k]:offsets[k + 1]]` have the id `unique[k]` (`offsets` [n + 1]). `status` [8]
        begins with the number of ids out of range, the first such position (n if none) and its id
        (0 if none). Then follow u, rows and n. The last two are the first position whose id also
        occurs earlier (n if none), and its id (0 if none).

    Raises:
        IndexError: An id on the CPU is not in [0, rows). For ids on a GPU, the op that uses the
            plan reports the error.
        ValueError: `index` is not int32 or int64 or has 2^31 ids or more, or `rows` is negative.

    Example:
        >>> unique, inverse, order, offsets, status = plan_rows(torch.tensor([7, 2, 7]), rows=10)
        >>> unique.tolist(), inverse.tolist(), order.tolist(), offsets.tolist()
        ([2, 7, -1], [1, 0, 1], [1, 0, 2], [0, 1, 3, 3])
    """
    if not isinstance(index, Tensor):
        raise not_ids("index", index)
    plan: list[Tensor] = _ops.plan_rows(index, rows)
    return plan


plan_batch: Callable[..., list[Tensor]] = _ops.plan_batch
"""Plans a batch for a step: `(index, rows, padding, capacity, held, held_status)`.

Returns the five tensors of plan_rows. The row `padding` (-1: none) is not trained and is not a
unique id. With a padding, `unique` is `[n + 1]` and lists the padding after the unique ids;
`inverse` has the number of unique ids at the padding's positions. With a `capacity` (-1: none),
`inverse` has the capacity there, and ids that do not fit share the place `capacity - 1`.

`held` are the ascending ids of the step before. The plan status `held_status` has the number of
valid entries of `held`; if that status is empty, all entries are valid. With `held`, three pairs
follow the plan. Rows to load: ids and places, including the padding's. Rows to keep: new and old
places. Rows to evict: ids and old places. `status` is then `[12]` and ends with the numbers of rows
named, kept, loaded and evicted. For ids on the CPU the last tensor is a copy of the ids.
"""


plan_parts: Callable[..., list[Tensor]] = _ops.plan_parts
"""Plans the ids of several lookups as one batch: `(parts, rows, padding, handle, held, status)`.

Concatenates `parts`, ids of any shapes on one device, and returns the results of plan_batch without
a capacity. For ids on a GPU, the number() `handle` of a NumbersHandle then names a copy of the
plan's status (-1: no copy).
"""


def pinned_gather(
    table: Tensor, index: Tensor, *, out: Tensor | None = None, plan: Sequence[Tensor] | None = None
) -> Tensor:
    """Copies rows of a table to the device of the ids, or to `out`: `result[i] = table[index[i]]`.

    Rows are copied as bytes. The copy is staged if the GPU cannot access the table, as in pageable
    memory. Without `out`, the result is differentiable with respect to `table`: the gradient is a
    sparse COO tensor on the table's device. If that is the CPU, the backward waits for the GPU.

    Args:
        table: `[rows, ...]` on the CPU, or on the GPU of the result. Any row stride, and any dtype
            except quantized ones, bits and integers of less than a byte; each row is contiguous.
        index: int32 or int64 ids of any shape, on the CPU or on the device of the result.
        out: Contiguous output tensor `[*index.shape, *table.shape[1:]]`. With ids on the CPU and
            `out` on a GPU, the rows are copied to that GPU.
        plan: Result of `plan_rows(index, table.shape[0])`, on the device of the result.

    Returns:
        `out`, or a new tensor of that shape on the device of `index`.

    Raises:
        IndexError: An id is not in [0, rows); see `synchronize` for ids on a GPU.
        ValueError: A shape, dtype, device or stride does not fit, or `out` overlaps another tensor.
        NotImplementedError: The table has a forward-mode tangent, or `out` is given and a tensor
            requires grad outside of torch.no_grad().
        RuntimeError: CUDA failed, or a CUDA graph is captured and a staged copy is needed or ids on
            the CPU are used on a GPU.

    Example:
        >>> table = torch.arange(12.0).reshape(4, 3)
        >>> pinned_gather(table, torch.tensor([2, 0])).tolist()
        [[6.0, 7.0, 8.0], [0.0, 1.0, 2.0]]
    """
    if not isinstance(index, Tensor):
        raise not_ids("index", index)
    _check_tangents("pinned_gather", (table,))
    if out is None:
        made: Tensor
        if plan is not None:
            made = _ops.pinned_gather.planned(table, index, list(plan))
        elif (
            getattr(table, "requires_grad", False)
            or torch.compiler.is_compiling()
            or is_transformed()  # a batched tensor hides that its rows require grad
        ):
            made = _ops.pinned_gather(table, index)
        else:
            made = _gathered(table, index)
        return made
    if plan is None:
        _ops.pinned_gather.out(table, index, out)
    else:
        _ops.pinned_gather.planned_out(table, index, list(plan), out)
    return out


_gathered: Callable[[Tensor, Tensor], Tensor] = _ops.pinned_gather_detached
_MANY_ROWS = 1 << 16


def rows_at(rows: Tensor, places: Tensor) -> Tensor:
    """`rows[places]`, both on one device, for callers that need no gradient of `rows`."""
    # torch's lookup launches one kernel and ours three; only many rows hide the two launches.
    return (_gathered if places.numel() >= _MANY_ROWS else torch.embedding)(rows, places)


def pinned_scatter(
    table: Tensor,
    index: Tensor,
    src: Tensor,
    *,
    accumulate: bool = False,
    plan: Sequence[Tensor] | None = None,
) -> None:
    """Copies rows into a host table in place: `table[index[i]] = src[i]`.

    For equal ids the last one in index order wins, on every device. With `accumulate` their rows
    are added in index order, rounded at each addition, as in `numpy.add.at`.

    Args:
        table: `[rows, ...]` on the CPU, or on the GPU of `src`; each row is contiguous.
        index: int32 or int64 ids of any shape, on the CPU or on the device of `src`.
        src: `[*index.shape, *table.shape[1:]]` of the table's dtype. Its device does the work.
        accumulate: Add instead of replace; float8 dtypes have no addition.
        plan: Result of `plan_rows(index, table.shape[0])`, on the device of `src`.

    Raises:
        IndexError: An id is not in [0, rows); no row has changed. See `synchronize` for ids on a
            GPU.
        ValueError: A shape, dtype, device or stride does not fit, tensors overlap, the table is a
            pinned read-only mapping of a file, or the dtype has no addition.
        NotImplementedError: A tensor requires grad outside of torch.no_grad(), or has a
            forward-mode tangent.
        RuntimeError: CUDA failed, or a CUDA graph is captured and a staged copy is needed or ids on
            the CPU are used on a GPU.

    Example:
        >>> table = torch.zeros(3, 2)
        >>> pinned_scatter(table, torch.tensor([1, 1]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> table.tolist()
        [[0.0, 0.0], [3.0, 4.0], [0.0, 0.0]]
    """
    if not isinstance(index, Tensor):
        raise not_ids("index", index)
    if plan is None:
        _ops.pinned_scatter(table, index, src, accumulate)
    else:
        _ops.pinned_scatter.planned(table, index, src, list(plan), accumulate)


def pinned_copy(dst: Tensor, src: Tensor) -> None:
    """Copies a range of rows, or a whole table, between host memory and a GPU: `dst[:] = src`.

    If the GPU can access the host memory directly, the copy runs at the link's speed without a
    wait. All other copies (both tensors on the CPU, both on GPUs, pageable memory) are torch's own.

    Args:
        dst: `[rows, ...]`, on the CPU or a GPU. Any row stride; each row is contiguous.
        src: The same shape and dtype.

    Raises:
        ValueError: Shapes, dtypes or strides do not fit, the tensors overlap, or dst is a pinned
            read-only mapping of a file.
        NotImplementedError: A tensor requires grad outside of torch.no_grad(), or has a
            forward-mode tangent.
        RuntimeError: CUDA failed, or memory is pageable during the capture of a CUDA graph.

    Example:
        >>> table, rows = torch.zeros(4, 2), torch.ones(2, 2)
        >>> pinned_copy(table[1:3], rows)
        >>> table.tolist()
        [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]
    """
    _ops.pinned_copy(dst, src)


swap_placed: Callable[..., None] = _ops.optimizer_state_swap.placed
"""optimizer_state_swap with places, for callers that pass lists and need no gradients.

Args in order: host, leaving, evict, evict_places, arriving, load, load_places.
"""


exchange_rows: Callable[..., None] = _ops.exchange_rows
"""swap_placed for id lists that the library made; the last id to load may be out of order.

Without places (None), entry i of a list belongs to row i of its tensors. On a GPU only an entry
that is out of range is skipped. Optional arguments follow. `tables`: `host` lists the fields of so
many tables, one after another, and ids number the rows of all of them. `evict_count` and
`load_count`, `[1]` on the device: only so many first entries of each list are moved. With these
counts, a row in both lists is also written to host. `evict_rows`, `load_rows`: the host row of
each entry, if the ids are not host rows. Different ids must have different host rows. Pass both
lists or neither, for one table without counts.
"""


load_rows: Callable[..., list[Tensor]] = _ops.load_rows
"""Loads rows into new memory and evicts others: `(host, leaving, evict, load, evicts=True)`.

The first rows of every field of `leaving` belong to the ids `evict`, and are written to host unless
`evicts` is false. A row in both lists is copied from leaving and not written to host. Returns the
rows `load`, field by field, in the dtypes and on the device of leaving. Both id lists ascend; only
the last id to load may be out of order.
"""


count_batch: Callable[..., list[Tensor]] = _ops.count_batch
"""Plans ids on the device of `like` and counts them: `(parts, like, rows, padding)`.

Returns the five tensors of the plan of the concatenated `parts`, the unique ids without the
padding, and those with it. For ids on the CPU, a private copy of them follows. On a GPU the host
waits for the plan. Raises IndexError if an id is out of range.
"""


load_batch: Callable[..., list[Tensor]] = _ops.load_batch
"""load_rows for ids that the op first plans and counts.

`(host, leaving, evict, parts, rows, padding, evicts=True)`. Returns the results of count_batch for
`parts`, which may be on the CPU, with the loaded rows before the copy of the ids. Raises IndexError
if an id is out of range; no row has moved then.
"""


join_batch: Callable[..., list[Tensor]] = _ops.join_batch
"""Plans ids of a step that has rows already, and loads the rows that it lacks.

`(host, leaving, evict, evict_places, rows, held, parts, table_rows, padding)`. `rows` are the rows
of the ascending ids `held`, field by field, with optionally the padding's row at the end. Returns
the results of count_batch for `parts`, and before the copy the position of each id among the step's
rows. If `held` lacks ids, these follow: all ids, the positions of `held` among them, the new ids,
their positions, and new memory with all rows, field by field. If `host` is empty, the new rows are
not loaded. If evict is not None, the rows `evict` of leaving are written to host, but only if there
are new rows.
"""


append_batch: Callable[..., list[Tensor]] = _ops.append_batch
"""join_batch on the CPU for rows in any order, which appends the new rows.

`(host, leaving, evict, evict_places, rows, ids, table, count, parts, table_rows, padding)`. The
first `count` of `ids` and `rows` are the step's, with the padding. `table` is int64 `[2 ** k + 1]`:
a hash table of the ids, at most half full, and the number of ids in it; empty if there is none yet.
Returns the results of count_batch for `parts`, and before the copy the position of each id among
the step's rows, the new ids, whose positions begin at `count`, and, if the memory was too small,
new `ids`, `table` and `rows`.
"""


exchange_cached: Callable[..., None] = _ops.exchange_cached
"""exchange_rows for one table with some rows in a cache on the device.

`cache` and `hot` follow host. `cache` are the fields of the cache's slots. `hot` is int32
`[rows, 2]`: each row's slot, or -1, and its number of loads. A row with a slot is written back to
the slot and loaded from the slot.
"""


# Not in _ops, because a dump of the last operators should record tables' ops, not file contents.
chunk_digests: Callable[..., Tensor] = torch.ops.speedtorch.chunk_digests.default
"""The CRC-32C of each chunk of uint8 `[n]` on the CPU: `(data, chunk_bytes, by_tables=False)`.

Returns int64 `[chunks]`. Runs in the calling thread, without the GIL.
"""


resident_open: Callable[..., int] = _ops.resident_open
"""Opens slots for records of a file: `(slots, index, file, file_rows)`; returns a handle.

`slots` is uint8 `[slots, bytes of a record]` on the CPU. `index`, uint8 `[slots + 2, 32]` aligned
to 16 bytes, stores the row of each slot. resident_begin_find() needs an index that GPUs can access.
`file` is a descriptor, which the op duplicates. Record r begins at byte r times the bytes of a
record; there are `file_rows` records.
"""


resident_close: Callable[[int], None] = _ops.resident_close
"""Forgets a handle and releases its slots. Does not write changed records to the file."""


resident_slots: Callable[..., tuple[Tensor, Tensor]] = _ops.resident_slots
"""Finds slots: `(handle, rows, changing, lease)`. Reads records without a slot.

Waits for earlier uses of the slots by GPUs. The first `changing` rows then count as changed. Before
a slot is reused for another row, a changed row in it is written to the file. Rows keep their slots
until resident_release(handle, lease). Returns the slots of the rows. The second result has the
errno and the row of a failed file call, EBUSY if too few slots are free, or 0 as errno.
"""


resident_begin_find: Callable[[int, Tensor, int, int], Tensor] = _ops.resident_begin_find
"""Queues a kernel that finds slots of rows on a GPU: `(handle, rows, changing, lease)`.

Returns the slots, which are valid if all rows have slots; see resident_end_find(). Neither the
first `changing` rows nor the others may contain a row twice. Accesses no record.
"""


resident_end_find: Callable[[int, int], bool] = _ops.resident_end_find
"""Ends resident_begin_find: `(handle, lease)`. Returns whether all rows have slots.

They then keep these slots until resident_release(handle, lease). The op waits for the kernel,
unless all rows of the file have slots.
"""


resident_read_ahead: Callable[[int, Tensor], None] = _ops.resident_read_ahead
"""Begins to read records that have no slot into the page cache: `(handle, rows)`. Does not wait.

Ignores invalid rows and errors of the file, and does nothing while three such calls still read.
"""


resident_release: Callable[[int, int], None] = _ops.resident_release
"""Ends a lease of resident_slots: `(handle, lease)`. Does nothing if there is no such lease."""


resident_write: Callable[..., Tensor] = _ops.resident_write
"""Writes changed records to the file: `(handle, rows, forgets)`; of all rows if rows is None.

With `forgets` all slots without a lease are then empty, unless a file call failed. Returns the
errno and the row of a failed file call, or 0 as errno.
"""


resident_counts: Callable[[int], Tensor] = _ops.resident_counts
"""Counts rows in slots, hits, misses, reads, writes, nanoseconds of waits, and rows read ahead."""


numbers_to_host: Callable[..., None] = _ops.numbers_to_host
"""Queues a copy of int64 numbers on a GPU to the CPU: `(numbers, handle)`.

The handle is the number() of a NumbersHandle, which reads the copy.
"""


round_rows: Callable[..., None] = _ops.round_rows
"""Rounds float32 rows to values that 16 bits store: `(rows, ids, key, exponent_bits, at_random)`.

Rounds the first `len(ids)` rows of each field, except rows whose id is negative or 2^63 - 1. A
field's exponent bits are 8 (bfloat16), 5 (float16) or 0 (not rounded). `key` is int64 `[2]`: the
seed, and the step, which the op increments.
"""


merge_rows: Callable[..., list[Tensor]] = _ops.merge_rows
"""Merges two ascending id lists and allocates memory for the rows of both: `(rows, held, more)`.

`held` and `more` have no common id. `rows` are the rows of `held`, field by field, with optionally
one more row without an id at the end. Returns the merged ids, the positions of `held` and of `more`
among them, and new memory for each field. The rows of `held` are copied to that memory.
"""


def carry_rows(
    rows: Sequence[Tensor], places: Tensor, source: Sequence[Tensor], source_places: Tensor
) -> None:
    """Copies `rows[k][places] = source[k][source_places]` for all fields.

    `places` ascend. Both sides are different memory of one device.
    """
    if len(rows) == 1:  # two launches of torch, without the checks of exchange_rows
        rows[0].index_copy_(0, places, source[0].index_select(0, source_places))
        return
    no_rows, no_ids = [field[:0] for field in rows], places[:0]
    exchange_rows(rows, source, places, source_places, no_rows, no_ids, no_ids)


def optimizer_state_swap(
    host: Sequence[Tensor],
    leaving: Sequence[Tensor],
    evict: Tensor,
    arriving: Sequence[Tensor],
    load: Tensor,
    *,
    evict_plan: Sequence[Tensor] | None = None,
    load_plan: Sequence[Tensor] | None = None,
    evict_places: Tensor | None = None,
    load_places: Tensor | None = None,
) -> None:
    """Exchanges the rows of two id lists, weights and optimizer state, in both directions at once.

    For every field k: `host[k][evict] = leaving[k][:len(evict)]` and `arriving[k][:len(load)] =
    host[k][load]`. A row in both lists is copied from `leaving` to `arriving`, and its host copy
    does not change. docs/ops.md shows the op in TorchScript, where lists may be arguments,
    attributes or literals.

    Args:
        host: Fields `[rows, ...]` of one table, on the CPU or on the GPU of the other side.
        leaving: For each field a contiguous tensor `[n, ...]`, n at least `len(evict)`.
        evict: Unique int32 or int64 ids of the rows to write back.
        arriving: For each field a contiguous tensor `[m, ...]`, m at least `len(load)`; further
            rows do not change.
        load: Unique int32 or int64 ids of the rows to load.
        evict_plan: Result of `plan_rows(evict, rows)`, on the device of `arriving`.
        load_plan: Result of `plan_rows(load, rows)`, on the device of `arriving`.
        evict_places: int64 `[len(evict)]`, with `load_places`: row i of evict is
            `leaving[k][evict_places[i]]`, and leaving may have any number of rows. Both id lists
            must then be ascending int64 ids on the device of `arriving`, without plans.
        load_places: int64 `[len(load)]`, unique: row i of load is copied to
            `arriving[k][load_places[i]]`.

    Raises:
        IndexError: An id is not in [0, rows) or occurs twice in its list, ids with places do not
            ascend, or a place is out of range. No row has changed. See `synchronize` for a GPU.
        ValueError: Lists, shapes, dtypes, devices or strides do not fit, tensors overlap, or a host
            field is a pinned read-only mapping of a file.
        NotImplementedError: A tensor requires grad outside of torch.no_grad(), or has a
            forward-mode tangent.
        RuntimeError: CUDA failed, or a CUDA graph is captured and a staged copy is needed or ids on
            the CPU are used on a GPU.

    Example:
        >>> weight = torch.arange(4.0).reshape(4, 1)
        >>> evicted, loaded = torch.tensor([[10.0], [30.0]]), torch.empty(2, 1)
        >>> evict, load = torch.tensor([1, 3]), torch.tensor([3, 0])
        >>> optimizer_state_swap([weight], [evicted], evict, [loaded], load)
        >>> weight.flatten().tolist(), loaded.flatten().tolist()
        ([0.0, 10.0, 2.0, 3.0], [30.0, 0.0])
    """
    for name, ids in (("evict", evict), ("load", load)):
        if not isinstance(ids, Tensor):
            raise not_ids(name, ids)
    sides = [(list(host), list(leaving), list(arriving))]
    if torch.compiler.is_compiling() and 1 < len(host) == len(leaving) == len(arriving):
        # torch.compile clones all but one of several written views of one storage. With dynamic
        # shapes the clones lose their offsets (pytorch#198068), so each field gets its own op.
        sides = [([host[k]], [leaving[k]], [arriving[k]]) for k in range(len(host))]
    one_plan = bool(evict_plan) != bool(load_plan)
    if torch.compiler.is_compiling() and host and arriving and one_plan:
        # AOTInductor cannot pass an empty list, which stands for a missing plan.
        rows, device = host[0].shape[0], arriving[0].device
        evict_plan = evict_plan or plan_rows(evict.to(device), rows)
        load_plan = load_plan or plan_rows(load.to(device), rows)
    for fields, outgoing, incoming in sides:
        if evict_places is None and load_places is None:
            if evict_plan or load_plan:
                plans = list(evict_plan or ()), list(load_plan or ())
                swap = _ops.optimizer_state_swap.planned
                swap(fields, outgoing, evict, plans[0], incoming, load, plans[1])
            else:
                _ops.optimizer_state_swap(fields, outgoing, evict, incoming, load)
        elif evict_places is None or load_places is None or evict_plan or load_plan:
            raise ValueError(
                "optimizer_state_swap: evict_places and load_places must be passed together and"
                " without a plan"
            )
        else:
            swap_placed(fields, outgoing, evict, evict_places, incoming, load, load_places)


def sum_rows(
    rows: Tensor,
    plan: Sequence[Tensor],
    table_rows: int,
    *,
    begin: int = 0,
    distinct: int | None = None,
    source: Tensor | None = None,
) -> Tensor:
    """Sums the rows of each unique id of a batch: the gradient of a lookup.

    The rows of an id are added in index order, on a GPU in groups of 32 from its first row. A sum
    has the same bits whatever else is in the batch. Half precision is summed in float32 and rounded
    once.

    Args:
        rows: `[n, ...]`, float16, bfloat16, float32 or float64. Any row stride; each row is
            contiguous. The rows of ids `begin` to `begin + n`; with `source` any number of rows.
        plan: Result of `plan_rows(index, table_rows)`, on the device of `rows`.
        table_rows: Number of rows of the table that the ids index.
        begin: Number of ids of the batch before those of `rows`; all other ids count as zeros.
        distinct: Number of unique ids. By default read from the plan, which waits for a GPU.
        source: int64 `[n]`, contiguous, on the device of `rows`: ids `begin` to `begin + n` have
            the rows `rows[source]`. For example, all ids of a bag share the bag's row. An entry out
            of range is an error on the CPU and counts as zeros on a GPU.

    Returns:
        `[distinct, ...]`: the sum of the rows of each entry of the plan's `unique`.

    Raises:
        IndexError: The plan was made for a table with another number of rows. For a plan on a GPU,
            the result is zeros and a later call raises, see `synchronize`.
        ValueError: A shape, dtype or device does not fit, the batch has too few ids, `distinct` is
            not the number of unique ids (raised later for a plan on a GPU), or an entry of source
            on the CPU is out of range.
        NotImplementedError: `rows` requires grad outside of torch.no_grad(), or has a forward-mode
            tangent.

    Example:
        >>> plan = plan_rows(torch.tensor([7, 2, 7]), 10)
        >>> sum_rows(torch.tensor([[1.0], [2.0], [4.0]]), plan, 10).tolist()  # of 2 and 7
        [[2.0], [5.0]]
        >>> bags = torch.tensor([0, 0, 1])
        >>> sum_rows(torch.tensor([[1.0], [2.0]]), plan, 10, source=bags).tolist()
        [[1.0], [3.0]]
    """
    if distinct is None:
        distinct = int(plan[4][3])
    summed: Tensor = _ops.sum_rows(rows, list(plan), table_rows, begin, distinct, source)
    return summed


_later_checks: list[Callable[[], Callable[[], None] | None]] = []


def raises_later(check: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Makes synchronize() call a method that raises a GPU's errors, until its object is freed."""
    _later_checks[:] = [method for method in _later_checks if method() is not None]
    _later_checks.append(check)


def table_ids(ids: Tensor, offsets: Tensor, ranges: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """Maps the ids of several features to rows of one table that has the rows of all features.

    Bags are numbered feature by feature in `offsets`, `f * samples + s`, and sample by sample in
    the result, `s * features + f`.

    Args:
        ids: int32 or int64 `[n]`, contiguous: the ids of all bags, in the order of `offsets`.
        offsets: int64 `[features * samples + 1]`, ascending from 0 to n: where each bag begins and
            the last one ends.
        ranges: int64 `[features, 2]`: the first row in the table, and the number of rows, of each
            feature.
        samples: Number of bags of each feature.

    Returns:
        `(rows, bags)`, int64 `[n]` on the device of `ids`: the row and the bag of each id. The row
        is -1 if the id is out of its feature's range.

    Raises:
        ValueError: A shape, dtype or device does not fit, or offsets on the CPU are invalid. (For
            invalid offsets on a GPU, both results are arbitrary.)

    Example:
        >>> offsets, ranges = torch.tensor([0, 2, 2, 3, 4]), torch.tensor([[0, 10], [10, 5]])
        >>> rows, bags = table_ids(torch.tensor([7, 2, 4, 5]), offsets, ranges, samples=2)
        >>> rows.tolist(), bags.tolist()  # of the second feature, 5 is none
        ([7, 2, 14, -1], [0, 0, 1, 3])
    """
    if not isinstance(ids, Tensor):
        raise not_ids("ids", ids)
    rows, bags = _ops.table_ids(ids, offsets, ranges, samples)
    return rows, bags


def pool_rows(
    rows: Tensor, places: Tensor, offsets: Tensor, features: int, *, mean: bool = False
) -> Tensor:
    """Sums or averages the rows of each bag, for several features at once: a pooled lookup.

    The rows of a bag are added in order, as in torch's embedding_bag. Half precision is summed in
    float32 and rounded once. Not differentiable: write a backward of your own with `sum_rows`.

    Args:
        rows: Contiguous `[m, columns]`, float16, bfloat16, float32 or float64.
        places: int64 `[n]`, contiguous: the row of each entry of the bags. A place out of range is
            an error on the CPU and counts as zeros on a GPU.
        offsets: int64 `[features * samples + 1]`, ascending from 0 to n: where each bag begins and
            the last one ends, feature by feature.
        features: Number of features.
        mean: Divide each sum by the number of its entries.

    Returns:
        `[samples * features, columns]`: bag `f * samples + s` is row `s * features + f`. Empty bags
        are zeros.

    Raises:
        ValueError: A shape, dtype or device does not fit, the number of bags is not a multiple of
            `features`, or places or offsets on the CPU are invalid. (For invalid offsets on a GPU,
            the sums are arbitrary.)
        NotImplementedError: `rows` requires grad outside of torch.no_grad(), or has a forward-mode
            tangent.

    Example:
        >>> rows, offsets = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([0, 2, 2, 3, 4])
        >>> pool_rows(rows, torch.tensor([0, 2, 1, 1]), offsets, features=2).tolist()
        [[5.0], [2.0], [0.0], [2.0]]
    """
    pooled: Tensor = _ops.pool_rows(rows, places, offsets, features, mean)
    return pooled


def synchronize(device: torch.device | str | int | None = None) -> None:
    """Waits for a GPU's queued work and reports bad ids that the GPU found.

    A public op that finds a bad id on a GPU moves no row; its result is zeros. The first later op
    that sees the error raises, at the latest synchronize() for this GPU. After this call the CPU
    sees every row that ops on this GPU have written.

    Args:
        device: The GPU to wait for, by default the current one; no wait if it is the CPU.

    Raises:
        IndexError: Since the last report, an op on a GPU received an id out of range, a duplicate
            id where ids must be unique, or a plan of a table with another number of rows.
        ValueError: `distinct` of a sum_rows() on a GPU was not the number of unique ids.
        RuntimeError: A step of an Embedding has named more rows than its capacity, or CUDA failed.

    Example:
        >>> synchronize()
    """
    wait_for_rows(device)
    for method in _later_checks:
        if (check := method()) is not None:
            check()


def wait_for_rows(device: torch.device | str | int | None = None) -> None:
    """Does the work of synchronize() without the checks that modules have registered."""
    # A number is a GPU's index; torch.device(1) raises without that GPU.
    on_cpu = isinstance(device, str | torch.device) and torch.device(device).type == "cpu"
    if not on_cpu and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
    _ops.throw_pending()


# ---- For torch.compile, torch.export and autograd: fake kernels and gradients.


def _plan_rows_fake(index: Tensor, rows: int) -> list[Tensor]:
    count = index.numel()
    lengths = (count, count, count, count + 1, 8)
    return [index.new_empty(length, dtype=torch.int64) for length in lengths]


def _check_meta_mix(*args: Any, **kwargs: object) -> None:
    """Fake kernel of ops without a result; raises if meta tensors are mixed with real ones."""
    if len({tensor.is_meta for tensor in _tensors(args)}) > 1:
        raise ValueError("speedtorch: one op cannot take both meta tensors and real tensors")


def _pinned_gather_fake(table: Tensor, index: Tensor, plan: object = None) -> Tensor:
    _check_meta_mix(table, index, plan)
    return index.new_empty((*index.shape, *table.shape[1:]), dtype=table.dtype)


def _swap_fake(host: list[Tensor], leaving: list[Tensor], evict: Tensor, *rest: Any) -> None:
    _check_meta_mix(host, leaving, evict, *rest)
    arriving = rest[0] if len(rest) == 2 else rest[1]
    written = [*host, *arriving]
    storages = Counter(storage_id(view.untyped_storage()) for view in written)
    for view in written:
        offset = view.storage_offset()
        if isinstance(offset, torch.SymInt) and storages[storage_id(view.untyped_storage())] > 1:
            raise NotImplementedError(
                "torch.ops.speedtorch.optimizer_state_swap: with dynamic shapes torch.compile loses"
                " the offsets of several written views of one storage (pytorch#198068). Call"
                " speedtorch.optimizer_state_swap, or the op once per field"
            )


def _sum_rows_fake(
    rows: Tensor,
    plan: list[Tensor],
    table_rows: int,
    begin: int,
    distinct: int,
    source: Tensor | None = None,
    named: Tensor | None = None,
) -> Tensor:
    _check_meta_mix(rows, plan, source, named)
    return rows.new_empty((distinct, *rows.shape[1:]))


def _table_ids_fake(ids: Tensor, offsets: Tensor, ranges: Tensor, samples: int) -> list[Tensor]:
    _check_meta_mix(ids, offsets, ranges)
    return [torch.empty_like(ids, dtype=torch.int64) for _ in range(2)]


def _pool_rows_fake(
    rows: Tensor, places: Tensor, offsets: Tensor, features: int, mean: bool
) -> Tensor:
    _check_meta_mix(rows, places, offsets)
    return rows.new_empty((offsets.shape[0] - 1, rows.shape[1]))


def _chunk_digests_fake(data: Tensor, chunk_bytes: int, by_tables: bool = False) -> Tensor:
    return data.new_empty(-(-data.shape[0] // chunk_bytes), dtype=torch.int64)


def _explain_move_fake(table: Tensor, ids: int, direction: int, accumulate: bool) -> Tensor:
    return table.new_empty(7, dtype=torch.float64, device="cpu")


_FAKE_KERNELS: dict[str, Callable[..., Any]] = {
    "plan_rows": _plan_rows_fake,
    "pinned_gather": _pinned_gather_fake,
    "pinned_gather_detached": _pinned_gather_fake,
    "pinned_gather.out": _check_meta_mix,
    "pinned_gather.planned": _pinned_gather_fake,
    "pinned_gather.planned_out": _check_meta_mix,
    "sum_rows": _sum_rows_fake,
    "table_ids": _table_ids_fake,
    "pool_rows": _pool_rows_fake,
    "pinned_copy": _check_meta_mix,
    "pinned_scatter": _check_meta_mix,
    "pinned_scatter.planned": _check_meta_mix,
    "optimizer_state_swap": _swap_fake,
    "optimizer_state_swap.planned": _swap_fake,
    "optimizer_state_swap.placed": _swap_fake,
    "check_owner": _check_meta_mix,
    "throw_pending": _check_meta_mix,
    "explain_move": _explain_move_fake,
    "chunk_digests": _chunk_digests_fake,
}
# These ops query or change the process at the call. (Dynamo supports no op that returns a number.)
_OF_THE_PROCESS = (
    *("host_empty", "host_register", "host_unregister", "available_bytes", "memory_stats"),
    *("memory_kind", "registration_seams"),
    *("let_captured_go", "let_orphans_go", "managed_supported", "built_with_cuda"),
    *("stop", "watch_graph", "graph_is_alive", "make_stream", "check_driver", "use_on"),
    *("reserve_range", "open_range", "map_range", "unmap_range", "range_bytes", "leave_range"),
    *("link_launch", "costs", "set_costs", "force_path", "num_sms", "set_num_sms"),
    *("resident_open", "resident_close", "resident_counts", "resident_release"),
    *("resident_read_ahead", "resident_end_find"),
)


# These ops plan and move the rows of a step. No compiled or exported graph contains them.
_OF_STEPS = (
    *("split_plan", "plan_batch", "plan_parts", "plan_fault", "spoil_plan", "diff_ids"),
    *("shard_ids", "requested_ids", "load_rows", "load_batch", "join_batch", "append_batch"),
    *("merge_rows", "exchange_rows"),
    *("exchange_cached", "hold_rows", "clear_rows", "round_rows", "numbers_to_host"),
    *("count_batch", "resident_slots", "resident_write", "resident_begin_find"),
)


def _raise_in_graphs(name: str) -> Callable[..., Any]:
    """Returns a fake kernel that raises: no compiled or exported graph can contain the op."""
    does = "is part of a step" if name in _OF_STEPS else "queries or changes the process"

    def fail(*args: object, **kwargs: object) -> Any:
        """Raises at the trace instead of recording the op."""
        raise NotImplementedError(
            f"torch.ops.speedtorch.{name} {does} and cannot be in a compiled or exported graph."
            " Call it outside of the graph, or with torch.compile in a function under"
            " torch.compiler.disable"
        )

    return fail


_FAKE_KERNELS |= {_name: _raise_in_graphs(_name) for _name in (*_OF_THE_PROCESS, *_OF_STEPS)}

# torch empties a list that it passes to the library (see csrc/core/registration.h). TorchScript
# passes the caller's own list. A kernel in Python receives a copy of the list and passes that on.
_shared_lists = torch.library.Library("speedtorch", "IMPL")  # type: ignore[no-untyped-call]
_own_lists = torch.library.Library("speedtorch_lists", "IMPL")  # type: ignore[no-untyped-call]
for _name, _kernel in _FAKE_KERNELS.items():
    torch.library.register_fake(f"speedtorch::{_name}", _kernel)
    _op, _, _overload = _name.partition(".")
    getattr(_ops, _op)  # looked up now, because torch.compile cannot trace the lookup
    _given = _overloads(_op)[_overload or "default"]
    if _given.namespace == "speedtorch_lists":
        torch.library.register_fake(f"speedtorch_lists::{_name}", _kernel)
        for _key in ("CPU", "CUDA"):
            _shared_lists.impl(_name, _checked(_given), _key)  # type: ignore[no-untyped-call]
        # torch.jit.trace must record the op in `speedtorch`, because the trace runs as TorchScript.
        _traced = getattr(getattr(torch.ops.speedtorch, _op), _overload or "default")
        _own_lists.impl(_name, _traced, "Tracer")  # type: ignore[no-untyped-call]


def _check_tangents(name: str, tensors: Iterable[Tensor]) -> None:
    """Raises NotImplementedError for forward-mode tangents, such as those of torch.func.jvp."""
    if is_forward_mode() and any(
        forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]
        for tensor in tensors
    ):
        raise NotImplementedError(
            f"{name}: forward-mode gradients are not supported. Use reverse mode or"
            " torch.nn.functional.embedding for a lookup, and tensor.detach() for other ops"
        )


def _tensors(arguments: Iterable[object]) -> list[Tensor]:
    """The tensors among an op's arguments, including tensors in lists."""
    parts = (part if isinstance(part, list | tuple) else (part,) for part in arguments)
    return [value for part in parts for value in part if isinstance(value, Tensor)]


class _Gather(torch.autograd.Function):
    """A gather with a sparse gradient: `(op below autograd, table, index, optional plan)`."""

    @staticmethod
    def forward(
        ctx: Any, below: Callable[..., Tensor], table: Tensor, index: Tensor, *plan: list[Tensor]
    ) -> Tensor:
        """Gathers the rows and saves only the ids, because the gradient needs no row."""
        ctx.save_for_backward(index)
        ctx.table_shape, ctx.table_device = table.shape, table.device
        ctx.without_gradient = [None] * (1 + len(plan))
        return below(table, index, *plan)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Returns the gradient of the table as a sparse COO tensor."""
        (index,) = ctx.saved_tensors
        rows = index.reshape(1, -1).to(device=ctx.table_device, dtype=torch.int64)
        values = grad.reshape(rows.shape[1], *ctx.table_shape[1:]).to(ctx.table_device)
        return None, sparse_coo(rows, values, ctx.table_shape), *ctx.without_gradient


def _with_gradient(name: str, op: Any) -> Callable[..., Tensor]:
    """Returns the autograd kernel of a gather."""

    def kernel(keys: Any, table: Tensor, *rest: Any) -> Tensor:
        """Records the gather only if the table needs a gradient."""
        _check_tangents(name, (table,))
        below = partial(op.redispatch, keys & below_autograd)
        if torch.is_grad_enabled() and table.requires_grad:
            made: Tensor = _Gather.apply(below, table, *rest)  # type: ignore[no-untyped-call]
            return made
        return cast(Tensor, below(table, *rest))

    return kernel


def _without_gradient(name: str, op: Any) -> Callable[..., Any]:
    """Returns the autograd kernel of an op without gradients, which raises if one is required."""

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the op below autograd if no tensor needs a gradient."""
        tensors = _tensors((*args, *kwargs.values()))
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise NotImplementedError(
                f"{name}: a tensor of {list(next(t for t in tensors if t.requires_grad).shape)}"
                " requires grad, but the op records no gradient. Pass tensor.detach(), or call it"
                " under torch.no_grad()"
            )
        _check_tangents(name, tensors)
        return op.redispatch(keys & below_autograd, *args, **kwargs)

    return kernel


def _resolved(name: str, op: Any) -> Callable[..., Any]:
    """Returns a writing op's kernel for conjugated views, because torch's would write to copies."""
    written = written_arguments(op)

    def resolve(argument: Any) -> Any:
        """Materializes lazily conjugated or negated tensors."""
        if isinstance(argument, list | tuple):
            return [resolve(value) for value in argument]
        return argument.resolve_conj().resolve_neg() if isinstance(argument, Tensor) else argument

    def kernel(*args: Any) -> Any:
        """Raises if the op would write to a conjugated or negated view."""
        for argument, place in written.items():
            if any(view.is_conj() or view.is_neg() for view in _tensors(args[place : place + 1])):
                raise ValueError(
                    f"{name}: {argument} is a conjugated or negated view, which cannot be written"
                    " to as bytes. Pass .resolve_conj().resolve_neg() or the base tensor"
                )
        return op(*resolve(args))

    return kernel


_AUTOGRAD = {
    **dict.fromkeys(("pinned_gather", "pinned_gather.planned"), _with_gradient),
    **dict.fromkeys(
        (
            *("pinned_gather.out", "pinned_gather.planned_out", "pinned_copy"),
            *("pinned_scatter", "pinned_scatter.planned", "sum_rows", "pool_rows"),
            *("optimizer_state_swap", "optimizer_state_swap.planned"),
            "optimizer_state_swap.placed",
        ),
        _without_gradient,
    ),
}
for _name, _make in _AUTOGRAD.items():
    _op, _, _overload = _name.partition(".")
    for _library, _packets in (
        (_shared_lists, torch.ops.speedtorch),
        (_own_lists, torch.ops.speedtorch_lists),
    ):
        _given = getattr(getattr(_packets, _op, None), _overload or "default", None)
        if _given is None:
            continue
        _library.impl(_name, _make(_op, _given), "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]
        for _key in ("Conjugate", "Negative") if written_arguments(_given) else ():
            _library.impl(_name, _resolved(_op, _given), _key)  # type: ignore[no-untyped-call]

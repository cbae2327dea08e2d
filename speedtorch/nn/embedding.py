"""Embedding: torch.nn.Embedding with its rows in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from speedtorch.memory.placement import MemoryKind
from speedtorch.nn.row_module import Device, RowModule, Rows, RowsOrPath, made_of_rows, recorded
from speedtorch.step.rounding import RoundingMode, StoredAs
from speedtorch.torch_internals import as_plain, not_compiled

__all__ = ["Embedding"]

# The dtypes that sum_rows supports.
_SUMMED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Embedding(RowModule, nn.Embedding):
    """torch.nn.Embedding with its rows and their optimizer state in host memory.

    Arguments and results are those of torch.nn.Embedding. A step computes the numbers that the same
    optimizer computes on the looked-up rows (SparseAdam's rule, for every optimizer). Other rows do
    not change, and all rows share one step count.

    The device holds each row of a step once, from its first lookup until the first training lookup
    after optimizer.step(). This lookup begins a new step: rows that the new step does not name are
    written back to the table, and a remaining gradient is dropped. Without an optimizer.step(), a
    lookup begins a new step if the rows have no gradient, and no backward can still run.

    A backward can still run while the lookup's result is alive in Python or in a graph. (A backward
    that fails on the CPU keeps its graph alive inside torch.) After a zero_grad(), a lookup begins
    a new step even if an old backward can still run; with a capacity, only a lookup of other ids
    does. If the old backward runs before the next optimizer.step(), its rows join the new step.
    Later, or with a capacity, the old backward raises RuntimeError.

    The weight is a parameter of all rows without memory of its own. An operation on it returns the
    result for a plain parameter, or raises an error, in most cases NotImplementedError with the
    remedy. docs/embedding.md lists both kinds, and docs/differences.md lists exceptions.
    weight[ids], with a tensor of ids, is a lookup. Functions of all rows run in host memory, and a
    backward through their results raises. Before the first use of rows, torch.nn.init and in-place
    methods with numbers, such as mul_(0.5), are in most cases only recorded, and run at this use.
    weight.grad is also [num_embeddings, embedding_dim], and zero except for the rows of step_ids.
    The weight keeps the table alive.

    The table allocates memory in attach() or at first use. After an exception in training (out of
    memory, Ctrl-C) each row is as before the step or as after the step, and training can continue.

    Args:
        num_embeddings: Number of rows.
        embedding_dim: Number of columns.
        padding_idx: Id of a row that is never trained.
        max_norm: A lookup scales rows with a larger norm down to this norm.
        norm_type: The p of that norm.
        scale_grad_by_freq: Divide a row's gradient by the number of its ids in the lookup.
        sparse: Pass the optimizer a sparse gradient of the step's rows.
        device: The device of lookup results; the table is in host memory.
        dtype: The dtype of the rows.
        memory: The table's memory, as for HostTable.
        capacity: The maximum of unique rows in a step, without the row of padding_idx. With None,
            any number is allowed, and the host waits for the GPU's count in each step. For several
            ranks, see shard.
        cache: Device bytes for frequently loaded rows and their state, such as "2GiB"; see
            speedtorch.cache. By default there is no cache.
        cache_rows: Ids of the cached rows, the most important first. By default the cache selects
            the rows that steps load most often.
        stored: torch.bfloat16 or torch.float16, the dtype of the weights in the table. Steps train
            them as float32. A mapping also names optimizer state, such as {"weight":
            torch.bfloat16, "exp_avg": torch.bfloat16}.
        rounding: How a step's rows are rounded to 16 bits: "nearest", or "stochastic". Random
            numbers depend only on a seed, the step count and the element of the table.

    Attributes:
        weight: The parameter of all rows, `[num_embeddings, embedding_dim]`.

    Raises:
        MemoryError: The machine has too little memory for this table and the tables that are not
            yet allocated; nothing was allocated. If torch.distributed is initialized, the first use
            raises this error instead.
        NotImplementedError: Rows cannot be on the device ("meta"), or `stored` is combined with
            max_norm.
        RuntimeError: `device` is a GPU, but torch finds no GPU.
        TypeError, ValueError: An argument is invalid: padding_idx is out of range, rows cannot be
            stored as `stored` says, the bytes of `cache` are too few, or cache_rows lacks `cache`.
        IndexError: An id of cache_rows is out of range.

    Example:
        >>> embedding = Embedding(1_000_000, 8)
        >>> embedding(torch.tensor([[4, 999_999], [4, 4]])).sum().backward()
        >>> embedding.weight.grad.shape, embedding.step_ids
        (torch.Size([1000000, 8]), tensor([     4, 999999]))
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Rows | None = None,
        _freeze: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        memory: MemoryKind = "auto",
        capacity: int | None = None,
        cache: int | str | None = None,
        cache_rows: Tensor | None = None,
        stored: StoredAs | None = None,
        rounding: RoundingMode = "stochastic",
    ) -> None:
        RowModule.__init__(**locals())  # all arguments, by their names

    if TYPE_CHECKING:  # torch's __call__ accepts any arguments

        def __call__(self, input: Tensor) -> Tensor:  # noqa: D102
            ...

    def forward(self, input: Tensor) -> Tensor:
        """Looks rows up.

        Args:
            input: int32 or int64 ids of any shape, on the CPU or a GPU.

        Returns:
            `[*input.shape, embedding_dim]` on the module's device.

        Raises:
            TypeError: input is not a tensor, or the module was converted to another dtype.
            RuntimeError: input is neither int32 nor int64, the weight was replaced, or another
                module has begun to train the rows of the same HostTable. Or the step exceeds the
                capacity; if rows are on a GPU, a later call may raise this error instead.
            IndexError: An id is out of range. If rows are on a GPU, a later call may raise instead.
            NotImplementedError: In torch.export, torch.jit, ONNX export or torch.func.
            ValueError: The table is closed.
        """
        if isinstance(input, torch.fx.Proxy):
            return cast(Tensor, recorded(self, Embedding.forward, input))
        if torch.compiler.is_dynamo_compiling():
            return _not_compiled(self, input)
        with as_plain():
            trains, rows, padding = self._check_lookup(input), self.lookups, self.padding_idx
            if not trains and self.max_norm is None:
                return rows.read(input)
            by_freq = self.scale_grad_by_freq
            is_plain = trains and self.max_norm is None and not (by_freq or self.sparse)
            trained = self.trained_rows
            if is_plain and trained.held_dtype in _SUMMED and not trained.adds_in_order():
                return rows.summed(input)
            look_up = rows.rows_of if trains else rows.borrow
            local, held = look_up(input, self.max_norm, self.norm_type)
            # The padding's row is the last. As in torch, -1 means that there is none.
            place = -1 if padding is None else len(held) - 1
            sparse = rows.makes_sparse(requested=self.sparse)
            return torch.embedding(held, local, place, by_freq, sparse)

    @classmethod
    def from_pretrained(
        cls,
        embeddings: RowsOrPath,
        freeze: bool = True,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        *,
        device: Device = None,
        memory: MemoryKind = "auto",
        capacity: int | None = None,
    ) -> Embedding:
        """Creates an Embedding from existing rows.

        `embeddings` is a tensor `[rows, columns]`, which is copied, or a HostTable, which is used
        without a copy. The path of a saved table (`*.safetensors`, `*.npy`) is read without a
        second copy. With `freeze` the rows are not trained. `device` is by default the device of
        a tensor `embeddings`. Other arguments are as for Embedding.

        Raises:
            TypeError: `embeddings` is neither a tensor, a HostTable nor a path.
            ValueError: The rows do not have two dimensions, are sparse or quantized, or the file is
                broken.
            OSError: The file cannot be opened.
            MemoryError: See Embedding.

        Example:
            >>> Embedding.from_pretrained(torch.eye(3))(torch.tensor([2]))
            tensor([[0., 0., 1.]])
        """
        made: Embedding = made_of_rows(**locals())
        return made


_not_compiled = not_compiled(Embedding.forward)

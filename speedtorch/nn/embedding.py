"""Embedding: torch.nn.Embedding with its rows in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from speedtorch.memory.placement import MemoryKind
from speedtorch.nn.row_module import Device, RowModule, Rows, Source, made_of_rows
from speedtorch.step.rounding import RoundingMode, StoredAs
from speedtorch.torch_internals import as_plain, not_compiled

__all__ = ["Embedding"]

# What sum_rows adds up.
_SUMMED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Embedding(RowModule, nn.Embedding):
    """torch.nn.Embedding with its rows and their optimizer state in host memory.

    Arguments and results are those of torch.nn.Embedding, and so are the numbers: those that the
    same optimizer gives when it is stepped with the rows that were looked up (SparseAdam's rule,
    for every optimizer: rows that a step does not look up stay, and there is one step count).

    The device holds each row of a step once, from its first lookup until the lookup that follows
    the optimizer's step. A gradient that is left over then is dropped with the rows; so are
    rows that were looked up before a zero_grad(), if no step has followed. A lookup whose backward
    has not run counts for the step for as long as Python or a graph keeps its result (a backward
    that fails on the CPU keeps its graph in torch itself), unless a zero_grad() and a lookup of
    another batch follow: then its rows are of the step only if its backward comes after all, which
    raises RuntimeError where they have a capacity.

    The weight is a parameter of all rows without memory of its own. Each operation on it returns
    the result of a plain parameter, or raises NotImplementedError with the remedy;
    docs/embedding.md lists both kinds. weight[ids] is a lookup. Functions of all rows run in host
    memory, and a backward through their results raises. torch.nn.init and in-place methods change
    all rows, those of an untouched table at first need. weight.grad is [num_embeddings,
    embedding_dim] as well, and zero except for the rows of step_ids. The weight keeps
    the table when the module is gone.

    The table takes its memory at first need. An exception in training (out of
    memory, Ctrl-C) leaves every row as before the step or as after it, and training can go on.

    Args:
        num_embeddings: Rows.
        embedding_dim: Columns.
        padding_idx: Id of a row that is never trained.
        max_norm: Rows with a larger norm are shortened when they are looked up.
        norm_type: The p of that norm.
        scale_grad_by_freq: Divide a row's gradient by how often the lookup names it.
        sparse: Pass the optimizer a sparse gradient of the step's rows.
        device: The device of lookup results; the table is in host memory.
        dtype: The elements of the rows.
        memory: The table's memory, as for HostTable.
        capacity: The most distinct rows of a step, without that of padding_idx; None for any
            number, which each step waits for. What it bounds on several ranks: see shard.
        cache: Bytes of the device, as "2GiB", for rows that are loaded often, with their state;
            see speedtorch.cache. None: no cache.
        cache_rows: Ids of the rows that the cache has, the most important first; by default those
            that steps load most often.
        stored: torch.bfloat16 or torch.float16: the table has the weights in 16 bits, which steps
            hold and train as float32. A mapping names fields of state, too, as {"weight":
            torch.bfloat16, "exp_avg": torch.bfloat16}.
        rounding: How the rows of a step are rounded to 16 bits after it: "stochastic", by random
            numbers that are the same for a row and a step wherever the row is, or to "nearest".

    Attributes:
        weight: The parameter, which stands for all rows `[num_embeddings, embedding_dim]`.

    Raises:
        MemoryError: The machine has too little memory for this table and those of other modules
            that have yet to take theirs; nothing was taken.
        NotImplementedError: Rows cannot be held on the device ("meta"), or are stored in 16 bits
            with a max_norm.
        ValueError: padding_idx is no row, or rows cannot be stored so.

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

    if TYPE_CHECKING:  # torch's is of any arguments

        def __call__(self, input: Tensor) -> Tensor:  # noqa: D102
            ...

    def forward(self, input: Tensor) -> Tensor:
        """Looks rows up.

        Args:
            input: int32 or int64 ids of any shape, on either device.

        Returns:
            `[*input.shape, embedding_dim]` on the module's device.

        Raises:
            TypeError: input is no tensor, or the module was asked to become of another dtype.
            RuntimeError: input has other numbers than int32 or int64; the weight was replaced.
            IndexError: An id is out of range.
            NotImplementedError: Within torch.export, torch.jit, ONNX export or torch.func.
            ValueError: The table is closed.
        """
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
            place = -1 if padding is None else len(held) - 1
            sparse = rows.gives_sparse(asked=self.sparse)
            return torch.embedding(held, local, place, by_freq, sparse)

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Source,
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
        """Makes an Embedding of rows that exist.

        `embeddings` are `[rows, columns]`, copied; a HostTable, used as it is; or the path of a
        saved one (`*.safetensors`, `*.npy`), read without a second copy. With `freeze` they are
        not trained. All else is as for Embedding.

        Raises:
            ValueError: The rows have no two dimensions, are sparse or quantized, or the file is
                broken.
            MemoryError: As for Embedding.

        Example:
            >>> Embedding.from_pretrained(torch.eye(3))(torch.tensor([2]))
            tensor([[0., 0., 1.]])
        """
        made: Embedding = made_of_rows(**locals())
        return made


_not_compiled = not_compiled(Embedding.forward)

"""EmbeddingBag: torch.nn.EmbeddingBag with its rows in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedtorch.memory.placement import MemoryKind
from speedtorch.nn.row_module import Device, RowModule, Rows, RowsOrPath, made_of_rows, recorded
from speedtorch.step.rounding import RoundingMode, StoredAs
from speedtorch.torch_internals import as_plain, not_compiled

__all__ = ["BagMode", "EmbeddingBag"]

BagMode: TypeAlias = Literal["sum", "mean", "max"]
"""How an EmbeddingBag reduces the rows of a bag to one."""


class EmbeddingBag(RowModule, nn.EmbeddingBag):
    """torch.nn.EmbeddingBag with its rows and their optimizer state in host memory.

    Except for the reduction, EmbeddingBag behaves like Embedding. On a GPU, torch's gradient of
    mode="max" can differ from run to run.

    Args:
        num_embeddings: Number of rows.
        embedding_dim: Number of columns.
        max_norm: A lookup scales rows with a larger norm down to this norm.
        norm_type: The p of that norm.
        scale_grad_by_freq: Divide a row's gradient by the number of its ids in the lookup.
        mode: "sum", "mean" or "max".
        sparse: Pass the optimizer a sparse gradient of the step's rows.
        include_last_offset: Whether offsets end with the number of ids.
        padding_idx: Id of a row that bags do not include and that is never trained.
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

    Raises:
        ValueError: mode is unknown, or as for Embedding.
        TypeError, IndexError, MemoryError, NotImplementedError, RuntimeError: See Embedding.

    Example:
        >>> bag = EmbeddingBag(1000, 8, mode="sum")
        >>> bag(torch.tensor([4, 2, 999]), torch.tensor([0, 1])).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: BagMode = "mean",
        sparse: bool = False,
        _weight: Rows | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        memory: MemoryKind = "auto",
        capacity: int | None = None,
        cache: int | str | None = None,
        cache_rows: Tensor | None = None,
        stored: StoredAs | None = None,
        rounding: RoundingMode = "stochastic",
        _freeze: bool = False,
    ) -> None:
        if mode not in get_args(BagMode):
            raise ValueError(f"mode: expected 'sum', 'mean' or 'max', got {mode!r}")
        RowModule.__init__(**locals())  # all arguments, by their names

    if TYPE_CHECKING:  # torch's __call__ accepts any arguments

        def __call__(  # noqa: D102
            self,
            input: Tensor,
            offsets: Tensor | None = None,
            per_sample_weights: Tensor | None = None,
        ) -> Tensor: ...

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Looks up bags of rows and reduces each bag to one row.

        Args:
            input: int32 or int64 ids, `[ids]` with offsets, or `[bags, ids]`, on the CPU or a GPU.
            offsets: The first position of each bag, `[bags]` integers (`[bags + 1]` with
                include_last_offset).
            per_sample_weights: A factor for each id, in the shape of `input` and the dtype of the
                rows; only with mode="sum".

        Returns:
            `[bags, embedding_dim]` on the module's device.

        Raises:
            TypeError: input, offsets or per_sample_weights is not a tensor, or as for Embedding.
            ValueError: Shapes do not match, or offsets are missing; no row was loaded.
            RuntimeError: A dtype is wrong, or offsets on the CPU are; no row was loaded. (The
                values of offsets on a GPU are not checked.) Or as for Embedding.
            NotImplementedError: per_sample_weights without mode="sum", or as for Embedding.
            IndexError: As for Embedding.
        """
        if isinstance(input, torch.fx.Proxy):
            forward = EmbeddingBag.forward
            return cast(Tensor, recorded(self, forward, input, offsets, per_sample_weights))
        if torch.compiler.is_dynamo_compiling():
            return _not_compiled(self, input, offsets, per_sample_weights)
        with as_plain():
            rows, weights = self.lookups, per_sample_weights
            trains = self._check_lookup(input)
            try:
                self._check_bags(input, offsets, weights)
            except Exception as error:
                self.lookups.fail(error, trains=trains)
                raise
            look_up = rows.rows_of if trains else rows.borrow
            local, held = look_up(input, self.max_norm, self.norm_type)
            padding = None if self.padding_idx is None else len(held) - 1
            offsets = None if offsets is None else offsets.to(local)
            weights = None if weights is None else weights.to(held.device)
            by_freq, last = self.scale_grad_by_freq, self.include_last_offset
            sparse = rows.makes_sparse(requested=self.sparse)
            return F.embedding_bag(
                local, held, offsets, None, 2.0, by_freq, self.mode, sparse, weights, last, padding
            )

    def _check_bags(self, ids: Tensor, offsets: object, weights: object) -> None:
        """Raises the errors of torch's EmbeddingBag before any row is copied."""
        name = type(self).__name__
        if ids.dim() == 1:
            _check_offsets(name, len(ids), offsets, int(self.include_last_offset))
        elif ids.dim() != 2:
            raise ValueError(f"{name}: input must be [ids] or [bags, ids], got {list(ids.shape)}")
        elif offsets is not None:
            raise ValueError(f"{name}: offsets must be None if input is 2-D: its rows are the bags")
        if weights is None:
            return
        name += ": per_sample_weights"
        if not isinstance(weights, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(weights).__name__}")
        if weights.shape != ids.shape:
            raise ValueError(
                f"{name} must have input's shape {[*ids.shape]}, got {[*weights.shape]}"
            )
        if self.mode != "sum":
            raise NotImplementedError(f"{name} need mode='sum', got mode={self.mode!r}")
        if weights.dtype != self.weight.dtype:
            raise RuntimeError(f"{name} must be of {self.weight.dtype}, got {weights.dtype}")

    @classmethod
    def from_pretrained(  # type: ignore[override]  # BagMode is narrower than torch's str
        cls,
        embeddings: RowsOrPath,
        freeze: bool = True,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: BagMode = "mean",
        sparse: bool = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        *,
        device: Device = None,
        memory: MemoryKind = "auto",
        capacity: int | None = None,
    ) -> EmbeddingBag:
        """Creates an EmbeddingBag from existing rows.

        `embeddings`, `freeze` and exceptions are as for Embedding.from_pretrained. Other arguments
        are as for EmbeddingBag.

        Example:
            >>> bag = EmbeddingBag.from_pretrained(torch.eye(3), mode="sum")
            >>> bag(torch.tensor([[2, 0]]))
            tensor([[1., 0., 1.]])
        """
        made: EmbeddingBag = made_of_rows(**locals())
        return made


_not_compiled = not_compiled(EmbeddingBag.forward)


def _check_offsets(name: str, ids: int, offsets: object, last: int) -> None:
    if offsets is None:
        raise ValueError(f"{name}: a 1-D input needs offsets [bags], got None")
    if not isinstance(offsets, Tensor):
        raise TypeError(f"{name}: offsets: expected a tensor, got {type(offsets).__name__}")
    name, kind = f"{name}: offsets", offsets.dtype
    if kind.is_floating_point or kind.is_complex or offsets.layout != torch.strided:
        raise RuntimeError(f"{name}: expected dense integers, got {offsets.layout} of {kind}")
    expected = f"{name} must be [bags{' + 1' * last}]"
    if offsets.dim() != 1:
        raise ValueError(f"{expected}, got {list(offsets.shape)}")
    if len(offsets) < last or (ids and len(offsets) == 0):
        raise RuntimeError(f"{expected} for {ids} ids, got none")
    # Values of offsets on a GPU are not checked, because reading them would wait for the GPU. With
    # invalid offsets, torch's sums and gradients on the CPU would be arbitrary numbers.
    if offsets.is_cpu and len(offsets) > 0:
        values = offsets.detach().numpy()
        falls = (values[1:] < values[:-1]).sum()
        ends = values[-1] == ids if last else values[-1] <= ids
        if values[0] != 0 or falls or not ends:
            end = f"with the number of ids, {ids}" if last else f"within the {ids} ids"
            raise RuntimeError(
                f"{name} must begin with 0, never decrease and end {end}. The first is {values[0]},"
                f" the last is {values[-1]}, and {falls} are less than the one before."
            )

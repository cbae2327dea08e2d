"""EmbeddingBag: torch.nn.EmbeddingBag with its rows in host memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedtorch.nn.row_arguments import (
    Device,
    Rows,
    Source,
    check_bags,
    check_module,
    described,
    not_compiled,
    opened,
)
from speedtorch.nn.row_module import RowModule
from speedtorch.step.row_weight import as_plain

__all__ = ["EmbeddingBag"]


class EmbeddingBag(RowModule, nn.EmbeddingBag):
    """torch.nn.EmbeddingBag with its rows, and what an optimizer keeps of them, in host memory.

    As Embedding in every other respect. On a GPU torch's gradient of mode="max" is not the same in
    every run.

    Args:
        num_embeddings: Rows.
        embedding_dim: Columns.
        max_norm: Rows with a larger norm are shortened when they are looked up.
        norm_type: The p of that norm.
        scale_grad_by_freq: Divide a row's gradient by how often the lookup names it.
        mode: "sum", "mean" or "max".
        sparse: Give the optimizer a sparse gradient of the held rows.
        include_last_offset: Offsets end with the number of ids.
        padding_idx: Id of a row that is left out of the bags and never trained.
        device: Where lookups give their rows; the table is in host memory.
        dtype: The elements of the rows.
        memory: The table's memory, as for HostTable.

    Attributes:
        weight: As for Embedding: it stands for all rows.
        table: The HostTable, which brings held rows home before it is read or written.

    Raises:
        MemoryError, NotImplementedError: As for Embedding.
        ValueError: padding_idx is no row, or there is no such mode.

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
        mode: str = "mean",
        sparse: bool = False,
        _weight: Rows | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        memory: str = "auto",
        _freeze: bool = False,
    ) -> None:
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f"mode: expected 'sum', 'mean' or 'max', got {mode!r}")
        RowModule.__init__(
            self,
            num_embeddings,
            embedding_dim,
            padding_idx,
            _weight,
            _freeze,
            device,
            dtype,
            memory,
        )
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.scale_grad_by_freq = scale_grad_by_freq
        self.mode = mode
        self.sparse = sparse
        self.include_last_offset = include_last_offset

    @not_compiled
    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Looks bags of rows up and reduces each to one.

        Args:
            input: int32 or int64 ids, `[ids]` with offsets, or `[bags, ids]`, on either device.
            offsets: Where each bag begins, `[bags]` integers (one more with include_last_offset).
            per_sample_weights: A factor for each id, with mode="sum" only.

        Returns:
            `[bags, embedding_dim]` on the module's device.

        Raises:
            TypeError: input, offsets or per_sample_weights is no tensor, or as for Embedding.
            ValueError: Shapes do not fit, or offsets are missing; no row has moved.
            RuntimeError: Dtypes or the values of offsets do not fit; no row has moved.
            NotImplementedError: per_sample_weights with another mode, or as for Embedding.
            IndexError: An id is out of range.
        """
        with as_plain():
            trains = self._check_lookup(input)
            check_bags(self, input, offsets, per_sample_weights)
            local, rows, padding = self._rows_for(input, trains, self.max_norm, self.norm_type)
            if offsets is not None:
                offsets = offsets.to(local)
            if per_sample_weights is not None:
                per_sample_weights = per_sample_weights.to(rows.device)
            return F.embedding_bag(
                local,
                rows,
                offsets,
                None,
                2.0,
                self.scale_grad_by_freq,
                self.mode,
                self._gives_sparse(),
                per_sample_weights,
                self.include_last_offset,
                padding,
            )

    def extra_repr(self) -> str:
        """The arguments that differ from their defaults."""
        return described(
            self,
            padding_idx=None,
            max_norm=None,
            norm_type=2.0,
            scale_grad_by_freq=False,
            sparse=False,
            mode=None,
            include_last_offset=False,
        )

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Source,
        freeze: bool = True,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        *,
        device: Device = None,
        memory: str = "auto",
    ) -> EmbeddingBag:
        """Makes an EmbeddingBag of rows that exist; see Embedding.from_pretrained.

        Args:
            embeddings: As for Embedding.from_pretrained.
            freeze: Do not train them.
            max_norm: As for EmbeddingBag.
            norm_type: As for EmbeddingBag.
            scale_grad_by_freq: As for EmbeddingBag.
            mode: As for EmbeddingBag.
            sparse: As for EmbeddingBag.
            include_last_offset: As for EmbeddingBag.
            padding_idx: As for EmbeddingBag.
            device: As for EmbeddingBag.
            memory: As for EmbeddingBag.

        Returns:
            The EmbeddingBag.

        Raises:
            ValueError: As for Embedding.from_pretrained.
            MemoryError: As for EmbeddingBag.

        Example:
            >>> bag = EmbeddingBag.from_pretrained(torch.eye(3), mode="sum")
            >>> bag(torch.tensor([[2, 0]]))
            tensor([[1., 0., 1.]])
        """
        source, shape, device = opened(embeddings, device, memory)
        made = cls(
            *shape,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            mode,
            sparse,
            source,
            include_last_offset,
            padding_idx,
            device,
            memory=memory,
            _freeze=freeze,
        )
        made.trained_rows.store.owned |= source is not embeddings
        return made

    @classmethod
    def from_module(
        cls, module: nn.EmbeddingBag, *, device: Device = None, memory: str = "auto"
    ) -> EmbeddingBag:
        """Makes an EmbeddingBag with the rows and arguments of torch's.

        Args:
            module: Its rows are copied.
            device: As for EmbeddingBag; by default the module's.
            memory: As for EmbeddingBag.

        Returns:
            The EmbeddingBag.

        Raises:
            TypeError: It is another module.
            MemoryError: As for EmbeddingBag.

        Example:
            >>> EmbeddingBag.from_module(torch.nn.EmbeddingBag(10, 4, mode="max")).mode
            'max'
        """
        check_module(module, nn.EmbeddingBag)
        return cls.from_pretrained(
            module.weight,
            not module.weight.requires_grad,
            module.max_norm,
            module.norm_type,
            module.scale_grad_by_freq,
            module.mode,
            module.sparse,
            module.include_last_offset,
            module.padding_idx,
            device=device,
            memory=memory,
        ).train(module.training)
